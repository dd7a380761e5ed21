//! Rules that count what they match, where the operator wants it (`policyCounters`).
//!
//! Of a rule that several were folded into, each value counts, too. A value is found before the tests behind it hold, so
//! only that of the last test is counted where it is asked for; others are looked up once more when all has held.

use tortie_api::calico::PolicyCounters;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Chain, Expr, Rule, Set, SetRef};

use super::change::Change;
use super::frame::is_of_frame;
use super::sets::digest;

/// Whether the operator wants rules to count.
pub fn is_asked_for(state: &NodeState) -> bool {
    state.settings.policy_counters == PolicyCounters::Enabled
}

/// How many bytes a policy may have where this many fit in a transaction: at worst all of its sets are there twice.
pub fn room(state: &NodeState, room: usize) -> usize {
    if is_asked_for(state) { room / 2 } else { room }
}

/// How many keys the sets of programs may have, where this many may if none counts: a counter takes 16 bytes for each
/// processor.
pub fn most_keys(state: &NodeState, most: usize) -> usize {
    if is_asked_for(state) { most / 8 } else { most }
}

/// Has the rules of programs and policies count, if that is asked for.
pub fn take(state: &NodeState, change: &mut Change) {
    if is_asked_for(state) {
        for (_, chain) in change.new_chains_by_name().filter(|(name, _)| !is_of_frame(name)) {
            count(chain);
        }
    }
}

/// Whether it is a lookup of a rule's own set whose elements count.
pub fn is_counting(expr: &Expr) -> bool {
    matches!(expr, Expr::Lookup { set: SetRef::Inline(set), .. } if set.spec.counts)
}

/// What tells the sets of a rule that count from those of others: the chain, the rule, and which of its sets it is.
pub fn name(chain: &str, rule: &Rule, place: usize, set: &Set) -> String {
    let exprs = rule.exprs.iter().enumerate().filter(|(index, _)| *index != place);
    let rest: Vec<_> = exprs.map(|(_, expr)| expr).collect();
    digest(format!("{chain} {rest:?} {set:?}").as_bytes())
}

fn count(chain: &mut Chain) {
    for rule in &mut chain.rules {
        rule.exprs = counted(std::mem::take(&mut rule.exprs));
    }
}

/// The same tests, which then count, and what is done after that.
fn counted(exprs: Vec<Expr>) -> Vec<Expr> {
    let is_test = |expr: &Expr| matches!(expr, Expr::Cmp { .. } | Expr::Range { .. } | Expr::Lookup { .. });
    let end = exprs.iter().rposition(is_test).map_or(0, |last| last + 1);
    let (tests, rest) = exprs.split_at(end);
    let mut counted = Vec::with_capacity(exprs.len() + 1);
    let mut again = Vec::new();
    for (index, test) in tests.iter().enumerate() {
        match counting(test) {
            Some(counting) if index + 1 == end => counted.push(counting),
            Some(counting) => {
                // One field, loaded just before.
                again.extend([tests.get(index.wrapping_sub(1)).cloned(), Some(counting)]);
                counted.push(test.clone());
            }
            None => counted.push(test.clone()),
        }
    }
    counted.extend(again.into_iter().flatten());
    counted.push(Expr::Counter);
    counted.extend_from_slice(rest);
    counted
}

/// The same lookup in a set of the rule's own whose elements count.
fn counting(test: &Expr) -> Option<Expr> {
    let Expr::Lookup { register, set: SetRef::Inline(set), invert: false } = test else { return None };
    let mut set = set.clone();
    set.spec.counts = true;
    Some(Expr::Lookup { register: *register, set: SetRef::Inline(set), invert: false })
}

#[cfg(test)]
mod tests {
    use tortie_kernel::nftables::Verdict;

    use super::*;
    use crate::dataplane::packet_test::{Side, Test, exprs, port_ranges};

    #[test]
    fn values_count_only_what_all_tests_hold_for() {
        let ports = || port_ranges([(80, 80), (443, 443)].into_iter());
        let port = |side| Test::Port { side, ranges: ports(), invert: false };
        let protocols = Test::Protocol { numbers: vec![6, 17], invert: false };
        let tests = exprs(&[protocols, port(Side::Source), port(Side::Destination)]);
        let counted = counted([tests.clone(), vec![Expr::Verdict(Verdict::Accept)]].concat());
        let first = counted.iter().position(is_counting).unwrap();
        assert_eq!(first, tests.len() - 1, "the last test counts where it stands: {counted:?}");
        assert_eq!(counted.iter().filter(|expr| is_counting(expr)).count(), 3, "all three do: {counted:?}");
        assert_eq!(counted[counted.len() - 2..], [Expr::Counter, Expr::Verdict(Verdict::Accept)]);
        let alone = super::counted(vec![Expr::Verdict(Verdict::Drop)]);
        assert_eq!(alone, [Expr::Counter, Expr::Verdict(Verdict::Drop)]);
    }
}

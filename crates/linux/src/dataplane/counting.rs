//! Rules with packet counters, if the operator wants them (`policyCounters`).
//!
//! For a rule that was merged from several rules, each value counts, too. A value is found before the later tests
//! hold, so only the value of the last test is counted where it is tested. The others are looked up again when all
//! tests have matched.

use tortie_api::calico::PolicyCounters;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Chain, Expr, Rule, Set, SetRef};

use super::change::Change;
use super::sets::digest;
use super::skeleton::is_of_skeleton;

/// Whether the operator wants counters.
pub(super) fn is_enabled(state: &NodeState) -> bool {
    state.settings.policy_counters == PolicyCounters::Enabled
}

/// The maximum size of a policy in bytes, given the size of a transaction: in the worst case all of its sets exist
/// twice.
pub(super) fn room(state: &NodeState, room: usize) -> usize {
    if is_enabled(state) { room / 2 } else { room }
}

/// The maximum number of keys of program sets, given the maximum without counters: a counter takes 16 bytes for each
/// processor.
pub(super) fn most_keys(state: &NodeState, most: usize) -> usize {
    if is_enabled(state) { most / 8 } else { most }
}

/// Adds counters to the rules of programs and policies, if requested.
pub(super) fn add_counters(state: &NodeState, change: &mut Change) {
    if is_enabled(state) {
        for (_, chain) in change.new_chains_by_name().filter(|(name, _)| !is_of_skeleton(name)) {
            count(chain);
        }
    }
}

/// Whether it is a lookup in a rule's own set with counting elements.
pub(super) fn is_counting(expr: &Expr) -> bool {
    matches!(expr, Expr::Lookup { set: SetRef::Inline(set), .. } if set.spec.counts)
}

/// The part of a set's name that distinguishes counting sets: the chain, the rule, and the position of the set in the
/// rule.
pub(super) fn name(chain: &str, rule: &Rule, index_of_lookup: usize, set: &Set) -> String {
    let exprs = rule.exprs.iter().enumerate().filter(|(index, _)| *index != index_of_lookup);
    let rest: Vec<_> = exprs.map(|(_, expr)| expr).collect();
    digest(format!("{chain} {rest:?} {set:?}").as_bytes())
}

fn count(chain: &mut Chain) {
    for rule in &mut chain.rules {
        rule.exprs = counted(std::mem::take(&mut rule.exprs));
    }
}

/// The same tests, then the counters, then the action.
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
                // A single field, loaded just before.
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

/// The same lookup in a set of the rule's own with counting elements.
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
    use crate::dataplane::packet_test::{PacketEnd, Test, exprs, port_ranges};

    #[test]
    fn values_count_only_packets_that_match_all_tests() {
        let ports = || port_ranges([(80, 80), (443, 443)].into_iter());
        let port = |side| Test::Port { side, ranges: ports(), invert: false };
        let protocols = Test::Protocol { numbers: vec![6, 17], invert: false };
        let tests = exprs(&[protocols, port(PacketEnd::Source), port(PacketEnd::Destination)]);
        let counted = counted([tests.clone(), vec![Expr::Verdict(Verdict::Accept)]].concat());
        let first = counted.iter().position(is_counting).unwrap();
        assert_eq!(first, tests.len() - 1, "the last test counts where it stands: {counted:?}");
        assert_eq!(counted.iter().filter(|expr| is_counting(expr)).count(), 3, "all three do: {counted:?}");
        assert_eq!(counted[counted.len() - 2..], [Expr::Counter, Expr::Verdict(Verdict::Accept)]);
        let alone = super::counted(vec![Expr::Verdict(Verdict::Drop)]);
        assert_eq!(alone, [Expr::Counter, Expr::Verdict(Verdict::Drop)]);
    }
}

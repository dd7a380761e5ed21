//! Reads what the kernel has for a pod: from its interface, by the number of its program, to the chains of its
//! policies.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::net::{Action, Direction};
use tortie_dataplane::{
    Count, Endpoint, EndpointId, NodeState, ShowError, Shown, ShownList, ShownPart, ShownRule, ShownValue,
};
use tortie_kernel::Result;
use tortie_kernel::nftables::{
    self, CountedElements, CountedRule, Data, Expr, Key, Nft, Rule, Set, SetRef, SetSpec, Table, Value,
    Verdict, element_text, rule_text,
};
use tortie_policy::program::{PolicyId, SetId};

use super::desired_table::DesiredTable;
use super::literals;
use super::sets::Part;
use super::skeleton::{self, FROM_WORKLOAD, TO_WORKLOAD};
use super::slots::Slot;
use super::table::PolicyTable;

/// The maximum number of set values in a rule's text.
const MAX_SPELLED_OUT: usize = 16;
/// The maximum number of reported values of one rule. If there are more, those with a count of zero are left out.
const MAX_VALUES: usize = 4096;

/// More rules than any policy can have.
const MAX_NUMBERS: usize = 100_000;
/// Stands for the interface of a pod that is not recognised. No program is for it.
const UNKNOWN: &str = "(unknown)";

impl PolicyTable {
    /// Reads what the kernel has for a pod.
    pub(super) fn show(
        &mut self,
        state: &NodeState,
        id: &EndpointId,
    ) -> std::result::Result<Shown, ShowError> {
        let unknown = || ShowError::NoEndpoint(id.to_string());
        let endpoint = state.endpoints.get(id).ok_or_else(unknown)?;
        let interface = match &self.recognised {
            Some(recognised) => recognised.interfaces.get(id).cloned(),
            None => Some(endpoint.host_interface.clone()),
        };
        self.read(state, endpoint, interface.as_deref().unwrap_or(UNKNOWN))
            .map_err(|error| ShowError::System { object: id.to_string(), problem: error.to_string() })
    }

    fn read(&mut self, state: &NodeState, endpoint: &Endpoint, interface: &str) -> Result<Shown> {
        let specs = self.nft.set_specs(&self.config.table)?;
        let mut reader = Reader {
            nft: &mut self.nft,
            table: &self.config.table,
            specs,
            ours: self.kernel.as_ref(),
            desired_table: &self.desired_table,
            state,
            policies: endpoint.program.policy_ids().collect(),
            shown: Shown {
                read_from: format!("nftables table inet {}, interface {}", self.config.table, interface),
                counting: Some(super::counting::is_enabled(state)),
                sets: names_of_sets(state, endpoint),
                ..Shown::default()
            },
        };
        if reader.ours.is_none() {
            let remark = "what Tortie puts into the table is not in force yet: nothing was compared with it";
            reader.shown.remarks.push(remark.to_owned());
        }
        for slot in Slot::OF_PODS {
            reader.slot(slot, interface)?;
        }
        Ok(reader.shown)
    }
}

/// The nftables sets that an endpoint's rules can name.
fn names_of_sets(state: &NodeState, endpoint: &Endpoint) -> BTreeMap<String, SetId> {
    let policies = endpoint.program.policy_ids().filter_map(|id| state.policies.get(id));
    let ids: BTreeSet<&SetId> = policies.flat_map(|rules| rules.set_ids()).collect();
    let names = |id: &SetId| Part::ALL.map(|part| (part.name(id), id.clone()));
    ids.into_iter().flat_map(names).collect()
}

struct Reader<'a> {
    nft: &'a mut Nft,
    table: &'a str,
    specs: BTreeMap<String, SetSpec>,
    /// The table as last written, if known.
    ours: Option<&'a Table>,
    desired_table: &'a DesiredTable,
    state: &'a NodeState,
    policies: BTreeSet<&'a PolicyId>,
    shown: Shown,
}

impl Reader<'_> {
    /// Reads the rules for packets of one direction.
    fn slot(&mut self, slot: Slot, interface: &str) -> Result<()> {
        let before = match slot {
            Slot::FromWorkload => FROM_WORKLOAD,
            _ => TO_WORKLOAD,
        };
        self.list(before, slot.direction(), ShownPart::BeforePolicy)?;
        let (programs, chains) = slot.maps();
        let number = self.find(programs, &Key::interface(interface))?;
        let Some(Data::Number(number)) = number else {
            return self.closed(slot, format!("{interface} has no program in map {programs}"));
        };
        match self.find(chains, &skeleton::program_key(number))? {
            Some(Data::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain))) => {
                self.chains(chain, slot.direction())
            }
            _ => {
                self.closed(slot, format!("the number {number} of {interface} leads nowhere in map {chains}"))
            }
        }
    }

    fn closed(&mut self, slot: Slot, why: String) -> Result<()> {
        let packets = match slot.direction() {
            Direction::Ingress => "packets to the pod",
            Direction::Egress => "packets from the pod",
        };
        self.shown.remarks.push(format!("{why}: all new {packets} are dropped"));
        Ok(())
    }

    /// The value of a key in a map.
    fn find(&mut self, map: &str, key: &Key) -> Result<Option<Data>> {
        Ok(self.elements(map)?.elements.get(key).and_then(|value| value.data().cloned()))
    }

    fn elements(&mut self, set: &str) -> Result<CountedElements> {
        match self.specs.get(set) {
            Some(spec) => self.nft.counted_elements(self.table, set, spec),
            None => Ok(CountedElements::default()),
        }
    }

    /// Reads a program's chains, each with those of the policies that it jumps to.
    fn chains(&mut self, first: String, direction: Direction) -> Result<()> {
        let mut next = Some(first);
        let mut seen = BTreeSet::new();
        while let Some(chain) = next.take().filter(|chain| seen.insert(chain.clone())) {
            for (verdict, comment) in self.list(&chain, direction, ShownPart::Program)? {
                match verdict {
                    Verdict::Goto(chain) => next = Some(chain),
                    Verdict::Jump(chain) if seen.insert(chain.clone()) => {
                        let part = match self.policy(&comment) {
                            Some(policy) => ShownPart::Policy(policy.clone()),
                            None => ShownPart::Program,
                        };
                        self.list(&chain, direction, part)?;
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Reads a chain, and returns the targets of its rules with their comments.
    fn list(&mut self, chain: &str, direction: Direction, part: ShownPart) -> Result<Vec<(Verdict, String)>> {
        let listed = self.nft.counted_rules(self.table, chain)?;
        let verdicts = listed.iter().filter_map(|CountedRule { rule, .. }| match rule.exprs.last() {
            Some(Expr::Verdict(verdict)) => Some((verdict.clone(), rule.comment.clone())),
            _ => None,
        });
        let verdicts = verdicts.collect();
        let ours = self.ours.map(|ours| ours.chains.get(chain).map_or(&[][..], |chain| &chain.rules));
        if let Some(ours) = ours {
            self.shown.remarks.extend(missing(chain, ours, &listed));
        }
        let mut rules = Vec::with_capacity(listed.len());
        for listed in &listed {
            let differs = ours.is_some_and(|ours| !ours.contains(&listed.rule));
            let mut rule = ShownRule { differs, ..self.rule(listed, direction)? };
            if let ShownPart::Policy(id) = &part {
                rule.policy.get_or_insert_with(|| id.clone());
            }
            rules.push(rule);
        }
        let words = match part {
            ShownPart::BeforePolicy => before_policy(direction, self.state),
            ShownPart::Program | ShownPart::Policy(_) => String::new(),
        };
        let list = ShownList { name: chain.to_owned(), direction, part, words, rules };
        self.shown.lists.push(list);
        Ok(verdicts)
    }

    fn rule(&mut self, listed: &CountedRule, direction: Direction) -> Result<ShownRule> {
        let CountedRule { rule, count } = listed;
        let (policy, numbers) = self.origin(&rule.comment, direction);
        let (spelled_out, values) = self.spell_out(rule)?;
        Ok(ShownRule {
            text: rule_text(&spelled_out),
            comment: rule.comment.clone(),
            policy,
            numbers,
            count: count.map(shown),
            values,
            differs: false,
        })
    }

    /// The rule with the values of its own sets, and their counts.
    fn spell_out(&mut self, rule: &Rule) -> Result<(Rule, Vec<ShownValue>)> {
        let (mut exprs, mut values) = (Vec::<Expr>::new(), Vec::new());
        let mut tested: Vec<(Expr, Set)> = Vec::new();
        for expr in &rule.exprs {
            let Expr::Lookup { register, set: SetRef::Named(name), invert } = expr else {
                exprs.push(expr.clone());
                continue;
            };
            let is_literal = name.starts_with(literals::PREFIX);
            let Some(spec) = self.specs.get(name).filter(|spec| is_literal || spec.counts).cloned() else {
                exprs.push(expr.clone());
                continue;
            };
            let elements = self.elements(name)?;
            if spec.counts {
                let from = self.desired_table.origins(name, actions(rule), self.state);
                let from = |key: &Key| from.as_ref().map_or_else(Vec::new, |from| from(key));
                values.extend(counted_values(&spec, &elements, from));
            }
            let set = Set { spec: SetSpec { counts: false, ..spec }, elements: elements.elements };
            // It tests the same field with the same values, and exists only to count them.
            if let Some(load) = exprs.last()
                && tested.iter().any(|before| before.0 == *load && before.1 == set)
            {
                exprs.pop();
                continue;
            }
            tested.extend(exprs.last().map(|load| (load.clone(), set.clone())));
            let set = match is_literal && set.elements.len() <= MAX_SPELLED_OUT {
                true => SetRef::Inline(Box::new(set)),
                false => SetRef::Named(name.clone()),
            };
            exprs.push(Expr::Lookup { register: *register, set, invert: *invert });
        }
        Ok((Rule { exprs, comment: String::new() }, values))
    }

    /// The policy and the rule numbers in a rule's comment.
    fn origin(&self, comment: &str, direction: Direction) -> (Option<PolicyId>, Vec<usize>) {
        for id in &self.policies {
            let name = format!("{id} {direction:?} rule ");
            if let Some(numbers) = comment.strip_prefix(&name).and_then(numbers) {
                return (Some((*id).clone()), numbers);
            }
        }
        (self.policy(comment).cloned(), Vec::new())
    }

    /// The policy of this name, which may have been truncated.
    fn policy(&self, comment: &str) -> Option<&PolicyId> {
        let is = |id: &&&PolicyId| {
            let name = id.to_string();
            name == comment || (comment.len() + 4 > Rule::MAX_COMMENT_LENGTH && name.starts_with(comment))
        };
        self.policies.iter().find(is).copied()
    }
}

/// The processing of a pod's packets before policy.
fn before_policy(direction: Direction, state: &NodeState) -> String {
    match direction {
        Direction::Ingress => {
            "the node itself reaches its pods; packets of established connections pass, and what \
             belongs to no connection is dropped"
                .to_owned()
        }
        Direction::Egress => format!(
            "no tunnels, and nothing that is not from the pod's own address; packets of established connections pass, \
             and what belongs to no connection is dropped. To its own node, after policy: \
             defaultEndpointToHostAction {:?}",
            state.settings.endpoint_to_host
        ),
    }
}

/// The rules missing from a chain.
fn missing(chain: &str, ours: &[Rule], listed: &[CountedRule]) -> Option<String> {
    let missing = ours.iter().filter(|rule| !listed.iter().any(|listed| listed.rule == **rule)).count();
    let same_order = ours.iter().eq(listed.iter().map(|listed| &listed.rule));
    match missing {
        0 if same_order || listed.len() > ours.len() => None,
        0 => Some(format!("chain {chain} has its rules in another order than Tortie put them there")),
        missing => {
            Some(format!("chain {chain} lacks {missing} of the {} rules that Tortie put there", ours.len()))
        }
    }
}

/// The values of a set with counting elements.
fn counted_values(
    spec: &SetSpec,
    elements: &CountedElements,
    from: impl Fn(&Key) -> Vec<String>,
) -> Vec<ShownValue> {
    let all = elements.elements.len() <= MAX_VALUES;
    let count = |key: &Key| elements.counts.get(key).copied();
    let listed = elements.elements.iter();
    let listed = listed.filter(|(key, _)| all || count(key).is_some_and(|count| count.packets > 0));
    let value = |(key, value): (&Key, &Value)| ShownValue {
        text: element_text(&spec.key, key, value),
        count: count(key).map(shown),
        from: from(key),
    };
    listed.take(MAX_VALUES).map(value).collect()
}

/// The possible policy actions of a rule.
fn actions(rule: &Rule) -> &'static [Action] {
    match rule.exprs.last() {
        Some(Expr::Verdict(Verdict::Accept)) => &[Action::Allow],
        Some(Expr::Verdict(Verdict::Goto(_))) => &[Action::Pass],
        Some(Expr::Verdict(Verdict::Drop) | Expr::Reject(_)) => &[Action::Deny, Action::Pass],
        _ => &[],
    }
}

fn shown(nftables::Count { packets, bytes }: nftables::Count) -> Count {
    Count { packets, bytes }
}

/// Parses `1, 3-5`.
fn numbers(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.split(", ") {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last.saturating_sub(first) >= MAX_NUMBERS {
            return None; // nobody has so many rules: somebody else has written it
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_numbers_are_read_back() {
        assert_eq!(numbers("1, 3-5, 9"), Some(vec![1, 3, 4, 5, 9]));
        assert_eq!(numbers("1, x"), None);
        assert_eq!(numbers(""), None);
        assert_eq!(numbers("1-18446744073709551614"), None);
    }
}

//! What is in force for a pod as text: each rule in words, with the system's rules below it.

use std::collections::BTreeSet;

use tortie_agent::control::ShownEndpoint;
use tortie_api::calico::FelixConfiguration;
use tortie_api::net::{Action, Direction};
use tortie_dataplane::{Count, Shown, ShownList, ShownPart, ShownRule};
use tortie_policy::program::{EndOfTier, PolicyId};

use super::ShownPod;
use crate::explain::{DENIED, FAINT, coloured};
use crate::output;
use crate::words::{self, Meanings};

pub(super) fn print(found: &ShownPod, sets: &Meanings, counters: bool) {
    for shown in &found.endpoints {
        let endpoint = &shown.asked.endpoint;
        let addresses: Vec<_> = endpoint.addresses.iter().map(ToString::to_string).collect();
        output::line(&format!("pod {} on node {}: {}", shown.id, found.node, addresses.join(", ")));
        for condition in &shown.conditions {
            warn(&format!("the node reports {}: {}", condition.reason, condition.text()));
        }
        let nothing = Shown::default();
        let system = match &shown.system {
            Ok(system) => system,
            Err(error) => {
                warn(&error.to_string());
                &nothing
            }
        };
        if !system.read_from.is_empty() {
            output::line(&format!("read from {}", system.read_from));
        }
        system.remarks.iter().for_each(|remark| warn(remark));
        if counters {
            say_of_counters(system);
        }
        for direction in [Direction::Ingress, Direction::Egress] {
            Page { shown, system, sets, counters, direction, printed: BTreeSet::new() }.print();
        }
        legend(system, sets);
    }
}

fn warn(text: &str) {
    output::line(&format!("{} {text}", coloured(DENIED, "!")));
}

fn say_of_counters(system: &Shown) {
    match system.counting {
        Some(true) => output::line(
            "counted: the packets that policy evaluates, which are the first ones of each connection",
        ),
        Some(false) => output::line(&format!(
            "the rules do not count: the annotation {}: Enabled of FelixConfiguration default turns that on",
            FelixConfiguration::POLICY_COUNTERS
        )),
        None => output::line("the rules of this system cannot count"),
    }
}

/// The note after a tier that decides everything.
const NEVER: &str = ": never evaluated, because no packet gets past the previous tier";

/// Longer rules of the system are truncated.
const MAX_CHARACTERS: usize = 400;

/// One direction of an endpoint.
struct Page<'a> {
    shown: &'a ShownEndpoint,
    system: &'a Shown,
    sets: &'a Meanings,
    counters: bool,
    direction: Direction,
    /// The printed rules of the system, by the indices of their lists and their own.
    printed: BTreeSet<(usize, usize)>,
}

impl<'a> Page<'a> {
    fn print(mut self) {
        output::line(match self.direction {
            Direction::Ingress => "\ninto the pod",
            Direction::Egress => "\nout of the pod",
        });
        self.before_policy();
        let shown = self.shown;
        let program = &shown.asked.endpoint.program;
        let mut reached = true;
        for tier in program.tiers(self.direction) {
            output::line(&format!("  tier {}{}", tier.name, if reached { "" } else { NEVER }));
            tier.policies.iter().for_each(|id| self.policy(id));
            let end = match tier.end {
                EndOfTier::Deny => "what no rule of it decides is denied",
                EndOfTier::Pass => "packets that no rule of it decides continue",
            };
            output::line(&format!("    end of tier {}: {end}", tier.name));
            self.rules(|rule| rule.comment == format!("end of tier {}", tier.name), 6);
            reached &= tier.end == EndOfTier::Pass || tier.policies.iter().any(|id| self.passes(id));
        }
        output::line(&format!("  profiles{}", if reached { "" } else { NEVER }));
        program.profiles.iter().for_each(|id| self.policy(id));
        output::line("    what none of them allows is denied");
        self.rules(|rule| ["no profile allows it", "closed"].contains(&rule.comment.as_str()), 6);
        self.others();
    }

    /// Whether a policy may pass what its tier would deny at its end.
    fn passes(&self, id: &PolicyId) -> bool {
        let rules = self.shown.asked.policies.iter().find(|(of, _)| of == id);
        rules.is_some_and(|(_, rules)| {
            rules.direction(self.direction).iter().any(|rule| rule.action == Action::Pass)
        })
    }

    fn before_policy(&mut self) {
        for (list_number, list) in self.lists().filter(|(_, list)| list.part == ShownPart::BeforePolicy) {
            output::line(&format!("  before policy: {}{}", list.words, in_list(list)));
            for (index, rule) in list.rules.iter().enumerate() {
                self.printed.insert((list_number, index));
                self.rule(rule, 6);
            }
        }
    }

    fn policy(&mut self, id: &PolicyId) {
        let chain = self.lists().find(|(_, list)| list.part == ShownPart::Policy(id.clone()));
        output::line(&format!("    {id}{}", chain.map_or_else(String::new, |(_, list)| in_list(list))));
        let Some((_, rules)) = self.shown.asked.policies.iter().find(|(of, _)| of == id) else {
            output::line("      it is not known: it denies everything");
            return self.rules(|rule| rule.policy.as_ref() == Some(id), 8);
        };
        // The rules that lead to it; or a rule of the system if it is unknown which of its rules that represents.
        let of_all = |rule: &ShownRule| rule.policy.as_ref() == Some(id) && rule.numbers.is_empty();
        let of_single = |rule: &ShownRule| rule.policy.as_ref() == Some(id) && !rule.numbers.is_empty();
        if self.lists().flat_map(|(_, list)| &list.rules).any(of_single) {
            self.rules(of_all, 6);
        }
        let rules = rules.direction(self.direction);
        if rules.is_empty() {
            output::line("      no rules for this direction");
        }
        for (number, rule) in (1..).zip(rules) {
            output::line(&format!("      {number} {}", words::rule(rule, self.sets)));
            let is_of_it =
                |rule: &ShownRule| rule.policy.as_ref() == Some(id) && rule.numbers.contains(&number);
            self.folded(is_of_it);
            self.rules(is_of_it, 8);
        }
        self.rules(of_all, 6);
    }

    /// Prints the earlier rule whose system rule also represents this one.
    fn folded(&self, wanted: impl Fn(&ShownRule) -> bool) {
        let mut with = BTreeSet::<usize>::new();
        for (list_number, list) in self.lists() {
            let rules = list.rules.iter().enumerate();
            let printed = rules.filter(|(index, _)| self.printed.contains(&(list_number, *index)));
            with.extend(
                printed
                    .filter(|(_, rule)| wanted(rule))
                    .filter_map(|(_, rule)| rule.numbers.first().copied()),
            );
        }
        for number in with {
            output::line(&coloured(FAINT, &format!("{:8}together with rule {number}", "")));
        }
    }

    /// Prints rules of the system that belong to no policy, or to several.
    fn others(&mut self) {
        let left = self.lists().any(|(list_number, list)| {
            (0..list.rules.len()).any(|index| !self.printed.contains(&(list_number, index)))
        });
        if left {
            output::line(
                "  other rules of the system, such as those that stand for rules of several policies",
            );
            self.rules(|_| true, 6);
        }
    }

    /// Prints matching rules of the system that have not been printed yet.
    fn rules(&mut self, wanted: impl Fn(&ShownRule) -> bool, indent: usize) {
        for (list_number, list) in self.lists() {
            for (index, rule) in list.rules.iter().enumerate().filter(|(_, rule)| wanted(rule)) {
                if self.printed.insert((list_number, index)) {
                    self.rule(rule, indent);
                }
            }
        }
    }

    /// The lists of this direction, with their indices.
    fn lists(&self) -> impl Iterator<Item = (usize, &'a ShownList)> + use<'a> {
        let direction = self.direction;
        self.system.lists.iter().enumerate().filter(move |(_, list)| list.direction == direction)
    }

    fn rule(&self, rule: &ShownRule, indent: usize) {
        let is_named = rule.policy.is_some() || rule.comment.is_empty();
        let comment = if is_named { String::new() } else { format!("   # {}", rule.comment) };
        let count = match rule.count.filter(|_| self.counters) {
            Some(count) => format!("   {}", counted(count)),
            None => String::new(),
        };
        let differs =
            if rule.differs { coloured(DENIED, "   ! not what Tortie put there") } else { String::new() };
        let text = coloured(FAINT, &format!("{:indent$}{}{comment}", "", shortened(&rule.text)));
        output::line(&format!("{text}{count}{differs}"));
        if self.counters {
            self.values(rule, indent + 2);
        }
    }

    /// Prints the counts of single values.
    fn values(&self, rule: &ShownRule, indent: usize) {
        let is_hit = |count: &Count| count.packets > 0;
        let mut without = 0u64;
        for value in &rule.values {
            let Some(count) = value.count.filter(is_hit) else {
                without += 1;
                continue;
            };
            let from = match value.from.as_slice() {
                [] => String::new(),
                from => format!("   # {}", from.join("; ")),
            };
            output::line(&format!("{:indent$}{}   {}{from}", "", value.text, counted(count)));
        }
        if without > 0 {
            output::line(&format!("{:indent$}{} never", "", output::count(without, "value")));
        }
    }
}

/// Truncates: an ACL may have thousands of addresses, which only the JSON output lists completely.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARACTERS) {
        Some((end, _)) => format!("{}… ({} characters more)", &text[..end], text[end..].chars().count()),
        None => text.to_owned(),
    }
}

fn counted(Count { packets, bytes }: Count) -> String {
    format!("{}, {}", output::count(packets, "packet"), output::count(bytes, "byte"))
}

fn in_list(list: &ShownList) -> String {
    coloured(FAINT, &format!("   [{}]", list.name))
}

/// Prints the meaning of the sets that the system's rules name.
fn legend(system: &Shown, sets: &Meanings) {
    let texts = system.lists.iter().flat_map(|list| &list.rules).map(|rule| &rule.text);
    let texts: Vec<_> = texts.collect();
    let named = system.sets.iter().filter(|(name, _)| texts.iter().any(|text| text.contains(name.as_str())));
    for (index, (name, id)) in named.enumerate() {
        if index == 0 {
            output::line("\nsets");
        }
        output::line(&format!("  {name}: {}", words::set(id, sets)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rules_are_truncated_between_characters() {
        assert_eq!(shortened("drop"), "drop");
        let long = shortened(&"ä".repeat(MAX_CHARACTERS + 7));
        assert_eq!(long, format!("{}… (7 characters more)", "ä".repeat(MAX_CHARACTERS)));
    }
}

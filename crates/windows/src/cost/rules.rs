//! The contribution of each rule to the cost of an endpoint.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use tortie_api::net::{Action, Direction};
use tortie_dataplane::Endpoint;
use tortie_policy::program::{Lookup, PolicyId, PolicyRules, Rule, SetId};

use super::{Costing, Tally};
use crate::acl::{RuleSize, shape};

/// The contribution of a rule to the cost of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleCost {
    /// The policy of the rule.
    pub policy: PolicyId,
    /// Its direction.
    pub direction: Direction,
    /// Its number, counted from one.
    pub number: usize,
    /// What disappears without the rule, if addresses are listed.
    pub lists: Saving,
    /// What disappears without the rule, if ACLs name sets.
    pub sets: Saving,
    /// The main reason for its cost.
    pub because: Because,
}

/// What disappears without a rule. Negative if the rule hides what would then be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Saving {
    /// ACLs.
    pub acls: i64,
    /// Addresses and networks in them.
    pub addresses: i64,
}

/// The main reason for the cost of a rule. Its display is the end of "rule 2 costs 96 of 120 ACLs: …".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// It matches nothing on this node.
    Nothing,
    /// It is a Pass: what follows is written once more, for the packets that it matches.
    Next,
    /// It concerns all protocols but one, which gets a separate list.
    ButOneProtocol,
    /// Products of addresses, ports and protocols.
    Products {
        /// The number of products; each has separate addresses.
        products: usize,
        /// The number of lists of at most 4,000 addresses for each.
        lists: usize,
        /// The number of protocols of each; an ACL has one.
        protocols: usize,
        /// The number of compiled rules: one, or one for each peer and protocol.
        rules: usize,
        /// Whether it excludes addresses, so that it lists the remaining ones.
        excludes: bool,
        /// The number of its addresses and networks.
        addresses: usize,
    },
}

/// The number of compiled rules for each written rule of a policy, in order.
pub type RuleCounts<'a> = &'a dyn Fn(&PolicyId, Direction) -> Option<Vec<usize>>;

impl<L: Lookup> Costing<'_, L> {
    /// The contribution of each rule of the endpoint's `wanted` policies. Rules are reported as `written`, if that is
    /// known, otherwise as compiled. Each rule needs a separate rendering without it.
    pub fn rules(
        &self,
        endpoint: &Endpoint,
        wanted: impl Fn(&PolicyId) -> bool,
        written: RuleCounts<'_>,
    ) -> Vec<RuleCost> {
        let all = [false, true].map(|by_name| self.tally(endpoint, self.lookup, by_name));
        let mut costs = Vec::new();
        for direction in [Direction::Ingress, Direction::Egress] {
            let tiers = endpoint.program.tiers(direction).iter();
            let named = tiers.flat_map(|tier| &tier.policies).chain(&endpoint.program.profiles);
            let mut seen = BTreeSet::new();
            for id in named.filter(|id| wanted(id) && seen.insert(*id)) {
                let Some(policy) = self.lookup.policy(id) else { continue };
                let rules = policy.direction(direction);
                let lengths =
                    written(id, direction).filter(|lengths| lengths.iter().sum::<usize>() == rules.len());
                let lengths = lengths.unwrap_or_else(|| vec![1; rules.len()]);
                let mut begin = 0;
                for (index, length) in lengths.into_iter().enumerate() {
                    let these = begin..begin + length;
                    begin += length;
                    let lookup =
                        Without { lookup: self.lookup, id, rules: less(policy, direction, these.clone()) };
                    let saving = |by_name: bool| {
                        let (all, left) = (all[usize::from(by_name)], self.tally(endpoint, &lookup, by_name));
                        let less = |all: usize, left: usize| signed(all) - signed(left);
                        Saving {
                            acls: less(all.acls, left.acls),
                            addresses: less(all.addresses, left.addresses),
                        }
                    };
                    costs.push(RuleCost {
                        policy: id.clone(),
                        direction,
                        number: index + 1,
                        lists: saving(false),
                        sets: saving(true),
                        because: self.because(&rules[these], direction, endpoint),
                    });
                }
            }
        }
        costs
    }

    fn tally(&self, endpoint: &Endpoint, policies: &impl Lookup, by_name: bool) -> Tally {
        self.ours(endpoint, policies, by_name).0.iter().collect()
    }

    fn because(&self, rules: &[Rule], direction: Direction, endpoint: &Endpoint) -> Because {
        let shapes = rules.iter().map(|rule| shape(rule, direction, endpoint, self.lookup));
        let all = shapes.fold(RuleSize::default(), |all, shape| RuleSize {
            products: all.products + shape.products,
            protocols: all.protocols.max(shape.protocols),
            lists: all.lists.max(shape.lists),
            addresses: all.addresses + shape.addresses,
        });
        let excludes = |rule: &Rule| {
            let peer = if direction == Direction::Ingress { &rule.source } else { &rule.destination };
            !peer.not_nets.is_empty() || !peer.not_sets.is_empty() || !peer.not_port_sets.is_empty()
        };
        match rules {
            _ if all.products == 0 => Because::Nothing,
            [rule, ..] if rule.action == Action::Pass => Because::Next,
            [rule, ..] if rule.not_protocol.is_some() => Because::ButOneProtocol,
            rules => Because::Products {
                products: all.products,
                lists: all.lists,
                protocols: all.protocols,
                rules: rules.len(),
                excludes: rules.iter().any(excludes),
                addresses: all.addresses,
            },
        }
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn less(rules: &PolicyRules, direction: Direction, these: Range<usize>) -> PolicyRules {
    let mut rules = rules.clone();
    match direction {
        Direction::Ingress => drop(rules.ingress.drain(these)),
        Direction::Egress => drop(rules.egress.drain(these)),
    }
    rules
}

/// Policies as they are, except for one.
struct Without<'a, L> {
    lookup: &'a L,
    id: &'a PolicyId,
    rules: PolicyRules,
}

impl<L: Lookup> Lookup for Without<'_, L> {
    fn policy(&self, id: &PolicyId) -> Option<&PolicyRules> {
        if id == self.id { Some(&self.rules) } else { self.lookup.policy(id) }
    }

    fn set(&self, id: &SetId) -> Option<&BTreeSet<tortie_policy::program::Member>> {
        self.lookup.set(id)
    }
}

impl fmt::Display for Because {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (products, lists, protocols, rules, excludes, addresses) = match *self {
            Self::Nothing => return f.write_str("it matches nothing here"),
            Self::Next => {
                return f.write_str("what comes after its tier is written once more, for what it passes on");
            }
            Self::ButOneProtocol => {
                return f.write_str(
                    "it is about all protocols but one, which an ACL cannot say: that one gets a list of its own, with all \
                     other rules",
                );
            }
            Self::Products { products, lists, protocols, rules, excludes, addresses } => {
                (products, lists, protocols, rules, excludes, addresses)
            }
        };
        let mut factors = Vec::new();
        if rules > 1 {
            factors.push(format!("it is {rules} rules, one for each of its peers and protocols"));
        }
        if products > rules && excludes {
            factors.push(format!("what is left around what it excludes is {products} parts"));
        } else if products > rules {
            factors.push(format!("its ports have addresses of their own, which makes {products} parts"));
        }
        if lists > 1 {
            factors.push(format!("its addresses take {lists} lists of at most 4,000"));
        }
        if protocols > 1 {
            factors.push(format!("it is about {protocols} protocols, and an ACL about one"));
        }
        match (factors.as_slice(), addresses) {
            ([], 0) => f.write_str("it is one ACL"),
            ([], _) if excludes => {
                write!(
                    f,
                    "what is left of all addresses, without those that it excludes, is {addresses} networks"
                )
            }
            ([], 1) => f.write_str("it is one ACL about one address or network"),
            ([], _) => write!(f, "it is one ACL about {addresses} addresses and networks"),
            (factors, _) => f.write_str(&factors.join(", each of which is combined with this: ")),
        }
    }
}

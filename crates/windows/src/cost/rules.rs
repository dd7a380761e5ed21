//! What each rule adds to the cost of an endpoint.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use tortie_api::net::{Action, Direction};
use tortie_dataplane::Endpoint;
use tortie_policy::program::{Lookup, PolicyId, PolicyRules, Rule, SetId};

use super::{Costing, Tally};
use crate::acl::{Shape, shape};

/// What a rule adds to the cost of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleCost {
    /// Whose rule.
    pub policy: PolicyId,
    /// Of which direction.
    pub direction: Direction,
    /// Which, counted from one.
    pub number: usize,
    /// What goes away without it, where peers' addresses are spelled out.
    pub lists: Saving,
    /// What goes away without it, where ACLs name sets.
    pub sets: Saving,
    /// What makes it cost so.
    pub because: Because,
}

/// What goes away without a rule. Less than nothing where the rule hides what then would have to be said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Saving {
    /// ACLs.
    pub acls: i64,
    /// Addresses and networks in them.
    pub addresses: i64,
}

/// What dominates the cost of a rule. Displayed, it is the end of "rule 2 costs 96 of 120 ACLs: …".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// It matches nothing here.
    Nothing,
    /// It passes on: what comes after it is written once more, for what it matches.
    Next,
    /// It is about all protocols but one, which gets a list of its own.
    ButOneProtocol,
    /// Products of addresses, ports and protocols.
    Products {
        /// How many of them; each has addresses of its own.
        products: usize,
        /// In how many lists of at most 4,000 addresses each.
        lists: usize,
        /// Of how many protocols each; an ACL is about one.
        protocols: usize,
        /// How many rules it was made of: one, or for each peer and protocol one.
        rules: usize,
        /// Whether it excludes addresses, so that it names what is left of all.
        excludes: bool,
        /// How many addresses and networks it has.
        addresses: usize,
    },
}

/// Of how many compiled rules each rule of a policy is made, in order, as it was written.
pub type Written<'a> = &'a dyn Fn(&PolicyId, Direction) -> Option<Vec<usize>>;

impl<L: Lookup> Costing<'_, L> {
    /// What each rule of the endpoint's policies adds to its cost, of those policies that are `wanted`. Rules are told as
    /// they were `written`, where that is known, and else as they are compiled. Each is rendered away, so it takes as many
    /// renderings as there are rules.
    pub fn rules(
        &self,
        endpoint: &Endpoint,
        wanted: impl Fn(&PolicyId) -> bool,
        written: Written<'_>,
    ) -> Vec<RuleCost> {
        let all = [false, true].map(|by_name| self.tally(endpoint, self.lookup, by_name));
        let mut costs = Vec::new();
        for direction in [Direction::Ingress, Direction::Egress] {
            let tiers = endpoint.program.tiers(direction).iter();
            let asked = tiers.flat_map(|tier| &tier.policies).chain(&endpoint.program.profiles);
            let mut seen = BTreeSet::new();
            for id in asked.filter(|id| wanted(id) && seen.insert(*id)) {
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
        let all = shapes.fold(Shape::default(), |all, shape| Shape {
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

/// Policies as they are, but for one.
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

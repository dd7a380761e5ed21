//! What each rule adds to the cost of an endpoint.

use std::collections::BTreeSet;
use std::fmt;

use tortie_api::net::{Action, Direction};
use tortie_dataplane::Endpoint;
use tortie_policy::program::{Lookup, PolicyId, PolicyRules, Rule, SetId};

use super::{Costing, Tally, Way};
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
    /// It is about all protocols but one: each that is named anywhere gets a list of its own.
    ButOneProtocol,
    /// Products of addresses, ports and protocols.
    Products {
        /// How many of them; each has addresses of its own.
        products: usize,
        /// In how many lists of at most 4,000 addresses each.
        lists: usize,
        /// Of how many protocols each; an ACL is about one.
        protocols: usize,
        /// Whether it excludes addresses, so that it names what is left of all.
        excludes: bool,
        /// How many addresses and networks it has.
        addresses: usize,
    },
}

impl<L: Lookup> Costing<'_, L> {
    /// What each rule of the endpoint's policies adds to its cost, of those policies that are `wanted`. Each rule is
    /// rendered away, so it takes as many renderings as there are rules.
    pub fn rules(&self, endpoint: &Endpoint, wanted: impl Fn(&PolicyId) -> bool) -> Vec<RuleCost> {
        let all = [Way::Lists, Way::Sets].map(|way| self.acls(endpoint, way).iter().collect::<Tally>());
        let mut costs = Vec::new();
        for direction in [Direction::Ingress, Direction::Egress] {
            let tiers = endpoint.program.tiers(direction).iter();
            let asked = tiers.flat_map(|tier| &tier.policies).chain(&endpoint.program.profiles);
            let mut seen = BTreeSet::new();
            for id in asked.filter(|id| wanted(id) && seen.insert(*id)) {
                let Some(rules) = self.lookup.policy(id) else { continue };
                for (index, rule) in rules.direction(direction).iter().enumerate() {
                    let without = Without { lookup: self.lookup, id, rules: less(rules, direction, index) };
                    let saving = |by_name: bool, all: Tally| {
                        let left: Tally = self.ours(endpoint, &without, by_name).0.iter().collect();
                        let less = |all: usize, left: usize| signed(all) - signed(left);
                        Saving { acls: less(all.acls, left.acls), addresses: less(all.addresses, left.addresses) }
                    };
                    costs.push(RuleCost {
                        policy: id.clone(),
                        direction,
                        number: index + 1,
                        lists: saving(false, all[0]),
                        sets: saving(true, all[1]),
                        because: because(rule, direction, shape(rule, direction, endpoint, self.lookup)),
                    });
                }
            }
        }
        costs
    }
}

fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn less(rules: &PolicyRules, direction: Direction, index: usize) -> PolicyRules {
    let mut rules = rules.clone();
    match direction {
        Direction::Ingress => drop(rules.ingress.remove(index)),
        Direction::Egress => drop(rules.egress.remove(index)),
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

fn because(rule: &Rule, direction: Direction, shape: Shape) -> Because {
    let peer = if direction == Direction::Ingress { &rule.source } else { &rule.destination };
    match rule.action {
        _ if shape.products == 0 => Because::Nothing,
        Action::Pass => Because::Next,
        _ if rule.not_protocol.is_some() => Because::ButOneProtocol,
        _ => Because::Products {
            products: shape.products,
            lists: shape.lists,
            protocols: shape.protocols,
            excludes: !peer.not_nets.is_empty() || !peer.not_sets.is_empty() || !peer.not_port_sets.is_empty(),
            addresses: shape.addresses,
        },
    }
}

impl fmt::Display for Because {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (products, lists, protocols, excludes, addresses) = match *self {
            Self::Nothing => return f.write_str("it matches nothing here"),
            Self::Next => {
                return f.write_str("what comes after its tier is written once more, for what it passes on");
            }
            Self::ButOneProtocol => {
                return f.write_str(
                    "it is about all protocols but one, which an ACL cannot say: each protocol that rules name gets a list of \
                     its own",
                );
            }
            Self::Products { products, lists, protocols, excludes, addresses } => {
                (products, lists, protocols, excludes, addresses)
            }
        };
        let mut factors = Vec::new();
        if products > 1 && excludes {
            factors.push(format!("what is left around what it excludes is {products} parts"));
        } else if products > 1 {
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
                write!(f, "what is left of all addresses, without those that it excludes, is {addresses} networks")
            }
            ([], 1) => f.write_str("it names 1 address"),
            ([], _) => write!(f, "it names {addresses} addresses that make no larger network"),
            (factors, _) => f.write_str(&factors.join(", each of which is combined with this: ")),
        }
    }
}

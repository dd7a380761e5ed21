//! What policy costs in HNS: ACLs, and what is in them, by either way to render it, and beside what a naive expansion
//! takes. Nothing is sent anywhere: it is computed from a node's state.

mod naive;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Sum;
use std::net::Ipv4Addr;
use std::ops::AddAssign;

use tortie_dataplane::{Condition, Endpoint, NodeState, Settings};
use tortie_hcn::schema::Acl;
use tortie_policy::program::{Lookup, PolicyId};

use crate::acl::{Frontends, Services, Sets, comes_from, named_sets, render};
use naive::Naive;

pub use rules::{Because, RuleCost, Saving, Written};

/// A way to render policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Peers' addresses are spelled out: HNS before 13, which has no sets (Windows Server 2019 has 9.3).
    Lists,
    /// ACLs name sets of addresses: HNS 13 and later (Windows Server 2022 has 13.2), once that is proven or asked for.
    Sets,
    /// The model of Calico for Windows that [`Naive::acls`] describes.
    Naive,
}

/// How much there is of what HNS has to keep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tally {
    /// ACLs.
    pub acls: usize,
    /// Addresses and networks that are written in them, each as often as it is.
    pub addresses: usize,
    /// Ports and ranges of ports that are written in them.
    pub ports: usize,
    /// Sets that are named in them, each as often as it is.
    pub names: usize,
    /// What it is where every pair of a local and a remote address, and of ports, is a rule of its own; a set counts as one
    /// address. This is what the lists of an ACL mean, however the switch keeps them.
    pub pairs: u64,
}

/// What the policy of one endpoint costs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cost {
    /// Without sets.
    pub lists: Tally,
    /// With sets, but for these themselves.
    pub sets: Tally,
    /// The naive expansion.
    pub naive: Tally,
    /// The sets that ACLs name, by identifier, and how many addresses and networks each has. They are the network's:
    /// endpoints of one node share them.
    pub members: BTreeMap<String, usize>,
    /// The same by policy, in the order in which they are asked; without what every endpoint has, and ends of tiers.
    pub policies: Vec<PolicyCost>,
    /// How many rules Calico would leave out, as they say what it cannot: a negation, a type of ICMP, ports without a
    /// protocol. Its cost is without them.
    pub left_out: usize,
    /// Whether the naive expansion was given up as too long: it is at least what is said here.
    pub cut: bool,
    /// What is rendered narrower than it is said.
    pub conditions: Vec<Condition>,
}

/// What a policy costs at an endpoint: the ACLs that decide in its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyCost {
    /// Which.
    pub policy: PolicyId,
    /// Without sets.
    pub lists: Tally,
    /// With sets.
    pub sets: Tally,
    /// The naive expansion.
    pub naive: Tally,
}

/// Says what policy costs at endpoints of one node.
pub struct Costing<'a, L> {
    lookup: &'a L,
    node: BTreeSet<Ipv4Addr>,
    sets: Sets<'a, L>,
    naive: Naive<'a, L>,
    /// None: what they add to lists is nobody's policy.
    services: Frontends,
}

impl<'a, L: Lookup> Costing<'a, L> {
    /// For a node with these addresses, where policies and sets are as `lookup` knows them.
    pub fn new(lookup: &'a L, node: BTreeSet<Ipv4Addr>) -> Self {
        Self {
            lookup,
            node,
            sets: Sets::new(lookup),
            naive: Naive::new(lookup),
            services: Frontends::new(&NodeState::default()),
        }
    }

    /// What the endpoint's policy costs.
    pub fn cost(&self, endpoint: &Endpoint) -> Cost {
        let (lists, conditions) = self.ours(endpoint, self.lookup, false);
        let (sets, _) = self.ours(endpoint, self.lookup, true);
        let naive = self.naive.acls(endpoint, &self.node);
        let named = sets.iter().flat_map(named_sets).map(str::to_owned).collect();
        let members = self.sets.named(&named).into_iter().map(|set| (set.id, set.values.len())).collect();
        let mut seen = BTreeSet::new();
        let policies = endpoint.program.policy_ids().filter(|id| seen.insert(*id)).map(|id| {
            let origin = id.to_string();
            let of = |acls: &[Acl]| acls.iter().filter(|acl| comes_from(acl, &origin)).collect();
            PolicyCost { policy: id.clone(), lists: of(&lists), sets: of(&sets), naive: of(&naive.acls) }
        });
        Cost {
            policies: policies.collect(),
            lists: lists.iter().collect(),
            sets: sets.iter().collect(),
            naive: naive.acls.iter().collect(),
            members,
            left_out: naive.left_out,
            cut: naive.cut,
            conditions,
        }
    }

    /// The endpoint's ACLs, each way; those of [`Way::Lists`] and [`Way::Sets`] as an endpoint without ACLs gets them.
    pub fn acls(&self, endpoint: &Endpoint, way: Way) -> Vec<Acl> {
        match way {
            Way::Lists => self.ours(endpoint, self.lookup, false).0,
            Way::Sets => self.ours(endpoint, self.lookup, true).0,
            Way::Naive => self.naive.acls(endpoint, &self.node).acls,
        }
    }

    /// The ACLs, where policies are as `policies` knows them.
    fn ours(&self, endpoint: &Endpoint, policies: &impl Lookup, by_name: bool) -> (Vec<Acl>, Vec<Condition>) {
        let services = Services::new(&self.services, policies);
        let (rows, conditions) =
            render(endpoint, &self.node, by_name, &services, &Settings::default(), policies);
        (rows.list(&self.sets, &|_| false).numbered(&[]), conditions)
    }
}

impl<'a> FromIterator<&'a Acl> for Tally {
    fn from_iter<I: IntoIterator<Item = &'a Acl>>(acls: I) -> Self {
        acls.into_iter().map(Tally::of).sum()
    }
}

impl Tally {
    fn of(acl: &Acl) -> Self {
        let items = |list: &str| if list.is_empty() { 0 } else { list.split(',').count() };
        let addresses = [items(&acl.local_addresses), items(&acl.remote_addresses)];
        let ports = [items(&acl.local_ports), items(&acl.remote_ports)];
        let names = named_sets(acl).count();
        // An empty list is one, which means all.
        let each =
            addresses.iter().chain(&ports).map(|count| u64::try_from(*count).unwrap_or(u64::MAX).max(1));
        Self {
            acls: 1,
            addresses: addresses.iter().sum::<usize>() - names,
            ports: ports.iter().sum(),
            names,
            pairs: each.fold(1, u64::saturating_mul),
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.acls += other.acls;
        self.addresses += other.addresses;
        self.ports += other.ports;
        self.names += other.names;
        self.pairs = self.pairs.saturating_add(other.pairs);
    }
}

impl Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

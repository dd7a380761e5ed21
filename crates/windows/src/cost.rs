//! The cost of policy in HNS: ACLs and their contents, by either rendering, and compared with a naive expansion.
//! Everything is computed from a node's state; nothing is sent.

mod naive;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Sum;
use std::net::IpAddr;
use std::ops::AddAssign;

use tortie_dataplane::{Condition, Endpoint, NodeState, Settings};
use tortie_hcn::schema::Acl;
use tortie_policy::program::{Lookup, PolicyId};

use crate::acl::{Frontends, Services, Sets, Surroundings, comes_from, named_sets, render};
use naive::Naive;

pub use rules::{Because, RuleCost, RuleCounts, Saving};

/// A way to render policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CostModel {
    /// Peers' addresses are listed: HNS before 13, which has no sets (Windows Server 2019 has 9.3).
    Lists,
    /// ACLs name sets of addresses: HNS 13 and later (Windows Server 2022 has 13.2), if sets are proven or requested.
    Sets,
    /// The model of Calico for Windows in [`Naive::acls`].
    Naive,
}

/// The amount of data that HNS must keep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tally {
    /// ACLs.
    pub acls: usize,
    /// Addresses and networks in them, counted at each occurrence.
    pub addresses: usize,
    /// Ports and port ranges in them.
    pub ports: usize,
    /// Sets named in them, counted at each occurrence.
    pub names: usize,
    /// The number of pairs of a local and a remote address, and of ports, if each were a rule of its own; a set
    /// counts as one address. This is what the lists of an ACL mean, however the switch stores them.
    pub pairs: u64,
}

/// The cost of an endpoint's policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cost {
    /// Without sets.
    pub lists: Tally,
    /// With sets, without the sets themselves.
    pub sets: Tally,
    /// The naive expansion.
    pub naive: Tally,
    /// The sets that ACLs name, by identifier, with the number of addresses and networks in each. They belong to the
    /// network: endpoints of one node share them.
    pub members: BTreeMap<String, usize>,
    /// The same by policy, in order of evaluation; without the ACLs that every endpoint has, and without ends of
    /// tiers.
    pub policies: Vec<PolicyCost>,
    /// The number of rules that Calico would leave out, because it cannot express a negation, an ICMP type, or ports
    /// without a protocol. The naive cost does not include them.
    pub left_out: usize,
    /// Whether the naive expansion was aborted as too long, so that its cost is a lower bound.
    pub cut: bool,
    /// The conditions of narrowed rules.
    pub conditions: Vec<Condition>,
}

/// The cost of a policy at an endpoint: the ACLs with this policy as their origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyCost {
    /// The policy.
    pub policy: PolicyId,
    /// Without sets.
    pub lists: Tally,
    /// With sets.
    pub sets: Tally,
    /// The naive expansion.
    pub naive: Tally,
}

/// Computes the cost of policy at endpoints of one node.
pub struct Costing<'a, L> {
    lookup: &'a L,
    node: BTreeSet<IpAddr>,
    sets: Sets<'a, L>,
    naive: Naive<'a, L>,
    /// None: what Services add to lists belongs to no policy.
    services: Frontends,
}

impl<'a, L: Lookup> Costing<'a, L> {
    /// For a node with these addresses, with policies and sets from `lookup`.
    pub fn new(lookup: &'a L, node: BTreeSet<IpAddr>) -> Self {
        Self {
            lookup,
            node,
            sets: Sets::new(lookup),
            naive: Naive::new(lookup),
            services: Frontends::new(&NodeState::default()),
        }
    }

    /// The cost of the endpoint's policy.
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

    /// The endpoint's ACLs by a rendering; those of [`CostModel::Lists`] and [`CostModel::Sets`] as for an endpoint without ACLs.
    pub fn acls(&self, endpoint: &Endpoint, model: CostModel) -> Vec<Acl> {
        match model {
            CostModel::Lists => self.ours(endpoint, self.lookup, false).0,
            CostModel::Sets => self.ours(endpoint, self.lookup, true).0,
            CostModel::Naive => self.naive.acls(endpoint, &self.node).acls,
        }
    }

    /// The ACLs, with policies from `policies`.
    fn ours(&self, endpoint: &Endpoint, policies: &impl Lookup, by_name: bool) -> (Vec<Acl>, Vec<Condition>) {
        let services = Services::new(&self.services, policies);
        let settings = Settings::default();
        let surroundings = Surroundings { node: &self.node, by_name, has_ipv6: false, settings: &settings };
        let (rows, conditions) = render(endpoint, surroundings, &services, policies);
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
        // An empty list counts as one, because it means everything.
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

//! Cluster state in, node state out.
//!
//! [`Calc::update`] takes one object of the cluster in, [`Calc::flush`] says how the node's state changes by all that
//! came since the last flush. What comes out depends on what the cluster says, never on the order or the batching in
//! which it was said. No clock, no I/O, no threads.

mod cluster;
mod endpoints;
mod network;
mod policies;
mod sets;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Delta, Endpoint, EndpointId, NodeState};
use tortie_policy::program::PolicyId;

use cluster::Cluster;
use policies::Policies;
use sets::Sets;

pub use network::vtep_mac;

/// The kinds of object that a node's state depends on.
pub const KINDS: [Kind; 17] = [
    Kind::Namespace,
    Kind::ServiceAccount,
    Kind::Node,
    Kind::IpPool,
    Kind::IpamBlock,
    Kind::EndpointSlice,
    Kind::Tier,
    Kind::Profile,
    Kind::NetworkSet,
    Kind::GlobalNetworkSet,
    Kind::KubernetesNetworkPolicy,
    Kind::ClusterNetworkPolicy,
    Kind::AdminNetworkPolicy,
    Kind::BaselineAdminNetworkPolicy,
    Kind::NetworkPolicy,
    Kind::GlobalNetworkPolicy,
    Kind::WorkloadEndpoint,
];

/// The computation for one node.
pub struct Calc {
    node: String,
    cluster: Cluster,
    policies: Policies,
    sets: Sets,
    /// What has been given out.
    state: NodeState,
    /// Local endpoints whose program or addresses may have changed.
    touched: BTreeSet<Key>,
    /// Whether nodes, pools or blocks have changed.
    network_touched: bool,
}

/// Something that calc could not use as it is, and what it does instead.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The object.
    pub key: Key,
    /// What is wrong.
    pub problem: String,
}

impl Calc {
    /// For the node of this name; knows nothing yet.
    pub fn new(node: impl Into<String>) -> Self {
        Self {
            node: node.into(),
            cluster: Cluster::default(),
            policies: Policies::default(),
            sets: Sets::default(),
            state: NodeState::default(),
            touched: BTreeSet::new(),
            network_touched: false,
        }
    }

    /// The node's state as it has been given out.
    #[must_use]
    pub fn state(&self) -> &NodeState {
        &self.state
    }

    /// Takes in that the object is now `value`, or is gone.
    pub fn update(&mut self, key: &Key, value: Option<&Value>) {
        match key.kind {
            Kind::KubernetesNetworkPolicy
            | Kind::ClusterNetworkPolicy
            | Kind::AdminNetworkPolicy
            | Kind::BaselineAdminNetworkPolicy
            | Kind::NetworkPolicy
            | Kind::GlobalNetworkPolicy => {
                for endpoint in self.policies.update(key, value, &self.cluster, &self.node) {
                    self.touched.insert(endpoint);
                }
            }
            Kind::Node | Kind::IpPool | Kind::IpamBlock => {
                self.cluster.update_network(key, value);
                self.network_touched = true;
            }
            Kind::Tier => {
                self.policies.update_tier(key, value);
                self.touch_local_endpoints();
            }
            Kind::Namespace
            | Kind::ServiceAccount
            | Kind::Profile
            | Kind::NetworkSet
            | Kind::GlobalNetworkSet
            | Kind::EndpointSlice
            | Kind::WorkloadEndpoint => {
                if key.kind == Kind::Profile {
                    self.policies.update_profile(key, value);
                    self.touch_local_endpoints();
                }
                for subject in self.cluster.update_labels(key, value) {
                    self.sets.subject_changed(&subject, &self.cluster);
                    if subject.kind == Kind::WorkloadEndpoint {
                        self.touched.insert(subject);
                    }
                }
            }
            // Nothing of a node's state depends on the other kinds.
            _ => {}
        }
    }

    /// How the state changes by what came since the last flush: sets, then policies that name them, then endpoints
    /// that name those; removals the other way round (semantics 23). Each delta changes something.
    pub fn flush(&mut self) -> Vec<Delta> {
        let mut deltas = Vec::new();
        let endpoints = self.changed_endpoints();
        let named = self.named_policies(&endpoints);

        self.network_deltas(&mut deltas);
        self.set_and_policy_deltas(&named, &mut deltas);
        for (id, endpoint) in endpoints {
            match endpoint {
                Some(endpoint) => deltas.push(Delta::Endpoint(id, endpoint)),
                None => deltas.push(Delta::EndpointRemoved(id)),
            }
        }
        self.removals(&named, &mut deltas);
        for delta in &deltas {
            self.state.apply(delta);
        }
        deltas
    }

    /// What could not be used as it is: policies that therefore deny, objects that are therefore left out.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.cluster.findings().chain(self.policies.findings()).collect()
    }

    fn touch_local_endpoints(&mut self) {
        let local = self.cluster.endpoints().filter(|(_, endpoint)| endpoint.spec.node == self.node);
        self.touched.extend(local.map(|(key, _)| key.clone()));
    }

    /// The local endpoints that are not what was given out: new value, or gone.
    fn changed_endpoints(&mut self) -> BTreeMap<EndpointId, Option<Arc<Endpoint>>> {
        let mut changed = BTreeMap::new();
        for key in std::mem::take(&mut self.touched) {
            let Some((id, local)) = self.cluster.identify(&key, &self.node) else { continue };
            let endpoint = if local { self.cluster.local_endpoint(&key, &self.policies) } else { None };
            changed.insert(id, endpoint);
        }
        self.cluster.forget_departed();
        changed.retain(|id, endpoint| self.state.endpoints.get(id) != endpoint.as_ref());
        changed
    }

    /// Every policy that an endpoint of the node will name.
    fn named_policies(&self, changed: &BTreeMap<EndpointId, Option<Arc<Endpoint>>>) -> BTreeSet<PolicyId> {
        let kept = self
            .state
            .endpoints
            .iter()
            .filter(|(id, _)| !changed.contains_key(*id))
            .map(|(_, endpoint)| endpoint);
        let all = kept.chain(changed.values().flatten());
        all.flat_map(|endpoint| endpoint.program.policy_ids().cloned()).collect()
    }

    fn set_and_policy_deltas(&mut self, named: &BTreeSet<PolicyId>, deltas: &mut Vec<Delta>) {
        let mut policies = Vec::new();
        let mut wanted = BTreeMap::new();
        for id in named {
            let (rules, sets) = self.policies.rules(id);
            wanted.extend(sets);
            if self.state.policies.get(id) != Some(&rules) {
                policies.push(Delta::Policy(id.clone(), rules));
            }
        }
        deltas.extend(self.sets.deltas(wanted, &self.cluster, &self.state));
        deltas.extend(policies);
    }

    fn removals(&mut self, named: &BTreeSet<PolicyId>, deltas: &mut Vec<Delta>) {
        let policies = self.state.policies.keys().filter(|id| !named.contains(*id));
        deltas.extend(policies.cloned().map(Delta::PolicyRemoved));
        let sets = self.state.sets.keys().filter(|id| !self.sets.is_active(id));
        deltas.extend(sets.cloned().map(Delta::SetRemoved));
    }
}

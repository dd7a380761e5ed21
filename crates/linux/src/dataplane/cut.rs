//! Finds established flows that policy denies now (`establishedFlows: Cut`, policy decision 20).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use tortie_api::calico::EstablishedFlows;
use tortie_api::net::Direction;
use tortie_dataplane::{Endpoint, EndpointId, NodeState};
use tortie_policy::program::{Flow, PolicyId, PolicyRules, evaluate};

use super::dirty::Dirty;

/// The pods whose policy has changed, with everything needed to judge their flows.
#[derive(Debug, Default)]
pub(super) struct Cut {
    /// These pods with the objects that their programs name, and nothing else of the node's state.
    judged: NodeState,
    /// Pods that no longer need to be judged.
    gone: BTreeSet<EndpointId>,
    /// The node's own addresses, from which its pods can always be reached (policy decision 2).
    own_addresses: BTreeSet<IpAddr>,
    by_address: BTreeMap<IpAddr, EndpointId>,
}

/// Whether this state requires cutting.
pub(super) fn is_enabled(state: &NodeState) -> bool {
    state.settings.established_flows == EstablishedFlows::Cut
}

impl Cut {
    /// The pods that a change concerns.
    pub(super) fn new(state: &NodeState, dirty: &Dirty, own_addresses: BTreeSet<IpAddr>) -> Self {
        let names_dirty_set = |rules: &PolicyRules| rules.set_ids().any(|set| dirty.sets.contains_key(set));
        let policies = state.policies.iter();
        let policies: BTreeSet<&PolicyId> = policies
            .filter(|(id, rules)| dirty.policies.contains(*id) || names_dirty_set(rules))
            .map(|(id, _)| id)
            .collect();
        let concerned = |(id, endpoint): &(&EndpointId, &Arc<Endpoint>)| {
            dirty.settings
                || dirty.endpoints.contains(*id)
                || endpoint.program.policy_ids().any(|id| policies.contains(id))
        };
        let gone = dirty.endpoints.iter().filter(|id| !state.endpoints.contains_key(*id)).cloned().collect();
        let mut cut = Self { gone, own_addresses, ..Self::default() };
        for (id, endpoint) in state.endpoints.iter().filter(concerned) {
            cut.add(state, id, endpoint);
        }
        cut
    }

    fn add(&mut self, state: &NodeState, id: &EndpointId, endpoint: &Arc<Endpoint>) {
        self.judged.endpoints.insert(id.clone(), endpoint.clone());
        for id in endpoint.program.policy_ids() {
            let Some(rules) = state.policies.get(id) else { continue };
            if self.judged.policies.insert(id.clone(), rules.clone()).is_some() {
                continue;
            }
            let sets = rules.set_ids().filter_map(|set| Some((set.clone(), state.sets.get(set)?.clone())));
            self.judged.sets.extend(sets);
        }
        self.by_address.extend(endpoint.addresses.iter().map(|address| (*address, id.clone())));
    }

    /// Merges a newer value into this one.
    pub(super) fn ingest(&mut self, newer: Self) {
        let is_newer = |id: &EndpointId| newer.gone.contains(id) || newer.judged.endpoints.contains_key(id);
        self.by_address.retain(|_, id| !is_newer(id));
        self.judged.endpoints.retain(|id, _| !is_newer(id));
        self.judged.endpoints.extend(newer.judged.endpoints);
        self.judged.policies.extend(newer.judged.policies);
        self.judged.sets.extend(newer.judged.sets);
        self.own_addresses = newer.own_addresses;
        self.by_address.extend(newer.by_address);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.judged.endpoints.is_empty()
    }

    /// Whether the policy of one of the pods denies a flow.
    pub(super) fn denies(&self, flow: &Flow) -> bool {
        let denies = |address, direction| {
            let pod = self.by_address.get(address).and_then(|id| self.judged.endpoints.get(id));
            pod.is_some_and(|pod| !evaluate(&pod.program, direction, flow, &self.judged))
        };
        let of_node = self.own_addresses.contains(&flow.source);
        denies(&flow.source, Direction::Egress) || (!of_node && denies(&flow.destination, Direction::Ingress))
    }
}

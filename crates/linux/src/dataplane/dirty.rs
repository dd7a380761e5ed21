//! The objects that a change of the node state concerns.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_dataplane::{Delta, EndpointId, NodeState};
use tortie_policy::ALL_NODES;
use tortie_policy::program::{Member, PolicyId, SetId};

/// The changed parts of the state.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    pub sets: BTreeMap<SetId, ChangedSet>,
    pub policies: BTreeSet<PolicyId>,
    pub endpoints: BTreeSet<EndpointId>,
    /// Host endpoints, by name.
    pub hosts: BTreeSet<String>,
    /// The own addresses of other nodes that have come, gone, or changed, or whose pods have IPIP now or before.
    pub peers: BTreeSet<IpAddr>,
    /// Whether the node itself has changed.
    pub skeleton: bool,
    /// Whether the operator's settings have changed, which every part may depend on.
    pub settings: bool,
    /// Whether other interfaces than before belong to pods that are not recognised.
    pub unclaimed: bool,
}

/// The changes of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ChangedSet {
    Members(BTreeSet<Member>),
    Whole,
}

impl Dirty {
    /// Records the objects of a delta.
    pub(super) fn note(&mut self, delta: &Delta) {
        match delta {
            Delta::Node(_) => self.skeleton = true,
            // `Peers` knows what they had before.
            Delta::Vtep(_) | Delta::VtepRemoved(..) => {}
            Delta::Settings(_) => self.settings = true,
            Delta::SetCreated(id, ..) | Delta::SetRemoved(id) => {
                self.skeleton |= *id == *ALL_NODES;
                drop(self.sets.insert(id.clone(), ChangedSet::Whole))
            }
            Delta::SetChanged { id, added, removed } => {
                let affected =
                    self.sets.entry(id.clone()).or_insert_with(|| ChangedSet::Members(BTreeSet::new()));
                if let ChangedSet::Members(members) = affected {
                    members.extend(added.iter().chain(removed));
                }
            }
            Delta::Policy(id, _) | Delta::PolicyRemoved(id) => drop(self.policies.insert(id.clone())),
            Delta::Endpoint(id, _) | Delta::EndpointRemoved(id) => drop(self.endpoints.insert(id.clone())),
            Delta::HostEndpoint(name, _) | Delta::HostEndpointRemoved(name) => {
                self.hosts.insert(name.clone());
                self.skeleton = true;
            }
            Delta::Route(_) | Delta::RouteRemoved(_) => {}
            // On Linux, policy sees a Service's backends, never its address.
            Delta::Service(..) | Delta::ServiceRemoved(_) => {}
        }
    }

    /// The whole state. Policies are included through the endpoints that name them.
    pub(super) fn everything(state: &NodeState) -> Self {
        Self {
            sets: state.sets.keys().map(|id| (id.clone(), ChangedSet::Whole)).collect(),
            policies: BTreeSet::new(),
            endpoints: state.endpoints.keys().cloned().collect(),
            hosts: state.host_endpoints.keys().cloned().collect(),
            // They are part of the skeleton.
            peers: BTreeSet::new(),
            skeleton: true,
            settings: true,
            unclaimed: true,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sets.is_empty()
            && self.policies.is_empty()
            && self.endpoints.is_empty()
            && self.hosts.is_empty()
            && self.peers.is_empty()
            && !self.skeleton
            && !self.settings
            && !self.unclaimed
    }
}

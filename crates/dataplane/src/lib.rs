//! The desired state of a node ([`NodeState`]), its changes ([`Delta`]), and the two traits that an operating system
//! implements: [`Dataplane`] applies the state, [`PodWiring`] connects one pod.

mod reason;
mod services;
mod settings;
mod shown;
mod state;
mod wiring;

use std::collections::BTreeMap;

pub use reason::{Reason, Severity};
pub use services::{Service, ServiceId, ServicePort};
pub use settings::{Failsafe, Settings};
pub use shown::{AskedFor, Count, ShowError, Shown, ShownList, ShownPart, ShownRule, ShownValue};
pub use state::{
    ClusterNetwork, Delta, Endpoint, EndpointId, HostEndpoint, LocalNode, MacAddress, NodeState, Route,
    RouteTarget, Vtep,
};
pub use wiring::{PodAttachment, PodInterface, PodWiring, WiringError};

/// Makes a node match its [`NodeState`]. Implementations keep the desired state, read the actual one, apply the
/// difference, and leave objects of others alone.
pub trait Dataplane: Send {
    /// Ingests the deltas into the desired state and applies it. A delta is in force when this returns and the report
    /// has no problem with its object. What failed stays desired, and the next call retries it.
    fn apply(&mut self, deltas: &[Delta]) -> Report;

    /// Reads everything back and repairs differences from the desired state.
    fn resync(&mut self) -> Report;

    /// Calls `told`, on any thread, when somebody else has changed what the dataplane created, so that a resync is
    /// necessary. It is never called if the system reports no changes, or if nobody else can change anything.
    fn watch(&mut self, _told: Box<dyn Fn() + Send>) {}

    /// Whether the state must include the cluster's Services, which need much memory.
    fn asks_for_services(&self) -> bool {
        false
    }

    /// Reads what the system has for an endpoint, and changes nothing.
    ///
    /// # Errors
    /// The endpoint is unknown, or the system did not answer.
    fn show(&mut self, endpoint: &EndpointId) -> Result<Shown, ShowError>;
}

/// The result of a dataplane's work.
///
/// By its [`Reason`], a condition either reports a failure, so that its object is not in force, or informs how the
/// object is in force. A failure of one endpoint does not affect the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The conditions of single endpoints. Each of these endpoints is closed or narrower than its policy, never
    /// wider. A failed endpoint may keep its previous policy.
    pub endpoints: BTreeMap<EndpointId, Vec<Condition>>,
    /// The conditions of the node as a whole.
    pub node: Vec<Condition>,
    /// Whether a later call may repair a failure; the caller then calls again soon.
    pub retry: bool,
}

impl Report {
    /// The failures of the node as a whole.
    pub fn node_failures(&self) -> impl Iterator<Item = &Condition> {
        self.node.iter().filter(|condition| condition.reason.is_failure())
    }

    /// Why the endpoint may differ from what was requested: its own failures, and those of the whole node.
    pub fn failures_of(&self, endpoint: &EndpointId) -> impl Iterator<Item = &Condition> {
        let own = self.endpoints.get(endpoint).into_iter().flatten();
        self.node_failures().chain(own.filter(|condition| condition.reason.is_failure()))
    }

    /// Every condition.
    pub fn conditions(&self) -> impl Iterator<Item = &Condition> {
        self.node.iter().chain(self.endpoints.values().flatten())
    }
}

/// Information for the operator about an object and its consequences.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// The reason.
    pub reason: Reason,
    /// One sentence for the operator: the problem, its object, and what Tortie does about it.
    pub message: String,
}

/// The conditions of host endpoints on an operating system that does not enforce them yet (policy decision 27).
pub fn not_enforced(state: &NodeState) -> impl Iterator<Item = Condition> {
    state.host_endpoints.keys().map(|name| Condition {
        reason: Reason::HostEndpointNotEnforced,
        message: format!(
            "HostEndpoint {name} is not enforced on this node: what passes its interface is not policed, pods are"
        ),
    })
}

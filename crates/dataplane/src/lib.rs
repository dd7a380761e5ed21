//! What a node must be ([`NodeState`]), how it changes ([`Delta`]), and the two traits that an operating system
//! implements: [`Dataplane`] makes the state true, [`PodWiring`] connects one pod.

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

/// Makes a node what its [`NodeState`] says. Implementations keep the desired state, read the actual one, apply the
/// difference, and leave alone what others put there.
pub trait Dataplane: Send {
    /// Takes the deltas into the desired state and makes it true. A delta is in force when this returns and the
    /// report has no problem with its object. What failed stays desired and is tried again by the next call.
    fn apply(&mut self, deltas: &[Delta]) -> Report;

    /// Reads everything back and mends what differs from the desired state.
    fn resync(&mut self) -> Report;

    /// Has `told` called, on any thread, when somebody else has changed what the dataplane made, and a resync is in place.
    /// Where the system does not tell, or nobody else can change anything, it is never called.
    fn watch(&mut self, _told: Box<dyn Fn() + Send>) {}

    /// Whether the state has to have the cluster's Services, which is a lot to keep where nobody asks for it.
    fn asks_for_services(&self) -> bool {
        false
    }

    /// Reads what the system has for an endpoint, and changes nothing.
    ///
    /// # Errors
    /// The endpoint is not known, or the system did not answer.
    fn show(&mut self, endpoint: &EndpointId) -> Result<Shown, ShowError>;
}

/// What a dataplane has to say after it worked.
///
/// A condition either tells of a failure, and then what it is about is not in force, or informs only of how it is in
/// force: by its [`Reason`]. What failed for one endpoint is nothing to the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What is to be said of single endpoints; each of these endpoints is closed or narrower than its policy, never
    /// wider, but for one that failed, where what was in force before may still be.
    pub endpoints: BTreeMap<EndpointId, Vec<Condition>>,
    /// What is to be said of the node as a whole.
    pub node: Vec<Condition>,
    /// Whether something failed that a later call may mend; the caller then calls again soon.
    pub retry: bool,
}

impl Report {
    /// What of the node as a whole is not in force.
    pub fn node_failures(&self) -> impl Iterator<Item = &Condition> {
        self.node.iter().filter(|condition| condition.reason.is_failure())
    }

    /// Why the endpoint may not be as it was last asked for: what failed for it, or for the whole node.
    pub fn failures_of(&self, endpoint: &EndpointId) -> impl Iterator<Item = &Condition> {
        let own = self.endpoints.get(endpoint).into_iter().flatten();
        self.node_failures().chain(own.filter(|condition| condition.reason.is_failure()))
    }

    /// Every condition.
    pub fn conditions(&self) -> impl Iterator<Item = &Condition> {
        self.node.iter().chain(self.endpoints.values().flatten())
    }
}

/// Something that the operator should know, with the object and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// Why it is reported.
    pub reason: Reason,
    /// One sentence for the operator: what, on which object, and what Tortie does about it.
    pub message: String,
}

/// What an operating system says of host endpoints where it cannot put them into force yet (policy decision 27).
pub fn not_enforced(state: &NodeState) -> impl Iterator<Item = Condition> {
    state.host_endpoints.keys().map(|name| Condition {
        reason: Reason::HostEndpointNotEnforced,
        message: format!(
            "HostEndpoint {name} is not enforced on this node: what passes its interface is not policed, pods are"
        ),
    })
}

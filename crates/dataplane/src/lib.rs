//! What a node must be ([`NodeState`]), how it changes ([`Delta`]), and the two traits that an operating system
//! implements: [`Dataplane`] makes the state true, [`PodWiring`] connects one pod.

mod state;
mod wiring;

use std::collections::BTreeMap;

pub use state::{
    ClusterNetwork, Delta, Endpoint, EndpointId, LocalNode, MacAddress, NodeState, Route, RouteTarget, Vtep,
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
}

/// What a dataplane has to say after it worked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What is wrong with single endpoints; each of these endpoints is closed or narrower than its policy, never wider.
    pub endpoints: BTreeMap<EndpointId, Vec<Condition>>,
    /// What is wrong with the node as a whole.
    pub node: Vec<Condition>,
    /// Whether something failed that a later call may mend; the caller then calls again soon.
    pub retry: bool,
}

/// Something that the operator should know, with the object and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// A short, stable name in CamelCase, such as `RuleNotExpressible`.
    pub reason: &'static str,
    /// One sentence for the operator: what, on which object, and what Tortie does about it.
    pub message: String,
}

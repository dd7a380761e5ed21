//! The desired state of a node ([`NodeState`]), its changes ([`Delta`]), and the two traits that an operating system
//! implements: [`Dataplane`] applies the state, [`PodWiring`] connects one pod.

mod host_port;
mod learned_routes;
mod members;
mod reason;
mod saved_state;
mod service_dataplane;
mod services;
mod settings;
mod shown;
mod state;
mod wiring;

use std::collections::BTreeMap;
use std::fmt;

use thiserror::Error;
use tortie_api::report::{ObjectRef, ReportedCondition, with_objects};
use tortie_api::{Key, Kind};

pub use host_port::HostPort;
pub use learned_routes::{AppliedRoutes, LearnedRouteTable, RouteTableError, SystemRoutes, destinations_led};
pub use members::Members;
pub use reason::{Reason, Severity};
pub use saved_state::SavedState;
pub use service_dataplane::{ServiceDataplane, ServiceDataplaneError};
pub use services::{Service, ServiceId, ServicePort};
pub use settings::{Failsafe, Settings};
pub use shown::{AskedFor, Count, ShowError, Shown, ShownList, ShownPart, ShownRule, ShownValue};
pub use state::{
    ClusterNetwork, Delta, Endpoint, EndpointId, HostEndpoint, LocalEnd, LocalIpip, LocalNode, NodeState,
    Route, RouteTarget, Vtep,
};
pub use tortie_api::net::MacAddress;
pub use wiring::{
    BandwidthLimit, BandwidthLimits, InterfaceAddress, PodAddress, PodAttachment, PodDns, PodInterface,
    PodLink, PodWiring, PreparedLink, WiringError,
};

/// Makes a node match its [`NodeState`]. Implementations read the actual state, apply the difference, and leave objects
/// of others alone.
///
/// The caller owns the state, so that there is one copy of it. Every call gets the current state.
pub trait Dataplane: Send {
    /// Applies the state. `deltas` are the changes since the previous call, which `state` already contains. A delta is
    /// in force when this returns and the report has no failure for its object. The next call retries what failed.
    fn apply(&mut self, state: &NodeState, deltas: &[Delta]) -> Report;

    /// Reads everything back and repairs differences from the state.
    fn resync(&mut self, state: &NodeState) -> Report;

    /// Calls `told`, on any thread, when somebody else has changed what the dataplane created, so that a resync is
    /// necessary. It is never called if the system reports no changes, or if nobody else can change anything.
    fn watch(&mut self, _told: Box<dyn Fn() + Send>) {}

    /// Looks at once at what others change in the normal course of events, such as the interfaces of pods that another plugin connects,
    /// and applies what follows. `None` if nothing does. A resync follows a disturbance in any case.
    fn look(&mut self, _state: &NodeState) -> Option<Report> {
        None
    }

    /// Whether the state must include the cluster's Services, which need much memory.
    fn asks_for_services(&self) -> bool {
        false
    }

    /// Reads what the system has for an endpoint, and changes nothing.
    ///
    /// # Errors
    /// The endpoint is unknown, or the system did not answer.
    fn show(&mut self, state: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError>;
}

/// Closes pods while the state of their node is unknown: from the start of an agent to the first [`Dataplane::apply`].
pub trait Hold: Send {
    /// If no policy of an earlier process is in force in the system, puts in force what is saved, or keeps it in force. Returns
    /// whether something was open, or (on Linux) whether an earlier process had closed it for that reason. The next call tries again.
    ///
    /// # Errors
    /// The system refuses it.
    fn hold(&mut self, saved: &NodeState) -> Result<bool, HoldError>;
}

/// Why pods could not be closed.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct HoldError(Box<dyn std::error::Error + Send + Sync>);

impl HoldError {
    /// The error of a system, or a message.
    pub fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(error.into())
    }
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

/// Information for the operator about an endpoint or the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Condition {
    /// The reason.
    pub reason: Reason,
    /// The objects that cause it, such as a policy and its rule.
    pub about: Vec<ObjectRef>,
    /// One sentence for the operator: the problem, and what Tortie does about it. It repeats neither the objects nor
    /// the endpoint.
    pub message: String,
}

impl Condition {
    /// A condition without a cause among the cluster's objects.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, about: Vec::new(), message: message.into() }
    }

    /// The condition as a node reports it. `object` is the affected pod; `None` is the node itself.
    #[must_use]
    pub fn reported(&self, object: Option<ObjectRef>) -> ReportedCondition {
        let Self { reason, about, message } = self.clone();
        ReportedCondition { object, about, reason: reason.to_string(), message }
    }

    /// The same condition, with one more object that causes it.
    #[must_use]
    pub fn about(mut self, object: impl Into<ObjectRef>) -> Self {
        self.about.push(object.into());
        self
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_objects(&self.about, &self.message))
    }
}

/// The conditions of host endpoints on an operating system that does not enforce them yet (policy decision 27).
pub fn not_enforced(state: &NodeState) -> impl Iterator<Item = Condition> {
    state.host_endpoints.keys().map(|name| {
        let message =
            "not enforced on this node: policy applies to pods, not to packets through the node's interface";
        Condition::new(Reason::HostEndpointNotEnforced, message).about(Key::global(Kind::HostEndpoint, name))
    })
}

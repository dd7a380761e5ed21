//! The routes that a routing protocol has learned, in the tables of the node's system.

use std::collections::BTreeSet;
use std::error::Error;
use std::net::IpAddr;

use ipnet::IpNet;

/// Why the system does not answer.
pub type RouteTableError = Box<dyn Error + Send + Sync>;

/// The result of [`LearnedRouteTable::apply`].
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct AppliedRoutes {
    /// Next hops to which the node has no route.
    pub unreachable: BTreeSet<IpAddr>,
    /// Why routes are not in force.
    pub problems: Vec<String>,
}

/// The system's routes to one destination, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SystemRoutes {
    /// The learned one.
    pub learned: Option<String>,
    /// Those of others.
    pub others: Vec<String>,
}

/// The learned routes of a node. A next hop is looked up among the routes of others, so that learned routes cannot depend on each
/// other. Routes of others are left alone.
pub trait LearnedRouteTable: Send {
    /// Whether the system has learned routes, for instance of an earlier process.
    ///
    /// # Errors
    /// The system does not answer.
    fn exist(&mut self) -> Result<bool, RouteTableError>;

    /// Sets the next hops of a destination; none to have no route. The system gets them with [`apply`](Self::apply).
    fn set(&mut self, destination: IpNet, next_hops: BTreeSet<IpAddr>);

    /// From now on, routes of an earlier process that are not wanted are deleted.
    fn complete(&mut self);

    /// Forgets what is wanted, for a new speaker: the routes stay until [`complete`](Self::complete).
    fn restart(&mut self);

    /// Reads the system's routes, and makes the learned ones as they should be. The result also says which of the next hops in
    /// `watched` cannot be reached.
    ///
    /// # Errors
    /// The system does not answer. What it refuses is a problem in the result.
    fn apply(&mut self, watched: &BTreeSet<IpAddr>) -> Result<AppliedRoutes, RouteTableError>;

    /// What the system has for exactly this destination.
    ///
    /// # Errors
    /// The system does not answer.
    fn routes_to(&mut self, destination: &IpNet) -> Result<SystemRoutes, RouteTableError>;
}

//! The trait that an operating system implements to serve Services.

use std::collections::BTreeSet;

use ipnet::IpNet;
use thiserror::Error;
use tortie_services::ServicesDelta;

/// Makes the Services of a node real.
pub trait ServiceDataplane: Send {
    /// Puts changes in force, and the networks of this node's pods. The first call has all Services: it replaces what an earlier process
    /// has left.
    ///
    /// # Errors
    /// The system refused it. The changes are noted; the next call, or [`resync`](Self::resync), tries again.
    fn apply(
        &mut self,
        deltas: &[ServicesDelta],
        pods: &BTreeSet<IpNet>,
    ) -> Result<(), ServiceDataplaneError>;

    /// Reads everything back, and repairs differences.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    fn resync(&mut self) -> Result<(), ServiceDataplaneError>;

    /// Ends what a former state has left: flows and clients that lead to backends which have gone. The caller calls this after
    /// [`apply`](Self::apply) and [`resync`](Self::resync), and again after an error. New connections do not depend on it.
    ///
    /// # Errors
    /// The system refused it.
    fn clean_up(&mut self) -> Result<(), ServiceDataplaneError>;

    /// Calls `on_change`, on any thread, when somebody else has changed what this created, so that a resync is necessary.
    ///
    /// # Errors
    /// The system does not report changes.
    fn watch(&mut self, on_change: Box<dyn Fn() + Send>) -> Result<(), ServiceDataplaneError>;
}

/// The reason why Services are not in force.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct ServiceDataplaneError(Box<dyn std::error::Error + Send + Sync>);

impl ServiceDataplaneError {
    /// The error of a system, or a message.
    pub fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(error.into())
    }
}

//! The endpoint whose policies are evaluated.

use super::trace::Table;
use super::world::{HostInterface, Identity, Workload};

/// The endpoint whose policies are evaluated, and the table.
pub(super) struct JudgedEndpoint<'a> {
    pub(super) identity: &'a Identity,
    pub(super) profiles: &'a [String],
    pub(super) table: Table,
}

impl<'a> JudgedEndpoint<'a> {
    pub(super) fn pod(pod: &'a Workload) -> Self {
        Self { identity: &pod.identity, profiles: &pod.profiles, table: Table::Normal }
    }

    pub(super) fn host(interface: &'a HostInterface, table: Table) -> Self {
        Self { identity: &interface.identity, profiles: &interface.profiles, table }
    }
}

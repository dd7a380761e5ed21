//! Which chosen routes belong into the kernel (the kernel protocol in `confd/templates/bird_ipam.cfg.template`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use tortie_api::calico::{BgpConfigurationSpec, EncapsulationMode, IpPool};

use crate::rib::{RouteChange, Source};

/// What the kernel should have for a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forwarding {
    /// A route by way of these routers, in the order of addresses; packets are spread over them.
    Via(BTreeSet<IpAddr>),
    /// Nothing of BGP: there is no route, it is the node's own, or the dataplane has it.
    Nothing,
}

/// Decides about a change. `all` is the specification of BGPConfiguration `default`.
#[must_use]
pub fn forwarding(change: &RouteChange, pools: &[IpPool], all: &BgpConfigurationSpec) -> Forwarding {
    let is_own = change.routes.iter().any(|route| route.source == Source::Own);
    if is_own || change.routes.is_empty() || !is_programmed(change, pools, all) {
        return Forwarding::Nothing;
    }
    Forwarding::Via(change.routes.iter().map(|route| route.attributes.next_hop.address).collect())
}

/// Whether BGP, and not the dataplane, puts routes to the prefix into the kernel.
fn is_programmed(change: &RouteChange, pools: &[IpPool], all: &BgpConfigurationSpec) -> bool {
    let pool = pools.iter().find(|pool| pool.spec.cidr.contains(&change.prefix));
    let Some(pool) = pool else { return true };
    let mode = all.program_cluster_routes.as_deref().unwrap_or("EnabledNoEncapOnly");
    match (pool.spec.vxlan_mode, pool.spec.ipip_mode) {
        (EncapsulationMode::Never, EncapsulationMode::Never) => {
            ["Enabled", "EnabledNoEncapOnly"].contains(&mode)
        }
        // Without its tunnel, a route of an IPIP pool leads nowhere.
        _ => false,
    }
}

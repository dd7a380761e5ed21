//! Which chosen routes belong into the kernel (the kernel protocol in `confd/templates/bird_ipam.cfg.template`).

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::{BgpConfigurationSpec, EncapsulationMode, IpPool};

use super::ServiceSettings;
use crate::rib::{RouteChange, Source};

/// What the kernel should have for a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forwarding {
    /// A route by way of these routers, in the order of addresses; packets are spread over them.
    Via(BTreeSet<IpAddr>),
    /// Nothing of BGP.
    Nothing(NotForwarded),
}

/// Why the kernel gets no route of BGP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotForwarded {
    /// There is no route.
    NoRoute,
    /// It is the node's own.
    Own,
    /// It leads into this network of Services. The node serves these itself; routes of others, who do the same, would be loops.
    Services(IpNet),
    /// The dataplane has the routes of this pool, which uses an overlay.
    Overlay(String),
    /// BGPConfiguration leaves the routes of this pool to somebody else (`programClusterRoutes`).
    NotProgrammed(String),
}

impl fmt::Display for NotForwarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoute => write!(f, "there is no usable route"),
            Self::Own => write!(f, "it is the node's own route"),
            Self::Services(network) => {
                write!(
                    f,
                    "it is in {network}, a network of Services in BGPConfiguration default, which nodes serve themselves"
                )
            }
            Self::Overlay(pool) => write!(f, "IPPool {pool} has an overlay, whose routes the dataplane has"),
            Self::NotProgrammed(pool) => {
                write!(
                    f,
                    "programClusterRoutes of BGPConfiguration default leaves routes of IPPool {pool} to others"
                )
            }
        }
    }
}

/// Decides about a change. `all` is the specification of BGPConfiguration `default`.
#[must_use]
pub fn forwarding(change: &RouteChange, pools: &[IpPool], all: &BgpConfigurationSpec) -> Forwarding {
    let is_own = change.routes.iter().any(|route| route.source == Source::Own);
    let reason = match change.routes.is_empty() {
        true => Some(NotForwarded::NoRoute),
        false if is_own => Some(NotForwarded::Own),
        // A pool of pods counts before networks of Services, which may be large, such as all possible external addresses.
        false => match pools
            .iter()
            .filter(|pool| !pool.is_for_load_balancers())
            .find(|pool| pool.spec.cidr.contains(&change.prefix))
        {
            Some(pool) => of_pool(pool, all),
            None => of_services(&change.prefix, all),
        },
    };
    match reason {
        Some(reason) => Forwarding::Nothing(reason),
        None => {
            Forwarding::Via(change.routes.iter().map(|route| route.attributes.next_hop.address).collect())
        }
    }
}

/// Returns whether packets to a block of another node travel by routes of BGP: its pool has no overlay, and nodes tell each other the
/// routes and write them into the kernel. Of a block without a pool, nobody knows how its packets travelled.
#[must_use]
pub fn goes_by_bgp(block: &IpNet, pools: &[IpPool], all: &BgpConfigurationSpec) -> bool {
    let mut of_pods = pools.iter().filter(|pool| !pool.is_for_load_balancers());
    let pool = of_pods.find(|pool| pool.spec.cidr.contains(block));
    pool.is_some_and(|pool| of_pool(pool, all).is_none() && !pool.spec.disable_bgp_export)
}

fn of_services(prefix: &IpNet, all: &BgpConfigurationSpec) -> Option<NotForwarded> {
    let settings = ServiceSettings::new(all);
    settings.all().find(|network| network.contains(prefix)).copied().map(NotForwarded::Services)
}

/// Why the dataplane, or nobody, puts routes to prefixes of the pool into the kernel.
fn of_pool(pool: &IpPool, all: &BgpConfigurationSpec) -> Option<NotForwarded> {
    let name = pool.metadata.name.clone();
    let mode = all.program_cluster_routes.as_deref().unwrap_or("EnabledNoEncapOnly");
    if pool.encapsulation() != EncapsulationMode::Never {
        return Some(NotForwarded::Overlay(name));
    }
    let is_programmed = ["Enabled", "EnabledNoEncapOnly", ""].contains(&mode);
    (!is_programmed).then_some(NotForwarded::NotProgrammed(name))
}

//! The node's overlay network (docs/hns.md, Networks; `cni-plugin/pkg/dataplane/windows` and
//! `node/pkg/lifecycle/startup` of Calico).

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::Ipv4Net;
use tortie_dataplane::MacAddress;
use tortie_hcn::schema::{
    DrMacAddress, HostRoute, Ipam, Modify, NetAdapterName, Network, NetworkFlags, NetworkMode, Policy,
    PolicySettings, ProviderAddress, RequestType, Route, SchemaVersion, Subnet, Vsid,
};
use tortie_hcn::{Class, Guid, Hcn, HcnExt};
use tracing::{info, warn};

use crate::Error;

/// The required overlay network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlaySpec {
    /// Its name.
    pub name: String,
    /// The node's IPAM block, which becomes its only subnet.
    pub block: Ipv4Net,
    /// The VXLAN network identifier.
    pub vni: u32,
    /// Its adapter; `None` lets HNS choose, which is right with one adapter.
    pub adapter: Option<String>,
}

impl OverlaySpec {
    /// The second address of the block: the pods' gateway and the node's tunnel end.
    pub fn gateway(&self) -> Ipv4Addr {
        gateway(self.block)
    }
}

/// The second address of a block.
pub(crate) fn gateway(block: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(block.network()).saturating_add(1))
}

/// The actual overlay network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// Its identifier.
    pub id: Guid,
    /// The gateway, which is also the address of the node's tunnel end.
    pub gateway: Ipv4Addr,
    /// The MAC address of the node's tunnel end, for the other nodes. It differs each time the network is created.
    pub router_mac: MacAddress,
    /// The node's address on the underlay, as found by HNS.
    pub provider_address: Ipv4Addr,
}

/// The overlay network as a dataplane last found it. All clones share it.
#[derive(Debug, Clone, Default)]
pub struct CurrentOverlay(Arc<Mutex<Option<Overlay>>>);

impl CurrentOverlay {
    /// The network; `None` if the dataplane has not found one yet.
    pub fn get(&self) -> Option<Overlay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, overlay: &Overlay) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(overlay.clone());
    }
}

/// Ensures that the network exists and is as required. A differing one is recreated, unless it has endpoints.
///
/// # Errors
/// A call failed; the network differs and is in use; or it is not ready yet, and the caller should retry.
pub fn ensure_overlay(hcn: &(impl Hcn + ?Sized), spec: &OverlaySpec) -> Result<Overlay, Error> {
    let found = match hcn.network_by_name(&spec.name)? {
        Some(network) => match difference(&network, spec) {
            None => network,
            Some((found, wanted)) => {
                let endpoints = hcn.endpoints_of_network(network.id)?.len();
                if endpoints > 0 {
                    return Err(Error::NetworkDiffers { name: spec.name.clone(), found, wanted, endpoints });
                }
                warn!(network = spec.name, found, wanted, "the network differs and is unused; recreating it");
                hcn.delete_network(network.id)?;
                create(hcn, spec)?
            }
        },
        None => create(hcn, spec)?,
    };
    if !found.policies.iter().any(Policy::is::<HostRoute>) {
        let host_route = vec![Policy::of(&HostRoute::default())];
        match hcn.modify_network(found.id, &Modify::policies(RequestType::Add, host_route)) {
            // Not every build lists it.
            Err(error) if error.class() == Class::AlreadyExists => {}
            result => result?,
        }
    }
    overlay(&found, spec)
}

fn create(hcn: &(impl Hcn + ?Sized), spec: &OverlaySpec) -> Result<Network, Error> {
    let id = hcn.create_network(&document(spec))?;
    info!(network = spec.name, %id, block = %spec.block, vni = spec.vni, "created the overlay network");
    Ok(hcn.network(id)?)
}

fn document(spec: &OverlaySpec) -> Network {
    let mut policies = vec![Policy::of(&HostRoute::default())];
    policies.extend(spec.adapter.as_ref().map(|adapter| {
        Policy::of(&NetAdapterName { network_adapter_name: adapter.clone(), ..Default::default() })
    }));
    let subnet = Subnet {
        ip_address_prefix: spec.block.to_string(),
        policies: vec![Policy::of(&Vsid { isolation_id: spec.vni, ..Default::default() })],
        routes: vec![Route {
            next_hop: spec.gateway().to_string(),
            destination_prefix: "0.0.0.0/0".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let mut network = Network {
        name: spec.name.clone(),
        r#type: NetworkMode::Overlay,
        policies,
        ipams: vec![Ipam { r#type: "Static".into(), subnets: vec![subnet], ..Default::default() }],
        // After a restart of the node, the network may be bound to an adapter that no longer exists (docs/hns.md,
        // Networks).
        flags: NetworkFlags::ENABLE_NON_PERSISTENT,
        ..Default::default()
    };
    network.base.schema_version = Some(SchemaVersion::V2);
    network
}

/// The actual and the required value of a property that cannot be changed.
fn difference(network: &Network, spec: &OverlaySpec) -> Option<(String, String)> {
    let subnets: Vec<&Subnet> = network.subnets().collect();
    let [subnet] = subnets[..] else {
        return Some((format!("{} subnets", subnets.len()), "one".into()));
    };
    let gateway = subnet.routes.first().map(|route| route.next_hop.clone()).unwrap_or_default();
    let vni = subnet.policies.iter().find_map(|policy| policy.settings::<Vsid>().ok().flatten());
    let properties = [
        ("type", network.r#type.to_string(), NetworkMode::Overlay.to_string()),
        ("subnet", subnet.ip_address_prefix.clone(), spec.block.to_string()),
        ("gateway", gateway, spec.gateway().to_string()),
        ("VNI", vni.map_or(0, |vsid| vsid.isolation_id).to_string(), spec.vni.to_string()),
    ];
    let different = properties.into_iter().find(|(_, found, wanted)| found != wanted);
    different.map(|(what, found, wanted)| (format!("{what} {found}"), format!("{what} {wanted}")))
}

fn overlay(network: &Network, spec: &OverlaySpec) -> Result<Overlay, Error> {
    let name = &network.name;
    Ok(Overlay {
        id: network.id,
        gateway: spec.gateway(),
        router_mac: read::<DrMacAddress, _>(network, |policy| policy.address.parse().ok())?,
        provider_address: read::<ProviderAddress, _>(network, |policy| policy.provider_address.parse().ok())
            .inspect_err(|error| warn!(network = name, %error))?,
    })
}

fn read<P: PolicySettings, T>(network: &Network, value: impl Fn(P) -> Option<T>) -> Result<T, Error> {
    let found = network.policies.iter().filter_map(|policy| policy.settings::<P>().ok().flatten());
    let missing = || Error::NetworkNotReady { name: network.name.clone(), missing: P::TYPE };
    found.filter_map(value).next().ok_or_else(missing)
}

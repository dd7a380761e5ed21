//! What networks look like in HNS: the documents that create them, and what is read from them.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use tortie_hcn::schema::{
    HostRoute, Ipam, NetAdapterName, Network, NetworkFlags, NetworkMode, Policy, Route, SchemaVersion,
    Subnet, Vsid,
};

use crate::Error;

/// The type of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkKind {
    /// Packets to other nodes go in VXLAN.
    Overlay {
        /// The VXLAN network identifier.
        vni: u32,
    },
    /// Packets to other nodes leave as they are, by routes of the node.
    L2Bridge,
}

impl NetworkKind {
    /// The type in HNS.
    pub fn mode(self) -> NetworkMode {
        match self {
            NetworkKind::Overlay { .. } => NetworkMode::Overlay,
            NetworkKind::L2Bridge => NetworkMode::L2Bridge,
        }
    }
}

/// The required network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Its name.
    pub name: String,
    /// The node's IPAM block, which becomes its first subnet.
    pub block: Ipv4Net,
    /// Its type.
    pub kind: NetworkKind,
    /// Its adapter; `None` lets HNS choose, which is right with one adapter.
    pub adapter: Option<String>,
}

/// The second address of a block: the gateway of the subnet, and on an overlay the node's tunnel end.
pub(crate) fn gateway(block: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(block.network()).saturating_add(1))
}

/// The document that creates a network.
pub(crate) fn document(spec: &NetworkSpec) -> Network {
    let mut policies = match spec.kind {
        NetworkKind::Overlay { .. } => vec![Policy::of(&HostRoute::default())],
        NetworkKind::L2Bridge => vec![],
    };
    policies.extend(spec.adapter.as_ref().map(|adapter| {
        Policy::of(&NetAdapterName { network_adapter_name: adapter.clone(), ..Default::default() })
    }));
    let mut network = Network {
        name: spec.name.clone(),
        r#type: spec.kind.mode(),
        policies,
        ipams: vec![Ipam {
            r#type: "Static".into(),
            subnets: vec![match spec.kind {
                NetworkKind::Overlay { vni } => subnet(spec.block, vni),
                NetworkKind::L2Bridge => Subnet { policies: vec![], ..subnet(spec.block, 0) },
            }],
            ..Default::default()
        }],
        // After a restart of the node, the network may be bound to an adapter that no longer exists (docs/hns.md,
        // Networks).
        flags: NetworkFlags::ENABLE_NON_PERSISTENT,
        ..Default::default()
    };
    network.base.schema_version = Some(SchemaVersion::V2);
    network
}

pub(crate) fn subnet(block: Ipv4Net, vni: u32) -> Subnet {
    Subnet {
        ip_address_prefix: block.to_string(),
        policies: vec![Policy::of(&Vsid { isolation_id: vni, ..Default::default() })],
        routes: vec![Route {
            next_hop: gateway(block).to_string(),
            destination_prefix: "0.0.0.0/0".into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// The networks of a network's subnets.
pub(crate) fn subnets(network: &Network) -> impl Iterator<Item = Ipv4Net> {
    network.subnets().filter_map(|subnet| subnet.ip_address_prefix.parse().ok())
}

/// The name of the adapter of the network, for another network on the same switch.
///
/// # Errors
/// HNS does not show it. Without a name, HNS could take another adapter over.
pub fn adapter_of(network: &Network) -> Result<String, Error> {
    named_adapter(network).ok_or_else(|| Error::Differs {
        object: format!("network {}", network.name),
        problem: "it lists no NetAdapterName, and HNS could take another adapter over for the test's network: name the physical \
                  adapter of this network (--adapter \"Ethernet\", for example; tortie windows adapters lists them)"
            .to_owned(),
    })
}

pub(crate) fn named_adapter(network: &Network) -> Option<String> {
    let mut named =
        network.policies.iter().filter_map(|policy| policy.settings::<NetAdapterName>().ok().flatten());
    Some(named.find(|named| !named.network_adapter_name.is_empty())?.network_adapter_name)
}

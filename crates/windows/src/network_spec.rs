//! What networks look like in HNS: the documents that create them, and what is read from them.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
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
    /// The node's IPv6 block, which becomes a subnet of an L2Bridge network. Overlay networks have no IPv6.
    pub ipv6: Option<Ipv6Net>,
    /// Its type.
    pub kind: NetworkKind,
    /// Its adapter; `None` lets HNS choose, which is right with one adapter.
    pub adapter: Option<String>,
}

/// The second address of a block: the gateway of the subnet, and on an overlay the node's tunnel end.
pub(crate) fn gateway(block: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(block.network()).saturating_add(1))
}

/// The same address of an IPv6 block.
pub(crate) fn gateway_v6(block: Ipv6Net) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(block.network()).saturating_add(1))
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
            subnets: match spec.kind {
                NetworkKind::Overlay { vni } => vec![subnet(spec.block, vni)],
                NetworkKind::L2Bridge => {
                    let ipv6 =
                        spec.ipv6.map(|block| plain_subnet(block.into(), gateway_v6(block).to_string()));
                    let ipv4 = plain_subnet(spec.block.into(), gateway(spec.block).to_string());
                    std::iter::once(ipv4).chain(ipv6).collect()
                }
            },
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
        policies: vec![Policy::of(&Vsid { isolation_id: vni, ..Default::default() })],
        ..plain_subnet(block.into(), gateway(block).to_string())
    }
}

fn plain_subnet(block: IpNet, next_hop: String) -> Subnet {
    let destination_prefix = everything(block.addr().is_ipv6()).to_owned();
    Subnet {
        ip_address_prefix: block.to_string(),
        routes: vec![Route { next_hop, destination_prefix, ..Default::default() }],
        ..Default::default()
    }
}

/// The destination of a default route.
pub(crate) fn everything(of_ipv6: bool) -> &'static str {
    if of_ipv6 { "::/0" } else { "0.0.0.0/0" }
}

/// The networks of a network's IPv4 subnets.
pub(crate) fn subnets(network: &Network) -> impl Iterator<Item = Ipv4Net> {
    network.subnets().filter_map(|subnet| subnet.ip_address_prefix.parse().ok())
}

/// The network of a network's first IPv6 subnet.
pub(crate) fn ipv6_subnet(network: &Network) -> Option<Ipv6Net> {
    network.subnets().find_map(|subnet| subnet.ip_address_prefix.parse().ok())
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

/// The first subnet of IPv4, which has the node's end of the tunnel.
pub(crate) fn first_subnet(network: &Network) -> Option<&Subnet> {
    network.subnets().find(|subnet| subnet.ip_address_prefix.parse::<Ipv4Net>().is_ok())
}

/// The VNI of the network; 0 if it has none.
pub(crate) fn vni(network: &Network) -> u32 {
    let mut policies = first_subnet(network).into_iter().flat_map(|subnet| &subnet.policies);
    let vsid = policies.find_map(|policy| policy.settings::<Vsid>().ok().flatten());
    vsid.map_or(0, |vsid| vsid.isolation_id)
}

//! The network of the node computed from scratch: tunnels, and routes to blocks and borrowed addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_dataplane::{ClusterNetwork, LocalEnd, LocalIpip, LocalNode, NodeState, RouteTarget, Vtep};

use super::{NODE, Objects, felix_of};

/// A node in one family, by its annotations.
struct InFamily {
    own: IpNet,
    vtep: Option<Vtep>,
    is_windows: bool,
}

/// The part of a node that belongs to a family: `IPv4` or `IPv6`.
fn in_family(name: &str, value: &Value, family: &str) -> Option<InFamily> {
    let suffix = if family == "IPv6" { "V6" } else { "" };
    let annotation =
        |name: &str| value["metadata"]["annotations"][format!("projectcalico.org/{name}")].as_str();
    let text = annotation(&format!("{family}Address"))?;
    let own: IpNet = match text.contains('/') {
        true => text.parse().unwrap(),
        false => IpNet::from(text.parse::<IpAddr>().unwrap()),
    };
    let is_windows = value["metadata"]["labels"]["kubernetes.io/os"] == "windows";
    let vtep = annotation(&format!("{family}VXLANTunnelAddr")).map(|address| Vtep {
        node: name.to_owned(),
        address: address.parse().unwrap(),
        mac: annotation(&format!("VXLANTunnelMACAddr{suffix}"))
            .map_or(tortie_calc::vtep_mac(name, IpVersion::of(&own.addr())), |mac| mac.parse().unwrap()),
        parent: own.addr(),
        // What HNS gives containers.
        mtu: if is_windows { Some(1450) } else { None },
    });
    Some(InFamily { own, vtep, is_windows })
}

/// Whether a tunnel address can be that of a node: what IPAM's smallest block with the address says, or else a pool.
fn may_have_tunnel(objects: &Objects, node: &str, address: IpAddr) -> bool {
    let blocks = objects.iter().filter(|(key, _)| key.kind == Kind::IpamBlock);
    let blocks = blocks.filter_map(|(key, value)| {
        let cidr: IpNet = key.name.parse().unwrap();
        let owner = value["affinity"].as_str().and_then(|affinity| affinity.strip_prefix("host:"));
        let is_held = value["allocations"].as_array().into_iter().flatten().any(|index| !index.is_null());
        // A block of nobody in which nobody has anything says nothing.
        (cidr.contains(&address) && (owner.is_some() || is_held)).then_some((cidr, owner, value))
    });
    let Some((cidr, owner, value)) = blocks.max_by_key(|(cidr, ..)| cidr.prefix_len()) else {
        let pools = objects.iter().filter(|(key, _)| key.kind == Kind::IpPool);
        let mut cidrs = pools.filter_map(|(_, pool)| pool["spec"]["cidr"].as_str()?.parse::<IpNet>().ok());
        return cidrs.any(|cidr| cidr.contains(&address));
    };
    let mut addresses = cidr.subnets(cidr.max_prefix_len()).unwrap();
    let offset = addresses.position(|net| net.addr() == address).unwrap();
    let index = value["allocations"][offset].as_u64().and_then(|index| usize::try_from(index).ok());
    let holder = index.and_then(|index| value["attributes"][index]["secondary"]["node"].as_str());
    holder.or(owner) == Some(node)
}

/// Whether nobody with another own address has the MAC address of a tunnel, or derives it from its name.
fn may_have_mac(nodes: &BTreeMap<&str, InFamily>, name: &str, vtep: &Vtep) -> bool {
    let derived = |name: &str| tortie_calc::vtep_mac(name, vtep.version());
    let mut others = nodes.iter().filter(|(other, _)| **other != name);
    let takes = |(other, node): (&&str, &InFamily)| {
        let Some(end) = &node.vtep else { return false };
        end.parent != vtep.parent && [end.mac, derived(other)].contains(&vtep.mac)
    };
    vtep.mac == derived(name) || !others.any(takes)
}

/// The blocks and borrowed addresses to which no route leads, by node and by the name of the cause.
pub(crate) type WithoutRoute = BTreeMap<(String, &'static str), BTreeSet<IpNet>>;

/// The node's network and its routes, and what they do not reach.
pub(super) fn network_from_scratch(objects: &Objects, state: &mut NodeState, direct: bool) -> WithoutRoute {
    let mut without_route = WithoutRoute::new();
    for (family, pool) in [("IPv4", "pool"), ("IPv6", "pool6")] {
        let nodes = objects.iter().filter(|(key, _)| key.kind == Kind::Node);
        let all =
            nodes.filter_map(|(key, value)| Some((key.name.as_str(), in_family(&key.name, value, family)?)));
        let all: BTreeMap<&str, InFamily> = all.collect();
        let counts = |name: &str, vtep: &&Vtep| {
            name == NODE || (may_have_tunnel(objects, name, vtep.address) && may_have_mac(&all, name, vtep))
        };
        let mut nodes: BTreeMap<&str, InFamily> = BTreeMap::new();
        for (name, node) in &all {
            let vtep = node.vtep.as_ref().filter(|vtep| counts(name, vtep)).cloned();
            nodes.insert(*name, InFamily { vtep, ..*node });
        }
        for (name, node) in &nodes {
            if *name == NODE {
                let end = LocalEnd { address: node.own.addr(), vtep: node.vtep.clone() };
                let felix = felix_of(objects);
                let usual = ClusterNetwork::default();
                let vni = felix.vxlan_vni.unwrap_or(usual.vni);
                let port = felix.vxlan_port.unwrap_or(usual.port);
                let network = ClusterNetwork { vni, port, ..usual };
                let local = state.node.get_or_insert_with(|| LocalNode {
                    name: NODE.into(),
                    ends: BTreeMap::new(),
                    ipip: None,
                    network,
                });
                local.ends.insert(IpVersion::of(&end.address), end);
            } else if let Some(vtep) = &node.vtep {
                state.vteps.insert(vtep.key(), vtep.clone());
            }
        }
        let pool = objects.get(&Key::global(Kind::IpPool, pool));
        let mode_of = |field: &str| {
            let mode = pool.and_then(|pool| pool["spec"][field].as_str());
            mode.filter(|mode| *mode != "Never")
        };
        let ipip = mode_of("ipipMode");
        let without = |node: &str| super::felix_of_node(objects, node).ipip_enabled == Some(false);
        let without_ipip = without(NODE);
        let mode = ipip.or(mode_of("vxlanMode")).unwrap_or("Never");
        if let Some(local) = state.node.as_mut().filter(|_| ipip.is_some() && !without_ipip) {
            let own = &objects[&Key::global(Kind::Node, NODE)]["metadata"]["annotations"];
            let own = own["projectcalico.org/IPv4IPIPTunnelAddr"].as_str();
            local.ipip = Some(LocalIpip { address: own.map(|own| own.parse().unwrap()) });
        }
        let direct = direct && mode == "Never" && pool.is_some();
        // The target of a route to another node.
        let target = |node: &str| {
            let (there, here) = (nodes.get(node), nodes.get(NODE));
            let both = there.zip(here).filter(|(there, here)| !there.is_windows && !here.is_windows);
            let near = both.filter(|(there, here)| {
                here.own.contains(&there.own.addr()) && there.own.contains(&here.own.addr())
            });
            match (mode, near, there.and_then(|there| there.vtep.as_ref())) {
                ("Never", Some((there, _)), _) if direct => {
                    Some(RouteTarget::Direct { router: there.own.addr() })
                }
                ("CrossSubnet", Some((there, _)), _) => {
                    Some(RouteTarget::Direct { router: there.own.addr() })
                }
                ("CrossSubnet" | "Always", _, _) if ipip.is_some() => {
                    match there.map(|it| (it.own.addr(), it.is_windows)) {
                        Some((IpAddr::V4(router), false)) if !without_ipip && !without(node) => {
                            Some(RouteTarget::Ipip { router })
                        }
                        _ => None,
                    }
                }
                ("CrossSubnet" | "Always", _, Some(_)) => Some(RouteTarget::Vxlan { node: node.to_owned() }),
                _ => None,
            }
        };
        // Why the dataplane has no route to a node, if it should have one.
        let cause = |node: &str| {
            objects.get(&Key::global(Kind::Node, node))?;
            let (there, here) = (nodes.get(node), nodes.get(NODE));
            let tunnel = all.get(node).and_then(|node| node.vtep.as_ref());
            Some(match (mode, ipip.is_some()) {
                ("Never", _) if !direct => return None,
                (_, true) if without_ipip || without(node) => "no IPIP",
                (_, true) if is_windows(objects, node) => "IPIP to Windows",
                _ if there.is_none() => "no address",
                ("Never", _) if here.is_none() => "no own address",
                ("Never", _) => "another network",
                _ if tunnel.is_none() => "no tunnel address",
                _ => "a refused tunnel address",
            })
        };
        let mut note = |node: &str, net: IpNet| {
            if let Some(cause) = cause(node) {
                without_route.entry((node.to_owned(), cause)).or_default().insert(net);
            }
        };
        let blocks = objects.iter().filter(|(key, _)| key.kind == Kind::IpamBlock);
        for (key, value) in blocks.filter(|(key, _)| key.name.contains(':') == (family == "IPv6")) {
            let owner = value["affinity"].as_str().and_then(|affinity| affinity.strip_prefix("host:"));
            let cidr: IpNet = key.name.parse().unwrap();
            for (offset, index) in value["allocations"].as_array().into_iter().flatten().enumerate() {
                let Some(index) = index.as_u64() else { continue };
                let attribute = &value["attributes"][usize::try_from(index).unwrap()];
                let node = attribute["secondary"]["node"].as_str();
                let Some(node) = node.filter(|node| Some(*node) != owner && *node != NODE) else { continue };
                let address = cidr.subnets(cidr.max_prefix_len()).unwrap().nth(offset).unwrap();
                match target(node) {
                    Some(target) => drop(state.routes.insert(address, target)),
                    None => note(node, address),
                }
            }
            match owner {
                Some(NODE) => drop(state.routes.insert(cidr, RouteTarget::Local)),
                Some(node) => match target(node) {
                    Some(target) => drop(state.routes.insert(cidr, target)),
                    None => note(node, cidr),
                },
                None => {}
            }
        }
    }
    without_route
}

fn is_windows(objects: &Objects, node: &str) -> bool {
    objects[&Key::global(Kind::Node, node)]["metadata"]["labels"]["kubernetes.io/os"] == "windows"
}

//! Places random clusters on the nodes of a mixed cluster: pods get addresses of their node's block.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;
use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};

use crate::clusters::{Objects, Sent};

/// The system of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// The Linux dataplane on this kernel.
    Linux,
    /// The Windows dataplane on an emulated HNS.
    Windows,
}

/// The nodes, in the order of their blocks.
pub const NODES: [(&str, System); 4] =
    [("l1", System::Linux), ("w1", System::Windows), ("l2", System::Linux), ("w2", System::Windows)];

/// The pool of all blocks.
pub(super) const POOL: &str = "10.0.0.0/26";
/// The maximum number of pods on one node.
const PODS: u8 = 3;
/// Networks in random clusters, and their replacements, which contain some of the pods here.
const NETS: [(&str, &str); 4] = [
    ("10.0.0.0/29", POOL),
    ("10.0.0.0/30", "10.0.0.0/27"),
    ("10.0.0.4/31", "10.0.0.20/31"),
    ("10.0.0.254/31", "10.0.0.54/31"),
];

/// The block of a node.
pub(super) fn block(node: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, node * 16), 28)
}

/// For each pod address of a random cluster, the node and the new address.
pub type Addresses = BTreeMap<Ipv4Addr, (usize, Ipv4Addr)>;

/// Random new addresses.
pub fn addresses() -> impl Strategy<Value = Addresses> {
    // On Windows, pods do not get the first addresses of a block.
    let of_node = |node: u8| {
        (4..4 + PODS).map(move |last| (usize::from(node), Ipv4Addr::new(10, 0, 0, node * 16 + last)))
    };
    let all: Vec<_> = (0..NODES.len() as u8).flat_map(of_node).collect();
    let original = (1..=5).map(|last| Ipv4Addr::new(10, 0, 0, last));
    Just(all).prop_shuffle().prop_map(move |all| original.clone().zip(all).collect())
}

/// The objects with each pod on the node of its address, and with IPv4 only.
#[must_use]
pub fn placed(objects: &Objects, addresses: &Addresses) -> Objects {
    let texts = |old: &str| match old.parse::<Ipv4Addr>() {
        Ok(address) => addresses.get(&address).map(|(_, new)| new.to_string()),
        Err(_) => renamed_net(old, addresses),
    };
    let placed = |(key, value): &(Key, Value)| {
        let (mut key, mut value) = (key.clone(), value.clone());
        if key.kind == Kind::WorkloadEndpoint {
            move_pod(&mut key, &mut value, addresses);
        }
        replace(&mut value, &texts);
        (key, value)
    };
    objects.iter().map(placed).collect()
}

fn renamed_net(old: &str, addresses: &Addresses) -> Option<String> {
    let known = NETS.iter().find(|(from, _)| *from == old).map(|(_, to)| (*to).to_owned());
    known.or_else(|| {
        let host = old.strip_suffix("/32")?.parse().ok()?;
        addresses.get(&host).map(|(_, new)| format!("{new}/32"))
    })
}

fn move_pod(key: &mut Key, value: &mut Value, addresses: &Addresses) {
    let spec = &mut value["spec"];
    if let Some(nets) = spec["ipNetworks"].as_array_mut() {
        nets.retain(|net| net.as_str().is_some_and(|net| !net.contains(':')));
    }
    let address = spec["ipNetworks"][0].as_str().and_then(|net| net.strip_suffix("/32")?.parse().ok());
    let Some((node, _)) = address.and_then(|address: Ipv4Addr| addresses.get(&address)) else { return };
    let node = NODES[*node].0;
    let name = WorkloadEndpoint::name_for(node, spec["pod"].as_str().unwrap_or_default(), "eth0");
    spec["node"] = json!(node);
    value["metadata"]["name"] = json!(name);
    key.name = name;
}

/// Replaces strings everywhere.
fn replace(value: &mut Value, new: &impl Fn(&str) -> Option<String>) {
    match value {
        Value::String(text) => {
            if let Some(new) = new(text) {
                *text = new;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| replace(value, new)),
        Value::Object(fields) => fields.values_mut().for_each(|value| replace(value, new)),
        _ => {}
    }
}

/// The IPv4 packets, each from one of the pods to another one.
#[must_use]
pub fn between_pods(packets: &[Sent], objects: &Objects) -> Vec<Sent> {
    let nets = objects.iter().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint);
    let nets = nets.filter_map(|(_, value)| value["spec"]["ipNetworks"][0].as_str()?.strip_suffix("/32"));
    let pods: Vec<IpAddr> = nets.filter_map(|address| address.parse().ok()).collect();
    let of = |address: IpAddr| match address {
        // Random packets are between few addresses, one for each last byte.
        IpAddr::V4(address) => pods.get(usize::from(address.octets()[3]) % pods.len().max(1)).copied(),
        IpAddr::V6(_) => None,
    };
    let between = |sent: &Sent| {
        Some(Sent { source: of(sent.source)?, destination: of(sent.destination)?, ..sent.clone() })
    };
    packets.iter().filter_map(between).collect()
}

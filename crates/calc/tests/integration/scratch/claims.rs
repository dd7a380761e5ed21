//! The addresses that count of an endpoint whose kubelet has reported none (policy decision 50), directly by the definition.

use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Resource};

use super::{NODE, Objects};

/// Keeps the addresses that count. Nothing is assigned by this node's agent.
pub(crate) fn retain(objects: &Objects, key: &Key, pod: &str, node: &str, addresses: &mut Vec<IpNet>) {
    if node != NODE && !objects.contains_key(&Key::global(Kind::Node, node)) {
        addresses.clear();
    }
    addresses.retain(|net| {
        let address = net.addr();
        match block_of(objects, address) {
            Some(block) => block.allocated().any(|(given, attribute)| {
                let owner = |name: &str| attribute.owner.as_ref().and_then(|owner| owner.get(name)).cloned();
                given == address
                    && owner("namespace").as_ref() == Some(&key.namespace)
                    && owner("pod").as_deref() == Some(pod)
                    && owner("node").as_deref() == Some(node)
            }),
            None => node != NODE && !is_taken(objects, address),
        }
    });
}

fn block_of(objects: &Objects, address: IpAddr) -> Option<Block> {
    let blocks = objects.iter().filter(|(key, _)| key.kind == Kind::IpamBlock);
    let mut blocks = blocks.filter_map(|(_, value)| serde_json::from_value::<Block>(value.clone()).ok());
    blocks.find(|block| block.cidr.contains(&address))
}

/// Whether a Node, a HostEndpoint or a reported pod has it.
fn is_taken(objects: &Objects, address: IpAddr) -> bool {
    objects.iter().any(|(key, value)| match Resource::read_what_can_be(key, value).0 {
        Some(Resource::Node(node)) => node.addresses().contains(&address),
        Some(Resource::WorkloadEndpoint(other)) => {
            !other.is_unreported() && other.spec.ip_networks.iter().any(|net| net.addr() == address)
        }
        Some(Resource::HostEndpoint(host)) => host.spec.expected_ips.contains(&address),
        _ => false,
    })
}

//! The routes to the pods of a cluster: plain data in and out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use anyhow::Context;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tortie_api::ipam::Block;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::support::{WindowsNetwork, WindowsNode};
use tortie_api::{Key, Kind};

/// What the routes depend on.
#[derive(Default)]
pub(super) struct NodesAndBlocks {
    nodes: BTreeMap<String, PlannedNode>,
    blocks: Vec<Block>,
    /// Whether a datastore has the kind of the blocks: it knows that there are none. A file does not.
    pub(super) serves_blocks: bool,
}

struct PlannedNode {
    /// The own addresses.
    addresses: Vec<IpAddr>,
    /// The cloud's name of the machine, such as `aws:///eu-west-1a/i-0123456789abcdef0`.
    provider_id: Option<String>,
    pod_cidrs: Vec<IpNet>,
    takes_plain_packets: bool,
    /// Whether Tortie or flannel puts the pod networks of a Windows node into an overlay. Those of other plugins are not known.
    has_overlay_of_pod_cidrs: bool,
}

/// What routes depend on, and what is not there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Missing {
    kind: &'static str,
    /// Whether a datastore that has such objects has said that there are none.
    pub(super) is_certain: bool,
}

impl fmt::Display for Missing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.kind)
    }
}

/// A route to pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodRoute {
    /// The block, pod network or single address.
    pub(super) destination: IpNet,
    /// The address of the node.
    pub(super) next_hop: IpAddr,
    /// The node.
    pub(super) node: String,
    /// The cloud's name of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) provider_id: Option<String>,
    /// Whether a router may lack the route: a run that adds or removes it may have been interrupted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) uncertain: bool,
}

/// What a route means to a router: destination, next hop and machine. The name of the node means nothing to it.
pub(super) type RouteTarget = (IpNet, IpAddr, Option<String>);

impl PodRoute {
    /// The target, without the machine if the router does not look at it.
    pub(super) fn target(&self, by_machine: bool) -> RouteTarget {
        (self.destination, self.next_hop, self.provider_id.clone().filter(|_| by_machine))
    }
}

/// The result.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Planned {
    /// By destination.
    pub(super) routes: Vec<PodRoute>,
    /// Pods to which no route leads, and why.
    pub(super) problems: Vec<String>,
    /// The blocks and addresses of Windows nodes, each with its node. These nodes take packets to their pods in VXLAN only, so a route
    /// would lead the packets nowhere.
    pub(super) in_vxlan_only: Vec<(IpNet, String)>,
    /// The destinations at nodes whose addresses are not known.
    unknown: BTreeSet<IpNet>,
    /// The nodes whose pod networks are needed and not known.
    without_pod_cidrs: BTreeSet<String>,
}

impl Planned {
    /// Whether a router keeps this earlier route, because something about its node is not known for a moment.
    pub(super) fn keeps(&self, route: &PodRoute) -> bool {
        let is_planned = || self.routes.iter().any(|planned| planned.destination == route.destination);
        self.unknown.contains(&route.destination)
            || self.without_pod_cidrs.contains(&route.node) && !is_planned()
    }
}

impl NodesAndBlocks {
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// What routes depend on, if there is none of it.
    pub(super) fn missing(&self, by_pod_cidrs: bool) -> Option<Missing> {
        let missing = |kind| Some(Missing { kind, is_certain: false });
        if self.nodes.is_empty() {
            missing("Nodes")
        } else if by_pod_cidrs {
            let has_none = self.nodes.values().all(|node| node.pod_cidrs.is_empty());
            has_none.then_some("Nodes with spec.podCIDRs").and_then(missing)
        } else {
            let is_certain = self.serves_blocks;
            self.blocks.is_empty().then_some(Missing { kind: "IPAMBlocks", is_certain })
        }
    }

    /// Adds a Node or a block.
    pub(super) fn add(&mut self, key: &Key, value: &Value) -> anyhow::Result<()> {
        match key.kind {
            Kind::Node => {
                let node = Node::deserialize(value).context("the Node cannot be read")?;
                self.nodes.insert(key.name.clone(), planned_node(key, &node, value));
            }
            Kind::IpamBlock => {
                let block = Block::deserialize(value).context("the block cannot be read")?;
                block.check()?;
                self.blocks.push(block);
            }
            _ => {}
        }
        Ok(())
    }
}

fn planned_node(key: &Key, node: &Node, value: &Value) -> PlannedNode {
    let spec = &value["spec"];
    let own = [IpVersion::V4, IpVersion::V6].into_iter().filter_map(|version| node.own_address(version));
    let mut addresses: Vec<IpAddr> = own.collect();
    // A cluster without Tortie's or Calico's agents has no annotation.
    let reported = value["status"]["addresses"].as_array().into_iter().flatten();
    let internal = reported.filter(|address| address["type"] == "InternalIP");
    addresses.extend(internal.filter_map(|address| address["address"].as_str()?.parse::<IpAddr>().ok()));
    let one = spec["podCIDR"].as_str().into_iter();
    let all = spec["podCIDRs"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut pod_cidrs: Vec<IpNet> = one.chain(all).filter_map(|text| text.parse().ok()).collect();
    pod_cidrs.sort_unstable();
    pod_cidrs.dedup();
    let provider_id = spec["providerID"].as_str().filter(|id| !id.is_empty()).map(str::to_owned);
    let of_tortie = WindowsNode::of(key, value).and_then(|windows| windows.network);
    let of_flannel = value["metadata"]["annotations"][Node::FLANNEL_BACKEND].as_str();
    let takes_plain_packets = node.takes_plain_packets();
    let has_overlay = of_tortie == Some(WindowsNetwork::Overlay) || of_flannel == Some("vxlan");
    let has_overlay_of_pod_cidrs = !takes_plain_packets && has_overlay;
    PlannedNode { addresses, provider_id, pod_cidrs, takes_plain_packets, has_overlay_of_pod_cidrs }
}

/// The routes by IPAM blocks, or by the pod networks of the Nodes.
pub(super) fn plan(cluster: &NodesAndBlocks, by_pod_cidrs: bool) -> Planned {
    let mut wanted: BTreeMap<IpNet, &str> = BTreeMap::new();
    let (mut problems, mut without_pod_cidrs) = (Vec::new(), BTreeSet::new());
    if by_pod_cidrs {
        for (name, node) in &cluster.nodes {
            wanted.extend(node.pod_cidrs.iter().map(|cidr| (*cidr, name.as_str())));
            if node.pod_cidrs.is_empty() {
                problems.push(format!("Node {name} has no spec.podCIDRs"));
                without_pod_cidrs.insert(name.clone());
            }
        }
    } else {
        cluster.blocks.iter().filter(|block| !block.deleted).for_each(|block| add_block(block, &mut wanted));
    }
    let (mut routes, mut in_vxlan_only, mut unknown) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (destination, name) in wanted {
        let Some(node) = cluster.nodes.get(name) else {
            problems.push(format!("{destination}: there is no Node {name}"));
            continue;
        };
        // Tortie's IPAM gives addresses of overlays there. Pod networks may be those of another plugin.
        let is_in_overlay =
            if by_pod_cidrs { node.has_overlay_of_pod_cidrs } else { !node.takes_plain_packets };
        if is_in_overlay {
            in_vxlan_only.push((destination, name.to_owned()));
            continue;
        }
        let is_ipv4 = destination.addr().is_ipv4();
        let Some(next_hop) = node.addresses.iter().find(|address| address.is_ipv4() == is_ipv4) else {
            let family = if is_ipv4 { "IPv4" } else { "IPv6" };
            problems.push(format!("{destination}: Node {name} has no {family} address"));
            unknown.insert(destination);
            continue;
        };
        let (next_hop, provider_id) = (*next_hop, node.provider_id.clone());
        routes.push(PodRoute { destination, next_hop, node: name.to_owned(), provider_id, uncertain: false });
    }
    Planned { routes, problems, in_vxlan_only, unknown, without_pod_cidrs }
}

/// A block leads to its node; addresses that another node has of it lead there.
fn add_block<'a>(block: &'a Block, wanted: &mut BTreeMap<IpNet, &'a str>) {
    if let Some(node) = block.node() {
        wanted.insert(block.cidr, node);
    }
    for (address, attribute) in block.allocated() {
        let node = attribute.owner.as_ref().and_then(|owner| owner.get("node"));
        if let Some(node) = node.filter(|node| Some(node.as_str()) != block.node()) {
            wanted.insert(IpNet::from(address), node);
        }
    }
}

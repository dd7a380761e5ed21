//! Whole clusters, and packets between all of their ends.

use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{Answer, DecidedBy, Peer, Question, Snapshot, Trace, Verdict};
use tortie_reach::{Classes, Path, Placement, Sample};

use testkit::clusters::hosts::{NODES, hosts};
use testkit::clusters::{Objects, Sent, clusters, packets};

pub(crate) const PACKETS: usize = 25;
const OUTSIDERS: [&str; 6] = ["10.0.0.7", "10.0.0.200", "10.0.1.1", "198.51.100.7", "fd00::9", "2001:db8::1"];

/// An end of flows, with its class and its node.
pub(crate) struct End {
    pub peer: Peer,
    pub class: usize,
    pub node: String,
}

/// Whole clusters, half of them with host endpoints, and packets to judge; with at most `twins` copies of pods.
pub(crate) fn whole_clusters(twins: usize) -> BoxedStrategy<(Objects, Vec<Sent>)> {
    let twins = prop::collection::vec((0..6usize, 0..5usize), 0..twins);
    // Boxed, because so many parts would not fit on a test's stack.
    let hosts = prop::option::of(hosts().boxed());
    let all = (clusters().boxed(), twins, hosts, prop::collection::vec(packets(), PACKETS));
    let whole = |(objects, twins, hosts, packets): (Objects, Vec<_>, Option<Objects>, _)| {
        let mut objects = grown(objects, &twins);
        objects.extend(hosts.into_iter().flatten());
        (objects, packets)
    };
    all.prop_map(whole).boxed()
}

/// Adds copies of some pods with their own addresses, nodes, and an overlay.
pub(crate) fn grown(mut objects: Objects, twins: &[(usize, usize)]) -> Objects {
    let pods: Objects =
        objects.iter().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint).cloned().collect();
    for (number, (which, where_)) in twins.iter().enumerate() {
        let (mut key, mut value) = pods[which % pods.len()].clone();
        let name = format!("twin{number}");
        key.name = format!("n1-k8s-{name}-eth0");
        value["metadata"]["name"] = json!(key.name);
        value["spec"]["pod"] = json!(name);
        value["spec"]["node"] = json!(NODES[number % 3].0);
        // Every other copy is in another namespace, so that only its namespace distinguishes it from its original.
        if number % 2 == 1 {
            let other = if key.namespace == "red" { "blue" } else { "red" };
            let account = value["spec"]["serviceAccountName"].as_str().unwrap_or_default();
            value["spec"]["profiles"] = json!(WorkloadEndpoint::profiles_for(other, account));
            value["metadata"]["namespace"] = json!(other);
            key.namespace = other.to_owned();
        }
        // Some have another service account.
        if number % 3 == 2 {
            let account = if value["spec"]["serviceAccountName"] == "runner" { "default" } else { "runner" };
            value["spec"]["profiles"] = json!(WorkloadEndpoint::profiles_for(&key.namespace, account));
            value["spec"]["serviceAccountName"] = json!(account);
        }
        let net = ["10.0.0.6", "10.0.0.2", "10.0.0.3", "10.9.0.1", "10.9.0.2"][*where_];
        value["spec"]["ipNetworks"] = json!([format!("{net}/32")]);
        objects.push((key, value));
    }
    let mut node = |(name, own): (&str, &str), v6: &str, tunnel: Option<(&str, &str)>, labels: Value| {
        let mut annotations = json!({
            "projectcalico.org/IPv4Address": format!("{own}/24"),
            "projectcalico.org/IPv6Address": format!("{v6}/64"),
        });
        if let Some((tunnel, tunnel_v6)) = tunnel {
            annotations["projectcalico.org/IPv4VXLANTunnelAddr"] = json!(tunnel);
            annotations["projectcalico.org/IPv4IPIPTunnelAddr"] =
                json!(if tunnel == "10.0.1.0" { "10.0.0.5" } else { "10.0.1.2" });
            annotations["projectcalico.org/IPv6VXLANTunnelAddr"] = json!(tunnel_v6);
        }
        // Rules find two nodes by an address of an outsider, too.
        let listed = if name == NODES[2].0 { vec![] } else { vec![json!({"address": OUTSIDERS[3]})] };
        let metadata = json!({"name": name, "labels": labels, "annotations": annotations});
        let value = json!({"metadata": metadata, "status": {"addresses": listed}});
        objects.push((Key::global(Kind::Node, name), value));
    };
    let [n1, n2, n3] = NODES;
    node(n1, "fd00::8", Some(("10.0.1.0", "fd00::3")), json!({"a": "x"}));
    node(n2, "2001:db8::9", Some(("10.0.0.9", "fd00::b")), json!({"a": "y", "b": "x"}));
    // The third node has no tunnel end, so that only being a node distinguishes it from outsiders.
    node(n3, "2001:db8::a", None, json!({"b": "x"}));
    // Some clusters encapsulate only between subnets: the second and the third node are in one.
    let by_subnet = |yes: bool| if yes { "CrossSubnet" } else { "Always" };
    let some = objects.len();
    for (name, cidr, mode) in [
        ("pool", "10.0.0.0/24", by_subnet(some.is_multiple_of(2))),
        ("pool6", "fd00::/64", by_subnet(some.is_multiple_of(3))),
    ] {
        // Some have IPIP.
        let (vxlan, ipip) =
            if name == "pool" && some.is_multiple_of(5) { ("Never", mode) } else { (mode, "Never") };
        let spec = json!({"cidr": cidr, "vxlanMode": vxlan, "ipipMode": ipip});
        let pool = json!({"metadata": {"name": name}, "spec": spec});
        objects.push((Key::global(Kind::IpPool, name), pool));
    }
    objects
}

/// Pods with addresses, nodes and some outsiders, each with its class and node.
pub(crate) fn ends(snapshot: &Snapshot, classes: &Classes) -> Vec<End> {
    ends_of(&[snapshot], classes)
}

pub(crate) fn ends_of(snapshots: &[&Snapshot], classes: &Classes) -> Vec<End> {
    let mut ends = Vec::new();
    for (key, stored) in snapshots[0].iter() {
        let (peer, node) = match &stored.resource {
            Ok(Resource::WorkloadEndpoint(endpoint)) => (
                Peer::Pod { namespace: key.namespace.clone(), name: endpoint.spec.pod.clone() },
                endpoint.spec.node.clone(),
            ),
            // A node without an address of its own sends and receives nothing.
            Ok(Resource::Node(node)) if node.address().is_none() => continue,
            Ok(Resource::Node(_)) => (Peer::Node(key.name.clone()), key.name.clone()),
            _ => continue,
        };
        let class = classes.class_of(&peer).unwrap_or_else(|| panic!("{peer} is in no class"));
        ends.push(End { peer, class, node });
    }
    for address in OUTSIDERS {
        let address: IpAddr = address.parse().unwrap();
        let class = classes.class_of_outsider(snapshots, address);
        // Only if nothing in the cluster concerns IPv6, there is no class for it.
        assert!(class.is_some() || address.is_ipv6(), "{address} is in no class");
        let outsider = |class| End { peer: Peer::Address(address), class, node: String::new() };
        ends.extend(class.map(outsider));
    }
    ends
}

pub(crate) fn sample(packet: &Sent) -> Sample {
    Sample {
        protocol: packet.protocol,
        source_port: packet.source_port,
        destination_port: packet.destination_port,
        icmp: packet.icmp,
    }
}

pub(crate) fn question(from: Peer, to: Peer, packet: &Sent) -> Question {
    Question {
        from,
        to,
        protocol: packet.protocol,
        source_port: packet.source_port,
        destination_port: packet.destination_port,
        icmp: packet.icmp,
        via: None,
        by_node: None,
    }
}

/// The path of a packet of this family from one end to the other; `None` if none leaves: from an end to itself, and
/// from a node to its own pods.
pub(crate) fn path(from: &End, to: &End, family: IpVersion) -> Option<Path> {
    let together = !from.node.is_empty() && from.node == to.node;
    if from.peer == to.peer || (together && matches!(from.peer, Peer::Node(_))) {
        return None;
    }
    Some(Path { family, placement: if together { Placement::Together } else { Placement::Apart } })
}

/// Whether any policy was evaluated.
pub(crate) fn is_answerable(answer: &Answer) -> bool {
    let says = |trace: &Trace| {
        trace.verdict == Verdict::Deny || !matches!(trace.decided_by, DecidedBy::EndpointToHost { .. })
    };
    answer.egress.is_some() || answer.ingress.is_some() || answer.hosts.iter().any(says)
}

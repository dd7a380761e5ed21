//! Classes of pods and ports tell the truth: in random clusters every packet gets the verdict of its classes, asked in a
//! cluster that is reduced to those who stand for a class.
//!
//! `PROPTEST_CASES` says how many clusters; each is asked about every pair of pods, nodes and some outsiders.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, dead_code)]

mod random_clusters;

use std::net::IpAddr;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;
use tortie_api::{Key, Kind, Resource};
use tortie_policy::oracle::{Oracle, Peer, Question, Snapshot};
use tortie_policy::reach::{ClassKind, Classes, Judge, Sample};

use random_clusters::{Objects, Sent, clusters, manifest, packets};

const CLUSTERS: u32 = 300;
const PACKETS: usize = 25;
const OUTSIDERS: [&str; 6] = ["10.0.0.7", "10.0.0.200", "10.0.1.1", "198.51.100.7", "fd00::9", "2001:db8::1"];

/// What was compared, so that the test cannot pass for want of cases.
#[derive(Default, Debug)]
struct Seen {
    packets: usize,
    /// Packets between ends that do not stand for their classes.
    for_others: usize,
    clusters_with_less: usize,
    largest: usize,
}

#[test]
fn every_packet_gets_the_verdict_of_its_classes() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CLUSTERS);
    let config =
        ProptestConfig { cases, max_shrink_iters: 5_000, failure_persistence: None, ..Default::default() };
    let seen = std::cell::RefCell::new(Seen::default());
    let more = prop::collection::vec((0..6usize, 0..5usize), 0..6);
    let strategy = (clusters(), more, prop::collection::vec(packets(), PACKETS));
    let result = TestRunner::new(config).run(&strategy, |(objects, more, packets)| {
        let objects = grown(objects, &more);
        compare(&objects, &packets, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    });
    let seen = seen.into_inner();
    println!("{seen:?}");
    if let Err(error) = result {
        panic!("{error}");
    }
    let cases = usize::try_from(cases).unwrap();
    assert!(seen.packets > 500 * cases, "{seen:?}");
    assert!(seen.for_others > 50 * cases, "{seen:?}");
    assert!(seen.clusters_with_less > cases / 3, "{seen:?}");
    assert!(seen.largest >= 4, "{seen:?}");
}

/// With twins of some pods at addresses of their own, with nodes, and with an overlay.
fn grown(mut objects: Objects, twins: &[(usize, usize)]) -> Objects {
    let pods: Objects = objects.iter().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint).cloned().collect();
    for (number, (which, where_)) in twins.iter().enumerate() {
        let (mut key, mut value) = pods[which % pods.len()].clone();
        let name = format!("twin{number}");
        key.name = format!("n1-k8s-{name}-eth0");
        value["metadata"]["name"] = json!(key.name);
        value["spec"]["pod"] = json!(name);
        value["spec"]["node"] = json!(if number % 2 == 0 { "n1" } else { "n2" });
        let net = ["10.0.0.6", "10.0.0.2", "10.0.0.3", "10.9.0.1", "10.9.0.2"][*where_];
        value["spec"]["ipNetworks"] = json!([format!("{net}/32")]);
        objects.push((key, value));
    }
    let mut node = |name: &str, own: &str, tunnel: &str| {
        let annotations = json!({
            "projectcalico.org/IPv4Address": format!("{own}/24"),
            "projectcalico.org/IPv4VXLANTunnelAddr": tunnel,
        });
        let value = json!({"metadata": {"name": name, "annotations": annotations}});
        objects.push((Key::global(Kind::Node, name), value));
    };
    node("n1", "10.0.0.8", "10.0.1.0");
    node("n2", "203.0.113.9", "10.0.0.9");
    node("n3", "203.0.113.10", "10.0.0.10");
    let spec = json!({"cidr": "10.0.0.0/29", "vxlanMode": "Always", "ipipMode": "Never"});
    let pool = json!({"metadata": {"name": "pool"}, "spec": spec});
    objects.push((Key::global(Kind::IpPool, "pool"), pool));
    objects
}

fn compare(objects: &Objects, packets: &[Sent], seen: &mut Seen) -> Result<(), String> {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let oracle = Oracle::new(&snapshot);
    let classes = Classes::of(&[&snapshot]);
    let reduced = classes.reduced(&snapshot);
    let mut judge = Judge::new(&classes, &reduced, 0);
    let ends = ends(&snapshot, &classes);
    let pods = ends.iter().filter(|(peer, ..)| matches!(peer, Peer::Pod { .. })).count();
    let pod_classes = classes.all().iter().filter(|class| class.kind == ClassKind::Pods);
    seen.largest = pod_classes.clone().map(|class| class.count()).max().unwrap_or(0).max(seen.largest);
    seen.clusters_with_less += usize::from(pod_classes.count() < pods);
    for (from, from_class, from_node) in &ends {
        for (to, to_class, to_node) in &ends {
            let is_node = |peer: &Peer| matches!(peer, Peer::Node(_));
            // A pod never leaves itself; a node always reaches its own pods, whatever class they are of.
            if from == to || (is_node(from) && from_node == to_node) {
                continue;
            }
            for packet in packets {
                let question = question(from.clone(), to.clone(), packet);
                let truth = oracle.evaluate(&question).ok().filter(|answer| {
                    answer.egress.is_some() || answer.ingress.is_some()
                });
                let port = classes.ports().class_of(&sample(packet));
                let said = judge.verdict(*from_class, *to_class, port);
                let agree = truth.as_ref().map(|answer| answer.verdict) == said.map(|cell| cell.verdict);
                if !agree {
                    let names = |class: &usize| classes.all()[*class].name.clone();
                    return Err(format!(
                        "{question:?}: the oracle says {:?}, the classes {:?} → {:?} say {said:?}\n{truth:#?}\n{}",
                        truth.as_ref().map(|answer| answer.verdict),
                        names(from_class),
                        names(to_class),
                        manifest(objects)
                    ));
                }
                seen.packets += 1;
                let stands = |class: &usize, peer: &Peer| classes.all()[*class].members.first() == Some(peer);
                seen.for_others += usize::from(!stands(from_class, from) || !stands(to_class, to));
            }
        }
    }
    Ok(())
}

/// Pods with addresses, nodes and some outsiders, each with its class and node.
fn ends(snapshot: &Snapshot, classes: &Classes) -> Vec<(Peer, usize, String)> {
    let mut ends = Vec::new();
    for (key, stored) in snapshot.iter() {
        let (peer, node) = match &stored.resource {
            Ok(Resource::WorkloadEndpoint(endpoint)) => (
                Peer::Pod { namespace: key.namespace.clone(), name: endpoint.spec.pod.clone() },
                endpoint.spec.node.clone(),
            ),
            Ok(Resource::Node(_)) => (Peer::Node(key.name.clone()), key.name.clone()),
            _ => continue,
        };
        let class = classes.class_of(&peer).unwrap_or_else(|| panic!("{peer} is in no class"));
        ends.push((peer, class, node));
    }
    for address in OUTSIDERS {
        let address: IpAddr = address.parse().unwrap();
        let class = classes.class_of_outsider(&[snapshot], address);
        // Only where nothing speaks of IPv6 there is no class for it.
        assert!(class.is_some() || address.is_ipv6(), "{address} is in no class");
        ends.extend(class.map(|class| (Peer::Address(address), class, String::new())));
    }
    ends
}

fn sample(packet: &Sent) -> Sample {
    Sample {
        protocol: packet.protocol,
        source_port: packet.source_port,
        destination_port: packet.destination_port,
        icmp: packet.icmp,
    }
}

fn question(from: Peer, to: Peer, packet: &Sent) -> Question {
    Question {
        from,
        to,
        protocol: packet.protocol,
        source_port: packet.source_port,
        destination_port: packet.destination_port,
        icmp: packet.icmp,
    }
}

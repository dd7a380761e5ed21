//! Classes of pods, nodes, outsiders and ports are correct: in random clusters every packet gets the verdict of its
//! classes, judged in a cluster that is reduced to the representatives of classes. With both families, between nodes
//! and on one node, with and without host endpoints.
//!
//! `PROPTEST_CASES` sets the number of clusters. Each gets packets between every pair of pods, nodes and some
//! outsiders.
#![allow(clippy::print_stdout)]

use proptest::prelude::*;
use serde_json::json;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, Peer, Snapshot, Verdict};
use tortie_reach::{Cell, ClassKind, Classes, Judge, Path, Placement, Stop};

use crate::questions::{End, ends, is_answerable, path, question, sample, whole_clusters};
use testkit::clusters::{Objects, Sent, manifest, snapshot};
use testkit::random::Random;

const CLUSTERS: u32 = 150;

/// What was compared, so that the test does not pass for lack of cases.
#[derive(Default, Debug)]
struct Seen {
    packets: usize,
    /// Packets between ends that do not represent their classes.
    for_others: usize,
    /// Packets that a host endpoint drops.
    dropped_by_hosts: usize,
    /// IPv6 packets.
    v6: usize,
    /// Packets between two ends on one node.
    together: usize,
    /// Packets of a node to another node's pod: from its tunnel, by IPv4 and IPv6, and from its own address.
    from_tunnel: [usize; 2],
    from_node: usize,
    clusters_with_less: usize,
    largest: usize,
}

impl Seen {
    fn enough(&self, clusters: usize) -> bool {
        let kinds = [self.for_others, self.dropped_by_hosts, self.v6, self.together];
        self.packets > 500 * clusters
            && kinds.iter().all(|packets| *packets > 50 * clusters)
            && self.from_tunnel.iter().chain([&self.from_node]).all(|packets| *packets > 5 * clusters)
            && self.clusters_with_less > clusters / 5
            && self.largest >= 3
    }
}

#[test]
fn every_packet_gets_the_verdict_of_its_classes() {
    let random = Random::cases(CLUSTERS).shrinking(5_000);
    let seen = std::cell::RefCell::new(Seen::default());
    let test = |(objects, packets): (Objects, Vec<Sent>)| {
        compare(&objects, &packets, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    };
    let lacking = || {
        let seen = seen.borrow();
        (!seen.enough(random.count())).then(|| format!("{seen:?}"))
    };
    let result = random.prove(&whole_clusters(6), test, lacking);
    println!("{:?}", seen.borrow());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// For a moment two pods may have one address, and rules apply to both. A representative of a class keeps such a pod,
/// even if that pod does not represent its own class.
#[test]
fn peers_with_a_shared_address_are_in_one_class() {
    let mut snapshot = Snapshot::new();
    let mut add = |key: Key, value: serde_json::Value| snapshot.insert(key, value, None);
    add(Key::global(Kind::Namespace, "red"), json!({"metadata": {"name": "red"}}));
    let pods = [
        ("back", "back", 9),
        ("a1", "front", 1),
        ("a2", "front", 2),
        ("a3", "front", 3),
        ("a4", "front", 4),
        ("z1", "old", 3),
        ("z2", "old", 4),
        ("z3", "old", 1),
        ("z4", "old", 2),
    ];
    for (name, app, address) in pods {
        let value = json!({
            "metadata": {"name": name, "namespace": "red", "labels": {"app": app}},
            "spec": {"nodeName": "n1", "containers": []}, "status": {"podIP": format!("10.0.0.{address}")},
        });
        add(Key::namespaced(Kind::Pod, "red", name), value);
    }
    let spec = json!({"selector": "app == 'back'", "ingress": [{"action": "Allow", "source": {"selector": "app == 'old'"}}]});
    let policy = json!({"metadata": {"name": "p", "namespace": "red"}, "spec": spec});
    add(Key::namespaced(Kind::NetworkPolicy, "red", "p"), policy);
    let classes = Classes::of(&[&snapshot]);
    let reduced = classes.reduced(&snapshot);
    let class = |name: &str| {
        classes.class_of(&Peer::Pod { namespace: "red".to_owned(), name: name.to_owned() }).unwrap()
    };
    assert!(class("a1") == class("a4") && classes.all()[class("a1")].count() >= 4);
    let cell = apart(&mut Judge::new(&classes, &reduced, 0), class("a1"), class("back")).unwrap();
    assert_eq!(cell.verdict, Verdict::Allow);
}

/// A node reaches pods of an overlay from its tunnel address, and other pods from its own address (policy decision
/// 2).
#[test]
fn overlays_and_tunnels_separate_classes() {
    let mut snapshot = Snapshot::new();
    let mut add = |key: Key, value: serde_json::Value| snapshot.insert(key, value, None);
    add(Key::global(Kind::Namespace, "red"), json!({"metadata": {"name": "red"}}));
    for (name, address) in [("inside", "10.0.0.1"), ("outside", "10.9.0.1")] {
        let value = json!({
            "metadata": {"name": name, "namespace": "red", "labels": {"app": "x"}},
            "spec": {"nodeName": "n1", "containers": []}, "status": {"podIP": address},
        });
        add(Key::namespaced(Kind::Pod, "red", name), value);
    }
    for (name, own, tunnel) in [("n2", "203.0.113.9", "172.16.0.2"), ("n3", "203.0.113.10", "172.17.0.2")] {
        let annotations = json!({
            "projectcalico.org/IPv4Address": format!("{own}/24"),
            "projectcalico.org/IPv4VXLANTunnelAddr": tunnel,
        });
        add(Key::global(Kind::Node, name), json!({"metadata": {"name": name, "annotations": annotations}}));
    }
    let spec = json!({"cidr": "10.0.0.0/24", "vxlanMode": "Always", "ipipMode": "Never"});
    add(Key::global(Kind::IpPool, "pool"), json!({"metadata": {"name": "pool"}, "spec": spec}));
    let spec = json!({"ingress": [{"action": "Allow", "source": {"nets": ["172.16.0.0/16"]}}]});
    add(
        Key::namespaced(Kind::NetworkPolicy, "red", "p"),
        json!({"metadata": {"name": "p", "namespace": "red"}, "spec": spec}),
    );
    let classes = Classes::of(&[&snapshot]);
    let reduced = classes.reduced(&snapshot);
    let mut judge = Judge::new(&classes, &reduced, 0);
    let pod = |name: &str| Peer::Pod { namespace: "red".to_owned(), name: name.to_owned() };
    for (from, to, verdict) in [
        ("n2", "inside", Verdict::Allow),
        ("n2", "outside", Verdict::Deny),
        ("n3", "inside", Verdict::Deny),
        ("n3", "outside", Verdict::Deny),
    ] {
        let (from, to) = (Peer::Node(from.to_owned()), pod(to));
        let cell = apart(&mut judge, classes.class_of(&from).unwrap(), classes.class_of(&to).unwrap());
        assert_eq!(cell.unwrap().verdict, verdict, "{from} → {to}");
    }
}

/// In a CrossSubnet pool, a node reaches pods of nodes in its subnet from its own address, and others from its tunnel address
/// of the family.
#[test]
fn subnets_separate_classes() {
    let mut snapshot = Snapshot::new();
    let mut add = |key: Key, value: serde_json::Value| snapshot.insert(key, value, None);
    add(Key::global(Kind::Namespace, "red"), json!({"metadata": {"name": "red"}}));
    let pod = json!({
        "metadata": {"name": "pod", "namespace": "red"}, "spec": {"nodeName": "n1", "containers": []},
        "status": {"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]},
    });
    add(Key::namespaced(Kind::Pod, "red", "pod"), pod);
    for (name, net, net_v6, tunnel) in [
        ("n1", "203.0.113.1/24", "2001:db8::1/64", 1),
        ("near", "203.0.113.2/24", "2001:db8::2/64", 2),
        ("far", "198.51.100.1/24", "2001:db8:1::1/64", 3),
        // It has n1 in its network, and n1 does not have it.
        ("half", "203.0.112.1/20", "2001:db8:2::1/32", 4),
    ] {
        let annotations = json!({
            "projectcalico.org/IPv4Address": net, "projectcalico.org/IPv6Address": net_v6,
            "projectcalico.org/IPv4VXLANTunnelAddr": format!("172.16.0.{tunnel}"),
            "projectcalico.org/IPv6VXLANTunnelAddr": format!("fd16::{tunnel}"),
        });
        add(Key::global(Kind::Node, name), json!({"metadata": {"name": name, "annotations": annotations}}));
    }
    for (name, cidr) in [("pool", "10.0.0.0/24"), ("pool6", "fd00::/64")] {
        let spec = json!({"cidr": cidr, "vxlanMode": "CrossSubnet", "ipipMode": "Never"});
        add(Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}));
    }
    let tunnels = json!([
        {"action": "Allow", "source": {"nets": ["172.16.0.0/16"]}}, {"action": "Allow", "source": {"nets": ["fd16::/64"]}},
    ]);
    add(
        Key::namespaced(Kind::NetworkPolicy, "red", "p"),
        json!({"metadata": {"name": "p", "namespace": "red"}, "spec": {"ingress": tunnels}}),
    );
    let classes = Classes::of(&[&snapshot]);
    let reduced = classes.reduced(&snapshot);
    let mut judge = Judge::new(&classes, &reduced, 0);
    let class = |peer: Peer| classes.class_of(&peer).unwrap();
    let to = class(Peer::Pod { namespace: "red".to_owned(), name: "pod".to_owned() });
    for (from, verdict) in [("near", Verdict::Deny), ("far", Verdict::Allow), ("half", Verdict::Allow)] {
        for family in IpVersion::ALL {
            let path = Path { family, placement: Placement::Apart };
            let cell = judge.verdict(class(Peer::Node(from.to_owned())), to, path, 0);
            assert_eq!(cell.unwrap().verdict, verdict, "{from}, {family}");
        }
    }
}

/// Untracked policy applies to a host endpoint of one interface, not to one of all interfaces, even if both have the
/// same policies and profiles.
#[test]
fn untracked_policy_separates_host_endpoints_of_one_and_of_all_interfaces() {
    let mut snapshot = Snapshot::new();
    let mut add = |kind, name: &str, mut value: serde_json::Value| {
        value["metadata"]["name"] = json!(name);
        snapshot.insert(Key::global(kind, name), value, None);
    };
    for (node, address) in [("n1", "203.0.113.1"), ("n2", "203.0.113.2"), ("n3", "203.0.113.3")] {
        let annotations = json!({"projectcalico.org/IPv4Address": format!("{address}/24")});
        add(Kind::Node, node, json!({"metadata": {"annotations": annotations}}));
    }
    for (name, node, interface) in [("one", "n1", "eth0"), ("all", "n1", "*"), ("all-of-n2", "n2", "*")] {
        let spec = json!({"node": node, "interfaceName": interface});
        add(Kind::HostEndpoint, name, json!({"metadata": {}, "spec": spec}));
    }
    let allow = json!([{"action": "Allow"}]);
    let spec = json!({"doNotTrack": true, "applyOnForward": true, "selector": "all()", "ingress": allow, "egress": allow});
    add(Kind::GlobalNetworkPolicy, "p", json!({"metadata": {}, "spec": spec}));
    let classes = Classes::of(&[&snapshot]);
    let reduced = classes.reduced(&snapshot);
    let mut judge = Judge::new(&classes, &reduced, 0);
    let class = |name: &str| classes.class_of(&Peer::Node(name.to_owned())).unwrap();
    for (from, verdict) in [("n1", Verdict::Allow), ("n2", Verdict::Deny)] {
        let cell = apart(&mut judge, class(from), class("n3")).unwrap();
        assert_eq!(cell.verdict, verdict, "{from}");
    }
}

/// The verdict between nodes for IPv4.
fn apart(judge: &mut Judge<'_>, from: usize, to: usize) -> Option<Cell> {
    judge.verdict(from, to, Path { family: IpVersion::V4, placement: Placement::Apart }, 0)
}

fn compare(objects: &Objects, packets: &[Sent], seen: &mut Seen) -> Result<(), String> {
    let snapshot = snapshot(objects);
    let oracle = Oracle::new(&snapshot);
    let classes = Classes::of(&[&snapshot]);
    let reduced = classes.reduced(&snapshot);
    let mut judge = Judge::new(&classes, &reduced, 0);
    let ends = ends(&snapshot, &classes);
    let pods = ends.iter().filter(|end| matches!(end.peer, Peer::Pod { .. })).count();
    let pod_classes = classes.all().iter().filter(|class| class.kind == ClassKind::Pods);
    seen.largest = pod_classes.clone().map(|class| class.count()).max().unwrap_or(0).max(seen.largest);
    seen.clusters_with_less += usize::from(pod_classes.count() < pods);
    let pairs = ends.iter().flat_map(|from| ends.iter().map(move |to| (from, to)));
    for (from, to) in pairs {
        for path in [IpVersion::V4, IpVersion::V6].into_iter().filter_map(|family| path(from, to, family)) {
            for packet in packets {
                let question = question(from.peer.clone(), to.peer.clone(), packet);
                let truth = oracle.evaluate_by(&question, path.family).ok();
                let port = classes.ports().class_of(&sample(packet));
                let found = judge.verdict(from.class, to.class, path, port);
                let expected =
                    truth.as_ref().filter(|answer| is_answerable(answer)).map(|answer| answer.verdict);
                if expected != found.map(|cell| cell.verdict) {
                    let names = |end: &End| classes.all()[end.class].name.clone();
                    return Err(format!(
                        "{question:?} {path:?}: the oracle says {expected:?}, the classes {:?} → {:?} say {found:?}\n{truth:#?}\n{}",
                        names(from),
                        names(to),
                        manifest(objects)
                    ));
                }
                let Some(found) = found else { continue };
                let stands = |end: &End| classes.all()[end.class].members.first() == Some(&end.peer);
                let denies = |stop| found.at(stop).is_some_and(|found| found.verdict == Verdict::Deny);
                seen.packets += 1;
                if let (Peer::Node(node), Peer::Pod { .. }, Some(truth)) = (&from.peer, &to.peer, &truth) {
                    let Some(node) = oracle.nodes().find(|one| one.name == node) else { continue };
                    match (node.own.contains(&truth.source), path.family) {
                        (true, _) => seen.from_node += 1,
                        (false, IpVersion::V4) => seen.from_tunnel[0] += 1,
                        (false, IpVersion::V6) => seen.from_tunnel[1] += 1,
                    }
                }
                seen.for_others += usize::from(!stands(from) || !stands(to));
                seen.dropped_by_hosts += usize::from(denies(Stop::SenderNode) || denies(Stop::ReceiverNode));
                seen.v6 += usize::from(path.family == IpVersion::V6);
                seen.together += usize::from(path.placement == Placement::Together);
            }
        }
    }
    Ok(())
}

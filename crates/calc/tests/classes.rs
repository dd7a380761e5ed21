//! Classes of pods and ports tell the truth: in random clusters every packet gets the verdict of its classes, asked in a
//! cluster that is reduced to those who stand for a class.
//!
//! What stands on them is held to account here, too: what a preview says changes, and nothing else, changes; rules of
//! which lint says that they never decide can be taken out without any packet noticing.
//!
//! `PROPTEST_CASES` says how many clusters; each is asked about every pair of pods, nodes and some outsiders.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, dead_code)]

use std::net::IpAddr;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Resource};
use tortie_policy::lint::{Code, lint};
use tortie_policy::oracle::{Oracle, Peer, Question, Snapshot, Verdict};
use tortie_policy::reach::{Change, ClassKind, Classes, Judge, Sample};

use testkit::clusters::{Objects, Sent, clusters, manifest, packets};

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

/// For a moment two pods may have one address, and rules mean both: those who stand for a class keep such company, also
/// where the company does not stand for its own class.
#[test]
fn who_shares_an_address_comes_along() {
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
    let cell = Judge::new(&classes, &reduced, 0).verdict(class("a1"), class("back"), 0).unwrap();
    assert_eq!(cell.verdict, Verdict::Allow);
}

/// A node reaches pods of an overlay from its tunnel's address, and others from its own (semantics 2).
#[test]
fn overlays_and_tunnels_tell_classes_apart() {
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
        let cell = judge.verdict(classes.class_of(&from).unwrap(), classes.class_of(&to).unwrap(), 0);
        assert_eq!(cell.unwrap().verdict, verdict, "{from} → {to}");
    }
}

#[derive(Default, Debug)]
struct Changed {
    packets: usize,
    changed: usize,
}

#[test]
fn a_preview_says_what_changes_and_nothing_else() {
    let seen = std::cell::RefCell::new(Changed::default());
    let more = prop::collection::vec((0..6usize, 0..5usize), 0..4);
    let strategy =
        (clusters(), more, any::<prop::sample::Index>(), prop::collection::vec(packets(), PACKETS));
    let result = TestRunner::new(config(100)).run(&strategy, |(objects, more, which, packets)| {
        let objects = grown(objects, &more);
        previewed(&objects, which.index(objects.len()), &packets, &mut seen.borrow_mut())
            .map_err(TestCaseError::fail)
    });
    let seen = seen.into_inner();
    println!("{seen:?}");
    if let Err(error) = result {
        panic!("{error}");
    }
    assert!(seen.packets > 10_000 && seen.changed > 500, "{seen:?}");
}

/// Takes one object out, and compares what the preview says of every packet with the oracle's words before and after.
fn previewed(objects: &Objects, which: usize, packets: &[Sent], seen: &mut Changed) -> Result<(), String> {
    let mut before = Snapshot::new();
    for (key, value) in objects {
        before.insert(key.clone(), value.clone(), None);
    }
    let removed = &objects[which].0;
    let mut after = before.clone();
    after.remove(removed);
    let change = Change::new(&before, &after);
    let differences = change.differences();
    let (was, is) = (Oracle::new(&before), Oracle::new(&after));
    let ends = ends_of(&[&before, &after], &change.classes);
    for (from, from_class, from_node) in &ends {
        for (to, to_class, to_node) in &ends {
            if from == to || (matches!(from, Peer::Node(_)) && from_node == to_node) {
                continue;
            }
            for packet in packets {
                let question = question(from.clone(), to.clone(), packet);
                let verdict = |oracle: &Oracle<'_>| {
                    let answer = oracle.evaluate(&question).ok()?;
                    (answer.egress.is_some() || answer.ingress.is_some()).then_some(answer.verdict)
                };
                let (Some(one), Some(other)) = (verdict(&was), verdict(&is)) else { continue };
                let port = change.classes.ports().class_of(&sample(packet));
                let told: Vec<_> = differences
                    .iter()
                    .filter(|difference| {
                        difference.from.contains(from_class)
                            && difference.to.contains(to_class)
                            && difference.ports.contains(&port)
                    })
                    .collect();
                let agree = match told.as_slice() {
                    [] => one == other,
                    [told] => {
                        one != other
                            && told.after.verdict == other
                            && told.before.iter().all(|why| why.verdict == one)
                    }
                    _ => false,
                };
                if !agree {
                    return Err(format!(
                        "without {removed} {question:?}: {one:?} → {other:?}, but told {told:#?}\n{}",
                        manifest(objects)
                    ));
                }
                seen.packets += 1;
                seen.changed += usize::from(one != other);
            }
        }
    }
    Ok(())
}

#[derive(Default, Debug)]
struct Linted {
    shadowed: usize,
    matches_nothing: usize,
    never_matches: usize,
    selects_nothing: usize,
}

#[test]
fn what_lint_calls_idle_can_be_taken_out() {
    let seen = std::cell::RefCell::new(Linted::default());
    let strategy = (clusters(), prop::collection::vec(packets(), PACKETS));
    let result = TestRunner::new(config(150)).run(&strategy, |(objects, packets)| {
        let objects = grown(objects, &[(0, 0), (1, 3)]);
        linted(&objects, &packets, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    });
    let seen = seen.into_inner();
    println!("{seen:?}");
    if let Err(error) = result {
        panic!("{error}");
    }
    // What is shadowed is rarest: some 30, and at times a third of that.
    assert!(seen.shadowed >= 2, "{seen:?}");
    let often = [seen.matches_nothing, seen.never_matches, seen.selects_nothing];
    assert!(often.iter().all(|count| *count >= 20), "{seen:?}");
}

fn linted(objects: &Objects, packets: &[Sent], seen: &mut Linted) -> Result<(), String> {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let classes = Classes::of(&[&snapshot]);
    let ends = ends(&snapshot, &classes);
    for finding in lint(&snapshot) {
        let calico = matches!(finding.object.kind, Kind::NetworkPolicy | Kind::GlobalNetworkPolicy);
        let idle = match finding.code {
            Code::Shadowed => &mut seen.shadowed,
            Code::MatchesNothing if finding.field.ends_with(']') => &mut seen.matches_nothing,
            // Of the other kinds one peer of several may be meant.
            Code::NeverMatches if calico => &mut seen.never_matches,
            Code::SelectsNothing => &mut seen.selects_nothing,
            _ => continue,
        };
        let mut without = snapshot.clone();
        let mut value = snapshot.get(&finding.object).unwrap().value.clone();
        match rule_of(&finding.field) {
            None => drop(without.remove(&finding.object)),
            Some((direction, index)) => {
                keep_types(finding.object.kind, &mut value);
                value["spec"][direction].as_array_mut().unwrap().remove(index);
                without.insert(finding.object.clone(), value, None);
            }
        }
        if finding.code == Code::NeverMatches
            && rule_of(&finding.field).is_none()
            && finding.field != "spec.selector"
        {
            continue;
        }
        *idle += 1;
        same(&snapshot, &without, &ends, packets).map_err(|question| {
            format!("{finding:#?}\nbut without it changes {question}\n{}", manifest(objects))
        })?;
    }
    Ok(())
}

/// `spec.ingress[2].source.nets` is about the rule of index 2.
fn rule_of(field: &str) -> Option<(&str, usize)> {
    let (direction, rest) = field.strip_prefix("spec.")?.split_once('[')?;
    let direction = Some(direction).filter(|direction| ["ingress", "egress"].contains(direction))?;
    Some((direction, rest.split_once(']')?.0.parse().ok()?))
}

/// A policy that loses its last rule must go on to speak of that direction, as its kind's defaults had it.
fn keep_types(kind: Kind, value: &mut serde_json::Value) {
    let has = |direction: &str| value["spec"][direction].as_array().is_some_and(|rules| !rules.is_empty());
    let (ingress, egress) = (has("ingress"), has("egress"));
    let (field, types) = match kind {
        Kind::KubernetesNetworkPolicy if !egress => ("policyTypes", vec!["Ingress"]),
        Kind::KubernetesNetworkPolicy => ("policyTypes", vec!["Ingress", "Egress"]),
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => match (ingress, egress) {
            (_, false) => ("types", vec!["Ingress"]),
            (false, true) => ("types", vec!["Egress"]),
            (true, true) => ("types", vec!["Ingress", "Egress"]),
        },
        // Policies of administrators end their tier nowhere.
        _ => return,
    };
    let given = value["spec"][field].as_array().is_some_and(|types| !types.is_empty());
    if !given {
        value["spec"][field] = json!(types);
    }
}

/// The first question that the two answer differently.
fn same(
    one: &Snapshot,
    other: &Snapshot,
    ends: &[(Peer, usize, String)],
    packets: &[Sent],
) -> Result<(), String> {
    let (one, other) = (Oracle::new(one), Oracle::new(other));
    for (from, ..) in ends {
        for (to, ..) in ends {
            for packet in packets {
                let question = question(from.clone(), to.clone(), packet);
                let verdict =
                    |oracle: &Oracle<'_>| oracle.evaluate(&question).map(|answer| answer.verdict).ok();
                if verdict(&one) != verdict(&other) {
                    return Err(format!("{question:?}"));
                }
            }
        }
    }
    Ok(())
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, max_shrink_iters: 60, failure_persistence: None, ..Default::default() }
}

/// With twins of some pods at addresses of their own, with nodes, and with an overlay.
fn grown(mut objects: Objects, twins: &[(usize, usize)]) -> Objects {
    let pods: Objects =
        objects.iter().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint).cloned().collect();
    for (number, (which, where_)) in twins.iter().enumerate() {
        let (mut key, mut value) = pods[which % pods.len()].clone();
        let name = format!("twin{number}");
        key.name = format!("n1-k8s-{name}-eth0");
        value["metadata"]["name"] = json!(key.name);
        value["spec"]["pod"] = json!(name);
        value["spec"]["node"] = json!(if number % 2 == 0 { "n1" } else { "n2" });
        // Every other one next door: nothing but its namespace tells it from its twin.
        if number % 2 == 1 {
            let other = if key.namespace == "red" { "blue" } else { "red" };
            let account = value["spec"]["serviceAccountName"].as_str().unwrap_or_default();
            value["spec"]["profiles"] = json!(WorkloadEndpoint::profiles_for(other, account));
            value["metadata"]["namespace"] = json!(other);
            key.namespace = other.to_owned();
        }
        // And some run as somebody else.
        if number % 3 == 2 {
            let account = if value["spec"]["serviceAccountName"] == "runner" { "default" } else { "runner" };
            value["spec"]["profiles"] = json!(WorkloadEndpoint::profiles_for(&key.namespace, account));
            value["spec"]["serviceAccountName"] = json!(account);
        }
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
    let spec = json!({"cidr": "10.0.0.0/24", "vxlanMode": "Always", "ipipMode": "Never"});
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
                let truth = oracle
                    .evaluate(&question)
                    .ok()
                    .filter(|answer| answer.egress.is_some() || answer.ingress.is_some());
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
    ends_of(&[snapshot], classes)
}

fn ends_of(snapshots: &[&Snapshot], classes: &Classes) -> Vec<(Peer, usize, String)> {
    let mut ends = Vec::new();
    for (key, stored) in snapshots[0].iter() {
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
        let class = classes.class_of_outsider(snapshots, address);
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
        via: None,
    }
}

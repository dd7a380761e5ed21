//! Certain verdicts stay when what was not read becomes readable.

use std::cell::RefCell;
use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::clusters::{Objects, Sent, clusters_of_distinct_pods, manifest, packets, pods};
use testkit::random::{Random, Tally};
use tortie_api::manifest::Offline;
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, Peer, Question};

use super::Doubts;
use crate::snapshot::{Read, of_settled};

/// The ways in which a document is not read.
const WAYS: [&str; 9] =
    ["metadata", "spec", "kind", "version", "no kind", "template", "variable", "foreign", "missing"];

fn read(texts: &[&str]) -> Read {
    let mut cluster = Offline::default();
    for (number, text) in texts.iter().enumerate() {
        cluster.read(&format!("{number}.yml"), text).unwrap();
    }
    of_settled(cluster.settled())
}

/// The cluster's objects that are read on their own, with pods, and half of the time without network sets, which let every
/// namespace matter everywhere.
fn usual(objects: &Objects, with_sets: bool) -> Objects {
    let is_usual = |(key, value): &(Key, Value)| {
        let is_set = matches!(key.kind, Kind::NetworkSet);
        key.kind != Kind::WorkloadEndpoint
            && (with_sets || !is_set)
            && value["spec"]["tier"] != "undescribed"
            && read(&[&manifest(&vec![(key.clone(), value.clone())])]).doubts.is_empty()
    };
    // Two forms of one object are a doubt of their own.
    let mut seen = BTreeSet::new();
    pods::as_pods(objects)
        .into_iter()
        .filter(|object| is_usual(object) && seen.insert(object.0.clone()))
        .collect()
}

/// An object of a cluster, as a document that is not read.
fn broken(object: &(Key, Value), way: &str) -> String {
    let (key, mut value) = object.clone();
    let text = |value: Value| manifest(&vec![(key.clone(), value)]);
    let kind = key.kind.name();
    match way {
        "metadata" => {
            value["metadata"]["colour"] = json!("red");
            text(value)
        }
        "spec" => {
            value["spec"]["colour"] = json!("red");
            text(value)
        }
        "variable" => {
            value["metadata"]["labels"] = json!({"a": "${A}"});
            text(value)
        }
        "kind" => text(value).replace(&format!("\"kind\":\"{kind}\""), "\"kind\":\"Thing\""),
        "version" => text(value).replace("\"apiVersion\":\"", "\"apiVersion\":\"x"),
        "no kind" => text(value).replace(&format!(",\"kind\":\"{kind}\""), ""),
        "template" => {
            format!("---\n{{{{- if .Values.x }}}}\n{}\n{{{{- end }}}}\n", text(value).replace("---", ""))
        }
        "foreign" => {
            let value = json!({"resources": [{"apiVersion": "v1", "kind": kind, "metadata": {}}]});
            format!(
                "---\n{}\n",
                json!({
                    "apiVersion": "metallb.io/v1", "kind": "IPAddressPool", "metadata": {"name": "x"}, "spec": value,
                })
            )
        }
        _ => {
            let metadata = json!({"name": "other", "namespace": key.namespace});
            let api_version =
                if key.kind.is_policy() && key.kind.namespaced() { "cilium.io/v2" } else { "x.org/v1" };
            format!(
                "---\n{}\n",
                json!({
                    "apiVersion": api_version, "kind": "CiliumNetworkPolicy", "metadata": metadata,
                })
            )
        }
    }
}

/// The questions that a packet stands for: between addresses, and between the pods that have them.
fn questions(objects: &Objects, sent: &Sent) -> Vec<Question> {
    let pods_at = |address: std::net::IpAddr| {
        let is_at = move |(key, value): &&(Key, Value)| {
            let ips = value["status"]["podIPs"].as_array().into_iter().flatten();
            key.kind == Kind::Pod && ips.clone().any(|ip| ip["ip"] == address.to_string())
        };
        let pod =
            |(key, _): &(Key, Value)| Peer::Pod { namespace: key.namespace.clone(), name: key.name.clone() };
        objects.iter().filter(is_at).map(pod).chain([Peer::Address(address)]).collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    for from in pods_at(sent.source) {
        for to in pods_at(sent.destination) {
            all.push(Question {
                from: from.clone(),
                to,
                protocol: sent.protocol,
                source_port: sent.source_port,
                destination_port: sent.destination_port,
                icmp: sent.icmp,
                via: None,
                by_node: None,
            });
        }
    }
    all
}

#[test]
fn no_certain_verdict_changes_when_a_document_becomes_readable() {
    let tally = RefCell::new(Tally::default());
    let cases =
        (clusters_of_distinct_pods(), prop::collection::vec(packets(), 12), any::<prop::sample::Index>());
    let cases = (cases, 0..WAYS.len(), any::<bool>());
    let test = |((objects, sent, chosen), way, with_sets): (
        (Objects, Vec<Sent>, prop::sample::Index),
        usize,
        bool,
    )| {
        let objects = usual(&objects, with_sets);
        if objects.is_empty() {
            return Ok(());
        }
        let (chosen, way) = (chosen.index(objects.len()), WAYS[way]);
        let mut left = objects.clone();
        let object = left.remove(chosen);
        let before = read(&[&manifest(&left), &broken(&object, way)]);
        let after = read(&[&manifest(&left), &manifest(&vec![object.clone()])]);
        prop_assert!(after.doubts.is_empty(), "{object:?}");
        let is_known = before.doubts.iter().any(super::Doubt::matters);
        let doubts = Doubts::new(&before.doubts, &[&before.snapshot]);
        let (was, is) = (Oracle::new(&before.snapshot), Oracle::new(&after.snapshot));
        for question in sent.iter().flat_map(|sent| questions(&objects, sent)) {
            let (Ok(one), Ok(other)) = (was.evaluate(&question), is.evaluate(&question)) else { continue };
            let is_certain = doubts.of_flow(&question.from, &question.to).is_empty();
            let is_same = one.verdict == other.verdict;
            prop_assert!(
                is_same || !is_certain,
                "{way} {}: {question:?}: {:?} became {:?}\n{}",
                object.0,
                one.verdict,
                other.verdict,
                manifest(&objects)
            );
            tally.borrow_mut().count(if is_certain { "certain" } else { "not certain" }, is_same);
            tally.borrow_mut().count(format!("certain: {}", object.0.kind), is_certain);
        }
        // Endpoints' namespaces are the only objects whose documents may be complete although they are broken.
        prop_assert!(is_known || way == "spec", "{way} {object:?}");
        Ok(())
    };
    let lacking = || {
        let tally = tally.borrow();
        let (certain, _) = tally.of("certain");
        let (uncertain, same) = tally.of("not certain");
        (certain < 200 || uncertain - same < 20)
            .then(|| format!("{certain} certain verdicts, and {} that changed\n{tally}", uncertain - same))
    };
    let proven = Random::cases(200).shrinking(200).prove(&cases, test, lacking);
    println!("{}", tally.borrow());
    proven.unwrap();
}

/// The doubts of one document about flows in a small cluster.
fn uncertain(document: &Value, more: &str) -> BTreeSet<&'static str> {
    let pod = |namespace: &str, name: &str, ip: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {namespace}}}, spec: {{containers: [{{name: c}}]}}, status: {{podIP: {ip}}}}}\n"
        )
    };
    let cluster =
        [pod("shop", "a", "10.0.0.1"), pod("shop", "b", "10.0.0.2"), pod("ops", "c", "10.0.0.3")].concat();
    let node = "---\n{apiVersion: v1, kind: Node, metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.0.2.1/24}}}\n";
    let read = read(&[&cluster, node, more, &document.to_string()]);
    assert_eq!(read.doubts.len(), 1, "{document}: {:?}", read.doubts);
    let doubts = Doubts::new(&read.doubts, &[&read.snapshot]);
    let pod =
        |namespace: &str, name: &str| Peer::Pod { namespace: namespace.to_owned(), name: name.to_owned() };
    let address = |text: &str| Peer::Address(text.parse().unwrap());
    let (a, b, c) = (pod("shop", "a"), pod("shop", "b"), pod("ops", "c"));
    let flows = [
        ("a→b", &a, &b),
        ("a→c", &a, &c),
        ("c→c", &c, &c),
        ("c→address of a", &c, &address("10.0.0.1")),
        ("c→outside", &c, &address("198.51.100.1")),
        ("outside→c", &address("198.51.100.9"), &c),
        ("c→node", &c, &Peer::Node("n1".to_owned())),
    ];
    let mut found: BTreeSet<&str> = BTreeSet::new();
    for (name, from, to) in flows {
        found.extend((!doubts.of_flow(from, to).is_empty()).then_some(name));
    }
    let service = |name: &str| Key::namespaced(Kind::Service, "shop", name);
    for (name, to, service) in [
        ("to Service db", None, Some(service("db"))),
        ("to Service web", None, Some(service("web"))),
        ("to a pod", Some(c.clone()), None),
        ("to an address", Some(address("198.51.100.1")), None),
        ("to a node", Some(Peer::Node("n1".to_owned())), None),
    ] {
        found.extend((!doubts.of_translation(to.as_ref(), service.as_ref()).is_empty()).then_some(name));
    }
    found
}

#[test]
fn a_doubt_concerns_what_its_document_could_change() {
    let document = |api_version: &str, kind: &str, content: Value| {
        let mut value = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "db", "namespace": "shop", "x": 1}});
        value.as_object_mut().unwrap().extend(content.as_object().cloned().unwrap());
        value
    };
    let flows_of_shop = ["a→b", "a→c", "c→address of a"];
    let services = ["to Service db", "to Service web"];
    let every_flow = ["a→b", "a→c", "c→c", "c→address of a", "c→outside", "outside→c", "c→node"];
    let every_way = ["to Service db", "to Service web", "to a pod", "to an address", "to a node"];
    let of_service = ["to Service db", "to an address", "to a node"];
    let ends = [&flows_of_shop[..], &services, &["to a node"]].concat();
    let all = [&every_flow[..], &every_way].concat();
    let policy = document("networking.k8s.io/v1", "NetworkPolicy", json!({"spec": {"podSelector": {}}}));
    let service = document("v1", "Service", json!({"spec": {"ports": [{"port": 80}]}}));
    let deployment = document(
        "apps/v1",
        "Deployment",
        json!({"spec": {"template": {"spec": {"contaners": [], "containers": [{"name": "c"}]}}}}),
    );
    let pod = |ip: &str| {
        document("v1", "Pod", json!({"spec": {"containers": [{"name": "c"}]}, "status": {"podIP": ip}}))
    };
    let naming = |kind: &str, namespace: &str| {
        format!(
            "---\n{{apiVersion: projectcalico.org/v3, kind: {kind}, metadata: {{name: p{namespace}}}, spec: {{types: [Egress], egress: [{{action: Allow, destination: {{services: {{name: db, namespace: shop}}}}}}]}}}}\n"
        )
    };
    let host = "---\n{apiVersion: projectcalico.org/v3, kind: HostEndpoint, metadata: {name: h}, spec: {node: n1, interfaceName: eth0}}\n";
    let set = "---\n{apiVersion: projectcalico.org/v3, kind: NetworkSet, metadata: {name: s, namespace: shop}, spec: {nets: [198.51.100.0/24]}}\n";
    for (document, more, expected) in [
        (&policy, "", flows_of_shop.to_vec()),
        (&service, "", of_service.to_vec()),
        (&service, &naming("NetworkPolicy", ", namespace: shop"), [&flows_of_shop[..], &of_service].concat()),
        (&service, &naming("GlobalNetworkPolicy", ""), all.clone()),
        (&deployment, "", ends.clone()),
        (&deployment, host, all.clone()),
        (&deployment, set, all.clone()),
        (&pod("10.0.0.9"), "", [&ends[..], &[]].concat()),
        (&pod("198.51.100.1"), "", [&ends[..], &["c→outside"]].concat()),
        (&pod("10.0.0.3"), "", [&every_flow[..], &services, &["to a node"]].concat()),
        (&document("x.org/v1", "Thing", json!({})), "", all.clone()),
        (
            &document("projectcalico.org/v3", "BGPPeer", json!({"metadata": {"name": "x", "y": 1}})),
            "",
            Vec::new(),
        ),
    ] {
        let expected: BTreeSet<&str> = expected.into_iter().collect();
        assert_eq!(uncertain(document, more), expected, "{document} {more}");
    }
}

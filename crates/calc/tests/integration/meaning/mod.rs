//! From manifests to verdicts. Numbers in brackets are decisions of docs/policy.md.

mod cases;
mod support;
mod traps;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_calc::Calc;

use cases::cases;
use support::{OUTSIDE, calc_of, calico, cluster, objects, oracle_says, passes};

#[test]
fn policies_have_their_documented_verdicts() {
    for case in cases() {
        let objects = objects(&case.policies);
        let calc = calc_of(&case.policies);
        let unexpected = calc.findings().into_iter().filter(|finding| finding.key.name != "impostor");
        let unexpected: Vec<_> = unexpected.filter(|finding| !finding.problem.contains("tier x ")).collect();
        assert_eq!(unexpected, vec![], "{}", case.what);
        let flows =
            case.allowed.iter().map(|flow| (flow, true)).chain(case.denied.iter().map(|flow| (flow, false)));
        for (flow, expected) in flows {
            let (from, rest) = flow.split_once(" > ").unwrap();
            let (to, port) = rest.split_once(' ').unwrap();
            assert_eq!(passes(&calc, from, to, port), expected, "{}: {flow}", case.what);
            assert_eq!(
                oracle_says(&objects, from, to, port),
                expected,
                "the oracle on {}: {flow}",
                case.what
            );
        }
    }
}

/// A stored policy that cannot be understood denies, in the directions that it names, at its position, for the
/// endpoints that it selects (18).
#[test]
fn invalid_policies_deny() {
    let policy = |spec: Value| json!({"metadata": {"name": "p", "namespace": "db"}, "spec": spec});
    let allow_first = json!({"order": 1, "ingress": [{"action": "Allow", "protocol": "TCP", "destination": {"ports": [1]}}]});
    for (spec, allowed, denied) in [
        // An unknown field; the selector is readable.
        (
            json!({"selector": "tier == 'main'", "ingress": [{"action": "Allow", "notSelektor": "x"}], "types": ["Ingress"]}),
            vec!["web/front > db/copy tcp/2", "db/main > web/front tcp/2"],
            vec!["web/front > db/main tcp/2"],
        ),
        // An unknown action, without directions: both.
        (
            json!({"selector": "tier == 'main'", "ingress": [{"action": "Permit"}]}),
            vec!["web/front > db/copy tcp/2"],
            vec!["web/front > db/main tcp/2", "db/main > web/front tcp/2"],
        ),
        // An unreadable selector: the whole namespace, and no other one.
        (
            json!({"selector": "tier = 'main'", "types": ["Ingress"]}),
            vec!["db/main > web/front tcp/2"],
            vec!["web/front > db/main tcp/2", "web/front > db/copy tcp/2"],
        ),
        // An Allow by HTTP request allows nothing, because nothing inspects requests (15); an earlier policy still
        // decides.
        (
            json!({"order": 2, "selector": "tier == 'main'", "ingress": [{"action": "Allow", "http": {"methods": ["GET"]}}], "types": ["Ingress"]}),
            vec!["web/front > db/main tcp/1", "web/front > db/copy tcp/1"],
            vec!["web/front > db/main tcp/2"],
        ),
    ] {
        let mut calc = calc_of("");
        calc.update(&Key::namespaced(Kind::NetworkPolicy, "db", "p"), Some(&policy(spec.clone())));
        if spec.get("order").is_some() {
            calc.update(
                &Key::namespaced(Kind::NetworkPolicy, "db", "first"),
                Some(&policy(allow_first.clone())),
            );
        }
        calc.flush();
        let findings = calc.findings();
        let names: Vec<&str> = findings.iter().map(|finding| finding.key.name.as_str()).collect();
        assert_eq!(names, ["impostor", "p"], "{spec}: {findings:?}");
        for (flows, expected) in [(&allowed, true), (&denied, false)] {
            for flow in flows {
                let (from, rest) = flow.split_once(" > ").unwrap();
                let (to, port) = rest.split_once(' ').unwrap();
                assert_eq!(passes(&calc, from, to, port), expected, "{spec}: {flow}");
            }
        }
    }
}

/// A Kubernetes policy that cannot be understood closes the pods that its selector selects; all pods of its namespace if the selector has an
/// invalid label, which no pod can have (18). The API server keeps such a policy from an earlier version, and etcd keeps anything.
#[test]
fn invalid_kubernetes_policies_deny() {
    let (one, all) = (["web/front > db/copy tcp/2"], [""; 0]);
    for (selector, open) in [
        (json!({"matchLabels": {"tier": "main"}}), &one[..]),
        (json!({"matchLabels": {"tier": "not a value"}}), &all[..]),
        (json!({"matchLabels": {"not a name": "main"}}), &all[..]),
        (json!({"matchLabels": {"tier": "main' || all() || x == 'y"}}), &all[..]),
        (json!({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["main", "-"]}]}), &all[..]),
        (json!({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["-"]}]}), &all[..]),
        (json!({"matchExpressions": [{"key": "-", "operator": "Exists"}]}), &all[..]),
    ] {
        let spec = json!({"podSelector": selector, "policyTypes": ["Ingress"], "bogus": 1});
        let policy = json!({"metadata": {"name": "p", "namespace": "db"}, "spec": spec});
        let mut objects = objects("");
        objects.push((Key::namespaced(Kind::KubernetesNetworkPolicy, "db", "p"), policy));
        let mut calc = Calc::new("n");
        objects.iter().for_each(|(key, value)| calc.update(key, Some(value)));
        calc.flush();
        assert!(calc.findings().iter().any(|finding| finding.key.name == "p"), "{selector}");
        for (from, to) in [("web/front", "db/copy"), ("web/front", "db/main"), ("db/main", "web/front")] {
            let flow = format!("{from} > {to} tcp/2");
            let expected = open.contains(&flow.as_str()) || to == "web/front";
            assert_eq!(passes(&calc, from, to, "tcp/2"), expected, "{selector}: {flow}");
            assert_eq!(
                oracle_says(&objects, from, to, "tcp/2"),
                expected,
                "the oracle on {selector}: {flow}"
            );
        }
    }
}

/// One unreadable part of an object does not hide the rest of it from a Deny rule.
#[test]
fn damaged_objects_apply_as_far_as_they_can_be_read() {
    let mut calc = calc_of(
        &(calico(
            "db",
            "p",
            "{order: 1, ingress: [{action: Deny, source: {namespaceSelector: all(), selector: bad == 'yes'}}]}",
        ) + &calico(
            "db",
            "q",
            "{order: 2, ingress: [{action: Deny, source: {namespaceSelector: team == 'c'}}, {action: Allow}]}",
        )),
    );
    for (key, value) in [
        (
            Key::namespaced(Kind::NetworkSet, "web", "s"),
            json!({"metadata": {"name": "s", "namespace": "web", "labels": {"bad": "yes", "n": 5}}, "spec": {"nets": ["x", OUTSIDE]}}),
        ),
        (
            Key::global(Kind::Namespace, "lost"),
            json!({"metadata": {"name": "lost", "labels": {"team": "c", "projectcalico.org/odd.name": []}}}),
        ),
    ] {
        assert!(passes(&calc, "outside", "db/main", "tcp/1") || key.kind == Kind::Namespace);
        calc.update(&key, Some(&value));
        calc.flush();
    }
    assert!(!passes(&calc, "outside", "db/main", "tcp/1"));
    assert!(!passes(&calc, "lost/pod", "db/main", "tcp/1"));
    let findings: Vec<String> = calc.findings().into_iter().map(|finding| finding.problem).collect();
    for reported in ["spec.nets[0]", "metadata.labels.n", "metadata.labels.projectcalico.org/odd.name"] {
        assert!(findings.iter().any(|finding| finding.contains(reported)), "{reported}: {findings:?}");
    }
}

/// A policy of a tier whose order cannot be read comes before everything that could allow.
#[test]
fn a_policy_with_an_unreadable_position_comes_first() {
    let allow = calico("db", "a", "{order: -5, ingress: [{action: Allow}]}");
    let policy =
        json!({"metadata": {"name": "p", "namespace": "db"}, "spec": {"tier": 5, "types": ["Ingress"]}});
    let mut calc = calc_of(&allow);
    calc.update(&Key::namespaced(Kind::NetworkPolicy, "db", "p"), Some(&policy));
    calc.flush();
    assert!(!passes(&calc, "web/front", "db/main", "tcp/1"));

    let late = calico("db", "late.p", "{tier: late, selector: app == 'db', ingress: [{action: Deny}]}");
    let mut calc = calc_of(&(allow + &late));
    assert!(passes(&calc, "web/front", "db/main", "tcp/1"));
    let tier = json!({"metadata": {"name": "late"}, "spec": {"order": "last", "defaultAction": "Pass"}});
    calc.update(&Key::global(Kind::Tier, "late"), Some(&tier));
    calc.flush();
    assert!(!passes(&calc, "web/front", "db/main", "tcp/1"));
}

/// A peer of an unknown kind closes its rule: an Accept matches nothing, a Deny and a Pass deny everything (9).
#[test]
fn unreadable_rules_deny() {
    for (action, passes_it) in [("Accept", true), ("Deny", false), ("Pass", false)] {
        let mut calc = calc_of("");
        let rule = json!({"action": action, "from": [{"namespaces": {}}, {"galaxies": {}}]});
        let value = json!({"metadata": {"name": "c"}, "spec": {
            "tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "ingress": [rule, {"action": "Accept", "from": [{"namespaces": {}}]}],
        }});
        calc.update(&Key::global(Kind::ClusterNetworkPolicy, "c"), Some(&value));
        calc.flush();
        assert_eq!(passes(&calc, "web/front", "db/main", "tcp/1"), passes_it, "{action}");
        let reported = calc.findings().into_iter().any(|finding| finding.problem.contains("galaxies"));
        assert!(reported, "{action}: {:?}", calc.findings());
    }
}

/// A peer `nodes` is the addresses of the selected nodes, as their status, Calico's Node or an annotation has them (47). Each
/// change of a node takes effect.
#[test]
fn peers_that_are_nodes_are_their_addresses() {
    let policies = cluster(
        "c",
        "{tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Deny, to: [{nodes: {matchLabels: {role: db}}}]}]}",
    );
    let mut all = objects(&policies);
    let mut calc = calc_of(&policies);
    let key = Key::global(Kind::Node, "far");
    let listed = |addresses: &[&str]| json!({"addresses": addresses.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect::<Vec<_>>()});
    let annotated = json!({"projectcalico.org/IPv4Address": "192.0.2.7/24"});
    let node = |role: &str, more: Value| {
        let mut value = json!({"metadata": {"name": "far", "labels": {"role": role}}});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        value
    };
    let with_annotation =
        json!({"metadata": {"name": "far", "labels": {"role": "db"}, "annotations": annotated}});
    let damaged = json!({"metadata": {"name": "far", "labels": {"role": "db", "odd": 5}}, "status": listed(&["192.0.2.7"])});
    for (value, denied, problem) in [
        (
            Some(node("db", json!({"status": listed(&["192.0.2.7", "192.0.2.8"])}))),
            &["192.0.2.7", "192.0.2.8"][..],
            "",
        ),
        (Some(node("db", json!({"spec": listed(&["192.0.2.8"])}))), &["192.0.2.8"], ""),
        (Some(with_annotation), &["192.0.2.7"], ""),
        (Some(damaged), &["192.0.2.7"], "metadata.labels.odd"),
        (Some(node("web", json!({"status": listed(&["192.0.2.7"])}))), &[], ""),
        (
            Some(node("db", json!({"status": listed(&["192.0.2.300", "192.0.2.8"])}))),
            &["192.0.2.8"],
            "reach no node by \"192.0.2.300\"",
        ),
        (Some(node("db", json!({}))), &[], ""),
        (Some(node("web", json!({}))), &[], ""),
        (None, &[], ""),
    ] {
        calc.update(&key, value.as_ref());
        calc.flush();
        all.retain(|(known, _)| *known != key);
        all.extend(value.clone().map(|value| (key.clone(), value)));
        for address in ["192.0.2.7", "192.0.2.8", "192.0.2.9"] {
            let passes = passes(&calc, "web/front", address, "tcp/1");
            assert_eq!(passes, !denied.contains(&address), "{address}: {value:?}");
            assert_eq!(passes, oracle_says(&all, "web/front", address, "tcp/1"), "{address}: {value:?}");
        }
        let mut findings = calc.findings();
        findings.retain(|finding| finding.key == key);
        let found = findings.iter().any(|finding| finding.problem.contains(problem));
        assert!(if problem.is_empty() { findings.is_empty() } else { found }, "{value:?}: {findings:?}");
    }
}

/// A policy of any shape, even one that is not a policy at all, neither opens anything nor panics.
#[test]
fn random_garbage_denies() {
    for value in [
        json!(null),
        json!([]),
        json!("x"),
        json!({"metadata": {"name": "p"}, "spec": []}),
        json!({"metadata": {"name": "p"}, "spec": {"types": "all", "policyTypes": "all"}}),
        json!({"metadata": {"name": "p"}, "spec": {"order": "first", "ingress": [[]]}}),
        json!({"metadata": {"name": "p"}, "spec": {"ingress": [{"from": [{"podSelector": []}], "source": []}]}}),
    ] {
        let mut calc = calc_of("");
        calc.update(&Key::namespaced(Kind::NetworkPolicy, "db", "p"), Some(&value));
        calc.update(&Key::namespaced(Kind::KubernetesNetworkPolicy, "web", "p"), Some(&value));
        calc.flush();
        assert_eq!(calc.findings().len(), 3, "{value}");
        for flow in ["web/front", "web/back"] {
            assert!(!passes(&calc, flow, "db/main", "tcp/1"), "{value}");
            assert!(!passes(&calc, "db/main", flow, "tcp/1"), "{value}");
        }
    }
}

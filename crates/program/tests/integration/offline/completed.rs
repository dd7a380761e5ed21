//! What manifests omit and a cluster adds: backends of Services, addresses, nodes, service accounts.

use std::ffi::OsStr;

use crate::offline::support::tortie;
use serde_json::Value;

const SHOP: &str = "\
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Pod, metadata: {name: front, namespace: shop, labels: {app: front}}, spec: {nodeName: n1, containers: [{name: c}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: back, namespace: shop, labels: {app: back}}, spec: {nodeName: n1, containers: [{name: c, ports: [{containerPort: 8080, name: http}]}]}}
---
{apiVersion: v1, kind: Node, metadata: {name: n1}, status: {addresses: [{type: InternalIP, address: 192.0.2.1}, {type: Hostname, address: n1}]}}
---
";

const SERVICE: &str = "\
{apiVersion: v1, kind: Service, metadata: {name: back, namespace: shop}, spec: {clusterIP: 10.96.0.7, selector: {app: back}, ports: [{port: 80, targetPort: http}]}}
---
{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: front-egress, namespace: shop}, spec: {selector: app == 'front', types: [Egress], egress: [{action: Allow, destination: {services: {name: back, namespace: shop}}}]}}
";

/// Exit code and output of a command on one file.
fn run(text: &str, arguments: &[&str]) -> (i32, String, String) {
    tortie(&[("c.yml", text)], &[arguments, &["-f", "c.yml"]].concat())
}

#[test]
fn services_have_the_backends_that_kubernetes_would_give_them() {
    let text = [SHOP, SERVICE].concat();
    for (arguments, code, said) in [
        (
            &["explain", "shop/front", "shop/back", "--port", "tcp/8080"][..],
            0,
            "NetworkPolicy shop/front-egress, rule 1",
        ),
        (&["explain", "shop/front", "shop/back", "--port", "tcp/8081"], 1, "denied"),
        (&["explain", "shop/front", "--service", "shop/back", "--port", "tcp/80"], 0, "TCP 8080: allowed"),
        (&["matrix", "--port", "tcp/8080"], 0, "shop/front"),
        (&["policy", "lint"], 0, "nothing found"),
    ] {
        let (got, out, err) = run(&text, arguments);
        assert!(got == code && out.contains(said), "{arguments:?}: {got}\n{out}{err}");
    }
    // Existing slices count, and no others are created.
    let slice = "---\n{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: x, namespace: shop, labels: {kubernetes.io/service-name: back}}, addressType: IPv4, endpoints: [{addresses: [10.9.9.9]}], ports: [{port: 8080}]}\n";
    let (code, out, err) =
        run(&[SHOP, SERVICE, slice].concat(), &["explain", "shop/front", "shop/back", "--port", "tcp/8080"]);
    assert_eq!(code, 1, "{out}{err}");
}

/// A change of labels gives a Service other backends, and so changes the meaning of rules that name it.
#[test]
fn a_change_of_labels_moves_backends() {
    let text = [SHOP, SERVICE].concat();
    let change = SHOP.lines().nth(4).unwrap().replace("app: back", "app: other");
    let files = [("c.yml", text.as_str()), ("change.yml", change.as_str())];
    let (code, out, err) = tortie(&files, &["preview", "--in", "c.yml", "-f", "change.yml"]);
    assert!(code == 1 && out.contains("allowed → denied"), "{out}{err}");
}

#[test]
fn host_network_pods_count_as_their_node() {
    let host = |spec: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: agent, namespace: shop, labels: {{app: agent}}}}, spec: {{hostNetwork: true, containers: [{{name: c}}]{spec}}}}}\n---\n{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: deny, namespace: shop}}, spec: {{podSelector: {{matchLabels: {{app: agent}}}}}}}}\n---\n"
        )
    };
    let deny_back = "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: back, namespace: shop}, spec: {podSelector: {matchLabels: {app: back}}}}\n";
    for (spec, node) in [(", nodeName: n1", "n1"), ("", "shop-agent-node"), (", nodeName: n7", "n7")] {
        let text = [SHOP, &host(spec), deny_back].concat();
        let (code, out, err) = run(&text, &["explain", "shop/front", "shop/agent"]);
        assert_eq!(code, 0, "{node}: {out}{err}");
        assert!(out.contains(&format!("uses the network of node {node}: it is that node")), "{out}");
        let implied = err.contains(&format!("its node, which is not given: assumed to be node {node}"));
        assert_eq!(implied, node != "n1", "{err}");
        // From its node it reaches that node's pods, and no others.
        let (code, out, err) = run(&text, &["explain", "shop/agent", "shop/back"]);
        assert_eq!(code, i32::from(node != "n1"), "{node}: {out}{err}");
        let (_, out, err) = run(&text, &["policy", "lint"]);
        assert!(
            out.contains("shop/agent uses its node's network, and is under no policy of pods"),
            "{out}{err}"
        );
        let (code, out, err) = run(&text, &["matrix"]);
        assert!(code == 0 && out.contains("shop/agent is node/"), "{out}{err}");
        let (code, out, err) = run(&text, &["policy", "cost", "-o", "json"]);
        let cost: Value = serde_json::from_str(&out).unwrap();
        assert!(code == 0 && !cost["pods"].to_string().contains("shop/agent"), "{out}{err}");
    }
    // The same holds for a workload without a node.
    let daemons = "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: agents, namespace: shop}, spec: {template: {spec: {hostNetwork: true, containers: [{name: c}]}}}}\n";
    let (code, out, err) = run(&[SHOP, daemons].concat(), &["explain", "shop/front", "shop/agents"]);
    assert_eq!(code, 0, "{out}{err}");
}

/// A hostNetwork pod without an address of its own serves at its node's address.
#[test]
fn a_host_network_backend_has_the_address_of_its_node() {
    let backend = "{apiVersion: v1, kind: Pod, metadata: {name: agent, namespace: shop, labels: {app: agent}}, spec: {hostNetwork: true, nodeName: n1, containers: [{name: c}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: agents, namespace: shop}, spec: {clusterIP: 10.96.0.8, selector: {app: agent}, ports: [{port: 80}]}}
";
    let (code, out, err) =
        run(&[SHOP, backend].concat(), &["explain", "shop/front", "10.96.0.8", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    assert_eq!(
        (code, &document["backends"][0]["answer"]["destination"]),
        (0, &Value::from("192.0.2.1")),
        "{out}"
    );
}

#[test]
fn addresses_in_annotations_are_read() {
    let policy = "{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: p, namespace: shop}, spec: {selector: app == 'back', ingress: [{action: Allow, source: {nets: [10.7.0.0/16]}}]}}\n---\n";
    let noted = |annotations: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: noted, namespace: shop, annotations: {{{annotations}}}}}, spec: {{containers: [{{name: c}}]}}}}\n"
        )
    };
    let both =
        "cni.projectcalico.org/podIP: 10.7.0.1/32, cni.projectcalico.org/podIPs: '10.7.0.1/32,fd00::1/128'";
    let alone = ["cni.projectcalico.org/podIP: 10.7.0.1/32", "cni.projectcalico.org/podIPs: 10.7.0.1/32"];
    for annotations in [both, alone[0], alone[1]] {
        let cluster = [SHOP, policy, &noted(annotations)].concat();
        let (code, out, err) = run(&cluster, &["explain", "shop/noted", "shop/back"]);
        assert!(code == 0 && out.starts_with("shop/noted (10.7.0.1)"), "{annotations}: {out}{err}");
    }
    let front = &noted(both);
    let (_, out, err) = run(&[SHOP, policy, front].concat(), &["explain", "192.0.2.1", "shop/back"]);
    assert!(out.contains("runs on node n1"), "{out}{err}");
}

#[test]
fn service_accounts_are_implied_if_policies_refer_to_them() {
    let policy = "{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: sa}, spec: {serviceAccountSelector: projectcalico.org/name == 'default', types: [Egress], egress: [{action: Deny}]}}\n";
    let (code, out, err) =
        run(&[SHOP, policy].concat(), &["explain", "shop/front", "shop/back", "-o", "json"]);
    assert_eq!(code, 1, "{out}{err}");
    assert!(
        err.contains("service accounts that are not given are assumed to have no labels: shop/default"),
        "{err}"
    );
    let document: Value = serde_json::from_str(&out).unwrap();
    assert!(document["notes"].to_string().contains("shop/default"), "{out}");
    let (_, _, err) = run(SHOP, &["explain", "shop/front", "shop/back"]);
    assert!(!err.contains("service accounts"), "{err}");
}

/// Endpoints count if Kubernetes mirrors them: for a Service without a selector and without slices.
#[test]
fn endpoints_are_the_backends_of_services_without_a_selector() {
    let endpoints = "---\n{apiVersion: v1, kind: Endpoints, metadata: {name: back, namespace: shop}, subsets: [{addresses: [{ip: 203.0.113.7}], notReadyAddresses: [{ip: 'fd00::7'}], ports: [{port: 5432}]}]}\n";
    let without = SERVICE.replace("selector: {app: back}, ports", "ports");
    let ask = ["explain", "shop/front", "203.0.113.7", "--port", "5432"];
    let (code, out, err) = run(&[SHOP, &without, endpoints].concat(), &ask);
    assert!(
        code == 0 && out.contains("NetworkPolicy shop/front-egress, rule 1") && !err.contains("skipped"),
        "{out}{err}"
    );
    let (code, out, err) = run(&[SHOP, SERVICE, endpoints].concat(), &ask);
    assert!(code == 1 && err.contains("skipped, as no verdict depends on it: 1 Endpoints"), "{out}{err}");
    let damaged = endpoints.replace("port: 5432", "port: x");
    let (code, out, err) = run(&[SHOP, &without, &damaged].concat(), &ask);
    assert!(
        code == 3 && err.contains("c.yml:13: Endpoints shop/back: subsets[0].ports[0].port"),
        "{out}{err}"
    );
}

/// Two workloads of one name count as two; one workload given twice is a mistake.
#[test]
fn no_workload_hides_another() {
    let workload = |kind: &str, label: &str| {
        format!(
            "---\n{{apiVersion: apps/v1, kind: {kind}, metadata: {{name: web, namespace: shop}}, spec: {{template: {{metadata: {{labels: {{app: {label}}}}}, spec: {{containers: [{{name: c}}]}}}}}}}}\n"
        )
    };
    let policy = "---\n{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p, namespace: shop}, spec: {podSelector: {matchLabels: {app: z}}}}\n";
    let shop = SHOP.trim_end_matches("---\n");
    let both = [shop, &workload("Deployment", "x"), &workload("StatefulSet", "z"), policy].concat();
    for (to, code) in [("shop/web", 0), ("shop/web-statefulset", 1)] {
        let (got, out, err) = run(&both, &["explain", "shop/front", to]);
        assert!(
            got == code && err.contains("note: StatefulSet shop/web counts as its pod shop/web-statefulset"),
            "{to}: {out}{err}"
        );
    }
    let twice = [shop, &workload("Deployment", "x"), &workload("Deployment", "z")].concat();
    let (code, out, err) = run(&twice, &["explain", "shop/front", "shop/web"]);
    let note = "note: Deployment shop/web is given twice, and differently, at c.yml:9 and c.yml:11: the latter counts";
    // Only one of the two can be in the cluster.
    assert!(code == 3 && err.contains(note), "{out}{err}");
    // With one replica, no pod of it has another one of the same labels.
    let replicas = |count: &str| {
        workload("Deployment", "x")
            .replace("spec: {template", &format!("spec: {{replicas: {count}, template"))
    };
    for (one, other, expected) in [("1", "3", 3), ("2", "3", 0)] {
        let twice = [shop, &replicas(one), &replicas(other)].concat();
        let (code, out, err) = run(&twice, &["explain", "shop/front", "shop/web"]);
        assert!(code == expected && (code == 0 || err.contains(note)), "{one} {other}: {out}{err}");
    }
    let (_, out, err) = run(&twice, &["validate"]);
    assert!(out.contains("Deployment shop/web: the object was given before, at c.yml:9"), "{out}{err}");
}

/// People keep variants, values of charts and templates beside their manifests.
#[test]
fn folders_as_people_keep_them_have_answers() {
    let shop = SHOP.trim_end_matches("---\n");
    let policy = |app: &str| {
        format!(
            "---\n{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: p, namespace: shop}}, spec: {{podSelector: {{matchLabels: {{app: {app}}}}}}}}}\n"
        )
    };
    let generated =
        |app: &str| policy(app).trim_start_matches("---").trim().replace("name: p", "generateName: p-");
    let web = "---\n{apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: shop}, spec: {template: {metadata: {labels: {app: x}}, spec: {containers: [{name: c}]}}}}\n";
    let client = "---\n{apiVersion: v1, kind: Pod, metadata: {name: client, namespace: shop}, spec: {containers: [{name: c}]}}\n";
    for (more, code, note) in [
        (policy("x"), 1, ""),
        ([policy("x"), policy("x")].concat(), 1, ""),
        ([policy("x"), policy("z")].concat(), 3, "KubernetesNetworkPolicy shop/p is given twice, and differently, at c.yml:"),
        ([policy("z"), policy("x"), web.to_owned()].concat(), 3, "KubernetesNetworkPolicy shop/p is given twice, and differently"),
        ([policy("x"), "---\nreplicas: 3\nimage: {tag: x}\n".to_owned()].concat(), 1, "is no manifest: it has neither apiVersion nor kind"),
        ("---\n{apiVersion: batch/v1, kind: Job, metadata: {generateName: clean-, namespace: shop}, spec: {template: {spec: {containers: [{name: c}]}}}}\n".to_owned(), 0, ""),
        // Two objects with generateName on one line.
        (format!("---\n{{apiVersion: v1, kind: List, items: [{}]}}\n", ["x", "z"].map(generated).join(", ")), 1, ""),
    ] {
        let (got, out, err) = run(&[shop, web, client, &more].concat(), &["explain", "shop/client", "shop/web"]);
        assert!(got == code && err.contains(note), "{more}: {out}{err}");
        assert_eq!(err.contains("given twice"), note.contains("given twice"), "{more}: {out}{err}");
    }
    // A file that is given twice has each object once.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yml");
    std::fs::write(&file, [shop, web, client, &format!("---\n{}\n", generated("x"))].concat()).unwrap();
    let matrix = |count: usize| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tortie"));
        command.arg("matrix").args((0..count).flat_map(|_| [OsStr::new("-f"), file.as_os_str()]));
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert_eq!(matrix(1), matrix(2));
    let template = format!("{shop}---\n{{{{- if .Values.policy }}}}\napiVersion: v1\n{{{{- end }}}}\n");
    let (code, out, err) = run(&template, &["explain", "shop/front", "shop/web"]);
    assert!(code == 2 && err.contains("if this is a template of Helm or Go, render it first"), "{out}{err}");
    assert!(err.contains("pod shop/web does not exist"), "{err}");
}

//! A running lab and its export: `explain`, `matrix` and `preview` give the same answers for both.

use std::fs;
use std::path::Path;

use crate::support::{Lab, User, leftovers};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A shop on both systems, with policies of every group, a Service, and a pod that uses its node's network.
const SHOP: &str = "\
{apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {team: a}}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: jobs, labels: {team: b}}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: web, namespace: shop, labels: {tier: front}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: front, namespace: shop, labels: {app: front}}, spec: {serviceAccountName: web, nodeSelector: {kubernetes.io/os: linux}, containers: [{name: c, ports: [{containerPort: 80}]}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: back, namespace: shop, labels: {app: back}}, spec: {nodeSelector: {kubernetes.io/os: windows}, containers: [{name: c, ports: [{containerPort: 8080, name: http}]}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: db, namespace: shop, labels: {app: db}}, spec: {nodeSelector: {kubernetes.io/os: linux}, containers: [{name: c, ports: [{containerPort: 5432}]}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: nightly, namespace: jobs, labels: {job: nightly}}, spec: {nodeSelector: {kubernetes.io/os: windows}, containers: [{name: c}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: back, namespace: shop}, spec: {clusterIP: 10.96.0.7, selector: {app: back}, ports: [{port: 80, targetPort: http}]}}
---
{apiVersion: projectcalico.org/v3, kind: Tier, metadata: {name: ops}, spec: {order: 50, defaultAction: Pass}}
---
{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: ops.no-jobs, labels: {by: ops}}, spec: {tier: ops, order: 1, selector: app == 'db', ingress: [{action: Deny, source: {namespaceSelector: team == 'b'}}, {action: Pass}]}}
---
{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: front, namespace: shop}, spec: {serviceAccountSelector: tier == 'front', types: [Egress], egress: [{action: Allow, destination: {services: {name: back}}}]}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: back, namespace: shop}, spec: {podSelector: {matchLabels: {app: back}}, ingress: [{from: [{podSelector: {matchLabels: {app: front}}}], ports: [{port: http}]}]}}
---
{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: db, namespace: shop}, spec: {selector: app == 'db', ingress: [{action: Allow, protocol: TCP, source: {selector: app == 'back'}, destination: {ports: [5432]}}, {action: Allow, source: {namespaceSelector: global(), selector: partner == 'x'}}]}}
---
{apiVersion: projectcalico.org/v3, kind: StagedNetworkPolicy, metadata: {name: back, namespace: shop}, spec: {selector: app == 'back', ingress: [{action: Deny}]}}
---
{apiVersion: projectcalico.org/v3, kind: GlobalNetworkSet, metadata: {name: partner, labels: {partner: x}}, spec: {nets: [203.0.113.0/24]}}
";

const CHANGE: &str = "\
{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: db, namespace: shop}, spec: {selector: app == 'db', ingress: [{action: Allow, protocol: TCP, source: {namespaceSelector: all()}, destination: {ports: [5432]}}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: back, namespace: shop, labels: {app: backend}}, spec: {nodeSelector: {kubernetes.io/os: windows}, containers: [{name: c, ports: [{containerPort: 8080, name: http}]}]}}
";

const KINDS: [&str; 17] = [
    "namespaces",
    "nodes",
    "serviceaccounts",
    "pods",
    "services",
    "endpointslices",
    "tiers",
    "networkpolicies",
    "globalnetworkpolicies",
    "kubernetesnetworkpolicies",
    "stagednetworkpolicies",
    "globalnetworksets",
    "ippools",
    "felixconfigurations",
    "workloadendpoints",
    "ipamblocks",
    "nodereports",
];

/// An object as `kubectl get -o yaml` writes it, if Calico stores its objects in its old group.
fn as_kubectl(mut object: Value) -> Value {
    let metadata = object["metadata"].as_object_mut().unwrap();
    let managed = json!([{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {}}}]);
    metadata.extend([
        ("resourceVersion".to_owned(), json!("4711")),
        ("generation".to_owned(), json!(1)),
        ("managedFields".to_owned(), managed),
    ]);
    if object["apiVersion"] == "projectcalico.org/v3" && object["kind"] != "WorkloadEndpoint" {
        object["apiVersion"] = json!("crd.projectcalico.org/v1");
        let metadata = object["metadata"].as_object_mut().unwrap();
        let mut kept = serde_json::Map::new();
        for field in ["labels", "annotations", "creationTimestamp"] {
            kept.extend(metadata.remove(field).map(|value| (field.to_owned(), value)));
        }
        let kept = Value::Object(kept).to_string();
        metadata.insert("annotations".to_owned(), json!({"projectcalico.org/metadata": kept}));
    }
    object
}

/// The output without positions in files.
fn without_places(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(" (") {
        let (inside, next) = after.split_once(')').unwrap_or((after, ""));
        let is_place = inside.rsplit_once(':').is_some_and(|(_, line)| line.parse::<u32>().is_ok());
        out += before;
        if !is_place {
            out += &format!(" ({inside})");
        }
        rest = next;
    }
    out + rest
}

#[test]
fn an_exported_cluster_gives_the_same_answers_as_the_live_one() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    lab.ok(&["apply", "--wait", "-f", &lab.file("shop.yml", SHOP)]);
    lab.wait_for_pods();
    lab.wait_until("the Service has a backend", || {
        let slices = lab.json(&["get", "endpointslices", "-n", "shop", "-o", "json"]);
        slices["items"][0]["endpoints"].as_array().is_some_and(|endpoints| endpoints.len() == 1)
    });

    // The answers for the export are the verdicts on packets, also with the Service's slices.
    let step = lab.json(&["lab", "matrix", "-o", "json"]);
    let verdict = |from: &str, to: &str| {
        let connections = step["connections"].as_array().unwrap();
        let found = connections.iter().find(|each| each["from"] == from && each["to"] == to);
        found.unwrap_or_else(|| panic!("{from} → {to}: {step}"))["verdict"].as_str().unwrap().to_owned()
    };
    for (from, to, expected) in [
        ("shop/front", "shop/back", "reached"),
        ("shop/front", "shop/db", "cut"),
        ("shop/back", "shop/db", "reached"),
        ("jobs/nightly", "shop/db", "cut"),
    ] {
        assert_eq!(verdict(from, to), expected, "{from} → {to}");
    }

    let (plain, kubectl) = (lab.dir().with_file_name("plain"), lab.dir().with_file_name("kubectl"));
    fs::create_dir(&plain).unwrap();
    fs::create_dir(&kubectl).unwrap();
    let mut all = Vec::new();
    for kind in KINDS {
        let list = lab.json(&["get", kind, "-o", "json"]);
        all.extend(list["items"].as_array().unwrap().iter().cloned().map(as_kubectl));
        fs::write(plain.join(format!("{kind}.json")), list.to_string()).unwrap();
    }
    let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": all});
    fs::write(kubectl.join("all.json"), serde_json::to_string_pretty(&list).unwrap()).unwrap();

    let change = lab.file("change.yml", CHANGE);
    let mut questions: Vec<Vec<String>> = Vec::new();
    let ends =
        ["shop/front", "shop/back", "shop/db", "jobs/nightly", "node/primary", "node/minion", "203.0.113.7"];
    for from in ends {
        for to in ends.iter().filter(|to| **to != from) {
            for port in ["tcp/8080", "tcp/5432", "udp/53"] {
                questions.push(["explain", from, to, "--port", port].map(str::to_owned).to_vec());
            }
        }
    }
    questions.push(["explain", "shop/front", "--service", "shop/back"].map(str::to_owned).to_vec());
    questions.push(["explain", "jobs/nightly", "10.96.0.7"].map(str::to_owned).to_vec());
    questions.push(vec!["matrix".to_owned()]);
    questions.push(["matrix", "-n", "shop", "--port", "5432"].map(str::to_owned).to_vec());
    let run = |arguments: &[String], folder: Option<(&str, &Path)>| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = lab.tortie(&arguments);
        if let Some((option, folder)) = folder {
            command.arg(option).arg(folder);
        }
        let output = command.output().unwrap();
        let (out, err) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.code() != Some(2), "{arguments:?}: {out}{err}");
        (output.status.code(), without_places(&out))
    };
    for folder in [&plain, &kubectl] {
        for question in &questions {
            assert_eq!(
                run(question, None),
                run(question, Some(("-f", folder))),
                "{question:?} {}",
                folder.display()
            );
        }
        let preview = ["preview", "-f", &change].map(str::to_owned);
        let live = run(&preview, None);
        assert_eq!(live.0, Some(1), "{}", live.1);
        assert_eq!(live, run(&preview, Some(("--in", folder))), "{}", folder.display());
    }

    // Slices are deleted with the objects that they are derived from.
    lab.ok(&["delete", "namespace", "shop"]);
    lab.wait_until("the slices are gone", || {
        lab.json(&["get", "endpointslices", "-n", "shop", "-o", "json"])["items"]
            .as_array()
            .unwrap()
            .is_empty()
    });
    running.signal(Signal::INT);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

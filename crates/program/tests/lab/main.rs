//! Runs the lab as a user does: executes the program, and checks its output and leftovers. The tests compare the machine's
//! mounts before and after, so they have a binary of their own.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod bgp;
mod bgp_ipv6;
mod commands;
mod connectivity;
mod diags;
mod documented;
mod dual_stack;
mod examples_in_lab;
#[path = "../examples_support/mod.rs"]
mod examples_support;
mod exported;
mod failures;
mod ipip;
mod kubernetes;
mod many;
mod modes;
mod network;
mod services;
mod show;
mod support;
mod vxlan_port;
mod workloads;

use std::collections::BTreeMap;

use rustix::process::Signal;
use serde_json::Value;
use support::{Lab, User, appeared_since, leftovers, machine};
use tortie_servers::programs::{Program, can_run};

const PODS: [&str; 4] = [
    "calico-demo/linux-client",
    "calico-demo/linux-server",
    "calico-demo/windows-client",
    "calico-demo/windows-server",
];
const NODES: [&str; 2] = ["node/primary", "node/minion"];

type Cells = BTreeMap<(String, String), String>;

fn cells(step: &Value) -> Cells {
    cells_at(step, "tcp/80")
}

fn cells_at(step: &Value, port: &str) -> Cells {
    let connections = step["connections"].as_array().unwrap();
    let cell = |each: &Value| {
        assert_eq!(each["port"], port);
        assert!(each["millis"].is_number());
        let text = |name: &str| each[name].as_str().unwrap().to_owned();
        assert_eq!(each.get("note"), None, "{each}");
        ((text("from"), text("to")), text("verdict"))
    };
    let cells: Cells = connections.iter().map(cell).collect();
    assert_eq!(cells.len(), connections.len(), "no pair twice");
    cells
}

/// Both tables of the demo, cell by cell.
fn check_demo(document: &Value) {
    let steps = document["steps"].as_array().unwrap();
    assert_eq!(
        steps.iter().map(|step| step["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["before policy", "after policy"]
    );
    let expected = |after: bool| {
        let mut cells = Cells::new();
        for from in PODS.iter().chain(&NODES) {
            for to in PODS.iter().filter(|to| *to != from) {
                let serves = to.ends_with("-server");
                let into_windows_server = *to == "calico-demo/windows-server";
                let allowed = ["calico-demo/linux-client", "node/minion"].contains(from);
                let verdict = if after && into_windows_server && !allowed {
                    "cut"
                } else if serves {
                    "reached"
                } else {
                    "refused"
                };
                cells.insert(((*from).to_owned(), (*to).to_owned()), verdict.to_owned());
            }
        }
        cells
    };
    assert_eq!(cells(&steps[0]), expected(false));
    assert_eq!(cells(&steps[1]), expected(true));
}

fn demo_as(user: User, datastore: &str) {
    let lab = Lab::new(user);
    let before = machine();
    let arguments = ["lab", "demo", "-o", "json", "--datastore", datastore];
    let output = lab.tortie(&arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    check_demo(&serde_json::from_slice(&output.stdout).unwrap());
    for step in [
        "node primary (Linux) is up",
        "node minion (Windows, emulated HNS) is up",
        "is in force on all nodes",
    ] {
        assert!(errors.contains(step), "{errors}");
    }
    assert_eq!(leftovers(&lab), Vec::<String>::new());
    assert_eq!(appeared_since(&before), Vec::<String>::new());
}

#[test]
fn the_demo_as_root() {
    demo_as(User::Root, "embedded");
}

#[test]
fn the_demo_as_an_ordinary_user() {
    demo_as(User::Ordinary, "embedded");
}

#[test]
fn the_demo_on_etcd() {
    if can_run(&[Program::Etcd]) {
        demo_as(User::Root, "etcd");
    }
}

/// Other processes reach etcd through the lab's socket.
#[test]
fn commands_work_in_a_lab_on_etcd() {
    if !can_run(&[Program::Etcd]) {
        return;
    }
    let lab = Lab::new(User::Root);
    let _running = lab.up(&["--datastore", "etcd"]);
    let run = |arguments: &[&str]| {
        let output = lab.tortie(arguments).output().unwrap();
        let (text, errors) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(text).unwrap()
    };
    let manifest = |name: &str| format!("{}/../../examples/seed-002/{name}", env!("CARGO_MANIFEST_DIR"));
    // The policy selects pods of one node only.
    for (name, nodes) in [("policy-demo-pods.yml", "2 nodes"), ("policy-demo-policy.yml", "1 node")] {
        let printed = run(&["apply", "--wait", "-f", &manifest(name)]);
        assert!(printed.contains(&format!("in force on {nodes}\n")), "{printed}");
    }
    assert!(run(&["get", "nodes"]).contains("192.0.2.12"));
    let document: Value = serde_json::from_str(&run(&["lab", "matrix", "-o", "json"])).unwrap();
    let cut = document["connections"].as_array().unwrap().iter().filter(|each| each["verdict"] == "cut");
    let cut: Vec<&Value> = cut.map(|each| &each["from"]).collect();
    assert_eq!(cut, ["calico-demo/linux-server", "calico-demo/windows-client", "node/primary"]);
    run(&["lab", "down"]);
}

#[test]
fn a_lab_that_is_killed_leaves_no_process_and_the_next_start_cleans_up() {
    let lab = Lab::new(User::Root);
    let before = machine();
    let mut running = lab.up(&[]);
    assert!(lab.processes().len() >= 4, "supervisor, lab, two agents, HNS: {:?}", lab.processes());
    running.signal(Signal::KILL);
    running.wait();
    lab.wait_until("every process has ended", || lab.processes().is_empty());
    assert_eq!(appeared_since(&before), Vec::<String>::new());
    assert!(lab.dir().join("store.redb").exists(), "the folder is what a SIGKILL leaves");

    let output = lab.tortie(&["lab", "demo", "-o", "json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    check_demo(&serde_json::from_slice(&output.stdout).unwrap());
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

/// Ctrl-C while the lab starts, while pods start, and while connections are tried.
#[test]
fn an_interrupt_at_any_moment_cleans_up() {
    let before = machine();
    for user in [User::Root, User::Ordinary] {
        for moment in [
            "the datastore is served",
            "node primary",
            "node minion",
            "linux-client runs",
            "is applied",
            "is in force",
        ] {
            let lab = Lab::new(user);
            let mut running = lab.start(&["lab", "demo"]);
            running.wait_for_line(moment);
            running.signal(Signal::INT);
            let status = running.wait();
            assert_eq!(status.code(), Some(130), "interrupted at {moment:?}");
            assert_eq!(leftovers(&lab), Vec::<String>::new(), "interrupted at {moment:?}");
        }
    }
    assert_eq!(appeared_since(&before), Vec::<String>::new());
}

#[test]
fn a_cluster_can_be_used_from_another_terminal() {
    let lab = Lab::new(User::Ordinary);
    let mut running = lab.up(&["--linux", "2", "--windows", "2"]);
    let names = |kind: &str| -> Vec<String> {
        let list = lab.json(&["get", kind, "-o", "json"]);
        list["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(names("nodes"), ["linux-2", "minion", "primary", "windows-2"]);

    // A second lab in the same folder is rejected, and does no harm.
    let second = lab.tortie(&["lab", "up"]).output().unwrap();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("a lab is running already"), "{second:?}");

    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml"), "-f", &support::spread_pods(&lab)]);
    lab.wait_for_pods();
    let reached = |expected: &str, from: &str, to: &str| {
        let matrix = lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]);
        let found = cells(&matrix)[&(from.to_owned(), to.to_owned())].clone();
        assert_eq!(found, expected, "{from} -> {to}");
    };
    let everything = cells(&lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]));
    assert_eq!(everything.len(), (6 + 4) * 6 - 6);
    assert!(everything.values().all(|verdict| verdict != "cut"), "{everything:?}");

    // Applies the policy of the original file; then a label of a running pod changes, and with it the policy's
    // effect.
    let applied = lab.ok(&["apply", "--wait", "-f", &lab.example("policy-demo-policy.yml")]);
    assert!(applied.contains("NetworkPolicy calico-demo/allow-linux-client created"), "{applied}");
    assert!(applied.contains("in force on 1 node\n"), "only one node has a pod that it selects: {applied}");
    reached("reached", "calico-demo/linux-client", "calico-demo/windows-server");
    reached("cut", "calico-demo/extra-linux", "calico-demo/windows-server");
    let relabelled = lab.file("relabelled.yml", &support::pod("extra-linux", "linux-2", "linux-client"));
    lab.ok(&["apply", "--wait", "-f", &relabelled]);
    lab.wait_until("the label counts", || {
        cells(&lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]))
            [&("calico-demo/extra-linux".to_owned(), "calico-demo/windows-server".to_owned())]
            == "reached"
    });

    // A pod is deleted and recreated: it has another address, and the policy knows it.
    let address = |pod: &str| lab.json(&["get", "pods", pod, "-o", "json"])["status"]["podIP"].clone();
    let old = address("extra-linux");
    lab.ok(&["delete", "pod", "-n", "calico-demo", "extra-linux"]);
    lab.wait_until("its endpoint is gone", || names("workloadendpoints").len() == 5);
    lab.ok(&["apply", "-f", &relabelled]);
    lab.wait_until("it runs again", || address("extra-linux").is_string());
    assert_ne!(address("extra-linux"), old);
    lab.wait_until("its new address counts", || {
        cells(&lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]))
            [&("calico-demo/extra-linux".to_owned(), "calico-demo/windows-server".to_owned())]
            == "reached"
    });

    // The policy is deleted, and everything is as before.
    lab.ok(&["delete", "networkpolicy", "-n", "calico-demo", "allow-linux-client"]);
    lab.wait_until("the policy is gone everywhere", || {
        cells(&lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]))
            .values()
            .all(|verdict| verdict != "cut")
    });

    lab.ok(&["delete", "namespace", "calico-demo"]);
    lab.wait_until("every address is released", || {
        names("workloadendpoints").is_empty() && names("ipamhandles").len() == 2
    });
    assert_eq!(lab.ok(&["lab", "down"]).trim(), "the lab is down");
    assert_eq!(running.wait().code(), Some(0), "it has been ended as it is meant to be");
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

fn exec_and_capture(lab: &Lab) {
    let ran = lab
        .tortie(&["lab", "exec", "calico-demo/linux-client", "--", "sh", "-c", "cat /proc/net/dev; exit 7"])
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(7));
    assert!(String::from_utf8_lossy(&ran.stdout).contains("eth0"), "{ran:?}");
    let unknown = lab.tortie(&["lab", "exec", "nobody", "--", "true"]).output().unwrap();
    assert!(
        String::from_utf8_lossy(&unknown.stderr).contains("pod default/nobody: is not running in this lab"),
        "{unknown:?}"
    );

    // On the wire between the nodes: VXLAN with VNI 4096, in both directions.
    let capture = lab.start(&[
        "lab",
        "capture",
        "minion",
        "--",
        "tcpdump",
        "-l",
        "-nn",
        "-i",
        "eth0",
        "-c",
        "40",
        "udp port 4789",
    ]);
    capture.wait_for_line("listening on eth0");
    lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]);
    let lines = capture.output();
    for (from, to) in [("192.0.2.11", "192.0.2.12"), ("192.0.2.12", "192.0.2.11")] {
        let is_vxlan = |line: &&String| {
            line.contains(&format!("IP {from}.")) && line.contains(&format!("> {to}.4789: VXLAN"))
        };
        let line = lines
            .iter()
            .find(is_vxlan)
            .unwrap_or_else(|| panic!("no VXLAN from {from} to {to} in\n{}", lines.join("\n")));
        assert!(line.contains("vni 4096"), "{line}");
    }
}

#[test]
fn bad_input_changes_nothing() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let good = "apiVersion: v1\nkind: Namespace\nmetadata: {name: 'n'}\n---\n";
    let policy =
        "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: p, namespace: 'n'}\nspec:\n";
    for (name, bad, expected) in [
        (
            "field.yml",
            format!("{policy}  selectr: a == 'b'\n"),
            "field.yml:9: NetworkPolicy n/p: spec.selectr: unknown field",
        ),
        (
            "selector.yml",
            format!("{policy}  selector: a = 'b'\n"),
            "selector.yml:9: NetworkPolicy n/p: spec.selector: selector",
        ),
        (
            "cidr.yml",
            format!("{policy}  ingress:\n  - action: Allow\n    source:\n      nets:\n      - 10.0.0.0/40\n"),
            "cidr.yml:13: NetworkPolicy n/p: spec.ingress[0].source.nets[0]: \"10.0.0.0/40\" is no network",
        ),
        (
            "kind.yml",
            "apiVersion: v1\nkind: Teapot\nmetadata: {name: t}\n".to_owned(),
            "kind.yml:6: Teapot t: kind: v1 Teapot is not known",
        ),
        (
            "twice.yml",
            format!("{policy}  order: 1\n  order: 2\n"),
            "twice.yml:10: spec.order: the field is given twice",
        ),
    ] {
        let file = lab.file(name, &format!("{good}{bad}"));
        let output = lab.tortie(&["apply", "-f", &file]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(expected), "expected {expected}, got\n{errors}");
        assert!(errors.contains("nothing was changed"), "{errors}");
        assert_eq!(lab.json(&["get", "namespaces", "-o", "json"])["items"].as_array().unwrap().len(), 1);
    }
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

#[test]
fn commands_run_in_pods_and_nodes() {
    commands_run_as(User::Root);
}

/// There tcpdump cannot switch to another user, as it does by default as root.
#[test]
fn commands_run_in_pods_and_nodes_of_an_ordinary_users_lab() {
    commands_run_as(User::Ordinary);
}

fn commands_run_as(user: User) {
    let lab = Lab::new(user);
    let mut running = lab.up(&[]);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    exec_and_capture(&lab);
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

//! `tortie connectivity test`: all is well in a healthy lab; whatever breaks fails in its row, with its reason; nothing
//! remains.

use std::process::Output;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tortie_servers::programs::{Program, can_run};

use crate::support::{Lab, Running, User};

const NAMESPACE: &str = "tortie-connectivity-test";

/// The checks that a test did, and its exit code.
struct Tested {
    code: Option<i32>,
    document: Value,
}

impl Tested {
    fn of(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        let document = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}{errors}"));
        Self { code: output.status.code(), document }
    }

    fn run(lab: &Lab, more: &[&str]) -> Self {
        let arguments = [&["connectivity", "test", "-o", "json"], more].concat();
        let output = lab.tortie(&arguments).output().unwrap();
        let (printed, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_nothing_left(lab, &format!("{printed}{errors}"));
        Self::of(&output)
    }

    fn checks(&self) -> Vec<&Value> {
        self.document["checks"].as_array().unwrap().iter().collect()
    }

    fn failed(&self) -> Vec<&Value> {
        self.checks().into_iter().filter(|check| check["ok"] == false).collect()
    }

    /// All checks are good.
    fn assert_good(&self) {
        assert!(self.failed().is_empty(), "{:#?}", self.failed());
        assert_eq!(self.code, Some(0));
    }

    /// Exactly the checks fail that `must` selects, and each has a reason with this text.
    fn assert_failed(&self, must: impl Fn(&Value) -> bool, reason: &str) {
        assert_eq!(self.code, Some(1));
        assert!(self.checks().into_iter().any(&must), "nothing is selected in {:#?}", self.checks());
        for check in self.checks() {
            assert_eq!(check["ok"] == false, must(check), "{check:#}");
            let text = check["reason"].as_str().unwrap_or(reason);
            assert!(text.contains(reason), "no {reason:?} in {check:#}");
        }
    }
}

/// Nothing of a test is left; `printed` is what the test printed.
fn assert_nothing_left(lab: &Lab, printed: &str) {
    for kind in ["namespaces", "pods", "services", "knp", "workloadendpoints"] {
        let left = lab.json(&["get", kind, "-o", "json"]);
        let is_ours = |item: &&Value| {
            item["metadata"]["namespace"] == NAMESPACE || item["metadata"]["name"] == NAMESPACE
        };
        let ours: Vec<&Value> = left["items"].as_array().unwrap().iter().filter(is_ours).collect();
        assert!(ours.is_empty(), "{printed}: {ours:#?}");
    }
}

fn down(lab: &Lab, mut running: Running) {
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// How many checks two nodes of each system must have: six between each pair, two Services and two names for each pod.
const CHECKS: usize = 4 * 4 * 6 + 4 * 2 * 2;

#[test]
fn a_healthy_lab_passes_all_and_a_policy_fails_by_its_name() {
    let lab = Lab::new(User::Ordinary);
    let running = lab.up(&["--linux", "2", "--windows", "2"]);
    let good = Tested::run(&lab, &[]);
    good.assert_good();
    assert_eq!(good.checks().len(), CHECKS);
    assert_eq!(good.document["notTested"], json!([]));
    let printed = lab.ok(&["connectivity", "test", "--nodes", "minion,primary"]);
    for line in [
        "pod to pod                linux     windows   -           ok (1)",
        "32 checks on 2 nodes: all is well",
    ] {
        assert!(printed.contains(line), "no {line:?} in {printed}");
    }

    // A policy of somebody else that denies.
    let policy = |name: &str, action: &str, rule: &str| {
        let text = format!(
            "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkPolicy\nmetadata: {{name: {name}}}\nspec:\n  order: 1\n  \
             namespaceSelector: kubernetes.io/metadata.name == '{NAMESPACE}'\n  selector: tortie.io/serves == 'windows'\n  \
             types: [Ingress]\n  ingress: [{{action: {action}, {rule}}}]\n"
        );
        lab.ok(&["apply", "--wait", "-f", &lab.file("policy.yml", &text)]);
    };
    policy("no-windows", "Deny", "protocol: UDP");
    Tested::run(&lab, &[]).assert_failed(
        |check| check["check"] == "large UDP, no fragments" && check["toSystem"] == "windows",
        "denied by GlobalNetworkPolicy no-windows, rule 1",
    );
    lab.ok(&["delete", "gnp", "no-windows"]);

    // One that allows what must stay denied.
    policy("too-open", "Allow", "protocol: TCP, destination: {ports: [8082]}");
    Tested::run(&lab, &[]).assert_failed(
        |check| check["check"] == "policy denies" && check["toSystem"] == "windows",
        "the port accepts connections, because another policy allows it",
    );
    lab.ok(&["delete", "gnp", "too-open"]);
    down(&lab, running);
}

/// An agent that does not answer: no pod of its node runs, so its Service has no backends either.
#[test]
fn a_stopped_agent_and_a_service_without_endpoints_are_named() {
    let lab = Lab::new(User::Root);
    let running = lab.up(&[]);
    Tested::run(&lab, &[]).assert_good();
    let agents = lab.processes().into_iter().filter(|process| {
        process.command.contains("agent --node minion") && !process.command.contains("tortie-cni")
    });
    let agents: Vec<Pid> = agents.map(|agent| Pid::from_raw(agent.pid as i32).unwrap()).collect();
    assert_eq!(agents.len(), 1);
    // Deleting the pods needs the agent, too, so it continues as soon as there are results.
    kill_process(agents[0], Signal::STOP).unwrap();
    let test = lab.start(&["connectivity", "test", "-o", "json", "--timeout", "3"]);
    let clients = || {
        let pods = lab.json(&["get", "pods", "-n", NAMESPACE, "-o", "json"]);
        let ended =
            |pod: &&Value| pod["status"]["phase"] == "Succeeded" || pod["status"]["phase"] == "Failed";
        pods["items"].as_array().unwrap().iter().filter(ended).count()
    };
    // Those on the other node, of a pod and of the node, end; the deletion of pods comes after that.
    lab.wait_until("the clients have ended", || clients() == 2);
    lab.wait_until("the pods are removed", || clients() == 0);
    kill_process(agents[0], Signal::CONT).unwrap();
    // Both outputs, of which standard error names the datastore.
    let mut lines = test.output();
    lines.retain(|line| !line.starts_with("datastore: "));
    let document =
        serde_json::from_str(&lines.join("\n")).unwrap_or_else(|error| panic!("{error}: {lines:?}"));
    let tested = Tested { code: Some(1), document };
    let of = |check: &Value, end: &str| check[end].as_str().is_some_and(|text| text.contains("minion"));
    for check in tested.checks() {
        let reason = check["reason"].as_str().unwrap_or_default();
        // A pod in the node's network needs no agent.
        let from = of(check, "from") && check["check"] != "node to pod";
        let to = of(check, "to");
        let expected = match (from, to, check["toSystem"].as_str()) {
            _ if check["check"] == "pod to Service" && check["toSystem"] == "windows" => {
                "servers-windows has no backends"
            }
            (_, true, _) => "server-2 does not run after 3 seconds",
            (true, ..) => "client-2 does not run after 3 seconds",
            _ => {
                assert_eq!(check["ok"], true, "{check:#}");
                continue;
            }
        };
        assert!(reason.contains(expected), "no {expected:?} in {check:#}");
    }
    assert_nothing_left(&lab, "");
    down(&lab, running);
}

/// VXLAN packets from one node do not arrive at another.
#[test]
fn a_path_that_drops_vxlan_and_one_with_a_smaller_mtu_are_named() {
    let lab = Lab::new(User::Root);
    let running = lab.up(&[]);
    let nft = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        lab.ok(&[&["lab", "capture", "primary", "--", "nft"], &words[..]].concat());
    };
    nft("add table inet broken");
    nft("add chain inet broken in { type filter hook prerouting priority -400 ; }");
    nft("add rule inet broken in ip saddr 192.0.2.12 udp dport 4789 drop");
    let tested = Tested::run(&lab, &[]);
    let across = |check: &Value| check["where"] == "other node";
    let named = |check: &&Value| across(check) && check["check"] != "policy denies";
    assert_eq!(tested.code, Some(1));
    assert_eq!(tested.checks().into_iter().filter(named).count(), 10);
    for check in tested.checks() {
        let reason = check["reason"].as_str().unwrap_or_default();
        if named(&check) {
            let expected = ["policy allows it", "UDP 4789 (VXLAN)", "192.0.2.11", "192.0.2.12"];
            assert!(expected.iter().all(|text| reason.contains(text)), "{check:#}");
        } else if across(check) {
            assert!(reason.contains("proves nothing"), "{check:#}");
        } else if check["where"] == "same node" {
            assert_eq!(check["ok"], true, "{check:#}");
        }
    }
    nft("flush chain inet broken in");
    nft("add rule inet broken in ip saddr 192.0.2.12 udp dport 4789 meta length > 1400 drop");
    Tested::run(&lab, &[]).assert_failed(
        |check| check["where"] == "other node" && check["check"].as_str().unwrap().starts_with("large"),
        "small packets pass: check the MTU between",
    );
    down(&lab, running);
}

#[test]
fn an_interrupted_test_cleans_up_and_foreign_namespaces_are_left_alone() {
    let lab = Lab::new(User::Ordinary);
    let running = lab.up(&[]);
    for moment in ["knp", "pods"] {
        let mut test = lab.start(&["connectivity", "test"]);
        lab.wait_until("something is deployed", || {
            let objects = lab.json(&["get", moment, "-n", NAMESPACE, "-o", "json"]);
            !objects["items"].as_array().unwrap().is_empty()
        });
        test.signal(Signal::INT);
        assert_eq!(test.wait().code(), Some(130));
        assert_nothing_left(&lab, "");
    }

    // What a killed test leaves, another one does not take; `cleanup` removes it.
    let mut test = lab.start(&["connectivity", "test"]);
    lab.wait_until("something is deployed", || lab.ok(&["get", "pods"]).contains("server-1"));
    test.signal(Signal::KILL);
    test.wait();
    let refused = lab.tortie(&["connectivity", "test"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("connectivity cleanup"), "{refused:?}");
    lab.ok(&["connectivity", "cleanup"]);
    assert!(lab.ok(&["connectivity", "cleanup"]).contains("there is nothing to delete"));
    assert_nothing_left(&lab, "");

    let namespace = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n");
    lab.ok(&["apply", "-f", &lab.file("namespace.yml", &namespace)]);
    for (command, why) in [("test", "was not created by a test"), ("cleanup", "was not created by a test")] {
        let refused = lab.tortie(&["connectivity", command]).output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains(why), "{refused:?}");
    }
    assert!(lab.ok(&["get", "namespaces"]).contains(NAMESPACE));
    let elsewhere =
        lab.tortie(&["connectivity", "test", "--store", "etcd:http://127.0.0.1:1"]).output().unwrap();
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains("--store kubernetes"), "{elsewhere:?}");
    down(&lab, running);
}

#[test]
fn a_lab_on_etcd_passes_all() {
    if can_run(&[Program::Etcd]) {
        passes_all("etcd", &json!([]));
    }
}

/// There, the scheduler, the controllers and the admission of pods are real. The lab has no DNS for it.
#[test]
fn a_lab_on_a_kubernetes_api_passes_all() {
    if can_run(&[Program::Kube]) {
        passes_all("kubernetes", &json!(["DNS: the cluster has no Service kube-system/kube-dns"]));
    }
}

fn passes_all(datastore: &str, not_tested: &Value) {
    let lab = Lab::new(User::Root);
    let running = lab.up(&["--datastore", datastore]);
    let good = Tested::run(&lab, &[]);
    good.assert_good();
    assert_eq!(&good.document["notTested"], not_tested);
    down(&lab, running);
}

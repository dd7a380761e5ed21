//! `tortie policy show`: the policies of a pod in words, with the rules of its node's system.

use std::process::Output;

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Lab, Running, User, leftovers};

const POLICY: &str = "
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: web, namespace: calico-demo}
spec:
  selector: app in {'linux-server', 'windows-server'}
  types: [Ingress]
  ingress:
  - {action: Deny, protocol: TCP, source: {nets: [10.9.0.0/16]}}
  - {action: Allow, protocol: TCP, source: {selector: has(app)}, destination: {ports: [80]}}
  - {action: Allow, protocol: TCP, source: {selector: has(app)}, destination: {ports: [443]}}
  - {action: Allow, protocol: ICMP, icmp: {type: 8}}
";

const COUNTERS: &str = "
apiVersion: projectcalico.org/v3
kind: FelixConfiguration
metadata: {name: default, annotations: {tortie.io/policyCounters: Enabled}}
spec: {}
";

fn with_policy(user: User) -> (Lab, Running) {
    let lab = Lab::new(user);
    let running = lab.up(&[]);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    // It fails, because Windows cannot express the last rule.
    let applied = lab.tortie(&["apply", "--wait", "-f", &lab.file("policy.yml", POLICY)]).output().unwrap();
    let message = String::from_utf8_lossy(&applied.stdout);
    assert!(message.contains("in force on 2 nodes"), "{applied:?}");
    (lab, running)
}

fn show(lab: &Lab, pod: &str, more: &[&str]) -> String {
    lab.ok(&[&["policy", "show", pod, "-n", "calico-demo"], more].concat())
}

/// The lines below a line with this text, up to the next one of the same depth.
fn below(text: &str, part: &str) -> String {
    let depth = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<_> = text.lines().collect();
    let at =
        lines.iter().position(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?} in\n{text}"));
    let inside = lines[at + 1..].iter().take_while(|line| depth(line) > depth(lines[at]));
    inside.copied().collect::<Vec<_>>().join("\n")
}

fn end(lab: &Lab, mut running: Running) {
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(lab), Vec::<String>::new());
}

#[test]
fn a_pod_is_shown_on_both_systems() {
    let (lab, running) = with_policy(User::Root);
    let linux = show(&lab, "linux-server", &[]);
    assert!(linux.contains("pod calico-demo/linux-server (eth0) on node primary"), "{linux}");
    assert!(linux.contains("read from nftables table inet tortie"), "{linux}");
    let rule = below(&linux, "2 Allow TCP from");
    assert!(rule.contains("th dport { 80, 443 } accept"), "the kernel has the rule: {linux}");
    assert!(below(&linux, "3 Allow TCP from").contains("together with rule 2"), "{linux}");
    assert!(
        below(&linux, "1 Deny IPv4 TCP from 10.9.0.0/16").contains("ip saddr 10.9.0.0-10.9.255.255 drop"),
        "{linux}"
    );
    assert!(below(&linux, "end of tier default").contains("drop"), "{linux}");
    assert!(!linux.contains("! "), "nothing is wrong: {linux}");
    let sets = linux.split("\nsets\n").nth(1).expect("the sets");
    assert!(sets.contains("has(app)") && sets.contains("(4 members)"), "{linux}");

    let windows = show(&lab, "calico-demo/windows-server", &["--counters"]);
    assert!(windows.contains("on node minion") && windows.contains("read from HNS endpoint"), "{windows}");
    assert!(windows.contains("Allow In, protocol 6, local ports 443, remote "), "{windows}");
    assert!(windows.contains("cannot count"), "{windows}");
    assert!(windows.contains("! the node reports IcmpTypeNotExpressible"), "ICMP types: {windows}");
    end(&lab, running);
}

/// Real connections, in an ordinary user's lab.
#[test]
fn hits_are_shown_if_rules_have_counters() {
    let (lab, running) = with_policy(User::Ordinary);
    let before = show(&lab, "linux-server", &["--counters"]);
    assert!(
        before.contains("annotation tortie.io/policyCounters: Enabled of FelixConfiguration default"),
        "{before}"
    );
    // The first connection resolves hardware addresses, and may send a packet twice.
    lab.ok(&["lab", "matrix", "--port", "80"]);
    lab.ok(&["apply", "--wait", "-f", &lab.file("counters.yml", COUNTERS)]);
    lab.ok(&["lab", "matrix", "--port", "80"]);
    let after = show(&lab, "linux-server", &["--counters"]);
    let rule = below(&after, "2 Allow TCP from");
    // linux-client, windows-client and windows-server, each with one packet that begins a connection.
    assert!(rule.contains("counter accept   3 packets, "), "{after}");
    assert!(rule.contains("80   3 packets, ") && rule.contains("1 value never"), "{after}");

    let document = lab.json(&["policy", "show", "linux-server", "-n", "calico-demo", "-o", "json"]);
    let endpoint = &document["endpoints"][0];
    assert_eq!((&document["node"], &endpoint["inForce"]["counting"]), (&"primary".into(), &true.into()));
    let web =
        endpoint["policies"].as_array().unwrap().iter().find(|of| of["policy"]["name"] == "web").unwrap();
    assert!(web["ingress"][1]["words"].as_str().unwrap().starts_with("Allow TCP from "), "{web}");
    let lists = endpoint["inForce"]["lists"].as_array().unwrap();
    let rules = lists.iter().flat_map(|list| list["rules"].as_array().unwrap());
    let counted = rules.filter(|rule| rule["numbers"] == serde_json::json!([2, 3]));
    assert_eq!(counted.map(|rule| rule["count"]["packets"].as_u64()).collect::<Vec<_>>(), [Some(3)]);
    end(&lab, running);
}

#[test]
fn objects_that_cannot_be_shown_are_named() {
    let (lab, running) = with_policy(User::Root);
    let host = "apiVersion: v1\nkind: Pod\nmetadata: {name: host, namespace: calico-demo}\nspec: {nodeName: primary, \
                hostNetwork: true, containers: [{name: c}]}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: nowhere, \
                namespace: calico-demo}\nspec: {nodeSelector: {'no': node}, containers: [{name: c}]}\n";
    lab.ok(&["apply", "-f", &lab.file("host.yml", host)]);
    let refused = |pod: &str, more: &[&str], part: &str| {
        let arguments = [&["policy", "show", pod, "-n", "calico-demo"], more].concat();
        let Output { status, stderr, .. } = lab.tortie(&arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&stderr);
        assert_eq!(status.code(), Some(2), "{pod}: {errors}");
        assert!(errors.contains(part), "{pod}: {errors}");
    };
    refused("nobody", &[], "Pod calico-demo/nobody does not exist");
    refused("host", &[], "it is its node (primary), and under no policy of pods");
    refused("nowhere", &[], "Pod calico-demo/nowhere is on no node yet");
    refused("shop/linux-server", &[], "is of namespace shop, but -n says calico-demo");
    let elsewhere = "is on node minion; run there, as root: tortie policy show windows-server -n calico-demo";
    let primary = lab.dir().join("nodes/primary/control.sock").display().to_string();
    refused("windows-server", &["--agent-socket", &primary], "this is node primary. ");
    refused("windows-server", &["--agent-socket", &primary], elsewhere);
    refused("windows-server", &["--agent-socket", "/nowhere.sock"], "no agent answers at /nowhere.sock");
    refused("windows-server", &["--agent-socket", "/nowhere.sock"], elsewhere);

    // Half of the answer exists, and the other half is reported as missing.
    let hns = lab.processes().into_iter().find(|process| process.command.contains("tortie-hns")).unwrap();
    let hns = Pid::from_raw(i32::try_from(hns.pid).unwrap()).unwrap();
    kill_process(hns, Signal::KILL).unwrap();
    let output = lab.tortie(&["policy", "show", "windows-server", "-n", "calico-demo"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("! calico-demo/windows-server (eth0): what is in force cannot be read: "),
        "{text}"
    );
    assert!(text.contains("1 Deny IPv4 TCP from 10.9.0.0/16"), "{text}");
    end(&lab, running);
}

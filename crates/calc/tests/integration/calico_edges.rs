//! Edge cases that Calico's own code decides (policy decisions 31 to 46). Each case is judged by the oracle and by
//! the compiled programs, which implement a packet's path separately (`testkit::programs`).

use std::net::IpAddr;

use serde_json::Value;
use testkit::flows::judged;
use testkit::programs::Programs;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, manifest};
use tortie_calc::Calc;
use tortie_oracle::{Oracle, Snapshot, Verdict};
use tortie_policy::program::Flow;

/// Two nodes, pods `a` (10.0.0.1) and `b` (10.0.0.2) on n1 and `c` (10.0.0.3) on n2, and a network set.
const CLUSTER: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: red}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: runner, namespace: red}}
---
{apiVersion: v1, kind: Node, metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.0.2.1/24}}}
---
{apiVersion: v1, kind: Node, metadata: {name: n2, annotations: {projectcalico.org/IPv4Address: 192.0.2.2/24}}}
---
{apiVersion: projectcalico.org/v3, kind: GlobalNetworkSet, metadata: {name: set, labels: {a: x}}, spec: {nets: [203.0.113.0/24]}}
";

/// The policies, the flows that pass (`from > to protocol/port/source port`), and the flows that do not.
struct Case(&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const ALLOW_OTHERS: &str =
    "spec: {order: 10, selector: all(), ingress: [{action: Allow}], egress: [{action: Allow}]}";

fn cases() -> Vec<Case> {
    vec![
        Case(
            "networks of one family concern that family only (31)",
            "kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {ingress: [{action: Allow, source: {notNets: ['fd00::/8']}}]}",
            &[],
            &["198.51.100.9 > 10.0.0.1 6/80"],
        ),
        Case(
            "a blank selector in a rule is what the cluster knows (33)",
            "kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {ingress: [{action: Allow, source: {selector: ' '}}]}",
            &["10.0.0.2 > 10.0.0.1 6/80", "203.0.113.1 > 10.0.0.1 6/80"],
            &["198.51.100.9 > 10.0.0.1 6/80"],
        ),
        Case(
            "a blank namespaceSelector of a policy is about pods only (33)",
            "kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {namespaceSelector: ' ', ingress: [{action: Deny}]}
---
kind: HostEndpoint, metadata: {name: h}, spec: {node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}",
            &["198.51.100.9 > 192.0.2.1 6/80"],
            &["198.51.100.9 > 10.0.0.1 6/80"],
        ),
        Case(
            "a profile that does not exist denies (34)",
            "kind: HostEndpoint, metadata: {name: h}, spec: {node: n1, interfaceName: eth0, profiles: [missing, projectcalico-default-allow]}",
            &["198.51.100.9 > 192.0.2.1 6/22"],
            &["198.51.100.9 > 192.0.2.1 6/80"],
        ),
        Case(
            "a profile that passes leaves the decision to the next (34)",
            "kind: Profile, metadata: {name: first}, spec: {ingress: [{action: Pass}]}
---
kind: HostEndpoint, metadata: {name: h}, spec: {node: n1, interfaceName: eth0, profiles: [first, projectcalico-default-allow]}",
            &["198.51.100.9 > 192.0.2.1 6/80"],
            &[],
        ),
        Case(
            "all() of service accounts in a rule matches network sets, too (35)",
            "kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {order: 1, selector: all(), ingress: [{action: Deny, source: {serviceAccounts: {selector: all()}}}]}
---
kind: GlobalNetworkPolicy, metadata: {name: rest}, ALLOW_OTHERS",
            &["198.51.100.9 > 10.0.0.1 6/80"],
            &["203.0.113.1 > 10.0.0.1 6/80", "10.0.0.2 > 10.0.0.1 6/80"],
        ),
        Case(
            "a policy's serviceAccountSelector selects no hosts (35)",
            "kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {selector: all(), serviceAccountSelector: '!has(t)', ingress: [{action: Deny}]}
---
kind: HostEndpoint, metadata: {name: h}, spec: {node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}",
            &["198.51.100.9 > 192.0.2.1 6/80"],
            &["198.51.100.9 > 10.0.0.1 6/80"],
        ),
        Case(
            "ties are broken by the kind as Calico spells it (36)",
            "kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {tier: kube-admin, order: 5, selector: all(), ingress: [{action: Allow}]}
---
apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: p}, spec: {tier: Admin, priority: 5, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}",
            &["10.0.0.2 > 10.0.0.1 6/80"],
            &[],
        ),
        Case(
            "what pods never send (22, 38)",
            "kind: GlobalNetworkPolicy, metadata: {name: rest}, ALLOW_OTHERS",
            &["10.0.0.1 > 10.0.0.3 17/4790"],
            &["10.0.0.1 > 10.0.0.3 17/4789", "10.0.0.1 > 198.51.100.9 4/0"],
        ),
        Case(
            "a host endpoint of all interfaces judges what its node forwards for pods (43)",
            "kind: HostEndpoint, metadata: {name: h, labels: {'on': host}}, spec: {node: n1, interfaceName: '*', profiles: [projectcalico-default-allow]}
---
kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {selector: on == 'host', applyOnForward: true, ingress: [{action: Deny, destination: {ports: [80]}, protocol: TCP}, {action: Allow}], egress: [{action: Allow}]}",
            &["10.0.0.1 > 10.0.0.2 6/81", "198.51.100.9 > 10.0.0.3 6/80", "10.0.0.1 > 192.0.2.1 6/80"],
            &["10.0.0.1 > 10.0.0.2 6/80", "10.0.0.1 > 198.51.100.9 6/80", "10.0.0.3 > 10.0.0.1 6/80"],
        ),
        Case(
            "and before DNAT, also where an interface has a host endpoint without such policy (43)",
            "kind: HostEndpoint, metadata: {name: h, labels: {'on': host}}, spec: {node: n1, interfaceName: '*'}
---
kind: HostEndpoint, metadata: {name: i}, spec: {node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}
---
kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {selector: on == 'host', applyOnForward: true, preDNAT: true, ingress: [{action: Deny, destination: {ports: [80]}, protocol: TCP}]}",
            &["198.51.100.9 > 192.0.2.1 6/81"],
            &["198.51.100.9 > 192.0.2.1 6/80", "10.0.0.1 > 10.0.0.2 6/80", "10.0.0.1 > 192.0.2.1 6/80"],
        ),
        Case(
            "but doNotTrack does not concern it (43)",
            "kind: HostEndpoint, metadata: {name: h, labels: {'on': host}}, spec: {node: n1, interfaceName: '*', profiles: [projectcalico-default-allow]}
---
kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {selector: on == 'host', applyOnForward: true, doNotTrack: true, ingress: [{action: Deny}]}",
            &["198.51.100.9 > 192.0.2.1 6/80"],
            &[],
        ),
        Case(
            "answers of failsafe ports skip doNotTrack (16)",
            "kind: HostEndpoint, metadata: {name: h, labels: {'on': host}}, spec: {node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}
---
kind: GlobalNetworkPolicy, metadata: {name: p}, spec: {selector: on == 'host', applyOnForward: true, doNotTrack: true, ingress: [{action: Deny, protocol: UDP}]}",
            &["198.51.100.9 > 192.0.2.1 17/9999/53"],
            &["198.51.100.9 > 192.0.2.1 17/9999/54"],
        ),
    ]
}

#[test]
fn edge_cases_get_calicos_verdicts() {
    for Case(what, policies, allowed, denied) in cases() {
        let objects = objects(policies, what);
        let snapshot = snapshot(&objects);
        let (oracle, programs) = (Oracle::new(&snapshot), Programs::new(&objects));
        let flows = allowed.iter().map(|flow| (flow, true)).chain(denied.iter().map(|flow| (flow, false)));
        for (text, expected) in flows {
            let flow = flow(text);
            assert_eq!(programs.judge(&flow).passes(), expected, "programs: {what}: {text}");
            assert_eq!(by_oracle(&oracle, &flow), expected, "oracle: {what}: {text}");
        }
    }
}

/// A stored ClusterNetworkPolicy that cannot be read closes the pods of its subject if that can be evaluated, else all pods, and
/// never hosts (37). A subject with an invalid label cannot be evaluated: no pod can have the label, so it would close nothing.
#[test]
fn damaged_subjects_close_only_pods() {
    let evaluable = r#"{"namespaces": {"matchLabels": {"no": "such"}}}"#;
    let with_invalid_label =
        r#"{"namespaces": {"matchExpressions": [{"key": "env", "operator": "In", "values": ["-bad-"]}]}}"#;
    let without_it = with_invalid_label.replace("In", "NotIn");
    for (subject, pods_pass) in [
        (evaluable, true),
        (with_invalid_label, false),
        (&without_it, false),
        (r#"{"namespaces": {"matchLabels": {"a b": "c"}}}"#, false),
        (r#"{"bogus": {}}"#, false),
    ] {
        let host = "kind: HostEndpoint, metadata: {name: h}, spec: {node: n1, interfaceName: eth0, profiles: [projectcalico-default-allow]}";
        let mut objects = objects(host, subject);
        let subject: Value = serde_json::from_str(subject).unwrap();
        let spec = serde_json::json!({"bogus": 1, "tier": "Admin", "priority": 1, "subject": subject, "ingress": [{"action": "Accept", "from": [{"namespaces": {}}]}]});
        let policy = serde_json::json!({"metadata": {"name": "damaged"}, "spec": spec});
        objects.push((Key::global(Kind::ClusterNetworkPolicy, "damaged"), policy));
        let snapshot = snapshot(&objects);
        let (oracle, programs) = (Oracle::new(&snapshot), Programs::new(&objects));
        for (text, expected) in
            [("198.51.100.9 > 10.0.0.1 6/80", pods_pass), ("198.51.100.9 > 192.0.2.1 6/80", true)]
        {
            let flow = flow(text);
            assert_eq!(programs.judge(&flow).passes(), expected, "programs: {subject}: {text}");
            assert_eq!(by_oracle(&oracle, &flow), expected, "oracle: {subject}: {text}");
        }
    }
}

/// No doNotTrack policy concerns a host endpoint of all interfaces, so there is nothing to ask in that table (43).
#[test]
fn a_host_endpoint_of_all_interfaces_has_no_untracked_policy() {
    for (interface, untracked) in [("'*'", 0), ("eth0", 1)] {
        let policies = format!(
            "kind: HostEndpoint, metadata: {{name: h}}, spec: {{node: n1, interfaceName: {interface}}}\n---\n\
             kind: GlobalNetworkPolicy, metadata: {{name: p}}, spec: {{applyOnForward: true, doNotTrack: true, ingress: [{{action: Deny}}]}}"
        );
        let mut calc = Calc::new("n1");
        for (key, value) in objects(&policies, interface) {
            calc.update(&key, Some(&value));
        }
        calc.flush();
        let program = &calc.state().host_endpoints["h"].program;
        assert_eq!(program.untracked.policy_ids().count(), untracked, "{interface}");
    }
}

fn objects(policies: &str, what: &str) -> Vec<(Key, Value)> {
    let mut text = CLUSTER.to_owned();
    for policy in policies.replace("ALLOW_OTHERS", ALLOW_OTHERS).split("\n---\n") {
        let version = if policy.contains("apiVersion") { "" } else { "apiVersion: projectcalico.org/v3, " };
        text.push_str(&format!("---\n{{{version}{policy}}}\n"));
    }
    for (name, node, address) in [("a", "n1", "10.0.0.1"), ("b", "n1", "10.0.0.2"), ("c", "n2", "10.0.0.3")] {
        text.push_str(&format!(
            "---\n{{apiVersion: projectcalico.org/v3, kind: WorkloadEndpoint, metadata: {{name: {node}-k8s-{name}-eth0, namespace: red}}, \
             spec: {{node: {node}, pod: {name}, endpoint: eth0, serviceAccountName: runner, ipNetworks: [{address}/32], \
             profiles: [kns.red, ksa.red.runner], interfaceName: cali{name}}}}}\n"
        ));
    }
    let read = manifest::read("case", &text).unwrap_or_else(|problems| panic!("{what}: {problems:?}"));
    read.into_iter().map(|object| (object.key, object.value)).collect()
}

fn snapshot(objects: &[(Key, Value)]) -> Snapshot {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    snapshot
}

fn flow(text: &str) -> Flow {
    let (source, rest) = text.split_once(" > ").unwrap();
    let (destination, ports) = rest.split_once(' ').unwrap();
    let mut numbers = ports.split('/').map(|number| number.parse::<u16>().unwrap());
    let protocol = Protocol(u8::try_from(numbers.next().unwrap()).unwrap());
    let destination_port = numbers.next().unwrap();
    let source_port = numbers.next().unwrap_or(40_000);
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let (source, destination) = (address(source), address(destination));
    Flow { source, destination, protocol, source_port, destination_port, icmp: None }
}

fn by_oracle(oracle: &Oracle<'_>, flow: &Flow) -> bool {
    judged(oracle, flow).verdict == Verdict::Allow
}

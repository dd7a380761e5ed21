//! `tortie explain` on manifests: its output and its exit code.

use std::process::Command;

use crate::offline::support::tortie;
use serde_json::Value;

const CLUSTER: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: web, labels: {team: a}}
---
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: web, labels: {app: front}}
spec: {nodeName: n1, containers: [{name: c}]}
status: {podIP: 10.0.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: back, namespace: web, labels: {app: back}}
spec: {nodeName: n2, containers: [{name: c, ports: [{containerPort: 80, name: http}]}]}
status: {podIP: 10.0.0.2}
---
apiVersion: v1
kind: Node
metadata: {name: n2, annotations: {projectcalico.org/IPv4Address: 192.0.2.2/24}}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkSet
metadata: {name: partner, labels: {zone: partner}}
spec: {nets: [203.0.113.0/24]}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: back, namespace: web}
spec:
  selector: app == 'back'
  ingress:
  - action: Allow
    protocol: TCP
    source: {selector: app == 'nobody'}
    destination: {ports: [http]}
  - action: Deny
    protocol: UDP
  - action: Allow
    protocol: TCP
    source: {namespaceSelector: global(), selector: zone == 'partner'}
---
apiVersion: projectcalico.org/v3
kind: StagedNetworkPolicy
metadata: {name: tomorrow, namespace: web}
spec: {order: 1, ingress: [{action: Allow}]}
---
apiVersion: v1
kind: Service
metadata: {name: s, namespace: web}
spec: {clusterIPs: [10.96.0.1], ports: [{port: 8080, name: w}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s1, namespace: web, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
endpoints: [{addresses: [10.0.0.2, 10.0.0.1]}]
ports: [{port: 80, name: w}, {port: 81, name: other}]
";

/// Exit code, standard output, standard error.
fn explain(arguments: &[&str]) -> (i32, String, String) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.yml"), CLUSTER).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
        .current_dir(dir.path())
        .args(["explain", "-f", "c.yml"])
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn it_reports_the_deciding_rule_and_the_mismatches_of_the_others() {
    let expected = "\
web/front (10.0.0.1) → web/back (10.0.0.2) TCP 80: denied

out of web/front: allowed by Profile kns.web, rule 1
  Profile kns.web
    1 Allow: matches

into web/back: denied at the end of tier default: no rule matches
  tier default: no rule matches, and its end denies
    StagedNetworkPolicy web/tomorrow (c.yml:42), staged: has no effect
      1 Allow: matches (c.yml:45)
    NetworkPolicy web/back (c.yml:26)
      1 Allow: no: source.selector wants app == \"nobody\", but web/front has app=front (c.yml:32)
      2 Deny: no: protocol wants UDP, but the packet is TCP (c.yml:36)
      3 Allow: no: source.namespaceSelector wants global(), but namespace web has \
kubernetes.io/metadata.name=web,projectcalico.org/name=web,team=a (c.yml:38)
";
    assert_eq!(explain(&["web/front", "web/back"]), (1, expected.to_owned(), String::new()));
}

#[test]
fn endpoints_ports_and_answers() {
    for (arguments, code, printed) in [
        (&["web/front", "web/back", "--port", "udp/53"][..], 1, "rule 2"),
        (&["front", "back", "-n", "web", "--port", "udp/53"], 1, "rule 2"),
        (&["front", "back", "--port", "udp/53"], 2, "pod default/front does not exist"),
        (&["globalnetworkset/partner", "web/back"], 0, "allowed by NetworkPolicy web/back, rule 3"),
        (&["203.0.113.7", "10.0.0.2", "--port", "icmp/8"], 1, "ICMP type 8"),
        (&["web/back", "web/front", "--port", "proto/47"], 0, "protocol 47: allowed"),
        (&["web/back", "web/front", "--port", "8080"], 0, "TCP 8080: allowed"),
        (&["web/back", "web/front", "--port", "icmp/3/4"], 0, "ICMP type 3"),
        (&["web/back", "web/front", "--port", "icmp"], 0, "ICMP type 8"),
        (&["web/back", "web/back"], 0, "never leaves the pod"),
        (&["web/nobody", "web/back"], 2, "error: pod web/nobody does not exist"),
        (&["node/n3", "web/back"], 2, "error: node n3 does not exist"),
        (&["a/b/c/d", "web/back"], 2, "is none of NAMESPACE/POD"),
        (&["networkset/web/x", "web/back"], 2, "error: NetworkSet web/x does not exist"),
        (&["web/front", "web/back", "--port", "tcp"], 2, "a port is missing"),
        (&["web/front", "web/back", "--port", "tcq/80"], 2, "\"tcq\" is no protocol"),
        (&["web/front", "web/back", "--port", "icmp/256"], 2, "at most 255"),
        (&["web/front", "--service", "web/s", "--port", "tcp/80"], 2, "Service web/s has no port tcp/80"),
        (
            &["web/front", "10.96.0.1", "--port", "8080"],
            1,
            "10.96.0.1 is an address of Service web/s: packets to it go to one of 2 backends",
        ),
        (&["web/front", "10.96.0.1", "--port", "8080"], 1, "→ 10.0.0.2 TCP 80: denied"),
        (
            &["web/front", "10.96.0.1", "--port", "80"],
            2,
            "Service web/s has no port tcp/80: nobody takes such packets",
        ),
        (&["web/front", "--service", "s"], 2, "Service default/s does not exist"),
    ] {
        let (got, out, err) = explain(arguments);
        assert_eq!(got, code, "{arguments:?}\n{out}{err}");
        assert!(format!("{out}{err}").contains(printed), "{arguments:?}\n{out}{err}");
    }
}

#[test]
fn a_service_is_each_of_its_backends() {
    let (code, out, _) = explain(&["web/front", "--service", "web/s", "--port", "tcp/8080", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap();
    let verdict =
        |index: usize| document["backends"][index]["answer"]["verdict"].as_str().unwrap().to_owned();
    assert_eq!((code, verdict(0), verdict(1)), (1, "Deny".into(), "Allow".into()), "{out}");
    assert_eq!(document["backends"][0]["question"]["destinationPort"], 80, "{out}");
    assert_eq!(document["backends"].as_array().unwrap().len(), 2);
}

#[test]
fn manifests_with_problems_leave_no_certain_answer() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.yml"), CLUSTER.replace("action: Deny", "action: Forbid")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
        .current_dir(dir.path())
        .args(["explain", "-f", "c.yml", "web/front", "web/back"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8(output.stdout).unwrap().contains("denied, not certain"));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("c.yml:36: NetworkPolicy web/back: spec.ingress[1].action")
    );
}

/// A folder of manifests as users keep them: workloads instead of pods, no namespaces, unrelated kinds.
#[test]
fn manifests_are_completed_to_a_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let workload = |kind: &str, name: &str| {
        format!(
            "apiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec:\n  template:\n    metadata: {{labels: {{app: {name}}}}}\n    spec: {{containers: [{{name: c}}]}}\n---\n"
        )
    };
    let policy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: shop}\nspec: {podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: api}}}, {ipBlock: {cidr: 10.0.0.0/8}}]}]}\n";
    let others = "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\napiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: s}\n";
    let text = workload("Deployment", "api")
        + &workload("StatefulSet", "db")
        + &workload("Deployment", "web")
        + policy
        + others;
    std::fs::write(dir.path().join("all.yaml"), text).unwrap();
    for (from, code) in [("shop/api", 0), ("shop/web", 1), ("10.1.2.3", 0)] {
        let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
            .args(["explain", "-f", dir.path().to_str().unwrap(), from, "shop/db"])
            .output()
            .unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{from}: {err}");
        assert!(
            err.contains("skipped, as no verdict depends on it: 1 ConfigMap\n")
                && err.contains("serving.knative.dev")
                && err.contains("namespace shop is not given"),
            "{err}"
        );
    }
}

/// A rule that matches the Service's own address never matches: when policy is evaluated, the packet has a backend's
/// address.
#[test]
fn the_address_of_a_service_is_explained_after_translation() {
    let dir = tempfile::tempdir().unwrap();
    let policy = "---\n{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: p, namespace: x}, spec: {types: [Egress], egress: [{action: Allow, destination: {nets: [10.96.0.9/32, 192.0.2.9/32, 192.0.2.10/32]}}]}}\n";
    let service = "---\n{apiVersion: v1, kind: Service, metadata: {name: s, namespace: x}, spec: {clusterIP: 10.96.0.9, externalIPs: [192.0.2.9], selector: {app: b}, ports: [{port: 80, targetPort: 8080}]}, status: {loadBalancer: {ingress: [{ip: 192.0.2.10}]}}}\n";
    let pods = "{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: x}, spec: {containers: [{name: c}]}}\n---\n{apiVersion: v1, kind: Pod, metadata: {name: b, namespace: x, labels: {app: b}}, spec: {containers: [{name: c}]}, status: {podIP: 10.0.0.7}}\n";
    std::fs::write(dir.path().join("c.yml"), [pods, service, policy].concat()).unwrap();
    let run = |arguments: &[&str]| {
        let program = env!("CARGO_BIN_EXE_tortie");
        let output = Command::new(program).current_dir(dir.path()).args(arguments).output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    for address in ["10.96.0.9", "192.0.2.9", "192.0.2.10"] {
        let (code, out, err) = run(&["explain", "-f", "c.yml", "x/a", address, "-o", "json"]);
        let document: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
        let backend = &document["backends"][0];
        assert_eq!(
            (code, backend["answer"]["destination"].as_str()),
            (Some(1), Some("10.0.0.7")),
            "{address}: {out}"
        );
        assert_eq!(document["service"], "Service x/s");
    }
    let flow = "{\"from\": \"x/a\", \"to\": \"10.96.0.9\", \"port\": \"tcp/80\"}\n".to_string();
    std::fs::write(dir.path().join("flows"), flow).unwrap();
    let change = policy.replace("10.96.0.9/32", "10.0.0.0/24");
    std::fs::write(dir.path().join("change.yml"), change).unwrap();
    let (code, out, err) = run(&["preview", "--in", "c.yml", "-f", "change.yml", "--flows", "flows"]);
    assert!(code == Some(1) && out.contains("denied → allowed"), "{out}{err}");
}

/// A packet keeps its family, and Services are distinguished by their namespace.
#[test]
fn a_service_address_leads_to_backends_of_its_family_and_namespace() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.yml");
    let service = |namespace: &str, addresses: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Service, metadata: {{name: s, namespace: {namespace}}}, spec: {{clusterIPs: [{addresses}], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: PreferDualStack, selector: {{app: b}}, ports: [{{port: 80}}]}}}}\n"
        )
    };
    let pod = |namespace: &str, name: &str, addresses: [&str; 2]| {
        let [v4, v6] = addresses;
        format!(
            "---\n{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {namespace}, labels: {{app: {name}}}}}, spec: {{containers: [{{name: c}}]}}, status: {{podIPs: [{{ip: {v4}}}, {{ip: '{v6}'}}]}}}}\n"
        )
    };
    let text = [
        pod("x", "a", ["10.0.0.1", "fd01::1"]),
        pod("x", "b", ["10.0.0.2", "fd01::2"]),
        pod("z", "b", ["10.0.0.3", "fd01::3"]),
        service("x", "10.96.0.1, 'fd02::1'"),
        service("z", "10.96.0.2, 'fd02::2'"),
    ];
    std::fs::write(&file, text.concat()).unwrap();
    for (address, expected) in
        [("10.96.0.1", "10.0.0.2"), ("fd02::1", "fd01::2"), ("10.96.0.2", "10.0.0.3"), ("fd02::2", "fd01::3")]
    {
        let program = env!("CARGO_BIN_EXE_tortie");
        let output = Command::new(program)
            .args(["explain", "-o", "json", "-f", file.to_str().unwrap(), "x/a", address])
            .output()
            .unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        let backends = document["backends"].as_array().unwrap();
        let destinations: Vec<&Value> =
            backends.iter().map(|backend| &backend["answer"]["destination"]).collect();
        assert_eq!(destinations, [expected], "{address}: {document:#}");
    }
}

/// ICMP goes between IPv4 addresses, ICMPv6 between IPv6 addresses; and who asks for a node port is told what it is.
#[test]
fn the_family_follows_the_protocol_and_node_ports_are_noted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.yml");
    std::fs::write(
        &file,
        "{apiVersion: v1, kind: Node, metadata: {name: 'n'}, status: {addresses: [{type: InternalIP, address: 192.0.2.1}, {type: InternalIP, address: 'fd00::1'}]}}\n---\n\
         {apiVersion: v1, kind: Pod, metadata: {name: a, namespace: x}, spec: {nodeName: 'n', containers: [{name: c}]}, status: {podIPs: [{ip: 10.0.0.1}, {ip: 'fd01::1'}]}}\n---\n\
         {apiVersion: v1, kind: Service, metadata: {name: s, namespace: x}, spec: {type: NodePort, clusterIP: 10.96.0.1, selector: {a: b}, ports: [{port: 80, nodePort: 30080}]}}\n---\n\
         {apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: deny, namespace: x}, spec: {types: [Ingress, Egress]}}\n",
    )
    .unwrap();
    let note = "tcp/30080 is a node port of Service x/s";
    for (arguments, code, expected, noted) in [
        (&["x/a", "node/n", "--port", "icmpv6/135"][..], 0, "x/a (fd01::1) → node/n (fd00::1) ICMPv6", false),
        (&["x/a", "node/n", "--port", "icmpv6/134"], 1, "pods do not advertise routers", false),
        (&["x/a", "192.0.2.9", "--port", "udp/4789"], 1, "pods do not send VXLAN packets", false),
        (&["x/a", "192.0.2.9", "--port", "proto/4"], 1, "pods do not send IPIP packets", false),
        (&["x/a", "node/n", "--port", "179"], 1, "pods do not connect to the BGP speakers of nodes", false),
        (&["x/a", "fd00::1", "--port", "179"], 1, "pods do not connect to the BGP speakers of nodes", false),
        (&["x/a", "192.0.2.9", "--port", "179"], 1, "end of tier default", false),
        (&["x/a", "node/n", "--port", "udp/179"], 1, "end of tier default", false),
        (&["x/a", "node/n", "--port", "1790"], 1, "end of tier default", false),
        (&["x/a", "fd00::9", "--port", "icmpv6/135"], 1, "end of tier default", false),
        (&["x/a", "node/n", "--port", "icmp/8"], 1, "x/a (10.0.0.1) → node/n (192.0.2.1) ICMP", false),
        (&["fd01::1", "fd00::1", "--port", "icmp/8"], 2, "ask with --port icmpv6/128", false),
        (&["10.0.0.1", "192.0.2.1", "--port", "icmpv6/128"], 2, "ask with --port icmp/8", false),
        (&["10.0.0.1", "fd00::1", "--port", "icmp/8"], 2, "have no address of the same family", false),
        (&["node/n", "node/n", "--port", "30080"], 0, note, true),
        (&["192.0.2.9", "node/n", "--port", "30080"], 2, "Service x/s has no backends", false),
        (&["192.0.2.9", "192.0.2.1", "--port", "30080"], 2, "Service x/s has no backends", false),
        (&["192.0.2.9", "node/n", "--port", "udp/30080"], 0, "allowed", false),
        (&["192.0.2.9", "192.0.2.8", "--port", "30080"], 0, "allowed", false),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let output =
            command.args(["explain", "-f", file.to_str().unwrap()]).args(arguments).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {printed}");
        assert!(printed.contains(expected), "{arguments:?}: {printed}");
        assert_eq!(printed.contains(note), noted, "{arguments:?}: {printed}");
    }

    // Another port of BGP, and BGP from pods where FelixConfiguration allows it.
    let bgp = "{apiVersion: projectcalico.org/v3, kind: BGPConfiguration, metadata: {name: node.n}, spec: {listenPort: 1790}}\n";
    let allowed = "---\n{apiVersion: projectcalico.org/v3, kind: FelixConfiguration, metadata: {name: default, annotations: \
                   {tortie.io/bgpFromPods: Allow}}}\n";
    for (text, closed) in [(bgp.to_owned(), true), (format!("{bgp}{allowed}"), false)] {
        let settings = folder.path().join("bgp.yml");
        std::fs::write(&settings, text).unwrap();
        for port in ["179", "1790"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
            let files = ["-f", file.to_str().unwrap(), "-f", settings.to_str().unwrap()];
            let question = ["x/a", "node/n", "--port", port];
            let output = command.arg("explain").args(files).args(question).output().unwrap();
            let printed = String::from_utf8(output.stdout).unwrap();
            assert_eq!(
                printed.contains("pods do not connect to the BGP speakers"),
                closed,
                "{port}: {printed}"
            );
        }
    }

    // Tunnels from pods where FelixConfiguration allows them: policy decides.
    let felix = folder.path().join("felix.yml");
    let allowed = "{apiVersion: projectcalico.org/v3, kind: FelixConfiguration, metadata: {name: default}, \
                   spec: {allowVXLANPacketsFromWorkloads: true, allowIPIPPacketsFromWorkloads: true}}\n";
    std::fs::write(&felix, allowed).unwrap();
    // Another port of VXLAN: pods send to neither.
    let other = folder.path().join("other.yml");
    let text = "{apiVersion: projectcalico.org/v3, kind: FelixConfiguration, metadata: {name: node.n}, spec: {vxlanPort: 8472}}\n";
    std::fs::write(&other, text).unwrap();
    for (port, expected) in [("4789", true), ("8472", true), ("4790", false)] {
        let files = ["-f", file.to_str().unwrap(), "-f", other.to_str().unwrap()];
        let question = ["x/a", "192.0.2.9", "--port", &format!("udp/{port}")];
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let output = command.arg("explain").args(files).args(question).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert_eq!(printed.contains("pods do not send VXLAN packets"), expected, "{port}: {printed}");
    }
    for port in ["udp/4789", "proto/4"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let files = ["-f", file.to_str().unwrap(), "-f", felix.to_str().unwrap()];
        let output =
            command.arg("explain").args(files).args(["x/a", "192.0.2.9", "--port", port]).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        assert!(printed.contains("denied at the end of tier default"), "{port}: {printed}");
    }
}

/// A pod that its Service sends back to itself: a lab with these objects answers 200 without the policy, and not at all with it.
#[test]
fn a_pod_reaches_itself_by_its_service_as_its_policies_say() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.yml");
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: az, labels: {app: a}}, spec: {nodeName: n1, containers: [{name: c}]}, status: {podIP: 10.0.0.7}}\n";
    let service = |more: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Service, metadata: {{name: a, namespace: az}}, spec: {{{more}selector: {{app: a}}, ports: [{{port: 80}}]}}}}\n"
        )
    };
    let policy = |peer: &str| {
        format!(
            "---\n{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: a, namespace: az}}, spec: {{podSelector: {{matchLabels: {{app: a}}}}, policyTypes: [Egress], egress: [{{to: [{{podSelector: {{matchLabels: {{app: {peer}}}}}}}]}}]}}}}\n"
        )
    };
    let own = "its node translates the Service's address and sends it back";
    for (more, peer, arguments, code, expected) in [
        ("clusterIP: 10.96.1.0, ", "b", &["az/a", "--service", "az/a", "--port", "80"][..], 1, own),
        (
            "clusterIP: 10.96.1.0, ",
            "b",
            &["az/a", "10.96.1.0", "--port", "80"],
            1,
            "10.96.1.0 is an address of Service az/a",
        ),
        ("clusterIP: 10.96.1.0, ", "a", &["az/a", "10.96.1.0", "--port", "80"], 0, own),
        // The API server would give the Service an address.
        ("", "b", &["az/a", "--service", "az/a", "--port", "80"], 1, own),
        ("externalIPs: [192.0.2.9], ", "b", &["az/a", "192.0.2.9", "--port", "80"], 1, own),
        (
            "clusterIP: None, ",
            "b",
            &["az/a", "--service", "az/a", "--port", "80"],
            0,
            "the packet never leaves the pod",
        ),
        (
            "clusterIP: 10.96.1.0, ",
            "b",
            &["az/a", "az/a", "--port", "80"],
            0,
            "the packet never leaves the pod",
        ),
    ] {
        std::fs::write(&file, [pod, &service(more), &policy(peer)].concat()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let output =
            command.args(["explain", "-f", file.to_str().unwrap()]).args(arguments).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert_eq!(output.status.code(), Some(code), "{more} {arguments:?}: {printed}");
        assert!(printed.contains(expected), "{more} {arguments:?}: {printed}");
        assert!(!printed.contains("248.0.0."), "{more} {arguments:?}: {printed}");
    }
}

/// The replicas of a workload may be cut from each other.
#[test]
fn replicas_of_a_workload_are_asked_about_as_two_pods() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.yml");
    let workload = |kind: &str, more: &str| {
        let template = "template: {metadata: {labels: {app: redis}}, spec: {containers: [{name: c}]}}";
        let spec = match kind {
            "CronJob" => format!("{{schedule: '* * * * *', jobTemplate: {{spec: {{{template}}}}}{more}}}"),
            "Job" => format!("{{{template}{more}}}"),
            _ => format!("{{selector: {{matchLabels: {{app: redis}}}}, {template}{more}}}"),
        };
        let version = if kind.ends_with("Job") { "batch/v1" } else { "apps/v1" };
        format!(
            "{{apiVersion: {version}, kind: {kind}, metadata: {{name: redis, namespace: data}}, spec: {spec}}}\n"
        )
    };
    let policy = "---\n{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: redis, namespace: data}, spec: {podSelector: {matchLabels: {app: redis}}, policyTypes: [Ingress]}}\n";
    for (kind, more, is_replicated) in [
        ("StatefulSet", ", serviceName: redis, replicas: 3", true),
        ("Deployment", "", true),
        ("Deployment", ", replicas: 1", false),
        ("DaemonSet", "", true),
        ("Job", "", false),
        ("Job", ", parallelism: 2", true),
        ("Job", ", parallelism: 2, completions: 1", false),
        ("CronJob", "", true),
        ("CronJob", ", concurrencyPolicy: Forbid", false),
    ] {
        std::fs::write(&file, [&workload(kind, more), policy].concat()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let arguments =
            ["explain", "-f", file.to_str().unwrap(), "data/redis", "data/redis", "--port", "6379"];
        let output = command.args(arguments).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert_eq!(output.status.code(), Some(i32::from(is_replicated)), "{kind}{more}: {printed}");
        assert_eq!(
            printed.contains("about another one, data/redis~2"),
            is_replicated,
            "{kind}{more}: {printed}"
        );
    }
}

/// Packets to ports of nodes reach the backends (calico#8109: host endpoints need preDNAT or applyOnForward for them).
#[test]
fn ports_of_nodes_lead_to_their_pods() {
    let node = |name: &str, address: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Node, metadata: {{name: {name}}}, status: {{addresses: [{{type: InternalIP, address: {address}}}]}}}}\n---\n{{apiVersion: projectcalico.org/v3, kind: HostEndpoint, metadata: {{name: {name}-eth0, labels: {{'on': {name}}}}}, spec: {{node: {name}, interfaceName: eth0, expectedIPs: [{address}]}}}}\n"
        )
    };
    let hosts_in = "---\n{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {name: hosts-in}, spec: {selector: has(on), order: 20, types: [Ingress], ingress: [{action: Allow, protocol: TCP, destination: {ports: [22]}}]}}\n";
    let cluster = |more: &str| {
        [
            "{apiVersion: v1, kind: Pod, metadata: {name: web, namespace: shop, labels: {app: web}}, spec: {nodeName: n1, containers: [{name: c, ports: [{containerPort: 8080, hostPort: 8088}]}]}, status: {podIP: 10.233.0.5}}\n",
            "---\n{apiVersion: v1, kind: Pod, metadata: {name: own, namespace: shop}, spec: {nodeName: n2, containers: [{name: c}]}, status: {podIP: 10.233.1.6}}\n",
            &format!("---\n{{apiVersion: v1, kind: Service, metadata: {{name: web, namespace: shop}}, spec: {{type: NodePort, {more}clusterIP: 10.96.0.77, selector: {{app: web}}, ports: [{{port: 80, targetPort: 8080, nodePort: 30080}}]}}}}\n"),
            &node("n1", "192.168.10.11"),
            &node("n2", "192.168.10.12"),
            hosts_in,
        ]
        .concat()
    };
    let global = |name: &str, spec: &str| {
        format!(
            "---\n{{apiVersion: projectcalico.org/v3, kind: GlobalNetworkPolicy, metadata: {{name: {name}}}, spec: {{order: 10, {spec}}}}}\n"
        )
    };
    let pre_dnat = global(
        "early",
        "selector: has(on), preDNAT: true, applyOnForward: true, ingress: [{action: Deny, protocol: TCP, destination: {ports: [30080, 8088]}}]",
    );
    let forward = global(
        "forward",
        "selector: on == 'n2', applyOnForward: true, types: [Egress], egress: [{action: Deny, protocol: TCP, destination: {ports: [8080]}}]",
    );
    let of_sender = global(
        "web",
        "selector: app == 'web', types: [Ingress], ingress: [{action: Allow, source: {nets: [203.0.113.0/24]}}]",
    );
    let local = "externalTrafficPolicy: Local, ";
    for (more, policy, from, to, port, code, expected) in [
        ("", "", "203.0.113.9", "node/n1", "30080", 0, "port 30080 of node n1 is a port of Service shop/web"),
        ("", "", "203.0.113.9", "192.168.10.11", "8088", 0, "port 8088 of node n1 is a port of Pod shop/web"),
        ("", "", "203.0.113.9", "node/n2", "8088", 1, "into host endpoint n2-eth0"),
        ("", "", "203.0.113.9", "node/n2", "30080", 0, "with its own address 192.168.10.12"),
        ("", "", "shop/own", "node/n2", "30080", 0, "→ 10.233.0.5 TCP 8080: allowed"),
        ("", "", "shop/own", "node/n1", "30080", 1, "tcp/30080 is a node port of Service shop/web"),
        ("", pre_dnat.as_str(), "203.0.113.9", "node/n1", "30080", 1, "GlobalNetworkPolicy early"),
        ("", &pre_dnat, "203.0.113.9", "node/n1", "8088", 1, "GlobalNetworkPolicy early"),
        ("", &pre_dnat, "203.0.113.9", "node/n2", "30080", 1, "GlobalNetworkPolicy early"),
        ("", &forward, "203.0.113.9", "node/n2", "30080", 1, "GlobalNetworkPolicy forward"),
        ("", &forward, "203.0.113.9", "node/n1", "30080", 0, ": allowed"),
        // A node that passes the packet on puts its own address in place of the sender's.
        ("", &of_sender, "203.0.113.9", "node/n1", "30080", 0, ": allowed"),
        ("", &of_sender, "203.0.113.9", "node/n2", "30080", 1, "with its own address 192.168.10.12"),
        (local, "", "203.0.113.9", "node/n1", "30080", 0, ": allowed"),
        (local, "", "203.0.113.9", "node/n2", "30080", 2, "has no backend for port 30080 of node n2"),
    ] {
        let text = format!("{}{policy}", cluster(more));
        let (code_seen, out, err) =
            tortie(&[("c.yml", &text)], &["explain", "-f", "c.yml", from, to, "--port", port]);
        assert!(
            code_seen == code && (out.clone() + &err).contains(expected),
            "{more}{policy} {from} {to} {port}: {code_seen} {out}{err}"
        );
    }
    let expectations = "expectations:\n- 203.0.113.9 reaches node/n1 on tcp/30080\n- 203.0.113.9 reaches node/n1 on tcp/8088\n- 203.0.113.9 does not reach node/n1 on tcp/443\n";
    let files = [("c.yml", cluster("")), ("e.yml", expectations.to_owned())];
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let (code, out, err) = tortie(&files, &["policy", "test", "e.yml", "-f", "c.yml"]);
    assert_eq!(code, 0, "{out}{err}");
    let wrong = expectations.replace("203.0.113.9 reaches", "203.0.113.9 does not reach");
    let (code, out, err) =
        tortie(&[files[0], ("e.yml", &wrong)], &["policy", "test", "e.yml", "-f", "c.yml"]);
    assert_eq!(code, 1, "{out}{err}");
}

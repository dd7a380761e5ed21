//! Nodes and pods with addresses of both families, and pools with VXLAN between networks only.

use crate::support::{Lab, User, pod};

const NODES: [&str; 2] = ["primary", "linux-2"];
const PODS: [&str; 2] = ["one", "two"];

/// The IPv6 address of a pod.
fn address_v6(lab: &Lab, pod: &str) -> String {
    let path = "{.spec.ipNetworks[1]}";
    let name = ["primary", "linux--2"].into_iter().zip(PODS).find(|(_, name)| *name == pod).unwrap().0;
    let endpoint = format!("{name}-k8s-{pod}-eth0");
    let net = lab.ok(&["get", "wep", &endpoint, "-n", "calico-demo", "-o", &format!("jsonpath={path}")]);
    net.trim().trim_end_matches("/128").to_owned()
}

/// Whether a pod reaches an address.
fn reaches(lab: &Lab, from: &str, to: &str) -> bool {
    let connect =
        format!("exec 3<>/dev/tcp/{to}/80 && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '<h1>' <&3");
    let pod = format!("calico-demo/{from}");
    let output = lab.tortie(&["lab", "exec", &pod, "--", "timeout", "2", "bash", "-c", &connect]).output();
    output.unwrap().status.success()
}

fn routes(lab: &Lab, node: &str, family: &str) -> String {
    lab.ok(&["lab", "capture", node, "--", "ip", family, "route", "show", "proto", "84"])
}

#[test]
fn pods_of_both_families_connect_and_policy_judges_both() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2", "--windows", "0", "--ipv6"]);
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
    let pods = [namespace, pod("one", NODES[0], "a"), pod("two", NODES[1], "b")];
    lab.ok(&["apply", "-f", &lab.file("pods.yml", &pods.join("---\n"))]);
    lab.wait_for_pods();
    let [one, two] = PODS.map(|pod| address_v6(&lab, pod));
    assert!(one.starts_with("fd00:10:244:") && two.starts_with("fd00:10:244:"), "{one} {two}");
    // Kubelets report both, and on a Kubernetes API a pod has no address that they do not report.
    let ips = "jsonpath={.status.podIPs[*].ip}";
    let reported = lab.ok(&["get", "pod", "one", "-n", "calico-demo", "-o", ips]);
    assert_eq!(reported.split_whitespace().collect::<Vec<_>>(), [&address_v4(&lab, "one"), &one]);
    lab.wait_until("pods connect by IPv6", || reaches(&lab, "one", &two) && reaches(&lab, "two", &one));
    for node in NODES {
        assert!(routes(&lab, node, "-6").contains("dev vxlan-v6.calico"), "{}", routes(&lab, node, "-6"));
    }

    // A rule with the address of one family does not allow the other.
    let policy = |net: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: only, namespace: calico-demo}}\n\
             spec: {{selector: app == 'b', ingress: [{{action: Allow, source: {{nets: [\"{net}\"]}}}}]}}\n"
        )
    };
    lab.ok(&["apply", "--wait", "-f", &lab.file("policy.yml", &policy(&format!("{one}/128")))]);
    assert!(reaches(&lab, "one", &two) && !reaches(&lab, "one", &address_v4(&lab, "two")));
    lab.ok(&["apply", "--wait", "-f", &lab.file("policy.yml", &policy("10.244.0.0/16"))]);
    assert!(!reaches(&lab, "one", &two) && reaches(&lab, "one", &address_v4(&lab, "two")));
    lab.ok(&["delete", "-f", &lab.file("policy.yml", &policy("10.244.0.0/16"))]);

    // Both nodes are in one network, so CrossSubnet needs no VXLAN between them.
    let patch = r#"{"spec": {"vxlanMode": "CrossSubnet"}}"#;
    for pool in ["default-ipv4-ippool", "default-ipv6-ippool"] {
        lab.ok(&["patch", "ippool", pool, "--type", "merge", "-p", patch]);
    }
    lab.wait_until("the routes need no VXLAN", || {
        ["-4", "-6"].iter().all(|family| routes(&lab, NODES[0], family).contains("dev eth0"))
            && ["-4", "-6"].iter().all(|family| routes(&lab, NODES[1], family).contains("dev eth0"))
    });
    assert!(reaches(&lab, "one", &two) && reaches(&lab, "one", &address_v4(&lab, "two")));
    let reports = lab.json(&["get", "nodereports", "-o", "json"]);
    for report in reports["items"].as_array().unwrap() {
        assert_eq!(report["status"]["conditions"].as_array().map_or(0, Vec::len), 0, "{report}");
    }
    lab.ok(&["lab", "down"]);
    running.wait();
}

fn address_v4(lab: &Lab, pod: &str) -> String {
    let shown = lab.ok(&["get", "pod", pod, "-n", "calico-demo", "-o", "jsonpath={.status.podIP}"]);
    shown.trim().to_owned()
}

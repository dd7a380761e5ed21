//! `tortie describe` on manifests.

use crate::offline::support::{CLUSTER, tortie};

const MORE: &str = "
---
apiVersion: projectcalico.org/v3
kind: HostEndpoint
metadata: {name: n1-eth0, labels: {role: host}}
spec: {node: n1, interfaceName: eth0, expectedIPs: [192.168.0.1]}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: hosts}
spec: {selector: role == 'host', applyOnForward: true, ingress: [{action: Deny, protocol: TCP}]}
---
apiVersion: v1
kind: Service
metadata: {name: back, namespace: shop}
spec: {clusterIP: 10.96.0.1, selector: {app: back}, ports: [{port: 443, targetPort: api}]}
---
apiVersion: tortie.io/v1
kind: NodeReport
metadata: {name: n2}
status:
  os: linux
  version: 0.1.0
  time: 2026-01-01T00:00:00Z
  heartbeatSeconds: 60
  positions: {}
  endpoints: 1
  conditions:
  - {object: {kind: Pod, namespace: shop, name: back-0}, reason: HostPortTaken, message: the port is taken}
";

fn describe(arguments: &[&str]) -> (i32, String, String) {
    let manifests = format!("{CLUSTER}{MORE}");
    tortie(&[("c.yml", &manifests)], &[&["describe", "-f", "c.yml"], arguments].concat())
}

#[test]
fn objects_come_with_what_applies_to_them() {
    let at_back = [
        "Policies for ingress:\n  KubernetesNetworkPolicy shop/back (tier default)\n",
        "  StagedNetworkPolicy shop/back (tier default, staged: without effect)\n",
        "Policies for egress:\n  none\n",
        "Addresses:\n  10.0.0.4\n",
        "Conditions:\n  node n2: Pod shop/back-0: HostPortTaken: the port is taken\n",
    ];
    let of_policy = [
        "Name:        back\nKind:        NetworkPolicy\nNamespace:   shop\n",
        "Tier:        default\nApplies to ingress of:\n  shop/back-0\nApplies to egress of:\n  none\n",
    ];
    let of_hosts = ["Applies to ingress of:\n  host endpoint n1-eth0 of node n1\n"];
    let at_host = [
        "Addresses:\n  192.168.0.1\n",
        "Policies for ingress:\n  GlobalNetworkPolicy hosts (tier default)\n",
    ];
    let of_node = [
        "Pods with a network:\n  shop/back-0\n  shop/front-5d8f6c7b9-m4m4m\n",
        "Report:      2026-01-01T00:00:00Z by version 0.1.0\n",
        "  node n2: Pod shop/back-0: HostPortTaken: the port is taken\n",
    ];
    for (object, expected) in [
        ("pod/back-0", &at_back[..]),
        ("knp/back", &of_policy),
        ("gnp/hosts", &of_hosts),
        ("hep/n1-eth0", &at_host),
        ("node/n2", &of_node),
        ("node/n1", &["Report:      none", "Host endpoints:\n  n1-eth0\n"]),
        ("svc/back", &["Backends:\n  10.0.0.4:8443 TCP\n"]),
        ("gns/partner", &["Spec:\n  nets:\n    - \"203.0.113.0/24\"\n"]),
    ] {
        let (code, out, err) = describe(&[object]);
        assert_eq!(code, 0, "{object}: {err}");
        for expected in expected {
            assert!(out.contains(expected), "{object}: {expected:?} is missing in\n{out}");
        }
    }
}

#[test]
fn several_objects_are_described_and_missing_ones_named() {
    let (code, out, err) = describe(&["pods", "-n", "jobs"]);
    assert_eq!((code, out.matches("Kind:").count()), (0, 1), "{out}{err}");
    let (code, out, err) = describe(&["pod/back-0", "pod/absent"]);
    assert!(code == 1 && out.contains("back-0") && err.contains("Pod absent does not exist"), "{out}{err}");
    let (code, _, err) = describe(&["ipamblocks"]);
    assert!(code == 2 && err.contains("tortie ipam show"), "{err}");
}

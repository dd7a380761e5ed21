//! Policy where packets of pods come as they are.

use std::time::{Duration, Instant};

use super::probe::{Pod, reaches};
use super::topology::{Cluster, NODES};

/// How long a policy may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Ingress to all pods is for one pod only. The node itself reaches its pods in any case, and others do not.
pub(crate) fn check_policy(cluster: &Cluster) {
    let [four, six] = [false, true].map(|is_ipv6| cluster.pods[0].address(is_ipv6).unwrap());
    let manifest = format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: one, namespace: calico-demo}}\n\
         spec:\n  podSelector: {{}}\n  policyTypes: [Ingress]\n  ingress: [{{from: [{{ipBlock: {{cidr: {four}/32}}}}, {{ipBlock: {{cidr: {six}/128}}}}]}}]\n"
    );
    cluster.apply("policy.yml", &manifest);
    let [windows, other_windows] = [3, 4];
    let addresses = [false, true].map(|is_ipv6| cluster.pods[windows].address(is_ipv6).unwrap());
    let host = |node: usize| cluster.node(node);
    let clients: [(&str, &Pod, bool); 6] = [
        ("the allowed pod", &cluster.pods[0], true),
        ("another Linux pod", &cluster.pods[1], false),
        ("a Windows pod", &cluster.pods[other_windows], false),
        ("its own node", &host(windows), true),
        ("another Windows node", &host(other_windows), false),
        ("a Linux node", &host(0), false),
    ];
    let begin = Instant::now();
    loop {
        let wrong: Vec<String> = std::thread::scope(|scope| {
            let checks: Vec<_> = clients
                .iter()
                .flat_map(|client| addresses.map(|address| (client, address)))
                .map(|((name, from, passes), address)| {
                    scope.spawn(move || {
                        let found = reaches(from, &cluster.pods[windows], address);
                        (found.is_ok() != *passes).then(|| format!("{name} ({address}): {found:?}"))
                    })
                })
                .collect();
            checks.into_iter().filter_map(|check| check.join().unwrap()).collect()
        });
        if wrong.is_empty() {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "to the pod of {}:\n{}", NODES[windows], wrong.join("\n"));
    }
}

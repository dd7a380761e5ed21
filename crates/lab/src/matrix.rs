//! Who reaches whom: a real connection for each pair, and the table of the results.

mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tortie_api::kubernetes::Pod;
use tortie_api::{Kind, Resource};
use tortie_store::Store;

use crate::probe::{self, Probe};
use crate::services::dns;
use crate::{LabDir, LabError, Progress};

pub use crate::probe::Verdict;
pub use table::table;

/// One connection and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// `namespace/pod`, or `node/NAME`.
    pub from: String,
    /// `namespace/pod`.
    pub to: String,
    /// `tcp/80`.
    pub port: String,
    /// The result.
    pub verdict: Verdict,
    /// How long it took, in milliseconds.
    pub millis: f64,
    /// Why it failed, or something unusual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// All connections at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The name of the moment.
    pub name: String,
    /// One for each pair.
    pub connections: Vec<Connection>,
    /// Pods that were not tried, because they have no address: `namespace/pod`, and the known reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, String>,
}

impl Step {
    /// The number of connections that failed because of the lab and not because of policy.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.connections.iter().filter(|each| each.verdict == Verdict::Failed).count()
    }
}

/// The participants of a matrix.
#[derive(Default)]
struct Parties {
    /// The sources: name and network namespace.
    sources: Vec<(String, PathBuf)>,
    /// The targets.
    targets: Vec<(String, IpAddr, Vec<u16>)>,
    left_out: BTreeMap<String, String>,
    controls: Controls,
}

/// Tries a connection from every pod and node to every pod, and reports progress on standard error.
///
/// # Errors
/// The cluster cannot be read.
pub async fn probe_all(
    dir: &LabDir,
    store: &dyn Store,
    name: &str,
    port: Option<u16>,
    progress: &Progress,
) -> Result<Step, LabError> {
    let Parties { sources, targets, left_out, controls } = parties(dir, store, port).await?;
    let (mut pairs, mut probes) = (Vec::new(), Vec::new());
    for (from, netns) in &sources {
        for (to, address, ports) in targets.iter().filter(|(to, ..)| to != from) {
            for port in ports {
                let address = SocketAddr::new(*address, *port);
                probes.push(Probe { netns: netns.clone(), to: address, expect: to.clone() });
                pairs.push((from.clone(), to.clone(), *port));
            }
        }
    }
    let probed = probe::run_all(probes, progress).await;
    let connection = |((from, to, port), probed): ((String, String, u16), probe::Probed)| Connection {
        from,
        to,
        port: format!("tcp/{port}"),
        verdict: probed.verdict,
        millis: probed.millis,
        note: probed.note,
    };
    let mut connections: Vec<Connection> = pairs.into_iter().zip(probed).map(connection).collect();
    controls.check(&mut connections);
    Ok(Step { name: name.to_owned(), connections, left_out })
}

async fn parties(dir: &LabDir, store: &dyn Store, port: Option<u16>) -> Result<Parties, LabError> {
    let mut parties = Parties::default();
    for stored in store.list(Kind::Pod).await?.items {
        let shown = format!("{}/{}", stored.key.namespace, stored.key.name);
        let Ok(Resource::Pod(pod)) = Resource::read(&stored.key, &stored.value) else {
            parties.left_out.insert(shown, "it cannot be read".to_owned());
            continue;
        };
        // The lab's own server is not what users ask about.
        if dns::is_server(&stored.value) {
            continue;
        }
        let (Some(address), Some(node)) = (pod.status.pod_ip, &pod.spec.node_name) else {
            let reason = stored.value["status"]["message"].as_str().unwrap_or("no node has taken it yet");
            parties.left_out.insert(shown, reason.to_owned());
            continue;
        };
        let netns = match pod.spec.host_network {
            true => dir.node_netns(node),
            false => dir.pod_netns(&stored.key.namespace, &stored.key.name),
        };
        if !pod.spec.host_network {
            parties.controls.node_of.insert(shown.clone(), format!("node/{node}"));
        }
        parties.sources.push((shown.clone(), netns));
        parties.targets.push((shown, address, ports_of(&pod, port)));
    }
    for stored in store.list(Kind::Node).await?.items {
        parties.sources.push((format!("node/{}", stored.key.name), dir.node_netns(&stored.key.name)));
    }
    for stored in store.list(Kind::HostEndpoint).await?.items {
        let node = stored.value["spec"]["node"].as_str().unwrap_or_default();
        parties.controls.policed.insert(format!("node/{node}"));
    }
    Ok(parties)
}

/// Distinguishes connections that policy cuts from those that the lab fails to carry. A node always reaches its own
/// pods, whatever their policy. If it does not, silence from and to the pod says nothing about policy.
#[derive(Default)]
struct Controls {
    /// The node of each pod with a network of its own.
    node_of: BTreeMap<String, String>,
    /// The nodes with host endpoints, whose policy may separate a node from its pods.
    policed: BTreeSet<String>,
}

impl Controls {
    fn check(&self, connections: &mut [Connection]) {
        let is_control = |each: &Connection| {
            self.node_of.get(&each.to) == Some(&each.from) && !self.policed.contains(&each.from)
        };
        let silent = connections.iter().filter(|each| is_control(each) && each.verdict == Verdict::Cut);
        let silent: BTreeSet<String> = silent.map(|each| each.to.clone()).collect();
        let nodes: BTreeSet<&String> = silent.iter().filter_map(|pod| self.node_of.get(pod)).collect();
        for each in connections.iter_mut().filter(|each| each.verdict == Verdict::Cut) {
            if let Some(pod) = [&each.to, &each.from].into_iter().find(|end| silent.contains(*end)) {
                each.verdict = Verdict::Failed;
                each.note = Some(format!(
                    "the lab does not carry its packets: its own node does not reach {pod} either"
                ));
            } else if nodes.contains(&each.from) {
                each.verdict = Verdict::Failed;
                each.note = Some(format!(
                    "the lab does not carry its packets: {} does not reach its own pods",
                    each.from
                ));
            }
        }
    }
}

fn ports_of(pod: &Pod, chosen: Option<u16>) -> Vec<u16> {
    let tcp = |protocol: &Option<String>| protocol.as_deref().is_none_or(|name| name == "TCP");
    let served = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let served: Vec<u16> =
        served.filter(|port| tcp(&port.protocol)).map(|port| port.container_port).collect();
    match chosen {
        Some(port) => vec![port],
        None if served.is_empty() => vec![80],
        None => served,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tortie_api::Key;

    use super::*;

    fn connection(from: &str, to: &str, verdict: Verdict) -> Connection {
        let (from, to, port) = (from.to_owned(), to.to_owned(), "tcp/80".to_owned());
        Connection { from, to, port, verdict, millis: 0.0, note: None }
    }

    #[test]
    fn a_pod_that_its_own_node_does_not_reach_is_a_failure_of_the_lab() {
        let node_of = [("n/a", "node/1"), ("n/b", "node/2"), ("n/c", "node/3")];
        let node_of = node_of.map(|(pod, node)| (pod.to_owned(), node.to_owned())).into();
        let controls = Controls { node_of, policed: ["node/3".to_owned()].into() };
        use Verdict::{Cut, Failed, Reached, Refused};
        let table = [
            ("node/1", "n/a", Refused, Refused),
            ("node/2", "n/b", Cut, Failed),
            ("node/3", "n/c", Cut, Cut),
            ("n/a", "n/b", Cut, Failed),
            ("n/b", "n/a", Cut, Failed),
            ("n/b", "n/c", Reached, Reached),
            ("n/a", "n/c", Cut, Cut),
            ("node/2", "n/a", Cut, Failed),
            ("node/1", "n/c", Cut, Cut),
        ];
        let mut connections = table.map(|(from, to, verdict, _)| connection(from, to, verdict));
        controls.check(&mut connections);
        for (found, (from, to, _, expected)) in connections.iter().zip(table) {
            assert_eq!(found.verdict, expected, "{from} -> {to}");
            assert_eq!(found.note.is_some(), expected == Failed, "{from} -> {to}: {:?}", found.note);
        }
        let step = Step { name: String::new(), connections: connections.into(), left_out: BTreeMap::new() };
        assert_eq!(step.failed(), 4);
    }

    /// Only pods with a network of their own are controls, and only on nodes without host endpoints.
    #[tokio::test]
    async fn controls_are_pods_on_nodes_without_host_endpoints() {
        let store = tortie_store::Embedded::in_memory().unwrap();
        let pod = |name: &str, host_network: bool| {
            let key = Key::namespaced(Kind::Pod, "n", name);
            let spec = json!({"nodeName": "one", "hostNetwork": host_network, "containers": [{"name": "c"}]});
            let status = json!({"podIP": "10.0.0.1"});
            let metadata = json!({"name": name, "namespace": "n"});
            (key, json!({"metadata": metadata, "spec": spec, "status": status}))
        };
        let host = json!({"metadata": {"name": "h"}, "spec": {"node": "two", "interfaceName": "eth0"}});
        let host = (Key::global(Kind::HostEndpoint, "h"), host);
        for (key, value) in [pod("p", false), pod("on-host", true), host] {
            store.create(&key, value).await.unwrap();
        }
        let parties = parties(&LabDir::new(Some("/nowhere".into())), &store, None).await.unwrap();
        assert_eq!(parties.controls.node_of, [("n/p".to_owned(), "node/one".to_owned())].into());
        assert_eq!(parties.controls.policed, ["node/two".to_owned()].into());
    }
}

//! What the test deploys, and what it checks. Pure: nodes in, objects and checks out.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::kubernetes::Node as NodeResource;
use tortie_api::{Key, Kind};
use tortie_store::Stored;

use super::wire::{CLOSED, OPEN, Probe, SELECTED};

/// The namespace of the test, in which everything is that it deploys.
pub(super) const NAMESPACE: &str = "tortie-connectivity-test";
/// The label of a namespace that a test created.
pub(super) const LABEL: &str = "tortie.io/connectivity-test";
/// The label of servers: the operating system of their node.
const SERVES: &str = "tortie.io/serves";
/// The label of the clients that the policy lets in.
const CLIENT: &str = "tortie.io/client";
/// The port of the Services.
pub(super) const SERVICE_PORT: u16 = 80;

/// An operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Os {
    Linux,
    Windows,
}

impl Os {
    pub(super) const ALL: [Self; 2] = [Self::Linux, Self::Windows];
}

impl fmt::Display for Os {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Linux => "linux",
            Self::Windows => "windows",
        })
    }
}

/// A node that takes part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) os: Os,
}

/// The nodes that take part: those with these names; without names, the first `most` of each operating system.
pub(super) fn choose(nodes: &[Stored], names: &[String], most: usize) -> Result<Vec<Node>, String> {
    let mut all: BTreeMap<&str, Node> = BTreeMap::new();
    for stored in nodes {
        let os = match &stored.value["metadata"]["labels"][NodeResource::OS] {
            os if os == "windows" => Os::Windows,
            _ => Os::Linux,
        };
        let name = stored.key.name.clone();
        all.insert(&stored.key.name, Node { name, os });
    }
    if !names.is_empty() {
        let find = |name: &String| all.get(&**name).cloned().ok_or(format!("node {name} does not exist"));
        return names.iter().map(find).collect();
    }
    let of = |os: Os| all.values().filter(move |node| node.os == os).take(most).cloned();
    Ok(Os::ALL.into_iter().flat_map(of).collect())
}

/// The images of the pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Images {
    pub(super) linux: String,
    pub(super) windows: String,
}

/// The name of the pod that serves on a node.
pub(super) fn server(node: usize) -> String {
    format!("server-{}", node + 1)
}

/// The Service of the servers on nodes with this system.
pub(super) fn service(os: Os) -> String {
    format!("servers-{os}")
}

pub(super) fn key(kind: Kind, name: &str) -> Key {
    Key::namespaced(kind, NAMESPACE, name)
}

/// The namespace. Its pods may use their node's network.
pub(super) fn namespace() -> (Key, Value) {
    let labels = json!({
        LABEL: "true", "kubernetes.io/metadata.name": NAMESPACE, "pod-security.kubernetes.io/enforce": "privileged",
    });
    let value =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}});
    (Key::global(Kind::Namespace, NAMESPACE), value)
}

fn metadata(name: &str, labels: &Value) -> Value {
    json!({"name": name, "namespace": NAMESPACE, "labels": labels})
}

/// The policy of the servers: the open port is for everybody, the selected one for clients, the closed one for pods that
/// do not exist.
pub(super) fn policy() -> (Key, Value) {
    let port = |port: u16, protocol: &str| json!({"port": port, "protocol": protocol});
    let from = |who: &str| json!([{"podSelector": {"matchLabels": {CLIENT: who}}}]);
    let value = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata("servers", &json!({})),
        "spec": {
            "podSelector": {"matchExpressions": [{"key": SERVES, "operator": "Exists"}]},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [port(OPEN, "TCP"), port(OPEN, "UDP")]},
                {"from": from("yes"), "ports": [port(SELECTED, "TCP")]},
                {"from": from("no"), "ports": [port(CLOSED, "TCP")]},
            ],
        },
    });
    (key(Kind::KubernetesNetworkPolicy, "servers"), value)
}

/// The Service for the servers of an operating system.
pub(super) fn service_object(os: Os) -> (Key, Value) {
    let name = service(os);
    let value = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(&name, &json!({})),
        "spec": {
            "selector": {SERVES: os.to_string()},
            "ports": [{"name": "open", "protocol": "TCP", "port": SERVICE_PORT, "targetPort": OPEN}],
        },
    });
    (key(Kind::Service, &name), value)
}

/// The pod that serves on a node.
pub(super) fn server_pod(nodes: &[Node], node: usize, images: &Images) -> (Key, Value) {
    let name = server(node);
    let arguments = ["connectivity".to_owned(), "serve".to_owned(), name.clone()];
    let mut pod = pod(&name, &nodes[node], images, &arguments, json!({SERVES: nodes[node].os.to_string()}));
    let port = |name: &str, port: u16, protocol: &str| json!({"name": name, "containerPort": port, "protocol": protocol});
    pod["spec"]["containers"][0]["ports"] = json!([
        port("open", OPEN, "TCP"),
        port("open-udp", OPEN, "UDP"),
        port("selected", SELECTED, "TCP"),
        port("closed", CLOSED, "TCP"),
    ]);
    pod["spec"]["restartPolicy"] = json!("Always");
    (key(Kind::Pod, &name), pod)
}

/// How long pods run at most, if nobody removes them because the test was killed.
const MAX_AGE: Duration = Duration::from_secs(60 * 60);

fn pod(name: &str, node: &Node, images: &Images, arguments: &[String], labels: Value) -> Value {
    let image = if node.os == Os::Windows { &images.windows } else { &images.linux };
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata(name, &labels),
        "spec": {
            // The test is about this node, so it does not leave the choice to the scheduler.
            "nodeName": node.name, "nodeSelector": {NodeResource::OS: node.os.to_string()},
            "tolerations": [{"operator": "Exists"}], "restartPolicy": "Never",
            "activeDeadlineSeconds": MAX_AGE.as_secs(), "automountServiceAccountToken": false, "enableServiceLinks": false, "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "test", "image": image, "imagePullPolicy": "IfNotPresent", "args": arguments,
                // The results of a client are the end of its output.
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }],
        },
    })
}

/// Who checks something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum From {
    /// A pod on the node.
    Pod(usize),
    /// The node itself: a pod in its network.
    Node(usize),
}

impl From {
    pub(super) fn node(self) -> usize {
        let (Self::Pod(node) | Self::Node(node)) = self;
        node
    }

    /// The pod that checks it.
    pub(super) fn pod(self) -> String {
        match self {
            Self::Pod(node) => format!("client-{}", node + 1),
            Self::Node(node) => format!("node-{}", node + 1),
        }
    }
}

/// What a check is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum About {
    Pod,
    LargeTcp,
    LargeUdp,
    Allowed,
    Denied,
    FromNode,
    Service,
    Dns,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pod => "pod to pod",
            Self::LargeTcp => "large TCP",
            Self::LargeUdp => "large UDP, no fragments",
            Self::Allowed => "policy allows",
            Self::Denied => "policy denies",
            Self::FromNode => "node to pod",
            Self::Service => "pod to Service",
            Self::Dns => "DNS",
        })
    }
}

impl About {
    /// The port of the receiver.
    pub(super) fn port(self) -> &'static str {
        match self {
            Self::Pod | Self::LargeTcp | Self::FromNode => "tcp/8080",
            Self::LargeUdp => "udp/8080",
            Self::Allowed => "tcp/8081",
            Self::Denied => "tcp/8082",
            Self::Service => "tcp/80",
            Self::Dns => "udp/53",
        }
    }
}

/// Where something goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum To {
    /// The server on this node.
    Server(usize),
    /// The Service of the servers of this system.
    Service(Os),
}

/// One thing to check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedCheck {
    pub(super) from: From,
    pub(super) about: About,
    pub(super) to: To,
    /// What the client does; `None` if it cannot be tried, because the receiver has no address.
    pub(super) probe: Option<Probe>,
}

/// The addresses of what was deployed.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    /// Of the servers, by their node.
    pub(super) servers: BTreeMap<usize, IpAddr>,
    pub(super) services: BTreeMap<Os, IpAddr>,
    /// Whether the cluster has a DNS.
    pub(super) has_dns: bool,
}

/// Everything to check.
pub(super) fn checks(nodes: &[Node], addresses: &Addresses) -> Vec<PlannedCheck> {
    let mut checks = Vec::new();
    for from in 0..nodes.len() {
        for to in 0..nodes.len() {
            let at = |port: u16| addresses.servers.get(&to).map(|address| SocketAddr::new(*address, port));
            let greet = |port: u16| at(port).map(|at| Probe::Greet { to: at, name: server(to) });
            for (from, about, probe) in [
                (From::Pod(from), About::Pod, greet(OPEN)),
                (From::Pod(from), About::LargeTcp, at(OPEN).map(|to| Probe::Segments { to })),
                (From::Pod(from), About::LargeUdp, at(OPEN).map(|to| Probe::Datagram { to })),
                (From::Pod(from), About::Allowed, greet(SELECTED)),
                (From::Pod(from), About::Denied, at(CLOSED).map(|to| Probe::Closed { to })),
                (From::Node(from), About::FromNode, greet(OPEN)),
            ] {
                checks.push(PlannedCheck { from, about, to: To::Server(to), probe });
            }
        }
        for os in systems(nodes) {
            let address = addresses.services.get(&os);
            let servers =
                addresses.servers.keys().filter(|node| nodes.get(**node).is_some_and(|node| node.os == os));
            let names: Vec<String> = servers.map(|node| server(*node)).collect();
            let meet = address.map(|address| {
                let to = SocketAddr::new(*address, SERVICE_PORT);
                match names.is_empty() {
                    true => Probe::Greet { to, name: "server-".to_owned() },
                    false => Probe::Backends { to, names },
                }
            });
            let (from, to) = (From::Pod(from), To::Service(os));
            checks.push(PlannedCheck { from, about: About::Service, to, probe: meet });
            if addresses.has_dns {
                let probe = address.map(|address| Probe::Name { name: service(os), address: *address });
                checks.push(PlannedCheck { from, about: About::Dns, to, probe });
            }
        }
    }
    checks
}

/// The systems of the nodes.
pub(super) fn systems(nodes: &[Node]) -> impl Iterator<Item = Os> {
    Os::ALL.into_iter().filter(|os| nodes.iter().any(|node| node.os == *os))
}

/// The pod that does these probes; `None` if there are none.
pub(super) fn client_pod(
    nodes: &[Node],
    from: From,
    probes: &[&Probe],
    images: &Images,
) -> Option<(Key, Value)> {
    if probes.is_empty() {
        return None;
    }
    let node = nodes.get(from.node())?;
    let mut arguments = vec!["connectivity".to_owned(), "probe".to_owned()];
    arguments.extend(probes.iter().map(ToString::to_string));
    let mut pod = pod(&from.pod(), node, images, &arguments, json!({CLIENT: "yes"}));
    if let From::Node(_) = from {
        pod["spec"]["hostNetwork"] = json!(true);
        if node.os == Os::Windows {
            let options = json!({"hostProcess": true, "runAsUserName": "NT AUTHORITY\\SYSTEM"});
            pod["spec"]["securityContext"] = json!({"windowsOptions": options});
        }
    }
    Some((key(Kind::Pod, &from.pod()), pod))
}

//! A Kubernetes cluster on this machine: the API with its controllers, and Linux nodes that run pods.
//!
//! Each node is a set of namespaces (network, mount, UTS) with containerd, a kubelet and kube-proxy. A bridge connects the
//! nodes and the API server. No network plugin is installed: the nodes become Ready when somebody installs one.

mod configuration;
pub mod image;
mod node;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

pub use node::{Node, UNDERLAY_INTERFACE, user};

use crate::error::io;
use crate::programs::{self, Program};
use crate::{Error, KubeApi, KubeOptions};

/// The address of the API server on the network between the nodes (TEST-NET-1, RFC 5737).
pub const API_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The port of the API server.
pub const API_PORT: u16 = 6443;
/// The last byte of the first node's address.
const FIRST_NODE: u8 = 11;
/// The bridge between the nodes.
const BRIDGE: &str = "underlay";

/// What a [`Cluster`] consists of.
#[derive(Debug, Clone, Default)]
pub struct ClusterOptions {
    /// The names of the nodes.
    pub nodes: Vec<String>,
    /// The names of nodes that somebody else starts. Their kubelets may use the API as [`user`] says.
    pub other_nodes: Vec<String>,
    /// More users of the API, each with groups.
    pub users: Vec<(String, Vec<String>)>,
    /// The addresses of pods, of both families with a comma between them. kube-proxy masquerades what comes to a service from
    /// elsewhere.
    pub pod_network: String,
    /// Whether nodes and Services have IPv6 addresses, too.
    pub dual_stack: bool,
    /// Whether nodes have no kube-proxy, because somebody else serves Services.
    pub without_kube_proxy: bool,
    /// OCI archives that each node gets.
    pub images: Vec<PathBuf>,
}

/// A cluster. Everything ends when it is dropped.
pub struct Cluster {
    nodes: Vec<Node>,
    kube: KubeApi,
}

impl Cluster {
    /// Starts the cluster in the network namespace of this process, which should be a new one.
    ///
    /// # Errors
    ///
    /// A program is missing, or a server does not start.
    pub fn start(options: &ClusterOptions) -> Result<Self, Error> {
        let programs = NodePrograms::find()?;
        ip(&["link", "set", "lo", "up"])?;
        ip(&["link", "add", BRIDGE, "type", "bridge"])?;
        ip(&["address", "add", &format!("{API_ADDRESS}/24"), "dev", BRIDGE])?;
        ip(&["link", "set", BRIDGE, "up"])?;
        if options.dual_stack {
            ip(&["address", "add", &format!("{}/64", ipv6_address(API_ADDRESS)), "dev", BRIDGE, "nodad"])?;
        }
        let mut users = vec![("system:kube-proxy".to_owned(), Vec::new())];
        let nodes = options.nodes.iter().chain(&options.other_nodes);
        users.extend(nodes.map(|name| (user(name), vec!["system:nodes".to_owned()])));
        users.extend(options.users.iter().cloned());
        let kube = KubeApi::start(&KubeOptions {
            controllers: true,
            scheduler: true,
            nodes: true,
            users,
            listen: Some((API_ADDRESS, API_PORT)),
            dual_stack: options.dual_stack,
            ..KubeOptions::default()
        })?;
        let mut nodes = Vec::new();
        for (name, last) in options.nodes.iter().zip(FIRST_NODE..) {
            let address = Ipv4Addr::new(192, 0, 2, last);
            nodes.push(Node::start(&kube, &programs, name, address, options)?);
        }
        for node in &nodes {
            node.wait_until_ready()?;
        }
        Ok(Self { nodes, kube })
    }

    /// The API server and its controllers.
    #[must_use]
    pub fn kube(&self) -> &KubeApi {
        &self.kube
    }

    /// The nodes, in the order of their names in the options.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }
}

/// The IPv6 address of the node, or API server, with this IPv4 address (2001:db8::/32, RFC 3849).
fn ipv6_address(address: Ipv4Addr) -> Ipv6Addr {
    let [.., last] = address.octets();
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into())
}

/// The programs of a node.
struct NodePrograms {
    containerd: PathBuf,
    /// kubelet and kube-proxy.
    kubernetes: PathBuf,
}

impl NodePrograms {
    fn find() -> Result<Self, Error> {
        Ok(Self { containerd: Program::Containerd.find()?, kubernetes: Program::Node.find()? })
    }
}

/// The mount points of all hierarchies of cgroups: several in version 1, one in version 2.
fn cgroup_roots() -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let roots = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (folder, kind) = (fields.next()?, fields.next()?);
        matches!(kind, "cgroup" | "cgroup2").then(|| PathBuf::from(folder))
    });
    roots.collect()
}

/// Removes the cgroups of a cluster that has ended.
///
/// # Errors
///
/// A process is left in one of them.
pub fn remove_cgroups() -> Result<(), Error> {
    for root in cgroup_roots() {
        remove_cgroup(&root.join(node::CGROUP.trim_start_matches('/')))?;
    }
    Ok(())
}

/// Removes a cgroup and those in it. Their files are not real and need not be removed.
fn remove_cgroup(folder: &Path) -> Result<(), Error> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path())?;
        }
    }
    std::fs::remove_dir(folder).map_err(io(format!("removing the cgroup {}", folder.display())))
}

/// Runs `ip`.
fn ip(arguments: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("ip");
    command.args(arguments);
    programs::run(command).map(|_| ())
}

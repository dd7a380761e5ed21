//! The Linux node of flannel's cluster: with flanneld, or with Tortie's agent that takes part (`--flannel`).

use std::fmt;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use ipnet::IpNet;
use serde_json::json;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, Peer, Route, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_servers::KubeApi;
use tortie_servers::programs::Program;

use super::{Backend, LINUX, PODS, Programs};
use crate::linux_node::{Daemon, LINUX_NODE, add_pod, agent};
use crate::underlay::{UPLINK, Underlay};

/// The pod beside flanneld, and its gateway.
const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 5);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

/// Who connects the Linux node to flannel's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Member {
    Flanneld,
    Tortie,
}

impl fmt::Display for Member {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Flanneld => "flanneld",
            Self::Tortie => "Tortie",
        })
    }
}

/// A Linux node with a pod.
pub(super) struct LinuxNode {
    pub(super) daemon: Daemon,
    pub(super) pod: NetNs,
    pub(super) address: Ipv4Addr,
}

impl LinuxNode {
    /// Starts the daemon, and connects the pod. The folder has flannel's configuration.
    pub(super) fn start(
        member: Member,
        backend: Backend,
        programs: &Programs,
        underlay: &Underlay,
        kube: &KubeApi,
        folder: &Path,
    ) -> Result<Self> {
        match member {
            Member::Flanneld => {
                let daemon = Daemon::start(flanneld(kube, folder)?, underlay, folder)?;
                Ok(Self { daemon, pod: connect_pod(&underlay.linux)?, address: POD })
            }
            Member::Tortie => {
                underlay.windows.run(|| prepare(kube, backend))??;
                let agent = agent(&programs.tortie, kube, folder, &["--flannel"]);
                let daemon = Daemon::start(agent, underlay, folder)?;
                let (pod, address) = add_pod(&programs.tortie, underlay, folder, "far")?;
                Ok(Self { daemon, pod, address })
            }
        }
    }
}

fn flanneld(kube: &KubeApi, folder: &Path) -> Result<Command> {
    let mut command = Command::new(Program::Flanneld.find()?);
    command.args(["--kube-subnet-mgr", "--iptables-forward-rules=false"]).env("NODE_NAME", LINUX_NODE);
    command.arg(format!("--iface={LINUX}"));
    command.arg(format!("--kubeconfig-file={}", kube.kubeconfig().display()));
    command.arg(format!("--net-config-path={}", folder.join("net-conf.json").display()));
    command.arg(format!("--subnet-file={}", folder.join("linux.env").display()));
    Ok(command)
}

/// What Tortie needs in the cluster: its definitions, flannel's network as a pool, and the pod. Its VNI and port are those that
/// flannel needs for Windows nodes.
fn prepare(kube: &KubeApi, backend: Backend) -> Result<()> {
    kube.create_definitions()?;
    let mode = match backend {
        Backend::Vxlan => "Always",
        Backend::HostGw => "Never",
    };
    let spec = json!({"cidr": PODS, "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"});
    let pool = json!({"apiVersion": "crd.projectcalico.org/v1", "kind": "IPPool", "metadata": {"name": "flannel"}, "spec": spec});
    let spec = json!({"nodeName": LINUX_NODE, "containers": [{"name": "c", "image": "i"}]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "far", "namespace": "default"}, "spec": spec});
    for object in [pool, pod] {
        kube.apply(&object.to_string())?;
    }
    Ok(())
}

/// A pod, as flannel's plugin would connect it, and a node that forwards its packets.
fn connect_pod(node: &NetNs) -> Result<NetNs> {
    let pod = NetNs::create()?;
    let near = || -> Result<()> {
        sysctl::ensure("net/ipv4/ip_forward", "1")?;
        let mut links = RouteSocket::open()?;
        let peer = Peer { name: UPLINK, mac: None, mtu: None, namespace: Some(pod.as_fd()) };
        links.create(&NewLink { up: true, ..NewLink::new("pod0", NewLinkKind::Veth(peer)) })?;
        let link = interface_index("pod0")?;
        links.change(&Change::AddAddress(Address { link, address: GATEWAY.into(), prefix_length: 32 }))?;
        Ok(links.change(&Change::AddRoute(Route::on_link(IpNet::new(POD.into(), 32)?, link, 4)))?)
    };
    node.run(near)??;
    let far = || -> Result<()> {
        let (mut links, link) = (RouteSocket::open()?, interface_index(UPLINK)?);
        links.change(&Change::AddAddress(Address { link, address: POD.into(), prefix_length: 24 }))?;
        links.change(&Change::SetLink(link, vec![LinkSetting::Up(true)]))?;
        let everything = IpNet::new(Ipv4Addr::UNSPECIFIED.into(), 0)?;
        Ok(links.change(&Change::AddRoute(Route::via(everything, GATEWAY.into(), link, 4)))?)
    };
    pod.run(far)??;
    testkit::links::wait_for(&pod, UPLINK)?;
    testkit::links::wait_for(node, "pod0")?;
    Ok(pod)
}

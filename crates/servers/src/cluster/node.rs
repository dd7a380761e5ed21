//! A Linux node: namespaces with containerd, a kubelet and kube-proxy.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{API_ADDRESS, BRIDGE, ClusterOptions, NodePrograms, configuration, image, ip, ipv6_address};
use crate::error::{io, write};
use crate::{Error, KubeApi, Server, programs};

/// The script that makes a process a node.
const SCRIPT: &str = include_str!("node.sh");
/// The cgroup of everything that runs in pods, relative to the mount point of each hierarchy.
pub(super) const CGROUP: &str = "/tortie-e2e";
/// The node's interface on the network between the nodes.
pub const UNDERLAY_INTERFACE: &str = "eth0";

/// The user as whom the kubelet of this node calls the API.
#[must_use]
pub fn user(node: &str) -> String {
    format!("system:node:{node}")
}

/// A node. Its programs end when the cluster is dropped.
pub struct Node {
    name: String,
    address: Ipv4Addr,
    /// Its IPv6 address, if it has one.
    ipv6: Option<Ipv6Addr>,
    folder: PathBuf,
    /// The process that keeps the namespaces.
    machine: Server,
    programs: Vec<Server>,
}

impl Node {
    /// Starts the node, and waits for its programs except for the kubelet.
    pub(super) fn start(
        kube: &KubeApi,
        programs: &NodePrograms,
        name: &str,
        address: Ipv4Addr,
        options: &ClusterOptions,
    ) -> Result<Self, Error> {
        let folder = kube.folder().join(name);
        fs::create_dir(&folder).map_err(io(format!("creating {}", folder.display())))?;
        let machine = start_machine(kube, name, &folder)?;
        let ipv6 = options.dual_stack.then(|| ipv6_address(address));
        let mut node = Self { name: name.to_owned(), address, ipv6, folder, machine, programs: Vec::new() };
        node.connect()?;
        node.start_containerd(kube, programs)?;
        for archive in &options.images {
            node.import(archive)?;
        }
        node.start_kubelet(kube, programs)?;
        if !options.without_kube_proxy {
            node.start_kube_proxy(kube, programs, &options.pod_network)?;
        }
        Ok(node)
    }

    /// The node's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The process that keeps the node's namespaces.
    #[must_use]
    pub fn machine(&self) -> &Server {
        &self.machine
    }

    /// A program of the node: `containerd`, `kubelet` or `kube-proxy`.
    #[must_use]
    pub fn program(&self, name: &str) -> Option<&Server> {
        let name = self.server_name(name);
        self.programs.iter().find(|program| program.name() == name)
    }

    /// A command that runs in the node's namespaces.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut words = self.enter().into_iter();
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).arg(program).stdin(Stdio::null());
        command
    }

    /// Imports an OCI archive.
    ///
    /// # Errors
    ///
    /// containerd rejects the archive.
    pub fn import(&self, archive: &Path) -> Result<(), Error> {
        let mut command = self.command("ctr");
        command.args(["--namespace", "k8s.io", "images", "import"]).arg(archive);
        programs::run(command).map(|_| ())
    }

    /// Waits until all programs answer.
    pub(super) fn wait_until_ready(&self) -> Result<(), Error> {
        self.programs.iter().try_for_each(Server::wait_until_ready)
    }

    /// Gives the node an interface on the bridge.
    fn connect(&self) -> Result<(), Error> {
        let process = self.machine.process_id().unwrap_or_default().to_string();
        let port = format!("to-{}", self.name);
        let far = ["type", "veth", "peer", "name", UNDERLAY_INTERFACE, "netns", &process];
        ip(&[&["link", "add", &port, "master", BRIDGE, "up"], far.as_slice()].concat())?;
        let address = format!("{}/24", self.address);
        let gateway = API_ADDRESS.to_string();
        let of_ipv6 = self.ipv6.map(|own| (format!("{own}/64"), ipv6_address(API_ADDRESS).to_string()));
        let mut commands = vec![
            vec!["address", "add", &address, "dev", UNDERLAY_INTERFACE],
            vec!["link", "set", UNDERLAY_INTERFACE, "up"],
            vec!["route", "add", "default", "via", &gateway],
        ];
        if let Some((own, gateway)) = &of_ipv6 {
            commands.push(vec!["address", "add", own, "dev", UNDERLAY_INTERFACE, "nodad"]);
            commands.push(vec!["-6", "route", "add", "default", "via", gateway]);
        }
        for arguments in commands {
            let mut command = self.command("ip");
            command.args(arguments);
            programs::run(command)?;
        }
        Ok(())
    }

    fn start_containerd(&mut self, kube: &KubeApi, programs: &NodePrograms) -> Result<(), Error> {
        let file = self.folder.join("containerd.toml");
        write(&file, &configuration::containerd(image::PAUSE))?;
        let words = [shown(&programs.containerd), "--config".to_owned(), shown(&file)];
        let words_of_check = self.enter();
        let is_ready = move || answers(&words_of_check, &["ctr", "version"]);
        self.start_program(kube, "containerd", &words, is_ready)?;
        self.programs.iter().try_for_each(Server::wait_until_ready)
    }

    fn start_kubelet(&mut self, kube: &KubeApi, programs: &NodePrograms) -> Result<(), Error> {
        let file = self.folder.join("kubelet.yaml");
        let authority = kube.authority().certificate();
        let cgroup = format!("{CGROUP}/{}", self.name);
        create_cgroup(&cgroup)?;
        write(&file, &configuration::kubelet(&authority, self.address, &cgroup))?;
        let words = [
            shown(&programs.kubernetes),
            "kubelet".to_owned(),
            format!("--config={}", file.display()),
            format!("--kubeconfig={}", kube.kubeconfig_of(&user(&self.name)).display()),
            format!("--hostname-override={}", self.name),
            self.ipv6.map_or_else(
                || format!("--node-ip={}", self.address),
                |ipv6| format!("--node-ip={},{ipv6}", self.address),
            ),
        ];
        let words_of_check = self.enter();
        // The port for health checks on the node's loopback.
        let is_ready = move || {
            answers(&words_of_check, &["busybox", "wget", "-q", "-O-", "http://127.0.0.1:10248/healthz"])
        };
        self.start_program(kube, "kubelet", &words, is_ready)
    }

    fn start_kube_proxy(
        &mut self,
        kube: &KubeApi,
        programs: &NodePrograms,
        pod_network: &str,
    ) -> Result<(), Error> {
        let file = self.folder.join("kube-proxy.yaml");
        let kubeconfig = kube.kubeconfig_of("system:kube-proxy");
        write(&file, &configuration::kube_proxy(&kubeconfig, &self.name, self.address, pod_network))?;
        let words =
            [shown(&programs.kubernetes), "kube-proxy".to_owned(), format!("--config={}", file.display())];
        let words_of_check = self.enter();
        // The port for health checks.
        let is_ready = move || {
            answers(&words_of_check, &["busybox", "wget", "-q", "-O-", "http://127.0.0.1:10256/healthz"])
        };
        self.start_program(kube, "kube-proxy", &words, is_ready)
    }

    fn start_program(
        &mut self,
        kube: &KubeApi,
        name: &str,
        words: &[String],
        is_ready: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<(), Error> {
        let command = [self.enter(), words.to_vec()].concat();
        self.programs.push(Server::spawn(kube.guard(), &self.server_name(name), command, is_ready)?);
        Ok(())
    }

    fn server_name(&self, program: &str) -> String {
        format!("{}-{program}", self.name)
    }

    /// The words before a command that runs in the node's namespaces. (`ip netns exec` would mount another /sys, which
    /// hides the cgroups.)
    fn enter(&self) -> Vec<String> {
        let process = self.machine.process_id().unwrap_or_default();
        ["nsenter", "--target", &process.to_string(), "--mount", "--net", "--uts", "--"]
            .map(str::to_owned)
            .to_vec()
    }
}

/// Starts the process that keeps the node's namespaces, and waits until they are complete.
fn start_machine(kube: &KubeApi, name: &str, folder: &Path) -> Result<Server, Error> {
    let script = folder.join("node.sh");
    write(&script, SCRIPT)?;
    let unshare = ["unshare", "--mount", "--net", "--uts", "/bin/sh"].map(str::to_owned).to_vec();
    let command = [unshare, vec![shown(&script), name.to_owned(), shown(folder)]].concat();
    let made = folder.join("made");
    let machine = Server::spawn(kube.guard(), name, command, move || made.exists())?;
    machine.wait_until_ready()?;
    Ok(machine)
}

/// Creates a cgroup in each hierarchy.
fn create_cgroup(cgroup: &str) -> Result<(), Error> {
    for root in super::cgroup_roots() {
        let folder = root.join(cgroup.trim_start_matches('/'));
        fs::create_dir_all(&folder).map_err(io(format!("creating the cgroup {}", folder.display())))?;
    }
    Ok(())
}

fn answers(enter: &[String], command: &[&str]) -> bool {
    let mut words = enter.iter().map(String::as_str).chain(command.iter().copied());
    let mut check = Command::new(words.next().unwrap_or_default());
    programs::run({
        check.args(words).stdin(Stdio::null());
        check
    })
    .is_ok()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

//! A node of the lab: a network namespace, an agent, and on Windows nodes an emulated HNS.

use std::fs::{self, File};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tortie_api::kubernetes::Node as NodeResource;
use tortie_hcn::{Address, RemoteHcn};
use tortie_kernel::namespace::NetNs;
use tortie_servers::wine::WindowsPrograms;
use tortie_store::rpc::TlsIdentity;

use crate::dir::write_private;
use crate::process::Process;
use crate::sandbox::RuntimeNode;
use crate::services::addresses::SERVICES;
use crate::wine::{self, Machine, Programs};
use crate::{LabDir, LabError, underlay};

/// How long a call of HNS may take.
const HCN_DEADLINE: Duration = Duration::from_secs(10);

/// The operating system of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Os {
    Linux,
    Windows,
}

impl Os {
    /// Its name in Kubernetes' labels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linux => "linux",
            Self::Windows => "windows",
        }
    }
}

/// How an agent reaches the datastore.
pub(crate) enum StoreAccess {
    /// At this address, with mutual TLS.
    Tls { address: String, identity: TlsIdentity },
    /// A Kubernetes API, as this file says.
    Kubeconfig(PathBuf),
}

/// A node.
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) os: Os,
    pub(crate) programs: Programs,
    pub(crate) address: Ipv4Addr,
    pub(crate) address_v6: Option<Ipv6Addr>,
    pub(crate) netns: Arc<NetNs>,
    hns: Option<Process>,
    agent: Option<Process>,
}

impl Node {
    /// Creates the namespace of a node and connects it to the underlay, where it has these permanent neighbours.
    pub(crate) fn new(
        dir: &LabDir,
        name: String,
        os: Os,
        index: usize,
        neighbours: &[Ipv4Addr],
    ) -> Result<Self, LabError> {
        let netns = NetNs::create()?;
        netns.bind_to(&dir.node_netns(&name))?;
        underlay::connect(&netns, index, neighbours)?;
        let folder = dir.node(&name);
        fs::create_dir(&folder).map_err(LabError::file("making the folder", &folder))?;
        Ok(Self {
            name,
            os,
            programs: Programs::Native,
            address: underlay::address(index),
            address_v6: None,
            netns: Arc::new(netns),
            hns: None,
            agent: None,
        })
    }

    /// Gives the node an IPv6 address, before its agent starts.
    pub(crate) fn add_ipv6(&mut self, index: usize) -> Result<(), LabError> {
        underlay::add_ipv6(&self.netns, index)?;
        self.address_v6 = Some(underlay::address_v6(index));
        Ok(())
    }

    /// Makes the node a Windows machine with these programs, before anything starts there.
    pub(crate) fn use_wine(&mut self, dir: &LabDir, programs: &WindowsPrograms) -> Result<(), LabError> {
        let machine = Machine::new(programs, &dir.machine(&self.name))?;
        self.programs = Programs::Wine(Arc::new(machine));
        Ok(())
    }

    /// Whether the agent serves the CNI plugin.
    pub(crate) fn takes_pods(&self, dir: &LabDir) -> bool {
        match &self.programs {
            Programs::Native => self.cni_socket(dir).exists(),
            Programs::Wine(machine) => machine.takes_pods(),
        }
    }

    /// The node's object in the cluster.
    pub(crate) fn object(&self) -> Value {
        let os = self.os.name();
        let mut annotations = json!({});
        // The record says that agents have announced it, so they follow what a kubelet reports later.
        let network = format!("{}/{}", self.address, underlay::NETWORK.prefix_len());
        for name in [NodeResource::ADDRESS, NodeResource::ANNOUNCED] {
            annotations[name] = json!(network);
        }
        if let Some(address) = self.address_v6 {
            for name in [NodeResource::ADDRESS_V6, NodeResource::ANNOUNCED_V6] {
                annotations[name] = json!(format!("{address}/{}", underlay::PREFIX_V6));
            }
        }
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": self.name,
                "labels": {NodeResource::OS: os, "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": self.name},
                "annotations": annotations,
            },
            "spec": {},
        })
    }

    /// Starts the emulated HNS of a Windows node.
    pub(crate) fn start_hns(&mut self, dir: &LabDir) -> Result<(), LabError> {
        let mut command = Command::new(dir.binary("tortie-hns"));
        command.arg(self.hcn_socket(dir)).arg(self.address.to_string());
        if let Programs::Wine(_) = self.programs {
            command.arg(wine::HNS.to_string());
        }
        self.hns = Some(self.start(dir, "hns", command)?);
        Ok(())
    }

    /// Starts the agent. It reaches the datastore with the rights of its node.
    pub(crate) fn start_agent(
        &mut self,
        dir: &LabDir,
        access: &StoreAccess,
        options: &[&str],
    ) -> Result<(), LabError> {
        let shown = |path: PathBuf| self.programs.path(&path);
        let folder = dir.node(&self.name);
        let mut arguments = vec!["agent".to_owned(), "--node".to_owned(), self.name.clone()];
        let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        match (&self.programs, self.os) {
            (Programs::Native, os) => {
                option("--cni-socket", shown(self.cni_socket(dir)));
                option("--control-socket", shown(dir.control_socket(&self.name)));
                option("--deletion-queue", shown(self.deletion_queue(dir)));
                option("--saved-state", shown(folder.join("saved-state.json")));
                if os == Os::Windows {
                    option("--hcn-socket", shown(self.hcn_socket(dir)));
                }
            }
            // Named pipes and %ProgramData% belong to the machine.
            (Programs::Wine(_), _) => option("--cni-conf-dir", wine::CNI_FOLDER.to_owned()),
        }
        match access {
            StoreAccess::Kubeconfig(path) => option("--store", format!("kubernetes:{}", shown(path.clone()))),
            StoreAccess::Tls { address, identity } => {
                option("--store", address.clone());
                for (name, text) in [
                    ("authority", &identity.authority),
                    ("certificate", &identity.certificate),
                    ("key", &identity.key),
                ] {
                    let file = folder.join(format!("{name}.pem"));
                    write_private(&file, text)?;
                    option(&format!("--tls-{name}"), shown(file));
                }
            }
        }
        if self.os == Os::Windows {
            option("--service-cidr", SERVICES.to_string());
        }
        let mut command = self.programs.command(dir, "tortie");
        command.args(arguments).args(options);
        self.agent = Some(self.start(dir, "agent", command)?);
        Ok(())
    }

    fn start(&self, dir: &LabDir, role: &str, mut command: Command) -> Result<Process, LabError> {
        let name = format!("{}-{role}", self.name);
        let path = dir.log(&name);
        let log = File::create(&path).map_err(LabError::file("making the log", &path))?;
        let errors = log.try_clone().map_err(LabError::file("opening the log", &path))?;
        // A separate process group: Ctrl-C at the terminal is for the lab, which stops its nodes in order.
        command.stdin(Stdio::null()).stdout(log).stderr(errors).process_group(0);
        self.netns.enter_on_spawn(&mut command)?;
        Process::start(name, command)
    }

    /// The name of a process of the node that has ended; none should end while the node starts.
    pub(crate) fn ended_process(&mut self) -> Option<String> {
        let mut processes = self.hns.iter_mut().chain(&mut self.agent);
        processes.find_map(|process| process.has_ended().then(|| process.name.clone()))
    }

    /// Restarts the agent whenever it ends, until its task (the last one) is aborted. An HNS that ends takes the
    /// network of its pods with it, because its state is not stored, so its end is only reported.
    pub(crate) fn watch(&mut self) -> Vec<JoinHandle<()>> {
        let agent = self.agent.take().map(|agent| tokio::spawn(agent.keep()));
        let hns = self.hns.take().map(|mut hns| {
            tokio::spawn(async move {
                let ended = hns.end().await;
                tracing::error!(
                    process = hns.name,
                    ?ended,
                    "the emulated HNS has ended; its pods have no network"
                );
            })
        });
        hns.into_iter().chain(agent).collect()
    }

    /// Stops the processes that are not watched, the agent first.
    pub(crate) async fn stop(&mut self) {
        for process in [self.agent.take(), self.hns.take()].into_iter().flatten() {
            process.stop().await;
        }
    }

    /// A client of the node's HNS.
    pub(crate) fn hcn(&self, dir: &LabDir) -> RemoteHcn {
        RemoteHcn::new(Address::Unix(self.hcn_socket(dir)), HCN_DEADLINE)
    }

    /// What the runtime needs to know of the node.
    pub(crate) fn for_runtime(&self, dir: &LabDir) -> RuntimeNode {
        RuntimeNode {
            name: self.name.clone(),
            address: self.address,
            netns: self.netns.clone(),
            programs: self.programs.clone(),
            hcn: (self.os == Os::Windows).then(|| Arc::new(self.hcn(dir))),
            cni_socket: self.cni_socket(dir),
            deletion_queue: self.deletion_queue(dir),
        }
    }

    pub(crate) fn hcn_socket(&self, dir: &LabDir) -> PathBuf {
        dir.node_sockets(&self.name).join("hns.sock")
    }

    pub(crate) fn cni_socket(&self, dir: &LabDir) -> PathBuf {
        dir.node_sockets(&self.name).join("cni.sock")
    }

    pub(crate) fn deletion_queue(&self, dir: &LabDir) -> PathBuf {
        dir.node(&self.name).join("deletions")
    }
}

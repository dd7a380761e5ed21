//! A lab whose pods and neighbours attack: its processes, namespaces and objects.

use std::fs;
use std::net::IpAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Nft, Op, Transaction};
use tortie_lab::LabDir;
use tortie_store::rpc::Remote;

use crate::process::{self, Process, wait_until};

/// The namespace of the pods.
pub(crate) const NAMESPACE: &str = "attack";
/// The two nodes. The attacker is on the first one.
pub(crate) const NODES: [&str; 2] = ["primary", "linux-2"];
/// How long the lab may take to start, and its pods.
const START: Duration = Duration::from_secs(120);
/// How long it may take to end, and an agent to come back.
const END: Duration = Duration::from_secs(60);

/// A running lab.
#[derive(Debug)]
pub(crate) struct Lab {
    child: Process,
    program: PathBuf,
    folder: TempDir,
    /// The first process inside, as seen from here.
    inside: u32,
}

impl Lab {
    /// Starts a lab with two Linux nodes and these options, and waits until it is up.
    pub(crate) fn up(built: &Path, options: &[&str]) -> Result<Self> {
        Self::up_with(built, options, &[])
    }

    /// The same with variables in the environment of all of its processes.
    pub(crate) fn up_with(built: &Path, options: &[&str], environment: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("attack-").tempdir()?;
        // Agents start again from this file, and somebody may build another one meanwhile.
        let program = folder.path().join("tortie");
        if fs::hard_link(built, &program).is_err() {
            fs::copy(built, &program)?;
        }
        let log = folder.path().join("lab.log");
        let mut command = Command::new(&program);
        command.args(["lab", "up", "--linux", "2", "--windows", "0"]).args(options);
        command.env("TORTIE_LAB", folder.path().join("lab")).env_remove("TORTIE_STORE").current_dir("/");
        command.envs(environment.iter().copied());
        // In a process group of its own: when a shell ends, the kernel hangs up on groups with processes that stand still.
        let mut child = Process::start(command.process_group(0), &log)?;
        let is_up = wait_until(START, || {
            ensure!(!child.has_ended(), "the lab ends: {}", process::beginning(&log));
            Ok(process::beginning(&log).contains("the cluster is up"))
        });
        ensure!(is_up?, "the lab does not start: {}", process::beginning(&log));
        let inside = fs::read_to_string(folder.path().join("lab/pid"))?.trim().parse()?;
        Ok(Self { child, program, folder, inside })
    }

    /// Starts a lab with pods: the attacker and its neighbour on the first node, and one on the other.
    pub(crate) fn with_pods(built: &Path, options: &[&str]) -> Result<Self> {
        let lab = Self::up(built, options)?;
        let namespace = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n");
        let pods = [("attacker", 0), ("neighbour", 0), ("remote", 1)];
        let pods = pods.map(|(name, node)| pod(NAMESPACE, name, NODES[node]));
        lab.apply(&[&[namespace][..], &pods].concat().join("---\n"))?;
        lab.wait_for_pods()?;
        Ok(lab)
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("lab")
    }

    /// A client of the datastore, with the rights of an operator.
    pub(crate) fn store(&self) -> Remote {
        tortie_lab::client(&LabDir::new(Some(self.path())))
    }

    /// A command of tortie on the lab.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("TORTIE_LAB", self.path()).env_remove("TORTIE_STORE").current_dir("/");
        command
    }

    /// Runs a command of tortie that must succeed, and returns what it printed.
    pub(crate) fn tortie(&self, arguments: &[&str]) -> Result<String> {
        process::output(&mut self.command(arguments))
    }

    /// The JSON that a command of tortie prints.
    pub(crate) fn json(&self, arguments: &[&str]) -> Result<Value> {
        let output = self.command(arguments).output()?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("tortie {}", arguments.join(" ")))
    }

    /// Stores objects, and waits until they are in force.
    pub(crate) fn apply(&self, manifest: &str) -> Result<()> {
        self.apply_within(manifest, END)
    }

    /// The same within this time.
    pub(crate) fn apply_within(&self, manifest: &str, time: Duration) -> Result<()> {
        let file = self.folder.path().join("manifest.yml");
        fs::write(&file, manifest)?;
        let (file, time) = (file.display().to_string(), time.as_secs().to_string());
        self.tortie(&["apply", "--wait", "--timeout", &time, "-f", &file]).map(drop)
    }

    /// Stores objects as users of a Kubernetes API do.
    pub(crate) fn kubectl_apply(&self, manifest: &str) -> Result<()> {
        let file = self.folder.path().join("kubectl.yml");
        fs::write(&file, manifest)?;
        self.tortie(&["lab", "kubectl", "apply", "-f", &file.display().to_string()]).map(drop)
    }

    pub(crate) fn wait_for_pods(&self) -> Result<()> {
        let all_run = wait_until(START, || {
            let pods = self.json(&["get", "pods", "-A", "-o", "json"])?;
            let items = pods["items"].as_array().context("no list of pods")?;
            Ok(items.iter().all(|pod| pod["status"]["phase"] == "Running"))
        });
        ensure!(all_run?, "pods do not run");
        Ok(())
    }

    /// The addresses of a pod of the attacker's namespace.
    pub(crate) fn addresses(&self, name: &str) -> Result<Vec<IpAddr>> {
        self.addresses_in(NAMESPACE, name)
    }

    /// Those of a pod of a namespace.
    pub(crate) fn addresses_in(&self, namespace: &str, name: &str) -> Result<Vec<IpAddr>> {
        let pod = self.json(&["get", "pod", name, "-n", namespace, "-o", "json"])?;
        let ips = pod["status"]["podIPs"].as_array().context("the pod has no addresses")?;
        ips.iter().map(|ip| Ok(ip["ip"].as_str().unwrap_or_default().parse()?)).collect()
    }

    /// The conditions that a node reports.
    pub(crate) fn conditions(&self, node: &str) -> Result<Vec<Value>> {
        let report = self.json(&["get", "nodereport", node, "-o", "json"])?;
        Ok(report["status"]["conditions"].as_array().cloned().unwrap_or_default())
    }

    pub(crate) fn netns_of_node(&self, node: &str) -> Result<NetNs> {
        self.bound(&format!("node:{node}"))
    }

    /// That of a pod of the attacker's namespace.
    pub(crate) fn netns_of_pod(&self, name: &str) -> Result<NetNs> {
        self.netns_of_pod_in(NAMESPACE, name)
    }

    /// That of a pod of a namespace.
    pub(crate) fn netns_of_pod_in(&self, namespace: &str, name: &str) -> Result<NetNs> {
        self.bound(&format!("pod:{namespace}.{name}"))
    }

    fn bound(&self, name: &str) -> Result<NetNs> {
        let path = format!("/proc/{}/root{}/netns/{name}", self.inside, self.path().display());
        Ok(NetNs::open(Path::new(&path))?)
    }

    /// That between the nodes, with the bridge `underlay`.
    pub(crate) fn netns_between(&self) -> Result<NetNs> {
        Ok(NetNs::open(Path::new(&format!("/proc/{}/ns/net", self.inside)))?)
    }

    /// The agent of a node.
    pub(crate) fn agent(&self, node: &str) -> Result<u32> {
        let pids = |process: u32| fs::read_link(format!("/proc/{process}/ns/pid")).ok();
        let (inside, part) = (pids(self.inside), format!("\0agent\0--node\0{node}\0"));
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&command).contains(&part) && pids(pid) == inside {
                return Ok(pid);
            }
        }
        anyhow::bail!("{node} has no agent")
    }

    /// Does something while a node has neither an agent nor its table, and waits until both are back.
    pub(crate) fn without_guard<T>(&self, node: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (netns, agent) = (self.netns_of_node(node)?, self.agent(node)?);
        // Otherwise, the lab starts the agent again.
        process::signal(self.inside, Signal::STOP);
        process::signal(agent, Signal::KILL);
        // The kernel lets nobody remove the table until the agent's socket is closed.
        let removed = wait_until(END, || Ok(netns.run(remove_table)?.is_ok()));
        let result = removed.and_then(|removed| {
            ensure!(removed, "the table of {node} cannot be removed");
            work()
        });
        process::signal(self.inside, Signal::CONT);
        let is_back = wait_until(END, || Ok(netns.run(has_table)?));
        ensure!(is_back?, "the table of {node} does not come back");
        result
    }

    /// Ends the lab.
    pub(crate) fn down(mut self) -> Result<()> {
        self.child.end(END)
    }
}

impl Drop for Lab {
    /// The lab of an attack that failed ends, too: the kernel ends its processes with the first one.
    fn drop(&mut self) {
        process::signal(self.inside, Signal::CONT);
        let _ = self.child.end(END);
    }
}

fn remove_table() -> Result<()> {
    let delete = Transaction { table: "tortie".to_owned(), ops: vec![Op::DeleteTable] };
    Ok(Nft::open()?.commit(&delete)?)
}

fn has_table() -> bool {
    Nft::open().and_then(|mut nft| nft.list("tortie")).is_ok_and(|table| table.is_some())
}

/// A pod on a node.
pub(crate) fn pod(namespace: &str, name: &str, node: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, labels: {{app: {name}}}}}\n\
         spec:\n  nodeSelector: {{kubernetes.io/hostname: {node}}}\n  containers: [{{name: c, image: none, ports: [{{containerPort: 80}}]}}]\n"
    )
}

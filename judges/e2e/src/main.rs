//! `cargo xtask e2e`: a Kubernetes cluster with nodes that run pods, and Kubernetes' own suite on it.
//!
//! The cluster lives in network, mount and PID namespaces of its own. Its first process ends with the one in the
//! background that `up` starts, and everything else ends with the first process: other processes, mounts and networks.
//! Its folder and its cgroups remain; `down` and the next `up` remove them.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod all;
mod coexist;
mod connections;
mod connectivity;
mod disruptions;
mod judge;
mod kube;
mod lifecycle;
mod migration;
mod not_applicable;
mod suites;
mod survey;
mod windows;

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tortie_servers::cluster::image::{AGNHOST, BUSYBOX, PAUSE, write_test_images};
use tortie_servers::cluster::{self, Cluster, ClusterOptions};
use tortie_servers::programs::{COREDNS, E2E, FLANNEL, Program};

use setup::{go, image, packages, workspace};

/// How long a wait lasts at most.
const DEADLINE: Duration = Duration::from_secs(300);
/// The commit from which `upgrade` starts: five hours of changes before that test was written.
const EARLIER: &str = "e71e842";
/// The names of the nodes.
const NODES: [&str; 2] = ["alpha", "beta"];
/// The addresses of pods.
const PODS: &str = "10.244.0.0/16";
const PODS_V6: &str = "fd00:244::/48";
/// Makes nodes, Services and pods of both families.
const DUAL_STACK: &str = "--dual-stack";
/// Makes a cluster where Tortie serves Services.
const WITHOUT_KUBE_PROXY: &str = "--without-kube-proxy";
/// The first process of the cluster: it starts the next one, and reaps processes whose parent has ended.
const INIT: &str = r#""$@" & main=$!; while kill -0 $main 2>/dev/null; do wait; done"#;
/// The arguments of the process in the background; archives of images follow.
const SERVE: [&str; 2] = ["e2e", "serve"];
/// The folder of requests to the process in the background.
const REQUESTS: &str = "requests";
/// What is installed on the cluster.
const MANIFEST: &str = "deploy/tortie.yaml";

/// What a user can say, without arguments.
const COMMANDS: [&str; 18] = [
    "build",
    "up",
    "down",
    "run",
    "policy",
    "all",
    "connectivity",
    "disrupt",
    "migrate",
    "windows",
    "coexist",
    "flannel",
    "lifecycle",
    "upgrade",
    "kubectl",
    "tortie",
    "exec",
    "restart",
];
/// What processes of a cluster are started with.
const INTERNAL: [&str; 2] = ["serve", "windows-node"];

fn main() -> std::process::ExitCode {
    setup::command::main(|words| match words {
        ["kube", rest @ ..] => kube::run(rest),
        ["e2e", rest @ ..] => run(rest),
        _ => bail!("say `kube` or `e2e`"),
    })
}

fn run(arguments: &[&str]) -> Result<()> {
    let is_known = |word: &&str| COMMANDS.contains(word) || INTERNAL.contains(word);
    if !arguments.first().is_some_and(is_known) {
        bail!("say `cargo xtask e2e` and one of: {}", COMMANDS.join(", "));
    }
    match arguments {
        ["build"] => build(),
        ["up"] => up(true, ClusterKind::Usual),
        ["up", "--dual-stack"] => up(true, ClusterKind::DualStack),
        ["up", WITHOUT_KUBE_PROXY] => up(true, ClusterKind::WithoutKubeProxy),
        ["up", "--without-tortie"] => up(false, ClusterKind::Usual),
        ["down"] => down(),
        ["flannel"] => flannel(),
        ["run", rest @ ..] => on_cluster(|folder| suites::network(folder, rest)),
        ["policy", rest @ ..] => on_cluster(|folder| {
            suites::cluster_policy(folder, rest)?.demand_success().map(|counts| println!("{counts}"))
        }),
        ["all"] => all::run(),
        ["lifecycle"] => lifecycle::run(),
        ["upgrade"] => lifecycle::upgrade(EARLIER),
        ["upgrade", commit] => lifecycle::upgrade(commit),
        ["connectivity"] => on_cluster(|_| connectivity::run()),
        ["disrupt"] => on_cluster(|_| disruptions::run()),
        ["migrate"] => on_cluster(|_| migration::run()),
        ["windows"] => on_cluster(windows::run),
        ["coexist"] => on_cluster(coexist::run),
        // The process of the Windows node that `windows` starts.
        ["windows-node", program] => windows::serve(program),
        ["restart", node, program] => restart(node, program),
        ["kubectl", rest @ ..] => become_process(kubectl_command(rest)?),
        ["tortie", rest @ ..] => become_process(tortie_command(rest)?),
        ["exec", node, command @ ..] => become_process(node_command(node, command)?),
        // The process in the background that `up` starts.
        ["serve", DUAL_STACK, archives @ ..] => serve(archives, ClusterKind::DualStack),
        ["serve", WITHOUT_KUBE_PROXY, archives @ ..] => serve(archives, ClusterKind::WithoutKubeProxy),
        ["serve", archives @ ..] => serve(archives, ClusterKind::Usual),
        _ => bail!("`cargo xtask e2e {}` has other arguments; cargo xtask shows them", arguments[0]),
    }
}

/// Runs the tests of a node with Tortie beside one with flanneld.
fn flannel() -> Result<()> {
    packages::install(&packages::SERVER_PACKAGES)?;
    go::build_kube()?;
    go::build(&FLANNEL)?;
    setup::cargo(&["test", "--package", "tortie-program", "--test", "cni", "flannel", "--", "--ignored"])
}

fn build() -> Result<()> {
    packages::install(&packages::SERVER_PACKAGES)?;
    packages::install(&packages::NODE_PACKAGES)?;
    go::build_kube()?;
    go::build(&E2E)?;
    go::build(&COREDNS)?;
    check_image_names()?;
    not_applicable::check()?;
    test_sctp()
}

/// Tests the stand-in for SCTP in a network namespace, because the tests use its loopback.
fn test_sctp() -> Result<()> {
    let tests = Program::SctpTests.find()?;
    let script = r#"ip link set lo up && exec "$@""#;
    finish(Command::new("unshare").args(["--net", "--", "sh", "-c", script, "sh"]).arg(tests))
}

/// Kubernetes of another version wants other images; pods would wait for them for ever.
fn check_image_names() -> Result<()> {
    let output = Command::new(Program::Suite.find()?).arg("-images").output()?;
    let wanted = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let written = [AGNHOST, BUSYBOX, PAUSE].join("\n");
    if wanted != written {
        bail!("the suite wants the images\n{wanted}\nand crates/servers/src/cluster/image.rs has\n{written}");
    }
    Ok(())
}

/// What differs between clusters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ClusterKind {
    /// Nodes, Services and pods have IPv4 addresses, and kube-proxy serves Services.
    Usual,
    /// They have addresses of both families.
    DualStack,
    /// Tortie's agents serve Services.
    WithoutKubeProxy,
}

impl ClusterKind {
    /// The option that the process in the background gets.
    fn option(self) -> Option<&'static str> {
        match self {
            Self::Usual => None,
            Self::DualStack => Some(DUAL_STACK),
            Self::WithoutKubeProxy => Some(WITHOUT_KUBE_PROXY),
        }
    }
}

/// The files of the cluster.
struct Folder(PathBuf);

/// What commands need to know about the running cluster.
#[derive(Serialize, Deserialize)]
struct Running {
    kubeconfig: PathBuf,
    /// The names of the nodes, and the processes that keep their namespaces, as the cluster numbers processes.
    nodes: Vec<(String, i32)>,
    /// The kubeconfigs of the kubelet and of the agent of the Windows node, which need not run.
    of_windows_kubelet: PathBuf,
    of_windows_agent: PathBuf,
}

impl Folder {
    fn new() -> Self {
        Self(E2E.target().join("up"))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The process in the background, if it runs.
    fn process(&self) -> Option<Pid> {
        let number: i32 = fs::read_to_string(self.file("pid")).ok()?.trim().parse().ok()?;
        // The number may belong to another program by now.
        let command = fs::read(format!("/proc/{number}/cmdline")).ok()?;
        let words = format!("\0{}\0", SERVE.join("\0"));
        String::from_utf8_lossy(&command).contains(&words).then_some(number).and_then(Pid::from_raw)
    }

    fn running(&self) -> Result<Running> {
        self.process().context("no cluster is running; start it with `cargo xtask e2e up`")?;
        self.running_inside()
    }

    /// The same in the cluster's namespaces, where processes have other numbers.
    fn running_inside(&self) -> Result<Running> {
        let text = fs::read_to_string(self.file("running.json")).context("the cluster is not ready yet")?;
        Ok(serde_json::from_str(&text)?)
    }

    /// A command in the cluster's namespaces.
    fn command(&self) -> Result<Command> {
        let process = self.process().context("no cluster is running; start it with `cargo xtask e2e up`")?;
        let process = process.as_raw_nonzero();
        let mut command = Command::new("nsenter");
        command.arg(format!("--pid=/proc/{process}/ns/pid_for_children"));
        command.args(["mount=mnt", "net=net"].map(|pair| {
            let (option, file) = pair.split_once('=').unwrap_or((pair, pair));
            format!("--{option}=/proc/{process}/ns/{file}")
        }));
        command.arg("--").env("HOME", &self.0);
        Ok(command)
    }
}

/// Starts the cluster and installs Tortie.
fn up(with_tortie: bool, kind: ClusterKind) -> Result<()> {
    packages::require_root("clusters with real nodes")?;
    let folder = Folder::new();
    if folder.process().is_some() {
        println!("the cluster is running already");
        return print(&folder);
    }
    let archive = E2E.target().join("tortie.tar");
    let archives = if with_tortie { vec![archive] } else { Vec::new() };
    archives.iter().try_for_each(|archive| image::build_for_this_machine(archive, image::NAME))?;
    let folder = start(&archives, kind)?;
    if let Err(error) = if with_tortie { install(kind) } else { Ok(()) } {
        eprintln!("removing the cluster; its logs would be in {}", folder.0.display());
        down()?;
        return Err(error);
    }
    print(&folder)
}

/// Starts the cluster in the background with archives of images, and waits until its programs answer.
fn start(archives: &[PathBuf], kind: ClusterKind) -> Result<Folder> {
    packages::require_root("clusters with real nodes")?;
    let folder = Folder::new();
    build()?;
    remove(&folder)?;
    let temporary = folder.file("tmp");
    fs::create_dir_all(&temporary).with_context(|| temporary.display().to_string())?;
    let log = File::create(folder.file("log"))?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]);
    command.args(["--propagation", "private", "/bin/sh", "-c", INIT, "init"]);
    command.arg(std::env::current_exe()?).args(SERVE);
    command.args(kind.option()).args(archives);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).env("TMPDIR", temporary);
    // Its own process group: it stays when the terminal's process ends.
    let mut child = command.process_group(0).spawn().context("starting the process in the background")?;
    fs::write(folder.file("pid"), child.id().to_string())?;
    let is_ready = wait_until("the cluster's programs answer", || {
        if let Some(status) = child.try_wait()? {
            bail!("the cluster did not start: {status}\n{}", fs::read_to_string(folder.file("log"))?);
        }
        Ok(folder.file("running.json").exists())
    });
    if let Err(error) = is_ready {
        down()?;
        return Err(error);
    }
    Ok(folder)
}

/// Installs Tortie, waits until the nodes are Ready, and then installs the DNS, whose pods need Tortie.
fn install(kind: ClusterKind) -> Result<()> {
    match kind {
        ClusterKind::Usual => {
            let manifest = workspace()?.join(MANIFEST);
            kubectl(&["apply", "--filename", &manifest.display().to_string()])?;
        }
        ClusterKind::DualStack => {
            finish(&mut tortie_command(&["install", "--pool", PODS, "--pool-v6", PODS_V6])?)?
        }
        ClusterKind::WithoutKubeProxy => {
            let api_server = format!("{}:{}", cluster::API_ADDRESS, cluster::API_PORT);
            finish(&mut tortie_command(&[
                "install",
                "--pool",
                PODS,
                "--services",
                "--api-server",
                &api_server,
            ])?)?;
        }
    }
    kubectl(&["rollout", "status", "--namespace=tortie-system", "daemonset/tortie-node", "--timeout=120s"])?;
    kubectl(&["wait", "node", "--all", "--for=condition=Ready", "--timeout=120s"])?;
    lifecycle::install_dns()
}

fn print(folder: &Folder) -> Result<()> {
    let running = folder.running()?;
    println!("logs: {}", running.kubeconfig.parent().unwrap_or(&running.kubeconfig).display());
    println!("try:  cargo xtask e2e kubectl get nodes");
    for (node, _) in &running.nodes {
        println!("      cargo xtask e2e exec {node} ip address");
    }
    println!("      cargo xtask e2e tortie status");
    println!("stop: cargo xtask e2e down");
    Ok(())
}

/// Runs the cluster until this process is ended.
fn serve(archives: &[&str], kind: ClusterKind) -> Result<()> {
    let folder = Folder::new();
    let mut images = write_test_images(&std::env::temp_dir())?;
    images.extend(archives.iter().map(PathBuf::from));
    let options = ClusterOptions {
        nodes: NODES.map(str::to_owned).to_vec(),
        other_nodes: vec![windows::NODE.to_owned()],
        users: vec![(windows::AGENT.to_owned(), vec![windows::AGENTS.to_owned()])],
        pod_network: match kind {
            ClusterKind::Usual | ClusterKind::WithoutKubeProxy => PODS.to_owned(),
            ClusterKind::DualStack => format!("{PODS},{PODS_V6}"),
        },
        dual_stack: kind == ClusterKind::DualStack,
        without_kube_proxy: kind == ClusterKind::WithoutKubeProxy,
        images,
    };
    let cluster = Cluster::start(&options)?;
    let nodes = cluster
        .nodes()
        .iter()
        .map(|node| (node.name().to_owned(), node.machine().process_id().unwrap_or_default()));
    let kube = cluster.kube();
    let running = Running {
        kubeconfig: kube.kubeconfig(),
        nodes: nodes.collect(),
        of_windows_kubelet: kube.kubeconfig_of(&cluster::user(windows::NODE)),
        of_windows_agent: kube.kubeconfig_of(windows::AGENT),
    };
    fs::write(folder.file("running.part"), serde_json::to_string(&running)?)?;
    fs::create_dir(folder.file(REQUESTS))?;
    fs::rename(folder.file("running.part"), folder.file("running.json"))?;
    loop {
        std::thread::sleep(Duration::from_millis(50));
        for request in fs::read_dir(folder.file(REQUESTS))?.flatten() {
            let name = request.file_name().to_string_lossy().into_owned();
            // The file disappears when its request is done, and contains an error otherwise.
            if request.metadata()?.len() == 0 {
                match carry_out(&cluster, &name) {
                    Ok(()) => fs::remove_file(request.path())?,
                    Err(error) => fs::write(request.path(), format!("{error:#}"))?,
                }
            }
        }
    }
}

/// Kills a program of a node, and starts it again.
fn carry_out(cluster: &Cluster, request: &str) -> Result<()> {
    let (node, program) = request.split_once('.').context("a request is NODE.PROGRAM")?;
    let node = cluster.nodes().iter().find(|other| other.name() == node);
    let node = node.with_context(|| format!("the nodes are {NODES:?}"))?;
    let server = node.program(program).context("the programs are containerd, kubelet and kube-proxy")?;
    server.kill()?;
    Ok(server.start_again().and_then(|()| server.wait_until_ready())?)
}

/// Asks the process in the background to kill a program of a node and to start it again.
fn restart(node: &str, program: &str) -> Result<()> {
    let folder = Folder::new();
    folder.running()?;
    let request = folder.file(REQUESTS).join(format!("{node}.{program}"));
    File::create(&request).with_context(|| request.display().to_string())?;
    wait_until(&format!("{program} of {node} is restarted"), || match fs::read_to_string(&request) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error.into()),
        Ok(text) if text.is_empty() => Ok(false),
        Ok(problem) => {
            fs::remove_file(&request)?;
            bail!("{program} of {node}: {problem}")
        }
    })
}

/// Ends the cluster, and removes what it leaves.
fn down() -> Result<()> {
    let folder = Folder::new();
    if let Some(process) = folder.process() {
        kill_process(process, Signal::KILL).context("ending the process in the background")?;
    } else {
        println!("no cluster is running");
    }
    remove(&folder)
}

/// Removes the files and cgroups of a cluster whose first process has ended or is ending.
fn remove(folder: &Folder) -> Result<()> {
    let mut failure = None;
    let removed = wait_until("the cluster's files and cgroups are removed", || {
        let result = cluster::remove_cgroups().map_err(anyhow::Error::from).and_then(|()| {
            match fs::remove_dir_all(&folder.0) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
                _ => Ok(()),
            }
        });
        failure = result.err();
        Ok(failure.is_none())
    });
    removed.map_err(|error| failure.unwrap_or(error))
}

/// Runs kubectl as the administrator.
fn kubectl(arguments: &[&str]) -> Result<()> {
    finish(&mut kubectl_command(arguments)?)
}

fn kubectl_command(arguments: &[&str]) -> Result<Command> {
    let folder = Folder::new();
    let running = folder.running()?;
    let mut command = folder.command()?;
    command.arg(Program::Kube.find()?).args(["kubectl", "--kubeconfig"]).arg(running.kubeconfig);
    command.args(arguments);
    Ok(command)
}

/// Builds this workspace's command line.
fn tortie_program() -> Result<PathBuf> {
    setup::program("tortie")
}

/// This workspace's command line as the administrator.
fn tortie_command(arguments: &[&str]) -> Result<Command> {
    let mut command = in_cluster(&Folder::new(), &tortie_program()?)?;
    command.args(arguments);
    Ok(command)
}

/// A command line of Tortie as the administrator.
fn in_cluster(folder: &Folder, program: &Path) -> Result<Command> {
    let running = folder.running()?;
    let mut command = folder.command()?;
    command.arg(program).env("KUBECONFIG", running.kubeconfig).env("TORTIE_STORE", "kubernetes");
    Ok(command)
}

/// A command in the namespaces of a node.
fn node_command(node: &str, arguments: &[&str]) -> Result<Command> {
    let folder = Folder::new();
    let running = folder.running()?;
    let found = running.nodes.iter().find(|(name, _)| name == node);
    let (_, process) = found.with_context(|| format!("node {node} does not exist; nodes: {NODES:?}"))?;
    let mut command = folder.command()?;
    command.args(["nsenter", "--target", &process.to_string(), "--mount", "--net", "--uts", "--"]);
    command.args(arguments);
    Ok(command)
}

/// Replaces this process by the command, whose exit code counts.
fn become_process(mut command: Command) -> Result<()> {
    Err(command.exec()).with_context(|| format!("{command:?}"))
}

/// Runs something on the cluster. Starts the cluster if none runs, and then removes it afterwards.
fn on_cluster(work: impl FnOnce(&Folder) -> Result<()>) -> Result<()> {
    let folder = Folder::new();
    let is_running = folder.process().is_some();
    if !is_running {
        up(true, ClusterKind::Usual)?;
    }
    let result = work(&folder);
    if !is_running {
        down()?;
    }
    result
}

/// Runs a command to its end.
fn finish(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

fn wait_until(what: &str, mut happened: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !happened()? {
        if start.elapsed() > DEADLINE {
            bail!("not within {} seconds: {what}", DEADLINE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

//! The lab: its processes, namespaces and datastore.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tortie_hcn::{Address, RemoteHcn};
use tortie_hns_emulator::Survives;
use tortie_kernel::namespace::{NetNs, die_with_parent};
use tortie_kernel::nftables::{Nft, Op, Transaction};
use tortie_kernel::route::{Change, LinkSetting, RouteSocket};
use tortie_lab::LabDir;
use tortie_store::rpc::Remote;

use crate::fault::{Datastore, Node, Shape};
use crate::rules::NAMESPACE;

/// How long the lab may take to start.
const START: Duration = Duration::from_secs(180);
/// How long it may take to end.
const END: Duration = Duration::from_secs(60);
/// How long a call of HNS may take. It may stand still.
const HNS: Duration = Duration::from_secs(30);
/// How long one tries to remove a table. Afterwards a new agent guards it.
const FLUSH: Duration = Duration::from_millis(500);
/// The ports of the three datastores.
const STORES: &str = "{ 7443, 2379, 6443 }";

/// A running lab.
pub(crate) struct Lab {
    pub(crate) shape: Shape,
    program: PathBuf,
    folder: TempDir,
    child: Mutex<Child>,
    /// The first process inside, as seen from here.
    inside: u32,
}

/// A process by its number, if it is still the one that it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(pub(crate) u32);

impl Process {
    /// Sends a signal. A process that has ended needs none.
    pub(crate) fn signal(self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.0).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }

    /// True if it no longer holds anything: it is gone, or its parent has not yet asked how it ended.
    pub(crate) fn has_ended(self) -> bool {
        self.state().is_none_or(|state| "ZX".contains(state))
    }

    /// True unless it has ended or stands still.
    pub(crate) fn runs(self) -> bool {
        self.state().is_some_and(|state| !"ZXT".contains(state))
    }

    fn state(self) -> Option<char> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0)).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }
}

impl Lab {
    /// Starts a lab, and waits until it is up.
    pub(crate) fn up(built: &Path, shape: Shape) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("chaos-").tempdir()?;
        // Agents start again from this file for as long as the run lasts, and somebody may build another one meanwhile.
        let program = folder.path().join("tortie");
        if fs::hard_link(built, &program).is_err() {
            fs::copy(built, &program)?;
        }
        let mut command = Command::new(&program);
        let (linux, windows) = (shape.linux.to_string(), shape.windows.to_string());
        command.args(["lab", "up", "--ipv6", "--linux", &linux, "--windows", &windows]);
        command.args(["--datastore", shape.datastore.name()]);
        command.env("TORTIE_LAB", folder.path().join("lab")).env_remove("TORTIE_STORE").current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // In a process group of its own: when a shell ends, the kernel hangs up on groups with processes that stand still.
        die_with_parent(command.process_group(0));
        let mut child = command.spawn().context("tortie lab up")?;
        let lines = lines_of(&mut child, &folder.path().join("lab.log"))?;
        let mut lab = Self { shape, program, folder, child: Mutex::new(child), inside: 0 };
        let deadline = Instant::now() + START;
        let mut printed = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = lines.recv_timeout(left);
            let line = line.map_err(|_| anyhow!("the lab does not start:\n{}", printed.join("\n")))?;
            if line.contains("the cluster is up") {
                break;
            }
            printed.push(line);
        }
        lab.inside = fs::read_to_string(lab.path().join("pid"))?.trim().parse()?;
        Ok(lab)
    }

    /// The lab's folder.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("lab")
    }

    /// What the lab itself has printed.
    pub(crate) fn log(&self) -> PathBuf {
        self.folder.path().join("lab.log")
    }

    pub(crate) fn store(&self) -> Remote {
        tortie_lab::client(&LabDir::new(Some(self.path())))
    }

    /// Runs a command of tortie on the lab, and returns what it printed, and true if it succeeded.
    pub(crate) fn tortie(&self, arguments: &[&str]) -> Result<(String, bool)> {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("TORTIE_LAB", self.path()).env_remove("TORTIE_STORE").current_dir("/");
        let output = command.stdin(Stdio::null()).output().context("tortie")?;
        let text = [output.stdout, output.stderr].concat();
        Ok((String::from_utf8_lossy(&text).into_owned(), output.status.success()))
    }

    /// A file as the first process inside sees it.
    pub(crate) fn inside(&self, path: &Path) -> PathBuf {
        let path = path.strip_prefix("/").unwrap_or(path);
        Path::new(&format!("/proc/{}/root", self.inside)).join(path)
    }

    pub(crate) fn node_folder(&self, node: Node) -> PathBuf {
        self.path().join("nodes").join(self.shape.name(node))
    }

    pub(crate) fn netns_of_node(&self, node: Node) -> Result<NetNs> {
        let path = self.path().join("netns").join(format!("node:{}", self.shape.name(node)));
        Ok(NetNs::open(&self.inside(&path))?)
    }

    pub(crate) fn netns_of_pod(&self, name: &str) -> Result<NetNs> {
        let path = self.path().join("netns").join(format!("pod:{NAMESPACE}.{name}"));
        Ok(NetNs::open(&self.inside(&path))?)
    }

    fn netns(&self) -> Result<NetNs> {
        Ok(NetNs::open(Path::new(&format!("/proc/{}/ns/net", self.inside)))?)
    }

    /// The node's agent, unless it has just ended.
    pub(crate) fn agent(&self, node: Node) -> Option<Process> {
        self.process(&format!(" agent --node {} ", self.shape.name(node)))
    }

    /// The emulated HNS of a Windows node.
    pub(crate) fn hns(&self, node: Node) -> Option<Process> {
        let socket = self.node_folder(node).join("hns.sock");
        self.process(&format!("tortie-hns {}", socket.display()))
    }

    /// Restarts the HNS of a Windows node, which loses all ACLs and sets.
    pub(crate) fn restart_hns(&self, node: Node) -> Result<()> {
        let hns = RemoteHcn::new(Address::Unix(self.node_folder(node).join("hns.sock")), HNS);
        Ok(tortie_hns_emulator::restart(&hns, Survives::AllButAclsAndSets)?)
    }

    /// The process that serves the datastore. etcd may just have ended.
    pub(crate) fn datastore(&self) -> Option<Process> {
        match self.shape.datastore {
            Datastore::Embedded => Some(Process(self.inside)),
            Datastore::Etcd => self.process("etcd --name=lab "),
            Datastore::Kubernetes => self.process("/kube kube-apiserver "),
        }
    }

    /// A process in the lab's PID namespace.
    fn process(&self, part: &str) -> Option<Process> {
        let pids = |process: u32| fs::read_link(format!("/proc/{process}/ns/pid")).ok();
        let inside = pids(self.inside);
        let found = processes_with(|command, _| command.contains(part))
            .into_iter()
            .find(|(process, _)| pids(process.0) == inside && !process.has_ended());
        found.map(|(process, _)| process)
    }

    /// The processes that were started with the lab's folder in their environment or arguments.
    pub(crate) fn processes(&self) -> Vec<(Process, String)> {
        let mine = self.path().display().to_string();
        processes_with(|command, environment| command.contains(&mine) || environment().contains(&mine))
    }

    /// Pulls the cable of a node on the underlay, or plugs it in.
    pub(crate) fn set_cable(&self, node: Node, up: bool) -> Result<()> {
        let set = || -> Result<()> {
            let mut socket = RouteSocket::open()?;
            let link = socket.link(&format!("node{node}"))?.context("the node has no cable")?;
            Ok(socket.change(&Change::SetLink(link.index, vec![LinkSetting::Up(up)]))?)
        };
        self.netns()?.run(set)?
    }

    /// Prepares [`cut`](Self::cut).
    pub(crate) fn prepare_cuts(&self) -> Result<()> {
        let table = format!(
            "table ip chaos {{\n set cut {{ type ipv4_addr; }}\n chain input {{\n type filter hook input priority 0;\n \
             ip saddr @cut tcp dport {STORES} drop\n }}\n }}"
        );
        nft(&self.netns()?, &table)
    }

    /// Lets the datastore get no packets of a node, or lets it get them again.
    pub(crate) fn cut(&self, node: Node, cut: bool) -> Result<()> {
        let verb = if cut { "add" } else { "delete" };
        nft(&self.netns()?, &format!("{verb} element ip chaos cut {{ 192.0.2.{} }}", 11 + node))
    }

    /// Kills the agent of a Linux node, and removes the table before a new one guards it.
    pub(crate) fn flush(&self, node: Node, agent: Process) -> Result<()> {
        let work = || -> Result<()> {
            let mut nft = Nft::open()?;
            let delete = Transaction { table: "tortie".to_owned(), ops: vec![Op::DeleteTable] };
            agent.signal(Signal::KILL);
            let deadline = Instant::now() + FLUSH;
            // The kernel lets nobody remove it until the agent's socket is closed.
            loop {
                match nft.commit(&delete) {
                    Ok(()) => return Ok(()),
                    Err(error) if Instant::now() > deadline => return Err(error.into()),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        };
        self.netns_of_node(node)?.run(work)?
    }

    /// Removes the routes to the pods of a Linux node, and its VXLAN link.
    pub(crate) fn remove_routes(&self, node: Node) -> Result<()> {
        let script = "ip link delete vxlan.calico; ip route show | grep ' dev cali' | while read to rest; do ip route delete $to; done";
        let mut command = Command::new("sh");
        self.netns_of_node(node)?.enter_on_spawn(&mut command)?;
        // Some of it may have been removed a moment ago.
        command.args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::null()).status()?;
        Ok(())
    }

    /// Gives the folders of the nodes' agents a small file system each, and restarts the agents there.
    pub(crate) fn shrink_disks(&self) -> Result<()> {
        for node in 0..self.shape.nodes() {
            let folder = self.node_folder(node);
            let script = format!(
                "set -e; d={}; mkdir $d.real $d.small; mount --bind $d $d.real; mount -t tmpfs -o size=256k tmpfs $d.small; \
                 for f in $d/*; do n=${{f##*/}}; if [ $n = hns.sock ]; then ln -s $d.real/$n $d.small/$n; \
                 elif [ ! -S $f ]; then cp -a $f $d.small/$n; fi; done; mount --bind $d.small $d",
                folder.display()
            );
            let mounts = format!("--mount=/proc/{}/ns/mnt", self.inside);
            let status = Command::new("nsenter").args([&mounts, "sh", "-c", &script]).status()?;
            ensure!(status.success(), "the folder of node {node} gets no file system: {status}");
            let agent = self.agent(node).with_context(|| format!("node {node} has no agent"))?;
            agent.signal(Signal::KILL);
        }
        Ok(())
    }

    /// Fills the disk of a node's agent, or frees it.
    pub(crate) fn fill_disk(&self, node: Node, full: bool) -> Result<()> {
        let file = self.inside(&self.node_folder(node).join("filled"));
        if !full {
            return Ok(fs::remove_file(file)?);
        }
        // It fails when there is no room left, which is what it is for.
        let _ = fs::write(file, vec![0; 1 << 20]);
        Ok(())
    }

    /// Ends the lab. All of its processes end with the first one.
    fn end(&self, deadline: Instant) -> Result<()> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        if child.try_wait()?.is_some() {
            return Ok(());
        }
        // A fault may have stopped it.
        if self.inside > 1 {
            Process(self.inside).signal(Signal::CONT);
        }
        Process(child.id()).signal(Signal::TERM);
        while child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                child.kill()?;
                child.wait()?;
                bail!("the lab does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends the lab, and reports what is left of it.
    pub(crate) fn down(&self) -> Result<Vec<String>> {
        let deadline = Instant::now() + END;
        self.end(deadline)?;
        // The kernel ends the lab's processes after the first one has ended, which takes a moment.
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut left: Vec<String> = self.processes().into_iter().map(|(_, command)| command).collect();
        if self.path().exists() {
            left.push(format!("the folder {}", self.path().display()));
        }
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let path = self.path().display().to_string();
        left.extend(mounts.lines().filter(|line| line.contains(&path)).map(str::to_owned));
        Ok(left)
    }
}

impl Drop for Lab {
    /// The lab of a run that failed ends, too.
    fn drop(&mut self) {
        let _ = self.end(Instant::now() + END);
    }
}

/// Passes the lines that a command prints on, and writes them to a file.
fn lines_of(child: &mut Child, file: &Path) -> Result<Receiver<String>> {
    let (sender, lines) = channel();
    let log = fs::File::create(file)?;
    let (out, errors) =
        (child.stdout.take().context("no output")?, child.stderr.take().context("no errors")?);
    pass_on(out, sender.clone(), log.try_clone()?);
    pass_on(errors, sender, log);
    Ok(lines)
}

fn pass_on(from: impl Read + Send + 'static, to: Sender<String>, mut log: fs::File) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = std::io::Write::write_all(&mut log, format!("{line}\n").as_bytes());
            let _ = to.send(line);
        }
    });
}

fn nft(netns: &NetNs, text: &str) -> Result<()> {
    let mut command = Command::new("nft");
    netns.enter_on_spawn(&mut command)?;
    let output = command.arg(text).stdin(Stdio::null()).output().context("nft")?;
    ensure!(output.status.success(), "nft {text}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// The processes of the machine with a command line, or an environment.
fn processes_with(is_such: impl Fn(&str, &dyn Fn() -> String) -> bool) -> Vec<(Process, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = |file: &str| {
            let bytes = fs::read(entry.path().join(file)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\0', " ")
        };
        let command = read("cmdline");
        if is_such(&command, &|| read("environ")) {
            found.push((Process(pid), command));
        }
    }
    found
}

//! Runs the program, and checks its leftovers.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tortie_kernel::namespace::{NetNs, with_default_signals};

const TIMEOUT: Duration = Duration::from_secs(60);
/// How many lines of each log a failed test prints.
const LINES_OF_LOG: usize = 60;
/// `nobody`.
const ORDINARY: u32 = 65_534;

/// The user of the lab.
#[derive(Clone, Copy)]
pub(crate) enum User {
    Root,
    Ordinary,
}

/// A lab of one test: its folder, its user, and a copy of the program that the user may execute.
pub(crate) struct Lab {
    folder: TempDir,
    user: User,
}

/// A process of a lab.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub pid: u32,
    pub command: String,
}

impl Lab {
    pub(crate) fn new(user: User) -> Self {
        assert!(
            rustix::process::getuid().is_root(),
            "run the tests as root: they also switch to an ordinary user"
        );
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let program = folder.path().join("tortie");
        // A copy, because the build's folder may not be accessible to others.
        if fs::hard_link(env!("CARGO_BIN_EXE_tortie"), &program).is_err() {
            fs::copy(env!("CARGO_BIN_EXE_tortie"), &program).unwrap();
            // A process that another test is just starting may have the copy open until it executes another program.
            let busy = |error: std::io::Error| error.kind() == ErrorKind::ExecutableFileBusy;
            while Command::new(&program).output().is_err_and(busy) {
                std::thread::yield_now();
            }
        }
        Self { folder, user }
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.folder.path().join("lab")
    }

    pub(crate) fn tortie(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("tortie"));
        command.args(arguments).env("TORTIE_LAB", self.dir()).env_remove("TORTIE_STORE").current_dir("/");
        command.stdin(Stdio::null());
        if let User::Ordinary = self.user {
            command.uid(ORDINARY).gid(ORDINARY).env("HOME", self.folder.path());
        }
        command
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.tortie(arguments).output().unwrap();
        let (out, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {out}{errors}");
        out.into_owned()
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        Running::of(self.tortie(arguments))
    }

    /// Starts `lab up` and waits until the cluster is up.
    pub(crate) fn up(&self, options: &[&str]) -> Running {
        let mut arguments = vec!["lab", "up"];
        arguments.extend(options);
        let running = self.start(&arguments);
        running.wait_for_line("the cluster is up");
        running
    }

    pub(crate) fn wait_until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !holds() {
            assert!(Instant::now() < deadline, "not in time: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn wait_for_pods(&self) {
        self.wait_until("all pods run", || {
            let pods = self.json(&["get", "pods", "-o", "json"]);
            pods["items"].as_array().unwrap().iter().all(|pod| pod["status"]["phase"] == "Running")
        });
    }

    pub(crate) fn example(&self, name: &str) -> String {
        self.file(
            name,
            &fs::read_to_string(format!("{}/../../examples/seed-002/{name}", env!("CARGO_MANIFEST_DIR")))
                .unwrap(),
        )
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        path.display().to_string()
    }

    /// The network namespaces of a running lab.
    pub(crate) fn namespaces(&self) -> Namespaces {
        let inside = self.processes().into_iter().find(|it| it.command.contains("lab inside up")).unwrap();
        Namespaces { process: format!("/proc/{}", inside.pid), dir: self.dir() }
    }

    /// Every process that was started with this lab's folder in its environment or arguments.
    pub(crate) fn processes(&self) -> Vec<Process> {
        let mine = self.dir().display().to_string();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let read = |file: &str| {
                let bytes = fs::read(entry.path().join(file)).unwrap_or_default();
                String::from_utf8_lossy(&bytes).replace('\0', " ")
            };
            let command = read("cmdline");
            if command.contains(&mine) || read("environ").contains(&mine) {
                found.push(Process { pid, command });
            }
        }
        found
    }
}

impl Drop for Lab {
    /// Prints the logs of a lab whose test fails. They stay while the lab runs, and if it was killed.
    #[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let mut logs: Vec<_> =
            fs::read_dir(self.dir().join("logs")).into_iter().flatten().flatten().collect();
        logs.sort_by_key(fs::DirEntry::path);
        for log in logs {
            let text = fs::read(log.path()).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            println!("the end of {}:", log.path().display());
            println!("{}", lines[lines.len().saturating_sub(LINES_OF_LOG)..].join("\n"));
        }
    }
}

/// The network namespaces of a lab, as its first process sees them.
pub(crate) struct Namespaces {
    process: String,
    dir: PathBuf,
}

impl Namespaces {
    /// That between the nodes, with the bridge `underlay`.
    pub(crate) fn between_nodes(&self) -> NetNs {
        NetNs::open(Path::new(&format!("{}/ns/net", self.process))).unwrap()
    }

    pub(crate) fn of_node(&self, node: &str) -> NetNs {
        self.bound(&format!("node:{node}"))
    }

    /// That of a pod of the demo's namespace.
    pub(crate) fn of_pod(&self, pod: &str) -> NetNs {
        self.bound(&format!("pod:calico-demo.{pod}"))
    }

    fn bound(&self, name: &str) -> NetNs {
        let path = format!("{}/root{}/netns/{name}", self.process, self.dir.display());
        NetNs::open(Path::new(&path)).unwrap()
    }
}

/// A running command.
pub(crate) struct Running {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

fn collect(from: impl Read + Send + 'static, lines: Arc<Mutex<Vec<String>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            lines.lock().unwrap().push(line);
        }
    })
}

impl Running {
    pub(crate) fn of(mut command: Command) -> Self {
        // A separate process group, so that a signal to it reaches only it. Tests that run in the background ignore interrupts, and
        // what they start would, too.
        let mut child = with_default_signals(&mut command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let readers = vec![
            collect(child.stdout.take().unwrap(), lines.clone()),
            collect(child.stderr.take().unwrap(), lines.clone()),
        ];
        Self { child, lines, readers }
    }

    pub(crate) fn wait_for_line(&self, part: &str) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let lines = self.lines.lock().unwrap().clone();
            if lines.iter().any(|line| line.contains(part)) {
                return;
            }
            let ended = self.readers.iter().all(JoinHandle::is_finished);
            assert!(!ended && Instant::now() < deadline, "no line with {part:?} in\n{}", lines.join("\n"));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.lines.lock().unwrap().join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end, and returns every line.
    pub(crate) fn output(mut self) -> Vec<String> {
        self.wait();
        for reader in std::mem::take(&mut self.readers) {
            reader.join().unwrap();
        }
        self.lines.lock().unwrap().clone()
    }
}

impl Drop for Running {
    #[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "a command printed:\n{}",
                self.lines.lock().unwrap_or_else(|lines| lines.into_inner()).join("\n")
            );
        }
        // It is still running only if a test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The leftovers of an ended lab, which must be empty.
pub(crate) fn leftovers(lab: &Lab) -> Vec<String> {
    let mut left: Vec<String> = Vec::new();
    if lab.dir().exists() {
        left.push(format!("the folder {}", lab.dir().display()));
    }
    let deadline = Instant::now() + TIMEOUT;
    // The kernel ends the lab's processes after the first one has ended, which takes a moment.
    while !lab.processes().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    left.extend(lab.processes().into_iter().map(|process| format!("{process:?}")));
    left
}

/// The machine's objects outside of labs: interfaces, mounts, bound network namespaces, nftables.
pub(crate) fn machine() -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let names = |path: &str| -> Vec<String> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| format!("{path}/{}", entry.file_name().to_string_lossy())).collect()
    };
    all.extend(names("/sys/class/net"));
    all.extend(names("/run/netns"));
    all.extend(fs::read_to_string("/proc/self/mounts").unwrap().lines().map(str::to_owned));
    all.extend(fs::read_to_string("/proc/net/route").unwrap().lines().map(str::to_owned));
    all.extend(
        ["net.ipv4.ip_forward"]
            .map(|name| fs::read_to_string(Path::new("/proc/sys").join(name.replace('.', "/"))).unwrap()),
    );
    all.sort();
    all
}

/// New objects of the machine; temporary ones belong to somebody else.
pub(crate) fn appeared_since(before: &[String]) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let mut appeared = machine();
        appeared.retain(|thing| !before.contains(thing));
        if appeared.is_empty() || Instant::now() >= deadline {
            return appeared;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One pod of the demo's namespace, on a given node.
pub(crate) fn pod(name: &str, node: &str, app: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: calico-demo, labels: {{app: {app}}}}}\n\
         spec:\n  nodeSelector: {{kubernetes.io/hostname: {node}}}\n  containers: [{{name: c, ports: [{{containerPort: 80}}]}}]\n"
    )
}

/// Creates a pod on each of three Linux nodes, and waits for them.
pub(crate) fn three_pods(lab: &Lab) {
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
    let pods =
        [namespace, pod("one", "primary", "a"), pod("two", "linux-2", "a"), pod("three", "linux-3", "a")];
    lab.ok(&["apply", "-f", &lab.file("pods.yml", &pods.join("---\n"))]);
    lab.wait_for_pods();
}

/// A manifest with a pod on each of the two further nodes.
pub(crate) fn spread_pods(lab: &Lab) -> String {
    lab.file(
        "extra.yml",
        &format!(
            "{}---\n{}",
            pod("extra-linux", "linux-2", "other"),
            pod("extra-windows", "windows-2", "other")
        ),
    )
}

//! `cargo xtask kube`: a Kubernetes API on this machine, for people.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tortie_servers::programs::KUBE;
use tortie_servers::{KubeApi, KubeOptions};

use setup::{go, packages};

/// How long a wait lasts at most.
const DEADLINE: Duration = Duration::from_secs(300);

pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        ["build"] => {
            println!("{}", go::build_kube()?.display());
            Ok(())
        }
        ["up"] => up(),
        ["down"] => down(),
        // The process in the background that `up` starts.
        ["serve"] => serve(),
        _ => bail!("say `cargo xtask kube build`, `up` or `down`"),
    }
}

/// The files of the running servers.
struct State {
    folder: PathBuf,
}

impl State {
    fn new() -> Self {
        Self { folder: KUBE.target().join("up") }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The process in the background, if it runs.
    fn process(&self) -> Option<Pid> {
        let number: i32 = fs::read_to_string(self.file("pid")).ok()?.trim().parse().ok()?;
        // The number may belong to another program by now.
        let command = fs::read(format!("/proc/{number}/cmdline")).ok()?;
        command.ends_with(b"\0kube\0serve\0").then_some(number).and_then(Pid::from_raw)
    }
}

/// Starts the servers in the background, and waits until they are ready.
fn up() -> Result<()> {
    let state = State::new();
    if state.process().is_some() {
        println!("the servers are running already");
        return print(&state);
    }
    packages::install(&packages::SERVER_PACKAGES)?;
    go::build_kube()?;
    let _ = fs::remove_dir_all(&state.folder);
    fs::create_dir_all(&state.folder).with_context(|| state.folder.display().to_string())?;
    let log = File::create(state.file("log"))?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["kube", "serve"]).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // Its own process group: it stays when the terminal's process ends.
    let mut child = command.process_group(0).spawn().context("starting the process in the background")?;
    fs::write(state.file("pid"), child.id().to_string())?;
    wait_until("the servers are ready", || {
        if let Some(status) = child.try_wait()? {
            bail!("the servers did not start: {status}\n{}", fs::read_to_string(state.file("log"))?);
        }
        Ok(state.file("ready").exists())
    })?;
    print(&state)
}

fn print(state: &State) -> Result<()> {
    let kubeconfig = state.file("kubeconfig").display().to_string();
    println!("kubeconfig: {kubeconfig}");
    println!("logs:       {}", fs::read_to_string(state.file("ready"))?.trim());
    println!(
        "try:        {} kubectl --kubeconfig {kubeconfig} get namespaces",
        KUBE.binary("kube")?.display()
    );
    println!("stop:       cargo xtask kube down");
    Ok(())
}

/// Runs the servers until this process is ended. The servers end with it.
fn serve() -> Result<()> {
    let state = State::new();
    let options = KubeOptions { controllers: true, scheduler: true, ..KubeOptions::default() };
    let kube = KubeApi::start(&options)?;
    fs::copy(kube.kubeconfig(), state.file("kubeconfig"))?;
    let folder = kube.api().log().parent().context("the log has no folder")?;
    fs::write(state.file("ready.part"), folder.display().to_string())?;
    fs::rename(state.file("ready.part"), state.file("ready"))?;
    loop {
        std::thread::park();
    }
}

/// Ends the servers, and waits until their folder is gone.
fn down() -> Result<()> {
    let state = State::new();
    let Some(process) = state.process() else {
        println!("no servers are running");
        return Ok(());
    };
    kill_process(process, Signal::TERM).context("ending the process in the background")?;
    wait_until("the process in the background has ended", || Ok(state.process().is_none()))?;
    if let Ok(folder) = fs::read_to_string(state.file("ready")) {
        wait_until("the servers have ended", || Ok(!Path::new(folder.trim()).exists()))?;
    }
    fs::remove_dir_all(&state.folder).with_context(|| state.folder.display().to_string())
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

//! `tortie lab --wine`: the demo prints the same tables as without it, and nothing of Wine outlives a lab.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use tortie_servers::wine;

use super::linux_node::build_tortie;
use super::prefix::{Killed, output};

/// How long a lab may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(20);

/// Runs the demo with both kinds of programs.
pub(super) fn demo() -> Result<()> {
    let lab = Lab::new()?;
    let native = lab.demo(&[])?;
    let under_wine = lab.demo(&["--wine"])?;
    ensure!(native.contains("CUT"), "the demo shows no effect of policy:\n{native}");
    if native != under_wine {
        bail!("the demo prints other tables under Wine. Without it:\n{native}\nUnder Wine:\n{under_wine}");
    }
    lab.is_gone()
}

/// Starts a lab with two Windows nodes, and ends it.
pub(super) fn up_and_down() -> Result<()> {
    let lab = Lab::new()?;
    let mut up = Killed(lab.tortie(&["up", "--windows", "2", "--wine"]).stderr(Stdio::piped()).spawn()?);
    let end = Instant::now() + PATIENCE;
    let mut reports = lab.command(&["get", "nodereports", "-o", "name"]);
    // The datastore is there before the nodes are.
    while reports.output()?.stdout.split(|byte| *byte == b'\n').count() <= 3 {
        if let Some(status) = up.0.try_wait()? {
            let mut said = String::new();
            up.0.stderr.take().context("no output")?.read_to_string(&mut said)?;
            bail!("the lab has ended: {status}: {said}");
        }
        ensure!(Instant::now() < end, "no three nodes in {} seconds", PATIENCE.as_secs());
        std::thread::sleep(INTERVAL);
    }
    ensure!(!lab.processes()?.is_empty(), "Wine does not run");
    output(&mut lab.tortie(&["down"]))?;
    lab.is_gone()
}

/// Ends a lab while it makes the template of its machines. The lab's folder has a relative name.
pub(super) fn interrupted() -> Result<()> {
    let lab = Lab::new()?;
    let programs = lab.parent.path().join("programs");
    std::fs::create_dir(&programs)?;
    for name in wine::PROGRAMS.iter().chain(&wine::LIBRARIES) {
        std::os::unix::fs::symlink(wine::home().join(name), programs.join(name))?;
    }
    let unfinished = || -> Result<Option<PathBuf>> {
        let mut entries = std::fs::read_dir(&programs)?.flatten().map(|entry| entry.path());
        Ok(entries.find(|path| path.join("prefix").exists()))
    };
    let mut up = lab.tortie(&["up", "--windows", "1", "--wine"]);
    up.arg(&programs).env("TORTIE_LAB", "lab").current_dir(lab.parent.path());
    let mut up = Killed(up.stderr(Stdio::null()).spawn()?);
    let end = Instant::now() + PATIENCE;
    let wait = || std::thread::sleep(INTERVAL);
    while !unfinished()?.is_some_and(|folder| folder.join("prefix/drive_c").exists()) {
        ensure!(up.0.try_wait()?.is_none() && Instant::now() < end, "the lab makes no template");
        wait();
    }
    let pid = rustix::process::Pid::from_child(&up.0);
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    let status = loop {
        if let Some(status) = up.0.try_wait()? {
            break status;
        }
        ensure!(Instant::now() < end, "the lab does not end");
        wait();
    };
    ensure!(status.code() == Some(130), "{status}");
    ensure!(unfinished()?.is_none(), "{:?} is left", unfinished()?);
    lab.is_gone()
}

/// A folder for a lab.
struct Lab {
    program: PathBuf,
    parent: TempDir,
    folder: PathBuf,
    /// What Wine had left before.
    before: BTreeSet<OsString>,
}

impl Lab {
    fn new() -> Result<Self> {
        let (program, parent) = (build_tortie()?, TempDir::new()?);
        std::fs::create_dir(parent.path().join("home"))?;
        Ok(Self { program, folder: parent.path().join("lab"), parent, before: of_wine()? })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env("TORTIE_LAB", &self.folder).env("HOME", self.parent.path().join("home")).args(arguments);
        command
    }

    fn tortie(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&["lab"]);
        command.args(arguments);
        command
    }

    /// What the demo prints: the tables.
    fn demo(&self, options: &[&str]) -> Result<String> {
        let printed = output(self.tortie(&["demo"]).args(options))?.stdout;
        Ok(String::from_utf8(printed)?)
    }

    /// The processes of Wine that belong to the lab.
    fn processes(&self) -> Result<Vec<String>> {
        let variable = format!("WINEPREFIX={}/", self.folder.display()).into_bytes();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let process = entry?.path();
            // It may end now, and others have no environment.
            let environment = std::fs::read(process.join("environ")).unwrap_or_default();
            if environment.split(|byte| *byte == 0).any(|each| each.starts_with(&variable)) {
                let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
                found.push(format!("{} {}", process.display(), name.trim()));
            }
        }
        Ok(found)
    }

    /// Neither the folder of the lab with its machines nor a process is left, and Wine has left nothing in the folder for temporary
    /// files and in the user's home.
    fn is_gone(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.folder.exists() || !self.processes()?.is_empty() {
            let left = (self.folder.exists(), self.processes()?);
            ensure!(Instant::now() < end, "whether the folder is left, and the processes that are: {left:?}");
            std::thread::sleep(INTERVAL);
        }
        ensure!(of_wine()? == self.before, "Wine has left {:?}, and before {:?}", of_wine()?, self.before);
        let home: Vec<_> = std::fs::read_dir(self.parent.path().join("home"))?.flatten().collect();
        ensure!(home.is_empty(), "Wine has left {home:?}");
        Ok(())
    }
}

/// What Wine has made in the folder for temporary files.
fn of_wine() -> Result<BTreeSet<OsString>> {
    let entries = std::fs::read_dir(std::env::temp_dir())?.flatten().map(|entry| entry.file_name());
    let is_of_wine =
        |name: &OsString| ["wine-", ".wine-"].iter().any(|start| name.to_string_lossy().starts_with(start));
    Ok(entries.filter(is_of_wine).collect())
}

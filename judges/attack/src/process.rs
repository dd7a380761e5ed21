//! Processes of an attack, and waiting.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// A process that ends with its value.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    /// Starts a command whose output goes to a file.
    pub(crate) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let log = fs::File::create(log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        tortie_kernel::namespace::die_with_parent(command);
        Ok(Self(command.spawn().with_context(|| format!("{command:?}"))?))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Asks it to end, and waits for that.
    pub(crate) fn end(&mut self, patience: Duration) -> Result<()> {
        signal(self.pid(), Signal::TERM);
        let ended = wait_until(patience, || Ok(self.has_ended()));
        ensure!(ended?, "process {} does not end", self.pid());
        Ok(())
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal. A process that has ended needs none.
pub(crate) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// The most memory that a process has had, in MiB.
pub(crate) fn peak_of_memory(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kilobytes >> 10)
}

/// The output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    ensure!(output.status.success(), "{command:?}: {text}");
    Ok(text)
}

/// The text of a file, of which a megabyte at most.
pub(crate) fn beginning(path: &Path) -> String {
    let mut text = Vec::new();
    if let Ok(file) = fs::File::open(path) {
        let _ = file.take(1 << 20).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Waits until something holds; returns whether it does in time.
pub(crate) fn wait_until(patience: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<bool> {
    let deadline = Instant::now() + patience;
    loop {
        if holds()? {
            return Ok(true);
        }
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

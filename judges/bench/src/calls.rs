//! Calls of a CNI plugin by a process on the node, as a container runtime makes them.
//!
//! The process enters the node's namespaces once, and then starts the plugin for each call. So the entry is not part of
//! what is measured.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Calls of one kind, one for each namespace.
#[derive(Serialize, Deserialize)]
pub(super) struct Calls {
    pub(super) program: PathBuf,
    pub(super) config: Value,
    /// `CNI_COMMAND`.
    pub(super) verb: String,
    /// `CNI_NETNS` of each call.
    pub(super) namespaces: Vec<String>,
    /// How many calls are made at a time.
    pub(super) parallel: usize,
}

/// How long the calls took.
#[derive(Serialize, Deserialize)]
pub(super) struct Took {
    pub(super) each: Vec<Duration>,
    pub(super) all: Duration,
}

impl Calls {
    /// Makes the calls in the namespaces that these options of nsenter name.
    pub(super) fn make(&self, enter: &[String]) -> Result<Took> {
        let mut command = Command::new("nsenter");
        command.args(enter).arg(std::env::current_exe()?).arg(CALLS);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().context("no input")?.write_all(&serde_json::to_vec(self)?)?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("{} {} failed", self.program.display(), self.verb);
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn make_here(&self) -> Result<Took> {
        let next = AtomicUsize::new(0);
        let worker = || {
            let mut times = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(namespace) = self.namespaces.get(number) else { return Ok(times) };
                times.push(self.call(number, namespace)?);
            }
        };
        let begun = Instant::now();
        let each: Result<Vec<Vec<Duration>>> = thread::scope(|scope| {
            let workers: Vec<_> = (0..self.parallel).map(|_| scope.spawn(worker)).collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined.map(|times| times.map_err(|_| anyhow::anyhow!("a worker panicked"))?).collect()
        });
        let all = begun.elapsed();
        Ok(Took { each: each?.concat(), all })
    }

    fn call(&self, number: usize, netns: &str) -> Result<Duration> {
        let mut command = Command::new(&self.program);
        command.env_clear().envs([
            ("PATH", "/usr/bin:/bin:/usr/sbin:/sbin"),
            ("CNI_COMMAND", &self.verb),
            ("CNI_CONTAINERID", &format!("bench{number}")),
            ("CNI_NETNS", netns),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/usr/lib/cni"),
            ("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=bench-{number}")),
        ]);
        let config = self.config.to_string();
        let begun = Instant::now();
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.stdin.take().context("no input")?.write_all(config.as_bytes())?;
        let output = child.wait_with_output()?;
        let took = begun.elapsed();
        if !output.status.success() {
            let said = [output.stdout, output.stderr].concat();
            bail!("{} {}: {}", self.program.display(), self.verb, String::from_utf8_lossy(&said));
        }
        Ok(took)
    }
}

/// The argument of `cargo xtask bench` for the process on the node.
pub(super) const CALLS: &str = "calls-of-a-runtime";

/// The process on the node: reads the calls, makes them, and writes how long they took.
pub(super) fn serve() -> Result<()> {
    let mut calls = String::new();
    std::io::stdin().read_to_string(&mut calls)?;
    let calls: Calls = serde_json::from_str(&calls)?;
    println!("{}", serde_json::to_string(&calls.make_here()?)?);
    Ok(())
}

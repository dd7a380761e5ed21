//! Carries out faults, and heals them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::fault::{Datastore, Fault, Node};
use crate::lab::Process;
use crate::objects::Objects;
use crate::run::{Run, wait_until};
use crate::weather::Trouble;

/// How long a process may take to end when it is killed.
const ENDS: Duration = Duration::from_secs(10);
/// How long agents live in a crash loop: from before they have read anything to after they have begun to work.
const FIRST_LIFE: Duration = Duration::from_millis(10);
const LAST_LIFE: Duration = Duration::from_millis(1_000);
/// The interval of looks at processes.
const LOOK: Duration = Duration::from_millis(50);
/// How long an agent that has started may take to close what the table of its node should close: it reads a file first.
const AGENT_CLOSES: Duration = Duration::from_secs(5);
/// Agents look at the kernel and at HNS every ten seconds, and once when they start. One may have to be started first, and HNS has many
/// calls to answer.
const AGENT_LOOKS: Duration = Duration::from_secs(25);
/// A slow datastore stands still for the first time, and works for the second time.
const SLOW: (Duration, Duration) = (Duration::from_millis(400), Duration::from_millis(100));

/// The faults of a run.
pub(crate) struct Storms {
    run: Arc<Run>,
    objects: Arc<Objects>,
    /// The nodes whose disks were full since the last rest. What their agents have saved may be old.
    full: Mutex<BTreeSet<Node>>,
}

impl Storms {
    pub(crate) fn new(run: Arc<Run>, objects: Arc<Objects>) -> Arc<Self> {
        Arc::new(Self { run, objects, full: Mutex::default() })
    }

    /// Carries out a fault, and returns when it has healed.
    pub(crate) async fn fault(self: Arc<Self>, fault: Fault) {
        self.run.tell_fault(fault);
        if let Err(error) = self.carry_out(fault).await {
            self.run.blame(format!("the judge cannot carry out {fault}: {error:#}"));
        }
        if fault.duration() > Duration::ZERO {
            self.run.tell(format!("{} has healed", fault.name()));
        }
    }

    async fn carry_out(&self, fault: Fault) -> Result<()> {
        let lab = &self.run.lab;
        match fault {
            Fault::KillAgent(node) => {
                self.kill_agent(node).await;
            }
            Fault::StopAgent(node) => {
                if let Some(agent) = lab.agent(node) {
                    agent.signal(Signal::TERM);
                }
            }
            Fault::CrashLoop(node, duration) => self.crash_loop(node, duration).await,
            Fault::PauseAgent(node, duration) => pause(lab.agent(node), duration).await,
            Fault::FlushTable(node) => self.flush(node).await?,
            Fault::RemoveRoutes(node) => self.remove_routes(node).await?,
            Fault::PartitionNode(node, duration) => self.partition(node, duration).await?,
            Fault::CutFromDatastore(node, duration) => self.cut(node, duration).await?,
            Fault::StartWithoutDatastore(node, duration) => {
                let (cut, started) = tokio::join!(self.cut(node, duration), self.start_anew(node));
                cut.and(started)?;
            }
            Fault::SlowDatastore(duration) => self.slow_datastore(duration).await?,
            Fault::PauseDatastore(duration) => {
                let process = self.datastore()?;
                pause(process, duration).await;
            }
            Fault::KillDatastore => {
                if let Some(process) = self.datastore()? {
                    process.signal(Signal::KILL);
                }
            }
            Fault::FullDisk(node, duration) => {
                lock(&self.full).insert(node);
                lab.fill_disk(node, true)?;
                sleep(duration).await;
                // Another full disk of the node may have ended meanwhile.
                let _ = lab.fill_disk(node, false);
            }
            Fault::PauseHns(node, duration) => {
                let trouble = self.begin(node, Trouble::Closed);
                pause(lab.hns(node), duration).await;
                self.end(trouble);
            }
            Fault::RestartHns(node) => self.restart_hns(node).await?,
        }
        Ok(())
    }

    async fn partition(&self, node: Node, duration: Duration) -> Result<()> {
        let trouble = self.begin(node, Trouble::NoLink);
        self.run.lab.set_cable(node, false)?;
        sleep(duration).await;
        self.run.lab.set_cable(node, true)?;
        self.end(trouble);
        Ok(())
    }

    async fn cut(&self, node: Node, duration: Duration) -> Result<()> {
        self.run.lab.cut(node, true)?;
        sleep(duration).await;
        // Another cut of the node may have ended meanwhile.
        let _ = self.run.lab.cut(node, false);
        Ok(())
    }

    /// Kills the agent of a node that is cut off. On Linux, the next one finds no table either.
    async fn start_anew(&self, node: Node) -> Result<()> {
        if self.run.lab.shape.is_windows(node) {
            self.kill_agent(node).await;
            return Ok(());
        }
        self.flush(node).await
    }

    async fn remove_routes(&self, node: Node) -> Result<()> {
        let trouble = self.begin(node, Trouble::Closed);
        self.run.lab.remove_routes(node)?;
        self.steady(node, AGENT_LOOKS).await;
        self.end(trouble);
        Ok(())
    }

    /// Kills the agent of a node. False if it has none at the moment.
    async fn kill_agent(&self, node: Node) -> bool {
        let Some(agent) = self.run.lab.agent(node) else { return false };
        agent.signal(Signal::KILL);
        wait_until(ENDS, || agent.has_ended()).await
    }

    /// Kills the agent of a node again and again, each time a little later after its start.
    async fn crash_loop(&self, node: Node, duration: Duration) {
        let end = self.run.now() + duration;
        let mut life = FIRST_LIFE;
        while self.run.now() < end {
            if self.kill_agent(node).await {
                wait_until(end.saturating_sub(self.run.now()), || self.run.lab.agent(node).is_some()).await;
                sleep(life.min(end.saturating_sub(self.run.now()))).await;
                life = if life > LAST_LIFE { FIRST_LIFE } else { life * 2 };
            } else {
                sleep(LOOK).await;
            }
        }
    }

    /// Nobody enforces policy on a Windows node until its agent has looked at HNS.
    async fn restart_hns(&self, node: Node) -> Result<()> {
        let open = self.begin(node, Trouble::NoPolicy);
        let shared = Arc::clone(&self.run);
        tokio::task::spawn_blocking(move || shared.lab.restart_hns(node)).await??;
        self.steady(node, AGENT_LOOKS).await;
        self.end(open);
        self.run.tell(format!("the agent of node {node} has looked at HNS"));
        Ok(())
    }

    /// Waits until one agent of a node, and one HNS, have run for that long without standing still.
    async fn steady(&self, node: Node, duration: Duration) {
        let lab = &self.run.lab;
        loop {
            sleep(LOOK).await;
            let Some(agent) = lab.agent(node) else { continue };
            let hns = if lab.shape.is_windows(node) { lab.hns(node) } else { None };
            let begun = self.run.now();
            while [Some(agent), hns].into_iter().flatten().all(Process::runs) {
                if self.run.now() > begun + duration {
                    return;
                }
                sleep(LOOK).await;
            }
        }
    }

    /// Kills the agent of a Linux node, and removes the table. Nobody enforces policy until an agent has started; that one closes pods
    /// with policy, and opens them when it knows the cluster.
    async fn flush(&self, node: Node) -> Result<()> {
        let Some(agent) = self.run.lab.agent(node) else { return Ok(()) };
        let (open, closed) = (self.begin(node, Trouble::NoPolicy), self.begin(node, Trouble::Closed));
        let shared = Arc::clone(&self.run);
        let flushed = tokio::task::spawn_blocking(move || shared.lab.flush(node, agent)).await?;
        if let Err(error) = flushed {
            // A new agent guards the table already, which is then as it was.
            self.run.tell(format!("the table of node {node} stays: {error:#}"));
            self.end(open);
            self.end(closed);
            return Ok(());
        }
        self.steady(node, AGENT_CLOSES).await;
        let is_old = lock(&self.full).contains(&node);
        if !is_old {
            self.end(open);
        }
        self.objects.node_follows(node).await;
        self.end(open);
        self.end(closed);
        self.run.tell(format!("the agent of node {node} follows the cluster again"));
        Ok(())
    }

    async fn slow_datastore(&self, duration: Duration) -> Result<()> {
        let mut left = duration;
        while left > Duration::ZERO {
            let process = self.datastore()?;
            pause(process, SLOW.0).await;
            sleep(SLOW.1).await;
            left = left.saturating_sub(SLOW.0 + SLOW.1);
        }
        Ok(())
    }

    /// The datastore's process. Only etcd is killed, and may be missing for a moment.
    fn datastore(&self) -> Result<Option<Process>> {
        let process = self.run.lab.datastore();
        let may_be_missing = self.run.lab.shape.datastore == Datastore::Etcd;
        ensure!(process.is_some() || may_be_missing, "the datastore has no process");
        Ok(process)
    }

    /// The faults of a storm have healed, and all nodes follow the cluster.
    pub(crate) fn rest(&self) {
        lock(&self.full).clear();
        let now = self.run.now();
        self.run.world().weather.clear(now);
    }

    fn begin(&self, node: Node, trouble: Trouble) -> crate::weather::Begun {
        let now = self.run.now();
        self.run.world().weather.begin(node, trouble, now)
    }

    fn end(&self, trouble: crate::weather::Begun) {
        let now = self.run.now();
        self.run.world().weather.end(trouble, now);
    }
}

async fn pause(process: Option<Process>, duration: Duration) {
    let Some(process) = process else { return };
    process.signal(Signal::STOP);
    sleep(duration).await;
    process.signal(Signal::CONT);
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! What all parts of a run share: the world, the clock, what has happened, and what is wrong.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::fault::{Fault, Node};
use crate::known::Moment;
use crate::lab::Lab;
use crate::oracle::{Expected, Packet, World};

/// How many of the last events a wrong packet is printed with.
const LAST_EVENTS: usize = 10;

/// How many wrong things are printed. All are kept.
const SHOWN: usize = 10;

/// The state of a run.
pub(crate) struct Run {
    pub(crate) lab: Lab,
    start: Instant,
    world: Mutex<World>,
    events: Mutex<Vec<String>>,
    wrong: Mutex<Vec<String>>,
    /// How to repeat the run.
    repeat: String,
    counts: Mutex<Counts>,
    faults: Mutex<BTreeMap<&'static str, usize>>,
    is_over: AtomicBool,
}

/// What was judged.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) either: u64,
    pub(crate) lines_of_flows: u64,
}

impl Run {
    pub(crate) fn new(lab: Lab, repeat: String) -> Self {
        let world = Mutex::new(World::new(lab.shape.nodes()));
        Self {
            lab,
            start: Instant::now(),
            world,
            events: Mutex::default(),
            wrong: Mutex::default(),
            repeat,
            counts: Mutex::default(),
            faults: Mutex::default(),
            is_over: AtomicBool::new(false),
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.start.elapsed()
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    pub(crate) fn counts(&self) -> MutexGuard<'_, Counts> {
        lock(&self.counts)
    }

    /// Notes and prints what happens.
    pub(crate) fn tell(&self, event: impl std::fmt::Display) {
        let line = format!("{:7.1} s  {event}", self.now().as_secs_f64());
        println!("{line}");
        lock(&self.events).push(line);
    }

    /// Notes and prints a fault.
    pub(crate) fn tell_fault(&self, fault: Fault) {
        *lock(&self.faults).entry(fault.name()).or_default() += 1;
        self.tell(fault);
    }

    /// How often each fault has happened.
    pub(crate) fn faults(&self) -> String {
        let faults = lock(&self.faults);
        let faults: Vec<String> = faults.iter().map(|(name, count)| format!("{count} {name}")).collect();
        faults.join(", ")
    }

    /// Notes and prints something wrong. The run ends soon.
    pub(crate) fn blame(&self, what: impl std::fmt::Display) {
        if self.is_over.load(Ordering::Relaxed) {
            return;
        }
        let events = lock(&self.events).clone();
        let last = events[events.len().saturating_sub(LAST_EVENTS)..].join("\n    ");
        let text = format!(
            "{:7.1} s  WRONG: {what}\n  the last events:\n    {last}\n  repeat: {}",
            self.now().as_secs_f64(),
            self.repeat
        );
        let mut wrong = lock(&self.wrong);
        // Where nobody enforces policy, all packets are wrong.
        if wrong.len() < SHOWN {
            println!("{text}");
        }
        wrong.push(text);
    }

    /// Nothing is judged any more. The lab is about to end, and the kernel removes the rules of a network namespace before its links: a
    /// denied packet that is sent again at that moment arrives.
    pub(crate) fn finish(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// True if something is wrong.
    pub(crate) fn is_wrong(&self) -> bool {
        !lock(&self.wrong).is_empty()
    }

    pub(crate) fn wrong(&self) -> Vec<String> {
        lock(&self.wrong).clone()
    }

    /// Judges a packet. `arrived` tells what became of it.
    pub(crate) fn judge(&self, packet: Packet, arrived: bool, how: &str) {
        let world = self.world();
        let expected = world.expected(packet);
        {
            let mut counts = self.counts();
            match expected {
                Expected::Allowed => counts.allowed += 1,
                Expected::Denied => counts.denied += 1,
                Expected::Either => counts.either += 1,
            }
        }
        let wrong = match expected {
            Expected::Allowed => !arrived,
            Expected::Denied => arrived,
            Expected::Either => false,
        };
        if wrong {
            let text = format!("{}\n    {}", self.describe(&world, packet, how), world.why(packet));
            drop(world);
            self.blame(format!("expected {expected:?}: {text}"));
        }
    }

    fn describe(&self, world: &World, packet: Packet, how: &str) -> String {
        let name = |id| {
            let pod = world.pod(id);
            let node = pod.map_or_else(|| "?".to_owned(), |pod| self.lab.shape.name(pod.node));
            let address = pod.and_then(|pod| pod.address(packet.family));
            let address = address.map(|address| address.to_string()).unwrap_or_default();
            format!("pod {id} ({address} on {node})")
        };
        format!(
            "{} from {} to {}, sent at {:.3} s, judged until {:.3} s: {how}",
            packet.protocol.name(),
            name(packet.from),
            name(packet.to),
            packet.span.from.as_secs_f64(),
            packet.span.until.as_secs_f64()
        )
    }

    /// Keeps the logs, what the nodes have in force, and the events of a run that failed.
    pub(crate) fn keep_evidence(&self, folder: &Path) -> Result<PathBuf> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("wrong.txt"), self.wrong().join("\n\n"))?;
        fs::write(folder.join("events.txt"), lock(&self.events).join("\n"))?;
        fs::copy(self.lab.log(), folder.join("lab.log"))?;
        for entry in fs::read_dir(self.lab.path().join("logs"))?.flatten() {
            fs::copy(entry.path(), folder.join(entry.file_name()))?;
        }
        for (file, arguments) in [
            ("nodereports.yaml", &["get", "nodereports", "-o", "yaml"][..]),
            ("pods.yaml", &["get", "pods", "-A", "-o", "yaml"]),
            ("workloadendpoints.yaml", &["get", "workloadendpoints", "-A", "-o", "yaml"]),
            ("policies.yaml", &["get", "networkpolicies,globalnetworkpolicies", "-A", "-o", "yaml"]),
        ] {
            fs::write(folder.join(file), self.lab.tortie(arguments)?.0)?;
        }
        for node in 0..self.lab.shape.linux {
            let tables = self.tables(node).unwrap_or_else(|error| error.to_string());
            fs::write(folder.join(format!("{}.nft", self.lab.shape.name(node))), tables)?;
        }
        Ok(folder.to_owned())
    }

    fn tables(&self, node: Node) -> Result<String> {
        let mut command = std::process::Command::new("nft");
        self.lab.netns_of_node(node)?.enter_on_spawn(&mut command)?;
        let output = command.args(["-a", "list", "ruleset"]).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until something holds; returns whether it does in time.
pub(crate) async fn wait_until(patience: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        if holds() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

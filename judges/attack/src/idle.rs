//! Connections to the agent's health port that ask nothing.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NODES};
use crate::process;

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "idle-health",
    attacker: "a process of the node's network keeps 600 connections to the agent's health port, opens others in the place of those that \
               the agent ends, and sends nothing or half a request",
    holds: "the kubelet's question for liveness is answered within five seconds each time, and the agent's memory stays bounded",
    run,
};

/// Where the agents of the lab serve, each in the network of its node.
const ADDRESS: &str = "127.0.0.1:9198";
const HELD: usize = 600;
/// How long the attack lasts.
const TIME: Duration = Duration::from_secs(8);
const BOUND: Duration = Duration::from_secs(5);
/// What an agent may need, in MiB.
const MEMORY: u64 = 200;

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let lab = Lab::up_with(&bounds.program, &[], &[("TORTIE_HEALTH_ADDRESS", ADDRESS)])?;
    let (netns, agent) = (lab.netns_of_node(NODES[0])?, lab.agent(NODES[0])?);
    let mut outcome = Outcome::default();
    let answered = netns.run(|| ask().is_ok())?;
    outcome.control(answered, "nobody answers without an attack, either")?;
    while bounds.another_round() {
        let (is_over, opened, ended) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        let seed = bounds.random.random();
        let slowest = std::thread::scope(|scope| -> Result<Duration> {
            let attacker = scope.spawn(|| netns.run(|| occupy(seed, &is_over, &opened, &ended)));
            let slowest = netns.run(|| probe(&mut outcome));
            is_over.store(true, Ordering::Relaxed);
            attacker.join().map_err(|_| anyhow::anyhow!("the attacker has ended"))??;
            Ok(slowest?)
        })?;
        let (opened, ended) = (opened.into_inner(), ended.into_inner());
        outcome.attempts += opened;
        outcome.control(opened > HELD as u64, &format!("only {opened} connections were opened"))?;
        outcome.control(ended > 0, "the agent has ended no connection: there were too few for it to mind")?;
        let memory = process::peak_of_memory(agent)?;
        if memory > MEMORY {
            outcome.blame(format!("the agent has needed {memory} MiB"));
        }
        outcome.notes.push(format!(
            "{opened} connections, {ended} ended by the agent; the slowest answer took {} ms; {memory} MiB",
            slowest.as_millis()
        ));
    }
    lab.down()?;
    Ok(outcome)
}

/// Keeps [`HELD`] connections until the attack is over.
fn occupy(seed: u64, is_over: &AtomicBool, opened: &AtomicU64, ended: &AtomicU64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut held = VecDeque::new();
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(mut stream) = TcpStream::connect(ADDRESS) {
            opened.fetch_add(1, Ordering::Relaxed);
            if random.random() {
                let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: ");
            }
            let _ = stream.set_nonblocking(true);
            held.push_back(stream);
        }
        if held.len() > HELD {
            if held.pop_front().is_some_and(|mut stream| stream.read(&mut [0; 16]).is_ok()) {
                ended.fetch_add(1, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Asks as the kubelet does, again and again; returns the longest time.
fn probe(outcome: &mut Outcome) -> Duration {
    let (begun, mut slowest) = (Instant::now(), Duration::ZERO);
    // The attacker needs a moment to have all of his connections.
    std::thread::sleep(Duration::from_secs(1));
    while begun.elapsed() < TIME {
        let asked = Instant::now();
        match ask() {
            Ok(()) => outcome.controls += 1,
            Err(error) => outcome.blame(format!("a probe gets no answer: {error:#}")),
        }
        slowest = slowest.max(asked.elapsed());
        std::thread::sleep(Duration::from_millis(100));
    }
    slowest
}

fn ask() -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&ADDRESS.parse()?, BOUND)?;
    stream.set_read_timeout(Some(BOUND))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    answer.starts_with("HTTP/1.1 200").then_some(()).with_context(|| format!("the answer is {answer:?}"))
}

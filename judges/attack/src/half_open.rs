//! Connections to the embedded store's service that begin TLS and never finish it.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rand::Rng as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_store::rpc::Remote;
use tortie_store::{Store as _, StoreError};

use crate::attack::{Attack, Bounds, Outcome};
use crate::service::{ADDRESS, Service};

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "half-open-tls",
    attacker: "somebody with the address of the embedded datastore opens 10,000 connections, says nothing, or sends a part of a ClientHello \
               or garbage, and keeps all of them",
    holds: "each read and write of a client with a certificate succeeds within five seconds, also by a new connection; log, memory and \
            descriptors of the service stay bounded",
    run,
};

const CONNECTIONS: usize = 10_000;
/// How long a read or a write may take.
const BOUND: Duration = Duration::from_secs(5);
/// Lines of the log in ten seconds: 200 for each place in the code, and there are few.
const LINES: u64 = 600;
/// What the service may need, in MiB.
const MEMORY: u64 = 256;
/// The service keeps a fourth of its 1,024 for strangers. Connections that it has just ended come on top.
const DESCRIPTORS: usize = 600;
/// A TLS record with the beginning of a ClientHello (RFC 8446, 4.1.2).
const HELLO: [u8; 11] = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let wanted = CONNECTIONS as u64 + 1000;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum.or(Some(wanted)), ..limit })?;
    let mut outcome = Outcome::default();
    while bounds.another_round() {
        round(bounds, &mut outcome)?;
    }
    Ok(outcome)
}

fn round(bounds: &mut Bounds, outcome: &mut Outcome) -> Result<()> {
    let service = Service::start(&bounds.program, 64, &["operator ann"])?;
    let (begun, seed) = (Instant::now(), bounds.random.random());
    let (opened, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (held, most, slowest, calls) = std::thread::scope(|scope| -> Result<_> {
        let attacker = scope.spawn(|| service.netns.run(|| occupy(seed, &opened)));
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(service.descriptors());
                std::thread::sleep(Duration::from_millis(10));
            }
            most
        });
        let client = service.run(async || use_store(&service, || attacker.is_finished()).await);
        is_over.store(true, Ordering::Relaxed);
        let held = attacker.join().map_err(|_| anyhow::anyhow!("the attacker has ended"))???;
        let (slowest, calls) = client?;
        Ok((held, watcher.join().unwrap_or_default(), slowest, calls))
    })?;
    outcome.attempts += opened.load(Ordering::Relaxed) as u64;
    outcome.control(most > 100, &format!("the service has {most} descriptors: it sees no connections"))?;
    let ended = held.into_iter().filter_map(|stream| is_ended(stream).then_some(())).count();
    outcome.control(ended > CONNECTIONS / 2, &format!("the service has ended {ended} connections only"))?;
    outcome.controls += calls.done;
    calls.failed.into_iter().for_each(|text| outcome.blame(text));
    let (lines, memory) = (service.log().lines().count() as u64, service.peak_of_memory()?);
    let most_lines = LINES * (1 + begun.elapsed().as_secs() / 10);
    for (is_bounded, text) in [
        (lines <= most_lines, format!("the log has {lines} lines")),
        (memory <= MEMORY, format!("the service has needed {memory} MiB")),
        (most <= DESCRIPTORS, format!("the service has had {most} descriptors")),
    ] {
        if !is_bounded {
            outcome.blame(text);
        }
    }
    outcome.notes.push(format!(
        "{} calls, {} attempts repeated, the slowest call {} ms; {most} descriptors, {memory} MiB, {lines} lines of log; {ended} connections \
         ended by the service",
        calls.done,
        calls.repeated,
        slowest.as_millis()
    ));
    service.end()
}

/// Opens the connections, and keeps them.
fn occupy(seed: u64, opened: &AtomicUsize) -> Result<Vec<TcpStream>> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut held = Vec::with_capacity(CONNECTIONS);
    while held.len() < CONNECTIONS {
        let mut stream = TcpStream::connect(ADDRESS).context("the attacker cannot connect")?;
        opened.fetch_add(1, Ordering::Relaxed);
        // The service may have ended it already.
        let _ = match random.random_range(0..4) {
            0 => Ok(()),
            1 => stream.write_all(&random.random::<[u8; 32]>()),
            _ => stream.write_all(&HELLO[..random.random_range(1..=HELLO.len())]),
        };
        held.push(stream);
    }
    Ok(held)
}

fn is_ended(mut stream: TcpStream) -> bool {
    let mut buffer = [0; 256];
    let open = |kind| matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut);
    stream.set_nonblocking(true).is_ok() && !stream.read(&mut buffer).is_err_and(|error| open(error.kind()))
}

/// The calls of clients.
#[derive(Debug, Default)]
struct Calls {
    done: u64,
    /// How often a client had to try again, because its connection counted as a stranger's at that moment.
    repeated: u64,
    failed: Vec<String>,
}

/// Reads and writes by one connection, by new ones and by the socket of operators until the attack is over; returns the slowest call.
async fn use_store(service: &Service, is_over: impl Fn() -> bool) -> Result<(Duration, Calls)> {
    let (lasting, local) = (service.client("operator-ann")?, service.operator());
    let (mut calls, mut slowest) = (Calls::default(), Duration::ZERO);
    let (mut number, mut rounds_after) = (0, 0);
    while rounds_after < 5 {
        rounds_after += u32::from(is_over());
        let fresh = service.client("operator-ann")?;
        for client in [&lasting, &fresh, &local] {
            number += 1;
            let begun = Instant::now();
            match tokio::time::timeout(BOUND, write_and_read(client, number, &mut calls.repeated)).await {
                Ok(Ok(())) => calls.done += 1,
                Ok(Err(error)) => calls.failed.push(format!("call {number} fails: {error:#}")),
                Err(_) => calls.failed.push(format!("call {number} takes longer than {} s", BOUND.as_secs())),
            }
            slowest = slowest.max(begun.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok((slowest, calls))
}

/// Creates an object and reads it. A client whose connection ends tries again, as agents and commands do.
async fn write_and_read(client: &Remote, number: u64, repeated: &mut u64) -> Result<()> {
    let key = Key::global(Kind::GlobalNetworkSet, format!("set-{number}"));
    let value = json!({"metadata": {"name": key.name}, "spec": {}});
    loop {
        let result = match client.create(&key, value.clone()).await {
            Ok(_) | Err(StoreError::AlreadyExists(_)) => client.get(&key).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(Some(_)) => return Ok(()),
            Ok(None) => bail!("the object is not there"),
            Err(StoreError::Unavailable(_)) => *repeated += 1,
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

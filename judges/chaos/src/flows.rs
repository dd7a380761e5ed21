//! Connections that last: neither faults nor changes of policy may end them (policy decision 20).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::time::{sleep, timeout};

use crate::dice::Dice;
use crate::known::{Moment, Span};
use crate::oracle::{Expected, Family, Packet, PodId};
use crate::rules::Protocol;
use crate::run::Run;
use crate::traffic::{Station, Traffic};

/// The time between two lines.
const PACE: Duration = Duration::from_millis(500);
/// A flow that is silent for so long is broken.
const SILENCE: Duration = Duration::from_secs(15);
/// TCP waits up to twice as long as a trouble has lasted until it sends again: troubles last 20 seconds at most.
const AFTER_TROUBLE: Duration = Duration::from_secs(45);
/// How long one waits for a first connection.
const BEGIN: Duration = Duration::from_secs(6);

/// Keeps that many flows between random pods, until the run ends.
pub(crate) async fn keep(run: Arc<Run>, traffic: Arc<Traffic>, count: usize, mut dice: Dice) {
    let mut flows = tokio::task::JoinSet::new();
    loop {
        sleep(PACE).await;
        while flows.try_join_next().is_some() {}
        let stations = traffic.stations();
        if flows.len() >= count || stations.len() < 2 {
            continue;
        }
        let (from, to) = (dice.pick(&stations).clone(), dice.pick(&stations).clone());
        let pairs = from.targets(&to);
        if from.id == to.id || pairs.is_empty() {
            continue;
        }
        let (now, address) = (run.now(), *dice.pick(&pairs));
        let (protocol, family) = (Protocol::Tcp, Family::of(address));
        let packet = Packet { from: from.id, to: to.id, protocol, family, span: Span::new(now, now) };
        if run.world().expected(packet) == Expected::Allowed {
            flows.spawn(flow(Arc::clone(&run), from, to.id, address));
        }
    }
}

/// Sends lines until a pod of the flow leaves.
async fn flow(run: Arc<Run>, from: Arc<Station>, to: PodId, address: IpAddr) {
    let Ok(Ok(stream)) = timeout(BEGIN, from.connect(address)).await else { return };
    let from = from.id;
    let (input, mut output) = stream.into_split();
    let mut answers = BufReader::new(input).lines();
    let mut heard = run.now();
    loop {
        let sent = output.write_all(b"still there\n").await;
        let ended = match (sent, timeout(PACE, answers.next_line()).await) {
            (Err(error), _) | (_, Ok(Err(error))) => Some(error.to_string()),
            (_, Ok(Ok(None))) => Some("closed by the other end".to_owned()),
            (_, Ok(Ok(Some(_)))) => {
                heard = run.now();
                run.counts().lines_of_flows += 1;
                sleep(PACE).await;
                None
            }
            (_, Err(_)) => None,
        };
        let now = run.now();
        if leaves(&run, from, to) {
            return;
        }
        let problem = match ended {
            Some(problem) => Some(problem),
            None => is_broken(&run, (from, to), heard, now).then(|| "silent".to_owned()),
        };
        if let Some(problem) = problem {
            // A pod that is deleted at this moment is known to leave before its connections end.
            let silent = (now - heard).as_secs_f64();
            return run.blame(format!(
                "an established connection from pod {from} to pod {to} ({address}): {problem}; the last line was answered {silent:.1} s ago"
            ));
        }
    }
}

fn leaves(run: &Run, from: PodId, to: PodId) -> bool {
    let world = run.world();
    [from, to].iter().any(|id| world.pod(*id).is_none_or(|pod| pod.leaves.is_some()))
}

fn is_broken(run: &Run, (from, to): (PodId, PodId), heard: Moment, now: Moment) -> bool {
    if now - heard < SILENCE {
        return false;
    }
    let world = run.world();
    let (Some(from), Some(to)) = (world.pod(from), world.pod(to)) else { return false };
    let span = Span::new(heard.max(now.saturating_sub(AFTER_TROUBLE)), now);
    !world.weather.loses(from.node, to.node, span)
}

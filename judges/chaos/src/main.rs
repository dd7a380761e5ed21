//! Chaos: a lab under random faults and changes of its objects, while a judge sends allowed and forbidden packets between all pods.
//!
//! All faults and changes follow from a seed ([`plan`]). For each packet, [`oracle`] computes whether it must arrive, may arrive or must not,
//! from the policies and labels that can be in force anywhere at its time. Storms of faults alternate with rests. In a rest, everything
//! must be in force within a bound, and the judge compares every pair of pods exactly.
//!
//! Clock steps are left out: all processes of a lab have the clock of the machine, and Linux has namespaces for monotonic clocks only.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod dice;
mod fault;
mod flows;
mod known;
mod lab;
mod marks;
mod objects;
mod oracle;
mod plan;
mod rules;
mod run;
mod storms;
mod traffic;
mod weather;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::dice::Dice;
use crate::fault::{Datastore, Event, Shape};
use crate::lab::Lab;
use crate::objects::Objects;
use crate::plan::Storm;
use crate::rules::Color;
use crate::run::Run;
use crate::storms::Storms;
use crate::traffic::Traffic;

/// After a storm, all pods must run and everything must be in force within this time. An agent that has ended often is started again
/// after ten seconds, the datastore has to be reached again, and the machine is busy.
const RECOVERY: Duration = Duration::from_secs(90);
/// How long the first pods may take.
const BEGIN: Duration = Duration::from_secs(120);
/// After a rest has begun, packets of before may be under way.
const UNDER_WAY: Duration = Duration::from_secs(7);
/// How long agents may take to serve again when they have got their small disks.
const AGENTS: Duration = Duration::from_secs(30);

/// What the user wants.
#[derive(Debug, Clone, Copy)]
struct Options {
    minutes: u64,
    seed: u64,
    nodes: usize,
    datastore: Datastore,
}

fn main() -> std::process::ExitCode {
    setup::command::main(run)
}

/// `cargo xtask soak chaos [--minutes N] [--seed N] [--nodes N] [--datastore embedded|etcd|kubernetes]`.
fn run(arguments: &[&str]) -> Result<()> {
    let options = options(arguments)?;
    setup::packages::require_root("network namespaces")?;
    if options.datastore != Datastore::Embedded {
        setup::packages::servers()?;
    }
    let program = setup::program("tortie")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(chaos(options, program))
}

fn options(arguments: &[&str]) -> Result<Options> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let seed = u64::from(now.subsec_micros());
    let mut options = Options { minutes: 60, seed, nodes: 10, datastore: Datastore::Embedded };
    for pair in arguments.chunks(2) {
        let [name, value] = pair else { bail!("{} needs a value", pair.join(" ")) };
        let number = || value.parse::<u64>().with_context(|| format!("{name} {value}: that is no number"));
        match *name {
            "--minutes" => options.minutes = number()?,
            "--seed" => options.seed = number()?,
            "--nodes" => options.nodes = usize::try_from(number()?)?,
            "--datastore" => {
                let found = Datastore::ALL.into_iter().find(|datastore| datastore.name() == *value);
                options.datastore = found.with_context(|| format!("there is no datastore {value}"))?;
            }
            other => bail!("{other} is no option of chaos"),
        }
    }
    ensure!((2..=50).contains(&options.nodes), "--nodes {}: 2 to 50 are possible", options.nodes);
    Ok(options)
}

async fn chaos(options: Options, program: PathBuf) -> Result<()> {
    let Options { minutes, seed, nodes, datastore } = options;
    let repeat = format!(
        "cargo xtask soak chaos --minutes {minutes} --seed {seed} --nodes {nodes} --datastore {}",
        datastore.name()
    );
    println!("{repeat}");
    let shape = Shape::new(nodes, datastore);
    let run = Arc::new(Run::new(Lab::up(&program, shape)?, repeat));
    let mut terminate = signal(SignalKind::terminate())?;
    let judged = tokio::select! {
        judged = judge(&run, options) => judged,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow!("asked to end")),
    };
    run.finish();
    let evidence = match judged.is_err() || run.is_wrong() {
        true => Some(run.keep_evidence(&setup::target_folder()?.join(format!("chaos/{seed}")))?),
        false => None,
    };
    println!("faults: {}", run.faults());
    let counts = *run.counts();
    println!(
        "judged: {} packets that had to arrive, {} that must not, {} of which both is right; {} lines of lasting connections",
        counts.allowed, counts.denied, counts.either, counts.lines_of_flows
    );
    let wrong = run.wrong();
    let left = run.lab.down()?;
    if let Some(folder) = evidence {
        println!("kept for whoever looks: {}", folder.display());
    }
    judged?;
    ensure!(wrong.is_empty(), "{} things are wrong", wrong.len());
    ensure!(left.is_empty(), "the lab has left: {}", left.join("; "));
    Ok(())
}

/// Sends packets and carries out storms until the time is over.
async fn judge(run: &Arc<Run>, options: Options) -> Result<()> {
    let traffic = Traffic::new(Arc::clone(run));
    let objects = Objects::new(Arc::clone(run), Arc::clone(&traffic));
    let storms = Storms::new(Arc::clone(run), Arc::clone(&objects));
    prepare(run).await?;
    let mut dice = Dice::new(options.seed);
    let shape = run.lab.shape;
    let colors: Vec<Color> = (0..shape.places()).map(|_| *dice.pick(&Color::ALL)).collect();
    objects.begin(&colors).await?;
    ensure!(
        run::wait_until(BEGIN, || objects.all_run()).await,
        "places without pods: {:?}",
        objects.missing()
    );
    let mut tasks = JoinSet::new();
    (0..shape.nodes()).for_each(|node| drop(tasks.spawn(Arc::clone(&objects).settle(node))));
    tasks.spawn(Arc::clone(&traffic).send_datagrams());
    tasks.spawn(Arc::clone(&traffic).send_connections());
    tasks.spawn(flows::keep(Arc::clone(run), Arc::clone(&traffic), shape.nodes(), dice));
    let end = run.now() + Duration::from_secs(options.minutes * 60);
    let mut number = 0;
    let result = loop {
        if let Err(error) = rest(run, &traffic, &objects, &storms).await {
            break Err(error);
        }
        if run.is_wrong() || run.now() > end {
            break Ok(());
        }
        let planned = plan::storm(options.seed, number, shape);
        println!("{}", plan::shown(number, &planned));
        if let Err(error) = storm(run, &objects, &storms, planned).await {
            break Err(error);
        }
        number += 1;
    };
    tasks.shutdown().await;
    traffic.stations().iter().for_each(|station| traffic.close(station.id));
    run.tell(format!("{number} storms are over"));
    result?;
    check_addresses(run)
}

async fn prepare(run: &Run) -> Result<()> {
    run.lab.prepare_cuts()?;
    run.lab.shrink_disks()?;
    let serve = || {
        let mut nodes = 0..run.lab.shape.nodes();
        nodes.all(|node| run.lab.inside(&run.lab.node_folder(node).join("cni.sock")).exists())
    };
    ensure!(run::wait_until(AGENTS, serve).await, "agents do not serve again on their small disks");
    Ok(())
}

/// Carries out a storm, and waits until all of its faults have healed. It ends early if something is wrong.
async fn storm(
    run: &Arc<Run>,
    objects: &Arc<Objects>,
    storms: &Arc<Storms>,
    Storm(events): Storm,
) -> Result<()> {
    let begun = run.now();
    let mut faults = JoinSet::new();
    let (sender, mut changes) = tokio::sync::mpsc::unbounded_channel();
    let changed = async {
        while let Some(change) = changes.recv().await {
            objects.change(&change).await?;
        }
        anyhow::Ok(())
    };
    let sent = async {
        for (at, event) in events {
            sleep((begun + at).saturating_sub(run.now())).await;
            if run.is_wrong() {
                break;
            }
            match event {
                Event::Fault(fault) => drop(faults.spawn(Arc::clone(storms).fault(fault))),
                Event::Change(change) => drop(sender.send(change)),
            }
        }
        drop(sender);
    };
    // Changes wait while the datastore stands still.
    let ((), changed) = tokio::join!(sent, changed);
    changed?;
    let healed = timeout(RECOVERY, async { while faults.join_next().await.is_some() {} }).await;
    if healed.is_err() {
        run.blame("faults do not heal: an agent does not follow the cluster again");
    }
    Ok(())
}

/// Waits until everything is in force, and judges all pairs exactly.
async fn rest(
    run: &Arc<Run>,
    traffic: &Arc<Traffic>,
    objects: &Arc<Objects>,
    storms: &Arc<Storms>,
) -> Result<()> {
    if run.is_wrong() {
        return Ok(());
    }
    let begun = run.now();
    if !run::wait_until(RECOVERY, || objects.all_run() && run.world().is_settled_everywhere()).await {
        run.blame(format!(
            "not all is in force {} s after the last fault; places without pods: {:?}; {}",
            RECOVERY.as_secs(),
            objects.missing(),
            objects.late()
        ));
        return Ok(());
    }
    for node in 0..run.lab.shape.nodes() {
        let follows = timeout(RECOVERY, objects.node_follows(node)).await;
        if follows.is_err() {
            run.blame(format!("node {node} does not follow the cluster"));
        }
    }
    run.tell(format!("everything is in force after {:.1} s", (run.now() - begun).as_secs_f64()));
    storms.rest();
    sleep(UNDER_WAY).await;
    traffic.try_all().await;
    sleep(UNDER_WAY).await;
    run.tell(format!("all pairs are judged: {:?}", *run.counts()));
    Ok(())
}

/// No address is given twice, or to nobody.
fn check_addresses(run: &Run) -> Result<()> {
    let (text, is_in_order) = run.lab.tortie(&["ipam", "check", "--grace", "0"])?;
    if !is_in_order && !run.is_wrong() {
        run.blame(format!("tortie ipam check: {text}"));
    }
    Ok(())
}

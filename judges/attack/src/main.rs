//! `cargo xtask soak attack`: attacks on nodes, agents and the datastore as programs, in network namespaces.
//!
//! Each attack says what the attacker has and what must hold, counts its attempts, and proves by controls that they are real: the same
//! packet of an allowed sender arrives, or the same packet arrives when nothing guards. An attack whose controls fail is broken, which
//! is a failure of the run, too.
#![allow(clippy::print_stdout, reason = "a program for the terminal of whoever builds")]

mod attack;
mod bgp;
mod claims;
mod floods;
mod half_open;
mod idle;
mod lab;
mod neighbours;
mod options;
mod process;
mod roles;
mod service;
mod spoofing;
mod tracking;
mod wire;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::attack::{Attack, Bounds, Outcome};
use crate::options::Options;

/// All attacks, in the order of a run.
const ATTACKS: [&Attack; 9] = [
    &spoofing::ATTACK,
    &bgp::ATTACK,
    &half_open::ATTACK,
    &idle::ATTACK,
    &roles::ATTACK,
    &floods::ATTACK,
    &claims::ATTACK,
    &tracking::ATTACK,
    &neighbours::ATTACK,
];

fn main() -> ExitCode {
    setup::command::main(run)
}

/// `cargo xtask soak attack [NAME…] [--minutes N] [--seed N]`.
fn run(arguments: &[&str]) -> Result<()> {
    let options = Options::parse(arguments)?;
    setup::packages::require_root("network namespaces")?;
    let program = setup::program("tortie")?;
    println!("seed {}", options.seed);
    let mut results = Vec::new();
    for attack in &options.attacks {
        println!("==> {}: {}\n    must hold: {}", attack.name, attack.attacker, attack.holds);
        let begun = Instant::now();
        let outcome = (attack.run)(&mut Bounds::new(program.clone(), options.seed, options.time));
        let seconds = begun.elapsed().as_secs();
        if let Ok(outcome) = &outcome {
            outcome.notes.iter().for_each(|note| println!("    {note}"));
        }
        results.push((*attack, outcome, seconds));
    }
    report(&options, &results)
}

/// Prints the table, and fails if something got through, or if an attack is broken.
fn report(options: &Options, results: &[(&Attack, Result<Outcome>, u64)]) -> Result<()> {
    println!(
        "\n{:<16} {:>10} {:>10} {:>12} {:>8}  verdict",
        "attack", "attempts", "controls", "got through", "seconds"
    );
    let mut failures = Vec::new();
    for (attack, outcome, seconds) in results {
        let name = attack.name;
        match outcome {
            Ok(outcome) => {
                let through = outcome.through.len();
                let verdict = if through == 0 { "holds" } else { "FAILED" };
                println!(
                    "{name:<16} {:>10} {:>10} {through:>12} {seconds:>8}  {verdict}",
                    outcome.attempts, outcome.controls
                );
                for text in outcome.through.iter().take(SHOWN) {
                    failures.push(format!("{name}: {text}\n  repeat: {}", options.repeat(attack)));
                }
            }
            Err(error) => {
                println!("{name:<16} {:>10} {:>10} {:>12} {seconds:>8}  BROKEN", "-", "-", "-");
                failures.push(format!("{name}: {error:#}\n  repeat: {}", options.repeat(attack)));
            }
        }
    }
    if !failures.is_empty() {
        bail!("attacks failed\n{}", failures.join("\n"));
    }
    Ok(())
}

/// How many of the things that got through are printed for each attack.
const SHOWN: usize = 10;

//! `cargo xtask soak fuzz`: libFuzzer on each parser of what comes from outside.
#![allow(clippy::print_stdout, reason = "a program for the terminal of whoever builds")]

mod fuzzer;
mod keep;
mod options;
mod summary;

use std::process::ExitCode;

use anyhow::{Result, bail};
use judge_fuzz::Target;

use crate::fuzzer::{Fuzzer, Outcome};
use crate::options::{Options, Work};

fn main() -> ExitCode {
    setup::command::main(|words| run(&Options::parse(words)?))
}

fn run(options: &Options) -> Result<()> {
    let fuzzer = Fuzzer::build()?;
    match &options.work {
        Work::Repeat(target, input) => fuzzer.repeat(target, input),
        Work::Keep => options.targets.iter().try_for_each(|target| keep::keep(&fuzzer, target)),
        Work::Search { seconds, cases, seed } => {
            println!("seed {seed}");
            let search = |target: &&'static Target| fuzzer.search(target, *seconds, *cases, *seed);
            let outcomes = options.targets.iter().map(search).collect::<Result<Vec<_>>>()?;
            report(&outcomes)
        }
    }
}

/// Prints what was run, and fails if a target has failed.
fn report(outcomes: &[Outcome]) -> Result<()> {
    println!("\n{:<24} {:>12} {:>8} {:>8}  result", "target", "cases", "edges", "seconds");
    for Outcome { target, summary, seconds, failure } in outcomes {
        let result = if failure.is_some() { "FAILED" } else { "ok" };
        println!("{target:<24} {:>12} {:>8} {seconds:>8}  {result}", summary.cases, summary.edges);
    }
    let failures: Vec<&str> = outcomes.iter().filter_map(|outcome| outcome.failure.as_deref()).collect();
    if !failures.is_empty() {
        bail!("{} of {} targets failed\n{}", failures.len(), outcomes.len(), failures.join("\n"));
    }
    Ok(())
}

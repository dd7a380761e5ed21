//! `cargo xtask wine`: the shipped programs for Windows under Wine, on an emulated HNS that they reach by `computenetwork.dll`.

mod cluster;
mod prefix;
mod scenario;

use std::time::Instant;

use anyhow::Result;

use crate::{step, windows};

/// Builds the programs and runs the scenario.
pub(crate) fn run() -> Result<()> {
    let built = windows::build()?;
    let started = Instant::now();
    step("tortie.exe and tortie-cni.exe under Wine", || scenario::run(&built))?;
    println!("==> it took {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

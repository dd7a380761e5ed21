//! `cargo xtask wine`: the shipped programs for Windows under Wine, on an emulated HNS that they reach by `computenetwork.dll`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod bgp;
mod clients;
mod cluster;
mod flannel;
mod frames;
mod kube_proxy;
mod lab;
mod linux_node;
mod plugins;
mod powershell;
mod prefix;
mod scenario;
mod underlay;
mod wait;

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use setup::{step, windows};
use tortie_servers::wine::HNS_ADDRESS;

use self::cluster::Hns;
use self::prefix::Prefix;

fn main() -> std::process::ExitCode {
    setup::command::main(run)
}

/// `cargo xtask wine`.
fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        [] => scenario(),
        ["clients"] => clients::run(None),
        ["clients", "--short"] => clients::run_short(),
        ["clients", name] => clients::run(Some(name)),
        ["exec", program, arguments @ ..] => execute(Path::new(program), arguments),
        _ => bail!("cargo xtask wine takes nothing, clients [NAME|--short], or exec PROGRAM [ARGS]"),
    }
}

/// Runs any Windows program on a machine with an emulated HNS, which accepts what HNS accepts.
fn execute(program: &Path, arguments: &[&str]) -> Result<()> {
    let libraries = windows::libraries()?;
    use tortie_hns_emulator::Config;
    let hns = Hns::start(Config::as_hns(Config::NEWEST, cluster::ADDRESS))?;
    let machine = Prefix::new(&libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
    let status = machine.command(program).args(arguments).status()?;
    println!("==> {} handles are open", hns.service.open_handles().len());
    if !status.success() {
        bail!("{}: {status}", program.display());
    }
    Ok(())
}

/// Builds the programs, and runs the scenario and labs.
fn scenario() -> Result<()> {
    let built = windows::build()?;
    let started = Instant::now();
    step("tortie.exe and tortie-cni.exe under Wine", || scenario::run(&built))?;
    step("the demo of the lab prints the same tables under Wine", lab::demo)?;
    step("a lab under Wine leaves nothing", lab::up_and_down)?;
    step("a lab that is interrupted while it makes its machines leaves nothing", lab::interrupted)?;
    println!("==> it took {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

//! Replays files of published verdicts: compressed JSON Lines, each line a case with its expected answer.
//!
//! The fields of the first line determine the format of a file:
//!
//! | fields | module | judges |
//! |---|---|---|
//! | `policies`, `rows` | [`cyclonus`] | program, oracle, kernel, emulator |
//! | `objects`, `flows` | [`clusters`] | program, oracle, kernel, emulator |
//! | `object`, `accepted` | [`validation`], [`definitions`] | the manifest reader; with `--on server`, the API server |
//! | `selector`, `canonical` | [`selectors`] | the selector parser |
//! | `document`, `stored` | [`stored`], [`in_etcd`] | the form of stored objects; with `--on etcd`, Tortie's client of etcd |
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod clusters;
mod cyclonus;
mod definitions;
mod in_etcd;
mod rendered;
mod selectors;
mod stored;
mod validation;

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use testkit::emulator::{RENDERINGS, Rendering};
use tortie_hcn::Version;
use tortie_hns_emulator::Config as HnsConfig;

/// How many differences are printed.
const SHOWN: usize = 20;
/// An exception may explain at most one of this many cases.
const EXCEPTIONS_AT_MOST_ONE_IN: usize = 50;

/// The judge.
#[derive(Debug, Clone, Copy)]
enum On {
    /// The programs that calc compiles, evaluated in memory.
    Program,
    /// The evaluator that reads the resources themselves.
    Oracle,
    /// This machine's kernel, with packets between namespaces.
    Kernel,
    /// Windows nodes with the preset of an emulated HNS of this version, and a rendering of policy.
    Emulator(Version, Rendering),
}

impl fmt::Display for On {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program => f.write_str("program"),
            Self::Oracle => f.write_str("oracle"),
            Self::Kernel => f.write_str("kernel"),
            Self::Emulator(version, rendering) => write!(f, "emulator (HNS {version}, {})", rendering.name),
        }
    }
}

/// Every HNS with every rendering that it supports.
fn emulators() -> Vec<On> {
    let versions = [HnsConfig::SERVER_2019, HnsConfig::SERVER_2022, HnsConfig::NEWEST];
    let suiting = |version| {
        let suits = move |rendering: &&Rendering| (rendering.suits)(&hns(version));
        RENDERINGS.iter().filter(suits).map(move |rendering| On::Emulator(version, *rendering))
    };
    versions.into_iter().flat_map(suiting).collect()
}

fn hns(version: Version) -> HnsConfig {
    HnsConfig::new(version, Ipv4Addr::UNSPECIFIED)
}

/// The result of one file.
#[derive(Default)]
struct Tally {
    /// How many answers were compared.
    cases: usize,
    /// How many answers of the file do not concern the judge, by reason.
    left_out: BTreeMap<&'static str, usize>,
    /// How many answers differ for a known reason, by its name.
    exceptions: BTreeMap<&'static str, usize>,
    differences: Vec<String>,
}

impl Tally {
    fn leave_out(&mut self, reason: &'static str, count: usize) {
        *self.left_out.entry(reason).or_default() += count;
    }

    fn except(&mut self, name: &'static str) {
        *self.exceptions.entry(name).or_default() += 1;
    }

    /// Prints the result, and returns the number of differences.
    fn close(self, file: &str, judge: &dyn fmt::Display, begun: Instant) -> Result<usize> {
        for difference in self.differences.iter().take(SHOWN) {
            println!("  {difference}");
        }
        let counted = |counts: &BTreeMap<&'static str, usize>, word: &str| -> String {
            counts.iter().map(|(name, count)| format!("{count} {word}: {name}; ")).collect()
        };
        println!(
            "{file} on {judge}: {} compared; {}{}{} differences; {:.2} s",
            self.cases,
            counted(&self.left_out, "left out"),
            counted(&self.exceptions, "excepted"),
            self.differences.len(),
            begun.elapsed().as_secs_f64(),
        );
        if self.exceptions.values().any(|count| count * EXCEPTIONS_AT_MOST_ONE_IN >= self.cases) {
            bail!("{file}: too many cases are excepted: {:?}", self.exceptions);
        }
        if self.cases == 0 {
            bail!("{file} holds nothing that can be judged");
        }
        Ok(self.differences.len())
    }
}

fn main() -> std::process::ExitCode {
    setup::command::main(run)
}

/// `cargo xtask vectors FILE… [--on program|oracle|kernel|emulator|server|etcd]`.
fn run(arguments: &[&str]) -> Result<()> {
    let (files, on) = match arguments {
        [files @ .., "--on", on] => (files, *on),
        files => (files, "program"),
    };
    let judges = match on {
        "program" => vec![On::Program],
        "oracle" => vec![On::Oracle],
        "kernel" => vec![On::Kernel],
        "emulator" => emulators(),
        "server" | "etcd" => vec![],
        other => {
            bail!("--on {other:?} does not exist; choose program, oracle, kernel, emulator, server or etcd")
        }
    };
    if files.is_empty() {
        bail!("name at least one file");
    }
    let mut different = 0;
    for file in files {
        let text = read(file)?;
        let lines = lines(file, &text)?;
        let first = lines.first().with_context(|| format!("{file} is empty"))?;
        different += if first["selector"].is_string() {
            selectors::replay(file, &lines)?
        } else if first["stored"].is_object() && on == "etcd" {
            in_etcd::replay(file, &lines)?
        } else if on == "etcd" {
            bail!("{file}: --on etcd judges files of stored objects only");
        } else if first["stored"].is_object() {
            stored::replay(file, &lines)?
        } else if first["object"].is_object() && on == "server" {
            definitions::replay(file, &lines)?
        } else if on == "server" {
            bail!("{file}: --on server judges files of objects only");
        } else if first["object"].is_object() {
            validation::replay(file, &lines)?
        } else if first["flows"].is_array() {
            judges.iter().map(|on| clusters::replay(file, &lines, *on)).sum::<Result<usize>>()?
        } else {
            judges.iter().map(|on| cyclonus::replay(file, &lines, *on)).sum::<Result<usize>>()?
        };
    }
    if different > 0 {
        bail!("{different} answers differ");
    }
    Ok(())
}

fn lines(file: &str, text: &str) -> Result<Vec<Value>> {
    let parse = |(number, line)| serde_json::from_str(line).with_context(|| format!("{file}:{}", number + 1));
    text.lines().enumerate().map(parse).collect()
}

fn read(file: &str) -> Result<String> {
    if !file.ends_with(".gz") {
        return std::fs::read_to_string(file).with_context(|| file.to_owned());
    }
    let output = Command::new("gzip").args(["-dc", file]).output().context("gzip")?;
    if !output.status.success() {
        bail!("{file}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| file.to_owned())
}

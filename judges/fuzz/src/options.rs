//! The arguments.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use judge_fuzz::{TARGETS, Target, target};

/// How long each target runs if nothing else is said.
const SECONDS: u64 = 60;
const USAGE: &str = "cargo xtask soak fuzz [TARGET…] [--seconds N] [--cases N] [--seed N]   searches
cargo xtask soak fuzz TARGET --input FILE                             repeats one input
cargo xtask soak fuzz [TARGET…] --keep                                adds to judges/fuzz/corpus what a search has found";

/// What to do.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) targets: Vec<&'static Target>,
    pub(crate) work: Work,
}

#[derive(Debug)]
pub(crate) enum Work {
    Search { seconds: u64, cases: Option<u64>, seed: u32 },
    Repeat(&'static Target, PathBuf),
    Keep,
}

impl Options {
    /// Reads the arguments.
    pub(crate) fn parse(words: &[&str]) -> Result<Self> {
        let (mut targets, mut seconds, mut cases) = (Vec::new(), SECONDS, None);
        let (mut seed, mut input, mut keep) = (fresh_seed(), None, false);
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value\n{USAGE}"));
            match *word {
                "--seconds" => seconds = value()?.parse().context("--seconds")?,
                "--cases" => cases = Some(value()?.parse().context("--cases")?),
                "--seed" => seed = value()?.parse().context("--seed")?,
                "--input" => input = Some(PathBuf::from(value()?)),
                "--keep" => keep = true,
                name => match target(name) {
                    Some(target) => targets.push(target),
                    None => bail!("there is no target {name}; there are {}\n{USAGE}", names()),
                },
            }
        }
        let work = match (input, keep, targets.as_slice()) {
            (None, false, _) => Work::Search { seconds, cases, seed },
            (None, true, _) => Work::Keep,
            (Some(input), false, [target]) => Work::Repeat(target, input),
            _ => bail!("--input needs one target\n{USAGE}"),
        };
        if targets.is_empty() {
            targets.extend(TARGETS);
        }
        Ok(Self { targets, work })
    }
}

fn names() -> String {
    TARGETS.iter().map(|target| target.name).collect::<Vec<_>>().join(", ")
}

/// Another number each time; libFuzzer would take 0 as none.
fn fresh_seed() -> u32 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.subsec_nanos().max(1)
}

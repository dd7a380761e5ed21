//! Adds what searches have found to the repository, as few and small inputs as possible.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use judge_fuzz::Target;
use setup::run;

use crate::fuzzer::Fuzzer;

/// The most inputs of a target, beside those with names.
const MOST_INPUTS: usize = 30;
/// Their size together, in bytes.
const MOST_BYTES: u64 = 6_000;
/// The size of the largest input that is kept, in bytes.
const LARGEST: usize = 1_500;

/// Replaces the committed inputs of a target by a smallest set that reaches the same branches, and those that searches have found. Inputs whose names
/// people have chosen stay. If there are too many, some of each size stay.
pub(crate) fn keep(fuzzer: &Fuzzer, target: &Target) -> Result<()> {
    let (committed, found) = (Fuzzer::committed(target)?, fuzzer.found(target)?);
    let chosen = fuzzer.made("chosen", target.name)?;
    fs::remove_dir_all(&chosen)?;
    fs::create_dir_all(&chosen)?;
    fs::create_dir_all(&committed)?;
    for file in files(&committed)?.iter().filter(|file| has_chosen_name(file)) {
        fs::copy(file, chosen.join(file.file_name().unwrap_or_default()))?;
    }
    let mut command = fuzzer.command(target)?;
    // A set that covers branches; how often each is taken does not count.
    command.args(["-set_cover_merge=1", "-use_counters=0", &format!("-max_len={LARGEST}")]);
    run(command.arg(&chosen).arg(&committed).arg(found))?;
    let size = |file: &PathBuf| fs::metadata(file).map_or(u64::MAX, |file| file.len());
    let mut new: Vec<PathBuf> = files(&chosen)?;
    new.retain(|file| !has_chosen_name(file));
    new.sort_by_key(|file| (size(file), file.clone()));
    for file in files(&committed)?.iter().filter(|file| !has_chosen_name(file)) {
        fs::remove_file(file)?;
    }
    let mut left = MOST_BYTES;
    // Small ones and large ones.
    let step = new.len().div_ceil(MOST_INPUTS).max(1);
    new = new.into_iter().step_by(step).collect();
    new.retain(|file| left.checked_sub(size(file)).map(|rest| left = rest).is_some());
    for file in &new {
        fs::copy(file, committed.join(file.file_name().unwrap_or_default()))?;
    }
    println!("==> {}: {} inputs beside those with names", target.name, new.len());
    Ok(())
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

/// True if people have named the file. libFuzzer's names are hashes.
fn has_chosen_name(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.len() != 40 || !name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

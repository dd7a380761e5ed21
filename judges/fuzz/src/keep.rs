//! Adds what searches have found to the repository, as few and small inputs as possible.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use judge_fuzz::Target;
use setup::run;

use crate::fuzzer::Fuzzer;

/// The most inputs of a target.
const MOST_INPUTS: usize = 40;
/// The size of the largest input that is kept, in bytes.
const LARGEST: usize = 1500;

/// Replaces the committed inputs of a target by a smallest set that reaches the same branches, and those that searches have found. Inputs whose names
/// people have chosen stay. If there are too many, the smallest ones stay.
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
    let mut new: Vec<PathBuf> = files(&chosen)?;
    new.retain(|file| !has_chosen_name(file));
    new.sort_by_key(|file| fs::metadata(file).map_or(u64::MAX, |file| file.len()));
    for file in files(&committed)?.iter().filter(|file| !has_chosen_name(file)) {
        fs::remove_file(file)?;
    }
    new.truncate(MOST_INPUTS);
    for file in &new {
        fs::copy(file, committed.join(file.file_name().unwrap_or_default()))?;
    }
    println!("==> {}: {} inputs beside those with names", target.name, new.len());
    Ok(())
}

fn files(folder: &std::path::Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

/// True if people have named the file. libFuzzer's names are hashes.
fn has_chosen_name(file: &std::path::Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.len() != 40 || !name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

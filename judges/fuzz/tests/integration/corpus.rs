use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use judge_fuzz::{Bound, TARGETS, run};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What the repository may have of inputs, in bytes.
const MOST_BYTES: u64 = 300_000;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn inputs(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// One test for all, because it measures the memory of the process.
#[test]
fn no_input_of_the_corpus_causes_a_panic_or_needs_too_much_memory() {
    let mut excesses = Vec::new();
    for target in TARGETS {
        let files = inputs(&corpus().join(target.name));
        assert!(!files.is_empty(), "{} has no inputs", target.name);
        for file in files {
            let input = fs::read(&file).unwrap();
            // A panic tells the rest.
            println!("{}", file.display());
            excesses.extend(
                run(target, &input, &MEMORY).err().map(|excess| format!("{}: {excess}", file.display())),
            );
        }
    }
    assert!(excesses.is_empty(), "{}", excesses.join("\n"));
}

#[test]
fn the_corpus_is_small_and_each_folder_belongs_to_a_target() {
    let folders = inputs(&corpus());
    let names: BTreeSet<&str> =
        folders.iter().map(|folder| folder.file_name().unwrap().to_str().unwrap()).collect();
    let targets: BTreeSet<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, targets);
    assert_eq!(targets.len(), TARGETS.len(), "two targets have one name");
    let files = folders.iter().flat_map(|folder| inputs(folder));
    let size: u64 = files.map(|file| fs::metadata(file).unwrap().len()).sum();
    assert!(size <= MOST_BYTES, "{size} bytes; `cargo xtask soak fuzz --keep` leaves out what is not needed");
}

#[test]
fn unusual_bounds_have_reasons() {
    for target in TARGETS {
        assert_eq!(target.bound == Bound::USUAL, target.bound.reason.is_empty(), "{}", target.name);
    }
}

//! `cargo xtask mutations`: applies the mistakes in `tests/mutations` one after another, and reports which of them tests notice.
//!
//! The header of a patch says what it breaks, and which arguments of `cargo test` choose the test. The tests run in a git
//! worktree of HEAD in `target/mutations`, which stays. The environment passes through (`PROPTEST_RNG_SEED`).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

/// The time limit of a test, for timeout(1), which ends with 124 after that, or with 137 if it had to kill.
const LIMIT: &str = "20m";

/// A mistake.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Mutation {
    /// The arguments of `cargo test`.
    test: Vec<String>,
    /// The first file that it changes. Mutations of one file come together, because they build the same crates again.
    file: String,
    name: String,
}

/// Runs the mutations of these names, or all.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let names: Vec<&str> = arguments.iter().copied().filter(|word| *word != "--skip-baseline").collect();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent folder")?;
    let folder = workspace.join("tests/mutations");
    let mutations = chosen(&folder, &names)?;
    let tree = worktree(workspace)?;
    if names.len() == arguments.len() {
        for same_test in mutations.chunk_by(|one, next| one.test == next.test) {
            let test = &same_test[0].test;
            let outcome = judge(&tree, test, "baseline")?;
            ensure!(outcome == "SURVIVED", "{test:?} must pass as it is; see {}", outputs(&tree).display());
        }
    }
    let mut caught = 0;
    for Mutation { test, name, .. } in &mutations {
        let start = Instant::now();
        let outcome = match git(&tree, &["apply", &format!("{}/{name}.patch", folder.display())]) {
            Ok(_) => judge(&tree, test, name)?,
            Err(_) => "does not apply",
        };
        println!("{:>5} s  {outcome:16} {name}", start.elapsed().as_secs());
        caught += usize::from(outcome == "caught");
        git(&tree, &["checkout", "--quiet", "--force", "HEAD", "--", "."])?;
    }
    println!("{caught} of {} mutations caught", mutations.len());
    ensure!(caught == mutations.len(), "the output of the tests is in {}", outputs(&tree).display());
    Ok(())
}

/// The mutations in the folder, in the order in which they run.
fn chosen(folder: &Path, names: &[&str]) -> Result<Vec<Mutation>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        all.push(parse(&name, &fs::read_to_string(&path)?).with_context(|| path.display().to_string())?);
    }
    all.retain(|mutation| names.is_empty() || names.contains(&mutation.name.as_str()));
    ensure!(all.len() >= names.len().max(1), "not all of {names:?} are in {}", folder.display());
    all.sort();
    Ok(all)
}

/// Reads the header of a patch, and the name of the file that it changes first.
fn parse(name: &str, text: &str) -> Result<Mutation> {
    let field = |begin: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(begin)).map(str::trim);
        value.filter(|value| !value.is_empty()).with_context(|| format!("no line begins with {begin:?}"))
    };
    field("Breaks:")?;
    let (package, words) = (field("Package:")?, field("Caught by:")?.split_whitespace());
    let test = ["-p", package].into_iter().chain(words).map(str::to_owned).collect();
    Ok(Mutation { test, file: field("--- a/")?.to_owned(), name: name.to_owned() })
}

/// The worktree at HEAD, without changes of an earlier run.
fn worktree(workspace: &Path) -> Result<PathBuf> {
    let (tree, head) = (workspace.join("target/mutations"), git(workspace, &["rev-parse", "HEAD"])?);
    if !tree.join(".git").exists() {
        let path = tree.to_string_lossy();
        git(workspace, &["worktree", "add", "--quiet", "--force", "--detach", &path, &head])?;
    }
    git(&tree, &["checkout", "--quiet", "--force", "--detach", &head])?;
    fs::create_dir_all(outputs(&tree))?;
    Ok(tree)
}

fn outputs(tree: &Path) -> PathBuf {
    tree.join("target/output")
}

fn git(folder: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).current_dir(folder).output()?;
    ensure!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Builds a test and then runs it. What fails to build is no proof, and a test that runs for too long is none either.
fn judge(tree: &Path, test: &[String], name: &str) -> Result<&'static str> {
    let path = outputs(tree).join(format!("{name}.txt"));
    let file = File::create(&path)?;
    let cargo = |limit: &str, last: &[&str]| -> Result<Option<i32>> {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", limit]).arg(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        command.arg("test").args(test).args(last).current_dir(tree);
        // The smallest case that fails does not matter here.
        command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env_remove("CARGO_TARGET_DIR");
        Ok(command.stdout(file.try_clone()?).stderr(file.try_clone()?).status()?.code())
    };
    Ok(match (cargo("0", &["--no-run"])?, || cargo(LIMIT, &[])) {
        (Some(0), run) => match run()? {
            Some(0) if !has_passed(&fs::read_to_string(path)?) => "RUNS NO TEST",
            Some(0) => "SURVIVED",
            Some(124 | 137) => "TIMED OUT",
            _ => "caught",
        },
        _ => "does not compile",
    })
}

/// True if a test has passed. It is false if no test has the name.
fn has_passed(output: &str) -> bool {
    output.lines().any(|line| line.starts_with("test result: ok. ") && !line.contains(" 0 passed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_and_demanded() {
        let text = "Breaks: x\nPackage: p\nCaught by: --test t n\n\n--- a/f.rs\n+++ b/f.rs\n";
        let test = ["-p", "p", "--test", "t", "n"].map(str::to_owned).to_vec();
        assert_eq!(parse("m", text).unwrap(), Mutation { test, file: "f.rs".into(), name: "m".into() });
        for line in text.lines().filter(|line| line.contains(": ") || line.starts_with("---")) {
            assert!(parse("m", &text.replace(line, "")).is_err(), "{line}");
        }
        assert!(has_passed("x\ntest result: ok. 1 passed; 0 failed"));
        assert!(!has_passed("test result: ok. 0 passed; 0 failed\ntest result: FAILED. 1 passed; 1 failed"));
    }
}

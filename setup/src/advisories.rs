//! Known advisories about the libraries in Cargo.lock, and yanked versions, by cargo-deny.

use std::process::Command;

use anyhow::{Context as _, Result};

use crate::command::{cargo_program, run, target_folder, workspace};

/// The program and its version. Cargo builds it in two to four minutes, once for each build folder.
const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// The lock files: of all programs, and of the fuzzer.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];

/// Checks that no library has a known advisory, and that no version was yanked.
///
/// The registry lists yanked versions. cargo-deny clones the database of advisories (RustSec) with Git; `git config
/// url.MIRROR.insteadOf` makes it use a mirror.
///
/// # Errors
/// A library is concerned, or cargo-deny cannot be built or reach the registry or the database.
pub fn check() -> Result<()> {
    let tools = target_folder()?.join("tools");
    run(cargo_program().args(["install", "--quiet", "--locked", "--root"]).arg(&tools).arg(CARGO_DENY))
        .context("build cargo-deny")?;
    for manifest in MANIFESTS {
        let mut deny = Command::new(tools.join("bin/cargo-deny"));
        deny.arg("--manifest-path").arg(workspace()?.join(manifest));
        deny.arg("--config").arg(workspace()?.join("deny.toml")).args(["check", "advisories"]);
        run(&mut deny).with_context(|| format!("advisories of {manifest}"))?;
    }
    Ok(())
}

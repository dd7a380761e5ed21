//! `cargo xtask manifests`: writes the generated files in `deploy/`. A test of `crates/deploy` compares them.

use anyhow::{Context, Result};

use crate::workspace;

/// Writes the files.
pub(crate) fn write() -> Result<()> {
    let folder = workspace()?.join("deploy");
    // No file of an earlier version stays.
    let chart = folder.join("helm");
    if chart.exists() {
        std::fs::remove_dir_all(&chart).with_context(|| chart.display().to_string())?;
    }
    for file in tortie_deploy::files() {
        let path = folder.join(&file.path);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&path, &file.text).with_context(|| path.display().to_string())?;
        println!("deploy/{}", file.path);
    }
    Ok(())
}

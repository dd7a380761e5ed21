//! `tortie node cleanup --calico`: removes what Calico has left on this node.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use tortie_linux::calico::Found;

use super::configurations;

/// The credentials of Calico's plugin, beside its configuration.
const CREDENTIALS: &str = "calico-kubeconfig";

/// Removes it, or only says what it is. Every step can be repeated.
pub(super) fn remove(cni_conf_dir: &Path, dry_run: bool) -> anyhow::Result<ExitCode> {
    let config = tortie_linux::dataplane::Config::default();
    let found = Found::find(&config).context("looking for what Calico has left")?;
    let files = configurations::of_plugin(cni_conf_dir, "calico", &[CREDENTIALS])?;
    for note in found.notes() {
        anstream::println!("note: {note}");
    }
    if found.is_empty() && files.is_empty() {
        anstream::println!("Calico has left nothing on this node");
        return Ok(ExitCode::SUCCESS);
    }
    let listed = files.iter().map(|file| format!("file {}\n", file.display())).collect::<String>();
    anstream::print!("{}{found}{listed}", if dry_run { "would remove:\n" } else { "removing:\n" });
    if dry_run {
        if let Some(sign) = tortie_linux::calico::running() {
            anstream::println!("but Calico runs on this node: {sign}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !files.is_empty() {
        configurations::check_own(cni_conf_dir, "Calico")?;
    }
    found.remove(&config).context("removing what Calico has left")?;
    configurations::remove(&files)?;
    Ok(ExitCode::SUCCESS)
}

//! `tortie node cleanup --calico`: removes what Calico has left on this node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use anyhow::{Context, bail};
use tortie_deploy::CNI_CONFIG_FILE;
use tortie_linux::calico::Found;

use super::remove as remove_file;

/// The credentials of Calico's plugin, beside its configuration.
const CREDENTIALS: &str = "calico-kubeconfig";

/// Removes it, or only says what it is. Every step can be repeated.
pub(super) fn remove(cni_conf_dir: &Path, dry_run: bool) -> anyhow::Result<ExitCode> {
    let config = tortie_linux::dataplane::Config::default();
    let found = Found::find(&config).context("looking for what Calico has left")?;
    let files = files(cni_conf_dir)?;
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
    let own = cni_conf_dir.join(CNI_CONFIG_FILE);
    if !files.is_empty() && !own.exists() {
        bail!(
            "{} does not exist, so the container runtime would have no network without Calico's configuration; wait until \
             Tortie's agent is ready",
            own.display()
        );
    }
    found.remove(&config).context("removing what Calico has left")?;
    files.iter().try_for_each(|file| remove_file(file))?;
    Ok(ExitCode::SUCCESS)
}

/// The files of Calico in the folder of network configurations. Pods need no plugin of Calico to be removed, unless the
/// runtime remembers which one made them, so plugins stay.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| folder.display().to_string())?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name == CREDENTIALS) || calls_calico(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether this is a network configuration whose first plugin is Calico's.
fn calls_calico(path: &Path) -> bool {
    let is_configuration = path
        .extension()
        .is_some_and(|ending| ["conf", "conflist", "json"].iter().any(|known| ending == *known));
    let text = if is_configuration { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
    let Ok(config) = serde_json::from_str::<serde_json::Value>(&text) else { return false };
    config["type"] == "calico" || config["plugins"][0]["type"] == "calico"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_configurations_of_calico_are_its_files() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("00-tortie.conflist", r#"{"plugins": [{"type": "tortie-cni"}]}"#),
            (
                "10-calico.conflist",
                r#"{"name": "k8s-pod-network", "plugins": [{"type": "calico"}, {"type": "portmap"}]}"#,
            ),
            ("20-old.conf", r#"{"type": "calico"}"#),
            ("30-other.conflist", r#"{"plugins": [{"type": "bridge"}, {"type": "calico"}]}"#),
            ("40-broken.conflist", "{\"type\": \"calico\""),
            ("50-calico.conflist.bak", r#"{"type": "calico"}"#),
            ("calico-kubeconfig", "apiVersion: v1"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let names: Vec<_> =
            files(folder.path()).unwrap().iter().map(|path| path.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["10-calico.conflist", "20-old.conf", "calico-kubeconfig"]);
        assert_eq!(files(&folder.path().join("missing")).unwrap(), Vec::<PathBuf>::new());
    }
}

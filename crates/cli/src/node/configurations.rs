//! The network configurations of another plugin in the folder of the container runtime.

use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, bail};
use tortie_deploy::CNI_CONFIG_FILE;

use super::remove as remove_file;

/// The configurations whose first plugin has this type, and the files with these names. Pods need no plugin to be removed, unless the
/// runtime remembers which one made them, so plugins stay.
pub(super) fn of_plugin(folder: &Path, plugin: &str, names: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| folder.display().to_string())?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let is_named = path.file_name().is_some_and(|name| names.iter().any(|known| name == *known));
        if is_named || calls(&path, plugin) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether this is a network configuration whose first plugin has this type.
fn calls(path: &Path, plugin: &str) -> bool {
    let is_configuration = path
        .extension()
        .is_some_and(|ending| ["conf", "conflist", "json"].iter().any(|known| ending == *known));
    let text = if is_configuration { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
    let Ok(config) = serde_json::from_str::<serde_json::Value>(&text) else { return false };
    config["type"] == plugin || config["plugins"][0]["type"] == plugin
}

/// Refuses to leave the container runtime without any network configuration.
pub(super) fn check_own(folder: &Path, owner: &str) -> anyhow::Result<()> {
    let own = folder.join(CNI_CONFIG_FILE);
    if !own.exists() {
        bail!(
            "{} does not exist, so the container runtime would have no network without {owner}'s configuration; wait until \
             Tortie's agent is ready, or name the runtime's folder by --cni-conf-dir",
            own.display()
        );
    }
    Ok(())
}

pub(super) fn remove(files: &[PathBuf]) -> anyhow::Result<()> {
    files.iter().try_for_each(|file| remove_file(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_configurations_of_the_plugin_are_its_files() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("00-tortie.conflist", r#"{"plugins": [{"type": "tortie-cni"}]}"#),
            (
                "10-calico.conflist",
                r#"{"name": "k8s-pod-network", "plugins": [{"type": "calico"}, {"type": "portmap"}]}"#,
            ),
            (
                "10-flannel.conflist",
                r#"{"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "portmap"}]}"#,
            ),
            ("20-old.conf", r#"{"type": "calico"}"#),
            ("30-other.conflist", r#"{"plugins": [{"type": "bridge"}, {"type": "calico"}]}"#),
            ("40-broken.conflist", "{\"type\": \"calico\""),
            ("50-calico.conflist.bak", r#"{"type": "calico"}"#),
            ("calico-kubeconfig", "apiVersion: v1"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let names = |plugin: &str, named: &[&str]| {
            let files = of_plugin(folder.path(), plugin, named).unwrap();
            files.iter().map(|path| path.file_name().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let of_calico = ["10-calico.conflist", "20-old.conf", "calico-kubeconfig"];
        assert_eq!(names("calico", &["calico-kubeconfig"]), of_calico);
        assert_eq!(names("flannel", &[]), ["10-flannel.conflist"]);
        assert_eq!(of_plugin(&folder.path().join("missing"), "calico", &[]).unwrap(), Vec::<PathBuf>::new());
    }
}

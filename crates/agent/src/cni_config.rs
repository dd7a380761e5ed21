//! The configuration by which the container runtime calls the plugin. It is written when the agent serves ADD, because
//! kubelets report a node as ready as soon as it exists.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use tortie_deploy::{CNI_CONFIG_FILE, ChainedPlugins, cni_config};

/// Writes the configuration to the runtime's folder. Runtimes see either the old file or the complete new one. Returns the
/// name of a file that the runtime uses instead, if there is one.
pub(crate) fn write(folder: &Path, chained: &ChainedPlugins) -> io::Result<Option<String>> {
    let text = format!("{:#}\n", cni_config(chained));
    let path = folder.join(CNI_CONFIG_FILE);
    if fs::read_to_string(&path).is_ok_and(|current| current == text) {
        return preceding(folder);
    }
    fs::create_dir_all(folder)?;
    // Runtimes ignore other endings.
    let unfinished = folder.join(format!(".{CNI_CONFIG_FILE}.unfinished"));
    let mut file = File::create(&unfinished)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, &path)?;
    tracing::info!(file = %path.display(), "wrote the CNI configuration");
    preceding(folder)
}

/// The first configuration of the folder, if it is not Tortie's.
fn preceding(folder: &Path) -> io::Result<Option<String>> {
    let mut first: Option<String> = None;
    for entry in fs::read_dir(folder)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let is_configuration = [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending));
        if is_configuration && first.as_ref().is_none_or(|first| name < *first) {
            first = Some(name);
        }
    }
    Ok(first.filter(|first| first != CNI_CONFIG_FILE))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_file_is_complete_and_written_only_when_it_differs() {
        let (folder, none) = (tempfile::tempdir().unwrap(), ChainedPlugins::default());
        let (conf_dir, file) =
            (folder.path().join("net.d"), folder.path().join("net.d").join(CNI_CONFIG_FILE));
        write(&conf_dir, &none).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), cni_config(&none));
        let inode = fs::metadata(&file).unwrap().ino();
        write(&conf_dir, &none).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().ino(), inode);
        fs::write(&file, "{").unwrap();
        write(&conf_dir, &none).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert_eq!(fs::read_dir(&conf_dir).unwrap().count(), 1);
    }

    #[test]
    fn another_configuration_that_comes_first_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for (name, expected) in [
            ("10-calico.conflist", None),
            ("00-multus.conf.disabled", None),
            ("00-multus.conf", Some("00-multus.conf")),
            ("00-a.json", Some("00-a.json")),
        ] {
            fs::write(folder.path().join(name), "{}").unwrap();
            assert_eq!(
                write(folder.path(), &ChainedPlugins::default()).unwrap().as_deref(),
                expected,
                "{name}"
            );
        }
    }
}

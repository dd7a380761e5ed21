//! `tortie node`: what an installation does on a node beside the agent.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use tortie_deploy::CNI_PLUGIN;

#[derive(clap::Subcommand)]
pub(crate) enum NodeCommand {
    /// Install the CNI plugin for the container runtime
    InstallPlugin(InstallPlugin),
}

#[derive(clap::Args)]
pub(crate) struct InstallPlugin {
    /// Where the container runtime looks for plugins
    #[arg(long, value_name = "FOLDER", default_value = "/opt/cni/bin")]
    to: PathBuf,
    /// The plugin; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

impl NodeCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::InstallPlugin(install) => install.run(),
        }
    }
}

impl InstallPlugin {
    fn run(self) -> anyhow::Result<ExitCode> {
        let from = match self.from {
            Some(from) => from,
            None => std::env::current_exe()?.with_file_name(CNI_PLUGIN),
        };
        let to = self.to.join(CNI_PLUGIN);
        let program = fs::read(&from).with_context(|| format!("the plugin {}", from.display()))?;
        let is_new = install(&program, &to).with_context(|| format!("installing {}", to.display()))?;
        let outcome = if is_new { "installed" } else { "is up to date" };
        anstream::println!("{} {outcome}", to.display());
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes a program; returns whether it differed. Whoever executes it meanwhile gets the old one or the new one.
fn install(program: &[u8], to: &Path) -> io::Result<bool> {
    if fs::read(to).is_ok_and(|current| current == program)
        && fs::metadata(to)?.permissions().mode() & 0o777 == 0o755
    {
        return Ok(false);
    }
    let unfinished = to.with_added_extension("unfinished");
    let mut file = File::create(&unfinished)?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    file.write_all(program)?;
    file.sync_all()?;
    fs::rename(&unfinished, to)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join(CNI_PLUGIN);
        assert!(install(b"one", &to).unwrap());
        assert!(!install(b"one", &to).unwrap());
        let running = File::open(&to).unwrap();
        assert!(install(b"two", &to).unwrap());
        assert_eq!(io::read_to_string(running).unwrap(), "one", "a plugin that runs keeps its file");
        assert_eq!(fs::read(&to).unwrap(), b"two");
        fs::set_permissions(&to, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(install(b"two", &to).unwrap());
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

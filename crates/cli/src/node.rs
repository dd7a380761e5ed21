//! `tortie node`: what an installation does on a node beside the agent.

mod calico;
mod configurations;
mod diags;
mod flannel;

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use ipnet::IpNet;
use tortie_deploy::{CNI_CONFIG_FILE, CNI_PLUGIN};

#[derive(clap::Subcommand)]
pub(crate) enum NodeCommand {
    /// Install the CNI plugin for the container runtime
    InstallPlugin(InstallPlugin),
    /// Remove everything of Tortie from this node, whose pods lose their network; or what Calico or flannel has left there
    Cleanup(Cleanup),
    /// Write what this node has into an archive for bug reports: nftables, links, routes, neighbours, kernel parameters, CNI
    /// configuration, what the agent answers, its logs
    Diags(diags::NodeDiags),
    /// Wait until this process is ended
    #[command(hide = true)]
    Idle,
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
            Self::Cleanup(cleanup) => cleanup.run(),
            Self::Diags(diags) => diags.run(),
            Self::Idle => crate::runtime()?.block_on(async {
                crate::signals::end().await?;
                Ok(ExitCode::SUCCESS)
            }),
        }
    }
}

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("of_others").args(["calico", "flannel"])))]
pub(crate) struct Cleanup {
    /// Remove what Calico has left instead. Tortie's agent must run on this node, and Calico's must not
    #[arg(long)]
    calico: bool,
    /// Remove what flannel has left instead. The node must have no pods of flannel, and no flanneld
    #[arg(long)]
    flannel: bool,
    /// With --flannel: a network of its net-conf.json, for a node without /run/flannel/subnet.env; can be repeated
    #[arg(long, value_name = "CIDR", requires = "flannel")]
    flannel_network: Vec<IpNet>,
    /// With --calico or --flannel: print what would be removed, and change nothing
    #[arg(long, requires = "of_others")]
    dry_run: bool,
    /// Leave pods, routes and the VXLAN link to Calico, whose agent must run on this node: pods keep their network
    #[arg(long, conflicts_with = "of_others")]
    for_calico: bool,
    /// Where the container runtime looks for network configurations
    #[arg(long, value_name = "FOLDER", default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,
    /// Where the container runtime looks for plugins
    #[arg(long, value_name = "FOLDER", default_value = "/opt/cni/bin")]
    cni_bin_dir: PathBuf,
    /// The node's /run
    #[arg(long, value_name = "FOLDER", default_value = "/run")]
    run_dir: PathBuf,
    /// The node's /var/lib
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib")]
    lib_dir: PathBuf,
}

impl Cleanup {
    /// The runtime must start no pod from here on, so its configuration goes first. What remains of it is found by a
    /// second call, because every step is repeatable.
    fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("info");
        if self.calico {
            return calico::remove(&self.cni_conf_dir, self.dry_run);
        }
        if self.flannel {
            return flannel::remove(&self.cni_conf_dir, &self.run_dir, &self.flannel_network, self.dry_run);
        }
        let _lock = self.lock_out_agents()?;
        let config = tortie_linux::dataplane::Config::default();
        if self.for_calico {
            // First, because it refuses if nobody would enforce policy afterwards.
            let done = tortie_linux::hand_over_to_calico(&config).context("leaving the node to Calico")?;
            done.iter().for_each(|done| anstream::println!("{done}"));
        }
        remove(&self.cni_conf_dir.join(CNI_CONFIG_FILE))?;
        if !self.for_calico {
            let removed =
                tortie_linux::remove_all(&config).context("removing Tortie from the node's network")?;
            removed.iter().for_each(|removed| anstream::println!("removed {removed}"));
        }
        remove(&self.cni_bin_dir.join(CNI_PLUGIN))?;
        remove(&self.run_dir.join("tortie"))?;
        remove(&self.lib_dir.join("tortie"))?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Cleanup {
    /// Takes the lock of the node's agent, which would repair what is removed.
    fn lock_out_agents(&self) -> anyhow::Result<Option<File>> {
        let path = self.run_dir.join("tortie/agent.sock.lock");
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.with_context(|| path.display().to_string())?,
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => bail!("an agent runs on this node; stop it first"),
            Err(TryLockError::Error(error)) => Err(error).with_context(|| path.display().to_string()),
        }
    }
}

/// Removes a file or a folder, if it exists.
fn remove(path: &Path) -> anyhow::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    removed.with_context(|| format!("removing {}", path.display()))?;
    anstream::println!("removed {}", path.display());
    Ok(())
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
    fn a_node_with_an_agent_is_not_cleaned_up() {
        let folder = tempfile::tempdir().unwrap();
        let run_dir = folder.path().to_owned();
        let (cni_conf_dir, cni_bin_dir, lib_dir) = (run_dir.clone(), run_dir.clone(), run_dir.clone());
        let cleanup = Cleanup {
            calico: false,
            flannel: false,
            flannel_network: Vec::new(),
            dry_run: false,
            for_calico: false,
            cni_conf_dir,
            cni_bin_dir,
            run_dir: run_dir.clone(),
            lib_dir,
        };
        assert!(cleanup.lock_out_agents().unwrap().is_none());
        fs::create_dir(run_dir.join("tortie")).unwrap();
        let agent = File::create(run_dir.join("tortie/agent.sock.lock")).unwrap();
        agent.lock().unwrap();
        let refused = cleanup.lock_out_agents().unwrap_err().to_string();
        assert_eq!(refused, "an agent runs on this node; stop it first");
        drop(agent);
        assert!(cleanup.lock_out_agents().unwrap().is_some());
    }

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

//! A folder in which Wine keeps a Windows machine. Each run gets its own, as a copy of a template.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use tortie_servers::wine::{self, LIBRARIES, REGISTRY};

use setup::run;
use setup::windows::Libraries;

/// A Windows machine. Its processes end with it.
pub(crate) struct Prefix {
    folder: TempDir,
}

impl Prefix {
    /// A machine with the libraries, and with an environment variable for all of its programs.
    pub(crate) fn new(libraries: &Libraries, (name, value): (&str, &str)) -> Result<Self> {
        let home = wine::home();
        let template = wine::template(&home)?;
        let folder = TempDir::with_prefix_in("run-", &home)?;
        let prefix = folder.path().join("prefix");
        // Linked files are fast.
        run(Command::new("cp").arg("-al").arg(&template).arg(&prefix))?;
        for registry in REGISTRY {
            fs::remove_file(prefix.join(registry))?;
            fs::copy(template.join(registry), prefix.join(registry))?;
        }
        let machine = Self { folder };
        for name in LIBRARIES {
            let installed = wine::system_folder(&prefix).join(name);
            fs::copy(libraries.folder.join(name), installed).context(name)?;
        }
        let environment = r"HKLM\System\CurrentControlSet\Control\Session Manager\Environment";
        output(machine.command(Path::new("reg")).args(["add", environment, "/v", name, "/d", value, "/f"]))?;
        // Only the next service manager reads it.
        wine::wait_for_end(&prefix);
        Ok(machine)
    }

    /// The drive C:.
    pub(crate) fn drive(&self) -> PathBuf {
        self.folder.path().join("prefix/drive_c")
    }

    /// A folder outside of the machine.
    pub(crate) fn outside(&self) -> &Path {
        self.folder.path()
    }

    /// A Windows program on this machine.
    pub(crate) fn command(&self, program: &Path) -> Command {
        wine::command(&self.folder.path().join("prefix"), program)
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        wine::end(&self.folder.path().join("prefix"));
    }
}

/// A process that is killed when this is dropped.
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The output of a command, which must succeed.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    output_if(command, |output| output.status.success())
}

/// The output of a CNI plugin, which must succeed.
pub(crate) fn plugin_output(command: &mut Command) -> Result<Output> {
    output_if(command, wine::plugin_has_succeeded)
}

fn output_if(command: &mut Command, has_succeeded: impl Fn(&Output) -> bool) -> Result<Output> {
    let shown = format!("{command:?}");
    let output = command.output().with_context(|| shown.clone())?;
    if !has_succeeded(&output) {
        let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        bail!("{shown}: {}: {text}", output.status);
    }
    Ok(output)
}

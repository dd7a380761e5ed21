//! A folder in which Wine keeps a Windows machine. Each run gets its own, as a copy of a template.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::windows::Libraries;
use crate::{run, workspace};

const WINE: &str = "/usr/lib/wine/wine64";
const WINESERVER: &str = "/usr/lib/wine/wineserver64";

/// The build of Windows that the machine says it is: Server 2022.
const BUILD: &str = "20348";

/// A Windows machine. Its processes end with it.
pub(crate) struct Prefix {
    folder: TempDir,
}

impl Prefix {
    /// A machine with the libraries, and with an environment variable for all of its programs.
    pub(crate) fn new(libraries: &Libraries, (name, value): (&str, &str)) -> Result<Self> {
        let template = template()?;
        let folder = TempDir::with_prefix_in("run-", home()?)?;
        let prefix = folder.path().join("prefix");
        // Linked files are fast. Wine rewrites only those of the registry.
        run(Command::new("cp").arg("-al").arg(&template).arg(&prefix))?;
        for registry in ["system.reg", "user.reg", "userdef.reg"] {
            fs::remove_file(prefix.join(registry))?;
            fs::copy(template.join(registry), prefix.join(registry))?;
        }
        let machine = Self { folder };
        let installed = [
            (&libraries.hns, "computenetwork.dll"),
            (&libraries.hns, "vmcompute.dll"),
            (&libraries.random, "bcryptprimitives.dll"),
        ];
        for (library, name) in installed {
            fs::copy(library, machine.drive().join("windows/system32").join(name)).context(name)?;
        }
        let environment = r"HKLM\System\CurrentControlSet\Control\Session Manager\Environment";
        output(machine.command(Path::new("reg")).args(["add", environment, "/v", name, "/d", value, "/f"]))?;
        // Only the next service manager reads it.
        wait_for_end(&prefix);
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
        wine(&self.folder.path().join("prefix"), program)
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        let mut end = Command::new(WINESERVER);
        end.arg("-k").env("WINEPREFIX", self.folder.path().join("prefix"));
        // It fails if no process is left.
        let _ = end.stderr(Stdio::null()).status();
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

/// The name that Windows programs have for a file of this machine.
pub(crate) fn windows_path(path: &Path) -> String {
    format!("Z:{}", path.display()).replace('/', "\\")
}

/// The output of a command, which must succeed.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    let shown = format!("{command:?}");
    let output = command.output().with_context(|| shown.clone())?;
    if !output.status.success() {
        let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        bail!("{shown}: {}: {text}", output.status);
    }
    Ok(output)
}

fn home() -> Result<PathBuf> {
    let home = workspace()?.join("target/wine");
    fs::create_dir_all(&home)?;
    Ok(home)
}

/// A new machine that knows its version of Windows. It takes some seconds and 700 MB, so it is made once.
fn template() -> Result<PathBuf> {
    let template = home()?.join(format!("template-{BUILD}"));
    if template.exists() {
        return Ok(template);
    }
    println!("==> preparing a Windows machine");
    let unfinished = TempDir::with_prefix_in("template-", home()?)?;
    let prefix = unfinished.path().join("prefix");
    fs::create_dir(&prefix)?;
    output(wine(&prefix, Path::new("wineboot")).arg("-i"))?;
    output(wine(&prefix, Path::new("winecfg")).args(["-v", "win10"]))?;
    for value in ["CurrentBuildNumber", "CurrentBuild"] {
        let key = r"HKLM\Software\Microsoft\Windows NT\CurrentVersion";
        output(wine(&prefix, Path::new("reg")).args(["add", key, "/v", value, "/d", BUILD, "/f"]))?;
    }
    wait_for_end(&prefix);
    // Another run may have been faster.
    if !template.exists() {
        fs::rename(&prefix, &template)?;
    }
    Ok(template)
}

/// Waits until the last process of a machine has ended, which is when the registry is written.
fn wait_for_end(prefix: &Path) {
    // Without any process, it fails.
    let _ = Command::new(WINESERVER).arg("-w").env("WINEPREFIX", prefix).stderr(Stdio::null()).status();
}

fn wine(prefix: &Path, program: &Path) -> Command {
    let mut command = Command::new(WINE);
    command.arg(program).env("WINEPREFIX", prefix).env("WINEDEBUG", "-all").env_remove("DISPLAY");
    command.stdin(Stdio::null());
    command
}

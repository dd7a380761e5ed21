//! Windows machines under Wine, and the programs for Windows that run there.
//!
//! Everything is in one folder, [`home`]: what `cargo xtask windows` has built, and a template of a Windows machine, which is made
//! once. A machine is a folder (a prefix) with the content of the template, and belongs to one network namespace: the first
//! program starts Wine's server there, which owns the sockets of all others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::Error;
use crate::error::io;
use crate::programs::{run, workspace};

/// The variable that tells the library where HNS is.
pub const HNS_ADDRESS: &str = "TORTIE_HNS_ADDRESS";
/// The libraries that Wine lacks, or whose place an emulated HNS takes.
pub const LIBRARIES: [&str; 3] = ["computenetwork.dll", "vmcompute.dll", "bcryptprimitives.dll"];
/// The programs for Windows.
pub const PROGRAMS: [&str; 2] = ["tortie.exe", "tortie-cni.exe"];

const WINE: &str = "/usr/lib/wine/wine64";
const WINESERVER: &str = "/usr/lib/wine/wineserver64";
/// The build of Windows that the machine says it is: Server 2022.
const BUILD: &str = "20348";

/// The folder of what `cargo xtask windows` has built, and of the template.
#[must_use]
pub fn home() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    workspace().join(target).join("wine")
}

/// A folder with programs for Windows and the libraries for Wine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowsPrograms {
    folder: PathBuf,
}

impl WindowsPrograms {
    /// Those of a folder, such as [`home`].
    ///
    /// # Errors
    /// Wine is not installed, or a program is not there.
    pub fn find(folder: &Path) -> Result<Self, Error> {
        let missing = |program: String, remedy: &str| Error::Missing { program, remedy: remedy.to_owned() };
        if [WINE, WINESERVER].iter().any(|program| !Path::new(program).exists()) {
            let remedy = "install it with `cargo xtask setup` (Debian: apt-get install wine64)";
            return Err(missing(format!("Wine ({WINE})"), remedy));
        }
        let folder = std::path::absolute(folder).map_err(io(folder.display().to_string()))?;
        match PROGRAMS.iter().chain(&LIBRARIES).find(|name| !folder.join(name).exists()) {
            Some(name) => Err(missing(
                folder.join(name).display().to_string(),
                "build it with `cargo xtask windows`, or name the folder that has it",
            )),
            None => Ok(Self { folder }),
        }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// The template of machines in this folder, which knows its version of Windows. Making it takes some seconds and 700 MB.
///
/// # Errors
/// Wine cannot make it.
pub fn template(home: &Path) -> Result<PathBuf, Error> {
    let template = home.join(format!("template-{BUILD}"));
    if template.exists() {
        return Ok(template);
    }
    let making = || format!("making a Windows machine in {}", home.display());
    let unfinished = TempDir::with_prefix_in("template-", home).map_err(io(making()))?;
    let prefix = unfinished.path().join("prefix");
    fs::create_dir(&prefix).map_err(io(making()))?;
    let windows = |program: &str, arguments: &[&str]| {
        let mut command = command(&prefix, Path::new(program));
        command.args(arguments);
        run(command)
    };
    windows("wineboot", &["-i"])?;
    windows("winecfg", &["-v", "win10"])?;
    for value in ["CurrentBuildNumber", "CurrentBuild"] {
        let key = r"HKLM\Software\Microsoft\Windows NT\CurrentVersion";
        windows("reg", &["add", key, "/v", value, "/d", BUILD, "/f"])?;
    }
    wait_for_end(&prefix);
    // Another process may have been faster.
    if !template.exists() {
        fs::rename(&prefix, &template).map_err(io(making()))?;
    }
    Ok(template)
}

/// The registry of a machine, which Wine rewrites. It leaves all other files alone.
pub const REGISTRY: [&str; 3] = ["system.reg", "user.reg", "userdef.reg"];

/// The folder of the libraries of a machine.
#[must_use]
pub fn system_folder(prefix: &Path) -> PathBuf {
    prefix.join("drive_c/windows/system32")
}

/// A Windows program on a machine. What Wine writes outside of the machine is in the folder of the prefix, which belongs to
/// the machine, too: the sockets of its server, and the files of a home.
#[must_use]
pub fn command(prefix: &Path, program: &Path) -> Command {
    let mut command = of_machine(WINE, prefix);
    command.arg(program).env("WINEDEBUG", "-all").env_remove("DISPLAY").stdin(Stdio::null());
    // It would write menus for desktops.
    command.env("WINEDLLOVERRIDES", "winemenubuilder.exe=d");
    command
}

/// A program of Wine for a machine. Debian's keeps the server's sockets in `/run/user/UID`, if that exists, and otherwise in
/// `TMPDIR`.
fn of_machine(program: &str, prefix: &Path) -> Command {
    let own = prefix.parent().unwrap_or(prefix);
    let mut command = Command::new(program);
    command.env("WINEPREFIX", prefix).env("HOME", own).env("TMPDIR", own);
    for name in ["XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "WINEARCH", "WINESERVER"] {
        command.env_remove(name);
    }
    command
}

/// Waits until the last process of a machine has ended, which is when the registry is written.
pub fn wait_for_end(prefix: &Path) {
    ask_server(prefix, "-w");
}

/// Ends all processes of a machine.
pub fn end(prefix: &Path) {
    ask_server(prefix, "-k");
}

fn ask_server(prefix: &Path, request: &str) {
    // Without any process, it fails.
    let _ = of_machine(WINESERVER, prefix).arg(request).stderr(Stdio::null()).status();
}

/// The name that Windows programs have for a file of this machine.
#[must_use]
pub fn windows_path(path: &Path) -> String {
    format!("Z:{}", path.display()).replace('/', "\\")
}

/// The folder of this user in which Wine keeps the sockets of its servers, if it exists.
#[must_use]
pub fn runtime_folder() -> PathBuf {
    format!("/run/user/{}", rustix::process::getuid().as_raw()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_remedy() {
        let folder = TempDir::new().unwrap();
        let error = WindowsPrograms::find(folder.path()).unwrap_err().to_string();
        let remedy = if Path::new(WINE).exists() { "cargo xtask windows" } else { "cargo xtask setup" };
        assert!(error.contains(remedy), "{error}");
        if Path::new(WINE).exists() {
            for name in PROGRAMS.iter().chain(&LIBRARIES) {
                assert!(WindowsPrograms::find(folder.path()).is_err(), "without {name}");
                fs::write(folder.path().join(name), "").unwrap();
            }
            assert_eq!(WindowsPrograms::find(folder.path()).unwrap().folder(), folder.path());
        }
    }

    #[test]
    fn files_have_names_on_the_drive_of_the_root() {
        assert_eq!(windows_path(Path::new("/tmp/a b/c.pem")), r"Z:\tmp\a b\c.pem");
    }
}

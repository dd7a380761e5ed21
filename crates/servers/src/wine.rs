//! Windows machines under Wine, and the programs for Windows that run there.
//!
//! What `cargo xtask windows` has built is in one folder, [`home`]. A template of a Windows machine is made once, there or in the user's
//! cache. A machine is a folder (a prefix) with the content of the template, and belongs to one network namespace: the first
//! program starts Wine's server there, which owns the sockets of all others.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::Error;
use crate::error::io;
use crate::programs::run;

pub use test_programs::{
    WINDOWS_LIBRARIES as LIBRARIES, WINDOWS_PROGRAMS as PROGRAMS, windows_folder as home,
};

/// The variable that tells the library where HNS is.
pub const HNS_ADDRESS: &str = "TORTIE_HNS_ADDRESS";

const WINE: &str = "/usr/lib/wine/wine64";
const WINESERVER: &str = "/usr/lib/wine/wineserver64";
/// The build of Windows that the machine says it is: Server 2022.
const BUILD: &str = "20348";

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

/// The making of a template, which another thread can end.
#[derive(Debug, Default)]
pub struct Making {
    is_unwanted: AtomicBool,
    /// The machine whose processes are to end.
    prefix: Mutex<Option<PathBuf>>,
}

impl Making {
    /// Ends it soon. It removes what it has made so far.
    pub fn end(&self) {
        self.is_unwanted.store(true, Ordering::Release);
        if let Some(prefix) = &*self.prefix() {
            end(prefix);
        }
    }

    fn check(&self) -> Result<(), Error> {
        match self.is_unwanted.load(Ordering::Acquire) {
            true => Err(io("making a Windows machine")(std::io::ErrorKind::Interrupted.into())),
            false => Ok(()),
        }
    }

    fn prefix(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.prefix.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The template of machines, which knows its version of Windows. It is beside the programs, or in the user's cache if this user cannot
/// write there. Making it takes some seconds and 700 MB.
///
/// # Errors
/// Wine cannot make it.
pub fn template(home: &Path) -> Result<PathBuf, Error> {
    template_unless(home, &Making::default())
}

/// The same, as long as nobody ends it.
///
/// # Errors
/// Wine cannot make it, or somebody has ended it.
pub fn template_unless(home: &Path, making: &Making) -> Result<PathBuf, Error> {
    template_in(&[Some(home.to_owned()), cache()], making)
}

/// The folder for templates of this user.
fn cache() -> Option<PathBuf> {
    Some(test_programs::cache()?.join("wine"))
}

/// The template in one of these folders: where there is one, or else in the first that can be written.
fn template_in(folders: &[Option<PathBuf>], making: &Making) -> Result<PathBuf, Error> {
    let name = format!("template-{BUILD}");
    let mut folders = folders.iter().flatten();
    if let Some(template) =
        folders.clone().map(|folder| folder.join(&name)).find(|template| template.exists())
    {
        return Ok(template);
    }
    let unfinished = |folder: &PathBuf| {
        fs::create_dir_all(folder)
            .and_then(|()| TempDir::with_prefix_in("template-", folder))
            .map_err(io(format!("making a Windows machine in {}", folder.display())))
    };
    let mut first = None;
    let (folder, unfinished) = loop {
        let Some(folder) = folders.next() else {
            let nowhere = || io("making a Windows machine")(std::io::ErrorKind::NotFound.into());
            return Err(first.unwrap_or_else(nowhere));
        };
        match unfinished(folder) {
            Ok(unfinished) => break (folder, unfinished),
            Err(error) => first = first.or(Some(error)),
        }
    };
    let template = folder.join(&name);
    let prefix = unfinished.path().join("prefix");
    let made = || io(format!("making a Windows machine in {}", folder.display()));
    fs::create_dir(&prefix).map_err(made())?;
    *making.prefix() = Some(prefix.clone());
    let result = install(&prefix, making);
    *making.prefix() = None;
    if result.is_err() {
        // Its processes would write into the folder that goes.
        end(&prefix);
    }
    wait_for_end(&prefix);
    result?;
    // Another process may have been faster.
    if !template.exists() {
        fs::rename(&prefix, &template).map_err(made())?;
    }
    Ok(template)
}

/// Makes a machine of this version of Windows.
fn install(prefix: &Path, making: &Making) -> Result<(), Error> {
    let windows = |program: &str, arguments: &[&str]| {
        making.check()?;
        let mut command = command(prefix, Path::new(program));
        command.args(arguments);
        let ran = run(command);
        making.check()?;
        ran
    };
    windows("wineboot", &["-i"])?;
    windows("winecfg", &["-v", "win10"])?;
    for value in ["CurrentBuildNumber", "CurrentBuild"] {
        let key = r"HKLM\Software\Microsoft\Windows NT\CurrentVersion";
        windows("reg", &["add", key, "/v", value, "/d", BUILD, "/f"])?;
    }
    Ok(())
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

/// True if a CNI plugin has succeeded under Wine. Wine's server kills the Unix process of a program that has ended, if the process is
/// still there half a second later (`process_sigkill` in Wine's `server/process.c`), as it may be on a busy machine. Its output is
/// complete then, and tells the result: a plugin that fails prints a document with a code.
#[must_use]
pub fn plugin_has_succeeded(output: &Output) -> bool {
    if output.status.signal() != Some(Signal::KILL.as_raw()) {
        return output.status.success();
    }
    let document = serde_json::from_slice::<Value>(&output.stdout);
    output.stdout.is_empty() || document.is_ok_and(|document| document.get("code").is_none())
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
    fn a_template_is_found_beside_the_programs_or_in_the_cache() {
        let [programs, cache] = [TempDir::new().unwrap(), TempDir::new().unwrap()];
        let folders = [&programs, &cache].map(|folder| Some(folder.path().to_owned()));
        let name = format!("template-{BUILD}");
        for folder in [&cache, &programs] {
            fs::create_dir(folder.path().join(&name)).unwrap();
            assert_eq!(template_in(&folders, &Making::default()).unwrap(), folder.path().join(&name));
        }
    }

    /// Nobody can make a folder in `/proc`. Where the next one is made, an unwanted making ends at once, and leaves nothing.
    #[test]
    fn a_template_is_made_where_this_user_can_write_and_unless_it_is_unwanted() {
        let nowhere = Some(PathBuf::from("/proc/programs"));
        let error = template_in(&[nowhere.clone(), None], &Making::default()).unwrap_err().to_string();
        assert!(error.contains("/proc/programs"), "{error}");
        let home = TempDir::new().unwrap();
        let cache = home.path().join("cache/tortie");
        let making = Making::default();
        making.end();
        let error = template_in(&[nowhere, Some(cache.clone())], &making).unwrap_err();
        assert!(
            matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::Interrupted),
            "{error}"
        );
        assert_eq!(fs::read_dir(cache).unwrap().count(), 0);
    }

    #[test]
    fn a_plugin_that_wine_has_ended_tells_its_result_by_its_document() {
        let (good, failed, killed, aborted) = (0, 1 << 8, Signal::KILL.as_raw(), Signal::ABORT.as_raw());
        let (result, error) = (r#"{"cniVersion": "1.0.0"}"#, r#"{"code": 11, "msg": "later"}"#);
        for (status, printed, succeeds) in [
            (good, "", true),
            (good, result, true),
            (failed, error, false),
            (failed, "", false),
            (killed, "", true),
            (killed, result, true),
            (killed, error, false),
            (killed, &result[..9], false),
            (aborted, result, false),
        ] {
            let status = std::process::ExitStatus::from_raw(status);
            let output = Output { status, stdout: printed.into(), stderr: Vec::new() };
            assert_eq!(plugin_has_succeeded(&output), succeeds, "{output:?}");
        }
    }

    #[test]
    fn files_have_names_on_the_drive_of_the_root() {
        assert_eq!(windows_path(Path::new("/tmp/a b/c.pem")), r"Z:\tmp\a b\c.pem");
    }
}

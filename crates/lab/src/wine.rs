//! The programs that a node runs, and a Windows machine under Wine for those for Windows.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tortie_kernel::namespace::mount;
use tortie_servers::wine::{self, HNS_ADDRESS, LIBRARIES, Making, WindowsPrograms, windows_path};

use crate::{LabDir, LabError};

/// Where the emulated HNS serves the libraries of the node's machine: on loopback of the node.
pub(crate) const HNS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 47_100);
/// Where the agent writes the CNI configuration once it takes pods.
pub(crate) const CNI_FOLDER: &str = r"C:\etc\cni\net.d";

/// How often an unwanted template is ended, until it has: a program of it may just be starting.
const INTERVAL: Duration = Duration::from_millis(50);

/// How a node runs its agent and its CNI plugin.
#[derive(Clone)]
pub(crate) enum Programs {
    /// They are programs of Linux. Those of a Windows node reach HNS by its socket.
    Native,
    /// They are the programs for Windows. They reach HNS by `computenetwork.dll`, and each other by named pipes.
    Wine(Arc<Machine>),
}

impl Programs {
    /// One of them.
    pub(crate) fn command(&self, dir: &LabDir, name: &str) -> Command {
        match self {
            Self::Native => Command::new(dir.binary(name)),
            Self::Wine(machine) => machine.command(name),
        }
    }

    /// The name that they have for a file.
    pub(crate) fn path(&self, path: &Path) -> String {
        match self {
            Self::Native => path.display().to_string(),
            Self::Wine(_) => windows_path(path),
        }
    }
}

/// A machine. Its files exist in memory and in the lab's mount namespace only, and its processes are in the lab's PID namespace, so
/// nothing of it survives the lab.
pub(crate) struct Machine {
    programs: WindowsPrograms,
    prefix: PathBuf,
}

/// Prepares machines: the template, and a place for the sockets of Wine's servers, which would otherwise outlive the lab.
/// Whoever drops the future ends it.
pub(crate) async fn prepare(programs: &WindowsPrograms) -> Result<(), LabError> {
    let sockets = wine::runtime_folder();
    if sockets.exists() {
        mount::tmpfs(&sockets)?;
        // Wine refuses a folder that others may read.
        let restricted = fs::set_permissions(&sockets, fs::Permissions::from_mode(0o700));
        restricted.map_err(LabError::file("restricting", &sockets))?;
    }
    let making = Arc::new(Making::default());
    let (made, result) = tokio::sync::oneshot::channel();
    let (folder, own) = (programs.folder().to_owned(), making.clone());
    let thread = std::thread::Builder::new().name("wine-template".to_owned());
    let thread = thread.spawn(move || drop(made.send(wine::template_unless(&folder, &own))));
    let thread = thread.map_err(LabError::io("starting a thread"))?;
    let _guard = MakingGuard { making, thread: Some(thread) };
    let template = result.await.map_err(|_| LabError::problem("the template", "its thread has ended"))?;
    template.map(drop).map_err(LabError::from)
}

/// Ends the making of a template with the lab, so that nothing of it is left.
struct MakingGuard {
    making: Arc<Making>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for MakingGuard {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            self.making.end();
            std::thread::sleep(INTERVAL);
        }
        // The thread has already printed a panic.
        let _ = thread.join();
    }
}

impl Machine {
    /// A machine whose changes are kept in memory, at this new folder.
    pub(crate) fn new(programs: &WindowsPrograms, folder: &Path) -> Result<Self, LabError> {
        let make = |path: &Path| fs::create_dir(path).map_err(LabError::file("making the folder", path));
        make(folder)?;
        mount::tmpfs(folder)?;
        let [upper, work, prefix] = ["changes", "work", "prefix"].map(|name| folder.join(name));
        for folder in [&upper, &work, &prefix] {
            make(folder)?;
        }
        mount::overlay(&wine::template(programs.folder())?, &upper, &work, &prefix)?;
        for library in LIBRARIES {
            let (from, to) = (programs.folder().join(library), wine::system_folder(&prefix).join(library));
            fs::copy(&from, &to).map_err(LabError::file("copying", &from))?;
        }
        Ok(Self { programs: programs.clone(), prefix })
    }

    /// A program for Windows.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = wine::command(&self.prefix, &self.programs.folder().join(format!("{program}.exe")));
        command.env(HNS_ADDRESS, HNS.to_string());
        command
    }

    /// Whether the agent takes pods: it writes the CNI configuration last.
    pub(crate) fn takes_pods(&self) -> bool {
        let folder = self.prefix.join("drive_c/etc/cni/net.d");
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(|file| file.extension().is_some_and(|it| it == "conflist"))
    }
}

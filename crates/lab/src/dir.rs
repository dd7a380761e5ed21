//! The folder of a lab: sockets, logs, the datastore's file.

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::process::getuid;

use crate::LabError;

/// The name of the file that marks a folder as a lab's folder.
const MARKER: &str = "tortie-lab";
/// Its content.
const MARK: &str = "This folder belongs to `tortie lab`, which removes all that is in it.\n";
/// The maximum length of the folder's path. The kernel allows 107 bytes for the path of a socket, and the rest of the
/// path (`/nodes/windows-200/control.sock`) needs some of them.
const MAX_PATH_LENGTH: usize = 70;

/// The folder of a lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabDir {
    path: PathBuf,
}

/// Keeps other labs from using the folder while the value lives. No child process inherits it (`O_CLOEXEC`): it ends
/// with the supervisor, at whose end the kernel ends the lab.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl LabDir {
    /// A folder that the user chose, or the user's own temporary folder.
    #[must_use]
    pub fn new(chosen: Option<PathBuf>) -> Self {
        let usual = || std::env::temp_dir().join(format!("tortie-lab-{}", getuid().as_raw()));
        // Programs of the lab have other working directories. Only an empty path has no absolute form.
        let path = chosen.unwrap_or_else(usual);
        Self { path: std::path::absolute(&path).unwrap_or(path) }
    }

    /// Locks the folder for a new lab, and removes what a killed lab left in it.
    ///
    /// # Errors
    /// A lab runs there, the folder belongs to somebody else, or it is not a lab's folder.
    pub fn take(&self) -> Result<Lock, LabError> {
        match fs::DirBuilder::new().mode(0o700).create(&self.path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.check_ownership()?,
            Err(error) => return Err(LabError::file("making the folder", &self.path)(error)),
        }
        let path = self.marker();
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let mut file = file.map_err(LabError::file("opening", &path))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| LabError::Running(self.path.clone()))?;
        file.write_all(MARK.as_bytes()).map_err(LabError::file("writing", &path))?;
        self.clear()?;
        self.make_alias()?;
        for folder in ["bin", "logs", "nodes", "netns", "resolvers"] {
            let folder = self.path.join(folder);
            fs::create_dir(&folder).map_err(LabError::file("making the folder", &folder))?;
        }
        Ok(Lock { _file: file })
    }

    /// Whether a lab runs there.
    #[must_use]
    pub fn in_use(&self) -> bool {
        let Ok(file) = File::open(self.marker()) else { return false };
        flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Whether the folder exists and belongs to another user.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        fs::symlink_metadata(&self.path).is_ok_and(|data| data.uid() != getuid().as_raw())
    }

    /// Whether the folder is that of a lab, which runs or was killed.
    #[must_use]
    pub fn is_marked(&self) -> bool {
        fs::read_to_string(self.marker()).is_ok_and(|text| text == MARK)
    }

    /// Removes the folder with its content.
    ///
    /// # Errors
    /// Something in it cannot be removed.
    pub fn remove(&self, lock: Lock) -> Result<(), LabError> {
        let removed = fs::remove_dir_all(&self.path);
        if let Some(alias) = self.alias() {
            // The link is dangling now; the next lab in this folder replaces it.
            let _ = fs::remove_file(alias);
        }
        drop(lock);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(LabError::file("removing", &self.path)(error))
            }
            _ => Ok(()),
        }
    }

    fn check_ownership(&self) -> Result<(), LabError> {
        use std::os::unix::fs::MetadataExt;
        let shown = self.path.display();
        let data = fs::symlink_metadata(&self.path).map_err(LabError::file("looking at", &self.path))?;
        if !data.is_dir() || data.uid() != getuid().as_raw() {
            return Err(LabError::problem(shown, "is not a folder of yours; set TORTIE_LAB to another one"));
        }
        let entries = fs::read_dir(&self.path).map_err(LabError::file("reading", &self.path))?;
        let others = entries.flatten().filter(|entry| entry.file_name() != MARKER).count();
        // A lab that was killed immediately has left an empty marker and nothing else.
        if others > 0 && !self.is_marked() {
            return Err(LabError::problem(
                shown,
                "holds something that is not a lab's; set TORTIE_LAB to another folder",
            ));
        }
        Ok(())
    }

    fn clear(&self) -> Result<(), LabError> {
        for entry in fs::read_dir(&self.path).map_err(LabError::file("reading", &self.path))?.flatten() {
            let path = entry.path();
            if entry.file_name() == MARKER {
                continue;
            }
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let removed = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(LabError::file("removing what a former lab left:", &path))?;
        }
        Ok(())
    }

    /// The file that marks the folder as a lab's. While it is locked, a lab runs there.
    fn marker(&self) -> PathBuf {
        self.path.join(MARKER)
    }

    /// A short name of the folder, if its own is too long for the paths of sockets. It is derived only from the
    /// folder's name, because inside the lab an ordinary user has another uid.
    fn alias(&self) -> Option<PathBuf> {
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        if path.as_os_str().len() <= MAX_PATH_LENGTH {
            return None;
        }
        let mut hasher = DefaultHasher::new();
        path.hash(&mut hasher);
        Some(PathBuf::from(format!("/tmp/tortie-lab-{:016x}", hasher.finish())))
    }

    fn make_alias(&self) -> Result<(), LabError> {
        use std::os::unix::fs::MetadataExt;
        let Some(alias) = self.alias() else { return Ok(()) };
        match fs::symlink_metadata(&alias) {
            Ok(data) if data.is_symlink() && data.uid() == getuid().as_raw() => {
                fs::remove_file(&alias).map_err(LabError::file("removing", &alias))?;
            }
            Ok(_) => {
                return Err(LabError::problem(
                    alias.display(),
                    "belongs to another user; set TORTIE_LAB to a shorter path",
                ));
            }
            Err(_) => {}
        }
        let path = std::path::absolute(&self.path).map_err(LabError::file("finding", &self.path))?;
        symlink(path, &alias).map_err(LabError::file("making the link", &alias))
    }

    /// The folder under a name that is short enough for the path of a socket.
    fn sockets(&self) -> PathBuf {
        self.alias().unwrap_or_else(|| self.path.clone())
    }

    /// The folder of a node's sockets.
    pub(crate) fn node_sockets(&self, name: &str) -> PathBuf {
        self.sockets().join("nodes").join(name)
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The datastore's socket.
    #[must_use]
    pub fn store_socket(&self) -> PathBuf {
        self.sockets().join("store.sock")
    }

    /// The socket on which a node's agent answers operators.
    #[must_use]
    pub fn control_socket(&self, node: &str) -> PathBuf {
        self.node_sockets(node).join("control.sock")
    }

    /// The folder of a node's machine, if it runs under Wine.
    pub(crate) fn machine(&self, node: &str) -> PathBuf {
        self.node(node).join("wine")
    }

    /// Whether a node runs under Wine.
    #[must_use]
    pub fn runs_wine(&self, node: &str) -> bool {
        self.machine(node).exists()
    }

    /// The folder of etcd, if it is the lab's datastore.
    pub(crate) fn etcd(&self) -> PathBuf {
        self.path().join("etcd")
    }

    /// The administrator's kubeconfig, if the Kubernetes API is the lab's datastore.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.path().join("kubeconfig")
    }

    pub(crate) fn store_file(&self) -> PathBuf {
        self.path.join("store.redb")
    }

    /// The links under which the single binary is called.
    pub(crate) fn binary(&self, name: &str) -> PathBuf {
        self.path.join("bin").join(name)
    }

    pub(crate) fn log(&self, process: &str) -> PathBuf {
        self.path.join("logs").join(format!("{process}.log"))
    }

    pub(crate) fn node(&self, name: &str) -> PathBuf {
        self.path.join("nodes").join(name)
    }

    pub(crate) fn netns_folder(&self) -> PathBuf {
        self.path.join("netns")
    }

    /// The network namespace of a node, inside the lab's mount namespace.
    #[must_use]
    pub fn node_netns(&self, name: &str) -> PathBuf {
        self.netns_folder().join(format!("node:{name}"))
    }

    /// The network namespace of a pod, inside the lab's mount namespace.
    #[must_use]
    pub fn pod_netns(&self, namespace: &str, name: &str) -> PathBuf {
        self.netns_folder().join(format!("pod:{namespace}.{name}"))
    }

    /// The `/etc/resolv.conf` of the pods of a namespace.
    #[must_use]
    pub fn resolver(&self, namespace: &str) -> PathBuf {
        self.path.join("resolvers").join(namespace)
    }

    /// The file with the pid of the first process inside the lab, as seen from outside.
    pub(crate) fn pid_file(&self) -> PathBuf {
        self.path.join("pid")
    }
}

/// Writes a new file that only its owner may read.
pub(crate) fn write_private(path: &PathBuf, text: &str) -> Result<(), LabError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(LabError::file("writing", path))
}

//! The data of an etcd in which an API server has created its own objects, and on request Tortie's definitions. A copy spares each new
//! API server the hundreds of writes of its first start.
//!
//! The copy is in the folder of the Kubernetes binary, so another version has another one. The objects depend on the networks of
//! Services, so only API servers with the usual one use it. The name of a folder with definitions contains their hash.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use crate::error::io;
use crate::etcd::data_folder;
use crate::{Error, KubeApi, KubeOptions, Server, programs};

/// The name of the folder without definitions, beside the binary, and the beginning of all names.
const NAME: &str = "prepared-etcd";
/// The member of an etcd with one member.
const MEMBER: &str = "etcd-0";

/// Copies the prepared data to the place where the first member of an etcd in this folder expects its own. Prepares them first if
/// they do not exist, which takes as long as an API server's start on an empty etcd. Copies nothing and returns false if this user may
/// neither read them nor make them.
pub(crate) fn copy_to(folder: &Path, binary: &Path, definitions: bool) -> Result<bool, Error> {
    let home = binary.parent().unwrap_or(binary);
    let name = if definitions { format!("{NAME}-{}", hash_of_definitions()?) } else { NAME.to_owned() };
    let prepared = home.join(name);
    if !prepared.exists() {
        // One process prepares them, and others wait. The lock ends with the file.
        let lock = home.join(format!("{NAME}.lock"));
        let Ok(file) = File::create(&lock) else { return Ok(false) };
        flock(&file, FlockOperation::LockExclusive)
            .map_err(|error| io(lock.display().to_string())(error.into()))?;
        if !prepared.exists() {
            prepare(home, &prepared, definitions)?;
        }
    }
    match fs::read_dir(&prepared) {
        // Another user made them, and etcd's files are for their owner.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(false),
        _ => copy(&prepared, &data_folder(folder, MEMBER)).map(|()| true),
    }
}

/// Starts an API server on an empty etcd, ends both, and keeps the data.
fn prepare(home: &Path, prepared: &Path, definitions: bool) -> Result<(), Error> {
    let kube = KubeApi::start_on_empty_etcd(&KubeOptions::default())?;
    if definitions {
        kube.create_definitions()?;
        remove_others(home, prepared)?;
    }
    kube.api().kill()?;
    // All data are on the disk only after an orderly end.
    kube.etcd().members().iter().try_for_each(Server::stop)?;
    let unfinished = TempDir::with_prefix_in(NAME, home).map_err(io(format!("in {}", home.display())))?;
    let data = unfinished.path().join(MEMBER);
    copy(&kube.etcd().data_folder(0), &data)?;
    fs::rename(&data, prepared).map_err(io(format!("keeping {}", prepared.display())))
}

/// The hash of the files that [`KubeApi::create_definitions`] creates.
fn hash_of_definitions() -> Result<String, Error> {
    let folder = programs::workspace().join("deploy/crds");
    let failed = || io(format!("reading {}", folder.display()));
    let entries = fs::read_dir(&folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let mut files: Vec<PathBuf> = entries.map_err(failed())?.iter().map(fs::DirEntry::path).collect();
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        hash.update(fs::read(&file).map_err(failed())?);
    }
    Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// Removes the data with the definitions of earlier versions.
fn remove_others(home: &Path, prepared: &Path) -> Result<(), Error> {
    let failed = || io(format!("removing earlier data in {}", home.display()));
    for entry in fs::read_dir(home).map_err(failed())?.flatten() {
        let has_definitions = entry.file_name().to_string_lossy().starts_with(&format!("{NAME}-"));
        if has_definitions && entry.path() != prepared {
            fs::remove_dir_all(entry.path()).map_err(failed())?;
        }
    }
    Ok(())
}

/// Copies a folder. etcd's log is a file of 64 MB that is nearly empty.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    let mut command = Command::new("cp");
    command.args(["--recursive", "--sparse=always", "--no-target-directory", "--"]).arg(from).arg(to);
    programs::run(command).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;

    use super::*;

    /// The variable with the folder of the binary, for the process of the other user.
    const HOME: &str = "TORTIE_PREPARED_HOME";
    /// The user `nobody` of Debian.
    const NOBODY: u32 = 65534;

    /// Without the variable, it passes: the next test starts it with it.
    #[test]
    fn nothing_is_copied_that_another_user_keeps() {
        let Some(home) = std::env::var_os(HOME).map(PathBuf::from) else { return };
        let own = TempDir::new().unwrap();
        assert!(!copy_to(own.path(), &home.join("kube"), false).unwrap());
        assert_eq!(fs::read_dir(own.path()).unwrap().count(), 0);
    }

    /// The data of an etcd are readable for the user who made them. Others start their API servers on an empty etcd.
    #[test]
    fn data_of_root_do_not_stop_an_ordinary_user() {
        let is_root = rustix::process::getuid().is_root();
        assert!(is_root, "run the tests as root: they also switch to an ordinary user");
        let folder = TempDir::new().unwrap();
        let home = folder.path().join("home");
        fs::create_dir_all(home.join(NAME)).unwrap();
        let program = folder.path().join("tests");
        // Another process writes it: a child that another test starts in the meantime would inherit the open file, and the
        // kernel starts no program that is open for writing.
        let mut copy = Command::new("cp");
        assert!(copy.arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap().success());
        for (path, mode) in [(folder.path(), 0o755), (&home, 0o755), (&home.join(NAME), 0o700)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let test = "prepared::tests::nothing_is_copied_that_another_user_keeps";
        let output = Command::new(&program)
            .args(["--exact", test])
            .uid(NOBODY)
            .gid(NOBODY)
            .env(HOME, &home)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}

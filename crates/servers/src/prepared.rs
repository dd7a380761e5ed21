//! The data of an etcd in which an API server has created its own objects, and on request Tortie's definitions. A copy spares each new
//! API server the hundreds of writes of its first start.
//!
//! The copy is in the folder of the Kubernetes binary, so another version has another one. The objects depend on the networks of
//! Services, so only API servers with the usual one use it. The name of a folder with definitions contains their hash.

use std::fs::{self, File};
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
/// they do not exist, which takes as long as an API server's start on an empty etcd. Copies nothing and returns false if this user may not
/// write beside the binary.
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
    copy(&prepared, &data_folder(folder, MEMBER)).map(|()| true)
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

//! `tortie store init`, `identity`, `check`, `backup`, `restore` and `repair`: the file of the embedded datastore. Only a backup
//! can be made while a process serves it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use jiff::Timestamp;
use tortie_store::rpc::Remote;
use tortie_store::{Embedded, FileCheck, StoreId};

use crate::output;

/// The file with the data.
#[derive(clap::Args)]
pub(crate) struct DataFile {
    /// The file with the data
    #[arg(long, value_name = "FILE", default_value = "/var/lib/tortie/store.redb")]
    pub(crate) data: PathBuf,
}

#[derive(clap::Args)]
pub(crate) struct Init {
    #[command(flatten)]
    file: DataFile,
    /// The identity of a lost store, which the new one succeeds: agents go on with it, and take over its objects. If it has no
    /// policies, nodes then have none
    #[arg(long, value_name = "UUID")]
    identity: Option<StoreId>,
}

#[derive(clap::Args)]
pub(crate) struct Identity {
    #[command(flatten)]
    file: DataFile,
    /// Give the store this identity: that of another store, which it succeeds. Agents of that store go on with it, and take over
    /// its objects
    #[arg(long, value_name = "UUID")]
    replace_with: Option<StoreId>,
}

#[derive(clap::Args)]
pub(crate) struct CheckFile {
    #[command(flatten)]
    file: DataFile,
}

#[derive(clap::Args)]
pub(crate) struct Backup {
    /// The folder of the backups; the name of each is its time
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
    /// Afterwards, remove all backups in the folder but the newest ones
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,
    /// The socket of the service
    #[arg(long, value_name = "PATH", default_value = "/run/tortie/store.sock")]
    socket: PathBuf,
    /// The file with the data, if no process serves it
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    data: Option<PathBuf>,
}

#[derive(clap::Args)]
pub(crate) struct Restore {
    /// The backup
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    #[command(flatten)]
    file: DataFile,
}

#[derive(clap::Args)]
pub(crate) struct Repair {
    #[command(flatten)]
    file: DataFile,
    /// The new file with what can be saved
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

impl CheckFile {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let found = Embedded::check(&self.file.data)?;
        output::line(&counted(&found));
        Ok(tell_damaged(&found))
    }
}

impl Backup {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        std::fs::create_dir_all(&self.to).with_context(|| self.to.display().to_string())?;
        let time = Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
        let file = self.to.join(format!("{PREFIX}{time}{SUFFIX}"));
        let written = match &self.data {
            Some(data) => Embedded::copy(data, &file)?,
            None => crate::runtime()?.block_on(async { Remote::unix(&self.socket).backup(&file).await })?,
        };
        output::line(&format!("{}: {}", file.display(), counted(&written)));
        if let Some(keep) = self.keep {
            let names = names_in(&self.to)?;
            for name in superseded(names, keep as usize) {
                let old = self.to.join(name);
                std::fs::remove_file(&old).with_context(|| old.display().to_string())?;
            }
        }
        Ok(tell_damaged(&written))
    }
}

/// The name of a backup, without its time.
const PREFIX: &str = "store-";
const SUFFIX: &str = ".redb";

fn names_in(folder: &Path) -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// The backups among these names without the newest ones. Times as text are in order.
fn superseded(mut names: Vec<String>, keep: usize) -> Vec<String> {
    let is_backup = |name: &String| {
        let time = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
        time.is_some_and(|time| time.len() == "20260101T000000Z".len() && time.ends_with('Z'))
    };
    names.retain(is_backup);
    names.sort();
    names.truncate(names.len().saturating_sub(keep));
    names
}

impl Restore {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        make_folder(&self.file.data)?;
        let written = Embedded::copy(&self.from, &self.file.data)?;
        output::line(&format!("{}: {}", self.file.data.display(), counted(&written)));
        Ok(tell_damaged(&written))
    }
}

impl Repair {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let saved = Embedded::repair(&self.file.data, &self.to)?;
        let objects = output::count(saved.objects, "object");
        output::line(&format!("{}: store {}, {objects} saved", self.to.display(), saved.id));
        for name in &saved.lost {
            output::error_line(&format!("lost: {name}"));
        }
        if saved.lost_without_names > 0 {
            let objects = output::count(saved.lost_without_names, "object");
            output::error_line(&format!("lost: {objects} without a known name"));
        }
        let is_whole = saved.lost.is_empty() && saved.lost_without_names == 0;
        output::line(
            "compare it with your manifests and with a backup before you serve it: what is lost has no policy",
        );
        Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn counted(found: &FileCheck) -> String {
    let objects = output::count(found.objects, "object");
    match found.id {
        Some(id) => format!("store {id}, {objects}"),
        None => format!("a store of an earlier version, {objects}"),
    }
}

/// Names the objects whose records are damaged.
fn tell_damaged(found: &FileCheck) -> ExitCode {
    for name in &found.damaged {
        output::error_line(&format!("damaged: {name}"));
    }
    if found.damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Init {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        make_folder(&self.file.data)?;
        let id = Embedded::init(&self.file.data, self.identity)?;
        output::line(&format!("store {id} created in {}", self.file.data.display()));
        Ok(ExitCode::SUCCESS)
    }
}

impl Identity {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(id) = self.replace_with {
            Embedded::replace_identity(&self.file.data, id)?;
        }
        match Embedded::identity_of(&self.file.data)? {
            Some(id) => output::line(&id.to_string()),
            None => {
                output::line("none; `tortie store serve` gives it one, because an earlier version wrote it")
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Makes the folder of a file, if it does not exist.
pub(crate) fn make_folder(file: &Path) -> anyhow::Result<()> {
    match file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => std::fs::create_dir_all(folder).with_context(|| folder.display().to_string()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_older_backups_are_superseded() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let all = names(&[
            "store-20260103T000000Z.redb",
            "store-20260101T235959Z.redb",
            "store-20260102T000000Z.redb",
            "store-20260101T000000Z.redb.unfinished",
            "store-mine.redb",
            "store.redb",
        ]);
        for (keep, expected) in [
            (1, &["store-20260101T235959Z.redb", "store-20260102T000000Z.redb"][..]),
            (2, &["store-20260101T235959Z.redb"][..]),
            (3, &[][..]),
            (9, &[][..]),
        ] {
            assert_eq!(superseded(all.clone(), keep), names(expected), "{keep}");
        }
    }
}

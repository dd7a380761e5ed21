//! `tortie store init`, `identity`, `check`, `backup`, `restore` and `repair`: the file of the embedded datastore. Only a backup
//! can be made while a process serves it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;
use tortie_store::rpc::Remote;
use tortie_store::{Embedded, FileCheck, StoreError, StoreId};

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
    /// Afterwards, if the new backup is whole, remove all backups of this store in the folder but the newest whole ones
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
        let found = match Embedded::check(&self.file.data) {
            // That is the answer.
            Err(error @ StoreError::Damaged(_)) => {
                output::error(&error.to_string());
                return Ok(ExitCode::FAILURE);
            }
            found => found?,
        };
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
            rotate(&self.to, &file, &written, keep as usize)?;
        }
        Ok(tell_damaged(&written))
    }
}

/// The name of a backup, without its time.
const PREFIX: &str = "store-";
const SUFFIX: &str = ".redb";
/// A backup that is being written has this after its name.
const UNFINISHED: &str = ".unfinished";
/// No backup takes longer.
const LEFT_OVER: Duration = Duration::from_secs(24 * 60 * 60);

/// What a file of the folder is, beside the new backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Former {
    /// A whole backup of the same store.
    Whole,
    /// A backup of the same store with damaged objects.
    Damaged,
    /// A backup of another store, or a file that cannot be read.
    Foreign,
}

/// Removes older backups of the store, and what interrupted backups have left, if the new backup is whole. That is never removed.
fn rotate(folder: &Path, new: &Path, written: &FileCheck, keep: usize) -> anyhow::Result<()> {
    if !written.damaged.is_empty() {
        output::error_line("no older backup is removed, because this one is not whole");
        return Ok(());
    }
    let is_new = |name: &String| new.file_name().is_some_and(|new| new == name.as_str());
    let names = names_in(folder)?;
    let old = names.iter().filter(|name| !is_new(name)).cloned().collect();
    let removed = superseded(old, keep, |name| former(&folder.join(name), written.id));
    for name in removed.iter().chain(names.iter().filter(|name| is_left_over(&folder.join(name)))) {
        let old = folder.join(name);
        std::fs::remove_file(&old).with_context(|| old.display().to_string())?;
    }
    Ok(())
}

fn former(file: &Path, id: Option<StoreId>) -> Former {
    match Embedded::check(file) {
        Ok(found) if found.id != id => Former::Foreign,
        Ok(found) if found.damaged.is_empty() => Former::Whole,
        Ok(_) => Former::Damaged,
        Err(error) => {
            output::error_line(&format!("not removed, and not counted: {error}"));
            Former::Foreign
        }
    }
}

fn names_in(folder: &Path) -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

fn is_backup(name: &str) -> bool {
    let time = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX));
    time.is_some_and(|time| time.len() == "20260101T000000Z".len() && time.ends_with('Z'))
}

/// The backups among these names that are older than the newest whole ones, of which the new backup is one. Times as text are in
/// order.
fn superseded(mut names: Vec<String>, keep: usize, former: impl Fn(&str) -> Former) -> Vec<String> {
    names.retain(|name| is_backup(name));
    names.sort_by(|one, other| other.cmp(one));
    let mut whole = 1;
    names.retain(|name| {
        let former = former(name);
        let is_superseded = whole >= keep && former != Former::Foreign;
        whole += usize::from(former == Former::Whole);
        is_superseded
    });
    names
}

/// Whether a backup was interrupted while it wrote the file.
fn is_left_over(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(UNFINISHED));
    let age = || file.symlink_metadata().ok()?.modified().ok()?.elapsed().ok();
    name.is_some_and(is_backup) && age().is_some_and(|age| age > LEFT_OVER)
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
        if !saved.is_complete {
            output::error_line(
                "incomplete: a damaged page ended the search, so that more may be lost than is named here",
            );
        }
        if saved.lost_without_names > 0 {
            let objects = output::count(saved.lost_without_names, "object");
            output::error_line(&format!("lost: {objects} without a known name"));
        }
        let is_whole = saved.is_complete && saved.lost.is_empty() && saved.lost_without_names == 0;
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

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn only_older_backups_are_superseded() {
        let all = names(&[
            "store-20260103T000000Z.redb",
            "store-20260101T235959Z.redb",
            "store-20260102T000000Z.redb",
            "store-20260101T000000Z.redb.unfinished",
            "store-mine.redb",
            "store.redb",
        ]);
        for (keep, expected) in [
            (
                1,
                &[
                    "store-20260103T000000Z.redb",
                    "store-20260102T000000Z.redb",
                    "store-20260101T235959Z.redb",
                ][..],
            ),
            (2, &["store-20260102T000000Z.redb", "store-20260101T235959Z.redb"][..]),
            (3, &["store-20260101T235959Z.redb"][..]),
            (9, &[][..]),
        ] {
            assert_eq!(superseded(all.clone(), keep, |_| Former::Whole), names(expected), "{keep}");
        }
    }

    /// Damaged backups and those of other stores never take the place of a whole one.
    #[test]
    fn only_whole_backups_count() {
        use Former::{Damaged, Foreign, Whole};
        let name = |day: usize| format!("store-2026010{day}T000000Z.redb");
        let all: Vec<String> = (1..=4).map(name).collect();
        // From the newest on, which is that of day 4.
        for (former, expected) in [
            ([Whole, Damaged, Damaged, Whole], &[][..]),
            ([Whole, Whole, Damaged, Whole], &[2, 1][..]),
            ([Damaged, Whole, Whole, Whole], &[1][..]),
            ([Whole, Foreign, Whole, Damaged], &[1][..]),
            ([Whole, Whole, Foreign, Foreign], &[][..]),
        ] {
            let of = |name: &str| former[4 - usize::from(name.as_bytes()[13] - b'0')];
            let expected: Vec<String> = expected.iter().copied().map(name).collect();
            assert_eq!(superseded(all.clone(), 3, of), expected, "{former:?}");
        }
    }

    /// Real files. The clock was ahead when the oldest ones were written.
    #[test]
    fn a_rotation_removes_what_is_superseded_only() {
        let folder = tempfile::tempdir().unwrap();
        let source = tempfile::tempdir().unwrap();
        let data = |name: &str| source.path().join(name);
        Embedded::init(&data("own"), None).unwrap();
        Embedded::init(&data("other"), None).unwrap();
        let path = |time: &str| folder.path().join(format!("store-20260{time}T000000Z.redb"));
        for (time, of) in
            [("101", "own"), ("102", "own"), ("103", "other"), ("104", "own"), ("105", "own"), ("106", "own")]
        {
            Embedded::copy(&data(of), &path(time)).unwrap();
        }
        std::fs::File::options().write(true).open(path("104")).unwrap().set_len(5_000).unwrap();
        let day = Duration::from_secs(24 * 60 * 60);
        for (name, age) in [
            ("store-20260107T000000Z.redb.unfinished", 2 * day),
            ("store-20260108T000000Z.redb.unfinished", day / 2),
            ("mine.unfinished", 2 * day),
        ] {
            let file = std::fs::File::create(folder.path().join(name)).unwrap();
            file.set_modified(std::time::SystemTime::now() - age).unwrap();
        }
        let whole = Embedded::check(&data("own")).unwrap();
        let before = names_in(folder.path()).unwrap().len();
        let damaged = FileCheck { damaged: names(&["tiers t"]), ..whole.clone() };
        rotate(folder.path(), &path("101"), &damaged, 2).unwrap();
        assert_eq!(names_in(folder.path()).unwrap().len(), before, "the new backup is damaged");
        rotate(folder.path(), &path("101"), &whole, 2).unwrap();
        let mut left = names_in(folder.path()).unwrap();
        left.sort();
        assert_eq!(
            left,
            names(&[
                "mine.unfinished",
                "store-20260101T000000Z.redb",
                "store-20260103T000000Z.redb",
                "store-20260104T000000Z.redb",
                "store-20260106T000000Z.redb",
                "store-20260108T000000Z.redb.unfinished",
            ])
        );
    }
}

//! `tortie store init` and `tortie store identity`: the file of the embedded datastore, while no process serves it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use tortie_store::{Embedded, StoreId};

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

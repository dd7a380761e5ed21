//! The report of a selftest that was saved on this machine, from which `Auto` learns whether ACLs may name sets.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tortie_api::calico::{FelixConfiguration, WindowsPolicySets};
use tortie_dataplane::{Condition, Reason, Settings};
use tortie_hcn::Version;
use tortie_hcn::selftest::{HnsReport, NotProven};

/// The file of the report, and the build of Windows that it has to be of.
#[derive(Debug, Clone)]
pub struct SavedReport {
    file: PathBuf,
    build: Option<String>,
}

/// What a saved report says about sets in ACLs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SetProof {
    /// They work.
    Proven,
    /// There is no report.
    Absent,
    /// Nothing: the report is of another HNS, or answers are missing. Why, and the remedy.
    Unknown(String),
    /// They do not work, or the report cannot be trusted. Why, and the remedy.
    Refuted(String),
}

/// A longer file is no report.
const LONGEST: u64 = 1 << 20;

impl SavedReport {
    /// The report in this file. `build` is that of this machine, if the system tells it.
    pub fn new(file: PathBuf, build: Option<String>) -> SavedReport {
        SavedReport { file, build }
    }

    /// Writes a report completely, or not at all. An earlier one stays until then.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(file: &Path, report: &HnsReport) -> io::Result<()> {
        let unfinished = file.with_extension("unfinished");
        let mut writer = fs::File::create(&unfinished)?;
        writer.write_all(&serde_json::to_vec_pretty(report)?)?;
        writer.sync_all()?;
        drop(writer);
        fs::rename(unfinished, file)
    }

    /// Reads the file, and decides what it proves for an HNS of this version.
    pub(crate) fn proof(&self, version: Version) -> SetProof {
        let file = self.file.display();
        let text = match read(&self.file) {
            Ok(Some(text)) => text,
            Ok(None) => return SetProof::Absent,
            Err(error) => {
                return SetProof::Refuted(format!(
                    "{file} cannot be read: {error}; make it readable, or delete it"
                ));
            }
        };
        let report = match HnsReport::parse(&text) {
            Ok(report) => report,
            Err(error) => {
                return SetProof::Refuted(format!(
                    "{file}: {error}; run `tortie windows selftest --save` of this version of Tortie, or delete it"
                ));
            }
        };
        match report.proves_sets(version, self.build.as_deref()) {
            Ok(()) => SetProof::Proven,
            Err(problem) if problem.speaks_against() => SetProof::Refuted(format!(
                "{file}: {problem}; leave it so, or run `tortie windows selftest --save` again after an update of Windows"
            )),
            Err(problem @ (NotProven::Open(_) | NotProven::UnknownBuild)) => SetProof::Unknown(format!(
                "{file}: {problem}; a version that was proven in another way belongs in the annotation {} of FelixConfiguration",
                FelixConfiguration::PROVEN_POLICY_SETS
            )),
            Err(problem) => SetProof::Unknown(format!(
                "{file}: {problem}; run `tortie windows selftest --save` on this node, or delete it"
            )),
        }
    }
}

/// Whether ACLs name sets where HNS has them, and what there is to report.
pub(crate) fn name_sets(
    settings: &Settings,
    version: Version,
    proof: &SetProof,
) -> (bool, Option<Condition>) {
    let not_proven = |message: String| Some(Condition::new(Reason::PolicySetsNotProven, message));
    match (settings.windows_policy_sets, proof) {
        (WindowsPolicySets::Disabled, _) => (false, None),
        (WindowsPolicySets::Enabled, SetProof::Refuted(why)) => {
            let setting = FelixConfiguration::WINDOWS_POLICY_SETS;
            (true, not_proven(format!("ACLs name sets, because {setting} is Enabled, but {why}")))
        }
        (WindowsPolicySets::Enabled, _) | (WindowsPolicySets::Auto, SetProof::Proven) => (true, None),
        (WindowsPolicySets::Auto, SetProof::Refuted(why)) => {
            (false, not_proven(format!("ACLs list addresses instead of sets: {why}")))
        }
        (WindowsPolicySets::Auto, SetProof::Absent | SetProof::Unknown(_))
            if settings.proven_policy_sets.contains(&(version.major, version.minor)) =>
        {
            (true, None)
        }
        (WindowsPolicySets::Auto, SetProof::Unknown(why)) => {
            (false, not_proven(format!("ACLs list addresses instead of sets: {why}")))
        }
        (WindowsPolicySets::Auto, SetProof::Absent) => (false, None),
    }
}

fn read(file: &Path) -> io::Result<Option<String>> {
    let length = match fs::metadata(file) {
        Ok(found) if found.is_file() => found.len(),
        Ok(_) => return Err(io::Error::other("it is no file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if length > LONGEST {
        return Err(io::Error::other(format!("it has {length} bytes")));
    }
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

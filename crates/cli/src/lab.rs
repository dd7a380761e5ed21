//! The interface by which a lab extends the program. Packages contain no lab, so the lab is in another crate.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand};
use tortie_hcn::IpHelper;
use tortie_store::Endpoints;

/// The name of the subcommand.
const NAME: &str = "lab";

/// The lab of this program.
static LAB: OnceLock<&'static dyn Lab> = OnceLock::new();

/// A mixed cluster on this machine, as the subcommands use it.
pub trait Lab: Sync {
    /// The subcommand `lab`.
    fn command(&self) -> Command;

    /// Runs `tortie lab` with these arguments.
    ///
    /// # Errors
    ///
    /// The lab cannot do what the arguments say.
    fn run(&self, arguments: &ArgMatches) -> anyhow::Result<ExitCode>;

    /// Acts as another program, if the lab has one of this name.
    fn run_as(&self, name: &str) -> Option<anyhow::Result<ExitCode>>;

    /// The folder of the lab, and whether it runs.
    fn state(&self) -> (PathBuf, LabState);

    /// The datastore of the running lab.
    fn store(&self) -> Arc<dyn Endpoints>;

    /// The kubeconfig of the running lab, if its datastore is a Kubernetes API.
    fn kubeconfig(&self) -> Option<PathBuf>;

    /// The socket of the agent on a node of the lab.
    ///
    /// # Errors
    ///
    /// The agent is not reached from here.
    fn agent_socket(&self, node: &str) -> anyhow::Result<PathBuf>;

    /// The image of pods that run this program.
    fn image(&self) -> &'static str;

    /// The machine under the emulated HNS of a Windows node, for networks whose routes are on the machine.
    fn machine(&self) -> Arc<dyn IpHelper>;
}

/// How far the lab of this user is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabState {
    /// It runs.
    Running,
    /// It was killed: its folder remains.
    Ended,
    /// There is none in the folder.
    Absent,
    /// The folder belongs to another user, whose lab accepts no other.
    Foreign,
}

/// Gives this program a lab.
pub(crate) fn set(lab: &'static dyn Lab) {
    // The first one is kept.
    let _ = LAB.set(lab);
}

/// The lab, if this program contains one.
pub(crate) fn lab() -> Option<&'static dyn Lab> {
    LAB.get().copied()
}

/// The subcommand `lab`, if this program contains a lab.
pub(crate) struct LabVerb {
    lab: &'static dyn Lab,
    arguments: ArgMatches,
}

impl LabVerb {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        self.lab.run(&self.arguments)
    }
}

impl Subcommand for LabVerb {
    fn augment_subcommands(command: Command) -> Command {
        match lab() {
            Some(lab) => command.subcommand(lab.command()),
            None => command,
        }
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        name == NAME && lab().is_some()
    }
}

impl FromArgMatches for LabVerb {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        match (lab(), matches.subcommand()) {
            (Some(lab), Some((NAME, arguments))) => Ok(Self { lab, arguments: arguments.clone() }),
            _ => Err(Error::new(ErrorKind::InvalidSubcommand)),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Options that only a program with a lab has.
pub(crate) struct InLab<T>(pub(crate) Option<T>);

impl<T: Args> Args for InLab<T> {
    fn augment_args(command: Command) -> Command {
        if lab().is_some() { T::augment_args(command) } else { command }
    }

    fn augment_args_for_update(command: Command) -> Command {
        if lab().is_some() { T::augment_args_for_update(command) } else { command }
    }
}

impl<T: FromArgMatches> FromArgMatches for InLab<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(Self(lab().map(|_| T::from_arg_matches(matches)).transpose()?))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.as_mut().map_or(Ok(()), |options| options.update_from_arg_matches(matches))
    }
}

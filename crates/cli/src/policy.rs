//! `tortie policy`: its subcommands.

use std::process::ExitCode;

use clap::Subcommand;

use crate::cost::CostOf;
use crate::lint::Lint;
use crate::show::Show;

#[derive(Subcommand)]
pub(crate) enum PolicyCommand {
    /// Find rules that never match or never decide, policies about nobody, and what else is probably not meant
    Lint(Box<Lint>),
    /// Show what is in force for a pod, as its node has it: the policies in words, and the rules of the system beside them
    Show(Box<Show>),
    /// Say what policies cost on Windows nodes, and which rule to change to save most: in a cluster, or in manifests
    Cost(Box<CostOf>),
}

impl PolicyCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Lint(lint) => lint.run(),
            Self::Show(show) => show.run(),
            Self::Cost(cost) => cost.run(),
        }
    }
}

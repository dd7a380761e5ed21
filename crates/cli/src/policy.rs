//! `tortie policy`: its subcommands.

use std::process::ExitCode;

use clap::Subcommand;

use crate::cost::CostOf;
use crate::expectations::Test;
use crate::lint::Lint;
use crate::show::Show;

#[derive(Subcommand)]
pub(crate) enum PolicyCommand {
    /// Find probable mistakes: rules that never match or never decide, policies that select nothing, and more
    Lint(Box<Lint>),
    /// Show what is in force for a pod on its node: the policies in words, with the rules of the system below them
    Show(Box<Show>),
    /// Show what policies cost on Windows nodes, and which rule to change to save most, in a cluster or in manifests
    Cost(Box<CostOf>),
    /// Compare verdicts with expectations, in a cluster or in manifests: "shop/front reaches shop/back on tcp/8443"
    Test(Box<Test>),
}

impl PolicyCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Lint(lint) => lint.run(),
            Self::Show(show) => show.run(),
            Self::Cost(cost) => cost.run(),
            Self::Test(test) => test.run(),
        }
    }
}

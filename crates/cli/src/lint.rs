//! `tortie policy lint`: probable mistakes in the policies of a cluster or of manifests.

use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use serde_json::json;
use tortie_api::Kind;
use tortie_oracle::Snapshot;
use tortie_reach::lint::{Finding, Level, lint};

use crate::doubts::{Doubts, NOT_CERTAIN};
use crate::explain::{DENIED, FAINT, coloured};
use crate::output::{self, Format};
use crate::snapshot::Source;

pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();

#[derive(clap::Args)]
pub(crate) struct Lint {
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    source: Source,
}

impl Lint {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(read) = self.source.read()? else { return Ok(ExitCode::from(2)) };
        let snapshot = &read.snapshot;
        let findings = lint(snapshot);
        let doubts = Doubts::new(&read.doubts, &[snapshot]);
        let mut bad = findings.iter().filter(|finding| finding.level != Level::Note);
        match self.output {
            Format::Text => text(snapshot, &findings, &doubts),
            Format::Json => {
                let findings: Vec<_> = findings.iter().map(|finding| of_finding(finding, &doubts)).collect();
                let mut document = json!({"findings": findings});
                read.add_to(&mut document);
                output::line(&serde_json::to_string_pretty(&document)?);
            }
        }
        // Notes concern other products, so they are not mistakes.
        let is_certain = bad.any(|finding| doubts.of_object(&finding.object).is_empty());
        Ok(match (is_certain, doubts.all().is_empty()) {
            (true, _) => ExitCode::from(1),
            (false, false) => ExitCode::from(NOT_CERTAIN),
            (false, true) => ExitCode::SUCCESS,
        })
    }
}

fn text(snapshot: &Snapshot, findings: &[Finding], doubts: &Doubts<'_>) {
    for finding in findings {
        let location = location(finding).map_or_else(String::new, |location| format!("{location}: "));
        let field = if finding.field.is_empty() { String::new() } else { format!(": {}", finding.field) };
        let level = match finding.level {
            Level::Error => coloured(DENIED, "error"),
            Level::Warning => coloured(WARNING, "warning"),
            Level::Note => coloured(FAINT, "note"),
        };
        let uncertain = if doubts.of_object(&finding.object).is_empty() { "" } else { " (not certain)" };
        output::line(&format!(
            "{location}{level}[{}]: {}{field}: {}{uncertain}",
            finding.code, finding.object, finding.problem
        ));
        output::line(&format!("    {} {}", coloured(FAINT, "because:"), finding.witness));
        output::line(&format!("    {} {}", coloured(FAINT, "to do:  "), finding.advice));
    }
    let of = |level| findings.iter().filter(|finding| finding.level == level).count() as u64;
    let (errors, warnings, notes) = (of(Level::Error), of(Level::Warning), of(Level::Note));
    match findings {
        [] if !doubts.all().is_empty() => output::line("nothing found, and not everything was read (above)"),
        [] => output::line("nothing found"),
        _ => {
            let counts = [(errors, "error"), (warnings, "warning"), (notes, "note")];
            let counts = counts.map(|(count, what)| output::count(count, what));
            output::line(&counts.join(", "));
        }
    }
    let is_under_policy = |kind| matches!(kind, Kind::Pod | Kind::WorkloadEndpoint | Kind::HostEndpoint);
    if !snapshot.iter().any(|(key, _)| is_under_policy(key.kind)) {
        output::line("There are no pods, so only findings that do not depend on pods are shown.");
    }
}

fn location(finding: &Finding) -> Option<String> {
    finding.location.as_ref().map(|(file, line)| format!("{file}:{line}"))
}

fn of_finding(finding: &Finding, doubts: &Doubts<'_>) -> serde_json::Value {
    json!({
        "level": finding.level, "code": finding.code, "object": finding.object.to_string(), "field": finding.field,
        "certain": doubts.of_object(&finding.object).is_empty(),
        "place": location(finding), "problem": finding.problem, "witness": finding.witness, "advice": finding.advice,
    })
}

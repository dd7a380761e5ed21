//! `tortie policy test`: compares verdicts with the expectations of a file.

mod sentence;
mod verdicts;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use serde_json::{Value, json};

use crate::junit::{self, Case, Suite};
use crate::snapshot::Source;
use crate::{filenames, output};
use sentence::Expectation;
use verdicts::{Outcome, Verdicts};

/// The field of the file that has the sentences.
const FIELD: &str = "expectations";
/// The number of wrong pairs that are printed for one expectation.
const SHOWN: usize = 3;

#[derive(clap::Args)]
pub(crate) struct Test {
    /// The file with the expectations, or - for standard input
    #[arg(required_unless_present = "record")]
    expectations: Option<PathBuf>,
    /// Print the present verdicts as expectations
    #[arg(long, conflicts_with = "expectations")]
    record: bool,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = TestFormat::Text)]
    output: TestFormat,
    #[command(flatten)]
    source: Source,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TestFormat {
    Text,
    Json,
    Junit,
}

/// An expectation of a file.
struct Expected {
    line: usize,
    text: String,
    expectation: Expectation,
}

impl Test {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let file = self.expectations.clone().unwrap_or_default();
        let expected = match self.record {
            true => Vec::new(),
            false => read(&file)?,
        };
        let Some(read) = self.source.read_valid()? else { return Ok(ExitCode::from(2)) };
        let verdicts = Verdicts::new(&read.snapshot);
        if self.record {
            let sentences = verdicts.record();
            if self.output != TestFormat::Text {
                bail!("--record prints YAML; remove -o");
            }
            if sentences.is_empty() {
                bail!("there are neither pods nor host endpoints, so there is nothing to record");
            }
            if !verdicts.has_host_endpoints() {
                output::error_line(
                    "note: there are no host endpoints, so what reaches nodes is not recorded",
                );
            }
            output::line(&format!("{FIELD}:"));
            sentences.iter().for_each(|sentence| output::line(&format!("- {sentence}")));
            return Ok(ExitCode::SUCCESS);
        }
        let outcomes: Vec<(Expected, Outcome)> = expected
            .into_iter()
            .map(|expected| {
                let outcome = verdicts.judge(&expected.expectation);
                (expected, outcome)
            })
            .collect();
        let failed = outcomes.iter().filter(|(_, outcome)| !outcome.holds()).count();
        match self.output {
            TestFormat::Text => print_text(&file, &outcomes, failed),
            TestFormat::Json => output::line(&serde_json::to_string_pretty(&document(&file, &outcomes))?),
            TestFormat::Junit => output::text(&junit::document(&suite(&file, &outcomes))),
        }
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Reads the expectations of a file: a list of sentences in the field `expectations`.
fn read(file: &Path) -> anyhow::Result<Vec<Expected>> {
    let text = filenames::read(file)?;
    let name = file.display();
    let documents = tortie_api::from_yaml(&text).map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
    let [document] = &documents[..] else { bail!("{name}: one document with the field {FIELD} is expected") };
    let unknown = document.as_object().into_iter().flatten().find(|(field, _)| *field != FIELD);
    if let Some((field, _)) = unknown {
        bail!("{name}: the field {field} is unknown; the file has the field {FIELD}");
    }
    let sentences = document.get(FIELD).and_then(Value::as_array);
    let sentences =
        sentences.with_context(|| format!("{name}: the field {FIELD} is no list of sentences"))?;
    if sentences.is_empty() {
        bail!("{name}: there are no expectations");
    }
    let (lines, mut begin): (Vec<&str>, usize) = (text.lines().collect(), 0);
    let (mut all, mut problems) = (Vec::new(), 0_u64);
    for sentence in sentences {
        let text = sentence.as_str().unwrap_or_default();
        // A sentence that is written over several lines is reported at the line of the one before.
        let found = lines.iter().skip(begin).position(|line| !text.is_empty() && line.contains(text));
        let line = begin + found.map_or(0, |skipped| skipped + 1);
        begin = line;
        match Expectation::parse(text) {
            Ok(expectation) => all.push(Expected { line, text: text.to_owned(), expectation }),
            Err(error) => {
                output::error_line(&format!("{name}:{line}: {error}"));
                problems += 1;
            }
        }
    }
    match problems {
        0 => Ok(all),
        count => bail!("{}", output::count(count, "problem")),
    }
}

fn print_text(file: &Path, outcomes: &[(Expected, Outcome)], failed: usize) {
    for (expected, outcome) in outcomes.iter().filter(|(_, outcome)| !outcome.holds()) {
        output::line(&format!("{}:{}: {}", file.display(), expected.line, expected.text));
        messages(outcome).iter().for_each(|message| output::line(&format!("    {message}")));
    }
    let all = output::count(outcomes.len() as u64, "expectation");
    output::line(&match failed {
        0 => format!("{all}, all hold"),
        failed => format!("{all}, {failed} fail"),
    });
}

/// Why an expectation fails; only some pairs of many.
fn messages(outcome: &Outcome) -> Vec<String> {
    match outcome {
        Outcome::Holds => Vec::new(),
        Outcome::Nothing(end) => vec![format!("{end:?} is no pod, node or address of this cluster")],
        Outcome::Wrong(wrong) => {
            let more = wrong.len().saturating_sub(SHOWN);
            let more = (more > 0).then(|| format!("and {more} more"));
            wrong.iter().take(SHOWN).cloned().chain(more).collect()
        }
    }
}

fn document(file: &Path, outcomes: &[(Expected, Outcome)]) -> Value {
    let one = |(expected, outcome): &(Expected, Outcome)| {
        let wrong = match outcome {
            Outcome::Wrong(wrong) => wrong.clone(),
            outcome => messages(outcome),
        };
        json!({"line": expected.line, "expectation": expected.text, "holds": outcome.holds(), "wrong": wrong})
    };
    json!({"file": file.display().to_string(), "expectations": outcomes.iter().map(one).collect::<Vec<_>>()})
}

fn suite(file: &Path, outcomes: &[(Expected, Outcome)]) -> Suite {
    let cases = outcomes.iter().map(|(expected, outcome)| {
        let messages = messages(outcome);
        let failure = (!messages.is_empty()).then(|| messages.join("; "));
        Case { name: expected.text.clone(), line: Some(expected.line), failure }
    });
    Suite { name: file.display().to_string(), cases: cases.collect() }
}

//! Standard output and error. A failed write to standard output is remembered, and [`end`] converts it to an exit
//! code. If the reader has closed the pipe, nothing is printed about it.

use std::io::{ErrorKind, Result, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::ValueEnum;
use tortie_api::report::ReportedCondition;

/// The format of an answer.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

/// Why standard output could not be written.
static FAILED: OnceLock<std::io::Error> = OnceLock::new();

fn note(result: Result<()>) {
    if let Err(error) = result {
        // The first error is kept.
        let _ = FAILED.set(error);
    }
}

/// The exit code of a command that has printed everything: `failed` instead if standard output failed.
pub(crate) fn end(code: ExitCode, failed: ExitCode) -> ExitCode {
    note(std::io::stdout().flush());
    match FAILED.get() {
        None => code,
        Some(why) if why.kind() == ErrorKind::BrokenPipe => failed,
        Some(why) => {
            error(&format!("standard output: {why}"));
            failed
        }
    }
}

/// Prints help, the version, or the problem with the arguments; returns the exit code.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    let code = ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    let written = error.print();
    // If standard error cannot be written, nobody is there to read it.
    if !error.use_stderr() {
        note(written);
    }
    end(code, ExitCode::from(2))
}

/// Prints text of objects for programs, byte for byte.
pub(crate) fn data(text: &str) {
    note(std::io::stdout().write_all(text.as_bytes()));
}

/// Whether standard output has failed: nobody reads any more.
pub(crate) fn has_failed() -> bool {
    note(std::io::stdout().flush());
    FAILED.get().is_some()
}

/// Text of objects for a terminal: control characters could change what it shows.
pub(crate) fn shown(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Prints text unchanged.
pub fn text(text: &str) {
    note(write!(anstream::stdout(), "{text}"));
}

/// Prints a line.
pub fn line(line: &str) {
    note(writeln!(anstream::stdout(), "{line}"));
}

/// Prints an error.
pub fn error(error: &str) {
    let _ = writeln!(anstream::stderr(), "error: {error}");
}

/// Prints a line to standard error unchanged.
pub fn error_line(line: &str) {
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// A condition as one line: the object that is affected, the reason, its causes and the message.
pub(crate) fn condition(condition: &ReportedCondition) -> String {
    let object = condition.object.as_ref().map(|object| format!("{object}: ")).unwrap_or_default();
    format!("{object}{}: {}", condition.reason, condition.text())
}

/// Prints rows in columns; the first row is the header.
pub(crate) fn columns(rows: &[Vec<String>]) {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| shown(cell).chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{:width$}", shown(cell)));
        line(cells.collect::<Vec<_>>().join("   ").trim_end());
    }
}

/// `1 change`, `2 changes`.
pub fn count(count: impl Into<u64>, what: &str) -> String {
    match count.into() {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

/// The first of these words, and how many there are besides.
pub(crate) fn first_of(words: &[String], most: usize) -> String {
    let shown: Vec<&str> = words.iter().take(most).map(String::as_str).collect();
    match words.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

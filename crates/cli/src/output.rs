//! Standard output and error. What cannot be written to standard output is remembered until the end: [`end`] makes it an
//! exit code. A reader that has gone away (a closed pipe) knows that it has, so nothing is printed about it.

use std::io::{ErrorKind, Result, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::ValueEnum;

/// How an answer is printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

/// Why standard output could not be written.
static FAILED: OnceLock<std::io::Error> = OnceLock::new();

fn note(result: Result<()>) {
    if let Err(error) = result {
        // The first one tells why.
        let _ = FAILED.set(error);
    }
}

/// The exit code of a command that has printed all: `failed` instead where standard output did not take it.
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

/// Prints help, the version, or what is wrong with the arguments; the exit code that goes with it.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    let code = ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    match (error.print(), error.use_stderr()) {
        (written, false) => note(written),
        // Nobody is there to be told.
        (_, true) => {}
    }
    end(code, ExitCode::FAILURE)
}

/// Prints text as it is.
#[cfg(feature = "lab")]
pub(crate) fn text(text: &str) {
    note(write!(anstream::stdout(), "{text}"));
}

/// Prints a line.
pub(crate) fn line(line: &str) {
    note(writeln!(anstream::stdout(), "{line}"));
}

/// Prints what went wrong.
pub(crate) fn error(error: &str) {
    let _ = writeln!(anstream::stderr(), "error: {error}");
}

/// Prints a line to standard error as it is.
pub(crate) fn error_line(line: &str) {
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// Prints rows in columns; the first row is the header.
pub(crate) fn columns(rows: &[Vec<String>]) {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        line(cells.collect::<Vec<_>>().join("   ").trim_end());
    }
}

/// `1 change`, `2 changes`.
pub(crate) fn count(count: impl Into<u64>, what: &str) -> String {
    match count.into() {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

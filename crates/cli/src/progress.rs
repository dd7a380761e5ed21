//! Progress of long commands, on standard error if that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(200);

/// A bar for this many steps.
pub(crate) fn bar(what: &'static str, length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}");
    let bar = ProgressBar::new(length as u64).with_message(what);
    style.map_or(bar.clone(), |style| bar.with_style(style))
}

/// A spinner with what the command waits for, and the time. It disappears when it is dropped.
pub(crate) fn spinner(what: impl Into<String>) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let spinner = ProgressBar::new_spinner().with_message(what.into());
    let spinner = style.map_or(spinner.clone(), |style| spinner.with_style(style));
    spinner.enable_steady_tick(TICK);
    spinner
}

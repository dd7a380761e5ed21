//! The user's editor.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use tempfile::NamedTempFile;

/// The variables that name the editor, as for kubectl, and the default.
const VARIABLES: [&str; 2] = ["KUBE_EDITOR", "EDITOR"];
const DEFAULT: &str = if cfg!(windows) { "notepad" } else { "vi" };

/// Lets the user change a text. Only the user can read the file meanwhile.
///
/// # Errors
/// The editor cannot be started, or it fails.
pub(crate) fn edit(text: &str, extension: &str) -> anyhow::Result<String> {
    let file = file_with(text, extension)?;
    let named = VARIABLES.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    let named = named.unwrap_or_else(|| DEFAULT.to_owned());
    // The variable may contain options, as "code --wait".
    let mut words = named.split_whitespace();
    let Some(program) = words.next() else { bail!("EDITOR has no program") };
    let status = Command::new(program).args(words).arg(file.path()).status();
    let status = status.with_context(|| format!("{program}; EDITOR names another editor"))?;
    if !status.success() {
        bail!("{program} ended with {status}; nothing was changed");
    }
    // Editors may replace the file.
    Ok(std::fs::read_to_string(file.path())?)
}

/// Writes a text to a file that stays, so that the user's work is not lost.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn keep(text: &str, extension: &str) -> anyhow::Result<PathBuf> {
    Ok(file_with(text, extension)?.into_temp_path().keep()?)
}

fn file_with(text: &str, extension: &str) -> std::io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix("tortie-").suffix(&format!(".{extension}")).tempfile()?;
    file.write_all(text.as_bytes())?;
    file.flush()?;
    Ok(file)
}

//! Builds kustomizations by the program that the user has: kustomize is written in Go, and no library in Rust builds what it
//! builds.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The programs that build kustomizations, with the words before the folder.
const BUILDERS: [(&str, &str); 2] = [("kubectl", "kustomize"), ("kustomize", "build")];

/// The manifests of the kustomization in a folder.
pub(crate) fn build(folder: &Path) -> anyhow::Result<String> {
    let shown = folder.display();
    if !folder.is_dir() {
        bail!("-k {shown}: there is no such folder");
    }
    for (program, word) in BUILDERS {
        let words: [&OsStr; 2] = [word.as_ref(), folder.as_os_str()];
        // The user sees what it says, such as warnings of old fields.
        let built = Command::new(program).args(words).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let built = match built {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            built => built.with_context(|| format!("-k {shown}: {program} {word}"))?,
        };
        if !built.status.success() {
            bail!("-k {shown}: {program} {word} failed: {}", built.status);
        }
        return String::from_utf8(built.stdout)
            .with_context(|| format!("-k {shown}: the output of {program} {word}"));
    }
    bail!(
        "-k {shown}: kustomizations are built by kubectl or kustomize, and neither is in PATH; install one, or pipe manifests \
         to -f -"
    );
}

//! Programs that tests write and then start.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a script that can be started at once.
///
/// Another process writes it (`install` of coreutils). If the test did so itself, a child that another thread starts in the
/// meantime would inherit the open file until its own exec, and the kernel starts no program that is open for writing
/// (`ETXTBSY`).
///
/// # Panics
/// The script cannot be written.
#[expect(clippy::expect_used, reason = "a test without its script cannot run")]
pub fn write_script(path: &Path, text: &str) {
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut install = install.spawn().expect("install of coreutils is there");
    let mut stdin = install.stdin.take().expect("it is piped");
    stdin.write_all(text.as_bytes()).expect("install reads the script");
    drop(stdin);
    let status = install.wait().expect("install ends");
    assert!(status.success(), "install cannot write {}: {status}", path.display());
}

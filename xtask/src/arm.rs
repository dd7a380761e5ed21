//! `cargo xtask arm64`: runs the programs of the image for arm64, which no machine of that kind has run yet, under QEMU.
//!
//! QEMU's user mode passes system calls to this machine's kernel. It knows neither nftables nor netlink of routes, so the
//! agent itself cannot be tried in this way.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use setup::{image, packages, workspace};

/// The manifests with expected verdicts.
const EXAMPLES: [&str; 2] = ["examples/kubernetes", "examples/boutique"];

/// Builds the programs, and runs what needs no kernel of its own.
pub(crate) fn run() -> Result<()> {
    packages::install(&packages::ARM_PACKAGES)?;
    let folder = image::programs("arm64")?;
    let programs = Programs { folder };
    println!("{}", programs.tortie(&["version", "--client"])?.trim_end());
    let mut manifests = 0;
    for folder in EXAMPLES {
        for entry in fs::read_dir(workspace()?.join(folder))? {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "expect") {
                programs.check(&path)?;
                manifests += 1;
            }
        }
    }
    if manifests == 0 {
        bail!("there are no examples");
    }
    println!("{manifests} manifests are valid and have the expected verdicts");
    let answer = programs.plugin("VERSION", "{}")?;
    if answer["supportedVersions"].as_array().is_none_or(Vec::is_empty) {
        bail!("the plugin's VERSION is {answer}");
    }
    let nowhere =
        r#"{"cniVersion": "1.1.0", "name": "n", "type": "tortie-cni", "agentSocket": "/dev/null/socket"}"#;
    let answer = programs.plugin("STATUS", nowhere)?;
    if answer["code"] != 50 {
        bail!("the plugin's STATUS without an agent is {answer}");
    }
    println!("the plugin answers VERSION and STATUS");
    Ok(())
}

struct Programs {
    folder: PathBuf,
}

impl Programs {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("qemu-aarch64-static");
        command.arg(self.folder.join(program)).env_clear().env("PATH", "/usr/bin:/bin");
        command
    }

    /// Validates a manifest and compares its verdicts with the expected ones.
    fn check(&self, expected: &Path) -> Result<()> {
        let manifest = expected.with_extension("yml").display().to_string();
        self.tortie(&["validate", "-f", &manifest])?;
        let text = fs::read_to_string(expected)?;
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [verdict, from, "->", to, port] = words[..] else { bail!("no expectation: {line}") };
            let output = self
                .command("tortie")
                .args(["explain", "-f", &manifest, from, to, "--port", port])
                .output()?;
            if output.status.code() != Some(i32::from(verdict != "allowed")) {
                bail!("{manifest} on arm64: {line}: {}", said(&output));
            }
        }
        Ok(())
    }

    /// What `tortie` prints.
    fn tortie(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command("tortie").args(arguments).output()?;
        if !output.status.success() {
            bail!("tortie {} failed on arm64: {}", arguments.join(" "), said(&output));
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The document of the plugin, whether it has succeeded or not.
    fn plugin(&self, verb: &str, config: &str) -> Result<Value> {
        let mut command = self.command("tortie-cni");
        command.env("CNI_COMMAND", verb).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        child.stdin.take().context("no input")?.write_all(config.as_bytes())?;
        let output = child.wait_with_output()?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("tortie-cni {verb} on arm64: {}", said(&output)))
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

//! The licences and sources of all libraries, by `cargo metadata`. `cargo deny` needs minutes to be built.
//!
//! Manifests say which licence a library has. The full texts are left to people, advisories to `cargo xtask soak`.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use setup::command::cargo_program;
use setup::workspace;

/// The licences that libraries may have, by their SPDX names.
const ALLOWED: [&str; 6] = ["Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Unicode-3.0"];

/// Libraries that may not be used, and the reason.
const BANNED: [(&str, &str); 3] = [
    ("aws-lc-rs", "one provider of cryptography is enough: ring"),
    ("openssl-sys", "one provider of cryptography is enough: ring"),
    ("rustables", "GPL, and a C library at build time"),
];

/// The source of libraries: crates.io, by any mirror that cargo is configured to use instead.
const SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// The targets whose libraries count.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "x86_64-pc-windows-gnu"];

/// Checks all libraries.
///
/// # Errors
/// Those that are not allowed, with the reason for each.
pub(crate) fn check() -> Result<()> {
    let mut cargo = cargo_program();
    cargo.current_dir(workspace()?).args(["metadata", "--locked", "--format-version", "1"]);
    let output = cargo
        .args(TARGETS.iter().flat_map(|target| ["--filter-platform", target]))
        .output()
        .context("cargo")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    ensure!(packages.len() > 100, "cargo metadata lists {} packages only", packages.len());
    let resolved = metadata["resolve"]["nodes"].as_array().context("no resolution")?;
    let used: BTreeSet<&str> = resolved.iter().filter_map(|node| node["id"].as_str()).collect();
    let is_used = |package: &&Value| package["id"].as_str().is_some_and(|id| used.contains(id));
    let problems: Vec<String> = packages.iter().filter(is_used).filter_map(problem).collect();
    if !problems.is_empty() {
        bail!("libraries that are not allowed:\n{}", problems.join("\n"));
    }
    Ok(())
}

/// The reason why a package is not allowed.
fn problem(package: &Value) -> Option<String> {
    let name = package["name"].as_str().unwrap_or_default();
    let shown = format!("{name} {}", package["version"].as_str().unwrap_or_default());
    if let Some((_, reason)) = BANNED.iter().find(|(banned, _)| *banned == name) {
        return Some(format!("{shown}: {reason}"));
    }
    match package["source"].as_str() {
        // A crate of the workspace.
        None => return wildcard(package).map(|library| format!("{shown}: {library} has no version")),
        Some(SOURCE) => {}
        Some(other) => return Some(format!("{shown}: its source is {other}")),
    }
    let Some(licence) = package["license"].as_str() else {
        return Some(format!("{shown}: names no licence"));
    };
    (!is_allowed(licence)).then(|| format!("{shown}: {licence}"))
}

/// A library that a crate requires in any version.
fn wildcard(package: &Value) -> Option<&str> {
    let all = package["dependencies"].as_array()?.iter();
    let mut of_registry = all.filter(|dependency| dependency["path"].is_null());
    of_registry.find(|dependency| dependency["req"] == "*")?["name"].as_str()
}

/// True if an SPDX expression is satisfied by allowed licences alone: one of those between OR, each of those between AND. AND binds
/// more tightly than OR (SPDX 2.3, annex D). Old manifests write `/` for OR. An exception (WITH) adds permissions.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = expression.split_whitespace().collect();
    let (allowed, rest) = either(&words);
    allowed && rest.is_empty()
}

/// Reads terms with OR between them. Returns what is left.
fn either<'a, 'b>(words: &'a [&'b str]) -> (bool, &'a [&'b str]) {
    let (mut allowed, mut rest) = both(words);
    while let ["OR", more @ ..] = rest {
        let (other, after) = both(more);
        (allowed, rest) = (allowed || other, after);
    }
    (allowed, rest)
}

/// Reads terms with AND between them.
fn both<'a, 'b>(words: &'a [&'b str]) -> (bool, &'a [&'b str]) {
    let (mut allowed, mut rest) = one(words);
    while let ["AND", more @ ..] = rest {
        let (other, after) = one(more);
        (allowed, rest) = (allowed && other, after);
    }
    (allowed, rest)
}

/// Reads a licence, or an expression in parentheses.
fn one<'a, 'b>(words: &'a [&'b str]) -> (bool, &'a [&'b str]) {
    match words {
        ["(", inner @ ..] => match either(inner) {
            (allowed, [")", rest @ ..]) => (allowed, rest),
            (_, rest) => (false, rest),
        },
        [licence, "WITH", _, rest @ ..] | [licence, rest @ ..] => (ALLOWED.contains(licence), rest),
        // A missing licence is left over, so that it satisfies nothing.
        [] => (false, &["a licence"]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_expression_is_allowed_if_allowed_licences_satisfy_it() {
        for allowed in [
            "MIT",
            "MIT OR Apache-2.0",
            "GPL-3.0 OR MIT",
            "MIT/Apache-2.0",
            "(MIT OR GPL-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0",
            "GPL-2.0 AND X OR MIT",
        ] {
            assert!(is_allowed(allowed), "{allowed}");
        }
        for refused in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "",
            "MIT OR",
            "(MIT",
            "MIT Apache-2.0",
            "MPL-2.0 WITH X",
            "MIT AND (X OR Y)",
        ] {
            assert!(!is_allowed(refused), "{refused}");
        }
    }

    #[test]
    fn licence_source_and_name_of_a_library_count() {
        let package = |name: &str, source: &str, licence: &str| json!({"name": name, "version": "1.0.0", "source": source, "license": licence, "dependencies": []});
        assert_eq!(problem(&package("serde", SOURCE, "MIT")), None);
        for (name, source, licence, reason) in [
            ("openssl-sys", SOURCE, "MIT", "ring"),
            ("x", "git+https://example.com/x", "MIT", "its source"),
            ("x", SOURCE, "GPL-3.0", "GPL-3.0"),
        ] {
            let problem = problem(&package(name, source, licence)).unwrap();
            assert!(problem.contains(reason), "{problem}");
        }
        let own = json!({"name": "own", "version": "1.0.0", "source": null, "dependencies": [
            {"name": "a", "req": "*", "path": "/a"}, {"name": "b", "req": "*"},
        ]});
        assert!(problem(&own).unwrap().contains("b has no version"));
    }
}

//! The manifests of `examples/` with their expectations.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

/// A manifest with its expectations.
pub(crate) struct Example {
    /// Its folder and name.
    pub name: String,
    pub file: PathBuf,
    pub expected: Vec<Expected>,
    /// Whether a lab can run it.
    pub in_lab: bool,
}

/// `allowed  web/client -> web/server  tcp/80`
pub(crate) struct Expected {
    pub allowed: bool,
    pub from: String,
    pub to: String,
    pub port: String,
}

/// Every manifest that has a file of expectations, by name.
pub(crate) fn examples() -> Vec<Example> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut all = Vec::new();
    for folder in fs::read_dir(&root).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        for entry in fs::read_dir(folder.path()).unwrap().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|ending| ending == "expect") {
                let name = path.with_extension("");
                let name = name.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                all.push(example(name, &path));
            }
        }
    }
    all.sort_by(|one, other| one.name.cmp(&other.name));
    all
}

fn example(name: String, path: &Path) -> Example {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let expected = lines.map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [verdict, from, "->", to, port] = words[..] else { panic!("{name}: {line}") };
        let allowed = match verdict {
            "allowed" => true,
            "denied" => false,
            _ => panic!("{name}: {line}"),
        };
        Expected { allowed, from: from.to_owned(), to: to.to_owned(), port: port.to_owned() }
    });
    let expected: Vec<Expected> = expected.collect();
    assert!(!expected.is_empty(), "{name} expects nothing");
    let file = path.with_extension("yml");
    assert!(file.exists(), "{name} has no manifest");
    Example { in_lab: text.starts_with("# Also in a lab."), name, file, expected }
}

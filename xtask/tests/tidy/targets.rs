//! One binary of unit tests and one of integration tests for each package, and none without tests: each binary costs a link.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::metadata;

/// The test binaries beside `integration`: package, binary and the reason.
const EXCEPTIONS: [(&str, &str, &str); 8] = [
    ("tortie-agent", "descriptors", "its test uses all file descriptors of the process"),
    ("tortie-agent", "log", "its tests read the global logger of the process"),
    ("tortie-program", "cni", "its tests make mounts, which tests of `lab` would see"),
    ("tortie-program", "lab", "its tests compare the machine's mounts before and after"),
    ("tortie-linux", "enter", "it enters namespaces with its whole process, which must have one thread"),
    ("tortie-linux", "killed", "it runs itself as the process that is killed"),
    ("tortie-store", "descriptors", "its test limits the file descriptors of the process"),
    ("xtask", "tidy", "the only one of this package; its name says more"),
];

/// A library, program or test of a package.
struct Target {
    package: String,
    name: String,
    kind: String,
    /// The file of its root module.
    root: PathBuf,
    /// True if `cargo test` builds its tests.
    has_tests: bool,
    has_doctests: bool,
}

impl Target {
    fn is_test(&self) -> bool {
        self.kind == "test"
    }

    /// True for a program without the harness that calls functions with `#[test]`.
    fn is_exempt(&self, code: &str) -> bool {
        self.is_test() && code.contains("\nfn main() {")
    }
}

/// The libraries, programs and tests of the workspace.
fn targets() -> Vec<Target> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |package: &Value| {
        let name = text(&package["name"]);
        let target = |target: &Value| Target {
            package: name.clone(),
            name: text(&target["name"]),
            kind: text(&target["kind"][0]),
            root: text(&target["src_path"]).into(),
            has_tests: target["test"] == true,
            has_doctests: target["doctest"] == true,
        };
        package["targets"].as_array().unwrap().iter().map(target).collect::<Vec<_>>()
    };
    let mut all: Vec<_> = metadata()["packages"].as_array().unwrap().iter().flat_map(of).collect();
    all.retain(|target| ["lib", "cdylib", "bin", "test"].contains(&target.kind.as_str()));
    all
}

/// The code of a module and of its submodules.
fn code(file: &Path, is_root: bool) -> String {
    let mut code = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let folder = file.parent().unwrap();
    let below = if is_root || file.ends_with("mod.rs") { folder.to_owned() } else { file.with_extension("") };
    for (name, path) in modules(&code) {
        let found = match path {
            Some(path) => folder.join(path),
            None => {
                let file = below.join(format!("{name}.rs"));
                if file.exists() { file } else { below.join(name).join("mod.rs") }
            }
        };
        code += &self::code(&found, false);
    }
    code
}

/// The modules that code declares in files of their own: the name, and the path if an attribute says it.
fn modules(code: &str) -> Vec<(String, Option<String>)> {
    let (mut found, mut path) = (Vec::new(), None);
    for line in code.lines() {
        if let Some(given) = line.strip_prefix("#[path = \"") {
            path = given.strip_suffix("\"]").map(str::to_owned);
        } else if let Some(name) = module(line) {
            found.push((name.to_owned(), path.take()));
        }
    }
    found
}

/// The name of the module that a line declares.
fn module(line: &str) -> Option<&str> {
    let (visibility, name) = line.split_once("mod ")?;
    let is_declaration = visibility.is_empty() || visibility.starts_with("pub") && visibility.ends_with(' ');
    name.strip_suffix(';').filter(|_| is_declaration)
}

/// True if code contains a test.
fn has_test(code: &str) -> bool {
    code.lines()
        .any(|line| ["#[test]", "#[tokio::test"].iter().any(|test| line.trim_start().starts_with(test)))
}

#[test]
fn each_package_has_one_binary_of_integration_tests_except_for_listed_ones() {
    let mut exceptions: BTreeSet<(String, String)> = BTreeSet::new();
    for target in targets().into_iter().filter(Target::is_test) {
        let is_listed =
            EXCEPTIONS.iter().any(|(package, name, _)| *package == target.package && *name == target.name);
        if is_listed {
            exceptions.insert((target.package, target.name));
        } else {
            assert_eq!(
                target.name,
                "integration",
                "{}: make it a module of tests/integration, or list it with a reason",
                target.root.display()
            );
        }
    }
    let listed = EXCEPTIONS.map(|(package, name, _)| (package.to_owned(), name.to_owned()));
    assert_eq!(exceptions, listed.into(), "exceptions that exist, and those that are listed");
    assert!(EXCEPTIONS.iter().all(|(_, _, reason)| !reason.is_empty()));
}

#[test]
fn only_targets_with_tests_become_test_binaries() {
    for target in targets() {
        let (code, of) = (code(&target.root, true), target.root.display());
        if target.has_tests {
            let remedy = "has no tests: `test = false`";
            assert!(has_test(&code) || target.is_exempt(&code), "{of} of {} {remedy}", target.package);
        } else {
            assert!(!has_test(&code), "{of} of {} has tests, and `test = false`", target.package);
        }
        assert!(!target.has_doctests, "{of} of {} lacks `doctest = false`", target.package);
    }
}

#[test]
fn modules_in_files_and_tests_are_detected() {
    let code = "mod a;\npub mod b;\npub(crate) mod c;\n#[path = \"d/x.rs\"]\nmod d;\nmod e {\n}\n// mod f;\n    let mod g;\n";
    let found: Vec<_> =
        modules(code).into_iter().map(|(name, path)| (name, path.unwrap_or_default())).collect();
    let expected = [("a", ""), ("b", ""), ("c", ""), ("d", "d/x.rs")];
    assert_eq!(found, expected.map(|(name, path)| (name.to_owned(), path.to_owned())));
    for (code, expected) in [
        ("#[test]\nfn f() {}", true),
        ("    #[test]\n", true),
        ("#[tokio::test(flavor = \"multi_thread\")]\n", true),
        ("// #[test]\n", false),
        ("#[cfg(test)]\nmod tests;", false),
    ] {
        assert_eq!(has_test(code), expected, "{code}");
    }
}

//! Checks the invariants of ARCHITECTURE.md that are visible in the source.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The crates in the order of ARCHITECTURE.md: each may depend only on earlier ones.
const ROOMS: [&str; 18] = [
    "selector",
    "api",
    "policy",
    "oracle",
    "reach",
    "dataplane",
    "store",
    "ipam",
    "calc",
    "kernel",
    "linux",
    "hcn",
    "windows",
    "hns-emulator",
    "cni",
    "agent",
    "lab",
    "cli",
];
/// The asynchronous crates; all others are plain functions.
const ASYNC: [&str; 5] = ["store", "ipam", "agent", "lab", "cli"];
/// The crates without clocks, files, sockets and threads.
const PURE: [&str; 7] = ["selector", "api", "policy", "oracle", "reach", "dataplane", "calc"];
/// The only crates with unsafe code.
const UNSAFE: [&str; 2] = ["kernel", "hcn"];
/// The maximum length of a source file.
const MAX_LINES: usize = 700;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(workspace().join(&path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// The dependencies of each crate of the program, by package name.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(workspace())
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let rooms = packages.iter().filter_map(|package| {
        let room = package["name"].as_str().unwrap().strip_prefix("tortie-")?;
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let normal = dependencies.filter(|dependency| dependency["kind"].is_null());
        Some((
            room.to_owned(),
            normal.map(|dependency| dependency["name"].as_str().unwrap().to_owned()).collect(),
        ))
    });
    rooms.collect()
}

/// Every source file of a crate's program.
fn sources(room: &str) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let mut folders = vec![workspace().join("crates").join(room).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let shown = path.strip_prefix(workspace()).unwrap().display().to_string();
                files.push((shown, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

/// The code of a file, without comments and without what is compiled only for tests.
fn code(text: &str) -> String {
    let program = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    program.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_room_is_in_the_list_and_depends_only_on_rooms_before_it() {
    let dependencies = dependencies();
    assert_eq!(dependencies.keys().map(String::as_str).collect::<BTreeSet<_>>(), ROOMS.into_iter().collect());
    for (index, room) in ROOMS.iter().enumerate() {
        for dependency in &dependencies[*room] {
            let Some(other) = dependency.strip_prefix("tortie-") else { continue };
            assert!(ROOMS[..index].contains(&other), "{room} depends on {other}, which is not above it");
        }
    }
    for (room, others) in &dependencies {
        assert!(!others.contains("testkit"), "{room} depends on testkit, which is for tests");
    }
    let architecture = read("ARCHITECTURE.md");
    let mut from = 0;
    for room in ROOMS {
        let row = format!("| `{room}` |");
        let found = architecture[from..].find(&row);
        from += found.unwrap_or_else(|| panic!("ARCHITECTURE.md lacks {row}, or has it in another place"));
    }
}

/// The rooms that a room depends on, directly or by way of others.
fn reachable(room: &str) -> BTreeSet<String> {
    let dependencies = dependencies();
    let (mut reached, mut next) = (BTreeSet::new(), vec![room.to_owned()]);
    while let Some(room) = next.pop() {
        let rooms = dependencies[&room].iter().filter_map(|name| name.strip_prefix("tortie-"));
        next.extend(rooms.filter(|room| reached.insert((*room).to_owned())).map(str::to_owned));
    }
    reached
}

#[test]
fn the_oracle_and_the_compiler_share_no_code_and_agents_have_only_the_compiler() {
    for (room, forbidden) in [
        ("oracle", ["policy", "calc"]),
        ("reach", ["policy", "calc"]),
        ("policy", ["oracle", "reach"]),
        ("agent", ["oracle", "reach"]),
    ] {
        let reached = reachable(room);
        for other in forbidden {
            assert!(!reached.contains(other), "{room} depends on {other}, directly or by way of others");
        }
    }
    assert!(reachable("agent").contains("policy"));
}

#[test]
fn only_the_shells_wait() {
    for (room, dependencies) in dependencies() {
        let waits = dependencies
            .iter()
            .any(|name| ["tokio", "futures", "async-trait", "tonic"].contains(&name.as_str()));
        assert!(!waits || ASYNC.contains(&room.as_str()), "{room} depends on an asynchronous library");
    }
}

#[test]
fn the_core_has_no_clock_no_files_no_sockets_no_threads() {
    for room in PURE {
        for (file, text) in sources(room) {
            for forbidden in [
                "Instant",
                "SystemTime",
                "std::fs",
                "std::thread",
                "std::process",
                "std::env",
                "TcpStream",
                "UnixStream",
                "UdpSocket",
                "async fn",
                "Instant::now",
                "SystemTime",
            ] {
                assert!(!code(&text).contains(forbidden), "{file} uses {forbidden}");
            }
        }
    }
}

#[test]
fn unsafe_code_lives_in_two_rooms() {
    for room in ROOMS {
        let manifest = read(format!("crates/{room}/Cargo.toml"));
        if UNSAFE.contains(&room) {
            for (file, text) in sources(room) {
                let lines: Vec<&str> = text.lines().collect();
                for (number, line) in lines
                    .iter()
                    .enumerate()
                    .filter(|(_, line)| line.contains("unsafe {") || line.contains("unsafe impl"))
                {
                    let reason =
                        lines[number.saturating_sub(6)..=number].iter().any(|line| line.contains("SAFETY:"));
                    assert!(reason, "{file}:{}: an unsafe block without a SAFETY reason: {line}", number + 1);
                }
            }
        } else {
            assert!(
                manifest.contains("[lints]\nworkspace = true"),
                "{room} does not have the workspace's lints"
            );
        }
    }
}

/// Whether the code starts a process, however the type is imported.
fn starts_programs(code: &str) -> bool {
    let renamed = code.contains("process::Command as") || code.contains("process as ");
    renamed
        || ["Command::new(", "posix_spawn", "libc::exec", "libc::system("]
            .iter()
            .any(|way| code.contains(way))
}

#[test]
fn the_program_runs_no_other_program() {
    for room in ROOMS {
        for (file, text) in sources(room) {
            let code = code(&text);
            match room {
                // It starts itself under another name, and what its user writes after `--`: no program is named in
                // the source.
                "lab" => {
                    assert!(!code.contains("Command::new(\""), "{file} runs a program of its own choice")
                }
                _ => assert!(!starts_programs(&code), "{file} runs a program"),
            }
        }
    }
}

#[test]
fn a_program_that_is_run_is_seen() {
    for code in [
        "Command::new(\"ip\")",
        "std::process::Command::new(tool)",
        "tokio::process::Command::new(PATH)",
        "use std::process::Command as C;",
    ] {
        assert!(starts_programs(code), "{code}");
    }
    assert!(!starts_programs("fn enter_on_spawn(command: &mut Command)"));
}

#[test]
fn files_are_short_and_say_what_they_are() {
    for room in ROOMS {
        for (file, text) in sources(room) {
            let lines = text.lines().count();
            assert!(lines <= MAX_LINES, "{file} has {lines} lines; is there more than one idea in it?");
            let begins = text.starts_with("//!") || text.starts_with("#!");
            assert!(begins, "{file} does not begin with what it is (//!)");
        }
    }
}

#[test]
fn every_dependency_has_its_line() {
    let manifest = read("Cargo.toml");
    let table = manifest.split("[workspace.dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
    let listed = read("docs/dependencies.md");
    let mut used = BTreeSet::new();
    for room in ROOMS.iter().map(|room| format!("crates/{room}")).chain(["xtask".to_owned()]) {
        for line in read(format!("{room}/Cargo.toml")).lines() {
            used.extend(line.split(['.', ' ']).next().map(str::to_owned));
        }
    }
    for line in table.lines().filter(|line| line.contains('=') && !line.starts_with('#')) {
        let name = line.split(['=', ' ']).next().unwrap();
        assert!(used.contains(name), "{name} stands in the workspace's table, and nobody uses it");
        if !line.contains("path = ") {
            assert!(listed.contains(&format!("| `{name}` |")), "docs/dependencies.md has no line for {name}");
        }
    }
}

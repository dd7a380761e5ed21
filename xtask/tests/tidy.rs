//! Checks the invariants of ARCHITECTURE.md that are visible in the source.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/problems.rs"]
mod problems;
#[path = "tidy/targets.rs"]
mod targets;
#[path = "tidy/threat_model.rs"]
mod threat_model;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The crates in the order of ARCHITECTURE.md: each may depend only on earlier ones.
const ROOMS: [&str; 26] = [
    "selector",
    "api",
    "policy",
    "oracle",
    "reach",
    "services",
    "dataplane",
    "store",
    "flannel",
    "ipam",
    "calc",
    "kernel",
    "bgp",
    "hcn",
    "cni",
    "linux",
    "windows",
    "hns-emulator",
    "hns-dll",
    "deploy",
    "agent",
    "controllers",
    "servers",
    "lab",
    "cli",
    "program",
];
/// The crates around the program, for development. None of them is part of it.
const TOOLS: [&str; 11] = [
    "judges/attack",
    "judges/bench",
    "judges/chaos",
    "judges/e2e",
    "judges/fuzz",
    "judges/vectors",
    "judges/wine",
    "setup",
    "setup/programs",
    "testkit",
    "xtask",
];
/// The crates that are built before anything else, within seconds.
const TASK_RUNNER: [&str; 3] = ["setup", "setup/programs", "xtask"];
/// The maximum length of the task runner itself.
const MAX_TASK_RUNNER_LINES: usize = 1500;
/// The asynchronous crates; all others are plain functions.
const ASYNC: [&str; 9] = ["store", "flannel", "ipam", "bgp", "agent", "controllers", "lab", "cli", "program"];
/// The crates without clocks, files, sockets and threads.
const PURE: [&str; 8] = ["selector", "api", "policy", "oracle", "reach", "services", "dataplane", "calc"];
/// The only crates with unsafe code.
const UNSAFE: [&str; 3] = ["kernel", "hcn", "hns-dll"];
/// The maximum length of a source file.
const MAX_LINES: usize = 700;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(workspace().join(&path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.as_ref().display()))
}

/// The packages of the workspace, as `cargo metadata` describes them.
fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(workspace())
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The dependencies of each crate of the program, by package name.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = metadata();
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
fn every_crate_is_listed_and_depends_only_on_earlier_ones() {
    let dependencies = dependencies();
    assert_eq!(dependencies.keys().map(String::as_str).collect::<BTreeSet<_>>(), ROOMS.into_iter().collect());
    for (index, room) in ROOMS.iter().enumerate() {
        for dependency in &dependencies[*room] {
            let Some(other) = dependency.strip_prefix("tortie-") else { continue };
            assert!(ROOMS[..index].contains(&other), "{room} depends on {other}, which is not above it");
        }
    }
    for (room, others) in &dependencies {
        for tool in ["testkit", "setup"] {
            assert!(!others.contains(tool), "{room} depends on {tool}, which is for tests");
        }
    }
    let architecture = read("ARCHITECTURE.md");
    let mut from = 0;
    for room in ROOMS {
        let row = format!("| `{room}` |");
        let found = architecture[from..].find(&row);
        from += found.unwrap_or_else(|| panic!("ARCHITECTURE.md lacks {row}, or has it in another place"));
    }
}

/// The crates that a crate depends on, directly or indirectly.
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
fn oracle_and_compiler_share_no_code_and_agents_use_only_the_compiler() {
    for (room, forbidden) in [
        ("oracle", ["policy", "calc"]),
        ("reach", ["policy", "calc"]),
        ("policy", ["oracle", "reach"]),
        ("agent", ["oracle", "reach"]),
        ("services", ["oracle", "policy"]),
    ] {
        let reached = reachable(room);
        for other in forbidden {
            assert!(!reached.contains(other), "{room} depends on {other}, directly or by way of others");
        }
    }
    assert!(reachable("agent").contains("policy"));
}

#[test]
fn only_listed_crates_are_asynchronous() {
    for room in ROOMS.into_iter().filter(|room| !ASYNC.contains(room)) {
        let reached = libraries(room);
        for library in ["tokio", "futures", "async-trait", "tonic"] {
            assert!(!reached.contains(library), "{room} reaches {library}, an asynchronous library");
        }
    }
}

#[test]
fn the_core_reaches_no_library_with_clocks_files_or_sockets() {
    for room in PURE {
        let reached = libraries(room);
        for library in
            ["jiff", "mio", "prost", "rand", "redb", "rustix", "socket2", "tempfile", "tracing", "uuid"]
        {
            assert!(!reached.contains(library), "{room} reaches {library}, directly or by way of others");
        }
    }
    assert!(libraries("ipam").contains("redb"), "what is reached by way of others is not seen");
}

/// The libraries that a crate depends on, directly or indirectly. Its own dependencies come from its manifest, which
/// separates those of tests; theirs come from Cargo.lock.
fn libraries(room: &str) -> BTreeSet<String> {
    let dependencies = dependencies();
    let rooms = reachable(room).into_iter().chain([room.to_owned()]);
    let direct = rooms.flat_map(|room| dependencies[&room].iter().cloned().collect::<Vec<_>>());
    let mut next: Vec<String> = direct.filter(|name| !name.starts_with("tortie-")).collect();
    let locked = locked();
    let mut reached = BTreeSet::new();
    while let Some(library) = next.pop() {
        next.extend(locked.get(&library).into_iter().flatten().cloned());
        reached.insert(library);
        next.retain(|library| !reached.contains(library));
    }
    reached
}

/// The dependencies of each package in Cargo.lock, for all of its versions together.
fn locked() -> BTreeMap<String, BTreeSet<String>> {
    let mut packages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in read("Cargo.lock").split("[[package]]").skip(1) {
        let quoted = |text: &str| text.split('"').nth(1).unwrap_or_default().to_owned();
        let name = package.lines().find(|line| line.starts_with("name = ")).map(quoted).unwrap();
        let dependencies = package.lines().filter(|line| line.starts_with(" \""));
        // A version follows the name if there are several.
        let names = dependencies.map(|line| quoted(line).split(' ').next().unwrap_or_default().to_owned());
        packages.entry(name).or_default().extend(names);
    }
    packages
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
fn only_the_shell_of_the_bgp_speaker_has_clocks_and_sockets() {
    let core: Vec<_> = sources("bgp").into_iter().filter(|(file, _)| !file.contains("/speaker/")).collect();
    assert!(core.len() > 10, "{} files", core.len());
    for (file, text) in core {
        for forbidden in ["Instant", "SystemTime", "std::fs", "std::thread", "TcpStream", "tokio", "async fn"]
        {
            assert!(!code(&text).contains(forbidden), "{file} uses {forbidden}");
        }
    }
}

#[test]
fn unsafe_code_is_limited_to_listed_crates() {
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
            .any(|call| code.contains(call))
}

#[test]
fn the_program_runs_no_other_program() {
    for room in ROOMS {
        for (file, text) in sources(room) {
            let code = code(&text);
            match room {
                // It starts itself under another name, the program that its user writes after `--`, and etcd if its
                // user chooses that datastore.
                "lab" => {
                    let code = code.replace("Command::new(\"etcd\")", "");
                    assert!(!code.contains("Command::new(\""), "{file} runs a program of its own choice")
                }
                // The specification has it execute the IPAM plugin that the network configuration names.
                "cni" => {
                    assert!(!code.contains("Command::new(\""), "{file} runs a program of its own choice")
                }
                // It starts servers for tests.
                "servers" => {}
                // The editor that the user names, and the builder of kustomizations for -k.
                "cli" if file.ends_with("/editor.rs") || file.ends_with("/kustomize.rs") => {}
                _ => assert!(!starts_programs(&code), "{file} runs a program"),
            }
        }
    }
}

#[test]
fn the_task_runner_is_small_and_builds_none_of_the_program() {
    for tool in TASK_RUNNER {
        let manifest = read(format!("{tool}/Cargo.toml"));
        let program =
            manifest.lines().find(|line| line.starts_with("tortie-") || line.starts_with("testkit"));
        assert!(program.is_none(), "{tool} depends on the program: {program:?}");
    }
    let files = fs::read_dir(workspace().join("xtask/src")).unwrap().flatten();
    let lines: usize = files.map(|file| fs::read_to_string(file.path()).unwrap().lines().count()).sum();
    assert!(lines <= MAX_TASK_RUNNER_LINES, "xtask/src has {lines} lines; judges are in judges/");
}

#[test]
fn starting_a_program_is_detected() {
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
fn files_are_short_and_begin_with_their_purpose() {
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
fn every_dependency_is_documented() {
    let manifest = read("Cargo.toml");
    let table = manifest.split("[workspace.dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
    let listed = read("docs/dependencies.md");
    let mut used = BTreeSet::new();
    for room in ROOMS.iter().map(|room| format!("crates/{room}")).chain(TOOLS.map(str::to_owned)) {
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

/// The functions between a store's event and the kernel's transaction, as ARCHITECTURE.md lists them.
#[test]
fn the_path_from_a_label_to_a_set_element_is_short_and_exists() {
    let text = fs::read_to_string(workspace().join("ARCHITECTURE.md")).unwrap();
    let section = text.split("## From a label to an element of a set").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split('`');
        let (function, file) = (cells.next()?.to_owned(), cells.nth(1)?.to_owned());
        file.ends_with(".rs").then_some((function, file))
    };
    let rows: Vec<(String, String)> = section.lines().filter_map(row).collect();
    assert!((15..=25).contains(&rows.len()), "{} functions", rows.len());
    for (function, file) in rows {
        let source = fs::read_to_string(workspace().join(&file)).unwrap();
        assert!(source.contains(&format!("fn {function}")), "{file} has no function {function}");
    }
}

#[test]
fn only_parent_and_child_files_use_each_other() {
    for room in ROOMS {
        let sources = sources(room);
        let below = format!("crates/{room}/src/");
        let files: Vec<_> = sources.iter().map(|(file, text)| (&file[below.len()..], code(text))).collect();
        let circles = circles::circles(&files);
        assert!(circles.is_empty(), "{room}: files that use each other in a circle: {circles:?}");
    }
}

#[test]
fn type_names_are_unique_within_a_crate() {
    for room in ROOMS {
        let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (file, text) in sources(room).into_iter().filter(|(file, _)| !file.contains("/tests")) {
            for name in code(&text).lines().filter_map(declared) {
                files.entry(name.to_owned()).or_default().insert(file.clone());
            }
        }
        files.retain(|_, files| files.len() > 1);
        assert!(files.is_empty(), "{room}: types that share a name: {files:?}");
    }
}

/// The type that a line declares, except associated types.
fn declared(line: &str) -> Option<&str> {
    let is_indented = line.starts_with(' ');
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub"));
    let keyword = words.next()?;
    let declares =
        ["struct", "enum", "trait", "union"].contains(&keyword) || keyword == "type" && !is_indented;
    let end = |c: char| !c.is_alphanumeric() && c != '_';
    words.next().filter(|_| declares)?.split(end).next().filter(|name| !name.is_empty())
}

#[test]
fn referenced_files_exist() {
    let listed = Command::new("git").args(["ls-files"]).current_dir(workspace()).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut missing: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for file in listed.lines().filter(|file| file.ends_with(".rs") || file.ends_with(".md")) {
        // A listed file may be deleted in the work tree.
        let Ok(text) = fs::read_to_string(workspace().join(file)) else { continue };
        for reference in text.lines().flat_map(|line| references(line, file.ends_with(".md"))) {
            let folder = Path::new(file).parent().unwrap();
            let roots = [Path::new(""), folder, Path::new("docs")];
            if !roots.iter().any(|root| workspace().join(root).join(&reference).exists()) {
                missing.entry(reference).or_default().insert(file);
            }
        }
    }
    assert!(missing.is_empty(), "files that do not exist, with the files that refer to them: {missing:?}");
}

/// The files of the repository that a line of a document or a comment refers to: Markdown files by name, other files
/// by their complete path.
fn references(line: &str, is_document: bool) -> Vec<String> {
    let Some(text) =
        (if is_document { Some(line) } else { line.split_once("//").map(|(_, comment)| comment) })
    else {
        return Vec::new();
    };
    let parts = text.split(|c: char| !c.is_alphanumeric() && !"/._-".contains(c));
    let parts = parts.map(|part| part.trim_matches('.').trim_start_matches("./"));
    let names = parts.filter(|part| {
        let is_path = ["crates/", "judges/", "setup/", "testkit/", "xtask/", "docs/", "examples/"]
            .iter()
            .any(|root| part.starts_with(root));
        let is_file =
            [".rs", ".md", ".yml", ".yaml", ".toml", ".json", ".proto"].iter().any(|end| part.ends_with(end));
        is_path && is_file || part.ends_with(".md") && !part.starts_with('/') && part.len() > 3
    });
    names.map(str::to_owned).collect()
}

#[test]
fn references_are_detected() {
    for (line, is_document, expected) in [
        (
            "/// See `crates/calc/tests/integration/classes.rs`, and docs/policy.md.",
            false,
            vec!["crates/calc/tests/integration/classes.rs", "docs/policy.md"],
        ),
        ("let path = \"docs/policy.md\";", false, vec![]),
        ("[policy](docs/policy.md#18) and hns.md 2.6", true, vec!["docs/policy.md", "hns.md"]),
        ("/srv/notes.md, a.rs", true, vec![]),
    ] {
        assert_eq!(references(line, is_document), expected, "{line}");
    }
}

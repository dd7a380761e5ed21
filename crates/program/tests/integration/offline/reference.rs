//! `docs/reference.md` and the program have the same commands and exit codes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

fn tortie(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    // Of no datastore of whoever runs the test.
    command.args(arguments).env("TORTIE_STORE", "unix:/nowhere/at/all").env_remove("NODENAME");
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The commands of the first cells of the table: `` `tortie store check`, `repair` `` has two.
fn documented() -> BTreeSet<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut found = BTreeSet::new();
    for row in page.lines().filter(|line| line.starts_with("| `tortie ")) {
        let cell = row.split(" | ").next().unwrap();
        let mut first: Option<Vec<&str>> = None;
        for code in cell.split('`').skip(1).step_by(2) {
            let is_name = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
            let is_name = |word: &&str| is_name(word) && !word.starts_with('-');
            let words: Vec<&str> = code.split(' ').take_while(is_name).collect();
            match (&first, &words[..]) {
                (_, ["tortie", path @ ..]) => {
                    found.insert(path.join("-"));
                    first = Some(path.to_vec());
                }
                (Some(path), [name]) => {
                    found.insert([&path[..path.len() - 1], &[name]].concat().join("-"));
                }
                _ => {}
            }
        }
    }
    found
}

/// The man pages have each command that is no secret.
#[test]
fn the_table_of_commands_has_each_command() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(tortie(&["man", &folder.path().display().to_string()]).0, Some(0));
    let pages = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap());
    let all: BTreeSet<String> =
        pages.filter_map(|page| Some(page.strip_prefix("tortie-")?.strip_suffix(".1")?.to_owned())).collect();
    let documented = documented();
    let unknown: Vec<_> = documented.difference(&all).collect();
    assert!(unknown.is_empty(), "the page has commands that the program does not have: {unknown:?}");
    let is_group = |one: &str| all.iter().any(|other| other.starts_with(&format!("{one}-")));
    let missing: Vec<_> = all.difference(&documented).filter(|one| !is_group(one)).collect();
    assert!(missing.is_empty(), "the page lacks {missing:?}");
}

#[test]
fn who_gets_no_answer_gets_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good.yaml");
    std::fs::write(&good, "{apiVersion: v1, kind: Namespace, metadata: {name: a}}").unwrap();
    let bad = folder.path().join("bad.yaml");
    std::fs::write(
        &bad,
        "{apiVersion: projectcalico.org/v3, kind: NetworkPolicy, metadata: {name: a}, spec: {order: x}}",
    )
    .unwrap();
    let [good, bad] = [&good, &bad].map(|path| path.to_str().unwrap());
    for arguments in [
        &["get", "foo"][..],
        &["get", "pods", "--store", "foo"],
        &["get", "pods"],
        &["get", "-f", "/nowhere.yaml"],
        &["apply", "-f", "/nowhere.yaml"],
        &["apply", "-f", bad],
        &["apply", "-f", good],
        &["create", "-f", good],
        &["replace", "-f", good],
        &["diff", "-f", good],
        &["delete", "pod"],
        &["delete", "pod", "a"],
        &["delete", "-f", "/nowhere.yaml"],
        &["label", "pod", "a"],
        &["label", "pod", "a", "x=y"],
        &["patch", "pod", "a", "-p", "["],
        &["edit", "foo", "a"],
        &["describe", "foo", "a"],
        &["validate", "-f", "/nowhere.yaml"],
        &["convert", "-f", "/nowhere.yaml"],
        &["convert", "-f", bad],
        &["explain", "a/b", "a/c", "-f", "/nowhere.yaml"],
        &["explain", "a/b", "a/c"],
        &["matrix", "-f", bad],
        &["preview", "-f", "/nowhere.yaml"],
        &["policy", "lint", "-f", bad],
        &["policy", "test", "/nowhere.yaml"],
        &["policy", "show", "a/b", "--agent-socket", "/nowhere"],
        &["ipam", "show"],
        &["ipam", "check"],
        &["ipam", "release", "--ip", "x"],
        &["pool", "migrate", "a", "b"],
        &["bgp", "peers", "--agent-socket", "/nowhere"],
        &["routes"],
        &["status", "--kubeconfig", "/nowhere"],
        &["install", "--kubeconfig", "/nowhere"],
        &["uninstall", "--kubeconfig", "/nowhere"],
        &["calico", "stop", "--kubeconfig", "/nowhere"],
        &["datastore", "export", "-o", "/dev/null/a"],
        &["datastore", "lock"],
        &["store", "init", "--data", "/dev/null/a"],
        &["store", "check", "--data", "/dev/null/a"],
        &["store", "backup", "--data", "/dev/null/a", "--to", "/dev/null/b"],
        &["store", "serve", "--data", "/dev/null/a", "--socket", "/dev/null/b"],
        &["certs", "node", "a", "--folder", "/dev/null/a"],
        &["connectivity", "test"],
        &["agent"],
        &["agent", "log-level", "debug", "--agent-socket", "/nowhere"],
        &["man", "/dev/null/a"],
        &["completion", "tcsh"],
        &["fly"],
        &[],
    ] {
        let (code, problem) = tortie(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {problem}");
        assert!(!problem.is_empty(), "{arguments:?}");
    }
}

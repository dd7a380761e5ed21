//! The pages and the program have the same commands, options and samples of output, and errors end with 2. `tests/lab/documented.rs` runs the commands
//! of the pages.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn tortie(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    // Of no datastore of whoever runs the test.
    command.args(arguments).env("TORTIE_STORE", "unix:/nowhere/at/all").env_remove("NODENAME");
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The commands of the first cells of the table: `` `tortie store check`, `repair` `` has two.
fn documented() -> BTreeSet<String> {
    let page = std::fs::read_to_string(root().join("docs/reference.md")).unwrap();
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
        &["matrix", "--strict", "-f", bad],
        &["preview", "-f", "/nowhere.yaml"],
        &["policy", "lint", "--strict", "-f", bad],
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

/// A command line on a page.
struct Line {
    /// The page and the number of the line.
    at: String,
    words: Vec<String>,
    /// It is in a block, and so meant to be run as it is.
    is_block: bool,
}

fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "examples/README.md"].map(|page| root().join(page)).into();
    let docs = std::fs::read_dir(root().join("docs")).unwrap().map(|file| file.unwrap().path());
    pages.extend(docs.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    pages.sort();
    pages
}

/// The command lines on all pages, each once: in blocks, and in code within text.
fn command_lines() -> Vec<Line> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for (number, line) in (1..).zip(text.lines()) {
            let is_block = line.starts_with("    ");
            let commands: Vec<String> = match is_block {
                true => block(line, text.lines().skip(number)).into_iter().collect(),
                false => line.split('`').skip(1).step_by(2).map(str::to_owned).collect(),
            };
            for command in commands.iter().filter(|command| command.starts_with("tortie ")) {
                let words = words(command);
                if seen.insert(words.clone()) {
                    found.push(Line { at: format!("{}:{number}", page.display()), words, is_block });
                }
            }
        }
    }
    found
}

/// The command of a line in a block, with the lines that continue it.
fn block<'a>(line: &'a str, mut next: impl Iterator<Item = &'a str>) -> Option<String> {
    let begin = line.find("tortie ")?;
    let before = line[..begin].trim_end();
    if !(before.is_empty() || ["&&", "|", "$(", "sudo", "$"].iter().any(|word| before.ends_with(word))) {
        return None;
    }
    let mut command = line[begin..].to_owned();
    while let Some(part) = command.strip_suffix('\\') {
        command = format!("{part} {}", next.next().unwrap_or_default().trim());
    }
    Some(command)
}

/// The words of a command, without what a shell does with it, and without the marks of what is optional.
fn words(command: &str) -> Vec<String> {
    let end = [" # ", "  #", " | ", " > ", " && ", " < ", "; ", " &"]
        .iter()
        .filter_map(|mark| command.find(mark))
        .min();
    let command = command[..end.unwrap_or(command.len())].replace(['\u{2026}', '[', ']'], "");
    let (mut words, mut quote) = (vec![String::new()], None);
    for letter in command.chars() {
        match (letter, quote) {
            (' ', None) if words.last().is_some_and(|word| !word.is_empty()) => words.push(String::new()),
            (' ', None) => {}
            ('"' | '\'', None) => quote = Some(letter),
            (_, Some(open)) if letter == open => quote = None,
            _ => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// With `--help`, the program checks all words before it. Pages may name an option without its value, or with a placeholder.
#[test]
fn the_program_knows_each_command_and_option_of_the_pages() {
    let lines = command_lines();
    assert!(lines.len() > 180, "{} command lines", lines.len());
    let mut unknown = Vec::new();
    for line in &lines {
        // Another program, and the name of any command.
        let words = line.words[1..].split(|word| word == "--" || word == "kubectl").next().unwrap();
        if ["windows", "COMMAND"].contains(&words[0].as_str()) {
            continue;
        }
        let (code, problem) = tortie(&words.iter().map(String::as_str).chain(["--help"]).collect::<Vec<_>>());
        let value = problem.split_once("invalid value '").and_then(|(_, rest)| rest.split('\'').next());
        let is_placeholder =
            value.is_some_and(|value| value.chars().all(|c| c.is_ascii_uppercase() || ":-".contains(c)));
        let lacks_value = !line.is_block && problem.contains("a value is required for");
        if code != Some(0) && !is_placeholder && !lacks_value {
            unknown.push(format!("{}: {}: {problem}", line.at, line.words.join(" ")));
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

/// The samples of pages that need a cluster or a lab, which no test compares.
const NEED_A_CLUSTER: [&str; 3] =
    ["get nodereports", "policy show windows-server -n calico-demo", "policy cost"];

/// A command with its output, as it stands on a page after `$`.
struct Sample {
    at: String,
    words: Vec<String>,
    output: String,
}

fn samples() -> Vec<Sample> {
    let mut found: Vec<Sample> = Vec::new();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let mut is_open = false;
        for (number, line) in (1..).zip(text.lines()) {
            let is_blank = line.trim().is_empty();
            if let Some(command) = line.strip_prefix("    $ ") {
                is_open = command.starts_with("tortie ");
                if is_open {
                    let at = format!("{}:{number}", page.display());
                    found.push(Sample { at, words: words(command), output: String::new() });
                }
            } else if !is_blank && !line.starts_with("    ") {
                is_open = false;
            } else if is_open {
                found.last_mut().unwrap().output += &format!("{}\n", line.trim());
            }
        }
    }
    found
}

/// Returns whether a text has the parts of a sample, one after the other, and nothing else. `…` stands for any words. Pages wrap long
/// lines.
fn fits(sample: &str, text: &str) -> bool {
    let plain = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = plain(text);
    let sample = plain(sample);
    let parts: Vec<&str> = sample.split('\u{2026}').map(str::trim).collect();
    let Some(mut rest) = text.strip_prefix(parts[0]) else { return false };
    for part in &parts[1..] {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.trim().is_empty() || parts.last().is_some_and(|part| part.is_empty())
}

#[test]
fn a_sample_leaves_out_only_what_it_marks() {
    for (sample, text, expected) in [
        ("a b\nc", "a  b c\n", true),
        ("a\nc", "a b c", false),
        ("a\n…\nc", "a b c", true),
        ("a\n…", "a b c", true),
        ("a", "a b", false),
        ("b", "a b", false),
        ("…\nb", "a b", true),
    ] {
        assert_eq!(fits(sample, text), expected, "{sample:?} {text:?}");
    }
}

/// Samples on the examples are what the commands print.
#[test]
fn samples_on_pages_are_what_the_commands_print() {
    let samples = samples();
    let (left, run): (Vec<&Sample>, Vec<&Sample>) =
        samples.iter().partition(|sample| NEED_A_CLUSTER.contains(&sample.words[1..].join(" ").as_str()));
    assert_eq!(left.len(), NEED_A_CLUSTER.len());
    assert!(run.len() >= 5, "{} samples", run.len());
    for Sample { at, words, output } in run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let printed = command.args(&words[1..]).current_dir(root()).output().unwrap();
        let (out, problem) =
            (String::from_utf8_lossy(&printed.stdout), String::from_utf8_lossy(&printed.stderr));
        assert!(printed.status.code().is_some_and(|code| code < 2), "{at}: {words:?}: {problem}");
        assert!(fits(output, &out), "{at}: {words:?} prints\n{out}\nand the page has\n{output}");
    }
}

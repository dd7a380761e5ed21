//! The manifests of `examples/`: each one has the expected verdicts, and a mistake in it is rejected with its
//! position.

use std::fs;
use std::process::Command;

use crate::examples_support::{Example, examples};

/// The minimum number of examples.
const AT_LEAST: usize = 60;

fn tortie(arguments: &[&str]) -> (i32, String, String) {
    let program = env!("CARGO_BIN_EXE_tortie");
    let output = Command::new(program).env_remove("TORTIE_STORE").args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Runs a check of every example, with one thread for each processor; panics with all problems.
fn check_each(check: impl Fn(&Example) -> Vec<String> + Sync) {
    let all = examples();
    assert!(all.len() >= AT_LEAST, "there are only {} examples", all.len());
    let threads = std::thread::available_parallelism().unwrap().get();
    let check = &check;
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let parts = all.chunks(all.len().div_ceil(threads));
        let running: Vec<_> =
            parts.map(|part| scope.spawn(move || part.iter().flat_map(check).collect::<Vec<_>>())).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_example_meets_its_expectations_offline() {
    check_each(|example| {
        let file = example.file.to_str().unwrap();
        let mut wrong = Vec::new();
        for (line, expected) in (1..).zip(&example.expected) {
            let arguments = ["explain", "-f", file, &expected.from, &expected.to, "--port", &expected.port];
            let (code, out, err) = tortie(&arguments);
            if code != i32::from(!expected.allowed) {
                wrong.push(format!(
                    "{}: expectation {line}: {arguments:?}: exit code {code}\n{out}{err}",
                    example.name
                ));
            }
        }
        wrong
    });
}

/// Every other command accepts the examples, too.
#[test]
fn every_example_is_read_by_every_tool() {
    check_each(|example| {
        let file = example.file.to_str().unwrap();
        let mut wrong = Vec::new();
        for arguments in [&["matrix"][..], &["policy", "lint"], &["policy", "cost"]] {
            let (code, out, err) = tortie(&[arguments, &["-f", file]].concat());
            let nobody = code == 2 && arguments == ["policy", "cost"] && err == "error: there are no pods\n";
            if code > 1 && !nobody {
                wrong.push(format!("{}: {arguments:?}: exit code {code}\n{out}{err}", example.name));
            }
        }
        wrong
    });
}

/// A mistake, and its expected message.
struct Mutation {
    text: String,
    /// The line of the mistake; the first is 1.
    line: usize,
    /// The field in the message.
    field: &'static str,
}

/// Kinds that no verdict depends on, whose fields are not read.
const UNRELATED: [&str; 2] = ["ConfigMap", "Ingress"];

/// The mistakes, one after another: an unknown field, a value of a wrong type, an unknown version.
fn mutations(text: &str) -> Vec<Mutation> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut all, mut kind) = (Vec::new(), "");
    for (index, line) in lines.iter().enumerate() {
        let plain = line.trim_start_matches("- ").trim_start();
        let indent = line.len() - plain.len();
        let next = lines.get(index + 1).copied().unwrap_or_default();
        let inner = next.len() - next.trim_start().len();
        // The kind of an object follows its version.
        if indent <= 2
            && let Some(named) =
                next.trim_start().strip_prefix("kind: ").filter(|_| plain.starts_with("apiVersion:"))
        {
            kind = named;
        }
        if UNRELATED.contains(&kind) {
            continue;
        }
        let mut with = |at: usize, changed: Vec<String>, field| {
            let mut lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            lines.splice(at..at + usize::from(at != index + 1 || field != UNKNOWN), changed);
            all.push(Mutation { text: lines.join("\n") + "\n", line: at + 1, field });
        };
        if plain == "spec:" && inner > indent {
            with(index + 1, vec![format!("{:inner$}{UNKNOWN}: 1", "")], UNKNOWN);
        }
        if plain == "metadata:" && next.trim_start().starts_with("name: ") {
            with(index + 1, vec![format!("{:inner$}name: [x]", "")], "metadata.name");
        }
        if plain.starts_with("apiVersion: ")
            && indent <= 2
            && next.trim_start().starts_with("kind: ")
            && inner == indent
        {
            with(index, vec![format!("{line}9")], "apiVersion");
        }
    }
    all
}

const UNKNOWN: &str = "nosuchField";

#[test]
fn every_mistake_in_an_example_is_rejected_with_its_position() {
    let dir = tempfile::tempdir().unwrap();
    check_each(|example| {
        let text = fs::read_to_string(&example.file).unwrap();
        let file = dir.path().join(format!("{}.yml", example.name.replace('/', "-")));
        let file = file.to_str().unwrap();
        let mut wrong = Vec::new();
        let mutations = mutations(&text);
        let kinds = [UNKNOWN, "metadata.name", "apiVersion"];
        for field in kinds {
            // One of the first, one of the last and two in between, because large examples are repetitive.
            let of: Vec<&Mutation> = mutations.iter().filter(|mutation| mutation.field == field).collect();
            let step = of.len().div_ceil(4).max(1);
            if of.is_empty() {
                wrong.push(format!("{}: nothing to mutate for {field}", example.name));
            }
            for mutation in of.iter().step_by(step).chain(of.last()) {
                fs::write(file, &mutation.text).unwrap();
                let place = format!("{file}:{}: ", mutation.line);
                for arguments in [
                    &["explain", "--strict", "-f", file, "192.0.2.1", "192.0.2.2"][..],
                    &["apply", "--store", "unix:/nowhere", "-f", file],
                ] {
                    let (code, out, err) = tortie(arguments);
                    // `apply` rejects workloads as such, whatever their content.
                    let is_said = |line: &&str| line.contains(&place) && line.contains(mutation.field);
                    let printed = err.lines().any(|line| is_said(&line))
                        || (arguments[0] == "apply" && err.contains("is not known"));
                    // `explain` needs no refusal where no verdict depends on the object.
                    let is_harmless = err.contains("not read, could change no verdict");
                    if (code != 2 || !out.is_empty()) && !is_harmless || !printed {
                        wrong.push(format!(
                            "{}: {} at {place} {}: exit code {code}\n{out}{err}",
                            example.name, field, arguments[0]
                        ));
                    }
                }
            }
        }
        wrong
    });
}

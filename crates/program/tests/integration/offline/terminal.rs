//! Colours: on a terminal, unless the user does not want them, and never in a pipe.

use std::process::{Command, Stdio};

const POLICY: &str = "apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: p}
spec: {selector: app = 'web'}
";

/// The output of a command that finds a mistake, on a terminal or in a pipe.
fn output(on_terminal: bool, no_colour: Option<&str>) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("p.yml");
    std::fs::write(&file, POLICY).unwrap();
    let words = [env!("CARGO_BIN_EXE_tortie"), "validate", "-f", &file.display().to_string()].join(" ");
    // `script` runs a command on a terminal of its own.
    let mut command = Command::new(if on_terminal { "script" } else { "sh" });
    let options: &[&str] = if on_terminal { &["-qec", &words, "/dev/null"] } else { &["-c", &words] };
    command.args(options).env("TERM", "xterm").env_remove("NO_COLOR").stdin(Stdio::null());
    command.envs(no_colour.map(|value| ("NO_COLOR", value)));
    let output = command.output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(text.contains("spec.selector"), "{text}");
    text
}

#[test]
fn colours_are_for_terminals_and_can_be_switched_off() {
    for (on_terminal, no_colour, expected) in [
        (true, None, true),
        (true, Some("1"), false),
        // Only a value that is not empty counts (https://no-color.org).
        (true, Some(""), true),
        (false, None, false),
        (false, Some("1"), false),
    ] {
        let text = output(on_terminal, no_colour);
        assert_eq!(text.contains('\u{1b}'), expected, "{on_terminal} {no_colour:?}: {text:?}");
    }
}

//! What a test does without a program that it needs.

use std::process::Command;

use tortie_servers::programs::{Program, SKIPPED_FILE, can_run};

/// If set, the test binary is the child of another test.
const CHILD: &str = "TORTIE_SERVERS_CHILD";

#[test]
fn a_test_without_its_program_fails_or_is_recorded() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let run = |skips: bool| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "missing::a_test_that_needs_etcd"]).env(CHILD, "1").env("PATH", "/nowhere");
        command.env_remove(SKIPPED_FILE);
        if skips {
            command.env(SKIPPED_FILE, file.path());
        }
        command.output().unwrap()
    };
    let failed = run(false);
    assert!(!failed.status.success());
    let text =
        String::from_utf8_lossy(&failed.stdout).into_owned() + &String::from_utf8_lossy(&failed.stderr);
    assert!(
        text.contains("missing::a_test_that_needs_etcd cannot run: etcd is missing: install it"),
        "{text}"
    );
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "");

    // Each run adds a line.
    for count in 1..=2 {
        assert!(run(true).status.success());
        let lines = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(lines.lines().count(), count);
        assert!(
            lines.starts_with("integration: missing::a_test_that_needs_etcd: etcd is missing: install it"),
            "{lines}"
        );
    }
}

#[test]
fn a_test_that_needs_etcd() {
    if std::env::var_os(CHILD).is_some() {
        assert!(!can_run(&[Program::Etcd]), "etcd is in /nowhere");
    }
}

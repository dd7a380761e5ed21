//! The commands of a lab: its folder, exit codes, and leftovers.

use std::fs;
use std::path::PathBuf;

use rustix::process::Signal;

use super::support::{Lab, Running, User, leftovers};

#[test]
fn a_folder_without_a_lab_is_not_changed() {
    for (name, text) in [("thesis.txt", "years of work"), ("lock", ""), ("tortie-lab", "notes about the lab")]
    {
        let lab = Lab::new(User::Root);
        fs::create_dir(lab.dir()).unwrap();
        fs::write(lab.dir().join(name), text).unwrap();
        fs::write(lab.dir().join("more"), "work").unwrap();
        let output = lab.tortie(&["lab", "demo"]).output().unwrap();
        assert!(!output.status.success());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("holds something that is not a lab's"), "{name}: {errors}");
        assert_eq!(fs::read_to_string(lab.dir().join("more")).unwrap(), "work");
        assert_eq!(fs::read_to_string(lab.dir().join(name)).unwrap(), text);
    }
}

#[test]
fn commands_return_the_exit_codes_of_a_shell() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let script = lab.file("not-executable", "");
    for (command, code, error) in [
        (["sh", "-c", "exit 0"], 0, ""),
        // Programs such as ps look for their own process in /proc.
        (["sh", "-c", "test -e /proc/$$/stat"], 0, ""),
        (["sh", "-c", "exit 7"], 7, ""),
        (["sh", "-c", "kill -TERM $$"], 128 + 15, ""),
        (["no-such-program", "a", "b"], 127, "error: no-such-program: not found\n"),
        ([&script, "a", "b"], 126, "Permission denied"),
    ] {
        let mut arguments = vec!["lab", "capture", "primary", "--"];
        arguments.extend(command);
        let output = lab.tortie(&arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {errors}");
        assert!(errors.contains(error) && errors.lines().count() <= 1, "{command:?}: {errors}");
    }
    // Arguments may be relative.
    let output =
        lab.tortie(&["lab", "capture", "primary", "--", "pwd"]).current_dir("/etc").output().unwrap();
    assert_eq!(output.stdout, b"/etc\n");
    let output = lab.tortie(&["lab", "exec", "nobody", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors, "error: pod default/nobody: is not running in this lab\n");

    // Whatever ends the user's command, the started program ends, too.
    for (signal, code) in [(Signal::INT, Some(130)), (Signal::TERM, Some(143)), (Signal::KILL, None)] {
        let mut capture =
            lab.start(&["lab", "capture", "primary", "--", "sh", "-c", "echo begun; exec sleep 4242"]);
        capture.wait_for_line("begun");
        // A shell that is about to execute another program may lose a signal.
        let is_there = || lab.processes().iter().any(|it| it.command.starts_with("sleep 4242"));
        lab.wait_until("it has begun", is_there);
        capture.signal(signal);
        assert_eq!(capture.wait().code(), code, "{signal:?}");
        lab.wait_until("it has ended", || {
            !lab.processes().iter().any(|it| it.command.contains("sleep 4242"))
        });
    }
    end(&lab, &mut running);
}

/// The kubelet of a deleted node registers it again; the agent then publishes its VTEP.
#[test]
fn a_deleted_node_registers_again() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let node = || lab.json(&["get", "nodes", "-o", "json"])["items"][0]["metadata"].clone();
    let before = node();
    assert_eq!(before["name"], "minion");
    lab.ok(&["delete", "node", "minion"]);
    lab.wait_until("it is as it was", || node()["annotations"] == before["annotations"]);
    for entry in fs::read_dir(lab.dir().join("logs")).unwrap().flatten() {
        let log = fs::read(entry.path()).unwrap();
        assert!(!log.contains(&0x1b), "no colours in {}", entry.path().display());
    }
    end(&lab, &mut running);
}

/// The kernel allows 107 bytes for the path of a socket.
#[test]
fn the_path_of_the_folder_may_be_long() {
    let lab = Lab::new(User::Ordinary);
    let long: PathBuf = lab.dir().with_file_name("long-".repeat(40));
    let command = |arguments: &[&str]| {
        let mut command = lab.tortie(arguments);
        command.env("TORTIE_LAB", &long);
        command
    };
    let demo = command(&["lab", "demo", "-o", "json"]).output().unwrap();
    assert!(demo.status.success(), "{demo:?}");
    let mut up = Running::of(command(&["lab", "up"]));
    up.wait_for_line("the cluster is up");
    let nodes = command(&["get", "nodes"]).output().unwrap();
    assert!(nodes.status.success() && String::from_utf8_lossy(&nodes.stdout).contains("minion"), "{nodes:?}");
    assert!(command(&["lab", "down"]).status().unwrap().success());
    assert_eq!(up.wait().code(), Some(0));
    assert!(!long.exists());
    let alias = |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|target| target == long);
    assert!(!fs::read_dir("/tmp").unwrap().flatten().any(|entry| alias(&entry)), "nothing is left");
}

fn end(lab: &Lab, running: &mut Running) {
    lab.ok(&["lab", "down"]);
    assert_eq!(running.wait().code(), Some(0));
    assert_eq!(leftovers(lab), Vec::<String>::new());
}

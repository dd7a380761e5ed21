//! Servers and folders disappear with the value, and with the process that started them, however it ends.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tortie_servers::Etcd;
use tortie_servers::programs::{Program, can_run};

/// If set, the test binary is the child of another test: it starts etcd, prints its process and folder, and waits.
const CHILD: &str = "TORTIE_SERVERS_CHILD";

fn describe(etcd: &Etcd) -> (i32, PathBuf) {
    let member = &etcd.members()[0];
    (member.process_id().unwrap(), member.log().parent().unwrap().to_owned())
}

/// Whether this process is etcd. (Its number may belong to another program by now.)
fn is_etcd(process: i32) -> bool {
    let command = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command).contains("etcd")
}

fn assert_gone(process: i32, folder: &Path) {
    let start = Instant::now();
    while is_etcd(process) || folder.exists() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "etcd runs: {}, {} exists: {}",
            is_etcd(process),
            folder.display(),
            folder.exists()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_dropped_server_is_gone_at_once() {
    if !can_run(&[Program::Etcd]) {
        return;
    }
    for paused in [false, true] {
        let etcd = Etcd::start().unwrap();
        let (process, folder) = describe(&etcd);
        assert!(is_etcd(process) && folder.exists());
        if paused {
            etcd.members()[0].pause().unwrap();
        }
        drop(etcd);
        assert!(!is_etcd(process) && !folder.exists());
    }
}

#[test]
fn servers_end_with_a_process_that_is_killed_or_exits_without_cleaning_up() {
    if !can_run(&[Program::Etcd]) {
        return;
    }
    for killed in [true, false] {
        let (mut child, process, folder) = start_child();
        assert!(is_etcd(process) && folder.exists());
        if killed {
            child.kill().unwrap();
        } else {
            // It exits when its standard input closes.
            drop(child.stdin.take());
        }
        child.wait().unwrap();
        assert_gone(process, &folder);
    }
}

/// Starts this test binary as a process that runs etcd.
fn start_child() -> (Child, i32, PathBuf) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "nothing_remains::the_child_of_another_test", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.map(Result::unwrap).find(|line| line.starts_with("started ")).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    (child, words[1].parse().unwrap(), words[2].into())
}

#[test]
fn the_child_of_another_test() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let etcd = Etcd::start().unwrap();
    let (process, folder) = describe(&etcd);
    // It follows the test's name in the same line otherwise.
    println!("\nstarted {process} {}", folder.display());
    let _ = std::io::stdin().read_line(&mut String::new());
    // No destructor runs.
    std::process::exit(0);
}

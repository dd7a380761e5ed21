//! Runs the plugin as a runtime does: environment, standard input, standard output, exit code.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tortie_cni::transport::{body_length, encode_answer};
use tortie_cni::{Address, Code, Dns, Failure, Interface, Invocation, NetworkConfig, Route, Success};

struct Ran {
    document: Value,
    success: bool,
}

fn run(environment: &[(&str, &str)], config: &str) -> Ran {
    let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    run_bytes(&environment, config.as_bytes())
}

fn run_bytes(environment: &[(&str, &[u8])], config: &[u8]) -> Ran {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tortie-cni"))
        .env_clear()
        .envs(environment.iter().map(|(name, value)| (name, OsStr::from_bytes(value))))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(config).unwrap();
    let output = child.wait_with_output().unwrap();
    let document =
        if output.stdout.is_empty() { Value::Null } else { serde_json::from_slice(&output.stdout).unwrap() };
    Ran { document, success: output.status.success() }
}

fn config(dir: &Path, version: &str) -> String {
    let socket = dir.join("agent.sock");
    let queue = dir.join("queue");
    json!({"cniVersion": version, "name": "net", "type": "tortie-cni", "agentSocket": socket, "deletionQueue": queue}).to_string()
}

const ADD: [(&str, &str); 5] = [
    ("CNI_COMMAND", "ADD"),
    ("CNI_CONTAINERID", "abc"),
    ("CNI_NETNS", "/run/netns/x"),
    ("CNI_IFNAME", "eth0"),
    ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=p;K8S_POD_NAMESPACE=n"),
];

fn with(changes: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    let changed = |name: &str| changes.iter().any(|(other, _)| *other == name);
    ADD.iter().filter(|(name, _)| !changed(name)).chain(changes).copied().collect()
}

/// An agent that accepts one call and answers it.
fn agent(dir: &TempDir, answer: Result<Option<Success>, Failure>) -> thread::JoinHandle<Invocation> {
    let listener = UnixListener::bind(dir.path().join("agent.sock")).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut header = [0; 4];
        stream.read_exact(&mut header).unwrap();
        let mut body = vec![0; body_length(header).unwrap()];
        stream.read_exact(&mut body).unwrap();
        stream.write_all(&encode_answer(answer).unwrap()).unwrap();
        serde_json::from_slice(&body).unwrap()
    })
}

/// The whole call that the agent gets of [`ADD`] with [`config`].
fn expected(dir: &Path, version: &str) -> Invocation {
    let args = [("IgnoreUnknown", "1"), ("K8S_POD_NAME", "p"), ("K8S_POD_NAMESPACE", "n")];
    Invocation {
        command: tortie_cni::Command::Add,
        container_id: "abc".to_owned(),
        netns: "/run/netns/x".to_owned(),
        interface: "eth0".to_owned(),
        args: args.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        config: NetworkConfig {
            cni_version: version.to_owned(),
            name: "net".to_owned(),
            agent_socket: dir.join("agent.sock"),
            deletion_queue: dir.join("queue"),
            valid_attachments: None,
            extra: [("type".to_owned(), json!("tortie-cni"))].into_iter().collect(),
        },
        delegated: Vec::new(),
    }
}

#[test]
fn add_forwards_the_call_and_prints_the_result_in_the_requested_version() {
    for (version, family) in [("0.3.1", Some("4")), ("0.4.0", Some("4")), ("1.0.0", None), ("1.1.0", None)] {
        let dir = tempfile::tempdir().unwrap();
        let success = Success {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: "0a:00:00:00:00:01".into(),
                sandbox: "/run/netns/x".into(),
            }],
            ips: vec![Address { address: "10.0.0.1/32".into(), interface: 0 }],
            routes: vec![Route { dst: "0.0.0.0/0".into(), gw: Some("169.254.1.1".parse().unwrap()) }],
            dns: Dns { nameservers: vec![[10, 96, 0, 10].into()], ..Dns::default() },
        };
        let agent = agent(&dir, Ok(Some(success)));
        let ran = run(&ADD, &config(dir.path(), version));
        let invocation = agent.join().unwrap();
        assert!(ran.success, "{}", ran.document);
        assert_eq!(invocation, expected(dir.path(), version));
        let mut ip = json!({"address": "10.0.0.1/32", "interface": 0});
        if let Some(family) = family {
            ip["version"] = json!(family);
        }
        assert_eq!(ran.document["cniVersion"], version);
        assert_eq!(ran.document["ips"], json!([ip]));
        assert_eq!(ran.document["interfaces"][0]["sandbox"], "/run/netns/x");
        assert_eq!(ran.document["routes"], json!([{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}]));
        assert_eq!(ran.document["dns"], json!({"nameservers": ["10.96.0.10"]}));
    }
}

#[test]
fn a_failure_of_the_agent_is_printed_and_exits_1() {
    let dir = tempfile::tempdir().unwrap();
    let agent = agent(&dir, Err(Failure::new(Code::IPAM, "no address", "the block is full")));
    let ran = run(&ADD, &config(dir.path(), "1.0.0"));
    agent.join().unwrap();
    assert!(!ran.success);
    assert_eq!(
        ran.document,
        json!({"cniVersion": "1.0.0", "code": 101, "msg": "no address", "details": "the block is full"})
    );
}

#[test]
fn without_the_agent_add_asks_for_a_retry_and_del_waits_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "1.1.0");
    // Without the result of ADD, CHECK does not even ask.
    for (command, code) in [("ADD", 11), ("CHECK", 7), ("GC", 11), ("STATUS", 50)] {
        let ran = run(&with(&[("CNI_COMMAND", command)]), &config);
        assert!(!ran.success, "{command}");
        assert_eq!(ran.document["code"], code, "{command}");
    }
    assert!(!dir.path().join("queue").exists());

    let ran = run(&with(&[("CNI_COMMAND", "DEL"), ("CNI_NETNS", "")]), &config);
    assert!(ran.success, "{}", ran.document);
    assert_eq!(ran.document, Value::Null);
    let files: Vec<_> =
        std::fs::read_dir(dir.path().join("queue")).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files, [dir.path().join("queue/abc+eth0.json")]);
    let waiting: Invocation = serde_json::from_slice(&std::fs::read(&files[0]).unwrap()).unwrap();
    assert_eq!(waiting.container_id, "abc");

    // Names that look alike are different attachments.
    for (container, interface) in [("a-b", "c"), ("a", "b-c")] {
        let del = [("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", container), ("CNI_IFNAME", interface)];
        assert!(run(&with(&del), &config).success);
    }
    assert_eq!(std::fs::read_dir(dir.path().join("queue")).unwrap().count(), 3);

    // If the DEL cannot be stored either, the runtime must not consider the pod deleted.
    std::fs::remove_dir_all(dir.path().join("queue")).unwrap();
    std::fs::write(dir.path().join("queue"), "").unwrap();
    let ran = run(&with(&[("CNI_COMMAND", "DEL")]), &config);
    assert!(!ran.success);
    assert_eq!(ran.document["code"], 11);
}

/// A runtime uses STATUS to decide whether to start pods, so an agent that hangs counts as not available.
#[test]
fn status_fails_soon_if_the_agent_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let _silent = UnixListener::bind(dir.path().join("agent.sock")).unwrap();
    let started = Instant::now();
    let ran = run(&with(&[("CNI_COMMAND", "STATUS")]), &config(dir.path(), "1.1.0"));
    assert_eq!(ran.document["code"], 50, "{}", ran.document);
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn version() {
    for config in ["", "{}", r#"{"cniVersion": "1.0.0"}"#] {
        let ran = run(&[("CNI_COMMAND", "VERSION")], config);
        assert!(ran.success);
        assert_eq!(ran.document["supportedVersions"], json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]));
    }
}

/// Nothing is read as if it were absent or another text.
#[test]
fn what_is_no_text_or_too_large_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let good = config(dir.path(), "1.0.0");
    let add: Vec<(&str, &[u8])> = ADD.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    let failed = |environment: &[(&str, &[u8])], config: &[u8]| {
        let ran = run_bytes(environment, config);
        assert!(!ran.success);
        (ran.document["code"].clone(), ran.document["msg"].as_str().unwrap().to_owned())
    };
    for index in 0..add.len() {
        let mut environment = add.clone();
        environment[index].1 = b"K8S_POD_NAME=\xff";
        let expected = (json!(4), format!("{} is no UTF-8", environment[index].0));
        assert_eq!(failed(&environment, good.as_bytes()), expected);
    }
    let (code, msg) = failed(&add, b"{\"cniVersion\": \"1.0.0\", \"name\": \"\xff\"}");
    assert!(code == 6 && msg.starts_with("the configuration on standard input"), "{code}: {msg}");
    let large = good.replacen('{', &format!("{{\"x\": \"{}\",", "x".repeat(1 << 20)), 1);
    assert_eq!(failed(&add, large.as_bytes()), (json!(7), "the configuration is too large".to_owned()));
}

#[test]
fn bad_calls() {
    let dir = tempfile::tempdir().unwrap();
    let good = config(dir.path(), "1.0.0");
    let good = good.as_str();
    let table = [
        (with(&[("CNI_COMMAND", "add")]), good, 4, "CNI_COMMAND"),
        (with(&[("CNI_CONTAINERID", "")]), good, 4, "CNI_CONTAINERID"),
        (with(&[("CNI_CONTAINERID", "../x")]), good, 4, "CNI_CONTAINERID"),
        (with(&[("CNI_IFNAME", "a/b")]), good, 4, "CNI_IFNAME"),
        (with(&[("CNI_IFNAME", "aaaaaaaaaaaaaaaa")]), good, 4, "CNI_IFNAME"),
        (with(&[("CNI_NETNS", "")]), good, 4, "CNI_NETNS"),
        (with(&[("CNI_ARGS", "oops")]), good, 4, "CNI_ARGS"),
        (ADD.to_vec(), "{", 6, "the configuration"),
        (ADD.to_vec(), r#"{"cniVersion": "9.0.0", "name": "n"}"#, 1, "cniVersion \"9.0.0\""),
    ];
    for (environment, config, code, begins) in table {
        let ran = run(&environment, config);
        assert!(!ran.success);
        assert_eq!(ran.document["code"], code, "{}", ran.document);
        assert!(ran.document["msg"].as_str().unwrap().starts_with(begins), "{}", ran.document);
    }
}

//! Real etcd servers, and faults of their members.

use std::time::{Duration, Instant};

use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Authority, Etcd, EtcdOptions, EtcdVersion};

const NEEDED: [Program; 2] = [Program::Etcd, Program::Etcdctl];

/// Retries what may fail while the members elect a leader.
fn eventually<T, E: std::fmt::Display>(what: &str, mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) if start.elapsed() > Duration::from_secs(60) => panic!("{what}: {error}"),
            Err(_) => {}
        }
    }
}

#[test]
fn a_member_keeps_its_data_and_its_port_over_a_kill() {
    if !can_run(&Program::ALL) {
        return;
    }
    for (version, name) in [(EtcdVersion::Debian, "3.4."), (EtcdVersion::Kubernetes, "3.6.")] {
        let etcd = Etcd::start_with(&EtcdOptions { version, members: 1, tls: false }).unwrap();
        let status = etcd.etcdctl(&["endpoint", "status", "--write-out=fields"]).unwrap();
        assert!(status.contains(&format!("\"Version\" : \"{name}")), "{status}");
        check_that_data_outlive_a_kill(&etcd);
    }
}

fn check_that_data_outlive_a_kill(etcd: &Etcd) {
    let [member] = etcd.members() else { panic!("one member is expected") };
    assert_eq!(etcd.etcdctl(&["put", "key", "value"]).unwrap(), "OK");
    let endpoints = etcd.endpoints();

    assert!(etcd.compact().unwrap() > 1);
    let watch = etcd.etcdctl(&["watch", "key", "--rev=1"]);
    assert!(watch.unwrap_err().to_string().contains("compacted"));

    member.kill().unwrap();
    assert_eq!(member.process_id(), None);
    let timeout = ["--dial-timeout=1s", "--command-timeout=1s", "get", "key"];
    assert!(etcd.etcdctl(&timeout).is_err(), "a killed member answers");

    member.restart().unwrap();
    assert_eq!(etcd.endpoints(), endpoints);
    assert_eq!(etcd.etcdctl(&["get", "key", "--print-value-only"]).unwrap(), "value");
    member.stop().unwrap();
    member.restart().unwrap();
    assert_eq!(etcd.etcdctl(&["get", "key", "--print-value-only"]).unwrap(), "value");
}

#[test]
fn a_paused_member_answers_nothing_until_it_continues() {
    if !can_run(&NEEDED) {
        return;
    }
    let etcd = Etcd::start().unwrap();
    let [member] = etcd.members() else { panic!("one member is expected") };
    member.pause().unwrap();
    let process = member.process_id();
    assert!(etcd.etcdctl(&["--command-timeout=1s", "get", "key"]).is_err(), "a paused member answers");
    member.resume().unwrap();
    member.wait_until_ready().unwrap();
    eventually("get", || etcd.etcdctl(&["get", "key"]));
    assert_eq!(member.process_id(), process);
}

#[test]
fn three_members_survive_the_kill_of_one_and_demand_certificates() {
    if !can_run(&NEEDED) {
        return;
    }
    let etcd = Etcd::start_three_with_tls().unwrap();
    assert_eq!(etcd.members().len(), 3);
    assert_eq!(etcd.etcdctl(&["put", "key", "value"]).unwrap(), "OK");

    // Whether the killed member was the leader is chance, so each member is killed once.
    for member in etcd.members() {
        member.kill().unwrap();
        eventually("put", || etcd.etcdctl(&["put", "killed", member.name()]));
        assert_eq!(etcd.etcdctl(&["get", "key", "--print-value-only"]).unwrap(), "value");
        member.restart().unwrap();
    }

    let authority = etcd.authority().unwrap();
    let folder = etcd.members()[0].log().parent().unwrap().join("foreign");
    std::fs::create_dir(&folder).unwrap();
    let foreign = Authority::new(&folder).unwrap();
    let get = |identity: Option<tortie_servers::Identity>| {
        let mut command = etcd.etcdctl_without_certificate().unwrap();
        if let Some(identity) = identity {
            command.arg("--cert").arg(identity.certificate).arg("--key").arg(identity.key);
        }
        command.args(["--dial-timeout=2s", "--command-timeout=2s", "get", "key"]);
        command.output().unwrap().status.success()
    };
    assert!(get(Some(authority.client("agent", &[]).unwrap())));
    assert!(!get(None), "a client without a certificate is served");
    assert!(
        !get(Some(authority.expired_client("agent", &[]).unwrap())),
        "an expired certificate is accepted"
    );
    assert!(!get(Some(foreign.client("agent", &[]).unwrap())), "another authority's certificate is accepted");
}

#[test]
fn an_error_names_the_server_and_shows_its_log() {
    if !can_run(&NEEDED) {
        return;
    }
    let etcd = Etcd::start().unwrap();
    let member = &etcd.members()[0];
    member.kill().unwrap();
    // etcd does not start with a file in the place of its data.
    let data = member.log().with_file_name("etcd-0.data");
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::write(&data, "no folder").unwrap();
    let error = member.restart().unwrap_err().to_string();
    assert!(error.starts_with("etcd-0 has ended; the last lines of its log:"), "{error}");
    assert!(error.contains("not a directory"), "{error}");
    // Orders that make no sense are errors, too.
    member.kill().unwrap();
    assert!(member.pause().unwrap_err().to_string().contains("does not run"));
}

#[test]
fn a_clients_name_is_its_user_when_etcd_authenticates() {
    if !can_run(&NEEDED) {
        return;
    }
    let etcd = Etcd::start_three_with_tls().unwrap();
    let agent = etcd.authority().unwrap().client("agent", &[]).unwrap();
    let run_as_agent = |arguments: &[&str]| {
        let mut command = etcd.etcdctl_without_certificate().unwrap();
        command.arg("--cert").arg(&agent.certificate).arg("--key").arg(&agent.key).args(arguments);
        command.output().unwrap()
    };
    for line in [
        "user add root --no-password",
        "user grant-role root root",
        "user add agent --no-password",
        "role add reader",
        "role grant-permission reader read /calico/ --prefix=true",
        "user grant-role agent reader",
        "auth enable",
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        // etcd creates the role of root by itself, in some versions only.
        let _ = (line.starts_with("user grant-role root")).then(|| etcd.etcdctl(&["role", "add", "root"]));
        etcd.etcdctl(&words).unwrap_or_else(|error| panic!("{error}"));
    }
    etcd.etcdctl(&["put", "/calico/a", "b"]).unwrap();
    assert!(run_as_agent(&["get", "/calico/a"]).status.success());
    let refused = run_as_agent(&["put", "/calico/a", "c"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("permission denied"), "{refused:?}");
    assert_eq!(etcd.etcdctl(&["get", "/calico/a", "--print-value-only"]).unwrap(), "b");
}

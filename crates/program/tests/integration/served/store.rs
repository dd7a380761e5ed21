//! `tortie store` and `tortie certs`: a datastore for machines without Kubernetes and etcd.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::served::support::text_of;

/// A process that is killed when a test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.args(line.split(' ')).current_dir(folder).env_remove("TORTIE_STORE");
    command
}

#[track_caller]
fn expect(folder: &Path, line: &str, code: i32, expected: &str) {
    let output = command(folder, line).output().unwrap();
    let text = text_of(&output);
    assert!(
        output.status.code() == Some(code) && text.contains(expected),
        "{line}: {:?} {text}",
        output.status.code()
    );
}

fn serve(folder: &Path, line: &str) -> Running {
    let child = command(folder, line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !folder.join("s.sock").exists() {
        assert!(Instant::now() < deadline, "the service starts");
        std::thread::sleep(Duration::from_millis(20));
    }
    Running(child)
}

fn end(mut running: Running) {
    let pid = rustix::process::Pid::from_child(&running.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(running.0.wait().unwrap().success());
}

const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: one}\n";
const SET: &str = "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkSet\nmetadata: {name: s}\nspec: {}\n";

#[test]
fn machines_share_a_datastore_by_certificates() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    std::fs::write(folder.join("node.yml"), NODE).unwrap();
    std::fs::write(folder.join("set.yml"), SET).unwrap();
    expect(folder, "certs store", 2, "run tortie certs authority first");
    expect(folder, "certs authority", 0, "tortie-certs/authority.key");
    expect(folder, "certs authority", 2, "--renew replaces a certificate");
    expect(folder, "certs authority --renew", 2, "makes all certificates invalid");
    expect(folder, "certs node a/b", 2, "\"a/b\" is no name of a Node");
    expect(folder, "certs operator ../ann", 2, "is no name of an operator");
    expect(folder, "certs authority --dir other", 0, "other/authority.crt");
    for line in
        ["store", "node one", "controllers", "operator ann", "node late --days 1", "operator eve --dir other"]
    {
        expect(folder, &format!("certs {line}"), 0, ".crt");
    }
    expect(folder, "certs operator ann --renew", 0, "operator-ann.crt");
    let mode = std::fs::metadata(folder.join("tortie-certs/authority.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let files = |dir: &str, name: &str| {
        format!(
            "--tls-authority {dir}/authority.crt --tls-certificate {dir}/{name}.crt --tls-key {dir}/{name}.key"
        )
    };
    expect(folder, "certs operator bob", 0, "operator-bob.crt");
    expect(folder, "certs revoke other/operator-eve.crt", 2, "another authority has issued");
    expect(folder, "certs revoke tortie-certs/operator-bob.crt", 0, "authority.crl: 1 revoked");
    let line = format!(
        "store serve --data d/s.redb --socket s.sock --listen {address} --tls-revoked tortie-certs/authority.crl {}",
        files("tortie-certs", "store")
    );
    expect(folder, "store init --data d/s.redb", 0, "created in d/s.redb");
    let running = serve(folder, &line);
    expect(folder, "store serve --data d/s.redb --socket other.sock", 2, "d/s.redb");
    let on = |dir: &str, name: &str, rest: &str| format!("{rest} --store tls:{address} {}", files(dir, name));
    expect(
        folder,
        &on("tortie-certs", "operator-ann", "apply -f node.yml -f set.yml"),
        0,
        "Node one created",
    );
    expect(folder, &on("tortie-certs", "node-one", "get nodes"), 0, "one");
    expect(folder, &on("tortie-certs", "node-one", "delete gns s"), 2, "node one may not delete");
    expect(folder, &on("tortie-certs", "controllers", "get gns"), 0, "s");
    let named = format!("error: the store is not available: {address}: ");
    expect(folder, &on("other", "operator-eve", "get nodes"), 2, &named);
    expect(folder, &on("tortie-certs", "operator-bob", "get nodes"), 2, "error: ");
    expect(folder, &on("tortie-certs", "node-late", "get nodes"), 0, "one");
    // The certificate that somebody has stolen is the one from before the renewal.
    let issued = || {
        let files = std::fs::read_dir(folder.join("tortie-certs/issued")).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("node-late-")).collect::<Vec<_>>()
    };
    let [stolen] = &issued()[..] else { panic!("one certificate") };
    // Earlier versions kept none.
    std::fs::remove_dir_all(folder.join("tortie-certs/issued")).unwrap();
    expect(folder, "certs node late --renew", 0, "node-late.crt");
    assert_eq!(issued().len(), 2);
    expect(folder, &format!("certs revoke tortie-certs/issued/{stolen}"), 0, "2 revoked");
    expect(folder, &on("tortie-certs", "node-late", "get nodes"), 0, "one");
    expect(folder, "certs revoke tortie-certs/node-late.crt tortie-certs/operator-bob.crt", 0, "3 revoked");
    expect(folder, &on("tortie-certs", "node-late", "get nodes"), 2, "error: ");
    expect(folder, &on("tortie-certs", "node-one", "get nodes"), 0, "one");
    // The certificate of the service is for no client, and that of a client for no service.
    expect(folder, &on("tortie-certs", "store", "get nodes"), 2, "error: ");
    expect(folder, "get nodes --store unix:s.sock", 0, "one");
    end(running);
    assert!(!folder.join("s.sock").exists());

    let running = serve(folder, "store serve --data d/s.redb --socket s.sock");
    expect(folder, "get gns --store unix:s.sock", 0, "s");
    end(running);
    expect(
        folder,
        "get gns --store unix:s.sock",
        2,
        "error: the store is not available: s.sock: No such file",
    );
    expect(folder, "store serve --listen 127.0.0.1:1", 2, "--tls-authority");
}

const SUCCESSOR: &str = "11111111-2222-4333-8444-555555555555";

/// A store is made once, by a command of its own: a service that made a missing one would serve an empty cluster.
#[test]
fn a_store_is_made_once_and_keeps_its_identity() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    expect(
        folder,
        "store serve --data d/s.redb --socket s.sock",
        2,
        "`tortie store init` makes a store, once",
    );
    assert!(!folder.join("d").exists(), "nothing is made");
    expect(folder, "store identity --data d/s.redb", 2, "d/s.redb: the file does not exist");
    expect(folder, "store init --data d/s.redb", 0, "created in d/s.redb");
    let mode = std::fs::metadata(folder.join("d/s.redb")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let identity = || text_of(&command(folder, "store identity --data d/s.redb").output().unwrap());
    let first = identity();
    assert_eq!(first.trim().len(), SUCCESSOR.len(), "{first}");
    expect(folder, "store init --data d/s.redb", 2, "d/s.redb: the file exists already");
    assert_eq!(identity(), first);

    let running = serve(folder, "store serve --data d/s.redb --socket s.sock");
    expect(folder, "store identity --data d/s.redb", 2, "served by a process");
    expect(
        folder,
        &format!("store identity --data d/s.redb --replace-with {SUCCESSOR}"),
        2,
        "served by a process",
    );
    end(running);
    assert_eq!(identity(), first, "a restart keeps it");
    let line = format!("store identity --data d/s.redb --replace-with {SUCCESSOR}");
    expect(folder, &line, 0, SUCCESSOR);
    assert_eq!(identity().trim(), SUCCESSOR);
    expect(folder, &format!("store init --data t.redb --identity {SUCCESSOR}"), 0, SUCCESSOR);
    expect(folder, "store init --data u.redb --identity u", 2, "no identity of a store");
    for (name, text) in [("empty", ""), ("text", "this is no store, but a text of some length")] {
        std::fs::write(folder.join(name), text).unwrap();
        expect(folder, &format!("store serve --data {name} --socket s.sock"), 2, name);
        assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), text, "it is left alone");
    }
}

/// The only backup in a folder.
fn backup_in(folder: &Path) -> std::path::PathBuf {
    let names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [backup] = names.try_into().unwrap();
    backup
}

/// A day of an operator: a backup of the running service, a damaged file, what is left of it, and the backup again.
#[test]
fn a_damaged_store_is_refused_and_restored() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    std::fs::write(folder.join("node.yml"), NODE).unwrap();
    std::fs::write(folder.join("set.yml"), SET).unwrap();
    expect(folder, "store init --data s.redb", 0, "created");
    let running = serve(folder, "store serve --data s.redb --socket s.sock");
    expect(folder, "apply -f node.yml -f set.yml --store unix:s.sock", 0, "Node one created");
    for _ in 0..2 {
        expect(folder, "store backup --to backups --keep 1 --socket s.sock", 0, "2 objects");
        // The name is the time in seconds.
        std::thread::sleep(Duration::from_millis(1_100));
    }
    let backup = backup_in(&folder.join("backups"));
    let mode = std::fs::metadata(&backup).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    expect(folder, "delete gns s --store unix:s.sock", 0, "deleted");
    expect(folder, "store check --data s.redb", 2, "served by a process");
    end(running);
    expect(folder, "store check --data s.redb", 0, "1 object");
    expect(folder, "store backup --to others --data s.redb", 0, "1 object");

    let mut bytes = std::fs::read(folder.join("s.redb")).unwrap();
    // Every copy of the record that the file has: old pages stay in it.
    let places: Vec<usize> =
        (0..bytes.len() - 8).filter(|place| bytes[*place..].starts_with(b"\"name\":\"")).collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|place| bytes[place + 2] ^= 1);
    std::fs::write(folder.join("s.redb"), &bytes).unwrap();
    for (line, code) in [("store check --data s.redb", 1), ("store serve --data s.redb --socket s.sock", 2)] {
        expect(folder, line, code, "s.redb: the store's file is damaged");
    }
    assert_eq!(std::fs::read(folder.join("s.redb")).unwrap(), bytes, "it is left alone");
    expect(folder, "store repair --data s.redb --to saved.redb", 1, "lost: nodes one");
    expect(folder, "store check --data saved.redb", 0, "0 objects");

    let from = format!("store restore --from {} --data", backup.display());
    expect(folder, &format!("{from} s.redb"), 2, "exists already");
    expect(folder, &format!("{from} new.redb"), 0, "2 objects");
    let running = serve(folder, "store serve --data new.redb --socket s.sock");
    expect(folder, "get gns --store unix:s.sock", 0, "s");
    end(running);
}

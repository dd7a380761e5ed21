//! A service in a process with few file descriptors. It is the only test of its binary, because the limit applies
//! to the whole process.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod common;

use std::net::TcpStream;
use std::process::{Command, Stdio};

use common::{Served, answering};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tortie_api::Kind;
use tortie_store::Store;
use tortie_store::rpc::{Limits, Remote, TlsIdentity, node_subject, serve_unix};

/// The address that the child process occupies, and the parts of its certificate.
const ADDRESS: &str = "TEST_OCCUPIED_ADDRESS";
const PARTS: [&str; 3] = ["TEST_AUTHORITY", "TEST_CERTIFICATE", "TEST_KEY"];

/// Another process, with the certificate of a node, occupies all connections that the service allows, of strangers and of
/// nodes.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_leave_descriptors_to_operators() {
    if let Ok(address) = std::env::var(ADDRESS) {
        return occupy(&address).await;
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
    let served = Served::new(Limits::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    tokio::spawn({
        let (store, socket) = (served.store.clone(), socket.clone());
        async move { serve_unix(store, &socket).await }
    });
    answering(Remote::unix(&socket)).await;
    let node = served.authority.issue(node_subject("a"));
    let mut stranger = Command::new(std::env::current_exe().unwrap())
        .args(["--nocapture", "--exact", "strangers_leave_descriptors_to_operators"])
        .env(ADDRESS, served.address.to_string())
        .envs(PARTS.into_iter().zip([&node.authority, &node.certificate, &node.key]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = stranger.stdout.take().unwrap();
    let occupied = tokio::task::spawn_blocking(move || {
        wait_for(&mut output, "occupied");
        output
    });
    let _output = occupied.await.unwrap();

    Remote::unix(&socket).list(Kind::Pod).await.expect("an operator on the Unix socket is served");
    drop(stranger.stdin.take());
    stranger.wait().unwrap();
}

/// The child: holds connections until its input ends.
async fn occupy(address: &str) {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let [authority, certificate, key] = PARTS.map(|part| std::env::var(part).unwrap());
    let node = TlsIdentity { authority, certificate, key };
    let mut nodes = Vec::new();
    loop {
        let client = Remote::tls(address, node.clone()).unwrap();
        match client.list(Kind::Pod).await {
            Ok(_) => nodes.push(client),
            Err(error) => break println!("{} nodes, then {error}", nodes.len()),
        }
    }
    let connect = |_| TcpStream::connect(address).unwrap();
    let connections: Vec<TcpStream> = (0..1_000).map(connect).collect();
    println!("{} connections occupied", connections.len());
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn wait_for(output: &mut impl std::io::Read, text: &str) {
    let (mut all, mut buffer) = (String::new(), [0; 256]);
    while !all.contains(text) {
        let count = output.read(&mut buffer).unwrap();
        assert!(count > 0, "the stranger has ended: {all}");
        all.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
}

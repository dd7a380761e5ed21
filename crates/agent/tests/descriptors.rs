//! An agent in a process without file descriptors. It is the only test of its binary, because it uses all of them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::fs::File;
use std::time::Duration;

use common::{Bed, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tortie_cni::Command;

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_cannot_be_accepted_waits() {
    let mut bed = Bed::new().await;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(128), ..limit }).unwrap();
    let caller = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    connect(&caller, &SocketAddrUnix::new(bed.dir.path().join("agent.sock")).unwrap()).unwrap();
    let ended = tokio::time::timeout(Duration::from_millis(500), &mut bed.agent).await;
    assert!(ended.is_err(), "the agent goes on: {ended:?}");
    drop(taken);
    let (socket, status) = (bed.dir.path().join("agent.sock"), bed.invocation(Command::Status, "", ""));
    tokio::task::spawn_blocking(move || send(&socket, &status)).await.unwrap().unwrap();
}

//! More connections at the agent's socket than it serves.

use std::os::unix::net::UnixStream;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::node::{Node, until};

/// How many calls an agent serves at a time.
const MAX_CALLS: usize = 1024;

/// Clients that send nothing occupy all calls. ADD is to be repeated, DEL waits on disk, and STATUS says that ADD cannot succeed.
#[test]
fn calls_beyond_the_limit_are_rejected_and_no_deletion_is_lost() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let node = Node::new(&json!([]));
    let pods = ["before", "during"].map(|name| node.pod(name, json!({})));
    let [before, during] = &pods;
    node.call("ADD", before, json!({})).unwrap();
    let silent: Vec<UnixStream> =
        (0..MAX_CALLS).map(|_| UnixStream::connect(node.path("agent.sock")).unwrap()).collect();
    let code = |answer: Result<Value, Value>| answer.err().map_or(Value::Null, |error| error["code"].clone());
    let status = || node.execute(&[("CNI_COMMAND", "STATUS")], &node.config_of(0, "1.1.0", json!({})));
    until("the agent has accepted all", || code(status()) == 50);
    assert_eq!(code(node.call("ADD", during, json!({}))), 11);
    assert_eq!(node.call("DEL", before, json!({})), Ok(Value::Null));
    assert_eq!(std::fs::read_dir(node.path("queue")).unwrap().count(), 1);
    drop(silent);
    until("the agent serves", || status().is_ok());
    node.call("ADD", during, json!({})).unwrap();
    until("the kept DEL is carried out", || node.addresses_in_use() == 1 && !before.has_interface("eth0"));
}

/// An agent does not wait for ever for clients that send nothing.
#[test]
fn silent_clients_do_not_occupy_the_agent_for_ever() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let node = Node::new(&json!([]));
    let pod = node.pod("p", json!({}));
    let silent: Vec<UnixStream> =
        (0..MAX_CALLS).map(|_| UnixStream::connect(node.path("agent.sock")).unwrap()).collect();
    until("ADD succeeds", || node.call("ADD", &pod, json!({})).is_ok());
    drop(silent);
}

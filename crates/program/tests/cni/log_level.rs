//! `tortie agent log-level` against a running agent.

use std::process::{Command, Output};

use serde_json::json;

use crate::node::{Node, until};

fn log_level(node: &Node, level: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.args(["agent", "log-level"]).args(level).arg("--agent-socket").arg(node.path("control.sock"));
    command.output().unwrap()
}

fn shown(node: &Node) -> String {
    String::from_utf8(log_level(node, &[]).stdout).unwrap().trim().to_owned()
}

#[test]
fn the_level_of_a_running_agent_changes() {
    let node = Node::new(&json!([]));
    until("the agent answers", || log_level(&node, &[]).status.success());
    assert_eq!(shown(&node), "node one: info");
    let log = || std::fs::read_to_string(node.path("agent.log")).unwrap();
    assert!(!log().contains("DEBUG"), "{}", log());

    for wrong in ["=loud", "debg"] {
        let refused = log_level(&node, &[wrong]);
        assert!(!refused.status.success());
        let problem = String::from_utf8_lossy(&refused.stderr);
        assert!(problem.contains(wrong), "{problem}");
    }
    assert_eq!(shown(&node), "node one: info", "an invalid level changes nothing");

    assert!(log_level(&node, &["debug"]).status.success());
    assert_eq!(shown(&node), "node one: debug");
    let pod = node.pod("p", json!({}));
    node.call("ADD", &pod, json!({})).unwrap();
    until("the agent logs more", || log().contains("DEBUG"));
}

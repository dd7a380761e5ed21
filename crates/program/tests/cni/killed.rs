//! Agents and plugins that are killed (`kill -9`) in the middle of ADD and DEL. The driver goes on as runtimes do: after an ADD that
//! failed it calls DEL, and makes a new sandbox.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::Kind;

use crate::node::{Node, Sandbox, address, output_of, until};

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Agent,
    Plugin,
}

#[test]
fn an_agent_that_is_killed_in_the_middle_of_a_call_leaves_nothing() {
    kill_at_every_step(Victim::Agent, 12);
}

#[test]
fn a_plugin_that_is_killed_in_the_middle_of_a_call_leaves_nothing() {
    kill_at_every_step(Victim::Plugin, 40);
}

fn kill_at_every_step(victim: Victim, steps: u32) {
    let mut node = Node::new(&json!([]));
    let kept = node.pod("kept", json!({}));
    let kept_result = node.call("ADD", &kept, json!({})).unwrap();
    let (add, del) = durations(&node);
    let mut broken = [0, 0];
    for step in 0..steps {
        let first = node.pod(&format!("p{step}"), json!({}));
        let at = |duration: Duration| duration * (step + 1) / steps;
        broken[0] += usize::from(kill_in(&mut node, "ADD", &first, victim, at(add)).is_err());
        node.call("DEL", &first, json!({})).unwrap();
        // The kubelet's next sandbox of the same pod.
        let second = first.of_container(&format!("{}-again", first.container));
        let result = node.call("ADD", &second, json!({})).unwrap();
        assert_ne!(address(&result), address(&kept_result));
        node.call("CHECK", &second, json!({"prevResult": result})).unwrap();
        if kill_in(&mut node, "DEL", &second, victim, at(del)).is_err() {
            broken[1] += 1;
            node.call("DEL", &second, json!({})).unwrap();
        }
        until("only the other pod is left", || is_alone(&node, &kept));
    }
    let [adds, deletions] = broken;
    assert!(adds > 0, "every ADD ended before the kill");
    // Without an agent, the plugin keeps the deletion on disk.
    assert_eq!(deletions > 0, victim == Victim::Plugin, "{deletions} DELs failed");
    node.call("CHECK", &kept, json!({"prevResult": kept_result})).unwrap();
    node.call("DEL", &kept, json!({})).unwrap();
    until("nothing is left", || node.addresses_in_use() == 0 && pod_links(&node) == 0);
}

/// How long ADD and DEL take.
fn durations(node: &Node) -> (Duration, Duration) {
    let pod = node.pod("measured", json!({}));
    let begun = Instant::now();
    node.call("ADD", &pod, json!({})).unwrap();
    let add = begun.elapsed();
    node.call("DEL", &pod, json!({})).unwrap();
    (add, begun.elapsed() - add)
}

/// Calls the plugin and kills after `delay`. An agent starts again before this returns the plugin's answer.
fn kill_in(
    node: &mut Node,
    command: &str,
    sandbox: &Sandbox,
    victim: Victim,
    delay: Duration,
) -> Result<Value, Value> {
    let config = node.config_of(0, "1.1.0", json!({}));
    let mut call = node.start(&sandbox.environment(command), &config);
    std::thread::sleep(delay);
    match victim {
        Victim::Agent => {
            node.kill_agent();
            node.start_agent();
            let status = || node.execute(&[("CNI_COMMAND", "STATUS")], &config);
            until("the agent serves", || status().is_ok());
        }
        Victim::Plugin => call.kill().unwrap(),
    }
    let output = call.wait_with_output().unwrap();
    let printed = serde_json::from_slice(&output.stdout).unwrap_or_default();
    if output.status.success() { Ok(printed) } else { Err(printed) }
}

/// Whether nothing is left of other pods: no address, endpoint, interface or queued deletion.
fn is_alone(node: &Node, kept: &Sandbox) -> bool {
    let queued = std::fs::read_dir(node.path("queue")).map_or(0, Iterator::count);
    let endpoints = node.names(Kind::WorkloadEndpoint).len();
    assert!(kept.has_interface("eth0"));
    (node.addresses_in_use(), endpoints, pod_links(node), queued) == (1, 1, 1, 0)
}

fn pod_links(node: &Node) -> usize {
    output_of(&node.namespace, "/bin/ip", &["-o", "link"]).matches(": cali").count()
}

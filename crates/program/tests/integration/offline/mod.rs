//! Commands on manifests, without a cluster.

mod completed;
mod convert;
mod cost;
mod describe;
mod documentation;
mod dropped;
mod expectations;
mod explain;
mod hosts;
mod install;
mod json;
mod lint;
mod matrix;
mod preview;
#[cfg(target_os = "linux")]
mod routes;
mod support;
mod terminal;
mod unread;
mod validate;
mod which_datastore;

/// Pods of an installation name their node by the environment.
#[test]
fn an_agent_takes_its_node_from_the_environment() {
    let agent = |node: Option<&str>| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tortie"));
        // Stops at the file, after the node is known.
        command
            .args(["agent", "--hcn-socket", "/nowhere", "--static-rules", "/nowhere"])
            .env_remove("NODENAME");
        command.envs(node.map(|node| ("NODENAME", node)));
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    assert!(agent(None).contains("--node is missing"));
    let named = agent(Some("one"));
    assert!(named.contains("static rules /nowhere"), "{named}");
}

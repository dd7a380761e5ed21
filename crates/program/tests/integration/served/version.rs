//! `tortie version` and `tortie completion`.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use crate::served::support::{Cluster, text_of};

#[tokio::test(flavor = "multi_thread")]
async fn versions_of_client_agents_and_calico_are_shown() {
    let cluster = Cluster::new().await;
    let run = async |arguments: &[&str]| {
        let output = cluster.tortie(arguments).output().await.unwrap();
        assert!(output.status.success(), "{}", text_of(&output));
        text_of(&output)
    };
    let client = concat!("client   ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(run(&["version"]).await, format!("{client}agents   no node has reported\n"));
    for (node, version) in [("one", "0.9.0"), ("two", "0.9.0"), ("three", "")] {
        let status = json!({"os": "linux", "time": "2026-01-01T00:00:00Z", "heartbeatSeconds": 60, "positions": {},
            "endpoints": 0, "conditions": [], "more": 0, "version": version});
        let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": node}, "status": status});
        cluster.put(&Key::global(Kind::NodeReport, node), report).await;
    }
    let information = json!({"apiVersion": "projectcalico.org/v3", "kind": "ClusterInformation",
        "metadata": {"name": "default"}, "spec": {"calicoVersion": "v3.31.2"}});
    cluster.put(&Key::global(Kind::ClusterInformation, "default"), information).await;
    let expected =
        "agents   unknown on three\nagents   0.9.0 on one, two\nCalico   v3.31.2 has used this datastore\n";
    assert_eq!(run(&["version"]).await, format!("{client}{expected}"));
    assert_eq!(run(&["version", "--client"]).await, client);
    let document: Value = serde_json::from_str(&run(&["version", "-o", "json"]).await).unwrap();
    assert_eq!(document["cluster"]["agents"]["0.9.0"], json!(["one", "two"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn shells_complete_commands() {
    let cluster = Cluster::new().await;
    for (shell, expected) in [
        ("bash", "complete -F _tortie"),
        ("zsh", "#compdef tortie"),
        ("fish", "complete -c tortie"),
        ("powershell", "Register-ArgumentCompleter"),
    ] {
        let output = cluster.tortie(&["completion", shell]).output().await.unwrap();
        let printed = text_of(&output);
        assert!(
            output.status.success() && printed.contains(expected) && printed.contains("annotate"),
            "{shell}"
        );
    }
    let output = cluster.tortie(&["completion", "tcsh"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(2));
}

//! What an earlier build has left, or still sends: the plugin is replaced before the agent, and the files of both stay.
//!
//! The files in `tests/earlier_build` are from the build of commit e71e842: the calls that its plugin sent to the agent, and a
//! deletion that it stored while no agent answered. Only the paths were replaced by the usual ones. Do not adapt them to a new format: an agent
//! that cannot read them leaks the addresses of pods that were deleted during an upgrade.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};
use tortie_deploy::{CNI_CONFIG_FILE, CNI_NETWORK};

use crate::common::{Bed, until};

const CALLS: &str = include_str!("../earlier_build/calls.json");
const DELETION: &str = include_str!("../earlier_build/c1+eth0.json");

/// Sends a call of the earlier plugin, and returns the answer as bytes, as that plugin reads it.
async fn ask(bed: &Bed, call: &Value) -> Value {
    let (socket, body) = (bed.dir.path().join("agent.sock"), call.to_string());
    let exchange = move || {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(&u32::try_from(body.len()).unwrap().to_be_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut answer).unwrap();
        serde_json::from_slice(&answer).unwrap()
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plugin_of_an_earlier_build_is_served() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let calls: BTreeMap<String, Value> = serde_json::from_str(CALLS).unwrap();
    assert_eq!(ask(&bed, &calls["STATUS"]).await, json!({"done": null}));
    let added = ask(&bed, &calls["ADD"]).await;
    let address = added["done"]["ips"][0]["address"].clone();
    let expected = json!({"done": {
        "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/p"}],
        "ips": [{"address": address, "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}],
        // The earlier plugin ignores members that it does not know.
        "dns": {},
    }});
    assert_eq!(added, expected);
    let mut check = calls["CHECK"].clone();
    check["config"]["prevResult"]["ips"][0]["address"] = address;
    assert_eq!(ask(&bed, &check).await, json!({"done": null}));
    check["container_id"] = json!("c2");
    let failed = ask(&bed, &check).await;
    assert!(failed["failed"]["code"].is_u64() && failed["failed"]["msg"].is_string(), "{failed}");
    assert_eq!(ask(&bed, &calls["GC"]).await, json!({"done": null}));
    assert!(bed.endpoint("p", "eth0").await.is_some(), "GC keeps what the runtime knows");
    assert_eq!(ask(&bed, &calls["DEL"]).await, json!({"done": null}));
    assert!(bed.endpoint("p", "eth0").await.is_none() && bed.allocated().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_that_an_earlier_build_has_stored_is_carried_out() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let calls: BTreeMap<String, Value> = serde_json::from_str(CALLS).unwrap();
    assert!(ask(&bed, &calls["ADD"]).await["done"].is_object());
    let file = bed.dir.path().join("queue/c1+eth0.json");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    // As the plugin does: the agent reads a file only when it is complete.
    let part = bed.dir.path().join("deletion");
    fs::write(&part, DELETION).unwrap();
    fs::rename(&part, &file).unwrap();
    until("the deletion is carried out", || async { !file.exists() }).await;
    let left: Vec<_> = fs::read_dir(bed.dir.path().join("queue")).unwrap().flatten().collect();
    assert!(left.is_empty(), "it was not put aside: {left:?}");
    assert!(bed.endpoint("p", "eth0").await.is_none() && bed.allocated().await.is_empty());
}

/// Two agents exclude each other only if both builds lock the same file.
#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_an_earlier_build_is_still_in_use() {
    let bed = Bed::new().await;
    let file = fs::File::open(bed.dir.path().join("agent.sock.lock")).unwrap();
    assert!(matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock)), "the agent holds it");
}

/// Addresses are found by the network's name, and the runtime uses the first file of the folder.
#[test]
fn the_names_of_an_earlier_build_are_still_in_use() {
    assert_eq!((CNI_NETWORK, CNI_CONFIG_FILE), ("k8s-pod-network", "00-tortie.conflist"));
    let run = tortie_cni::local::agent_address();
    let queue = tortie_cni::local::deletion_queue();
    assert_eq!(run.to_str().unwrap(), "/run/tortie/agent.sock");
    assert_eq!(queue.to_str().unwrap(), "/var/lib/tortie/cni-deletions");
}

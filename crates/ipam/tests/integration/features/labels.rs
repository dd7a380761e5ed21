//! Labels of nodes that change while an allocator runs.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_ipam::{Family, Ipam, IpamError, Request};
use tortie_store::{Embedded, Store};

use crate::features::support::{cluster, linux, put, put_pool, request, windows};

/// Two pools for nodes with and without the label `zone`, and one for Windows nodes only.
async fn zones(store: &Embedded) {
    for (name, cidr, selector) in [
        ("zone-a", "10.1.0.0/24", "zone == 'a'"),
        ("rest", "10.2.0.0/24", "!has(zone)"),
        ("windows", "10.3.0.0/24", "zone == 'w' && kubernetes.io/os == 'windows'"),
    ] {
        let spec = json!({"cidr": cidr, "blockSize": 28, "vxlanMode": "Always", "nodeSelector": selector});
        put_pool(store, name, spec).await;
    }
}

async fn label(store: &Embedded, labels: Value) {
    put(store, &Key::global(Kind::Node, "n"), json!({"metadata": {"name": "n", "labels": labels}})).await;
}

/// The pool of the next address, by the second number of its network.
async fn next(ipam: &Ipam, handle: &str) -> Result<String, IpamError> {
    let assigned = ipam.assign(&request(handle)).await?;
    Ok(assigned.address.to_string().split('.').nth(1).unwrap().to_owned())
}

/// The label of a zone comes from the controllers of a cloud, after the Node and its agent are there. Pools are read again after five
/// seconds, so each step has handles that wait for that.
#[tokio::test]
async fn labels_count_when_an_address_is_assigned() {
    let store = cluster(&[]).await;
    zones(&store).await;
    let ipam = linux(&store, "n");
    assert_eq!(next(&ipam, "before").await.unwrap(), "2", "without a Node, the labels of the start count");
    for (step, (labels, expected)) in
        [(json!({"zone": "a"}), "1"), (json!({"other": "x"}), "2"), (json!({"zone": "a"}), "1")]
            .into_iter()
            .enumerate()
    {
        label(&store, labels.clone()).await;
        let mut tries = 0;
        while next(&ipam, &format!("h-{step}-{tries}")).await.unwrap() != expected {
            tries += 1;
            assert!(tries < 300, "{labels}: the pool of the old labels gives addresses");
            ipam.release(&format!("h-{step}-{}", tries - 1)).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
}

/// Tunnel addresses and networks of Windows nodes ask which pools there are, and nothing is cached for them.
#[tokio::test]
async fn whether_a_node_has_a_pool_follows_its_labels() {
    let store = cluster(&[]).await;
    zones(&store).await;
    let ipam = linux(&store, "n");
    let tunnel = Request { family: Family::V4, ..request("tunnel") };
    for (labels, expected) in [
        (json!({}), true),
        (json!({"zone": "b"}), false),
        (json!({"zone": "a"}), true),
        (json!({"zone": "w"}), false),
    ] {
        label(&store, labels.clone()).await;
        assert_eq!(ipam.has_pool(&tunnel).await.unwrap(), expected, "{labels}");
    }
    store.delete(&Key::global(Kind::Node, "n"), None).await.unwrap();
    assert!(!ipam.has_pool(&tunnel).await.unwrap(), "without a Node, its last labels count");
    label(&store, json!({"zone": "a"})).await;
    let blocks = ipam.ensure_blocks().await.unwrap();
    assert!(blocks.iter().all(|block| block.to_string().starts_with("10.1.")), "{blocks:?}");
}

/// The operating system is that of the agent. Kubelets of old versions label no Node with it, and anybody may remove the label.
#[tokio::test]
async fn a_windows_node_stays_one_without_its_label() {
    let store = cluster(&[]).await;
    zones(&store).await;
    label(&store, json!({"zone": "w"})).await;
    let blocks = windows(&store, "n").ensure_blocks().await.unwrap();
    assert!(blocks.iter().all(|block| block.to_string().starts_with("10.3.")), "{blocks:?}");
}

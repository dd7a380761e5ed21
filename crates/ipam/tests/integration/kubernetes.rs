//! IPAM on a real Kubernetes API: no address is allocated twice, and the records are those of Calico.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, Request};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::Store;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

fn request(handle: &str) -> Request {
    Request {
        handle: handle.to_owned(),
        owner: BTreeMap::from([("pod".to_owned(), handle.to_owned())]),
        ..Request::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_nodes_and_many_pods_at_once() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    let config = KubernetesConfig::Kubeconfig(servers.kubeconfig());
    let store: Arc<dyn Store> = Arc::new(Kubernetes::new(&config).await.unwrap());
    let pool = json!({"spec": {"cidr": "10.0.0.0/24", "blockSize": 29, "vxlanMode": "Always"}});
    store.create(&Key::global(Kind::IpPool, "default"), pool).await.unwrap();
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();

    let mut tasks = Vec::new();
    for node in 0..4 {
        let os = if node == 0 { "windows" } else { "linux" };
        let labels = BTreeMap::from([("kubernetes.io/os".to_owned(), os.to_owned())]);
        let ipam = Arc::new(Ipam::new(store.clone(), format!("node-{node}"), labels));
        for pod in 0..10 {
            let ipam = ipam.clone();
            tasks.push(tokio::spawn(async move {
                let handle = format!("Calico.{node}-{pod}");
                let assigned = ipam.assign(&request(&handle)).await;
                if pod % 3 == 0 {
                    ipam.release(&handle).await.unwrap();
                    return None;
                }
                // A Windows node has one block, which has too few addresses for all.
                assigned.ok().map(|assigned| (assigned.address, handle))
            }));
        }
    }
    let mut answered = BTreeMap::new();
    for task in tasks {
        if let Some((address, handle)) = task.await.unwrap() {
            assert_eq!(answered.insert(address, handle), None, "{address} was given twice");
        }
    }
    assert!(answered.len() >= 3 * 6, "{answered:?}");
    let mut allocated = BTreeMap::new();
    for stored in store.list(Kind::IpamBlock).await.unwrap().items {
        let block: Block = serde_json::from_value(stored.value).unwrap();
        block.check().unwrap();
        assert_eq!(stored.key.name, block.cidr.to_string());
        let of_block = block.allocated().map(|(address, owner)| (address, owner.handle_id.clone().unwrap()));
        allocated.extend(of_block);
    }
    assert_eq!(allocated, answered, "what is stored is what was answered");
    records_are_those_of_calico(&servers);
}

fn records_are_those_of_calico(servers: &KubeApi) {
    let list = |plural: &str| {
        let text =
            servers.kubectl(&["get", &format!("{plural}.crd.projectcalico.org"), "-o", "json"]).unwrap();
        let list: Value = serde_json::from_str(&text).unwrap();
        let items = list["items"].as_array().unwrap().clone();
        assert!(!items.is_empty(), "{plural}");
        items
    };
    let name_of = |cidr: &Value| cidr.as_str().unwrap().replace(['.', '/'], "-");
    for block in list("ipamblocks") {
        assert_eq!(block["metadata"]["name"], name_of(&block["spec"]["cidr"]));
        assert_eq!(block["spec"]["strictAffinity"], false);
        assert!(block["spec"]["affinity"].as_str().unwrap().starts_with("host:node-"));
        assert!(block["spec"]["affinityClaimTime"].is_string());
        assert!(block["spec"]["sequenceNumber"].as_u64().unwrap() > 1_700_000_000_000_000_000);
    }
    for affinity in list("blockaffinities") {
        let spec = &affinity["spec"];
        let node = spec["node"].as_str().unwrap();
        assert_eq!(affinity["metadata"]["name"], format!("{node}-{}", name_of(&spec["cidr"])));
        assert_eq!((&spec["state"], &spec["deleted"]), (&json!("confirmed"), &json!("false")));
        assert_eq!(affinity["metadata"]["labels"]["projectcalico.org/affinity-type"], "host");
    }
    for handle in list("ipamhandles") {
        let id = handle["spec"]["handleID"].as_str().unwrap();
        assert!(id.starts_with("Calico."), "{id}");
        assert_eq!(handle["metadata"]["name"], id.to_lowercase());
    }
}

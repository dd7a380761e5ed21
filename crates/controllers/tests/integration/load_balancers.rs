//! Addresses of Services of type LoadBalancer: single cases, random changes with crashes, and real servers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_controllers::{Blocks, Nodes};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd as EtcdServers, KubeApi, KubeOptions};
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::{Embedded, Endpoints, Store};

use crate::common::{Disturbed, global, memory, namespaced, put, start, until, value};
use crate::servers::open;

const CONDITION: &str = "tortie.io/LoadBalancerAddress";

pub(crate) fn pool(name: &str, cidr: &str, more: Value) -> (Key, Value) {
    let mut spec = json!({"cidr": cidr, "blockSize": 30, "allowedUses": ["LoadBalancer"]});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name}, "spec": spec,
    });
    (global(Kind::IpPool, name), value)
}

fn service(name: &str, uid: &str, spec: Value, annotations: Value) -> (Key, Value) {
    let metadata = json!({"name": name, "namespace": "n", "uid": uid, "annotations": annotations});
    (namespaced(Kind::Service, name), json!({"metadata": metadata, "spec": spec}))
}

fn balanced(name: &str) -> (Key, Value) {
    service(name, name, json!({"type": "LoadBalancer"}), json!({}))
}

async fn cluster(pools: &[(Key, Value)]) -> Arc<Embedded> {
    let store = memory();
    let labels = json!({"team": "red"});
    put(&*store, &global(Kind::Namespace, "n"), json!({"metadata": {"name": "n", "labels": labels}})).await;
    for (key, pool) in pools {
        put(&*store, key, pool.clone()).await;
    }
    store
}

/// The addresses in the status of a Service.
fn shown(service: &Value) -> Vec<String> {
    let entries = service.pointer("/status/loadBalancer/ingress").and_then(Value::as_array);
    entries.into_iter().flatten().map(|entry| entry["ip"].as_str().unwrap().to_owned()).collect()
}

/// Why a Service lacks an address.
fn problem(service: &Value) -> String {
    let conditions = service.pointer("/status/conditions").and_then(Value::as_array);
    let mut found = conditions.into_iter().flatten().filter(|condition| condition["type"] == CONDITION);
    found.next().map(|condition| condition["message"].as_str().unwrap().to_owned()).unwrap_or_default()
}

/// The Service of each address in IPAM. Fails if an address is allocated twice, or a block is not of load balancers.
async fn allocated(store: &dyn Store) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for stored in store.list(Kind::IpamBlock).await.unwrap().items {
        let block: Block = serde_json::from_value(stored.value).unwrap();
        block.check().unwrap();
        assert_eq!(block.owner(), Some("virtual:load-balancer"));
        for (address, attribute) in block.allocated() {
            let service = attribute.owner.as_ref().unwrap()["service"].clone();
            assert_eq!(all.insert(address.to_string(), service), None, "{address} is given twice");
        }
    }
    all
}

async fn until_shown(store: &dyn Store, key: &Key, expected: &[&str]) {
    let what = format!("{key} has {expected:?}");
    until(&what, async || {
        let mut addresses = shown(&value(store, key).await);
        addresses.sort();
        addresses == expected
    })
    .await;
}

async fn until_problem(store: &dyn Store, key: &Key, part: &str) {
    until(&format!("{key} reports {part}"), async || problem(&value(store, key).await).contains(part)).await;
}

/// The present object with another specification and other annotations.
async fn change(store: &dyn Store, key: &Key, spec: Value, annotations: Value) {
    loop {
        let before = store.get(key).await.unwrap().unwrap();
        let mut value = before.value;
        (value["spec"], value["metadata"]["annotations"]) = (spec.clone(), annotations.clone());
        if store.update(key, value, &before.version).await.is_ok() {
            return;
        }
    }
}

#[tokio::test]
async fn a_service_has_an_address_as_long_as_it_is_a_load_balancer() {
    let store = cluster(&[pool("p", "10.9.0.0/29", json!({}))]).await;
    let (key, other) = (balanced("a").0, balanced("b").0);
    for name in ["a", "b"] {
        let (key, service) = balanced(name);
        put(&*store, &key, service).await;
    }
    let (internal, of_type) = service("c", "c", json!({"type": "ClusterIP"}), json!({}));
    put(&*store, &internal, of_type).await;
    let _running = start(store.clone(), None, "one");
    until("both have an address", async || allocated(&*store).await.len() == 2).await;
    let affinity = store.list(Kind::BlockAffinity).await.unwrap().items;
    assert!(affinity[0].key.name.starts_with("virtual:load-balancer/10.9.0."), "{affinity:?}");
    let of = async |key: &Key| shown(&value(&*store, key).await);
    until("both show it", async || of(&key).await.len() == 1 && of(&other).await.len() == 1).await;
    let (first, second) = (of(&key).await, of(&other).await);
    assert_ne!(first, second);
    assert_eq!(allocated(&*store).await[&first[0]], "a");
    assert_eq!(of(&internal).await, Vec::<String>::new());

    // It is no load balancer any more; the other one is deleted, and created again by the same name.
    change(&*store, &key, json!({"type": "NodePort"}), json!({})).await;
    until("its address is free", async || !allocated(&*store).await.contains_key(&first[0])).await;
    until("it shows none", async || of(&key).await.is_empty()).await;
    store.delete(&other, None).await.unwrap();
    let (_, mut again) = balanced("b");
    again["metadata"]["uid"] = json!("another");
    put(&*store, &other, again).await;
    until("it has an address", async || of(&other).await.len() == 1).await;
    until("the former one is free", async || allocated(&*store).await.len() == 1).await;
}

/// Specification, annotations, setting, and what comes of it: addresses, or a part of the condition.
#[tokio::test]
async fn annotations_and_classes_are_those_of_calico() {
    let store = cluster(&[
        pool("auto", "10.9.0.0/30", json!({})),
        pool("manual", "10.9.1.0/30", json!({"assignmentMode": "Manual"})),
        pool("six", "fd09::/126", json!({"blockSize": 126})),
        pool("blue", "10.9.2.0/30", json!({"namespaceSelector": "team == 'blue'"})),
        pool("off", "10.9.3.0/30", json!({"disabled": true})),
    ])
    .await;
    let lb = |more: Value| {
        let mut spec = json!({"type": "LoadBalancer"});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let addresses = "projectcalico.org/loadBalancerIPs";
    let (key, first) = service("s", "s", json!({"type": "ClusterIP"}), json!({}));
    put(&*store, &key, first).await;
    let _running = start(store.clone(), None, "one");
    let (manual, both) =
        (json!({addresses: "[\"10.9.1.2\"]"}), json!({addresses: "[\"10.9.1.1\", \"fd09::3\"]"}));
    for (spec, annotations, expected, part) in [
        (lb(json!({})), json!({}), vec!["10.9.0.0"], ""),
        (lb(json!({})), manual.clone(), vec!["10.9.1.2"], ""),
        (lb(json!({})), json!({addresses: "[\"10.9.1.2\", \"10.9.1.1\"]"}), vec!["10.9.1.2"], "at most one"),
        (lb(json!({})), json!({addresses: "10.9.1.1"}), vec!["10.9.1.2"], "is no list"),
        (lb(json!({})), json!({addresses: "[\"x\"]"}), vec!["10.9.1.2"], "is no address"),
        // Without the annotation, an address from a manual pool goes.
        (lb(json!({})), json!({}), vec!["10.9.0.1"], ""),
        (lb(json!({})), both, vec!["10.9.1.1", "fd09::3"], ""),
        (lb(json!({})), json!({addresses: "[\"10.8.0.1\"]"}), vec![], "in no enabled IPPool"),
        (lb(json!({})), json!({addresses: "[\"10.9.3.1\"]"}), vec![], "in no enabled IPPool"),
        (lb(json!({"ipFamilies": ["IPv4", "IPv6"]})), json!({}), vec!["10.9.0.2", "fd09::"], ""),
        (lb(json!({"ipFamilies": ["IPv6"]})), json!({}), vec!["fd09::"], ""),
        (lb(json!({})), json!({"projectcalico.org/ipv4pools": "[\"manual\"]"}), vec!["10.9.1.0"], ""),
        (lb(json!({})), json!({"projectcalico.org/ipv4pools": "[\"10.9.1.0/30\"]"}), vec!["10.9.1.0"], ""),
        (
            lb(json!({})),
            json!({"projectcalico.org/ipv4pools": "[\"nowhere\"]"}),
            vec!["10.9.1.0"],
            "nowhere is neither",
        ),
        (lb(json!({})), json!({"projectcalico.org/ipv4pools": "[]"}), vec!["10.9.1.0"], "is empty"),
        (
            lb(json!({"loadBalancerIP": "10.9.0.1"})),
            json!({}),
            vec!["10.9.0.3"],
            "spec.loadBalancerIP is not used",
        ),
        // Somebody else's.
        (lb(json!({"loadBalancerClass": "example.com/other"})), manual.clone(), vec![], ""),
        (lb(json!({"loadBalancerClass": "calico"})), json!({}), vec!["10.9.0.0"], ""),
        (json!({"type": "ClusterIP"}), manual.clone(), vec![], ""),
    ] {
        change(&*store, &key, spec.clone(), annotations.clone()).await;
        until_shown(&*store, &key, &expected).await;
        until_problem(&*store, &key, part).await;
        let is_clean = part.is_empty();
        until("the condition is gone", async || !is_clean || problem(&value(&*store, &key).await).is_empty())
            .await;
        until("IPAM has the same", async || allocated(&*store).await.len() == expected.len()).await;
    }
    // Only Services that ask for it.
    let only = json!({"metadata": {"name": "default"}, "spec": {"controllers": {"loadBalancer": {"assignIPs": "RequestedServicesOnly"}}}});
    put(&*store, &global(Kind::KubeControllersConfiguration, "default"), only).await;
    change(&*store, &key, lb(json!({"loadBalancerClass": "calico"})), json!({})).await;
    until("it asks by its class", async || shown(&value(&*store, &key).await).len() == 1).await;
    change(&*store, &key, lb(json!({})), json!({})).await;
    until_shown(&*store, &key, &[]).await;
    change(&*store, &key, lb(json!({})), manual).await;
    until_shown(&*store, &key, &["10.9.1.2"]).await;
    // An invalid setting changes nothing.
    let invalid = json!({"metadata": {"name": "default"}, "spec": {"controllers": {"loadBalancer": {"assignIPs": "None"}}}});
    put(&*store, &global(Kind::KubeControllersConfiguration, "default"), invalid).await;
    put(&*store, &balanced("later").0, balanced("later").1).await;
    change(&*store, &key, lb(json!({})), json!({})).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    until_shown(&*store, &key, &["10.9.1.2"]).await;
    assert_eq!(shown(&value(&*store, &balanced("later").0).await), Vec::<String>::new());
}

/// Without a pool for them, the status of Services belongs to others. A pool that comes later is used, and one that is full
/// is reported.
#[tokio::test]
async fn services_wait_for_a_pool_and_for_room() {
    let store = cluster(&[]).await;
    let (key, mut foreign) = balanced("a");
    foreign["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}});
    put(&*store, &key, foreign).await;
    let _running = start(store.clone(), None, "one");
    until("somebody leads", async || !store.list(Kind::Lease).await.unwrap().items.is_empty()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(shown(&value(&*store, &key).await), ["192.0.2.1"]);
    let (of_pool, small) = pool("p", "10.9.0.4/32", json!({"blockSize": 32}));
    put(&*store, &of_pool, small).await;
    until_shown(&*store, &key, &["10.9.0.4"]).await;
    let (second, waits) = balanced("b");
    put(&*store, &second, waits).await;
    until_problem(&*store, &second, "no free address for load balancers").await;
    store.delete(&key, None).await.unwrap();
    let (other, large) = pool("q", "10.9.1.0/30", json!({}));
    put(&*store, &other, large).await;
    until("it has an address", async || shown(&value(&*store, &second).await).len() == 1).await;
    assert_eq!(problem(&value(&*store, &second).await), "");
}

/// Blocks of load balancers have no node that could vanish.
#[tokio::test]
async fn vanished_nodes_take_no_addresses_of_services_with_them() {
    let store = cluster(&[pool("p", "10.9.0.0/29", json!({}))]).await;
    put(&*store, &global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
    let (key, service) = balanced("a");
    put(&*store, &key, service).await;
    let running = start(store.clone(), None, "one");
    until("it has an address", async || shown(&value(&*store, &key).await).len() == 1).await;
    drop(running);
    let (start, grace) = (Instant::now(), Duration::from_secs(60));
    let mut nodes = Nodes::new(store.clone(), store.clone(), grace);
    let mut blocks = Blocks::new(store.clone(), grace);
    for minute in 0..4 {
        nodes.round(start + grace * minute).await.unwrap();
        blocks.round(start + grace * minute).await.unwrap();
    }
    assert_eq!(allocated(&*store).await.len(), 1);
    assert_eq!(store.list(Kind::BlockAffinity).await.unwrap().items.len(), 1);
}

/// A number from a sequence that looks random.
fn next(seed: &mut u64, below: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % below
}

/// Services come, change and go; the controllers crash after some writes, and two of them work at the same time. In the end
/// each Service shows what it should have, and nobody else has it.
#[tokio::test(flavor = "multi_thread")]
async fn random_changes_and_crashes_leave_each_service_with_its_own_address() {
    for seed in 0..8_u64 {
        let mut dice = seed;
        let store = cluster(&[
            pool("p", "10.9.0.0/27", json!({})),
            pool("m", "10.9.1.0/29", json!({"assignmentMode": "Manual"})),
        ])
        .await;
        let checks = Arc::new(Checks::default());
        let names: Vec<String> = (0..8).map(|number| format!("s{number}")).collect();
        let mut uid = 0;
        for _ in 0..6 {
            let writes = usize::try_from(next(&mut dice, 25)).unwrap();
            let doomed = Disturbed::crashing_after(store.clone(), writes).checking(checks.clone());
            let other = Disturbed::new(store.clone()).checking(checks.clone());
            // Different names of their Leases: both lead.
            let first = crate::common::start_in(Arc::new(doomed), None, "first", "a");
            let second = crate::common::start_in(Arc::new(other), None, "second", "b");
            for _ in 0..10 {
                let key = namespaced(Kind::Service, &names[usize::try_from(next(&mut dice, 8)).unwrap()]);
                let annotations = match next(&mut dice, 4) {
                    0 => {
                        json!({"projectcalico.org/loadBalancerIPs": format!("[\"10.9.1.{}\"]", next(&mut dice, 8))})
                    }
                    1 => json!({"projectcalico.org/ipv4pools": "[\"m\"]"}),
                    _ => json!({}),
                };
                let spec = match next(&mut dice, 5) {
                    0 => json!({"type": "ClusterIP"}),
                    _ => json!({"type": "LoadBalancer"}),
                };
                match (store.get(&key).await.unwrap(), next(&mut dice, 3)) {
                    (Some(_), 0) => drop(store.delete(&key, None).await),
                    (Some(_), _) => change(&*store, &key, spec, annotations).await,
                    (None, _) => {
                        uid += 1;
                        let (_, value) = service(&key.name, &format!("u{uid}"), spec, annotations);
                        store.create(&key, value).await.unwrap();
                    }
                }
                tokio::time::sleep(Duration::from_millis(next(&mut dice, 60))).await;
            }
            drop((first, second));
        }
        let _last = start(store.clone(), None, "last");
        let mut wrong = String::new();
        let settled = async {
            until("everything is settled", async || {
                wrong = differences(&*store).await;
                wrong.is_empty()
            })
            .await;
        };
        let result = tokio::time::timeout(Duration::from_secs(50), settled).await;
        assert!(result.is_ok(), "seed {seed}: {wrong}");
        let (count, wrong) = checks.0.lock().await.clone();
        assert_eq!(wrong, Vec::<String>::new(), "seed {seed}");
        assert!(count > 20, "seed {seed}: {count} checks");
    }
}

/// What was wrong after a write of a block or Service, and how many writes were checked: each address that a Service shows is
/// its own in IPAM.
#[derive(Default)]
pub(crate) struct Checks(pub(crate) tokio::sync::Mutex<(usize, Vec<String>)>);

pub(crate) async fn shown_and_not_held(store: &dyn Store) -> Vec<String> {
    let mut handles = BTreeMap::new();
    for stored in store.list(Kind::IpamBlock).await.unwrap().items {
        let block: Block = serde_json::from_value(stored.value).unwrap();
        for (address, attribute) in block.allocated() {
            handles.insert(address.to_string(), attribute.handle_id.clone().unwrap());
        }
    }
    let mut wrong = Vec::new();
    for stored in store.list(Kind::Service).await.unwrap().items {
        let uid = stored.value["metadata"]["uid"].as_str().unwrap();
        let handle = tortie_ipam::service_handle("n", &stored.key.name, uid);
        for address in shown(&stored.value) {
            if handles.get(&address) != Some(&handle) {
                wrong.push(format!("{} shows {address} of {:?}", stored.key, handles.get(&address)));
            }
        }
    }
    wrong
}

/// How Services differ from what they should have, by a rule of its own.
async fn differences(store: &dyn Store) -> String {
    let allocated = allocated(store).await;
    let mut owners: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (address, service) in &allocated {
        owners.entry(service.clone()).or_default().insert(address.clone());
    }
    let mut wrong = String::new();
    let mut of_nobody: BTreeSet<String> = owners.keys().cloned().collect();
    for stored in store.list(Kind::Service).await.unwrap().items {
        let name = &stored.key.name;
        of_nobody.remove(name);
        let has = owners.get(name).cloned().unwrap_or_default();
        let annotations = &stored.value["metadata"]["annotations"];
        let asked = annotations["projectcalico.org/loadBalancerIPs"].as_str();
        let is_right = if stored.value["spec"]["type"] != "LoadBalancer" {
            has.is_empty()
        } else if let Some(asked) = asked {
            let asked = asked.trim_matches(['[', ']', '"']).to_owned();
            // Another Service may have it.
            has == BTreeSet::from([asked.clone()])
                || has.is_empty() && allocated.contains_key(&asked) && !problem(&stored.value).is_empty()
        } else {
            let start =
                if annotations["projectcalico.org/ipv4pools"].is_string() { "10.9.1." } else { "10.9.0." };
            has.len() == 1 && has.iter().all(|address| address.starts_with(start))
                || has.is_empty() && start == "10.9.1." && !problem(&stored.value).is_empty()
        };
        let shown: BTreeSet<String> = shown(&stored.value).into_iter().collect();
        if !is_right || shown != has {
            wrong = format!("{wrong}{}: has {has:?}, shows {shown:?}\n", stored.value);
        }
    }
    match of_nobody.is_empty() {
        true => wrong,
        false => format!("{wrong}addresses of {of_nobody:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn services_of_a_kubernetes_api_get_addresses_on_both_datastores() {
    if !can_run(&[Program::Kube, Program::Etcd, Program::Etcdctl]) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
    servers.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: tortie-system}\n").unwrap();
    let api: Arc<dyn Endpoints> = Arc::new(open(servers.kubeconfig()).await);
    let etcd = EtcdServers::start().unwrap();
    let config = EtcdConfig { endpoints: etcd.endpoints(), tls: None, login: None };
    let in_etcd: Arc<dyn Endpoints> = Arc::new(Etcd::new(config).unwrap());
    for (store, kubernetes, cidr) in
        [(api.clone(), None, "10.9.0.0/29"), (in_etcd, Some(api.clone()), "10.9.9.0/29")]
    {
        let (key, pool) = pool("p", cidr, json!({}));
        put(&*store, &key, pool).await;
        let running = start(store.clone(), kubernetes, cidr);
        servers
            .apply("apiVersion: v1\nkind: Service\nmetadata: {name: s, namespace: default}\nspec: {type: LoadBalancer, ports: [{port: 80}]}\n")
            .unwrap();
        let key = Key::namespaced(Kind::Service, "default", "s");
        let start = &cidr[..7];
        until("the Service has an address", async || {
            shown(&value(&*api, &key).await).first().is_some_and(|address| address.starts_with(start))
        })
        .await;
        let address = shown(&value(&*api, &key).await).remove(0);
        assert_eq!(allocated(&*store).await, BTreeMap::from([(address, "s".to_owned())]));
        // A Service that lacks one, and says so.
        let asks = "apiVersion: v1\nkind: Service\nmetadata: {name: t, namespace: default, annotations: {projectcalico.org/loadBalancerIPs: '[\"10.0.0.1\"]'}}\nspec: {type: LoadBalancer, ports: [{port: 80}]}\n";
        servers.apply(asks).unwrap();
        until_problem(&*api, &Key::namespaced(Kind::Service, "default", "t"), "10.0.0.1").await;
        let described =
            servers.kubectl(&["get", "service", "t", "-o", "jsonpath={.status.conditions[*].type}"]).unwrap();
        assert_eq!(described.trim(), CONDITION);
        servers.kubectl(&["delete", "service", "s", "t"]).unwrap();
        until("the address is free", async || allocated(&*store).await.is_empty()).await;
        let affinities = store.list(Kind::BlockAffinity).await.unwrap().items;
        assert_eq!(affinities[0].key.name, format!("virtual:load-balancer/{}", block_of(&*store).await));
        drop(running);
    }
    // Calico's key.
    let text = etcd.etcdctl(&["get", "--keys-only", "--prefix", "/calico/ipam/v2/virtual/"]).unwrap();
    assert!(text.trim().starts_with("/calico/ipam/v2/virtual/load-balancer/ipv4/block/10.9.9."), "{text}");
}

async fn block_of(store: &dyn Store) -> String {
    store.list(Kind::IpamBlock).await.unwrap().items[0].key.name.clone()
}

//! Tests of what nodes announce.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use super::*;
use crate::node_address::AddressMethods;
use crate::tunnels::{vxlan_address, vxlan_addresses};
use crate::unsupported::Unsupported;
use serde_json::json;
use tortie_dataplane::Reason;
use tortie_ipam::{Family, Request};
use tortie_store::{Embedded, Store};

fn finder(methods: AddressMethods) -> AddressFinder {
    AddressFinder { methods, machine: Machine::Linux }
}

fn announced(first: Tunnels, methods: AddressMethods) -> Announced {
    let (lease, etcd_lease, pod_network, families) = Default::default();
    let (finder, ipv6, missing, conditions) = (finder(methods), None, Default::default(), Default::default());
    Announced { first, finder, lease, etcd_lease, pod_network, ipv6, families, missing, conditions }
}

#[tokio::test]
async fn annotations_of_any_shape_cause_no_failure() {
    let tunnel = Tunnels::derived(vec![Ipv4Addr::new(10, 0, 0, 1).into()]);
    let told = json!({Node::VXLAN_ADDRESS: "10.0.0.1"});
    let table = [
        (json!({"name": "n"}), Some(&told)),
        (json!({"name": "n", "annotations": null}), Some(&told)),
        (json!({"name": "n", "annotations": {Node::VXLAN_MAC: "old"}}), Some(&told)),
        (json!({"name": "n", "annotations": "text"}), None),
        (json!({"name": "n", "annotations": [1]}), None),
        (json!("text"), None),
    ];
    for (metadata, expected) in table {
        let store = Embedded::in_memory().unwrap();
        let key = Key::global(Kind::Node, "n");
        store.create(&key, json!({"metadata": metadata})).await.unwrap();
        let result = annotate(&store, "n", &mut announced(tunnel.clone(), AddressMethods::default())).await;
        assert_eq!(result.is_ok(), expected.is_some(), "{metadata}: {result:?}");
        if let Some(expected) = expected {
            let after = store.get(&key).await.unwrap().unwrap().value;
            assert_eq!(after["metadata"]["annotations"], *expected, "{metadata}");
        }
    }
}

/// Other nodes would not reach the pods' IPv6 addresses.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn pods_have_the_families_for_which_the_node_has_an_address() {
    let v4 = json!({Node::ADDRESS: "192.0.2.1/24"});
    let both = json!({Node::ADDRESS: "192.0.2.1/24", Node::ADDRESS_V6: "2001:db8::1/64"});
    for (annotations, expected) in [(v4, &[IpVersion::V4][..]), (both, &IpVersion::ALL)] {
        let store = Embedded::in_memory().unwrap();
        let node = json!({"metadata": {"name": "n", "annotations": annotations}});
        store.create(&Key::global(Kind::Node, "n"), node).await.unwrap();
        let subnets = ["10.5.1.0/24", "fd00:5:1::/64"].map(|net| net.parse().unwrap());
        let lease = Some(OwnLease::of_subnets(subnets.to_vec(), None));
        let none = announced(Tunnels::derived(vec![]), AddressMethods::default());
        let families = annotate(&store, "n", &mut Announced { lease, ..none }).await.unwrap();
        assert_eq!(families, expected);
    }
}

async fn with_pool() -> Arc<Embedded> {
    let store = Arc::new(Embedded::in_memory().unwrap());
    let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.0.0.0/26", "blockSize": 30, "vxlanMode": "Always"}});
    store.create(&Key::global(Kind::IpPool, "p"), pool).await.unwrap();
    let config = json!({"strict_affinity": false, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
    store
}

/// The controllers have released the addresses of a node that was away for long. Another node may have them.
#[tokio::test]
async fn a_released_tunnel_address_is_not_announced_again() {
    let store = with_pool().await;
    let key = Key::global(Kind::Node, "n");
    let value = || json!({"metadata": {"name": "n"}});
    store.create(&key, value()).await.unwrap();
    let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
    let address = vxlan_address(&ipam, "n", Family::V4).await.unwrap().unwrap();
    assert_eq!(vxlan_addresses(&ipam, "n").await.unwrap(), [address], "a node keeps its address");
    let first = Tunnels::derived(vec![address]);
    let announced = announced(first, AddressMethods::default());
    let (_keep, in_force) = watch::channel(Arc::default());
    let keeping =
        tokio::spawn(keep_announced(store.clone(), ipam.clone(), "n".to_owned(), announced, in_force));
    let announces = async |expected: Option<IpAddr>| loop {
        let stored = store.get(&key).await.unwrap();
        let annotations = stored.map(|stored| stored.value["metadata"]["annotations"].clone());
        let found = annotations.and_then(|all| all[Node::VXLAN_ADDRESS].as_str()?.parse::<IpAddr>().ok());
        if let Some(found) = found.filter(|found| expected.is_none_or(|expected| *found == expected)) {
            return found;
        }
        tokio::task::yield_now().await;
    };
    announces(Some(address)).await;

    store.delete(&key, None).await.unwrap();
    ipam.release("vxlan-tunnel-addr-n").await.unwrap();
    for number in 0.. {
        let request = Request { handle: format!("pod.{number}"), ..Request::default() };
        if ipam.assign(&request).await.unwrap().address == address {
            break;
        }
    }
    store.create(&key, value()).await.unwrap();
    let now = announces(None).await;
    assert_ne!(now, address);
    let owners = ipam.find("vxlan-tunnel-addr-n").await.unwrap();
    assert_eq!(owners.iter().map(|one| one.address).collect::<Vec<_>>(), [now]);
    keeping.abort();
}

/// What `tortie pool migrate` does: it closes the pool, releases the tunnel address, and then changes an annotation of the Node.
#[tokio::test]
async fn a_node_takes_a_tunnel_address_of_another_pool_when_its_own_is_released() {
    let store = with_pool().await;
    let key = Key::global(Kind::Node, "n");
    store.create(&key, json!({"metadata": {"name": "n"}})).await.unwrap();
    let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
    let old = vxlan_address(&ipam, "n", Family::V4).await.unwrap().unwrap();
    let first = Tunnels::derived(vec![old]);
    let announced = announced(first, AddressMethods::default());
    let (_keep, in_force) = watch::channel(Arc::default());
    // An agent that has not used the pool for some seconds.
    let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
    let keeping =
        tokio::spawn(keep_announced(store.clone(), ipam.clone(), "n".to_owned(), announced, in_force));
    let announces = async |is_it: &dyn Fn(&str) -> bool| loop {
        let node = store.get(&key).await.unwrap().unwrap();
        let told = node.value["metadata"]["annotations"][Node::VXLAN_ADDRESS].as_str().map(str::to_owned);
        if let Some(told) = told.filter(|told| is_it(told)) {
            return told;
        }
        tokio::task::yield_now().await;
    };
    announces(&|told| told == old.to_string()).await;

    let pool = Key::global(Kind::IpPool, "p");
    let stored = store.get(&pool).await.unwrap().unwrap();
    let mut closed = stored.value;
    closed["spec"]["disabled"] = json!(true);
    store.update(&pool, closed, &stored.version).await.unwrap();
    let new = json!({"metadata": {"name": "q"}, "spec": {"cidr": "10.9.0.0/26", "blockSize": 30, "vxlanMode": "Always"}});
    store.create(&Key::global(Kind::IpPool, "q"), new).await.unwrap();
    let block = ipam.find("vxlan-tunnel-addr-n").await.unwrap()[0].block;
    let release = tortie_ipam::Release { address: old, handle: None, sequence_number: None };
    tortie_ipam::Records::new(store.clone()).release_addresses(block, &[release]).await.unwrap();
    let changed = BTreeMap::from([("tortie.io/pool-migration", Some("{}".to_owned()))]);
    store.annotate_node("n", &changed).await.unwrap();
    let told = announces(&|told| told != old.to_string()).await;
    assert!(told.starts_with("10.9.0."), "{told}");
    keeping.abort();
}

/// A node that gets no IPv6 block serves IPv4 pods.
#[tokio::test]
async fn a_full_ipv6_pool_costs_only_the_ipv6_tunnel() {
    let store = Arc::new(Embedded::in_memory().unwrap());
    for (name, cidr, size) in [("p", "10.0.0.0/26", 28), ("six", "fd00::/122", 122)] {
        let spec = json!({"cidr": cidr, "blockSize": size, "vxlanMode": "Always"});
        let pool = json!({"metadata": {"name": name}, "spec": spec});
        store.create(&Key::global(Kind::IpPool, name), pool).await.unwrap();
    }
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
    let addresses = async |node: &str| {
        vxlan_addresses(&Ipam::new(store.clone(), node, BTreeMap::new()), node).await.unwrap()
    };
    let first = addresses("one").await;
    assert_eq!(first.iter().map(IpVersion::of).collect::<Vec<_>>(), IpVersion::ALL);
    assert_eq!(addresses("one").await, first, "a node keeps its addresses");
    let second = addresses("two").await;
    assert_eq!(second.iter().map(IpVersion::of).collect::<Vec<_>>(), [IpVersion::V4]);
}

/// Nobody else tells the other nodes the address of a node of Kubernetes.
#[tokio::test]
async fn the_address_of_the_kubelet_is_used_unless_there_is_another() {
    let tunnel = Tunnels::derived(vec![Ipv4Addr::new(10, 0, 0, 1).into()]);
    let status = json!({"addresses": [
        {"type": "Hostname", "address": "n"},
        {"type": "InternalIP", "address": "fd00::1"},
        {"type": "InternalIP", "address": "192.0.2.1"},
    ]});
    for (annotations, expected) in
        [(json!({}), json!("192.0.2.1")), (json!({Node::ADDRESS: "192.0.2.9/24"}), json!("192.0.2.9/24"))]
    {
        let store = Embedded::in_memory().unwrap();
        let key = Key::global(Kind::Node, "n");
        let value = json!({"metadata": {"name": "n", "annotations": annotations}, "status": status});
        store.create(&key, value).await.unwrap();
        annotate(&store, "n", &mut announced(tunnel.clone(), AddressMethods::default())).await.unwrap();
        let after = store.get(&key).await.unwrap().unwrap().value;
        assert_eq!(after["metadata"]["annotations"][Node::ADDRESS], expected);
        assert_eq!(after["metadata"]["annotations"][Node::ADDRESS_V6], "fd00::1");
    }
}

/// A method has precedence over what the kubelet reports and over an annotation. If it finds nothing, that annotation stays. A new
/// address is found by a later look.
#[cfg(target_os = "linux")]
#[test]
fn the_address_that_a_method_finds_is_announced() {
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, RouteSocket};

    let announce = async || {
        let mut routes = RouteSocket::open().unwrap();
        let (name, kind) = ("eth0", NewLinkKind::Bridge);
        routes.create(&NewLink { name, kind, mac: None, mtu: None, up: true, controller: None }).unwrap();
        let link = routes.link(name).unwrap().unwrap().index;
        let address = Address { link, address: Ipv4Addr::new(192, 0, 2, 10).into(), prefix_length: 24 };
        routes.change(&Change::AddAddress(address)).unwrap();
        let status = json!({"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]});
        for (current, method, expected) in [
            (None, "first-found", Some("192.0.2.10/24")),
            (Some("192.0.2.9/24"), "interface=eth0", Some("192.0.2.10/24")),
            (Some("192.0.2.9/24"), "interface=eth1", None),
        ] {
            let store = Embedded::in_memory().unwrap();
            let key = Key::global(Kind::Node, "n");
            let annotations = json!({Node::ADDRESS: current});
            let value = json!({"metadata": {"name": "n", "annotations": annotations}, "status": status});
            store.create(&key, value.clone()).await.unwrap();
            let ipv4 = method.parse().unwrap();
            let methods = AddressMethods { ipv4, ..AddressMethods::default() };
            let tunnels = Tunnels::derived(vec!["10.0.0.1".parse().unwrap()]);
            let mut announced = announced(tunnels, methods);
            let written = annotate(&store, "n", &mut announced).await;
            let after = store.get(&key).await.unwrap().unwrap().value;
            match expected {
                Some(expected) => {
                    assert_eq!(after["metadata"]["annotations"][Node::ADDRESS], expected, "{method}");
                }
                None => {
                    written.unwrap();
                    let unfound = announced.missing.all_found("n").unwrap_err().to_string();
                    assert!(unfound.contains("eth0 (192.0.2.10/24)"), "an agent that starts ends: {unfound}");
                    let conditions = announced.missing.conditions();
                    assert!(conditions[0].message.contains("eth0 (192.0.2.10/24)"), "{conditions:?}");
                    let annotations = &after["metadata"]["annotations"];
                    assert_eq!(annotations[Node::ADDRESS], value["metadata"]["annotations"][Node::ADDRESS]);
                    assert_eq!(annotations[Node::VXLAN_ADDRESS], "10.0.0.1", "the rest is written");
                }
            }
        }
        let store = with_pool().await;
        let key = Key::global(Kind::Node, "n");
        store.create(&key, json!({"metadata": {"name": "n"}})).await.unwrap();
        let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
        let methods = AddressMethods { ipv4: "first-found".parse().unwrap(), ..AddressMethods::default() };
        let announced = announced(Tunnels::default(), methods);
        let (_keep, in_force) = watch::channel(Arc::default());
        tokio::spawn(keep_announced(store.clone(), ipam, "n".to_owned(), announced, in_force));
        let announces = async |expected: &str| {
            for _ in 0..3_000 {
                let node = store.get(&key).await.unwrap().unwrap().value;
                if node["metadata"]["annotations"][Node::ADDRESS] == expected {
                    return;
                }
                // The store's thread needs real time, and the look its minute.
                std::thread::sleep(Duration::from_millis(10));
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
            panic!("{expected} is not announced");
        };
        announces("192.0.2.10/24").await;
        let with_another =
            Address { address: Ipv4Addr::new(192, 0, 2, 50).into(), prefix_length: 32, ..address };
        // The network service takes all away, and a daemon is faster with the address of its service.
        routes.change(&Change::DeleteAddress(address)).unwrap();
        routes.change(&Change::AddAddress(with_another)).unwrap();
        routes.change(&Change::AddAddress(address)).unwrap();
        for _ in 0..3 {
            tokio::time::sleep(LOOK_INTERVAL).await;
            announces("192.0.2.10/24").await;
        }
        let new = Address { address: Ipv4Addr::new(192, 0, 2, 20).into(), ..address };
        routes.change(&Change::DeleteAddress(address)).unwrap();
        routes.change(&Change::AddAddress(new)).unwrap();
        announces("192.0.2.20/24").await;
    };
    let run = || {
        let builder = &mut tokio::runtime::Builder::new_current_thread();
        // Minutes pass at once.
        let runtime = builder.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(announce());
    };
    NetNs::create().unwrap().run(run).unwrap();
}

/// The kubelet of a node has got another `--node-ip`, and then the old address goes. Nothing waits for a look at the interfaces: the clock
/// does not go on.
#[cfg(target_os = "linux")]
#[test]
fn changes_of_the_kubelet_and_of_interfaces_are_followed_at_once() {
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, RouteSocket};

    let follow = async || {
        let mut routes = RouteSocket::open().unwrap();
        let kind = NewLinkKind::Bridge;
        routes.create(&NewLink { up: true, ..NewLink::new("eth0", kind) }).unwrap();
        let link = routes.link("eth0").unwrap().unwrap().index;
        let address =
            |last: u8| Address { link, address: Ipv4Addr::new(192, 0, 2, last).into(), prefix_length: 24 };
        routes.change(&Change::AddAddress(address(11))).unwrap();
        let store = with_pool().await;
        let key = Key::global(Kind::Node, "n");
        let reporting = |address: &str| json!({"addresses": [{"type": "InternalIP", "address": address}]});
        let value = json!({"metadata": {"name": "n"}, "status": reporting("192.0.2.11")});
        store.create(&key, value).await.unwrap();
        let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
        let announced = announced(Tunnels::default(), AddressMethods::default());
        let (_keep, in_force) = watch::channel(Arc::default());
        let keeping = tokio::spawn(keep_announced(store.clone(), ipam, "n".to_owned(), announced, in_force));
        let announces = async |expected: &str| {
            let begun = Instant::now();
            loop {
                let node = store.get(&key).await.unwrap().unwrap().value;
                if node["metadata"]["annotations"][Node::ADDRESS] == expected {
                    return;
                }
                assert!(begun.elapsed() < LOOK_INTERVAL / 2, "{expected}: {}", node["metadata"]);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let report = async |address: &str| loop {
            let stored = store.get(&key).await.unwrap().unwrap();
            let mut value = stored.value;
            value["status"] = reporting(address);
            match store.update(&key, value, &stored.version).await {
                Err(StoreError::Conflict(_)) => {}
                done => return drop(done.unwrap()),
            }
        };
        announces("192.0.2.11/24").await;
        // No interface has the address yet. It may belong to a router.
        report("192.0.2.12").await;
        routes.change(&Change::AddAddress(address(12))).unwrap();
        announces("192.0.2.12/24").await;
        routes.change(&Change::AddAddress(address(13))).unwrap();
        report("192.0.2.13").await;
        announces("192.0.2.13/24").await;
        keeping.abort();
    };
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(follow());
    };
    NetNs::create().unwrap().run(run).unwrap();
}

/// A machine that starts has its IPv6 address a moment later than its agent.
#[cfg(target_os = "linux")]
#[tokio::test(start_paused = true)]
async fn what_flanneld_has_announced_stays_while_the_address_is_missing_for_a_moment() {
    let store = Embedded::in_memory().unwrap();
    let key = Key::global(Kind::Node, "n");
    let of_flannel = json!({
        Node::ADDRESS: "127.0.0.1/8",
        Node::FLANNEL_ADDRESS.of(IpVersion::V6): "2001:db8::1",
        Node::FLANNEL_DATA.of(IpVersion::V6): r#"{"VNI":1,"VtepMAC":"66:00:00:00:00:01"}"#,
    });
    let node = json!({"metadata": {"name": "n", "annotations": of_flannel}});
    store.create(&key, node).await.unwrap();
    let subnets = ["10.5.1.0/24", "fd00:5:1::/64"].map(|net| net.parse().unwrap());
    let lease = Some(OwnLease::of_subnets(subnets.to_vec(), None));
    let mut announced = Announced { lease, ..announced(Tunnels::derived(vec![]), AddressMethods::default()) };
    let conditions = announced.conditions();
    for is_over in [false, true] {
        let families = annotate(&store, "n", &mut announced).await.unwrap();
        assert_eq!(families, [IpVersion::V4], "nobody could answer by IPv6");
        let after = store.get(&key).await.unwrap().unwrap().value;
        for names in [Node::FLANNEL_ADDRESS, Node::FLANNEL_DATA] {
            let name = names.of(IpVersion::V6);
            let expected = if is_over { &json!(null) } else { &of_flannel[name] };
            assert_eq!(&after["metadata"]["annotations"][name], expected);
        }
        let found = conditions.borrow().clone();
        let [condition] = &found[..] else { panic!("{found:?}") };
        assert!(condition.message.contains("2001:db8::1"), "{}", condition.message);
        tokio::time::sleep(Duration::from_secs(5 * 60)).await;
    }
    annotate(&store, "n", &mut announced).await.unwrap();
    assert_eq!(*conditions.borrow(), []);
}

/// The annotation of an address that the kubelet does not report stays for ever, and so does what flannel's daemons read. But other
/// nodes no longer reach pods of that family.
#[cfg(target_os = "linux")]
#[tokio::test(start_paused = true)]
async fn pods_of_a_node_that_has_lost_ipv6_get_ipv4_only() {
    let own_v6 = Node::ADDRESS_V6;
    let overwrite = Node::FLANNEL_OVERWRITE.of(IpVersion::V6);
    for (more, expected) in
        [(None, &[IpVersion::V4][..]), (Some((overwrite, "2001:db8::7")), &IpVersion::ALL)]
    {
        let store = Embedded::in_memory().unwrap();
        let key = Key::global(Kind::Node, "n");
        let mut annotations = json!({Node::ADDRESS: "127.0.0.1/8", own_v6: "2001:db8::1/64"});
        more.into_iter().for_each(|(name, text)| annotations[name] = json!(text));
        let addresses = json!([{"type": "InternalIP", "address": "127.0.0.1"}]);
        let metadata = json!({"name": "n", "annotations": annotations});
        store.create(&key, json!({"metadata": metadata, "status": {"addresses": addresses}})).await.unwrap();
        let subnets = ["10.5.1.0/24", "fd00:5:1::/64"].map(|net| net.parse().unwrap());
        let lease = Some(OwnLease::of_subnets(subnets.to_vec(), None));
        let mut announced =
            Announced { lease, ..announced(Tunnels::derived(vec![]), AddressMethods::default()) };
        assert_eq!(
            annotate(&store, "n", &mut announced).await.unwrap(),
            IpVersion::ALL,
            "perhaps for a moment"
        );
        tokio::time::sleep(Duration::from_secs(5 * 60)).await;
        assert_eq!(annotate(&store, "n", &mut announced).await.unwrap(), expected);
        let after = store.get(&key).await.unwrap().unwrap().value;
        assert_eq!(after["metadata"]["annotations"][own_v6], "2001:db8::1/64");
    }
}

/// Nothing of the Node changes meanwhile.
#[cfg(target_os = "linux")]
#[tokio::test(start_paused = true)]
async fn an_address_that_stays_away_is_replaced_by_that_of_the_kubelet() {
    let store = with_pool().await;
    let key = Key::global(Kind::Node, "n");
    let value = json!({
        "metadata": {"name": "n", "annotations": {Node::ADDRESS: "192.0.2.9/24"}},
        "status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]},
    });
    store.create(&key, value).await.unwrap();
    let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
    let mut announced = announced(Tunnels::default(), AddressMethods::default());
    annotate(&*store, "n", &mut announced).await.unwrap();
    let address = async || {
        let node = store.get(&key).await.unwrap().unwrap().value;
        node["metadata"]["annotations"][Node::ADDRESS].as_str().unwrap().to_owned()
    };
    assert_eq!(address().await, "192.0.2.9/24");
    let (_keep, in_force) = watch::channel(Arc::default());
    tokio::spawn(keep_announced(store.clone(), ipam, "n".to_owned(), announced, in_force));
    for _ in 0..3_000 {
        if address().await == "127.0.0.1/8" {
            return;
        }
        // The store's thread needs real time, and the look its minute.
        std::thread::sleep(Duration::from_millis(10));
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    panic!("the address is not replaced");
}

/// Somebody locks the datastore to copy it to another one. What the node would write then is lost.
#[tokio::test(start_paused = true)]
async fn an_attempt_that_has_failed_is_repeated_when_the_datastore_is_unlocked() {
    let store = with_pool().await;
    let key = Key::global(Kind::Node, "n");
    let node = json!({"metadata": {"name": "n", "annotations": {Node::ADDRESS: "127.0.0.1/8"}}});
    store.create(&key, node).await.unwrap();
    let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
    // No pool has flannel's network, so each attempt fails after it has written.
    let lease = Some(OwnLease::of_subnets(vec!["10.5.1.0/24".parse().unwrap()], None));
    let announced = Announced { lease, ..announced(Tunnels::default(), AddressMethods::default()) };
    let (lock, in_force) = watch::channel(Arc::new(InForce::default()));
    tokio::spawn(keep_announced(store.clone(), ipam, "n".to_owned(), announced, in_force));
    let name = Node::FLANNEL_MANAGED;
    let announces = async |rounds: u32| {
        for _ in 0..rounds {
            let node = store.get(&key).await.unwrap().unwrap().value;
            if node["metadata"]["annotations"][name] == "true" {
                return true;
            }
            // The store's thread needs real time, and the next attempt its seconds.
            std::thread::sleep(Duration::from_millis(10));
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
        false
    };
    let remove = async || store.annotate_node("n", &BTreeMap::from([(name, None)])).await.unwrap();
    assert!(announces(3_000).await);
    remove().await;
    assert!(announces(3_000).await, "each attempt writes");
    let object = Key::global(Kind::ClusterInformation, "default");
    let locked = Unsupported { object, reason: Reason::DatastoreLocked, message: String::new() };
    lock.send_replace(Arc::new(InForce { lock: Some(locked), ..InForce::default() }));
    // An attempt may be under way.
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(10));
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    remove().await;
    assert!(!announces(100).await, "the datastore is locked");
    lock.send_replace(Arc::default());
    assert!(announces(3_000).await);
}

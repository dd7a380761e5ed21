//! No address is allocated twice, whatever runs concurrently, and wherever a node crashes between two writes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_ipam::{Assignment, FollowUp, Ipam, IpamError, Request, Use};
use tortie_store::{
    Embedded, Follow, Interest, Listing, Page, PageToken, Store, StoreError, Stored, Version, Write,
};

async fn cluster(cidr: &str, block_size: u8) -> Arc<Embedded> {
    let store = Arc::new(Embedded::in_memory().unwrap());
    let pool = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "default"},
        "spec": {"cidr": cidr, "blockSize": block_size, "vxlanMode": "Always"},
    });
    store.create(&Key::global(Kind::IpPool, "default"), pool).await.unwrap();
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
    store
}

fn ipam(store: Arc<dyn Store>, node: &str, os: &str) -> Ipam {
    Ipam::new(store, node, BTreeMap::from([("kubernetes.io/os".to_owned(), os.to_owned())]))
}

fn request(handle: &str) -> Request {
    Request {
        handle: handle.to_owned(),
        owner: BTreeMap::from([("pod".to_owned(), handle.to_owned())]),
        ..Request::default()
    }
}

/// Every allocated address and its handle. Asserts that each block is consistent.
async fn allocated(store: &dyn Store) -> BTreeMap<IpAddr, String> {
    let mut all = BTreeMap::new();
    for stored in store.list(Kind::IpamBlock).await.unwrap().items {
        let block: Block = serde_json::from_value(stored.value).unwrap();
        block.check().unwrap();
        for (address, attribute) in block.allocated() {
            let handle = attribute.handle_id.clone().unwrap();
            assert_eq!(all.insert(address, handle), None, "{address} lies in two blocks");
        }
    }
    all
}

fn address_of(block: ipnet::IpNet, offset: usize) -> IpAddr {
    let ipnet::IpNet::V4(block) = block else { panic!("{block} is no IPv4 block") };
    std::net::Ipv4Addr::from_bits(block.network().to_bits() + u32::try_from(offset).unwrap()).into()
}

/// The numbers that the records of handles have, by handle and block.
async fn counted(store: &dyn Store) -> BTreeMap<(String, String), u64> {
    let mut all = BTreeMap::new();
    for stored in store.list(Kind::IpamHandle).await.unwrap().items {
        for (block, count) in stored.value["block"].as_object().unwrap() {
            all.insert((stored.key.name.clone(), block.clone()), count.as_u64().unwrap());
        }
    }
    all
}

/// Two processes of one node share its blocks. As long as none of them crashes, records count what handles have: Calico's programs never delete a
/// record that counts too many.
#[tokio::test(flavor = "multi_thread")]
async fn counts_of_handles_are_exact_after_contention() {
    let store = cluster("10.0.0.0/22", 22).await;
    let processes: Vec<Arc<Ipam>> =
        (0..3).map(|_| Arc::new(ipam(store.clone(), "primary", "linux"))).collect();
    let work = processes.iter().enumerate().flat_map(|(process, ipam)| {
        (0..4).map(move |task| {
            let ipam = ipam.clone();
            tokio::spawn(async move {
                for number in 0..60 {
                    let handle = format!("h-{process}-{task}-{number}");
                    // Under contention, callers are asked to try again.
                    while let Err(error) = ipam.assign(&request(&handle)).await {
                        assert!(matches!(error, IpamError::Contended(_)), "{error}");
                    }
                    if number % 3 == 0 {
                        ipam.release(&handle).await.unwrap();
                    }
                }
            })
        })
    });
    for task in work.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let mut expected: BTreeMap<(String, String), u64> = BTreeMap::new();
    for (address, handle) in allocated(&*store).await {
        let block = ipnet::IpNet::new(address, 22).unwrap().trunc();
        *expected.entry((handle, block.to_string())).or_default() += 1;
    }
    assert_eq!(expected.len(), 3 * 4 * 40);
    assert_eq!(counted(&*store).await, expected);
}

#[tokio::test]
async fn a_linux_node_uses_a_whole_block_and_then_the_next() {
    let store = cluster("10.0.0.0/24", 29).await;
    let ipam = ipam(store.clone(), "primary", "linux");
    let mut addresses = Vec::new();
    for number in 0..20 {
        addresses.push(ipam.assign(&request(&format!("h{number}"))).await.unwrap());
    }
    let first = addresses[0].block;
    let within: Vec<_> = addresses[..8].iter().map(|each| each.address).collect();
    let expected: Vec<_> = (0..8).map(|offset| address_of(first, offset)).collect();
    assert_eq!(within, expected);
    assert_ne!(addresses[8].block, first);
    assert_eq!(store.list(Kind::IpamBlock).await.unwrap().items.len(), 3);
    assert_eq!(allocated(&*store).await.len(), 20);
}

#[tokio::test]
async fn a_windows_node_keeps_four_addresses_back_and_has_one_block() {
    let store = cluster("10.0.0.0/24", 29).await;
    let ipam = ipam(store.clone(), "minion", "windows");
    let block = ipam.ensure_blocks().await.unwrap()[0];
    assert_eq!(ipam.ensure_blocks().await.unwrap()[0], block, "asked again, the same");
    let mut offsets = Vec::new();
    for number in 0..4 {
        let assigned = ipam.assign(&request(&format!("h{number}"))).await.unwrap();
        offsets.push(assigned.address);
    }
    assert_eq!(offsets, [3, 4, 5, 6].map(|offset| address_of(block.into(), offset)));
    let error = ipam.assign(&request("h4")).await.unwrap_err();
    assert!(matches!(error, IpamError::Exhausted { blocks: 1, limit: 1, .. }), "{error}");

    let key = Key::global(Kind::IpamBlock, block.to_string());
    let value = store.get(&key).await.unwrap().unwrap().value;
    assert_eq!(value["affinity"], "host:minion");
    assert_eq!(
        value["attributes"][0],
        json!({
            "handle_id": "windows-reserved-ipam-handle", "secondary": {"note": "windows host rsvd"}
        })
    );
    assert_eq!(value["allocations"], json!([0, 0, 0, 1, 2, 3, 4, 0]));
    assert_eq!(
        value["sequenceNumberForAllocation"].as_object().unwrap().len(),
        4,
        "none for those kept back"
    );
}

#[tokio::test]
async fn windows_without_strict_affinity_and_blocks_too_small_are_refused() {
    let store = cluster("10.0.0.0/24", 29).await;
    let key = Key::global(Kind::IpamConfig, "default");
    store.delete(&key, None).await.unwrap();
    let windows = ipam(store.clone(), "minion", "windows");
    assert!(matches!(windows.assign(&request("h")).await, Err(IpamError::StrictAffinityNeeded)));
    assert!(ipam(store.clone(), "primary", "linux").assign(&request("h")).await.is_ok());

    let store = cluster("10.0.0.0/24", 30).await;
    assert!(matches!(
        ipam(store, "minion", "windows").assign(&request("h")).await,
        Err(IpamError::NoPool(_))
    ));
}

#[tokio::test]
async fn the_same_handle_gets_the_same_address_and_a_released_one_rests() {
    let store = cluster("10.0.0.0/28", 29).await;
    let primary = ipam(store.clone(), "primary", "linux");
    let first = primary.assign(&request("a")).await.unwrap();
    assert_eq!(primary.assign(&request("a")).await.unwrap(), first);
    assert_eq!(
        ipam(store.clone(), "primary", "linux").assign(&request("a")).await.unwrap(),
        first,
        "after a restart"
    );
    assert_eq!(primary.release("a").await.unwrap(), [first.address]);
    assert_eq!(primary.release("a").await.unwrap(), [] as [IpAddr; 0]);
    assert_eq!(allocated(&*store).await, BTreeMap::new());
    assert_eq!(store.list(Kind::IpamHandle).await.unwrap().items, []);
    for number in 0..7 {
        let other = primary.assign(&request(&format!("b{number}"))).await.unwrap();
        assert_ne!(other.address, first.address, "used again only when all others are taken");
    }
    assert_eq!(primary.assign(&request("last")).await.unwrap().address, first.address);
}

/// A block as Calico v3.31 writes it, with unknown fields.
#[tokio::test]
async fn what_others_wrote_is_kept() {
    let store = cluster("10.0.0.0/26", 29).await;
    let foreign = json!({
        "cidr": "10.0.0.0/29", "affinity": "host:primary", "allocations": [0, null, null, null, null, null, null, 1],
        "unallocated": [3, 1, 2, 4, 5, 6],
        "attributes": [
            {"handle_id": "k8s-pod-network.abc", "secondary": {"pod": "x", "namespace": "y"}, "alternateOwnerAttrs": {"k": "v"}},
            {"handle_id": null, "secondary": null, "releasedAt": "2026-01-01T00:00:00Z"},
        ],
        "sequenceNumber": 1_790_000_000_000_000_123_u64, "sequenceNumberForAllocation": {"0": 1_790_000_000_000_000_001_u64},
        "deleted": false, "fieldOfTheFuture": {"a": [1]},
    });
    let key = Key::global(Kind::IpamBlock, "10.0.0.0/29");
    store.create(&key, foreign).await.unwrap();
    store
        .create(&Key::global(Kind::BlockAffinity, "primary/10.0.0.0/29"), json!({"state": ""}))
        .await
        .unwrap();

    // Otherwise the released address would be free again.
    let config = Key::global(Kind::IpamConfig, "default");
    let mut stored = store.get(&config).await.unwrap().unwrap();
    stored.value["ipCooldownSeconds"] = json!(i32::MAX);
    store.update(&config, stored.value, &stored.version).await.unwrap();
    let assigned = ipam(store.clone(), "primary", "linux").assign(&request("mine")).await.unwrap();
    assert_eq!(assigned.address, IpAddr::from([10, 0, 0, 3]), "the head of the free ones");
    let value = store.get(&key).await.unwrap().unwrap().value;
    assert_eq!(value["fieldOfTheFuture"], json!({"a": [1]}));
    assert_eq!(value["attributes"][0]["alternateOwnerAttrs"], json!({"k": "v"}));
    assert_eq!(value["attributes"][1]["releasedAt"], "2026-01-01T00:00:00Z");
    assert_eq!(value["sequenceNumber"], 1_790_000_000_000_000_124_u64);
    assert_eq!(value["sequenceNumberForAllocation"]["3"], 1_790_000_000_000_000_123_u64);
}

/// Concurrent requests share writes, and each gets its own address. This includes requests that already have an
/// address, arrive twice, give up, or no longer fit in the block.
#[tokio::test]
async fn requests_that_come_together_are_served_together() {
    let store = cluster("10.0.0.0/24", 28).await;
    let ipam = ipam(store.clone(), "primary", "linux");
    let known = ipam.assign(&request("h0")).await.unwrap();
    let before = store.list(Kind::IpamBlock).await.unwrap();

    let requests: Vec<_> = (0..10).map(|number| request(&format!("h{number}"))).collect();
    let answers = futures::future::join_all(requests[1..].iter().map(|each| ipam.assign(each))).await;
    let after = store.list(Kind::IpamBlock).await.unwrap();
    let block = |listing: &Listing| serde_json::from_value::<Block>(listing.items[0].value.clone()).unwrap();
    assert_eq!(block(&after).allocated().count(), 10);
    // The first request is served alone, because the others arrive after it has started.
    let written = after.position.0 - before.position.0;
    assert!((9 + 1..=9 + 3).contains(&written), "nine handles, and the block two times or three: {written}");

    // All requests again, among new ones, one of them twice, and one whose caller gives up.
    let more: Vec<_> = (0..14).chain([13]).map(|number| request(&format!("h{number}"))).collect();
    let gives_up = request("gives-up");
    let (again, _) =
        tokio::join!(futures::future::join_all(more.iter().map(|each| ipam.assign(each))), async {
            let _ = tokio::time::timeout(std::time::Duration::ZERO, ipam.assign(&gives_up)).await;
        });
    let again: Vec<_> = again.into_iter().map(Result::unwrap).collect();
    assert_eq!(again[0], known);
    for (answer, again) in answers.into_iter().zip(&again[1..]) {
        assert_eq!(answer.unwrap(), *again);
    }
    assert_eq!(again[13], again[14]);
    ipam.release("gives-up").await.unwrap();

    let rest: Vec<_> = (14..30).map(|number| request(&format!("h{number}"))).collect();
    for answer in futures::future::join_all(rest.iter().map(|each| ipam.assign(each))).await {
        answer.unwrap();
    }
    let held = allocated(&*store).await;
    assert_eq!(held.len(), 30, "each of the thirty handles has one address");
    assert_eq!(held[&again[13].address], "h13");
    for number in 0..30 {
        assert_eq!(ipam.release(&format!("h{number}")).await.unwrap().len(), 1);
    }
    assert_eq!(store.list(Kind::IpamHandle).await.unwrap().items, []);
}

/// What follows an allocation is written with it, if the block is known and the write is small. Otherwise the caller hears
/// that it was not, and has the address all the same.
#[tokio::test]
async fn what_follows_an_allocation_is_written_with_it() {
    let store = cluster("10.0.0.0/24", 26).await;
    let ipam = ipam(store.clone(), "primary", "linux");
    let key = |number: usize| Key::namespaced(Kind::WorkloadEndpoint, "default", number.to_string());
    let follow_up = |number: usize, size: usize| -> FollowUp {
        Arc::new(move |one: Assignment| {
            let value = json!({"spec": {"address": one.address, "padding": "x".repeat(size)}});
            Some(Write::Create(key(number), value))
        })
    };
    let assign = async |number: usize, size: usize| {
        let request = request(&format!("h{number}"));
        ipam.assign_and_write(&request, Some(follow_up(number, size))).await.unwrap()
    };
    let (_, position) = assign(0, 0).await;
    assert_eq!((position, store.get(&key(0)).await.unwrap()), (None, None), "the block was claimed for it");

    let before = store.list(Kind::WorkloadEndpoint).await.unwrap().position.0;
    let (one, position) = assign(1, 0).await;
    let stored = store.get(&key(1)).await.unwrap().unwrap();
    assert_eq!((position, &stored.value["spec"]["address"]), (Some(stored.position), &json!(one.address)));
    assert_eq!(stored.position.0, before + 3, "after the handle and the block");

    // Together with one that is too large, one whose object exists, which ends the sequence, and one of which nothing follows.
    store.create(&key(4), json!({"spec": {}})).await.unwrap();
    let sixth = request("h6");
    let (two, three, large, four, none) = tokio::join!(
        assign(2, 0),
        assign(3, 0),
        assign(5, 20_000),
        assign(4, 0),
        ipam.assign_and_write(&sixth, None)
    );
    let (none, after_none) = none.unwrap();
    for ((one, position), number) in [(two, 2), (three, 3)] {
        let stored = store.get(&key(number)).await.unwrap().unwrap();
        assert_eq!(
            (position, &stored.value["spec"]["address"]),
            (Some(stored.position), &json!(one.address))
        );
    }
    assert_eq!((four.1, large.1, after_none), (None, None, None));
    assert_eq!(store.get(&key(5)).await.unwrap(), None);
    let all = allocated(&*store).await;
    for (one, handle) in [(four.0, "h4"), (large.0, "h5"), (none, "h6")] {
        assert_eq!(all[&one.address], handle);
    }
}

/// A node that starts many pods at once claims the blocks that it needs, and writes each of them a few times.
#[tokio::test]
async fn many_requests_at_once_need_few_writes_of_blocks() {
    let store = cluster("10.0.0.0/16", 26).await;
    let ipam = ipam(store.clone(), "primary", "linux");
    let requests: Vec<_> = (0..250).map(|number| request(&format!("h{number}"))).collect();
    let before = store.list(Kind::IpamBlock).await.unwrap().position.0;
    let answers = futures::future::join_all(requests.iter().map(|each| ipam.assign(each))).await;
    assert!(answers.iter().all(Result::is_ok));
    let after = store.list(Kind::IpamBlock).await.unwrap();
    assert_eq!(after.items.len(), 4);
    assert_eq!(allocated(&*store).await.len(), 250);
    // A claim is three writes. The first request of a block is served alone, and the others together.
    let blocks = after.position.0 - before - 250;
    assert!(blocks <= 4 * (3 + 3), "{blocks} writes besides the handles");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_nodes_and_many_pods_at_once() {
    let store = cluster("10.0.0.0/24", 29).await;
    let mut tasks = Vec::new();
    for node in 0..6 {
        let ipam = Arc::new(ipam(
            store.clone(),
            &format!("node-{node}"),
            if node % 3 == 0 { "windows" } else { "linux" },
        ));
        for pod in 0..16 {
            let ipam = ipam.clone();
            tasks.push(tokio::spawn(async move {
                let handle = format!("{node}.{pod}");
                let assigned = ipam.assign(&request(&handle)).await;
                if pod % 3 == 0 {
                    ipam.release(&handle).await.unwrap();
                    return None;
                }
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
    assert!(answered.len() > 6 * 4);
    assert_eq!(allocated(&*store).await, answered, "what is stored is what was answered");
}

/// A store whose client dies at a given write: before the write, or after the write and before its answer.
struct Mortal {
    store: Arc<Embedded>,
    writes_left: AtomicUsize,
    lost_answer: bool,
}

impl Mortal {
    fn dies(&self) -> bool {
        self.writes_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1)))
            == Ok(1)
    }

    fn dead(&self) -> bool {
        self.writes_left.load(Ordering::SeqCst) == 0
    }

    async fn write<T>(&self, write: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let crash = Err(StoreError::Unavailable("the caller died".to_owned()));
        if self.dead() {
            return crash;
        }
        if self.dies() {
            if self.lost_answer {
                let _ = write.await;
            }
            return crash;
        }
        write.await
    }
}

#[async_trait]
impl Store for Mortal {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.store.get(key).await
    }
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.store.list_page(interest, after).await
    }
    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.write(self.store.create(key, value)).await
    }
    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.write(self.store.update(key, value, expected)).await
    }
    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.write(self.store.delete(key, expected)).await
    }
    fn follow(&self, interests: Vec<Interest>) -> Follow {
        self.store.follow(interests)
    }
    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.store.barrier(kinds).await
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Two nodes allocate and release addresses. Each one crashes repeatedly and restarts. In the end, every returned
    /// address belongs to its handle, no address belongs to two handles, and releasing everything leaves nothing
    /// allocated.
    #[test]
    fn crashes_between_any_two_writes(
        steps in prop::collection::vec((0..2_usize, 0..6_u8, any::<bool>()), 1..40),
        lives in prop::collection::vec((1..12_usize, any::<bool>()), 1..30),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let store = cluster("10.0.0.0/27", 29).await;
            let nodes = ["primary", "minion"];
            let mut lives = lives.into_iter();
            let mut born = |node: usize| {
                let (writes, lost_answer) = lives.next().unwrap_or((usize::MAX, false));
                let mortal = Arc::new(Mortal { store: store.clone(), writes_left: writes.into(), lost_answer });
                (ipam(mortal.clone(), nodes[node], if node == 1 { "windows" } else { "linux" }), mortal)
            };
            let mut alive = [born(0), born(1)];
            let mut held: BTreeMap<String, IpAddr> = BTreeMap::new();
            for (node, pod, take) in steps {
                let handle = format!("{node}.{pod}");
                if alive[node].1.dead() {
                    alive[node] = born(node);
                }
                let ipam = &alive[node].0;
                if take {
                    if let Ok(assigned) = ipam.assign(&request(&handle)).await
                        && let Some(before) = held.insert(handle, assigned.address)
                    {
                        assert_eq!(before, assigned.address);
                    }
                } else {
                    // Released, or being released: the earlier answer no longer holds.
                    let _ = ipam.release(&handle).await;
                    held.remove(&handle);
                }
                let stored = allocated(&*store).await;
                for (handle, address) in &held {
                    assert_eq!(stored.get(address), Some(handle));
                }
            }
            let survivor = ipam(store.clone(), "primary", "linux");
            for node in 0..2 {
                for pod in 0..6 {
                    survivor.release(&format!("{node}.{pod}")).await.unwrap();
                }
            }
            assert_eq!(allocated(&*store).await, BTreeMap::new(), "nothing is leaked");
            assert_eq!(store.list(Kind::IpamHandle).await.unwrap().items, []);
        });
    }
}

/// The result of one request does not decide what another request may get.
#[tokio::test]
async fn each_request_keeps_to_its_own_pools() {
    let store = cluster("10.0.0.0/28", 29).await;
    let pool = |name: &str, cidr: &str, spec: Value| {
        let mut value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name},
            "spec": {"cidr": cidr, "blockSize": 29, "vxlanMode": "Always"},
        });
        value["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        (Key::global(Kind::IpPool, name), value)
    };
    store.delete(&Key::global(Kind::IpPool, "default"), None).await.unwrap();
    for (key, value) in [
        pool("a-tunnels", "10.1.0.0/28", json!({"allowedUses": ["Tunnel"]})),
        pool(
            "b-red",
            "10.2.0.0/28",
            json!({"allowedUses": ["Workload"], "namespaceSelector": "team == 'red'"}),
        ),
        pool("c-others", "10.3.0.0/28", json!({"allowedUses": ["Workload"]})),
    ] {
        store.create(&key, value).await.unwrap();
    }
    let primary = ipam(store.clone(), "primary", "linux");
    let of = |handle: &str, intended_use, team: Option<&str>| Request {
        intended_use,
        namespace_labels: team.map(|team| ("team".to_owned(), team.to_owned())).into_iter().collect(),
        ..request(handle)
    };
    for round in 0..2 {
        for (handle, intended_use, team, pool) in [
            ("t", Use::Tunnel, None, "10.1.0.0/28"),
            ("r", Use::Workload, Some("red"), "10.2.0.0/28"),
            ("o", Use::Workload, Some("blue"), "10.3.0.0/28"),
        ] {
            let assigned =
                primary.assign(&of(&format!("{handle}{round}"), intended_use, team)).await.unwrap();
            let pool: ipnet::IpNet = pool.parse().unwrap();
            assert!(pool.contains(&assigned.address), "{handle}{round}: {assigned:?}");
        }
    }
}

/// A handle that has an address already is found by the refusal of its record, and not tried again and again.
#[tokio::test]
async fn a_repeated_request_needs_few_writes() {
    let store = cluster("10.0.0.0/24", 28).await;
    let counted = Arc::new(Mortal { store, writes_left: AtomicUsize::new(100_000), lost_answer: false });
    let ipam = ipam(counted.clone(), "primary", "linux");
    let first = ipam.assign(&request("h")).await.unwrap();
    let before = counted.writes_left.load(Ordering::SeqCst);
    let others: Vec<_> = ["h", "h", "new", "h"].map(request).to_vec();
    let answers = futures::future::join_all(others.iter().map(|each| ipam.assign(each))).await;
    assert_eq!(answers[0].as_ref().unwrap(), &first);
    let writes = before - counted.writes_left.load(Ordering::SeqCst);
    assert!(writes <= 12, "{writes} writes");
}

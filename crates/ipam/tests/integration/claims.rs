//! Who owns a block: claims that a crash has left, blocks of others, blocks of other sizes, records that are being deleted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_ipam::{Affinity, AffinityState, Ipam, IpamError, Request};
use tortie_store::{Embedded, Follow, Interest, Page, PageToken, Store, StoreError, Stored, Version};

/// A store where something happens before the first block is created.
struct Interrupted {
    inner: Arc<Embedded>,
    first: Mutex<Option<BoxFuture<'static, Result<(), StoreError>>>>,
}

impl Interrupted {
    fn new(
        inner: &Arc<Embedded>,
        first: impl Future<Output = Result<(), StoreError>> + Send + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { inner: inner.clone(), first: Mutex::new(Some(first.boxed())) })
    }
}

#[async_trait]
impl Store for Interrupted {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.inner.get(key).await
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.inner.list_page(interest, after).await
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        let first = match key.kind {
            Kind::IpamBlock => self.first.lock().unwrap().take(),
            _ => None,
        };
        if let Some(first) = first {
            first.await?;
        }
        self.inner.create(key, value).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.inner.update(key, value, expected).await
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.inner.delete(key, expected).await
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        self.inner.follow(interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.inner.barrier(kinds).await
    }
}

/// Nobody may use a block that its node has only begun to claim.
#[tokio::test]
async fn a_claim_is_pending_until_the_block_exists() {
    let store = cluster().await;
    let crash = async { Err(StoreError::Unavailable("crashed".to_owned())) };
    let mine = Ipam::new(Interrupted::new(&store, crash), "mine", BTreeMap::new());
    mine.assign(&request("h")).await.unwrap_err();
    let states: Vec<AffinityState> = affinities(&store).await.into_values().collect();
    assert_eq!(states, [AffinityState::Pending]);
    mine.assign(&request("h")).await.unwrap();
    let states: Vec<AffinityState> = affinities(&store).await.into_values().collect();
    assert_eq!(states, [AffinityState::Confirmed], "the next attempt completes it");
}

/// A node that another one has outrun claims the next block, and borrows only if none is left.
#[tokio::test]
async fn a_node_that_loses_a_claim_tries_another_block() {
    let store = cluster().await;
    let config = store.get(&Key::global(Kind::IpamConfig, "default")).await.unwrap().unwrap();
    let open = json!({"strict_affinity": false, "auto_allocate_blocks": true});
    store.update(&config.key, open, &config.version).await.unwrap();
    // Both begin at the same block.
    let (faster, name) = (store.clone(), "mine");
    let others = (0..1000).map(|number| format!("other-{number}"));
    let twin = others.into_iter().find(|other| start(other) == start(name)).unwrap();
    let first = async move {
        ipam(&faster, &twin).assign(&request("faster")).await.unwrap();
        Ok(())
    };
    let mine = Ipam::new(Interrupted::new(&store, first), name, BTreeMap::new());
    let assigned = mine.assign(&request("h")).await.unwrap();
    let block = block(&store, &assigned.block.to_string()).await.unwrap();
    assert!(block.belongs_to("mine"), "{:?}", block.affinity);
}

/// Somebody releases the affinity before it is confirmed. Without it, no address may be taken: the block would go, or have no route.
#[tokio::test]
async fn a_claim_that_was_given_up_meanwhile_begins_anew() {
    for is_marked in [false, true] {
        let store = cluster().await;
        let other = store.clone();
        let first = async move {
            for Stored { key, version, .. } in other.list(Kind::BlockAffinity).await?.items {
                match is_marked {
                    true => drop(other.update(&key, json!({"state": "pendingDeletion"}), &version).await?),
                    false => drop(other.delete(&key, Some(&version)).await?),
                }
            }
            Ok(())
        };
        let mine = Ipam::new(Interrupted::new(&store, first), "mine", BTreeMap::new());
        let assigned = mine.assign(&request("h")).await.unwrap();
        let expected = [(format!("mine/{}", assigned.block), AffinityState::Confirmed)];
        assert_eq!(affinities(&store).await, expected.into(), "marked: {is_marked}");
    }
}

/// Pools overlap, and another node is faster to create a block with addresses of this one: they would be given twice.
#[tokio::test]
async fn a_new_block_goes_if_another_has_addresses_of_it() {
    let store = cluster().await;
    let blocks = [("10.0.0.0/29", "10.0.0.0/30"), ("10.0.0.8/29", "10.0.0.8/30")];
    let begins = start("mine") as usize;
    let ((own, inside), (next, _)) = (blocks[begins], blocks[1 - begins]);
    let other = store.clone();
    let first = async move {
        store_block(&other, inside, "other", |_| {}).await;
        Ok(())
    };
    let mine = Ipam::new(Interrupted::new(&store, first), "mine", BTreeMap::new());
    let error = mine.assign(&request("h")).await.unwrap_err();
    assert!(matches!(error, IpamError::Damaged { .. }) && error.to_string().contains(inside), "{error}");
    assert_eq!(block(&store, own).await, None);
    assert_eq!(mine.assign(&request("h")).await.unwrap().block.to_string(), next);
}

/// At which of the two blocks of the pool a node begins: FNV-1 of its name.
fn start(node: &str) -> u32 {
    node.bytes().fold(0x811c_9dc5_u32, |hash, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(byte)) % 2
}

/// A pool of two blocks of eight addresses.
async fn cluster() -> Arc<Embedded> {
    let store = Arc::new(Embedded::in_memory().unwrap());
    let pool = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "default"},
        "spec": {"cidr": "10.0.0.0/28", "blockSize": 29, "vxlanMode": "Always"},
    });
    store.create(&Key::global(Kind::IpPool, "default"), pool).await.unwrap();
    let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
    store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
    store
}

fn ipam(store: &Arc<Embedded>, node: &str) -> Ipam {
    Ipam::new(store.clone(), node, BTreeMap::new())
}

fn request(handle: &str) -> Request {
    Request { handle: handle.to_owned(), owner: BTreeMap::new(), ..Request::default() }
}

async fn store_block(store: &Embedded, cidr: &str, node: &str, change: impl FnOnce(&mut Value)) {
    let block = Block::new(cidr.parse().unwrap(), node, false, 1, "2026-01-01T00:00:00Z".to_owned());
    let mut value = serde_json::to_value(block).unwrap();
    change(&mut value);
    store.create(&Key::global(Kind::IpamBlock, cidr), value).await.unwrap();
}

async fn store_affinity(store: &Embedded, node: &str, cidr: &str, value: Value) {
    store.create(&Key::global(Kind::BlockAffinity, format!("{node}/{cidr}")), value).await.unwrap();
}

async fn block(store: &Embedded, cidr: &str) -> Option<Block> {
    let stored = store.get(&Key::global(Kind::IpamBlock, cidr)).await.unwrap()?;
    Some(serde_json::from_value(stored.value).unwrap())
}

async fn affinities(store: &Embedded) -> BTreeMap<String, AffinityState> {
    let listing = store.list(Kind::BlockAffinity).await.unwrap();
    let affinities = listing
        .items
        .into_iter()
        .map(|stored| (stored.key.name, serde_json::from_value::<Affinity>(stored.value).unwrap().state));
    affinities.collect()
}

/// Whatever a node believes, the block decides: it belongs to one node.
#[tokio::test]
async fn a_block_of_another_node_is_not_used_and_the_claim_is_withdrawn() {
    for state in ["pending", "confirmed", "pendingDeletion", ""] {
        let store = cluster().await;
        store_block(&store, "10.0.0.0/29", "other", |block| {
            // An empty block would be taken over.
            block["attributes"] = json!([{"handle_id": "pod"}]);
            block["allocations"][0] = json!(0);
            block["unallocated"] = json!([1, 2, 3, 4, 5, 6, 7]);
        })
        .await;
        store_affinity(&store, "other", "10.0.0.0/29", json!({"state": "confirmed"})).await;
        store_affinity(&store, "mine", "10.0.0.0/29", json!({"state": state})).await;
        let mine = ipam(&store, "mine");
        for number in 0..8 {
            let assigned = mine.assign(&request(&format!("h{number}"))).await.unwrap();
            assert_eq!(assigned.block.to_string(), "10.0.0.8/29", "with an affinity that is {state:?}");
        }
        let error = mine.assign(&request("h8")).await.unwrap_err();
        assert!(matches!(error, IpamError::Exhausted { .. }), "{error}");
        let expected =
            [("mine/10.0.0.8/29", AffinityState::Confirmed), ("other/10.0.0.0/29", AffinityState::Confirmed)];
        assert_eq!(affinities(&store).await, expected.map(|(name, state)| (name.to_owned(), state)).into());
        assert_eq!(block(&store, "10.0.0.0/29").await.unwrap().sequence_number, 1, "nobody has written it");
    }
}

/// A block without an owner is not used, either: its addresses may be in use, and it has no route.
#[tokio::test]
async fn a_block_without_owner_is_not_used() {
    let store = cluster().await;
    store_block(&store, "10.0.0.0/29", "other", |block| block["affinity"] = Value::Null).await;
    store_affinity(&store, "mine", "10.0.0.0/29", json!({"state": "confirmed"})).await;
    assert_eq!(ipam(&store, "mine").assign(&request("h")).await.unwrap().block.to_string(), "10.0.0.8/29");
}

/// The block is written before the claim is confirmed, so that a release of the block that somebody has begun fails.
#[tokio::test]
async fn a_claim_that_a_crash_left_is_completed_and_the_block_written() {
    for state in ["pending", "pendingDeletion"] {
        let store = cluster().await;
        store_block(&store, "10.0.0.8/29", "mine", |_| {}).await;
        store_affinity(&store, "mine", "10.0.0.8/29", json!({"state": state})).await;
        assert_eq!(ipam(&store, "mine").ensure_blocks().await.unwrap()[0].to_string(), "10.0.0.8/29");
        assert_eq!(block(&store, "10.0.0.8/29").await.unwrap().sequence_number, 2, "{state}");
        assert_eq!(affinities(&store).await["mine/10.0.0.8/29"], AffinityState::Confirmed, "{state}");
    }

    // The same before the block existed.
    let store = cluster().await;
    store_affinity(&store, "mine", "10.0.0.8/29", json!({"state": "pending", "unknown": 7})).await;
    assert_eq!(ipam(&store, "mine").ensure_blocks().await.unwrap()[0].to_string(), "10.0.0.8/29");
    let key = Key::global(Kind::BlockAffinity, "mine/10.0.0.8/29");
    let value = store.get(&key).await.unwrap().unwrap().value;
    assert_eq!((&value["state"], &value["unknown"]), (&json!("confirmed"), &json!(7)));
}

/// The pool was recreated with another blockSize.
#[tokio::test]
async fn an_affinity_of_another_size_is_reported_and_left_alone() {
    // With another node's block inside, with nothing there, and so large that its block would be many megabytes.
    for (name, pool) in [("10.0.0.0/28", None), ("10.0.0.8/30", None), ("10.0.0.0/10", Some("10.0.0.0/8"))] {
        let store = cluster().await;
        if let Some(cidr) = pool {
            let value = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "huge"},
                "spec": {"cidr": cidr, "blockSize": 29, "vxlanMode": "Always"},
            });
            store.delete(&Key::global(Kind::IpPool, "default"), None).await.unwrap();
            store.create(&Key::global(Kind::IpPool, "huge"), value).await.unwrap();
        }
        store_block(&store, "10.0.0.0/29", "other", |_| {}).await;
        store_affinity(&store, "mine", name, json!({"state": "pending"})).await;
        let mine = ipam(&store, "mine");
        let assigned = mine.assign(&request("h")).await.unwrap();
        assert_eq!(assigned.block.prefix_len(), 29);
        assert_ne!(assigned.block.to_string(), "10.0.0.0/29");
        assert!(block(&store, name).await.is_none());
        assert_eq!(affinities(&store).await[&format!("mine/{name}")], AffinityState::Pending);
        // Until somebody deletes it, an error names it.
        for number in 0..100 {
            if let Err(error) = mine.assign(&request(&format!("h{number}"))).await {
                assert!(error.to_string().contains(&format!("mine/{name}")), "{error}");
                break;
            }
        }
    }
}

/// A block of the size before is used until it is empty, unless another one has addresses of it.
#[tokio::test]
async fn a_block_of_another_size_is_used_only_alone() {
    let store = cluster().await;
    store_block(&store, "10.0.0.8/30", "mine", |_| {}).await;
    store_affinity(&store, "mine", "10.0.0.8/30", json!({"state": "confirmed"})).await;
    assert_eq!(ipam(&store, "mine").assign(&request("h")).await.unwrap().block.to_string(), "10.0.0.8/30");

    let store = cluster().await;
    store_block(&store, "10.0.0.8/30", "mine", |_| {}).await;
    store_affinity(&store, "mine", "10.0.0.8/30", json!({"state": "confirmed"})).await;
    store_block(&store, "10.0.0.8/29", "other", |_| {}).await;
    assert_eq!(ipam(&store, "mine").assign(&request("h")).await.unwrap().block.to_string(), "10.0.0.0/29");
}

/// Calico marks a record before it deletes it.
#[tokio::test]
async fn records_that_are_being_deleted_count_as_deleted() {
    let store = cluster().await;
    for cidr in ["10.0.0.0/29", "10.0.0.8/29"] {
        store_block(&store, cidr, "mine", |block| block["deleted"] = json!(true)).await;
        store_affinity(&store, "mine", cidr, json!({"state": "confirmed", "deleted": true})).await;
    }
    let handle = json!({"block": {"10.0.0.0/29": 1}, "deleted": true});
    store.create(&Key::global(Kind::IpamHandle, "h"), handle).await.unwrap();
    let mine = ipam(&store, "mine");
    assert_eq!(mine.find("h").await.unwrap(), []);
    let assigned = mine.assign(&request("h")).await.unwrap();
    let block = block(&store, &assigned.block.to_string()).await.unwrap();
    assert!(!block.deleted && block.sequence_number > 1, "a new block: {block:?}");
    assert_eq!(mine.find("h").await.unwrap(), [assigned]);
    assert_eq!(affinities(&store).await[&format!("mine/{}", assigned.block)], AffinityState::Confirmed);
    assert_eq!(mine.release("h").await.unwrap(), [assigned.address]);
}

/// Another process of the node has given out addresses of the block that this one has in memory.
#[tokio::test]
async fn what_another_allocator_of_the_node_has_assigned_can_be_released() {
    let store = cluster().await;
    let (one, other) = (ipam(&store, "mine"), ipam(&store, "mine"));
    one.assign(&request("a")).await.unwrap();
    let assigned = other.assign(&request("b")).await.unwrap();
    assert_eq!(one.release("b").await.unwrap(), [assigned.address]);
    assert_eq!(store.get(&Key::global(Kind::IpamHandle, "b")).await.unwrap(), None);
    assert_eq!(
        block(&store, "10.0.0.0/29")
            .await
            .or(block(&store, "10.0.0.8/29").await)
            .unwrap()
            .allocated()
            .count(),
        1
    );
}

/// A record under the name of another block would give its addresses.
#[tokio::test]
async fn a_block_whose_name_and_addresses_differ_is_damaged() {
    let store = cluster().await;
    store_block(&store, "10.0.0.0/29", "mine", |block| block["cidr"] = json!("10.9.0.0/29")).await;
    store_affinity(&store, "mine", "10.0.0.0/29", json!({"state": "confirmed"})).await;
    let assigned = ipam(&store, "mine").assign(&request("h")).await.unwrap();
    assert_eq!(assigned.block.to_string(), "10.0.0.8/29");
}

/// A block that is inconsistent may give an address twice.
#[tokio::test]
async fn a_damaged_block_is_not_used_and_named() {
    let store = cluster().await;
    store_block(&store, "10.0.0.0/29", "mine", |block| {
        block["unallocated"] = json!([0, 0, 1, 2, 3, 4, 5, 6])
    })
    .await;
    store_affinity(&store, "mine", "10.0.0.0/29", json!({"state": "confirmed"})).await;
    let mine = ipam(&store, "mine");
    for number in 0..8 {
        let assigned = mine.assign(&request(&format!("h{number}"))).await.unwrap();
        assert_eq!(assigned.block.to_string(), "10.0.0.8/29");
    }
    let error = mine.assign(&request("h8")).await.unwrap_err().to_string();
    assert!(error.contains("10.0.0.0/29") && error.contains("free twice"), "{error}");
}

/// The block was in memory, and another node owns it now.
#[tokio::test]
async fn a_block_that_the_node_has_lost_is_not_used_after_a_release() {
    let store = cluster().await;
    let mine = ipam(&store, "mine");
    let assigned = mine.assign(&request("a")).await.unwrap();
    let key = Key::global(Kind::IpamBlock, assigned.block.to_string());
    let mut stored = store.get(&key).await.unwrap().unwrap();
    stored.value["affinity"] = json!("host:other");
    store.update(&key, stored.value, &stored.version).await.unwrap();
    assert_eq!(mine.release("a").await.unwrap(), [assigned.address]);
    assert_ne!(mine.assign(&request("b")).await.unwrap().block, assigned.block);
}

/// A crash after the handle was counted. Each write of a block counts in its sequence number, as in Calico.
#[tokio::test]
async fn a_handle_without_address_is_forgotten_after_a_write_of_its_block() {
    let store = cluster().await;
    store_block(&store, "10.0.0.0/29", "mine", |_| {}).await;
    let handle = json!({"block": {"10.0.0.0/29": 1}, "deleted": false});
    store.create(&Key::global(Kind::IpamHandle, "h"), handle).await.unwrap();
    assert_eq!(ipam(&store, "mine").release("h").await.unwrap(), [] as [std::net::IpAddr; 0]);
    assert_eq!(block(&store, "10.0.0.0/29").await.unwrap().sequence_number, 2);
    assert_eq!(store.get(&Key::global(Kind::IpamHandle, "h")).await.unwrap(), None);
}

/// The network of a Windows node exists already, and a pool that is disabled gives no new addresses only.
#[tokio::test]
async fn a_node_keeps_its_block_when_its_pool_is_disabled() {
    let store = cluster().await;
    let block = ipam(&store, "mine").ensure_blocks().await.unwrap()[0];
    let key = Key::global(Kind::IpPool, "default");
    let mut pool = store.get(&key).await.unwrap().unwrap();
    pool.value["spec"]["disabled"] = json!(true);
    store.update(&key, pool.value, &pool.version).await.unwrap();
    assert_eq!(ipam(&store, "mine").ensure_blocks().await.unwrap()[0], block);
    assert!(matches!(ipam(&store, "mine").assign(&request("h")).await, Err(IpamError::NoPool(_))));
    assert!(ipam(&store, "another").ensure_blocks().await.is_err());
}

/// Calico in etcd: null instead of empty lists, and blocks of IPv6.
#[tokio::test]
async fn what_calico_writes_is_no_damage() {
    let store = cluster().await;
    store_block(&store, "10.0.0.0/29", "mine", |block| {
        (block["attributes"], block["sequenceNumberForAllocation"]) = (Value::Null, Value::Null);
    })
    .await;
    store_affinity(&store, "mine", "10.0.0.0/29", json!({"state": "confirmed"})).await;
    for number in 0..30 {
        store_affinity(&store, "mine", &format!("fd00::{number}:0/122"), json!({"state": "confirmed"})).await;
    }
    let mine = ipam(&store, "mine");
    for number in 0..16 {
        mine.assign(&request(&format!("h{number}"))).await.unwrap();
    }
    let error = mine.assign(&request("h16")).await.unwrap_err().to_string();
    assert!(!error.contains("damaged") && !error.contains("fd00"), "{error}");
}

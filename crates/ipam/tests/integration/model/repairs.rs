//! Controllers and operators: they release single addresses and whole nodes, and repair what a check finds.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position};
use tortie_ipam::{Finding, Fix, IpamError, Records, Release, Snapshot, check};
use tortie_store::{Store, StoreError, Stored, Version};

use crate::common::ipam;
use crate::model::operations::{HANDLES, Model, is_cut};
use crate::model::{GONE, NODES};

impl Model {
    /// A controller that dies and is born again.
    pub(crate) async fn controller(self: Rc<Self>, enough: usize) {
        let mut client = self.client();
        while self.done.get() < enough {
            self.done.set(self.done.get() + 1);
            if client.is_dead() {
                client = self.client();
            }
            let records = Records::new(client.clone());
            match self.dice.below(4) {
                0 => self.release_gone(&records).await,
                1 | 2 => self.release_addresses(&records).await,
                _ => self.repair(client.clone()).await,
            }
            tokio::task::yield_now().await;
        }
    }

    /// Releases everything of the node that does not exist, while it stands still.
    async fn release_gone(&self, records: &Records) {
        let handles: Vec<String> = (0..HANDLES).map(|number| format!("{}.{number}", GONE.0)).collect();
        if self.is_repairing.replace(true) {
            return;
        }
        self.stopped.borrow_mut().clone_from(&handles);
        while handles.iter().any(|handle| self.busy.borrow().contains_key(handle)) {
            tokio::task::yield_now().await;
        }
        handles.iter().for_each(|handle| self.memory.give_back(handle));
        match records.release_node(GONE.0).await {
            Ok(cleared) => {
                self.counts.borrow_mut().cleared += cleared.addresses.len() + cleared.blocks.len();
                let left = self.memory.allocated();
                assert!(!left.values().any(|handle| handles.contains(handle)), "{left:?}");
            }
            // A repair may release the same at the same moment.
            Err(IpamError::Changed { .. }) => {}
            Err(error) if is_cut(&error) => {}
            Err(error) => panic!("release the node {}: {error}", GONE.0),
        }
        self.stopped.borrow_mut().clear();
        self.is_repairing.set(false);
    }

    /// Releases the addresses of one handle in one block.
    async fn release_addresses(&self, records: &Records) {
        let nodes = if self.options.strict { 4 } else { 3 };
        let node = NODES[usize::try_from(self.dice.below(nodes)).unwrap()];
        let handle = format!("{}.{}", node.0, self.dice.below(HANDLES));
        if !self.begin(&handle) {
            return;
        }
        self.memory.give_back(&handle);
        for stored in self.memory.list(Kind::IpamBlock).await.unwrap().items {
            let block: Block = serde_json::from_value(stored.value).unwrap();
            let release = |address: IpAddr| Release {
                address,
                handle: Some(handle.clone()),
                sequence_number: block.sequence_of(address),
            };
            let releases: Vec<Release> = block.addresses_of(&handle).map(release).collect();
            if releases.is_empty() {
                continue;
            }
            match records.release_addresses(block.cidr, &releases).await {
                Ok(released) => self.counts.borrow_mut().released_by_address += released.len(),
                Err(IpamError::Changed { .. }) => {}
                Err(error) if is_cut(&error) => {}
                Err(error) => panic!("release addresses of {handle}: {error}"),
            }
        }
        self.end(&handle);
    }

    /// What a check finds now. Pods are those that have addresses, and those of which an operation is under way.
    async fn findings(&self, store: &dyn Store) -> Result<Vec<Finding>, StoreError> {
        let mut snapshot = Snapshot {
            blocks: store.list(Kind::IpamBlock).await?.items,
            handles: store.list(Kind::IpamHandle).await?.items,
            affinities: store.list(Kind::BlockAffinity).await?.items,
            pools: store.list(Kind::IpPool).await?.items,
            nodes: store.list(Kind::Node).await?.items,
            ..Snapshot::default()
        };
        let pod = |name: &str, value: Value| Stored {
            key: Key::namespaced(Kind::Pod, "n", name),
            value,
            version: Version::new("1"),
            position: Position(1),
        };
        let held = self.memory.held();
        let endpoint = |(address, handle): (&IpAddr, &String)| {
            pod(handle, json!({"spec": {"pod": handle, "ipNetworks": [address.to_string()]}}))
        };
        snapshot.endpoints = held.iter().map(endpoint).collect();
        snapshot.pods = self.busy.borrow().keys().map(|handle| pod(handle, json!({}))).collect();
        Ok(check(&snapshot, Timestamp::now(), 0))
    }

    /// Repairs what a check finds.
    async fn repair(&self, store: Arc<dyn Store>) {
        let Ok(findings) = self.findings(&*store).await else { return };
        if self.is_repairing.replace(true) {
            return;
        }
        let fixes: Vec<Fix> = findings.into_iter().filter_map(|finding| finding.fix).collect();
        // A container whose address has been lost for the grace period does not come back.
        let lost = fixes.iter().filter_map(|fix| match fix {
            Fix::Release(_, release) => release.handle.clone(),
            Fix::Forget(..) | Fix::Count(..) | Fix::GiveUp(..) => None,
        });
        self.stopped.borrow_mut().extend(lost);
        for fix in &fixes {
            match Records::new(store.clone()).repair(fix).await {
                Ok(true) => self.counts.borrow_mut().repaired += 1,
                Ok(false) | Err(IpamError::Changed { .. }) => {}
                Err(error) if is_cut(&error) => break,
                Err(error) => panic!("repair {fix:?}: {error}"),
            }
        }
        self.stopped.borrow_mut().clear();
        self.is_repairing.set(false);
    }

    /// After a repair, the addresses are those that somebody has. After everything is released, nothing is left.
    pub(crate) async fn nothing_is_lost(&self, seed: u64) {
        let store: Arc<dyn Store> = self.memory.clone();
        self.repair(store.clone()).await;
        self.repair(store.clone()).await;
        let findings = self.findings(&*store).await.unwrap();
        assert_eq!(findings, [], "seed {seed}: a repair leaves something");
        // With races, nobody knows who has some of the addresses.
        assert_eq!(self.memory.allocated(), self.memory.held(), "seed {seed}: addresses are leaked");
        let records: BTreeSet<String> =
            store.list(Kind::IpamHandle).await.unwrap().items.into_iter().map(|it| it.key.name).collect();
        let held: BTreeSet<String> = self.memory.held().into_values().collect();
        assert_eq!(records, held, "seed {seed}: records of handles are leaked");
        let survivor = ipam(self.memory.clone(), NODES[0]);
        for handle in held {
            self.memory.give_back(&handle);
            survivor.release(&handle).await.unwrap();
        }
        assert_eq!(self.memory.allocated().len(), 0, "seed {seed}");
        assert_eq!(self.memory.count(Kind::IpamHandle), 0, "seed {seed}");
    }
}

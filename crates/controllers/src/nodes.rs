//! The lifecycle of nodes: what a vanished node leaves behind is removed after a grace period.
//!
//! Each step is derived from what is stored, so another controller continues where a crash stopped this one. Before each
//! write, the Node is looked up once more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::ipam::{Block, is_virtual};
use tortie_api::{Key, Kind};
use tortie_ipam::{Fix, Given, IpamError, Records, Release};
use tortie_store::{Endpoints, Interest, Store, StoreError, Stored, pod_of};

use crate::absence::Absence;
use crate::copies::source_of;
use crate::host_endpoints::is_automatic;

/// The types of a node's own addresses (`libcalico-go/lib/ipam/ipam_types.go`).
const TUNNELS: [&str; 5] = [
    "ipipTunnelAddress",
    "vxlanTunnelAddress",
    "vxlanV6TunnelAddress",
    "wireguardTunnelAddress",
    "wireguardV6TunnelAddress",
];

/// The lifecycle of the nodes of a cluster.
pub struct Nodes {
    store: Arc<dyn Endpoints>,
    records: Records,
    /// Has the Nodes and Pods: the datastore, or the Kubernetes API that is copied to it.
    truth: Arc<dyn Store>,
    grace: Duration,
    absence: Absence,
    /// True if Calico's kube-controllers remove the rest.
    only_reports: bool,
}

/// The result of removing what a node left behind.
enum Removal {
    Complete,
    /// Something is still in use.
    Waits(String),
    /// The Node exists.
    Returned,
}

impl Nodes {
    /// The lifecycle of the nodes whose Nodes and Pods are in `truth`.
    #[must_use]
    pub fn new(store: Arc<dyn Endpoints>, truth: Arc<dyn Store>, grace: Duration) -> Self {
        let records = Records::new(store.clone());
        Self { store, records, truth, grace, absence: Absence::default(), only_reports: false }
    }

    /// Removes NodeReports, and leaves the rest to others.
    #[must_use]
    pub(crate) fn only_reports(mut self) -> Self {
        self.only_reports = true;
        self
    }

    /// Looks for vanished nodes, and removes what those leave behind that have been missing for the grace period.
    ///
    /// # Errors
    /// A list is incomplete, so nothing was removed; or a removal failed, and the next round continues.
    pub async fn round(&mut self, now: Instant) -> Result<(), IpamError> {
        let referenced = self.referenced().await?;
        // After the objects: a node that comes in between has its Node first.
        let present = self.present().await?;
        let overdue = self.absence.overdue(referenced, &present, now, self.grace);
        let mut failure = None;
        for node in overdue {
            match self.remove(&node).await {
                Ok(Removal::Complete) => tracing::info!(node, "removed what the vanished node left behind"),
                Ok(Removal::Waits(why)) => {
                    tracing::info!(node, why, "the node has vanished; some of its objects stay for now")
                }
                Ok(Removal::Returned) => tracing::info!(node, "the node is back"),
                Err(error) => {
                    tracing::warn!(node, %error, "what the vanished node left behind cannot be removed yet");
                    failure = Some(error);
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The names of nodes in the objects that this removes.
    async fn referenced(&self) -> Result<BTreeSet<String>, StoreError> {
        let mut names = BTreeSet::new();
        names.extend(self.list(Kind::NodeReport).await?.into_iter().map(|stored| stored.key.name));
        if self.only_reports {
            return Ok(names);
        }
        for stored in self.list(Kind::BlockAffinity).await? {
            let owner = stored.key.name.split_once('/').map(|(owner, _)| owner);
            names.extend(owner.filter(|owner| !is_virtual(owner)).map(str::to_owned));
        }
        for stored in self.list(Kind::IpamBlock).await? {
            names.extend(owner_of(&stored.value).map(str::to_owned));
            names.extend(attributes(&stored.value).filter_map(node_of).map(str::to_owned));
        }
        for stored in self.list(Kind::HostEndpoint).await? {
            if is_automatic(&stored.value) {
                names.extend(stored.value["spec"]["node"].as_str().map(str::to_owned));
            }
        }
        if self.copies() {
            let copies = self.list(Kind::Node).await?.into_iter();
            names.extend(copies.filter(|node| source_of(&node.value).is_some()).map(|node| node.key.name));
        }
        Ok(names)
    }

    /// Whether Nodes are copied to the datastore.
    fn copies(&self) -> bool {
        let store: *const () = Arc::as_ptr(&self.store).cast();
        !std::ptr::addr_eq(store, Arc::as_ptr(&self.truth).cast::<()>())
    }

    /// The objects of a kind; none if the datastore does not have the kind.
    async fn list(&self, kind: Kind) -> Result<Vec<Stored>, StoreError> {
        match self.store.list(kind).await {
            Ok(listing) => Ok(listing.items),
            Err(StoreError::KindAbsent(_)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    async fn remove(&self, node: &str) -> Result<Removal, IpamError> {
        if self.exists(node).await? {
            return Ok(Removal::Returned);
        }
        if self.only_reports {
            self.remove_report(node).await?;
            return Ok(Removal::Complete);
        }
        let used = self.remove_endpoints(node).await?;
        let mut waits = used.iter().next().map(|pod| format!("{pod} exists"));
        for stored in self.list(Kind::IpamBlock).await? {
            if let Some(why) = self.release_addresses(node, &stored, &used).await? {
                waits.get_or_insert(why);
            }
        }
        if waits.is_none() {
            self.release_handles(node).await?;
            for cidr in self.blocks_of(node).await? {
                if self.exists(node).await? {
                    return Ok(Removal::Returned);
                }
                match self.records.give_up_block(node, cidr, false, None).await {
                    Ok(Given::Up) => {
                        tracing::info!(node, block = %cidr, "the vanished node gave up the block")
                    }
                    Ok(Given::InUse | Given::Changed) => {
                        waits.get_or_insert(format!("block {cidr} has changed"));
                    }
                    // The others are not concerned.
                    Err(error @ IpamError::Damaged { .. }) => {
                        waits.get_or_insert(error.to_string());
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        if waits.is_some() {
            // Pods of the node exist, so its machine may, and its host endpoint may protect it.
            return Ok(waits.map_or(Removal::Complete, Removal::Waits));
        }
        for stored in self.list(Kind::HostEndpoint).await? {
            if is_automatic(&stored.value) && stored.value["spec"]["node"] == node {
                self.delete(node, &stored).await?;
            }
        }
        if self.copies()
            && let Some(copy) = self.store.get(&Key::global(Kind::Node, node)).await?
            && source_of(&copy.value).is_some()
            && !self.delete(node, &copy).await?
        {
            return Ok(Removal::Returned);
        }
        self.remove_report(node).await?;
        Ok(waits.map_or(Removal::Complete, Removal::Waits))
    }

    async fn remove_report(&self, node: &str) -> Result<(), StoreError> {
        let report = Key::global(Kind::NodeReport, node);
        let reports = self.list(Kind::NodeReport).await?;
        if let Some(stored) = reports.into_iter().find(|stored| stored.key == report) {
            self.delete(node, &stored).await?;
        }
        Ok(())
    }

    async fn exists(&self, node: &str) -> Result<bool, StoreError> {
        let key = Key::global(Kind::Node, node);
        if self.truth.get(&key).await?.is_some() {
            return Ok(true);
        }
        Ok(self.copies() && self.store.get(&key).await?.is_some_and(|node| source_of(&node.value).is_none()))
    }

    /// The nodes that exist. A Node of the datastore that is no copy does, too: a host outside of Kubernetes, or one with
    /// another name there.
    async fn present(&self) -> Result<BTreeSet<String>, StoreError> {
        let mut present = self.truth.list(Kind::Node).await?.items;
        if self.copies() {
            let own = self.list(Kind::Node).await?.into_iter();
            present.extend(own.filter(|node| source_of(&node.value).is_none()));
        }
        Ok(present.into_iter().map(|node| node.key.name).collect())
    }

    /// Deletes this version of an object, unless the node is back. Returns whether the node is still missing.
    async fn delete(&self, node: &str, stored: &Stored) -> Result<bool, StoreError> {
        if self.exists(node).await? {
            return Ok(false);
        }
        match self.store.delete(&stored.key, Some(&stored.version)).await {
            Ok(_) => tracing::info!(object = %stored.key, node, "deleted: its node has vanished"),
            Err(StoreError::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Deletes the node's WorkloadEndpoints whose pods do not exist any more. Returns the pods of the others.
    async fn remove_endpoints(&self, node: &str) -> Result<BTreeSet<Key>, StoreError> {
        let endpoints = self.store.list_all(&Interest::of_node(Kind::WorkloadEndpoint, node)).await?.items;
        let mut used = BTreeSet::new();
        for endpoint in endpoints {
            let pod = pod_of(&endpoint);
            if self.store.derives_from_kubernetes() || self.runs(node, &pod).await? {
                used.insert(pod);
            } else {
                self.delete(node, &endpoint).await?;
            }
        }
        Ok(used)
    }

    /// Whether a pod exists and belongs to the node.
    async fn runs(&self, node: &str, pod: &Key) -> Result<bool, StoreError> {
        let stored = self.truth.get(pod).await?;
        Ok(stored.is_some_and(|stored| stored.value["spec"]["nodeName"] == node))
    }

    /// Releases the node's addresses in a block, except for those of existing pods. Returns why some stay.
    async fn release_addresses(
        &self,
        node: &str,
        stored: &Stored,
        used: &BTreeSet<Key>,
    ) -> Result<Option<String>, IpamError> {
        if !attributes(&stored.value).any(|attribute| node_of(attribute) == Some(node)) {
            return Ok(None);
        }
        let block = serde_json::from_value::<Block>(stored.value.clone()).ok();
        let block = block.filter(|block| block.check().is_ok());
        let Some(block) = block else {
            return Ok(Some(format!("{} cannot be read; tortie ipam check says why", stored.key)));
        };
        let (mut stays, mut releases) = (None, Vec::new());
        for (address, attribute) in block.allocated() {
            let owner = attribute.owner.clone().unwrap_or_default();
            if owner.get("node").is_none_or(|of| of != node) {
                continue;
            }
            let Some(handle) = &attribute.handle_id else {
                stays = Some(format!("{address} has no handle"));
                continue;
            };
            if let Some(why) = self.is_used(node, &owner, used).await? {
                stays = Some(why);
                continue;
            }
            let sequence_number = block.sequence_of(address);
            releases.push(Release { address, handle: Some(handle.clone()), sequence_number });
        }
        if releases.is_empty() {
            return Ok(stays);
        }
        if self.exists(node).await? {
            return Ok(Some("the node is back".to_owned()));
        }
        match self.records.release_addresses(block.cidr, &releases).await {
            Ok(released) => {
                tracing::info!(node, addresses = ?released, "released addresses of the vanished node")
            }
            Err(IpamError::Changed { address, problem }) => {
                stays = Some(format!("{address} has changed: {problem}"));
            }
            Err(error) => return Err(error),
        }
        Ok(stays)
    }

    /// Why an address of the node is in use, or may be.
    async fn is_used(
        &self,
        node: &str,
        owner: &BTreeMap<String, String>,
        used: &BTreeSet<Key>,
    ) -> Result<Option<String>, StoreError> {
        if owner.get("type").is_some_and(|of| TUNNELS.contains(&&**of)) {
            return Ok(None);
        }
        let (Some(namespace), Some(pod)) = (owner.get("namespace"), owner.get("pod")) else {
            return Ok(Some("nobody knows whose some of its addresses are".to_owned()));
        };
        let pod = Key::namespaced(Kind::Pod, namespace, pod);
        let is_used = used.contains(&pod) || self.runs(node, &pod).await?;
        Ok(is_used.then(|| format!("{pod} exists")))
    }

    /// The blocks that belong to the node, by an affinity or by their own record: old versions of Calico left blocks
    /// without an affinity.
    async fn blocks_of(&self, node: &str) -> Result<BTreeSet<IpNet>, StoreError> {
        let affinities = self.list(Kind::BlockAffinity).await?.into_iter();
        let mut blocks: BTreeSet<IpNet> = affinities
            .filter_map(|stored| {
                let (of, cidr) = stored.key.name.split_once('/')?;
                cidr.parse().ok().filter(|_| of == node)
            })
            .collect();
        let stored = self.list(Kind::IpamBlock).await?.into_iter();
        blocks.extend(
            stored
                .filter(|block| owner_of(&block.value) == Some(node))
                .filter_map(|block| block.key.name.parse::<IpNet>().ok()),
        );
        Ok(blocks)
    }

    /// Deletes the records of handles without addresses that name a block of the node: a crash between two writes leaves
    /// such a record.
    async fn release_handles(&self, node: &str) -> Result<(), IpamError> {
        let own = self.blocks_of(node).await?;
        let blocks = self.list(Kind::IpamBlock).await?;
        let used: BTreeSet<&str> = blocks
            .iter()
            .flat_map(|block| attributes(&block.value))
            .filter_map(|attribute| attribute["handle_id"].as_str())
            .collect();
        for handle in self.list(Kind::IpamHandle).await? {
            let cidrs = handle.value["block"].as_object().into_iter().flat_map(|blocks| blocks.keys());
            let cidrs: Vec<IpNet> = cidrs.filter_map(|cidr| cidr.parse().ok()).collect();
            if used.contains(handle.key.name.as_str()) || !cidrs.iter().any(|cidr| own.contains(cidr)) {
                continue;
            }
            if self.exists(node).await? {
                return Ok(());
            }
            // Not a release: another node may have given the handle an address since the blocks were read.
            for cidr in cidrs {
                self.records.repair(&Fix::Forget(handle.key.name.clone(), cidr)).await?;
            }
        }
        Ok(())
    }
}

/// The node that owns a block.
fn owner_of(block: &Value) -> Option<&str> {
    block["affinity"].as_str()?.strip_prefix("host:")
}

fn attributes(block: &Value) -> impl Iterator<Item = &Value> {
    block["attributes"].as_array().into_iter().flatten()
}

/// The node of an attribute.
fn node_of(attribute: &Value) -> Option<&str> {
    attribute["secondary"]["node"].as_str()
}

//! The nodes that applied policies concern: `apply --wait` asks only these for reports.

use std::collections::BTreeSet;

use tortie_api::manifest::Object;
use tortie_api::net::Direction;
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, SeenHost, SeenPod, Snapshot, Table};
use tortie_store::{Interest, Store, StoreError, Stored};

use crate::store::list;

/// The kinds that decide, besides policies and WorkloadEndpoints, which endpoints a policy selects.
const SELECTED_BY: [Kind; 6] =
    [Kind::Namespace, Kind::ServiceAccount, Kind::Profile, Kind::Tier, Kind::HostEndpoint, Kind::Node];

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];
const TABLES: [Table; 4] = [Table::Untracked, Table::PreDnat, Table::Normal, Table::Forward];

/// The policies of one `apply`, before and after. An endpoint that comes later waits for the policies itself.
pub(crate) struct Policies {
    before: Vec<Stored>,
    after: Vec<Key>,
}

impl Policies {
    /// Reads the policies that manifests will replace. `None` if they contain anything else, which may concern every node.
    ///
    /// # Errors
    /// The store failed.
    pub(crate) async fn of(store: &dyn Store, objects: &[Object]) -> Result<Option<Self>, StoreError> {
        if objects.is_empty() || !objects.iter().all(|object| object.key.kind.is_policy()) {
            return Ok(None);
        }
        let mut before = Vec::new();
        for object in objects {
            before.extend(store.get(&object.key).await?);
        }
        Ok(Some(Self { before, after: objects.iter().map(|object| object.key.clone()).collect() }))
    }

    /// The nodes with an endpoint that one of the policies selects, or selected before. `None` means all nodes.
    ///
    /// # Errors
    /// The store failed.
    pub(crate) async fn nodes(&self, store: &dyn Store) -> Result<Option<BTreeSet<String>>, StoreError> {
        let mut after = Vec::new();
        for key in &self.after {
            after.extend(store.get(key).await?);
        }
        let mut versions = [snapshot_of(&self.before), snapshot_of(&after)];
        if versions.iter().any(|version| version.iter().any(|(_, policy)| policy.resource.is_err())) {
            // What it selects is unknown.
            return Ok(None);
        }
        for kind in SELECTED_BY {
            let Some(objects) = readable(list(store, kind).await)? else { return Ok(None) };
            versions.iter_mut().for_each(|version| insert(version, &objects));
        }
        let mut nodes: BTreeSet<String> = versions.iter().flat_map(of_hosts).collect();
        let (interest, mut page) = (Interest::all(Kind::WorkloadEndpoint), None);
        loop {
            let listed = match store.list_page(&interest, page).await {
                Err(StoreError::KindAbsent(_)) => return Ok(Some(nodes)),
                listed => listed,
            };
            let Some(listed) = readable(listed)? else { return Ok(None) };
            for version in &mut versions {
                insert(version, &listed.items);
                let is_unread =
                    |key: &Key| version.get(key).is_none_or(|endpoint| endpoint.resource.is_err());
                if listed.items.iter().any(|endpoint| is_unread(&endpoint.key)) {
                    // An endpoint that cannot be read may be anywhere.
                    return Ok(None);
                }
                nodes.extend(of_pods(version));
                for endpoint in &listed.items {
                    version.remove(&endpoint.key);
                }
            }
            page = listed.next;
            if page.is_none() {
                return Ok(Some(nodes));
            }
        }
    }
}

/// `None` if the user may not read the objects.
fn readable<T>(listed: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match listed {
        Ok(listed) => Ok(Some(listed)),
        Err(StoreError::Forbidden(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn snapshot_of(policies: &[Stored]) -> Snapshot {
    let mut snapshot = Snapshot::new();
    insert(&mut snapshot, policies);
    snapshot
}

fn insert(snapshot: &mut Snapshot, objects: &[Stored]) {
    for object in objects {
        snapshot.insert(object.key.clone(), object.value.clone(), None);
    }
}

/// The nodes with a host endpoint to which a policy applies.
fn of_hosts(snapshot: &Snapshot) -> Vec<String> {
    let oracle = Oracle::new(snapshot);
    let applies = |host: &SeenHost<'_>| {
        let applying = |table| DIRECTIONS.map(|direction| oracle.applying_at(host, table, direction));
        TABLES.into_iter().flat_map(applying).any(|policies| !policies.is_empty())
    };
    oracle.hosts().filter(applies).map(|host| host.node().to_owned()).collect()
}

/// The nodes with a pod to which a policy applies.
fn of_pods(snapshot: &Snapshot) -> Vec<String> {
    let oracle = Oracle::new(snapshot);
    let applies =
        |pod: &SeenPod<'_>| DIRECTIONS.iter().any(|direction| !oracle.applying(pod, *direction).is_empty());
    oracle.pods().filter(applies).map(|pod| pod.node().to_owned()).collect()
}

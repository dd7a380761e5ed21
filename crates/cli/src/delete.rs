//! `tortie delete`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tortie_api::kubernetes::is_implied;
use tortie_api::{Key, Kind};
use tortie_controllers::{PoolDeletion, remove_pool};
use tortie_store::{Endpoints, Interest, Scope, Store, StoreError, Stored};

use crate::checks::still_in_use;
use crate::filenames::Filenames;
use crate::manifests::{NOT_UNDERSTOOD, read_all, refuse_managed, stored_otherwise, tier_of};
use crate::output;
use crate::store::{StoreArguments, list, warn_of_lock};
use crate::targets::{self, Selection};

/// How long to wait until the nodes have disconnected the pods of a deleted namespace.
const DISCONNECT: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
#[command(mut_arg("files", |files| {
    files.conflicts_with_all(["all_namespaces", "all", "selector", "field_selector"])
}))]
pub(crate) struct Delete {
    #[command(flatten)]
    filenames: Filenames,
    /// Kinds and names: networkpolicy NAME; pod/NAME service/NAME; pods with --all or -l
    #[arg(required_unless_present_any = ["files", "kustomize"], conflicts_with_all = ["files", "kustomize"], value_name = "KIND | KIND/NAME")]
    objects: Vec<String>,
    #[command(flatten)]
    selection: Selection,
    /// Objects that do not exist are no error
    #[arg(short = 's', long, alias = "skip-not-exists")]
    ignore_not_found: bool,
    /// Show what would be deleted, and delete nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArguments,
}

impl Delete {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let of_files = match self.filenames.is_empty() {
            true => None,
            false => {
                let Some(mut objects) = read_all(&self.filenames, self.selection.namespace.as_deref())?
                else {
                    return Ok(ExitCode::from(NOT_UNDERSTOOD));
                };
                objects.sort_by_key(|object| std::cmp::Reverse(object.key.kind.apply_order()));
                Some(objects.into_iter().map(|object| object.key).collect::<Vec<_>>())
            }
        };
        crate::runtime()?.block_on(async {
            let store = self.store.open_to_change().await?;
            warn_of_lock(&*store).await;
            let mut keys = match of_files {
                Some(keys) => keys,
                None => {
                    let mut keys = self.selection.keys(&*store, &targets::parse(&self.objects)?).await?;
                    keys.sort_by_key(|key| std::cmp::Reverse(key.kind.apply_order()));
                    keys
                }
            };
            refuse_managed(keys.iter())?;
            refuse_nodes(&*store, &keys)?;
            for key in &mut keys {
                if let Some(stored) = stored_otherwise(&*store, key).await? {
                    *key = stored.key;
                }
            }
            refuse(&*store, &keys).await?;
            let (mut missing, mut done) = (false, BTreeSet::new());
            for key in keys {
                if key.kind == Kind::Namespace && !self.dry_run {
                    delete_pods(&store, &key.name).await?;
                }
                // A namespace contains objects that the manifests may have, too.
                for key in with_contents(&*store, key).await? {
                    if !done.insert(key.clone()) {
                        continue;
                    }
                    missing |= !self.delete(&store, &key).await?;
                }
            }
            Ok(if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        })
    }

    /// Deletes the object; returns false if it should exist and does not.
    async fn delete(&self, store: &Arc<dyn Endpoints>, key: &Key) -> anyhow::Result<bool> {
        let existed = match self.dry_run {
            true => {
                let exists = store.get(key).await?.is_some();
                if exists {
                    output::line(&format!("{key} would be deleted"));
                }
                exists
            }
            false => delete(store, key).await?,
        };
        if !existed && !self.ignore_not_found {
            targets::report_missing(key.kind, &key.to_string());
        }
        Ok(existed || self.ignore_not_found)
    }
}

/// calicoctl deletes its own record of a node, and refuses where that is the Node of a Kubernetes cluster. A script must not remove machines.
fn refuse_nodes(store: &dyn Endpoints, keys: &[Key]) -> anyhow::Result<()> {
    match keys.iter().find(|key| key.kind == Kind::Node).filter(|_| store.derives_from_kubernetes()) {
        Some(node) => bail!(
            "{node} is the Node of the Kubernetes cluster, and not only Calico's record of it; if it is to leave the cluster, run kubectl delete \
             node {}. Nothing was changed",
            node.name
        ),
        None => Ok(()),
    }
}

/// Rejects the deletion of what others still need.
pub(crate) async fn refuse(store: &dyn Store, keys: &[Key]) -> anyhow::Result<()> {
    with_policies(store, keys).await?;
    crate::checks::refuse_deletion(store, keys).await
}

/// Deletes the object, and says so; returns whether it existed.
async fn delete(store: &Arc<dyn Endpoints>, key: &Key) -> anyhow::Result<bool> {
    let done = remove(store, key, "deleted").await?;
    if let Some(done) = &done {
        output::line(done);
    }
    Ok(done.is_some())
}

/// Deletes an object that [`refuse`] lets go. Returns what to print, where `word` says what has happened; `None` if it did not exist.
pub(crate) async fn remove(
    store: &Arc<dyn Endpoints>,
    key: &Key,
    word: &str,
) -> anyhow::Result<Option<String>> {
    let gone = format!("{key} {word}");
    if key.kind != Kind::IpPool {
        return match store.delete(key, None).await {
            Ok(_) => Ok(Some(gone)),
            Err(StoreError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        };
    }
    let mut is_closed = false;
    let settle = async |time: Duration| {
        is_closed = true;
        output::error_line(&format!(
            "note: {key} is closed (disabled: true), and deleted in {} s: agents that have read it before may still give its addresses",
            time.as_secs()
        ));
        tokio::time::sleep(time).await;
    };
    let removed = remove_pool(store, key, settle).await.with_context(|| match is_closed {
        true => format!(
            "{key} was not deleted, and may be closed; delete it again, or set spec.disabled to false"
        ),
        false => format!("{key} was not deleted"),
    })?;
    Ok(match removed {
        PoolDeletion::Missing => None,
        PoolDeletion::Gone => Some(gone),
        PoolDeletion::Waits(what) => {
            Some(format!("{key} is being deleted, and gives no more addresses: {what}"))
        }
        PoolDeletion::InUse(used) => bail!("{}; it was not deleted", still_in_use(key, &used)),
    })
}

/// Deletes the pods of a namespace and waits until their nodes have disconnected them: without the namespace's
/// policies they would be open meanwhile.
async fn delete_pods(store: &Arc<dyn Endpoints>, namespace: &str) -> anyhow::Result<()> {
    // Pods would come back. A Kubernetes API deletes them itself, if others may not.
    for kind in Kind::all().filter(|kind| kind.is_workload()) {
        for key in within(&**store, kind, namespace).await? {
            match delete(store, &key).await {
                Err(error) if is_forbidden(&error) => {}
                deleted => drop(deleted?),
            }
        }
    }
    for key in within(&**store, Kind::Pod, namespace).await? {
        delete(store, &key).await?;
    }
    let deadline = tokio::time::Instant::now() + DISCONNECT;
    loop {
        let left = within(&**store, Kind::WorkloadEndpoint, namespace).await?;
        match left.first() {
            None => return Ok(()),
            Some(first) if tokio::time::Instant::now() > deadline => bail!(
                "{} endpoints of namespace {namespace} are still connected ({first} …): its policies stay until their nodes have \
                 disconnected them; look at those nodes' agents, and delete again",
                left.len()
            ),
            Some(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

fn is_forbidden(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::Forbidden(_)))
}

/// The objects of one kind in a namespace, without those that are derived from others and deleted with them.
pub(crate) async fn within(store: &dyn Store, kind: Kind, namespace: &str) -> anyhow::Result<Vec<Key>> {
    let interest = Interest { kind, scope: Scope::Namespace(namespace.to_owned()) };
    let items = match store.list_all(&interest).await {
        Ok(listing) => listing.items,
        Err(StoreError::KindAbsent(_)) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let is_own = |stored: &Stored| kind != Kind::EndpointSlice || !is_implied(&stored.value);
    Ok(items.into_iter().filter(is_own).map(|stored| stored.key).collect())
}

/// Rejects the deletion of tiers with policies that are not deleted together with them.
async fn with_policies(store: &dyn Store, keys: &[Key]) -> anyhow::Result<()> {
    let tiers: Vec<&Key> = keys.iter().filter(|key| key.kind == Kind::Tier).collect();
    if tiers.is_empty() {
        return Ok(());
    }
    for kind in Kind::all() {
        for stored in list(store, kind).await?.into_iter().filter(|stored| !keys.contains(&stored.key)) {
            let Some(tier) = tier_of(kind, &stored.value) else { continue };
            if tiers.iter().any(|key| key.name == tier) {
                bail!("Tier {tier} still has {}; nothing was deleted", stored.key);
            }
        }
    }
    Ok(())
}

/// The object, after its content if it is a namespace.
async fn with_contents(store: &dyn Store, key: Key) -> anyhow::Result<Vec<Key>> {
    let mut keys = Vec::new();
    if key.kind == Kind::Namespace {
        for kind in Kind::all().filter(|kind| kind.namespaced() && kind.written_by().is_none()) {
            keys.extend(within(store, kind, &key.name).await?);
        }
    }
    keys.push(key);
    Ok(keys)
}

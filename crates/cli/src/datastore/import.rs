//! `tortie datastore import` and `compare`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use serde::Deserialize as _;
use serde_json::{Value, json};
use tortie_api::calico::{WELL_KNOWN_TIERS, WorkloadEndpoint};
use tortie_api::ipam::Block;
use tortie_api::kubernetes::Node;
use tortie_api::{Key, Kind, Resource};
use tortie_controllers::is_default;
use tortie_store::{Endpoints, POD_UID, StoreError, Stored};

use super::calico_file;
use super::document::{self, Document, ExportFormat};
use super::exported::{Exported, without_identity};
use super::same::{annotations, comparable};
use super::{Owner, PATIENCE, is_kept, nodes, owner, set, set_lock, wait_for_nodes};
use crate::output;
use crate::store::{StoreArguments, list};

/// How many objects are written at the same time.
const AT_ONCE: usize = 32;
/// The maximum number of objects of which differences are printed.
const SHOWN: usize = 20;

#[derive(clap::Args)]
pub(crate) struct Import {
    /// The file of the export, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    file: PathBuf,
    /// Replace objects that exist and differ
    #[arg(long)]
    overwrite: bool,
    /// Keep objects that the export lacks
    #[arg(long)]
    keep_others: bool,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct Compare {
    /// The file of the export, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    store: StoreArguments,
}

/// The state of an exported object in the datastore.
enum Presence {
    Missing,
    Equal,
    Different(Stored),
}

/// An exported object, and what the datastore has.
struct Compared {
    object: Exported,
    found: Presence,
}

/// The comparison of a datastore with an export.
struct Comparison {
    pairs: Vec<Compared>,
    /// Exported objects that the datastore derives, or gets from the cluster.
    derived: usize,
    /// Endpoints whose pods the cluster does not have any more.
    gone: Vec<Key>,
    /// Nodes that the cluster does not have.
    absent_nodes: Vec<Key>,
    /// Objects of Calico's kinds that were not exported.
    extra: Vec<Key>,
    /// Whether the datastore derives objects from the Kubernetes API.
    derives: bool,
}

impl Import {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let document = document::read(&self.file)?;
        crate::runtime()?.block_on(async {
            let store = self.store.open_to_change().await?;
            warn_of_invalid(&document.objects);
            if document.format == ExportFormat::Calico {
                for (key, node) in calico_file::lost_nodes(&document.objects) {
                    output::error_line(&format!(
                        "warning: {key} names node {node}, which the file does not have: nodes have their names of Kubernetes there, and \
                         calicoctl does not rename this field"
                    ));
                }
            }
            self.refuse(&Comparison::of(&*store, document.clone()).await?)?;
            // Nodes that use this datastore already must not apply half of it.
            if set_lock(&*store, true).await? {
                output::line("the datastore is locked now");
            }
            wait_for_nodes(&*store, Duration::from_secs(PATIENCE)).await?;
            let before = Comparison::of(&*store, document.clone()).await?;
            self.refuse(&before)?;
            let failures = write(&*store, before.pairs).await?;
            for failure in failures.iter().take(SHOWN) {
                output::error_line(failure);
            }
            let after = Comparison::of(&*store, document).await?;
            let is_equal = after.print(!self.keep_others);
            if !is_equal || !failures.is_empty() {
                bail!("the datastore differs from the export; correct what is named above, and run the command again");
            }
            output::line("the datastore equals the export. It stays locked: when agents and controllers use it, run tortie datastore unlock");
            Ok(ExitCode::SUCCESS)
        })
    }

    /// Refuses to write into a datastore that others use, or that has other objects of the same names.
    fn refuse(&self, comparison: &Comparison) -> anyhow::Result<()> {
        let of_ipam =
            |key: &&Key| matches!(key.kind, Kind::IpamBlock | Kind::BlockAffinity | Kind::IpamHandle);
        if let Some(first) = comparison.extra.iter().find(of_ipam) {
            bail!(
                "the datastore has records of IPAM that the export lacks ({first}), so its addresses are in use already; import into \
                 a datastore without pods. Nothing was changed"
            );
        }
        if let Some(first) = comparison.extra.first().filter(|_| !self.keep_others) {
            comparison
                .extra
                .iter()
                .take(SHOWN)
                .for_each(|key| output::error_line(&format!("{key} was not exported")));
            bail!(
                "the datastore has {} that the export lacks, such as {first}, so policy would mean something else; delete them, or \
                 use --keep-others. Nothing was changed",
                output::count(comparison.extra.len() as u64, "object")
            );
        }
        let of_ipam = |pair: &&Compared| {
            matches!(pair.object.key.kind, Kind::IpamBlock | Kind::BlockAffinity | Kind::IpamHandle)
                && matches!(pair.found, Presence::Different(..))
        };
        if let Some(pair) = comparison.pairs.iter().find(of_ipam) {
            bail!(
                "{} differs: addresses were given in this datastore, and would be given again. Import into a datastore without pods. \
                 Nothing was changed",
                pair.object.key
            );
        }
        // What the controllers have created is nobody's own.
        let is_own = |pair: &&Compared| match &pair.found {
            Presence::Different(stored) => !is_default(stored),
            Presence::Missing | Presence::Equal => false,
        };
        let different: Vec<&Key> = comparison
            .pairs
            .iter()
            .filter(is_own)
            .map(|pair| &pair.object.key)
            .filter(|key| !is_merged(key, comparison.derives))
            .collect();
        if different.is_empty() || self.overwrite {
            return Ok(());
        }
        different.iter().take(SHOWN).for_each(|key| output::error_line(&format!("{key} exists and differs")));
        let count = output::count(different.len() as u64, "object");
        bail!("{count} exist and differ; use --overwrite to replace them. Nothing was changed")
    }
}

/// Warns about objects that Tortie does not understand. They are copied as they are: nodes report them, and deny what they
/// cannot understand.
fn warn_of_invalid(objects: &[Exported]) {
    for Exported { key, value } in objects {
        let problem = match key.kind {
            // Records of IPAM are no resources.
            Kind::IpamBlock => Block::deserialize(value).err().map(|error| error.to_string()),
            Kind::BlockAffinity | Kind::IpamHandle | Kind::IpamConfig => None,
            _ => Resource::read(key, value).err().and_then(|all| all.first().map(ToString::to_string)),
        };
        if let Some(problem) = problem {
            output::error_line(&format!(
                "warning: {key} is copied as it is, but Tortie does not understand it: {problem}"
            ));
        }
    }
}

/// Whether what exists is changed in part only: Nodes and Pods are the cluster's, and the lock is in ClusterInformation.
fn is_merged(key: &Key, derives: bool) -> bool {
    derives && matches!(owner(key.kind), Owner::Node | Owner::Endpoint)
        || key.kind == Kind::ClusterInformation
}

/// Whether every cluster has the object: Calico creates these tiers.
fn is_provided(key: &Key) -> bool {
    let is_tier = key.kind == Kind::Tier && WELL_KNOWN_TIERS.iter().any(|(name, ..)| key.name == *name);
    is_tier || key.kind == Kind::ClusterInformation
}

impl Compare {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let document = document::read(&self.file)?;
        crate::runtime()?.block_on(async {
            let comparison = Comparison::of(&*self.store.open().await?, document).await?;
            Ok(if comparison.print(true) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }
}

impl Comparison {
    async fn of(store: &dyn Endpoints, document: Document) -> anyhow::Result<Self> {
        let Document { objects, format } = document;
        let derives = store.derives_from_kubernetes();
        let (mut pairs, mut derived, mut gone, mut extra) = (Vec::new(), 0, Vec::new(), Vec::new());
        let mut absent_nodes = Vec::new();
        let mut by_kind: BTreeMap<Kind, Vec<Exported>> = BTreeMap::new();
        for object in objects {
            match is_kept(&object.key, derives) {
                true => by_kind.entry(object.key.kind).or_default().push(object),
                false => derived += 1,
            }
        }
        // The Kubernetes API has Nodes, Pods and policies of its own.
        let copied = Kind::all().filter(|kind| match owner(*kind) {
            Owner::Calico => true,
            Owner::Node | Owner::Endpoint | Owner::Cluster => !derives,
            Owner::Component => false,
        });
        let copied: BTreeSet<Kind> = copied.collect();
        let kinds: BTreeSet<Kind> = by_kind.keys().chain(&copied).copied().collect();
        let bar = crate::progress::bar("comparing", kinds.len());
        for kind in kinds {
            bar.inc(1);
            let items = list(store, kind).await.with_context(|| format!("reading {}", kind.plural()))?;
            let mut items: BTreeMap<Key, Stored> =
                items.into_iter().map(|stored| (stored.key.clone(), stored)).collect();
            for object in by_kind.remove(&kind).unwrap_or_default() {
                let found = match items.remove(&object.key) {
                    None if derives
                        && kind == Kind::WorkloadEndpoint
                        && pod_of(store, &object).await?.is_none() =>
                    {
                        gone.push(object.key);
                        continue;
                    }
                    None if derives && kind == Kind::Node => {
                        absent_nodes.push(object.key);
                        continue;
                    }
                    None => Presence::Missing,
                    Some(stored) => presence(stored, &object.value, derives),
                };
                pairs.push(Compared { object, found });
            }
            if copied.contains(&kind) {
                let is_extra = |stored: &Stored| {
                    let is_exportable = is_kept(&stored.key, derives) && format.has(&stored.key);
                    is_exportable && !is_provided(&stored.key) && !is_default(stored)
                };
                extra.extend(items.into_values().filter(is_extra).map(|stored| stored.key));
            }
        }
        bar.finish_and_clear();
        pairs.sort_by_key(|pair| pair.object.key.kind.apply_order());
        Ok(Self { pairs, derived, gone, absent_nodes, extra, derives })
    }

    /// Prints a row for each kind, and the first differences; returns whether there are none. Objects that were not exported are
    /// differences, if the caller wants that.
    fn print(&self, with_extra: bool) -> bool {
        let mut kinds: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
        for pair in &self.pairs {
            let counts = kinds.entry(pair.object.key.kind.plural()).or_default();
            match pair.found {
                Presence::Equal => counts[0] += 1,
                Presence::Different(..) => counts[1] += 1,
                Presence::Missing => counts[2] += 1,
            }
        }
        let header = ["KIND", "EQUAL", "DIFFERENT", "MISSING"].map(str::to_owned).to_vec();
        let rows = kinds.iter().map(|(kind, counts)| {
            std::iter::once((*kind).to_owned()).chain(counts.iter().map(ToString::to_string)).collect()
        });
        output::columns(&std::iter::once(header).chain(rows).collect::<Vec<_>>());
        if self.derived > 0 {
            let count = output::count(self.derived as u64, "exported object");
            output::line(&format!("{count} not compared, because this datastore gets them from the cluster"));
        }
        for key in self.gone.iter().take(SHOWN) {
            output::error_line(&format!(
                "{key} is left out, because the cluster does not have its pod any more"
            ));
        }
        for key in self.absent_nodes.iter().take(SHOWN) {
            output::error_line(&format!("{key} is left out, because the cluster does not have such a Node"));
        }
        if !self.gone.is_empty() {
            output::line("tortie ipam check --fix releases the addresses of pods that are gone");
        }
        let wrong = self.pairs.iter().filter_map(|pair| match pair.found {
            Presence::Equal => None,
            Presence::Different(..) => Some(format!("{} differs", pair.object.key)),
            Presence::Missing => Some(format!("{} is missing", pair.object.key)),
        });
        let extra = self.extra.iter().filter(|_| with_extra).map(|key| format!("{key} was not exported"));
        let wrong: Vec<String> = wrong.chain(extra).collect();
        wrong.iter().take(SHOWN).for_each(|line| output::error_line(line));
        wrong.is_empty()
    }
}

/// Compares a stored object with the exported one.
fn presence(stored: Stored, exported: &Value, derives: bool) -> Presence {
    let kind = stored.key.kind;
    let found = match derives && kind == Kind::Node {
        true => comparable(kind, &nodes::from_kubernetes(&stored), derives),
        false => comparable(kind, &stored.value, derives),
    };
    match found == comparable(kind, exported, derives) {
        true => Presence::Equal,
        false => Presence::Different(stored),
    }
}

/// Writes what is missing or differs; returns what could not be written.
async fn write(store: &dyn Endpoints, pairs: Vec<Compared>) -> anyhow::Result<Vec<String>> {
    let pairs: Vec<Compared> =
        pairs.into_iter().filter(|pair| !matches!(pair.found, Presence::Equal)).collect();
    let bar = crate::progress::bar("writing", pairs.len());
    let mut failures = Vec::new();
    let writes = pairs.into_iter().map(|pair| async {
        let key = pair.object.key.clone();
        (key, write_one(store, pair).await)
    });
    let mut writes = futures::stream::iter(writes).buffered(AT_ONCE);
    while let Some((key, written)) = writes.next().await {
        bar.inc(1);
        match written {
            Ok(()) => {}
            // Each further write would wait as long as this one.
            Err(error @ StoreError::Unavailable(_)) => return Err(error).with_context(|| key.to_string()),
            Err(error) => failures.push(format!("{key}: {error}")),
        }
    }
    bar.finish_and_clear();
    Ok(failures)
}

async fn write_one(store: &dyn Endpoints, Compared { object, found }: Compared) -> Result<(), StoreError> {
    if store.derives_from_kubernetes() {
        match owner(object.key.kind) {
            Owner::Node => return annotate(store, &object, &found).await,
            Owner::Endpoint => return publish(store, &object).await,
            Owner::Calico | Owner::Cluster | Owner::Component => {}
        }
    }
    let Exported { key, value } = object;
    let mut value = without_identity(key.kind, value);
    if key.kind == Kind::ClusterInformation {
        set(&mut value, "spec", "datastoreReady", json!(false));
    }
    match found {
        Presence::Equal => Ok(()),
        Presence::Missing => store.create(&key, value).await.map(drop),
        Presence::Different(Stored { version, value: current, .. }) => {
            // The identity of an object stays.
            for field in ["uid", "creationTimestamp"] {
                if let Some(kept) = current.pointer(&format!("/metadata/{field}")) {
                    set(&mut value, "metadata", field, kept.clone());
                }
            }
            store.update(&key, value, &version).await.map(drop)
        }
    }
}

/// Copies Calico's data about a node to the cluster's Node.
async fn annotate(store: &dyn Endpoints, object: &Exported, found: &Presence) -> Result<(), StoreError> {
    let Exported { key, value } = object;
    let annotations = annotations(value);
    let current = match found {
        Presence::Different(current) => self::annotations(&current.value),
        Presence::Missing | Presence::Equal => serde_json::Map::new(),
    };
    let mut texts: BTreeMap<&str, Option<String>> =
        current.keys().map(|name| (name.as_str(), None)).collect();
    texts.extend(annotations.iter().map(|(name, text)| (name.as_str(), text.as_str().map(str::to_owned))));
    texts.insert(Node::LABELS, nodes::labels_annotation(nodes::own_labels(value)));
    store.annotate_node(&key.name, &texts).await
}

/// Copies an endpoint to the annotations of its Pod.
async fn publish(store: &dyn Endpoints, object: &Exported) -> Result<(), StoreError> {
    let Exported { key, value } = object;
    let invalid = |problem: String| StoreError::Invalid { key: key.clone(), problem };
    let mut endpoint: WorkloadEndpoint =
        serde_json::from_value(value.clone()).map_err(|error| invalid(error.to_string()))?;
    let uid = pod_of(store, object).await?;
    let uid = uid.ok_or_else(|| invalid("the cluster does not have its pod any more".to_owned()))?;
    endpoint.metadata.annotations.insert(POD_UID.to_owned(), uid);
    store.publish(&endpoint).await.map(drop)
}

/// The uid of an endpoint's pod; `None` if the cluster does not have it any more, or has another one of the name.
async fn pod_of(store: &dyn Endpoints, endpoint: &Exported) -> Result<Option<String>, StoreError> {
    let Exported { key, value } = endpoint;
    let name = value["spec"]["pod"].as_str().unwrap_or_default();
    let Some(pod) = store.get(&Key::namespaced(Kind::Pod, &key.namespace, name)).await? else {
        return Ok(None);
    };
    let uid = pod.value.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned);
    // Calico's endpoints do not name the uid.
    let known = value["metadata"]["annotations"].get(POD_UID).and_then(Value::as_str);
    Ok(uid.filter(|uid| known.is_none_or(|known| known == uid)))
}

//! `tortie apply` and `tortie delete`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tortie_api::calico::WELL_KNOWN_TIERS;
use tortie_api::kubernetes::is_implied;
use tortie_api::manifest::{self, Object, Offline, Problem, Settled};
use tortie_api::{Key, Kind, Positions};
use tortie_store::{Applied, Store, StoreError};

use crate::concerned::Policies;
use crate::output;
use crate::store::{StoreArguments, list};

/// How long to wait until the nodes have disconnected the pods of a deleted namespace.
const DISCONNECT: Duration = Duration::from_secs(30);

/// Calico's kinds of policy, which belong to tiers.
const OF_CALICO: [Kind; 4] = [
    Kind::NetworkPolicy,
    Kind::GlobalNetworkPolicy,
    Kind::StagedNetworkPolicy,
    Kind::StagedGlobalNetworkPolicy,
];

/// The exit code of a command whose manifests have problems.
const NOT_UNDERSTOOD: u8 = 2;

#[derive(clap::Args)]
pub(crate) struct Apply {
    /// Manifests: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Wait until the objects are in force on every node
    #[arg(long)]
    wait: bool,
    /// The maximum number of seconds to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "wait")]
    timeout: u64,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct Delete {
    /// Manifests: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = ["kind", "names"])]
    files: Vec<PathBuf>,
    /// The kind, such as networkpolicy
    #[arg(required_unless_present = "files")]
    kind: Option<String>,
    /// The names
    #[arg(required_unless_present = "files")]
    names: Vec<String>,
    /// The namespace
    #[arg(short, long, default_value = "default")]
    namespace: String,
    #[command(flatten)]
    store: StoreArguments,
}

impl Apply {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(mut objects) = read_all(&self.files)? else { return Ok(ExitCode::from(NOT_UNDERSTOOD)) };
        refuse_managed(objects.iter().map(|object| &object.key))?;
        if let Err(error) = crate::checks::refuse_fields(&objects) {
            output::error(&error.to_string());
            return Ok(ExitCode::from(NOT_UNDERSTOOD));
        }
        objects.sort_by_key(|object| object.key.kind.apply_order());
        crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            for object in objects.iter_mut().filter(|object| is_of_default_tier(&object.value)) {
                if let Some(name) = stored_name(&*store, &object.key).await? {
                    rename(object, name);
                }
            }
            without_tier(&*store, &objects).await?;
            crate::checks::refuse(&*store, &objects).await?;
            let policies = if self.wait { Policies::of(&*store, &objects).await? } else { None };
            let mut positions = Positions::default();
            for object in &objects {
                let applied = store.apply(object).await;
                let applied = applied.with_context(|| format!("{}: {}", object.origin, object.key))?;
                let word = match applied {
                    Applied::Created(_) => "created",
                    Applied::Configured(_) => "configured",
                    Applied::Unchanged(_) => "unchanged",
                };
                output::line(&format!("{} {word}", object.key));
                positions.advance(object.key.kind, applied.position());
            }
            crate::checks::warn(&*store, &objects).await?;
            if self.wait {
                let applied: Vec<Key> = objects.into_iter().map(|object| object.key).collect();
                let patience = Duration::from_secs(self.timeout);
                let slices = self.store.is_of_lab();
                return crate::wait::in_force(&*store, (&applied, policies), positions, (patience, slices))
                    .await;
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl Delete {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let mut keys: Vec<Key> = match &self.kind {
            None => {
                let Some(mut objects) = read_all(&self.files)? else {
                    return Ok(ExitCode::from(NOT_UNDERSTOOD));
                };
                objects.sort_by_key(|object| std::cmp::Reverse(object.key.kind.apply_order()));
                objects.into_iter().map(|object| object.key).collect()
            }
            Some(word) => {
                let kind = Kind::from_word(word).with_context(|| format!("{word:?} is no kind of object"))?;
                let namespace = if kind.namespaced() { self.namespace.clone() } else { String::new() };
                self.names.iter().map(|name| Key::namespaced(kind, &namespace, name)).collect()
            }
        };
        refuse_managed(keys.iter())?;
        crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            for key in &mut keys {
                if let Some(name) = stored_name(&*store, key).await? {
                    key.name = name;
                }
            }
            with_policies(&*store, &keys).await?;
            crate::checks::refuse_deletion(&*store, &keys).await?;
            let mut missing = false;
            for key in keys {
                if key.kind == Kind::Namespace {
                    delete_pods(&*store, &key.name).await?;
                }
                for key in with_contents(&*store, key).await? {
                    missing |= !delete(&*store, &key).await?;
                }
            }
            Ok(if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        })
    }
}

/// The name under which a policy is stored that is given by its other one ([`other_name`]).
async fn stored_name(store: &dyn Store, key: &Key) -> anyhow::Result<Option<String>> {
    let Some(other) = other_name(key) else { return Ok(None) };
    if store.get(key).await?.is_some() {
        return Ok(None);
    }
    let stored = store.get(&other).await?.filter(|stored| is_of_default_tier(&stored.value));
    Ok(stored.map(|stored| stored.key.name))
}

/// The other name of a policy in tier default. Calico's datastore stores one policy as `default.x`, whether it was
/// created as `x` or as `default.x`; kubectl exports that name, and users' manifests have the other.
pub(crate) fn other_name(key: &Key) -> Option<Key> {
    if !OF_CALICO.contains(&key.kind) {
        return None;
    }
    let name = match key.name.strip_prefix("default.") {
        Some(name) => name.to_owned(),
        None => format!("default.{}", key.name),
    };
    Some(Key { name, ..key.clone() })
}

/// Whether a policy of Calico's kinds belongs to tier default.
pub(crate) fn is_of_default_tier(policy: &Value) -> bool {
    matches!(policy.pointer("/spec/tier").and_then(Value::as_str), None | Some("" | "default"))
}

/// Gives the object the name.
pub(crate) fn rename(object: &mut Object, name: String) {
    object.value["metadata"]["name"] = Value::String(name.clone());
    object.key.name = name;
}

/// Deletes the object; returns whether it existed.
async fn delete(store: &dyn Store, key: &Key) -> anyhow::Result<bool> {
    match store.delete(key, None).await {
        Ok(_) => output::line(&format!("{key} deleted")),
        Err(error @ StoreError::NotFound(_)) => {
            output::error(&match key.kind {
                Kind::NetworkPolicy => format!("{error} (a Kubernetes policy is a knp)"),
                _ => error.to_string(),
            });
            return Ok(false);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(true)
}

/// Deletes the pods of a namespace and waits until their nodes have disconnected them: without the namespace's
/// policies they would be open meanwhile.
async fn delete_pods(store: &dyn Store, namespace: &str) -> anyhow::Result<()> {
    for key in within(store, Kind::Pod, namespace).await? {
        delete(store, &key).await?;
    }
    let deadline = tokio::time::Instant::now() + DISCONNECT;
    loop {
        let left = within(store, Kind::WorkloadEndpoint, namespace).await?;
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

/// The objects of one kind in a namespace, without those that are derived from others and deleted with them.
async fn within(store: &dyn Store, kind: Kind, namespace: &str) -> anyhow::Result<Vec<Key>> {
    let items = list(store, kind).await?.into_iter();
    let keys = items
        .filter(|stored| kind != Kind::EndpointSlice || !is_implied(&stored.value))
        .map(|stored| stored.key);
    Ok(keys.filter(|key| key.namespace == namespace).collect())
}

/// Rejects objects that users neither apply nor delete.
pub(crate) fn refuse_managed<'a>(mut keys: impl Iterator<Item = &'a Key>) -> anyhow::Result<()> {
    match keys.find_map(|key| Some((key, key.kind.written_by()?))) {
        Some((key, who)) => bail!("{key} is written by {who}; nothing was changed"),
        None => Ok(()),
    }
}

/// Rejects policies of tiers that neither exist nor are applied together with them, because the position of such a
/// policy is undefined.
async fn without_tier(store: &dyn Store, objects: &[Object]) -> anyhow::Result<()> {
    let stored = list(store, Kind::Tier).await?.into_iter().map(|stored| stored.key.name);
    refuse_unknown_tiers(stored, objects)
}

/// The same, with the names of the existing tiers.
pub(crate) fn refuse_unknown_tiers(
    stored: impl Iterator<Item = String>,
    objects: &[Object],
) -> anyhow::Result<()> {
    let given =
        objects.iter().filter(|object| object.key.kind == Kind::Tier).map(|object| object.key.name.clone());
    let known: BTreeSet<String> =
        WELL_KNOWN_TIERS.iter().map(|(name, ..)| (*name).to_owned()).chain(stored).chain(given).collect();
    for object in objects {
        match tier_of(object.key.kind, &object.value) {
            Some(tier) if !known.contains(tier) => {
                bail!(
                    "{}: {}: spec.tier: tier {tier} does not exist; nothing was changed",
                    object.origin,
                    object.key
                )
            }
            _ => {}
        }
    }
    Ok(())
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

/// The tier of a policy that names one.
pub(crate) fn tier_of(kind: Kind, value: &Value) -> Option<&str> {
    let tier = value.pointer("/spec/tier").filter(|_| OF_CALICO.contains(&kind))?.as_str();
    tier.filter(|tier| !tier.is_empty())
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

/// Reads all manifests. `None` if there is any problem: every problem has then been printed.
pub(crate) fn read_all(paths: &[PathBuf]) -> anyhow::Result<Option<Vec<Object>>> {
    let mut objects: Vec<Object> = Vec::new();
    let mut problems = Vec::new();
    for file in files(paths)? {
        match manifest::read(&file.display().to_string(), &read(&file)?) {
            Ok(more) => objects.extend(more),
            Err(more) => problems.extend(more.iter().map(ToString::to_string)),
        }
    }
    let mut seen = BTreeSet::new();
    for object in &objects {
        if !seen.insert(&object.key) {
            problems.push(format!("{}: {}: the object is given more than once", object.origin, object.key));
        }
    }
    if !all_right(&problems, "nothing was changed") {
        return Ok(None);
    }
    if objects.is_empty() {
        bail!("there are no objects in the manifests");
    }
    Ok(Some(objects))
}

/// Reads the manifests of a whole cluster, which contain more kinds than Tortie stores.
pub(crate) fn read_cluster(paths: &[PathBuf]) -> anyhow::Result<Option<Settled>> {
    let (mut cluster, mut problems): (Offline, Vec<Problem>) = Default::default();
    for file in files(paths)? {
        if let Err(more) = cluster.read(&file.display().to_string(), &read(&file)?) {
            problems.extend(more);
        }
    }
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    Ok(all_right(&problems, "nothing can be said").then(|| cluster.settled()))
}

/// Returns whether there are no problems; prints existing ones.
fn all_right(problems: &[String], consequence: &str) -> bool {
    for problem in problems {
        output::error_line(problem);
    }
    if !problems.is_empty() {
        output::error(&format!("{}; {consequence}", output::count(problems.len() as u64, "problem")));
    }
    problems.is_empty()
}

pub(crate) fn read(file: &Path) -> anyhow::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

/// The named files, and the files in named folders with the extension of a manifest.
fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for path in paths {
        if !path.is_dir() {
            all.push(path.clone());
            continue;
        }
        let is_manifest = |file: &PathBuf| {
            file.extension().is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json")
        };
        let entries = std::fs::read_dir(path).with_context(|| path.display().to_string())?;
        let mut inside: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(is_manifest).collect();
        if inside.is_empty() {
            bail!(
                "{}: the folder has no manifests: no file in it ends with .yaml, .yml or .json, and folders in it are not read",
                path.display()
            );
        }
        inside.sort();
        all.extend(inside);
    }
    Ok(all)
}

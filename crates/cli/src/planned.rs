//! The cluster after a change, as `tortie apply` and `tortie delete` would leave it.

use anyhow::{Context, bail};
use serde_json::json;
use tortie_api::manifest::Object;
use tortie_api::staged::{Staged, enforced, staged};
use tortie_api::{Key, Kind};
use tortie_oracle::{Snapshot, Stored};
use tortie_store::endpoint_labels_of;

use crate::{completed, manifests};

/// The cluster with these objects applied, those deleted, and staged policies enforced if requested. For a cluster of
/// manifests, the slices of Services are updated.
pub(crate) fn after(
    before: &Snapshot,
    objects: Vec<Object>,
    deleted: &[String],
    staged: bool,
    within_manifests: bool,
) -> anyhow::Result<Snapshot> {
    manifests::refuse_managed(objects.iter().map(|object| &object.key))?;
    let tiers = before.iter().filter(|(key, _)| key.kind == Kind::Tier).map(|(key, _)| key.name.clone());
    manifests::refuse_unknown_tiers(tiers, &objects)?;
    let mut after = before.clone();
    for mut object in objects {
        let of_default = manifests::is_of_default_tier(&object.value);
        if let Some((other, stored)) = stored_otherwise(&after, &object.key).filter(|_| of_default) {
            manifests::rename(&mut object, other, &stored.value);
        }
        apply(&mut after, object);
    }
    for text in deleted {
        let mut key = key(text)?;
        if let Some((other, _)) = stored_otherwise(&after, &key) {
            key = other;
        }
        delete(&mut after, &key)?;
    }
    if staged {
        enforce_staged(&mut after);
    }
    // Their controller recreates them, if it created the existing ones.
    if completed::has_implied_slices(before) || within_manifests {
        completed::imply_slices(&mut after);
    }
    Ok(after)
}

/// The policy that is given by its other name.
fn stored_otherwise<'a>(after: &'a Snapshot, key: &Key) -> Option<(Key, &'a Stored)> {
    let other = manifests::other_name(key).filter(|_| after.get(key).is_none())?;
    let known = after.get(&other).filter(|stored| manifests::is_of_default_tier(&stored.value));
    known.map(|known| (other, known))
}

/// Applies an object as `apply` stores it: keeps what the cluster added, and copies a pod's labels to its endpoints.
fn apply(after: &mut Snapshot, object: Object) {
    let current = after.get(&object.key).map(|stored| &stored.value);
    let value = tortie_store::applied(&object.value, current, object.key.kind);
    if object.key.kind == Kind::Pod {
        let labels = endpoint_labels_of(&value, &object.key.namespace);
        for (key, mut endpoint) in endpoints(after, &object.key) {
            endpoint.value["metadata"]["labels"] = json!(labels);
            after.insert(key, endpoint.value, endpoint.written);
        }
    }
    after.insert(object.key, value, Some((object.origin, object.lines)));
}

fn endpoints(snapshot: &Snapshot, pod: &Key) -> Vec<(Key, Stored)> {
    let is = |(key, stored): &(&Key, &Stored)| {
        key.kind == Kind::WorkloadEndpoint
            && key.namespace == pod.namespace
            && stored.value["spec"]["pod"] == pod.name.as_str()
    };
    snapshot.iter().filter(is).map(|(key, stored)| (key.clone(), stored.clone())).collect()
}

/// Parses `KIND/NAMESPACE/NAME` or `KIND/NAME`.
fn key(text: &str) -> anyhow::Result<Key> {
    let parts: Vec<&str> = text.split('/').collect();
    let word = parts.first().copied().unwrap_or_default();
    let kind =
        Kind::from_word(word).with_context(|| format!("--delete {text:?}: {word:?} is no kind of object"))?;
    match (kind.namespaced(), parts.as_slice()) {
        (true, [_, namespace, name]) => Ok(Key::namespaced(kind, *namespace, *name)),
        (false, [_, name]) => Ok(Key::global(kind, *name)),
        (true, _) => bail!("--delete {text:?}: a {kind} is named as {word}/NAMESPACE/NAME"),
        (false, _) => {
            bail!("--delete {text:?}: a {kind} belongs to no namespace; it is named as {word}/NAME")
        }
    }
}

fn delete(after: &mut Snapshot, key: &Key) -> anyhow::Result<()> {
    manifests::refuse_managed(std::iter::once(key))?;
    if key.kind == Kind::Tier {
        let of_it = |(policy, stored): &(&Key, &Stored)| {
            manifests::tier_of(policy.kind, &stored.value) == Some(key.name.as_str())
        };
        if let Some((policy, _)) = after.iter().find(of_it) {
            bail!("Tier {} still has {policy}; it cannot be deleted", key.name);
        }
    }
    if key.kind == Kind::Pod {
        for (endpoint, _) in endpoints(after, key) {
            after.remove(&endpoint);
        }
    }
    if key.kind == Kind::Namespace {
        let inside = after.iter().filter(|(of, _)| of.namespace == key.name).map(|(of, _)| of.clone());
        for inside in inside.collect::<Vec<_>>() {
            after.remove(&inside);
        }
    }
    if !after.remove(key) {
        let hint = if key.kind == Kind::NetworkPolicy { " (a Kubernetes policy is a knp)" } else { "" };
        bail!("{key} does not exist{hint}");
    }
    Ok(())
}

/// Set enforces the staged policy, Delete removes the policy of that name, Learn and Ignore do nothing.
fn enforce_staged(after: &mut Snapshot) {
    let all = after.iter().filter_map(|(key, stored)| Some((key.clone(), enforced(key)?, stored.clone())));
    for (key, enforced, stored) in all.collect::<Vec<_>>() {
        match staged(&stored.value, enforced.kind) {
            Staged::Set(value) => after.insert(enforced, value, stored.written),
            Staged::Delete => drop(after.remove(&enforced)),
            Staged::Nothing => continue,
        }
        after.remove(&key);
    }
}

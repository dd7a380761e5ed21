//! Reads manifests, and what is special about the objects in them: tiers, names of policies, objects of others.

use std::collections::BTreeSet;

use anyhow::bail;
use serde_json::Value;
use tortie_api::calico::WELL_KNOWN_TIERS;
use tortie_api::manifest::{self, Object, Offline, Settled, Skipped, Unread};
use tortie_api::{Key, Kind};
use tortie_store::{Store, Stored};

use crate::filenames::{Filenames, Manifest};
use crate::output;

/// How many objects a note names.
const MOST_NAMES: usize = 8;

/// Calico's kinds of policy, which belong to tiers.
const OF_CALICO: [Kind; 4] = [
    Kind::NetworkPolicy,
    Kind::GlobalNetworkPolicy,
    Kind::StagedNetworkPolicy,
    Kind::StagedGlobalNetworkPolicy,
];

/// The exit code of a command whose manifests have problems.
pub(crate) const NOT_UNDERSTOOD: u8 = 2;

/// The policy that is given by its other name ([`other_name`]).
pub(crate) async fn stored_otherwise(store: &dyn Store, key: &Key) -> anyhow::Result<Option<Stored>> {
    let Some(other) = other_name(key) else { return Ok(None) };
    if store.get(key).await?.is_some() {
        return Ok(None);
    }
    Ok(store.get(&other).await?.filter(|stored| is_of_default_tier(&stored.value)))
}

/// The policy of another tier than default that Calico 3.30 or 3.31 has stored under the names of its tier and its own.
pub(crate) async fn stored_under_tier(store: &dyn Store, object: &Object) -> anyhow::Result<Option<Stored>> {
    let Some(tier) = tier_of(object.key.kind, &object.value) else { return Ok(None) };
    if store.get(&object.key).await?.is_some() {
        return Ok(None);
    }
    let key = Key { name: format!("{tier}.{}", object.key.name), ..object.key.clone() };
    let has_name = |stored: &Stored| stored.value["metadata"]["name"] == object.key.name.as_str();
    Ok(store.get(&key).await?.filter(has_name))
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

/// Gives a policy the key under which it is stored, and the name that it has there. The two differ if Calico has stored it.
pub(crate) fn rename(object: &mut Object, key: Key, stored: &Value) {
    let name = stored["metadata"]["name"].as_str().unwrap_or(&key.name);
    object.value["metadata"]["name"] = Value::String(name.to_owned());
    object.key = key;
}

/// Rejects objects that users neither apply nor delete.
pub(crate) fn refuse_managed<'a>(mut keys: impl Iterator<Item = &'a Key>) -> anyhow::Result<()> {
    match keys.find_map(|key| Some((key, key.kind.written_by()?))) {
        Some((key, who)) => bail!("{key} is written by {who}; nothing was changed"),
        None => Ok(()),
    }
}

/// Rejects policies of tiers that neither exist nor are applied together with them, because the position of such a
/// policy is undefined. `stored` are the names of the existing tiers.
pub(crate) fn refuse_unknown_tiers(
    stored: impl Iterator<Item = String>,
    objects: &[Object],
) -> anyhow::Result<()> {
    match unknown_tiers(stored, objects).next() {
        Some((object, tier)) => bail!(
            "{}: {}: spec.tier: tier {tier} does not exist; nothing was changed",
            object.origin,
            object.key
        ),
        None => Ok(()),
    }
}

/// The policies of tiers that neither exist nor are given together with them.
pub(crate) fn unknown_tiers(
    stored: impl Iterator<Item = String>,
    objects: &[Object],
) -> impl Iterator<Item = (&Object, &str)> {
    let given =
        objects.iter().filter(|object| object.key.kind == Kind::Tier).map(|object| object.key.name.clone());
    let known: BTreeSet<String> =
        WELL_KNOWN_TIERS.iter().map(|(name, ..)| (*name).to_owned()).chain(stored).chain(given).collect();
    objects.iter().filter_map(move |object| {
        let tier = tier_of(object.key.kind, &object.value)?;
        (!known.contains(tier)).then_some((object, tier))
    })
}

/// The tier of a policy that names one.
pub(crate) fn tier_of(kind: Kind, value: &Value) -> Option<&str> {
    let tier = value.pointer("/spec/tier").filter(|_| OF_CALICO.contains(&kind))?.as_str();
    tier.filter(|tier| !tier.is_empty())
}

/// Reads all manifests. Objects without a namespace belong to this one, and none may belong to another one. `None` if there is any problem: every
/// problem has then been printed.
pub(crate) fn read_all(
    filenames: &Filenames,
    namespace: Option<&str>,
) -> anyhow::Result<Option<Vec<Object>>> {
    let mut objects: Vec<Object> = Vec::new();
    let (mut problems, mut left_out) = (Vec::new(), Vec::new());
    for Manifest { name, text } in filenames.manifests()? {
        match manifest::read_kept(&name, &text?, namespace) {
            Ok((more, skipped)) => {
                objects.extend(more);
                left_out.extend(skipped);
            }
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
    if !left_out.is_empty() {
        let names = left_out.iter().map(|skipped| format!("{} {}", skipped.kind, skipped.name));
        let names = output::first_of(&names.collect::<Vec<_>>(), MOST_NAMES);
        output::error_line(&format!("note: left out, because Tortie keeps no such kind: {names}"));
    }
    if objects.is_empty() && !filenames.skip_empty {
        bail!("there are no objects in the manifests");
    }
    Ok(Some(objects))
}

/// Reads the manifests of a whole cluster, which contain more kinds than Tortie stores. Documents of the kinds to skip (`KIND` or
/// `KIND.GROUP`) count as skipped if they are not read.
///
/// # Errors
/// A file that is named cannot be opened.
pub(crate) fn read_cluster(filenames: &Filenames, skip_kinds: &[String]) -> anyhow::Result<Settled> {
    let mut cluster = Offline::default();
    for Manifest { name, text } in filenames.manifests()? {
        match text {
            Ok(text) => drop(cluster.read(&name, &text)),
            // One of a folder.
            Err(error) if !filenames.names(&name) => {
                // The first cause is the name.
                let causes: Vec<String> = error.chain().skip(1).map(ToString::to_string).collect();
                cluster.not_opened(&name, &causes.join(": "));
            }
            Err(error) => return Err(error),
        }
    }
    let mut settled = cluster.settled();
    let is_to_skip = |api_version: &str, kind: &str| {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        let full = format!("{kind}.{group}");
        let is_of = |word: &String| [kind, &full].iter().any(|own| own.eq_ignore_ascii_case(word));
        !kind.is_empty() && skip_kinds.iter().any(is_of)
    };
    let is_skipped = |unread: &Unread| is_to_skip(&unread.api_version, &unread.kind);
    settled.closed.retain(|policy| !is_to_skip(policy.key.kind.api_version(), policy.key.kind.name()));
    let (skipped, unread) = std::mem::take(&mut settled.unread).into_iter().partition(is_skipped);
    settled.unread = unread;
    let skipped: Vec<Unread> = skipped;
    settled.skipped.extend(skipped.into_iter().map(|unread| Skipped {
        api_version: unread.api_version,
        kind: unread.kind,
        name: unread.name,
        origin: unread.problem.origin,
    }));
    Ok(settled)
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

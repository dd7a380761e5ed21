//! `tortie patch`, `edit`, `label` and `annotate`: changes of stored objects. The result passes the same checks as a
//! manifest, and replaces the object only if nobody has changed it meanwhile.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use json_patch::Patch as JsonPatch;
use serde_json::{Value, json};
use tortie_api::manifest::{self, Object};
use tortie_api::{Key, Kind, spelling};
use tortie_store::{Store, StoreError, Stored};

use crate::apply::{CALICO, without_tier};
use crate::manifests::{is_of_default_tier, other_name, refuse_managed};
use crate::store::{StoreArguments, warn_of_lock};
use crate::targets::{self, Selection, Target};
use crate::{checks, filenames, output};

/// How often a change is tried again after another writer was faster.
const ATTEMPTS: usize = 10;

#[derive(clap::Args)]
pub(crate) struct Patch {
    /// Kinds and names: networkpolicy NAME; pod/NAME
    #[arg(required = true, value_name = "KIND NAME | KIND/NAME")]
    objects: Vec<String>,
    #[command(flatten)]
    selection: Selection,
    /// The patch, as JSON or YAML
    #[arg(
        short,
        long,
        value_name = "PATCH",
        required_unless_present = "patch_file",
        conflicts_with = "patch_file"
    )]
    patch: Option<String>,
    /// A file with the patch, or - for standard input
    #[arg(long, value_name = "FILE")]
    patch_file: Option<PathBuf>,
    /// merge (RFC 7386: fields that replace others, null removes one) or json (RFC 6902: a list of operations)
    #[arg(short = 't', long = "type", value_enum, default_value_t = PatchType::Merge)]
    patch_type: PatchType,
    /// Check the result and say whether it differs, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PatchType {
    Merge,
    Json,
    /// For Calico's kinds the same as merge: their lists have no keys, so calicoctl replaces them, too.
    #[value(hide = true)]
    Strategic,
}

#[derive(clap::Args)]
pub(crate) struct Mark {
    /// Kinds and names, then NAME=VALUE to set and NAME- to remove: pod/a app=web old-
    #[arg(required = true, value_name = "OBJECT … NAME=VALUE NAME-")]
    words: Vec<String>,
    /// Replace values that exist and differ
    #[arg(long)]
    overwrite: bool,
    /// Remove the last word's entry, as NAME- does: pod a app --remove
    #[arg(long, conflicts_with = "overwrite")]
    remove: bool,
    /// Check the result and say whether it differs, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct Edit {
    /// Kind and name: networkpolicy NAME; pod/NAME
    #[arg(required = true, value_name = "KIND NAME | KIND/NAME")]
    objects: Vec<String>,
    /// Check the result and say whether it differs, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    store: StoreArguments,
}

impl Patch {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let text = match (&self.patch, &self.patch_file) {
            (Some(text), _) => text.clone(),
            (None, Some(file)) => filenames::read(file)?,
            (None, None) => bail!("a patch is missing: use --patch or --patch-file"),
        };
        let patch = one_value(&text).context("the patch")?;
        let operations: Option<JsonPatch> = match self.patch_type {
            PatchType::Merge | PatchType::Strategic if !patch.is_object() => {
                bail!("the patch: an object is expected; --type json takes a list")
            }
            PatchType::Merge => None,
            PatchType::Strategic => {
                let is_of_kubernetes = |target: &Target| !target.kind.api_version().starts_with(CALICO);
                if let Some(target) = targets::parse(&self.objects)?.into_iter().find(is_of_kubernetes) {
                    bail!(
                        "--type strategic: lists of {} have keys; use --type merge or json",
                        target.kind.plural()
                    );
                }
                None
            }
            PatchType::Json => Some(serde_json::from_value(patch.clone()).context("the patch")?),
        };
        let change = |stored: &Value| {
            let mut value = stored.clone();
            match &operations {
                Some(operations) => json_patch::patch(&mut value, operations)?,
                None => json_patch::merge(&mut value, &patch),
            }
            Ok(value)
        };
        change_all(&self.store, (&self.selection, &self.objects), self.dry_run, change)
    }
}

impl Mark {
    /// Changes the entries of `metadata.<field>`.
    pub(crate) fn run(self, field: &str) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let mut words = self.words.clone();
        if let Some(last) = words.last_mut().filter(|last| self.remove && !last.contains('=')) {
            last.push('-');
        }
        let is_change = |word: &String| word.contains('=') || word.ends_with('-');
        let (changes, objects): (Vec<String>, Vec<String>) = words.into_iter().partition(is_change);
        let changes = changes_of(&changes)?;
        if self.remove && changes.values().any(Option::is_some) {
            bail!("--remove takes names without values");
        }
        let change = |stored: &Value| marked(stored, field, &changes, self.overwrite);
        change_all(&self.store, (&self.selection, &objects), self.dry_run, change)
    }
}

/// The new values; `None` removes.
fn changes_of(words: &[String]) -> anyhow::Result<BTreeMap<String, Option<String>>> {
    let mut changes = BTreeMap::new();
    for word in words {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word.trim_end_matches('-'), None),
        };
        if name.is_empty() {
            bail!("{word:?} has no name; the form is NAME=VALUE or NAME-");
        }
        if changes.insert(name.to_owned(), value).is_some() {
            bail!("{name} is given twice");
        }
    }
    if changes.is_empty() {
        bail!("nothing to change: give NAME=VALUE or NAME-");
    }
    Ok(changes)
}

fn marked(
    stored: &Value,
    field: &str,
    changes: &BTreeMap<String, Option<String>>,
    overwrite: bool,
) -> anyhow::Result<Value> {
    let mut value = stored.clone();
    let metadata =
        value.get_mut("metadata").and_then(Value::as_object_mut).context("the object has no metadata")?;
    let entries = metadata.entry(field).or_insert_with(|| json!({}));
    if entries.is_null() {
        *entries = json!({});
    }
    let entries = entries.as_object_mut().with_context(|| format!("metadata.{field} is no object"))?;
    for (name, wanted) in changes {
        match (wanted, entries.get(name)) {
            (None, _) => drop(entries.remove(name)),
            (Some(wanted), Some(known)) if known != wanted && !overwrite => {
                bail!("metadata.{field}.{name} is {known}; --overwrite replaces it")
            }
            (Some(wanted), _) => drop(entries.insert(name.clone(), json!(wanted))),
        }
    }
    Ok(value)
}

impl Edit {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let targets = targets::parse(&self.objects)?;
        crate::runtime()?.block_on(async {
            let store = self.store.open_to_change().await?;
            let keys = self.selection.keys(&*store, &targets).await?;
            refuse_managed(keys.iter())?;
            warn_of_lock(&*store).await;
            let mut problems = Problems::default();
            let count = keys.len();
            for key in keys {
                let mut written = None;
                match edit_one(&*store, &key, self.dry_run, &mut written).await {
                    Ok(differs) => output::line(&format!("{key} {}", word(differs, self.dry_run))),
                    Err(problem) => {
                        problems.add(&key, &problem);
                        if let Some(text) = written {
                            let path = crate::editor::keep(&text, "yaml")?;
                            output::error_line(&format!("what you wrote is in {}", path.display()));
                        }
                    }
                }
            }
            Ok(problems.exit_code(count))
        })
    }
}

/// Edits one object; returns whether it differs now. A text that could not be stored is left in `written`.
async fn edit_one(
    store: &dyn Store,
    key: &Key,
    dry_run: bool,
    written: &mut Option<String>,
) -> anyhow::Result<bool> {
    refuse_kind(key)?;
    let Stored { key, value: old, version, .. } = existing(store, key).await?;
    let text = crate::editor::edit(&tortie_api::to_yaml(&old), "yaml")?;
    let text = written.insert(text);
    let new = one_value(text).context("the edited object")?;
    if new == old {
        return Ok(false);
    }
    check(store, &key, &old, &new).await?;
    if dry_run {
        return Ok(true);
    }
    match store.update(&key, new, &version).await {
        Ok(_) => Ok(true),
        Err(StoreError::Conflict(_)) => bail!("somebody else has changed it meanwhile; edit it again"),
        Err(error) => Err(error.into()),
    }
}

/// Rejects a kind that another command changes.
fn refuse_kind(key: &Key) -> anyhow::Result<()> {
    match key.kind {
        Kind::IpamConfig => bail!("tortie ipam configure changes it"),
        _ => Ok(()),
    }
}

/// Changes objects one after another; a problem with one does not affect the others.
fn change_all(
    store: &StoreArguments,
    (selection, words): (&Selection, &[String]),
    dry_run: bool,
    change: impl Fn(&Value) -> anyhow::Result<Value>,
) -> anyhow::Result<ExitCode> {
    let targets = targets::parse(words)?;
    crate::runtime()?.block_on(async {
        let store = store.open_to_change().await?;
        let keys = selection.keys(&*store, &targets).await?;
        refuse_managed(keys.iter())?;
        warn_of_lock(&*store).await;
        let mut problems = Problems::default();
        let count = keys.len();
        for key in keys {
            match change_one(&*store, &key, dry_run, &change).await {
                Ok(differs) => output::line(&format!("{key} {}", word(differs, dry_run))),
                Err(error) => problems.add(&key, &error),
            }
        }
        Ok(problems.exit_code(count))
    })
}

/// The objects that were not changed.
#[derive(Default)]
struct Problems {
    count: usize,
    /// Those about which the datastore gave no answer.
    unanswered: usize,
}

impl Problems {
    fn add(&mut self, key: &Key, error: &anyhow::Error) {
        self.count += 1;
        self.unanswered += usize::from(matches!(error.downcast_ref(), Some(StoreError::Unavailable(_))));
        output::error(&format!("{key}: {error:#}"));
    }

    /// The exit code, for this number of objects.
    fn exit_code(&self, objects: usize) -> ExitCode {
        match self {
            Self { count: 0, .. } => ExitCode::SUCCESS,
            Self { unanswered, .. } if *unanswered == objects => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }
}

/// What happened to an object.
fn word(differs: bool, dry_run: bool) -> &'static str {
    match (differs, dry_run) {
        (false, _) => "unchanged",
        (true, false) => "changed",
        (true, true) => "changed (dry run)",
    }
}

/// Changes one object; returns whether it differs now, or would with `dry_run`.
async fn change_one(
    store: &dyn Store,
    key: &Key,
    dry_run: bool,
    change: &impl Fn(&Value) -> anyhow::Result<Value>,
) -> anyhow::Result<bool> {
    refuse_kind(key)?;
    for _ in 0..ATTEMPTS {
        let Stored { key, value: old, version, .. } = existing(store, key).await?;
        let new = change(&old)?;
        if new == old {
            return Ok(false);
        }
        check(store, &key, &old, &new).await?;
        if dry_run {
            return Ok(true);
        }
        match store.update(&key, new, &version).await {
            Ok(_) => return Ok(true),
            // Another writer was faster: the change is made again on the new object.
            Err(StoreError::Conflict(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bail!("others change it all the time; try again")
}

/// The only document of a YAML or JSON text.
fn one_value(text: &str) -> anyhow::Result<Value> {
    let documents = tortie_api::from_yaml(text).map_err(anyhow::Error::msg)?;
    match <[Value; 1]>::try_from(documents) {
        Ok([value]) => Ok(value),
        Err(documents) => bail!("one document is expected, not {}", documents.len()),
    }
}

/// The object, by either name of a policy in tier default.
async fn existing(store: &dyn Store, key: &Key) -> anyhow::Result<Stored> {
    if let Some(stored) = store.get(key).await? {
        return Ok(stored);
    }
    if let Some(other) = other_name(key)
        && let Some(stored) = store.get(&other).await?
        && is_of_default_tier(&stored.value)
    {
        return Ok(stored);
    }
    bail!("it does not exist")
}

/// Rejects what `apply` rejects, and another identity.
async fn check(store: &dyn Store, key: &Key, old: &Value, value: &Value) -> anyhow::Result<()> {
    for field in ["uid", "creationTimestamp", "resourceVersion"] {
        let of = |object: &Value| {
            object.pointer(&format!("/metadata/{field}")).filter(|value| !value.is_null()).cloned()
        };
        if of(old) != of(value) {
            bail!("metadata.{field} cannot be changed");
        }
    }
    let problems = |problems: Vec<manifest::Problem>| {
        let texts: Vec<String> =
            problems.into_iter().map(|problem| format!("{}: {}", problem.field, problem.problem)).collect();
        anyhow::anyhow!("{}; nothing was changed", texts.join("; "))
    };
    // Words that kubectl has stored in another case may stay as they are.
    let mut judged = value.clone();
    spelling::correct_known(key.kind, &mut judged, old);
    let objects: Vec<Object> = manifest::read("the new object", &judged.to_string()).map_err(problems)?;
    match &objects[..] {
        // The name of a policy may be another one than that of its key, if Calico has stored it.
        [object]
            if Key { name: key.name.clone(), ..object.key.clone() } == *key
                && object.value["metadata"]["name"] == old["metadata"]["name"] => {}
        _ => bail!("its kind, name and namespace cannot be changed"),
    }
    checks::refuse_fields(&objects)?;
    without_tier(store, &objects).await?;
    checks::refuse(store, &objects, checks::Writing::Replaced).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_set_removed_and_kept() {
        let object = json!({"metadata": {"name": "a", "labels": {"app": "web", "old": "x"}}});
        let mark = |words: &str, overwrite| {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            marked(&object, "labels", &changes_of(&words)?, overwrite)
        };
        let labels = |words, overwrite| mark(words, overwrite).unwrap()["metadata"]["labels"].clone();
        assert_eq!(labels("tier=a old-", false), json!({"app": "web", "tier": "a"}));
        assert_eq!(labels("app=web absent-", false), json!({"app": "web", "old": "x"}));
        assert_eq!(labels("app=db", true), json!({"app": "db", "old": "x"}));
        assert_eq!(labels("empty=", false)["empty"], "");
        for (words, expected) in
            [("app=db", "--overwrite replaces it"), ("=x", "has no name"), ("a=1 a-", "given twice")]
        {
            assert!(mark(words, false).unwrap_err().to_string().contains(expected), "{words}");
        }
        assert!(changes_of(&[]).is_err());
        let bare = json!({"metadata": {"name": "a", "annotations": null}});
        let changes = changes_of(&["a=1".to_owned()]).unwrap();
        assert_eq!(
            marked(&bare, "annotations", &changes, false).unwrap()["metadata"]["annotations"],
            json!({"a": "1"})
        );
    }
}

//! `tortie apply`, `create` and `replace`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use tortie_api::manifest::{Object, Preconditions};
use tortie_api::{Key, Kind, Position, Positions};
use tortie_store::{Applied, Store, StoreError, Stored, applied, replaced, without_record};

use crate::checks::Writing;
use crate::concerned::Policies;
use crate::filenames::Filenames;
use crate::filter::LabelFilter;
use crate::manifests::{
    NOT_UNDERSTOOD, is_of_default_tier, other_name, read_all, refuse_managed, refuse_unknown_tiers, rename,
    stored_otherwise, stored_under_tier,
};
use crate::output;
use crate::store::{StoreArguments, list, warn_of_lock};

/// The group of Calico's kinds.
pub(crate) const CALICO: &str = "projectcalico.org/";

/// What a command expects of the objects of manifests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expects {
    /// Objects may exist or not.
    Either,
    /// No object exists.
    New,
    /// All objects exist.
    Existing,
}

#[derive(clap::Args)]
#[command(mut_arg("files", |files| files.required_unless_present("kustomize")))]
pub(crate) struct Apply {
    #[command(flatten)]
    filenames: Filenames,
    /// The namespace of objects that name none; no object may name another one
    #[arg(short, long)]
    namespace: Option<String>,
    /// With create: leave objects alone that exist
    #[arg(long)]
    skip_exists: bool,
    /// With apply: then delete the objects that have these labels and are not in the manifests, of the kinds and namespaces in
    /// the manifests
    #[arg(long, requires = "selector")]
    prune: bool,
    /// The labels for --prune, which all objects of the manifests need, such as app=web
    #[arg(short = 'l', long, value_name = "SELECTOR", requires = "prune")]
    selector: Option<LabelFilter>,
    /// Check the objects and show what would change, and change nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    /// Wait until the objects are in force on every node that they concern
    #[arg(long)]
    wait: bool,
    /// The maximum number of seconds to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "wait")]
    timeout: u64,
    #[command(flatten)]
    store: StoreArguments,
}

impl Apply {
    pub(crate) fn run(self, expects: Expects) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(mut objects) = read_all(&self.filenames, self.namespace.as_deref())? else {
            return Ok(ExitCode::from(NOT_UNDERSTOOD));
        };
        refuse_managed(objects.iter().map(|object| &object.key))?;
        if let Err(error) = crate::checks::refuse_fields(&objects) {
            output::error(&error.to_string());
            return Ok(ExitCode::from(NOT_UNDERSTOOD));
        }
        objects.sort_by_key(|object| object.key.kind.apply_order());
        crate::runtime()?.block_on(async {
            let store = self.store.open_to_change().await?;
            // Before anything is read or written: another store may be served before the end of the wait.
            let epoch = if self.wait { store.epoch().await? } else { None };
            warn_of_lock(&*store).await;
            check(&*store, &mut objects, expects).await?;
            if self.skip_exists {
                anyhow::ensure!(expects == Expects::New, "--skip-exists has an effect with create only");
                skip_existing(&*store, &mut objects).await?;
            }
            expects.check(&*store, &objects).await?;
            let pruned = match self.selector.as_ref().filter(|_| self.prune) {
                Some(selector) => to_prune(&*store, expects, &objects, selector).await?,
                None => Vec::new(),
            };
            let policies = if self.wait { Policies::of(&*store, &objects).await? } else { None };
            let mut positions = Positions::default();
            for (done, object) in objects.iter().enumerate() {
                if self.dry_run {
                    let word = expects.planned(&*store, object).await?;
                    output::line(&format!("{} {word} (dry run)", object.key));
                    continue;
                }
                let applied = match expects {
                    // Somebody else may have created it since the check.
                    Expects::New => tortie_store::create(&*store, object).await,
                    Expects::Either => store.apply(object).await,
                    Expects::Existing => tortie_store::replace(&*store, object).await,
                };
                let applied = applied.with_context(|| {
                    // Those that follow may depend on this one.
                    for object in objects.iter().skip(done + 1) {
                        output::error_line(&format!("{} not tried", object.key));
                    }
                    format!("{}: {}", object.origin, object.key)
                })?;
                output::line(&format!("{} {}", object.key, expects.word(applied)));
                positions.advance(object.key.kind, applied.position());
            }
            for key in pruned {
                let done = match self.dry_run {
                    true => Some(format!("{key} would be pruned")),
                    false => crate::delete::remove(&store, &key, "pruned")
                        .await
                        .with_context(|| key.to_string())?,
                };
                // Somebody else may have deleted it.
                output::line(&done.unwrap_or_else(|| format!("{key} pruned")));
            }
            crate::checks::warn(&*store, &objects).await?;
            if self.wait {
                let applied: Vec<Key> = objects.into_iter().map(|object| object.key).collect();
                let patience = Duration::from_secs(self.timeout);
                let slices = self.store.lab().is_some();
                let written = (positions, epoch);
                return crate::wait::in_force(&*store, (&applied, policies), written, (patience, slices))
                    .await;
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// Checks objects against those that are stored, and gives policies of tier default the names under which they are stored.
pub(crate) async fn check(store: &dyn Store, objects: &mut [Object], expects: Expects) -> anyhow::Result<()> {
    // Of the two names of a policy in tier default, the manifests may have both.
    let names: BTreeSet<Key> = objects.iter().map(|object| object.key.clone()).collect();
    for object in objects.iter_mut().filter(|object| is_of_default_tier(&object.value)) {
        let both = other_name(&object.key).filter(|other| names.contains(other));
        anyhow::ensure!(
            both.is_none(),
            "{}: {}: the manifests have it under its other name, too: a policy of tier default is one with and without \
             \"default.\" before its name; nothing was changed",
            object.origin,
            object.key
        );
        if let Some(stored) = stored_otherwise(store, &object.key).await? {
            rename(object, stored.key, &stored.value);
        }
    }
    for object in objects.iter_mut().filter(|object| !is_of_default_tier(&object.value)) {
        if let Some(stored) = stored_under_tier(store, object).await? {
            rename(object, stored.key, &stored.value);
        }
    }
    refuse_outdated(store, objects).await?;
    without_tier(store, objects).await?;
    let how = match expects {
        Expects::Existing => Writing::Replaced,
        Expects::New | Expects::Either => Writing::Merged,
    };
    crate::checks::refuse(store, objects, how).await
}

/// Rejects manifests that mean other objects than the stored ones.
async fn refuse_outdated(store: &dyn Store, objects: &[Object]) -> anyhow::Result<()> {
    let mut outdated = false;
    for object in objects.iter().filter(|object| object.preconditions != Preconditions::default()) {
        if let Some(current) = store.get(&object.key).await?
            && let Err(conflict) = tortie_store::check_preconditions(object, &current)
        {
            output::error(&format!("{}: {conflict}", object.origin));
            outdated = true;
        }
    }
    anyhow::ensure!(!outdated, "nothing was changed");
    Ok(())
}

impl Expects {
    /// Rejects the manifests as a whole if an object exists that should not, or does not exist and should.
    async fn check(self, store: &dyn Store, objects: &[Object]) -> anyhow::Result<()> {
        if self == Self::Either {
            return Ok(());
        }
        let mut wrong = Vec::new();
        for object in objects {
            let exists = store.get(&object.key).await?.is_some();
            if exists != (self == Self::Existing) {
                wrong.push(object);
            }
        }
        let problem = if self == Self::New { "exists already" } else { "does not exist" };
        for object in &wrong {
            output::error(&format!("{}: {} {problem}", object.origin, object.key));
        }
        anyhow::ensure!(
            wrong.is_empty(),
            "nothing was changed; tortie apply takes both new and existing objects"
        );
        Ok(())
    }

    /// What would happen to the object.
    async fn planned(self, store: &dyn Store, object: &Object) -> Result<&'static str, StoreError> {
        let Some(Stored { value, position, .. }) = store.get(&object.key).await? else {
            return Ok(self.word(Applied::Created(Position(0))));
        };
        let value_over = if self == Self::Existing { replaced } else { applied };
        let mut after = value_over(&object.value, Some(&value), object.key.kind);
        store.storage_form().fill(object.key.kind, &mut after);
        let differs = without_record(after) != without_record(value);
        Ok(self.word(if differs { Applied::Configured(position) } else { Applied::Unchanged(position) }))
    }

    fn word(self, applied: Applied) -> &'static str {
        match applied {
            Applied::Created(_) => "created",
            Applied::Configured(_) if self == Self::Existing => "replaced",
            Applied::Configured(_) => "configured",
            Applied::Unchanged(_) => "unchanged",
        }
    }
}

/// The stored objects that are not in the manifests, of their kinds and namespaces, with the labels.
async fn to_prune(
    store: &dyn Store,
    expects: Expects,
    objects: &[Object],
    selector: &LabelFilter,
) -> anyhow::Result<Vec<Key>> {
    anyhow::ensure!(expects == Expects::Either, "--prune has an effect with apply only");
    // The next command with fewer objects would not delete it.
    if let Some(object) = objects.iter().find(|object| !selector.matches(&object.value)) {
        anyhow::bail!(
            "{}: {} does not have the labels of --prune; nothing was changed",
            object.origin,
            object.key
        );
    }
    let given: BTreeSet<&Key> = objects.iter().map(|object| &object.key).collect();
    let places: BTreeSet<(Kind, &str)> = given.iter().map(|key| (key.kind, key.namespace.as_str())).collect();
    let kinds: BTreeSet<Kind> = places.iter().map(|(kind, _)| *kind).collect();
    let mut pruned = Vec::new();
    for kind in kinds {
        // A Namespace goes with everything in it, and Pods with their workloads.
        if !kind.is_policy() && !kind.api_version().starts_with(CALICO) {
            output::error_line(&format!("note: {} are not pruned; use tortie delete", kind.plural()));
            continue;
        }
        let stored = list(store, kind).await?.into_iter();
        let left = stored.filter(|stored| {
            let is_here = places.contains(&(kind, stored.key.namespace.as_str()));
            is_here && !given.contains(&stored.key) && selector.matches(&stored.value)
        });
        pruned.extend(left.map(|stored| stored.key));
    }
    pruned.sort_by_key(|key| std::cmp::Reverse(key.kind.apply_order()));
    crate::delete::refuse(store, &pruned).await?;
    Ok(pruned)
}

/// Removes the objects that exist.
async fn skip_existing(store: &dyn Store, objects: &mut Vec<Object>) -> Result<(), StoreError> {
    let mut new = Vec::new();
    for object in std::mem::take(objects) {
        match store.get(&object.key).await? {
            None => new.push(object),
            Some(_) => output::line(&format!("{} skipped: it exists", object.key)),
        }
    }
    *objects = new;
    Ok(())
}

/// Rejects policies of tiers that neither exist nor are applied together with them.
pub(crate) async fn without_tier(store: &dyn Store, objects: &[Object]) -> anyhow::Result<()> {
    let stored = list(store, Kind::Tier).await?.into_iter().map(|stored| stored.key.name);
    refuse_unknown_tiers(stored, objects)
}

//! `tortie get --watch`: the objects, and then each change.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use anyhow::bail;
use futures::StreamExt;
use tortie_api::{Key, Kind};
use tortie_store::{Change, Store, StoreError, Stored};

use super::format::Printer;
use super::{Get, Target, targets};
use crate::output;

/// Follows the targets until the command is interrupted.
pub(super) async fn run(
    store: &dyn Store,
    get: &Get,
    targets: &[Target],
    printer: &Printer,
) -> anyhow::Result<ExitCode> {
    let interests = targets.iter().map(|target| targets::interest(target, get.namespace())).collect();
    let mut changes = store.follow(interests);
    let mut shown: BTreeMap<Key, Stored> = BTreeMap::new();
    let mut listing: BTreeSet<Kind> = targets.iter().map(|target| target.kind).collect();
    let is_wanted =
        |stored: &Stored| targets.iter().any(|target| target.includes(&stored.key)) && get.fits(stored);
    while let Some(change) = changes.next().await {
        if output::has_failed() {
            return Ok(ExitCode::FAILURE);
        }
        let is_listed = listing.is_empty();
        let (event, stored) = match change {
            Change::Put(stored) if is_wanted(&stored) => {
                let was_there = shown.insert(stored.key.clone(), stored.clone()).is_some();
                (if was_there { "MODIFIED" } else { "ADDED" }, stored)
            }
            Change::Put(Stored { key, .. }) | Change::Gone { key, .. } => match shown.remove(&key) {
                Some(last) => ("DELETED", last),
                None => continue,
            },
            Change::InSync(kind, _) => {
                listing.remove(&kind);
                if !is_listed && listing.is_empty() {
                    print_all(printer, targets, &shown, get.output_watch_events)?;
                }
                continue;
            }
            Change::Unavailable(kind, error) if !is_listed => match error {
                // It may appear later.
                StoreError::KindAbsent(_) => {
                    listing.remove(&kind);
                    continue;
                }
                error => bail!("{kind}: {error}"),
            },
            Change::Unavailable(..) | Change::Progress(..) | Change::Restarted(_) => continue,
        };
        if is_listed {
            printer.print_change(&stored, get.output_watch_events.then_some(event))?;
        }
    }
    bail!("the datastore ended the watch")
}

/// Prints what exists at the beginning.
fn print_all(
    printer: &Printer,
    targets: &[Target],
    shown: &BTreeMap<Key, Stored>,
    with_events: bool,
) -> anyhow::Result<()> {
    if with_events || !printer.is_table() {
        return shown
            .values()
            .try_for_each(|stored| printer.print_change(stored, with_events.then_some("ADDED")));
    }
    let of = |target: &Target| {
        let items = shown.values().filter(|stored| stored.key.kind == target.kind);
        (target.kind, items.cloned().collect())
    };
    printer.print(targets.iter().map(of).collect(), false)
}

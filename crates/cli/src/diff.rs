//! `tortie diff`: what applying manifests would change, in the stored objects and in verdicts.

use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use serde_json::{Value, json};
use similar::TextDiff;
use tortie_api::manifest::Object;
use tortie_api::{Key, to_yaml};
use tortie_store::{Store, StoreError, applied, without_record};

use crate::explain::{ALLOWED, DENIED, coloured};
use crate::filenames::Filenames;
use crate::manifests::{NOT_UNDERSTOOD, read_all, refuse_managed};
use crate::output::{self, Format};
use crate::store::StoreArguments;
use crate::{apply, checks, planned, preview, snapshot};

const HUNK: Style = AnsiColor::Cyan.on_default();
/// The number of unchanged lines around a change.
const CONTEXT: usize = 3;

#[derive(clap::Args)]
#[command(mut_arg("files", |files| files.required_unless_present("kustomize")))]
pub(crate) struct Diff {
    #[command(flatten)]
    filenames: Filenames,
    /// Do not compute which verdicts change
    #[arg(long)]
    no_verdicts: bool,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    store: StoreArguments,
}

/// An object that `apply` would create or change.
struct Changed {
    key: Key,
    origin: String,
    /// `None` if it would be created.
    before: Option<Value>,
    after: Value,
}

impl Diff {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(mut objects) = read_all(&self.filenames, None)? else {
            return Ok(ExitCode::from(NOT_UNDERSTOOD));
        };
        refuse_managed(objects.iter().map(|object| &object.key))?;
        checks::refuse_fields(&objects)?;
        objects.sort_by_key(|object| object.key.kind.apply_order());
        let changed = crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            apply::check(&*store, &mut objects, apply::Expects::Either).await?;
            anyhow::Ok(changed(&*store, &objects).await?)
        })?;
        if self.output == Format::Text {
            changed.iter().for_each(Changed::print);
        }
        // Only objects that differ can change verdicts.
        let verdicts = match self.no_verdicts || changed.is_empty() {
            true => None,
            false => {
                let read = snapshot::of_store(&self.store)?;
                let after = planned::after(&read.snapshot, objects, &[], false, false)?;
                Some((read, after))
            }
        };
        match (self.output, verdicts) {
            (Format::Text, Some((read, after))) => {
                output::line("verdicts:");
                preview::print_changes(&read, &after);
            }
            (Format::Text, None) => {}
            (Format::Json, verdicts) => {
                let objects: Vec<Value> = changed.iter().map(Changed::document).collect();
                let verdicts = verdicts.map(|(read, after)| preview::changes_document(&read, &after));
                let document = json!({"objects": objects, "verdicts": verdicts});
                output::line(&serde_json::to_string_pretty(&document)?);
            }
        }
        // Like diff: 0 if nothing changes, 1 if something does, 2 if there is no answer.
        Ok(if changed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The objects that differ from stored ones after the merge that `apply` makes.
async fn changed(store: &dyn Store, objects: &[Object]) -> Result<Vec<Changed>, StoreError> {
    let mut changed = Vec::new();
    for object in objects {
        let before = store.get(&object.key).await?.map(|stored| stored.value);
        let mut after = without_record(applied(&object.value, before.as_ref(), object.key.kind));
        store.storage_form().fill(object.key.kind, &mut after);
        let before = before.map(without_record);
        if before.as_ref() != Some(&after) {
            changed.push(Changed {
                key: object.key.clone(),
                origin: object.origin.to_string(),
                before,
                after,
            });
        }
    }
    Ok(changed)
}

impl Changed {
    fn print(&self) {
        let before = self.before.as_ref().map(to_yaml).unwrap_or_default();
        let after = to_yaml(&self.after);
        let stored = if self.before.is_some() { "stored" } else { "does not exist" };
        output::line(&format!("--- {} ({stored})", self.key));
        output::line(&format!("+++ {} ({})", self.key, self.origin));
        let difference = TextDiff::from_lines(before.as_str(), after.as_str());
        let text = difference.unified_diff().context_radius(CONTEXT).to_string();
        for line in text.lines() {
            let style = match line.chars().next() {
                Some('+') => Some(ALLOWED),
                Some('-') => Some(DENIED),
                Some('@') => Some(HUNK),
                _ => None,
            };
            output::line(&style.map_or_else(|| line.to_owned(), |style| coloured(style, line)));
        }
    }

    fn document(&self) -> Value {
        let before = self.before.clone().unwrap_or(Value::Null);
        json!({"object": self.key.to_string(), "origin": self.origin, "before": before, "after": self.after})
    }
}

//! `tortie datastore export`.

use std::collections::BTreeMap;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::Value;
use tempfile::NamedTempFile;
use tortie_api::Kind;
use tortie_api::calico::WorkloadEndpoint;
use tortie_store::{Endpoints, Stored, is_locked};

use super::document::{self, ExportFormat};
use super::exported::Exported;
use super::{Owner, is_kept, nodes, owner};
use crate::output;
use crate::store::{StoreArguments, list};

#[derive(clap::Args)]
pub(crate) struct Export {
    /// The new file; by default standard output
    #[arg(short, long, value_name = "FILE", default_value = "-", hide_default_value = true)]
    output: PathBuf,
    /// The format of the file: tortie, or with `datastore migrate` calico
    #[arg(long, value_enum, hide_default_value = true)]
    format: Option<ExportFormat>,
    /// Export a datastore that is not locked. What changes meanwhile may be missing, or not fit together
    #[arg(long)]
    unlocked: bool,
    #[command(flatten)]
    store: StoreArguments,
}

impl Export {
    /// Exports in this format, if the command line names none.
    pub(super) fn run(self, usual: ExportFormat) -> anyhow::Result<ExitCode> {
        let format = self.format.unwrap_or(usual);
        let objects = crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            if !self.unlocked && !is_locked(&*store).await? {
                bail!(
                    "the datastore is not locked, so nodes may change it meanwhile: run tortie datastore lock first, or use \
                     --unlocked for a copy that may not fit together"
                );
            }
            let objects = read(&*store).await?;
            if !self.unlocked && !is_locked(&*store).await? {
                bail!("somebody has unlocked the datastore meanwhile; lock it, and export again");
            }
            Ok(objects)
        })?;
        if self.output == Path::new("-") {
            let mut text = Vec::new();
            document::write(&mut text, &objects, format)?;
            output::data(&String::from_utf8(text)?);
            return Ok(ExitCode::SUCCESS);
        }
        write(&self.output, &objects, format).with_context(|| self.output.display().to_string())?;
        let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
        for object in objects.iter().filter(|object| format.has(&object.key)) {
            *kinds.entry(object.key.kind.plural()).or_default() += 1;
        }
        let counts = kinds.iter().map(|(kind, count)| vec![(*kind).to_owned(), count.to_string()]);
        output::columns(
            &std::iter::once(vec!["KIND".to_owned(), "EXPORTED".to_owned()])
                .chain(counts)
                .collect::<Vec<_>>(),
        );
        Ok(ExitCode::SUCCESS)
    }
}

/// What a copy of the datastore needs.
pub(super) async fn read(store: &dyn Endpoints) -> anyhow::Result<Vec<Exported>> {
    let derives = store.derives_from_kubernetes();
    let mut objects = Vec::new();
    let kinds: Vec<Kind> = Kind::all().filter(|kind| owner(*kind) != Owner::Component).collect();
    let bar = crate::progress::bar("reading", kinds.len());
    for kind in kinds {
        bar.inc(1);
        let items = list(store, kind).await.with_context(|| format!("reading {}", kind.plural()))?;
        let kept = items.into_iter().filter(|stored| is_kept(&stored.key, derives));
        let value_of = |stored: &Stored| match derives && kind == Kind::Node {
            true => nodes::from_kubernetes(stored),
            false => as_stored(stored.value.clone()),
        };
        objects.extend(kept.map(|stored| Exported { value: value_of(&stored), key: stored.key }));
    }
    bar.finish_and_clear();
    objects.sort_by(|a, b| (a.key.kind.apply_order(), &a.key).cmp(&(b.key.kind.apply_order(), &b.key)));
    Ok(objects)
}

/// Without the mark of an endpoint whose kubelet has not reported its addresses: in another datastore, no kubelet would take it away.
fn as_stored(mut value: Value) -> Value {
    if let Some(Value::Object(annotations)) = value.pointer_mut("/metadata/annotations") {
        annotations.remove(WorkloadEndpoint::UNREPORTED);
    }
    value
}

/// Writes a file that only its owner may read: policies tell an attacker a lot. A file that is not complete never has the name.
fn write(file: &Path, objects: &[Exported], format: ExportFormat) -> anyhow::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut partial = BufWriter::new(NamedTempFile::new_in(folder)?);
    document::write(&mut partial, objects, format)?;
    let partial = partial.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    partial.as_file().sync_all()?;
    partial.persist_noclobber(file).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_mark_of_unreported_addresses_is_not_exported() {
        let marked = json!({"metadata": {"annotations": {(WorkloadEndpoint::UNREPORTED): "true", "a": "b"}}});
        assert_eq!(as_stored(marked), json!({"metadata": {"annotations": {"a": "b"}}}));
        for other in [json!({"metadata": {"name": "x"}}), json!({}), json!(1)] {
            assert_eq!(as_stored(other.clone()), other);
        }
    }
}

//! `tortie apply` and `tortie delete`.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use tortie_api::manifest::{self, Object};
use tortie_api::{Key, Kind};
use tortie_store::{Applied, Store, StoreError};

use crate::output;
use crate::store::StoreArguments;

#[derive(clap::Args)]
pub(crate) struct Apply {
    /// Manifests: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Wait until it is in force on every node
    #[arg(long)]
    wait: bool,
    /// How many seconds to wait at the most
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
    /// Their namespace
    #[arg(short, long, default_value = "default")]
    namespace: String,
    #[command(flatten)]
    store: StoreArguments,
}

impl Apply {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(mut objects) = read_all(&self.files)? else { return Ok(ExitCode::FAILURE) };
        objects.sort_by_key(|object| object.key.kind);
        crate::runtime()?.block_on(async {
            let store = self.store.open()?;
            let mut latest = 0;
            for object in &objects {
                let applied = tortie_store::apply(&*store, object).await;
                let applied = applied.with_context(|| format!("{}: {}", object.origin, object.key))?;
                let word = match applied {
                    Applied::Created(_) => "created",
                    Applied::Configured(_) => "configured",
                    Applied::Unchanged(_) => "unchanged",
                };
                output::line(&format!("{} {word}", object.key));
                latest = latest.max(applied.revision());
            }
            if self.wait {
                let applied: Vec<Key> = objects.into_iter().map(|object| object.key).collect();
                let patience = Duration::from_secs(self.timeout);
                return crate::wait::in_force(&*store, &applied, latest, patience).await;
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl Delete {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let keys: Vec<Key> = match &self.kind {
            None => {
                let Some(mut objects) = read_all(&self.files)? else { return Ok(ExitCode::FAILURE) };
                objects.sort_by_key(|object| std::cmp::Reverse(object.key.kind));
                objects.into_iter().map(|object| object.key).collect()
            }
            Some(word) => {
                let kind = Kind::from_word(word).with_context(|| format!("{word:?} is no kind of object"))?;
                let namespace = if kind.namespaced() { self.namespace.clone() } else { String::new() };
                self.names.iter().map(|name| Key::namespaced(kind, &namespace, name)).collect()
            }
        };
        crate::runtime()?.block_on(async {
            let store = self.store.open()?;
            let mut missing = false;
            for key in keys {
                for key in with_contents(&*store, key).await? {
                    match store.delete(&key, None).await {
                        Ok(_) => output::line(&format!("{key} deleted")),
                        Err(error @ StoreError::NotFound(_)) => {
                            output::error(&error.to_string());
                            missing = true;
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
            }
            Ok(if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        })
    }
}

/// The object, after what lies in it where it is a namespace. WorkloadEndpoints are left to the nodes, which delete
/// them when the pod's interface is gone.
async fn with_contents(store: &dyn Store, key: Key) -> anyhow::Result<Vec<Key>> {
    let mut keys = Vec::new();
    if key.kind == Kind::Namespace {
        for kind in Kind::all().filter(|kind| kind.namespaced() && *kind != Kind::WorkloadEndpoint) {
            let items = store.list(kind).await?.items;
            keys.extend(
                items.into_iter().map(|stored| stored.key).filter(|inner| inner.namespace == key.name),
            );
        }
    }
    keys.push(key);
    Ok(keys)
}

/// Reads all manifests. `None` if anything is wrong with any of them: every problem has then been printed.
fn read_all(paths: &[PathBuf]) -> anyhow::Result<Option<Vec<Object>>> {
    let mut objects: Vec<Object> = Vec::new();
    let mut problems = Vec::new();
    for file in files(paths)? {
        let name = file.display().to_string();
        match manifest::read(&name, &read(&file)?) {
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
    for problem in &problems {
        output::error_line(problem);
    }
    if !problems.is_empty() {
        output::error(&format!("{} problem(s); nothing was changed", problems.len()));
        return Ok(None);
    }
    if objects.is_empty() {
        bail!("there are no objects in the manifests");
    }
    Ok(Some(objects))
}

fn read(file: &Path) -> anyhow::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

/// The files named, and those in the folders named whose names end like manifests.
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
        inside.sort();
        all.extend(inside);
    }
    Ok(all)
}

//! `tortie get`.

mod columns;
mod format;
mod go_template;
mod headings;
mod template;
mod watch;

use std::collections::BTreeMap;
use std::process::ExitCode;

use tortie_api::{Key, Kind};
use tortie_store::{Store, Stored};

use crate::filenames::Filenames;
use crate::filter::{FieldFilter, LabelFilter};
use crate::manifests::{NOT_UNDERSTOOD, read_all, stored_otherwise};
use crate::output;
use crate::store::StoreArguments;
use crate::targets::{self, Target};
pub(crate) use columns::age;
use format::{GetFormat, Printer};
use template::Path;

#[derive(clap::Args)]
pub(crate) struct Get {
    #[command(flatten)]
    filenames: Filenames,
    /// Kinds and names: pods; pods,services; pod NAME; pod/NAME service/NAME; all (what decides about packets)
    #[arg(required_unless_present_any = ["files", "kustomize"], conflicts_with_all = ["files", "kustomize"], value_name = "KIND | KIND/NAME")]
    objects: Vec<String>,
    /// Only this namespace; all namespaces if none is given
    #[arg(short, long, conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// All namespaces, as without -n
    #[arg(short = 'A', long, short_alias = 'a')]
    all_namespaces: bool,
    /// Only objects with these labels, such as app=web,tier in (a,b),!old
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<LabelFilter>,
    /// Only objects with these fields, such as spec.nodeName=one,status.phase!=Running
    #[arg(long, value_name = "SELECTOR")]
    field_selector: Option<FieldFilter>,
    /// The output format: wide, json, yaml, name, jsonpath=TEMPLATE, jsonpath-file=FILE, go-template=TEMPLATE,
    /// go-template-file=FILE, custom-columns=HEADER:PATH,…
    #[arg(short, long, default_value = "table", hide_default_value = true, value_parser = GetFormat::parse)]
    output: GetFormat,
    /// Sort by this field, such as .metadata.creationTimestamp
    #[arg(long, value_name = "PATH", value_parser = Path::parse)]
    sort_by: Option<Path>,
    /// Show labels as the last column
    #[arg(long)]
    show_labels: bool,
    /// Leave out what only this cluster can use, such as uid and resourceVersion: the output is for another cluster
    #[arg(long)]
    export: bool,
    /// Show no header
    #[arg(long)]
    no_headers: bool,
    /// Show changes until interrupted
    #[arg(short, long, conflicts_with_all = ["sort_by", "files", "kustomize"])]
    watch: bool,
    /// With --watch: show what happened to each object (ADDED, MODIFIED, DELETED)
    #[arg(long, requires = "watch")]
    output_watch_events: bool,
    #[command(flatten)]
    store: StoreArguments,
}

impl Get {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let wanted = match self.filenames.is_empty() {
            true => Wanted::Targets(targets::parse(&self.objects)?),
            false => match read_all(&self.filenames, self.namespace.as_deref())? {
                Some(objects) => Wanted::Keys(objects.into_iter().map(|object| object.key).collect()),
                None => return Ok(ExitCode::from(NOT_UNDERSTOOD)),
            },
        };
        let printer = Printer::new(&self, &wanted.kinds())?;
        crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            let (mut groups, missing) = match &wanted {
                Wanted::Targets(targets) if self.watch => {
                    return watch::run(&*store, &self, targets, &printer).await;
                }
                Wanted::Targets(targets) => self.of_targets(&*store, targets).await?,
                Wanted::Keys(keys) => of_keys(&*store, keys).await?,
            };
            groups.iter_mut().for_each(|(_, items)| items.retain(|stored| self.fits(stored)));
            let is_empty = groups.iter().all(|(_, items)| items.is_empty());
            // If none of the requested objects exists, the errors are sufficient.
            if !is_empty || missing.is_empty() {
                printer.print(groups, wanted.is_single())?;
            }
            if is_empty && missing.is_empty() {
                self.tell_of_nothing(&*store, &wanted.kinds()).await;
            }
            missing.iter().for_each(|(kind, object)| targets::report_missing(*kind, object));
            Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }

    async fn of_targets(&self, store: &dyn Store, targets: &[Target]) -> anyhow::Result<Listed> {
        let (mut groups, mut missing) = (Vec::new(), Vec::new());
        for target in targets {
            let (items, absent) = targets::read(store, target, self.namespace()).await?;
            groups.push((target.kind, items));
            missing.extend(absent.into_iter().map(|name| (target.kind, format!("{} {name}", target.kind))));
        }
        Ok((groups, missing))
    }

    /// Says on standard error that a namespace has no such objects, or does not exist.
    async fn tell_of_nothing(&self, store: &dyn Store, kinds: &[Kind]) {
        let kinds: Vec<&str> =
            kinds.iter().filter(|kind| kind.namespaced()).map(|kind| kind.plural()).collect();
        let Some(namespace) = self.namespace().filter(|_| !kinds.is_empty()) else {
            return;
        };
        let is_absent = is_absent(store, namespace).await;
        let such = if !is_absent && (self.selector.is_some() || self.field_selector.is_some()) {
            "such "
        } else {
            ""
        };
        let end = if is_absent { ", which does not exist" } else { "" };
        output::error_line(&format!("no {such}{} in namespace {namespace}{end}", kinds.join(", ")));
    }

    fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref().filter(|_| !self.all_namespaces)
    }

    /// Whether the selectors select the object.
    fn fits(&self, stored: &Stored) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(&stored.value))
            && self.field_selector.as_ref().is_none_or(|selector| selector.matches(&stored.value))
    }
}

/// True if the store has Namespaces, and this one is not among them. Calico's etcd has none, and a user may be unable to read them.
async fn is_absent(store: &dyn Store, namespace: &str) -> bool {
    match store.keys(Kind::Namespace).await {
        Ok(keys) => !keys.is_empty() && keys.iter().all(|key| key.name != namespace),
        Err(_) => false,
    }
}

/// The objects of each kind, and what does not exist.
type Listed = (Vec<(Kind, Vec<Stored>)>, Vec<(Kind, String)>);

/// The objects of manifests, as they are stored.
async fn of_keys(store: &dyn Store, keys: &[Key]) -> anyhow::Result<Listed> {
    let mut groups: BTreeMap<Kind, Vec<Stored>> = BTreeMap::new();
    let mut missing = Vec::new();
    for key in keys {
        let stored = match store.get(key).await? {
            None => stored_otherwise(store, key).await?,
            found => found,
        };
        match stored {
            Some(stored) => groups.entry(key.kind).or_default().push(stored),
            None => missing.push((key.kind, key.to_string())),
        }
    }
    Ok((groups.into_iter().collect(), missing))
}

/// The objects to show.
enum Wanted {
    Targets(Vec<Target>),
    /// The objects of manifests.
    Keys(Vec<Key>),
}

impl Wanted {
    /// Returns whether one object is requested by its name; the output is then no list.
    fn is_single(&self) -> bool {
        match self {
            Self::Targets(targets) => matches!(&targets[..], [target] if target.names.len() == 1),
            Self::Keys(keys) => keys.len() == 1,
        }
    }

    /// The kinds, each once.
    fn kinds(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = match self {
            Self::Targets(targets) => targets.iter().map(|target| target.kind).collect(),
            Self::Keys(keys) => keys.iter().map(|key| key.kind).collect(),
        };
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }
}

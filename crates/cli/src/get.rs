//! `tortie get`.

mod columns;
mod format;
mod go_template;
mod template;
mod watch;

use std::process::ExitCode;

use tortie_store::Stored;

use crate::filter::{FieldFilter, LabelFilter};
use crate::store::StoreArguments;
use crate::targets::{self, Target};
pub(crate) use columns::age;
use format::{GetFormat, Printer};
use template::Path;

#[derive(clap::Args)]
pub(crate) struct Get {
    /// Kinds and names: pods; pods,services; pod NAME; pod/NAME service/NAME; all (what decides about packets)
    #[arg(required = true, value_name = "KIND | KIND/NAME")]
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
    #[arg(short, long, conflicts_with = "sort_by")]
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
        let targets = targets::parse(&self.objects)?;
        let printer = Printer::new(&self, targets.len() > 1);
        crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            if self.watch {
                return watch::run(&*store, &self, &targets, &printer).await;
            }
            let (mut groups, mut missing) = (Vec::new(), Vec::new());
            for target in &targets {
                let (items, absent) = targets::read(&*store, target, self.namespace()).await?;
                let items = items.into_iter().filter(|stored| self.fits(stored));
                groups.push((target.kind, items.collect::<Vec<Stored>>()));
                missing
                    .extend(absent.into_iter().map(|name| (target.kind, format!("{} {name}", target.kind))));
            }
            let is_empty = groups.iter().all(|(_, items)| items.is_empty());
            // If none of the requested objects exists, the errors are sufficient.
            if !is_empty || missing.is_empty() {
                printer.print(groups, is_single(&targets))?;
            }
            missing.iter().for_each(|(kind, object)| targets::report_missing(*kind, object));
            Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
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

/// Whether one object is requested by its name; the output is then no list.
fn is_single(targets: &[Target]) -> bool {
    matches!(targets, [target] if target.names.len() == 1)
}

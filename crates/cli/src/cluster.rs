//! `tortie cluster info` and `tortie cluster diags`: what a cluster consists of, on one screen and as an archive for others.

mod archive;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use tortie_api::kubernetes::Node;
use tortie_api::report::NodeReport;
use tortie_api::{Key, Kind};
use tortie_store::{Store, StoreError, Stored};

use crate::output::{self, Format};
use crate::store::{StoreArguments, list};

#[derive(clap::Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show what the cluster consists of
    Info(Info),
    /// Write all objects, without env, commands, volumes and foreign annotations of pods, into an archive for bug reports
    Diags(Diags),
}

#[derive(clap::Args)]
pub(crate) struct Info {
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(clap::Args)]
pub(crate) struct Diags {
    /// The archive, which must not exist; a tar file, compressed with gzip
    #[arg(short, long, value_name = "FILE", default_value = "tortie-diags.tar.gz")]
    output: PathBuf,
    #[command(flatten)]
    store: StoreArguments,
}

impl ClusterCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        match self {
            Self::Info(info) => info.run(),
            Self::Diags(diags) => diags.run(),
        }
    }
}

/// The objects of a cluster, and why those of some kinds are not among them.
struct Content {
    objects: BTreeMap<Kind, Vec<Stored>>,
    missing: BTreeMap<String, String>,
}

/// A cluster in numbers.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    client: &'static str,
    /// The version of Calico that has used the datastore.
    #[serde(skip_serializing_if = "Option::is_none")]
    calico: Option<String>,
    /// The number of nodes of each operating system.
    nodes: BTreeMap<String, usize>,
    /// The nodes by the version of their agent.
    agents: BTreeMap<String, Vec<String>>,
    /// How many conditions the nodes report.
    conditions: usize,
    /// The network of each pool, and how many addresses of it are given.
    pools: BTreeMap<String, usize>,
    /// The number of objects of each other kind that has some.
    objects: BTreeMap<&'static str, usize>,
    /// The kinds that could not be read.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    missing: BTreeMap<String, String>,
}

impl Info {
    fn run(self) -> anyhow::Result<ExitCode> {
        let content = read(&self.store)?;
        let summary = Summary::of(&content);
        match self.output {
            Format::Json => output::line(&serde_json::to_string_pretty(&summary)?),
            Format::Text => summary.lines().iter().for_each(|line| output::line(line)),
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Diags {
    fn run(self) -> anyhow::Result<ExitCode> {
        let content = read(&self.store)?;
        let summary = Summary::of(&content);
        let shown = self.output.display().to_string();
        archive::write(&self.output, &content, &summary).with_context(|| shown.clone())?;
        let count: usize = content.objects.values().map(Vec::len).sum();
        output::line(&format!("{shown} has {}", output::count(count as u64, "object")));
        for (kind, why) in &content.missing {
            output::error_line(&format!("note: {kind} are missing: {why}"));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Reads all kinds. One that cannot be read does not hide the others, unless nothing can.
fn read(store: &StoreArguments) -> anyhow::Result<Content> {
    crate::runtime()?.block_on(async {
        let store = store.open().await?;
        read_all(&*store).await
    })
}

async fn read_all(store: &dyn Store) -> anyhow::Result<Content> {
    let (mut objects, mut missing) = (BTreeMap::new(), BTreeMap::new());
    for kind in Kind::all() {
        match list(store, kind).await {
            Ok(items) => drop(objects.insert(kind, items)),
            Err(error @ StoreError::Unavailable(_)) => return Err(error.into()),
            Err(error) => drop(missing.insert(kind.plural().to_owned(), error.to_string())),
        }
    }
    Ok(Content { objects, missing })
}

impl Summary {
    fn of(content: &Content) -> Self {
        let of = |kind: Kind| content.objects.get(&kind).map_or(&[][..], Vec::as_slice);
        let mut summary =
            Self { client: env!("CARGO_PKG_VERSION"), missing: content.missing.clone(), ..Self::default() };
        for node in of(Kind::Node) {
            let os = node.value["metadata"]["labels"][Node::OS].as_str().unwrap_or("unknown");
            *summary.nodes.entry(os.to_owned()).or_default() += 1;
        }
        for report in of(Kind::NodeReport) {
            // A report of another version may have another form.
            let read = serde_json::from_value::<NodeReport>(report.value.clone()).ok();
            let version = read
                .as_ref()
                .map(|report| report.status.version.clone())
                .filter(|version| !version.is_empty());
            let nodes = summary.agents.entry(version.unwrap_or_else(|| "unknown".to_owned())).or_default();
            nodes.push(report.key.name.clone());
            summary.conditions +=
                read.map_or(0, |report| report.status.conditions.len() + report.status.more);
        }
        let information = Key::global(Kind::ClusterInformation, "default");
        let information = of(Kind::ClusterInformation).iter().find(|stored| stored.key == information);
        summary.calico = information
            .and_then(|stored| stored.value["spec"]["calicoVersion"].as_str())
            .filter(|version| !version.is_empty())
            .map(str::to_owned);
        for pool in of(Kind::IpPool) {
            let cidr = pool.value["spec"]["cidr"].as_str().unwrap_or_default();
            summary.pools.insert(cidr.to_owned(), given_addresses(cidr, of(Kind::IpamBlock)));
        }
        let others = content.objects.iter().filter(|(kind, items)| {
            !items.is_empty()
                && ![Kind::Node, Kind::NodeReport, Kind::IpPool, Kind::ClusterInformation].contains(kind)
        });
        summary.objects = others.map(|(kind, items)| (kind.plural(), items.len())).collect();
        summary
    }

    fn lines(&self) -> Vec<String> {
        let numbers = |map: &BTreeMap<String, usize>| {
            let parts: Vec<String> = map.iter().map(|(name, count)| format!("{count} {name}")).collect();
            if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
        };
        let mut lines =
            vec![format!("client      {}", self.client), format!("nodes       {}", numbers(&self.nodes))];
        if self.agents.is_empty() {
            lines.push("agents      no node has reported".to_owned());
        }
        for (version, nodes) in &self.agents {
            lines.push(format!("agents      {version} on {}", output::count(nodes.len() as u64, "node")));
        }
        lines.push(format!("conditions  {}", self.conditions));
        lines.extend(
            self.calico.iter().map(|version| format!("Calico      {version} has used this datastore")),
        );
        for (cidr, given) in &self.pools {
            lines.push(format!("pool        {cidr}: {given} addresses given"));
        }
        lines.extend(self.objects.iter().map(|(kind, count)| format!("{kind}: {count}")));
        lines.extend(self.missing.iter().map(|(kind, why)| format!("{kind} cannot be read: {why}")));
        lines
    }
}

/// How many addresses of a network are given, in all blocks.
fn given_addresses(cidr: &str, blocks: &[Stored]) -> usize {
    let Ok(pool) = cidr.parse::<ipnet::IpNet>() else { return 0 };
    let of_pool = blocks.iter().filter(|block| {
        let own = block.value["cidr"].as_str().and_then(|text| text.parse::<ipnet::IpNet>().ok());
        own.is_some_and(|own| pool.contains(&own))
    });
    let allocations = of_pool.flat_map(|block| block.value["allocations"].as_array().into_iter().flatten());
    allocations.filter(|allocation: &&Value| !allocation.is_null()).count()
}

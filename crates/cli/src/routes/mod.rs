//! `tortie routes`: what a router needs to reach the pods, from blocks and nodes.

mod formats;
mod plan;

use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::Value;
use tortie_api::{Key, Kind};

use self::formats::{Cloud, Router};
use self::plan::{NodesAndBlocks, Planned};
use crate::filenames::Filenames;
use crate::output::{self, Format};
use crate::store::{StoreArguments, list};

#[derive(clap::Args)]
#[command(mut_arg("files", |files| files.help("Nodes and IPAMBlocks instead of a datastore, as `tortie get nodes,ipamblocks -o json` or kubectl prints them: files, folders, or - for standard input")))]
pub(crate) struct Routes {
    /// The router: its configuration, or the commands of a cloud's client
    #[arg(long = "for", value_name = "ROUTER", value_enum, default_value_t = Router::Text)]
    router: Router,
    /// Use the pod networks of the Nodes (spec.podCIDRs) instead of IPAM blocks, for pods with host-local addresses
    #[arg(long)]
    pod_cidrs: bool,
    /// The route table: its id for aws, its name for azure
    #[arg(long, value_name = "NAME", required_if_eq_any([("router", "aws"), ("router", "azure")]))]
    table: Option<String>,
    /// For azure: the resource group of the route table
    #[arg(long, value_name = "NAME", required_if_eq("router", "azure"))]
    resource_group: Option<String>,
    /// For gcp: the VPC network
    #[arg(long, value_name = "NAME", required_if_eq("router", "gcp"))]
    network: Option<String>,
    /// The output format of the text
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    filenames: Filenames,
    #[command(flatten)]
    store: StoreArguments,
}

impl Routes {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        if self.output == Format::Json && self.router != Router::Text {
            bail!("-o json has no effect with --for; remove one of them");
        }
        let cluster = match self.filenames.is_empty() {
            true => self.of_store()?,
            false => self.of_files()?,
        };
        let Planned { routes, problems, in_vxlan_only } = plan::plan(&cluster, self.pod_cidrs);
        if !in_vxlan_only.is_empty() {
            let all: Vec<String> =
                in_vxlan_only.iter().map(|(net, node)| format!("{net} (Node {node})")).collect();
            output::error_line(&format!(
                "note: Windows nodes take packets to their pods in VXLAN only, so these have no route: {}",
                all.join(", ")
            ));
        }
        let cloud = Cloud {
            table: self.table.unwrap_or_default(),
            resource_group: self.resource_group.unwrap_or_default(),
            network: self.network.unwrap_or_default(),
        };
        match (self.output, self.router) {
            (Format::Json, _) => output::line(&serde_json::to_string_pretty(&routes)?),
            (Format::Text, Router::Text) if routes.is_empty() => {
                output::error_line("there are no blocks of nodes")
            }
            (Format::Text, Router::Text) => output::columns(&formats::rows(&routes)),
            (Format::Text, router) => {
                let (text, more) = formats::render(router, &routes, &cloud);
                output::text(&text);
                for problem in problems.iter().chain(&more) {
                    output::error_line(&format!("warning: {problem}"));
                }
                let is_complete = problems.is_empty() && more.is_empty();
                return Ok(if is_complete { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
        }
        for problem in &problems {
            output::error_line(&format!("warning: {problem}"));
        }
        Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn of_store(&self) -> anyhow::Result<NodesAndBlocks> {
        crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            let mut cluster = NodesAndBlocks::default();
            // Nodes come first: a block of a node that is new appears in the next run.
            for kind in [Kind::Node, Kind::IpamBlock] {
                for stored in list(&*store, kind).await? {
                    cluster.add(&stored.key, &stored.value).with_context(|| stored.key.to_string())?;
                }
            }
            Ok(cluster)
        })
    }

    /// The objects of lists. In manifests, a block is the `spec` of its object.
    fn of_files(&self) -> anyhow::Result<NodesAndBlocks> {
        let mut cluster = NodesAndBlocks::default();
        for manifest in self.filenames.manifests()? {
            let documents = tortie_api::from_yaml(&manifest.text?)
                .map_err(|problem| anyhow::anyhow!("{}: {problem}", manifest.name))?;
            for document in documents {
                for object in objects(&document) {
                    let name = object["metadata"]["name"].as_str().unwrap_or_default();
                    let (kind, value) = match object["kind"].as_str() {
                        Some("Node") => (Kind::Node, object),
                        Some("IPAMBlock") => (Kind::IpamBlock, &object["spec"]),
                        _ => continue,
                    };
                    let key = Key::global(kind, name);
                    cluster.add(&key, value).with_context(|| format!("{}: {key}", manifest.name))?;
                }
            }
        }
        if cluster.is_empty() {
            bail!("the files have no Nodes; write them with: tortie get nodes,ipamblocks -o json");
        }
        Ok(cluster)
    }
}

/// The objects of a document: itself, or the items of a list.
fn objects(document: &Value) -> Vec<&Value> {
    match document["items"].as_array() {
        Some(items) => items.iter().flat_map(objects).collect(),
        None => vec![document],
    }
}

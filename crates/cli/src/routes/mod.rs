//! `tortie routes`: what a router needs to reach the pods, from blocks and nodes.

mod changes;
mod formats;
mod plan;
mod script;

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use ipnet::IpNet;
use serde_json::Value;
use tortie_api::{Key, Kind};
use tortie_store::StoreError;

use self::changes::{Changes, Earlier};
use self::formats::{Cloud, Rendered, Router};
use self::plan::{NodesAndBlocks, Planned, PodRoute};
use crate::filenames::Filenames;
use crate::output::{self, Format};
use crate::store::StoreArguments;

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
    /// Print only what has changed since an earlier run, whose output this file has: tortie routes -o json. Given several times: what
    /// is needed whichever of these runs the router has followed. With -o json, print what the router has after these changes, for the
    /// next run. With --for bird, print the whole configuration, with routes of nodes that are not known for a moment
    #[arg(long, value_name = "FILE")]
    since: Vec<String>,
    /// With -o json and --since: print what the router may have until all commands have succeeded, for the next run if one fails or is
    /// interrupted
    #[arg(long, requires = "since")]
    attempted: bool,
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
        self.refuse_unused()?;
        let earlier = match self.since.is_empty() {
            true => None,
            false => Some(changes::read(&self.since)?),
        };
        let cluster = match self.filenames.is_empty() {
            true => self.of_store()?,
            false => self.of_files()?,
        };
        self.refuse_without_input(&cluster, earlier.as_deref())?;
        let planned = plan::plan(&cluster, self.pod_cidrs);
        let earlier = earlier.map(|earlier| Earlier::new(earlier, |route| planned.keeps(route)));
        let Planned { routes, mut problems, in_vxlan_only, .. } = planned;
        let mut notes: Vec<String> = without_encapsulation(&in_vxlan_only).into_iter().collect();
        match (self.output, self.router) {
            (Format::Json, _) => {
                let known = match &earlier {
                    Some(earlier) if self.attempted => earlier.attempted(&routes),
                    Some(earlier) => earlier.followed_by(&routes),
                    None => routes,
                };
                output::line(&serde_json::to_string_pretty(&known)?);
            }
            (Format::Text, Router::Text) => show(&routes, earlier.as_ref()),
            (Format::Text, router) => {
                let rendered = self.rendered(router, routes, earlier.as_ref());
                problems.extend(rendered.problems);
                notes.extend(rendered.notes);
                let left_out: Vec<String> = remarks(&notes, &problems).collect();
                output::text(&format!("{}{}", formats::comments(router, &left_out), rendered.text));
            }
        }
        remarks(&notes, &problems).for_each(|remark| output::error_line(&output::shown(&remark)));
        Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// An option that has no effect is an error: its user expects that it has one.
    fn refuse_unused(&self) -> anyhow::Result<()> {
        if self.output == Format::Json && self.router != Router::Text {
            bail!("-o json has no effect with --for; remove one of them");
        }
        if self.attempted && self.output != Format::Json {
            bail!("--attempted has no effect without -o json");
        }
        let of_cloud = [
            ("table", &self.table, &[Router::Aws, Router::Azure][..]),
            ("resource-group", &self.resource_group, &[Router::Azure]),
            ("network", &self.network, &[Router::Gcp]),
        ];
        let is_unused = |(_, value, routers): &&(&str, &Option<String>, &[Router])| {
            value.is_some() && !routers.contains(&self.router)
        };
        if let Some((option, ..)) = of_cloud.iter().find(is_unused) {
            let router = self.router.to_possible_value();
            let router = router.as_ref().map_or("text", |value| value.get_name());
            bail!("--{option} has no effect with --for {router}; remove it");
        }
        match self.store.given() {
            Some(option) if !self.filenames.is_empty() => {
                bail!("--{option} has no effect with files; remove it, or -f")
            }
            _ => Ok(()),
        }
    }

    /// Refuses to remove all routes because what they depend on is missing: a file may have been written without it, and an API may not
    /// serve it for a moment. A router that loads an empty configuration loses its routes, too.
    fn refuse_without_input(
        &self,
        cluster: &NodesAndBlocks,
        earlier: Option<&[PodRoute]>,
    ) -> anyhow::Result<()> {
        let Some(missing) = cluster.missing(self.pod_cidrs) else { return Ok(()) };
        let remedy = match self.filenames.is_empty() {
            true => "check --store and --calico-group, and that the API serves them",
            false => "write the files with: tortie get nodes,ipamblocks -o json",
        };
        let is_for_people = self.router == Router::Text && self.output == Format::Text;
        match earlier {
            Some([]) => Ok(()),
            Some(earlier) => bail!(
                "there are no {missing}, and the {} routes of --since would be removed, so nothing is printed: {remedy}; if the cluster \
                 has none any more, remove the routes from the router yourself, and begin with a new file for --since",
                earlier.len()
            ),
            None if is_for_people || missing.is_certain => Ok(()),
            None => bail!(
                "there are no {missing}, and a router that loads an empty configuration loses its routes, so nothing is printed: {remedy}"
            ),
        }
    }

    /// What a router needs: the changes since earlier runs, or everything.
    fn rendered(&self, router: Router, routes: Vec<PodRoute>, earlier: Option<&Earlier>) -> Rendered {
        let all = match earlier {
            Some(earlier) => earlier.followed_by(&routes),
            None => routes.clone(),
        };
        let changes = match earlier {
            Some(earlier) if router != Router::Bird => changes_for(router, &routes, earlier),
            Some(_) => Changes::all(one_per_destination(all.clone())),
            None => Changes::all(routes),
        };
        formats::render(router, &changes, &all, &self.cloud())
    }

    fn cloud(&self) -> Cloud {
        Cloud {
            table: self.table.clone().unwrap_or_default(),
            resource_group: self.resource_group.clone().unwrap_or_default(),
            network: self.network.clone().unwrap_or_default(),
        }
    }

    fn of_store(&self) -> anyhow::Result<NodesAndBlocks> {
        crate::runtime()?.block_on(async {
            let store = self.store.open().await?;
            let mut cluster = NodesAndBlocks::default();
            // Nodes come first: a block of a node that is new appears in the next run.
            for kind in [Kind::Node, Kind::IpamBlock] {
                let stored = match store.list(kind).await {
                    Ok(listing) => listing.items,
                    Err(StoreError::KindAbsent(_)) => continue,
                    Err(error) => return Err(error.into()),
                };
                cluster.serves_blocks = kind == Kind::IpamBlock;
                for stored in stored {
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

/// The blocks and addresses to which no route may lead.
fn without_encapsulation(in_vxlan_only: &[(IpNet, String)]) -> Option<String> {
    let all: Vec<String> = in_vxlan_only.iter().map(|(net, node)| format!("{net} (Node {node})")).collect();
    let all = all.join(", ");
    (!all.is_empty()).then(|| {
        format!("Windows nodes take packets to their pods in VXLAN only, so these have no route: {all}")
    })
}

fn remarks(notes: &[String], problems: &[String]) -> impl Iterator<Item = String> {
    let notes = notes.iter().map(|note| format!("note: {note}"));
    notes.chain(problems.iter().map(|problem| format!("warning: {problem}")))
}

/// Shows the routes, or their changes, as a table for people.
fn show(routes: &[PodRoute], earlier: Option<&Earlier>) {
    match earlier.map(|earlier| Changes::between(&earlier.compared, routes, false)) {
        Some(changes) if changes.is_empty() => output::error_line("nothing has changed"),
        Some(changes) => output::columns(&formats::rows_of_changes(&changes)),
        None if routes.is_empty() => output::error_line("there are no blocks of nodes"),
        None => output::columns(&formats::rows(routes)),
    }
}

fn changes_for(router: Router, routes: &[PodRoute], earlier: &Earlier) -> Changes {
    let known: Vec<PodRoute> =
        earlier.compared.iter().filter(|route| formats::had(router, route)).cloned().collect();
    Changes::between(&known, routes, router == Router::Aws)
}

/// The routes for a router that reads whole files. After an interruption, several may lead to one destination of a node that is not known
/// for a moment: a certain one is preferred.
fn one_per_destination(mut routes: Vec<PodRoute>) -> Vec<PodRoute> {
    routes.sort_by_key(|route| (route.destination, route.uncertain));
    routes.dedup_by_key(|route| route.destination);
    routes
}

/// The objects of a document: itself, or the items of a list.
fn objects(document: &Value) -> Vec<&Value> {
    match document["items"].as_array() {
        Some(items) => items.iter().flat_map(objects).collect(),
        None => vec![document],
    }
}

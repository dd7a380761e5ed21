//! `tortie get`.

use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use serde_json::{Value, json};
use tortie_api::{Kind, Resource};
use tortie_store::Stored;

use crate::output;
use crate::store::StoreArguments;

#[derive(clap::Args)]
pub(crate) struct Get {
    /// The kind, such as pods, networkpolicies, nodereports
    kind: String,
    /// The names; all if none is given
    names: Vec<String>,
    /// Only this namespace; all of them if none is given
    #[arg(short, long, conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// All namespaces, as without -n
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// How to show them
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
}

impl Get {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let kind = Kind::from_word(&self.kind).with_context(|| {
            let kinds: Vec<&str> = Kind::all().map(Kind::plural).collect();
            format!("{:?} is no kind of object; the kinds are {}", self.kind, kinds.join(", "))
        })?;
        let items =
            crate::runtime()?.block_on(async { anyhow::Ok(self.store.open()?.list(kind).await?.items) })?;
        let namespace = self.namespace.as_ref().filter(|_| !self.all_namespaces);
        let wanted = |stored: &Stored| {
            (self.names.is_empty() || self.names.contains(&stored.key.name))
                && namespace.is_none_or(|namespace| *namespace == stored.key.namespace)
        };
        let items: Vec<Stored> = items.into_iter().filter(wanted).collect();
        if let Some(missing) =
            self.names.iter().find(|name| !items.iter().any(|stored| stored.key.name == **name))
        {
            let hint = if kind == Kind::NetworkPolicy { " (a Kubernetes policy is a knp)" } else { "" };
            bail!("{kind} {missing} does not exist{hint}");
        }
        match self.output {
            Format::Table => output::columns(&table(kind, &items)),
            Format::Json => {
                let values: Vec<Value> = items.into_iter().map(document).collect();
                let document = match <[Value; 1]>::try_from(values) {
                    Ok([value]) if !self.names.is_empty() => value,
                    Ok(values) => json!({"apiVersion": "v1", "kind": "List", "items": values}),
                    Err(values) => json!({"apiVersion": "v1", "kind": "List", "items": values}),
                };
                output::line(&serde_json::to_string_pretty(&document)?);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The object as a document. IPAM's own records are stored bare, as Calico does, and get their name beside them.
fn document(stored: Stored) -> Value {
    if stored.value.get("metadata").is_some() {
        return stored.value;
    }
    let kind = stored.key.kind;
    json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": {"name": stored.key.name}, "spec": stored.value})
}

fn table(kind: Kind, items: &[Stored]) -> Vec<Vec<String>> {
    let extra: &[&str] = match kind {
        Kind::Pod => &["STATUS", "IP", "NODE"],
        Kind::Node => &["OS", "ADDRESS", "TUNNEL"],
        Kind::NodeReport => &["OS", "REVISION", "PODS", "CONDITIONS"],
        Kind::WorkloadEndpoint => &["NODE", "NETWORKS", "INTERFACE"],
        Kind::IpPool => &["CIDR", "BLOCKSIZE", "VXLAN"],
        Kind::IpamBlock => &["AFFINITY", "FREE"],
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => &["ORDER", "SELECTOR"],
        _ => &[],
    };
    let mut header: Vec<String> = if kind.namespaced() { vec!["NAMESPACE".into()] } else { vec![] };
    header.push("NAME".into());
    header.extend(extra.iter().map(|name| (*name).to_owned()));
    let rows = items.iter().map(|stored| {
        let mut row = if kind.namespaced() { vec![stored.key.namespace.clone()] } else { vec![] };
        row.push(stored.key.name.clone());
        row.extend(cells(kind, stored));
        row
    });
    std::iter::once(header).chain(rows).collect()
}

/// What the table shows beside the name.
fn cells(kind: Kind, stored: &Stored) -> Vec<String> {
    let value = &stored.value;
    let text = |pointer: &str| match value.pointer(pointer) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    };
    match kind {
        Kind::Pod => vec![text("/status/phase"), text("/status/podIP"), text("/spec/nodeName")],
        Kind::Node => match Resource::read(&stored.key, value) {
            Ok(Resource::Node(node)) => {
                let shown =
                    |address: Option<std::net::Ipv4Addr>| address.map(|a| a.to_string()).unwrap_or_default();
                let os =
                    node.metadata.labels.get(tortie_api::kubernetes::Node::OS).cloned().unwrap_or_default();
                vec![os, shown(node.address()), shown(node.vxlan_address())]
            }
            _ => vec!["(cannot be read)".into()],
        },
        Kind::NodeReport => {
            let conditions = value.pointer("/status/conditions").and_then(Value::as_array);
            let shown = conditions.into_iter().flatten().map(|condition| {
                let part = |name: &str| condition[name].as_str().unwrap_or_default().to_owned();
                format!("{} {}: {}", part("object"), part("reason"), part("message")).trim().to_owned()
            });
            let mut shown: Vec<String> = shown.collect();
            if let Some(more) = value.pointer("/status/more").and_then(Value::as_u64).filter(|more| *more > 0)
            {
                shown.push(format!("and {more} more"));
            }
            vec![text("/status/os"), text("/status/revision"), text("/status/endpoints"), shown.join("; ")]
        }
        Kind::WorkloadEndpoint => {
            vec![text("/spec/node"), text("/spec/ipNetworks"), text("/spec/interfaceName")]
        }
        Kind::IpPool => vec![text("/spec/cidr"), text("/spec/blockSize"), text("/spec/vxlanMode")],
        Kind::IpamBlock => {
            let free = value["unallocated"].as_array().map_or(0, Vec::len);
            vec![text("/affinity"), free.to_string()]
        }
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => vec![text("/spec/order"), text("/spec/selector")],
        _ => vec![],
    }
}

//! `tortie get`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Context;
use clap::ValueEnum;
use serde_json::{Value, json};
use tortie_api::report::ReportedCondition;
use tortie_api::{Kind, Resource};
use tortie_store::Stored;

use crate::output;
use crate::store::StoreArguments;

#[derive(clap::Args)]
pub(crate) struct Get {
    /// The kind, such as pods, networkpolicies, nodereports
    kind: String,
    /// The names; all objects if none is given
    names: Vec<String>,
    /// Only this namespace; all namespaces if none is given
    #[arg(short, long, conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// All namespaces, as without -n
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = GetFormat::Table)]
    output: GetFormat,
    #[command(flatten)]
    store: StoreArguments,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GetFormat {
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
        let items = crate::runtime()?
            .block_on(async { anyhow::Ok(self.store.open().await?.list(kind).await?.items) })?;
        let namespace = self.namespace.as_ref().filter(|_| !self.all_namespaces);
        let wanted = |stored: &Stored| {
            (self.names.is_empty() || self.names.contains(&stored.key.name))
                && namespace.is_none_or(|namespace| *namespace == stored.key.namespace)
        };
        let items: Vec<Stored> = items.into_iter().filter(wanted).collect();
        let is_there = |name: &&String| items.iter().any(|stored| stored.key.name == **name);
        let missing: Vec<&String> = self.names.iter().filter(|name| !is_there(name)).collect();
        match self.output {
            // None of the requested objects exist: the errors are sufficient.
            _ if items.is_empty() && !missing.is_empty() => {}
            GetFormat::Table => {
                output::columns(&table(kind, &items));
                if kind == Kind::NodeReport {
                    items.iter().flat_map(conditions).for_each(|line| output::line(&line));
                }
            }
            GetFormat::Json => {
                let values: Vec<Value> = items.into_iter().map(document).collect();
                let document = match <[Value; 1]>::try_from(values) {
                    Ok([value]) if !self.names.is_empty() => value,
                    Ok(values) => json!({"apiVersion": "v1", "kind": "List", "items": values}),
                    Err(values) => json!({"apiVersion": "v1", "kind": "List", "items": values}),
                };
                output::line(&serde_json::to_string_pretty(&document)?);
            }
        }
        for missing in &missing {
            let hint = if kind == Kind::NetworkPolicy { " (a Kubernetes policy is a knp)" } else { "" };
            output::error(&format!("{kind} {missing} does not exist{hint}"));
        }
        Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The conditions in a node's report: a line for each, but only a few for each reason.
fn conditions(report: &Stored) -> Vec<String> {
    /// The maximum number of listed conditions with one reason.
    const OF_ONE_REASON: usize = 3;
    let all = report.value.pointer("/status/conditions").and_then(Value::as_array);
    let mut lines = Vec::new();
    let mut more: BTreeMap<String, usize> = BTreeMap::new();
    for condition in all.into_iter().flatten() {
        // A report of another version may have another form.
        let Ok(condition) = serde_json::from_value::<ReportedCondition>(condition.clone()) else {
            lines.push(format!("{}: {condition}", report.key.name));
            continue;
        };
        let of_reason = more.entry(condition.reason.clone()).or_default();
        *of_reason += 1;
        if *of_reason <= OF_ONE_REASON {
            lines.push(format!("{}: {}", report.key.name, output::condition(&condition)));
        }
    }
    for (reason, count) in more.into_iter().filter(|(_, count)| *count > OF_ONE_REASON) {
        lines.push(format!("{}: {} more {reason}; -o json has all", report.key.name, count - OF_ONE_REASON));
    }
    if let Some(left_out) =
        report.value.pointer("/status/more").and_then(Value::as_u64).filter(|left| *left > 0)
    {
        lines.push(format!("{}: and {} more that the report leaves out", report.key.name, left_out));
    }
    lines
}

/// The object as a document. IPAM's own records are stored without metadata, as in Calico, and get their name here.
fn document(stored: Stored) -> Value {
    if stored.value.get("metadata").is_some() {
        return stored.value;
    }
    let kind = stored.key.kind;
    json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": {"name": stored.key.name}, "spec": stored.value})
}

fn table(kind: Kind, items: &[Stored]) -> Vec<Vec<String>> {
    let extra: &[&str] = match kind {
        Kind::Pod => &["STATUS", "IP", "NODE", "MESSAGE"],
        Kind::Node => &["OS", "ADDRESS", "TUNNEL"],
        Kind::NodeReport => &["OS", "PODS", "CONDITIONS"],
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

/// The table columns after the name.
fn cells(kind: Kind, stored: &Stored) -> Vec<String> {
    let value = &stored.value;
    let text = |pointer: &str| match value.pointer(pointer) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    };
    match kind {
        Kind::Pod => {
            vec![
                text("/status/phase"),
                text("/status/podIP"),
                text("/spec/nodeName"),
                text("/status/message"),
            ]
        }
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
            let listed = value.pointer("/status/conditions").and_then(Value::as_array).map_or(0, Vec::len);
            let more = value.pointer("/status/more").and_then(Value::as_u64).unwrap_or_default();
            let count = (listed as u64 + more).to_string();
            vec![text("/status/os"), text("/status/endpoints"), count]
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

//! `tortie matrix`: who reaches whom, by classes of pods that no policy can tell apart.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;
use serde_json::{Value, json};
use tortie_api::{Key, Resource};
use tortie_oracle::{Oracle, SeenHost, Snapshot, Stored};
use tortie_reach::{CLIENT_PORT, Cell, Classes, Content, Judge, Scope, Why};

use crate::doubts::{Doubts, NOT_CERTAIN};
use crate::port::PortSpec;
use crate::snapshot::{Read, Source};
use crate::table::{Because, Reasons, Table, scoped, shown};
use crate::{decided, explain, html, output, vxlan_ports};

/// Wider tables are printed as lists.
const WIDEST: usize = 110;
/// With more senders or receivers, only namespaces are printed.
const MAX_GROUPS: usize = 60;
/// A table of more cells takes gigabytes, and nobody can read it.
const MAX_CELLS: usize = 10_000_000;
/// Longer cells get names.
const MAX_CELL_LENGTH: usize = 24;
/// With more pods that use their node's network, only their number is printed.
const MAX_ON_HOSTS: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Matrix {
    /// Only flows from and to the pods of this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only these protocols and ports: 80 (which is tcp/80), udp/53, icmp/8 or icmp/8/0 (type and code), proto/47
    #[arg(long, value_name = "PORT")]
    port: Vec<String>,
    /// The output format; html is one file for a browser, on standard output
    #[arg(short, long, value_enum, default_value_t = MatrixFormat::Text)]
    output: MatrixFormat,
    #[command(flatten)]
    source: Source,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MatrixFormat {
    Text,
    Json,
    Html,
}

impl Matrix {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(read) = self.source.read()? else { return Ok(ExitCode::from(2)) };
        let snapshot = &read.snapshot;
        let classes = Classes::of(&[snapshot]);
        let reduced = classes.reduced(snapshot);
        let mut judge = Judge::new(&classes, &reduced, 0);
        let ports = self.ports(&classes)?;
        let doubts = Doubts::new(&read.doubts, &[snapshot]);
        let mut tables = self.tables(&classes, &mut judge, &ports)?;
        let of_classes: Vec<_> = classes.all().iter().map(|class| doubts.of_class(class)).collect();
        tables.iter_mut().for_each(|table| table.doubts.clone_from(&of_classes));
        match self.output {
            MatrixFormat::Text => text(&classes, &tables, snapshot, &doubts),
            MatrixFormat::Json => json_document(&classes, &mut judge, &read, (&tables, &doubts))?,
            MatrixFormat::Html => {
                let reasons = tables.iter().map(|table| reasons(table, &classes, &mut judge, snapshot));
                let reasons: Vec<_> = reasons.collect();
                output::line(
                    html::page(&classes, &tables, &reasons, &notes(&classes, &tables, snapshot, &doubts))
                        .trim_end(),
                );
            }
        }
        let uncertain = tables.iter().any(Table::is_uncertain) || doubts.may_lack_pods();
        Ok(if uncertain { ExitCode::from(NOT_CERTAIN) } else { ExitCode::SUCCESS })
    }

    /// The requested classes of ports.
    fn ports(&self, classes: &Classes) -> anyhow::Result<Vec<usize>> {
        if self.port.is_empty() {
            return Ok(classes.ports().of_clients());
        }
        let mut ports = BTreeSet::new();
        for text in &self.port {
            ports.insert(classes.ports().class_of(&PortSpec::read(text)?.sample()));
        }
        Ok(ports.into_iter().collect())
    }

    fn tables(
        &self,
        classes: &Classes,
        judge: &mut Judge<'_>,
        ports: &[usize],
    ) -> anyhow::Result<Vec<Table>> {
        let all: Vec<usize> = (0..classes.all().len()).collect();
        let mut of = |title: String, rows: &[usize], columns: &[usize]| {
            let matrix = tortie_reach::Matrix::of(classes, judge, ports, rows, columns);
            Table { title, matrix, doubts: Vec::new() }
        };
        let Some(namespace) = &self.namespace else {
            let cells = all.len().saturating_mul(all.len());
            if cells > MAX_CELLS {
                bail!(
                    "policies distinguish {} groups of pods, nodes and networks, which is too much for one table; \
                     ask about one namespace: -n NAMESPACE",
                    all.len()
                );
            }
            return Ok(vec![of("who reaches whom".to_owned(), &all, &all)]);
        };
        let inside = |index: &usize| classes.all().get(*index).is_some_and(|class| class.is_in(namespace));
        let inside: Vec<usize> = all.iter().filter(|index| inside(index)).copied().collect();
        if inside.is_empty() {
            bail!("namespace {namespace} has no pods with addresses");
        }
        Ok(vec![
            of(format!("out of namespace {namespace}"), &inside, &all),
            of(format!("into namespace {namespace}"), &all, &inside),
        ])
    }
}

/// The host endpoints whose addresses are not those by which a node is known.
fn hosts_elsewhere(snapshot: &Snapshot) -> Vec<String> {
    let oracle = Oracle::new(snapshot);
    let is_known = |host: &SeenHost<'_>| {
        let mut nodes = oracle.nodes().filter(|node| node.name == host.node());
        nodes.any(|node| node.all().any(|address| host.addresses().contains(&address)))
    };
    let named = oracle.hosts().filter(|host| !host.addresses().is_empty() && !is_known(host));
    named.map(|host| host.subject().name().to_owned()).collect()
}

/// Notes about the tables.
fn notes(classes: &Classes, tables: &[Table], snapshot: &Snapshot, doubts: &Doubts<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    let clients = classes.ports().of_clients();
    let ports = tables.first().map_or(&[][..], |table| table.matrix.ports.as_slice());
    match clients.iter().all(|class| ports.contains(class)) {
        true => notes.push("Rows send, columns receive. all, none: of all protocols and ports.".to_owned()),
        false => {
            let shown_ports = classes.ports().named(ports, &clients);
            notes.push(format!("Rows send, columns receive. all, none: of {shown_ports}, which no rule distinguishes from the given port."));
        }
    }
    notes.push(match classes.with_hosts() {
        false => {
            "-: there are no such flows (a pod to itself), or no policy of pods is concerned.".to_owned()
        }
        true => "-: there are no such flows (a pod to itself), or no policy is concerned.".to_owned(),
    });
    if tables.iter().any(Table::is_uncertain) {
        notes.push("?: not certain, as what was not read could change it (see above, or the field doubts of -o json).".to_owned());
    }
    if doubts.may_lack_pods() {
        notes.push("There may be pods besides these, as not everything was read (see above).".to_owned());
    }
    if !classes.all().iter().any(|class| class.kind == tortie_reach::ClassKind::Pods) {
        let policies = snapshot.iter().filter(|(key, _)| key.kind.is_policy()).count();
        notes.push(format!("There are no pods, so no policy for pods shows. Policies read: {policies}."));
    }
    if classes.all().iter().any(|class| class.kind == tortie_reach::ClassKind::Nodes) {
        notes.push(
            "A node always reaches its own pods; entries of nodes are about pods of other nodes.".to_owned(),
        );
    }
    if clients.len() < classes.ports().len() {
        notes.push(format!(
            "Some rules match source ports: packets are assumed to come from port {CLIENT_PORT}."
        ));
    }
    let elsewhere = hosts_elsewhere(snapshot);
    if !elsewhere.is_empty() {
        notes.push(format!(
            "Host endpoints of other addresses of their nodes are left out; tortie explain knows these addresses: {}.",
            elsewhere.join(", ")
        ));
    }
    if classes.with_hosts() {
        notes.push(
            "Host endpoints are included; the report of a node shows whether it enforces them.".to_owned(),
        );
    }
    notes.extend(explain::tunnels_note(classes.ports(), ports, &vxlan_ports::closed_to_pods(snapshot)));
    notes.extend(explain::not_enforced_note(snapshot));
    let scoped = |content: &Content| content.passing().len() > 1;
    if tables.iter().any(|table| table.matrix.cells.iter().flatten().any(scoped)) {
        notes.push(
            "An entry for one family, between nodes or on one node, is about those flows only.".to_owned(),
        );
    }
    if classes.left_out() > 0 {
        notes.push(format!(
            "Left out, as they have no address yet: {}.",
            output::count(classes.left_out() as u64, "pod")
        ));
    }
    let on_hosts = on_hosts(snapshot);
    if !on_hosts.is_empty() {
        let more = match on_hosts.len().saturating_sub(MAX_ON_HOSTS) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let shown = on_hosts.iter().take(MAX_ON_HOSTS).cloned().collect::<Vec<_>>().join(", ");
        notes.push(format!("Pods that use their node's network are that node: {shown}{more}."));
    }
    notes
}

/// The pods that use their node's network, each with its node.
fn on_hosts(snapshot: &Snapshot) -> Vec<String> {
    let of_host = |(key, stored): (&Key, &Stored)| match &stored.resource {
        Ok(Resource::Pod(pod)) if pod.spec.host_network => {
            let node = pod.spec.node_name.as_deref().unwrap_or_default();
            Some(format!("{}/{} is node/{node}", key.namespace, key.name))
        }
        _ => None,
    };
    snapshot.iter().filter_map(of_host).collect()
}

fn text(classes: &Classes, tables: &[Table], snapshot: &Snapshot, doubts: &Doubts<'_>) {
    let mut coarse = false;
    for table in tables {
        output::line(&format!("{}:", table.title));
        let many = table.matrix.rows.len().min(table.matrix.columns.len()) > MAX_GROUPS;
        coarse |= many;
        let by_namespace = Table {
            title: String::new(),
            matrix: table.matrix.by_namespace(classes),
            doubts: table.doubts.clone(),
        };
        let table = if many { &by_namespace } else { table };
        let mut long: BTreeMap<String, usize> = BTreeMap::new();
        let mut cells: Vec<Vec<String>> = Vec::new();
        for (row, contents) in table.matrix.rows.iter().zip(&table.matrix.cells) {
            let columns = table.matrix.columns.iter().zip(contents);
            let cell = |(column, content)| {
                short(shown(classes, table, content), &mut long) + table.mark(row, column, content)
            };
            cells.push(columns.map(cell).collect());
        }
        let rows = grid(table, &cells);
        let width: usize = (0..=table.matrix.columns.len())
            .map(|column| {
                rows.iter()
                    .filter_map(|row| row.get(column))
                    .map(|cell| cell.chars().count() + 3)
                    .max()
                    .unwrap_or(0)
            })
            .sum();
        if width <= WIDEST {
            output::columns(&rows);
            let mut letters: Vec<(&String, &usize)> = long.iter().collect();
            letters.sort_by_key(|(_, number)| **number);
            for (ports, number) in letters {
                output::line(&format!("  {}: {ports}", letter(*number)));
            }
        } else {
            list(classes, table);
        }
        output::line("");
    }
    if coarse {
        output::line(
            "There are too many workloads to read, so these are namespaces: -n NAMESPACE shows the workloads of one.",
        );
        output::line("partly: these ports pass between some of the workloads.");
    }
    for note in notes(classes, tables, snapshot, doubts) {
        output::line(&note);
    }
}

fn grid(table: &Table, cells: &[Vec<String>]) -> Vec<Vec<String>> {
    let header = table.matrix.columns.iter().map(|group| group.name.clone());
    let mut rows = vec![std::iter::once("from \\ to".to_owned()).chain(header).collect::<Vec<_>>()];
    for (group, row) in table.matrix.rows.iter().zip(cells) {
        rows.push(std::iter::once(group.name.clone()).chain(row.iter().cloned()).collect());
    }
    rows
}

/// Long lists of ports get a letter, which is explained below the table.
fn short(cell: String, long: &mut BTreeMap<String, usize>) -> String {
    if cell.chars().count() <= MAX_CELL_LENGTH {
        return cell;
    }
    let next = long.len();
    letter(*long.entry(cell).or_insert(next))
}

fn letter(number: usize) -> String {
    let letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    match letters.chars().nth(number) {
        Some(letter) => format!("<{letter}>"),
        None => format!("<{number}>"),
    }
}

/// One paragraph for each sender; the ports that most receivers share come last.
fn list(classes: &Classes, table: &Table) {
    for (group, row) in table.matrix.rows.iter().zip(&table.matrix.cells) {
        output::line(&format!("  {}", group.name));
        let mut by_content: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (column, content) in table.matrix.columns.iter().zip(row) {
            if !content.is_nothing() {
                let text = shown(classes, table, content) + table.mark(group, column, content);
                by_content.entry(text).or_default().push(&column.name);
            }
        }
        let common =
            by_content.iter().max_by_key(|(_, columns)| columns.len()).map(|(content, _)| content.clone());
        let single = by_content.len() == 1;
        let rest = common
            .filter(|content| by_content.get(content).is_some_and(|columns| columns.len() > 3) || single);
        let mut by_content: Vec<(&String, &Vec<&str>)> = by_content.iter().collect();
        by_content.sort_by_key(|(content, _)| (content.starts_with("none"), !content.starts_with("all")));
        for (content, columns) in by_content {
            if rest.as_ref() != Some(content) {
                output::line(&format!("    {content} → {}", columns.join(", ")));
            }
        }
        match (rest, single) {
            (None, _) => {}
            (Some(content), true) => output::line(&format!("    {content} → everyone")),
            (Some(content), false) => output::line(&format!("    {content} → everyone else")),
        }
    }
}

fn reasons(table: &Table, classes: &Classes, judge: &mut Judge<'_>, snapshot: &Snapshot) -> Reasons {
    let mut all = Vec::new();
    for (row, contents) in table.matrix.rows.iter().zip(&table.matrix.cells) {
        let mut of_row = Vec::new();
        for (column, content) in table.matrix.columns.iter().zip(contents) {
            let pairs = row.classes.iter().flat_map(|from| column.classes.iter().map(move |to| (*from, *to)));
            let mut found: Vec<Because> = Vec::new();
            for (from, to) in pairs.filter(|_| !content.is_nothing()) {
                for reason in of_pair(table, classes, judge, snapshot, from, to) {
                    if !found.contains(&reason) {
                        found.push(reason);
                    }
                }
            }
            of_row.push(found);
        }
        all.push(of_row);
    }
    all
}

fn of_pair(
    table: &Table,
    classes: &Classes,
    judge: &mut Judge<'_>,
    snapshot: &Snapshot,
    from: usize,
    to: usize,
) -> Vec<Because> {
    let among = &table.matrix.ports;
    let cells = judge.cells(from, to, among);
    let because = |(scope, cell, ports): (Scope, Cell, Vec<usize>)| {
        let Why { verdict, by } = judge.why(&cell);
        let by = by.iter().map(|reason| (reason.stop, decided::by(snapshot, reason)));
        let ports =
            if ports.len() == among.len() { "all".to_owned() } else { classes.ports().named(&ports, among) };
        Because { ports: scoped(scope, &ports), verdict, by: by.collect() }
    };
    cells.into_iter().map(because).collect()
}

fn json_document(
    classes: &Classes,
    judge: &mut Judge<'_>,
    read: &Read,
    (tables, doubts): (&[Table], &Doubts<'_>),
) -> anyhow::Result<()> {
    let name = |class: &usize| classes.all().get(*class).map(|class| class.name.clone());
    let names = |of: &[usize]| of.iter().filter_map(name).collect::<Vec<_>>();
    let group = |group: &tortie_reach::Group| json!({"name": group.name, "classes": names(&group.classes)});
    let mut documents = Vec::new();
    for table in tables {
        let reasons = reasons(table, classes, judge, &read.snapshot);
        let cell = |row: &tortie_reach::Group, column, content: &Content, reasons: &[Because]| {
            if content.is_nothing() {
                return Value::Null;
            }
            let uncertain = table.doubts_of(row, column);
            json!({
                "passes": shown(classes, table, content),
                "certain": uncertain.is_empty(), "notCertainBecause": doubts.places(&uncertain),
                "because": reasons.iter().map(reason_json).collect::<Vec<_>>(),
            })
        };
        let row = |((group, row), reasons): ((&tortie_reach::Group, &Vec<Content>), &Vec<Vec<Because>>)| {
            let columns = table.matrix.columns.iter().zip(row).zip(reasons);
            columns
                .map(|((column, content), reasons)| cell(group, column, content, reasons))
                .collect::<Vec<_>>()
        };
        documents.push(json!({
            "title": table.title,
            "rows": table.matrix.rows.iter().map(group).collect::<Vec<_>>(),
            "columns": table.matrix.columns.iter().map(group).collect::<Vec<_>>(),
            "cells": table.matrix.rows.iter().zip(&table.matrix.cells).zip(&reasons).map(row).collect::<Vec<_>>(),
        }));
    }
    let class = |class: &tortie_reach::Class| {
        let members: Vec<String> = class.shown().map(ToString::to_string).collect();
        json!({"name": class.name, "kind": class.kind, "count": class.count(), "members": members})
    };
    let mut document = json!({
        "classes": classes.all().iter().map(class).collect::<Vec<_>>(),
        "withoutAddress": classes.left_out(),
        "tables": documents,
    });
    read.add_to(&mut document);
    output::line(&serde_json::to_string_pretty(&document)?);
    Ok(())
}

fn reason_json(because: &Because) -> Value {
    let mut document = decided::by_stop(because.by.iter().map(|(stop, by)| (*stop, by.clone())));
    document["ports"] = json!(because.ports);
    document["verdict"] = json!(because.verdict);
    document
}

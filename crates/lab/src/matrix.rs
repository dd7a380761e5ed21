//! Who reaches whom: a real connection for each pair, and the table of what came of them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread;

use anstyle::{AnsiColor, Style};
use serde::{Deserialize, Serialize};
use tortie_api::kubernetes::Pod;
use tortie_api::{Kind, Resource};
use tortie_store::Store;

use crate::probe::Probe;
use crate::{LabDir, LabError};

pub use crate::probe::Verdict;

/// One connection and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// `namespace/pod`, or `node/NAME`.
    pub from: String,
    /// `namespace/pod`.
    pub to: String,
    /// `tcp/80`.
    pub port: String,
    /// What came of it.
    pub verdict: Verdict,
    /// How long it took, in milliseconds.
    pub millis: f64,
    /// What was odd or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Connections at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What the moment was.
    pub name: String,
    /// One for each pair.
    pub connections: Vec<Connection>,
    /// Pods that were not tried, as they have no address: `namespace/pod`, and what is known of why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub left_out: BTreeMap<String, String>,
}

/// Tries a connection from every pod and node to every pod, all at once.
///
/// # Errors
/// The cluster cannot be read.
pub async fn probe_all(
    dir: &LabDir,
    store: &dyn Store,
    name: &str,
    port: Option<u16>,
) -> Result<Step, LabError> {
    let mut sources = Vec::new();
    let mut targets = Vec::new();
    let mut left_out = BTreeMap::new();
    for stored in store.list(Kind::Pod).await?.items {
        let shown = format!("{}/{}", stored.key.namespace, stored.key.name);
        let Ok(Resource::Pod(pod)) = Resource::read(&stored.key, &stored.value) else {
            left_out.insert(shown, "it cannot be read".to_owned());
            continue;
        };
        let Some(address) = pod.status.pod_ip else {
            let said = stored.value["status"]["message"].as_str().unwrap_or("no node has taken it yet");
            left_out.insert(shown, said.to_owned());
            continue;
        };
        sources.push((shown.clone(), dir.pod_netns(&stored.key.namespace, &stored.key.name)));
        targets.push((shown, address, ports_of(&pod, port)));
    }
    for stored in store.list(Kind::Node).await?.items {
        sources.push((format!("node/{}", stored.key.name), dir.node_netns(&stored.key.name)));
    }
    let mut probes = Vec::new();
    for (from, netns) in &sources {
        for (to, address, ports) in targets.iter().filter(|(to, ..)| to != from) {
            for port in ports {
                let to_port = SocketAddr::new(*address, *port);
                probes.push((
                    from.clone(),
                    to.clone(),
                    *port,
                    Probe { netns: netns.clone(), to: to_port, expect: to.clone() },
                ));
            }
        }
    }
    let connections = tokio::task::spawn_blocking(move || run_all(probes)).await;
    let connections = connections.map_err(|error| LabError::problem("the probes", error.to_string()))?;
    Ok(Step { name: name.to_owned(), connections, left_out })
}

fn ports_of(pod: &Pod, chosen: Option<u16>) -> Vec<u16> {
    let tcp = |protocol: &Option<String>| protocol.as_deref().is_none_or(|name| name == "TCP");
    let served = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let served: Vec<u16> =
        served.filter(|port| tcp(&port.protocol)).map(|port| port.container_port).collect();
    match chosen {
        Some(port) => vec![port],
        None if served.is_empty() => vec![80],
        None => served,
    }
}

fn run_all(probes: Vec<(String, String, u16, Probe)>) -> Vec<Connection> {
    /// Threads at a time; each waits most of its time.
    const AT_ONCE: usize = 256;
    let mut connections = Vec::with_capacity(probes.len());
    for chunk in probes.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let running: Vec<_> = chunk.iter().map(|(.., probe)| scope.spawn(|| probe.run())).collect();
            for ((from, to, port, _), thread) in chunk.iter().zip(running) {
                let Ok(probed) = thread.join() else { continue };
                connections.push(Connection {
                    from: from.clone(),
                    to: to.clone(),
                    port: format!("tcp/{port}"),
                    verdict: probed.verdict,
                    millis: probed.millis,
                    note: probed.note,
                });
            }
        });
    }
    connections
}

/// The table for a person; what is not as in `before` is marked.
#[must_use]
pub fn table(step: &Step, before: Option<&Step>) -> String {
    let column = |connection: &Connection| match connection.port.as_str() {
        "tcp/80" => connection.to.clone(),
        port => format!("{} {port}", connection.to),
    };
    let mut columns: Vec<String> = Vec::new();
    let mut rows: Vec<&str> = Vec::new();
    for connection in &step.connections {
        if !columns.contains(&column(connection)) {
            columns.push(column(connection));
        }
        if !rows.contains(&connection.from.as_str()) {
            rows.push(&connection.from);
        }
    }
    columns.sort();
    let cells: BTreeMap<(&str, String), &Connection> =
        step.connections.iter().map(|each| ((each.from.as_str(), column(each)), each)).collect();
    let verdict_before = |connection: &Connection| {
        let same = |other: &&Connection| {
            (&other.from, &other.to, &other.port) == (&connection.from, &connection.to, &connection.port)
        };
        before?.connections.iter().find(same).map(|other| other.verdict)
    };

    let first = rows.iter().map(|row| row.len()).max().unwrap_or(0).max("from \\ to".len());
    let widths: Vec<usize> = columns.iter().map(|column| column.len().max(14)).collect();
    let mut text = format!("{:first$}", "from \\ to");
    for (column, width) in columns.iter().zip(&widths) {
        text += &format!("  {column:width$}");
    }
    text.push('\n');
    for row in rows {
        text += &format!("{row:first$}");
        for (column, width) in columns.iter().zip(&widths) {
            let (cell, style) = match cells.get(&(row, column.clone())) {
                None => ("-".to_owned(), Style::new()),
                Some(connection) => {
                    let changed =
                        verdict_before(connection).is_some_and(|before| before != connection.verdict);
                    cell(connection, changed)
                }
            };
            text += &format!("  {style}{cell:width$}{style:#}");
        }
        text = text.trim_end().to_owned();
        text.push('\n');
    }
    text += &legend(step, before.is_some());
    text
}

fn cell(connection: &Connection, changed: bool) -> (String, Style) {
    let mark = if changed { " *" } else { "" };
    let (word, colour) = match connection.verdict {
        Verdict::Reached => ("reached", AnsiColor::Green),
        Verdict::Refused => ("reached (r)", AnsiColor::Green),
        Verdict::Cut => ("CUT", AnsiColor::Red),
        Verdict::Failed => ("failed", AnsiColor::Yellow),
    };
    let style = Style::new().fg_color(Some(colour.into()));
    (format!("{word}{mark}"), if changed { style.bold() } else { style })
}

fn legend(step: &Step, compared: bool) -> String {
    let mut parts = Vec::new();
    if step.connections.iter().any(|each| each.verdict == Verdict::Refused) {
        parts.push("(r): the pod answered that nothing serves there");
    }
    if compared {
        parts.push("*: changed since the table before");
    }
    let mut text = if parts.is_empty() { String::new() } else { format!("{}\n", parts.join("   ")) };
    for connection in &step.connections {
        if let Some(note) = &connection.note {
            text += &format!("note: {} -> {} {}: {note}\n", connection.from, connection.to, connection.port);
        }
    }
    for (pod, why) in &step.left_out {
        text += &format!("left out: {pod} has no address: {why}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_tells_what_failed_and_who_is_left_out() {
        let connection = Connection {
            from: "a/b".to_owned(),
            to: "c/d".to_owned(),
            port: "tcp/80".to_owned(),
            verdict: Verdict::Failed,
            millis: 0.0,
            note: Some("Network is unreachable".to_owned()),
        };
        let left_out = BTreeMap::from([("e/f".to_owned(), "its image is missing".to_owned())]);
        let text = table(&Step { name: "now".to_owned(), connections: vec![connection], left_out }, None);
        for part in [
            "failed",
            "note: a/b -> c/d tcp/80: Network is unreachable",
            "left out: e/f has no address: its image is missing",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("CUT"), "{text}");
    }
}

//! The text table of a matrix.

use std::collections::BTreeMap;

use anstyle::{AnsiColor, Style};

use super::{Connection, Step, Verdict};

/// The maximum number of notes.
const NOTES: usize = 20;

/// The text table; differences from `before` are marked.
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
    let notes = step.connections.iter().filter_map(|each| Some((each, each.note.as_ref()?)));
    for (connection, note) in notes.clone().take(NOTES) {
        text += &format!("note: {} -> {} {}: {note}\n", connection.from, connection.to, connection.port);
    }
    let more = notes.count().saturating_sub(NOTES);
    if more > 0 {
        text += &format!("note: and {more} more; -o json has all\n");
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
    fn the_table_shows_failures_and_excluded_pods() {
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

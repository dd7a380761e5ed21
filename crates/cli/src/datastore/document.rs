//! The file of an export: a header, one object in each line, and a last line that shows that the file is complete.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tortie_api::{Key, Kind};

use crate::manifests;

/// The name and version of the format.
const FORMAT: &str = "tortie-datastore/1";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    /// The version of Tortie that wrote the file.
    version: String,
    /// When it was written.
    time: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    kind: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    value: Value,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    /// The number of objects.
    end: usize,
}

/// An exported object.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Exported {
    pub(super) key: Key,
    pub(super) value: Value,
}

/// Writes the file.
pub(super) fn write(to: &mut dyn Write, objects: &[Exported]) -> anyhow::Result<()> {
    let header = Header {
        format: FORMAT.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time: jiff::Timestamp::now().to_string(),
    };
    writeln!(to, "{}", serde_json::to_string(&header)?)?;
    for Exported { key, value } in objects {
        let (kind, namespace) = (key.kind.name().to_owned(), key.namespace.clone());
        let line = Line { kind, namespace, name: key.name.clone(), value: value.clone() };
        writeln!(to, "{}", serde_json::to_string(&line)?)?;
    }
    writeln!(to, "{}", serde_json::to_string(&End { end: objects.len() })?)?;
    to.flush()?;
    Ok(())
}

/// Reads a file, or standard input.
///
/// # Errors
/// It is none of this format, or not complete.
pub(super) fn read(file: &Path) -> anyhow::Result<Vec<Exported>> {
    parse(&manifests::read(file)?).with_context(|| file.display().to_string())
}

fn parse(text: &str) -> anyhow::Result<Vec<Exported>> {
    let mut lines = text.lines().enumerate();
    let header = lines.next().and_then(|(_, line)| serde_json::from_str::<Header>(line).ok());
    match header {
        None => bail!("it is no export of tortie datastore export"),
        Some(Header { format, version, .. }) if format != FORMAT => {
            bail!(
                "its format is {format}, of Tortie {version}; this is Tortie {}, which reads {FORMAT}",
                env!("CARGO_PKG_VERSION")
            )
        }
        Some(_) => {}
    }
    let mut objects = Vec::new();
    for (number, line) in lines {
        let number = number + 1;
        if let Ok(End { end }) = serde_json::from_str(line) {
            if end != objects.len() {
                bail!("line {number}: {} objects of {end} are there; export again", objects.len());
            }
            return Ok(objects);
        }
        let line: Line = serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        let kind = Kind::all().find(|kind| kind.name() == line.kind && is_kind(*kind, &line));
        let kind =
            kind.with_context(|| format!("line {number}: {} is no kind that Tortie keeps", line.kind))?;
        objects.push(Exported {
            key: Key { kind, namespace: line.namespace, name: line.name },
            value: line.value,
        });
    }
    bail!("the file is not complete: its last line is missing; export again")
}

/// Two kinds have the name NetworkPolicy; their objects name the API.
fn is_kind(kind: Kind, line: &Line) -> bool {
    line.value.get("apiVersion").and_then(Value::as_str).is_none_or(|version| version == kind.api_version())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn objects() -> Vec<Exported> {
        let policy = |kind: Kind| Exported {
            key: Key::namespaced(kind, "n", "p"),
            value: json!({"apiVersion": kind.api_version(), "kind": "NetworkPolicy", "spec": {}}),
        };
        let block = Exported {
            key: Key::global(Kind::IpamBlock, "10.0.0.0/26"),
            value: json!({"sequenceNumber": 1_800_000_000_000_000_001_u64}),
        };
        vec![policy(Kind::NetworkPolicy), policy(Kind::KubernetesNetworkPolicy), block]
    }

    #[test]
    fn what_is_written_is_read() {
        let mut text = Vec::new();
        write(&mut text, &objects()).unwrap();
        assert_eq!(parse(&String::from_utf8(text).unwrap()).unwrap(), objects());
    }

    #[test]
    fn damaged_files_are_refused() {
        let mut text = Vec::new();
        write(&mut text, &objects()).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (damaged, expected) in [
            (lines[..4].join("\n"), "not complete"),
            ([&lines[..2], &lines[3..]].concat().join("\n"), "line 4: 2 objects of 3"),
            (text.replace("datastore/1", "datastore/2"), "its format is tortie-datastore/2"),
            (text[..text.len() / 2].to_owned(), "line "),
            (lines[1..].join("\n"), "no export"),
            (String::new(), "no export"),
            (text.replace("IPAMBlock", "Nonsense"), "Nonsense is no kind"),
        ] {
            let error = format!("{:#}", parse(&damaged).unwrap_err());
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}

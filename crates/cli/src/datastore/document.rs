//! The file of an export: a header, one object in each line, and a last line that shows that the file is complete. The other format is
//! calicoctl's.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tortie_api::{Key, Kind};

use super::calico_file;
use super::exported::Exported;
use crate::filenames;

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
#[serde(rename_all = "camelCase")]
struct Line {
    api_version: String,
    kind: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    value: Value,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LastLine {
    /// The number of objects.
    end: usize,
}

/// The format of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ExportFormat {
    /// Tortie's: everything that is kept
    #[default]
    Tortie,
    /// That of calicoctl datastore migrate export, which it imports into a Kubernetes API: without Profiles, endpoints, and what controllers copy
    Calico,
}

impl ExportFormat {
    /// Returns whether the format has an object.
    pub(super) fn has(self, key: &Key) -> bool {
        match self {
            Self::Tortie => true,
            Self::Calico => calico_file::has(key),
        }
    }
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Document {
    pub(super) objects: Vec<Exported>,
    /// Its format. Of objects that this does not have, the file says nothing.
    pub(super) format: ExportFormat,
}

/// Writes the file.
///
/// # Errors
/// The format cannot keep an object, or the file cannot be written.
pub(super) fn write(to: &mut dyn Write, objects: &[Exported], format: ExportFormat) -> anyhow::Result<()> {
    match format {
        ExportFormat::Tortie => write_lines(to, objects),
        ExportFormat::Calico => {
            to.write_all(calico_file::write(objects)?.as_bytes())?;
            to.flush()?;
            Ok(())
        }
    }
}

fn write_lines(to: &mut dyn Write, objects: &[Exported]) -> anyhow::Result<()> {
    let header = Header {
        format: FORMAT.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        time: jiff::Timestamp::now().to_string(),
    };
    writeln!(to, "{}", serde_json::to_string(&header)?)?;
    for Exported { key, value } in objects {
        let (kind, namespace) = (key.kind.name().to_owned(), key.namespace.clone());
        let api_version = key.kind.api_version().to_owned();
        let line = Line { api_version, kind, namespace, name: key.name.clone(), value: value.clone() };
        writeln!(to, "{}", serde_json::to_string(&line)?)?;
    }
    writeln!(to, "{}", serde_json::to_string(&LastLine { end: objects.len() })?)?;
    to.flush()?;
    Ok(())
}

/// Reads a file, or standard input.
///
/// # Errors
/// It has none of the formats, or is not complete.
pub(super) fn read(file: &Path) -> anyhow::Result<Document> {
    let text = filenames::read(file)?;
    let read = match calico_file::is_this(&text) {
        true => calico_file::parse(&text).map(|objects| Document { objects, format: ExportFormat::Calico }),
        false => parse(&text).map(|objects| Document { objects, format: ExportFormat::Tortie }),
    };
    read.with_context(|| file.display().to_string())
}

fn parse(text: &str) -> anyhow::Result<Vec<Exported>> {
    let mut lines = text.lines().enumerate();
    let header = lines.next().and_then(|(_, line)| serde_json::from_str::<Header>(line).ok());
    match header {
        None => bail!("it is no export of tortie datastore export or calicoctl datastore migrate export"),
        Some(Header { format, version, .. }) if format != FORMAT => {
            bail!(
                "its format is {format}, of Tortie {version}; this is Tortie {}, which reads {FORMAT}",
                env!("CARGO_PKG_VERSION")
            )
        }
        Some(_) => {}
    }
    let mut objects = Vec::new();
    while let Some((number, line)) = lines.next() {
        let number = number + 1;
        if let Ok(LastLine { end }) = serde_json::from_str(line) {
            if end != objects.len() {
                bail!("line {number}: {} objects of {end} are there; export again", objects.len());
            }
            if lines.next().is_some() {
                bail!("line {}: there is more after the last line; export again", number + 1);
            }
            return Ok(objects);
        }
        let line: Line = serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        let is_kind = |kind: &Kind| kind.name() == line.kind && kind.api_version() == line.api_version;
        let kind = Kind::all().find(is_kind);
        let kind =
            kind.with_context(|| format!("line {number}: {} is no kind that Tortie keeps", line.kind))?;
        let key = Key { kind, namespace: line.namespace, name: line.name };
        let object = Exported { key, value: line.value };
        if let Some(problem) = object.problem() {
            bail!(
                "line {number}: {}: {problem}; correct it in the exported datastore, and export again",
                object.key
            );
        }
        objects.push(object);
    }
    bail!("the file is not complete: its last line is missing; export again")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn objects() -> Vec<Exported> {
        let policy = |kind: Kind| Exported {
            key: Key::namespaced(kind, "n", "p"),
            value: json!({"apiVersion": kind.api_version(), "metadata": {"name": "p", "namespace": "n"}, "spec": {}}),
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
        write(&mut text, &objects(), ExportFormat::Tortie).unwrap();
        assert_eq!(parse(&String::from_utf8(text).unwrap()).unwrap(), objects());
    }

    #[test]
    fn damaged_files_are_refused() {
        let mut text = Vec::new();
        write(&mut text, &objects(), ExportFormat::Tortie).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (damaged, expected) in [
            (lines[..4].join("\n"), "not complete"),
            ([&lines[..2], &lines[3..]].concat().join("\n"), "line 4: 2 objects of 3"),
            (text.replace("datastore/1", "datastore/2"), "its format is tortie-datastore/2"),
            (text[..text.len() / 2].to_owned(), "line "),
            (lines[1..].join("\n"), "no export"),
            (String::new(), "no export"),
            (format!("{text}x"), "more after the last line"),
            (text.replace("\"name\":\"p\",\"value", "\"name\":\"q\",\"value"), "metadata has another name"),
            (text.replace("\"spec\":{}", "\"spec\":[]"), "spec is no mapping"),
            (
                text.replace("\"namespace\":\"n\",\"name\":\"p\",\"value", "\"name\":\"p\",\"value"),
                "namespace is missing",
            ),
            (text.replace("{\"sequenceNumber\":1800000000000000001}", "\"x\""), "its value is no mapping"),
            (text.replace("IPAMBlock", "Nonsense"), "Nonsense is no kind"),
        ] {
            let error = format!("{:#}", parse(&damaged).unwrap_err());
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}

//! The output of `get`: tables, documents, names and templates.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde_json::{Value, json};
use tortie_api::report::ReportedCondition;
use tortie_api::{Kind, manifest};
use tortie_store::Stored;

use super::Get;
use super::columns::{Detail, table};
use super::go_template::GoTemplate;
use super::headings;
use super::template::{Path, Template};
use crate::output;

/// The form of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GetFormat {
    Table,
    Wide,
    Json,
    Yaml,
    Name,
    Template(Template),
    GoTemplate(GoTemplate),
    /// Headers, and the fields below them.
    Columns(Vec<(String, Path)>),
    /// Headings of calicoctl, whose fields depend on the kind.
    Headings(Vec<String>),
}

impl GetFormat {
    /// Parses the value of `-o`.
    ///
    /// # Errors
    /// It is no format, or a template is not correct.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        match (name, value) {
            // `ps` is calicoctl's word.
            ("table" | "ps", None) => Ok(Self::Table),
            ("wide", None) => Ok(Self::Wide),
            ("json", None) => Ok(Self::Json),
            ("yaml" | "yml", None) => Ok(Self::Yaml),
            ("name", None) => Ok(Self::Name),
            ("jsonpath", Some(template)) => Template::parse(template).map(Self::Template),
            ("jsonpath-file", Some(file)) => Template::parse(&text_of(file)?).map(Self::Template),
            ("go-template", Some(template)) => GoTemplate::parse(template).map(Self::GoTemplate),
            ("go-template-file", Some(file)) => GoTemplate::parse(&text_of(file)?).map(Self::GoTemplate),
            ("custom-columns", Some(columns)) if !columns.is_empty() && !columns.contains(':') => {
                Ok(Self::Headings(columns.split(',').map(str::to_owned).collect()))
            }
            ("custom-columns", Some(columns)) => {
                columns.split(',').map(column).collect::<Result<_, _>>().map(Self::Columns)
            }
            ("jsonpath", None) => {
                Err("a template is missing, such as jsonpath={.items[*].metadata.name}".to_owned())
            }
            ("custom-columns", None) => {
                Err("columns are missing, such as custom-columns=NAME:.metadata.name".to_owned())
            }
            ("go-template", None) => {
                Err("a template is missing, such as go-template={{range .items}}{{.metadata.name}}{{end}}".to_owned())
            }
            ("jsonpath-file" | "go-template-file", None) => {
                Err(format!("the file with the template is missing: {name}=FILE"))
            }
            _ => Err("it is none of wide, json, yaml, name, jsonpath=TEMPLATE, jsonpath-file=FILE, go-template=TEMPLATE, \
                      go-template-file=FILE, custom-columns=HEADER:PATH,…"
                .to_owned()),
        }
    }
}

/// The template in a file.
fn text_of(file: &str) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))
}

fn column(text: &str) -> Result<(String, Path), String> {
    let (header, path) =
        text.split_once(':').ok_or_else(|| format!("{text:?} is not of the form HEADER:PATH"))?;
    Ok((header.to_owned(), Path::parse(path)?))
}

/// Prints objects.
pub(super) struct Printer {
    format: GetFormat,
    detail: Detail,
    no_headers: bool,
    sort_by: Option<Path>,
    export: bool,
}

impl Printer {
    /// For objects of these kinds.
    ///
    /// # Errors
    /// The format names a column that the kind does not have.
    pub(super) fn new(get: &Get, kinds: &[Kind]) -> anyhow::Result<Self> {
        let format = match &get.output {
            GetFormat::Headings(wanted) => GetFormat::Columns(headings::columns(wanted, kinds)?),
            format => format.clone(),
        };
        let several_kinds = kinds.len() > 1;
        let detail =
            Detail { wide: get.output == GetFormat::Wide, labels: get.show_labels, kinds: several_kinds };
        Ok(Self {
            format,
            detail,
            no_headers: get.no_headers,
            sort_by: get.sort_by.clone(),
            export: get.export,
        })
    }

    /// Whether objects are rows below a header.
    pub(super) fn is_table(&self) -> bool {
        matches!(self.format, GetFormat::Table | GetFormat::Wide | GetFormat::Columns(_))
    }

    /// Prints the objects of each kind; a single one as it is, others as a list.
    pub(super) fn print(&self, mut groups: Vec<(Kind, Vec<Stored>)>, single: bool) -> anyhow::Result<()> {
        if let Some(path) = &self.sort_by {
            for (_, items) in &mut groups {
                items.sort_by(|a, b| compare(path, &a.value, &b.value));
            }
        }
        match &self.format {
            GetFormat::Table | GetFormat::Wide => self.print_tables(&groups),
            GetFormat::Name | GetFormat::Columns(_) | GetFormat::Headings(_) => {
                let items: Vec<&Stored> = groups.iter().flat_map(|(_, items)| items).collect();
                self.print_rows(&items, true);
            }
            GetFormat::Json | GetFormat::Yaml | GetFormat::Template(_) | GetFormat::GoTemplate(_) => {
                let values: Vec<Value> = groups
                    .into_iter()
                    .flat_map(|(_, items)| items)
                    .map(|stored| self.document(stored))
                    .collect();
                let document = match <[Value; 1]>::try_from(values) {
                    Ok([value]) if single => value,
                    Ok(values) => json!({"apiVersion": "v1", "kind": "List", "items": values}),
                    Err(values) => json!({"apiVersion": "v1", "kind": "List", "items": values}),
                };
                self.print_document(&document)?;
            }
        }
        Ok(())
    }

    fn print_tables(&self, groups: &[(Kind, Vec<Stored>)]) {
        let now = jiff::Timestamp::now().as_second();
        let mut is_first = true;
        for (kind, items) in groups.iter().filter(|(_, items)| groups.len() == 1 || !items.is_empty()) {
            if !std::mem::take(&mut is_first) {
                output::line("");
            }
            let items: Vec<&Stored> = items.iter().collect();
            let rows = table(*kind, &items, self.detail, now);
            output::columns(rows.get(usize::from(self.no_headers)..).unwrap_or_default());
            if *kind == Kind::NodeReport {
                items.iter().flat_map(|report| conditions(report)).for_each(|line| output::line(&line));
            }
        }
    }

    /// Prints one line for each object, in a format of lines.
    fn print_rows(&self, items: &[&Stored], with_header: bool) {
        match &self.format {
            GetFormat::Name => {
                for stored in items {
                    output::line(&name_of(stored));
                }
            }
            GetFormat::Columns(columns) => {
                let header = columns.iter().map(|(header, _)| header.clone()).collect();
                let row = |stored: &&Stored| {
                    let document = self.document((*stored).clone());
                    columns.iter().map(|(_, path)| cell(path, &document)).collect::<Vec<_>>()
                };
                let header = Some(header).filter(|_| with_header && !self.no_headers);
                output::columns(&header.into_iter().chain(items.iter().map(row)).collect::<Vec<_>>());
            }
            _ => {}
        }
    }

    fn print_document(&self, document: &Value) -> anyhow::Result<()> {
        match &self.format {
            GetFormat::Yaml => output::data(&tortie_api::to_yaml(document)),
            GetFormat::Template(template) => output::data(&template.render(document)),
            GetFormat::GoTemplate(template) => output::data(&template.render(document)?),
            _ => output::data(&(serde_json::to_string_pretty(document)? + "\n")),
        }
        Ok(())
    }

    /// The object as a document, with the version that `apply` and `replace` compare. IPAM's own records are stored without
    /// metadata, as in Calico, and get their name here.
    fn document(&self, stored: Stored) -> Value {
        let Stored { key, mut value, version, .. } = stored;
        if self.export {
            manifest::take_metadata_of_the_cluster(&mut value);
        } else if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.insert("resourceVersion".to_owned(), json!(version.as_str()));
        }
        if value.get("metadata").is_some() {
            return value;
        }
        let kind = key.kind;
        json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": {"name": key.name}, "spec": value})
    }

    /// Prints an object that has changed: `event` says how, if the user wants to know.
    pub(super) fn print_change(&self, stored: &Stored, event: Option<&str>) -> anyhow::Result<()> {
        match &self.format {
            GetFormat::Table | GetFormat::Wide => {
                let rows = table(stored.key.kind, &[stored], self.detail, jiff::Timestamp::now().as_second());
                let row = rows.into_iter().nth(1).unwrap_or_default();
                let event = event.map(|event| format!("{event:8}"));
                output::columns(&[event.into_iter().chain(row).collect()]);
            }
            GetFormat::Name | GetFormat::Columns(_) | GetFormat::Headings(_) => {
                self.print_rows(&[stored], false)
            }
            GetFormat::Json | GetFormat::Yaml | GetFormat::Template(_) | GetFormat::GoTemplate(_) => {
                if self.format == GetFormat::Yaml {
                    output::data("---\n");
                }
                let object = self.document(stored.clone());
                self.print_document(&match event {
                    Some(event) => json!({"type": event, "object": object}),
                    None => object,
                })?;
            }
        }
        Ok(())
    }
}

/// `pod/NAME`, and the group for kinds that are not of the core group, as kubectl prints it.
fn name_of(stored: &Stored) -> String {
    let kind = stored.key.kind;
    let group = kind.api_version().split_once('/').map(|(group, _)| format!(".{group}")).unwrap_or_default();
    format!("{}{group}/{}", kind.name().to_lowercase(), stored.key.name)
}

/// The cell of a custom column.
fn cell(path: &Path, document: &Value) -> String {
    match path.text(document, ",") {
        text if text.is_empty() => "<none>".to_owned(),
        text => text,
    }
}

/// Compares two objects by a field: absent ones first, then numbers, then texts.
fn compare(path: &Path, a: &Value, b: &Value) -> Ordering {
    let first = |object| path.values(object).first().copied().cloned().unwrap_or_default();
    let rank = |value: &Value| match value {
        Value::Null => 0,
        Value::Number(_) => 1,
        _ => 2,
    };
    let (a, b) = (first(a), first(b));
    match (&a, &b) {
        (Value::Number(a), Value::Number(b)) => {
            a.as_f64().unwrap_or_default().total_cmp(&b.as_f64().unwrap_or_default())
        }
        (Value::String(a), Value::String(b)) => a.cmp(b),
        _ => rank(&a).cmp(&rank(&b)).then_with(|| a.to_string().cmp(&b.to_string())),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_those_of_kubectl() {
        for (text, expected) in
            [("json", GetFormat::Json), ("wide", GetFormat::Wide), ("name", GetFormat::Name)]
        {
            assert_eq!(GetFormat::parse(text), Ok(expected));
        }
        assert!(matches!(GetFormat::parse("jsonpath={.a}"), Ok(GetFormat::Template(_))));
        assert!(
            matches!(GetFormat::parse("custom-columns=NAME,CIDR"), Ok(GetFormat::Headings(names)) if names.len() == 2)
        );
        assert!(GetFormat::parse("custom-columns=NAME,CIDR:.spec.cidr").is_err());
        assert!(
            matches!(GetFormat::parse("custom-columns=A:.a,B:.b"), Ok(GetFormat::Columns(columns)) if columns.len() == 2)
        );
        for (text, expected) in [
            ("xml", "it is none of"),
            ("jsonpath", "a template is missing"),
            ("jsonpath={.a", "not closed"),
            ("custom-columns=A:.a,B", "HEADER:PATH"),
            ("json=x", "it is none of"),
            ("go-template", "a template is missing"),
            ("go-template={{.a", "go-template"),
            ("go-template-file", "go-template-file=FILE"),
            ("jsonpath-file=/nowhere", "/nowhere: "),
        ] {
            let error = GetFormat::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn objects_are_sorted_by_numbers_texts_and_absence() {
        let path = Path::parse("{.spec.order}").unwrap();
        let mut objects = [
            json!({"spec": {"order": 10}}),
            json!({"spec": {"order": 9.5}}),
            json!({}),
            json!({"spec": {"order": "a"}}),
        ];
        objects.sort_by(|a, b| compare(&path, a, b));
        let orders: Vec<String> = objects.iter().map(|object| path.text(object, "")).collect();
        assert_eq!(orders, ["", "9.5", "10", "a"]);
    }
}

//! docs/json.md has every field that commands print with `-o json`, and no other one.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::offline::support::{CLUSTER, tortie};

const PAGE: &str = include_str!("../../../../../docs/json.md");
const POLICY: &str = "apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: closed, namespace: shop}
spec: {selector: all(), types: [Ingress]}
";
const UNREAD: &str =
    "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: shop}\n";
const BAD: &str = "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: p}\nspec: {selector: app = 'web'}\n";

/// The commands that need no cluster, by the heading of their section, each with several command lines.
const COMMANDS: &[(&str, &[&[&str]])] = &[
    (
        "tortie explain",
        &[
            &["explain", "-f", "c.yml", "jobs/nightly-x9s2b", "shop/back-0", "--port", "8443"],
            &["explain", "-f", "host.yml", "198.51.100.7", "node/edge", "--port", "443"],
            &["explain", "-f", "c.yml", "-f", "unread.yml", "jobs/nightly-x9s2b", "shop/back-0"],
        ],
    ),
    ("tortie matrix", &[&["matrix", "-f", "c.yml", "-f", "unread.yml"]]),
    ("tortie preview", &[&["preview", "--in", "c.yml", "--in", "unread.yml", "-f", "p.yml"]]),
    ("tortie validate", &[&["validate", "-f", "c.yml", "-f", "bad.yml"]]),
    ("tortie policy lint", &[&["policy", "lint", "-f", "c.yml", "-f", "p.yml"]]),
    ("tortie policy test", &[&["policy", "test", "e.yml", "-f", "c.yml"]]),
    ("tortie policy cost", &[&["policy", "cost", "-f", "c.yml"]]),
    ("tortie version", &[&["version", "--client"]]),
];

/// A documented field.
struct Field {
    path: String,
    /// Whether what is below it is not documented.
    is_opaque: bool,
    is_optional: bool,
}

/// The fields of a section.
fn documented(heading: &str) -> Vec<Field> {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(&format!("`{heading}`")));
    let section = section.unwrap_or_else(|| panic!("docs/json.md has no section `{heading}`"));
    let mut fields = Vec::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let cell = line.trim_matches('|').split('|').next().unwrap();
        for name in cell.split('`').skip(1).step_by(2) {
            let path = name.trim_end_matches('…').to_owned();
            let (is_opaque, is_optional) = (name.ends_with('…'), line.contains("(optional)"));
            fields.push(Field { path, is_opaque, is_optional });
        }
    }
    fields
}

/// A path, and whether there is nothing: null, or an empty mapping or list.
type Found = (String, bool);

/// The paths of values that are no mapping and no list, and of empty ones.
fn paths(value: &Value, path: &str, found: &mut BTreeSet<Found>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                paths(value, &format!("{path}{dot}{name}"), found);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().for_each(|item| paths(item, &format!("{path}[]"), found));
        }
        Value::Object(_) | Value::Array(_) | Value::Null => drop(found.insert((path.to_owned(), true))),
        _ => drop(found.insert((path.to_owned(), false))),
    }
}

#[test]
fn every_field_is_documented() {
    let host = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/hosts/01-protect-a-node.yml"),
    );
    let host = host.unwrap();
    let expectations = "expectations:\n- shop/front* reaches shop/back-0 on tcp/8443\n- jobs/* reaches shop/back-0\n- outside does not reach shop/back-0\n";
    let files = [
        ("c.yml", CLUSTER),
        ("p.yml", POLICY),
        ("bad.yml", BAD),
        ("unread.yml", UNREAD),
        ("host.yml", &host),
        ("e.yml", expectations),
    ];
    let mut wrong = Vec::new();
    for (heading, lines) in COMMANDS {
        let fields = documented(heading);
        let mut found = BTreeSet::new();
        for line in *lines {
            let (_, out, err) = tortie(&files, &[line, &["-o", "json"][..]].concat());
            let document =
                serde_json::from_str(&out).unwrap_or_else(|error| panic!("{line:?}: {error}: {out}{err}"));
            paths(&document, "", &mut found);
        }
        // An empty list or null stands for all that could be below it.
        let covers = |field: &Field, (path, is_empty): &Found| {
            let below = path.strip_prefix(&field.path);
            let above = field.path.strip_prefix(path.as_str());
            below.is_some_and(|rest| rest.is_empty() || field.is_opaque && rest.starts_with(['.', '[']))
                || (*is_empty && above.is_some_and(|rest| rest.starts_with(['.', '['])))
        };
        for (path, _) in found.iter().filter(|path| !fields.iter().any(|field| covers(field, path))) {
            wrong.push(format!("`{heading}` prints {path}, which docs/json.md lacks"));
        }
        let required = fields.iter().filter(|field| !field.is_optional);
        for field in required.filter(|field| !found.iter().any(|path| covers(field, path))) {
            wrong.push(format!("docs/json.md has {}, which `{heading}` does not print", field.path));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

//! `tortie matrix` on manifests: its output, and that the page for browsers is complete.

use std::collections::BTreeSet;

use crate::offline::support::{CLUSTER, tortie};
use serde_json::Value;

const NOTES: &str = "\
-: there are no such flows (a pod to itself), or no policy of pods is concerned.
A node always reaches its own pods; entries of nodes are about pods of other nodes.
";

fn matrix(arguments: &[&str]) -> (i32, String, String) {
    tortie(&[("c.yml", CLUSTER)], &[&["matrix", "-f", "c.yml"], arguments].concat())
}

#[test]
fn classes_are_shown_with_their_reachability() {
    let expected = format!(
        "\
who reaches whom:
  jobs/nightly-x9s2b, shop/back-0 (2)
    all → jobs/nightly-x9s2b, nodes (2), 203.0.113.0/24, outside
    none → shop/back-0, shop/front-* (3)
  shop/front-* (3)
    all → jobs/nightly-x9s2b, nodes (2), 203.0.113.0/24, outside
    tcp/8443 → shop/back-0
    none → shop/front-* (3)
  nodes (2)
    all → jobs/nightly-x9s2b
    none → shop/back-0, shop/front-* (3)
  203.0.113.0/24
    all → jobs/nightly-x9s2b
    tcp/443,8000-8999 → shop/front-* (3)
    none → shop/back-0
  outside
    all → jobs/nightly-x9s2b
    none → shop/back-0, shop/front-* (3)

Rows send, columns receive. all, none: of all protocols and ports.
{NOTES}VXLAN (udp/4789) and IPIP (proto/4) from pods are dropped before policy, unless FelixConfiguration allows them; that is not shown here.
"
    );
    assert_eq!(matrix(&[]), (0, expected, String::new()));
}

#[test]
fn a_namespace_and_a_port() {
    let expected = format!(
        "\
out of namespace jobs:
from \\ to            jobs/nightly-x9s2b   shop/* (4)   nodes (2)   203.0.113.0/24, outside
jobs/nightly-x9s2b   -                    none         all         all

into namespace jobs:
from \\ to                 jobs/nightly-x9s2b
jobs/nightly-x9s2b        -
shop/* (4)                all
nodes (2)                 all
203.0.113.0/24, outside   all

Rows send, columns receive. all, none: of tcp/443, which no rule distinguishes from the given port.
{NOTES}"
    );
    assert_eq!(matrix(&["-n", "jobs", "--port", "tcp/443"]), (0, expected, String::new()));
}

#[test]
fn invalid_arguments_are_rejected() {
    for (arguments, message) in [
        (&["-n", "nowhere"][..], "error: namespace nowhere has no pods with addresses"),
        (&["--port", "tcp"], "a port is missing"),
        (&["-f", "gone.yml"], "gone.yml"),
    ] {
        let (code, out, err) = matrix(arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?} {err}");
        assert!(err.contains(message), "{arguments:?} {err}");
    }
    let (code, _, err) =
        tortie(&[("c.yml", &CLUSTER.replace("action: Allow", "action: Forbid"))], &["matrix", "-f", "c.yml"]);
    assert!(code == 3 && err.contains("spec.ingress[0].action"), "{code} {err}");
}

#[test]
fn as_json_with_what_decides() {
    let (code, out, _) = matrix(&["-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0);
    let classes = document["classes"].as_array().unwrap();
    let front = classes.iter().find(|class| class["name"] == "shop/front-* (3)").unwrap();
    assert_eq!(
        (front["count"].as_u64(), front["members"].as_array().unwrap().len()),
        (Some(3), 3),
        "{front}"
    );
    let table = &document["tables"][0];
    let place = |side: &str, name: &str| {
        table[side].as_array().unwrap().iter().position(|group| group["name"] == name).unwrap()
    };
    let cell = &table["cells"][place("rows", "shop/front-* (3)")][place("columns", "shop/back-0")];
    assert_eq!(cell["passes"], "tcp/8443");
    let passes =
        cell["because"].as_array().unwrap().iter().find(|reason| reason["verdict"] == "Allow").unwrap();
    assert_eq!(passes["ingress"], "KubernetesNetworkPolicy shop/back, rule 1 (c.yml:58)", "{cell}");
    let drops =
        cell["because"].as_array().unwrap().iter().find(|reason| reason["verdict"] == "Deny").unwrap();
    assert_eq!(drops["ingress"], "the end of tier default: no rule matches", "{cell}");
}

#[test]
fn the_page_is_complete_and_names_every_class() {
    let (code, page, _) = matrix(&["-o", "html"]);
    assert_eq!(code, 0);
    well_formed(&page);
    for class in
        ["shop/front-* (3)", "shop/back-0", "jobs/nightly-x9s2b", "nodes (2)", "203.0.113.0/24", "outside"]
    {
        assert!(page.contains(&format!("<li><b>{class}</b>")), "{class} is missing in\n{page}");
    }
    assert!(page.contains("in: KubernetesNetworkPolicy shop/back, rule 1 (c.yml:58)"), "{page}");
    // Nothing is loaded from elsewhere.
    for foreign in ["<script", "http:", "https:", "src=", "href=", "url(", "@import"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
}

#[test]
fn names_in_the_page_are_escaped() {
    let (_, page, _) = tortie(&[("<i>&.yml", CLUSTER)], &["matrix", "-f", "<i>&.yml", "-o", "html"]);
    well_formed(&page);
    assert!(page.contains("&lt;i&gt;&amp;.yml:58") && !page.contains("<i>"), "{page}");
}

/// Every element is closed by its own end tag, in order; the text contains no stray markup.
fn well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("a document type");
    while let Some(begin) = rest.find('<') {
        let text = &rest[..begin];
        let in_style = open.last() == Some(&"style");
        assert!(in_style || !text.contains('>'), "a stray > in {text:?}");
        assert!(
            in_style
                || !text
                    .replace("&lt;", "")
                    .replace("&gt;", "")
                    .replace("&amp;", "")
                    .replace("&quot;", "")
                    .contains('&'),
            "{text:?}"
        );
        let end = begin + rest[begin..].find('>').expect("a tag that ends");
        let tag = &rest[begin + 1..end];
        assert!(!tag.contains('<'), "{tag:?}");
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(
                open.pop(),
                Some(name),
                "before {:?}",
                &rest[end..].chars().take(60).collect::<String>()
            ),
            None if tag.ends_with('/') => {}
            None => {
                let name = tag.split_whitespace().next().unwrap();
                seen.insert(name);
                open.push(name);
            }
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    assert!(["html", "head", "body", "table", "td", "th"].iter().all(|name| seen.contains(name)), "{seen:?}");
}

/// Thousands of pods of many workloads: the text lists namespaces only.
#[test]
fn many_workloads_stay_readable() {
    let mut cluster = String::new();
    for number in 0..70 {
        for pod in 0..3 {
            cluster += &format!(
                "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: app{number}-{pod}, namespace: ns{}, labels: {{app: app{number}}}}}\n\
                 spec: {{nodeName: 'n', containers: [{{name: c}}]}}\nstatus: {{podIP: 10.0.{number}.{pod}}}\n",
                number % 2
            );
        }
        cluster += &format!(
            "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: app{number}, namespace: ns{}}}\n\
             spec: {{podSelector: {{matchLabels: {{app: app{number}}}}}, ingress: [{{from: [{{podSelector: {{matchLabels: {{app: app{}}}}}}}], ports: [{{port: {}}}]}}]}}\n",
            number % 2,
            (number + 2) % 70,
            8000 + number
        );
    }
    let (code, out, _) = tortie(&[("c.yml", &cluster)], &["matrix", "-f", "c.yml"]);
    assert_eq!(code, 0);
    assert!(out.lines().count() < 40, "{out}");
    assert!(out.contains("ns0/* (105)") && out.contains("-n NAMESPACE shows the workloads of one"), "{out}");
    assert!(out.contains("partly tcp/8000,8002,8004"), "{out}");
    let (_, out, _) =
        tortie(&[("c.yml", &cluster)], &["matrix", "-f", "c.yml", "-n", "ns1", "--port", "tcp/8003"]);
    assert!(out.contains("ns1/app5-* (3)"), "{out}");
}

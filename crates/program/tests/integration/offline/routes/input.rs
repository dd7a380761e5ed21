//! What routes depend on is missing: a router that loads an empty configuration loses its routes.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

use serde_json::{Value, json};

use super::{block, node};
use crate::offline::support::tortie;

/// All outputs that a router or a program may load.
const LOADED: [&[&str]; 7] = [
    &["--for", "frr"],
    &["--for", "bird"],
    &["--for", "linux"],
    &["--for", "aws", "--table", "t"],
    &["--for", "azure", "--table", "t", "--resource-group", "g"],
    &["--for", "gcp", "--network", "n"],
    &["-o", "json"],
];

#[test]
fn files_without_what_routes_depend_on_give_no_configuration() {
    let mut bare = node(1, "one");
    bare["spec"] = json!({});
    for (item, by, missing) in [
        (node(1, "one"), &[][..], "there are no IPAMBlocks"),
        (bare, &["--pod-cidrs"], "there are no Nodes with spec.podCIDRs"),
    ] {
        let list = json!({"kind": "List", "items": [item]}).to_string();
        let run = |arguments: &[&str]| {
            tortie(&[("c.json", &list)], &[&["routes", "-f", "c.json"], by, arguments].concat())
        };
        for arguments in LOADED {
            let (code, out, errors) = run(arguments);
            assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {errors}");
            assert!(errors.contains(missing) && errors.contains("an empty configuration"), "{errors}");
        }
        assert!(run(&[]).0 < 2, "people see that there is nothing");
    }
}

#[test]
fn a_datastore_that_does_not_serve_blocks_gives_no_configuration() {
    let owned = block("10.244.0.0/30", Some("one"), "one");
    // Each row: the Nodes and blocks that the API serves, if it does, and the exit code.
    for (nodes, blocks, expected) in [
        (vec![node(1, "one")], None, 2),
        (vec![node(1, "one")], Some(vec![]), 0),
        (vec![node(1, "one")], Some(vec![owned]), 0),
        (vec![], Some(vec![]), 2),
    ] {
        let kubeconfig = api(&nodes, blocks.as_deref());
        for arguments in LOADED {
            let store =
                ["routes", "--calico-group", "crd.projectcalico.org/v1", "--store", "kubernetes:k.yml"];
            let (code, out, errors) = tortie(&[("k.yml", &kubeconfig)], &[&store, arguments].concat());
            assert_eq!(code, expected, "{arguments:?} {blocks:?}: {out}{errors}");
            assert!(
                code == 0 || out.is_empty() && errors.contains("an empty configuration"),
                "{out}{errors}"
            );
        }
    }
}

/// The kubeconfig of an API that serves these objects until the test ends.
fn api(nodes: &[Value], blocks: Option<&[Value]>) -> String {
    let list = |kind: &str, items: &[Value]| {
        let metadata = json!({"resourceVersion": "1"});
        let mut items = items.to_vec();
        items.iter_mut().for_each(|item| item["metadata"]["resourceVersion"] = json!("1"));
        json!({"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": items}).to_string()
    };
    let nodes = list("NodeList", nodes);
    let blocks = blocks.map(|blocks| list("IPAMBlockList", blocks));
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            let request: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let path = request.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
            let body = match path.split('?').next() {
                Some("/api/v1/nodes") => Some(&nodes),
                Some("/apis/crd.projectcalico.org/v1/ipamblocks") => blocks.as_ref(),
                _ => None,
            };
            let (status, body) =
                body.map_or(("404 Not Found", "404 page not found"), |body| ("200 OK", body));
            let length = body.len();
            // The client may have gone.
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        }
    });
    format!(
        "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}], \
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}], users: [{{name: u, user: {{}}}}]}}"
    )
}

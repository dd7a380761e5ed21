//! `tortie routes`: the text for each router, and routers that load it.

mod input;
mod routers;
mod since;

use serde_json::{Value, json};

use crate::offline::support::tortie;

fn node(number: u8, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "annotations": {
            "projectcalico.org/IPv4Address": format!("192.0.2.{number}/24"),
            "projectcalico.org/IPv6Address": format!("fd02::{number}/64"),
        }},
        "spec": {"providerID": format!("aws:///eu-west-1a/i-0{number}"), "podCIDRs": [format!("10.9.{number}.0/24")]},
    })
}

/// A block with one address of a pod on this node.
fn block(cidr: &str, affinity: Option<&str>, pod_on: &str) -> Value {
    let size = 1_usize
        << (if cidr.contains(':') { 128 } else { 32 }
            - cidr.split('/').nth(1).unwrap().parse::<u32>().unwrap());
    let mut allocations = vec![Value::Null; size];
    allocations[1] = json!(0);
    let free: Vec<usize> = (0..size).filter(|offset| *offset != 1).collect();
    json!({
        "apiVersion": "projectcalico.org/v3", "kind": "IPAMBlock", "metadata": {"name": cidr},
        "spec": {
            "cidr": cidr, "affinity": affinity.map(|node| format!("host:{node}")), "allocations": allocations, "unallocated": free,
            "attributes": [{"handle_id": "h", "secondary": {"node": pod_on, "pod": "p", "namespace": "n"}}],
            "deleted": false,
        },
    })
}

/// Two nodes with blocks of both families; `two` borrows an address of `one`; a block without an owner has a pod of `one`.
fn cluster() -> String {
    let items = [
        node(1, "one"),
        node(2, "two"),
        block("10.244.0.0/30", Some("one"), "two"),
        block("10.244.0.64/30", Some("two"), "two"),
        block("10.244.9.0/30", None, "one"),
        block("fd00:10::/126", Some("one"), "one"),
    ];
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

/// Destination and next hop.
const ROUTES: [(&str, &str); 5] = [
    ("10.244.0.0/30", "192.0.2.1"),
    ("10.244.0.1/32", "192.0.2.2"),
    ("10.244.0.64/30", "192.0.2.2"),
    ("10.244.9.1/32", "192.0.2.1"),
    ("fd00:10::/126", "fd02::1"),
];

fn ok(arguments: &[&str]) -> String {
    let all: Vec<&str> = ["routes", "-f", "cluster.json"].iter().chain(arguments).copied().collect();
    let (code, out, errors) = tortie(&[("cluster.json", &cluster())], &all);
    assert_eq!((code, errors.as_str()), (0, ""), "{out}");
    out
}

/// A Windows node takes packets to its pods in VXLAN only, whatever leads them there. Pod networks are another plugin's.
#[test]
fn blocks_of_windows_nodes_get_no_routes() {
    let mut windows = node(3, "three");
    windows["metadata"]["labels"] = json!({"kubernetes.io/os": "windows"});
    let items = [
        node(1, "one"),
        windows,
        block("10.244.0.0/30", Some("one"), "three"),
        block("10.244.0.64/30", Some("three"), "three"),
    ];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string();
    for router in ["text", "linux", "bird"] {
        let routes = ["routes", "-f", "cluster.json", "--for", router];
        let (code, out, errors) = tortie(&[("cluster.json", &list)], &routes);
        assert_eq!(code, 0, "{errors}");
        let expected = "note: Windows nodes take packets to their pods in VXLAN only, so these have no route: \
                        10.244.0.1/32 (Node three), 10.244.0.64/30 (Node three)\n";
        assert_eq!(errors, expected);
        // A router's file says so itself.
        let (comments, lines): (Vec<&str>, Vec<&str>) = out.lines().partition(|line| line.starts_with('#'));
        assert_eq!(comments, if router == "text" { vec![] } else { vec![format!("# {}", expected.trim())] });
        let lines = lines.join("\n");
        assert!(
            lines.contains("10.244.0.0/30")
                && !lines.contains("10.244.0.1")
                && !lines.contains("10.244.0.64"),
            "{out}"
        );
        let (code, out, errors) =
            tortie(&[("cluster.json", &list)], &[&routes[..], &["--pod-cidrs"]].concat());
        assert_eq!((code, errors.as_str()), (0, ""));
        assert!(out.contains("10.9.1.0/24") && out.contains("10.9.3.0/24"), "{out}");
    }
}

/// Each row: what the agent of a Windows node or a daemon of flannel has announced, and whether its pod network is in an overlay.
#[test]
fn pod_networks_in_overlays_get_no_routes() {
    for (annotation, value, is_in_overlay) in [
        ("projectcalico.org/IPv4VXLANTunnelAddr", "10.9.3.2", true),
        ("flannel.alpha.coreos.com/backend-type", "vxlan", true),
        ("flannel.alpha.coreos.com/backend-type", "host-gw", false),
        ("tortie.io/hns-network", "L2Bridge", false),
        ("example.com/other", "plugin", false),
    ] {
        for (os, takes_routes) in [("windows", !is_in_overlay), ("linux", true)] {
            let mut other = node(3, "three");
            other["metadata"]["labels"] = json!({"kubernetes.io/os": os});
            other["metadata"]["annotations"][annotation] = json!(value);
            let list = json!({"kind": "List", "items": [node(1, "one"), other]}).to_string();
            let arguments = ["routes", "-f", "cluster.json", "--pod-cidrs", "--for", "bird"];
            let (code, out, errors) = tortie(&[("cluster.json", &list)], &arguments);
            let shown = format!("{annotation} {os}: {out}{errors}");
            assert!(code == 0 && out.contains("route 10.9.1.0/24"), "{shown}");
            assert_eq!(out.contains("route 10.9.3.0/24"), takes_routes, "{shown}");
            assert_eq!(errors.contains("VXLAN only"), !takes_routes, "{shown}");
        }
    }
}

/// Routes of all networks of a project of Google Cloud share their names.
#[test]
fn two_networks_of_a_project_have_two_names_for_one_destination() {
    let of = |network: &str| ok(&["--for", "gcp", "--network", network]);
    let has = |text: &str, hash: &str| text.contains(&format!("create tortie-{hash}-10-244-0-0-30 "));
    assert!(has(&of("default"), "933b5bde") && has(&of("n"), "eb0c3431"));
    assert!(has(&of("projects/p/global/networks/default"), "933b5bde"), "the same network by its URL");
}

/// Each row: routes of each family, the cloud, and whether a note says that a table may be too small.
#[test]
fn a_table_that_may_be_too_small_is_a_note() {
    let aws = ["--for", "aws", "--table", "t"];
    let azure = ["--for", "azure", "--table", "t", "--resource-group", "g"];
    for (ipv4, ipv6, arguments, expected) in [
        (500, 500, &aws[..], None),
        (501, 0, &aws, Some("501 IPv4 routes: a route table of AWS has at most 500")),
        (0, 501, &aws, Some("501 IPv6 routes: a route table of AWS has at most 500")),
        (400, 0, &azure, None),
        (200, 201, &azure, Some("401 routes: a route table of Azure has at most 400")),
    ] {
        let mut one = node(1, "one");
        let ipv4 = (0..ipv4).map(|number| format!("10.{}.{}.0/24", number / 256, number % 256));
        one["spec"]["podCIDRs"] =
            ipv4.chain((0..ipv6).map(|number| format!("fd00:{number:x}::/64"))).collect();
        let list = json!({"kind": "List", "items": [one]}).to_string();
        let all = [&["routes", "-f", "cluster.json", "--pod-cidrs"], arguments].concat();
        let (code, out, errors) = tortie(&[("cluster.json", &list)], &all);
        assert_eq!(code, 0, "{errors}");
        match expected {
            None => assert_eq!(errors, ""),
            Some(expected) => {
                let note = format!("note: {expected}");
                assert!(errors.starts_with(&note) && out.starts_with(&format!("# {note}")), "{errors}");
            }
        }
    }
}

/// Agents of all nodes write blocks, so a name of an owner may change what a terminal shows.
#[test]
fn warnings_have_no_control_characters() {
    let block = block("10.244.0.0/30", Some("\u{1b}]0;x\u{7}"), "one");
    let list = json!({"kind": "List", "items": [node(1, "one"), block]}).to_string();
    for router in ["text", "linux"] {
        let arguments = ["routes", "-f", "cluster.json", "--for", router];
        let (code, out, errors) = tortie(&[("cluster.json", &list)], &arguments);
        assert_eq!(errors, "warning: 10.244.0.0/30: there is no Node \\u{1b}]0;x\\u{7}\n");
        assert!(code == 1 && !out.contains('\u{1b}'), "{out}");
    }
}

#[test]
fn options_without_effect_are_rejected() {
    for (arguments, expected) in [
        (&["--table", "t"][..], "--table has no effect with --for text"),
        (&["--for", "linux", "--table", "t"], "--table has no effect with --for linux"),
        (&["--for", "aws", "--table", "t", "--resource-group", "g"], "--resource-group has no effect"),
        (&["--for", "bird", "--network", "n"], "--network has no effect with --for bird"),
        (&["--for", "frr", "-o", "json"], "-o json has no effect with --for"),
        (&["--since", "c.json", "--attempted"], "--attempted has no effect without -o json"),
        (&["-o", "json", "--attempted"], "--since <FILE>"),
        (&["--store", "unix:/s"], "--store has no effect with files"),
        (&["--config", "c"], "--config has no effect with files"),
        (&["--calico-group", "crd.projectcalico.org/v1"], "--calico-group has no effect with files"),
    ] {
        let all = [&["routes", "-f", "cluster.json"], arguments].concat();
        let (code, out, errors) = tortie(&[("cluster.json", &cluster())], &all);
        assert!((code, out.as_str()) == (2, "") && errors.contains(expected), "{arguments:?}: {errors}");
    }
    // A variable of the environment is for all commands.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("cluster.json"), cluster()).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tortie"));
    command.current_dir(folder.path()).env("TORTIE_STORE", "unix:/s");
    assert!(command.args(["routes", "-f", "cluster.json"]).output().unwrap().status.success());
}

#[test]
fn each_router_gets_its_words() {
    let text = ok(&[]);
    for (destination, next_hop) in ROUTES {
        let has = |line: &str| line.split_whitespace().take(2).eq([destination, next_hop]);
        assert!(text.lines().any(has), "{destination} in {text}");
    }
    let parsed: Value = serde_json::from_str(&ok(&["-o", "json"])).unwrap();
    let found: Vec<(&str, &str)> = parsed
        .as_array()
        .unwrap()
        .iter()
        .map(|route| (route["destination"].as_str().unwrap(), route["nextHop"].as_str().unwrap()))
        .collect();
    assert_eq!(found, ROUTES);
    for (arguments, expected) in [
        (&["--for", "frr"][..], "ip route 10.244.0.1/32 192.0.2.2"),
        (&["--for", "frr"], "ipv6 route fd00:10::/126 fd02::1"),
        (&["--for", "bird"], "route fd00:10::/126 via fd02::1; # one"),
        (&["--for", "linux"], "ip -6 route replace fd00:10::/126 via fd02::1"),
        (
            &["--for", "aws", "--table", "rtb-1"],
            "aws ec2 create-route --route-table-id rtb-1 --destination-cidr-block 10.244.0.64/30 --instance-id i-02",
        ),
        (&["--for", "aws", "--table", "rtb-1"], "--instance-id i-01 --no-source-dest-check"),
        (
            &["--for", "azure", "--table", "pods", "--resource-group", "my group"],
            "az network route-table route create --resource-group 'my group' --route-table-name pods --name tortie-10-244-9-1-32 --address-prefix 10.244.9.1/32 --next-hop-type VirtualAppliance --next-hop-ip-address 192.0.2.1",
        ),
        (
            &["--for", "gcp", "--network", "default"],
            "gcloud compute routes create tortie-933b5bde-10-244-0-0-30 --network default --destination-range 10.244.0.0/30 --next-hop-address 192.0.2.1",
        ),
        (&["--pod-cidrs", "--for", "frr"], "ip route 10.9.2.0/24 192.0.2.2"),
    ] {
        let text = ok(arguments);
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
    assert!(!ok(&["--pod-cidrs"]).contains("10.244."));
}

#[test]
fn what_cannot_be_told_is_named_and_ends_with_one() {
    let of = |items: &[Value], arguments: &[&str]| {
        let text = json!({"kind": "List", "items": items}).to_string();
        let all: Vec<&str> = ["routes", "-f", "c.json"].iter().chain(arguments).copied().collect();
        tortie(&[("c.json", &text)], &all)
    };
    let block = || block("10.244.0.0/30", Some("gone"), "one");
    let mut bare = node(1, "one");
    bare["metadata"]["annotations"] = json!({});
    for (items, arguments, code, expected) in [
        (vec![node(1, "one"), block()], &[][..], 1, "10.244.0.0/30: there is no Node gone"),
        (
            vec![bare, self::block("10.244.0.0/30", Some("one"), "one")],
            &[],
            1,
            "Node one has no IPv4 address",
        ),
        (vec![block()], &[], 2, "the files have no Nodes"),
        (vec![node(1, "one")], &["--for", "aws"], 2, "--table"),
        (vec![node(1, "one")], &["--since", "c.json"], 2, "is no output of: tortie routes -o json"),
        (vec![node(1, "one")], &["--since", "none.json"], 2, "--since none.json"),
    ] {
        let (found, out, errors) = of(&items, arguments);
        assert!(found == code && errors.contains(expected), "{arguments:?}: {found} {errors}");
        assert!(code == 1 || out.is_empty(), "{out}");
    }
    // In a router's file, what is left out is a comment of that router.
    for (router, mark) in [("frr", '!'), ("linux", '#'), ("bird", '#')] {
        let (_, out, errors) = of(&[node(1, "one"), block()], &["--for", router]);
        let warning = "warning: 10.244.0.0/30: there is no Node gone";
        assert!(out.starts_with(&format!("{mark} {warning}\n")) && errors.contains(warning), "{out}{errors}");
    }
}

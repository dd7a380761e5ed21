//! `tortie routes`: the text for each router, and routers that load it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::{NetNs, die_with_parent};
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, RouteSocket};
use tortie_servers::programs::{Program, can_run};

use crate::support::tortie;

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
            "gcloud compute routes create tortie-10-244-0-0-30 --network default --destination-range 10.244.0.0/30 --next-hop-address 192.0.2.1",
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
        (vec![node(1, "one")], &["--for", "frr", "-o", "json"], 2, "-o json has no effect"),
        (vec![node(1, "one")], &["--for", "bird", "--since", "c.json"], 2, "BIRD reads whole files"),
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

/// The cluster some time later: `two` has lost its block, `one` has another one, and the pod without a block is on `two`.
fn later() -> String {
    let items = [
        node(1, "one"),
        node(2, "two"),
        block("10.244.0.0/30", Some("one"), "two"),
        block("10.244.0.128/30", Some("one"), "one"),
        block("10.244.9.0/30", None, "two"),
        block("fd00:10::/126", Some("one"), "one"),
    ];
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

/// Destination and next hop some time later.
const LATER: [(&str, &str); 5] = [
    ("10.244.0.0/30", "192.0.2.1"),
    ("10.244.0.1/32", "192.0.2.2"),
    ("10.244.0.128/30", "192.0.2.1"),
    ("10.244.9.1/32", "192.0.2.2"),
    ("fd00:10::/126", "fd02::1"),
];

fn destinations(routes: &str) -> Vec<String> {
    let routes: Value = serde_json::from_str(routes).unwrap();
    let routes = routes.as_array().unwrap().iter();
    routes.map(|route| route["destination"].as_str().unwrap().to_owned()).collect()
}

/// The cluster, after a change of its Node `two`.
fn with_two(change: impl Fn(&mut Value)) -> String {
    let mut cluster: Value = serde_json::from_str(&cluster()).unwrap();
    let items = cluster["items"].as_array_mut().unwrap().iter_mut();
    items.filter(|item| item["kind"] == "Node" && item["metadata"]["name"] == "two").for_each(change);
    cluster.to_string()
}

/// The same without the Node and what it has.
fn without_two() -> String {
    let items = [node(1, "one"), block("10.244.0.0/30", Some("one"), "one")];
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

/// What has changed since these routes, without comments.
fn after(known: &str, cluster: &str, arguments: &[&str]) -> (i32, Vec<String>, String) {
    let files = [("cluster.json", cluster), ("known.json", known)];
    let all = [&["routes", "-f", "cluster.json", "--since", "known.json"], arguments].concat();
    let (code, out, errors) = tortie(&files, &all);
    let lines = out.lines().filter(|line| !line.starts_with(['#', '!'])).map(str::to_owned);
    (code, lines.collect(), errors)
}

/// The file of known routes after this state of the cluster.
fn known_after(known: &str, cluster: &str, arguments: &[&str]) -> String {
    let (code, lines, errors) = after(known, cluster, &[&["-o", "json"], arguments].concat());
    assert!(code < 2, "{errors}");
    lines.join("\n")
}

fn since(cluster: &str, arguments: &[&str]) -> (i32, String, String) {
    let before = ok(&["-o", "json"]);
    let files = [("cluster.json", cluster), ("before.json", &before)];
    tortie(&files, &[&["routes", "-f", "cluster.json", "--since", "before.json"], arguments].concat())
}

#[test]
fn what_has_changed_since_an_earlier_run() {
    let expected = [
        (
            &[][..],
            vec![
                "remove 10.244.0.64/30 192.0.2.2 two",
                "remove 10.244.9.1/32 192.0.2.1 one",
                "add 10.244.0.128/30 192.0.2.1 one",
                "add 10.244.9.1/32 192.0.2.2 two",
            ],
        ),
        // A route that leads elsewhere is replaced, or there before the old one goes.
        (
            &["--for", "linux"],
            vec![
                "ip -4 route replace 10.244.0.128/30 via 192.0.2.1 # one",
                "ip -4 route replace 10.244.9.1/32 via 192.0.2.2 # two",
                "[ -z \"$(ip -4 route show exact 10.244.0.64/30 via 192.0.2.2)\" ] || ip -4 route del 10.244.0.64/30 via 192.0.2.2 # two",
            ],
        ),
        (
            &["--for", "frr"],
            vec![
                "ip route 10.244.0.128/30 192.0.2.1",
                "ip route 10.244.9.1/32 192.0.2.2",
                "no ip route 10.244.0.64/30 192.0.2.2",
                "no ip route 10.244.9.1/32 192.0.2.1",
            ],
        ),
        (
            &["--for", "aws", "--table", "t"],
            vec![
                "aws ec2 modify-instance-attribute --instance-id i-01 --no-source-dest-check",
                "aws ec2 modify-instance-attribute --instance-id i-02 --no-source-dest-check",
                "aws ec2 delete-route --route-table-id t --destination-cidr-block 10.244.0.64/30",
                "aws ec2 create-route --route-table-id t --destination-cidr-block 10.244.0.128/30 --instance-id i-01",
                "aws ec2 replace-route --route-table-id t --destination-cidr-block 10.244.9.1/32 --instance-id i-02",
            ],
        ),
        (
            &["--for", "gcp", "--network", "n"],
            vec![
                "gcloud compute routes delete tortie-10-244-0-64-30 --quiet",
                "gcloud compute routes delete tortie-10-244-9-1-32 --quiet",
                "gcloud compute routes create tortie-10-244-0-128-30 --network n --destination-range 10.244.0.128/30 --next-hop-address 192.0.2.1",
                "gcloud compute routes create tortie-10-244-9-1-32 --network n --destination-range 10.244.9.1/32 --next-hop-address 192.0.2.2",
            ],
        ),
    ];
    for (arguments, expected) in expected {
        let (code, out, errors) = since(&later(), arguments);
        assert_eq!((code, errors.as_str()), (0, ""), "{out}");
        let lines = out.lines().filter(|line| !line.starts_with(['#', '!', 'C']));
        let lines: Vec<String> =
            lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines, expected, "{arguments:?}");
    }
    let azure = ["--for", "azure", "--table", "t", "--resource-group", "g"];
    let (_, out, _) = since(&later(), &azure);
    let deleted = "az network route-table route delete --resource-group g --route-table-name t --name tortie-10-244-9-1-32\n";
    assert!(out.find(deleted).unwrap() < out.find("create --resource-group g").unwrap(), "{out}");
    let (_, out, _) = since(&later(), &["-o", "json"]);
    assert_eq!(destinations(&out), LATER.map(|(destination, _)| destination));
    assert_eq!(since(&cluster(), &[]), (0, String::new(), "nothing has changed\n".to_owned()));
    assert_eq!(since(&cluster(), &["--for", "linux"]), (0, String::new(), String::new()));
}

/// A cloud names a node's machine later than its kubelet its address, and a Node may lose its address for a moment.
#[test]
fn what_a_router_does_not_know_changes_nothing() {
    let cluster: Value = serde_json::from_str(&cluster()).unwrap();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut cluster = cluster.clone();
        let items = cluster["items"].as_array_mut().unwrap();
        items.iter_mut().filter(|item| item["kind"] == "Node").for_each(change);
        cluster.to_string()
    };
    let renamed = with(&|node| node["spec"]["providerID"] = json!("aws:///eu-west-1a/i-0f"));
    for arguments in [&["--for", "frr"][..], &["--for", "linux"], &[]] {
        let (code, out, _) = since(&renamed, arguments);
        assert_eq!((code, out.as_str()), (0, ""), "{arguments:?}");
    }
    let aws = ["--for", "aws", "--table", "t"];
    assert!(since(&renamed, &aws).1.contains("replace-route"));
    // Without a machine, AWS got no route before.
    let nameless = with(&|node| node["spec"]["providerID"] = Value::Null);
    let before = tortie(&[("c.json", &nameless)], &["routes", "-f", "c.json", "-o", "json"]).1;
    let files = [("cluster.json", renamed.as_str()), ("before.json", &before)];
    let (_, out, _) =
        tortie(&files, &[&["routes", "-f", "cluster.json", "--since", "before.json"], &aws[..]].concat());
    assert!(out.contains("create-route") && !out.contains("replace-route"), "{out}");

    let lost = with(&|node| {
        node["metadata"]["annotations"] = json!({});
        node["status"] = json!({});
    });
    let (code, out, _) = since(&lost, &["--for", "linux"]);
    assert!(code == 1 && !out.lines().any(|line| line.starts_with("ip ")), "{out}");
}

/// A node has no address for a moment. The router keeps its routes, so the next run must know them.
#[test]
fn the_known_routes_are_those_that_the_router_keeps() {
    let first = ok(&["-o", "json"]);
    let lost = with_two(|node| node["metadata"]["annotations"] = json!({}));
    let (code, lines, _) = after(&first, &lost, &["--for", "frr"]);
    assert_eq!((code, lines), (1, vec![]));
    let known = known_after(&first, &lost, &[]);
    assert_eq!(destinations(&known), ROUTES.map(|(destination, _)| destination));

    let back = with_two(|node| {
        node["metadata"]["annotations"] = json!({"projectcalico.org/IPv4Address": "192.0.2.9/24"});
    });
    let (code, lines, errors) = after(&known, &back, &["--for", "frr"]);
    assert_eq!(code, 0, "{errors}");
    let expected = [
        "ip route 10.244.0.1/32 192.0.2.9",
        "ip route 10.244.0.64/30 192.0.2.9",
        "no ip route 10.244.0.1/32 192.0.2.2",
        "no ip route 10.244.0.64/30 192.0.2.2",
    ];
    assert_eq!(lines, expected);
    let (_, lines, _) = after(&known, &without_two(), &["--for", "linux"]);
    assert!(
        lines.iter().any(|line| line.contains("|| ip -4 route del 10.244.0.64/30 via 192.0.2.2")),
        "{lines:?}"
    );
    assert_eq!(known_after(&known, &cluster(), &[]), first.trim_end());
}

/// A Node that is registered again has no `providerID` for a moment, and AWS goes on sending to its machine.
#[test]
fn the_known_routes_have_the_machines_that_the_cloud_keeps() {
    let aws = ["--for", "aws", "--table", "t"];
    let first = ok(&["-o", "json"]);
    let nameless = with_two(|node| node["spec"]["providerID"] = Value::Null);
    let (code, lines, errors) = after(&first, &nameless, &aws);
    assert!(code == 1 && errors.contains("Node two has no spec.providerID"), "{errors}");
    assert_eq!(lines, [""; 0]);
    let known = known_after(&first, &nameless, &[]);
    assert_eq!(known, first.trim_end());
    let (_, lines, _) = after(&known, &without_two(), &aws);
    let deleted = "aws ec2 delete-route --route-table-id t --destination-cidr-block 10.244.0.64/30";
    assert!(lines.contains(&deleted.to_owned()), "{lines:?}");
    let other = with_two(|node| node["spec"]["providerID"] = json!("aws:///eu-west-1a/i-0f"));
    let (_, lines, _) = after(&known, &other, &aws);
    let replaced =
        "aws ec2 replace-route --route-table-id t --destination-cidr-block 10.244.0.64/30 --instance-id i-0f";
    assert!(lines.contains(&replaced.to_owned()), "{lines:?}");
}

/// A Node that is registered again has no pod networks for a moment.
#[test]
fn a_node_without_pod_cidrs_keeps_its_routes() {
    let first = ok(&["--pod-cidrs", "-o", "json"]);
    let lost = with_two(|node| drop(node["spec"].as_object_mut().unwrap().remove("podCIDRs")));
    let (code, lines, errors) = after(&first, &lost, &["--pod-cidrs", "--for", "linux"]);
    assert!(code == 1 && errors.contains("Node two has no spec.podCIDRs"), "{errors}");
    assert_eq!(lines, [""; 0]);
    let known = known_after(&first, &lost, &["--pod-cidrs"]);
    assert_eq!(known, first.trim_end());
    // Another node has its network now.
    let mut taken: Value = serde_json::from_str(&lost).unwrap();
    taken["items"][0]["spec"]["podCIDRs"] = json!(["10.9.1.0/24", "10.9.2.0/24"]);
    let (_, lines, _) = after(&known, &taken.to_string(), &["--pod-cidrs", "--for", "linux"]);
    assert_eq!(lines, ["ip -4 route replace 10.9.2.0/24 via 192.0.2.1 # one"]);
}

/// A file was written without blocks, or an API does not serve them for a moment.
#[test]
fn routes_stay_if_what_they_depend_on_is_missing() {
    let nodes = json!({"kind": "List", "items": [node(1, "one"), node(2, "two")]}).to_string();
    let mut bare = node(1, "one");
    bare["spec"] = json!({});
    let bare = json!({"kind": "List", "items": [bare]}).to_string();
    for (cluster, arguments, missing) in [
        (&nodes, &[][..], "there are no IPAMBlocks"),
        (&bare, &["--pod-cidrs"], "there are no Nodes with spec.podCIDRs"),
    ] {
        let with = |more: &[&'static str]| [arguments, more].concat();
        let first = ok(&with(&["-o", "json"]));
        for output in [&["--for", "linux"][..], &["-o", "json"], &[]] {
            let (code, lines, errors) = after(&first, cluster, &with(output));
            assert_eq!((code, lines), (2, vec![]), "{errors}");
            assert!(
                errors.contains(missing) && errors.contains("tortie get nodes,ipamblocks -o json"),
                "{errors}"
            );
        }
        let (code, lines, errors) = after("[]", cluster, &with(&["--for", "linux"]));
        assert!(code < 2 && lines.is_empty(), "nothing was known: {errors}");
    }
}

/// The kernel of a router that runs the commands has the routes, and after the commands of the changes exactly the new ones.
#[test]
fn a_linux_router_follows_the_changes() {
    let router = router();
    let run = |commands: &str| {
        let mut command = Command::new("sh");
        command.args(["-e", "-c", commands]).stdin(Stdio::null());
        router.enter_on_spawn(&mut command).unwrap();
        let output = command.output().unwrap();
        assert!(output.status.success(), "{commands}: {output:?}");
    };
    run(&ok(&["--for", "linux"]));
    wait_for_routes(&router, "iproute2");
    run(&since(&later(), &["--for", "linux"]).1);
    wait_for(&router, "iproute2", &LATER);
}

/// A router with an interface to the nodes.
fn router() -> NetNs {
    let router = NetNs::create().unwrap();
    router
        .run(|| {
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new("nodes", NewLinkKind::Bridge) }).unwrap();
            let link = interface_index("nodes").unwrap();
            let loopback = interface_index("lo").unwrap();
            socket.change(&Change::SetLink(loopback, vec![LinkSetting::Up(true)])).unwrap();
            for (address, prefix_length) in [("192.0.2.254", 24), ("fd02::fe", 64)] {
                let address = address.parse().unwrap();
                socket.change(&Change::AddAddress(Address { link, address, prefix_length })).unwrap();
            }
        })
        .unwrap();
    router
}

/// Waits until the kernel of the router has the routes.
fn wait_for_routes(router: &NetNs, of: &str) {
    wait_for(router, of, &ROUTES);
}

fn wait_for(router: &NetNs, of: &str, expected: &[(&str, &str)]) {
    let expected: Vec<(IpNet, String)> =
        expected.iter().map(|(to, by)| (to.parse().unwrap(), (*by).to_owned())).collect();
    let begin = Instant::now();
    loop {
        let routes = router.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
        let mut found: Vec<(IpNet, String)> = routes
            .into_iter()
            .filter_map(|route| Some((route.destination, route.gateway?.to_string())))
            .collect();
        found.sort();
        if found == expected {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{of}: {found:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A program in the namespace of a router. It ends with the value.
struct Daemon(Child);

impl Daemon {
    fn start(router: &NetNs, program: &Path, arguments: &[&str], log: &Path) -> Self {
        let mut command = Command::new(program);
        let log = fs::File::create(log).unwrap();
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        router.enter_on_spawn(&mut command).unwrap();
        Self(die_with_parent(&mut command).spawn().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn bird_loads_the_routes() {
    if !can_run(&[Program::Bird]) {
        return;
    }
    let (router, folder) = (router(), tempfile::tempdir().unwrap());
    let file = folder.path().join("bird.conf");
    let kernel = |family: &str| format!("protocol kernel {{ {family} {{ export all; }}; }}\n");
    let text = format!(
        "router id 192.0.2.254;\nprotocol device {{}}\n{}{}{}",
        kernel("ipv4"),
        kernel("ipv6"),
        ok(&["--for", "bird"])
    );
    fs::write(&file, text).unwrap();
    let (file, socket) = (file.display().to_string(), folder.path().join("bird.ctl").display().to_string());
    let log = folder.path().join("log");
    let bird = Program::Bird.find().unwrap();
    let _daemon = Daemon::start(&router, &bird, &["-f", "-c", &file, "-s", &socket], &log);
    wait_for_routes(&router, "BIRD");
}

#[test]
fn frr_loads_the_routes() {
    if !can_run(&[Program::FrrBgpd]) {
        return;
    }
    let (router, folder) = (router(), tempfile::tempdir().unwrap());
    // FRR's programs give up root.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let programs = Program::FrrBgpd.find().unwrap();
    let programs = programs.parent().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(folder.path().join("staticd.conf"), ok(&["--for", "frr"])).unwrap();
    fs::write(folder.path().join("zebra.conf"), "").unwrap();
    let start = |name: &str| {
        let (config, pid, log) = (
            path(&format!("{name}.conf")),
            path(&format!("{name}.pid")),
            folder.path().join(format!("{name}.log")),
        );
        let arguments = [
            "-f",
            &config,
            "-i",
            &pid,
            "-z",
            &path("zserv"),
            "--vty_socket",
            &path(""),
            "-u",
            "frr",
            "-g",
            "frr",
        ];
        Daemon::start(&router, &programs.join(name), &arguments, &log)
    };
    let _zebra = start("zebra");
    let begin = Instant::now();
    while !folder.path().join("zserv").exists() {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "{}",
            fs::read_to_string(folder.path().join("zebra.log")).unwrap()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let _staticd = start("staticd");
    wait_for_routes(&router, "FRR");
}

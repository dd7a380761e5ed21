//! What has changed since earlier runs.

use serde_json::{Value, json};

use super::{ROUTES, block, cluster, node, ok};
use crate::offline::support::tortie;

/// The cluster some time later: `two` has lost its block, `one` has another one, and the pod without a block is on `two`.
pub(super) fn later() -> String {
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
pub(super) const LATER: [(&str, &str); 5] = [
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
pub(super) fn without_two() -> String {
    let items = [node(1, "one"), block("10.244.0.0/30", Some("one"), "one")];
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

/// The commands or lines of a configuration, without what a script does if one of them fails.
fn commands(text: &str) -> Vec<String> {
    let is_command =
        |line: &&str| !line.starts_with(['#', '!']) && *line != "failed=" && !line.starts_with("[ -z");
    text.lines().filter(is_command).map(|line| line.replace("failed=\"$failed \"", "")).collect()
}

/// What has changed since these routes, without comments.
fn after(known: &str, cluster: &str, arguments: &[&str]) -> (i32, Vec<String>, String) {
    let files = [("cluster.json", cluster), ("known.json", known)];
    let all = [&["routes", "-f", "cluster.json", "--since", "known.json"], arguments].concat();
    let (code, out, errors) = tortie(&files, &all);
    (code, commands(&out), errors)
}

/// The file of known routes after this state of the cluster.
fn known_after(known: &str, cluster: &str, arguments: &[&str]) -> String {
    let (code, lines, errors) = after(known, cluster, &[&["-o", "json"], arguments].concat());
    assert!(code < 2, "{errors}");
    lines.join("\n")
}

pub(super) fn since(cluster: &str, arguments: &[&str]) -> (i32, String, String) {
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
                "ip -4 route replace 10.244.0.128/30 via 192.0.2.1 || 10.244.0.128/30 # one",
                "ip -4 route replace 10.244.9.1/32 via 192.0.2.2 || 10.244.9.1/32 # two",
                "found=$(ip -4 route show exact 10.244.0.64/30 via 192.0.2.2) && { [ -z \"$found\" ] || ip -4 route del 10.244.0.64/30 via 192.0.2.2; } || 10.244.0.64/30 # two",
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
                "aws ec2 modify-instance-attribute --instance-id i-01 --no-source-dest-check || i-01",
                "aws ec2 modify-instance-attribute --instance-id i-02 --no-source-dest-check || i-02",
                "found=$(aws ec2 describe-route-tables --route-table-ids t --filters Name=route.destination-cidr-block,Values=10.244.0.64/30 --query 'RouteTables[].RouteTableId' --output text) && { [ -z \"$found\" ] || aws ec2 delete-route --route-table-id t --destination-cidr-block 10.244.0.64/30; } || 10.244.0.64/30",
                "aws ec2 create-route --route-table-id t --destination-cidr-block 10.244.0.128/30 --instance-id i-01 || 10.244.0.128/30 # one",
                "aws ec2 replace-route --route-table-id t --destination-cidr-block 10.244.9.1/32 --instance-id i-02 || 10.244.9.1/32 # two",
            ],
        ),
        (
            &["--for", "gcp", "--network", "n"],
            vec![
                "found=$(gcloud compute routes list --filter=name=tortie-eb0c3431-10-244-0-64-30 --format='value(name)') && { [ -z \"$found\" ] || gcloud compute routes delete tortie-eb0c3431-10-244-0-64-30 --quiet; } || 10.244.0.64/30",
                "gcloud compute routes create tortie-eb0c3431-10-244-0-128-30 --network n --destination-range 10.244.0.128/30 --next-hop-address 192.0.2.1 || 10.244.0.128/30 # one",
                "found=$(gcloud compute routes list --filter=name=tortie-eb0c3431-10-244-9-1-32 --format='value(name)') && { [ -z \"$found\" ] || gcloud compute routes delete tortie-eb0c3431-10-244-9-1-32 --quiet; } || 10.244.9.1/32",
                "gcloud compute routes create tortie-eb0c3431-10-244-9-1-32 --network n --destination-range 10.244.9.1/32 --next-hop-address 192.0.2.2 || 10.244.9.1/32 # two",
            ],
        ),
        // Azure replaces a route that is created again.
        (
            &["--for", "azure", "--table", "t", "--resource-group", "g"],
            vec![
                "az network route-table route create --resource-group g --route-table-name t --name tortie-10-244-0-128-30 --address-prefix 10.244.0.128/30 --next-hop-type VirtualAppliance --next-hop-ip-address 192.0.2.1 || 10.244.0.128/30 # one",
                "az network route-table route create --resource-group g --route-table-name t --name tortie-10-244-9-1-32 --address-prefix 10.244.9.1/32 --next-hop-type VirtualAppliance --next-hop-ip-address 192.0.2.2 || 10.244.9.1/32 # two",
                "az network route-table route delete --resource-group g --route-table-name t --name tortie-10-244-0-64-30 || 10.244.0.64/30",
            ],
        ),
    ];
    for (arguments, expected) in expected {
        let (code, out, errors) = since(&later(), arguments);
        assert_eq!((code, errors.as_str()), (0, ""), "{out}");
        let lines = out.lines().filter(|line| !line.starts_with('C'));
        let lines: Vec<String> =
            lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(commands(&lines.join("\n")), expected, "{arguments:?}");
    }
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
        lines.iter().any(|line| line.contains("ip -4 route del 10.244.0.64/30 via 192.0.2.2;")),
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
    assert!(lines.iter().any(|line| line.contains(deleted)), "{lines:?}");
    let other = with_two(|node| node["spec"]["providerID"] = json!("aws:///eu-west-1a/i-0f"));
    let (_, lines, _) = after(&known, &other, &aws);
    let replaced =
        "aws ec2 replace-route --route-table-id t --destination-cidr-block 10.244.0.64/30 --instance-id i-0f";
    assert!(lines.iter().any(|line| line.contains(replaced)), "{lines:?}");
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
    assert_eq!(lines, ["ip -4 route replace 10.9.2.0/24 via 192.0.2.1 || 10.9.2.0/24 # one"]);
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

/// The address of `two` some time later, and once more.
pub(super) fn with_two_at(host: u8) -> String {
    with_two(|node| {
        let address = format!("192.0.2.{host}/24");
        node["metadata"]["annotations"] = json!({"projectcalico.org/IPv4Address": address});
    })
}

/// A run adds routes by way of 192.0.2.8 and is interrupted. In the next run, they lead to 192.0.2.9. A router that adds the next hops of
/// several commands to one route would keep the one of the interrupted run.
#[test]
fn what_an_interrupted_run_may_have_added_is_removed() {
    let known = ok(&["-o", "json"]);
    let attempted = known_after(&known, &with_two_at(8), &["--attempted"]);
    let frr = ["--for", "frr"];
    let (code, lines, errors) = after(&attempted, &with_two_at(9), &frr);
    assert_eq!((code, errors.as_str()), (0, ""));
    let both = ["10.244.0.1/32", "10.244.0.64/30"];
    let lines_of = |verb: &str, host: u8| both.map(|net| format!("{verb} route {net} 192.0.2.{host}"));
    let expected = [lines_of("ip", 9).to_vec(), [2, 8].map(|host| lines_of("no ip", host)).concat()].concat();
    let sorted = |mut lines: Vec<String>| {
        lines.sort();
        lines
    };
    assert_eq!(sorted(lines), sorted(expected));

    // The same by two files.
    let new = known_after(&known, &with_two_at(8), &[]);
    let later = with_two_at(9);
    let files = [("c.json", later.as_str()), ("known.json", &known), ("new.json", &new)];
    let since = ["routes", "-f", "c.json", "--since", "known.json", "--since", "new.json"];
    let (_, out, _) = tortie(&files, &[&since[..], &frr].concat());
    assert_eq!(sorted(commands(&out)), sorted(after(&attempted, &later, &frr).1));

    // Nothing else has changed, and these may or may not be done.
    let (_, lines, _) = after(&attempted, &with_two_at(8), &frr);
    assert_eq!(sorted(lines), sorted([lines_of("ip", 8), lines_of("no ip", 2)].concat()));
    // After a run that has succeeded, nothing is uncertain.
    let known = known_after(&attempted, &later, &[]);
    assert_eq!(known, known_after("[]", &later, &[]));
    assert_eq!(after(&known, &later, &frr), (0, vec![], String::new()));
}

/// The client of a cloud refuses to create a route that is there, and to replace or delete one that is not.
#[test]
fn commands_of_clouds_may_follow_an_interrupted_run() {
    let known = known_after("[]", &without_two(), &[]);
    let attempted = known_after(&known, &cluster(), &["--attempted"]);
    let aws = ["--for", "aws", "--table", "t"];
    let (_, lines, _) = after(&attempted, &cluster(), &aws);
    let with = |verb| {
        format!(
            "aws ec2 {verb} --route-table-id t --destination-cidr-block 10.244.0.64/30 --instance-id i-02"
        )
    };
    let line =
        format!("{} 2>/dev/null || {} || 10.244.0.64/30 # two", with("replace-route"), with("create-route"));
    assert!(lines.contains(&line), "{line}: {lines:#?}");
    let (_, lines, _) = after(&attempted, &cluster(), &["--for", "gcp", "--network", "n"]);
    let position = |word: &str| {
        let found =
            lines.iter().position(|line| line.contains(&format!("{word} tortie-eb0c3431-10-244-0-64-30")));
        found.unwrap_or_else(|| panic!("{word}: {lines:#?}"))
    };
    assert!(position("delete") < position("create"));
}

/// BIRD finds the changes itself. Its file has the routes of a node that is not known for a moment.
#[test]
fn bird_gets_all_routes_with_those_that_it_keeps() {
    let first = ok(&["-o", "json"]);
    let bird = ["--for", "bird"];
    assert_eq!(since(&cluster(), &bird), (0, ok(&bird), String::new()));
    let lost = with_two(|node| node["metadata"]["annotations"] = json!({}));
    let (code, lines, errors) = after(&first, &lost, &bird);
    assert!(code == 1 && errors.contains("Node two has no IPv4 address"), "{errors}");
    assert_eq!(lines, commands(&ok(&bird)));
    // An interrupted run has left two next hops in the list, and a file has one.
    let attempted = known_after(&first, &with_two_at(9), &["--attempted"]);
    let (_, lines, _) = after(&attempted, &lost, &bird);
    assert_eq!(lines.iter().filter(|line| line.contains("10.244.0.64/30")).count(), 1, "{lines:?}");
}

//! The network of a lab, as seen by its pods and nodes.

use super::support::{Lab, User, three_pods};

/// Neighbour entries that are not permanent are counted for the whole machine, with room for 1,024 of them: pods that
/// resolve each other would make labs fail each other.
#[test]
fn the_lab_uses_no_dynamic_neighbour_entries() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2"]);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]);
    let pods = ["linux-client", "linux-server", "windows-client", "windows-server"];
    let mut tables = Vec::new();
    for pod in pods {
        let name = format!("calico-demo/{pod}");
        tables.push((name.clone(), lab.ok(&["lab", "exec", &name, "--", "cat", "/proc/net/arp"])));
    }
    for node in ["primary", "linux-2", "minion"] {
        tables.push((node.to_owned(), lab.ok(&["lab", "capture", node, "--", "cat", "/proc/net/arp"])));
    }
    for (name, table) in tables {
        let entries: Vec<&str> = table.lines().skip(1).collect();
        assert!(!entries.is_empty(), "{name} has a neighbour");
        // 0x6 is complete and permanent.
        let counted: Vec<_> =
            entries.iter().filter(|line| line.split_whitespace().nth(2) != Some("0x6")).collect();
        assert!(counted.is_empty(), "{name}: {counted:?}");
    }
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// A hostNetwork pod uses its node's network: it has no network of its own, no policy for pods applies to it, and it
/// has the node's address.
#[test]
fn a_host_network_pod_counts_as_its_node() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let pod = |name: &str, node: &str, more: &str| {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: 'n'}}\nspec:\n  {more}\n  nodeSelector: \
             {{kubernetes.io/hostname: {node}}}\n  containers: [{{name: c, ports: [{{containerPort: 8080}}]}}]\n"
        )
    };
    let host = "hostNetwork: true";
    let text = [
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: 'n'}\n",
        &pod("on-primary", "primary", host),
        &pod("on-minion", "minion", host),
        &pod("denied", "primary", "hostNetwork: false"),
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: deny, namespace: 'n'}\n\
         spec: {podSelector: {}, policyTypes: [Ingress]}\n",
    ];
    lab.ok(&["apply", "--wait", "-f", &lab.file("hosts.yml", &text.concat())]);
    let pods = lab.ok(&["get", "pods"]);
    for address in ["192.0.2.11", "192.0.2.12"] {
        assert!(pods.contains(address), "the nodes' addresses in {pods}");
    }
    let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/8080");
    for (from, to, expected) in [
        ("n/on-primary", "n/on-minion", "reached"),
        ("n/on-minion", "n/on-primary", "reached"),
        ("n/denied", "n/on-minion", "reached"),
        ("n/on-minion", "n/denied", "cut"),
        ("n/on-primary", "n/denied", "reached"),
    ] {
        assert_eq!(cells[&(from.to_owned(), to.to_owned())], expected, "{from} -> {to}");
    }
    assert!(lab.ok(&["lab", "exec", "n/on-minion", "--", "cat", "/proc/net/route"]).contains("eth0"));
    let shown = lab.tortie(&["policy", "show", "on-minion", "-n", "n"]).output().unwrap();
    let errors = String::from_utf8_lossy(&shown.stderr);
    assert!(errors.contains("is a hostNetwork pod: it is its node (minion)"), "{errors}");

    // Its deletion does not affect its node's network.
    lab.ok(&["delete", "pod", "-n", "n", "on-minion"]);
    lab.wait_until("nothing serves there any more", || {
        let step = lab.json(&["lab", "matrix", "-o", "json"]);
        super::cells_at(&step, "tcp/8080")
            .keys()
            .all(|(from, to)| from != "n/on-minion" && to != "n/on-minion")
    });
    assert!(lab.ok(&["lab", "capture", "minion", "--", "cat", "/proc/net/route"]).contains("eth0"));

    // Settings without effect are stored, and not reported as in force.
    let felix = "apiVersion: projectcalico.org/v3\nkind: FelixConfiguration\nmetadata: {name: default}\nspec: {bpfEnabled: true}\n";
    let output = lab.tortie(&["apply", "--wait", "-f", &lab.file("felix.yml", felix)]).output().unwrap();
    let printed =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !printed.contains("in force on"), "{printed}");
    for part in [
        "warning: ",
        "node primary: FelixConfiguration default: FieldNotSupported: spec.bpfEnabled",
        "node minion: ",
    ] {
        assert!(printed.contains(part), "{part} in {printed}");
    }

    // A pod whose namespace does not exist reports it, and is connected once the namespace exists.
    let lost = pod("lost", "primary", "hostNetwork: false").replace("namespace: 'n'}", "namespace: nowhere}");
    lab.ok(&["apply", "-f", &lab.file("lost.yml", &lost)]);
    lab.wait_until("it is reported", || {
        lab.ok(&["get", "pods"]).contains("Namespace nowhere does not exist")
    });
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: nowhere}\n";
    lab.ok(&["apply", "-f", &lab.file("nowhere.yml", namespace)]);
    lab.wait_for_pods();
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// Pods of a Windows node have addresses of several blocks, each of them a subnet of its network. A Linux node has a route
/// to each.
#[test]
fn linux_nodes_reach_every_block_of_a_windows_node() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    // Four of the eight addresses of a block are the node's own.
    let mut text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: 'n'}\n---\napiVersion: projectcalico.org/v3\nkind: IPPool\n\
        metadata: {name: small}\nspec: {cidr: 10.245.0.0/24, blockSize: 29, vxlanMode: Always, assignmentMode: Manual}\n"
        .to_owned();
    let mut pod = |name: &str, node: &str, annotations: &str| {
        text += &format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: 'n', annotations: {{{annotations}}}}}\nspec:\n  \
             nodeSelector: {{kubernetes.io/hostname: {node}}}\n  containers: [{{name: c, ports: [{{containerPort: 8080}}]}}]\n"
        );
    };
    pod("linux", "primary", "");
    pod("windows", "minion", "");
    for number in 1..=5 {
        pod(&format!("small-{number}"), "minion", "cni.projectcalico.org/ipv4pools: '[\"small\"]'");
    }
    lab.ok(&["apply", "--wait", "-f", &lab.file("blocks.yml", &text)]);
    lab.wait_for_pods();
    let blocks = lab.ok(&["ipam", "show", "--show-blocks"]);
    assert_eq!(blocks.matches("10.245.0.").count(), 3, "a pool and two blocks of it in {blocks}");
    let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/8080");
    let denied: Vec<_> = cells.iter().filter(|(_, outcome)| *outcome != "reached").collect();
    assert!(denied.is_empty(), "{denied:?}");
    for from in ["n/linux", "n/small-1", "n/small-5", "n/windows"] {
        for to in ["n/linux", "n/small-1", "n/small-5", "n/windows"].iter().filter(|to| **to != from) {
            assert!(cells.contains_key(&(from.to_owned(), (*to).to_owned())), "{from} -> {to} in {cells:?}");
        }
    }
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// Pools without encapsulation and without BGP: the nodes are the routers. A node of another network is reported, and has no
/// route.
#[test]
fn pods_of_a_pool_without_encapsulation_use_direct_routes() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "3", "--windows", "0", "--direct-routes", "--ipv6"]);
    for pool in ["default-ipv4-ippool", "default-ipv6-ippool"] {
        lab.ok(&["patch", "ippool", pool, "--type", "merge", "-p", r#"{"spec": {"vxlanMode": "Never"}}"#]);
    }
    three_pods(&lab);
    let routes = || lab.ok(&["lab", "capture", "primary", "--", "ip", "-4", "route", "show", "proto", "84"]);
    lab.wait_until("direct routes", || {
        routes().contains("via 192.0.2.12 dev eth0") && routes().contains("via 192.0.2.13 dev eth0")
    });
    let routes_v6 =
        || lab.ok(&["lab", "capture", "primary", "--", "ip", "-6", "route", "show", "proto", "84"]);
    lab.wait_until("direct routes of IPv6", || routes_v6().contains("via 2001:db8:0:2::c dev eth0"));
    let reached = || {
        let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/80");
        let is_pod = |name: &str| name.starts_with("calico-demo/");
        let of_pods = cells.iter().filter(|((from, to), _)| is_pod(from) && is_pod(to));
        of_pods.filter(|(_, cell)| *cell == "reached").count()
    };
    assert_eq!(reached(), 6);
    let problems = || lab.ok(&["get", "nodereports", "-o", "json"]);
    assert!(!problems().contains("no direct route leads"), "{}", problems());

    // Its address says that it is alone in its network.
    lab.ok(&["annotate", "node", "linux-3", "--overwrite", "projectcalico.org/IPv4Address=192.0.2.13/32"]);
    lab.wait_until("the far node is reported", || problems().contains("no direct route leads to its pods"));
    assert!(!routes().contains("192.0.2.13") && routes().contains("192.0.2.12"), "{}", routes());
    lab.ok(&["lab", "down"]);
    running.wait();
}

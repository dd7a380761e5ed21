//! Linux nodes of a lab with BGP speakers: pods of a pool without encapsulation reach each other by learned routes.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tortie_servers::programs::{Program, can_run};

use crate::support::{Lab, User, pod};

fn learned(lab: &Lab, node: &str) -> String {
    lab.ok(&["lab", "capture", node, "--", "ip", "-4", "route", "show", "proto", "85"])
}

pub(crate) fn peers(lab: &Lab, node: &str) -> Vec<Value> {
    let peers = lab.tortie(&["bgp", "peers", "--node", node, "-o", "json"]).output().unwrap();
    serde_json::from_slice(&peers.stdout).unwrap_or_default()
}

#[test]
fn pods_of_a_pool_without_encapsulation_use_routes_of_bgp() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2", "--windows", "0", "--bgp"]);
    let pool = r#"{"spec": {"vxlanMode": "Never"}}"#;
    lab.ok(&["patch", "ippool", "default-ipv4-ippool", "--type", "merge", "-p", pool]);
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n".to_owned();
    let pods = [namespace, pod("one", "primary", "a"), pod("two", "linux-2", "a")];
    lab.ok(&["apply", "-f", &lab.file("pods.yml", &pods.join("---\n"))]);
    lab.wait_for_pods();
    let nodes = ["primary", "linux-2"];
    lab.wait_until("both nodes have a route", || nodes.iter().all(|node| !learned(&lab, node).is_empty()));
    assert!(learned(&lab, "primary").contains("via 192.0.2.12"), "{}", learned(&lab, "primary"));
    for node in nodes {
        let peers = peers(&lab, node);
        assert_eq!((peers.len(), &peers[0]["state"]), (1, &"Established".into()), "{peers:?}");
    }
    let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/80");
    let cell =
        |from: &str, to: &str| cells[&(format!("calico-demo/{from}"), format!("calico-demo/{to}"))].clone();
    assert_eq!((cell("one", "two").as_str(), cell("two", "one").as_str()), ("reached", "reached"));
    explained(&lab);
    let shown = lab.ok(&["bgp", "routes", "--node", "primary"]);
    assert!(shown.contains("192.0.2.12") && shown.contains("this node"), "{shown}");

    // A killed agent costs no route, neither here nor at its peer.
    let before = nodes.map(|node| learned(&lab, node));
    let agent = lab.processes().into_iter().find(|it| it.command.contains("agent --node linux-2")).unwrap();
    kill_process(Pid::from_raw(agent.pid.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
    lab.wait_until("the session is back", || {
        assert_eq!(nodes.map(|node| learned(&lab, node)), before);
        let peers = peers(&lab, "linux-2");
        peers.first().is_some_and(|peer| peer["state"] == "Established" && peer["received"] == 1)
    });
    assert_eq!(nodes.map(|node| learned(&lab, node)), before);

    // What takes a route away is noticed at once, not only by the look every ten seconds.
    let begin = Instant::now();
    let there = &before[0];
    let network = there.split_whitespace().next().unwrap();
    for _ in 0..4 {
        lab.ok(&["lab", "capture", "primary", "--", "ip", "-4", "route", "del", network, "proto", "85"]);
        lab.wait_until("the route is back", || learned(&lab, "primary") == *there);
    }
    assert!(begin.elapsed() < Duration::from_secs(25), "{:?}", begin.elapsed());

    // Without the mesh, nobody has routes of others.
    let off = "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {name: default}\nspec: {nodeToNodeMeshEnabled: false}\n";
    lab.ok(&["apply", "-f", &lab.file("off.yml", off)]);
    lab.wait_until("the routes are gone", || nodes.iter().all(|node| learned(&lab, node).is_empty()));
    lab.wait_until("each node says that it has no session", || {
        problems(&lab).matches("no BGPPeer gives this node a session").count() == nodes.len()
    });
    // No packet passes between the nodes, and each of them says so, with the node that is out of reach.
    let unreachable = || conditions_of(&lab, "BlockUnreachable");
    lab.wait_until("the blocks without a route are reported", || {
        nodes.iter().all(|node| unreachable().contains(&format!("leads to the pods of node {node} (")))
    });
    assert!(unreachable().contains("this node has no peers"), "{}", unreachable());
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// A pool of one block: the second node borrows addresses of it, and advertises them one by one.
#[test]
fn borrowed_addresses_are_reached_by_routes_of_bgp() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2", "--windows", "0", "--bgp"]);
    lab.ok(&[
        "patch",
        "ippool",
        "default-ipv4-ippool",
        "--type",
        "merge",
        "-p",
        r#"{"spec": {"disabled": true}}"#,
    ]);
    lab.ok(&["ipam", "configure", "--strictaffinity=false"]);
    let pool = "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: small}\nspec: {cidr: 10.55.0.0/26, vxlanMode: Never}\n";
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n";
    lab.ok(&["apply", "-f", &lab.file("pool.yml", &format!("{pool}---\n{namespace}"))]);
    for (name, node) in [("one", "primary"), ("two", "linux-2")] {
        lab.ok(&["apply", "-f", &lab.file("pod.yml", &pod(name, node, "a"))]);
        lab.wait_for_pods();
    }
    lab.wait_until("the borrowed address is learned", || learned(&lab, "primary").contains("via 192.0.2.12"));
    let routes = learned(&lab, "primary");
    assert!(routes.starts_with("10.55.0.") && !routes.contains('/'), "{routes}");
    lab.wait_until("the block is learned", || {
        learned(&lab, "linux-2").contains("10.55.0.0/26 via 192.0.2.11")
    });
    let cells = super::cells_at(&lab.json(&["lab", "matrix", "-o", "json"]), "tcp/80");
    let cell =
        |from: &str, to: &str| cells[&(format!("calico-demo/{from}"), format!("calico-demo/{to}"))].clone();
    assert_eq!((cell("one", "two").as_str(), cell("two", "one").as_str()), ("reached", "reached"));
    lab.ok(&["delete", "pod", "two", "-n", "calico-demo"]);
    lab.wait_until("the address is withdrawn", || learned(&lab, "primary").trim().is_empty());
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// What `bgp why` says about the blocks of both nodes, and about a network that nobody has.
fn explained(lab: &Lab) {
    let why = |of: &str| {
        let output = lab.tortie(&["bgp", "why", of, "--node", "primary", "-o", "json"]).output().unwrap();
        (output.status.code(), serde_json::from_slice::<Value>(&output.stdout).unwrap())
    };
    assert_eq!(why("203.0.113.7"), (Some(1), Value::Null));
    let routes = lab.tortie(&["bgp", "routes", "--node", "primary", "-o", "json"]).output().unwrap();
    let routes: Vec<Value> = serde_json::from_slice(&routes.stdout).unwrap();
    for route in routes {
        let prefix = route["prefix"].as_str().unwrap();
        // An address of the block is explained by the block.
        let (code, why) = why(prefix.split('/').next().unwrap());
        assert_eq!((code, &why["prefix"]), (Some(0), &route["prefix"]));
        let best = &why["candidates"][0];
        assert_eq!((&best["outcome"], &best["from"]), (&"best".into(), &route["from"]), "{why}");
        let (peer, kernel) = (&why["peers"][0], &why["kernel"]);
        if route["from"].is_null() {
            assert_eq!(peer["nextHop"], "192.0.2.11", "{why}");
            assert!(kernel["reason"].as_str().unwrap().contains("own route"), "{why}");
        } else {
            assert_eq!(peer["reason"], "the route is its own", "{why}");
            assert!(kernel["route"].as_str().unwrap().contains("via 192.0.2.12"), "{why}");
        }
    }
}

const ROLE: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: secrets, namespace: default}
rules: [{apiGroups: [''], resources: [secrets], resourceNames: [bgp], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: secrets, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: secrets}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: 'tortie:nodes'}]
";

/// What the nodes report about their speakers.
fn problems(lab: &Lab) -> String {
    conditions_of(lab, "BgpSettingNotInForce")
}

/// The messages of the conditions of all nodes with this reason.
fn conditions_of(lab: &Lab, reason: &str) -> String {
    let reports: Value = serde_json::from_str(&lab.ok(&["get", "nodereports", "-o", "json"])).unwrap();
    let items = reports["items"].as_array().cloned().unwrap_or_default();
    let conditions = items.iter().flat_map(|item| item["status"]["conditions"].as_array().cloned());
    let of_bgp = conditions.flatten().filter(|it| it["reason"] == reason);
    of_bgp.map(|it| it["message"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>().join("\n")
}

/// The mesh has a password from a Secret of the Kubernetes API. Without it there is no session, with it there is one, and a
/// new password replaces the old one.
#[test]
fn the_password_of_the_mesh_comes_from_a_secret() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2", "--windows", "0", "--bgp", "--datastore", "kubernetes"]);
    let nodes = ["primary", "linux-2"];
    let established = |node: &str| {
        let peers = peers(&lab, node);
        peers.first().is_some_and(|peer| peer["state"] == "Established")
    };
    lab.wait_until("a session without a password", || nodes.iter().all(|node| established(node)));
    let settings = "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {name: default}\nspec: {nodeMeshPassword: {secretKeyRef: {name: bgp, key: password}}}\n";
    lab.ok(&["apply", "-f", &lab.file("password.yml", settings)]);
    lab.wait_until("the missing permission is reported", || problems(&lab).contains("--bgp-secret bgp"));
    lab.wait_until("no session", || nodes.iter().all(|node| peers(&lab, node).is_empty()));
    let kubectl = |name: &str, manifest: &str| {
        lab.ok(&["lab", "kubectl", "apply", "-f", &lab.file(name, manifest)]);
    };
    kubectl("role.yml", ROLE);
    lab.wait_until("the missing Secret is reported", || {
        problems(&lab).contains("there is no Secret default/bgp")
    });
    let secret = |value: &str| {
        format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: bgp, namespace: default}}\nstringData: {{password: {value}}}\n"
        )
    };
    kubectl("secret.yml", &secret("first"));
    lab.wait_until("a session with a password", || nodes.iter().all(|node| established(node)));
    lab.wait_until("nothing is wrong", || problems(&lab).is_empty());
    // Its own session shows that both ends have the new password.
    let ages = |node: &str| peers(&lab, node)[0]["establishedSeconds"].as_u64();
    lab.wait_until("an old session", || nodes.iter().all(|node| ages(node) > Some(5)));
    kubectl("secret.yml", &secret("second"));
    lab.wait_until("a new session", || nodes.iter().all(|node| established(node) && ages(node) <= Some(5)));
    lab.ok(&["lab", "down"]);
    running.wait();
}

/// BIRD on a node, as a router of AS 64513 on port 1790 that advertises 203.0.113.0/24 to the node `primary`.
struct Router {
    process: Child,
    node: String,
    socket: String,
}

impl Router {
    fn start(lab: &Lab, node: &str, address: &str) -> Self {
        let config = format!(
            "log stderr all;\nrouter id {address};\nprotocol device {{}}
protocol static {{ ipv4; route 203.0.113.0/24 blackhole; }}
protocol bgp {{ local {address} port 1790 as 64513; neighbor 192.0.2.11 as 64512; passive; hold time 9;
    ipv4 {{ import all; export where source = RTS_STATIC; next hop self; }}; }}\n"
        );
        let file = lab.file(&format!("{node}.conf"), &config);
        let socket = format!("{file}.ctl");
        let bird = Program::Bird.find().unwrap();
        let bird = bird.to_str().unwrap();
        let mut command = lab.tortie(&["lab", "capture", node, "--", bird, "-f", "-c", &file, "-s", &socket]);
        let process = command.stderr(Stdio::null()).spawn().unwrap();
        Self { process, node: node.to_owned(), socket }
    }

    /// Its routes, a line for each; nothing before it answers.
    fn routes(&self, lab: &Lab) -> String {
        let birdc = Program::Birdc.find().unwrap();
        let birdc = birdc.to_str().unwrap();
        let question = ["lab", "capture", &self.node, "--", birdc, "-s", &self.socket, "show", "route"];
        String::from_utf8(lab.tortie(&question).output().unwrap().stdout).unwrap()
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Two routers, which run BIRD, advertise one network: the agent's route has both of them, then the one that is left.
#[test]
fn a_network_behind_two_routers_gets_a_route_by_way_of_both() {
    if !can_run(&[Program::Bird]) {
        return;
    }
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "3", "--windows", "0", "--bgp"]);
    let peer = |name: &str, address: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {{name: {name}}}\nspec: {{node: primary, peerIP: '{address}:1790', asNumber: 64513}}\n"
        )
    };
    let peers = [peer("one", "192.0.2.12"), peer("two", "192.0.2.13")];
    lab.ok(&["apply", "-f", &lab.file("peers.yml", &peers.join("---\n"))]);
    let first = Router::start(&lab, "linux-2", "192.0.2.12");
    let second = Router::start(&lab, "linux-3", "192.0.2.13");
    let route =
        || lab.ok(&["lab", "capture", "primary", "--", "ip", "-4", "route", "show", "203.0.113.0/24"]);
    lab.wait_until("a route by way of both", || {
        let route = route();
        route.contains("nexthop via 192.0.2.12") && route.contains("nexthop via 192.0.2.13")
    });
    let why = || lab.ok(&["bgp", "why", "203.0.113.9", "--node", "primary"]);
    assert!(why().contains("decided by the lower BGP identifier") && why().contains("as good"), "{}", why());
    assert!(why().contains("no export rule accepts it") && why().contains("and via"), "{}", why());

    // A filter for one of them.
    let filter = "apiVersion: projectcalico.org/v3\nkind: BGPFilter\nmetadata: {name: no-tests}\nspec: {importV4: [{cidr: 203.0.113.0/24, matchOperator: In, action: Reject}]}\n---\n";
    let filtered =
        peer("two", "192.0.2.13").replace("asNumber: 64513", "asNumber: 64513, filters: [no-tests]");
    lab.ok(&["apply", "-f", &lab.file("filter.yml", &format!("{filter}{filtered}"))]);
    lab.wait_until("the filter is named", || {
        why().contains("rejected on import: BGPFilter no-tests, importV4[0]")
    });
    lab.wait_until("one way is left", || !route().contains("192.0.2.13"));
    lab.ok(&["apply", "-f", &lab.file("peer.yml", &peers[1])]);
    lab.wait_until("both again", || route().contains("nexthop via 192.0.2.13"));

    // Networks of Services are no routes of others.
    let services = "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {name: default}\nspec: {serviceExternalIPs: [{cidr: 203.0.0.0/16}]}\n";
    lab.ok(&["apply", "-f", &lab.file("services.yml", services)]);
    lab.wait_until("no route into a network of Services", || route().trim().is_empty());
    assert!(why().contains("a network of Services"), "{}", why());
    lab.ok(&["delete", "bgpconfiguration", "default"]);
    lab.wait_until("both again", || route().contains("nexthop via 192.0.2.13"));
    drop(second);
    lab.wait_until("a route by way of the first", || {
        let route = route();
        route.contains("via 192.0.2.12") && !route.contains("192.0.2.13")
    });
    drop(first);
    lab.wait_until("no route", || route().trim().is_empty());
    lab.ok(&["lab", "down"]);
    running.wait();
}

const SERVICE: &str = "apiVersion: v1
kind: Service
metadata: {name: shop, namespace: calico-demo}
spec:
  type: LoadBalancer
  selector: {app: a}
  externalTrafficPolicy: Local
  externalIPs: [198.51.100.7]
  ports: [{port: 80}]
";

/// A router, which runs BIRD, learns the addresses of a Service of type Local from the node with a backend, while there is one.
#[test]
fn a_router_learns_addresses_of_services_while_the_node_has_a_backend() {
    if can_run(&[Program::Bird, Program::Birdc]) {
        addresses_of_services(&[]);
    }
}

/// The same with Services and EndpointSlices of a real API server.
#[test]
fn a_router_learns_addresses_of_services_of_kubernetes() {
    if can_run(&[Program::Bird, Program::Birdc, Program::Kube]) {
        addresses_of_services(&["--datastore", "kubernetes"]);
    }
}

/// A pod of the Service. The API server wants an image.
fn backend(name: &str, node: &str) -> String {
    pod(name, node, "a").replace("{name: c,", "{name: c, image: none,")
}

fn addresses_of_services(options: &[&str]) {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[&["--linux", "2", "--windows", "0", "--bgp"], options].concat());
    let settings = |spec: &str| {
        let text = format!(
            "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {{name: default}}\nspec: {spec}\n"
        );
        lab.ok(&["apply", "-f", &lab.file("settings.yml", &text)]);
    };
    let peer = "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: router}\nspec: {node: primary, peerIP: '192.0.2.12:1790', asNumber: 64513}\n";
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: calico-demo}\n";
    lab.ok(&["apply", "-f", &lab.file("peer.yml", &[peer, namespace, SERVICE].join("---\n"))]);
    let router = Router::start(&lab, "linux-2", "192.0.2.12");
    let routes = || {
        let routes = router.routes(&lab);
        let of_services = routes.lines().filter(|line| line.starts_with("198.51.100."));
        of_services.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let until = |what: &str, expected: &[&str]| lab.wait_until(what, || routes() == expected);
    settings("{serviceExternalIPs: [{cidr: 198.51.100.0/24}]}");
    until("the network", &["198.51.100.0/24"]);

    // A backend on the other node, then one on this node, which goes.
    lab.ok(&["apply", "-f", &lab.file("far.yml", &backend("far", "linux-2"))]);
    lab.wait_for_pods();
    assert_eq!(routes(), ["198.51.100.0/24"]);
    lab.ok(&["apply", "-f", &lab.file("near.yml", &backend("near", "primary"))]);
    until("the address", &["198.51.100.0/24", "198.51.100.7/32"]);
    let why = lab.ok(&["bgp", "why", "198.51.100.7", "--node", "primary"]);
    assert!(why.contains("own route"), "{why}");
    lab.ok(&["delete", "pod", "near", "-n", "calico-demo"]);
    until("the address is withdrawn", &["198.51.100.0/24"]);

    // A single address of the settings, which any backend makes reachable, and no settings.
    let cluster = SERVICE.replace("Local", "Cluster");
    lab.ok(&["apply", "-f", &lab.file("cluster.yml", &cluster)]);
    settings("{serviceExternalIPs: [{cidr: 198.51.100.7/32}]}");
    until("the single address", &["198.51.100.7/32"]);
    lab.ok(&["label", "node", "primary", "node.kubernetes.io/exclude-from-external-load-balancers="]);
    until("the node is excluded", &[]);
    lab.ok(&["label", "node", "primary", "node.kubernetes.io/exclude-from-external-load-balancers-"]);
    until("it is not", &["198.51.100.7/32"]);
    lab.ok(&["delete", "bgpconfiguration", "default"]);
    until("no settings", &[]);
    settings("{serviceExternalIPs: [{cidr: 198.51.100.7/32}]}");
    until("the settings again", &["198.51.100.7/32"]);
    drop(router);
    lab.ok(&["lab", "down"]);
    running.wait();
}

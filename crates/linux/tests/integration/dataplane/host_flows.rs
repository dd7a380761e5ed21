//! Which flows continue when a node's own interfaces get policy, with real connections.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;

use crate::common::cluster::*;
use crate::common::filtering::AfterEachTransaction;
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::nftables::{Nft, Table};
use tortie_kernel::route::{Change, LinkSetting, RouteSocket};
use tortie_policy::program::*;

/// A node, and an outside machine on the same switch.
fn node_and_outside() -> (Node, Node) {
    let underlay = Underlay::new();
    let (mut node, outside) = (Node::new(&underlay, 1), Node::new(&underlay, 9));
    assert_eq!(node.change(open_profile), Report::default());
    node.namespace
        .run(|| {
            let up = Change::SetLink(interface_index("lo").unwrap(), vec![LinkSetting::Up(true)]);
            RouteSocket::open().unwrap().change(&up).unwrap();
        })
        .unwrap();
    (node, outside)
}

impl Node {
    /// Gives interfaces a program, or removes the host endpoint.
    fn host(&mut self, name: &str, interface: &str, program: Option<HostEndpointProgram>) -> Report {
        let host =
            |program| HostEndpoint { interface: Some(interface.to_owned()), addresses: vec![], program };
        let mut state = self.state.clone();
        match program.map(host) {
            Some(host) => drop(state.host_endpoints.insert(name.to_owned(), Arc::new(host))),
            None => drop(state.host_endpoints.remove(name)),
        }
        let deltas = crate::common::deltas(&self.state, &state);
        self.state = state;
        let apply = || {
            tracing::subscriber::with_default(AfterEachTransaction(|| ()), || self.dataplane.apply(&deltas))
        };
        self.namespace.run(apply).unwrap()
    }

    fn dials(&self, to: Ipv4Addr, port: u16) -> Option<std::net::TcpStream> {
        self.namespace.run(|| connect(to, port)).unwrap()
    }

    fn table(&self) -> Table {
        self.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap().unwrap()).unwrap()
    }
}

/// A table of one tier that passes at its end.
fn tier(ingress: &[&str], egress: &[&str]) -> EndpointProgram {
    let tiers = |policies: &[&str]| {
        let policies: Vec<_> = policies.iter().map(|name| policy_id(name)).collect();
        let tier = TierProgram { name: "default".into(), policies, end: EndOfTier::Pass };
        if tier.policies.is_empty() { vec![] } else { vec![tier] }
    };
    EndpointProgram { ingress: tiers(ingress), egress: tiers(egress), profiles: vec![] }
}

fn policy(state: &mut NodeState, name: &str, ingress: Vec<Rule>, egress: Vec<Rule>) {
    state.policies.insert(policy_id(name), Arc::new(PolicyRules { ingress, egress }));
}

/// Without policy and profile, everything except failsafe ports is dropped.
fn closed() -> Option<HostEndpointProgram> {
    Some(HostEndpointProgram::default())
}

#[test]
fn established_flows_failsafe_ports_and_pods_are_not_cut_by_host_endpoints() {
    let (mut node, outside) = node_and_outside();
    let pod = Pod::new("pod", 1, 2);
    node.add(&pod, open());
    for port in [22, 2379, 8080] {
        serve(&node.namespace, port);
        serve(&outside.namespace, port);
    }
    pod.serve(80);
    let ours = outside.dials(node_address(1), 8080).unwrap();
    let ssh = outside.dials(node_address(1), 22).unwrap();
    let theirs = node.dials(node_address(9), 8080).unwrap();
    assert!([&ours, &ssh, &theirs].into_iter().all(answers));

    for interface in ["eth0", "*"] {
        assert_eq!(node.host("host", interface, closed()), Report::default());
        assert!([&ours, &ssh, &theirs].into_iter().all(answers), "established under {interface}");
        assert!(outside.dials(node_address(1), 22).is_some_and(|stream| answers(&stream)), "a failsafe port");
        assert!(outside.is_cut_off(node_address(1), 8080), "no failsafe port");
        assert!(node.dials(node_address(9), 2379).is_some_and(|stream| answers(&stream)), "a failsafe port");
        assert!(node.is_cut_off(node_address(9), 8080), "no failsafe port");
        assert!(node.dials(Ipv4Addr::LOCALHOST, 8080).is_some_and(|stream| answers(&stream)), "loopback");
        assert!(node.dials(node_address(1), 8080).is_some_and(|stream| answers(&stream)), "to itself");
        assert!(node.reaches(&pod, 80), "a pod of its own");
        assert!(pod.connect(node_address(1), 8080).is_some_and(|stream| answers(&stream)), "from a pod");
    }
    assert_eq!(node.host("host", "*", None), Report::default());
    assert!(outside.dials(node_address(1), 8080).is_some() && node.dials(node_address(9), 8080).is_some());
}

/// An untracked Allow applies to packets, not to connections (policy decision 16).
#[test]
fn untracked_flows_need_a_rule_in_each_direction() {
    let (mut node, outside) = node_and_outside();
    serve(&node.namespace, 8080);
    let port = || EntityMatch { ports: vec![PortRange::single(8080)], ..EntityMatch::default() };
    let tcp = || Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    node.change(|state| {
        policy(state, "there", vec![Rule { destination: port(), ..tcp() }], vec![]);
        policy(state, "back", vec![], vec![Rule { source: port(), ..tcp() }]);
    });
    let untracked = |untracked| Some(HostEndpointProgram { untracked, ..HostEndpointProgram::default() });
    assert_eq!(node.host("host", "eth0", untracked(tier(&["there"], &[]))), Report::default());
    assert!(outside.is_cut_off(node_address(1), 8080), "no rule for the answers");
    node.host("host", "eth0", untracked(tier(&["there"], &["back"])));
    let stream = outside.dials(node_address(1), 8080).unwrap();
    assert!(answers(&stream));
    assert_eq!(entries(&node), 0, "packets of no connection");

    // With connection tracking, the answers need no rule.
    node.host(
        "host",
        "eth0",
        Some(HostEndpointProgram { normal: tier(&["there"], &[]), ..Default::default() }),
    );
    let stream = outside.dials(node_address(1), 8080).unwrap();
    assert!(answers(&stream));
    assert_eq!(entries(&node), 1);
}

#[test]
fn the_overlay_works_with_a_host_endpoint_for_all_interfaces() {
    let (mut nodes, pods) = two_nodes();
    assert!(pods[0].reaches(&pods[1], 80));
    for node in &mut nodes {
        assert_eq!(node.host("all", "*", closed()), Report::default());
    }
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    serve(&nodes[1].namespace, 8080);
    assert!(nodes[0].is_cut_off(node_address(2), 8080), "the nodes themselves are closed");

    // Forwarded packets have separate policies, which also apply to packets from the node's own pods.
    nodes[1].change(|state| policy(state, "closed", vec![Rule::all(Action::Deny)], vec![]));
    let forward = HostEndpointProgram { forward: tier(&["closed"], &[]), ..HostEndpointProgram::default() };
    nodes[1].host("all", "*", Some(forward));
    assert!(pods[0].is_cut_off(pods[1].address, 80) && pods[1].is_cut_off(pods[0].address, 80));
    let forward = HostEndpointProgram { forward: tier(&[], &["closed"]), ..HostEndpointProgram::default() };
    nodes[1].change(|state| policy(state, "closed", vec![], vec![Rule::all(Action::Deny)]));
    nodes[1].host("all", "*", Some(forward));
    assert!(pods[0].is_cut_off(pods[1].address, 80), "it goes out to the pod");
    nodes[1].host("all", "*", None);
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
}

/// A named interface takes precedence over `*`; of two host endpoints for one interface, the first by name counts.
#[test]
fn the_precedence_of_host_endpoints() {
    let (mut node, outside) = node_and_outside();
    serve(&node.namespace, 8080);
    let all = || Some(HostEndpointProgram { normal: open(), ..HostEndpointProgram::default() });
    let reached = || outside.dials(node_address(1), 8080).is_some();
    node.host("all", "*", closed());
    assert!(!reached());
    assert_eq!(node.host("named", "eth0", all()), Report::default());
    assert!(reached(), "the named interface has its own");
    let reported = |report: Report| {
        let all = report
            .node
            .iter()
            .map(|condition| (condition.reason, condition.to_string().starts_with("HostEndpoint named: ")));
        all.collect::<Vec<_>>()
    };
    let of_named = vec![(Reason::HostEndpointWithoutInterface, true)];
    assert_eq!(reported(node.host("a-first", "eth0", closed())), of_named);
    assert!(!reached(), "the first by name");
    assert_eq!(reported(node.resync()), of_named);
    assert_eq!(node.host("a-first", "eth0", None), Report::default());
    assert!(reached());
    node.host("named", "eth0", None);
    assert!(!reached(), "under * again");
}

/// Policy decision 16: policy before DNAT of all interfaces applies to an interface whose own host endpoint has none.
#[test]
fn policy_before_dnat_of_all_interfaces_applies_beside_a_named_one() {
    let (mut node, outside) = node_and_outside();
    serve(&node.namespace, 8080);
    node.change(|state| {
        policy(state, "deny", vec![Rule::all(Action::Deny)], vec![]);
        policy(state, "allow", vec![Rule::all(Action::Allow)], vec![]);
    });
    let before_dnat = |policies: &[&str]| {
        Some(HostEndpointProgram {
            pre_dnat: tier(policies, &[]),
            normal: open(),
            ..HostEndpointProgram::default()
        })
    };
    let reached = || outside.dials(node_address(1), 8080).is_some();
    node.host("named", "eth0", before_dnat(&[]));
    assert!(reached());
    node.host("all", "*", before_dnat(&["deny"]));
    assert!(!reached(), "the named one has no such policy");
    node.host("named", "eth0", before_dnat(&["allow"]));
    assert!(reached(), "it has one");
}

#[test]
fn deleted_host_endpoints_leave_nothing() {
    let (mut node, _) = node_and_outside();
    let before = node.table();
    node.change(|state| {
        policy(state, "some", vec![Rule::all(Action::Allow)], vec![Rule::all(Action::Allow)])
    });
    let some = || tier(&["some"], &["some"]);
    let program =
        HostEndpointProgram { untracked: some(), pre_dnat: some(), forward: some(), normal: open() };
    node.host("named", "eth0", Some(program.clone()));
    node.host("all", "*", Some(program));
    assert!(node.table().chains.len() >= before.chains.len() + 10);
    node.host("named", "eth0", None);
    node.host("all", "*", None);
    node.change(|state| drop(state.policies.remove(&policy_id("some"))));
    assert_eq!(node.table(), before);
}

/// Echoes on a port of a namespace while the test runs.
fn serve(namespace: &tortie_kernel::namespace::NetNs, port: u16) {
    let listener = namespace.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap()).unwrap();
    echo_on(listener);
}

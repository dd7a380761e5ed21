//! Whole nodes on the real kernel: pods, policy, restarts, and changes of Tortie's tables by others.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;

use crate::common::cluster::*;
use tortie_api::calico::{EndpointToHostAction, FilterDenyAction};
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::*;
use tortie_kernel::nftables::{BaseChain, Chain, ChainKind, Hook, Nft, Op, Table, Transaction, diff};
use tortie_kernel::route::{Change, LinkSetting, Route, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_linux::dataplane::Config;
use tortie_policy::program::*;

fn member(address: impl Into<IpAddr>) -> Member {
    Member::Net(address.into().into())
}

fn from_set(action: Action, set: &str) -> Rule {
    let source = EntityMatch { sets: vec![SetId::new(set)], ..EntityMatch::default() };
    Rule { source, ..Rule::all(action) }
}

fn ingress_policy(state: &mut NodeState, name: &str, rules: Vec<Rule>) {
    state.policies.insert(policy_id(name), Arc::new(PolicyRules { ingress: rules, egress: Vec::new() }));
}

#[test]
fn policy_between_two_pods_of_a_node() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    server.serve(81);
    assert_eq!(node.change(open_profile), Report::default());
    node.add(&client, open());
    node.add(&server, open());
    assert!(client.reaches(&server, 80), "a profile allows it");

    // A set of clients that is empty at first.
    let set = SetId::new("s:clients");
    let report = node.change(|state| {
        state.sets.insert(set.clone(), (SetKind::Nets, Members::default()));
        ingress_policy(state, "clients", vec![from_set(Action::Allow, "s:clients")]);
    });
    assert_eq!(report, Report::default());
    node.program(&server, ingress(&["clients"], EndOfTier::Deny));
    assert!(client.is_cut_off(server.address, 80), "no member");
    assert!(node.reaches(&server, 80), "a node always reaches its own pods");
    let members = |members: Vec<Member>| {
        let set = set.clone();
        move |state: &mut NodeState| {
            drop(state.sets.insert(set, (SetKind::Nets, members.into_iter().collect())))
        }
    };
    node.change(members(vec![member(client.address)]));
    assert!(client.reaches(&server, 80), "a member");
    node.change(members(vec![Member::Net("10.65.1.0/29".parse().unwrap())]));
    assert!(client.reaches(&server, 80), "a member's network");
    node.change(members(vec![Member::Net("10.65.1.8/29".parse().unwrap())]));
    assert!(client.is_cut_off(server.address, 80), "another network");
    node.change(members(vec![]));
    assert!(client.is_cut_off(server.address, 80), "a member no more");

    // A port, by protocol.
    let port = EntityMatch { ports: vec![PortRange::single(81)], ..EntityMatch::default() };
    let rule = Rule { protocol: Some(Protocol::TCP), destination: port, ..Rule::all(Action::Allow) };
    node.change(|state| ingress_policy(state, "clients", vec![rule]));
    assert!(client.reaches(&server, 81) && client.is_cut_off(server.address, 80));

    // Pass leads to the profile, past the rest of the tier.
    node.change(|state| {
        ingress_policy(state, "clients", vec![Rule::all(Action::Pass), Rule::all(Action::Deny)])
    });
    assert!(client.reaches(&server, 80));
    node.change(|state| ingress_policy(state, "clients", vec![]));
    assert!(client.is_cut_off(server.address, 80), "the end of the tier denies");

    // A pod with unknown policy is closed.
    node.program(&server, open());
    assert!(client.reaches(&server, 80));
    let report = node.change(|state| {
        let endpoint = Arc::make_mut(state.endpoints.get_mut(&server.id()).unwrap());
        endpoint.program = Arc::new(ingress(&["nowhere"], EndOfTier::Pass));
    });
    assert!(report.endpoints[&server.id()][0].to_string().contains("nowhere: it is not known"), "{report:?}");
    assert!(client.is_cut_off(server.address, 80));
}

/// The pod's egress first, then the configured action (policy decision 3).
#[test]
fn packets_from_a_pod_to_its_own_node() {
    let mut node = Node::new(&Underlay::new(), 1);
    let pod = Pod::new("pod", 1, 2);
    node.change(open_profile);
    node.add(&pod, open());
    echo_on(node.namespace.run(|| TcpListener::bind("0.0.0.0:8080").unwrap()).unwrap());
    assert!(pod.connect(node_address(1), 8080).is_some());
    node.change(|state| {
        let rules = PolicyRules { ingress: vec![], egress: vec![Rule::all(Action::Deny)] };
        state.policies.insert(policy_id("closed"), Arc::new(rules));
    });
    let policies = vec![policy_id("closed")];
    let tier = TierProgram { name: "default".into(), policies, end: EndOfTier::Deny };
    node.program(&pod, EndpointProgram { egress: vec![tier], ..open() });
    assert!(pod.is_cut_off(node_address(1), 8080), "its own egress policy comes first");

    node.program(&pod, open());
    let established = pod.connect(node_address(1), 8080).unwrap();
    for action in [EndpointToHostAction::Drop, EndpointToHostAction::Return, EndpointToHostAction::Accept] {
        let report = node.change(|state| Arc::make_mut(&mut state.settings).endpoint_to_host = action);
        assert_eq!(report, Report::default());
        let passes = match action {
            EndpointToHostAction::Drop => !pod.is_cut_off(node_address(1), 8080),
            EndpointToHostAction::Return | EndpointToHostAction::Accept => {
                pod.connect(node_address(1), 8080).is_some_and(|stream| answers(&stream))
            }
        };
        assert_eq!(passes, action != EndpointToHostAction::Drop, "{action:?}");
        assert!(answers(&established), "{action:?}: an established connection goes on (policy decision 20)");
    }
}

/// Denied packets are dropped, or rejected: by a reset for TCP, by an ICMP message otherwise.
#[test]
fn denied_packets_are_dropped_or_rejected() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    node.change(open_profile);
    node.add(&client, open());
    node.change(|state| ingress_policy(state, "closed", vec![Rule::all(Action::Deny)]));
    node.change(|state| ingress_policy(state, "nothing", vec![]));
    node.add(&server, open());
    for policy in ["closed", "nothing"] {
        node.program(&server, ingress(&[policy], EndOfTier::Deny));
        for (deny, refused) in [(FilterDenyAction::Drop, false), (FilterDenyAction::Reject, true)] {
            node.change(|state| Arc::make_mut(&mut state.settings).deny = deny);
            let to = SocketAddr::from((server.address, 80));
            let error =
                client.namespace.run(|| TcpStream::connect_timeout(&to, UNREACHED).unwrap_err().kind());
            let expected = if refused { ErrorKind::ConnectionRefused } else { ErrorKind::TimedOut };
            assert_eq!(error.unwrap(), expected, "{policy} {deny:?}");
            let datagram = || {
                let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                socket.set_read_timeout(Some(UNREACHED)).unwrap();
                socket.connect(to).unwrap();
                socket.send(b"meow").unwrap();
                socket.recv(&mut [0; 8]).unwrap_err().kind()
            };
            // For a socket, the ICMP message "prohibited" means that the host is unreachable.
            let expected = if refused { ErrorKind::HostUnreachable } else { ErrorKind::WouldBlock };
            assert_eq!(client.namespace.run(datagram).unwrap(), expected, "{policy} {deny:?}");
        }
    }
}

/// All of Tortie's objects in the kernel, with handles and indices.
fn everything(node: &Node) -> String {
    let mut command = Command::new("nft");
    command.args(["-a", "list", "table", "inet", "tortie"]);
    let output = node.namespace.enter_on_spawn(&mut command).unwrap().output();
    let output = output.expect("this test needs the program nft: apt-get install nftables");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tables = node.namespace.run(|| {
        let mut socket = RouteSocket::open().unwrap();
        let link = interface_index("vxlan.calico").unwrap();
        let mut routes = socket.routes().unwrap();
        routes.sort_by_key(|route| route.to_string());
        let links: Vec<_> = socket.links().unwrap().into_iter().map(|link| (link.index, link.name)).collect();
        format!("{routes:#?}{links:?}{:?}{:?}", socket.neighbours().unwrap(), socket.fdb(link).unwrap())
    });
    String::from_utf8(output.stdout).unwrap() + &tables.unwrap()
}

#[test]
fn a_restart_keeps_correct_objects() {
    let (mut nodes, pods) = two_nodes();
    nodes[1].change(|state| {
        let members = [member(pods[0].address), Member::Net("10.77.0.0/16".parse().unwrap())];
        state.sets.insert(SetId::new("s:one"), (SetKind::Nets, members.into()));
        ingress_policy(state, "one-only", vec![from_set(Action::Allow, "s:one")]);
    });
    nodes[1].program(&pods[1], ingress(&["one-only"], EndOfTier::Deny));
    let stream = pods[0].connect(pods[1].address, 80).unwrap();
    assert!(answers(&stream));
    let before = everything(&nodes[1]);
    nodes[1].restart();
    assert_eq!(everything(&nodes[1]), before, "the same objects, by handle and index");
    assert!(answers(&stream), "an established connection goes on");
    assert!(pods[0].reaches(&pods[1], 80));

    // The restart applies exactly what changed in between.
    nodes[1].state.sets.insert(SetId::new("s:one"), (SetKind::Nets, Members::default()));
    nodes[1].restart();
    assert!(pods[0].is_cut_off(pods[1].address, 80));
    assert!(answers(&stream), "an established connection goes on (policy decision 20)");
}

/// As on a kernel that cannot guard a table.
fn unguarded() -> Config {
    Config { guard_table: false, ..Config::default() }
}

/// With other software (policy decision 28).
#[test]
fn foreign_damage_is_repaired_and_foreign_objects_are_kept() {
    let (mut nodes, pods) = two_nodes_with(&unguarded());
    let node = &mut nodes[1];
    node.change(|state| ingress_policy(state, "closed", vec![]));
    node.program(&pods[1], ingress(&["closed"], EndOfTier::Deny));
    assert!(pods[0].is_cut_off(pods[1].address, 80));
    let ours = node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap().unwrap()).unwrap();
    let base = BaseChain { kind: ChainKind::Filter, hook: Hook::Forward, priority: 10, drop: false };
    let theirs = Table {
        chains: [("theirs".to_owned(), Chain { base: Some(base), rules: vec![] })].into(),
        ..Table::default()
    };
    let foreign = Route::on_link("10.200.0.0/24".parse().unwrap(), 1, 4);
    let remote = Route::via(block(1).into(), vtep(1).address, 0, 84);
    let vandal = || {
        let mut nft = Nft::open().unwrap();
        nft.commit(&diff("theirs", &theirs, None)).unwrap();
        let mut ops: Vec<_> = ours.chains.keys().map(|name| Op::SetRules(name.clone(), vec![])).collect();
        ops.push(Op::AddChain("vandal".to_owned(), None));
        nft.commit(&Transaction { table: "tortie".to_owned(), ops }).unwrap();
        let mut socket = RouteSocket::open().unwrap();
        let link = interface_index("vxlan.calico").unwrap();
        socket.change(&Change::AddRoute(foreign.clone())).unwrap();
        socket.change(&Change::DeleteRoute(Route { link: Some(link), ..remote })).unwrap();
        for entry in socket.fdb(link).unwrap() {
            socket.change(&Change::DeleteFdb(entry)).unwrap();
        }
        sysctl::ensure("net/ipv4/ip_forward", "0").unwrap();
    };
    node.namespace.run(vandal).unwrap();
    assert_eq!(node.resync(), Report::default());
    let look =
        || (Nft::open().unwrap().list("tortie").unwrap(), Nft::open().unwrap().list("theirs").unwrap());
    assert_eq!(node.namespace.run(look).unwrap(), (Some(ours), Some(theirs)));
    assert!(pods[0].is_cut_off(pods[1].address, 80));
    node.program(&pods[1], open());
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    let routes = node.namespace.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
    assert!(routes.contains(&foreign));
}

#[test]
fn a_missing_table_is_recreated_by_the_next_change() {
    let mut node = Node::with(&Underlay::new(), 1, unguarded());
    let pod = Pod::new("pod", 1, 2);
    pod.serve(80);
    node.change(open_profile);
    node.add(&pod, open());
    let delete = Transaction { table: "tortie".to_owned(), ops: vec![Op::DeleteTable] };
    node.namespace.run(|| Nft::open().unwrap().commit(&delete).unwrap()).unwrap();
    let report = node.change(|state| ingress_policy(state, "closed", vec![]));
    assert_eq!(report, Report::default());
    node.program(&pod, ingress(&["closed"], EndOfTier::Deny));
    let table = node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap()).unwrap();
    assert!(table.unwrap().sets["to-workload-program"].elements.len() == 1);
}

#[test]
fn a_foreign_route_is_reported_and_kept() {
    let mut node = Node::new(&Underlay::new(), 1);
    let foreign = Route::on_link("10.65.1.0/26".parse().unwrap(), 1, 4);
    node.namespace
        .run(|| RouteSocket::open().unwrap().change(&Change::AddRoute(foreign.clone())).unwrap())
        .unwrap();
    let report = node.change(|state| drop(state.routes.insert(block(1).into(), RouteTarget::Local)));
    assert_eq!(report.node.len(), 1);
    assert_eq!(report.node[0].reason, Reason::RouteTaken);
    assert!(report.node[0].message.contains("10.65.1.0/26"), "{:?}", report.node);
    let routes = node.namespace.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
    assert!(routes.contains(&foreign));
}

#[test]
fn a_policy_that_cannot_be_rendered_closes_only_its_pods() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    client.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    node.change(|state| ingress_policy(state, "pass", vec![Rule::all(Action::Pass)]));
    let tier = |n| TierProgram {
        name: format!("tier-{n}").into(),
        policies: vec![policy_id("pass")],
        end: EndOfTier::Pass,
    };
    let program = |tiers: u8| EndpointProgram { ingress: (0..tiers).map(tier).collect(), ..open() };
    node.program(&server, program(11));
    assert!(client.reaches(&server, 80), "as many tiers as the kernel can follow");

    let report = node.change(|state| {
        Arc::make_mut(state.endpoints.get_mut(&server.id()).unwrap()).program = Arc::new(program(12));
    });
    assert_eq!(report.endpoints.keys().collect::<Vec<_>>(), [&server.id()]);
    assert_eq!(report.endpoints[&server.id()][0].reason, Reason::RuleNotExpressible);
    assert!(client.is_cut_off(server.address, 80) && server.reaches(&client, 80));
    node.program(&server, open());
    assert!(client.reaches(&server, 80), "and the condition is gone");
}

/// A set grows beyond the limit and shrinks, by single members and as a whole, while another pod gets its policy.
#[test]
fn a_set_with_too_many_members_closes_only_the_pods_whose_policies_name_it() {
    let config = Config { most_members: 10, ..Config::default() };
    let mut node = Node::with(&Underlay::new(), 1, config);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    client.serve(80);
    let set = SetId::new("s:large");
    let members = |count: u32| -> BTreeSet<Member> {
        let others = (1..count).map(|n| member((0x0b00_0000 + n * 2).to_be_bytes()));
        others.chain([member(client.address)]).collect()
    };
    for denies in [false, true] {
        node.change(|state| {
            open_profile(state);
            state.sets.insert(set.clone(), (SetKind::Nets, members(9).into()));
            let source = EntityMatch { sets: vec![set.clone()], ..EntityMatch::default() };
            let action = if denies { Action::Deny } else { Action::Allow };
            ingress_policy(
                state,
                "grows",
                vec![Rule { source, ..Rule::all(action) }, Rule::all(Action::Allow)],
            );
            ingress_policy(state, "other", vec![]);
        });
        node.add(&client, ingress(&["other"], EndOfTier::Deny));
        node.add(&server, ingress(&["grows"], EndOfTier::Deny));
        for (count, is_closed) in [(10, false), (11, true), (10, false), (500, true), (10, false)] {
            let allowed = if is_closed { vec![Rule::all(Action::Allow)] } else { vec![] };
            let report = node.change(|state| {
                state.sets.insert(set.clone(), (SetKind::Nets, members(count).into()));
                ingress_policy(state, "other", allowed);
            });
            assert!(report.node.is_empty() && !report.retry, "{count}: {report:?}");
            let conditions: Vec<_> = report.endpoints.values().flatten().collect();
            assert_eq!(conditions.len(), usize::from(is_closed), "{count}: {report:?}");
            for condition in conditions {
                assert_eq!(condition.reason, Reason::RuleNotExpressible);
                assert!(condition.about[0].name == "grows" && condition.message.contains("select fewer"));
            }
            let is_open = |from: &Pod, to: &Pod, expected: bool| match expected {
                true => from.reaches(to, 80),
                false => !from.is_cut_off(to.address, 80),
            };
            let expected = !is_closed && !denies;
            assert_eq!(is_open(&client, &server, expected), expected, "{count}, {denies}");
            let of_other = is_open(&server, &client, is_closed);
            assert_eq!(of_other, is_closed, "{count}: what else changed is in force");
        }
    }
}

#[test]
fn a_huge_policy_closes_only_its_pods() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    client.serve(80);
    node.change(|state| {
        open_profile(state);
        ingress_policy(state, "grows", vec![Rule::all(Action::Allow)]);
        ingress_policy(state, "other", vec![]);
    });
    node.add(&client, ingress(&["other"], EndOfTier::Deny));
    node.add(&server, ingress(&["grows"], EndOfTier::Deny));
    assert!(client.reaches(&server, 80));
    let from = |nets: Vec<std::net::Ipv4Addr>| {
        let nets = nets.into_iter().map(|address| IpAddr::from(address).into()).collect();
        Rule { source: EntityMatch { nets, ..EntityMatch::default() }, ..Rule::all(Action::Allow) }
    };
    // Each matches another pair of source and destination, so none can be merged.
    let pair = |n: u32| {
        let mut rule = from(vec![(n * 2).into()]);
        rule.destination.nets = vec![IpAddr::from((n * 2).to_be_bytes()).into()];
        rule
    };
    let many_rules = (0..20_001u32).map(pair).collect();
    // Single addresses that are not adjacent: one rule with a large set inside.
    let large_rule = vec![from((0..250_000u32).map(|n| (n * 2).into()).collect())];
    for huge in [many_rules, large_rule] {
        let report = node.change(|state| {
            ingress_policy(state, "grows", huge);
            ingress_policy(state, "other", vec![Rule::all(Action::Allow)]);
        });
        assert!(report.node.is_empty() && !report.retry, "{report:?}");
        assert_eq!(report.endpoints.keys().collect::<Vec<_>>(), [&server.id()]);
        let condition = &report.endpoints[&server.id()][0];
        assert_eq!(condition.reason, Reason::RuleNotExpressible);
        assert!(condition.about[0].name == "grows" && condition.message.contains("network set"));
        assert!(client.is_cut_off(server.address, 80));
        assert!(server.reaches(&client, 80), "what else changed is in force");
        let report = node.change(|state| {
            ingress_policy(state, "grows", vec![Rule::all(Action::Allow)]);
            ingress_policy(state, "other", vec![]);
        });
        assert_eq!(report, Report::default());
        assert!(client.reaches(&server, 80));
    }
}

#[test]
fn two_pods_with_one_interface_are_both_closed() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    assert!(client.reaches(&server, 80));
    let other = EndpointId { pod: "a-other".into(), ..server.id() };
    let report = node.change(|state| {
        let mut endpoint = (*state.endpoints[&server.id()]).clone();
        endpoint.addresses = vec!["10.65.1.9".parse().unwrap()];
        state.endpoints.insert(other.clone(), Arc::new(endpoint));
    });
    assert_eq!(report.endpoints.keys().collect::<Vec<_>>(), [&other, &server.id()]);
    assert!(report.endpoints.values().all(|conditions| conditions[0].reason == Reason::InterfaceContested));
    assert!(client.is_cut_off(server.address, 80));
    assert_eq!(node.change(|state| drop(state.endpoints.remove(&other))), Report::default());
    assert!(client.reaches(&server, 80) && client.connect(server.address, 80).is_some());
}

#[test]
fn a_missing_interface_is_reported_and_found_later() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    let host_interface = node.wiring.host_interface(&server.id(), &server.container_id);
    let endpoint = Endpoint {
        container_id: server.container_id.as_str().into(),
        host_interface: host_interface.as_str().into(),
        addresses: vec![server.address.into()],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(open()),
    };
    let report = node.change(|state| drop(state.endpoints.insert(server.id(), Arc::new(endpoint))));
    assert!(report.retry);
    assert_eq!(report.endpoints[&server.id()][0].reason, Reason::InterfaceMissing);
    assert!(report.endpoints[&server.id()][0].message.contains(&host_interface));
    node.namespace.run(|| node.wiring.connect(&server.attachment()).unwrap()).unwrap();

    // It exists but is down, so it can have no routes.
    let set_up = |node: &Node, up| {
        let change = || {
            let index = interface_index(&host_interface).unwrap();
            RouteSocket::open().unwrap().change(&Change::SetLink(index, vec![LinkSetting::Up(up)])).unwrap();
        };
        node.namespace.run(change).unwrap();
    };
    set_up(&node, false);
    let report = node.apply(&[]);
    assert!(report.retry && report.node.is_empty());
    assert_eq!(report.endpoints[&server.id()][0].reason, Reason::NetworkNotInForce);
    // While it is pending, not everything is read and compared each time.
    let route = || {
        let routes = RouteSocket::open().unwrap().routes().unwrap();
        routes.into_iter().find(|route| route.destination.addr() == client.address)
    };
    let gone = node.namespace.run(route).unwrap().unwrap();
    assert!(node.resync().retry);
    node.namespace
        .run(|| RouteSocket::open().unwrap().change(&Change::DeleteRoute(gone.clone())).unwrap())
        .unwrap();
    let report = node.resync();
    assert!(report.retry && report.node.is_empty());
    assert_eq!(node.namespace.run(route).unwrap(), None);
    set_up(&node, true);
    assert_eq!(node.resync(), Report::default());
    assert_eq!(node.resync(), Report::default(), "and now that none waits, all is compared");
    assert_eq!(node.namespace.run(route).unwrap(), Some(gone));
    assert!(client.reaches(&server, 80));
}

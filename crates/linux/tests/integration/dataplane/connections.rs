//! Connections of addresses that change owners: nobody inherits them, on the real kernel.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::cluster::*;
use ipnet::IpNet;
use tortie_api::calico::EstablishedFlows;
use tortie_api::net::Action;
use tortie_dataplane::*;
use tortie_kernel::conntrack::Conntrack;
use tortie_linux::dataplane::Config;
use tortie_policy::program::*;

#[test]
fn an_address_that_is_reassigned_at_once_inherits_no_connection() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    assert_eq!(entries(&node), 1);
    node.change(|state| Arc::make_mut(state.endpoints.get_mut(&server.id()).unwrap()).mac = None);
    assert_eq!(entries(&node), 1, "the same sandbox keeps them");

    let next = Pod::new("next", 1, 3);
    let interface = node.namespace.run(|| node.wiring.connect(&next.attachment()).unwrap()).unwrap();
    let report = node.change(|state| {
        let mut endpoint = state.endpoints.remove(&server.id()).unwrap();
        let its = Arc::make_mut(&mut endpoint);
        (its.container_id, its.host_interface) = ("another".into(), interface.host_interface.into());
        state.endpoints.insert(next.id(), endpoint);
    });
    assert_eq!(report, Report::default());
    assert_eq!(entries(&node), 0);
}

/// A node on which a client has a connection to a server that is then deleted.
fn with_a_connection_that_is_over() -> (Node, Pod, Arc<Endpoint>) {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    assert_eq!(entries(&node), 1);
    let endpoint = node.state.endpoints[&server.id()].clone();
    node.change(|state| drop(state.endpoints.remove(&server.id())));
    (node, server, endpoint)
}

/// Nobody inherits the flows of a released address (policy decision 21).
#[test]
fn connections_of_a_released_address_are_removed_later() {
    let (node, ..) = with_a_connection_that_is_over();
    let deadline = Instant::now() + Duration::from_secs(10);
    while entries(&node) > 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_reused_address_inherits_no_connection() {
    let (mut node, server, mut endpoint) = with_a_connection_that_is_over();
    Arc::make_mut(&mut endpoint).container_id = "another".into();
    node.change(|state| drop(state.endpoints.insert(server.id(), endpoint)));
    assert_eq!(entries(&node), 0, "though they would be forgotten only later");
}

/// A killed agent may not have removed all connections. A network of flannel is a block with more addresses than anybody can list.
#[test]
fn a_starting_agent_removes_connections_of_unused_addresses() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    for block in ["10.65.1.0/26", "fd00:65:1::/64"] {
        node.change(|state| drop(state.routes.insert(block.parse().unwrap(), RouteTarget::Local)));
    }
    node.add(&client, open());
    node.add(&server, open());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    node.restart();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(entries(&node), 1, "theirs who are there stay");
    // Another node has borrowed the address for a pod, and then for its tunnel.
    node.state.endpoints.remove(&server.id());
    let borrowed = IpNet::from(IpAddr::from(server.address));
    node.state.routes.insert(borrowed, RouteTarget::Direct { router: Ipv4Addr::new(192, 0, 2, 99).into() });
    // The node has no address, which is a condition.
    node.restart_with_report();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(entries(&node), 1, "it is in use");
    node.state.routes.remove(&borrowed);
    let vtep = Vtep {
        node: "node-9".to_owned(),
        address: server.address.into(),
        mac: MacAddress([0x66, 0, 0, 0, 0, 9]),
        parent: Ipv4Addr::new(192, 0, 2, 99).into(),
        mtu: None,
    };
    node.state.vteps.insert(vtep.key(), vtep.clone());
    node.restart_with_report();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(entries(&node), 1, "it is in use");
    node.state.vteps.remove(&vtep.key());
    node.restart();
    let deadline = Instant::now() + Duration::from_secs(10);
    while entries(&node) > 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A setting decides what happens to established flows that policy denies (policy decision 20).
#[test]
fn established_flows_are_kept_or_cut() {
    for (setting, goes_on) in [(EstablishedFlows::Keep, true), (EstablishedFlows::Cut, false)] {
        let mut node = Node::new(&Underlay::new(), 1);
        let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
        let other = Pod::new("other", 1, 4);
        server.serve(80);
        node.change(|state| {
            open_profile(state);
            Arc::make_mut(&mut state.settings).established_flows = setting;
            let members = [&client, &other].map(|pod| Member::Net(IpAddr::from(pod.address).into()));
            state.sets.insert(SetId::new("s:clients"), (SetKind::Nets, members.into()));
            let source = EntityMatch { sets: vec![SetId::new("s:clients")], ..EntityMatch::default() };
            let ingress = vec![Rule { source, ..Rule::all(Action::Allow) }];
            state.policies.insert(policy_id("clients"), Arc::new(PolicyRules { ingress, egress: vec![] }));
            let closed = PolicyRules { ingress: vec![], egress: vec![Rule::all(Action::Deny)] };
            state.policies.insert(policy_id("closed"), Arc::new(closed));
        });
        node.add(&client, open());
        node.add(&other, open());
        node.add(&server, ingress(&["clients"], EndOfTier::Deny));
        let flow = |pod: &Pod| {
            let stream = pod.connect(server.address, 80).unwrap();
            assert!(answers(&stream));
            stream
        };
        // It is cut within a while: many requests, of which the last counts.
        let goes_on_from = |stream: &std::net::TcpStream| {
            let (patience, long) = if goes_on { (2, TIMEOUT) } else { (15, Duration::from_secs(2)) };
            stream.set_read_timeout(Some(long)).unwrap();
            let deadline = Instant::now() + Duration::from_secs(patience);
            while answers(stream) {
                if Instant::now() >= deadline {
                    return true;
                }
            }
            false
        };
        let (one, two) = (flow(&client), flow(&other));
        let from_node = node.namespace.run(|| connect(server.address, 80).unwrap()).unwrap();

        // A set loses a member.
        let member = Member::Net(IpAddr::from(client.address).into());
        node.change(|state| {
            assert!(state.sets.get_mut(&SetId::new("s:clients")).unwrap().1.make_mut().remove(&member));
        });
        assert_eq!(goes_on_from(&one), goes_on, "{setting:?}, not allowed in any more");
        assert!(answers(&two), "{setting:?}, allowed");
        assert!(answers(&from_node), "{setting:?}, a node always reaches its pods");
        assert!(client.is_cut_off(server.address, 80));

        let tier =
            TierProgram { name: "default".into(), policies: vec![policy_id("closed")], end: EndOfTier::Deny };
        node.program(&other, EndpointProgram { egress: vec![tier], ..open() });
        assert_eq!(goes_on_from(&two), goes_on, "{setting:?}, not allowed out any more");
        assert!(answers(&from_node));
    }
}

/// The server may begin flows with the client. The flow that is cut is the client's, and the server must not restart
/// it from its middle.
#[test]
fn a_cut_flow_does_not_continue() {
    use std::io::{Read, Write};
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    node.change(|state| {
        open_profile(state);
        Arc::make_mut(&mut state.settings).established_flows = EstablishedFlows::Cut;
        state.policies.insert(policy_id("closed"), Arc::new(PolicyRules::default()));
    });
    node.add(&client, open());
    node.add(&server, open());
    let listen = || std::net::TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, 80)).unwrap();
    let listener = server.namespace.run(listen).unwrap();
    let mut at_client = client.connect(server.address, 80).unwrap();
    let (mut at_server, _) = listener.accept().unwrap();
    at_client.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    // Whether anything arrives, even from earlier.
    let mut arrives = || {
        at_server.write_all(b"meow").unwrap();
        at_client.read_exact(&mut [0; 4]).is_ok()
    };
    assert!(arrives());
    node.program(&server, ingress(&["closed"], EndOfTier::Deny));
    // A flow that restarts does so permanently; a cut flow is silent after what was in flight has been read.
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut silent = 0;
    while silent < 2 {
        assert!(Instant::now() < deadline, "the server goes on with the client's flow");
        silent = if arrives() { 0 } else { silent + 1 };
        std::thread::sleep(Duration::from_millis(10)); // not faster than the flow can be cut
    }
}

/// A pod that sends from many ports may fill the table for all.
#[test]
fn a_pod_that_nearly_fills_connection_tracking_is_named() {
    let config = Config { most_connections: Some(100), ..Config::default() };
    let mut node = Node::with(&Underlay::new(), 1, config);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    // Each port is used once: a port that the kernel chooses twice would be one connection, not two.
    let send = |ports: std::ops::Range<u16>| {
        let from = ports.map(|port| UdpSocket::bind(("0.0.0.0", port)).unwrap());
        from.for_each(|socket| assert_eq!(socket.send_to(b"x", (server.address, 9)).unwrap(), 1));
    };
    client.namespace.run(|| send(40_000..40_079)).unwrap();
    assert_eq!(node.resync(), Report::default());
    client.namespace.run(|| send(40_079..40_080)).unwrap();
    let report = node.resync();
    let [condition] = report.node.as_slice() else { panic!("{report:?}") };
    assert_eq!(condition.reason, Reason::ConnectionsNearLimit);
    let share = format!("{}/{} has begun 80", client.id().namespace, client.id().pod);
    assert!(condition.message.contains(&share), "{condition}");
    assert_eq!(condition.about, [(&client.id()).into()]);
    assert!(!report.retry, "policy is in force");

    node.namespace.run(|| Conntrack::open().unwrap().flush().unwrap()).unwrap();
    assert_eq!(node.resync(), Report::default());
}

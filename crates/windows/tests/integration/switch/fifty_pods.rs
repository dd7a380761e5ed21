//! Fifty pods with open connections, while the agent, HNS and the node start again. Nobody else gets in meanwhile.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crate::switch::switched::*;
use testkit::Stateful;
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::{Delta, LocalNode, NodeState, Reason, Report, Route};
use tortie_hcn::HcnExt;
use tortie_hcn::schema::DrMacAddress;
use tortie_hns_emulator::{Config, OnRewrite, Survives};
use tortie_kernel::namespace::NetNs;
use tortie_policy::program::{EndOfTier, EndpointProgram, PolicyRules, Rule, TierProgram};
use tortie_windows::{NETWORK, WindowsDataplane};

/// The last parts of the pods' addresses.
const PODS: std::ops::Range<u8> = 4..54;
const SERVER: u8 = 4;
const NOBODY: [Ipv4Addr; 0] = [];
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a stranger tries.
const REFUSED: Duration = Duration::from_millis(300);

/// A node with the pods, which may connect to port 80 and take no connections, and a node with their server.
fn nodes(on_rewrite: OnRewrite) -> [Node; 2] {
    let [first, second] = underlay();
    let node = |number, namespace| Node::with(number, namespace, |config| Config { on_rewrite, ..config });
    let (mut clients, mut server) = (node(1, first), node(2, second));
    clients.start(&server.vtep, 2);
    server.start(&clients.vtep, 1);
    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.destination.ports = vec![PortRange::single(80)];
    let rules = PolicyRules { ingress: vec![], egress: vec![rule] };
    clients.apply(&[Delta::Policy(policy_id("client"), Arc::new(rules))]);
    PODS.for_each(|last| add_client(&mut clients, last));
    server.add_pod(SERVER);
    [clients, server]
}

fn add_client(node: &mut Node, last: u8) {
    node.add_pod(last);
    let tier =
        || TierProgram { name: "default".into(), policies: vec![policy_id("client")], end: EndOfTier::Deny };
    node.set_program(last, EndpointProgram { ingress: vec![tier()], egress: vec![tier()], profiles: vec![] });
}

/// An open connection of each pod.
fn connect(clients: &Node, server: &Node) -> Vec<[TcpStream; 2]> {
    let (namespace, address) = &server.pods[0];
    let listener = namespace.run(|| TcpListener::bind((*address, 80)).unwrap()).unwrap();
    let connect = |client: &(NetNs, Ipv4Addr)| {
        let to = SocketAddr::from((*address, 80));
        let near = client.0.run(|| TcpStream::connect_timeout(&to, PATIENCE)).unwrap().unwrap();
        let (far, source) = listener.accept().unwrap();
        assert_eq!(source.ip(), client.1);
        [near, far].map(|end| {
            end.set_read_timeout(Some(PATIENCE)).unwrap();
            end
        })
    };
    clients.pods.iter().map(connect).collect()
}

/// The connections that do not carry data both ways.
fn broken(connections: &mut [[TcpStream; 2]]) -> usize {
    let speaks = |[near, far]: &mut [TcpStream; 2]| -> std::io::Result<()> {
        let mut buffer = [0; 12];
        near.write_all(b"still there?")?;
        far.read_exact(&mut buffer)?;
        far.write_all(&buffer)?;
        near.read_exact(&mut buffer)
    };
    connections.iter_mut().filter_map(|connection| speaks(connection).err()).count()
}

/// The pods of the node that a stranger reaches.
fn open_pods(clients: &Node, server: &Node) -> Vec<Ipv4Addr> {
    let is_open = |pod: &&(NetNs, Ipv4Addr)| {
        let _listener = pod.0.run(|| TcpListener::bind((pod.1, 8080)).unwrap()).unwrap();
        let to = SocketAddr::from((pod.1, 8080));
        server.pods[0].0.run(|| TcpStream::connect_timeout(&to, REFUSED)).unwrap().is_ok()
    };
    clients.pods.iter().step_by(7).filter(is_open).map(|pod| pod.1).collect()
}

/// What calc tells a new agent.
fn all(state: &NodeState) -> Vec<Delta> {
    let node = state.node.iter().cloned().map(Delta::Node);
    let vteps = state.vteps.values().cloned().map(Delta::Vtep);
    let routes = state.routes.iter().map(|(destination, target)| {
        Delta::Route(Route { destination: *destination, target: target.clone() })
    });
    let policies = state.policies.iter().map(|(id, rules)| Delta::Policy(id.clone(), rules.clone()));
    let endpoints =
        state.endpoints.iter().map(|(id, endpoint)| Delta::Endpoint(id.clone(), endpoint.clone()));
    node.chain(vteps).chain(routes).chain(policies).chain(endpoints).collect()
}

/// Another process with the same state.
fn restart_agent(node: &mut Node) -> Report {
    let deltas = all(&node.dataplane.state);
    node.dataplane = Stateful::new(WindowsDataplane::new(node.hns.clone()));
    node.dataplane.apply(&deltas)
}

#[test]
fn connections_survive_an_upgrade_of_the_agent_and_restarts_of_hns() {
    for on_rewrite in [OnRewrite::Keep, OnRewrite::ResetOnAnyChange] {
        let [mut clients, server] = nodes(on_rewrite);
        let mut connections = connect(&clients, &server);
        let check = |clients: &Node, connections: &mut Vec<[TcpStream; 2]>, after: &str| {
            assert_eq!(broken(connections), 0, "connections after {after}, {on_rewrite:?}");
            assert_eq!(open_pods(clients, &server), NOBODY, "after {after}");
        };
        check(&clients, &mut connections, "the start");
        assert_eq!(restart_agent(&mut clients), Report::default());
        check(&clients, &mut connections, "an upgrade of the agent");
        clients.hns.restart(Survives::Everything).unwrap();
        assert_eq!(clients.dataplane.resync(), Report::default());
        check(&clients, &mut connections, "a restart of HNS that keeps everything");
        clients.hns.restart(Survives::AllButAcls).unwrap();
        assert_eq!(clients.dataplane.resync(), Report::default());
        match on_rewrite {
            OnRewrite::Keep => check(&clients, &mut connections, "a restart of HNS that loses ACLs"),
            // HNS resets them. Later ones work.
            _ => {
                assert_eq!(broken(&mut connections), PODS.len());
                connections = connect(&clients, &server);
                check(&clients, &mut connections, "a restart of HNS that loses ACLs and resets connections");
            }
        }
        // Both at once.
        clients.hns.restart(Survives::AllButAclsAndSets).unwrap();
        assert_eq!(restart_agent(&mut clients), Report::default());
        assert_eq!(open_pods(&clients, &server), NOBODY);
    }
}

/// The networks do not persist, and the runtime makes new sandboxes.
#[test]
fn after_a_reboot_the_pods_come_back_closed() {
    let [mut clients, mut server] = nodes(OnRewrite::Keep);
    let connections = connect(&clients, &server);
    drop(connections);
    clients.hns.restart(Survives::Nothing).unwrap();
    clients.pods.clear();
    let report = restart_agent(&mut clients);
    let missing: Vec<Reason> =
        report.endpoints.values().flatten().map(|condition| condition.reason).collect();
    assert_eq!(missing.len(), PODS.len(), "each pod without sandbox is reported: {report:?}");
    // The other nodes learn the new MAC address of the tunnel by the Node's annotation.
    let remade = report.node.iter().find(|condition| condition.reason == Reason::OverlayRemade);
    assert!(remade.is_some(), "{report:?}");
    let network = clients.hns.network_by_name(NETWORK).unwrap().unwrap();
    let mac = network.policies.iter().find_map(|policy| policy.settings::<DrMacAddress>().unwrap()).unwrap();
    clients.vtep.mac = mac.address.parse().unwrap();
    let node = LocalNode::ipv4(&name(1), clients.parent(), Some(clients.vtep.clone()));
    clients.dataplane.apply(&[Delta::Node(node)]);
    server.apply(&[Delta::Vtep(clients.vtep.clone())]);
    let gone: Vec<Delta> = PODS.map(|last| Delta::EndpointRemoved(pod_id(last))).collect();
    clients.dataplane.apply(&gone);
    PODS.for_each(|last| add_client(&mut clients, last));
    let mut connections = connect(&clients, &server);
    assert_eq!(broken(&mut connections), 0);
    assert_eq!(open_pods(&clients, &server), NOBODY);
}

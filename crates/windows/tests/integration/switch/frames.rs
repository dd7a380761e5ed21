//! Two emulated Windows nodes with real interfaces: pods communicate over VXLAN until policy denies it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use crate::switch::switched::*;
use ipnet::Ipv4Net;
use testkit::mixed::{Balanced, Proxy};
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::{Delta, Route, RouteTarget};
use tortie_hcn::HcnExt;
use tortie_hns_emulator::{Config, EgressSees, OnRewrite};
use tortie_kernel::namespace::NetNs;
use tortie_policy::program::{
    EndOfTier, EndpointProgram, Member, PolicyRules, Rule, SetId, SetKind, TierProgram,
};
use tortie_windows::NETWORK;

#[test]
fn pods_connect_until_policy_admits_only_one() {
    let [first, second] = underlay();
    let (mut client, mut server) = (Node::new(1, first), Node::new(2, second));
    client.start(&server.vtep, 2);
    server.start(&client.vtep, 1);
    client.add_pod(4);
    client.add_pod(5);
    server.add_pod(4);
    server.add_pod(5);
    let who = |client: &Node, server: &Node| {
        let web = &server.pods[0];
        let from =
            [&client.pods[0].0, &client.pods[1].0, &server.pods[1].0, &client.namespace, &server.namespace];
        from.map(|from| talk(from, web).is_some())
    };
    assert_eq!(who(&client, &server), [true; 5]);
    assert!(talk(&server.pods[0].0, &client.pods[0]).is_some(), "the other way");

    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.source.sets = vec![SetId::new("s:linux-client")];
    rule.destination.ports = vec![PortRange::single(80)];
    let member = |node: u8, last: u8| Member::Net(Ipv4Net::from(Ipv4Addr::new(10, 244, node, last)).into());
    let rules = Arc::new(PolicyRules { ingress: vec![rule], egress: vec![] });
    server.apply(&[
        Delta::SetCreated(SetId::new("s:linux-client"), SetKind::Nets, [member(1, 4)].into()),
        Delta::Policy(policy_id("web"), rules),
    ]);
    let tier = TierProgram { name: "default".into(), policies: vec![policy_id("web")], end: EndOfTier::Deny };
    let profiles = vec![policy_id("open")];
    server.set_program(4, EndpointProgram { ingress: vec![tier], egress: vec![], profiles });
    // The allowed client, and the server's own node; not the other pods, and not the other node.
    assert_eq!(who(&client, &server), [true, false, false, false, true]);
    let (added, removed) = (vec![member(1, 5)], vec![member(1, 4)]);
    server.apply(&[Delta::SetChanged { id: SetId::new("s:linux-client"), added, removed }]);
    assert_eq!(who(&client, &server), [false, true, false, false, true]);
}

/// A block is full, and the node has claimed another one for the next pod.
#[test]
fn pods_of_several_blocks_connect() {
    let [first, second] = underlay();
    let (mut one, mut two) = (Node::new(1, first), Node::new(2, second));
    one.start(&two.vtep, 2);
    two.start(&one.vtep, 1);
    let more: Ipv4Net = "10.245.7.0/26".parse().unwrap();
    one.add_pod(4);
    two.add_pod(4);
    // CNI connects the pod before the dataplane knows the block.
    one.add_pod_of(more, 5);
    one.apply(&[Delta::Route(Route { destination: more.into(), target: RouteTarget::Local })]);
    two.apply(&[Delta::Route(Route {
        destination: more.into(),
        target: RouteTarget::Vxlan { node: name(1) },
    })]);
    one.add_pod_of(more, 6);
    let [old, new, newest] = &one.pods[..] else { panic!("three pods") };
    assert!(new.1.octets()[..3] == [10, 245, 7]);
    for (from, to) in [
        (&old.0, new),
        (&new.0, old),
        (&new.0, newest),
        (&two.pods[0].0, new),
        (&new.0, &two.pods[0]),
        (&one.namespace, new),
        (&two.namespace, new),
    ] {
        assert!(talk(from, to).is_some(), "to {}", to.1);
    }
}

const VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// A pod's namespace and address.
type Pod = (NetNs, Ipv4Addr);

const TIMEOUT: Duration = Duration::from_secs(10);

/// Two nodes with this HNS configuration, each with two pods. Packets of the first node to [`VIP`], ports 81 to 84,
/// go to port 80 of one backend: the first pod of the other node, or the second of its own; with the client's own
/// address, or with another one.
fn balanced(change: impl Fn(Config) -> Config) -> ([Node; 2], Proxy) {
    let [first, second] = underlay();
    let (mut client, mut server) = (Node::with(1, first, &change), Node::with(2, second, &change));
    client.start(&server.vtep, 2);
    server.start(&client.vtep, 1);
    for last in [4, 5] {
        client.add_pod(last);
        server.add_pod(last);
    }
    let mut proxy = Proxy::default();
    balance(&client, &server, &mut proxy);
    ([client, server], proxy)
}

fn balance(client: &Node, server: &Node, proxy: &mut Proxy) {
    let own = Ipv4Addr::new(10, 244, 1, 60);
    let sources = [None, Some(own)].into_iter();
    let pairs = sources.flat_map(|source| backends(client, server).map(|pod| (pod.1, source)));
    let service = |(port, (backend, source))| {
        [Protocol::TCP, Protocol::UDP].map(|protocol| Balanced {
            vip: VIP,
            protocol,
            port,
            backends: vec![backend],
            target: 80,
            source,
        })
    };
    let services: Vec<Balanced> = (81..).zip(pairs).flat_map(service).collect();
    let network = client.hns.network_by_name(NETWORK).unwrap().unwrap().id;
    let providers = BTreeMap::from([(server.pods[0].1, server.parent())]);
    proxy.balance(&*client.hns, network, &services, &providers).unwrap();
}

fn backends<'a>(client: &'a Node, server: &'a Node) -> [&'a Pod; 2] {
    [&server.pods[0], &client.pods[1]]
}

/// A program that allows nothing out.
fn closed() -> EndpointProgram {
    let tier = TierProgram { name: "default".into(), policies: vec![], end: EndOfTier::Deny };
    EndpointProgram { egress: vec![tier], profiles: vec![policy_id("open")], ..EndpointProgram::default() }
}

#[test]
fn pods_connect_to_services() {
    for egress_sees in [EgressSees::Backend, EgressSees::Vip] {
        let ([mut client, server], _proxy) = balanced(|config| Config { egress_sees, ..config });
        let all = |client: &Node, step: usize, talks: &dyn Fn(&Pod, SocketAddr) -> bool| {
            let pairs = (81..85).zip(backends(client, &server).into_iter().cycle()).step_by(step);
            pairs.map(|(port, backend)| talks(backend, (VIP, port).into())).collect::<Vec<_>>()
        };
        let asks = |client: &Node| all(client, 1, &|pod, at| ask(client, pod, at) == Some(at.port() as u8));
        assert_eq!(asks(&client), [true; 4], "{egress_sees:?}");
        let talks =
            |client: &Node, step| all(client, step, &|pod, at| talk_by(&client.pods[0].0, pod, at).is_some());
        assert_eq!(talks(&client, 1), [true; 4], "{egress_sees:?}");
        client.set_program(4, closed());
        // Only waiting shows that nothing arrives, so two cases represent all.
        assert_eq!(talks(&client, 3), [false; 2], "{egress_sees:?}");
    }
}

/// A datagram to that address, and the answer, which the socket accepts only from there.
fn ask(client: &Node, backend: &(NetNs, Ipv4Addr), address: SocketAddr) -> Option<u8> {
    let socket = |namespace: &NetNs, at: (Ipv4Addr, u16)| {
        let socket = namespace.run(|| UdpSocket::bind(at).unwrap()).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket
    };
    let (client, server) =
        (socket(&client.pods[0].0, (client.pods[0].1, 0)), socket(&backend.0, (backend.1, 80)));
    client.connect(address).unwrap();
    client.send(&[address.port() as u8]).unwrap();
    let mut byte = [0];
    let (_, sender) = server.recv_from(&mut byte).ok()?;
    server.send_to(&byte, sender).unwrap();
    client.recv(&mut [0]).ok().map(|_| byte[0])
}

/// As with connections without a Service: established connections continue or are reset, as configured, and both ends
/// get resets from the address that they talk to. Without the load balancer they end silently.
#[test]
fn connections_to_services_continue_like_others() {
    for egress_sees in [EgressSees::Backend, EgressSees::Vip] {
        for on_rewrite in [OnRewrite::Keep, OnRewrite::ResetOnAnyChange] {
            let ([mut client, server], mut proxy) =
                balanced(|config| Config { egress_sees, on_rewrite, ..config });
            let mut all: Vec<_> = (81..85)
                .zip(backends(&client, &server).into_iter().cycle())
                .map(|(port, backend)| connect(&client, backend, (VIP, port).into()))
                .collect();
            client.set_program(4, closed());
            let case = format!("{egress_sees:?}, {on_rewrite:?}");
            for (near, far) in &mut all {
                if on_rewrite == OnRewrite::Keep {
                    assert!(says(near, far) && says(far, near), "{case}");
                } else {
                    let reset = |end: &mut TcpStream| end.read(&mut [0]).unwrap_err().kind();
                    assert_eq!([reset(near), reset(far)], [ErrorKind::ConnectionReset; 2], "{case}");
                }
            }
            if on_rewrite == OnRewrite::Keep {
                balance(&client, &server, &mut proxy);
                for (near, far) in &mut all {
                    near.write_all(b"x").unwrap();
                    far.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
                    assert_eq!(far.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "{case}");
                }
            }
        }
    }
}

fn connect(client: &Node, backend: &(NetNs, Ipv4Addr), address: SocketAddr) -> (TcpStream, TcpStream) {
    let listener = backend.0.run(|| TcpListener::bind((backend.1, 80)).unwrap()).unwrap();
    let near = client.pods[0].0.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_read_timeout(Some(TIMEOUT)).unwrap();
    far.set_read_timeout(Some(TIMEOUT)).unwrap();
    (near, far)
}

fn says(from: &mut TcpStream, to: &mut TcpStream) -> bool {
    from.write_all(b"x").unwrap();
    to.read(&mut [0]).is_ok_and(|count| count == 1)
}

//! The effect of policy changes on connections, by real frames, on an HNS that resets the connections of an endpoint
//! whose ACLs are written, as users report (docs/hns.md, ACLs), and on one that does not.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::switch::switched::*;
use ipnet::Ipv4Net;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::{Delta, Settings};
use tortie_hcn::HcnExt;
use tortie_hns_emulator::{Config, OnRewrite};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, Member, PolicyRules, Rule, SetId, SetKind, TierProgram,
};
use tortie_windows::endpoint_id;

const CHANGES: u8 = 100;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Two nodes: a client on the first, a server on the second, and on each node another pod whose policies change.
fn nodes(on_rewrite: OnRewrite, sets: WindowsPolicySets) -> [Node; 2] {
    let [first, second] = underlay();
    let node = |number, namespace| Node::with(number, namespace, |config| Config { on_rewrite, ..config });
    let (mut client, mut server) = (node(1, first), node(2, second));
    client.start(&server.vtep, 2);
    server.start(&client.vtep, 1);
    for node in [&mut client, &mut server] {
        let settings = Settings { windows_policy_sets: sets, ..Settings::default() };
        node.apply(&[
            Delta::Settings(Arc::new(settings)),
            Delta::SetCreated(SetId::new("s:clients"), SetKind::Nets, [member(1, 4), member(1, 7)].into()),
            Delta::SetCreated(SetId::new("s:others"), SetKind::Nets, [member(1, 4)].into()),
            Delta::Policy(policy_id("web"), from("s:clients", 80)),
            Delta::Policy(policy_id("other"), from("s:others", 80)),
        ]);
        node.add_pod(4);
        node.add_pod(5);
        node.set_program(5, one_policy("other"));
    }
    server.set_program(4, one_policy("web"));
    [client, server]
}

fn member(node: u8, last: u8) -> Member {
    Member::Net(Ipv4Net::from(Ipv4Addr::new(10, 244, node, last)).into())
}

fn from(set: &str, port: u16) -> Arc<PolicyRules> {
    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.source.sets = vec![SetId::new(set)];
    rule.destination.ports = vec![PortRange::single(port)];
    Arc::new(PolicyRules { ingress: vec![rule], egress: vec![] })
}

fn one_policy(name: &str) -> EndpointProgram {
    let tier = TierProgram { name: "default".into(), policies: vec![policy_id(name)], end: EndOfTier::Deny };
    EndpointProgram { ingress: vec![tier], egress: vec![], profiles: vec![policy_id("open")] }
}

/// An idle connection and a download between the first pods of the nodes.
struct Connections {
    idle: [TcpStream; 2],
    heard: Arc<AtomicUsize>,
    enough: Arc<AtomicBool>,
    download: [JoinHandle<Result<(), ErrorKind>>; 2],
}

impl Connections {
    fn open(client: &Node, server: &Node) -> Connections {
        let (from, (to, address)) = (&client.pods[0].0, &server.pods[0]);
        let listener = to.run(|| TcpListener::bind((*address, 80)).unwrap()).unwrap();
        let connect = || {
            let address = SocketAddr::from((*address, 80));
            let client = from.run(|| TcpStream::connect_timeout(&address, TIMEOUT)).unwrap().unwrap();
            let (server, _) = listener.accept().unwrap();
            [client, server].map(|end| {
                end.set_read_timeout(Some(TIMEOUT)).unwrap();
                end
            })
        };
        let idle = connect();
        let [mut reader, mut writer] = connect();
        let (heard, enough) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let until = enough.clone();
        let send = std::thread::spawn(move || {
            writer.write_all(b"HTTP/1.0 200 OK\r\n\r\n").map_err(|error| error.kind())?;
            while !until.load(Ordering::Relaxed) {
                writer.write_all(&[7; 1000]).map_err(|error| error.kind())?;
            }
            Ok(())
        });
        let count = heard.clone();
        let receive = std::thread::spawn(move || {
            let mut buffer = [0; 10_000];
            loop {
                match reader.read(&mut buffer).map_err(|error| error.kind())? {
                    0 => return Ok(()),
                    length => drop(count.fetch_add(length, Ordering::Relaxed)),
                }
            }
        });
        Connections { idle, heard, enough, download: [send, receive] }
    }

    /// Waits until more of the download has arrived, or it has ended.
    fn wait_for_more(&self) {
        let (before, deadline) = (self.heard.load(Ordering::Relaxed), Instant::now() + TIMEOUT);
        while self.heard.load(Ordering::Relaxed) <= before && !self.download[1].is_finished() {
            assert!(Instant::now() < deadline, "the download stands still");
            std::thread::yield_now();
        }
    }

    /// Ends both; returns whether they continued to the end.
    fn end(self) -> [Result<(), ErrorKind>; 2] {
        self.enough.store(true, Ordering::Relaxed);
        let [mut client, mut server] = self.idle;
        let mut speak = || {
            client.write_all(b"still there?")?;
            let mut buffer = [0; 12];
            server.read_exact(&mut buffer)?;
            server.write_all(&buffer)?;
            client.read_exact(&mut buffer)
        };
        let idle = speak().map_err(|error: std::io::Error| error.kind());
        let [sent, received] = self.download.map(|thread| thread.join().unwrap());
        [idle, sent.and(received)]
    }
}

/// The ACLs of the first pod.
fn acls(node: &Node) -> Vec<tortie_hcn::schema::Policy> {
    node.hns.endpoint(endpoint_id("container-4")).unwrap().policies
}

#[test]
fn unrelated_changes_keep_connections() {
    let [mut client, mut server] = nodes(OnRewrite::ResetOnAnyChange, WindowsPolicySets::Enabled);
    let connections = Connections::open(&client, &server);
    let before = [acls(&client), acls(&server)];
    for number in 0..CHANGES {
        let (set, gone) = (SetId::new("s:clients"), number.checked_sub(1).map(|last| member(3, last)));
        let came = member(3, number);
        for node in [&mut client, &mut server] {
            node.apply(&match number % 3 {
                // One client of the server is added and another one removed: members of a set.
                0 => vec![Delta::SetChanged {
                    id: set.clone(),
                    added: vec![came],
                    removed: gone.into_iter().collect(),
                }],
                // The other pod's policy gets another port, and its set another member.
                1 => vec![Delta::Policy(policy_id("other"), from("s:others", 1000 + u16::from(number)))],
                _ => {
                    vec![Delta::SetChanged { id: SetId::new("s:others"), added: vec![came], removed: vec![] }]
                }
            });
        }
        connections.wait_for_more();
    }
    assert_eq!([acls(&client), acls(&server)], before);
    assert_eq!(connections.end(), [Ok(()), Ok(())]);
}

/// If its own list changes, the result depends on HNS: an additional ACL is an Add, a removed ACL a Remove.
#[test]
fn changes_of_an_endpoint_affect_connections_as_hns_does() {
    let more = |number: u16| {
        let PolicyRules { ingress, .. } = &*from("s:clients", 80);
        let [also] = &from("s:clients", number).ingress[..] else { unreachable!() };
        Arc::new(PolicyRules { ingress: [&ingress[..], std::slice::from_ref(also)].concat(), egress: vec![] })
    };
    let (add, remove) = (more(81), from("s:clients", 80));
    let cases = [
        (OnRewrite::Keep, [true, true]),
        (OnRewrite::ResetOnRemoveOrUpdate, [true, false]),
        (OnRewrite::ResetOnAnyChange, [false, false]),
    ];
    for (on_rewrite, expected) in cases {
        let [client, mut server] = nodes(on_rewrite, WindowsPolicySets::Disabled);
        for (rules, goes_on) in [&add, &remove].into_iter().zip(expected) {
            let connections = Connections::open(&client, &server);
            connections.wait_for_more();
            server.apply(&[Delta::Policy(policy_id("web"), rules.clone())]);
            let ended = connections.end();
            let reset = Err(ErrorKind::ConnectionReset);
            let as_expected = |end: &Result<(), ErrorKind>| if goes_on { end.is_ok() } else { end.is_err() };
            assert!(ended.iter().all(as_expected), "{on_rewrite:?} {goes_on}: {ended:?}");
            assert!(goes_on || ended[0] == reset, "{on_rewrite:?}: {ended:?}");
        }
    }
}

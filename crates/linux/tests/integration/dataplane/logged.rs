//! The messages of Log rules to an nflog listener (`linux/netfilter/nfnetlink_log.h`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::cluster::*;
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_kernel::netlink::attribute::{Attributes, put, put_u32_be};
use tortie_kernel::netlink::{Family, Reply, Request, Socket};
use tortie_policy::program::*;

/// Calico's groups (`felix/rules`), so that existing listeners work.
const INGRESS: u16 = 1;
const EGRESS: u16 = 2;

const SUBSYSTEM: u16 = 4; // NFNL_SUBSYS_ULOG
const PACKET: u16 = SUBSYSTEM << 8; // NFULNL_MSG_PACKET
const CONFIG: u16 = SUBSYSTEM << 8 | 1; // NFULNL_MSG_CONFIG
/// The length of the nfnetlink header: family, version, and the group in network byte order.
const HEADER: usize = 4;

/// A logged packet.
#[derive(Debug, PartialEq, Eq)]
struct Logged {
    group: u16,
    prefix: String,
    /// Its destination port.
    port: u16,
}

/// Listens to both groups, in the network namespace of the calling thread.
fn listen() -> Socket {
    let mut socket = Socket::open(Family::Netfilter).unwrap();
    for group in [INGRESS, EGRESS] {
        let mut payload = [&[0, 0][..], &group.to_be_bytes()].concat();
        put(&mut payload, 1, &[1]); // NFULA_CFG_CMD: NFULNL_CFG_CMD_BIND
        put(&mut payload, 2, &[0, 0, 0xff, 0xff, 2, 0]); // NFULA_CFG_MODE: 64 kB of each packet, NFULNL_COPY_PACKET
        put_u32_be(&mut payload, 5, 1); // NFULA_CFG_QTHRESH: each packet by itself
        socket.request(&Request { kind: CONFIG, flags: 0, payload }).unwrap();
    }
    socket
}

fn logged(reply: &Reply) -> Logged {
    assert_eq!(reply.kind, PACKET);
    let attributes = Attributes(&reply.payload[HEADER..]);
    let packet = attributes.get(9).unwrap(); // NFULA_PAYLOAD: an IPv4 packet without options
    Logged {
        group: u16::from_be_bytes([reply.payload[2], reply.payload[3]]),
        prefix: attributes.text(10).unwrap(), // NFULA_PREFIX
        port: u16::from_be_bytes([packet[22], packet[23]]),
    }
}

/// The next packets, of this number.
fn next(socket: &mut Socket, count: usize) -> Vec<Logged> {
    let deadline = Instant::now() + TIMEOUT;
    let mut packets = Vec::new();
    while packets.len() < count && Instant::now() < deadline {
        let replies = socket.next_notifications(Duration::from_millis(100)).unwrap();
        packets.extend(replies.iter().map(logged));
    }
    packets
}

#[test]
fn log_rules_send_packets_to_the_group_of_their_direction() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    [80, 81].into_iter().for_each(|port| server.serve(port));
    // One port is logged. Evaluation continues after a Log.
    let ports = EntityMatch { ports: vec![PortRange::single(80)], ..EntityMatch::default() };
    let log = Rule { protocol: Some(Protocol::TCP), destination: ports, ..Rule::all(Action::Log) };
    let rules = vec![log, Rule::all(Action::Allow)];
    let rules = Arc::new(PolicyRules { ingress: rules.clone(), egress: rules });
    // As long as Kubernetes allows, and longer than the kernel's prefix.
    let names = ["web".to_owned(), "n".repeat(253)];
    node.change(|state| {
        open_profile(state);
        names.iter().for_each(|name| drop(state.policies.insert(policy_id(name), rules.clone())));
    });
    node.add(&client, open());
    node.add(&server, open());
    let mut listener = node.namespace.run(listen).unwrap();
    for name in &names {
        let tier =
            TierProgram { name: "default".into(), policies: vec![policy_id(name)], end: EndOfTier::Deny };
        node.program(&client, EndpointProgram { egress: vec![tier.clone()], ..open() });
        node.program(&server, EndpointProgram { ingress: vec![tier], ..open() });
        for port in [81, 80] {
            assert!(client.reaches(&server, port));
        }
        let prefix: String = format!("NetworkPolicy demo/{name}").chars().take(127).collect();
        let logged = |group| Logged { group, prefix: prefix.clone(), port: 80 };
        assert_eq!(next(&mut listener, 2), [EGRESS, INGRESS].map(logged), "what begins the flow, once");
    }
}

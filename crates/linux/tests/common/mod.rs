//! What several tests share: nodes made of namespaces, packets, changes of a node state.
#![allow(dead_code)] // each test uses a part

pub mod cluster;
pub mod filtering;

use std::net::IpAddr;
use std::os::fd::AsFd;

use tortie_dataplane::{Delta, NodeState, Route};
use tortie_linux::namespace::NetNs;
use tortie_linux::route::*;
use tortie_policy::program::Flow;

/// A link from one namespace to another; gives the indices of both ends, which are up.
pub fn cable(from: &NetNs, from_name: &str, to: &NetNs, to_name: &str) -> (u32, u32) {
    let near = from.run(|| {
        let peer = Peer { name: to_name, mac: None, mtu: None, namespace: Some(to.as_fd()) };
        let mut socket = RouteSocket::open().unwrap();
        socket.create(&NewLink { up: true, ..NewLink::new(from_name, NewLinkKind::Veth(peer)) }).unwrap();
        tortie_linux::interface_index(from_name).unwrap()
    });
    let far = to.run(|| {
        let index = tortie_linux::interface_index(to_name).unwrap();
        let up = Change::SetLink(index, vec![LinkSetting::Up(true)]);
        RouteSocket::open().unwrap().change(&up).unwrap();
        index
    });
    (near.unwrap(), far.unwrap())
}

/// The deltas that lead from one state to another, in the order that `calc` gives them in.
pub fn deltas(old: &NodeState, new: &NodeState) -> Vec<Delta> {
    let mut deltas = Vec::new();
    if old.node != new.node {
        deltas.extend(new.node.clone().map(Delta::Node));
    }
    if old.settings != new.settings {
        deltas.push(Delta::Settings(new.settings.clone()));
    }
    for (id, (kind, members)) in &new.sets {
        match old.sets.get(id) {
            Some((old_kind, before)) if old_kind == kind => {
                let added: Vec<_> = members.difference(before).copied().collect();
                let removed: Vec<_> = before.difference(members).copied().collect();
                if !added.is_empty() || !removed.is_empty() {
                    deltas.push(Delta::SetChanged { id: id.clone(), added, removed });
                }
            }
            _ => deltas.push(Delta::SetCreated(id.clone(), *kind, members.clone())),
        }
    }
    let policies = new.policies.iter().filter(|(id, rules)| old.policies.get(*id) != Some(*rules));
    deltas.extend(policies.map(|(id, rules)| Delta::Policy(id.clone(), rules.clone())));
    let vteps = new.vteps.values().filter(|vtep| old.vteps.get(&vtep.node) != Some(*vtep));
    deltas.extend(vteps.cloned().map(Delta::Vtep));
    let routes = new.routes.iter().filter(|(net, target)| old.routes.get(*net) != Some(*target));
    deltas.extend(
        routes.map(|(net, target)| Delta::Route(Route { destination: *net, target: target.clone() })),
    );
    let endpoints = new.endpoints.iter().filter(|(id, endpoint)| old.endpoints.get(*id) != Some(*endpoint));
    deltas.extend(endpoints.map(|(id, endpoint)| Delta::Endpoint(id.clone(), endpoint.clone())));

    let hosts = &new.host_endpoints;
    let changed = hosts.iter().filter(|(name, host)| old.host_endpoints.get(*name) != Some(*host));
    deltas.extend(changed.map(|(name, host)| Delta::HostEndpoint(name.clone(), host.clone())));

    let gone = old.host_endpoints.keys().filter(|name| !hosts.contains_key(*name));
    deltas.extend(gone.cloned().map(Delta::HostEndpointRemoved));
    let gone = old.endpoints.keys().filter(|id| !new.endpoints.contains_key(*id));
    deltas.extend(gone.cloned().map(Delta::EndpointRemoved));
    let gone = old.routes.keys().filter(|net| !new.routes.contains_key(*net));
    deltas.extend(gone.copied().map(Delta::RouteRemoved));
    let gone = old.vteps.keys().filter(|node| !new.vteps.contains_key(*node));
    deltas.extend(gone.cloned().map(Delta::VtepRemoved));
    let gone = old.policies.keys().filter(|id| !new.policies.contains_key(*id));
    deltas.extend(gone.cloned().map(Delta::PolicyRemoved));
    let gone = old.sets.keys().filter(|id| !new.sets.contains_key(*id));
    deltas.extend(gone.cloned().map(Delta::SetRemoved));
    deltas
}

/// A frame that begins the flow, with a tag at its end. It has correct checksums, as conntrack looks at them.
pub fn frame(flow: &Flow, to: [u8; 6], tag: u32) -> Vec<u8> {
    let payload = transport(flow, tag);
    let packet = match (flow.source, flow.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let length = (20 + payload.len()) as u16;
            let mut header = vec![0x45, 0];
            header.extend(length.to_be_bytes());
            header.extend([0, 1, 0, 0, 64, flow.protocol.0, 0, 0]);
            header.extend(source.octets());
            header.extend(destination.octets());
            let sum = checksum(&header).to_be_bytes();
            header[10..12].copy_from_slice(&sum);
            [header, payload].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend((payload.len() as u16).to_be_bytes());
            header.extend([flow.protocol.0, 64]);
            header.extend(source.octets());
            header.extend(destination.octets());
            [header, payload].concat()
        }
        _ => panic!("a flow of two families"),
    };
    let kind: u16 = if flow.source.is_ipv4() { 0x0800 } else { 0x86dd };
    [&to[..], &[2, 0, 0, 0, 0, 9], &kind.to_be_bytes(), &packet].concat()
}

fn transport(flow: &Flow, tag: u32) -> Vec<u8> {
    let ports = [flow.source_port.to_be_bytes(), flow.destination_port.to_be_bytes()].concat();
    let tag = (tag ^ MAGIC).to_be_bytes();
    let (mut packet, sum_at) = match flow.protocol.0 {
        // SYN, header of 20 bytes
        6 => ([&ports[..], &[0; 8], &[0x50, 2, 0xff, 0xff, 0, 0, 0, 0], &tag].concat(), Some(16)),
        17 => ([&ports[..], &[0, 12, 0, 0], &tag].concat(), Some(6)),
        // INIT, whose tag is 1; its last field, the sequence number, is the test's tag
        132 => {
            let init = [1, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0x10, 0, 0, 1, 0, 1];
            let mut packet = [&ports[..], &[0; 8], &init, &tag].concat();
            let sum = crc32c(&packet).to_le_bytes();
            packet[8..12].copy_from_slice(&sum);
            (packet, None)
        }
        1 | 58 => {
            let (icmp_type, icmp_code) = flow.icmp.unwrap();
            ([&[icmp_type, icmp_code, 0, 0, 0, 7, 0, 7], &tag[..]].concat(), Some(2))
        }
        _ => ([&[0; 8], &tag[..]].concat(), None),
    };
    if let Some(at) = sum_at {
        let bytes = |address: IpAddr| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let mut pseudo = Vec::new();
        if flow.protocol.0 != 1 {
            pseudo = [bytes(flow.source), bytes(flow.destination), vec![0, flow.protocol.0]].concat();
            pseudo.extend((packet.len() as u16).to_be_bytes());
        }
        let sum = checksum(&[pseudo, packet.clone()].concat());
        packet[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}

/// What SCTP sums its packets up by (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    let shift = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shift(crc)))
}

/// RFC 1071; 0 over bytes that hold their own checksum.
pub fn checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// What tags are mixed with on the wire. The kernel's own frames end in small numbers: a multicast report ends in the
/// address of all routers, `ff02::2`.
const MAGIC: u32 = 0x5eed_0000;

/// The tag at the end of a frame; of a frame that is not ours, some large number.
pub fn tag(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[frame.len() - 4..].try_into().unwrap()) ^ MAGIC
}

//! Ports of the node that lead to pods (`hostPort`): connections to them get a pod's address and port before routing, so
//! policy judges them as connections to the pod.
//!
//! Two maps have the same keys, address of the node, protocol and port: one leads to the pod's address, one to its port.
//! The address 0.0.0.0 stands for all addresses of the node. The source stays, except of a pod that reaches itself: it
//! would drop packets from its own address.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use tortie_dataplane::{Condition, Endpoint, HostPort, NodeState, Reason};
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, DataKind, Expr, Field, Hook, Key, Rule, SetRef, SetSpec, Table,
};

use super::nat::{DESTINATION_NAT, SOURCE_NAT, is_local};
use super::packet_test::{Keyed, PacketEnd, Test, Then, in_set, load_address, load_address_to};
use super::sets::{Family, ranges, set};

const INCOMING: &str = "host-ports";
const OWN: &str = "host-ports-own";
const ITSELF: &str = "host-ports-itself";
/// The map to the pods' addresses.
pub(super) const ADDRESSES: &str = "host-port-addresses";
/// The map to the pods' ports.
pub(super) const PORTS: &str = "host-port-ports";
/// The pods with such ports, each as source and destination.
pub(super) const PODS: &str = "host-port-pods";

/// The key of the packet's destination.
const DESTINATION: Keyed =
    Keyed { side: PacketEnd::Destination, family: Family::V4, then: Then::Port(PacketEnd::Destination) };
/// The registers behind the key.
const TO_ADDRESS: u8 = 8;
const TO_PORT: u8 = 9;

/// Whether a chain or a set belongs to this module.
pub(super) fn is_part(name: &str) -> bool {
    [INCOMING, OWN, ITSELF, ADDRESSES, PORTS, PODS].contains(&name)
}

/// Adds the empty sets to a table, and the chains if a pod needs them.
pub(super) fn add(node: &NodeState, table: &mut Table) {
    for (name, spec) in [(ADDRESSES, map()), (PORTS, map()), (PODS, pods())] {
        table.sets.insert(name.to_owned(), set(spec, []));
    }
    if node.endpoints.values().all(|endpoint| endpoint.host_ports.is_empty()) {
        return;
    }
    let mut chain = |name: &str, hook, priority, rules| {
        let base = Some(BaseChain { kind: ChainKind::Nat, hook, priority, drop: false });
        table.chains.insert(name.to_owned(), Chain { base, rules });
    };
    chain(INCOMING, Hook::Prerouting, DESTINATION_NAT, vec![of_address(vec![]), of_all_addresses(vec![])]);
    // The kernel sends nothing from a loopback address to a pod.
    let loopback = IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8);
    let (side, family, ranges) = (PacketEnd::Source, Family::V4, ranges([loopback]));
    let others = || Test::Address { side, family, ranges: ranges.clone(), invert: true }.exprs();
    chain(OWN, Hook::Output, DESTINATION_NAT, vec![of_address(others()), of_all_addresses(others())]);
    chain(ITSELF, Hook::Postrouting, SOURCE_NAT, vec![masquerade_itself()]);
}

/// The type of both maps.
pub(super) fn map() -> SetSpec {
    SetSpec { data: Some(DataKind::Number), ..DESTINATION.spec() }
}

/// The type of the set of pods.
pub(super) fn pods() -> SetSpec {
    SetSpec::hash(&[Field::Ipv4, Field::Ipv4])
}

/// The condition of a pod whose ports are wanted at IPv6 addresses of the node, which lead to no pod.
pub(super) fn not_served(endpoint: &Endpoint) -> Option<Condition> {
    let has_ipv6 = endpoint.addresses.iter().any(IpAddr::is_ipv6);
    let is_wanted = |port: &&HostPort| port.address.map_or(has_ipv6, |address| address.is_ipv6());
    let port = endpoint.host_ports.iter().find(is_wanted)?;
    let message = format!(
        "hostPort {}/{} is not served at IPv6 addresses of the node; use its IPv4 address, or a Service",
        port.port, port.protocol
    );
    Some(Condition::new(Reason::HostPortNotServed, message))
}

/// The keys of a pod's ports, each with the port. They lead to its IPv4 address, so the node's IPv6 addresses have none.
pub(super) fn keys(endpoint: &Endpoint) -> impl Iterator<Item = (Key, &HostPort)> {
    endpoint.host_ports.iter().filter_map(|port| {
        let address = port.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let key = Key::address_port(address, port.protocol.0, port.port);
        address.is_ipv4().then_some((key, port))
    })
}

/// The values of both maps, as the kernel takes them from the registers: in network byte order.
pub(super) fn values(address: Ipv4Addr, port: u16) -> (u32, u32) {
    let [high, low] = port.to_be_bytes();
    (u32::from_ne_bytes(address.octets()), u32::from_ne_bytes([high, low, 0, 0]))
}

/// The key of a pod in the set of pods.
pub(super) fn pair(address: Ipv4Addr) -> Option<Key> {
    Key::new(&[address.octets(), address.octets()].concat())
}

/// Translates packets to an address of the node that has the port itself.
fn of_address(tests: Vec<Expr>) -> Rule {
    let load = DESTINATION.load();
    Rule::new([Test::Family(Family::V4).exprs(), tests, load, translate().to_vec()].concat(), "hostPort")
}

/// Translates packets to any address of the node.
fn of_all_addresses(tests: Vec<Expr>) -> Rule {
    let mut exprs = [Test::Family(Family::V4).exprs(), tests, DESTINATION.load()].concat();
    exprs.push(Expr::Immediate { register: 0, value: Ipv4Addr::UNSPECIFIED.octets().to_vec() });
    // Most packets end at the lookup, which is faster than the test of their destination.
    let [address, port, translation] = translate();
    exprs.extend([address, port]);
    exprs.extend(is_local(PacketEnd::Destination, CmpOp::Equal));
    exprs.push(translation);
    Rule::new(exprs, "hostPort")
}

fn translate() -> [Expr; 3] {
    let lookup = |name, destination| Expr::Map { register: 0, set: SetRef::named(name), destination };
    [
        lookup(ADDRESSES, TO_ADDRESS),
        lookup(PORTS, TO_PORT),
        Expr::DestinationNat { address: TO_ADDRESS, port: TO_PORT },
    ]
}

fn masquerade_itself() -> Rule {
    let mut exprs = Test::Family(Family::V4).exprs();
    exprs.push(load_address(PacketEnd::Source, Family::V4));
    exprs.push(load_address_to(PacketEnd::Destination, Family::V4, Family::V4.registers()));
    exprs.extend([in_set(PODS, false), Expr::Masquerade]);
    Rule::new(exprs, "a pod reaches itself by hostPort")
}

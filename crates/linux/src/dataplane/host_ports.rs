//! Ports of the node that lead to pods (`hostPort`): connections to them get a pod's address and port before routing, so
//! policy judges them as connections to the pod.
//!
//! For each address family, two maps have the same keys, address of the node, protocol and port: one leads to the pod's
//! address, one to its port. The unspecified address (`0.0.0.0`, `::`) stands for all addresses of the node. The source
//! stays, except of a pod that reaches itself: it would drop packets from its own address.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use tortie_api::net::Protocol;
use tortie_dataplane::{Condition, Endpoint, HostPort, NodeState, Reason, Settings};
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Data, DataKind, Expr, Hook, Key, NatFamily, Register, Rule, SetRef,
    SetSpec, Table, Verdict,
};

use super::nat::{DESTINATION_NAT, SOURCE_NAT, is_local};
use super::packet_kinds::packets_to;
use super::packet_test::{Keyed, PacketEnd, Test, Then, in_set, load_address, load_address_to};
use super::sets::{Family, ranges, set};

const INCOMING: &str = "host-ports";
const OWN: &str = "host-ports-own";
const ITSELF: &str = "host-ports-itself";

/// The names of the sets of one family.
pub(super) struct SetNames {
    /// The map to the pods' addresses.
    pub addresses: &'static str,
    /// The map to the pods' ports.
    pub ports: &'static str,
    /// The pods with such ports, each as source and destination.
    pub pods: &'static str,
}

/// The sets of a family.
pub(super) fn set_names(family: Family) -> SetNames {
    match family {
        Family::V4 => {
            SetNames { addresses: "host-port-addresses", ports: "host-port-ports", pods: "host-port-pods" }
        }
        Family::V6 => {
            SetNames { addresses: "host-port-addresses6", ports: "host-port-ports6", pods: "host-port-pods6" }
        }
    }
}

/// The key of the packet's destination.
fn destination(family: Family) -> Keyed {
    Keyed { side: PacketEnd::Destination, family, then: Then::Port(PacketEnd::Destination) }
}

/// The register of the pod's address, behind the longest key.
const TO_ADDRESS: Register = 8;
/// The register of the pod's port, behind the longest address.
const TO_PORT: Register = 12;

/// Whether a chain or a set belongs to this module.
pub(super) fn is_part(name: &str) -> bool {
    let is_set = |family| {
        let SetNames { addresses, ports, pods } = set_names(family);
        [addresses, ports, pods].contains(&name)
    };
    [INCOMING, OWN, ITSELF].contains(&name) || Family::ALL.into_iter().any(is_set)
}

/// Adds the empty sets to a table, and the chains if a pod needs them.
pub(super) fn add(node: &NodeState, table: &mut Table) {
    for family in Family::ALL {
        let SetNames { addresses, ports, pods } = set_names(family);
        for (name, spec) in
            [(addresses, address_map(family)), (ports, port_map(family)), (pods, pod_pairs(family))]
        {
            table.sets.insert(name.to_owned(), set(spec, []));
        }
    }
    if node.endpoints.values().all(|endpoint| endpoint.host_ports.is_empty()) {
        return;
    }
    let mut chain = |name: &str, hook, priority, rules: Vec<Rule>| {
        let base = Some(BaseChain { kind: ChainKind::Nat, hook, priority, drop: false });
        table.chains.insert(name.to_owned(), Chain { base, rules });
    };
    let rules = |tests: fn(Family) -> Vec<Expr>| {
        let of_family = |family| [of_address(family, tests(family)), of_all_addresses(family, tests(family))];
        reserved(node).into_iter().chain(Family::ALL.into_iter().flat_map(of_family)).collect()
    };
    chain(INCOMING, Hook::Prerouting, AFTER_SERVICES, rules(|_| vec![]));
    chain(OWN, Hook::Output, AFTER_SERVICES, rules(is_not_from_loopback));
    chain(ITSELF, Hook::Postrouting, SOURCE_NAT, Family::ALL.map(masquerade_itself).into());
}

/// After kube-proxy, so that no pod takes the port or an address of a Service: the first translation counts.
const AFTER_SERVICES: i32 = DESTINATION_NAT + 1;

/// Ends the translation of packets to ports of the node's own programs (policy decision 52).
fn reserved(node: &NodeState) -> Vec<Rule> {
    let mut ports: BTreeMap<Protocol, Vec<u16>> = BTreeMap::new();
    node.settings
        .ports_of_the_node()
        .for_each(|(protocol, port)| ports.entry(protocol).or_default().push(port));
    let rule = |(protocol, ports): (Protocol, Vec<u16>)| {
        let mut exprs = packets_to(protocol.0, ports);
        exprs.push(Expr::Verdict(Verdict::Accept));
        Rule::new(exprs, "a port of the node itself")
    };
    ports.into_iter().map(rule).collect()
}

/// The kernel sends nothing from a loopback address to a pod.
fn is_not_from_loopback(family: Family) -> Vec<Expr> {
    let loopback = match family {
        Family::V4 => IpNet::new_assert(Ipv4Addr::new(127, 0, 0, 0).into(), 8),
        Family::V6 => IpNet::new_assert(Ipv6Addr::LOCALHOST.into(), 128),
    };
    Test::Address { side: PacketEnd::Source, family, ranges: ranges([loopback]), invert: true }.exprs()
}

/// The type of the map to the pods' addresses.
pub(super) fn address_map(family: Family) -> SetSpec {
    let data = match family {
        Family::V4 => DataKind::Number,
        Family::V6 => DataKind::Ipv6,
    };
    SetSpec { data: Some(data), ..destination(family).spec() }
}

/// The type of the map to the pods' ports.
pub(super) fn port_map(family: Family) -> SetSpec {
    SetSpec { data: Some(DataKind::Number), ..destination(family).spec() }
}

/// The type of the set of pods.
pub(super) fn pod_pairs(family: Family) -> SetSpec {
    SetSpec::hash(&[family.field(), family.field()])
}

/// The condition of a pod with a port that belongs to the node itself, at an address that the node does not have, or of a family that
/// the pod has no address of. `own` are the node's addresses.
pub(super) fn not_served(
    endpoint: &Endpoint,
    settings: &Settings,
    own: &BTreeMap<IpAddr, String>,
) -> Option<Condition> {
    let why_not =
        |port: &HostPort| settings.why_reserved(port).or_else(|| wrong_address(endpoint, port, own));
    endpoint.host_ports.iter().find_map(|port| {
        let message = format!("hostPort {port} is not served: {}", why_not(port)?);
        Some(Condition::new(Reason::HostPortNotServed, message))
    })
}

fn wrong_address(endpoint: &Endpoint, port: &HostPort, own: &BTreeMap<IpAddr, String>) -> Option<String> {
    let address = port.address?;
    let family = match address {
        IpAddr::V4(_) => "IPv4",
        IpAddr::V6(_) => "IPv6",
    };
    if address_of(endpoint, Family::of(address)).is_none() {
        return Some(format!(
            "its hostIP {address} is an {family} address, and the pod has none; remove hostIP, or give the pod an {family} address by \
             an IPPool"
        ));
    }
    let is_foreign = !own.contains_key(&address);
    is_foreign
        .then(|| format!("its hostIP {address} is no address of the node; remove hostIP, or correct it"))
}

/// A port of the node that leads to a pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub family: Family,
    pub key: Key,
    pub pod: IpAddr,
    pub pod_port: u16,
}

/// The entries of a pod: for each family of its addresses, its ports at that family's addresses of the node.
pub(super) fn entries(endpoint: &Endpoint) -> impl Iterator<Item = Entry> {
    let addresses =
        Family::ALL.into_iter().filter_map(|family| Some((family, address_of(endpoint, family)?)));
    addresses.flat_map(|(family, pod)| {
        endpoint.host_ports.iter().filter_map(move |port| {
            let at = port.address.unwrap_or(unspecified(family));
            let key = Key::address_port(at, port.protocol.0, port.port);
            (Family::of(at) == family).then_some(Entry { family, key, pod, pod_port: port.pod_port })
        })
    })
}

fn address_of(endpoint: &Endpoint, family: Family) -> Option<IpAddr> {
    endpoint.addresses.iter().copied().find(|address| Family::of(*address) == family)
}

fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The values of both maps, as the kernel takes them from the registers: in network byte order.
pub(super) fn values(address: IpAddr, port: u16) -> (Data, Data) {
    let address = match address {
        IpAddr::V4(address) => Data::Number(u32::from_ne_bytes(address.octets())),
        IpAddr::V6(address) => Data::Ipv6(address),
    };
    let [high, low] = port.to_be_bytes();
    (address, Data::Number(u32::from_ne_bytes([high, low, 0, 0])))
}

/// The key of a pod in the set of pods.
pub(super) fn pair(address: IpAddr) -> Option<Key> {
    let address = Key::address(address);
    Key::new(&[address.bytes(), address.bytes()].concat())
}

/// Translates packets to an address of the node that has the port itself.
fn of_address(family: Family, tests: Vec<Expr>) -> Rule {
    Rule::new(
        [Test::Family(family).exprs(), tests, destination(family).load(), to_pod(family)].concat(),
        "hostPort",
    )
}

/// Translates packets to any address of the node.
fn of_all_addresses(family: Family, tests: Vec<Expr>) -> Rule {
    let any = Expr::Immediate { register: 0, value: Key::address(unspecified(family)).bytes().to_vec() };
    let load = [destination(family).load(), vec![any]].concat();
    Rule::new([Test::Family(family).exprs(), tests, load, to_pod(family)].concat(), "hostPort")
}

/// Translates the packet if the key leads to a pod, and the packet goes to the node: whoever creates pods may name any address as
/// the node's. Most packets end at the lookup, which is faster than the test of their destination.
fn to_pod(family: Family) -> Vec<Expr> {
    let [address, port, translation] = translate(family);
    let [fib, is_own] = is_local(PacketEnd::Destination, CmpOp::Equal);
    vec![address, port, fib, is_own, translation]
}

fn translate(family: Family) -> [Expr; 3] {
    let SetNames { addresses, ports, pods: _ } = set_names(family);
    let lookup = |name, destination| Expr::Map { register: 0, set: SetRef::named(name), destination };
    let nat_family = match family {
        Family::V4 => NatFamily::Ipv4,
        Family::V6 => NatFamily::Ipv6,
    };
    [
        lookup(addresses, TO_ADDRESS),
        lookup(ports, TO_PORT),
        Expr::DestinationNat { family: nat_family, address: TO_ADDRESS, port: TO_PORT },
    ]
}

fn masquerade_itself(family: Family) -> Rule {
    let mut exprs = Test::Family(family).exprs();
    exprs.push(load_address(PacketEnd::Source, family));
    exprs.push(load_address_to(PacketEnd::Destination, family, family.registers()));
    exprs.extend([in_set(set_names(family).pods, false), Expr::Masquerade]);
    Rule::new(exprs, "a pod reaches itself by hostPort")
}

//! The way of packets between two nodes, by the mode of the pool of the address to which they go.

use std::net::IpAddr;

use tortie_api::calico::{EncapsulationMode, IpPool};
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::Snapshot;

use crate::vxlan_ports;

/// The way of packets between two nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// In VXLAN, to this UDP port.
    Vxlan(u16),
    Ipip,
    /// As they are. The pool has no encapsulation, or none between nodes in one network.
    Plain(String),
    /// The pool has IPIP, and this node runs Windows.
    IpipToWindows(String),
    /// No IPPool has the address, or it is unknown.
    Unknown,
}

/// The path of a check.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodePath<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) from: &'a str,
    pub(super) to: &'a str,
    /// The receiver; `None` if the check could not be tried.
    pub(super) address: Option<IpAddr>,
}

impl NodePath<'_> {
    pub(super) fn mode(&self) -> Mode {
        let Some((name, pool)) = self.pool() else { return Mode::Unknown };
        let (from, to) = (self.node(self.from), self.node(self.to));
        let is_plain = match pool.encapsulation() {
            EncapsulationMode::Never => true,
            EncapsulationMode::CrossSubnet => from.zip(to).is_some_and(|(from, to)| self.are_near(from, to)),
            EncapsulationMode::Always => false,
        };
        if is_plain {
            return Mode::Plain(name.to_owned());
        }
        if !pool.has_ipip() {
            return Mode::Vxlan(vxlan_ports::of_node(self.snapshot, self.to));
        }
        let mut ends = [(self.from, from), (self.to, to)].into_iter();
        let windows = ends.find(|(_, node)| node.is_some_and(Node::is_windows));
        windows.map_or(Mode::Ipip, |(name, _)| Mode::IpipToWindows(name.to_owned()))
    }

    /// The advice if nothing passes between the nodes.
    pub(super) fn hint(&self) -> String {
        let (from, to) = (self.end(self.from), self.end(self.to));
        let route = || {
            let address =
                self.address.map_or_else(|| "the receiver".to_owned(), |address| address.to_string());
            format!(
                "the route to {address} on node {} and the one back on node {} (ip route get; with BGP, tortie bgp why)",
                self.from, self.to
            )
        };
        let check = match self.mode() {
            Mode::Vxlan(port) => format!("check that UDP {port} (VXLAN) passes between {from} and {to}"),
            Mode::Ipip => {
                format!("check that IPIP (protocol 4, no UDP or TCP) passes between {from} and {to}")
            }
            Mode::IpipToWindows(node) => format!(
                "the pool of the address has IPIP, and node {node} runs Windows, which has none; move the pods to a pool with vxlanMode: \
                 Always (tortie pool migrate)"
            ),
            Mode::Plain(pool) => format!(
                "packets travel as they are (IPPool {pool}), so check {}, and that the network between {from} and {to} passes packets of pods",
                route()
            ),
            Mode::Unknown => {
                format!("no IPPool says how packets travel between {from} and {to}: check {}", route())
            }
        };
        format!("nothing passes between the nodes, though it does on each of them: {check}")
    }

    /// The advice if only small packets pass.
    pub(super) fn hint_about_size(&self) -> String {
        let is_ipv6 = self.address.is_some_and(|address| address.is_ipv6());
        let takes = match self.mode() {
            Mode::Vxlan(_) if is_ipv6 => "; VXLAN takes 70 bytes",
            Mode::Vxlan(_) => "; VXLAN takes 50 bytes",
            Mode::Ipip => "; IPIP takes 20 bytes",
            Mode::Plain(_) | Mode::IpipToWindows(_) | Mode::Unknown => "",
        };
        format!(
            "small packets pass: check the MTU between {} and {}{takes}",
            self.end(self.from),
            self.end(self.to)
        )
    }

    /// The pool of the receiver, with its name.
    fn pool(&self) -> Option<(&str, &IpPool)> {
        let address = self.address?;
        let pools = self.snapshot.iter().filter_map(|(key, stored)| match &stored.resource {
            Ok(Resource::IpPool(pool)) => Some((key.name.as_str(), pool)),
            _ => None,
        });
        let has_it = |pool: &IpPool| pool.spec.cidr.contains(&address) && !pool.is_for_load_balancers();
        // Beside an overlay, a pool without encapsulation with the same addresses has no effect.
        let of_address: Vec<_> = pools.filter(|(_, pool)| has_it(pool)).collect();
        let is_overlay = |pool: &IpPool| pool.encapsulation() != EncapsulationMode::Never;
        of_address.iter().find(|(_, pool)| is_overlay(pool)).or(of_address.first()).copied()
    }

    fn node(&self, name: &str) -> Option<&Node> {
        match &self.snapshot.get(&Key::global(Kind::Node, name))?.resource {
            Ok(Resource::Node(node)) => Some(node),
            _ => None,
        }
    }

    /// Returns whether the nodes are in one network and exchange packets of pods as they are.
    fn are_near(&self, from: &Node, to: &Node) -> bool {
        let version = self.address.map_or(IpVersion::V4, |address| IpVersion::of(&address));
        let has = |node: &Node, other: &Node| {
            let ends = node.own_network(version).zip(other.own_address(version));
            ends.is_some_and(|(network, address)| network.contains(&address))
        };
        has(from, to) && has(to, from) && from.takes_plain_packets() && to.takes_plain_packets()
    }

    /// The address of a node, or its name.
    fn end(&self, name: &str) -> String {
        let address = self.node(name).and_then(Node::address);
        address.map_or_else(|| name.to_owned(), |address| address.to_string())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn snapshot(pool: Value, windows: bool) -> Snapshot {
        let mut snapshot = Snapshot::new();
        for (name, address, os) in [
            ("a", "192.0.2.11/24", "linux"),
            ("b", "192.0.2.12/24", if windows { "windows" } else { "linux" }),
            ("far", "198.51.100.13/24", "linux"),
        ] {
            let metadata = json!({"name": name, "labels": {"kubernetes.io/os": os},
                "annotations": {"projectcalico.org/IPv4Address": address}});
            snapshot.insert(Key::global(Kind::Node, name), json!({"metadata": metadata}), None);
        }
        let mut spec = json!({"cidr": "10.1.0.0/16"});
        spec.as_object_mut().unwrap().extend(pool.as_object().unwrap().clone());
        snapshot.insert(
            Key::global(Kind::IpPool, "p"),
            json!({"metadata": {"name": "p"}, "spec": spec}),
            None,
        );
        snapshot
    }

    #[test]
    fn the_hint_names_the_mode_of_the_path() {
        let vxlan = |mode: &str| json!({"vxlanMode": mode});
        let ipip = |mode: &str| json!({"ipipMode": mode});
        let (udp, plain) = ("UDP 4789 (VXLAN)", "packets travel as they are (IPPool p)");
        for (pool, windows, to, address, expected, size) in [
            (vxlan("Always"), false, "b", "10.1.0.1", udp, "VXLAN takes 50 bytes"),
            (vxlan("Always"), true, "b", "10.1.0.1", udp, "VXLAN takes 50 bytes"),
            (vxlan("CrossSubnet"), false, "b", "10.1.0.1", plain, ""),
            (vxlan("CrossSubnet"), true, "b", "10.1.0.1", udp, "VXLAN takes 50 bytes"),
            (vxlan("CrossSubnet"), false, "far", "10.1.0.1", udp, "VXLAN takes 50 bytes"),
            (vxlan("Never"), false, "b", "10.1.0.1", plain, ""),
            (vxlan("Never"), false, "far", "10.1.0.1", plain, ""),
            (ipip("Always"), false, "b", "10.1.0.1", "IPIP (protocol 4", "IPIP takes 20 bytes"),
            (ipip("CrossSubnet"), false, "b", "10.1.0.1", plain, ""),
            (ipip("CrossSubnet"), false, "far", "10.1.0.1", "IPIP (protocol 4", "IPIP takes 20 bytes"),
            (ipip("Always"), true, "b", "10.1.0.1", "node b runs Windows", ""),
            (vxlan("Always"), false, "b", "10.9.0.1", "no IPPool says how packets travel", ""),
        ] {
            let snapshot = snapshot(pool.clone(), windows);
            let path = NodePath { snapshot: &snapshot, from: "a", to, address: address.parse().ok() };
            let hint = path.hint();
            assert!(hint.contains(expected), "{pool} {to}: {hint}");
            assert_eq!(hint.contains("VXLAN)"), expected == udp, "never by default: {hint}");
            assert_eq!(hint.contains("tortie bgp why"), expected == plain || address == "10.9.0.1", "{hint}");
            let large = path.hint_about_size();
            assert!(large.contains("between 192.0.2.11 and ") && large.ends_with(size), "{large}");
            assert_eq!(large.contains("takes"), !size.is_empty(), "{large}");
        }
    }

    #[test]
    fn without_an_address_nothing_is_known() {
        let snapshot = snapshot(json!({"vxlanMode": "Always"}), false);
        let path = NodePath { snapshot: &snapshot, from: "a", to: "none", address: None };
        assert_eq!(path.mode(), Mode::Unknown);
        assert!(path.hint().contains("between 192.0.2.11 and none"), "{}", path.hint());
    }
}

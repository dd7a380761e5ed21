//! Decisions as rows of an ACL table: one protocol or any, lists of addresses and ports.

use std::fmt::Write;
use std::sync::Arc;

use tortie_api::net::Protocol;
use tortie_hcn::schema::AclAction;

use super::flatten::{Decision, Verdict};
use super::numbers::{Addresses, Numbers, Ports, Protocols};

/// How HNS writes "any protocol".
pub const ANY_PROTOCOL: u16 = 256;

/// The most addresses or ports in one ACL (hns.md 4.1).
const CHUNK: usize = 4000;

/// An ACL without direction and priority. The lists are as HNS reads them; empty is any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Allow or Block.
    pub action: AclAction,
    /// A number, or [`ANY_PROTOCOL`].
    pub protocol: u16,
    /// The endpoint's addresses.
    pub local_addresses: String,
    /// The peer's addresses.
    pub remote_addresses: String,
    /// The endpoint's ports.
    pub local_ports: String,
    /// The peer's ports.
    pub remote_ports: String,
    /// What decided so.
    pub origin: Arc<str>,
}

/// The list as rows, of which the first that matches holds. What no row matches is denied.
pub fn rows(list: &[Decision]) -> Vec<Row> {
    // An ACL names one protocol or any; it cannot say "any but TCP". Where the list does, the excepted protocols get
    // lists of their own in front, that decide about all of their packets. What is left may then be called "any".
    let excepted = excepted(list);
    let mut rows = Vec::new();
    for protocol in excepted.iter() {
        let own = Protocols::of(&[protocol]);
        for decision in list.iter().filter(|decision| decision.region.protocols.contains(protocol)) {
            rows.extend(expand(decision, u16::from(protocol.0)));
            if is_about_all(decision, own) {
                break;
            }
        }
    }
    let rest = excepted.not();
    let mut common = Vec::new();
    for decision in list {
        let protocols = decision.region.protocols.and(rest);
        if protocols == rest {
            common.extend(expand(decision, ANY_PROTOCOL));
        } else {
            common.extend(protocols.iter().flat_map(|Protocol(number)| expand(decision, number.into())));
        }
        if is_about_all(decision, rest) {
            break;
        }
    }
    // The endpoint is closed behind these rows anyway.
    while common.last().is_some_and(|row| row.action == AclAction::Block) {
        common.pop();
    }
    rows.extend(common);
    rows
}

fn is_about_all(decision: &Decision, protocols: Protocols) -> bool {
    let Decision { region, .. } = decision;
    let sides = [&region.local, &region.remote];
    protocols.is_within(region.protocols)
        && sides.iter().all(|side| side.addresses.is_all() && side.ports.is_all())
}

/// The protocols that are missing where most are meant.
fn excepted(list: &[Decision]) -> Protocols {
    let named = |decision: &Decision| decision.region.protocols;
    // A protocol that no decision tells from its like stands for all that nobody thought of.
    let few = |protocols: Protocols| protocols.iter().count() <= 128;
    let mentioned = list.iter().map(named).fold(Protocols::NONE, |all, protocols| {
        all.or(if few(protocols) { protocols } else { protocols.not() })
    });
    let Some(other) = mentioned.not().iter().last() else {
        // Every single protocol is told apart: each gets its own list.
        return Protocols::ALL;
    };
    let broad = list.iter().map(named).filter(|protocols| protocols.contains(other));
    broad.fold(Protocols::NONE, |all, protocols| all.or(protocols.not()))
}

/// One decision for one protocol, in rows whose lists are short enough: the product of its lists' parts.
fn expand(decision: &Decision, protocol: u16) -> Vec<Row> {
    let Decision { region, verdict, origin } = decision;
    let action = match verdict {
        Verdict::Allow => AclAction::Allow,
        Verdict::Deny => AclAction::Block,
    };
    let mut rows = Vec::new();
    for local_addresses in &address_lists(&region.local.addresses) {
        for remote_addresses in &address_lists(&region.remote.addresses) {
            for local_ports in &port_lists(&region.local.ports) {
                for remote_ports in &port_lists(&region.remote.ports) {
                    rows.push(Row {
                        action: action.clone(),
                        protocol,
                        local_addresses: local_addresses.clone(),
                        remote_addresses: remote_addresses.clone(),
                        local_ports: local_ports.clone(),
                        remote_ports: remote_ports.clone(),
                        origin: Arc::clone(origin),
                    });
                }
            }
        }
    }
    rows
}

fn address_lists(addresses: &Addresses) -> Vec<String> {
    lists(addresses, |addresses| {
        let nets = addresses.to_nets();
        let text = |net: &ipnet::Ipv4Net| {
            if net.prefix_len() == 32 { net.addr().to_string() } else { net.to_string() }
        };
        nets.iter().map(text).collect()
    })
}

fn port_lists(ports: &Ports) -> Vec<String> {
    lists(ports, |ports| {
        let text = |(first, last): &(u32, u32)| {
            let mut text = first.to_string();
            if first != last {
                // Writing to a string does not fail.
                let _ = write!(text, "-{last}");
            }
            text
        };
        ports.ranges().iter().map(text).collect()
    })
}

/// Comma lists of at most [`CHUNK`] items. Everything is the one empty list; nothing has no list at all.
fn lists<const MAX: u32>(
    numbers: &Numbers<MAX>,
    items: impl FnOnce(&Numbers<MAX>) -> Vec<String>,
) -> Vec<String> {
    if numbers.is_all() {
        return vec![String::new()];
    }
    items(numbers).chunks(CHUNK).map(|chunk| chunk.join(",")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_and_everything_is_empty() {
        assert_eq!(address_lists(&Addresses::all()), [""]);
        assert_eq!(address_lists(&Addresses::all().not()), [""; 0]);
        let scattered = Addresses::from_ranges((0..8001).map(|i| (i * 2, i * 2)).collect());
        let lists = address_lists(&scattered);
        let lengths: Vec<usize> = lists.iter().map(|list| list.split(',').count()).collect();
        assert_eq!(lengths, [4000, 4000, 1]);
        assert!(lists[0].starts_with("0.0.0.0,0.0.0.2,"));
        let ports = Ports::from_ranges(vec![(80, 80), (8000, 8080), (0, 0)]);
        assert_eq!(port_lists(&ports), ["0,80,8000-8080"]);
    }
}

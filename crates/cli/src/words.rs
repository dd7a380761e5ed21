//! Describes rules of programs in words.

use std::collections::BTreeMap;

use tortie_api::net::{IpVersion, PortRange, Protocol};
use tortie_policy::SetSource;
use tortie_policy::program::{EntityMatch, IcmpMatch, Rule, SetId};

/// The meaning of a set, as far as known.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meaning {
    /// The number of its members on the node.
    pub(crate) members: usize,
    /// The source of its members.
    pub(crate) source: Option<SetSource>,
}

/// The meaning of each set.
pub(crate) type Meanings = BTreeMap<SetId, Meaning>;

/// The rule in one line: `Allow TCP from app == "front" (2 members) to port 80`.
pub(crate) fn rule(rule: &Rule, sets: &Meanings) -> String {
    // Exhaustive, here and below, so that no criterion is left out of the sentence.
    let Rule {
        action,
        ip_version,
        protocol: wanted,
        not_protocol,
        icmp: message,
        not_icmp,
        source,
        destination,
    } = rule;
    let mut words = vec![format!("{action:?}")];
    words.extend(ip_version.map(|version| match version {
        IpVersion::V4 => "IPv4".to_owned(),
        IpVersion::V6 => "IPv6".to_owned(),
    }));
    words.extend(wanted.map(protocol));
    words.extend(not_protocol.map(|unwanted| format!("anything but {}", protocol(unwanted))));
    if wanted.is_none() && (message.is_some() || not_icmp.is_some()) {
        words.push("ICMP".to_owned());
    }
    words.extend(message.map(|wanted| icmp(&wanted)));
    words.extend(not_icmp.map(|unwanted| format!("but not {}", icmp(&unwanted))));
    words.extend(entity("from", source, sets));
    words.extend(entity("to", destination, sets));
    if words.len() == 1 {
        words.push("everything".to_owned());
    }
    words.join(" ")
}

/// The content of a set: `app == "front" (2 members)`.
pub(crate) fn set(id: &SetId, sets: &Meanings) -> String {
    let Some(meaning) = sets.get(id) else { return format!("set {id}") };
    let what = match &meaning.source {
        None => format!("set {id}"),
        Some(SetSource::Selector(selector)) => selector.to_string(),
        Some(SetSource::Nodes(selector)) => format!("the nodes with {selector}"),
        Some(SetSource::NamedPort { selector, name, protocol: None }) => {
            format!("port {name:?} of {selector}")
        }
        Some(SetSource::NamedPort { selector, name, protocol: Some(wanted) }) => {
            format!("{} port {name:?} of {selector}", protocol(*wanted))
        }
        Some(SetSource::Service { namespace, name, with_ports }) => {
            let what = if *with_ports { "the backends, with their ports," } else { "the backends" };
            format!("{what} of Service {namespace}/{name}")
        }
    };
    format!("{what} ({})", crate::output::count(meaning.members as u64, "member"))
}

fn protocol(protocol: Protocol) -> String {
    let text = protocol.to_string();
    if text.bytes().all(|byte| byte.is_ascii_digit()) { format!("protocol {text}") } else { text }
}

fn icmp(icmp: &IcmpMatch) -> String {
    let part = |what: &str, number: Option<u8>| number.map(|number| format!("{what} {number}"));
    let parts = [part("type", icmp.icmp_type), part("code", icmp.icmp_code)];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "of any type".to_owned() } else { parts.join(" ") }
}

fn entity(preposition: &str, entity: &EntityMatch, sets: &Meanings) -> Option<String> {
    let EntityMatch { nets, not_nets, sets: within, not_sets, ports, port_sets, not_ports, not_port_sets } =
        entity;
    let mut parts = Vec::new();
    let networks = |nets: &[ipnet::IpNet]| nets.iter().map(net).collect::<Vec<_>>().join(", ");
    parts.extend((!nets.is_empty()).then(|| networks(nets)));
    parts.extend(within.iter().map(|id| set(id, sets)));
    parts.extend((!not_nets.is_empty()).then(|| format!("none of {}", networks(not_nets))));
    parts.extend(not_sets.iter().map(|id| format!("none of {}", set(id, sets))));
    let mut wanted: Vec<String> = Vec::new();
    wanted.extend((!ports.is_empty()).then(|| numbers(ports)));
    wanted.extend(port_sets.iter().map(|id| set(id, sets)));
    parts.extend((!wanted.is_empty()).then(|| wanted.join(" or ")));
    parts.extend((!not_ports.is_empty()).then(|| format!("not {}", numbers(not_ports))));
    parts.extend(not_port_sets.iter().map(|id| format!("not {}", set(id, sets))));
    (!parts.is_empty()).then(|| format!("{preposition} {}", parts.join(" and ")))
}

/// A network; for a single address, the address.
fn net(net: &ipnet::IpNet) -> String {
    if net.prefix_len() == net.max_prefix_len() { net.addr().to_string() } else { net.to_string() }
}

fn numbers(ports: &[PortRange]) -> String {
    let text: Vec<_> = ports.iter().map(PortRange::to_string).collect();
    let is_one = ports.len() == 1 && ports.iter().all(|range| range.first == range.last);
    format!("{} {}", if is_one { "port" } else { "ports" }, text.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tortie_api::net::Action;

    #[test]
    fn rules_read_as_sentences() {
        let sets: Meanings = [
            (
                SetId::new("front"),
                Meaning { members: 2, source: Some(SetSource::Selector("app == 'front'".parse().unwrap())) },
            ),
            (
                SetId::new("back"),
                Meaning {
                    members: 1,
                    source: Some(SetSource::Service {
                        namespace: "shop".to_owned(),
                        name: "back".to_owned(),
                        with_ports: true,
                    }),
                },
            ),
        ]
        .into();
        let all = Rule::all(Action::Allow);
        let ports = |ports: &[(u16, u16)]| {
            ports.iter().map(|(first, last)| PortRange { first: *first, last: *last }).collect::<Vec<_>>()
        };
        for (given, wanted) in [
            (all.clone(), "Allow everything"),
            (
                Rule {
                    protocol: Some(Protocol::TCP),
                    source: EntityMatch { sets: vec![SetId::new("front")], ..EntityMatch::default() },
                    destination: EntityMatch { ports: ports(&[(80, 80)]), ..EntityMatch::default() },
                    ..all.clone()
                },
                "Allow TCP from app == \"front\" (2 members) to port 80",
            ),
            (
                Rule {
                    not_protocol: Some(Protocol(47)),
                    source: EntityMatch {
                        nets: vec!["10.0.0.0/8".parse().unwrap(), "10.1.0.1/32".parse().unwrap()],
                        not_sets: vec![SetId::new("unknown")],
                        ..EntityMatch::default()
                    },
                    destination: EntityMatch {
                        ports: ports(&[(80, 80), (8000, 8080)]),
                        port_sets: vec![SetId::new("back")],
                        ..EntityMatch::default()
                    },
                    ..Rule::all(Action::Deny)
                },
                "Deny anything but protocol 47 from 10.0.0.0/8, 10.1.0.1 and none of set unknown to ports 80, 8000:8080 \
                 or the backends, with their ports, of Service shop/back (1 member)",
            ),
            (
                Rule {
                    protocol: Some(Protocol::ICMP),
                    not_icmp: Some(IcmpMatch { icmp_type: Some(8), icmp_code: None }),
                    ..Rule::all(Action::Pass)
                },
                "Pass ICMP but not type 8",
            ),
        ] {
            assert_eq!(rule(&given, &sets), wanted);
        }
    }
}

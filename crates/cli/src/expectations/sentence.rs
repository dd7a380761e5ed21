//! Expectations as sentences: `shop/front* reaches shop/back on tcp/8443`, `outside does not reach shop/db`.

use std::net::IpAddr;

use tortie_api::manifest::first_pod;
use tortie_reach::Sample;
use tortie_selector::Selector;

use crate::port::PortSpec;

/// What is expected of all packets from some ends to others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Expectation {
    pub(super) from: Vec<End>,
    pub(super) to: Vec<End>,
    /// Whether every packet passes, or none.
    pub(super) reaches: bool,
    /// The packets; empty for all that clients send.
    pub(super) ports: Vec<PortSpec>,
}

/// Ends of flows, as written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    pub(super) text: String,
    pub(super) of: Ends,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Ends {
    /// Pods of a namespace whose names match a pattern with `*`.
    Pods(String, String),
    /// Pods that a selector selects, of one namespace or of all.
    Selected(Option<String>, Selector),
    AllPods,
    Node(String),
    Nodes,
    Address(IpAddr),
    /// Everything that is neither a pod nor a node.
    Outside,
}

impl Expectation {
    /// Parses a sentence.
    ///
    /// # Errors
    /// It is not of the form `ENDS reaches ENDS [on PORTS]` or `ENDS does not reach ENDS [on PORTS]`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (from, rest, reaches) = match (text.split_once(" does not reach "), text.split_once(" reaches "))
        {
            (Some((from, rest)), None) => (from, rest, false),
            (None, Some((from, rest))) => (from, rest, true),
            _ => {
                return Err(format!(
                    "{text:?} is not of the form \"A reaches B on tcp/80\" or \"A does not reach B\""
                ));
            }
        };
        let (to, ports) = match rest.rsplit_once(" on ") {
            Some((to, ports)) => {
                (to, ports.split(',').map(|port| port_of(port.trim())).collect::<Result<_, _>>()?)
            }
            None => (rest, Vec::new()),
        };
        Ok(Self { from: ends(from)?, to: ends(to)?, reaches, ports })
    }
}

fn port_of(text: &str) -> Result<PortSpec, String> {
    PortSpec::read(text).map_err(|error| format!("{error:#}"))
}

/// Ends that are separated by commas; a selector extends to the end of the text.
fn ends(text: &str) -> Result<Vec<End>, String> {
    if text.trim().starts_with("pods ") {
        return Ok(vec![end(text.trim())?]);
    }
    text.split(',').map(|one| end(one.trim())).collect()
}

fn end(text: &str) -> Result<End, String> {
    let of = match text {
        "outside" => Ends::Outside,
        "nodes" => Ends::Nodes,
        "all pods" => Ends::AllPods,
        text if text.starts_with("pods ") => selected(text)?,
        text => match (text.parse(), text.split_once('/')) {
            (Ok(address), _) => Ends::Address(address),
            (_, Some(("node", name))) if !name.is_empty() => Ends::Node(name.to_owned()),
            (_, Some((namespace, pod))) if !namespace.is_empty() && !pod.is_empty() && !pod.contains('/') => {
                Ends::Pods(namespace.to_owned(), pod.to_owned())
            }
            _ => {
                return Err(format!(
                    "{text:?} is none of NAMESPACE/POD, NAMESPACE/PATTERN*, all pods, pods with SELECTOR, \
                     pods of NAMESPACE with SELECTOR, node/NAME, nodes, an address, outside"
                ));
            }
        },
    };
    Ok(End { text: text.to_owned(), of })
}

/// `pods with SELECTOR`, `pods of NAMESPACE with SELECTOR`.
fn selected(text: &str) -> Result<Ends, String> {
    let wrong = || {
        format!("{text:?} is not of the form \"pods with SELECTOR\" or \"pods of NAMESPACE with SELECTOR\"")
    };
    let rest = text.strip_prefix("pods ").ok_or_else(wrong)?;
    let (namespace, selector) = match rest.strip_prefix("with ") {
        Some(selector) => (None, selector),
        None => {
            let rest = rest.strip_prefix("of ").ok_or_else(wrong)?;
            let (namespace, selector) = rest.split_once(" with ").ok_or_else(wrong)?;
            (Some(namespace.trim().to_owned()), selector)
        }
    };
    let selector = Selector::parse(selector).map_err(|error| format!("{selector:?}: {error}"))?;
    Ok(Ends::Selected(namespace, selector))
}

/// Returns whether the name matches a pattern in which `*` stands for any text. The second pod of a workload has the name of the first one.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let name = first_pod(name).unwrap_or(name);
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = name.find(part) else { return false };
        name = name.get(at + part.len()..).unwrap_or_default();
    }
    name.ends_with(last)
}

/// A packet in a sentence: `tcp/80`, `icmp/8/0`, `proto/47`.
pub(super) fn port_text(sample: &Sample) -> String {
    let name = sample.protocol.to_string().to_lowercase();
    match (name.parse::<u8>(), sample.icmp) {
        (Ok(number), _) => format!("proto/{number}"),
        (_, Some((icmp_type, code))) => format!("{name}/{icmp_type}/{code}"),
        _ if sample.protocol.has_ports() => format!("{name}/{}", sample.destination_port),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_read() {
        let parse = |text| Expectation::parse(text).unwrap();
        let all = parse("shop/front*, jobs/x reaches node/one on tcp/80, udp/53");
        assert_eq!(all.from[0].of, Ends::Pods("shop".into(), "front*".into()));
        assert_eq!(all.from[1].of, Ends::Pods("jobs".into(), "x".into()));
        assert_eq!((all.to[0].of.clone(), all.ports.len(), all.reaches), (Ends::Node("one".into()), 2, true));
        let none = parse("outside does not reach all pods");
        assert_eq!(
            (none.from[0].of.clone(), none.to[0].of.clone(), none.reaches),
            (Ends::Outside, Ends::AllPods, false)
        );
        let selected = parse("pods of shop with app in {'a', 'b'} reaches 192.0.2.1 on 443");
        assert!(
            matches!(&selected.from[..], [End { of: Ends::Selected(Some(namespace), _), .. }] if namespace == "shop")
        );
        assert_eq!(selected.to[0].of, Ends::Address("192.0.2.1".parse().unwrap()));
        for (text, expected) in [
            ("shop/a", "is not of the form"),
            ("shop/a reaches", "is not of the form"),
            ("shop/a reaches b", "is none of NAMESPACE/POD"),
            ("shop/a reaches shop/b on tcp", "a port is missing"),
            ("pods app reaches shop/b", "pods with SELECTOR"),
            ("pods with app = reaches shop/b", "app ="),
            ("a/b reaches c/d does not reach e/f", "is not of the form"),
        ] {
            let error = Expectation::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn patterns_match_names() {
        for (pattern, name, expected) in [
            ("front", "front", true),
            ("front", "front-1", false),
            ("front*", "front-1", true),
            ("*", "x", true),
            ("*-1", "front-1", true),
            ("f*t-*", "front-1", true),
            ("f*x*", "front-1", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}

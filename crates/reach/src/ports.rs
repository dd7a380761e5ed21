//! Classes of packets by protocol, ports and ICMP type: packets of one class have the same verdict between the same
//! ends.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use tortie_api::net::{PortRange, Protocol};

/// One criterion of a rule for protocol and ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Matcher {
    Protocol(Protocol),
    Port {
        source: bool,
        /// All protocols with ports, if absent.
        protocol: Option<Protocol>,
        range: PortRange,
    },
    /// Type and code; absent means any.
    Icmp(Option<u8>, Option<u8>),
}

/// The protocol and ports of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sample {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its source port; 0 if the protocol has none.
    pub source_port: u16,
    /// Its destination port; 0 if the protocol has none.
    pub destination_port: u16,
    /// Its ICMP type and code, if it is ICMP or ICMPv6.
    pub icmp: Option<(u8, u8)>,
}

/// The source port of questions in which it does not matter, similar to that of most clients.
pub const CLIENT_PORT: u16 = 40_000;

/// The classes of packets.
#[derive(Debug, Clone, Default)]
pub struct Ports {
    matchers: Vec<Matcher>,
    classes: Vec<PortClass>,
    by_signature: BTreeMap<Vec<u32>, usize>,
    /// The protocols that rules distinguish, the three with ports, and ICMP.
    spoken: BTreeSet<Protocol>,
}

#[derive(Debug, Clone)]
struct PortClass {
    sample: Sample,
    signature: Vec<u32>,
    parts: Vec<Part>,
}

/// The part of one protocol that belongs to a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Ports { protocol: Protocol, destination: PortRange, source: PortRange },
    Icmp { protocol: Protocol, icmp_type: Option<u8>, code: Option<u8>, others: bool },
    Whole(Protocol),
    OtherProtocols,
}

const PORTED: [Protocol; 3] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];
const ICMPS: [Protocol; 2] = [Protocol::ICMP, Protocol::ICMPV6];
const EVERY_PORT: PortRange = PortRange { first: 0, last: u16::MAX };

impl Matcher {
    /// The criteria for a packet that distinguish what this one distinguishes in its reply: ports change sides, and
    /// an answer has a different ICMP type.
    pub(super) fn before_reply(self) -> Vec<Self> {
        let icmp = |icmp_type, code| Self::Icmp(Some(icmp_type), code);
        match self {
            Self::Protocol(_) | Self::Icmp(None, _) => vec![self],
            Self::Port { source, protocol, range } => vec![Self::Port { source: !source, protocol, range }],
            Self::Icmp(Some(icmp_type), code) => match icmp_type {
                // Echo, which has different types in ICMPv6.
                0 | 8 => vec![icmp(0, code), icmp(8, code), Self::Protocol(Protocol::ICMP)],
                128 | 129 => vec![icmp(128, code), icmp(129, code), Self::Protocol(Protocol::ICMPV6)],
                _ => vec![self],
            },
        }
    }

    fn matches(self, sample: &Sample) -> bool {
        match self {
            Self::Protocol(protocol) => sample.protocol == protocol,
            Self::Port { source, protocol, range } => {
                let port = if source { sample.source_port } else { sample.destination_port };
                sample.protocol.has_ports()
                    && protocol.is_none_or(|protocol| protocol == sample.protocol)
                    && range.contains(port)
            }
            Self::Icmp(icmp_type, code) => sample.icmp.is_some_and(|(of, with)| {
                icmp_type.is_none_or(|wanted| wanted == of) && code.is_none_or(|wanted| wanted == with)
            }),
        }
    }
}

impl Ports {
    pub(super) fn new(matchers: Vec<Matcher>) -> Self {
        let protocols = matchers.iter().filter_map(|matcher| match matcher {
            Matcher::Protocol(protocol) => Some(*protocol),
            _ => None,
        });
        let spoken: BTreeSet<Protocol> = protocols.chain(PORTED).chain(ICMPS).collect();
        let mut ports = Self { matchers, spoken, ..Self::default() };
        for (sample, part) in ports.samples() {
            let signature = ports.signature(&sample);
            let next = ports.classes.len();
            let class = *ports.by_signature.entry(signature.clone()).or_insert(next);
            if class == next {
                ports.classes.push(PortClass { sample, signature, parts: Vec::new() });
            }
            if let Some(class) = ports.classes.get_mut(class) {
                // Port 0 is valid, but readers do not expect it.
                if class.sample.protocol.has_ports() && class.sample.destination_port == 0 {
                    class.sample = sample;
                }
                class.parts.push(part);
            }
        }
        ports
    }

    /// The number of classes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Always false: there is at least one class.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// A packet of the class.
    #[must_use]
    pub fn sample(&self, class: usize) -> Sample {
        let of_nothing =
            Sample { protocol: Protocol::TCP, source_port: CLIENT_PORT, destination_port: 0, icmp: None };
        self.classes.get(class).map_or(of_nothing, |class| class.sample)
    }

    /// The class of a packet.
    #[must_use]
    pub fn class_of(&self, sample: &Sample) -> usize {
        self.by_signature.get(&self.signature(sample)).copied().unwrap_or_default()
    }

    /// A packet for readers: `tcp/80`, `icmp/8`, `protocol 47`.
    #[must_use]
    pub fn shown(sample: &Sample) -> String {
        let name = sample.protocol.to_string().to_lowercase();
        let from = match sample.source_port {
            0 | CLIENT_PORT => String::new(),
            port => format!(" from {port}"),
        };
        match sample.icmp {
            Some((icmp_type, _)) => format!("{name}/{icmp_type}"),
            None if sample.protocol.has_ports() => format!("{name}/{}{from}", sample.destination_port),
            None => format!("protocol {name}"),
        }
    }

    /// The classes of packets of ordinary clients: those from [`CLIENT_PORT`], and those without ports.
    #[must_use]
    pub fn of_clients(&self) -> Vec<usize> {
        let is = |class: &PortClass| {
            class.parts.iter().any(|part| match part {
                Part::Ports { source, .. } => source.contains(CLIENT_PORT),
                _ => true,
            })
        };
        self.classes.iter().enumerate().filter(|(_, class)| is(class)).map(|(index, _)| index).collect()
    }

    /// The indices of the matchers that match.
    fn signature(&self, sample: &Sample) -> Vec<u32> {
        let holding = self.matchers.iter().enumerate().filter(|(_, matcher)| matcher.matches(sample));
        holding.filter_map(|(index, _)| u32::try_from(index).ok()).collect()
    }

    /// The group number of each class, with groups that these matchers distinguish, and one class for each group.
    pub(super) fn groups(&self, matchers: &BTreeSet<u32>) -> (Vec<usize>, Vec<usize>) {
        let mut numbers: BTreeMap<Vec<u32>, usize> = BTreeMap::new();
        let mut classes = Vec::new();
        let mut groups = Vec::with_capacity(self.classes.len());
        for (index, class) in self.classes.iter().enumerate() {
            let seen = class.signature.iter().filter(|number| matchers.contains(number)).copied().collect();
            let next = classes.len();
            let group = *numbers.entry(seen).or_insert(next);
            if group == next {
                classes.push(index);
            }
            groups.push(group);
        }
        (groups, classes)
    }

    /// One packet for each part of the packet space that no matcher divides.
    fn samples(&self) -> Vec<(Sample, Part)> {
        let mut samples = Vec::new();
        for protocol in PORTED {
            for source in self.cut(protocol, true) {
                for destination in self.cut(protocol, false) {
                    let source_port = if source.contains(CLIENT_PORT) {
                        CLIENT_PORT
                    } else {
                        source.first.max(1).min(source.last)
                    };
                    let destination_port = destination.first.max(1).min(destination.last);
                    let sample = Sample { protocol, source_port, destination_port, icmp: None };
                    samples.push((sample, Part::Ports { protocol, destination, source }));
                }
            }
        }
        for protocol in ICMPS {
            samples.extend(self.icmp(protocol));
        }
        let bare = |protocol| Sample { protocol, source_port: 0, destination_port: 0, icmp: None };
        let known = |protocol: &Protocol| PORTED.contains(protocol) || ICMPS.contains(protocol);
        for protocol in self.spoken.iter().filter(|protocol| !known(protocol)) {
            samples.push((bare(*protocol), Part::Whole(*protocol)));
        }
        // RFC 3692 reserves 253 and 254 for experiments.
        let other = [253, 254].into_iter().chain(1..=255).map(Protocol);
        if let Some(other) = other.into_iter().find(|protocol| !self.spoken.contains(protocol)) {
            samples.push((bare(other), Part::OtherProtocols));
        }
        samples
    }

    /// The ranges into which the rules divide the ports of a protocol.
    fn cut(&self, protocol: Protocol, source_side: bool) -> Vec<PortRange> {
        let mut begins = BTreeSet::from([0u16]);
        for matcher in &self.matchers {
            let Matcher::Port { source, protocol: of, range } = matcher else { continue };
            if *source == source_side && of.is_none_or(|of| of == protocol) {
                begins.insert(range.first);
                begins.extend(range.last.checked_add(1));
            }
        }
        let begins: Vec<u16> = begins.into_iter().collect();
        let ends = begins.iter().skip(1).map(|begin| begin - 1).chain([u16::MAX]);
        begins.iter().zip(ends).map(|(first, last)| PortRange { first: *first, last }).collect()
    }

    fn icmp(&self, protocol: Protocol) -> Vec<(Sample, Part)> {
        let sample = |icmp_type, code| Sample {
            protocol,
            source_port: 0,
            destination_port: 0,
            icmp: Some((icmp_type, code)),
        };
        let mut types: BTreeMap<u8, BTreeSet<u8>> = BTreeMap::new();
        for matcher in &self.matchers {
            if let Matcher::Icmp(Some(icmp_type), code) = matcher {
                types.entry(*icmp_type).or_default().extend(*code);
            }
        }
        let mut samples = Vec::new();
        for (icmp_type, codes) in &types {
            for code in codes {
                let part =
                    Part::Icmp { protocol, icmp_type: Some(*icmp_type), code: Some(*code), others: false };
                samples.push((sample(*icmp_type, *code), part));
            }
            if let Some(other) = (0..=u8::MAX).find(|code| !codes.contains(code)) {
                let others = !codes.is_empty();
                let part = Part::Icmp { protocol, icmp_type: Some(*icmp_type), code: None, others };
                samples.push((sample(*icmp_type, other), part));
            }
        }
        // Echo requests are the most familiar messages.
        let echo = if protocol == Protocol::ICMP { 8 } else { 128 };
        if let Some(other) = std::iter::once(echo).chain(0..=u8::MAX).find(|of| !types.contains_key(of)) {
            let part = Part::Icmp { protocol, icmp_type: None, code: None, others: !types.is_empty() };
            samples.push((sample(other, 0), part));
        }
        samples
    }

    /// These classes for readers: `all`, `none`, `tcp/80,443 udp/53`, `all but tcp/22`. `among` are the classes of
    /// the question.
    #[must_use]
    pub fn named(&self, classes: &[usize], among: &[usize]) -> String {
        let others: Vec<usize> = among.iter().filter(|class| !classes.contains(class)).copied().collect();
        if classes.is_empty() {
            return "none".to_owned();
        }
        if others.is_empty() && self.is_all(among) {
            return "all".to_owned();
        }
        let positive = self.list(classes);
        if others.is_empty() || !self.is_all(among) {
            return positive;
        }
        let negative = format!("all but {}", self.list(&others));
        if negative.len() < positive.len() { negative } else { positive }
    }

    /// Whether these are all classes, or all classes of ordinary clients.
    fn is_all(&self, classes: &[usize]) -> bool {
        self.of_clients().iter().all(|class| classes.contains(class))
    }

    fn list(&self, classes: &[usize]) -> String {
        let mut parts: Vec<Part> = classes
            .iter()
            .filter_map(|class| self.classes.get(*class))
            .flat_map(|class| class.parts.clone())
            .collect();
        parts.sort();
        let mut words: Vec<String> = PORTED.iter().flat_map(|protocol| ported(*protocol, &parts)).collect();
        for protocol in ICMPS {
            words.extend(self.icmp_words(protocol, &parts));
        }
        for part in &parts {
            match part {
                Part::Whole(protocol) => words.push(protocol.to_string().to_lowercase()),
                Part::OtherProtocols => words.push("other protocols".to_owned()),
                _ => {}
            }
        }
        words.join(" ")
    }

    fn icmp_words(&self, protocol: Protocol, parts: &[Part]) -> Vec<String> {
        let name = protocol.to_string().to_lowercase();
        let of = |part: &&Part| matches!(part, Part::Icmp { protocol: of, .. } if *of == protocol);
        let chosen = parts.iter().filter(of).count();
        let every = self.classes.iter().flat_map(|class| &class.parts).filter(of).count();
        if chosen > 0 && chosen == every {
            return vec![name];
        }
        let word = |part: &Part| match part {
            Part::Icmp { icmp_type: Some(icmp_type), code: Some(code), .. } => {
                format!("{name}/{icmp_type} code {code}")
            }
            Part::Icmp { icmp_type: Some(icmp_type), others: false, .. } => format!("{name}/{icmp_type}"),
            Part::Icmp { icmp_type: Some(icmp_type), .. } => format!("{name}/{icmp_type} other codes"),
            _ => format!("{name} other types"),
        };
        parts.iter().filter(of).map(word).collect()
    }
}

/// The ports of one protocol, with neighbours joined: `tcp`, `tcp/80,443,8000-9000`.
fn ported(protocol: Protocol, parts: &[Part]) -> Vec<String> {
    let name = protocol.to_string().to_lowercase();
    let mut by_source: BTreeMap<PortRange, Vec<PortRange>> = BTreeMap::new();
    for part in parts {
        if let Part::Ports { protocol: of, destination, source } = part
            && *of == protocol
        {
            by_source.entry(*source).or_default().push(*destination);
        }
    }
    let mut by_ports: BTreeMap<Vec<PortRange>, Vec<PortRange>> = BTreeMap::new();
    for (source, destinations) in by_source {
        by_ports.entry(joined(destinations)).or_default().push(source);
    }
    let mut words = Vec::new();
    for (destinations, sources) in by_ports {
        let mut word = name.clone();
        if destinations != [EVERY_PORT] {
            let _ = write!(word, "/{}", listed(&destinations));
        }
        let sources = joined(sources);
        if sources != [EVERY_PORT] {
            let _ = write!(word, " from {}", listed(&sources));
        }
        words.push(word);
    }
    words
}

fn joined(mut ranges: Vec<PortRange>) -> Vec<PortRange> {
    ranges.sort();
    let mut all: Vec<PortRange> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if u32::from(last.last) + 1 >= u32::from(range.first) => {
                last.last = last.last.max(range.last)
            }
            _ => all.push(range),
        }
    }
    all
}

fn listed(ranges: &[PortRange]) -> String {
    let one = |range: &PortRange| match range.first == range.last {
        true => range.first.to_string(),
        false => format!("{}-{}", range.first, range.last),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(protocol: Protocol, first: u16, last: u16) -> Matcher {
        Matcher::Port { source: false, protocol: Some(protocol), range: PortRange { first, last } }
    }

    fn sample(text: &str) -> Sample {
        let (protocol, port) = text.split_once('/').unwrap();
        let (port, source) = port.split_once(" from ").unwrap_or((port, "40000"));
        let protocol = Protocol::from_name(protocol).unwrap_or_else(|| Protocol(protocol.parse().unwrap()));
        let ported = protocol.has_ports();
        Sample {
            protocol,
            source_port: if ported { source.parse().unwrap() } else { 0 },
            destination_port: if ported { port.parse().unwrap() } else { 0 },
            icmp: ICMPS.contains(&protocol).then(|| (port.parse().unwrap(), 0)),
        }
    }

    /// Tests which packets belong together, and the name of all others.
    #[test]
    fn classes_and_their_names() {
        let source = Matcher::Port {
            source: true,
            protocol: Some(Protocol::TCP),
            range: PortRange { first: 1000, last: 1999 },
        };
        for (matchers, chosen, name, rest) in [
            (vec![], &["tcp/80"][..], "all", "none"),
            (vec![port(Protocol::TCP, 80, 80)], &["tcp/80"], "tcp/80", "all but tcp/80"),
            (vec![port(Protocol::TCP, 80, 80)], &["tcp/81"], "all but tcp/80", "tcp/80"),
            (
                vec![port(Protocol::TCP, 80, 90), port(Protocol::TCP, 85, 95)],
                &["tcp/80", "tcp/85"],
                "tcp/80-90",
                "all but tcp/80-90",
            ),
            (vec![port(Protocol::TCP, 0, 65535)], &["tcp/1"], "tcp", "all but tcp"),
            (
                vec![port(Protocol::UDP, 53, 53), port(Protocol::TCP, 53, 53)],
                &["tcp/53", "udp/53"],
                "tcp/53 udp/53",
                "all but tcp/53 udp/53",
            ),
            (vec![Matcher::Protocol(Protocol(47))], &["47/0"], "47", "all but 47"),
            (
                vec![Matcher::Icmp(Some(8), None), Matcher::Protocol(Protocol::ICMP)],
                &["icmp/8"],
                "icmp/8",
                "all but icmp/8",
            ),
            (
                vec![Matcher::Icmp(Some(8), None), Matcher::Protocol(Protocol::ICMP)],
                &["icmp/8", "icmp/9"],
                "icmp",
                "all but icmp",
            ),
            (vec![source], &["tcp/1 from 1500"], "tcp from 1000-1999", "all but tcp from 1000-1999"),
        ] {
            let ports = Ports::new(matchers.clone());
            let all: Vec<usize> = (0..ports.len()).collect();
            let mut classes: Vec<usize> = chosen.iter().map(|text| ports.class_of(&sample(text))).collect();
            classes.sort_unstable();
            classes.dedup();
            let others: Vec<usize> = all.iter().filter(|class| !classes.contains(class)).copied().collect();
            assert_eq!(ports.named(&classes, &all), name, "{matchers:?}");
            assert_eq!(ports.named(&others, &all), rest, "{matchers:?}");
            for class in &all {
                assert_eq!(ports.class_of(&ports.sample(*class)), *class, "{matchers:?}");
            }
        }
    }
}

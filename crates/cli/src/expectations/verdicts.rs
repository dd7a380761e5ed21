//! The verdicts of a cluster, for expectations.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::net::{IpVersion, Protocol};
use tortie_oracle::{Oracle, Peer, Question, Snapshot, Verdict};
use tortie_reach::{CLIENT_PORT, Class, ClassKind, Classes, Sample, Why};

use super::sentence::{End, Ends, Expectation, matches, port_text};
use crate::port::PortSpec;
use crate::service::{Services, Translation};
use crate::{decided, explain};

/// The result of an expectation.
pub(super) enum Outcome {
    Holds,
    /// No pod, node or address is meant by this.
    Nothing(String),
    /// The packets with another verdict than expected, and who decides.
    Wrong(Vec<String>),
}

impl Outcome {
    pub(super) fn holds(&self) -> bool {
        matches!(self, Self::Holds)
    }
}

/// Evaluates expectations in one cluster.
pub(super) struct Verdicts<'a> {
    snapshot: &'a Snapshot,
    oracle: Oracle<'a>,
    services: Services<'a>,
    classes: Classes,
    /// The class of each pod, each node and some outsiders.
    class_of: BTreeMap<Peer, usize>,
    /// The node of each pod.
    nodes: BTreeMap<Peer, String>,
}

/// Packets of one kind between two classes, on one node or between nodes. All have the same verdict.
type Kind = (usize, usize, bool, Sample);

impl<'a> Verdicts<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let (oracle, classes) = (Oracle::new(snapshot), Classes::of(&[snapshot]));
        let pods = oracle.pods().map(|pod| {
            let subject = pod.subject();
            let peer =
                Peer::Pod { namespace: subject.namespace().to_owned(), name: subject.name().to_owned() };
            (peer, pod.node().to_owned())
        });
        let nodes = pods.collect();
        let members = |(index, class): (usize, &Class)| {
            class.members.iter().map(|peer| (peer.clone(), index)).collect::<Vec<_>>()
        };
        let class_of = classes.all().iter().enumerate().flat_map(members).collect();
        Self { snapshot, oracle, services: Services::of(snapshot), classes, class_of, nodes }
    }

    pub(super) fn judge(&self, expectation: &Expectation) -> Outcome {
        let (from, to) = match (self.peers(&expectation.from), self.peers(&expectation.to)) {
            (Ok(from), Ok(to)) => (from, to),
            (Err(end), _) | (_, Err(end)) => return Outcome::Nothing(end),
        };
        let samples = match expectation.ports.is_empty() {
            true => self
                .classes
                .ports()
                .of_clients()
                .iter()
                .map(|class| self.classes.ports().sample(*class))
                .collect(),
            false => expectation.ports.iter().map(sample).collect::<Vec<_>>(),
        };
        let mut known: BTreeMap<Kind, Option<String>> = BTreeMap::new();
        let (mut wrong, mut judged) = (Vec::new(), BTreeSet::new());
        for (from, to) in pairs(&from, &to) {
            for sample in &samples {
                let ask = || self.wrong(from, to, sample, expectation.reaches);
                let by = match self.kind(from, to, sample) {
                    Some(kind) => known.entry(kind).or_insert_with(ask).clone(),
                    None => ask(),
                };
                match by {
                    Some(by) if by.is_empty() => continue,
                    Some(by) => wrong.push(format!("{from} → {to} {by}")),
                    None => {}
                }
                judged.extend([from, to]);
            }
        }
        // Nothing was said about an address that has no packets to or from the other end, for instance of another family.
        let named = |end: &End| match end.of {
            Ends::Address(address) => Some(Peer::Address(address)),
            _ => None,
        };
        let mut named = expectation.from.iter().chain(&expectation.to).filter_map(named);
        let unheard = named.find(|address| !judged.contains(address));
        match (wrong.is_empty(), unheard) {
            (false, _) => Outcome::Wrong(wrong),
            (true, Some(address)) => Outcome::Nothing(format!("{address} in {}", ends_text(expectation))),
            (true, None) if judged.is_empty() => Outcome::Nothing(ends_text(expectation)),
            (true, None) => Outcome::Holds,
        }
    }

    /// The kind of the packets, if the ends are in classes.
    fn kind(&self, from: &Peer, to: &Peer, sample: &Sample) -> Option<Kind> {
        // Of a class, each node may translate its ports to other backends.
        if !matches!(self.translation(from, to, sample), Translation::No) {
            return None;
        }
        let (from_class, to_class) = (*self.class_of.get(from)?, *self.class_of.get(to)?);
        Some((from_class, to_class, self.are_together(from, to), *sample))
    }

    /// Whether both ends are on one node.
    fn are_together(&self, from: &Peer, to: &Peer) -> bool {
        match (self.node(from), self.node(to)) {
            (Some(from), Some(to)) => from == to,
            _ => false,
        }
    }

    fn node<'b>(&'b self, peer: &'b Peer) -> Option<&'b String> {
        match peer {
            Peer::Node(name) => Some(name),
            peer => self.nodes.get(peer),
        }
    }

    /// The targets of packets to a Service, to a node port or to a host port.
    fn translation(&self, from: &Peer, to: &Peer, sample: &Sample) -> Translation {
        let Sample { protocol, destination_port: port, icmp, .. } = *sample;
        self.services.translate(from, to, PortSpec { protocol, port, icmp })
    }

    /// The question about a packet, or one for each backend that its node may choose; the reason if its node drops it.
    fn questions(&self, from: &Peer, to: &Peer, sample: &Sample) -> Result<Vec<Question>, String> {
        let Sample { protocol, source_port, destination_port: port, icmp } = *sample;
        let packet = PortSpec { protocol, port, icmp };
        match self.translation(from, to, sample) {
            Translation::To(translated) => Ok(explain::questions(from, &translated, packet, source_port)),
            Translation::No => Ok(vec![explain::question(from.clone(), to.clone(), packet, source_port)]),
            Translation::Dropped(reason) => Err(reason),
        }
    }

    /// Who decides, if the verdict in any family is not the expected one; empty if there are no such packets.
    fn wrong(&self, from: &Peer, to: &Peer, sample: &Sample, reaches: bool) -> Option<String> {
        let questions = match self.questions(from, to, sample) {
            Ok(questions) => questions,
            Err(reason) if reaches => {
                return Some(format!("{} is dropped ({reason})", port_text(sample)));
            }
            Err(_) => return None,
        };
        let mut judged = false;
        for family in [IpVersion::V4, IpVersion::V6] {
            let other = match family {
                IpVersion::V4 => Protocol::ICMPV6,
                IpVersion::V6 => Protocol::ICMP,
            };
            if sample.protocol == other {
                continue;
            }
            for question in &questions {
                let Ok(answer) = self.oracle.evaluate_by(question, family) else { continue };
                judged = true;
                if (answer.verdict == Verdict::Allow) == reaches {
                    continue;
                }
                let word = if reaches { "denied" } else { "allowed" };
                let reasons = Why::of(&answer).by;
                let by: Vec<String> = reasons
                    .iter()
                    .map(|reason| {
                        format!("{}: {}", decided::stop_name(reason.stop), decided::by(self.snapshot, reason))
                    })
                    .collect();
                let by = if by.is_empty() { "no policy applies".to_owned() } else { by.join("; ") };
                return Some(format!("{} is {word} ({by})", port_text(sample)));
            }
        }
        (!judged).then(String::new)
    }

    /// The peers of ends, or the end that means none.
    fn peers(&self, ends: &[End]) -> Result<Vec<Peer>, String> {
        let mut all = BTreeSet::new();
        for end in ends {
            let peers = self.peers_of(&end.of);
            if peers.is_empty() {
                return Err(end.text.clone());
            }
            all.extend(peers);
        }
        Ok(all.into_iter().collect())
    }

    fn peers_of(&self, ends: &Ends) -> Vec<Peer> {
        let pods = |is_meant: &dyn Fn(&tortie_oracle::Subject<'_>) -> bool| -> Vec<Peer> {
            let pods = self.oracle.pods().map(|pod| pod.subject()).filter(|subject| is_meant(subject));
            pods.map(|pod| Peer::Pod { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() })
                .collect()
        };
        let nodes = || self.oracle.nodes().map(|node| node.name.to_owned());
        match ends {
            Ends::AllPods => pods(&|_| true),
            Ends::Pods(namespace, pattern) => {
                pods(&|pod| pod.namespace() == namespace && matches(pattern, pod.name()))
            }
            Ends::Selected(namespace, selector) => pods(&|pod| {
                namespace.as_ref().is_none_or(|namespace| pod.namespace() == namespace)
                    && selector.matches(pod.labels())
            }),
            Ends::Nodes => nodes().map(Peer::Node).collect(),
            Ends::Node(name) => nodes().filter(|node| node == name).map(Peer::Node).collect(),
            Ends::Address(address) => vec![Peer::Address(*address)],
            Ends::Outside => {
                let outside = self.classes.all().iter().filter(|class| class.kind == ClassKind::Outside);
                outside.filter_map(|class| class.members.first().cloned()).collect()
            }
        }
    }

    /// Whether host endpoints decide about packets of nodes.
    pub(super) fn has_host_endpoints(&self) -> bool {
        self.snapshot.iter().any(|(key, _)| key.kind == tortie_api::Kind::HostEndpoint)
    }

    /// The verdicts between pods, the outside, and nodes if host endpoints decide about them, as sentences.
    pub(super) fn record(&self) -> Vec<String> {
        let all = self.classes.all();
        let has_host_endpoints = self.has_host_endpoints();
        let is_recorded = |kind: ClassKind| kind != ClassKind::Nodes || has_host_endpoints;
        let mut sentences = Vec::new();
        for from in all.iter().filter(|class| is_recorded(class.kind)) {
            for to in all.iter().filter(|class| is_recorded(class.kind)) {
                if from.kind == ClassKind::Outside && to.kind == ClassKind::Outside {
                    continue;
                }
                sentences.extend(self.sentences(from, to));
            }
        }
        sentences
    }

    /// Sentences about packets between the members of two classes. Where the verdict depends on the pair, as between
    /// nodes and on one node, or on the family, there is none.
    fn sentences(&self, from: &Class, to: &Class) -> Vec<String> {
        let ports = self.classes.ports();
        let clients = ports.of_clients();
        // One pair on one node and one between nodes stand for all.
        let of = |together| {
            pairs(&from.members, &to.members).find(|(from, to)| self.are_together(from, to) == together)
        };
        let pairs: Vec<(&Peer, &Peer)> = [of(false), of(true)].into_iter().flatten().collect();
        let verdict = |sample: &Sample, reaches: bool| {
            let wrong = || pairs.iter().map(|(from, to)| self.wrong(from, to, sample, reaches));
            wrong().any(|by| by.is_none()) && wrong().flatten().all(|by| by.is_empty())
        };
        let samples: Vec<Sample> = clients.iter().map(|class| ports.sample(*class)).collect();
        let (from_text, to_text) = (peers_text(from.shown()), peers_text(to.shown()));
        let mut sentences = Vec::new();
        for (reaches, words) in [(true, "reaches"), (false, "does not reach")] {
            let fitting: Vec<&Sample> = samples.iter().filter(|sample| verdict(sample, reaches)).collect();
            if fitting.len() == samples.len() {
                return vec![format!("{from_text} {words} {to_text}")];
            }
            let named: Vec<String> = fitting.iter().map(|sample| port_text(sample)).collect();
            if !named.is_empty() {
                sentences.push(format!("{from_text} {words} {to_text} on {}", named.join(", ")));
            }
        }
        sentences
    }
}

fn peers_text<'b>(peers: impl Iterator<Item = &'b Peer>) -> String {
    peers.map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn ends_text(expectation: &Expectation) -> String {
    let text = |ends: &[End]| ends.iter().map(|end| end.text.clone()).collect::<Vec<_>>().join(", ");
    format!("{} → {}", text(&expectation.from), text(&expectation.to))
}

/// Every pair of different ends.
fn pairs<'b>(from: &'b [Peer], to: &'b [Peer]) -> impl Iterator<Item = (&'b Peer, &'b Peer)> {
    from.iter().flat_map(move |from| to.iter().map(move |to| (from, to))).filter(|(from, to)| from != to)
}

fn sample(port: &PortSpec) -> Sample {
    let PortSpec { protocol, port, icmp } = *port;
    let source_port = if protocol.has_ports() { CLIENT_PORT } else { 0 };
    Sample { protocol, source_port, destination_port: port, icmp }
}

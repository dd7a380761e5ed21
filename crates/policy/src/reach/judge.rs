//! Verdicts between classes, each asked of the oracle once.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use tortie_api::net::Direction;

use super::classes::{Class, ClassKind, Classes, Sample};
use super::sight::{AddressSight, EndSight, Holding};
use crate::oracle::{DecidedBy, Oracle, Peer, PolicyName, Question, Snapshot, Trace, Verdict};

/// Verdicts of one cluster between the classes of [`Classes`].
pub struct Judge<'a> {
    classes: &'a Classes,
    /// Which of the snapshots that the classes were made of.
    world: usize,
    oracle: Oracle<'a>,
    /// By class; ingress, then egress.
    views: Vec<[Option<View>; 2]>,
    /// Which classes belong together for some questions.
    groups: HashMap<BTreeSet<u32>, Rc<Vec<usize>>>,
    /// What ends have been found to say on all ports, each once.
    rows: Vec<Vec<Option<Said>>>,
    row_numbers: HashMap<Vec<Option<Said>>, usize>,
    deciders: Vec<DecidedBy>,
    decider_numbers: HashMap<DecidedBy, usize>,
}

/// What one class's policies say in one direction. Peers and ports that these policies do not tell apart are one group.
struct View {
    peers: Rc<Vec<usize>>,
    /// For each group of peers who is asked about: own sample and theirs; `None` where there is no such flow.
    pairs: Vec<Option<(Peer, Peer)>>,
    ports: Vec<usize>,
    port_samples: Vec<usize>,
    said: Vec<Option<Option<Said>>>,
    /// For each group of peers what is said of it on all ports.
    rows: Vec<Option<usize>>,
}

/// What both ends say of packets from one class to another, by the numbers of [`Judge::rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Flow {
    egress: Option<usize>,
    ingress: Option<usize>,
}

/// What the policies at one end say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Said {
    /// Whether the packet passes.
    pub verdict: Verdict,
    /// What decided, for [`Judge::decider`].
    pub by: usize,
}

/// The verdict on packets of one class of ports between two classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cell {
    /// Whether they pass.
    pub verdict: Verdict,
    /// What the sender's policies say; `None` where it is under none.
    pub egress: Option<Said>,
    /// What the receiver's policies say; `None` where it is under none.
    pub ingress: Option<Said>,
}

impl<'a> Judge<'a> {
    /// Over `reduced`, which is [`Classes::reduced`] of the snapshot number `world` that the classes were made of.
    #[must_use]
    pub fn new(classes: &'a Classes, reduced: &'a Snapshot, world: usize) -> Self {
        Self {
            classes,
            world,
            oracle: Oracle::new(reduced),
            views: classes.all().iter().map(|_| [None, None]).collect(),
            groups: HashMap::new(),
            rows: Vec::new(),
            row_numbers: HashMap::new(),
            deciders: Vec::new(),
            decider_numbers: HashMap::new(),
        }
    }

    /// What decided. The profiles of namespaces, which allow everything, count as one: `kns.*`.
    #[must_use]
    pub fn decider(&self, by: usize) -> &DecidedBy {
        self.deciders.get(by).unwrap_or(&DecidedBy::NoProfile)
    }

    /// The verdict; `None` where no such packet leaves a pod or where no policy of pods is concerned: of a pod to itself,
    /// without a common family of addresses, between nodes and outsiders.
    pub fn verdict(&mut self, from: usize, to: usize, port: usize) -> Option<Cell> {
        let flow = self.flow(from, to)?;
        Some(self.cell(flow, port))
    }

    /// What is said of all packets from one class to another, to be looked at with [`Self::cell`]. Equal flows meet equal
    /// fates.
    pub(super) fn flow(&mut self, from: usize, to: usize) -> Option<Flow> {
        let (source, destination) = (self.sight(from)?, self.sight(to)?);
        let (sends, receives) = (source.judged.is_some(), destination.judged.is_some());
        if !(sends || receives) || !in_touch(source, destination) {
            return None;
        }
        let single = |class: usize| self.class(class).is_some_and(|class| class.samples.len() < 2);
        if from == to && single(from) {
            return None;
        }
        let egress = if sends { self.row(from, to, Direction::Egress) } else { None };
        let ingress = if receives { self.row(to, from, Direction::Ingress) } else { None };
        Some(Flow { egress, ingress })
    }

    /// The verdict on packets of a class of ports.
    pub(super) fn cell(&self, flow: Flow, port: usize) -> Cell {
        let said = |row: Option<usize>| self.rows.get(row?)?.get(port).copied().flatten();
        let (egress, ingress) = (said(flow.egress), said(flow.ingress));
        let allows = |said: Option<Said>| said.is_none_or(|said| said.verdict == Verdict::Allow);
        Cell { verdict: Verdict::from(allows(egress) && allows(ingress)), egress, ingress }
    }

    /// The number of what `subject` says of `peer` on all ports.
    fn row(&mut self, subject: usize, peer: usize, direction: Direction) -> Option<usize> {
        let side = usize::from(direction == Direction::Egress);
        self.ensure_view(subject, side, direction)?;
        let view = self.views.get(subject)?.get(side)?.as_ref()?;
        let group = *view.peers.get(peer)?;
        if let Some(row) = view.rows.get(group)? {
            return Some(*row);
        }
        let ports = 0..self.classes.ports().len();
        let said: Vec<Option<Said>> = ports.map(|port| self.said(subject, peer, port, direction)).collect();
        let next = self.rows.len();
        let row = *self.row_numbers.entry(said.clone()).or_insert(next);
        if row == next {
            self.rows.push(said);
        }
        *self.views.get_mut(subject)?.get_mut(side)?.as_mut()?.rows.get_mut(group)? = Some(row);
        Some(row)
    }

    fn ensure_view(&mut self, subject: usize, side: usize, direction: Direction) -> Option<()> {
        if self.views.get(subject)?.get(side)?.is_none() {
            let view = self.view(subject, direction)?;
            *self.views.get_mut(subject)?.get_mut(side)? = Some(view);
        }
        Some(())
    }

    /// What the policies of class `subject` say of packets from or to class `peer`.
    pub fn said(&mut self, subject: usize, peer: usize, port: usize, direction: Direction) -> Option<Said> {
        let side = usize::from(direction == Direction::Egress);
        self.ensure_view(subject, side, direction)?;
        let view = self.views.get(subject)?.get(side)?.as_ref()?;
        let (peers, ports) = (*view.peers.get(peer)?, *view.ports.get(port)?);
        let place = peers * view.port_samples.len() + ports;
        if let Some(said) = view.said.get(place)? {
            return *said;
        }
        let question = view.pairs.get(peers)?.as_ref().map(|(own, theirs)| {
            let sample = self.classes.ports().sample(*view.port_samples.get(ports).unwrap_or(&0));
            let (from, to) = if direction == Direction::Egress { (own, theirs) } else { (theirs, own) };
            Question {
                from: from.clone(),
                to: to.clone(),
                protocol: sample.protocol,
                source_port: sample.source_port,
                destination_port: sample.destination_port,
                icmp: sample.icmp,
                via: None,
            }
        });
        let said = question.and_then(|question| self.ask(&question, direction));
        *self.views.get_mut(subject)?.get_mut(side)?.as_mut()?.said.get_mut(place)? = Some(said);
        said
    }

    /// A packet to or from each peer and port that the policies of a class tell apart, as the oracle judges it at the
    /// class's end: peer, port, and the oracle's words.
    pub(crate) fn traces(&mut self, subject: usize, direction: Direction) -> Vec<(usize, usize, Trace)> {
        let Some(view) = self.view(subject, direction) else { return Vec::new() };
        let mut asked = vec![false; view.pairs.len()];
        let mut traces = Vec::new();
        for (peer, group) in view.peers.iter().enumerate() {
            for port in &view.port_samples {
                if asked.get(*group) == Some(&false)
                    && let Some(trace) = self.trace(subject, peer, *port, direction)
                {
                    traces.push((peer, *port, trace));
                }
            }
            let answered = traces.last().is_some_and(|(last, ..)| *last == peer);
            if let Some(slot) = asked.get_mut(*group).filter(|_| answered) {
                *slot = true;
            }
        }
        traces
    }

    /// The oracle's words about one packet between two classes, at the end of `subject`.
    pub(crate) fn trace(
        &self,
        subject: usize,
        peer: usize,
        port: usize,
        direction: Direction,
    ) -> Option<Trace> {
        let (from, to) = if direction == Direction::Egress { (subject, peer) } else { (peer, subject) };
        self.oracle.one_end(&self.question(from, to, port)?, direction).ok()?
    }

    /// One packet from the first class to the second, as the oracle is asked about it.
    #[must_use]
    pub fn question(&self, from: usize, to: usize, port: usize) -> Option<Question> {
        let (source, destination) = (self.class(from)?, self.class(to)?);
        let (from, to) = pair(source, destination, from == to, source.kind == ClassKind::Nodes)?;
        let sample = self.classes.ports().sample(port);
        let (source_port, destination_port) = (sample.source_port, sample.destination_port);
        Some(Question {
            from,
            to,
            protocol: sample.protocol,
            source_port,
            destination_port,
            icmp: sample.icmp,
            via: None,
        })
    }

    fn ask(&mut self, question: &Question, direction: Direction) -> Option<Said> {
        let trace = self.oracle.one_end(question, direction).ok()??;
        let by = self.number(trace.decided_by);
        Some(Said { verdict: trace.verdict, by })
    }

    fn number(&mut self, mut by: DecidedBy) -> usize {
        if let DecidedBy::Rule { policy: PolicyName { kind, name, .. }, .. } = &mut by
            && kind == "Profile"
            && matches!(self.oracle.profile_of(name), crate::oracle::SeenProfile::AllowsAll)
        {
            "kns.*".clone_into(name);
        }
        let next = self.deciders.len();
        let number = *self.decider_numbers.entry(by.clone()).or_insert(next);
        if number == next {
            self.deciders.push(by);
        }
        number
    }

    fn class(&self, class: usize) -> Option<&'a Class> {
        self.classes.all().get(class)
    }

    fn sight(&self, class: usize) -> Option<&'a EndSight> {
        self.class(class)?.sights.get(self.world)?.as_ref()
    }

    fn view(&mut self, subject: usize, direction: Direction) -> Option<View> {
        let uses = self.classes.asked.get(self.world)?.of(self.sight(subject)?.judged.as_ref()?, direction);
        let (ports, port_samples) = self.classes.ports().groups(&uses.matchers);
        let own = self.class(subject)?;
        let peers = self.groups(uses.atoms);
        let mut pairs: Vec<Option<(Peer, Peer)>> = vec![None; peers.iter().max().map_or(0, |last| last + 1)];
        for (index, (class, group)) in self.classes.all().iter().zip(peers.iter()).enumerate() {
            // A pod on its own is no peer of itself; another class of the group stands for it.
            if let Some(slot) = pairs.get_mut(*group).filter(|slot| slot.is_none())
                && self.sight(index).is_some()
            {
                let probed = direction == Direction::Ingress && class.kind == ClassKind::Nodes;
                *slot = pair(own, class, index == subject, probed);
            }
        }
        let said = vec![None; pairs.len() * port_samples.len()];
        let rows = vec![None; pairs.len()];
        Some(View { peers, pairs, ports, port_samples, said, rows })
    }

    /// For each class the number of its group among those that these questions tell apart.
    fn groups(&mut self, atoms: BTreeSet<u32>) -> Rc<Vec<usize>> {
        if let Some(known) = self.groups.get(&atoms) {
            return known.clone();
        }
        let mut numbers: HashMap<Group, usize> = HashMap::new();
        let classes = self.classes.all().iter().enumerate();
        let groups = classes.map(|(index, class)| {
            let key = match self.sight(index) {
                Some(sight) if class.kind != ClassKind::Nodes => Group::Alike(Restricted::new(sight, &atoms)),
                Some(_) => Group::Node(index),
                None => Group::Absent,
            };
            let next = numbers.len();
            *numbers.entry(key).or_insert(next)
        });
        let groups = Rc::new(groups.collect::<Vec<usize>>());
        self.groups.insert(atoms, groups.clone());
        groups
    }
}

/// Peers that a set of policies does not tell apart.
#[derive(PartialEq, Eq, Hash)]
enum Group {
    Alike(Restricted),
    /// Nodes reach their own pods whatever policy says, so each class of them is asked about.
    Node(usize),
    Absent,
}

/// What of a sight some policies ask about.
#[derive(PartialEq, Eq, Hash)]
struct Restricted {
    v4: Option<AddressSight>,
    v6: Option<AddressSight>,
}

impl Restricted {
    fn new(sight: &EndSight, atoms: &BTreeSet<u32>) -> Self {
        let holding = |all: &Holding| all.iter().filter(|number| atoms.contains(number)).copied().collect();
        let address = |sight: &Option<AddressSight>| {
            sight.as_ref().map(|sight| AddressSight {
                holding: holding(&sight.holding),
                present: sight.present.iter().map(holding).collect(),
            })
        };
        Self { v4: address(&sight.v4), v6: address(&sight.v6) }
    }
}

/// Whether both have addresses of one family.
fn in_touch(a: &EndSight, b: &EndSight) -> bool {
    (a.v4.is_some() && b.v4.is_some()) || (a.v6.is_some() && b.v6.is_some())
}

/// Two that stand for their classes: not the same one, and where a node `probes` not one of its own pods.
fn pair(own: &Class, other: &Class, same: bool, probes: bool) -> Option<(Peer, Peer)> {
    let apart = |a: &Sample, b: &Sample| if probes { a.node != b.node } else { !same || a.peer != b.peer };
    let pairs = own.samples.iter().flat_map(|a| other.samples.iter().map(move |b| (a, b)));
    let mut pairs = pairs.filter(|(a, b)| apart(a, b));
    pairs.next().map(|(a, b)| (a.peer.clone(), b.peer.clone()))
}

//! Verdicts between classes, each asked of the oracle once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::rc::Rc;

use tortie_api::net::IpVersion;

use super::atoms::Uses;
use super::classes::{Class, Classes};
use super::hosts::Interfaces;
use super::sight::{AddressSight, EndSight, Holding, Profile};
use super::way::{ByStop, ByWay, FAMILIES, Placement, Scope, Stop, Way, family_number, scopes};
use super::why::{Decider, Reason, Why};
use crate::oracle::{DecidedBy, Oracle, PolicyName, PolicyTrace, Question, Snapshot, Table, Trace, Verdict};

/// Verdicts of one cluster between the classes of [`Classes`].
pub struct Judge<'a> {
    classes: &'a Classes,
    /// Which of the snapshots that the classes were made of.
    world: usize,
    oracle: Oracle<'a>,
    views: Vec<View>,
    /// The view of each class, by stop and family.
    view_of: Vec<[[Option<usize>; 2]; 4]>,
    seats: HashMap<Seat<'a>, usize>,
    /// Which classes belong together for some questions, by family.
    groups: HashMap<(IpVersion, BTreeSet<u32>), Rc<Vec<usize>>>,
    /// What has been found to be said of all ports, each once.
    rows: Vec<Vec<Option<Said>>>,
    row_numbers: HashMap<Vec<Option<Said>>, Row>,
    deciders: Vec<Decider>,
    decider_numbers: HashMap<Decider, usize>,
}

/// What is said at one stop by one family. Peers and ports that are not told apart there are one group.
struct View {
    peers: Rc<Vec<usize>>,
    ports: Vec<usize>,
    port_samples: Vec<usize>,
    /// For each group of peers what is said of it on all ports, once that was asked.
    rows: Vec<Option<Option<Row>>>,
}

/// The number of what is said of all ports, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Row(NonZeroU32);

/// What is said on the way of all packets from one class to another. Equal flows meet equal fates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Flow(ByStop<Row>);

/// What the policies at one stop say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Said {
    /// Whether the packet passes.
    pub verdict: Verdict,
    /// What decided, for [`Judge::why`].
    pub by: usize,
}

/// The verdict on packets of one class of ports between two classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cell {
    /// Whether they pass.
    pub verdict: Verdict,
    /// What is said at each stop, in the order of [`Stop::ALL`]; `None` where nobody has a say.
    pub said: ByStop<Said>,
}

impl Flow {
    /// Whether anybody has a say.
    pub(super) fn is_asked(self) -> bool {
        self.0.iter().any(Option::is_some)
    }
}

impl Cell {
    /// What is said at one stop.
    #[must_use]
    pub fn at(&self, stop: Stop) -> Option<Said> {
        self.said.get(stop.number()).copied().flatten()
    }
}

impl<'a> Judge<'a> {
    /// Over `reduced`, which is [`Classes::reduced`] of the snapshot number `world` that the classes were made of.
    #[must_use]
    pub fn new(classes: &'a Classes, reduced: &'a Snapshot, world: usize) -> Self {
        Self {
            classes,
            world,
            oracle: Oracle::new(reduced),
            views: Vec::new(),
            view_of: vec![Default::default(); classes.all().len()],
            seats: HashMap::new(),
            groups: HashMap::new(),
            rows: Vec::new(),
            row_numbers: HashMap::new(),
            deciders: Vec::new(),
            decider_numbers: HashMap::new(),
        }
    }

    /// What decided. The profiles of namespaces, which allow everything, count as one: `kns.*`.
    fn decider(&self, by: usize) -> Option<&Decider> {
        self.deciders.get(by)
    }

    /// The ways from one class to another that differ in whom they meet; none where no policy is concerned: of a pod to
    /// itself, without a common family of addresses, of a node to its own pods.
    pub fn ways(&mut self, from: usize, to: usize) -> Vec<Way> {
        let flows = self.flows(from, to);
        let asked = |way: &Way| flows.get(way.number()).copied().flatten().is_some_and(Flow::is_asked);
        Way::ALL.into_iter().filter(asked).collect()
    }

    /// The verdict on packets of a class of ports; `None` where there are no such flows.
    pub fn verdict(&mut self, from: usize, to: usize, way: Way, port: usize) -> Option<Cell> {
        let flow = flow_of(&self.flows(from, to), way).filter(|flow| flow.is_asked())?;
        Some(self.cell(flow, port))
    }

    /// What is said of all packets from one class to another on each way that matters, to be looked at with
    /// [`Self::cell`].
    pub(super) fn flows(&mut self, from: usize, to: usize) -> ByWay<Flow> {
        let mut flows = ByWay::default();
        let (Some(source), Some(destination)) = (self.sight(from), self.sight(to)) else { return flows };
        let ends = self.classes.ends(from, to);
        for family in FAMILIES {
            if !source.reaches(destination, family) {
                continue;
            }
            for (placement, there_are) in
                [(Placement::Apart, ends.apart), (Placement::Together, ends.together)]
            {
                let way = Way { family, placement };
                let flow = there_are.then(|| self.flow(from, to, way));
                if let Some(slot) = flows.get_mut(way.number()) {
                    *slot = flow;
                }
            }
        }
        flows
    }

    fn flow(&mut self, from: usize, to: usize, way: Way) -> Flow {
        let mut flow = Flow::default();
        for stop in Stop::ALL {
            let (subject, peer) = stop.subject_and_peer(from, to);
            let row = match way.placement {
                Placement::Together if stop.is_host() => self.own_node(from, to, stop),
                _ => self.row(subject, peer, stop, way.family),
            };
            if let Some(slot) = flow.0.get_mut(stop.number()) {
                *slot = row;
            }
        }
        flow
    }

    /// What is said of packets from one class to another: each cell, of which of these ports, and on which ways.
    pub fn cells(&mut self, from: usize, to: usize, ports: &[usize]) -> Vec<(Scope, Cell, Vec<usize>)> {
        let flows = self.flows(from, to);
        let (mut ways, mut by_cell) = (Vec::new(), BTreeMap::<(Cell, Vec<usize>), Vec<Way>>::new());
        for (way, flow) in Way::ALL.into_iter().zip(flows) {
            let Some(flow) = flow.filter(|flow| flow.is_asked()) else { continue };
            ways.push(way);
            let mut ports_of: BTreeMap<Cell, Vec<usize>> = BTreeMap::new();
            for port in ports {
                ports_of.entry(self.cell(flow, *port)).or_default().push(*port);
            }
            for cell in ports_of {
                by_cell.entry(cell).or_default().push(way);
            }
        }
        let scoped = |((cell, ports), of): ((Cell, Vec<usize>), Vec<Way>)| {
            scopes(&of, &ways).into_iter().map(move |scope| (scope, cell, ports.clone()))
        };
        by_cell.into_iter().flat_map(scoped).collect()
    }

    /// What led to a cell's verdict.
    #[must_use]
    pub fn why(&self, cell: &Cell) -> Why {
        let decides = |said: &Said| said.verdict == cell.verdict;
        self.why_of(cell.verdict, cell.said.map(|said| said.filter(decides).map(|said| said.by)))
    }

    pub(super) fn why_of(&self, verdict: Verdict, by: ByStop<usize>) -> Why {
        let reason =
            |(stop, by): (Stop, Option<usize>)| Some(Reason { stop, decider: self.decider(by?)?.clone() });
        Why { verdict, by: Stop::ALL.into_iter().zip(by).filter_map(reason).collect() }
    }

    /// The number of what is said at one stop of packets from one class to another between nodes, or if there are only
    /// such, on one; `None` where there are no such packets.
    pub(super) fn row_at(
        &mut self,
        from: usize,
        to: usize,
        stop: Stop,
        family: IpVersion,
    ) -> Option<Option<Row>> {
        let (subject, peer) = stop.subject_and_peer(from, to);
        self.is_asked(from, to, stop, family).then(|| self.row(subject, peer, stop, family))
    }

    /// Whether packets of a class of ports pass a stop of which this is said.
    pub(super) fn allows(&self, row: Option<Row>, port: usize) -> bool {
        let said = row.and_then(|row| self.rows.get(row.index())?.get(port).copied().flatten());
        said.is_none_or(|said| said.verdict == Verdict::Allow)
    }

    /// The verdict on packets of a class of ports.
    pub(super) fn cell(&self, flow: Flow, port: usize) -> Cell {
        let said = flow.0.map(|row| self.rows.get(row?.index())?.get(port).copied().flatten());
        let allows = |said: &Option<Said>| said.is_none_or(|said| said.verdict == Verdict::Allow);
        Cell { verdict: Verdict::from(said.iter().all(allows)), said }
    }

    /// Whether it is a node that drops what its own pods send to it.
    pub(super) fn is_closed(&self, class: usize) -> bool {
        self.sight(class).is_some_and(|sight| sight.closed)
    }

    /// What a node says of what its own pods send to it.
    fn own_node(&mut self, from: usize, to: usize, stop: Stop) -> Option<Row> {
        let to_node = stop == Stop::ReceiverNode && self.sight(from)?.judged.is_some();
        if !to_node || !self.is_closed(to) {
            return None;
        }
        let by = DecidedBy::EndpointToHost { action: "Drop".to_owned() };
        let by = self.decider_number(Decider { by, table: Table::Normal, reply: false });
        let said = Some(Said { verdict: Verdict::Deny, by });
        self.row_number(vec![said; self.classes.ports().len()])
    }

    /// The number of what is said of `peer` on all ports.
    fn row(&mut self, subject: usize, peer: usize, stop: Stop, family: IpVersion) -> Option<Row> {
        let number = self.view(subject, stop, family)?;
        let view = self.views.get(number)?;
        let group = *view.peers.get(peer)?;
        if let Some(known) = view.rows.get(group)? {
            return *known;
        }
        let (from, to) = stop.sender_and_receiver(subject, peer);
        let said: Vec<Option<Said>> = view
            .port_samples
            .clone()
            .into_iter()
            .map(|port| self.ask(from, to, port, stop, family))
            .collect();
        let view = self.views.get(number)?;
        let said = view.ports.iter().map(|group| said.get(*group).copied().flatten()).collect();
        let row = self.row_number(said);
        *self.views.get_mut(number)?.rows.get_mut(group)? = Some(row);
        row
    }

    /// `None` where nothing is said of any port.
    fn row_number(&mut self, said: Vec<Option<Said>>) -> Option<Row> {
        if said.iter().all(Option::is_none) {
            return None;
        }
        let next = Row::at(self.rows.len())?;
        let row = *self.row_numbers.entry(said.clone()).or_insert(next);
        if row == next {
            self.rows.push(said);
        }
        Some(row)
    }

    fn ask(&mut self, from: usize, to: usize, port: usize, stop: Stop, family: IpVersion) -> Option<Said> {
        let (verdict, decider) = Decider::of(&self.traces_of(from, to, port, stop, family))?;
        Some(Said { verdict, by: self.decider_number(decider) })
    }

    /// The oracle's words about one packet from one class to another, at one stop.
    pub(crate) fn traces_of(
        &self,
        from: usize,
        to: usize,
        port: usize,
        stop: Stop,
        family: IpVersion,
    ) -> Vec<Trace> {
        let Some(question) = self.question(from, to, port, stop) else { return Vec::new() };
        let traces = match stop.is_host() {
            true => self.oracle.at_host(&question, family, stop.direction()),
            false => self.oracle.at_pod(&question, family, stop.direction()),
        };
        traces.unwrap_or_default()
    }

    /// What a profile says of one packet from one class to another.
    pub(crate) fn by_profile(
        &self,
        profile: &str,
        (from, to, port): (usize, usize, usize),
        stop: Stop,
        family: IpVersion,
    ) -> Option<PolicyTrace> {
        let question = self.question(from, to, port, stop)?;
        self.oracle.by_profile(&question, family, (profile, stop.direction())).ok()
    }

    /// One packet of each kind that the policies of these classes tell apart at one stop: from, to, and port.
    pub(crate) fn packets(
        &mut self,
        subjects: impl Fn(usize) -> bool,
        stop: Stop,
        family: IpVersion,
    ) -> Vec<(usize, usize, usize)> {
        let mut asked = BTreeSet::new();
        let mut packets = Vec::new();
        let classes = 0..self.classes.all().len();
        for subject in classes.filter(|class| subjects(*class)) {
            let Some(number) = self.view(subject, stop, family) else { continue };
            let Some(View { peers, port_samples, .. }) = self.views.get(number) else { continue };
            for (peer, group) in peers.iter().enumerate() {
                let (from, to) = stop.sender_and_receiver(subject, peer);
                if !asked.contains(&(number, *group)) && self.is_asked(from, to, stop, family) {
                    asked.insert((number, *group));
                    packets.extend(port_samples.iter().map(|port| (from, to, *port)));
                }
            }
        }
        packets
    }

    /// Whether packets from one class to another meet the policies of this stop.
    fn is_asked(&self, from: usize, to: usize, stop: Stop, family: IpVersion) -> bool {
        let (Some(source), Some(destination)) = (self.sight(from), self.sight(to)) else { return false };
        let ends = self.classes.ends(from, to);
        source.reaches(destination, family) && (ends.apart || (ends.together && !stop.is_host()))
    }

    /// One packet from the first class to the second, as the oracle is asked about it for a stop.
    #[must_use]
    pub fn question(&self, from: usize, to: usize, port: usize, stop: Stop) -> Option<Question> {
        let (from, to) = self.classes.pair(from, to, stop.is_host())?;
        let sample = self.classes.ports().sample(port);
        let (source_port, destination_port) = (sample.source_port, sample.destination_port);
        let (protocol, icmp) = (sample.protocol, sample.icmp);
        Some(Question { from, to, protocol, source_port, destination_port, icmp, via: None })
    }

    fn decider_number(&mut self, mut decider: Decider) -> usize {
        if let DecidedBy::Rule { policy: PolicyName { kind, name, .. }, .. } = &mut decider.by
            && kind == "Profile"
            && matches!(self.oracle.profile_of(name), crate::oracle::SeenProfile::AllowsAll)
        {
            "kns.*".clone_into(name);
        }
        let next = self.deciders.len();
        let number = *self.decider_numbers.entry(decider.clone()).or_insert(next);
        if number == next {
            self.deciders.push(decider);
        }
        number
    }

    fn class(&self, class: usize) -> Option<&'a Class> {
        self.classes.all().get(class)
    }

    fn sight(&self, class: usize) -> Option<&'a EndSight> {
        self.class(class)?.sights.get(self.world)?.as_ref()
    }

    /// The number of the view of a class; `None` where it is under no policy there.
    fn view(&mut self, subject: usize, stop: Stop, family: IpVersion) -> Option<usize> {
        if stop.is_host() && !self.classes.with_hosts() {
            return None;
        }
        let slot =
            |all: &[[Option<usize>; 2]; 4]| all.get(stop.number())?.get(family_number(family)).copied();
        if let Some(known) = self.view_of.get(subject).and_then(slot)? {
            return Some(known);
        }
        let sight = self.sight(subject)?;
        let asked = self.classes.asked.get(self.world)?;
        let (whose, uses) = match stop.is_host() {
            true => {
                let uses = self.classes.uses_of_hosts(sight, self.world, stop.direction())?;
                let forwarded = sight.judged.is_some();
                (Whose::Hosts { interfaces: sight.interfaces, forwarded }, uses)
            }
            false => {
                let judged = sight.judged.as_ref()?;
                let policies = judged.of(stop.direction());
                let uses = asked.of_pod(judged, stop.direction());
                (Whose::Pods { policies, profiles: &judged.profiles }, uses)
            }
        };
        let own = Restricted::new(sight, family, &uses.atoms);
        let seat = Seat { stop, family, whose, own };
        let number = match self.seats.get(&seat) {
            Some(known) => *known,
            None => {
                let number = self.new_view(uses, family);
                self.seats.insert(seat, number);
                number
            }
        };
        *self.view_of.get_mut(subject)?.get_mut(stop.number())?.get_mut(family_number(family))? =
            Some(number);
        Some(number)
    }

    fn new_view(&mut self, uses: Uses, family: IpVersion) -> usize {
        let (ports, port_samples) = self.classes.ports().groups(&uses.matchers);
        let peers = self.groups(family, uses.atoms);
        let rows = vec![None; peers.iter().max().map_or(0, |last| last + 1)];
        self.views.push(View { peers, ports, port_samples, rows });
        self.views.len() - 1
    }

    /// For each class the number of its group among those that these questions tell apart.
    fn groups(&mut self, family: IpVersion, atoms: BTreeSet<u32>) -> Rc<Vec<usize>> {
        let key = (family, atoms);
        if let Some(known) = self.groups.get(&key) {
            return known.clone();
        }
        let mut numbers: HashMap<Option<Restricted>, usize> = HashMap::new();
        let groups = (0..self.classes.all().len()).map(|class| {
            let seen = self.sight(class).map(|sight| Restricted::new(sight, family, &key.1));
            let next = numbers.len();
            *numbers.entry(seen).or_insert(next)
        });
        let groups = Rc::new(groups.collect::<Vec<usize>>());
        self.groups.insert(key, groups.clone());
        groups
    }
}

/// The flow on a way. Where nothing depends on the nodes, one flow stands for both placements.
pub(super) fn flow_of(flows: &ByWay<Flow>, way: Way) -> Option<Flow> {
    let of = |way: Way| flows.get(way.number()).copied().flatten();
    of(way).or_else(|| of(Way { placement: Placement::Apart, ..way }))
}

impl Row {
    fn at(index: usize) -> Option<Self> {
        NonZeroU32::new(u32::try_from(index).ok()?.checked_add(1)?).map(Self)
    }

    fn index(self) -> usize {
        usize::try_from(self.0.get()).unwrap_or(usize::MAX) - 1
    }
}

/// Everything that decides what is said of whom at a stop: classes with equal seats share a view.
#[derive(PartialEq, Eq, Hash)]
struct Seat<'a> {
    stop: Stop,
    family: IpVersion,
    whose: Whose<'a>,
    own: Restricted,
}

/// Whose policies are asked.
#[derive(PartialEq, Eq, Hash)]
enum Whose<'a> {
    Pods {
        policies: &'a [usize],
        profiles: &'a [Profile],
    },
    /// Those of host endpoints, about what their node forwards or about its own packets.
    Hosts {
        interfaces: Interfaces,
        forwarded: bool,
    },
}

/// What of a sight some policies ask about.
#[derive(PartialEq, Eq, Hash)]
struct Restricted {
    address: Option<AddressSight>,
    tunnel: Option<AddressSight>,
    translated: Option<AddressSight>,
    /// Which of the addresses the packet has, and by which interface it goes.
    routed: [bool; 4],
}

impl Restricted {
    fn new(sight: &EndSight, family: IpVersion, atoms: &BTreeSet<u32>) -> Self {
        let holding = |all: &Holding| all.iter().filter(|number| atoms.contains(number)).copied().collect();
        let address = |sight: &AddressSight| AddressSight {
            holding: holding(&sight.holding),
            present: sight.present.iter().map(holding).collect(),
        };
        let routed = sight.by(family);
        Self {
            address: routed.map(|routed| address(&routed.address)),
            tunnel: sight.tunnel.as_ref().map(address),
            translated: routed.and_then(|routed| routed.translated.as_ref()).map(address),
            routed: [
                sight.anchored,
                sight.overlaid,
                routed.is_some_and(|routed| routed.overlaid),
                routed.is_some_and(|routed| routed.pooled),
            ],
        }
    }
}

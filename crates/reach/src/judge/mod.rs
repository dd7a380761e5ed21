//! Verdicts between classes, each evaluated once by the oracle.

mod views;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use tortie_api::net::IpVersion;

use super::class::Class;
use super::classes::Classes;
use super::path::{ByPath, ByStop, FAMILIES, Path, Placement, Scope, Spot, Stop, scopes};
use super::signature::EndSignature;
use super::why::{Decider, Reason, Why};
use tortie_oracle::{DecidedBy, Oracle, PolicyName, PolicyTrace, Question, Snapshot, Table, Trace, Verdict};
pub(super) use views::Row;
use views::{Seat, View};

/// Verdicts of one cluster between the classes of [`Classes`].
pub struct Judge<'a> {
    classes: &'a Classes,
    /// The index of the snapshot among those of the classes.
    world: usize,
    oracle: Oracle<'a>,
    views: Vec<View>,
    /// The view of each class, by stop and family.
    view_of: Vec<[[Option<usize>; 2]; Spot::COUNT]>,
    seats: HashMap<Seat<'a>, usize>,
    /// The groups of classes that some criteria distinguish, by family.
    groups: HashMap<(IpVersion, BTreeSet<u32>), Rc<Vec<usize>>>,
    /// The distinct results for all ports.
    rows: Vec<Vec<Option<Decision>>>,
    row_numbers: HashMap<Vec<Option<Decision>>, Row>,
    deciders: Vec<Decider>,
    decider_numbers: HashMap<Decider, usize>,
}

/// The results at all stops for packets from one class to another. Equal flows have equal verdicts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Flow(ByStop<Row>);

/// The result of the policies at one stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decision {
    /// Whether the packet passes.
    pub verdict: Verdict,
    /// The index of the decider, for [`Judge::why`].
    pub by: usize,
}

/// The verdict on packets of one class of ports between two classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cell {
    /// Whether they pass.
    pub verdict: Verdict,
    /// The result at each stop, in the order of [`Stop::ALL`]; `None` if no policy applies there.
    pub stops: ByStop<Decision>,
}

impl Flow {
    /// Whether any policy applies.
    pub(super) fn meets_policy(self) -> bool {
        self.0.iter().any(Option::is_some)
    }
}

impl Cell {
    /// The result at one stop.
    #[must_use]
    pub fn at(&self, stop: Stop) -> Option<Decision> {
        self.stops.get(stop.number()).copied().flatten()
    }
}

impl<'a> Judge<'a> {
    /// Creates a judge of `reduced`, which is [`Classes::reduced`] of the snapshot with index `world` among those of
    /// the classes.
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

    /// The decider with this index. The profiles of namespaces, which allow everything, count as one: `kns.*`.
    fn decider(&self, by: usize) -> Option<&Decider> {
        self.deciders.get(by)
    }

    /// The verdict on packets of a class of ports; `None` if there are no such flows.
    pub fn verdict(&mut self, from: usize, to: usize, path: Path, port: usize) -> Option<Cell> {
        let flow = flow_of(&self.flows(from, to), path).filter(|flow| flow.meets_policy())?;
        Some(self.cell(flow, port))
    }

    /// The results for all packets from one class to another, on each path that matters, for [`Self::cell`].
    pub(super) fn flows(&mut self, from: usize, to: usize) -> ByPath<Flow> {
        let mut flows = ByPath::default();
        let (Some(source), Some(destination)) = (self.signature(from), self.signature(to)) else {
            return flows;
        };
        let ends = self.classes.ends(from, to);
        for family in FAMILIES {
            if !source.reaches(destination, family) {
                continue;
            }
            for (placement, there_are) in
                [(Placement::Apart, ends.apart), (Placement::Together, ends.together)]
            {
                let path = Path { family, placement };
                let flow = there_are.then(|| self.flow(from, to, path));
                if let Some(slot) = flows.get_mut(path.number()) {
                    *slot = flow;
                }
            }
        }
        flows
    }

    fn flow(&mut self, from: usize, to: usize, path: Path) -> Flow {
        let mut flow = Flow::default();
        for stop in Stop::ALL {
            let (subject, peer) = stop.subject_and_peer(from, to);
            let own_node = match path.placement {
                Placement::Together if stop.is_host() => self.own_node(from, to, stop),
                _ => None,
            };
            let row = match own_node {
                Some(row) => Some(row),
                None => self.row(subject, peer, Spot { stop, placement: path.placement }, path.family),
            };
            if let Some(slot) = flow.0.get_mut(stop.number()) {
                *slot = row;
            }
        }
        flow
    }

    /// The verdicts for packets from one class to another: each cell with its scope, and those of these ports that
    /// have it.
    pub fn cells(&mut self, from: usize, to: usize, ports: &[usize]) -> Vec<(Scope, Cell, Vec<usize>)> {
        let flows = self.flows(from, to);
        let (mut paths, mut by_cell) = (Vec::new(), BTreeMap::<(Cell, Vec<usize>), Vec<Path>>::new());
        for (path, flow) in Path::ALL.into_iter().zip(flows) {
            let Some(flow) = flow.filter(|flow| flow.meets_policy()) else { continue };
            paths.push(path);
            let mut ports_of: BTreeMap<Cell, Vec<usize>> = BTreeMap::new();
            for port in ports {
                ports_of.entry(self.cell(flow, *port)).or_default().push(*port);
            }
            for cell in ports_of {
                by_cell.entry(cell).or_default().push(path);
            }
        }
        let scoped = |((cell, ports), of): ((Cell, Vec<usize>), Vec<Path>)| {
            scopes(&of, &paths).into_iter().map(move |scope| (scope, cell, ports.clone()))
        };
        by_cell.into_iter().flat_map(scoped).collect()
    }

    /// The deciders of a cell's verdict.
    #[must_use]
    pub fn why(&self, cell: &Cell) -> Why {
        let decides = |decision: &Decision| decision.verdict == cell.verdict;
        self.why_of(
            cell.verdict,
            cell.stops.map(|decision| decision.filter(decides).map(|decision| decision.by)),
        )
    }

    pub(super) fn why_of(&self, verdict: Verdict, by: ByStop<usize>) -> Why {
        let reason =
            |(stop, by): (Stop, Option<usize>)| Some(Reason { stop, decider: self.decider(by?)?.clone() });
        Why { verdict, by: Stop::ALL.into_iter().zip(by).filter_map(reason).collect() }
    }

    /// The index of the results at one stop for packets from one class to another, between nodes and inside one;
    /// `None` if there are no such packets.
    pub(super) fn rows_at(
        &mut self,
        from: usize,
        to: usize,
        stop: Stop,
        family: IpVersion,
    ) -> [Option<Option<Row>>; 2] {
        let (subject, peer) = stop.subject_and_peer(from, to);
        let (Some(source), Some(destination)) = (self.signature(from), self.signature(to)) else {
            return [None; 2];
        };
        let reaches = source.reaches(destination, family);
        let ends = self.classes.ends(from, to);
        [(Placement::Apart, ends.apart), (Placement::Together, ends.together)].map(
            |(placement, there_are)| {
                let row = || self.row(subject, peer, Spot { stop, placement }, family);
                (reaches && there_are).then(row)
            },
        )
    }

    /// Whether packets of a class of ports pass a stop with these results.
    pub(super) fn allows(&self, row: Option<Row>, port: usize) -> bool {
        let decision = row.and_then(|row| self.rows.get(row.index())?.get(port).copied().flatten());
        decision.is_none_or(|decision| decision.verdict == Verdict::Allow)
    }

    /// The verdict on packets of a class of ports.
    pub(super) fn cell(&self, flow: Flow, port: usize) -> Cell {
        let stops = flow.0.map(|row| self.rows.get(row?.index())?.get(port).copied().flatten());
        let allows =
            |decision: &Option<Decision>| decision.is_none_or(|decision| decision.verdict == Verdict::Allow);
        Cell { verdict: Verdict::from(stops.iter().all(allows)), stops }
    }

    /// Whether it is a node that drops packets from its own pods to itself.
    pub(super) fn is_closed(&self, class: usize) -> bool {
        self.signature(class).is_some_and(|signature| signature.closed)
    }

    /// The result of a node for packets from its own pods to itself.
    fn own_node(&mut self, from: usize, to: usize, stop: Stop) -> Option<Row> {
        let to_node = stop == Stop::ReceiverNode && self.signature(from)?.pod_policies.is_some();
        if !to_node || !self.is_closed(to) {
            return None;
        }
        let by = DecidedBy::EndpointToHost { action: "Drop".to_owned() };
        let by = self.decider_number(Decider { by, table: Table::Normal, reply: false });
        let decision = Some(Decision { verdict: Verdict::Deny, by });
        self.row_number(vec![decision; self.classes.ports().len()])
    }

    /// `None` if there is no result for any port.
    fn row_number(&mut self, decisions: Vec<Option<Decision>>) -> Option<Row> {
        if decisions.iter().all(Option::is_none) {
            return None;
        }
        let next = Row::at(self.rows.len())?;
        let row = *self.row_numbers.entry(decisions.clone()).or_insert(next);
        if row == next {
            self.rows.push(decisions);
        }
        Some(row)
    }

    fn ask(
        &mut self,
        from: usize,
        to: usize,
        port: usize,
        spot: Spot,
        family: IpVersion,
    ) -> Option<Decision> {
        let traces = match spot.is_inside_node() {
            true => self.inside_node(from, to, port, spot.stop, family),
            false => self.traces_of(from, to, port, spot.stop, family),
        };
        let (verdict, decider) = Decider::of(&traces)?;
        Some(Decision { verdict, by: self.decider_number(decider) })
    }

    /// The oracle's traces of one packet from one class to another, at one stop.
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
            true => self.oracle.at_host(&question, family, stop == Stop::SenderNode),
            false => self.oracle.at_pod(&question, family, stop.direction()),
        };
        traces.unwrap_or_default()
    }

    /// The oracle's traces of one packet that stays inside one node, at the host endpoint of all interfaces.
    fn inside_node(&self, from: usize, to: usize, port: usize, stop: Stop, family: IpVersion) -> Vec<Trace> {
        let Some(question) = self.question(from, to, port, Stop::Sender) else { return Vec::new() };
        self.oracle.inside_node(&question, family, stop == Stop::SenderNode).unwrap_or_default()
    }

    /// The result of a profile for one packet from one class to another.
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

    /// One packet of each kind that the policies of these classes distinguish at one stop: from, to, and port.
    pub(crate) fn packets(
        &mut self,
        subjects: impl Fn(usize) -> bool,
        stop: Stop,
        family: IpVersion,
    ) -> Vec<(usize, usize, usize)> {
        let mut covered = BTreeSet::new();
        let mut packets = Vec::new();
        let classes = 0..self.classes.all().len();
        for subject in classes.filter(|class| subjects(*class)) {
            let spot = Spot { stop, placement: Placement::Apart };
            let Some(number) = self.view(subject, spot, family) else { continue };
            let Some(View { peers, port_samples, .. }) = self.views.get(number) else { continue };
            for (peer, group) in peers.iter().enumerate() {
                let (from, to) = stop.sender_and_receiver(subject, peer);
                if !covered.contains(&(number, *group)) && self.passes(from, to, stop, family) {
                    covered.insert((number, *group));
                    packets.extend(port_samples.iter().map(|port| (from, to, *port)));
                }
            }
        }
        packets
    }

    /// Whether packets from one class to another pass this stop.
    fn passes(&self, from: usize, to: usize, stop: Stop, family: IpVersion) -> bool {
        let (Some(source), Some(destination)) = (self.signature(from), self.signature(to)) else {
            return false;
        };
        let ends = self.classes.ends(from, to);
        source.reaches(destination, family) && (ends.apart || (ends.together && !stop.is_host()))
    }

    /// The question to the oracle for one packet from the first class to the second, at a stop.
    #[must_use]
    pub fn question(&self, from: usize, to: usize, port: usize, stop: Stop) -> Option<Question> {
        let (from, to) = self.classes.pair(from, to, stop.is_host())?;
        let sample = self.classes.ports().sample(port);
        let (source_port, destination_port) = (sample.source_port, sample.destination_port);
        let (protocol, icmp) = (sample.protocol, sample.icmp);
        Some(Question { from, to, protocol, source_port, destination_port, icmp, via: None, by_node: None })
    }

    fn decider_number(&mut self, mut decider: Decider) -> usize {
        if let DecidedBy::Rule { policy: PolicyName { kind, name, .. }, .. } = &mut decider.by
            && kind == "Profile"
            && matches!(self.oracle.profile_of(name), tortie_oracle::SeenProfile::AllowsAll)
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

    fn signature(&self, class: usize) -> Option<&'a EndSignature> {
        self.class(class)?.signatures.get(self.world)?.as_ref()
    }
}

/// The flow on a path. If nothing depends on the nodes, one flow represents both placements.
pub(super) fn flow_of(flows: &ByPath<Flow>, path: Path) -> Option<Flow> {
    let of = |path: Path| flows.get(path.number()).copied().flatten();
    of(path).or_else(|| of(Path { placement: Placement::Apart, ..path }))
}

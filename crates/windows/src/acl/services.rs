//! Addresses of Services in the egress list (policy decision 24).
//!
//! A pod's connection to a Service goes to a backend, but it is not known whether ACLs see the backend's address or
//! the Service's (its VIP). So the list is correct for both: its decisions about backends stay as they are, and rows
//! about VIP:port come first wherever the list's own verdict on VIP:port differs from the Service's. The Service is
//! allowed if every backend is, and denied otherwise.
//!
//! An ACL cannot match SCTP ports. If a VIP's SCTP port must be denied, all SCTP to the VIP is denied; if it should
//! be allowed and is not, it stays denied.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use tortie_api::net::{IpVersion, Protocol};
use tortie_api::{Key, Kind};
use tortie_dataplane::{Condition, NodeState, Reason, ServiceId};
use tortie_policy::program::Lookup;

use super::decision_rows::{Row, row};
use super::flatten::{Decision, Verdict};
use super::peers::Peers;
use super::ranges::{Addresses, Ports, address_of, number_of};
use super::region::{Region, Side, has_ports_in_acls};

/// The origin of rows about the addresses of Services.
pub(crate) const SERVICE: &str = "Service";

/// The only family of which the state of a node has addresses of Services.
const FAMILY: IpVersion = IpVersion::V4;

/// The maximum number of Services named in one condition.
const NAMED: usize = 10;

/// The part of a list that matters for Services.
type Content = Vec<(Verdict, Region)>;
/// A protocol and a port.
type Port = (Protocol, u16);

/// The Services of the cluster, indexed for judging lists.
#[derive(Debug)]
pub(crate) struct Frontends {
    /// The targets of each VIP:port.
    fronts: Vec<Frontend>,
    /// The addresses to look up in a list for this, sorted.
    looked_up: BTreeMap<Port, Vec<u128>>,
    /// The blocks of pod addresses.
    pods: Addresses,
}

/// A VIP:port.
#[derive(Debug)]
struct Frontend {
    /// Its owners; more than one is a mistake of somebody.
    services: Vec<ServiceId>,
    vip: u128,
    port: Port,
    /// Address and port of the backends.
    backends: Vec<(u128, u16)>,
}

/// The rows and conditions that Services add to a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Judgement {
    /// The rows in front.
    pub rows: Vec<Row>,
    /// The conditions.
    pub conditions: Vec<Condition>,
}

/// A list, and what Services add to it.
#[derive(Debug)]
pub(crate) struct Judged {
    list: Vec<Decision>,
    /// The rows and conditions that they add.
    pub judgement: Judgement,
}

impl Judged {
    /// The same list, judged again.
    pub(crate) fn again(&self, services: &Services<'_, impl Lookup>) -> Arc<Judged> {
        services.judge(self.list.clone())
    }
}

/// The Services during a reconciliation: each list is judged once.
pub(crate) struct Services<'a, L> {
    frontends: &'a Frontends,
    lookup: &'a L,
    judged: RefCell<HashMap<Content, Arc<Judged>>>,
}

impl Frontends {
    /// The Services of the node's state.
    pub(crate) fn new(state: &NodeState) -> Self {
        let mut by_front: BTreeMap<(Port, u128), Frontend> = BTreeMap::new();
        for (id, service) in &state.services {
            for vip in service.addresses().map(|vip| number_of(vip.into())) {
                for port in &service.ports {
                    let front = ((port.protocol, port.port), vip);
                    let new = || Frontend { services: vec![], vip, port: front.0, backends: vec![] };
                    let entry = by_front.entry(front).or_insert_with(new);
                    // One Service may name an address twice, which is not a conflict.
                    if entry.services.last() != Some(id) {
                        entry.services.push(id.clone());
                    }
                    entry
                        .backends
                        .extend(port.backends.iter().map(|(to, port)| (number_of((*to).into()), *port)));
                }
            }
        }
        // An address without backends needs no row.
        let fronts: Vec<_> = by_front.into_values().filter(|front| !front.backends.is_empty()).collect();
        let mut looked_up: BTreeMap<Port, Vec<u128>> = BTreeMap::new();
        for front in &fronts {
            looked_up.entry(front.port).or_default().push(front.vip);
            for (address, port) in &front.backends {
                looked_up.entry((front.port.0, *port)).or_default().push(*address);
            }
        }
        for addresses in looked_up.values_mut() {
            addresses.sort_unstable();
            addresses.dedup();
        }
        let pods = Addresses::of_nets(FAMILY, state.routes.keys().copied());
        Self { fronts, looked_up, pods }
    }
}

/// The verdict of a list on one address and port, for every source port of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PortVerdict {
    Allowed,
    Denied,
    /// It depends on the source port.
    Neither,
}

impl<'a, L: Lookup> Services<'a, L> {
    /// The Services with the current members of sets.
    pub(crate) fn new(frontends: &'a Frontends, lookup: &'a L) -> Self {
        Self { frontends, lookup, judged: RefCell::default() }
    }

    /// The rows and conditions that Services add to an egress list.
    pub(crate) fn judge(&self, list: Vec<Decision>) -> Arc<Judged> {
        let key: Content = list.iter().map(|decision| (decision.verdict, decision.region.clone())).collect();
        if let Some(judged) = self.judged.borrow().get(&key) {
            return Arc::clone(judged);
        }
        let judged = Arc::new(Judged { judgement: self.judge_list(&list), list });
        self.judged.borrow_mut().insert(key, Arc::clone(&judged));
        judged
    }

    fn judge_list(&self, list: &[Decision]) -> Judgement {
        let verdicts = ListVerdicts::new(list, self.frontends, self.lookup);
        let mut found = JudgementBuilder::default();
        for front in &self.frontends.fronts {
            found.front(front, &verdicts, &self.frontends.pods);
        }
        found.judgement()
    }
}

/// The results about a list so far.
#[derive(Default)]
struct JudgementBuilder<'a> {
    /// The VIPs that need a row, by the content of that row.
    wanted: BTreeMap<RowKey, Vec<IpAddr>>,
    /// SCTP ports with allowed backends.
    reachable: Vec<&'a Frontend>,
    partly: ReportedServices,
    taken: ReportedServices,
    of_pods: ReportedServices,
    of_sctp: ReportedServices,
}

/// Whether to deny, the protocol, and the ports.
type RowKey = (bool, Protocol, (u16, u16));

impl<'a> JudgementBuilder<'a> {
    /// Judges one VIP:port by the list's verdicts on it and its backends.
    fn front(&mut self, front: &'a Frontend, verdicts: &ListVerdicts<'_>, pods: &Addresses) {
        let of = |(address, port): (u128, u16)| verdicts.of((front.port.0, port), address);
        let backends = || front.backends.iter().map(|backend| of(*backend));
        let (all, none) = (
            backends().all(|verdict| verdict == PortVerdict::Allowed),
            backends().all(|verdict| verdict == PortVerdict::Denied),
        );
        let collides = front.services.len() > 1;
        if collides && !none {
            self.taken.note(front);
        } else if !all && !none {
            self.partly.note(front);
        }
        let (protocol, port) = front.port;
        let has_ports = has_ports_in_acls(protocol);
        if !has_ports && !none {
            self.reachable.push(front);
        }
        let denies = !all || collides;
        let as_wanted = verdicts.of(front.port, front.vip)
            == if denies { PortVerdict::Denied } else { PortVerdict::Allowed };
        if as_wanted {
            return;
        }
        let is_pods = pods.contains(front.vip);
        if is_pods && (none || !denies) {
            // Everybody who may write a Service can give it a pod's address, so this must not open the pod. If the
            // list allows packets to the pod, it cannot be seen whether they are the Service's.
            self.of_pods.note(front);
        }
        if !has_ports {
            self.of_sctp.note(front);
        }
        if denies || has_ports && !is_pods {
            let ports = if has_ports { (port, port) } else { (0, u16::MAX) };
            self.wanted.entry((denies, protocol, ports)).or_default().push(address_of(front.vip, FAMILY));
        }
    }

    fn judgement(mut self) -> Judgement {
        let row = |((denies, protocol, ports), addresses)| {
            let verdict = if denies { Verdict::Deny } else { Verdict::Allow };
            about(verdict, protocol, ports, Addresses::of(FAMILY, addresses))
        };
        let rows: Vec<Row> = self.wanted.into_iter().map(row).collect();
        // A denial of one SCTP port of an address denies the other ports, too.
        let closes = |row: &Row, front: &Frontend| {
            row.protocol == u16::from(front.port.0.0) && row.remote.addresses.literal().contains(front.vip)
        };
        for front in self.reachable {
            if rows.iter().any(|row| closes(row, front)) {
                self.of_sctp.note(front);
            }
        }
        let conditions = [
            (self.partly, Reason::ServicePartlyAllowed, "only some of the backends are allowed"),
            (self.taken, Reason::ServiceAddressTaken, "another Service has the same address and port"),
            (
                self.of_pods,
                Reason::ServiceAddressTaken,
                "pods have the address too; such a pod is closed at that port wherever the Service is",
            ),
            (self.of_sctp, Reason::ServicePartlyAllowed, "its ports are SCTP ports, which HNS cannot match"),
        ];
        let conditions =
            conditions.into_iter().flat_map(|(services, reason, why)| services.conditions(reason, why));
        Judgement { rows, conditions: conditions.collect() }
    }
}

fn about(verdict: Verdict, protocol: Protocol, ports: (u16, u16), addresses: Addresses) -> Row {
    let ports = Ports::from_ranges(vec![ports]);
    let region = Region { remote: Side { addresses: addresses.into(), ports }, ..Region::all() };
    row(&Decision { verdict, region, origin: SERVICE.into() }, protocol.0.into())
}

/// The verdicts of a list on all addresses to look up.
struct ListVerdicts<'a> {
    frontends: &'a Frontends,
    verdicts: BTreeMap<Port, Vec<PortVerdict>>,
}

impl<'a> ListVerdicts<'a> {
    fn new(list: &[Decision], frontends: &'a Frontends, lookup: &impl Lookup) -> Self {
        let mut peers: HashMap<&Peers, Addresses> = HashMap::new();
        let mut verdicts = BTreeMap::new();
        for (port, looked_up) in &frontends.looked_up {
            let mut walk = Walk::new(looked_up);
            let number = Ports::from_ranges(vec![(port.1, port.1)]);
            for Decision { verdict, region, .. } in list {
                if !region.protocols.contains(port.0) || !number.is_within(&region.remote.ports) {
                    continue;
                }
                let remote = &region.remote.addresses;
                let addresses = match remote.is_literal() {
                    true => remote.literal(),
                    false => peers.entry(remote).or_insert_with(|| remote.addresses(FAMILY, lookup)),
                };
                let whole = region.local.addresses.is_all() && region.local.ports.is_all();
                walk.decide(addresses, *verdict, whole);
                if walk.left == 0 {
                    break;
                }
            }
            verdicts.insert(*port, walk.end());
        }
        Self { frontends, verdicts }
    }

    fn of(&self, port: Port, address: u128) -> PortVerdict {
        let index =
            self.frontends.looked_up.get(&port).and_then(|looked_up| looked_up.binary_search(&address).ok());
        let verdict = index.and_then(|index| self.verdicts.get(&port)?.get(index));
        verdict.copied().unwrap_or(PortVerdict::Neither)
    }
}

/// The addresses with one port during the evaluation of a list.
struct Walk<'a> {
    addresses: &'a [u128],
    /// Whether a decision so far allows, whether one denies, and whether none after these counts.
    seen: Vec<(bool, bool, bool)>,
    /// The number of undecided addresses.
    left: usize,
}

impl<'a> Walk<'a> {
    fn new(addresses: &'a [u128]) -> Self {
        Self { addresses, seen: vec![(false, false, false); addresses.len()], left: addresses.len() }
    }

    /// Applies a decision about these addresses, for all source ports or only for some.
    fn decide(&mut self, addresses: &Addresses, verdict: Verdict, whole: bool) {
        let mut note = |index: usize| {
            let (allows, denies, done) = &mut self.seen[index];
            if *done {
                return;
            }
            match verdict {
                Verdict::Allow => *allows = true,
                Verdict::Deny => *denies = true,
            }
            *done = whole;
            self.left -= usize::from(whole);
        };
        // The shorter one is iterated and looked up in the other.
        if addresses.ranges().len() > self.addresses.len() {
            let meant = |(_, address): &(usize, &u128)| addresses.contains(**address);
            self.addresses.iter().enumerate().filter(meant).for_each(|(index, _)| note(index));
            return;
        }
        for (first, last) in addresses.ranges() {
            let begin = self.addresses.partition_point(|address| address < first);
            let length = self.addresses[begin..].partition_point(|address| address <= last);
            (begin..begin + length).for_each(&mut note);
        }
    }

    fn end(self) -> Vec<PortVerdict> {
        let verdict = |(allows, denies, done)| match (allows, denies, done) {
            (true, false, true) => PortVerdict::Allowed,
            (false, true, true) => PortVerdict::Denied,
            _ => PortVerdict::Neither,
        };
        self.seen.into_iter().map(verdict).collect()
    }
}

/// The Services to report, the first of them by name.
#[derive(Default)]
struct ReportedServices(BTreeMap<ServiceId, Vec<String>>);

impl ReportedServices {
    fn note(&mut self, front: &Frontend) {
        let (vip, (protocol, port)) = (address_of(front.vip, FAMILY), front.port);
        for service in &front.services {
            let (named, front) =
                (self.0.entry(service.clone()).or_default(), format!("{vip}:{port}/{protocol}"));
            if !named.contains(&front) {
                named.push(front);
            }
        }
    }

    /// One condition for each of the first Services, and one for all others.
    fn conditions(self, reason: Reason, why: &'static str) -> impl Iterator<Item = Condition> {
        /// The maximum number of addresses of one Service in a message.
        const ADDRESSES: usize = 4;
        let others = self.0.len().saturating_sub(NAMED);
        let named = self.0.into_iter().take(NAMED).map(move |(ServiceId { namespace, name }, fronts)| {
            let (more, shown) = (fronts.len().saturating_sub(ADDRESSES), fronts.iter().take(ADDRESSES));
            let shown = shown.map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let message = format!(
                "{shown}{more}: {why}. Connections to the Service are denied if ACLs see its address on this node; \
                 connections to the backends themselves follow the policies"
            );
            Condition::new(reason, message).about(Key::namespaced(Kind::Service, &*namespace, &*name))
        });
        let others = (others > 0).then(|| Condition::new(reason, format!("{others} more Services: {why}")));
        named.chain(others)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use ipnet::Ipv4Net;
    use tortie_dataplane::{RouteTarget, Service, ServicePort};
    use tortie_hcn::schema::AclAction;

    use super::*;

    /// Thousands of Services with three backends each, on a few ports.
    fn cluster(services: u32) -> NodeState {
        let mut state = NodeState::default();
        for number in 0..services {
            let backend =
                |of: u32| (Ipv4Addr::from(0x0a00_0000 + number * 8 + of), 8000 + (number % 20) as u16);
            let ports = vec![ServicePort {
                protocol: Protocol::TCP,
                port: 80,
                backends: (0..3).map(backend).collect(),
            }];
            let cluster_ips = vec![Ipv4Addr::from(0x0a60_0000 + number)];
            let id = ServiceId { namespace: "n".into(), name: format!("s{number}").into() };
            state.services.insert(id, Arc::new(Service { cluster_ips, external_ips: vec![], ports }));
        }
        state
    }

    /// Each decision concerns some networks, the last one everything.
    fn list(decisions: u32, ranges: u32) -> Vec<Decision> {
        let decision = |number: u32| {
            let begin = |range: u32| Ipv4Addr::from(0x0a00_0000 + (number * ranges + range) * 16);
            let nets = (0..ranges).map(|range| Ipv4Net::new(begin(range), 29).unwrap().into());
            let addresses = Addresses::of_nets(FAMILY, nets);
            let remote = Side { addresses: addresses.into(), ports: Ports::all() };
            let region = Region { remote, ..Region::all() };
            Decision { verdict: Verdict::Allow, region, origin: "policy".into() }
        };
        let end = Decision { verdict: Verdict::Deny, region: Region::all(), origin: "end".into() };
        (0..decisions).map(decision).chain([end]).collect()
    }

    /// A Service has a pod's address, and its backend is denied: the pod is then closed at that port, and a condition
    /// reports it.
    #[test]
    fn a_service_that_closes_a_pods_port_is_reported() {
        let mut state = cluster(0);
        let pod = Ipv4Addr::new(10, 0, 7, 7);
        let port =
            ServicePort { protocol: Protocol::TCP, port: 80, backends: vec![([10, 9, 0, 1].into(), 8080)] };
        let id = ServiceId { namespace: "n".into(), name: "s".into() };
        let service = Service { cluster_ips: vec![], external_ips: vec![pod], ports: vec![port] };
        state.services.insert(id, Arc::new(service));
        let messages = |state: &NodeState| {
            let frontends = Frontends::new(state);
            let judged = Services::new(&frontends, state).judge(list(1, 200));
            let [row] = &judged.judgement.rows[..] else { panic!("{judged:?}") };
            assert_eq!(row.action, AclAction::Block);
            judged.judgement.conditions.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(messages(&state), Vec::<String>::new(), "no pods have such addresses");
        state.routes.insert("10.0.7.0/26".parse().unwrap(), RouteTarget::Local);
        let [message] = &messages(&state)[..] else { panic!() };
        assert!(message.starts_with("Service n/s: 10.0.7.7:80/TCP: "), "{message}");
    }

    #[test]
    fn equal_lists_are_evaluated_once() {
        let state = cluster(10);
        let frontends = Frontends::new(&state);
        let services = Services::new(&frontends, &state);
        let one = services.judge(list(2, 2));
        assert!(Arc::ptr_eq(&one, &services.judge(list(2, 2))));
        assert!(Arc::ptr_eq(&one, &one.again(&services)));
        assert!(!Arc::ptr_eq(&one, &services.judge(list(2, 3))));
        // Every second network is allowed, so every second Service is.
        let [row] = &one.judgement.rows[..] else { panic!("{one:?}") };
        assert_eq!(row.remote.addresses.literal().ranges().len(), 4);
    }
}

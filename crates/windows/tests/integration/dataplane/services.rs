//! The addresses of Services in a pod's egress (policy decision 24): whichever address ACLs see, a connection to a
//! Service is allowed only if all of its backends are allowed; and connections to a backend are as without a Service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use crate::dataplane::node::*;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use testkit::exceptions::no_acl_is_about_ports_of_sctp;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_dataplane::{
    Condition, Delta, EndpointId, PodAddress, PodWiring, Reason, Route, RouteTarget, Service, ServiceId,
    ServicePort,
};
use tortie_hcn::schema::{Acl, AclAction, AclDirection};
use tortie_hns_emulator::{Config, EgressSees, Verdict};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, EntityMatch, Flow, Member, Rule, SetId, SetKind, evaluate,
};
use tortie_windows::endpoint_id;

/// The source ports that random rules distinguish, and one that they do not.
const OWN_PORTS: [u16; 4] = [1, 2, 3, 40_000];

fn vip() -> impl Strategy<Value = Ipv4Addr> {
    select(["10.96.0.1", "10.96.0.2", "10.96.0.3", "192.0.2.1"].map(|text| text.parse().unwrap()).to_vec())
}

fn backend() -> impl Strategy<Value = Ipv4Addr> {
    (0_u8..6).prop_map(|last| Ipv4Addr::new(10, 0, 0, last))
}

fn port() -> impl Strategy<Value = u16> {
    1_u16..4
}

fn protocol() -> impl Strategy<Value = Protocol> {
    select([6, 6, 17, 132].map(Protocol).to_vec())
}

fn services() -> impl Strategy<Value = BTreeMap<ServiceId, Service>> {
    let backends = btree_set((backend(), port()), 0..4).prop_map(|backends| backends.into_iter().collect());
    let port = (protocol(), port(), backends).prop_map(|(protocol, port, backends)| ServicePort {
        protocol,
        port,
        backends,
    });
    let service = (btree_set(vip(), 1..3), vec(port, 0..3)).prop_map(|(vips, ports)| {
        let (external_ips, cluster_ips) = vips.into_iter().partition(|vip| vip.octets()[0] == 192);
        Service { cluster_ips, external_ips, ports }
    });
    prop::collection::btree_map(select(vec!["a", "b", "c", "d"]).prop_map(service_id), service, 0..4)
}

fn seldom<T: Clone + std::fmt::Debug + 'static>(
    some: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Vec<T>> {
    prop_oneof![3 => Just(vec![]), 2 => vec(some, 1..3)].boxed()
}

fn rule() -> impl Strategy<Value = Rule> {
    let nets = [
        "10.0.0.0/30",
        "10.0.0.4/31",
        "10.96.0.0/16",
        "10.96.0.2/32",
        "0.0.0.0/0",
        "10.0.0.1/32",
        "192.0.2.0/24",
    ];
    let net = move || select(nets.map(|net| net.parse().unwrap()).to_vec());
    let set = || select(vec![SetId::new("s:a"), SetId::new("s:b")]);
    let ranges = || (port(), port()).prop_map(|(a, b)| PortRange { first: a.min(b), last: a.max(b) });
    let port_sets = seldom(Just(SetId::new("p:a")));
    let destination =
        (seldom(net()), seldom(net()), seldom(set()), seldom(set()), seldom(ranges()), port_sets).prop_map(
            |(nets, not_nets, sets, not_sets, ports, port_sets)| EntityMatch {
                nets,
                not_nets,
                sets,
                not_sets,
                ports,
                port_sets,
                ..EntityMatch::default()
            },
        );
    let own = prop_oneof![6 => Just(vec![]), 1 => vec(ranges(), 1..2)];
    let action = select(vec![Action::Allow, Action::Allow, Action::Deny, Action::Pass]);
    (action, prop::option::weighted(0.4, protocol()), destination, own).prop_map(
        |(action, protocol, destination, ports)| Rule {
            protocol,
            source: EntityMatch { ports, ..EntityMatch::default() },
            destination,
            ..Rule::all(action)
        },
    )
}

/// The owners of a VIP:port, and its targets.
type Front<'a> = (BTreeSet<&'a ServiceId>, BTreeSet<(Ipv4Addr, u16)>);

/// A cluster, as far as it concerns one pod, and its Services.
#[derive(Debug, Clone)]
struct Scenario {
    program: EndpointProgram,
    policies: Vec<Vec<Rule>>,
    sets: [BTreeSet<Ipv4Addr>; 2],
    ports: BTreeSet<(Ipv4Addr, Protocol, u16)>,
    services: BTreeMap<ServiceId, Service>,
}

const POLICIES: [&str; 3] = ["one", "two", "three"];

fn scenarios() -> impl Strategy<Value = Scenario> {
    let parts = (subsequence(POLICIES.to_vec(), 1..3), select(vec![EndOfTier::Deny, EndOfTier::Pass]));
    let tiers = vec(parts.prop_map(|(policies, end)| tier("tier", &policies, end)), 0..3);
    let set = || btree_set(backend(), 0..4);
    let ports = btree_set((backend(), protocol(), port()), 0..4);
    (tiers, any::<bool>(), vec(vec(rule(), 0..4), 3), [set(), set()], ports, services()).prop_map(
        |(egress, open, policies, sets, ports, services)| Scenario {
            program: EndpointProgram {
                egress,
                profiles: if open { vec![policy_id("allow-all")] } else { vec![] },
                ..EndpointProgram::default()
            },
            policies,
            sets,
            ports,
            services,
        },
    )
}

impl Scenario {
    fn deltas(&self) -> Vec<Delta> {
        let set = |name, members: &BTreeSet<Ipv4Addr>| {
            let net = |address: &Ipv4Addr| Member::Net(IpAddr::from(*address).into());
            Delta::SetCreated(SetId::new(name), SetKind::Nets, members.iter().map(net).collect())
        };
        let member = |(address, protocol, port): &(Ipv4Addr, Protocol, u16)| Member::AddressPort {
            address: (*address).into(),
            protocol: *protocol,
            port: *port,
        };
        let ports = self.ports.iter().map(member).collect();
        let mut deltas = vec![
            local_node(),
            own_block(),
            allow_all(),
            set("s:a", &self.sets[0]),
            set("s:b", &self.sets[1]),
            Delta::SetCreated(SetId::new("p:a"), SetKind::AddressPorts, ports),
        ];
        let policies = POLICIES.iter().zip(&self.policies);
        deltas.extend(policies.map(|(name, egress)| policy(name, vec![], egress.clone())));
        deltas.extend(self.services.iter().map(|(id, of)| Delta::Service(id.clone(), Arc::new(of.clone()))));
        deltas.push(endpoint(self.program.clone()));
        deltas
    }

    /// The owners and targets of each VIP:port.
    fn fronts(&self) -> BTreeMap<(Ipv4Addr, Protocol, u16), Front<'_>> {
        let mut fronts = BTreeMap::<_, Front<'_>>::new();
        for (id, service) in &self.services {
            for vip in service.addresses() {
                for port in &service.ports {
                    let front = fronts.entry((vip, port.protocol, port.port)).or_default();
                    front.0.insert(id);
                    front.1.extend(port.backends.iter().copied());
                }
            }
        }
        fronts
    }
}

fn flows(to: Ipv4Addr, protocol: Protocol, port: u16) -> impl Iterator<Item = Flow> {
    OWN_PORTS.into_iter().map(move |own| Flow {
        source: POD.into(),
        destination: to.into(),
        protocol,
        source_port: own,
        destination_port: port,
        icmp: None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_vip_is_allowed_exactly_if_all_its_backends_are(
        scenario in scenarios(), sets in select(vec![WindowsPolicySets::Disabled, WindowsPolicySets::Enabled]),
        sees in select(vec![EgressSees::Vip, EgressSees::Backend]),
    ) {
        let mut node = Node::with(Config { egress_sees: sees, ..Config::new(Config::SERVER_2022, NODE) }, sets);
        node.connect();
        let report = node.apply(&scenario.deltas());
        let program = |flow: &Flow| evaluate(&scenario.program, Direction::Egress, flow, &node.state);
        // If rules distinguish the pod's source ports, several rules together may allow what none of them allows
        // alone.
        let rules = || scenario.policies.iter().flatten();
        let own_ports_matter = rules().any(|rule| !rule.source.ports.is_empty());
        let (fronts, mut partly) = (scenario.fronts(), false);
        let reported: Vec<Condition> = report.conditions().cloned().collect();
        // What is reported about SCTP may close it, in rules and for Services, and opens nothing.
        let agrees = |flow: &Flow, passes: bool, allowed: bool| {
            let of_sctp = |reported: &Condition| reported.to_string().contains("SCTP");
            let narrower = allowed && !passes && flow.protocol == Protocol::SCTP;
            passes == allowed || narrower && reported.iter().any(of_sctp)
        };
        for ((vip, protocol, port), (services, backends)) in &fronts {
            let verdicts: Vec<bool> =
                backends.iter().flat_map(|(to, port)| flows(*to, *protocol, *port)).map(|flow| program(&flow)).collect();
            let (all, none) = (verdicts.iter().all(|allowed| *allowed), !verdicts.contains(&true));
            for flow in flows(*vip, *protocol, *port) {
                let passes = node.passes(Direction::Egress, &flow);
                let shown = || format!("{flow:?}\n{:#?}", node.acls());
                if backends.is_empty() {
                    prop_assert!(agrees(&flow, passes, program(&flow)), "a Service without backends: {}", shown());
                } else if services.len() > 1 {
                    prop_assert!(!passes, "two Services: {}", shown());
                } else {
                    prop_assert!(all || !passes, "wider than the backends: {}", shown());
                    let may_be_narrower = !all || own_ports_matter || agrees(&flow, passes, all);
                    prop_assert!(passes || may_be_narrower, "narrower than the backends: {}", shown());
                }
                // As a connection to the Service, whichever backend it goes to.
                for (to, target) in backends {
                    let direct = Flow { destination: (*to).into(), destination_port: *target, ..flow };
                    let (packet, front) = (packet(Direction::Egress, &direct), Some(((*vip).into(), *port)));
                    let verdict = node.hns.inner().judge_to_service(endpoint_id(CONTAINER), &packet, front).unwrap();
                    let wanted = if sees == EgressSees::Vip { passes } else { program(&direct) };
                    prop_assert!(agrees(&direct, verdict == Verdict::Allow, wanted), "{:?} by {}", direct, shown());
                }
            }
            partly |= !none && !backends.is_empty() && (services.len() > 1 || !all);
            // Without the Service.
            for flow in backends.iter().flat_map(|(to, port)| flows(*to, *protocol, *port)) {
                prop_assert!(agrees(&flow, node.passes(Direction::Egress, &flow), program(&flow)), "{:?}", flow);
                let inwards = back(flow);
                let allowed = evaluate(&scenario.program, Direction::Ingress, &inwards, &node.state);
                prop_assert_eq!(node.passes(Direction::Ingress, &inwards), allowed, "{:?}", inwards);
            }
        }
        // What does not belong to a Service is unaffected.
        for vip in scenario.services.values().flat_map(Service::addresses) {
            for (protocol, port) in [(6, 1), (6, 2), (6, 3), (6, 4), (17, 1), (132, 2)] {
                let protocol = Protocol(protocol);
                if !fronts.contains_key(&(vip, protocol, port)) {
                    for flow in flows(vip, protocol, port) {
                        let passes = node.passes(Direction::Egress, &flow);
                        prop_assert!(agrees(&flow, passes, program(&flow)), "{:?}", flow);
                    }
                }
            }
        }
        prop_assert!(!partly || !reported.is_empty());
        // A rule that is narrower for SCTP also narrows SCTP Services.
        let of_sctp = |reported: &Condition| reported.message.contains("SCTP");
        prop_assert!(partly || own_ports_matter || reported.iter().all(of_sctp), "{reported:?}");
        prop_assert!(!report.retry && report.node.is_empty());
        prop_assert!(no_acl_is_about_ports_of_sctp(&[node.endpoint()]).is_ok(), "{:#?}", node.acls());
    }

    /// The list depends on the cluster's objects, not on the order of updates.
    #[test]
    fn deleted_services_leave_no_trace(before in services(), scenario in scenarios()) {
        let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), WindowsPolicySets::Disabled);
        node.connect();
        node.apply(&Scenario { services: before.clone(), ..scenario.clone() }.deltas());
        let gone = before.keys().filter(|id| !scenario.services.contains_key(*id));
        let mut deltas: Vec<Delta> = gone.cloned().map(Delta::ServiceRemoved).collect();
        deltas.extend(scenario.services.iter().map(|(id, of)| Delta::Service(id.clone(), Arc::new(of.clone()))));
        let report = node.apply(&deltas);
        let mut fresh = Node::with(Config::new(Config::SERVER_2022, NODE), WindowsPolicySets::Disabled);
        fresh.connect();
        prop_assert_eq!(fresh.apply(&scenario.deltas()).endpoints, report.endpoints);
        let in_order = |node: &Node| {
            let mut acls = node.acls();
            acls.sort_by_key(|acl| (acl.direction.clone() == AclDirection::Out, acl.priority));
            // With an earlier state, priorities may have other gaps.
            let text = |acl: Acl| format!("{:?}", Acl { priority: 0, ..acl });
            acls.into_iter().map(text).collect::<BTreeSet<_>>()
        };
        prop_assert_eq!(in_order(&node), in_order(&fresh));
        node.hns.take();
        node.dataplane.resync();
        prop_assert_eq!(node.hns.take_changes(), vec![]);
    }
}

#[test]
fn acls_of_services_depend_on_the_pods_policy() {
    let services = || {
        [
            is_now("web", service(&["10.96.0.1", "10.96.0.9"], 80, &["10.0.0.1", "10.0.0.2"])),
            is_now("shop", service(&["10.96.0.2"], 80, &["10.0.0.1"])),
            is_now("half", service(&["10.96.0.3"], 80, &["10.0.0.1", "10.0.9.9"])),
            is_now("db", service(&["10.96.0.4"], 80, &["10.0.9.9"])),
            is_now("idle", service(&["10.96.0.5"], 80, &[])),
        ]
    };
    let with = |more: Vec<Delta>| started(services().into_iter().chain(more));
    // An open pod, and one whose policy allows nothing.
    assert_eq!(rows_of_services(&with(vec![endpoint(open_program())]).0), []);
    let (node, report) = with(vec![endpoint(EndpointProgram::default())]);
    assert_eq!((rows_of_services(&node), report.endpoints.len()), (vec![], 0));
    // A pod that may reach the backends of some: one ACL for all of these.
    let (node, report) = with(isolated(to(&["10.0.0.0/24"])).into());
    let allowed = (AclAction::Allow, "10.96.0.1,10.96.0.2,10.96.0.9".to_owned(), "6:80".to_owned());
    assert_eq!(rows_of_services(&node), [allowed]);
    let [reported] = &report.endpoints[&pod_id()][..] else { panic!("{report:?}") };
    assert_eq!(reported.reason, Reason::ServicePartlyAllowed);
    assert!(reported.to_string().starts_with("Service shop/half: 10.96.0.3:80/TCP: "), "{reported}");
    assert!(!reported.reason.is_failure());
    // A pod whose list would admit it to the addresses of Services, but not to the backends.
    let (node, _) = with(isolated(to(&["10.96.0.0/16", "10.0.0.0/24"])).into());
    let denied = (AclAction::Block, "10.96.0.3,10.96.0.4".to_owned(), "6:80".to_owned());
    assert_eq!(rows_of_services(&node), [denied]);
}

#[test]
fn a_rule_about_some_of_the_pods_own_ports_is_not_enough() {
    let source = EntityMatch { ports: vec![PortRange { first: 0, last: 1023 }], ..EntityMatch::default() };
    let rule = Rule { source, ..to(&["10.0.0.0/24"]) };
    let web = is_now("web", service(&["10.96.0.1"], 80, &["10.0.0.1"]));
    let (node, report) = started(isolated(rule).into_iter().chain([web]));
    assert_eq!(rows_of_services(&node), []);
    assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::ServicePartlyAllowed);
}

#[test]
fn two_services_with_one_address_are_denied() {
    let one = is_now("one", service(&["10.96.0.1"], 80, &["10.0.0.1"]));
    let two = is_now("two", service(&["10.96.0.1"], 80, &["10.0.0.2"]));
    let (mut node, report) = started([one, two, endpoint(open_program())]);
    assert_eq!(rows_of_services(&node), [(AclAction::Block, "10.96.0.1".to_owned(), "6:80".to_owned())]);
    let reported = &report.endpoints[&pod_id()];
    assert!(reported.iter().all(|reported| reported.reason == Reason::ServiceAddressTaken));
    let about: Vec<String> =
        reported.iter().flat_map(|reported| &reported.about).map(ToString::to_string).collect();
    assert_eq!(about, ["Service shop/one", "Service shop/two"]);
    let report = node.apply(&[Delta::ServiceRemoved(service_id("two"))]);
    assert_eq!((rows_of_services(&node), report.endpoints.len()), (vec![], 0));
}

/// Otherwise, everybody who may write a Service could open a pod by giving it the pod's address.
#[test]
fn a_pods_address_is_not_opened_by_a_service() {
    let block = Delta::Route(Route {
        destination: "10.0.7.0/26".parse().unwrap(),
        target: RouteTarget::Vxlan { node: "other".into() },
    });
    let victim = Service {
        external_ips: vec!["10.0.7.7".parse().unwrap(), "192.0.2.1".parse().unwrap()],
        ..service(&["10.96.0.1"], 80, &["10.0.0.1"])
    };
    let vtep = tortie_dataplane::Vtep {
        node: "other".into(),
        address: "10.0.7.1".parse().unwrap(),
        mac: tortie_dataplane::MacAddress([6; 6]),
        parent: "172.16.0.9".parse().unwrap(),
        mtu: None,
    };
    let more = [Delta::Vtep(vtep), block, is_now("evil", victim)];
    let (mut node, report) = started(more.into_iter().chain(isolated(to(&["10.0.0.0/24"]))));
    let allowed = (AclAction::Allow, "10.96.0.1,192.0.2.1".to_owned(), "6:80".to_owned());
    assert_eq!(rows_of_services(&node), [allowed]);
    assert!(report.endpoints[&pod_id()][0].message.contains("10.0.7.7:80/TCP"), "{report:?}");
    // The block no longer belongs to pods.
    node.apply(&[Delta::RouteRemoved("10.0.7.0/26".parse().unwrap())]);
    assert_eq!(rows_of_services(&node)[0].1, "10.0.7.7,10.96.0.1,192.0.2.1");
}

#[test]
fn thousands_of_services_need_few_acls() {
    let vips = (0..8_001_u32).map(|number| Ipv4Addr::from(0x0a60_0000 + 2 * number).to_string());
    let services = vips.enumerate().map(|(number, vip)| {
        let port = if number % 2 == 0 { 80 } else { 443 };
        is_now(&format!("s{number}"), service(&[&vip], port, &["10.0.0.1"]))
    });
    let (node, _) = started(services.chain(isolated(to(&["10.0.0.0/24"]))));
    let mut lengths: Vec<_> = rows_of_services(&node)
        .iter()
        .map(|(_, addresses, ports)| (ports.clone(), addresses.split(',').count()))
        .collect();
    lengths.sort();
    let of = |ports: &str, count| (ports.to_owned(), count);
    assert_eq!(lengths, [of("6:443", 4000), of("6:80", 1), of("6:80", 4000)]);
}

/// A second, open pod beside the first, isolated one.
fn beside(node: &Node) -> (EndpointId, Delta) {
    let id = EndpointId { pod: "open".into(), ..pod_id() };
    let attachment = tortie_dataplane::PodAttachment {
        endpoint: id.clone(),
        container_id: "fedcba".into(),
        addresses: vec![PodAddress::ipv4("10.244.3.6".parse().unwrap(), "10.244.3.0/26".parse().unwrap())],
        ..attachment(node.namespace())
    };
    node.wiring.connect(&attachment).unwrap();
    let Delta::Endpoint(_, first) = endpoint(open_program()) else { panic!() };
    let mut second = (*first).clone();
    (second.container_id, second.addresses) = ("fedcba".into(), vec!["10.244.3.6".parse().unwrap()]);
    (id.clone(), Delta::Endpoint(id, Arc::new(second)))
}

#[test]
fn a_change_of_a_service_modifies_only_affected_endpoints() {
    let (mut node, _) = started(
        isolated(to(&["10.0.0.0/24"]))
            .into_iter()
            .chain([is_now("web", service(&["10.96.0.1"], 80, &["10.0.0.1"]))]),
    );
    let (_, second) = beside(&node);
    node.apply(&[second]);
    node.hns.take();
    // One more backend that is allowed, a Service without backends, and a removed one cause no reads and no writes.
    node.apply(&[is_now("web", service(&["10.96.0.1"], 80, &["10.0.0.1", "10.0.0.2"]))]);
    node.apply(&[is_now("idle", service(&["10.96.0.2"], 80, &[]))]);
    node.apply(&[Delta::ServiceRemoved(service_id("idle"))]);
    assert_eq!(node.hns.take(), vec![]);
    // A backend that is not allowed concerns only the isolated pod.
    let report = node.apply(&[is_now("web", service(&["10.96.0.1"], 80, &["10.0.0.1", "10.0.9.9"]))]);
    assert_eq!(report.endpoints.keys().collect::<Vec<_>>(), [&pod_id()]);
    let changes = node.hns.take_changes();
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert!(format!("{changes:?}").contains(&endpoint_id(CONTAINER).to_string()), "{changes:?}");
    assert_eq!(rows_of_services(&node), []);
}

/// With sets or listed addresses: the members of the sets count, also if only they change.
#[test]
fn members_of_sets_are_considered() {
    for sets in [WindowsPolicySets::Disabled, WindowsPolicySets::Enabled] {
        let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), sets);
        node.connect();
        let web = SetId::new("s:web");
        let member = |text: &str| Member::Net(text.parse().unwrap());
        let destination = EntityMatch { sets: vec![web.clone()], ..EntityMatch::default() };
        let rule = Rule { destination, ..Rule::all(Action::Allow) };
        let created = Delta::SetCreated(web.clone(), SetKind::Nets, [member("10.0.0.1/32")].into());
        let service = is_now("web", service(&["10.96.0.1"], 80, &["10.0.0.1", "10.0.0.2"]));
        let deltas = [local_node(), own_block(), created, service];
        node.apply(&deltas.into_iter().chain(isolated(rule)).collect::<Vec<_>>());
        let flow = flows("10.96.0.1".parse().unwrap(), Protocol::TCP, 80).next().unwrap();
        assert!(!node.passes(Direction::Egress, &flow));
        let (added, removed) = (vec![member("10.0.0.2/32")], vec![]);
        let report = node.apply(&[Delta::SetChanged { id: web, added, removed }]);
        assert!(node.passes(Direction::Egress, &flow) && report.endpoints.is_empty());
    }
}

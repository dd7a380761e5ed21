//! The verdict of HNS on a packet is the program's, for random programs and packets, at every moment.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::dataplane::node::*;
use crate::dataplane::programs::*;
use ipnet::IpNet;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::json;
use testkit::Stateful;
use testkit::exceptions::{Exception, no_acl_is_about_ports_of_sctp};
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::report;
use tortie_dataplane::{Delta, NodeState, PodWiring, Report};
use tortie_hcn::schema::{Modify, PolicyList, RequestType, lenient};
use tortie_hcn::{Call, Failure, Hcn, Kind};
use tortie_hns_emulator::{Config, DefaultAction, Emulator, Recorder};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, EntityMatch, Flow, Member, Rule, SetId, SetKind, evaluate,
};
use tortie_windows::{StaticRules, WindowsDataplane, WindowsWiring, ensure_network};

/// A peer, or the node itself.
fn peer() -> impl Strategy<Value = IpAddr> {
    prop_oneof![8 => address(), 1 => Just(NODE.into())]
}

fn flow() -> impl Strategy<Value = (Direction, Flow)> {
    let kind = (protocol(), port(), port(), (0_u8..4, 0_u8..3));
    (any::<bool>(), peer(), kind).prop_map(
        |(inwards, peer, (protocol, source_port, destination_port, icmp))| {
            let own = IpAddr::from(POD);
            let (source, destination) = if inwards { (peer, own) } else { (own, peer) };
            let (source_port, destination_port) =
                if protocol.has_ports() { (source_port, destination_port) } else { (0, 0) };
            let icmp = (protocol == Protocol::ICMP).then_some(icmp);
            let flow = Flow { source, destination, protocol, source_port, destination_port, icmp };
            (if inwards { Direction::Ingress } else { Direction::Egress }, flow)
        },
    )
}

/// The operator's rules before policy: about a peer, protocol and port.
#[derive(Debug, Clone)]
struct StaticRule {
    /// Whether it is of RuleType Host.
    of_host: bool,
    /// Whether its priority comes after that of the node's own packets to its pods.
    after_own_node: bool,
    direction: Direction,
    action: Action,
    peer: IpAddr,
    protocol: Protocol,
    port: Option<u16>,
}

/// In the order of their priorities.
fn static_rules() -> impl Strategy<Value = Vec<StaticRule>> {
    let direction = select(vec![Direction::Ingress, Direction::Egress]);
    let action = select(vec![Action::Allow, Action::Deny]);
    let protocol = select(vec![Protocol::TCP, Protocol::UDP]);
    let place = (prop::bool::weighted(0.4), prop::bool::weighted(0.3));
    let rule = (place, direction, action, peer(), protocol, prop::option::of(port()));
    let rule = rule.prop_map(|((of_host, after_own_node), direction, action, peer, protocol, port)| {
        StaticRule { of_host, after_own_node, direction, action, peer, protocol, port }
    });
    vec(rule, 0..4).prop_map(|mut rules| {
        rules.sort_by_key(|rule| rule.after_own_node);
        rules
    })
}

/// The same as the operator's file.
fn file(rules: &[StaticRule]) -> StaticRules {
    let rule = |(number, rule): (usize, &StaticRule)| {
        let (direction, ports) = match rule.direction {
            Direction::Ingress => ("In", "LocalPorts"),
            Direction::Egress => ("Out", "RemotePorts"),
        };
        let action = if rule.action == Action::Allow { "Allow" } else { "Block" };
        json!({"Name": "test", "Rule": {"Type": "ACL", "Id": number.to_string(), "Protocol": rule.protocol.0,
            "Action": action, "Direction": direction, "RemoteAddresses": rule.peer.to_string(),
            ports: rule.port.map(|port| port.to_string()).unwrap_or_default(),
            "RuleType": if rule.of_host { "Host" } else { "Switch" },
            "Priority": number + if rule.after_own_node { 901 } else { 1 }}})
    };
    let rules: Vec<_> = rules.iter().enumerate().map(rule).collect();
    StaticRules::parse(&json!({"Provider": "test", "Version": "1", "Rules": rules}).to_string()).unwrap()
}

/// The verdict of the operator's rules: the first matching one of the switch, unless there is a firewall and one of
/// its rules blocks.
fn before_policy(rules: &[StaticRule], firewall: bool, direction: Direction, flow: &Flow) -> Option<bool> {
    let remote = if direction == Direction::Ingress { flow.source } else { flow.destination };
    let matches = |rule: &&StaticRule| {
        rule.direction == direction
            && rule.peer == remote
            && rule.protocol == flow.protocol
            && rule.port.is_none_or(|port| port == flow.destination_port)
    };
    let matching: Vec<&StaticRule> = rules.iter().filter(matches).collect();
    if firewall && matching.iter().any(|rule| rule.of_host && rule.action == Action::Deny) {
        return Some(false);
    }
    let probes = is_probe(direction, flow);
    let first = matching.iter().find(|rule| !(rule.of_host || probes && rule.after_own_node));
    first.map(|rule| rule.action == Action::Allow)
}

/// Whether it is a packet of the node itself to its pod.
fn is_probe(direction: Direction, flow: &Flow) -> bool {
    direction == Direction::Ingress && node_addresses().contains(&flow.source)
}

/// The verdict by the node's report, as `explain` reads it, which always assumes a firewall.
fn decided_before_policy(rules: &StaticRules, direction: Direction, flow: &Flow) -> Option<bool> {
    let [source, destination] = [(flow.source, flow.source_port), (flow.destination, flow.destination_port)];
    let matches = |rule: &report::StaticRule| {
        let applies = !(is_probe(direction, flow) && rule.after_own_node);
        applies && rule.matches(direction, flow.protocol, source, destination)
    };
    report::StaticRule::decisive(&rules.reported(), matches).map(|rule| rule.allow)
}

fn expected(state: &NodeState, program: &EndpointProgram, direction: Direction, flow: &Flow) -> bool {
    is_probe(direction, flow) || evaluate(program, direction, flow, state)
}

fn knob() -> impl Strategy<Value = DefaultAction> {
    select(vec![DefaultAction::DenyBoth, DefaultAction::DenySameDirection, DefaultAction::Allow])
}

fn config() -> impl Strategy<Value = Config> {
    let version = select(vec![Config::SERVER_2019, Config::SERVER_2022, Config::NEWEST]);
    (version, knob(), prop::option::of(knob())).prop_map(|(version, switch_default, host_default)| Config {
        switch_default,
        host_default,
        ..Config::new(version, NODE)
    })
}

fn with_sets() -> impl Strategy<Value = WindowsPolicySets> {
    select(vec![WindowsPolicySets::Disabled, WindowsPolicySets::Enabled])
}

/// Which of these exceptions the pod reports; it must report nothing else.
fn reported_exceptions(report: &Report, exceptions: &[Exception]) -> Result<Vec<Exception>, TestCaseError> {
    let tells =
        |condition| exceptions.iter().copied().filter(move |exception| exception.is_reported_by(condition));
    let mut reported = report.endpoints.values().flatten();
    prop_assert!(reported.all(|condition| tells(condition).next().is_some()), "{report:?}");
    Ok(report.endpoints.values().flatten().flat_map(tells).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// Programs without ICMP types are rendered exactly, whatever the default of HNS is, except SCTP where rules name
    /// its ports.
    #[test]
    fn acls_have_the_verdict_of_the_program(
        config in config(), sets in with_sets(), rules in static_rules(), scenario in scenarios(false), flows in vec(flow(), 40),
    ) {
        let firewall = config.host_default.is_some();
        let mut node = Node::with(config, sets);
        let file = file(&rules);
        node.dataplane = node.dataplane.map(|dataplane| dataplane.with_static_rules(file.clone()));
        node.connect();
        let report = node.apply(&scenario.deltas());
        prop_assert!(report.node.is_empty() && !report.retry, "{report:?}");
        let reported = reported_exceptions(&report, &[Exception::SctpPorts])?;
        for (direction, flow) in &flows {
            let before = before_policy(&rules, firewall, *direction, flow);
            let allowed = before.unwrap_or_else(|| expected(&node.state, &scenario.program, *direction, flow));
            prop_assert_eq!(
                decided_before_policy(&file, *direction, flow), before_policy(&rules, true, *direction, flow)
            );
            let passes = node.passes(*direction, flow);
            let narrower = allowed && !passes && flow.protocol == Protocol::SCTP && reported.contains(&Exception::SctpPorts);
            prop_assert!(passes == allowed || narrower, "{:?} {:?}\n{:#?}", direction, flow, node.acls());
        }
        prop_assert!(no_acl_is_about_ports_of_sctp(&[node.endpoint()]).is_ok(), "{:#?}", node.acls());
    }

    /// What cannot be expressed allows less, never more, and is reported.
    #[test]
    fn rules_with_icmp_types_never_allow_more(sets in with_sets(), scenario in scenarios(true), flows in vec(flow(), 40)) {
        let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), sets);
        node.connect();
        let report = node.apply(&scenario.deltas());
        let reported = reported_exceptions(&report, &Exception::ALL)?;
        for (direction, flow) in &flows {
            let allowed = expected(&node.state, &scenario.program, *direction, flow);
            let passes = node.passes(*direction, flow);
            prop_assert!(allowed || !passes, "{:?} {:?}\n{:#?}", direction, flow, node.acls());
            // Protocols without an exception are exact in any case.
            let is_reported = Exception::of(flow.protocol).is_some_and(|exception| reported.contains(&exception));
            prop_assert!(passes == allowed || is_reported, "narrower, and not told: {:?} {:?}", direction, flow);
        }
    }

    /// While one list replaces another, nothing passes that both deny, and nothing is cut that both allow.
    #[test]
    fn transitions_between_programs_are_never_wrong(sets in with_sets(), before in scenarios(false), after in scenarios(false), flows in vec(flow(), 30)) {
        between(sets, false, &before.deltas(), &after.deltas(), &flows)?;
    }

    /// The same while lists with set names change together with these sets.
    #[test]
    fn transitions_between_sets_are_never_wrong(before in of_sets(), after in of_sets(), same in 0_u8..4) {
        // Sometimes only the sets change, or only the rules.
        let after = OfSets {
            rules: if same == 0 { before.rules.clone() } else { after.rules },
            sets: if same == 1 { before.sets.clone() } else { after.sets },
        };
        between(WindowsPolicySets::Enabled, false, &before.deltas(), &after.deltas(), &all_peers())?;
    }

    /// The same state again sends nothing, also after a restart, and whatever the history.
    #[test]
    fn existing_acls_are_not_sent_again(sets in with_sets(), before in scenarios(true), scenario in scenarios(true)) {
        let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), sets);
        node.connect();
        node.apply(&before.deltas());
        node.apply(&scenario.deltas());
        // Unused sets are removed by a full check.
        node.wait(60);
        node.dataplane.resync();
        node.hns.take();
        node.wait(60);
        node.dataplane.resync();
        prop_assert_eq!(node.hns.take_changes(), vec![]);
        let mut restarted = Node::over(node.hns.clone());
        restarted.apply(&[policy_sets(sets)]);
        restarted.apply(&scenario.deltas());
        prop_assert_eq!(restarted.hns.take_changes(), vec![]);
    }
}

/// Changes one state to another, and judges the flows all the while.
fn between(
    sets: WindowsPolicySets,
    sets_apart: bool,
    before: &[Delta],
    after: &[Delta],
    flows: &[(Direction, Flow)],
) -> Result<(), TestCaseError> {
    let watched = Arc::new(Watched::new());
    watched.sets_apart.store(sets_apart, Ordering::Relaxed);
    ensure_network(&*watched, &spec()).unwrap();
    let hcn: Arc<dyn Hcn> = watched.clone();
    let wiring = WindowsWiring::new(hcn.clone());
    let node = Node::over(watched.hns.clone());
    let pod = attachment(node.namespace());
    let mut dataplane = Stateful::new(WindowsDataplane::new(hcn));
    dataplane.apply(&[policy_sets(sets)]);
    *watched.flows.lock().unwrap() = flows.to_vec();

    // During the connection it is closed for everybody.
    wiring.connect(&pod).unwrap();
    for seen in watched.seen.lock().unwrap().drain(..) {
        prop_assert!(!seen.contains(&true), "open before policy");
    }
    dataplane.apply(before);
    watched.seen.lock().unwrap().clear();
    let verdicts =
        || -> Vec<bool> { flows.iter().map(|(direction, flow)| node.passes(*direction, flow)).collect() };
    let old = verdicts();
    reported_exceptions(&dataplane.apply(after), &[Exception::SctpPorts])?;
    let new = verdicts();
    for seen in watched.seen.lock().unwrap().iter() {
        for (index, passes) in seen.iter().enumerate() {
            prop_assert!(*passes == old[index] || *passes == new[index], "{:?}", flows[index]);
        }
    }
    Ok(())
}

/// Flows in both directions between the pod and each address that sets may have.
fn all_peers() -> Vec<(Direction, Flow)> {
    let peers = (0_u8..8).map(|last| IpAddr::from([10, 0, 0, last])).chain([POD.into()]);
    let flows = |peer| {
        let own = IpAddr::from(POD);
        let flow = |source, destination| Flow {
            source,
            destination,
            protocol: Protocol::TCP,
            source_port: 1,
            destination_port: 1,
            icmp: None,
        };
        [(Direction::Ingress, flow(peer, own)), (Direction::Egress, flow(own, peer))]
    };
    peers.flat_map(flows).collect()
}

/// A peer that moves from one set to another is always admitted, also by an HNS that changes one set after the other.
#[test]
fn a_peer_that_moves_between_sets_is_always_in_one() {
    let rule = |set: &str| (Action::Allow, [vec![SetId::new(set)], vec![]]);
    let peers = |last: u8| BTreeSet::from([IpNet::from(IpAddr::from([10, 0, 0, last]))]);
    for [from, to] in [["s:a", "s:b"], ["s:b", "s:a"]] {
        let rules = vec![rule(from), rule(to)];
        let state = |of: &str| OfSets {
            rules: rules.clone(),
            sets: ["s:a", "s:b"].map(|name| if name == of { peers(1) } else { peers(7) }),
        };
        let (before, after) = (state(from).deltas(), state(to).deltas());
        between(WindowsPolicySets::Enabled, true, &before, &after, &all_peers()).unwrap();
    }
}

/// A policy whose rules name sets, and their members.
#[derive(Debug, Clone)]
struct OfSets {
    rules: Vec<(Action, [Vec<SetId>; 2])>,
    sets: [BTreeSet<IpNet>; 2],
}

fn of_sets() -> impl Strategy<Value = OfSets> {
    let names = || prop_oneof![3 => Just(vec![]), 2 => select(vec!["s:a", "s:b"]).prop_map(|name| vec![SetId::new(name)])];
    let action = select(vec![Action::Allow, Action::Deny, Action::Pass]);
    let members = || {
        let own = prop_oneof![4 => 0_u8..8, 1 => Just(255)];
        let net = own.prop_map(|last| match last {
            255 => IpNet::from(IpAddr::from(POD)),
            last => IpNet::from(IpAddr::from([10, 0, 0, last])),
        });
        btree_set(net, 0..6)
    };
    let rules = vec((action, [names(), names()]), 1..4);
    (rules, [members(), members()]).prop_map(|(rules, sets)| OfSets { rules, sets })
}

impl OfSets {
    fn deltas(&self) -> Vec<Delta> {
        let entity = |[sets, not_sets]: &[Vec<SetId>; 2]| EntityMatch {
            sets: sets.clone(),
            not_sets: not_sets.clone(),
            ..EntityMatch::default()
        };
        let rules = |inwards: bool| {
            let rule = |(action, peers): &(Action, [Vec<SetId>; 2])| match inwards {
                true => Rule { source: entity(peers), ..Rule::all(*action) },
                false => Rule { destination: entity(peers), ..Rule::all(*action) },
            };
            self.rules.iter().map(rule).collect()
        };
        let set = |(name, nets): (&str, &BTreeSet<IpNet>)| {
            let members = nets.iter().copied().map(Member::Net).collect();
            Delta::SetCreated(SetId::new(name), SetKind::Nets, members)
        };
        let mut deltas = vec![local_node(), own_block(), policy("web", rules(true), rules(false))];
        deltas.extend(["s:a", "s:b"].into_iter().zip(&self.sets).map(set));
        let tiers = || vec![tier("default", &["web"], EndOfTier::Deny)];
        deltas.push(endpoint(EndpointProgram { ingress: tiers(), egress: tiers(), profiles: vec![] }));
        deltas
    }
}

/// Judges flows after every single call that changes an endpoint.
struct Watched {
    hns: Arc<Recorder<Emulator>>,
    flows: Mutex<Vec<(Direction, Flow)>>,
    /// Whether sets in one request are changed one after another.
    sets_apart: AtomicBool,
    seen: Mutex<Vec<Vec<bool>>>,
}

impl Watched {
    fn new() -> Watched {
        let hns = Arc::new(Recorder::new(Emulator::new(Config::new(Config::SERVER_2022, NODE))));
        Watched { hns, flows: Mutex::default(), sets_apart: AtomicBool::new(false), seen: Mutex::default() }
    }
}

impl Hcn for Watched {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        if self.sets_apart.load(Ordering::Relaxed)
            && let Call::Modify { kind: Kind::Network, id, settings } = call
            && let Ok(request) = lenient::<Modify>(settings)
            && request.request_type == RequestType::Update
        {
            let policies: PolicyList = lenient(&request.settings.to_string()).unwrap();
            for policy in policies.policies {
                let one = Modify::policies(RequestType::Update, vec![policy]);
                let settings = serde_json::to_string(&one).unwrap();
                self.judged(&Call::Modify { kind: Kind::Network, id: *id, settings })?;
            }
            return Ok(String::new());
        }
        self.judged(call)
    }
}

impl Watched {
    fn judged(&self, call: &Call) -> Result<String, Failure> {
        let answer = self.hns.call(call)?;
        if !call.is_read() {
            let flows = self.flows.lock().unwrap();
            let judge = |(direction, flow): &(Direction, Flow)| {
                let verdict =
                    self.hns.inner().judge(tortie_windows::endpoint_id(CONTAINER), &packet(*direction, flow));
                verdict.is_ok_and(|verdict| verdict == tortie_hns_emulator::Verdict::Allow)
            };
            self.seen.lock().unwrap().push(flows.iter().map(judge).collect());
        }
        Ok(answer)
    }
}

//! What HNS does with a packet is what the program says, for random programs and packets, at every moment.
#![allow(clippy::unwrap_used, reason = "a test says what it expects by unwrap")]

mod node;
mod programs;

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use node::*;
use programs::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tortie_api::net::{Direction, Protocol};
use tortie_dataplane::{Dataplane, NodeState, PodWiring};
use tortie_hcn::{Call, Failure, Hcn};
use tortie_hns_emulator::{Config, DefaultAction, Emulator, Recorder};
use tortie_policy::program::{EndpointProgram, Flow, evaluate};
use tortie_windows::{PolicySetsUse, WindowsDataplane, WindowsWiring, ensure_overlay};

fn flow() -> impl Strategy<Value = (Direction, Flow)> {
    let kind = (protocol(), port(), port(), (0_u8..4, 0_u8..3));
    (any::<bool>(), address(), kind).prop_map(
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

fn expected(state: &NodeState, program: &EndpointProgram, direction: Direction, flow: &Flow) -> bool {
    direction == Direction::Ingress && node_addresses().contains(&flow.source)
        || evaluate(program, direction, flow, state)
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

fn policy_sets() -> impl Strategy<Value = PolicySetsUse> {
    select(vec![PolicySetsUse::Disabled, PolicySetsUse::Enabled])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// Programs without ICMP types are rendered exactly, whatever HNS does by default.
    #[test]
    fn the_verdict_is_that_of_the_program(config in config(), sets in policy_sets(), said in said(false), flows in vec(flow(), 40)) {
        let mut node = Node::with(config, sets);
        node.connect();
        let report = node.apply(&said.deltas());
        prop_assert!(report.endpoints.is_empty() && report.node.is_empty() && !report.retry, "{report:?}");
        for (direction, flow) in &flows {
            let allowed = expected(&node.state, &said.program, *direction, flow);
            prop_assert_eq!(node.passes(*direction, flow), allowed, "{:?} {:?}\n{:#?}", direction, flow, node.acls());
        }
    }

    /// What cannot be said allows less, never more, and is told.
    #[test]
    fn with_icmp_types_never_more_is_allowed(sets in policy_sets(), said in said(true), flows in vec(flow(), 40)) {
        let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), sets);
        node.connect();
        let report = node.apply(&said.deltas());
        for (direction, flow) in &flows {
            let allowed = expected(&node.state, &said.program, *direction, flow);
            let passes = node.passes(*direction, flow);
            prop_assert!(allowed || !passes, "{:?} {:?}\n{:#?}", direction, flow, node.acls());
            let told = report.endpoints.get(&pod_id());
            let told = told.is_some_and(|told| told.iter().all(|c| c.reason == "RuleNotExpressible"));
            prop_assert!(passes == allowed || told, "narrower, and not told: {:?} {:?}", direction, flow);
            // The protocols that have no types are exact all the same.
            if flow.protocol != Protocol::ICMP {
                prop_assert_eq!(passes, allowed, "{:?} {:?}", direction, flow);
            }
        }
    }

    /// While one list takes the place of another, nothing passes that both deny, and nothing is cut that both allow.
    #[test]
    fn no_moment_between_two_programs_is_wrong(sets in policy_sets(), before in said(false), after in said(false), flows in vec(flow(), 30)) {
        let watched = Arc::new(Watched::new());
        ensure_overlay(&*watched, &spec()).unwrap();
        let hcn: Arc<dyn Hcn> = watched.clone();
        let wiring = WindowsWiring::new(hcn.clone());
        let node = Node::over(watched.hns.clone());
        let pod = attachment(node.namespace());
        let mut dataplane = WindowsDataplane::new(hcn, None).with_policy_sets(sets);
        *watched.flows.lock().unwrap() = flows.clone();

        // Connecting: closed, but for nobody.
        wiring.connect(&pod).unwrap();
        for seen in watched.seen.lock().unwrap().drain(..) {
            prop_assert!(!seen.contains(&true), "open before policy");
        }
        dataplane.apply(&before.deltas());
        watched.seen.lock().unwrap().clear();
        let verdicts = || -> Vec<bool> { flows.iter().map(|(direction, flow)| node.passes(*direction, flow)).collect() };
        let old = verdicts();
        let report = dataplane.apply(&after.deltas());
        prop_assert!(report.endpoints.is_empty());
        let new = verdicts();
        for seen in watched.seen.lock().unwrap().iter() {
            for (index, passes) in seen.iter().enumerate() {
                prop_assert!(*passes == old[index] || *passes == new[index], "{:?}", flows[index]);
            }
        }
    }

    /// The same state again sends nothing, also after a restart.
    #[test]
    fn what_is_there_is_not_sent_again(sets in policy_sets(), said in said(true)) {
        let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), sets.clone());
        node.connect();
        node.apply(&said.deltas());
        node.hns.take();
        node.dataplane.resync();
        prop_assert_eq!(node.hns.take_changes(), vec![]);
        let mut restarted = Node::over(node.hns.clone());
        restarted.dataplane = restarted.dataplane.with_policy_sets(sets);
        restarted.apply(&said.deltas());
        prop_assert_eq!(restarted.hns.take_changes(), vec![]);
    }
}

/// Judges flows after every single call that changes an endpoint.
struct Watched {
    hns: Arc<Recorder<Emulator>>,
    flows: Mutex<Vec<(Direction, Flow)>>,
    seen: Mutex<Vec<Vec<bool>>>,
}

impl Watched {
    fn new() -> Watched {
        let hns = Arc::new(Recorder::new(Emulator::new(Config::new(Config::SERVER_2022, NODE))));
        Watched { hns, flows: Mutex::default(), seen: Mutex::default() }
    }
}

impl Hcn for Watched {
    fn call(&self, call: &Call) -> Result<String, Failure> {
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

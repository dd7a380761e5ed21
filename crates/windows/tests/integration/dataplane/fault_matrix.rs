//! Every fault of HNS at every change of every operation, on every preset: nothing opens meanwhile, the desired state is reached, and
//! nothing is left behind.
//!
//! Before each call, HNS judges packets of the pod. An endpoint that came back from a restart without ACLs is as open as HNS left it
//! until the next check (docs/status.md, Limits on Windows). Only that is excepted.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::dataplane::node::*;
use serde_json::Value;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{
    Delta, MacAddress, PodAttachment, PodWiring, Reason, Report, Route, RouteTarget, Vtep,
};
use tortie_hcn::schema::{Modify, Policy, RemoteSubnetRoute, RequestType};
use tortie_hcn::{Call, Failure, HResult, Hcn, HcnExt, Kind, Version};
use tortie_hns_emulator::{Config, Emulator, Survives, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow, Rule};
use tortie_windows::{NETWORK, endpoint_id};

/// Server 2019 before and after its updates, 2022 and 2025.
const PRESETS: [Version; 4] = [Version::new(9, 2), Config::SERVER_2019, Config::SERVER_2022, Config::NEWEST];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Add,
    Del,
    ChangePolicy,
    /// The blocks of other nodes.
    ChangeRemotes,
    /// A check finds that an ACL is missing.
    Check,
}

const OPERATIONS: [Operation; 5] =
    [Operation::Add, Operation::Del, Operation::ChangePolicy, Operation::ChangeRemotes, Operation::Check];

/// What happens at a call that changes something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// HNS refuses it.
    Refuses,
    /// HNS reports success and does nothing. (A creation answers with the object, so it cannot.)
    Lies,
    /// The call happens, and its reply is lost.
    LosesTheReply,
    /// The call happens later, before the next change or after the operation.
    IsLate,
    /// Neither this call nor a later one is answered.
    Hangs,
    /// HNS crashes, and is away for the rest. It comes back with this.
    Crashes(Survives),
    /// HNS restarts before the call, with this.
    Restarts(Survives),
    /// From this call on, the network shows no usable provider address.
    Degrades,
    /// From this call on, each one takes almost as long as its deadline.
    IsSlow,
}

impl Fault {
    /// Whether endpoints may come back without their ACLs.
    fn loses(self) -> bool {
        matches!(self, Fault::Restarts(survives) | Fault::Crashes(survives) if survives != Survives::Everything)
    }
}

const FAULTS: [Fault; 13] = [
    Fault::Refuses,
    Fault::Lies,
    Fault::LosesTheReply,
    Fault::IsLate,
    Fault::Hangs,
    Fault::Crashes(Survives::Everything),
    Fault::Crashes(Survives::AllButAcls),
    Fault::Restarts(Survives::Everything),
    Fault::Restarts(Survives::AllButAcls),
    Fault::Restarts(Survives::AllButAclsAndSets),
    // A reboot: the network does not persist.
    Fault::Restarts(Survives::Nothing),
    Fault::Degrades,
    Fault::IsSlow,
];

/// The only clients of the pod, before and after a change of policy.
const CLIENTS: [&str; 2] = ["10.9.0.1/32", "10.9.0.2/32"];

fn web(client: &str) -> Delta {
    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.source.nets = vec![client.parse().unwrap()];
    policy("web", vec![rule.clone()], vec![to(&[client])])
}

fn program() -> EndpointProgram {
    let tiers = || vec![tier("default", &["web"], EndOfTier::Deny)];
    EndpointProgram { ingress: tiers(), egress: tiers(), profiles: vec![] }
}

/// The block of another node, which is on the node with this number.
fn remote(number: u8) -> [Delta; 2] {
    let (node, last) = (format!("node-{number}"), number);
    let vtep = Vtep {
        node: node.clone(),
        address: [10, 244, last, 0].into(),
        mac: MacAddress([0x66, 0, 0, 0, 0, last]),
        parent: [172, 16, 0, last].into(),
        mtu: None,
    };
    let destination = "10.244.9.0/26".parse().unwrap();
    [Delta::Vtep(vtep), Delta::Route(Route { destination, target: RouteTarget::Vxlan { node } })]
}

/// TCP between the pod and its clients and a stranger, in both directions.
fn flows() -> Vec<(Direction, Flow)> {
    let peers = ["10.9.0.1", "10.9.0.2", "10.9.0.3"].map(|peer| peer.parse().unwrap());
    let out = peers.map(|destination| Flow {
        source: POD.into(),
        destination,
        protocol: Protocol::TCP,
        source_port: 40_000,
        destination_port: 80,
        icmp: None,
    });
    out.into_iter().flat_map(|flow| [(Direction::Egress, flow), (Direction::Ingress, back(flow))]).collect()
}

/// What passes; `None` if there is no endpoint, or if it has lost its closing ACLs, and may have.
fn passing(hns: &Emulator, flows: &[(Direction, Flow)], may_be_lost: bool) -> Option<Vec<bool>> {
    let id = endpoint_id(CONTAINER);
    let policies = hns.endpoint(id).ok()?.policies;
    let closures = policies.iter().filter(|policy| policy.settings["Id"] == "tortie/closed").count();
    let passes = |(direction, flow): &(Direction, Flow)| {
        hns.judge(id, &packet(*direction, flow)).unwrap() == Verdict::Allow
    };
    (closures == 2 || !may_be_lost).then(|| flows.iter().map(passes).collect())
}

/// A node before the operation, with its pod.
fn prepared(version: Version, operation: Operation) -> (Node, PodAttachment) {
    let mut node = Node::new(Config::new(version, NODE));
    let pod = attachment(node.namespace());
    let mut deltas = vec![local_node(), own_block(), allow_all(), web(CLIENTS[0])];
    deltas.extend(remote(1));
    if operation != Operation::Add {
        node.wiring.connect(&pod).unwrap();
        deltas.push(endpoint(program()));
    }
    assert_eq!(node.apply(&deltas), Report::default());
    if operation == Operation::Check {
        let lost = node.acls().into_iter().find(|acl| acl.id.ends_with("/web")).unwrap();
        let remove = Modify::policies(RequestType::Remove, vec![Policy::of(&lost)]);
        node.hns.inner().modify_endpoint(endpoint_id(CONTAINER), &remove).unwrap();
    }
    node.hns.take();
    (node, pod)
}

/// Whether everything is in force. After a reboot the network has another MAC address, which the node announces.
fn is_fine(report: &Report) -> bool {
    !report.retry
        && report.endpoints.is_empty()
        && report.node.iter().all(|condition| condition.reason == Reason::OverlayRemade)
}

/// Carries the operation out once. Returns whether it is done.
fn operate(node: &mut Node, operation: Operation, pod: &PodAttachment) -> bool {
    match operation {
        Operation::Add => node.wiring.connect(pod).is_ok() && is_fine(&node.apply(&[endpoint(program())])),
        Operation::Del => {
            let gone = node.wiring.disconnect(&pod.endpoint, CONTAINER).is_ok();
            is_fine(&node.apply(&[Delta::EndpointRemoved(pod_id())])) && gone
        }
        Operation::ChangePolicy => is_fine(&node.apply(&[web(CLIENTS[1])])),
        Operation::ChangeRemotes => is_fine(&node.apply(&remote(2))),
        Operation::Check => is_fine(&node.dataplane.resync()),
    }
}

/// What must be the same whatever happened.
#[derive(Debug, PartialEq)]
struct Outcome {
    passes: Option<Vec<bool>>,
    endpoints: Vec<tortie_hcn::Guid>,
    /// Whether each is in the pod's namespace.
    attached: bool,
    remotes: Vec<(String, String)>,
    networks: usize,
    balancers: usize,
}

fn outcome(node: &Node, pod: &PodAttachment) -> Outcome {
    let hns = node.hns.inner();
    let network = hns.network_by_name(NETWORK).unwrap().unwrap();
    let routes = network.policies.iter().filter_map(|it| it.settings::<RemoteSubnetRoute>().unwrap());
    let count = |kind| {
        let all = hns.call(&Call::Enumerate { kind, query: String::new() }).unwrap();
        serde_json::from_str::<Vec<Value>>(&all).unwrap().len()
    };
    let endpoints = hns.endpoints_of_network(network.id).unwrap();
    Outcome {
        attached: endpoints.iter().all(|it| it.host_compute_namespace.to_string() == pod.netns),
        passes: passing(hns, &flows(), false),
        endpoints: endpoints.iter().map(|it| it.id).collect(),
        remotes: routes.map(|it| (it.destination_prefix, it.provider_address)).collect(),
        networks: count(Kind::Network),
        balancers: count(Kind::LoadBalancer),
    }
}

/// What a failing HNS has seen.
#[derive(Default)]
struct Seen {
    /// What passed before each call.
    passes: Vec<Vec<bool>>,
    /// The call that still happens.
    late: Option<Call>,
}

/// Makes HNS fail at the change with this number.
fn fail(node: &Node, fault: Fault, at: usize) -> Arc<Mutex<Seen>> {
    let shared = Arc::new(Mutex::new(Seen::default()));
    let (hns, seen, ahead) = (Arc::clone(&node.hns), Arc::clone(&shared), Arc::clone(&node.ahead));
    let (mut changes, flows) = (0, flows());
    if fault == Fault::LosesTheReply {
        let mut answered = 0;
        node.hns.lose_replies(move |call| {
            answered += usize::from(!call.is_read());
            (!call.is_read() && answered == at + 1).then(|| Failure::new(HResult::ERROR_TIMEOUT, "no answer"))
        });
    }
    node.hns.set_fault(move |call| {
        let (hns, mut seen) = (hns.inner(), seen.lock().unwrap());
        let (is_it, later) =
            (!call.is_read() && changes == at, changes > at || !call.is_read() && changes == at);
        if let Some(waiting) = seen.late.take_if(|_| !call.is_read()) {
            // The caller no longer listens.
            drop(hns.call(&waiting));
        }
        changes += usize::from(!call.is_read());
        if let (true, Fault::Restarts(survives)) = (is_it, fault) {
            hns.restart(survives).unwrap();
        }
        seen.passes.extend(passing(hns, &flows, fault.loses()));
        let fails = |code, text: &str| Some(Err(Failure::new(code, text)));
        match fault {
            Fault::Refuses if is_it => fails(HResult::HCN_E_INVALID_POLICY, "not now"),
            Fault::Lies if is_it && !matches!(call, Call::Create { .. }) => Some(Ok(String::new())),
            Fault::IsLate if is_it => {
                seen.late = Some(call.clone());
                fails(HResult::ERROR_TIMEOUT, "no answer")
            }
            Fault::Hangs if later => fails(HResult::ERROR_TIMEOUT, "no answer"),
            Fault::Crashes(_) if later => fails(HResult::RPC_S_SERVER_UNAVAILABLE, "it has crashed"),
            Fault::Degrades if later => degraded(hns, call),
            Fault::IsSlow if later => {
                *ahead.lock().unwrap() += Duration::from_secs(29);
                None
            }
            _ => None,
        }
    });
    shared
}

/// The network as it is while its adapter has no address.
fn degraded(hns: &Emulator, call: &Call) -> Option<Result<String, Failure>> {
    let Call::Query { kind: Kind::Network, .. } = call else { return None };
    let answer = hns.call(call).map(|text| {
        let mut network: Value = serde_json::from_str(&text).unwrap();
        for policy in network["Policies"].as_array_mut().unwrap() {
            if policy["Type"] == "ProviderAddress" {
                policy["Settings"]["ProviderAddress"] = "169.254.7.7".into();
            }
        }
        network.to_string()
    });
    Some(answer)
}

/// HNS is well again. The callers repeat what was not done, as kubelet and the agent do.
fn recover(node: &mut Node, operation: Operation, (pod, mut done): (&mut PodAttachment, bool), case: &str) {
    let mut last = Report::default();
    for _ in 0..6 {
        node.wait(3600);
        node.dataplane.resync();
        let hns = Arc::clone(&node.hns);
        if hns.namespace(pod.netns.parse().unwrap()).is_err() && operation != Operation::Del {
            // After a reboot, kubelet makes the sandbox anew.
            *pod = attachment(node.namespace());
            drop(node.wiring.connect(pod));
        }
        done = done || operate(node, operation, pod);
        last = node.dataplane.resync();
        if done && is_fine(&last) {
            return;
        }
    }
    panic!("{case}: it is not reached: {last:?}");
}

fn through(
    version: Version,
    operation: Operation,
    (fault, at): (Fault, usize),
    wanted: &Outcome,
    closed: &[bool],
) {
    let case = format!("HNS {version}, {operation:?}, {fault:?} at change {at}");
    let (mut node, mut pod) = prepared(version, operation);
    let seen = fail(&node, fault, at);
    let done = operate(&mut node, operation, &pod);
    node.hns.clear_fault();
    let Seen { passes: mut seen, late } = std::mem::take(&mut *seen.lock().unwrap());
    // The caller of the late call no longer listens.
    late.into_iter().for_each(|call| drop(node.hns.inner().call(&call)));
    if let Fault::Crashes(survives) = fault {
        node.hns.inner().restart(survives).unwrap();
    }
    seen.extend(passing(node.hns.inner(), &flows(), fault.loses()));
    for passes in seen {
        let opened = (0..closed.len()).find(|index| closed[*index] && passes[*index]);
        assert!(opened.is_none(), "{case}: opened {:?}", opened.map(|index| flows()[index]));
    }
    recover(&mut node, operation, (&mut pod, done), &case);
    assert_eq!(outcome(&node, &pod), *wanted, "{case}");
    node.hns.take();
    assert!(is_fine(&node.dataplane.resync()), "{case}");
    assert_eq!(node.hns.take_changes(), [], "{case}: it does not come to rest");
}

#[test]
fn every_fault_of_every_operation_on_every_preset() {
    let mut cases = 0;
    for version in PRESETS {
        for operation in OPERATIONS {
            let (mut quiet, pod) = prepared(version, operation);
            let before = passing(quiet.hns.inner(), &flows(), false);
            assert!(operate(&mut quiet, operation, &pod), "{version} {operation:?}");
            let changes = quiet.hns.take_changes().len();
            assert!(changes > 0, "{version} {operation:?}");
            assert!(is_fine(&quiet.dataplane.resync()));
            let wanted = outcome(&quiet, &pod);
            // What neither the old state nor the new one lets pass.
            let closed: Vec<bool> = (0..flows().len())
                .map(|index| {
                    ![&before, &wanted.passes].iter().any(|it| it.as_ref().is_some_and(|all| all[index]))
                })
                .collect();
            assert!(closed.iter().filter(|closed| **closed).count() >= 2);
            for fault in FAULTS {
                for at in 0..changes {
                    through(version, operation, (fault, at), &wanted, &closed);
                    cases += 1;
                }
            }
        }
    }
    assert!(cases > 500, "{cases} cases");
}

//! The table of goal F1, as a node's state.
#![allow(dead_code)] // each bench uses a part

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::{Delta, Endpoint, EndpointId};
use tortie_kernel::route::{NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, EntityMatch, Member, PolicyId, PolicyKind, PolicyRules, Rule, SetId, SetKind,
    TierProgram,
};

pub(crate) const SETS: u32 = 2_000;
pub(crate) const MEMBERS: u32 = 100;
pub(crate) const POLICIES: u32 = 2_000;
pub(crate) const RULES: u32 = 10;

/// The shape of the rules.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub name: &'static str,
    pub pods: u32,
    /// Whether a policy's rules match one selector and different ports; otherwise each matches another selector, too.
    pub one_selector: bool,
}

impl Shape {
    /// The set that a rule of a policy matches.
    pub(crate) fn set(self, policy: u32, rule: u32) -> u32 {
        if self.one_selector { policy % SETS } else { (policy + rule * 101) % SETS }
    }
}

pub(crate) fn port(rule: u32) -> u16 {
    8000 + rule as u16 * 2
}

pub(crate) fn addresses(set: u32) -> impl Iterator<Item = IpAddr> {
    (0..MEMBERS).map(move |n| (0x0a00_0000 + set * MEMBERS + n).to_be_bytes().into())
}

pub(crate) fn set_id(n: u32) -> SetId {
    SetId::new(format!("s:{n:036}"))
}

pub(crate) fn deltas(shape: Shape) -> Vec<Delta> {
    let members = |set| addresses(set).map(|address| Member::Net(address.into())).collect();
    let mut deltas: Vec<_> =
        (0..SETS).map(|n| Delta::SetCreated(set_id(n), SetKind::Nets, members(n))).collect();
    let each = POLICIES / shape.pods;
    for pod in 0..shape.pods {
        let mut policies = Vec::new();
        for number in pod * each..(pod + 1) * each {
            let rule = |n: u32| {
                let sets = vec![set_id(shape.set(number, n))];
                let ports = vec![PortRange { first: port(n), last: port(n) }];
                Rule {
                    protocol: Some(Protocol::TCP),
                    source: EntityMatch { sets, ..EntityMatch::default() },
                    destination: EntityMatch { ports, ..EntityMatch::default() },
                    ..Rule::all(Action::Allow)
                }
            };
            let (namespace, name) = ("bench".into(), format!("p{number}").into());
            let id = PolicyId { kind: PolicyKind::NetworkPolicy, namespace, name };
            policies.push(id.clone());
            let ingress = (0..RULES).map(rule).collect();
            deltas.push(Delta::Policy(id, Arc::new(PolicyRules { ingress, egress: vec![] })));
        }
        let tier = TierProgram { name: "default".into(), policies, end: EndOfTier::Deny };
        let endpoint = Endpoint {
            container_id: format!("container-{pod}").into(),
            host_interface: format!("cali{pod}").into(),
            addresses: vec![IpAddr::from((0xac10_0000 + pod).to_be_bytes())],
            mac: None,
            host_ports: Default::default(),
            program: Arc::new(EndpointProgram { ingress: vec![tier], ..EndpointProgram::default() }),
        };
        let (namespace, interface) = ("bench".into(), "eth0".into());
        let id = EndpointId { namespace, pod: format!("pod-{pod}").into(), interface };
        deltas.push(Delta::Endpoint(id, Arc::new(endpoint)));
    }
    deltas
}

/// Creates the interfaces of that many pods, in the calling thread's network namespace.
pub(crate) fn make_links(pods: u32) {
    let mut socket = RouteSocket::open().unwrap();
    for pod in 0..pods {
        let (name, peer) = (format!("cali{pod}"), format!("peer{pod}"));
        let peer = Peer { name: &peer, mac: None, mtu: None, namespace: None };
        let link = NewLink { up: true, ..NewLink::new(&name, NewLinkKind::Veth(peer)) };
        socket.create(&link).unwrap();
    }
}

/// Runs it that many times, and returns the median and the 99th percentile.
pub(crate) fn measure(times: usize, mut work: impl FnMut()) -> [Duration; 2] {
    let mut took: Vec<Duration> = (0..times)
        .map(|_| {
            let started = Instant::now();
            work();
            started.elapsed()
        })
        .collect();
    took.sort();
    [took[times / 2], took[times * 99 / 100]]
}

/// The memory of this process, in bytes.
pub(crate) fn resident() -> u64 {
    memory("VmRSS:")
}

/// The peak memory of this process, in bytes.
pub(crate) fn peak() -> u64 {
    memory("VmHWM:")
}

fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

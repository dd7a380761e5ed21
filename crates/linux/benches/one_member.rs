//! One member that comes into a set and goes again, in a table with 2,000 sets, 200,000 members and 20,000 rules; and the
//! whole table from nothing, and read back. Needs root; it works in a network namespace of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::bench();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::net::IpAddr;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use tortie_api::net::{Action, Protocol};
    use tortie_dataplane::{Dataplane as _, Delta, Endpoint, EndpointId, Report};
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;
    use tortie_linux::namespace::NetNs;
    use tortie_linux::route::{NewLink, NewLinkKind, Peer, RouteSocket};
    use tortie_policy::program::*;

    const SETS: u32 = 2_000;
    const MEMBERS: u32 = 100;
    /// Each pod has its own policies, so that nothing is shared.
    const PODS: u32 = 100;
    const RULES_OF_A_POD: u32 = 200;

    pub fn bench() {
        NetNs::create().unwrap().run(in_namespace).unwrap();
    }

    fn in_namespace() {
        let mut dataplane = Dataplane::open(Config::default()).unwrap();
        (0..PODS).for_each(|pod| {
            let (name, peer) = (format!("cali{pod}"), format!("peer{pod}"));
            let peer = Peer { name: &peer, mac: None, mtu: None, namespace: None };
            RouteSocket::open()
                .unwrap()
                .create(&NewLink { up: true, ..NewLink::new(&name, NewLinkKind::Veth(peer)) })
                .unwrap();
        });
        let deltas = deltas();
        let mut apply = |deltas: &[Delta]| assert_eq!(dataplane.apply(deltas), Report::default());
        measure("all of it, from nothing", 1, || apply(&deltas));

        let member = vec![Member::Net(IpAddr::from([192, 168, 7, 9]).into())];
        let id = set_id(SETS / 2);
        let came = [Delta::SetChanged { id: id.clone(), added: member.clone(), removed: vec![] }];
        let went = [Delta::SetChanged { id, added: vec![], removed: member }];
        let mut turn = [&came, &went].into_iter().cycle();
        measure("a member comes or goes", 10_000, || apply(turn.next().unwrap()));

        let policy = |delta: &&Delta| matches!(delta, Delta::Policy(..));
        let Some(Delta::Policy(id, rules)) = deltas.iter().find(policy) else { unreachable!() };
        let mut shorter = rules.as_ref().clone();
        shorter.ingress.pop();
        let versions =
            [shorter, rules.as_ref().clone()].map(|rules| [Delta::Policy(id.clone(), Arc::new(rules))]);
        let mut turn = versions.iter().cycle();
        measure("one of 200 rules of a policy goes or comes", 200, || apply(turn.next().unwrap()));
        measure("all of it is read back and compared", 10, || {
            assert_eq!(dataplane.resync(), Report::default())
        });
    }

    /// Does it so many times, and prints the median and the 99th percentile.
    fn measure(what: &str, times: usize, mut work: impl FnMut()) {
        let mut took: Vec<Duration> = (0..times)
            .map(|_| {
                let started = Instant::now();
                work();
                started.elapsed()
            })
            .collect();
        took.sort();
        println!("{what}: p50 {:?}, p99 {:?} ({times} times)", took[times / 2], took[times * 99 / 100]);
    }

    fn set_id(n: u32) -> SetId {
        SetId::new(format!("s:{n:036}"))
    }

    fn deltas() -> Vec<Delta> {
        let members = |set: u32| (0..MEMBERS).map(move |n| 0x0a00_0000 + set * MEMBERS + n);
        let members = |set| {
            members(set).map(|address| Member::Net(IpAddr::from(address.to_be_bytes()).into())).collect()
        };
        let mut deltas: Vec<_> =
            (0..SETS).map(|n| Delta::SetCreated(set_id(n), SetKind::Nets, members(n))).collect();
        for pod in 0..PODS {
            let rule = |n| Rule {
                protocol: Some(Protocol::TCP),
                source: EntityMatch { sets: vec![set_id((pod * 31 + n) % SETS)], ..EntityMatch::default() },
                ..Rule::all(Action::Allow)
            };
            let id = PolicyId {
                kind: PolicyKind::NetworkPolicy,
                namespace: "bench".into(),
                name: format!("p{pod}").into(),
            };
            let rules = PolicyRules { ingress: (0..RULES_OF_A_POD).map(rule).collect(), egress: vec![] };
            let policies = vec![id.clone()];
            let tier = TierProgram { name: "default".into(), policies, end: EndOfTier::Deny };
            let endpoint = Endpoint {
                container_id: format!("container-{pod}").into(),
                host_interface: format!("cali{pod}").into(),
                addresses: vec![IpAddr::from([172, 16, 0, pod as u8])],
                mac: None,
                program: Arc::new(EndpointProgram { ingress: vec![tier], ..EndpointProgram::default() }),
            };
            let (namespace, interface) = ("bench".into(), "eth0".into());
            let endpoint_id = EndpointId { namespace, pod: format!("pod-{pod}").into(), interface };
            deltas.push(Delta::Policy(id, Arc::new(rules)));
            deltas.push(Delta::Endpoint(endpoint_id, Arc::new(endpoint)));
        }
        deltas
    }
}

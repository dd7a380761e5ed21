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

    use tortie_api::net::{Action, PortRange, Protocol};
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
    const POLICIES_OF_A_POD: u32 = 20;
    const RULES_OF_A_POLICY: u32 = 10;

    pub fn bench() {
        for (one_set_each, rows) in [(true, 32), (false, 1000)] {
            println!("one set each: {one_set_each}, in a row: {rows}");
            NetNs::create().unwrap().run(move || in_namespace(one_set_each, rows)).unwrap();
        }
    }

    fn in_namespace(one_set_each: bool, rules_in_a_row: usize) {
        let mut dataplane = Dataplane::open(Config { rules_in_a_row, ..Config::default() }).unwrap();
        (0..PODS).for_each(|pod| {
            let (name, peer) = (format!("cali{pod}"), format!("peer{pod}"));
            let peer = Peer { name: &peer, mac: None, mtu: None, namespace: None };
            RouteSocket::open()
                .unwrap()
                .create(&NewLink { up: true, ..NewLink::new(&name, NewLinkKind::Veth(peer)) })
                .unwrap();
        });
        let deltas = deltas(one_set_each);
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
        measure("one of a policy's 10 rules goes or comes", 200, || apply(turn.next().unwrap()));
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

    fn deltas(one_set_each: bool) -> Vec<Delta> {
        let members = |set: u32| (0..MEMBERS).map(move |n| 0x0a00_0000 + set * MEMBERS + n);
        let members = |set| {
            members(set).map(|address| Member::Net(IpAddr::from(address.to_be_bytes()).into())).collect()
        };
        let mut deltas: Vec<_> =
            (0..SETS).map(|n| Delta::SetCreated(set_id(n), SetKind::Nets, members(n))).collect();
        for pod in 0..PODS {
            let mut policies = Vec::new();
            for policy in 0..POLICIES_OF_A_POD {
                let number = pod * POLICIES_OF_A_POD + policy;
                let set = |n: u32| vec![set_id(if one_set_each { number } else { number + n * 101 } % SETS)];
                let rule = |n: u32| Rule {
                    protocol: Some(Protocol::TCP),
                    source: EntityMatch { sets: set(n), ..EntityMatch::default() },
                    destination: EntityMatch {
                        ports: vec![PortRange { first: 8000 + n as u16 * 2, last: 8000 + n as u16 * 2 }],
                        ..EntityMatch::default()
                    },
                    ..Rule::all(Action::Allow)
                };
                let id = PolicyId {
                    kind: PolicyKind::NetworkPolicy,
                    namespace: "bench".into(),
                    name: format!("p{number}").into(),
                };
                let ingress = (0..RULES_OF_A_POLICY).map(rule).collect();
                policies.push(id.clone());
                deltas.push(Delta::Policy(id, Arc::new(PolicyRules { ingress, egress: vec![] })));
            }
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
            deltas.push(Delta::Endpoint(endpoint_id, Arc::new(endpoint)));
        }
        deltas
    }
}

//! One member that comes into a set and goes again, in a table with 2,000 sets, 200,000 members and 20,000 rules; and the
//! whole table from nothing, and read back. Needs root; it works in a network namespace of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)] // a bench

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
    use std::time::Duration;

    use criterion::Criterion;
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
        let mut criterion =
            Criterion::default().measurement_time(Duration::from_secs(3)).configure_from_args();
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
        let started = std::time::Instant::now();
        let report = dataplane.apply(&deltas);
        assert_eq!(report, Report::default());
        eprintln!("all of it, from nothing: {:?}", started.elapsed());

        let member = vec![Member::Net(IpAddr::from([192, 168, 7, 9]).into())];
        let id = set_id(SETS / 2);
        let came = Delta::SetChanged { id: id.clone(), added: member.clone(), removed: vec![] };
        let went = Delta::SetChanged { id, added: vec![], removed: member };
        criterion.bench_function("a member comes and goes", |bencher| {
            bencher.iter(|| {
                dataplane.apply(std::slice::from_ref(&came));
                dataplane.apply(std::slice::from_ref(&went))
            });
        });
        let changed = deltas.iter().find(|delta| matches!(delta, Delta::Policy(..))).unwrap();
        criterion.bench_function("a policy of 200 rules is looked at again", |bencher| {
            bencher.iter(|| dataplane.apply(std::slice::from_ref(changed)));
        });
        criterion.sample_size(10).bench_function("all of it is read back and compared", |bencher| {
            bencher.iter(|| assert_eq!(dataplane.resync(), Report::default()));
        });
    }

    fn set_id(n: u32) -> SetId {
        SetId(format!("s:{n:036}"))
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
                namespace: "bench".to_owned(),
                name: format!("p{pod}"),
            };
            let rules = PolicyRules { ingress: (0..RULES_OF_A_POD).map(rule).collect(), egress: vec![] };
            let policies = vec![id.clone()];
            let tier = TierProgram { name: "default".to_owned(), policies, end: EndOfTier::Deny };
            let endpoint = Endpoint {
                container_id: format!("container-{pod}"),
                host_interface: format!("cali{pod}"),
                addresses: vec![IpAddr::from([172, 16, 0, pod as u8])],
                mac: None,
                program: EndpointProgram { ingress: vec![tier], ..EndpointProgram::default() },
            };
            let interface = "eth0".to_owned();
            let endpoint_id =
                EndpointId { namespace: "bench".to_owned(), pod: format!("pod-{pod}"), interface };
            deltas.push(Delta::Policy(id, Arc::new(rules)));
            deltas.push(Delta::Endpoint(endpoint_id, Arc::new(endpoint)));
        }
        deltas
    }
}

//! Programs that exceed limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::dataplane::node::*;
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_dataplane::{Reason, Report};
use tortie_hcn::{Call, Hcn, Kind};
use tortie_hns_emulator::{Config, Emulator, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow, IcmpMatch, Rule};

/// An ICMP type from everywhere except one network.
fn pass_icmp_type(icmp_type: u8) -> Rule {
    let icmp = Some(IcmpMatch { icmp_type: Some(icmp_type), icmp_code: None });
    let mut rule = Rule { protocol: Some(Protocol::ICMP), icmp, ..Rule::all(Action::Pass) };
    rule.source.not_nets = vec![format!("10.{icmp_type}.0.0/16").parse().unwrap()];
    rule
}

fn flow(protocol: Protocol, icmp: Option<(u8, u8)>) -> Flow {
    let (source, destination) = ([10, 99, 0, 1].into(), POD.into());
    Flow { source, destination, protocol, source_port: 0, destination_port: 0, icmp }
}

/// A tier of Pass rules before a tier with `allowed` networks.
fn apply(node: &mut Node, passes: Vec<Rule>, allowed: usize) -> Report {
    let allow = |index: usize| {
        let mut rule = Rule::all(Action::Allow);
        rule.source.nets = vec![format!("11.{}.{}.0/24", index / 256, index % 256).parse().unwrap()];
        rule
    };
    let tiers = vec![tier("a", &["web"], EndOfTier::Pass), tier("b", &["more"], EndOfTier::Pass)];
    node.apply(&[
        local_node(),
        own_block(),
        allow_all(),
        policy("web", passes, vec![]),
        policy("more", (0..allowed).map(allow).collect(), vec![]),
        endpoint(EndpointProgram { ingress: tiers, ..open_program() }),
    ])
}

#[test]
fn forty_pass_rules_with_icmp_types_stay_cheap() {
    let mut node = Node::usual();
    node.connect();
    let start = Instant::now();
    let report = apply(&mut node, (0..40).map(pass_icmp_type).collect(), 3);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let reported = &report.endpoints[&pod_id()];
    let reasons = [Reason::IcmpTypeNotExpressible, Reason::TooManyRules];
    assert!(reported.iter().all(|condition| reasons.contains(&condition.reason)), "{reported:?}");
    assert!(
        reported.iter().any(|condition| condition.to_string().starts_with("NetworkPolicy calico-demo/web")),
        "{reported:?}"
    );
    let closed = reported.iter().any(|condition| condition.reason == Reason::TooManyRules);
    let passes = node.passes(Direction::Ingress, &flow(Protocol::UDP, None));
    assert!(passes || closed, "not closed, and not exact");
}

#[test]
fn a_program_that_would_be_too_long_is_closed_and_names_the_policy() {
    let mut node = Node::usual();
    node.connect();
    // Each Pass leads to a thousand decisions.
    let pass = |index: u8| {
        let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Pass) };
        rule.destination.ports = vec![tortie_api::net::PortRange::single(index.into())];
        rule
    };
    let report = apply(&mut node, (0..40).map(pass).collect(), 1000);
    let [reported] = &report.endpoints[&pod_id()][..] else { panic!("{report:?}") };
    assert_eq!(reported.reason, Reason::TooManyRules);
    assert!(reported.to_string().starts_with("NetworkPolicy calico-demo/web: "), "{reported}");
    assert!(!node.passes(Direction::Ingress, &flow(Protocol::UDP, None)));
    let answer = Flow { source: POD.into(), destination: [10, 99, 0, 1].into(), ..flow(Protocol::UDP, None) };
    assert!(node.passes(Direction::Egress, &answer), "the other direction is as it was");
}

/// HNS takes no long requests. In between, nothing passes that neither the old nor the new policy lets pass.
#[test]
fn long_requests_are_split_and_open_nothing_in_between() {
    let mut config = Config::new(Config::SERVER_2022, NODE);
    config.limits.modify_policies = Some(30);
    let mut node = Node::new(config);
    node.connect();
    // Each pair of rules needs ACLs of its own: a client may use its port, and its neighbour may not.
    let rules = |client: u8| {
        let pair = |port: u8| {
            let rule = |action: Action, last: u8| {
                let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(action) };
                rule.source.nets = vec![format!("11.{client}.{port}.{last}/32").parse().unwrap()];
                rule.destination.ports = vec![PortRange::single(port.into())];
                rule
            };
            let mut wide = rule(Action::Allow, 0);
            wide.source.nets = vec![format!("11.{client}.{port}.0/24").parse().unwrap()];
            [rule(Action::Deny, 1), wide]
        };
        (1..=50).flat_map(pair).collect::<Vec<_>>()
    };
    let apply = |node: &mut Node, client: u8| {
        let program =
            EndpointProgram { ingress: vec![tier("a", &["web"], EndOfTier::Deny)], ..open_program() };
        node.apply(&[
            local_node(),
            own_block(),
            allow_all(),
            policy("web", rules(client), vec![]),
            endpoint(program),
        ])
    };
    let passes = |hns: &Emulator, client: u8, port: u8, last: u8| {
        let source = [11, client, port, last].into();
        let flow =
            Flow { source, source_port: 40_000, destination_port: port.into(), ..flow(Protocol::TCP, None) };
        hns.judge(tortie_windows::endpoint_id(CONTAINER), &packet(Direction::Ingress, &flow)).unwrap()
            == Verdict::Allow
    };
    // The neighbours are denied before, in between and after.
    let opened = Arc::new(AtomicUsize::new(0));
    let (inner, counted) = (Arc::clone(&node.hns), opened.clone());
    node.hns.set_fault(move |call| {
        let Call::Modify { kind: Kind::Endpoint, .. } = call else { return None };
        let answer = inner.inner().call(call);
        let open =
            (1..=50).filter(|port| [3, 4].iter().any(|client| passes(inner.inner(), *client, *port, 1)));
        counted.fetch_add(open.count(), Ordering::SeqCst);
        Some(answer)
    });
    for client in [3, 4] {
        let report = apply(&mut node, client);
        assert!(!report.retry && report.endpoints.is_empty(), "{report:?}");
        for port in 1..=50 {
            let hns = node.hns.inner();
            assert!(passes(hns, client, port, 2) && !passes(hns, client, port, 1), "{client} {port}");
            assert!(!passes(hns, 7 - client, port, 2), "{client} {port}: the other policy");
        }
    }
    assert_eq!(opened.load(Ordering::SeqCst), 0, "neighbours passed in between");
    let parts = node
        .hns
        .take_changes()
        .into_iter()
        .filter(|call| matches!(call, Call::Modify { kind: Kind::Endpoint, .. }));
    assert!(parts.count() > 8, "it was sent in parts");
}

#[test]
fn conditions_count_rules_from_one() {
    let mut node = Node::usual();
    node.connect();
    let report = apply(&mut node, vec![Rule::all(Action::Log), pass_icmp_type(8)], 1);
    let [reported] = &report.endpoints[&pod_id()][..] else { panic!("{report:?}") };
    assert!(
        reported.to_string().starts_with("NetworkPolicy calico-demo/web, Ingress rule 2: "),
        "{reported}"
    );
}

//! Ports of the node that lead to pods: what HNS gets, and what it does not.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use crate::dataplane::node::*;
use proptest::prelude::*;
use tortie_api::net::Protocol;
use tortie_dataplane::{
    Delta, Endpoint, EndpointId, HostPort, PodAddress, PodAttachment, PodWiring, Reason, Report,
};
use tortie_hcn::schema::{Acl, Policy, PortMapping};
use tortie_hcn::{Call, Failure, HResult, HcnExt, Kind};
use tortie_windows::endpoint_id;

fn tcp(port: u16, pod_port: u16) -> HostPort {
    HostPort { protocol: Protocol::TCP, address: None, port, pod_port }
}

fn id_of(pod: u8) -> EndpointId {
    EndpointId { pod: format!("pod-{pod}").into(), ..pod_id() }
}

fn container_of(pod: u8) -> String {
    format!("container-{pod}")
}

fn address_of(pod: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, 3, pod)
}

fn connect(node: &Node, pod: u8) {
    let pod = PodAttachment {
        endpoint: id_of(pod),
        container_id: container_of(pod),
        addresses: vec![PodAddress::ipv4(address_of(pod), "10.244.3.0/26".parse().unwrap())],
        ..attachment(node.namespace())
    };
    node.wiring.connect(&pod).unwrap();
}

/// The pod with these ports, and nothing forbidden.
fn wants(pod: u8, ports: &[HostPort]) -> Delta {
    let Delta::Endpoint(_, known) = endpoint(open_program()) else { unreachable!() };
    let endpoint = Endpoint {
        container_id: container_of(pod).into(),
        addresses: vec![address_of(pod).into()],
        host_ports: ports.into(),
        ..(*known).clone()
    };
    Delta::Endpoint(id_of(pod), Arc::new(endpoint))
}

/// DEL of a pod, as the agent does it.
fn remove(node: &mut Node, pod: u8) -> Report {
    node.wiring.disconnect(&id_of(pod), &container_of(pod)).unwrap();
    node.apply(&[Delta::EndpointRemoved(id_of(pod))])
}

/// The mappings of a pod in HNS: protocol, port of the node, port of the pod, and address.
fn mapped(node: &Node, pod: u8) -> BTreeSet<(u32, u16, u16, String)> {
    let policies = node.hns.inner().endpoint(endpoint_id(&container_of(pod))).unwrap().policies;
    let mappings = policies.iter().filter_map(|policy| policy.settings::<PortMapping>().unwrap());
    mappings.map(|it| (it.protocol, it.external_port, it.internal_port, it.vip)).collect()
}

fn conditions(report: &Report, pod: u8) -> Vec<(Reason, String)> {
    let conditions = report.endpoints.get(&id_of(pod)).into_iter().flatten();
    conditions.map(|condition| (condition.reason, condition.message.clone())).collect()
}

fn started_with(pods: &[u8]) -> Node {
    let mut node = Node::usual();
    pods.iter().for_each(|pod| connect(&node, *pod));
    node.apply(&[local_node(), own_block(), allow_all()]);
    node
}

#[test]
fn hns_gets_the_ports_of_a_pod_and_only_their_differences_later() {
    let mut node = started_with(&[5]);
    let udp = HostPort { protocol: Protocol::UDP, ..tcp(53, 5353) };
    let own = HostPort { address: Some(NODE.into()), ..tcp(8081, 81) };
    assert_eq!(node.apply(&[wants(5, &[tcp(8080, 80), udp, own.clone()])]), Report::default());
    let all = [(6, 8080, 80, ""), (17, 53, 5353, ""), (6, 8081, 81, "172.16.0.3")];
    assert_eq!(mapped(&node, 5), all.map(|(a, b, c, d)| (a, b, c, d.to_owned())).into());
    node.hns.take();
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(node.hns.take_changes(), [], "nothing is sent that is there");

    assert_eq!(node.apply(&[wants(5, &[tcp(8080, 88), own])]), Report::default());
    assert_eq!(node.hns.take_changes().len(), 3, "two mappings go, and one comes");
    let rest = [(6, 8080, 88, ""), (6, 8081, 81, "172.16.0.3")];
    assert_eq!(mapped(&node, 5), rest.map(|(a, b, c, d)| (a, b, c, d.to_owned())).into());
}

#[test]
fn what_hns_cannot_map_is_refused_by_name() {
    let mut node = started_with(&[5]);
    let at = |address: &str, port| HostPort { address: Some(address.parse().unwrap()), ..tcp(port, 80) };
    let sctp = HostPort { protocol: Protocol::SCTP, ..tcp(9, 9) };
    let ports = [
        at("127.0.0.1", 1),
        at("172.16.0.4", 2),
        at("fd00::1", 3),
        sctp,
        tcp(8080, 80),
        at("172.16.0.3", 8080),
        tcp(10250, 80),
    ];
    let report = node.apply(&[wants(5, &ports)]);
    let found = conditions(&report, 5);
    assert!(found.iter().all(|(reason, _)| *reason == Reason::HostPortNotServed), "{found:?}");
    let parts = [
        "hostPort 1/TCP: hostIP 127.0.0.1",
        "hostPort 2/TCP: hostIP 172.16.0.4",
        "hostPort 3/TCP: hostIP fd00::1",
        "hostPort 9/SCTP: HNS maps ports of TCP and UDP only",
        "hostPort 8080/TCP: HNS maps a port of the node once",
        "hostPort 10250/TCP: it belongs to the kubelet",
    ];
    assert_eq!(found.len(), parts.len(), "{found:?}");
    for part in parts {
        assert!(found.iter().any(|(_, message)| message.starts_with(part)), "{part}: {found:?}");
    }
    assert_eq!(mapped(&node, 5), [(6, 8080, 80, String::new())].into());
    assert_eq!(node.apply(&[wants(5, &[tcp(8080, 80)])]), Report::default(), "the conditions end");
}

#[test]
fn the_second_pod_with_a_port_learns_who_has_it_and_gets_it_afterwards() {
    let mut node = started_with(&[5, 6]);
    // Also where the order of the pods is the other one.
    for (first, second) in [(6, 5), (5, 6)] {
        assert_eq!(node.apply(&[wants(first, &[tcp(8080, 80)])]), Report::default());
        let report = node.apply(&[wants(second, &[tcp(8080, 80), tcp(8081, 80)])]);
        let found = conditions(&report, second);
        let [(Reason::HostPortTaken, message)] = &found[..] else { panic!("{found:?}") };
        let start = format!("hostPort 8080/TCP: pod calico-demo/pod-{first} has this port");
        assert!(message.starts_with(&start), "{message}");
        assert_eq!(report.endpoints.len(), 1, "the first pod keeps it");
        assert_eq!(mapped(&node, second), [(6, 8081, 80, String::new())].into());
        assert_eq!(node.dataplane.resync(), report);

        assert_eq!(remove(&mut node, first), Report::default());
        assert_eq!(mapped(&node, second).len(), 2);
        remove(&mut node, second);
        connect(&node, first);
        connect(&node, second);
    }
}

#[test]
fn an_endpoint_of_another_plugin_keeps_its_mappings() {
    let mut node = started_with(&[5]);
    node.apply(&[wants(5, &[tcp(8080, 80)])]);
    // The same endpoint under a name of another plugin.
    let mut found = node.hns.inner().endpoint(endpoint_id(&container_of(5))).unwrap();
    node.wiring.disconnect(&id_of(5), &container_of(5)).unwrap();
    found.id = tortie_hcn::Guid::from_bytes(*b"another plugin's");
    found.host_compute_namespace = tortie_hcn::Guid::ZERO;
    found.policies.retain(|policy| !policy.is::<Acl>());
    found.policies.push(Policy::of(&PortMapping {
        protocol: 6,
        internal_port: 1,
        external_port: 7,
        ..Default::default()
    }));
    node.hns.create_endpoint(&found).unwrap();
    assert_eq!(node.apply(&[wants(5, &[tcp(8080, 80), tcp(8081, 81)])]), Report::default());
    let policies = node.hns.inner().endpoint(found.id).unwrap().policies;
    let mappings = policies.iter().filter_map(|policy| policy.settings::<PortMapping>().unwrap());
    let ports: BTreeSet<u16> = mappings.map(|mapping| mapping.external_port).collect();
    assert_eq!(ports, [7, 8080, 8081].into());
}

fn ports_of_node() -> impl Strategy<Value = Vec<HostPort>> {
    let port = (prop::sample::select(vec![Protocol::TCP, Protocol::UDP]), 1_u16..5, 1_u16..3);
    let port =
        port.prop_map(|(protocol, port, pod_port)| HostPort { protocol, address: None, port, pod_port });
    let several = prop::collection::vec(port, 0..4);
    // The API server rejects a pod with one port twice.
    several.prop_map(|mut ports| {
        let mut seen = BTreeSet::new();
        ports.retain(|port| seen.insert((port.protocol.0, port.port)));
        ports
    })
}

/// What a model says: each port leads to one of the pods that want it, and to none that does not.
fn check(node: &Node, wanted: &[Vec<HostPort>; 2]) {
    let mut held = BTreeSet::new();
    for (pod, ports) in [5, 6].into_iter().zip(wanted) {
        for (protocol, port, pod_port, _) in mapped(node, pod) {
            let wants = |it: &HostPort| {
                (u32::from(it.protocol.0), it.port, it.pod_port) == (protocol, port, pod_port)
            };
            assert!(ports.iter().any(wants), "pod {pod} has {port} and does not want it");
            assert!(held.insert((protocol, port)), "two pods have {port}");
        }
    }
    for port in wanted.iter().flatten() {
        assert!(held.contains(&(u32::from(port.protocol.0), port.port)), "nobody has {}", port.port);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// The agent ends, or HNS fails, at any call of a change; a new agent finishes it.
    #[test]
    fn a_new_agent_finishes_what_an_earlier_one_began(
        before in [ports_of_node(), ports_of_node()],
        after in [ports_of_node(), ports_of_node()],
        ends_at in 0_usize..12,
        code in prop::sample::select(vec![HResult::ERROR_TIMEOUT, HResult::E_FAIL]),
    ) {
        let mut node = started_with(&[5, 6]);
        node.apply(&[wants(5, &before[0]), wants(6, &before[1])]);
        check(&node, &before);
        let mut calls = 0;
        node.hns.set_fault(move |call| {
            let Call::Modify { kind: Kind::Endpoint, .. } = call else { return None };
            calls += 1;
            (calls > ends_at).then(|| Err(Failure::new(code, "the agent ends")))
        });
        let changes = [wants(5, &after[0]), wants(6, &after[1])];
        node.apply(&changes);
        node.hns.clear_fault();
        let mut next = Node::over(node.hns.clone());
        next.apply(&[local_node(), own_block(), allow_all(), changes[0].clone(), changes[1].clone()]);
        // One pod may still have had what the other one wants.
        next.dataplane.resync();
        check(&next, &after);
    }
}

#[test]
fn a_failure_of_hns_is_reported_and_ends() {
    let mut node = started_with(&[5]);
    node.hns.set_fault(|call| match call {
        Call::Modify { settings, .. } if settings.contains("PortMapping") => {
            Some(Err(Failure::new(HResult::E_FAIL, "not today")))
        }
        _ => None,
    });
    let report = node.apply(&[wants(5, &[tcp(8080, 80)])]);
    let found = conditions(&report, 5);
    let [(Reason::HostPortNotServed, message)] = &found[..] else { panic!("{found:?}") };
    assert!(message.contains("8080/TCP") && message.contains("not today"), "{message}");
    node.hns.clear_fault();
    node.wait(20);
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(mapped(&node, 5).len(), 1);
}

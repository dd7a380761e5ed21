//! Load balancers without direct server return hide clients' addresses, and the node reports it.

use std::sync::Arc;

use crate::dataplane::node::*;
use tortie_api::net::{Action, Protocol};
use tortie_dataplane::{Condition, Delta, Reason, Report, Service, ServiceId, ServicePort};
use tortie_hcn::schema::{LoadBalancer, LoadBalancerPortMapping};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind, Version};
use tortie_hns_emulator::Config;
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Rule};

fn balancer(vips: &[&str], source: &str, flags: u32) -> LoadBalancer {
    let port =
        LoadBalancerPortMapping { protocol: 6, internal_port: 8080, external_port: 80, ..Default::default() };
    LoadBalancer {
        frontend_vips: vips.iter().map(|vip| (*vip).to_owned()).collect(),
        source_vip: source.to_owned(),
        port_mappings: vec![port],
        flags,
        ..LoadBalancer::default()
    }
}

fn service() -> Delta {
    let port = ServicePort {
        protocol: Protocol::TCP,
        port: 80,
        backends: vec![("10.0.0.1".parse().unwrap(), 8080)],
    };
    let service = Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap(), "10.96.0.2".parse().unwrap()],
        external_ips: vec!["192.0.2.1".parse().unwrap()],
        ports: vec![port],
    };
    Delta::Service(ServiceId { namespace: "shop".into(), name: "web".into() }, Arc::new(service))
}

/// A pod with three policies: one depends on addresses of clients, one only on their ports, and one is egress.
fn pod() -> [Delta; 5] {
    let clients = EntityMatch { nets: vec!["10.0.0.0/8".parse().unwrap()], ..EntityMatch::default() };
    let by_address = Rule { source: clients.clone(), ..Rule::all(Action::Allow) };
    let by_port = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    let outwards = Rule { destination: clients, ..Rule::all(Action::Allow) };
    let program = EndpointProgram {
        ingress: vec![tier("default", &["clients", "ports"], EndOfTier::Deny)],
        egress: vec![tier("default", &["out"], EndOfTier::Deny)],
        profiles: vec![],
    };
    [
        allow_all(),
        policy("clients", vec![by_address], vec![]),
        policy("ports", vec![by_port], vec![]),
        policy("out", vec![], vec![outwards]),
        endpoint(program),
    ]
}

fn node(config: Config) -> Node {
    let mut node = Node::new(config);
    node.connect();
    node.apply(&[local_node(), own_block(), service()]);
    node
}

fn usual() -> Node {
    node(Config::new(Config::SERVER_2022, NODE))
}

fn looked(node: &mut Node) -> Report {
    node.wait(10);
    node.dataplane.resync()
}

fn hidden(report: &Report) -> Option<&Condition> {
    report.node.iter().find(|condition| condition.reason == Reason::ClientAddressHidden)
}

#[test]
fn without_direct_server_return_the_policies_concerned_are_named() {
    let mut node = usual();
    node.apply(&pod());
    assert_eq!(hidden(&looked(&mut node)), None, "nothing balances");
    let direct = node.hns.create_load_balancer(&balancer(&["10.96.0.1"], "", 1)).unwrap();
    assert_eq!(hidden(&looked(&mut node)), None, "it is direct");
    let hiding = node.hns.create_load_balancer(&balancer(&["10.96.0.2"], "10.244.3.2", 0)).unwrap();
    let report = looked(&mut node);
    let reported = hidden(&report).unwrap();
    let message = &reported.message;
    assert!(message.starts_with("1 load balancers"), "{message}");
    assert!(message.contains("sees 10.244.3.2 instead of the pod."), "{message}");
    assert!(message.contains("here: NetworkPolicy calico-demo/clients. "), "{message}");
    assert!(message.contains("WinDSR=true") && message.contains("--enable-dsr=true"), "{message}");
    assert!(!reported.reason.is_failure() && !report.retry);
    // It is reported also between two checks, and ends as soon as it is over.
    assert!(hidden(&node.apply(&[])).is_some());
    node.hns.delete_load_balancer(hiding).unwrap();
    assert_eq!(hidden(&looked(&mut node)), None);
    node.hns.delete_load_balancer(direct).unwrap();
}

#[test]
fn the_condition_reports_that_no_local_policy_is_affected() {
    let mut node = usual();
    node.hns.create_load_balancer(&balancer(&["10.96.0.1"], "10.244.3.2", 0)).unwrap();
    let report = looked(&mut node);
    assert!(hidden(&report).unwrap().message.contains("No policy of pods here"), "{report:?}");
}

/// The node's own packets always pass into its pods (policy decision 2), so a hidden address can also admit clients.
#[test]
fn hidden_clients_with_the_nodes_address_pass() {
    for source in ["", "172.16.0.3"] {
        let mut node = usual();
        node.hns.create_load_balancer(&balancer(&["10.96.0.1"], source, 0)).unwrap();
        let report = looked(&mut node);
        assert!(hidden(&report).unwrap().message.contains("whatever their policy"), "{report:?}");
    }
}

/// kube-proxy creates these without DSR whatever its setting, so nothing needs a remedy.
#[test]
fn node_ports_and_external_addresses_are_ignored() {
    let mut node = usual();
    node.hns.create_load_balancer(&balancer(&[], "", 0)).unwrap();
    node.hns.create_load_balancer(&balancer(&["192.0.2.1"], "", 0)).unwrap();
    node.hns.create_load_balancer(&balancer(&["10.96.7.7"], "", 0)).unwrap();
    assert_eq!(hidden(&looked(&mut node)), None);
    assert!(looked(&mut node).node.is_empty());
}

#[test]
fn an_hns_without_direct_server_return_is_reported() {
    let mut node = node(Config::new(Version::new(9, 2), NODE));
    node.hns.create_load_balancer(&balancer(&["10.96.0.1"], "10.244.3.2", 0)).unwrap();
    let report = looked(&mut node);
    assert!(hidden(&report).unwrap().message.contains("HNS 9.2 has no DSR: update Windows"), "{report:?}");
}

/// Nothing is reported about what cannot be read, and it delays nothing else.
#[test]
fn unreadable_load_balancers_are_ignored() {
    let mut node = usual();
    node.hns.create_load_balancer(&balancer(&["10.96.0.1"], "10.244.3.2", 0)).unwrap();
    assert!(hidden(&looked(&mut node)).is_some());
    for code in [HResult::E_NOTIMPL, HResult::RPC_S_SERVER_UNAVAILABLE] {
        node.hns.set_fault(move |call| match call {
            Call::Enumerate { kind: Kind::LoadBalancer, .. } => Some(Err(Failure::new(code, "no"))),
            _ => None,
        });
        let report = looked(&mut node);
        assert_eq!((hidden(&report), report.retry), (None, false), "{report:?}");
        let report = node.apply(&pod());
        assert!(report.node.is_empty() && report.endpoints.is_empty() && !report.retry, "{report:?}");
        node.hns.clear_fault();
        assert!(hidden(&looked(&mut node)).is_some());
    }
}

/// Each is read once, however many full checks there are; and one check does not read thousands.
#[test]
fn known_load_balancers_are_not_read_again() {
    let mut node = usual();
    for number in 0..300_u16 {
        let mut direct = balancer(&["10.96.0.1"], "", 1);
        direct.port_mappings[0].external_port = 1000 + number;
        node.hns.create_load_balancer(&direct).unwrap();
    }
    let mut reads = || {
        node.hns.take();
        looked(&mut node);
        let calls = format!("{:?}", node.hns.take());
        calls.matches("Query { kind: LoadBalancer").count()
    };
    assert_eq!([reads(), reads(), reads()], [256, 44, 0]);
}

#[test]
fn the_emulated_hns_keeps_load_balancers_unchanged() {
    let node = Node::usual();
    let wanted = LoadBalancer { id: Guid::random(), ..balancer(&["10.96.0.1"], "10.244.3.2", 1) };
    let id = node.hns.create_load_balancer(&wanted).unwrap();
    assert_eq!(node.hns.load_balancer(id), Ok(wanted.clone()));
    let code = |settings: String| {
        let call = Call::Create { kind: Kind::LoadBalancer, network: Guid::ZERO, id: Guid::ZERO, settings };
        node.hns.call(&call).unwrap_err().code
    };
    let text = |balancer: &LoadBalancer| serde_json::to_string(balancer).unwrap();
    assert_eq!(
        code(text(&LoadBalancer { id: Guid::ZERO, ..wanted.clone() })),
        HResult::HCN_E_PORT_ALREADY_EXISTS
    );
    let missing =
        LoadBalancer { host_compute_endpoints: vec![Guid::random()], ..balancer(&["10.96.0.2"], "", 0) };
    assert_eq!(code(text(&missing)), HResult::HCN_E_ENDPOINT_NOT_FOUND);
    assert_eq!(code(text(&balancer(&["ten"], "", 0))), HResult::HCN_E_INVALID_IP);
    assert_eq!(code(r#"{"FrontendVIP": ["10.96.0.2"]}"#.to_owned()), HResult::HCN_E_INVALID_JSON);
    node.hns.delete_load_balancer(id).unwrap();
    assert!(node.hns.load_balancer(id).unwrap_err().is_not_found());
}

//! A table of nodes: endpoints, results of plugins, pods, and what is recognised and closed.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;
use tortie_dataplane::Endpoint as PodEndpoint;
use tortie_hcn::schema::{EndpointFlags, IpConfig};

use super::*;

const SANDBOX: &str = "0123456789abcdef";
const OTHER: &str = "fedcba9876543210";
const ADDRESS: &str = "10.0.0.5";

fn guid(number: u8) -> Guid {
    Guid::from_bytes([number; 16])
}

/// An endpoint in a namespace.
fn endpoint(number: u8, name: &str, address: &str) -> Endpoint {
    Endpoint {
        id: guid(number),
        name: name.to_owned(),
        host_compute_namespace: guid(number + 100),
        ip_configurations: vec![IpConfig { ip_address: address.to_owned(), ..IpConfig::default() }],
        ..Endpoint::default()
    }
}

fn result(pod: &str, sandbox: &str, address: &str, interfaces: serde_json::Value) -> KeptResult {
    let file = json!({
        "kind": "cniCacheV1", "containerId": sandbox, "ifName": "eth0",
        "cniArgs": [["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", pod]],
        "result": {"ips": [{"address": format!("{address}/24")}], "interfaces": interfaces},
    });
    KeptResult::parse(file.to_string().as_bytes()).unwrap()
}

fn state(pods: &[&str]) -> NodeState {
    let pod = |name: &&str| {
        let id = EndpointId { namespace: "n".into(), pod: (*name).into(), interface: "eth0".into() };
        let pod = PodEndpoint {
            container_id: "".into(),
            host_interface: "".into(),
            addresses: [ADDRESS.parse().unwrap()].into(),
            mac: None,
            host_ports: [].into(),
            program: Arc::default(),
        };
        (id, Arc::new(pod))
    };
    NodeState { endpoints: pods.iter().map(pod).collect::<BTreeMap<_, _>>(), ..NodeState::default() }
}

#[test]
fn an_endpoint_is_a_pods_only_if_address_and_result_say_so() {
    let none = json!([]);
    let own = |interfaces: &serde_json::Value| result("a", SANDBOX, ADDRESS, interfaces.clone());
    let unproven = |names: &[&str]| {
        let endpoints = names.iter().map(|name| (*name).to_owned()).collect();
        // Only the node's own endpoint of this table is in no namespace.
        let are_closed = names != ["cbr0_ep"];
        Err(Unrecognised::Unproven { endpoints, address: ADDRESS.parse().unwrap(), are_closed })
    };
    let of_b = |name: &str| {
        let (endpoint, address) = (name.to_owned(), ADDRESS.parse().unwrap());
        Err(Unrecognised::OfAnother { endpoint, address, owner: "n/b".to_owned() })
    };
    let gone = || Err(Unrecognised::NoEndpoint(ADDRESS.parse().unwrap()));
    let win_bridge = format!("{SANDBOX}_cbr0");
    let remote = Endpoint { flags: EndpointFlags::REMOTE_ENDPOINT, ..endpoint(1, &win_bridge, ADDRESS) };
    let alone = Endpoint { host_compute_namespace: Guid::ZERO, ..endpoint(1, "cbr0_ep", ADDRESS) };
    type Case = (&'static str, Vec<Endpoint>, Vec<KeptResult>, Result<u8, Unrecognised>, Vec<u8>);
    let table: Vec<Case> = vec![
        ("win-bridge's name", vec![endpoint(1, &win_bridge, ADDRESS)], vec![own(&none)], Ok(1), vec![]),
        (
            "in another case",
            vec![endpoint(1, &win_bridge.to_uppercase(), ADDRESS)],
            vec![own(&none)],
            Ok(1),
            vec![],
        ),
        ("Azure's name", vec![endpoint(1, "01234567-eth0", ADDRESS)], vec![own(&none)], Ok(1), vec![]),
        ("AWS' name", vec![endpoint(1, "cid-0123456789abcdef", ADDRESS)], vec![own(&none)], Ok(1), vec![]),
        ("listed", vec![endpoint(1, "any", ADDRESS)], vec![own(&json!([{"name": "any"}]))], Ok(1), vec![]),
        (
            "its namespace",
            vec![endpoint(1, "any", ADDRESS)],
            vec![own(&json!([{"name": "eth0", "sandbox": guid(101).to_string()}]))],
            Ok(1),
            vec![],
        ),
        ("no result", vec![endpoint(1, &win_bridge, ADDRESS)], vec![], unproven(&[&win_bridge]), vec![1]),
        ("no endpoint", vec![], vec![own(&none)], gone(), vec![]),
        ("another address", vec![endpoint(1, &win_bridge, "10.0.0.6")], vec![own(&none)], gone(), vec![1]),
        (
            "the result has another address",
            vec![endpoint(1, &win_bridge, ADDRESS)],
            vec![result("a", SANDBOX, "10.0.0.6", none.clone())],
            Err(Unrecognised::OfAnother {
                endpoint: win_bridge.clone(),
                address: ADDRESS.parse().unwrap(),
                owner: "n/a".to_owned(),
            }),
            vec![1],
        ),
        (
            "the next pod has the address",
            vec![endpoint(2, &format!("{OTHER}_cbr0"), ADDRESS)],
            vec![result("b", OTHER, ADDRESS, none.clone())],
            of_b(&format!("{OTHER}_cbr0")),
            vec![2],
        ),
        (
            "both are there",
            vec![endpoint(1, &win_bridge, ADDRESS), endpoint(2, &format!("{OTHER}_cbr0"), ADDRESS)],
            vec![own(&none), result("b", OTHER, ADDRESS, none.clone())],
            Ok(1),
            vec![2],
        ),
        (
            "two are its own",
            vec![endpoint(1, &win_bridge, ADDRESS), endpoint(2, "01234567-eth0", ADDRESS)],
            vec![own(&none)],
            Err(Unrecognised::Several(vec![win_bridge.clone(), "01234567-eth0".to_owned()])),
            vec![1, 2],
        ),
        (
            "a longer name",
            vec![endpoint(1, &format!("{SANDBOX}0_cbr0"), ADDRESS)],
            vec![own(&none)],
            unproven(&[&format!("{SANDBOX}0_cbr0")]),
            vec![1],
        ),
        ("the node's own endpoint", vec![alone], vec![], unproven(&["cbr0_ep"]), vec![]),
        (
            "no name",
            vec![endpoint(1, "", ADDRESS)],
            vec![own(&json!([{"name": ""}]))],
            unproven(&[""]),
            vec![1],
        ),
    ];
    let state = state(&["a"]);
    let (id, pod) = state.endpoints.iter().next().unwrap();
    for (what, endpoints, results, expected, closed) in table {
        let observed = Observed { endpoints, results };
        let found = observed.endpoint_of(id, &pod.addresses);
        assert_eq!(found.map(|endpoint| endpoint.id), expected.map(guid), "{what}");
        let claimed: BTreeSet<Guid> =
            observed.endpoint_of(id, &pod.addresses).ok().map(|it| it.id).into_iter().collect();
        let unclaimed: Vec<Guid> = observed.unclaimed(&state, &claimed).map(|it| it.id).collect();
        assert_eq!(unclaimed, closed.into_iter().map(guid).collect::<Vec<_>>(), "{what}");
    }
    assert!(remote.is_remote(), "those are left out when HNS is read");
}

/// Each problem says what to do.
#[test]
fn problems_name_the_endpoint_and_the_remedy() {
    let address = ADDRESS.parse().unwrap();
    let name = || "any".to_owned();
    for (problem, reason, parts) in [
        (
            Unrecognised::NoEndpoint(address),
            Reason::InterfaceMissing,
            ["10.0.0.5", "waits for the CNI plugin"],
        ),
        (
            Unrecognised::OfAnother { endpoint: name(), address, owner: "n/b".to_owned() },
            Reason::InterfaceUnproven,
            ["pod n/b", "delete that pod"],
        ),
        (
            Unrecognised::Unproven { endpoints: vec![name()], address, are_closed: true },
            Reason::InterfaceUnproven,
            ["any", "--cni-results"],
        ),
        (
            Unrecognised::Several(vec![name(), "more".to_owned()]),
            Reason::InterfaceUnproven,
            ["any, more", "Delete the pod"],
        ),
    ] {
        assert_eq!(problem.reason(), reason);
        let text = problem.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

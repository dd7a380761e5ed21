//! HNS hangs, refuses, or gives unusual answers.

use std::sync::{Arc, Mutex};

use crate::dataplane::node::*;
use serde_json::{Value, json};
use tortie_api::net::{Action, Protocol};
use tortie_dataplane::{Delta, EndpointId, MacAddress, PodWiring, Reason, Route, RouteTarget, Vtep};
use tortie_hcn::schema::{Modify, Policy, RequestType, lenient};
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind};
use tortie_hns_emulator::{Emulator, Recorder, Survives};
use tortie_policy::program::{EndOfTier, EndpointProgram, Rule};
use tortie_windows::endpoint_id;

fn other_pod(number: u8) -> EndpointId {
    EndpointId { pod: format!("pod-{number}").into(), ..pod_id() }
}

/// A node with several connected pods that are open.
fn busy_node(pods: u8) -> Node {
    let mut node = Node::usual();
    let mut deltas = vec![local_node(), own_block(), allow_all()];
    for number in 1..=pods {
        let Delta::Endpoint(_, pod) = endpoint(open_program()) else { panic!() };
        let (container_id, address) = (format!("container-{number}"), [10, 244, 3, 10 + number]);
        let mut attachment = attachment(node.namespace());
        attachment.endpoint = other_pod(number);
        attachment.addresses[0].address = std::net::Ipv4Addr::from(address).into();
        attachment.container_id.clone_from(&container_id);
        node.wiring.connect(&attachment).unwrap();
        let (container_id, addresses) = (container_id.into(), vec![address.into()]);
        let pod = tortie_dataplane::Endpoint { container_id, addresses, ..(*pod).clone() };
        deltas.push(Delta::Endpoint(other_pod(number), Arc::new(pod)));
    }
    assert_eq!(node.apply(&deltas), Default::default());
    node
}

fn refuse(hns: &Recorder<Emulator>, code: HResult, which: impl Fn(&Call) -> bool + Send + 'static) {
    hns.set_fault(move |call| which(call).then(|| Err(Failure::new(code, "not today"))));
}

#[test]
fn a_hanging_hns_gets_one_call_per_pass() {
    let mut node = busy_node(5);
    refuse(&node.hns, HResult::ERROR_TIMEOUT, |_| true);
    node.hns.take();
    let report = node.dataplane.resync();
    assert_eq!(node.hns.take().len(), 1, "each call may take as long as its deadline");
    assert!(report.retry);
    assert_eq!(report.endpoints.len(), 5, "none of them is known to be in force");
    // It hangs in the middle of the pods.
    node.hns.clear_fault();
    assert_eq!(node.dataplane.resync(), Default::default());
    let network = node.hns.take().iter().filter(|call| call.object_is_network()).count();
    assert!(network > 0);
    refuse(&node.hns, HResult::ERROR_TIMEOUT, |call| !call.object_is_network());
    let report = node.dataplane.resync();
    assert_eq!(node.hns.take().iter().filter(|call| !call.object_is_network()).count(), 1);
    assert!(report.retry && report.node.is_empty());
    assert_eq!(report.endpoints.len(), 5);
    assert!(report.endpoints.values().all(|reported| reported[0].reason == Reason::HnsUnavailable));
    node.hns.clear_fault();
    assert_eq!(node.apply(&[]), Default::default());
}

/// From now on, HNS returns other policies of endpoints than it has.
fn disguise(hns: &Arc<Recorder<Emulator>>, change: impl Fn(&mut Vec<Value>) + Send + 'static) {
    let inner = Arc::clone(hns);
    hns.set_fault(move |call| {
        let Call::Query { kind: Kind::Endpoint, .. } = call else { return None };
        let answer = inner.inner().call(call);
        Some(answer.map(|document| {
            let mut document: Value = serde_json::from_str(&document).unwrap();
            change(document["Policies"].as_array_mut().unwrap());
            document.to_string()
        }))
    });
}

fn is_acl(policy: &Value) -> bool {
    policy["Type"] == "ACL"
}

#[test]
fn an_unreadable_foreign_acl_is_kept_and_blocks_nothing() {
    let mut node = Node::usual();
    node.connect();
    let odd = json!({"Type": "ACL", "Settings": {"Id": "somebody", "Priority": "very high"}});
    let shown = odd.clone();
    disguise(&node.hns, move |policies| policies.push(shown.clone()));
    let report = node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    assert!(!report.retry, "{report:?}");
    assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::ForeignAcl);
    assert!(node.acls().iter().any(|acl| acl.id.ends_with("allow-all")));
    // A build without removals gets the whole list, with foreign policies as they were read.
    let inner = Arc::clone(&node.hns);
    node.hns.set_fault(move |call| match call {
        Call::Modify { .. } => Some(Ok(String::new())),
        Call::Query { kind: Kind::Endpoint, .. } => Some(inner.inner().call(call).map(|document| {
            let mut document: Value = serde_json::from_str(&document).unwrap();
            document["Policies"].as_array_mut().unwrap().push(odd.clone());
            document.to_string()
        })),
        _ => None,
    });
    node.hns.take();
    node.apply(&[endpoint(EndpointProgram::default())]);
    let sent = node.hns.take_changes();
    let Some(Call::Modify { settings, .. }) = sent.last() else { panic!("{sent:?}") };
    assert!(settings.contains("Update") && settings.contains(r#""very high""#), "{settings}");
}

#[test]
fn foreign_acls_with_precedence_are_reported() {
    let mut node = Node::usual();
    node.connect();
    let foreign = |id: &str, action: &str, rule_type: &str, priority: u16| {
        let mut settings = json!({"Id": id, "Action": action, "Direction": "In", "RuleType": rule_type});
        if priority > 0 {
            settings["Priority"] = json!(priority);
        }
        Policy { r#type: "ACL".into(), settings, extra: Default::default() }
    };
    // The firewall's rules have no order, and Block wins.
    let theirs = vec![
        foreign("API:cali-1", "Allow", "Switch", 100),
        foreign("firewall-allows", "Allow", "Host", 0),
        foreign("firewall-blocks", "Block", "Host", 0),
        foreign("", "Allow", "Switch", 65_500),
    ];
    let add = Modify::policies(RequestType::Add, theirs);
    node.hns.modify_endpoint(endpoint_id(CONTAINER), &add).unwrap();
    let deltas = [local_node(), own_block(), allow_all(), endpoint(open_program())];
    // A change that concerns the endpoint but not its list does not read the endpoint.
    let untouched = [allow_all()];
    for (round, deltas) in
        [("made", &deltas[..]), ("there already", &deltas), ("not looked at", &untouched), ("nothing", &[])]
    {
        let report = node.apply(deltas);
        let reported = &report.endpoints[&pod_id()];
        assert!(!report.retry && reported.len() == 3, "{round}: {report:?}");
        assert!(reported.iter().all(|condition| condition.reason == Reason::ForeignAcl));
        let named =
            [r#""API:cali-1" (Allow, In, Switch, priority 100)"#, r#""firewall-blocks" (Block, In, Host"#];
        assert!(
            reported.iter().zip(named).all(|(reported, name)| reported.message.contains(name)),
            "{reported:?}"
        );
    }
    // They are gone, which the next check notices.
    node.hns.inner().restart(Survives::AllButAcls).unwrap();
    assert_eq!(node.dataplane.resync(), Default::default());
}

/// azure-npm's `baseallowinswitch` has a priority and no RuleType, and allows everything.
#[test]
fn a_foreign_acl_without_rule_type_counts_at_the_switch() {
    let acl = |priority: u16, rule_type: Option<&str>| {
        let mut settings = json!({"Id": "azure", "Action": "Allow", "Direction": "In", "Priority": priority});
        if let Some(rule_type) = rule_type {
            settings["RuleType"] = json!(rule_type);
        }
        json!({"Type": "ACL", "Settings": settings})
    };
    for (acl, expected) in [
        (acl(65_499, None), Some("(Allow, In, without RuleType, priority 65499)")),
        (acl(65_499, Some("switch")), Some("(Allow, In, Switch, priority 65499)")),
        (acl(65_499, Some("Host")), None),
        (acl(65_501, None), None),
        // HNS leaves out the type Host, and the firewall's rules have no priority.
        (acl(0, None), None),
    ] {
        let mut node = Node::usual();
        node.connect();
        let shown = acl.clone();
        disguise(&node.hns, move |policies| policies.push(shown.clone()));
        let report = node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
        let messages = report.endpoints.get(&pod_id()).map_or(&[][..], Vec::as_slice);
        assert_eq!(messages.len(), usize::from(expected.is_some()), "{acl}: {report:?}");
        if let Some(expected) = expected {
            assert_eq!(messages[0].reason, Reason::ForeignAcl);
            assert!(messages[0].message.contains(expected), "{:?}", messages[0]);
        }
    }
}

#[test]
fn policy_is_not_in_force_while_acls_cannot_be_read_back() {
    let mut node = Node::usual();
    node.connect();
    node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    disguise(&node.hns, |policies| {
        policies
            .iter_mut()
            .filter(|policy| is_acl(policy))
            .for_each(|acl| acl["Settings"]["Priority"] = json!("?"));
    });
    let report = node.apply(&[endpoint(EndpointProgram::default())]);
    assert!(report.retry, "an older, wider list may be there");
    assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::HnsDidNotTake);
    node.hns.clear_fault();
    node.apply(&[endpoint(EndpointProgram::default())]);
    assert!(!node.acls().iter().any(|acl| acl.id.ends_with("allow-all")));
}

#[test]
fn acls_in_an_equivalent_form_are_not_sent_again() {
    let mut node = Node::usual();
    node.connect();
    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.source.nets = vec!["10.9.0.0/16".parse().unwrap(), "10.8.0.0/16".parse().unwrap()];
    let program =
        EndpointProgram { ingress: vec![tier("default", &["web"], EndOfTier::Deny)], ..open_program() };
    let deltas =
        [local_node(), own_block(), allow_all(), policy("web", vec![rule], vec![]), endpoint(program)];
    disguise(&node.hns, |policies| {
        for acl in policies.iter_mut().filter(|policy| is_acl(policy)) {
            let settings = acl["Settings"].as_object_mut().unwrap();
            settings.retain(|name, value| name != "Protocols" || value != "256");
            settings.insert("Counter".into(), json!(7));
            if let Some(list) = settings.get_mut("RemoteAddresses") {
                *list = json!(list.as_str().unwrap().split(',').rev().collect::<Vec<_>>().join(","));
            }
        }
    });
    assert_eq!(node.apply(&deltas), Default::default());
    node.hns.take();
    assert_eq!(node.dataplane.resync(), Default::default());
    assert_eq!(node.hns.take_changes(), []);
}

#[test]
fn the_form_in_which_hns_returns_a_list_is_remembered() {
    let mut node = Node::usual();
    node.connect();
    disguise(&node.hns, |policies| {
        policies.retain(|policy| !is_acl(policy) || policy["Settings"]["Priority"] != 900)
    });
    let deltas = [local_node(), own_block(), allow_all(), endpoint(open_program())];
    let report = node.apply(&deltas);
    assert!(report.retry);
    node.hns.take();
    for _ in 0..20 {
        let report = node.apply(&deltas);
        assert!(report.retry, "never in force");
        assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::HnsDidNotTake);
        node.wait(5);
    }
    assert_eq!(node.hns.take_changes(), []);
    node.wait(600);
    node.apply(&deltas);
    assert!(!node.hns.take_changes().is_empty(), "now and then it may go better");
    node.apply(&[endpoint(EndpointProgram::default())]);
    assert!(!node.hns.take_changes().is_empty(), "something else is wanted");
    node.hns.clear_fault();
    assert_eq!(node.apply(&deltas), Default::default());
}

/// Some builds ignore unknown filters, and list everything.
#[test]
fn results_of_a_filter_are_checked() {
    let mut node = busy_node(2);
    let other = json!({"Name": "Other", "Type": "L2Bridge", "Ipams": [{"Subnets": [{"IpAddressPrefix": "10.9.0.0/16",
        "Routes": [{"NextHop": "10.9.0.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
    let other = node.hns.create_network(&lenient(&other.to_string()).unwrap()).unwrap();
    let named = json!({"Name": format!("{CONTAINER}_Calico"), "HostComputeNetwork": other,
        "IpConfigurations": [{"IpAddress": "10.9.0.9"}]});
    let namesake = node.hns.create_endpoint(&lenient(&named.to_string()).unwrap()).unwrap();
    let inner = Arc::clone(&node.hns);
    let reversed = Arc::new(Mutex::new(false));
    let turn = Arc::clone(&reversed);
    node.hns.set_fault(move |call| {
        let Call::Enumerate { kind, .. } = call else { return None };
        let all = inner.inner().call(&Call::Enumerate { kind: *kind, query: String::new() });
        Some(all.map(|ids| {
            let mut ids: Vec<Guid> = serde_json::from_str(&ids).unwrap();
            if *turn.lock().unwrap() {
                ids.reverse();
            }
            json!(ids).to_string()
        }))
    });
    for turned in [false, true] {
        *reversed.lock().unwrap() = turned;
        let network = node.hns.network_by_name("calico").unwrap().unwrap();
        assert_eq!(network.name, "Calico");
        assert!(node.hns.network_by_name("nobody").unwrap().is_none());
        assert_eq!(node.hns.endpoints_of_network(other).unwrap().len(), 1);
        assert_eq!(node.hns.endpoints_of_network(network.id).unwrap().len(), 2);
        // This pod has no endpoint: neither the first one listed nor one of another network belongs to it.
        node.wiring.disconnect(&pod_id(), CONTAINER).unwrap();
        node.wiring.disconnect(&pod_id(), "unheard-of").unwrap();
        assert_eq!(node.hns.endpoints_of_network(network.id).unwrap().len(), 2);
        assert!(node.hns.endpoint(namesake).is_ok());
        let report = node.apply(&[endpoint(open_program())]);
        assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::EndpointMissing);
        assert!(node.hns.endpoint(namesake).unwrap().policies.is_empty());
    }
}

#[test]
fn a_permanently_refused_endpoint_is_cheap_and_blocks_no_other() {
    let mut node = busy_node(3);
    let refused = endpoint_id("container-1");
    refuse(
        &node.hns,
        HResult::HCN_E_INVALID_POLICY,
        move |call| matches!(call, Call::Modify { id, .. } if *id == refused),
    );
    let report = node.apply(&[policy("allow-all", vec![], vec![])]);
    let in_trouble = |report: &tortie_dataplane::Report| {
        assert!(report.retry && report.node.is_empty(), "{report:?}");
        assert!(report.endpoints.keys().eq([&other_pod(1)]), "{report:?}");
    };
    in_trouble(&report);
    let (mut quiet, mut attempts) = (0, 0);
    for _ in 0..120 {
        node.hns.take();
        node.wait(1);
        in_trouble(&node.dataplane.resync());
        let calls = node.hns.take();
        quiet += usize::from(calls.is_empty());
        attempts += calls.iter().filter(|call| !call.is_read()).count();
    }
    assert!(quiet > 90, "{quiet} passes of 120 without a call");
    // Each time the difference, and then the whole list.
    assert!((10..20).contains(&attempts), "{attempts}");
    // A new desired state is tried at once.
    node.apply(&[policy("allow-all", vec![Rule::all(Action::Deny)], vec![])]);
    assert!(
        node.hns.take_changes().iter().any(|call| matches!(call, Call::Modify { id, .. } if *id == refused))
    );
    node.hns.clear_fault();
    node.wait(60);
    assert_eq!(node.dataplane.resync(), Default::default());
}

#[test]
fn permanently_refused_routes_are_reported_and_retried_with_backoff() {
    let mut node = Node::usual();
    refuse(&node.hns, HResult::HCN_E_INVALID_POLICY, |call| matches!(call, Call::Modify { .. }));
    let parent = [172, 16, 0, 1].into();
    let vtep = Vtep {
        node: "one".into(),
        address: [10, 244, 1, 0].into(),
        mac: MacAddress([2; 6]),
        parent,
        mtu: None,
    };
    let target = RouteTarget::Vxlan { node: "one".into() };
    let route = Delta::Route(Route { destination: "10.244.1.0/26".parse().unwrap(), target });
    node.apply(&[local_node(), own_block(), Delta::Vtep(vtep), route]);
    node.hns.take();
    for _ in 0..120 {
        node.wait(1);
        let report = node.dataplane.resync();
        assert!(report.retry && report.node[0].reason == Reason::RouteRefused, "{report:?}");
    }
    let attempts = node.hns.take_changes().len();
    assert!((10..20).contains(&attempts), "{attempts} (a batch, and one by one)");
}

trait About {
    fn object_is_network(&self) -> bool;
}

impl About for Call {
    fn object_is_network(&self) -> bool {
        use tortie_hcn::Kind::Network;
        matches!(
            self,
            Call::Enumerate { kind: Network, .. }
                | Call::Query { kind: Network, .. }
                | Call::Modify { kind: Network, .. }
        )
    }
}

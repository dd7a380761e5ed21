//! How packets of pods leave: what HNS gets, compared with the documents of other clients, and what it does not get.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::dataplane::node::*;
use serde_json::{Value, json};
use tortie_api::calico::FelixConfigurationSpec;
use tortie_dataplane::{Delta, PodAttachment, PodDns, PodWiring, Reason, Report, Settings};
use tortie_hcn::schema::{Acl, OutBoundNat, Policy, ProviderAddress, SdnRoute};
use tortie_hcn::{Call, Failure, HResult, Hcn, HcnExt, Kind};
use tortie_windows::{WindowsDataplane, WindowsWiring, endpoint_id};

fn pools(pools: &[(&str, bool)]) -> Delta {
    let pools: BTreeMap<_, _> = pools.iter().map(|(net, nat)| (net.parse().unwrap(), *nat)).collect();
    Delta::Settings(Arc::new(Settings::new(&FelixConfigurationSpec::default(), pools)))
}

/// A node that knows the network of Services, and these pools.
fn node(known: &[(&str, bool)]) -> Node {
    let services = vec!["10.96.0.0/12".parse().unwrap()];
    let mut node = Node::usual();
    let (start, ahead) = (Instant::now(), Arc::clone(&node.ahead));
    let clock = Box::new(move || start + *ahead.lock().unwrap());
    let dataplane = WindowsDataplane::with_clock(node.hns.clone(), clock).with_services(services);
    node.wiring = WindowsWiring::new(node.hns.clone()).with_networks(dataplane.networks());
    node.dataplane = testkit::Stateful::new(dataplane);
    node.apply(&[local_node(), own_block(), allow_all(), pools(known)]);
    node
}

/// The pod's policies in HNS, without ACLs, as JSON.
fn policies(node: &Node) -> Value {
    let mut policies = node.endpoint().policies;
    policies.retain(|policy| !policy.is::<Acl>());
    json!(policies)
}

fn nat(exceptions: &[&str]) -> Value {
    json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": exceptions}})
}

fn provider() -> Value {
    json!({"Type": "ProviderAddress", "Settings": {"ProviderAddress": "172.16.0.3"}})
}

fn route() -> Value {
    json!({"Type": "SDNRoute", "Settings": {"DestinationPrefix": "10.96.0.0/12", "NeedEncap": true}})
}

/// The order of exceptions is that of Calico's plugin: what is configured, and then the pools (`TestCalculateEndpointPolicies`).
#[test]
fn a_new_endpoint_has_the_policies_of_win_overlay_and_calico() {
    let two = [("10.244.0.0/16", true), ("10.0.2.0/24", false)];
    for (known, expected) in [
        (&two[..], vec![provider(), nat(&["10.96.0.0/12", "10.0.2.0/24", "10.244.0.0/16"]), route()]),
        (
            &[("10.244.0.0/16", true), ("fd00::/64", true)],
            vec![provider(), nat(&["10.96.0.0/12", "10.244.0.0/16"]), route()],
        ),
        (&[("10.244.0.0/16", false), ("10.0.2.0/24", true)], vec![provider(), route()]),
        (&[], vec![provider(), route()]),
    ] {
        let node = node(known);
        node.connect();
        assert_eq!(policies(&node), json!(expected), "{known:?}");
    }
}

/// An operator excludes the addresses of nodes (`natOutgoingExclusions`). Those of IPv6 mean nothing to this policy.
#[test]
fn packets_to_excluded_nodes_keep_the_address_of_the_pod() {
    let mut node = node(&[("10.244.0.0/16", true)]);
    node.connect();
    node.apply(&[endpoint(open_program())]);
    let known = [("10.244.0.0/16".parse().unwrap(), true)].into();
    let usual = Settings::new(&FelixConfigurationSpec::default(), known);
    let nodes = ["192.0.2.9", "172.16.0.3", "2001:db8::9"].map(|address| address.parse().unwrap());
    for (nat_exceptions, expected) in [
        (nodes.into(), nat(&["10.96.0.0/12", "10.244.0.0/16", "172.16.0.3/32", "192.0.2.9/32"])),
        ([].into(), nat(&["10.96.0.0/12", "10.244.0.0/16"])),
    ] {
        let settings = Settings { nat_exceptions, ..usual.clone() };
        assert_eq!(node.apply(&[Delta::Settings(Arc::new(settings))]), Report::default());
        assert!(policies(&node).as_array().unwrap().contains(&expected), "{}", policies(&node));
    }
}

/// Packets to Services would get the node's address, and nothing else would keep them in the switch.
#[test]
fn without_the_networks_of_services_nothing_is_translated_and_the_node_says_so() {
    let mut node = node(&[("10.244.0.0/16", true)]);
    node.connect();
    assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
    // The next agent gets no --service-cidr.
    let dataplane = WindowsDataplane::new(node.hns.clone());
    node.wiring = WindowsWiring::new(node.hns.clone()).with_networks(dataplane.networks());
    node.dataplane = testkit::Stateful::new(dataplane);
    let known = pools(&[("10.0.2.0/24", false), ("10.244.0.0/16", true), ("fd00::/64", true)]);
    let report = node.apply(&[local_node(), own_block(), allow_all(), known, endpoint(open_program())]);
    let [condition] = &report.node[..] else { panic!("{report:?}") };
    assert_eq!(condition.reason, Reason::OutboundNatDiffers);
    assert!(!condition.reason.is_failure() && !report.retry && report.endpoints.is_empty(), "{report:?}");
    assert!(condition.message.contains("natOutgoing of 10.244.0.0/16 has"), "{}", condition.message);
    assert!(condition.message.contains("--service-cidr"), "{}", condition.message);
    assert_eq!(policies(&node), json!([provider()]), "a running pod loses what it should not have");
    let pod = attachment(node.namespace());
    node.wiring.disconnect(&pod.endpoint, &pod.container_id).unwrap();
    node.connect();
    assert_eq!(policies(&node), json!([provider()]));
    assert_eq!(node.apply(&[pools(&[("10.244.0.0/16", false)])]).node, []);
}

#[test]
fn a_new_endpoint_has_the_settings_of_dns_as_win_overlay_writes_them() {
    let node = node(&[]);
    let servers: Vec<IpAddr> = vec!["10.96.0.10".parse().unwrap()];
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let full = PodDns {
        servers,
        domain: "n.example".to_owned(),
        search: words(&["n.svc.cluster.local", "svc.cluster.local"]),
        options: words(&["ndots:5"]),
    };
    let expected = json!({"Domain": "n.example", "Search": ["n.svc.cluster.local", "svc.cluster.local"],
        "ServerList": ["10.96.0.10"], "Options": ["ndots:5"]});
    for (dns, expected) in [
        (PodDns::default(), Value::Null),
        (
            PodDns { domain: String::new(), search: vec![], options: vec![], ..full.clone() },
            json!({"ServerList": ["10.96.0.10"]}),
        ),
        (full, expected),
    ] {
        let pod = PodAttachment { dns, ..attachment(node.namespace()) };
        node.wiring.connect(&pod).unwrap();
        assert_eq!(json!(node.endpoint().dns), expected);
        node.wiring.disconnect(&pod.endpoint, &pod.container_id).unwrap();
    }
}

#[test]
fn changed_pools_reach_existing_endpoints_and_nothing_is_sent_that_is_there() {
    let mut node = node(&[("10.244.0.0/16", true)]);
    node.connect();
    assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
    node.hns.take();
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(node.hns.take_changes(), []);
    node.apply(&[pools(&[("10.244.0.0/16", true), ("10.0.2.0/24", false)])]);
    assert_eq!(node.hns.take_changes().len(), 2, "one goes, and one comes");
    let changed = nat(&["10.96.0.0/12", "10.0.2.0/24", "10.244.0.0/16"]);
    assert_eq!(policies(&node), json!([provider(), route(), changed]));
    node.apply(&[pools(&[("10.244.0.0/16", false)])]);
    assert_eq!(policies(&node), json!([provider(), route()]));
    // Somebody removes them.
    node.apply(&[pools(&[("10.244.0.0/16", true)])]);
    let mut lost = node.endpoint().policies;
    lost.retain(|policy| policy.is::<OutBoundNat>() || policy.is::<SdnRoute>());
    let remove = tortie_hcn::schema::Modify::policies(tortie_hcn::schema::RequestType::Remove, lost);
    node.hns.modify_endpoint(endpoint_id(CONTAINER), &remove).unwrap();
    assert_eq!(policies(&node), json!([provider()]));
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(policies(&node), json!([provider(), nat(&["10.96.0.0/12", "10.244.0.0/16"]), route()]));
}

/// loopbackDSR and routes by a next hop have other purposes.
#[test]
fn policies_of_the_same_types_with_another_purpose_stay() {
    let mut node = node(&[("10.244.0.0/16", true)]);
    node.connect();
    let others = vec![
        Policy::of(&OutBoundNat { destinations: vec![POD.to_string()], ..Default::default() }),
        Policy::of(&SdnRoute {
            destination_prefix: "10.1.0.0/16".into(),
            next_hop: "10.244.3.1".into(),
            ..Default::default()
        }),
    ];
    let add = tortie_hcn::schema::Modify::policies(tortie_hcn::schema::RequestType::Add, others.clone());
    node.hns.modify_endpoint(endpoint_id(CONTAINER), &add).unwrap();
    assert_eq!(node.apply(&[endpoint(open_program()), pools(&[])]), Report::default());
    assert_eq!(policies(&node), json!([provider(), route(), others[0], others[1]]));
}

/// The changes of endpoints that name this policy, since the last call.
fn sent(node: &Node, policy: &str) -> Vec<&'static str> {
    let changes = node.hns.take_changes();
    let named = changes.iter().map(|change| format!("{change:?}")).filter(|change| change.contains(policy));
    named.map(|change| if change.contains("Remove") { "Remove" } else { "Add" }).collect()
}

fn refuse(node: &Node, request: &'static str) {
    node.hns.set_fault(move |call| match call {
        Call::Modify { kind: Kind::Endpoint, settings, .. }
            if settings.contains("OutBoundNAT") && settings.contains(request) =>
        {
            Some(Err(Failure::new(HResult::HCN_E_REQUEST_UNSUPPORTED, "not on this build")))
        }
        _ => None,
    });
}

#[track_caller]
fn differs(report: &Report, what: &str) {
    let found: Vec<_> = report.endpoints.values().flatten().collect();
    let [condition] = &found[..] else { panic!("{report:?}") };
    assert_eq!(condition.reason, Reason::OutboundNatDiffers);
    assert!(condition.message.contains(what), "{}", condition.message);
}

#[test]
fn a_refused_change_is_reported_and_tried_again_later() {
    let mut node = node(&[("10.244.0.0/16", true)]);
    node.connect();
    assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
    refuse(&node, "Remove");
    differs(&node.apply(&[pools(&[("10.244.0.0/16", false)])]), "recreate the pod");
    node.hns.take();
    for _ in 0..3 {
        node.wait(60);
        differs(&node.dataplane.resync(), "not on this build");
    }
    assert_eq!(sent(&node, "OutBoundNAT"), [""; 0], "the same answer is known");
    node.hns.clear_fault();
    node.wait(600);
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(policies(&node), json!([provider(), route()]));
}

/// Two translations of one endpoint could mean anything.
#[test]
fn nothing_is_added_while_the_old_policy_cannot_be_removed() {
    for is_silent in [false, true] {
        let mut node = node(&[("10.244.0.0/16", true)]);
        node.connect();
        assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
        let before = policies(&node);
        node.hns.set_fault(move |call| match call {
            Call::Modify { kind: Kind::Endpoint, settings, .. }
                if settings.contains("OutBoundNAT") && settings.contains("Remove") =>
            {
                let refused = Failure::new(HResult::HCN_E_REQUEST_UNSUPPORTED, "not on this build");
                Some(if is_silent { Ok(String::new()) } else { Err(refused) })
            }
            _ => None,
        });
        let two = pools(&[("10.244.0.0/16", true), ("10.0.2.0/24", true)]);
        differs(&node.apply(&[two]), "with the exceptions 10.244.0.0/16, 10.96.0.0/12 cannot be removed");
        assert_eq!(policies(&node), before, "{is_silent}");
        // Another change is another attempt.
        node.hns.clear_fault();
        assert_eq!(node.apply(&[pools(&[("10.244.0.0/16", false)])]), Report::default());
        assert_eq!(policies(&node), json!([provider(), route()]));
    }
}

#[test]
fn the_old_policy_comes_back_if_the_new_one_is_refused() {
    let mut node = node(&[("10.244.0.0/16", true)]);
    node.connect();
    assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
    node.hns.set_fault(|call| match call {
        Call::Modify { kind: Kind::Endpoint, settings, .. }
            if settings.contains("10.0.2.0") && settings.contains("Add") =>
        {
            Some(Err(Failure::new(HResult::HCN_E_REQUEST_UNSUPPORTED, "too many exceptions")))
        }
        _ => None,
    });
    differs(&node.apply(&[pools(&[("10.244.0.0/16", true), ("10.0.2.0/24", true)])]), "too many exceptions");
    let old = nat(&["10.96.0.0/12", "10.244.0.0/16"]);
    assert_eq!(policies(&node), json!([provider(), route(), old]));
    node.hns.take();
    differs(&node.dataplane.resync(), "too many exceptions");
    assert_eq!(sent(&node, "OutBoundNAT"), [""; 0]);
}

/// Each Add could be one more policy that nobody sees. A build may say that it has the policy, or accept it again.
#[test]
fn a_build_that_does_not_list_a_policy_gets_it_once() {
    for says_so in [true, false] {
        let mut node = node(&[("10.244.0.0/16", true)]);
        node.connect();
        let inner = Arc::clone(&node.hns);
        node.hns.set_fault(move |call| match call {
            Call::Query { kind: Kind::Endpoint, .. } => Some(inner.inner().call(call).map(|document| {
                let mut document: Value = serde_json::from_str(&document).unwrap();
                if let Some(policies) = document["Policies"].as_array_mut() {
                    policies.retain(|policy| policy["Type"] != "SDNRoute");
                }
                document.to_string()
            })),
            Call::Modify { settings, .. } if !says_so && settings.contains("SDNRoute") => {
                Some(Ok(String::new()))
            }
            _ => None,
        });
        let check = |report: &Report| {
            if says_so {
                assert_eq!(*report, Report::default())
            } else {
                differs(report, "SDNRoute 10.96.0.0/12 and does not show it")
            }
        };
        node.hns.take();
        check(&node.apply(&[endpoint(open_program())]));
        assert_eq!(sent(&node, "SDNRoute"), ["Add"]);
        for _ in 0..3 {
            node.wait(3_600);
            check(&node.dataplane.resync());
        }
        assert_eq!(sent(&node, "SDNRoute"), [""; 0]);
    }
}

/// Packets of existing pods would have an outer address that the node has no more.
#[test]
fn endpoints_follow_the_address_of_the_node() {
    let mut node = node(&[]);
    node.connect();
    assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
    let inner = Arc::clone(&node.hns);
    node.hns.set_fault(move |call| match call {
        Call::Query { kind: Kind::Network, .. } => {
            Some(inner.inner().call(call).map(|document| document.replace("172.16.0.3", "172.16.0.33")))
        }
        _ => None,
    });
    let report = node.dataplane.resync();
    assert_eq!(report.endpoints.len(), 0, "{report:?}");
    let moved = json!({"Type": "ProviderAddress", "Settings": {"ProviderAddress": "172.16.0.33"}});
    assert_eq!(policies(&node), json!([route(), moved]));
    node.hns.clear_fault();
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(policies(&node), json!([route(), provider()]));
}

fn remove_provider(node: &Node) {
    let listed = node.endpoint().policies.into_iter().filter(Policy::is::<ProviderAddress>).collect();
    let remove = tortie_hcn::schema::Modify::policies(tortie_hcn::schema::RequestType::Remove, listed);
    node.hns.modify_endpoint(endpoint_id(CONTAINER), &remove).unwrap();
}

/// The agent ended, or HNS did not answer, when the old address was removed.
#[test]
fn an_interrupted_change_of_the_address_is_completed() {
    let mut node = node(&[]);
    node.connect();
    let inner = Arc::clone(&node.hns);
    node.apply(&[endpoint(open_program())]);
    node.hns.set_fault(move |call| match call {
        Call::Query { kind: Kind::Network, .. } => {
            Some(inner.inner().call(call).map(|document| document.replace("172.16.0.3", "172.16.0.33")))
        }
        Call::Modify { settings, .. }
            if settings.contains(r#""RequestType":"Add""#) && settings.contains("ProviderAddress") =>
        {
            Some(Err(Failure::new(HResult::ERROR_TIMEOUT, "late")))
        }
        _ => None,
    });
    assert!(node.dataplane.resync().retry);
    assert_eq!(policies(&node), json!([route()]));
    node.hns.clear_fault();
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!(policies(&node), json!([route(), provider()]));
}

/// Each attempt could be one more policy that nobody sees.
#[test]
fn a_build_that_lists_no_addresses_of_endpoints_gets_none() {
    let mut node = node(&[]);
    node.connect();
    remove_provider(&node);
    for _ in 0..3 {
        node.wait(11);
        assert_eq!(node.apply(&[endpoint(open_program())]), Report::default());
        assert_eq!(node.dataplane.resync(), Report::default());
    }
    assert_eq!(policies(&node), json!([route()]));
}

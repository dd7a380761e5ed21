//! Limits, flows and restarts of HNS, for every value of the options.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::documents::support::*;
use serde_json::{Value, json};
use tortie_hcn::schema::Acl;
use tortie_hcn::{Call, Failure, Guid, HResult, Hcn, HcnExt, Kind, Version};
use tortie_hns_emulator::{
    AclRemoval, Config, EgressSees, Emulator, EqualPriority, Limits, OnRewrite, Packet, PacketDirection,
    Recorder, Survives, UpdateReplaces, Verdict, restart,
};

fn allow_out(priority: u16) -> Value {
    acl_with(priority, json!({"Action": "Allow", "Direction": "Out"}))
}

fn out(protocol: u8) -> Packet {
    let (local, remote) = ([10, 244, 3, 7].into(), [10, 9, 0, 1].into());
    Packet { direction: PacketDirection::Out, protocol, local, remote, local_port: 4000, remote_port: 80 }
}

fn list(entries: usize, of: impl Fn(usize) -> String) -> String {
    (0..entries).map(of).collect::<Vec<_>>().join(",")
}

#[test]
fn a_strict_hns_rejects_too_many_entries_in_a_field() {
    let address = |i: usize| Ipv4Addr::from(0x0a00_0000 + 2 * i as u32).to_string();
    let port = |i: usize| i.to_string();
    let limits = |field_entries| Limits { field_entries, ..Limits::default() };
    let refused = Err(HResult::HCN_E_INVALID_POLICY);
    let cases = [
        (Some(4000), true, 4000, Ok(())),
        (Some(4000), true, 4001, refused),
        (Some(4000), false, 4001, Ok(())),
        (None, true, 4001, Ok(())),
        (Some(3), true, 4, refused),
    ];
    assert_eq!(Limits::default().field_entries, Some(4000));
    for (most, strict, entries, expected) in cases {
        let node = Node::new(Config { limits: limits(most), strict, ..config() });
        for (field, value) in [
            ("LocalAddresses", list(entries, address)),
            ("RemoteAddresses", list(entries, address)),
            ("LocalPorts", list(entries, port)),
            ("RemotePorts", list(entries, port)),
        ] {
            let sent = node.acls("Update", json!([acl_with(1, json!({field: value}))]));
            assert_eq!(sent, expected, "{field}: {entries} of {most:?}, strict: {strict}");
        }
    }
}

#[test]
fn too_many_acls_and_wrong_priorities_are_rejected() {
    let refused = Err(HResult::HCN_E_INVALID_POLICY);
    let acls = |from: u16, to: u16| Value::from((from..=to).map(acl).collect::<Vec<_>>());
    let free = Node::new(config());
    assert_eq!(free.acls("Add", acls(1, 1000)), Ok(()), "nobody says that there is a limit");

    let limits = Limits { endpoint_acls: Some(3), ..Limits::default() };
    let few = Node::new(Config { limits, ..config() });
    assert_eq!(few.acls("Add", acls(1, 4)), refused);
    assert_eq!(few.acls("Add", acls(1, 3)), Ok(()));
    assert_eq!(few.acls("Add", acls(4, 4)), refused);
    assert_eq!(few.acls("Update", acls(4, 6)), Ok(()));

    let limits = Limits { modify_policies: Some(2), ..Limits::default() };
    let slow = Node::new(Config { limits, ..config() });
    for request in ["Add", "Remove", "Update"] {
        assert_eq!(slow.acls(request, acls(1, 3)), refused, "{request}");
    }
    assert_eq!(slow.acls("Add", acls(1, 2)), Ok(()));
    assert_eq!(slow.acls("Add", acls(3, 4)), Ok(()));

    let narrow = Limits { priorities: 100..=200, ..Limits::default() };
    for (limits, good, bad) in
        [(Limits::default(), [1, 65_500], [0, 65_501]), (narrow, [100, 200], [99, 201])]
    {
        let node = Node::new(Config { limits, ..config() });
        for priority in good {
            assert_eq!(node.acls("Update", acls(priority, priority)), Ok(()), "{priority}");
        }
        for priority in bad {
            assert_eq!(node.acls("Update", acls(priority, priority)), refused, "{priority}");
        }
    }
}

/// Lists in ACLs exist from HNS 7.2 on.
#[test]
fn lists_require_their_hns_version() {
    let cases = [
        ("RemoteAddresses", "10.0.0.0/8", true),
        ("RemoteAddresses", "10.0.0.1,10.0.0.2", false),
        ("LocalAddresses", "10.0.0.1,10.0.0.2", false),
        ("LocalPorts", "80", true),
        ("LocalPorts", "80,81", false),
        ("RemotePorts", "80-90", false),
    ];
    for (field, value, before) in cases {
        for (version, takes) in [(Version::new(7, 1), before), (Version::new(7, 2), true)] {
            let hns = Emulator::new(Config { version, ..config() });
            // This version has no overlays.
            let plain = with(with(overlay("old"), "/Type", Some(json!("L2Bridge"))), "/Policies", None);
            let network = create(&hns, Kind::Network, Guid::ZERO, &plain).unwrap();
            let id = create(&hns, Kind::Endpoint, network, &endpoint("10.244.3.7")).unwrap();
            let list = json!([acl_with(1, json!({field: value}))]);
            let taken = policies(&hns, Kind::Endpoint, id, "Add", list);
            assert_eq!(taken.is_ok(), takes, "{version} {field} {value}: {taken:?}");
        }
    }
}

#[test]
fn ties_of_priority_follow_the_option() {
    for (equal_priority, allowed) in [(EqualPriority::BlockWins, false), (EqualPriority::AllowWins, true)] {
        let node = Node::new(Config { equal_priority, host_default: None, ..config() });
        let block = acl_with(7, json!({"Direction": "Out"}));
        for lists in [[allow_out(7), block.clone()], [block, allow_out(7)]] {
            node.acls("Update", json!(lists)).unwrap();
            let verdict = node.hns.judge(node.endpoint, &out(6)).unwrap() == Verdict::Allow;
            assert_eq!(verdict, allowed, "{equal_priority:?}");
        }
    }
}

#[test]
fn the_senders_acls_match_the_configured_address_of_a_service() {
    let vip = Some((Ipv4Addr::new(10, 96, 0, 10).into(), 8080));
    let backend = json!({"RemoteAddresses": "10.9.0.1", "RemotePorts": "80"});
    let service = json!({"RemoteAddresses": "10.96.0.10", "RemotePorts": "8080"});
    for (egress_sees, seen) in [(EgressSees::Backend, &backend), (EgressSees::Vip, &service)] {
        let node = Node::new(Config { egress_sees, host_default: None, ..config() });
        for criteria in [&backend, &service] {
            let mut criteria = criteria.clone();
            criteria["Action"] = json!("Allow");
            criteria["Protocols"] = json!("6");
            let (mut inwards, seen_here) = (criteria.clone(), criteria["RemotePorts"] == seen["RemotePorts"]);
            criteria["Direction"] = json!("Out");
            inwards["Direction"] = json!("In");
            node.acls("Update", json!([acl_with(1, criteria), acl_with(2, inwards)])).unwrap();
            let to_service = node.hns.judge_to_service(node.endpoint, &out(6), vip).unwrap();
            assert_eq!(to_service == Verdict::Allow, seen_here, "{egress_sees:?}");
            let direct = node.hns.judge(node.endpoint, &out(6)).unwrap();
            let is_backend = node.acls_of().iter().any(|acl| acl.remote_ports == "80");
            assert_eq!(direct == Verdict::Allow, is_backend, "without a Service there is only one address");
            let answered = Packet { direction: PacketDirection::In, ..out(6) };
            let inwards = node.hns.judge_to_service(node.endpoint, &answered, vip).unwrap();
            assert_eq!(inwards == Verdict::Allow, is_backend, "the receiver sees itself");
        }
    }
}

trait Acls {
    fn acls_of(&self) -> Vec<Acl>;
}

impl Acls for Node {
    fn acls_of(&self) -> Vec<Acl> {
        let policies = self.hns.endpoint(self.endpoint).unwrap().policies;
        policies.iter().filter_map(|policy| policy.settings().unwrap()).collect()
    }
}

/// The remaining ACLs and NAT policy after a request, and its answer.
#[test]
fn removal_and_update_follow_the_option() {
    let nat = json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": ["10.0.0.0/8"]}});
    let works = (AclRemoval::Works, UpdateReplaces::All);
    let unsupported = Err(HResult::HCN_E_REQUEST_UNSUPPORTED);
    let cases = [
        (works, "Remove", json!([acl(1)]), Ok(()), (1, 1)),
        (works, "Update", json!([acl(9)]), Ok(()), (1, 0)),
        (works, "Update", json!([]), Ok(()), (0, 0)),
        ((AclRemoval::RefusedAlways, works.1), "Remove", json!([acl(1)]), unsupported, (2, 1)),
        ((AclRemoval::RefusedAlways, works.1), "Remove", json!([nat]), Ok(()), (2, 0)),
        ((AclRemoval::IgnoredSilently, works.1), "Remove", json!([acl(1), acl(7)]), Ok(()), (2, 1)),
        ((AclRemoval::IgnoredSilently, works.1), "Remove", json!([nat]), Ok(()), (2, 0)),
        ((works.0, UpdateReplaces::SameType), "Update", json!([acl(9)]), Ok(()), (1, 1)),
        ((works.0, UpdateReplaces::SameType), "Update", json!([nat]), Ok(()), (2, 1)),
        ((works.0, UpdateReplaces::SameType), "Update", json!([]), Ok(()), (2, 1)),
        ((works.0, UpdateReplaces::AclsAndSameType), "Update", json!([acl(9)]), Ok(()), (1, 1)),
        ((works.0, UpdateReplaces::AclsAndSameType), "Update", json!([nat]), Ok(()), (0, 1)),
        ((works.0, UpdateReplaces::AclsAndSameType), "Update", json!([]), Ok(()), (0, 1)),
    ];
    for ((acl_removal, update_replaces), request, policies, answer, left) in cases {
        let node = Node::new(Config { acl_removal, update_replaces, ..config() });
        node.acls("Add", json!([acl(1), acl(2), nat])).unwrap();
        let shown = format!("{acl_removal:?} {update_replaces:?} {request} {policies}");
        assert_eq!(node.acls(request, policies), answer, "{shown}");
        let all = node.hns.endpoint(node.endpoint).unwrap().policies.len();
        let acls = node.acls_of().len();
        assert_eq!((acls, all - acls), left, "{shown}");
    }
}

/// A document that was read can be sent back: HNS omits zero values, such as Allow.
#[test]
fn documents_read_back_equal_those_sent() {
    let node = Node::new(config());
    node.acls("Add", json!([allow_out(9)])).unwrap();
    node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1")])).unwrap();
    let read = |kind, id| -> Value {
        let query = Call::Query { kind, id, query: String::new() };
        serde_json::from_str::<Value>(&node.hns.call(&query).unwrap()).unwrap()["Policies"].take()
    };
    let shown = read(Kind::Endpoint, node.endpoint);
    assert_eq!(shown[0]["Settings"].get("Action"), None);
    let twice = Err(HResult::HCN_E_POLICY_ALREADY_EXISTS);
    assert_eq!(node.acls("Add", shown.clone()), twice);
    let other = json!([acl_with(9, json!({"Direction": "Out"}))]);
    assert_eq!(node.acls("Remove", other), Err(HResult::HCN_E_POLICY_NOT_FOUND), "Block is no zero");
    assert_eq!(node.acls("Remove", shown), Ok(()));
    let shown = read(Kind::Network, node.network);
    let sets: Vec<&Value> = shown.as_array().unwrap().iter().filter(|p| p["Type"] == "SetPolicy").collect();
    assert_eq!(sets[0]["Settings"].get("PolicyType"), None);
    assert_eq!(node.sets("Remove", json!(sets)), Ok(()));
}

/// Whether flows of TCP and UDP are established after each request, for each option.
#[test]
fn writes_affect_flows_as_configured() {
    use OnRewrite::*;
    let nat = json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": ["10.0.0.0/8"]}});
    let cases = [
        ("Add", json!([acl(5)]), [(Keep, true), (ResetOnAnyChange, false), (ResetOnRemoveOrUpdate, true)]),
        (
            "Remove",
            json!([acl(4)]),
            [(Keep, true), (ResetOnAnyChange, false), (ResetOnRemoveOrUpdate, false)],
        ),
        (
            "Update",
            json!([allow_out(9)]),
            [(Keep, true), (ResetOnAnyChange, false), (ResetOnRemoveOrUpdate, false)],
        ),
        // The existing ACL again.
        (
            "Update",
            json!([allow_out(9), acl(4)]),
            [(Keep, true), (ResetOnAnyChange, false), (ResetOnRemoveOrUpdate, false)],
        ),
        // No ACL is written.
        ("Add", json!([nat]), [(Keep, true), (ResetOnAnyChange, true), (ResetOnRemoveOrUpdate, true)]),
        (
            "Add",
            json!([allow_out(9)]),
            [(Keep, true), (ResetOnAnyChange, true), (ResetOnRemoveOrUpdate, true)],
        ),
    ];
    for (request, policies, knobs) in cases {
        for (on_rewrite, open) in knobs {
            let node = Node::new(Config { on_rewrite, ..config() });
            node.acls("Add", json!([allow_out(9), acl(4)])).unwrap();
            for protocol in [6, 17] {
                assert_eq!(node.hns.is_open(node.endpoint, &out(protocol)), Ok(false));
                assert_eq!(node.hns.open(node.endpoint, &out(protocol), None), Ok(Verdict::Allow));
                assert_eq!(node.hns.is_open(node.endpoint, &out(protocol)), Ok(true));
                let answer = Packet { direction: PacketDirection::In, ..out(protocol) };
                assert_eq!(node.hns.is_open(node.endpoint, &answer), Ok(true), "both ways are one flow");
            }
            // The last case is rejected, because the ACL exists.
            let _ = node.acls(request, policies.clone());
            for protocol in [6, 17] {
                let is_open = node.hns.is_open(node.endpoint, &out(protocol)).unwrap();
                assert_eq!(is_open, open, "{request} {policies} {on_rewrite:?} {protocol}");
                assert_eq!(node.hns.open(node.endpoint, &out(protocol), None), Ok(Verdict::Allow));
                assert_eq!(node.hns.is_open(node.endpoint, &out(protocol)), Ok(true), "begun anew");
            }
        }
    }
}

#[test]
fn flows_are_recorded_when_allowed_and_end_with_their_endpoint() {
    let node = Node::new(Config { on_rewrite: OnRewrite::Keep, host_default: None, ..config() });
    node.acls("Add", json!([acl(4), allow_out(9)])).unwrap();
    let inwards = Packet { direction: PacketDirection::In, ..out(6) };
    assert_eq!(node.hns.open(node.endpoint, &inwards, None), Ok(Verdict::Block));
    assert_eq!(node.hns.is_open(node.endpoint, &inwards), Ok(false));
    assert_eq!(node.hns.open(node.endpoint, &out(6), None), Ok(Verdict::Allow));
    assert_eq!(node.hns.is_open(node.endpoint, &Packet { remote_port: 81, ..out(6) }), Ok(false));
    // A flow that is denied now continues.
    node.acls("Update", json!([acl(4)])).unwrap();
    assert_eq!(node.hns.judge(node.endpoint, &out(6)), Ok(Verdict::Block));
    assert_eq!(node.hns.is_open(node.endpoint, &out(6)), Ok(true));
    node.hns.delete_endpoint(node.endpoint).unwrap();
    assert_eq!(node.hns.is_open(node.endpoint, &out(6)).unwrap_err().code, HResult::HCN_E_ENDPOINT_NOT_FOUND);
    let again = with(endpoint("10.244.3.7"), "/ID", Some(json!(node.endpoint)));
    create(&node.hns, Kind::Endpoint, node.network, &again).unwrap();
    assert_eq!(node.hns.is_open(node.endpoint, &out(6)), Ok(false), "another endpoint with the same id");
}

#[test]
fn a_restart_keeps_the_configured_state() {
    let names = json!([allow_out(9), acl_with(4, json!({"RemoteAddresses": "s1"}))]);
    // How many ACLs, sets and endpoints remain, and whether the flow continues.
    let cases = [
        (Survives::Everything, Some((2, 1)), true),
        (Survives::AllButAcls, Some((0, 1)), false),
        (Survives::AllButAclsAndSets, Some((0, 0)), false),
        (Survives::Nothing, None, false),
    ];
    for (survives, left, open) in cases {
        let node = Node::new(Config { on_rewrite: OnRewrite::ResetOnRemoveOrUpdate, ..config() });
        node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1")])).unwrap();
        node.acls("Add", names.clone()).unwrap();
        node.hns.open(node.endpoint, &out(6), None).unwrap();
        // From another process, it is a call. The end of all objects is the end of the process there.
        match restart(&node.hns, survives) {
            Ok(()) => assert_ne!(survives, Survives::Nothing),
            Err(failure) => {
                assert_eq!((survives, failure.code), (Survives::Nothing, HResult::E_NOTIMPL));
                node.hns.restart(survives).unwrap();
            }
        }
        let Some((acls, sets)) = left else {
            assert_eq!(
                (node.hns.networks().unwrap().len(), node.hns.endpoint(node.endpoint).is_err()),
                (0, true)
            );
            continue;
        };
        let network = node.hns.network(node.network).unwrap();
        let known = network.policies.iter().filter(|policy| policy.r#type == "SetPolicy").count();
        assert_eq!((node.acls_of().len(), known), (acls, sets), "{survives:?}");
        assert_eq!(node.hns.is_open(node.endpoint, &out(6)), Ok(open), "{survives:?}");
        assert_eq!(node.hns.judge(node.endpoint, &out(6)), Ok(Verdict::Allow), "open again, or still");
        let inwards = Packet { direction: PacketDirection::In, ..out(6) };
        let closed = acls > 0;
        assert_eq!(node.hns.judge(node.endpoint, &inwards) == Ok(Verdict::Block), closed, "{survives:?}");
        let uses = node.acls("Add", json!([acl_with(5, json!({"RemoteAddresses": "s1"}))]));
        assert_eq!(uses.is_ok(), sets > 0, "{survives:?}");
        // Removed sets can be created again, existing ones cannot.
        let again = node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1")]));
        assert_eq!(again.is_ok(), sets == 0, "{survives:?}");
    }
}

fn recorded() -> (Arc<Recorder<Emulator>>, Call) {
    let Node { hns, endpoint, .. } = Node::new(config());
    let settings =
        json!({"RequestType": "Add", "ResourceType": "Policy", "Settings": {"Policies": [acl(1)]}});
    let add = Call::Modify { kind: Kind::Endpoint, id: endpoint, settings: settings.to_string() };
    (Arc::new(Recorder::new(hns)), add)
}

#[test]
fn a_call_with_a_lost_reply_was_carried_out() {
    let (hns, add) = recorded();
    hns.lose_replies(|call| (!call.is_read()).then(|| Failure::new(HResult::ERROR_TIMEOUT, "no reply")));
    assert_eq!(hns.call(&add).unwrap_err().code, HResult::ERROR_TIMEOUT);
    assert_eq!(hns.call(&add).unwrap_err().code, HResult::HCN_E_POLICY_ALREADY_EXISTS, "it has happened");
    hns.clear_fault();
    let Call::Modify { id, .. } = add else { panic!() };
    assert_eq!(hns.endpoint(id).unwrap().policies.len(), 1);
}

#[test]
fn a_slow_call_delays_no_other() {
    let (hns, add) = recorded();
    let hold = hns.hold(|call| !call.is_read());
    let Call::Modify { id, .. } = add else { panic!() };
    thread::scope(|scope| {
        let slow = scope.spawn(|| hns.call(&add));
        assert!(hold.has(1, Duration::from_secs(30)));
        assert_eq!(hns.endpoint(id).unwrap().policies.len(), 0, "it has not come to HNS yet");
        drop(hold);
        assert!(slow.join().unwrap().is_ok());
    });
    assert_eq!(hns.endpoint(id).unwrap().policies.len(), 1);
    hns.call(&add).unwrap_err();
}

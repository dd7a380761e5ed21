//! Sets and the ACLs that name them.

use std::net::Ipv4Addr;

use crate::documents::support::*;
use serde_json::json;
use tortie_hcn::schema::{Policy, SetPolicy};
use tortie_hcn::{Guid, HResult, HcnExt, Kind};
use tortie_hns_emulator::{
    Config, Emulator, Limits, OnRewrite, Packet, PacketDirection, SetReading, SeveralSets, Verdict,
};

#[test]
fn sets_require_their_version_and_stay_while_in_use() {
    let set = |id: &str, values: &str| {
        json!([{"Type": "SetPolicy", "Settings":
            {"Id": id, "Name": id, "PolicyType": "IPSET", "Values": values}}])
    };
    for (version, has) in [(Config::SERVER_2019, false), (Config::SERVER_2022, true), (Config::NEWEST, true)]
    {
        let hcn = Emulator::new(Config::new(version, Ipv4Addr::LOCALHOST));
        assert_eq!(hcn.version(), Ok(version));
        let network = create(&hcn, Kind::Network, Guid::ZERO, &overlay("Calico")).unwrap();
        let change = |request, what| policies(&hcn, Kind::Network, network, request, what);
        let added = change("Add", set("s1", "10.0.0.1,10.0.0.2"));
        assert_eq!(added, if has { Ok(()) } else { Err(HResult::HCN_E_INVALID_POLICY_TYPE) }, "{version}");
        if !has {
            continue;
        }
        assert_eq!(change("Add", set("s1", "")), Err(HResult::HCN_E_POLICY_ALREADY_EXISTS));
        let uses = with(acl(1), "/Settings/RemoteAddresses", Some(json!("s1")));
        let document = with(endpoint("10.244.3.7"), "/Policies", Some(json!([uses])));
        let id = create(&hcn, Kind::Endpoint, network, &document).unwrap();
        assert_eq!(change("Update", set("s1", "10.0.0.3")), Ok(()));
        assert_eq!(change("Update", set("s2", "10.0.0.3")), Err(HResult::HCN_E_POLICY_NOT_FOUND));
        assert_eq!(change("Remove", set("s1", "10.0.0.3")), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES));
        hcn.delete_endpoint(id).unwrap();
        let sets: Vec<SetPolicy> =
            hcn.network(network).unwrap().policies.iter().filter_map(|p| p.settings().unwrap()).collect();
        assert_eq!(sets[0].values, "10.0.0.3");
        assert_eq!(change("Remove", json!([Policy::of(&sets[0])])), Ok(()));
    }
}

#[test]
fn nested_sets_require_their_version_and_existing_members() {
    let nested = |values: &str| json!([set("all", "NESTEDIPSET", values)]);
    let old = Node::new(Config { version: Config::SERVER_2022, ..config() });
    assert_eq!(old.sets("Add", json!([set("s1", "IPSET", "10.0.0.1")])), Ok(()));
    assert_eq!(old.sets("Add", nested("s1")), Err(HResult::HCN_E_INVALID_POLICY_TYPE));

    let node = Node::new(config());
    let both = json!([set("s1", "IPSET", "10.0.0.1"), set("all", "NESTEDIPSET", "s1")]);
    assert_eq!(node.sets("Add", both), Err(HResult::HCN_E_INVALID_POLICY), "not in one request");
    assert_eq!(node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1"), set("s2", "IPSET", "")])), Ok(()));
    for values in ["gone", "10.0.0.1", "s1,gone"] {
        assert_eq!(node.sets("Add", nested(values)), Err(HResult::HCN_E_INVALID_POLICY), "{values}");
    }
    assert_eq!(node.sets("Add", nested("s1,s2")), Ok(()));
    let deeper = json!([set("deeper", "NESTEDIPSET", "all")]);
    assert_eq!(node.sets("Add", deeper), Err(HResult::HCN_E_INVALID_POLICY), "one level only");
    assert_eq!(node.sets("Update", nested("s1,gone")), Err(HResult::HCN_E_INVALID_POLICY));
    let s1 = json!([set("s1", "IPSET", "10.0.0.1")]);
    assert_eq!(node.sets("Remove", s1.clone()), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES));
    let s1_and_all = json!([set("all", "NESTEDIPSET", "s1,s2"), s1[0]]);
    assert_eq!(node.sets("Remove", s1_and_all), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES), "in one request");
    assert_eq!(node.sets("Update", nested("s2")), Ok(()));
    assert_eq!(node.sets("Remove", s1), Ok(()), "it is in none any more");
    assert_eq!(node.sets("Remove", nested("s2")), Ok(()));
}

#[test]
fn invalid_sets_are_rejected() {
    let node = Node::new(config());
    let cases = [
        set("s1", "IPSET", "10.0.0.1,anybody"),
        set("s1", "IPSET", "10.0.0.1, 10.0.0.2"),
        set("10.0.0.1", "IPSET", ""),
        set("a,b", "IPSET", ""),
        set("", "IPSET", ""),
        set("s1", "STACK", ""),
    ];
    for case in cases {
        let refused = node.sets("Add", json!([case.clone()]));
        let codes = [HResult::HCN_E_INVALID_POLICY, HResult::HCN_E_INVALID_JSON];
        assert!(refused.is_err_and(|code| codes.contains(&code)), "{case}");
    }
    let most = Limits { set_members: Some(2), ..Limits::default() };
    let node = Node::new(Config { limits: most, ..config() });
    assert_eq!(node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1,10.0.0.2")])), Ok(()));
    let three = json!([set("s1", "IPSET", "10.0.0.1,10.0.0.2,10.0.0.3")]);
    assert_eq!(node.sets("Update", three), Err(HResult::HCN_E_INVALID_POLICY));
}

#[test]
fn acls_name_existing_sets_and_no_addresses_beside_them() {
    for strict in [true, false] {
        let node = Node::new(Config { strict, ..config() });
        node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1")])).unwrap();
        let names = |list: &str| json!([acl_with(1, json!({"RemoteAddresses": list}))]);
        for list in ["gone", "s1,gone", "Any"] {
            assert_eq!(node.acls("Update", names(list)), Err(HResult::HCN_E_INVALID_POLICY), "{list}");
        }
        let mixed = node.acls("Update", names("s1,10.0.0.9"));
        assert_eq!(mixed, if strict { Err(HResult::HCN_E_INVALID_POLICY) } else { Ok(()) });
        assert_eq!(node.acls("Update", names("s1")), Ok(()));
    }
}

/// A packet from 10.0.0.1 or another address to port 80 of the endpoint, or back.
fn packet(direction: PacketDirection, remote: &str) -> Packet {
    let (local, remote) = ([10, 244, 3, 7].into(), remote.parse().unwrap());
    let (local_port, remote_port) = if direction == PacketDirection::In { (80, 4000) } else { (4000, 80) };
    Packet { direction, protocol: 6, local, remote, local_port, remote_port }
}

fn judge(node: &Node, packet: &Packet) -> bool {
    node.hns.judge(node.endpoint, packet).unwrap() == Verdict::Allow
}

/// A set refers to the end that an address in its place would refer to, or to source and destination.
#[test]
fn a_set_has_the_configured_meaning() {
    use SetReading::*;
    // The set in each field of an ACL of each direction; whether it allows, by interpretation.
    let cases = [
        ("In", "RemoteAddresses", "peer", [(Endpoint, true), (Flow, false)]),
        ("In", "RemoteAddresses", "own", [(Endpoint, false), (Flow, true)]),
        ("In", "LocalAddresses", "own", [(Endpoint, true), (Flow, false)]),
        ("In", "LocalAddresses", "peer", [(Endpoint, false), (Flow, true)]),
        ("Out", "RemoteAddresses", "peer", [(Endpoint, true), (Flow, true)]),
        ("Out", "LocalAddresses", "own", [(Endpoint, true), (Flow, true)]),
        ("Out", "LocalAddresses", "peer", [(Endpoint, false), (Flow, false)]),
    ];
    for (direction, field, name, readings) in cases {
        for (set_reading, allowed) in readings {
            let node = Node::new(Config { set_reading, host_default: None, ..config() });
            let sets = json!([set("peer", "IPSET", "10.0.0.1"), set("own", "IPSET", "10.244.3.7")]);
            node.sets("Add", sets).unwrap();
            let allow = json!({"Action": "Allow", "Direction": direction, "Protocols": "6", field: name});
            node.acls("Add", json!([acl_with(1, allow)])).unwrap();
            let packet_direction = if direction == "In" { PacketDirection::In } else { PacketDirection::Out };
            let verdict = judge(&node, &packet(packet_direction, "10.0.0.1"));
            assert_eq!(verdict, allowed, "{direction} {field} {name} {set_reading:?}");
        }
    }
}

/// Addresses and ports beside a set keep their meaning in both interpretations.
#[test]
fn addresses_and_ports_beside_a_set_mean_the_endpoint_and_its_peer() {
    for (set_reading, peers) in
        [(SetReading::Endpoint, "RemoteAddresses"), (SetReading::Flow, "LocalAddresses")]
    {
        let own = if peers == "RemoteAddresses" { "LocalAddresses" } else { "RemoteAddresses" };
        let node = Node::new(Config { set_reading, host_default: None, strict: false, ..config() });
        node.sets("Add", json!([set("peers", "IPSET", "10.0.0.1")])).unwrap();
        // The other field has an address with its own meaning.
        let other_end = if own == "LocalAddresses" { "10.244.3.7" } else { "10.0.0.1" };
        let allow =
            json!({"Action": "Allow", "Protocols": "6", peers: "peers", own: other_end, "LocalPorts": "80"});
        node.acls("Add", json!([acl_with(1, allow)])).unwrap();
        let good = packet(PacketDirection::In, "10.0.0.1");
        assert!(judge(&node, &good), "{set_reading:?}");
        assert!(!judge(&node, &Packet { local_port: 81, ..good }), "{set_reading:?}");
        assert!(!judge(&node, &Packet { local_port: 81, remote_port: 80, ..good }), "{set_reading:?}");
        assert!(!judge(&node, &packet(PacketDirection::In, "10.0.0.2")), "{set_reading:?}");
    }
}

#[test]
fn several_sets_in_a_field() {
    let cases = [
        // Only in a, in both, in neither.
        (SeveralSets::Union, [true, true, false]),
        (SeveralSets::Intersection, [false, true, false]),
    ];
    for (several_sets, allowed) in cases {
        let config =
            Config { several_sets, set_reading: SetReading::Endpoint, host_default: None, ..config() };
        let node = Node::new(config);
        let sets = json!([set("a", "IPSET", "10.0.0.0/30"), set("b", "IPSET", "10.0.0.2/31,10.1.0.0/16")]);
        node.sets("Add", sets).unwrap();
        node.sets("Add", json!([set("a-or-b", "NESTEDIPSET", "a,b")])).unwrap();
        let verdicts = |list: &str| {
            let allow = json!({"Action": "Allow", "Protocols": "6", "RemoteAddresses": list});
            node.acls("Update", json!([acl_with(1, allow)])).unwrap();
            ["10.0.0.1", "10.0.0.2", "10.9.0.1"]
                .map(|remote| judge(&node, &packet(PacketDirection::In, remote)))
        };
        assert_eq!(verdicts("a,b"), allowed, "{several_sets:?}");
        assert_eq!(verdicts("a-or-b"), [true, true, false], "a set of sets holds who is in any");
    }
}

/// New values take effect at once, for every endpoint of the network, and reset no flow.
#[test]
fn a_changed_set_affects_its_acls() {
    let config = Config {
        set_reading: SetReading::Endpoint,
        on_rewrite: OnRewrite::ResetOnAnyChange,
        host_default: None,
        ..config()
    };
    let node = Node::new(config);
    let second = create(&node.hns, Kind::Endpoint, node.network, &endpoint("10.244.3.8")).unwrap();
    node.sets("Add", json!([set("s1", "IPSET", "10.0.0.1")])).unwrap();
    node.sets("Add", json!([set("all", "NESTEDIPSET", "s1")])).unwrap();
    let allow = |list: &str| {
        json!([acl_with(1, json!({"Action": "Allow", "Protocols": "6", "RemoteAddresses": list}))])
    };
    for (id, list) in [(node.endpoint, "s1"), (second, "all")] {
        policies(&node.hns, Kind::Endpoint, id, "Add", allow(list)).unwrap();
    }
    let old = packet(PacketDirection::In, "10.0.0.1");
    for id in [node.endpoint, second] {
        assert_eq!(node.hns.open(id, &old, None), Ok(Verdict::Allow));
    }
    node.sets("Update", json!([set("s1", "IPSET", "10.0.0.2")])).unwrap();
    for id in [node.endpoint, second] {
        assert_eq!(node.hns.judge(id, &packet(PacketDirection::In, "10.0.0.2")), Ok(Verdict::Allow));
        assert_eq!(node.hns.judge(id, &old), Ok(Verdict::Block));
        assert_eq!(node.hns.is_open(id, &old), Ok(true), "a set that changes is no write of ACLs");
    }
    policies(&node.hns, Kind::Endpoint, second, "Update", allow("all")).unwrap();
    assert_eq!(node.hns.is_open(second, &old), Ok(false), "a write is one");
    assert_eq!(node.hns.is_open(node.endpoint, &old), Ok(true));
}

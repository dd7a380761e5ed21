//! Why a block of another node has no route, as a table of cases.

use serde_json::{Value, json};
use tortie_api::net::IpVersion::{V4, V6};
use tortie_api::{Key, Kind};
use tortie_calc::{Calc, NoRoute};

const VXLAN: &str = "vxlanMode";
const IPIP: &str = "ipipMode";

fn node(name: &str, annotations: Value, os: &str) -> (Key, Value) {
    let metadata = json!({"name": name, "labels": {"kubernetes.io/os": os}, "annotations": annotations});
    (Key::global(Kind::Node, name), json!({"metadata": metadata}))
}

fn annotations(pairs: &[(&str, &str)]) -> Value {
    pairs.iter().map(|(name, value)| (format!("projectcalico.org/{name}"), json!(value))).collect()
}

/// The causes for the block of node `b`, of a cluster with these objects besides.
fn causes(calc: Calc, pool: (&str, &str), others: &[(Key, Value)], cidr: &str) -> Vec<NoRoute> {
    let mut calc = calc;
    let network = if cidr.contains(':') { "fd00::/64" } else { "10.1.0.0/16" };
    let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": network, (pool.0): pool.1}});
    calc.update(&Key::global(Kind::IpPool, "p"), Some(&pool));
    let block = json!({"cidr": cidr, "affinity": "host:b", "allocations": [null, null, null, null],
        "unallocated": [0, 1, 2, 3], "attributes": []});
    calc.update(&Key::global(Kind::IpamBlock, cidr), Some(&block));
    for (key, value) in others {
        calc.update(key, Some(value));
    }
    calc.flush();
    let found = calc.without_route();
    assert!(found.keys().all(|node| *node == "b"), "{found:?}");
    let all = found.get("b").into_iter().flatten();
    all.map(|(cause, nets)| {
        assert_eq!(nets.iter().map(ToString::to_string).collect::<Vec<_>>(), [cidr]);
        (*cause).clone()
    })
    .collect()
}

#[test]
fn each_cause_is_found() {
    let v4 = annotations(&[("IPv4Address", "192.0.2.1/24")]);
    let near = annotations(&[("IPv4Address", "192.0.2.2/24")]);
    let far = annotations(&[("IPv4Address", "198.51.100.2/24")]);
    let whole = annotations(&[("IPv4Address", "192.0.2.2/24"), ("IPv4VXLANTunnelAddr", "10.1.0.1")]);
    let foreign = annotations(&[("IPv4Address", "192.0.2.2/24"), ("IPv4VXLANTunnelAddr", "10.9.0.1")]);
    let a = || node("a", v4.clone(), "linux");
    let b = |annotations: &Value| vec![a(), node("b", annotations.clone(), "linux")];
    let felix = |name: &str| {
        let value = json!({"metadata": {"name": name}, "spec": {"ipipEnabled": false}});
        (Key::global(Kind::FelixConfiguration, name), value)
    };
    let with = |mut objects: Vec<(Key, Value)>, more: (Key, Value)| {
        objects.push(more);
        objects
    };
    let block = "10.1.0.0/30";
    let refused = "in no IPPool";
    let table = [
        ("a tunnel", false, (VXLAN, "Always"), b(&whole), block, None),
        ("no tunnel address", false, (VXLAN, "Always"), b(&near), block, Some(NoRoute::NoTunnelAddress(V4))),
        ("no address", false, (VXLAN, "Always"), b(&json!({})), block, Some(NoRoute::NoAddress(V4))),
        ("no IPv6 address", false, (VXLAN, "Always"), b(&whole), "fd00::/126", Some(NoRoute::NoAddress(V6))),
        ("no Node", false, (VXLAN, "Always"), vec![a()], block, None),
        (
            "a foreign tunnel",
            false,
            (VXLAN, "Always"),
            b(&foreign),
            block,
            Some(NoRoute::TunnelRefused(refused.into())),
        ),
        ("near", false, (VXLAN, "CrossSubnet"), b(&near), block, None),
        ("far, no tunnel", false, (VXLAN, "CrossSubnet"), b(&far), block, Some(NoRoute::NoTunnelAddress(V4))),
        ("routes of others", false, (VXLAN, "Never"), b(&far), block, None),
        ("a direct route", true, (VXLAN, "Never"), b(&near), block, None),
        ("another network", true, (VXLAN, "Never"), b(&far), block, Some(NoRoute::NotInNetwork)),
        ("direct, no address", true, (VXLAN, "Never"), b(&json!({})), block, Some(NoRoute::NoAddress(V4))),
        (
            "direct, no own address",
            true,
            (VXLAN, "Never"),
            vec![node("a", json!({}), "linux"), node("b", near.clone(), "linux")],
            block,
            Some(NoRoute::NoOwnAddress(V4)),
        ),
        ("IPIP", false, (IPIP, "Always"), b(&far), block, None),
        ("IPIP, no address", false, (IPIP, "Always"), b(&json!({})), block, Some(NoRoute::NoAddress(V4))),
        (
            "IPIP to Windows",
            false,
            (IPIP, "Always"),
            vec![a(), node("b", far.clone(), "windows")],
            block,
            Some(NoRoute::IpipToWindows),
        ),
        (
            "none here",
            false,
            (IPIP, "Always"),
            with(b(&far), felix("node.a")),
            block,
            Some(NoRoute::IpipDisabled("a".into())),
        ),
        (
            "none there",
            false,
            (IPIP, "Always"),
            with(b(&far), felix("node.b")),
            block,
            Some(NoRoute::IpipDisabled("b".into())),
        ),
        ("none elsewhere", false, (IPIP, "Always"), with(b(&far), felix("node.c")), block, None),
    ];
    for (case, direct, pool, objects, cidr, expected) in table {
        let calc = Calc::new("a");
        let calc = if direct { calc.with_direct_routes() } else { calc };
        let found = causes(calc, pool, &objects, cidr);
        match (&found[..], &expected) {
            ([NoRoute::TunnelRefused(why)], Some(NoRoute::TunnelRefused(part))) => {
                assert!(why.contains(part), "{case}: {why}");
            }
            _ => assert_eq!(found, Vec::from_iter(expected), "{case}"),
        }
    }
}

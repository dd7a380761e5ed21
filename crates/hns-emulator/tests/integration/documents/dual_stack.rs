//! IPv6 beside IPv4, as documents: HNS has it from 11.10 on, and not in overlay networks.

use std::net::Ipv4Addr;

use serde_json::{Value, json};
use tortie_hcn::{Call, Guid, HResult, Hcn, Kind, Version};
use tortie_hns_emulator::{Config, Emulator, Packet, PacketDirection, Verdict};

use crate::documents::support::*;

const NODE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
const LAST_WITHOUT: Version = Version::new(11, 9);
const FIRST: Version = Version::new(11, 10);

fn subnets() -> Value {
    json!([{"IpAddressPrefix": "10.1.0.0/24", "Routes": [{"NextHop": "10.1.0.1", "DestinationPrefix": "0.0.0.0/0"}]},
        {"IpAddressPrefix": "fd00:1::/64", "Routes": [{"NextHop": "fd00:1::1", "DestinationPrefix": "::/0"}]}])
}

fn bridge() -> Value {
    json!({"Name": "b", "Type": "L2Bridge", "Ipams": [{"Type": "Static", "Subnets": subnets()}]})
}

fn read(hns: &Emulator, kind: Kind, id: Guid) -> Value {
    serde_json::from_str(&hns.call(&Call::Query { kind, id, query: String::new() }).unwrap()).unwrap()
}

fn addresses(of: &[&str]) -> Value {
    json!(of.iter().map(|address| json!({ "IpAddress": address })).collect::<Vec<_>>())
}

/// A strict and a lenient HNS with the network.
fn both() -> [(Emulator, Guid); 2] {
    [Config::new(Config::NEWEST, NODE), Config::as_hns(Config::NEWEST, NODE)].map(|config| {
        let hns = Emulator::new(config);
        let network = create(&hns, Kind::Network, Guid::ZERO, &bridge()).unwrap();
        (hns, network)
    })
}

#[test]
fn networks_have_ipv6_from_a_version_on_and_not_in_an_overlay() {
    for (version, has) in
        [(Config::SERVER_2019, false), (LAST_WITHOUT, false), (FIRST, true), (Config::NEWEST, true)]
    {
        for config in [Config::new(version, NODE), Config::as_hns(version, NODE)] {
            let hns = Emulator::new(config);
            let made = create(&hns, Kind::Network, Guid::ZERO, &bridge());
            assert_eq!(made.is_ok(), has, "{version}: {made:?}");
            match made {
                Ok(id) => {
                    let kept = read(&hns, Kind::Network, id)["Ipams"][0]["Subnets"].clone();
                    assert_eq!(kept[1]["IpAddressPrefix"], "fd00:1::/64");
                    assert_eq!(kept[1]["Routes"], subnets()[1]["Routes"]);
                }
                Err(code) => assert_eq!(code, HResult::HCN_E_INVALID_PREFIX),
            }
        }
    }
    let hns = Emulator::new(Config::new(Config::NEWEST, NODE));
    let mut document = overlay("o");
    let vsid = document["Ipams"][0]["Subnets"][0]["Policies"].clone();
    let mut six = subnets()[1].clone();
    six["Policies"] = vsid;
    document["Ipams"][0]["Subnets"].as_array_mut().unwrap().push(six);
    let refused = create(&hns, Kind::Network, Guid::ZERO, &document);
    assert_eq!(refused, Err(HResult::HCN_E_INVALID_SUBNET));
}

#[test]
fn subnets_of_ipv6_are_checked_like_the_others() {
    let [(hns, network), _] = both();
    let with_six = |at: &str, value: Value| {
        let document = with(bridge(), at, Some(value));
        create(&hns, Kind::Network, Guid::ZERO, &with(document, "/Name", Some(json!("c"))))
    };
    let six = |member: &str| format!("/Ipams/0/Subnets/1/{member}");
    for (at, value, code) in [
        (six("IpAddressPrefix"), json!("fd00:1::5/64"), HResult::HCN_E_INVALID_PREFIX),
        (six("IpAddressPrefix"), json!("fd00:1::/129"), HResult::HCN_E_INVALID_PREFIX),
        (six("Routes/0/NextHop"), json!("fd00:2::1"), HResult::HCN_E_INVALID_IP),
        (six("Routes/0/NextHop"), json!("10.1.0.1"), HResult::HCN_E_INVALID_IP),
        (six("Routes/0/DestinationPrefix"), json!("0.0.0.0/0"), HResult::HCN_E_INVALID_NETWORK),
        (six("Routes"), json!([]), HResult::HCN_E_INVALID_NETWORK),
    ] {
        assert_eq!(with_six(&at, value.clone()), Err(code), "{at} {value}");
    }
    let of_link = with_six(&six("Routes/0/NextHop"), json!("fe80::1234:5678:9abc"));
    assert!(of_link.is_ok(), "Azure's gateway has an address of the link");
    let change = |request: &str, subnet: &Value| {
        let settings =
            json!({"ResourceType": "Subnet", "RequestType": request, "Settings": {"Subnets": [subnet]}});
        modify(&hns, Kind::Network, network, &settings)
    };
    let inside = json!({"IpAddressPrefix": "fd00:1::/80", "Routes": [{"NextHop": "fd00:1::1", "DestinationPrefix": "::/0"}]});
    assert_eq!(change("Add", &inside), Err(HResult::HCN_E_INVALID_SUBNET));
    let pod = json!({"IpConfigurations": addresses(&["10.1.0.9", "fd00:1::9"])});
    create(&hns, Kind::Endpoint, network, &pod).unwrap();
    let kept = read(&hns, Kind::Network, network)["Ipams"][0]["Subnets"][1].clone();
    assert_eq!(change("Remove", &kept), Err(HResult::HCN_E_ENTITY_HAS_REFERENCES));
}

#[test]
fn endpoints_keep_an_address_of_each_family() {
    for (hns, network) in both() {
        let document = |of: &[&str]| {
            json!({"IpConfigurations": addresses(of), "MacAddress": "00-15-5D-00-00-09",
            "Routes": [{"NextHop": "10.1.0.1", "DestinationPrefix": "0.0.0.0/0"}, {"NextHop": "fd00:1::1", "DestinationPrefix": "::/0"}]})
        };
        let made = |of: &[&str]| create(&hns, Kind::Endpoint, network, &document(of));
        let id = made(&["10.1.0.9", "fd00:1::9"]).unwrap();
        let kept = read(&hns, Kind::Endpoint, id);
        assert_eq!(
            kept["IpConfigurations"],
            json!([{"IpAddress": "10.1.0.9", "PrefixLength": 24},
            {"IpAddress": "fd00:1::9", "PrefixLength": 64}])
        );
        assert_eq!(kept["Routes"], document(&[])["Routes"]);
        for (of, code) in [
            (&["10.1.0.10", "fd00:1::9"][..], HResult::HCN_E_ADDR_INVALID_OR_RESERVED),
            // The same address in another form.
            (&["fd00:1:0::0009"], HResult::HCN_E_ADDR_INVALID_OR_RESERVED),
            (&["fd00:1::1"], HResult::HCN_E_ADDR_INVALID_OR_RESERVED),
            (&["fd00:1::"], HResult::HCN_E_ADDR_INVALID_OR_RESERVED),
            (&["fd00:2::9"], HResult::HCN_E_INVALID_IP),
            (&["fd00:1::10", "fd00:1::11"], HResult::HCN_E_INVALID_IP),
            (&["fd00:1::zz"], HResult::HCN_E_INVALID_IP),
        ] {
            assert_eq!(made(of), Err(code), "{of:?}");
        }
        made(&["fd00:1::10"]).unwrap();
        // What HNS chooses is IPv4.
        let chosen = create(&hns, Kind::Endpoint, network, &json!({})).unwrap();
        assert_eq!(
            read(&hns, Kind::Endpoint, chosen)["IpConfigurations"],
            json!([{"IpAddress": "10.1.0.2", "PrefixLength": 24}])
        );
    }
    let old = Emulator::new(Config::as_hns(LAST_WITHOUT, NODE));
    let four = json!({"Name": "b", "Type": "L2Bridge", "Ipams": [{"Subnets": [subnets()[0]]}]});
    let network = create(&old, Kind::Network, Guid::ZERO, &four).unwrap();
    let refused =
        create(&old, Kind::Endpoint, network, &json!({"IpConfigurations": addresses(&["fd00:1::9"])}));
    assert_eq!(refused, Err(HResult::HCN_E_INVALID_IP));
}

/// kube-proxy has a load balancer for each family, with the flag 2 for IPv6, also for NodePorts, which have no address.
#[test]
fn load_balancers_have_addresses_of_one_family() {
    let [(strict, of_strict), (lenient, of_lenient)] = both();
    let balancer = |endpoint: Guid, vips: &[&str], flags: u32, port: u16| {
        json!({"HostComputeEndpoints": [endpoint], "FrontendVIPs": vips, "Flags": flags,
            "PortMappings": [{"Protocol": 6, "InternalPort": 80, "ExternalPort": port}]})
    };
    let pod = |hns, network| {
        create(
            hns,
            Kind::Endpoint,
            network,
            &json!({"IpConfigurations": addresses(&["10.1.0.9", "fd00:1::9"])}),
        )
        .unwrap()
    };
    let (pod_of_strict, pod_of_lenient) = (pod(&strict, of_strict), pod(&lenient, of_lenient));
    let cases = [
        (&["fd00:96::1"][..], 2, Ok(()), Ok(())),
        (
            &["fd00:96:0::1"],
            2,
            Err(HResult::HCN_E_PORT_ALREADY_EXISTS),
            Err(HResult::HCN_E_PORT_ALREADY_EXISTS),
        ),
        (&[], 0, Ok(()), Ok(())),
        (&[], 2, Ok(()), Ok(())),
        (&[], 2, Err(HResult::HCN_E_PORT_ALREADY_EXISTS), Err(HResult::HCN_E_PORT_ALREADY_EXISTS)),
        (&["fd00:96::2"], 0, Err(HResult::HCN_E_INVALID_IP), Ok(())),
        (&["10.96.0.3", "fd00:96::3"], 2, Err(HResult::HCN_E_INVALID_IP), Ok(())),
        (&["fd00:96::zz"], 2, Err(HResult::HCN_E_INVALID_IP), Err(HResult::HCN_E_INVALID_IP)),
    ];
    for (vips, flags, by_strict, by_lenient) in cases {
        for (hns, endpoint, expected) in
            [(&strict, pod_of_strict, by_strict), (&lenient, pod_of_lenient, by_lenient)]
        {
            let document = balancer(endpoint, vips, flags, 8080);
            let made = create(hns, Kind::LoadBalancer, Guid::ZERO, &document);
            assert_eq!(made.map(drop), expected, "{vips:?} {flags}");
            if let Ok(id) = made {
                let kept = read(hns, Kind::LoadBalancer, id);
                assert_eq!(kept.get("FrontendVIPs").cloned().unwrap_or(json!([])), json!(vips));
                assert_eq!(kept.get("Flags").cloned().unwrap_or(json!(0)), flags);
            }
        }
    }
    let old = Emulator::new(Config::as_hns(LAST_WITHOUT, NODE));
    for (vips, flags, code) in
        [(&["fd00:96::1"][..], 0, HResult::HCN_E_INVALID_IP), (&[], 2, HResult::HCN_E_REQUEST_UNSUPPORTED)]
    {
        let document = json!({"FrontendVIPs": vips, "Flags": flags,
            "PortMappings": [{"Protocol": 6, "InternalPort": 80, "ExternalPort": 80}]});
        assert_eq!(create(&old, Kind::LoadBalancer, Guid::ZERO, &document), Err(code));
    }
}

/// ACLs, sets and translations with addresses of IPv6 are kept. Each matches packets of its family only.
#[test]
fn policies_of_ipv6_are_kept_and_match_packets_of_their_family() {
    for ((hns, network), strict) in both().into_iter().zip([true, false]) {
        let sets = json!([set("six", "IPSET", "fd00:9::/64"), set("both", "IPSET", "fd00:9::1,10.9.0.1")]);
        policies(&hns, Kind::Network, network, "Add", sets).unwrap();
        let allow = |priority: u16, remote: &str| {
            acl_with(priority, json!({"Action": "Allow", "RemoteAddresses": remote}))
        };
        let acls = json!([allow(1, "fd00:9::/64,fd00:8::1"), allow(2, "six"), allow(3, "both"),
            {"Type": "OutBoundNAT", "Settings": {"Exceptions": ["fd00::/16"], "Flags": 2}},
            {"Type": "SDNRoute", "Settings": {"DestinationPrefix": "fd00:96::/112", "NeedEncap": true}}]);
        let document = json!({"IpConfigurations": addresses(&["10.1.0.9", "fd00:1::9"]), "Policies": acls});
        let id = create(&hns, Kind::Endpoint, network, &document).unwrap();
        let kept = read(&hns, Kind::Endpoint, id)["Policies"].clone();
        assert_eq!(kept[0]["Settings"]["RemoteAddresses"], "fd00:9::/64,fd00:8::1");
        assert_eq!((kept.as_array().unwrap().len(), &kept[3]), (5, &acls[3]));
        let open = json!([acl_with(0, json!({"Action": "Allow", "RuleType": "Host", "Protocols": ""}))]);
        policies(&hns, Kind::Endpoint, id, "Add", open).unwrap();
        let lets_in = |remote: &str| {
            let local = if remote.contains(':') { "fd00:1::9" } else { "10.1.0.9" };
            let packet = Packet {
                direction: PacketDirection::In,
                protocol: 6,
                local: local.parse().unwrap(),
                remote: remote.parse().unwrap(),
                local_port: 80,
                remote_port: 4000,
            };
            hns.judge(id, &packet).unwrap() == Verdict::Allow
        };
        assert!(!lets_in("10.9.0.2"), "addresses of IPv6 are no wildcard");
        assert!(lets_in("10.9.0.1"), "a set has members of both families");
        for (remote, passes) in
            [("fd00:9::7", true), ("fd00:9:1::7", false), ("fd00:8::1", true), ("fd00:8::2", false)]
        {
            assert_eq!(lets_in(remote), passes, "{remote}");
        }
        let mixed =
            create(&hns, Kind::Endpoint, network, &json!({"Policies": [allow(1, "fd00:9::1,10.9.0.1")]}));
        assert_eq!(mixed.is_err(), strict, "{mixed:?}");
        let nat = json!({"Policies": [{"Type": "OutBoundNAT", "Settings": {"Exceptions": ["fd00::/16"]}}]});
        assert_eq!(create(&hns, Kind::Endpoint, network, &nat).is_err(), strict);
    }
    let old = Emulator::new(Config::as_hns(LAST_WITHOUT, NODE));
    let four = json!({"Name": "b", "Type": "L2Bridge", "Ipams": [{"Subnets": [subnets()[0]]}]});
    let network = create(&old, Kind::Network, Guid::ZERO, &four).unwrap();
    let acl = json!({"Policies": [acl_with(1, json!({"RemoteAddresses": "fd00:9::1"}))]});
    assert_eq!(create(&old, Kind::Endpoint, network, &acl), Err(HResult::HCN_E_INVALID_POLICY));
}

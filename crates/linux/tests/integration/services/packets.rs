//! Single packets: balance, and the listing of `nft`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::Command;

use tortie_api::net::{IpVersion, Protocol};
use tortie_kernel::namespace::NetNs;
use tortie_services::*;

use super::node::{Begin, Fate, Node};
use super::setting::{USUAL, add_port, at, everything, frontend, open, pods, port};

/// More than the largest deviation of a thousand series of this length.
const MOST: f64 = 25.0;

#[test]
fn each_backend_gets_its_share() {
    let backends = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"];
    let mut node = Node::new();
    let mut table = node.namespace.run(|| open(USUAL)).unwrap();
    let mut services = NodeServices::default();
    for count in 1..=backends.len() {
        let id = port(&count.to_string(), Protocol::UDP);
        add_port(&mut services, &id, &backends[..count]);
        let key = at("10.96.0.1", Protocol::UDP, count as u16);
        services.frontends.insert(key, frontend(&id, FrontendKind::ClusterIp, TrafficPolicy::Cluster));
    }
    node.namespace.run(|| table.apply(&everything(&services), &pods())).unwrap().unwrap();
    for count in 1..=backends.len() {
        let begin = Begin {
            sender: Sender::Pod,
            source: "10.0.0.3".parse().unwrap(),
            destination: "10.96.0.1".parse().unwrap(),
            protocol: Protocol::UDP,
            port: count as u16,
        };
        let mut got: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for fate in (0..3).flat_map(|_| node.fates(&[begin; 200])) {
            let Some(Fate::Arrived { destination, .. }) = fate else { panic!("{count}: {fate:?}") };
            *got.entry(destination).or_default() += 1;
        }
        let expected = 600.0 / count as f64;
        let deviation: f64 = got.values().map(|got| (*got as f64 - expected).powi(2) / expected).sum();
        assert!(got.len() == count && deviation < MOST, "{count} backends: {got:?}");
    }
}

/// Services of all kinds and both families.
fn many() -> NodeServices {
    let mut services = NodeServices::default();
    let v4 = ["10.0.0.1", "10.0.0.4"];
    for (name, protocol) in [("a", Protocol::TCP), ("b", Protocol::UDP), ("c", Protocol::SCTP)] {
        let id = port(name, protocol);
        add_port(&mut services, &id, &v4);
        let mut put = |address: &str, kind, policy, ranges: Option<&[&str]>| {
            let ranges = ranges.map(|all| all.iter().map(|net| net.parse().unwrap()).collect());
            let frontend = Frontend { source_ranges: ranges, ..frontend(&id, kind, policy) };
            services.frontends.insert(at(address, protocol, 80), frontend);
        };
        put("10.96.0.1", FrontendKind::ClusterIp, TrafficPolicy::Cluster, None);
        let ranges = Some(&["203.0.113.0/25", "10.0.0.0/8"][..]);
        put("198.51.100.7", FrontendKind::LoadBalancer, TrafficPolicy::Local, ranges);
        put("198.51.100.8", FrontendKind::ExternalIp, TrafficPolicy::Cluster, None);
        for (number, policy) in [(30_080, TrafficPolicy::Cluster), (30_081, TrafficPolicy::Local)] {
            let address = FrontendAddress::NodePort(IpVersion::V4);
            let key = FrontendKey { address, protocol, port: number };
            services.frontends.insert(key, frontend(&id, FrontendKind::NodePort, policy));
        }
    }
    let id = port("six", Protocol::TCP);
    add_port(&mut services, &id, &["fd00::1", "fd00::4", "fd00::5"]);
    let ranged = Frontend {
        source_ranges: Some(vec!["2001:db8:f::/64".parse().unwrap()]),
        ..frontend(&id, FrontendKind::LoadBalancer, TrafficPolicy::Local)
    };
    services.frontends.insert(at("2001:db8:e::7", Protocol::TCP, 80), ranged);
    let address = FrontendAddress::NodePort(IpVersion::V6);
    let key = FrontendKey { address, protocol: Protocol::TCP, port: 30_080 };
    services.frontends.insert(key, frontend(&id, FrontendKind::NodePort, TrafficPolicy::Local));
    // Both families, and both pools, have session affinity.
    for name in ["a", "b", "six"] {
        let with_affinity = services.ports.iter_mut().find(|(id, _)| id.port == name);
        with_affinity.unwrap().1.affinity = Some(10_800);
    }
    let empty = port("empty", Protocol::TCP);
    add_port(&mut services, &empty, &[]);
    services.frontends.insert(
        at("fd96::1", Protocol::TCP, 81),
        frontend(&empty, FrontendKind::ClusterIp, TrafficPolicy::Cluster),
    );
    services.cluster_ips = ["10.96.0.1", "fd96::1"].map(|address| address.parse().unwrap()).into();
    services.service_cidrs = ["10.96.0.0/16", "fd96::/112"].map(|net| net.parse().unwrap()).into();
    services.node_ports = [
        (IpVersion::V4, NodePortPlace::LocalIn(vec!["192.0.2.0/24".parse().unwrap()])),
        (IpVersion::V6, NodePortPlace::Primary(Some("2001:db8::1".parse().unwrap()))),
    ]
    .into();
    services
}

/// Operators can look at the table with Debian 12's `nft`, save it, and load what they have saved.
#[test]
fn nft_loads_its_own_listing_of_the_table() {
    for place in [None, Some(NodePortPlace::AllLocal)] {
        let mut services = many();
        services.node_ports.extend(place.map(|place| (IpVersion::V6, place)));
        let (written, read) = (NetNs::create().unwrap(), NetNs::create().unwrap());
        let put = || {
            let mut table = open(USUAL);
            table.apply(&everything(&services), &pods()).unwrap();
            table.desired()
        };
        let desired = written.run(put).unwrap();
        assert_eq!(written.run(super::random::list).unwrap(), desired);
        let listing = |namespace: &NetNs| {
            let mut command = Command::new("nft");
            let output = namespace.enter_on_spawn(command.args(["list", "ruleset"])).unwrap().output();
            let output = output.expect("this test needs the program nft: apt-get install nftables");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let text = listing(&written);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ruleset");
        std::fs::write(&file, &text).unwrap();
        let mut command = Command::new("nft");
        let output = read.enter_on_spawn(command.arg("-f").arg(&file)).unwrap().output().unwrap();
        assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(listing(&read), text);
        // The elements have the same bytes. Rules may be written in other ways.
        let sets = |mut table: tortie_kernel::nftables::Table| {
            table
                .sets
                .iter_mut()
                .map(|(name, set)| (name.clone(), std::mem::take(&mut set.elements)))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(sets(read.run(super::random::list).unwrap()), sets(desired));
    }
}

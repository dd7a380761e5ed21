//! The configuration of a speaker from Calico's resources, as tables of cases.

mod selections;
mod services;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_api::calico::{BgpConfiguration, BgpFilter, BgpPeer, IpPool, SecretKey};
use tortie_api::kubernetes::Node;
use tortie_bgp::calico::{
    Derived, Forwarding, NoSecret, NotForwarded, PodAddress, Resources, derive, forwarding,
};
use tortie_bgp::codec::{Attributes, Community, Family, LargeCommunity};
use tortie_bgp::filter::{Candidate, HIGHEST_PREFERENCE, Policy, Verdict};
use tortie_bgp::rib::{Chosen, NextHopMode, PeerId, RouteChange, Source};
use tortie_bgp::speaker::{Config, Password, PeerConfig};

/// Resources as text.
#[derive(Default, Clone)]
struct Cluster {
    nodes: Vec<Value>,
    configurations: Vec<Value>,
    peers: Vec<Value>,
    filters: Vec<Value>,
    pools: Vec<Value>,
    blocks: Vec<IpNet>,
    stray_blocks: Vec<(IpNet, String)>,
    pods: Vec<PodAddress>,
    service_addresses: BTreeSet<IpNet>,
}

/// A node with number, labels and more annotations.
fn node(number: u8, labels: Value, more: Value) -> Value {
    let mut annotations = json!({"projectcalico.org/IPv4Address": format!("10.0.0.{number}/24")});
    annotations.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"metadata": {"name": format!("n{number}"), "labels": labels, "annotations": annotations}})
}

fn plain(number: u8) -> Value {
    node(number, json!({}), json!({}))
}

fn reflector(number: u8, cluster: &str) -> Value {
    node(number, json!({"rr": "yes"}), json!({"projectcalico.org/RouteReflectorClusterID": cluster}))
}

fn named(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": spec})
}

fn all<T: serde::de::DeserializeOwned>(values: &[Value]) -> Vec<T> {
    values.iter().map(|value| serde_json::from_value(value.clone()).unwrap()).collect()
}

fn derived(cluster: &Cluster, name: &str) -> Derived {
    let secret = |SecretKey { name, key, .. }: &SecretKey| match (name.as_str(), key.as_str()) {
        ("bgp", "password") => Ok(b"secret".to_vec()),
        ("bgp", "long") => Ok([b'x'; 81].to_vec()),
        ("bgp", "line") => Ok(b"secret\n".to_vec()),
        ("bgp", "empty") => Ok(Vec::new()),
        ("bgp", "binary") => Ok(vec![0xff]),
        ("bgp", "forbidden") => Err(NoSecret::Unreadable("forbidden".to_owned())),
        (name, key) => Err(NoSecret::Absent(format!("the Secret {name} has no key {key}"))),
    };
    derive(
        name,
        &Resources {
            nodes: &all::<Node>(&cluster.nodes),
            configurations: &all::<BgpConfiguration>(&cluster.configurations),
            peers: &all::<BgpPeer>(&cluster.peers),
            filters: &all::<BgpFilter>(&cluster.filters),
            pools: &all::<IpPool>(&cluster.pools),
            blocks: &cluster.blocks,
            stray_blocks: &cluster.stray_blocks,
            pods: &cluster.pods,
            service_addresses: &cluster.service_addresses,
            secret: &secret,
        },
    )
}

fn config(cluster: &Cluster, name: &str) -> Config {
    derived(cluster, name).config.unwrap()
}

/// Peers in a short form: address, number, `passive`, `client`.
fn sessions(cluster: &Cluster, name: &str) -> Vec<String> {
    let session = |(address, peer): (&std::net::SocketAddr, &PeerConfig)| {
        let mut text = format!("{address} {}", peer.session.peer_as);
        for (word, holds) in [("passive", peer.session.passive), ("client", peer.rules.client)] {
            text += &if holds { format!(" {word}") } else { String::new() };
        }
        text
    };
    config(cluster, name).peers.iter().map(session).collect()
}

fn only(cluster: &Cluster, name: &str) -> PeerConfig {
    let peers = config(cluster, name).peers;
    assert_eq!(peers.len(), 1, "{peers:?}");
    peers.into_values().next().unwrap()
}

fn no_mesh(mut more: Value) -> Value {
    more.as_object_mut().unwrap().insert("nodeToNodeMeshEnabled".into(), json!(false));
    named("default", more)
}

#[test]
fn nodes_form_a_mesh_of_which_one_end_connects() {
    let mut cluster = Cluster { nodes: vec![plain(1), plain(9), plain(10)], ..Cluster::default() };
    // Addresses are compared as texts: "10.0.0.9" is the greatest.
    for (name, expected) in [
        ("n1", ["10.0.0.9:179 64512 passive", "10.0.0.10:179 64512 passive"]),
        ("n9", ["10.0.0.1:179 64512", "10.0.0.10:179 64512"]),
        ("n10", ["10.0.0.1:179 64512", "10.0.0.9:179 64512 passive"]),
    ] {
        assert_eq!(sessions(&cluster, name), expected, "{name}");
    }
    let first = config(&cluster, "n1");
    assert_eq!(first.identifier, Ipv4Addr::new(10, 0, 0, 1));
    assert_eq!(first.listen, ["0.0.0.0:179".parse().unwrap(), "[::]:179".parse().unwrap()]);
    let peer = first.peers.values().next().unwrap();
    assert_eq!(peer.session.families.iter().collect::<Vec<_>>(), [Family::Ipv4]);
    assert_eq!(peer.transport.source, Some("10.0.0.1".parse().unwrap()));

    // Numbers of their own, a port, one address to listen on, a password and a time to restart.
    cluster.nodes[1] = node(9, json!({}), json!({"projectcalico.org/ASNumber": "1.10"}));
    cluster.configurations = vec![
        named(
            "default",
            json!({"asNumber": 64600, "nodeMeshPassword": {"secretKeyRef": {"name": "bgp", "key": "password"}}, "nodeMeshMaxRestartTime": "2m30s", "bindMode": "NodeIP"}),
        ),
        named("node.n10", json!({"listenPort": 1790})),
        named("node.n9", json!({"listenPort": 0})),
    ];
    assert_eq!(sessions(&cluster, "n1"), ["10.0.0.9:179 65546 passive", "10.0.0.10:1790 64600 passive"]);
    let ten = config(&cluster, "n10");
    assert_eq!(ten.listen, ["10.0.0.10:1790".parse().unwrap()]);
    for peer in ten.peers.values() {
        assert_eq!(peer.transport.password, Some(Password("secret".to_owned())));
        assert_eq!(peer.session.restart_time, Some(150));
    }
    assert!(!format!("{ten:?}").contains("secret"));

    // Both families, where both ends have addresses.
    let both = |number: u8| {
        node(number, json!({}), json!({"projectcalico.org/IPv6Address": format!("fd00::{number}/64")}))
    };
    let cluster = Cluster { nodes: vec![both(1), both(2), plain(3)], ..Cluster::default() };
    assert_eq!(
        sessions(&cluster, "n1"),
        ["10.0.0.2:179 64512 passive", "10.0.0.3:179 64512 passive", "[fd00::2]:179 64512 passive"]
    );
    let none = Cluster { nodes: vec![json!({"metadata": {"name": "n1"}}), plain(2)], ..Cluster::default() };
    assert!(derived(&none, "n1").config.is_none());
    assert_eq!(sessions(&none, "n2"), Vec::<String>::new());
}

#[test]
fn reflectors_replace_the_mesh() {
    let mut cluster = Cluster {
        nodes: vec![
            reflector(1, "244.0.0.1"),
            reflector(2, "244.0.0.1"),
            reflector(3, "244.0.0.2"),
            plain(4),
            plain(5),
        ],
        peers: vec![named("rr", json!({"nodeSelector": "all()", "peerSelector": "has(rr)"}))],
        ..Cluster::default()
    };
    // Reflectors leave the mesh, the others keep it.
    assert_eq!(
        sessions(&cluster, "n4"),
        ["10.0.0.1:179 64512", "10.0.0.2:179 64512", "10.0.0.3:179 64512", "10.0.0.5:179 64512 passive"]
    );
    // A reflector of the same cluster is no client, one of another is; ordinary nodes connect by the other direction.
    let expected = [
        "10.0.0.2:179 64512",
        "10.0.0.3:179 64512 client",
        "10.0.0.4:179 64512 client",
        "10.0.0.5:179 64512 client",
    ];
    assert_eq!(sessions(&cluster, "n1"), expected);
    assert_eq!(
        config(&cluster, "n1").peers.values().next().unwrap().rules.cluster_id,
        Ipv4Addr::new(244, 0, 0, 1)
    );
    cluster.configurations = vec![no_mesh(json!({}))];
    assert_eq!(sessions(&cluster, "n4"), ["10.0.0.1:179 64512", "10.0.0.2:179 64512", "10.0.0.3:179 64512"]);
    // Without the other direction, only the selected nodes have the session.
    cluster.peers =
        vec![named("rr", json!({"node": "n4", "peerSelector": "has(rr)", "reversePeering": "Manual"}))];
    assert_eq!(sessions(&cluster, "n4").len(), 3);
    assert_eq!(sessions(&cluster, "n1"), Vec::<String>::new());
    cluster.peers = vec![named("rr", json!({"node": "n4", "peerSelector": "has(rr)"}))];
    assert_eq!(sessions(&cluster, "n1"), ["10.0.0.4:179 64512 client"]);
}

#[test]
fn peers_are_selected_in_every_way() {
    let labelled = |number: u8| node(number, json!({"rack": "a"}), json!({}));
    let cluster = |spec: Value| Cluster {
        nodes: vec![labelled(1), plain(2)],
        configurations: vec![no_mesh(json!({}))],
        peers: vec![named("p", spec)],
        ..Cluster::default()
    };
    // The specification, the sessions of the labelled node, and those of the other.
    let cases = [
        (
            json!({"peerIP": "192.0.2.1", "asNumber": 65001}),
            vec!["192.0.2.1:179 65001"],
            vec!["192.0.2.1:179 65001"],
        ),
        (
            json!({"node": "n1", "peerIP": "192.0.2.1", "asNumber": "65001"}),
            vec!["192.0.2.1:179 65001"],
            vec![],
        ),
        (
            json!({"nodeSelector": "rack == 'a'", "peerIP": "192.0.2.1:1179", "asNumber": 65001}),
            vec!["192.0.2.1:1179 65001"],
            vec![],
        ),
        (json!({"nodeSelector": "rack == 'b'", "peerIP": "192.0.2.1", "asNumber": 65001}), vec![], vec![]),
        // A node by its address: the other end follows.
        (json!({"node": "n1", "peerIP": "10.0.0.2"}), vec!["10.0.0.2:179 64512"], vec!["10.0.0.1:179 64512"]),
        (json!({"node": "n1", "peerIP": "10.0.0.2", "asNumber": 65001}), vec!["10.0.0.2:179 65001"], vec![]),
        // No IPv6 address, no asNumber, nobody, workloads.
        (json!({"peerIP": "2001:db8::1", "asNumber": 65001}), vec![], vec![]),
        (json!({"peerIP": "192.0.2.1"}), vec![], vec![]),
        (json!({"peerSelector": "rack == 'c'"}), vec![], vec![]),
        (json!({"localWorkloadSelector": "all()", "asNumber": 65001}), vec![], vec![]),
    ];
    for (spec, one, two) in cases {
        let cluster = cluster(spec.clone());
        assert_eq!(sessions(&cluster, "n1"), one, "{spec}");
        assert_eq!(sessions(&cluster, "n2"), two, "{spec}");
    }
    for (spec, problem) in [
        (json!({"peerIP": "2001:db8::1", "asNumber": 65001}), "has no IPv6 address"),
        (json!({"peerIP": "192.0.2.1"}), "has no asNumber"),
        (
            json!({"localWorkloadSelector": "all()", "asNumber": 65001}),
            "localWorkloadSelector is not supported",
        ),
        (
            json!({"peerIP": "192.0.2.1", "asNumber": 65001, "reachableBy": "10.0.0.254"}),
            "reachableBy is not supported",
        ),
        (json!({"peerIP": "192.0.2.1", "asNumber": 65001, "keepaliveTime": "often"}), "cannot be read"),
        (
            json!({"peerIP": "192.0.2.1", "asNumber": 65001, "keepaliveTime": "10000000000000000000s10000000000000000000s"}),
            "cannot be read",
        ),
    ] {
        let problems = derived(&cluster(spec.clone()), "n1").problems;
        assert!(problems.iter().any(|found| found.to_string().contains(problem)), "{spec}: {problems:?}");
    }
    // For all nodes before for one, and explicit ones before the mesh.
    let mut twice = cluster(json!({"node": "n1", "peerIP": "10.0.0.2", "nextHopMode": "Self"}));
    twice.configurations.clear();
    twice.peers.push(named("z", json!({"peerIP": "10.0.0.2", "nextHopMode": "Keep"})));
    assert_eq!(only(&twice, "n1").rules.next_hop, NextHopMode::Keep);
}

/// A peering with an address of a node is one of a family: the other end has none of the other family, and the mesh keeps that.
#[test]
fn a_peering_by_an_address_leaves_the_other_family_to_the_mesh() {
    let both = |number: u8| {
        node(number, json!({}), json!({"projectcalico.org/IPv6Address": format!("fd00::{number}/64")}))
    };
    for (address, explicit) in [("10.0.0.2", Family::Ipv4), ("fd00::2", Family::Ipv6)] {
        let spec = json!({"node": "n1", "peerIP": address, "nextHopMode": "Keep"});
        let cluster =
            Cluster { nodes: vec![both(1), both(2)], peers: vec![named("p", spec)], ..Cluster::default() };
        for name in ["n1", "n2"] {
            let peers = config(&cluster, name).peers;
            assert_eq!(peers.len(), 2, "{address} {name}");
            for (remote, peer) in peers {
                let is_explicit = peer.rules.next_hop == NextHopMode::Keep;
                assert_eq!(is_explicit, Family::of_address(remote.ip()) == explicit, "{address} {name}");
            }
        }
    }
}

#[test]
fn the_fields_of_a_peer_have_their_effect() {
    let with = |more: Value| {
        let mut spec = json!({"peerIP": "192.0.2.1", "asNumber": 65001});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Cluster { nodes: vec![plain(1)], peers: vec![named("p", spec)], ..Cluster::default() }
    };
    let peer = only(&with(json!({})), "n1");
    assert_eq!(
        (peer.session.local_as, peer.session.restart_time, peer.session.keepalive_time),
        (64512, Some(120), None)
    );
    assert_eq!((peer.rules.next_hop, peer.rules.allowed_own_as), (NextHopMode::Auto, 0));
    assert_eq!(peer.transport.source, Some("10.0.0.1".parse().unwrap()));
    assert_eq!((peer.transport.password, peer.transport.ttl_security), (None, None));
    assert_eq!(peer.rules.max_prefixes, Some(2_000_000));
    type Check = fn(&PeerConfig) -> bool;
    let cases: [(Value, Check); 12] = [
        (json!({"keepaliveTime": "0s"}), |p| p.session.keepalive_time.is_none()),
        (json!({"localASNumber": 65100}), |p| p.session.local_as == 65100 && p.rules.local_as == 65100),
        (json!({"maxRestartTime": "45s"}), |p| p.session.restart_time == Some(45)),
        (json!({"keepaliveTime": "10s"}), |p| p.session.keepalive_time == Some(10)),
        (json!({"nextHopMode": "Self"}), |p| p.rules.next_hop == NextHopMode::Own),
        (json!({"nextHopMode": "Keep"}), |p| p.rules.next_hop == NextHopMode::Keep),
        (json!({"keepOriginalNextHop": true}), |p| p.rules.next_hop == NextHopMode::Keep),
        (json!({"numAllowedLocalASNumbers": 2}), |p| p.rules.allowed_own_as == 2),
        (json!({"sourceAddress": "None"}), |p| p.transport.source.is_none()),
        (json!({"ttlSecurity": 3}), |p| p.transport.ttl_security == Some(3)),
        (json!({"ttlSecurity": 0}), |p| p.transport.ttl_security.is_none()),
        (json!({"password": {"secretKeyRef": {"name": "bgp", "key": "password"}}}), |p| {
            p.transport.password == Some(Password("secret".to_owned()))
        }),
    ];
    for (more, holds) in cases {
        assert!(holds(&only(&with(more.clone()), "n1")), "{more}");
    }
    // A password that is not there is no reason for a session without one.
    let reference = |key: &str, optional: bool| json!({"password": {"secretKeyRef": {"name": "bgp", "key": key, "optional": optional}}});
    assert_eq!(only(&with(reference("other", true)), "n1").transport.password, None);
    for (key, optional, expected) in [
        ("other", false, "no key other"),
        ("forbidden", true, "forbidden"),
        ("long", true, "81 bytes"),
        ("line", true, "line end"),
        ("empty", true, "empty"),
        ("binary", true, "no text"),
    ] {
        let derived = derived(&with(reference(key, optional)), "n1");
        assert!(derived.config.unwrap().peers.is_empty(), "{key}");
        let message = &derived.problems[0].message;
        assert!(
            message.contains(expected) && message.starts_with("password.secretKeyRef: "),
            "{key}: {message}"
        );
    }
}

/// Without its password, the mesh has no sessions; others stay.
#[test]
fn a_mesh_without_its_password_has_no_sessions() {
    let mesh = |key: &str| json!({"nodeMeshPassword": {"secretKeyRef": {"name": "bgp", "key": key}}});
    let peer = named("p", json!({"peerIP": "10.0.0.99", "asNumber": 64513}));
    let mut cluster = Cluster { nodes: vec![plain(1), plain(2)], peers: vec![peer], ..Cluster::default() };
    for (key, expected) in [
        ("password", vec!["10.0.0.2:179 64512 passive", "10.0.0.99:179 64513"]),
        ("long", vec!["10.0.0.99:179 64513"]),
    ] {
        cluster.configurations = vec![named("default", mesh(key))];
        assert_eq!(sessions(&cluster, "n1"), expected, "{key}");
    }
    let message = derived(&cluster, "n1").problems[0].to_string();
    assert!(message.starts_with("BGPConfiguration default: nodeMeshPassword.secretKeyRef: "), "{message}");
}

/// What a policy makes of a route of a peer.
fn judged(policy: &Policy, prefix: &str, change: impl FnOnce(&mut Attributes)) -> Option<Attributes> {
    judged_route(policy, prefix, (true, None), change)
}

/// What a policy makes of an own route to this interface.
fn judged_own(policy: &Policy, prefix: &str, interface: Option<&str>) -> Option<Attributes> {
    judged_route(policy, prefix, (false, interface), |_| {})
}

fn judged_route(
    policy: &Policy,
    prefix: &str,
    (from_peer, interface): (bool, Option<&str>),
    change: impl FnOnce(&mut Attributes),
) -> Option<Attributes> {
    let mut attributes = Attributes::new("10.0.0.7".parse::<std::net::IpAddr>().unwrap());
    change(&mut attributes);
    let prefix = prefix.parse().unwrap();
    let candidate =
        Candidate { prefix: &prefix, attributes: &attributes, from_peer, interface, internal_peer: true };
    match policy.judge(&candidate) {
        Verdict::Rejected => None,
        Verdict::Unchanged => Some(attributes),
        Verdict::Changed(changed) => Some(*changed),
    }
}

/// Whatever else a node announces would lead packets of all nodes to it.
#[test]
fn nodes_of_the_mesh_may_announce_pods_and_services() {
    let mut cluster = Cluster {
        nodes: vec![plain(1), node(2, json!({}), json!({"projectcalico.org/IPv6Address": "fd00::2/64"}))],
        configurations: vec![named(
            "default",
            json!({"serviceClusterIPs": [{"cidr": "10.96.0.0/12"}], "serviceExternalIPs": [{"cidr": "192.0.2.0/28"}],
                "serviceLoadBalancerIPs": [{"cidr": "198.51.100.7/32"}]}),
        )],
        pools: vec![
            named("plain", json!({"cidr": "10.1.0.0/16"})),
            named("disabled", json!({"cidr": "10.2.0.0/16", "disabled": true})),
            named("six", json!({"cidr": "fd01::/48"})),
        ],
        stray_blocks: vec![
            ("10.7.0.0/26".parse().unwrap(), "n2".to_owned()),
            ("10.7.1.0/26".parse().unwrap(), "n3".to_owned()),
        ],
        ..Cluster::default()
    };
    let of_peer = |cluster: &Cluster, address: &str| {
        let config = config(cluster, "n1");
        let peer = config.peers.iter().find(|(it, _)| it.ip().to_string() == address).unwrap().1.clone();
        peer.rules.import
    };
    let import = of_peer(&cluster, "10.0.0.2");
    for (prefix, accepted) in [
        ("10.1.0.0/16", true),
        ("10.1.3.64/26", true),
        ("10.2.9.9/32", true),
        ("10.7.0.0/26", true),
        ("10.7.0.3/32", true),
        ("10.96.0.10/32", true),
        ("192.0.2.3/32", true),
        ("198.51.100.7/32", true),
        ("0.0.0.0/0", false),
        ("10.0.0.0/8", false),
        ("10.0.0.1/32", false),
        ("10.7.0.64/26", false),
        ("10.7.1.0/26", false),
        ("192.0.2.16/32", false),
        ("203.0.113.0/24", false),
    ] {
        assert_eq!(judged(&import, prefix, |_| {}).is_some(), accepted, "{prefix}");
    }

    // A BGPPeer is as its filters say.
    cluster.peers = vec![named("all", json!({"peerSelector": "all()"}))];
    assert!(judged(&of_peer(&cluster, "10.0.0.2"), "0.0.0.0/0", |_| {}).is_some());
}

#[test]
fn nodes_tell_what_calico_tells() {
    let mut cluster = Cluster {
        nodes: vec![plain(1), plain(2)],
        configurations: vec![named(
            "default",
            json!({
                "communities": [{"name": "blue", "value": "64512:7"}],
                "prefixAdvertisements": [{"cidr": "10.10.0.0/16", "communities": ["blue", "64512:1:2"]}],
                "serviceClusterIPs": [{"cidr": "10.96.0.0/12"}],
                "serviceExternalIPs": [{"cidr": "192.0.2.7/32"}],
                "ipv4NormalRoutePriority": 2000,
            }),
        )],
        pools: vec![
            named("pods", json!({"cidr": "10.10.0.0/16"})),
            named("hidden", json!({"cidr": "10.11.0.0/16", "disableBGPExport": true})),
            named("old", json!({"cidr": "10.12.0.0/16", "disabled": true})),
        ],
        blocks: vec!["10.10.1.0/26".parse().unwrap()],
        service_addresses: ["192.0.2.7/32".parse().unwrap()].into(),
        ..Cluster::default()
    };
    let export = only(&cluster, "n1").rules.export;
    // The prefix, whether it is told as an own route (to the interface of a pod, or none), and as one of a peer.
    for (prefix, own, of_pod, of_peer) in [
        ("10.10.1.0/26", true, true, true),
        ("10.10.1.5/32", false, false, false),
        // A borrowed address of another node's block.
        ("10.10.2.5/32", true, true, true),
        ("10.11.0.0/26", false, false, false),
        ("10.12.0.0/26", true, true, true),
        ("10.96.0.0/12", true, false, false),
        ("10.96.0.1/32", true, false, false),
        ("192.0.2.7/32", true, false, false),
        ("0.0.0.0/0", true, false, false),
    ] {
        assert_eq!(judged_own(&export, prefix, None).is_some(), own, "{prefix}");
        assert_eq!(judged_own(&export, prefix, Some("cali1")).is_some(), of_pod, "{prefix}");
        assert_eq!(judged(&export, prefix, |_| {}).is_some(), of_peer, "{prefix}");
    }
    let block = judged_own(&export, "10.10.1.0/26", None).unwrap();
    assert_eq!(block.communities, [Community(64512 << 16 | 7)]);
    assert_eq!(block.large_communities, [LargeCommunity(64512, 1, 2)]);
    let derived = derived(&cluster, "n1");
    let own: Vec<String> = derived.own.keys().map(IpNet::to_string).collect();
    assert_eq!(own, ["10.10.1.0/26", "10.96.0.0/12", "192.0.2.7/32"]);
    assert_eq!(derived.blackholes, ["10.10.1.0/26".parse::<IpNet>().unwrap()]);
    for route in derived.own.values() {
        assert_eq!(route.attributes.local_pref, Some(HIGHEST_PREFERENCE - 2000));
    }
    assert_eq!(derived.problems, []);
    // A node's own prefixAdvertisements count instead.
    let of_node = json!({
        "communities": [{"name": "blue", "value": "64512:9"}],
        "prefixAdvertisements": [{"cidr": "10.10.0.0/16", "communities": ["blue"]}],
    });
    cluster.configurations.push(named("node.n1", of_node));
    for (name, expected) in [("n1", 9), ("n2", 7)] {
        let block = judged_own(&only(&cluster, name).rules.export, "10.10.1.0/26", None).unwrap();
        assert_eq!(block.communities, [Community(64512 << 16 | expected)], "{name}");
    }
    cluster.configurations.pop();
    // A reflector passes on what others advertise for Services.
    cluster.nodes[0] = reflector(1, "244.0.0.1");
    cluster.peers = vec![named("rr", json!({"peerSelector": "has(rr)"}))];
    let export = only(&cluster, "n1").rules.export;
    for (prefix, told) in [("10.96.0.1/32", true), ("192.0.2.7/32", true), ("192.0.2.8/32", false)] {
        assert_eq!(judged(&export, prefix, |_| {}).is_some(), told, "{prefix}");
    }
}

#[test]
fn filters_come_first_and_close_if_they_cannot_be_read() {
    let mut cluster = Cluster {
        nodes: vec![plain(1)],
        peers: vec![named("p", json!({"peerIP": "192.0.2.1", "asNumber": 65001, "filters": ["f", "g"]}))],
        pools: vec![named("pods", json!({"cidr": "10.10.0.0/16"}))],
        filters: vec![
            named(
                "f",
                json!({
                    "exportV4": [
                        {"cidr": "10.10.5.0/24", "matchOperator": "In", "prefixLength": {"min": 26}, "action": "Reject"},
                        {"cidr": "172.16.0.0/12", "matchOperator": "Equal", "action": "Accept",
                         "operations": [{"setPriority": {"value": 5}}, {"prependASPath": {"prefix": [7, 8]}}, {"addCommunity": {"value": "1:2"}}]},
                    ],
                    "importV4": [{"communities": {"values": ["1:2"]}, "action": "Reject"}],
                }),
            ),
            named(
                "g",
                json!({"importV4": [{"cidr": "10.0.0.0/8", "matchOperator": "NotIn", "action": "Reject"}]}),
            ),
        ],
        ..Cluster::default()
    };
    let rules = only(&cluster, "n1").rules;
    assert!(judged(&rules.export, "10.10.5.0/25", |_| {}).is_some());
    assert!(judged(&rules.export, "10.10.5.0/26", |_| {}).is_none());
    let changed = judged(&rules.export, "172.16.0.0/12", |_| {}).unwrap();
    assert_eq!(
        (changed.local_pref, changed.as_path.to_string()),
        (Some(HIGHEST_PREFERENCE - 5), "7 8".to_owned())
    );
    assert_eq!(changed.communities, [Community(1 << 16 | 2)]);
    assert!(judged(&rules.import, "10.1.0.0/16", |_| {}).is_some());
    assert!(judged(&rules.import, "11.1.0.0/16", |_| {}).is_none());
    assert!(judged(&rules.import, "10.1.0.0/16", |a| a.communities.push(Community(1 << 16 | 2))).is_none());

    let damaged = [
        ("an absent filter", vec![]),
        (
            "an interface of an import rule, which no route of a peer has",
            vec![
                named("f", json!({"importV4": [{"interface": "eth*", "action": "Reject"}]})),
                cluster.filters[1].clone(),
            ],
        ),
        (
            "an unknown action",
            vec![named("f", json!({"importV4": [{"action": "Maybe"}]})), cluster.filters[1].clone()],
        ),
        (
            "an unknown operator",
            vec![
                named(
                    "f",
                    json!({"exportV4": [{"cidr": "10.0.0.0/8", "matchOperator": "Near", "action": "Accept"}]}),
                ),
                cluster.filters[1].clone(),
            ],
        ),
    ];
    for (name, filters) in damaged {
        cluster.filters = filters;
        let rules = only(&cluster, "n1").rules;
        assert!(judged(&rules.import, "10.1.0.0/16", |_| {}).is_none(), "{name}");
        assert!(judged(&rules.export, "10.10.9.0/26", |_| {}).is_none(), "{name}");
        assert!(derived(&cluster, "n1").problems[0].message.contains("no route passes"), "{name}");
    }
}

/// A pod may have an address of another node's block: the single address is advertised by the pod's node, where a pool has it.
#[test]
fn borrowed_addresses_are_advertised_one_by_one() {
    let pods = ["10.10.0.7", "10.10.5.5", "10.99.0.1", "fd10::5"].map(|address| PodAddress {
        address: address.parse().unwrap(),
        interface: format!("cali{}", address.len()),
    });
    let cluster = Cluster {
        nodes: vec![plain(1), plain(2)],
        pools: vec![
            named("pods", json!({"cidr": "10.10.0.0/16"})),
            named("closed", json!({"cidr": "fd10::/64", "disableBGPExport": true})),
        ],
        blocks: vec!["10.10.0.0/26".parse().unwrap()],
        pods: pods.to_vec(),
        ..Cluster::default()
    };
    let derived = derived(&cluster, "n1");
    let own: Vec<String> = derived.own.keys().map(ToString::to_string).collect();
    assert_eq!(own, ["10.10.0.0/26", "10.10.5.5/32", "fd10::5/128"]);
    let borrowed = &derived.own[&"10.10.5.5/32".parse::<IpNet>().unwrap()];
    assert_eq!(borrowed.interface.as_deref(), Some("cali9"));
    let policy = derived.config.unwrap().peers.into_values().next().unwrap().rules.export;
    for (prefix, is_told) in
        [("10.10.0.0/26", true), ("10.10.5.5/32", true), ("10.10.0.7/32", false), ("fd10::5/128", false)]
    {
        assert_eq!(judged(&policy, prefix, |_| {}).is_some(), is_told, "{prefix}");
    }
}

#[test]
fn excluded_nodes_advertise_no_services() {
    let services = json!({"serviceClusterIPs": [{"cidr": "10.96.0.0/12"}]});
    let excluded = json!({"node.kubernetes.io/exclude-from-external-load-balancers": ""});
    let cluster = Cluster {
        nodes: vec![plain(1), node(2, excluded, json!({}))],
        configurations: vec![named("default", services)],
        blocks: vec!["10.10.0.0/26".parse().unwrap()],
        service_addresses: ["10.96.0.7/32".parse().unwrap()].into(),
        ..Cluster::default()
    };
    let own = |name: &str| derived(&cluster, name).own.keys().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(own("n1"), ["10.10.0.0/26", "10.96.0.0/12", "10.96.0.7/32"]);
    assert_eq!(own("n2"), ["10.10.0.0/26"]);
}

#[test]
fn routes_of_bgp_belong_into_the_kernel_unless_the_dataplane_has_them() {
    let pools: Vec<IpPool> = all(&[
        named("plain", json!({"cidr": "10.10.0.0/16"})),
        named("overlay", json!({"cidr": "10.11.0.0/16", "vxlanMode": "Always"})),
        named("mixed", json!({"cidr": "10.12.0.0/16", "vxlanMode": "CrossSubnet"})),
        named("tunnel", json!({"cidr": "10.13.0.0/16", "ipipMode": "Always"})),
        named("balancers", json!({"cidr": "198.51.100.0/24", "allowedUses": ["LoadBalancer"]})),
    ]);
    let from = |peer: u32, hop: &str| Chosen {
        source: if peer == 0 { Source::Own } else { Source::Peer(PeerId(peer)) },
        attributes: Arc::new(Attributes::new(hop.parse::<std::net::IpAddr>().unwrap())),
    };
    let one = || vec![from(1, "10.0.0.2")];
    let via = |hops: &[&str]| Forwarding::Via(hops.iter().map(|hop| hop.parse().unwrap()).collect());
    let no = Forwarding::Nothing;
    let pool = |name: &str| name.to_owned();
    let services = |text: &str| no(NotForwarded::Services(text.parse().unwrap()));
    for (prefix, routes, mode, expected) in [
        ("10.10.1.0/26", one(), None, via(&["10.0.0.2"])),
        ("10.10.1.5/32", one(), Some("Enabled"), via(&["10.0.0.2"])),
        ("10.10.1.0/26", one(), Some("EnabledIPIPOnly"), no(NotForwarded::NotProgrammed(pool("plain")))),
        ("10.10.1.0/26", one(), Some("Disabled"), no(NotForwarded::NotProgrammed(pool("plain")))),
        ("10.11.1.0/26", one(), Some("Enabled"), no(NotForwarded::Overlay(pool("overlay")))),
        ("10.12.1.0/26", one(), Some("Enabled"), no(NotForwarded::Overlay(pool("mixed")))),
        ("10.13.1.0/26", one(), Some("Enabled"), no(NotForwarded::Overlay(pool("tunnel")))),
        ("192.0.2.0/24", one(), Some("Disabled"), via(&["10.0.0.2"])),
        ("0.0.0.0/0", one(), None, via(&["10.0.0.2"])),
        // Several routers, of which two are the same.
        (
            "192.0.2.0/24",
            vec![from(1, "10.0.0.3"), from(2, "10.0.0.2"), from(3, "10.0.0.3")],
            None,
            via(&["10.0.0.2", "10.0.0.3"]),
        ),
        ("192.0.2.0/24", vec![], None, no(NotForwarded::NoRoute)),
        ("192.0.2.0/24", vec![from(0, "0.0.0.0")], None, no(NotForwarded::Own)),
        // Networks of Services, which nodes serve themselves: all of them advertise the same.
        ("10.96.0.0/12", one(), None, services("10.96.0.0/12")),
        ("10.96.7.7/32", one(), None, services("10.96.0.0/12")),
        ("198.51.100.64/26", one(), None, services("198.51.100.0/24")),
        ("203.0.113.5/32", one(), None, services("203.0.113.5/32")),
        ("10.0.0.0/8", one(), None, via(&["10.0.0.2"])),
    ] {
        let spec = serde_json::from_value(json!({
            "programClusterRoutes": mode, "serviceClusterIPs": [{"cidr": "10.96.0.0/12"}],
            "serviceExternalIPs": [{"cidr": "198.51.100.0/24"}], "serviceLoadBalancerIPs": [{"cidr": "203.0.113.5/32"}],
        })).unwrap();
        let change = RouteChange { prefix: prefix.parse().unwrap(), routes };
        assert_eq!(forwarding(&change, &pools, &spec), expected, "{change:?} {mode:?}");
    }
}

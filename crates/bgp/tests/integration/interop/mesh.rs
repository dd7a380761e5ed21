//! A mesh in which half of the nodes run BIRD, configured as Calico configures it (`confd/templates/bird.cfg.template`).
//! Tortie's configuration comes from the same resources.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_api::calico::IpPool;
use tortie_api::kubernetes::Node;
use tortie_bgp::calico::{Derived, Forwarding, Resources, derive, forwarding};
use tortie_bgp::rib::RouteChange;
use tortie_servers::programs::{Program, can_run};

use crate::interop::bird::Bird;
use crate::interop::lab::{AS, Lab, Tortie, ipv4, until};

const NODES: [u8; 4] = [1, 2, 3, 10];
/// The nodes with BIRD.
const BIRDS: [u8; 2] = [2, 10];

fn block(node: u8) -> IpNet {
    format!("10.10.{node}.0/26").parse().unwrap()
}

fn nodes() -> Vec<Node> {
    let node = |number: &u8| -> Value {
        let annotations = json!({"projectcalico.org/IPv4Address": format!("{}/24", ipv4(*number))});
        json!({"metadata": {"name": format!("n{number}"), "annotations": annotations}})
    };
    NODES.iter().map(|number| serde_json::from_value(node(number)).unwrap()).collect()
}

fn pools() -> Vec<IpPool> {
    let pool = json!({"metadata": {"name": "pods"}, "spec": {"cidr": "10.10.0.0/16"}});
    vec![serde_json::from_value(pool).unwrap()]
}

fn derived(node: u8) -> Derived {
    let resources = Resources {
        nodes: &nodes(),
        configurations: &[],
        peers: &[],
        filters: &[],
        pools: &pools(),
        blocks: &[block(node)],
        stray_blocks: &[],
        pods: &[],
        service_addresses: &BTreeSet::new(),
        secret: &|_| Err(tortie_bgp::calico::NoSecret::Absent("there are no Secrets".to_owned())),
    };
    derive(&format!("n{node}"), &resources)
}

fn start(lab: &Lab, node: u8) -> Tortie {
    let Derived { config, own, problems, .. } = derived(node);
    assert_eq!(problems, []);
    let mut config = config.unwrap();
    // The addresses of all nodes are there, but IPv6 is not part of this test.
    config.listen.retain(|address| address.is_ipv4());
    let tortie = Tortie::start(lab, node, config, false);
    tortie.run(async |speaker| speaker.advertise(own).await).unwrap();
    tortie
}

/// The protocols of a node, with Calico's filter for pools.
fn protocols(node: u8) -> String {
    let (own, block) = (ipv4(node), block(node));
    let mut text = format!(
        "function calico_export() {{
            bgp_local_pref = 2147483647 - 1024;
            if (net = {block}) then {{ accept; }}
            if (net ~ {block}) then {{ reject; }}
            if (net ~ 10.10.0.0/16) then {{ accept; }}
            reject;
        }}
        protocol static {{ ipv4; route {block} blackhole; }}
        template bgp bgp_template {{
            debug {{ states }};
            local as {AS};
            multihop;
            ipv4 {{ gateway recursive; import all; export filter {{ calico_export(); }}; add paths on; }};
            graceful restart; graceful restart time 120;
            source address {own};
            connect delay time 2; connect retry time 5; error wait time 5,30;
        }}\n"
    );
    for other in NODES.into_iter().filter(|other| *other != node) {
        let address = ipv4(other);
        let passive = if address.to_string() > own.to_string() { "passive on;" } else { "" };
        text += &format!(
            "protocol bgp Mesh_{other} from bgp_template {{ neighbor {address} as {AS}; {passive} }}\n"
        );
    }
    text
}

#[test]
fn nodes_with_bird_and_nodes_with_tortie_form_one_mesh() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let mut lab = Lab::new(3);
    lab.add(10);
    let mut birds = BIRDS.map(|node| (node, Bird::start(&lab, node, &protocols(node))));
    let torties =
        NODES.into_iter().filter(|node| !BIRDS.contains(node)).map(|node| (node, start(&lab, node)));
    let torties: Vec<(u8, Tortie)> = torties.collect();
    let has_all =
        |tortie: &Tortie| NODES.iter().all(|node| tortie.route(&block(*node).to_string()).is_some());
    until("all nodes have all blocks", || {
        let of_birds = birds
            .iter()
            .all(|(_, bird)| NODES.iter().all(|node| bird.route(&block(*node).to_string()).is_some()));
        of_birds && torties.iter().all(|(_, tortie)| has_all(tortie) && tortie.is_established())
    });
    for (node, bird) in &birds {
        for (other, _) in &torties {
            let shown = bird.route(&block(*other).to_string()).unwrap();
            assert!(shown.contains(&format!("BGP.next_hop: {}", ipv4(*other))), "{node}: {shown}");
            assert!(shown.contains("BGP.local_pref: 2147482623"), "{node}: {shown}");
        }
    }
    // What belongs into the kernel of a node: a route to each other node.
    let (_, first) = &torties[0];
    let routes = first.run(async |speaker| speaker.routes().await).unwrap();
    let via = |change: &RouteChange| match forwarding(change, &pools(), &Default::default()) {
        Forwarding::Via(routers) => routers.into_iter().collect::<Vec<IpAddr>>(),
        Forwarding::Nothing(_) => Vec::new(),
    };
    for (prefix, routes) in routes {
        let node = NODES.into_iter().find(|node| block(*node) == prefix).unwrap();
        let expected = if node == 1 { Vec::new() } else { vec![ipv4(node)] };
        assert_eq!(via(&RouteChange { prefix, routes }), expected);
    }
    // A node with BIRD restarts: nobody loses its block.
    let (node, bird) = &mut birds[0];
    bird.kill();
    let all_keep = || torties.iter().all(|(_, tortie)| tortie.route(&block(*node).to_string()).is_some());
    until("the others notice", || {
        assert!(all_keep());
        torties.iter().all(|(_, tortie)| !tortie.is_established())
    });
    bird.run(&lab, *node, &["-R"]);
    until("the sessions are back", || {
        assert!(all_keep());
        torties.iter().all(|(_, tortie)| {
            tortie.is_established() && tortie.status().peers.iter().all(|p| p.stale.is_empty())
        })
    });
    assert!(all_keep());
}

//! Objects of others stay: Calico's routes, and VXLAN links that compete with Tortie's.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::common::cluster::*;
use tortie_dataplane::*;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Chain, Expr, Nft, Op, Rule, Table, Transaction, Verdict, diff};
use tortie_kernel::route::{Change, Link, NewLink, NewLinkKind, Route, RouteSocket, Vxlan};

const DEVICE: &str = "vxlan.calico";

fn with_overlay(state: &mut NodeState) {
    state.node = Some(local_node(1));
    state.vteps.insert(vtep(2).key(), vtep(2));
    state.routes.insert(block(2).into(), RouteTarget::Vxlan { node: "node-2".to_owned() });
}

fn inside<R: Send>(node: &Node, work: impl FnOnce(&mut RouteSocket) -> R + Send) -> R {
    node.namespace.run(|| work(&mut RouteSocket::open().unwrap())).unwrap()
}

fn link(node: &Node, name: &str) -> Option<Link> {
    inside(node, |socket| socket.link(name).unwrap())
}

fn overlay_route(node: &Node) -> Option<Route> {
    let routes = inside(node, |socket| socket.routes().unwrap());
    routes.into_iter().find(|route| route.destination == block(2).into())
}

/// The settings of Tortie's link with another address: the kernel rejects a second link with equal settings.
fn make(node: &Node, name: &str, settings: Vxlan) {
    inside(node, |socket| {
        socket.create(&NewLink { up: true, ..NewLink::new(name, NewLinkKind::Vxlan(settings)) }).unwrap();
    });
}

fn ours() -> Vxlan {
    let node = local_node(1);
    Vxlan {
        vni: node.network.vni,
        port: node.network.port,
        local: node.address(tortie_api::net::IpVersion::V4),
        learning: false,
    }
}

/// Leftovers of Calico are not removed without a request (policy decision 28).
#[test]
fn routes_of_calico_are_kept() {
    let mut node = Node::new(&Underlay::new(), 1);
    let calico = |net: &str| Route::blackhole(net.parse().unwrap(), 80);
    let theirs = [calico("10.65.9.0/26"), calico("10.65.1.0/26")];
    inside(&node, |socket| {
        theirs.iter().for_each(|it| socket.change(&Change::AddRoute(it.clone())).unwrap())
    });
    let report = node.change(|state| drop(state.routes.insert(block(1).into(), RouteTarget::Local)));
    assert_eq!(report, Report::default(), "the one in the place of ours does what ours would");
    assert_eq!(node.resync(), Report::default());
    node.change(|state| drop(state.routes.remove(&block(1).into())));
    let there = inside(&node, |socket| socket.routes().unwrap());
    assert!(theirs.iter().all(|route| there.contains(route)), "{there:#?}");
}

#[test]
fn the_vxlan_link_is_marked_and_found_again() {
    let mut node = Node::new(&Underlay::new(), 1);
    assert_eq!(node.change(with_overlay), Report::default());
    let made = link(&node, DEVICE).unwrap();
    assert!(made.up && made.alias.starts_with("tortie"), "{made:?}");
    assert_eq!(overlay_route(&node).unwrap().protocol, 84);
    node.restart();
    assert_eq!(link(&node, DEVICE), Some(made));
}

#[test]
fn a_half_created_vxlan_link_is_completed() {
    let mut node = Node::new(&Underlay::new(), 1);
    inside(&node, |socket| socket.create(&NewLink::new(DEVICE, NewLinkKind::Vxlan(ours()))).unwrap());
    let begun = link(&node, DEVICE).unwrap().index;
    assert_eq!(node.change(with_overlay), Report::default());
    let made = link(&node, DEVICE).unwrap();
    assert!(made.index == begun && made.up && made.alias.starts_with("tortie"), "{made:?}");
}

/// The process ended between two steps, and the port has changed before the next one.
#[test]
fn a_half_created_vxlan_link_with_former_settings_is_made_anew() {
    let mut node = Node::new(&Underlay::new(), 1);
    let former = NewLinkKind::Vxlan(Vxlan { port: 8472, ..ours() });
    let begun = NewLink { mac: Some(vtep(1).mac), ..NewLink::new(DEVICE, former) };
    inside(&node, |socket| socket.create(&begun).unwrap());
    assert_eq!(node.change(with_overlay), Report::default());
    let made = link(&node, DEVICE).unwrap();
    assert!(made.vxlan == Some(ours()) && made.up && made.alias.starts_with("tortie"), "{made:?}");
}

#[test]
fn a_foreign_vxlan_link_is_reported_and_kept() {
    for (name, settings) in [
        (DEVICE, ours()),
        (DEVICE, Vxlan { vni: 7, port: 8472, local: Some(Ipv4Addr::LOCALHOST.into()), learning: false }),
        ("vxlan9", ours()),
    ] {
        let mut node = Node::new(&Underlay::new(), 1);
        make(&node, name, settings);
        let theirs = link(&node, name);
        let report = node.change(with_overlay);
        let conditions = |report: &Report| {
            report.node.iter().map(|it| (it.reason, it.message.contains(name))).collect::<Vec<_>>()
        };
        assert_eq!(conditions(&report), [(Reason::ForeignVxlanLink, true)], "{report:?}");
        assert_eq!(conditions(&node.resync()), [(Reason::ForeignVxlanLink, true)]);
        node.change(|state| drop(state.routes.insert(block(3).into(), RouteTarget::Local)));
        assert_eq!(link(&node, name), theirs);
        assert_eq!(overlay_route(&node), None);

        let index = theirs.unwrap().index;
        inside(&node, |socket| socket.change(&Change::DeleteLink(index)).unwrap());
        assert_eq!(node.resync(), Report::default());
        assert!(link(&node, DEVICE).unwrap().alias.starts_with("tortie"));
        assert!(overlay_route(&node).is_some());
    }
}

/// kube-proxy, a firewall and others may change nftables at any time; there is one generation for all tables.
#[test]
fn a_table_is_listed_while_others_change_theirs() {
    let namespace = NetNs::create().unwrap();
    let rule = Rule { exprs: vec![Expr::Verdict(Verdict::Drop)], ..Rule::default() };
    let chains =
        (0..300).map(|n| (format!("chain-{n}"), Chain { base: None, rules: vec![rule.clone(); 20] }));
    let table = Table { chains: chains.collect(), ..Table::default() };
    namespace.run(|| Nft::open().unwrap().commit(&diff("ours", &table, None)).unwrap()).unwrap();
    let list = || {
        let begun = Instant::now();
        let listed = Nft::open().unwrap().list("ours").map(|listed| listed.as_ref() == Some(&table));
        (listed, begun.elapsed())
    };
    // Each change restarts a listing, so the changes must leave it enough time on this machine.
    let pause = 2 * namespace.run(list).unwrap().1;
    let (end, changes) = (AtomicBool::new(false), AtomicUsize::new(0));
    let listed = std::thread::scope(|scope| {
        let change_all_the_time = || {
            let mut nft = Nft::open().unwrap();
            while !end.load(Ordering::Relaxed) {
                for ops in [vec![Op::AddTable(0)], vec![Op::DeleteTable]] {
                    nft.commit(&Transaction { table: "theirs".to_owned(), ops }).unwrap();
                }
                changes.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(pause);
            }
        };
        let namespace = &namespace;
        scope.spawn(move || namespace.run(change_all_the_time).unwrap());
        let mut listed = Vec::new();
        while listed.len() < 5 || changes.load(Ordering::Relaxed) <= 5 {
            listed.push(namespace.run(list).unwrap().0);
        }
        end.store(true, Ordering::Relaxed);
        listed
    });
    assert!(listed.iter().all(|listed| matches!(listed, Ok(true))), "{listed:?}");
}

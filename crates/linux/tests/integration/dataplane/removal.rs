//! Removing Tortie from a node.

use crate::common::cluster::*;
use tortie_kernel::nftables::Nft;
use tortie_kernel::route::{Change, NewLink, NewLinkKind, Peer, Route, RouteSocket};
use tortie_linux::dataplane::Config;
use tortie_linux::{ServiceTable, ServicesConfig, remove_all};

/// A link of a pod of Calico, and a route of Calico.
const FOREIGN: &str = "calif0e1d2";

fn foreign() {
    let mut socket = RouteSocket::open().unwrap();
    let peer = Peer { name: "other", mac: None, mtu: None, namespace: None };
    socket.create(&NewLink { up: true, ..NewLink::new(FOREIGN, NewLinkKind::Veth(peer)) }).unwrap();
    socket.change(&Change::AddRoute(Route::blackhole("10.99.0.0/16".parse().unwrap(), 80))).unwrap();
}

/// The links, the routes with their protocols, and whether there is a table.
fn left() -> (Vec<String>, Vec<(String, u8)>, bool) {
    let mut socket = RouteSocket::open().unwrap();
    let links = socket.links().unwrap().into_iter().map(|link| link.name);
    let links = links.filter(|name| name.starts_with("cali") || name.contains("vxlan"));
    let routes = socket.routes().unwrap().into_iter();
    let routes = routes.map(|route| (route.destination.to_string(), route.protocol));
    let routes = routes.filter(|(_, protocol)| *protocol == 84 || *protocol == 80);
    (links.collect(), routes.collect(), Nft::open().unwrap().list("tortie").unwrap().is_some())
}

#[test]
fn everything_of_tortie_goes_and_nothing_else() {
    let ([node, _other], pods) = two_nodes();
    node.namespace.run(foreign).unwrap();
    let serve = || ServiceTable::open(ServicesConfig::default()).unwrap().apply(&[], &Default::default());
    node.namespace.run(serve).unwrap().unwrap();
    let before = node.namespace.run(left).unwrap();
    assert!(before.2 && before.0.len() == 3 && before.1.len() > 2, "{before:?}");

    // The agent runs and owns the table, so nothing is removed.
    let refused = node.namespace.run(|| remove_all(&Config::default())).unwrap();
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(node.namespace.run(left).unwrap(), before);
    assert!(pods[0].reaches(&pods[1], 80));

    let Node { namespace, dataplane, wiring, .. } = node;
    drop((dataplane, wiring));
    let removed = namespace.run(|| remove_all(&Config::default())).unwrap().unwrap();
    let expected = (vec![FOREIGN.to_owned()], vec![("10.99.0.0/16".to_owned(), 80)], false);
    assert_eq!(namespace.run(left).unwrap(), expected, "{removed:?}");
    assert!(
        removed.len() > 3 && removed.iter().any(|it| it == "nftables table inet tortie-services"),
        "{removed:?}"
    );
    assert!(!namespace.run(tortie_linux::services::exists).unwrap().unwrap());
    assert!(pods[0].is_cut_off(pods[1].address, 80), "a pod that remains has no connection");
    let again = namespace.run(|| remove_all(&Config::default())).unwrap().unwrap();
    assert_eq!(again, Vec::<String>::new());
}

//! The tables that speakers must have in the end, computed from scratch: everybody looks at everybody's best routes until
//! nothing changes. It shares no code with the speaker.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::IpNet;

use crate::core::network::{Plan, address};

/// A route as this model sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    /// The peer that sent it; `None` for own routes.
    pub(crate) from: Option<usize>,
    pub(crate) path: Vec<u32>,
    originator: Option<Ipv4Addr>,
    clusters: Vec<Ipv4Addr>,
}

type Table = BTreeMap<IpNet, Route>;

/// What `sender` tells `receiver` about one of its best routes, as the receiver sees it.
fn told(plans: &[Plan], sender: usize, receiver: usize, route: &Route) -> Option<Route> {
    let (me, you) = (&plans[sender], &plans[receiver]);
    if route.from == Some(receiver) {
        return None;
    }
    let mut route = route.clone();
    if me.as_number != you.as_number {
        route.path.insert(0, me.as_number);
        route.originator = None;
        route.clusters.clear();
    } else if let Some(from) = route.from.filter(|from| plans[*from].as_number == me.as_number) {
        if !me.peers[&from] && !me.peers[&receiver] {
            return None;
        }
        route.originator.get_or_insert(plans[from].identifier);
        route.clusters.insert(0, me.cluster.unwrap());
    }
    let is_loop = route.path.contains(&you.as_number)
        || route.originator == Some(you.identifier)
        || you.cluster.is_some_and(|cluster| route.clusters.contains(&cluster));
    (!is_loop).then_some(Route { from: Some(sender), ..route })
}

/// The best of the routes to one prefix.
fn best(plans: &[Plan], node: usize, routes: Vec<Route>) -> Option<Route> {
    routes.into_iter().min_by_key(|route| {
        let is_internal = route.from.is_some_and(|from| plans[from].as_number == plans[node].as_number);
        let identifier = route.originator.or(route.from.map(|from| plans[from].identifier));
        (
            route.from.is_some(),
            route.path.len(),
            is_internal,
            identifier,
            route.clusters.len(),
            route.from.map(address),
        )
    })
}

pub(crate) fn tables(plans: &[Plan]) -> Vec<Table> {
    let mut tables: Vec<Table> = vec![Table::new(); plans.len()];
    for _ in 0..200 {
        let next: Vec<Table> = (0..plans.len()).map(|node| step(plans, &tables, node)).collect();
        if next == tables {
            return tables;
        }
        tables = next;
    }
    panic!("the routes of {plans:?} have no end");
}

fn step(plans: &[Plan], tables: &[Table], node: usize) -> Table {
    let mut candidates: BTreeMap<IpNet, Vec<Route>> = BTreeMap::new();
    for prefix in &plans[node].own {
        let own = Route { from: None, path: Vec::new(), originator: None, clusters: Vec::new() };
        candidates.entry(*prefix).or_default().push(own);
    }
    for peer in plans[node].peers.keys() {
        for (prefix, route) in &tables[*peer] {
            candidates.entry(*prefix).or_default().extend(told(plans, *peer, node, route));
        }
    }
    candidates.into_iter().filter_map(|(prefix, routes)| Some((prefix, best(plans, node, routes)?))).collect()
}

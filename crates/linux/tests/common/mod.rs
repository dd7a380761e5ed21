//! Helpers for several tests: nodes made of namespaces, packets, changes of a node state.
#![allow(dead_code, unused_imports)] // each test uses a part

pub(crate) mod cluster;
pub(crate) mod filtering;

use std::os::fd::AsFd;

pub(crate) use testkit::frames::{checksum, frame, tag};

use tortie_dataplane::{Delta, NodeState, Route};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::*;

/// A link from one namespace to another; returns the indices of both ends, which forward packets.
pub(crate) fn cable(from: &NetNs, from_name: &str, to: &NetNs, to_name: &str) -> (u32, u32) {
    let near = from.run(|| {
        let peer = Peer { name: to_name, mac: None, mtu: None, namespace: Some(to.as_fd()) };
        let mut socket = RouteSocket::open().unwrap();
        socket.create(&NewLink { up: true, ..NewLink::new(from_name, NewLinkKind::Veth(peer)) }).unwrap();
        tortie_kernel::interface_index(from_name).unwrap()
    });
    let far = to.run(|| {
        let index = tortie_kernel::interface_index(to_name).unwrap();
        let up = Change::SetLink(index, vec![LinkSetting::Up(true)]);
        RouteSocket::open().unwrap().change(&up).unwrap();
        index
    });
    for (namespace, name) in [(from, from_name), (to, to_name)] {
        testkit::links::wait_for(namespace, name).unwrap();
    }
    (near.unwrap(), far.unwrap())
}

/// The deltas from one state to another, in the order in which `calc` returns them.
pub(crate) fn deltas(old: &NodeState, new: &NodeState) -> Vec<Delta> {
    let mut deltas = Vec::new();
    if old.node != new.node {
        deltas.extend(new.node.clone().map(Delta::Node));
    }
    if old.settings != new.settings {
        deltas.push(Delta::Settings(new.settings.clone()));
    }
    for (id, (kind, members)) in &new.sets {
        match old.sets.get(id) {
            Some((old_kind, before)) if old_kind == kind => {
                let added: Vec<_> = members.difference(before).copied().collect();
                let removed: Vec<_> = before.difference(members).copied().collect();
                if !added.is_empty() || !removed.is_empty() {
                    deltas.push(Delta::SetChanged { id: id.clone(), added, removed });
                }
            }
            _ => deltas.push(Delta::SetCreated(id.clone(), *kind, members.clone())),
        }
    }
    let policies = new.policies.iter().filter(|(id, rules)| old.policies.get(*id) != Some(*rules));
    deltas.extend(policies.map(|(id, rules)| Delta::Policy(id.clone(), rules.clone())));
    let vteps = new.vteps.values().filter(|vtep| old.vteps.get(&vtep.key()) != Some(*vtep));
    deltas.extend(vteps.cloned().map(Delta::Vtep));
    let routes = new.routes.iter().filter(|(net, target)| old.routes.get(*net) != Some(*target));
    deltas.extend(
        routes.map(|(net, target)| Delta::Route(Route { destination: *net, target: target.clone() })),
    );
    let endpoints = new.endpoints.iter().filter(|(id, endpoint)| old.endpoints.get(*id) != Some(*endpoint));
    deltas.extend(endpoints.map(|(id, endpoint)| Delta::Endpoint(id.clone(), endpoint.clone())));

    let hosts = &new.host_endpoints;
    let changed = hosts.iter().filter(|(name, host)| old.host_endpoints.get(*name) != Some(*host));
    deltas.extend(changed.map(|(name, host)| Delta::HostEndpoint(name.clone(), host.clone())));

    let gone = old.host_endpoints.keys().filter(|name| !hosts.contains_key(*name));
    deltas.extend(gone.cloned().map(Delta::HostEndpointRemoved));
    let gone = old.endpoints.keys().filter(|id| !new.endpoints.contains_key(*id));
    deltas.extend(gone.cloned().map(Delta::EndpointRemoved));
    let gone = old.routes.keys().filter(|net| !new.routes.contains_key(*net));
    deltas.extend(gone.copied().map(Delta::RouteRemoved));
    let gone = old.vteps.keys().filter(|node| !new.vteps.contains_key(*node));
    deltas.extend(gone.cloned().map(|(node, version)| Delta::VtepRemoved(node, version)));
    let gone = old.policies.keys().filter(|id| !new.policies.contains_key(*id));
    deltas.extend(gone.cloned().map(Delta::PolicyRemoved));
    let gone = old.sets.keys().filter(|id| !new.sets.contains_key(*id));
    deltas.extend(gone.cloned().map(Delta::SetRemoved));
    deltas
}

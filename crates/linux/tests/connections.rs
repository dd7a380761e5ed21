//! Connections of addresses that change hands: nobody inherits them, on the real kernel.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::cluster::*;
use tortie_dataplane::*;

#[test]
fn an_address_that_is_given_again_at_once_inherits_no_connection() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    assert_eq!(entries(&node), 1);
    node.change(|state| Arc::make_mut(state.endpoints.get_mut(&server.id()).unwrap()).mac = None);
    assert_eq!(entries(&node), 1, "the same sandbox keeps them");

    let next = Pod::new("next", 1, 3);
    let interface = node.namespace.run(|| node.wiring.connect(&next.attachment()).unwrap()).unwrap();
    let report = node.change(|state| {
        let mut endpoint = state.endpoints.remove(&server.id()).unwrap();
        let its = Arc::make_mut(&mut endpoint);
        (its.container_id, its.host_interface) = ("another".into(), interface.host_interface.into());
        state.endpoints.insert(next.id(), endpoint);
    });
    assert_eq!(report, Report::default());
    assert_eq!(entries(&node), 0);
}

/// A node on which a client has a connection to a server that then goes.
fn with_a_connection_that_is_over() -> (Node, Pod, Arc<Endpoint>) {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.add(&client, open());
    node.add(&server, open());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    assert_eq!(entries(&node), 1);
    let endpoint = node.state.endpoints[&server.id()].clone();
    node.change(|state| drop(state.endpoints.remove(&server.id())));
    (node, server, endpoint)
}

/// Nobody inherits the flows of a released address (semantics 21).
#[test]
fn connections_of_a_released_address_are_forgotten_in_a_while() {
    let (node, ..) = with_a_connection_that_is_over();
    let deadline = Instant::now() + Duration::from_secs(10);
    while entries(&node) > 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_address_that_is_used_again_inherits_no_connection() {
    let (mut node, server, mut endpoint) = with_a_connection_that_is_over();
    Arc::make_mut(&mut endpoint).container_id = "another".into();
    node.change(|state| drop(state.endpoints.insert(server.id(), endpoint)));
    assert_eq!(entries(&node), 0, "though they would be forgotten only later");
}

/// An agent that is killed may have had connections to forget.
#[test]
fn an_agent_that_starts_forgets_connections_of_addresses_that_nobody_has() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(open_profile);
    node.change(|state| drop(state.routes.insert("10.65.1.0/26".parse().unwrap(), RouteTarget::Local)));
    node.add(&client, open());
    node.add(&server, open());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    node.restart();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(entries(&node), 1, "theirs who are there stay");
    node.state.endpoints.remove(&server.id());
    node.restart();
    let deadline = Instant::now() + Duration::from_secs(10);
    while entries(&node) > 0 {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(5));
    }
}

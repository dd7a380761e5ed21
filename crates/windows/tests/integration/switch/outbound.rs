//! Packets of pods of an emulated Windows node to the outside, with real connections.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use tortie_api::calico::FelixConfigurationSpec;
use tortie_dataplane::{Delta, Settings};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};

use crate::switch::switched::*;

const NODE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 1);
const NEXT: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 2);
/// An address of the machine outside, which the node reaches by its address on the cable.
const FAR: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
/// For what must not come. TCP has sent its first packet twice by then.
const SILENCE: Duration = Duration::from_millis(1_800);

/// The machine outside knows the way to the pods, so it answers whatever address it sees.
fn route(on: &NetNs, destination: &str, by: Ipv4Addr) {
    on.run(|| {
        let link = tortie_kernel::interface_index("eth0").unwrap();
        let route = Route::via(destination.parse().unwrap(), by.into(), link, 3);
        RouteSocket::open().unwrap().change(&Change::AddRoute(route)).unwrap();
    })
    .unwrap();
}

fn pools(pools: &[(&str, bool)]) -> Delta {
    let pools: BTreeMap<_, _> = pools.iter().map(|(net, nat)| (net.parse().unwrap(), *nat)).collect();
    Delta::Settings(Arc::new(Settings::new(&FelixConfigurationSpec::default(), pools)))
}

/// The address by which a server outside sees the client of a pod.
fn seen(pod: &NetNs, outside: &NetNs, server: Ipv4Addr) -> Option<IpAddr> {
    let listener = outside.run(|| TcpListener::bind((server, 80)).unwrap()).unwrap();
    let mut client = pod.run(|| TcpStream::connect_timeout(&(server, 80).into(), SILENCE)).unwrap().ok()?;
    let (mut accepted, address) = listener.accept().unwrap();
    client.write_all(b"?").unwrap();
    let mut byte = [0];
    accepted.read_exact(&mut byte).unwrap();
    accepted.write_all(&byte).unwrap();
    client.read_exact(&mut byte).unwrap();
    Some(address.ip())
}

#[test]
fn packets_to_the_outside_have_the_address_that_the_pool_demands() {
    let [first, outside] = underlay();
    outside
        .run(|| {
            let link = tortie_kernel::interface_index("eth0").unwrap();
            let far = Address { link, address: FAR.into(), prefix_length: 32 };
            RouteSocket::open().unwrap().change(&Change::AddAddress(far)).unwrap();
        })
        .unwrap();
    route(&first, "198.51.100.0/24", NEXT);
    route(&outside, "10.244.0.0/16", NODE);
    let mut node = Node::new(1, first);
    let services = vec!["10.96.0.0/12".parse().unwrap()];
    node.dataplane = node.dataplane.map(|dataplane| dataplane.with_services(services));
    let nobody = tortie_dataplane::Vtep { parent: Ipv4Addr::new(172, 16, 0, 77).into(), ..node.vtep.clone() };
    node.start(&nobody, 2);
    node.apply(&[pools(&[("10.244.0.0/16", true)])]);
    node.add_pod(4);
    node.add_pod(5);
    let pod = IpAddr::from(node.pods[0].1);
    assert_eq!(seen(&node.pods[0].0, &outside, FAR), Some(NODE.into()), "natOutgoing");
    assert_eq!(seen(&node.pods[0].0, &outside, NEXT), Some(NODE.into()), "also to another node");

    // A pool without pods is an exception, too.
    node.apply(&[pools(&[("10.244.0.0/16", true), ("198.51.100.0/24", false)])]);
    assert_eq!(seen(&node.pods[0].0, &outside, FAR), Some(pod), "an exception");
    assert_eq!(seen(&node.pods[0].0, &outside, NEXT), Some(NODE.into()));

    node.apply(&[pools(&[("10.244.0.0/16", false)])]);
    assert_eq!(seen(&node.pods[0].0, &outside, FAR), Some(pod), "without natOutgoing");
    assert_eq!(talk(&node.pods[0].0, &node.pods[1]), Some(1_000_000), "pods reach each other as before");
    node.apply(&[pools(&[("10.244.0.0/16", true)])]);
    assert_eq!(talk(&node.pods[0].0, &node.pods[1]), Some(1_000_000));
    assert_eq!(seen(&node.pods[1].0, &outside, FAR), Some(NODE.into()), "the other pod");
}

//! NodePorts with real frames: a client outside of the cluster, the node itself and its pods, by load balancers as kube-proxy makes
//! them.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use crate::cluster::{Cluster, Location};
use serde_json::json;
use tortie_hcn::schema::{Endpoint, LoadBalancer, lenient};
use tortie_hcn::{Guid, HcnExt};

const NODE_PORT: u16 = 30_080;
const PATIENCE: Duration = Duration::from_secs(20);
/// An address of the node's block that no pod has.
const SOURCE_VIP: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 2);

/// Connects by the node's port, and returns the client's address as the server sees it.
fn through(from: &Location, node: Ipv4Addr, server: &Location) -> IpAddr {
    let listener = server.run(|| TcpListener::bind((server.address, 81)).unwrap());
    let to = (node, NODE_PORT).into();
    let mut client = from.run(|| TcpStream::connect_timeout(&to, PATIENCE)).unwrap();
    let (mut accepted, peer) = listener.accept().unwrap();
    for end in [&client, &accepted] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let mut heard = [0; 5];
    client.write_all(b"hello").unwrap();
    accepted.read_exact(&mut heard).unwrap();
    accepted.write_all(b"there").unwrap();
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"there");
    peer.ip()
}

#[test]
fn node_ports_lead_to_pods_of_every_node_for_every_client() {
    let cluster = Cluster::new();
    let node = &cluster.windows[0];
    let (pod, neighbour, far) = (node.pod(0), node.pod(1), cluster.windows[1].pod(0));
    let address = Ipv4Addr::new(172, 16, 0, 2);
    let remote = json!({"HostComputeNetwork": node.network, "Flags": 1, "MacAddress": "02-11-0a-f4-03-04",
        "IpConfigurations": [{"IpAddress": far.address}]});
    let remote = lenient::<Endpoint>(&remote.to_string()).unwrap();
    let remote = node.hns.create_endpoint(&remote).unwrap();
    let balance = |backend: Guid, more: serde_json::Value| {
        let port = json!({"Protocol": 6, "InternalPort": 81, "ExternalPort": NODE_PORT, "Flags": 18});
        let mut document = json!({"HostComputeEndpoints": [backend], "PortMappings": [port]});
        document.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        node.hns.create_load_balancer(&lenient::<LoadBalancer>(&document.to_string()).unwrap()).unwrap()
    };
    // The Linux node stands outside: it has no route to the node's overlay for this.
    let (linux, own) = (cluster.linux(), node.node());
    let hidden = IpAddr::V4(SOURCE_VIP);
    for (server, endpoint) in [(&pod, pod.endpoint), (&far, remote)] {
        let made = balance(endpoint, json!({"SourceVIP": SOURCE_VIP}));
        for client in [&linux, &own, &neighbour] {
            assert_eq!(through(client, address, server), hidden, "{} to {}", client.address, server.address);
        }
        node.hns.delete_load_balancer(made).unwrap();
    }
    let made = balance(pod.endpoint, json!({"Flags": 1}));
    assert_eq!(through(&linux, address, &pod), IpAddr::V4(Ipv4Addr::new(172, 16, 0, 1)));
    assert_eq!(through(&own, address, &pod), IpAddr::V4(address));
    assert_eq!(through(&neighbour, address, &pod), neighbour.address);
    node.hns.delete_load_balancer(made).unwrap();
    let to = (address, NODE_PORT).into();
    assert!(linux.run(|| TcpStream::connect_timeout(&to, Duration::from_millis(700))).is_err());
}

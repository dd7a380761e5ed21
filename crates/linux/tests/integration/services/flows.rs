//! Flows of UDP at former backends: a client that keeps its port reaches another one.

use std::net::SocketAddr;
use std::sync::Arc;

use tortie_api::net::{IpVersion, Protocol};
use tortie_linux::ServiceTable;
use tortie_services::*;

use super::node::{Begin, Fate, Node};
use super::setting::{USUAL, apply, at, backend, frontend, open, port};

const VIP: &str = "10.96.0.1";
const NODE_PORT: u16 = 30_053;
const BACKENDS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

struct Setting {
    node: Node,
    table: ServiceTable,
    id: Arc<ServicePortId>,
    former: Vec<&'static str>,
}

impl Setting {
    /// A Service without endpoints, at a clusterIP and a port of the node.
    fn new(protocol: Protocol, place: NodePortPlace) -> Self {
        let node = Node::new();
        let table = node.namespace.run(|| open(USUAL)).unwrap();
        let id = port("dns", protocol);
        let mut setting = Self { node, table, id: id.clone(), former: Vec::new() };
        let at_node =
            FrontendKey { address: FrontendAddress::NodePort(IpVersion::V4), protocol, port: NODE_PORT };
        setting.apply(&[
            ServicesDelta::NodePorts(IpVersion::V4, place),
            setting.change(&[], &[]),
            ServicesDelta::Frontend(
                at(VIP, protocol, 53),
                frontend(&id, FrontendKind::ClusterIp, TrafficPolicy::Cluster),
            ),
            ServicesDelta::Frontend(at_node, frontend(&id, FrontendKind::NodePort, TrafficPolicy::Cluster)),
        ]);
        setting
    }

    fn apply(&mut self, deltas: &[ServicesDelta]) {
        self.node.namespace.run(|| apply(&mut self.table, deltas)).unwrap().unwrap();
    }

    /// The change to these backends in the pool, and these that serve.
    fn change(&self, pool: &[&str], serving: &[&str]) -> ServicesDelta {
        let added = pool.iter().filter(|one| !self.former.contains(one)).map(|one| backend(one));
        let removed = self.former.iter().filter(|one| !pool.contains(one)).map(|one| backend(one));
        ServicesDelta::Port {
            id: self.id.clone(),
            has_endpoints: !pool.is_empty(),
            affinity: None,
            serving: serving.iter().map(|one| backend(one).socket()).collect(),
            cluster: PoolChange { added: added.collect(), removed: removed.collect() },
            local: PoolChange::default(),
        }
    }

    fn set(&mut self, pool: &[&'static str], serving: &[&str]) {
        let delta = self.change(pool, serving);
        self.apply(&[delta]);
        self.former = pool.to_vec();
    }

    /// The fates of packets with the same ports as before: to the clusterIP, to the node's two addresses, and to the same port elsewhere.
    fn send(&mut self) -> Vec<Option<Fate>> {
        let protocol = self.id.protocol;
        let begin = |sender, source: &str, destination: &str, port| Begin {
            sender,
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            protocol,
            port,
        };
        self.node.fates_of_known(&[
            begin(Sender::Pod, "10.0.0.3", VIP, 53),
            begin(Sender::Other, "203.0.113.5", "192.0.2.1", NODE_PORT),
            begin(Sender::Other, "203.0.113.5", "192.0.2.9", NODE_PORT),
            begin(Sender::Pod, "10.0.0.3", "203.0.113.99", NODE_PORT),
        ])
    }

    /// Where those packets arrive, in short; `-` if they do not.
    fn arrivals(&mut self) -> String {
        let fates = self.send();
        let short = fates.iter().map(|fate| match fate {
            Some(Fate::Arrived { destination, .. }) => destination.to_string(),
            _ => "-".to_owned(),
        });
        short.collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn flows_of_udp_leave_a_backend_that_does_not_serve() {
    let elsewhere = "203.0.113.99";
    let places = [
        (NodePortPlace::Primary("192.0.2.1".parse().ok()), false),
        (NodePortPlace::AllLocal, true),
        (NodePortPlace::LocalIn(vec!["192.0.2.8/29".parse().unwrap()]), true),
    ];
    for (place, has_second) in places {
        let has_first = !matches!(place, NodePortPlace::LocalIn(_));
        let mut setting = Setting::new(Protocol::UDP, place.clone());
        let [one, two] = BACKENDS;
        // The port of the node that is none of the Service's refuses, or answers itself.
        let at = |backend: &str| {
            let node = |has: bool| if has { backend } else { "-" };
            format!("{backend} {} {} {elsewhere}", node(has_first), node(has_second))
        };
        assert_eq!(setting.arrivals(), format!("- - - {elsewhere}"), "{place:?}: there is no backend");
        setting.set(&[one], &[one]);
        assert_eq!(setting.arrivals(), at(one), "{place:?}: the first backend");
        setting.set(&[two], &[one, two]);
        assert_eq!(setting.arrivals(), at(one), "{place:?}: it ends, and still serves");
        setting.set(&[two], &[two]);
        assert_eq!(setting.arrivals(), at(two), "{place:?}: it has ended");
        let is_stranger = |(to, _): &(SocketAddr, SocketAddr)| to.ip().to_string() == elsewhere;
        assert!(setting.node.tracked().iter().any(is_stranger), "{place:?}");
        setting.set(&[], &[]);
        assert_eq!(
            setting.arrivals(),
            format!("- - - {elsewhere}"),
            "{place:?}: there is no backend any more"
        );
        setting.set(&[one], &[one]);
        assert_eq!(setting.arrivals(), at(one), "{place:?}: there is one again");
        setting.apply(&[ServicesDelta::FrontendRemoved(self::at(VIP, Protocol::UDP, 53))]);
        assert!(setting.arrivals().starts_with("10.96.0.1 "), "{place:?}: nobody translates it");
    }
}

/// A client that keeps its port has sent to an address that accepted no node ports until now.
#[test]
fn flows_to_the_node_are_forgotten_when_it_gets_another_address() {
    let mut setting = Setting::new(Protocol::UDP, NodePortPlace::Primary("192.0.2.1".parse().ok()));
    setting.set(&[BACKENDS[0]], &[BACKENDS[0]]);
    assert_eq!(setting.arrivals(), "10.0.0.1 10.0.0.1 - 203.0.113.99");
    setting
        .apply(&[ServicesDelta::NodePorts(IpVersion::V4, NodePortPlace::Primary("192.0.2.9".parse().ok()))]);
    // The flow at the former address stays.
    assert_eq!(setting.arrivals(), "10.0.0.1 10.0.0.1 10.0.0.1 203.0.113.99");
}

#[test]
fn connections_of_tcp_stay() {
    let mut setting = Setting::new(Protocol::TCP, NodePortPlace::AllLocal);
    let [one, two] = BACKENDS;
    setting.set(&[one], &[]);
    setting.send();
    let before = setting.node.tracked();
    setting.set(&[two], &[]);
    assert_eq!(setting.node.tracked(), before);
}

/// Flows that began while the table was missing, or before the agent started.
#[test]
fn flows_without_translation_are_forgotten_at_a_repair() {
    let mut setting = Setting::new(Protocol::UDP, NodePortPlace::AllLocal);
    setting.set(&[BACKENDS[0]], &[BACKENDS[0]]);
    setting.node.namespace.run(super::random::delete_table).unwrap();
    assert!(setting.arrivals().starts_with("10.96.0.1 "));
    setting.node.namespace.run(|| setting.table.resync()).unwrap().unwrap();
    setting.node.namespace.run(|| setting.table.clean_up()).unwrap().unwrap();
    assert!(setting.arrivals().starts_with("10.0.0.1 10.0.0.1 10.0.0.1 "));

    setting.node.namespace.run(super::random::delete_table).unwrap();
    let mut next = setting.node.namespace.run(|| open(USUAL)).unwrap();
    assert!(setting.node.fates(&[]).is_empty());
    assert!(setting.arrivals().starts_with("10.96.0.1 "));
    let mut all = NodeServices::default();
    let deltas = [ServicesDelta::Frontend(
        at(VIP, Protocol::UDP, 53),
        frontend(&setting.id, FrontendKind::ClusterIp, TrafficPolicy::Cluster),
    )];
    setting.former = Vec::new();
    all.apply(&setting.change(&[BACKENDS[1]], &[BACKENDS[1]]));
    deltas.iter().for_each(|delta| all.apply(delta));
    setting.node.namespace.run(|| apply(&mut next, &super::setting::everything(&all))).unwrap().unwrap();
    assert!(setting.arrivals().starts_with("10.0.0.2 "));
}

//! Session affinity: how long clients are remembered, and what happens when the table changes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tortie_api::net::{IpVersion, Protocol};
use tortie_linux::ServiceTable;
use tortie_services::*;

use super::node::{Begin, Fate, Node};
use super::setting::{USUAL, apply, at, everything, frontend, open};

const VIPS: [&str; 2] = ["10.96.0.1", "fd96::1"];
const NODE_PORT: u16 = 30_080;
const CLIENTS: usize = 60;

struct Setting {
    node: Node,
    table: ServiceTable,
    services: NodeServices,
    ids: [Arc<ServicePortId>; 2],
}

fn backends(numbers: &[u8], is_v6: bool) -> BTreeSet<Backend> {
    let backend = |number: &u8| {
        let address = if is_v6 { format!("fd00::1:{number}") } else { format!("10.0.1.{number}") };
        Backend { address: address.parse().unwrap(), port: 8000 + u16::from(*number), is_local: false }
    };
    numbers.iter().map(backend).collect()
}

impl Setting {
    /// A Service of both families with these backends, and this time in seconds.
    fn new(numbers: &[u8], affinity: Option<u32>) -> Self {
        let node = Node::new();
        let table = node.namespace.run(|| open(USUAL)).unwrap();
        let ids = [IpVersion::V4, IpVersion::V6].map(|family| {
            let service = ServiceName { namespace: "ns".to_owned(), name: "s".to_owned() };
            Arc::new(ServicePortId { service, port: "http".to_owned(), protocol: Protocol::TCP, family })
        });
        let mut setting = Self { node, table, services: NodeServices::default(), ids };
        for (index, id) in setting.ids.clone().iter().enumerate() {
            let cluster = backends(numbers, index == 1);
            let port = ServicePort { has_endpoints: true, cluster, affinity, ..ServicePort::default() };
            setting.services.ports.insert(id.clone(), port);
            let by_node = FrontendKey {
                address: FrontendAddress::NodePort(id.family),
                protocol: Protocol::TCP,
                port: NODE_PORT,
            };
            for (key, kind) in [
                (at(VIPS[index], Protocol::TCP, 80), FrontendKind::ClusterIp),
                (by_node, FrontendKind::NodePort),
            ] {
                setting.services.frontends.insert(key, frontend(id, kind, TrafficPolicy::Cluster));
            }
            let primary = ["192.0.2.1", "2001:db8::1"][index].parse().ok();
            setting.services.node_ports.insert(id.family, NodePortPlace::Primary(primary));
        }
        let all = everything(&setting.services);
        setting.node.namespace.run(|| apply(&mut setting.table, &all)).unwrap().unwrap();
        setting
    }

    /// Changes the backends and the time.
    fn change(&mut self, numbers: &[u8], affinity: Option<u32>) {
        let mut deltas = Vec::new();
        for (index, id) in self.ids.iter().enumerate() {
            let (before, after) = (&self.services.ports[id].cluster, backends(numbers, index == 1));
            let cluster = PoolChange {
                added: after.difference(before).copied().collect(),
                removed: before.difference(&after).copied().collect(),
            };
            deltas.push(ServicesDelta::Port {
                id: id.clone(),
                has_endpoints: true,
                affinity,
                serving: BTreeSet::new(),
                cluster,
                local: PoolChange::default(),
            });
        }
        deltas.iter().for_each(|delta| self.services.apply(delta));
        self.node.namespace.run(|| apply(&mut self.table, &deltas)).unwrap().unwrap();
    }

    /// The backends that many clients of both families reach, by the clusterIP or by the port of the node.
    fn reached(&mut self, by_node: bool) -> Vec<(IpAddr, u16)> {
        let begin = |number: usize| {
            let (is_v6, client) = (number % 2 == 1, number / 2 + 1);
            let source =
                if is_v6 { format!("2001:db8:f::{client:x}") } else { format!("203.0.113.{client}") };
            let (destination, port) = match by_node {
                true => (["192.0.2.1", "2001:db8::1"][usize::from(is_v6)], NODE_PORT),
                false => (VIPS[usize::from(is_v6)], 80),
            };
            Begin {
                sender: Sender::Other,
                source: source.parse().unwrap(),
                destination: destination.parse().unwrap(),
                protocol: Protocol::TCP,
                port,
            }
        };
        let begins: Vec<Begin> = (0..CLIENTS).map(begin).collect();
        let fates = self.node.fates(&begins);
        let reached = fates.into_iter().map(|fate| match fate {
            Some(Fate::Arrived { destination, port, .. }) => (destination, port),
            fate => panic!("{fate:?}"),
        });
        reached.collect()
    }

    /// The number of clients that the kernel remembers.
    fn remembered(&self) -> usize {
        let count = || {
            let listing =
                std::process::Command::new("nft").args(["list", "table", "inet", "tortie-services"]).output();
            String::from_utf8(listing.unwrap().stdout).unwrap().matches(" expires ").count()
        };
        self.node.namespace.run(count).unwrap()
    }
}

fn differing<T: PartialEq>(one: &[T], other: &[T]) -> usize {
    one.iter().zip(other).filter(|(one, other)| one != other).count()
}

#[test]
fn clients_keep_their_backend_through_all_frontends_and_changes() {
    let mut setting = Setting::new(&[1, 2, 3, 4], Some(10_800));
    let first = setting.reached(false);
    let used: BTreeSet<_> = first.iter().collect();
    assert_eq!(used.len(), 8, "clients spread over the backends of both families");
    assert_eq!(setting.reached(true), first, "the port of the node");
    setting.change(&[1, 2, 3, 4, 5, 6], Some(10_800));
    assert_eq!(setting.reached(false), first, "backends have come");

    // One goes: its clients get others, and keep these, also when it comes back.
    setting.change(&[1, 3, 4, 5, 6], Some(10_800));
    let second = setting.reached(true);
    let is_gone = |(address, _): &(IpAddr, u16)| {
        ["10.0.1.2", "fd00::1:2"].iter().any(|gone| gone.parse() == Ok(*address))
    };
    let moved = first.iter().filter(|backend| is_gone(backend)).count();
    assert!(moved > 0 && !second.iter().any(is_gone));
    assert_eq!(differing(&first, &second), moved);
    setting.change(&[1, 2, 3, 4, 5, 6], Some(10_800));
    assert_eq!(setting.reached(false), second);

    // Another process finds the clients, and a repair keeps them.
    let mut next = setting.node.namespace.run(|| open(USUAL)).unwrap();
    let all = everything(&setting.services);
    setting.node.namespace.run(|| apply(&mut next, &all)).unwrap().unwrap();
    setting.table = next;
    assert_eq!(setting.reached(false), second);
    setting.node.namespace.run(|| setting.table.resync()).unwrap().unwrap();
    assert_eq!(setting.reached(false), second);

    // A backend that goes while no process runs.
    let id = setting.ids[0].clone();
    let port = setting.services.ports.get_mut(&id).unwrap();
    port.cluster = backends(&[1, 2, 4, 5, 6], false);
    let mut next = setting.node.namespace.run(|| open(USUAL)).unwrap();
    let all = everything(&setting.services);
    setting.node.namespace.run(|| apply(&mut next, &all)).unwrap().unwrap();
    setting.table = next;
    let third = setting.reached(false);
    let of_gone = second.iter().filter(|(address, _)| "10.0.1.3".parse() == Ok(*address)).count();
    assert_eq!(differing(&second, &third), of_gone);
    assert_eq!(setting.reached(false), third);

    assert!(setting.remembered() >= CLIENTS);

    // Without affinity, connections go anywhere, and nobody is remembered.
    setting.change(&[1, 2, 4, 5, 6], None);
    assert!(differing(&third, &setting.reached(false)) > CLIENTS / 3);
    setting.change(&[1, 2, 4, 5, 6, 7], None);
    assert_eq!(setting.remembered(), 0);
}

/// The time begins anew with each connection.
#[test]
fn clients_are_forgotten_when_they_have_not_connected_for_the_time() {
    let mut setting = Setting::new(&[1, 2, 3, 4, 5, 6, 7, 8], Some(2));
    let first = setting.reached(false);
    for _ in 0..4 {
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(setting.reached(false), first);
    }
    std::thread::sleep(Duration::from_millis(2_500));
    let second = setting.reached(false);
    assert!(differing(&first, &second) > CLIENTS / 3, "they are forgotten");

    // A longer time counts from the next connection on.
    setting.change(&[1, 2, 3, 4, 5, 6, 7, 8], Some(10_800));
    let third = setting.reached(false);
    assert_eq!(third, second);

    // A shorter one counts at once.
    setting.change(&[1, 2, 3, 4, 5, 6, 7, 8], Some(1));
    assert_eq!(setting.remembered(), 0);
    let fourth = setting.reached(false);
    assert!(differing(&third, &fourth) > CLIENTS / 3);
    assert_eq!(setting.reached(false), fourth);
}

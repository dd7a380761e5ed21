//! Random histories of objects. After each event, packets go where `evaluate` says, and the table is that of a computation from scratch.
#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::random::Random;
use testkit::services::{Event, NODE, OF_NODE, Sent, Settings, event, packet, settings};
use tortie_api::Key;
use tortie_api::net::{IpVersion, Protocol};
use tortie_kernel::nftables::{Data, Nft, Op, Set, Table, Transaction};
use tortie_linux::ServiceTable;
use tortie_oracle::{SERVICE_RULES, ServiceClient, ServiceCluster, judge_service};
use tortie_services::{
    FrontendKey, FrontendKind, KINDS, Masquerading, NodePortAddresses, Outcome, Packet, Sender,
    ServicePortId, Services, TrafficPolicy,
};

use super::node::{Begin, Fate, Node, PODS};
use super::setting::{TABLE, apply, everything, is_local, open, pods};

const CASES: u32 = 30;
const EVENTS: usize = 14;
const PACKETS: usize = 40;
/// The fewest packets by each rule.
const FEWEST: usize = 25;
/// Hints are not the dataplane's.
const LEFT_OUT: [&str; 2] = ["hints of nodes", "hints of zones"];
/// The rule about session affinity, which the test counts itself: the oracle knows neither the backends of earlier packets nor the pools.
const REMEMBERED: &str = "remembered";

type Step = (Event, Vec<Sent>);

#[test]
fn packets_go_where_evaluate_says_after_each_event() {
    let step = (event(), prop::collection::vec(packet(), PACKETS));
    let strategy = (settings(), prop::collection::vec(step, EVENTS));
    let seen: RefCell<BTreeMap<&str, usize>> = RefCell::default();
    let (node, scratch) = (RefCell::new(Node::new()), Node::new());
    let test = |(settings, steps): (Settings, Vec<Step>)| {
        let mut node = node.borrow_mut();
        let history = History::new(&settings, &node, &scratch);
        history.run(&mut node, &steps, &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    };
    let lacking = || {
        let seen = seen.borrow();
        let count = |rule: &str| seen.get(rule).copied().unwrap_or_default();
        let rules = SERVICE_RULES.iter().filter(|rule| !LEFT_OUT.contains(rule));
        let rule = rules.into_iter().find(|rule| count(rule) < FEWEST)?;
        Some(format!("{rule}: {} packets, {FEWEST} at least", count(rule)))
    };
    let result = Random::cases(CASES).shrinking(60).prove(&strategy, test, lacking);
    for (rule, count) in seen.borrow().iter() {
        println!("{rule:28} {count:>8}");
    }
    if let Err(error) = result {
        panic!("{error}");
    }
}

struct History<'a> {
    settings: &'a Settings,
    objects: BTreeMap<Key, Value>,
    services: Services,
    table: ServiceTable,
    scratch: &'a Node,
    /// The backend of each client of a pool.
    clients: BTreeMap<(Pool, IpAddr), SocketAddr>,
}

/// A port of a Service, and whether the pool is that of this node.
type Pool = (Arc<ServicePortId>, bool);

impl<'a> History<'a> {
    fn new(settings: &'a Settings, node: &Node, scratch: &'a Node) -> Self {
        node.namespace.run(delete_table).unwrap();
        let addresses = settings.node_port_addresses.clone();
        let addresses = addresses.map_or(NodePortAddresses::Primary, NodePortAddresses::In);
        let mut services = Services::new(NODE, addresses);
        KINDS.into_iter().for_each(|kind| services.listed(kind));
        let table = node.namespace.run(|| open(masquerading(settings))).unwrap();
        Self { settings, objects: BTreeMap::new(), services, table, scratch, clients: BTreeMap::new() }
    }

    fn run(
        mut self,
        node: &mut Node,
        steps: &[Step],
        seen: &mut BTreeMap<&'static str, usize>,
    ) -> Result<(), String> {
        for (event, packets) in steps {
            let value = event.value.clone().map(suitable);
            self.services.update(&event.key, value.as_ref());
            match value {
                Some(value) => drop(self.objects.insert(event.key.clone(), value)),
                None => drop(self.objects.remove(&event.key)),
            }
            let deltas = self.services.flush().unwrap();
            node.namespace
                .run(|| apply(&mut self.table, &deltas))
                .unwrap()
                .map_err(|error| error.to_string())?;
            self.forget_clients();
            self.compare(node)?;
            self.judge(node, packets, seen)?;
        }
        self.compare_with_scratch()
    }

    /// The kernel has the desired table, and what goes with the next change: slots that are not counted any more, and units of session
    /// affinity that no frontend uses any more.
    fn compare(&self, node: &Node) -> Result<(), String> {
        let mut kernel = node.namespace.run(list).unwrap();
        let desired = self.table.desired();
        let is_of_unit = |name: &str| name.contains("4-") || name.contains("6-");
        kernel.sets.retain(|name, _| !name.starts_with("clients") || desired.sets.contains_key(name));
        kernel.chains.retain(|name, _| !is_of_unit(name) || desired.chains.contains_key(name));
        let goes = |name: &str| name.contains("slots") || ["remembered", "learning"].contains(&name);
        for (name, set) in kernel.sets.iter_mut().filter(|(name, _)| goes(name)) {
            set.elements.retain(|key, _| desired.sets[name].elements.contains_key(key));
        }
        if kernel == desired { Ok(()) } else { Err(differences(&kernel, &desired)) }
    }

    /// Another dataplane that gets everything at once has the same table, except for the order of slots and for classes of the past.
    fn compare_with_scratch(&self) -> Result<(), String> {
        let anew = || {
            delete_table();
            let mut table = open(masquerading(self.settings));
            table.apply(&everything(self.services.state()), &pods()).map(|()| table.desired())
        };
        let scratch = self.scratch.namespace.run(anew).unwrap().map_err(|error| error.to_string())?;
        let mut own = self.table.desired();
        own.chains.retain(|name, _| scratch.chains.contains_key(name));
        let classes = scratch.sets["classes"].clone();
        if let Some(set) = own.sets.get_mut("classes") {
            set.elements.retain(|key, _| classes.elements.contains_key(key));
        }
        let (own, scratch) = (without_order(own), without_order(scratch));
        if own == scratch { Ok(()) } else { Err(format!("{own:#?}\nfrom scratch:\n{scratch:#?}")) }
    }

    /// A client is forgotten when its backend leaves the pool, or when no frontend leads to the pool.
    fn forget_clients(&mut self) {
        let services = self.services.state();
        let used = |pool: &Pool| {
            services.frontends.values().any(|frontend| {
                let is_internal = frontend.kind == FrontendKind::ClusterIp;
                let is_local = frontend.policy == TrafficPolicy::Local;
                // Pods and the node reach all backends by an external frontend.
                frontend.service_port == pool.0 && (is_local == pool.1 || !is_internal && is_local)
            })
        };
        self.clients.retain(|(pool, _), backend| {
            let port = services.ports.get(&pool.0).filter(|port| port.affinity.is_some());
            let backends = port.map(|port| if pool.1 { &port.local } else { &port.cluster });
            used(pool) && backends.is_some_and(|all| all.iter().any(|one| one.socket() == *backend))
        });
    }

    /// The pool to which a packet is led, if the port of the Service has session affinity.
    fn pool_of(&self, packet: &Packet) -> Option<Pool> {
        let services = self.services.state();
        let frontend = services.frontend(packet)?;
        services.ports.get(&frontend.service_port)?.affinity?;
        let is_inside = match packet.sender {
            Sender::Pod => self.settings.knows_pods,
            Sender::Node => true,
            Sender::Other => false,
        };
        let is_local = frontend.policy == TrafficPolicy::Local
            && (frontend.kind == FrontendKind::ClusterIp || !is_inside);
        Some((frontend.service_port.clone(), is_local))
    }

    fn judge(
        &mut self,
        node: &mut Node,
        packets: &[Sent],
        seen: &mut BTreeMap<&'static str, usize>,
    ) -> Result<(), String> {
        let frontends: Vec<FrontendKey> = self.services.state().frontends.keys().copied().collect();
        let objects: Vec<Value> = self.objects.values().cloned().collect();
        let cluster = ServiceCluster {
            node: NODE,
            objects: &objects,
            node_port_addresses: self.settings.node_port_addresses.as_deref(),
            masquerade_all: self.settings.masquerade_all,
            knows_pods: self.settings.knows_pods,
        };
        let mut asked = Vec::new();
        for sent in packets {
            let mut sent = sent.aimed(&frontends);
            // A packet to a loopback address does not leave its sender, and only pods of this node are here.
            if sent.destination.is_loopback() || sent.sender == ServiceClient::Pod && !is_local(sent.source) {
                continue;
            }
            if sent.source == sent.destination {
                continue;
            }
            sent.is_to_node = OF_NODE.iter().any(|own| own.parse() == Ok(sent.destination));
            for rule in judge_service(&cluster, &sent, &[], 0).rules {
                assert_ne!(rule, REMEMBERED);
                *seen.entry(rule).or_default() += 1;
            }
            asked.push(Packet {
                source: sent.source,
                sender: match sent.sender {
                    ServiceClient::Pod => Sender::Pod,
                    ServiceClient::Node => Sender::Node,
                    ServiceClient::Other => Sender::Other,
                },
                destination: sent.destination,
                is_to_node: sent.is_to_node,
                protocol: Protocol::from_name(sent.protocol).unwrap(),
                port: sent.port,
            });
        }
        let begins: Vec<Begin> = asked.iter().map(begin).collect();
        for (packet, fate) in asked.iter().zip(node.fates(&begins)) {
            let client = self.pool_of(packet).map(|pool| (pool, packet.source));
            let known: BTreeSet<SocketAddr> =
                client.iter().filter_map(|client| self.clients.get(client)).copied().collect();
            let outcome = self.services.state().evaluate(packet, masquerading(self.settings), &known);
            if !agrees(packet, &outcome, fate) {
                let services = self.services.state();
                return Err(format!("{packet:?}: {fate:?}, but {outcome:?} ({known:?})\n{services:#?}"));
            }
            if let (Outcome::Translated(_), Some(client), Some(Fate::Arrived { destination, port, .. })) =
                (outcome, client, fate)
            {
                *seen.entry(REMEMBERED).or_default() += usize::from(!known.is_empty());
                self.clients.insert(client, SocketAddr::new(destination, port));
            }
        }
        Ok(())
    }
}

/// The object with long session affinity, and with pods that are always on the same node.
fn suitable(mut value: Value) -> Value {
    if value["kind"] == "Service" {
        value["spec"]["sessionAffinityConfig"] = Value::Null;
    }
    for endpoint in value["endpoints"].as_array_mut().into_iter().flatten() {
        let address = endpoint["addresses"][0].as_str().unwrap_or_default();
        endpoint["nodeName"] = if PODS.contains(&address) { json!(NODE) } else { json!("n2") };
    }
    value
}

fn masquerading(settings: &Settings) -> Masquerading {
    Masquerading { all: settings.masquerade_all, knows_pods: settings.knows_pods }
}

fn begin(packet: &Packet) -> Begin {
    let is_v6 = IpVersion::of(&packet.source) == IpVersion::V6;
    let protocol = match packet.protocol {
        Protocol::ICMP if is_v6 => Protocol::ICMPV6,
        protocol => protocol,
    };
    let Packet { sender, source, destination, port, .. } = *packet;
    Begin { sender, source, destination, protocol, port }
}

fn agrees(packet: &Packet, outcome: &Outcome, fate: Option<Fate>) -> bool {
    let is_of_node = |address| OF_NODE.iter().any(|own| own.parse() == Ok(address));
    match (outcome, fate) {
        (Outcome::Dropped, fate) => fate.is_none(),
        (Outcome::Rejected, fate) => fate == Some(Fate::Refused),
        // The node itself answers, or has nothing to say.
        (Outcome::Untouched, Some(Fate::Arrived { destination, .. })) if packet.is_to_node => {
            [packet.destination, packet.source].contains(&destination)
        }
        (Outcome::Untouched, None | Some(Fate::Refused)) => packet.is_to_node,
        (Outcome::Untouched, Some(Fate::Arrived { source, destination, port })) => {
            (source, destination, port) == (packet.source, packet.destination, packet.port)
        }
        (Outcome::Translated(all), Some(Fate::Arrived { source, destination, port })) => {
            all.iter().any(|one| {
                let is_there = (one.backend.address, one.backend.port) == (destination, port);
                let is_right = match one.masquerade {
                    true => is_of_node(source),
                    false => source == packet.source,
                };
                is_there && is_right
            })
        }
        (Outcome::Translated(_), _) => false,
    }
}

pub(super) fn delete_table() {
    let mut nft = Nft::open().unwrap();
    if nft.list(TABLE).unwrap().is_some() {
        nft.commit(&Transaction { table: TABLE.to_owned(), ops: vec![Op::DeleteTable] }).unwrap();
    }
}

pub(super) fn list() -> Table {
    Nft::open().unwrap().list(TABLE).unwrap().unwrap()
}

pub(super) fn differences(actual: &Table, desired: &Table) -> String {
    let ops = tortie_kernel::nftables::diff(TABLE, desired, Some(actual)).ops;
    format!("the kernel's table differs: {ops:#?}")
}

/// The backends by the bytes of their frontend.
type Backends = BTreeMap<Vec<u8>, Vec<Data>>;

/// The backends of each frontend, sorted, in the place of their slots.
fn without_order(mut table: Table) -> (Table, BTreeMap<String, Backends>) {
    let mut all = BTreeMap::new();
    for (name, set) in table.sets.iter_mut().filter(|(name, _)| name.contains("slots")) {
        let Set { elements, .. } = set;
        let mut backends = Backends::new();
        for (key, value) in std::mem::take(elements) {
            let frontend = key.bytes()[..key.bytes().len() - 4].to_vec();
            backends.entry(frontend).or_default().extend(value.data().cloned());
        }
        for list in backends.values_mut() {
            list.sort_by_key(|data| format!("{data:?}"));
        }
        all.insert(name.clone(), backends);
    }
    (table, all)
}

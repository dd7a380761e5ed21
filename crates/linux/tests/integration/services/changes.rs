//! After each transaction of a change, a packet finds a backend, whatever it has read before the transaction.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use testkit::random::Random;
use tortie_api::net::Protocol;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Data, Element, Op, Table};
use tortie_linux::{ServiceTable, ServicesConfig};
use tortie_services::*;

use super::random::{delete_table, list};
use super::setting::{USUAL, add_port, at, backend, everything, frontend, pods, port};
use crate::common::filtering::AfterEachTransaction;

const CASES: u32 = 25;
const PODS: [&str; 5] = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"];

/// The classes and the slots of the frontends, as far as the test has any.
fn counted(table: &Table) -> Vec<(tortie_kernel::nftables::Key, u32)> {
    let elements = table.sets["class4"].elements.iter();
    let number = |data: Option<&Data>| match data {
        Some(Data::Number(number)) => *number & 0xffff,
        other => panic!("{other:?}"),
    };
    elements.map(|(key, value)| (*key, number(value.data()))).collect()
}

/// The slots that classes count and that are missing.
fn missing(classes: &Table, slots: &Table) -> Vec<String> {
    let slots = &slots.sets["slots4"].elements;
    let all = counted(classes).into_iter().flat_map(|(key, count)| (0..count).map(move |slot| (key, slot)));
    let is_missing = |(key, slot): &(tortie_kernel::nftables::Key, u32)| {
        !slots.contains_key(&key.and(&slot.to_ne_bytes()).unwrap())
    };
    all.filter(is_missing).map(|(key, slot)| format!("{key:?} {slot}")).collect()
}

#[test]
fn slots_come_before_their_class_and_go_after_it() {
    let pools = prop::collection::vec(prop::collection::btree_set(0..PODS.len(), 0..=PODS.len()), 2..8);
    let test = |(pools, small): (Vec<BTreeSet<usize>>, bool)| {
        delete_table();
        let transaction_bytes = if small { 6_000 } else { usize::MAX };
        let config = ServicesConfig { masquerading: USUAL, transaction_bytes, ..ServicesConfig::default() };
        let mut table = ServiceTable::open(config).unwrap();
        table.apply(&[], &pods()).unwrap();
        let states: Arc<Mutex<Vec<Table>>> = Arc::default();
        let noted = states.clone();
        let note = move || noted.lock().unwrap().push(list());
        let mut before = BTreeSet::new();
        tracing::subscriber::with_default(AfterEachTransaction(note), || {
            let mut services = NodeServices::default();
            let id = port("p", Protocol::TCP);
            add_port(&mut services, &id, &[]);
            for number in 80..84 {
                let key = at("10.96.0.1", Protocol::TCP, number);
                let cluster = frontend(&id, FrontendKind::ClusterIp, TrafficPolicy::Cluster);
                services.frontends.insert(key, cluster);
            }
            table.apply(&everything(&services), &pods()).unwrap();
            for pool in &pools {
                let pool: BTreeSet<Backend> = pool.iter().map(|pod| backend(PODS[*pod])).collect();
                let cluster = PoolChange {
                    added: pool.difference(&before).copied().collect(),
                    removed: before.difference(&pool).copied().collect(),
                };
                let has_endpoints = !pool.is_empty();
                let local = PoolChange::default();
                let id = id.clone();
                let delta = ServicesDelta::Port {
                    id,
                    has_endpoints,
                    affinity: None,
                    serving: BTreeSet::new(),
                    cluster,
                    local,
                };
                table.apply(&[delta], &pods()).unwrap();
                before = pool;
            }
        });
        let states = states.lock().unwrap();
        for pair in states.windows(2) {
            let [earlier, later] = pair else { continue };
            for (classes, slots) in [(earlier, earlier), (later, later), (earlier, later)] {
                let missing = missing(classes, slots);
                prop_assert!(missing.is_empty(), "{missing:?}");
            }
        }
        Ok(())
    };
    let run = || Random::cases(CASES).run(&(pools, any::<bool>()), test);
    if let Err(error) = NetNs::create().unwrap().run(run).unwrap() {
        panic!("{error}");
    }
}

/// The elements of one backend that comes or goes, however many Services and backends there are.
#[test]
fn a_change_writes_few_elements() {
    let elements = |services: u16, backends: &[&str]| {
        let run = || {
            let mut table = super::setting::open(USUAL);
            let mut all = NodeServices::default();
            for number in 0..services {
                let id = port(&number.to_string(), Protocol::TCP);
                add_port(&mut all, &id, backends);
                let cluster = frontend(&id, FrontendKind::ClusterIp, TrafficPolicy::Cluster);
                all.frontends.insert(at("10.96.0.1", Protocol::TCP, 1 + number), cluster);
            }
            table.apply(&everything(&all), &pods()).unwrap();
            let (before, id) = (list(), port("0", Protocol::TCP));
            let cluster = PoolChange { added: Vec::new(), removed: vec![backend(backends[0])] };
            let local = PoolChange::default();
            let delta = ServicesDelta::Port {
                id,
                has_endpoints: true,
                affinity: None,
                serving: BTreeSet::new(),
                cluster,
                local,
            };
            table.apply(&[delta], &pods()).unwrap();
            table.resync().unwrap();
            let ops = tortie_kernel::nftables::diff("t", &list(), Some(&before)).ops;
            let count = |op: &Op| match op {
                Op::AddElements(_, _, all) | Op::DeleteElements(_, _, all) => Vec::<Element>::len(all),
                _ => 0,
            };
            ops.iter().map(count).sum::<usize>()
        };
        NetNs::create().unwrap().run(run).unwrap()
    };
    let few = elements(2, &PODS[..3]);
    assert_eq!(elements(200, &PODS), few, "it depends on the number of Services or of backends");
}

//! Tables that others have changed, and tables of an earlier process.

use proptest::prelude::*;
use proptest::sample::Index;
use testkit::random::Random;
use tortie_api::net::Protocol;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::others::current_generation;
use tortie_kernel::nftables::{Chain, Nft, Op, Table, Transaction};
use tortie_linux::ServiceTable;
use tortie_services::*;

use super::random::{delete_table, differences, list};
use super::setting::{TABLE, USUAL, add_port, at, everything, frontend, open, pods, port};

const CASES: u32 = 40;

fn services() -> NodeServices {
    let mut services = NodeServices::default();
    let backends = ["10.0.0.1", "10.0.0.2", "10.0.0.4"];
    for count in 0..=backends.len() {
        let id = port(&count.to_string(), Protocol::TCP);
        add_port(&mut services, &id, &backends[..count]);
        let number = 80 + count as u16;
        let cluster = frontend(&id, FrontendKind::ClusterIp, TrafficPolicy::Cluster);
        services.frontends.insert(at("10.96.0.1", Protocol::TCP, number), cluster);
        let ranges = Some(vec!["203.0.113.0/25".parse().unwrap()]);
        let external = frontend(&id, FrontendKind::LoadBalancer, TrafficPolicy::Local);
        let external = Frontend { source_ranges: ranges, ..external };
        services.frontends.insert(at("198.51.100.7", Protocol::TCP, number), external);
    }
    services.cluster_ips.insert("10.96.0.1".parse().unwrap());
    services.service_cidrs.insert("10.96.0.0/16".parse().unwrap());
    services
}

/// A change by somebody else.
#[derive(Debug, Clone)]
enum Damage {
    Flushed,
    Emptied(Index),
    WithoutRules(Index),
    WithoutElement(Index, Index),
    Foreign,
    OtherValue(Index, Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::Flushed),
        any::<Index>().prop_map(Damage::Emptied),
        any::<Index>().prop_map(Damage::WithoutRules),
        (any::<Index>(), any::<Index>()).prop_map(|(set, element)| Damage::WithoutElement(set, element)),
        Just(Damage::Foreign),
        (any::<Index>(), any::<Index>()).prop_map(|(set, element)| Damage::OtherValue(set, element)),
    ]
}

impl Damage {
    fn harm(&self, table: &mut Table) {
        let filled = |table: &Table, is_map: bool| -> Vec<String> {
            let has = |set: &tortie_kernel::nftables::Set| !set.elements.is_empty();
            let all = table.sets.iter().filter(|(_, set)| has(set));
            all.filter(|(_, set)| !is_map || set.spec.data.is_some()).map(|(name, _)| name.clone()).collect()
        };
        match self {
            Self::Flushed => {}
            Self::Emptied(index) => {
                let names = filled(table, false);
                if let Some(name) = (!names.is_empty()).then(|| index.get(&names)) {
                    table.sets.get_mut(name).unwrap().elements.clear();
                }
            }
            Self::WithoutRules(index) => {
                let names: Vec<_> = table.chains.keys().cloned().collect();
                table.chains.get_mut(index.get(&names)).unwrap().rules.clear();
            }
            Self::WithoutElement(index, element) => {
                let names = filled(table, false);
                if names.is_empty() {
                    return;
                }
                let set = table.sets.get_mut(index.get(&names)).unwrap();
                let keys: Vec<_> = set.elements.keys().copied().collect();
                set.elements.remove(element.get(&keys));
            }
            Self::Foreign => drop(table.chains.insert("foreign".to_owned(), Chain::default())),
            Self::OtherValue(index, element) => {
                let names = filled(table, true);
                if names.is_empty() {
                    return;
                }
                let set = table.sets.get_mut(index.get(&names)).unwrap();
                let keys: Vec<_> = set.elements.keys().copied().collect();
                let values: Vec<_> = set.elements.values().cloned().collect();
                set.elements.insert(*element.get(&keys), values[0].clone());
            }
        }
    }
}

#[test]
fn a_comparison_repairs_what_others_have_changed() {
    let test = |damages: Vec<Damage>| {
        let mut table = open(USUAL);
        delete_table();
        table.apply(&everything(&services()), &pods()).unwrap();
        let desired = table.desired();
        let mut harmed = list();
        damages.iter().for_each(|damage| damage.harm(&mut harmed));
        if damages.iter().any(|damage| matches!(damage, Damage::Flushed)) {
            delete_table();
        } else {
            let transaction = tortie_kernel::nftables::diff(TABLE, &harmed, Some(&desired));
            Nft::open().unwrap().commit(&transaction).unwrap();
        }
        table.resync().unwrap();
        let kernel = list();
        prop_assert!(kernel == desired, "{}", differences(&kernel, &desired));
        Ok(())
    };
    let strategy = prop::collection::vec(damage(), 1..4);
    let run = || Random::cases(CASES).run(&strategy, test);
    if let Err(error) = NetNs::create().unwrap().run(run).unwrap() {
        panic!("{error}");
    }
}

/// A change that meets a changed table ends with the right one.
#[test]
fn a_change_of_a_changed_table_is_made() {
    let run = || {
        let mut table = open(USUAL);
        table.apply(&everything(&services()), &pods()).unwrap();
        delete_table();
        let id = port("2", Protocol::TCP);
        let removed = vec![super::setting::backend("10.0.0.1")];
        let change = PoolChange { added: Vec::new(), removed };
        let (cluster, local) = (change.clone(), change);
        let delta = ServicesDelta::Port {
            id,
            has_endpoints: true,
            affinity: None,
            serving: Default::default(),
            cluster,
            local,
        };
        table.apply(&[delta], &pods()).unwrap();
        assert_eq!(list(), table.desired());
    };
    NetNs::create().unwrap().run(run).unwrap();
}

/// The slots of an earlier process depend on its history, and stay.
#[test]
fn a_new_process_writes_nothing_if_nothing_has_changed() {
    let run = || {
        let mut table = open(USUAL);
        table.apply(&everything(&services()), &pods()).unwrap();
        let id = port("3", Protocol::TCP);
        let move_local = |added: Vec<Backend>, removed: Vec<Backend>| {
            let cluster = PoolChange { added, removed };
            let local = cluster.clone();
            ServicesDelta::Port {
                id: id.clone(),
                has_endpoints: true,
                affinity: None,
                serving: Default::default(),
                cluster,
                local,
            }
        };
        let first = super::setting::backend("10.0.0.1");
        table.apply(&[move_local(Vec::new(), vec![first])], &pods()).unwrap();
        table.apply(&[move_local(vec![first], Vec::new())], &pods()).unwrap();
        table.resync().unwrap();
        let before = (current_generation().unwrap(), list());
        let mut next: ServiceTable = open(USUAL);
        next.apply(&everything(&services()), &pods()).unwrap();
        assert_eq!((current_generation().unwrap(), list()), before);
        let mut fresh = services();
        let key = at("10.96.0.1", Protocol::TCP, 83);
        fresh.frontends.remove(&key);
        let mut other = open(USUAL);
        other.apply(&everything(&fresh), &pods()).unwrap();
        assert_eq!(list(), other.desired());
        assert!(!list().sets["class4"].elements.is_empty());
    };
    NetNs::create().unwrap().run(run).unwrap();
}

#[test]
fn a_refusal_names_the_table_and_the_remedy() {
    let run = || {
        let mut owner = Nft::open().unwrap();
        let ops = vec![Op::AddTable(Table::OWNER)];
        owner.commit(&Transaction { table: TABLE.to_owned(), ops }).unwrap();
        let error = open(USUAL).apply(&everything(&services()), &pods()).unwrap_err().to_string();
        assert!(error.contains(TABLE) && error.contains("stop what else changes this table"), "{error}");
    };
    NetNs::create().unwrap().run(run).unwrap();
}

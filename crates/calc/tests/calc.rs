//! Whatever the order and the batching of updates, what comes out is what a from-scratch computation gives; each delta
//! changes something, and names nothing that does not exist yet.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use ipnet::IpNet;
use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpointSpec;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, Resource};
use tortie_calc::Calc;
use tortie_dataplane::{Delta, Endpoint, EndpointId, NodeState, RouteTarget};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, Member, PolicyId, PolicyKind, SetId, SetKind, TierProgram,
};
use tortie_policy::{Compiled, SetSource, SubjectLabels, compile, compile_profile, namespace_profile};

const NODE: &str = "n0";
type Objects = BTreeMap<Key, Value>;

/// The node's state from the objects, straight from the text of the architecture: no index, no memory.
fn from_scratch(objects: &Objects) -> NodeState {
    let mut state = NodeState::default();
    let labels_of = |kind: Kind, namespace: &str, name: &str| {
        let value = objects.get(&Key { kind, namespace: namespace.to_owned(), name: name.to_owned() })?;
        let labels = value["metadata"]["labels"].as_object().cloned().unwrap_or_default();
        Some(labels.into_iter().map(|(k, v)| (k, v.as_str().unwrap().to_owned())).collect::<BTreeMap<_, _>>())
    };
    let policies: Vec<Compiled> = objects.iter().filter_map(|(key, value)| compile(key, value)).collect();
    let profile_of = |name: &String| match objects.get(&Key::global(Kind::Profile, name)) {
        Some(value) => match Resource::read(&Key::global(Kind::Profile, name), value) {
            Ok(Resource::Profile(profile)) => Some(profile),
            other => panic!("{other:?}"),
        },
        None => None,
    };
    let mut pods = Vec::new();
    let mut network_sets = Vec::new();
    for (key, value) in objects {
        let namespace_labels = labels_of(Kind::Namespace, "", &key.namespace);
        match Resource::read(key, value) {
            Ok(Resource::WorkloadEndpoint(endpoint)) => {
                let account = endpoint.spec.service_account_name.clone();
                let account_labels = labels_of(Kind::ServiceAccount, &key.namespace, &account);
                let inherited: Vec<_> = endpoint
                    .spec
                    .profiles
                    .iter()
                    .filter_map(profile_of)
                    .map(|profile| profile.spec.labels_to_apply)
                    .collect();
                let labels = SubjectLabels {
                    is_pod: true,
                    own: endpoint.metadata.labels.into(),
                    namespace: key.namespace.clone(),
                    namespace_labels: namespace_labels.map(Into::into),
                    service_account: account,
                    service_account_labels: account_labels.map(Into::into),
                    profiles: inherited.into_iter().map(Into::into).collect(),
                };
                pods.push((key.clone(), endpoint.spec, labels));
            }
            Ok(Resource::NetworkSet(set) | Resource::GlobalNetworkSet(set)) => {
                let labels = SubjectLabels {
                    own: set.metadata.labels.into(),
                    namespace: key.namespace.clone(),
                    namespace_labels: namespace_labels.map(Into::into),
                    ..SubjectLabels::default()
                };
                network_sets.push((labels, set.spec.nets));
            }
            _ => {}
        }
    }
    let name_sets = |sets: &BTreeMap<SetId, SetSource>, state: &mut NodeState| {
        for (id, source) in sets {
            let entry = match source {
                SetSource::Selector(selector) => {
                    let addresses = pods.iter().filter(|(_, _, labels)| selector.matches(labels));
                    let addresses = addresses
                        .flat_map(|(_, spec, _)| spec.ip_networks.iter().map(|net| IpNet::from(net.addr())));
                    let nets = network_sets.iter().filter(|(labels, _)| selector.matches(labels));
                    let nets = nets.flat_map(|(_, nets)| nets.iter().map(|net| net.0));
                    (SetKind::Nets, addresses.chain(nets).map(Member::Net).collect())
                }
                named => (
                    SetKind::AddressPorts,
                    pods.iter()
                        .flat_map(|(_, spec, labels)| named_port_members(named, spec, labels))
                        .collect(),
                ),
            };
            state.sets.insert(id.clone(), entry);
        }
    };
    for (key, spec, labels) in pods.iter().filter(|(_, spec, _)| spec.node == NODE) {
        let (ingress, egress) = (
            tiers_from_scratch(objects, &policies, labels, |policy| policy.ingress),
            tiers_from_scratch(objects, &policies, labels, |policy| policy.egress),
        );
        let mut profiles = Vec::new();
        for name in &spec.profiles {
            let id = PolicyId { kind: PolicyKind::Profile, namespace: String::new(), name: name.clone() };
            if let Some(profile) = profile_of(name) {
                let (rules, sets) = compile_profile(&profile);
                state.policies.insert(id.clone(), Arc::new(rules));
                name_sets(&sets, &mut state);
            } else if *name == format!("kns.{}", key.namespace)
                && objects.contains_key(&Key::global(Kind::Namespace, &key.namespace))
            {
                state.policies.insert(id.clone(), Arc::new(namespace_profile(&key.namespace).1));
            } else {
                continue;
            }
            profiles.push(id);
        }
        let program = EndpointProgram { ingress, egress, profiles };
        for policy in policies.iter().filter(|policy| program.policy_ids().any(|id| *id == policy.id)) {
            state.policies.insert(policy.id.clone(), policy.rules.clone());
            name_sets(&policy.sets, &mut state);
        }
        let id =
            EndpointId { namespace: key.namespace.clone(), pod: spec.pod.clone(), interface: "eth0".into() };
        let addresses = spec.ip_networks.iter().map(IpNet::addr).collect();
        let endpoint = Endpoint {
            container_id: spec.container_id.clone(),
            host_interface: spec.interface_name.clone(),
            addresses,
            mac: None,
            program,
        };
        state.endpoints.insert(id, Arc::new(endpoint));
    }
    network_from_scratch(objects, &mut state);
    state
}

/// Tier by tier: those that are stored by order, then `default` where it is not stored, then the unknown.
fn tiers_from_scratch(
    objects: &Objects,
    policies: &[Compiled],
    labels: &SubjectLabels,
    speaks: impl Fn(&Compiled) -> bool,
) -> Vec<TierProgram> {
    let mut names: Vec<&str> = policies.iter().map(|policy| policy.tier.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let described = |name: &str| match objects.get(&Key::global(Kind::Tier, name)) {
        Some(tier) => Some((
            tier["spec"]["order"].as_f64().unwrap_or(f64::INFINITY),
            tier["spec"]["defaultAction"] == "Pass",
        )),
        None if name == "default" => Some((1e6, false)),
        None => None,
    };
    let place = |name: &&str| described(name).map_or(f64::NAN, |(order, _)| order);
    // NaN sorts after infinity: unknown tiers come last.
    names.sort_by(|a, b| place(a).total_cmp(&place(b)).then(a.cmp(b)));
    let tier = |name: &str| {
        let applies =
            |policy: &&Compiled| policy.tier == name && speaks(policy) && policy.selector.matches(labels);
        let mut selected: Vec<&Compiled> = policies.iter().filter(applies).collect();
        selected.sort_by(|a, b| a.order.cmp(&b.order));
        let end =
            if described(name).is_some_and(|(_, pass)| pass) { EndOfTier::Pass } else { EndOfTier::Deny };
        let policies: Vec<PolicyId> = selected.iter().map(|policy| policy.id.clone()).collect();
        (!policies.is_empty()).then(|| TierProgram { name: name.to_owned(), policies, end })
    };
    names.into_iter().filter_map(tier).collect()
}

fn named_port_members(
    source: &SetSource,
    spec: &WorkloadEndpointSpec,
    labels: &SubjectLabels,
) -> Vec<Member> {
    let SetSource::NamedPort { selector, protocol, name } = source else { panic!("{source:?}") };
    let mut members = Vec::new();
    for port in spec.ports.iter().filter(|port| port.name == *name && selector.matches(labels)) {
        let declared = Protocol::from_name(&port.protocol).unwrap();
        if protocol.is_none_or(|protocol| protocol == declared) {
            let address = |net: &IpNet| Member::AddressPort {
                address: net.addr(),
                protocol: declared,
                port: port.port,
            };
            members.extend(spec.ip_networks.iter().map(address));
        }
    }
    members
}

fn network_from_scratch(objects: &Objects, state: &mut NodeState) {
    let overlay = objects.contains_key(&Key::global(Kind::IpPool, "pool"));
    for (key, value) in objects.iter().filter(|(key, _)| key.kind == Kind::Node) {
        let annotation =
            |name: &str| value["metadata"]["annotations"][format!("projectcalico.org/{name}")].as_str();
        let Some(parent) = annotation("IPv4Address") else { continue };
        let parent = parent.split('/').next().unwrap().parse().unwrap();
        let vtep = annotation("IPv4VXLANTunnelAddr").map(|address| tortie_dataplane::Vtep {
            node: key.name.clone(),
            address: address.parse().unwrap(),
            mac: annotation("VXLANTunnelMACAddr")
                .map_or(tortie_calc::vtep_mac(&key.name), |mac| mac.parse().unwrap()),
            parent,
        });
        if key.name == NODE {
            let network = tortie_dataplane::ClusterNetwork::default();
            state.node =
                Some(tortie_dataplane::LocalNode { name: NODE.into(), address: parent, vtep, network });
        } else if let Some(vtep) = vtep {
            state.vteps.insert(key.name.clone(), vtep);
        }
    }
    for (key, value) in objects.iter().filter(|(key, _)| key.kind == Kind::IpamBlock) {
        let Some(node) = value["affinity"].as_str().and_then(|affinity| affinity.strip_prefix("host:"))
        else {
            continue;
        };
        let cidr = key.name.parse().unwrap();
        if node == NODE {
            state.routes.insert(cidr, RouteTarget::Local);
        } else if overlay && state.vteps.contains_key(node) {
            state.routes.insert(cidr, RouteTarget::Vxlan { node: node.into() });
        }
    }
}

/// Applies the deltas one by one: each must change something, and leave nothing named that does not exist.
fn apply_strictly(state: &mut NodeState, deltas: &[Delta]) {
    for delta in deltas {
        let before = state.clone();
        state.apply(delta);
        assert_ne!(&before, state, "{delta:?} changes nothing");
        for (id, rules) in &state.policies {
            for set in rules.set_ids() {
                assert!(
                    state.sets.contains_key(set),
                    "after {delta:?}, {id} names the set {set}, which is not there"
                );
            }
        }
        for (id, endpoint) in &state.endpoints {
            for policy in endpoint.program.policy_ids() {
                assert!(
                    state.policies.contains_key(policy),
                    "after {delta:?}, {id} names {policy}, which is not there"
                );
            }
        }
        for target in state.routes.values() {
            if let RouteTarget::Vxlan { node } = target {
                assert!(
                    state.vteps.contains_key(node),
                    "after {delta:?}, a route leads to {node}, which has no VTEP"
                );
            }
        }
    }
}

fn labels() -> impl Strategy<Value = Value> {
    prop::collection::btree_map(
        prop::sample::select(vec!["a", "b"]),
        prop::sample::select(vec!["x", "y"]),
        0..3,
    )
    .prop_map(|labels| json!(labels))
}

fn selector() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "all()",
        "a == 'x'",
        "a != 'x'",
        "has(b)",
        "!has(b)",
        "a in {'x','y'} && b == 'y'",
        "projectcalico.org/serviceaccount == 's0'",
    ])
}

fn entity() -> impl Strategy<Value = Value> {
    let part =
        |name: &'static str| prop::option::weighted(0.3, selector()).prop_map(move |value| (name, value));
    let accounts = prop::option::weighted(0.2, Just(json!({"names": ["s0"]})));
    (part("selector"), part("notSelector"), part("namespaceSelector"), accounts).prop_map(
        |(a, b, c, accounts)| {
            let mut entity = serde_json::Map::new();
            for (name, value) in [a, b, c] {
                entity.extend(value.map(|value| (name.to_owned(), json!(value))));
            }
            entity.extend(accounts.map(|accounts| ("serviceAccounts".to_owned(), accounts)));
            Value::Object(entity)
        },
    )
}

fn object() -> impl Strategy<Value = (Key, Value)> {
    let name = |prefix: &'static str, count: u8| (0..count).prop_map(move |n| format!("{prefix}{n}"));
    let namespace = (name("ns", 2), labels()).prop_map(|(name, labels)| {
        (Key::global(Kind::Namespace, &name), json!({"metadata": {"name": name, "labels": labels}}))
    });
    let account = (name("ns", 2), name("s", 2), labels()).prop_map(|(ns, name, labels)| {
        let value = json!({"metadata": {"name": name, "namespace": ns, "labels": labels}});
        (Key::namespaced(Kind::ServiceAccount, ns, name), value)
    });
    let endpoint = (name("ns", 2), name("p", 3), name("n", 2), name("s", 2), labels(), 1..6_u8).prop_map(
        |(ns, pod, node, account, labels, address)| {
            let name = tortie_api::calico::WorkloadEndpoint::name_for(&node, &pod, "eth0");
            let value = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
                "metadata": {"name": name, "namespace": ns, "labels": labels},
                "spec": {
                    "node": node, "pod": pod, "endpoint": "eth0", "containerID": format!("c{address}"),
                    "serviceAccountName": account, "interfaceName": format!("cali{pod}"),
                    "ports": [{"name": "web", "protocol": "TCP", "port": 80 + u16::from(address)}, {"name": "dns", "protocol": "UDP", "port": 53},
                        {"name": "dns", "protocol": "TCP", "port": 53}, {"protocol": "TCP", "port": 1}],
                    "ipNetworks": [format!("10.0.0.{address}/32")], "profiles": [format!("kns.{ns}"), format!("ksa.{ns}.{account}"), "prof0"],
                },
            });
            (Key::namespaced(Kind::WorkloadEndpoint, ns, name), value)
        },
    );
    let rule = (entity(), entity(), prop::sample::select(vec!["Allow", "Deny", "Pass", "Bogus"]))
        .prop_map(|(source, destination, action)| json!({"action": action, "source": source, "destination": destination}));
    // Named ports, with a protocol and without.
    let rule = (rule, prop::option::weighted(0.3, prop::sample::select(vec!["web", "dns"])), any::<bool>())
        .prop_map(|(mut rule, port, protocol)| {
            if let Some(port) = port {
                rule["destination"]["ports"] = json!([port]);
                if protocol {
                    rule["protocol"] = json!("TCP");
                }
            }
            rule
        });
    let spec = (
        prop::option::of(selector()),
        prop::collection::vec(rule, 0..3),
        prop::option::of(0..3_u8),
        any::<bool>(),
    );
    let tier_name = prop::sample::select(vec!["default", "t0", "t1", "never-stored"]);
    let policy = (spec, name("ns", 2), name("p", 2), any::<bool>(), tier_name).prop_map(|((selector, rules, order, egress), ns, name, global, tier)| {
        let direction = if egress { "egress" } else { "ingress" };
        let value = json!({"metadata": {"name": name}, "spec": {"tier": tier, "selector": selector, "order": order, direction: rules}});
        let key = if global { Key::global(Kind::GlobalNetworkPolicy, name) } else { Key::namespaced(Kind::NetworkPolicy, ns, name) };
        (key, value)
    });
    let kubernetes = (name("ns", 2), labels(), labels(), any::<bool>()).prop_map(|(ns, pods, peers, other_namespaces)| {
        let peer = if other_namespaces { json!({"namespaceSelector": {"matchLabels": peers}}) } else { json!({"podSelector": {"matchLabels": peers}}) };
        let value = json!({"metadata": {"name": "k"}, "spec": {"podSelector": {"matchLabels": pods}, "ingress": [{"from": [peer]}]}});
        (Key::namespaced(Kind::KubernetesNetworkPolicy, ns, "k"), value)
    });
    let node = (name("n", 3), prop::option::of(1..9_u8), any::<bool>()).prop_map(|(name, tunnel, mac)| {
        let mut annotations = json!({"projectcalico.org/IPv4Address": format!("192.0.2.{}/24", name.len())});
        if let Some(tunnel) = tunnel {
            annotations["projectcalico.org/IPv4VXLANTunnelAddr"] = json!(format!("10.0.{tunnel}.1"));
        }
        if mac {
            annotations["projectcalico.org/VXLANTunnelMACAddr"] = json!("00-15-5D-00-00-01");
        }
        (Key::global(Kind::Node, &name), json!({"metadata": {"name": name, "annotations": annotations}}))
    });
    let block = (0..4_u8, prop::option::of(name("n", 3))).prop_map(|(number, node)| {
        let cidr = format!("10.0.{number}.0/30");
        let value = json!({
            "cidr": cidr, "affinity": node.map(|node| format!("host:{node}")), "allocations": [null, null, null, null],
            "unallocated": [0, 1, 2, 3], "attributes": [],
        });
        (Key::global(Kind::IpamBlock, cidr), value)
    });
    let tier = (name("t", 2), prop::option::of(0..3_u8), any::<bool>()).prop_map(|(name, order, pass)| {
        let action = if pass { "Pass" } else { "Deny" };
        let value = json!({"metadata": {"name": name}, "spec": {"order": order, "defaultAction": action}});
        (Key::global(Kind::Tier, name), value)
    });
    let profile = (name("prof", 2), labels(), entity(), prop::sample::select(vec!["Allow", "Deny"]))
        .prop_map(|(name, labels, source, action)| {
            let spec = json!({"labelsToApply": labels, "ingress": [{"action": action, "source": source}]});
            (Key::global(Kind::Profile, &name), json!({"metadata": {"name": name}, "spec": spec}))
        });
    let network_set = (name("ns", 2), name("set", 2), labels(), any::<bool>(), 0..4_u8).prop_map(
        |(ns, name, labels, global, number)| {
            let nets = json!(["10.0.0.0/30", format!("10.0.0.{number}/32"), "fd00::/64"]);
            let value = json!({"metadata": {"name": name, "labels": labels}, "spec": {"nets": nets}});
            let key = if global {
                Key::global(Kind::GlobalNetworkSet, name)
            } else {
                Key::namespaced(Kind::NetworkSet, ns, name)
            };
            (key, value)
        },
    );
    let pool = Just((
        Key::global(Kind::IpPool, "pool"),
        json!({"metadata": {"name": "pool"}, "spec": {"cidr": "10.0.0.0/16", "vxlanMode": "Always"}}),
    ));
    prop_oneof![2 => namespace, 1 => account, 5 => endpoint, 4 => policy, 2 => kubernetes, 2 => node, 2 => block, 1 => pool, 3 => prop_oneof![tier, profile, network_set]]
}

#[derive(Debug, Clone)]
enum Step {
    Put(Key, Value),
    /// Deletes the nth object that exists.
    Delete(prop::sample::Index),
    Flush,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => object().prop_map(|(key, value)| Step::Put(key, value)),
        2 => any::<prop::sample::Index>().prop_map(Step::Delete),
        2 => Just(Step::Flush),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_history_ends_in_the_state_from_scratch(steps in steps(), seed in any::<u64>()) {
        let mut calc = Calc::new(NODE);
        let mut objects = Objects::new();
        let mut told = NodeState::default();
        for step in steps {
            match step {
                Step::Put(key, value) => {
                    calc.update(&key, Some(&value));
                    objects.insert(key, value);
                }
                Step::Delete(index) if !objects.is_empty() => {
                    let key = index.get(&objects.keys().cloned().collect::<Vec<_>>()).clone();
                    calc.update(&key, None);
                    objects.remove(&key);
                }
                Step::Delete(_) => {}
                Step::Flush => {
                    apply_strictly(&mut told, &calc.flush());
                    prop_assert_eq!(&told, calc.state());
                    let mut expected = from_scratch(&objects);
                    // A node that is gone leaves its own description behind: nothing is torn down for a lost object.
                    if expected.node.is_none() {
                        expected.node.clone_from(&told.node);
                    }
                    prop_assert_eq!(&told, &expected);
                    prop_assert_eq!(calc.flush(), vec![], "a flush without updates says nothing");
                }
            }
        }
        apply_strictly(&mut told, &calc.flush());
        let mut expected = from_scratch(&objects);
        if expected.node.is_none() {
            expected.node.clone_from(&told.node);
        }
        prop_assert_eq!(&told, &expected);

        // The same objects in another order, at once.
        let mut shuffled: Vec<_> = objects.iter().collect();
        shuffled.sort_by_key(|(key, _)| {
            use std::hash::{DefaultHasher, Hash, Hasher};
            let mut hasher = DefaultHasher::new();
            (seed, key).hash(&mut hasher);
            hasher.finish()
        });
        let mut calc = Calc::new(NODE);
        for (key, value) in shuffled {
            calc.update(key, Some(value));
        }
        let mut at_once = NodeState::default();
        apply_strictly(&mut at_once, &calc.flush());
        prop_assert_eq!(at_once, from_scratch(&objects));
    }
}

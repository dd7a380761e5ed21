//! Realistic clusters, in every sequence in which one may change to another: lists of states, forwards and backwards,
//! with and without an empty state in between; the objects of each step in several orders; a flush after each object,
//! after each state, at random, or only at the end. Every flush must report exactly the changes.

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::NodeState;

use crate::scratch::{NODE, Objects, apply_strictly, assert_order, difference, from_scratch, shown};

fn global(kind: Kind, name: &str, spec: Value) -> (Key, Value) {
    (Key::global(kind, name), json!({"metadata": {"name": name}, "spec": spec}))
}

fn namespaced(kind: Kind, namespace: &str, name: &str, spec: Value) -> (Key, Value) {
    (
        Key::namespaced(kind, namespace, name),
        json!({"metadata": {"name": name, "namespace": namespace}, "spec": spec}),
    )
}

fn namespace(name: &str, team: &str) -> (Key, Value) {
    let value = json!({"metadata": {"name": name, "labels": {"team": team}}});
    (Key::global(Kind::Namespace, name), value)
}

fn pod(namespace: &str, name: &str, node: &str, app: &str, address: &str) -> (Key, Value) {
    let object = WorkloadEndpoint::name_for(node, name, "eth0");
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": object, "namespace": namespace, "labels": {"app": app}},
        "spec": {
            "node": node, "pod": name, "endpoint": "eth0", "containerID": name, "interfaceName": format!("cali{name}"),
            "ipNetworks": [format!("{address}/32")], "profiles": WorkloadEndpoint::profiles_for(namespace, "runner"),
            "serviceAccountName": "runner", "ports": [{"name": "web", "protocol": "TCP", "port": 8080}],
        },
    });
    (Key::namespaced(Kind::WorkloadEndpoint, namespace, object), value)
}

fn with(base: &Objects, more: impl IntoIterator<Item = (Key, Value)>) -> Objects {
    let mut objects = base.clone();
    objects.extend(more);
    objects
}

fn pods() -> Objects {
    Objects::from([
        namespace("shop", "a"),
        namespace("bank", "b"),
        pod("shop", "web", "n0", "web", "10.0.0.1"),
        pod("shop", "db", "n0", "db", "10.0.0.2"),
        pod("shop", "far", "n1", "web", "10.0.0.3"),
        pod("bank", "till", "n1", "till", "10.0.0.4"),
    ])
}

/// Admission by team, by app, and by port name.
fn policies() -> Objects {
    let rules = json!([
        {"action": "Allow", "source": {"namespaceSelector": "team == 'b'"}},
        {"action": "Allow", "protocol": "TCP", "source": {"selector": "app == 'web'"}, "destination": {"ports": ["web"]}},
        {"action": "Deny", "source": {"notSelector": "has(app)"}},
    ]);
    let db = json!({"selector": "app == 'db'", "order": 1, "ingress": rules});
    let all = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    with(
        &pods(),
        [
            namespaced(Kind::NetworkPolicy, "shop", "db", db),
            namespaced(Kind::KubernetesNetworkPolicy, "shop", "closed", all),
        ],
    )
}

fn tiered() -> Objects {
    let pass = json!([{"action": "Pass", "source": {"selector": "app == 'till'"}}]);
    let policy = json!({"tier": "security", "selector": "!has(quarantine)", "ingress": pass});
    let tier = global(Kind::Tier, "security", json!({"order": 10, "defaultAction": "Deny"}));
    with(&policies(), [tier, global(Kind::GlobalNetworkPolicy, "baseline", policy)])
}

/// A cluster administrator's policy, Services, network sets.
fn administered() -> Objects {
    let subject = json!({"namespaces": {"matchLabels": {"team": "a"}}});
    let rule = json!([{"action": "Deny", "from": [{"namespaces": {"matchLabels": {"team": "c"}}}]}]);
    let admin = json!({"tier": "Admin", "priority": 5, "subject": subject, "ingress": rule});
    let to_bank =
        json!([{"action": "Allow", "destination": {"services": {"name": "till", "namespace": "bank"}}}]);
    let slice = json!({
        "metadata": {"name": "till-1", "namespace": "bank", "labels": {"kubernetes.io/service-name": "till"}},
        "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.4"]}], "ports": [{"protocol": "TCP", "port": 8080}],
    });
    let mut office =
        global(Kind::GlobalNetworkSet, "office", json!({"nets": ["192.0.2.0/24", "10.0.0.4/32"]}));
    office.1["metadata"]["labels"] = json!({"app": "web"});
    with(
        &policies(),
        [
            global(Kind::ClusterNetworkPolicy, "admin", admin),
            namespaced(
                Kind::NetworkPolicy,
                "shop",
                "out",
                json!({"selector": "app == 'web'", "egress": to_bank}),
            ),
            (Key::namespaced(Kind::EndpointSlice, "bank", "till-1"), slice),
            office,
            namespaced(
                Kind::Service,
                "bank",
                "till",
                json!({"clusterIPs": ["10.96.0.9"], "externalIPs": ["192.0.2.80"], "ports": [{"port": 80}]}),
            ),
        ],
    )
}

/// A profile in a namespace's place, which gives labels, and rules over a set.
fn profiled() -> Objects {
    let rules = json!([{"action": "Allow", "source": {"selector": "app == 'till'"}}]);
    let profile = json!({"labelsToApply": {"quarantine": "yes"}, "ingress": rules});
    with(&tiered(), [global(Kind::Profile, "kns.shop", profile)])
}

/// A namespace has another team, and a pod has moved to this node.
fn moved() -> Objects {
    let mut objects = with(&tiered(), [namespace("bank", "a"), namespace("shop", "c")]);
    let (key, _) = pod("shop", "far", "n1", "web", "10.0.0.3");
    objects.remove(&key);
    with(&objects, [pod("shop", "far", "n0", "web", "10.0.0.3")])
}

/// Half of it cannot be read: a namespace's labels, a policy, a tier, a network set.
fn damaged() -> Objects {
    let mut objects = administered();
    objects.extend(tiered());
    objects.insert(
        Key::global(Kind::Namespace, "bank"),
        json!({"metadata": {"name": "bank", "labels": {"team": 5}}}),
    );
    objects.insert(
        Key::global(Kind::Tier, "security"),
        json!({"metadata": {"name": "security"}, "spec": {"order": "low"}}),
    );
    let (office, db) =
        (Key::global(Kind::GlobalNetworkSet, "office"), Key::namespaced(Kind::NetworkPolicy, "shop", "db"));
    objects.get_mut(&office).unwrap()["spec"]["nets"] = json!(["192.0.2.0/24", "nowhere"]);
    objects.get_mut(&db).unwrap()["spec"]["colour"] = json!("blue");
    objects
}

/// Two pods have one address, and two namespaces have a policy of the same name.
fn doubled() -> Objects {
    let policy = json!({"selector": "all()", "ingress": [{"action": "Allow", "source": {"selector": "app == 'web'"}}]});
    with(
        &pods(),
        [
            pod("shop", "twin", "n1", "web", "10.0.0.1"),
            pod("bank", "here", "n0", "till", "10.0.0.5"),
            namespaced(Kind::NetworkPolicy, "shop", "same", policy.clone()),
            namespaced(Kind::NetworkPolicy, "bank", "same", policy),
        ],
    )
}

fn states() -> Vec<(&'static str, Objects)> {
    vec![
        ("nothing", Objects::new()),
        ("pods", pods()),
        ("policies", policies()),
        ("tiered", tiered()),
        ("administered", administered()),
        ("profiled", profiled()),
        ("moved", moved()),
        ("damaged", damaged()),
        ("doubled", doubled()),
    ]
}

/// When the state is flushed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Flushes {
    EachObject,
    EachState,
    AtTheEnd,
    Random,
}

/// The order of the objects in one step.
#[derive(Debug, Clone, Copy)]
enum Order {
    ByKey,
    Backwards,
    Mixed,
    /// All deletions first, or last.
    Gone(bool),
}

/// A sequence that looks random, and is the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

struct Run {
    calc: Calc,
    now: Objects,
    received: NodeState,
    dice: Dice,
}

impl Run {
    /// Changes one state to the next, object by object.
    fn walk(&mut self, to: &Objects, order: Order, flushes: Flushes) {
        let gone = self.now.keys().filter(|key| !to.contains_key(*key)).map(|key| (key.clone(), None));
        let come = to.iter().filter(|(key, value)| self.now.get(*key) != Some(*value));
        let come = come.map(|(key, value)| (key.clone(), Some(value.clone())));
        let mut changes: Vec<(Key, Option<Value>)> = gone.chain(come).collect();
        match order {
            Order::ByKey => changes.sort_by(|a, b| a.0.cmp(&b.0)),
            Order::Backwards => changes.sort_by(|a, b| b.0.cmp(&a.0)),
            Order::Mixed => changes.sort_by_cached_key(|_| self.dice.roll()),
            Order::Gone(first) => changes.sort_by_key(|(_, value)| value.is_some() == first),
        }
        for (key, value) in changes {
            self.calc.update(&key, value.as_ref());
            match value {
                Some(value) => drop(self.now.insert(key, value)),
                None => drop(self.now.remove(&key)),
            }
            if flushes == Flushes::EachObject
                || (flushes == Flushes::Random && self.dice.roll().is_multiple_of(3))
            {
                self.flush();
            }
        }
        if flushes == Flushes::EachState {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let expected = from_scratch(&self.now);
        let deltas = self.calc.flush();
        assert_eq!(shown(&deltas), difference(&self.received, &expected));
        assert_order(&deltas);
        apply_strictly(&mut self.received, &deltas);
        assert_eq!(self.received, expected);
        assert_eq!(*self.calc.state(), expected);
    }
}

fn run(sequence: &[&Objects], order: Order, flushes: Flushes) {
    let (now, received) = (Objects::new(), NodeState::default());
    let mut run =
        Run { calc: Calc::new(NODE).with_services(), now, received, dice: Dice(sequence.len() as u64) };
    for state in sequence {
        run.walk(state, order, flushes);
    }
    run.flush();
}

#[test]
fn any_state_can_change_to_any_other() {
    let states = states();
    let orders = [Order::ByKey, Order::Backwards, Order::Mixed, Order::Gone(true), Order::Gone(false)];
    for order in orders {
        for flushes in [Flushes::EachObject, Flushes::EachState, Flushes::AtTheEnd, Flushes::Random] {
            for (_, from) in &states {
                for (_, to) in &states {
                    run(&[from, to], order, flushes);
                }
            }
        }
    }
}

#[test]
fn long_and_short_histories_give_the_same_state() {
    let states = states();
    let there: Vec<&Objects> = states.iter().map(|(_, objects)| objects).collect();
    let back: Vec<&Objects> = there.iter().rev().copied().collect();
    let nothing = Objects::new();
    let interrupted: Vec<&Objects> = there.iter().flat_map(|state| [*state, &nothing]).collect();
    let again: Vec<&Objects> = there.iter().chain(&back).copied().collect();
    for order in [Order::ByKey, Order::Backwards, Order::Mixed] {
        for flushes in [Flushes::EachObject, Flushes::EachState, Flushes::AtTheEnd, Flushes::Random] {
            for sequence in [&there, &back, &interrupted, &again] {
                run(sequence, order, flushes);
            }
        }
    }
}

/// The deltas between states are known by name, so the states differ for the node.
#[test]
fn the_states_differ() {
    let states = states();
    for (index, (name, objects)) in states.iter().enumerate() {
        for (other, others) in &states[..index] {
            assert_ne!(from_scratch(objects), from_scratch(others), "{name} and {other}");
        }
    }
}

/// An endpoint that differs in one field only is another one; calc leaves out endpoints that are as they were.
#[test]
fn a_change_of_one_field_of_an_endpoint_takes_effect() {
    let base = with(&policies(), [pod("shop", "other", "n0", "web", "10.0.0.9")]);
    let changed = |from: &Objects, name: &str, field: &str, value: Value| {
        let mut changed = from.clone();
        let object = changed.get_mut(&pod("shop", name, "n0", "", "").0).unwrap();
        let (parent, field) = field.rsplit_once('/').unwrap();
        object.pointer_mut(parent).unwrap()[field] = value;
        changed
    };
    // Two objects with one id: the last by name counts.
    let shared = changed(&base, "web", "/spec/pod", json!("db"));
    let mut variants = vec![changed(&shared, "db", "/spec/containerID", json!("restarted")), shared];
    for (field, value) in [
        ("/metadata/labels/app", json!("db")),
        ("/spec/node", json!("n1")),
        ("/spec/pod", json!("renamed")),
        ("/spec/containerID", json!("restarted")),
        ("/spec/interfaceName", json!("cali9")),
        ("/spec/mac", json!("02:00:00:00:00:09")),
        ("/spec/ipNetworks", json!(["10.0.0.8/32"])),
        ("/spec/profiles", json!(["kns.bank"])),
        ("/spec/ports", json!([{"name": "web", "protocol": "TCP", "port": 8081}])),
    ] {
        let variant = changed(&base, "web", field, value);
        assert!(from_scratch(&variant) != from_scratch(&base), "{field} makes no difference");
        variants.push(variant);
    }
    for from in &variants {
        for to in &variants {
            run(&[&base, from, to, &base], Order::ByKey, Flushes::EachObject);
        }
    }
}

/// A changed slice of thousands of backends is one delta, and an unchanged one is none.
#[test]
fn one_slice_is_one_delta() {
    let slice = |address: &str, ready: bool| {
        json!({
            "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web7"}},
            "addressType": "IPv4", "endpoints": [{"addresses": [address], "conditions": {"ready": ready}}],
            "ports": [{"port": 8080}],
        })
    };
    let mut calc = Calc::new(NODE).with_services();
    for number in 0..1_000 {
        let spec = json!({"clusterIPs": [format!("10.96.{}.{}", number / 250, number % 250)], "ports": [{"port": 80}]});
        let (key, value) = namespaced(Kind::Service, "shop", &format!("web{number}"), spec);
        calc.update(&key, Some(&value));
    }
    // And the set of all nodes, which is empty.
    assert_eq!(calc.flush().len(), 1_000 + 1);
    let key = Key::namespaced(Kind::EndpointSlice, "shop", "web-1");
    calc.update(&key, Some(&slice("10.0.0.1", true)));
    let [tortie_dataplane::Delta::Service(id, service)] = &calc.flush()[..] else { panic!() };
    assert_eq!(id.to_string(), "shop/web7");
    assert_eq!(service.ports[0].backends, [("10.0.0.1".parse().unwrap(), 8080)]);
    // A backend that is not ready was not one before, either.
    calc.update(&key, Some(&slice("10.0.0.1", false)));
    assert_eq!(calc.flush().len(), 1);
    calc.update(&key, Some(&slice("10.0.0.2", false)));
    assert_eq!(calc.flush(), []);
}

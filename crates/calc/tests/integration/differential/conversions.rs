//! Converted policies give the same verdicts: random clusters are judged before and after.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::clusters::pods::as_pods;
use testkit::clusters::{Objects, Sent, clusters, manifest, packets, snapshot};
use testkit::random::Random;
use tortie_api::convert::{calico_spec, kubernetes_policy};
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{Oracle, Peer, Question, Verdict};

const CASES: u32 = 600;
const SENT: usize = 60;

/// How often something was converted, and how many verdicts were compared that a converted policy had a part in.
#[derive(Debug, Default)]
struct Count {
    policies: usize,
    with_rules: usize,
    allowed: usize,
    denied: usize,
}

impl Count {
    fn lacking(&self, what: &str) -> Option<String> {
        let Self { policies, with_rules, allowed, denied } = self;
        let least = [policies, with_rules, allowed, denied].into_iter().min().copied().unwrap_or_default();
        (least < 100).then(|| format!("{what}: {self:?}"))
    }
}

fn verdicts(objects: &Objects, packets: &[Sent]) -> Vec<Option<bool>> {
    let snapshot = snapshot(objects);
    let oracle = Oracle::new(&snapshot);
    let verdict = |packet: &Sent| {
        let question = Question {
            from: Peer::Address(packet.source),
            to: Peer::Address(packet.destination),
            protocol: packet.protocol,
            source_port: packet.source_port,
            destination_port: packet.destination_port,
            icmp: packet.icmp,
            via: None,
            by_node: None,
        };
        oracle.evaluate(&question).ok().map(|answer| answer.verdict == Verdict::Allow)
    };
    packets.iter().map(verdict).collect()
}

/// Replaces the policies that `convert` converts.
fn replaced(
    objects: &Objects,
    count: &mut Count,
    convert: impl Fn(&Key, &Value) -> Option<(Key, Value)>,
) -> Objects {
    let one = |(key, value): &(Key, Value)| match convert(key, value) {
        Some((new, value)) => {
            count.policies += 1;
            let has_rules = ["ingress", "egress"].iter().any(|field| value["spec"][field][0].is_object());
            count.with_rules += usize::from(has_rules);
            (new, value)
        }
        None => (key.clone(), value.clone()),
    };
    objects.iter().map(one).collect()
}

fn to_calico(key: &Key, value: &Value) -> Option<(Key, Value)> {
    let Ok(Resource::KubernetesNetworkPolicy(policy)) = Resource::read(key, value) else { return None };
    if key.kind != Kind::KubernetesNetworkPolicy {
        return None;
    }
    let key = Key::namespaced(Kind::NetworkPolicy, &key.namespace, format!("knp.default.{}", key.name));
    let metadata = json!({"name": key.name, "namespace": key.namespace});
    Some((key, json!({"metadata": metadata, "spec": calico_spec(&policy)})))
}

fn to_kubernetes(key: &Key, value: &Value) -> Option<(Key, Value)> {
    let Ok(Resource::NetworkPolicy(policy)) = Resource::read(key, value) else { return None };
    let converted = kubernetes_policy(&policy).ok()?.value;
    let name = converted["metadata"]["name"].as_str()?;
    let key = Key::namespaced(Kind::KubernetesNetworkPolicy, &key.namespace, name);
    // What is written can be read.
    Resource::read(&key, &converted).unwrap_or_else(|problems| panic!("{converted}: {problems:?}"));
    Some((key, converted))
}

fn compare(
    before: &Objects,
    after: &Objects,
    packets: &[Sent],
    count: &mut Count,
) -> Result<(), TestCaseError> {
    let shared = shared_addresses(before);
    let (old, new) = (verdicts(before, packets), verdicts(after, packets));
    let compared = packets.iter().zip(&old).zip(&new);
    for ((packet, old), new) in compared.filter(|((packet, _), _)| !shared.contains(&packet.destination)) {
        count.allowed += usize::from(*old == Some(true) && before != after);
        count.denied += usize::from(*old == Some(false) && before != after);
        prop_assert_eq!(old, new, "{:?}\n{}\n{}", packet, manifest(before), manifest(after));
    }
    Ok(())
}

/// The addresses of more than one pod. There, a named port of a Kubernetes policy counts on the pods that the policy
/// selects, and one of a Calico rule without selectors on all pods of the address.
fn shared_addresses(objects: &Objects) -> BTreeSet<IpAddr> {
    // Of two objects of one name, the last one counts.
    let last: BTreeMap<&Key, &Value> = objects.iter().map(|(key, value)| (key, value)).collect();
    let (mut known, mut shared) = (BTreeSet::new(), BTreeSet::new());
    for value in last.into_values() {
        let of_pod = value["status"]["podIPs"].as_array().into_iter().flatten().map(|address| &address["ip"]);
        let of_endpoint = value["spec"]["ipNetworks"].as_array().into_iter().flatten();
        let texts = of_pod.chain(of_endpoint).filter_map(Value::as_str);
        for address in texts.filter_map(|text| text.split('/').next()?.parse().ok()) {
            if !known.insert(address) {
                shared.insert(address);
            }
        }
    }
    shared
}

/// Calico's selectors see the labels that a pod inherits from its profiles, and Kubernetes' see its own. The profiles of a
/// cluster give labels under Calico's own prefixes only, which no Kubernetes policy names.
fn without_inherited_labels(mut objects: Objects) -> Objects {
    for (_, value) in objects.iter_mut().filter(|(key, _)| key.kind == Kind::Profile) {
        if let Some(labels) = value["spec"]["labelsToApply"].as_object_mut() {
            labels.retain(|name, _| name.starts_with("pcns.") || name.starts_with("pcsa."));
        }
    }
    objects
}

/// Names decide between policies of the same order, and a converted policy has another name. So no Calico policy of a
/// cluster has the order of Kubernetes' policies.
fn with_other_orders(mut objects: Objects) -> Objects {
    for (_, value) in objects.iter_mut().filter(|(key, _)| key.kind.is_policy()) {
        if value["spec"]["order"] == 1000 {
            value["spec"]["order"] = json!(999);
        }
    }
    objects
}

/// A policy that cannot be read denies everything at its position, which its kind decides, too.
fn readable(mut objects: Objects) -> Objects {
    objects.retain(|(key, value)| !key.kind.is_policy() || Resource::read(key, value).is_ok());
    objects
}

#[test]
fn kubernetes_policies_mean_the_same_as_calicos_and_back() {
    let (forward, back) = (RefCell::new(Count::default()), RefCell::new(Count::default()));
    let test = |(objects, packets): (Objects, Vec<Sent>)| {
        let objects = readable(with_other_orders(without_inherited_labels(as_pods(&objects))));
        let of_calico = replaced(&objects, &mut forward.borrow_mut(), to_calico);
        compare(&objects, &of_calico, &packets, &mut forward.borrow_mut())?;
        let is_copy = |key: &Key| key.name.starts_with("knp.default.");
        let again = replaced(&of_calico, &mut back.borrow_mut(), |key, value| {
            let converted = to_kubernetes(key, value).filter(|_| is_copy(key));
            assert!(
                converted.is_some() || !is_copy(key) || key.kind != Kind::NetworkPolicy,
                "{key}: {value}"
            );
            converted
        });
        compare(&objects, &again, &packets, &mut back.borrow_mut())
    };
    let lacking = || forward.borrow().lacking("to Calico's").or_else(|| back.borrow().lacking("and back"));
    let strategy = (clusters(), prop::collection::vec(packets(), SENT));
    Random::cases(CASES).prove(&strategy, test, lacking).unwrap();
}

/// What the notes of a conversion name is left out: network sets, and policies beside it that deny. The profiles of pods in a
/// cluster give labels under Calico's own prefixes only.
fn without_what_is_noted(objects: &Objects) -> Objects {
    let denies = |value: &Value| {
        let rules = ["ingress", "egress"].into_iter().flat_map(|field| value["spec"][field].as_array());
        rules.flatten().any(|rule| rule["action"] != "Allow")
    };
    let is_default = |value: &Value| matches!(value["spec"]["tier"].as_str(), None | Some("" | "default"));
    let of_calico = [Kind::NetworkPolicy, Kind::GlobalNetworkPolicy];
    // Of two objects of one name, the last one counts.
    let last: BTreeMap<&Key, &Value> = objects.iter().map(|(key, value)| (key, value)).collect();
    let kept = last.into_iter().filter(|(key, value)| match key.kind {
        Kind::NetworkSet | Kind::GlobalNetworkSet | Kind::Profile => false,
        // It denies everything.
        kind if kind.is_policy() && Resource::read(key, value).is_err() => false,
        kind if of_calico.contains(&kind) => !(is_default(value) && denies(value)),
        _ => true,
    });
    kept.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Policies without the fields that the conversion refuses. So each error must name the field that is its reason.
fn without_what_is_refused(objects: Objects) -> Objects {
    let one = |(key, mut value): (Key, Value)| {
        for _ in 0..50 {
            let Ok(Resource::NetworkPolicy(policy)) = Resource::read(&key, &value) else { break };
            let Err(errors) = kubernetes_policy(&policy) else { break };
            let before = value.clone();
            remove(&mut value, &errors[0].path);
            assert_ne!(value, before, "{}", errors[0]);
        }
        (key, value)
    };
    objects.into_iter().filter(|(key, _)| key.kind != Kind::StagedNetworkPolicy).map(one).collect()
}

/// Removes the field at a path, or the rule whose action it is.
fn remove(value: &mut Value, path: &str) {
    let pointer = format!("/{}", path.replace(['.', '['], "/").replace(']', ""));
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    if field == "action" {
        let (rules, number) = parent.rsplit_once('/').unwrap();
        let rules = value.pointer_mut(rules).and_then(Value::as_array_mut).unwrap();
        rules.remove(number.parse().unwrap());
    } else if let Some(fields) = value.pointer_mut(parent).and_then(Value::as_object_mut) {
        fields.remove(field);
    }
}

/// No pod has two values of one label. So the policy selects none, and the converted one must not select those with the last value.
#[test]
fn two_values_of_one_label_stay_two_requirements() {
    let spec = json!({"selector": "a == 'x' && a == 'y'", "types": ["Ingress"]});
    let value = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec});
    let (_, converted) = to_kubernetes(&Key::namespaced(Kind::NetworkPolicy, "n", "p"), &value).unwrap();
    let second = json!({"key": "a", "operator": "In", "values": ["y"]});
    let expected = json!({"matchLabels": {"a": "x"}, "matchExpressions": [second]});
    assert_eq!(converted["spec"]["podSelector"], expected);
}

#[test]
fn calico_policies_that_can_be_kubernetes_policies_mean_the_same() {
    let count = RefCell::new(Count::default());
    let test = |(objects, packets): (Objects, Vec<Sent>)| {
        let objects = without_what_is_refused(without_what_is_noted(&as_pods(&objects)));
        let converted = replaced(&objects, &mut count.borrow_mut(), |key, value| {
            let (mut key, value) = to_kubernetes(key, value)?;
            // There may be a Kubernetes policy of the same name.
            key.name.insert_str(0, "converted-");
            Some((key, value))
        });
        compare(&objects, &converted, &packets, &mut count.borrow_mut())
    };
    let strategy = (clusters(), prop::collection::vec(packets(), SENT));
    Random::cases(CASES).prove(&strategy, test, || count.borrow().lacking("to Kubernetes'")).unwrap();
}

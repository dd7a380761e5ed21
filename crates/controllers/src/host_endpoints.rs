//! Automatic host endpoints: one for all interfaces of each node, if KubeControllersConfiguration asks for them
//! (`kube-controllers/pkg/controllers/node/hostendpoints.go` of Calico). Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};
use tortie_api::calico::{HostEndpoint, KubeControllersConfiguration};
use tortie_api::kubernetes::Node;
use tortie_api::{Key, Kind, Position, Resource};
use tortie_store::{Change, StorageForm, Stored};

use crate::decision::{Decision, annotation, update};
use crate::reconciler::{Reconciler, Side};
use crate::synced::Synced;

/// The kinds that it follows.
pub(crate) const KINDS: [Kind; 3] = [Kind::Node, Kind::HostEndpoint, Kind::KubeControllersConfiguration];

/// The label of automatic host endpoints, and its value. They are Calico's.
const CREATED_BY: (&str, &str) = ("projectcalico.org/created-by", "calico-kube-controllers");
const SUFFIX: &str = "-auto-hep";
/// The annotations of a Node with addresses, in Calico's order.
const ADDRESSES: [&str; 6] = [
    Node::ADDRESS,
    Node::ADDRESS_V6,
    Node::IPIP_ADDRESS,
    Node::VXLAN_ADDRESS,
    Node::VXLAN_ADDRESS_V6,
    "projectcalico.org/IPv4WireguardInterfaceAddr",
];

/// The nodes and their host endpoints.
pub(crate) struct HostEndpoints {
    desired: BTreeMap<Key, Value>,
    actual: BTreeMap<Key, Stored>,
    /// Whether nodes get host endpoints; `None` without settings, or if they are invalid: nothing changes then.
    enabled: Option<bool>,
    synced: Synced,
    dirty: BTreeSet<Key>,
    /// The form of the endpoints.
    form: StorageForm,
}

/// Whether a host endpoint is automatic.
pub(crate) fn is_automatic(value: &Value) -> bool {
    value["metadata"]["labels"][CREATED_BY.0] == CREATED_BY.1
}

fn key_of(node: &str) -> Key {
    Key::global(Kind::HostEndpoint, format!("{node}{SUFFIX}"))
}

/// The host endpoint of a Node.
fn desired(node: &Stored) -> Value {
    let key = key_of(&node.key.name);
    let mut labels = Node::labels_of(&node.value);
    labels.insert(CREATED_BY.0.to_owned(), CREATED_BY.1.to_owned());
    json!({
        "apiVersion": key.kind.api_version(), "kind": key.kind.name(),
        "metadata": {"name": key.name, "labels": labels},
        "spec": {
            "node": node.key.name, "interfaceName": HostEndpoint::ALL_INTERFACES, "expectedIPs": addresses(&node.value),
            "profiles": [HostEndpoint::DEFAULT_ALLOW],
        },
    })
}

/// The addresses of a Node: those in Calico's fields, and the internal ones.
fn addresses(node: &Value) -> Vec<IpAddr> {
    let address = |text: &str| text.split('/').next().and_then(|address| address.parse().ok());
    let own = ADDRESSES.iter().filter_map(|name| address(annotation(node, name)?));
    // In etcd, Calico keeps them in `spec`.
    let lists = [&node["status"]["addresses"], &node["spec"]["addresses"]];
    let listed = lists.into_iter().filter_map(Value::as_array).flatten();
    let internal = listed.filter(|each| each["type"] == "InternalIP");
    let internal = internal.filter_map(|each| address(each["address"].as_str()?));
    let mut all = Vec::new();
    for address in own.chain(internal) {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all
}

impl HostEndpoints {
    /// For a datastore with objects in this form.
    pub(crate) fn new(form: StorageForm) -> Self {
        Self {
            desired: BTreeMap::new(),
            actual: BTreeMap::new(),
            enabled: None,
            synced: Synced::new(&KINDS),
            dirty: BTreeSet::new(),
            form,
        }
    }

    fn set_configuration(&mut self, stored: Option<&Stored>) {
        let settings = stored.map(|stored| Resource::read(&stored.key, &stored.value));
        self.enabled = match settings {
            Some(Ok(Resource::KubeControllersConfiguration(settings))) => {
                Some(settings.creates_host_endpoints())
            }
            Some(Err(problems)) => {
                let problems = tortie_api::in_words(&problems);
                tracing::error!(
                    problems,
                    "KubeControllersConfiguration default is invalid; host endpoints stay as they are"
                );
                None
            }
            _ => None,
        };
        self.dirty.extend(self.desired.keys().chain(self.actual.keys()).cloned());
    }

    fn put(&mut self, stored: Stored) {
        let is_settings = stored.key.name == KubeControllersConfiguration::NAME;
        match stored.key.kind {
            Kind::Node => {
                let key = key_of(&stored.key.name);
                let mut desired = desired(&stored);
                self.form.fill(key.kind, &mut desired);
                if self.desired.get(&key) != Some(&desired) {
                    self.desired.insert(key.clone(), desired);
                    self.dirty.insert(key);
                }
            }
            Kind::KubeControllersConfiguration if is_settings => self.set_configuration(Some(&stored)),
            Kind::HostEndpoint => {
                let is_old = |known: &Stored| known.position > stored.position;
                if !self.actual.get(&stored.key).is_some_and(is_old) {
                    self.dirty.insert(stored.key.clone());
                    self.actual.insert(stored.key.clone(), stored);
                }
            }
            _ => {}
        }
    }

    fn remove(&mut self, key: &Key) {
        match key.kind {
            Kind::Node => drop(self.desired.remove(&key_of(&key.name))),
            Kind::KubeControllersConfiguration if key.name == KubeControllersConfiguration::NAME => {
                self.set_configuration(None);
            }
            _ => {
                if self.actual.remove(key).is_some() {
                    self.dirty.insert(key.clone());
                }
            }
        }
    }
}

impl Reconciler for HostEndpoints {
    fn note(&mut self, _: Side, change: Change) {
        self.synced.note(&change);
        match change {
            // The history may begin again at an older position, as that of a restored datastore.
            Change::Restarted(kind) => {
                let of_kind = self.actual.iter_mut().filter(|(key, _)| key.kind == kind);
                of_kind.for_each(|(_, stored)| stored.position = Position::default());
            }
            Change::Put(stored) => self.put(stored),
            Change::Gone { key, .. } => self.remove(&key),
            _ => {}
        }
    }

    fn take_due(&mut self) -> Vec<Key> {
        if !self.synced.is_settled() {
            return Vec::new();
        }
        std::mem::take(&mut self.dirty).into_iter().collect()
    }

    fn retry(&mut self, key: Key) {
        self.dirty.insert(key);
    }

    /// The host endpoint of a vanished node stays: the lifecycle of nodes removes it later.
    fn decide(&self, key: &Key) -> Decision {
        let actual = self.actual.get(key);
        match (self.enabled, self.desired.get(key), actual) {
            (Some(true), Some(desired), None) => Decision::Create(desired.clone()),
            (Some(true), Some(desired), Some(actual)) if is_automatic(&actual.value) => {
                update(actual, desired)
            }
            (Some(true), Some(_), Some(_)) => Decision::Foreign("creates the node's automatic host endpoint"),
            (Some(false), _, Some(actual)) if is_automatic(&actual.value) => {
                Decision::Delete(actual.version.clone(), None)
            }
            _ => Decision::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tortie_api::Position;
    use tortie_store::Written;

    fn put(kind: Kind, name: &str, value: Value) -> Change {
        Change::Put(Stored::new(Key::global(kind, name), value, Written::at(1)))
    }

    fn settings(spec: Value) -> Change {
        let value = json!({"metadata": {"name": "default"}, "spec": {"controllers": {"node": {"hostEndpoint": spec}}}});
        put(Kind::KubeControllersConfiguration, "default", value)
    }

    fn node() -> Change {
        put(
            Kind::Node,
            "one",
            json!({
                "metadata": {"name": "one", "labels": {"a": "b"}, "annotations": {
                    "projectcalico.org/IPv4Address": "192.0.2.1/24", "projectcalico.org/IPv4VXLANTunnelAddr": "10.0.0.1",
                    "projectcalico.org/IPv6Address": "damaged",
                }},
                "status": {"addresses": [
                    {"type": "Hostname", "address": "one"}, {"type": "InternalIP", "address": "192.0.2.1"},
                    {"type": "InternalIP", "address": "192.0.2.2"}, {"type": "ExternalIP", "address": "198.51.100.1"},
                ]},
            }),
        )
    }

    fn ready(changes: impl IntoIterator<Item = Change>) -> HostEndpoints {
        let mut endpoints = HostEndpoints::new(StorageForm::AsGiven);
        for kind in KINDS {
            endpoints.note(Side::Target, Change::InSync(kind, Position(1)));
        }
        changes.into_iter().for_each(|change| endpoints.note(Side::Target, change));
        endpoints
    }

    #[test]
    fn an_automatic_host_endpoint_is_as_calicos() {
        let endpoints = ready([node(), settings(json!({"autoCreate": "Enabled"}))]);
        let expected = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "HostEndpoint",
            "metadata": {"name": "one-auto-hep",
                "labels": {"a": "b", "projectcalico.org/created-by": "calico-kube-controllers"}},
            "spec": {"node": "one", "interfaceName": "*", "expectedIPs": ["192.0.2.1", "10.0.0.1", "192.0.2.2"],
                "profiles": ["projectcalico-default-allow"]},
        });
        assert_eq!(endpoints.decide(&key_of("one")), Decision::Create(expected));
    }

    #[test]
    fn only_automatic_host_endpoints_are_changed_and_only_if_the_settings_say_so() {
        let own = |name: &str| {
            put(
                Kind::HostEndpoint,
                name,
                json!({
                    "metadata": {"name": name, "labels": {"projectcalico.org/created-by": "calico-kube-controllers", "old": "x"}},
                    "spec": {"node": "one"},
                }),
            )
        };
        let foreign = || {
            put(
                Kind::HostEndpoint,
                "one-auto-hep",
                json!({"metadata": {"labels": {}}, "spec": {"node": "one"}}),
            )
        };
        let (on, off) =
            (|| settings(json!({"autoCreate": "Enabled"})), || settings(json!({"autoCreate": "Disabled"})));
        let invalid = || {
            put(
                Kind::KubeControllersConfiguration,
                "default",
                json!({"metadata": {"name": "default"}, "spec": 7}),
            )
        };
        let gone = || Change::Gone {
            key: Key::global(Kind::KubeControllersConfiguration, "default"),
            position: Position(9),
        };
        let name = |decision: &Decision| match decision {
            Decision::Nothing => "nothing",
            Decision::Foreign(_) => "foreign",
            Decision::Create(_) => "create",
            Decision::Update(..) => "update",
            Decision::Delete(..) => "delete",
        };
        let table = [
            (vec![node()], "nothing"),
            (vec![node(), on()], "create"),
            (
                vec![
                    node(),
                    settings(json!({"autoCreate": "Enabled", "createDefaultHostEndpoint": "Disabled"})),
                ],
                "nothing",
            ),
            (vec![node(), on(), own("one-auto-hep")], "update"),
            (vec![node(), on(), foreign()], "foreign"),
            (vec![node(), off(), foreign()], "nothing"),
            (vec![node(), off(), own("one-auto-hep")], "delete"),
            // Without settings that can be read, nothing opens.
            (vec![node(), own("one-auto-hep")], "nothing"),
            (vec![node(), on(), own("one-auto-hep"), gone()], "nothing"),
            (vec![node(), on(), own("one-auto-hep"), invalid()], "nothing"),
            (vec![own("one-auto-hep"), on()], "nothing"),
        ];
        for (number, (changes, expected)) in table.into_iter().enumerate() {
            let endpoints = ready(changes);
            assert_eq!(name(&endpoints.decide(&key_of("one"))), expected, "case {number}");
        }
    }

    #[test]
    fn nothing_is_due_before_every_kind_is_known() {
        let mut endpoints = HostEndpoints::new(StorageForm::AsGiven);
        let mut note = |change| {
            endpoints.note(Side::Target, change);
            endpoints.take_due().len()
        };
        assert_eq!(note(node()), 0);
        assert_eq!(note(settings(json!({"autoCreate": "Enabled"}))), 0);
        assert_eq!(note(Change::InSync(Kind::Node, Position(1))), 0);
        assert_eq!(note(Change::InSync(Kind::KubeControllersConfiguration, Position(1))), 0);
        assert_eq!(note(Change::InSync(Kind::HostEndpoint, Position(1))), 1);
    }
}

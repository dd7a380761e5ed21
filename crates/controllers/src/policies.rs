//! Kubernetes' network policies as Calico keeps them in etcd (`libcalico-go/lib/backend/k8s/conversion/conversion.go` and
//! `kube-controllers/pkg/converter/networkpolicy_converter.go`).

use serde_json::Value;
use tortie_api::calico::PolicyType;
use tortie_api::convert::{calico_spec, closed_calico_spec};
use tortie_api::kubernetes::LabelSelector;
use tortie_api::{Key, Kind, Resource};

/// The prefix of the copies' names.
pub(crate) const PREFIX: &str = "knp.default.";
/// The key of the copy of a policy.
pub(crate) fn copy_of(policy: &Key) -> Key {
    Key::namespaced(Kind::NetworkPolicy, &policy.namespace, format!("{PREFIX}{}", policy.name))
}

/// The `spec` of the copy. A policy that cannot be understood becomes one that denies everything to the pods that the
/// readable part of its selector allows.
pub(crate) fn spec(key: &Key, value: &Value) -> Value {
    match Resource::read(key, value) {
        Ok(Resource::KubernetesNetworkPolicy(policy)) => calico_spec(&policy),
        _ => {
            let pods = LabelSelector::readable(&value["spec"]["podSelector"]).unwrap_or_default();
            closed_calico_spec(&pods, &[PolicyType::Ingress, PolicyType::Egress])
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The first criterion of every selector for pods.
    const PODS: &str = "projectcalico.org/orchestrator == 'k8s'";

    fn convert(spec: Value) -> Value {
        let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "p");
        let value = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec});
        let copy = super::spec(&key, &value);
        // Tortie understands what it writes.
        let of_calico = json!({"metadata": {"name": "knp.default.p", "namespace": "n"}, "spec": copy});
        Resource::read(&copy_of(&key), &of_calico).unwrap_or_else(|problems| panic!("{copy}: {problems:?}"));
        copy
    }

    #[test]
    fn policies_are_as_calico_converts_them() {
        let with = |fields: Value| {
            let mut spec =
                json!({"tier": "default", "order": 1000.0, "selector": PODS, "types": ["Ingress"]});
            for (name, value) in fields.as_object().into_iter().flatten() {
                spec[name] = value.clone();
            }
            spec
        };
        let table = [
            (json!({"podSelector": {}}), with(json!({}))),
            (
                json!({"podSelector": {"matchLabels": {"b": "2", "a": "1"}, "matchExpressions": [
                    {"key": "x", "operator": "In", "values": ["1", "2"]}, {"key": "y", "operator": "NotIn", "values": ["3"]},
                    {"key": "z", "operator": "Exists"}, {"key": "w", "operator": "DoesNotExist"}]},
                    "policyTypes": ["Ingress", "Egress"]}),
                with(json!({"types": ["Ingress", "Egress"], "selector": format!(
                    "{PODS} && a == '1' && b == '2' && x in {{ '1', '2' }} && y not in {{ '3' }} && has(z) && ! has(w)")})),
            ),
            (
                json!({"podSelector": {}, "ingress": [{}]}),
                with(json!({"ingress": [{"action": "Allow", "source": {}, "destination": {}}]})),
            ),
            (
                json!({"podSelector": {}, "ingress": [{
                    "from": [
                        {"podSelector": {"matchLabels": {"a": "b"}}}, {"namespaceSelector": {}},
                        {"namespaceSelector": {"matchLabels": {"c": "d"}}, "podSelector": {}},
                        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                    ],
                }]}),
                with(json!({"ingress": [
                    {"action": "Allow", "source": {"selector": format!("{PODS} && a == 'b'")}, "destination": {}},
                    {"action": "Allow", "source": {"selector": PODS, "namespaceSelector": "all()"}, "destination": {}},
                    {"action": "Allow", "source": {"selector": PODS, "namespaceSelector": "c == 'd'"}, "destination": {}},
                    {"action": "Allow", "source": {"nets": ["10.0.0.0/8"], "notNets": ["10.1.0.0/16"]}, "destination": {}},
                ]})),
            ),
            (
                json!({"podSelector": {}, "policyTypes": ["Egress"], "ingress": [{}], "egress": [{"ports": [
                    {"port": 90, "endPort": 95}, {"port": "http"}, {"port": 80}, {"port": 81, "protocol": "TCP"},
                    {"protocol": "UDP"}, {"protocol": "UDP", "port": 53}, {"protocol": "SCTP", "port": 7, "endPort": 7},
                ], "to": [{"ipBlock": {"cidr": "fd00::/8"}}]}]}),
                with(json!({"types": ["Egress"], "egress": [
                    {"action": "Allow", "protocol": "SCTP", "source": {}, "destination": {"nets": ["fd00::/8"], "ports": [7]}},
                    {"action": "Allow", "protocol": "TCP", "source": {}, "destination":
                        {"nets": ["fd00::/8"], "ports": ["http", "80:81", "90:95"]}},
                    {"action": "Allow", "protocol": "UDP", "source": {}, "destination": {"nets": ["fd00::/8"]}},
                ]})),
            ),
        ];
        for (spec, expected) in table {
            assert_eq!(convert(spec.clone()), expected, "{spec}");
        }
    }

    /// Nothing opens because a policy is not understood.
    #[test]
    fn a_policy_that_is_not_understood_denies_everything() {
        let closed = |selector: &str| json!({"tier": "default", "order": 1000.0, "selector": selector, "types": ["Ingress", "Egress"]});
        let chosen = json!({"matchLabels": {"a": "b"}});
        let table = [
            (json!({"podSelector": chosen, "newField": 1}), closed(&format!("{PODS} && a == 'b'"))),
            (json!({"podSelector": {"matchLabels": {"a": 1}}, "ingress": [{}]}), closed(PODS)),
            (
                json!({"podSelector": chosen, "ingress": [{"from": [{}]}]}),
                closed(&format!("{PODS} && a == 'b'")),
            ),
            (json!({"podSelector": {"matchLabels": {"a": "b' || all() || a == 'b"}}}), closed(PODS)),
            (json!({"podSelector": {"matchLabels": {"no name": "b"}}}), closed(PODS)),
            (json!("damaged"), closed(PODS)),
        ];
        for (spec, expected) in table {
            assert_eq!(convert(spec.clone()), expected, "{spec}");
        }
    }
}

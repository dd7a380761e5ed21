//! The changes that stop Calico's components, and those that start them again. Pure.

use serde_json::{Value, json};

/// Calico's namespaces: of its manifests, and of its operator.
pub(super) const NAMESPACES: [&str; 3] = ["calico-system", "kube-system", "calico-apiserver"];
/// The operator's Deployment, its ClusterRoleBinding, and by default its namespace. Charts install it in any.
pub(super) const OPERATOR: &str = "tigera-operator";
/// Calico's Deployments, which are scaled to zero. Each labels its pods `k8s-app: NAME`, as the DaemonSets do.
pub(super) const DEPLOYMENTS: [&str; 3] = ["calico-kube-controllers", "calico-typha", "calico-apiserver"];
/// Calico's agents. A DaemonSet cannot be scaled, so it gets a node selector that no node has.
pub(super) const DAEMON_SETS: [&str; 2] = ["calico-node", "calico-node-windows"];
/// The label of that selector, and its value.
const SELECTOR: (&str, &str) = ("tortie.io/calico", "stopped");
/// The API of Calico's API server. While it is registered and does not answer, namespaces cannot be deleted anywhere in the cluster.
pub(super) const API_SERVICE: &str = "/apis/apiregistration.k8s.io/v1/apiservices/v3.projectcalico.org";

/// A component of Calico in the cluster.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Component {
    /// Its path in the API.
    pub(super) path: String,
    pub(super) object: Value,
}

/// A change of a component, with what takes it back.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Change {
    pub(super) path: String,
    pub(super) action: Action,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    /// Fields to merge, and the fields as they were.
    Merge { now: Value, before: Value },
    /// The object is deleted. Created again, it has this content.
    Delete { before: Value },
}

/// The paths of everything that `stop` may change, with the operator in this namespace, in the order of the changes: the operator first, because it
/// would restore the others, and the registration of the API server before the server.
pub(super) fn paths(operator: &str) -> Vec<String> {
    let of = |namespace: &str, plural: &str, name: &str| {
        format!("/apis/apps/v1/namespaces/{namespace}/{plural}/{name}")
    };
    let mut paths = vec![of(operator, "deployments", OPERATOR), API_SERVICE.to_owned()];
    for (plural, names) in [("deployments", &DEPLOYMENTS[..]), ("daemonsets", &DAEMON_SETS[..])] {
        for namespace in NAMESPACES {
            paths.extend(names.iter().map(|name| of(namespace, plural, name)));
        }
    }
    paths
}

/// The changes that stop these components. Those that are stopped already need none.
pub(super) fn stop(components: &[Component]) -> Vec<Change> {
    components.iter().filter_map(change).collect()
}

fn change(Component { path, object }: &Component) -> Option<Change> {
    let action = match object["kind"].as_str()? {
        "Deployment" => {
            let replicas = object["spec"].get("replicas").and_then(Value::as_u64).unwrap_or(1);
            (replicas > 0).then(|| Action::Merge { now: scaled(0), before: scaled(replicas) })?
        }
        "DaemonSet" => {
            let now = &object["spec"]["template"]["spec"]["nodeSelector"][SELECTOR.0];
            (*now != SELECTOR.1)
                .then(|| Action::Merge { now: selected(json!(SELECTOR.1)), before: selected(Value::Null) })?
        }
        // The API server registers the API of definitions itself, without a Service.
        "APIService" if object["spec"]["service"].is_object() => Action::Delete { before: content(object) },
        _ => return None,
    };
    Some(Change { path: path.clone(), action })
}

/// An object as it can be created again.
fn content(object: &Value) -> Value {
    let metadata = &object["metadata"];
    let mut content = json!({
        "apiVersion": object["apiVersion"], "kind": object["kind"], "metadata": {"name": metadata["name"]}, "spec": object["spec"],
    });
    for field in ["labels", "annotations"] {
        if let Some(value) = metadata.get(field) {
            content["metadata"][field] = value.clone();
        }
    }
    content
}

impl Change {
    /// The record of what takes the change back.
    pub(super) fn record(&self) -> Value {
        match &self.action {
            Action::Merge { before, .. } => json!({"path": self.path, "merge": before}),
            Action::Delete { before } => json!({"path": self.path, "create": before}),
        }
    }

    /// The key of the record in a ConfigMap.
    pub(super) fn key(&self) -> String {
        key_of(&self.path)
    }
}

/// `/apis/apps/v1/namespaces/n/deployments/d` → `n.deployments.d`.
fn key_of(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.iter().position(|part| *part == "namespaces") {
        Some(at) => parts[at + 1..].join("."),
        None => parts[parts.len().saturating_sub(2)..].join("."),
    }
}

/// The changes that take back what these records say, in the opposite order: the agents first, the operator last.
/// Records of unknown components, and of other changes than those of `stop`, are errors, because somebody else has written them: they would be
/// carried out with the rights of the operator of the cluster.
pub(super) fn start(records: &serde_json::Map<String, Value>) -> Result<Vec<Undo>, String> {
    // The operator's binding may be gone by now.
    let operator = records.keys().find_map(|key| key.strip_suffix(".deployments.tigera-operator"));
    let known = paths(operator.unwrap_or(OPERATOR));
    if let Some(key) = records.keys().find(|key| !known.iter().any(|path| key_of(path) == **key)) {
        return Err(format!("{key:?} is no component of Calico"));
    }
    let mut undo = Vec::new();
    for path in known.into_iter().rev() {
        let Some(text) = records.get(&key_of(&path)) else { continue };
        let record: Value = serde_json::from_str(text.as_str().unwrap_or_default())
            .map_err(|error| format!("the record of {path}: {error}"))?;
        match (record.get("merge"), record.get("create")) {
            (Some(fields), None) if is_of_stop(fields) => {
                undo.push(Undo::Merge { path, fields: fields.clone() })
            }
            (None, Some(object)) if path == API_SERVICE && object["kind"] == "APIService" => {
                undo.push(Undo::Create { path, object: object.clone() });
            }
            _ => return Err(format!("the record of {path} is none of tortie calico stop")),
        }
    }
    Ok(undo)
}

/// Returns whether fields are those that `stop` changes.
fn is_of_stop(fields: &Value) -> bool {
    let replicas = fields["spec"]["replicas"].as_u64();
    replicas.is_some_and(|replicas| *fields == scaled(replicas)) || *fields == selected(Value::Null)
}

fn scaled(replicas: u64) -> Value {
    json!({"spec": {"replicas": replicas}})
}

fn selected(value: Value) -> Value {
    let mut selector = json!({});
    selector[SELECTOR.0] = value;
    json!({"spec": {"template": {"spec": {"nodeSelector": selector}}}})
}

/// A change back.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Undo {
    Merge { path: String, fields: Value },
    Create { path: String, object: Value },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(path: &str, kind: &str, spec: Value) -> Component {
        let name = path.rsplit('/').next().unwrap();
        let metadata = json!({"name": name, "uid": "u", "resourceVersion": "7", "labels": {"a": "b"}});
        Component {
            path: path.to_owned(),
            object: json!({"apiVersion": "v", "kind": kind, "metadata": metadata, "spec": spec}),
        }
    }

    fn typha(spec: Value) -> Component {
        component("/apis/apps/v1/namespaces/calico-system/deployments/calico-typha", "Deployment", spec)
    }

    fn agents(selector: Value) -> Component {
        let path = "/apis/apps/v1/namespaces/kube-system/daemonsets/calico-node";
        component(path, "DaemonSet", json!({"template": {"spec": {"nodeSelector": selector}}}))
    }

    #[test]
    fn what_stops_a_component_can_be_taken_back() {
        let stopped =
            json!({"spec": {"template": {"spec": {"nodeSelector": {"tortie.io/calico": "stopped"}}}}});
        let free = json!({"spec": {"template": {"spec": {"nodeSelector": {"tortie.io/calico": null}}}}});
        let service = json!({"group": "projectcalico.org", "service": {"name": "calico-api"}});
        for (component, now, before) in [
            (
                typha(json!({"replicas": 3})),
                json!({"spec": {"replicas": 0}}),
                json!({"spec": {"replicas": 3}}),
            ),
            (typha(json!({})), json!({"spec": {"replicas": 0}}), json!({"spec": {"replicas": 1}})),
            (agents(json!({"kubernetes.io/os": "linux"})), stopped.clone(), free.clone()),
            (agents(json!(null)), stopped, free),
        ] {
            let expected = Change { path: component.path.clone(), action: Action::Merge { now, before } };
            assert_eq!(stop(std::slice::from_ref(&component)), [expected], "{component:?}");
        }
        let registered = component(API_SERVICE, "APIService", service.clone());
        let content = json!({"apiVersion": "v", "kind": "APIService", "metadata": {"name": "v3.projectcalico.org", "labels": {"a": "b"}}, "spec": service});
        let changes = stop(&[registered]);
        assert_eq!(
            changes,
            [Change { path: API_SERVICE.to_owned(), action: Action::Delete { before: content.clone() } }]
        );
        let records =
            changes.iter().map(|change| (change.key(), json!(change.record().to_string()))).collect();
        assert_eq!(start(&records), Ok(vec![Undo::Create { path: API_SERVICE.to_owned(), object: content }]));
    }

    #[test]
    fn what_is_stopped_or_not_calicos_stays() {
        for component in [
            typha(json!({"replicas": 0})),
            agents(json!({"tortie.io/calico": "stopped"})),
            component(API_SERVICE, "APIService", json!({"group": "projectcalico.org"})),
        ] {
            assert_eq!(stop(std::slice::from_ref(&component)), [], "{component:?}");
        }
    }

    #[test]
    fn the_operator_stops_first_and_starts_last() {
        let names: Vec<String> = paths(OPERATOR).iter().map(|path| key_of(path)).collect();
        assert_eq!(
            names[..2],
            ["tigera-operator.deployments.tigera-operator", "apiservices.v3.projectcalico.org"]
        );
        assert_eq!(names.last().unwrap(), "calico-apiserver.daemonsets.calico-node-windows");
        let merge = json!({"merge": {"spec": {"replicas": 1}}}).to_string();
        let records = [&names[0], &names[2], &names[12]].map(|name| (name.clone(), json!(merge)));
        let undo = start(&records.into_iter().collect()).unwrap();
        let order: Vec<String> = undo
            .iter()
            .map(|undo| match undo {
                Undo::Merge { path, .. } | Undo::Create { path, .. } => key_of(path),
            })
            .collect();
        assert_eq!(order, [&names[12], &names[2], &names[0]].map(String::clone));
    }

    #[test]
    fn records_of_somebody_else_change_nothing() {
        let key = key_of(&paths(OPERATOR)[0]);
        let image = json!({"merge": {"spec": {"template": {"spec": {"containers": []}}}}}).to_string();
        let more = json!({"merge": {"spec": {"replicas": 1, "template": {}}}}).to_string();
        let create = json!({"create": {"kind": "DaemonSet"}}).to_string();
        for (key, text) in [
            ("kube-system.deployments.coredns", "{}"),
            (key.as_str(), "{}"),
            (key.as_str(), "x"),
            (key.as_str(), image.as_str()),
            (key.as_str(), more.as_str()),
            (key.as_str(), create.as_str()),
        ] {
            let records = [(key.to_owned(), json!(text))].into_iter().collect();
            assert!(start(&records).is_err(), "{key} {text}");
        }
    }
}

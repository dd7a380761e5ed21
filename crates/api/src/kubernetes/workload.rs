//! `apps/v1` and `batch/v1`: what makes pods of a template.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{LabelSelector, Pod, Requirement};
use crate::fields::list;
use crate::resource::typed;
use crate::{FieldError, Key, Kind, Metadata};

/// A Deployment, ReplicaSet, StatefulSet, DaemonSet, ReplicationController, Job or CronJob.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Its name, namespace, labels and annotations.
    pub metadata: Metadata,
    /// The number of pods; a DaemonSet and a CronJob have no number of their own.
    pub replicas: usize,
    /// Whether a Deployment removes its old pods before it makes new ones.
    pub recreates: bool,
    /// The pods, without name, namespace and node.
    pub template: Value,
}

/// The fields of all kinds.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WorkloadSpec {
    replicas: Option<u32>,
    selector: Option<Value>,
    strategy: Strategy,
    parallelism: Option<u32>,
    completions: Option<u32>,
    suspend: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Strategy {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct WholeWorkload {
    metadata: Metadata,
    spec: WorkloadSpec,
}

impl Workload {
    /// The field with the template of a kind.
    #[must_use]
    pub(crate) fn template_path(kind: Kind) -> &'static str {
        match kind {
            Kind::CronJob => "spec.jobTemplate.spec.template",
            _ => "spec.template",
        }
    }

    /// Reads an object of such a kind.
    ///
    /// # Errors
    /// Every problem, also with the template as a pod.
    pub(crate) fn read(key: &Key, value: &Value) -> Result<Self, Vec<FieldError>> {
        let whole: WholeWorkload = typed(value).map_err(|error| vec![error])?;
        let path = Self::template_path(key.kind);
        let missing = |path: &str| vec![FieldError::new(path, "is missing")];
        let template = value.pointer(&format!("/{}", path.replace('.', "/"))).ok_or_else(|| missing(path))?;
        let pod = typed::<Pod>(&pod_of(key, template))
            .map_err(|error| vec![FieldError::new(format!("{path}.{}", error.path), error.problem)])?;
        let is_of_apps = key.kind.api_version().starts_with("apps/");
        match &whole.spec.selector {
            None if is_of_apps => return Err(missing("spec.selector")),
            Some(selector) => check_selector(key.kind, selector, &pod.metadata.labels)?,
            None => {}
        }
        Ok(Self {
            metadata: whole.metadata,
            replicas: whole.spec.count(key.kind),
            recreates: whole.spec.strategy.kind == "Recreate",
            template: template.clone(),
        })
    }
}

impl Workload {
    /// The field of the status with the version of the template that the lab's controller has seen. A Kubernetes API has
    /// `observedGeneration`.
    pub const OBSERVED: &str = "observedTemplate";

    /// Whether the status says that all pods of this template run.
    #[must_use]
    pub fn is_complete(&self, kind: Kind, value: &Value) -> bool {
        let status = &value["status"];
        let number =
            |name: &str| status[name].as_u64().and_then(|number| usize::try_from(number).ok()).unwrap_or(0);
        let generation = value["metadata"]["generation"].as_u64().unwrap_or(0);
        let is_seen = match status.get(Self::OBSERVED).and_then(Value::as_str) {
            Some(version) => version == self.version(),
            None => status["observedGeneration"].as_u64().unwrap_or(0) >= generation && generation > 0,
        };
        // Whoever chose that deletes the old pods himself.
        let on_delete = value.pointer("/spec/updateStrategy/type").is_some_and(|name| name == "OnDelete");
        match kind {
            Kind::CronJob => true,
            // Only some statuses of a Job in the Kubernetes API have a generation.
            Kind::Job => number("ready") + number("succeeded") >= self.replicas,
            Kind::DaemonSet => {
                let wanted = number("desiredNumberScheduled");
                let is_updated = on_delete || number("updatedNumberScheduled") == wanted;
                is_seen && number("numberReady") == wanted && is_updated
            }
            _ => {
                // An API server leaves the field out while it is 0. ReplicaSets do not have it, and do not replace pods.
                let replaces = matches!(kind, Kind::Deployment | Kind::StatefulSet) && !on_delete;
                let left =
                    value.pointer("/spec/updateStrategy/rollingUpdate/partition").and_then(Value::as_u64);
                let left = left.and_then(|number| usize::try_from(number).ok()).unwrap_or(0);
                let is_updated = !replaces || number("updatedReplicas") + left >= self.replicas;
                is_seen
                    && is_updated
                    && number("replicas") == self.replicas
                    && number("readyReplicas") == self.replicas
            }
        }
    }

    /// Whether a pod with these labels may be one of its pods.
    #[must_use]
    pub fn may_own(&self, pod: &Value) -> bool {
        let labels = self.template.pointer("/metadata/labels").and_then(Value::as_object);
        labels.into_iter().flatten().all(|(name, value)| pod["metadata"]["labels"].get(name) == Some(value))
    }

    /// A name for this version of the template: equal templates have equal names.
    #[must_use]
    pub fn version(&self) -> String {
        name_of(&self.template.to_string(), 10)
    }
}

/// A name of `length` letters and digits for a text, of those that Kubernetes uses: no word is among such names
/// (`apimachinery/pkg/util/rand`).
#[must_use]
pub fn name_of(text: &str, length: usize) -> String {
    const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut name = String::new();
    for round in 0..length {
        // FNV-1a, which is the same in every build.
        let hash = [text.as_bytes(), &round.to_be_bytes()]
            .concat()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
        // The lower bits of such a hash depend on few bytes.
        let letter = usize::try_from((hash ^ (hash >> 32)) % LETTERS.len() as u64).unwrap_or_default();
        name.push(char::from(LETTERS[letter]));
    }
    name
}

impl WorkloadSpec {
    fn count(&self, kind: Kind) -> usize {
        let number = match kind {
            Kind::Job if self.suspend => 0,
            Kind::Job => {
                let parallelism = self.parallelism.unwrap_or(1);
                self.completions.map_or(parallelism, |completions| completions.min(parallelism))
            }
            Kind::DaemonSet | Kind::CronJob => 0,
            _ => self.replicas.unwrap_or(1),
        };
        usize::try_from(number).unwrap_or(usize::MAX)
    }
}

/// A pod of a template, under the workload's name.
pub(crate) fn pod_of(key: &Key, template: &Value) -> Value {
    let metadata = |name: &str| template.pointer(&format!("/metadata/{name}")).cloned();
    let mut pod = json!({
        "apiVersion": Kind::Pod.api_version(), "kind": Kind::Pod.name(),
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": template.get("spec").cloned().unwrap_or_else(|| json!({})),
    });
    for name in ["labels", "annotations"] {
        if let Some(value) = metadata(name).filter(|value| !value.is_null()) {
            pod["metadata"][name] = value;
        }
    }
    pod
}

/// Rejects a selector that does not select the pods of the template: they would be made without end.
fn check_selector(
    kind: Kind,
    selector: &Value,
    labels: &BTreeMap<String, String>,
) -> Result<(), Vec<FieldError>> {
    // The controller gives a Job its selector.
    if kind == Kind::Job {
        return Ok(());
    }
    let within =
        |error: FieldError| vec![FieldError::new(format!("spec.selector.{}", error.path), error.problem)];
    let selects = match kind {
        Kind::ReplicationController => {
            let wanted: BTreeMap<String, String> = typed(selector).map_err(within)?;
            wanted.iter().all(|(name, value)| labels.get(name) == Some(value))
        }
        _ => typed::<LabelSelector>(selector).map_err(within)?.selects(labels),
    };
    match selects {
        true => Ok(()),
        false => Err(vec![FieldError::new("spec.selector", "does not select the labels of spec.template")]),
    }
}

impl LabelSelector {
    /// Whether it selects an object with these labels.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(name, value)| labels.get(name) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    /// Whether it holds for an object with these labels. `Gt` and `Lt` exist for nodes only.
    #[must_use]
    pub fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let compare = |is: fn(&i64, &i64) -> bool| {
            let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
            number(value).zip(number(self.values.first())).is_some_and(|(left, right)| is(&left, &right))
        };
        match self.operator.as_str() {
            "In" => value.is_some_and(|value| self.values.contains(value)),
            "NotIn" => value.is_none_or(|value| !self.values.contains(value)),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            "Gt" => compare(i64::gt),
            "Lt" => compare(i64::lt),
            _ => false,
        }
    }
}

/// What decides on which nodes a pod can run (`v1` PodSpec).
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Placement {
    /// The labels that its node must have.
    node_selector: BTreeMap<String, String>,
    affinity: Affinity,
    #[serde(deserialize_with = "list")]
    tolerations: Vec<Toleration>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Affinity {
    node_affinity: NodeAffinity,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct NodeAffinity {
    required_during_scheduling_ignored_during_execution: Option<NodeSelector>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct NodeSelector {
    #[serde(deserialize_with = "list")]
    node_selector_terms: Vec<NodeSelectorTerm>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct NodeSelectorTerm {
    #[serde(deserialize_with = "list")]
    match_expressions: Vec<Requirement>,
    #[serde(deserialize_with = "list")]
    match_fields: Vec<Requirement>,
}

/// A taint that a pod tolerates.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Toleration {
    key: String,
    operator: String,
    value: String,
    effect: String,
}

/// A taint of a node.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Taint {
    key: String,
    value: String,
    effect: String,
}

impl Placement {
    /// The placement of a pod.
    #[must_use]
    pub fn of(pod: &Value) -> Self {
        pod.get("spec").and_then(|spec| typed(spec).ok()).unwrap_or_default()
    }

    /// Whether the pod may run on this node. The pods of a DaemonSet tolerate a node that is closed for new pods.
    #[must_use]
    pub fn fits(&self, node: &Value, is_daemon: bool) -> bool {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let labels: BTreeMap<String, String> = typed(&node["metadata"]["labels"]).unwrap_or_default();
        let fields = [("metadata.name".to_owned(), name.to_owned())].into();
        let required = &self.affinity.node_affinity.required_during_scheduling_ignored_during_execution;
        let is_chosen = required.as_ref().is_none_or(|selector| {
            selector.node_selector_terms.iter().any(|term| {
                let is_empty = term.match_expressions.is_empty() && term.match_fields.is_empty();
                !is_empty
                    && term.match_expressions.iter().all(|requirement| requirement.holds(&labels))
                    && term.match_fields.iter().all(|requirement| requirement.holds(&fields))
            })
        });
        let taints: Vec<Taint> = typed(&node["spec"]["taints"]).unwrap_or_default();
        let repels = |taint: &&Taint| {
            taint.effect != "PreferNoSchedule" && !self.tolerations.iter().any(|one| one.tolerates(taint))
        };
        let is_closed = node["spec"]["unschedulable"] == true && !is_daemon;
        self.node_selector.iter().all(|(name, value)| labels.get(name) == Some(value))
            && is_chosen
            && !is_closed
            && !taints.iter().any(|taint| repels(&taint))
    }
}

impl Toleration {
    fn tolerates(&self, taint: &Taint) -> bool {
        let has_value = self.operator == "Exists" || self.value == taint.value;
        (self.effect.is_empty() || self.effect == taint.effect)
            && ((self.key.is_empty() && self.operator == "Exists") || (self.key == taint.key && has_value))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_placed_as_their_spec_says() {
        let node = |extra: Value| {
            json!({
                "metadata": {"name": "minion", "labels": {"kubernetes.io/os": "windows", "size": "5"}}, "spec": extra,
            })
        };
        let term = |key: &str, operator: &str, values: Value| {
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]}}}})
        };
        let tainted = json!({"taints": [{"key": "os", "value": "windows", "effect": "NoSchedule"}]});
        let tolerant = |toleration: Value| json!({"tolerations": [toleration]});
        for (spec, of_node, fits) in [
            (json!({}), json!({}), true),
            (json!({"nodeSelector": {"kubernetes.io/os": "windows"}}), json!({}), true),
            (json!({"nodeSelector": {"kubernetes.io/os": "linux"}}), json!({}), false),
            (term("kubernetes.io/os", "In", json!(["windows"])), json!({}), true),
            (term("kubernetes.io/os", "In", json!(["linux"])), json!({}), false),
            (term("kubernetes.io/os", "NotIn", json!(["linux"])), json!({}), true),
            (term("gpu", "Exists", json!([])), json!({}), false),
            (term("gpu", "DoesNotExist", json!([])), json!({}), true),
            (term("size", "Gt", json!(["4"])), json!({}), true),
            (term("size", "Lt", json!(["4"])), json!({}), false),
            (term("size", "Near", json!(["5"])), json!({}), false),
            (json!({}), tainted.clone(), false),
            (json!({}), json!({"taints": [{"key": "x", "effect": "PreferNoSchedule"}]}), true),
            (tolerant(json!({"operator": "Exists"})), tainted.clone(), true),
            (
                tolerant(json!({"key": "os", "value": "windows", "effect": "NoSchedule"})),
                tainted.clone(),
                true,
            ),
            (tolerant(json!({"key": "os", "value": "linux"})), tainted.clone(), false),
            (tolerant(json!({"key": "os", "operator": "Exists", "effect": "NoExecute"})), tainted, false),
            (json!({}), json!({"unschedulable": true}), false),
        ] {
            assert_eq!(
                Placement::of(&json!({"spec": spec})).fits(&node(of_node.clone()), false),
                fits,
                "{spec} {of_node}"
            );
        }
        assert!(Placement::default().fits(&node(json!({"unschedulable": true})), true), "a DaemonSet's");
    }

    /// Statuses of an API server and of the lab's controller, during and after a change of the template.
    #[test]
    fn a_workload_is_complete_when_all_pods_of_its_template_run() {
        let in_api = |spec: Value, status: Value| {
            let mut value =
                json!({"metadata": {"name": "w", "generation": 2}, "spec": spec, "status": status});
            value["spec"]["selector"] = json!({"matchLabels": {"app": "w"}});
            value["spec"]["template"] = json!({"metadata": {"labels": {"app": "w"}}});
            value["status"]["observedGeneration"] = json!(2);
            value
        };
        let on_delete = json!({"replicas": 2, "updateStrategy": {"type": "OnDelete"}});
        let partition = json!({"replicas": 2, "updateStrategy": {"rollingUpdate": {"partition": 1}}});
        let two = || json!({"replicas": 2});
        let running = || json!({"replicas": 2, "readyReplicas": 2});
        let updated = |count: u64| json!({"replicas": 2, "readyReplicas": 2, "updatedReplicas": count});
        let nodes = |updated: u64| json!({"desiredNumberScheduled": 2, "numberReady": 2, "updatedNumberScheduled": updated});
        for (kind, value, expected) in [
            (Kind::StatefulSet, in_api(two(), updated(2)), true),
            (Kind::StatefulSet, in_api(two(), updated(1)), false),
            // The field is absent while it is 0.
            (Kind::StatefulSet, in_api(two(), running()), false),
            (Kind::Deployment, in_api(two(), running()), false),
            (Kind::ReplicaSet, in_api(two(), running()), true),
            (Kind::StatefulSet, in_api(partition, updated(1)), true),
            (Kind::StatefulSet, in_api(on_delete.clone(), running()), true),
            (Kind::DaemonSet, in_api(json!({}), nodes(2)), true),
            (Kind::DaemonSet, in_api(json!({}), nodes(1)), false),
            (Kind::DaemonSet, in_api(on_delete, nodes(1)), true),
        ] {
            let key = crate::Key::namespaced(kind, "n", "w");
            let crate::Resource::Workload(workload) = crate::Resource::read(&key, &value).unwrap() else {
                panic!("{value}")
            };
            assert_eq!(workload.is_complete(kind, &value), expected, "{kind}: {value}");
        }
    }
}

//! Replaces Kubernetes' controllers of workloads: Deployments get ReplicaSets, and these and others get pods.
//!
//! Pods of the lab never end by themselves, so Jobs do not complete, and no clock starts CronJobs.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tortie_api::kubernetes::{Placement, Workload, name_of};
use tortie_api::{Key, Kind, Resource};
use tortie_store::{Stored, Write};

/// The most pods of a workload.
const MOST_PODS: usize = 1_000;
/// What pods are made of, and the pods.
pub(crate) const KINDS: [Kind; 8] = [
    Kind::Deployment,
    Kind::ReplicaSet,
    Kind::StatefulSet,
    Kind::DaemonSet,
    Kind::ReplicationController,
    Kind::Job,
    Kind::Node,
    Kind::Pod,
];

/// The annotation of what this controller made: the version of the template.
const VERSION: &str = "tortie.io/lab-template";
/// The label by which a Deployment tells its ReplicaSets apart.
const POD_TEMPLATE_HASH: &str = "pod-template-hash";
/// Names that Kubernetes completes are cut to this length first.
const MAX_PREFIX: usize = 57;
/// The length of what makes a name of a pod unique.
const SUFFIX: usize = 5;

/// The writes after which each workload has its pods, and its status says so.
pub(crate) fn missing_writes(objects: &[&Stored]) -> Vec<Write> {
    let cluster = OwnedObjects::of(objects);
    let mut writes = cluster.orphans();
    for (stored, workload) in &cluster.workloads {
        let of = Owner { cluster: &cluster, stored, workload };
        match stored.key.kind {
            Kind::Deployment => of.replica_sets(&mut writes),
            _ => of.pods(&mut writes),
        }
    }
    writes
}

/// The objects, as their owners see them.
struct OwnedObjects<'a> {
    workloads: Vec<(&'a Stored, Workload)>,
    nodes: Vec<&'a Stored>,
    /// What this controller made, by the owner.
    made: BTreeMap<Key, Vec<&'a Stored>>,
    keys: BTreeSet<&'a Key>,
}

impl<'a> OwnedObjects<'a> {
    fn of(objects: &[&'a Stored]) -> Self {
        let mut made: BTreeMap<Key, Vec<&Stored>> = BTreeMap::new();
        for stored in objects {
            if let Some(owner) = owner_of(stored) {
                made.entry(owner).or_default().push(stored);
            }
        }
        let workloads =
            objects.iter().filter_map(|stored| match Resource::read(&stored.key, &stored.value) {
                Ok(Resource::Workload(workload)) => Some((*stored, workload)),
                _ => None,
            });
        Self {
            workloads: workloads.collect(),
            nodes: objects.iter().copied().filter(|stored| stored.key.kind == Kind::Node).collect(),
            made,
            keys: objects.iter().map(|stored| &stored.key).collect(),
        }
    }

    /// Deletes what was made for owners that are gone.
    fn orphans(&self) -> Vec<Write> {
        let gone = self.made.iter().filter(|(owner, _)| !self.keys.contains(owner));
        gone.flat_map(|(_, made)| made.iter().copied().map(deletion)).collect()
    }

    fn made_by(&self, owner: &Key) -> &[&'a Stored] {
        self.made.get(owner).map_or(&[], Vec::as_slice)
    }

    /// How many pods there are, and how many of them run.
    fn count(&self, owner: &Key) -> (usize, usize) {
        let pods = self.made_by(owner);
        (pods.len(), pods.iter().filter(|pod| pod.value["status"]["phase"] == "Running").count())
    }
}

/// The owner of an object that this controller made.
fn owner_of(stored: &Stored) -> Option<Key> {
    let metadata = &stored.value["metadata"];
    metadata["annotations"].get(VERSION)?;
    let owner = metadata["ownerReferences"].get(0)?;
    let text = |name: &str| owner[name].as_str();
    let kind = Kind::of(text("apiVersion")?, text("kind")?)?;
    Some(Key::namespaced(kind, &stored.key.namespace, text("name")?))
}

fn deletion(stored: &Stored) -> Write {
    Write::Delete(stored.key.clone(), Some(stored.version.clone()))
}

/// A workload, and what it owns.
struct Owner<'a> {
    cluster: &'a OwnedObjects<'a>,
    stored: &'a Stored,
    workload: &'a Workload,
}

impl Owner<'_> {
    /// One ReplicaSet for the version of the template. Those of former versions go when its pods run, or before it comes.
    fn replica_sets(&self, writes: &mut Vec<Write>) {
        let (version, count) = (self.workload.version(), self.workload.replicas);
        let key = Key::namespaced(Kind::ReplicaSet, self.namespace(), format!("{}-{version}", self.name()));
        let made = self.cluster.made_by(&self.stored.key);
        let (current, former): (Vec<&Stored>, Vec<&Stored>) = made.iter().partition(|set| set.key == key);
        let (pods, ready) = self.cluster.count(&key);
        let is_replaced = pods == count && ready == count && !current.is_empty();
        if self.workload.recreates || is_replaced {
            writes.extend(former.iter().copied().map(deletion));
        }
        let is_early = self.workload.recreates && !former.is_empty();
        match current.first() {
            Some(set) if set.value["spec"]["replicas"] != json!(count) => {
                let mut value = set.value.clone();
                value["spec"]["replicas"] = json!(count);
                writes.push(Write::Update(key, value, set.version.clone()));
            }
            None if !is_early && !self.cluster.keys.contains(&key) => {
                writes.push(Write::Create(key.clone(), self.replica_set(&key, &version)));
            }
            _ => {}
        }
        let all: usize = made.iter().map(|set| self.cluster.count(&set.key).0).sum();
        let running: usize = made.iter().map(|set| self.cluster.count(&set.key).1).sum();
        let status = json!({
            "replicas": all, "updatedReplicas": pods, "readyReplicas": running, "availableReplicas": running,
        });
        self.set_status(status, writes);
    }

    fn replica_set(&self, key: &Key, version: &str) -> Value {
        let mut template = self.workload.template.clone();
        template["metadata"]["labels"][POD_TEMPLATE_HASH] = json!(version);
        let mut selector = self.stored.value["spec"]["selector"].clone();
        selector["matchLabels"][POD_TEMPLATE_HASH] = json!(version);
        let labels = template["metadata"]["labels"].clone();
        json!({
            "apiVersion": key.kind.api_version(), "kind": key.kind.name(),
            "metadata": self.metadata(key, labels, json!({}), version),
            "spec": {"replicas": self.workload.replicas, "selector": selector, "template": template},
        })
    }

    /// The pods of the workload itself.
    fn pods(&self, writes: &mut Vec<Write>) {
        let mut wanted = self.wanted_pods();
        for pod in self.cluster.made_by(&self.stored.key) {
            let version = |value: &Value| value["metadata"]["annotations"][VERSION].clone();
            match wanted.remove(&pod.key) {
                Some(value) if version(&value) == version(&pod.value) => {}
                // The next pod comes when this one is gone.
                _ => writes.push(deletion(pod)),
            }
        }
        // A name that somebody else's pod has stays free until that pod is gone.
        wanted.retain(|key, _| !self.cluster.keys.contains(key));
        writes.extend(wanted.into_iter().map(|(key, value)| Write::Create(key, value)));
        let (all, ready) = self.cluster.count(&self.stored.key);
        let version = self.workload.version();
        let made = self.cluster.made_by(&self.stored.key);
        let updated =
            made.iter().filter(|pod| pod.value["metadata"]["annotations"][VERSION] == *version).count();
        let status = match self.stored.key.kind {
            Kind::DaemonSet => json!({
                "desiredNumberScheduled": self.node_names().count(), "currentNumberScheduled": all,
                "updatedNumberScheduled": updated, "numberReady": ready, "numberAvailable": ready, "numberMisscheduled": 0,
            }),
            Kind::Job => json!({"active": all, "ready": ready}),
            Kind::StatefulSet => json!({
                "replicas": all, "updatedReplicas": updated, "readyReplicas": ready, "availableReplicas": ready,
            }),
            _ => json!({"replicas": all, "readyReplicas": ready, "availableReplicas": ready}),
        };
        self.set_status(status, writes);
    }

    fn wanted_pods(&self) -> BTreeMap<Key, Value> {
        let mut pods = BTreeMap::new();
        let mut add = |name: String, labels: Value, spec: Value| {
            let key = Key::namespaced(Kind::Pod, self.namespace(), name);
            let value = self.pod(&key, labels, &spec);
            pods.insert(key, value);
        };
        match self.stored.key.kind {
            Kind::StatefulSet => {
                let first =
                    self.stored.value.pointer("/spec/ordinals/start").and_then(Value::as_u64).unwrap_or(0);
                for number in (first..).take(self.pod_count()) {
                    let name = format!("{}-{number}", self.name());
                    let labels = json!({
                        "statefulset.kubernetes.io/pod-name": name, "apps.kubernetes.io/pod-index": number.to_string(),
                    });
                    let subdomain = &self.stored.value["spec"]["serviceName"];
                    add(name.clone(), labels, json!({"hostname": name, "subdomain": subdomain}));
                }
            }
            Kind::DaemonSet => {
                for node in self.node_names() {
                    add(self.completed(node), json!({}), json!({"nodeName": node}));
                }
            }
            Kind::Job => {
                let labels = json!({"job-name": self.name(), "batch.kubernetes.io/job-name": self.name()});
                self.completed_names().into_iter().for_each(|name| add(name, labels.clone(), json!({})));
            }
            _ => self.completed_names().into_iter().for_each(|name| add(name, json!({}), json!({}))),
        }
        pods
    }

    /// A pod of the template with these labels and fields of the spec besides.
    fn pod(&self, key: &Key, labels: Value, spec: &Value) -> Value {
        let template = &self.workload.template;
        let mut value = json!({
            "apiVersion": key.kind.api_version(), "kind": key.kind.name(),
            "metadata": self.metadata(
                key,
                with(&template["metadata"]["labels"], &labels),
                template["metadata"]["annotations"].clone(),
                &self.workload.version(),
            ),
            "spec": with(&template["spec"], spec),
        });
        if let Some(spec) = value["spec"].as_object_mut() {
            spec.retain(|_, value| !value.is_null());
        }
        value
    }

    fn metadata(&self, key: &Key, labels: Value, annotations: Value, version: &str) -> Value {
        let owner = &self.stored.key;
        json!({
            "name": key.name, "namespace": key.namespace, "labels": labels,
            "annotations": with(&annotations, &json!({(VERSION): version})),
            "ownerReferences": [{
                "apiVersion": owner.kind.api_version(), "kind": owner.kind.name(), "name": owner.name,
                "uid": self.stored.value["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
            }],
        })
    }

    /// As many names as the workload has pods. They differ although each of them is derived from a number.
    fn completed_names(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for number in 0_usize.. {
            if names.len() >= self.pod_count() {
                break;
            }
            names.insert(self.completed(&number.to_string()));
        }
        names
    }

    /// How many pods the workload gets: a lab has no room for more.
    fn pod_count(&self) -> usize {
        if self.workload.replicas > MOST_PODS {
            tracing::warn!(workload = %self.stored.key, replicas = self.workload.replicas, "a workload has at most {MOST_PODS} pods in a lab");
        }
        self.workload.replicas.min(MOST_PODS)
    }

    fn completed(&self, text: &str) -> String {
        let prefix: String = self.name().chars().take(MAX_PREFIX).collect();
        format!("{prefix}-{}", name_of(&format!("{}/{text}", self.name()), SUFFIX))
    }

    /// The nodes that a DaemonSet's pods may run on.
    fn node_names(&self) -> impl Iterator<Item = &str> {
        let placement = Placement::of(&self.workload.template);
        let nodes = self.cluster.nodes.iter().filter(move |node| placement.fits(&node.value, true));
        nodes.map(|node| node.key.name.as_str())
    }

    fn set_status(&self, status: Value, writes: &mut Vec<Write>) {
        let mut value = self.stored.value.clone();
        value["status"] = with(&status, &json!({(Workload::OBSERVED): self.workload.version()}));
        if value != self.stored.value {
            writes.push(Write::Update(self.stored.key.clone(), value, self.stored.version.clone()));
        }
    }

    fn name(&self) -> &str {
        &self.stored.key.name
    }

    fn namespace(&self) -> &str {
        &self.stored.key.namespace
    }
}

/// A mapping with the fields of another one over it.
fn with(under: &Value, over: &Value) -> Value {
    let mut fields = under.as_object().cloned().unwrap_or_default();
    fields.extend(over.as_object().cloned().unwrap_or_default());
    Value::Object(fields)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_api::manifest;
    use tortie_store::Written;

    use super::*;

    /// A store of plain data, in which writes succeed.
    #[derive(Default)]
    struct Objects(BTreeMap<Key, Stored>, u64);

    impl Objects {
        fn put(&mut self, key: Key, value: Value) {
            self.1 += 1;
            self.0.insert(key.clone(), Stored::new(key, value, Written::at(self.1)));
        }

        fn apply(&mut self, text: &str) {
            for object in manifest::read("m.yml", text).unwrap() {
                let current = self.0.get(&object.key).map(|stored| &stored.value);
                let value = tortie_store::applied(&object.value, current, object.key.kind);
                self.put(object.key, value);
            }
        }

        /// Carries out writes until none is missing, and starts the pods meanwhile.
        fn settle(&mut self) {
            for _ in 0..20 {
                let writes = missing_writes(&self.0.values().collect::<Vec<_>>());
                if writes.is_empty() {
                    return;
                }
                for write in writes {
                    match write {
                        Write::Create(key, mut value) => {
                            assert!(!self.0.contains_key(&key), "{key} exists");
                            if key.kind == Kind::Pod {
                                value["status"] = json!({"phase": "Running"});
                            }
                            self.put(key, value);
                        }
                        Write::Update(key, value, _) => self.put(key, value),
                        Write::Delete(key, _) => drop(self.0.remove(&key).unwrap()),
                    }
                }
            }
            panic!("it never settles");
        }

        fn names(&self, kind: Kind) -> Vec<String> {
            self.0.keys().filter(|key| key.kind == kind).map(|key| key.name.clone()).collect()
        }

        fn of(&self, kind: Kind, name: &str) -> &Value {
            &self.0[&Key::namespaced(kind, "default", name)].value
        }
    }

    fn nodes() -> String {
        [("primary", "linux"), ("minion", "windows")]
            .map(|(name, os)| {
                format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{kubernetes.io/os: {os}}}}}\n---\n")
            })
            .concat()
    }

    fn workload(api_version: &str, kind: &str, spec: &str, app: &str, pod: &str) -> String {
        format!(
            "apiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: web}}\nspec:\n  selector: {{matchLabels: {{app: web}}}}\n\
             {spec}  template:\n    metadata: {{labels: {{app: web, version: {app}}}}}\n    spec: {{{pod}containers: [{{name: c}}]}}\n"
        )
    }

    fn after(text: &str) -> Objects {
        let mut objects = Objects::default();
        objects.apply(&(nodes() + text));
        objects.settle();
        objects
    }

    #[test]
    fn a_deployment_has_a_replica_set_for_each_version() {
        let deployment = |count: u8, app: &str, more: &str| {
            workload("apps/v1", "Deployment", &format!("  replicas: {count}\n{more}"), app, "")
        };
        for strategy in ["", "  strategy: {type: Recreate}\n"] {
            let mut objects = after(&deployment(3, "one", strategy));
            let (sets, pods) = (objects.names(Kind::ReplicaSet), objects.names(Kind::Pod));
            assert_eq!((sets.len(), pods.len()), (1, 3), "{pods:?}");
            assert!(
                sets[0].starts_with("web-")
                    && pods.iter().all(|pod| pod.starts_with(&format!("{}-", sets[0])))
            );
            let pod = objects.of(Kind::Pod, &pods[0]);
            assert_eq!(pod["metadata"]["labels"]["version"], "one");
            assert_eq!(pod["metadata"]["labels"][POD_TEMPLATE_HASH], sets[0]["web-".len()..]);
            assert_eq!(pod["metadata"]["ownerReferences"][0]["kind"], "ReplicaSet");
            assert_eq!(objects.of(Kind::Deployment, "web")["status"]["readyReplicas"], 3);

            objects.apply(&deployment(1, "one", strategy));
            objects.settle();
            assert_eq!(objects.names(Kind::ReplicaSet), sets);
            assert_eq!(objects.names(Kind::Pod).len(), 1);
            assert!(pods.contains(&objects.names(Kind::Pod)[0]), "the pods that stay are not replaced");

            objects.apply(&deployment(2, "two", strategy));
            objects.settle();
            assert_eq!((objects.names(Kind::ReplicaSet).len(), objects.names(Kind::Pod).len()), (1, 2));
            assert_ne!(objects.names(Kind::ReplicaSet), sets);

            objects.0.remove(&Key::namespaced(Kind::Pod, "default", &objects.names(Kind::Pod)[0]));
            objects.settle();
            assert_eq!(objects.names(Kind::Pod).len(), 2, "a deleted pod is replaced");

            objects.0.remove(&Key::namespaced(Kind::Deployment, "default", "web"));
            objects.settle();
            assert_eq!((objects.names(Kind::ReplicaSet), objects.names(Kind::Pod)), (vec![], vec![]));
        }
    }

    /// Until all pods are of the new template, the status does not say so.
    #[test]
    fn old_pods_do_not_count_as_new_ones() {
        for (kind, spec) in [("StatefulSet", "  serviceName: web\n  replicas: 2\n"), ("DaemonSet", "")] {
            let of = |app: &str| workload("apps/v1", kind, spec, app, "");
            let mut objects = after(&of("one"));
            let kind = Kind::of("apps/v1", kind).unwrap();
            let is_complete = |objects: &Objects| {
                let stored = &objects.0[&Key::namespaced(kind, "default", "web")];
                let Ok(Resource::Workload(workload)) = Resource::read(&stored.key, &stored.value) else {
                    panic!()
                };
                workload.is_complete(kind, &stored.value)
            };
            assert!(is_complete(&objects));
            objects.apply(&of("two"));
            // The controller has seen the template, and no pod has changed yet.
            let writes = missing_writes(&objects.0.values().collect::<Vec<_>>());
            for write in writes {
                if let Write::Update(key, value, _) = write {
                    objects.put(key, value);
                }
            }
            assert!(!is_complete(&objects), "{kind}");
            objects.settle();
            assert!(is_complete(&objects), "{kind}");
        }
    }

    #[test]
    fn each_kind_makes_its_pods() {
        let set =
            after(&workload("apps/v1", "StatefulSet", "  serviceName: web\n  replicas: 2\n", "one", ""));
        assert_eq!(set.names(Kind::Pod), ["web-0", "web-1"]);
        assert_eq!(set.of(Kind::Pod, "web-1")["spec"]["subdomain"], "web");

        let daemons = after(&workload("apps/v1", "DaemonSet", "", "one", ""));
        let on: BTreeSet<&str> = daemons
            .names(Kind::Pod)
            .iter()
            .filter_map(|name| daemons.of(Kind::Pod, name)["spec"]["nodeName"].as_str())
            .collect();
        assert_eq!(on, ["minion", "primary"].into());
        let daemons = after(&workload(
            "apps/v1",
            "DaemonSet",
            "",
            "one",
            "nodeSelector: {kubernetes.io/os: windows}, ",
        ));
        assert_eq!(daemons.names(Kind::Pod).len(), 1);
        assert_eq!(daemons.of(Kind::DaemonSet, "web")["status"]["desiredNumberScheduled"], 1);

        let sets = after(&workload("apps/v1", "ReplicaSet", "  replicas: 200\n", "one", ""));
        assert_eq!(sets.names(Kind::Pod).len(), 200, "no two names are equal");

        let controller = "apiVersion: v1\nkind: ReplicationController\nmetadata: {name: web}\nspec:\n  selector: {app: web}\n  replicas: 2\n  template:\n    metadata: {labels: {app: web}}\n    spec: {containers: [{name: c}]}\n";
        assert_eq!(after(controller).names(Kind::Pod).len(), 2);

        let job = |more: &str| {
            format!(
                "apiVersion: batch/v1\nkind: Job\nmetadata: {{name: once}}\nspec:\n  completions: 5\n  parallelism: 2\n{more}  template:\n    spec: {{restartPolicy: Never, containers: [{{name: c}}]}}\n"
            )
        };
        let jobs = after(&job(""));
        assert_eq!(jobs.names(Kind::Pod).len(), 2);
        assert_eq!(jobs.of(Kind::Pod, &jobs.names(Kind::Pod)[0])["metadata"]["labels"]["job-name"], "once");
        assert_eq!(after(&job("  suspend: true\n")).names(Kind::Pod).len(), 0);
    }

    #[test]
    fn pods_of_others_are_left_alone() {
        let stranger = "apiVersion: v1\nkind: Pod\nmetadata: {name: web-0, labels: {app: web}}\nspec: {containers: [{name: c}]}\n---\n";
        let set = workload("apps/v1", "StatefulSet", "  replicas: 2\n", "one", "");
        let mut objects = after(&(stranger.to_owned() + &set));
        assert_eq!(objects.names(Kind::Pod), ["web-0", "web-1"]);
        assert!(objects.of(Kind::Pod, "web-0")["metadata"].get("ownerReferences").is_none());
        objects.0.remove(&Key::namespaced(Kind::StatefulSet, "default", "web"));
        objects.settle();
        assert_eq!(objects.names(Kind::Pod), ["web-0"]);
    }
}

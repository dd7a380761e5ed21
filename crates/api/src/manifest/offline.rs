//! Manifests of a whole cluster as users keep or export them: workloads stand for their pods, objects that no verdict
//! depends on are skipped, and what cannot be read is listed with what it could change.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Value, json};

use super::differing::Differing;
use super::endpoints::{Endpoints, Skipped};
use super::meaning::{self, Meaning, WORKLOAD_GROUPS};
use super::unread::{self, CouldChange, Unread};
use super::{
    ClosedPolicy, Object, Origin, Outcome, Problem, Seen, describe, documents, kustomization, not_yaml,
    outcome, problem, understand,
};
use crate::calico::{EncapsulationMode, IpPool};
use crate::kubernetes::name_of;
use crate::resource::typed;
use crate::yaml::{self, Document, Lines};
use crate::{FieldError, Key, Kind, is_reserved_label, known_fields, placeholder};

/// The content of all files read so far.
#[derive(Default)]
pub struct Offline {
    /// Objects are checked as `apply` checks them, even if no verdict depends on what is wrong.
    is_strict: bool,
    objects: Vec<Object>,
    workloads: Vec<GivenWorkload>,
    endpoints: Vec<Endpoints>,
    skipped: Vec<Skipped>,
    unread: Vec<Unread>,
    closed: Vec<ClosedPolicy>,
    differing: Vec<Differing>,
    notes: Vec<String>,
    seen: Seen,
    /// The owners of the given objects, each with the object it owns.
    owned: Vec<(Reference, Reference)>,
}

/// The cluster described by manifests.
#[derive(Debug, Default)]
pub struct Settled {
    /// The objects, including a pod for each workload without given pods.
    pub objects: Vec<Object>,
    /// The skipped objects that no verdict depends on.
    pub skipped: Vec<Skipped>,
    /// The documents that were not read, or not completely.
    pub unread: Vec<Unread>,
    /// The policies among them that close what they select.
    pub closed: Vec<ClosedPolicy>,
    /// The objects that are given in several forms.
    pub differing: Vec<Differing>,
    /// Notes about how the manifests were read.
    pub notes: Vec<String>,
}

/// A reference to an object, as in `ownerReferences`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Reference {
    namespace: String,
    kind: String,
    name: String,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
    }
}

/// The end of the name of a workload's second pod. No pod of a cluster has such a name.
const SECOND_POD: &str = "~2";

/// The name of the pod that stands for a workload, if this is the name of its second pod.
#[must_use]
pub fn first_pod(name: &str) -> Option<&str> {
    name.strip_suffix(SECOND_POD)
}

/// The name of the second pod of the workload for which this pod stands. Manifests of workloads that may have several pods at a
/// time have both pods, because policy may cut the pods of one workload from each other.
#[must_use]
pub fn second_pod(name: &str) -> String {
    format!("{name}{SECOND_POD}")
}

/// A workload, represented by one of its pods.
struct GivenWorkload {
    of: Reference,
    pod: Object,
    /// It may have two pods at a time.
    is_replicated: bool,
}

impl GivenWorkload {
    /// Its pod, under an unused name: two workloads of different kinds may have the same name.
    fn under_a_free_name(&self, taken: &BTreeSet<Key>, notes: &mut Vec<String>) -> Object {
        let mut pod = self.pod.clone();
        if taken.contains(&pod.key) {
            while taken.contains(&pod.key) {
                pod.key.name = format!("{}-{}", pod.key.name, self.of.kind.to_lowercase());
            }
            pod.value["metadata"]["name"] = json!(pod.key.name);
            notes.push(format!("{} counts as its pod {}/{}", self.of, pod.key.namespace, pod.key.name));
        }
        pod
    }
}

impl Offline {
    /// Checks objects as `apply` checks them, even if no verdict depends on what is wrong.
    #[must_use]
    pub fn strict() -> Self {
        Self { is_strict: true, ..Self::default() }
    }

    /// Reads the documents of one file.
    ///
    /// # Errors
    /// If objects are checked as `apply` checks them: every problem of the file. Otherwise what cannot be read is listed in
    /// [`Settled::unread`].
    pub fn read(&mut self, file: &str, text: &str) -> Result<(), Vec<Problem>> {
        if !self.is_strict {
            self.read_what_can_be(file, text);
            return Ok(());
        }
        let mut problems = Vec::new();
        for document in documents(file, text, &mut problems) {
            problems.extend(self.add(file, document));
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// Lists a file as a document that could change everything, because it could not be opened or decoded.
    pub fn not_opened(&mut self, file: &str, reason: &str) {
        let origin = Origin { file: file.to_owned(), line: 1 };
        let (object, field) = Default::default();
        self.unread.push(Unread::of_text(Problem { origin, object, field, problem: reason.to_owned() }));
    }

    fn read_what_can_be(&mut self, file: &str, text: &str) {
        let parts = match yaml::read(text) {
            Ok(documents) => vec![Ok(documents)],
            Err(_) => yaml::read_each(text),
        };
        let mut of_line = (0, 0);
        for part in parts {
            let documents = match part {
                Ok(documents) => documents,
                Err(error) => {
                    self.unread.push(Unread::of_text(not_yaml(file, text, error)));
                    continue;
                }
            };
            for document in documents.into_iter().flat_map(understand) {
                match document {
                    Ok(mut document) => {
                        let first = document.lines.first;
                        of_line = if of_line.0 == first { (first, of_line.1 + 1) } else { (first, 0) };
                        generate_name(file, of_line, &mut document);
                        self.add_what_can_be(file, document);
                    }
                    Err((document, error)) => {
                        let problem = problem(file, &document, &describe(&document.value), error);
                        self.unread.push(Unread::of_document(&document, problem));
                    }
                }
            }
        }
    }

    /// Adds a document as far as it can be read, and lists it if there is a problem.
    fn add_what_can_be(&mut self, file: &str, document: Document) {
        let found = problem_of_the_whole(file, &document);
        let is_foreign = found.as_ref().is_some_and(|(_, is_foreign)| *is_foreign);
        let first = found.map(|(problem, _)| problem);
        let origin = Origin { file: file.to_owned(), line: document.lines.first };
        let none = || Problem { origin, object: String::new(), field: String::new(), problem: String::new() };
        let mut unread = Unread::of_document(&document, first.clone().unwrap_or_else(none));
        let placeholder = placeholder::first_in(&document.value, "");
        let makes_others = kustomization::remedy(file, &document.value).is_some();
        let skipped = self.skipped.len();
        let problems = match makes_others {
            // Its fields say nothing about objects.
            true => Vec::new(),
            false => self.add(file, document),
        };
        if first.is_none() && problems.is_empty() {
            return;
        }
        // It is not harmless.
        self.skipped.truncate(skipped);
        if makes_others {
            unread.could_change = CouldChange::Everything;
        }
        unread.is_foreign = is_foreign && problems.is_empty();
        let is_named = problems.is_empty();
        let mut unread = unread.with(problems);
        if let Some((_, placeholder)) = placeholder.filter(|_| !is_named) {
            unread.problem.problem += &format!("; {}", placeholder::remedy(&placeholder));
        }
        self.unread.push(unread);
    }

    /// Combines all files.
    #[must_use]
    pub fn settled(self) -> Settled {
        let Self {
            is_strict,
            objects,
            workloads,
            endpoints,
            skipped,
            unread,
            closed,
            differing,
            notes,
            seen: Seen(seen),
            owned,
        } = self;
        let (mut objects, mut skipped, mut notes) = (objects, skipped, notes);
        // A given pod represents its owner, and the owner of that owner.
        let pod = |key: &Key| Reference::new(&key.namespace, "Pod", &key.name);
        let mut there: BTreeSet<Reference> =
            seen.keys().filter(|key| key.kind == Kind::Pod).map(pod).collect();
        let given: BTreeSet<&Reference> = workloads.iter().map(|workload| &workload.of).collect();
        loop {
            let owners = owned.iter().filter(|(owner, of)| there.contains(of) && !there.contains(owner));
            let owners: Vec<Reference> = owners.map(|(owner, _)| owner.clone()).collect();
            if owners.is_empty() {
                break;
            }
            there.extend(owners);
        }
        let has_owner =
            |of: &Reference| owned.iter().any(|(owner, owns)| owns == of && given.contains(owner));
        let stands = |workload: &&GivenWorkload| !there.contains(&workload.of) && !has_owner(&workload.of);
        let mut taken: BTreeSet<Key> = seen.keys().cloned().collect();
        for workload in workloads.iter().filter(stands) {
            let pod = workload.under_a_free_name(&taken, &mut notes);
            taken.insert(pod.key.clone());
            if workload.is_replicated && !is_strict {
                let mut second = pod.clone();
                second.key.name = second_pod(&pod.key.name);
                second.value["metadata"]["name"] = json!(second.key.name);
                objects.push(second);
            }
            objects.push(pod);
        }
        let (mirrored, others): (Vec<_>, Vec<_>) =
            endpoints.into_iter().partition(|of| of.are_mirrored(&objects));
        objects.extend(mirrored.into_iter().flat_map(|of| of.slices));
        skipped.extend(others.into_iter().map(|of| of.skipped));
        Settled { objects, skipped, unread, closed, differing, notes }
    }

    /// Adds a document; returns its problems. With a problem, it is added only if objects are not checked as `apply` checks them, and
    /// if enough of it can be read.
    fn add(&mut self, file: &str, mut document: Document) -> Vec<Problem> {
        let text = |name: &str| document.value[name].as_str().unwrap_or_default().to_owned();
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        // One with metadata or spec may be a policy that lacks them by mistake, and one with items a list of policies.
        let is_other = document.value.is_object()
            && ["metadata", "spec", "items"].iter().all(|field| document.value.get(*field).is_none());
        let is_nameless = kind.is_empty() && kustomization::is_nameless(file);
        if (api_version.is_empty() && kind.is_empty() && is_other || is_nameless) && !self.is_strict {
            let first = document.lines.first;
            self.notes.push(format!("{file}:{first} is no manifest: it has neither apiVersion nor kind"));
            return Vec::new();
        }
        if api_version.is_empty() || kind.is_empty() {
            // A missing field is reported there.
            return outcome(file, document).problems;
        }
        let owned = Reference::of(&document.value);
        self.owned.extend(owners(&document.value).map(|owner| (owner, owned.clone())));
        match meaning::meaning(&api_version, &kind) {
            Meaning::Kept(kind) if !self.is_strict && is_bookkeeping(kind) => self.skip(file, &document),
            Meaning::Kept(kind) if kind.is_workload() => return self.add_other(&api_version, file, document),
            Meaning::Kept(kind) => {
                if !self.is_strict {
                    self.make_readable(kind, file, &mut document);
                }
                return self.add_outcome(outcome(file, document));
            }
            Meaning::Unrelated => return self.add_other(&api_version, file, document),
            Meaning::Mistake(error) => {
                return vec![problem(file, &document, &describe(&document.value), error)];
            }
        }
        Vec::new()
    }

    fn add_outcome(&mut self, Outcome { object, closed, mut problems }: Outcome) -> Vec<Problem> {
        if self.is_strict && !problems.is_empty() {
            return problems;
        }
        self.closed.extend(closed);
        let Some(object) = object else { return problems };
        match self.seen.twice(&object) {
            None => self.objects.push(object),
            Some(problem) if self.is_strict => problems.push(problem),
            Some(_) => self.give_again(object),
        }
        problems
    }

    fn add_other(&mut self, api_version: &str, file: &str, document: Document) -> Vec<Problem> {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        let is_workload =
            WORKLOAD_GROUPS.contains(&group) || document.value["kind"] == "ReplicationController";
        let own = known_fields::check_workload(
            document.value["kind"].as_str().unwrap_or_default(),
            &document.value,
        );
        let of = Reference::of(&document.value);
        let mut problems = Vec::new();
        if is_workload {
            let name = of.to_string();
            problems.extend(own.into_iter().map(|error| problem(file, &document, &name, error)));
            if self.is_strict && !problems.is_empty() {
                return problems;
            }
        }
        if api_version == "v1" && document.value["kind"] == "Endpoints" {
            match Endpoints::read(file, &document, Skipped::new(file, &document)) {
                Ok(read) => problems.extend(self.add_endpoints(file, &document, read)),
                Err(more) => problems.extend(more),
            }
            return problems;
        }
        let first = self.workloads.iter().position(|workload| workload.of == of);
        if let Some(first) = first.and_then(|first| self.workloads.get(first)).filter(|_| self.is_strict) {
            let error = FieldError::new("", format!("the object was given before, at {}", first.pod.origin));
            return vec![problem(file, &document, &of.to_string(), error)];
        }
        let outcome = pod_of(file, &document);
        let Some(Outcome { object, problems: of_pod, .. }) = outcome else {
            if problems.is_empty() {
                self.skip(file, &document);
            }
            return problems;
        };
        let is_read = of_pod.is_empty();
        match object.filter(|_| is_read || !self.is_strict) {
            Some(pod) => {
                let is_replicated = is_replicated(&document.value, &pod.value);
                self.add_workload(first, GivenWorkload { of, pod, is_replicated });
            }
            None if !is_workload && self.is_strict => self.skip(file, &document),
            None => {}
        }
        if is_workload || !self.is_strict {
            problems.extend(of_pod);
        }
        problems
    }

    /// Adds Endpoints, or replaces those of the same name.
    fn add_endpoints(&mut self, file: &str, document: &Document, endpoints: Endpoints) -> Option<Problem> {
        let Some(first) = self.endpoints.iter_mut().find(|first| first.service == endpoints.service) else {
            self.endpoints.push(endpoints);
            return None;
        };
        if self.is_strict {
            let error = FieldError::new("", format!("the object was given before, at {}", first.origin));
            return Some(problem(file, document, &endpoints.to_string(), error));
        }
        if !first.has_slices_of(&endpoints) {
            let of = unread::could_change(&document.value);
            self.differing.push(Differing::at(endpoints.to_string(), &first.origin, &endpoints.origin, of));
        }
        *first = endpoints;
        None
    }

    /// Adds a workload, or replaces the one with this number, which was given before.
    fn add_workload(&mut self, first: Option<usize>, workload: GivenWorkload) {
        match first.and_then(|first| self.workloads.get_mut(first)) {
            None => self.workloads.push(workload),
            Some(first) => {
                if first.pod.value != workload.pod.value || first.is_replicated != workload.is_replicated {
                    let name = first.of.to_string();
                    self.differing.push(Differing::new(name, &first.pod, &workload.pod));
                }
                *first = workload;
            }
        }
    }

    /// Replaces an object that was given before, as `kubectl apply` would. People keep variants of objects side by side.
    fn give_again(&mut self, object: Object) {
        let Some(first) = self.objects.iter_mut().find(|first| first.key == object.key) else { return };
        if first.value != object.value {
            self.differing.push(Differing::new(object.key.to_string(), first, &object));
        }
        *first = object;
    }

    fn skip(&mut self, file: &str, document: &Document) {
        self.skipped.push(Skipped::new(file, document));
    }

    /// Changes what `apply` rejects, if it is sufficient for a verdict.
    fn make_readable(&mut self, kind: Kind, file: &str, document: &mut Document) {
        let location = format!("{file}:{}", document.lines.first);
        match kind {
            Kind::IpPool => {
                if let Some(problem) = make_pool_readable(&mut document.value) {
                    let name = describe(&document.value);
                    self.notes.push(format!("{location}: {name}: {problem}; verdicts do not depend on it"));
                }
            }
            // Calico derives these from namespaces and service accounts, and so does Tortie.
            Kind::Profile => drop_derived_labels(&mut document.value),
            _ => {}
        }
    }
}

/// Why a document may mean something else than what is read of it, or is of a kind that Tortie does not evaluate; and whether the
/// latter is the reason.
fn problem_of_the_whole(file: &str, document: &Document) -> Option<(Problem, bool)> {
    let text = |name: &str| document.value[name].as_str().unwrap_or_default();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let found = |path: &str, text: String| {
        Some(problem(file, document, &describe(&document.value), FieldError::new(path, text)))
    };
    if let Some(remedy) = kustomization::remedy(file, &document.value) {
        return found("", remedy).map(|problem| (problem, true));
    }
    if api_version.is_empty() || kind.is_empty() {
        return None;
    }
    match meaning::meaning(api_version, kind) {
        Meaning::Mistake(_) => None,
        Meaning::Kept(_) => {
            let (path, placeholder) = placeholder::first_in(&document.value, "")?;
            found(&path, placeholder::remedy(&placeholder)).map(|problem| (problem, false))
        }
        Meaning::Unrelated => {
            let could_change = super::unread::could_change(&document.value);
            let is_known = meaning::is_of_kubernetes(api_version, kind);
            let has_pod = template_path(&document.value).is_some();
            // A kind that brings pods by a template that can be read is read.
            let is_read = has_pod && matches!(could_change, CouldChange::Ends { .. });
            if is_known || is_read || could_change == CouldChange::Nothing {
                return None;
            }
            let text = format!("{api_version} {kind} is not evaluated, and could change {could_change}");
            found("kind", text).map(|problem| (problem, true))
        }
    }
}

/// Whether objects of this kind are records that no verdict depends on.
fn is_bookkeeping(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::IpamBlock | Kind::BlockAffinity | Kind::IpamHandle | Kind::IpamConfig | Kind::IpReservation
    )
}

/// Returns what a pool has that is not supported, and changes the pool so that it can be read: verdicts depend only
/// on whether it uses an overlay and whether it translates outgoing packets.
fn make_pool_readable(value: &mut Value) -> Option<String> {
    let pool: IpPool = typed(value).ok()?;
    let problems = pool.validate().err()?;
    let overlaid =
        [pool.spec.vxlan_mode, pool.spec.ipip_mode].iter().any(|mode| *mode != EncapsulationMode::Never);
    let spec = value.get_mut("spec")?.as_object_mut()?;
    spec.retain(|field, _| ["cidr", "natOutgoing", "disabled", "nodeSelector"].contains(&field.as_str()));
    spec.insert("vxlanMode".to_owned(), json!(if overlaid { "Always" } else { "Never" }));
    let usual = if pool.spec.cidr.addr().is_ipv4() { 26 } else { 122 };
    spec.insert("blockSize".to_owned(), json!(pool.spec.cidr.prefix_len().max(usual)));
    problems.first().map(ToString::to_string)
}

fn drop_derived_labels(value: &mut Value) {
    let name = value.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
    if !name.starts_with("kns.") && !name.starts_with("ksa.") {
        return;
    }
    if let Some(labels) = value.pointer_mut("/spec/labelsToApply").and_then(Value::as_object_mut) {
        labels.retain(|label, _| !is_reserved_label(label));
    }
}

impl Reference {
    fn new(namespace: &str, kind: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), kind: kind.to_owned(), name: name.to_owned() }
    }

    fn of(value: &Value) -> Self {
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let namespace = match text("/metadata/namespace") {
            "" => "default",
            namespace => namespace,
        };
        Self::new(namespace, text("/kind"), text("/metadata/name"))
    }
}

/// The owners of an object, in its namespace.
fn owners(value: &Value) -> impl Iterator<Item = Reference> {
    let namespace = Reference::of(value).namespace;
    let owners = value.pointer("/metadata/ownerReferences").and_then(Value::as_array).into_iter().flatten();
    owners.map(move |owner| {
        let text = |name: &str| owner[name].as_str().unwrap_or_default();
        Reference::new(&namespace, text("kind"), text("name"))
    })
}

/// Gives an object with `generateName` a name as the API server does: by its line, and by its number among the objects that begin there.
/// A file that is read twice has the same names.
fn generate_name(file: &str, (line, number): (usize, usize), document: &mut Document) {
    let Some(metadata) = document.value.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    let prefix = metadata.get("generateName").and_then(Value::as_str).map(str::to_owned);
    if let Some(prefix) = prefix.filter(|_| !metadata.contains_key("name")) {
        let name = format!("{prefix}{}", name_of(&format!("{file}:{line}:{number}"), 5));
        metadata.insert("name".to_owned(), json!(name));
    }
}

/// Returns whether a workload may have two pods with networks of their own at a time. Kinds that Tortie does not know count as those
/// that do, unless they say otherwise.
fn is_replicated(workload: &Value, pod: &Value) -> bool {
    if pod["spec"]["hostNetwork"] == true {
        return false;
    }
    let spec = &workload["spec"];
    let number = |value: &Value| value.as_u64();
    let of_job = |spec: &Value| {
        let parallelism = number(&spec["parallelism"]).unwrap_or(1);
        parallelism.min(number(&spec["completions"]).unwrap_or(parallelism)) > 1
    };
    match workload["kind"].as_str() {
        Some("Job") => of_job(spec),
        Some("CronJob") => {
            let overlaps = spec["concurrencyPolicy"].as_str().is_none_or(|policy| policy == "Allow");
            overlaps || of_job(&spec["jobTemplate"]["spec"])
        }
        Some("DaemonSet") => true,
        // An autoscaler decides where a manifest does not.
        _ => number(&spec["replicas"]).is_none_or(|replicas| replicas > 1),
    }
}

/// The path of a workload's pod template.
fn template_path(value: &Value) -> Option<&'static str> {
    ["spec.template", "spec.jobTemplate.spec.template"].into_iter().find(|path| {
        let spec = format!("/{}/spec/containers", path.replace('.', "/"));
        value.pointer(&spec).is_some()
    })
}

/// The pod that a workload (Deployment, DaemonSet, StatefulSet, ReplicaSet, Job, CronJob, and similar kinds) creates,
/// under the workload's name; `None` if there is no pod template.
fn pod_of(file: &str, document: &Document) -> Option<Outcome> {
    let path = template_path(&document.value)?;
    let template = document.value.pointer(&format!("/{}", path.replace('.', "/")))?;
    let of = Reference::of(&document.value);
    let Reference { namespace, name, .. } = &of;
    let metadata = template.get("metadata").cloned().unwrap_or_default();
    let value = json!({
        "apiVersion": Kind::Pod.api_version(), "kind": "Pod",
        "metadata": {
            "name": name, "namespace": namespace, "labels": metadata["labels"], "annotations": metadata["annotations"],
        },
        "spec": template.get("spec")?,
    });
    let mut lines = Lines::default();
    lines.first = document.lines.first;
    lines.extend(document.lines.below("metadata", "metadata"));
    lines.extend(document.lines.below(&format!("{path}.metadata.labels"), "metadata.labels"));
    lines.extend(document.lines.below(&format!("{path}.spec"), "spec"));
    let owner = of.to_string();
    let mut outcome = outcome(file, Document { value, lines, ..Document::default() });
    for problem in &mut outcome.problems {
        if problem.field.starts_with("spec") || problem.field.starts_with("metadata.labels") {
            problem.field = format!("{path}.{}", problem.field);
        }
        problem.object.clone_from(&owner);
    }
    Some(outcome)
}

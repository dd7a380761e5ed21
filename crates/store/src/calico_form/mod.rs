//! The form in which Calico's client stores its resources in etcd (`libcalico-go/lib/clientv3` of v3.32): who made the object, defaults, and what
//! Go leaves out of JSON. Calico's client refuses to update an object without a uid and a time of creation.
//!
//! `cargo xtask vectors` compares it with what calicoctl has stored.

mod canonical;

use serde_json::{Map, Value, json};
use tortie_api::{Key, Kind, Resource};

use self::canonical::canonical;

/// The form in which a datastore keeps objects. Who compares the content that an object should have with a stored object, compares in this
/// form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageForm {
    /// As they are given.
    AsGiven,
    /// Calico's resources have Calico's form: in etcd, where Calico's programs read them, too.
    Calico,
}

impl StorageForm {
    /// Brings the content that an object should have into the form in which it is read. Nodes are stored in another form than they are
    /// read, so a Node stays as it is.
    pub fn fill(self, kind: Kind, content: &mut Value) {
        if self.has_identities(kind) && kind != Kind::Node {
            fill(kind, content);
        }
    }

    /// Whether each object of the kind has a uid and a time of creation.
    #[must_use]
    pub fn has_identities(self, kind: Kind) -> bool {
        self == Self::Calico && is_calico_resource(kind)
    }

    /// Whether a stored object lacks the identity that it has in this form.
    #[must_use]
    pub fn misses_identity(self, kind: Kind, stored: &Value) -> bool {
        self.has_identities(kind) && lacks_identity(stored)
    }
}

/// The identity of a new object.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// Its uid, a UUID.
    pub uid: &'a str,
    /// The time of its creation (RFC 3339, in seconds).
    pub created: &'a str,
}

/// The label of policies with their tier.
const TIER_LABEL: &str = "projectcalico.org/tier";
/// The annotation of policies with the name that the user gave them.
const METADATA: &str = "projectcalico.org/metadata";
const DEFAULT_TIER: &str = "default";
/// The fields of metadata that each object has.
const IDENTITY: [&str; 2] = ["uid", "creationTimestamp"];

/// Brings an object of a kind that Calico keeps in etcd into the form in which Calico's client stores it. What the object has already
/// stays. An object that Tortie does not understand gets an identity and stays as it is otherwise: a policy that closes must not become one that
/// is understood. Without metadata, nothing changes.
pub fn complete(kind: Kind, object: &mut Value, origin: Origin<'_>) {
    let is_filled = fill(kind, object);
    if is_filled && has_rules(kind) {
        for rule in rules(object) {
            set(rule, &[("source", json!({})), ("destination", json!({}))]);
        }
    }
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    if is_filled && is_tiered(kind) {
        let name = json!({"name": metadata.get("name").and_then(Value::as_str).unwrap_or_default()});
        set_text(metadata, "annotations", METADATA, &name.to_string());
    }
    for (field, text) in IDENTITY.into_iter().zip([origin.uid, origin.created]) {
        if !is_text(metadata.get(field)) {
            metadata.insert(field.to_owned(), json!(text));
        }
    }
}

/// Whether a field has a text that says something.
fn is_text(field: Option<&Value>) -> bool {
    field.and_then(Value::as_str).is_some_and(|text| !text.is_empty())
}

/// Whether Tortie understands the object.
fn is_understood(kind: Kind, object: &Value) -> bool {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    let namespace = if kind.namespaced() { text("namespace") } else { String::new() };
    Resource::read(&Key { kind, namespace, name: text("name") }, object).is_ok()
}

/// Brings an object into the form in which Calico's client shows it: as [`complete`] does, but without an identity, without the annotation
/// that keeps the name of a policy, and without empty ends of rules. Returns false if the object stays as it is.
pub fn fill(kind: Kind, object: &mut Value) -> bool {
    let Some(fields) = object.as_object_mut() else { return false };
    // Both are the datastore's.
    if let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("resourceVersion");
        metadata.remove("selfLink");
    }
    if !is_understood(kind, object) {
        return false;
    }
    let Some(fields) = object.as_object_mut() else { return false };
    let Some(Value::Object(metadata)) = fields.get("metadata") else { return false };
    let name = metadata.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut spec = match fields.get("spec") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(spec)) => spec.clone(),
        Some(_) => return false,
    };
    canonical(&mut spec);
    set_defaults(kind, &name, &mut spec);
    let tier = spec.get("tier").and_then(Value::as_str).unwrap_or(DEFAULT_TIER).to_owned();
    fields.insert("spec".to_owned(), Value::Object(spec));
    if has_rules(kind) {
        remove_empty_ends(object);
    }
    let Some(fields) = object.as_object_mut() else { return false };
    if matches!(kind, Kind::Tier | Kind::KubeControllersConfiguration) {
        fields.entry("status").or_insert_with(|| json!({}));
    }
    let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut) else { return false };
    if is_tiered(kind) {
        set_text(metadata, "labels", TIER_LABEL, &tier);
    }
    remove_empty(metadata);
    true
}

/// Brings a stored object into the form in which Calico's client shows it: a policy has the name that its user gave. Versions of Calico
/// before 3.30 stored `default.p` for `p`, and those before 3.32 kept the name in an annotation besides.
///
/// `key` is the name under which it is stored. An annotation with another name does not count: one policy must not pass for another.
pub(crate) fn show(kind: Kind, key: &str, object: &mut Value) {
    if has_rules(kind) {
        remove_empty_ends(object);
    }
    if !is_tiered(kind) {
        return;
    }
    let tier =
        object["spec"]["tier"].as_str().filter(|tier| !tier.is_empty()).unwrap_or(DEFAULT_TIER).to_owned();
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    let annotations = metadata.get_mut("annotations").and_then(Value::as_object_mut);
    // A damaged annotation stays where an operator sees it.
    let kept = annotations.and_then(|all| {
        let name =
            serde_json::from_str::<Value>(all.get(METADATA)?.as_str()?).ok()?["name"].as_str()?.to_owned();
        let is_own = name == key || format!("{tier}.{name}") == key;
        if is_own || name.is_empty() {
            all.remove(METADATA);
        }
        is_own.then_some(name)
    });
    let stored = metadata.get("name").and_then(Value::as_str).unwrap_or_default();
    let trimmed = stored.strip_prefix("default.").filter(|rest| tier == DEFAULT_TIER && !rest.is_empty());
    if let Some(name) = kept.or_else(|| trimmed.map(str::to_owned)) {
        metadata.insert("name".to_owned(), json!(name));
    }
    remove_empty(metadata);
}

/// Whether an object lacks the uid or the time of creation, without which Calico's client refuses to update it. No client of Calico has
/// written such an object.
#[must_use]
pub fn lacks_identity(object: &Value) -> bool {
    object["metadata"].is_object()
        && !IDENTITY.into_iter().all(|field| is_text(object["metadata"].get(field)))
}

fn remove_empty(metadata: &mut Map<String, Value>) {
    for field in ["labels", "annotations"] {
        if metadata.get(field).and_then(Value::as_object).is_some_and(Map::is_empty) {
            metadata.remove(field);
        }
    }
}

/// Sets a label or an annotation.
fn set_text(metadata: &mut Map<String, Value>, field: &str, name: &str, text: &str) {
    let all = metadata.entry(field).or_insert_with(|| json!({}));
    if all.is_null() {
        *all = json!({});
    }
    if let Some(all) = all.as_object_mut() {
        all.insert(name.to_owned(), json!(text));
    }
}

fn is_tiered(kind: Kind) -> bool {
    is_staged(kind) || matches!(kind, Kind::NetworkPolicy | Kind::GlobalNetworkPolicy)
}

fn is_staged(kind: Kind) -> bool {
    matches!(kind, Kind::StagedNetworkPolicy | Kind::StagedGlobalNetworkPolicy)
}

fn set_defaults(kind: Kind, name: &str, spec: &mut Map<String, Value>) {
    match kind {
        Kind::StagedKubernetesNetworkPolicy => {
            set(spec, &[("stagedAction", json!("Set")), ("podSelector", json!({}))]);
        }
        Kind::Tier => {
            set(spec, &[("order", json!(1_000_000)), ("defaultAction", json!(default_action(name)))])
        }
        Kind::IpPool => {
            let is_v6 = spec.get("cidr").and_then(Value::as_str).is_some_and(|cidr| cidr.contains(':'));
            set(
                spec,
                &[
                    ("blockSize", json!(if is_v6 { 122 } else { 26 })),
                    ("assignmentMode", json!("Automatic")),
                    ("allowedUses", json!(["Workload", "Tunnel"])),
                    ("vxlanMode", json!("Never")),
                    ("ipipMode", json!("Never")),
                    ("nodeSelector", json!("all()")),
                ],
            );
        }
        // Settings of one node would take precedence over those of all.
        Kind::FelixConfiguration if name == "default" => set_felix(spec),
        Kind::BgpConfiguration if name == "default" => set(
            spec,
            &[("logSeverityScreen", json!("Info")), ("serviceLoadBalancerAggregation", json!("Enabled"))],
        ),
        Kind::KubeControllersConfiguration => set_controllers(spec),
        kind if is_tiered(kind) => {
            set(spec, &[("tier", json!(DEFAULT_TIER))]);
            if is_staged(kind) {
                set(spec, &[("stagedAction", json!("Set"))]);
            }
            let directions = directions(spec);
            set(spec, &[("types", directions)]);
        }
        _ => {}
    }
}

/// Sets fields that are absent.
fn set(fields: &mut Map<String, Value>, defaults: &[(&str, Value)]) {
    for (name, value) in defaults {
        fields.entry(*name).or_insert_with(|| value.clone());
    }
}

/// The tiers of Kubernetes' own policies pass on what they do not decide.
fn default_action(tier: &str) -> &'static str {
    match tier {
        "kube-admin" | "kube-baseline" | "adminnetworkpolicy" | "baselineadminnetworkpolicy" => "Pass",
        _ => "Deny",
    }
}

/// The directions that a policy without `types` is about.
fn directions(spec: &Map<String, Value>) -> Value {
    let has = |field: &str| spec.contains_key(field);
    let ingress = (has("ingress") || !has("egress")).then_some("Ingress");
    json!(ingress.into_iter().chain(has("egress").then_some("Egress")).collect::<Vec<_>>())
}

fn has_rules(kind: Kind) -> bool {
    is_tiered(kind) || kind == Kind::Profile
}

/// The rules of an object. Calico stores both ends of each, and shows those that say something.
fn rules(object: &mut Value) -> impl Iterator<Item = &mut Map<String, Value>> {
    let spec = object.get_mut("spec").and_then(Value::as_object_mut).into_iter().flatten();
    let lists = spec.filter(|(field, _)| matches!(field.as_str(), "ingress" | "egress"));
    lists.filter_map(|(_, list)| list.as_array_mut()).flatten().filter_map(Value::as_object_mut)
}

fn remove_empty_ends(object: &mut Value) {
    for rule in rules(object) {
        for end in ["source", "destination"] {
            if rule.get(end).and_then(Value::as_object).is_some_and(Map::is_empty) {
                rule.remove(end);
            }
        }
    }
}

fn set_felix(spec: &mut Map<String, Value>) {
    // The former switch decides, if it is used.
    let is_off = spec.get("bpfConnectTimeLoadBalancingEnabled") == Some(&json!(false));
    let (connect_time, without) = if is_off { ("Disabled", "Disabled") } else { ("TCP", "Enabled") };
    set(
        spec,
        &[
            ("bpfConnectTimeLoadBalancing", json!(connect_time)),
            ("bpfHostNetworkedNATWithoutCTLB", json!(without)),
            ("bpfLogLevel", json!("")),
            ("floatingIPs", json!("Disabled")),
            ("nftablesMode", json!("Auto")),
        ],
    );
}

fn set_controllers(spec: &mut Map<String, Value>) {
    set(
        spec,
        &[
            ("controllers", json!({})),
            ("prometheusMetricsPort", json!(9_094)),
            ("healthChecks", json!("Enabled")),
        ],
    );
    for (controller, field, value) in
        [("node", "leakGracePeriod", "15m0s"), ("loadBalancer", "assignIPs", "AllServices")]
    {
        let of_one = spec.get_mut("controllers").and_then(|all| all.get_mut(controller));
        if let Some(fields) = of_one.and_then(Value::as_object_mut) {
            set(fields, &[(field, json!(value))]);
        }
    }
}

/// Whether Calico keeps the kind in etcd as a resource of its API.
pub(crate) fn is_calico_resource(kind: Kind) -> bool {
    match kind {
        Kind::Node
        | Kind::Tier
        | Kind::Profile
        | Kind::NetworkSet
        | Kind::GlobalNetworkSet
        | Kind::NetworkPolicy
        | Kind::GlobalNetworkPolicy
        | Kind::StagedNetworkPolicy
        | Kind::StagedGlobalNetworkPolicy
        | Kind::StagedKubernetesNetworkPolicy
        | Kind::HostEndpoint
        | Kind::FelixConfiguration
        | Kind::KubeControllersConfiguration
        | Kind::BgpPeer
        | Kind::BgpConfiguration
        | Kind::BgpFilter
        | Kind::ClusterInformation
        | Kind::CalicoNodeStatus
        | Kind::IpPool
        | Kind::IpReservation
        | Kind::WorkloadEndpoint => true,
        Kind::Namespace
        | Kind::ServiceAccount
        | Kind::Pod
        | Kind::Service
        | Kind::EndpointSlice
        | Kind::ServiceCidr
        | Kind::KubernetesNetworkPolicy
        | Kind::ClusterNetworkPolicy
        | Kind::AdminNetworkPolicy
        | Kind::BaselineAdminNetworkPolicy
        | Kind::IpamBlock
        | Kind::BlockAffinity
        | Kind::IpamHandle
        | Kind::IpamConfig
        | Kind::NodeReport
        | Kind::Lease
        | Kind::Deployment
        | Kind::ReplicaSet
        | Kind::StatefulSet
        | Kind::DaemonSet
        | Kind::ReplicationController
        | Kind::Job
        | Kind::CronJob => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin<'static> =
        Origin { uid: "9d6ba87f-0000-4000-8000-000000000000", created: "2026-11-28T00:00:00Z" };

    #[test]
    fn what_an_object_has_stays() {
        let mut policy = json!({
            "metadata": {"name": "p", "uid": "u", "creationTimestamp": "t", "resourceVersion": "7", "labels": {"a": ""},
                "annotations": {"c": "d"}, "ofTheFuture": 1},
            "spec": {"tier": "t", "types": ["Ingress"], "ingress": [{"action": "Allow"}]},
            "status": {"x": 1}, "beside": true,
        });
        complete(Kind::GlobalNetworkPolicy, &mut policy, ORIGIN);
        let expected = json!({
            "metadata": {"name": "p", "uid": "u", "creationTimestamp": "t", "labels": {"a": "", TIER_LABEL: "t"},
                "annotations": {"c": "d", METADATA: "{\"name\":\"p\"}"}, "ofTheFuture": 1},
            "spec": {"tier": "t", "types": ["Ingress"], "ingress": [{"action": "Allow", "source": {}, "destination": {}}]},
            "status": {"x": 1}, "beside": true,
        });
        assert_eq!(policy, expected);
        complete(Kind::GlobalNetworkPolicy, &mut policy, ORIGIN);
        assert_eq!(policy, expected, "once more changes nothing");
    }

    /// A policy that closes, because it is not understood, must not become one that is understood.
    #[test]
    fn what_is_not_understood_gets_an_identity_only() {
        for spec in [
            json!({"ingress": [{"action": "Allow", "protocol": ""}]}),
            json!({"ingress": [{"action": "Allow", "source": []}]}),
            json!({"ingress": [{"action": "Allow", "matcherOfTheFuture": ""}]}),
            json!({"selector": []}),
            json!([1]),
        ] {
            let given = json!({"metadata": {"name": "p"}, "spec": spec});
            let mut policy = given.clone();
            complete(Kind::GlobalNetworkPolicy, &mut policy, ORIGIN);
            let mut expected = given;
            expected["metadata"]["uid"] = json!(ORIGIN.uid);
            expected["metadata"]["creationTimestamp"] = json!(ORIGIN.created);
            assert_eq!(policy, expected);
            assert!(!lacks_identity(&policy));
        }
    }

    #[test]
    fn mappings_of_users_stay_as_they_are() {
        let labels = json!({"quarantine": "", "ports": "80", "disabled": "", "startTime": "1h", "x": ""});
        let mut profile = json!({"metadata": {"name": "p"}, "spec": {"labelsToApply": labels}});
        complete(Kind::Profile, &mut profile, ORIGIN);
        assert_eq!(profile["spec"]["labelsToApply"], labels);
        let spec = json!({"podSelector": {"matchLabels": labels}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"trusted": ""}}}]}]});
        let mut policy = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec});
        complete(Kind::StagedKubernetesNetworkPolicy, &mut policy, ORIGIN);
        assert_eq!(policy["spec"]["podSelector"], spec["podSelector"]);
        assert_eq!(policy["spec"]["ingress"], spec["ingress"]);
    }

    #[test]
    fn what_has_no_metadata_stays_as_it_is() {
        for given in [json!(3), json!("text"), json!({"spec": {}})] {
            let mut value = given.clone();
            complete(Kind::Tier, &mut value, ORIGIN);
            assert_eq!(value, given);
        }
    }
}

//! The typed view of an object.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use crate::calico::{
    BgpConfiguration, BgpFilter, BgpPeer, CalicoNodeStatus, ClusterInformation, FelixConfiguration,
    GlobalNetworkPolicy, HostEndpoint, IpPool, IpReservation, IpamConfig, KubeControllersConfiguration,
    NetworkPolicy, NetworkSet, Profile, StagedAction, Tier, WorkloadEndpoint,
};
use crate::kubernetes::{
    ClusterPolicy, EndpointSlice, KubernetesNetworkPolicy, Namespace, Node, Pod, Service, ServiceAccount,
    ServiceCidr, Workload,
};
use crate::report::NodeReport;
use crate::value::Strict;
use crate::{Key, Kind, Network};

/// A problem with one field of an object.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{path}: {problem}")]
pub struct FieldError {
    /// The field, as `spec.ingress[0].action`.
    pub path: String,
    /// The problem and the remedy.
    pub problem: String,
}

impl FieldError {
    /// A problem with the field at `path`.
    pub fn new(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { path: path.into(), problem: problem.into() }
    }
}

/// Problems as one sentence.
#[must_use]
pub fn in_words(problems: &[FieldError]) -> String {
    let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
    problems.join("; ")
}

/// The metadata that Tortie reads. Other fields of it stay in the object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// The object's name.
    pub name: String,
    /// Its namespace; empty for kinds without.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An object of a kind with a typed view. IPAM's own kinds are in `tortie-ipam`.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "each variant is named like the type that it holds, and documented there")]
pub enum Resource {
    Namespace(Namespace),
    Node(Node),
    ServiceAccount(ServiceAccount),
    Pod(Pod),
    Service(Service),
    EndpointSlice(EndpointSlice),
    /// Networks of the addresses that Services get.
    ServiceCidr(ServiceCidr),
    Tier(Tier),
    Profile(Profile),
    NetworkSet(NetworkSet),
    GlobalNetworkSet(NetworkSet),
    KubernetesNetworkPolicy(KubernetesNetworkPolicy),
    ClusterPolicy(ClusterPolicy),
    StagedNetworkPolicy(NetworkPolicy),
    StagedGlobalNetworkPolicy(GlobalNetworkPolicy),
    StagedKubernetesNetworkPolicy(KubernetesNetworkPolicy),
    NetworkPolicy(NetworkPolicy),
    GlobalNetworkPolicy(GlobalNetworkPolicy),
    HostEndpoint(HostEndpoint),
    FelixConfiguration(FelixConfiguration),
    KubeControllersConfiguration(KubeControllersConfiguration),
    BgpPeer(BgpPeer),
    BgpConfiguration(BgpConfiguration),
    BgpFilter(BgpFilter),
    ClusterInformation(ClusterInformation),
    CalicoNodeStatus(CalicoNodeStatus),
    IpPool(IpPool),
    IpReservation(IpReservation),
    /// A manifest; the stored form is in `tortie-ipam`.
    IpamConfig(IpamConfig),
    WorkloadEndpoint(WorkloadEndpoint),
    NodeReport(NodeReport),
    Workload(Workload),
}

impl Resource {
    /// The typed view of the readable parts of an object, and the unreadable ones. For kinds whose parts are
    /// independent (labels, networks), unreadable fields are left out: one damaged label of a namespace must not hide
    /// the others from a Deny rule. A setting that cannot be read must not change others, such as the port of VXLAN; if it is
    /// what happens to packets from pods to their own node, they are dropped. Every other kind is read completely or not at all.
    #[must_use]
    pub fn read_what_can_be(key: &Key, value: &Value) -> (Option<Self>, Vec<FieldError>) {
        let in_parts = matches!(
            key.kind,
            Kind::Namespace
                | Kind::Node
                | Kind::ServiceAccount
                | Kind::NetworkSet
                | Kind::GlobalNetworkSet
                | Kind::WorkloadEndpoint
                | Kind::HostEndpoint
                | Kind::FelixConfiguration
        );
        let (mut left, mut wrong) = (std::borrow::Cow::Borrowed(value), Vec::new());
        let problems = match Self::read(key, value) {
            Ok(resource) => return (Some(resource), wrong),
            Err(problems) => problems,
        };
        if !in_parts {
            return (None, problems);
        }
        drop_what_cannot_be_read(key.kind, left.to_mut(), &mut wrong);
        // Only single fields remain, and an object has few.
        for _ in 0..MAX_FIELDS {
            match Self::read(key, &left) {
                Ok(resource) => return (Some(resource), wrong),
                Err(problems) => {
                    let left = left.to_mut();
                    let paths = problems.iter().map(|problem| match key.kind {
                        Kind::FelixConfiguration => setting_of(&problem.path),
                        _ => &problem.path,
                    });
                    let removed = paths.clone().filter(|path| remove(left, path)).count();
                    if key.kind == Kind::FelixConfiguration
                        && paths.clone().any(|path| ["spec", ENDPOINT_TO_HOST].contains(&path))
                    {
                        left["spec"]["defaultEndpointToHostAction"] = Value::from("Drop");
                    }
                    wrong.extend(problems);
                    if removed == 0 {
                        break;
                    }
                }
            }
        }
        (None, wrong)
    }

    /// Creates the typed view of an object and validates it. Policies with unknown fields are rejected; other kinds
    /// may have fields that Tortie does not read.
    ///
    /// # Errors
    /// Every problem, with its field.
    pub fn read(key: &Key, value: &Value) -> Result<Self, Vec<FieldError>> {
        let one = |error| vec![error];
        crate::calico::check_as_written(key.kind, value)?;
        Ok(match key.kind {
            Kind::Namespace => Self::Namespace(typed(value).map_err(one)?),
            Kind::Node => Self::Node(typed::<Node>(value).map_err(one)?.with_calicos_labels()),
            Kind::ServiceAccount => Self::ServiceAccount(typed(value).map_err(one)?),
            Kind::Pod => Self::Pod(typed(value).map_err(one)?),
            Kind::Service => Self::Service(typed(value).map_err(one)?),
            Kind::EndpointSlice => Self::EndpointSlice(typed(value).map_err(one)?),
            Kind::ServiceCidr => Self::ServiceCidr(typed(value).map_err(one)?),
            Kind::KubernetesNetworkPolicy => {
                let policy: KubernetesNetworkPolicy = typed(value).map_err(one)?;
                policy.validate()?;
                Self::KubernetesNetworkPolicy(policy)
            }
            Kind::ClusterNetworkPolicy | Kind::AdminNetworkPolicy | Kind::BaselineAdminNetworkPolicy => {
                Self::ClusterPolicy(ClusterPolicy::read(key.kind, value)?)
            }
            Kind::NetworkPolicy => {
                let policy: NetworkPolicy = typed(value).map_err(one)?;
                policy.spec.validate(key.kind)?;
                Self::NetworkPolicy(policy)
            }
            Kind::StagedNetworkPolicy => {
                let policy: NetworkPolicy = typed(value).map_err(one)?;
                policy.spec.validate(key.kind)?;
                Self::StagedNetworkPolicy(policy)
            }
            Kind::StagedGlobalNetworkPolicy => {
                let policy: GlobalNetworkPolicy = typed(value).map_err(one)?;
                policy.spec.validate(key.kind)?;
                Self::StagedGlobalNetworkPolicy(policy)
            }
            Kind::StagedKubernetesNetworkPolicy => {
                let mut value = value.clone();
                // This is the only field besides those of a Kubernetes policy.
                let action = value
                    .get_mut("spec")
                    .and_then(Value::as_object_mut)
                    .and_then(|spec| spec.remove("stagedAction"));
                if let Some(action) = action {
                    typed::<StagedAction>(&action)
                        .map_err(|error| one(FieldError::new("spec.stagedAction", error.problem)))?;
                }
                let policy: KubernetesNetworkPolicy = typed(&value).map_err(one)?;
                policy.validate()?;
                Self::StagedKubernetesNetworkPolicy(policy)
            }
            Kind::Tier => {
                let tier: Tier = typed(value).map_err(one)?;
                tier.validate()?;
                Self::Tier(tier)
            }
            Kind::Profile => {
                let profile: Profile = typed(value).map_err(one)?;
                profile.validate()?;
                Self::Profile(profile)
            }
            Kind::NetworkSet | Kind::GlobalNetworkSet => {
                let set: NetworkSet = typed(value).map_err(one)?;
                if key.kind == Kind::NetworkSet { Self::NetworkSet(set) } else { Self::GlobalNetworkSet(set) }
            }
            Kind::GlobalNetworkPolicy => {
                let policy: GlobalNetworkPolicy = typed(value).map_err(one)?;
                policy.spec.validate(key.kind)?;
                Self::GlobalNetworkPolicy(policy)
            }
            Kind::HostEndpoint => {
                let endpoint: HostEndpoint = typed(value).map_err(one)?;
                endpoint.validate()?;
                Self::HostEndpoint(endpoint)
            }
            Kind::FelixConfiguration => {
                let mut felix: FelixConfiguration = typed(value).map_err(one)?;
                felix.read_annotations().map_err(one)?;
                Self::FelixConfiguration(felix)
            }
            Kind::KubeControllersConfiguration => {
                let settings: KubeControllersConfiguration = typed(value).map_err(one)?;
                settings.validate()?;
                Self::KubeControllersConfiguration(settings)
            }
            Kind::BgpPeer => {
                let object: BgpPeer = typed(value).map_err(one)?;
                object.validate()?;
                Self::BgpPeer(object)
            }
            Kind::BgpConfiguration => {
                let object: BgpConfiguration = typed(value).map_err(one)?;
                object.validate()?;
                Self::BgpConfiguration(object)
            }
            Kind::BgpFilter => {
                let object: BgpFilter = typed(value).map_err(one)?;
                object.validate()?;
                Self::BgpFilter(object)
            }
            Kind::ClusterInformation => {
                let object: ClusterInformation = typed(value).map_err(one)?;
                object.validate()?;
                Self::ClusterInformation(object)
            }
            Kind::CalicoNodeStatus => Self::CalicoNodeStatus(typed(value).map_err(one)?),
            Kind::IpPool => {
                let pool: IpPool = typed(value).map_err(one)?;
                pool.validate()?;
                Self::IpPool(pool)
            }
            Kind::WorkloadEndpoint => Self::WorkloadEndpoint(typed(value).map_err(one)?),
            Kind::NodeReport => Self::NodeReport(typed(value).map_err(one)?),
            Kind::IpReservation => Self::IpReservation(typed(value).map_err(one)?),
            Kind::IpamConfig => {
                let config: IpamConfig = typed(value).map_err(one)?;
                config.validate()?;
                Self::IpamConfig(config)
            }
            Kind::IpamBlock | Kind::BlockAffinity | Kind::IpamHandle => {
                return Err(vec![FieldError::new(
                    "kind",
                    format!("{} is IPAM's own and has no manifest", key.kind),
                )]);
            }
            Kind::Deployment
            | Kind::ReplicaSet
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicationController
            | Kind::Job
            | Kind::CronJob => Self::Workload(Workload::read(key, value)?),
            Kind::Lease => {
                return Err(vec![FieldError::new(
                    "kind",
                    "the controllers write Leases; it has no manifest",
                )]);
            }
        })
    }
}

/// The field of FelixConfiguration that closes if it cannot be read.
const ENDPOINT_TO_HOST: &str = "spec.defaultEndpointToHostAction";

/// The setting that a path in a FelixConfiguration belongs to. A part of a setting must not be left out: a failsafe port without its network
/// would be open to everybody, and a list without its last port would close the node to everybody.
fn setting_of(path: &str) -> &str {
    let Some(rest) = path.strip_prefix("spec.") else { return path };
    let length = rest.find(['.', '[']).unwrap_or(rest.len());
    &path[.."spec.".len() + length]
}

/// How many unreadable fields of an object are removed, one after another.
const MAX_FIELDS: usize = 32;

/// Removes, in one pass, labels that are not text and networks that are invalid.
fn drop_what_cannot_be_read(kind: Kind, value: &mut Value, wrong: &mut Vec<FieldError>) {
    for field in ["labels", "annotations"] {
        let Some(labels) = value.pointer_mut(&format!("/metadata/{field}")).and_then(Value::as_object_mut)
        else {
            continue;
        };
        labels.retain(|name, value| {
            if !value.is_string() {
                wrong.push(FieldError::new(format!("metadata.{field}.{name}"), "must be text"));
            }
            value.is_string()
        });
    }
    if !matches!(kind, Kind::NetworkSet | Kind::GlobalNetworkSet) {
        return;
    }
    let Some(nets) = value.pointer_mut("/spec/nets").and_then(Value::as_array_mut) else { return };
    let mut index = 0;
    nets.retain(|net| {
        let read = typed::<Network>(net);
        if let Err(error) = &read {
            wrong.push(FieldError::new(format!("spec.nets[{index}]"), &error.problem));
        }
        index += 1;
        read.is_ok()
    });
}

/// Parses a value as `T`; an error names the field by its path.
pub(crate) fn typed<T: DeserializeOwned>(value: &Value) -> Result<T, FieldError> {
    serde_path_to_error::deserialize(Strict(value)).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { String::new() } else { path };
        with_unknown_field(FieldError { path, problem: error.into_inner().to_string() })
    })
}

/// `serde` names the parent of an unknown field; the user needs the field itself.
fn with_unknown_field(mut error: FieldError) -> FieldError {
    let Some(field) = error.problem.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next())
    else {
        return error;
    };
    if error.path.rsplit('.').next() != Some(field) {
        error.path = if error.path.is_empty() { field.to_owned() } else { format!("{}.{field}", error.path) };
    }
    error
}

/// Removes the field at `path` (`spec.nets[2]`, `metadata.labels.a.b/c`) from the object. Returns whether it existed.
fn remove(value: &mut Value, path: &str) -> bool {
    match value {
        Value::Object(fields) => {
            // A label's name may contain dots, so the longest name that fits is meant.
            let fits = |name: &&String| {
                path.strip_prefix(name.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            };
            let Some(name) = fields.keys().filter(fits).max_by_key(|name| name.len()).cloned() else {
                return false;
            };
            match path[name.len()..].trim_start_matches('.') {
                "" => fields.remove(&name).is_some(),
                rest => fields.get_mut(&name).is_some_and(|inner| remove(inner, rest)),
            }
        }
        Value::Array(items) => {
            let index = path.strip_prefix('[').and_then(|path| path.split_once(']'));
            let Some((Ok(index), rest)) = index.map(|(index, rest)| (index.parse::<usize>(), rest)) else {
                return false;
            };
            match rest.trim_start_matches('.') {
                "" if index < items.len() => {
                    items.remove(index);
                    true
                }
                rest => items.get_mut(index).is_some_and(|inner| remove(inner, rest)),
            }
        }
        _ => false,
    }
}

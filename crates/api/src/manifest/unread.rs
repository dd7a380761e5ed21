//! Documents that were not read, and what they could change: everything, unless the kind and the namespace prove less.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use super::meaning::{self, Meaning};
use super::{Problem, foreign};
use crate::fields::is_object_name;
use crate::kubernetes::EndpointSlice;
use crate::yaml::Document;
use crate::{Kind, placeholder};

/// A document that was not read, or not completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unread {
    /// The first problem, with its position, its object and a remedy.
    pub problem: Problem,
    /// The number of further problems.
    pub more: usize,
    /// Its `apiVersion`; empty if it cannot be read. So are the next three.
    pub api_version: String,
    /// Its `kind`.
    pub kind: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Verdicts that could be others if it were read.
    pub could_change: CouldChange,
    /// It is a kind of another product, which Tortie never evaluates. Everything else is a mistake in the document.
    pub is_foreign: bool,
}

/// Verdicts and translations that a document could change.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum CouldChange {
    /// Nothing.
    Nothing,
    /// Translations to a Service, and rules that name it.
    Service {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// Verdicts at the pods of a namespace: its policies have no say elsewhere.
    AtPods {
        /// The namespace.
        namespace: String,
    },
    /// Verdicts with a pod of a namespace, or one of some addresses, at either end.
    Ends {
        /// The namespace.
        namespace: String,
        /// The addresses that the document has.
        addresses: Vec<IpAddr>,
    },
    /// Every verdict.
    Everything,
}

impl CouldChange {
    /// Verdicts that either of two forms of one object could change.
    #[must_use]
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ends { namespace, addresses }, Self::Ends { namespace: same, addresses: more })
                if namespace == same =>
            {
                let all: BTreeSet<IpAddr> = addresses.into_iter().chain(more).collect();
                Self::Ends { namespace, addresses: all.into_iter().collect() }
            }
            (one, other) if one == other => one,
            (Self::Nothing, one) | (one, Self::Nothing) => one,
            // They say different things about one object, so nothing bounds them.
            _ => Self::Everything,
        }
    }

    /// The word for programs.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Service { .. } => "service",
            Self::AtPods { .. } => "podsOfNamespace",
            Self::Ends { .. } => "endsOfNamespace",
            Self::Everything => "everything",
        }
    }
}

impl fmt::Display for CouldChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("no verdict"),
            Self::Service { namespace, name } => {
                write!(f, "packets to Service {namespace}/{name}, and rules that name it")
            }
            Self::AtPods { namespace } => write!(f, "verdicts at pods of namespace {namespace}"),
            Self::Ends { namespace, .. } => {
                write!(f, "verdicts with pods or addresses of namespace {namespace}")
            }
            Self::Everything => f.write_str("every verdict"),
        }
    }
}

impl Unread {
    /// A text that is no document: it may hold anything.
    pub(super) fn of_text(problem: Problem) -> Self {
        Self {
            problem,
            more: 0,
            api_version: String::new(),
            kind: String::new(),
            namespace: String::new(),
            name: String::new(),
            could_change: CouldChange::Everything,
            is_foreign: false,
        }
    }

    /// A document with this problem.
    pub(super) fn of_document(document: &Document, problem: Problem) -> Self {
        let text = |pointer: &str| {
            document.value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        Self {
            problem,
            more: 0,
            api_version: text("/apiVersion"),
            kind: text("/kind"),
            namespace: text("/metadata/namespace"),
            name: text("/metadata/name"),
            could_change: could_change(&document.value),
            is_foreign: false,
        }
    }

    /// With these problems in place of its own, if there are any.
    pub(super) fn with(mut self, problems: Vec<Problem>) -> Self {
        self.more = problems.len().saturating_sub(1);
        self.problem = problems.into_iter().next().unwrap_or(self.problem);
        self
    }
}

/// Verdicts that a document could change that was not read.
pub(super) fn could_change(value: &Value) -> CouldChange {
    let readable = |name: &str| {
        value[name].as_str().filter(|text| !text.is_empty() && placeholder::first(text).is_none())
    };
    let (Some(api_version), Some(kind)) = (readable("apiVersion"), readable("kind")) else {
        return CouldChange::Everything;
    };
    let Some(namespace) = namespace(value) else { return CouldChange::Everything };
    match meaning::meaning(api_version, kind) {
        Meaning::Kept(kind) => of_kept(kind, namespace, value),
        Meaning::Unrelated if meaning::is_of_kubernetes(api_version, kind) => {
            of_others(kind, namespace, value)
        }
        Meaning::Unrelated | Meaning::Mistake(_) => {
            foreign::could_change(api_version, kind, namespace, value).unwrap_or(CouldChange::Everything)
        }
    }
}

/// Kinds of Kubernetes and Calico that Tortie does not keep; among them past versions of workloads.
fn of_others(kind: &str, namespace: &str, value: &Value) -> CouldChange {
    let workload = Kind::all().find(|of| of.is_workload() && of.name() == kind);
    match (workload, kind) {
        (Some(workload), _) => of_kept(workload, namespace, value),
        (None, "Endpoints") => of_kept(Kind::Service, namespace, value),
        (None, _) => CouldChange::Nothing,
    }
}

/// The namespace of an object, if its kind has namespaces; `None` if it cannot be read.
fn namespace(value: &Value) -> Option<&str> {
    let metadata = match value.get("metadata") {
        None | Some(Value::Null) => return Some("default"),
        Some(metadata) => metadata.as_object()?,
    };
    match metadata.get("namespace") {
        None | Some(Value::Null) => Some("default"),
        Some(Value::String(text)) if text.is_empty() => Some("default"),
        Some(Value::String(text)) => Some(text.as_str()).filter(|text| is_object_name(text)),
        Some(_) => None,
    }
}

fn of_kept(kind: Kind, namespace: &str, value: &Value) -> CouldChange {
    let namespace = namespace.to_owned();
    let name = |pointer: &str| {
        let text = value.pointer(pointer).and_then(Value::as_str);
        text.filter(|text| is_object_name(text)).map(str::to_owned)
    };
    let service = |name: Option<String>| match name {
        Some(name) => CouldChange::Service { namespace: namespace.clone(), name },
        None => CouldChange::Everything,
    };
    match kind {
        // What their labels are decides who selects their pods.
        Kind::Namespace => match name("/metadata/name") {
            Some(namespace) => CouldChange::Ends { namespace, addresses: Vec::new() },
            None => CouldChange::Everything,
        },
        Kind::ServiceAccount => CouldChange::Ends { namespace, addresses: Vec::new() },
        Kind::Deployment
        | Kind::ReplicaSet
        | Kind::StatefulSet
        | Kind::DaemonSet
        | Kind::ReplicationController
        | Kind::Job
        | Kind::CronJob => of_workload(namespace, value),
        Kind::Pod => of_pod(namespace, value),
        Kind::Service => service(name("/metadata/name")),
        Kind::EndpointSlice => {
            let label = EndpointSlice::SERVICE.replace('~', "~0").replace('/', "~1");
            service(name(&format!("/metadata/labels/{label}")))
        }
        Kind::KubernetesNetworkPolicy
        | Kind::NetworkPolicy
        | Kind::StagedNetworkPolicy
        | Kind::StagedKubernetesNetworkPolicy => CouldChange::AtPods { namespace },
        Kind::KubeControllersConfiguration
        | Kind::BgpPeer
        | Kind::BgpFilter
        | Kind::CalicoNodeStatus
        | Kind::IpReservation
        | Kind::IpamBlock
        | Kind::BlockAffinity
        | Kind::IpamHandle
        | Kind::IpamConfig
        | Kind::Lease
        | Kind::ServiceCidr => CouldChange::Nothing,
        // Others may select a NetworkSet, a WorkloadEndpoint has addresses of its own, and the rest concerns the cluster.
        Kind::NetworkSet
        | Kind::WorkloadEndpoint
        | Kind::Node
        | Kind::Tier
        | Kind::Profile
        | Kind::GlobalNetworkSet
        | Kind::ClusterNetworkPolicy
        | Kind::AdminNetworkPolicy
        | Kind::BaselineAdminNetworkPolicy
        | Kind::GlobalNetworkPolicy
        | Kind::StagedGlobalNetworkPolicy
        | Kind::HostEndpoint
        | Kind::FelixConfiguration
        | Kind::BgpConfiguration
        | Kind::ClusterInformation
        | Kind::IpPool
        | Kind::NodeReport => CouldChange::Everything,
    }
}

/// A pod with an address that cannot be read may have that of any other end.
fn of_pod(namespace: String, value: &Value) -> CouldChange {
    let is_readable = |ip: &Value| ip.as_str().is_some_and(|text| text.parse::<IpAddr>().is_ok());
    let status = value.get("status").filter(|status| !status.is_null());
    let wrong = status.is_some_and(|status| {
        let ips = status["podIPs"].as_array().into_iter().flatten().map(|ip| &ip["ip"]);
        let all = status.get("podIP").into_iter().chain(ips);
        let is_list = status["podIPs"].is_null() || status["podIPs"].is_array();
        !status.is_object() || !is_list || !all.filter(|ip| !ip.is_null()).all(is_readable)
    });
    if wrong {
        return CouldChange::Everything;
    }
    let Some(mut addresses) = annotated_addresses(value.pointer("/metadata/annotations")) else {
        return CouldChange::Everything;
    };
    add_addresses(value, &mut addresses);
    addresses.sort_unstable();
    addresses.dedup();
    CouldChange::Ends { namespace, addresses }
}

fn of_workload(namespace: String, value: &Value) -> CouldChange {
    let templates = ["/spec/template", "/spec/jobTemplate/spec/template"];
    let annotations = templates.map(|template| value.pointer(&format!("{template}/metadata/annotations")));
    let addresses: Option<Vec<_>> = annotations.into_iter().map(annotated_addresses).collect();
    match addresses {
        Some(addresses) => CouldChange::Ends { namespace, addresses: addresses.concat() },
        None => CouldChange::Everything,
    }
}

/// The addresses that annotations give to a pod: lists in JSON, and those of the CNI plugin separated by commas. `None` if one cannot
/// be read.
fn annotated_addresses(annotations: Option<&Value>) -> Option<Vec<IpAddr>> {
    const ANNOTATIONS: [&str; 5] = ["ipAddrs", "ipAddrsNoIpam", "floatingIPs", "podIP", "podIPs"];
    let mut addresses = Vec::new();
    for name in ANNOTATIONS {
        let annotation = annotations.and_then(|all| all.get(format!("cni.projectcalico.org/{name}")));
        let text = match annotation {
            None | Some(Value::Null) => continue,
            Some(text) => text.as_str()?,
        };
        let of_json = serde_json::from_str::<Vec<String>>(text).ok();
        let parts = of_json.unwrap_or_else(|| text.split(',').map(|part| part.trim().to_owned()).collect());
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let network = || part.parse::<IpNet>().ok().map(|network| network.addr());
            addresses.push(part.parse().ok().or_else(network)?);
        }
    }
    Some(addresses)
}

/// Adds every address in a document, under whatever name, except for those of nodes.
fn add_addresses(value: &Value, addresses: &mut Vec<IpAddr>) {
    match value {
        Value::String(text) => {
            let one =
                |text: &str| text.parse().ok().or_else(|| text.parse::<IpNet>().ok().map(|net| net.addr()));
            addresses.extend(text.split(',').filter_map(|text| one(text.trim())));
        }
        Value::Array(items) => items.iter().for_each(|item| add_addresses(item, addresses)),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .filter(|(name, _)| !["hostIP", "hostIPs", "containers"].contains(&name.as_str()));
            fields.for_each(|(_, field)| add_addresses(field, addresses));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn kind_and_namespace_bound_what_a_document_could_change() {
        let ends =
            |namespace: &str| CouldChange::Ends { namespace: namespace.to_owned(), addresses: Vec::new() };
        let at = |namespace: &str| CouldChange::AtPods { namespace: namespace.to_owned() };
        let service =
            |name: &str| CouldChange::Service { namespace: "shop".to_owned(), name: name.to_owned() };
        let all = CouldChange::Everything;
        let labels =
            json!({"name": "x", "namespace": "shop", "labels": {"kubernetes.io/service-name": "db"}});
        let in_shop = || json!({"name": "x", "namespace": "shop"});
        for (api_version, kind, metadata, expected) in [
            ("networking.k8s.io/v1", "NetworkPolicy", in_shop(), at("shop")),
            ("networking.k8s.io/v1", "NetworkPolicy", json!({"name": "x"}), at("default")),
            ("networking.k8s.io/v1", "NetworkPolicy", json!({"name": "x", "namespace": ""}), at("default")),
            (
                "networking.k8s.io/v1",
                "NetworkPolicy",
                json!({"name": "x", "namespace": "${NS}"}),
                all.clone(),
            ),
            ("networking.k8s.io/v1", "NetworkPolicy", json!({"name": "x", "namespace": 7}), all.clone()),
            ("networking.k8s.io/v1", "NetworkPolicy", json!("x"), all.clone()),
            ("networking.k8s.io/v1", "NetworkPolcy", in_shop(), all.clone()),
            ("networking.k8s.io", "NetworkPolicy", in_shop(), all.clone()),
            ("projectcalico.org/v3", "NetworkPolicy", in_shop(), at("shop")),
            ("projectcalico.org/v3", "GlobalNetworkPolicy", in_shop(), all.clone()),
            ("projectcalico.org/v3", "NetworkSet", in_shop(), all.clone()),
            ("projectcalico.org/v3", "BGPPeer", in_shop(), CouldChange::Nothing),
            ("projectcalico.org/v3", "${KIND}", in_shop(), all.clone()),
            ("v1", "Namespace", json!({"name": "shop"}), ends("shop")),
            ("v1", "Namespace", json!({"name": "{{ x }}"}), all.clone()),
            ("v1", "Namespace", json!({"labels": {}}), all.clone()),
            ("v1", "ServiceAccount", in_shop(), ends("shop")),
            ("v1", "Pod", in_shop(), ends("shop")),
            ("apps/v1", "Deployment", in_shop(), ends("shop")),
            ("v1", "Service", in_shop(), service("x")),
            ("v1", "Service", json!({"name": "${X}", "namespace": "shop"}), all.clone()),
            ("discovery.k8s.io/v1", "EndpointSlice", labels, service("db")),
            ("discovery.k8s.io/v1", "EndpointSlice", in_shop(), all.clone()),
            ("v1", "Node", json!({"name": "n"}), all.clone()),
            ("v1", "Endpoints", in_shop(), service("x")),
            ("v1", "ConfigMap", in_shop(), CouldChange::Nothing),
            ("apps/v1beta1", "Deployment", in_shop(), ends("shop")),
            ("example.org/v1", "Thing", in_shop(), all.clone()),
            ("cilium.io/v2", "CiliumNetworkPolicy", in_shop(), at("shop")),
        ] {
            let value = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
            assert_eq!(could_change(&value), expected, "{value}");
        }
        for (status, expected) in [
            (json!({"podIP": "10.0.0.1", "hostIP": "192.0.2.1"}), Some("10.0.0.1")),
            (json!({"podips": [{"ip": "10.0.0.1/32"}]}), Some("10.0.0.1")),
            (json!({"podIP": "10.0.0.256"}), None),
            (json!({"podIPs": "10.0.0.1"}), None),
            (json!({"podIPs": [{"ip": 7}]}), None),
        ] {
            let value = json!({"apiVersion": "v1", "kind": "Pod", "metadata": in_shop(), "status": status});
            let expected = expected.map_or(all.clone(), |ip| CouldChange::Ends {
                namespace: "shop".to_owned(),
                addresses: vec![ip.parse().unwrap()],
            });
            assert_eq!(could_change(&value), expected, "{value}");
        }
        for (annotation, text, expected) in [
            ("ipAddrs", json!("[\"10.0.0.1\"]"), Some(&["10.0.0.1"][..])),
            ("ipAddrs", json!("[\"10.0.0.x\"]"), None),
            ("ipAddrs", json!("[\"10.0.0.1\""), None),
            ("ipAddrsNoIpam", json!(""), Some(&[])),
            ("podIP", json!("10.0.0.1/32"), Some(&["10.0.0.1"])),
            ("podIPs", json!("10.0.0.1/32,fd00::1/128"), Some(&["10.0.0.1", "fd00::1"])),
            ("podIPs", json!(7), None),
        ] {
            let annotations = json!({(format!("cni.projectcalico.org/{annotation}")): text});
            let expected = expected.map_or(all.clone(), |addresses| CouldChange::Ends {
                namespace: "shop".to_owned(),
                addresses: addresses.iter().map(|ip| ip.parse().unwrap()).collect(),
            });
            let mut metadata = in_shop();
            metadata["annotations"] = annotations.clone();
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
            assert_eq!(could_change(&pod), expected, "{pod}");
            let template = json!({"metadata": {"annotations": annotations}});
            let spec = json!({"jobTemplate": {"spec": {"template": template}}});
            let job =
                json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": in_shop(), "spec": spec});
            assert_eq!(could_change(&job), expected, "{job}");
        }
        assert_eq!(could_change(&json!({"kind": "Pod", "metadata": {"namespace": "shop"}})), all);
        assert_eq!(could_change(&json!({"apiVersion": "v1", "metadata": {"namespace": "shop"}})), all);
    }
}

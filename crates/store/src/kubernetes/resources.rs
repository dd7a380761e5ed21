//! The kinds as resources of the Kubernetes API: their paths and the names of their objects.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};
use tortie_api::{Key, Kind};

use super::endpoints;
use super::group::CalicoGroup;
use crate::{Interest, Scope};

/// The version of Calico's kinds in Tortie.
const CALICO: &str = "projectcalico.org/v3";
/// The maximum length of an affinity's name is below this one (`ipam_affinity.go`).
const MAX_NAME: usize = 253;
/// The length of the hash in a shortened name.
const HASH: usize = 11;

/// A collection of objects, with the part of it that an interest needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Collection {
    pub(crate) path: String,
    /// The field selector, escaped for a query.
    pub(crate) fields: Option<String>,
}

/// The kind of the objects in the API that give those of this kind.
fn source(kind: Kind) -> Kind {
    match kind {
        Kind::WorkloadEndpoint => Kind::Pod,
        kind => kind,
    }
}

/// Whether objects of the kind are derived from others, and so cannot be written.
pub(crate) fn is_derived(kind: Kind) -> bool {
    source(kind) != kind
}

/// Whether the objects of the kind are in Calico's group of the API.
pub(crate) fn is_calico(kind: Kind) -> bool {
    let kind = source(kind);
    kind != Kind::Profile && kind.api_version() == CALICO
}

/// The `apiVersion` of the kind's objects in the API; `None` if Calico derives them from other objects.
pub(crate) fn api_version(group: CalicoGroup, kind: Kind) -> Option<&'static str> {
    match source(kind) {
        Kind::Profile => None,
        kind if is_calico(kind) => Some(group.api_version()),
        kind => Some(kind.api_version()),
    }
}

/// Whether Kubernetes defines the kind, completes its objects, and lets others add to them.
pub(crate) fn is_of_kubernetes(kind: Kind) -> bool {
    !is_calico(kind) && ![Kind::Profile, Kind::NodeReport].contains(&kind) && !is_derived(kind)
}

/// The `kind` of objects in the API.
pub(crate) fn name_of_kind(group: CalicoGroup, kind: Kind) -> &'static str {
    match (group, kind) {
        (CalicoGroup::Native, Kind::IpamConfig) => "IPAMConfiguration",
        (_, kind) => kind.name(),
    }
}

/// The plural in URLs.
pub(super) fn plural(group: CalicoGroup, kind: Kind) -> &'static str {
    match (group, source(kind)) {
        (_, Kind::KubernetesNetworkPolicy) => "networkpolicies",
        (CalicoGroup::Native, Kind::IpamConfig) => "ipamconfigurations",
        (_, kind) => kind.plural(),
    }
}

/// The path of all objects of a kind, or of those in a namespace, if it is not empty.
pub(crate) fn path(group: CalicoGroup, kind: Kind, namespace: &str) -> Option<String> {
    let version = api_version(group, kind)?;
    let root = if version.contains('/') { "apis" } else { "api" };
    let plural = plural(group, kind);
    Some(if namespace.is_empty() {
        format!("/{root}/{version}/{plural}")
    } else {
        format!("/{root}/{version}/namespaces/{}/{plural}", escape(namespace))
    })
}

/// The path of an object.
pub(crate) fn object_path(group: CalicoGroup, key: &Key) -> Option<String> {
    Some(format!("{}/{}", path(group, key.kind, &key.namespace)?, escape(&name(key))))
}

/// The smallest collection with all objects of an interest. It may contain others.
pub(crate) fn collection(group: CalicoGroup, interest: &Interest) -> Option<Collection> {
    let kind = interest.kind;
    let by_name = |namespace: &str, name: &str| Collection {
        path: path(group, kind, namespace).unwrap_or_default(),
        fields: Some(escape(&format!("metadata.name={name}"))),
    };
    let all = Collection { path: path(group, kind, "")?, fields: None };
    Some(match &interest.scope {
        Scope::All => all,
        Scope::Namespace(namespace) if kind.namespaced() => {
            Collection { path: path(group, kind, namespace)?, fields: None }
        }
        Scope::Namespace(_) => all,
        Scope::Name(namespace, object) => {
            by_name(namespace, &name(&Key::namespaced(kind, namespace, object)))
        }
        Scope::Node(node) => match kind {
            Kind::Pod | Kind::WorkloadEndpoint => {
                Collection { fields: Some(escape(&format!("spec.nodeName={node}"))), ..all }
            }
            // Rows of old versions of Calico have no labels with the node.
            Kind::HostEndpoint | Kind::IpamBlock | Kind::BlockAffinity => all,
            kind if kind.namespaced() => all,
            _ => by_name("", &name(&Key::global(kind, node))),
        },
    })
}

/// The name of an object in the API.
pub(crate) fn name(key: &Key) -> String {
    match key.kind {
        Kind::IpamBlock => of_cidr(&key.name),
        Kind::BlockAffinity => match key.name.split_once('/') {
            Some((owner, cidr)) => of_affinity(super::ipam::node_field(owner).0, &of_cidr(cidr)),
            None => key.name.clone(),
        },
        Kind::IpamHandle => key.name.to_lowercase(),
        // No pod has the name of an endpoint that is none: it would end with two dashes.
        Kind::WorkloadEndpoint => endpoints::pod_name(&key.name).unwrap_or_else(|| format!("{}--", key.name)),
        _ => key.name.clone(),
    }
}

/// `10.0.0.0/26` → `10-0-0-0-26`.
pub(crate) fn of_cidr(cidr: &str) -> String {
    cidr.replace(['.', ':', '/'], "-")
}

fn of_affinity(node: &str, cidr: &str) -> String {
    let name = format!("{node}-{cidr}");
    if name.len() < MAX_NAME {
        return name;
    }
    let room = (MAX_NAME - 1).saturating_sub(cidr.len() + HASH + 2);
    let short = node.get(..room).unwrap_or(node);
    let mut hash = String::new();
    for byte in Sha256::digest(format!("{node}+{cidr}")) {
        let _ = write!(hash, "{byte:02x}");
    }
    hash.truncate(HASH);
    format!("{short}-{cidr}-{hash}")
}

/// Escapes what has a meaning in URLs.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_objects() {
        let table = [
            (Key::global(Kind::Namespace, "n"), "/api/v1/namespaces/n"),
            (Key::namespaced(Kind::Pod, "n", "p"), "/api/v1/namespaces/n/pods/p"),
            (
                Key::namespaced(Kind::EndpointSlice, "n", "s"),
                "/apis/discovery.k8s.io/v1/namespaces/n/endpointslices/s",
            ),
            (
                Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "p"),
                "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies/p",
            ),
            (
                Key::namespaced(Kind::NetworkPolicy, "n", "default.p"),
                "/apis/crd.projectcalico.org/v1/namespaces/n/networkpolicies/default.p",
            ),
            (Key::global(Kind::IpPool, "a/b"), "/apis/crd.projectcalico.org/v1/ippools/a%2Fb"),
            (
                Key::global(Kind::IpamBlock, "10.0.0.0/26"),
                "/apis/crd.projectcalico.org/v1/ipamblocks/10-0-0-0-26",
            ),
            (
                Key::global(Kind::IpamBlock, "fd80:24e2:f998:72d6::/122"),
                "/apis/crd.projectcalico.org/v1/ipamblocks/fd80-24e2-f998-72d6---122",
            ),
            (
                Key::global(Kind::BlockAffinity, "node-1/10.0.0.0/26"),
                "/apis/crd.projectcalico.org/v1/blockaffinities/node-1-10-0-0-0-26",
            ),
            (
                Key::global(Kind::IpamHandle, "Calico.ABC"),
                "/apis/crd.projectcalico.org/v1/ipamhandles/calico.abc",
            ),
            (Key::global(Kind::NodeReport, "n"), "/apis/tortie.io/v1/nodereports/n"),
            (
                Key::namespaced(Kind::WorkloadEndpoint, "n", "node--1-k8s-p--1-eth0"),
                "/api/v1/namespaces/n/pods/p-1",
            ),
            (Key::namespaced(Kind::WorkloadEndpoint, "n", "w"), "/api/v1/namespaces/n/pods/w--"),
        ];
        for (key, path) in table {
            assert_eq!(object_path(CalicoGroup::Crd, &key).as_deref(), Some(path));
            let native = path.replace("crd.projectcalico.org/v1", "projectcalico.org/v3");
            assert_eq!(object_path(CalicoGroup::Native, &key), Some(native));
        }
        for (group, expected) in [
            (CalicoGroup::Crd, "/apis/crd.projectcalico.org/v1/ipamconfigs/default"),
            (CalicoGroup::Native, "/apis/projectcalico.org/v3/ipamconfigurations/default"),
        ] {
            let config = Key::global(Kind::IpamConfig, "default");
            assert_eq!(object_path(group, &config).as_deref(), Some(expected));
            assert_eq!(object_path(group, &Key::global(Kind::Profile, "kns.default")), None);
        }
    }

    #[test]
    fn a_long_name_of_an_affinity_ends_with_a_hash() {
        let node = "n".repeat(253);
        let name = of_affinity(&node, "10-0-0-0-26");
        assert_eq!(name.len(), 252);
        let (start, hash) = name.rsplit_once('-').unwrap_or_default();
        assert_eq!(start, format!("{}-10-0-0-0-26", "n".repeat(228)));
        // echo -n "$(printf 'n%.0s' $(seq 253))+10-0-0-0-26" | sha256sum
        assert_eq!(hash, "eb36c8ed6c6");
        assert_eq!(
            of_affinity(&"n".repeat(240), "10-0-0-0-26").len(),
            252,
            "the longest name without a hash"
        );
    }

    #[test]
    fn an_interest_reads_no_more_than_it_needs() {
        let node = |kind| Interest::of_node(kind, "one");
        let table = [
            (Interest::all(Kind::Pod), "/api/v1/pods", None),
            (node(Kind::Pod), "/api/v1/pods", Some("spec.nodeName%3Done")),
            (node(Kind::WorkloadEndpoint), "/api/v1/pods", Some("spec.nodeName%3Done")),
            (node(Kind::Node), "/api/v1/nodes", Some("metadata.name%3Done")),
            (node(Kind::IpamBlock), "/apis/crd.projectcalico.org/v1/ipamblocks", None),
            (
                Interest { kind: Kind::Pod, scope: Scope::Namespace("n".to_owned()) },
                "/api/v1/namespaces/n/pods",
                None,
            ),
            (
                Interest::in_object(&Key::namespaced(Kind::Pod, "n", "p")),
                "/api/v1/namespaces/n/pods",
                Some("metadata.name%3Dp"),
            ),
            (
                Interest::in_object(&Key::global(Kind::BlockAffinity, "a/10.0.0.0/26")),
                "/apis/crd.projectcalico.org/v1/blockaffinities",
                Some("metadata.name%3Da-10-0-0-0-26"),
            ),
        ];
        for (interest, path, fields) in table {
            let expected = Collection { path: path.to_owned(), fields: fields.map(ToOwned::to_owned) };
            assert_eq!(collection(CalicoGroup::Crd, &interest), Some(expected));
        }
    }
}

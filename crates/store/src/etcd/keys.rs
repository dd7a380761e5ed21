//! The keys of objects in etcd: those of Calico (`libcalico-go/lib/backend/model`), and Tortie's own below
//! `/tortie/v1/`.

use tortie_api::{Key, Kind};

use crate::calico_form::is_calico_resource;
use crate::{Interest, Scope};

/// The resources of Calico's API, by plural. Names are not escaped, because they cannot contain a slash.
const CALICO: &str = "/calico/resources/v3/projectcalico.org/";
/// `ipv4/block/<CIDR with a dash instead of the slash>`.
const BLOCKS: &str = "/calico/ipam/v2/assignment/";
/// `<node>/ipv4/block/<CIDR with a dash instead of the slash>`.
const AFFINITIES: &str = "/calico/ipam/v2/host/";
/// The same for owners that are no nodes, such as `load-balancer`. Between the two is no key of another kind.
const VIRTUAL_AFFINITIES: &str = "/calico/ipam/v2/virtual/";
const HANDLES: &str = "/calico/ipam/v2/handle/";
/// The only object of its kind.
const IPAM_CONFIG: &str = "/calico/ipam/v2/config";
/// Kinds that Calico does not keep in etcd: objects of Kubernetes, and node reports.
const OURS: &str = "/tortie/v1/";

/// Keys from `start` on, below `end`; only `start` if `end` is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: Vec<u8>,
    pub(crate) end: Vec<u8>,
}

impl Range {
    pub(super) fn prefix(prefix: &str) -> Self {
        let mut end = prefix.as_bytes().to_vec();
        // Every prefix here ends with a slash, so the next key at its level is one byte higher.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        Self { start: prefix.as_bytes().to_vec(), end }
    }

    fn only(key: String) -> Self {
        Self { start: key.into_bytes(), end: Vec::new() }
    }
}

/// The prefix of all keys of a kind.
fn prefix(kind: Kind) -> String {
    match kind {
        Kind::IpamBlock => BLOCKS.to_owned(),
        Kind::BlockAffinity => AFFINITIES.to_owned(),
        Kind::IpamHandle => HANDLES.to_owned(),
        Kind::IpamConfig => IPAM_CONFIG.to_owned(),
        kind if is_calico_resource(kind) => format!("{CALICO}{}/", kind.plural()),
        kind => format!("{OURS}{}/", kind.plural()),
    }
}

/// The etcd key of an object.
pub(crate) fn encode(key: &Key) -> String {
    let prefix = prefix(key.kind);
    match key.kind {
        Kind::IpamConfig => prefix,
        Kind::IpamBlock => format!("{prefix}{}", block(&key.name)),
        Kind::BlockAffinity => {
            let (owner, cidr) = key.name.split_once('/').unwrap_or((&key.name, ""));
            format!("{}{}", affinities_of(owner), block(cidr))
        }
        _ if key.namespace.is_empty() => format!("{prefix}{}", key.name),
        _ => format!("{prefix}{}/{}", key.namespace, key.name),
    }
}

/// The prefix of the affinities of a node or of a virtual owner.
fn affinities_of(owner: &str) -> String {
    match owner.strip_prefix("virtual:") {
        Some(name) => format!("{VIRTUAL_AFFINITIES}{name}/"),
        None => format!("{AFFINITIES}{owner}/"),
    }
}

/// `10.0.0.0/26` → `ipv4/block/10.0.0.0-26`.
fn block(cidr: &str) -> String {
    let family = if cidr.contains(':') { "ipv6" } else { "ipv4" };
    format!("{family}/block/{}", cidr.replacen('/', "-", 1))
}

/// The object of an etcd key in the range of a kind; `None` for keys that are not objects, such as the marker of a
/// host (`/calico/ipam/v2/host/<node>`), and for keys under which no object is written: an object has one key.
pub(crate) fn decode(kind: Kind, key: &[u8]) -> Option<Key> {
    let key = std::str::from_utf8(key).ok()?;
    read(kind, key).filter(|object| encode(object) == key)
}

fn read(kind: Kind, key: &str) -> Option<Key> {
    let (owner, rest) = match key.strip_prefix(&prefix(kind)) {
        Some(rest) => ("", rest),
        None if kind == Kind::BlockAffinity => ("virtual:", key.strip_prefix(VIRTUAL_AFFINITIES)?),
        None => return None,
    };
    let cidr = |rest: &str| {
        let (family, cidr) = rest.split_once("/block/")?;
        let known = ["ipv4", "ipv6"].contains(&family);
        let (address, length) = cidr.rsplit_once('-').filter(|_| known)?;
        Some(format!("{address}/{length}"))
    };
    match kind {
        Kind::IpamConfig => rest.is_empty().then(|| Key::global(kind, "default")),
        Kind::IpamBlock => Some(Key::global(kind, cidr(rest)?)),
        Kind::BlockAffinity => {
            let (name, rest) = rest.split_once('/')?;
            Some(Key::global(kind, format!("{owner}{name}/{}", cidr(rest)?)))
        }
        kind if kind.namespaced() => {
            let (namespace, name) = rest.split_once('/')?;
            Some(Key::namespaced(kind, namespace, name))
        }
        kind => Some(Key::global(kind, rest)),
    }
}

/// The smallest range with all objects of an interest. It may contain others.
pub(crate) fn range(interest: &Interest) -> Range {
    let kind = interest.kind;
    match &interest.scope {
        _ if kind == Kind::IpamConfig => Range::only(prefix(kind)),
        Scope::Namespace(namespace) if kind.namespaced() => {
            Range::prefix(&format!("{}{namespace}/", prefix(kind)))
        }
        Scope::Node(node) if kind == Kind::BlockAffinity => Range::prefix(&affinities_of(node)),
        Scope::Name(namespace, name) => Range::only(encode(&Key::namespaced(kind, namespace, name))),
        Scope::All | Scope::Node(_) | Scope::Namespace(_) if kind == Kind::BlockAffinity => {
            let start = Range::prefix(AFFINITIES).start;
            Range { start, end: Range::prefix(VIRTUAL_AFFINITIES).end }
        }
        Scope::All | Scope::Node(_) | Scope::Namespace(_) => Range::prefix(&prefix(kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calico's keys (`libcalico-go/lib/backend/model`).
    #[test]
    fn keys_are_those_of_calico() {
        let global = Key::global;
        let table = [
            (global(Kind::IpPool, "p"), "/calico/resources/v3/projectcalico.org/ippools/p"),
            (
                Key::namespaced(Kind::NetworkPolicy, "n", "default.p"),
                "/calico/resources/v3/projectcalico.org/networkpolicies/n/default.p",
            ),
            (
                Key::namespaced(Kind::WorkloadEndpoint, "n", "node--1-k8s-p-eth0"),
                "/calico/resources/v3/projectcalico.org/workloadendpoints/n/node--1-k8s-p-eth0",
            ),
            (global(Kind::Node, "n"), "/calico/resources/v3/projectcalico.org/nodes/n"),
            (global(Kind::IpamBlock, "10.0.0.0/26"), "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-26"),
            (
                global(Kind::IpamBlock, "fd80:24e2:f998:72d6::/122"),
                "/calico/ipam/v2/assignment/ipv6/block/fd80:24e2:f998:72d6::-122",
            ),
            (
                global(Kind::BlockAffinity, "node-1/10.0.0.0/26"),
                "/calico/ipam/v2/host/node-1/ipv4/block/10.0.0.0-26",
            ),
            (
                global(Kind::BlockAffinity, "virtual:load-balancer/10.0.0.0/26"),
                "/calico/ipam/v2/virtual/load-balancer/ipv4/block/10.0.0.0-26",
            ),
            (global(Kind::IpamHandle, "k8s-pod-network.abc"), "/calico/ipam/v2/handle/k8s-pod-network.abc"),
            (global(Kind::IpamConfig, "default"), "/calico/ipam/v2/config"),
            (Key::namespaced(Kind::Pod, "n", "p"), "/tortie/v1/pods/n/p"),
            (global(Kind::NodeReport, "n"), "/tortie/v1/nodereports/n"),
        ];
        for (key, encoded) in table {
            assert_eq!(encode(&key), encoded);
            assert_eq!(decode(key.kind, encoded.as_bytes()), Some(key));
        }
    }

    #[test]
    fn keys_that_are_no_objects_are_ignored() {
        for (kind, key) in [
            (Kind::BlockAffinity, "/calico/ipam/v2/host/node-1"),
            (Kind::BlockAffinity, "/calico/ipam/v2/host/node-1/ipv5/block/10.0.0.0-26"),
            (Kind::IpamBlock, "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0"),
            (Kind::IpamConfig, "/calico/ipam/v2/config/x"),
            (Kind::NetworkPolicy, "/calico/resources/v3/projectcalico.org/networkpolicies/p"),
            (Kind::Tier, "/registry/tiers/t"),
            // An update or a deletion would reach the object x of namespace n, or the block of the other family or owner.
            (Kind::NetworkPolicy, "/calico/resources/v3/projectcalico.org/networkpolicies//n/x"),
            (Kind::IpamBlock, "/calico/ipam/v2/assignment/ipv6/block/10.0.0.0-26"),
            (Kind::BlockAffinity, "/calico/ipam/v2/host/virtual:load-balancer/ipv4/block/10.0.0.0-26"),
        ] {
            assert_eq!(decode(kind, key.as_bytes()), None, "{key}");
        }
        assert_eq!(decode(Kind::Tier, b"/calico/resources/v3/projectcalico.org/tiers/\xff"), None);
    }

    #[test]
    fn the_range_of_an_interest_has_its_objects_and_none_of_another_kind() {
        let scopes = |key: &Key| {
            [
                Scope::All,
                Scope::Namespace(key.namespace.clone()),
                Scope::Node("one".to_owned()),
                Scope::Name(key.namespace.clone(), key.name.clone()),
            ]
        };
        let key_of = |kind: Kind| match kind {
            Kind::IpamConfig => Key::global(kind, "default"),
            Kind::IpamBlock => Key::global(kind, "10.0.0.0/26"),
            Kind::BlockAffinity => Key::global(kind, "one/10.0.0.0/26"),
            kind if kind.namespaced() => Key::namespaced(kind, "n", "one"),
            kind => Key::global(kind, "one"),
        };
        let contains = |range: &Range, key: &Key| {
            let key = encode(key).into_bytes();
            if range.end.is_empty() { key == range.start } else { key >= range.start && key < range.end }
        };
        for kind in Kind::all() {
            for scope in scopes(&key_of(kind)) {
                let range = range(&Interest { kind, scope });
                for other in Kind::all() {
                    assert_eq!(
                        contains(&range, &key_of(other)),
                        kind == other,
                        "{kind:?} {range:?} {other:?}"
                    );
                }
            }
        }
    }
}

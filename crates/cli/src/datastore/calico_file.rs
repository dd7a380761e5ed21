//! The file of `calicoctl datastore migrate export` (`calicoctl/calicoctl/commands/datastore/migrate` of Calico v3.32): lists of resources as
//! YAML, ClusterInformation, and the records of IPAM under their etcd keys, with a line `===` between them.
//!
//! Nodes have the names of Kubernetes there, and so have FelixConfigurations, BGPConfigurations and records of IPAM. Profiles, endpoints and the copies of Kubernetes' policies are left
//! out: a Kubernetes API derives them, and controllers copy them to etcd.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tortie_api::calico::{ClusterInformation, from_calico_node, to_calico_node};
use tortie_api::{Key, Kind, from_yaml, to_yaml};
use tortie_store::etcd::{key_of, object_of};

use super::exported::{Exported, without_identity};

const SEPARATOR: &str = "===\n";
/// The kinds of the first part, in calicoctl's order.
const RESOURCES: [Kind; 17] = [
    Kind::IpPool,
    Kind::BgpPeer,
    Kind::Tier,
    Kind::GlobalNetworkPolicy,
    Kind::StagedGlobalNetworkPolicy,
    Kind::GlobalNetworkSet,
    Kind::HostEndpoint,
    Kind::KubeControllersConfiguration,
    Kind::NetworkPolicy,
    Kind::StagedNetworkPolicy,
    Kind::StagedKubernetesNetworkPolicy,
    Kind::NetworkSet,
    Kind::Node,
    Kind::BgpConfiguration,
    Kind::FelixConfiguration,
    Kind::IpReservation,
    Kind::BgpFilter,
];
/// The fields of a Node's `spec` (`libcalico-go/lib/apis/v3/node.go`).
const NODE_FIELDS: [&str; 9] = [
    "addresses",
    "bgp",
    "interfaces",
    "ipv4VXLANTunnelAddr",
    "ipv6VXLANTunnelAddr",
    "orchRefs",
    "vxlanTunnelMACAddr",
    "vxlanTunnelMACAddrV6",
    "wireguard",
];
/// The API of the resources, also of Nodes.
const API: &str = "projectcalico.org/v3";
/// The names of copies of Kubernetes' policies begin with it.
const COPIES: &str = "knp.default.";
/// The handles of a node's own addresses: a prefix before its name.
const TUNNELS: [&str; 5] = [
    "ipip-tunnel-addr-",
    "vxlan-tunnel-addr-",
    "vxlan-v6-tunnel-addr-",
    "wireguard-tunnel-addr-",
    "wireguard-v6-tunnel-addr-",
];

/// The third part.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ipam {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    block_affinities: Vec<Record>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    blocks: Vec<Record>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    handles: Vec<Record>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config: Option<Record>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct Record {
    key: String,
    value: Value,
    /// Go writes an absent time to live as 0.
    #[serde(rename = "TTL", default)]
    ttl: u64,
}

/// The kinds that such a file has.
pub(super) fn kinds() -> BTreeSet<Kind> {
    let ipam = [Kind::IpamBlock, Kind::BlockAffinity, Kind::IpamHandle, Kind::IpamConfig];
    RESOURCES.into_iter().chain(ipam).chain([Kind::ClusterInformation]).collect()
}

/// Returns whether such a file has an object.
pub(super) fn has(key: &Key) -> bool {
    kinds().contains(&key.kind) && !is_copy(key)
}

/// Returns whether a text looks like such a file.
pub(super) fn is_this(text: &str) -> bool {
    text.split(SEPARATOR).count() == 3
}

/// Reads a file.
///
/// # Errors
/// It is not complete, or something in it is no object.
pub(super) fn parse(text: &str) -> anyhow::Result<Vec<Exported>> {
    let parts: Vec<&str> = text.split(SEPARATOR).collect();
    let &[resources, cluster, ipam] = parts.as_slice() else {
        bail!("it does not have three parts with a line === between them; export again");
    };
    let mut objects = Vec::new();
    for list in from_yaml(resources).map_err(anyhow::Error::msg).context("the part with resources")? {
        let kind = list["kind"].as_str().unwrap_or_default().to_owned();
        let items = list["items"].as_array().cloned();
        let items = items.with_context(|| format!("the part with resources: {kind:?} is no list"))?;
        for item in items {
            objects.push(resource(item)?);
        }
    }
    let cluster: Value = serde_json::from_str(cluster).context("the part with ClusterInformation")?;
    // calicoctl writes nothing else if there is no such object.
    if cluster["metadata"]["name"] == ClusterInformation::NAME {
        objects.push(resource(cluster)?);
    }
    let Ipam { block_affinities, blocks, handles, config } =
        serde_json::from_str(ipam).context("the part with records of IPAM")?;
    for (kind, records) in [
        (Kind::BlockAffinity, block_affinities),
        (Kind::IpamBlock, blocks),
        (Kind::IpamHandle, handles),
        (Kind::IpamConfig, config.into_iter().collect()),
    ] {
        for record in records {
            let key = object_of(kind, &record.key);
            let key =
                key.with_context(|| format!("{:?} is no etcd key of kind {}", record.key, kind.name()))?;
            objects.push(Exported { key, value: record.value });
        }
    }
    if let Some((object, problem)) = objects.iter().find_map(|object| Some((object, object.problem()?))) {
        bail!("{}: {problem}; correct it in the exported datastore, and export again", object.key);
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = objects.iter().find(|object| !seen.insert(&object.key)) {
        bail!("{} is there more than once; export again", twice.key);
    }
    objects.sort_by(|a, b| (a.key.kind.apply_order(), &a.key).cmp(&(b.key.kind.apply_order(), &b.key)));
    Ok(objects)
}

/// A resource as Tortie reads it in etcd.
fn resource(mut value: Value) -> anyhow::Result<Exported> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (api, name) = (text(&value["apiVersion"]), text(&value["kind"]));
    let kind = RESOURCES.into_iter().chain([Kind::ClusterInformation]).find(|kind| kind.name() == name);
    let kind = kind.filter(|_| api == API);
    let kind = kind.with_context(|| format!("{name:?} of {api:?} is no kind that calicoctl exports"))?;
    if kind == Kind::Node {
        from_calico_node(&mut value);
    }
    let metadata = &value["metadata"];
    let namespace = if kind.namespaced() { text(&metadata["namespace"]) } else { String::new() };
    Ok(Exported { key: Key { kind, namespace, name: text(&metadata["name"]) }, value })
}

/// Writes a file that calicoctl and Tortie import into a Kubernetes API.
///
/// # Errors
/// A Node does not name its Node in Kubernetes, or a record of IPAM has no etcd key.
pub(super) fn write(objects: &[Exported]) -> anyhow::Result<String> {
    let nodes = node_names(objects)?;
    let mut text = String::new();
    for kind in RESOURCES {
        let is_listed = |object: &&Exported| object.key.kind == kind && !is_copy(&object.key);
        let items: Vec<Value> = objects.iter().filter(is_listed).map(|object| item(object, &nodes)).collect();
        let list = json!({"apiVersion": API, "kind": format!("{}List", kind.name()), "metadata": {}, "items": items});
        text.push_str(&to_yaml(&list));
        text.push_str("---\n");
    }
    text.push_str(SEPARATOR);
    let cluster = objects.iter().find(|object| object.key.kind == Kind::ClusterInformation);
    let cluster = cluster.map_or_else(|| json!({}), |object| item(object, &nodes));
    text.push_str(&serde_json::to_string_pretty(&cluster)?);
    text.push('\n');
    text.push_str(SEPARATOR);
    text.push_str(&serde_json::to_string_pretty(&ipam(objects, &nodes))?);
    text.push('\n');
    Ok(text)
}

/// Returns whether controllers make the object of another one.
fn is_copy(key: &Key) -> bool {
    key.kind == Kind::NetworkPolicy && key.name.starts_with(COPIES)
}

/// The name in Kubernetes of each Node.
fn node_names(objects: &[Exported]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut names = BTreeMap::new();
    for object in objects.iter().filter(|object| object.key.kind == Kind::Node) {
        let references = object.value["spec"]["orchRefs"].as_array().into_iter().flatten();
        let name =
            references.filter(|one| one["orchestrator"] == "k8s").find_map(|one| one["nodeName"].as_str());
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            bail!(
                "{}: spec.orchRefs does not name its Node in Kubernetes, as calicoctl requires it; delete the Node, or add \
                 {{orchestrator: k8s, nodeName: NAME}}",
                object.key
            );
        };
        if let Some((other, _)) = names.iter().find(|(_, known)| *known == name) {
            bail!(
                "Nodes {other} and {} are both Node {name} of Kubernetes (spec.orchRefs); delete the one that is gone",
                object.key.name
            );
        }
        names.insert(object.key.name.clone(), name.to_owned());
    }
    Ok(names)
}

/// A resource as calicoctl shows it.
fn item(object: &Exported, nodes: &BTreeMap<String, String>) -> Value {
    let Exported { key, value } = object;
    let mut value = without_identity(key.kind, value.clone());
    if key.kind == Kind::Node {
        to_calico_node(&mut value);
        // A Node of a Kubernetes API has others besides, and calicoctl refuses what it does not know.
        if let Some(spec) = value.get_mut("spec").and_then(Value::as_object_mut) {
            spec.retain(|field, _| NODE_FIELDS.contains(&field.as_str()));
        }
    }
    value["apiVersion"] = json!(API);
    value["kind"] = json!(key.kind.name());
    let of_node = |name: &str| nodes.get(name).cloned();
    let name = match key.kind {
        Kind::Node => of_node(&key.name),
        Kind::FelixConfiguration | Kind::BgpConfiguration => {
            key.name.strip_prefix("node.").and_then(of_node).map(|name| format!("node.{name}"))
        }
        _ => None,
    };
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("uid");
        metadata.remove("creationTimestamp");
        if let Some(name) = name {
            metadata.insert("name".to_owned(), json!(name));
        }
    }
    // calicoctl leaves the name in etcd there, which no node has afterwards.
    if matches!(key.kind, Kind::HostEndpoint | Kind::BgpPeer)
        && let Some(name) = value["spec"]["node"].as_str().and_then(of_node)
    {
        value["spec"]["node"] = json!(name);
    }
    value
}

/// The objects of a file that name a node which the file does not have: calicoctl gives Nodes their names of Kubernetes, and these objects not.
pub(super) fn lost_nodes(objects: &[Exported]) -> impl Iterator<Item = (&Key, &str)> {
    let of_kind = |kind: Kind| objects.iter().filter(move |object| object.key.kind == kind);
    let nodes: BTreeSet<&str> = of_kind(Kind::Node).map(|object| object.key.name.as_str()).collect();
    let naming = of_kind(Kind::HostEndpoint).chain(of_kind(Kind::BgpPeer));
    let named = naming.filter_map(|object| Some((&object.key, object.value["spec"]["node"].as_str()?)));
    named.filter(move |(_, node)| !node.is_empty() && !nodes.contains(node))
}

/// The records of IPAM, with the names of nodes in Kubernetes.
fn ipam(objects: &[Exported], nodes: &BTreeMap<String, String>) -> Ipam {
    let mut ipam = Ipam::default();
    for Exported { key, value } in objects {
        let renamed = |name: String| Key { name, ..key.clone() };
        let record = |key: &Key, value: Value| Record { key: key_of(key), value, ttl: 0 };
        match key.kind {
            Kind::BlockAffinity => {
                let (owner, cidr) = key.name.split_once('/').unwrap_or((&key.name, ""));
                let owner = nodes.get(owner).map_or(owner, String::as_str);
                ipam.block_affinities.push(record(&renamed(format!("{owner}/{cidr}")), value.clone()));
            }
            Kind::IpamBlock => ipam.blocks.push(record(key, block(value, nodes))),
            Kind::IpamHandle => {
                ipam.handles.push(record(&renamed(handle(&key.name, nodes)), value.clone()));
            }
            Kind::IpamConfig => ipam.config = Some(record(key, value.clone())),
            _ => {}
        }
    }
    ipam
}

/// A handle with the name of the node in Kubernetes, if it is that of a node's own address.
fn handle(name: &str, nodes: &BTreeMap<String, String>) -> String {
    let renamed = TUNNELS.into_iter().find_map(|prefix| {
        let node = nodes.get(name.strip_prefix(prefix)?)?;
        Some(format!("{prefix}{node}"))
    });
    renamed.unwrap_or_else(|| name.to_owned())
}

fn block(value: &Value, nodes: &BTreeMap<String, String>) -> Value {
    let mut block = value.clone();
    let affinity = value["affinity"].as_str().and_then(|affinity| affinity.strip_prefix("host:"));
    if let Some(node) = affinity.and_then(|owner| nodes.get(owner)) {
        block["affinity"] = json!(format!("host:{node}"));
    }
    for attributes in block.get_mut("attributes").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(name) = attributes["handle_id"].as_str() {
            attributes["handle_id"] = json!(handle(name, nodes));
        }
        for owner in ["secondary", "alternateOwnerAttrs"] {
            if let Some(node) = attributes[owner]["node"].as_str().and_then(|node| nodes.get(node)) {
                attributes[owner]["node"] = json!(node);
            }
        }
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource_of(kind: Kind, namespace: &str, name: &str, spec: Value) -> Exported {
        let mut metadata = json!({"name": name});
        if kind.namespaced() {
            metadata["namespace"] = json!(namespace);
        }
        let value = json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": metadata, "spec": spec});
        Exported { key: Key { kind, namespace: namespace.to_owned(), name: name.to_owned() }, value }
    }

    fn record_of(kind: Kind, name: &str, value: Value) -> Exported {
        Exported { key: Key::global(kind, name), value }
    }

    /// A cluster whose Node has another name in etcd than in Kubernetes.
    fn objects(node: &str, orchestrated: &str) -> Vec<Exported> {
        let mut calico = resource_of(
            Kind::Node,
            "",
            node,
            json!({"orchRefs": [{"orchestrator": "k8s", "nodeName": orchestrated}]}),
        );
        calico.value["metadata"]["annotations"] = json!({"projectcalico.org/IPv4Address": "192.0.2.1/24"});
        let attributes = json!([
            {"handle_id": format!("vxlan-tunnel-addr-{node}"), "secondary": {"node": node, "type": "vxlanTunnelAddress"}},
            {"handle_id": "k8s-pod-network.abc", "secondary": {"node": node, "pod": "p", "namespace": "n"}},
        ]);
        let block = json!({"cidr": "10.0.0.0/26", "affinity": format!("host:{node}"), "allocations": [0, 1], "attributes": attributes});
        let affinity = json!({"state": "confirmed", "deleted": "false"});
        let mut all = vec![
            resource_of(Kind::IpPool, "", "p", json!({"cidr": "10.0.0.0/16"})),
            resource_of(Kind::Tier, "", "team", json!({"order": 10})),
            resource_of(Kind::NetworkPolicy, "n", "p", json!({"tier": "team", "selector": "all()"})),
            resource_of(
                Kind::FelixConfiguration,
                "",
                &format!("node.{node}"),
                json!({"logSeverityScreen": "Debug"}),
            ),
            resource_of(
                Kind::ClusterInformation,
                "",
                "default",
                json!({"clusterGUID": "g", "datastoreReady": false}),
            ),
            calico,
            resource_of(Kind::HostEndpoint, "", "h", json!({"node": node, "interfaceName": "eth0"})),
            record_of(Kind::BlockAffinity, &format!("{node}/10.0.0.0/26"), affinity.clone()),
            record_of(Kind::BlockAffinity, "virtual:load-balancer/10.1.0.0/26", affinity),
            record_of(Kind::IpamBlock, "10.0.0.0/26", block),
            record_of(
                Kind::IpamHandle,
                &format!("vxlan-tunnel-addr-{node}"),
                json!({"block": {"10.0.0.0/26": 1}}),
            ),
            record_of(Kind::IpamHandle, "k8s-pod-network.abc", json!({"block": {"10.0.0.0/26": 1}})),
            record_of(Kind::IpamConfig, "default", json!({"strict_affinity": true})),
        ];
        all.sort_by(|a, b| (a.key.kind.apply_order(), &a.key).cmp(&(b.key.kind.apply_order(), &b.key)));
        all
    }

    #[test]
    fn what_is_written_is_read_with_the_names_of_kubernetes() {
        let copy = resource_of(Kind::NetworkPolicy, "n", "knp.default.x", json!({}));
        let profile = resource_of(Kind::Profile, "", "kns.n", json!({}));
        let exported = [objects("etcd-one", "one"), vec![copy, profile]].concat();
        let text = write(&exported).unwrap();
        assert!(is_this(&text), "{text}");
        assert_eq!(parse(&text).unwrap(), objects("one", "one"));
    }

    #[test]
    fn nodes_that_a_file_lacks_are_found() {
        let mut file = objects("one", "one");
        assert_eq!(lost_nodes(&file).count(), 0);
        let endpoint = file.iter_mut().find(|object| object.key.kind == Kind::HostEndpoint).unwrap();
        endpoint.value["spec"]["node"] = json!("etcd-one");
        let lost: Vec<(String, &str)> =
            lost_nodes(&file).map(|(key, node)| (key.to_string(), node)).collect();
        assert_eq!(lost, [("HostEndpoint h".to_owned(), "etcd-one")]);
    }

    #[test]
    fn what_only_the_exporting_datastore_can_use_is_left_out() {
        let mut exported = objects("one", "one");
        let pool = exported.iter_mut().find(|object| object.key.kind == Kind::IpPool).unwrap();
        for (field, value) in [
            ("uid", json!("u")),
            ("deletionTimestamp", json!("2026-11-29T00:00:00Z")),
            ("finalizers", json!(["projectcalico.org/ippool-finalizer"])),
            ("ownerReferences", json!([{}])),
        ] {
            pool.value["metadata"][field] = value;
        }
        assert_eq!(parse(&write(&exported).unwrap()).unwrap(), objects("one", "one"));
    }

    /// In YAML and JSON, such a text has quotes or no line of its own.
    #[test]
    fn a_text_with_the_separator_comes_back() {
        for text in ["text===", "A title\n===\nand a text", "===\n", "==="] {
            let mut exported = objects("one", "one");
            for object in exported.iter_mut().filter(|object| object.value.get("metadata").is_some()) {
                if object.key.kind != Kind::Node {
                    object.value["metadata"]["annotations"] = json!({"a": text});
                }
            }
            assert_eq!(parse(&write(&exported).unwrap()).unwrap(), exported, "{text:?}");
        }
    }

    #[test]
    fn a_node_without_its_name_in_kubernetes_is_refused() {
        let mut exported = objects("one", "one");
        let node = exported.iter_mut().find(|object| object.key.kind == Kind::Node).unwrap();
        node.value["spec"] = json!({});
        assert!(write(&exported).unwrap_err().to_string().contains("spec.orchRefs"));
        let twice = [objects("one", "one"), objects("two", "one")].concat();
        assert!(write(&twice).unwrap_err().to_string().contains("Nodes one and two are both"));
    }

    #[test]
    fn a_node_has_only_fields_that_calicoctl_knows() {
        let mut exported = objects("one", "one");
        let node = exported.iter_mut().find(|object| object.key.kind == Kind::Node).unwrap();
        node.value["spec"]["podCIDR"] = json!("10.0.0.0/24");
        assert_eq!(parse(&write(&exported).unwrap()).unwrap(), objects("one", "one"));
    }

    #[test]
    fn damaged_files_are_refused() {
        let text = write(&objects("one", "one")).unwrap();
        for (from, to, expected) in [
            ("===\n", "", "three parts"),
            ("kind: NetworkPolicy\n", "kind: Nonsense\n", "no kind that calicoctl exports"),
            ("/calico/ipam/v2/handle/k8s", "/calico/ipam/v3/handle/k8s", "no etcd key of kind IPAMHandle"),
            ("\"TTL\": 0", "\"Other\": 0", "records of IPAM"),
            ("kind: TierList", "kind: TierList\nmetadata: {}", "the part with resources"),
            ("name: team\n", "name: a/b\n", "its name has a slash"),
            (
                "/calico/ipam/v2/handle/k8s-pod-network.abc",
                "/calico/ipam/v2/handle/vxlan-tunnel-addr-one",
                "more than once",
            ),
        ] {
            let damaged = text.replacen(from, to, 1);
            assert_ne!(damaged, text, "{from}");
            let error = format!("{:#}", parse(&damaged).unwrap_err());
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}

//! The columns of tables, for each kind.

use serde_json::Value;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Kind, Resource};
use tortie_store::Stored;

/// A column after the name.
struct Column {
    name: &'static str,
    /// Whether only `-o wide` shows it.
    wide: bool,
    cell: Cell,
}

/// The content of a column.
enum Cell {
    /// The field at this pointer.
    Field(&'static str),
    /// The elements of the list at this pointer, separated by commas.
    List(&'static str),
    /// The number of elements of the list at this pointer.
    Count(&'static str),
    Of(fn(&Stored) -> String),
}

/// What a table shows besides the columns of the kind.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Detail {
    /// The columns of `-o wide`.
    pub(super) wide: bool,
    /// The labels.
    pub(super) labels: bool,
    /// The kind before each name.
    pub(super) kinds: bool,
}

const fn field(name: &'static str, pointer: &'static str) -> Column {
    Column { name, wide: false, cell: Cell::Field(pointer) }
}

const fn list(name: &'static str, pointer: &'static str) -> Column {
    Column { name, wide: false, cell: Cell::List(pointer) }
}

const fn count(name: &'static str, pointer: &'static str) -> Column {
    Column { name, wide: false, cell: Cell::Count(pointer) }
}

const fn of(name: &'static str, cell: fn(&Stored) -> String) -> Column {
    Column { name, wide: false, cell: Cell::Of(cell) }
}

const fn wide(column: Column) -> Column {
    Column { wide: true, ..column }
}

/// The columns of a kind between the name and the age.
fn columns(kind: Kind) -> Vec<Column> {
    match kind {
        Kind::Pod => vec![
            field("STATUS", "/status/phase"),
            field("IP", "/status/podIP"),
            field("NODE", "/spec/nodeName"),
            field("MESSAGE", "/status/message"),
            wide(field("ACCOUNT", "/spec/serviceAccountName")),
        ],
        Kind::Node => vec![
            of("OS", |stored| of_node(stored, |node| node.metadata.labels.get(Node::OS).cloned())),
            of("ADDRESS", |stored| of_node(stored, |node| Some(node.address()?.to_string()))),
            of("TUNNEL", |stored| {
                of_node(stored, |node| Some(node.vxlan_address(IpVersion::V4)?.to_string()))
            }),
            wide(of("IPV6", |stored| of_node(stored, |node| Some(node.address_v6()?.to_string())))),
            wide(of("IPV6-TUNNEL", |stored| {
                of_node(stored, |node| Some(node.vxlan_address(IpVersion::V6)?.to_string()))
            })),
            wide(field("VERSION", "/status/nodeInfo/kubeletVersion")),
        ],
        Kind::Service => vec![
            of("TYPE", |stored| text_at(&stored.value, "/spec/type", "ClusterIP")),
            field("CLUSTER-IP", "/spec/clusterIP"),
            of("EXTERNAL-IP", external_addresses),
            of("PORTS", service_ports),
            wide(of("SELECTOR", |stored| pairs(stored.value.pointer("/spec/selector")))),
        ],
        Kind::Deployment | Kind::ReplicaSet | Kind::StatefulSet | Kind::ReplicationController => {
            vec![field("REPLICAS", "/spec/replicas"), field("READY", "/status/readyReplicas")]
        }
        Kind::DaemonSet => vec![
            field("DESIRED", "/status/desiredNumberScheduled"),
            field("READY", "/status/numberReady"),
            wide(of("NODE-SELECTOR", |stored| {
                pairs(stored.value.pointer("/spec/template/spec/nodeSelector"))
            })),
        ],
        Kind::Job => vec![field("ACTIVE", "/status/active"), field("READY", "/status/ready")],
        Kind::CronJob => vec![field("SCHEDULE", "/spec/schedule"), field("SUSPEND", "/spec/suspend")],
        Kind::EndpointSlice => vec![
            of("SERVICE", |stored| label(stored, "kubernetes.io/service-name")),
            of("PORTS", |stored| ports(stored.value.pointer("/ports"))),
            of("ENDPOINTS", slice_addresses),
        ],
        Kind::ServiceCidr => vec![list("CIDRS", "/spec/cidrs")],
        Kind::NetworkPolicy
        | Kind::GlobalNetworkPolicy
        | Kind::StagedNetworkPolicy
        | Kind::StagedGlobalNetworkPolicy => vec![
            of("TIER", |stored| text_at(&stored.value, "/spec/tier", "default")),
            field("ORDER", "/spec/order"),
            field("SELECTOR", "/spec/selector"),
            wide(list("TYPES", "/spec/types")),
            wide(count("INGRESS", "/spec/ingress")),
            wide(count("EGRESS", "/spec/egress")),
        ],
        Kind::KubernetesNetworkPolicy | Kind::StagedKubernetesNetworkPolicy => vec![
            of("POD-SELECTOR", |stored| pairs(stored.value.pointer("/spec/podSelector/matchLabels"))),
            list("TYPES", "/spec/policyTypes"),
        ],
        Kind::ClusterNetworkPolicy => vec![field("TIER", "/spec/tier"), field("PRIORITY", "/spec/priority")],
        Kind::AdminNetworkPolicy => vec![field("PRIORITY", "/spec/priority")],
        Kind::Tier => vec![field("ORDER", "/spec/order"), field("DEFAULT-ACTION", "/spec/defaultAction")],
        Kind::NetworkSet | Kind::GlobalNetworkSet => {
            vec![count("NETS", "/spec/nets"), wide(list("NETWORKS", "/spec/nets"))]
        }
        Kind::HostEndpoint => vec![
            field("NODE", "/spec/node"),
            field("INTERFACE", "/spec/interfaceName"),
            list("IPS", "/spec/expectedIPs"),
            wide(list("PROFILES", "/spec/profiles")),
        ],
        Kind::BgpPeer => vec![
            field("PEERIP", "/spec/peerIP"),
            field("NODE", "/spec/node"),
            field("ASN", "/spec/asNumber"),
            wide(field("NODE-SELECTOR", "/spec/nodeSelector")),
            wide(field("PEER-SELECTOR", "/spec/peerSelector")),
        ],
        Kind::BgpConfiguration => {
            vec![field("ASN", "/spec/asNumber"), field("MESH", "/spec/nodeToNodeMeshEnabled")]
        }
        Kind::IpPool => vec![
            field("CIDR", "/spec/cidr"),
            field("BLOCKSIZE", "/spec/blockSize"),
            field("VXLAN", "/spec/vxlanMode"),
            wide(field("NAT", "/spec/natOutgoing")),
            wide(field("DISABLED", "/spec/disabled")),
            wide(field("NODE-SELECTOR", "/spec/nodeSelector")),
        ],
        Kind::IpReservation => vec![list("CIDRS", "/spec/reservedCIDRs")],
        Kind::WorkloadEndpoint => vec![
            field("NODE", "/spec/node"),
            list("NETWORKS", "/spec/ipNetworks"),
            field("INTERFACE", "/spec/interfaceName"),
            wide(list("PROFILES", "/spec/profiles")),
        ],
        Kind::IpamBlock => vec![field("AFFINITY", "/affinity"), count("FREE", "/unallocated")],
        Kind::BlockAffinity => vec![field("STATE", "/state")],
        Kind::NodeReport => vec![
            field("OS", "/status/os"),
            field("PODS", "/status/endpoints"),
            of("CONDITIONS", condition_count),
            wide(field("VERSION", "/status/version")),
        ],
        Kind::Lease => vec![field("HOLDER", "/spec/holderIdentity")],
        Kind::Namespace
        | Kind::ServiceAccount
        | Kind::Profile
        | Kind::BaselineAdminNetworkPolicy
        | Kind::FelixConfiguration
        | Kind::KubeControllersConfiguration
        | Kind::BgpFilter
        | Kind::ClusterInformation
        | Kind::CalicoNodeStatus
        | Kind::IpamHandle
        | Kind::IpamConfig => Vec::new(),
    }
}

/// The header and a row for each object. `now` is in seconds since 1970.
pub(super) fn table(kind: Kind, items: &[&Stored], detail: Detail, now: i64) -> Vec<Vec<String>> {
    let columns: Vec<Column> =
        columns(kind).into_iter().filter(|column| detail.wide || !column.wide).collect();
    let mut header: Vec<&str> = if kind.namespaced() { vec!["NAMESPACE"] } else { vec![] };
    header.push("NAME");
    header.extend(columns.iter().map(|column| column.name));
    header.push("AGE");
    if detail.labels {
        header.push("LABELS");
    }
    let row = |stored: &&Stored| {
        let mut row = if kind.namespaced() { vec![stored.key.namespace.clone()] } else { vec![] };
        let name = &stored.key.name;
        row.push(match detail.kinds {
            true => format!("{}/{name}", kind.name().to_lowercase()),
            false => name.clone(),
        });
        row.extend(columns.iter().map(|column| column.cell.of(stored)));
        row.push(age(&stored.value, now));
        if detail.labels {
            row.push(pairs(stored.value.pointer("/metadata/labels")));
        }
        row
    };
    std::iter::once(header.into_iter().map(str::to_owned).collect()).chain(items.iter().map(row)).collect()
}

impl Cell {
    fn of(&self, stored: &Stored) -> String {
        let at = |pointer: &str| stored.value.pointer(pointer);
        let elements = |pointer: &str| at(pointer).and_then(Value::as_array).map(Vec::as_slice);
        match self {
            Self::Field(pointer) => text(at(pointer)),
            Self::List(pointer) => {
                let elements = elements(pointer).unwrap_or_default().iter();
                elements.map(|element| text(Some(element))).collect::<Vec<_>>().join(",")
            }
            Self::Count(pointer) => elements(pointer).unwrap_or_default().len().to_string(),
            Self::Of(cell) => cell(stored),
        }
    }
}

fn text(value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    }
}

/// The field's text, or its default.
fn text_at(value: &Value, pointer: &str, default: &str) -> String {
    match text(value.pointer(pointer)) {
        text if text.is_empty() => default.to_owned(),
        text => text,
    }
}

fn label(stored: &Stored, name: &str) -> String {
    text(stored.value.pointer("/metadata/labels").and_then(|labels| labels.get(name)))
}

/// Labels as `a=1,b=2`.
fn pairs(labels: Option<&Value>) -> String {
    let labels = labels.and_then(Value::as_object).into_iter().flatten();
    labels.map(|(name, value)| format!("{name}={}", text(Some(value)))).collect::<Vec<_>>().join(",")
}

fn of_node(stored: &Stored, cell: impl Fn(&Node) -> Option<String>) -> String {
    match Resource::read(&stored.key, &stored.value) {
        Ok(Resource::Node(node)) => cell(&node).unwrap_or_default(),
        _ => "(cannot be read)".to_owned(),
    }
}

/// The addresses of a Service besides its cluster addresses.
fn external_addresses(stored: &Stored) -> String {
    let elements = |pointer: &str| stored.value.pointer(pointer).and_then(Value::as_array);
    let given = elements("/spec/externalIPs").into_iter().flatten().map(|address| text(Some(address)));
    let ingress = elements("/status/loadBalancer/ingress").into_iter().flatten();
    let balanced = ingress.map(|one| text(one.get("ip").or_else(|| one.get("hostname"))));
    given.chain(balanced).collect::<Vec<_>>().join(",")
}

/// `80/TCP`, `80:30080/TCP` with a node port.
fn service_ports(stored: &Stored) -> String {
    let ports = stored.value.pointer("/spec/ports").and_then(Value::as_array).into_iter().flatten();
    let shown = ports.map(|port| {
        let node_port = port.get("nodePort").map(|port| format!(":{port}")).unwrap_or_default();
        format!("{}{node_port}/{}", text(port.get("port")), text_at(port, "/protocol", "TCP"))
    });
    shown.collect::<Vec<_>>().join(",")
}

fn ports(ports: Option<&Value>) -> String {
    let ports = ports.and_then(Value::as_array).into_iter().flatten();
    let shown = ports.map(|port| format!("{}/{}", text(port.get("port")), text_at(port, "/protocol", "TCP")));
    shown.collect::<Vec<_>>().join(",")
}

/// The first addresses of a slice.
fn slice_addresses(stored: &Stored) -> String {
    const SHOWN: usize = 3;
    let endpoints = stored.value.pointer("/endpoints").and_then(Value::as_array).into_iter().flatten();
    let addresses = endpoints.filter_map(|endpoint| endpoint.get("addresses")?.as_array()).flatten();
    let addresses: Vec<String> = addresses.map(|address| text(Some(address))).collect();
    match addresses.get(..SHOWN) {
        Some(first) if addresses.len() > SHOWN => {
            format!("{} + {} more", first.join(","), addresses.len() - SHOWN)
        }
        _ => addresses.join(","),
    }
}

fn condition_count(stored: &Stored) -> String {
    let listed = stored.value.pointer("/status/conditions").and_then(Value::as_array).map_or(0, Vec::len);
    let more = stored.value.pointer("/status/more").and_then(Value::as_u64).unwrap_or_default();
    (listed as u64 + more).to_string()
}

/// The time since the object was created: `40s`, `5m`, `3h`, `12d`; nothing if that is unknown.
pub(crate) fn age(object: &Value, now: i64) -> String {
    let created = object.pointer("/metadata/creationTimestamp").and_then(Value::as_str);
    let Some(created) = created.and_then(|text| text.parse::<jiff::Timestamp>().ok()) else {
        return String::new();
    };
    match now.saturating_sub(created.as_second()).max(0) {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7_200 => format!("{}m", seconds / 60),
        seconds @ 7_200..172_800 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tortie_api::{Key, Position};
    use tortie_store::Version;

    use super::*;

    fn stored(kind: Kind, value: Value) -> Stored {
        let namespace = if kind.namespaced() { "n" } else { "" };
        let key = Key::namespaced(kind, namespace, "x");
        Stored { key, value, version: Version::new("1"), position: Position(1) }
    }

    #[test]
    fn tables_have_the_columns_of_their_kind() {
        let created =
            json!({"name": "x", "creationTimestamp": "1970-01-01T00:00:00Z", "labels": {"a": "1", "b": "2"}});
        for (kind, value, detail, header, row) in [
            (
                Kind::Service,
                json!({"spec": {"clusterIP": "10.96.0.1", "selector": {"app": "w"}, "externalIPs": ["192.0.2.1"],
                    "ports": [{"port": 80, "nodePort": 30080}, {"port": 53, "protocol": "UDP"}]},
                    "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}]}}}),
                Detail { wide: true, ..Detail::default() },
                "NAMESPACE NAME TYPE CLUSTER-IP EXTERNAL-IP PORTS SELECTOR AGE",
                "n|x|ClusterIP|10.96.0.1|192.0.2.1,192.0.2.9|80:30080/TCP,53/UDP|app=w|90s",
            ),
            (
                Kind::EndpointSlice,
                json!({"ports": [{"port": 80, "protocol": "TCP"}],
                    "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2", "10.0.0.3"]}, {"addresses": ["10.0.0.4"]}]}),
                Detail::default(),
                "NAMESPACE NAME SERVICE PORTS ENDPOINTS AGE",
                "n|x||80/TCP|10.0.0.1,10.0.0.2,10.0.0.3 + 1 more|90s",
            ),
            (
                Kind::GlobalNetworkPolicy,
                json!({"spec": {"order": 10, "selector": "all()", "types": ["Ingress"], "ingress": [{}, {}]}}),
                Detail { wide: true, labels: true, kinds: true },
                "NAME TIER ORDER SELECTOR TYPES INGRESS EGRESS AGE LABELS",
                "globalnetworkpolicy/x|default|10|all()|Ingress|2|0|90s|a=1,b=2",
            ),
            (
                Kind::NetworkSet,
                json!({"spec": {"nets": ["10.0.0.0/8", "192.0.2.0/24"]}}),
                Detail::default(),
                "NAMESPACE NAME NETS AGE",
                "n|x|2|90s",
            ),
            (Kind::Namespace, json!({}), Detail::default(), "NAME AGE", "x|90s"),
        ] {
            let mut value = value;
            value["metadata"] = created.clone();
            let stored = stored(kind, value);
            let rows = table(kind, &[&stored], detail, 90);
            assert_eq!(rows[0].join(" "), header, "{kind}");
            assert_eq!(rows[1].join("|"), row, "{kind}");
        }
    }

    #[test]
    fn ages_have_one_unit() {
        let object = json!({"metadata": {"creationTimestamp": "1970-01-01T00:00:00Z"}});
        for (now, expected) in [
            (-5, "0s"),
            (119, "119s"),
            (120, "2m"),
            (7_199, "119m"),
            (7_200, "2h"),
            (172_799, "47h"),
            (172_800, "2d"),
        ] {
            assert_eq!(age(&object, now), expected);
        }
        assert_eq!(age(&json!({}), 5), "");
    }
}

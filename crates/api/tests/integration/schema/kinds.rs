//! The kinds that Tortie keeps as custom resources. (Profiles and WorkloadEndpoints are derived from Namespaces,
//! ServiceAccounts and Pods there.)

use serde_json::{Map, Value, json};
use tortie_api::Kind;
use tortie_api::calico::{HostEndpoint, KubeControllersConfiguration, NetworkPolicy, NetworkSet, Tier};
use tortie_api::kubernetes;
use tortie_api::report::NodeReport;

use super::{Definition, Known, Required, integer, list, number_or_text, object, of_shape, of_table, text};
use crate::probe::{Shape, shape_of};

/// What the types inspect themselves.
const KNOWN: &Known = &[
    (".ports[]", number_or_text),
    (".notPorts[]", number_or_text),
    (".protocol", number_or_text),
    (".notProtocol", number_or_text),
];
/// Calico's required fields. A policy that lacks one is not valid in any version.
const REQUIRED: &Required = &[(".ingress[]", &["action"]), (".egress[]", &["action"])];

/// In a HostEndpoint, a port is a mapping.
const HOST_KNOWN: &Known = &[(".ports[].protocol", number_or_text)];
const HOST_REQUIRED: &Required = &[(".ports[]", &["name", "port", "protocol"])];

/// Templates are mappings.
const CONTROLLERS_KNOWN: &Known =
    &[(".templates", || list(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})))];

/// A Kubernetes policy: a port is a mapping, and its protocol is a name.
const KUBERNETES_KNOWN: &Known = &[
    (".ports[].port", number_or_text),
    // Calico does not look into these of a staged policy, and stores what it gets.
    (".endPort", || json!({"type": "integer"})),
    (".policyTypes", || list(text())),
];
const KUBERNETES_REQUIRED: &Required =
    &[(".matchExpressions[]", &["key", "operator"]), (".ipBlock", &["cidr"])];

/// The fields of [`NetworkPolicy`]'s type that policies of one namespace do not have.
const FOR_CLUSTER: [&str; 4] = ["namespaceSelector", "doNotTrack", "preDNAT", "applyOnForward"];
const FOR_STAGED: &str = "stagedAction";

pub(super) fn all() -> Vec<Definition> {
    let mut all = policies();
    all.extend(inputs());
    all.extend(for_calico());
    all.extend(ipam());
    let reserved = [("reservedCIDRs", list(text()))];
    all.push(definition(
        Kind::IpReservation,
        "Addresses that IPAM does not give.",
        object(named(reserved), &[]),
    ));
    all.push(Definition {
        field: "status",
        ..definition(
            Kind::NodeReport,
            "What a node reports: how much of the policy is in force, and what the operator should know.",
            of_shape(&field(&shape_of::<NodeReport>(), "status"), "status", &[], &[]),
        )
    });
    all
}

fn definition(kind: Kind, description: &'static str, schema: Value) -> Definition {
    Definition { kind, description, field: "spec", schema, status: false }
}

/// The shape of one field of a shape.
fn field(shape: &Shape, wanted: &str) -> Shape {
    let Shape::Struct(fields) = shape else { panic!("{shape:?} has no fields") };
    let found = fields.iter().find(|(name, _)| *name == wanted);
    found.map(|(_, shape)| shape.clone()).unwrap_or_else(|| panic!("there is no {wanted}"))
}

fn policies() -> Vec<Definition> {
    let spec = of_shape(&field(&shape_of::<NetworkPolicy>(), "spec"), "spec", KNOWN, REQUIRED);
    let of = |kind: Kind, description, staged: bool| {
        let mut spec = spec.clone();
        let fields = spec["properties"].as_object_mut().unwrap();
        fields.retain(|name, _| {
            (staged || name != FOR_STAGED) && (!kind.namespaced() || !FOR_CLUSTER.contains(&name.as_str()))
        });
        definition(kind, description, spec)
    };
    let kubernetes = shape_of::<kubernetes::KubernetesNetworkPolicy>();
    let mut kubernetes = of_shape(&field(&kubernetes, "spec"), "spec", KUBERNETES_KNOWN, KUBERNETES_REQUIRED);
    kubernetes["properties"][FOR_STAGED] = spec["properties"][FOR_STAGED].clone();
    vec![
        of(Kind::NetworkPolicy, "A policy for the pods of one namespace.", false),
        of(Kind::GlobalNetworkPolicy, "A policy for the whole cluster.", false),
        of(
            Kind::StagedNetworkPolicy,
            "A policy for the pods of one namespace that is previewed and not enforced.",
            true,
        ),
        of(
            Kind::StagedGlobalNetworkPolicy,
            "A policy for the whole cluster that is previewed and not enforced.",
            true,
        ),
        definition(
            Kind::StagedKubernetesNetworkPolicy,
            "A Kubernetes network policy that is previewed and not enforced.",
            kubernetes,
        ),
    ]
}

/// The blocks of a pool stay as they are. Without `blockSize`, and with 0, its blocks have the size of the address family.
fn unchangeable_blocks() -> Value {
    let size = |object: &str| {
        format!(
            "(has({object}.blockSize) && {object}.blockSize > 0 ? {object}.blockSize : {object}.cidr.contains(':') ? 122 : 26)"
        )
    };
    let rule = |rule: String, field: &str| {
        let message = format!(
            "{field} cannot change; `tortie pool migrate` moves what has addresses of the pool to another one"
        );
        json!({"rule": rule, "message": message})
    };
    json!([
        rule("self.cidr == oldSelf.cidr".to_owned(), "cidr"),
        rule(format!("{} == {}", size("self"), size("oldSelf")), "blockSize"),
    ])
}

fn inputs() -> Vec<Definition> {
    let sets = || of_shape(&field(&shape_of::<NetworkSet>(), "spec"), "spec", &[], &[]);
    let host = of_shape(&field(&shape_of::<HostEndpoint>(), "spec"), "spec", HOST_KNOWN, HOST_REQUIRED);
    let tier = of_shape(&field(&shape_of::<Tier>(), "spec"), "spec", &[], &[]);
    let mut pool = of_table(Kind::IpPool, &[("allowedUses", uses), ("blockSize", block_size)], &["cidr"]);
    pool["x-kubernetes-validations"] = unchangeable_blocks();
    let ports: &Known =
        &[("failsafeInboundHostPorts", failsafe_ports), ("failsafeOutboundHostPorts", failsafe_ports)];
    vec![
        Definition {
            status: true,
            ..definition(Kind::Tier, "A tier: policies are evaluated tier by tier.", tier)
        },
        definition(Kind::NetworkSet, "Networks with labels, of one namespace.", sets()),
        definition(Kind::GlobalNetworkSet, "Networks with labels, of no namespace.", sets()),
        definition(Kind::HostEndpoint, "An interface of a node under policy.", host),
        Definition {
            status: true,
            ..definition(Kind::IpPool, "A range of addresses for pods, divided into blocks.", pool)
        },
        definition(
            Kind::FelixConfiguration,
            "The settings of nodes: default for all nodes, node.NAME for one.",
            of_table(Kind::FelixConfiguration, ports, &[]),
        ),
        Definition {
            status: true,
            ..definition(
                Kind::KubeControllersConfiguration,
                "The settings of the controllers; only default is read.",
                of_shape(
                    &field(&shape_of::<KubeControllersConfiguration>(), "spec"),
                    "spec",
                    CONTROLLERS_KNOWN,
                    &[],
                ),
            )
        },
    ]
}

/// The kinds that Tortie stores for Calico's nodes.
fn for_calico() -> Vec<Definition> {
    let of = |kind, description| definition(kind, description, of_table(kind, &[], &[]));
    vec![
        of(Kind::BgpPeer, "A BGP peer of Calico's nodes. Tortie's nodes have no BGP."),
        of(Kind::BgpConfiguration, "The BGP settings of Calico's nodes: default for all, node.NAME for one."),
        of(Kind::BgpFilter, "Rules for the BGP routes of Calico's nodes."),
        of(Kind::ClusterInformation, "What Calico's components know of the cluster; its name is default."),
        Definition {
            status: true,
            ..of(Kind::CalicoNodeStatus, "A request for the BGP state of a node of Calico.")
        },
    ]
}

fn uses() -> Value {
    list(json!({"type": "string", "enum": ["Workload", "Tunnel", "LoadBalancer"]}))
}

/// Zero is the default of the pool's address family.
fn block_size() -> Value {
    integer(0, 128)
}

/// Calico requires the port only.
fn failsafe_ports() -> Value {
    let fields = [("net", text()), ("port", integer(0, u16::MAX.into())), ("protocol", text())];
    list(object(named(fields), &["port"]))
}

/// The data of IPAM in the form of Calico's custom resources, which differs from that of the other datastores: the names of
/// fields and the types of `deleted` (`libcalico-go/lib/backend/k8s/resources`).
fn ipam() -> Vec<Definition> {
    let count = || integer(0, i64::MAX);
    let texts = || json!({"type": "object", "additionalProperties": text()});
    let counts = || json!({"type": "object", "additionalProperties": count()});
    let attribute = [
        ("handle_id", text()),
        ("secondary", texts()),
        ("alternateOwnerAttrs", texts()),
        ("releasedAt", text()),
    ];
    let mut allocation = count();
    allocation["nullable"] = json!(true);
    let block = [
        ("affinity", text()),
        ("affinityClaimTime", text()),
        ("allocations", list(allocation)),
        ("attributes", list(object(named(attribute), &[]))),
        ("cidr", text()),
        ("deleted", boolean()),
        ("sequenceNumber", count()),
        ("sequenceNumberForAllocation", counts()),
        ("strictAffinity", boolean()),
        ("unallocated", list(count())),
    ];
    let block = object(named(block), &["allocations", "attributes", "cidr", "strictAffinity", "unallocated"]);
    let affinity = [
        ("cidr", text()),
        // A text in this group, for the sake of old releases.
        ("deleted", json!({"type": "string", "enum": ["", "false", "true"]})),
        ("node", text()),
        ("state", text()),
        ("type", text()),
    ];
    let affinity = object(named(affinity), &["cidr", "deleted", "node", "state"]);
    let handle = [("block", counts()), ("deleted", boolean()), ("handleID", text())];
    let config = [
        ("autoAllocateBlocks", boolean()),
        ("ipCooldownSeconds", count()),
        ("kubeVirtVMAddressPersistence", json!({"type": "string", "enum": ["Enabled", "Disabled"]})),
        ("maxBlocksPerHost", integer(0, i32::MAX.into())),
        ("strictAffinity", boolean()),
    ];
    vec![
        definition(Kind::IpamBlock, "A block of addresses and their owners, written by IPAM.", block),
        definition(Kind::BlockAffinity, "The node of a block, written by IPAM.", affinity),
        definition(
            Kind::IpamHandle,
            "The number of addresses of a handle in each block, written by IPAM.",
            object(named(handle), &["block", "handleID"]),
        ),
        definition(
            Kind::IpamConfig,
            "The IPAM settings of the cluster; its name is default.",
            object(named(config), &["autoAllocateBlocks", "strictAffinity"]),
        ),
    ]
}

fn boolean() -> Value {
    json!({"type": "boolean"})
}

fn named<const N: usize>(fields: [(&str, Value); N]) -> Map<String, Value> {
    fields.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect()
}

//! The fields of BGP's kinds, which agents with a BGP speaker use, and of kinds that Tortie stores for Calico's nodes.

use super::State::{Implemented, Reported};
use super::Takes::{AnyCase, Bool, Duration, Integer, NumberOrText, Object, Objects, Text, Texts, Word};
use super::{Field, State, Takes, field};

const NO_WORKLOADS: State = Reported("Tortie's BGP speaker has no sessions with pods; Calico's nodes use it");
const NO_GATEWAY: State =
    Reported("the peer is reached by the routes that the node has; Calico's nodes use it");
const ONE_METRIC: State = Reported("learned routes have the metric 1024; Calico's nodes use it");
const NO_LEVEL: State =
    Reported("agents have an option, --log-level, and tortie agent log-level; Calico's nodes use it");
const NO_STATUS: State = Reported("Tortie's nodes have NodeReports instead; Calico's nodes answer it");
const SWITCH: Takes = Word(&["Enabled", "Disabled", ""]);
const LEVELS: Takes = AnyCase(&["debug", "info", "warning", "error", "fatal", "panic", "none"]);
const PRIORITY: Takes = Integer(1, 2_147_483_646);

pub(super) const PEER: &[Field] = &[
    field("asNumber", NumberOrText, Implemented, &[]),
    field("filters", Texts, Implemented, &[]),
    field("keepOriginalNextHop", Bool, Implemented, &[]),
    field("keepaliveTime", Duration, Implemented, &[]),
    field("localASNumber", NumberOrText, Implemented, &[]),
    field("localWorkloadSelector", Text, NO_WORKLOADS, &[]),
    field("maxRestartTime", Duration, Implemented, &[]),
    field("nextHopMode", Word(&["Auto", "Self", "Keep", ""]), Implemented, &[]),
    field("node", Text, Implemented, &[]),
    field("nodeSelector", Text, Implemented, &[]),
    field("numAllowedLocalASNumbers", Integer(0, i32::MAX as i64), Implemented, &[]),
    field("password", Object, Implemented, &[]),
    field("peerIP", Text, Implemented, &[]),
    field("peerSelector", Text, Implemented, &[]),
    field("reachableBy", Text, NO_GATEWAY, &[]),
    field("reversePeering", Word(&["Auto", "Manual", ""]), Implemented, &[]),
    field("sourceAddress", Word(&["UseNodeIP", "None", ""]), Implemented, &[]),
    field("ttlSecurity", Integer(0, 255), Implemented, &[]),
];

pub(super) const CONFIGURATION: &[Field] = &[
    field("asNumber", NumberOrText, Implemented, &[]),
    field("bindMode", Word(&["None", "NodeIP", ""]), Implemented, &[]),
    field("communities", Objects, Implemented, &[]),
    field("ignoredInterfaces", Texts, Implemented, &[]),
    field("ipv4NormalRoutePriority", PRIORITY, ONE_METRIC, &["1024"]),
    field("ipv6NormalRoutePriority", PRIORITY, ONE_METRIC, &["1024"]),
    field("listenPort", Integer(0, 65535), Implemented, &[]),
    field("localWorkloadPeeringIPV4", Text, NO_WORKLOADS, &[]),
    field("localWorkloadPeeringIPV6", Text, NO_WORKLOADS, &[]),
    field("logSeverityScreen", LEVELS, NO_LEVEL, &["Info"]), // Calico's client writes it into each object
    field("nodeMeshMaxRestartTime", Duration, Implemented, &[]),
    field("nodeMeshPassword", Object, Implemented, &[]),
    field("nodeToNodeMeshEnabled", Bool, Implemented, &[]),
    field("prefixAdvertisements", Objects, Implemented, &[]),
    field(
        "programClusterRoutes",
        Word(&["Enabled", "Disabled", "EnabledIPIPOnly", "EnabledNoEncapOnly", ""]),
        Implemented,
        &[],
    ),
    field("serviceClusterIPs", Objects, Implemented, &[]),
    field("serviceExternalIPs", Objects, Implemented, &[]),
    field("serviceLoadBalancerAggregation", SWITCH, Implemented, &[]),
    field("serviceLoadBalancerIPs", Objects, Implemented, &[]),
];

pub(super) const FILTER: &[Field] = &[
    field("exportV4", Objects, Implemented, &[]),
    field("exportV6", Objects, Implemented, &[]),
    field("importV4", Objects, Implemented, &[]),
    field("importV6", Objects, Implemented, &[]),
];

/// Information for people and for Calico's tools.
pub(super) const CLUSTER: &[Field] = &[
    field("calicoVersion", Text, Implemented, &[]),
    field("clusterGUID", Text, Implemented, &[]),
    field("clusterType", Text, Implemented, &[]),
    field("datastoreReady", Bool, Implemented, &[]),
    field("variant", Text, Implemented, &[]),
];

pub(super) const STATUS: &[Field] = &[
    field("classes", Texts, NO_STATUS, &[]),
    field("node", Text, NO_STATUS, &[]),
    field("updatePeriodSeconds", Integer(0, u32::MAX as i64), NO_STATUS, &[]),
];

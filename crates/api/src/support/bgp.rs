//! The fields of the kinds that Tortie stores for Calico's nodes and does not use.

use super::State::{Implemented, Reported};
use super::Takes::{AnyCase, Bool, Duration, Integer, NumberOrText, Object, Objects, Text, Texts, Word};
use super::{Field, State, Takes, field};

const NO_BGP: State = Reported("Tortie has no BGP; Calico's nodes use it");
const NO_STATUS: State = Reported("Tortie's nodes have NodeReports instead; Calico's nodes answer it");
const SWITCH: Takes = Word(&["Enabled", "Disabled", ""]);
const LEVELS: Takes = AnyCase(&["debug", "info", "warning", "error", "fatal", "panic", "none"]);
const PRIORITY: Takes = Integer(1, 2_147_483_646);

pub(super) const PEER: &[Field] = &[
    field("asNumber", NumberOrText, NO_BGP, &[]),
    field("filters", Texts, NO_BGP, &[]),
    field("keepOriginalNextHop", Bool, NO_BGP, &[]),
    field("keepaliveTime", Duration, NO_BGP, &[]),
    field("localASNumber", NumberOrText, NO_BGP, &[]),
    field("localWorkloadSelector", Text, NO_BGP, &[]),
    field("maxRestartTime", Duration, NO_BGP, &[]),
    field("nextHopMode", Word(&["Auto", "Self", "Keep", ""]), NO_BGP, &[]),
    field("node", Text, NO_BGP, &[]),
    field("nodeSelector", Text, NO_BGP, &[]),
    field("numAllowedLocalASNumbers", Integer(0, i32::MAX as i64), NO_BGP, &[]),
    field("password", Object, NO_BGP, &[]),
    field("peerIP", Text, NO_BGP, &[]),
    field("peerSelector", Text, NO_BGP, &[]),
    field("reachableBy", Text, NO_BGP, &[]),
    field("reversePeering", Word(&["Auto", "Manual", ""]), NO_BGP, &[]),
    field("sourceAddress", Word(&["UseNodeIP", "None", ""]), NO_BGP, &[]),
    field("ttlSecurity", Integer(0, 255), NO_BGP, &[]),
];

pub(super) const CONFIGURATION: &[Field] = &[
    field("asNumber", NumberOrText, NO_BGP, &[]),
    field("bindMode", Word(&["None", "NodeIP", ""]), NO_BGP, &[]),
    field("communities", Objects, NO_BGP, &[]),
    field("ignoredInterfaces", Texts, NO_BGP, &[]),
    field("ipv4NormalRoutePriority", PRIORITY, NO_BGP, &[]),
    field("ipv6NormalRoutePriority", PRIORITY, NO_BGP, &[]),
    field("listenPort", Integer(0, 65535), NO_BGP, &[]),
    field("localWorkloadPeeringIPV4", Text, NO_BGP, &[]),
    field("localWorkloadPeeringIPV6", Text, NO_BGP, &[]),
    field("logSeverityScreen", LEVELS, NO_BGP, &[]),
    field("nodeMeshMaxRestartTime", Duration, NO_BGP, &[]),
    field("nodeMeshPassword", Object, NO_BGP, &[]),
    field("nodeToNodeMeshEnabled", Bool, NO_BGP, &["false"]),
    field("prefixAdvertisements", Objects, NO_BGP, &[]),
    field(
        "programClusterRoutes",
        Word(&["Enabled", "Disabled", "EnabledIPIPOnly", "EnabledNoEncapOnly", ""]),
        NO_BGP,
        &[],
    ),
    field("serviceClusterIPs", Objects, NO_BGP, &[]),
    field("serviceExternalIPs", Objects, NO_BGP, &[]),
    field("serviceLoadBalancerAggregation", SWITCH, NO_BGP, &[]),
    field("serviceLoadBalancerIPs", Objects, NO_BGP, &[]),
];

pub(super) const FILTER: &[Field] = &[
    field("exportV4", Objects, NO_BGP, &[]),
    field("exportV6", Objects, NO_BGP, &[]),
    field("importV4", Objects, NO_BGP, &[]),
    field("importV6", Objects, NO_BGP, &[]),
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

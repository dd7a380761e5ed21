//! Every field of FelixConfiguration of Calico v3.32, and what Tortie does with it.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::State::{Implemented, Rejected, Reported};
use super::Takes::{
    AnyCase, Bool, Duration, Integer, Interface, Ipv4, Ipv6, ListsOfRouteTables, Nets, Nothing, NumberOrText,
    Object, Objects, Pattern, Port, Ports, Rate, RouteTables, Text, Texts, Timeouts, Word,
};
use super::{Field, Takes, field};
use crate::FieldError;
use crate::calico::FelixConfigurationSpec;

const WIREGUARD_REFUSED: &str = "Tortie does not encrypt packets between nodes, so they would be sent in the clear. Remove the \
     field, or encrypt the network below";
const NODE_SELECTOR_REFUSED: &str =
    "settings for nodes by their labels are not supported; name the object node.NAME for one node";

const KERNEL_MTU: Takes = mtu(&FelixConfigurationSpec::MTUS);
const IPV6_MTU: Takes = mtu(&FelixConfigurationSpec::MTUS_V6);

const fn mtu(mtus: &RangeInclusive<u32>) -> Takes {
    Takes::ZeroOr(*mtus.start() as i64, *mtus.end() as i64)
}

const AWS: &str = "Tortie does not configure cloud providers; configure the instances instead";
const CONNTRACK_INVALID: &str = "packets that connection tracking reports as invalid are dropped";
const DEBUG: &str = "it debugs Felix, which Tortie does not contain";
const DRIVER: &str = "Tortie has no external dataplane drivers";
const EBPF: &str = "Tortie has no eBPF dataplane; nftables and HNS enforce the same policy";
const EXTERNAL_NODES: &str = "VXLAN packets are accepted only from nodes of the cluster";
const FEATURE_GATES: &str = "it configures Felix, which Tortie does not contain";
const FIREWALL: &str = "Tortie does not change the Windows firewall; open the port yourself";
const FLOATING: &str = "floating addresses are not supported";
const FLOW_LOGS: &str = "flow logs are not supported yet";
const FORWARDING: &str = "nodes always forward packets of pods";
const GO: &str = "it tunes the runtime of Felix, which Tortie does not contain";
const HEALTH: &str = "agents serve health at the address that the flag --health-address sets";
const INTERFACES: &str =
    "host interfaces of pods always begin with cali; every other interface may have a host endpoint";
const IPIP_ROUTES: &str = "Tortie's agents always have the routes of pools with IPIP; BGPConfiguration decides about those of pools without encapsulation";
const IPTABLES: &str = "Tortie uses nftables, not iptables and ipsets";
const IPV6: &str = "IPv6 is on where an IPv6 pool gives addresses; policy always applies to both families";
const ISTIO: &str = "Tortie does not work with Istio yet";
const L2: &str = "nodes do not answer ARP or neighbour discovery for pods on their own network";
const LOG_ACTION: &str = "on Linux, the Log action sends each packet to nflog, with the name of the policy as the prefix and \
     without a rate limit; Windows nodes do not log";
const LOGS: &str = "agents log to standard error; RUST_LOG sets the level";
const METRICS: &str =
    "agents serve metrics at the addresses that the flags --health-address and --metrics-address set";
const MTU: &str = "vxlanMTU and vxlanMTUV6 are the MTUs of the overlays";
const NAT: &str = "packets that leave all pools get the address of the interface that they leave by";
const NFTABLES: &str = "marks, chains and intervals of the nftables table are fixed";
const OPENSTACK: &str = "Tortie does not work with OpenStack";
const REPORTING: &str = "agents write a NodeReport when a condition changes, and once a minute";
const ROUTES: &str = "agents repair their own routes, and do not change those of others";
const SERVICE_LOOP: &str = "packets to unused addresses of the Service network are not dropped";
const SPOOFING: &str = "a pod's packets must always have its own address";
const USAGE: &str = "Tortie reports no usage statistics";
const VXLAN_ENABLED: &str = "packets between nodes use VXLAN if the pool requires it";
const WIREGUARD: &str = "Tortie has no WireGuard";

/// The fields of `spec`.
pub(super) const FIELDS: &[Field] = &[
    field("allowIPIPPacketsFromWorkloads", Bool, Implemented, &[]),
    field("allowVXLANPacketsFromWorkloads", Bool, Implemented, &[]),
    field("awsSrcDstCheck", Word(&["DoNothing", "Enable", "Disable"]), Reported(AWS), &["DoNothing"]),
    field("bpfAttachType", Word(&["TC", "TCX", "Netkit"]), Reported(EBPF), &[]),
    // Calico's client writes three of them into each object.
    field("bpfConnectTimeLoadBalancing", Word(&["TCP", "Enabled", "Disabled"]), Reported(EBPF), &["TCP"]),
    field("bpfConnectTimeLoadBalancingEnabled", Bool, Reported(EBPF), &[]),
    field("bpfConntrackLogLevel", Word(&["Off", "Debug"]), Reported(EBPF), &[]),
    field("bpfConntrackMode", Word(&["Auto", "Userspace", "BPFProgram"]), Reported(EBPF), &[]),
    field("bpfConntrackTimeouts", Object, Reported(EBPF), &[]),
    field("bpfCTLBLogFilter", Text, Reported(EBPF), &[]),
    field("bpfDataIfacePattern", Pattern, Reported(EBPF), &[]),
    field("bpfDisableGROForIfaces", Text, Reported(EBPF), &[]),
    field("bpfDisableUnprivileged", Bool, Reported(EBPF), &[]),
    field("bpfDSROptoutCIDRs", Texts, Reported(EBPF), &[]),
    field("bpfEnabled", Bool, Reported(EBPF), &["false"]),
    field("bpfEnforceRPF", AnyCase(&["Disabled", "Strict", "Loose"]), Reported(EBPF), &[]),
    field("bpfExcludeCIDRsFromNAT", Texts, Reported(EBPF), &[]),
    field("bpfExportBufferSizeMB", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfExternalServiceMode", AnyCase(&["Tunnel", "DSR"]), Reported(EBPF), &[]),
    field("bpfExtToServiceConnmark", Integer(0, 4294967295), Reported(EBPF), &[]),
    field("bpfForceTrackPacketsFromIfaces", Texts, Reported(EBPF), &[]),
    field("bpfHostConntrackBypass", Bool, Reported(EBPF), &[]),
    field("bpfHostNetworkedNATWithoutCTLB", Word(&["Enabled", "Disabled"]), Reported(EBPF), &["Enabled"]),
    field("bpfIPFragmentReassemblyEnabled", Bool, Reported(EBPF), &[]),
    field("bpfIPFragTimeout", Duration, Reported(EBPF), &[]),
    field("bpfJITHardening", Word(&["Auto", "Strict"]), Reported(EBPF), &[]),
    field("bpfKubeProxyHealthzPort", Integer(0, 65535), Reported(EBPF), &[]),
    field("bpfKubeProxyIptablesCleanupEnabled", Bool, Reported(EBPF), &[]),
    field("bpfKubeProxyMinSyncPeriod", Duration, Reported(EBPF), &[]),
    field("bpfL3IfacePattern", Pattern, Reported(EBPF), &[]),
    field("bpfLogFilters", Object, Reported(EBPF), &[]),
    field("bpfLogLevel", AnyCase(&["Off", "Info", "Debug"]), Reported(EBPF), &[""]),
    field("bpfMaglevMaxEndpointsPerService", Integer(1, 3000), Reported(EBPF), &[]),
    field("bpfMaglevMaxServices", Integer(1, 3000), Reported(EBPF), &[]),
    field("bpfMapSizeConntrack", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizeConntrackCleanupQueue", Integer(1, i64::MAX), Reported(EBPF), &[]),
    field("bpfMapSizeConntrackScaling", AnyCase(&["Disabled", "DoubleIfFull"]), Reported(EBPF), &[]),
    field("bpfMapSizeIfState", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizeIPSets", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizeNATAffinity", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizeNATBackend", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizeNATFrontend", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizePerCpuConntrack", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfMapSizeRoute", Takes::INTEGER, Reported(EBPF), &[]),
    field("bpfOverlayHostSourceIP", Word(&["TunnelAddress", "HostAddress"]), Reported(EBPF), &[]),
    field("bpfPolicyDebugEnabled", Bool, Reported(EBPF), &[]),
    field("bpfProfiling", Word(&["Enabled", "Disabled"]), Reported(EBPF), &[]),
    field("bpfPSNATPorts", Port, Reported(EBPF), &[]),
    field("bpfRedirectToPeer", Word(&["Enabled", "Disabled"]), Reported(EBPF), &[]),
    field("cgroupV2Path", Text, Reported(EBPF), &[]),
    field("chainInsertMode", AnyCase(&["Insert", "Append"]), Reported(IPTABLES), &["", "Insert"]),
    field("dataplaneDriver", Text, Reported(DRIVER), &[]),
    field("dataplaneWatchdogTimeout", Duration, Reported(HEALTH), &[]),
    field("debugDisableLogDropping", Bool, Reported(DEBUG), &[]),
    field("debugHost", Text, Reported(DEBUG), &[]),
    field("debugMemoryProfilePath", Text, Reported(DEBUG), &[]),
    field("debugPort", Integer(0, 65535), Reported(DEBUG), &[]),
    field("debugSimulateCalcGraphHangAfter", Duration, Reported(DEBUG), &[]),
    field("debugSimulateDataplaneApplyDelay", Duration, Reported(DEBUG), &[]),
    field("debugSimulateDataplaneHangAfter", Duration, Reported(DEBUG), &[]),
    field("defaultEndpointToHostAction", AnyCase(&["Drop", "Accept", "Return"]), Implemented, &[]),
    field("deviceRouteProtocol", Takes::INTEGER, Reported(ROUTES), &[]),
    field("deviceRouteSourceAddress", Ipv4, Reported(ROUTES), &[""]),
    field("deviceRouteSourceAddressIPv6", Ipv6, Reported(ROUTES), &[""]),
    field("disableConntrackInvalidCheck", Bool, Reported(CONNTRACK_INVALID), &["false"]),
    field("endpointReportingDelay", Duration, Reported(REPORTING), &[]),
    field("endpointReportingEnabled", Bool, Reported(REPORTING), &["false"]),
    field("endpointStatusPathPrefix", Text, Reported(REPORTING), &[""]),
    field("externalNodesList", Nets, Reported(EXTERNAL_NODES), &["[]"]),
    field("failsafeInboundHostPorts", Objects, Implemented, &[]),
    field("failsafeOutboundHostPorts", Objects, Implemented, &[]),
    field("featureDetectOverride", Text, Implemented, &[]),
    field("featureGates", Text, Reported(FEATURE_GATES), &[""]),
    field("floatingIPs", Word(&["Enabled", "Disabled"]), Reported(FLOATING), &["Disabled"]),
    field("flowLogsCollectorDebugTrace", Bool, Reported(FLOW_LOGS), &[]),
    field("flowLogsFlushInterval", Duration, Reported(FLOW_LOGS), &[]),
    field("flowLogsGoldmaneServer", Text, Reported(FLOW_LOGS), &[]),
    field("flowLogsLocalReporter", Word(&["Disabled", "Enabled"]), Reported(FLOW_LOGS), &["Disabled"]),
    field("flowLogsPolicyEvaluationMode", Word(&["None", "Continuous"]), Reported(FLOW_LOGS), &[]),
    field("genericXDPEnabled", Bool, Reported(EBPF), &["false"]),
    field("goGCThreshold", Integer(-1, i64::MAX), Reported(GO), &[]),
    field("goMaxProcs", Integer(-1, i64::MAX), Reported(GO), &[]),
    field("goMemoryLimitMB", Integer(-1, i64::MAX), Reported(GO), &[]),
    field("healthEnabled", Bool, Reported(HEALTH), &["false"]),
    field("healthHost", Text, Reported(HEALTH), &[]),
    field("healthPort", Takes::INTEGER, Reported(HEALTH), &[]),
    field("healthTimeoutOverrides", Timeouts, Reported(HEALTH), &[]),
    field("interfaceExclude", Text, Reported(INTERFACES), &[]),
    field("interfacePrefix", Text, Reported(INTERFACES), &["cali"]),
    field("interfaceRefreshInterval", Duration, Reported(ROUTES), &[]),
    field("ipForwarding", Word(&["Enabled", "Disabled"]), Reported(FORWARDING), &["Enabled"]),
    field("ipipEnabled", Bool, Implemented, &[]),
    field("ipipMTU", KERNEL_MTU, Implemented, &[]),
    field("ipsetsRefreshInterval", Duration, Reported(IPTABLES), &[]),
    field("iptablesBackend", Word(&["Legacy", "NFT", "Auto"]), Reported(IPTABLES), &[]),
    field("iptablesFilterAllowAction", AnyCase(&["Accept", "Return"]), Reported(IPTABLES), &[]),
    field("iptablesFilterDenyAction", AnyCase(&["Drop", "Reject"]), Implemented, &[]),
    field("iptablesLockProbeInterval", Duration, Reported(IPTABLES), &[]),
    field("iptablesMangleAllowAction", AnyCase(&["Accept", "Return"]), Reported(IPTABLES), &[]),
    field("iptablesMarkMask", Integer(0, 4294967295), Reported(IPTABLES), &[]),
    field("iptablesNATOutgoingInterfaceFilter", Text, Reported(IPTABLES), &[""]),
    field("iptablesPostWriteCheckInterval", Duration, Reported(IPTABLES), &[]),
    field("iptablesRefreshInterval", Duration, Reported(IPTABLES), &[]),
    field("ipv4ElevatedRoutePriority", Integer(1, 2147483646), Reported(ROUTES), &[]),
    field("ipv4NormalRoutePriority", Integer(1, 2147483646), Reported(ROUTES), &[]),
    field("ipv6ElevatedRoutePriority", Integer(1, 2147483646), Reported(ROUTES), &[]),
    field("ipv6NormalRoutePriority", Integer(1, 2147483646), Reported(ROUTES), &[]),
    field("ipv6Support", Bool, Reported(IPV6), &["true"]),
    field("istioAmbientMode", Word(&["Enabled", "Disabled"]), Reported(ISTIO), &["Disabled"]),
    field("istioDSCPMark", NumberOrText, Reported(ISTIO), &[]),
    field("kubeNodePortRanges", Ports, Reported(IPTABLES), &[]),
    field("liveMigrationRouteConvergenceTime", Duration, Reported(ROUTES), &[]),
    field(
        "localSubnetL2Reachability",
        Word(&["Disabled", "PodsAndLoadBalancers"]),
        Reported(L2),
        &["Disabled"],
    ),
    field("localSubnetL2ReachabilityRefreshInterval", Duration, Reported(L2), &[]),
    field("logActionRateLimit", Rate, Reported(LOG_ACTION), &[]),
    field("logActionRateLimitBurst", Integer(0, 9999), Reported(LOG_ACTION), &[]),
    field("logDebugFilenameRegex", Pattern, Reported(LOGS), &[]),
    field("logFilePath", Text, Reported(LOGS), &[]),
    field("logPrefix", Text, Reported(LOG_ACTION), &[]),
    field(
        "logSeverityFile",
        AnyCase(&["Trace", "Debug", "Info", "Warning", "Error", "Fatal"]),
        Reported(LOGS),
        &[],
    ),
    field(
        "logSeverityScreen",
        AnyCase(&["Trace", "Debug", "Info", "Warning", "Error", "Fatal"]),
        Reported(LOGS),
        &[],
    ),
    field(
        "logSeveritySys",
        AnyCase(&["Trace", "Debug", "Info", "Warning", "Error", "Fatal"]),
        Reported(LOGS),
        &[],
    ),
    field("maxIpsetSize", Takes::INTEGER, Reported(IPTABLES), &[]),
    field("metadataAddr", Text, Reported(OPENSTACK), &[]),
    field("metadataPort", Takes::INTEGER, Reported(OPENSTACK), &[]),
    field("mtuIfacePattern", Pattern, Reported(MTU), &[]),
    field("natOutgoingAddress", Ipv4, Reported(NAT), &[""]),
    field("natOutgoingExclusions", Word(&["IPPoolsOnly", "IPPoolsAndHostIPs"]), Implemented, &[]),
    field("natPortRange", Port, Reported(NAT), &[]),
    field("netlinkTimeout", Duration, Reported(ROUTES), &[]),
    field("nftablesFilterAllowAction", AnyCase(&["Accept", "Return"]), Reported(NFTABLES), &["", "Accept"]),
    field("nftablesFilterDenyAction", AnyCase(&["Drop", "Reject"]), Implemented, &[]),
    field("nftablesFlowTableDataIfacePattern", Text, Reported(NFTABLES), &[]),
    field("nftablesFlowTableOffload", Word(&["All", "Disabled"]), Reported(NFTABLES), &["Disabled"]),
    field("nftablesMangleAllowAction", AnyCase(&["Accept", "Return"]), Reported(NFTABLES), &[]),
    field("nftablesMarkMask", Integer(0, 4294967295), Reported(NFTABLES), &[]),
    field("nftablesMode", Word(&["Disabled", "Enabled", "Auto"]), Reported(NFTABLES), &["Auto", "Enabled"]),
    field("nftablesRefreshInterval", Duration, Reported(NFTABLES), &[]),
    field("nodeSelector", Nothing, Rejected(NODE_SELECTOR_REFUSED), &[]),
    field("openstackRegion", Text, Reported(OPENSTACK), &[""]),
    field("policySyncPathPrefix", Text, Reported(REPORTING), &[""]),
    field(
        "programClusterRoutes",
        Word(&["Enabled", "Disabled", "EnabledIPIPOnly", "EnabledNoEncapOnly"]),
        Reported(IPIP_ROUTES),
        &["Enabled", "EnabledIPIPOnly"],
    ),
    field("prometheusGoMetricsEnabled", Bool, Reported(METRICS), &[]),
    field("prometheusMetricsCAFile", Text, Reported(METRICS), &[]),
    field("prometheusMetricsCertFile", Text, Reported(METRICS), &[]),
    field(
        "prometheusMetricsClientAuth",
        Word(&[
            "RequireAndVerifyClientCert",
            "RequireAnyClientCert",
            "VerifyClientCertIfGiven",
            "NoClientCert",
        ]),
        Reported(METRICS),
        &[],
    ),
    field("prometheusMetricsEnabled", Bool, Reported(METRICS), &["false"]),
    field("prometheusMetricsHost", Text, Reported(METRICS), &[]),
    field("prometheusMetricsKeyFile", Text, Reported(METRICS), &[]),
    field("prometheusMetricsPort", Takes::INTEGER, Reported(METRICS), &[]),
    field("prometheusProcessMetricsEnabled", Bool, Reported(METRICS), &[]),
    field("prometheusWireGuardMetricsEnabled", Bool, Reported(METRICS), &[]),
    field("removeExternalRoutes", Bool, Reported(ROUTES), &["false"]),
    field("reportingInterval", Duration, Reported(REPORTING), &[]),
    field("reportingTTL", Duration, Reported(REPORTING), &[]),
    field("requireMTUFile", Bool, Reported(MTU), &[]),
    field("routeRefreshInterval", Duration, Reported(ROUTES), &[]),
    field("routeSource", AnyCase(&["WorkloadIPs", "CalicoIPAM"]), Reported(ROUTES), &["", "CalicoIPAM"]),
    field("routeSyncDisabled", Bool, Reported(ROUTES), &["false"]),
    field("routeTableRange", RouteTables, Reported(ROUTES), &[]),
    field("routeTableRanges", ListsOfRouteTables, Reported(ROUTES), &[]),
    field(
        "serviceLoopPrevention",
        AnyCase(&["Drop", "Reject", "Disabled"]),
        Reported(SERVICE_LOOP),
        &["", "Disabled"],
    ),
    field("sidecarAccelerationEnabled", Bool, Reported(ISTIO), &["false"]),
    field("usageReportingEnabled", Bool, Reported(USAGE), &["false"]),
    field("usageReportingInitialDelay", Duration, Reported(USAGE), &[]),
    field("usageReportingInterval", Duration, Reported(USAGE), &[]),
    field("useInternalDataplaneDriver", Bool, Reported(DRIVER), &["true"]),
    field("vxlanEnabled", Bool, Reported(VXLAN_ENABLED), &["true"]),
    field("vxlanMTU", KERNEL_MTU, Implemented, &[]),
    field("vxlanMTUV6", IPV6_MTU, Implemented, &[]),
    field("vxlanPort", Integer(1, 65_535), Implemented, &[]),
    field("vxlanVNI", Integer(1, 16_777_215), Implemented, &[]),
    field("windowsManageFirewallRules", Word(&["Enabled", "Disabled"]), Reported(FIREWALL), &["Disabled"]),
    field("wireguardEnabled", Bool, Rejected(WIREGUARD_REFUSED), &["false"]),
    field("wireguardEnabledV6", Bool, Rejected(WIREGUARD_REFUSED), &["false"]),
    field("wireguardHostEncryptionEnabled", Bool, Rejected(WIREGUARD_REFUSED), &["false"]),
    field("wireguardInterfaceName", Interface, Reported(WIREGUARD), &[]),
    field("wireguardInterfaceNameV6", Interface, Reported(WIREGUARD), &[]),
    field("wireguardKeepAlive", Duration, Reported(WIREGUARD), &[]),
    field("wireguardListeningPort", Integer(1, 65535), Reported(WIREGUARD), &[]),
    field("wireguardListeningPortV6", Integer(1, 65535), Reported(WIREGUARD), &[]),
    field("wireguardMTU", Takes::INTEGER, Reported(WIREGUARD), &[]),
    field("wireguardMTUV6", Takes::INTEGER, Reported(WIREGUARD), &[]),
    field("wireguardRoutingRulePriority", Integer(1, 32765), Reported(WIREGUARD), &[]),
    field("wireguardThreadingEnabled", Bool, Reported(WIREGUARD), &[]),
    field("workloadSourceSpoofing", AnyCase(&["Disabled", "Any"]), Reported(SPOOFING), &["", "Disabled"]),
    field("xdpEnabled", Bool, Reported(EBPF), &["false"]),
    field("xdpRefreshInterval", Duration, Reported(EBPF), &[]),
];

/// The parts of `featureDetectOverride` that have no effect.
pub(super) fn other_features(spec: &Value) -> Option<FieldError> {
    let parts = spec["featureDetectOverride"].as_str()?.split(',').map(str::trim);
    let is_known = |part: &str| {
        let known = ["ChecksumOffloadBroken=true", "ChecksumOffloadBroken=false"];
        part.is_empty() || known.iter().any(|known| known.eq_ignore_ascii_case(part))
    };
    let others: Vec<&str> = parts.filter(|part| !is_known(part)).collect();
    (!others.is_empty()).then(|| {
        let problem = format!(
            "{} has no effect: Tortie knows ChecksumOffloadBroken=true and =false, and looks for nothing else that this field can name",
            others.join(",")
        );
        FieldError::new("spec.featureDetectOverride", problem)
    })
}

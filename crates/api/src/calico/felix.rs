//! FelixConfiguration: the settings of nodes that concern policy (`api/pkg/apis/projectcalico/v3/felixconfig.go` and
//! `felix/config/config_params.go` of Calico). `crate::support` has the state of all other fields.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::fields::{Cidr, ProtocolName, protocol_in_any_case};
use crate::net::Protocol;
use crate::{FieldError, Metadata};

/// The settings of nodes that affect policy. The object `default` applies to all nodes, `node.<name>` to one.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct FelixConfiguration {
    /// Its name.
    pub metadata: Metadata,
    /// The settings.
    #[serde(default)]
    pub spec: FelixConfigurationSpec,
}

/// The settings that Tortie reads.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FelixConfigurationSpec {
    /// Ports of the host that policies of host endpoints never close for incoming packets.
    pub failsafe_inbound_host_ports: Option<Vec<FailsafePort>>,
    /// Remote ports that policies of host endpoints never close for outgoing packets.
    pub failsafe_outbound_host_ports: Option<Vec<FailsafePort>>,
    /// What happens to packets from pods to their own node, after the pod's policy (policy decision 3).
    pub default_endpoint_to_host_action: Option<EndpointToHostAction>,
    /// Whether pods may send VXLAN packets. Otherwise they are dropped, because their content would bypass policy
    /// (policy decision 38).
    #[serde(rename = "allowVXLANPacketsFromWorkloads")]
    pub allow_vxlan_packets_from_workloads: Option<bool>,
    /// Whether pods may send IPIP packets. Otherwise they are dropped.
    #[serde(rename = "allowIPIPPacketsFromWorkloads")]
    pub allow_ipip_packets_from_workloads: Option<bool>,
    /// True if the node has IPIP, if an IPPool uses it. `None` means that it has.
    pub ipip_enabled: Option<bool>,
    /// The MTU of the overlay and of new pods, on Linux; 0 and none mean that of the node's interface less VXLAN's 50 bytes.
    #[serde(rename = "vxlanMTU")]
    pub vxlan_mtu: Option<u32>,
    /// The same for the overlay of IPv6; 0 and none mean that of the node's interface less 70 bytes.
    #[serde(rename = "vxlanMTUV6")]
    pub vxlan_mtu_v6: Option<u32>,
    /// The MTU of the IPIP device, in bytes; 0 for that of the node's interface less 20.
    #[serde(rename = "ipipMTU")]
    pub ipip_mtu: Option<u32>,
    /// The VXLAN network identifier; none means 4096. Windows nodes need at least that.
    #[serde(rename = "vxlanVNI")]
    pub vxlan_vni: Option<u32>,
    /// The UDP port of VXLAN; 0 and none mean 4789. Windows nodes have no other.
    pub vxlan_port: Option<u16>,
    /// Features that are not looked for, as `NAME=true,NAME=false`. Tortie knows [`checksum_offload_broken`](Self::checksum_offload_broken).
    pub feature_detect_override: Option<String>,
    /// What happens to denied packets, on Linux.
    pub nftables_filter_deny_action: Option<FilterDenyAction>,
    /// The older name of the same setting, used if the newer one is absent.
    pub iptables_filter_deny_action: Option<FilterDenyAction>,
    /// Where packets of pods keep the pod's address although their pool has `natOutgoing`.
    pub nat_outgoing_exclusions: Option<NatOutgoingExclusions>,
    /// What happens to packets from pods to the nodes' ports of BGP (policy decision 48). This is not a field of Calico; it comes from
    /// the annotation [`FelixConfiguration::BGP_FROM_PODS`].
    #[serde(skip)]
    pub bgp_from_pods: Option<BgpFromPods>,
    /// The action for packets from other machines with the address of a pod of the node (policy decision 49), from the annotation
    /// [`FelixConfiguration::POD_SOURCES_FROM_OUTSIDE`].
    #[serde(skip)]
    pub pod_sources_from_outside: Option<PodSourcesFromOutside>,
    /// What happens to established flows that a changed policy denies (policy decision 20). This is not a field of
    /// Calico; it comes from the annotation [`FelixConfiguration::ESTABLISHED_FLOWS`].
    #[serde(skip)]
    pub established_flows: Option<EstablishedFlows>,
    /// Whether rules count matching packets, from the annotation [`FelixConfiguration::POLICY_COUNTERS`].
    #[serde(skip)]
    pub policy_counters: Option<PolicyCounters>,
    /// Whether ACLs of Windows nodes name sets of addresses (policy decision 25), from the annotation
    /// [`FelixConfiguration::WINDOWS_POLICY_SETS`].
    #[serde(skip)]
    pub windows_policy_sets: Option<WindowsPolicySets>,
    /// The versions of HNS on which sets are known to work, from the annotation
    /// [`FelixConfiguration::PROVEN_POLICY_SETS`].
    #[serde(skip)]
    pub proven_policy_sets: Option<BTreeSet<(u32, u32)>>,
}

/// What happens to packets from pods to the nodes' ports of BGP, before policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BgpFromPods {
    /// They are dropped: behind natOutgoing, they would come from the address of a node, which is a peer of the others.
    #[default]
    Drop,
    /// Policy decides.
    Allow,
}

/// The action for packets that come from another machine and have the source address of a pod of the node, on Linux.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodSourcesFromOutside {
    /// They are dropped: policy would take their sender for the pod.
    #[default]
    Drop,
    /// Policy decides. Fabrics and load balancers that return a pod's own packets to its node need it.
    Allow,
}

/// What happens to a packet that policy denies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FilterDenyAction {
    /// It is dropped silently.
    #[default]
    #[serde(alias = "DROP")]
    Drop,
    /// Its sender gets a TCP reset, or an ICMP message "prohibited".
    #[serde(alias = "REJECT")]
    Reject,
}

/// Where packets of pods keep the pod's address although their pool has `natOutgoing`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NatOutgoingExclusions {
    /// Inside of all pools.
    #[default]
    #[serde(rename = "IPPoolsOnly")]
    PoolsOnly,
    /// Also at the addresses of nodes.
    #[serde(rename = "IPPoolsAndHostIPs")]
    PoolsAndNodes,
}

/// What happens to established flows that a changed policy denies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EstablishedFlows {
    /// They continue.
    #[default]
    Keep,
    /// They are cut.
    Cut,
}

/// Whether the rules of policies count the packets that they match, on Linux.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyCounters {
    /// They do not, because a counter needs memory for each processor.
    #[default]
    Disabled,
    /// They do, and so does each value of merged rules.
    Enabled,
}

/// Whether ACLs of Windows nodes name sets of addresses (SetPolicy of HNS), or list addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WindowsPolicySets {
    /// They name sets on the proven versions of HNS.
    #[default]
    Auto,
    /// They name sets wherever HNS supports them.
    Enabled,
    /// They do not.
    Disabled,
}

impl FelixConfiguration {
    /// The lowest VXLAN network identifier of HNS (win-overlay of the CNI plugins).
    pub const LOWEST_WINDOWS_VNI: u32 = 4096;
    /// The annotation for BGP from pods to nodes: `Drop` or `Allow`.
    pub const BGP_FROM_PODS: &str = "tortie.io/bgpFromPods";
    /// The annotation for packets from other machines with the address of a pod of the node: `Drop` or `Allow`.
    pub const POD_SOURCES_FROM_OUTSIDE: &str = "tortie.io/podSourcesFromOutside";
    /// The annotation for established flows: `Keep` or `Cut`.
    pub const ESTABLISHED_FLOWS: &str = "tortie.io/establishedFlows";
    /// The annotation for policy counters: `Disabled` or `Enabled`.
    pub const POLICY_COUNTERS: &str = "tortie.io/policyCounters";
    /// The annotation for sets in ACLs of Windows nodes: `Auto`, `Enabled` or `Disabled`.
    pub const WINDOWS_POLICY_SETS: &str = "tortie.io/windowsPolicySets";
    /// The annotation with the versions of HNS on which `Auto` uses sets, as in `13.2,15.4`.
    pub const PROVEN_POLICY_SETS: &str = "tortie.io/provenPolicySets";

    /// Reads the settings in annotations.
    pub(crate) fn read_annotations(&mut self) -> Result<(), FieldError> {
        let bgp = [("Drop", BgpFromPods::Drop), ("Allow", BgpFromPods::Allow)];
        self.spec.bgp_from_pods = self.annotation(Self::BGP_FROM_PODS, bgp)?;
        let outside = [("Drop", PodSourcesFromOutside::Drop), ("Allow", PodSourcesFromOutside::Allow)];
        self.spec.pod_sources_from_outside = self.annotation(Self::POD_SOURCES_FROM_OUTSIDE, outside)?;
        let flows = [("Keep", EstablishedFlows::Keep), ("Cut", EstablishedFlows::Cut)];
        self.spec.established_flows = self.annotation(Self::ESTABLISHED_FLOWS, flows)?;
        let counters = [("Disabled", PolicyCounters::Disabled), ("Enabled", PolicyCounters::Enabled)];
        self.spec.policy_counters = self.annotation(Self::POLICY_COUNTERS, counters)?;
        let sets = [
            ("Auto", WindowsPolicySets::Auto),
            ("Enabled", WindowsPolicySets::Enabled),
            ("Disabled", WindowsPolicySets::Disabled),
        ];
        self.spec.windows_policy_sets = self.annotation(Self::WINDOWS_POLICY_SETS, sets)?;
        self.spec.proven_policy_sets = self.proven_policy_sets()?;
        Ok(())
    }

    /// The value of an annotation, if it exists: one of the given words.
    fn annotation<T, const N: usize>(
        &self,
        name: &str,
        words: [(&str, T); N],
    ) -> Result<Option<T>, FieldError> {
        let Some(text) = self.metadata.annotations.get(name) else { return Ok(None) };
        let known = words.each_ref().map(|(word, _)| *word);
        let found = words.into_iter().find(|(word, _)| word == text);
        found.map(|(_, value)| Some(value)).ok_or_else(|| {
            let path = format!("metadata.annotations.{name}");
            FieldError::new(&path, format!("{text:?} is none of {}", known.join(", ")))
        })
    }

    fn proven_policy_sets(&self) -> Result<Option<BTreeSet<(u32, u32)>>, FieldError> {
        let Some(text) = self.metadata.annotations.get(Self::PROVEN_POLICY_SETS) else { return Ok(None) };
        let version = |part: &str| {
            let (major, minor) = part.trim().split_once('.')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        };
        let versions = text.split(',').filter(|part| !part.trim().is_empty());
        versions.map(version).collect::<Option<_>>().map(Some).ok_or_else(|| {
            let path = format!("metadata.annotations.{}", Self::PROVEN_POLICY_SETS);
            FieldError::new(&path, format!("{text:?} is no list of versions such as 13.2,15.4"))
        })
    }
}

/// What happens to packets from pods to their own node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndpointToHostAction {
    /// They pass, as Kubernetes expects.
    #[default]
    #[serde(alias = "ACCEPT")]
    Accept,
    /// They are dropped.
    #[serde(alias = "DROP")]
    Drop,
    /// The other rules of the node decide.
    #[serde(alias = "RETURN")]
    Return,
}

/// A port that stays open.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailsafePort {
    /// The protocol; Calico's documentation has it in lower case here.
    #[serde(deserialize_with = "protocol_in_any_case")]
    pub protocol: ProtocolName,
    /// The port.
    pub port: u16,
    /// The addresses of the other side; absent means all.
    #[serde(default)]
    pub net: Option<Cidr>,
}

impl FailsafePort {
    /// The default ports into a host: SSH, DHCP, BGP, etcd, Typha, the API server.
    pub const INBOUND: [(Protocol, u16); 9] = [
        (Protocol::TCP, 22),
        (Protocol::UDP, 68),
        (Protocol::TCP, 179),
        (Protocol::TCP, 2379),
        (Protocol::TCP, 2380),
        (Protocol::TCP, 5473),
        (Protocol::TCP, 6443),
        (Protocol::TCP, 6666),
        (Protocol::TCP, 6667),
    ];
    /// The default ports out of a host.
    pub const OUTBOUND: [(Protocol, u16); 9] = [
        (Protocol::UDP, 53),
        (Protocol::UDP, 67),
        (Protocol::TCP, 179),
        (Protocol::TCP, 2379),
        (Protocol::TCP, 2380),
        (Protocol::TCP, 5473),
        (Protocol::TCP, 6443),
        (Protocol::TCP, 6666),
        (Protocol::TCP, 6667),
    ];

    fn all(ports: &[(Protocol, u16)]) -> Vec<Self> {
        let open = |(protocol, port): &(Protocol, u16)| Self {
            protocol: ProtocolName(*protocol),
            port: *port,
            net: None,
        };
        ports.iter().map(open).collect()
    }
}

impl FelixConfigurationSpec {
    /// The MTUs that Linux lets a link have.
    pub const MTUS: RangeInclusive<u32> = 68..=65_535;
    /// Those of a link with IPv6 (RFC 8200, 5).
    pub const MTUS_V6: RangeInclusive<u32> = 1_280..=65_535;
    /// The settings of one node: its own settings (`node.<name>`) take precedence over those of all nodes.
    #[must_use]
    pub fn or(self, all: &Self) -> Self {
        // Exhaustive, so that a new setting does not compile until it is merged.
        let Self {
            failsafe_inbound_host_ports,
            failsafe_outbound_host_ports,
            default_endpoint_to_host_action,
            allow_vxlan_packets_from_workloads,
            allow_ipip_packets_from_workloads,
            ipip_enabled,
            vxlan_mtu,
            vxlan_vni,
            vxlan_port,
            vxlan_mtu_v6,
            ipip_mtu,
            feature_detect_override,
            nftables_filter_deny_action,
            iptables_filter_deny_action,
            nat_outgoing_exclusions,
            bgp_from_pods,
            pod_sources_from_outside,
            established_flows,
            policy_counters,
            windows_policy_sets,
            proven_policy_sets,
        } = all.clone();
        Self {
            failsafe_inbound_host_ports: self.failsafe_inbound_host_ports.or(failsafe_inbound_host_ports),
            failsafe_outbound_host_ports: self.failsafe_outbound_host_ports.or(failsafe_outbound_host_ports),
            default_endpoint_to_host_action: self
                .default_endpoint_to_host_action
                .or(default_endpoint_to_host_action),
            allow_vxlan_packets_from_workloads: self
                .allow_vxlan_packets_from_workloads
                .or(allow_vxlan_packets_from_workloads),
            allow_ipip_packets_from_workloads: self
                .allow_ipip_packets_from_workloads
                .or(allow_ipip_packets_from_workloads),
            ipip_enabled: self.ipip_enabled.or(ipip_enabled),
            vxlan_mtu: self.vxlan_mtu.or(vxlan_mtu),
            vxlan_vni: self.vxlan_vni.or(vxlan_vni),
            vxlan_port: self.vxlan_port.or(vxlan_port),
            vxlan_mtu_v6: self.vxlan_mtu_v6.or(vxlan_mtu_v6),
            ipip_mtu: self.ipip_mtu.or(ipip_mtu),
            feature_detect_override: self.feature_detect_override.or(feature_detect_override),
            nftables_filter_deny_action: self.nftables_filter_deny_action.or(nftables_filter_deny_action),
            iptables_filter_deny_action: self.iptables_filter_deny_action.or(iptables_filter_deny_action),
            nat_outgoing_exclusions: self.nat_outgoing_exclusions.or(nat_outgoing_exclusions),
            bgp_from_pods: self.bgp_from_pods.or(bgp_from_pods),
            pod_sources_from_outside: self.pod_sources_from_outside.or(pod_sources_from_outside),
            established_flows: self.established_flows.or(established_flows),
            policy_counters: self.policy_counters.or(policy_counters),
            windows_policy_sets: self.windows_policy_sets.or(windows_policy_sets),
            proven_policy_sets: self.proven_policy_sets.or(proven_policy_sets),
        }
    }

    /// The UDP port of VXLAN that has been assigned (RFC 7348), and the only one of Windows nodes.
    pub const VXLAN_PORT: u16 = 4789;

    /// Whether checksums in VXLAN must be computed in the kernel, because a network adapter, a hypervisor or a driver damages those that are
    /// left to it (`ChecksumOffloadBroken` in `felix/environment/feature_detect.go`); none if nobody has said that.
    #[must_use]
    pub fn checksum_offload_broken(&self) -> Option<bool> {
        let parts = self.feature_detect_override.as_deref()?.split(',');
        let value = parts
            .filter_map(|part| part.split_once('='))
            .find(|(name, _)| name.trim().eq_ignore_ascii_case("ChecksumOffloadBroken"))?
            .1;
        value.trim().to_lowercase().parse().ok()
    }

    /// The UDP port of VXLAN.
    #[must_use]
    pub fn vxlan_port(&self) -> u16 {
        self.vxlan_port.filter(|port| *port != 0).unwrap_or(Self::VXLAN_PORT)
    }

    /// The UDP ports on which some node may listen for VXLAN, by the cluster's FelixConfigurations with their names. Windows nodes have
    /// [`VXLAN_PORT`](Self::VXLAN_PORT).
    #[must_use]
    pub fn vxlan_ports<'a>(all: impl Iterator<Item = (&'a str, &'a Self)>) -> BTreeSet<u16> {
        let of_nodes = all.filter(|(name, _)| *name == "default" || name.starts_with("node."));
        of_nodes.map(|(_, felix)| felix.vxlan_port()).chain([Self::VXLAN_PORT]).collect()
    }

    /// What happens to denied packets, on Linux.
    #[must_use]
    pub fn deny_action(&self) -> FilterDenyAction {
        self.nftables_filter_deny_action.or(self.iptables_filter_deny_action).unwrap_or_default()
    }

    /// The failsafe ports into a host.
    #[must_use]
    pub fn failsafe_inbound(&self) -> Vec<FailsafePort> {
        self.failsafe_inbound_host_ports.clone().unwrap_or_else(|| FailsafePort::all(&FailsafePort::INBOUND))
    }

    /// The failsafe ports out of a host.
    #[must_use]
    pub fn failsafe_outbound(&self) -> Vec<FailsafePort> {
        self.failsafe_outbound_host_ports
            .clone()
            .unwrap_or_else(|| FailsafePort::all(&FailsafePort::OUTBOUND))
    }
}

//! The operator's settings for a node (FelixConfiguration, IPPools).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tortie_api::calico::{
    BgpConfigurationSpec, BgpFromPods, EndpointToHostAction, EstablishedFlows, FelixConfigurationSpec,
    FilterDenyAction, PodSourcesFromOutside, PolicyCounters, WindowsPolicySets,
};
use tortie_api::net::Protocol;

/// The operator's settings for a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Ports that policies of host endpoints never close for packets into the node (policy decision 16).
    pub failsafe_inbound: Vec<Failsafe>,
    /// Ports that policies of host endpoints never close for packets out of the node.
    pub failsafe_outbound: Vec<Failsafe>,
    /// What happens to packets from pods to their own node, after the pod's policy (policy decision 3). Return equals
    /// Accept if other tables are evaluated in any case.
    pub endpoint_to_host: EndpointToHostAction,
    /// The UDP ports to which pods send no VXLAN packets (policy decision 38): those on which some node listens.
    pub vxlan_ports: BTreeSet<u16>,
    /// Whether pods may send VXLAN packets, which are otherwise dropped before policy (policy decision 38).
    pub vxlan_from_workloads: bool,
    /// Whether pods may send IPIP packets, which are otherwise dropped before policy.
    pub ipip_from_workloads: bool,
    /// The TCP ports on which BGP speakers of nodes listen, to which pods do not connect on nodes (policy decision 48).
    pub bgp_ports: BTreeSet<u16>,
    /// What happens to packets from pods to these ports of nodes, before policy.
    pub bgp_from_pods: BgpFromPods,
    /// The action for packets from other machines with the address of a pod of the node, on Linux (policy decision 49).
    pub pod_sources_from_outside: PodSourcesFromOutside,
    /// The MTU of the overlay and of new pods, in bytes, on Linux; none for that of the node's interface less VXLAN's 50 bytes.
    pub vxlan_mtu: Option<u32>,
    /// The same for the overlay of IPv6; none for that of the node's interface less 70 bytes.
    pub vxlan_mtu_v6: Option<u32>,
    /// The MTU of the IPIP link, in bytes; none for that of the node's interface less 20 bytes.
    pub ipip_mtu: Option<u32>,
    /// Whether the VXLAN links leave checksums to hardware and receivers, on Linux; none leaves the links as they are.
    pub vxlan_checksum_offload: Option<bool>,
    /// What happens to denied packets.
    pub deny: FilterDenyAction,
    /// What happens to established flows that a changed policy denies (policy decision 20).
    pub established_flows: EstablishedFlows,
    /// Whether policy rules count packets.
    pub policy_counters: PolicyCounters,
    /// Whether ACLs of Windows nodes name sets of addresses (policy decision 25).
    pub windows_policy_sets: WindowsPolicySets,
    /// The versions of HNS, major and minor, on which `Auto` uses sets.
    pub proven_policy_sets: BTreeSet<(u32, u32)>,
    /// The pools, and whether packets from each to addresses outside all pools get their node's address.
    pub pools: BTreeMap<IpNet, bool>,
    /// The addresses outside of all pools to which packets keep the pod's address in any case: those of nodes, if an operator says so.
    pub nat_exceptions: BTreeSet<IpAddr>,
}

/// A port that stays open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failsafe {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination port.
    pub port: u16,
    /// The addresses of the other side; absent means all.
    pub net: Option<IpNet>,
}

impl Settings {
    /// The settings from FelixConfiguration and IPPools. The ports of VXLAN are those of this node and of Windows nodes; other nodes may have
    /// more ([`FelixConfigurationSpec::vxlan_ports`]), as they may of BGP ([`BgpConfigurationSpec::listen_ports`]).
    #[must_use]
    pub fn new(felix: &FelixConfigurationSpec, pools: BTreeMap<IpNet, bool>) -> Self {
        let failsafe = |port: &tortie_api::calico::FailsafePort| Failsafe {
            protocol: port.protocol.0,
            port: port.port,
            net: port.net.map(|net| net.0.trunc()),
        };
        // Exhaustive, so that a new setting does not compile until it has an effect here. The failsafe ports, the detection of features and
        // the action for denied packets have methods of their own.
        let FelixConfigurationSpec {
            failsafe_inbound_host_ports: _,
            failsafe_outbound_host_ports: _,
            default_endpoint_to_host_action,
            allow_vxlan_packets_from_workloads,
            allow_ipip_packets_from_workloads,
            vxlan_mtu,
            vxlan_mtu_v6,
            ipip_mtu,
            // It decides about [`LocalIpip`](crate::LocalIpip) and routes.
            ipip_enabled: _,
            // It is part of [`ClusterNetwork`](crate::ClusterNetwork).
            vxlan_vni: _,
            vxlan_port: _,
            feature_detect_override: _,
            nftables_filter_deny_action: _,
            iptables_filter_deny_action: _,
            // It needs the addresses of all nodes.
            nat_outgoing_exclusions: _,
            bgp_from_pods,
            pod_sources_from_outside,
            established_flows,
            policy_counters,
            windows_policy_sets,
            proven_policy_sets,
        } = felix;
        Self {
            failsafe_inbound: felix.failsafe_inbound().iter().map(failsafe).collect(),
            failsafe_outbound: felix.failsafe_outbound().iter().map(failsafe).collect(),
            endpoint_to_host: default_endpoint_to_host_action.unwrap_or_default(),
            vxlan_ports: [felix.vxlan_port(), FelixConfigurationSpec::VXLAN_PORT].into(),
            vxlan_from_workloads: allow_vxlan_packets_from_workloads.unwrap_or_default(),
            ipip_from_workloads: allow_ipip_packets_from_workloads.unwrap_or_default(),
            bgp_ports: [BgpConfigurationSpec::PORT].into(),
            bgp_from_pods: bgp_from_pods.unwrap_or_default(),
            pod_sources_from_outside: pod_sources_from_outside.unwrap_or_default(),
            vxlan_mtu: vxlan_mtu.filter(|mtu| FelixConfigurationSpec::MTUS.contains(mtu)),
            vxlan_mtu_v6: vxlan_mtu_v6.filter(|mtu| FelixConfigurationSpec::MTUS_V6.contains(mtu)),
            ipip_mtu: ipip_mtu.filter(|mtu| FelixConfigurationSpec::MTUS.contains(mtu)),
            vxlan_checksum_offload: felix.checksum_offload_broken().map(|is_broken| !is_broken),
            deny: felix.deny_action(),
            established_flows: established_flows.unwrap_or_default(),
            policy_counters: policy_counters.unwrap_or_default(),
            windows_policy_sets: windows_policy_sets.unwrap_or_default(),
            proven_policy_sets: proven_policy_sets.clone().unwrap_or_default(),
            pools,
            nat_exceptions: BTreeSet::new(),
        }
    }
}

impl Default for Settings {
    /// The defaults.
    fn default() -> Self {
        Self::new(&FelixConfigurationSpec::default(), BTreeMap::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_left_to_others_if_an_operator_says_so() {
        for (text, expected) in [
            (None, None),
            (Some("ChecksumOffloadBroken=true"), Some(false)),
            (Some("SNATFullyRandom=true, ChecksumOffloadBroken=False"), Some(true)),
            (Some("ChecksumOffloadBroken=perhaps"), None),
            (Some("SNATFullyRandom=true"), None),
        ] {
            let feature_detect_override = text.map(str::to_owned);
            let felix =
                FelixConfigurationSpec { feature_detect_override, ..FelixConfigurationSpec::default() };
            let settings = Settings::new(&felix, BTreeMap::new());
            assert_eq!(settings.vxlan_checksum_offload, expected, "{text:?}");
        }
    }

    /// Nodes report them. Otherwise, one typing error would cost all nodes their overlay.
    #[test]
    fn mtus_that_no_link_can_have_have_no_effect() {
        for (stored, expected) in [
            (0, None),
            (67, None),
            (68, Some(68)),
            (1_280, Some(1_280)),
            (65_535, Some(65_535)),
            (65_536, None),
        ] {
            let mtu = Some(stored);
            let felix = FelixConfigurationSpec {
                vxlan_mtu: mtu,
                vxlan_mtu_v6: mtu,
                ipip_mtu: mtu,
                ..FelixConfigurationSpec::default()
            };
            let settings = Settings::new(&felix, BTreeMap::new());
            assert_eq!([settings.vxlan_mtu, settings.ipip_mtu], [expected; 2], "{stored}");
            let of_ipv6 = expected.filter(|mtu| *mtu >= 1_280);
            assert_eq!(settings.vxlan_mtu_v6, of_ipv6, "{stored}");
        }
    }
}

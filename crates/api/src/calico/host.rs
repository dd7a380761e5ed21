//! HostEndpoint: an interface of a node under policy; and what FelixConfiguration says of them
//! (`api/pkg/apis/projectcalico/v3` and `felix/config/config_params.go` of Calico).

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde::Deserialize;

use super::EndpointPort;
use crate::fields::{Cidr, ProtocolName, is_object_name, is_port_name, list, protocol_in_any_case};
use crate::net::Protocol;
use crate::{FieldError, Metadata};

/// An interface of a node.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct HostEndpoint {
    /// Its name and labels.
    pub metadata: Metadata,
    /// Which interface.
    pub spec: HostEndpointSpec,
}

/// Which interface of which node.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostEndpointSpec {
    /// The node.
    pub node: String,
    /// The interface's name; `*` is every interface that is not a pod's and has no host endpoint of its own.
    #[serde(default)]
    pub interface_name: Option<String>,
    /// Addresses of the node: the interface that has one of them is meant where no name is given, and rules find the
    /// host endpoint by them.
    #[serde(default, rename = "expectedIPs", deserialize_with = "list")]
    pub expected_ips: Vec<IpAddr>,
    /// The profiles, in order.
    #[serde(default, deserialize_with = "list")]
    pub profiles: Vec<String>,
    /// Ports that rules may name.
    #[serde(default, deserialize_with = "list")]
    pub ports: Vec<EndpointPort>,
}

impl HostEndpoint {
    /// The profile of automatic host endpoints; it allows everything, whether or not it is stored.
    pub const DEFAULT_ALLOW: &str = "projectcalico-default-allow";

    /// The interface name of a host endpoint of all interfaces.
    pub const ALL_INTERFACES: &str = "*";

    /// Whether it means every interface that is not a pod's and has no host endpoint of its own.
    #[must_use]
    pub fn is_for_all_interfaces(&self) -> bool {
        self.spec.interface_name.as_deref() == Some(Self::ALL_INTERFACES)
    }

    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        let mut wrong = |path: &str, problem: String| problems.push(FieldError::new(path, problem));
        if self.spec.node.is_empty() {
            wrong("spec.node", "is missing".into());
        } else if !is_object_name(&self.spec.node) {
            wrong("spec.node", format!("{:?} is no name of a node", self.spec.node));
        }
        for (index, profile) in self.spec.profiles.iter().enumerate() {
            if !is_object_name(profile) {
                wrong(&format!("spec.profiles[{index}]"), format!("{profile:?} is no name of a profile"));
            }
        }
        let name = self.spec.interface_name.as_deref().unwrap_or_default();
        if name.is_empty() && self.spec.expected_ips.is_empty() {
            wrong("spec", "needs interfaceName or expectedIPs".into());
        }
        // The kernel's limit, IFNAMSIZ.
        if name.len() > 15 {
            wrong("spec.interfaceName", format!("{name:?} is longer than 15 characters"));
        }
        let of_interface = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if name != Self::ALL_INTERFACES && !name.bytes().all(of_interface) {
            wrong("spec.interfaceName", format!("{name:?} is neither an interface's name nor \"*\""));
        }
        for (index, port) in self.spec.ports.iter().enumerate() {
            if !is_port_name(&port.name) {
                wrong(&format!("spec.ports[{index}].name"), format!("{:?} is no name of a port", port.name));
            }
            if Protocol::from_name(&port.protocol).is_none() {
                wrong(
                    &format!("spec.ports[{index}].protocol"),
                    format!("{:?} is no protocol", port.protocol),
                );
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

/// The settings of nodes, as far as they change what policy means: of all in the object `default`, of one in `node.<name>`.
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
    /// Ports of the host that no policy of host endpoints closes for packets into it.
    pub failsafe_inbound_host_ports: Option<Vec<FailsafePort>>,
    /// Ports elsewhere that no policy of host endpoints closes for packets out of the host.
    pub failsafe_outbound_host_ports: Option<Vec<FailsafePort>>,
    /// What becomes of packets from pods to their own node, after the pod's policy (policy decision 3).
    pub default_endpoint_to_host_action: Option<EndpointToHostAction>,
    /// Whether pods may send VXLAN packets, which are dropped otherwise: what is in them would bypass policy (policy
    /// decision 38).
    #[serde(rename = "allowVXLANPacketsFromWorkloads")]
    pub allow_vxlan_packets_from_workloads: Option<bool>,
    /// Whether pods may send IPIP packets, which are dropped otherwise.
    #[serde(rename = "allowIPIPPacketsFromWorkloads")]
    pub allow_ipip_packets_from_workloads: Option<bool>,
    /// What becomes of packets that policy denies, on Linux.
    pub nftables_filter_deny_action: Option<FilterDenyAction>,
    /// The same under its older name, where the newer one is absent.
    pub iptables_filter_deny_action: Option<FilterDenyAction>,
    /// What becomes of established flows that a changed policy denies (policy decision 20). It is no field of Calico's;
    /// the annotation [`FelixConfiguration::ESTABLISHED_FLOWS`] says it.
    #[serde(skip)]
    pub established_flows: Option<EstablishedFlows>,
    /// Whether rules count what they match. As `established_flows`, by the annotation
    /// [`FelixConfiguration::POLICY_COUNTERS`].
    #[serde(skip)]
    pub policy_counters: Option<PolicyCounters>,
    /// Whether ACLs of Windows nodes name sets of addresses (policy decision 25). As `established_flows`, by the
    /// annotation [`FelixConfiguration::WINDOWS_POLICY_SETS`].
    #[serde(skip)]
    pub windows_policy_sets: Option<WindowsPolicySets>,
    /// The versions of HNS on which sets have been seen to do what is asked of them, by the annotation
    /// [`FelixConfiguration::PROVEN_POLICY_SETS`].
    #[serde(skip)]
    pub proven_policy_sets: Option<BTreeSet<(u32, u32)>>,
}

/// What becomes of a packet that policy denies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum FilterDenyAction {
    /// It is dropped, and nobody is told.
    #[default]
    #[serde(alias = "DROP")]
    Drop,
    /// Its sender is told: by a reset for TCP, and that it is prohibited otherwise.
    #[serde(alias = "REJECT")]
    Reject,
}

/// What becomes of established flows that a changed policy denies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum EstablishedFlows {
    /// They go on.
    #[default]
    Keep,
    /// They are cut.
    Cut,
}

/// Whether the rules of policies count the packets that they match, on Linux.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum PolicyCounters {
    /// They do not: a counter takes memory for each processor.
    #[default]
    Disabled,
    /// They do, and so does each value of rules that were folded into one.
    Enabled,
}

/// Whether ACLs of Windows nodes name sets of addresses (SetPolicy of HNS), or spell addresses out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum WindowsPolicySets {
    /// They name sets on the versions of HNS that are proven.
    #[default]
    Auto,
    /// They name sets wherever HNS has such.
    Enabled,
    /// They do not.
    Disabled,
}

impl FelixConfiguration {
    /// The annotation that says what becomes of established flows: `Keep` or `Cut`.
    pub const ESTABLISHED_FLOWS: &str = "tortie.io/establishedFlows";
    /// The annotation that says whether rules count what they match: `Disabled` or `Enabled`.
    pub const POLICY_COUNTERS: &str = "tortie.io/policyCounters";
    /// The annotation that says whether ACLs of Windows nodes name sets: `Auto`, `Enabled` or `Disabled`.
    pub const WINDOWS_POLICY_SETS: &str = "tortie.io/windowsPolicySets";
    /// The annotation that lists the versions of HNS on which `Auto` has ACLs name sets, as in `13.2,15.4`.
    pub const PROVEN_POLICY_SETS: &str = "tortie.io/provenPolicySets";

    /// Takes in what annotations say.
    pub(crate) fn read_annotations(&mut self) -> Result<(), FieldError> {
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

    /// What an annotation says, if it is there: one of some words.
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

/// What becomes of packets from pods to their own node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum EndpointToHostAction {
    /// They pass: what Kubernetes expects.
    #[default]
    #[serde(alias = "ACCEPT")]
    Accept,
    /// They are dropped.
    #[serde(alias = "DROP")]
    Drop,
    /// Whatever else the node has installed decides.
    #[serde(alias = "RETURN")]
    Return,
}

/// A port that stays open.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailsafePort {
    /// The protocol; Calico's documentation writes it in lower case here.
    #[serde(deserialize_with = "protocol_in_any_case")]
    pub protocol: ProtocolName,
    /// The port.
    pub port: u16,
    /// The other side's addresses; absent is all.
    #[serde(default)]
    pub net: Option<Cidr>,
}

impl FailsafePort {
    /// What stays open into a host where nothing else is said: SSH, DHCP, BGP, etcd, Typha, the API server.
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
    /// What stays open out of a host where nothing else is said.
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
    /// What one node has: what is said of it alone (`node.<name>`) goes before what is said of all.
    #[must_use]
    pub fn or(self, all: &Self) -> Self {
        let all = all.clone();
        Self {
            failsafe_inbound_host_ports: self.failsafe_inbound_host_ports.or(all.failsafe_inbound_host_ports),
            failsafe_outbound_host_ports: self
                .failsafe_outbound_host_ports
                .or(all.failsafe_outbound_host_ports),
            default_endpoint_to_host_action: self
                .default_endpoint_to_host_action
                .or(all.default_endpoint_to_host_action),
            allow_vxlan_packets_from_workloads: self
                .allow_vxlan_packets_from_workloads
                .or(all.allow_vxlan_packets_from_workloads),
            allow_ipip_packets_from_workloads: self
                .allow_ipip_packets_from_workloads
                .or(all.allow_ipip_packets_from_workloads),
            nftables_filter_deny_action: self.nftables_filter_deny_action.or(all.nftables_filter_deny_action),
            iptables_filter_deny_action: self.iptables_filter_deny_action.or(all.iptables_filter_deny_action),
            established_flows: self.established_flows.or(all.established_flows),
            policy_counters: self.policy_counters.or(all.policy_counters),
            windows_policy_sets: self.windows_policy_sets.or(all.windows_policy_sets),
            proven_policy_sets: self.proven_policy_sets.clone().or_else(|| all.proven_policy_sets.clone()),
        }
    }

    /// What becomes of packets that policy denies, on Linux.
    #[must_use]
    pub fn deny_action(&self) -> FilterDenyAction {
        self.nftables_filter_deny_action.or(self.iptables_filter_deny_action).unwrap_or_default()
    }

    /// The ports that stay open into a host.
    #[must_use]
    pub fn failsafe_inbound(&self) -> Vec<FailsafePort> {
        self.failsafe_inbound_host_ports.clone().unwrap_or_else(|| FailsafePort::all(&FailsafePort::INBOUND))
    }

    /// The ports that stay open out of a host.
    #[must_use]
    pub fn failsafe_outbound(&self) -> Vec<FailsafePort> {
        self.failsafe_outbound_host_ports
            .clone()
            .unwrap_or_else(|| FailsafePort::all(&FailsafePort::OUTBOUND))
    }
}

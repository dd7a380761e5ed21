//! Policies of networks, subnets and endpoints (hcsshim `hcn/hcnpolicy.go`).

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::wire_enum::wire_enum;
use super::{DocumentError, Extra, Strict, document_error, join, strict_members};

/// A policy in a document: a type, and settings of that type.
///
/// The settings stay as they were read, because a removal must contain the complete policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Policy {
    /// The type. HNS accepts it in any case.
    pub r#type: String,
    /// The settings; `{}` if the type has none.
    #[serde(default)]
    pub settings: Value,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl Policy {
    /// The policy with these settings.
    pub fn of<T: PolicySettings>(settings: &T) -> Policy {
        // Settings are plain structures of strings and numbers, so they always have a JSON form.
        let settings = serde_json::to_value(settings).unwrap_or_default();
        Policy { r#type: T::TYPE.to_owned(), settings, extra: Extra::new() }
    }

    /// Whether it has the type of `T`.
    pub fn is<T: PolicySettings>(&self) -> bool {
        self.r#type.eq_ignore_ascii_case(T::TYPE)
    }

    /// Its settings, if it has the type of `T`.
    ///
    /// # Errors
    /// The settings do not fit the type.
    pub fn settings<T: PolicySettings>(&self) -> Result<Option<T>, DocumentError> {
        if !self.is::<T>() {
            return Ok(None);
        }
        let read = serde_path_to_error::deserialize(&self.settings).map_err(document_error);
        read.map(Some).map_err(|error| DocumentError { at: join("Settings", &error.at), ..error })
    }
}

/// The settings of one policy type.
pub trait PolicySettings: Serialize + DeserializeOwned {
    /// The type's name in a document.
    const TYPE: &'static str;
}

/// Connects settings with the names of their types, and checks each strictly.
macro_rules! policy_types {
    ($($settings:ty = $name:literal,)*) => {
        $(impl PolicySettings for $settings { const TYPE: &'static str = $name; })*

        impl Strict for Policy {
            fn check(&self, at: &str) -> Result<(), DocumentError> {
                self.extra.check(at)?;
                $(if let Some(settings) = self.settings::<$settings>().map_err(|error| DocumentError {
                    at: join(at, &error.at), ..error
                })? {
                    return settings.check(&join(at, "Settings"));
                })*
                let what = format!("{:?} is not a policy type that is known here", self.r#type);
                Err(DocumentError { at: join(at, "Type"), what })
            }
        }
    };
}

policy_types! {
    Acl = "ACL",
    OutBoundNat = "OutBoundNAT",
    SdnRoute = "SDNRoute",
    PortMapping = "PortMapping",
    ProviderAddress = "ProviderAddress",
    RemoteSubnetRoute = "RemoteSubnetRoute",
    HostRoute = "HostRoute",
    DrMacAddress = "DrMacAddress",
    SourceMacAddress = "SourceMacAddress",
    NetAdapterName = "NetAdapterName",
    AutomaticDns = "AutomaticDNS",
    Vsid = "VSID",
    Vlan = "VLAN",
    VxlanPort = "VxlanPort",
    SetPolicy = "SetPolicy",
    InterfaceParameters = "InterfaceParameters",
    EncapOverhead = "EncapOverhead",
    Qos = "QOS",
}

wire_enum! {
    /// What an ACL does with a matching packet.
    AclAction {
        /// Lets it pass.
        Allow = 0 "Allow",
        /// Drops it.
        Block = 1 "Block",
        /// Continues with the next tier; only in a TierAcl.
        Pass = 2 "Pass",
    }
}

wire_enum! {
    /// The direction of an ACL, seen from the endpoint.
    AclDirection {
        /// To the endpoint.
        In = 0 "In",
        /// From the endpoint.
        Out = 1 "Out",
    }
}

wire_enum! {
    /// Where an ACL is applied.
    AclRuleType {
        /// Windows Filtering Platform.
        Host = 0 "Host",
        /// VFP, at the switch's port.
        Switch = 1 "Switch",
    }
}

/// Access control: one rule. A lower priority number is evaluated earlier. Lists are separated by commas without
/// spaces; an empty string means "any".
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Acl {
    /// A name for the rule. Not unique.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// A protocol number; empty or "256": any.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub protocols: String,
    /// Allow or block.
    #[serde(default = "allow")]
    pub action: AclAction,
    /// In or out.
    #[serde(default = "inbound")]
    pub direction: AclDirection,
    /// Addresses of the endpoint: addresses and CIDRs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub local_addresses: String,
    /// Addresses of the peer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remote_addresses: String,
    /// Ports of the endpoint: `80`, `8000-8080`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub local_ports: String,
    /// Ports of the peer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remote_ports: String,
    /// Switch or host.
    #[serde(default = "host")]
    pub rule_type: AclRuleType,
    /// 1 to 65,500; absent for RuleType Host.
    #[serde(default, skip_serializing_if = "is_zero_u16")]
    pub priority: u16,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// The action that HNS means if it omits it.
fn allow() -> AclAction {
    AclAction::Allow
}

fn inbound() -> AclDirection {
    AclDirection::In
}

fn host() -> AclRuleType {
    AclRuleType::Host
}

fn ip_set() -> SetPolicyType {
    SetPolicyType::IpSet
}

fn is_zero_u16(number: &u16) -> bool {
    *number == 0
}

/// Defines settings whose members may all be absent, and are omitted when empty.
macro_rules! settings {
    ($($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $member:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(rename_all = "PascalCase", default)]
        pub struct $name {
            $($(#[$doc])* #[serde(skip_serializing_if = "is_empty")] pub $member: $type,)*
            /// Unknown members.
            #[serde(flatten)]
            pub extra: Extra,
        }
        strict_members! { $name {} }
    )*};
}

fn is_empty<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

settings! {
    /// Translates traffic to destinations outside the exceptions to the node's address.
    OutBoundNat {
        /// The address to use instead of the node's.
        #[serde(rename = "VirtualIP")]
        virtual_ip: String,
        /// CIDRs that are not translated.
        exceptions: Vec<String>,
        /// Only these destinations are translated.
        destinations: Vec<String>,
        /// 2: IPv6.
        flags: u32,
        /// The maximum number of ports that the endpoint may use.
        max_port_pool_usage: u32,
    }

    /// A route of the endpoint's port.
    SdnRoute {
        /// The destination's CIDR.
        destination_prefix: String,
        /// The next hop's address.
        next_hop: String,
        /// Sends packets to the host's VFP, so that its rules apply.
        need_encap: bool,
        /// Applies to later endpoints, too.
        automatic_endpoint_monitor: bool,
    }

    /// A port of the node that is forwarded to the endpoint.
    PortMapping {
        /// The protocol's number.
        protocol: u32,
        /// The endpoint's port.
        internal_port: u16,
        /// The node's port.
        external_port: u16,
        /// The address that is mapped; empty: the node's.
        #[serde(rename = "VIP")]
        vip: String,
        /// 1: also from the node itself.
        flags: u32,
    }

    /// On an endpoint: the address of its node. On a network, when read: the node's management address.
    ProviderAddress {
        /// An address in the underlay.
        provider_address: String,
    }

    /// A route of an overlay network to a subnet on another node.
    RemoteSubnetRoute {
        /// The subnet's CIDR.
        destination_prefix: String,
        /// The VNI.
        isolation_id: u32,
        /// The other node's address in the underlay.
        provider_address: String,
        /// The MAC address of the other node's tunnel end, with dashes: the inner destination.
        distributed_router_mac_address: String,
    }

    /// Lets the node itself reach the network's endpoints. The settings are `{}`.
    HostRoute {}

    /// The MAC address of this node's tunnel end; HNS assigns it to an overlay network.
    DrMacAddress {
        /// With dashes.
        address: String,
    }

    /// The source MAC address of an L2Bridge network.
    SourceMacAddress {
        /// With dashes.
        source_mac_address: String,
    }

    /// The adapter of the network's switch.
    NetAdapterName {
        /// The adapter's name.
        network_adapter_name: String,
    }

    /// Whether the node's DNS configuration is used.
    AutomaticDns {
        /// Whether it is used.
        enable: bool,
    }

    /// The VNI of a subnet of an overlay network; 4096 or more.
    Vsid {
        /// The VNI.
        isolation_id: u32,
    }

    /// The VLAN of a subnet.
    Vlan {
        /// The VLAN.
        isolation_id: u32,
    }

    /// The UDP port of an overlay network.
    VxlanPort {
        /// The port.
        port: u16,
    }

    /// Properties of the endpoint's interface; allowed once.
    InterfaceParameters {
        /// The MTU in bytes.
        mtu: u32,
    }

    /// Room for encapsulation: reduces the endpoint's MTU.
    EncapOverhead {
        /// In bytes.
        overhead: u16,
    }

    /// A limit on the traffic that leaves the endpoint.
    Qos {
        /// In bytes per second.
        maximum_outgoing_bandwidth_in_bytes: u64,
    }
}

wire_enum! {
    /// The kind of a set's values.
    SetPolicyType {
        /// Addresses and CIDRs.
        IpSet = 0 "IPSET",
        /// Identifiers of sets of addresses.
        NestedIpSet = 1 "NESTEDIPSET",
    }
}

/// A set that ACLs of the network's endpoints can name by its identifier (HNS 13.0 and later).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SetPolicy {
    /// Its identifier.
    pub id: String,
    /// A name for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The kind of its values.
    #[serde(default = "ip_set")]
    pub policy_type: SetPolicyType,
    /// The values, separated by commas.
    #[serde(default)]
    pub values: String,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

strict_members! {
    Acl { action = "Action", direction = "Direction", rule_type = "RuleType" }
    SetPolicy { policy_type = "PolicyType" }
}

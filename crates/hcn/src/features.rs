//! Which version of HNS has which feature (hcsshim `hcn/hcnglobals.go`).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The version of HNS, as in `GET /globals/version`. It decides which features exist; the schema version does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Version {
    /// The major version: 9 is Windows Server 2019, 13 is Windows Server 2022, 15 is later.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
}

impl Version {
    /// `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Version {
        Version { major, minor }
    }

    /// Whether a service of this version has the feature.
    pub fn supports(self, feature: Feature) -> bool {
        feature.ranges().iter().any(|(first, last)| (*first..=*last).contains(&self))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A feature that not every HNS has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Comma-separated lists of addresses in an ACL.
    AclAddressLists,
    /// Comma-separated lists and ranges of ports in an ACL.
    AclPortRanges,
    /// ACLs of RuleType Host carry no priority.
    AclNoHostRulePriority,
    /// ACLs have an identifier.
    AclRuleId,
    /// The v2 API.
    ApiV2,
    /// RemoteSubnetRoute policies: routes of an overlay to other nodes.
    RemoteSubnet,
    /// HostRoute policies: a node reaches its own pods on an overlay.
    HostRoute,
    /// Load balancers with direct server return.
    Dsr,
    /// Endpoints with a prefix length of 32.
    Slash32EndpointPrefixes,
    /// Protocol 252 in an ACL.
    AclSupportForProtocol252,
    /// Load balancers that keep a client on one backend.
    SessionAffinity,
    /// IPv4 and IPv6 on one endpoint.
    Ipv6DualStack,
    /// Networks with several subnets, which can be added and removed (Windows Server 2022 and later).
    SeveralSubnets,
    /// Sets of addresses that ACLs refer to.
    SetPolicy,
    /// A configurable VXLAN port.
    VxlanPort,
    /// L4 proxies in VFP.
    L4Proxy,
    /// L4 proxies in WFP.
    L4WfpProxy,
    /// ACLs in tiers.
    TierAcl,
    /// ACLs on a network.
    NetworkAcl,
    /// Sets of sets.
    NestedIpSet,
    /// Networks without a port to the host.
    DisableHostPort,
    /// Load balancers that can be changed in place.
    ModifyLoadBalancer,
    /// Accelerated networking.
    AccelNet,
}

const MAX: u32 = u32::MAX;

const fn line(major: u32, minor: u32) -> (Version, Version) {
    (Version::new(major, minor), Version::new(major, MAX))
}

const fn from(major: u32, minor: u32) -> (Version, Version) {
    (Version::new(major, minor), Version::new(MAX, MAX))
}

impl Feature {
    /// The inclusive ranges of versions with the feature. Several ranges: it was backported to older versions.
    fn ranges(self) -> &'static [(Version, Version)] {
        match self {
            Feature::AclAddressLists
            | Feature::AclPortRanges
            | Feature::AclNoHostRulePriority
            | Feature::AclRuleId => const { &[from(7, 2)] },
            Feature::ApiV2 | Feature::RemoteSubnet | Feature::HostRoute => const { &[from(9, 2)] },
            Feature::Dsr => const { &[line(9, 3), from(10, 2)] },
            Feature::Slash32EndpointPrefixes => const { &[line(9, 3), from(10, 4)] },
            Feature::AclSupportForProtocol252 => const { &[from(11, 0)] },
            Feature::SessionAffinity => const { &[from(12, 0)] },
            Feature::Ipv6DualStack => const { &[from(11, 10)] },
            Feature::SeveralSubnets | Feature::SetPolicy => const { &[from(13, 0)] },
            Feature::VxlanPort => const { &[from(10, 3)] },
            Feature::L4Proxy => const { &[line(9, 5), line(10, 5), line(11, 11), line(12, 1), from(13, 1)] },
            Feature::L4WfpProxy => const { &[from(13, 2)] },
            Feature::TierAcl => const { &[from(14, 0)] },
            Feature::NetworkAcl | Feature::NestedIpSet => const { &[from(15, 0)] },
            Feature::DisableHostPort => const { &[from(15, 1)] },
            Feature::ModifyLoadBalancer | Feature::AccelNet => const { &[from(15, 4)] },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_versions() {
        use Feature::*;
        // (feature, major, minor, whether it exists): the test vectors of hcsshim, and both sides of every other
        // bound.
        let cases = [
            (AclAddressLists, 7, 0, false),
            (AclAddressLists, 7, 1, false),
            (AclPortRanges, 7, 2, true),
            (AclRuleId, 8, 0, true),
            (AclNoHostRulePriority, 255, 0, true),
            (Slash32EndpointPrefixes, 9, 2, false),
            (Slash32EndpointPrefixes, 9, 3, true),
            (Slash32EndpointPrefixes, 9, 372, true),
            (Slash32EndpointPrefixes, 10, 0, false),
            (Slash32EndpointPrefixes, 10, 3, false),
            (Slash32EndpointPrefixes, 10, 4, true),
            (Dsr, 9, 2, false),
            (Dsr, 10, 1, false),
            (Dsr, 10, 2, true),
            (ApiV2, 9, 1, false),
            (RemoteSubnet, 9, 2, true),
            (HostRoute, 9, 2, true),
            (AclSupportForProtocol252, 10, 99, false),
            (AclSupportForProtocol252, 11, 0, true),
            (Ipv6DualStack, 11, 9, false),
            (Ipv6DualStack, 12, 0, true),
            (SessionAffinity, 11, 99, false),
            (SeveralSubnets, 12, 99, false),
            (SeveralSubnets, 13, 2, true),
            (SetPolicy, 12, 99, false),
            (SetPolicy, 13, 0, true),
            (VxlanPort, 10, 2, false),
            (L4Proxy, 9, 5, true),
            (L4Proxy, 10, 4, false),
            (L4Proxy, 11, 10, false),
            (L4Proxy, 12, 1, true),
            (L4Proxy, 13, 0, false),
            (L4Proxy, 13, 1, true),
            (L4WfpProxy, 13, 1, false),
            (TierAcl, 13, 99, false),
            (NetworkAcl, 15, 0, true),
            (NestedIpSet, 14, 9, false),
            (DisableHostPort, 15, 0, false),
            (ModifyLoadBalancer, 15, 3, false),
            (AccelNet, 15, 4, true),
        ];
        for (feature, major, minor, has) in cases {
            assert_eq!(Version::new(major, minor).supports(feature), has, "{feature:?} in {major}.{minor}");
        }
    }
}

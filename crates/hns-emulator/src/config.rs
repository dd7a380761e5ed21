//! Options of the emulated HNS.
//!
//! Where sources are silent or conflict about the behaviour of HNS, there is an option here, and clients must be
//! correct with every value. A preset ([`Config::new`]) is a choice among guesses and nothing more.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

pub use tortie_hcn::selftest::{
    AclRemoval, DefaultAction, EgressSees, EqualPriority, OnRewrite, SetReading, SeveralSets, UpdateReplaces,
};
use tortie_hcn::{Feature, Version};

/// Limits of HNS. Anything beyond is rejected with HCN_E_INVALID_POLICY (docs/hns.md, Calls). No source names an
/// error code or says that there is a limit, so limits without any advice in the sources are off by default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Entries in one field of an ACL: addresses, prefixes, sets, ports, ranges. A strict emulator rejects more;
    /// otherwise it accepts them, as HNS does. 4,000 is Microsoft's advice to Calico (docs/hns.md, ACLs).
    pub field_entries: Option<usize>,
    /// Members of one set.
    pub set_members: Option<usize>,
    /// ACLs of one endpoint.
    pub endpoint_acls: Option<usize>,
    /// Policies in one request that modifies an endpoint. azure-npm sends at most 30.
    pub modify_policies: Option<usize>,
    /// Priorities of ACLs of RuleType Switch. 65,500 is the largest that works (docs/hns.md, ACLs).
    pub priorities: RangeInclusive<u16>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            field_entries: Some(4000),
            set_members: None,
            endpoint_acls: None,
            modify_policies: None,
            priorities: 1..=65_500,
        }
    }
}

/// The configuration of the emulated HNS and of its node.
#[derive(Debug, Clone)]
pub struct Config {
    /// The version. It decides which features exist, and which forms lists in an ACL may have.
    pub version: Version,
    /// The node's address on the underlay, which an overlay network returns as its ProviderAddress.
    pub provider_address: Ipv4Addr,
    /// What happens at the switch to a packet that no ACL matches.
    pub switch_default: DefaultAction,
    /// The same in the node's firewall (ACLs of RuleType Host), if it is involved.
    pub host_default: Option<DefaultAction>,
    /// Which action wins at equal priority.
    pub equal_priority: EqualPriority,
    /// What a set in an ACL means.
    pub set_reading: SetReading,
    /// How several sets in one field combine.
    pub several_sets: SeveralSets,
    /// Which destination of a packet to a Service the ACLs see.
    pub egress_sees: EgressSees,
    /// Whether an ICMP error that belongs to an established flow passes without evaluation of the ACLs.
    pub related_icmp_passes: bool,
    /// What writing ACLs does to established flows.
    pub on_rewrite: OnRewrite,
    /// What a request to remove ACLs does.
    pub acl_removal: AclRemoval,
    /// Which policies an Update replaces.
    pub update_replaces: UpdateReplaces,
    /// The limits.
    pub limits: Limits,
    /// Whether packets from a tunnel are dropped if their inner source is this node, or is in its own subnet and no
    /// other node has a longer route to it. Nothing else prevents a node from sending with the addresses of another
    /// node's pods.
    pub check_tunnel_sources: bool,
    /// Whether unknown members and values are rejected. HNS itself ignores them.
    pub strict: bool,
    /// Whether a version that has no sets of sets by hcsshim's table has them all the same: azure-npm sends them to Server 2022.
    pub early_nested_sets: bool,
    /// Whether a network with endpoints can be deleted, and they with it, as hcsshim's tests do.
    pub deletes_used_networks: bool,
    /// Whether a local and a remote endpoint can have one address. kube-proxy names Server 2019 and 2022.
    pub accepts_taken_addresses: bool,
    /// Whether members of policies with a zero value, such as `Action` of an ACL that allows, are returned. azure-npm sends back what
    /// it has read, and relies on them.
    pub returns_zeroes: bool,
}

impl Config {
    /// Windows Server 2019. It has no sets.
    pub const SERVER_2019: Version = Version::new(9, 3);
    /// Windows Server 2022. It has sets, but no sets of sets.
    pub const SERVER_2022: Version = Version::new(13, 2);
    /// The newest version that clients ask for. Windows Server 2025 is assumed to have it.
    pub const NEWEST: Version = Version::new(15, 4);

    /// A strict HNS of that version. Only the features by version and the highest priority come from documents and
    /// sources. The rest are guesses:
    /// - Any ACL closes both directions: reported for 2019 and 2022, called "by design" for 2025 (docs/hns.md, ACLs).
    ///   The firewall does the same, which is the stricter assumption.
    /// - Equal priorities: Block wins, as in the Windows firewall.
    /// - Sets: before 15.0 as azure-npm uses them on Server 2022 (Flow, intersection). From 15.0 on the opposite
    ///   (Endpoint, union), without any evidence, so that the presets cover both.
    /// - ACLs see the backend: Calico's policies name pods and not Services, and work with DSR.
    /// - Every write resets: users report it, and Calico skips writes without changes for this reason.
    /// - Remove works and Update replaces everything: a client that relies on neither is correct in any case.
    pub fn new(version: Version, provider_address: Ipv4Addr) -> Config {
        let newest = version.supports(Feature::NestedIpSet);
        Config {
            version,
            provider_address,
            switch_default: DefaultAction::DenyBoth,
            host_default: Some(DefaultAction::DenyBoth),
            equal_priority: EqualPriority::BlockWins,
            set_reading: if newest { SetReading::Endpoint } else { SetReading::Flow },
            several_sets: if newest { SeveralSets::Union } else { SeveralSets::Intersection },
            egress_sees: EgressSees::Backend,
            related_icmp_passes: true,
            on_rewrite: OnRewrite::ResetOnAnyChange,
            acl_removal: AclRemoval::Works,
            update_replaces: UpdateReplaces::All,
            limits: Limits::default(),
            check_tunnel_sources: true,
            strict: true,
            early_nested_sets: false,
            deletes_used_networks: false,
            accepts_taken_addresses: !newest,
            returns_zeroes: false,
        }
    }

    /// An HNS for clients that are not Tortie: it accepts what HNS accepts, also documents of the old shape (v1), and deletes
    /// networks with their endpoints. An Update replaces policies of its types, as Calico's CNI plugin relies on, and ACLs in any case, as
    /// azure-npm does. Sets of sets exist wherever sets do.
    pub fn as_hns(version: Version, provider_address: Ipv4Addr) -> Config {
        Config {
            update_replaces: UpdateReplaces::AclsAndSameType,
            strict: false,
            early_nested_sets: version.supports(Feature::SetPolicy)
                && !version.supports(Feature::NestedIpSet),
            deletes_used_networks: true,
            returns_zeroes: true,
            ..Config::new(version, provider_address)
        }
    }
}

//! Which HNS is emulated.
//!
//! Where sources are silent or conflict about what HNS does, there is a knob here, and clients have to be right in all
//! its positions. A preset ([`Config::new`]) is a choice among guesses, and no more than that.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

use tortie_hcn::{Feature, Version};

/// What becomes of a packet that no ACL matches, once there is one. Microsoft says "denied", builds differ
/// (docs/hns.md, ACLs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DefaultAction {
    /// An ACL of any direction closes both directions.
    DenyBoth,
    /// An ACL closes its own direction.
    DenySameDirection,
    /// Nothing is closed.
    Allow,
}

/// What the identifier of a set means in LocalAddresses and RemoteAddresses. Addresses there keep their meaning: local
/// is the endpoint, remote its peer. Ports do, too, in both readings (docs/hns.md, ACLs: the statements about sets
/// conflict).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SetReading {
    /// The same as an address would: local is the endpoint, remote its peer, both ways.
    Endpoint,
    /// Local is the packet's source, remote its destination, both ways. So azure-npm writes them.
    Flow,
}

/// Whom several sets in one field stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SeveralSets {
    /// Those who are in any of them.
    Union,
    /// Those who are in all of them. So azure-npm writes them.
    Intersection,
}

/// Which of two matching ACLs of equal priority and different action wins. It is nowhere said (docs/hns.md, ACLs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EqualPriority {
    /// Block.
    BlockWins,
    /// Allow.
    AllowWins,
}

/// What the ACLs of the sender see as the destination of a packet to a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EgressSees {
    /// The Service's address and port.
    Vip,
    /// Those of the backend.
    Backend,
}

/// What a write of an endpoint's ACLs does to its established flows. A flow that is reset is over: of TCP, both ends are
/// sent a RST; flows of other protocols are forgotten, and their next packet is judged anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnRewrite {
    /// They go on.
    Keep,
    /// Every request that writes ACLs resets them, also one that writes what is there already. So users report.
    ResetOnAnyChange,
    /// A request that removes or replaces ACLs resets them; one that only adds does not.
    ResetOnRemoveOrUpdate,
}

/// What becomes of a request to remove ACLs from an endpoint. azure-npm takes Remove for faulty (docs/hns.md, Changes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AclRemoval {
    /// They go.
    Works,
    /// It is refused with HCN_E_REQUEST_UNSUPPORTED (docs/hns.md, Calls).
    RefusedAlways,
    /// It is answered as a success, and they stay.
    IgnoredSilently,
}

/// Which policies of an endpoint an Update takes the place of (docs/hns.md, Changes: "those given by type and possibly
/// all").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpdateReplaces {
    /// All of them.
    All,
    /// Those of the types that the request has.
    SameType,
}

/// What HNS takes at most. Everything beyond is refused with HCN_E_INVALID_POLICY (docs/hns.md, Calls); no source tells
/// a code, nor that there is a limit, so that those without advice have none by default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Entries in one field of an ACL: addresses, prefixes, sets, ports, ranges. A strict HNS refuses more; another one
    /// takes them, as HNS does: 4,000 is what Microsoft advised Calico (docs/hns.md, ACLs).
    pub field_entries: Option<usize>,
    /// Members of one set.
    pub set_members: Option<usize>,
    /// ACLs of one endpoint.
    pub endpoint_acls: Option<usize>,
    /// Policies in one request that modifies an endpoint. azure-npm sends 30 by its own choice.
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

/// Which HNS is emulated, and on which node.
#[derive(Debug, Clone)]
pub struct Config {
    /// The version, which decides about the features, also about the forms that lists in an ACL may have.
    pub version: Version,
    /// The node's address on the underlay: what an overlay network answers as its ProviderAddress.
    pub provider_address: Ipv4Addr,
    /// What becomes of a packet that no ACL matches, at the switch.
    pub switch_default: DefaultAction,
    /// The same in the node's firewall (ACLs of RuleType Host), if it takes part at all.
    pub host_default: Option<DefaultAction>,
    /// Who wins between equals.
    pub equal_priority: EqualPriority,
    /// What a set in an ACL means.
    pub set_reading: SetReading,
    /// What several sets in one field mean.
    pub several_sets: SeveralSets,
    /// What the ACLs see of a packet to a Service.
    pub egress_sees: EgressSees,
    /// Whether an ICMP error about an established flow passes without asking the ACLs.
    pub related_icmp_passes: bool,
    /// What a write of ACLs does to established flows.
    pub on_rewrite: OnRewrite,
    /// Whether ACLs can be removed.
    pub acl_removal: AclRemoval,
    /// What an Update takes the place of.
    pub update_replaces: UpdateReplaces,
    /// What is too much.
    pub limits: Limits,
    /// Whether packets from a tunnel are dropped if their inner source is this node or in its own subnet, where no other
    /// node has it by a longer route. Nothing else stands in the way of a node that sends in the name of another's pods.
    pub check_tunnel_sources: bool,
    /// Whether members and values that are not known are refused. HNS itself ignores them.
    pub strict: bool,
}

impl Config {
    /// Windows Server 2019. It has no sets.
    pub const SERVER_2019: Version = Version::new(9, 3);
    /// Windows Server 2022. It has sets, but no sets of sets.
    pub const SERVER_2022: Version = Version::new(13, 2);
    /// The newest that clients ask for; Windows Server 2025 is taken to be of that line.
    pub const NEWEST: Version = Version::new(15, 4);

    /// A strict HNS of that version. Of this only the features by version and the highest priority are from documents
    /// and sources; the rest are guesses:
    /// - Any ACL closes both directions: reported of 2019 and 2022, called "by design" of 2025 (docs/hns.md, ACLs). The
    ///   firewall does the same, because that is the stricter assumption.
    /// - Equal priorities: Block wins, as in the Windows firewall.
    /// - Sets: before 15.0 as azure-npm uses them on Server 2022 (Flow, intersection). From 15.0 on the opposite
    ///   (Endpoint, union), for which there is no evidence at all; it is so that the presets have both.
    /// - ACLs see the backend: Calico's policy names pods and not Services, and works with DSR.
    /// - Every write resets: users report it, and Calico skips equal writes because of it.
    /// - Remove works and Update replaces everything: a client that relies on neither is right anyway.
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
        }
    }
}

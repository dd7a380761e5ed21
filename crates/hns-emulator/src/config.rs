//! Which HNS is emulated.

use std::net::Ipv4Addr;

use tortie_hcn::Version;

/// What becomes of a packet that no ACL matches, once there is one. Microsoft says "denied", builds differ (hns.md 4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultAction {
    /// An ACL of any direction closes both directions.
    DenyBoth,
    /// An ACL closes its own direction.
    DenySameDirection,
    /// Nothing is closed.
    Allow,
}

/// Which HNS is emulated, and on which node.
#[derive(Debug, Clone)]
pub struct Config {
    /// The version, which decides about the features.
    pub version: Version,
    /// The node's address on the underlay: what an overlay network answers as its ProviderAddress.
    pub provider_address: Ipv4Addr,
    /// What becomes of a packet that no ACL matches, at the switch.
    pub switch_default: DefaultAction,
    /// The same in the node's firewall (ACLs of RuleType Host), if it takes part at all.
    pub host_default: Option<DefaultAction>,
    /// Whether packets from a tunnel are dropped if their inner source is this node or in its own subnet, where no other
    /// node has it by a longer route. Nothing else stands in the way of a node that sends in the name of another's pods.
    pub check_tunnel_sources: bool,
    /// Whether members and values that are not known are refused. HNS itself ignores them.
    pub strict: bool,
}

impl Config {
    /// Windows Server 2019.
    pub const SERVER_2019: Version = Version::new(9, 3);
    /// Windows Server 2022.
    pub const SERVER_2022: Version = Version::new(13, 2);
    /// The newest that clients ask for.
    pub const NEWEST: Version = Version::new(15, 4);

    /// A strict HNS of that version that denies what no ACL allows.
    pub fn new(version: Version, provider_address: Ipv4Addr) -> Config {
        Config {
            version,
            provider_address,
            switch_default: DefaultAction::DenyBoth,
            host_default: Some(DefaultAction::DenyBoth),
            check_tunnel_sources: true,
            strict: true,
        }
    }
}

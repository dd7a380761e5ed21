//! The firewall of a Windows machine: its rules for packets to the machine itself.
//!
//! Source: the interfaces `INetFwPolicy2`, `INetFwRules` and `INetFwRule` of Microsoft's Windows Firewall with Advanced Security
//! (`netfw.h`). Texts are as they take and return them.

use crate::HResult;

/// A rule. Members that a rule may leave open are empty then.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FirewallRule {
    /// Its name. Several rules may have one name.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// Whether it is in force.
    pub is_enabled: bool,
    /// Whether it is about packets to the machine, and not from it.
    pub is_inbound: bool,
    /// Whether it allows, and does not block.
    pub allows: bool,
    /// The number of the protocol; 256 is any.
    pub protocol: i32,
    /// `*`, or ports and ranges with commas between: `4789,5000-5010`.
    pub local_ports: String,
    /// The same of the other side.
    pub remote_ports: String,
    /// `*`, or addresses, networks (`10.0.0.0/8`, `10.0.0.0/255.0.0.0`), ranges (`10.0.0.1-10.0.0.9`) and words (`LocalSubnet`).
    pub local_addresses: String,
    /// The same of the other side.
    pub remote_addresses: String,
    /// The path of the only program that it is about.
    pub application: String,
    /// The only service that it is about.
    pub service: String,
    /// The types of adapter that it is about: `All`, or words such as `Wireless`.
    pub interface_types: String,
    /// The profiles: 1 domain, 2 private, 4 public.
    pub profiles: i32,
}

impl FirewallRule {
    /// All profiles.
    pub const ALL_PROFILES: i32 = 0x7fff_ffff;
}

/// Whether rules of this machine have an effect (`NET_FW_MODIFY_STATE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalRules {
    /// They have.
    Apply,
    /// A group policy decides for a profile that is in use, and may ignore them.
    GroupPolicy,
    /// The firewall blocks everything that comes in, whatever its rules.
    AllBlocked,
}

/// Why the firewall did not do what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FirewallError {
    /// The machine has no firewall.
    #[error("this machine has no Windows firewall")]
    None,
    /// A call failed.
    #[error("the Windows firewall did not {operation}: {code}")]
    Failed {
        /// The operation.
        operation: &'static str,
        /// The code.
        code: HResult,
    },
}

/// The rules of a machine's firewall.
pub trait Firewall: Send + Sync {
    /// All rules.
    ///
    /// # Errors
    /// They cannot be read.
    fn rules(&self) -> Result<Vec<FirewallRule>, FirewallError>;

    /// Changes the rule of this name, or adds it.
    ///
    /// # Errors
    /// The firewall refuses it.
    fn set(&self, rule: &FirewallRule) -> Result<(), FirewallError>;

    /// Removes one rule of this name.
    ///
    /// # Errors
    /// The firewall refuses it.
    fn remove(&self, name: &str) -> Result<(), FirewallError>;

    /// Whether rules have an effect.
    ///
    /// # Errors
    /// The firewall does not tell.
    fn local_rules(&self) -> Result<LocalRules, FirewallError>;
}

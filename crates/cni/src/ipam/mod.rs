//! Where the addresses of a network's pods come from (the section `ipam` of the network configuration).
//!
//! Tortie's own IPAM is in the agent. The plugin does the rest: [`host_local`] itself, and any other IPAM plugin by
//! executing it ([`plugin`]). It then passes the addresses to the agent with the call.

mod host_local;
mod plugin;
mod result;

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

pub(crate) use host_local::candidates as host_local_candidates;
pub(crate) use result::IpamResult;

use crate::{Code, Command, Failure, Invocation, NetworkConfig};

/// The source of a network's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressSource<'a> {
    /// Calico's IPAM, in the agent: `calico-ipam`, `tortie`, or no section.
    Pools,
    /// The files of the plugin host-local: `host-local`.
    HostLocal,
    /// Another IPAM plugin.
    Plugin(&'a str),
    /// The operating system: an empty section.
    System,
}

impl AddressSource<'_> {
    /// Whether the plugin obtains the addresses, and not the agent.
    #[must_use]
    pub fn is_delegated(self) -> bool {
        matches!(self, Self::HostLocal | Self::Plugin(_))
    }

    /// Its name in `ipam.type`.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Pools => "calico-ipam",
            Self::HostLocal => "host-local",
            Self::Plugin(name) => name,
            Self::System => "",
        }
    }
}

impl NetworkConfig {
    /// The source of the network's addresses.
    ///
    /// # Errors
    /// The section `ipam` is invalid.
    pub fn address_source(&self) -> Result<AddressSource<'_>, Failure> {
        let invalid = |msg: String, why: &str| Err(Failure::new(Code::INVALID_CONFIG, msg, why));
        let section = match self.extra.get("ipam") {
            None | Some(Value::Null) => return Ok(AddressSource::Pools),
            Some(Value::Object(section)) => section,
            Some(_) => return invalid("ipam is no object".to_owned(), ""),
        };
        match section.get("type") {
            None if section.is_empty() => Ok(AddressSource::System),
            None => Ok(AddressSource::Pools),
            Some(Value::String(name)) => match name.as_str() {
                "calico-ipam" | "tortie" => Ok(AddressSource::Pools),
                "host-local" => Ok(AddressSource::HostLocal),
                "" if section.len() == 1 => Ok(AddressSource::System),
                name if name.is_empty() || name.contains(['/', '\\']) => {
                    let msg = format!("ipam.type of network {} is {name:?}", self.name);
                    invalid(msg, "it must be the file name of an IPAM plugin, or calico-ipam")
                }
                name => Ok(AddressSource::Plugin(name)),
            },
            Some(other) => {
                invalid(format!("ipam.type of network {} is {other}", self.name), "it must be a text")
            }
        }
    }
}

/// A family of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) fn of(address: &IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// What a delegated command needs besides the call.
pub(crate) struct Delegation<'a> {
    pub(crate) source: AddressSource<'a>,
    pub(crate) call: &'a Invocation,
    /// The network configuration as the runtime passed it.
    pub(crate) text: &'a [u8],
    /// `CNI_PATH`.
    pub(crate) path: &'a str,
}

impl Delegation<'_> {
    /// Obtains the pod's addresses. If this fails, it releases what the attempt may have left, as the specification demands.
    /// `pod_cidrs` asks the agent for the networks of the node's pods.
    pub(crate) fn add(
        &self,
        pod_cidrs: &dyn Fn() -> Result<Vec<IpNet>, Failure>,
    ) -> Result<IpamResult, Failure> {
        let added = match self.source {
            AddressSource::HostLocal => host_local::add(self.call, pod_cidrs),
            _ => self.execute(Command::Add).and_then(|document| {
                let document = document.unwrap_or_default();
                IpamResult::read(&document, self.source.name())
            }),
        };
        added.inspect_err(|_| {
            // The first failure is the one to report. The runtime's DEL repeats this.
            let _ = self.run(Command::Del);
        })
    }

    /// Every other command.
    pub(crate) fn run(&self, command: Command) -> Result<(), Failure> {
        match (self.source, command) {
            (AddressSource::HostLocal, Command::Del) => host_local::del(self.call),
            (AddressSource::HostLocal, Command::Check) => host_local::check(self.call),
            (AddressSource::HostLocal, Command::Gc) => host_local::collect_garbage(self.call),
            (AddressSource::HostLocal, _) => Ok(()),
            _ => self.execute(command).map(drop),
        }
    }

    fn execute(&self, command: Command) -> Result<Option<Value>, Failure> {
        plugin::execute(self.source.name(), command, self.path, self.text)
    }

    /// STATUS: whether an ADD could get an address.
    pub(crate) fn status(&self, pod_cidrs: &dyn Fn() -> Result<Vec<IpNet>, Failure>) -> Result<(), Failure> {
        let status = match self.source {
            AddressSource::HostLocal => host_local::status(self.call, pod_cidrs),
            _ => self.run(Command::Status),
        };
        status.map_err(|failure| match failure.code {
            Code::INVALID_CONFIG | Code::NOT_SUPPORTED => Failure { code: Code::NOT_AVAILABLE, ..failure },
            _ => failure,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_section_names_the_source() {
        let source = |ipam: Value| {
            let config = json!({"cniVersion": "1.0.0", "name": "n", "ipam": ipam});
            let config: NetworkConfig = serde_json::from_value(config).unwrap();
            config.address_source().map(|source| format!("{source:?}")).map_err(|failure| failure.to_string())
        };
        for (ipam, expected) in [
            (json!(null), "Pools"),
            (json!({"type": "calico-ipam"}), "Pools"),
            (json!({"type": "tortie"}), "Pools"),
            (json!({"ipv4_pools": []}), "Pools"),
            (json!({}), "System"),
            (json!({"type": ""}), "System"),
            (json!({"type": "host-local"}), "HostLocal"),
            (json!({"type": "dhcp"}), "Plugin(\"dhcp\")"),
        ] {
            assert_eq!(source(ipam.clone()), Ok(expected.to_owned()), "{ipam}");
        }
        for wrong in [
            json!([]),
            json!({"type": 1}),
            json!({"type": "../x"}),
            json!({"type": "a\\b"}),
            json!({"type": "", "subnet": "x"}),
        ] {
            assert!(source(wrong.clone()).unwrap_err().contains("ipam"), "{wrong}");
        }
    }
}

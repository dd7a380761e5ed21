//! Network adapters: which one an operator means, and which addresses count.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net};
use tortie_api::net::MacAddress;
use tortie_hcn::Adapter;

/// How the system names its own adapters on virtual switches.
const VIRTUAL: &str = "vEthernet";

/// The adapter that the operator wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdapterSelector {
    /// That of this name.
    Name(String),
    /// That with this address.
    Address(Ipv4Addr),
    /// That with this MAC address.
    Mac(MacAddress),
}

/// Why text selects no adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?}: name a physical adapter, by its name, IPv4 address or MAC address")]
pub struct AdapterSelectorError(String);

impl FromStr for AdapterSelector {
    type Err = AdapterSelectorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let refused = || AdapterSelectorError(text.to_owned());
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return is_usable(address).then_some(Self::Address(address)).ok_or_else(refused);
        }
        if let Ok(mac) = text.replace('-', ":").parse() {
            return Ok(Self::Mac(mac));
        }
        let is_name = !text.is_empty() && text.parse::<IpAddr>().is_err() && !is_virtual(text);
        is_name.then(|| Self::Name(text.to_owned())).ok_or_else(refused)
    }
}

pub(crate) fn is_virtual(name: &str) -> bool {
    name.get(..VIRTUAL.len()).is_some_and(|start| start.eq_ignore_ascii_case(VIRTUAL))
}

/// The name of the switch of an adapter of the system, which is `vEthernet (NAME)`. HNS names a switch as its physical adapter.
pub(crate) fn switch(name: &str) -> Option<&str> {
    let rest = name.get(VIRTUAL.len()..).filter(|_| is_virtual(name))?;
    rest.trim().strip_prefix('(')?.strip_suffix(')')
}

/// The addresses by which others reach the machine.
pub(crate) fn usable(adapter: &Adapter) -> impl Iterator<Item = Ipv4Net> {
    adapter.addresses.iter().filter_map(|net| match net {
        IpNet::V4(net) => is_usable(net.addr()).then_some(*net),
        IpNet::V6(_) => None,
    })
}

/// An adapter whose address is about to move has one of 169.254.0.0/16 meanwhile.
pub(crate) fn is_usable(address: Ipv4Addr) -> bool {
    !(address.is_link_local()
        || address.is_loopback()
        || address.is_unspecified()
        || address.is_multicast()
        || address.is_broadcast())
}

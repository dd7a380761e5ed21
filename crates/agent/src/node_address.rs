//! How a node's own address is found where no kubelet reports it: by Calico's methods
//! (`node/pkg/lifecycle/startup/autodetection`). The choice is a pure function of the interfaces.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use regex::{Regex, RegexBuilder};
use tokio::sync::Notify;
use tortie_api::net::IpVersion;
use tortie_windows::Host;

/// The size of a compiled expression in bytes. Names of interfaces have at most 15 characters, and what is written for them needs a tenth.
const LARGEST_REGEX: usize = 128 << 10;

/// The methods for both families. The default is the address that the kubelet reports, or an annotation that is there.
#[derive(Debug, Clone, Default)]
pub struct AddressMethods {
    /// For the IPv4 address.
    pub ipv4: AddressMethod,
    /// For the IPv6 address.
    pub ipv6: AddressMethod,
}

impl AddressMethods {
    pub(crate) fn of(&self, version: IpVersion) -> &AddressMethod {
        match version {
            IpVersion::V4 => &self.ipv4,
            IpVersion::V6 => &self.ipv6,
        }
    }

    /// Whether the interfaces of the machine decide about an address.
    #[must_use]
    pub fn ask_the_machine(&self) -> bool {
        IpVersion::ALL.into_iter().any(|version| self.of(version).asks_the_machine())
    }
}

/// A method, as Calico writes it.
#[derive(Debug, Clone, Default)]
pub enum AddressMethod {
    /// `kubernetes-internal-ip`: the address that the kubelet reports.
    #[default]
    InternalIp,
    /// `first-found`: the first address of an interface that is no known virtual one.
    FirstFound,
    /// `can-reach=HOST`: the address from which packets to the host would come.
    CanReach(String),
    /// `interface=REGEX,…`: the first address of an interface whose name matches.
    Interface(Vec<Regex>),
    /// `skip-interface=REGEX,…`: as `first-found`, without interfaces whose names match.
    SkipInterface(Vec<Regex>),
    /// `cidr=NETWORK,…`: the first address in one of the networks.
    Cidr(Vec<IpNet>),
}

/// An interface of the machine with its addresses, in the kernel's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    /// Each address with the length of its network's prefix.
    pub(crate) addresses: Vec<IpNet>,
}

/// The machine whose interfaces decide.
#[derive(Clone)]
pub(crate) enum Machine {
    /// Linux: those of the agent's network namespace.
    #[cfg(target_os = "linux")]
    Linux,
    /// Windows.
    Windows(Host),
}

impl Machine {
    /// The interfaces; none if the machine is not known.
    pub(crate) fn interfaces(&self) -> Result<Vec<Interface>, String> {
        let listed = match self {
            #[cfg(target_os = "linux")]
            Machine::Linux => tortie_linux::interfaces().map_err(|error| error.to_string()),
            Machine::Windows(host) => host.interfaces().map_err(|error| error.to_string()),
        };
        let listed = listed.map_err(|error| format!("cannot list the interfaces: {error}"))?;
        Ok(listed.into_iter().map(|(name, addresses)| Interface { name, addresses }).collect())
    }

    /// The addresses by which other machines may reach this one, with their interfaces; none if the machine is not known.
    pub(crate) fn global_addresses(&self) -> BTreeSet<(String, IpNet)> {
        // Those of Services (IPVS) and of bridges of containers change often, and are no addresses of nodes.
        let interfaces = self.interfaces().unwrap_or_default().into_iter();
        let interfaces = interfaces.filter(|interface| !self.is_virtual(&interface.name));
        let of = |interface: Interface| {
            let addresses = interface.addresses.into_iter().filter(|net| is_global(net.addr()));
            addresses.map(move |net| (interface.name.clone(), net))
        };
        interfaces.flat_map(of).collect()
    }

    /// Notifies of each change of the machine's addresses. On Linux, it watches while the result lives. On Windows, it watches until the process
    /// ends, and also notifies of changes of routes.
    ///
    /// # Errors
    /// Why the addresses cannot be watched.
    pub(crate) fn watch(&self, changed: Arc<Notify>) -> Result<Box<dyn Send>, String> {
        match self {
            #[cfg(target_os = "linux")]
            Machine::Linux => match tortie_linux::watch_addresses(move || changed.notify_one()) {
                Ok(watch) => Ok(Box::new(watch)),
                Err(error) => Err(error.to_string()),
            },
            Machine::Windows(host) => {
                host.watch(Box::new(move || changed.notify_one()));
                Ok(Box::new(()))
            }
        }
    }

    /// The sign that Calico's node agent runs here, which writes the node's addresses itself.
    pub(crate) fn sign_of_calico(&self) -> Option<String> {
        match self {
            #[cfg(target_os = "linux")]
            Machine::Linux => tortie_linux::calico::running(),
            Machine::Windows(_) => None,
        }
    }

    /// Whether interfaces of this name are no uplinks.
    fn is_virtual(&self, name: &str) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Machine::Linux => VIRTUAL.iter().any(|prefix| name.starts_with(prefix)),
            Machine::Windows(_) => is_virtual_on_windows(name),
        }
    }
}

/// As in Calico for Windows (`autodetection_windows.go`).
fn is_virtual_on_windows(name: &str) -> bool {
    let has = |part: &str| name.contains(part);
    has("cbr")
        || has("docker")
        || has("Docker")
        || has("(nat)")
        || name.starts_with("Loopback")
        || (has("Calico") && has("_ep"))
}

/// How the node's own addresses are found.
#[derive(Clone)]
pub(crate) struct AddressFinder {
    pub(crate) methods: AddressMethods,
    pub(crate) machine: Machine,
}

impl AddressFinder {
    /// Finds what the method of the family chooses on this machine, where the node has announced this address; `None` if it does not ask the
    /// machine. A name server may take long to answer, and must not block other tasks.
    pub(crate) async fn find(
        &self,
        version: IpVersion,
        announced: Option<IpAddr>,
    ) -> Result<Option<IpNet>, String> {
        let (method, machine) = (self.methods.of(version).clone(), self.machine.clone());
        if !method.asks_the_machine() {
            return Ok(None);
        }
        let find = move || find_here(&method, version, &machine, announced);
        let found = tokio::task::spawn_blocking(find).await;
        found.map_err(|panic| format!("the search for an address has failed: {panic}"))?
    }

    /// The length of the prefix with which an interface has the address. The full length, as clouds give it, says nothing about the
    /// network, so that of another interface counts before it.
    pub(crate) fn prefix_length(&self, address: IpAddr) -> Option<u8> {
        let interfaces = self.machine.interfaces().unwrap_or_else(|error| {
            tracing::warn!(%address, %error, "cannot read the network of the node's address; CrossSubnet pools use VXLAN");
            Vec::new()
        });
        let nets = interfaces.iter().flat_map(|interface| &interface.addresses);
        let nets = nets.filter(|net| net.addr() == address);
        nets.map(IpNet::prefix_len).min_by_key(|length| *length == IpNet::from(address).prefix_len())
    }

    /// Whether interfaces have the address, and all with another length of the prefix than this. The full length, as clouds give it,
    /// says nothing about the network.
    pub(crate) fn has_other_length(&self, known: IpNet) -> bool {
        self.machine.interfaces().is_ok_and(|interfaces| {
            let nets = interfaces.iter().flat_map(|interface| &interface.addresses);
            let nets = nets.filter(|net| net.addr() == known.addr() && has_network(net));
            let mut lengths = nets.map(IpNet::prefix_len).peekable();
            lengths.peek().is_some() && lengths.all(|length| length != known.prefix_len())
        })
    }

    /// Returns whether all interfaces of the machine lack the address. Returns `None` if the interfaces cannot be read.
    pub(crate) fn lacks(&self, address: IpAddr) -> Option<bool> {
        let interfaces = self.machine.interfaces().ok().filter(|interfaces| !interfaces.is_empty())?;
        Some(!interfaces.iter().flat_map(|interface| &interface.addresses).any(|net| net.addr() == address))
    }
}

/// The beginnings of the names of interfaces that are no uplinks of a Linux node: Calico's list, and Tortie's own.
#[cfg(target_os = "linux")]
const VIRTUAL: [&str; 20] = [
    "docker",
    "cbr",
    "dummy",
    "podman",
    "virbr",
    "lxcbr",
    "veth",
    "lo",
    "br-",
    "cali",
    "tunl",
    "flannel",
    "kube-ipvs",
    "cni",
    "vxlan.calico",
    "vxlan-v6.calico",
    "wireguard.cali",
    "wg-v6.cali",
    "nodelocaldns",
    "tortie",
];

impl AddressMethod {
    pub(crate) fn asks_the_machine(&self) -> bool {
        !matches!(self, Self::InternalIp)
    }

    /// The host that must be reached, if the method has one.
    pub(crate) fn host(&self) -> Option<&str> {
        match self {
            Self::CanReach(host) => Some(host),
            _ => None,
        }
    }

    /// The address that the method chooses, with its prefix length. `local` is the address from which the host of `can-reach`
    /// would get packets, and `announced` the one that other nodes know. `None` if the method does not ask the machine.
    ///
    /// # Errors
    /// No address fits; the text names the interfaces that there are.
    pub(crate) fn choose(
        &self,
        version: IpVersion,
        interfaces: &[Interface],
        is_virtual: impl Fn(&str) -> bool,
        local: Option<IpAddr>,
        announced: Option<IpAddr>,
    ) -> Result<Option<IpNet>, String> {
        let usable = |net: &&IpNet| IpVersion::of(&net.addr()) == version && is_global(net.addr());
        // Calico starts with the interface that was made last.
        let all = |accepted: &dyn Fn(&str, &IpNet) -> bool| -> Vec<IpNet> {
            let of = |interface: &Interface| -> Vec<IpNet> {
                let addresses = interface.addresses.iter().filter(usable);
                lasting(addresses.filter(|net| accepted(&interface.name, net)).copied().collect())
            };
            interfaces.iter().rev().flat_map(of).collect()
        };
        let matches = |regexes: &[Regex], name: &str| regexes.iter().any(|regex| regex.is_match(name));
        let fitting = match self {
            Self::InternalIp => return Ok(None),
            Self::FirstFound => all(&|name, _| !is_virtual(name)),
            Self::CanReach(_) => {
                let is_local = |net: &IpNet| Some(net.addr()) == local;
                let addresses = |interface: &Interface| -> Vec<IpNet> {
                    interface.addresses.iter().filter(usable).copied().collect()
                };
                let mut of_interfaces = interfaces.iter().map(addresses);
                let found = of_interfaces.find(|its| its.iter().any(is_local));
                let mut found = lasting(found.unwrap_or_default());
                found.sort_by_key(|net| !is_local(net));
                found
            }
            Self::Interface(regexes) => all(&|name, _| matches(regexes, name)),
            Self::SkipInterface(regexes) => all(&|name, _| !is_virtual(name) && !matches(regexes, name)),
            Self::Cidr(networks) => {
                all(&|_, net| networks.iter().any(|network| network.contains(&net.addr())))
            }
        };
        preferred(&fitting, announced).map(Some).ok_or_else(|| {
            let shown = |interface: &Interface| {
                let addresses = interface.addresses.iter().filter(usable).map(ToString::to_string);
                let addresses: Vec<String> = addresses.collect();
                (!addresses.is_empty()).then(|| format!("{} ({})", interface.name, addresses.join(", ")))
            };
            let all: Vec<String> = interfaces.iter().filter_map(shown).collect();
            let all = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
            let reached = match (self, local) {
                (Self::CanReach(host), None) => format!(" No route of this family leads to {host}."),
                _ => String::new(),
            };
            format!(
                "no {version} address fits the method {self}.{reached} The interfaces with such addresses: {all}. Correct \
                 {}, or give the machine the address",
                option(version)
            )
        })
    }
}

/// The addresses of an interface that stay with the machine: one of the full length beside one with a network may move to another machine with
/// its service (keepalived, kube-vip). Alone, it is the machine's own, as in some clouds.
fn lasting(mut addresses: Vec<IpNet>) -> Vec<IpNet> {
    if addresses.iter().any(has_network) {
        addresses.retain(has_network);
    }
    addresses
}

/// The address to announce of those that fit, in the order of the method. The one that the other nodes know stays. Otherwise, one with a
/// network precedes one of the full length.
fn preferred(fitting: &[IpNet], announced: Option<IpAddr>) -> Option<IpNet> {
    let order = |net: &&IpNet| (Some(net.addr()) != announced, !has_network(net));
    fitting.iter().min_by_key(order).copied()
}

/// Returns true if the length of the prefix says which other addresses are in the network.
pub(crate) fn has_network(net: &IpNet) -> bool {
    net.prefix_len() < net.max_prefix_len()
}

/// The option of the agent that has the method.
fn option(version: IpVersion) -> &'static str {
    match version {
        IpVersion::V4 => "--ip-autodetection-method (TORTIE_IP_AUTODETECTION_METHOD)",
        IpVersion::V6 => "--ip6-autodetection-method (TORTIE_IP6_AUTODETECTION_METHOD)",
    }
}

/// Whether other machines can send packets to the address (Go's `IsGlobalUnicast`).
fn is_global(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast() || is_link_local)
}

impl FromStr for AddressMethod {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let parts = |value: &str| -> Result<Vec<String>, String> {
            let parts: Vec<String> = value.split(',').map(|part| part.trim().to_owned()).collect();
            match parts.iter().any(String::is_empty) {
                true => Err(format!("{text:?} has an empty part")),
                false => Ok(parts),
            }
        };
        let regexes = |value: &str| -> Result<Vec<Regex>, String> {
            let one = |part: String| {
                let built = RegexBuilder::new(&part).size_limit(LARGEST_REGEX).build();
                built.map_err(|error| format!("{part:?}: {error}"))
            };
            parts(value)?.into_iter().map(one).collect()
        };
        match (name, value) {
            ("kubernetes-internal-ip", None) => Ok(Self::InternalIp),
            ("first-found", None) => Ok(Self::FirstFound),
            ("can-reach", Some(host)) if !host.trim().is_empty() => {
                Ok(Self::CanReach(host.trim().to_owned()))
            }
            ("interface", Some(value)) => regexes(value).map(Self::Interface),
            ("skip-interface", Some(value)) => regexes(value).map(Self::SkipInterface),
            ("cidr", Some(value)) => {
                let one = |part: String| part.parse().map_err(|_| format!("{part:?} is no network"));
                parts(value)?.into_iter().map(one).collect::<Result<_, _>>().map(Self::Cidr)
            }
            _ => Err(format!(
                "{text:?} is none of kubernetes-internal-ip, first-found, can-reach=HOST, interface=REGEX,…, \
                 skip-interface=REGEX,… and cidr=NETWORK,…"
            )),
        }
    }
}

impl fmt::Display for AddressMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |all: &[Regex]| all.iter().map(Regex::as_str).collect::<Vec<_>>().join(",");
        match self {
            Self::InternalIp => f.write_str("kubernetes-internal-ip"),
            Self::FirstFound => f.write_str("first-found"),
            Self::CanReach(host) => write!(f, "can-reach={host}"),
            Self::Interface(regexes) => write!(f, "interface={}", list(regexes)),
            Self::SkipInterface(regexes) => write!(f, "skip-interface={}", list(regexes)),
            Self::Cidr(networks) => {
                let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
                write!(f, "cidr={}", networks.join(","))
            }
        }
    }
}

fn find_here(
    method: &AddressMethod,
    version: IpVersion,
    machine: &Machine,
    announced: Option<IpAddr>,
) -> Result<Option<IpNet>, String> {
    let interfaces = machine.interfaces()?;
    let local = method.host().and_then(|host| local_address(host, version));
    method.choose(version, &interfaces, |name| machine.is_virtual(name), local, announced)
}

/// The source address of packets to the host, by the machine's routes. Nothing is sent, except to resolve its name.
fn local_address(host: &str, version: IpVersion) -> Option<IpAddr> {
    use std::net::{Ipv4Addr, Ipv6Addr, ToSocketAddrs as _, UdpSocket};

    let mut hosts = (host.trim_matches(['[', ']']), 80).to_socket_addrs().ok()?;
    let host = hosts.find(|host| IpVersion::of(&host.ip()) == version)?;
    let any: IpAddr = match version {
        IpVersion::V4 => Ipv4Addr::UNSPECIFIED.into(),
        IpVersion::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(host).ok()?;
    socket.local_addr().ok().map(|local| local.ip())
}

#[cfg(test)]
mod tests;

//! How a node's own address is found where no kubelet reports it: by Calico's methods
//! (`node/pkg/lifecycle/startup/autodetection`). The choice is a pure function of the interfaces.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use regex::{Regex, RegexBuilder};
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
    /// What the method of the family chooses on this machine; `None` if it does not ask the machine. A name server may take long to
    /// answer, and must not block other tasks.
    pub(crate) async fn find(&self, version: IpVersion) -> Result<Option<IpNet>, String> {
        let (method, machine) = (self.methods.of(version).clone(), self.machine.clone());
        if !method.asks_the_machine() {
            return Ok(None);
        }
        let found = tokio::task::spawn_blocking(move || find_here(&method, version, &machine)).await;
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
            let nets =
                nets.filter(|net| net.addr() == known.addr() && net.prefix_len() < net.max_prefix_len());
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
    /// would get packets. `None` if the method does not ask the machine.
    ///
    /// # Errors
    /// No address fits; the text names the interfaces that there are.
    pub(crate) fn choose(
        &self,
        version: IpVersion,
        interfaces: &[Interface],
        is_virtual: impl Fn(&str) -> bool,
        local: Option<IpAddr>,
    ) -> Result<Option<IpNet>, String> {
        let usable = |net: &&IpNet| IpVersion::of(&net.addr()) == version && is_global(net.addr());
        // Calico starts with the interface that was made last.
        let first = |accepted: &dyn Fn(&str, &IpNet) -> bool| {
            interfaces.iter().rev().find_map(|interface| {
                let mut addresses = interface.addresses.iter().filter(usable);
                addresses.find(|net| accepted(&interface.name, net)).copied()
            })
        };
        let matches = |regexes: &[Regex], name: &str| regexes.iter().any(|regex| regex.is_match(name));
        let chosen = match self {
            Self::InternalIp => return Ok(None),
            Self::FirstFound => first(&|name, _| !is_virtual(name)),
            Self::CanReach(_) => {
                let has = |net: &&IpNet| Some(net.addr()) == local;
                interfaces.iter().flat_map(|interface| &interface.addresses).filter(usable).find(has).copied()
            }
            Self::Interface(regexes) => first(&|name, _| matches(regexes, name)),
            Self::SkipInterface(regexes) => first(&|name, _| !is_virtual(name) && !matches(regexes, name)),
            Self::Cidr(networks) => {
                first(&|_, net| networks.iter().any(|network| network.contains(&net.addr())))
            }
        };
        chosen.map(Some).ok_or_else(|| {
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

fn find_here(method: &AddressMethod, version: IpVersion, machine: &Machine) -> Result<Option<IpNet>, String> {
    let interfaces = machine.interfaces()?;
    let local = method.host().and_then(|host| local_address(host, version));
    method.choose(version, &interfaces, |name| machine.is_virtual(name), local)
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
mod tests {
    use super::*;

    fn machine() -> Vec<Interface> {
        let all: [(&str, &[&str]); 7] = [
            ("lo", &["127.0.0.1/8", "::1/128"]),
            ("eth0", &["169.254.1.1/16", "192.0.2.10/24", "192.0.2.11/24", "fe80::1/64", "2001:db8::10/64"]),
            ("eth1", &["198.51.100.10/25"]),
            ("docker0", &["172.17.0.1/16"]),
            ("vxlan.calico", &["10.244.0.0/32", "fd00::/128"]),
            ("bond0.7", &["203.0.113.10/24", "2001:db8:7::10/64"]),
            ("cali123", &["10.0.0.1/32"]),
        ];
        let one = |(name, addresses): (&str, &[&str])| Interface {
            name: name.to_owned(),
            addresses: addresses.iter().map(|net| net.parse().unwrap()).collect(),
        };
        all.map(one).to_vec()
    }

    #[test]
    fn each_method_chooses_as_calico_does() {
        let machine = machine();
        for (method, local, ipv4, ipv6) in [
            ("first-found", "", "203.0.113.10/24", "2001:db8:7::10/64"),
            ("skip-interface=^bond", "", "198.51.100.10/25", "2001:db8::10/64"),
            ("skip-interface=bond.*, eth1", "", "192.0.2.10/24", "2001:db8::10/64"),
            ("skip-interface=.*", "", "", ""),
            ("interface=eth.*", "", "198.51.100.10/25", "2001:db8::10/64"),
            ("interface=eth0", "", "192.0.2.10/24", "2001:db8::10/64"),
            // A name that the user gives may be a virtual interface's.
            ("interface=docker0", "", "172.17.0.1/16", ""),
            ("interface=lo", "", "", ""),
            ("interface=eno.*,bond0", "", "203.0.113.10/24", "2001:db8:7::10/64"),
            ("cidr=192.0.2.11/32,2001:db8::/64", "", "192.0.2.11/24", "2001:db8::10/64"),
            ("cidr=192.0.0.0/16", "", "192.0.2.10/24", ""),
            ("cidr=10.99.0.0/16", "", "", ""),
            ("can-reach=192.0.2.1", "192.0.2.11", "192.0.2.11/24", ""),
            ("can-reach=host.example", "", "", ""),
            ("can-reach=127.0.0.1", "127.0.0.1", "", ""),
        ] {
            let parsed: AddressMethod = method.parse().unwrap();
            let local = local.parse().ok();
            for (version, expected) in [(IpVersion::V4, ipv4), (IpVersion::V6, ipv6)] {
                let chosen = parsed.choose(version, &machine, |name| Machine::Linux.is_virtual(name), local);
                match expected {
                    "" => {
                        let problem = chosen.unwrap_err();
                        assert!(problem.contains(method.split('=').next().unwrap()), "{problem}");
                        assert!(problem.contains("eth0 (") && problem.contains("autodetection"), "{problem}");
                    }
                    expected => {
                        assert_eq!(chosen.unwrap().unwrap().to_string(), expected, "{method} {version}");
                    }
                }
            }
        }
        let by_kubelet = AddressMethod::InternalIp.choose(IpVersion::V4, &machine, |_| false, None);
        assert_eq!(by_kubelet, Ok(None));
    }

    #[test]
    fn an_expression_that_would_take_megabytes_is_refused() {
        let error = "interface=\\w{500}".parse::<AddressMethod>().unwrap_err();
        assert!(error.contains("size limit"), "{error}");
        assert!("interface=(?i)^(eth|en|wl)[a-z0-9]+$".parse::<AddressMethod>().is_ok());
    }

    #[test]
    fn methods_are_written_as_they_are_read() {
        for text in [
            "kubernetes-internal-ip",
            "first-found",
            "can-reach=2001:db8::1",
            "interface=eth.*,^en[0-9]$",
            "skip-interface=bond0",
            "cidr=192.0.2.0/24,2001:db8::/64",
        ] {
            assert_eq!(text.parse::<AddressMethod>().unwrap().to_string(), text);
        }
        for (text, problem) in [
            ("", "is none of"),
            ("first", "is none of"),
            ("first-found=eth0", "is none of"),
            ("interface", "is none of"),
            ("interface=", "an empty part"),
            ("interface=eth0,,eth1", "an empty part"),
            ("interface=eth(", "eth("),
            ("cidr=192.0.2.0", "is no network"),
            ("can-reach= ", "is none of"),
        ] {
            let error = text.parse::<AddressMethod>().unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    /// The names are those of Windows; a switch has taken the address over.
    #[test]
    fn a_windows_machine_is_asked_too() {
        use std::sync::Arc;
        use tortie_hcn::{Adapter, IpHelper};
        use tortie_hns_emulator::EmulatedHost;
        use tortie_windows::HostRoutes;

        let adapters = [
            ("Loopback Pseudo-Interface 1", "127.0.0.1/8", true),
            ("vEthernet (Ethernet)", "192.0.2.14/24", true),
            ("vEthernet (nat)", "172.20.0.1/20", true),
            ("vEthernet (Calico_ep)", "10.244.3.2/26", true),
            ("Wi-Fi", "203.0.113.8/24", false),
        ];
        let adapter = |(name, address, is_up): (&str, &str, bool)| Adapter {
            index: 1,
            name: name.to_owned(),
            mac: None,
            mtu: 1500,
            is_up,
            addresses: vec![address.parse().unwrap()],
        };
        let ip: Arc<dyn IpHelper> = Arc::new(EmulatedHost::new(adapters.map(adapter).into(), vec![]));
        let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
        let machine = Machine::Windows(host);
        for (method, expected) in [
            ("first-found", Some("192.0.2.14/24")),
            ("interface=nat", Some("172.20.0.1/20")),
            ("interface=Wi-Fi", None),
            ("skip-interface=Ethernet", None),
            ("cidr=192.0.0.0/16", Some("192.0.2.14/24")),
        ] {
            let found = find_here(&method.parse().unwrap(), IpVersion::V4, &machine);
            assert_eq!(found.ok().flatten().map(|net| net.to_string()).as_deref(), expected, "{method}");
        }
        let finder = AddressFinder { methods: AddressMethods::default(), machine };
        assert_eq!(finder.prefix_length("192.0.2.14".parse().unwrap()), Some(24));
        for (address, lacks) in [("192.0.2.15", true), ("192.0.2.14", false)] {
            assert_eq!(finder.lacks(address.parse().unwrap()), Some(lacks), "{address}");
        }
        let unknown = AddressFinder { machine: Machine::Windows(Host::unknown()), ..finder };
        assert_eq!(unknown.prefix_length("192.0.2.14".parse().unwrap()), None);
        assert_eq!(unknown.lacks("192.0.2.15".parse().unwrap()), None, "a machine that cannot be read");
    }

    /// The same on interfaces of the kernel, in a network namespace.
    #[cfg(target_os = "linux")]
    #[test]
    fn methods_find_addresses_of_the_machine() {
        use tortie_kernel::namespace::NetNs;
        use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, RouteSocket};

        let find_all = || {
            let mut routes = RouteSocket::open().unwrap();
            for (name, addresses) in
                [("eth0", &["192.0.2.10/24", "2001:db8::10/64"][..]), ("eth1", &["198.51.100.10/24"])]
            {
                let (kind, up) = (NewLinkKind::Bridge, true);
                let link = NewLink { name, kind, mac: None, mtu: None, up, controller: None };
                routes.create(&link).unwrap();
                let link = routes.link(name).unwrap().unwrap().index;
                for net in addresses.iter().map(|net| net.parse::<IpNet>().unwrap()) {
                    let address = Address { link, address: net.addr(), prefix_length: net.prefix_len() };
                    routes.change(&Change::AddAddress(address)).unwrap();
                }
            }
            for (method, version, expected) in [
                ("first-found", IpVersion::V4, "198.51.100.10/24"),
                ("first-found", IpVersion::V6, "2001:db8::10/64"),
                ("interface=eth0", IpVersion::V4, "192.0.2.10/24"),
                ("skip-interface=eth1", IpVersion::V4, "192.0.2.10/24"),
                ("cidr=192.0.2.0/24", IpVersion::V4, "192.0.2.10/24"),
                ("can-reach=192.0.2.77", IpVersion::V4, "192.0.2.10/24"),
                ("can-reach=198.51.100.77", IpVersion::V4, "198.51.100.10/24"),
                ("can-reach=203.0.113.1", IpVersion::V4, "No route of this family leads to 203.0.113.1"),
                ("can-reach=192.0.2.77", IpVersion::V6, "No route of this family"),
                ("interface=eth1", IpVersion::V6, "eth0 (2001:db8::10/64)"),
            ] {
                let found = find_here(&method.parse().unwrap(), version, &Machine::Linux);
                let shown = found.map_or_else(|problem| problem, |net| net.unwrap().to_string());
                assert!(shown.contains(expected), "{method} {version}: {shown}");
            }
        };
        NetNs::create().unwrap().run(find_all).unwrap();
    }
}

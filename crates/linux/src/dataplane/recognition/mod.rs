//! Recognises the host interfaces of pods that another CNI plugin has connected.
//!
//! An interface is a pod's if the host route to each of the pod's addresses leads there, and if something else says so, too: its name,
//! which some plugins derive from the names of namespace and pod, or the result of the plugin, which the container runtime
//! keeps. The route alone is no proof. The addresses of a pod in the Kubernetes API lag behind: a route may already lead to
//! the next pod with the same address.

mod observer;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use sha1::{Digest, Sha1};
use tortie_cni::results::KeptResult;
use tortie_dataplane::{Condition, Endpoint, EndpointId, Reason};
use tortie_kernel::route::{Link, Route, RouteKind};

pub(super) use observer::Observer;

use super::PolicyOnly;

/// What a node has, as far as it tells whose an interface is.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// By index.
    links: BTreeMap<u32, Link>,
    /// The links to which the host routes of each address lead.
    host_routes: BTreeMap<IpAddr, BTreeSet<u32>>,
    /// Links and addresses of those that the kernel has not made for an address of the node.
    routed: BTreeSet<(u32, IpAddr)>,
    /// The links with networks of their own, and those of default routes, such as the node's own adapter. None is recognised as a
    /// pod's. Routes of others to networks behind a pod do not count.
    uplinks: BTreeSet<u32>,
    /// Those of them with a network or a default route that no router advertisement makes.
    fixed_uplinks: BTreeSet<u32>,
    /// The links with an address that the node has in the API. They are never closed.
    adapters: BTreeSet<u32>,
    /// What plugins have answered to the container runtime.
    results: Vec<KeptResult>,
}

/// The pods' interfaces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Recognised {
    /// The interface of each recognised pod.
    pub(super) interfaces: BTreeMap<EndpointId, Arc<str>>,
    /// Their indexes. The kernel gives each interface another one, also if it has the name of an earlier one.
    indexes: BTreeMap<EndpointId, u32>,
    /// Interfaces that a recognised pod has on the host besides its own.
    further: BTreeMap<EndpointId, BTreeSet<String>>,
    /// The interfaces of pods that are not recognised. They are closed.
    pub(super) unclaimed: BTreeSet<String>,
    /// Their indexes, with the addresses to which their routes lead or that plugins have given to their pods, without those of
    /// recognised pods and of the node.
    behind_unclaimed: BTreeSet<(u32, IpAddr)>,
    /// Why pods are not recognised.
    pub(super) problems: BTreeMap<EndpointId, Problem>,
}

/// Why the interface of a pod is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Problem {
    /// No host route leads to this address. The interface that the plugin has made, if there is one, is closed.
    NoRoute { address: IpAddr, closed: Option<String> },
    /// Its interface is a port of a bridge.
    Bridged { interface: String, bridge: String },
    /// The routes to its addresses lead to several interfaces.
    Several(BTreeSet<String>),
    /// The route leads to an interface that is not the end of a cable to one pod.
    Unfit { address: IpAddr, interface: String },
    /// So it is, and it has networks or a default route, as the node's own adapters have. It is closed.
    WithNetworks { address: IpAddr, interface: String },
    /// The interface is another pod's: this one, if known.
    OfAnother { interface: String, owner: Option<String> },
    /// Nothing says whose the interface is.
    Unproven(String),
}

impl Recognised {
    /// The pods that have another interface in `after`, or none.
    pub(super) fn moved(&self, after: &Self) -> BTreeSet<EndpointId> {
        let known = self.indexes.keys().chain(after.indexes.keys());
        known.filter(|id| self.indexes.get(*id) != after.indexes.get(*id)).cloned().collect()
    }

    /// The addresses behind interfaces that are closed in `after` and were not before. An interface that the plugin has just made
    /// was open until then.
    pub(super) fn newly_closed(&self, after: &Self) -> BTreeSet<IpAddr> {
        after.behind_unclaimed.difference(&self.behind_unclaimed).map(|(_, address)| *address).collect()
    }
}

impl Observed {
    fn new(links: Vec<Link>, routes: &[Route], results: Vec<KeptResult>) -> Self {
        let mut observed = Self { results, ..Self::default() };
        observed.links = links.into_iter().map(|link| (link.index, link)).collect();
        for route in routes.iter().filter(|route| route.kind == RouteKind::Unicast) {
            let destination = route.destination;
            let is_host_route = destination.prefix_len() == destination.max_prefix_len();
            let hops = route.next_hops();
            if is_host_route && hops.iter().all(|hop| hop.gateway.is_none()) {
                let known = observed.host_routes.entry(destination.addr()).or_default();
                known.extend(hops.iter().map(|hop| hop.link));
                if route.protocol != KERNEL {
                    observed.routed.extend(hops.iter().map(|hop| (hop.link, destination.addr())));
                }
            } else if is_of_node(route) {
                observed.uplinks.extend(hops.iter().map(|hop| hop.link));
                if !may_be_advertised(route) {
                    observed.fixed_uplinks.extend(hops.iter().map(|hop| hop.link));
                }
            }
        }
        observed
    }

    /// The interfaces of the pods.
    pub(super) fn recognise(
        &self,
        pods: &BTreeMap<EndpointId, Arc<Endpoint>>,
        config: &PolicyOnly,
    ) -> Recognised {
        let mut recognised = Recognised::default();
        let mut candidates = BTreeSet::new();
        for (id, pod) in pods {
            candidates
                .extend(pod.addresses.iter().filter_map(|address| self.host_routes.get(address)).flatten());
            match self.interface_of(id, pod, config) {
                Ok(link) => {
                    recognised.interfaces.insert(id.clone(), link.name.as_str().into());
                    recognised.indexes.insert(id.clone(), link.index);
                    let further: BTreeSet<String> = self.further(id, link).map(str::to_owned).collect();
                    if !further.is_empty() {
                        recognised.further.insert(id.clone(), further);
                    }
                }
                Err(problem) => drop(recognised.problems.insert(id.clone(), problem)),
            }
        }
        let claimed: BTreeSet<&str> = recognised.interfaces.values().map(AsRef::as_ref).collect();
        let with_policy = pods.iter().filter(|(id, _)| recognised.interfaces.contains_key(*id));
        let with_policy: BTreeSet<IpAddr> =
            with_policy.flat_map(|(_, pod)| pod.addresses.iter().copied()).collect();
        let led_to = candidates.into_iter().filter_map(|index| self.links.get(index));
        let answered: BTreeSet<&str> =
            self.results.iter().flat_map(|it| &it.host_interfaces).map(String::as_str).collect();
        let answered = self.links.values().filter(|link| answered.contains(&*link.name));
        let of_pods = led_to.chain(answered).filter(|link| self.is_of_pod(link));
        for link in of_pods.filter(|link| !claimed.contains(&*link.name)) {
            recognised.unclaimed.insert(link.name.clone());
            let behind = self.addresses_behind(link).filter(|address| !with_policy.contains(address));
            recognised.behind_unclaimed.extend(behind.map(|address| (link.index, address)));
        }
        recognised
    }

    fn addresses_behind<'a>(&'a self, link: &'a Link) -> impl Iterator<Item = IpAddr> + 'a {
        let routed = self.routed.iter().filter(|(index, _)| *index == link.index);
        let results = self.results.iter().filter(|it| it.host_interfaces.contains(&link.name));
        routed.map(|(_, address)| *address).chain(results.flat_map(|it| it.addresses.iter().copied()))
    }

    /// The other ends on the host of cables that plugins have made for the pod.
    fn further<'a>(&'a self, id: &'a EndpointId, own: &'a Link) -> impl Iterator<Item = &'a str> {
        let is_of_pod = |it: &&KeptResult| *it.namespace == *id.namespace && *it.pod == *id.pod;
        let answered = self.results.iter().filter(is_of_pod).flat_map(|it| &it.host_interfaces);
        let names: BTreeSet<&str> = answered.map(String::as_str).collect();
        let of_pods = self.links.values().filter(|link| self.is_of_pod(link) && link.index != own.index);
        of_pods.map(|link| &*link.name).filter(move |name| names.contains(name))
    }

    fn interface_of(&self, id: &EndpointId, pod: &Endpoint, config: &PolicyOnly) -> Result<&Link, Problem> {
        let mut links = BTreeMap::new();
        for address in &pod.addresses {
            let there = self.host_routes.get(address).filter(|links| !links.is_empty());
            let there =
                there.ok_or_else(|| self.bridged(id).unwrap_or_else(|| self.no_route(id, *address)))?;
            links.extend(there.iter().map(|link| (*link, *address)));
        }
        let found: Vec<_> =
            links.iter().filter_map(|(index, address)| Some((self.links.get(index)?, *address))).collect();
        let (link, address) = match found.as_slice() {
            [only] if links.len() == 1 => *only,
            [] => {
                let address = pod.addresses.first().copied().unwrap_or(IpAddr::from([0; 4]));
                return Err(self.no_route(id, address));
            }
            several => {
                return Err(Problem::Several(several.iter().map(|(link, _)| link.name.clone()).collect()));
            }
        };
        if !self.is_cable(link) {
            let interface = link.name.clone();
            return Err(match self.is_of_pod(link) {
                true => Problem::WithNetworks { address, interface },
                false => Problem::Unfit { address, interface },
            });
        }
        self.check_owner(id, pod, &link.name, config)?;
        Ok(link)
    }

    fn no_route(&self, id: &EndpointId, address: IpAddr) -> Problem {
        let answered = self.results.iter().filter(|it| is_of(it, id)).flat_map(|it| &it.host_interfaces);
        let names: BTreeSet<&str> = answered.map(String::as_str).collect();
        let closed = self.links.values().find(|link| self.is_of_pod(link) && names.contains(&*link.name));
        Problem::NoRoute { address, closed: closed.map(|link| link.name.clone()) }
    }

    /// Fails unless something proves that the interface is the pod's, and nothing says otherwise.
    fn check_owner(
        &self,
        id: &EndpointId,
        pod: &Endpoint,
        interface: &str,
        config: &PolicyOnly,
    ) -> Result<(), Problem> {
        let names_it = |it: &&KeptResult| it.host_interfaces.iter().any(|name| name == interface);
        let of_it: Vec<&KeptResult> = self.results.iter().filter(names_it).collect();
        let is_own = |it: &&KeptResult| is_of(it, id);
        if let Some(other) = of_it.iter().find(|it| !is_own(it)) {
            let owner = Some(format!("{}/{}", other.namespace, other.pod));
            return Err(Problem::OfAnother { interface: interface.to_owned(), owner });
        }
        let has_addresses =
            |it: &KeptResult| pod.addresses.iter().all(|address| it.addresses.contains(address));
        if of_it.iter().any(|it| has_addresses(it)) {
            return Ok(());
        }
        match config.prefixes.iter().find_map(|prefix| interface.strip_prefix(prefix.as_str())) {
            Some(rest) if rest == digits(&id.namespace, &id.pod) => Ok(()),
            Some(rest) if is_digits(rest) => {
                Err(Problem::OfAnother { interface: interface.to_owned(), owner: None })
            }
            _ => Err(Problem::Unproven(interface.to_owned())),
        }
    }

    /// Whether it is the end of a cable that leads to one pod.
    fn is_cable(&self, link: &Link) -> bool {
        is_free_veth(link) && !self.uplinks.contains(&link.index)
    }

    /// Whether it is closed if it is nobody's: it is a cable, or only its networks speak against that. A name in a result is no proof
    /// then, because a plugin may name the node's adapter, which is a veth in nested nodes. No proof is needed where the pod may have made
    /// the networks itself.
    fn is_of_pod(&self, link: &Link) -> bool {
        let leads_there = |it: &KeptResult| {
            it.host_interfaces.contains(&link.name)
                && it.addresses.iter().any(|address| self.routed.contains(&(link.index, *address)))
        };
        let has_pod = || self.results.iter().any(leads_there) || self.has_only_advertised(link);
        self.is_cable(link) || is_free_veth(link) && !self.adapters.contains(&link.index) && has_pod()
    }

    /// Whether a pod behind the link may have made its networks and default routes by router advertisements. Something else has made a
    /// host route there, as plugins do for pods. To an adapter that is configured by advertisements alone, no such route leads.
    fn has_only_advertised(&self, link: &Link) -> bool {
        let leads_there = self.routed.iter().any(|(index, _)| *index == link.index);
        leads_there && !self.fixed_uplinks.contains(&link.index)
    }

    fn bridged(&self, id: &EndpointId) -> Option<Problem> {
        let of_pod = self.results.iter().filter(|it| is_of(it, id));
        let names: BTreeSet<&str> = of_pod.flat_map(|it| &it.host_interfaces).map(String::as_str).collect();
        self.links.values().filter(|link| names.contains(&*link.name)).find_map(|link| {
            let bridge = self.links.get(&link.controller?)?.name.clone();
            Some(Problem::Bridged { interface: link.name.clone(), bridge })
        })
    }
}

/// The condition of a recognised pod with further interfaces.
fn further_closed(own: &str, further: &BTreeSet<String>) -> Condition {
    let names: Vec<&str> = further.iter().map(String::as_str).collect();
    let message = format!(
        "its further interfaces on the host ({}) are closed, because Tortie enforces policy on {own} only. If the plugin makes them for \
         packets of another family, as AWS VPC CNI does, switch that off (ENABLE_V4_EGRESS=false, ENABLE_V6_EGRESS=false)",
        names.join(", ")
    );
    Condition::new(Reason::InterfaceClosed, message)
}

impl Problem {
    /// The condition of the pod.
    pub(super) fn condition(&self, results: &Path) -> Condition {
        let unknown = "so its interface is unknown and its policy is not in force";
        let kinds = "ptp, AWS VPC CNI, GKE's plugin, or Azure CNI in transparent mode";
        let message = match self {
            Self::NoRoute { address, closed: None } => format!(
                "no host route leads to its address {address}, {unknown}; Tortie waits for the CNI plugin. Policy needs a plugin \
                 that gives each pod an interface and a route of its own: {kinds}"
            ),
            Self::NoRoute { address, closed: Some(interface) } => format!(
                "no host route in the main table leads to its address {address}, so it is unknown whether {interface}, which the CNI \
                 plugin has made for it, is all that it has: {interface} is closed. Pods with security groups of AWS in strict mode are \
                 like that; use POD_SECURITY_GROUP_ENFORCING_MODE=standard, or a plugin that gives each pod a route of its own: {kinds}"
            ),
            Self::Bridged { interface, bridge } => format!(
                "its interface {interface} is a port of the bridge {bridge}, where Tortie enforces no policy, so it has none; use a \
                 plugin that gives each pod a route of its own: {kinds}"
            ),
            Self::Several(interfaces) => {
                let names: Vec<&str> = interfaces.iter().map(String::as_str).collect();
                format!(
                    "the routes to its addresses lead to several interfaces ({}), {unknown}; they are closed. Delete the wrong routes",
                    names.join(", ")
                )
            }
            Self::Unfit { address, interface } => format!(
                "the route to its address {address} leads to {interface}, which is not the end of a veth pair with one pod behind it, \
                 {unknown}; use a plugin that gives each pod an interface and a route of its own: {kinds}"
            ),
            Self::WithNetworks { address, interface } => format!(
                "the route to its address {address} leads to {interface}, which has a network or a default route as the node's own \
                 adapters have, {unknown}; {interface} is closed. Delete that address or route, and then the pod, if its own route has \
                 gone with it. If router advertisements of the pod have made it, set net.ipv6.conf.{interface}.accept_ra to 0"
            ),
            Self::OfAnother { interface, owner } => {
                let owner =
                    owner.as_ref().map_or_else(|| "another pod".to_owned(), |owner| format!("pod {owner}"));
                format!(
                    "the route to its address leads to {interface}, which belongs to {owner}, {unknown}. If this lasts, the address in the \
                     status of one of the two pods is wrong: delete that pod"
                )
            }
            Self::Unproven(interface) => format!(
                "the route to its address leads to {interface}, but nothing proves that it is this pod's, {unknown}; the interface is \
                 closed. Give the agent the folder with the CNI results of the container runtime, which is not {} or has no \
                 result of this pod (--cni-results; the DaemonSet of tortie install mounts /var/lib/cni only), or the prefix of names that the plugin makes from the hash of namespace and \
                 pod (--pod-interface-prefix)",
                results.display()
            ),
        };
        let reason = match self {
            Self::NoRoute { .. } | Self::Bridged { .. } | Self::Unfit { .. } => Reason::InterfaceMissing,
            Self::WithNetworks { .. } | Self::Several(_) | Self::OfAnother { .. } | Self::Unproven(_) => {
                Reason::InterfaceUnproven
            }
        };
        Condition::new(reason, message)
    }
}

fn is_free_veth(link: &Link) -> bool {
    link.kind == "veth" && link.controller.is_none()
}

/// The protocol of routes that the kernel makes for addresses of the node (`RTPROT_KERNEL` in `linux/rtnetlink.h`).
const KERNEL: u8 = 2;
/// The protocol of default routes by router advertisements (`RTPROT_RA`). The networks in advertisements have that of the kernel.
const ADVERTISED: u8 = 9;

/// Whether its links are the node's own: to a network of an address of the node, or to everywhere.
fn is_of_node(route: &Route) -> bool {
    let is_own = route.protocol == KERNEL && !is_link_local(route.destination.addr());
    is_own || route.destination.prefix_len() == 0
}

/// Whether a router advertisement may have made it: a default route, or a network that is on the link.
fn may_be_advertised(route: &Route) -> bool {
    route.destination.addr().is_ipv6() && matches!(route.protocol, KERNEL | ADVERTISED)
}

/// A prefix with an interface that has it and is no pod's: the node would lose it, because such interfaces are closed. A pod whose router
/// advertisement has made a default route does not count, because no pod may keep an agent from starting.
fn prefix_of_node(prefixes: &[String], links: Vec<Link>, routes: &[Route]) -> Option<(String, String)> {
    let is_default = |route: &&Route| route.destination.prefix_len() == 0;
    let of_default = routes.iter().filter(is_default).flat_map(Route::next_hops);
    let of_default: BTreeSet<u32> = of_default.map(|hop| hop.link).collect();
    let observed = Observed::new(links, routes, Vec::new());
    let is_uplink = |link: &Link| of_default.contains(&link.index) && !observed.has_only_advertised(link);
    observed.links.values().filter(|link| link.kind != "veth" || is_uplink(link)).find_map(|link| {
        let prefix = prefixes.iter().find(|prefix| link.name.starts_with(prefix.as_str()))?;
        Some((prefix.clone(), link.name.clone()))
    })
}

fn is_of(result: &KeptResult, id: &EndpointId) -> bool {
    result.is_of(&id.namespace, &id.pod, &id.interface)
}

/// How many digits of the hash an interface's name has.
const DIGITS: usize = 11;

/// The part of an interface's name that AWS VPC CNI, GKE's plugin, Azure CNI and Calico's make from the pod's names.
fn digits(namespace: &str, pod: &str) -> String {
    let mut digest = String::new();
    for byte in Sha1::digest(format!("{namespace}.{pod}")) {
        let _ = write!(digest, "{byte:02x}");
    }
    digest.truncate(DIGITS);
    digest
}

fn is_digits(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.is_multicast(),
    }
}

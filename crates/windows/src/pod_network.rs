//! The network of the node's pods (docs/hns.md, Networks; `cni-plugin/pkg/dataplane/windows` and
//! `node/pkg/lifecycle/startup` of Calico): an overlay, or an L2Bridge network for packets without encapsulation.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::{Ipv4Net, Ipv6Net};
use tortie_dataplane::MacAddress;
use tortie_hcn::schema::{
    DrMacAddress, Endpoint, HostRoute, Modify, Network, NetworkMode, Policy, PolicySettings, ProviderAddress,
    RequestType, Subnet, Vsid,
};
use tortie_hcn::{Class, Feature, Guid, Hcn, HcnExt};
use tracing::{info, warn};

use crate::host::Host;
use crate::network_spec::{
    NetworkKind, NetworkSpec, document, first_subnet, gateway, ipv6_subnet, named_adapter, subnet, subnets,
    vni,
};
use crate::{Error, KeptRoutes, anchor, bridge};

/// The longest prefix of a subnet: it needs an address besides its own, its gateway and its broadcast address.
const LONGEST_PREFIX: u8 = 30;

/// The gateway of pods. On an L2Bridge network it is the node's own endpoint, with the third address (as in win-bridge of the CNI
/// plugins).
pub(crate) fn pod_gateway(block: Ipv4Net, mode: &NetworkMode) -> Ipv4Addr {
    if *mode == NetworkMode::L2Bridge { bridge::node_address(block) } else { gateway(block) }
}

/// The actual network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// Its identifier.
    pub id: Guid,
    /// The pods' gateway in the first subnet.
    pub gateway: Ipv4Addr,
    /// On an overlay: the MAC address of the node's tunnel end, for the other nodes; its address is the gateway. It differs each
    /// time the network is created.
    pub router_mac: Option<MacAddress>,
    /// The node's address on the underlay, as found by HNS.
    pub provider_address: Ipv4Addr,
    /// The blocks for which it has no subnet, each with the reason.
    pub without_subnet: Vec<(Ipv4Net, String)>,
    /// Why an overlay lacks the policy by which the node reaches its own pods.
    pub without_host_route: Option<String>,
    /// The pods' gateway in its IPv6 subnet, if it has one.
    pub gateway_v6: Option<Ipv6Addr>,
    /// Why it has no IPv6, although the node's pods could have it.
    pub without_ipv6: Option<String>,
    /// Its adapter, if another one was asked for. The network is used all the same.
    pub other_adapter: Option<String>,
}

/// The network as a dataplane last found it. All clones share it.
#[derive(Debug, Clone, Default)]
pub struct CurrentPodNetwork(Arc<Mutex<Option<PodNetwork>>>);

impl CurrentPodNetwork {
    /// The network; `None` if the dataplane has not found one yet.
    pub fn get(&self) -> Option<PodNetwork> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, network: &PodNetwork) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(network.clone());
    }
}

/// Ensures that the network exists and is as required. A differing one is recreated, unless it has endpoints. One that only lacks
/// IPv6 is used as it is if it has endpoints, or if HNS refuses IPv6.
///
/// # Errors
/// A call failed; the network differs and is in use; or it is not ready yet, and the caller should retry.
pub fn ensure_network(hcn: &(impl Hcn + ?Sized), spec: &NetworkSpec) -> Result<PodNetwork, Error> {
    ensure_network_with(hcn, spec, &[])
}

/// The same with further blocks of the node, each of which gets a subnet. An existing network keeps its first subnet if that
/// is any of the blocks, because the node's tunnel end is there.
///
/// # Errors
/// As for [`ensure_network`]. A refused subnet is no error.
pub fn ensure_network_with(
    hcn: &(impl Hcn + ?Sized),
    spec: &NetworkSpec,
    others: &[Ipv4Net],
) -> Result<PodNetwork, Error> {
    ensure_network_on(hcn, spec, others, (&Host::unknown(), None))
}

/// The same on a machine whose node has this address. The adapter of the machine comes before that of `spec`. Its routes are
/// kept before a network is made ([`HostRoutes`](crate::HostRoutes)).
///
/// # Errors
/// As for [`ensure_network`]; or the network does not exist, and the adapter must not be used.
pub fn ensure_network_on(
    hcn: &(impl Hcn + ?Sized),
    spec: &NetworkSpec,
    others: &[Ipv4Net],
    (host, node): (&Host, Option<Ipv4Addr>),
) -> Result<PodNetwork, Error> {
    let choice = host.choose(node);
    let spec = NetworkSpec { adapter: choice.name.or_else(|| spec.adapter.clone()), ..spec.clone() };
    let blocks: Vec<Ipv4Net> = std::iter::once(spec.block).chain(others.iter().copied()).collect();
    let existing = hcn.network_by_name(&spec.name)?;
    let of_kind = existing.as_ref().filter(|network| network.r#type == spec.kind.mode());
    let first = of_kind.and_then(|network| subnets(network).next());
    let spec = &match first {
        Some(block) if blocks.contains(&block) => NetworkSpec { block, ..spec },
        _ => spec,
    };
    let maker = NetworkMaker { hcn, host, node, spec };
    let (found, without_ipv6) = match existing {
        Some(network) => {
            host.network_is_there(node);
            maker.settle(network)?
        }
        None => (maker.create()?, None),
    };
    if spec.kind == NetworkKind::L2Bridge {
        bridge::ensure_node_endpoint(hcn, host, &found, spec.block)?;
    }
    let without_host_route = ensure_host_route(hcn, host, &found)?;
    let mut without_subnet = Vec::new();
    for block in blocks.into_iter().filter(|block| !subnets(&found).any(|subnet| subnet == *block)) {
        match add_subnet(hcn, &found, block) {
            Ok(()) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => without_subnet.push((block, error.to_string())),
        }
    }
    let without_ipv6 = host.without_ipv6(spec.ipv6.is_some()).or(without_ipv6);
    let gateway_v6 = bridge::end_v6(&found);
    let made = PodNetwork {
        without_subnet,
        without_host_route,
        gateway_v6,
        without_ipv6,
        ..pod_network(&found, spec)?
    };
    anchor::release(hcn, host)?;
    Ok(made)
}

/// Gives an overlay the policy by which the node reaches its own pods, once for each network: not every build lists it. Returns why HNS
/// refuses it. Nothing else depends on it, and Calico's plugin goes on without it, too.
fn ensure_host_route(
    hcn: &(impl Hcn + ?Sized),
    host: &Host,
    network: &Network,
) -> Result<Option<String>, Error> {
    if network.r#type != NetworkMode::Overlay || network.policies.iter().any(Policy::is::<HostRoute>) {
        return Ok(None);
    }
    if let Some(answer) = host.host_route_answer(network.id) {
        return Ok(answer);
    }
    let host_route = vec![Policy::of(&HostRoute::default())];
    let answer = match hcn.modify_network(network.id, &Modify::policies(RequestType::Add, host_route)) {
        Ok(()) => None,
        Err(error) => match error.class() {
            Class::AlreadyExists => None,
            Class::Unavailable | Class::NotFound => return Err(error.into()),
            // It is sent again.
            Class::Other if error.is_not_ready() => return Ok(Some(error.to_string())),
            Class::Other => Some(error.to_string()),
        },
    };
    host.set_host_route_answer(network.id, answer.clone());
    Ok(answer)
}

/// The network as it is, for an agent that starts while it differs from the required one: its pods go on using it.
///
/// # Errors
/// A call failed; there is no such network, or it is of a type that the agent does not make; or it is not ready yet, and the caller
/// should retry.
pub fn existing_network(hcn: &(impl Hcn + ?Sized), name: &str) -> Result<PodNetwork, Error> {
    let network = hcn.network_by_name(name)?.ok_or_else(|| Error::NoNetwork(name.to_owned()))?;
    let differs = |problem: String| Error::Differs { object: format!("network {name}"), problem };
    let kind = match network.r#type {
        NetworkMode::Overlay => NetworkKind::Overlay { vni: 0 },
        NetworkMode::L2Bridge => NetworkKind::L2Bridge,
        _ => {
            let problem = format!("it is of type {}, not Overlay or L2Bridge", network.r#type);
            return Err(differs(format!("{problem}: drain the node, and delete the network")));
        }
    };
    let block = subnets(&network).next().ok_or_else(|| differs("it has no subnet: delete it".to_owned()))?;
    let gateway_v6 = bridge::end_v6(&network);
    let spec = NetworkSpec { name: name.to_owned(), block, ipv6: None, kind, adapter: None };
    Ok(PodNetwork { gateway_v6, ..pod_network(&network, &spec)? })
}

/// Adds a subnet for a block. Another call may do the same at the same time.
pub(crate) fn add_subnet(hcn: &(impl Hcn + ?Sized), network: &Network, block: Ipv4Net) -> Result<(), Error> {
    if block.prefix_len() > LONGEST_PREFIX {
        let object = format!("network {}", network.name);
        return Err(Error::Differs {
            object,
            problem: format!("no subnet of it has the address {}", block.addr()),
        });
    }
    if network.r#type != NetworkMode::Overlay {
        let object = format!("network {}", network.name);
        let problem = format!(
            "it needs a subnet for {block}, and a network of type {} has one: give the node larger blocks (blockSize of the IPPool) \
             or fewer pods",
            network.r#type
        );
        return Err(Error::Differs { object, problem });
    }
    let version = hcn.version()?;
    if !version.supports(Feature::SeveralSubnets) {
        let object = format!("network {}", network.name);
        let problem = format!(
            "it needs a subnet for {block}, and networks of HNS {version} have one: give the node larger blocks (blockSize of \
             the IPPool) or fewer pods"
        );
        return Err(Error::Differs { object, problem });
    }
    let vsid = network.subnets().flat_map(|subnet| &subnet.policies);
    let vsid = vsid.filter_map(|policy| policy.settings::<Vsid>().ok().flatten()).next();
    let subnet = subnet(block, vsid.map_or(0, |vsid| vsid.isolation_id));
    let added = hcn.modify_network(network.id, &Modify::subnets(RequestType::Add, vec![subnet]));
    if subnets(&hcn.network(network.id)?).any(|subnet| subnet == block) {
        info!(network = network.name, %block, "the overlay network has a subnet for the block");
        return Ok(());
    }
    added?;
    Err(Error::NotTaken { object: format!("network {}", network.name), what: "a subnet" })
}

/// Removes the subnets of blocks that other nodes have now. Returns those that stay, each with the reason: HNS keeps a subnet
/// whose addresses endpoints have.
///
/// # Errors
/// HNS does not answer, or the network is gone.
pub(crate) fn remove_subnets(
    hcn: &(impl Hcn + ?Sized),
    network: Guid,
    is_stale: impl Fn(&Ipv4Net) -> bool,
) -> Result<Vec<(Ipv4Net, String)>, Error> {
    let found = hcn.network(network)?;
    // The first one is the node's tunnel end.
    let stale = found.subnets().skip(1).filter_map(|subnet| {
        let net: Ipv4Net = subnet.ip_address_prefix.parse().ok()?;
        is_stale(&net).then(|| (net, Subnet { id: subnet.id, ..Default::default() }))
    });
    let mut removed = Vec::new();
    for (net, gone) in stale {
        match hcn.modify_network(network, &Modify::subnets(RequestType::Remove, vec![gone])) {
            Ok(()) => removed.push((net, "HNS accepted its removal and still shows it".to_owned())),
            Err(error) if matches!(error.class(), Class::NotFound | Class::Unavailable) => {
                return Err(error.into());
            }
            Err(error) => removed.push((net, error.to_string())),
        }
    }
    if removed.is_empty() {
        return Ok(removed);
    }
    let left = hcn.network(network)?;
    let (stay, gone): (Vec<_>, Vec<_>) =
        removed.into_iter().partition(|(net, _)| subnets(&left).any(|subnet| subnet == *net));
    for (net, _) in gone {
        info!(network = found.name, subnet = %net, "removed the subnet of a block that is another node's");
    }
    Ok(stay)
}

/// The result of an attempt to replace a network.
enum Replacement {
    /// The new network.
    Made(Box<Network>),
    /// The old one stays, because this many endpoints use it.
    InUse(usize),
}

/// Makes a network on a machine.
struct NetworkMaker<'a, H: Hcn + ?Sized> {
    hcn: &'a H,
    host: &'a Host,
    node: Option<Ipv4Addr>,
    spec: &'a NetworkSpec,
}

impl<H: Hcn + ?Sized> NetworkMaker<'_, H> {
    /// The existing network, or its replacement; and why it lacks IPv6, if it is used nevertheless.
    fn settle(&self, network: Network) -> Result<(Network, Option<String>), Error> {
        let Self { host, spec, .. } = self;
        if let Some((found, wanted)) = difference(&network, spec) {
            let (name, routes) = (spec.name.clone(), kept_routes(&network, spec));
            if let Some(adapter) = other_adapter(&network, spec) {
                return Err(Error::AdapterDiffers { name, found, wanted, adapter, routes });
            }
            return match self.replace(&network, &found, &wanted)? {
                Replacement::Made(made) => Ok((*made, None)),
                Replacement::InUse(endpoints) => {
                    Err(Error::NetworkDiffers { name, found, wanted, endpoints, routes })
                }
            };
        }
        let block =
            lacked_ipv6(&network, spec).filter(|_| host.wants_ipv6() && host.ipv6_refused().is_none());
        let Some(block) = block else { return Ok((network, None)) };
        let kept = match other_adapter(&network, spec) {
            Some(adapter) => format!("is on the adapter {adapter}, so it is not made anew"),
            None => {
                let found = ipv6_subnet(&network).map_or("none".to_owned(), |net| net.to_string());
                let (found, wanted) = (format!("IPv6 subnet {found}"), format!("IPv6 subnet {block}"));
                match self.replace(&network, &found, &wanted)? {
                    Replacement::Made(made) => return Ok((*made, None)),
                    Replacement::InUse(endpoints) => format!(
                        "is used by {endpoints} endpoints; the agent makes it anew when none is left: drain the node, and restart the \
                         machine if pods of DaemonSets keep it in use"
                    ),
                }
            }
        };
        let why = format!("network {} was made without a subnet for {block}, and {kept}", network.name);
        Ok((network, Some(why)))
    }

    /// Replaces the network if nothing uses it. Others than this agent, such as kube-proxy, create endpoints at any time, and the
    /// second network takes a while. So the endpoints are listed again directly before the deletion.
    fn replace(&self, network: &Network, found: &str, wanted: &str) -> Result<Replacement, Error> {
        let Self { hcn, host, node, spec } = self;
        if let Some(endpoints) = in_use(&hcn.endpoints_of_network(network.id)?) {
            return Ok(Replacement::InUse(endpoints));
        }
        warn!(network = spec.name, found, wanted, "the network differs and is unused; recreating it");
        host.prepare_for_deletion(*node)?;
        let _no_new_endpoint = host.network_lock().replace_network();
        anchor::hold(*hcn, host, network, spec.kind)?;
        let all = hcn.endpoints_of_network(network.id)?;
        if let Some(endpoints) = in_use(&all) {
            anchor::release(*hcn, host)?;
            return Ok(Replacement::InUse(endpoints));
        }
        if let Some(own) = all.iter().find(|endpoint| bridge::is_of_node(endpoint)) {
            bridge::remove(*hcn, own)?;
        }
        hcn.delete_network(network.id)?;
        self.create().map(|made| Replacement::Made(Box::new(made)))
    }

    fn create(&self) -> Result<Network, Error> {
        let Self { hcn, host, node, spec } = self;
        // Windows need not list the physical adapter of a switch.
        if let Some(adapter) = anchor::adapter(*hcn, host)? {
            return self.create_on(Some(adapter));
        }
        // If a network was deleted, its adapter may have its address again.
        let choice = host.choose(*node);
        host.prepare(&choice)?;
        self.create_on(choice.name.or_else(|| spec.adapter.clone()))
    }

    /// If HNS refuses the network with an IPv6 subnet only, it has none, and that is recorded: the pods' IPv4 does not depend on it.
    fn create_on(&self, adapter: Option<String>) -> Result<Network, Error> {
        let Self { hcn, host, node, spec } = self;
        let ipv6 = spec.ipv6.filter(|_| host.ipv6_refused().is_none());
        let wanted = NetworkSpec { adapter, ipv6, ..(*spec).clone() };
        let id = match hcn.create_network(&document(&wanted)) {
            Err(error) if ipv6.is_some() && bridge::may_be_for_ipv6(&error) => {
                let id = hcn.create_network(&document(&NetworkSpec { ipv6: None, ..wanted }))?;
                host.refuse_ipv6(format!("HNS refuses the network with it: {error}"));
                id
            }
            created => created?,
        };
        host.network_is_there(*node);
        info!(network = spec.name, %id, block = %spec.block, ?ipv6, kind = ?spec.kind, "created the network of the pods");
        let made = hcn.network(id)?;
        if host.ipv6_refused().is_none() && ipv6.is_some() && ipv6_subnet(&made) != ipv6 {
            // Otherwise it would be made anew at each check.
            host.refuse_ipv6("HNS accepts the network with it, and does not show its IPv6 subnet".to_owned());
        }
        Ok(made)
    }
}

/// The adapter of the network, if it names another one than the required one. Such a network is never recreated: if HNS
/// showed another name of the same adapter, that would never end, and each time the node would lose its connections.
fn other_adapter(network: &Network, spec: &NetworkSpec) -> Option<String> {
    let wanted = spec.adapter.as_ref()?;
    let found = named_adapter(network)?;
    (!found.eq_ignore_ascii_case(wanted)).then_some(found)
}

fn wanted_vni(kind: NetworkKind) -> u32 {
    match kind {
        NetworkKind::Overlay { vni } => vni,
        NetworkKind::L2Bridge => 0,
    }
}

/// What becomes of the routes of a network that differs.
fn kept_routes(network: &Network, spec: &NetworkSpec) -> KeptRoutes {
    if network.r#type != spec.kind.mode() {
        KeptRoutes::Frozen
    } else if vni(network) != wanted_vni(spec.kind) {
        KeptRoutes::FollowedWithOwnVni
    } else {
        KeptRoutes::Followed
    }
}

/// The actual and the required value of a property that cannot be changed.
fn difference(network: &Network, spec: &NetworkSpec) -> Option<(String, String)> {
    let Some(subnet) = first_subnet(network) else {
        return Some(("no subnet".into(), spec.block.to_string()));
    };
    let gateway = subnet.routes.first().map(|route| route.next_hop.clone()).unwrap_or_default();
    let properties = [
        ("type", network.r#type.to_string(), spec.kind.mode().to_string()),
        ("subnet", subnet.ip_address_prefix.clone(), spec.block.to_string()),
        ("gateway", gateway, self::gateway(spec.block).to_string()),
        ("VNI", vni(network).to_string(), wanted_vni(spec.kind).to_string()),
    ];
    let different = properties.into_iter().find(|(_, found, wanted)| found != wanted);
    different.map(|(what, found, wanted)| (format!("{what} {found}"), format!("{what} {wanted}")))
}

/// The node's IPv6 block, if an L2Bridge network has no subnet for it.
fn lacked_ipv6(network: &Network, spec: &NetworkSpec) -> Option<Ipv6Net> {
    let block = spec.ipv6.filter(|_| spec.kind == NetworkKind::L2Bridge)?;
    (ipv6_subnet(network) != Some(block)).then_some(block)
}

/// The number of endpoints that are not the node's own, if there are any.
fn in_use(endpoints: &[Endpoint]) -> Option<usize> {
    let others = endpoints.iter().filter(|endpoint| !bridge::is_of_node(endpoint)).count();
    (others > 0).then_some(others)
}

fn pod_network(network: &Network, spec: &NetworkSpec) -> Result<PodNetwork, Error> {
    let name = &network.name;
    Ok(PodNetwork {
        id: network.id,
        gateway: pod_gateway(spec.block, &spec.kind.mode()),
        router_mac: match spec.kind {
            NetworkKind::Overlay { .. } => {
                Some(read::<DrMacAddress, _>(network, |policy| policy.address.parse().ok())?)
            }
            NetworkKind::L2Bridge => None,
        },
        without_subnet: Vec::new(),
        without_host_route: None,
        gateway_v6: None,
        without_ipv6: None,
        other_adapter: other_adapter(network, spec),
        provider_address: provider_address(network).inspect_err(|error| warn!(network = name, %error))?,
    })
}

/// The node's address on the underlay. An adapter whose address is about to be moved to the network's switch has one of its
/// own choice meanwhile (169.254.0.0/16), by which no other node can reach this one.
pub(crate) fn provider_address(network: &Network) -> Result<Ipv4Addr, Error> {
    let usable = |address: &Ipv4Addr| !address.is_link_local() && !address.is_unspecified();
    read::<ProviderAddress, _>(network, |policy| policy.provider_address.parse().ok().filter(usable))
}

fn read<P: PolicySettings, T>(network: &Network, value: impl Fn(P) -> Option<T>) -> Result<T, Error> {
    let found = network.policies.iter().filter_map(|policy| policy.settings::<P>().ok().flatten());
    let missing = || Error::NetworkNotReady { name: network.name.clone(), missing: P::TYPE };
    found.filter_map(value).next().ok_or_else(missing)
}

//! The network of the node's pods (docs/hns.md, Networks; `cni-plugin/pkg/dataplane/windows` and
//! `node/pkg/lifecycle/startup` of Calico): an overlay, or an L2Bridge network for packets without encapsulation.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::Ipv4Net;
use tortie_dataplane::MacAddress;
use tortie_hcn::schema::{
    DrMacAddress, HostRoute, Modify, Network, NetworkMode, Policy, PolicySettings, ProviderAddress,
    RequestType, Subnet, Vsid,
};
use tortie_hcn::{Class, Feature, Guid, Hcn, HcnExt};
use tracing::{info, warn};

use crate::host::Host;
use crate::network_spec::{NetworkKind, NetworkSpec, document, gateway, named_adapter, subnet, subnets};
use crate::{Error, anchor, bridge};

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

/// Ensures that the network exists and is as required. A differing one is recreated, unless it has endpoints.
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
    let spec = &NetworkSpec { adapter: choice.name.or_else(|| spec.adapter.clone()), ..spec.clone() };
    let create = |hcn, spec: &NetworkSpec| {
        // Windows need not list the physical adapter of a switch.
        if let Some(adapter) = anchor::adapter(hcn, host)? {
            return create(hcn, &NetworkSpec { adapter: Some(adapter), ..spec.clone() });
        }
        // If a network was deleted, its adapter may have its address again.
        let choice = host.choose(node);
        host.prepare(&choice)?;
        create(hcn, &NetworkSpec { adapter: choice.name.or_else(|| spec.adapter.clone()), ..spec.clone() })
    };
    let blocks: Vec<Ipv4Net> = std::iter::once(spec.block).chain(others.iter().copied()).collect();
    let existing = hcn.network_by_name(&spec.name)?;
    let of_kind = existing.as_ref().filter(|network| network.r#type == spec.kind.mode());
    let first = of_kind.and_then(|network| subnets(network).next());
    let spec = &match first {
        Some(block) if blocks.contains(&block) => NetworkSpec { block, ..spec.clone() },
        _ => spec.clone(),
    };
    let found = match existing {
        Some(network) => match difference(&network, spec) {
            None => network,
            Some((found, wanted)) => {
                let name = spec.name.clone();
                if let Some(adapter) = other_adapter(&network, spec) {
                    return Err(Error::AdapterDiffers { name, found, wanted, adapter });
                }
                let endpoints = hcn.endpoints_of_network(network.id)?;
                let own = endpoints.iter().find(|endpoint| bridge::is_of_node(endpoint));
                let endpoints = endpoints.len() - usize::from(own.is_some());
                if endpoints > 0 {
                    return Err(Error::NetworkDiffers { name, found, wanted, endpoints });
                }
                warn!(network = spec.name, found, wanted, "the network differs and is unused; recreating it");
                host.prepare_for_deletion(node)?;
                if let Some(own) = own {
                    bridge::remove(hcn, own)?;
                }
                anchor::hold(hcn, host, &network, spec.kind)?;
                hcn.delete_network(network.id)?;
                create(hcn, spec)?
            }
        },
        None => create(hcn, spec)?,
    };
    if spec.kind == NetworkKind::L2Bridge {
        bridge::ensure_node_endpoint(hcn, &found, spec.block)?;
    } else if !found.policies.iter().any(Policy::is::<HostRoute>) {
        let host_route = vec![Policy::of(&HostRoute::default())];
        match hcn.modify_network(found.id, &Modify::policies(RequestType::Add, host_route)) {
            // Not every build lists it.
            Err(error) if error.class() == Class::AlreadyExists => {}
            result => result?,
        }
    }
    let mut without_subnet = Vec::new();
    for block in blocks.into_iter().filter(|block| !subnets(&found).any(|subnet| subnet == *block)) {
        match add_subnet(hcn, &found, block) {
            Ok(()) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => without_subnet.push((block, error.to_string())),
        }
    }
    let made = PodNetwork { without_subnet, ..pod_network(&found, spec)? };
    anchor::release(hcn, host)?;
    Ok(made)
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
    pod_network(&network, &NetworkSpec { name: name.to_owned(), block, kind, adapter: None })
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

/// Removes the unused subnets of blocks that other nodes have now.
pub(crate) fn remove_subnets(
    hcn: &(impl Hcn + ?Sized),
    network: Guid,
    is_of_another: impl Fn(&Ipv4Net) -> bool,
) -> Result<(), Error> {
    let network = hcn.network(network)?;
    // The first one is the node's tunnel end.
    for subnet in network.subnets().skip(1) {
        if subnet.ip_address_prefix.parse().is_ok_and(|net| is_of_another(&net)) {
            let gone = Subnet { id: subnet.id, ..Default::default() };
            hcn.modify_network(network.id, &Modify::subnets(RequestType::Remove, vec![gone]))?;
            info!(
                network = network.name,
                subnet = subnet.ip_address_prefix,
                "removed the subnet of a block that is another node's"
            );
        }
    }
    Ok(())
}

fn create(hcn: &(impl Hcn + ?Sized), spec: &NetworkSpec) -> Result<Network, Error> {
    let id = hcn.create_network(&document(spec))?;
    info!(network = spec.name, %id, block = %spec.block, kind = ?spec.kind, "created the network of the pods");
    Ok(hcn.network(id)?)
}

/// The adapter of the network, if it names another one than the required one. Such a network is never recreated: if HNS
/// showed another name of the same adapter, that would never end, and each time the node would lose its connections.
fn other_adapter(network: &Network, spec: &NetworkSpec) -> Option<String> {
    let wanted = spec.adapter.as_ref()?;
    let found = named_adapter(network)?;
    (!found.eq_ignore_ascii_case(wanted)).then_some(found)
}

/// The actual and the required value of a property that cannot be changed.
fn difference(network: &Network, spec: &NetworkSpec) -> Option<(String, String)> {
    let Some(subnet) = network.subnets().next() else {
        return Some(("no subnet".into(), spec.block.to_string()));
    };
    let gateway = subnet.routes.first().map(|route| route.next_hop.clone()).unwrap_or_default();
    let vni = subnet.policies.iter().find_map(|policy| policy.settings::<Vsid>().ok().flatten());
    let wanted_vni = match spec.kind {
        NetworkKind::Overlay { vni } => vni,
        NetworkKind::L2Bridge => 0,
    };
    let properties = [
        ("type", network.r#type.to_string(), spec.kind.mode().to_string()),
        ("subnet", subnet.ip_address_prefix.clone(), spec.block.to_string()),
        ("gateway", gateway, self::gateway(spec.block).to_string()),
        ("VNI", vni.map_or(0, |vsid| vsid.isolation_id).to_string(), wanted_vni.to_string()),
    ];
    let different = properties.into_iter().find(|(_, found, wanted)| found != wanted);
    different.map(|(what, found, wanted)| (format!("{what} {found}"), format!("{what} {wanted}")))
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

//! Connects pods (as `cni-plugin/pkg/dataplane/windows` of Calico).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use tortie_dataplane::{
    EndpointId, InterfaceAddress, MacAddress, PodAddress, PodAttachment, PodDns, PodInterface, PodWiring,
    WiringError,
};
use tortie_hcn::schema::{
    Dns, Endpoint, InterfaceParameters, IpConfig, Modify, Network, NetworkMode, Policy, ProviderAddress,
    RequestType, Route, SchemaVersion,
};
use tortie_hcn::{Class, Guid, Hcn, HcnExt, Version};
use tracing::{info, warn};

use crate::acl::closed;
use crate::bridge::{self, node_address_v6};
use crate::endpoint::{documents, endpoint_id, endpoint_name, ensure_closed, find};
use crate::network_lock::NetworkLock;
use crate::network_spec::{everything, ipv6_subnet, subnets};
use crate::outbound::CurrentNetworks;
use crate::pod_network::{CurrentPodNetwork, add_subnet, pod_gateway, provider_address};
use crate::{Error, NETWORK};

/// The first two bytes of every pod's MAC address; the other four are its IP address. It is the same on all nodes,
/// because the switch answers ARP for other nodes' pods by this rule (win-overlay of the CNI plugins,
/// `plugins/main/windows/win-overlay`).
const MAC_PREFIX: [u8; 2] = [0x0e, 0x2a];

/// The default MTU of a container in HNS (docs/hns.md, Networks).
pub(crate) const USUAL_MTU: u32 = 1450;

/// From this version on, HNS is assumed to refuse an address of the network that another endpoint has (docs/hns.md, Load balancers).
const UNIQUE_ADDRESSES: Version = Version::new(15, 0);

/// The delays, in milliseconds, before a call is repeated for which HNS is not ready; then the caller must retry.
const NOT_READY_PAUSES_MS: [u64; 4] = [100, 200, 400, 800];

/// Connects pods to the network of the node.
#[derive(Clone)]
pub struct WindowsWiring {
    hcn: Arc<dyn Hcn>,
    networks: CurrentNetworks,
    pod_network: CurrentPodNetwork,
    network_lock: NetworkLock,
}

/// A pod's endpoint, whether it was created just now, and the pod's addresses in their subnets.
struct Plugged {
    endpoint: Endpoint,
    created: bool,
    addresses: Vec<InterfaceAddress>,
}

impl WindowsWiring {
    /// Connects pods through `hcn`.
    pub fn new(hcn: Arc<dyn Hcn>) -> WindowsWiring {
        WindowsWiring {
            hcn,
            networks: CurrentNetworks::default(),
            pod_network: CurrentPodNetwork::default(),
            network_lock: NetworkLock::default(),
        }
    }

    /// New endpoints have the policies that these networks demand ([`WindowsDataplane::networks`](crate::WindowsDataplane)).
    #[must_use]
    pub fn with_networks(self, networks: CurrentNetworks) -> Self {
        Self { networks, ..self }
    }

    /// New pods get no IPv6 while this network lacks it ([`WindowsDataplane::current_network`](crate::WindowsDataplane)): a network in
    /// use may have the subnet of another block than IPAM gives addresses of.
    #[must_use]
    pub fn with_pod_network(self, pod_network: CurrentPodNetwork) -> Self {
        Self { pod_network, ..self }
    }

    /// Creates no endpoint while the network is replaced ([`Host::network_lock`](crate::Host::network_lock)).
    #[must_use]
    pub fn with_network_lock(self, network_lock: NetworkLock) -> Self {
        Self { network_lock, ..self }
    }

    fn plug(&self, pod: &PodAttachment) -> Result<PodInterface, Error> {
        let compartment = compartment(pod)?;
        let Plugged { endpoint, created, addresses } = self.ensure_endpoint(pod)?;
        let own = own(pod)?;
        self.attach(&endpoint, compartment).inspect_err(|_| {
            if created {
                // A failed attempt leaves nothing behind. If this fails, too, the next attempt finds the endpoint by
                // its id.
                if let Err(error) = self.hcn.delete_endpoint(endpoint.id) {
                    warn!(endpoint = endpoint.name, %error, "an endpoint without pod stays behind");
                }
            }
        })?;
        info!(endpoint = endpoint.name, address = %own.address, created, "the pod is connected, closed");
        Ok(PodInterface {
            host_mac: None,
            host_interface: endpoint.name,
            // On an L2Bridge network, HNS chooses it.
            mac: endpoint.mac_address.parse().unwrap_or_else(|_| mac(own.address)),
            addresses,
        })
    }

    /// Ensures that the pod's endpoint exists. From then on it keeps its network from being replaced.
    fn ensure_endpoint(&self, pod: &PodAttachment) -> Result<Plugged, Error> {
        let _network_stays = self.network_lock.use_network();
        let network = self.hcn.network_by_name(NETWORK)?.ok_or_else(|| Error::NoNetwork(NETWORK.into()))?;
        let own = own(pod)?;
        let leading = self.gateways(&network, own)?;
        let existing = match find(&*self.hcn, &pod.container_id, NETWORK)? {
            Some(endpoint) if difference(&endpoint, own, &network).is_none() => Some(endpoint),
            Some(stale) => {
                warn!(endpoint = stale.name, "an endpoint of an earlier attempt differs; recreating it");
                self.remove(&stale)?;
                None
            }
            None => None,
        };
        let created = existing.is_none();
        let endpoint = match existing {
            Some(endpoint) => {
                // An endpoint that another CNI plugin created may be open.
                ensure_closed(&*self.hcn, &endpoint)?;
                endpoint
            }
            None => {
                let mut endpoint = document(pod, &network, &leading)?;
                endpoint.policies.extend(self.networks.policies(own.address));
                self.create(&endpoint)?
            }
        };
        Ok(Plugged { endpoint, created, addresses: leading })
    }

    /// The pod's addresses in their subnets, each with the gateway there.
    fn gateways(&self, network: &Network, own: OwnAddress) -> Result<Vec<InterfaceAddress>, Error> {
        let subnet = self.subnet(network, own)?;
        let ipv4 = InterfaceAddress {
            address: IpNet::new_assert(own.address.into(), subnet.prefix_len()),
            gateway: pod_gateway(subnet, &network.r#type).into(),
        };
        let Some(address) = own.ipv6 else { return Ok(vec![ipv4]) };
        let subnet = ipv6_subnet(network).filter(|net| net.contains(&address));
        let subnet = subnet.ok_or_else(|| Error::Differs {
            object: format!("network {}", network.name),
            problem: format!("no subnet of it has the address {address}"),
        })?;
        let ipv6 = InterfaceAddress {
            address: IpNet::new_assert(address.into(), subnet.prefix_len()),
            gateway: node_address_v6(subnet).into(),
        };
        Ok(vec![ipv4, ipv6])
    }

    /// The subnet of the pod's IPv4 address. A block that the node has claimed for this pod gets one now.
    fn subnet(&self, network: &Network, own: OwnAddress) -> Result<Ipv4Net, Error> {
        match subnets(network).find(|subnet| subnet.contains(&own.address)) {
            Some(subnet) => Ok(subnet),
            None => add_subnet(&*self.hcn, network, own.block).map(|()| own.block),
        }
    }

    /// Creates the pod's endpoint with an address that HNS chooses. [`connect`](PodWiring::connect) then replaces it by one
    /// with the MAC address that belongs to the address.
    fn choose(&self, container_id: &str, refused: &[Ipv4Addr]) -> Result<Ipv4Addr, Error> {
        let _network_stays = self.network_lock.use_network();
        let network = self.hcn.network_by_name(NETWORK)?.ok_or_else(|| Error::NoNetwork(NETWORK.into()))?;
        if let Some(known) = find(&*self.hcn, container_id, NETWORK)? {
            match ipv4_address(&known) {
                Some(address) if !refused.contains(&address) => return Ok(address),
                _ => self.remove(&known)?,
            }
        }
        let name = endpoint_name(container_id, NETWORK);
        let mut held = Vec::new();
        for address in refused {
            // HNS refuses an address that it would not choose, or that another endpoint has.
            let holder = unaddressed(format!("{name}-{address}"), Guid::ZERO, &network)
                .map(|endpoint| Endpoint { ip_configurations: vec![config_of(*address)], ..endpoint })?;
            held.extend(self.hcn.create_endpoint(&holder));
        }
        let created =
            unaddressed(name, endpoint_id(container_id), &network).and_then(|own| self.create(&own));
        for holder in held {
            absent_is_fine(self.hcn.delete_endpoint(holder))?;
        }
        let created = created?;
        let missing = || Error::NotTaken {
            object: format!("endpoint {}", created.name),
            what: "an endpoint without address, to which HNS gives one",
        };
        ipv4_address(&created).ok_or_else(missing)
    }

    /// Creates the endpoint. A remote endpoint, as created by kube-proxy, may still have the address, from an earlier
    /// pod on another node. It is stale, because IPAM gave the address to this pod (docs/hns.md, Load balancers). Where HNS accepts
    /// the address twice, it goes first, at each attempt, because kube-proxy may make it once more meanwhile. Elsewhere HNS refuses
    /// the new endpoint: a network has an endpoint for each backend of the cluster, and listing them takes long.
    fn create(&self, document: &Endpoint) -> Result<Endpoint, Error> {
        let refuses_taken = self.hcn.version()? >= UNIQUE_ADDRESSES;
        let created = when_ready(|| {
            if !refuses_taken {
                self.remove_stale(document)?;
            }
            Ok(self.hcn.create_endpoint(document)?)
        });
        let id = match created {
            Err(error) if !error.is_unavailable() && self.remove_stale(document)? => {
                self.hcn.create_endpoint(document)?
            }
            result => result?,
        };
        Ok(self.hcn.endpoint(id)?)
    }

    fn remove_stale(&self, document: &Endpoint) -> Result<bool, Error> {
        let mut any = false;
        if document.ip_configurations.is_empty() {
            return Ok(any);
        }
        for other in self.hcn.endpoints_of_network(document.host_compute_network)? {
            let parsed = |config: &IpConfig| config.ip_address.parse::<IpAddr>().ok();
            let same = |config: &IpConfig| {
                document.ip_configurations.iter().any(|own| parsed(own) == parsed(config))
            };
            if other.is_remote() && other.ip_configurations.iter().any(same) {
                warn!(endpoint = %other.id, "a remote endpoint holds the pod's address: it is removed");
                self.remove(&other)?;
                any = true;
            }
        }
        Ok(any)
    }

    fn attach(&self, endpoint: &Endpoint, compartment: Guid) -> Result<(), Error> {
        let current = endpoint.host_compute_namespace;
        if current == compartment {
            return Ok(());
        }
        if !current.is_zero() {
            self.detach(endpoint)?;
        }
        let add = Modify::namespace_endpoint(RequestType::Add, endpoint.id);
        match when_ready(|| Ok(self.hcn.modify_namespace(compartment, &add)?)) {
            // Another call was faster, or the answer to an earlier one was lost.
            Err(Error::Hns(error)) if error.class() == Class::AlreadyExists => {
                let now = self.hcn.endpoint(endpoint.id)?.host_compute_namespace;
                if now == compartment { Ok(()) } else { Err(error.into()) }
            }
            result => {
                result?;
                self.is_attached(endpoint, compartment)
            }
        }
    }

    /// A success of HNS can be wrong (docs/hns.md, Changes): the endpoint or the namespace must show the attachment.
    fn is_attached(&self, endpoint: &Endpoint, compartment: Guid) -> Result<(), Error> {
        let shows_it = self.hcn.endpoint(endpoint.id)?.host_compute_namespace == compartment
            || self.hcn.namespace(compartment)?.endpoints().any(|id| id == endpoint.id);
        let missing =
            || Error::NotTaken { object: format!("endpoint {}", endpoint.name), what: "an attachment" };
        shows_it.then_some(()).ok_or_else(missing)
    }

    fn detach(&self, endpoint: &Endpoint) -> Result<(), Error> {
        let remove = Modify::namespace_endpoint(RequestType::Remove, endpoint.id);
        // The runtime may have deleted the namespace already.
        absent_is_fine(self.hcn.modify_namespace(endpoint.host_compute_namespace, &remove))
    }

    fn remove(&self, endpoint: &Endpoint) -> Result<(), Error> {
        if !endpoint.host_compute_namespace.is_zero() {
            self.detach(endpoint)?;
        }
        absent_is_fine(self.hcn.delete_endpoint(endpoint.id))?;
        // A success of HNS can be wrong (docs/hns.md, Changes). Nobody else would remove it, and IPAM gives the address away.
        match self.hcn.endpoint(endpoint.id) {
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => {
                Err(Error::NotTaken { object: format!("endpoint {}", endpoint.name), what: "a deletion" })
            }
        }
    }

    /// Whether the network has IPv6, and the node is connected to it.
    fn serves_ipv6(&self) -> Result<bool, Error> {
        if self.pod_network.get().is_some_and(|network| network.without_ipv6.is_some()) {
            return Ok(false);
        }
        let network = self.hcn.network_by_name(NETWORK)?.ok_or_else(|| Error::NoNetwork(NETWORK.into()))?;
        bridge::has_ipv6(&*self.hcn, &network)
    }

    fn verify(&self, pod: &PodAttachment) -> Result<(), Error> {
        let no_endpoint = || Error::NoEndpoint { container_id: pod.container_id.clone() };
        let endpoint = find(&*self.hcn, &pod.container_id, NETWORK)?.ok_or_else(no_endpoint)?;
        let network = self.hcn.network_by_name(NETWORK)?.ok_or_else(|| Error::NoNetwork(NETWORK.into()))?;
        let differs = |problem| Error::Differs { object: format!("endpoint {}", endpoint.name), problem };
        if let Some(problem) = difference(&endpoint, own(pod)?, &network) {
            return Err(differs(problem));
        }
        let (found, wanted) = (endpoint.host_compute_namespace, compartment(pod)?);
        if found == wanted {
            Ok(())
        } else {
            Err(differs(format!("it is in namespace {found}, not in {wanted}")))
        }
    }
}

impl PodWiring for WindowsWiring {
    fn connect(&self, pod: &PodAttachment) -> Result<PodInterface, WiringError> {
        self.plug(pod).map_err(|error| failed("connect the pod", &pod.endpoint, error))
    }

    fn choose_address(
        &self,
        endpoint: &EndpointId,
        container_id: &str,
        refused: &[Ipv4Addr],
    ) -> Result<Option<Ipv4Addr>, WiringError> {
        let chosen = self.choose(container_id, refused);
        chosen.map(Some).map_err(|error| failed("let HNS choose an address", endpoint, error))
    }

    fn disconnect(&self, endpoint: &EndpointId, container_id: &str) -> Result<(), WiringError> {
        let gone = find(&*self.hcn, container_id, NETWORK).and_then(|found| match found {
            Some(found) => self.remove(&found),
            // HNS may still be creating it for an ADD that has given up. Then this is refused, and DEL is repeated:
            // otherwise the endpoint would come, and keep an address that IPAM gives to another pod.
            None => absent_is_fine(self.hcn.delete_endpoint(endpoint_id(container_id))),
        });
        gone.map_err(|error| failed("disconnect the pod", endpoint, error))
    }

    fn host_interface(&self, _: &EndpointId, container_id: &str) -> String {
        endpoint_name(container_id, NETWORK)
    }

    fn has_ipv6(&self) -> Result<bool, WiringError> {
        self.serves_ipv6().map_err(|error| WiringError::System {
            operation: "read whether pods can have IPv6",
            object: format!("network {NETWORK}"),
            source: Box::new(error),
        })
    }

    /// HNS answers an attachment once the port exists.
    fn wait_until_live(&self, _interface: &PodInterface, _patience: Duration) -> bool {
        true
    }

    fn check(&self, pod: &PodAttachment) -> Result<(), WiringError> {
        self.verify(pod).map_err(|error| failed("check the pod's connection", &pod.endpoint, error))
    }
}

fn failed(operation: &'static str, endpoint: &EndpointId, error: Error) -> WiringError {
    match error {
        Error::Differs { object, problem } => WiringError::Differs { object, problem },
        error => WiringError::System { operation, object: endpoint.to_string(), source: Box::new(error) },
    }
}

fn absent_is_fine(result: Result<(), tortie_hcn::Error>) -> Result<(), Error> {
    match result {
        Err(error) if error.class() == Class::NotFound => Ok(()),
        result => Ok(result?),
    }
}

fn compartment(pod: &PodAttachment) -> Result<Guid, Error> {
    pod.netns.parse().map_err(|_| Error::Differs {
        object: pod.endpoint.to_string(),
        problem: format!("CNI_NETNS {:?} is not the GUID of an HCN namespace", pod.netns),
    })
}

/// The IPv4 address of a pod, its block, and the pod's IPv6 address.
#[derive(Debug, Clone, Copy)]
struct OwnAddress {
    address: Ipv4Addr,
    block: Ipv4Net,
    ipv6: Option<Ipv6Addr>,
}

/// Windows has no pods with IPv6 only (<https://kubernetes.io/docs/concepts/services-networking/dual-stack/>).
fn own(pod: &PodAttachment) -> Result<OwnAddress, Error> {
    let own = |ipv4: &PodAddress, ipv6| match (ipv4.address, ipv4.block) {
        (IpAddr::V4(address), IpNet::V4(block)) => Some(OwnAddress { address, block, ipv6 }),
        _ => None,
    };
    let found = match &pod.addresses[..] {
        [ipv4] => own(ipv4, None),
        [one, PodAddress { address: IpAddr::V6(address), .. }]
        | [PodAddress { address: IpAddr::V6(address), .. }, one] => own(one, Some(*address)),
        _ => None,
    };
    found.ok_or_else(|| Error::Differs {
        object: pod.endpoint.to_string(),
        problem: "pods of Windows nodes have exactly one IPv4 address, and one IPv6 address at most"
            .to_owned(),
    })
}

fn mac(address: Ipv4Addr) -> MacAddress {
    let ([a, b], [c, d, e, f]) = (MAC_PREFIX, address.octets());
    MacAddress([a, b, c, d, e, f])
}

/// The document that creates the pod's endpoint. Its ACLs close it from its creation.
fn document(
    pod: &PodAttachment,
    network: &Network,
    addresses: &[InterfaceAddress],
) -> Result<Endpoint, Error> {
    let name = endpoint_name(&pod.container_id, NETWORK);
    let mut endpoint = unaddressed(name, endpoint_id(&pod.container_id), network)?;
    if let Some(mtu) = pod.mtu.filter(|mtu| *mtu != USUAL_MTU) {
        endpoint.policies.push(Policy::of(&InterfaceParameters { mtu, ..Default::default() }));
    }
    let own = own(pod)?;
    endpoint.ip_configurations = addresses.iter().map(|own| config_of(own.address.addr())).collect();
    endpoint.routes = addresses.iter().map(default_route).collect();
    if network.r#type == NetworkMode::Overlay {
        endpoint.mac_address = mac(own.address).dashed();
    }
    endpoint.dns = dns(&pod.dns);
    Ok(endpoint)
}

/// The member of the document, if there is anything to say.
fn dns(PodDns { servers, domain, search, options }: &PodDns) -> Option<Dns> {
    let dns = Dns {
        server_list: servers.iter().map(ToString::to_string).collect(),
        domain: domain.clone(),
        search: search.clone(),
        options: options.clone(),
        ..Default::default()
    };
    (dns != Dns::default()).then_some(dns)
}

fn config_of(address: impl Into<IpAddr>) -> IpConfig {
    IpConfig { ip_address: address.into().to_string(), ..Default::default() }
}

fn default_route(InterfaceAddress { address, gateway }: &InterfaceAddress) -> Route {
    Route {
        next_hop: gateway.to_string(),
        destination_prefix: everything(address.addr().is_ipv6()).into(),
        ..Default::default()
    }
}

/// A closed endpoint whose address HNS chooses.
fn unaddressed(name: String, id: Guid, network: &Network) -> Result<Endpoint, Error> {
    let mut policies = Vec::new();
    if network.r#type == NetworkMode::Overlay {
        let provider_address = provider_address(network)?.to_string();
        policies.push(Policy::of(&ProviderAddress { provider_address, ..Default::default() }));
    }
    policies.extend(documents(&closed()));
    let mut endpoint =
        Endpoint { id, name, host_compute_network: network.id, policies, ..Default::default() };
    endpoint.base.schema_version = Some(SchemaVersion::V2);
    Ok(endpoint)
}

/// The IPv4 address of an endpoint.
fn ipv4_address(endpoint: &Endpoint) -> Option<Ipv4Addr> {
    endpoint.ip_configurations.iter().find_map(|config| config.ip_address.parse().ok())
}

/// The difference between an endpoint and the pod.
fn difference(endpoint: &Endpoint, own: OwnAddress, network: &Network) -> Option<String> {
    // IPv6 has several forms of an address. Each interface has one of its link, whoever lists it.
    let parsed = |config: &IpConfig| config.ip_address.parse::<IpAddr>().ok();
    let is_of_link =
        |own: &Option<IpAddr>| matches!(own, Some(IpAddr::V6(own)) if own.is_unicast_link_local());
    let listed = endpoint.ip_configurations.iter().map(parsed);
    let addresses: BTreeSet<Option<IpAddr>> = listed.filter(|own| !is_of_link(own)).collect();
    let wanted =
        [Some(IpAddr::V4(own.address)), own.ipv6.map(IpAddr::V6)].into_iter().filter(Option::is_some);
    if endpoint.host_compute_network != network.id {
        return Some(format!("it is on network {}, not on {}", endpoint.host_compute_network, network.id));
    }
    if addresses != wanted.collect() {
        let found: Vec<&str> = endpoint.ip_configurations.iter().map(|ip| ip.ip_address.as_str()).collect();
        let six = own.ipv6.map(|address| format!(" and {address}")).unwrap_or_default();
        return Some(format!("it has the addresses {found:?}, not {}{six}", own.address));
    }
    if network.r#type != NetworkMode::Overlay {
        return None;
    }
    if endpoint.mac_address.parse() != Ok(mac(own.address)) {
        return Some(format!("it has the MAC address {}, not {}", endpoint.mac_address, mac(own.address)));
    }
    let mut providers =
        endpoint.policies.iter().filter_map(|policy| policy.settings::<ProviderAddress>().ok().flatten());
    // A build may not list it.
    if let (Some(own), Ok(node)) = (providers.next(), provider_address(network))
        && own.provider_address.parse() != Ok(node)
    {
        return Some(format!("it has the ProviderAddress {}, not {node}", own.provider_address));
    }
    None
}

/// Repeats a call while HNS reports that a prerequisite does not exist yet.
fn when_ready<T>(mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    for pause in NOT_READY_PAUSES_MS.map(Duration::from_millis) {
        match call() {
            Err(Error::Hns(error)) if error.is_not_ready() => {
                warn!(%error, ?pause, "HNS is not ready; the agent retries");
                std::thread::sleep(pause);
            }
            result => return result,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The forms of IPv6 and the address of the link are no difference. Anything else is.
    #[test]
    fn endpoints_are_compared_by_their_addresses() {
        let own = OwnAddress {
            address: Ipv4Addr::new(10, 0, 0, 5),
            block: "10.0.0.0/26".parse().unwrap(),
            ipv6: Some("fd00::5".parse().unwrap()),
        };
        let network = Network { r#type: NetworkMode::L2Bridge, ..Network::default() };
        for (listed, is_same) in [
            (&["10.0.0.5", "fd00::5"][..], true),
            (&["FD00:0:0:0::5", "10.0.0.5", "fe80::1"], true),
            (&["10.0.0.5"], false),
            (&["10.0.0.5", "fe80::1"], false),
            (&["10.0.0.5", "fd00::5", "fd00::6"], false),
            (&["10.0.0.5", "fd00::5", "x"], false),
        ] {
            let ip_configurations = listed
                .iter()
                .map(|address| IpConfig { ip_address: (*address).to_owned(), ..IpConfig::default() });
            let endpoint = Endpoint { ip_configurations: ip_configurations.collect(), ..Endpoint::default() };
            assert_eq!(difference(&endpoint, own, &network).is_none(), is_same, "{listed:?}");
        }
    }
}

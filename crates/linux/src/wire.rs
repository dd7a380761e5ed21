//! Connects pods: a virtual cable from the host to the pod's namespace, in the same way as Calico.
//!
//! The pod has only its addresses (/32, /128) and the gateways 169.254.1.1, which nobody has, and the link-local address
//! of the host's end. So all packets of the pod go to the host, which routes them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sha1::{Digest, Sha1};
use tortie_dataplane::{
    BandwidthLimit, ClusterNetwork, EndpointId, InterfaceAddress, MacAddress, PodAddress, PodAttachment,
    PodInterface, PodLink, PodWiring, PreparedLink, WiringError,
};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{
    Address, Change, Link, LinkSetting, Neighbour, NewLink, NewLinkKind, Peer, RateLimit, Route, RouteKind,
    RouteSocket,
};

use crate::Error;
use crate::dataplane::{OVERLAY_MARK, enable_in_pod, ipv6_link_parameters, is_ipv6_on, link_parameters};
use crate::error::tolerate_gone;
use crate::pod_mtu::PodMtu;

/// The gateway of every pod.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The IPv6 gateway of every pod: the link-local address that the kernel makes of [`HOST_MAC`] (RFC 4291, appendix A).
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0xecee, 0xeeff, 0xfeee, 0xeeee);

/// The hardware address of the host's end of every cable, as in Calico. Each is alone with its pod.
pub const HOST_MAC: MacAddress = MacAddress([0xee; 6]);

/// Connects pods to the network namespace in which it was opened. Call it from threads in that namespace.
///
/// A pod is closed until its policy is in force, because [`Dataplane`](crate::Dataplane) closes every unknown
/// interface with the workload prefix. So let the dataplane apply a state before the first pod is connected.
#[derive(Debug)]
pub struct Wiring {
    prefix: String,
    /// The links of the overlays, whose lowest MTU is that of pods.
    overlays: [String; 3],
    /// That of pods, if there is none of these links.
    pod_mtu: PodMtu,
    deleter: Mutex<Deleter>,
    disconnected: AtomicU32,
}

impl Wiring {
    /// Opens a netlink connection, and deletes cables that were disconnected but not deleted before.
    ///
    /// # Errors
    /// The connection could not be opened.
    pub fn open(config: &crate::dataplane::Config) -> crate::Result<Self> {
        let prefix = config.workload_prefix.clone();
        let overlays =
            [&config.vxlan_device, &config.vxlan_v6_device, &config.ipip_device].map(String::clone);
        let deleter = Deleter::start(RouteSocket::open()?)?;
        deleter.delete();
        Ok(Self {
            prefix,
            overlays,
            pod_mtu: PodMtu::default(),
            deleter: Mutex::new(deleter),
            disconnected: AtomicU32::new(first_number()),
        })
    }

    /// Where no overlay has a link, pods have this MTU.
    #[must_use]
    pub fn with_pod_mtu(self, pod_mtu: PodMtu) -> Self {
        Self { pod_mtu, ..self }
    }

    /// Connects the cable and configures both ends.
    fn lay(
        &self,
        pod: &PodAttachment,
        host: &mut RouteSocket,
        namespace: &NetNs,
        name: &str,
    ) -> tortie_kernel::Result<()> {
        let PodAttachment { endpoint, container_id, netns, addresses: _, mtu, mac: _, limits: _, dns: _ } =
            pod.clone();
        let link = PodLink { endpoint, container_id, netns, mtu };
        let index = self.make(&link, host, namespace, name)?;
        self.configure(pod, host, namespace, index)
    }

    /// Makes the cable, and configures what does not depend on the pod's address.
    fn make(
        &self,
        pod: &PodLink,
        host: &mut RouteSocket,
        namespace: &NetNs,
        name: &str,
    ) -> tortie_kernel::Result<u32> {
        let mtu = Some(self.mtu(pod.mtu, host)?);
        let peer = Peer { name: &pod.endpoint.interface, mac: None, mtu, namespace: Some(namespace.as_fd()) };
        let link = NewLink::new(name, NewLinkKind::Veth(peer));
        host.create(&NewLink { mac: Some(HOST_MAC), mtu, up: true, ..link })?;
        let index = interface_index(name)?;
        let note = Note::of(&pod.endpoint, &pod.container_id).to_string();
        let noted = link_parameters(name)
            .and_then(|()| host.change(&Change::SetLink(index, vec![LinkSetting::Alias(note)])));
        or_delete(noted, host, index)?;
        Ok(index)
    }

    /// The MTU of a pod's link.
    fn mtu(&self, wanted: Option<u32>, host: &mut RouteSocket) -> tortie_kernel::Result<u32> {
        if let Some(mtu) = wanted {
            return Ok(mtu);
        }
        let mut mtus = Vec::new();
        for overlay in &self.overlays {
            // The kernel may have created the link for IPIP, and nobody uses it.
            let link = host.link(overlay)?.filter(|link| !link.carries_ipv4 || link.alias == OVERLAY_MARK);
            mtus.extend(link.map(|link| link.mtu));
        }
        let mtu = mtus.into_iter().min().or_else(|| self.pod_mtu.get());
        Ok(mtu.unwrap_or(ClusterNetwork::default().mtu))
    }

    /// Configures what depends on the pod's addresses. Deletes the cable if that fails.
    fn configure(
        &self,
        pod: &PodAttachment,
        host: &mut RouteSocket,
        namespace: &NetNs,
        index: u32,
    ) -> tortie_kernel::Result<()> {
        let has_ipv6 = pod.addresses.iter().any(|own| own.address.is_ipv6());
        let known = self.configure_host(pod, host, index, has_ipv6);
        let configured = known.and_then(|()| {
            namespace.run(|| {
                let (mut socket, interface) = (RouteSocket::open()?, &pod.endpoint.interface);
                if has_ipv6 {
                    enable_in_pod(interface)?;
                }
                let inside = socket.link(interface)?.filter(|inside| inside.peer == Some(index));
                // The path of a namespace may lead to another one since the cable was laid.
                let inside = inside.ok_or_else(|| {
                    let gone = std::io::Error::from_raw_os_error(libc::ENODEV);
                    tortie_kernel::Error::system("find the cable's other end", &**interface)(gone)
                })?;
                let verdicts = socket.change_all(&pod_side(pod, inside.index))?;
                verdicts.into_iter().collect()
            })?
        });
        or_delete(configured, host, index)
    }

    /// Configures what depends on the pod's addresses on the host's end.
    fn configure_host(
        &self,
        pod: &PodAttachment,
        host: &mut RouteSocket,
        index: u32,
        has_ipv6: bool,
    ) -> tortie_kernel::Result<()> {
        if has_ipv6 {
            ipv6_link_parameters(&self.host_interface(&pod.endpoint, &pod.container_id))?;
        }
        // The entries are permanent, because other entries share a table of all network namespaces, which others may
        // fill (`gc_thresh3`).
        let mac = pod_mac(pod);
        let entry =
            |own: &PodAddress| Change::SetNeighbour(Neighbour { link: index, address: own.address, mac });
        let mut changes: Vec<Change> = pod.addresses.iter().map(entry).collect();
        changes.extend(pod.limits.ingress.map(|limit| Change::SetRateLimit(index, rate_limit(limit))));
        host.change_all(&changes)?.into_iter().collect()
    }

    /// Renames a cable, which closes it, because the dataplane closes every unknown interface with the workload
    /// prefix; and schedules its deletion, which takes the kernel a while.
    fn discard(&self, host: &mut RouteSocket, index: u32) -> tortie_kernel::Result<()> {
        let number = self.disconnected.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}.{number:08x}", self.prefix);
        let marked = Change::SetLink(index, vec![LinkSetting::Group(DISCONNECTED)]);
        let renamed = Change::SetLink(index, vec![LinkSetting::Name(name)]);
        let mut verdicts = host.change_all(&[marked, renamed.clone()])?;
        if verdicts
            .last()
            .is_some_and(|verdict| matches!(verdict, Err(error) if error.errno() == Some(libc::EBUSY)))
        {
            // Before Linux 6.2, a link that is up cannot be renamed. Setting it down takes the kernel a while.
            let down = Change::SetLink(index, vec![LinkSetting::Up(false)]);
            verdicts = host.change_all(&[down, renamed])?;
        }
        // Somebody may have deleted the namespace, and the cable with it, in the meantime.
        match verdicts.into_iter().collect::<tortie_kernel::Result<()>>() {
            Err(error) if error.errno() != Some(libc::ENODEV) => return Err(error),
            _ => {}
        }
        if let Ok(deleter) = self.deleter.lock() {
            deleter.delete();
        }
        Ok(())
    }

    /// The difference between the actual and the desired state.
    fn problem(
        &self,
        pod: &PodAttachment,
        link: Option<&Link>,
        namespace: &NetNs,
    ) -> tortie_kernel::Result<Option<String>> {
        let Some(link) = link else { return Ok(Some("it is not there".to_owned())) };
        if !link.up {
            return Ok(Some("it is down".to_owned()));
        }
        if let Some(limit) = pod.limits.ingress
            && RouteSocket::open()?.sending_rate(link.index)? != Some(limit.bytes_per_second)
        {
            return Ok(Some("it does not limit what the pod receives".to_owned()));
        }
        let interface = &pod.endpoint.interface;
        let near = link.index;
        namespace.run(|| {
            let mut socket = RouteSocket::open()?;
            let Some(inside) = socket.link(interface)? else {
                return Ok(Some(format!("the pod has no interface {interface}")));
            };
            if inside.peer != Some(near) {
                return Ok(Some(format!("the pod's {interface} is another link's other end")));
            }
            // Without a request, the pod may change it, and Calico's pods have others.
            if let Some(mac) = pod.mac.filter(|mac| inside.mac != Some(*mac)) {
                return Ok(Some(format!("the pod's {interface} has not the MAC address {mac}")));
            }
            if let Some(limit) = pod.limits.egress
                && socket.sending_rate(inside.index)? != Some(limit.bytes_per_second)
            {
                return Ok(Some(format!("the limit of what the pod sends is not set at its {interface}")));
            }
            let (addresses, routes) = (socket.addresses()?, socket.routes()?);
            for PodAddress { address, .. } in &pod.addresses {
                let wanted = whole(*address, inside.index);
                if !inside.up || !addresses.contains(&wanted) {
                    return Ok(Some(format!(
                        "the pod's {interface} is down or has not the address {address}"
                    )));
                }
                let gateway = gateway(address);
                let is_default = |route: &&Route| {
                    let leads_here = route.link == Some(inside.index) && route.gateway == Some(gateway);
                    route.destination.prefix_len() == 0 && leads_here
                };
                if !routes.iter().filter(is_default).any(|route| route.kind == RouteKind::Unicast) {
                    return Ok(Some(format!("the pod has no route by {gateway}")));
                }
            }
            Ok(None)
        })?
    }
}

impl PodWiring for Wiring {
    fn prepare(&self, link: &PodLink) -> Result<Option<PreparedLink>, WiringError> {
        let name = self.host_interface(&link.endpoint, &link.container_id);
        let failed = |operation| failed(operation, &name);
        let namespace = NetNs::open(Path::new(&link.netns)).map_err(failed("find the pod's namespace"))?;
        let mut host = RouteSocket::open().map_err(failed("talk to the kernel"))?;
        match self.make(link, &mut host, &namespace, &name) {
            Ok(index) => Ok(Some(PreparedLink(index))),
            Err(error) if error.errno() == Some(libc::EEXIST) => Ok(None),
            Err(error) => Err(failed("lay the pod's cable")(error)),
        }
    }

    fn abandon(&self, prepared: PreparedLink) -> Result<(), WiringError> {
        let name = format!("link {}", prepared.0);
        let mut host = RouteSocket::open().map_err(failed("talk to the kernel", &name))?;
        match host.change(&Change::DeleteLink(prepared.0)) {
            // The pod's namespace may be gone, and the cable with it.
            Err(error) if error.errno() != Some(libc::ENODEV) => {
                Err(failed("delete the pod's cable", &name)(error))
            }
            _ => Ok(()),
        }
    }

    fn finish(&self, prepared: PreparedLink, pod: &PodAttachment) -> Result<PodInterface, WiringError> {
        let name = self.host_interface(&pod.endpoint, &pod.container_id);
        let failed = |operation| failed(operation, &name);
        let namespace = NetNs::open(Path::new(&pod.netns)).map_err(failed("find the pod's namespace"))?;
        let mut host = RouteSocket::open().map_err(failed("talk to the kernel"))?;
        let configured = self.configure(pod, &mut host, &namespace, prepared.0);
        configured.map_err(failed("configure the pod's cable"))?;
        Ok(interface(name.clone(), pod))
    }

    fn planned(&self, pod: &PodAttachment) -> Option<PodInterface> {
        Some(interface(self.host_interface(&pod.endpoint, &pod.container_id), pod))
    }

    fn takes_mac(&self) -> bool {
        true
    }

    fn limits_bandwidth(&self) -> bool {
        true
    }

    /// The kernel has no IPv6 on links with a smaller MTU (RFC 8200, section 5).
    fn has_ipv6(&self) -> Result<bool, WiringError> {
        const LOWEST_MTU: u32 = 1280;
        let has_ipv6 = || -> tortie_kernel::Result<bool> {
            Ok(is_ipv6_on()? && self.mtu(None, &mut RouteSocket::open()?)? >= LOWEST_MTU)
        };
        has_ipv6().map_err(failed("read whether pods can have IPv6", "the node"))
    }

    fn connect(&self, pod: &PodAttachment) -> Result<PodInterface, WiringError> {
        let name = self.host_interface(&pod.endpoint, &pod.container_id);
        let failed = |operation| failed(operation, &name);
        let namespace = NetNs::open(Path::new(&pod.netns)).map_err(failed("find the pod's namespace"))?;
        let mut host = RouteSocket::open().map_err(failed("talk to the kernel"))?;
        let mut laid = self.lay(pod, &mut host, &namespace, &name);
        if matches!(&laid, Err(error) if error.errno() == Some(libc::EEXIST)) {
            let link = host.link(&name).map_err(failed("look for the cable"))?;
            refuse_foreign(link.as_ref(), &pod.endpoint)
                .map_err(self::failed("lay the pod's cable", &name))?;
            let problem = self.problem(pod, link.as_ref(), &namespace).map_err(failed("check the cable"))?;
            if let (Some(_), None) = (&link, &problem) {
                return Ok(interface(name.clone(), pod));
            }
            let delete = match link {
                // A cable of an earlier sandbox of this pod, or half of one.
                Some(link) => {
                    tracing::info!(link = name, ?problem, "recreating the pod's link");
                    Change::DeleteLink(link.index)
                }
                // The namespace may still have the other end of a cable that is disconnected and not deleted yet.
                None => Change::DeleteGroup(DISCONNECTED),
            };
            tolerate_gone(host.change(&delete)).map_err(failed("delete the cable that is there"))?;
            laid = self.lay(pod, &mut host, &namespace, &name);
        }
        laid.map_err(failed("lay the pod's cable"))?;
        Ok(interface(name.clone(), pod))
    }

    fn disconnect(&self, endpoint: &EndpointId, container_id: &str) -> Result<(), WiringError> {
        let name = self.host_interface(endpoint, container_id);
        let failed = |operation| failed(operation, &name);
        let mut host = RouteSocket::open().map_err(failed("talk to the kernel"))?;
        let Some(link) = host.link(&name).map_err(failed("look for the cable"))? else { return Ok(()) };
        if let Err(error) = refuse_foreign(Some(&link), endpoint) {
            tracing::debug!(%error, "the pod has no link to disconnect");
            return Ok(());
        }
        let note = Note::of(endpoint, container_id);
        if Note::read(&link.alias).is_some_and(|there| there.container != note.container) {
            tracing::debug!(
                link = name,
                container_id,
                "the link already belongs to a newer sandbox of the pod"
            );
            return Ok(());
        }
        self.discard(&mut host, link.index).map_err(failed("disconnect the pod"))
    }

    /// The name as in Calico's plugin: the prefix and eleven digits of a digest of namespace and pod.
    fn host_interface(&self, endpoint: &EndpointId, _container_id: &str) -> String {
        let EndpointId { namespace, pod, interface } = endpoint;
        let text = match &**interface {
            "eth0" => format!("{namespace}.{pod}"),
            _ => format!("{namespace}.{pod}.{interface}"),
        };
        let digest: String = Sha1::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
        let room = tortie_kernel::MAX_INTERFACE_NAME.saturating_sub(self.prefix.len());
        format!("{}{}", self.prefix, &digest[..room.min(11)])
    }

    fn wait_until_live(&self, interface: &PodInterface, patience: Duration) -> bool {
        let looked = RouteSocket::open()
            .and_then(|mut socket| socket.wait_until_operating(&interface.host_interface, patience));
        looked.unwrap_or_else(|error| {
            tracing::warn!(link = interface.host_interface, %error, "cannot read whether a pod's link is up");
            false
        })
    }

    fn check(&self, pod: &PodAttachment) -> Result<(), WiringError> {
        let name = self.host_interface(&pod.endpoint, &pod.container_id);
        let failed = |operation| failed(operation, &name);
        let namespace = NetNs::open(Path::new(&pod.netns)).map_err(failed("find the pod's namespace"))?;
        let link = RouteSocket::open()
            .and_then(|mut host| host.link(&name))
            .map_err(failed("look for the cable"))?;
        refuse_foreign(link.as_ref(), &pod.endpoint).map_err(self::failed("check the cable", &name))?;
        match self.problem(pod, link.as_ref(), &namespace).map_err(failed("check the cable"))? {
            None => Ok(()),
            Some(problem) => Err(WiringError::Differs { object: name, problem }),
        }
    }
}

/// A connected pod's interface.
fn interface(host_interface: String, pod: &PodAttachment) -> PodInterface {
    let own = |PodAddress { address, .. }: &PodAddress| InterfaceAddress {
        address: IpNet::from(*address),
        gateway: gateway(address),
    };
    let addresses = pod.addresses.iter().map(own).collect();
    PodInterface { host_interface, host_mac: Some(HOST_MAC), mac: pod_mac(pod), addresses }
}

fn gateway(address: &IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => GATEWAY.into(),
        IpAddr::V6(_) => GATEWAY_V6.into(),
    }
}

/// An address of a link, without a network.
fn whole(address: IpAddr, link: u32) -> Address {
    Address { link, address, prefix_length: IpNet::from(address).prefix_len() }
}

/// Deletes a cable whose configuration has failed, immediately, because the next attempt needs the name of the pod's end,
/// too.
fn or_delete(
    configured: tortie_kernel::Result<()>,
    host: &mut RouteSocket,
    index: u32,
) -> tortie_kernel::Result<()> {
    if configured.is_err() {
        tolerate_gone(host.change(&Change::DeleteLink(index)))?;
    }
    configured
}

/// The alias of a link (`ifalias`, at most 255 bytes): its owner and its sandbox.
struct Note {
    /// Namespace, pod and interface; empty in aliases of earlier versions.
    owner: String,
    container: String,
}

impl Note {
    fn of(endpoint: &EndpointId, container_id: &str) -> Self {
        /// The maximum length of either part; a longer one is truncated and gets a digest of all of it.
        const MAX_LENGTH: usize = 120;
        let part = |text: String| match text.len() {
            0..=MAX_LENGTH => text,
            _ => {
                let digest: String = Sha1::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
                format!("{}..{digest}", &text[..text.floor_char_boundary(MAX_LENGTH - 42)])
            }
        };
        let EndpointId { namespace, pod, interface } = endpoint;
        let owner = part(format!("{namespace}/{pod}/{interface}"));
        Self { owner, container: part(container_id.replace(' ', "_")) }
    }

    /// Parses what [`of`](Self::of) wrote; `None` if there is no alias.
    fn read(alias: &str) -> Option<Self> {
        let (owner, container) = alias.split_once(' ').unwrap_or(("", alias));
        (!alias.is_empty()).then(|| Self { owner: owner.to_owned(), container: container.to_owned() })
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.owner, self.container)
    }
}

/// Whether Tortie created this link for a pod, by its alias. Calico's links have the same names and no alias.
pub(crate) fn is_own(link: &Link, prefix: &str) -> bool {
    let has_owner = |note: Note| note.owner.split('/').count() == 3;
    link.name.starts_with(prefix) && link.kind == "veth" && Note::read(&link.alias).is_some_and(has_owner)
}

/// An error if the link's alias names another pod.
fn refuse_foreign(link: Option<&Link>, endpoint: &EndpointId) -> crate::Result<()> {
    let Some(link) = link else { return Ok(()) };
    let own = Note::of(endpoint, "").owner;
    match Note::read(&link.alias) {
        Some(note) if !note.owner.is_empty() && note.owner != own => {
            Err(Error::LinkTaken { name: link.name.clone(), owner: note.owner })
        }
        _ => Ok(()),
    }
}

/// The first number for disconnected cables, which differs in each process.
fn first_number() -> u32 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos()) ^ std::process::id().rotate_left(16)
}

/// The interface of a pod that has the first default route.
const FIRST_INTERFACE: &str = "eth0";

/// The configuration of the pod's end. All interfaces of a pod have the same gateway, so the routes of further ones have a
/// metric of their own.
fn pod_side(pod: &PodAttachment, link: u32) -> Vec<Change> {
    /// `RTPROT_BOOT`, as for routes that are set up when a host starts.
    const BOOT: u8 = 3;
    let metric = if &*pod.endpoint.interface == FIRST_INTERFACE { 0 } else { link };
    let mac = pod_mac(pod);
    let mut changes = vec![Change::SetLink(link, vec![LinkSetting::Mac(mac), LinkSetting::Up(true)])];
    for PodAddress { address, .. } in &pod.addresses {
        let gateway = gateway(address);
        let everything = match address {
            IpAddr::V4(_) => IpNet::V4(Ipv4Net::default()),
            IpAddr::V6(_) => IpNet::V6(Ipv6Net::default()),
        };
        changes.extend([
            Change::AddAddress(whole(*address, link)),
            Change::AddRoute(Route { metric, ..Route::on_link(IpNet::from(gateway), link, BOOT) }),
            Change::AddRoute(Route { onlink: false, metric, ..Route::via(everything, gateway, link, BOOT) }),
            // A permanent neighbour entry: the first packet is sent at once, even if the host has no route for its own
            // answer.
            Change::SetNeighbour(Neighbour { link, address: gateway, mac: HOST_MAC }),
        ]);
    }
    // In the pod, because the kernel limits what a link sends. The packets wait in the pod's own sockets.
    changes.extend(pod.limits.egress.map(|limit| Change::SetRateLimit(link, rate_limit(limit))));
    changes
}

/// Without a size, the bucket has room for ten milliseconds. It has room for the longest packet in any case, because the kernel loses
/// longer ones, and at most for what may wait in the kernel's memory.
fn rate_limit(BandwidthLimit { bytes_per_second, burst }: BandwidthLimit) -> RateLimit {
    const LONGEST_PACKET: u32 = 1 << 16;
    const MOST: u32 = 1 << 25;
    let usual = || u32::try_from(bytes_per_second / 100).unwrap_or(MOST);
    RateLimit { bytes_per_second, burst: burst.unwrap_or_else(usual).clamp(LONGEST_PACKET, MOST) }
}

/// The pod's hardware address. Without a request it is derived from its first IP address, so that neighbours find a recreated
/// pod.
fn pod_mac(pod: &PodAttachment) -> MacAddress {
    if let Some(requested) = pod.mac {
        return requested;
    }
    let [a, b, c, d] = match pod.addresses.first().map(|first| first.address) {
        Some(IpAddr::V4(address)) => address.octets(),
        Some(IpAddr::V6(address)) => {
            let mut octets = [0; 4];
            octets.copy_from_slice(&Sha1::digest(address.octets())[..4]);
            octets
        }
        None => [0; 4],
    };
    MacAddress([0x0a, 0x58, a, b, c, d])
}

/// The group of the cables to delete ("tort"). Nobody else's links are in it.
const DISCONNECTED: u32 = 0x746f_7274;

fn failed<E: Into<Error>>(operation: &'static str, object: &str) -> impl FnOnce(E) -> WiringError {
    let object = object.to_owned();
    move |error| WiringError::System { operation, object, source: Box::new(error.into()) }
}

/// The time without a disconnect before links are deleted.
const PAUSE: Duration = Duration::from_millis(50);
/// The maximum delay of the deletion.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// A thread that deletes all disconnected cables at once.
#[derive(Debug)]
struct Deleter {
    queue: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Deleter {
    fn start(mut socket: RouteSocket) -> tortie_kernel::Result<Self> {
        let (queue, requests) = channel();
        let work = move || {
            while requests.recv().is_ok() {
                // The kernel holds a lock during deletion that the next disconnect needs, so wait until a burst has
                // ended.
                let begun = Instant::now();
                while begun.elapsed() < MAX_WAIT && requests.recv_timeout(PAUSE).is_ok() {}
                match socket.change(&Change::DeleteGroup(DISCONNECTED)) {
                    Err(error) if error.errno() != Some(libc::ENODEV) => {
                        tracing::warn!(%error, "cannot delete disconnected links; Tortie retries with the next disconnected pod");
                    }
                    _ => {}
                }
            }
        };
        let thread = std::thread::Builder::new().name("link-deleter".to_owned()).spawn(work);
        let thread = thread.map_err(tortie_kernel::Error::system("start a thread", "link deleter"))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    fn delete(&self) {
        if let Some(queue) = &self.queue {
            let _ = queue.send(()); // the thread ends only with us
        }
    }
}

impl Drop for Deleter {
    /// Waits until all deletions are done.
    fn drop(&mut self) {
        self.queue.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it does not panic, and here nothing could be done about it
        }
    }
}

//! What the node announces to the others by annotations of its Node: its own addresses and its tunnel ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::sync::{Notify, watch};
use tokio::time::MissedTickBehavior;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_dataplane::Condition;
use tortie_ipam::Ipam;
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Endpoints, Interest, StoreError};
use tortie_windows::{CurrentPodNetwork, PodNetwork};

use crate::AgentError;
#[cfg(target_os = "linux")]
use crate::Extras;
use crate::flannel::{self, OwnLease};
use crate::flannel_etcd::{self, EtcdLease, LeaseKeeper, OwnEnd};
use crate::flannel_networks::FlannelNetworks;
use crate::node_address::AddressFinder;
#[cfg(target_os = "linux")]
use crate::node_address::Machine;
use crate::own_addresses::{MissingAddresses, OwnAddresses, look, own_address};
use crate::plane::InForce;
use crate::tunnels::{self, Tunnels};
use crate::windows_ipv6::WindowsIpv6;

/// How often the interfaces of the machine are looked at, if they decide about the node's address (as in Calico) or cannot be watched.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);
/// The time that changes of the machine's addresses may take. A network service takes addresses away and gives them back.
const SETTLE: Duration = Duration::from_secs(1);

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// What the node announces, now and later.
pub(crate) struct Announced {
    first: Tunnels,
    /// How the node's own addresses are found.
    finder: AddressFinder,
    /// In a cluster with flannel: the network of its pods, and the way there.
    lease: Option<OwnLease>,
    /// With flannel's leases in etcd: what the node writes there.
    etcd_lease: Option<EtcdLease>,
    /// Windows: the network as the dataplane sees it.
    pod_network: Option<CurrentPodNetwork>,
    /// A Windows node that may have IPv6.
    ipv6: Option<WindowsIpv6>,
    /// Linux: the families of `lease` for which the node has announced an address.
    families: watch::Sender<Vec<IpVersion>>,
    /// The announced addresses that no interface has.
    missing: MissingAddresses,
    /// The conditions of `missing`.
    conditions: watch::Sender<Vec<Condition>>,
}

impl Announced {
    /// Takes the tunnel addresses of a Linux node, and announces them. The MAC addresses are derived from the node's name.
    #[cfg(target_os = "linux")]
    pub(crate) async fn on_linux(
        store: &dyn Endpoints,
        ipam: &Ipam,
        node: &str,
        extras: &Extras,
    ) -> Result<(Self, Option<LeaseKeeper>), AgentError> {
        let finder = AddressFinder { methods: extras.address_methods.clone(), machine: Machine::Linux };
        let networks = FlannelNetworks::read(store, node, &finder, extras, None).await?;
        let first = Tunnels::of_linux(store, ipam, node, networks.lease.as_ref()).await?;
        let (mut announced, keeper) = Self::new(first, finder, networks);
        let families = annotate(store, node, &mut announced).await?;
        announced.missing.all_found(node)?;
        announced.families.send_replace(families);
        Ok((announced, keeper))
    }

    /// Announces the network of a Windows node.
    pub(crate) async fn on_windows(
        store: &dyn Endpoints,
        node: &str,
        (network, current): (&PodNetwork, CurrentPodNetwork),
        finder: AddressFinder,
        networks: FlannelNetworks,
        ipv6: Option<WindowsIpv6>,
    ) -> Result<(Self, Option<LeaseKeeper>), AgentError> {
        let (announced, keeper) = Self::new(Tunnels::of_windows(network), finder, networks);
        let mut announced = Self { pod_network: Some(current), ipv6, ..announced };
        annotate(store, node, &mut announced).await?;
        announced.missing.all_found(node)?;
        Ok((announced, keeper))
    }

    fn new(first: Tunnels, finder: AddressFinder, networks: FlannelNetworks) -> (Self, Option<LeaseKeeper>) {
        let FlannelNetworks { lease, etcd, missing } = networks;
        let (etcd_lease, keeper) = etcd.unzip();
        let (pod_network, ipv6, families, conditions) = Default::default();
        let announced =
            Self { first, finder, lease, etcd_lease, pod_network, ipv6, families, missing, conditions };
        (announced, keeper)
    }

    /// The families of a Linux node's pods, if their addresses are those of flannel's networks.
    #[cfg(target_os = "linux")]
    pub(crate) fn families(&self) -> Option<watch::Receiver<Vec<IpVersion>>> {
        self.lease.as_ref().map(|_| self.families.subscribe())
    }

    /// The conditions of the node's own addresses.
    pub(crate) fn conditions(&self) -> watch::Receiver<Vec<Condition>> {
        self.conditions.subscribe()
    }

    /// Returns true if the interfaces must be read at each tick.
    fn needs_looks(&self) -> bool {
        self.finder.methods.ask_the_machine() || self.missing.need_looks()
    }

    fn report_missing(&self) {
        let now = self.missing.conditions();
        self.conditions.send_if_modified(|known| {
            let differs = *known != now;
            *known = now;
            differs
        });
    }

    fn now(&self) -> Tunnels {
        let current = self.pod_network.as_ref().and_then(CurrentPodNetwork::get);
        current.map_or_else(|| self.first.clone(), |network| Tunnels::of_windows(&network))
    }

    /// The type of a Windows node's network, if other nodes must know it. Only one without encapsulation has no tunnel.
    fn hns_network(&self) -> Option<&'static str> {
        (self.pod_network.is_some() && self.now().vxlan.is_empty()).then_some(Node::L2BRIDGE)
    }
}

/// Writes the annotations of the Node, unless they are current. A tunnel that the node no longer has is taken out. Returns the families of flannel's networks for which the other nodes know the
/// node's address.
async fn annotate(
    store: &dyn Endpoints,
    node: &str,
    announced: &mut Announced,
) -> Result<Vec<IpVersion>, AgentError> {
    let key = Key::global(Kind::Node, node);
    let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
    let current = &stored.value["metadata"]["annotations"];
    let (finder, with_flannel) = (&announced.finder, announced.lease.is_some());
    let found = look(&stored.value, finder, with_flannel, &mut announced.missing, now()).await;
    let OwnAddresses { mut annotations, of_flannel: kept } = found;
    announced.report_missing();
    let (tunnels, lease) = (announced.now(), announced.lease.as_ref());
    annotations.insert(Node::IPIP_ADDRESS, tunnels.ipip.map(|address| address.to_string()));
    annotations.insert(Node::HNS_NETWORK, announced.hns_network().map(str::to_owned));
    for (version, [address, mac]) in TUNNELS {
        let tunnel = tunnels.vxlan.iter().find(|tunnel| IpVersion::of(&tunnel.address) == version);
        annotations.insert(address, tunnel.map(|tunnel| tunnel.address.to_string()));
        annotations.insert(mac, tunnel.and_then(|tunnel| tunnel.mac.clone()));
    }
    annotations.insert(flannel_etcd::SUBNETS, None);
    let addresses = IpVersion::ALL.map(|version| own_address(current, &annotations, version));
    let mut families = match (&announced.etcd_lease, lease) {
        (Some(etcd_lease), _) => {
            etcd_lease.tell(node, &OwnEnd { addresses, macs: tunnels.macs(node) })?;
            annotations.extend([etcd_lease.annotation()]);
            annotations.extend(flannel::stale_annotations(node, current));
            lease.map(OwnLease::families).unwrap_or_default()
        }
        (None, None) => {
            annotations.extend(flannel::stale_annotations(node, current));
            Vec::new()
        }
        (None, Some(lease)) => {
            let own = |version: IpVersion| own_address(current, &annotations, version);
            let mac = tunnels.vxlan.iter().find_map(|tunnel| tunnel.mac.as_deref());
            let mut of_flannel = lease.annotations(node, mac, own)?;
            let has_address = |version: &IpVersion| {
                of_flannel.get(Node::FLANNEL_ADDRESS.of(*version)).is_some_and(Option::is_some)
            };
            let families = lease.families().into_iter().filter(has_address).collect();
            for names in [Node::FLANNEL_ADDRESS, Node::FLANNEL_DATA] {
                let is_kept = |name: &str| kept.iter().any(|version| names.of(*version) == name);
                of_flannel.retain(|name, value| value.is_some() || !is_kept(name));
            }
            annotations.extend(of_flannel);
            families
        }
    };
    // New pods get no addresses of a family in which other nodes cannot reach this one.
    let lost = announced.missing.given_up();
    let is_overwritten = |version: &IpVersion| current[Node::FLANNEL_OVERWRITE.of(*version)].is_string();
    families.retain(|version| !lost.contains(version) || is_overwritten(version));
    annotations.retain(|name, value| current[*name].as_str() != value.as_deref());
    if !annotations.is_empty() {
        store.annotate_node(node, &annotations).await?;
    }
    Ok(families)
}

/// Of each family: the annotations of its tunnel address, and of the MAC address there.
const TUNNELS: [(IpVersion, [&str; 2]); 2] = [
    (IpVersion::V4, [Node::VXLAN_ADDRESS, Node::VXLAN_MAC]),
    (IpVersion::V6, [Node::VXLAN_ADDRESS_V6, Node::VXLAN_MAC_V6]),
];

/// Restores the node's announcements whenever somebody changes the Node, and updates them when HNS has recreated the
/// overlay network with another MAC address, when IPAM has released a tunnel address, or when pools come or go. Ends
/// only when the future is dropped.
pub(crate) async fn keep_announced(
    store: Arc<dyn Endpoints>,
    ipam: Arc<Ipam>,
    node: String,
    mut announced: Announced,
    mut in_force: watch::Receiver<Arc<InForce>>,
) {
    let mut backoff = Backoff::new(random_seed());
    let mut interests =
        vec![Interest::in_object(&Key::global(Kind::Node, &node)), Interest::all(Kind::IpPool)];
    // It has the VXLAN network identifier.
    interests.extend(announced.lease.as_ref().map(|_| Interest::all(Kind::FelixConfiguration)));
    let mut changes = store.follow(interests);
    let mut written = announced.now();
    let mut leases = announced.etcd_lease.as_ref().map(EtcdLease::snapshot);
    // The start has told the node's address, and the key may have it since.
    let mut address = None;
    let machine = announced.finder.machine.clone();
    let moved = Arc::new(Notify::new());
    let watch = machine.watch(moved.clone()).inspect_err(|error| {
        let seconds = LOOK_INTERVAL.as_secs();
        tracing::warn!(%error, "cannot watch the machine's addresses; Tortie looks at them every {seconds} seconds");
    });
    let mut addresses = machine.global_addresses();
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    // They may begin late.
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = flannel_etcd::address_changed(&mut leases, address) => {}
            _ = looks.tick(), if watch.is_err() || announced.needs_looks() => {}
            () = moved.notified() => {
                tokio::time::sleep(SETTLE).await;
                let now = machine.global_addresses();
                if now == addresses {
                    // Those of links of pods, which come and go with them.
                    continue;
                }
                addresses = now;
            }
            change = changes.next() => match change {
                Some(Change::Put(_)) => {}
                // A Node that is gone needs no addresses.
                Some(Change::Gone { key, .. }) if key.kind != Kind::Node => {}
                _ => continue,
            },
            changed = in_force.changed() => {
                if changed.is_err() {
                    // The dataplane has ended, so nothing can change any more.
                    return std::future::pending().await;
                }
                if announced.now() == written {
                    continue;
                }
                tracing::warn!(node, "HNS has recreated the overlay network; Tortie publishes its new MAC address");
            }
        }
        address = leases.as_ref().and_then(|leases| leases.borrow().address);
        loop {
            // Somebody may lock the datastore between two attempts, to copy it to another one.
            if in_force.wait_for(|now| now.lock.is_none()).await.is_err() {
                return std::future::pending().await;
            }
            let Err(error) = announce(&*store, &ipam, &node, &mut announced).await else { break };
            match &error {
                AgentError::Node { .. } => {
                    tracing::warn!(%error, "the Node keeps what was announced; Tortie retries")
                }
                _ => tracing::debug!(%error, "cannot annotate the Node; Tortie retries"),
            }
            backoff.wait().await;
        }
        written = announced.now();
        backoff.succeeded();
    }
}

/// Announces what the node has now.
async fn announce(
    store: &dyn Endpoints,
    ipam: &Ipam,
    node: &str,
    announced: &mut Announced,
) -> Result<(), AgentError> {
    // What was announced stays if something does not fit any more, and the rest is up to date.
    let mut unfit = match &announced.etcd_lease {
        Some(etcd_lease) => etcd_lease.check(store, node).await.err(),
        None => None,
    };
    if announced.pod_network.is_none() {
        if announced.lease.is_some() && announced.etcd_lease.is_none() {
            match OwnLease::read(store, node, &IpVersion::ALL).await {
                Ok(lease) => announced.lease = Some(lease),
                Err(error) => unfit = Some(error),
            }
        }
        let mut now = announce_tunnels(store, ipam, node, announced).await?;
        if tunnels::release_stale(store, ipam, node).await? {
            now = announce_tunnels(store, ipam, node, announced).await?;
        }
        // Pods get addresses of a family when the other nodes can know the way there.
        announced.families.send_if_modified(|known| {
            let differs = *known != now;
            *known = now;
            differs
        });
    } else {
        annotate(store, node, announced).await?;
        if let Some(ipv6) = &announced.ipv6 {
            // A pool or an address may have come. The dataplane sees the block.
            ipv6.look_again(store, node, ipam).await?;
        }
    }
    unfit.map_or(Ok(()), Err)
}

/// Announces a Linux node with the tunnels that it has now. Returns the same as [`annotate`].
async fn announce_tunnels(
    store: &dyn Endpoints,
    ipam: &Ipam,
    node: &str,
    announced: &mut Announced,
) -> Result<Vec<IpVersion>, AgentError> {
    let tunnels = Tunnels::of_linux(store, ipam, node, announced.lease.as_ref()).await?;
    if tunnels != announced.first {
        let (old, new) = (announced.first.addresses(), tunnels.addresses());
        tracing::warn!(
            node,
            ?old,
            ?new,
            "the node's tunnel addresses have changed; Tortie announces the new ones"
        );
        announced.first = tunnels;
    }
    annotate(store, node, announced).await
}

#[cfg(test)]
mod tests;

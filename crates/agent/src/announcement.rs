//! What the node announces to the others by annotations of its Node: its own addresses and its tunnel ends.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_ipam::Ipam;
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Endpoints, Interest, StoreError};
use tortie_windows::{CurrentPodNetwork, PodNetwork};

use crate::AgentError;
#[cfg(target_os = "linux")]
use crate::Extras;
use crate::flannel::{self, OwnLease};
#[cfg(target_os = "linux")]
use crate::flannel_etcd::LeaseKeeper;
use crate::flannel_etcd::{self, EtcdLease};
use crate::node_address::AddressFinder;
#[cfg(target_os = "linux")]
use crate::node_address::Machine;
use crate::own_addresses::{own_address, own_annotations};
use crate::plane::InForce;
use crate::tunnels::{self, Tunnels};
use crate::windows_ipv6::WindowsIpv6;

/// How often the interfaces of the machine are looked at, if they decide about the node's address (as in Calico).
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

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
}

impl Announced {
    /// Takes the tunnel addresses of a Linux node, and announces them. The MAC addresses are derived from the node's name. With
    /// flannel's leases in etcd, takes one, which somebody must keep.
    #[cfg(target_os = "linux")]
    pub(crate) async fn on_linux(
        store: &dyn Endpoints,
        ipam: &Ipam,
        node: &str,
        extras: &Extras,
    ) -> Result<(Self, Option<LeaseKeeper>), AgentError> {
        let finder = AddressFinder { methods: extras.address_methods.clone(), machine: Machine::Linux };
        let (mut etcd_lease, mut keeper) = (None, None);
        let lease = match &extras.flannel_etcd {
            Some(etcd) => {
                let key = Key::global(Kind::Node, node);
                let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
                let own = own_annotations(node, &stored.value, &finder, true).await?;
                let current = &stored.value["metadata"]["annotations"];
                let addresses = IpVersion::ALL.map(|version| own_address(current, &own, version));
                let previous = current[flannel_etcd::SUBNETS].as_str();
                let (taken, keeping) = EtcdLease::acquire(store, node, etcd, &addresses, previous).await?;
                let lease = OwnLease::of_subnets(taken.subnets().collect(), taken.vni());
                (etcd_lease, keeper) = (Some(taken), Some(keeping));
                Some(lease)
            }
            None if extras.flannel => Some(OwnLease::read(store, node, &IpVersion::ALL).await?),
            None => None,
        };
        let first = Tunnels::of_linux(store, ipam, node, lease.as_ref()).await?;
        let families = watch::Sender::default();
        let (pod_network, ipv6) = (None, None);
        let announced = Self { first, finder, lease, etcd_lease, pod_network, ipv6, families };
        let families = annotate(store, node, &announced).await?;
        announced.families.send_replace(families);
        Ok((announced, keeper))
    }

    /// Announces the network of a Windows node.
    pub(crate) async fn on_windows(
        store: &dyn Endpoints,
        node: &str,
        network: &PodNetwork,
        current: CurrentPodNetwork,
        finder: AddressFinder,
        lease: Option<OwnLease>,
        ipv6: Option<WindowsIpv6>,
    ) -> Result<Self, AgentError> {
        let first = Tunnels::of_windows(network);
        let (etcd_lease, families) = (None, watch::Sender::default());
        let pod_network = Some(current);
        let announced = Self { first, finder, lease, etcd_lease, pod_network, ipv6, families };
        annotate(store, node, &announced).await?;
        Ok(announced)
    }

    /// The families of a Linux node's pods, if their addresses are those of flannel's networks.
    #[cfg(target_os = "linux")]
    pub(crate) fn families(&self) -> Option<watch::Receiver<Vec<IpVersion>>> {
        self.lease.as_ref().map(|_| self.families.subscribe())
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

/// Writes the annotations of the Node, unless they are current. A tunnel that the node no longer has is taken out. Fails, and
/// writes nothing, if a method finds no address. Returns the families of flannel's networks for which the other nodes know the
/// node's address.
async fn annotate(
    store: &dyn Endpoints,
    node: &str,
    announced: &Announced,
) -> Result<Vec<IpVersion>, AgentError> {
    let key = Key::global(Kind::Node, node);
    let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
    let current = &stored.value["metadata"]["annotations"];
    let (tunnels, lease) = (announced.now(), announced.lease.as_ref());
    let mut annotations = own_annotations(node, &stored.value, &announced.finder, lease.is_some()).await?;
    annotations.insert(Node::IPIP_ADDRESS, tunnels.ipip.map(|address| address.to_string()));
    annotations.insert(Node::HNS_NETWORK, announced.hns_network().map(str::to_owned));
    for (version, [address, mac]) in TUNNELS {
        let tunnel = tunnels.vxlan.iter().find(|tunnel| IpVersion::of(&tunnel.address) == version);
        annotations.insert(address, tunnel.map(|tunnel| tunnel.address.to_string()));
        annotations.insert(mac, tunnel.and_then(|tunnel| tunnel.mac.clone()));
    }
    annotations.insert(flannel_etcd::SUBNETS, None);
    let own = IpVersion::ALL.map(|version| own_address(current, &annotations, version));
    let families = match (&announced.etcd_lease, lease) {
        (Some(etcd_lease), _) => {
            etcd_lease.tell(node, &own)?;
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
            let of_flannel = lease.annotations(node, mac, own)?;
            let has_address = |version: &IpVersion| {
                of_flannel.get(Node::FLANNEL_ADDRESS.of(*version)).is_some_and(Option::is_some)
            };
            let families = lease.families().into_iter().filter(has_address).collect();
            annotations.extend(of_flannel);
            families
        }
    };
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
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    loop {
        tokio::select! {
            // Changes of the machine's addresses are not watched.
            _ = looks.tick(), if announced.finder.methods.ask_the_machine() => {}
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
        if in_force.wait_for(|now| now.lock.is_none()).await.is_err() {
            return std::future::pending().await;
        }
        while let Err(error) = announce(&*store, &ipam, &node, &mut announced).await {
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
    let mut unfit = None;
    if announced.pod_network.is_none() {
        // What was announced stays if something does not fit any more, and the rest is up to date.
        if let Some(etcd_lease) = &announced.etcd_lease {
            unfit = etcd_lease.check(store, node).await.err();
        } else if announced.lease.is_some() {
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
mod tests {
    use std::collections::BTreeMap;
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::node_address::AddressMethods;
    use crate::tunnels::{vxlan_address, vxlan_addresses};
    use serde_json::json;
    use tortie_ipam::{Family, Request};
    use tortie_store::{Embedded, Store};

    fn finder(methods: AddressMethods) -> AddressFinder {
        AddressFinder { methods, machine: Machine::Linux }
    }

    fn announced(first: Tunnels, methods: AddressMethods) -> Announced {
        let (lease, etcd_lease, pod_network, families) = Default::default();
        Announced { first, finder: finder(methods), lease, etcd_lease, pod_network, ipv6: None, families }
    }

    #[tokio::test]
    async fn annotations_of_any_shape_cause_no_failure() {
        let tunnel = Tunnels::derived(vec![Ipv4Addr::new(10, 0, 0, 1).into()]);
        let told = json!({Node::VXLAN_ADDRESS: "10.0.0.1"});
        let table = [
            (json!({"name": "n"}), Some(&told)),
            (json!({"name": "n", "annotations": null}), Some(&told)),
            (json!({"name": "n", "annotations": {Node::VXLAN_MAC: "old"}}), Some(&told)),
            (json!({"name": "n", "annotations": "text"}), None),
            (json!({"name": "n", "annotations": [1]}), None),
            (json!("text"), None),
        ];
        for (metadata, expected) in table {
            let store = Embedded::in_memory().unwrap();
            let key = Key::global(Kind::Node, "n");
            store.create(&key, json!({"metadata": metadata})).await.unwrap();
            let result = annotate(&store, "n", &announced(tunnel.clone(), AddressMethods::default())).await;
            assert_eq!(result.is_ok(), expected.is_some(), "{metadata}: {result:?}");
            if let Some(expected) = expected {
                let after = store.get(&key).await.unwrap().unwrap().value;
                assert_eq!(after["metadata"]["annotations"], *expected, "{metadata}");
            }
        }
    }

    /// Other nodes would not reach the pods' IPv6 addresses.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn pods_have_the_families_for_which_the_node_has_an_address() {
        let v4 = json!({Node::ADDRESS: "192.0.2.1/24"});
        let both = json!({Node::ADDRESS: "192.0.2.1/24", Node::ADDRESS_V6: "2001:db8::1/64"});
        for (annotations, expected) in [(v4, &[IpVersion::V4][..]), (both, &IpVersion::ALL)] {
            let store = Embedded::in_memory().unwrap();
            let node = json!({"metadata": {"name": "n", "annotations": annotations}});
            store.create(&Key::global(Kind::Node, "n"), node).await.unwrap();
            let subnets = ["10.5.1.0/24", "fd00:5:1::/64"].map(|net| net.parse().unwrap());
            let lease = Some(OwnLease::of_subnets(subnets.to_vec(), None));
            let none = announced(Tunnels::derived(vec![]), AddressMethods::default());
            let families = annotate(&store, "n", &Announced { lease, ..none }).await.unwrap();
            assert_eq!(families, expected);
        }
    }

    async fn with_pool() -> Arc<Embedded> {
        let store = Arc::new(Embedded::in_memory().unwrap());
        let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.0.0.0/26", "blockSize": 30, "vxlanMode": "Always"}});
        store.create(&Key::global(Kind::IpPool, "p"), pool).await.unwrap();
        let config = json!({"strict_affinity": false, "auto_allocate_blocks": true});
        store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
        store
    }

    /// The controllers have released the addresses of a node that was away for long. Another node may have them.
    #[tokio::test]
    async fn a_released_tunnel_address_is_not_announced_again() {
        let store = with_pool().await;
        let key = Key::global(Kind::Node, "n");
        let value = || json!({"metadata": {"name": "n"}});
        store.create(&key, value()).await.unwrap();
        let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
        let address = vxlan_address(&ipam, "n", Family::V4).await.unwrap().unwrap();
        assert_eq!(vxlan_addresses(&ipam, "n").await.unwrap(), [address], "a node keeps its address");
        let first = Tunnels::derived(vec![address]);
        let announced = announced(first, AddressMethods::default());
        let (_keep, in_force) = watch::channel(Arc::default());
        let keeping =
            tokio::spawn(keep_announced(store.clone(), ipam.clone(), "n".to_owned(), announced, in_force));
        let announces = async |expected: Option<IpAddr>| loop {
            let stored = store.get(&key).await.unwrap();
            let annotations = stored.map(|stored| stored.value["metadata"]["annotations"].clone());
            let found = annotations.and_then(|all| all[Node::VXLAN_ADDRESS].as_str()?.parse::<IpAddr>().ok());
            if let Some(found) = found.filter(|found| expected.is_none_or(|expected| *found == expected)) {
                return found;
            }
            tokio::task::yield_now().await;
        };
        announces(Some(address)).await;

        store.delete(&key, None).await.unwrap();
        ipam.release("vxlan-tunnel-addr-n").await.unwrap();
        for number in 0.. {
            let request = Request { handle: format!("pod.{number}"), ..Request::default() };
            if ipam.assign(&request).await.unwrap().address == address {
                break;
            }
        }
        store.create(&key, value()).await.unwrap();
        let now = announces(None).await;
        assert_ne!(now, address);
        let owners = ipam.find("vxlan-tunnel-addr-n").await.unwrap();
        assert_eq!(owners.iter().map(|one| one.address).collect::<Vec<_>>(), [now]);
        keeping.abort();
    }

    /// What `tortie pool migrate` does: it closes the pool, releases the tunnel address, and then changes an annotation of the Node.
    #[tokio::test]
    async fn a_node_takes_a_tunnel_address_of_another_pool_when_its_own_is_released() {
        let store = with_pool().await;
        let key = Key::global(Kind::Node, "n");
        store.create(&key, json!({"metadata": {"name": "n"}})).await.unwrap();
        let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
        let old = vxlan_address(&ipam, "n", Family::V4).await.unwrap().unwrap();
        let first = Tunnels::derived(vec![old]);
        let announced = announced(first, AddressMethods::default());
        let (_keep, in_force) = watch::channel(Arc::default());
        // An agent that has not used the pool for some seconds.
        let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
        let keeping =
            tokio::spawn(keep_announced(store.clone(), ipam.clone(), "n".to_owned(), announced, in_force));
        let announces = async |is_it: &dyn Fn(&str) -> bool| loop {
            let node = store.get(&key).await.unwrap().unwrap();
            let told = node.value["metadata"]["annotations"][Node::VXLAN_ADDRESS].as_str().map(str::to_owned);
            if let Some(told) = told.filter(|told| is_it(told)) {
                return told;
            }
            tokio::task::yield_now().await;
        };
        announces(&|told| told == old.to_string()).await;

        let pool = Key::global(Kind::IpPool, "p");
        let stored = store.get(&pool).await.unwrap().unwrap();
        let mut closed = stored.value;
        closed["spec"]["disabled"] = json!(true);
        store.update(&pool, closed, &stored.version).await.unwrap();
        let new = json!({"metadata": {"name": "q"}, "spec": {"cidr": "10.9.0.0/26", "blockSize": 30, "vxlanMode": "Always"}});
        store.create(&Key::global(Kind::IpPool, "q"), new).await.unwrap();
        let block = ipam.find("vxlan-tunnel-addr-n").await.unwrap()[0].block;
        let release = tortie_ipam::Release { address: old, handle: None, sequence_number: None };
        tortie_ipam::Records::new(store.clone()).release_addresses(block, &[release]).await.unwrap();
        let changed = BTreeMap::from([("tortie.io/pool-migration", Some("{}".to_owned()))]);
        store.annotate_node("n", &changed).await.unwrap();
        let told = announces(&|told| told != old.to_string()).await;
        assert!(told.starts_with("10.9.0."), "{told}");
        keeping.abort();
    }

    /// A node that gets no IPv6 block serves IPv4 pods.
    #[tokio::test]
    async fn a_full_ipv6_pool_costs_only_the_ipv6_tunnel() {
        let store = Arc::new(Embedded::in_memory().unwrap());
        for (name, cidr, size) in [("p", "10.0.0.0/26", 28), ("six", "fd00::/122", 122)] {
            let spec = json!({"cidr": cidr, "blockSize": size, "vxlanMode": "Always"});
            let pool = json!({"metadata": {"name": name}, "spec": spec});
            store.create(&Key::global(Kind::IpPool, name), pool).await.unwrap();
        }
        let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
        store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
        let addresses = async |node: &str| {
            vxlan_addresses(&Ipam::new(store.clone(), node, BTreeMap::new()), node).await.unwrap()
        };
        let first = addresses("one").await;
        assert_eq!(first.iter().map(IpVersion::of).collect::<Vec<_>>(), IpVersion::ALL);
        assert_eq!(addresses("one").await, first, "a node keeps its addresses");
        let second = addresses("two").await;
        assert_eq!(second.iter().map(IpVersion::of).collect::<Vec<_>>(), [IpVersion::V4]);
    }

    /// Nobody else tells the other nodes the address of a node of Kubernetes.
    #[tokio::test]
    async fn the_address_of_the_kubelet_is_used_unless_there_is_another() {
        let tunnel = Tunnels::derived(vec![Ipv4Addr::new(10, 0, 0, 1).into()]);
        let status = json!({"addresses": [
            {"type": "Hostname", "address": "n"},
            {"type": "InternalIP", "address": "fd00::1"},
            {"type": "InternalIP", "address": "192.0.2.1"},
        ]});
        for (annotations, expected) in
            [(json!({}), json!("192.0.2.1")), (json!({Node::ADDRESS: "192.0.2.9/24"}), json!("192.0.2.9/24"))]
        {
            let store = Embedded::in_memory().unwrap();
            let key = Key::global(Kind::Node, "n");
            let value = json!({"metadata": {"name": "n", "annotations": annotations}, "status": status});
            store.create(&key, value).await.unwrap();
            annotate(&store, "n", &announced(tunnel.clone(), AddressMethods::default())).await.unwrap();
            let after = store.get(&key).await.unwrap().unwrap().value;
            assert_eq!(after["metadata"]["annotations"][Node::ADDRESS], expected);
            assert_eq!(after["metadata"]["annotations"][Node::ADDRESS_V6], "fd00::1");
        }
    }

    /// A method has precedence over what the kubelet reports and over an annotation. If it finds nothing, nothing changes. A new
    /// address is found by a later look.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_address_that_a_method_finds_is_announced() {
        use tortie_kernel::namespace::NetNs;
        use tortie_kernel::route::{Address, Change, NewLink, NewLinkKind, RouteSocket};

        let announce = async || {
            let mut routes = RouteSocket::open().unwrap();
            let (name, kind) = ("eth0", NewLinkKind::Bridge);
            routes.create(&NewLink { name, kind, mac: None, mtu: None, up: true, controller: None }).unwrap();
            let link = routes.link(name).unwrap().unwrap().index;
            let address = Address { link, address: Ipv4Addr::new(192, 0, 2, 10).into(), prefix_length: 24 };
            routes.change(&Change::AddAddress(address)).unwrap();
            let status = json!({"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]});
            for (current, method, expected) in [
                (None, "first-found", Some("192.0.2.10/24")),
                (Some("192.0.2.9/24"), "interface=eth0", Some("192.0.2.10/24")),
                (Some("192.0.2.9/24"), "interface=eth1", None),
            ] {
                let store = Embedded::in_memory().unwrap();
                let key = Key::global(Kind::Node, "n");
                let annotations = json!({Node::ADDRESS: current});
                let value = json!({"metadata": {"name": "n", "annotations": annotations}, "status": status});
                store.create(&key, value.clone()).await.unwrap();
                let ipv4 = method.parse().unwrap();
                let methods = AddressMethods { ipv4, ..AddressMethods::default() };
                let written = annotate(&store, "n", &announced(Tunnels::default(), methods)).await;
                let after = store.get(&key).await.unwrap().unwrap().value;
                match expected {
                    Some(expected) => {
                        assert_eq!(after["metadata"]["annotations"][Node::ADDRESS], expected, "{method}");
                    }
                    None => {
                        assert!(written.unwrap_err().to_string().contains("eth0 (192.0.2.10/24)"));
                        assert_eq!(after, value, "{method}");
                    }
                }
            }
            let store = with_pool().await;
            let key = Key::global(Kind::Node, "n");
            store.create(&key, json!({"metadata": {"name": "n"}})).await.unwrap();
            let ipam = Arc::new(Ipam::new(store.clone(), "n", BTreeMap::new()));
            let methods =
                AddressMethods { ipv4: "first-found".parse().unwrap(), ..AddressMethods::default() };
            let announced = announced(Tunnels::default(), methods);
            let (_keep, in_force) = watch::channel(Arc::default());
            tokio::spawn(keep_announced(store.clone(), ipam, "n".to_owned(), announced, in_force));
            let announces = async |expected: &str| {
                for _ in 0..3_000 {
                    let node = store.get(&key).await.unwrap().unwrap().value;
                    if node["metadata"]["annotations"][Node::ADDRESS] == expected {
                        return;
                    }
                    // The store's thread needs real time, and the look its minute.
                    std::thread::sleep(Duration::from_millis(10));
                    tokio::time::sleep(LOOK_INTERVAL).await;
                }
                panic!("{expected} is not announced");
            };
            announces("192.0.2.10/24").await;
            let new = Address { address: Ipv4Addr::new(192, 0, 2, 20).into(), ..address };
            routes.change(&Change::DeleteAddress(address)).unwrap();
            routes.change(&Change::AddAddress(new)).unwrap();
            announces("192.0.2.20/24").await;
        };
        let run = || {
            let builder = &mut tokio::runtime::Builder::new_current_thread();
            // Minutes pass at once.
            let runtime = builder.enable_all().start_paused(true).build().unwrap();
            runtime.block_on(announce());
        };
        NetNs::create().unwrap().run(run).unwrap();
    }
}

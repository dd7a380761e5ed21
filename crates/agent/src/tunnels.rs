//! The tunnel ends of a node: their addresses, which IPAM gives.

use std::net::IpAddr;

use tortie_api::net::{IpVersion, MacAddress};
use tortie_api::{Kind, Resource};
use tortie_calc::vtep_mac;
use tortie_ipam::{Family, Ipam, IpamError, Request, Use};
use tortie_store::{Store, Stored};
use tortie_windows::PodNetwork;

use crate::AgentError;
use crate::flannel::OwnLease;

/// What the other nodes must know about this node's tunnels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tunnels {
    /// At most one of each family.
    pub vxlan: Vec<VxlanTunnel>,
    /// The address of its IPIP link.
    pub ipip: Option<IpAddr>,
}

/// The tunnel address in a family, and its MAC address if that is not derived from the node's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VxlanTunnel {
    pub address: IpAddr,
    pub mac: Option<String>,
}

impl Tunnels {
    /// Those of a Windows node.
    pub(crate) fn of_windows(network: &PodNetwork) -> Self {
        let tunnel =
            |mac: MacAddress| VxlanTunnel { address: network.gateway.into(), mac: Some(mac.to_string()) };
        Self { vxlan: network.router_mac.map(tunnel).into_iter().collect(), ipip: None }
    }

    /// Those of a Linux node: in a cluster with flannel, that of its daemons.
    pub(crate) async fn of_linux(
        store: &dyn Store,
        ipam: &Ipam,
        node: &str,
        lease: Option<&OwnLease>,
    ) -> Result<Self, AgentError> {
        if let Some(lease) = lease {
            return Ok(Self::derived(lease.tunnel_addresses()));
        }
        let ipip = ipip_address(store, ipam, node).await?;
        Ok(Self { ipip, ..Self::derived(vxlan_addresses(ipam, node).await?) })
    }

    /// VXLAN tunnels whose MAC addresses are derived from the node's name.
    pub(crate) fn derived(addresses: Vec<IpAddr>) -> Self {
        let vxlan = addresses.into_iter().map(|address| VxlanTunnel { address, mac: None });
        Self { vxlan: vxlan.collect(), ipip: None }
    }

    /// The MAC addresses of the VXLAN tunnels, IPv4 first. `None` if there is no tunnel.
    pub(crate) fn macs(&self, node: &str) -> Option<[MacAddress; 2]> {
        let chosen = self.vxlan.first()?.mac.as_deref();
        let chosen = chosen.and_then(|mac| mac.parse().ok());
        let [derived, derived_v6] = derived_macs(node);
        Some([chosen.unwrap_or(derived), derived_v6])
    }

    /// All addresses.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.vxlan.iter().map(|tunnel| tunnel.address).chain(self.ipip).collect()
    }
}

/// The MAC addresses of the tunnels of a Linux node, IPv4 first.
pub(crate) fn derived_macs(node: &str) -> [MacAddress; 2] {
    IpVersion::ALL.map(|version| vtep_mac(node, version))
}

/// The addresses for VXLAN of a Linux node, one of each family that has a pool. Without any pool, it is an error.
pub(crate) async fn vxlan_addresses(ipam: &Ipam, node: &str) -> Result<Vec<IpAddr>, AgentError> {
    let mut addresses = Vec::new();
    addresses.extend(vxlan_address(ipam, node, Family::V4).await?);
    match vxlan_address(ipam, node, Family::V6).await {
        Ok(address) => addresses.extend(address),
        // Without IPv6 pods of other nodes, the node is of use.
        Err(AgentError::Ipam(error)) if !addresses.is_empty() && !matches!(error, IpamError::Store(_)) => {
            tracing::warn!(node, %error, "the node gets no IPv6 tunnel address, so it has no overlay for IPv6; enlarge the pool");
        }
        Err(error) => return Err(error),
    }
    if addresses.is_empty() {
        addresses.push(ipam.assign(&vxlan_request(node, Family::V4)).await?.address);
    }
    Ok(addresses)
}

/// The tunnel address of a family: one of the node's own, under Calico's handle; `None` if no pool gives one. A node keeps its
/// address, also when its pool is disabled or full. If the address was released, because the node was thought to be gone, it
/// gets another one.
pub(crate) async fn vxlan_address(
    ipam: &Ipam,
    node: &str,
    family: Family,
) -> Result<Option<IpAddr>, AgentError> {
    let request = vxlan_request(node, family);
    let known = ipam.find(&request.handle).await?;
    if let Some(assignment) = known.first() {
        return Ok(Some(assignment.address));
    }
    if !ipam.has_pool(&request).await? {
        return Ok(None);
    }
    Ok(Some(ipam.assign(&request).await?.address))
}

/// The address for IPIP, of a pool with IPIP. An address whose pool has IPIP no longer is none, and is released by
/// [`release_stale`] when the node no longer announces it. Pools without a free address cost IPIP only.
async fn ipip_address(store: &dyn Store, ipam: &Ipam, node: &str) -> Result<Option<IpAddr>, AgentError> {
    let request = ipip_request(node);
    if let Some(known) = ipam.find(&request.handle).await?.first() {
        return Ok(has_ipip(store, known.address).await?.then_some(known.address));
    }
    if !ipam.has_pool(&request).await? {
        return Ok(None);
    }
    match ipam.assign(&request).await {
        Ok(assignment) => Ok(Some(assignment.address)),
        Err(error @ IpamError::Exhausted { .. }) => {
            tracing::warn!(node, %error, "the node gets no tunnel address for IPIP; enlarge the pool");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Releases the address for IPIP if its pool has IPIP no longer. Nobody may announce it any more, because a pod may get it next.
/// Returns whether there was one.
pub(crate) async fn release_stale(store: &dyn Store, ipam: &Ipam, node: &str) -> Result<bool, AgentError> {
    let handle = ipip_request(node).handle;
    let Some(known) = ipam.find(&handle).await?.into_iter().next() else { return Ok(false) };
    if has_ipip(store, known.address).await? {
        return Ok(false);
    }
    tracing::info!(node, address = %known.address, "releasing the tunnel address for IPIP, because its pool has no IPIP any more");
    ipam.release(&handle).await?;
    Ok(true)
}

/// Whether the address is of a pool with IPIP, also of a disabled one.
async fn has_ipip(store: &dyn Store, address: IpAddr) -> Result<bool, AgentError> {
    let pools = store.list(Kind::IpPool).await?.items;
    let has_it = |stored: &Stored| match Resource::read(&stored.key, &stored.value) {
        Ok(Resource::IpPool(pool)) => pool.has_ipip() && pool.spec.cidr.contains(&address),
        _ => false,
    };
    Ok(pools.iter().any(has_it))
}

fn ipip_request(node: &str) -> Request {
    let request = request(node, Family::V4, ("ipip-tunnel-addr", "ipipTunnelAddress"));
    Request { intended_use: Use::IpipTunnel, ..request }
}

fn vxlan_request(node: &str, family: Family) -> Request {
    let names = match family {
        Family::V4 => ("vxlan-tunnel-addr", "vxlanTunnelAddress"),
        Family::V6 => ("vxlan-v6-tunnel-addr", "vxlanV6TunnelAddress"),
    };
    request(node, family, names)
}

fn request(node: &str, family: Family, (handle, kind): (&str, &str)) -> Request {
    let owner = [("node", node), ("type", kind)];
    Request {
        handle: format!("{handle}-{node}"),
        owner: owner.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        intended_use: Use::Tunnel,
        family,
        ..Request::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use serde_json::json;
    use tortie_api::Key;
    use tortie_store::Embedded;

    use super::*;

    /// Writes a pool with this mode of IPIP.
    async fn put(store: &Embedded, name: &str, cidr: &str, ipip: &str, disabled: bool) {
        let key = Key::global(Kind::IpPool, name);
        let vxlan = if ipip == "Never" { "Always" } else { "Never" };
        let spec = json!({"cidr": cidr, "blockSize": 30, "vxlanMode": vxlan, "ipipMode": ipip, "disabled": disabled});
        let value = json!({"metadata": {"name": name}, "spec": spec});
        match store.get(&key).await.unwrap() {
            Some(stored) => drop(store.update(&key, value, &stored.version).await.unwrap()),
            None => drop(store.create(&key, value).await.unwrap()),
        }
    }

    /// The network of the node's address for IPIP.
    async fn network(store: &Arc<Embedded>) -> Option<String> {
        // Each is an agent that has not read the pools yet.
        let ipam = Ipam::new(store.clone(), "n", BTreeMap::new());
        let find = async || Tunnels::of_linux(&**store, &ipam, "n", None).await.unwrap();
        let mut tunnels = find().await;
        if release_stale(&**store, &ipam, "n").await.unwrap() {
            assert_eq!(tunnels.ipip, None, "it is released when nobody announces it");
            tunnels = find().await;
        }
        let known = ipam.find("ipip-tunnel-addr-n").await.unwrap();
        let known: Vec<IpAddr> = known.iter().map(|one| one.address).collect();
        assert_eq!(known, tunnels.ipip.into_iter().collect::<Vec<_>>());
        assert!(!tunnels.vxlan.iter().any(|one| Some(one.address) == tunnels.ipip), "{tunnels:?}");
        tunnels.ipip.map(|address| address.to_string().rsplit_once('.').unwrap().0.to_owned())
    }

    #[tokio::test]
    async fn a_node_has_an_address_for_ipip_of_a_pool_with_ipip_only() {
        let store = Arc::new(Embedded::in_memory().unwrap());
        let config = json!({"strict_affinity": false, "auto_allocate_blocks": true});
        store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
        put(&store, "vxlan", "10.1.0.0/24", "Never", false).await;
        assert_eq!(network(&store).await, None);
        put(&store, "old", "10.2.0.0/24", "CrossSubnet", false).await;
        assert_eq!(network(&store).await.as_deref(), Some("10.2.0"));
        put(&store, "new", "10.3.0.0/24", "Always", false).await;
        put(&store, "old", "10.2.0.0/24", "CrossSubnet", true).await;
        assert_eq!(network(&store).await.as_deref(), Some("10.2.0"), "a node keeps its address");
        put(&store, "old", "10.2.0.0/24", "Never", false).await;
        assert_eq!(network(&store).await.as_deref(), Some("10.3.0"), "the old pool has VXLAN now");
        put(&store, "new", "10.3.0.0/24", "Never", false).await;
        assert_eq!(network(&store).await, None, "and its address is released");
        // As after a move from Calico: a node joins, and the old pool gives no addresses.
        put(&store, "old", "10.2.0.0/24", "CrossSubnet", true).await;
        assert_eq!(network(&store).await, None, "no pool gives an address");
        put(&store, "new", "10.3.0.0/24", "Always", false).await;
        assert_eq!(network(&store).await.as_deref(), Some("10.3.0"), "a disabled pool is in nobody's way");
    }

    #[tokio::test]
    async fn a_full_pool_costs_ipip_only() {
        let store = Arc::new(Embedded::in_memory().unwrap());
        let config = json!({"strict_affinity": true, "auto_allocate_blocks": true});
        store.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
        put(&store, "vxlan", "10.1.0.0/24", "Never", false).await;
        put(&store, "ipip", "10.2.0.0/30", "Always", false).await;
        let other = Ipam::new(store.clone(), "other", BTreeMap::new());
        let request = Request { handle: "h".into(), pools: vec!["ipip".into()], ..Request::default() };
        other.assign(&request).await.unwrap();
        assert_eq!(network(&store).await, None);
    }
}

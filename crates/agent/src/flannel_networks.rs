//! Where a node that starts in a cluster with flannel has the networks of its pods from.

use tortie_api::kubernetes::Node;
use tortie_api::net::{IpVersion, MacAddress};
use tortie_api::{Key, Kind};
use tortie_store::{Store, StoreError};

use crate::flannel::OwnLease;
use crate::flannel_etcd::{self, EtcdLease, LeaseKeeper, OwnEnd};
use crate::node_address::AddressFinder;
use crate::own_addresses::{MissingAddresses, look, own_address};
use crate::tunnels::derived_macs;
use crate::{AgentError, Extras, WindowsNetwork};

/// The networks of the node's pods in a cluster with flannel.
#[derive(Default)]
pub(crate) struct FlannelNetworks {
    pub(crate) lease: Option<OwnLease>,
    /// With leases in etcd: what the node writes there, and the part of the agent that keeps it.
    pub(crate) etcd: Option<(EtcdLease, LeaseKeeper)>,
    /// The node's addresses that no interface has.
    pub(crate) missing: MissingAddresses,
}

/// What a Windows node has.
pub(crate) struct OnWindows {
    /// The type of its network.
    pub(crate) network: WindowsNetwork,
    /// The MAC address that HNS has chosen for the network that exists.
    pub(crate) mac: Option<MacAddress>,
}

impl FlannelNetworks {
    /// With leases in etcd, takes one, which somebody must keep. Pods of Windows nodes have IPv4 only.
    pub(crate) async fn read(
        store: &dyn Store,
        node: &str,
        finder: &AddressFinder,
        extras: &Extras,
        windows: Option<OnWindows>,
    ) -> Result<Self, AgentError> {
        if !extras.flannel {
            return Ok(Self::default());
        }
        let families = if windows.is_none() { &IpVersion::ALL[..] } else { &[IpVersion::V4] };
        let Some(etcd) = &extras.flannel_etcd else {
            return Ok(Self { lease: Some(OwnLease::read(store, node, families).await?), ..Self::default() });
        };
        let key = Key::global(Kind::Node, node);
        let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let (mut missing, now) = (MissingAddresses::default(), tokio::time::Instant::now().into_std());
        let own = look(&stored.value, finder, true, &mut missing, now).await;
        missing.all_found(node)?;
        let current = &stored.value["metadata"]["annotations"];
        let addresses = IpVersion::ALL.map(|version| own_address(current, &own.annotations, version));
        let [derived, derived_v6] = derived_macs(node);
        let mac = match &windows {
            None => Some(derived),
            // The others lose no packet while the agent of a node with a network starts again.
            Some(OnWindows { mac, .. }) => {
                mac.or_else(|| current[Node::VXLAN_MAC].as_str().and_then(|mac| mac.parse().ok()))
            }
        };
        let end = OwnEnd { addresses, macs: mac.map(|mac| [mac, derived_v6]) };
        let previous = current[flannel_etcd::SUBNETS].as_str();
        let network = windows.map(|windows| windows.network);
        let (taken, keeper) = EtcdLease::acquire(store, node, etcd, &end, network, previous).await?;
        let lease = OwnLease::of_subnets(taken.subnets().collect(), taken.vni());
        Ok(Self { lease: Some(lease), etcd: Some((taken, keeper)), missing })
    }
}

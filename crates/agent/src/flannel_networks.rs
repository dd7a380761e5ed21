//! Where a node that starts in a cluster with flannel has the networks of its pods from.

use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_store::{Store, StoreError};

use crate::flannel::OwnLease;
use crate::flannel_etcd::{self, EtcdLease, LeaseKeeper, OwnEnd};
use crate::node_address::{AddressFinder, Machine};
use crate::own_addresses::{MissingAddresses, look, own_address};
use crate::tunnels::derived_macs;
use crate::{AgentError, Extras};

/// The networks of the node's pods in a cluster with flannel.
#[derive(Default)]
pub(crate) struct FlannelNetworks {
    pub(crate) lease: Option<OwnLease>,
    /// With leases in etcd: what the node writes there, and the part of the agent that keeps it.
    pub(crate) etcd: Option<(EtcdLease, LeaseKeeper)>,
    /// The node's addresses that no interface has.
    pub(crate) missing: MissingAddresses,
}

impl FlannelNetworks {
    /// With leases in etcd, takes one, which somebody must keep. Windows nodes have IPv4 only.
    pub(crate) async fn read(
        store: &dyn Store,
        node: &str,
        finder: &AddressFinder,
        extras: &Extras,
    ) -> Result<Self, AgentError> {
        if !extras.flannel {
            return Ok(Self::default());
        }
        let families = match finder.machine {
            #[cfg(target_os = "linux")]
            Machine::Linux => &IpVersion::ALL[..],
            Machine::Windows(_) => &[IpVersion::V4],
        };
        let Some(etcd) = &extras.flannel_etcd else {
            return Ok(Self { lease: Some(OwnLease::read(store, node, families).await?), ..Self::default() });
        };
        let key = Key::global(Kind::Node, node);
        let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let (mut missing, now) = (MissingAddresses::default(), tokio::time::Instant::now().into_std());
        let own = look(node, &stored.value, finder, true, &mut missing, now).await?;
        let current = &stored.value["metadata"]["annotations"];
        let addresses = IpVersion::ALL.map(|version| own_address(current, &own.annotations, version));
        let macs = match finder.machine {
            #[cfg(target_os = "linux")]
            Machine::Linux => Some(derived_macs(node)),
            // HNS chooses it. The others lose no packet while the agent of a node with a network starts again.
            Machine::Windows(_) => {
                let announced = current[Node::VXLAN_MAC].as_str().and_then(|mac| mac.parse().ok());
                announced.map(|mac| [mac, derived_macs(node)[1]])
            }
        };
        let (end, previous) = (OwnEnd { addresses, macs }, current[flannel_etcd::SUBNETS].as_str());
        let has_ipv6 = families.contains(&IpVersion::V6);
        let (taken, keeper) = EtcdLease::acquire(store, node, etcd, &end, has_ipv6, previous).await?;
        let lease = OwnLease::of_subnets(taken.subnets().collect(), taken.vni());
        Ok(Self { lease: Some(lease), etcd: Some((taken, keeper)), missing })
    }
}

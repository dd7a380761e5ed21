//! Keeps the virtual switch of an adapter while the network of the pods is made anew.
//!
//! HNS removes the switch with the last network on it. That takes the node's address away for a moment and forgets its routes, and the
//! next network does so again. With a second network meanwhile, the switch stays (flannel and Calico have one named `External` for
//! ever, microsoft/SDN, flannel#1111). It has no endpoints, and goes afterwards.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use tortie_hcn::schema::Network;
use tortie_hcn::{Class, Hcn, HcnExt};
use tracing::{info, warn};

use crate::Error;
use crate::network_spec::{NetworkKind, NetworkSpec, document, named_adapter};

/// The name of the second network.
const ANCHOR: &str = "Tortie-anchor";
/// Its subnet and VNI, as those of `External` in Calico's scripts.
const SUBNET: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(192, 168, 255, 0), 30);
const VNI: u32 = 9_999;

/// Makes the second network on the adapter of an existing one. Without a known adapter there is none: HNS could take another one over.
/// If HNS refuses it, the replacement goes on, and costs the node its connections for a moment.
pub(crate) fn hold(hcn: &(impl Hcn + ?Sized), network: &Network, kind: NetworkKind) -> Result<(), Error> {
    let Some(adapter) = named_adapter(network) else { return Ok(()) };
    let kind = match kind {
        NetworkKind::Overlay { .. } => NetworkKind::Overlay { vni: VNI },
        NetworkKind::L2Bridge => NetworkKind::L2Bridge,
    };
    let spec = NetworkSpec { name: ANCHOR.to_owned(), block: SUBNET, kind, adapter: Some(adapter) };
    match hcn.create_network(&document(&spec)) {
        Ok(_) => info!(network = ANCHOR, "a second network keeps the adapter's switch meanwhile"),
        Err(error) if error.class() == Class::AlreadyExists => {}
        Err(error) if error.class() == Class::Unavailable => return Err(error.into()),
        Err(error) => {
            warn!(%error, "no second network keeps the adapter's switch; the node loses its connections for a moment")
        }
    }
    Ok(())
}

/// Removes the second network, also that of an earlier process, once the pods' network is there.
///
/// # Errors
/// HNS does not answer, or refuses it.
pub fn release_anchor(hcn: &(impl Hcn + ?Sized)) -> Result<(), Error> {
    if let Some(anchor) = hcn.network_by_name(ANCHOR)? {
        hcn.delete_network(anchor.id)?;
    }
    Ok(())
}

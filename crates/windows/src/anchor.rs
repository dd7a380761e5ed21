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
use crate::host::Host;
use crate::network_spec::{NetworkKind, NetworkSpec, document, named_adapter};

/// The name of the second network.
const ANCHOR: &str = "Tortie-anchor";
/// Its subnet and VNI, as those of `External` in Calico's scripts.
const SUBNET: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(192, 168, 255, 0), 30);
const VNI: u32 = 9_999;

/// Makes the second network on the adapter of an existing one. Without a known adapter there is none: HNS could take another one over.
/// If HNS refuses it, the replacement goes on, and costs the node its connections for a moment.
pub(crate) fn hold(
    hcn: &(impl Hcn + ?Sized),
    host: &Host,
    network: &Network,
    kind: NetworkKind,
) -> Result<(), Error> {
    let Some(adapter) = named_adapter(network) else { return Ok(()) };
    let kind = match kind {
        NetworkKind::Overlay { .. } => NetworkKind::Overlay { vni: VNI },
        NetworkKind::L2Bridge => NetworkKind::L2Bridge,
    };
    let spec =
        NetworkSpec { name: ANCHOR.to_owned(), block: SUBNET, ipv6: None, kind, adapter: Some(adapter) };
    host.set_anchored(true);
    match hcn.create_network(&document(&spec)) {
        Ok(_) => info!(network = ANCHOR, "a second network keeps the adapter's switch meanwhile"),
        Err(error) if error.class() == Class::AlreadyExists => {}
        Err(error) if error.class() == Class::Unavailable => return Err(error.into()),
        Err(error) => {
            warn!(%error, "no second network keeps the adapter's switch; the node loses its connections for a moment");
        }
    }
    Ok(())
}

/// The adapter whose switch the second network keeps, also that of an earlier process.
pub(crate) fn adapter(hcn: &(impl Hcn + ?Sized), host: &Host) -> Result<Option<String>, Error> {
    if !host.may_be_anchored() {
        return Ok(None);
    }
    Ok(hcn.network_by_name(ANCHOR)?.and_then(|anchor| named_adapter(&anchor)))
}

/// Removes the second network, also that of an earlier process, once the pods' network is there. If HNS refuses that, it is tried again
/// at the next check.
pub(crate) fn release(hcn: &(impl Hcn + ?Sized), host: &Host) -> Result<(), Error> {
    if !host.may_be_anchored() {
        return Ok(());
    }
    match remove_anchor(hcn) {
        Ok(_) => host.set_anchored(false),
        Err(error) if error.is_unavailable() => return Err(error),
        Err(error) => {
            warn!(%error, "the second network that kept the adapter's switch stays; Tortie retries")
        }
    }
    Ok(())
}

/// Removes the second network, if it is there. Returns whether it was.
///
/// # Errors
/// HNS does not answer, or refuses it.
pub fn remove_anchor(hcn: &(impl Hcn + ?Sized)) -> Result<bool, Error> {
    let anchor = hcn.network_by_name(ANCHOR)?;
    anchor.as_ref().map_or(Ok(()), |anchor| hcn.delete_network(anchor.id))?;
    Ok(anchor.is_some())
}

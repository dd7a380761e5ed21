//! What operators see of the speaker.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use ipnet::IpNet;
use tortie_bgp::codec::Attributes;
use tortie_bgp::rib::{Chosen, PeerId, Source};
use tortie_bgp::speaker::{Config, SpeakerStatus};

use crate::control::{BgpPeer, BgpRoute};

/// The peers, by address.
pub(super) fn peers(status: &SpeakerStatus, config: &Config) -> Vec<BgpPeer> {
    let shown = status.peers.iter().map(|peer| BgpPeer {
        address: peer.address,
        as_number: config.peers.get(&peer.address).map(|known| known.session.peer_as),
        state: format!("{:?}", peer.state),
        established_seconds: peer.since.map(|since| since.as_secs()),
        received: peer.received,
        advertised: peer.advertised,
        last_error: peer.last_error.clone(),
    });
    shown.collect()
}

/// The chosen routes, by prefix; the best one first.
pub(super) fn routes(routes: Vec<(IpNet, Vec<Chosen>)>, status: &SpeakerStatus) -> Vec<BgpRoute> {
    let addresses = addresses(status);
    let shown = routes.into_iter().flat_map(|(prefix, chosen)| {
        let addresses = &addresses;
        chosen.into_iter().map(move |route| shown_route(prefix, route.source, &route.attributes, addresses))
    });
    let mut shown: Vec<BgpRoute> = shown.collect();
    // The sort is stable, so the best one of a prefix stays first.
    shown.sort_by_key(|route| route.prefix);
    shown
}

/// The addresses of the peers.
pub(super) fn addresses(status: &SpeakerStatus) -> BTreeMap<PeerId, SocketAddr> {
    status.peers.iter().map(|peer| (peer.id, peer.address)).collect()
}

pub(super) fn shown_route(
    prefix: IpNet,
    source: Source,
    attributes: &Attributes,
    addresses: &BTreeMap<PeerId, SocketAddr>,
) -> BgpRoute {
    let communities = attributes.communities.iter().map(ToString::to_string);
    let large = attributes.large_communities.iter().map(ToString::to_string);
    BgpRoute {
        prefix,
        from: match source {
            Source::Own => None,
            Source::Peer(id) => addresses.get(&id).copied(),
        },
        next_hop: attributes.next_hop.address,
        local_preference: attributes.local_pref,
        as_path: attributes.as_path.to_string(),
        communities: communities.chain(large).collect(),
    }
}

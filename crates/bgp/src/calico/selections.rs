//! Selections of nothing: BGPPeers that lead to no session anywhere, and a node that nothing gives a session.

use tortie_api::calico::BgpPeer;

use super::peers::selects;
use super::{BgpNode, Peers, Problem};

/// Returns whether the node runs a speaker: it has an address, and no Windows overlay, which has no packets of pods as they are.
fn runs_speaker(node: &BgpNode<'_>) -> bool {
    node.addresses().next().is_some() && node.takes_plain_packets
}

/// The problems of the cluster's BGPPeers that lead to no session of any node. The node with a speaker whose name comes first tells
/// them: one condition is enough, and `me` has none of others.
pub(super) fn of_peers(me: &BgpNode<'_>, members: &[BgpNode<'_>], peers: &[BgpPeer]) -> Vec<Problem> {
    let speakers: Vec<&BgpNode<'_>> = members.iter().filter(|member| runs_speaker(member)).collect();
    if speakers.iter().map(|speaker| speaker.name).min() != Some(me.name) {
        return Vec::new();
    }
    let problem = |peer: &BgpPeer| {
        let message = selects_nothing(peer, members, &speakers)?;
        Some(Problem { about: format!("BGPPeer {}", peer.metadata.name), message })
    };
    peers.iter().filter_map(problem).collect()
}

fn selects_nothing(peer: &BgpPeer, members: &[BgpNode<'_>], speakers: &[&BgpNode<'_>]) -> Option<String> {
    let spec = &peer.spec;
    let own: Vec<&BgpNode<'_>> = speakers.iter().copied().filter(|speaker| selects(spec, speaker)).collect();
    let name = &spec.node;
    if own.is_empty() {
        return match &spec.node_selector {
            Some(_) => Some(
                "its nodeSelector selects no node that runs BGP, so there is no session; correct it, label the nodes, or delete the \
                 BGPPeer"
                    .to_owned(),
            ),
            None if members.iter().any(|member| member.name == name) => Some(format!(
                "node {name} runs no BGP, because it has no address or is a Windows node with an overlay network, so there is no session; \
                 name another node, or delete the BGPPeer"
            )),
            None if !name.is_empty() => Some(format!(
                "node {name} does not exist, so there is no session; correct spec.node, or delete the BGPPeer"
            )),
            None => None,
        };
    }
    // Workloads have a problem of their own.
    let selector = spec.peer_selector.as_ref()?;
    let is_peer = |other: &&&BgpNode<'_>| selector.matches(other.labels);
    let leads_on = |node: &&BgpNode<'_>| speakers.iter().filter(is_peer).any(|other| other.name != node.name);
    (!own.iter().any(leads_on)).then(|| {
        "its peerSelector selects no other node that runs BGP, so there is no session; correct it, label the nodes, or delete the BGPPeer"
            .to_owned()
    })
}

/// The problem of a node that has no session although there are other nodes: it is not in the mesh, and no BGPPeer gives it one.
pub(super) fn without_session(
    me: &BgpNode<'_>,
    members: &[BgpNode<'_>],
    has_mesh: bool,
    peers: &Peers,
) -> Option<Problem> {
    let has_others = members.iter().any(|other| other.name != me.name && runs_speaker(other));
    if !peers.is_empty() || !has_others || !runs_speaker(me) {
        return None;
    }
    let rest = "no BGPPeer gives this node a session, so it learns no routes to pods of other nodes, and tells them none";
    if !has_mesh {
        return Some(Problem {
            about: "BGPConfiguration default".to_owned(),
            message: format!(
                "nodeToNodeMeshEnabled is false, and {rest}: create a BGPPeer that selects it, or turn the mesh on"
            ),
        });
    }
    me.cluster_id.map(|cluster| Problem {
        about: format!("Node {}", me.name),
        message: format!(
            "it is a route reflector (cluster {cluster}), which is not in the mesh, and {rest}: create a BGPPeer with a peerSelector that \
             selects it, or remove its routeReflectorClusterID"
        ),
    })
}

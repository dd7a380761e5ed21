//! Sessions: the mesh of nodes, and BGPPeers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tortie_api::calico::{BgpConfigurationSpec, BgpPeer, BgpPeerSpec};

use super::{BgpNode, Peers, Problem, Resources, Settings, as_number, duration, password, policy};
use crate::codec::{Families, Family};
use crate::fsm::SessionSettings;
use crate::rib::{NextHopMode, OwnAddresses, PeerRules};
use crate::speaker::{PeerConfig, Transport};

/// The most prefixes of a family that a peer may send: about twice as many as the Internet has. A peer that sends all of them by mistake
/// must not exhaust the node's memory.
const MAX_PREFIXES: u32 = 2_000_000;

/// The peers of a node while they are collected. The first session with an address and port stays.
pub(super) struct Derivation<'a> {
    me: &'a BgpNode<'a>,
    members: &'a [BgpNode<'a>],
    identifier: Ipv4Addr,
    resources: &'a Resources<'a>,
    all: &'a BgpConfigurationSpec,
    /// The settings of this node alone.
    of_node: Option<&'a BgpConfigurationSpec>,
    peers: Peers,
    problems: Vec<Problem>,
}

/// The other end of a session.
#[derive(Clone, Copy)]
struct Remote<'a> {
    address: SocketAddr,
    as_number: u32,
    /// The node, if it is one.
    member: Option<&'a BgpNode<'a>>,
}

impl<'a> Derivation<'a> {
    pub(super) fn new(
        me: &'a BgpNode<'a>,
        members: &'a [BgpNode<'a>],
        identifier: Ipv4Addr,
        resources: &'a Resources<'a>,
        settings: &'a Settings<'a>,
    ) -> Self {
        let (all, of_node) = (&settings.all, settings.of_nodes.get(me.name).copied());
        Self { me, members, identifier, resources, all, of_node, peers: Peers::new(), problems: Vec::new() }
    }

    pub(super) fn finish(self) -> (Peers, Vec<Problem>) {
        (self.peers, self.problems)
    }

    fn problem(&mut self, about: String, message: impl Into<String>) {
        self.problems.push(Problem { about, message: message.into() });
    }

    /// Sessions with all nodes that are no reflectors, unless this node is one.
    pub(super) fn mesh(&mut self) {
        if self.all.node_to_node_mesh_enabled == Some(false) || self.me.cluster_id.is_some() {
            return;
        }
        let about = || "BGPConfiguration default".to_owned();
        let password =
            match password("nodeMeshPassword", self.all.node_mesh_password.as_ref(), self.resources) {
                Ok(password) => password,
                Err(message) => return self.problem(about(), message),
            };
        let restart =
            self.seconds(about(), "nodeMeshMaxRestartTime", self.all.node_mesh_max_restart_time.as_deref());
        let (me, members) = (self.me, self.members);
        // Windows nodes with an overlay network run no speaker.
        let is_in = |other: &&BgpNode<'_>| other.cluster_id.is_none() && other.takes_plain_packets;
        for other in members.iter().filter(|other| other.name != me.name).filter(is_in) {
            for address in other.addresses() {
                let Some(own) = me.address_like(address) else { continue };
                let remote = Remote {
                    address: SocketAddr::new(address, other.port),
                    as_number: other.as_number,
                    member: Some(other),
                };
                let mut peer = self.peer(remote, me.as_number);
                // Texts are compared, at both ends, so that exactly one of them connects.
                peer.session.passive = address.to_string() > own.to_string();
                peer.session.restart_time = restart.or(peer.session.restart_time);
                peer.transport.source = Some(own);
                peer.transport.password = password.clone();
                peer.rules.import =
                    policy::import_of_mesh(other.name, self.all, self.resources, Family::of_address(address));
                self.add(remote, peer);
            }
        }
    }

    /// Sessions of BGPPeers: first those of all nodes, then those of some, then the other ends of both.
    pub(super) fn explicit(&mut self) {
        let is_for_all = |peer: &&BgpPeer| peer.spec.node.is_empty() && peer.spec.node_selector.is_none();
        let mut sorted: Vec<&BgpPeer> = self.resources.peers.iter().collect();
        sorted.sort_by(|a, b| (!is_for_all(a), &a.metadata.name).cmp(&(!is_for_all(b), &b.metadata.name)));
        for peer in &sorted {
            if selects(&peer.spec, self.me) {
                for remote in self.remotes(peer) {
                    self.session(peer, remote);
                }
            }
        }
        for peer in sorted {
            if peer.spec.reverse_peering.as_deref().unwrap_or("Auto") == "Auto" {
                self.reverse(peer);
            }
        }
    }

    /// The other ends of a peer's sessions.
    fn remotes(&mut self, peer: &BgpPeer) -> Vec<Remote<'a>> {
        let about = || format!("BGPPeer {}", peer.metadata.name);
        let spec = &peer.spec;
        if spec.local_workload_selector.is_some() {
            self.problem(
                about(),
                "localWorkloadSelector is not supported, so there are no sessions with workloads",
            );
            return Vec::new();
        }
        let (me, members) = (self.me, self.members);
        if let Some(selector) = &spec.peer_selector {
            let selected =
                members.iter().filter(|other| other.name != me.name && selector.matches(other.labels));
            return selected.flat_map(|other| ends(other)).collect();
        }
        let Some((address, port)) = spec.peer_ip.as_deref().and_then(address_and_port) else {
            self.problem(about(), "it has no peerIP that can be read, so there is no session");
            return Vec::new();
        };
        let member = members.iter().find(|other| other.addresses().any(|own| own == address));
        let number = spec.as_number.as_ref().and_then(as_number).or(member.map(|member| member.as_number));
        let Some(as_number) = number else {
            self.problem(about(), "it has no asNumber, so there is no session");
            return Vec::new();
        };
        if member.is_some_and(|member| member.name == me.name) {
            return Vec::new();
        }
        let member = member.filter(|member| member.as_number == as_number);
        let port = port.or(member.map(|member| member.port)).unwrap_or(super::DEFAULT_PORT);
        vec![Remote { address: SocketAddr::new(address, port), as_number, member }]
    }

    /// If another node's peer is this node, this node has a session with that node, too.
    fn reverse(&mut self, peer: &BgpPeer) {
        let spec = &peer.spec;
        let me = self.me;
        // An address is one of a family, and the other end has no session of the other one.
        let (selects_me, family) =
            match (&spec.peer_selector, spec.peer_ip.as_deref().and_then(address_and_port)) {
                (Some(selector), _) => (selector.matches(me.labels), None),
                (None, Some((address, _))) => {
                    let number = spec.as_number.as_ref().and_then(as_number);
                    let is_me = me.addresses().any(|own| own == address)
                        && number.is_none_or(|number| number == me.as_number);
                    (is_me, Some(Family::of_address(address)))
                }
                (None, None) => (false, None),
            };
        if !selects_me || spec.local_workload_selector.is_some() {
            return;
        }
        let members = self.members;
        for other in members.iter().filter(|other| other.name != me.name && selects(spec, other)) {
            let local_as = spec.local_as_number.as_ref().and_then(as_number);
            let is_meant = |remote: &Remote<'_>| {
                family.is_none_or(|family| family == Family::of_address(remote.address.ip()))
            };
            for remote in ends(other).filter(is_meant) {
                // What the other end calls its own number is this end's peer.
                let remote = Remote { as_number: local_as.unwrap_or(remote.as_number), ..remote };
                self.session_with(peer, remote, me.as_number);
            }
        }
    }

    fn session(&mut self, peer: &BgpPeer, remote: Remote<'a>) {
        let local_as = peer.spec.local_as_number.as_ref().and_then(as_number);
        self.session_with(peer, remote, local_as.unwrap_or(self.me.as_number));
    }

    fn session_with(&mut self, peer: &BgpPeer, remote: Remote<'a>, local_as: u32) {
        let about = || format!("BGPPeer {}", peer.metadata.name);
        let spec = &peer.spec;
        let Some(own) = self.me.address_like(remote.address.ip()) else {
            let family = Family::of_address(remote.address.ip());
            return self.problem(
                about(),
                format!("node {} has no {family} address, so it has no session", self.me.name),
            );
        };
        let mut config = self.peer(remote, local_as);
        config.transport.password = match password("password", spec.password.as_ref(), self.resources) {
            Ok(password) => password,
            Err(message) => return self.problem(about(), message),
        };
        config.transport.source = (spec.source_address.as_deref() != Some("None")).then_some(own);
        // In Calico, 0 is "off".
        config.transport.ttl_security = spec.ttl_security.filter(|hops| *hops > 0);
        let restart = self.seconds(about(), "maxRestartTime", spec.max_restart_time.as_deref());
        config.session.restart_time = restart.or(config.session.restart_time);
        // In BIRD, 0 is the default.
        let keepalive = self.seconds(about(), "keepaliveTime", spec.keepalive_time.as_deref());
        config.session.keepalive_time = keepalive.filter(|time| *time > 0);
        config.rules.allowed_own_as =
            spec.num_allowed_local_as_numbers.and_then(|number| usize::try_from(number).ok()).unwrap_or(0);
        config.rules.next_hop = match (spec.next_hop_mode.as_deref(), spec.keep_original_next_hop) {
            (Some("Self"), _) => NextHopMode::Own,
            (Some("Keep"), _) | (None, Some(true)) => NextHopMode::Keep,
            _ => NextHopMode::Auto,
        };
        if spec.reachable_by.as_deref().is_some_and(|by| !by.is_empty()) {
            self.problem(
                about(),
                "reachableBy is not supported: the peer is reached by the routes that the node has",
            );
        }
        let family = Family::of_address(remote.address.ip());
        let missing = policy::add_filters(&mut config.rules, family, &spec.filters, self.resources.filters);
        for problem in missing {
            self.problem(about(), problem);
        }
        self.add(remote, config);
    }

    /// The first session with an address stays. (Explicit ones come before the mesh.)
    fn add(&mut self, remote: Remote<'_>, config: PeerConfig) {
        self.peers.entry(remote.address).or_insert(config);
    }

    /// The usual configuration of a session.
    fn peer(&self, remote: Remote<'_>, local_as: u32) -> PeerConfig {
        let me = self.me;
        let address = remote.address.ip();
        let mut session = SessionSettings::new(local_as, self.identifier, remote.as_number);
        // Each family has sessions of its own.
        session.families = Families::from_iter([Family::of_address(address)]);
        let mut rules = PeerRules::new(address, local_as, remote.as_number);
        rules.own_addresses = OwnAddresses { ipv4: me.ipv4, ipv6: me.ipv6 };
        rules.max_prefixes = Some(MAX_PREFIXES);
        let theirs = remote.member.and_then(|member| member.cluster_id);
        if let Some(cluster) = me.cluster_id {
            rules.client = rules.is_internal() && theirs != Some(cluster);
            rules.cluster_id = cluster.parse().unwrap_or(self.identifier);
        }
        rules.export = policy::export(
            me,
            (self.all, self.of_node),
            self.resources,
            rules.is_internal(),
            Family::of_address(address),
        );
        PeerConfig { session, rules, transport: Transport::default() }
    }

    /// A time as whole seconds.
    fn seconds(&mut self, about: String, field: &str, text: Option<&str>) -> Option<u16> {
        let text = text.filter(|text| !text.is_empty())?;
        let time = duration(text).and_then(|time| u16::try_from(time.as_secs()).ok());
        if time.is_none() {
            self.problem(about, format!("{field} {text:?} cannot be read, and counts as absent"));
        }
        time
    }
}

/// The ends of sessions with a node.
fn ends<'a>(other: &'a BgpNode<'a>) -> impl Iterator<Item = Remote<'a>> {
    other.addresses().map(|address| Remote {
        address: SocketAddr::new(address, other.port),
        as_number: other.as_number,
        member: Some(other),
    })
}

/// Whether the peer is one of this node.
pub(super) fn selects(spec: &BgpPeerSpec, node: &BgpNode<'_>) -> bool {
    match &spec.node_selector {
        Some(selector) => selector.matches(node.labels),
        None => spec.node.is_empty() || spec.node == node.name,
    }
}

/// `ADDRESS`, `IPv4:PORT` or `[IPv6]:PORT`.
fn address_and_port(text: &str) -> Option<(IpAddr, Option<u16>)> {
    match text.parse::<IpAddr>() {
        Ok(address) => Some((address, None)),
        Err(_) => text.parse::<SocketAddr>().ok().map(|address| (address.ip(), Some(address.port()))),
    }
}

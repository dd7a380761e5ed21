//! The queries of `tortie-reach` besides verdicts: which objects exist, and which single criteria match them. Every
//! answer comes from the same functions as verdicts.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::{EncapsulationMode, EndpointToHostAction, FailsafePort};
use tortie_api::kubernetes::LabelSelector;
use tortie_api::net::{Direction, IpVersion, Protocol};
use tortie_selector::Selector;

use super::endpoint::JudgedEndpoint;
use super::packet::Packet;
use super::path::Hop;
use super::subnet::Subnet;
use super::world::{HostInterface, Identity, Workload};
use super::{
    Oracle, Peer, PolicyName, PolicyTrace, Question, QuestionError, Stored, Table, Trace, calico, kubernetes,
    peers,
};

/// An object that has labels for selectors: a pod or a network set.
#[derive(Clone, Copy)]
pub struct Subject<'a>(&'a Identity);

/// A pod with a network of its own.
pub struct SeenPod<'a>(&'a Workload);

/// A host endpoint.
pub struct SeenHost<'a>(&'a HostInterface);

/// The addresses of a Service's backends, and the backends with their ports.
pub(crate) type SeenBackends<'a> = (&'a [IpAddr], &'a [(IpAddr, Protocol, u16)]);

/// The addresses of a node.
#[derive(Debug, Clone, Copy)]
pub struct SeenNode<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its own addresses: at most one of each family.
    pub own: &'a [IpAddr],
    /// The addresses of its VXLAN tunnels: at most one of each family.
    pub vxlan: &'a [IpAddr],
    /// The address of its IPIP tunnel.
    pub ipip: Option<IpAddr>,
}

impl SeenNode<'_> {
    /// All its addresses.
    pub fn all(&self) -> impl Iterator<Item = IpAddr> {
        self.own.iter().chain(self.vxlan).copied().chain(self.ipip)
    }
}

/// A policy, in evaluation order.
pub struct SeenPolicy<'a> {
    /// Its name.
    pub name: &'a PolicyName,
    /// Its tier.
    pub tier: &'a str,
    /// Whether it is only staged.
    pub staged: bool,
    /// The object.
    pub stored: &'a Stored,
}

impl Oracle<'_> {
    /// Every pod with a network of its own.
    pub fn pods(&self) -> impl Iterator<Item = SeenPod<'_>> {
        self.world.workloads.iter().map(SeenPod)
    }

    /// Every network set, with its networks.
    pub fn network_sets(&self) -> impl Iterator<Item = (Subject<'_>, &[IpNet])> {
        self.world.network_sets.iter().map(|set| (Subject(&set.identity), set.nets.as_slice()))
    }

    /// Every host endpoint.
    pub fn hosts(&self) -> impl Iterator<Item = SeenHost<'_>> {
        self.world.hosts.iter().map(SeenHost)
    }

    /// The host endpoint of the interface through which the node exchanges packets with others, outside of the
    /// overlay or inside.
    pub fn interface(&self, node: &str, overlaid: bool) -> Option<SeenHost<'_>> {
        self.world.interface(node, overlaid).map(SeenHost)
    }

    /// The host endpoint of all of the node's interfaces.
    pub fn all_interfaces(&self, node: &str) -> Option<SeenHost<'_>> {
        self.world.all_interfaces(node).map(SeenHost)
    }

    /// Whether the node drops packets that its own pods send to it.
    pub fn is_closed_to_its_pods(&self, node: &str) -> bool {
        self.world.felix(node).default_endpoint_to_host_action == Some(EndpointToHostAction::Drop)
    }

    /// The failsafe ports of a node, which no policy of host endpoints closes.
    pub fn failsafe_ports(&self, node: &str, direction: Direction) -> Vec<FailsafePort> {
        match direction {
            Direction::Ingress => self.world.felix(node).failsafe_inbound(),
            Direction::Egress => self.world.felix(node).failsafe_outbound(),
        }
    }

    /// The source address of a pod's packets outside of all pools: its node's address, if a pool has natOutgoing.
    pub fn translated(&self, node: &str, address: IpAddr) -> Option<IpAddr> {
        self.world.translated(node, address)
    }

    /// Whether the address is in any pool.
    pub fn is_pooled(&self, address: IpAddr) -> bool {
        self.world.is_pooled(address)
    }

    /// The nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = SeenNode<'_>> {
        self.world.nodes.iter().map(|(name, node)| SeenNode {
            name,
            own: &node.own,
            vxlan: &node.vxlan,
            ipip: node.ipip,
        })
    }

    /// Whether encapsulated packets to this address use IPIP, and not VXLAN.
    pub fn has_ipip(&self, address: IpAddr) -> bool {
        self.world.has_ipip(address)
    }

    /// Where a node is in the network between nodes.
    pub fn subnet(&self, node: &str) -> Option<&Subnet> {
        self.world.nodes.get(node).map(|node| &node.subnet)
    }

    /// The addresses by which rules find the nodes whose labels a Kubernetes selector matches.
    pub fn addresses_of_nodes<'a>(
        &'a self,
        selector: &'a LabelSelector,
    ) -> impl Iterator<Item = IpAddr> + 'a {
        let nodes = self.world.labelled_nodes.iter();
        let selected = nodes.filter(|node| kubernetes::selects(selector, &node.labels));
        selected.flat_map(|node| node.addresses.iter().copied())
    }

    /// The labels of every node.
    pub fn labels_of_nodes(&self) -> impl Iterator<Item = &BTreeMap<String, String>> {
        self.world.labelled_nodes.iter().map(|node| &node.labels)
    }

    /// The backends of a Service: their addresses, and the backends with their ports.
    pub fn backends(&self, namespace: &str, name: &str) -> SeenBackends<'_> {
        let backends = self.world.backends.get(&(namespace.to_owned(), name.to_owned()));
        backends.map_or((&[], &[]), |backends| (backends.addresses.as_slice(), backends.ports.as_slice()))
    }

    /// Whether, and when, packets to this address are encapsulated between nodes.
    pub fn encapsulation(&self, address: IpAddr) -> EncapsulationMode {
        self.world.encapsulation(address)
    }

    /// Whether encapsulation depends on the subnets of nodes anywhere.
    pub fn has_pools_by_subnet(&self) -> bool {
        self.world.has_pools_by_subnet()
    }

    /// Whether packets from one node to this address at another are encapsulated.
    pub fn encapsulates(&self, from: &str, to: &str, address: IpAddr) -> bool {
        self.world.encapsulates(from, to, address)
    }

    /// Every policy, including staged ones, in evaluation order.
    pub fn policies(&self) -> impl Iterator<Item = SeenPolicy<'_>> {
        self.tiers.iter().flat_map(|tier| {
            tier.policies.iter().map(|policy| SeenPolicy {
                name: &policy.name,
                tier: &tier.name,
                staged: policy.staged,
                stored: policy.stored,
            })
        })
    }

    /// The indices of those of [`Self::policies`] that apply to packets of this direction at this pod.
    pub fn applying(&self, pod: &SeenPod<'_>, direction: Direction) -> Vec<usize> {
        self.applying_to(&JudgedEndpoint::pod(pod.0), direction)
    }

    /// As [`Self::applying`], for one table of a host endpoint.
    pub fn applying_at(&self, host: &SeenHost<'_>, table: Table, direction: Direction) -> Vec<usize> {
        self.applying_to(&JudgedEndpoint::host(host.0, table), direction)
    }

    fn applying_to(&self, endpoint: &JudgedEndpoint<'_>, direction: Direction) -> Vec<usize> {
        let policies = self.tiers.iter().flat_map(|tier| &tier.policies).enumerate();
        let applying = policies.filter(|(_, policy)| policy.applies(endpoint, direction));
        applying.map(|(index, _)| index).collect()
    }

    /// The traces of one end's pod policies for a packet; empty if no pod policies apply to that end.
    pub fn at_pod(
        &self,
        question: &Question,
        family: IpVersion,
        direction: Direction,
    ) -> Result<Vec<Trace>, QuestionError> {
        let path = peers::resolve(&self.world, question, Some(family))?;
        let packet = Packet::new(&self.world, path.source, path.destination, question);
        let judged = path.hops.iter().filter_map(|hop| match hop {
            Hop::Pod(pod, of, _) if *of == direction => {
                Some(self.judge(&JudgedEndpoint::pod(pod), direction, &packet))
            }
            _ => None,
        });
        Ok(judged.collect())
    }

    /// The traces of the host endpoints of the sender's node (`near`), or of the receiver's node, for a packet
    /// between nodes, in order.
    pub fn at_host(
        &self,
        question: &Question,
        family: IpVersion,
        near: bool,
    ) -> Result<Vec<Trace>, QuestionError> {
        let path = peers::resolve(&self.world, question, Some(family))?;
        let packet = Packet::new(&self.world, path.source, path.destination, question);
        let judged = path.hops.iter().filter_map(|hop| match hop {
            Hop::Host(hop) if hop.near == near => {
                Some(self.judge_host(hop, &packet.with_source(hop.source), &mut Vec::new()))
            }
            _ => None,
        });
        Ok(judged.flatten().collect())
    }

    /// The traces of the host endpoint of all interfaces for a packet that stays inside one node: where the packet
    /// arrives from the sending pod (`near`), or where it leaves for the receiving pod. The two ends may be on
    /// different nodes, because they represent others that are on one.
    pub fn inside_node(
        &self,
        question: &Question,
        family: IpVersion,
        near: bool,
    ) -> Result<Vec<Trace>, QuestionError> {
        let path = peers::resolve(&self.world, question, Some(family))?;
        let packet = Packet::new(&self.world, path.source, path.destination, question);
        let direction = if near { Direction::Ingress } else { Direction::Egress };
        let pod = |peer: &Peer| match peer {
            Peer::Pod { namespace, name } => self.world.pod(namespace, name),
            Peer::Node(_) | Peer::Address(_) => None,
        };
        let forwarded = pod(&question.to).is_some();
        let hop = pod(if near { &question.from } else { &question.to })
            .and_then(|pod| peers::at_pod(&self.world, pod, direction, forwarded, question.via));
        Ok(hop.map(|hop| self.judge_host(&hop, &packet, &mut Vec::new())).unwrap_or_default())
    }

    /// The trace of a profile for a packet, whether or not an endpoint has that profile.
    pub fn by_profile(
        &self,
        question: &Question,
        family: IpVersion,
        (name, direction): (&str, Direction),
    ) -> Result<PolicyTrace, QuestionError> {
        let path = peers::resolve(&self.world, question, Some(family))?;
        let packet = Packet::new(&self.world, path.source, path.destination, question);
        Ok(self.profile(name, direction, &packet))
    }
}

/// A Kubernetes selector as text for readers.
pub fn shown_labels(what: &str, selector: &LabelSelector) -> String {
    kubernetes::shown_selector(what, selector)
}

impl<'a> SeenPod<'a> {
    /// Its labels for selectors.
    pub fn subject(&self) -> Subject<'a> {
        Subject(&self.0.identity)
    }

    /// The name of its node.
    pub fn node(&self) -> &'a str {
        &self.0.node
    }

    /// Its addresses.
    pub fn addresses(&self) -> &'a [IpAddr] {
        &self.0.addresses
    }

    /// The names of its profiles, in their order.
    pub fn profiles(&self) -> &'a [String] {
        &self.0.profiles
    }
}

impl<'a> SeenHost<'a> {
    /// Its labels for selectors.
    pub fn subject(&self) -> Subject<'a> {
        Subject(&self.0.identity)
    }

    /// The name of its node.
    pub fn node(&self) -> &'a str {
        &self.0.node
    }

    /// Whether it is for all interfaces of its node. Untracked policy does not apply to it then.
    pub fn is_for_all_interfaces(&self) -> bool {
        self.0.all_interfaces
    }

    /// The addresses by which rules identify it.
    pub fn addresses(&self) -> &'a [IpAddr] {
        &self.0.addresses
    }

    /// The names of its profiles, in their order.
    pub fn profiles(&self) -> &'a [String] {
        &self.0.profiles
    }
}

impl<'a> Subject<'a> {
    /// Whether it is a pod.
    pub fn is_pod(&self) -> bool {
        self.0.is_pod()
    }

    /// Its namespace; empty for a global network set.
    pub fn namespace(&self) -> &'a str {
        &self.0.namespace
    }

    /// Its name.
    pub fn name(&self) -> &'a str {
        &self.0.name
    }

    /// The name of its service account.
    pub fn account(&self) -> &'a str {
        &self.0.account
    }

    /// The labels of the object itself.
    pub fn own_labels(&self) -> &'a BTreeMap<String, String> {
        &self.0.own_labels
    }

    /// The labels that Calico's selectors see.
    pub fn labels(&self) -> &'a BTreeMap<String, String> {
        &self.0.labels
    }

    /// The named ports that it declares.
    pub fn ports(&self) -> impl Iterator<Item = (&'a str, Protocol, u16)> {
        self.0.ports.iter().map(|port| (port.name.as_str(), port.protocol, port.port))
    }

    /// Whether a `namespaceSelector` matches its namespace.
    pub fn is_in_namespaces(&self, selector: &Selector) -> bool {
        calico::of_namespace(selector, self.0)
    }

    /// Whether it is a pod with a service account that the selector matches.
    pub fn has_account(&self, selector: &Selector) -> bool {
        calico::of_account(selector, self.0)
    }

    /// Whether a Kubernetes selector matches its own labels.
    pub fn bears(&self, selector: &LabelSelector) -> bool {
        kubernetes::selects(selector, &self.0.own_labels)
    }

    /// Whether a Kubernetes selector matches the labels of its namespace.
    pub fn namespace_bears(&self, selector: &LabelSelector) -> bool {
        kubernetes::selects(selector, &self.0.namespace_labels)
    }
}

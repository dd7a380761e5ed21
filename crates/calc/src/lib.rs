//! Cluster state in, node state out.
//!
//! [`Calc::update`] ingests one object of the cluster. [`Calc::flush`] returns the changes of the node's state since
//! the last flush. The result depends on the objects, never on the order or the batching of updates. No clock, no
//! I/O, no threads.

mod budget;
mod claims;
mod endpoints;
mod flush;
mod index;
mod input;
mod keys;
mod local;
mod network;
mod nodes;
mod policies;
mod selection;
mod services;
mod sets;
mod slab;
mod subjects;
#[cfg(test)]
mod tests;
mod tiers;

use std::collections::BTreeMap;

use serde_json::Value;
use std::collections::HashSet;
use tortie_api::kubernetes::{EndpointSlice, FlannelLease, Node};
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::{EndpointId, NodeState, Reason};
use tortie_policy::program::PolicyId;

use claims::Claims;
use flush::InUse;
use input::{BlockNodes, Input};
use local::LocalId;
use network::{FlannelLeases, Network};
use policies::Policies;
use services::Services;
use sets::Sets;
use slab::No;
use subjects::{Backends, Subjects};

pub use claims::Assigned;
pub use network::{NoRoute, Unrouted, pool_of_network, unfit_for_flannel, vtep_mac};

/// The kinds of object that the state of any node depends on; [`Calc::kinds`] returns those of one node.
pub const KINDS: [Kind; 20] = [
    Kind::Namespace,
    Kind::ServiceAccount,
    Kind::Node,
    Kind::IpPool,
    Kind::IpamBlock,
    Kind::EndpointSlice,
    Kind::Tier,
    Kind::Profile,
    Kind::NetworkSet,
    Kind::GlobalNetworkSet,
    Kind::KubernetesNetworkPolicy,
    Kind::ClusterNetworkPolicy,
    Kind::AdminNetworkPolicy,
    Kind::BaselineAdminNetworkPolicy,
    Kind::NetworkPolicy,
    Kind::GlobalNetworkPolicy,
    Kind::WorkloadEndpoint,
    Kind::HostEndpoint,
    Kind::FelixConfiguration,
    Kind::BgpConfiguration,
];

/// The kinds of object that a node's state depends on, with or without the cluster's Services.
#[must_use]
pub fn kinds(services: bool) -> Vec<Kind> {
    KINDS.into_iter().chain(services.then_some(Kind::Service)).collect()
}

/// The computation for one node.
pub struct Calc {
    node: String,
    subjects: Subjects,
    policies: Policies,
    sets: Sets,
    network: Network,
    claims: Claims,
    /// flannel's leases, if they are not in annotations of Nodes.
    flannel_leases: Option<FlannelLeases>,
    /// The cluster's Services, if the node needs them.
    services: Option<Services>,
    /// The problems of objects that are not policies.
    problems: BTreeMap<Key, String>,
    /// The pods whose policies ask for too much, as of the last flush.
    closed: BTreeMap<EndpointId, String>,
    /// The published state.
    state: NodeState,
    in_use: InUse,
    /// Endpoints of this node whose program or addresses may have changed.
    dirty_endpoints: HashSet<No>,
    /// Endpoints of this node that may have been deleted or replaced by another.
    gone_endpoints: Vec<LocalId>,
    /// Policies and profiles whose rules or use may have changed; may contain duplicates.
    dirty_policies: Vec<PolicyId>,
}

/// An object that calc could not use as it is, and what it does instead.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The object.
    pub key: Key,
    /// The reason of the condition about it.
    pub reason: Reason,
    /// The problem.
    pub problem: String,
}

impl Calc {
    /// For the node of this name, without any state.
    pub fn new(node: impl Into<String>) -> Self {
        let mut subjects = Subjects::default();
        let sets = Sets::with_all_nodes(&mut subjects);
        Self {
            node: node.into(),
            subjects,
            policies: Policies::default(),
            sets,
            network: Network::default(),
            claims: Claims::default(),
            flannel_leases: None,
            services: None,
            problems: BTreeMap::new(),
            closed: BTreeMap::new(),
            state: NodeState::default(),
            in_use: InUse::default(),
            dirty_endpoints: HashSet::new(),
            gone_endpoints: Vec::new(),
            dirty_policies: Vec::new(),
        }
    }

    /// Pools without encapsulation get direct routes: packets to pods of another node go to that node, if it is in the network
    /// of this one. Without this, they get no routes.
    #[must_use]
    pub fn with_direct_routes(mut self) -> Self {
        self.network.use_direct_routes();
        self
    }

    /// The nodes whose tunnel addresses do not count, with the reasons. As of the last flush.
    pub fn refused_tunnels(&self) -> impl Iterator<Item = (&str, &str)> {
        self.network.refused_tunnels()
    }

    /// The other nodes to whose pods this node should have routes and has none, with the blocks and borrowed addresses, by cause. As of
    /// the last flush. Nodes of flannel are in [`flannel_problems`](Self::flannel_problems).
    #[must_use]
    pub fn without_route(&self) -> BTreeMap<&str, Unrouted<'_>> {
        self.network.without_route()
    }

    /// The nodes announce the networks of their pods, and the way there, as daemons of flannel do.
    #[must_use]
    pub fn with_flannel(mut self) -> Self {
        self.network.flannel = true;
        self
    }

    /// The same, but the leases are those of [`update_flannel_leases`](Self::update_flannel_leases). What Nodes say about flannel
    /// and about the networks of their pods has no effect.
    #[must_use]
    pub fn with_flannel_leases(self) -> Self {
        Self { flannel_leases: Some(FlannelLeases::default()), ..self.with_flannel() }
    }

    /// Ingests the leases of this node, and those of all others by their keys in etcd. A lease with an address of a Node is that
    /// node's; any other one is of a machine that is no Node.
    pub fn update_flannel_leases(
        &mut self,
        own: Vec<FlannelLease>,
        others: BTreeMap<String, Vec<FlannelLease>>,
    ) {
        let Some(leases) = &mut self.flannel_leases else { return };
        for (name, node) in leases.update(&self.node, own, others) {
            self.put_node(&name, node);
        }
    }

    /// Another CNI plugin connects the pods, and gives them addresses and ports of the node. The state then has policy, and
    /// neither an overlay nor routes nor address translation.
    #[must_use]
    pub fn with_policy_only(mut self) -> Self {
        self.network.policy_only = true;
        self
    }

    /// With flannel, the other nodes whose pods cannot be reached in the way that they have announced, with the reason. A machine
    /// that is no Node has the name of its key in etcd, which begins with a slash.
    #[must_use]
    pub fn flannel_problems(&self) -> BTreeMap<&str, String> {
        self.network.flannel_problems(&self.node)
    }

    /// With [`with_flannel_leases`](Self::with_flannel_leases), the other Nodes that have an address but no lease. A new Node
    /// gets its lease a moment later.
    pub fn without_flannel_lease(&self) -> impl Iterator<Item = &str> {
        self.flannel_leases.iter().flat_map(|leases| leases.without_lease()).map(String::as_str)
    }

    /// The same, for a node whose state includes the cluster's Services.
    #[must_use]
    pub fn with_services(self) -> Self {
        Self { services: Some(Services::default()), ..self }
    }

    /// The kinds of object that this node's state depends on.
    #[must_use]
    pub fn kinds(&self) -> Vec<Kind> {
        kinds(self.services.is_some())
    }

    /// The published state of the node.
    #[must_use]
    pub fn state(&self) -> &NodeState {
        &self.state
    }

    /// Ingests the new value of an object, or its deletion.
    pub fn update(&mut self, key: &Key, value: Option<&Value>) {
        if self.reads(key.kind) {
            let (input, problem) = input::read(key, value);
            self.ingest(key, input, problem);
        }
    }

    /// The same for a parsed object, which has no problems. IPAM blocks have no typed form.
    pub fn update_typed(&mut self, key: &Key, object: Option<Resource>) {
        if self.reads(key.kind) {
            self.ingest(key, object.and_then(|object| input::typed(key, object)), None);
        }
    }

    fn reads(&self, kind: Kind) -> bool {
        KINDS.contains(&kind) || kind == Kind::Service && self.services.is_some()
    }

    /// What could not be used as it is: policies that therefore deny, objects that are therefore left out, nodes with
    /// addresses that no rule can mean.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        let not_understood = |key, problem| Finding { key, reason: Reason::NotUnderstood, problem };
        let problems = self.problems.iter();
        let objects = problems.map(|(key, problem)| not_understood(key.clone(), problem.clone()));
        let nodes = self.network.nodes().iter().filter_map(|(name, node)| {
            let problem = self.sets.problem_of_node(node)?;
            Some(not_understood(Key::global(Kind::Node, name), problem))
        });
        let closed = self.closed.iter().map(|(id, problem)| {
            let key = Key::namespaced(Kind::Pod, &*id.namespace, &*id.pod);
            Finding { key, reason: Reason::TooManyRules, problem: problem.clone() }
        });
        let mut all: Vec<Finding> =
            objects.chain(nodes).chain(closed).chain(self.policies.findings()).collect();
        all.extend(self.claims.findings(&self.node));
        all.sort();
        all
    }

    fn update_node(&mut self, name: &str, node: Option<Node>) {
        let Some(leases) = &mut self.flannel_leases else { return self.put_node(name, node) };
        for (name, node) in leases.update_node(&self.node, name, node) {
            self.put_node(&name, node);
        }
    }

    fn put_node(&mut self, name: &str, node: Option<Node>) {
        let (is_local, former) = (name == self.node, self.network.nodes().get(name));
        let node = match node {
            Some(node) if self.network.flannel => Some(network::translated(node, is_local, former)),
            node => node,
        };
        for address in former.into_iter().chain(&node).flat_map(Node::addresses) {
            self.claims.mark(address);
        }
        if former.is_some() != node.is_some() {
            self.claims.mark_node(name);
        }
        // No peer `nodes` of a policy means a machine that is no Node.
        if !FlannelLeases::is_machine(name) {
            self.sets.update_node(former, node.as_ref(), &self.state);
        }
        self.network.update_node(name, node);
    }

    fn ingest(&mut self, key: &Key, input: Option<Input>, problem: Option<String>) {
        match problem {
            Some(problem) => drop(self.problems.insert(key.clone(), problem)),
            None => drop(self.problems.remove(key)),
        }
        match input {
            Some(Input::Policy(policy)) => self.update_policy(key, Some(*policy)),
            Some(Input::Tier(tier)) => self.update_tier(&key.name, Some(tier)),
            Some(Input::Profile(labels, body)) => self.update_profile(key, Some((labels, body))),
            Some(Input::Labels(labels)) => self.update_labels(key, Some(labels)),
            Some(Input::NetworkSet(own, nets)) => self.update_network_set(key, Some((own, nets))),
            Some(Input::Endpoint(own, spec, unreported)) => {
                self.take_endpoint(key, Some((own, *spec)), unreported);
            }
            Some(Input::Host(own, spec)) => self.update_host(key, Some((own, *spec))),
            Some(Input::Slice(slice)) => self.update_slice(key, Some(&slice)),
            Some(Input::Service(service)) => {
                self.services.iter_mut().for_each(|services| services.update_service(key, Some(&service)));
            }
            Some(Input::Node(node)) => self.update_node(&key.name, Some(node)),
            Some(Input::Felix(spec)) => self.network.update_felix(&key.name, Some(*spec)),
            Some(Input::Bgp(spec)) => self.network.update_bgp(&key.name, Some(*spec)),
            Some(Input::Pool(pool)) => self.network.update_pool(&key.name, Some(pool)),
            Some(Input::Block(cidr, nodes, pods)) => {
                self.claims.update_block(cidr, Some(&pods));
                self.network.update_block(cidr, nodes);
            }
            None => self.forget(key),
        }
    }

    /// Backends matter for rules that name their Service, and for dataplanes that need Services.
    fn update_slice(&mut self, key: &Key, slice: Option<&EndpointSlice>) {
        let backends = slice.map(|slice| Backends::new(&key.namespace, slice));
        self.sets.update_backends(key, backends, &self.state);
        self.services.iter_mut().for_each(|services| services.update_slice(key, slice));
    }

    /// Ingests the deletion of an object, or an object without readable content.
    fn forget(&mut self, key: &Key) {
        match key.kind {
            Kind::Tier => self.update_tier(&key.name, None),
            Kind::Profile => self.update_profile(key, None),
            Kind::Namespace | Kind::ServiceAccount => self.update_labels(key, None),
            Kind::NetworkSet | Kind::GlobalNetworkSet => self.update_network_set(key, None),
            Kind::WorkloadEndpoint => self.take_endpoint(key, None, false),
            Kind::HostEndpoint => self.update_host(key, None),
            Kind::EndpointSlice => self.update_slice(key, None),
            Kind::Service => {
                self.services.iter_mut().for_each(|services| services.update_service(key, None));
            }
            Kind::Node => self.update_node(&key.name, None),
            Kind::IpPool => self.network.update_pool(&key.name, None),
            Kind::FelixConfiguration => self.network.update_felix(&key.name, None),
            Kind::BgpConfiguration => self.network.update_bgp(&key.name, None),
            Kind::IpamBlock => key.name.parse().into_iter().for_each(|cidr| {
                self.claims.update_block(cidr, None);
                self.network.update_block(cidr, BlockNodes::default());
            }),
            _ => self.update_policy(key, None),
        }
    }
}

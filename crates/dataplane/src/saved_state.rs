//! What a node keeps on disk, for an agent that starts while the system has no policy and the datastore does not answer:
//! which pods had policy, and what the others need.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};
use tortie_api::net::{Action, Direction, MacAddress};
use tortie_policy::ALL_NODES;
use tortie_policy::program::{
    EndOfTier, EndpointProgram, Member, PolicyId, PolicyKind, PolicyRules, Rule, SetKind, TierProgram,
};

use crate::{Endpoint, EndpointId, LocalNode, NodeState, RouteTarget, Settings, Vtep};

/// The policy of a direction that is closed until the datastore answers.
static CLOSED: LazyLock<PolicyId> = LazyLock::new(|| PolicyId {
    kind: PolicyKind::GlobalNetworkPolicy,
    namespace: Arc::default(),
    name: "closed-until-the-datastore-answers".into(),
});

/// The part of a [`NodeState`] that needs no policy.
///
/// It names the pods of the node. A direction of a pod to which a policy applied is closed here. The other direction keeps its
/// profiles. If a profile depends on the labels of other pods, both directions are closed. So no policy in it allows an address that
/// may have another owner by now. Packets of the overlay come from the nodes of that time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    node: Option<LocalNode>,
    settings: Settings,
    /// The own addresses of all nodes.
    nodes: BTreeSet<Member>,
    /// The own addresses of the nodes with tunnel ends.
    tunnels: BTreeSet<IpAddr>,
    /// The own addresses of further nodes with IPIP.
    ipip: BTreeSet<Ipv4Addr>,
    profiles: Vec<(PolicyId, PolicyRules)>,
    pods: Vec<(EndpointId, Endpoint)>,
}

impl SavedState {
    /// The part of a state. Host endpoints are not in it: a node whose own traffic is closed might never reach the
    /// datastore.
    #[must_use]
    pub fn of(state: &NodeState) -> Self {
        let mut profiles = BTreeMap::new();
        let pods = state.endpoints.iter().map(|(id, endpoint)| {
            let program = Arc::new(without_policy(&endpoint.program, state));
            let kept = program.profiles.iter().filter_map(|id| Some((id, state.policies.get(id)?)));
            profiles.extend(kept.map(|(id, rules)| (id.clone(), PolicyRules::clone(rules))));
            (id.clone(), Endpoint { program, ..Endpoint::clone(endpoint) })
        });
        let pods = pods.collect();
        let nodes = state.sets.get(&*ALL_NODES).map(|(_, members)| (**members).clone()).unwrap_or_default();
        let tunnels: BTreeSet<IpAddr> = state.vteps.values().map(|vtep| vtep.parent).collect();
        Self {
            node: state.node.clone(),
            settings: Settings::clone(&state.settings),
            nodes,
            ipip: state.ipip_peers().filter(|peer| !tunnels.contains(&IpAddr::V4(*peer))).collect(),
            tunnels,
            profiles: profiles.into_iter().collect(),
            pods,
        }
    }

    /// A state of which nothing is known. It has no pods, and leaves the node's own tunnels open.
    #[must_use]
    pub fn unknown() -> Self {
        let settings = Settings { vxlan_ports: BTreeSet::new(), ..Settings::default() };
        Self { settings, ..Self::default() }
    }

    /// The same without the pods, whose interfaces are then closed.
    #[must_use]
    pub fn without_pods(self) -> Self {
        Self { profiles: Vec::new(), pods: Vec::new(), ..self }
    }

    /// The number of its pods, and of those among them with a closed direction.
    #[must_use]
    pub fn pods(&self) -> (usize, usize) {
        (self.pods.len(), self.pods.iter().filter(|(_, pod)| Self::closes(pod)).count())
    }

    /// Whether a direction of a saved pod is closed.
    #[must_use]
    pub fn closes(pod: &Endpoint) -> bool {
        pod.program.policy_ids().any(|id| *id == *CLOSED)
    }

    /// The state that a dataplane can apply. Of the other nodes, only their own addresses are real.
    #[must_use]
    pub fn into_state(self) -> NodeState {
        let Self { node, settings, nodes, tunnels, ipip, profiles, pods } = self;
        let denied =
            PolicyRules { ingress: vec![Rule::all(Action::Deny)], egress: vec![Rule::all(Action::Deny)] };
        let policies = profiles.into_iter().chain([(CLOSED.clone(), denied)]);
        let vtep = |parent: IpAddr| Vtep {
            node: parent.to_string(),
            address: parent,
            mac: MacAddress([0; 6]),
            parent,
            mtu: None,
        };
        let routes =
            ipip.into_iter().map(|router| (IpAddr::from(router).into(), RouteTarget::Ipip { router }));
        NodeState {
            node,
            settings: Arc::new(settings),
            sets: [(ALL_NODES.clone(), (SetKind::Nets, nodes.into()))].into(),
            policies: policies.map(|(id, rules)| (id, Arc::new(rules))).collect(),
            endpoints: pods.into_iter().map(|(id, pod)| (id, Arc::new(pod))).collect(),
            vteps: tunnels.into_iter().map(vtep).map(|vtep| (vtep.key(), vtep)).collect(),
            routes: routes.collect(),
            ..NodeState::default()
        }
    }
}

/// The program with [`CLOSED`] in place of policies.
fn without_policy(program: &EndpointProgram, state: &NodeState) -> EndpointProgram {
    let rules = |id: &PolicyId| state.policies.get(id);
    let depends_on_others = |id: &PolicyId| rules(id).is_none_or(|rules| rules.set_ids().next().is_some());
    let is_closed = program.profiles.iter().any(depends_on_others);
    let tiers = |direction| match program.tiers(direction).is_empty() && !is_closed {
        true => Vec::new(),
        false => {
            let policies = vec![CLOSED.clone()];
            vec![TierProgram { name: "closed".into(), policies, end: EndOfTier::Deny }]
        }
    };
    let (ingress, egress) = (tiers(Direction::Ingress), tiers(Direction::Egress));
    let profiles = if is_closed { Vec::new() } else { program.profiles.clone() };
    EndpointProgram { ingress, egress, profiles }
}

//! Compiled policies: where and in which order they apply, and the sets that their rules name.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use tortie_api::net::Protocol;
use tortie_selector::Selector;

use crate::program::{PolicyId, PolicyKind, PolicyRules, SetId, SetKind};

/// A compiled policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// The id of the policy.
    pub id: PolicyId,
    /// The name of its tier.
    pub tier: String,
    /// Its position in its tier.
    pub order: Order,
    /// The hooks at which it is evaluated.
    pub hook: Hook,
    /// Selects its endpoints, by their [`SubjectLabels`](crate::SubjectLabels).
    pub selector: Selector,
    /// Whether it applies to packets into them.
    pub ingress: bool,
    /// Whether it applies to packets out of them.
    pub egress: bool,
    /// Its rules.
    pub rules: Arc<PolicyRules>,
    /// The sources of the sets that the rules name.
    pub sets: BTreeMap<SetId, SetSource>,
    /// Criteria that were understood but cannot be enforced, and are therefore left out (policy decision 15).
    pub left_out: Vec<String>,
    /// The problem, if the policy was not understood; it then denies.
    pub not_understood: Option<String>,
}

/// The hooks on a packet's way at which a policy is evaluated (policy decision 16).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// At pods, and at host endpoints for packets from and to the host itself.
    #[default]
    Normal,
    /// As `Normal`, and at host endpoints for packets that the host forwards.
    AlsoForwarded,
    /// At host endpoints only, before connection tracking.
    Untracked,
    /// At host endpoints only, before the translation of Services' addresses.
    PreDnat,
    /// At every hook: the policy was not understood, and its hook is unreadable.
    Everywhere,
}

impl Hook {
    /// Whether policies of this hook are evaluated for packets from and to pods.
    #[must_use]
    pub fn is_for_pods(self) -> bool {
        matches!(self, Self::Normal | Self::AlsoForwarded | Self::Everywhere)
    }
}

/// The source of the members of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetSource {
    /// The addresses of everything that the selector matches.
    Selector(Selector),
    /// The addresses of the nodes whose own labels the selector matches.
    Nodes(Selector),
    /// The ports of this name, with this protocol if one is given, on the endpoints that the selector matches.
    NamedPort {
        /// The endpoints.
        selector: Selector,
        /// The protocol of the declaration.
        protocol: Option<Protocol>,
        /// The name.
        name: String,
    },
    /// The backends of a Service.
    Service {
        /// The Service's namespace.
        namespace: String,
        /// The Service's name.
        name: String,
        /// Whether the backends' protocols and ports count, or only their addresses.
        with_ports: bool,
    },
}

impl SetSource {
    /// The kind of the members.
    #[must_use]
    pub fn kind(&self) -> SetKind {
        match self {
            Self::Selector(_) | Self::Nodes(_) | Self::Service { with_ports: false, .. } => SetKind::Nets,
            Self::NamedPort { .. } | Self::Service { with_ports: true, .. } => SetKind::AddressPorts,
        }
    }
}

/// The position of a policy in its tier: `order` ascending, absent last, then by "name/namespace/kind" (policy
/// decision 7).
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    order: Option<f64>,
    id: PolicyId,
}

impl Order {
    pub(crate) fn new(order: Option<f64>, id: &PolicyId) -> Self {
        // -0 is 0.
        Self { order: order.map(|order| order + 0.0), id: id.clone() }
    }

    /// "name/namespace/kind", as bytes. The string is not built, because a cluster has many policies, of which few
    /// are compared.
    fn tie(&self) -> impl Iterator<Item = u8> {
        // As Calico spells them in its model (`libcalico-go/lib/backend/model/policy.go`).
        let kind = match self.id.kind {
            PolicyKind::AdminNetworkPolicy => "KubernetesAdminNetworkPolicy",
            PolicyKind::BaselineAdminNetworkPolicy => "KubernetesBaselineAdminNetworkPolicy",
            PolicyKind::ClusterNetworkPolicy => "KubernetesClusterNetworkPolicy",
            PolicyKind::GlobalNetworkPolicy => "GlobalNetworkPolicy",
            PolicyKind::KubernetesNetworkPolicy => "KubernetesNetworkPolicy",
            PolicyKind::NetworkPolicy => "NetworkPolicy",
            PolicyKind::Profile => "Profile",
        };
        let parts = [&*self.id.name, "/", &*self.id.namespace, "/", kind];
        parts.into_iter().flat_map(str::bytes)
    }
}

impl Eq for Order {}

impl PartialOrd for Order {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Order {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = |order: Option<f64>| order.unwrap_or(f64::INFINITY);
        order(self.order).total_cmp(&order(other.order)).then_with(|| self.tie().cmp(other.tie()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The comparison is of texts, in which a name that begins another may come after it, because `/` is after `-`
    /// and `.`.
    #[test]
    fn policies_of_one_order_come_by_name_namespace_and_kind() {
        let kinds = [PolicyKind::KubernetesNetworkPolicy, PolicyKind::NetworkPolicy];
        let ids = ["a", "a-b", "a.b", "a0", "b"].into_iter().flat_map(|name| {
            let named = move |namespace: &'static str, kind| PolicyId {
                kind,
                namespace: namespace.into(),
                name: name.into(),
            };
            ["", "n", "n-m"].into_iter().flat_map(move |space| kinds.map(|kind| named(space, kind)))
        });
        let mut orders: Vec<Order> = ids.map(|id| Order::new(Some(1000.0), &id)).collect();
        orders.sort();
        let texts: Vec<String> = orders
            .iter()
            .map(|Order { id, .. }| format!("{}/{}/{}", id.name, id.namespace, id.kind.kind()))
            .collect();
        assert!(texts.is_sorted(), "{texts:?}");
    }
}

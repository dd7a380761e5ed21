//! The replacement of a node's network, step by step: cordon, drain, rebuild, restore.
//!
//! VNI, first subnet and type of a network cannot be changed (docs/hns.md, Networks). The agent replaces a network that differs as
//! soon as nothing uses it, and keeps the adapter's routes meanwhile. [`next_step`] says what has to happen before and after.
//! It looks only at what it observes, so whoever is interrupted starts it again. The one fact that cannot be observed, whether
//! the node took pods before, is recorded on the Node together with the cordon.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tortie_hcn::Guid;
use tortie_hcn::schema::Endpoint;

/// The annotation of a Node whose network is being replaced: a [`Reconfiguration`] as JSON.
pub const RECONFIGURATION: &str = "tortie.io/windows-reconfiguration";

/// What is recorded on the Node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reconfiguration {
    /// Whether pods could be scheduled on the node before.
    pub was_schedulable: bool,
    /// What a newer program has recorded.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// What is known about the node at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReconfiguredNode {
    /// What is recorded.
    pub recorded: Option<Reconfiguration>,
    /// Whether pods can be scheduled on it.
    pub schedulable: bool,
    /// The pods in its network that the API has, by name, and whether each is being deleted.
    pub pods: Vec<(String, bool)>,
    /// Why the agent cannot use the network as it is, as its report says.
    pub differs: Option<String>,
    /// Another reason of the report for which the network's state is unknown or incomplete.
    pub trouble: Option<String>,
    /// What HNS has; `None` if the network does not exist.
    pub network: Option<UsedNetwork>,
}

/// Who uses the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsedNetwork {
    /// The endpoints of pods, by name.
    pub pods: Vec<String>,
    /// The endpoints that belong to no pod: kube-proxy makes them anew on the new network.
    pub others: Vec<Guid>,
    /// The load balancers that lead to them.
    pub balancers: Vec<Guid>,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum ReconfigureStep {
    /// The network is as it should be, and nothing was begun.
    NothingToDo,
    /// Record this on the Node, and let no more pods be scheduled there, in one write.
    Cordon(Reconfiguration),
    /// Delete these pods.
    DeletePods(Vec<String>),
    /// Delete these load balancers, and then these endpoints.
    RemoveOthers {
        /// The load balancers.
        balancers: Vec<Guid>,
        /// The endpoints.
        endpoints: Vec<Guid>,
    },
    /// Look again soon. It says for what.
    Wait(String),
    /// It takes longer than the caller's patience. The node stays cordoned, and the next run continues.
    GiveUp(String),
    /// Remove the record, and let pods be scheduled again if they could before, in one write.
    Restore {
        /// Whether they could.
        schedulable: bool,
    },
}

/// The next step. `waited` is how long the caller has waited, and `patience` how long it may.
pub fn next_step(node: &ReconfiguredNode, waited: Duration, patience: Duration) -> ReconfigureStep {
    match step(node) {
        ReconfigureStep::Wait(what) if waited >= patience => ReconfigureStep::GiveUp(what),
        step => step,
    }
}

fn step(node: &ReconfiguredNode) -> ReconfigureStep {
    // Exhaustive, so that nothing observed is forgotten.
    let ReconfiguredNode { recorded, schedulable, pods, differs, trouble, network } = node;
    let Some(recorded) = recorded else {
        return match (differs, trouble) {
            (Some(_), _) => {
                ReconfigureStep::Cordon(Reconfiguration { was_schedulable: *schedulable, extra: Map::new() })
            }
            (None, Some(trouble)) => ReconfigureStep::Wait(format!("the agent reports: {trouble}")),
            (None, None) => ReconfigureStep::NothingToDo,
        };
    };
    if differs.is_none() && trouble.is_none() && network.is_some() {
        return ReconfigureStep::Restore { schedulable: recorded.was_schedulable };
    }
    if *schedulable {
        // Somebody has allowed it meanwhile. What was before stays recorded.
        return ReconfigureStep::Cordon(recorded.clone());
    }
    let left: Vec<String> = pods.iter().filter(|(_, goes)| !goes).map(|(name, _)| name.clone()).collect();
    if !left.is_empty() {
        return ReconfigureStep::DeletePods(left);
    }
    if !pods.is_empty() {
        let names: Vec<&str> = pods.iter().map(|(name, _)| name.as_str()).collect();
        return ReconfigureStep::Wait(format!("pods are being deleted: {}", names.join(", ")));
    }
    match network {
        Some(UsedNetwork { pods, .. }) if !pods.is_empty() => {
            ReconfigureStep::Wait(format!("endpoints of pods are left in HNS: {}", pods.join(", ")))
        }
        Some(UsedNetwork { others, balancers, .. }) if !others.is_empty() => {
            ReconfigureStep::RemoveOthers { balancers: balancers.clone(), endpoints: others.clone() }
        }
        _ => {
            let why = differs.as_ref().or(trouble.as_ref()).map_or("", String::as_str);
            ReconfigureStep::Wait(format!("the agent makes the network anew: {why}"))
        }
    }
}

/// Whether the endpoint belongs to no pod: a remote one, or that of the source VIP, which nobody attaches.
#[must_use]
pub fn is_of_kube_proxy(endpoint: &Endpoint, source_vip: Option<Ipv4Addr>) -> bool {
    let has_source_vip = endpoint
        .ip_configurations
        .iter()
        .any(|own| source_vip.is_some_and(|vip| own.ip_address.parse() == Ok(vip)));
    endpoint.is_remote() || has_source_vip && endpoint.host_compute_namespace.is_zero()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(text: &str) -> ReconfigureStep {
        ReconfigureStep::Wait(text.to_owned())
    }

    #[test]
    fn each_state_has_one_next_step() {
        let recorded = |was_schedulable| Some(Reconfiguration { was_schedulable, extra: Map::new() });
        let differs = || Some("VNI 4096".to_owned());
        let begun = ReconfiguredNode {
            recorded: recorded(true),
            differs: differs(),
            network: Some(UsedNetwork::default()),
            ..ReconfiguredNode::default()
        };
        let pod = |goes| vec![("n/web".to_owned(), goes)];
        let (vip, balancer) = (Guid::from_bytes([1; 16]), Guid::from_bytes([2; 16]));
        let used =
            UsedNetwork { pods: vec!["c_Calico".to_owned()], others: vec![vip], balancers: vec![balancer] };
        let unused = UsedNetwork { pods: vec![], ..used.clone() };
        let fresh = ReconfiguredNode { recorded: None, ..begun.clone() };
        let cordon =
            |was| ReconfigureStep::Cordon(Reconfiguration { was_schedulable: was, extra: Map::new() });
        let cases = [
            (ReconfiguredNode { differs: None, ..fresh.clone() }, ReconfigureStep::NothingToDo),
            (
                ReconfiguredNode { differs: None, trouble: Some("HNS is away".to_owned()), ..fresh.clone() },
                wait("the agent reports: HNS is away"),
            ),
            (ReconfiguredNode { schedulable: true, ..fresh.clone() }, cordon(true)),
            (ReconfiguredNode { schedulable: false, ..fresh }, cordon(false)),
            // Somebody has uncordoned it.
            (
                ReconfiguredNode { schedulable: true, recorded: recorded(false), ..begun.clone() },
                cordon(false),
            ),
            (
                ReconfiguredNode { pods: pod(false), ..begun.clone() },
                ReconfigureStep::DeletePods(vec!["n/web".to_owned()]),
            ),
            (ReconfiguredNode { pods: pod(true), ..begun.clone() }, wait("pods are being deleted: n/web")),
            (
                ReconfiguredNode { network: Some(used), ..begun.clone() },
                wait("endpoints of pods are left in HNS: c_Calico"),
            ),
            (
                ReconfiguredNode { network: Some(unused), ..begun.clone() },
                ReconfigureStep::RemoveOthers { balancers: vec![balancer], endpoints: vec![vip] },
            ),
            (begun.clone(), wait("the agent makes the network anew: VNI 4096")),
            (
                ReconfiguredNode { network: None, differs: None, ..begun.clone() },
                wait("the agent makes the network anew: "),
            ),
            // Its report does not say whether the network is as it should be.
            (
                ReconfiguredNode { differs: None, trouble: Some("HNS is away".to_owned()), ..begun.clone() },
                wait("the agent makes the network anew: HNS is away"),
            ),
            (
                ReconfiguredNode { differs: None, ..begun.clone() },
                ReconfigureStep::Restore { schedulable: true },
            ),
            (
                ReconfiguredNode { differs: None, recorded: recorded(false), ..begun.clone() },
                ReconfigureStep::Restore { schedulable: false },
            ),
        ];
        let patience = Duration::from_secs(60);
        for (node, expected) in cases {
            assert_eq!(next_step(&node, Duration::ZERO, patience), expected, "{node:?}");
            let later = match expected {
                ReconfigureStep::Wait(what) => ReconfigureStep::GiveUp(what),
                other => other,
            };
            assert_eq!(next_step(&node, patience, patience), later, "{node:?}");
        }
    }

    #[test]
    fn the_record_keeps_what_others_have_written() {
        let text = r#"{"wasSchedulable":true,"later":1}"#;
        let recorded: Reconfiguration = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_value(&recorded).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }
}

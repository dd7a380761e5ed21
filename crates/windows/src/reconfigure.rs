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
    /// The network that is to be replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Guid>,
    /// What a newer program has recorded.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// What is known about the node at one moment, and what the caller may do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReconfiguredNode {
    /// What is recorded.
    pub recorded: Option<Reconfiguration>,
    /// Whether pods can be scheduled on it.
    pub schedulable: bool,
    /// The pods with an address of its network that the API has.
    pub pods: Vec<NodePod>,
    /// Which of them may be deleted.
    pub drain: Drain,
    /// What the agent reports.
    pub report: NetworkReport,
    /// What HNS has; `None` if the network does not exist.
    pub network: Option<UsedNetwork>,
}

/// What the agent's report says about the network. Each is a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkReport {
    /// Why the report says nothing about now. Then the rest does not count.
    pub stale: Option<String>,
    /// How the network differs from the required one.
    pub differs: Option<String>,
    /// That it is on another adapter than the operator names. The agent never replaces such a network.
    pub other_adapter: Option<String>,
    /// Any other failure of the node as a whole.
    pub trouble: Option<String>,
}

/// A pod with an address of the node's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePod {
    /// `NAMESPACE/NAME`.
    pub name: String,
    /// Whether it is being deleted.
    pub is_ending: bool,
    /// Who starts it again.
    pub origin: PodOrigin,
}

/// Who starts a pod again that is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodOrigin {
    /// A controller, such as a ReplicaSet or a DaemonSet.
    Controller,
    /// The kubelet, by a manifest on the node: a deletion in the API does not end it.
    Kubelet,
    /// Nobody.
    Nobody,
}

/// Which pods may be deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Drain {
    /// None: somebody else drains the node.
    #[default]
    ByOthers,
    /// Those that a controller starts again.
    OfControllers,
    /// Also those that nobody starts again.
    All,
}

/// Who uses the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsedNetwork {
    /// Its identifier.
    pub id: Guid,
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
    /// It must not begin: it could not end, or it would do harm. Nothing was changed.
    Refuse(String),
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
    /// It takes longer than the caller's patience. The next run continues.
    GiveUp {
        /// What has not happened.
        what: String,
        /// Whether the node is cordoned, and stays so.
        cordoned: bool,
    },
    /// Remove the record, and let pods be scheduled again if they could before, in one write.
    Restore {
        /// Whether they could.
        schedulable: bool,
    },
}

/// The next step. `waited` is how long the caller has waited, and `patience` how long it may.
pub fn next_step(node: &ReconfiguredNode, waited: Duration, patience: Duration) -> ReconfigureStep {
    let step = step(node);
    if waited < patience {
        return step;
    }
    let what = match step {
        ReconfigureStep::Wait(what) => what,
        ReconfigureStep::Cordon(_) => "the node can take pods".to_owned(),
        ReconfigureStep::DeletePods(pods) => format!("pods use the network: {}", pods.join(", ")),
        ReconfigureStep::RemoveOthers { endpoints, .. } => {
            format!("{} endpoints that belong to no pod of the node use the network", endpoints.len())
        }
        end => return end,
    };
    ReconfigureStep::GiveUp { what, cordoned: node.recorded.is_some() }
}

fn step(node: &ReconfiguredNode) -> ReconfigureStep {
    // Exhaustive, so that nothing observed is forgotten.
    let ReconfiguredNode { recorded, schedulable, pods, drain, report, network } = node;
    let NetworkReport { stale, differs, other_adapter, trouble } = report;
    let reports = |what: &String| ReconfigureStep::Wait(format!("the agent reports: {what}"));
    let Some(recorded) = recorded else {
        return match (stale, other_adapter, differs, trouble) {
            (Some(stale), ..) => ReconfigureStep::Wait(stale.clone()),
            (_, Some(adapter), ..) => ReconfigureStep::Refuse(adapter.clone()),
            (_, _, Some(_), _) => begin(node),
            (.., Some(trouble)) => reports(trouble),
            _ => ReconfigureStep::NothingToDo,
        };
    };
    let is_replaced = network.as_ref().is_some_and(|network| Some(network.id) != recorded.network);
    let has_trouble = [stale, differs, other_adapter, trouble].into_iter().any(Option::is_some);
    if is_replaced && !has_trouble {
        return ReconfigureStep::Restore { schedulable: recorded.was_schedulable };
    }
    if *schedulable {
        // Somebody has allowed it meanwhile. What was before stays recorded.
        return ReconfigureStep::Cordon(recorded.clone());
    }
    match (stale, differs, other_adapter.as_ref().or(trouble.as_ref()), network) {
        (Some(stale), ..) => ReconfigureStep::Wait(stale.clone()),
        (_, Some(differs), ..) => free(pods, *drain, network.as_ref(), differs),
        (.., Some(trouble), _) => reports(trouble),
        (.., None) => ReconfigureStep::Wait("the agent makes the network anew".to_owned()),
        (.., Some(_)) => ReconfigureStep::Wait(format!(
            "the agent reports no difference, but the network is still the old one; if its settings were changed back, remove the \
             annotation {RECONFIGURATION} of the Node, and uncordon it"
        )),
    }
}

/// The first step, for a network that differs.
fn begin(node: &ReconfiguredNode) -> ReconfigureStep {
    let of = |origin: PodOrigin| -> Vec<&str> {
        let pods = node.pods.iter().filter(|pod| pod.origin == origin && !pod.is_ending);
        pods.map(|pod| pod.name.as_str()).collect()
    };
    let (fixed, lost) = (of(PodOrigin::Kubelet), of(PodOrigin::Nobody));
    if !fixed.is_empty() {
        return ReconfigureStep::Refuse(format!(
            "static pods use the network, and a deletion in the API does not end them: {}; remove their manifests from the node",
            fixed.join(", ")
        ));
    }
    if node.drain == Drain::OfControllers && !lost.is_empty() {
        return ReconfigureStep::Refuse(format!(
            "nobody starts these pods again: {}; delete them, or use --force",
            lost.join(", ")
        ));
    }
    let network = node.network.as_ref().map(|network| network.id);
    ReconfigureStep::Cordon(Reconfiguration { was_schedulable: node.schedulable, network, extra: Map::new() })
}

/// The next step until nothing uses the network, and the agent replaces it.
fn free(pods: &[NodePod], drain: Drain, network: Option<&UsedNetwork>, differs: &str) -> ReconfigureStep {
    let may = |pod: &&NodePod| match (drain, pod.origin) {
        (Drain::ByOthers, _) | (_, PodOrigin::Kubelet) | (Drain::OfControllers, PodOrigin::Nobody) => false,
        (_, PodOrigin::Controller) | (Drain::All, PodOrigin::Nobody) => true,
    };
    let left = pods.iter().filter(|pod| !pod.is_ending).filter(may);
    let left: Vec<String> = left.map(|pod| pod.name.clone()).collect();
    if !left.is_empty() {
        return ReconfigureStep::DeletePods(left);
    }
    if !pods.is_empty() {
        let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        return ReconfigureStep::Wait(format!("these pods use the network: {}", names.join(", ")));
    }
    match network {
        Some(UsedNetwork { pods, .. }) if !pods.is_empty() => {
            ReconfigureStep::Wait(format!("endpoints of pods are left in HNS: {}", pods.join(", ")))
        }
        Some(UsedNetwork { others, balancers, .. }) if !others.is_empty() => {
            ReconfigureStep::RemoveOthers { balancers: balancers.clone(), endpoints: others.clone() }
        }
        _ => ReconfigureStep::Wait(format!("the agent makes the network anew: {differs}")),
    }
}

/// Whether the endpoint belongs to no pod: a remote one, or one that nobody attaches, with one of the addresses that kube-proxy may
/// have as its source VIP.
#[must_use]
pub fn belongs_to_no_pod(endpoint: &Endpoint, source_vips: &[Ipv4Addr]) -> bool {
    let mut own = endpoint.ip_configurations.iter().filter_map(|own| own.ip_address.parse().ok());
    let has_source_vip = own.any(|address| source_vips.contains(&address));
    endpoint.is_remote() || has_source_vip && endpoint.host_compute_namespace.is_zero()
}

#[cfg(test)]
mod tests {
    use tortie_hcn::schema::IpConfig;

    use super::*;

    fn wait(text: &str) -> ReconfigureStep {
        ReconfigureStep::Wait(text.to_owned())
    }

    const OLD: Guid = Guid::from_bytes([9; 16]);

    fn record(was_schedulable: bool) -> Reconfiguration {
        Reconfiguration { was_schedulable, network: Some(OLD), extra: Map::new() }
    }

    fn reports(differs: Option<&str>, trouble: Option<&str>) -> NetworkReport {
        let text = |text: Option<&str>| text.map(str::to_owned);
        NetworkReport { differs: text(differs), trouble: text(trouble), ..NetworkReport::default() }
    }

    fn pod(is_ending: bool, origin: PodOrigin) -> Vec<NodePod> {
        vec![NodePod { name: "n/web".to_owned(), is_ending, origin }]
    }

    /// A node whose network differs, cordoned.
    fn begun() -> ReconfiguredNode {
        ReconfiguredNode {
            recorded: Some(record(true)),
            drain: Drain::OfControllers,
            report: reports(Some("VNI 4096"), None),
            network: Some(UsedNetwork { id: OLD, ..UsedNetwork::default() }),
            ..ReconfiguredNode::default()
        }
    }

    fn check(cases: Vec<(ReconfiguredNode, ReconfigureStep)>) {
        let patience = Duration::from_secs(60);
        for (node, expected) in cases {
            assert_eq!(next_step(&node, Duration::ZERO, patience), expected, "{node:?}");
            let later = next_step(&node, patience, patience);
            match expected {
                ReconfigureStep::NothingToDo
                | ReconfigureStep::Refuse(_)
                | ReconfigureStep::Restore { .. } => {
                    assert_eq!(later, expected);
                }
                _ => {
                    let ReconfigureStep::GiveUp { cordoned, .. } = later else { panic!("{later:?}") };
                    assert_eq!(cordoned, node.recorded.is_some());
                }
            }
        }
    }

    #[test]
    fn it_begins_only_where_it_can_end() {
        let fresh = ReconfiguredNode { recorded: None, ..begun() };
        let old = |report: NetworkReport| NetworkReport { stale: Some("old".to_owned()), ..report };
        let with = |report: NetworkReport| ReconfiguredNode { report, ..fresh.clone() };
        let has = |pods: Vec<NodePod>, drain| ReconfiguredNode { pods, drain, ..fresh.clone() };
        let adapter = NetworkReport { other_adapter: Some("Ethernet 2".to_owned()), ..reports(None, None) };
        let refuse = |text: &str| ReconfigureStep::Refuse(text.to_owned());
        let fixed = "static pods use the network, and a deletion in the API does not end them: n/web; remove their manifests from the node";
        check(vec![
            (with(reports(None, None)), ReconfigureStep::NothingToDo),
            (with(reports(None, Some("HNS is away"))), wait("the agent reports: HNS is away")),
            (with(old(reports(None, None))), wait("old")),
            (with(old(reports(Some("VNI"), None))), wait("old")),
            (with(adapter), refuse("Ethernet 2")),
            (ReconfiguredNode { schedulable: true, ..fresh.clone() }, ReconfigureStep::Cordon(record(true))),
            (fresh.clone(), ReconfigureStep::Cordon(record(false))),
            (
                has(pod(false, PodOrigin::Nobody), Drain::OfControllers),
                refuse("nobody starts these pods again: n/web; delete them, or use --force"),
            ),
            (has(pod(false, PodOrigin::Nobody), Drain::All), ReconfigureStep::Cordon(record(false))),
            (has(pod(false, PodOrigin::Nobody), Drain::ByOthers), ReconfigureStep::Cordon(record(false))),
            (has(pod(false, PodOrigin::Kubelet), Drain::All), refuse(fixed)),
        ]);
    }

    #[test]
    fn the_network_is_freed_and_the_node_restored() {
        let (vip, balancer) = (Guid::from_bytes([1; 16]), Guid::from_bytes([2; 16]));
        let used = UsedNetwork {
            id: OLD,
            pods: vec!["c_Calico".to_owned()],
            others: vec![vip],
            balancers: vec![balancer],
        };
        let unused = UsedNetwork { pods: vec![], ..used.clone() };
        let new = Some(UsedNetwork { id: vip, ..UsedNetwork::default() });
        let delete = || ReconfigureStep::DeletePods(vec!["n/web".to_owned()]);
        let stays = "these pods use the network: n/web";
        let anew = ReconfiguredNode { report: reports(None, None), network: new, ..begun() };
        let has = |pods: Vec<NodePod>, drain| ReconfiguredNode { pods, drain, ..begun() };
        let stale = NetworkReport { stale: Some("old".to_owned()), ..NetworkReport::default() };
        let same = ReconfiguredNode { report: reports(None, None), ..begun() };
        let still_old = step(&same);
        assert!(matches!(&still_old, ReconfigureStep::Wait(what) if what.contains("still the old one")));
        check(vec![
            // Somebody has uncordoned it.
            (
                ReconfiguredNode { schedulable: true, recorded: Some(record(false)), ..begun() },
                ReconfigureStep::Cordon(record(false)),
            ),
            (has(pod(false, PodOrigin::Controller), Drain::OfControllers), delete()),
            (has(pod(true, PodOrigin::Controller), Drain::OfControllers), wait(stays)),
            (has(pod(false, PodOrigin::Controller), Drain::ByOthers), wait(stays)),
            (has(pod(false, PodOrigin::Nobody), Drain::OfControllers), wait(stays)),
            (has(pod(false, PodOrigin::Nobody), Drain::All), delete()),
            (has(pod(false, PodOrigin::Kubelet), Drain::All), wait(stays)),
            // What nothing current says differs is not drained.
            (
                ReconfiguredNode {
                    report: stale.clone(),
                    ..has(pod(false, PodOrigin::Controller), Drain::All)
                },
                wait("old"),
            ),
            (
                ReconfiguredNode { network: Some(used), ..begun() },
                wait("endpoints of pods are left in HNS: c_Calico"),
            ),
            (
                ReconfiguredNode { network: Some(unused), ..begun() },
                ReconfigureStep::RemoveOthers { balancers: vec![balancer], endpoints: vec![vip] },
            ),
            (begun(), wait("the agent makes the network anew: VNI 4096")),
            (ReconfiguredNode { network: None, ..anew.clone() }, wait("the agent makes the network anew")),
            (same, still_old),
            (ReconfiguredNode { report: stale, ..anew.clone() }, wait("old")),
            (
                ReconfiguredNode { report: reports(None, Some("HNS is away")), ..anew.clone() },
                wait("the agent reports: HNS is away"),
            ),
            (anew.clone(), ReconfigureStep::Restore { schedulable: true }),
            (
                ReconfiguredNode { recorded: Some(record(false)), ..anew },
                ReconfigureStep::Restore { schedulable: false },
            ),
        ]);
    }

    /// After a restart of the machine, another subnet may be the first, and kube-proxy keeps its address.
    #[test]
    fn the_source_vip_of_any_subnet_belongs_to_no_pod() {
        let vips = ["10.244.3.2", "10.244.9.2"].map(|address| address.parse().unwrap());
        let endpoint = |address: &str, host_compute_namespace| Endpoint {
            ip_configurations: vec![IpConfig { ip_address: address.into(), ..IpConfig::default() }],
            host_compute_namespace,
            ..Endpoint::default()
        };
        for (address, namespace, expected) in [
            ("10.244.3.2", Guid::ZERO, true),
            ("10.244.9.2", Guid::ZERO, true),
            ("10.244.9.2", OLD, false),
            ("10.244.9.3", Guid::ZERO, false),
        ] {
            assert_eq!(belongs_to_no_pod(&endpoint(address, namespace), &vips), expected, "{address}");
        }
    }

    #[test]
    fn the_record_keeps_what_others_have_written() {
        let text = r#"{"wasSchedulable":true,"network":"09090909-0909-0909-0909-090909090909","later":1}"#;
        let recorded: Reconfiguration = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_value(&recorded).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }
}

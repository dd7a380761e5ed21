//! What happens to the cluster: faults, and changes of its objects.

use std::fmt;
use std::time::Duration;

use crate::rules::{self, Color, Rule, Subject};

/// The number of a node: the Linux nodes first, then the Windows nodes.
pub(crate) type Node = usize;
/// The number of a place for a pod. One pod after the other has it, always on the same node.
pub(crate) type Place = usize;

/// Where the cluster's objects are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Datastore {
    Embedded,
    Etcd,
    Kubernetes,
}

impl Datastore {
    pub(crate) const ALL: [Self; 3] = [Self::Embedded, Self::Etcd, Self::Kubernetes];

    /// Its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Etcd => "etcd",
            Self::Kubernetes => "kubernetes",
        }
    }
}

/// The nodes and places of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) linux: usize,
    pub(crate) windows: usize,
    pub(crate) datastore: Datastore,
}

impl Shape {
    /// Pods of a node.
    const PODS: usize = 2;

    /// Three of ten nodes are Windows nodes, and at least one.
    pub(crate) fn new(nodes: usize, datastore: Datastore) -> Self {
        let windows = (nodes * 3 / 10).max(1);
        Self { linux: nodes - windows, windows, datastore }
    }

    pub(crate) fn nodes(self) -> usize {
        self.linux + self.windows
    }

    pub(crate) fn places(self) -> usize {
        self.nodes() * Self::PODS
    }

    /// The node of a place.
    pub(crate) fn node_of(self, place: Place) -> Node {
        place / Self::PODS
    }

    pub(crate) fn is_windows(self, node: Node) -> bool {
        node >= self.linux
    }

    /// A node's name in a lab.
    pub(crate) fn name(self, node: Node) -> String {
        match node.checked_sub(self.linux) {
            None if node == 0 => "primary".to_owned(),
            None => format!("linux-{}", node + 1),
            Some(0) => "minion".to_owned(),
            Some(windows) => format!("windows-{}", windows + 1),
        }
    }
}

/// What breaks. Faults that last have a duration; the others heal by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The agent ends without a chance to clean up. The lab starts it again.
    KillAgent(Node),
    /// The agent is asked to end, as by an upgrade or a reboot. The lab starts it again.
    StopAgent(Node),
    /// The agent is killed again and again, soon after each start.
    CrashLoop(Node, Duration),
    /// The agent's process stands still.
    PauseAgent(Node, Duration),
    /// Somebody removes the nftables table of a Linux node whose agent was killed a moment before.
    FlushTable(Node),
    /// Somebody removes the routes to the pods of a Linux node, and its VXLAN link.
    RemoveRoutes(Node),
    /// The cable of a node on the underlay is pulled. It carries the datastore, too.
    PartitionNode(Node, Duration),
    /// A node's agent cannot reach the datastore. Its pods are not concerned.
    CutFromDatastore(Node, Duration),
    /// As before, and the agent is killed meanwhile and starts without the datastore; on Linux, somebody removes the table, too.
    StartWithoutDatastore(Node, Duration),
    /// The datastore stands still most of the time.
    SlowDatastore(Duration),
    /// The datastore stands still.
    PauseDatastore(Duration),
    /// The datastore is killed, and started again.
    KillDatastore,
    /// The folder in which an agent keeps its state has no room left.
    FullDisk(Node, Duration),
    /// The HNS of a Windows node stands still, with its switch.
    PauseHns(Node, Duration),
    /// The HNS of a Windows node restarts, and has lost all ACLs and sets.
    RestartHns(Node),
}

impl Fault {
    /// How long it lasts.
    pub(crate) fn duration(self) -> Duration {
        match self {
            Self::KillAgent(_)
            | Self::StopAgent(_)
            | Self::FlushTable(_)
            | Self::RemoveRoutes(_)
            | Self::KillDatastore
            | Self::RestartHns(_) => Duration::ZERO,
            Self::CrashLoop(_, duration)
            | Self::PauseAgent(_, duration)
            | Self::PartitionNode(_, duration)
            | Self::CutFromDatastore(_, duration)
            | Self::StartWithoutDatastore(_, duration)
            | Self::SlowDatastore(duration)
            | Self::PauseDatastore(duration)
            | Self::FullDisk(_, duration)
            | Self::PauseHns(_, duration) => duration,
        }
    }

    /// The node that it concerns; `None` for the datastore.
    pub(crate) fn node(self) -> Option<Node> {
        match self {
            Self::KillAgent(node)
            | Self::StopAgent(node)
            | Self::RemoveRoutes(node)
            | Self::CrashLoop(node, _)
            | Self::PauseAgent(node, _)
            | Self::FlushTable(node)
            | Self::PartitionNode(node, _)
            | Self::CutFromDatastore(node, _)
            | Self::StartWithoutDatastore(node, _)
            | Self::FullDisk(node, _)
            | Self::PauseHns(node, _)
            | Self::RestartHns(node) => Some(node),
            Self::SlowDatastore(_) | Self::PauseDatastore(_) | Self::KillDatastore => None,
        }
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::KillAgent(_) => "KillAgent",
            Self::StopAgent(_) => "StopAgent",
            Self::CrashLoop(..) => "CrashLoop",
            Self::PauseAgent(..) => "PauseAgent",
            Self::FlushTable(_) => "FlushTable",
            Self::RemoveRoutes(_) => "RemoveRoutes",
            Self::PartitionNode(..) => "PartitionNode",
            Self::CutFromDatastore(..) => "CutFromDatastore",
            Self::StartWithoutDatastore(..) => "StartWithoutDatastore",
            Self::SlowDatastore(_) => "SlowDatastore",
            Self::PauseDatastore(_) => "PauseDatastore",
            Self::KillDatastore => "KillDatastore",
            Self::FullDisk(..) => "FullDisk",
            Self::PauseHns(..) => "PauseHns",
            Self::RestartHns(_) => "RestartHns",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Some(node) = self.node() {
            write!(f, " node {node}")?;
        }
        match self.duration() {
            Duration::ZERO => Ok(()),
            duration => write!(f, " for {:.1} s", duration.as_secs_f64()),
        }
    }
}

/// A change of the cluster's objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// The policy of a subject is another one from now on, or there is none.
    Policy(Subject, Option<Rule>),
    /// The pod of a place gets another color.
    Label(Place, Color),
    /// The pod of a place is deleted, and another one with this color is created.
    Replace(Place, Color),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(subject, rule) => {
                write!(f, "Policy {}: {}", rules::key(*subject).name, rules::shown(rule.as_ref()))
            }
            Self::Label(place, color) => write!(f, "Label place {place}: {}", color.name()),
            Self::Replace(place, color) => write!(f, "Replace place {place}: {}", color.name()),
        }
    }
}

/// A fault or a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Fault(Fault),
    Change(Change),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => fault.fmt(f),
            Self::Change(change) => change.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_the_names_of_a_lab() {
        let shape = Shape::new(10, Datastore::Embedded);
        let names: Vec<String> = (0..shape.nodes()).map(|node| shape.name(node)).collect();
        assert_eq!(
            names,
            [
                "primary",
                "linux-2",
                "linux-3",
                "linux-4",
                "linux-5",
                "linux-6",
                "linux-7",
                "minion",
                "windows-2",
                "windows-3"
            ]
        );
        assert_eq!(Shape::new(4, Datastore::Etcd).windows, 1);
        assert_eq!(shape.node_of(shape.places() - 1), 9);
        assert!(!shape.is_windows(6) && shape.is_windows(7));
    }
}

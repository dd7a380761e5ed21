//! A class: ends of flows that no policy can distinguish.

use std::collections::BTreeSet;

use serde::Serialize;
use tortie_api::manifest::first_pod;
use tortie_oracle::Peer;

use super::signature::EndSignature;

/// Ends of flows that no policy of the clusters can distinguish.
#[derive(Debug, Clone)]
pub struct Class {
    /// Its members for readers: `web/front-* (37)`.
    pub name: String,
    /// The kind of its members.
    pub kind: ClassKind,
    /// The pods or nodes, or one address for all outsiders.
    pub members: Vec<Peer>,
    /// The names of its pods, with the workload of each.
    pub(super) pods: Vec<PodName>,
    /// The node of each pod, or each node; empty for outsiders.
    pub(super) nodes: Vec<String>,
    /// The representatives of the class: two if it has two members, on different nodes if possible.
    pub(super) samples: Vec<Representative>,
    /// The signature of the members in each cluster; `None` if they are not in it.
    pub(super) signatures: Vec<Option<EndSignature>>,
}

/// The kind of members of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ClassKind {
    /// Pods with a network of their own.
    Pods,
    /// Nodes, with the pods that use their network.
    Nodes,
    /// Addresses that no pod and no node has.
    Outside,
}

/// A representative of its class.
#[derive(Debug, Clone)]
pub(super) struct Representative {
    pub(super) peer: Peer,
    pub(super) node: String,
}

impl Class {
    /// The number of its members for readers: pods or nodes, where a workload of manifests counts once; one for outsiders.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shown().count()
    }

    /// Its members for readers, without the second pods of workloads.
    pub fn shown(&self) -> impl Iterator<Item = &Peer> {
        self.members.iter().filter(|member| match member {
            Peer::Pod { name, .. } => first_pod(name).is_none(),
            Peer::Node(_) | Peer::Address(_) => true,
        })
    }

    /// The namespaces of its pods; for others a name of their kind.
    pub(super) fn groups(&self) -> BTreeSet<String> {
        match self.kind {
            ClassKind::Pods => self.pods.iter().map(|(namespace, ..)| namespace.clone()).collect(),
            // Neither can be a namespace's name.
            ClassKind::Nodes => BTreeSet::from(["~nodes".to_owned()]),
            ClassKind::Outside => BTreeSet::from([format!("~{}", self.name)]),
        }
    }

    /// Whether it contains a pod of the namespace.
    #[must_use]
    pub fn is_in(&self, namespace: &str) -> bool {
        self.pods.iter().any(|(of, ..)| of == namespace)
    }
}

/// A pod, by its namespace, its workload, and its own name.
pub(super) type PodName = (String, String, String);

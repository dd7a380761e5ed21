//! Errors of the dataplane.

use thiserror::Error;

/// An error, with the operation and its object.
#[derive(Debug, Error)]
pub enum Error {
    /// An interface of the kernel failed.
    #[error(transparent)]
    Kernel(#[from] tortie_kernel::Error),
    /// The kernel refused an nftables table because it lacks necessary modules.
    #[error(
        "{failure}; this kernel lacks {modules}: load them, or take a kernel that has them. Until then no policy of this \
         node changes, and what is new stays unconnected"
    )]
    ModuleMissing {
        /// The missing modules.
        modules: String,
        /// The refusal.
        #[source]
        failure: Box<tortie_kernel::Error>,
    },
    /// The kernel refused the table of Services.
    #[error(
        "Services are not as they should be on this node: the nftables table inet {table} cannot be written: {failure}; {remedy}. Tortie tries again"
    )]
    ServicesRefused {
        /// The name of the table.
        table: String,
        /// What to do.
        remedy: String,
        /// The refusal.
        #[source]
        failure: Box<tortie_kernel::Error>,
    },
    /// The results of CNI plugins cannot be read.
    #[error(
        "the CNI results of the container runtime in {folder} cannot be read: {source}; let the agent read the folder, or name \
         another one (--cni-results)"
    )]
    CniResults {
        /// The folder.
        folder: String,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// A prefix of pods' interfaces is that of an interface of the node.
    #[error(
        "the prefix {prefix:?} of pods' interfaces (--pod-interface-prefix) is also that of {interface}, which is the node's own and would be \
         closed; name a longer prefix"
    )]
    PrefixOfNode {
        /// The prefix.
        prefix: String,
        /// The interface.
        interface: String,
    },
    /// The name of a pod's link belongs to another pod: names are digests, and these two are equal.
    #[error("link {name} belongs to {owner}, whose name has the same hash; rename one of the two pods")]
    LinkTaken {
        /// The name of the link.
        name: String,
        /// The pod that has it, as namespace/pod/interface.
        owner: String,
    },
    /// Calico's agent would restore what is removed, or lose what it needs.
    #[error("Calico runs on this node: {sign}. Stop it first: kubectl delete daemonset calico-node")]
    CalicoRuns {
        /// Why it seems to run.
        sign: String,
    },
    /// flannel's daemon would restore some of what is removed.
    #[error("flanneld runs on this node; keep its DaemonSet off the node, or stop it, first")]
    FlannelRuns,
    /// Pods that flannel's plugin has connected would lose their network.
    #[error(
        "pods of flannel are on this node ({links} at the bridge cni0): drain the node, and delete the pods of DaemonSets that have no \
         hostNetwork, which a drain leaves (kubectl get pods -A -o wide --field-selector spec.nodeName=NODE)"
    )]
    PodsOfFlannel {
        /// The names of their links, separated by commas.
        links: String,
    },
    /// Pods of flannel may be at this bridge.
    #[error(
        "the bridge cni0 has ports ({links}), and no known network of flannel has its address: name flannel's networks by \
         --flannel-network, or drain the node first"
    )]
    PortsOfUnknownBridge {
        /// The names of the ports, separated by commas.
        links: String,
    },
    /// Without an agent of Calico, the removal of Tortie's policy would open all pods.
    #[error(
        "Calico does not run on this node, so pods would have no policy; start Calico first, and wait until its agent is \
         ready"
    )]
    CalicoMissing,
    /// Without Tortie's table, the removal of Calico's policy would open all pods.
    #[error(
        "Tortie's policy is not in force on this node (there is no nftables table inet {table}, or it only keeps pods closed until the datastore answers), so nothing of Calico is \
         removed; start Tortie's agent first"
    )]
    NotInForce {
        /// The name of the table.
        table: String,
    },
}

impl Error {
    /// The kernel's error number, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel(failure) => failure.errno(),
            Self::ModuleMissing { failure, .. } | Self::ServicesRefused { failure, .. } => failure.errno(),
            Self::LinkTaken { .. }
            | Self::CalicoRuns { .. }
            | Self::CalicoMissing
            | Self::FlannelRuns
            | Self::PodsOfFlannel { .. }
            | Self::PortsOfUnknownBridge { .. }
            | Self::PrefixOfNode { .. }
            | Self::NotInForce { .. } => None,
            Self::CniResults { source, .. } => source.raw_os_error(),
        }
    }
}

/// Whether a deletion failed because the object was already gone: a link may go at any time, for instance with its
/// namespace, and its routes with it.
pub(crate) fn is_gone(error: &tortie_kernel::Error) -> bool {
    const GONE: [i32; 4] = [libc::ENODEV, libc::ESRCH, libc::ENOENT, libc::EADDRNOTAVAIL];
    error.errno().is_some_and(|errno| GONE.contains(&errno))
}

/// Counts the deletion of what is already gone as done.
pub(crate) fn tolerate_gone(result: tortie_kernel::Result<()>) -> tortie_kernel::Result<()> {
    match result {
        Err(error) if is_gone(&error) => Ok(()),
        result => result,
    }
}

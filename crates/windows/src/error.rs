//! Errors between Tortie and HNS.

use std::fmt;

use tortie_dataplane::Reason;
use tortie_hcn::Class;

use crate::unrecognised::Unrecognised;

/// What becomes of the routes of a network that differs from the required one, while pods use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptRoutes {
    /// They follow the other nodes.
    Followed,
    /// They follow the other nodes, with the network's own VNI, because HNS knows the network by it.
    FollowedWithOwnVni,
    /// They stay as they are, because the required ones are of another kind.
    Frozen,
}

impl fmt::Display for KeptRoutes {
    /// What an operator should know about it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeptRoutes::Followed => "",
            KeptRoutes::FollowedWithOwnVni => {
                "; until then, its pods and nodes with the other VNI do not reach each other"
            }
            KeptRoutes::Frozen => {
                "; until then, its routes are frozen: its pods reach no new block of another node, and none that has moved"
            }
        })
    }
}

/// Why something is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call failed.
    #[error(transparent)]
    Hns(#[from] tortie_hcn::Error),
    /// The overlay network differs from the required one, and cannot be recreated while it is in use.
    #[error(
        "network {name} has {found} where {wanted} is needed, and {endpoints} endpoints: run `tortie windows \
         reconfigure` on the node, or drain it and delete the network, and it is made anew{routes}"
    )]
    NetworkDiffers {
        /// Its name.
        name: String,
        /// Its actual property.
        found: String,
        /// The required property.
        wanted: String,
        /// The number of endpoints that would lose their network.
        endpoints: usize,
        /// What becomes of its routes.
        routes: KeptRoutes,
    },
    /// The same, and the network is on another adapter than the required one. It is never recreated.
    #[error(
        "network {name} has {found} where {wanted} is needed, and is on adapter {adapter}, while --adapter or the node's address names \
         another one: correct --adapter, or drain the node, delete the network and restart the agent{routes}"
    )]
    AdapterDiffers {
        /// Its name.
        name: String,
        /// Its actual property.
        found: String,
        /// The required property.
        wanted: String,
        /// Its adapter.
        adapter: String,
        /// What becomes of its routes.
        routes: KeptRoutes,
    },
    /// HNS has created the network, but does not report its tunnel end yet.
    #[error("network {name} has no {missing} yet; HNS adds it when its switch is ready")]
    NetworkNotReady {
        /// Its name.
        name: String,
        /// The missing policy.
        missing: &'static str,
    },
    /// The adapter for the overlay network must not be used.
    #[error(
        "the overlay network cannot be made: {problem}; name the physical adapter with the node's address (--adapter)"
    )]
    Adapter {
        /// The problem.
        problem: String,
    },
    /// There is no network for the node's pods.
    #[error("network {0} does not exist; it is made when the node has an IPAM block")]
    NoNetwork(String),
    /// A pod has no endpoint.
    #[error("HNS has no endpoint for container {container_id}; it is made by a CNI ADD")]
    NoEndpoint {
        /// The sandbox.
        container_id: String,
    },
    /// It is not known which endpoint belongs to a pod that another CNI plugin has connected.
    #[error("{0}")]
    Unrecognised(Unrecognised),
    /// The results of CNI plugins cannot be read.
    #[error(
        "the CNI results of the container runtime in {folder} cannot be read: {problem}; let the agent read the folder, or name another \
         one (--cni-results)"
    )]
    CniResults {
        /// The folder.
        folder: String,
        /// The error of the system.
        problem: String,
    },
    /// HNS reported success and did something else.
    #[error("{object}: HNS accepted {what}, but it is not as it should be when read back")]
    NotTaken {
        /// The network or endpoint.
        object: String,
        /// What was sent.
        what: &'static str,
    },
    /// An existing object is not as it should be.
    #[error("{object}: {problem}")]
    Differs {
        /// The network or endpoint.
        object: String,
        /// The problem.
        problem: String,
    },
}

impl Error {
    /// Whether a retry without any change may help.
    pub fn is_passing(&self) -> bool {
        match self {
            // The next answer may differ, and only reading again shows the state.
            Error::Hns(_) | Error::NotTaken { .. } => true,
            Error::NetworkNotReady { .. } | Error::NoNetwork(_) | Error::NoEndpoint { .. } => true,
            Error::Unrecognised(_) | Error::CniResults { .. } => true,
            // It may come up, or get an address.
            Error::Adapter { .. } => true,
            Error::NetworkDiffers { .. } | Error::AdapterDiffers { .. } | Error::Differs { .. } => false,
        }
    }

    /// Whether pods go on using a network that differs, and its routes should follow the other nodes.
    pub(crate) fn keeps_routes_followed(&self) -> bool {
        match self {
            Error::NetworkDiffers { routes, .. } | Error::AdapterDiffers { routes, .. } => {
                *routes != KeptRoutes::Frozen
            }
            _ => false,
        }
    }

    /// Whether HNS, or the connection to it, does not answer at all.
    pub(crate) fn is_unavailable(&self) -> bool {
        matches!(self, Error::Hns(error) if error.class() == Class::Unavailable)
    }

    /// The reason of a condition that reports it.
    pub fn reason(&self) -> Reason {
        match self {
            Error::Hns(error) if error.class() == Class::Unavailable => Reason::HnsUnavailable,
            Error::Hns(_) => Reason::HnsRefused,
            Error::NetworkDiffers { .. } => Reason::NetworkDiffers,
            Error::AdapterDiffers { .. } => Reason::AdapterDiffers,
            Error::NetworkNotReady { .. } => Reason::NetworkNotReady,
            Error::Adapter { .. } => Reason::AdapterNotUsable,
            Error::NoNetwork(_) => Reason::NetworkMissing,
            Error::NoEndpoint { .. } => Reason::EndpointMissing,
            Error::Unrecognised(why) => why.reason(),
            Error::CniResults { .. } => Reason::PolicyNotInForce,
            Error::NotTaken { .. } => Reason::HnsDidNotTake,
            Error::Differs { .. } => Reason::Differs,
        }
    }
}

//! What can go wrong between Tortie and HNS.

use tortie_dataplane::Reason;
use tortie_hcn::Class;

/// Why something is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A call failed.
    #[error(transparent)]
    Hns(#[from] tortie_hcn::Error),
    /// The overlay network is another one than is needed, and cannot be made anew while it is in use.
    #[error(
        "network {name} has {found} where {wanted} is needed, and {endpoints} endpoints: drain the node, delete the \
         network, and it is made anew"
    )]
    NetworkDiffers {
        /// Its name.
        name: String,
        /// What it has.
        found: String,
        /// What it should have.
        wanted: String,
        /// How many endpoints would lose their network.
        endpoints: usize,
    },
    /// HNS has made the network, but does not say yet where its end of the tunnel is.
    #[error("network {name} has no {missing} yet; HNS adds it when its switch is ready")]
    NetworkNotReady {
        /// Its name.
        name: String,
        /// The policy that is missing.
        missing: &'static str,
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
    /// HNS reported success and did something else.
    #[error("{object}: HNS accepted {what}, but it is not as it should be when read back")]
    NotTaken {
        /// The network or endpoint.
        object: String,
        /// What was sent.
        what: &'static str,
    },
    /// Something is there that is not as it should be.
    #[error("{object}: {problem}")]
    Differs {
        /// The network or endpoint.
        object: String,
        /// What is missing or different.
        problem: String,
    },
}

impl Error {
    /// Whether trying again without any change may help.
    pub fn is_passing(&self) -> bool {
        match self {
            // Whatever HNS said: it may say something else next time, and only reading again tells.
            Error::Hns(_) | Error::NotTaken { .. } => true,
            Error::NetworkNotReady { .. } | Error::NoNetwork(_) | Error::NoEndpoint { .. } => true,
            Error::NetworkDiffers { .. } | Error::Differs { .. } => false,
        }
    }

    /// Whether HNS, or the way to it, does not answer at all.
    pub(crate) fn is_unavailable(&self) -> bool {
        matches!(self, Error::Hns(error) if error.class() == Class::Unavailable)
    }

    /// The reason of a condition that reports it.
    pub fn reason(&self) -> Reason {
        match self {
            Error::Hns(error) if error.class() == Class::Unavailable => Reason::HnsUnavailable,
            Error::Hns(_) => Reason::HnsRefused,
            Error::NetworkDiffers { .. } => Reason::NetworkDiffers,
            Error::NetworkNotReady { .. } => Reason::NetworkNotReady,
            Error::NoNetwork(_) => Reason::NetworkMissing,
            Error::NoEndpoint { .. } => Reason::EndpointMissing,
            Error::NotTaken { .. } => Reason::HnsDidNotTake,
            Error::Differs { .. } => Reason::Differs,
        }
    }
}

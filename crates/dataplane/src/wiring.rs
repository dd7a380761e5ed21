//! Connecting one pod: the part of a CNI ADD that touches the operating system before policy does.

use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::Ipv4Net;
use thiserror::Error;

use crate::{EndpointId, MacAddress};

/// Connects and disconnects pods. Calls may come from several threads at once, for different pods.
pub trait PodWiring: Send + Sync {
    /// Gives the pod its interface, closed until [`Dataplane`](crate::Dataplane) has put its policy in force. Doing it
    /// again for the same container changes nothing.
    ///
    /// # Errors
    /// What failed, on which object; nothing of a failed attempt is left behind.
    fn connect(&self, pod: &PodAttachment) -> Result<PodInterface, WiringError>;

    /// Takes the pod's interface away, if it is there. May answer before the operating system is done, but then under
    /// a name that a pod that is made again does not need.
    ///
    /// # Errors
    /// What failed, on which object. That nothing was there is no error.
    fn disconnect(&self, endpoint: &EndpointId, container_id: &str) -> Result<(), WiringError>;

    /// The name that the host's end of this pod's link has or will have.
    fn host_interface(&self, endpoint: &EndpointId, container_id: &str) -> String;

    /// Waits until the interface passes packets, at most so long, and says whether it does.
    fn wait_until_live(&self, interface: &PodInterface, patience: Duration) -> bool;

    /// Whether the pod's interface is there as [`connect`](Self::connect) made it (CNI CHECK).
    ///
    /// # Errors
    /// What is missing or different.
    fn check(&self, pod: &PodAttachment) -> Result<(), WiringError>;
}

/// What is needed to connect a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAttachment {
    /// Which endpoint.
    pub endpoint: EndpointId,
    /// The sandbox (`CNI_CONTAINERID`).
    pub container_id: String,
    /// The pod's network namespace (`CNI_NETNS`): a path on Linux, the GUID of an HCN namespace on Windows.
    pub netns: String,
    /// The pod's address.
    pub address: Ipv4Addr,
    /// The IPAM block that the address is from.
    pub block: Ipv4Net,
    /// The MTU of the pod's interface, in bytes.
    pub mtu: u32,
}

/// The interface that a pod got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInterface {
    /// The host's end on Linux, the HNS endpoint's name on Windows.
    pub host_interface: String,
    /// The pod's MAC address.
    pub mac: MacAddress,
}

/// Why a pod could not be connected, or disconnected.
#[derive(Debug, Error)]
pub enum WiringError {
    /// A call to the operating system failed.
    #[error("{object}: {operation}: {source}")]
    System {
        /// What was being done.
        operation: &'static str,
        /// The link, namespace, endpoint … that it was done to.
        object: String,
        /// What the system said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Something is there that is not as it should be.
    #[error("{object}: {problem}")]
    Differs {
        /// The link, endpoint …
        object: String,
        /// What is missing or different.
        problem: String,
    },
}

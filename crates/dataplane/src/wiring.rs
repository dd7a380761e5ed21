//! Connects one pod: the part of a CNI ADD that uses the operating system, before policy.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use thiserror::Error;

use crate::{EndpointId, MacAddress};

/// Connects and disconnects pods. Calls may come from several threads at once, for different pods.
pub trait PodWiring: Send + Sync {
    /// Makes the pod's link while its address is not known yet: closed, down in the pod, and without addresses.
    /// [`connect`](Self::connect) then finishes it, and [`disconnect`](Self::disconnect) removes it. `None` if that is not
    /// possible here, or if there is something of that name; then [`connect`](Self::connect) does everything.
    ///
    /// # Errors
    /// The failed operation and its object; a failed attempt leaves nothing behind.
    fn prepare(&self, _link: &PodLink) -> Result<Option<PreparedLink>, WiringError> {
        Ok(None)
    }

    /// Deletes a link that [`prepare`](Self::prepare) has made, whether or not it is finished, at once: the next attempt needs its
    /// name in the pod.
    ///
    /// # Errors
    /// The failed operation and its object.
    fn abandon(&self, _prepared: PreparedLink) -> Result<(), WiringError> {
        Ok(())
    }

    /// Connects the pod by a link that [`prepare`](Self::prepare) has made.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    fn finish(&self, _prepared: PreparedLink, pod: &PodAttachment) -> Result<PodInterface, WiringError> {
        self.connect(pod)
    }

    /// The interface that [`finish`](Self::finish) will return, so that the pod can be published meanwhile; `None` if only
    /// connecting it shows that.
    fn planned(&self, _pod: &PodAttachment) -> Option<PodInterface> {
        None
    }

    /// Gives the pod its interface, which is closed until [`Dataplane`](crate::Dataplane) has its policy in force.
    /// Repeating the call for the same container changes nothing.
    ///
    /// # Errors
    /// The failed operation and its object; a failed attempt leaves nothing behind.
    fn connect(&self, pod: &PodAttachment) -> Result<PodInterface, WiringError>;

    /// Whether a pod's interface may get a MAC address that the pod requests.
    fn takes_mac(&self) -> bool {
        false
    }

    /// Whether the bandwidth of pods can be limited here.
    fn limits_bandwidth(&self) -> bool {
        false
    }

    /// Whether pods may have IPv6 addresses here.
    ///
    /// # Errors
    /// The system did not tell.
    fn has_ipv6(&self) -> Result<bool, WiringError> {
        Ok(false)
    }

    /// Lets the operating system choose the address of a pod that is not connected yet, but none of those that were
    /// `refused`; `None` if it chooses no addresses. A repeated call for the same container has the same answer, and
    /// [`disconnect`](Self::disconnect) gives the address back.
    ///
    /// # Errors
    /// The failed operation and its object.
    fn choose_address(
        &self,
        _endpoint: &EndpointId,
        _container_id: &str,
        _refused: &[Ipv4Addr],
    ) -> Result<Option<Ipv4Addr>, WiringError> {
        Ok(None)
    }

    /// Removes the pod's interface, if it exists. May return before the operating system is done, but then the
    /// interface has a name that a recreated pod does not need.
    ///
    /// # Errors
    /// The failed operation and its object. A missing interface is no error.
    fn disconnect(&self, endpoint: &EndpointId, container_id: &str) -> Result<(), WiringError>;

    /// The name that the host end of this pod's link has or will have.
    fn host_interface(&self, endpoint: &EndpointId, container_id: &str) -> String;

    /// Waits until the interface forwards packets, at most this long, and returns whether it does.
    fn wait_until_live(&self, interface: &PodInterface, timeout: Duration) -> bool;

    /// Checks that the pod's interface is as [`connect`](Self::connect) created it (CNI CHECK).
    ///
    /// # Errors
    /// The difference.
    fn check(&self, pod: &PodAttachment) -> Result<(), WiringError>;
}

/// The properties of a pod to connect whose address is not known yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLink {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// The sandbox (`CNI_CONTAINERID`).
    pub container_id: String,
    /// The pod's network namespace (`CNI_NETNS`).
    pub netns: String,
    /// The MTU of the pod's interface, in bytes; none for that of the node's overlay.
    pub mtu: Option<u32>,
}

/// A link that [`PodWiring::prepare`] has made: the operating system's number of its host end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedLink(pub u32);

/// The properties of a pod to connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAttachment {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// The sandbox (`CNI_CONTAINERID`).
    pub container_id: String,
    /// The pod's network namespace (`CNI_NETNS`): a path on Linux, the GUID of an HCN namespace on Windows.
    pub netns: String,
    /// The pod's addresses: at least one, at most one of each family, IPv4 first.
    pub addresses: Vec<PodAddress>,
    /// The MTU of the pod's interface, in bytes; none for that of the node's overlay.
    pub mtu: Option<u32>,
    /// The MAC address that the pod's interface must have; none for one that the wiring chooses. Only a wiring that
    /// [takes one](PodWiring::takes_mac) gets it.
    pub mac: Option<MacAddress>,
    /// Only a wiring that [limits bandwidth](PodWiring::limits_bandwidth) gets limits.
    pub limits: BandwidthLimits,
    /// How programs in the pod resolve names. On Linux, kubelets write that into the pod's file system themselves.
    pub dns: PodDns,
}

/// The limits of a pod's bandwidth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BandwidthLimits {
    /// Of what the pod receives.
    pub ingress: Option<BandwidthLimit>,
    /// Of what the pod sends.
    pub egress: Option<BandwidthLimit>,
}

/// A limit of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandwidthLimit {
    /// The rate in bytes a second.
    pub bytes_per_second: u64,
    /// How many bytes may pass at once after a pause; none for a size that the wiring chooses. A wiring may raise or lower it to
    /// what is possible.
    pub burst: Option<u32>,
}

/// How a pod resolves names (the key `dns` of CNI). Empty members leave the choice to the operating system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDns {
    /// The servers, in their order.
    pub servers: Vec<IpAddr>,
    /// The domain of the pod's own name.
    pub domain: String,
    /// The domains that are appended to short names, in their order.
    pub search: Vec<String>,
    /// Options of the resolver, as in `resolv.conf`.
    pub options: Vec<String>,
}

/// An address of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodAddress {
    /// The address.
    pub address: IpAddr,
    /// The IPAM block that it is from.
    pub block: IpNet,
}

impl PodAddress {
    /// An IPv4 address.
    #[must_use]
    pub fn ipv4(address: Ipv4Addr, block: Ipv4Net) -> Self {
        Self { address: address.into(), block: block.into() }
    }
}

/// The interface of a connected pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInterface {
    /// The host end on Linux, the HNS endpoint's name on Windows.
    pub host_interface: String,
    /// The MAC address of the host end; `None` on Windows, where there is no interface for it.
    pub host_mac: Option<MacAddress>,
    /// The pod's MAC address.
    pub mac: MacAddress,
    /// The pod's addresses, in the order of the attachment.
    pub addresses: Vec<InterfaceAddress>,
}

/// An address of a pod's interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address, with the length of its network's prefix.
    pub address: IpNet,
    /// The next hop of the default route of its family.
    pub gateway: IpAddr,
}

/// Why a pod could not be connected, or disconnected.
#[derive(Debug, Error)]
pub enum WiringError {
    /// A call to the operating system failed.
    #[error("{object}: {operation}: {source}")]
    System {
        /// The operation.
        operation: &'static str,
        /// The link, namespace, endpoint or other object.
        object: String,
        /// The error of the system.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An existing object is not as required.
    #[error("{object}: {problem}")]
    Differs {
        /// The link, endpoint or other object.
        object: String,
        /// The difference.
        problem: String,
    },
}

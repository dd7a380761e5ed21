//! Why it is not known which HNS endpoint belongs to a pod that another CNI plugin has connected.

use std::net::IpAddr;

use tortie_dataplane::Reason;

/// Why the endpoint of a pod is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unrecognised {
    /// No endpoint has this address.
    NoEndpoint(IpAddr),
    /// It has this address, and is another pod's.
    OfAnother {
        /// The endpoint.
        endpoint: String,
        /// The address.
        address: IpAddr,
        /// The other pod.
        owner: String,
    },
    /// Nothing proves that these endpoints with the address are the pod's.
    Unproven {
        /// The endpoints.
        endpoints: Vec<String>,
        /// The address.
        address: IpAddr,
        /// Whether they are closed. Those without a namespace are not, because they may be the node's own.
        are_closed: bool,
    },
    /// Several endpoints are the pod's.
    Several(Vec<String>),
}

impl Unrecognised {
    pub(crate) fn reason(&self) -> Reason {
        match self {
            Unrecognised::NoEndpoint(_) => Reason::InterfaceMissing,
            Unrecognised::OfAnother { .. } | Unrecognised::Unproven { .. } | Unrecognised::Several(_) => {
                Reason::InterfaceUnproven
            }
        }
    }
}

impl std::fmt::Display for Unrecognised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let unknown = "so its endpoint is unknown and its policy is not in force";
        match self {
            Unrecognised::NoEndpoint(address) => write!(
                f,
                "no HNS endpoint of this node has its address {address}, {unknown}; Tortie waits for the CNI plugin"
            ),
            Unrecognised::OfAnother { endpoint, address, owner } => write!(
                f,
                "HNS endpoint {endpoint} has its address {address}, and belongs to pod {owner}, {unknown}. If this lasts, the address in \
                 the status of one of the two pods is wrong: delete that pod"
            ),
            Unrecognised::Unproven { endpoints, address, are_closed } => write!(
                f,
                "HNS endpoint {} has its address {address}, but no result of a CNI plugin proves that it is this pod's, {unknown}; it \
                 {}. Give the agent the folder with the CNI results of the container runtime (--cni-results)",
                endpoints.join(", "),
                if *are_closed {
                    "is closed"
                } else {
                    "stays open, because it is in no namespace, as the node's own are"
                },
            ),
            Unrecognised::Several(endpoints) => write!(
                f,
                "several HNS endpoints are its own ({}), {unknown}; they are closed. Delete the pod, or those endpoints that are left \
                 over",
                endpoints.join(", ")
            ),
        }
    }
}

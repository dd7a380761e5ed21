//! The Kubernetes kinds that Tortie reads. Other fields stay in the object.

mod cluster_policy;
mod core;
mod flannel;
mod implied_slices;
mod network_policy;
mod service;
mod workload;

pub use cluster_policy::{ClusterPeer, ClusterPolicy, ClusterPort, ClusterRule, ClusterTier};
pub use core::{
    Container, ContainerPort, Namespace, Node, NodeAddress, NodeSpec, ObservedNode, Pod, PodIp, PodSpec,
    PodStatus, ServiceAccount,
};
pub use flannel::{FlannelBackend, FlannelLease, OfFamilies};
pub(crate) use implied_slices::check_service;
pub use implied_slices::{implied_slices, is_implied};
pub use network_policy::{
    IntOrString, IpBlock, KubernetesNetworkPolicy, LabelSelector, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicyRule, NetworkPolicySpec, Requirement,
};
pub use service::{
    ClientIpConfig, EndpointHint, EndpointHints, EndpointSlice, LoadBalancerIngress, LoadBalancerStatus,
    Service, ServiceCidr, ServiceCidrSpec, ServicePort, ServiceSpec, ServiceStatus, SessionAffinityConfig,
    SliceConditions, SliceEndpoint, SlicePort,
};
pub(crate) use workload::pod_of;
pub use workload::{Placement, Workload, name_of};

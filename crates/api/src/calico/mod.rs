//! `projectcalico.org/v3`.

mod endpoint;
mod policy;
mod pool;

pub use endpoint::{EndpointPort, WorkloadEndpoint, WorkloadEndpointSpec};
pub use policy::{
    EntityRule, GlobalNetworkPolicy, Icmp, NetworkPolicy, PolicySpec, PolicyType, Rule, ServiceAccountMatch,
    ServiceMatch,
};
pub use pool::{EncapsulationMode, IpPool, IpPoolSpec};

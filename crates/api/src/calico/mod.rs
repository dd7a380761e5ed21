//! `projectcalico.org/v3`.

mod bgp;
mod cluster;
mod controllers;
mod endpoint;
mod felix;
mod host;
mod ipam;
pub(crate) mod node;
mod policy;
mod pool;
mod sets;
mod tier;
mod written;

pub use bgp::{
    AddCommunity, BgpConfiguration, BgpConfigurationSpec, BgpFilter, BgpFilterRule, BgpFilterSpec,
    BgpPassword, BgpPeer, BgpPeerSpec, Communities, Community, Operation, PrefixAdvertisement, PrefixLength,
    PrependAsPath, SecretKey, ServiceBlock, SetPriority,
};
pub use cluster::{
    CalicoNodeStatus, CalicoNodeStatusSpec, ClusterInformation, ClusterInformationSpec, StatusClass,
};
pub use controllers::{
    AssignIps, AutoHostEndpoint, Controllers, CopyController, KubeControllersConfiguration,
    KubeControllersConfigurationSpec, LoadBalancerController, MigrationController, NodeController,
    PolicyMigrationController, Switch,
};
pub use endpoint::{EndpointPort, WorkloadEndpoint, WorkloadEndpointPort, WorkloadEndpointSpec};
pub use felix::{
    BgpFromPods, EndpointToHostAction, EstablishedFlows, FailsafePort, FelixConfiguration,
    FelixConfigurationSpec, FilterDenyAction, NatOutgoingExclusions, PodSourcesFromOutside, PolicyCounters,
    WindowsPolicySets,
};
pub use host::{HostEndpoint, HostEndpointSpec};
pub use ipam::{IpReservation, IpReservationSpec, IpamConfig, IpamConfigSpec};
pub use node::{from_calico_node, to_calico_node, without_fields_of_etcd};
pub use policy::{
    EntityRule, GlobalNetworkPolicy, Http, HttpPath, Icmp, NetworkPolicy, PolicySpec, PolicyType, Rule,
    RuleMetadata, ServiceAccountMatch, ServiceMatch, StagedAction,
};
pub use pool::{EncapsulationMode, IpPool, IpPoolSpec};
pub use sets::{NetworkSet, NetworkSetSpec};
pub use tier::{Profile, ProfileSpec, Tier, TierDefault, TierSpec, WELL_KNOWN_TIERS};
pub(crate) use written::check_as_written;

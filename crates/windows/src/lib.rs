//! The Windows dataplane: makes a node match its state through the Host Compute Network API.
//!
//! [`ensure_network`] creates the network of the node's pods and returns what other nodes need to know. [`WindowsWiring`]
//! connects pods, which are closed from the first moment. [`WindowsDataplane`] enforces their policy and keeps the
//! routes to other nodes.
//!
//! It uses [`tortie_hcn::Hcn`], and is compiled and tested on every system. Only `NotFound` codes mean that an object
//! is absent. After any other failure nothing is known and nothing is concluded, and the caller is asked to call
//! again (docs/hns.md, Changes).

mod acl;
mod acl_reconciler;
mod adapter;
mod anchor;
mod backoff;
mod bridge;
mod cleanup;
mod cost;
mod dataplane;
mod endpoint;
mod error;
mod firewall_opening;
mod firewall_rules;
mod hold;
mod host;
mod host_ports;
mod host_routes;
mod kube_proxy;
mod learned_routes;
mod load_balancers;
mod network_lock;
mod network_spec;
mod node_routes;
mod outbound;
mod pod_network;
mod policy_sets;
mod recognition;
mod reconfigure;
mod results_watch;
mod routes;
mod saved_report;
mod show;
mod static_rules;
mod unrecognised;
mod wiring;

pub use adapter::{AdapterSelector, AdapterSelectorError};
pub use anchor::remove_anchor;
pub use bridge::is_of_node;
pub use cleanup::{Cleanup, clean_up};
pub use cost::{Because, Cost, CostModel, Costing, PolicyCost, RuleCost, RuleCounts, Saving, Tally};
pub use dataplane::{Clock, WindowsDataplane};
pub use endpoint::endpoint_id;
pub use error::{Error, KeptRoutes};
pub use firewall_opening::{FirewallOpening, FirewallOpenings};
pub use firewall_rules::Opening;
pub use hold::HeldEndpoints;
pub use host::Host;
pub use host_routes::HostRoutes;
pub use kube_proxy::{kube_proxy_flags, source_vip, source_vips};
pub use learned_routes::LearnedRoutes;
pub use network_lock::NetworkLock;
pub use network_spec::{NetworkKind, NetworkSpec, adapter_of};
pub use node_routes::remove_node_routes;
pub use outbound::CurrentNetworks;
pub use pod_network::{
    CurrentPodNetwork, PodNetwork, ensure_network, ensure_network_on, ensure_network_with, existing_network,
};
pub use recognition::PolicyOnly;
pub use reconfigure::{
    Drain, NetworkReport, NodePod, PodOrigin, RECONFIGURATION, Reconfiguration, ReconfigureStep,
    ReconfiguredNode, UsedNetwork, belongs_to_no_pod, next_step,
};
pub use saved_report::SavedReport;
pub use static_rules::{StaticRules, StaticRulesError};
pub use unrecognised::Unrecognised;
pub use wiring::WindowsWiring;

/// The VXLAN port of Windows.
const VXLAN_PORT: u16 = 4789;

/// The name of the network of the node's pods, as in Calico.
pub const NETWORK: &str = "Calico";

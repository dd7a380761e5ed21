//! The parsers.

pub mod agent;
pub mod bgp;
pub mod cni;
pub mod datastores;
pub mod flannel;
pub mod hns;
pub mod kernel;
pub mod kubernetes;
pub mod manifests;
pub mod objects;
pub mod selectors;

use crate::{Bound, Target};

/// The size that is enough for all the branches of most parsers, in bytes.
const SMALL: usize = 4096;
/// The size for parsers of what has many parts.
const LARGE: usize = 16 << 10;

/// The targets, in the order of the crates.
pub const TARGETS: &[Target] = &[
    small("selector", selectors::selector),
    large("manifest", manifests::manifest),
    large("manifest_conversion", manifests::manifest_conversion),
    large("stored_object", objects::stored_object),
    large("policy", objects::policy),
    small("ipam_block", objects::ipam_block),
    small("etcd_key", datastores::etcd_key),
    large("etcd_value", datastores::etcd_value),
    large("etcd_answer", datastores::etcd_answer),
    large("embedded_record", datastores::embedded_record),
    large("service_event", datastores::service_event),
    large("service_message", datastores::service_message),
    small("certificate", datastores::certificate),
    large("kubernetes_watch", kubernetes::kubernetes_watch),
    large("kubernetes_list", kubernetes::kubernetes_list),
    small("kubernetes_secret", kubernetes::kubernetes_secret),
    small("kubeconfig", kubernetes::kubeconfig),
    small("flannel_config", flannel::flannel_config),
    small("flannel_leases", flannel::flannel_leases),
    small("netlink", kernel::netlink),
    small("legacy_table", kernel::legacy_table),
    small("bgp_message", bgp::bgp_message),
    small("bgp_session", bgp::bgp_session),
    large("hns_reply", hns::hns_reply),
    large("hns_frame", hns::hns_frame),
    small("hns_report", hns::hns_report),
    small("static_rules", hns::static_rules),
    small("cni_call", cni::cni_call),
    small("cni_message", cni::cni_message),
    small("cni_result", cni::cni_result),
    small("agent_call", agent::agent_call),
    small("agent_question", agent::agent_question),
    small("agent_option", agent::agent_option),
    large("saved_state", agent::saved_state),
];

/// A target with the usual bound and small inputs.
const fn small(name: &'static str, parse: fn(&[u8])) -> Target {
    Target { name, parse, bound: Bound::USUAL, largest_input: SMALL }
}

/// A target with the usual bound and large inputs.
const fn large(name: &'static str, parse: fn(&[u8])) -> Target {
    Target { name, parse, bound: Bound::USUAL, largest_input: LARGE }
}

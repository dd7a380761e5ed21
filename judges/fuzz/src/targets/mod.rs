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

/// JSON as values.
const VALUES: Bound = Bound {
    base: 1 << 20,
    times: 64,
    reason: "a list item of two bytes becomes a value of 32 bytes, in vectors that double; a map with one field needs 600 bytes",
};
/// Objects as YAML.
const YAML: Bound = Bound {
    base: 1 << 20,
    times: 512,
    reason: "as for values, with a line and a path for each field, and the tokens of a flow mapping as long as the parser looks ahead",
};

/// The targets, in the order of the crates.
pub const TARGETS: &[Target] = &[
    Target {
        bound: Bound {
            base: 1 << 20,
            times: 96,
            reason: "an open parenthesis of one byte becomes a group of 56 bytes, in vectors that double",
        },
        ..small("selector", selectors::selector)
    },
    Target { bound: YAML, ..large("manifest", manifests::manifest) },
    Target { bound: YAML, ..large("manifest_conversion", manifests::manifest_conversion) },
    values("stored_object", objects::stored_object),
    values("policy", objects::policy),
    values("ipam_block", objects::ipam_block),
    small("etcd_key", datastores::etcd_key),
    values("etcd_value", datastores::etcd_value),
    values("etcd_answer", datastores::etcd_answer),
    values("embedded_record", datastores::embedded_record),
    values("service_event", datastores::service_event),
    values("service_message", datastores::service_message),
    small("certificate", datastores::certificate),
    small("revocation_list", datastores::revocation_list),
    values("kubernetes_watch", kubernetes::kubernetes_watch),
    values("kubernetes_list", kubernetes::kubernetes_list),
    values("kubernetes_secret", kubernetes::kubernetes_secret),
    Target {
        bound: Bound {
            base: 1 << 20,
            times: 1024,
            reason: "the parser of the crate kube, which copies what anchors and merges name",
        },
        ..small("kubeconfig", kubernetes::kubeconfig)
    },
    values("flannel_config", flannel::flannel_config),
    values("flannel_leases", flannel::flannel_leases),
    small("netlink", kernel::netlink),
    small("legacy_table", kernel::legacy_table),
    small("bgp_message", bgp::bgp_message),
    small("bgp_session", bgp::bgp_session),
    values("hns_reply", hns::hns_reply),
    values("hns_frame", hns::hns_frame),
    values("hns_report", hns::hns_report),
    values("static_rules", hns::static_rules),
    values("cni_call", cni::cni_call),
    values("cni_message", cni::cni_message),
    values("cni_result", cni::cni_result),
    values("agent_call", agent::agent_call),
    values("agent_question", agent::agent_question),
    Target {
        bound: Bound {
            base: 4 << 20,
            times: 8192,
            reason: "each expression for names of interfaces is compiled: 128 KiB that stay, and tables of 1 MiB meanwhile",
        },
        ..small("agent_option", agent::agent_option)
    },
    values("saved_state", agent::saved_state),
];

/// A target with the usual bound and small inputs.
const fn small(name: &'static str, parse: fn(&[u8])) -> Target {
    Target { name, parse, bound: Bound::USUAL, largest_input: SMALL }
}

/// A target with the usual bound and large inputs.
const fn large(name: &'static str, parse: fn(&[u8])) -> Target {
    Target { name, parse, bound: Bound::USUAL, largest_input: LARGE }
}

/// A target with large inputs in JSON.
const fn values(name: &'static str, parse: fn(&[u8])) -> Target {
    Target { bound: VALUES, ..large(name, parse) }
}

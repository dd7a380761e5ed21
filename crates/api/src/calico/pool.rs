//! IPPool (`libcalico-go/lib/clientv3/ippool.go` of Calico).

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};
use tortie_selector::Selector;

use crate::fields::{Cidr, selector};
use crate::{FieldError, Metadata};

/// A range of addresses for pods, divided into blocks.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct IpPool {
    /// Its name.
    pub metadata: Metadata,
    /// Its settings.
    pub spec: IpPoolSpec,
}

/// The settings of a pool. Fields that Tortie does not read yet are kept in the object.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IpPoolSpec {
    /// The addresses.
    #[serde(deserialize_with = "strict_cidr")]
    pub cidr: IpNet,
    /// Whether, and when, packets between nodes use VXLAN.
    #[serde(default)]
    pub vxlan_mode: EncapsulationMode,
    /// Whether, and when, packets between nodes use IPIP, which Windows nodes do not have. IPv4 only.
    #[serde(default)]
    pub ipip_mode: EncapsulationMode,
    /// Whether packets to addresses outside all pools are translated to the node's address.
    #[serde(default)]
    pub nat_outgoing: bool,
    /// Whether the pool gives no new addresses.
    #[serde(default)]
    pub disabled: bool,
    /// Not read yet.
    #[serde(default, rename = "disableBGPExport")]
    pub disable_bgp_export: bool,
    /// The prefix length of its blocks; 26, or 122 for IPv6.
    pub block_size: Option<u8>,
    /// The nodes that may use the pool.
    #[serde(default, deserialize_with = "selector")]
    pub node_selector: Option<Selector>,
    /// The namespaces whose pods may use the pool.
    #[serde(default, deserialize_with = "selector")]
    pub namespace_selector: Option<Selector>,
    /// `Workload`, `Tunnel`, `LoadBalancer`.
    #[serde(default = "default_uses")]
    pub allowed_uses: Vec<String>,
    /// `Automatic` or `Manual`.
    #[serde(default)]
    pub assignment_mode: Option<String>,
}

/// When packets between nodes are encapsulated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EncapsulationMode {
    /// Never.
    #[default]
    #[serde(alias = "")]
    Never,
    /// Between any two nodes.
    Always,
    /// Only between nodes of different subnets.
    CrossSubnet,
}

/// The use of pools for Services of type LoadBalancer.
const LOAD_BALANCER: &str = "LoadBalancer";

fn default_uses() -> Vec<String> {
    vec!["Workload".to_owned(), "Tunnel".to_owned()]
}

fn strict_cidr<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpNet, D::Error> {
    let text = String::deserialize(deserializer)?;
    let Cidr(net) = Cidr::deserialize(serde::de::value::StrDeserializer::<D::Error>::new(&text))?;
    if net.to_string() == text {
        return Ok(net);
    }
    Err(serde::de::Error::custom(format!("{text:?} has bits set after its prefix; write {net}")))
}

impl IpPool {
    /// The finalizer with which a deleted pool stays in a Kubernetes API until none of its addresses is in use
    /// (`kube-controllers/pkg/controllers/ippool` of Calico).
    pub const FINALIZER: &str = "projectcalico.org/ippool-finalizer";

    /// The prefix length of the pool's blocks.
    #[must_use]
    pub fn block_size(&self) -> u8 {
        self.spec.block_size.filter(|size| *size > 0).unwrap_or(if self.spec.cidr.addr().is_ipv4() {
            26
        } else {
            122
        })
    }

    /// Whether, and when, packets between nodes are encapsulated, in VXLAN or IPIP.
    #[must_use]
    pub fn encapsulation(&self) -> EncapsulationMode {
        if self.has_ipip() { self.spec.ipip_mode } else { self.spec.vxlan_mode }
    }

    /// Whether packets between nodes may use IPIP.
    #[must_use]
    pub fn has_ipip(&self) -> bool {
        self.spec.ipip_mode != EncapsulationMode::Never
    }

    /// Whether its addresses are for Services of type LoadBalancer.
    #[must_use]
    pub fn is_for_load_balancers(&self) -> bool {
        self.spec.allowed_uses.iter().any(|each| each == LOAD_BALANCER)
    }

    /// Addresses of Services have no node, so everything that concerns nodes and pods is rejected
    /// (`libcalico-go/lib/clientv3/ippool.go`).
    fn validate_for_load_balancers(&self, wrong: &mut impl FnMut(&str, String)) {
        let spec = &self.spec;
        if spec.allowed_uses.iter().any(|each| each != LOAD_BALANCER) {
            wrong(
                "spec.allowedUses",
                "LoadBalancer stands alone; make another pool for the other uses".into(),
            );
        }
        if spec.vxlan_mode != EncapsulationMode::Never || spec.ipip_mode != EncapsulationMode::Never {
            wrong("spec.vxlanMode", "addresses of Services are not encapsulated; use Never".into());
        }
        if spec.disable_bgp_export {
            wrong("spec.disableBGPExport", "is not for pools of load balancers; remove it".into());
        }
        if spec.node_selector.as_ref().is_some_and(|selector| !selector.is_all()) {
            wrong("spec.nodeSelector", "addresses of Services belong to no node; use all()".into());
        }
    }

    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        let mut wrong = |path: &str, problem: String| problems.push(FieldError::new(path, problem));
        let spec = &self.spec;
        let (smallest, largest) = if spec.cidr.addr().is_ipv4() { (20, 32) } else { (116, 128) };
        let block_size = self.block_size();
        if !(smallest..=largest).contains(&block_size) {
            wrong("spec.blockSize", format!("{block_size} is not between {smallest} and {largest}"));
        }
        if spec.cidr.prefix_len() > block_size && !spec.disabled {
            wrong("spec.cidr", format!("{} is smaller than one block (/{block_size})", spec.cidr));
        }
        let link_local = ["169.254.0.0/16", "fe80::/10"].iter().filter_map(|net| net.parse::<IpNet>().ok());
        for link_local in link_local {
            if spec.cidr.contains(&link_local) || link_local.contains(&spec.cidr) {
                wrong("spec.cidr", format!("{} overlaps the link-local addresses {link_local}", spec.cidr));
            }
        }
        if self.has_ipip() && spec.vxlan_mode != EncapsulationMode::Never {
            wrong("spec.ipipMode", "a pool has IPIP or VXLAN; set ipipMode or vxlanMode to Never".into());
        }
        if self.has_ipip() && spec.cidr.addr().is_ipv6() {
            wrong("spec.ipipMode", "IPIP carries IPv4 only; use vxlanMode".into());
        }
        let known = ["Workload", "Tunnel", LOAD_BALANCER];
        if let Some(bad) = spec.allowed_uses.iter().find(|each| !known.contains(&each.as_str())) {
            wrong("spec.allowedUses", format!("{bad:?} is not supported; use {}", known.join(", ")));
        }
        if self.is_for_load_balancers() {
            self.validate_for_load_balancers(&mut wrong);
        }
        if let Some(mode) =
            spec.assignment_mode.as_deref().filter(|mode| !["Automatic", "Manual"].contains(mode))
        {
            wrong("spec.assignmentMode", format!("{mode:?} is neither Automatic nor Manual"));
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

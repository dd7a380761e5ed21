//! KubeControllersConfiguration: the settings of the controllers (`api/pkg/apis/projectcalico/v3/kubecontrollersconfig.go`
//! of Calico).

use serde::Deserialize;
use serde_json::Value;

use crate::{FieldError, Metadata};

/// The settings of the controllers. Only the object `default` is read.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct KubeControllersConfiguration {
    /// Its name.
    pub metadata: Metadata,
    /// The settings.
    #[serde(default)]
    pub spec: KubeControllersConfigurationSpec,
}

/// The settings that Tortie knows. Those without effect are reported when they are set.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct KubeControllersConfigurationSpec {
    /// Without effect: RUST_LOG sets the level.
    pub log_severity_screen: Option<String>,
    /// Without effect.
    pub health_checks: Option<Switch>,
    /// Without effect: etcd compacts itself.
    #[serde(rename = "etcdV3CompactionPeriod")]
    pub etcd_v3_compaction_period: Option<String>,
    /// Without effect.
    pub prometheus_metrics_port: Option<u16>,
    /// Without effect.
    pub debug_profile_port: Option<u16>,
    /// The single controllers.
    pub controllers: Controllers,
}

/// The settings of single controllers.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Controllers {
    /// Nodes and what belongs to them.
    pub node: Option<NodeController>,
    /// Without effect: policies are copied on change.
    pub policy: Option<CopyController>,
    /// Without effect: labels are copied on change.
    pub workload_endpoint: Option<CopyController>,
    /// Without effect: service accounts are copied on change.
    pub service_account: Option<CopyController>,
    /// Without effect: namespaces are copied on change.
    pub namespace: Option<CopyController>,
    /// Addresses of Services of type LoadBalancer.
    pub load_balancer: Option<LoadBalancerController>,
    /// Without effect: Tortie does not rename policies.
    pub migration: Option<MigrationController>,
    /// The same in newer versions of Calico.
    pub policy_migration: Option<PolicyMigrationController>,
}

/// The settings for nodes.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NodeController {
    /// Without effect: nodes are followed.
    pub reconciler_period: Option<String>,
    /// Whether the labels of Kubernetes' nodes are copied; enabled if absent.
    pub sync_labels: Option<Switch>,
    /// Automatic host endpoints.
    pub host_endpoint: Option<AutoHostEndpoint>,
    /// Without effect: agents release what their pods leave behind.
    pub leak_grace_period: Option<String>,
}

/// Automatic host endpoints.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct AutoHostEndpoint {
    /// Whether nodes get host endpoints.
    pub auto_create: Option<Switch>,
    /// Whether one of them is for all interfaces; enabled if absent.
    pub create_default_host_endpoint: Option<Switch>,
    /// Rejected: Tortie creates the default host endpoint only.
    pub templates: Option<Vec<Value>>,
}

/// The settings of a controller that copies objects.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct CopyController {
    /// Without effect.
    pub reconciler_period: Option<String>,
}

/// The settings for addresses of Services.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadBalancerController {
    /// The Services that get addresses.
    #[serde(rename = "assignIPs")]
    pub assign_ips: Option<AssignIps>,
}

/// The Services of type LoadBalancer that get addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum AssignIps {
    /// All, except for those of another load-balancer class.
    #[default]
    #[serde(alias = "")]
    AllServices,
    /// Those that ask for one by an annotation or by Calico's load-balancer class.
    RequestedServicesOnly,
}

/// The settings for the names of policies.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct MigrationController {
    /// Whether policies get new names.
    pub policy_name_migrator: Option<Switch>,
}

/// The same in newer versions of Calico.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyMigrationController {
    /// Whether policies get new names.
    pub enabled: Option<Switch>,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum Switch {
    /// On.
    Enabled,
    /// Off.
    Disabled,
    /// As if it were absent.
    #[serde(rename = "")]
    Unset,
}

impl KubeControllersConfiguration {
    /// The only name that is read.
    pub const NAME: &str = "default";

    /// Whether nodes get automatic host endpoints.
    #[must_use]
    pub fn creates_host_endpoints(&self) -> bool {
        let settings = self.spec.controllers.node.as_ref().and_then(|node| node.host_endpoint.as_ref());
        settings.is_some_and(|settings| {
            settings.auto_create == Some(Switch::Enabled)
                && settings.create_default_host_endpoint != Some(Switch::Disabled)
        })
    }

    /// Whether the labels of Kubernetes' nodes are copied.
    #[must_use]
    pub fn copies_node_labels(&self) -> bool {
        let node = self.spec.controllers.node.as_ref();
        node.and_then(|node| node.sync_labels) != Some(Switch::Disabled)
    }

    /// The Services that get addresses: all, if nothing is set.
    #[must_use]
    pub fn assign_ips(&self) -> AssignIps {
        let settings = self.spec.controllers.load_balancer.as_ref();
        settings.and_then(|settings| settings.assign_ips).unwrap_or_default()
    }

    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        if self.metadata.name == Self::NAME {
            return Ok(());
        }
        let problem = format!("{:?} is not read; name it {}", self.metadata.name, Self::NAME);
        Err(vec![FieldError::new("metadata.name", problem)])
    }
}

//! What operators set for IPAM: IPReservation and IPAMConfig (`api/pkg/apis/projectcalico/v3` of Calico).

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::fields::{Network, list};
use crate::{FieldError, Metadata};

/// Addresses that IPAM does not give. Those that are allocated already stay so, and fixed addresses may be among them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct IpReservation {
    /// Its name.
    pub metadata: Metadata,
    /// The addresses.
    #[serde(default)]
    pub spec: IpReservationSpec,
}

/// The addresses of a reservation.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IpReservationSpec {
    /// The networks; an address is a network of full length.
    #[serde(rename = "reservedCIDRs", default, deserialize_with = "list")]
    pub reserved_cidrs: Vec<Network>,
}

/// The IPAM settings of the cluster; its name is `default`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct IpamConfig {
    /// Its name.
    pub metadata: Metadata,
    /// The settings.
    #[serde(default)]
    pub spec: IpamConfigSpec,
}

/// The IPAM settings of the cluster, as manifests have them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct IpamConfigSpec {
    /// Whether the addresses of a block are only for its node. Windows nodes need this.
    pub strict_affinity: bool,
    /// Whether nodes claim new blocks automatically.
    pub auto_allocate_blocks: bool,
    /// The maximum number of blocks of a node, for each family; 0 means 20.
    pub max_blocks_per_host: u32,
    /// For how many seconds nobody gets an address after its release.
    pub ip_cooldown_seconds: u32,
    /// Whether virtual machines of KubeVirt keep their addresses: only `Disabled` is supported.
    #[serde(rename = "kubeVirtVMAddressPersistence")]
    pub kube_virt_vm_address_persistence: Option<String>,
}

impl Default for IpamConfigSpec {
    fn default() -> Self {
        Self {
            strict_affinity: false,
            auto_allocate_blocks: true,
            max_blocks_per_host: 0,
            ip_cooldown_seconds: 0,
            kube_virt_vm_address_persistence: None,
        }
    }
}

impl IpamConfig {
    /// Calico's rules (`libcalico-go/lib/ipam`, `SetIPAMConfig`), and what Tortie does not support.
    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let spec = &self.spec;
        let rules = [
            (self.metadata.name != "default", "metadata.name", "nobody reads it; the name must be default"),
            (
                !spec.strict_affinity && !spec.auto_allocate_blocks,
                "spec.autoAllocateBlocks",
                "false needs strictAffinity: true; otherwise nodes would only borrow addresses",
            ),
            (
                spec.max_blocks_per_host > 0 && !spec.strict_affinity,
                "spec.maxBlocksPerHost",
                "needs strictAffinity: true; otherwise nodes borrow addresses of other nodes' blocks",
            ),
            (
                spec.kube_virt_vm_address_persistence.as_deref().is_some_and(|mode| mode != "Disabled"),
                "spec.kubeVirtVMAddressPersistence",
                "virtual machines are not supported; set it to Disabled",
            ),
        ];
        let problems: Vec<FieldError> = rules
            .into_iter()
            .filter(|(wrong, ..)| *wrong)
            .map(|(_, path, problem)| FieldError::new(path, problem.to_owned()))
            .collect();
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    /// The object as it is stored: without metadata, and with Calico's names of the fields in etcd.
    pub(crate) fn stored(&self) -> Value {
        let spec = &self.spec;
        let mut fields = Map::new();
        fields.insert("strict_affinity".to_owned(), json!(spec.strict_affinity));
        fields.insert("auto_allocate_blocks".to_owned(), json!(spec.auto_allocate_blocks));
        fields.insert("maxBlocksPerHost".to_owned(), json!(spec.max_blocks_per_host));
        fields.insert("ipCooldownSeconds".to_owned(), json!(spec.ip_cooldown_seconds));
        if let Some(mode) = &spec.kube_virt_vm_address_persistence {
            fields.insert("kubeVirtVMAddressPersistence".to_owned(), json!(mode));
        }
        Value::Object(fields)
    }
}

//! The pools that a node may use.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tortie_api::calico::IpPool;
use tortie_api::{Kind, Resource};

use crate::driver::Ipam;
use crate::error::IpamError;
use crate::request::{Family, Use};

/// The longest prefix of a Windows node's IPv4 block: four of its addresses are reserved.
const WINDOWS_LONGEST_PREFIX: u8 = 29;

impl Ipam {
    /// The pools for this purpose and for pods of a namespace with these labels, ordered by name
    /// (`libcalico-go/lib/ipam/ipam.go`). Without a namespace: first the pools for all namespaces, then those for
    /// some.
    pub(crate) async fn pools(
        &self,
        intended_use: Use,
        family: Family,
        namespace: Option<&BTreeMap<String, String>>,
    ) -> Result<Vec<(IpNet, u8)>, IpamError> {
        let wanted = match intended_use {
            Use::Workload => "Workload",
            Use::Tunnel => "Tunnel",
        };
        let (mut pools, mut for_some) = (Vec::new(), Vec::new());
        for stored in self.records.store.list(Kind::IpPool).await?.items {
            let pool = match Resource::read(&stored.key, &stored.value) {
                Ok(Resource::IpPool(pool)) => pool,
                _ => {
                    tracing::warn!(pool = %stored.key, "cannot parse the pool; it gives no addresses");
                    continue;
                }
            };
            let cidr = pool.spec.cidr;
            if Family::of(&cidr) != family
                || !self.may_use(&pool)
                || !pool.spec.allowed_uses.iter().any(|each| each == wanted)
            {
                continue;
            }
            match (&pool.spec.namespace_selector, namespace) {
                (Some(_), None) => for_some.push((cidr, pool.block_size())),
                (Some(selector), Some(labels)) if !selector.matches(labels) => {}
                _ => pools.push((cidr, pool.block_size())),
            }
        }
        pools.extend(for_some);
        if pools.is_empty() {
            let of = if family == Family::V6 { "IPv6 " } else { "" };
            return Err(IpamError::NoPool(format!("node {} ({of}{wanted})", self.node)));
        }
        Ok(pools)
    }

    fn may_use(&self, pool: &IpPool) -> bool {
        let spec = &pool.spec;
        !spec.disabled
            && spec.assignment_mode.as_deref().is_none_or(|mode| mode == "Automatic")
            && spec.node_selector.as_ref().is_none_or(|selector| selector.matches(&self.node_labels))
            && !(self.windows && spec.cidr.addr().is_ipv4() && pool.block_size() > WINDOWS_LONGEST_PREFIX)
    }
}

//! The pools that a node may use.

use std::net::IpAddr;
use std::sync::PoisonError;
use std::time::Instant;

use ipnet::IpNet;
use tortie_api::calico::{EncapsulationMode, IpPool};
use tortie_api::ipam::is_virtual;
use tortie_api::kubernetes::Node;
use tortie_api::support::{WINDOWS_BLOCK_BITS, is_terminating};
use tortie_api::{Key, Kind, Resource};

use crate::block_cache::POOLS_FRESH;
use crate::criteria::{Criteria, Pools};
use crate::driver::{Ipam, Labels, WINDOWS};
use crate::error::IpamError;
use crate::request::{Family, Request, Use};

impl Ipam {
    /// The pools of these criteria (`libcalico-go/lib/ipam/ipam.go`): the chosen ones, otherwise those that select the node
    /// and the namespace, ordered by name. If the namespace is unknown, first the pools for all namespaces, then those for
    /// some.
    pub(crate) async fn pools(&self, family: Family, criteria: &Criteria) -> Result<Pools, IpamError> {
        let all = self.all_pools().await?;
        if !criteria.chosen.is_empty() {
            return self.chosen_pools(&all, family, criteria);
        }
        let labels = self.current_labels().await?;
        let (mut pools, mut for_some) = (Vec::new(), Vec::new());
        for (_, pool) in all {
            let cidr = pool.spec.cidr;
            if Family::of(&cidr) != family
                || !self.is_for_node(&pool, &labels)
                || !self.has_large_blocks(&pool)
                || !criteria.allow_use_of(&pool)
            {
                continue;
            }
            match (&pool.spec.namespace_selector, &criteria.namespace_labels) {
                (Some(_), None) => for_some.push((cidr, pool.block_size())),
                (Some(selector), Some(labels)) if !selector.matches(labels) => {}
                _ => pools.push((cidr, pool.block_size())),
            }
        }
        pools.extend(for_some);
        if pools.is_empty() {
            let of = if family == Family::V6 { "IPv6 " } else { "" };
            let name = criteria.intended_use.name();
            return Err(IpamError::NoPool(format!("{} ({of}{name})", self.in_words())));
        }
        Ok(pools)
    }

    /// The pools with these names or networks, in this order. Their selectors and assignment mode do not matter.
    fn chosen_pools(
        &self,
        all: &[(String, IpPool)],
        family: Family,
        criteria: &Criteria,
    ) -> Result<Pools, IpamError> {
        let refused = |pool: &str, problem: &str| {
            Err(IpamError::ChosenPool { pool: pool.to_owned(), problem: problem.to_owned() })
        };
        let mut pools = Pools::new();
        for wanted in &criteria.chosen {
            let net = wanted.parse::<IpNet>().ok();
            let is_wanted = |name: &str, pool: &IpPool| match net {
                Some(net) => pool.spec.cidr == net,
                None => name == wanted,
            };
            let Some((_, pool)) = all.iter().find(|(name, pool)| is_wanted(name, pool)) else {
                return refused(wanted, "no IPPool has this name or network");
            };
            let cidr = pool.spec.cidr;
            if pool.spec.disabled {
                return refused(wanted, "the IPPool is disabled, or was deleted and is still in use");
            }
            if self.windows && pool.has_ipip() {
                return refused(wanted, "the IPPool has IPIP, and Windows nodes have none");
            }
            if self.windows && needs_ipv6_overlay(pool) {
                return refused(wanted, "the IPPool has IPv6 in VXLAN, and Windows nodes have none");
            }
            if Family::of(&cidr) != family {
                return refused(wanted, "the IPPool has addresses of the other family");
            }
            if criteria.allow_use_of(pool) && self.has_large_blocks(pool) {
                pools.push((cidr, pool.block_size()));
            }
        }
        if pools.is_empty() {
            let why = format!(
                "its allowedUses lack {}, or its blocks are too small for a Windows node",
                criteria.intended_use.name()
            );
            return refused(&criteria.chosen.join(", "), &why);
        }
        Ok(pools)
    }

    /// The enabled pool of an address. Its selectors and assignment mode do not matter.
    pub(crate) async fn pool_of(&self, address: IpAddr, intended_use: Use) -> Result<(IpNet, u8), IpamError> {
        let pools = self.all_pools().await?;
        let found = pools.iter().find(|(_, pool)| !pool.spec.disabled && pool.spec.cidr.contains(&address));
        let Some((name, pool)) = found else { return Err(IpamError::InNoPool(address)) };
        let is_for_it = pool.spec.allowed_uses.iter().any(|each| each == intended_use.name());
        if !is_for_it || !self.has_large_blocks(pool) {
            let problem = format!(
                "its allowedUses lack {}, or its blocks are too small for a Windows node",
                intended_use.name()
            );
            return Err(IpamError::ChosenPool { pool: name.clone(), problem });
        }
        Ok((pool.spec.cidr, pool.block_size()))
    }

    /// The pool from which IPAM may give this address without a request for it.
    ///
    /// # Errors
    /// The store failed.
    pub async fn giving_pool(&self, address: IpAddr) -> Result<Option<String>, IpamError> {
        let pools = self.all_pools().await?.into_iter();
        let mut giving = pools.filter(|(_, pool)| {
            let spec = &pool.spec;
            let is_automatic = spec.assignment_mode.as_deref().is_none_or(|mode| mode == "Automatic");
            !spec.disabled && is_automatic && spec.cidr.contains(&address)
        });
        Ok(giving.next().map(|(name, _)| name))
    }

    /// Whether the cluster had no IPv6 pool a moment ago.
    pub fn lacks_ipv6_pools(&self) -> bool {
        let known = self.without_ipv6.lock().unwrap_or_else(PoisonError::into_inner);
        known.is_some_and(|read| read.elapsed() < POOLS_FRESH)
    }

    /// Whether a pool gives an address for this request.
    ///
    /// # Errors
    /// A requested pool cannot be used, or the store failed.
    pub async fn has_pool(&self, request: &Request) -> Result<bool, IpamError> {
        match self.pools(request.family, &Criteria::of(request)).await {
            Ok(_) => Ok(true),
            Err(IpamError::NoPool(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Every readable pool, by name. One that was deleted, and stays while its addresses are in use, counts as disabled.
    async fn all_pools(&self) -> Result<Vec<(String, IpPool)>, IpamError> {
        let mut pools = Vec::new();
        for stored in self.records.store.list(Kind::IpPool).await?.items {
            match Resource::read(&stored.key, &stored.value) {
                Ok(Resource::IpPool(mut pool)) => {
                    pool.spec.disabled |= is_terminating(&stored.value);
                    pools.push((stored.key.name, pool));
                }
                _ => tracing::warn!(pool = %stored.key, "cannot parse the pool; it gives no addresses"),
            }
        }
        let has_ipv6 = pools.iter().any(|(_, pool)| pool.spec.cidr.addr().is_ipv6());
        let mut known = self.without_ipv6.lock().unwrap_or_else(PoisonError::into_inner);
        *known = (!has_ipv6).then(Instant::now);
        Ok(pools)
    }

    /// The labels that the node has now. Those of zones come from the controllers of a cloud after the Node is there. Without a
    /// Node, the last ones count.
    async fn current_labels(&self) -> Result<Labels, IpamError> {
        let last = || self.node_labels.lock().unwrap_or_else(PoisonError::into_inner);
        if is_virtual(&self.node) {
            return Ok(last().clone());
        }
        let stored = self.records.store.get(&Key::global(Kind::Node, &self.node)).await?;
        let Some(stored) = stored else { return Ok(last().clone()) };
        let mut labels = Node::labels_of(&stored.value);
        if self.windows {
            // Blocks are those of a Windows node, whatever the labels say.
            labels.insert(Node::OS.to_owned(), WINDOWS.to_owned());
        }
        last().clone_from(&labels);
        Ok(labels)
    }

    fn is_for_node(&self, pool: &IpPool, labels: &Labels) -> bool {
        let spec = &pool.spec;
        let is_unfit = spec.disabled || self.windows && (pool.has_ipip() || needs_ipv6_overlay(pool));
        !is_unfit
            && spec.assignment_mode.as_deref().is_none_or(|mode| mode == "Automatic")
            && spec.node_selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    /// Whether the pool's blocks have addresses that Windows does not need itself, if this is a Windows node.
    fn has_large_blocks(&self, pool: &IpPool) -> bool {
        !self.windows || pool.block_size() <= pool.spec.cidr.max_prefix_len() - WINDOWS_BLOCK_BITS
    }
}

/// Whether other nodes reach the pool's addresses by VXLAN over IPv6 only, which HNS does not have.
fn needs_ipv6_overlay(pool: &IpPool) -> bool {
    pool.spec.cidr.addr().is_ipv6() && pool.spec.vxlan_mode == EncapsulationMode::Always
}

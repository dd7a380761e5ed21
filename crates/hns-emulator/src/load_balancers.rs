//! Load balancers (docs/hns.md, Documents and Load balancers): stored unchanged. The fabric implements their effect.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tortie_hcn::schema::{LoadBalancer, LoadBalancerFlags, LoadBalancerPortMapping};
use tortie_hcn::{Failure, Feature, Guid, HResult};

use crate::check::{any_address, document, fail};
use crate::config::Config;
use crate::state::{State, absent};

impl State {
    pub(crate) fn create_load_balancer(
        &mut self,
        id: Guid,
        text: &str,
        config: &Config,
    ) -> Result<Guid, Failure> {
        let mut balancer: LoadBalancer = document(text, config.strict)?;
        balancer.id = self.new_id(id, balancer.id)?;
        self.check_load_balancer(&balancer, config)?;
        let id = balancer.id;
        self.load_balancers.insert(id, balancer.into());
        Ok(id)
    }

    /// Replaces a load balancer by the one of the document, which is whole (hcsshim, `hcn/hcnloadbalancer.go`).
    pub(crate) fn modify_load_balancer(
        &mut self,
        id: Guid,
        text: &str,
        config: &Config,
    ) -> Result<(), Failure> {
        // The function is as old as the others. Clients must not use it before, because it cut connections, or did nothing.
        if config.strict && !config.version.supports(Feature::ModifyLoadBalancer) {
            let error = format!("HNS {} does not change load balancers", config.version);
            return fail(HResult::E_NOTIMPL, error);
        }
        self.load_balancer(id)?;
        let balancer = LoadBalancer { id, ..document(text, config.strict)? };
        self.check_load_balancer(&balancer, config)?;
        self.load_balancers.insert(id, balancer.into());
        Ok(())
    }

    pub(crate) fn delete_load_balancer(&mut self, id: Guid) -> Result<(), Failure> {
        self.load_balancer(id)?;
        self.load_balancers.remove(&id);
        Ok(())
    }

    /// A missing load balancer gives the plain Windows code, like a missing namespace (docs/hns.md, Calls).
    pub(crate) fn load_balancer(&self, id: Guid) -> Result<&LoadBalancer, Failure> {
        let found = self.load_balancers.get(&id).map(AsRef::as_ref);
        found.ok_or_else(|| absent(HResult::ERROR_NOT_FOUND, "load balancer", id))
    }

    fn check_load_balancer(&self, balancer: &LoadBalancer, config: &Config) -> Result<(), Failure> {
        for endpoint in &balancer.host_compute_endpoints {
            self.endpoint(*endpoint)?;
        }
        let is_ipv6 = balancer.flags & LoadBalancerFlags::ENABLE_IPV6 != 0;
        if is_ipv6 && !config.version.supports(Feature::Ipv6DualStack) {
            let error = format!("HNS {} has no IPv6 beside IPv4", config.version);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        for vip in &balancer.frontend_vips {
            let vip = any_address(vip, "FrontendVIPs", config)?;
            // kube-proxy sets the flag with each address of IPv6. What HNS does without it is unknown.
            if config.strict && vip.is_ipv6() != is_ipv6 {
                let error = format!("FrontendVIPs has {vip}, and the flag IPv6 (2) says {is_ipv6}");
                return fail(HResult::HCN_E_INVALID_IP, error);
            }
        }
        if !balancer.source_vip.is_empty() {
            any_address(&balancer.source_vip, "SourceVIP", config)?;
        }
        if balancer.is_direct() && !config.version.supports(Feature::Dsr) {
            let error = format!("HNS {} has no direct server return", config.version);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        let others = self.load_balancers.values().filter(|other| other.id != balancer.id);
        let taken: BTreeSet<_> = others.flat_map(|other| fronts(other)).collect();
        match fronts(balancer).find(|front| taken.contains(front)) {
            Some(front) => fail(HResult::HCN_E_PORT_ALREADY_EXISTS, format!("{front:?} is balanced already")),
            None => Ok(()),
        }
    }
}

/// Addresses, protocols and ports; the unspecified address is the node's of that family.
fn fronts(balancer: &LoadBalancer) -> impl Iterator<Item = (IpAddr, u32, u16)> {
    let own = match balancer.flags & LoadBalancerFlags::ENABLE_IPV6 {
        0 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let vips: Vec<IpAddr> = match balancer.frontend_vips.is_empty() {
        true => vec![own],
        false => balancer.frontend_vips.iter().filter_map(|vip| vip.parse().ok()).collect(),
    };
    let of_vip = |vip| {
        let front = move |port: &LoadBalancerPortMapping| (vip, port.protocol, port.external_port);
        balancer.port_mappings.iter().map(front)
    };
    vips.into_iter().flat_map(of_vip)
}

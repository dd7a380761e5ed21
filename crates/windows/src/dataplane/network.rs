//! Applies the network of the pods and its routes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tortie_api::net::{IpVersion, overlap};
use tortie_dataplane::{Condition, LocalNode, NodeState, Reason, Report, RouteTarget};
use tortie_hcn::schema::NetworkMode;
use tortie_hcn::{Guid, HcnExt};

use super::{WindowsDataplane, note, own_address};
use crate::network_spec::{NetworkKind, NetworkSpec};
use crate::pod_network::{PodNetwork, ensure_network_on, existing_network, remove_subnets};
use crate::wiring::USUAL_MTU;
use crate::{Error, NETWORK, VXLAN_PORT, node_routes, routes};

impl WindowsDataplane {
    /// Applies the network and its routes.
    pub(super) fn sync_network(&mut self, state: &NodeState, report: &mut Report) -> Result<(), Error> {
        let Some(node) = state.node.clone() else { return Ok(()) };
        self.report_settings(&node, state, report);
        let blocks: Vec<Ipv4Net> = own_blocks(state).collect();
        let Some((block, others)) = blocks.split_first() else {
            return self.follow_without_block(state, report);
        };
        let kind = match self.is_bridge {
            true => NetworkKind::L2Bridge,
            false => NetworkKind::Overlay { vni: node.network.vni },
        };
        let ipv6 = own_ipv6_block(state).filter(|_| self.is_bridge);
        let spec = NetworkSpec { name: NETWORK.into(), block: *block, ipv6, kind, adapter: None };
        if self.pod_network.is_none() {
            let found = match self.ensure_network(spec, others, own_address(&node)) {
                Err(error) if error.keeps_routes_followed() => {
                    return match self.follow_in_kept_network(state, report) {
                        Ok(()) => Err(error),
                        Err(unavailable) => {
                            note(&mut report.node, &error);
                            Err(unavailable)
                        }
                    };
                }
                ensured => ensured?,
            };
            self.current_network.set(&found);
            // A new network has no routes yet.
            self.routes_due |= self.network != Some(found.id);
            self.network = Some(found.id);
            self.pod_network = Some(found);
        }
        let Some(network) = self.pod_network.clone() else { return Ok(()) };
        self.report_network(&node, &network, report);
        if self.routes_due {
            self.apply_routes(state, &network, None)?;
        }
        self.report_routes(report);
        Ok(())
    }

    /// Reports the settings that a Windows node does not have.
    fn report_settings(&self, node: &LocalNode, state: &NodeState, report: &mut Report) {
        if node.network.port != VXLAN_PORT && !self.is_bridge {
            let port = node.network.port;
            report.node.push(Condition::new(
                Reason::VxlanPortNotSupported,
                format!(
                    "vxlanPort of FelixConfiguration is {port}, and Windows has {VXLAN_PORT} only, which is used here: the pods of this \
                     node and those of nodes with the other port do not reach each other; remove vxlanPort, or move the pods of Windows \
                     nodes to another cluster"
                ),
            ));
        }
        if let Some(mtu) = state.settings.vxlan_mtu.filter(|mtu| *mtu != USUAL_MTU) {
            report.node.push(Condition::new(
                Reason::FieldNotSupported,
                format!(
                    "FelixConfiguration.spec.vxlanMTU is {mtu}, and pods of a Windows node have an MTU of {USUAL_MTU}; set it for \
                     Linux nodes only, in FelixConfiguration node.NAME"
                ),
            ));
        }
    }

    /// Reports in what the network is not as it should be, although it is used.
    fn report_network(&self, node: &LocalNode, network: &PodNetwork, report: &mut Report) {
        report.node.extend(network.without_subnet.iter().map(|(block, why)| {
            let message = format!("pods with addresses of the block {block} are not connected: {why}");
            Condition::new(Reason::MoreThanOneBlock, message)
        }));
        report.node.extend(network.without_host_route.as_ref().map(|why| {
            let message = format!(
                "network {NETWORK} has no HostRoute policy, so the node may not reach its own pods, and kubelet's probes may fail: {why}"
            );
            Condition::new(Reason::NetworkPartNotInForce, message)
        }));
        report.node.extend(network.without_ipv6.as_ref().filter(|_| self.host.wants_ipv6()).map(|why| {
            Condition::new(
                Reason::NetworkWithoutIpv6,
                format!("pods of this node have IPv4 addresses only: {why}"),
            )
        }));
        report.node.extend(remade(node, network));
        report.node.extend(network.other_adapter.as_ref().map(|found| {
            let wanted = self.host.choose(own_address(node)).name.unwrap_or_default();
            let message = format!(
                "network {NETWORK} is on adapter {found}, and --adapter or the node's address names {wanted}: it is used as it is; \
                 drain the node, remove the network and restart the agent, or correct --adapter"
            );
            Condition::new(Reason::AdapterDiffers, message)
        }));
        if let Some(address) = own_address(node).filter(|address| *address != network.provider_address) {
            report.node.push(Condition::new(
                Reason::ProviderAddressDiffers,
                format!(
                    "network {NETWORK} is bound to {}, but the node's address is {address}: name the right adapter",
                    network.provider_address
                ),
            ));
        }
    }

    /// Applies the routes. In a network that is kept for its pods although it differs, its subnets stay.
    fn apply_routes(
        &mut self,
        state: &NodeState,
        network: &PodNetwork,
        kept_subnets: Option<&[IpNet]>,
    ) -> Result<(), Error> {
        let synced = match self.is_bridge {
            true => self.sync_node_routes(state, network, kept_subnets),
            false => self.sync_overlay_routes(state, network.id, kept_subnets),
        };
        let synced = match synced {
            // The same routes would not be taken at once, either, and each attempt takes those away that are there.
            Err(error @ Error::NotTaken { .. }) => {
                let reason = kept_subnets.map_or(error.reason(), |_| Reason::RouteRefused);
                Ok(vec![Condition::new(reason, error.to_string())])
            }
            synced => synced,
        };
        self.routes_refused = synced.inspect_err(|_| self.pod_network = None)?;
        self.routes_due = false;
        if self.routes_refused.is_empty() {
            self.routes_backoff.forget(&());
        } else {
            self.routes_backoff.failed((), (self.clock)());
        }
        Ok(())
    }

    fn report_routes(&self, report: &mut Report) {
        report.retry |= !self.routes_refused.is_empty();
        report.node.extend_from_slice(&self.routes_refused);
    }

    /// Keeps the routes up to date in a network that differs, for the pods that still use it, perhaps for days. A failure is
    /// reported as one of routes: `tortie windows reconfigure`, which ends this, does not begin while something else of the node fails.
    fn follow_in_kept_network(&mut self, state: &NodeState, report: &mut Report) -> Result<(), Error> {
        if self.routes_due {
            let kept = self.kept_network();
            match kept.and_then(|(network, subnets)| self.apply_routes(state, &network, Some(&subnets))) {
                Ok(()) => {}
                Err(error) if error.is_unavailable() => return Err(error),
                Err(error) => {
                    let message = format!(
                        "the routes of network {NETWORK}, which pods still use, are not up to date: {error}"
                    );
                    report.node.push(Condition::new(Reason::RouteRefused, message));
                    report.retry = true;
                    return Ok(());
                }
            }
        }
        self.report_routes(report);
        Ok(())
    }

    /// The node has no block: somebody has deleted the Node, or released its blocks. A network that is there may still have endpoints.
    fn follow_without_block(&mut self, state: &NodeState, report: &mut Report) -> Result<(), Error> {
        let Some(network) = self.hcn.network_by_name(NETWORK)? else { return Ok(()) };
        if (network.r#type == NetworkMode::L2Bridge) != self.is_bridge {
            return Ok(());
        }
        report.node.push(Condition::new(
            Reason::RouteRefused,
            format!(
                "the node has no IPAM block, and network {NETWORK} keeps its subnets: no route leads to other nodes that have these \
                 addresses now; the next pod claims a block"
            ),
        ));
        self.follow_in_kept_network(state, report)
    }

    /// The network as it is, and its subnets.
    fn kept_network(&self) -> Result<(PodNetwork, Vec<IpNet>), Error> {
        let network = existing_network(&*self.hcn, NETWORK)?;
        let found = self.hcn.network(network.id)?;
        let subnets = found.subnets().filter_map(|subnet| subnet.ip_address_prefix.parse().ok()).collect();
        Ok((network, subnets))
    }

    /// Applies the routes of the overlay network. Returns what is not in force.
    fn sync_overlay_routes(
        &self,
        state: &NodeState,
        network: Guid,
        kept_subnets: Option<&[IpNet]>,
    ) -> Result<Vec<Condition>, Error> {
        if let Some(kept_subnets) = kept_subnets {
            let is_left_out = |net: &IpNet| kept_subnets.iter().any(|kept| overlap(kept, net));
            return routes::sync(&*self.hcn, network, state, is_left_out);
        }
        let stay = remove_subnets(&*self.hcn, network, |subnet| is_stale(*subnet, &state.routes))?;
        // The switch looks for them in the subnet.
        let is_left_out = |net: &IpNet| stay.iter().any(|(subnet, _)| IpNet::V4(*subnet).contains(net));
        let mut conditions = routes::sync(&*self.hcn, network, state, is_left_out)?;
        conditions.extend(stay.iter().map(|(subnet, why)| {
            let message = format!(
                "network {NETWORK} keeps its subnet {subnet}, whose addresses other nodes have now, and no route leads to them: {why}; \
                 remove the endpoints with addresses of the subnet"
            );
            Condition::new(Reason::RouteRefused, message)
        }));
        Ok(conditions)
    }

    /// Applies the routes of the node, which forwards between its adapter and the pods' gateway. Returns what is not in force.
    fn sync_node_routes(
        &self,
        state: &NodeState,
        network: &PodNetwork,
        kept_subnets: Option<&[IpNet]>,
    ) -> Result<Vec<Condition>, Error> {
        let (mut direct, mut conditions) = node_routes::direct(state, network.gateway_v6.is_some());
        // They would take packets away from the pods that are still there.
        let is_kept = |net: &IpNet| kept_subnets.into_iter().flatten().any(|kept| overlap(kept, net));
        direct.retain(|destination, _| !is_kept(destination));
        let own = |version| state.node.as_ref().and_then(|node| node.address(version));
        let ipv4 = own(IpVersion::V4).into_iter().chain([network.gateway.into()]);
        let ipv6 = network.gateway_v6.map(|gateway| own(IpVersion::V6).into_iter().chain([gateway.into()]));
        let ends: Vec<IpAddr> = ipv4.chain(ipv6.into_iter().flatten()).collect();
        let synced = self.host.sync_routes(&ends, node_routes::DIRECT, &direct);
        let problems = synced.unwrap_or_else(|error| vec![error.to_string()]);
        conditions.extend(problems.into_iter().map(|problem| Condition::new(Reason::RouteRefused, problem)));
        Ok(conditions)
    }

    /// The network. If HNS refused it or is not ready, requests become less and less frequent. Whether HNS
    /// answers at all is checked each time.
    fn ensure_network(
        &mut self,
        spec: NetworkSpec,
        others: &[Ipv4Net],
        node: Option<Ipv4Addr>,
    ) -> Result<PodNetwork, Error> {
        let now = (self.clock)();
        match &self.network_refused {
            Some((refused, error)) if *refused == spec && self.network_backoff.has_to_wait(&(), now) => {
                return Err(error.clone());
            }
            Some((refused, _)) if *refused != spec => self.network_backoff.forget(&()),
            _ => {}
        }
        let ensured = ensure_network_on(&*self.hcn, &spec, others, (&self.host, node));
        match &ensured {
            Ok(_) => {
                self.network_refused = None;
                self.network_backoff.forget(&());
            }
            Err(error) if error.is_unavailable() => {}
            Err(error) => {
                self.network_refused = Some((spec, error.clone()));
                self.network_backoff.failed((), now);
            }
        }
        ensured
    }
}

/// Whether a subnet is of a block that the node has no more, and other nodes have its addresses now. Another node may have single
/// addresses of an own block.
fn is_stale(subnet: Ipv4Net, routes: &BTreeMap<IpNet, RouteTarget>) -> bool {
    let subnet = IpNet::V4(subnet);
    let own = || routes.iter().filter(|(_, target)| **target == RouteTarget::Local);
    let is_borrowed = |net: &IpNet| own().any(|(block, _)| block.contains(net));
    let mut others = routes.iter().filter(|(_, target)| **target != RouteTarget::Local);
    !own().any(|(block, _)| *block == subnet)
        && others.any(|(net, _)| overlap(net, &subnet) && !is_borrowed(net))
}

fn own_blocks(state: &NodeState) -> impl Iterator<Item = Ipv4Net> {
    let own = state.routes.iter().filter(|(_, target)| **target == RouteTarget::Local);
    own.filter_map(|(block, _)| match block {
        IpNet::V4(block) => Some(*block),
        IpNet::V6(_) => None,
    })
}

pub(super) fn own_ipv6_block(state: &NodeState) -> Option<Ipv6Net> {
    state.routes.iter().filter(|(_, target)| **target == RouteTarget::Local).find_map(
        |(block, _)| match block {
            IpNet::V6(block) => Some(*block),
            IpNet::V4(_) => None,
        },
    )
}

/// Other nodes address this node by the MAC address that it has published. HNS assigns a new one whenever it creates
/// the network. Until the node publishes that, no tunnel packets arrive.
fn remade(node: &LocalNode, network: &PodNetwork) -> Option<Condition> {
    let (published, now) = (node.vtep(IpVersion::V4)?.mac, network.router_mac?);
    (published != now).then(|| Condition::new(Reason::OverlayRemade, format!(
            "network {NETWORK} has the MAC address {now}, but the other nodes send to {published}: the network was made anew, \
             and what the node announces has to follow"
        )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool that is made again with another block size has blocks that are larger or smaller than the subnet.
    #[test]
    fn a_subnet_is_stale_if_another_node_has_its_addresses() {
        let vxlan = || RouteTarget::Vxlan { node: "other".into() };
        let subnet = "10.1.0.64/26";
        for (routes, expected) in [
            (&[][..], false),
            (&[("10.1.0.0/26", vxlan())], false),
            (&[(subnet, RouteTarget::Local)], false),
            (&[(subnet, vxlan())], true),
            (&[("10.1.0.0/24", vxlan())], true),
            (&[("10.1.0.64/27", vxlan())], true),
            (&[("10.1.0.70/32", vxlan())], true),
            (&[("10.1.0.64/27", RouteTarget::Direct { router: [172, 16, 0, 9].into() })], true),
            (&[(subnet, RouteTarget::Local), ("10.1.0.70/32", vxlan())], false),
            (&[(subnet, RouteTarget::Local), ("10.1.0.0/24", vxlan())], false),
            (&[("10.1.0.0/24", RouteTarget::Local), ("10.1.0.70/32", vxlan())], false),
        ] {
            let table = routes.iter().map(|(net, target)| (net.parse().unwrap(), target.clone()));
            assert_eq!(is_stale(subnet.parse().unwrap(), &table.collect()), expected, "{routes:?}");
        }
    }
}

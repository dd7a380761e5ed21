//! Networks (hcsshim `hcn/hcnnetwork.go`).

use std::net::IpAddr;

use ipnet::IpNet;
use tortie_hcn::schema::{
    DrMacAddress, IpConfig, Modify, Network, NetworkMode, Policy, PolicyList, ProviderAddress,
    RemoteSubnetRoute, RequestType, ResourceType, SetPolicy, SetPolicyType, Subnet, SubnetList, Vsid,
};
use tortie_hcn::{Failure, Feature, Guid, HResult};

use crate::check::{self, any_address, any_prefix, document, fail, settings};
use crate::config::Config;
use crate::policies;
use crate::reply::say_the_same;
use crate::sets::{Sets, values};
use crate::state::{Guard, State};
use crate::v1::{new_network, new_shape};

impl State {
    pub(crate) fn create_network(&mut self, id: Guid, text: &str, config: &Config) -> Result<Guid, Failure> {
        let text = &new_shape(text, new_network, config);
        let Network { r#type, .. } = document(text, false)?;
        if matches!(r#type, NetworkMode::Unknown(_)) {
            return fail(HResult::HCN_E_INVALID_NETWORK_TYPE, format!("Type {}", r#type));
        }
        let mut network: Network = document(text, config.strict)?;
        if let Some(twin) =
            self.networks.values().find(|other| other.name.eq_ignore_ascii_case(&network.name))
        {
            let error = format!("network {} has the name {:?}", twin.id, twin.name);
            return fail(HResult::HCN_E_NETWORK_ALREADY_EXISTS, error);
        }
        network.id = self.new_id(id, network.id)?;
        for policy in &network.policies {
            policies::network_policy(policy, config)?;
        }
        for subnet in network.ipams.iter_mut().flat_map(|ipam| &mut ipam.subnets) {
            check_subnet(subnet, network.r#type == NetworkMode::Overlay, config)?;
            subnet.id = if subnet.id.is_zero() { Guid::random() } else { subnet.id };
        }
        match network.r#type {
            NetworkMode::Overlay => add_overlay_policies(&mut network, config)?,
            NetworkMode::L2Bridge => set_provider(&mut network, config),
            _ => {}
        }
        let sets = Sets::of(&network.policies, &Sets::default(), config)?;
        let id = network.id;
        self.networks.insert(id, network.into());
        self.sets.insert(id, sets.into());
        Ok(id)
    }

    pub(crate) fn modify_network(&mut self, id: Guid, text: &str, config: &Config) -> Result<(), Failure> {
        let request: Modify = document(text, config.strict)?;
        if request.resource_type == ResourceType::Subnet {
            return self.modify_subnets(id, &request, config);
        }
        let network = self.network(id)?;
        if request.resource_type != ResourceType::Policy {
            let error = format!("ResourceType {} of a network is not emulated", request.resource_type);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        let PolicyList { policies, .. } = document(&request.settings.to_string(), config.strict)?;
        let mut changed = network.clone();
        let before = self.sets.get(&id).cloned().unwrap_or_default();
        for policy in policies {
            policies::network_policy(&policy, config)?;
            match request.request_type {
                RequestType::Add => {
                    check_members(&before, &policy)?;
                    add_policy(&mut changed, policy)?;
                }
                RequestType::Remove => {
                    remove_policy(&mut changed.policies, &policy)?;
                    self.check_set_unused(id, &before, &policy)?;
                }
                RequestType::Update => {
                    check_members(&before, &policy)?;
                    update_set(&mut changed, policy)?;
                }
                ref other => {
                    let error = format!("RequestType {other} for policies of a network");
                    return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
                }
            }
        }
        let sets = Sets::of(&changed.policies, &before, config)?;
        *self.network_mut(id)? = changed;
        if sets != *before {
            self.set_sets(id, sets, config)?;
        }
        Ok(())
    }

    /// Subnets come and go one by one; a subnet whose addresses endpoints have stays (docs/hns.md, Networks).
    fn modify_subnets(&mut self, id: Guid, request: &Modify, config: &Config) -> Result<(), Failure> {
        if !config.version.supports(Feature::SeveralSubnets) {
            let error = format!("ResourceType {} of a network", request.resource_type);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        let SubnetList { subnets, .. } = document(&request.settings.to_string(), config.strict)?;
        let mut changed = self.network(id)?.clone();
        let overlay = changed.r#type == NetworkMode::Overlay;
        let Some(ipam) = changed.ipams.first_mut() else {
            return fail(HResult::HCN_E_INVALID_NETWORK, format!("network {id} has no subnets"));
        };
        for mut subnet in subnets {
            match request.request_type {
                RequestType::Add => {
                    check_subnet(&subnet, overlay, config)?;
                    let net = any_prefix(&subnet.ip_address_prefix, "IpAddressPrefix", config)?;
                    for other in &ipam.subnets {
                        let other = any_prefix(&other.ip_address_prefix, "IpAddressPrefix", config)?;
                        if other.contains(&net) || net.contains(&other) {
                            return fail(HResult::HCN_E_INVALID_SUBNET, format!("{net} overlaps {other}"));
                        }
                    }
                    subnet.id = if subnet.id.is_zero() { Guid::random() } else { subnet.id };
                    ipam.subnets.push(subnet);
                }
                RequestType::Remove => {
                    let Some(at) = ipam.subnets.iter().position(|other| other.id == subnet.id) else {
                        return fail(HResult::HCN_E_SUBNET_NOT_FOUND, format!("subnet {}", subnet.id));
                    };
                    let net = ipam.subnets.remove(at).ip_address_prefix;
                    let net = any_prefix(&net, "IpAddressPrefix", config)?;
                    let is_inside =
                        |ip: &IpConfig| ip.ip_address.parse().is_ok_and(|ip: IpAddr| net.contains(&ip));
                    let user = self.endpoints_of(id).find(|one| one.ip_configurations.iter().any(is_inside));
                    if let Some(user) = user {
                        let error = format!("endpoint {} has an address of {net}", user.id);
                        return fail(HResult::HCN_E_ENTITY_HAS_REFERENCES, error);
                    }
                }
                ref other => {
                    let error = format!("RequestType {other} for subnets of a network");
                    return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
                }
            }
        }
        *self.network_mut(id)? = changed;
        Ok(())
    }

    /// The new values take effect at once in the ACLs that name the sets. This is not a write of those ACLs, so flows
    /// continue.
    fn set_sets(&mut self, network: Guid, sets: Sets, config: &Config) -> Result<(), Failure> {
        self.sets.insert(network, sets.into());
        let concerned: Vec<Guid> = self
            .endpoints_of(network)
            .map(|endpoint| endpoint.id)
            .filter(|id| self.guards.get(id).is_some_and(|guard| !guard.control.sets().is_empty()))
            .collect();
        for id in concerned {
            let control = self.control(self.endpoint(id)?, config)?.into();
            let resets = self.guard(id)?.resets;
            self.guards.insert(id, Guard { control, resets });
        }
        Ok(())
    }

    pub(crate) fn delete_network(&mut self, id: Guid, config: &Config) -> Result<(), Failure> {
        self.network(id)?;
        let endpoints: Vec<Guid> = self.endpoints_of(id).map(|endpoint| endpoint.id).collect();
        if !endpoints.is_empty() && !config.deletes_used_networks {
            let error = format!("network {id} has {} endpoints", endpoints.len());
            return fail(HResult::HCN_E_ENTITY_HAS_REFERENCES, error);
        }
        endpoints.into_iter().try_for_each(|endpoint| self.delete_endpoint(endpoint))?;
        self.networks.remove(&id);
        self.sets.remove(&id);
        Ok(())
    }

    /// A set that an ACL or another set names cannot be removed: HCN_E_ENTITY_HAS_REFERENCES (docs/hns.md, Calls). A
    /// set of sets that is removed in the same request still counts (docs/hns.md, Sets: separate requests).
    fn check_set_unused(&self, network: Guid, sets: &Sets, policy: &Policy) -> Result<(), Failure> {
        let Some(set) = settings::<SetPolicy>(policy)? else { return Ok(()) };
        let names =
            |id: &Guid| self.guards.get(id).is_some_and(|guard| guard.control.sets().contains(&set.id));
        let acl = self.endpoints_of(network).map(|endpoint| endpoint.id).find(names);
        let user = acl.map(|id| format!("an ACL of endpoint {id}"));
        match user.or_else(|| sets.user_of(&set.id).map(|id| format!("set {id:?}"))) {
            Some(user) => {
                fail(HResult::HCN_E_ENTITY_HAS_REFERENCES, format!("set {:?} is in {user}", set.id))
            }
            None => Ok(()),
        }
    }
}

/// The members of a set of sets must exist before the request (docs/hns.md, Sets: sets of addresses first, in
/// separate requests).
fn check_members(before: &Sets, policy: &Policy) -> Result<(), Failure> {
    let Some(set) = settings::<SetPolicy>(policy)? else { return Ok(()) };
    let nested = set.policy_type == SetPolicyType::NestedIpSet;
    match values(&set.values).find(|id| nested && before.members(id).is_none()) {
        Some(id) => fail(HResult::HCN_E_INVALID_POLICY, format!("set {:?}: there is no set {id:?}", set.id)),
        None => Ok(()),
    }
}

/// Overlay networks have no IPv6: kube-proxy disables it there (`pkg/proxy/winkernel/proxier.go`). That HNS refuses it is an assumption.
fn check_subnet(subnet: &Subnet, overlay: bool, config: &Config) -> Result<(), Failure> {
    let net = any_prefix(&subnet.ip_address_prefix, "IpAddressPrefix", config)?;
    if overlay && matches!(net, IpNet::V6(_)) {
        return fail(
            HResult::HCN_E_INVALID_SUBNET,
            format!("an overlay has no subnets of IPv6, such as {net}"),
        );
    }
    let mut default = false;
    for route in &subnet.routes {
        let hop = any_address(&route.next_hop, "NextHop", config)?;
        let destination = any_prefix(&route.destination_prefix, "DestinationPrefix", config)?;
        // Azure's gateways have addresses of the link (azure-container-networking, `network/network_windows.go`).
        let is_of_link = matches!((net, hop), (IpNet::V6(_), IpAddr::V6(hop)) if hop.is_unicast_link_local());
        if !net.contains(&hop) && !is_of_link {
            return fail(HResult::HCN_E_INVALID_IP, format!("NextHop {hop} is not in {net}"));
        }
        let is_same_family =
            matches!((net, destination), (IpNet::V4(_), IpNet::V4(_)) | (IpNet::V6(_), IpNet::V6(_)));
        default |= destination.prefix_len() == 0 && is_same_family;
    }
    if !default {
        return fail(HResult::HCN_E_INVALID_NETWORK, format!("subnet {net} has no default gateway"));
    }
    let mut vsid = None;
    for policy in &subnet.policies {
        vsid = vsid.or(settings::<Vsid>(policy)?);
    }
    match vsid {
        Some(vsid) => check::vni(vsid.isolation_id),
        None if overlay => {
            fail(HResult::HCN_E_INVALID_POLICY, format!("subnet {net} of an overlay has no VSID"))
        }
        None => Ok(()),
    }
}

/// Adds what HNS adds to an overlay network: the node's address, and the MAC address of its end of the tunnel, which
/// differs each time a network is created.
fn add_overlay_policies(network: &mut Network, config: &Config) -> Result<(), Failure> {
    if network.subnets().next().is_none() {
        return fail(HResult::HCN_E_INVALID_NETWORK, "an overlay network needs a subnet");
    }
    set_provider(network, config);
    network.policies.retain(|policy| !policy.is::<DrMacAddress>());
    // 00-15-5D is Microsoft's prefix for virtual adapters.
    let [a, b, c] = rand::random::<[u8; 3]>();
    let address = format!("00-15-5D-{a:02X}-{b:02X}-{c:02X}");
    network.policies.push(Policy::of(&DrMacAddress { address, ..Default::default() }));
    Ok(())
}

/// The node's address. The old interface shows it as `ManagementIP`, for which flannel waits on an L2Bridge network, too
/// (`pkg/backend/hostgw/hostgw_windows.go`).
fn set_provider(network: &mut Network, config: &Config) {
    network.policies.retain(|policy| !policy.is::<ProviderAddress>());
    let provider_address = config.provider_address.to_string();
    network.policies.push(Policy::of(&ProviderAddress { provider_address, ..Default::default() }));
}

fn add_policy(network: &mut Network, policy: Policy) -> Result<(), Failure> {
    let route = settings::<RemoteSubnetRoute>(&policy)?;
    let set = settings::<SetPolicy>(&policy)?;
    let twin = network.policies.iter().find(|other| {
        let same_prefix = route.as_ref().is_some_and(|route| {
            let other = other.settings::<RemoteSubnetRoute>().ok().flatten();
            other.is_some_and(|other| other.destination_prefix == route.destination_prefix)
        });
        let same_set = set.as_ref().is_some_and(|set| {
            other.settings::<SetPolicy>().ok().flatten().is_some_and(|other| other.id == set.id)
        });
        is_same(other, &policy) || same_prefix || same_set
    });
    if let Some(twin) = twin {
        return fail(HResult::HCN_E_POLICY_ALREADY_EXISTS, format!("{} {}", twin.r#type, twin.settings));
    }
    network.policies.push(policy);
    Ok(())
}

/// Whether two policies are the same, as HNS shows them or as they were sent.
pub(crate) fn is_same(a: &Policy, b: &Policy) -> bool {
    a.r#type.eq_ignore_ascii_case(&b.r#type) && say_the_same(&a.settings, &b.settings)
}

/// Removes a policy only if the request contains all of it.
pub(crate) fn remove_policy(policies: &mut Vec<Policy>, policy: &Policy) -> Result<(), Failure> {
    match policies.iter().position(|other| is_same(other, policy)) {
        Some(at) => {
            policies.remove(at);
            Ok(())
        }
        None => fail(
            HResult::HCN_E_POLICY_NOT_FOUND,
            format!("{} {} is not there", policy.r#type, policy.settings),
        ),
    }
}

/// Update replaces the values of a set.
fn update_set(network: &mut Network, policy: Policy) -> Result<(), Failure> {
    let Some(set) = settings::<SetPolicy>(&policy)? else {
        return fail(
            HResult::HCN_E_REQUEST_UNSUPPORTED,
            format!("Update of {} is not emulated", policy.r#type),
        );
    };
    let is_it = |other: &&mut Policy| {
        other.settings::<SetPolicy>().ok().flatten().is_some_and(|other| other.id == set.id)
    };
    match network.policies.iter_mut().find(is_it) {
        Some(known) => {
            *known = policy;
            Ok(())
        }
        None => fail(HResult::HCN_E_POLICY_NOT_FOUND, format!("set {} is not there", set.id)),
    }
}

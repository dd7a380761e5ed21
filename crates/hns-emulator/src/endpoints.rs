//! Endpoints (hcsshim `hcn/hcnendpoint.go`).

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use tortie_hcn::schema::{
    Acl, Endpoint, IpConfig, Modify, Network, Policy, PolicyList, PortMapping, RequestType, ResourceType,
    Subnet,
};
use tortie_hcn::{Failure, Guid, HResult};

use crate::addresses::is_mac;
use crate::check::{any_address, document, fail};
use crate::config::{AclRemoval, Config, OnRewrite, UpdateReplaces};
use crate::networks::{is_same, remove_policy};
use crate::state::{CREATED, DETACHED, Guard, State};
use crate::v1::{new_endpoint, new_shape};

impl State {
    pub(crate) fn create_endpoint(
        &mut self,
        network: Guid,
        id: Guid,
        text: &str,
        config: &Config,
    ) -> Result<Guid, Failure> {
        let mut endpoint: Endpoint = document(&new_shape(text, new_endpoint, config), config.strict)?;
        let network = self.network(network)?;
        let named = endpoint.host_compute_network;
        if !named.is_zero() && named != network.id {
            let error = format!("HostComputeNetwork {named} is not the network {}", network.id);
            return fail(HResult::HCN_E_INVALID_JSON_REFERENCE, error);
        }
        if !endpoint.host_compute_namespace.is_zero() {
            return fail(HResult::HCN_E_INVALID_ENDPOINT, "HostComputeNamespace is set by attaching");
        }
        endpoint.host_compute_network = network.id;
        endpoint.id = self.new_id(id, endpoint.id)?;
        endpoint.base.state = Some(CREATED);
        self.settle_addresses(&mut endpoint, network, config)?;
        settle_mac(&mut endpoint, config)?;
        self.check_port_mappings(&endpoint)?;
        let control = self.control(&endpoint, config)?.into();
        let id = endpoint.id;
        self.endpoints.insert(id, endpoint.into());
        self.guards.insert(id, Guard { control, resets: 0 });
        Ok(id)
    }

    pub(crate) fn modify_endpoint(&mut self, id: Guid, text: &str, config: &Config) -> Result<(), Failure> {
        let request: Modify = document(text, config.strict)?;
        let mut changed = self.endpoint(id)?.clone();
        if request.resource_type != ResourceType::Policy {
            let error = format!("ResourceType {} of an endpoint is not emulated", request.resource_type);
            return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
        }
        let PolicyList { policies, .. } = document(&request.settings.to_string(), config.strict)?;
        if let Some(most) = config.limits.modify_policies.filter(|most| policies.len() > *most) {
            let error = format!("{} policies in one request, and {most} are possible", policies.len());
            return fail(HResult::HCN_E_INVALID_POLICY, error);
        }
        let written = match request.request_type {
            RequestType::Update => update(&mut changed.policies, policies, config.update_replaces),
            RequestType::Add => add(&mut changed.policies, policies)?,
            RequestType::Remove => remove(&mut changed.policies, &policies, config.acl_removal)?,
            other => {
                let error = format!("RequestType {other} for policies of an endpoint");
                return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, error);
            }
        };
        self.check_port_mappings(&changed)?;
        let control = self.control(&changed, config)?.into();
        let resets = self.guard(id)?.resets + u64::from(written.resets(config.on_rewrite));
        *self.endpoint_mut(id)? = changed;
        self.guards.insert(id, Guard { control, resets });
        Ok(())
    }

    /// A port of the node leads to one endpoint (`TestEndpointAlreadyExistsError` of hcsshim's `hcn/hcnerrors_test.go`).
    fn check_port_mappings(&self, endpoint: &Endpoint) -> Result<(), Failure> {
        let others = self.endpoints.values().filter(|other| other.id != endpoint.id);
        let taken: Vec<_> = others.flat_map(|other| mapped_ports(other)).collect();
        match mapped_ports(endpoint).find(|port| taken.contains(port)) {
            Some((protocol, port)) => {
                let error = format!("port {port} of protocol {protocol} is mapped already");
                fail(HResult::HCN_E_PORT_ALREADY_EXISTS, error)
            }
            None => Ok(()),
        }
    }

    /// An endpoint may be deleted while it is attached; it is then removed from its namespace.
    pub(crate) fn delete_endpoint(&mut self, id: Guid) -> Result<(), Failure> {
        let namespace = self.endpoint(id)?.host_compute_namespace;
        if !namespace.is_zero() {
            self.detach(namespace, id)?;
        }
        self.endpoints.remove(&id);
        self.guards.remove(&id);
        Ok(())
    }

    /// Checks the endpoint's addresses, and allocates one if it names none.
    fn settle_addresses(
        &self,
        endpoint: &mut Endpoint,
        network: &Network,
        config: &Config,
    ) -> Result<(), Failure> {
        if endpoint.ip_configurations.is_empty() && !endpoint.is_remote() {
            let Some(free) = self.free_address(network) else { return Ok(()) };
            endpoint.ip_configurations.push(IpConfig { ip_address: free.to_string(), ..Default::default() });
        }
        let remote = endpoint.is_remote();
        let is_ipv6 = |own: &&IpConfig| own.ip_address.contains(':');
        if endpoint.ip_configurations.iter().filter(is_ipv6).count() > 1 {
            // azure-container-networking, `network/endpoint_windows.go`.
            return fail(HResult::HCN_E_INVALID_IP, "an endpoint has one IPv6 address at most");
        }
        for own in &mut endpoint.ip_configurations {
            let ip = any_address(&own.ip_address, "IpAddress", config)?;
            let Some((net, subnet)) = subnets(network).find(|(net, _)| net.contains(&ip)) else {
                if remote {
                    continue;
                }
                return fail(HResult::HCN_E_INVALID_IP, format!("{ip} is in no subnet of {}", network.name));
            };
            if !remote && is_reserved(ip, net, subnet) {
                return fail(HResult::HCN_E_ADDR_INVALID_OR_RESERVED, format!("{ip} is reserved in {net}"));
            }
            let counts = |holder: &&Endpoint| !config.accepts_taken_addresses || holder.is_remote() == remote;
            if let Some(holder) = self.holders(network.id, ip).find(counts) {
                let error = format!("endpoint {} has the address {ip}", holder.id);
                return fail(HResult::HCN_E_ADDR_INVALID_OR_RESERVED, error);
            }
            // Without IP subnets, the prefix length of the subnet applies, whatever the client says.
            own.prefix_length = net.prefix_len();
        }
        Ok(())
    }

    fn holders(&self, network: Guid, ip: IpAddr) -> impl Iterator<Item = &Endpoint> {
        let has = move |endpoint: &&Arc<Endpoint>| {
            endpoint.ip_configurations.iter().any(|config| config.ip_address.parse() == Ok(ip))
        };
        self.endpoints_of(network).filter(has).map(Arc::as_ref)
    }

    /// A free IPv4 address. No source says whether HNS chooses one of IPv6, too.
    fn free_address(&self, network: &Network) -> Option<Ipv4Addr> {
        let is_free = |ip: &Ipv4Addr, net, subnet| {
            !is_reserved((*ip).into(), net, subnet) && self.holders(network.id, (*ip).into()).next().is_none()
        };
        subnets(network).find_map(|(net, subnet)| {
            let IpNet::V4(hosts) = net else { return None };
            Ipv4Net::hosts(&hosts).find(|ip| is_free(ip, net, subnet))
        })
    }
}

/// What a request changed in the ACLs of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AclChange {
    Nothing,
    Added,
    Replaced,
}

impl AclChange {
    pub(crate) fn resets(self, knob: OnRewrite) -> bool {
        match knob {
            OnRewrite::Keep => false,
            OnRewrite::ResetOnAnyChange => self != AclChange::Nothing,
            OnRewrite::ResetOnRemoveOrUpdate => self == AclChange::Replaced,
        }
    }
}

fn has_acl(policies: &[Policy]) -> bool {
    policies.iter().any(Policy::is::<Acl>)
}

/// The request's policies replace all policies, or those of their types, or those and all ACLs.
fn update(policies: &mut Vec<Policy>, new: Vec<Policy>, replaces: UpdateReplaces) -> AclChange {
    let goes = |old: &Policy| match replaces {
        UpdateReplaces::All => true,
        UpdateReplaces::AclsAndSameType if old.is::<Acl>() => true,
        UpdateReplaces::SameType | UpdateReplaces::AclsAndSameType => {
            new.iter().any(|new| new.r#type.eq_ignore_ascii_case(&old.r#type))
        }
    };
    let lost = policies.iter().any(|old| old.is::<Acl>() && goes(old));
    let written = if lost || has_acl(&new) { AclChange::Replaced } else { AclChange::Nothing };
    policies.retain(|old| !goes(old));
    policies.extend(new);
    written
}

fn add(policies: &mut Vec<Policy>, new: Vec<Policy>) -> Result<AclChange, Failure> {
    let written = if has_acl(&new) { AclChange::Added } else { AclChange::Nothing };
    for policy in new {
        if policies.iter().any(|other| is_same(other, &policy)) {
            let error = format!("{} {}", policy.r#type, policy.settings);
            return fail(HResult::HCN_E_POLICY_ALREADY_EXISTS, error);
        }
        policies.push(policy);
    }
    Ok(written)
}

fn remove(policies: &mut Vec<Policy>, old: &[Policy], removal: AclRemoval) -> Result<AclChange, Failure> {
    let mut written = AclChange::Nothing;
    for policy in old {
        match removal {
            AclRemoval::RefusedAlways if policy.is::<Acl>() => {
                return fail(HResult::HCN_E_REQUEST_UNSUPPORTED, "this HNS does not remove ACLs");
            }
            AclRemoval::IgnoredSilently if policy.is::<Acl>() => continue,
            _ => remove_policy(policies, policy)?,
        }
        if policy.is::<Acl>() {
            written = AclChange::Replaced;
        }
    }
    Ok(written)
}

fn subnets(network: &Network) -> impl Iterator<Item = (IpNet, &Subnet)> {
    network.subnets().filter_map(|subnet| Some((subnet.ip_address_prefix.parse().ok()?, subnet)))
}

/// The subnet's own address, its broadcast address (IPv6 has none), and its gateways.
fn is_reserved(ip: IpAddr, net: IpNet, subnet: &Subnet) -> bool {
    let gateway = subnet.routes.iter().any(|route| route.next_hop.parse() == Ok(ip));
    let is_broadcast = matches!(net, IpNet::V4(net) if IpAddr::V4(net.broadcast()) == ip);
    ip == net.network() || is_broadcast || gateway
}

/// kube-proxy writes the node's MAC address with colons. Endpoints show dashes.
fn settle_mac(endpoint: &mut Endpoint, config: &Config) -> Result<(), Failure> {
    if !config.strict {
        endpoint.mac_address = endpoint.mac_address.replace(':', "-");
    }
    if endpoint.mac_address.is_empty() {
        let [a, b, c] = rand::random::<[u8; 3]>();
        endpoint.mac_address = format!("00-15-5D-{a:02X}-{b:02X}-{c:02X}");
    }
    if is_mac(&endpoint.mac_address, config) {
        return Ok(());
    }
    fail(HResult::HCN_E_INVALID_ENDPOINT, format!("MacAddress {:?}", endpoint.mac_address))
}

/// Resets an endpoint after it has left its namespace.
pub(crate) fn detached(endpoint: &mut Endpoint) {
    endpoint.host_compute_namespace = Guid::ZERO;
    endpoint.base.state = Some(DETACHED);
}

/// The ports of the node that lead to an endpoint: protocol and port. The address makes no difference (docs/hns.md, Host ports).
fn mapped_ports(endpoint: &Endpoint) -> impl Iterator<Item = (u32, u16)> {
    let mappings =
        endpoint.policies.iter().filter_map(|policy| policy.settings::<PortMapping>().ok().flatten());
    mappings.map(|mapping| (mapping.protocol, mapping.external_port))
}

//! Checks that documents of several kinds share.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::de::DeserializeOwned;
use tortie_hcn::schema::{
    Acl, AclRuleType, DrMacAddress, Endpoint, HostRoute, InterfaceParameters, NetAdapterName, OutBoundNat,
    Policy, PolicySettings, ProviderAddress, RemoteSubnetRoute, SdnRoute, SetPolicy, SetPolicyType, Strict,
    VxlanPort, lenient, strict as strictly,
};
use tortie_hcn::{Failure, Feature, HResult};

use crate::acl::AccessControl;
use crate::addresses::{cidr, mac};
use crate::config::Config;

/// The largest priority with which an ACL works (hns.md 4.1).
const MAX_PRIORITY: u16 = 65_500;

/// The VNIs that Windows takes.
const VNIS: std::ops::Range<u32> = 4096..1 << 24;

pub(crate) fn fail<T>(code: HResult, error: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(code, error))
}

/// Reads a document.
pub(crate) fn document<T: DeserializeOwned + Strict>(text: &str, strict: bool) -> Result<T, Failure> {
    let read = if strict { strictly(text) } else { lenient(text) };
    read.map_err(|error| Failure::new(HResult::HCN_E_INVALID_JSON, error.to_string()))
}

/// The settings of a policy, if it is of that type.
pub(crate) fn settings<T: PolicySettings>(policy: &Policy) -> Result<Option<T>, Failure> {
    policy.settings().map_err(|error| Failure::new(HResult::HCN_E_INVALID_POLICY, error.to_string()))
}

/// Reads an address.
pub(crate) fn address(text: &str, what: &str) -> Result<Ipv4Addr, Failure> {
    text.parse().map_err(|_| {
        Failure::new(HResult::HCN_E_INVALID_IP, format!("{what} {text:?} is not an IPv4 address"))
    })
}

/// Reads a CIDR whose host bits are zero.
pub(crate) fn prefix(text: &str, what: &str) -> Result<Ipv4Net, Failure> {
    match text.parse::<Ipv4Net>() {
        Ok(net) if net.trunc() == net => Ok(net),
        _ => fail(HResult::HCN_E_INVALID_PREFIX, format!("{what} {text:?} is not an IPv4 prefix")),
    }
}

/// Checks a VNI.
pub(crate) fn vni(vni: u32) -> Result<(), Failure> {
    if VNIS.contains(&vni) {
        return Ok(());
    }
    fail(
        HResult::HCN_E_INVALID_POLICY,
        format!("IsolationId {vni}: {} to {} are possible", VNIS.start, VNIS.end - 1),
    )
}

fn invalid<T>(error: String) -> Result<T, Failure> {
    fail(HResult::HCN_E_INVALID_POLICY, error)
}

fn needs(config: &Config, feature: Feature, policy: &Policy) -> Result<(), Failure> {
    if config.version.supports(feature) {
        return Ok(());
    }
    let error = format!("HNS {} does not have {}", config.version, policy.r#type);
    fail(HResult::HCN_E_INVALID_POLICY_TYPE, error)
}

/// Checks a policy that is to be put on a network. What an overlay needs is read; of the rest only the form.
pub(crate) fn network_policy(policy: &Policy, config: &Config) -> Result<(), Failure> {
    if let Some(route) = settings::<RemoteSubnetRoute>(policy)? {
        needs(config, Feature::RemoteSubnet, policy)?;
        prefix(&route.destination_prefix, "DestinationPrefix")?;
        address(&route.provider_address, "ProviderAddress")?;
        vni(route.isolation_id)?;
        if mac(&route.distributed_router_mac_address).is_none() {
            return invalid(format!(
                "DistributedRouterMacAddress {:?}",
                route.distributed_router_mac_address
            ));
        }
        return Ok(());
    }
    if let Some(set) = settings::<SetPolicy>(policy)? {
        let nested = set.policy_type == SetPolicyType::NestedIpSet;
        needs(config, if nested { Feature::NestedIpSet } else { Feature::SetPolicy }, policy)?;
        let strange =
            set.values.split(',').find(|value| !value.is_empty() && !nested && cidr(value).is_none());
        return strange
            .map_or(Ok(()), |value| invalid(format!("set {}: {value:?} is not an address", set.id)));
    }
    if policy.is::<HostRoute>() {
        needs(config, Feature::HostRoute, policy)?;
        // HNS insists on the empty object.
        return if policy.settings.is_object() {
            Ok(())
        } else {
            invalid("HostRoute without Settings".into())
        };
    }
    if let Some(port) = settings::<VxlanPort>(policy)? {
        needs(config, Feature::VxlanPort, policy)?;
        return if port.port == 0 { invalid("VxlanPort 0".into()) } else { Ok(()) };
    }
    if let Some(provider) = settings::<ProviderAddress>(policy)? {
        return address(&provider.provider_address, "ProviderAddress").map(drop);
    }
    if policy.is::<NetAdapterName>() || policy.is::<DrMacAddress>() {
        return Ok(());
    }
    fail(HResult::HCN_E_INVALID_POLICY_TYPE, format!("{} is not a policy of a network here", policy.r#type))
}

/// Checks the policies that an endpoint is to have. `set` gives the values of the network's sets.
pub(crate) fn endpoint_policies<'a>(
    endpoint: &Endpoint,
    set: &dyn Fn(&str) -> Option<&'a str>,
    config: &Config,
) -> Result<(), Failure> {
    let policies = &endpoint.policies;
    if policies.iter().filter(|policy| policy.is::<InterfaceParameters>()).count() > 1 {
        return fail(HResult::HCN_INTERFACEPARAMETERS_ALREADY_APPLIED, "InterfaceParameters twice");
    }
    for policy in policies {
        endpoint_policy(policy)?;
    }
    access_control(policies, set, config).map(drop)
}

fn endpoint_policy(policy: &Policy) -> Result<(), Failure> {
    if let Some(acl) = settings::<Acl>(policy)? {
        return acl_document(policy, &acl);
    }
    if let Some(nat) = settings::<OutBoundNat>(policy)? {
        let strange = nat.exceptions.iter().find(|exception| cidr(exception).is_none());
        return strange.map_or(Ok(()), |text| invalid(format!("OutBoundNAT exception {text:?}")));
    }
    if let Some(route) = settings::<SdnRoute>(policy)? {
        return prefix(&route.destination_prefix, "DestinationPrefix").map(drop);
    }
    if let Some(provider) = settings::<ProviderAddress>(policy)? {
        return address(&provider.provider_address, "ProviderAddress").map(drop);
    }
    match policy.r#type.to_ascii_lowercase().as_str() {
        "portmapping" | "interfaceparameters" | "encapoverhead" | "qos" => Ok(()),
        _ => fail(
            HResult::HCN_E_INVALID_POLICY_TYPE,
            format!("{} is not a policy of an endpoint here", policy.r#type),
        ),
    }
}

/// A client that leaves out what an ACL is about most likely does not mean the zero value.
fn acl_document(policy: &Policy, acl: &Acl) -> Result<(), Failure> {
    for member in ["Action", "Direction", "RuleType"] {
        if policy.settings.get(member).is_none() {
            return invalid(format!("ACL {:?} without {member}", acl.id));
        }
    }
    match acl.rule_type {
        AclRuleType::Switch if !(1..=MAX_PRIORITY).contains(&acl.priority) => {
            invalid(format!("ACL {:?}: Priority {} is not 1 to {MAX_PRIORITY}", acl.id, acl.priority))
        }
        AclRuleType::Host if acl.priority != 0 => {
            invalid(format!("ACL {:?}: RuleType Host takes no Priority", acl.id))
        }
        _ => Ok(()),
    }
}

/// The ACLs among the policies of an endpoint, ready to be asked.
pub(crate) fn access_control<'a>(
    policies: &[Policy],
    set: &dyn Fn(&str) -> Option<&'a str>,
    config: &Config,
) -> Result<AccessControl, Failure> {
    let mut acls = Vec::new();
    for policy in policies {
        acls.extend(settings::<Acl>(policy)?);
    }
    AccessControl::new(acls, set, config)
        .or_else(|part| invalid(format!("ACL: {:?} is not understood, and no set has that Id", part.0)))
}

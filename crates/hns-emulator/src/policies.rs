//! Checks the policies of networks and endpoints.

use ipnet::IpNet;
use tortie_hcn::schema::{
    Acl, AclRuleType, Endpoint, HostRoute, InterfaceParameters, OutBoundNat, Policy, ProviderAddress,
    RemoteSubnetRoute, SdnRoute, SetPolicy, SetPolicyType, VxlanPort,
};
use tortie_hcn::{Failure, Feature, HResult};

use crate::acl::AccessControl;
use crate::addresses::{any_cidr, is_mac};
use crate::check::{address, fail, prefix, settings, vni};
use crate::config::Config;
use crate::sets::Sets;

/// The flag of policies that translate addresses of IPv6.
const NAT_IPV6: u32 = 2;

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

/// Checks a policy for a network. The policies of an overlay are parsed; for the rest, only the form is checked.
pub(crate) fn network_policy(policy: &Policy, config: &Config) -> Result<(), Failure> {
    if let Some(route) = settings::<RemoteSubnetRoute>(policy)? {
        needs(config, Feature::RemoteSubnet, policy)?;
        prefix(&route.destination_prefix, "DestinationPrefix")?;
        address(&route.provider_address, "ProviderAddress")?;
        vni(route.isolation_id)?;
        if !is_mac(&route.distributed_router_mac_address, config) {
            return invalid(format!(
                "DistributedRouterMacAddress {:?}",
                route.distributed_router_mac_address
            ));
        }
        return Ok(());
    }
    if let Some(set) = settings::<SetPolicy>(policy)? {
        let nested = set.policy_type == SetPolicyType::NestedIpSet;
        // Its values are checked together with the other sets of the network.
        let feature =
            if nested && !config.early_nested_sets { Feature::NestedIpSet } else { Feature::SetPolicy };
        return needs(config, feature, policy);
    }
    if policy.is::<HostRoute>() {
        needs(config, Feature::HostRoute, policy)?;
        // HNS requires the empty object.
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
    match policy.r#type.to_ascii_lowercase().as_str() {
        // HNS has them, and they have no effect here. A strict emulator rejects those that it does not know with the document.
        "netadaptername"
        | "drmacaddress"
        | "sourcemacaddress"
        | "automaticdns"
        | "networkacl"
        | "interfaceconstraint"
        | "vswitchextension"
        | "l4proxy"
        | "layerconstraint" => return Ok(()),
        _ => {}
    }
    fail(HResult::HCN_E_INVALID_POLICY_TYPE, format!("{} is not a policy of a network here", policy.r#type))
}

/// Checks the policies for an endpoint, and returns its parsed ACLs. `sets` are the sets of its network.
pub(crate) fn endpoint_policies(
    endpoint: &Endpoint,
    sets: &Sets,
    config: &Config,
) -> Result<AccessControl, Failure> {
    let policies = &endpoint.policies;
    if policies.iter().filter(|policy| policy.is::<InterfaceParameters>()).count() > 1 {
        return fail(HResult::HCN_INTERFACEPARAMETERS_ALREADY_APPLIED, "InterfaceParameters twice");
    }
    let mut acls = Vec::new();
    for policy in policies {
        match settings::<Acl>(policy)? {
            Some(acl) if !config.strict && policy.settings.get("RuleType").is_none() => {
                // It applies at both places. Rules of the firewall have no priority.
                for (rule_type, priority) in [(AclRuleType::Switch, acl.priority), (AclRuleType::Host, 0)] {
                    let acl = Acl { rule_type, priority, ..acl.clone() };
                    acl_document(policy, &acl, config)?;
                    acls.push(acl);
                }
            }
            Some(acl) => {
                acl_document(policy, &acl, config)?;
                acls.push(acl);
            }
            None => endpoint_policy(policy, config)?,
        }
    }
    if let Some(most) = config.limits.endpoint_acls.filter(|most| acls.len() > *most) {
        return invalid(format!("{} ACLs, and {most} are possible", acls.len()));
    }
    AccessControl::new(acls, sets, config).or_else(|problem| invalid(format!("ACL: {}", problem.0)))
}

fn endpoint_policy(policy: &Policy, config: &Config) -> Result<(), Failure> {
    if let Some(nat) = settings::<OutBoundNat>(policy)? {
        // One policy for each family; that of IPv6 has the flag 2 (SDN scripts, `hns.v2.psm1`).
        let fits = |text: &String| match any_cidr(text, config) {
            Some(net) => !config.strict || matches!(net, IpNet::V6(_)) == (nat.flags & NAT_IPV6 != 0),
            None => false,
        };
        let strange = nat.exceptions.iter().find(|exception| !fits(exception));
        return strange.map_or(Ok(()), |text| invalid(format!("OutBoundNAT exception {text:?}")));
    }
    if let Some(route) = settings::<SdnRoute>(policy)? {
        // hcsshim's tests have one with host bits.
        let is_prefix = any_cidr(&route.destination_prefix, config).is_some();
        return if is_prefix {
            Ok(())
        } else {
            invalid(format!("DestinationPrefix {:?}", route.destination_prefix))
        };
    }
    if let Some(provider) = settings::<ProviderAddress>(policy)? {
        return address(&provider.provider_address, "ProviderAddress").map(drop);
    }
    match policy.r#type.to_ascii_lowercase().as_str() {
        "portmapping" | "interfaceparameters" | "encapoverhead" | "qos" => Ok(()),
        // HNS has them, and they have no effect here. A strict emulator rejects them with the document.
        "l4wfpproxy"
        | "l4proxy"
        | "tieracl"
        | "l2driver"
        | "portname"
        | "iov"
        | "interfaceconstraint"
        | "encryption" => Ok(()),
        _ => fail(
            HResult::HCN_E_INVALID_POLICY_TYPE,
            format!("{} is not a policy of an endpoint here", policy.r#type),
        ),
    }
}

/// A client that omits a criterion of an ACL most likely does not mean the zero value.
fn acl_document(policy: &Policy, acl: &Acl, config: &Config) -> Result<(), Failure> {
    for member in ["Action", "Direction", "RuleType"] {
        if config.strict && policy.settings.get(member).is_none() {
            return invalid(format!("ACL {:?} without {member}", acl.id));
        }
    }
    let fields = [
        ("LocalAddresses", &acl.local_addresses, Feature::AclAddressLists),
        ("RemoteAddresses", &acl.remote_addresses, Feature::AclAddressLists),
        ("LocalPorts", &acl.local_ports, Feature::AclPortRanges),
        ("RemotePorts", &acl.remote_ports, Feature::AclPortRanges),
    ];
    for (name, list, feature) in fields {
        let ports = feature == Feature::AclPortRanges;
        let plain = !(list.contains(',') || ports && list.contains('-'));
        if !plain && !config.version.supports(feature) {
            return invalid(format!("ACL {:?}: HNS {} takes no list in {name}", acl.id, config.version));
        }
        let (count, most) = (list.split(',').count(), config.limits.field_entries);
        if let Some(most) = most.filter(|most| config.strict && count > *most) {
            return invalid(format!("ACL {:?}: {name} has {count} entries, {most} are advised", acl.id));
        }
    }
    let priorities = &config.limits.priorities;
    match acl.rule_type {
        AclRuleType::Switch if !priorities.contains(&acl.priority) => {
            invalid(format!("ACL {:?}: Priority {} is not in {priorities:?}", acl.id, acl.priority))
        }
        AclRuleType::Host if acl.priority != 0 => {
            invalid(format!("ACL {:?}: RuleType Host takes no Priority", acl.id))
        }
        _ => Ok(()),
    }
}

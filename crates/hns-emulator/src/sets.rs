//! The sets of a network that ACLs can name (SetPolicy; docs/hns.md, Sets).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_hcn::schema::{Policy, SetPolicy, SetPolicyType};
use tortie_hcn::{Failure, HResult};

use crate::addresses::{Addresses, any_cidr};
use crate::check::{fail, settings};
use crate::config::Config;

/// The sets of one network, with everything derived from their values.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Sets(BTreeMap<String, Arc<Set>>);

#[derive(Debug, PartialEq)]
struct Set {
    policy_type: SetPolicyType,
    /// As they were written.
    values: String,
    /// The members; for a set of sets, the members of any of those.
    members: Addresses,
}

impl Sets {
    /// The sets among a network's policies. Sets that have not changed since `before` are reused.
    ///
    /// An invalid set, or a set of sets that names a missing set, gives HCN_E_INVALID_POLICY (docs/hns.md, Calls):
    /// the code that HNS gives for text in an address field that it cannot parse, and an unknown identifier is no
    /// more than such text.
    pub(crate) fn of(policies: &[Policy], before: &Sets, config: &Config) -> Result<Sets, Failure> {
        let mut sets = Sets::default();
        let mut nested = Vec::new();
        for policy in policies {
            match settings::<SetPolicy>(policy)? {
                Some(set) if set.policy_type == SetPolicyType::NestedIpSet => nested.push(set),
                Some(set) => sets.add(set, before, config)?,
                None => {}
            }
        }
        // Sets of sets come after all sets of addresses, wherever they are in the list. A set of sets contains no
        // other one.
        let of_addresses = sets.clone();
        for set in nested {
            check_size(&set, config)?;
            let mut members = Addresses::none();
            for id in values(&set.values) {
                let Some(inner) = of_addresses.0.get(id) else {
                    return invalid(&set.id, format!("{id:?} is not the Id of a set of addresses"));
                };
                members = members.or(&inner.members);
            }
            let SetPolicy { id, policy_type, values, .. } = set;
            sets.0.insert(id, Arc::new(Set { policy_type, values, members }));
        }
        Ok(sets)
    }

    fn add(&mut self, set: SetPolicy, before: &Sets, config: &Config) -> Result<(), Failure> {
        let SetPolicy { ref id, ref policy_type, .. } = set;
        if !matches!(policy_type, SetPolicyType::IpSet) {
            return invalid(id, format!("PolicyType {policy_type}"));
        }
        if id.parse::<IpNet>().is_ok() || id.parse::<IpAddr>().is_ok() || id.is_empty() || id.contains(',') {
            return invalid(id, "an ACL could not name it".into());
        }
        check_size(&set, config)?;
        let same = |known: &&Arc<Set>| known.values == set.values && known.policy_type == *policy_type;
        if let Some(known) = before.0.get(id).filter(same) {
            self.0.insert(id.clone(), Arc::clone(known));
            return Ok(());
        }
        let mut nets = Vec::new();
        for value in values(&set.values) {
            match any_cidr(value, config) {
                Some(net) => nets.push(net),
                None => return invalid(id, format!("{value:?} is not an address")),
            }
        }
        let SetPolicy { id, policy_type, values, .. } = set;
        self.0.insert(id, Arc::new(Set { policy_type, values, members: Addresses::of_nets(nets) }));
        Ok(())
    }

    /// The members of a set, if a set has that identifier.
    pub(crate) fn members(&self, id: &str) -> Option<&Addresses> {
        self.0.get(id).map(|set| &set.members)
    }

    /// A set of sets that names this one.
    pub(crate) fn user_of(&self, id: &str) -> Option<&str> {
        let names =
            |set: &Set| set.policy_type == SetPolicyType::NestedIpSet && values(&set.values).any(|v| v == id);
        self.0.iter().find(|(_, set)| names(set)).map(|(id, _)| id.as_str())
    }
}

/// The parts of a comma-separated list.
pub(crate) fn values(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').filter(|value| !value.is_empty())
}

fn check_size(set: &SetPolicy, config: &Config) -> Result<(), Failure> {
    let (count, most) = (values(&set.values).count(), config.limits.set_members);
    match most {
        Some(most) if count > most => invalid(&set.id, format!("{count} members, and {most} are possible")),
        _ => Ok(()),
    }
}

fn invalid<T>(id: &str, problem: String) -> Result<T, Failure> {
    fail(HResult::HCN_E_INVALID_POLICY, format!("set {id:?}: {problem}"))
}

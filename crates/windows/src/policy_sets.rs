//! The sets of addresses that ACLs name: SetPolicy policies of the network (hns.md 2.6).

use std::collections::{BTreeMap, BTreeSet};

use tortie_dataplane::Condition;
use tortie_hcn::schema::{Extra, Modify, Policy, RequestType, SetPolicy, SetPolicyType};
use tortie_hcn::{Class, Guid, Hcn, HcnExt};
use tracing::{debug, warn};

use crate::Error;
use crate::acl::{OUR_SETS, Set};

/// Our sets of a network, as HNS has them.
#[derive(Debug, Clone, Default)]
pub(crate) struct PolicySets(BTreeMap<String, BTreeSet<String>>);

impl PolicySets {
    /// Reads the sets.
    pub(crate) fn read(hcn: &(impl Hcn + ?Sized), network: Guid) -> Result<Self, Error> {
        let policies = hcn.network(network)?.policies;
        let sets = policies.iter().filter_map(|policy| policy.settings::<SetPolicy>().ok().flatten());
        let ours = sets.filter(|set| set.id.starts_with(OUR_SETS));
        Ok(Self(ours.map(|set| (set.id, values(&set.values))).collect()))
    }

    /// Whether there is a set with this identifier.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    /// The identifiers of the sets.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Whether the set is there, with other members than these.
    pub(crate) fn differs(&self, set: &Set) -> bool {
        self.0.get(&set.id).is_some_and(|values| *values != set.values)
    }

    /// Makes sets that are not there. Gives those that HNS refuses.
    pub(crate) fn add(
        &mut self,
        hcn: &(impl Hcn + ?Sized),
        network: Guid,
        sets: &[&Set],
    ) -> Result<BTreeMap<String, Condition>, Error> {
        self.send(
            hcn,
            network,
            &RequestType::Add,
            sets.iter().map(|set| (*set, set.values.clone())).collect(),
        )
    }

    /// Gives sets that are there their members. What comes, comes to all of them before anything goes: a packet whose
    /// peer moves from one set to another is then, at any moment, in the sets that it has been in or in those that it
    /// will be in, or in both; so the first ACL that matches it is its first one before or after.
    pub(crate) fn change(
        &mut self,
        hcn: &(impl Hcn + ?Sized),
        network: Guid,
        sets: &[&Set],
    ) -> Result<BTreeMap<String, Condition>, Error> {
        let with = |set: &Set, values: &BTreeSet<String>| &set.values | values;
        let grown: Vec<_> = sets
            .iter()
            .filter_map(|set| Some((*set, with(set, self.0.get(&set.id)?))))
            .filter(|(set, values)| self.0.get(&set.id) != Some(values))
            .collect();
        let refused = self.send(hcn, network, &RequestType::Update, grown)?;
        if !refused.is_empty() {
            return Ok(refused);
        }
        let shrunk = sets.iter().filter(|set| self.differs(set));
        let shrunk: Vec<_> = shrunk.map(|set| (*set, set.values.clone())).collect();
        self.send(hcn, network, &RequestType::Update, shrunk)
    }

    /// Removes sets that nothing names. HNS keeps those that something does name; they are left for the next time.
    pub(crate) fn remove(
        &mut self,
        hcn: &(impl Hcn + ?Sized),
        network: Guid,
        ids: &BTreeSet<String>,
    ) -> Result<(), Error> {
        if ids.is_empty() {
            return Ok(());
        }
        for policy in hcn.network(network)?.policies {
            let Ok(Some(set)) = policy.settings::<SetPolicy>() else { continue };
            if !ids.contains(&set.id) {
                continue;
            }
            match hcn.modify_network(network, &Modify::policies(RequestType::Remove, vec![policy])) {
                Ok(()) => drop(self.0.remove(&set.id)),
                Err(error) if error.class() == Class::Unavailable => return Err(error.into()),
                Err(error) => warn!(set = set.id, %error, "a set that nobody needs any more stays for now"),
            }
        }
        Ok(())
    }

    /// Sends sets all at once, or one by one if HNS refuses that, and takes in what it took.
    fn send(
        &mut self,
        hcn: &(impl Hcn + ?Sized),
        network: Guid,
        request: &RequestType,
        sets: Vec<(&Set, BTreeSet<String>)>,
    ) -> Result<BTreeMap<String, Condition>, Error> {
        if sets.is_empty() {
            return Ok(BTreeMap::new());
        }
        debug!(sets = sets.len(), %request, "changing sets");
        let send = |sets: &[(&Set, BTreeSet<String>)]| {
            let documents = sets.iter().map(|(set, values)| document(set, values)).collect();
            match hcn.modify_network(network, &Modify::policies(request.clone(), documents)) {
                Ok(()) => Ok(None),
                Err(error) if matches!(error.class(), Class::NotFound | Class::Unavailable) => Err(error),
                Err(error) => Ok(Some(error)),
            }
        };
        let mut refused = BTreeMap::new();
        if sets.len() > 1 && send(&sets)?.is_none() {
            self.0.extend(sets.into_iter().map(|(set, values)| (set.id.clone(), values)));
            return Ok(refused);
        }
        for (set, values) in sets {
            match send(&[(set, values.clone())])? {
                None => drop(self.0.insert(set.id.clone(), values)),
                Some(error) => {
                    let message = format!(
                        "{request} of the set {} ({}): {error}; its addresses are spelled out in ACLs",
                        set.id, set.name
                    );
                    refused.insert(set.id.clone(), Condition { reason: "PolicySetRefused", message });
                }
            }
        }
        Ok(refused)
    }
}

fn values(list: &str) -> BTreeSet<String> {
    list.split(',').filter(|value| !value.is_empty()).map(str::to_owned).collect()
}

fn document(set: &Set, values: &BTreeSet<String>) -> Policy {
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    Policy::of(&SetPolicy {
        id: set.id.clone(),
        name: set.name.clone(),
        policy_type: SetPolicyType::IpSet,
        values: values.join(","),
        extra: Extra::new(),
    })
}

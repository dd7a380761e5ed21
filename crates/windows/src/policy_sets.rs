//! The sets of addresses that ACLs name: SetPolicy policies of the network (docs/hns.md, Sets).

use std::collections::{BTreeMap, BTreeSet};

use tortie_dataplane::{Condition, Reason};
use tortie_hcn::schema::{Extra, Modify, Policy, RequestType, SetPolicy, SetPolicyType};
use tortie_hcn::{Class, Guid, Hcn, HcnExt};
use tracing::{debug, warn};

use crate::Error;
use crate::acl::{OUR_SETS, Set, canonical_address};

const NOT_TAKEN: &str = "HNS accepted it, but it is not as it should be when read back";

/// Tortie's sets of a network in HNS.
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

    /// Whether a set with this identifier exists.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    /// The identifiers of the sets.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Whether the set exists with other members.
    pub(crate) fn differs(&self, set: &Set) -> bool {
        self.0.get(&set.id).is_some_and(|values| *values != set.values)
    }

    /// Creates missing sets: all at once, or one by one if HNS refuses that. Returns those that HNS refuses.
    pub(crate) fn add(
        &mut self,
        hcn: &(impl Hcn + ?Sized),
        network: Guid,
        sets: &[&Set],
    ) -> Result<BTreeMap<String, Condition>, Error> {
        if sets.is_empty() {
            return Ok(BTreeMap::new());
        }
        let request = RequestType::Add;
        let new: Vec<_> = sets.iter().map(|set| (*set, set.values.clone())).collect();
        let mut problems = BTreeMap::new();
        if send(hcn, network, &request, &new)?.is_some() {
            for one in new.chunks(1) {
                let error = send(hcn, network, &request, one)?;
                problems.extend(error.map(|error| refused(&request, one[0].0, &error.to_string())));
            }
        }
        // A success says little (docs/hns.md, Changes).
        *self = Self::read(hcn, network)?;
        for set in sets.iter().filter(|set| self.0.get(&set.id) != Some(&set.values)) {
            problems.entry(set.id.clone()).or_insert_with(|| refused(&request, set, NOT_TAKEN).1);
        }
        Ok(problems)
    }

    /// Changes the members of existing sets. New members are added to all sets before old ones are removed. So a
    /// packet whose peer moves from one set to another finds it in its old set, in its new set, or in both, and its
    /// first matching ACL is its first one before or after. All sets are in one request: if HNS refuses that, no set
    /// is changed separately, because ACLs name them together, and all of them are returned.
    pub(crate) fn change(
        &mut self,
        hcn: &(impl Hcn + ?Sized),
        network: Guid,
        sets: &[&Set],
    ) -> Result<BTreeMap<String, Condition>, Error> {
        for with_those_that_go in [true, false] {
            let wanted = |set: &Set| match self.0.get(&set.id) {
                Some(there) if with_those_that_go => &set.values | there,
                _ => set.values.clone(),
            };
            let changes = sets.iter().map(|set| (*set, wanted(set)));
            let changes: Vec<_> =
                changes.filter(|(set, values)| self.0.get(&set.id) != Some(values)).collect();
            if changes.is_empty() {
                continue;
            }
            let request = RequestType::Update;
            let problem = match send(hcn, network, &request, &changes)? {
                Some(error) => error.to_string(),
                None => {
                    // Old members are removed only after the new ones are confirmed.
                    *self = Self::read(hcn, network)?;
                    if changes.iter().all(|(set, values)| self.0.get(&set.id) == Some(values)) {
                        continue;
                    }
                    NOT_TAKEN.to_owned()
                }
            };
            return Ok(sets.iter().map(|set| refused(&request, set, &problem)).collect());
        }
        Ok(BTreeMap::new())
    }

    /// Removes unused sets. HNS keeps those that are in use; they are left for the next time.
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
                Err(error) => warn!(set = set.id, %error, "cannot remove an unused set; Tortie retries"),
            }
        }
        Ok(())
    }
}

/// Sends sets in one request. Returns the error of HNS.
fn send(
    hcn: &(impl Hcn + ?Sized),
    network: Guid,
    request: &RequestType,
    sets: &[(&Set, BTreeSet<String>)],
) -> Result<Option<tortie_hcn::Error>, Error> {
    debug!(sets = sets.len(), %request, "changing sets");
    let documents = sets.iter().map(|(set, values)| document(set, values)).collect();
    match hcn.modify_network(network, &Modify::policies(request.clone(), documents)) {
        Ok(()) => Ok(None),
        Err(error) if matches!(error.class(), Class::NotFound | Class::Unavailable) => Err(error.into()),
        Err(error) => Ok(Some(error)),
    }
}

fn refused(request: &RequestType, set: &Set, problem: &str) -> (String, Condition) {
    let (id, name) = (&set.id, &set.name);
    let message =
        format!("{request} of the set {id} ({name}): {problem}; its addresses are spelled out in ACLs");
    (id.clone(), Condition::new(Reason::PolicySetRefused, message))
}

/// The values in the form in which they are sent.
fn values(list: &str) -> BTreeSet<String> {
    let values = list.split(',').map(str::trim).filter(|value| !value.is_empty());
    values.map(canonical_address).collect()
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

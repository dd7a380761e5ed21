//! HNS endpoints of pods: which one, and which ACLs.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use tortie_dataplane::{Condition, Reason};
use tortie_hcn::schema::{Acl, AclAction, AclRuleType, Endpoint, Modify, Policy, Query, RequestType};
use tortie_hcn::{Guid, Hcn, HcnExt, Kind};
use tracing::{info, warn};

use crate::Error;
use crate::acl::{LAST_PRIORITY, List, Transition, anonymous, closed, has_our_mark, is_ours, transition};

/// The space of our endpoints' identifiers. It must never change: endpoints are found again by it.
const SPACE: Guid = Guid::from_bytes(*b"tortie-endpoint\0");

/// How long a list that HNS made another one of is not sent again, if nothing has changed.
const SEND_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// The identifier of the endpoint of a container's sandbox. It is derived, so that a later process finds the endpoint
/// although nothing was stored, also when the call that made it was cut off (docs/hns.md, Changes).
pub fn endpoint_id(container_id: &str) -> Guid {
    Guid::derived(SPACE, container_id)
}

/// The name of the endpoint, as the CNI plugins of Windows write it.
pub(crate) fn endpoint_name(container_id: &str, network: &str) -> String {
    format!("{container_id}_{network}")
}

/// The endpoint of a container: by its identifier, or by its name on that network, if another CNI plugin made it.
pub(crate) fn find(
    hcn: &(impl Hcn + ?Sized),
    container_id: &str,
    network: &str,
) -> Result<Option<Endpoint>, Error> {
    match hcn.endpoint(endpoint_id(container_id)) {
        Ok(endpoint) => return Ok(Some(endpoint)),
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    let name = endpoint_name(container_id, network);
    for id in hcn.enumerate(Kind::Endpoint, &Query::filter("Name", &name))? {
        match hcn.endpoint(id) {
            // The answer to a filter is not taken on trust: what is found here gets policy, and goes with the pod.
            Ok(endpoint) if !endpoint.name.eq_ignore_ascii_case(&name) => {}
            Ok(endpoint) => {
                let ours = hcn.network_by_name(network)?;
                if ours.is_some_and(|ours| ours.id == endpoint.host_compute_network) {
                    return Ok(Some(endpoint));
                }
                warn!(endpoint = endpoint.name, %id, "it has a pod's name, and is on another network: left alone");
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Makes our ACLs on the endpoint those that are desired. Sends nothing if they are; ACLs of others stay, and what they
/// may do to ours is told.
pub(crate) fn sync_acls(
    hcn: &(impl Hcn + ?Sized),
    endpoint: &Endpoint,
    list: &List,
    vain: &mut Option<Vain>,
    now: Instant,
) -> Result<Vec<Condition>, Error> {
    // Where a build drops the ids of ACLs, ours are known by what was sent, now and the last time.
    let mut sent = list.numbered(&[]);
    sent.extend(vain.iter().flat_map(|vain| vain.desired.clone()));
    let mut found = Found::on(endpoint, &sent);
    let desired = &list.numbered(if found.unclear == 0 { &found.ours } else { &[] });
    sent.extend_from_slice(desired);
    let not_taken =
        || Error::NotTaken { object: format!("endpoint {}", endpoint.name), what: "ACL policies" };
    if vain.as_ref().is_some_and(|vain| vain.is_again(desired, &found, now)) {
        return Err(not_taken());
    }
    *vain = None;
    // Where ours cannot be read, the difference is not known: then only the whole list helps.
    if found.unclear == 0 && !found.is(desired) {
        match change(hcn, endpoint, &transition(&found.ours, desired)) {
            Ok(()) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            // Nothing is lost: what was not taken is seen when it is read back.
            Err(error) => warn!(endpoint = endpoint.name, %error, "HNS refused the change of the ACLs"),
        }
        found = Found::on(&hcn.endpoint(endpoint.id)?, &sent);
    }
    if found.is(desired) {
        return Ok(found.conditions(endpoint));
    }
    // Removing single ACLs does not work on every build (docs/hns.md, Changes): put the whole list in the place of the
    // old one.
    warn!(endpoint = endpoint.name, "HNS did not take the change of the ACLs; sending the whole list");
    let policies = [found.others.clone(), documents(desired)].concat();
    hcn.modify_endpoint(endpoint.id, &Modify::policies(RequestType::Update, policies))?;
    found = Found::on(&hcn.endpoint(endpoint.id)?, &sent);
    if found.is(desired) {
        return Ok(found.conditions(endpoint));
    }
    *vain = Some(Vain { desired: desired.to_vec(), made: found.as_read, at: now });
    Err(not_taken())
}

/// An attempt in vain: HNS accepted a list and made another one of it. Sending it again would get the same answer, and
/// each time HNS may reset the endpoint's connections (policy decision 20).
pub(crate) struct Vain {
    desired: Vec<Acl>,
    /// Our ACLs as they were read back.
    made: Vec<Policy>,
    at: Instant,
}

impl Vain {
    fn is_again(&self, desired: &[Acl], found: &Found, now: Instant) -> bool {
        now < self.at + SEND_AGAIN_AFTER && self.desired == desired && self.made == found.as_read
    }
}

fn change(hcn: &(impl Hcn + ?Sized), endpoint: &Endpoint, step: &Transition) -> Result<(), Error> {
    info!(endpoint = endpoint.name, add = step.add.len(), remove = step.remove.len(), "changing ACLs");
    for (request, acls) in [(RequestType::Add, &step.add), (RequestType::Remove, &step.remove)] {
        if !acls.is_empty() {
            hcn.modify_endpoint(endpoint.id, &Modify::policies(request, documents(acls)))?;
        }
    }
    Ok(())
}

/// The policies of an endpoint, sorted out.
#[derive(Default)]
struct Found {
    /// Our ACLs as HNS shows them.
    as_read: Vec<Policy>,
    /// Our ACLs.
    ours: Vec<Acl>,
    /// How many ACLs bear our mark and cannot be read, so that nobody knows what they allow, or are what we sent without
    /// the id, so that nobody would find them again.
    unclear: usize,
    /// Everything else, as it may be sent back.
    others: Vec<Policy>,
}

impl Found {
    fn on(endpoint: &Endpoint, sent: &[Acl]) -> Found {
        let mut found = Found::default();
        let sent = LazyCell::new(|| sent.iter().map(anonymous).collect::<HashSet<_>>());
        for policy in &endpoint.policies {
            match policy.settings::<Acl>() {
                Ok(Some(acl)) if is_ours(&acl) => {
                    found.as_read.push(policy.clone());
                    found.ours.push(acl);
                }
                Ok(Some(acl)) if acl.id.is_empty() && sent.contains(&anonymous(&acl)) => {
                    warn!(endpoint = endpoint.name, ?acl, "HNS dropped the id of one of our ACLs");
                    found.as_read.push(policy.clone());
                    found.unclear += 1;
                }
                // Written out: HNS leaves zero values, such as Allow, out of what it answers.
                Ok(Some(theirs)) => found.others.push(Policy::of(&theirs)),
                Ok(None) => found.others.push(policy.clone()),
                Err(error) if has_our_mark(policy) => {
                    warn!(endpoint = endpoint.name, %error, "one of our ACLs cannot be read back");
                    found.as_read.push(policy.clone());
                    found.unclear += 1;
                }
                Err(error) => {
                    warn!(endpoint = endpoint.name, %error, "an ACL of somebody else cannot be read; it stays");
                    found.others.push(policy.clone());
                }
            }
        }
        found
    }

    /// ACLs of others that have a say before the end of ours: what they decide, policy does not (policy decision 28).
    fn conditions(&self, endpoint: &Endpoint) -> Vec<Condition> {
        let foreign = |policy: &Policy| {
            let what = match policy.settings::<Acl>() {
                Ok(Some(acl)) if !overrides_policy(&acl) => return None,
                Ok(Some(acl)) => {
                    let Acl { id, action, direction, rule_type, priority, .. } = acl;
                    format!(
                        "the ACL {id:?} ({action}, {direction}, {rule_type}, priority {priority}) is not ours and may come first"
                    )
                }
                Ok(None) => return None,
                Err(error) => format!("an ACL that is not ours cannot be read, and may come first: {error}"),
            };
            let message = format!("HNS endpoint {}: {what}; it stays, and overrides policy", endpoint.name);
            Some(Condition::new(Reason::ForeignAcl, message))
        };
        self.others.iter().filter_map(foreign).collect()
    }

    fn is(&self, desired: &[Acl]) -> bool {
        self.unclear == 0 && transition(&self.ours, desired).is_empty()
    }
}

/// Whether an ACL of somebody else may decide what our ACLs are to decide.
fn overrides_policy(acl: &Acl) -> bool {
    match acl.rule_type {
        // A packet has to pass the node's firewall, too (docs/hns.md, ACLs). Rules there have no order; ours allow
        // everything, so that one that allows adds nothing.
        AclRuleType::Host => acl.action != AclAction::Allow,
        AclRuleType::Switch => acl.priority <= LAST_PRIORITY,
        AclRuleType::Unknown(_) => true,
    }
}

/// Our ACLs on the endpoint, as far as they can be told.
pub(crate) fn ours(endpoint: &Endpoint) -> Vec<Acl> {
    let acls = endpoint.policies.iter().filter_map(|policy| policy.settings::<Acl>().ok().flatten());
    acls.filter(is_ours).collect()
}

/// Adds what closes an endpoint behind its policy, if that is missing.
pub(crate) fn ensure_closed(hcn: &(impl Hcn + ?Sized), endpoint: &Endpoint) -> Result<(), Error> {
    let missing = transition(&Found::on(endpoint, &[]).ours, &closed()).add;
    if !missing.is_empty() {
        let request = Modify::policies(RequestType::Add, documents(&missing));
        hcn.modify_endpoint(endpoint.id, &request)?;
    }
    Ok(())
}

pub(crate) fn documents(acls: &[Acl]) -> Vec<Policy> {
    acls.iter().map(Policy::of).collect()
}

//! HNS endpoints of pods and their ACLs.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use tortie_dataplane::{Condition, Reason};
use tortie_hcn::schema::{Acl, AclAction, AclRuleType, Endpoint, Modify, Policy, Query, RequestType};
use tortie_hcn::{Class, Guid, Hcn, HcnExt, Kind};
use tracing::{info, warn};

use crate::Error;
use crate::acl::{LAST_PRIORITY, List, Transition, anonymous, closed, has_our_mark, is_ours, transition};

/// The GUID namespace of Tortie's endpoint identifiers. It must never change, because endpoints are found by it.
const SPACE: Guid = Guid::from_bytes(*b"tortie-endpoint\0");

/// How long a list that HNS changed is not sent again, if nothing else has changed.
pub(crate) const SEND_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// The number of ACLs in a part of a request that HNS refused as a whole. azure-npm sends at most so many (`npm/config`).
const BATCH: usize = 30;

/// The identifier of the endpoint of a container's sandbox. It is derived from the container's id, so that a later
/// process finds the endpoint without stored state, even if the call that created it was cut off (docs/hns.md,
/// Changes).
pub fn endpoint_id(container_id: &str) -> Guid {
    Guid::derived(SPACE, container_id)
}

/// The name of the endpoint, as in the Windows CNI plugins.
pub(crate) fn endpoint_name(container_id: &str, network: &str) -> String {
    format!("{container_id}_{network}")
}

/// The endpoint of a container: by its identifier, or by its name on that network if another CNI plugin created it.
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
            // The answer to a filter is not trusted: the endpoint found here gets policy, and is deleted with the
            // pod.
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

/// Makes Tortie's ACLs on the endpoint match the desired ones. Sends nothing if they do. ACLs of others stay, and
/// their possible effect is reported.
pub(crate) fn sync_acls(
    hcn: &(impl Hcn + ?Sized),
    endpoint: &Endpoint,
    list: &List,
    last_rejected: &mut Option<RejectedList>,
    now: Instant,
) -> Result<Vec<Condition>, Error> {
    // If a build drops the ids of ACLs, Tortie's are identified by what was sent, now and the last time.
    let mut sent = list.numbered(&[]);
    sent.extend(last_rejected.iter().flat_map(|last_rejected| last_rejected.desired.clone()));
    let mut found = OwnedPolicies::on(endpoint, &sent);
    let desired = &list.numbered(if found.unclear == 0 { &found.ours } else { &[] });
    sent.extend_from_slice(desired);
    let not_taken =
        || Error::NotTaken { object: format!("endpoint {}", endpoint.name), what: "ACL policies" };
    if last_rejected.as_ref().is_some_and(|last_rejected| last_rejected.is_again(desired, &found, now)) {
        return Err(not_taken());
    }
    *last_rejected = None;
    // If Tortie's ACLs cannot be read, the difference is unknown, and only the whole list helps.
    if found.unclear == 0 && !found.is(desired) {
        match change(hcn, endpoint, &transition(&found.ours, desired)) {
            Ok(()) => {}
            Err(error) if error.is_unavailable() => return Err(error),
            // Nothing is lost: reading back shows what was not applied.
            Err(error) => warn!(endpoint = endpoint.name, %error, "HNS refused the change of the ACLs"),
        }
        found = OwnedPolicies::on(&hcn.endpoint(endpoint.id)?, &sent);
    }
    if found.is(desired) {
        return Ok(found.conditions(endpoint));
    }
    // Removing single ACLs does not work on every build (docs/hns.md, Changes), so replace the whole list.
    warn!(endpoint = endpoint.name, "HNS did not take the change of the ACLs; sending the whole list");
    let policies = [found.others.clone(), documents(desired)].concat();
    hcn.modify_endpoint(endpoint.id, &Modify::policies(RequestType::Update, policies))?;
    found = OwnedPolicies::on(&hcn.endpoint(endpoint.id)?, &sent);
    if found.is(desired) {
        return Ok(found.conditions(endpoint));
    }
    *last_rejected = Some(RejectedList { desired: desired.to_vec(), made: found.as_read, at: now });
    Err(not_taken())
}

/// A rejected attempt: HNS accepted a list and changed it. Sending it again would have the same result, and each time
/// HNS may reset the endpoint's connections (policy decision 20).
pub(crate) struct RejectedList {
    desired: Vec<Acl>,
    /// Tortie's ACLs as they were read back.
    made: Vec<Policy>,
    at: Instant,
}

impl RejectedList {
    fn is_again(&self, desired: &[Acl], found: &OwnedPolicies, now: Instant) -> bool {
        now < self.at + SEND_AGAIN_AFTER && self.desired == desired && self.made == found.as_read
    }
}

fn change(hcn: &(impl Hcn + ?Sized), endpoint: &Endpoint, step: &Transition) -> Result<(), Error> {
    info!(endpoint = endpoint.name, add = step.add.len(), remove = step.remove.len(), "changing ACLs");
    for (request, acls) in [(RequestType::Add, &step.add), (RequestType::Remove, &step.remove)] {
        if acls.is_empty() {
            continue;
        }
        match hcn.modify_endpoint(endpoint.id, &Modify::policies(request.clone(), documents(acls))) {
            Err(error) if acls.len() > BATCH && error.class() != Class::Unavailable => {
                warn!(endpoint = endpoint.name, %error, acls = acls.len(), "HNS refused a long request; sending parts");
                change_in_parts(hcn, endpoint, &request, acls)?;
            }
            result => result?,
        }
    }
    Ok(())
}

/// Sends a request in parts, in an order in which nothing passes in between that does not pass with all of the old and the
/// new ACLs, or with the new ones alone: what blocks comes first, and goes last.
fn change_in_parts(
    hcn: &(impl Hcn + ?Sized),
    endpoint: &Endpoint,
    request: &RequestType,
    acls: &[Acl],
) -> Result<(), Error> {
    let (allow, block): (Vec<&Acl>, Vec<&Acl>) = acls.iter().partition(|acl| acl.action == AclAction::Allow);
    let in_order = if *request == RequestType::Add { [block, allow] } else { [allow, block] };
    for part in in_order.iter().flat_map(|acls| acls.chunks(BATCH)) {
        let policies = part.iter().map(|acl| Policy::of(*acl)).collect();
        hcn.modify_endpoint(endpoint.id, &Modify::policies(request.clone(), policies))?;
    }
    Ok(())
}

/// The policies of an endpoint by owner.
#[derive(Default)]
struct OwnedPolicies {
    /// Tortie's ACLs as HNS shows them.
    as_read: Vec<Policy>,
    /// Tortie's ACLs.
    ours: Vec<Acl>,
    /// The number of ACLs that have Tortie's mark and cannot be parsed, so that their effect is unknown, or that
    /// equal sent ones without their id, so that they could not be found again.
    unclear: usize,
    /// Everything else, in a form that can be sent back.
    others: Vec<Policy>,
    /// What the ACLs of others are that may decide what Tortie's should decide.
    overriding: Vec<String>,
}

impl OwnedPolicies {
    fn on(endpoint: &Endpoint, sent: &[Acl]) -> OwnedPolicies {
        let mut found = OwnedPolicies::default();
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
                // Serialised in full, because HNS omits zero values, such as Allow, in its answers.
                Ok(Some(theirs)) => {
                    found.overriding.extend(overriding(&theirs, names_rule_type(policy)));
                    found.others.push(Policy::of(&theirs));
                }
                Ok(None) => found.others.push(policy.clone()),
                Err(error) if has_our_mark(policy) => {
                    warn!(endpoint = endpoint.name, %error, "one of our ACLs cannot be read back");
                    found.as_read.push(policy.clone());
                    found.unclear += 1;
                }
                Err(error) => {
                    warn!(endpoint = endpoint.name, %error, "cannot parse a foreign ACL; Tortie leaves it alone");
                    found
                        .overriding
                        .push(format!("an ACL that is not ours cannot be read, and may come first: {error}"));
                    found.others.push(policy.clone());
                }
            }
        }
        found
    }

    /// The ACLs of others that are evaluated before the end of Tortie's: they override policy (policy decision 28).
    fn conditions(&self, endpoint: &Endpoint) -> Vec<Condition> {
        let condition = |what: &String| {
            let message = format!("HNS endpoint {}: {what}; it stays, and overrides policy", endpoint.name);
            Condition::new(Reason::ForeignAcl, message)
        };
        self.overriding.iter().map(condition).collect()
    }

    fn is(&self, desired: &[Acl]) -> bool {
        self.unclear == 0 && transition(&self.ours, desired).is_empty()
    }
}

/// Whether a document says where its ACL applies.
fn names_rule_type(policy: &Policy) -> bool {
    policy.settings.get("RuleType").is_some()
}

/// Describes a foreign ACL that may decide what Tortie's ACLs should decide.
fn overriding(acl: &Acl, names_rule_type: bool) -> Option<String> {
    let Acl { id, action, direction, rule_type, priority, .. } = acl;
    // A packet must pass the node's firewall, too (docs/hns.md, ACLs). Rules there have no order, and Tortie's allow
    // everything, so a rule that allows has no effect.
    let at_host = *action != AclAction::Allow;
    let at_switch = *priority <= LAST_PRIORITY;
    let (overrides, place) = match rule_type {
        // azure-npm's and Calico's ACLs for the switch have a priority, those for the firewall have none. HNS may apply an
        // ACL without a type at both places, or leave out the type Host in its answer.
        AclRuleType::Host if !names_rule_type && *priority > 0 => {
            (at_host || at_switch, "without RuleType".to_owned())
        }
        AclRuleType::Host => (at_host, rule_type.to_string()),
        AclRuleType::Switch => (at_switch, rule_type.to_string()),
        AclRuleType::Unknown(_) => (true, rule_type.to_string()),
    };
    overrides.then(|| {
        format!("the ACL {id:?} ({action}, {direction}, {place}, priority {priority}) is not ours and may come first")
    })
}

/// Tortie's ACLs on the endpoint, as far as they can be identified.
pub(crate) fn ours(endpoint: &Endpoint) -> Vec<Acl> {
    let acls = endpoint.policies.iter().filter_map(|policy| policy.settings::<Acl>().ok().flatten());
    acls.filter(is_ours).collect()
}

/// Whether the endpoint has an ACL of Tortie. Each one has, from its creation on.
pub(crate) fn has_acls(endpoint: &Endpoint) -> bool {
    let found = OwnedPolicies::on(endpoint, &closed());
    !found.ours.is_empty() || found.unclear > 0
}

/// Adds the closing ACLs of an endpoint, if they are missing.
pub(crate) fn ensure_closed(hcn: &(impl Hcn + ?Sized), endpoint: &Endpoint) -> Result<(), Error> {
    let missing = transition(&OwnedPolicies::on(endpoint, &[]).ours, &closed()).add;
    if !missing.is_empty() {
        let request = Modify::policies(RequestType::Add, documents(&missing));
        hcn.modify_endpoint(endpoint.id, &request)?;
    }
    Ok(())
}

/// Makes the closing ACLs the only ones of Tortie on the endpoint. Returns whether that was a change.
pub(crate) fn close(hcn: &(impl Hcn + ?Sized), endpoint: &Endpoint) -> Result<bool, Error> {
    let closed = closed();
    let found = OwnedPolicies::on(endpoint, &closed);
    if found.is(&closed) {
        return Ok(false);
    }
    if found.unclear == 0 {
        match change(hcn, endpoint, &transition(&found.ours, &closed)) {
            Err(error) if error.is_unavailable() => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    let after = OwnedPolicies::on(&hcn.endpoint(endpoint.id)?, &closed);
    if after.is(&closed) {
        return Ok(true);
    }
    // Removing single ACLs does not work on every build (docs/hns.md, Changes), so replace the whole list.
    let policies = [after.others, documents(&closed)].concat();
    hcn.modify_endpoint(endpoint.id, &Modify::policies(RequestType::Update, policies))?;
    if OwnedPolicies::on(&hcn.endpoint(endpoint.id)?, &closed).is(&closed) {
        return Ok(true);
    }
    Err(Error::NotTaken { object: format!("endpoint {}", endpoint.name), what: "the ACLs that close it" })
}

pub(crate) fn documents(acls: &[Acl]) -> Vec<Policy> {
    acls.iter().map(Policy::of).collect()
}

//! The ACLs that HNS has for a pod, in their order of evaluation.

use std::collections::{BTreeMap, HashSet};

use tortie_api::net::Direction;
use tortie_dataplane::{Endpoint, Shown, ShownList, ShownPart, ShownRule};
use tortie_hcn::schema::{Acl, AclDirection, AclRuleType, Endpoint as HcnEndpoint};
use tortie_policy::program::{PolicyId, SetId};

use crate::acl::{
    ANY_PROTOCOL, CLOSED, List, NO_PROFILE, SERVICE, comes_from, end_of_tier, is_before_policy, transition,
};
use crate::endpoint::ours;

/// What HNS has; `given` is the last list, with descriptions of the sets that it names.
pub(crate) fn shown(
    endpoint: &Endpoint,
    found: &HcnEndpoint,
    given: Option<(&List, BTreeMap<String, String>)>,
) -> Shown {
    let mut shown =
        Shown { read_from: format!("HNS endpoint {} ({})", found.name, found.id), ..Shown::default() };
    let mut acls = Vec::new();
    for policy in &found.policies {
        match policy.settings::<Acl>() {
            Ok(Some(acl)) => acls.push(acl),
            Ok(None) => {}
            Err(error) => shown.remarks.push(format!("an ACL cannot be read: {error}")),
        }
    }
    let mut differing = HashSet::new();
    match given {
        Some((list, sets)) => {
            let desired = list.numbered(&ours(found));
            let step = transition(&acls, &desired);
            if !step.add.is_empty() {
                let (missing, all) = (step.add.len(), desired.len());
                shown
                    .remarks
                    .push(format!("HNS lacks {missing} of the {all} ACLs that the policies require"));
            }
            differing.extend(step.remove);
            shown.sets = sets.into_iter().map(|(id, name)| (id, SetId::new(name))).collect();
        }
        None => shown.remarks.push(
            "HNS has not been given the ACLs of the pod's policies yet: nothing was compared with them"
                .to_owned(),
        ),
    }
    acls.sort_by_key(|acl| acl.priority);
    let policies: Vec<&PolicyId> = endpoint.program.policy_ids().collect();
    let tiers = endpoint.program.ingress.iter().chain(&endpoint.program.egress);
    let mut ends: Vec<String> = tiers.map(|tier| end_of_tier(&tier.name)).collect();
    ends.extend([NO_PROFILE, CLOSED, SERVICE].map(str::to_owned));
    for (direction, name) in [(Direction::Ingress, "In"), (Direction::Egress, "Out")] {
        for before in [true, false] {
            let of_list = |acl: &&Acl| direction_of(acl) == direction && is_before_policy(acl) == before;
            let rules = acls.iter().filter(of_list);
            let rules = rules.map(|acl| rule(acl, &policies, &ends, differing.contains(acl)));
            let part = if before { ShownPart::BeforePolicy } else { ShownPart::Program };
            let words = match (before, direction) {
                (true, Direction::Ingress) => "the node itself reaches its pods",
                (true, Direction::Egress) => "the node's own firewall leaves the decision to the switch",
                (false, _) => "",
            };
            let (name, words) = (format!("ACLs {name}"), words.to_owned());
            let list = ShownList { name, direction, part, words, rules: rules.collect() };
            shown.lists.push(list);
        }
    }
    shown.lists.retain(|list| !list.rules.is_empty());
    shown
}

fn direction_of(acl: &Acl) -> Direction {
    if acl.direction == AclDirection::Out { Direction::Egress } else { Direction::Ingress }
}

fn rule(acl: &Acl, policies: &[&PolicyId], ends: &[String], differs: bool) -> ShownRule {
    let policy = policies.iter().find(|id| comes_from(acl, &id.to_string()));
    ShownRule {
        text: text(acl),
        comment: ends.iter().find(|end| comes_from(acl, end)).unwrap_or(&acl.id).clone(),
        policy: policy.map(|id| (*id).clone()),
        differs,
        ..ShownRule::default()
    }
}

/// The ACL in one line: `1000 Allow In, protocol 6, local ports 80, remote 10.0.0.1,10.0.0.2`.
fn text(acl: &Acl) -> String {
    let priority = match acl.rule_type {
        AclRuleType::Switch => acl.priority.to_string(),
        _ => "Host".to_owned(),
    };
    let any = ["", &ANY_PROTOCOL.to_string()].contains(&acl.protocols.as_str());
    let mut words = vec![format!("{priority} {} {}", acl.action, acl.direction)];
    words.extend((!any).then(|| format!("protocol {}", acl.protocols)));
    for (what, list) in [
        ("local", &acl.local_addresses),
        ("local ports", &acl.local_ports),
        ("remote", &acl.remote_addresses),
        ("remote ports", &acl.remote_ports),
    ] {
        words.extend((!list.is_empty()).then(|| format!("{what} {list}")));
    }
    words.join(", ")
}

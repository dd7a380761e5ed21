//! Costs as JSON.

use serde_json::{Value, json};
use tortie_windows::{Saving, Tally};

use super::{CostReport, PodCost, PolicyTotal, RuleTotal, direction_name};

pub(super) fn of(found: &CostReport) -> Value {
    let total = &found.total;
    let mut naive = tally(&total.naive);
    naive["atLeast"] = json!(total.cut);
    naive["rulesLeftOut"] = json!(total.left_out);
    let mut sets = tally(&total.sets);
    sets["sets"] = json!(total.set_count);
    sets["members"] = json!(total.members);
    json!({
        "windowsNodes": found.windows,
        "asIfOnWindows": found.windows == 0,
        "total": {"pods": found.pods.len(), "withoutSets": tally(&total.lists), "withSets": sets, "naive": naive},
        "pods": found.pods.iter().map(pod).collect::<Vec<_>>(),
        "policies": found.policies.iter().map(policy).collect::<Vec<_>>(),
        "podsWhoseRulesWereLookedAt": found.looked_at.0,
        "rules": found.rules.iter().map(rule).collect::<Vec<_>>(),
    })
}

fn pod(pod: &PodCost) -> Value {
    let cost = &pod.cost;
    let mut sets = tally(&cost.sets);
    sets["sets"] = json!(cost.members.len());
    sets["members"] = json!(cost.members.values().sum::<usize>());
    let mut naive = tally(&cost.naive);
    naive["atLeast"] = json!(cost.cut);
    naive["rulesLeftOut"] = json!(cost.left_out);
    let conditions = cost.conditions.iter();
    json!({
        "pod": format!("{}/{}", pod.id.namespace, pod.id.pod), "interface": pod.id.interface, "node": pod.node,
        "withoutSets": tally(&cost.lists), "withSets": sets, "naive": naive,
        "conditions": conditions.map(|condition| json!({"reason": condition.reason, "about": condition.about, "message": condition.message})).collect::<Vec<_>>(),
    })
}

fn policy(total: &PolicyTotal) -> Value {
    json!({
        "policy": total.policy.to_string(), "pods": total.pods,
        "withoutSets": tally(&total.lists), "withSets": tally(&total.sets), "naive": tally(&total.naive),
    })
}

fn rule(rule: &RuleTotal) -> Value {
    let location = rule.location.trim().trim_matches(['(', ')']);
    json!({
        "policy": rule.policy.to_string(), "direction": direction_name(rule.direction), "rule": rule.number,
        "place": (!location.is_empty()).then_some(location),
        "saves": {"withoutSets": saving(rule.lists), "withSets": saving(rule.sets)},
        "because": rule.because.to_string(),
    })
}

fn saving(saving: Saving) -> Value {
    json!({"acls": saving.acls, "addresses": saving.addresses})
}

fn tally(tally: &Tally) -> Value {
    let Tally { acls, addresses, ports, names, pairs } = tally;
    json!({"acls": acls, "addresses": addresses, "ports": ports, "setNames": names, "pairs": pairs})
}

//! Objects, and whether the manifest reader accepts each.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;
use tortie_api::{Kind, manifest};

use super::Tally;

/// Kinds that Tortie does not store yet.
pub(super) const NOT_KEPT: [&str; 2] = ["IPAMConfiguration", "IPReservation"];

/// Returns the number of objects that one side accepts and the other rejects.
pub(super) fn replay(file: &str, lines: &[Value]) -> Result<usize> {
    let begun = Instant::now();
    let mut tally = Tally::default();
    for (number, line) in lines.iter().enumerate() {
        let (object, accepted) = (&line["object"], &line["accepted"]);
        let kind = object["kind"].as_str().with_context(|| format!("{file}:{}: no kind", number + 1))?;
        let accepted = accepted.as_bool().with_context(|| format!("{file}:{}", number + 1))?;
        if NOT_KEPT.contains(&kind) {
            tally.leave_out("of kinds that are not kept yet", 1);
            continue;
        }
        tally.cases += 1;
        let problem = match manifest::read("object", &object.to_string()) {
            Ok(_) if !accepted => {
                if let Some(exception) = looser(line) {
                    tally.except(exception);
                    continue;
                }
                format!("accepted, but {}", line["reason"])
            }
            Err(problems) if accepted => {
                let unsupported = problems.iter().all(|found| is_unsupported(&found.problem));
                if unsupported && kind == Kind::IpPool.name() {
                    tally.leave_out("of valid pools that Tortie does not support yet", 1);
                    continue;
                }
                let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
                if let Some(exception) = stricter(kind, &problems) {
                    tally.except(exception);
                    continue;
                }
                format!("rejected: {}", problems.join("; "))
            }
            _ => continue,
        };
        tally.differences.push(format!("{}: {problem}: {object}", number + 1));
    }
    tally.close(file, &"the manifest reader", begun)
}

/// Why Tortie rejects what Calico accepts, if that is intended.
fn stricter(kind: &str, problems: &[String]) -> Option<&'static str> {
    if kind == Kind::StagedKubernetesNetworkPolicy.name() {
        return Some(
            "Calico does not look into staged Kubernetes policies: what it accepts could never be enforced",
        );
    }
    if problems.iter().all(|problem| problem.contains("\"-") && problem.contains("is not a time")) {
        return Some("Calico accepts times below zero");
    }
    let is_out_of_range = |problem: &String| {
        ["vxlanVNI", "vxlanPort"].iter().any(|field| problem.contains(field))
            && problem.contains("is not a whole number from 1")
    };
    if problems.iter().all(is_out_of_range) {
        return Some("Calico accepts identifiers and ports that no VXLAN packet can have");
    }
    let is_impossible_mtu =
        |problem: &String| problem.contains("MTU") && problem.contains("is not 0 or a whole number from");
    if problems.iter().all(is_impossible_mtu) {
        return Some("Calico accepts MTUs that no link can have");
    }
    let ignored =
        |problem: &String| problem.contains("is no network") || problem.contains("missing field `name`");
    problems
        .iter()
        .all(ignored)
        .then_some("Calico ignores empty and broken networks, and Services without a name")
}

/// Why Tortie accepts what Calico rejects, if that is intended.
fn looser(line: &Value) -> Option<&'static str> {
    let reason = line["reason"].as_str()?;
    if let Some(field) = reason.strip_suffix(": unknown field")
        && line["object"].to_string().contains(&format!("\"{field}\":null"))
    {
        return Some("a field that is null is absent, whatever its name");
    }
    if reason == "not allowed here" && line["object"]["spec"]["localWorkloadSelector"] == "" {
        return Some("an empty selector of a BGPPeer is absent");
    }
    None
}

/// Whether a pool is rejected because Tortie does not support it, rather than because it is invalid.
fn is_unsupported(problem: &str) -> bool {
    problem.contains("not supported")
}

//! Problems as a SARIF 2.1.0 log, which code hosts show beside the lines
//! (<https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>).

use serde_json::{Value, json};
use tortie_api::manifest::Problem;

use super::{Report, Rule};

/// The log: one run of one tool.
pub(super) fn log(report: &Report) -> Value {
    let rules: Vec<Value> = Rule::ALL.iter().map(|rule| of_rule(*rule)).collect();
    let results: Vec<Value> =
        report.problems.iter().map(|(rule, problem)| of_problem(*rule, problem)).collect();
    let driver = json!({"name": "tortie validate", "version": env!("CARGO_PKG_VERSION"), "rules": rules});
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    })
}

fn of_rule(rule: Rule) -> Value {
    json!({
        "id": rule.name(),
        "shortDescription": {"text": rule.description()},
        "defaultConfiguration": {"level": rule.level()},
    })
}

fn of_problem(rule: Rule, problem: &Problem) -> Value {
    let Problem { origin, object, field, problem } = problem;
    let parts = [object, field, problem].into_iter().filter(|part| !part.is_empty());
    let text = parts.map(String::as_str).collect::<Vec<_>>().join(": ");
    // Lines begin with 1; a problem of the file as a whole has none.
    let region = (origin.line > 0).then(|| json!({"startLine": origin.line}));
    let mut place = json!({"artifactLocation": {"uri": uri(&origin.file)}});
    if let Some(region) = region {
        place["region"] = region;
    }
    json!({
        "ruleId": rule.name(),
        "level": rule.level(),
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    })
}

/// A file's name as a relative reference: other characters than those of RFC 3986 are escaped.
fn uri(file: &str) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(byte);
    let escape = |byte: u8| match is_plain(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    file.trim_start_matches("./").bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_references() {
        for (file, expected) in
            [("./a/b.yaml", "a/b.yaml"), ("a b:c.yaml", "a%20b%3Ac.yaml"), ("é", "%C3%A9")]
        {
            assert_eq!(uri(file), expected);
        }
    }
}

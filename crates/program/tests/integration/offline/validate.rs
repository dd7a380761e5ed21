//! `tortie validate`: what is wrong in manifests, without a cluster.

use serde_json::Value;

use crate::offline::support::{CLUSTER, tortie};

const BAD: &str = "apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: a}
spec:
  selector: a == 'b
---
apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: p}
spec: {cidr: 10.0.0.0/16, ipipMode: Always, vxlanMode: Always}
---
apiVersion: projectcalico.org/v3
kind: FelixConfiguration
metadata: {name: default}
spec: {wireguardEnabled: true}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: team.x, namespace: 'n'}
spec: {tier: team, selector: all()}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: team.x, namespace: 'n'}
spec: {tier: team, selector: all()}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
---
apiVersion: crd.projectcalico.org/v1
kind: BGPPeer
metadata: {name: r}
spec: {peerIP: 192.0.2.9, asNumber: 64512, reachableBy: 192.0.2.1}
";

fn run(files: &[(&str, &str)], more: &[&str]) -> (i32, String, String) {
    let named = files.iter().flat_map(|(name, _)| ["-f", *name]);
    let arguments: Vec<&str> = ["validate"].into_iter().chain(named).chain(more.iter().copied()).collect();
    tortie(files, &arguments)
}

#[test]
fn problems_are_named_with_line_and_rule() {
    let (code, out, _) = run(&[("c.yml", CLUSTER)], &[]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains(" in 1 file: 0 errors, 0 warnings\n"), "{out}");

    let policy = |name: &str| {
        format!(
            "---\napiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: 'n'}}\nspec: {{selector: all()}}\n"
        )
    };
    let both = [policy("x"), policy("default.x")].concat();
    let (code, out, _) = run(&[("d.yml", &both)], &[]);
    assert!(
        code == 1 && out.contains("d.yml:9: error[duplicate]: NetworkPolicy n/default.x: metadata.name"),
        "{out}"
    );
    let (code, out, _) = run(&[("e.yml", "# nothing\n")], &[]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert_eq!(run(&[("e.yml", "# nothing\n")], &["--skip-empty"]).0, 0);

    let (code, out, _) = run(&[("b.yml", BAD)], &[]);
    assert_eq!(code, 1, "{out}");
    for expected in [
        "b.yml:5: error[invalid]: GlobalNetworkPolicy a: spec.selector: ",
        "b.yml:10: error[invalid]: IPPool p: spec.ipipMode",
        "b.yml:15: error[unsupported]: FelixConfiguration default: spec.wireguardEnabled",
        "b.yml:34: warning[without-effect]: BGPPeer r: spec.reachableBy",
        "b.yml:20: warning[unknown-tier]: NetworkPolicy n/team.x: spec.tier: tier team is not in the manifests",
        "b.yml:22: error[duplicate]: NetworkPolicy n/team.x: the object was given before, at b.yml:17",
        "not checked, because Tortie does not use them: 1 ConfigMap",
        "in 1 file: 4 errors, 2 warnings",
    ] {
        assert!(out.contains(expected), "{expected}\n{out}");
    }
}

/// The finding of an operator whose policy kubectl had stored: Calico's agents enforce it.
#[test]
fn words_in_lower_case_are_warnings_in_the_group_of_calicos_definitions() {
    let policy = "apiVersion: crd.projectcalico.org/v1\nkind: NetworkPolicy\nmetadata: {name: default-deny, namespace: shop}\n\
                  spec:\n  selector: all()\n  types: [ingress]\n  ingress:\n  - action: deny\n";
    let (code, out, _) = run(&[("p.yml", policy)], &[]);
    assert_eq!(code, 0, "{out}");
    for expected in [
        "p.yml:6: warning[spelling]: NetworkPolicy shop/default-deny: spec.types[0]: \"ingress\" must be written Ingress",
        "p.yml:8: warning[spelling]: NetworkPolicy shop/default-deny: spec.ingress[0].action: \"deny\" must be written Deny",
    ] {
        assert!(out.contains(expected), "{expected}\n{out}");
    }
    let pods = ["web", "other"].map(|name| {
        format!("---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{containers: [{{name: c}}]}}\n")
    });
    let files = [("p.yml", policy), ("a.yml", &pods[0]), ("b.yml", &pods[1])];
    let named = ["-f", "p.yml", "-f", "a.yml", "-f", "b.yml"];
    let (code, out, err) =
        tortie(&files, &[&["explain"][..], &named, &["shop/other", "shop/web", "--port", "80"]].concat());
    assert!(code == 1 && out.contains(": denied"), "{out}{err}");
    let (_, out, err) = tortie(&files, &[&["policy", "lint"][..], &named].concat());
    assert!(out.contains("[spelling]") || out.contains("spelling"), "{out}{err}");
    let api = policy.replace("crd.projectcalico.org/v1", "projectcalico.org/v3");
    assert_eq!(run(&[("p.yml", &api)], &[]).0, 1);
}

#[test]
fn text_that_is_no_manifest_is_an_error_and_a_missing_file_is_no_answer() {
    let (code, out, _) = run(&[("b.yml", "a: [\n")], &[]);
    assert_eq!((code, out.contains("b.yml:") && out.contains("error[invalid]")), (1, true), "{out}");
    for arguments in [&["validate", "-f", "absent.yml"][..], &["validate"], &["validate", "-k", "x"]] {
        let (code, out, err) = tortie(&[], arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?} {err}");
    }
}

#[test]
fn ci_systems_get_their_formats() {
    let files = [("b.yml", BAD), ("c.yml", CLUSTER)];
    let (code, out, _) = run(&files, &["-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 1);
    let problems = document["problems"].as_array().unwrap();
    let rules: Vec<&str> = problems.iter().map(|one| one["rule"].as_str().unwrap()).collect();
    assert_eq!(
        rules,
        ["invalid", "invalid", "unsupported", "unknown-tier", "duplicate", "without-effect"],
        "{out}"
    );
    assert_eq!((&document["skipped"]["ConfigMap"], &problems[0]["line"]), (&1.into(), &5.into()));

    let (_, out, _) = run(&files, &["-o", "junit"]);
    assert!(out.contains("  <testsuite name=\"b.yml\" tests=\"4\" failures=\"4\">"), "{out}");
    assert!(out.contains("  <testsuite name=\"c.yml\" tests=\"1\" failures=\"0\">"), "{out}");
    assert!(out.contains("<failure message=\"spec.selector: "), "{out}");

    let (_, out, _) = run(&files, &["-o", "sarif"]);
    let log: Value = serde_json::from_str(&out).unwrap();
    let run = &log["runs"][0];
    let results = run["results"].as_array().unwrap();
    assert_eq!((&log["version"], results.len()), (&"2.1.0".into(), 6));
    let place = &results[0]["locations"][0]["physicalLocation"];
    assert_eq!(place["artifactLocation"]["uri"], "b.yml");
    assert_eq!((&place["region"]["startLine"], &results[0]["level"]), (&5.into(), &"error".into()));
    let known: Vec<&Value> =
        run["tool"]["driver"]["rules"].as_array().unwrap().iter().map(|rule| &rule["id"]).collect();
    assert!(results.iter().all(|result| known.contains(&&result["ruleId"])), "{known:?}");
}

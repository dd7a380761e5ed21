//! `tortie policy test`: expectations beside manifests.

use crate::offline::support::{CLUSTER, tortie};

/// Runs the expectations, one in each line.
fn run(sentences: &[&str], more: &[&str]) -> (i32, String, String) {
    let lines: String = sentences.iter().map(|sentence| format!("- {sentence}\n")).collect();
    let file = format!("# Who reaches whom.\nexpectations:\n{lines}");
    let arguments = [&["policy", "test", "e.yml", "-f", "c.yml"], more].concat();
    tortie(&[("c.yml", CLUSTER), ("e.yml", &file)], &arguments)
}

#[test]
fn expectations_hold_or_name_who_decides() {
    for (sentence, expected) in [
        ("shop/front* reaches shop/back-0 on tcp/8443", ""),
        (
            "shop/front* does not reach shop/back-0 on tcp/8443",
            "tcp/8443 is allowed (out: no policy: the namespace's profile allows; in: KubernetesNetworkPolicy shop/back, rule 1 (c.yml:58))",
        ),
        ("shop/front* reaches shop/back-0 on tcp/8443, tcp/22", "shop/back-0 tcp/22 is denied (in: "),
        ("shop/front* reaches shop/back-0", "is denied"),
        ("jobs/* does not reach shop/back-0", ""),
        ("outside does not reach shop/back-0", ""),
        ("203.0.113.7 reaches shop/front* on tcp/443, tcp/8500", ""),
        ("outside reaches shop/front* on tcp/443", "tcp/443 is denied"),
        ("203.0.113.7, 2001:db8::1 reaches shop/front* on tcp/443", "2001:db8::1 in"),
        ("shop/front* reaches 192.0.2.1 on icmpv6/128", "is no pod, node or address of this cluster"),
        ("198.51.100.7 does not reach shop/back-0", ""),
        ("pods with app == 'front' reaches pods of shop with app == 'back' on 8443", ""),
        ("all pods reaches jobs/* on udp/53", ""),
        ("nodes reaches shop/back-0 on tcp/22", "is denied"),
        ("shop/back-0, shop/front* reaches jobs/nightly-x9s2b", ""),
        ("shop/absent reaches shop/back-0", "\"shop/absent\" is no pod, node or address of this cluster"),
        ("pods with app == 'none' does not reach shop/back-0", "is no pod, node or address of this cluster"),
        ("shop/back-0 reaches shop/back-0", "is no pod, node or address of this cluster"),
    ] {
        let (code, out, err) = run(&[sentence], &[]);
        let held = expected.is_empty();
        assert_eq!(code, i32::from(!held), "{sentence}: {out}{err}");
        let summary = if held { "1 expectation, all hold" } else { "1 expectation, 1 fail" };
        assert!(out.contains(summary) && out.contains(expected), "{sentence}: {out}");
        assert!(held || out.contains(&format!("e.yml:3: {sentence}\n")), "{out}");
    }
}

#[test]
fn many_wrong_pairs_are_counted() {
    let (code, out, _) = run(&["jobs/* reaches jobs/*, shop/*", "all pods reaches shop/back-0"], &[]);
    assert_eq!(code, 1);
    assert!(out.contains("e.yml:4: all pods reaches shop/back-0") && out.contains("    and "), "{out}");
}

#[test]
fn ci_systems_get_their_formats() {
    let sentences = ["shop/front* reaches shop/back-0 on tcp/8443", "jobs/* reaches shop/back-0 on tcp/8443"];
    let (code, out, _) = run(&sentences, &["-o", "junit"]);
    assert_eq!(code, 1);
    assert!(out.contains("<testsuite name=\"e.yml\" tests=\"2\" failures=\"1\">"), "{out}");
    assert!(out.contains("name=\"shop/front* reaches shop/back-0 on tcp/8443\" line=\"3\"/>"), "{out}");
    assert!(out.contains("<failure message=\"jobs/nightly-x9s2b → shop/back-0 tcp/8443 is denied"), "{out}");
    let (_, out, _) = run(&sentences, &["-o", "json"]);
    let document: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(document["expectations"][0]["holds"], true);
    assert_eq!(document["expectations"][1]["line"], 4);
}

/// What is recorded holds, and fails where the policy has changed.
#[test]
fn recorded_verdicts_are_expectations() {
    let (code, recorded, err) = tortie(&[("c.yml", CLUSTER)], &["policy", "test", "--record", "-f", "c.yml"]);
    assert_eq!(code, 0, "{err}");
    assert!(recorded.contains("reaches shop/back-0 on tcp/8443"), "{recorded}");
    let test = |cluster: &str| {
        let files = [("c.yml", cluster), ("e.yml", recorded.as_str())];
        tortie(&files, &["policy", "test", "e.yml", "-f", "c.yml"])
    };
    let (code, out, err) = test(CLUSTER);
    assert!(code == 0 && out.contains("all hold"), "{recorded}{out}{err}");
    let (code, out, _) = test(&CLUSTER.replace("port: api", "port: 8444"));
    assert!(code == 1 && out.contains("tcp/8443 is denied"), "{out}");
}

/// ICMP messages are told apart by type and code.
#[test]
fn recorded_verdicts_of_icmp_are_expectations() {
    let text = include_str!("../../../../../examples/calico/16-icmp.yml");
    let (_, recorded, _) = tortie(&[("c.yml", text)], &["policy", "test", "--record", "-f", "c.yml"]);
    assert!(recorded.contains("icmp/8/0") && recorded.contains("icmp/"), "{recorded}");
    let files = [("c.yml", text), ("e.yml", recorded.as_str())];
    let (code, out, err) = tortie(&files, &["policy", "test", "e.yml", "-f", "c.yml"]);
    assert!(code == 0 && out.contains("all hold"), "{recorded}{out}{err}");
}

/// What reaches nodes is recorded if host endpoints decide about it.
#[test]
fn recorded_verdicts_of_host_endpoints_are_expectations() {
    for (text, is_recorded) in [
        (include_str!("../../../../../examples/hosts/01-protect-a-node.yml"), true),
        (include_str!("../../../../../examples/hosts/02-failsafe-ports.yml"), true),
        (include_str!("../../../../../examples/hosts/03-forwarded-traffic.yml"), true),
        (include_str!("../../../../../examples/hosts/06-all-interfaces.yml"), true),
        (CLUSTER, false),
    ] {
        let (code, recorded, err) =
            tortie(&[("c.yml", text)], &["policy", "test", "--record", "-f", "c.yml"]);
        assert_eq!((code, recorded.contains("node/")), (0, is_recorded), "{recorded}{err}");
        assert_eq!(err.contains("what reaches nodes is not recorded"), !is_recorded, "{err}");
        let files = [("c.yml", text), ("e.yml", recorded.as_str())];
        let (code, out, err) = tortie(&files, &["policy", "test", "e.yml", "-f", "c.yml"]);
        assert!(code == 0 && out.contains("all hold"), "{recorded}{out}{err}");
    }
    // A change of the policy is found.
    let text = include_str!("../../../../../examples/hosts/01-protect-a-node.yml");
    let (_, recorded, _) = tortie(&[("c.yml", text)], &["policy", "test", "--record", "-f", "c.yml"]);
    let changed = text.replace("- 443\n", "- 444\n");
    let files = [("c.yml", changed.as_str()), ("e.yml", recorded.as_str())];
    let (code, out, _) = tortie(&files, &["policy", "test", "e.yml", "-f", "c.yml"]);
    assert!(code == 1 && out.contains("node/edge tcp/443 is denied"), "{out}");
}

#[test]
fn files_with_problems_are_refused() {
    let files = [("c.yml", CLUSTER)];
    for (text, expected) in [
        ("expectations: []", "there are no expectations"),
        ("expected: [x]", "the field expected is unknown"),
        ("- x", "is no list of sentences"),
        ("expectations:\n- shop/a likes shop/b\n- 7", "e.yml:2: \"shop/a likes shop/b\" is not of the form"),
        ("expectations:\n- a: b", "is not of the form"),
        ("expectations:\n- >-\n  a\n  b\n- shop/a likes shop/b", "e.yml:5: \"shop/a likes shop/b\""),
        ("expectations: [", "e.yml: line"),
    ] {
        let all = [&files[..], &[("e.yml", text)]].concat();
        let (code, _, err) = tortie(&all, &["policy", "test", "e.yml", "-f", "c.yml"]);
        assert!(code == 2 && err.contains(expected), "{text}: {code} {err}");
    }
}

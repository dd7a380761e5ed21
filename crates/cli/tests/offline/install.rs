//! `tortie install --dry-run`: options that become settings of the agents.

use crate::support::tortie;

#[test]
fn methods_to_find_addresses_of_nodes_are_settings_of_agents() {
    let (code, plain, _) = tortie(&[], &["install", "--dry-run"]);
    assert!(code == 0 && !plain.contains("AUTODETECTION"), "{plain}");
    let options =
        ["--ip-autodetection-method", "interface=eth.*, bond0", "--ip6-autodetection-method", "first-found"];
    let (code, out, err) = tortie(&[], &[&["install", "--dry-run"], &options[..]].concat());
    assert_eq!(code, 0, "{err}");
    let added: Vec<&str> = out.lines().filter(|line| line.contains("AUTODETECTION")).map(str::trim).collect();
    assert_eq!(
        added,
        [
            "TORTIE_IP6_AUTODETECTION_METHOD: first-found",
            r#"TORTIE_IP_AUTODETECTION_METHOD: "interface=eth.*,bond0""#
        ]
    );
    let node = ["agent", "--node", "n", "--store", "kubernetes"];
    for (command, method, problem) in [
        (&["install", "--dry-run"][..], "first", "is none of kubernetes-internal-ip, first-found"),
        (&["install", "--dry-run"], "interface=eth(", "eth("),
        (&node, "cidr=192.0.2.0", "is no network"),
    ] {
        let (code, _, err) = tortie(&[], &[command, &["--ip-autodetection-method", method]].concat());
        assert!(code == 2 && err.contains(problem), "{method}: {code} {err}");
    }
}

//! `tortie install --dry-run`: options that become settings of the agents.

use crate::offline::support::tortie;

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

#[test]
fn policy_only_leaves_out_what_connects_pods() {
    let policy_only = ["install", "--dry-run", "--policy-only"];
    let (code, out, err) = tortie(&[], &[&policy_only[..], &["--pod-interface-prefix", "eni,veth"]].concat());
    assert_eq!(code, 0, "{err}");
    for there in [
        "TORTIE_POLICY_ONLY: \"true\"",
        "TORTIE_POD_INTERFACE_PREFIX: eni,veth",
        "mountPath: \"/var/lib/cni\"",
    ] {
        assert!(out.contains(there), "{there}: {out}");
    }
    for absent in [
        "install-plugin",
        "TORTIE_DEFAULT_POOL",
        "/etc/cni/net.d",
        "/opt/cni/bin",
        "SYS_ADMIN",
        "tortie-node-setup",
    ] {
        assert!(!out.contains(absent), "{absent}");
    }
    for other in [
        &["--pool", "10.0.0.0/16"][..],
        &["--pool-v6", "fd00::/56"],
        &["--nat-outgoing", "false"],
        &["--encapsulation", "none"],
        &["--bgp"],
        &["--direct-routes"],
        &["--ip-autodetection-method", "first-found"],
        &["--cni-bin-dir", "/bin"],
        &["--cni-conf-dir", "/etc"],
        &["--cni-plugins", "[{\"type\": \"tuning\"}]"],
    ] {
        let (code, _, err) = tortie(&[], &[&policy_only[..], other].concat());
        assert!(
            code == 2 && err.contains("--policy-only") && err.contains(other[0]),
            "{other:?}: {code} {err}"
        );
    }
    let (code, _, err) = tortie(&[], &["install", "--dry-run", "--pod-interface-prefix", "eni"]);
    assert!(code == 2 && err.contains("--policy-only"), "{err}");
}

#[test]
fn flannel_leaves_out_pools_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("net-conf.json");
    std::fs::write(&file, r#"{"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}}"#).unwrap();
    let flannel = ["install", "--dry-run", "--flannel", "--flannel-config", file.to_str().unwrap()];
    let (code, out, err) = tortie(&[], &flannel);
    assert_eq!(code, 0, "{err}");
    for there in [
        "TORTIE_FLANNEL: \"true\"",
        "tortie.io/network: tortie",
        "cidr: \"10.244.0.0/16\"",
        "assignmentMode: Manual",
        "vxlanVNI: 1",
        "vxlanPort: 8472",
        "mountPath: \"/run/flannel\"",
    ] {
        assert!(out.contains(there), "{there}: {out}");
    }
    for absent in ["TORTIE_DEFAULT_POOL", "tortie-node-setup"] {
        assert!(!out.contains(absent), "{absent}");
    }
    for other in [
        &["--pool", "10.0.0.0/16"][..],
        &["--encapsulation", "none"],
        &["--bgp"],
        &["--direct-routes"],
        &["--policy-only"],
    ] {
        let (code, _, err) = tortie(&[], &[&flannel[..], other].concat());
        assert!(code == 2 && err.contains("--flannel") && err.contains(other[0]), "{other:?}: {code} {err}");
    }
    let (code, _, err) = tortie(&[], &["install", "--dry-run", "--flannel"]);
    assert!(code != 0 && err.contains("--flannel-config"), "{err}");
    std::fs::write(&file, r#"{"Network": "10.244.0.0/16", "Backend": {"Type": "wireguard"}}"#).unwrap();
    let (code, _, err) = tortie(&[], &flannel);
    assert!(code != 0 && err.contains("the backend is wireguard"), "{err}");
}

//! A node as flannel leaves it: `tortie node cleanup --flannel` removes what nobody needs, and nothing else.

use serde_json::json;

use crate::node::{Node, output_of};

/// What flanneld makes with `vxlan` and with `host-gw`, and its plugin's bridge with a pod (`pkg/trafficmngr`, `pkg/backend`), beside
/// chains, routes and links of others.
const LEFT: &str = "
    ip link add flannel.1 type vxlan id 1 dstport 8472 local 172.31.0.1 nolearning; ip link set flannel.1 up
    ip address add 10.244.1.0/32 dev flannel.1; ip route add 10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink
    ip route add 10.244.3.0/24 via 172.31.0.3 dev eth0; ip route add 10.9.0.0/16 via 172.31.0.9 dev eth0
    ip link add cni0 type bridge; ip address add 10.244.1.1/24 dev cni0; ip link set cni0 up
    ip link add veth1 type veth peer name veth2; ip link set veth1 master cni0
    ip link add other0 type bridge; ip link add flannel-like type bridge; ip link add flannel.lab type vxlan id 7 dstport 9
    iptables-nft -N FLANNEL-FWD; iptables-nft -A FORWARD -m comment --comment 'flanneld forward' -j FLANNEL-FWD
    iptables-nft -A FLANNEL-FWD -s 10.244.0.0/16 -m comment --comment 'flanneld forward' -j ACCEPT
    iptables-nft -t nat -N FLANNEL-POSTRTG; iptables-nft -t nat -A POSTROUTING -j FLANNEL-POSTRTG
    iptables-nft -t nat -A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE
    iptables-nft -N OTHER; iptables-nft -A FORWARD -j OTHER
    nft 'table ip flannel-ipv4 { chain postrtg { type nat hook postrouting priority 100; }; }'
    nft 'table ip mine { chain c { }; }'";

fn cleanup(node: &Node, more: &[&str]) -> String {
    let (folder, run) = (node.path("net.d"), node.path("run"));
    let arguments = ["node", "cleanup", "--flannel", "--cni-conf-dir", folder.to_str().unwrap()];
    let arguments = [&arguments[..], &["--run-dir", run.to_str().unwrap()], more].concat();
    output_of(&node.namespace, env!("CARGO_BIN_EXE_tortie"), &arguments)
}

#[test]
fn cleanup_removes_what_flannel_left_and_nothing_else() {
    let node = Node::new(&json!([]));
    let shown = |command: &str| output_of(&node.namespace, "/bin/sh", &["-c", command]);
    assert_eq!(output_of(&node.namespace, "/bin/sh", &["-ec", LEFT]), "");
    let list =
        json!({"name": "cbr0", "cniVersion": "0.3.1", "plugins": [{"type": "flannel"}, {"type": "portmap"}]});
    let file = node.path("net.d/10-flannel.conflist");
    std::fs::write(&file, list.to_string()).unwrap();

    // Its bridge may be of another plugin, and its routes of an administrator, as long as nobody names its network.
    let unknown = cleanup(&node, &["--dry-run"]);
    assert!(
        unknown.contains("names no network of flannel") && unknown.contains("link flannel.1\n"),
        "{unknown}"
    );
    assert!(!unknown.contains("cni0\n") && !unknown.contains("10.244.3.0/24"), "{unknown}");
    // Its pods may be at the bridge, whatever anybody says about its networks.
    for more in [&[][..], &["--flannel-network", "10.42.0.0/16"]] {
        let refused = cleanup(&node, more);
        assert!(
            refused.contains("cni0 has ports (veth1)") && refused.contains("--flannel-network"),
            "{refused}"
        );
        assert!(
            !refused.contains("removing") && file.exists() && shown("ip link").contains("flannel.1:"),
            "{refused}"
        );
    }
    let named = cleanup(&node, &["--dry-run", "--flannel-network", "10.244.0.0/16"]);

    std::fs::create_dir_all(node.path("run/flannel")).unwrap();
    std::fs::write(node.path("run/flannel/subnet.env"), "FLANNEL_NETWORK=10.244.0.0/16\n").unwrap();
    let listed = cleanup(&node, &["--dry-run"]);
    assert_eq!(listed, named);
    for part in [
        "would remove:\n",
        "table ip flannel-ipv4",
        "chain FLANNEL-FWD in nftables table ip filter",
        "chain FLANNEL-POSTRTG in nftables table ip nat",
        "10.244.3.0/24",
        "link flannel.1\n",
        "link cni0\n",
        "10-flannel.conflist",
        "but pods of flannel are on this node (veth1 at the bridge cni0): drain the node",
    ] {
        assert!(listed.contains(part), "{part} in {listed}");
    }
    for other in ["OTHER", "mine", "10.9.0.0", "other0", "flannel-like", "flannel.lab", "00-tortie"] {
        assert!(!listed.contains(other), "{other} in {listed}");
    }
    let refused = cleanup(&node, &[]);
    assert!(refused.contains("pods of DaemonSets") && !refused.contains("removing"), "{refused}");
    assert!(file.exists() && shown("ip link").contains("flannel.1"), "nothing was removed");

    assert_eq!(shown("ip link delete veth1"), "");
    let (ours, away) = (node.configuration_file(), node.path("away"));
    std::fs::rename(&ours, &away).unwrap();
    for (more, problem) in [(&["--dry-run"][..], "but "), (&[], "error: ")] {
        let refused = cleanup(&node, more);
        assert!(
            refused.contains(problem) && refused.contains("00-tortie.conflist does not exist"),
            "{refused}"
        );
    }
    std::fs::rename(&away, &ours).unwrap();
    let removed = cleanup(&node, &[]);
    assert!(removed.starts_with("removing:\n") && !removed.contains("error"), "{removed}");
    let left = shown("nft list ruleset; ip route; ip link");
    for gone in ["FLANNEL", "flannel-ipv4", "10.244.", "flannel.1:", "cni0"] {
        assert!(!left.contains(gone), "{gone} in {left}");
    }
    for kept in ["chain OTHER", "table ip mine", "10.9.0.0/16", "other0", "flannel-like", "flannel.lab"] {
        assert!(left.contains(kept), "{kept} in {left}");
    }
    assert!(!file.exists() && node.configuration_file().exists());
    assert!(cleanup(&node, &[]).contains("flannel has left nothing on this node"));
}

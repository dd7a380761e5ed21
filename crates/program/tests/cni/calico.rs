//! A node as Calico leaves it: its pods' interfaces, routes and files, and its IPAM data and WorkloadEndpoint in the
//! datastore. Tortie's agent takes it over.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};

use crate::node::{Node, Sandbox, address, output_of, until};

const BLOCK: &str = "10.65.3.0/26";
const TUNNEL: Ipv4Addr = Ipv4Addr::new(10, 65, 3, 0);
const OLD: Ipv4Addr = Ipv4Addr::new(10, 65, 3, 1);
/// What Calico calls the host end of pod n/old: `cali`, and the beginning of the SHA-1 of `n.old`.
const OLD_INTERFACE: &str = "cali52a95f3f385";
/// The last address that Calico has given; two are free.
const LAST_USED: usize = 61;

fn block_key() -> Key {
    Key::global(Kind::IpamBlock, BLOCK)
}

fn handle_key(container: &str) -> Key {
    Key::global(Kind::IpamHandle, format!("k8s-pod-network.{container}"))
}

fn endpoint_key() -> Key {
    Key::namespaced(Kind::WorkloadEndpoint, "n", WorkloadEndpoint::name_for("one", "old", "eth0"))
}

/// The records of Calico's IPAM (`libcalico-go/lib/backend/model`): an almost full block, its affinity and its handles.
fn write_ipam(node: &Node) {
    let timestamp = "2026-01-02 03:04:05.6 +0000 UTC";
    let mut attributes = vec![json!({
        "handle_id": "vxlan-tunnel-addr-one", "secondary": {"node": "one", "type": "vxlanTunnelAddress"},
    })];
    for offset in 1..=LAST_USED {
        let pod = if offset == 1 { "old".to_owned() } else { format!("other{offset}") };
        let container = format!("container-{pod}");
        let owner = json!({"node": "one", "namespace": "n", "pod": pod, "timestamp": timestamp});
        attributes.push(json!({"handle_id": format!("k8s-pod-network.{container}"), "secondary": owner}));
        node.put(&handle_key(&container), handle(&format!("k8s-pod-network.{container}")));
    }
    node.put(&Key::global(Kind::IpamHandle, "vxlan-tunnel-addr-one"), handle("vxlan-tunnel-addr-one"));
    let allocations: Vec<_> = (0..64).map(|offset| (offset <= LAST_USED).then_some(offset)).collect();
    let block = json!({
        "cidr": BLOCK, "affinity": "host:one", "allocations": allocations, "unallocated": [62, 63],
        "attributes": attributes, "deleted": false, "sequenceNumber": 1_767_323_045_000_000_000_u64,
        "sequenceNumberForAllocation": {}, "strictAffinity": false,
    });
    node.put(&block_key(), block);
    let affinity = json!({"state": "confirmed", "deleted": false});
    node.put(&Key::global(Kind::BlockAffinity, format!("one/{BLOCK}")), affinity);
}

fn handle(name: &str) -> Value {
    json!({"handleID": name, "block": {BLOCK: 1}, "deleted": false})
}

/// A pod that Calico has wired (`cni-plugin/internal/pkg/dataplane/linux`), and what Felix leaves on the node.
fn wire(node: &Node) -> Sandbox {
    let pod = node.pod("old", json!({}));
    let script = format!(
        "ip route add default via 172.31.0.254
         ip link add {OLD_INTERFACE} type veth peer name eth0 netns {}
         ip link set {OLD_INTERFACE} address ee:ee:ee:ee:ee:ee up
         echo 1 > /proc/sys/net/ipv4/conf/{OLD_INTERFACE}/proxy_arp
         echo 0 > /proc/sys/net/ipv4/neigh/{OLD_INTERFACE}/proxy_delay
         echo 1 > /proc/sys/net/ipv4/conf/{OLD_INTERFACE}/forwarding
         ip route add {OLD} dev {OLD_INTERFACE} scope link
         ip route add blackhole {BLOCK} proto 80; ip route add blackhole 10.65.7.0/26 proto 80
         nft 'table ip filter {{ chain cali-FORWARD {{ drop; }}; chain FORWARD {{
           type filter hook forward priority 0; jump cali-FORWARD comment \"cali:wUHhoiAYhphO9Mso\"; }}; }}'",
        pod.path.display()
    );
    assert_eq!(output_of(&node.namespace, "/bin/sh", &["-ec", &script]), "");
    let script = format!(
        "ip link set lo up; ip link set eth0 up; ip address add {OLD}/32 dev eth0
         ip route add 169.254.1.1 dev eth0 scope link; ip route add default via 169.254.1.1 dev eth0"
    );
    assert_eq!(output_of(&pod.netns, "/bin/sh", &["-ec", &script]), "");
    let shown: Value =
        serde_json::from_str(&output_of(&pod.netns, "/bin/ip", &["-json", "link", "show", "eth0"])).unwrap();
    let spec = json!({
        "orchestrator": "k8s", "node": "one", "containerID": pod.container, "pod": "old", "endpoint": "eth0",
        "ipNetworks": [format!("{OLD}/32")], "profiles": ["kns.n", "ksa.n.default"],
        "interfaceName": OLD_INTERFACE, "mac": shown[0]["address"],
    });
    let labels = json!({
        "projectcalico.org/namespace": "n", "projectcalico.org/orchestrator": "k8s",
        "projectcalico.org/serviceaccount": "default",
    });
    let key = endpoint_key();
    let metadata = json!({"name": key.name, "namespace": "n", "labels": labels});
    let kind = "WorkloadEndpoint";
    let endpoint =
        json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": metadata, "spec": spec});
    node.put(&key, endpoint);
    let list = json!({
        "name": "k8s-pod-network", "cniVersion": "0.3.1",
        "plugins": [{"type": "calico", "ipam": {"type": "calico-ipam"}}, {"type": "portmap"}],
    });
    std::fs::create_dir_all(node.path("net.d")).unwrap();
    std::fs::write(node.path("net.d/10-calico.conflist"), list.to_string()).unwrap();
    std::fs::write(node.path("net.d/calico-kubeconfig"), "apiVersion: v1").unwrap();
    pod
}

fn node_of_calico() -> (Node, Sandbox) {
    let mut old = None;
    let node = Node::started_after(&json!([]), |node| {
        write_ipam(node);
        old = Some(wire(node));
    });
    (node, old.unwrap())
}

/// The offset's owner in the block.
fn owner(node: &Node, offset: usize) -> Option<String> {
    let block = node.stored(&block_key()).unwrap();
    let attribute = usize::try_from(block["allocations"][offset].as_u64()?).unwrap();
    block["attributes"][attribute]["handle_id"].as_str().map(str::to_owned)
}

/// The block has two free addresses, and no other is given to new pods. The pod of Calico is deleted by its handle.
#[test]
fn addresses_of_calico_are_kept_until_their_pods_go() {
    let (node, old) = node_of_calico();
    let before: Vec<_> = (0..=LAST_USED).map(|offset| owner(&node, offset)).collect();
    assert!(before.iter().all(Option::is_some));
    let pods = ["a", "b", "c"].map(|name| node.pod(name, json!({})));
    let given = pods.each_ref().map(|pod| address(&node.call("ADD", pod, json!({})).unwrap()));
    assert_eq!(given[..2], [Ipv4Addr::new(10, 65, 3, 62), Ipv4Addr::new(10, 65, 3, 63)]);
    let block: ipnet::Ipv4Net = BLOCK.parse().unwrap();
    assert!(!block.contains(&given[2]), "the block is full, and {} is of another one", given[2]);
    let after: Vec<_> = (0..=LAST_USED).map(|offset| owner(&node, offset)).collect();
    assert_eq!(after, before, "{TUNNEL} and the addresses of pods stay with Calico's handles");

    for _ in 0..2 {
        node.call("DEL", &old, json!({})).unwrap();
    }
    assert_eq!((owner(&node, 1), node.stored(&handle_key("container-old"))), (None, None));
    assert_eq!(node.stored(&endpoint_key()), None);
    until("Calico's interface goes", || !old.has_interface("eth0"));
    assert_eq!((2..=LAST_USED).map(|offset| owner(&node, offset)).collect::<Vec<_>>(), before[2..]);
    let next = node.pod("d", json!({}));
    let full_before = address(&node.call("ADD", &next, json!({})).unwrap());
    assert!(full_before == OLD || !block.contains(&full_before), "{full_before}");
}

/// `tortie node cleanup --calico`, as the program.
fn cleanup(node: &Node, more: &[&str]) -> String {
    let folder = node.path("net.d");
    let arguments = [&["node", "cleanup", "--calico", "--cni-conf-dir", folder.to_str().unwrap()], more];
    output_of(&node.namespace, env!("CARGO_BIN_EXE_tortie"), &arguments.concat())
}

#[test]
fn cleanup_removes_what_calico_left_and_keeps_its_pods() {
    let (node, old) = node_of_calico();
    let new = node.pod("new", json!({}));
    let given = address(&node.call("ADD", &new, json!({})).unwrap());
    let listener = old.netns.run(|| TcpListener::bind((OLD, 80)).unwrap()).unwrap();
    let connects = || {
        let target = SocketAddr::from((OLD, 80));
        let connect = || TcpStream::connect_timeout(&target, Duration::from_secs(5)).is_ok();
        node.namespace.run(connect).unwrap()
    };
    assert!(connects());
    let shown = |command: &str| output_of(&node.namespace, "/bin/sh", &["-c", command]);
    let files = ["10-calico.conflist", "calico-kubeconfig"].map(|name| node.path("net.d").join(name));

    let listed = cleanup(&node, &["--dry-run"]);
    for part in [
        "would remove:",
        "chain cali-FORWARD in nftables table ip filter",
        "\nblackhole route to 10.65.7.0/26",
        "10-calico.conflist",
        "calico-kubeconfig",
    ] {
        assert!(listed.contains(part), "{part} in {listed}");
    }
    assert!(!listed.contains("00-tortie") && !listed.contains(OLD_INTERFACE), "{listed}");
    assert!(files.iter().all(|file| file.exists()) && shown("nft list ruleset").contains("cali-FORWARD"));
    assert_eq!(cleanup(&node, &["--dry-run"]), listed, "nothing was removed");

    let removed = cleanup(&node, &[]);
    assert!(removed.starts_with(&listed.replace("would remove:", "removing:")), "{removed}");
    assert!(!files.iter().any(|file| file.exists()) && node.configuration_file().exists());
    assert!(!shown("nft list ruleset").contains("cali-FORWARD"));
    assert_eq!(shown("ip route show proto 80"), "");
    assert!(cleanup(&node, &[]).contains("Calico has left nothing on this node"));
    until("the agent removes the route that nobody needs", || !shown("ip route").contains("10.65.7.0/26"));

    let routes = shown("ip route");
    assert!(routes.contains(&format!("{OLD} dev {OLD_INTERFACE}")), "{routes}");
    assert!(routes.contains(&format!("{given} dev ")) && routes.contains(BLOCK), "{routes}");
    assert!(connects(), "the pod of Calico keeps its network");
    assert!(node.stored(&endpoint_key()).is_some());
    assert_eq!(owner(&node, 1).as_deref(), Some("k8s-pod-network.container-old"));
    drop(listener);
}

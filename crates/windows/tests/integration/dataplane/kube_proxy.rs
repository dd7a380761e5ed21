//! What kube-proxy is told.

use std::collections::BTreeMap;

use serde_json::json;
use tortie_api::ipam::Block;
use tortie_hcn::schema::{Network, lenient};
use tortie_hcn::{HcnExt, Version};
use tortie_hns_emulator::Config;
use tortie_windows::{NETWORK, kube_proxy_flags, source_vip};

use crate::dataplane::node::Node;

#[test]
fn flags_of_kube_proxy_name_network_and_source_vip() {
    let node = Node::usual();
    let network = node.hns.network_by_name(NETWORK).unwrap().unwrap();
    for (version, node, more) in [
        (Config::SERVER_2022, None, vec!["--enable-dsr=true"]),
        // Before build 17763.1432.
        (Version::new(9, 2), Some("win-1"), vec!["--enable-dsr=false", "--hostname-override=win-1"]),
    ] {
        let flags = kube_proxy_flags(&network, version, node).unwrap();
        let expected = ["--proxy-mode=kernelspace", "--network-name=Calico", "--source-vip=10.244.3.2"];
        assert_eq!(flags, [expected.to_vec(), more].concat());
    }
    let other: Network = lenient(&json!({"Name": "nat", "Type": "NAT"}).to_string()).unwrap();
    assert!(kube_proxy_flags(&other, Config::NEWEST, None).unwrap_err().to_string().contains("type NAT"));
    let empty: Network = lenient(&json!({"Name": "o", "Type": "Overlay"}).to_string()).unwrap();
    assert!(
        kube_proxy_flags(&empty, Config::NEWEST, None).unwrap_err().to_string().contains("no IPv4 subnet")
    );
}

/// IPAM never gives the source VIP to a pod.
#[test]
fn the_source_vip_is_reserved_in_blocks_of_windows_nodes() {
    let node = Node::usual();
    let network = node.hns.network_by_name(NETWORK).unwrap().unwrap();
    let block: ipnet::IpNet = network.subnets().next().unwrap().ip_address_prefix.parse().unwrap();
    let mut block = Block::new(block, "windows-1", true, 0, String::new());
    let given: Vec<_> = std::iter::from_fn(|| block.assign("pod", &BTreeMap::new(), &[])).collect();
    let vip = std::net::IpAddr::V4(source_vip(&network).unwrap());
    assert!(given.len() == 60 && !given.contains(&vip), "{given:?}");
}

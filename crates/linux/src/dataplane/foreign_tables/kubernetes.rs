//! The chains of kube-proxy and of kubelets that drop nothing that policy allows.
//!
//! They drop packets to Services without backends or with `loadBalancerSourceRanges`, packets that connection tracking
//! calls invalid, and packets to 127.0.0.0/8 from elsewhere. That is what Services mean, not another policy. The chains are
//! known by name. In those whose rules all have conditions, a rule without one is of somebody else.

use tortie_kernel::nftables::others::{ForeignChain, TableId};

/// The table of kube-proxy's nftables mode (`pkg/proxy/nftables/proxier.go` of Kubernetes 1.36).
const TABLE: &str = "kube-proxy";
/// Its chains whose rules drop, or that a map with drops is consulted in.
const CHAINS: [&str; 4] =
    ["cluster-ips-check", "firewall-check", "nodeport-endpoints-check", "service-endpoints-check"];
/// The chain that consists of a reject, and leads nowhere.
const REJECT: &str = "reject-chain";
/// The prefix of its chains for `loadBalancerSourceRanges`.
const SOURCE_RANGES: &str = "firewall-";

/// The chains in the table `filter` of the other modes (`pkg/proxy/iptables`, `pkg/proxy/ipvs`) and of kubelets
/// (`pkg/kubelet/kubelet_network_linux.go`).
const OF_IPTABLES: [&str; 8] = [
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-FIREWALL",
    "KUBE-FORWARD",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-NODEPORTS",
    "KUBE-PROXY-FIREWALL",
    "KUBE-SERVICES",
];
/// The chain that drops all packets that reach it: those to load balancers from other sources (`pkg/proxy/ipvs`).
const IPVS_SOURCE_RANGES: &str = "KUBE-SOURCE-RANGES-FIREWALL";

/// `NFPROTO_IPV4` and `NFPROTO_IPV6`.
const IP: [u8; 2] = [2, 10];

/// Whether what this chain drops is no packet that policy allows.
pub(super) fn drops_nothing_allowed(id: &TableId, name: &str, chain: &ForeignChain) -> bool {
    if !IP.contains(&id.family) || chain.base.is_some() {
        return false;
    }
    match id.name.as_str() {
        TABLE if name == REJECT => true,
        TABLE => (CHAINS.contains(&name) || name.starts_with(SOURCE_RANGES)) && !chain.closed,
        "filter" if name == IPVS_SOURCE_RANGES => true,
        "filter" => OF_IPTABLES.contains(&name) && !chain.closed,
        _ => false,
    }
}

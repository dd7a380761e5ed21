//! What kube-proxy must be told on a Windows node with Tortie (`pkg/proxy/winkernel` of Kubernetes).

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use tortie_hcn::schema::{Network, NetworkMode};
use tortie_hcn::{Feature, Version};

use crate::network_spec::subnets;
use crate::{Error, NETWORK};

/// The address that hides clients from backends where a load balancer has no direct server return: the third of the network's
/// first subnet. IPAM gives it to nobody, because it reserves the first three addresses and the last one of each block of a
/// Windows node, as Calico does. kube-proxy makes an endpoint with it.
///
/// # Errors
/// The network has no subnet.
pub fn source_vip(network: &Network) -> Result<Ipv4Addr, Error> {
    let no_subnet = || Error::Differs {
        object: format!("network {}", network.name),
        problem: "it has no IPv4 subnet for the source VIP of kube-proxy".to_owned(),
    };
    source_vips(network).next().ok_or_else(no_subnet)
}

/// The same address of each subnet: kube-proxy keeps the one that it was started with, also when another subnet becomes the first.
pub fn source_vips(network: &Network) -> impl Iterator<Item = Ipv4Addr> {
    subnets(network).map(|net: Ipv4Net| Ipv4Addr::from(u32::from(net.network()).saturating_add(2)))
}

/// The flags that kube-proxy needs on this network and version of HNS, one each. `node` is the node's name, if it is not that of
/// the machine.
///
/// # Errors
/// The network is neither an overlay nor of type L2Bridge, or has no subnet.
pub fn kube_proxy_flags(
    network: &Network,
    version: Version,
    node: Option<&str>,
) -> Result<Vec<String>, Error> {
    let source_vip = match network.r#type {
        NetworkMode::Overlay => Some(format!("--source-vip={}", source_vip(network)?)),
        // Where clients are hidden, they get the node's address.
        NetworkMode::L2Bridge => None,
        _ => {
            return Err(Error::Differs {
                object: format!("network {}", network.name),
                problem: format!(
                    "it is of type {}, and that of the agent ({NETWORK}) is of type Overlay or L2Bridge",
                    network.r#type
                ),
            });
        }
    };
    let mut flags = vec!["--proxy-mode=kernelspace".to_owned(), format!("--network-name={}", network.name)];
    flags.extend(source_vip);
    flags.push(
        // Without it, policies of backends see the source VIP instead of their client.
        format!("--enable-dsr={}", version.supports(Feature::Dsr)),
    );
    // kube-proxy finds the pods of its own node by this name.
    flags.extend(node.map(|node| format!("--hostname-override={node}")));
    Ok(flags)
}

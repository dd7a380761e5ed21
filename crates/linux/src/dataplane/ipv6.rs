//! Kernel parameters for pods with IPv6 addresses.

use tortie_dataplane::{Condition, Reason};
use tortie_kernel::route::RouteSocket;
use tortie_kernel::{Result, sysctl};

/// The protocol number of routes from router advertisements (`RTPROT_RA` of `rtnetlink.h`).
const ROUTER_ADVERTISEMENT: u8 = 9;
const FORWARDING: &str = "net/ipv6/conf/all/forwarding";
const DISABLED: &str = "net/ipv6/conf/all/disable_ipv6";

/// Lets the node forward IPv6 packets. A node that forwards ignores router advertisements unless `accept_ra` is 2
/// (`ip-sysctl` of the kernel): interfaces whose routes come from advertisements keep them. Returns the condition of a
/// node that has IPv6 switched off.
pub(super) fn forward(socket: &mut RouteSocket) -> Result<Option<Condition>> {
    if !sysctl::exists(DISABLED) || sysctl::read(DISABLED)? == "1" {
        let message = "IPv6 is switched off on this node, and pods have IPv6 addresses: no packet reaches them by IPv6; set \
                       net.ipv6.conf.all.disable_ipv6=0, or take the IPv6 pools away";
        return Ok(Some(Condition::new(Reason::NetworkNotInForce, message)));
    }
    if sysctl::read(FORWARDING)? == "1" {
        return Ok(None);
    }
    let routes = socket.routes()?;
    let advertised = |index: u32| {
        routes.iter().any(|route| route.protocol == ROUTER_ADVERTISEMENT && route.link == Some(index))
    };
    for link in socket.links()?.into_iter().filter(|link| advertised(link.index)) {
        let parameter = format!("net/ipv6/conf/{}/accept_ra", link.name);
        if sysctl::read(&parameter)? == "1" {
            sysctl::ensure(&parameter, "2")?;
        }
    }
    sysctl::ensure(FORWARDING, "1")?;
    Ok(None)
}

/// The parameters of the host end of a pod's link.
pub(crate) fn link_parameters(name: &str) -> Result<()> {
    let conf = |parameter: &str| format!("net/ipv6/conf/{name}/{parameter}");
    if !sysctl::exists(&conf("disable_ipv6")) {
        return Ok(());
    }
    // Pods send no router advertisements that the node believes.
    for (parameter, value) in [("disable_ipv6", "0"), ("accept_ra", "0"), ("forwarding", "1")] {
        sysctl::ensure(&conf(parameter), value)?;
    }
    Ok(())
}

/// Lets the namespace of the calling thread, that of a pod, have IPv6 addresses: runtimes switch IPv6 off there.
pub(crate) fn enable_in_pod(interface: &str) -> Result<()> {
    for scope in ["all", "default", "lo", interface] {
        let disabled = format!("net/ipv6/conf/{scope}/disable_ipv6");
        if sysctl::exists(&disabled) {
            sysctl::ensure(&disabled, "0")?;
        }
    }
    // The pod's routes are Tortie's.
    let accept = format!("net/ipv6/conf/{interface}/accept_ra");
    if sysctl::exists(&accept) {
        sysctl::ensure(&accept, "0")?;
    }
    Ok(())
}

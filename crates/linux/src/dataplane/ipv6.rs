//! Kernel parameters for pods with IPv6 addresses.

use tortie_dataplane::{Condition, Reason};
use tortie_kernel::route::RouteSocket;
use tortie_kernel::{Result, sysctl};

const FORWARDING: &str = "net/ipv6/conf/all/forwarding";
const DISABLED: &str = "net/ipv6/conf/all/disable_ipv6";

/// Whether IPv6 is switched on in the calling thread's network namespace.
pub(crate) fn is_on() -> Result<bool> {
    Ok(sysctl::exists(DISABLED) && sysctl::read(DISABLED)? == "0")
}

/// Lets the node forward IPv6 packets. A node that forwards ignores router advertisements unless `accept_ra` is 2
/// (`ip-sysctl` of the kernel): interfaces that may get routes from advertisements go on with them. `is_other` says whether a
/// link is neither a pod's nor an overlay's. Returns the condition of a node that has IPv6 switched off.
pub(super) fn forward(
    socket: &mut RouteSocket,
    is_other: impl Fn(&str) -> bool,
) -> Result<Option<Condition>> {
    if !is_on()? {
        let message = "IPv6 is switched off on this node: new pods get no IPv6 addresses, and pods that have one are not reached \
                       by it; set net.ipv6.conf.all.disable_ipv6=0, or let the nodeSelector of the IPv6 pools leave the node out";
        return Ok(Some(Condition::new(Reason::NetworkPartNotInForce, message)));
    }
    if sysctl::read(FORWARDING)? == "1" {
        return Ok(None);
    }
    for link in socket.links()?.into_iter().filter(|link| is_other(&link.name)) {
        let parameter = format!("net/ipv6/conf/{}/accept_ra", link.name);
        if sysctl::exists(&parameter) && sysctl::read(&parameter)? == "1" {
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

/// Lets the link of the overlay have addresses and routes: hosts may switch IPv6 off for new links (`default`), and on only where they
/// want it. If it is off on the whole node, it stays so.
pub(super) fn enable_on_overlay(name: &str) -> Result<()> {
    let disabled = format!("net/ipv6/conf/{name}/disable_ipv6");
    if !sysctl::exists(&disabled) || !is_on()? {
        return Ok(());
    }
    sysctl::ensure(&disabled, "0").map(drop)
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

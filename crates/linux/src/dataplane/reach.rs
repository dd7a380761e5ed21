//! The routes to pods of other nodes that the kernel lacks, and for which no other condition gives a reason.

use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::net::IpVersion;
use tortie_dataplane::{Condition, NodeState, Reason, RouteTarget, Severity};

use super::entries::Tables;

/// The maximum number of ways in a message.
const MOST_NAMED: usize = 10;

/// The condition of a node whose kernel lacks routes to other nodes. `told` are the other conditions of its network: one of them that
/// says that other nodes are out of reach names the cause.
pub(super) fn without_route(state: &NodeState, kernel: &Tables, told: &[Condition]) -> Option<Condition> {
    if told.iter().any(|condition| condition.reason.severity() == Severity::Unreachable) {
        return None;
    }
    // A node without an IPv6 end of the overlay serves IPv4, and says so by itself.
    let has_end = |version| state.node.as_ref().is_none_or(|node| node.vtep(version).is_some());
    let is_meant = |net: &IpNet, target: &RouteTarget| {
        let is_overlaid = matches!(target, RouteTarget::Vxlan { .. });
        is_overlaid && net.addr().is_ipv6() && !has_end(IpVersion::V6)
    };
    let is_missing = |net: &IpNet| !kernel.routes.contains_key(&(*net, 0));
    let missing = state.routes.iter().filter(|(net, target)| is_missing(net) && !is_meant(net, target));
    let missing: Vec<String> =
        missing.filter_map(|(net, target)| Some(format!("{net} {}", way(target)?))).collect();
    let first = missing.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join(", ");
    let more = match missing.len() {
        0 => return None,
        count if count > MOST_NAMED => format!(", {} more", count - MOST_NAMED),
        _ => String::new(),
    };
    let message = format!(
        "the kernel has no route to pods of other nodes ({first}{more}), because a link or an address that the routes need is not there; \
         Tortie looks again"
    );
    Some(Condition::new(Reason::BlockUnreachable, message))
}

/// The way to another node; `None` for blocks of this one.
fn way(target: &RouteTarget) -> Option<String> {
    let by = |mode: &str, router: IpAddr| format!("{mode} {router}");
    match target {
        RouteTarget::Local => None,
        RouteTarget::Vxlan { node } => Some(format!("by VXLAN to node {node}")),
        RouteTarget::Ipip { router } => Some(by("by IPIP to", (*router).into())),
        RouteTarget::Direct { router } => Some(by("by way of", *router)),
    }
}

#[cfg(test)]
mod tests {
    use tortie_kernel::route::Route;

    use super::super::entries::PROTOCOL;
    use super::*;

    #[test]
    fn a_route_that_the_kernel_lacks_is_named_unless_its_cause_is() {
        let net = |number: u8| -> IpNet { format!("10.1.{number}.0/26").parse().unwrap() };
        let vxlan = || RouteTarget::Vxlan { node: "b".to_owned() };
        let condition = |reason| Condition::new(reason, "a message");
        let some = |numbers: &[u8]| {
            let mut kernel = Tables::default();
            numbers.iter().for_each(|number| kernel.add_route(Route::on_link(net(*number), 7, PROTOCOL)));
            kernel
        };
        let mut state = NodeState::default();
        state.routes.insert(net(0), RouteTarget::Local);
        state.routes.insert(net(1), vxlan());
        state.routes.insert(net(2), RouteTarget::Ipip { router: [192, 0, 2, 2].into() });
        state.routes.insert(net(3), RouteTarget::Direct { router: [192, 0, 2, 3].into() });
        for (there, told, expected) in [
            (&[1, 2, 3][..], vec![], ""),
            (&[2, 3], vec![], "(10.1.1.0/26 by VXLAN to node b)"),
            (&[1, 3], vec![], "(10.1.2.0/26 by IPIP to 192.0.2.2)"),
            (&[1, 2], vec![], "(10.1.3.0/26 by way of 192.0.2.3)"),
            (&[], vec![condition(Reason::NetworkPartNotInForce)], "by VXLAN to node b, 10.1.2.0/26 by IPIP"),
            (&[], vec![condition(Reason::ForeignVxlanLink)], ""),
            (&[], vec![condition(Reason::RouteRefused)], ""),
        ] {
            let found = without_route(&state, &some(there), &told);
            let message = found.as_ref().map_or("", |found| found.message.as_str());
            assert_eq!(message.is_empty(), expected.is_empty(), "{there:?} {told:?}: {message}");
            assert!(message.contains(expected), "{there:?} {told:?}: {message}");
            assert!(found.iter().all(|found| found.reason == Reason::BlockUnreachable));
        }
        (4..30).for_each(|number| drop(state.routes.insert(net(number), vxlan())));
        let many = without_route(&state, &some(&[1, 2, 3]), &[]).unwrap();
        assert!(many.message.contains("10.1.13.0/26 by VXLAN to node b, 16 more)"), "{}", many.message);
    }
}

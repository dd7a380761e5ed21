//! The words in which operators see why the speaker has chosen a route.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use tortie_bgp::calico::Forwarding;
use tortie_bgp::codec::Origin;
use tortie_bgp::rib::{CandidateRoute, NotAdvertised, NotUsable, PeerId, RouteOutcome, Step, Why};
use tortie_dataplane::SystemRoutes;

use super::shown::shown_route;
use crate::control::{BgpAdvertised, BgpCandidate, BgpInKernel, BgpOutcome, BgpWhy};

pub(super) fn shown(
    prefix: IpNet,
    why: Why,
    addresses: &BTreeMap<PeerId, SocketAddr>,
    kernel: BgpInKernel,
) -> BgpWhy {
    let candidates = why.candidates.into_iter().map(|route| candidate(prefix, &route, addresses)).collect();
    let peers = why.told.into_iter().filter_map(|(id, told)| {
        let peer = *addresses.get(&id)?;
        Some(match told {
            Ok(attributes) => {
                BgpAdvertised { peer, next_hop: Some(attributes.next_hop.address), reason: None }
            }
            Err(reason) => BgpAdvertised { peer, next_hop: None, reason: Some(not_advertised(&reason)) },
        })
    });
    BgpWhy { prefix, candidates, peers: peers.collect(), kernel }
}

fn candidate(
    prefix: IpNet,
    route: &CandidateRoute,
    addresses: &BTreeMap<PeerId, SocketAddr>,
) -> BgpCandidate {
    let CandidateRoute { source, attributes, stale, outcome } = route;
    let reason = cause(route);
    let outcome = match outcome {
        RouteOutcome::Best(_) => BgpOutcome::Best,
        RouteOutcome::AsGood(_) => BgpOutcome::AsGood,
        RouteOutcome::Worse(_) => BgpOutcome::Worse,
        RouteOutcome::Rejected(_) => BgpOutcome::Rejected,
        RouteOutcome::NotUsable(_) => BgpOutcome::NotUsable,
        RouteOutcome::NextHopUnreachable => BgpOutcome::NextHopUnreachable,
    };
    BgpCandidate {
        route: shown_route(prefix, *source, attributes, addresses),
        origin: match attributes.origin {
            Origin::Igp => "IGP",
            Origin::Egp => "EGP",
            Origin::Incomplete => "incomplete",
        }
        .to_owned(),
        med: attributes.med,
        stale: *stale,
        outcome,
        reason,
    }
}

/// The reason for what became of a route.
pub(super) fn cause(route: &CandidateRoute) -> String {
    match &route.outcome {
        RouteOutcome::Best(None) => "there is no other usable route".to_owned(),
        RouteOutcome::Best(Some(by)) => format!("decided by {}", step(*by)),
        RouteOutcome::AsGood(by) => {
            format!("as good for forwarding; the best one has {}", step(*by))
        }
        RouteOutcome::Worse(by) => format!("another one has {}", step(*by)),
        RouteOutcome::Rejected(rule) => rejected("import", rule.as_deref()),
        RouteOutcome::NotUsable(reason) => not_usable(*reason).to_owned(),
        RouteOutcome::NextHopUnreachable => {
            format!("the node has no route to the next hop {}", route.attributes.next_hop.address)
        }
    }
}

/// The property by which a step prefers a route.
fn step(step: Step) -> &'static str {
    match step {
        Step::LocalPreference => "the higher LOCAL_PREF",
        Step::OwnRoute => "the origin here: own routes win",
        Step::PathLength => "the shorter AS_PATH",
        Step::Origin => "the lower ORIGIN",
        Step::ExitDiscriminator => "the lower MULTI_EXIT_DISC",
        Step::External => "an external peer",
        Step::Cost => "the cheaper way to the next hop",
        Step::Identifier => "the lower BGP identifier",
        Step::ClusterList => "the shorter CLUSTER_LIST",
        Step::Address => "the lower address of the peer",
    }
}

fn rejected(direction: &str, rule: Option<&str>) -> String {
    rule.map_or_else(
        || format!("no {direction} rule accepts it"),
        |rule| format!("rejected on {direction}: {rule}"),
    )
}

fn not_usable(reason: NotUsable) -> &'static str {
    match reason {
        NotUsable::ImpossibleNextHop => "its next hop is no address of a router",
        NotUsable::LinkLocalNextHop => {
            "its next hop is a link-local address, which leads nowhere from other links; let the peer send a global one"
        }
        NotUsable::OwnNextHop => "its next hop is this node",
        NotUsable::OwnAutonomousSystem => {
            "the own AS number is in its AS_PATH (numAllowedLocalASNumbers allows that)"
        }
        NotUsable::OwnOriginator => "it comes from this node (ORIGINATOR_ID)",
        NotUsable::OwnCluster => "it has passed this reflector's cluster (CLUSTER_LIST)",
    }
}

fn not_advertised(reason: &NotAdvertised) -> String {
    match reason {
        NotAdvertised::NoSession => "there is no session".to_owned(),
        NotAdvertised::OtherFamily => "the session is for the other family".to_owned(),
        NotAdvertised::Sender => "the route is its own".to_owned(),
        NotAdvertised::Community(community) => format!("the community {community} keeps the route here"),
        NotAdvertised::NotReflected => {
            "the route is from an internal peer, and this node is no route reflector for either".to_owned()
        }
        NotAdvertised::Rejected(rule) => rejected("export", rule.as_deref()),
        NotAdvertised::NoNextHop => {
            "this node has no address of the family that could be the next hop".to_owned()
        }
    }
}

/// Why the kernel has what it has. `unreachable` are the next hops without a route, `problems` those of the last comparison.
pub(super) fn in_kernel<'a>(
    prefix: &IpNet,
    forwarding: &Forwarding,
    kernel: &SystemRoutes,
    unreachable: impl Fn(&IpAddr) -> bool,
    mut problems: impl Iterator<Item = &'a String>,
) -> BgpInKernel {
    let route = kernel.learned.clone();
    let reason = match forwarding {
        Forwarding::Nothing(reason) => Some(reason.to_string()),
        Forwarding::Via(_) if route.is_some() => None,
        Forwarding::Via(next_hops) if next_hops.iter().all(unreachable) => {
            Some("the node has no route to any of its next hops".to_owned())
        }
        Forwarding::Via(_) => {
            let named = format!("route to {prefix} ");
            let problem = problems.find(|problem| problem.contains(&named)).cloned();
            Some(problem.unwrap_or_else(|| "the agent has not written it yet; ask again".to_owned()))
        }
    };
    BgpInKernel { route, reason, others: kernel.others.clone() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tortie_bgp::calico::NotForwarded;

    #[test]
    fn the_kernel_has_a_route_or_a_reason() {
        let prefix: IpNet = "10.1.0.0/16".parse().unwrap();
        let hop: IpAddr = "192.0.2.1".parse().unwrap();
        let via = Forwarding::Via([hop].into());
        let learned = format!("route to {prefix} via {hop}");
        let empty = SystemRoutes::default();
        let there = SystemRoutes { learned: Some(learned.clone()), ..empty.clone() };
        let foreign = SystemRoutes { others: vec!["another one".to_owned()], ..empty.clone() };
        let problem = format!("the foreign route X occupies the place of {learned}; Tortie leaves it alone");
        let own = Forwarding::Nothing(NotForwarded::Own);
        for (forwarding, kernel, is_unreachable, problems, expected) in [
            (&via, &there, false, vec![], None),
            (&via, &empty, true, vec![], Some("no route to any of its next hops")),
            (&via, &foreign, false, vec![problem], Some("occupies the place")),
            (&via, &empty, false, vec![], Some("not written it yet")),
            (&own, &empty, false, vec![], Some("own route")),
        ] {
            let shown = in_kernel(&prefix, forwarding, kernel, |_| is_unreachable, problems.iter());
            assert_eq!(shown.route.is_some(), kernel.learned.is_some());
            assert_eq!(shown.others.len(), kernel.others.len());
            let reason = shown.reason.unwrap_or_default();
            assert!(
                reason.contains(expected.unwrap_or("")) && reason.is_empty() == expected.is_none(),
                "{reason}"
            );
        }
    }
}

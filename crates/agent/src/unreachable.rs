//! The other nodes to whose pods this node has no route, although it should: conditions with cause and remedy.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_calc::{NoRoute, Unrouted};
use tortie_dataplane::Reason;

use crate::unsupported::Unsupported;

/// The time for which a node that joins may lack what others need of it: its agent starts, and announces one thing after the other.
const GRACE: Duration = Duration::from_secs(60);
/// The maximum number of nodes with conditions of their own. If a setting is wrong, all nodes of the cluster are out of reach.
const MOST_NODES: usize = 10;
/// The maximum number of networks in a message.
const MOST_NETWORKS: usize = 5;

/// A node, and a cause.
type Cause = (String, NoRoute);

/// The nodes without routes.
#[derive(Debug, Default)]
pub(crate) struct Unreachable {
    since: BTreeMap<Cause, Instant>,
    /// Those that are reported, with the networks to which no route leads.
    reported: BTreeMap<String, Vec<(NoRoute, Vec<IpNet>)>>,
}

impl Unreachable {
    /// Takes what has no route now.
    pub(crate) fn update(&mut self, without_route: &BTreeMap<&str, Unrouted<'_>>, now: Instant) {
        let former = std::mem::take(&mut self.since);
        self.reported.clear();
        for (node, causes) in without_route {
            for (no_route, nets) in causes {
                let cause = ((*node).to_owned(), (*no_route).clone());
                let since = former.get(&cause).copied().unwrap_or(now);
                self.since.insert(cause, since);
                // A node without IPv6 in a cluster of both families serves IPv4.
                let is_meant = matches!(no_route, NoRoute::NoOwnAddress(IpVersion::V6));
                let is_early = no_route.is_usual_at_first() && now.saturating_duration_since(since) < GRACE;
                if !is_meant && !is_early {
                    let reported = self.reported.entry((*node).to_owned()).or_default();
                    reported.push(((*no_route).clone(), nets.clone()));
                }
            }
        }
    }

    /// The conditions of the node of this name.
    pub(crate) fn conditions(&self, local: &str) -> Vec<Unsupported> {
        let condition = |node: &str, message| Unsupported {
            object: Key::global(Kind::Node, node),
            reason: Reason::BlockUnreachable,
            message,
        };
        let named = self.reported.iter().take(MOST_NODES);
        let mut conditions: Vec<Unsupported> = named
            .flat_map(|(node, causes)| {
                causes.iter().map(move |(cause, nets)| condition(node, message(cause, nets)))
            })
            .collect();
        let others: Vec<&str> = self.reported.keys().skip(MOST_NODES).map(String::as_str).collect();
        if let Some(first) = others.first() {
            let message = format!(
                "no route leads to the pods of {} further nodes, of which {first} is the first",
                others.len()
            );
            conditions.push(condition(local, message));
        }
        conditions
    }

    /// Returns whether a condition names the node.
    pub(crate) fn names(&self, node: &str) -> bool {
        self.reported.keys().take(MOST_NODES).any(|named| named == node)
    }
}

/// The nodes whose tunnel addresses do not count (policy decision 51), without those that are named already because of their pods.
pub(crate) fn refused_tunnels<'a>(
    refused: impl Iterator<Item = (&'a str, &'a str)>,
    unreachable: &Unreachable,
) -> Vec<Unsupported> {
    let others = refused.filter(|(node, _)| !unreachable.names(node));
    let unsupported = others.map(|(node, problem)| Unsupported {
        object: Key::global(Kind::Node, node),
        reason: Reason::RouteRefused,
        message: format!(
            "no tunnel leads there, and none to its pods: {problem}. If somebody else has annotated the Node, find out who"
        ),
    });
    unsupported.collect()
}

/// Names some networks, and counts the others.
pub(crate) fn some_of(nets: &[IpNet]) -> String {
    let mut named: Vec<String> = nets.iter().take(MOST_NETWORKS).map(ToString::to_string).collect();
    named.extend((nets.len() > MOST_NETWORKS).then(|| format!("{} more", nets.len() - MOST_NETWORKS)));
    named.join(", ")
}

fn message(cause: &NoRoute, nets: &[IpNet]) -> String {
    let nets = some_of(nets);
    let address = |version: &IpVersion| match version {
        IpVersion::V4 => Node::ADDRESS,
        IpVersion::V6 => Node::ADDRESS_V6,
    };
    let tunnel = |version: &IpVersion| match version {
        IpVersion::V4 => Node::VXLAN_ADDRESS,
        IpVersion::V6 => Node::VXLAN_ADDRESS_V6,
    };
    match cause {
        NoRoute::NotInNetwork => format!(
            "no direct route leads to its pods ({nets}): it is not in the network of this node as the annotations {} and IPv6Address of both \
             say, or one of both is a Windows node with an overlay network. Use a pool with vxlanMode CrossSubnet, or BGP",
            Node::ADDRESS
        ),
        NoRoute::NoAddress(version) => format!(
            "no route leads to its pods ({nets}): the Node has no {version} address of its own (annotation {}). Look whether Tortie's agent \
             runs there and what it reports, and whether the Node has an InternalIP of {version} (kubelet --node-ip)",
            address(version)
        ),
        NoRoute::NoOwnAddress(version) => format!(
            "no route leads to its pods ({nets}): this node has no {version} address of its own (annotation {}); give it an InternalIP of \
             {version} (kubelet --node-ip)",
            address(version)
        ),
        NoRoute::NoTunnelAddress(version) => format!(
            "no route leads to its pods ({nets}): the Node announces no {version} tunnel address (annotation {}). Look whether Tortie's agent \
             runs there, and whether an IPPool with allowedUses Tunnel is for the node and has addresses left",
            tunnel(version)
        ),
        NoRoute::TunnelRefused(problem) => format!(
            "no tunnel leads there, and none to its pods ({nets}): {problem}. If somebody else has annotated the Node, find out who"
        ),
        NoRoute::IpipToWindows => format!(
            "no route leads to its pods ({nets}): their pool has IPIP, and the node runs Windows, which has none; move the pods to a pool with \
             vxlanMode: Always (tortie pool migrate)"
        ),
        NoRoute::IpipDisabled(node) => format!(
            "no route leads to its pods ({nets}): their pool has IPIP, and node {node} has none, because FelixConfiguration default or \
             node.{node} has ipipEnabled false; remove that setting, or use another mode (tortie pool migrate)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(count: u8) -> Vec<IpNet> {
        (0..count).map(|number| format!("10.0.{number}.0/26").parse().unwrap()).collect()
    }

    /// Updates with these nodes and causes, each with as many networks, and returns the messages.
    fn told(known: &mut Unreachable, found: &[(&str, NoRoute, u8)], now: Instant) -> Vec<String> {
        let mut without_route: BTreeMap<&str, Unrouted<'_>> = BTreeMap::new();
        for (node, cause, count) in found {
            without_route.entry(node).or_default().insert(cause, nets(*count));
        }
        known.update(&without_route, now);
        let conditions = known.conditions("local");
        assert!(conditions.iter().all(|it| it.reason == Reason::BlockUnreachable), "{conditions:?}");
        conditions.iter().map(|it| format!("{}: {}", it.object, it.message)).collect()
    }

    #[test]
    fn each_cause_is_named_with_networks_and_remedy() {
        let v4 = IpVersion::V4;
        for (cause, expected, remedy) in [
            (
                NoRoute::NotInNetwork,
                "no direct route leads to its pods (10.0.0.0/26, 10.0.1.0/26)",
                "CrossSubnet",
            ),
            (NoRoute::NoAddress(v4), "annotation projectcalico.org/IPv4Address", "InternalIP"),
            (NoRoute::NoOwnAddress(v4), "this node has no IPv4 address", "--node-ip"),
            (NoRoute::NoTunnelAddress(v4), "projectcalico.org/IPv4VXLANTunnelAddr", "allowedUses Tunnel"),
            (NoRoute::TunnelRefused("it is a pod's".to_owned()), "it is a pod's", "find out who"),
            (NoRoute::IpipToWindows, "runs Windows", "tortie pool migrate"),
            (NoRoute::IpipDisabled("b".to_owned()), "node.b has ipipEnabled false", "remove that setting"),
        ] {
            let (mut known, start) = (Unreachable::default(), Instant::now());
            let found = [("b", cause.clone(), 2)];
            told(&mut known, &found, start);
            let told = told(&mut known, &found, start + GRACE);
            assert_eq!(told.len(), 1, "{told:?}");
            for part in ["Node b: no ", "(10.0.0.0/26, 10.0.1.0/26)", expected, remedy] {
                assert!(told[0].contains(part), "{cause:?}: {part} is not in {}", told[0]);
            }
        }
        // A node without IPv6 in a cluster of both families is no fault.
        let found = [("b", NoRoute::NoOwnAddress(IpVersion::V6), 2)];
        let (mut known, start) = (Unreachable::default(), Instant::now());
        told(&mut known, &found, start);
        assert_eq!(told(&mut known, &found, start + GRACE), Vec::<String>::new());
        let many = told(&mut Unreachable::default(), &[("b", NoRoute::NotInNetwork, 7)], Instant::now());
        assert!(many[0].contains("10.0.4.0/26, 2 more)"), "{many:?}");
    }

    /// A node that joins has a block before it has announced everything. What does not end by itself is told at once.
    #[test]
    fn what_is_usual_while_a_node_joins_is_reported_later() {
        let (mut known, start) = (Unreachable::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let joins = || ("new", NoRoute::NoTunnelAddress(IpVersion::V4), 1);
        let far = || ("far", NoRoute::NotInNetwork, 1);
        for (second, found, expected) in [
            (0, vec![joins(), far()], vec!["far"]),
            (59, vec![joins()], vec![]),
            (60, vec![joins(), far()], vec!["far", "new"]),
            (61, vec![], vec![]),
            // It begins anew.
            (62, vec![joins()], vec![]),
            (121, vec![joins()], vec![]),
            (122, vec![joins()], vec!["new"]),
            // Another cause, which may be a step forward.
            (123, vec![("new", NoRoute::NoAddress(IpVersion::V4), 1)], vec![]),
        ] {
            let told = told(&mut known, &found, at(second));
            let nodes: Vec<&str> =
                told.iter().filter_map(|it| it.strip_prefix("Node ")?.split(':').next()).collect();
            assert_eq!(nodes, expected, "{second}: {told:?}");
        }
    }

    #[test]
    fn ten_nodes_are_named_and_the_others_are_counted() {
        let names: Vec<String> = (0..25).map(|number| format!("node-{number:02}")).collect();
        let found: Vec<_> = names.iter().map(|name| (name.as_str(), NoRoute::NotInNetwork, 1)).collect();
        let told = told(&mut Unreachable::default(), &found, Instant::now());
        assert_eq!(told.len(), MOST_NODES + 1);
        let last =
            "Node local: no route leads to the pods of 15 further nodes, of which node-10 is the first";
        assert_eq!(told[MOST_NODES], last);
    }

    /// One condition about a node is enough; one without pods has it, too.
    #[test]
    fn a_refused_tunnel_is_reported_once() {
        let mut known = Unreachable::default();
        told(&mut known, &[("a", NoRoute::TunnelRefused("no".to_owned()), 1)], Instant::now());
        let refused = refused_tunnels([("a", "no"), ("b", "odd")].into_iter(), &known);
        let refused: Vec<String> =
            refused.iter().map(|it| format!("{}: {}", it.object, it.message)).collect();
        assert!(
            refused.len() == 1 && refused[0].starts_with("Node b: ") && refused[0].contains("odd"),
            "{refused:?}"
        );
    }
}

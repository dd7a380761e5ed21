//! What has changed since an earlier run.

use std::collections::BTreeMap;

use anyhow::Context;
use ipnet::IpNet;

use super::plan::PodRoute;

/// Routes that come and go. A route that leads to another node is in both lists.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Routes of the earlier run.
    pub(super) removed: Vec<PodRoute>,
    /// Routes of this one.
    pub(super) added: Vec<PodRoute>,
}

impl Changes {
    /// All routes, for a router that has none.
    pub(super) fn all(routes: Vec<PodRoute>) -> Self {
        Self { removed: Vec::new(), added: routes }
    }

    /// The differences of two runs. Most routers know a node by its address, and that of AWS by its machine.
    pub(super) fn between(earlier: &[PodRoute], now: &[PodRoute], by_machine: bool) -> Self {
        Self { removed: missing(earlier, now, by_machine), added: missing(now, earlier, by_machine) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty()
    }

    /// Whether an earlier route to this destination leads elsewhere now.
    pub(super) fn replaces(&self, destination: &IpNet) -> bool {
        self.removed.iter().any(|route| route.destination == *destination)
    }

    /// The routes to destinations that have none any more.
    pub(super) fn gone(&self) -> impl Iterator<Item = &PodRoute> {
        self.removed
            .iter()
            .filter(|route| !self.added.iter().any(|added| added.destination == route.destination))
    }
}

/// The routes of an earlier run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Earlier {
    /// Those of nodes about which something is not known for a moment. The router keeps them.
    pub(super) kept: Vec<PodRoute>,
    /// The others, which are compared with the routes of now.
    pub(super) compared: Vec<PodRoute>,
}

impl Earlier {
    pub(super) fn new(routes: Vec<PodRoute>, keeps: impl Fn(&PodRoute) -> bool) -> Self {
        let (kept, compared) = routes.into_iter().partition(keeps);
        Self { kept, compared }
    }

    /// What the router has when it has followed the changes. A cloud goes on sending to the earlier machine while the one of now is not
    /// known, so its name stays: otherwise the next run could neither replace nor delete the route.
    pub(super) fn followed_by(self, now: Vec<PodRoute>) -> Vec<PodRoute> {
        let machines = self.compared.into_iter().map(|route| (route.destination, route.provider_id));
        let machines: BTreeMap<IpNet, Option<String>> = machines.collect();
        let named = now.into_iter().map(|route| {
            let earlier = || machines.get(&route.destination).cloned().flatten();
            PodRoute { provider_id: route.provider_id.clone().or_else(earlier), ..route }
        });
        let mut all: Vec<PodRoute> = named.chain(self.kept).collect();
        all.sort_by_key(|route| route.destination);
        all
    }
}

/// The routes that others do not have. The name of the node means nothing to a router.
fn missing(routes: &[PodRoute], others: &[PodRoute], by_machine: bool) -> Vec<PodRoute> {
    let leads_to = |route: &PodRoute| (route.next_hop, route.provider_id.clone().filter(|_| by_machine));
    let others: BTreeMap<IpNet, _> =
        others.iter().map(|route| (route.destination, leads_to(route))).collect();
    let is_missing = |route: &&PodRoute| others.get(&route.destination) != Some(&leads_to(route));
    routes.iter().filter(is_missing).cloned().collect()
}

/// Reads what an earlier run has printed.
pub(super) fn read(path: &str) -> anyhow::Result<Vec<PodRoute>> {
    let text = std::fs::read(path).with_context(|| format!("--since {path}"))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("--since {path} is no output of: tortie routes -o json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_the_routes_that_lead_elsewhere() {
        let route = |destination: &str, next_hop: &str, node: &str, machine: Option<&str>| PodRoute {
            destination: destination.parse().unwrap(),
            next_hop: next_hop.parse().unwrap(),
            node: node.to_owned(),
            provider_id: machine.map(str::to_owned),
        };
        let earlier = [
            route("10.0.0.0/26", "192.0.2.1", "one", None),
            route("10.0.0.64/26", "192.0.2.1", "one", None),
            route("10.0.0.128/26", "192.0.2.2", "two", Some("a")),
            route("10.0.0.192/26", "192.0.2.3", "three", None),
        ];
        let now = [
            // Under another name, by way of another node, on another machine; one is gone, and one is new.
            route("10.0.0.0/26", "192.0.2.1", "renamed", None),
            route("10.0.0.64/26", "192.0.2.2", "two", None),
            route("10.0.0.128/26", "192.0.2.2", "two", Some("b")),
            route("10.0.1.0/26", "192.0.2.1", "one", None),
        ];
        let changes = Changes::between(&earlier, &now, true);
        assert_eq!(changes.removed, earlier[1..]);
        assert_eq!(changes.added, now[1..]);
        assert_eq!(changes.gone().collect::<Vec<_>>(), [&earlier[3]]);
        assert!(changes.replaces(&now[1].destination) && !changes.replaces(&now[3].destination));
        assert!(Changes::between(&earlier, &earlier, true).is_empty() && !changes.is_empty());
        // The same address on another machine.
        let changes = Changes::between(&earlier[2..3], &now[2..3], false);
        assert!(changes.is_empty(), "{changes:?}");
    }
}

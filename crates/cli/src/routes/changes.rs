//! What has changed since earlier runs.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use ipnet::IpNet;

use super::plan::{PodRoute, RouteTarget};

/// Routes that come and go. A route that leads to another node is in both lists.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Routes of earlier runs, each of them once.
    pub(super) removed: Vec<PodRoute>,
    /// Routes of this one.
    pub(super) added: Vec<PodRoute>,
    /// The destinations of earlier routes, and whether the router certainly has a route to them.
    earlier: BTreeMap<IpNet, bool>,
}

/// Whether a router has a route to a destination before the changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RouteBefore {
    /// No run has added one.
    No,
    /// A run may have been interrupted before or after it has added or removed one.
    Perhaps,
    /// The last run has added one or left it there.
    Yes,
}

impl Changes {
    /// All routes, for a router that has none.
    pub(super) fn all(routes: Vec<PodRoute>) -> Self {
        Self { added: routes, ..Self::default() }
    }

    /// The differences between the routes that a router may have and those of now. Most routers know a node by its address, and that of
    /// AWS by its machine. A route that the router does not certainly have is added again.
    pub(super) fn between(earlier: &[PodRoute], now: &[PodRoute], by_machine: bool) -> Self {
        let wanted: BTreeSet<RouteTarget> = now.iter().map(|route| route.target(by_machine)).collect();
        let mut changes = Self::default();
        let (mut seen, mut present) = (BTreeSet::new(), BTreeSet::new());
        for route in earlier {
            *changes.earlier.entry(route.destination).or_default() |= !route.uncertain;
            let target = route.target(by_machine);
            if wanted.contains(&target) {
                present.extend((!route.uncertain).then_some(route.destination));
            } else if seen.insert(target) {
                changes.removed.push(route.clone());
            }
        }
        for route in &changes.removed {
            present.remove(&route.destination);
        }
        changes.added = now.iter().filter(|route| !present.contains(&route.destination)).cloned().collect();
        changes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty()
    }

    /// Whether the router has a route to this destination before the changes.
    pub(super) fn presence(&self, destination: &IpNet) -> RouteBefore {
        match self.earlier.get(destination) {
            None => RouteBefore::No,
            Some(false) => RouteBefore::Perhaps,
            Some(true) => RouteBefore::Yes,
        }
    }

    /// The routes to destinations that have none any more. After an interruption, there may be several to one destination.
    pub(super) fn gone(&self) -> impl Iterator<Item = &PodRoute> {
        let added: BTreeSet<IpNet> = self.added.iter().map(|route| route.destination).collect();
        self.removed.iter().filter(move |route| !added.contains(&route.destination))
    }

    /// The destinations that have no route any more.
    pub(super) fn gone_destinations(&self) -> BTreeSet<IpNet> {
        self.gone().map(|route| route.destination).collect()
    }
}

/// The routes that a router may have.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Earlier {
    /// Those of nodes about which something is not known for a moment. The router keeps them.
    kept: Vec<PodRoute>,
    /// The others, which are compared with the routes of now.
    pub(super) compared: Vec<PodRoute>,
}

impl Earlier {
    pub(super) fn new(routes: Vec<PodRoute>, keeps: impl Fn(&PodRoute) -> bool) -> Self {
        let (kept, compared) = routes.into_iter().partition(keeps);
        Self { kept, compared }
    }

    /// What the router has when it has followed the changes.
    pub(super) fn followed_by(&self, now: &[PodRoute]) -> Vec<PodRoute> {
        sorted(self.with_machines(now).into_iter().chain(self.kept.iter().cloned()))
    }

    /// What the router may have if it has followed some of the changes: each route that comes or goes is uncertain.
    pub(super) fn attempted(&self, now: &[PodRoute]) -> Vec<PodRoute> {
        let now = self.with_machines(now);
        let Changes { removed, added, .. } = Changes::between(&self.compared, &now, true);
        let is_added: BTreeSet<RouteTarget> = added.iter().map(|route| route.target(true)).collect();
        let unchanged = now.into_iter().filter(|route| !is_added.contains(&route.target(true)));
        let changed = removed.into_iter().chain(added).map(|route| PodRoute { uncertain: true, ..route });
        sorted(unchanged.chain(changed).chain(self.kept.iter().cloned()))
    }

    /// The routes of now. A cloud goes on sending to the earlier machine while the one of now is not known, so its name stays: otherwise
    /// the next run could neither replace nor delete the route. After an interruption, there may be several earlier machines.
    fn with_machines(&self, now: &[PodRoute]) -> Vec<PodRoute> {
        let mut machines: BTreeMap<IpNet, BTreeSet<&String>> = BTreeMap::new();
        for route in &self.compared {
            machines.entry(route.destination).or_default().extend(&route.provider_id);
        }
        let named = |route: &PodRoute| match machines.get(&route.destination) {
            Some(machines) if route.provider_id.is_none() && !machines.is_empty() => {
                let with = |id: &&String| PodRoute { provider_id: Some((*id).clone()), ..route.clone() };
                machines.iter().map(with).collect()
            }
            _ => vec![route.clone()],
        };
        now.iter().flat_map(named).collect()
    }
}

fn sorted(routes: impl Iterator<Item = PodRoute>) -> Vec<PodRoute> {
    let mut routes: Vec<PodRoute> = routes.collect();
    routes.sort_by_key(|route| route.target(true));
    routes
}

/// Reads what earlier runs have printed.
pub(super) fn read(paths: &[String]) -> anyhow::Result<Vec<PodRoute>> {
    let read = |path: &String| {
        let text = std::fs::read(path).with_context(|| format!("--since {path}"))?;
        serde_json::from_slice(&text)
            .with_context(|| format!("--since {path} is no output of: tortie routes -o json"))
    };
    Ok(merged(paths.iter().map(read).collect::<anyhow::Result<_>>()?))
}

/// What a router may have after several runs. A route is uncertain if one of them does not have it.
fn merged(lists: Vec<Vec<PodRoute>>) -> Vec<PodRoute> {
    let certain = |list: &Vec<PodRoute>| {
        list.iter().filter(|route| !route.uncertain).map(|route| route.target(true)).collect()
    };
    let certain: Vec<BTreeSet<RouteTarget>> = lists.iter().map(certain).collect();
    let all: BTreeMap<RouteTarget, PodRoute> =
        lists.into_iter().flatten().map(|route| (route.target(true), route)).collect();
    all.into_iter()
        .map(|(target, route)| {
            let uncertain = !certain.iter().all(|list| list.contains(&target));
            PodRoute { uncertain, ..route }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(destination: &str, next_hop: &str, node: &str, machine: Option<&str>) -> PodRoute {
        PodRoute {
            destination: destination.parse().unwrap(),
            next_hop: next_hop.parse().unwrap(),
            node: node.to_owned(),
            provider_id: machine.map(str::to_owned),
            uncertain: false,
        }
    }

    fn uncertain(route: &PodRoute) -> PodRoute {
        PodRoute { uncertain: true, ..route.clone() }
    }

    #[test]
    fn changes_are_the_routes_that_lead_elsewhere() {
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
        assert_eq!(changes.presence(&now[1].destination), RouteBefore::Yes);
        assert_eq!(changes.presence(&now[3].destination), RouteBefore::No);
        assert!(Changes::between(&earlier, &earlier, true).is_empty() && !changes.is_empty());
        // The same address on another machine.
        let changes = Changes::between(&earlier[2..3], &now[2..3], false);
        assert!(changes.is_empty(), "{changes:?}");
    }

    /// A route that one run had and the next one did not is there or not, so it is added or removed again.
    #[test]
    fn what_not_all_runs_have_is_uncertain() {
        let [same, old, new] = [("10.0.0.0/26", "1"), ("10.0.0.64/26", "1"), ("10.0.0.64/26", "2")]
            .map(|(destination, host)| route(destination, &format!("192.0.2.{host}"), "n", None));
        let lists = vec![vec![same.clone(), old.clone()], vec![same.clone(), new.clone()]];
        let merged = merged(lists);
        assert_eq!(merged, [same.clone(), uncertain(&old), uncertain(&new)]);
        let changes = Changes::between(&merged, &[same.clone(), new.clone()], false);
        assert_eq!((&changes.removed[..], &changes.added[..]), (&[uncertain(&old)][..], &[new][..]));
        assert_eq!(changes.presence(&old.destination), RouteBefore::Perhaps);
        let changes = Changes::between(&merged, &[same], false);
        assert_eq!((changes.gone().count(), changes.gone_destinations().len()), (2, 1));
    }

    /// However often a run is interrupted: the file has what all runs may have left, and a route that one of them may have removed.
    #[test]
    fn attempted_routes_are_those_of_all_interrupted_runs() {
        let [same, old, new, last] =
            [("10.0.0.0/26", "1"), ("10.0.0.64/26", "1"), ("10.0.0.64/26", "2"), ("10.0.0.64/26", "3")]
                .map(|(destination, host)| route(destination, &format!("192.0.2.{host}"), "n", None));
        let after = |earlier: &[PodRoute], now: &[&PodRoute]| {
            let now: Vec<PodRoute> = now.iter().copied().cloned().collect();
            Earlier::new(earlier.to_vec(), |_| false).attempted(&now)
        };
        let first = after(&[same.clone(), old.clone()], &[&same, &new]);
        assert_eq!(first, [same.clone(), uncertain(&old), uncertain(&new)]);
        let second = after(&first, &[&same, &last]);
        assert_eq!(second, [same.clone(), uncertain(&old), uncertain(&new), uncertain(&last)]);
        // The second run removes what the third one wants again.
        let removed = after(&[same.clone(), old.clone()], &[&same]);
        let changes = Changes::between(&removed, &[same.clone(), old.clone()], false);
        assert_eq!(changes.added, [old]);
        // A run that succeeds knows the rest.
        let known = Earlier::new(second, |_| false).followed_by(&[same.clone(), last.clone()]);
        assert_eq!(known, [same, last]);
    }

    /// Each machine to which AWS may send is in the file, so that the next run compares with all of them.
    #[test]
    fn all_machines_of_interrupted_runs_stay_known() {
        let of = |machine| route("10.0.0.0/26", "192.0.2.1", "n", machine);
        let earlier = Earlier::new(vec![uncertain(&of(Some("a"))), uncertain(&of(Some("b")))], |_| false);
        assert_eq!(earlier.followed_by(&[of(None)]), [of(Some("a")), of(Some("b"))]);
        assert_eq!(earlier.followed_by(&[of(Some("b"))]), [of(Some("b"))]);
    }
}

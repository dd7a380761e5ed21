//! The Nodes without a subnet lease in flannel's etcd, and the conditions about them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_dataplane::Reason;

use crate::unsupported::Unsupported;

/// How long a Node may be without a lease: a machine that starts gets its lease a moment after its Node.
const LEASE_DELAY: Duration = Duration::from_secs(60);

/// So many Nodes without a lease have a condition each. If etcd has lost its data, all Nodes of the cluster are without.
const MOST_NAMED: usize = 10;

/// The other Nodes without a lease.
#[derive(Default)]
pub(crate) struct MissingLeases {
    since: BTreeMap<String, Instant>,
    /// Those that have been without it for too long.
    overdue: Vec<String>,
}

impl MissingLeases {
    /// Takes the Nodes without a lease now. While etcd does not answer, nobody knows whether they have one, and no time passes.
    pub(crate) fn update<'a>(
        &mut self,
        missing: impl Iterator<Item = &'a str>,
        is_known: bool,
        now: Instant,
    ) {
        let mut former = std::mem::take(&mut self.since);
        let is_timed = |name: &str| is_known || self.overdue.iter().any(|overdue| overdue == name);
        let mut since = |name: &str| former.remove(name).filter(|_| is_timed(name)).unwrap_or(now);
        self.since = missing.map(|name| (name.to_owned(), since(name))).collect();
        let is_overdue = |since: &Instant| now.saturating_duration_since(*since) >= LEASE_DELAY;
        let overdue = self.since.iter().filter(|(_, since)| is_overdue(since));
        self.overdue = overdue.map(|(name, _)| name.clone()).collect();
    }

    pub(crate) fn conditions(&self) -> impl Iterator<Item = Unsupported> {
        let condition = |node: &String, message| Unsupported {
            object: Key::global(Kind::Node, node),
            reason: Reason::RouteRefused,
            message,
        };
        let named = move |node| {
            let message = format!(
                "no subnet lease in flannel's etcd is that of this Node, so no routes lead to its pods: check flanneld (or Tortie's agent) \
                 there. If flannel knows the machine by another address, name that in the annotation {}. If another Node has the same address, \
                 the lease counts as that Node's: delete the Node whose machine is gone",
                Node::FLANNEL_OVERWRITE.of(IpVersion::V4)
            );
            condition(node, message)
        };
        let further = self.overdue.get(MOST_NAMED).map(|node| {
            let count = self.overdue.len() - MOST_NAMED;
            let message = format!(
                "{count} further Nodes, of which this is the first, have no subnet lease in flannel's etcd: check whether etcd has lost its \
                 data, and restart flanneld (or Tortie's agents) there"
            );
            condition(node, message)
        });
        self.overdue.iter().take(MOST_NAMED).map(named).chain(further)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_a_lease_is_reported_after_a_minute() {
        let (start, mut missing) = (Instant::now(), MissingLeases::default());
        for (second, names, is_known, expected) in [
            (0, &["a", "b"][..], true, &[][..]),
            (30, &["a", "c"], true, &[]),
            (59, &["a", "b", "c"], true, &[]),
            (60, &["a", "b", "c"], true, &["a"]),
            (95, &["a", "b", "c"], true, &["a", "c"]),
            (100, &["b", "c"], true, &["c"]),
            (130, &["a", "b"], true, &["b"]),
            // etcd is away.
            (140, &["a", "b", "d"], false, &["b"]),
            (300, &["a", "b", "d"], false, &["b"]),
            (350, &["a", "b", "d"], true, &["b"]),
            (360, &["a", "b", "d"], true, &["a", "b", "d"]),
            (370, &[], true, &[]),
        ] {
            missing.update(names.iter().copied(), is_known, start + Duration::from_secs(second));
            let found: Vec<Unsupported> = missing.conditions().collect();
            let nodes: Vec<&str> = found.iter().map(|one| &*one.object.name).collect();
            assert_eq!(nodes, expected, "{second}");
            assert!(
                found
                    .iter()
                    .all(|one| one.message.contains("public-ip-overwrite") && one.object.kind == Kind::Node)
            );
        }
    }

    #[test]
    fn many_nodes_without_a_lease_are_counted() {
        let names: Vec<String> = (0..25).map(|number| format!("node-{number:02}")).collect();
        let (start, mut missing) = (Instant::now(), MissingLeases::default());
        for second in [0, 60] {
            let now = start + Duration::from_secs(second);
            missing.update(names.iter().map(String::as_str), true, now);
        }
        let found: Vec<Unsupported> = missing.conditions().collect();
        assert_eq!(found.len(), MOST_NAMED + 1);
        let last = &found[MOST_NAMED];
        assert_eq!(&*last.object.name, "node-10");
        assert!(
            last.message.starts_with("15 further Nodes, of which this is the first,"),
            "{}",
            last.message
        );
    }
}

//! Which nodes have vanished for long enough. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Names that something refers to and that no Node has, each with the time at which that was first seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Absence {
    since: BTreeMap<String, Instant>,
}

impl Absence {
    /// The names that have been without a Node for this time. `present` is a complete list. An empty one proves nothing:
    /// a cluster has nodes, and an API server that lost its data has none.
    pub(crate) fn overdue(
        &mut self,
        referenced: BTreeSet<String>,
        present: &BTreeSet<String>,
        now: Instant,
        grace: Duration,
    ) -> Vec<String> {
        if present.is_empty() {
            self.since.clear();
            return Vec::new();
        }
        let missing: BTreeSet<String> = referenced.difference(present).cloned().collect();
        self.since.retain(|node, _| missing.contains(node));
        for node in missing {
            self.since.entry(node).or_insert(now);
        }
        let overdue = self.since.iter().filter(|(_, since)| now.saturating_duration_since(**since) >= grace);
        overdue.map(|(node, _)| node.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_overdue_when_it_was_missing_all_the_time() {
        let start = Instant::now();
        let names = |names: &str| names.split_whitespace().map(str::to_owned).collect::<BTreeSet<String>>();
        let mut absence = Absence::default();
        for (second, referenced, present, expected) in [
            (0, "a b c", "a", ""),
            (59, "a b c", "a", ""),
            // `b` was there in between, and `c` is not referred to any more.
            (60, "a b", "a b", ""),
            (70, "a b c", "a", ""),
            (129, "a b c", "a", ""),
            (130, "a b c", "a", "b c"),
            (130, "a b c", "", ""),
            (131, "a b c", "a", ""),
            (191, "a b", "a", "b"),
        ] {
            let now = start + Duration::from_secs(second);
            let overdue = absence.overdue(names(referenced), &names(present), now, Duration::from_secs(60));
            assert_eq!(overdue.into_iter().collect::<BTreeSet<_>>(), names(expected), "at {second}");
        }
    }
}

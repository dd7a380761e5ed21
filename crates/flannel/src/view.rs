//! What a node knows of all leases: plain data, which changes of etcd change.

use std::collections::BTreeMap;

use tortie_api::kubernetes::FlannelLease;
use tortie_store::etcd::{Entry, EntryChange};

use crate::lease::{Holder, Subnets};
use crate::ranges::Ranges;

/// The leases by the names of their keys, as of some revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// The keys begin with this; it ends with a slash.
    prefix: String,
    ranges: Ranges,
    seen: BTreeMap<String, Seen>,
}

/// What is known of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The revision of its last write.
    pub(crate) revision: u64,
    /// Whether it ends without a renewal.
    pub(crate) has_lease: bool,
    /// Its subnets, if it has any.
    pub(crate) subnets: Option<Subnets>,
    /// Whether flannel's configuration has such subnets.
    pub(crate) fits: bool,
    /// Its last valid value.
    valid: Option<Holder>,
    /// Why its value, or the key itself, cannot be read.
    problem: Option<String>,
}

impl Seen {
    /// The node that holds the subnets now; unknown if that cannot be read.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        self.valid.as_ref().filter(|_| self.problem.is_none())
    }
}

impl View {
    /// Of keys with this prefix, which ends with a slash, and subnets of these ranges. Empty.
    #[must_use]
    pub fn new(prefix: String, ranges: Ranges) -> Self {
        Self { prefix, ranges, seen: BTreeMap::new() }
    }

    /// The key of subnets.
    pub(crate) fn key(&self, subnets: &Subnets) -> String {
        format!("{}{}", self.prefix, subnets.key_name())
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Ingests all keys. Where a value cannot be read, the last valid one stays in force.
    pub fn reset(&mut self, entries: Vec<Entry>) {
        let mut former = std::mem::take(&mut self.seen);
        for entry in entries {
            let Some(name) = self.name(&entry.key) else { continue };
            let former = former.remove(&name);
            self.seen.insert(name.clone(), seen(&self.ranges, &name, &entry, former));
        }
    }

    /// Ingests a change. One that is older than what is known has no effect.
    pub fn apply(&mut self, change: EntryChange) {
        let (key, revision) = match &change {
            EntryChange::Put(entry) => (&entry.key, entry.revision),
            EntryChange::Deleted { key, revision } => (key, *revision),
        };
        let Some(name) = self.name(key) else { return };
        let former = self.seen.remove(&name);
        if let Some(newer) = former.as_ref().filter(|former| former.revision > revision) {
            self.seen.insert(name, newer.clone());
        } else if let EntryChange::Put(entry) = change {
            self.seen.insert(name.clone(), seen(&self.ranges, &name, &entry, former));
        }
    }

    pub(crate) fn of(&self, subnets: &Subnets) -> Option<&Seen> {
        self.seen.get(&subnets.key_name())
    }

    /// All subnets that are taken.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (Subnets, &Seen)> {
        self.seen.values().filter_map(|seen| Some((seen.subnets?, seen)))
    }

    /// The ways to the pods of other nodes than this one, by key.
    #[must_use]
    pub fn others(
        &self,
        own: &Subnets,
        own_address: std::net::Ipv4Addr,
    ) -> BTreeMap<String, Vec<FlannelLease>> {
        let is_other = |seen: &&Seen| {
            let holder = seen.valid.as_ref();
            seen.subnets != Some(*own)
                && holder.is_some_and(|holder| holder.public_ip != own_address && !holder.leases.is_empty())
        };
        let others = self.seen.iter().filter(|(_, seen)| is_other(seen));
        others
            .filter_map(|(name, seen)| {
                Some((format!("{}{name}", self.prefix), seen.valid.as_ref()?.leases.clone()))
            })
            .collect()
    }

    /// The keys that cannot be read, with the reason.
    #[must_use]
    pub fn problems(&self) -> BTreeMap<String, String> {
        let problems = self.seen.iter().filter_map(|(name, seen)| {
            let problem = seen.problem.as_ref()?;
            let instead = match (&seen.valid, seen.subnets) {
                (Some(_), _) => "what it had before stays in force",
                (None, Some(_)) => "no route leads to its subnet, and nobody else gets it",
                (None, None) => "it has no effect",
            };
            Some((format!("{}{name}", self.prefix), format!("{problem}; {instead}")))
        });
        problems.collect()
    }

    fn name(&self, key: &str) -> Option<String> {
        key.strip_prefix(&self.prefix).map(str::to_owned)
    }
}

fn seen(ranges: &Ranges, name: &str, entry: &Entry, former: Option<Seen>) -> Seen {
    let subnets = Subnets::of_key_name(name);
    let fitting = subnets.as_ref().map_err(String::clone).and_then(|subnets| {
        // It would take the packets to pods of others.
        ranges.fit(subnets)?;
        Ok(subnets)
    });
    let fits = fitting.is_ok();
    let read = fitting.and_then(|subnets| Holder::of_value(subnets, &entry.value));
    let (valid, problem) = match read {
        Ok(holder) => (Some(holder), None),
        Err(problem) => (former.and_then(|former| former.valid), Some(problem)),
    };
    Seen { revision: entry.revision, has_lease: entry.has_lease, subnets: subnets.ok(), fits, valid, problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::NetConf;

    fn empty() -> View {
        let conf = r#"{"Network": "10.5.0.0/16", "Backend": {"Type": "host-gw"}}"#;
        View::new("/n/subnets/".to_owned(), Ranges::new(&NetConf::parse(conf).unwrap()).unwrap())
    }

    fn put(name: &str, value: &str, revision: u64) -> Entry {
        Entry { key: format!("/n/subnets/{name}"), value: value.to_owned(), revision, has_lease: true }
    }

    const OWN: &str = "10.5.1.0-24";
    const OTHER: &str = "10.5.2.0-24";

    fn host_gw(address: &str) -> String {
        format!(r#"{{"PublicIP":"{address}","BackendType":"host-gw"}}"#)
    }

    fn others(view: &View) -> Vec<String> {
        let others = view.others(&Subnets::of_key_name(OWN).unwrap(), "192.0.2.1".parse().unwrap());
        let shown = |(key, leases): (String, Vec<FlannelLease>)| format!("{key} {}", leases[0].public_ip);
        others.into_iter().map(shown).collect()
    }

    #[test]
    fn a_value_that_cannot_be_read_leaves_the_former_one_in_force() {
        let mut view = empty();
        view.apply(EntryChange::Put(put(OTHER, "{", 1)));
        assert_eq!(others(&view), [""; 0]);
        let problems: Vec<_> = view.problems().into_iter().collect();
        assert!(
            problems[0].0 == "/n/subnets/10.5.2.0-24" && problems[0].1.contains("no route leads"),
            "{problems:?}"
        );
        let known = ["/n/subnets/10.5.2.0-24 192.0.2.2"];
        view.apply(EntryChange::Put(put(OTHER, &host_gw("192.0.2.2"), 2)));
        assert_eq!((others(&view), view.problems().len()), (known.map(str::to_owned).to_vec(), 0));
        view.apply(EntryChange::Put(put(OTHER, "{", 3)));
        assert!(view.problems().values().all(|problem| problem.contains("stays in force")));
        assert_eq!((others(&view), view.problems().len()), (known.map(str::to_owned).to_vec(), 1));
        // Also by a new list.
        view.reset(vec![put(OTHER, "[]", 4), put("x", "{}", 4)]);
        assert_eq!((others(&view), view.problems().len()), (known.map(str::to_owned).to_vec(), 2));
        view.reset(vec![]);
        assert_eq!((others(&view), view.problems().len()), (vec![], 0));
    }

    #[test]
    fn own_leases_and_reservations_are_no_peers() {
        let mut view = empty();
        view.reset(vec![
            put(OWN, &host_gw("192.0.2.1"), 1),
            put("10.5.3.0-24", &host_gw("192.0.2.1"), 1),
            put("10.5.4.0-24", r#"{"PublicIP":"192.0.2.4"}"#, 1),
            put(OTHER, &host_gw("192.0.2.2"), 1),
        ]);
        assert_eq!(others(&view), ["/n/subnets/10.5.2.0-24 192.0.2.2"]);
        // Somebody else has taken the own one: pods of this node still have it.
        view.apply(EntryChange::Put(put(OWN, &host_gw("192.0.2.3"), 2)));
        assert_eq!(others(&view), ["/n/subnets/10.5.2.0-24 192.0.2.2"]);
    }

    /// By the longest prefix, they would take the packets to pods of others.
    #[test]
    fn leases_that_are_no_subnets_of_the_configuration_have_no_routes() {
        let mut view = empty();
        let names = ["10.5.2.128-25", "10.5.2.7-32", "0.0.0.0-0", "192.168.0.0-24", "10.5.3.0-24&fd00::-64"];
        view.reset(names.map(|name| put(name, &host_gw("192.0.2.9"), 1)).to_vec());
        assert_eq!((others(&view), view.problems().len()), (vec![], names.len()));
        let problems = view.problems();
        let problem = &problems["/n/subnets/10.5.2.7-32"];
        assert!(
            problem.contains("10.5.2.7/32 is no subnet") && problem.contains("no route leads"),
            "{problem}"
        );
    }

    #[test]
    fn an_older_change_has_no_effect() {
        let mut view = empty();
        view.apply(EntryChange::Put(put(OTHER, &host_gw("192.0.2.2"), 5)));
        view.apply(EntryChange::Put(put(OTHER, &host_gw("192.0.2.9"), 4)));
        let gone = |revision| EntryChange::Deleted { key: "/n/subnets/10.5.2.0-24".to_owned(), revision };
        view.apply(gone(4));
        assert_eq!(others(&view), ["/n/subnets/10.5.2.0-24 192.0.2.2"]);
        view.apply(gone(6));
        assert_eq!(others(&view), [""; 0]);
    }
}

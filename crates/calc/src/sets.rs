//! The sets that active policies name, and their members.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::Key;
use tortie_dataplane::{Delta, NodeState};
use tortie_policy::SetSource;
use tortie_policy::program::{Member, SetId};

use crate::cluster::{Cluster, NamedPort, Subject};

#[derive(Default)]
pub(crate) struct Sets {
    active: BTreeMap<SetId, ActiveSet>,
}

struct ActiveSet {
    source: SetSource,
    /// What each endpoint and network set contributes.
    contributions: BTreeMap<Key, Vec<Member>>,
    /// How many endpoints contribute each member: two pods may have one address for a moment.
    counts: BTreeMap<Member, usize>,
    /// Members whose count may have become, or ceased to be, zero since the last flush.
    touched: BTreeSet<Member>,
}

impl Sets {
    /// Takes in that an endpoint or network set came, went, or has other labels or addresses.
    pub(crate) fn subject_changed(&mut self, key: &Key, cluster: &Cluster) {
        let subject = cluster.subject(key);
        for set in self.active.values_mut() {
            set.contribute(key, subject);
        }
    }

    /// Makes exactly the wanted sets active; says which are new and whose members changed.
    pub(crate) fn deltas(
        &mut self,
        wanted: BTreeMap<SetId, SetSource>,
        cluster: &Cluster,
        state: &NodeState,
    ) -> Vec<Delta> {
        self.active.retain(|id, _| wanted.contains_key(id));
        for (id, source) in wanted {
            self.active.entry(id).or_insert_with(|| ActiveSet::new(source, cluster));
        }
        let deltas = self.active.iter_mut().filter_map(|(id, set)| set.delta(id, state));
        deltas.collect()
    }

    pub(crate) fn is_active(&self, id: &SetId) -> bool {
        self.active.contains_key(id)
    }
}

impl ActiveSet {
    fn new(source: SetSource, cluster: &Cluster) -> Self {
        let (contributions, counts, touched) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut set = Self { source, contributions, counts, touched };
        for (key, subject) in cluster.subjects() {
            set.contribute(key, Some(subject));
        }
        set
    }

    fn contribute(&mut self, key: &Key, subject: Option<Subject<'_>>) {
        let new = subject.map_or_else(Vec::new, |subject| self.members_of(subject));
        for member in &new {
            *self.counts.entry(*member).or_default() += 1;
        }
        let old = if new.is_empty() {
            self.contributions.remove(key)
        } else {
            self.contributions.insert(key.clone(), new.clone())
        };
        let old = old.unwrap_or_default();
        for member in &old {
            if let Some(count) = self.counts.get_mut(member) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(member);
                }
            }
        }
        self.touched.extend(old);
        self.touched.extend(new);
    }

    /// What a subject contributes. It may say the same twice.
    fn members_of(&self, subject: Subject<'_>) -> Vec<Member> {
        let members: BTreeSet<Member> = match (&self.source, subject) {
            (SetSource::Selector(selector), Subject::Endpoint(endpoint)) => match selector
                .matches(&endpoint.labels)
            {
                true => endpoint.addresses.iter().map(|address| Member::Net(IpNet::from(*address))).collect(),
                false => BTreeSet::new(),
            },
            (SetSource::Selector(selector), Subject::NetworkSet { labels, nets }) => {
                match selector.matches(labels) {
                    true => nets.iter().copied().map(Member::Net).collect(),
                    false => BTreeSet::new(),
                }
            }
            (SetSource::NamedPort { selector, protocol, name }, Subject::Endpoint(endpoint)) => {
                let ports = endpoint.ports.iter().filter(|port| {
                    port.name == *name && protocol.is_none_or(|protocol| protocol == port.protocol)
                });
                let ports = ports.filter(|_| selector.matches(&endpoint.labels));
                ports
                    .flat_map(|port| endpoint.addresses.iter().map(|address| address_port(*address, port)))
                    .collect()
            }
            (SetSource::Service { namespace, name, with_ports }, Subject::Backends(backends)) => {
                let meant = backends.namespace == *namespace && backends.service == *name;
                match (meant, with_ports) {
                    (false, _) => BTreeSet::new(),
                    (true, false) => {
                        backends.addresses.iter().map(|address| Member::Net((*address).into())).collect()
                    }
                    (true, true) => {
                        let member =
                            |&(address, protocol, port)| Member::AddressPort { address, protocol, port };
                        backends.backends.iter().map(member).collect()
                    }
                }
            }
            // A network declares no ports, selectors do not find backends, and a Service has nothing else.
            (SetSource::Selector(_), Subject::Backends(_))
            | (SetSource::NamedPort { .. }, Subject::NetworkSet { .. } | Subject::Backends(_))
            | (SetSource::Service { .. }, Subject::Endpoint(_) | Subject::NetworkSet { .. }) => {
                BTreeSet::new()
            }
        };
        members.into_iter().collect()
    }

    fn delta(&mut self, id: &SetId, state: &NodeState) -> Option<Delta> {
        let touched = std::mem::take(&mut self.touched);
        let Some((_, given)) = state.sets.get(id) else {
            return Some(Delta::SetCreated(
                id.clone(),
                self.source.kind(),
                self.counts.keys().copied().collect(),
            ));
        };
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        for member in touched {
            match (self.counts.contains_key(&member), given.contains(&member)) {
                (true, false) => added.push(member),
                (false, true) => removed.push(member),
                _ => {}
            }
        }
        if added.is_empty() && removed.is_empty() {
            return None;
        }
        Some(Delta::SetChanged { id: id.clone(), added, removed })
    }
}

fn address_port(address: IpAddr, declared: &NamedPort) -> Member {
    Member::AddressPort { address, protocol: declared.protocol, port: declared.port }
}

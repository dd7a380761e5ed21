//! What a peer was told, and what it has yet to be told, packed into messages.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ipnet::IpNet;

use crate::codec::{
    Attributes, Context, Families, Family, RefreshKind, encode_announcement, encode_end_of_rib,
    encode_refresh, encode_withdrawal,
};

/// The routes that a peer was told, and the prefixes about which it may have to be told something.
#[derive(Debug, Default)]
pub(super) struct AdjOut {
    told: BTreeMap<IpNet, Arc<Attributes>>,
    /// The prefixes to look at, and whether the peer must be told again what it knows.
    pending: BTreeMap<IpNet, bool>,
    /// The families whose first routes are not complete yet.
    initial: Families,
    /// The families that the peer wants to be sent again, and those of them whose beginning and end it wants to know. Requests are
    /// merged until the answer begins.
    requested: Families,
    marked: Families,
    /// The families that are being sent again, and those of them whose end is marked.
    again: Families,
    ends: Families,
}

/// The most prefixes in one call of [`AdjOut::messages`].
const BATCH: usize = 4096;
/// About the most bytes in one call: whoever sends them looks between two calls whether the peer takes them.
const HEAVY: usize = 256 << 10;

impl AdjOut {
    /// For a session of these families, which begins with these prefixes.
    pub(super) fn new(families: Families, prefixes: impl Iterator<Item = IpNet>) -> Self {
        Self {
            pending: prefixes.map(|prefix| (prefix, false)).collect(),
            initial: families,
            ..Self::default()
        }
    }

    /// The route to this prefix may have changed.
    pub(super) fn note(&mut self, prefix: IpNet) {
        self.pending.entry(prefix).or_insert(false);
    }

    /// Everything of a family is to be sent again. A request during the answer to another one is answered after it, because the
    /// peer may have changed what it does with the routes.
    pub(super) fn refresh(&mut self, family: Family, marks: bool) {
        self.requested.insert(family);
        if marks {
            self.marked.insert(family);
        }
    }

    /// Begins to send again what was requested. What the peer was told remains known, so that nothing that is withdrawn in between
    /// is forgotten. Returns the marks of the beginning.
    fn begin_again(&mut self) -> Vec<Vec<u8>> {
        let mut marks = Vec::new();
        for family in Family::ALL {
            if self.again.contains(family) || !self.requested.remove(family) {
                continue;
            }
            self.again.insert(family);
            let of_family = self.told.keys().filter(|prefix| Family::of(prefix) == family);
            self.pending.extend(of_family.map(|prefix| (*prefix, true)));
            if self.marked.remove(family) && !self.initial.contains(family) {
                self.ends.insert(family);
                marks.push(encode_refresh(family, RefreshKind::Begin));
            }
        }
        marks
    }

    /// How many routes the peer was told.
    pub(super) fn len(&self) -> usize {
        self.told.len()
    }

    /// The route that the peer was told.
    pub(super) fn told(&self, prefix: &IpNet) -> Option<&Arc<Attributes>> {
        self.told.get(prefix)
    }

    /// Whether there is something to send.
    pub(super) fn is_idle(&self) -> bool {
        let families = [self.initial, self.requested, self.again];
        self.pending.is_empty() && families.into_iter().all(|families| families.is_empty())
    }

    /// The next messages. `export` returns the route of a prefix that the peer should receive. Prefixes whose attributes do not fit
    /// into a message are withdrawn.
    pub(super) fn messages(
        &mut self,
        context: &Context,
        mut export: impl FnMut(&IpNet) -> Option<Arc<Attributes>>,
    ) -> Vec<Vec<u8>> {
        let mut messages = self.begin_again();
        let mut withdrawn: [Vec<IpNet>; 2] = Default::default();
        let mut groups = Groups::default();
        let mut weight = 0;
        for _ in 0..BATCH {
            if weight >= HEAVY {
                break;
            }
            let Some((prefix, again)) = self.pending.pop_first() else { break };
            let family = Family::of(&prefix);
            let wanted = Some(&prefix).filter(|_| context.families.contains(family)).and_then(&mut export);
            match (wanted, self.told.get(&prefix)) {
                (Some(wanted), Some(known)) if *known == wanted && !again => {}
                (Some(wanted), _) => weight += groups.add(family, prefix, wanted),
                (None, Some(_)) => withdrawn[usize::from(family == Family::Ipv6)].push(prefix),
                (None, None) => {}
            }
        }
        let mut announcements = Vec::new();
        for (family, attributes, prefixes) in groups.ordered {
            match encode_announcement(&attributes, family, &prefixes, context) {
                Some(messages) => {
                    announcements.extend(messages);
                    self.told.extend(prefixes.into_iter().map(|prefix| (prefix, Arc::clone(&attributes))));
                }
                None => {
                    let known = prefixes.into_iter().filter(|prefix| self.told.contains_key(prefix));
                    withdrawn[usize::from(family == Family::Ipv6)].extend(known);
                }
            }
        }
        for (family, prefixes) in Family::ALL.into_iter().zip(withdrawn) {
            prefixes.iter().for_each(|prefix| drop(self.told.remove(prefix)));
            messages.extend(encode_withdrawal(family, &prefixes));
        }
        messages.append(&mut announcements);
        if self.pending.is_empty() {
            let ends = std::mem::take(&mut self.initial);
            messages.extend(ends.iter().map(encode_end_of_rib));
            self.again = Families::default();
            let ends = std::mem::take(&mut self.ends);
            messages.extend(ends.iter().map(|family| encode_refresh(family, RefreshKind::End)));
        }
        messages
    }
}

/// Prefixes by their attributes, in the order of their first appearance.
#[derive(Default)]
struct Groups {
    ordered: Vec<(Family, Arc<Attributes>, Vec<IpNet>)>,
    /// By address first, because comparing contents takes longer. The values keep the addresses in use.
    by_address: HashMap<(Family, *const Attributes), (Arc<Attributes>, usize)>,
    by_content: HashMap<(Family, Arc<Attributes>), usize>,
}

impl Groups {
    /// Adds a prefix, and returns the weight of its attributes if they are new.
    fn add(&mut self, family: Family, prefix: IpNet, attributes: Arc<Attributes>) -> usize {
        let Self { ordered, by_address, by_content } = self;
        let known = ordered.len();
        let (_, index) = by_address.entry((family, Arc::as_ptr(&attributes))).or_insert_with(|| {
            let index = *by_content.entry((family, Arc::clone(&attributes))).or_insert_with(|| {
                ordered.push((family, Arc::clone(&attributes), Vec::new()));
                ordered.len() - 1
            });
            (attributes, index)
        });
        ordered[*index].2.push(prefix);
        if ordered.len() > known { ordered[known].1.weight() } else { 0 }
    }
}

//! What a frontend is in the table, besides its slots.

use tortie_kernel::nftables::{Data, Key, Value};
use tortie_services::{Frontend, FrontendAddress, FrontendKey, FrontendKind, TrafficPolicy};

use super::layout::{Kind, List, SetId, SlotClass, frontend_key, place};

/// One of the two pools of a port of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pool {
    Cluster,
    Local,
}

/// The set of frontends that are treated as this one, and the pool of each of its lists.
pub(super) fn lists(key: &FrontendKey, frontend: &Frontend) -> (Kind, Vec<(List, Pool)>) {
    let (place, _) = place(key);
    let pool = match frontend.policy {
        TrafficPolicy::Cluster => Pool::Cluster,
        TrafficPolicy::Local => Pool::Local,
    };
    match (frontend.kind, frontend.policy) {
        (FrontendKind::ClusterIp, _) => (Kind::Internal(place), vec![(List::Common, pool)]),
        (_, TrafficPolicy::Cluster) => (Kind::External(place), vec![(List::Common, pool)]),
        (_, TrafficPolicy::Local) => {
            (Kind::Local(place), vec![(List::Common, Pool::Cluster), (List::Outside, Pool::Local)])
        }
    }
}

/// An element of a set or a map.
pub(super) type TableEntry = ((SetId, Key), Value);

/// The elements of a frontend whose port has these numbers of backends in each list, and these units of session affinity. `ranges` is the number of its list of networks.
pub(super) fn entries(
    key: &FrontendKey,
    frontend: &Frontend,
    has_endpoints: bool,
    lengths: &[(List, usize)],
    units: &[(List, u32)],
    ranges: Option<u32>,
) -> Vec<TableEntry> {
    let (place, family) = place(key);
    let bytes = frontend_key(key);
    let entry = |kind, value| ((SetId::new(kind, family), bytes), value);
    let number = |number| Value::new(None, Some(Data::Number(number)));
    let (group, _) = lists(key, frontend);
    let mut entries = vec![entry(group, Value::default())];
    if !has_endpoints {
        entries.push(entry(Kind::Rejected(place), Value::default()));
    }
    for (list, length) in lengths {
        let kind = match (group, list) {
            (Kind::Local(_), List::Common) => Kind::ClassInside(place),
            (_, List::Common) => Kind::Class(place),
            (_, List::Outside) => Kind::ClassOutside(place),
        };
        let class = SlotClass::of(family, place, *list, *length);
        entries.extend(class.map(|class| entry(kind, number(class.number()))));
    }
    for (list, unit) in units {
        let kind = match (group, list) {
            (Kind::Local(_), List::Common) => Kind::AffinityInside(place),
            (_, List::Common) => Kind::Affinity(place),
            (_, List::Outside) => Kind::AffinityOutside(place),
        };
        entries.push(entry(kind, number(*unit)));
    }
    // A port of the node has no ranges.
    if let (FrontendAddress::Address(_), Some(ranges)) = (key.address, ranges) {
        entries.push(entry(Kind::Ranges, number(ranges)));
    }
    entries
}

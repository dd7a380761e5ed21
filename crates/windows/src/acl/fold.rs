//! Rows that are one ACL together.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::numbers::{Addresses, Numbers, Ports};
use super::peers::Peers;
use super::rows::Row;

/// The same decisions in fewer rows. Rows of one action that follow one another are a run, within which the order is of no
/// account; those of a run that come from one policy and differ in one field only become one row with what both have in
/// that field: addresses that are spelled out, or ports. Rows of different policies stay apart, as each ACL says whose it
/// is. There are never more ACLs than before: two lists together take no more networks, and no more pieces, than apart.
pub fn fold(rows: Vec<Row>) -> Vec<Row> {
    let mut folded = Vec::with_capacity(rows.len());
    let mut rows = rows.into_iter().peekable();
    while let Some(first) = rows.next() {
        let action = first.action.clone();
        let mut run = vec![first];
        while let Some(row) = rows.next_if(|row| row.action == action) {
            run.push(row);
        }
        folded.extend(fold_run(run));
    }
    folded
}

/// What has been joined in one field may be alike in another now, so it goes round until nothing is.
fn fold_run(mut run: Vec<Row>) -> Vec<Row> {
    loop {
        let before = run.len();
        if before < 2 {
            return run;
        }
        // Names of sets cannot be joined.
        let peers = |row: &Row| row.remote.addresses.is_literal().then(|| row.remote.addresses.literal().clone());
        run = join(run, peers, |row, peers: Addresses| row.remote.addresses = Peers::from(peers));
        run = join(run, |row| Some(row.local.ports.clone()), |row, ports: Ports| row.local.ports = ports);
        run = join(run, |row| Some(row.remote.ports.clone()), |row, ports: Ports| row.remote.ports = ports);
        if run.len() == before {
            return run;
        }
    }
}

/// Joins rows that differ only in the field that `get` reads, where it has one, and `set` writes. What is joined is where
/// its first row was.
fn join<const MAX: u32>(
    run: Vec<Row>,
    get: impl Fn(&Row) -> Option<Numbers<MAX>>,
    set: impl Fn(&mut Row, Numbers<MAX>),
) -> Vec<Row> {
    let mut joined: Vec<(Row, Vec<Numbers<MAX>>)> = Vec::with_capacity(run.len());
    let mut places: HashMap<Row, usize> = HashMap::new();
    for row in run {
        let Some(numbers) = get(&row) else {
            joined.push((row, Vec::new()));
            continue;
        };
        let mut alike = row.clone();
        set(&mut alike, Numbers::all());
        match places.entry(alike) {
            Entry::Occupied(place) => joined[*place.get()].1.push(numbers),
            Entry::Vacant(place) => {
                place.insert(joined.len());
                joined.push((row, vec![numbers]));
            }
        }
    }
    let finish = |(mut row, parts): (Row, Vec<Numbers<MAX>>)| {
        if parts.len() > 1 {
            set(&mut row, Numbers::union(&parts));
        }
        row
    };
    joined.into_iter().map(finish).collect()
}

#[cfg(test)]
mod tests {
    use tortie_hcn::schema::AclAction;

    use super::super::region::Side;
    use super::*;

    fn row(action: AclAction, origin: &str, remote: &str, ports: (u32, u32)) -> Row {
        let all = || Side { addresses: Peers::all(), ports: Ports::all() };
        let mut row = Row { action, protocol: 6, local: all(), remote: all(), origin: origin.into() };
        row.remote.addresses = Addresses::of_nets([remote.parse().unwrap()]).into();
        row.local.ports = Ports::from_ranges(vec![ports]);
        row
    }

    #[test]
    fn what_differs_in_one_field_is_one_row() {
        use AclAction::{Allow, Block};
        let (a, b, both) = ("10.0.0.0/25", "10.0.0.128/25", "10.0.0.0/24");
        let (web, tls) = ((80, 80), (443, 443));
        let mut joined = row(Allow, "p", both, web);
        joined.local.ports = Ports::from_ranges(vec![web, tls]);
        // Four corners are one row, in two rounds.
        let corners = [(a, web), (a, tls), (b, web), (b, tls)].map(|(peer, port)| row(Allow, "p", peer, port));
        assert_eq!(fold(corners.to_vec()), [joined.clone()]);
        // One that stands apart comes in when the others have become like it.
        let mut wide = row(Allow, "p", b, web);
        wide.local.ports = joined.local.ports.clone();
        assert_eq!(fold(vec![row(Allow, "p", a, web), row(Allow, "p", a, tls), wide]), [joined]);
        // Another policy, another action in between, and two fields at once stay apart.
        for apart in [
            vec![row(Allow, "p", a, web), row(Allow, "q", b, web)],
            vec![row(Allow, "p", a, web), row(Block, "p", a, tls), row(Allow, "p", b, web)],
            vec![row(Allow, "p", a, web), row(Allow, "p", b, tls)],
        ] {
            assert_eq!(fold(apart.clone()), apart);
        }
    }
}

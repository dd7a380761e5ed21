//! Rows that are one ACL together.

use super::numbers::{Addresses, Numbers, Ports};
use super::peers::Peers;
use super::rows::Row;

/// The same decisions in fewer rows. Rows of one policy and action that follow one another, and differ in one field only,
/// become one row with what they have in that field: addresses that are spelled out, or ports. Rows of different policies
/// stay apart, as each ACL says whose it is.
///
/// There are never more ACLs than before: two lists together take no more networks, and no more pieces, than apart. And
/// one row more or less changes its neighbours only: rows further away are not joined, as then one that comes between
/// could tear many apart.
pub fn fold(mut rows: Vec<Row>) -> Vec<Row> {
    // What has been joined in one field may be alike in another now, so it goes round until nothing is.
    loop {
        let before = rows.len();
        // Names of sets cannot be joined.
        let peers =
            |row: &Row| row.remote.addresses.is_literal().then(|| row.remote.addresses.literal().clone());
        rows = join(rows, peers, |row, peers: Addresses| row.remote.addresses = Peers::from(peers));
        rows = join(rows, |row| Some(row.local.ports.clone()), |row, ports: Ports| row.local.ports = ports);
        rows = join(rows, |row| Some(row.remote.ports.clone()), |row, ports: Ports| row.remote.ports = ports);
        if rows.len() == before {
            return rows;
        }
    }
}

/// Joins neighbours that differ only in the field that `get` reads, where it has one, and `set` writes.
fn join<const MAX: u32>(
    rows: Vec<Row>,
    get: impl Fn(&Row) -> Option<Numbers<MAX>>,
    set: impl Fn(&mut Row, Numbers<MAX>),
) -> Vec<Row> {
    /// Rows that are alike but for the field.
    struct Group<const MAX: u32> {
        first: Row,
        /// The first without the field, unless it has none.
        alike: Option<Row>,
        fields: Vec<Numbers<MAX>>,
    }
    let mut groups: Vec<Group<MAX>> = Vec::with_capacity(rows.len());
    for first in rows {
        let field = get(&first);
        let alike = field.as_ref().map(|_| {
            let mut alike = first.clone();
            set(&mut alike, Numbers::all());
            alike
        });
        match groups.last_mut() {
            Some(last) if alike.is_some() && last.alike == alike => last.fields.extend(field),
            _ => groups.push(Group { first, alike, fields: field.into_iter().collect() }),
        }
    }
    let finish = |Group { mut first, fields, .. }: Group<MAX>| {
        if fields.len() > 1 {
            set(&mut first, Numbers::union(&fields));
        }
        first
    };
    groups.into_iter().map(finish).collect()
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
        let corners =
            [(a, web), (a, tls), (b, web), (b, tls)].map(|(peer, port)| row(Allow, "p", peer, port));
        assert_eq!(fold(corners.to_vec()), [joined.clone()]);
        // In whatever order they come, as long as they are neighbours.
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

//! Positions in the history of the datastore, by kind.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Kind;

/// A point in the history of one kind. A later change of an object of this kind has a higher position. Positions of
/// different kinds cannot be compared.
///
/// It is the revision of etcd, and the resourceVersion of the Kubernetes API, which can be compared within one kind
/// since version 1.35 (KEP-5504).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A position for each of some kinds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Positions(BTreeMap<Kind, Position>);

impl Positions {
    /// Moves a kind forward; never backward.
    pub fn advance(&mut self, kind: Kind, position: Position) {
        let known = self.0.entry(kind).or_default();
        *known = position.max(*known);
    }

    /// Moves every kind of `other` forward.
    pub fn advance_all(&mut self, other: &Self) {
        other.0.iter().for_each(|(kind, position)| self.advance(*kind, *position));
    }

    /// Begins a kind again: what was processed of it belongs to another history.
    pub fn reset(&mut self, kind: Kind) {
        self.0.insert(kind, Position(0));
    }

    /// Removes a kind: it is not followed any more.
    pub fn forget(&mut self, kind: Kind) {
        self.0.remove(&kind);
    }

    /// The position of a kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> Option<Position> {
        self.0.get(&kind).copied()
    }

    /// Whether there is no position.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether whoever has processed the changes up to here has also processed those up to `other`. Kinds that it
    /// does not follow do not concern it; whoever follows nothing yet has processed nothing.
    #[must_use]
    pub fn reach(&self, other: &Self) -> bool {
        let reaches = |(kind, position)| self.of(kind).is_none_or(|reached| reached >= position);
        !self.is_empty() && other.0.iter().map(|(kind, position)| (*kind, *position)).all(reaches)
    }
}

impl Extend<(Kind, Position)> for Positions {
    fn extend<I: IntoIterator<Item = (Kind, Position)>>(&mut self, positions: I) {
        positions.into_iter().for_each(|(kind, position)| self.advance(kind, position));
    }
}

impl FromIterator<(Kind, Position)> for Positions {
    fn from_iter<I: IntoIterator<Item = (Kind, Position)>>(positions: I) -> Self {
        let mut all = Self::default();
        all.extend(positions);
        all
    }
}

/// `networkpolicies.crd.projectcalico.org=12 tiers.crd.projectcalico.org=7`.
impl fmt::Display for Positions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (kind, position)) in self.0.iter().enumerate() {
            let gap = if number == 0 { "" } else { " " };
            write!(f, "{gap}{}={position}", kind.plural())?;
        }
        Ok(())
    }
}

/// As a mapping from plurals to numbers.
impl Serialize for Positions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(kind, position)| (kind.plural(), position.0)))
    }
}

/// Kinds of other versions are left out.
impl<'de> Deserialize<'de> for Positions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let all = BTreeMap::<String, u64>::deserialize(deserializer)?;
        let known = all.into_iter().filter_map(|(plural, position)| {
            let kind = Kind::all().find(|kind| kind.plural() == plural)?;
            Some((kind, Position(position)))
        });
        Ok(known.collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn positions(of: &[(Kind, u64)]) -> Positions {
        of.iter().map(|(kind, position)| (*kind, Position(*position))).collect()
    }

    #[test]
    fn kinds_that_are_not_followed_do_not_concern() {
        let table: [(&[_], &[_], bool); 7] = [
            (&[], &[], false),
            (&[], &[(Kind::Pod, 1)], false),
            (&[(Kind::Pod, 1)], &[], true),
            (&[(Kind::Pod, 1)], &[(Kind::Pod, 1)], true),
            (&[(Kind::Pod, 1)], &[(Kind::Pod, 2)], false),
            (&[(Kind::Pod, 1)], &[(Kind::Node, 9)], true),
            (&[(Kind::Pod, 1), (Kind::Node, 5)], &[(Kind::Pod, 1), (Kind::Node, 6)], false),
        ];
        for (reached, wanted, expected) in table {
            assert_eq!(positions(reached).reach(&positions(wanted)), expected, "{reached:?} {wanted:?}");
        }
    }

    #[test]
    fn positions_never_go_back() {
        let mut all = positions(&[(Kind::Pod, 5)]);
        all.advance_all(&positions(&[(Kind::Pod, 3), (Kind::Node, 2)]));
        assert_eq!(all, positions(&[(Kind::Pod, 5), (Kind::Node, 2)]));
    }

    #[test]
    fn positions_are_written_and_read_by_plural() {
        let all = positions(&[(Kind::Pod, u64::MAX), (Kind::Tier, 2)]);
        let mut written = serde_json::to_value(&all).unwrap();
        written["kinds-of-the-future"] = json!(7);
        assert_eq!(serde_json::from_value::<Positions>(written).unwrap(), all);
    }
}

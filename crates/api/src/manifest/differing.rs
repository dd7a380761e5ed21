//! Objects that manifests give in two forms.

use super::unread::{self, CouldChange};
use super::{Object, Origin};

/// An object that is given in two forms, of which the later one counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Differing {
    /// Kind, namespace and name.
    pub object: String,
    /// The place of the form that counts.
    pub origin: Origin,
    /// Both places, in words.
    pub problem: String,
    /// Verdicts that could be others with the other form.
    pub could_change: CouldChange,
}

impl Differing {
    pub(super) fn new(object: String, first: &Object, second: &Object) -> Self {
        let (one, other) = (unread::could_change(&first.value), unread::could_change(&second.value));
        Self::at(object, &first.origin, &second.origin, one.and(other))
    }

    pub(super) fn at(object: String, first: &Origin, second: &Origin, could_change: CouldChange) -> Self {
        let problem = format!("is given twice, and differently, at {first} and {second}: the latter counts");
        Self { object, origin: second.clone(), problem, could_change }
    }
}

//! The members of a set.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use tortie_policy::program::Member;

/// The members of a set. Clones share them until one changes, so a delta and the state that contains it need one copy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members(Arc<BTreeSet<Member>>);

impl Members {
    /// The members, to change them. Copies them first if they are shared.
    pub fn make_mut(&mut self) -> &mut BTreeSet<Member> {
        Arc::make_mut(&mut self.0)
    }
}

impl Deref for Members {
    type Target = BTreeSet<Member>;

    fn deref(&self) -> &BTreeSet<Member> {
        &self.0
    }
}

impl FromIterator<Member> for Members {
    fn from_iter<I: IntoIterator<Item = Member>>(members: I) -> Self {
        Self(Arc::new(members.into_iter().collect()))
    }
}

impl<T: Into<BTreeSet<Member>>> From<T> for Members {
    fn from(members: T) -> Self {
        Self(Arc::new(members.into()))
    }
}

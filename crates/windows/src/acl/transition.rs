//! From the ACLs that an endpoint has to those that it is to have.

use std::collections::HashSet;

use tortie_hcn::schema::Acl;

/// Two steps: first all of `add`, then all of `remove`.
///
/// In between the endpoint has both lists at once. **No packet is treated otherwise than by one of them**: in each list
/// everything of a priority has one action, and a list is about every packet, so a packet's first match in the union is
/// its first match in one of the lists. What both deny stays denied, what both allow stays allowed (semantics 23).
/// That holds for every beginning of `add` and of `remove`, too: rules come from the front and go from the back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Transition {
    /// ACLs that are missing, the earliest first.
    pub add: Vec<Acl>,
    /// ACLs that are too much, the latest first.
    pub remove: Vec<Acl>,
}

impl Transition {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.add.is_empty() && self.remove.is_empty()
    }
}

/// The least that makes `actual` equal to `desired`, in whatever order each is written.
pub fn transition(actual: &[Acl], desired: &[Acl]) -> Transition {
    let missing_in = |list: &[Acl], acls: &[Acl]| -> Vec<Acl> {
        let there: HashSet<&Acl> = list.iter().collect();
        let mut missing: Vec<Acl> = acls.iter().filter(|acl| !there.contains(acl)).cloned().collect();
        missing.sort_by_key(|acl| acl.priority);
        missing
    };
    let add = missing_in(actual, desired);
    let mut remove = missing_in(desired, actual);
    remove.reverse();
    Transition { add, remove }
}

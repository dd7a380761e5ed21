//! The mark of a table that only keeps pods closed until the node's state is known: an empty set.

use tortie_kernel::nftables::{Field, Nft, Set, SetSpec};

use super::sets::set;

const HELD: &str = "held-until-the-datastore-answers";

/// The set that marks a table, with its name.
pub(super) fn mark() -> (String, Set) {
    (HELD.to_owned(), set(SetSpec::hash(&[Field::Interface]), []))
}

/// Whether the kernel's table is marked: policy is not in force.
///
/// # Errors
/// The kernel's refusal.
pub(crate) fn is_held(nft: &mut Nft, table: &str) -> tortie_kernel::Result<bool> {
    Ok(nft.set_specs(table)?.contains_key(HELD))
}

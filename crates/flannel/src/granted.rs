//! Leases that etcd has granted, and that perhaps no key has.

use std::time::Instant;

use tortie_store::StoreError;
use tortie_store::etcd::EtcdLease;

/// A lease of etcd.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Granted {
    pub(crate) lease: EtcdLease,
    /// When it was asked for.
    pub(crate) asked: Instant,
}

/// What becomes of a granted lease after an attempt to write a key with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The key has it.
    Used,
    /// No key has it, and it would stay for a day.
    Revoke,
    /// A key may have it, and would go with it. The next attempt uses it again: each attempt would leave one for a day.
    Keep,
    /// etcd has it no longer.
    Gone,
}

impl Granted {
    /// Whether a key that gets it now lasts until it is renewed.
    pub(crate) fn is_usable(&self, now: Instant) -> bool {
        now < self.asked + self.lease.lasts / 3
    }
}

/// What becomes of a lease after this attempt. No earlier attempt has used a fresh one.
pub(crate) fn fate(written: &Result<Option<u64>, StoreError>, is_fresh: bool) -> Fate {
    match written {
        Ok(Some(_)) => Fate::Used,
        Err(error) if error.to_string().contains("lease not found") => Fate::Gone,
        Ok(None) | Err(StoreError::Forbidden(_)) if is_fresh => Fate::Revoke,
        Ok(None) | Err(_) => Fate::Keep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_revoked_only_if_certainly_no_key_has_it() {
        let unavailable = |text: &str| Err(StoreError::Unavailable(text.to_owned()));
        let forbidden = || Err(StoreError::Forbidden(String::new()));
        for (written, is_fresh, expected) in [
            (Ok(Some(7)), true, Fate::Used),
            (Ok(Some(7)), false, Fate::Used),
            // The condition did not hold: somebody else has written the key, or an earlier attempt has, with this lease.
            (Ok(None), true, Fate::Revoke),
            (Ok(None), false, Fate::Keep),
            (forbidden(), true, Fate::Revoke),
            (forbidden(), false, Fate::Keep),
            (unavailable("no answer in time"), true, Fate::Keep),
            (unavailable("no answer in time"), false, Fate::Keep),
            (unavailable("etcdserver: requested lease not found"), false, Fate::Gone),
        ] {
            assert_eq!(fate(&written, is_fresh), expected, "{written:?} {is_fresh}");
        }
    }
}

//! Which kinds a reconciler knows completely.

use std::collections::BTreeSet;

use tortie_api::Kind;
use tortie_store::{Change, StoreError};

/// The kinds of one follower.
#[derive(Debug, Clone)]
pub(crate) struct Synced {
    kinds: Vec<Kind>,
    complete: BTreeSet<Kind>,
    absent: BTreeSet<Kind>,
    /// The kinds that were complete or absent once.
    settled: BTreeSet<Kind>,
}

impl Synced {
    pub(crate) fn new(kinds: &[Kind]) -> Self {
        let none = BTreeSet::new;
        Self { kinds: kinds.to_vec(), complete: none(), absent: none(), settled: none() }
    }

    /// Notes what a change says about its kind.
    pub(crate) fn note(&mut self, change: &Change) {
        match change {
            Change::InSync(kind, _) => {
                self.absent.remove(kind);
                self.complete.insert(*kind);
                self.settled.insert(*kind);
            }
            Change::Restarted(kind) => drop(self.complete.remove(kind)),
            Change::Unavailable(kind, error) => {
                self.complete.remove(kind);
                match error {
                    StoreError::KindAbsent(_) => {
                        tracing::info!(kind = kind.plural(), "the kind is not installed");
                        self.absent.insert(*kind);
                        self.settled.insert(*kind);
                    }
                    error => {
                        tracing::error!(%error, "the controllers cannot read the kind; nothing depends on it until they can");
                        self.absent.remove(kind);
                    }
                }
            }
            Change::Put(_) | Change::Gone { .. } | Change::Progress(..) => {}
        }
    }

    /// Whether each kind has been known completely once, or is not installed.
    pub(crate) fn is_settled(&self) -> bool {
        self.kinds.iter().all(|kind| self.settled.contains(kind))
    }

    /// Whether everything that is stored of the kind is known now.
    pub(crate) fn is_complete(&self, kind: Kind) -> bool {
        self.complete.contains(&kind)
    }
}

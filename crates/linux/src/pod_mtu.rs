//! The MTU of new pods on a node where no link of an overlay tells it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What the dataplane knows of the node's interfaces, for the wiring of pods.
#[derive(Debug, Clone, Default)]
pub struct PodMtu(Arc<AtomicU32>);

impl PodMtu {
    pub(crate) fn set(&self, mtu: Option<u32>) {
        // No link has 0.
        self.0.store(mtu.unwrap_or_default(), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Option<u32> {
        Some(self.0.load(Ordering::Relaxed)).filter(|mtu| *mtu != 0)
    }
}

//! A dataplane that keeps its own node state, for tests and benchmarks that have deltas and no calc.

use std::ops::{Deref, DerefMut};

use tortie_dataplane::{Dataplane, Delta, EndpointId, NodeState, Report, ShowError, Shown};

/// A dataplane with the state that its deltas have led to.
pub struct Stateful<D> {
    /// The state as of the last delta.
    pub state: NodeState,
    dataplane: D,
}

impl<D: Dataplane> Stateful<D> {
    /// A dataplane without state.
    pub fn new(dataplane: D) -> Self {
        Self { state: NodeState::default(), dataplane }
    }

    /// The same state for a dataplane that is set up differently.
    #[must_use]
    pub fn map(self, change: impl FnOnce(D) -> D) -> Self {
        Self { state: self.state, dataplane: change(self.dataplane) }
    }

    /// Adds the deltas to the state and applies them.
    pub fn apply(&mut self, deltas: &[Delta]) -> Report {
        deltas.iter().for_each(|delta| self.state.apply(delta));
        self.dataplane.apply(&self.state, deltas)
    }

    /// Compares the state with the system.
    pub fn resync(&mut self) -> Report {
        self.dataplane.resync(&self.state)
    }

    /// Shows what the system has for an endpoint.
    ///
    /// # Errors
    /// The endpoint is not known, or the system did not answer.
    pub fn show(&mut self, endpoint: &EndpointId) -> Result<Shown, ShowError> {
        self.dataplane.show(&self.state, endpoint)
    }
}

impl<D> Deref for Stateful<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.dataplane
    }
}

impl<D> DerefMut for Stateful<D> {
    fn deref_mut(&mut self) -> &mut D {
        &mut self.dataplane
    }
}

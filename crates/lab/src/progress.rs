//! What the person is told while a lab comes up: one line for each step, on standard error.

use std::io::Write;
use std::time::Instant;

/// Tells the steps.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    begun: Instant,
}

impl Progress {
    /// Begins now.
    #[must_use]
    pub fn new() -> Self {
        Self { begun: Instant::now() }
    }

    /// A step is done.
    pub fn done(&self, step: &str) {
        let seconds = self.begun.elapsed().as_secs_f64();
        // Nobody may be reading any more; the lab goes on.
        let _ = writeln!(std::io::stderr(), "[{seconds:6.2}s] {step}");
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

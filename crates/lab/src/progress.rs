//! Progress messages of a lab: one line for each step, on standard error.

use std::io::Write;
use std::time::Instant;

/// Prints the steps.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    begun: Instant,
}

impl Progress {
    /// Starts now.
    #[must_use]
    pub fn new() -> Self {
        Self { begun: Instant::now() }
    }

    /// Reports that a step is done.
    pub fn done(&self, step: &str) {
        let seconds = self.begun.elapsed().as_secs_f64();
        // Possibly nobody reads any more; the lab continues.
        let _ = writeln!(std::io::stderr(), "[{seconds:6.2}s] {step}");
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

//! The memory that a parser may use for an input.

use peak_alloc::PeakAlloc;
use thiserror::Error;

use crate::Target;

/// The most memory that a parser may have allocated at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// What does not depend on the input, in bytes.
    pub base: usize,
    /// The multiple of the size of the input.
    pub times: usize,
    /// Why it is not the usual one.
    pub reason: &'static str,
}

impl Bound {
    /// Eight times the input and 1 MiB.
    pub const USUAL: Self = Self { base: 1 << 20, times: 8, reason: "" };

    /// The bound for an input of this size, in bytes.
    #[must_use]
    pub fn of(self, size: usize) -> usize {
        self.times * size + self.base
    }
}

/// A parser has used more memory than it may.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{target} has used {used} bytes of memory for an input of {size} bytes, and may use {allowed}")]
pub struct Excess {
    /// The name of the target.
    pub target: &'static str,
    /// The size of the input.
    pub size: usize,
    /// The most memory that was allocated at once, beside what was allocated before.
    pub used: usize,
    /// What is allowed.
    pub allowed: usize,
}

/// Gives an input to a target. `memory` is the global allocator of the process, of which no other thread may use much meanwhile. Returns the
/// most memory that was allocated at once, in bytes.
///
/// # Errors
/// The target uses more memory than its bound.
pub fn run(target: &Target, input: &[u8], memory: &PeakAlloc) -> Result<usize, Excess> {
    let before = memory.current_usage();
    memory.reset_peak_usage();
    (target.parse)(input);
    let used = memory.peak_usage().saturating_sub(before);
    let allowed = target.bound.of(input.len());
    if used > allowed {
        return Err(Excess { target: target.name, size: input.len(), used, allowed });
    }
    Ok(used)
}

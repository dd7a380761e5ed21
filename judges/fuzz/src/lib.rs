//! Gives arbitrary bytes to each parser of what comes from outside the process.
//!
//! [`TARGETS`] has one function for each parser. It panics if the parser breaks a promise: what is accepted can be written and is then read as
//! before, a selector that parses can be evaluated, a policy that is read can be compiled. [`run`] calls it, and compares the memory that it needs with
//! the size of its input. `fuzz/` gives the functions to libFuzzer, and `tests/integration` gives them the inputs in `corpus/`.

mod bound;
mod input;
pub mod targets;

pub use bound::{Bound, Excess, run};
pub use targets::TARGETS;

/// A parser.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, which is that of its folder in `corpus/`, too.
    pub name: &'static str,
    /// Parses the bytes, and checks what can be checked of the result.
    pub parse: fn(&[u8]),
    /// The memory that it may use.
    pub bound: Bound,
    /// The size of the largest input in bytes.
    pub largest_input: usize,
}

/// The target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

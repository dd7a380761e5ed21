//! Questions about whole clusters: who reaches whom, what a change changes, which rules never decide.
//!
//! [`Classes`] groups pods, nodes, outsiders and ports so that no policy can tell the members of a class apart.
//! [`Classes::reduced`] keeps those who stand for their class, and [`Judge`] asks the [oracle](crate::oracle) about them:
//! a cluster of thousands of pods becomes one of some dozens, with the same verdicts. Random clusters hold this to
//! account (`crates/calc/tests/classes.rs`): each pair of pods gets the verdict of its classes.

mod asked;
mod atoms;
mod change;
mod classes;
mod concern;
mod hosts;
mod judge;
mod matrix;
mod members;
mod names;
mod nets;
mod placement;
mod ports;
mod rectangles;
mod sight;
mod way;
mod why;

pub(crate) use asked::is_policy;
pub use change::{Change, Difference, changed, summary};
pub use classes::{Class, ClassKind, Classes};
pub use judge::{Cell, Judge, Said};
pub use matrix::{Content, Group, Matrix, group_name};
pub use ports::{CLIENT_PORT, Ports, Sample};
pub use way::{Placement, Scope, Stop, Way};
pub use why::{Decider, Reason, Why};

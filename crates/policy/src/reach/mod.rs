//! Questions about whole clusters: who reaches whom, what a change changes, which rules never decide.
//!
//! [`Classes`] groups pods, nodes, outsiders and ports so that no policy can tell the members of a class apart.
//! [`Classes::reduced`] keeps those who stand for their class, and [`Judge`] asks the [oracle](crate::oracle) about them:
//! a cluster of thousands of pods becomes one of some dozens, with the same verdicts. Random clusters hold this to
//! account (`crates/calc/tests/classes.rs`): each pair of pods gets the verdict of its classes.

mod atoms;
mod change;
mod classes;
mod judge;
mod matrix;
mod names;
mod nets;
mod ports;
mod sight;

pub use change::{Change, Difference, Why, changed, summary};
pub use classes::{Class, ClassKind, Classes};
pub use judge::{Cell, Judge, Said};
pub use matrix::{Content, Group, Matrix, group_name};
pub use ports::{CLIENT_PORT, Ports, Sample};
pub(crate) use sight::is_policy;

//! Questions about whole clusters: who reaches whom, what a change changes, which rules never decide.
//!
//! [`Classes`] groups pods, nodes, outsiders and ports so that no policy can tell the members of a class apart.
//! [`Classes::reduced`] keeps those who stand for their class, and [`Judge`] asks the [oracle](tortie_oracle) about them:
//! a cluster of thousands of pods becomes one of some dozens, with the same verdicts. Random clusters hold this to
//! account (`crates/calc/tests/classes.rs`): each pair of pods, nodes and outsiders gets the verdict of its classes.
//!
//! # What is asked
//!
//! Every pair of classes on each [`Way`]: by IPv4 and by IPv6, and where there are host endpoints, between nodes and on
//! one node, as inside a node no packet passes an interface that could have one. Policy is met at up to four [`Stop`]s,
//! and a packet passes where all of them let it pass: the sending pod; the host endpoint of its node, or of a node that
//! sends itself; the host endpoint of the receiving node; the receiving pod. Not asked: a pod of itself, a node of its own
//! pods (always allowed), and what a packet bears before a Service's address is translated.
//!
//! # Why classes are exact
//!
//! What one stop says of a packet follows from
//! - whose policies are asked there: of a pod those that apply and its profiles; of a host endpoint the same by table,
//!   its failsafe ports, and whether the packet is forwarded or the node's own;
//! - what holds of the two addresses: each question of a rule (a selector, a network, a backend …) is an atom, and an
//!   address is the set of atoms that hold of it and of everybody who has it;
//! - which address a node or a pod behind natOutgoing has in the packet, and by which interface it goes: both depend on
//!   pools, tunnels, and on whether the ends are on nodes;
//! - protocol, ports and ICMP type, cut wherever a rule or a failsafe port cuts them; for doNotTrack with the sides
//!   changed as well, as there the reply is asked about.
//!
//! A class is what has all of the first three in common, in every world that it is made of; a class of ports the last. So
//! it is enough to ask about one pair, apart or not as the way has it. A stop is asked once for all classes that its own
//! policies do not tell apart: hundreds of nodes with host endpoints that look alike cost what one costs.

mod asked;
mod atoms;
mod change;
mod classes;
mod concern;
mod hosts;
mod judge;
pub mod lint;
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

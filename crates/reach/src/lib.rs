//! Questions about whole clusters: which ends reach each other, the effect of a change, rules that never decide.
//!
//! [`Classes`] groups pods, nodes, outsiders (addresses of no pod and no node) and ports so that no policy can
//! distinguish the members of a class. [`Classes::reduced`] keeps the representatives of each class, and [`Judge`]
//! evaluates them with the [oracle](tortie_oracle). So a cluster of thousands of pods becomes a cluster of some
//! dozens with the same verdicts. A test with random clusters verifies this (`crates/calc/tests/integration/classes.rs`): each
//! pair of pods, nodes and outsiders has the verdict of its classes.
//!
//! # What is evaluated
//!
//! Every pair of classes on each [`Path`]: by IPv4 and by IPv6; and if there are host endpoints, also between nodes
//! and on one node, because packets inside a node pass no interface that could have a host endpoint. A packet meets
//! policy at up to four [`Stop`]s, and passes if all of them allow it: the sending pod; the host endpoint of its
//! node, or of a node that sends itself; the host endpoint of the receiving node; the receiving pod. Not evaluated: a
//! pod that sends to itself, a node that sends to its own pods (always allowed), and the address before a Service's
//! translation.
//!
//! # Why classes are exact
//!
//! The result at one stop for a packet depends on
//! - the policies that apply there: for a pod its policies and profiles; for a host endpoint the same by table, its
//!   failsafe ports, and whether the node forwards the packet or is an end of it;
//! - the criteria that match the two addresses: each criterion of a rule (a selector, a network, a backend …) is an
//!   atom, and an address is the set of atoms that match it and all objects that have it;
//! - the address that a node, or a pod behind natOutgoing, has in the packet, and the interface that the packet
//!   passes: both depend on pools, tunnels, and whether the ends are on nodes;
//! - protocol, ports and ICMP type, divided wherever a rule or a failsafe port divides them; for doNotTrack also with
//!   the sides exchanged, because the reply is evaluated there.
//!
//! The members of a class have the first three in common, in every snapshot of the class; the members of a class of
//! ports have the last in common. So it is enough to evaluate one pair, on different nodes or not, as the path
//! requires. A stop is evaluated once for all classes that its own policies do not distinguish: hundreds of nodes
//! with equal host endpoints need as much time as one.

mod applying;
mod atoms;
mod change;
mod class;
mod classes;
mod concern;
mod criteria;
mod hosts;
mod judge;
pub mod lint;
mod matrix;
mod members;
mod names;
mod nets;
mod path;
mod placement;
mod ports;
mod rectangles;
mod signature;
mod why;

pub use change::{Change, Difference, summary};
pub use class::{Class, ClassKind};
pub use classes::Classes;
pub use concern::changed;
pub use judge::{Cell, Decision, Judge};
pub use matrix::{Content, Group, Matrix, group_name};
pub use path::{Path, Placement, Scope, Stop};
pub use ports::{CLIENT_PORT, Ports, Sample};
pub use why::{Decider, Reason, Why};

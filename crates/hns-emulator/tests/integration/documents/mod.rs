//! Documents and calls of the emulated HNS.

mod dual_stack;
mod knobs;
mod npm;
mod objects;
mod others;
mod psm1;
mod sets;
mod support;

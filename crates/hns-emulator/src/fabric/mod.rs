//! What an overlay network does with a frame: pure decisions, made from HNS documents.
//!
//! [`Fabric`] takes a frame that came in somewhere and says which frames go out where. The switch does the rest.

mod balance;
mod checksum;
mod forward;
mod frame;
mod judge;
mod plan;
mod segment;

#[cfg(test)]
mod tests;

pub(crate) use forward::{Fabric, Output, Port};
pub(crate) use plan::{NodeLeg, Plan, PodPort};

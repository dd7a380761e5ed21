//! Services in a network namespace: packets go where `NodeServices::evaluate` says.

mod affinity;
mod changes;
mod conflicts;
mod flows;
mod node;
mod packets;
mod priorities;
mod random;
mod repairs;
mod setting;

//! Services in a network namespace: packets go where `NodeServices::evaluate` says.

mod changes;
mod conflicts;
mod node;
mod packets;
mod priorities;
mod random;
mod repairs;
mod setting;

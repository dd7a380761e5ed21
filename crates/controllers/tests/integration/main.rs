//! The controllers on stores in memory, and on real servers.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod blocks;
mod calico_controllers;
mod calico_form;
mod common;
mod copies;
mod election;
mod load_balancers;
mod lock;
mod nodes;
mod permissions;
mod pool_deletion;
mod pool_migration;
mod pools;
mod servers;

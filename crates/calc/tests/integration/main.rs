//! Tests of calc from outside of the crate: other ways to its results, and random clusters.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod calc;
mod calico_edges;
mod claims;
mod classes;
mod differential;
mod flannel;
mod meaning;
mod no_route;
mod previews;
mod questions;
mod random_objects;
mod saved_state;
mod scratch;
mod services;
mod states;
mod tunnels;

//! Services of random clusters, compared with the oracle and with a computation from scratch.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod cases;
mod random;
mod reports;
mod setting;

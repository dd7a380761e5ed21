//! Tests of the gRPC service beyond the conformance suite: who may do what, and limits.

mod authorization;
mod limits;
mod revocation;

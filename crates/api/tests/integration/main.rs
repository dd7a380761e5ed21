//! Tests of the kinds of object, and of the generated files that describe them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod crd_samples;
mod crds;
mod crds_on_server;
mod fields;
mod hostile;
mod implied_slices;
mod manifests;
mod probe;
mod schema;
mod validation_edges;

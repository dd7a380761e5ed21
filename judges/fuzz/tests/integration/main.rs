//! The inputs of `corpus/`, which fuzzing and people have found.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod corpus;

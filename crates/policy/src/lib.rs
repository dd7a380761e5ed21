//! What policy *means*.

pub mod program;

//! The one binary `tortie`.
fn main() {}

//! Messages: what is written is read back, what is wrong is treated by the standards, and nothing panics.

mod differential;
mod malformed;
mod random_bytes;
mod round_trip;
mod strategies;
mod text;

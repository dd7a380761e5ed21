//! A BGP speaker of Tortie's own.
//!
//! - [`codec`]: messages as bytes and as values.
//!
//! `docs/bgp.md` lists the standards, with the tests that show them.

pub mod calico;
pub mod codec;
pub mod filter;
pub mod fsm;
pub mod rib;
pub mod router;
pub mod speaker;

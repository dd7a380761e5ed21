//! A peer by hand.

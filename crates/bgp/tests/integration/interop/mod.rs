//! Tortie's speaker next to others, in network namespaces.

mod bird;
mod exabgp;
mod lab;
mod mesh;
mod others;
mod restart;
mod scripted;

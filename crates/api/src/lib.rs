//! The resource types: Calico v3 kinds and the Kubernetes kinds that we read.

pub mod net;

//! Features of IPAM beyond one IPv4 address for a pod.

mod borrowing;
mod check;
mod families;
mod fixed;
mod labels;
mod load_balancers;
mod releases;
mod settings;
mod support;

//! Agents on a real Kubernetes API server: the start in a large cluster (goal F15), the time until a policy is in force on
//! 100 nodes (F12), and until packets obey it on one (F17), and 1,000 updates a second for 50 agents.
//!
//! Everything runs in network and mount namespaces of its own. `BENCH_PODS` sets a smaller cluster.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)] // a bench

mod cluster;
mod fan_out;
mod packets;
mod start;

use tortie_kernel::namespace::{Namespaces, enter};

const SCENARIOS: [(&str, fn()); 4] = [
    ("fan-out", fan_out::run),
    ("load", fan_out::run_load),
    ("packets", packets::run),
    ("start", start::run),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == start::AGENT) {
        return start::run_agent(&arguments[at + 1], &arguments[at + 2]);
    }
    // Threads would stay in the old namespaces.
    enter(Namespaces { mount: true, net: true, ..Namespaces::default() }).unwrap();
    let all = !arguments.iter().any(|argument| SCENARIOS.iter().any(|(name, _)| name == argument));
    for (name, run) in SCENARIOS {
        if all || arguments.iter().any(|argument| argument == name) {
            run();
        }
    }
}

/// The value at this share of the sorted durations, in milliseconds.
fn percentile(sorted: &[std::time::Duration], share: f64) -> f64 {
    let at = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(f64::NAN, |duration| duration.as_secs_f64() * 1_000.0)
}

//! A mesh of 50 speakers with 10,000 routes: Tortie's, and BIRD's in the same run. Each speaker is a process in a network
//! namespace of its own. Prints figures and asserts nothing.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    dead_code,
    reason = "a program for the terminal, which uses a part of the tests' lab"
)]

#[cfg(target_os = "linux")]
#[path = "mesh/bird.rs"]
mod bird;
#[cfg(target_os = "linux")]
#[path = "../tests/integration/interop/lab.rs"]
mod lab;
#[cfg(target_os = "linux")]
#[path = "mesh/tortie.rs"]
mod tortie;

#[cfg(target_os = "linux")]
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--speaker") {
        return tortie::speak(arguments[at + 1].parse().unwrap(), arguments[at + 2].parse().unwrap());
    }
    for count in [10, 50] {
        let lab = lab::Lab::new(count);
        fix_neighbours(&lab, count);
        let each = ROUTES / usize::from(count);
        println!("{count} speakers in a full mesh, {} routes", each * usize::from(count));
        let tortie = tortie::measure(&lab, count);
        let bird = bird::measure(&lab, count);
        report("Tortie", &tortie);
        report("BIRD", &bird);
        println!(
            "  ratio: time {:.2} (goal: at most 1.0), memory {:.2} (goal: at most 1.5)",
            tortie.full.as_secs_f64() / bird.full.as_secs_f64(),
            tortie.memory as f64 / bird.memory as f64
        );
    }
    println!(
        "BIRD waits at least a second before it connects, and its tables are polled every few milliseconds."
    );
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
pub(crate) const ROUTES: usize = 10_000;
/// How often one prefix is added.
#[cfg(target_os = "linux")]
pub(crate) const PREFIXES: usize = 20;

/// What was measured of one implementation.
#[cfg(target_os = "linux")]
pub(crate) struct Figures {
    /// From the start of the first process until all tables are full.
    pub(crate) full: std::time::Duration,
    /// The mean resident memory of a speaker, in KB.
    pub(crate) memory: usize,
    /// From one new prefix until all others have it.
    pub(crate) prefix: Vec<std::time::Duration>,
}

#[cfg(target_os = "linux")]
fn report(name: &str, figures: &Figures) {
    let mut prefix = figures.prefix.clone();
    prefix.sort();
    println!(
        "  {name:7} all tables full after {:.2} s; {:.1} MB a speaker; one prefix everywhere after {:.1} ms (median), {:.1} ms (max)",
        figures.full.as_secs_f64(),
        figures.memory as f64 / 1024.0,
        prefix[prefix.len() / 2].as_secs_f64() * 1e3,
        prefix[prefix.len() - 1].as_secs_f64() * 1e3,
    );
}

/// The resident memory of a process in KB.
#[cfg(target_os = "linux")]
pub(crate) fn resident(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Writes all neighbours into all tables: the machine has one limit for entries of other kinds, which a mesh exceeds.
#[cfg(target_os = "linux")]
fn fix_neighbours(lab: &lab::Lab, count: u8) {
    use tortie_kernel::route::{Change, Neighbour, RouteSocket};
    let links: Vec<_> = (1..=count)
        .map(|node| {
            let find = || {
                let links = RouteSocket::open().unwrap().links().unwrap();
                links.into_iter().find(|link| link.name == "eth0").unwrap()
            };
            lab.namespace(node).run(find).unwrap()
        })
        .collect();
    for node in 1..=count {
        let set = || {
            let mut socket = RouteSocket::open().unwrap();
            for other in (1..=count).filter(|other| *other != node) {
                let mac = links[usize::from(other) - 1].mac.unwrap();
                let link = links[usize::from(node) - 1].index;
                socket
                    .change(&Change::SetNeighbour(Neighbour { link, address: lab::ipv4(other), mac }))
                    .unwrap();
            }
        };
        lab.namespace(node).run(set).unwrap();
    }
}

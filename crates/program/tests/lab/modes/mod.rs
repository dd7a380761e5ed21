//! Each way between nodes, between all pairs of operating systems, within a network and through a router, with both families: ping,
//! TCP, UDP, and datagrams around the MTU. Linux nodes are namespaces on the real kernel, Windows nodes have an emulated HNS.
//!
//! [`MODES`] says what works and why the rest does not. A cell that works against it fails the test, too.

mod policy;
pub(crate) mod probe;
pub(crate) mod topology;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use probe::{Fate, Pod, fate, fragments, reaches};
use topology::{Cluster, NODES};

/// How long routes may take after a change of the pools.
const PATIENCE: Duration = Duration::from_secs(60);

/// The MTU of the network behind the router, where it is smaller than that of the nodes.
const NARROW: usize = 1400;

/// Two nodes of a cell, by their place in [`NODES`].
struct Pair {
    name: &'static str,
    nodes: [usize; 2],
    has_windows: bool,
    is_far: bool,
}

const fn pair(name: &'static str, nodes: [usize; 2], has_windows: bool, is_far: bool) -> Pair {
    Pair { name, nodes, has_windows, is_far }
}

const PAIRS: [Pair; 6] = [
    pair("Linux–Linux", [0, 1], false, false),
    pair("Linux–Linux", [0, 2], false, true),
    pair("Linux–Windows", [0, 3], true, false),
    pair("Linux–Windows", [0, 5], true, true),
    pair("Windows–Windows", [3, 4], true, false),
    pair("Windows–Windows", [3, 5], true, true),
];

/// What packets between two nodes do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// They pass in VXLAN.
    Vxlan,
    /// They pass as they are.
    Plain,
    /// They do not pass, for this reason.
    Not(&'static str),
}

const IPV4_ONLY: Way = Way::Not(REASONS[0].0);
const OVERLAY_ONLY: Way = Way::Not(REASONS[1].0);
const NOT_A_NEIGHBOUR: Way = Way::Not(REASONS[2].0);
const BRIDGE_ONLY: Way = Way::Not(REASONS[3].0);

/// Why packets do not pass.
const REASONS: [(&str, &str); 4] = [
    ("a", "Pods of a Windows node whose network is an overlay have IPv4 addresses only."),
    (
        "b",
        "The network of a Windows node is an overlay, which takes and sends packets of pods in VXLAN only.",
    ),
    (
        "c",
        "A node has direct routes to nodes of its network only, and the router between them knows no addresses of pods.",
    ),
    ("d", "The network of type L2Bridge of a Windows node (`--windows-network l2bridge`) has no VXLAN."),
];

/// A way between nodes.
struct Mode {
    name: &'static str,
    /// `vxlanMode` of the pools.
    vxlan: &'static str,
    /// Whether an administrator adds the routes of `tortie routes`: to the nodes, and to the router.
    routes_on: [bool; 2],
    /// Between Linux nodes of one network, and of two.
    linux: [Way; 2],
    /// To and between Windows nodes of one network, and of two.
    windows: [Way; 2],
    /// Whether pods of Windows nodes have IPv6: those of an L2Bridge network.
    has_bridges: bool,
}

const ALWAYS: Mode = Mode {
    name: "VXLAN Always",
    vxlan: "Always",
    routes_on: [false; 2],
    linux: [Way::Vxlan; 2],
    windows: [Way::Vxlan; 2],
    has_bridges: false,
};
const CROSS_SUBNET: Mode =
    Mode { name: "VXLAN CrossSubnet", vxlan: "CrossSubnet", linux: [Way::Plain, Way::Vxlan], ..ALWAYS };
const STATIC: Mode = Mode {
    name: "`tortie routes`",
    vxlan: "Never",
    routes_on: [true; 2],
    linux: [Way::Plain; 2],
    windows: [OVERLAY_ONLY; 2],
    has_bridges: false,
};
const BGP: Mode = Mode { name: "`--bgp`", routes_on: [false, true], ..STATIC };
const DIRECT: Mode =
    Mode { name: "`--direct-routes`", routes_on: [false; 2], linux: [Way::Plain, NOT_A_NEIGHBOUR], ..STATIC };

const BRIDGE_STATIC: Mode =
    Mode { name: "`tortie routes`, L2Bridge", windows: [Way::Plain; 2], has_bridges: true, ..STATIC };
const BRIDGE_CROSS_SUBNET: Mode = Mode {
    name: "VXLAN CrossSubnet, L2Bridge",
    windows: [Way::Plain, BRIDGE_ONLY],
    has_bridges: true,
    ..CROSS_SUBNET
};
const BRIDGE_DIRECT: Mode = Mode {
    name: "`--direct-routes`, L2Bridge",
    windows: [Way::Plain, NOT_A_NEIGHBOUR],
    has_bridges: true,
    ..DIRECT
};
const BRIDGE_BGP: Mode =
    Mode { name: "`--bgp`, L2Bridge", windows: [Way::Plain; 2], has_bridges: true, ..BGP };

/// All modes, and the options of the lab that they need.
const LABS: [(&[&str], &[Mode]); 6] = [
    (&[], &[ALWAYS, CROSS_SUBNET, STATIC]),
    (&["--bgp"], &[BGP]),
    (&["--direct-routes"], &[DIRECT]),
    (&["--l2bridge"], &[BRIDGE_CROSS_SUBNET, BRIDGE_STATIC]),
    (&["--l2bridge", "--direct-routes"], &[BRIDGE_DIRECT]),
    (&["--l2bridge", "--bgp"], &[BRIDGE_BGP]),
];

impl Mode {
    fn way(&self, pair: &Pair, is_ipv6: bool) -> Way {
        match (pair.has_windows, is_ipv6) {
            (true, true) if !self.has_bridges => IPV4_ONLY,
            (true, _) => self.windows[usize::from(pair.is_far)],
            (false, _) => self.linux[usize::from(pair.is_far)],
        }
    }
}

#[test]
fn vxlan_and_static_routes() {
    check(&LABS[0]);
}

#[test]
fn bgp() {
    check(&LABS[1]);
}

#[test]
fn direct_routes() {
    check(&LABS[2]);
}

#[test]
fn networks_of_windows_nodes_without_overlay() {
    check(&LABS[3]);
}

#[test]
fn direct_routes_of_windows_nodes() {
    check(&LABS[4]);
}

#[test]
fn bgp_of_windows_nodes() {
    check(&LABS[5]);
}

fn check((options, modes): &(&[&str], &[Mode])) {
    let cluster = Cluster::up(options);
    for mode in *modes {
        cluster.set_vxlan_mode(mode.vxlan);
        cluster.add_routes(mode.routes_on);
        check_matrix(&cluster, mode);
        check_sizes(&cluster, mode);
        check_narrow_router(&cluster, mode);
    }
    if options.contains(&"--l2bridge") {
        policy::check_policy(&cluster);
    }
    cluster.down();
}

/// The cells of a mode: pairs of nodes, and whether the family is IPv6.
fn cells() -> impl Iterator<Item = (&'static Pair, bool)> {
    PAIRS.iter().flat_map(|pair| [(pair, false), (pair, true)])
}

/// Each cell is as its mode says, in both directions.
fn check_matrix(cluster: &Cluster, mode: &Mode) {
    let begin = Instant::now();
    loop {
        let wrong = wrong_cells(cluster, mode);
        if wrong.is_empty() {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{}:\n{}", mode.name, wrong.join("\n"));
    }
}

fn wrong_cells(cluster: &Cluster, mode: &Mode) -> Vec<String> {
    std::thread::scope(|scope| {
        let directions = cells().flat_map(|(pair, is_ipv6)| {
            let [one, other] = pair.nodes;
            [(pair, is_ipv6, one, other), (pair, is_ipv6, other, one)]
        });
        let checks: Vec<_> = directions
            .map(|(pair, is_ipv6, from, to)| {
                scope.spawn(move || wrong_cell(cluster, mode, pair, is_ipv6, [from, to]))
            })
            .collect();
        checks.into_iter().filter_map(|check| check.join().unwrap()).collect()
    })
}

/// What is not as it must be from one node to another.
fn wrong_cell(
    cluster: &Cluster,
    mode: &Mode,
    pair: &Pair,
    is_ipv6: bool,
    nodes: [usize; 2],
) -> Option<String> {
    let [from, to] = nodes.map(|node| &cluster.pods[node]);
    let way = mode.way(pair, is_ipv6);
    let Some(address) = to.address(is_ipv6) else {
        return (way != IPV4_ONLY).then(|| format!("{} has no such address", NODES[nodes[1]]));
    };
    let found = reaches(from, to, address);
    let device = cluster.device(nodes[0], address);
    let is_right = match way {
        Way::Not(_) => found.is_err(),
        // Windows nodes have no such link.
        Way::Vxlan => found.is_ok() && device.as_deref().is_none_or(|device| device.starts_with("vxlan")),
        Way::Plain => found.is_ok() && device.as_deref().is_none_or(|device| device == "eth0"),
    };
    let [from, to] = nodes.map(|node| NODES[node]);
    (!is_right)
        .then(|| format!("{from} to {to} ({address}): must be {way:?}, and is {found:?} by {device:?}"))
}

/// What fits arrives in one piece. What does not fit is answered.
fn check_sizes(cluster: &Cluster, mode: &Mode) {
    let before: Vec<u64> = cluster.nodes.iter().map(fragments).collect();
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let works = cells().filter(|(pair, is_ipv6)| !matches!(mode.way(pair, *is_ipv6), Way::Not(_)));
        let directions = works.flat_map(|(pair, is_ipv6)| {
            let [one, other] = pair.nodes;
            [(is_ipv6, one, other), (is_ipv6, other, one)]
        });
        let sweeps: Vec<_> = directions
            .map(|(is_ipv6, from, to)| scope.spawn(move || sweep(&cluster.pods, is_ipv6, from, to)))
            .collect();
        sweeps.into_iter().flat_map(|sweep| sweep.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}:\n{}", mode.name, wrong.join("\n"));
    let after: Vec<u64> = cluster.nodes.iter().map(fragments).collect();
    assert_eq!(before, after, "{}: no node has fragmented or put together packets", mode.name);
}

/// Sizes around the MTU of both ends, from one pod to another. Returns those with another fate than they must have.
fn sweep(pods: &[Pod], is_ipv6: bool, from: usize, to: usize) -> Vec<String> {
    let address = pods[to].address(is_ipv6).unwrap();
    let [own, other] = [from, to].map(|node| pods[node].mtu);
    let path = own.min(other);
    let mut sizes = vec![100, path - 1, path, path + 1, own, own + 1];
    sizes.dedup();
    let wrong = sizes.into_iter().filter_map(|size| {
        let must = if size <= path { Fate::Arrived } else { Fate::TooLarge };
        let found = fate(&pods[from], &pods[to], address, size);
        let [from, to] = [from, to].map(|node| NODES[node]);
        (found != must)
            .then(|| format!("{size} bytes from {from} to {to} ({address}): {found:?}, not {must:?}"))
    });
    wrong.collect()
}

/// A router with a smaller MTU than the nodes': large packets pass, or their pod learns that they are too large.
fn check_narrow_router(cluster: &Cluster, mode: &Mode) {
    cluster.set_mtu_behind_router(NARROW);
    let far = cells().filter(|(pair, _)| pair.is_far);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let checks: Vec<_> = far
            .filter_map(|(pair, is_ipv6)| {
                let must = match mode.way(pair, is_ipv6) {
                    Way::Not(_) => return None,
                    // The router fragments the outer packets of IPv4. Nobody but the sender fragments those of IPv6.
                    Way::Vxlan if !is_ipv6 => Fate::Arrived,
                    Way::Vxlan | Way::Plain => Fate::TooLarge,
                };
                Some(scope.spawn(move || narrow(&cluster.pods, is_ipv6, pair.nodes, must)))
            })
            .collect();
        checks.into_iter().flat_map(|check| check.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}:\n{}", mode.name, wrong.join("\n"));
    cluster.set_mtu_behind_router(1500);
}

fn narrow(pods: &[Pod], is_ipv6: bool, [from, to]: [usize; 2], large: Fate) -> Vec<String> {
    let address = pods[to].address(is_ipv6).unwrap();
    let largest = pods[from].mtu.min(pods[to].mtu);
    let sizes = [(1280, Fate::Arrived), (largest, large)];
    let wrong = sizes.into_iter().filter_map(|(size, must)| {
        let found = fate(&pods[from], &pods[to], address, size);
        let [from, to] = [from, to].map(|node| NODES[node]);
        (found != must)
            .then(|| format!("{size} bytes from {from} to {to} ({address}): {found:?}, not {must:?}"))
    });
    wrong.collect()
}

/// The table in docs/status.md is this one.
#[test]
fn the_documented_table_is_the_tested_one() {
    let shown = table();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/status.md");
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains(&shown), "docs/status.md must contain this table:\n{shown}");
}

fn table() -> String {
    let mut text = String::from("| |");
    for pair in &PAIRS {
        let place = if pair.is_far { "other network" } else { "same network" };
        write!(text, " {}, {place} |", pair.name).unwrap();
    }
    writeln!(text, "\n|{}", "---|".repeat(PAIRS.len() + 1)).unwrap();
    for mode in LABS.iter().flat_map(|(_, modes)| *modes) {
        let cells: String = PAIRS.iter().map(|pair| format!(" {} |", cell(mode, pair))).collect();
        writeln!(text, "| {} |{cells}", mode.name).unwrap();
    }
    for (letter, reason) in REASONS {
        write!(text, "\n- ({letter}) {reason}").unwrap();
    }
    text
}

fn cell(mode: &Mode, pair: &Pair) -> String {
    let [v4, v6] = [false, true].map(|is_ipv6| match mode.way(pair, is_ipv6) {
        Way::Vxlan => "VXLAN".to_owned(),
        Way::Plain => "plain".to_owned(),
        Way::Not(reason) => format!("no ({reason})"),
    });
    if v4 == v6 { v4 } else { format!("{v4}; IPv6: {v6}") }
}

//! A node with 5,000 VXLAN peers (goal F10): all of them from nothing, one that joins and leaves, one whose MAC address changes, one
//! block, and a comparison with the kernel. Each is beside the kernel's own time for the same entries, and beside `ip -batch` and
//! `bridge -batch`. It needs root, and works in network namespaces of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::bench();
}

#[cfg(target_os = "linux")]
#[path = "large_table/mod.rs"]
mod large_table;

#[cfg(target_os = "linux")]
mod linux {
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::net::Ipv4Addr;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use ipnet::{IpNet, Ipv4Net};
    use testkit::Stateful;
    use tortie_api::net::{IpVersion, MacAddress};
    use tortie_dataplane::{Delta, LocalNode, Report, Route as PodRoute, RouteTarget, Vtep};
    use tortie_kernel::interface_index;
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::{
        Address, Change, FdbEntry, Neighbour, NewLink, NewLinkKind, Route, RouteSocket, Vxlan,
    };
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;

    use crate::large_table::measure;

    const PEERS: u32 = 5_000;
    const PROTOCOL: u8 = 84;
    /// The peer that joins and leaves.
    const NEW: u32 = PEERS + 1;
    const ROUNDS: usize = 300;

    fn address(first: u32, number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(first + number)
    }

    /// The address of a peer on the underlay.
    fn own(number: u32) -> Ipv4Addr {
        address(0xac10_0001, number)
    }

    fn tunnel(number: u32) -> Ipv4Addr {
        address(0x0a80_0001, number * 64)
    }

    fn block(number: u32) -> IpNet {
        IpNet::V4(Ipv4Net::new(address(0x0a80_0000, number * 64), 26).unwrap())
    }

    fn mac(number: u32, version: u8) -> MacAddress {
        let [_, a, b, c] = number.to_be_bytes();
        MacAddress([0x66, version, 0, a, b, c])
    }

    fn vtep(number: u32, version: u8) -> Vtep {
        let mac = mac(number, version);
        Vtep {
            node: format!("node-{number}"),
            address: tunnel(number).into(),
            mac,
            parent: own(number).into(),
            mtu: None,
        }
    }

    fn route(number: u32) -> Delta {
        let target = RouteTarget::Vxlan { node: format!("node-{number}") };
        Delta::Route(PodRoute { destination: block(number), target })
    }

    fn joins(number: u32) -> [Delta; 2] {
        [Delta::Vtep(vtep(number, 0)), route(number)]
    }

    fn leaves(number: u32) -> [Delta; 2] {
        [Delta::RouteRemoved(block(number)), Delta::VtepRemoved(format!("node-{number}"), IpVersion::V4)]
    }

    /// The interface with the node's address.
    fn underlay() {
        let mut routes = RouteSocket::open().unwrap();
        routes.create(&NewLink { up: true, ..NewLink::new("eth0", NewLinkKind::Bridge) }).unwrap();
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: own(0).into(), prefix_length: 12 };
        routes.change(&Change::AddAddress(address)).unwrap();
    }

    /// A VXLAN link like that of the dataplane, without entries.
    fn bare_link() -> u32 {
        underlay();
        let vxlan = Vxlan { vni: 4096, port: 4789, local: Some(own(0).into()), learning: false };
        let link = NewLink { up: true, ..NewLink::new("vxlan0", NewLinkKind::Vxlan(vxlan)) };
        RouteSocket::open().unwrap().create(&link).unwrap();
        interface_index("vxlan0").unwrap()
    }

    struct Times {
        all: Duration,
        /// A peer joins or leaves, p50 and p99.
        peer: [Duration; 2],
        mac: [Duration; 2],
        block: [Duration; 2],
        compared: Option<Duration>,
    }

    pub(crate) fn bench() {
        let ours = NetNs::create().unwrap().run(tortie).unwrap();
        let kernel = NetNs::create().unwrap().run(kernel).unwrap();
        let programs = programs();
        println!("\n{PEERS} VXLAN peers, each with a block");
        println!(
            "{:34}{:>24}{:>24}{:>12}{:>12}",
            "", "tortie p50 / p99", "kernel p50 / p99", "/ kernel", "/ ip, bridge"
        );
        let row = |what: &str, of: fn(&Times) -> [Duration; 2]| {
            let [ours, kernel, programs] = [of(&ours), of(&kernel), of(&programs)];
            let ratio = |other: [Duration; 2]| ours[0].as_secs_f64() / other[0].as_secs_f64();
            let shown = |[p50, p99]: [Duration; 2]| format!("{p50:.1?} / {p99:.1?}");
            let (by_kernel, by_programs) = (ratio(kernel), ratio(programs));
            println!("{what:34}{:>24}{:>24}{by_kernel:>12.2}{by_programs:>12.3}", shown(ours), shown(kernel));
        };
        row("all from nothing (F10)", |times| [times.all; 2]);
        row("a peer joins or leaves (F10)", |times| times.peer);
        row("the MAC address of a peer (F10)", |times| times.mac);
        row("a block of a peer (F10)", |times| times.block);
        let compared =
            [ours.compared, kernel.compared].map(|took| format!("{:.1?}", took.unwrap_or_default()));
        println!("read back and compared: {}; read by the kernel alone: {}", compared[0], compared[1]);
        println!("goal (F10): all in at most 1 s, one change in at most 1 ms");
    }

    fn tortie() -> Times {
        underlay();
        let config = Config { guard_table: false, ..Config::default() };
        let mut dataplane = Stateful::new(Dataplane::open(config).unwrap());
        let mut apply = |deltas: &[Delta]| assert_eq!(dataplane.apply(deltas), Report::default());
        apply(&[Delta::Node(LocalNode::ipv4("node-0", own(0), Some(vtep(0, 0))))]);
        let all: Vec<Delta> = (1..=PEERS).flat_map(joins).collect();
        let [all, _] = measure(1, || apply(&all));
        let turns = [joins(NEW), leaves(NEW)];
        let mut turn = turns.iter().cycle();
        let peer = measure(ROUNDS, || apply(turn.next().unwrap()));
        let versions = [1, 0].map(|version| [Delta::Vtep(vtep(7, version))]);
        let mut turn = versions.iter().cycle();
        let mac = measure(ROUNDS, || apply(turn.next().unwrap()));
        let Delta::Route(other) = route(7) else { unreachable!() };
        let other = PodRoute { destination: block(NEW), ..other };
        let blocks = [[Delta::Route(other)], [Delta::RouteRemoved(block(NEW))]];
        let mut turn = blocks.iter().cycle();
        let block = measure(ROUNDS, || apply(turn.next().unwrap()));
        let [compared, _] = measure(5, || assert_eq!(dataplane.resync(), Report::default()));
        Times { all, peer, mac, block, compared: Some(compared) }
    }

    /// The entries of a peer without its block.
    fn entries(link: u32, number: u32, version: u8) -> (Change, Change) {
        let (tunnel, mac) = (tunnel(number).into(), mac(number, version));
        let neighbour = Neighbour { link, address: tunnel, mac };
        let fdb = FdbEntry { link, mac, destination: own(number).into() };
        (Change::SetFdb(fdb), Change::SetNeighbour(neighbour))
    }

    fn routes(link: u32, number: u32) -> [Route; 2] {
        let tunnel = tunnel(number).into();
        [
            Route::on_link(IpNet::from(tunnel), link, PROTOCOL),
            Route::via(block(number), tunnel, link, PROTOCOL),
        ]
    }

    fn kernel() -> Times {
        let link = bare_link();
        let mut socket = RouteSocket::open().unwrap();
        let mut change = |changes: &[Change]| {
            let verdicts = socket.change_all(changes).unwrap();
            assert!(verdicts.iter().all(Result::is_ok), "{verdicts:?}");
        };
        let come = |number| {
            let (fdb, neighbour) = entries(link, number, 0);
            let routes = routes(link, number).map(Change::AddRoute);
            [fdb, neighbour].into_iter().chain(routes)
        };
        let go = |number| {
            let [own, block] = routes(link, number);
            let (Change::SetFdb(fdb), Change::SetNeighbour(neighbour)) = entries(link, number, 0) else {
                unreachable!()
            };
            vec![
                Change::DeleteRoute(block),
                Change::DeleteRoute(own),
                Change::DeleteNeighbour(neighbour),
                Change::DeleteFdb(fdb),
            ]
        };
        let all: Vec<Change> = (1..=PEERS).flat_map(come).collect();
        let [all, _] = measure(1, || change(&all));
        let turns = [come(NEW).collect::<Vec<_>>(), go(NEW)];
        let mut turn = turns.iter().cycle();
        let peer = measure(ROUNDS, || change(turn.next().unwrap()));
        let versions = [1, 0].map(|version| {
            let (fdb, neighbour) = entries(link, 7, version);
            let (Change::SetFdb(old), _) = entries(link, 7, 1 - version) else { unreachable!() };
            [fdb, neighbour, Change::DeleteFdb(old)]
        });
        let mut turn = versions.iter().cycle();
        let mac = measure(ROUNDS, || change(turn.next().unwrap()));
        let other = Route::via(block(NEW), tunnel(7).into(), link, PROTOCOL);
        let blocks = [[Change::AddRoute(other.clone())], [Change::DeleteRoute(other)]];
        let mut turn = blocks.iter().cycle();
        let block = measure(ROUNDS, || change(turn.next().unwrap()));
        let [compared, _] = measure(5, || {
            assert!(socket.routes().unwrap().len() >= 2 * PEERS as usize);
            assert!(socket.neighbours().unwrap().len() >= PEERS as usize);
            assert!(socket.fdb(link).unwrap().len() >= PEERS as usize);
        });
        Times { all, peer, mac, block, compared: Some(compared) }
    }

    /// By the programs `ip` and `bridge`, which read the entries from a pipe.
    fn programs() -> Times {
        let namespace = NetNs::create().unwrap();
        namespace.run(bare_link).unwrap();
        let run = |program: &str, text: &str| {
            let mut command = Command::new(program);
            command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
            let mut child = namespace.enter_on_spawn(&mut command).unwrap().spawn().unwrap();
            child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
            assert!(child.wait().unwrap().success(), "{program}");
        };
        let both = |[ip, bridge]: &[String; 2]| {
            run("bridge", bridge);
            run("ip", ip);
        };
        let fdb = |verb: &str, number: u32, version: u8| {
            let (mac, own) = (mac(number, version), own(number));
            format!("fdb {verb} {mac} dev vxlan0 dst {own} self permanent\n")
        };
        let neighbour = |verb: &str, number: u32, version: u8| {
            let (mac, tunnel) = (mac(number, version), tunnel(number));
            format!("neigh {verb} {tunnel} lladdr {mac} dev vxlan0 nud permanent\n")
        };
        let to_block = |verb: &str, to: u32, of: u32| {
            format!("route {verb} {} via {} dev vxlan0 onlink proto {PROTOCOL}\n", block(to), tunnel(of))
        };
        let come = |number: u32| {
            let mut ip = neighbour("replace", number, 0);
            writeln!(ip, "route add {}/32 dev vxlan0 proto {PROTOCOL}", tunnel(number)).unwrap();
            [ip + &to_block("add", number, number), fdb("replace", number, 0)]
        };
        let go = |number: u32| {
            let mut ip = to_block("del", number, number);
            writeln!(ip, "route del {}/32 dev vxlan0 proto {PROTOCOL}", tunnel(number)).unwrap();
            [ip + &neighbour("del", number, 0), fdb("del", number, 0)]
        };
        let all = (1..=PEERS)
            .map(come)
            .fold([String::new(), String::new()], |[ip, bridge], [more, most]| [ip + &more, bridge + &most]);
        let [all, _] = measure(1, || both(&all));
        let turns = [come(NEW), go(NEW)];
        let mut turn = turns.iter().cycle();
        let peer = measure(20, || both(turn.next().unwrap()));
        let versions = [1, 0].map(|version| {
            let bridge = fdb("replace", 7, version) + &fdb("del", 7, 1 - version);
            [neighbour("replace", 7, version), bridge]
        });
        let mut turn = versions.iter().cycle();
        let mac = measure(20, || both(turn.next().unwrap()));
        let blocks = ["add", "del"].map(|verb| to_block(verb, NEW, 7));
        let mut turn = blocks.iter().cycle();
        let block = measure(20, || run("ip", turn.next().unwrap()));
        Times { all, peer, mac, block, compared: None }
    }
}

//! TCP throughput between pods of two nodes by way of VXLAN (goal F10): with Tortie's overlay, links and policy; with the same made by
//! hand with `ip` and `bridge`, without any table; and with that and connection tracking. All have the same MTU, and take turns. It
//! needs root, and works in network namespaces of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::bench();
}

#[cfg(target_os = "linux")]
#[path = "../tests/common/mod.rs"]
mod common;

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
    use std::process::Command;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use tortie_api::net::{Action, PortRange, Protocol};
    use tortie_dataplane::Report;
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::RouteSocket;
    use tortie_kernel::sysctl;
    use tortie_policy::program::{
        EndOfTier, EntityMatch, Member, PolicyId, PolicyKind, PolicyRules, Rule, SetId, SetKind,
    };

    use crate::common::cable;
    use crate::common::cluster::{Node, Pod, Underlay, ingress, open, two_nodes, vtep};

    const PORT: u16 = 7002;
    /// The policies of the receiving pod, each with a set of [`MEMBERS`] addresses. Only the last one allows the connection.
    const POLICIES: [usize; 3] = [0, 100, 1_000];
    const MEMBERS: u32 = 20;
    /// How often each side is measured, and for how long. Before, the connection gets time to find its speed.
    const ROUNDS: usize = 21;
    const WINDOW: Duration = Duration::from_millis(700);
    const WARM_UP: Duration = Duration::from_millis(200);
    const CHUNK: usize = 128 * 1024;

    /// A pair of pods with a connection by way of VXLAN.
    struct Side<'a> {
        from: &'a NetNs,
        to: Ipv4Addr,
        sink: TcpListener,
    }

    pub(crate) fn bench() {
        let (mut nodes, pods) = two_nodes();
        let mtu_of_pods = mtu(&pods[0].namespace, "eth0");
        let [plain, tracking] = [(); 2].map(|()| ByHand::new(mtu_of_pods));
        tracking.nodes.iter().for_each(track_connections);
        for pod in [&plain.pods[1], &tracking.pods[1]] {
            assert_eq!(mtu(pod, "eth0"), mtu_of_pods);
        }
        let ends = [
            (&pods[0].namespace, &pods[1].namespace, pods[1].address),
            (&plain.pods[0], &plain.pods[1], ByHand::address(2)),
            (&tracking.pods[0], &tracking.pods[1], ByHand::address(2)),
        ];
        let sides = ends.map(|(from, to, address)| Side { from, to: address, sink: listen(to) });
        println!(
            "\nTCP between pods of two nodes by way of VXLAN, MTU {mtu_of_pods}: one connection, median of {ROUNDS} in Gbit/s"
        );
        println!(
            "{:>10}{:>10}{:>10}{:>12}{:>12}{:>12}",
            "policies", "tortie", "by hand", "/ by hand", "tracking", "/ tracking"
        );
        for policies in POLICIES {
            restrict(&mut nodes[1], &pods, policies);
            let rounds: Vec<[f64; 3]> = (0..ROUNDS).map(|round| measure(&sides, round)).collect();
            let [tortie, plain, tracking] =
                [0, 1, 2].map(|side| median(rounds.iter().map(|round| round[side])));
            let [to_plain, to_tracking] =
                [1, 2].map(|side| median(rounds.iter().map(|round| round[0] / round[side])));
            println!(
                "{policies:>10}{tortie:>10.2}{plain:>10.2}{to_plain:>12.3}{tracking:>12.2}{to_tracking:>12.3}"
            );
        }
        println!("ratios are medians of the ratios within a round");
        println!("goal (F10): at least 0.95 of the VXLAN made by hand");
    }

    /// Measures each side once. Who begins changes with the number of the round, because a machine that others use is not the same
    /// for all.
    fn measure(sides: &[Side<'_>; 3], round: usize) -> [f64; 3] {
        let mut figures = [0.0; 3];
        for index in (0..3).map(|turn| (round + turn) % 3) {
            let Side { from, to, sink } = &sides[index];
            figures[index] = from.run(|| throughput(*to, sink)).unwrap();
        }
        figures
    }

    fn median(figures: impl Iterator<Item = f64>) -> f64 {
        let mut figures: Vec<f64> = figures.collect();
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    }

    fn mtu(namespace: &NetNs, link: &str) -> u32 {
        namespace.run(|| RouteSocket::open().unwrap().link(link).unwrap().unwrap().mtu).unwrap()
    }

    fn listen(pod: &NetNs) -> TcpListener {
        pod.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap()).unwrap()
    }

    /// What arrives within the window, in Gbit/s. The calling thread is in the pod that sends.
    fn throughput(to: Ipv4Addr, sink: &TcpListener) -> f64 {
        let mut stream =
            TcpStream::connect_timeout(&SocketAddr::from((to, PORT)), Duration::from_secs(5)).unwrap();
        let (mut receiver, _) = sink.accept().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let chunk = vec![7; CHUNK];
                while stream.write_all(&chunk).is_ok() {}
            });
            let mut buffer = vec![0; CHUNK];
            let mut read_for = |time: Duration| {
                let (begin, mut bytes) = (Instant::now(), 0);
                while begin.elapsed() < time {
                    bytes += receiver.read(&mut buffer).unwrap();
                }
                bytes as f64 * 8.0 / begin.elapsed().as_secs_f64() / 1e9
            };
            read_for(WARM_UP);
            let figure = read_for(WINDOW);
            receiver.shutdown(std::net::Shutdown::Both).unwrap();
            drop(receiver);
            figure
        })
    }

    /// Gives the second pod that many policies.
    fn restrict(node: &mut Node, pods: &[Pod; 2], policies: usize) {
        if policies == 0 {
            return node.program(&pods[1], open());
        }
        let set = |number: usize| SetId::new(format!("s:{number:036}"));
        let rule = |number: usize, port: u16| Rule {
            protocol: Some(Protocol::TCP),
            source: EntityMatch { sets: vec![set(number)], ..EntityMatch::default() },
            destination: EntityMatch {
                ports: vec![PortRange { first: port, last: port }],
                ..EntityMatch::default()
            },
            ..Rule::all(Action::Allow)
        };
        let names: Vec<String> = (0..policies).map(|number| format!("p{number}")).collect();
        let report = node.change(|state| {
            for (number, name) in names.iter().enumerate() {
                let others =
                    (0..MEMBERS).map(|n| Ipv4Addr::from_bits(0xac20_0000 + number as u32 * MEMBERS + n));
                let client = (number + 1 == policies).then_some(pods[0].address);
                let members =
                    others.chain(client).map(|address| Member::Net(std::net::IpAddr::from(address).into()));
                state.sets.insert(set(number), (SetKind::Nets, members.collect()));
                let id = PolicyId {
                    kind: PolicyKind::NetworkPolicy,
                    namespace: "demo".into(),
                    name: name.as_str().into(),
                };
                let ingress = [PORT, 8001, 8002, 8003, 8004].map(|port| rule(number, port)).into();
                state.policies.insert(id, Arc::new(PolicyRules { ingress, egress: vec![] }));
            }
        });
        assert_eq!(report, Report::default());
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        node.program(&pods[1], ingress(&names, EndOfTier::Deny));
    }

    /// Two nodes with a pod each, and VXLAN between them, as one makes them by hand.
    struct ByHand {
        pods: [NetNs; 2],
        nodes: [NetNs; 2],
        _underlay: Underlay,
    }

    impl ByHand {
        fn address(number: u8) -> Ipv4Addr {
            Ipv4Addr::new(10, 65, number, 2)
        }

        fn new(mtu: u32) -> Self {
            let underlay = Underlay::new();
            let nodes = [1, 2].map(|number| underlay.connect(number));
            let pods = [1, 2].map(|_| NetNs::create().unwrap());
            for (index, (node, pod)) in nodes.iter().zip(&pods).enumerate() {
                let (own, other) = [(1, 2), (2, 1)][index];
                node.run(|| sysctl::ensure("net/ipv4/ip_forward", "1").unwrap()).unwrap();
                cable(node, "pod", pod, "eth0");
                let (address, own, other) = (Self::address(own), vtep(own), vtep(other));
                ip(node, &format!("link set pod mtu {mtu}"));
                ip(node, "addr add 169.254.1.1/32 dev pod");
                ip(node, &format!("route add {} dev pod", address));
                ip(pod, &format!("link set eth0 mtu {mtu}"));
                ip(pod, &format!("addr add {}/32 dev eth0", address));
                ip(pod, "route add 169.254.1.1 dev eth0");
                ip(pod, "route add default via 169.254.1.1");
                let device = format!("id 4096 local {} dev eth0 dstport 4789 nolearning", own.parent);
                ip(node, &format!("link add vx address {} type vxlan {device}", own.mac));
                ip(node, &format!("link set vx mtu {mtu} up"));
                ip(node, &format!("addr add {}/32 dev vx", own.address));
                ip(node, &format!("neigh add {} lladdr {} dev vx nud permanent", other.address, other.mac));
                ip(node, &format!("route add {}/26 via {} dev vx onlink", other.address, other.address));
                run(node, "bridge", &format!("fdb add {} dev vx dst {}", other.mac, other.parent));
            }
            Self { pods, nodes, _underlay: underlay }
        }
    }

    /// The least that a table with policy does for packets of established connections.
    fn track_connections(node: &NetNs) {
        for arguments in [
            "add table inet least",
            "add chain inet least forward { type filter hook forward priority filter ; }",
            "add rule inet least forward ct state established,related accept",
        ] {
            run(node, "nft", arguments);
        }
    }

    fn ip(namespace: &NetNs, arguments: &str) {
        run(namespace, "ip", arguments);
    }

    fn run(namespace: &NetNs, program: &str, arguments: &str) {
        let mut command = Command::new(program);
        command.args(arguments.split(' '));
        let status = namespace.enter_on_spawn(&mut command).unwrap().status().unwrap();
        assert!(status.success(), "{program} {arguments}");
    }
}

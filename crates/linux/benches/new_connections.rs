//! New connections per second to a pod under 10, 100 and 1,000 policies (goal F8), of which only the last allows
//! them: with Tortie's table, and with a table in the shape of Calico's, in the same namespaces. It needs root, and
//! works in network namespaces of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::bench();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fmt::Write as _;
    use std::io::Read;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::process::Command;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use testkit::Stateful;
    use tortie_api::net::{Action, PortRange, Protocol};
    use tortie_dataplane::{Delta, Endpoint, EndpointId, Report};
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::*;
    use tortie_kernel::{interface_index, sysctl};
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;
    use tortie_policy::program::{
        EndOfTier, EndpointProgram, EntityMatch, Member, PolicyId, PolicyKind, PolicyRules, Rule, SetId,
        SetKind, TierProgram,
    };

    const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 65, 0, 1);
    const SERVER: Ipv4Addr = Ipv4Addr::new(10, 65, 0, 2);
    const PORT: u16 = 7002;
    const MEMBERS: u32 = 20;
    /// The duration of one measurement, and the number of measurements for a median.
    const WINDOW: Duration = Duration::from_millis(1_000);
    const WINDOWS: usize = 5;

    pub(crate) fn bench() {
        let (node, client, server) =
            (NetNs::create().unwrap(), NetNs::create().unwrap(), NetNs::create().unwrap());
        node.run(|| sysctl::ensure("net/ipv4/ip_forward", "1").unwrap()).unwrap();
        for (pod, name, address) in [(&client, "cali-client", CLIENT), (&server, "cali-server", SERVER)] {
            connect(&node, pod, name, address);
        }
        let listener = server.run(|| TcpListener::bind((SERVER, PORT)).unwrap()).unwrap();
        std::thread::spawn(move || listener.incoming().for_each(drop));

        println!("{:>28}{:>14}{:>14}{:>9}", "new connections a second", "tortie", "Calico-shaped", "ratio");
        let nothing = rate(&client);
        println!("{:>28}{nothing:>14.0}", "no table at all");
        for policies in [10, 100, 1_000] {
            let mut dataplane =
                node.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
            let deltas = deltas(policies);
            let report = node.run(|| dataplane.apply(&deltas)).unwrap();
            assert_eq!(report, Report::default());
            let ours = rate(&client);
            drop(dataplane);
            nft(&node, "delete table inet tortie");
            nft(&node, &calico(policies));
            let theirs = rate(&client);
            nft(&node, "delete table inet calico");
            println!("{policies:>19} policies{ours:>14.0}{theirs:>14.0}{:>9.2}", ours / theirs);
        }
    }

    /// A link from the node to a pod, with the configuration of both ends.
    fn connect(node: &NetNs, pod: &NetNs, name: &str, address: Ipv4Addr) {
        let gateway = Ipv4Addr::new(169, 254, 1, 1);
        node.run(|| {
            let peer = Peer { name: "eth0", mac: None, mtu: None, namespace: Some(pod.as_fd()) };
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new(name, NewLinkKind::Veth(peer)) }).unwrap();
            let link = interface_index(name).unwrap();
            sysctl::ensure(&format!("net/ipv4/conf/{name}/proxy_arp"), "1").unwrap();
            let net = IpAddr::from(address).into();
            socket.change(&Change::AddRoute(Route::on_link(net, link, 4))).unwrap();
        })
        .unwrap();
        let mac =
            node.run(|| RouteSocket::open().unwrap().link(name).unwrap().unwrap().mac.unwrap()).unwrap();
        pod.run(|| {
            let mut socket = RouteSocket::open().unwrap();
            let link = interface_index("eth0").unwrap();
            let up = Change::SetLink(link, vec![LinkSetting::Up(true)]);
            let own = Address { link, address: address.into(), prefix_length: 32 };
            let to_gateway = Route::on_link(IpAddr::from(gateway).into(), link, 4);
            let default = Route::via("0.0.0.0/0".parse().unwrap(), gateway.into(), link, 4);
            let neighbour = Neighbour { link, address: gateway.into(), mac };
            for change in [
                up,
                Change::AddAddress(own),
                Change::AddRoute(to_gateway),
                Change::AddRoute(default),
                Change::SetNeighbour(neighbour),
            ] {
                socket.change(&change).unwrap();
            }
        })
        .unwrap();
    }

    /// The median of several windows.
    fn rate(client: &NetNs) -> f64 {
        let mut rates: Vec<f64> = (0..WINDOWS).map(|_| client.run(window).unwrap()).collect();
        rates.sort_by(f64::total_cmp);
        rates[WINDOWS / 2]
    }

    /// Counts connections that are reset immediately, so that no port stays in use.
    fn window() -> f64 {
        let (begun, mut connections) = (Instant::now(), 0u32);
        while begun.elapsed() < WINDOW {
            let to = SocketAddr::from((SERVER, PORT));
            let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(5)).unwrap();
            // The server closes immediately; waiting for that keeps its queue short.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
            rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
            connections += 1;
        }
        f64::from(connections) / begun.elapsed().as_secs_f64()
    }

    /// The addresses of a policy's selector.
    fn addresses(policy: u32) -> impl Iterator<Item = Ipv4Addr> {
        (0..MEMBERS).map(move |n| Ipv4Addr::from_bits(0xac10_0000 + policy * MEMBERS + n))
    }

    /// The ports of a policy's five rules.
    fn ports(rule: u16) -> [u16; 2] {
        [8000 + rule, 9000 + rule]
    }

    fn deltas(policies: u32) -> Vec<Delta> {
        let set = |n: u32| SetId::new(format!("s:{n:036}"));
        let mut deltas = Vec::new();
        let mut ids = Vec::new();
        for number in 0..policies {
            let members = addresses(number).map(|address| Member::Net(IpAddr::from(address).into()));
            deltas.push(Delta::SetCreated(set(number), SetKind::Nets, members.collect()));
            let rule = |n: u16| Rule {
                protocol: Some(Protocol::TCP),
                source: EntityMatch { sets: vec![set(number)], ..EntityMatch::default() },
                destination: EntityMatch {
                    ports: ports(n).map(|port| PortRange { first: port, last: port }).into(),
                    ..EntityMatch::default()
                },
                ..Rule::all(Action::Allow)
            };
            let ingress = (0..5).map(rule).collect();
            let (namespace, name) = ("bench".into(), format!("p{number}").into());
            let id = PolicyId { kind: PolicyKind::NetworkPolicy, namespace, name };
            ids.push(id.clone());
            deltas.push(Delta::Policy(id, Arc::new(PolicyRules { ingress, egress: vec![] })));
        }
        let open = PolicyId::profile("open");
        let all = || vec![Rule::all(Action::Allow)];
        deltas.push(Delta::Policy(open.clone(), Arc::new(PolicyRules { ingress: all(), egress: all() })));
        for (name, address, policies) in [("client", CLIENT, vec![]), ("server", SERVER, ids)] {
            let tier = TierProgram { name: "default".into(), policies, end: EndOfTier::Pass };
            let ingress = if tier.policies.is_empty() { vec![] } else { vec![tier] };
            let program = EndpointProgram { ingress, egress: vec![], profiles: vec![open.clone()] };
            let endpoint = Endpoint {
                container_id: name.into(),
                host_interface: format!("cali-{name}").into(),
                addresses: vec![address.into()],
                mac: None,
                host_ports: Default::default(),
                program: Arc::new(program),
            };
            let (namespace, interface) = ("bench".into(), "eth0".into());
            let id = EndpointId { namespace, pod: name.into(), interface };
            deltas.push(Delta::Endpoint(id, Arc::new(endpoint)));
        }
        deltas
    }

    /// The same policies in the shape of Calico's chains (`felix/rules`): established first, the interface's chain, a
    /// jump to each policy with a test of the mark after it, one rule for each rule, and the profile last.
    fn calico(policies: u32) -> String {
        let mut text = "table inet calico {\n".to_owned();
        for policy in 0..policies {
            let members: Vec<_> = addresses(policy).map(|address| address.to_string()).collect();
            writeln!(text, "set s{policy} {{ type ipv4_addr; elements = {{ {} }} }}", members.join(", "))
                .unwrap();
        }
        for policy in 0..policies {
            let rules = (0..5).map(|rule| {
                let [one, other] = ports(rule);
                format!(
                    "meta l4proto tcp ip saddr @s{policy} tcp dport {{ {one}, {other} }} counter \
                     meta mark set mark or 0x10000 return"
                )
            });
            writeln!(text, "chain p{policy} {{\n{}\n}}", rules.collect::<Vec<_>>().join("\n")).unwrap();
        }
        text.push_str("chain to-server { meta mark set mark and 0xfffeffff\n");
        for policy in 0..policies {
            writeln!(text, "jump p{policy}\nmeta mark and 0x10000 == 0x10000 return").unwrap();
        }
        text.push_str("meta mark set mark or 0x10000 return\n}\nchain from-client {\nmeta mark set mark or 0x10000 return\n}\n");
        text.push_str(
            "map to { type ifname : verdict; elements = { \"cali-server\" : goto to-server } }\n\
             map from { type ifname : verdict; elements = { \"cali-client\" : goto from-client } }\n\
             chain from-workload {\nct state established,related accept\nct state invalid drop\niifname vmap @from\ndrop\n}\n\
             chain to-workload {\nct state established,related accept\nct state invalid drop\noifname vmap @to\ndrop\n}\n\
             chain forward { type filter hook forward priority filter; policy accept;\n\
             meta mark set mark and 0xfffeffff\n\
             iifname \"cali*\" jump from-workload\noifname \"cali*\" jump to-workload\n\
             meta mark and 0x10000 == 0x10000 accept\n}\n}",
        );
        text
    }

    fn nft(node: &NetNs, text: &str) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut command = Command::new("nft");
        command.arg("-f").arg(file.path());
        assert!(node.enter_on_spawn(&mut command).unwrap().status().unwrap().success());
    }
}

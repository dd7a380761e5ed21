//! The process that owns the table is killed at random instants, repeatedly, while it makes changes. Meanwhile
//! allowed connections are neither cut nor refused, and no denied packet passes.
//!
//! The program runs itself again as the process that is killed.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // a test, though clippy does not see that without #[test]

#[cfg(target_os = "linux")]
mod common;

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("victim") => linux::victim(),
        _ => linux::killer(),
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use serde_json::{Value, json};
    use testkit::Stateful;
    use tortie_api::net::{Action, PortRange, Protocol};
    use tortie_dataplane::{Endpoint, NodeState, PodWiring, Report};
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;
    use tortie_policy::program::*;

    use crate::common::cluster::{Node, Pod, Underlay, ingress, open, open_profile, policy_id};
    use crate::common::deltas;

    /// The message that a victim prints once.
    const IN_FORCE: &str = "in force\n";
    const ALLOWED: u16 = 7000;
    const DENIED: u16 = 7001;
    /// The time after which an answer counts as lost.
    const TIMEOUT: Duration = Duration::from_secs(10);
    /// The maximum lifetime of a victim in microseconds: from before it has read the table to after many changes.
    const MAX_LIFE: u64 = 60_000;

    /// The results of the traffic.
    #[derive(Default)]
    struct Traffic {
        ends: AtomicBool,
        /// Whether sending has ended.
        requested: AtomicBool,
        new_flows: AtomicUsize,
        of_one_flow: AtomicUsize,
        denied: AtomicUsize,
        got_through: AtomicUsize,
    }

    impl Traffic {
        fn goes_on(&self) -> bool {
            !self.ends.load(Ordering::Relaxed)
        }
    }

    /// Kills that many victims; `TORTIE_KILLS` sets more.
    pub(crate) fn killer() {
        let kills = std::env::var("TORTIE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(50);
        let node = Node::new(&Underlay::new(), 1);
        let (client, server) = (Arc::new(Pod::new("client", 1, 2)), Arc::new(Pod::new("server", 1, 3)));
        let pods: Vec<Value> = [&client, &server].map(|pod| attached(&node, pod)).into();
        let pods = Value::from(pods).to_string();

        let mut first = spawn(&node, &pods);
        wait_until_in_force(&mut first);
        let traffic = Arc::new(Traffic::default());
        let (echo, threads) = run_traffic(&client, &server, &traffic);

        let mut random = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into();
        println!("seed {random}");
        kill(first);
        let mut in_force = 0;
        for _ in 0..kills {
            let victim = spawn(&node, &pods);
            thread::sleep(Duration::from_micros(next(&mut random) % MAX_LIFE));
            in_force += usize::from(kill(victim) == IN_FORCE);
        }
        let mut last = spawn(&node, &pods);
        wait_until_in_force(&mut last);
        kill(last);
        traffic.ends.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        traffic.requested.store(true, Ordering::Relaxed);
        echo.join().unwrap();
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let (new, of_one, denied) =
            (count(&traffic.new_flows), count(&traffic.of_one_flow), count(&traffic.denied));
        assert_eq!(count(&traffic.got_through), 0, "of {denied} packets that are denied");
        assert!(
            new > kills && of_one > kills && denied > kills && in_force * 10 > kills,
            "{new}, {of_one}, {denied}, {in_force}: that proves little"
        );
        println!(
            "{kills} kills, {in_force} once policy was in force: {new} new flows and {of_one} packets of one flow were answered, {denied} denied packets were not\n\
             test killed_at_any_moment ... ok"
        );
    }

    /// Connects a pod, and returns what a victim must know about it.
    fn attached(node: &Node, pod: &Pod) -> Value {
        let wiring = &node.wiring;
        let interface = node.namespace.run(|| wiring.connect(&pod.attachment())).unwrap().unwrap();
        json!({"pod": pod.name, "interface": interface.host_interface, "address": pod.address, "container": pod.container_id})
    }

    fn spawn(node: &Node, pods: &str) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["victim", pods]).stdout(Stdio::piped());
        node.namespace.enter_on_spawn(&mut command).unwrap().spawn().unwrap()
    }

    fn wait_until_in_force(victim: &mut Child) {
        let mut line = [0; IN_FORCE.len()];
        victim.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        assert_eq!(line, *IN_FORCE.as_bytes());
    }

    /// Returns its unread output. An error would have ended it before.
    fn kill(mut victim: Child) -> String {
        victim.kill().unwrap();
        let output = victim.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "{}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// xorshift64.
    fn next(random: &mut u64) -> u64 {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        *random
    }

    type Thread = thread::JoinHandle<()>;

    /// The answering thread, and the sending threads: new flows and one old flow that are allowed, and flows that are
    /// denied. Panics if an answer is lost.
    fn run_traffic(client: &Arc<Pod>, server: &Arc<Pod>, traffic: &Arc<Traffic>) -> (Thread, Vec<Thread>) {
        let bind = |pod: &Pod, port: u16| {
            let socket =
                pod.namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap()).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            socket
        };
        let (allowed, denied) = (bind(server, ALLOWED), bind(server, DENIED));
        let old = bind(client, 0);
        let to = SocketAddr::from((server.address, ALLOWED));
        let spawn = |work: Box<dyn FnOnce(&Traffic) + Send>| {
            let traffic = traffic.clone();
            thread::spawn(move || work(&traffic))
        };
        let echo = spawn(Box::new(move |traffic| {
            let mut buffer = [0; 8];
            while !traffic.requested.load(Ordering::Relaxed) {
                if let Ok((length, from)) = allowed.recv_from(&mut buffer) {
                    allowed.send_to(&buffer[..length], from).unwrap();
                }
            }
        }));
        // A new link may lose its first packets, until the kernel has activated its queue.
        while old.send_to(b"first", to).is_err() || old.recv(&mut [0; 8]).is_err() {}
        let (pod, of_client) = (client.clone(), client.clone());
        let nobody = SocketAddr::from((server.address, DENIED));
        let threads = vec![
            spawn(Box::new(move |traffic| {
                while traffic.goes_on() {
                    ask(&old, to, "an established flow");
                    traffic.of_one_flow.fetch_add(1, Ordering::Relaxed);
                }
            })),
            spawn(Box::new(move |traffic| {
                while traffic.goes_on() {
                    let socket = pod.namespace.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
                    ask(&socket, to, "a new flow");
                    traffic.new_flows.fetch_add(1, Ordering::Relaxed);
                }
            })),
            spawn(Box::new(move |traffic| {
                while traffic.goes_on() {
                    let socket = of_client.namespace.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
                    socket.send_to(b"open?", nobody).unwrap();
                    traffic.denied.fetch_add(1, Ordering::Relaxed);
                    // More packets would fill the queue of the processor, and others would be lost there.
                    thread::sleep(Duration::from_micros(100));
                }
            })),
            spawn(Box::new(move |traffic| {
                while traffic.goes_on() {
                    match denied.recv(&mut [0; 8]) {
                        Ok(_) => drop(traffic.got_through.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                    }
                }
            })),
        ];
        (echo, threads)
    }

    /// Sends a packet and waits for its answer.
    fn ask(socket: &UdpSocket, to: SocketAddr, what: &str) {
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket.send_to(b"meow", to).unwrap_or_else(|error| panic!("{what}: {error}"));
        if let Err(error) = socket.recv(&mut [0; 8]) {
            panic!("{what} has no answer: {error}");
        }
    }

    /// Owns the table and makes changes that do not affect the traffic, until it is killed.
    pub(crate) fn victim() {
        let pods: Value = serde_json::from_str(&std::env::args().nth(2).unwrap()).unwrap();
        let mut dataplane = Stateful::new(Dataplane::open(Config::default()).unwrap());
        let mut applied = NodeState::default();
        for turn in 0.. {
            let wanted = state(&pods, turn);
            assert_eq!(dataplane.apply(&deltas(&applied, &wanted)), Report::default());
            applied = wanted;
            if turn == 0 {
                print!("{IN_FORCE}");
                std::io::stdout().flush().unwrap();
            }
            if turn % 16 == 15 {
                assert_eq!(dataplane.resync(), Report::default());
            }
        }
    }

    /// Equivalent for the traffic in every turn: one port is open to all, by one rule or another, with one policy
    /// more or less before it, and with changing members.
    fn state(pods: &Value, turn: u32) -> NodeState {
        let mut state = NodeState::default();
        open_profile(&mut state);
        let set = |name: &str| SetId::new(name);
        let others = (0..turn % 7 * 50).map(|n| Ipv4Addr::from_bits(0x0a20_0000 + n));
        let client: Ipv4Addr = [10, 65, 1, 2].into();
        let members =
            others.chain([client]).map(|address| Member::Net(std::net::IpAddr::from(address).into()));
        state.sets.insert(set("clients"), (SetKind::Nets, members.collect()));
        let to = |port: u16| Rule {
            protocol: Some(Protocol::UDP),
            destination: EntityMatch {
                ports: vec![PortRange { first: port, last: port }],
                ..EntityMatch::default()
            },
            ..Rule::all(Action::Allow)
        };
        let mut from_clients = to(ALLOWED);
        from_clients.source.sets = vec![set("clients")];
        let mut rules = if turn.is_multiple_of(2) { vec![from_clients] } else { vec![to(ALLOWED)] };
        rules.extend((0..turn % 5).map(|n| to(9000 + n as u16 * 2)));
        state.policies.insert(policy_id("open"), state.policies[&policy_id("open")].clone());
        state.policies.insert(policy_id("port"), Arc::new(PolicyRules { ingress: rules, egress: vec![] }));
        let other = vec![to(9999)];
        state.policies.insert(policy_id("other"), Arc::new(PolicyRules { ingress: other, egress: vec![] }));
        for pod in pods.as_array().unwrap() {
            let text = |field: &str| pod[field].as_str().unwrap();
            let names: &[&str] = if turn.is_multiple_of(3) { &["port"] } else { &["other", "port"] };
            let program = match text("pod") {
                "server" => ingress(names, EndOfTier::Deny),
                _ => open(),
            };
            let endpoint = Endpoint {
                container_id: text("container").into(),
                host_interface: text("interface").into(),
                addresses: vec![text("address").parse().unwrap()],
                mac: None,
                host_ports: Default::default(),
                program: Arc::new(program),
            };
            let (namespace, interface) = ("demo".into(), "eth0".into());
            let id = tortie_dataplane::EndpointId { namespace, pod: text("pod").into(), interface };
            state.endpoints.insert(id, Arc::new(endpoint));
        }
        state
    }
}

//! Goal F1 for each kind of set that policies create, in a table of 2,000 sets, 200,000 members and 20,000 rules: one
//! member is added or removed, beside the kernel's own time for the same transaction, sent as messages that were
//! encoded before. Also the memory of an agent with such a table on its node: calc and dataplane in one process. It
//! needs root, and works in network namespaces of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::bench();
}

#[cfg(target_os = "linux")]
mod large_table;

#[cfg(target_os = "linux")]
mod linux {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
    use std::process::Command;
    use std::sync::Arc;
    use std::time::Duration;

    use ipnet::IpNet;
    use serde_json::{Value, json};
    use testkit::Stateful;
    use tortie_api::net::{Action, PortRange, Protocol};
    use tortie_api::{Key, Kind, Resource};
    use tortie_calc::Calc;
    use tortie_dataplane::{Dataplane as _, Delta, Endpoint, EndpointId, Report};
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::netlink::{Family, Request, Socket};
    use tortie_kernel::nftables::{Nft, Table, diff};
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;
    use tortie_policy::program::{
        EndOfTier, EndpointProgram, EntityMatch, Member, PolicyId, PolicyKind, PolicyRules, Rule, SetId,
        SetKind, TierProgram,
    };

    use crate::large_table::*;

    const SHAPE: Shape = Shape { name: "1,000 pods, 2 policies each", pods: 1_000, one_selector: true };
    /// The sizes of the sets in which one member changes.
    const SIZES: [u32; 2] = [100, 10_000];
    /// The number of rounds, and of changes in each round.
    const ROUNDS: usize = 5;
    const CHANGES: usize = 400;

    pub(crate) fn bench() {
        if std::env::args().any(|given| given == "memory") {
            return NetNs::create().unwrap().run(memory).unwrap();
        }
        for position in [TablePosition::Before, TablePosition::Behind] {
            NetNs::create().unwrap().run(move || kinds(position)).unwrap();
        }
        // In a separate process, so that its memory is separate, too.
        let status = Command::new(std::env::current_exe().unwrap()).arg("memory").status().unwrap();
        assert!(status.success(), "the memory was not measured");
    }

    /// The members of a set by number: even ones; odd ones lie between them.
    struct Of {
        name: &'static str,
        kind: SetKind,
        member: fn(u32) -> Member,
        /// Whether so many rules match it that they become combined lookups.
        looked_up: bool,
    }

    fn v4(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(0x0b00_0000 + number).into()
    }

    fn v6(number: u32) -> IpAddr {
        Ipv6Addr::from_bits((0xfd00 << 112) + u128::from(number)).into()
    }

    fn port_of(address: IpAddr) -> Member {
        Member::AddressPort { address, protocol: Protocol::TCP, port: 8080 }
    }

    fn net(address: IpAddr, length: u8) -> Member {
        Member::Net(IpNet::new(address, length).unwrap())
    }

    const KINDS: [Of; 7] = [
        Of { name: "IPv4 address", kind: SetKind::Nets, member: |n| net(v4(n), 32), looked_up: false },
        Of { name: "IPv6 address", kind: SetKind::Nets, member: |n| net(v6(n), 128), looked_up: false },
        Of { name: "IPv4 network", kind: SetKind::Nets, member: |n| net(v4(n << 8), 25), looked_up: false },
        Of { name: "IPv6 network", kind: SetKind::Nets, member: |n| net(v6(n << 8), 121), looked_up: false },
        Of {
            name: "IPv4 address and port",
            kind: SetKind::AddressPorts,
            member: |n| port_of(v4(n)),
            looked_up: false,
        },
        Of {
            name: "IPv6 address and port",
            kind: SetKind::AddressPorts,
            member: |n| port_of(v6(n)),
            looked_up: false,
        },
        Of {
            name: "IPv4 address, 40 rules in one lookup",
            kind: SetKind::Nets,
            member: |n| net(v4(n), 32),
            looked_up: true,
        },
    ];

    /// The position of the sets among the 2,000 of the table: the kernel finds a set by comparing names, one after
    /// another.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum TablePosition {
        Before,
        Behind,
    }

    fn kinds(position: TablePosition) {
        let mut dataplane =
            Stateful::new(Dataplane::open(Config { guard_table: false, ..Config::default() }).unwrap());
        make_links(SHAPE.pods + (KINDS.len() * SIZES.len()) as u32);
        let mut apply = |deltas: &[Delta]| assert_eq!(dataplane.apply(deltas), Report::default());
        let all: Vec<_> = KINDS.iter().flat_map(|of| SIZES.map(|size| (of, size))).collect();
        let made = all.iter().map(|(of, size)| of.made(*size));
        let mut steps: Vec<_> = made.chain([deltas(SHAPE)]).collect();
        if position == TablePosition::Behind {
            steps.rotate_right(1);
        }
        steps.iter().for_each(|step| apply(step));
        let workload: Vec<_> = all.iter().flat_map(|(of, size)| of.workload(*size)).collect();
        apply(&workload);
        println!(
            "\none member of a set comes or goes (F1), {}, {} members in the table; the set {position:?} the others",
            SHAPE.name,
            SETS * MEMBERS
        );
        println!(
            "{:40}{:>9}{:>14}{:>14}{:>14}{:>9}",
            "", "members", "tortie p50", "tortie p99", "kernel p50", "ratio"
        );
        for (of, size) in all {
            let [ours, kernel] = of.measure(size, &mut dataplane);
            let ratio = ours[0].as_secs_f64() / kernel[0].as_secs_f64();
            let [p50, p99] = ours.map(|time| format!("{time:.1?}"));
            let kernel = format!("{:.1?}", kernel[0]);
            println!("{:40}{size:>9}{p50:>14}{p99:>14}{kernel:>14}{ratio:>9.2}", of.name);
        }
    }

    impl Of {
        fn id(&self, size: u32) -> SetId {
            SetId::new(format!("s:{}-{size}", self.name))
        }

        /// The interface of the pod whose policies match the set.
        fn interface(&self, size: u32) -> String {
            let index = KINDS.iter().position(|of| of.name == self.name).unwrap();
            let index = index * SIZES.len() + SIZES.iter().position(|one| *one == size).unwrap();
            format!("cali{}", SHAPE.pods as usize + index)
        }

        fn made(&self, size: u32) -> Vec<Delta> {
            let members = (0..size).map(|number| (self.member)(number * 2)).collect();
            vec![Delta::SetCreated(self.id(size), self.kind, members)]
        }

        /// The dataplane's times and the kernel's: the smallest median and the smallest 99th percentile of several
        /// rounds.
        fn measure(&self, size: u32, dataplane: &mut Stateful<Dataplane>) -> [[Duration; 2]; 2] {
            let id = self.id(size);
            let mut apply = |deltas: &[Delta]| assert_eq!(dataplane.apply(deltas), Report::default());
            let member = vec![(self.member)(size | 1)];
            let came = [Delta::SetChanged { id: id.clone(), added: member.clone(), removed: vec![] }];
            let went = [Delta::SetChanged { id, added: vec![], removed: member }];
            let mut nft = Nft::open().unwrap();
            let before = settled(&mut nft, &mut apply);
            apply(&came);
            let after = settled(&mut nft, &mut apply);
            apply(&went);
            let messages = |to: &Table, from: &Table| nft.messages(&diff("tortie", to, Some(from)));
            let raw = [messages(&after, &before), messages(&before, &after)];
            let mut socket = Socket::open(Family::Netfilter).unwrap();

            let least = |best: &mut [Duration; 2], times: [Duration; 2]| {
                *best = [best[0].min(times[0]), best[1].min(times[1])];
            };
            let mut best = [[Duration::MAX; 2]; 2];
            for _ in 0..ROUNDS {
                let mut turn = [&came, &went].into_iter().cycle();
                least(&mut best[0], measure(CHANGES, || apply(turn.next().unwrap())));
                let mut turn = raw.iter().cycle();
                least(&mut best[1], measure(CHANGES, || send(&mut socket, turn.next().unwrap())));
            }
            best
        }

        /// A pod whose policies match the set. For lookups, 39 more rules match other sets and ports.
        fn workload(&self, size: u32) -> Vec<Delta> {
            let policy = |number: u32| {
                let sets = vec![if number == 0 { self.id(size) } else { set_id(number) }];
                let ports = vec![PortRange { first: port(number), last: port(number) }];
                let rule = Rule {
                    protocol: Some(Protocol::TCP),
                    source: EntityMatch { sets, ..EntityMatch::default() },
                    destination: EntityMatch { ports, ..EntityMatch::default() },
                    ..Rule::all(Action::Allow)
                };
                let name = format!("{}-{size}-{number}", self.name).into();
                let id = PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "kinds".into(), name };
                (id, Arc::new(PolicyRules { ingress: vec![rule], egress: vec![] }))
            };
            let count = if self.looked_up { 40 } else { 1 };
            let policies: Vec<_> = (0..count).map(policy).collect();
            let named = policies.iter().map(|(id, _)| id.clone()).collect();
            let tier = TierProgram { name: "default".into(), policies: named, end: EndOfTier::Deny };
            let program = EndpointProgram { ingress: vec![tier], ..EndpointProgram::default() };
            let pod = format!("{}-{size}", self.name).as_str().into();
            let pod = EndpointId { namespace: "kinds".into(), pod, interface: "eth0".into() };
            let endpoint = Endpoint {
                container_id: "kinds".into(),
                host_interface: self.interface(size).into(),
                addresses: vec![],
                mac: None,
                host_ports: Default::default(),
                program: Arc::new(program),
            };
            let policies = policies.into_iter().map(|(id, rules)| Delta::Policy(id, rules));
            policies.chain([Delta::Endpoint(pod, Arc::new(endpoint))]).collect()
        }
    }

    /// The table, after what the previous change left over has been removed.
    fn settled(nft: &mut Nft, apply: &mut impl FnMut(&[Delta])) -> Table {
        apply(&[]);
        nft.list("tortie").unwrap().unwrap()
    }

    fn send(socket: &mut Socket, messages: &[Request]) {
        let answers = socket.transaction(messages).unwrap();
        assert!(!answers.is_empty() && answers.iter().all(|(_, answer)| answer.is_ok()), "{answers:?}");
    }

    /// The number of pods with the members' addresses: each is in two sets.
    const PODS: u32 = SETS * MEMBERS / 2;
    const NODE: &str = "here";

    /// The memory of calc and dataplane, if the members are the cluster's pods, and the policies come from the
    /// cluster.
    fn memory() {
        let megabytes = |bytes: u64| bytes / 1_000_000;
        println!(
            "\nmemory of calc and dataplane together: {} pods here, {PODS} elsewhere, {POLICIES} policies",
            SHAPE.pods
        );
        make_links(SHAPE.pods);
        let begun = resident();
        let mut calc = Calc::new(NODE);
        for (key, value) in objects() {
            let resource = Resource::read(&key, &value).unwrap();
            calc.update_typed(&key, Some(resource));
        }
        let taken = resident();
        let deltas = calc.flush();
        let state = calc.state();
        let members: usize = state.sets.values().map(|(_, members)| members.len()).sum();
        let rules: usize =
            state.policies.values().map(|rules| rules.ingress.len() + rules.egress.len()).sum();
        println!(
            "  {} endpoints, {} sets, {members} members, {rules} rules",
            state.endpoints.len(),
            state.sets.len()
        );
        let computed = resident();
        let mut dataplane = Dataplane::open(Config::default()).unwrap();
        let report = dataplane.apply(state, &deltas);
        assert!(!report.retry, "{report:?}");
        drop(deltas);
        let applied = resident();
        dataplane.resync(state);
        println!("  before anything: {} MB", megabytes(begun));
        println!("  calc has taken the objects in: {} MB", megabytes(taken));
        println!("  calc has computed the node's state: {} MB", megabytes(computed));
        println!("  all is in the kernel: {} MB", megabytes(applied));
        println!("  all is read back and compared: {} MB", megabytes(resident()));
        println!("  peak: {} MB", megabytes(peak()));
    }

    /// In the order in which an agent lists them.
    fn objects() -> impl Iterator<Item = (Key, Value)> {
        let namespace = json!({"metadata": {"name": "bench", "labels": {}}});
        let policies = (0..POLICIES).map(policy);
        let here = (0..SHAPE.pods).map(|number| {
            let labels = json!({"here": number.to_string()});
            pod(NODE, number, Ipv4Addr::from_bits(0xac10_0000 + number), &labels)
        });
        let elsewhere = (0..PODS).map(|number| {
            let sets = SETS / 2;
            let labels =
                json!({"a": (number % sets).to_string(), "b": (number / MEMBERS % sets).to_string()});
            let node = format!("n{}", number % 1_000);
            pod(&node, number, Ipv4Addr::from_bits(0x0a00_0000 + number), &labels)
        });
        [(Key::global(Kind::Namespace, "bench"), namespace)]
            .into_iter()
            .chain(policies)
            .chain(here)
            .chain(elsewhere)
    }

    /// Two policies for each pod on the node; each matches pods with one label, by ten ports.
    fn policy(number: u32) -> (Key, Value) {
        let name = format!("p{number}");
        let label = if number.is_multiple_of(2) { "a" } else { "b" };
        let from = json!([{"podSelector": {"matchLabels": {label: (number / 2).to_string()}}}]);
        let ingress: Vec<_> = (0..RULES)
            .map(|rule| json!({"from": from, "ports": [{"protocol": "TCP", "port": port(rule)}]}))
            .collect();
        let selector = json!({"matchLabels": {"here": (number / 2).to_string()}});
        let spec = json!({"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress});
        let value = json!({"metadata": {"name": name, "namespace": "bench"}, "spec": spec});
        (Key::namespaced(Kind::KubernetesNetworkPolicy, "bench", name), value)
    }

    fn pod(node: &str, number: u32, address: Ipv4Addr, labels: &Value) -> (Key, Value) {
        let pod = format!("pod-{number}");
        let name = tortie_api::calico::WorkloadEndpoint::name_for(node, &pod, "eth0");
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": {"name": name, "namespace": "bench", "labels": labels},
            "spec": {
                "orchestrator": "k8s", "node": node, "containerID": format!("{number:064x}"), "pod": pod,
                "endpoint": "eth0", "serviceAccountName": "default", "ipNetworks": [format!("{address}/32")],
                "profiles": tortie_api::calico::WorkloadEndpoint::profiles_for("bench", "default"),
                "interfaceName": format!("cali{number}"), "mac": "ee:ee:ee:ee:ee:ee",
            },
        });
        (Key::namespaced(Kind::WorkloadEndpoint, "bench", name), value)
    }
}

//! The delay that one tenant can cause to another: a stream of one namespace's policies, or of its networks, and the
//! time from the arrival of another tenant's policy, or pod, until it is in force. Calc and dataplane run as in an
//! agent: what arrives during a call waits for the next one.
//!
//! `BENCH_POLICIES` and `BENCH_NETWORKS` set other sizes. It needs root, and works in network namespaces of its own.
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
    use std::collections::VecDeque;
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};
    use tortie_api::calico::WorkloadEndpoint;
    use tortie_api::{Key, Kind};
    use tortie_calc::Calc;
    use tortie_dataplane::Dataplane as _;
    use tortie_kernel::namespace::NetNs;
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;

    use crate::large_table::{make_links, peak};

    type Object = (Key, Value);
    /// An object by its number.
    type Maker = fn(usize) -> Object;

    /// The objects of one namespace that arrive each second.
    const PER_SECOND: f64 = 500.0;
    const NODE: &str = "here";

    pub(crate) fn bench() {
        let size = |name: &str, usual| std::env::var(name).map_or(usual, |text| text.parse().unwrap());
        let (policies, networks) = (size("BENCH_POLICIES", 20_000), size("BENCH_NETWORKS", 1_500_000));
        let only = std::env::var("BENCH_ONLY").unwrap_or_default();
        let cases: [(&str, usize, Maker); 4] = [
            ("policies, each with a selector and a port", policies, by_selector),
            ("policies, each with a network and a port", policies, by_network),
            ("sets of 10,000 networks, of one rule", networks / 10_000, network_set),
            ("policies with 10,000 networks", networks / 10_000, with_networks),
        ];
        for (name, count, object) in cases.into_iter().filter(|(name, ..)| name.contains(&only)) {
            NetNs::create().unwrap().run(move || measure(name, count, object)).unwrap();
        }
    }

    /// The agent's loop.
    struct Agent {
        calc: Calc,
        dataplane: Dataplane,
        /// The longest and the sum of: taking in, computing, applying.
        worst: [Duration; 3],
        sum: [Duration; 3],
        turns: usize,
    }

    impl Agent {
        fn turn(&mut self, objects: impl IntoIterator<Item = Object>) {
            let begun = Instant::now();
            for (key, value) in objects {
                self.calc.update(&key, Some(&value));
            }
            let taken = begun.elapsed();
            let deltas = self.calc.flush();
            let flushed = begun.elapsed();
            let report = self.dataplane.apply(self.calc.state(), &deltas);
            let applied = begun.elapsed();
            assert!(report.node.is_empty(), "{:?}", report.node);
            for (index, took) in [taken, flushed - taken, applied - flushed].into_iter().enumerate() {
                self.worst[index] = self.worst[index].max(took);
                self.sum[index] += took;
            }
            self.turns += 1;
        }
    }

    fn measure(name: &str, count: usize, object: fn(usize) -> Object) {
        make_links(200);
        let (calc, dataplane) = (Calc::new(NODE), Dataplane::open(Config::default()).unwrap());
        let mut agent = Agent { calc, dataplane, worst: <_>::default(), sum: <_>::default(), turns: 0 };
        let namespaces = ["large", "other"].map(namespace);
        let selecting = policy("large", "all", json!([{"from": [{"namespaceSelector": {}}]}]));
        agent.turn(namespaces.into_iter().chain([
            pod("large", 0),
            pod("other", 1),
            selecting,
            rule_of_sets(),
        ]));
        assert_eq!(agent.calc.state().endpoints.len(), 2, "the pods are known");
        (agent.worst, agent.sum, agent.turns) = Default::default();

        let mut mine = (0..count).map(object).collect::<Vec<_>>().into_iter();
        let begun = Instant::now();
        let mut given = 0;
        // What the other tenant does: once a second, by turns a policy and a pod.
        let mut others: VecDeque<Instant> = VecDeque::new();
        let (mut asked, mut delays) = (0_usize, Vec::new());
        while given < count || !others.is_empty() {
            let now = begun.elapsed().as_secs_f64();
            let arrived = if count < 1_000 {
                (now * PER_SECOND / 100.0) as usize + 1
            } else {
                (now * PER_SECOND) as usize
            };
            let arrived = arrived.min(count);
            while (asked as f64) < now && given < count {
                others.push_back(begun + Duration::from_secs(asked as u64));
                asked += 1;
            }
            if arrived == given && others.is_empty() {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let mine = mine.by_ref().take(arrived - given);
            let its = (asked - others.len()..asked).map(|number| match number % 2 {
                0 => policy("other", &format!("deny-{number}"), json!([])),
                _ => pod("other", 1 + number as u32),
            });
            let objects: Vec<Object> = mine.chain(its).collect();
            let waited: Vec<Instant> = others.drain(..).collect();
            agent.turn(objects);
            delays.extend(waited.into_iter().map(|since| since.elapsed()));
            given = arrived;
        }
        let all = begun.elapsed();
        let single: Vec<Duration> = (0..5)
            .map(|number| {
                let begun = Instant::now();
                agent.turn([policy("other", &format!("late-{number}"), json!([]))]);
                begun.elapsed()
            })
            .collect();
        let own: Vec<Duration> = (0..3)
            .map(|number| {
                let object = object(count + number);
                let begun = Instant::now();
                agent.turn([object]);
                begun.elapsed()
            })
            .collect();
        delays.sort();
        let conditions = agent.dataplane.apply(agent.calc.state(), &[]);
        println!("\n{count} {name}: in force after {:.1} s, in {} calls", all.as_secs_f64(), agent.turns);
        println!("  taking in, computing, applying: {:.1?} in total, {:.2?} at most", agent.sum, agent.worst);
        println!(
            "  another tenant's change waits: median {:.2?}, longest {:.2?} ({} changes)",
            delays[delays.len() / 2],
            delays[delays.len() - 1],
            delays.len()
        );
        println!("  afterwards, a change of another tenant: {:.2?}; of the same: {:.2?}", single, own);
        println!("  peak of memory: {} MB", peak() / 1_000_000);
        conditions.conditions().for_each(|condition| println!("  {condition}"));
        for finding in agent.calc.findings() {
            println!("  {} {}: {}", finding.key, finding.reason, finding.problem);
        }
    }

    fn namespace(name: &str) -> Object {
        (Key::global(Kind::Namespace, name), json!({"metadata": {"name": name, "labels": {}}}))
    }

    fn policy(namespace: &str, name: &str, ingress: Value) -> Object {
        let spec = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": ingress});
        let value = json!({"metadata": {"name": name, "namespace": namespace}, "spec": spec});
        (Key::namespaced(Kind::KubernetesNetworkPolicy, namespace, name), value)
    }

    fn by_selector(number: usize) -> Object {
        let port = json!([{"protocol": "TCP", "port": 1 + number % 60_000}]);
        let from = json!([{"podSelector": {"matchLabels": {"one": number.to_string()}}}]);
        policy("large", &format!("p{number}"), json!([{"from": from, "ports": port}]))
    }

    fn network(number: usize) -> String {
        let bits = 0x0b00_0000 + (number as u32) * 4;
        format!("{}/31", std::net::Ipv4Addr::from_bits(bits))
    }

    fn by_network(number: usize) -> Object {
        let port = json!([{"protocol": "TCP", "port": 1 + number % 60_000}]);
        let from = json!([{"ipBlock": {"cidr": network(number)}}]);
        policy("large", &format!("p{number}"), json!([{"from": from, "ports": port}]))
    }

    fn with_networks(number: usize) -> Object {
        let from: Vec<Value> =
            (0..10_000).map(|n| json!({"ipBlock": {"cidr": network(number * 10_000 + n)}})).collect();
        policy("large", &format!("p{number}"), json!([{"from": from}]))
    }

    fn network_set(number: usize) -> Object {
        let nets: Vec<String> = (0..10_000).map(|n| network(number * 10_000 + n)).collect();
        let name = format!("s{number}");
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "NetworkSet",
            "metadata": {"name": name, "namespace": "large", "labels": {"set": "mine"}}, "spec": {"nets": nets}
        });
        (Key::namespaced(Kind::NetworkSet, "large", name), value)
    }

    fn rule_of_sets() -> Object {
        let rule = json!({"action": "Allow", "source": {"selector": "set == 'mine'"}});
        let spec = json!({"selector": "all()", "types": ["Ingress"], "ingress": [rule], "order": 1});
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy",
            "metadata": {"name": "sets", "namespace": "large"}, "spec": spec
        });
        (Key::namespaced(Kind::NetworkPolicy, "large", "sets"), value)
    }

    fn pod(namespace: &str, number: u32) -> Object {
        let pod = format!("pod-{number}");
        let name = WorkloadEndpoint::name_for(NODE, &pod, "eth0");
        let address = std::net::Ipv4Addr::from_bits(0xac10_0000 + number);
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": {"name": name, "namespace": namespace, "labels": {}},
            "spec": {
                "orchestrator": "k8s", "node": NODE, "containerID": format!("{number:064x}"), "pod": pod,
                "endpoint": "eth0", "serviceAccountName": "default", "ipNetworks": [format!("{address}/32")],
                "profiles": WorkloadEndpoint::profiles_for(namespace, "default"),
                "interfaceName": format!("cali{number}"), "mac": "ee:ee:ee:ee:ee:ee",
            },
        });
        (Key::namespaced(Kind::WorkloadEndpoint, namespace, name), value)
    }
}

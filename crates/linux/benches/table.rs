//! A table with 2,000 sets, 200,000 members and 20,000 rules (goals F1 to F4): created from nothing, one member
//! changed, one rule changed, read back and compared. Each is beside the kernel's own time for the same work, and
//! beside `nft` on a table of the same size. It needs root, and works in network namespaces of its own.
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
    use std::net::IpAddr;
    use std::process::{Command, Stdio};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use testkit::Stateful;
    use tortie_dataplane::{Delta, Report};
    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::nftables::*;
    use tortie_linux::Dataplane;
    use tortie_linux::dataplane::Config;
    use tortie_policy::program::Member;

    use crate::large_table::*;

    const SHAPES: [Shape; 3] = [
        Shape { name: "100 pods, 20 policies each, 10 ports of one selector", pods: 100, one_selector: true },
        Shape {
            name: "1,000 pods, 2 policies each, 10 ports of one selector",
            pods: 1_000,
            one_selector: true,
        },
        Shape { name: "1,000 pods, 2 policies each, 10 selectors", pods: 1_000, one_selector: false },
    ];

    struct Times {
        whole: Duration,
        member: [Duration; 2],
        rule: [Duration; 2],
        verified: Duration,
    }

    pub(crate) fn bench() {
        for shape in SHAPES {
            let (ours, kernel, memory) = NetNs::create().unwrap().run(move || tortie(shape)).unwrap();
            let nft = nft(shape);
            println!("\n{}: {SETS} sets, {} members, {} rules", shape.name, SETS * MEMBERS, POLICIES * RULES);
            println!(
                "{:34}{:>22}{:>22}{:>12}{:>12}",
                "", "tortie p50 / p99", "kernel p50 / p99", "/ kernel", "/ nft"
            );
            let row = |what: &str, of: fn(&Times) -> [Duration; 2]| {
                let [ours, kernel, nft] = [of(&ours), of(&kernel), of(&nft)];
                let ratio = |other: [Duration; 2]| ours[0].as_secs_f64() / other[0].as_secs_f64();
                let shown = |[p50, p99]: [Duration; 2]| format!("{p50:.1?} / {p99:.1?}");
                let (by_kernel, by_nft) = (ratio(kernel), ratio(nft));
                println!("{what:34}{:>22}{:>22}{by_kernel:>12.2}{by_nft:>12.4}", shown(ours), shown(kernel));
            };
            row("from nothing (F3)", |times| [times.whole; 2]);
            row("one member (F1)", |times| times.member);
            row("one rule of a policy (F2)", |times| times.rule);
            row("read back and compared (F4)", |times| [times.verified; 2]);
            println!("memory of the process, with the node's state of its own: {} MB", memory / 1_000_000);
        }
    }

    /// By the dataplane, and the kernel alone: the same table, created and changed by messages with just that
    /// content.
    fn tortie(shape: Shape) -> (Times, Times, u64) {
        let ahead = Arc::new(AtomicU32::new(0));
        let (start, hours) = (Instant::now(), ahead.clone());
        let clock = move || start + Duration::from_secs(3600) * hours.load(Ordering::Relaxed);
        let config = Config { guard_table: false, ..Config::default() };
        let dataplane = Dataplane::open(config).unwrap().with_clock(Box::new(clock));
        let mut dataplane = Stateful::new(dataplane);
        make_links(shape.pods);
        let deltas = deltas(shape);
        let mut apply = |deltas: &[Delta]| assert_eq!(dataplane.apply(deltas), Report::default());
        let [whole, _] = measure(1, || apply(&deltas));

        let member = vec![Member::Net(IpAddr::from([192, 168, 7, 9]).into())];
        let id = set_id(SETS / 2);
        let came = [Delta::SetChanged { id: id.clone(), added: member.clone(), removed: vec![] }];
        let went = [Delta::SetChanged { id, added: vec![], removed: member }];
        let mut turn = [&came, &went].into_iter().cycle();
        let member = measure(5_000, || apply(turn.next().unwrap()));

        let policy = |delta: &&Delta| matches!(delta, Delta::Policy(..));
        let Some(Delta::Policy(id, rules)) = deltas.iter().find(policy) else { unreachable!() };
        let mut shorter = rules.as_ref().clone();
        shorter.ingress.pop();
        let versions =
            [shorter, rules.as_ref().clone()].map(|rules| [Delta::Policy(id.clone(), Arc::new(rules))]);
        let mut turn = versions.iter().cycle();
        let rule = measure(500, || apply(turn.next().unwrap()));
        let [verified, _] = measure(5, || {
            ahead.fetch_add(1, Ordering::Relaxed);
            assert_eq!(dataplane.resync(), Report::default());
        });
        let [unchanged, _] = measure(5, || assert_eq!(dataplane.resync(), Report::default()));
        println!("a comparison without a foreign transaction since the last one: {unchanged:.1?}");
        let memory = resident();
        (Times { whole, member, rule, verified }, kernel(), memory)
    }

    fn kernel() -> Times {
        let mut nft = Nft::open().unwrap();
        let table = nft.list("tortie").unwrap().unwrap();
        let (set, content) = table.sets.iter().find(|(name, _)| name.starts_with("a4")).unwrap();
        let element = vec![Element::key(Key::address([192, 168, 7, 9].into()))];
        let came = Op::AddElements(set.clone(), content.spec.clone(), element.clone());
        let went = Op::DeleteElements(set.clone(), content.spec.clone(), element);
        let mut turn = [came, went].into_iter().cycle();
        let one = |op| Transaction { table: "tortie".to_owned(), ops: vec![op] };
        let member = measure(5_000, || nft.commit(&one(turn.next().unwrap())).unwrap());
        let (name, chain) = table.chains.iter().find(|(name, _)| name.starts_with("pi-")).unwrap();
        let rule =
            measure(500, || nft.commit(&one(Op::SetRules(name.clone(), chain.rules.clone()))).unwrap());
        let [verified, _] = measure(5, || assert!(nft.list("tortie").unwrap().is_some()));
        // In a namespace without it.
        let whole = NetNs::create().unwrap().run(move || {
            let mut nft = Nft::open().unwrap();
            let transaction = diff("tortie", &table, None);
            measure(1, || nft.commit(&transaction).unwrap())[0]
        });
        Times { whole: whole.unwrap(), member, rule, verified }
    }

    /// By the program `nft`, with a chain for each policy and a rule for each rule.
    fn nft(shape: Shape) -> Times {
        let namespace = NetNs::create().unwrap();
        let run = |arguments: &[&str]| {
            let mut command = Command::new("nft");
            command.args(arguments).stdout(Stdio::null());
            assert!(namespace.enter_on_spawn(&mut command).unwrap().status().unwrap().success());
        };
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let mut text = "table inet peer {\n".to_owned();
        for set in 0..SETS {
            let members: Vec<_> = addresses(set).map(|address| address.to_string()).collect();
            writeln!(text, "set s{set} {{ type ipv4_addr; elements = {{ {} }} }}", members.join(", "))
                .unwrap();
        }
        let rule = |policy: u32, rule: u32| {
            let set = shape.set(policy, rule);
            format!("meta l4proto tcp ip saddr @s{set} tcp dport {} accept", port(rule))
        };
        let rules = |policy| (0..RULES).map(move |number| rule(policy, number)).collect::<Vec<_>>();
        for policy in 0..POLICIES {
            writeln!(text, "chain p{policy} {{\n{}\n}}", rules(policy).join("\n")).unwrap();
        }
        text.push('}');
        let whole = file("whole", text);
        let [whole, _] = measure(1, || run(&["-f", &whole]));
        let mut turn = ["add", "delete"].into_iter().cycle();
        let member =
            measure(10, || run(&[turn.next().unwrap(), "element", "inet", "peer", "s7", "{ 192.168.7.9 }"]));
        let lines = rules(7).iter().fold("flush chain inet peer p7\n".to_owned(), |mut text, rule| {
            writeln!(text, "add rule inet peer p7 {rule}").unwrap();
            text
        });
        let chain = file("chain", lines);
        let rule = measure(10, || run(&["-f", &chain]));
        let [verified, _] = measure(3, || run(&["list", "ruleset"]));
        Times { whole, member, rule, verified }
    }
}

//! The table of policy belongs to Tortie: changes by others, and the next agent, on the real kernel.

use std::process::{Command, Output};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::common::cluster::*;
use ipnet::{IpNet, Ipv4Net};
use testkit::Stateful;
use tortie_dataplane::*;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Chain, Nft, Op, Table, Transaction};
use tortie_kernel::route::RouteSocket;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_policy::program::*;

/// A node with a client and a server that no client may reach.
fn closed_server() -> (Node, Pod, Pod) {
    closed_server_on(Node::new(&Underlay::new(), 1))
}

fn closed_server_on(mut node: Node) -> (Node, Pod, Pod) {
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(|state| {
        open_profile(state);
        state.policies.insert(policy_id("closed"), Arc::new(PolicyRules::default()));
    });
    node.add(&client, open());
    node.add(&server, ingress(&["closed"], EndOfTier::Deny));
    (node, client, server)
}

/// Runs `nft` as another process.
fn nft(node: &Node, arguments: &[&str]) -> Output {
    let mut command = Command::new("nft");
    command.args(arguments);
    let output = node.namespace.enter_on_spawn(&mut command).unwrap().output();
    output.expect("this test needs the program nft: apt-get install nftables")
}

/// Runs nft on the table of a process that has ended. The kernel frees it with the last descriptor, and a process that another test starts
/// at this moment has a copy until it runs its program.
pub(crate) fn change_orphan(namespace: &NetNs, arguments: &[&str]) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let mut command = Command::new("nft");
        command.args(arguments);
        let output = namespace.enter_on_spawn(&mut command).unwrap().output().unwrap();
        if output.status.success() {
            return;
        }
        assert!(Instant::now() < deadline, "{output:?}");
    }
}

/// The content of the table with handles.
fn listed(node: &Node) -> String {
    let output = nft(node, &["-a", "list", "table", "inet", "tortie"]);
    assert!(output.status.success(), "others may read: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn other_programs_cannot_open_closed_pods() {
    let (node, client, server) = closed_server();
    let before = listed(&node);
    assert!(client.is_cut_off(server.address, 80));
    nft(&node, &["flush", "ruleset"]); // may succeed: it spares what is owned
    assert_eq!(listed(&node), before);
    let refused: [&[&str]; 3] = [
        &["delete", "table", "inet", "tortie"],
        &["insert", "rule", "inet", "tortie", "forward", "accept"],
        &["flush", "chain", "inet", "tortie", "to-workload"],
    ];
    for arguments in refused {
        assert!(!nft(&node, arguments).status.success(), "{arguments:?}");
        assert_eq!(listed(&node), before, "{arguments:?}");
    }
    assert!(client.is_cut_off(server.address, 80));
}

#[test]
fn the_table_outlives_its_owner_and_is_adopted() {
    let (mut node, client, server) = closed_server();
    let before = listed(&node);
    let elsewhere = tortie_kernel::namespace::NetNs::create().unwrap();
    let idle = elsewhere.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
    drop(std::mem::replace(&mut node.dataplane, idle));
    let orphan = node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap().unwrap()).unwrap();
    assert_eq!(orphan.flags, Table::PERSIST);
    assert!(client.is_cut_off(server.address, 80), "closed with nobody there");

    node.restart();
    assert_eq!(listed(&node), before, "the same objects, by handle");
    assert!(!nft(&node, &["delete", "table", "inet", "tortie"]).status.success(), "owned again");
    node.program(&server, open());
    assert!(client.reaches(&server, 80));
}

/// In the transaction that adopts a table, the kernel neither adds hooks nor removes any.
#[test]
fn the_table_of_another_version_with_other_hooks_is_replaced() {
    let later = "add chain inet tortie later { type filter hook forward priority 9; policy drop; }";
    for changes in [&["flush chain inet tortie input", "delete chain inet tortie input"][..], &[later]] {
        let (mut node, client, server) = closed_server();
        let elsewhere = tortie_kernel::namespace::NetNs::create().unwrap();
        let idle = elsewhere.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
        drop(std::mem::replace(&mut node.dataplane, idle));
        for change in changes {
            change_orphan(&node.namespace, &[change]);
        }

        node.restart();
        let table = listed(&node);
        assert!(table.contains("chain input {") && !table.contains("chain later {"), "{changes:?}");
        assert!(client.is_cut_off(server.address, 80));
        node.program(&server, open());
        assert!(client.reaches(&server, 80));
    }
}

/// The removal waits for the next change. If the kernel refuses it, everything is compared, and nothing is left over afterwards.
#[test]
fn nothing_is_left_over_after_a_refused_removal() {
    let config = Config { guard_table: false, ..Config::default() };
    let (mut node, client, server) = closed_server_on(Node::with(&Underlay::new(), 1, config));
    let mut endpoint = node.state.endpoints[&server.id()].clone();
    Arc::make_mut(&mut endpoint).program = Arc::new(open());
    assert_eq!(node.apply(&[Delta::Endpoint(server.id(), endpoint)]), Report::default());
    let chains = |node: &Node| {
        node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap().unwrap().chains).unwrap()
    };
    let denies = |chain: &Chain| chain.rules.iter().any(|rule| rule.comment.starts_with("end of tier"));
    let left = chains(&node).into_iter().find(|(_, chain)| denies(chain)).unwrap().0;
    for command in ["add chain inet tortie foreign", &format!("add rule inet tortie foreign jump {left}")] {
        let output = nft(&node, &[command]);
        assert!(output.status.success(), "{output:?}");
    }

    assert_eq!(node.apply(&[]), Report::default());
    let chains = chains(&node);
    assert!(!chains.contains_key(&left) && !chains.contains_key("foreign"), "{:?}", chains.keys());
    assert!(client.reaches(&server, 80));
}

/// Without a watch, and on a kernel that does not guard the table: the table is read if there was a transaction of somebody else.
#[test]
fn a_comparison_finds_what_others_have_changed() {
    let config = Config { guard_table: false, ..Config::default() };
    let (mut node, client, server) = closed_server_on(Node::with(&Underlay::new(), 1, config));
    let vandals: [&[&str]; 4] = [
        &["insert", "rule", "inet", "tortie", "to-workload", "accept"],
        &["flush", "chain", "inet", "tortie", "to-workload"],
        &["flush", "ruleset"],
        &["insert", "rule", "inet", "tortie", "to-workload", "accept"],
    ];
    for (round, vandal) in vandals.into_iter().enumerate() {
        assert_eq!(node.resync(), Report::default());
        assert!(client.is_cut_off(server.address, 80), "round {round}");
        // Transactions of this process, and of somebody else elsewhere, come between.
        let closed = ingress(&["closed"], EndOfTier::Deny);
        for program in [open(), closed].into_iter().take(2 * (round % 2)) {
            node.program(&server, program);
        }
        if round == 1 {
            assert!(nft(&node, &["add", "table", "inet", "other"]).status.success());
            assert_eq!(node.resync(), Report::default());
        }
        assert!(nft(&node, vandal).status.success());
        assert!(client.reaches(&server, 80), "{vandal:?}");
    }
    assert_eq!(node.resync(), Report::default());
    assert!(client.is_cut_off(server.address, 80));
}

#[test]
fn a_table_of_another_running_process_is_kept_and_reported() {
    let (node, ..) = closed_server();
    let before = listed(&node);
    let mut second =
        node.namespace.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
    let report = node.namespace.run(|| second.resync()).unwrap();
    assert!(report.retry);
    assert!(report.node[0].message.contains("belongs to another process"), "{:?}", report.node);
    assert_eq!(listed(&node), before);
    drop(node.dataplane);
    // The kernel frees the table with the last descriptor, and a process that another test starts at this moment has a copy until it
    // executes its program.
    let deadline = Instant::now() + TIMEOUT;
    let mut report = node.namespace.run(|| second.resync()).unwrap();
    while report != Report::default() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        report = node.namespace.run(|| second.resync()).unwrap();
    }
    assert_eq!(report, Report::default(), "it takes over when the other has ended");
}

#[test]
fn without_policy_pods_stay_closed() {
    let mut node = Node::new(&Underlay::new(), 1);
    // The table cannot be adopted.
    let mut other = node.namespace.run(|| Nft::open().unwrap()).unwrap();
    let table = Transaction { table: "tortie".to_owned(), ops: vec![Op::AddTable(Table::OWNER)] };
    other.commit(&table).unwrap();
    let block = Ipv4Net::new([10, 65, 1, 0].into(), 26).unwrap();
    let report = node.change(|state| drop(state.routes.insert(block.into(), RouteTarget::Local)));
    let reasons: Vec<_> = report.node.iter().map(|condition| condition.reason).collect();
    assert_eq!(reasons, [Reason::PolicyNotInForce, Reason::NetworkNotInForce]);
    let look = || {
        let forwarding = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap();
        let routes = RouteSocket::open().unwrap().routes().unwrap();
        (forwarding.trim() == "1", routes.iter().any(|route| route.destination == IpNet::V4(block)))
    };
    assert_eq!(node.namespace.run(look).unwrap(), (false, false));
    assert!(node.namespace.run(|| node.dataplane.resync()).unwrap().retry);
    drop(other);
    // A child that another test is just starting may hold the socket for a moment.
    let deadline = Instant::now() + Duration::from_secs(10);
    while node.apply(&[]) != Report::default() {
        assert!(Instant::now() < deadline, "{:?}", node.apply(&[]));
        std::thread::yield_now();
    }
    assert_eq!(node.namespace.run(look).unwrap(), (true, true), "as soon as policy is there");
}

#[test]
fn a_table_of_an_earlier_version_is_adopted() {
    let config = Config { guard_table: false, ..Config::default() };
    let mut node = Node::with(&Underlay::new(), 1, config);
    node.change(open_profile);
    let mut second =
        node.namespace.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
    assert_eq!(node.namespace.run(|| second.resync()).unwrap(), Report::default());
    assert!(!nft(&node, &["delete", "table", "inet", "tortie"]).status.success());
}

#[test]
fn unknown_table_flags_are_rejected_by_the_kernel() {
    let namespace = tortie_kernel::namespace::NetNs::create().unwrap();
    let unknown = Transaction { table: "tortie".to_owned(), ops: vec![Op::AddTable(0x80)] };
    let error = namespace.run(|| Nft::open().unwrap().commit(&unknown).unwrap_err()).unwrap();
    assert!(matches!(error.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP)), "{error}");
    assert!(error.to_string().contains("make the table"), "{error}");
}

/// If the kernel cannot prevent changes by others, they are noticed and repaired within a second.
#[test]
fn foreign_changes_are_noticed_at_once() {
    let mut node = Node::with(&Underlay::new(), 1, Config { guard_table: false, ..Config::default() });
    let (disturb, disturbed) = mpsc::channel();
    tortie_dataplane::Dataplane::watch(
        &mut *node.dataplane,
        Box::new(move || disturb.send(()).unwrap_or_default()),
    );
    let (mut node, client, server) = closed_server_on(node);
    let table = |node: &Node| node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap()).unwrap();
    let ours = table(&node).unwrap();
    let set = &ours.sets["own-addresses4"];
    assert!(!set.elements.is_empty());
    let interface = &node.state.endpoints[&server.id()].host_interface;
    let address = format!("{{ {interface:?} . {} }}", server.address);
    let vandals: [&[&str]; 8] = [
        &["flush", "ruleset"],
        &["delete", "table", "inet", "tortie"],
        &["insert", "rule", "inet", "tortie", "to-workload", "accept"],
        &["flush", "chain", "inet", "tortie", "to-workload"],
        &["flush", "map", "inet", "tortie", "to-workload-program"],
        &["delete", "element", "inet", "tortie", "own-addresses4", &address],
        &["add", "chain", "inet", "tortie", "theirs"],
        &["add chain inet tortie theirs { type filter hook forward priority 0; policy drop; }"],
    ];
    for vandal in vandals {
        assert!(disturbed.try_recv().is_err(), "nobody but ourselves has changed anything before {vandal:?}");
        let done = nft(&node, vandal);
        assert!(done.status.success(), "{vandal:?}: {}", String::from_utf8_lossy(&done.stderr));
        let begun = Instant::now();
        disturbed.recv_timeout(TIMEOUT).unwrap_or_else(|_| panic!("{vandal:?} went unnoticed"));
        assert_eq!(node.resync(), Report::default(), "{vandal:?}");
        assert_eq!(table(&node).as_ref(), Some(&ours), "{vandal:?}");
        assert!(begun.elapsed() < Duration::from_secs(1), "{vandal:?}: {:?}", begun.elapsed());
        // All of its changes have been reported before the next one begins.
        while disturbed.recv_timeout(Duration::from_millis(500)).is_ok() {}
    }
    assert!(client.is_cut_off(server.address, 80));
    // Another table does not belong to Tortie.
    assert!(nft(&node, &["add", "table", "inet", "theirs"]).status.success());
    assert!(disturbed.recv_timeout(Duration::from_millis(100)).is_err());
}

/// Anybody may create a Pod that never gets an interface. Then single pods are checked at each call, and everything only every ten
/// seconds, unless somebody has changed the table.
#[test]
fn a_flushed_table_is_repaired_while_a_pod_waits_for_its_link() {
    let mut node = Node::with(&Underlay::new(), 1, Config { guard_table: false, ..Config::default() });
    let (disturb, disturbed) = mpsc::channel();
    let on_change = Box::new(move || disturb.send(()).unwrap_or_default());
    tortie_dataplane::Dataplane::watch(&mut *node.dataplane, on_change);
    let (mut node, client, server) = closed_server_on(node);
    let without_link = Endpoint {
        container_id: "none".into(),
        host_interface: "cali0".into(),
        addresses: vec![[10, 65, 1, 9].into()],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(open()),
    };
    node.change(|state| drop(state.endpoints.insert(Pod::new("late", 1, 9).id(), Arc::new(without_link))));
    let waiting = node.resync();
    assert!(waiting.retry && waiting.node.is_empty(), "{waiting:?}");
    let table = |node: &Node| node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap()).unwrap();
    let ours = table(&node);
    assert!(nft(&node, &["flush", "ruleset"]).status.success());
    disturbed.recv_timeout(TIMEOUT).unwrap();
    assert_eq!(node.resync(), waiting);
    assert!(table(&node) == ours, "the table is not as it was");
    assert!(client.is_cut_off(server.address, 80));
}

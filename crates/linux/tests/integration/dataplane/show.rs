//! `show` reports what the kernel has for a pod: the origin of each rule, changes by others, and counts of real
//! packets.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use crate::common::cluster::*;
use tortie_api::calico::{FilterDenyAction, PolicyCounters};
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_dataplane::*;
use tortie_kernel::nftables::{Nft, Op, Table, Transaction};
use tortie_linux::dataplane::Config;
use tortie_policy::program::*;

fn tcp_from(action: Action, set: &str, port: u16) -> Rule {
    Rule {
        protocol: Some(Protocol::TCP),
        source: EntityMatch { sets: vec![SetId::new(set)], ..EntityMatch::default() },
        destination: EntityMatch { ports: vec![PortRange::single(port)], ..EntityMatch::default() },
        ..Rule::all(action)
    }
}

/// A node with a client, and a server with three rules, two of which are merged.
fn shop(config: Config) -> (Node, Pod, Pod) {
    let mut node = Node::with(&Underlay::new(), 1, config);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    [80, 443, 22].into_iter().for_each(|port| server.serve(port));
    let address: IpAddr = client.address.into();
    node.change(|state| {
        open_profile(state);
        let members = BTreeSet::from([Member::Net(address.into())]);
        state.sets.insert(SetId::new("clients"), (SetKind::Nets, members.into()));
        let rules = vec![
            tcp_from(Action::Deny, "clients", 22),
            tcp_from(Action::Allow, "clients", 80),
            tcp_from(Action::Allow, "clients", 443),
        ];
        let rules = PolicyRules { ingress: rules, egress: Vec::new() };
        state.policies.insert(policy_id("web"), Arc::new(rules));
    });
    node.add(&client, open());
    node.add(&server, ingress(&["web"], EndOfTier::Deny));
    (node, client, server)
}

fn counting(node: &mut Node, counters: PolicyCounters) {
    let report = node.change(|state| Arc::make_mut(&mut state.settings).policy_counters = counters);
    assert_eq!(report, Report::default());
}

fn show(node: &mut Node, pod: &Pod) -> Shown {
    let id = pod.id();
    node.namespace.run(|| node.dataplane.show(&id)).unwrap().unwrap()
}

/// The rules that come from rules of a policy, by their numbers.
fn of_policy<'a>(shown: &'a Shown, name: &str) -> Vec<&'a ShownRule> {
    let lists = shown.lists.iter().filter(|list| list.direction == Direction::Ingress);
    let rules = lists.flat_map(|list| &list.rules);
    rules.filter(|rule| rule.policy == Some(policy_id(name)) && !rule.numbers.is_empty()).collect()
}

fn packets(count: Option<Count>) -> u64 {
    count.map_or(0, |count| count.packets)
}

#[test]
fn each_rule_is_shown_with_its_source() {
    let (mut node, _, server) = shop(Config::default());
    let shown = show(&mut node, &server);
    assert_eq!(shown.remarks, Vec::<String>::new());
    assert_eq!(shown.counting, Some(false));
    let lists: Vec<_> = shown.lists.iter().map(|list| (list.direction, list.part.clone())).collect();
    assert_eq!(
        lists,
        [
            (Direction::Ingress, ShownPart::BeforePolicy),
            (Direction::Ingress, ShownPart::Program),
            (Direction::Ingress, ShownPart::Policy(policy_id("web"))),
            (Direction::Egress, ShownPart::BeforePolicy),
            (Direction::Egress, ShownPart::Program),
            (Direction::Egress, ShownPart::Policy(policy_id("open"))),
        ]
    );
    let rules = of_policy(&shown, "web");
    let numbers: Vec<_> = rules.iter().map(|rule| rule.numbers.clone()).collect();
    assert_eq!(numbers, [vec![1], vec![2, 3]], "the second and the third are one: {rules:#?}");
    let set = shown.sets.iter().find(|(name, _)| rules[1].text.contains(*name)).unwrap();
    assert_eq!(*set.1, SetId::new("clients"));
    let text = rules[1].text.replace(set.0, "clients");
    assert_eq!(text, "meta nfproto ipv4 meta l4proto tcp ip saddr @clients th dport { 80, 443 } accept");
    assert!(
        shown.lists.iter().flat_map(|list| &list.rules).all(|rule| !rule.differs && rule.count.is_none())
    );
    let program = &shown.lists[1].rules;
    assert_eq!(program[0].policy, Some(policy_id("web")), "{program:#?}");
    assert_eq!(program[1].comment, "end of tier default");
    assert!(shown.lists[3].rules.iter().any(|rule| rule.comment == "not from an address of its own"));

    let stranger = Pod::new("stranger", 1, 9).id();
    let unknown = node.namespace.run(|| node.dataplane.show(&stranger)).unwrap();
    assert_eq!(unknown, Err(ShowError::NoEndpoint("demo/stranger (eth0)".to_owned())));
}

/// The kernel is read, not the known state.
#[test]
fn foreign_changes_are_shown() {
    let (mut node, _, server) = shop(Config { guard_table: false, ..Config::default() });
    let shown = show(&mut node, &server);
    let chain = shown.lists.iter().find(|list| list.part == ShownPart::Policy(policy_id("web"))).unwrap();
    let other = |node: &Node, op: Op| {
        let transaction = Transaction { table: "tortie".to_owned(), ops: vec![op] };
        node.namespace.run(|| Nft::open().unwrap().commit(&transaction).unwrap()).unwrap();
    };
    let drop_all = tortie_kernel::nftables::Rule::new(
        vec![tortie_kernel::nftables::Expr::Verdict(tortie_kernel::nftables::Verdict::Drop)],
        "somebody's",
    );
    other(&node, Op::SetRules(chain.name.clone(), vec![drop_all]));
    let shown = show(&mut node, &server);
    let differing: Vec<_> =
        shown.lists.iter().flat_map(|list| &list.rules).filter(|rule| rule.differs).collect();
    assert_eq!(differing.iter().map(|rule| rule.text.as_str()).collect::<Vec<_>>(), ["drop"]);
    assert_eq!(shown.remarks, [format!("chain {} lacks 2 of the 2 rules that Tortie put there", chain.name)]);

    other(&node, Op::DeleteTable);
    let shown = show(&mut node, &server);
    assert!(shown.lists.iter().all(|list| list.rules.is_empty()), "{shown:#?}");
    assert!(
        shown.remarks.iter().any(|remark| remark.contains("all new packets to the pod are dropped")),
        "{shown:#?}"
    );
    assert!(node.resync().node.is_empty());
    assert_eq!(show(&mut node, &server).remarks, Vec::<String>::new());
}

/// One connection is one packet that policy judges; its later packets are not judged.
#[test]
fn hits_are_counted_by_rule_and_by_value() {
    let (mut node, client, server) = shop(Config::default());
    counting(&mut node, PolicyCounters::Enabled);
    let value = |shown: &Shown, port: &str| {
        let rules = of_policy(shown, "web");
        let found = rules[1].values.iter().find(|value| value.text == port);
        packets(found.unwrap_or_else(|| panic!("no value {port}: {rules:#?}")).count)
    };
    let shown = show(&mut node, &server);
    assert_eq!(shown.counting, Some(true));
    assert_eq!((value(&shown, "80"), value(&shown, "443")), (0, 0));
    assert!(shown.lists.iter().flat_map(|list| &list.rules).all(|rule| !rule.differs), "{shown:#?}");

    assert!(client.reaches(&server, 80));
    assert!(client.reaches(&server, 443) && client.reaches(&server, 443));
    let shown = show(&mut node, &server);
    let rules = of_policy(&shown, "web");
    assert_eq!((packets(rules[0].count), packets(rules[1].count)), (0, 3), "{rules:#?}");
    assert_eq!((value(&shown, "80"), value(&shown, "443")), (1, 2), "{rules:#?}");
    assert!(rules[1].count.unwrap().bytes >= 3 * 40, "{rules:#?}");
    assert!(client.is_cut_off(server.address, 22));
    let denied = |shown: &Shown| packets(of_policy(shown, "web")[0].count);
    assert!(denied(&show(&mut node, &server)) >= 1, "each SYN that was tried counts");

    // Reading back and comparing everything neither resets counts nor finds differences.
    let before = show(&mut node, &server);
    assert_eq!(node.resync(), Report::default());
    assert_eq!(show(&mut node, &server), before);
    // Nor does the next agent.
    node.restart();
    assert_eq!(show(&mut node, &server), before);

    counting(&mut node, PolicyCounters::Disabled);
    let shown = show(&mut node, &server);
    assert!(
        shown
            .lists
            .iter()
            .flat_map(|list| &list.rules)
            .all(|rule| rule.count.is_none() && rule.values.is_empty())
    );
    assert_eq!(shown.remarks, Vec::<String>::new());
    assert!(client.reaches(&server, 80) && client.is_cut_off(server.address, 22));
}

/// A value counts only if the whole rule matches, whichever tests follow.
#[test]
fn values_of_a_rule_that_does_not_match_count_nothing() {
    let (mut node, client, server) = shop(Config::default());
    let address: IpAddr = client.address.into();
    let nets = ["10.65.1.2/32".parse().unwrap(), "10.99.0.0/16".parse().unwrap()];
    let from_nets = |port| Rule {
        source: EntityMatch { nets: nets.to_vec(), ..EntityMatch::default() },
        ..tcp_from(Action::Allow, "clients", port)
    };
    assert_eq!(nets[0].addr(), address);
    node.change(|state| {
        let ingress = vec![from_nets(80), from_nets(443)].into_iter();
        let ingress =
            ingress.map(|rule| Rule { source: EntityMatch { sets: vec![], ..rule.source }, ..rule });
        let rules = PolicyRules { ingress: ingress.collect(), egress: Vec::new() };
        state.policies.insert(policy_id("web"), Arc::new(rules));
    });
    counting(&mut node, PolicyCounters::Enabled);
    assert!(client.is_cut_off(server.address, 22) && client.reaches(&server, 443));
    let shown = show(&mut node, &server);
    let rules = of_policy(&shown, "web");
    let [rule] = rules.as_slice() else { panic!("they are folded into one: {rules:#?}") };
    let counts: Vec<_> =
        rule.values.iter().map(|value| (value.text.as_str(), packets(value.count))).collect();
    assert_eq!(
        counts.iter().copied().collect::<BTreeSet<_>>(),
        BTreeSet::from([("80", 0), ("443", 1), ("10.65.1.2", 1), ("10.99.0.0-10.99.255.255", 0)]),
        "the packets to port 22 came from one of the networks: {rule:#?}"
    );
}

/// If rules of all policies become one lookup, the key identifies the rule.
#[test]
fn lookups_are_counted_by_key() {
    let (mut node, client, server) = shop(Config { rules_in_a_row: 0, ..Config::default() });
    counting(&mut node, PolicyCounters::Enabled);
    assert!(client.reaches(&server, 443));
    let shown = show(&mut node, &server);
    let values = shown.lists.iter().flat_map(|list| &list.rules).flat_map(|rule| &rule.values);
    let hit: Vec<_> = values.filter(|value| packets(value.count) > 0).collect();
    let [hit] = hit.as_slice() else { panic!("{hit:#?}\n{shown:#?}") };
    assert_eq!((hit.text.as_str(), packets(hit.count)), ("10.65.1.2 . tcp . 443", 1));
    assert_eq!(hit.from, ["NetworkPolicy demo/web Ingress rule 2-3"], "{shown:#?}");
}

/// A setting that changes rules leaves connections alone, and opens nothing.
#[test]
fn counters_can_be_enabled_and_disabled_at_any_time() {
    for deny in [FilterDenyAction::Drop, FilterDenyAction::Reject] {
        for rules_in_a_row in [0, 32] {
            let (mut node, client, server) = shop(Config { rules_in_a_row, ..Config::default() });
            node.change(|state| Arc::make_mut(&mut state.settings).deny = deny);
            let stream = client.connect(server.address, 80).unwrap();
            for counters in [PolicyCounters::Enabled, PolicyCounters::Disabled] {
                counting(&mut node, counters);
                assert!(answers(&stream));
                assert!(client.reaches(&server, 443));
                assert!(client.is_cut_off(server.address, 22));
            }
            let listed =
                |node: &Node| node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap()).unwrap();
            let after: Option<Table> = listed(&node);
            node.restart();
            assert_eq!(listed(&node), after, "nothing of the counters is left");
        }
    }
}

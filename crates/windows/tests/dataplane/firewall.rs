//! The firewall's rule for VXLAN: who gets in, whose rules stay, and what is reported.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::node::*;
use testkit::Stateful;
use tortie_api::net::IpVersion;
use tortie_dataplane::{Delta, MacAddress, Reason, Vtep};
use tortie_hcn::{Firewall, FirewallError, FirewallRule, HResult, IpHelper, LocalRules, NoIpHelper};
use tortie_hns_emulator::EmulatedFirewall;
use tortie_windows::{Host, HostRoutes, VXLAN_RULE, VxlanRule, WindowsDataplane};

const NODES: [&str; 2] = ["172.16.0.1", "172.16.0.9"];

/// A node with a firewall, and these other nodes.
struct Firewalled {
    node: Node,
    firewall: Arc<EmulatedFirewall>,
    rule: Arc<VxlanRule>,
}

impl Firewalled {
    fn new(others: &[&str]) -> Self {
        let firewall = Arc::new(EmulatedFirewall::default());
        let rule = Arc::new(VxlanRule::new(firewall.clone()));
        let ip: Arc<dyn IpHelper> = Arc::new(NoIpHelper);
        let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
        let mut node = Node::usual();
        let dataplane = WindowsDataplane::new(node.hns.clone()).with_host(host.with_firewall(rule.clone()));
        node.dataplane = Stateful::new(dataplane);
        let deltas = [local_node(), own_block()].into_iter().chain(others.iter().map(|other| vtep(other)));
        node.apply(&deltas.collect::<Vec<_>>());
        Self { node, firewall, rule }
    }

    /// The problem, after the rule was compared; it is in the node's report, too.
    fn problem(&mut self) -> Option<String> {
        let found = self.rule.reconcile();
        let report = self.node.dataplane.resync();
        let mut reported = report.node.into_iter().filter(|it| it.reason == Reason::FirewallNotOpen);
        assert_eq!(reported.next(), found);
        found.map(|condition| condition.message)
    }

    /// Who may send, as the firewall lists it; `None` without the rule.
    fn admitted(&self) -> Option<String> {
        let rules = self.firewall.rules().unwrap();
        let ours: Vec<&FirewallRule> = rules.iter().filter(|rule| rule.name == VXLAN_RULE).collect();
        assert!(ours.len() <= 1, "{ours:?}");
        ours.first().map(|rule| rule.remote_addresses.replace("/255.255.255.255", ""))
    }
}

fn vtep(address: &str) -> Delta {
    let parent: Ipv4Addr = address.parse().unwrap();
    let last = parent.octets()[3];
    Delta::Vtep(Vtep {
        node: format!("node-{last}"),
        address: [10, 244, last, 0].into(),
        mac: MacAddress([0x66, 0, 0, 0, 0, last]),
        parent: parent.into(),
    })
}

/// An administrator's rule that lets VXLAN in from everywhere.
fn open() -> FirewallRule {
    FirewallRule {
        name: "VXLAN by hand".to_owned(),
        is_enabled: true,
        is_inbound: true,
        allows: true,
        protocol: 17,
        local_ports: "4789".to_owned(),
        remote_ports: "*".to_owned(),
        local_addresses: "*".to_owned(),
        remote_addresses: "*".to_owned(),
        interface_types: "All".to_owned(),
        profiles: FirewallRule::ALL_PROFILES,
        ..FirewallRule::default()
    }
}

#[test]
fn the_other_nodes_and_nobody_else_may_send() {
    let mut machine = Firewalled::new(&[]);
    assert_eq!(machine.problem(), None);
    assert_eq!(machine.admitted(), None, "an empty list would admit everybody");
    machine.node.apply(&[vtep(NODES[0]), vtep(NODES[1])]);
    assert_eq!(machine.problem(), None);
    assert_eq!(machine.admitted().unwrap(), "172.16.0.1,172.16.0.9");
    let rule = machine.firewall.rules().unwrap().remove(0);
    assert!(rule.is_enabled && rule.is_inbound && rule.allows && rule.protocol == 17, "{rule:?}");
    assert_eq!((&*rule.local_ports, rule.profiles), ("4789", FirewallRule::ALL_PROFILES));
    // The firewall lists addresses in its own way, which is no difference.
    assert_eq!(machine.problem(), None);
    assert_eq!(machine.firewall.change(|state| state.changes), 1);
    machine.node.apply(&[Delta::VtepRemoved("node-1".into(), IpVersion::V4)]);
    assert_eq!(machine.problem(), None);
    assert_eq!(machine.admitted().unwrap(), "172.16.0.9");
    machine.node.apply(&[Delta::VtepRemoved("node-9".into(), IpVersion::V4)]);
    assert_eq!((machine.problem(), machine.admitted()), (None, None));
}

#[test]
fn what_somebody_has_changed_is_set_again() {
    let changes: [fn(&mut FirewallRule); 8] = [
        |rule| rule.is_enabled = false,
        |rule| rule.allows = false,
        |rule| rule.remote_addresses = "*".to_owned(),
        |rule| rule.remote_addresses = "172.16.0.1".to_owned(),
        |rule| rule.local_ports = "4790".to_owned(),
        |rule| rule.profiles = 1,
        |rule| rule.is_inbound = false,
        |rule| rule.application = r"C:\other.exe".to_owned(),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut machine = Firewalled::new(&NODES);
        machine.problem();
        let wanted = machine.firewall.rules().unwrap();
        machine.firewall.change(|state| change(&mut state.rules[0]));
        assert_eq!(machine.problem(), None, "{number}");
        assert_eq!(machine.firewall.rules().unwrap(), wanted, "{number}");
    }
    // The firewall changes either of two, and nobody knows which.
    let mut machine = Firewalled::new(&NODES);
    machine.problem();
    machine.firewall.change(|state| {
        state.rules.push(FirewallRule { local_ports: "*".to_owned(), ..state.rules[0].clone() })
    });
    assert_eq!(machine.problem(), None);
    assert_eq!(machine.admitted().unwrap(), "172.16.0.1,172.16.0.9");
}

#[test]
fn rules_of_others_stay_and_count_where_a_group_policy_may_ignore_tortie_s() {
    let change = |change: fn(&mut FirewallRule)| {
        let mut rule = open();
        change(&mut rule);
        rule
    };
    for (what, rule, is_enough) in [
        ("everybody", open(), true),
        ("ports with others", change(|rule| rule.local_ports = "53, 4000-5000".into()), true),
        ("any protocol", change(|rule| (rule.protocol, rule.local_ports) = (256, String::new())), true),
        (
            "both nodes",
            change(|rule| rule.remote_addresses = "172.16.0.1/255.255.255.255,172.16.0.9".into()),
            true,
        ),
        ("their network", change(|rule| rule.remote_addresses = "172.16.0.0/255.255.255.0".into()), true),
        ("a range", change(|rule| rule.remote_addresses = "172.16.0.1-172.16.0.9".into()), true),
        ("the kernel", change(|rule| rule.application = "System".into()), true),
        ("the three profiles", change(|rule| rule.profiles = 7), true),
        ("one node", change(|rule| rule.remote_addresses = "172.16.0.1".into()), false),
        ("a shorter range", change(|rule| rule.remote_addresses = "172.16.0.1-172.16.0.8".into()), false),
        ("a word", change(|rule| rule.remote_addresses = "LocalSubnet".into()), false),
        ("another port", change(|rule| rule.local_ports = "4788,4790-5000".into()), false),
        ("TCP", change(|rule| rule.protocol = 6), false),
        ("disabled", change(|rule| rule.is_enabled = false), false),
        ("out", change(|rule| rule.is_inbound = false), false),
        ("a program", change(|rule| rule.application = r"C:\vxlan.exe".into()), false),
        ("a service", change(|rule| rule.service = "dns".into()), false),
        ("a profile", change(|rule| rule.profiles = 3), false),
        ("remote ports", change(|rule| rule.remote_ports = "4789".into()), false),
        ("a local address", change(|rule| rule.local_addresses = "172.16.0.3".into()), false),
        ("wireless", change(|rule| rule.interface_types = "Wireless".into()), false),
    ] {
        let mut machine = Firewalled::new(&NODES);
        machine.firewall.change(|state| {
            state.local_rules = Some(LocalRules::GroupPolicy);
            state.rules.push(rule.clone());
        });
        assert_eq!(machine.problem().is_none(), is_enough, "{what}");
        // It may have conditions that are not read.
        assert_eq!(machine.admitted().unwrap(), "172.16.0.1,172.16.0.9", "{what}");
        assert!(machine.firewall.rules().unwrap().contains(&rule), "{what}: it stays as it is");
    }
}

#[test]
fn what_keeps_packets_out_is_reported_with_the_remedy() {
    let mut machine = Firewalled::new(&NODES);
    for (state, expected) in [
        (Some(LocalRules::GroupPolicy), Some("a group policy governs the firewall")),
        (Some(LocalRules::AllBlocked), Some("blocks everything that comes in")),
        (Some(LocalRules::Apply), None),
    ] {
        machine.firewall.change(|firewall| firewall.local_rules = state);
        let problem = machine.problem();
        assert_eq!(problem.is_some(), expected.is_some(), "{problem:?}");
        assert!(expected.is_none_or(|text| problem.unwrap().contains(text)), "{state:?}");
    }
    // The policy has a rule that is enough.
    machine.firewall.change(|state| {
        state.local_rules = Some(LocalRules::GroupPolicy);
        state.rules.push(open());
    });
    assert_eq!(machine.problem(), None);
    let blocks = FirewallRule { name: "no tunnels".into(), allows: false, profiles: 2, ..open() };
    machine.firewall.change(|state| state.rules.push(blocks));
    assert!(machine.problem().unwrap().contains("\"no tunnels\" blocks UDP 4789"));
    for (senders, is_problem) in [
        ("203.0.113.7", false),
        ("203.0.113.7,172.16.0.9", true),
        ("LocalSubnet", true),
        ("172.16.0.0/24", true),
    ] {
        let of_some = |rule: &mut FirewallRule| rule.remote_addresses = senders.to_owned();
        machine.firewall.change(|state| state.rules.iter_mut().filter(|rule| !rule.allows).for_each(of_some));
        assert_eq!(machine.problem().is_some(), is_problem, "{senders}");
    }
    let failure = FirewallError::Failed { operation: "list its rules", code: HResult(0x8007_06d9) };
    machine.firewall.change(|state| state.fails = Some(failure));
    let problem = machine.problem().unwrap();
    assert!(problem.contains("0x800706d9") && problem.contains("mpssvc"), "{problem}");
    machine.firewall.change(|state| state.fails = Some(FirewallError::None));
    assert_eq!(machine.problem(), None, "without a firewall, nothing is kept out");
}

#[test]
fn cleanup_removes_the_rule_and_nothing_else() {
    let mut machine = Firewalled::new(&NODES);
    machine.problem();
    let other = FirewallRule { local_ports: "53".into(), ..open() };
    machine.firewall.change(|state| {
        state.rules.push(other.clone());
        state.rules.push(state.rules[0].clone());
    });
    assert_eq!(VxlanRule::remove(&*machine.firewall), Ok(true));
    assert_eq!(machine.firewall.rules().unwrap(), [other]);
    assert_eq!(VxlanRule::remove(&*machine.firewall), Ok(false));
    machine.firewall.change(|state| state.fails = Some(FirewallError::None));
    assert_eq!(VxlanRule::remove(&*machine.firewall), Ok(false));
}

/// The firewall's service may be slow, and the dataplane must not wait for it.
#[test]
fn a_thread_of_its_own_follows_the_nodes() {
    let mut machine = Firewalled::new(&NODES[..1]);
    machine.rule.watch().unwrap();
    for (more, expected) in [(None, "172.16.0.1"), (Some(NODES[1]), "172.16.0.1,172.16.0.9")] {
        machine.node.apply(&more.into_iter().map(vtep).collect::<Vec<_>>());
        let end = Instant::now() + Duration::from_secs(10);
        while machine.admitted().as_deref() != Some(expected) {
            assert!(Instant::now() < end, "{:?}", machine.admitted());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

//! The firewall's rules for VXLAN and BGP: who gets in, whose rules stay, and what is reported.

mod bgp;

use std::net::Ipv4Addr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::dataplane::node::*;
use tortie_api::net::IpVersion;
use tortie_dataplane::{Condition, Delta, MacAddress, Reason, Vtep};
use tortie_hcn::{Firewall, FirewallError, FirewallRule, HResult, IpHelper, LocalRules, NoIpHelper};
use tortie_hns_emulator::EmulatedFirewall;
use tortie_windows::{FirewallOpening, FirewallOpenings, Host, HostRoutes, Opening, PolicyOnly};

const NODES: [&str; 2] = ["172.16.0.1", "172.16.0.9"];
/// The agent's program.
const AGENT: &str = r"C:\Program Files\tortie\tortie.exe";

/// A node with a firewall, and these other nodes.
struct Firewalled {
    node: Node,
    firewall: Arc<EmulatedFirewall>,
    /// The one for VXLAN.
    rule: Arc<FirewallOpening>,
    /// The one for BGP.
    bgp: Arc<FirewallOpening>,
}

impl Firewalled {
    fn new(others: &[&str]) -> Self {
        let firewall = Arc::new(EmulatedFirewall::default());
        let openings = FirewallOpenings::new(firewall.clone(), AGENT);
        let FirewallOpenings { vxlan: rule, bgp } = openings.clone();
        let ip: Arc<dyn IpHelper> = Arc::new(NoIpHelper);
        let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
        let mut node = Node::usual();
        node.dataplane = node.dataplane.map(|dataplane| dataplane.with_host(host.with_firewall(openings)));
        let deltas = [local_node(), own_block()].into_iter().chain(others.iter().map(|other| vtep(other)));
        node.apply(&deltas.collect::<Vec<_>>());
        Self { node, firewall, rule, bgp }
    }

    /// The problem, after the rule for VXLAN was compared; it is in the node's report, too.
    fn problem(&mut self) -> Option<String> {
        let found = self.rule.reconcile();
        self.reported(found)
    }

    fn reported(&mut self, found: Option<Condition>) -> Option<String> {
        let report = self.node.dataplane.resync();
        let mut reported = report.node.into_iter().filter(|it| it.reason == Reason::FirewallNotOpen);
        assert_eq!(reported.next(), found);
        found.map(|condition| condition.message)
    }

    /// Who may send VXLAN, as the firewall lists it; `None` without the rule.
    fn admitted(&self) -> Option<String> {
        let rules = self.firewall.rules().unwrap();
        let ours: Vec<&FirewallRule> = rules.iter().filter(|rule| rule.name == "Tortie VXLAN").collect();
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
        mtu: None,
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
    assert_eq!(Opening::Vxlan.remove(&*machine.firewall), Ok(true));
    assert_eq!(machine.firewall.rules().unwrap(), [other]);
    assert_eq!(Opening::Vxlan.remove(&*machine.firewall), Ok(false));
    machine.firewall.change(|state| state.fails = Some(FirewallError::None));
    assert_eq!(Opening::Vxlan.remove(&*machine.firewall), Ok(false));
}

#[test]
fn a_policy_only_agent_closes_what_an_agent_with_an_overlay_has_opened() {
    let mut machine = Firewalled::new(&NODES[..1]);
    machine.problem();
    assert!(machine.admitted().is_some());
    let results = tempfile::tempdir().unwrap();
    let policy_only = PolicyOnly { results: results.path().to_owned() };
    machine.node.dataplane = machine.node.dataplane.map(|dataplane| dataplane.with_policy_only(policy_only));
    machine.node.apply(&[vtep(NODES[1])]);
    machine.rule.reconcile();
    assert_eq!(machine.admitted(), None);
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

/// Addresses in a row are one range, and more than a thousand ranges are several rules.
#[test]
fn long_lists_become_ranges_and_several_rules() {
    let mut machine = Firewalled::new(&[]);
    let node = |number: u32| Ipv4Addr::from(0xac10_0000 + number);
    let name = |number: u32| format!("node-{number}");
    let vtep = |number: u32| {
        Delta::Vtep(Vtep {
            node: name(number),
            address: Ipv4Addr::from(0x0af4_0000 + number).into(),
            mac: MacAddress([0x66, 0, 0, 0, 0, 1]),
            parent: node(number).into(),
            mtu: None,
        })
    };
    let gone = |number: u32| Delta::VtepRemoved(name(number), IpVersion::V4);
    machine.node.apply(&(10..2_010).map(vtep).collect::<Vec<_>>());
    assert_eq!(machine.problem(), None);
    assert_eq!(machine.admitted().unwrap(), "172.16.0.10-172.16.7.217");
    // Every second one goes: each of the others is a part.
    machine.node.apply(&(10..2_010).filter(|number| number % 2 == 1).map(gone).collect::<Vec<_>>());
    assert_eq!(machine.problem(), None);
    let rules = || machine.firewall.rules().unwrap();
    assert_eq!(rules().len(), 1);
    machine.node.apply(&[vtep(1), vtep(3)]);
    assert_eq!(machine.rule.reconcile(), None);
    let names: Vec<String> = rules().into_iter().map(|rule| rule.name).collect();
    assert_eq!(names, ["Tortie VXLAN", "Tortie VXLAN 2"]);
    let parts = |name: &str| {
        let rules = rules();
        let rule = rules.iter().find(|rule| rule.name == name).unwrap();
        rule.remote_addresses.split(',').count()
    };
    assert_eq!((parts("Tortie VXLAN"), parts("Tortie VXLAN 2")), (1_000, 2));
    let changes = machine.firewall.change(|state| state.changes);
    assert_eq!(machine.rule.reconcile(), None);
    assert_eq!(machine.firewall.change(|state| state.changes), changes, "nothing differs");
    // A rule with another name that begins so is somebody else's.
    let other = FirewallRule { name: "Tortie VXLAN by hand".into(), ..open() };
    machine.firewall.change(|state| state.rules.push(other.clone()));
    machine.node.apply(&[gone(1), gone(3)]);
    assert_eq!(machine.rule.reconcile(), None);
    assert_eq!(machine.firewall.rules().unwrap().len(), 2);
    assert_eq!(Opening::Vxlan.remove(&*machine.firewall), Ok(true));
    assert_eq!(machine.firewall.rules().unwrap(), [other]);
}

/// A firewall that notes which of these addresses a change has left out.
struct Watched {
    inner: EmulatedFirewall,
    needed: Vec<Ipv4Addr>,
    missed: Mutex<Vec<Ipv4Addr>>,
}

impl Watched {
    fn look(&self) {
        let rules = self.inner.rules().unwrap();
        let parts = rules.iter().flat_map(|rule| rule.remote_addresses.split(','));
        let listed: Vec<(Ipv4Addr, Ipv4Addr)> = parts
            .map(|part| {
                let part = part.split('/').next().unwrap();
                let (from, to) = part.split_once('-').unwrap_or((part, part));
                (from.parse().unwrap(), to.parse().unwrap())
            })
            .collect();
        let is_missed = |node: &&Ipv4Addr| !listed.iter().any(|(from, to)| (from..=to).contains(node));
        self.missed.lock().unwrap().extend(self.needed.iter().filter(is_missed));
    }
}

impl Firewall for Watched {
    fn rules(&self) -> Result<Vec<FirewallRule>, FirewallError> {
        self.inner.rules()
    }

    fn set(&self, rule: &FirewallRule) -> Result<(), FirewallError> {
        self.inner.set(rule).inspect(|()| self.look())
    }

    fn remove(&self, name: &str) -> Result<(), FirewallError> {
        self.inner.remove(name).inspect(|()| self.look())
    }

    fn local_rules(&self) -> Result<LocalRules, FirewallError> {
        self.inner.local_rules()
    }
}

/// A node that comes or goes moves others to another rule. They are in a rule at each moment.
#[test]
fn nodes_that_stay_are_admitted_while_others_come_and_go() {
    let node = |number: u32| Ipv4Addr::from(0xac10_0000 + number);
    let vtep = |number: u32| {
        Delta::Vtep(Vtep {
            node: format!("node-{number}"),
            address: Ipv4Addr::from(0x0af4_0000 + number).into(),
            mac: MacAddress([0x66, 0, 0, 0, 0, 1]),
            parent: node(number).into(),
            mtu: None,
        })
    };
    let staying: Vec<u32> = (100..4_600).step_by(2).collect();
    let needed = staying.iter().map(|number| node(*number)).collect();
    let firewall = Arc::new(Watched { inner: EmulatedFirewall::default(), needed, missed: Mutex::default() });
    let openings = FirewallOpenings::new(firewall.clone(), AGENT);
    let rule = openings.vxlan.clone();
    let mut machine = Node::usual();
    machine.dataplane = machine.dataplane.map(|it| it.with_host(Host::unknown().with_firewall(openings)));
    machine.apply(&[vec![local_node(), own_block()], staying.into_iter().map(vtep).collect()].concat());
    assert_eq!(rule.reconcile(), None);
    assert_eq!(firewall.inner.rules().unwrap().len(), 3);
    firewall.missed.lock().unwrap().clear();
    let first: Vec<u32> = (2..62).step_by(2).collect();
    machine.apply(&first.iter().copied().map(vtep).collect::<Vec<_>>());
    assert_eq!(rule.reconcile(), None);
    let gone = |number: &u32| Delta::VtepRemoved(format!("node-{number}"), IpVersion::V4);
    machine.apply(&first.iter().map(gone).collect::<Vec<_>>());
    assert_eq!(rule.reconcile(), None);
    assert_eq!(*firewall.missed.lock().unwrap(), [] as [Ipv4Addr; 0]);
}

/// A firewall that holds its calls.
struct Hanging {
    inner: EmulatedFirewall,
    held: Mutex<bool>,
    let_go: Condvar,
}

impl Hanging {
    fn wait(&self) {
        let held = self.held.lock().unwrap();
        drop(self.let_go.wait_while(held, |held| *held).unwrap());
    }
}

impl Firewall for Hanging {
    fn rules(&self) -> Result<Vec<FirewallRule>, FirewallError> {
        self.wait();
        self.inner.rules()
    }

    fn set(&self, rule: &FirewallRule) -> Result<(), FirewallError> {
        self.inner.set(rule)
    }

    fn remove(&self, name: &str) -> Result<(), FirewallError> {
        self.inner.remove(name)
    }

    fn local_rules(&self) -> Result<LocalRules, FirewallError> {
        self.inner.local_rules()
    }
}

#[test]
fn a_call_that_hangs_is_reported_and_delays_nothing_else() {
    let firewall = Arc::new(Hanging {
        inner: EmulatedFirewall::default(),
        held: Mutex::new(true),
        let_go: Condvar::new(),
    });
    let openings = FirewallOpenings::new(firewall.clone(), AGENT);
    let mut node = Node::usual();
    let host = Host::unknown().with_firewall(openings.clone());
    node.dataplane = node.dataplane.map(|dataplane| dataplane.with_host(host));
    openings.watch().unwrap();
    node.apply(&[local_node(), own_block(), vtep(NODES[0])]);
    let reported = |node: &mut Node| {
        let conditions = node.dataplane.resync().node.into_iter();
        conditions.filter(|it| it.reason == Reason::FirewallNotOpen).map(|it| it.message).next()
    };
    assert_eq!(reported(&mut node), None, "it may be slow");
    node.wait(90);
    let end = Instant::now() + Duration::from_secs(20);
    let message = loop {
        // The thread may begin later than this one looks.
        if let Some(message) = reported(&mut node) {
            break message;
        }
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(message.contains("has not answered") && message.contains("mpssvc"), "{message}");
    *firewall.held.lock().unwrap() = false;
    firewall.let_go.notify_all();
    while reported(&mut node).is_some() || firewall.inner.rules().unwrap().is_empty() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
}

//! The rule for connections of BGP peers.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::*;

const PEERS: [&str; 2] = ["172.16.0.1", "fd00::9"];

fn addresses(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// A node whose speaker listens on port 179, with these peers.
fn peered(peers: &[&str]) -> Firewalled {
    let machine = Firewalled::new(&[]);
    machine.bgp.admit(179, addresses(peers));
    machine
}

impl Firewalled {
    /// The problem, after the rule for BGP was compared; it is in the node's report, too.
    fn problem_of_bgp(&mut self) -> Option<String> {
        let found = self.bgp.reconcile();
        self.reported(found)
    }

    /// The port, and who may connect to it; `None` without the rule.
    fn connects(&self) -> Option<(String, String)> {
        let rules = self.firewall.rules().unwrap();
        let mut ours = rules.into_iter().filter(|rule| rule.name == "Tortie BGP");
        let rule = ours.next()?;
        assert_eq!(ours.next(), None);
        Some((rule.local_ports, rule.remote_addresses.replace("/255.255.255.255", "")))
    }
}

fn at(port: &str, peers: &str) -> Option<(String, String)> {
    Some((port.to_owned(), peers.to_owned()))
}

#[test]
fn the_peers_of_both_families_and_nobody_else_may_connect() {
    let mut machine = peered(&["172.16.0.1", "172.16.0.2", "172.16.0.9", "fd00::1", "fd00::2", "fd00::9"]);
    assert_eq!(machine.problem_of_bgp(), None);
    let listed = "172.16.0.1-172.16.0.2,172.16.0.9,fd00::1-fd00::2,fd00::9";
    assert_eq!(machine.connects(), at("179", listed));
    let rule = machine.firewall.rules().unwrap().remove(0);
    assert!(rule.is_enabled && rule.is_inbound && rule.allows && rule.protocol == 6, "{rule:?}");
    assert_eq!(rule.profiles, FirewallRule::ALL_PROFILES);
    // Whether the firewall lists an address or a network of one address is no difference.
    machine.firewall.change(|state| {
        let rule = &mut state.rules[0];
        rule.remote_addresses = rule.remote_addresses.replace("fd00::9", "FD00::9/128");
    });
    assert_eq!(machine.problem_of_bgp(), None);
    assert_eq!(machine.firewall.change(|state| state.changes), 1);

    machine.bgp.admit(1790, addresses(&PEERS));
    assert_eq!(machine.problem_of_bgp(), None);
    assert_eq!(machine.connects(), at("1790", "172.16.0.1,fd00::9"));
    machine.bgp.admit(1790, addresses(&PEERS[1..]));
    assert_eq!(machine.problem_of_bgp(), None);
    assert_eq!(machine.connects(), at("1790", "fd00::9"));
    machine.bgp.admit(1790, BTreeSet::new());
    assert_eq!((machine.problem_of_bgp(), machine.connects()), (None, None));
}

/// The last address of IPv4 and the first one of IPv6 are no range.
#[test]
fn ranges_end_with_their_family() {
    let mut machine = peered(&["255.255.255.254", "255.255.255.255", "::", "::1"]);
    assert_eq!(machine.problem_of_bgp(), None);
    assert_eq!(machine.connects(), at("179", "255.255.255.254-255.255.255.255,::-::1"));
}

#[test]
fn the_rule_of_an_earlier_process_stays_until_the_peers_are_known() {
    let machine = peered(&PEERS);
    machine.bgp.reconcile();
    let openings = FirewallOpenings::new(machine.firewall.clone(), AGENT);
    assert_eq!(openings.bgp.reconcile(), None);
    assert_eq!(machine.connects(), at("179", "172.16.0.1,fd00::9"));
    openings.bgp.admit_nobody();
    assert_eq!(openings.bgp.reconcile(), None);
    assert_eq!(machine.connects(), None);
}

#[test]
fn each_opening_leaves_the_rules_of_the_other_one() {
    let mut machine = Firewalled::new(&NODES);
    machine.bgp.admit(179, addresses(&PEERS));
    assert_eq!((machine.problem(), machine.problem_of_bgp()), (None, None));
    let both = machine.firewall.rules().unwrap();
    let names: Vec<&str> = both.iter().map(|rule| &*rule.name).collect();
    assert_eq!(names, ["Tortie VXLAN", "Tortie BGP"]);
    assert_eq!((machine.problem(), machine.problem_of_bgp()), (None, None));
    assert_eq!(machine.firewall.rules().unwrap(), both);
    assert_eq!(Opening::Bgp.remove(&*machine.firewall), Ok(true));
    assert_eq!(machine.firewall.rules().unwrap(), both[..1]);
    assert_eq!(Opening::Bgp.remove(&*machine.firewall), Ok(false));
    assert_eq!(Opening::ALL.map(Opening::rule), ["Tortie VXLAN", "Tortie BGP"]);
}

/// A rule that blocks TCP on all ports.
fn blocks() -> FirewallRule {
    let (name, local_ports) = ("no routers".to_owned(), "*".to_owned());
    FirewallRule { name, allows: false, protocol: 6, local_ports, profiles: 2, ..open() }
}

#[test]
fn a_rule_that_blocks_the_agent_is_reported() {
    let change = |change: fn(&mut FirewallRule)| {
        let mut rule = blocks();
        change(&mut rule);
        rule
    };
    for (what, rule, is_problem) in [
        ("all programs", blocks(), true),
        // Windows adds such a rule if somebody refuses when it asks whether the program may listen.
        ("this program", change(|rule| rule.application = AGENT.to_lowercase()), true),
        ("by a variable", change(|rule| rule.application = r"%ProgramFiles%\Tortie\tortie.exe".into()), true),
        ("another program", change(|rule| rule.application = r"C:\Program Files\bird.exe".into()), false),
        ("another by a variable", change(|rule| rule.application = r"%ProgramFiles%\x.exe".into()), false),
        ("the kernel", change(|rule| rule.application = "System".into()), false),
        ("a service", change(|rule| rule.service = "dns".into()), false),
        ("the port", change(|rule| rule.local_ports = "22,100-200".into()), true),
        ("other ports", change(|rule| rule.local_ports = "1-178,180-65535".into()), false),
        ("VXLAN", change(|rule| rule.protocol = 17), false),
        ("any protocol", change(|rule| (rule.protocol, rule.local_ports) = (256, String::new())), true),
        ("the peer", change(|rule| rule.remote_addresses = "fd00::/64".into()), true),
        ("a range", change(|rule| rule.remote_addresses = "fd00::1-fd00::9".into()), true),
        ("others", change(|rule| rule.remote_addresses = "fd01::/64,10.0.0.0/8".into()), false),
        ("a strange range", change(|rule| rule.remote_addresses = "10.0.0.1-fd00::1".into()), true),
        ("a word", change(|rule| rule.remote_addresses = "LocalSubnet6".into()), true),
        ("disabled", change(|rule| rule.is_enabled = false), false),
        ("out", change(|rule| rule.is_inbound = false), false),
        ("allows", change(|rule| rule.allows = true), false),
    ] {
        let mut machine = peered(&PEERS);
        machine.firewall.change(|state| state.rules.push(rule.clone()));
        let problem = machine.problem_of_bgp();
        let expected = r#"the firewall's rule "no routers" blocks TCP 179 before"#;
        assert_eq!(problem.is_some(), is_problem, "{what}: {problem:?}");
        assert!(problem.is_none_or(|problem| problem.starts_with(expected)), "{what}");
        assert!(machine.firewall.rules().unwrap().contains(&rule), "{what}: it stays as it is");
        assert_eq!(machine.connects(), at("179", "172.16.0.1,fd00::9"), "{what}");
        machine.bgp.admit_nobody();
        assert_eq!(machine.problem_of_bgp(), None, "{what}: nobody needs it");
    }
}

#[test]
fn what_keeps_peers_out_is_reported_with_the_remedy() {
    let mut machine = peered(&PEERS);
    machine.firewall.change(|state| state.local_rules = Some(LocalRules::AllBlocked));
    assert!(machine.problem_of_bgp().unwrap().ends_with("or allow TCP 179"));
    machine.firewall.change(|state| state.local_rules = Some(LocalRules::GroupPolicy));
    let problem = machine.problem_of_bgp().unwrap();
    assert!(problem.ends_with(r#"the rule "Tortie BGP": let the policy allow TCP 179 from the BGP peers"#));
    let of_policy = FirewallRule {
        protocol: 6,
        local_ports: "179".into(),
        remote_addresses: "172.16.0.0/255.255.0.0,fd00::/64".into(),
        application: AGENT.into(),
        ..open()
    };
    machine.firewall.change(|state| state.rules.push(of_policy));
    assert_eq!(machine.problem_of_bgp(), None, "the policy has a rule that is enough");

    let failure = FirewallError::Failed { operation: "list its rules", code: HResult(0x8007_06d9) };
    machine.firewall.change(|state| state.fails = Some(failure));
    let problem = machine.problem_of_bgp().unwrap();
    assert!(problem.ends_with("or allow TCP 179 from the BGP peers by a rule of your own"), "{problem}");
    machine.bgp.admit_nobody();
    let problem = machine.problem_of_bgp().unwrap();
    assert!(
        problem.contains("mpssvc") && problem.contains(r#"a rule "Tortie BGP" may be left"#),
        "{problem}"
    );
    machine.firewall.change(|state| state.fails = None);
    assert_eq!((machine.problem_of_bgp(), machine.connects()), (None, None));
}

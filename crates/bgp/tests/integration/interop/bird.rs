//! BIRD as the peer.

use std::path::PathBuf;
use std::process::Command;

use tortie_bgp::codec::{AnyCommunity, Attributes, Community, Families, Family, LargeCommunity};
use tortie_bgp::filter::{Action, Conditions, MatchOperator, PrefixMatch, Rule};
use tortie_bgp::fsm::State;
use tortie_bgp::rib::PeerRules;
use tortie_bgp::speaker::{Password, Transport};
use tortie_servers::programs::{Program, can_run};

use crate::interop::lab::{AS, Daemon, Lab, Tortie, at, config, here, ipv4, ipv6, peer, until};

/// A running BIRD.
pub(crate) struct Bird {
    daemon: Option<Daemon>,
    socket: PathBuf,
    file: PathBuf,
    name: String,
}

impl Bird {
    /// Starts BIRD on a node with these protocols.
    pub(crate) fn start(lab: &Lab, node: u8, protocols: &str) -> Self {
        let name = format!("bird{node}");
        let (socket, file) = (lab.path(&format!("{name}.ctl")), lab.path(&format!("{name}.conf")));
        let mut bird = Self { daemon: None, socket, file, name };
        bird.write(node, protocols);
        bird.run(lab, node, &[]);
        bird
    }

    pub(crate) fn run(&mut self, lab: &Lab, node: u8, more: &[&str]) {
        let (file, socket) = (self.file.display().to_string(), self.socket.display().to_string());
        let mut arguments = vec!["-f", "-c", &file, "-s", &socket];
        arguments.extend(more);
        self.daemon = Some(lab.start(node, &self.name, Program::Bird, &arguments));
        until("BIRD answers", || self.ask("show status").contains("up and running"));
    }

    pub(crate) fn write(&self, node: u8, protocols: &str) {
        let text = format!(
            "log \"{}\" all;\nrouter id {};\nprotocol device {{}}\nprotocol direct {{ ipv4; ipv6; }}\n{protocols}\n",
            self.file.with_extension("log").display(),
            ipv4(node),
        );
        std::fs::write(&self.file, text).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.daemon.take().unwrap().kill();
    }

    pub(crate) fn ask(&self, question: &str) -> String {
        let mut command = Command::new(Program::Birdc.find().unwrap());
        command.arg("-s").arg(&self.socket).args(question.split(' '));
        let output = command.output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub(crate) fn route(&self, prefix: &str) -> Option<String> {
        let answer = self.ask(&format!("show route for {prefix} all"));
        answer.contains(prefix).then_some(answer)
    }
}

/// Routes of BIRD: one of each family, with communities.
pub(crate) const ROUTES: &str = "
protocol static s4 { ipv4; route 10.20.0.0/16 blackhole {
    bgp_community.add((64512, 7)); bgp_large_community.add((64512, 1, 2)); }; }
protocol static s6 { ipv6; route fd20::/32 blackhole; }
";

/// A session of BIRD with another node, and options of its own.
pub(crate) fn session(node: u8, other: u8, own_as: u32, other_as: u32, options: &str) -> String {
    let (own, address, own6) = (ipv4(node), ipv4(other), ipv6(node));
    format!(
        "protocol bgp n{other} {{ local {own} as {own_as}; neighbor {address} as {other_as};
    connect delay time 1; connect retry time 1; error wait time 1,2; hold time 30; {options}
    ipv4 {{ import all; export where source ~ [RTS_STATIC, RTS_BGP]; }};
    ipv6 {{ import all; export where source ~ [RTS_STATIC, RTS_BGP]; next hop address {own6}; }}; }}\n"
    )
}

#[test]
fn routes_of_both_families_go_both_ways_with_their_attributes() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let bird = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, AS, AS, "graceful restart on;")));
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    let attributes = Attributes {
        communities: vec![Community(64512 << 16 | 99)],
        large_communities: vec![LargeCommunity(4_200_000_000, 5, 6)],
        med: Some(17),
        local_pref: Some(250),
        ..here()
    };
    tortie.advertise(&[("10.1.0.0/16", attributes), ("fd01::/32", here())]);
    until("BIRD has the routes", || bird.route("10.1.0.0/16").is_some() && bird.route("fd01::/32").is_some());
    let shown = bird.route("10.1.0.0/16").unwrap();
    for part in
        ["(64512,99)", "(4200000000, 5, 6)", "BGP.med: 17", "BGP.local_pref: 250", "BGP.next_hop: 10.9.0.1"]
    {
        assert!(shown.contains(part), "{part} is missing in {shown}");
    }
    assert!(bird.route("fd01::/32").unwrap().contains("BGP.next_hop: fd09::1"));
    until("Tortie has the routes", || {
        tortie.route("10.20.0.0/16").is_some() && tortie.route("fd20::/32").is_some()
    });
    let route = tortie.route("10.20.0.0/16").unwrap();
    assert_eq!(route.attributes.next_hop.address, ipv4(2));
    assert_eq!(route.attributes.communities, [Community(64512 << 16 | 7)]);
    assert_eq!(route.attributes.large_communities, [LargeCommunity(64512, 1, 2)]);
    assert_eq!(tortie.route("fd20::/32").unwrap().attributes.next_hop.address, ipv6(2));

    tortie.withdraw("10.1.0.0/16");
    until("BIRD loses the route", || bird.route("10.1.0.0/16").is_none());
    assert!(bird.route("fd01::/32").is_some());
    bird.ask("disable s6");
    until("Tortie loses the route", || tortie.route("fd20::/32").is_none());
    tortie.shut_down("moving to another rack");
    until("BIRD knows why", || bird.ask("show protocols all n1").contains("moving to another rack"));
    // The operator's end is no restart: nothing is kept.
    until("BIRD loses the routes", || bird.route("fd01::/32").is_none());
}

#[test]
fn external_peers_see_the_path_and_the_own_next_hop() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    // Numbers of four bytes, and nodes 2 and 3 in other systems.
    let (second, third) = (4_200_000_002, 4_200_000_003);
    let lab = Lab::new(3);
    let bird = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, second, AS, "")));
    let other = Bird::start(&lab, 3, &session(3, 1, third, AS, ""));
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, second)), (3, peer(1, 3, third))]), false);
    tortie.advertise(&[("10.1.0.0/16", here())]);
    until("the route passes Tortie", || other.route("10.20.0.0/16").is_some());
    let shown = other.route("10.20.0.0/16").unwrap();
    assert!(shown.contains("BGP.as_path: 64512 4200000002"), "{shown}");
    assert!(shown.contains("BGP.next_hop: 10.9.0.1"), "{shown}");
    assert!(!shown.contains("BGP.local_pref: 250"), "{shown}");
    until("BIRD has the route", || bird.route("10.1.0.0/16").is_some());
    assert!(bird.route("10.1.0.0/16").unwrap().contains("BGP.as_path: 64512\n"));
}

#[test]
fn sessions_need_the_same_password() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    // BIRD waits, and so does Tortie in the second half: both directions of a connection are protected.
    for (passive, here_too) in [("passive on;", false), ("", true)] {
        let options = format!("password \"secret\"; {passive}");
        let bird = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, AS, AS, &options)));
        let with = |password: Option<&str>| {
            let mut peer = peer(1, 2, AS);
            peer.session.passive = here_too;
            peer.transport.password = password.map(|password| Password(password.to_owned()));
            config(1, [(2, peer)])
        };
        let tortie = Tortie::start(&lab, 1, with(Some("wrong")), false);
        never("a session with another password", || tortie.is_established());
        tortie.apply(with(Some("secret")));
        until("the session is established", || tortie.is_established());
        // Another password ends the session, none does not begin one.
        tortie.apply(with(None));
        until("the session ends", || !tortie.is_established());
        tortie.apply(with(Some("secret")));
        until("the session is established again", || tortie.is_established());
        drop(bird);
    }
}

#[test]
fn packets_from_further_away_do_not_reach_a_protected_session() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let mut protected = peer(1, 2, 64513);
    protected.transport.ttl_security = Some(1);
    let protected = config(1, [(2, protected)]);
    // Without the option, BIRD sends with a time to live of 1 (direct) or 64 (multihop).
    let bird = Bird::start(&lab, 2, &session(2, 1, 64513, AS, "multihop 5;"));
    let tortie = Tortie::start(&lab, 1, protected, false);
    never("a session from far away", || tortie.is_established());
    bird.write(2, &session(2, 1, 64513, AS, "direct; ttl security yes;"));
    bird.ask("configure");
    until("the session is established", || tortie.is_established());
}

#[test]
fn both_may_connect_at_once() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let bird = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, AS, AS, "")));
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    for _ in 0..10 {
        until("the session is established", || {
            tortie.is_established() && bird.ask("show protocols n1").contains("Established")
        });
        bird.ask("restart n1");
        until("the session ends", || !tortie.is_established());
    }
    until("the session is established", || tortie.is_established());
    assert_eq!(tortie.status().peers[0].state, State::Established);
}

#[test]
fn another_filter_of_the_peer_sees_all_routes_again() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let accepting = session(2, 1, AS, AS, "");
    let rejecting = accepting.replacen("import all", "import none", 1);
    let bird = Bird::start(&lab, 2, &rejecting);
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    tortie.advertise(&[("10.1.0.0/16", here()), ("10.2.0.0/16", here())]);
    until("the session is established", || tortie.is_established());
    until("the routes are told", || tortie.status().peers[0].advertised == 2);
    assert!(bird.route("10.1.0.0/16").is_none());
    let established = tortie.status().peers[0].established;
    // BIRD keeps no rejected routes: it asks for them again.
    bird.write(2, &accepting);
    bird.ask("configure");
    until("BIRD has both routes", || {
        bird.route("10.1.0.0/16").is_some() && bird.route("10.2.0.0/16").is_some()
    });
    assert_eq!(tortie.status().peers[0].established, established, "the session went on");
    // And the other way round: Tortie asks, and BIRD marks beginning and end.
    bird.write(2, &format!("{ROUTES}{accepting}"));
    bird.ask("configure");
    until("Tortie has the route", || tortie.route("10.20.0.0/16").is_some());
    tortie.run(async |speaker| speaker.refresh(at(2)).await).unwrap();
    until("BIRD was asked", || bird.ask("show protocols all n1").contains("Established"));
    assert!(tortie.route("10.20.0.0/16").is_some());
}

#[test]
fn routes_pass_a_reflector_whoever_it_is() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    // Tortie on node 1 reflects between two BIRDs.
    let lab = Lab::new(3);
    let first = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, AS, AS, "")));
    let second = Bird::start(&lab, 3, &session(3, 1, AS, AS, ""));
    let client = |node| {
        let mut client = peer(1, node, AS);
        client.rules = PeerRules { client: true, cluster_id: [9, 9, 9, 9].into(), ..client.rules };
        (node, client)
    };
    let tortie = Tortie::start(&lab, 1, config(1, [client(2), client(3)]), false);
    until("the route passes Tortie", || second.route("10.20.0.0/16").is_some());
    let shown = second.route("10.20.0.0/16").unwrap();
    for part in ["BGP.originator_id: 10.9.0.2", "BGP.cluster_list: 9.9.9.9", "BGP.next_hop: 10.9.0.2"] {
        assert!(shown.contains(part), "{part} is missing in {shown}");
    }
    assert!(first.route("10.20.0.0/16").unwrap().contains("static"), "it does not come back");
    drop(tortie);

    // BIRD on node 2 reflects between two Tortie speakers.
    let clients = [1, 3].map(|node| session(2, node, AS, AS, "rr client; rr cluster id 8.8.8.8;")).concat();
    first.write(2, &clients);
    first.ask("configure");
    drop(second);
    let one = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    let three = Tortie::start(&lab, 3, config(3, [(2, peer(3, 2, AS))]), false);
    one.advertise(&[("10.1.0.0/16", here())]);
    until("the route passes BIRD", || three.route("10.1.0.0/16").is_some());
    let route = three.route("10.1.0.0/16").unwrap();
    assert_eq!(route.attributes.originator_id, Some([10, 9, 0, 1].into()));
    assert_eq!(route.attributes.cluster_list, [std::net::Ipv4Addr::new(8, 8, 8, 8)]);
    assert_eq!(route.attributes.next_hop.address, ipv4(1));
}

#[test]
fn texts_of_communities_are_those_of_bird() {
    let community: AnyCommunity = "64512:7".parse().unwrap();
    assert_eq!(community, AnyCommunity::Standard(Community(64512 << 16 | 7)));
}

/// Sessions over IPv6 have options of their own for signatures, the time to live and link-local next hops.
#[test]
fn sessions_over_ipv6_carry_routes_and_are_protected() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let (own, other) = (ipv6(2), ipv6(1));
    let protocol = |options: &str| {
        format!(
            "{ROUTES}protocol bgp n1 {{ local {own} as 64513; neighbor {other} as {AS};
            connect delay time 1; connect retry time 1; error wait time 1,2; hold time 30; {options}
            ipv6 {{ import all; export where source = RTS_STATIC; }}; }}\n"
        )
    };
    let bird = Bird::start(&lab, 2, &protocol("direct; ttl security yes; password \"secret\";"));
    let address = std::net::SocketAddr::new(ipv6(2), 179);
    let with = |password: &str, ttl_security| {
        let mut peer = peer(1, 2, 64513);
        peer.session.families = Families::from_iter([Family::Ipv6]);
        peer.rules.address = ipv6(2);
        let password = Some(Password(password.to_owned()));
        peer.transport = Transport { source: Some(ipv6(1)), password, ttl_security };
        let mut config = config(1, []);
        config.listen = vec![std::net::SocketAddr::new(ipv6(1), 179)];
        config.peers.insert(address, peer);
        config
    };
    let mut tortie = Tortie::start(&lab, 1, with("secret", Some(1)), false);
    tortie.advertise(&[("fd01::/32", here()), ("10.1.0.0/16", here())]);
    until("BIRD has the route", || bird.route("fd01::/32").is_some());
    until("Tortie has the route", || tortie.route("fd20::/32").is_some());
    let shown = bird.route("fd01::/32").unwrap();
    assert!(shown.contains("BGP.next_hop: fd09::1") && shown.contains("BGP.as_path: 64512\n"), "{shown}");
    // BIRD adds its link-local address.
    let hop = tortie.route("fd20::/32").unwrap().attributes.next_hop;
    assert_eq!(hop.address, ipv6(2));
    assert!(bird.route("10.1.0.0/16").is_none());
    tortie.events();
    // Another password, and packets that come from too far away.
    tortie.apply(with("wrong", Some(1)));
    never("a session without the right password", || tortie.is_established());
    bird.write(2, &protocol("multihop 5; password \"secret\";"));
    bird.ask("configure");
    tortie.apply(with("secret", Some(1)));
    never("a session from far away", || tortie.is_established());
    tortie.apply(with("secret", None));
    until("a session from far away that is allowed", || tortie.is_established());
}

#[test]
fn a_new_configuration_leaves_other_sessions_alone() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(3);
    let second = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, AS, AS, "")));
    let third = Bird::start(&lab, 3, &session(3, 1, AS, AS, ""));
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    tortie.advertise(&[("10.1.0.0/16", here()), ("10.2.0.0/16", here())]);
    until("node 2 has the routes", || second.route("10.1.0.0/16").is_some());
    // Another peer, and a filter for the first one.
    let mut filtered = peer(1, 2, AS);
    let cidr = "10.1.0.0/16".parse().unwrap();
    let prefix = Some(PrefixMatch { cidr, operator: MatchOperator::Equal, lengths: None });
    let conditions = Conditions { prefix, ..Conditions::default() };
    filtered.rules.export.rules =
        vec![Rule { about: "".into(), conditions, action: Action::Reject, operations: vec![] }];
    let both = config(1, [(2, filtered), (3, peer(1, 3, AS))]);
    tortie.apply(both.clone());
    until("node 3 has the routes", || third.route("10.1.0.0/16").is_some());
    until("node 2 loses the filtered route", || second.route("10.1.0.0/16").is_none());
    assert!(second.route("10.2.0.0/16").is_some());
    // Other settings of a session begin it again; a peer that goes loses the routes.
    let mut slower = both.clone();
    slower.peers.get_mut(&at(3)).unwrap().session.hold_time = 60;
    tortie.apply(slower.clone());
    until("the session of node 3 begins again", || {
        tortie.status().peers[1].negotiated.as_ref().is_some_and(|negotiated| negotiated.hold_time == 30)
            && tortie.is_established()
    });
    let established: Vec<u64> = tortie.status().peers.iter().map(|peer| peer.established).collect();
    assert_eq!(established[0], 1, "node 2 noticed nothing");
    slower.peers.remove(&at(3));
    tortie.apply(slower);
    until("node 3 loses the routes", || third.route("10.1.0.0/16").is_none());
    assert_eq!(tortie.status().peers[0].established, 1);
    // Nobody listens where nothing is configured.
    let mut silent = both;
    silent.listen.clear();
    tortie.apply(silent);
    assert_eq!(tortie.status().peers.len(), 2);
}

/// Checks for some time that something does not happen.
fn never(what: &str, mut happens: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while begin.elapsed() < std::time::Duration::from_secs(3) {
        assert!(!happens(), "{what}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

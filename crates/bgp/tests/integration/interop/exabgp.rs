//! ExaBGP as the peer. It chooses no routes: it sends what it is told to, also what no proper speaker sends, and writes
//! down what it receives.

use std::fs::File;
use std::io::Write as _;

use serde_json::{Value, json};
use tortie_bgp::codec::{AsPath, Attributes, Community, LargeCommunity, UnknownAttribute};
use tortie_bgp::speaker::Password;
use tortie_servers::programs::{Program, can_run};

use crate::interop::lab::{AS, Daemon, Lab, Tortie, config, here, ipv4, ipv6, peer, until};

/// A running ExaBGP on node 2, the peer of node 1.
struct ExaBgp<'a> {
    lab: &'a Lab,
    daemon: Daemon,
    /// The pipe by which the program that ExaBGP runs gets commands.
    commands: File,
}

impl<'a> ExaBgp<'a> {
    /// Starts ExaBGP in this autonomous system, with options of its session.
    fn start(lab: &'a Lab, own_as: u32, options: &str) -> Self {
        let path = |name: &str| lab.path(name).display().to_string();
        let program = |name: &str, line: &str| {
            testkit::executables::write_script(&lab.path(name), &format!("#!/bin/sh\n{line}\n"));
        };
        program("speak", &format!("cat {}", path("commands")));
        program("hear", &format!("cat >> {}", path("reports")));
        File::create(lab.path("reports")).unwrap();
        let text = format!(
            "process speak {{ run {}; encoder json; }}\nprocess hear {{ run {}; encoder json; }}
neighbor {} {{
    router-id 10.9.0.2; local-address {}; local-as {own_as}; peer-as {AS}; hold-time 30; {options}
    family {{ ipv4 unicast; ipv6 unicast; }}
    api speaking {{ processes [ speak ]; }}
    api hearing {{ processes [ hear ]; neighbor-changes; receive {{ parsed; update; refresh; }} }}
}}\n",
            path("speak"),
            path("hear"),
            ipv4(1),
            ipv4(2),
        );
        std::fs::write(lab.path("exabgp.conf"), text).unwrap();
        std::fs::write(
            lab.path("exabgp.env"),
            "[exabgp.daemon]\nuser = root\n[exabgp.api]\nack = false\ncli = false\n",
        )
        .unwrap();
        Self::restart(lab)
    }

    /// Ends it by SIGKILL.
    fn kill(self) {
        self.daemon.kill();
    }

    /// Starts it with the files of an earlier start.
    fn restart(lab: &'a Lab) -> Self {
        // A pipe of its own for each run: a program that an earlier ExaBGP ran may still read the one before.
        let pipe = lab.path("commands");
        let _ = std::fs::remove_file(&pipe);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        // Opened for both directions, so that neither end waits for the other.
        let commands = File::options().read(true).write(true).open(&pipe).unwrap();
        let environment = lab.path("exabgp.env").display().to_string();
        let daemon = lab.start(2, "exabgp", Program::Exabgp, &["--env", &environment, "exabgp.conf"]);
        Self { lab, daemon, commands }
    }

    /// Gives a command of ExaBGP's API.
    fn command(&mut self, line: &str) {
        writeln!(self.commands, "{line}").unwrap();
    }

    /// What ExaBGP received of the session so far.
    fn received(&self) -> Vec<Value> {
        // ExaBGP quotes some values twice. The last line may not be complete.
        let reports = std::fs::read_to_string(self.lab.path("reports")).unwrap().replace("\"\"", "\"");
        let complete = reports.rsplit_once('\n').map_or("", |(complete, _)| complete);
        let read = |line| serde_json::from_str::<Value>(line).unwrap()["neighbor"].clone();
        complete.lines().map(read).collect()
    }

    /// Whether ExaBGP has said that the session is established.
    fn is_up(&self) -> bool {
        self.received().iter().any(|report| report["state"] == "up")
    }

    /// The marks of a refresh that ExaBGP received: `begin` and `end`.
    fn marks(&self) -> Vec<String> {
        let mark = |report: &Value| Some(report["route-refresh"]["subtype"].as_str()?.to_owned());
        self.received().iter().filter_map(mark).collect()
    }

    /// The updates that announce a prefix: attributes and next hop.
    fn announcements(&self, family: &str, prefix: &str) -> Vec<(Value, String)> {
        self.received()
            .iter()
            .filter_map(|report| {
                let update = &report["message"]["update"];
                let next_hops = update["announce"][family].as_object()?;
                let next_hop = next_hops.iter().find(|(_, routes)| has(routes, prefix))?.0.clone();
                Some((update["attribute"].clone(), next_hop))
            })
            .collect()
    }

    /// Whether an update withdrew a prefix.
    fn lost(&self, family: &str, prefix: &str) -> bool {
        let withdraws = |report: &Value| has(&report["message"]["update"]["withdraw"][family], prefix);
        self.received().iter().any(withdraws)
    }
}

/// Whether a list of routes has the prefix.
fn has(routes: &Value, prefix: &str) -> bool {
    routes.as_array().is_some_and(|routes| routes.iter().any(|route| route["nlri"] == prefix))
}

const V4: &str = "ipv4 unicast";
const V6: &str = "ipv6 unicast";

/// The problems that Tortie had with a session.
fn last_error(tortie: &Tortie) -> String {
    tortie.status().peers[0].last_error.clone().unwrap_or_default()
}

fn has_route(tortie: &Tortie, prefix: &str) -> bool {
    tortie.route(prefix).is_some()
}

#[test]
fn routes_of_both_families_go_both_ways_with_their_attributes() {
    if !can_run(&[Program::Exabgp]) {
        return;
    }
    let lab = Lab::new(2);
    let options = "md5-password secret; capability { route-refresh enable; }";
    let mut exabgp = ExaBgp::start(&lab, AS, options);
    let mut peer = peer(1, 2, AS);
    peer.transport.password = Some(Password("secret".to_owned()));
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer)]), false);
    let attributes = Attributes {
        communities: vec![Community(64512 << 16 | 99)],
        large_communities: vec![LargeCommunity(4_200_000_000, 5, 6)],
        med: Some(17),
        ..here()
    };
    tortie.advertise(&[("10.1.0.0/16", attributes), ("fd01::/32", here())]);
    let count = |family, prefix| exabgp.announcements(family, prefix).len();
    until("ExaBGP has the routes", || count(V4, "10.1.0.0/16") == 1 && count(V6, "fd01::/32") == 1);
    let (told, next_hop) = exabgp.announcements(V4, "10.1.0.0/16").remove(0);
    let expected = json!({
        "origin": "igp", "med": 17, "local-preference": 100, "community": [[64512, 99]],
        "large-community": [[4_200_000_000_u32, 5, 6]],
    });
    assert_eq!((told, next_hop.as_str()), (expected, "10.9.0.1"));
    assert_eq!(exabgp.announcements(V6, "fd01::/32")[0].1, "fd09::1");

    exabgp.command(
        "announce route 10.20.0.0/16 next-hop 10.9.0.2 med 5 local-preference 250 community [ 64512:7 no-export ] \
         large-community [ 64512:1:2 ] extended-community [ target:64512:3 ]",
    );
    exabgp.command("announce route fd20::/32 next-hop fd09::2");
    exabgp.command("announce attributes next-hop 10.9.0.2 med 6 nlri 0.0.0.0/0 10.21.0.7/32 10.22.128.0/17");
    until("Tortie has the routes", || {
        ["10.20.0.0/16", "fd20::/32", "0.0.0.0/0", "10.21.0.7/32", "10.22.128.0/17"]
            .iter()
            .all(|prefix| has_route(&tortie, prefix))
    });
    let expected = Attributes {
        med: Some(5),
        local_pref: Some(250),
        communities: vec![Community(64512 << 16 | 7), Community(0xffff_ff01)],
        large_communities: vec![LargeCommunity(64512, 1, 2)],
        extended_communities: vec![[0, 2, 0xfc, 0, 0, 0, 0, 3]],
        ..Attributes::new(ipv4(2))
    };
    assert_eq!(tortie.route("10.20.0.0/16").unwrap().attributes, expected.into());
    assert_eq!(tortie.route("fd20::/32").unwrap().attributes.next_hop, ipv6(2).into());

    // RFC 2918 and RFC 7313: what was told is told again, between two marks.
    assert!(exabgp.marks().is_empty());
    exabgp.command("announce route-refresh ipv4 unicast");
    until("the refresh ends", || exabgp.marks() == ["begin", "end"]);
    let count = |family, prefix| exabgp.announcements(family, prefix).len();
    assert_eq!((count(V4, "10.1.0.0/16"), count(V6, "fd01::/32")), (2, 1));

    for prefix in ["10.20.0.0/16 next-hop 10.9.0.2", "fd20::/32 next-hop fd09::2"] {
        exabgp.command(&format!("withdraw route {prefix}"));
    }
    until("Tortie loses the routes", || {
        !has_route(&tortie, "10.20.0.0/16") && !has_route(&tortie, "fd20::/32")
    });
    assert!(has_route(&tortie, "10.21.0.7/32"));
    assert!(!exabgp.lost(V4, "10.1.0.0/16") && !exabgp.lost(V6, "fd01::/32"));
    ["10.1.0.0/16", "fd01::/32"].iter().for_each(|prefix| tortie.withdraw(prefix));
    until("ExaBGP loses the routes", || exabgp.lost(V4, "10.1.0.0/16") && exabgp.lost(V6, "fd01::/32"));
    assert_eq!((tortie.status().peers[0].established, last_error(&tortie)), (1, String::new()));
}

/// What becomes of a route with a strange attribute.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Outcome {
    /// It counts as withdrawn (RFC 7606).
    Withdrawn,
    /// It is there, without the attribute.
    Dropped,
    /// It is there, with an attribute that Tortie passes on.
    Unknown(u8, &'static [u8]),
}

/// The attribute as ExaBGP writes it (type, flags and value), and what becomes of the route.
const STRANGE: [(&str, &str, Outcome); 15] = {
    use Outcome::{Dropped, Unknown, Withdrawn};
    [
        ("ORIGIN of an unknown value", "0x01 0x40 0x09", Withdrawn),
        ("ORIGIN of no byte", "0x01 0x40 0x", Withdrawn),
        ("ORIGIN with the flags of an optional attribute", "0x01 0xc0 0x00", Withdrawn),
        ("AS_PATH with an empty segment", "0x02 0x40 0x0200", Withdrawn),
        ("LOCAL_PREF of three bytes", "0x05 0x40 0x000064", Withdrawn),
        ("ATOMIC_AGGREGATE with a byte", "0x06 0x40 0x01", Dropped),
        ("AGGREGATOR of six bytes", "0x07 0xc0 0xfc000a090002", Dropped),
        ("COMMUNITIES of no byte", "0x08 0xc0 0x", Withdrawn),
        ("COMMUNITIES of six bytes", "0x08 0xc0 0xfc0000070000", Withdrawn),
        ("CLUSTER_LIST of five bytes", "0x0a 0x80 0x0a09000200", Withdrawn),
        ("EXTENDED COMMUNITIES of nine bytes", "0x10 0xc0 0x000000000000000000", Withdrawn),
        ("LARGE_COMMUNITY of 13 bytes", "0x20 0xc0 0x00000000000000000000000000", Withdrawn),
        ("an unknown optional transitive attribute", "0x63 0xc0 0x0102", Unknown(0x63, &[1, 2])),
        ("the same, with a length of two bytes", "0x63 0xd0 0x0102", Unknown(0x63, &[1, 2])),
        ("an unknown optional attribute", "0x63 0x80 0x0102", Dropped),
    ]
};

#[test]
fn strange_attributes_cost_their_routes_and_not_the_session() {
    if !can_run(&[Program::Exabgp]) {
        return;
    }
    let lab = Lab::new(2);
    let mut exabgp = ExaBgp::start(&lab, AS, "");
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    until("the session is established", || tortie.is_established());
    // Each attribute on a route of each family. The metric tells the second announcement from the first.
    let routes = |number: usize| {
        [(format!("10.{number}.0.0/16"), "10.9.0.2"), (format!("fd20:{number}::/32"), "fd09::2")]
    };
    for (prefix, next_hop) in (0..STRANGE.len()).flat_map(routes) {
        exabgp.command(&format!("announce route {prefix} next-hop {next_hop} med 1"));
    }
    let all = 2 * STRANGE.len() as u32;
    until("Tortie has the routes", || tortie.status().peers[0].received == all);
    for (number, (_, attribute, _)) in STRANGE.iter().enumerate() {
        for (prefix, next_hop) in routes(number) {
            exabgp.command(&format!(
                "announce route {prefix} next-hop {next_hop} med 2 attribute [ {attribute} ]"
            ));
        }
    }
    for (number, (name, _, outcome)) in STRANGE.iter().enumerate() {
        for (prefix, next_hop) in routes(number) {
            let mut expected = Attributes {
                med: Some(2),
                local_pref: Some(100),
                ..Attributes::new(next_hop.parse::<std::net::IpAddr>().unwrap())
            };
            if let Outcome::Unknown(kind, value) = *outcome {
                expected.unknown = vec![UnknownAttribute { kind, value: value.to_vec() }];
            }
            let expected = (*outcome != Outcome::Withdrawn).then_some(expected);
            until(&format!("{name} on {prefix}: {expected:?}"), || {
                tortie.route(&prefix).map(|route| (*route.attributes).clone()) == expected
            });
        }
    }
    assert_eq!((tortie.status().peers[0].established, last_error(&tortie)), (1, String::new()));
}

/// An end by ExaBGP's operator, and one by Tortie, because it cannot tell which routes a message has. Both ends know the reason.
#[test]
fn each_end_learns_why_the_other_ends_the_session() {
    if !can_run(&[Program::Exabgp]) {
        return;
    }
    let lab = Lab::new(2);
    let mut exabgp = ExaBgp::start(&lab, AS, "");
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    // ExaBGP forgets a command to end a session that it does not take for established yet.
    until("both ends have the session", || tortie.is_established() && exabgp.is_up());
    exabgp.command("neighbor 10.9.0.1 teardown 3");
    until("Tortie knows the reason", || last_error(&tortie) == "received: peer deconfigured (6/3)");
    until("the session is back", || tortie.is_established());
    // An MP_REACH_NLRI of three bytes.
    exabgp.command("announce route 10.20.0.0/16 next-hop 10.9.0.2 attribute [ 0x0e 0x80 0x000201 ]");
    until("Tortie ends the session", || last_error(&tortie).contains("(3/9)"));
    assert!(last_error(&tortie).starts_with("sent: "), "{}", last_error(&tortie));
    let reason = |report: &Value| report["reason"].as_str().unwrap_or_default().contains("(3,9)");
    until("ExaBGP knows the reason", || exabgp.received().iter().any(reason));
    assert!(!has_route(&tortie, "10.20.0.0/16"));
}

/// A session between autonomous systems with a peer that knows numbers of two bytes (RFC 6793), and offers what Tortie does
/// not know.
#[test]
fn a_peer_of_another_system_that_knows_two_bytes_gets_and_gives_long_numbers() {
    if !can_run(&[Program::Exabgp]) {
        return;
    }
    let lab = Lab::new(2);
    let options = "capability { asn4 disable; add-path send/receive; operational enable; }";
    let mut exabgp = ExaBgp::start(&lab, 65010, options);
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, 65010))]), false);
    let far = Attributes { as_path: AsPath::sequence([4_200_000_001, 65020]), ..here() };
    tortie.advertise(&[("10.1.0.0/16", far), ("fd01::/32", here())]);
    until("ExaBGP has the routes", || {
        !exabgp.announcements(V4, "10.1.0.0/16").is_empty()
            && !exabgp.announcements(V6, "fd01::/32").is_empty()
    });
    let (told, _) = exabgp.announcements(V4, "10.1.0.0/16").remove(0);
    assert_eq!(told["as-path"], json!([64512, 4_200_000_001_u32, 65020]), "{told}");
    exabgp.command("announce route 10.20.0.0/16 next-hop 10.9.0.2 as-path [ 65010 4200000002 65030 ]");
    // One that has passed Tortie's system.
    exabgp.command(&format!("announce route 10.21.0.0/16 next-hop 10.9.0.2 as-path [ 65010 {AS} ]"));
    exabgp.command("announce route fd20::/32 next-hop fd09::2 as-path [ 65010 ]");
    until("Tortie has the routes", || has_route(&tortie, "10.20.0.0/16") && has_route(&tortie, "fd20::/32"));
    let route = tortie.route("10.20.0.0/16").unwrap();
    assert_eq!(route.attributes.as_path, AsPath::sequence([65010, 4_200_000_002, 65030]));
    until("Tortie has received all", || tortie.status().peers[0].received == 3);
    assert!(!has_route(&tortie, "10.21.0.0/16"), "a route that has passed the own system");
    assert_eq!((tortie.status().peers[0].established, last_error(&tortie)), (1, String::new()));
}

/// Graceful restart: the routes of a killed ExaBGP stay until it is back without them.
#[test]
fn the_routes_of_a_killed_peer_stay_until_it_is_back() {
    if !can_run(&[Program::Exabgp]) {
        return;
    }
    let lab = Lab::new(2);
    let mut exabgp = ExaBgp::start(&lab, AS, "capability { graceful-restart 60; }");
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer(1, 2, AS))]), false);
    until("the session is established", || tortie.is_established());
    exabgp.command("announce route 10.20.0.0/16 next-hop 10.9.0.2");
    until("Tortie has the route", || has_route(&tortie, "10.20.0.0/16"));
    exabgp.kill();
    until("Tortie notices", || !tortie.is_established());
    assert_eq!(tortie.status().peers[0].stale.iter().count(), 2);
    assert!(has_route(&tortie, "10.20.0.0/16"));
    // It has forgotten what it was told to announce.
    let _back = ExaBgp::restart(&lab);
    until("Tortie drops what is not told again", || !has_route(&tortie, "10.20.0.0/16"));
    until("nothing is stale", || tortie.status().peers[0].stale.is_empty());
    assert!(tortie.is_established());
}

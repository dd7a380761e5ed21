//! Graceful restart, of Tortie and of the peer.

use std::time::{Duration, Instant};

use tortie_bgp::speaker::{Config, RouteEvent};
use tortie_servers::programs::{Program, can_run};

use crate::interop::bird::{Bird, ROUTES, session};
use crate::interop::lab::{AS, Lab, Tortie, config, here, ipv4, peer, until};

fn tortie() -> Config {
    config(1, [(2, peer(1, 2, AS))])
}

/// Checks for some time that something stays.
fn stays(what: &str, time: Duration, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        assert!(holds(), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether routes to the prefix went away at some time.
fn was_lost(events: &[RouteEvent], prefix: &str) -> bool {
    events.iter().any(|event| match event {
        RouteEvent::Changed(changes) => {
            changes.iter().any(|change| change.prefix.to_string() == prefix && change.routes.is_empty())
        }
        RouteEvent::Complete | RouteEvent::UnknownNextHops(_) => false,
    })
}

#[test]
fn a_peer_keeps_the_routes_of_a_killed_speaker_until_it_is_back() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let bird = Bird::start(&lab, 2, &format!("{ROUTES}{}", session(2, 1, AS, AS, "graceful restart on;")));
    let first = Tortie::start(&lab, 1, tortie(), false);
    first.advertise(&[("10.1.0.0/16", here()), ("10.2.0.0/16", here()), ("fd01::/32", here())]);
    let has = |prefix: &str| bird.route(prefix).is_some();
    let kept = || has("10.1.0.0/16") && has("fd01::/32");
    until("BIRD has the routes", || kept() && has("10.2.0.0/16"));
    drop(first);
    until("BIRD notices", || !bird.ask("show protocols n1").contains("Established"));
    stays("BIRD keeps the routes while Tortie is away", Duration::from_secs(1), kept);

    // It comes back without one of the routes. Nothing is told to the kernel before BIRD's routes are complete.
    let mut second = Tortie::start(&lab, 1, tortie(), true);
    second.advertise(&[("10.1.0.0/16", here()), ("fd01::/32", here())]);
    until("BIRD drops what is not told again", || {
        assert!(kept(), "BIRD keeps the routes while Tortie comes back");
        !has("10.2.0.0/16")
    });
    let mut events = Vec::new();
    until("the first routes are complete", || {
        events.extend(second.events());
        events.last() == Some(&RouteEvent::Complete)
    });
    let RouteEvent::Changed(changes) = &events[0] else { panic!("{events:?}") };
    assert!(changes.iter().any(|change| change.prefix.to_string() == "10.20.0.0/16"), "{changes:?}");
    stays("BIRD keeps the routes", Duration::from_secs(1), kept);
}

/// The control of the test above: without graceful restart, the routes go at once.
#[test]
fn without_graceful_restart_a_peer_drops_the_routes_of_a_killed_speaker() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let bird = Bird::start(&lab, 2, &session(2, 1, AS, AS, "graceful restart on;"));
    let mut peer = peer(1, 2, AS);
    peer.session.restart_time = None;
    let tortie = Tortie::start(&lab, 1, config(1, [(2, peer)]), false);
    tortie.advertise(&[("10.1.0.0/16", here())]);
    until("BIRD has the route", || bird.route("10.1.0.0/16").is_some());
    drop(tortie);
    until("BIRD drops the route", || bird.route("10.1.0.0/16").is_none());
}

#[test]
fn the_routes_of_a_killed_peer_stay_until_it_is_back() {
    if !can_run(&[Program::Bird, Program::Birdc]) {
        return;
    }
    let lab = Lab::new(2);
    let protocol = session(2, 1, AS, AS, "graceful restart on;");
    let mut bird = Bird::start(&lab, 2, &format!("{ROUTES}{protocol}"));
    let mut tortie = Tortie::start(&lab, 1, tortie(), false);
    let has = |tortie: &Tortie, prefix: &str| tortie.route(prefix).is_some();
    until("Tortie has the routes", || has(&tortie, "10.20.0.0/16") && has(&tortie, "fd20::/32"));
    tortie.events();
    bird.kill();
    until("Tortie notices", || !tortie.is_established());
    assert_eq!(tortie.status().peers[0].stale.iter().count(), 2);
    stays("Tortie keeps the routes", Duration::from_secs(1), || has(&tortie, "10.20.0.0/16"));

    // It comes back without the IPv6 route.
    let less = ROUTES.lines().filter(|line| !line.contains("s6")).collect::<Vec<_>>().join("\n");
    bird.write(2, &format!("{less}\n{protocol}"));
    bird.run(&lab, 2, &["-R"]);
    until("Tortie drops what is not told again", || !has(&tortie, "fd20::/32"));
    until("nothing is stale", || tortie.status().peers[0].stale.is_empty());
    assert!(tortie.is_established());
    let events = tortie.events();
    assert!(!was_lost(&events, "10.20.0.0/16"), "{events:?}");
    assert!(was_lost(&events, "fd20::/32"), "{events:?}");
    assert_eq!(tortie.route("10.20.0.0/16").unwrap().attributes.next_hop.address, ipv4(2));

    // One that does not come back is given up after its restart time.
    bird.write(
        2,
        &format!("{ROUTES}{}", session(2, 1, AS, AS, "graceful restart on; graceful restart time 2;")),
    );
    bird.ask("configure");
    until("the new session is complete", || has(&tortie, "fd20::/32") && tortie.is_established());
    bird.kill();
    until("Tortie drops the routes", || !has(&tortie, "10.20.0.0/16") && !has(&tortie, "fd20::/32"));
}

//! What a speaker that has restarted tells its peers while it waits for their routes.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use tortie_bgp::codec::{self, Attributes, Capability, Family, GracefulRestart, Open};
use tortie_bgp::fsm::{ConnectionId, SessionSettings, State, Time};
use tortie_bgp::rib::{OwnRoute, PeerId, PeerRules};
use tortie_bgp::router::Router;

const WAIT: Duration = Duration::from_secs(120);
const NOW: Time = Duration::from_secs(10);

fn add(router: &mut Router, number: u8) -> PeerId {
    let id = PeerId(number.into());
    let settings = SessionSettings::new(64512, Ipv4Addr::new(5, 5, 5, 5), 64512);
    let rules = PeerRules::new(IpAddr::from([10, 0, 0, number]), 64512, 64512);
    router.set_peer(NOW, id, settings, rules);
    id
}

/// The peer connects, with or without graceful restart.
fn establish(router: &mut Router, id: PeerId, graceful: bool) {
    let connection = ConnectionId(id.0.into());
    router.accepted(NOW, id, connection, IpAddr::from([10, 0, 0, 99]));
    let mut capabilities: Vec<Capability> = Family::ALL.into_iter().map(Capability::family).collect();
    let families = vec![(1, 1, true), (2, 1, true)];
    let restart = GracefulRestart { restarted: false, notification: false, restart_time: 60, families };
    capabilities.extend(graceful.then_some(Capability::GracefulRestart(restart)));
    let open = Open::new(64512, 90, Ipv4Addr::from(id.0), capabilities);
    for message in [codec::encode_open(&open), codec::encode_keepalive()] {
        router.received(NOW, id, connection, Ok(&message));
    }
    assert_eq!(router.session(id).map(tortie_bgp::fsm::Session::state), Some(State::Established));
}

/// A peer that keeps no routes from before the restart has none until it is told some.
#[test]
fn only_peers_that_keep_the_routes_from_before_wait() {
    let mut router = Router::new(Ipv4Addr::new(5, 5, 5, 5), 7, NOW, Some(WAIT));
    let prefix = "10.65.0.0/26".parse().unwrap();
    router.set_own(prefix, Some(OwnRoute::here()));
    let [graceful, plain, dead] = [1, 2, 3].map(|number| add(&mut router, number));
    establish(&mut router, graceful, true);
    establish(&mut router, plain, false);
    assert!(router.is_deferring());
    assert_eq!(router.take_changes(), [], "the kernel waits");
    assert!(router.messages(graceful).is_none());
    let (_, told) = router.messages(plain).unwrap();
    assert!(told.concat().windows(4).any(|bytes| bytes == [26, 10, 65, 0]), "{told:?}");
    // The peer that is down ends the wait only when it is removed, or when time is over.
    for (gone, ends_at) in [(true, NOW), (false, NOW + WAIT)] {
        let mut router = Router::new(Ipv4Addr::new(5, 5, 5, 5), 7, NOW, Some(WAIT));
        router.set_own(prefix, Some(OwnRoute::here()));
        let [_, plain] = [dead, plain].map(|id| add(&mut router, id.0 as u8));
        establish(&mut router, plain, false);
        router.take_changes();
        match gone {
            true => drop(router.remove_peer(NOW, dead)),
            false => drop(router.tick(ends_at)),
        }
        assert!(!router.is_deferring(), "{gone}");
        let changes = router.take_changes();
        assert_eq!(changes.iter().map(|change| change.prefix).collect::<Vec<_>>(), [prefix]);
        assert_eq!(router.take_changes(), []);
    }
}

/// The routes that replace those from before the restart must not lack those whose next hops nobody has looked at yet.
#[test]
fn the_wait_lasts_until_all_next_hops_are_known() {
    let mut router = Router::new(Ipv4Addr::new(5, 5, 5, 5), 7, NOW, Some(WAIT));
    router.require_known_next_hops();
    let id = add(&mut router, 1);
    establish(&mut router, id, true);
    let connection = ConnectionId(id.0.into());
    let context =
        *router.session(id).and_then(|session| session.negotiated()).map(|(n, _)| &n.context).unwrap();
    let next_hop = IpAddr::from([10, 0, 0, 1]);
    let prefix = "10.65.0.0/26".parse().unwrap();
    let route = codec::encode_announcement(&Attributes::new(next_hop), Family::Ipv4, &[prefix], &context);
    let ends = Family::ALL.map(codec::encode_end_of_rib);
    for message in route.unwrap().iter().chain(&ends) {
        router.received(NOW, id, connection, Ok(message));
    }
    assert_eq!((router.is_deferring(), router.take_changes()), (true, vec![]));
    assert_eq!(router.take_unknown_next_hops(), [next_hop]);
    router.set_costs(NOW, [(next_hop, Some(0))]);
    assert!(!router.is_deferring());
    assert_eq!(router.take_changes()[0].prefix, prefix);
}

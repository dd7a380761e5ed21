//! The runner with routes in memory.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;
use std::path::Path;

use serde_json::{Value, json};
use tortie_api::report::ObjectRef;
use tortie_api::{Key, Kind, Position};
use tortie_bgp::codec::Families;
use tortie_bgp::fsm::SessionSettings;
use tortie_bgp::rib::PeerRules;
use tortie_bgp::speaker::{PeerConfig, Transport};
use tortie_dataplane::{AppliedRoutes, RouteTableError, SystemRoutes};
use tortie_store::{Stored, Version};

use super::*;

/// What is received is processed: a report that is lost leaves a route out of the kernel, or in it.
#[test]
fn no_report_of_many_is_lost() {
    let (sender, mut events) = mpsc::unbounded_channel();
    let total = 2 * BATCH + 3;
    for _ in 0..total {
        assert!(sender.send(RouteEvent::Complete).is_ok());
    }
    let mut taken = 0;
    while let Ok(event) = events.try_recv() {
        taken += with_ready(event, &mut events).len();
    }
    assert_eq!(taken, total);
}

/// The routes of a node that has no routes to some next hops.
#[derive(Default)]
struct Routes {
    unreachable: BTreeSet<IpAddr>,
    /// The destinations to which routes of others lead.
    led: BTreeSet<IpNet>,
    default_router: Option<IpAddr>,
}

impl LearnedRouteTable for Routes {
    fn exist(&mut self) -> Result<bool, RouteTableError> {
        Ok(false)
    }

    fn set(&mut self, _: IpNet, _: BTreeSet<IpAddr>) {}

    fn complete(&mut self) {}

    fn restart(&mut self) {}

    fn apply(&mut self, watched: &BTreeSet<IpAddr>) -> Result<AppliedRoutes, RouteTableError> {
        Ok(AppliedRoutes { unreachable: &self.unreachable & watched, problems: Vec::new() })
    }

    fn routes_to(&mut self, _: &IpNet) -> Result<SystemRoutes, RouteTableError> {
        Ok(SystemRoutes::default())
    }

    fn led_by_others(
        &mut self,
        destinations: &[IpNet],
        peers: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpNet>, RouteTableError> {
        let by_default = self.default_router.is_some_and(|router| peers.contains(&router));
        let is_led = |net: &&IpNet| by_default || self.led.contains(*net);
        Ok(destinations.iter().filter(is_led).copied().collect())
    }
}

fn runner(marker: Option<&Path>) -> Runner {
    let system = System {
        learned: Box::new(Routes::default()),
        firewall: None,
        changed: Arc::new(Notify::new()),
        marker: marker.map(Path::to_owned),
    };
    Runner::new("n", system, Passwords::new(None))
}

/// The configuration of a node with a peer that is away, so that a speaker waits if it counts as restarted.
fn config(identifier: Ipv4Addr, listen: Vec<SocketAddr>) -> Config {
    let peer = IpAddr::from([192, 0, 2, 2]);
    let mut session = SessionSettings::new(64512, identifier, 64512);
    session.passive = true;
    let rules = PeerRules::new(peer, 64512, 64512);
    let peer = (SocketAddr::new(peer, 179), PeerConfig { session, rules, transport: Transport::default() });
    Config { identifier, listen, peers: [peer].into() }
}

async fn waits(runner: &Runner) -> bool {
    runner.running.as_ref().unwrap().speaker.status().await.unwrap().deferring
}

/// Peers keep the routes of a node that restarts its agent, whether they have told it some or not. A node that has just started
/// forwards nothing.
#[tokio::test]
async fn a_speaker_counts_as_restarted_if_one_has_run_since_the_nodes_start() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("bgp-speaker");
    for (marker, expected) in [(Some(&*marker), false), (Some(&*marker), true), (None, false)] {
        let mut runner = runner(marker);
        let config = config(Ipv4Addr::new(192, 0, 2, 1), Vec::new());
        runner.start(config, BTreeMap::new()).await.unwrap();
        assert_eq!(waits(&runner).await, expected, "{marker:?}");
    }
}

/// Peers remove the routes of a speaker that tells them so. The next one must not wait for them, whenever it can start.
#[tokio::test]
async fn a_speaker_after_a_shutdown_does_not_wait_if_its_first_start_fails() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = runner(Some(&folder.path().join("bgp-speaker")));
    let [old, new] = [1, 9].map(|number| Ipv4Addr::new(192, 0, 2, number));
    let reserved = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let used = reserved.local_addr().unwrap();
    runner.apply(config(old, Vec::new()), BTreeMap::new()).await.unwrap();
    assert!(runner.apply(config(new, vec![used]), BTreeMap::new()).await.is_err());
    assert!(runner.running.is_none());
    drop(reserved);
    runner.apply(config(new, vec![used]), BTreeMap::new()).await.unwrap();
    assert!(!waits(&runner).await);
}

/// The speaker uses no route before it knows that there is a way to its next hop.
#[tokio::test]
async fn each_next_hop_of_the_speaker_is_answered_once_and_watched() {
    let [good, bad] = [7, 8].map(|number| IpAddr::from([192, 0, 2, number]));
    let mut runner = runner(None);
    runner.learned = Some(Box::new(Routes { unreachable: [bad].into(), ..Routes::default() }));
    runner.start(config(Ipv4Addr::new(192, 0, 2, 1), Vec::new()), BTreeMap::new()).await.unwrap();
    runner.take(Some(RouteEvent::UnknownNextHops(vec![good, bad])));
    runner.program().await;
    assert_eq!(runner.next_hops, [(good, Some(true)), (bad, Some(false))].into());
    let conditions = runner.conditions();
    assert!(conditions.len() == 1 && conditions[0].message.contains("192.0.2.8"), "{conditions:?}");
    // One that is lost later is noticed, also if no chosen route has it.
    runner.learned = Some(Box::new(Routes { unreachable: [good].into(), ..Routes::default() }));
    runner.is_due = true;
    runner.program().await;
    assert_eq!(runner.next_hops, [(good, Some(false)), (bad, Some(true))].into());
    // The speaker has costs of both, and no route with them: it forgets them.
    runner.look().await;
    assert_eq!(runner.next_hops, BTreeMap::new());
}

/// Two nodes, of which the other one has a block of a pool without encapsulation.
fn put_cluster(runner: &mut Runner, ready: &str) {
    let mut put = |kind, name: &str, value: Value| {
        let (key, version) = (Key::global(kind, name), Version::new("1"));
        runner.cluster.apply(Change::Put(Stored { key, value, version, position: Position::default() }));
    };
    for (name, number) in [("n", 1), ("two", 2)] {
        let address = json!({"projectcalico.org/IPv4Address": format!("192.0.2.{number}/24")});
        let status = json!({"conditions": [{"type": "Ready", "status": ready}]});
        put(Kind::Node, name, json!({"metadata": {"name": name, "annotations": address}, "status": status}));
    }
    put(Kind::IpPool, "p", json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.1.0.0/16"}}));
    let block = json!({"cidr": "10.1.0.0/30", "affinity": "host:two", "allocations": [null, null, null, null],
        "unallocated": [0, 1, 2, 3], "attributes": []});
    put(Kind::IpamBlock, "10.1.0.0/30", block);
    for kind in cluster::KINDS {
        runner.cluster.apply(Change::InSync(kind, Position::default()));
    }
}

/// A session in this state with a peer.
fn peer(last: u8, state: State) -> PeerStatus {
    PeerStatus {
        address: SocketAddr::new([192, 0, 2, last].into(), 179),
        id: tortie_bgp::rib::PeerId(u32::from(last)),
        state,
        since: None,
        negotiated: None,
        stale: Families::default(),
        received: 0,
        advertised: 0,
        established: 1,
        last_error: None,
    }
}

/// A block without a route is a condition that names node and cause, after a while, and if nobody else has a route to it.
#[tokio::test]
async fn a_block_of_another_node_without_a_route_is_reported() {
    let block: IpNet = "10.1.0.0/30".parse().unwrap();
    let led = || Routes { led: [block].into(), ..Routes::default() };
    let by_default =
        |last: u8| Routes { default_router: Some([192, 0, 2, last].into()), ..Routes::default() };
    for (case, routes, peers, expected) in [
        ("no route", Routes::default(), vec![], true),
        ("a route of somebody else", led(), vec![], false),
        ("a default router that is a peer", by_default(9), vec![peer(9, State::Established)], false),
        ("a default router without a session", by_default(9), vec![peer(9, State::Idle)], true),
        ("another node as the default router", by_default(2), vec![peer(2, State::Established)], true),
    ] {
        let mut runner = runner(None);
        runner.learned = Some(Box::new(routes));
        put_cluster(&mut runner, "True");
        runner.start(config(Ipv4Addr::new(192, 0, 2, 1), Vec::new()), BTreeMap::new()).await.unwrap();
        let start = Instant::now();
        for (seconds, is_complete, expected) in [
            (0, false, false),
            (90, false, false),
            (100, true, false),
            (129, true, false),
            (130, true, expected),
        ] {
            runner.is_complete = is_complete;
            runner.look_for_blocks(&peers, start + Duration::from_secs(seconds)).await;
            let conditions = runner.conditions();
            let found: Vec<_> =
                conditions.iter().filter(|it| it.reason == Reason::BlockUnreachable).collect();
            assert_eq!(found.len(), usize::from(expected), "{case}, {seconds}: {conditions:?}");
            for condition in found {
                let message = &condition.message;
                let expected = "node two (10.1.0.0/30): no peer has told the route";
                assert!(message.contains(expected), "{message}");
                assert_eq!(condition.about, [ObjectRef::from(&Key::global(Kind::Node, "two"))]);
            }
        }
    }
}

/// A new speaker has not asked its peers yet, so it does not know what they lack.
#[tokio::test]
async fn a_new_speaker_forgets_the_blocks_that_the_former_one_found_out_of_reach() {
    let mut runner = runner(None);
    put_cluster(&mut runner, "True");
    let start = Instant::now();
    for (last, is_named) in [(1, true), (9, false)] {
        runner.apply(config(Ipv4Addr::new(192, 0, 2, last), Vec::new()), BTreeMap::new()).await.unwrap();
        if is_named {
            runner.is_complete = true;
            for seconds in [0, 60] {
                runner.look_for_blocks(&[], start + Duration::from_secs(seconds)).await;
            }
        }
        let named = runner.conditions().iter().any(|it| it.reason == Reason::BlockUnreachable);
        assert_eq!(named, is_named, "{last}");
    }
}

/// A node that is not ready has a condition of its own, and others are as connected as before.
#[tokio::test]
async fn a_session_with_a_node_that_is_not_ready_is_no_fault_of_others() {
    let since = Instant::now().checked_sub(DOWN).unwrap();
    for (ready, address, expected) in [
        ("True", [192, 0, 2, 2], Reason::BgpSessionDown),
        ("Unknown", [192, 0, 2, 2], Reason::NetworkPartNotInForce),
        ("Unknown", [192, 0, 2, 99], Reason::BgpSessionDown),
    ] {
        let mut runner = runner(None);
        put_cluster(&mut runner, ready);
        runner.down.insert(SocketAddr::new(address.into(), 179), (since, None));
        let reasons: Vec<Reason> = runner.conditions().iter().map(|it| it.reason).collect();
        assert_eq!(reasons, [expected], "{ready} {address:?}");
        runner.is_complete = true;
        for seconds in [0, 60] {
            runner.look_for_blocks(&[], Instant::now() + Duration::from_secs(seconds)).await;
        }
        let is_named = runner.conditions().iter().any(|it| it.reason == Reason::BlockUnreachable);
        assert!(!is_named, "without a speaker, nothing is known");
    }
}

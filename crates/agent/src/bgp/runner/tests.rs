//! The runner with routes in memory.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;
use std::path::Path;

use tortie_bgp::fsm::SessionSettings;
use tortie_bgp::rib::PeerRules;
use tortie_bgp::speaker::{PeerConfig, Transport};
use tortie_dataplane::{AppliedRoutes, RouteTableError, SystemRoutes};

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
    runner.learned = Some(Box::new(Routes { unreachable: [bad].into() }));
    runner.start(config(Ipv4Addr::new(192, 0, 2, 1), Vec::new()), BTreeMap::new()).await.unwrap();
    runner.take(Some(RouteEvent::UnknownNextHops(vec![good, bad])));
    runner.program().await;
    assert_eq!(runner.next_hops, [(good, Some(true)), (bad, Some(false))].into());
    let conditions = runner.conditions();
    assert!(conditions.len() == 1 && conditions[0].message.contains("192.0.2.8"), "{conditions:?}");
    // One that is lost later is noticed, also if no chosen route has it.
    runner.learned = Some(Box::new(Routes { unreachable: [good].into() }));
    runner.is_due = true;
    runner.program().await;
    assert_eq!(runner.next_hops, [(good, Some(false)), (bad, Some(true))].into());
    // The speaker has costs of both, and no route with them: it forgets them.
    runner.look().await;
    assert_eq!(runner.next_hops, BTreeMap::new());
}

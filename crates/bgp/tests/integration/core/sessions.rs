//! The state machine of a session, by single inputs.

use std::net::Ipv4Addr;
use std::time::Duration;

use tortie_bgp::codec::notification::{cease, code};
use tortie_bgp::codec::{
    self, Capability, Context, Families, Family, GracefulRestart, Message, Notification, Open, RefreshKind,
};
use tortie_bgp::fsm::{ConnectionId, Input, Output, Session, SessionSettings, State, Time};

const OUT: ConnectionId = ConnectionId(1);
const IN: ConnectionId = ConnectionId(2);
const NEXT: ConnectionId = ConnectionId(3);
const BOTH: Families = Families::BOTH;

fn settings() -> SessionSettings {
    SessionSettings::new(64512, Ipv4Addr::new(5, 5, 5, 5), 64512)
}

fn seconds(seconds: u64) -> Time {
    Duration::from_secs(seconds)
}

/// The peer's OPEN; its identifier decides collisions.
fn open(identifier: u8, restart: Option<GracefulRestart>) -> Open {
    let mut capabilities: Vec<Capability> = Family::ALL.into_iter().map(Capability::family).collect();
    capabilities.push(Capability::EnhancedRouteRefresh);
    capabilities.extend(restart.map(Capability::GracefulRestart));
    Open::new(64512, 90, Ipv4Addr::new(identifier, 0, 0, 1), capabilities)
}

fn restart(notification: bool, restarted: bool, forwarding: bool) -> Option<GracefulRestart> {
    let families = vec![(1, 1, forwarding), (2, 1, forwarding)];
    Some(GracefulRestart { restarted, notification, restart_time: 60, families })
}

/// A short form of what a session wants.
fn names(outputs: &[Output]) -> Vec<String> {
    let context =
        Context { four_octet: true, internal: true, extended_next_hop: false, families: Families::BOTH };
    let name = |output: &Output| match output {
        Output::Connect => "connect".to_owned(),
        Output::Send(id, bytes) => match Message::decode(bytes, &context).unwrap() {
            Message::Open(_) => format!("open on {}", id.0),
            Message::Keepalive => format!("keepalive on {}", id.0),
            Message::Notification(n) => format!("{}/{} on {}", n.code, n.subcode, id.0),
            other => format!("{other:?} on {}", id.0),
        },
        Output::Probe(id) => format!("probe {}", id.0),
        Output::Close(id) => format!("close {}", id.0),
        Output::Up(id) => format!("up {}", id.0),
        Output::Down(families) => format!("down, keeps {}", families.iter().count()),
        Output::Forget(families) => format!("forget {}", families.iter().count()),
        Output::Update(update) => format!("update, end {:?}", update.end_of_rib),
        Output::Refresh(family, kind) => format!("refresh {family} {kind:?}"),
    };
    outputs.iter().map(name).collect()
}

struct Test(Session, Time);

impl Test {
    fn new(settings: SessionSettings) -> Self {
        let mut session = Session::new(settings, 7);
        assert_eq!(session.state(), State::Idle);
        assert!(session.handle(seconds(0), Input::Start).is_empty());
        Self(session, seconds(1))
    }

    fn input(&mut self, input: Input<'_>) -> Vec<String> {
        names(&self.0.handle(self.1, input))
    }

    fn message(&mut self, id: ConnectionId, bytes: &[u8]) -> Vec<String> {
        self.input(Input::Received(id, Ok(bytes)))
    }

    fn open(&mut self, id: ConnectionId, open: &Open) -> Vec<String> {
        self.message(id, &codec::encode_open(open))
    }

    fn keepalive(&mut self, id: ConnectionId) -> Vec<String> {
        self.message(id, &codec::encode_keepalive())
    }

    /// Lets time pass from timer to timer.
    fn wait(&mut self, time: Duration) -> Vec<String> {
        let end = self.1 + time;
        let mut all = Vec::new();
        while let Some(deadline) = self.0.deadline().filter(|deadline| *deadline <= end) {
            self.1 = self.1.max(deadline);
            all.extend(self.input(Input::Tick));
        }
        self.1 = end;
        all
    }

    /// Connects and establishes the session.
    fn establish(&mut self, open: &Open) {
        self.input(Input::Accepted(IN));
        self.open(IN, open);
        assert!(self.keepalive(IN).contains(&"up 2".to_owned()));
        assert_eq!(self.0.state(), State::Established);
    }
}

#[test]
fn a_session_comes_about_and_ends() {
    let mut test = Test::new(settings());
    assert_eq!(test.wait(seconds(1)), ["connect"]);
    assert_eq!(test.0.state(), State::Connect);
    assert_eq!(test.input(Input::Connected(OUT)), ["open on 1"]);
    assert_eq!(test.0.state(), State::OpenSent);
    assert_eq!(test.open(OUT, &open(1, None)), ["keepalive on 1"]);
    assert_eq!(test.0.state(), State::OpenConfirm);
    assert_eq!(test.keepalive(OUT), ["up 1"]);
    let (negotiated, _) = test.0.negotiated().unwrap();
    assert_eq!((negotiated.hold_time, negotiated.context.families), (90, BOTH));
    // A third of the hold time, less up to a quarter: at least three messages, at most four.
    let waited = test.wait(seconds(89));
    assert!(
        (2..=4).contains(&waited.len()) && waited.iter().all(|what| what == "keepalive on 1"),
        "{waited:?}"
    );
    test.keepalive(OUT);
    assert!(!test.wait(seconds(80)).contains(&"close 1".to_owned()));
    let end = test.wait(seconds(11));
    assert!(
        end.ends_with(&["4/0 on 1".to_owned(), "close 1".to_owned(), "down, keeps 0".to_owned()]),
        "{end:?}"
    );
    assert_eq!(test.0.last_error(), Some("sent: hold timer expired (4/0)"));
    assert_eq!(test.wait(seconds(20)), ["connect"]);
    let stop = Notification::shutdown(cease::ADMINISTRATIVE_SHUTDOWN, "");
    test.input(Input::Connected(NEXT));
    assert_eq!(test.input(Input::Stop(stop)), ["6/2 on 3", "close 3"]);
    assert_eq!((test.0.state(), test.0.deadline()), (State::Idle, None));
    assert_eq!(test.input(Input::Accepted(IN)), ["6/5 on 2", "close 2"]);
}

/// What the peer sent during a pause of this process has not been read yet when the timer expires.
#[test]
fn a_pause_of_this_end_does_not_count_as_silence_of_the_peer() {
    for is_heard in [true, false] {
        let mut test = Test::new(settings());
        test.establish(&open(1, None));
        test.1 += seconds(150);
        assert_eq!(test.input(Input::Tick), ["keepalive on 2"]);
        if is_heard {
            test.keepalive(IN);
        }
        let later = test.wait(seconds(11));
        assert_eq!(later.contains(&"4/0 on 2".to_owned()), !is_heard, "{later:?}");
    }
}

#[test]
fn attempts_become_rarer_after_errors() {
    let mut test = Test::new(settings());
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let begin = test.1;
        while test.wait(Duration::from_millis(100)).is_empty() {}
        pauses.push(test.1 - begin);
        test.input(Input::Connected(OUT));
        test.open(OUT, &Open { two_octet_as: 1, capabilities: vec![], ..open(1, None) });
    }
    assert!(pauses[1] < seconds(11) && pauses[7] > seconds(80) && pauses[7] <= seconds(121), "{pauses:?}");
    // A peer that only does not answer is soon tried again, and then at the usual times.
    let mut test = Test::new(settings());
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let begin = test.1;
        while test.wait(Duration::from_millis(10)).is_empty() {}
        pauses.push(test.1 - begin);
        test.input(Input::ConnectFailed);
    }
    assert!(
        pauses[1] < Duration::from_millis(300) && pauses[8] > seconds(3) && pauses[8] < seconds(6),
        "{pauses:?}"
    );
}

/// The time until the session wants to connect again.
fn pause(test: &mut Test) -> Duration {
    let begin = test.1;
    while !test.wait(Duration::from_millis(10)).contains(&"connect".to_owned()) {
        assert!(test.1 - begin < seconds(200), "it never connects");
    }
    test.1 - begin
}

/// A daemon that is not ready accepts connections and closes them without a word.
#[test]
fn a_peer_that_closes_connections_is_tried_at_the_usual_times() {
    let mut test = Test::new(settings());
    pause(&mut test);
    test.input(Input::ConnectFailed);
    let mut pauses = Vec::new();
    for number in 10..19 {
        pauses.push(pause(&mut test));
        test.input(Input::Connected(ConnectionId(number)));
        test.input(Input::Closed(ConnectionId(number)));
    }
    assert!(pauses[0] < seconds(1) && pauses[8] > seconds(3) && pauses[8] < seconds(6), "{pauses:?}");
}

/// An error that comes back with each session must not make routes come and go all the time.
#[test]
fn sessions_that_an_error_ends_soon_become_rarer() {
    let error = codec::encode_notification(&Notification::new(code::UPDATE, 1));
    let cease = codec::encode_notification(&Notification::new(code::CEASE, cease::CONFIGURATION_CHANGE));
    for (name, end, age, is_rarer) in [
        ("an error", &error, 1, true),
        ("an error after some minutes", &error, 200, false),
        ("on purpose", &cease, 1, false),
    ] {
        let mut test = Test::new(settings());
        let mut pauses = Vec::new();
        for _ in 0..6 {
            test.establish(&open(1, None));
            for _ in 0..age {
                test.wait(seconds(1));
                test.keepalive(IN);
            }
            test.message(IN, end);
            pauses.push(pause(&mut test));
            test.input(Input::ConnectFailed);
        }
        assert!(pauses[0] < seconds(11), "{name}: {pauses:?}");
        assert_eq!(pauses[5] > seconds(80), is_rarer, "{name}: {pauses:?}");
    }
}

/// RFC 4271 6.8: of two connections, the one stays that the end with the higher identifier opened.
#[test]
fn the_higher_identifier_keeps_its_connection() {
    for (peer, first, stays) in [(1, OUT, OUT), (1, IN, OUT), (9, OUT, IN), (9, IN, IN)] {
        let mut test = Test::new(settings());
        test.wait(seconds(1));
        test.input(Input::Connected(OUT));
        test.input(Input::Accepted(IN));
        let second = if first == OUT { IN } else { OUT };
        let loser = if stays == OUT { IN } else { OUT };
        assert_eq!(test.open(first, &open(peer, None)), [format!("keepalive on {}", first.0)]);
        let mut expected = vec![format!("6/7 on {}", loser.0), format!("close {}", loser.0)];
        expected.extend((stays == second).then(|| format!("keepalive on {}", second.0)));
        assert_eq!(test.open(second, &open(peer, None)), expected, "{peer} {first:?}");
        assert_eq!(test.keepalive(stays), [format!("up {}", stays.0)]);
    }
}

/// Only a peer that can restart connects again, and it has to show that it has: whoever has its address could connect, too.
#[test]
fn a_second_connection_of_a_peer_that_cannot_have_restarted_is_rejected() {
    for (restarts, age) in [(None, 60), (restart(false, false, true), 1)] {
        let mut test = Test::new(settings());
        test.establish(&open(1, restarts.clone()));
        test.wait(seconds(age));
        test.keepalive(IN);
        assert_eq!(test.input(Input::Accepted(NEXT)), ["open on 3"]);
        assert_eq!(test.open(NEXT, &open(1, restarts)), ["6/7 on 3", "close 3"]);
        assert_eq!(test.0.connection(), Some(IN));
    }
}

/// An established session, and a second connection of a peer that may have restarted.
fn second_connection() -> Test {
    let mut test = Test::new(settings());
    test.establish(&open(1, restart(false, false, true)));
    test.wait(seconds(60));
    test.keepalive(IN);
    assert_eq!(test.input(Input::Accepted(NEXT)), ["open on 3"]);
    let seen = test.open(NEXT, &open(1, restart(false, true, true)));
    assert_eq!(seen, ["probe 2", "keepalive on 2"]);
    assert_eq!((test.0.state(), test.0.connection()), (State::Established, Some(IN)));
    test
}

#[test]
fn a_second_connection_replaces_one_that_the_peer_has_lost() {
    // The peer has confirmed the OPEN before the old connection ends, or afterwards. It is reset, or leaves the probe unacknowledged.
    for (is_confirmed, after) in [(false, 0), (true, 0), (false, 3), (true, 3)] {
        let mut test = second_connection();
        if is_confirmed {
            assert_eq!(test.keepalive(NEXT), [""; 0]);
        }
        assert_eq!(test.wait(seconds(after)), [""; 0]);
        let mut seen = test.input(Input::Closed(IN));
        if !is_confirmed {
            seen.extend(test.keepalive(NEXT));
        }
        assert_eq!(seen, ["close 2", "down, keeps 2", "keepalive on 3", "up 3"], "{is_confirmed} {after}");
        assert!(!test.wait(seconds(10)).contains(&"close 3".to_owned()));
    }
}

#[test]
fn a_second_connection_does_not_replace_one_that_the_peer_still_has() {
    // The peer's system acknowledges the probe: nothing happens on the old connection.
    let mut test = second_connection();
    assert_eq!(test.wait(seconds(5)), ["6/7 on 3", "close 3"]);
    assert_eq!(test.0.connection(), Some(IN));
    // The peer says something.
    let mut test = second_connection();
    test.keepalive(NEXT);
    assert_eq!(test.keepalive(IN), ["6/7 on 3", "close 3"]);
    assert_eq!(test.0.connection(), Some(IN));
    // A third one takes the place of the second, and waits in its turn.
    let mut test = second_connection();
    let third = ConnectionId(9);
    assert_eq!(test.input(Input::Accepted(third)), ["6/7 on 3", "close 3", "open on 9"]);
    assert_eq!(test.open(third, &open(1, restart(false, true, true))), ["probe 2", "keepalive on 2"]);
    assert_eq!(test.wait(seconds(5)), ["6/7 on 9", "close 9"]);
    // The operator's end is that of both.
    let mut test = second_connection();
    let stop = Notification::shutdown(cease::ADMINISTRATIVE_SHUTDOWN, "x");
    assert_eq!(
        test.input(Input::Stop(stop)),
        ["6/2 on 2", "close 2", "down, keeps 0", "6/2 on 3", "close 3"]
    );
}

/// A peer that has crashed answers on the old connection that it does not know it.
#[test]
fn a_second_connection_is_a_reason_to_look_at_an_old_one_without_a_hold_time() {
    let mut test = Test::new(settings());
    test.establish(&Open { hold_time: 0, ..open(1, None) });
    assert_eq!(test.wait(seconds(1000)), Vec::<String>::new());
    test.input(Input::Accepted(NEXT));
    let forever = Open { hold_time: 0, ..open(1, None) };
    assert_eq!(test.open(NEXT, &forever), ["keepalive on 2", "6/7 on 3", "close 3"]);
    assert_eq!(test.input(Input::Closed(IN)), ["close 2", "down, keeps 0"]);
}

/// RFC 4724 4.2 and RFC 8538: which ends of a session routes survive.
#[test]
fn routes_survive_as_the_standards_say() {
    let told = |notification: &Notification| codec::encode_notification(notification);
    let plain = Notification::new(code::CEASE, cease::ADMINISTRATIVE_RESET);
    let hard = plain.clone().hard();
    let none = Vec::new();
    // What the peer promises, how the session ends (nothing for a lost connection), and how many families survive.
    let cases = [
        ("lost, no promise", None, none.clone(), 0),
        ("lost", restart(false, false, true), none, 2),
        ("told", restart(false, false, true), told(&plain), 0),
        ("told, survives notifications", restart(true, false, true), told(&plain), 2),
        ("told firmly", restart(true, false, true), told(&hard), 0),
    ];
    for (name, promise, end, kept) in cases {
        let mut test = Test::new(settings());
        test.establish(&open(1, promise));
        let seen = if end.is_empty() { test.input(Input::Closed(IN)) } else { test.message(IN, &end) };
        assert_eq!(seen, ["close 2".to_owned(), format!("down, keeps {kept}")], "{name}");
        // Longer than the restart time.
        let later = test.wait(seconds(61));
        assert_eq!(later.contains(&"forget 2".to_owned()), kept > 0, "{name}: {later:?}");
    }
    // The own end by the operator is never survived, and the peer is told so.
    for (promise, sent) in
        [(restart(true, false, true), "6/9 on 2"), (restart(false, false, true), "6/2 on 2")]
    {
        let mut test = Test::new(settings());
        test.establish(&open(1, promise));
        let stop = Notification::shutdown(cease::ADMINISTRATIVE_SHUTDOWN, "x");
        assert_eq!(test.input(Input::Stop(stop)), [sent, "close 2", "down, keeps 0"]);
    }
}

#[test]
fn a_peer_that_is_back_confirms_its_routes() {
    let end = |family| codec::encode_end_of_rib(family);
    let mut test = Test::new(settings());
    test.establish(&open(1, restart(false, false, true)));
    test.input(Input::Closed(IN));
    test.input(Input::Accepted(NEXT));
    test.open(NEXT, &open(1, restart(false, true, true)));
    assert_eq!(test.keepalive(NEXT), ["up 3"]);
    assert_eq!(test.0.stale().iter().count(), 2);
    assert_eq!(test.message(NEXT, &end(Family::Ipv4)), ["update, end Some(Ipv4)"]);
    assert_eq!(test.0.stale().iter().collect::<Vec<_>>(), [Family::Ipv6]);
    // One that never confirms loses them in the end.
    let mut later = Vec::new();
    for _ in 0..40 {
        later.extend(test.wait(seconds(10)));
        test.keepalive(NEXT);
    }
    assert!(later.contains(&"forget 1".to_owned()), "{later:?}");

    // It has not forwarded all the time, or promises nothing any more: its routes are gone at once.
    for promise in [restart(false, true, false), None] {
        let mut test = Test::new(settings());
        test.establish(&open(1, restart(false, false, true)));
        test.input(Input::Closed(IN));
        test.input(Input::Accepted(NEXT));
        test.open(NEXT, &open(1, promise));
        assert_eq!(test.keepalive(NEXT), ["forget 2", "up 3"]);
        assert!(test.0.stale().is_empty());
    }
}

/// What the own OPEN on a new connection says about a restart, and about packets that were forwarded.
fn own_flags(test: &mut Test, id: ConnectionId) -> (bool, bool) {
    let context = Context { four_octet: true, internal: true, extended_next_hop: false, families: BOTH };
    for output in test.0.handle(test.1, Input::Accepted(id)) {
        if let Output::Send(_, bytes) = output
            && let Message::Open(open) = Message::decode(&bytes, &context).unwrap()
        {
            let restart = open.graceful_restart().unwrap();
            let forwarding = Family::ALL.map(|family| restart.forwarding(family).unwrap());
            assert_eq!(forwarding[0], forwarding[1]);
            return (restart.restarted, forwarding[0]);
        }
    }
    panic!("no OPEN");
}

/// A peer removes the routes that it has kept, unless the OPEN says that packets were forwarded all the time.
#[test]
fn a_lost_session_has_not_stopped_the_forwarding() {
    let mut test = Test::new(settings());
    assert_eq!(own_flags(&mut test, IN), (false, false), "nothing is known about the time before");
    test.input(Input::Closed(IN));
    test.establish(&open(1, restart(true, false, true)));
    test.input(Input::Closed(IN));
    assert_eq!(own_flags(&mut test, NEXT), (false, true));
    test.0.set_restarted(true);
    assert_eq!(own_flags(&mut test, ConnectionId(4)), (true, true));
}

#[test]
fn messages_that_do_not_fit_the_state_end_the_connection() {
    let refresh = codec::encode_refresh(Family::Ipv4, RefreshKind::Request);
    let mut test = Test::new(settings());
    test.input(Input::Accepted(IN));
    assert_eq!(test.keepalive(IN), ["5/1 on 2", "close 2"]);
    test.input(Input::Accepted(IN));
    test.open(IN, &open(1, None));
    assert_eq!(test.message(IN, &refresh), ["5/2 on 2", "close 2"]);
    test.establish(&open(1, None));
    assert_eq!(test.message(IN, &refresh), ["refresh IPv4 Request"]);
    let begin = codec::encode_refresh(Family::Ipv6, RefreshKind::Begin);
    assert_eq!(test.message(IN, &begin), ["refresh IPv6 Begin"]);
    let other = codec::encode_refresh(Family::Ipv6, RefreshKind::Other(9));
    assert_eq!(test.message(IN, &other), Vec::<String>::new());
    assert_eq!(test.open(IN, &open(1, None)), ["5/3 on 2", "close 2", "down, keeps 0"]);
}

#[test]
fn too_many_prefixes_reject_the_peer_for_a_while() {
    let mut test = Test::new(SessionSettings { passive: true, ..settings() });
    test.establish(&open(1, None));
    let reason = Notification::too_many_prefixes(Family::Ipv4, 5);
    assert_eq!(test.input(Input::Reset(reason)), ["6/1 on 2", "close 2", "down, keeps 0"]);
    let why = test.0.last_error().unwrap();
    assert!(why.contains("more than 5 IPv4 prefixes") && why.contains("let it send fewer"), "{why}");
    assert_eq!(test.input(Input::Accepted(NEXT)), ["6/5 on 3", "close 3"]);
    assert_eq!(test.wait(seconds(121)), Vec::<String>::new(), "it does not connect");
    assert_eq!(test.input(Input::Accepted(NEXT)), ["open on 3"]);
}

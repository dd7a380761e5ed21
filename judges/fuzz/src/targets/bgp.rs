//! What peers of BGP send.

use std::net::Ipv4Addr;
use std::time::Duration;

use tortie_bgp::codec::{self, Announcement, Context, Families, Family, Message};
use tortie_bgp::fsm::{ConnectionId, Input as Event, Output, Session, SessionSettings, State};

use crate::input::Input;

/// What two ends have agreed on that know everything.
const FULL: Context =
    Context { four_octet: true, internal: true, extended_next_hop: true, families: Families::BOTH };

/// A message: a byte that says what the ends have agreed on, and the message. What is accepted can be written, and is then read as before.
pub fn bgp_message(bytes: &[u8]) {
    let mut input = Input(bytes);
    let agreed = input.byte();
    let is_agreed = |bit: u8| agreed & (1 << bit) == 0;
    let context = Context {
        four_octet: is_agreed(0),
        internal: is_agreed(1),
        extended_next_hop: is_agreed(2),
        families: if is_agreed(3) { Families::BOTH } else { Families::from_iter([Family::Ipv4]) },
    };
    let _ = codec::length(input.0);
    match Message::decode(input.0, &context) {
        Ok(Message::Update(update)) => update.announced.iter().for_each(written_again),
        Ok(Message::Open(open)) => {
            assert_eq!(Message::decode(&codec::encode_open(&open), &context), Ok(Message::Open(open)));
        }
        Ok(Message::Notification(notification)) => {
            let _ = (notification.to_string(), notification.communication());
            assert!(codec::encode_notification(&notification).len() <= 4096);
        }
        Ok(Message::RouteRefresh { .. } | Message::Keepalive) => {}
        Err(notification) => {
            assert!(notification.code > 0, "{notification:?}");
            assert!(codec::encode_notification(&notification).len() <= 4096);
        }
    }
}

fn written_again(announcement: &Announcement) {
    let family = Family::of(&announcement.prefixes[0]);
    let messages =
        codec::encode_announcement(&announcement.attributes, family, &announcement.prefixes, &FULL);
    let mut read = Vec::new();
    let Some(messages) = messages else { return };
    for message in messages {
        let Ok(Message::Update(again)) = Message::decode(&message, &FULL) else { panic!("{message:?}") };
        assert_eq!(again.problems, []);
        for again in again.announced {
            assert_eq!(again.attributes, announcement.attributes);
            read.extend(again.prefixes);
        }
    }
    assert_eq!(read, announcement.prefixes);
}

/// What a peer sends on a connection, and what else happens: before each message, a byte says that. The messages are those that their headers say.
pub fn bgp_session(bytes: &[u8]) {
    let mut input = Input(bytes);
    let mut session = Session::new(SessionSettings::new(64_512, Ipv4Addr::new(192, 0, 2, 1), 64_513), 7);
    let (mut now, mut newest) = (Duration::ZERO, ConnectionId(0));
    session.handle(now, Event::Start);
    while !input.0.is_empty() {
        let what = input.byte();
        now += Duration::from_secs(u64::from(what >> 3));
        let connection = session.connection().unwrap_or(newest);
        let next = ConnectionId(newest.0 + 1);
        let outputs = match what & 7 {
            0..=2 => {
                let length = codec::length(input.0);
                let whole =
                    length.clone().map(|length| length.and_then(|length| input.0.split_at_checked(length)));
                match whole {
                    Ok(Some((message, rest))) => {
                        input.0 = rest;
                        session.handle(now, Event::Received(connection, Ok(message)))
                    }
                    Ok(None) => return,
                    Err(notification) => session.handle(now, Event::Received(connection, Err(notification))),
                }
            }
            3 => session.handle(now, Event::Accepted(next)),
            4 => session.handle(now, Event::Connected(next)),
            5 => session.handle(now, Event::Closed(connection)),
            6 => session.handle(now, Event::ConnectFailed),
            _ => session.handle(now, Event::Tick),
        };
        if matches!(what & 7, 3 | 4) {
            newest = next;
        }
        for output in outputs {
            if let Output::Send(_, message) = output {
                assert_eq!(codec::length(&message), Ok(Some(message.len())), "{message:?}");
            }
        }
        let _ = (
            session.deadline(),
            session.last_error(),
            session.stale(),
            session.state() == State::Established,
        );
    }
}

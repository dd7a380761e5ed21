//! A peer by hand, which does what no proper speaker does.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use ipnet::IpNet;
use rustix::net::{AddressFamily, SocketType};
use tortie_bgp::codec::notification::{cease, code, header, open};
use tortie_bgp::codec::{
    self, Attributes, Capability, Context, Families, Family, GracefulRestart, Message, Notification, Open,
};
use tortie_bgp::rib::OwnRoute;
use tortie_bgp::speaker::{Config, Password, PeerConfig, Speaker};

use tortie_kernel::route::{Address, Change, RouteSocket};

use crate::interop::lab::{AS, Lab, PATIENCE, Tortie, at, config, ipv4, peer, until};

const CONTEXT: Context =
    Context { four_octet: true, internal: true, extended_next_hop: false, families: Families::BOTH };

struct Script {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Script {
    /// Connects from a node to Tortie on node 1.
    fn connect(lab: &Lab, node: u8) -> Self {
        let connect = || {
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            rustix::net::bind(&socket, &SocketAddr::new(ipv4(node), 0)).unwrap();
            rustix::net::connect(&socket, &at(1)).unwrap();
            TcpStream::from(socket)
        };
        let stream = lab.namespace(node).run(connect).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, read: Vec::new() }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The next message; `None` at the end.
    fn message(&mut self) -> Option<Message> {
        loop {
            if let Ok(Some(length)) = codec::length(&self.read)
                && length <= self.read.len()
            {
                let message: Vec<u8> = self.read.drain(..length).collect();
                return Some(Message::decode(&message, &CONTEXT).unwrap());
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.read.extend(&buffer[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The notification with which the session ends.
    fn end(&mut self) -> Option<Notification> {
        while let Some(message) = self.message() {
            if let Message::Notification(notification) = message {
                assert!(self.message().is_none(), "the connection ends after a notification");
                return Some(notification);
            }
        }
        None
    }

    /// Establishes the session.
    fn establish(&mut self, open: &Open) {
        self.send(&codec::encode_open(open));
        self.send(&codec::encode_keepalive());
        while self.message() != Some(Message::Keepalive) {}
    }

    fn announce(&mut self, prefix: &str) {
        self.send(&announcement(prefix));
    }
}

fn announcement(prefix: &str) -> Vec<u8> {
    let attributes = Attributes { local_pref: Some(100), ..Attributes::new(ipv4(2)) };
    let messages =
        codec::encode_announcement(&attributes, Family::Ipv4, &[prefix.parse().unwrap()], &CONTEXT);
    messages.unwrap().remove(0)
}

fn hello(as_number: u32, hold_time: u16) -> Open {
    Open::new(as_number, hold_time, [10, 9, 0, 2].into(), vec![Capability::family(Family::Ipv4)])
}

/// Tortie waits for node 2.
fn waiting(change: impl FnOnce(&mut PeerConfig)) -> Config {
    let mut peer = peer(1, 2, AS);
    peer.session.passive = true;
    change(&mut peer);
    config(1, [(2, peer)])
}

#[test]
fn a_malformed_attribute_costs_its_routes_and_not_the_session() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|_| {}), false);
    let mut script = Script::connect(&lab, 2);
    script.establish(&hello(AS, 90));
    script.announce("10.30.0.0/16");
    script.announce("10.31.0.0/16");
    until("Tortie has the routes", || {
        tortie.route("10.30.0.0/16").is_some() && tortie.route("10.31.0.0/16").is_some()
    });
    // ORIGIN, the first attribute, gets an unknown value.
    let mut malformed = announcement("10.30.0.0/16");
    assert_eq!(malformed[23..27], [0x40, 1, 1, 0]);
    malformed[26] = 9;
    script.send(&malformed);
    until("Tortie drops the route", || tortie.route("10.30.0.0/16").is_none());
    assert!(tortie.is_established());
    assert!(tortie.route("10.31.0.0/16").is_some());
    // What is no message ends the session.
    script.send(&[0; 19]);
    assert_eq!(script.end(), Some(Notification::new(code::HEADER, header::NOT_SYNCHRONIZED)));
    until("the session ends", || !tortie.is_established());
    assert!(tortie.route("10.31.0.0/16").is_none());
}

#[test]
fn wrong_openings_are_answered_with_their_reason() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|_| {}), false);
    let mut old = codec::encode_open(&hello(AS, 90));
    old[19] = 3;
    let own_identifier = Open { identifier: [10, 9, 0, 1].into(), ..hello(AS, 90) };
    let without_families =
        Open::new(AS, 90, [10, 9, 0, 2].into(), vec![Capability::Multiprotocol { afi: 25, safi: 70 }]);
    let cases = [
        (codec::encode_open(&hello(65000, 90)), code::OPEN, open::BAD_PEER_AS),
        (codec::encode_open(&hello(AS, 2)), code::OPEN, open::UNACCEPTABLE_HOLD_TIME),
        (old, code::OPEN, open::UNSUPPORTED_VERSION),
        (codec::encode_open(&own_identifier), code::OPEN, open::BAD_IDENTIFIER),
        (codec::encode_open(&without_families), code::OPEN, open::UNSUPPORTED_CAPABILITY),
        (announcement("10.30.0.0/16"), code::FINITE_STATE_MACHINE, 1),
    ];
    for (bytes, code, subcode) in cases {
        let mut script = Script::connect(&lab, 2);
        script.send(&bytes);
        let end = script.end().unwrap();
        assert_eq!((end.code, end.subcode), (code, subcode));
        until("the reason is known", || {
            tortie.status().peers[0].last_error.as_deref() == Some(&format!("sent: {end}"))
        });
    }
    // Afterwards, a proper session is possible.
    Script::connect(&lab, 2).establish(&hello(AS, 90));
}

#[test]
fn strangers_get_nothing() {
    let lab = Lab::new(3);
    let _tortie = Tortie::start(&lab, 1, waiting(|_| {}), false);
    let mut script = Script::connect(&lab, 3);
    assert_eq!(script.message(), None);
}

#[test]
fn too_many_prefixes_end_the_session_for_a_while() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|peer| peer.rules.max_prefixes = Some(2)), false);
    // The peer would keep routes after a plain notification, so it gets a hard reset.
    let restart = GracefulRestart {
        restarted: false,
        notification: true,
        restart_time: 60,
        families: vec![(1, 1, true)],
    };
    let mut hello = hello(AS, 90);
    hello.capabilities.push(Capability::GracefulRestart(restart));
    let mut script = Script::connect(&lab, 2);
    script.establish(&hello);
    for number in 0..3 {
        script.announce(&format!("10.{number}.0.0/16"));
    }
    let end = script.end().unwrap();
    assert_eq!(end, Notification::too_many_prefixes(Family::Ipv4, 2).hard());
    until("the routes are gone", || tortie.route("10.0.0.0/16").is_none());
    // The next attempt is rejected.
    let end = Script::connect(&lab, 2).end().unwrap();
    assert_eq!((end.code, end.subcode), (code::CEASE, cease::CONNECTION_REJECTED));
}

#[test]
fn a_silent_peer_is_given_up() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|peer| peer.session.hold_time = 3), false);
    let mut script = Script::connect(&lab, 2);
    script.establish(&hello(AS, 90));
    script.announce("10.30.0.0/16");
    until("Tortie has the route", || tortie.route("10.30.0.0/16").is_some());
    // Whoever only reads is silent.
    assert_eq!(script.end(), Some(Notification::new(code::HOLD_TIMER_EXPIRED, 0)));
    until("the route is gone", || tortie.route("10.30.0.0/16").is_none());
}

#[test]
fn a_peer_that_reads_slowly_gets_all_routes_and_costs_little_memory() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|peer| peer.session.hold_time = 0), false);
    let routes: Vec<String> = (0..150_000_u32)
        .map(|number| format!("10.{}.{}.{}/32", number >> 16, number >> 8 & 255, number & 255))
        .collect();
    // Each with attributes of its own, so that each needs a message.
    let attributes = |number: usize| Attributes { med: Some(number as u32), ..crate::interop::lab::here() };
    let routes: Vec<(&str, Attributes)> =
        routes.iter().enumerate().map(|(number, prefix)| (prefix.as_str(), attributes(number))).collect();
    tortie.advertise(&routes);
    let mut script = Script::connect(&lab, 2);
    script.send(&codec::encode_open(&hello(AS, 0)));
    script.send(&codec::encode_keepalive());
    until("the session is established", || tortie.is_established());
    // What the connection does not take is not even written.
    std::thread::sleep(Duration::from_millis(500));
    let told = tortie.status().peers[0].advertised;
    assert!(told < routes.len(), "{told} routes are waiting in memory");
    let mut seen = 0;
    while let Some(message) = script.message() {
        if let Message::Update(update) = message {
            seen += update.announced.iter().map(|announcement| announcement.prefixes.len()).sum::<usize>();
            if update.end_of_rib.is_some() {
                break;
            }
        }
    }
    assert_eq!(seen, routes.len());
}

#[test]
fn a_peer_that_reads_nothing_leaves_no_connection_behind() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|peer| peer.session.hold_time = 3), false);
    let routes: Vec<String> = (0..60_000_u32)
        .map(|number| format!("10.{}.{}.{}/32", number >> 16, number >> 8 & 255, number & 255))
        .collect();
    let attributes = |number: usize| Attributes { med: Some(number as u32), ..crate::interop::lab::here() };
    let routes: Vec<(&str, Attributes)> =
        routes.iter().enumerate().map(|(number, prefix)| (prefix.as_str(), attributes(number))).collect();
    let mut script = Script::connect(&lab, 2);
    script.establish(&hello(AS, 90));
    until("the session is established", || tortie.is_established());
    // States of sockets as in `net/tcp_states.h`: 01 is an established connection.
    let connections = || {
        let read = || std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        let table = lab.namespace(1).run(read).unwrap();
        table.lines().filter(|line| line.contains(":00B3 ") && line.contains(" 01 ")).count()
    };
    assert_eq!(connections(), 1);
    tortie.advertise(&routes);
    until("the hold timer ends the session", || !tortie.is_established());
    until("the connection is closed", || connections() == 0);
    drop(script);
}

#[test]
fn what_cannot_be_done_is_refused_with_its_reason() {
    let lab = Lab::new(2);
    let tortie = Tortie::start(&lab, 1, waiting(|_| {}), false);
    let refused =
        |config: Config| tortie.run(async |speaker| speaker.apply(config).await.unwrap_err().to_string());
    let other = Config { identifier: [1, 2, 3, 4].into(), ..waiting(|_| {}) };
    assert!(refused(other).contains("cannot change from 10.9.0.1 to 1.2.3.4"));
    let second = tortie.run(async |_| Speaker::start(waiting(|_| {}), None).await.err().unwrap().to_string());
    assert!(second.contains("10.9.0.1:179: cannot listen"), "{second}");
    // A session that cannot be protected does not begin.
    let mut long = waiting(|peer| peer.transport.password = Some(Password("x".repeat(81))));
    long.peers.insert(at(3), peer(1, 3, AS));
    let left_out = |config: Config| {
        let left_out = tortie.run(async |speaker| speaker.apply(config).await.unwrap());
        left_out.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let problem = left_out(long.clone());
    assert!(problem.contains("a key has at most 80 bytes"), "{problem}");
    // The other peer has its session.
    let peers: Vec<_> = tortie.status().peers.iter().map(|peer| peer.address).collect();
    assert_eq!(peers, [at(3)]);
    assert_eq!(Script::connect(&lab, 2).message(), None);
    tortie.apply(waiting(|_| {}));
    Script::connect(&lab, 2).establish(&hello(AS, 90));
}

/// An address that the system does not have is left out until it has it; without any address, the speaker does not start.
#[test]
fn an_address_that_is_not_there_is_left_out() {
    let lab = Lab::new(2);
    let absent: SocketAddr = "10.9.0.77:179".parse().unwrap();
    let both = Config { listen: vec![absent, at(1)], ..waiting(|_| {}) };
    let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = lab.namespace(1).run(build).unwrap().unwrap();
    let none = Config { listen: vec![absent], ..waiting(|_| {}) };
    let refused = runtime.block_on(Speaker::start(none, None)).err().unwrap().to_string();
    assert!(refused.contains("10.9.0.77:179: cannot listen"), "{refused}");
    let (speaker, _events, left_out) = runtime.block_on(Speaker::start(both.clone(), None)).unwrap();
    assert_eq!(left_out.len(), 1, "{left_out:?}");
    Script::connect(&lab, 2).establish(&hello(AS, 90));
    let add = || {
        let link = tortie_kernel::interface_index("eth0").unwrap();
        let address = Address { link, address: absent.ip(), prefix_length: 24 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    };
    lab.namespace(1).run(add).unwrap();
    assert!(runtime.block_on(speaker.apply(both)).unwrap().is_empty());
}

#[test]
fn a_peer_connects_to_the_address_of_its_session_only() {
    let lab = Lab::new(2);
    let second: SocketAddr = "10.9.0.77:179".parse().unwrap();
    let add = || {
        let link = tortie_kernel::interface_index("eth0").unwrap();
        let address = Address { link, address: second.ip(), prefix_length: 24 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    };
    lab.namespace(1).run(add).unwrap();
    for (source, accepted) in [(Some(ipv4(1)), false), (None, true)] {
        let mut config = waiting(|peer| peer.transport.source = source);
        config.listen = vec![SocketAddr::new([0, 0, 0, 0].into(), 179)];
        let tortie = Tortie::start(&lab, 1, config, false);
        let stream = lab.namespace(2).run(|| TcpStream::connect(second).unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut script = Script { stream, read: Vec::new() };
        assert_eq!(script.message().is_some(), accepted, "{source:?}");
        let mut script = Script::connect(&lab, 2);
        script.establish(&hello(AS, 90));
        until("the session is established", || tortie.is_established());
    }
}

/// Nothing of the runtime works after the answer, so what the peer reads was sent before, although it reads late.
#[test]
fn the_last_message_is_sent_before_the_speaker_has_shut_down() {
    let lab = Lab::new(2);
    let routes: Vec<(IpNet, OwnRoute)> = (0..60_000_u32)
        .map(|number| {
            let prefix = format!("10.{}.{}.{}/32", number >> 16, number >> 8 & 255, number & 255);
            let attributes = Attributes { med: Some(number), ..crate::interop::lab::here() };
            (prefix.parse().unwrap(), OwnRoute { attributes: attributes.into(), interface: None })
        })
        .collect();
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let config = waiting(|_| {});
        let (speaker, _events, _) = runtime.block_on(Speaker::start(config, None)).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut script = Script::connect(&lab, 2);
                script.establish(&hello(AS, 90));
                std::thread::sleep(Duration::from_millis(1500));
                script.end()
            });
            runtime.block_on(async {
                while speaker.status().await.unwrap().established == 0 {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                speaker.advertise(routes).await.unwrap();
                tokio::time::sleep(Duration::from_millis(500)).await;
                speaker.shut_down("bye").await.unwrap();
            });
            runtime.shutdown_background();
            reading.join().unwrap()
        })
    };
    let ended = lab.namespace(1).run(work).unwrap().unwrap();
    assert_eq!((ended.code, ended.subcode), (code::CEASE, cease::ADMINISTRATIVE_SHUTDOWN), "{ended:?}");
}

/// A peer that can restart.
fn restarting() -> Open {
    let families = vec![(1, 1, true)];
    let restart = GracefulRestart { restarted: false, notification: false, restart_time: 60, families };
    let capabilities = vec![Capability::family(Family::Ipv4), Capability::GracefulRestart(restart)];
    Open::new(AS, 90, [10, 9, 0, 2].into(), capabilities)
}

/// A session that is old enough for its peer to have restarted, with one route.
fn old_session(lab: &Lab) -> (Tortie, Script) {
    let tortie = Tortie::start(lab, 1, waiting(|_| {}), false);
    let mut script = Script::connect(lab, 2);
    script.establish(&restarting());
    script.announce("10.30.0.0/16");
    until("Tortie has the route", || tortie.route("10.30.0.0/16").is_some());
    std::thread::sleep(Duration::from_millis(10_100));
    (tortie, script)
}

#[test]
fn somebody_with_the_peers_address_does_not_take_over_its_session() {
    let lab = Lab::new(2);
    let (tortie, mut script) = old_session(&lab);
    let mut other = Script::connect(&lab, 2);
    other.send(&codec::encode_open(&restarting()));
    other.send(&codec::encode_keepalive());
    assert_eq!(other.end(), Some(Notification::new(code::CEASE, cease::COLLISION)));
    assert!(tortie.is_established() && tortie.route("10.30.0.0/16").is_some());
    script.announce("10.31.0.0/16");
    until("the session goes on", || tortie.route("10.31.0.0/16").is_some());
}

/// The machine of the peer acknowledges nothing on the old connection, and does not reset it either.
#[test]
fn a_peer_that_has_lost_its_connection_without_a_word_takes_its_session_over() {
    let lab = Lab::new(2);
    let (tortie, script) = old_session(&lab);
    let port = script.stream.local_addr().unwrap().port();
    let table = format!(
        "table ip lost {{ chain in {{ type filter hook input priority 0; tcp dport {port} drop; }}; }}"
    );
    let mut nft = std::process::Command::new("nft");
    let status = lab.namespace(2).enter_on_spawn(nft.arg(table)).unwrap().status();
    assert!(status.expect("this test needs the program nft: apt-get install nftables").success());
    let mut back = Script::connect(&lab, 2);
    let begin = std::time::Instant::now();
    back.establish(&restarting());
    assert!(begin.elapsed() > Duration::from_secs(2), "the old connection was waited for");
    back.announce("10.32.0.0/16");
    until("the new connection counts", || tortie.route("10.32.0.0/16").is_some());
}

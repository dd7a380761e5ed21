//! What the proxy does to connections.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tortie_servers::Proxy;

/// Long enough for anything on loopback.
const LONG: Duration = Duration::from_secs(30);
/// How long a test watches that something does not happen.
const SHORT: Duration = Duration::from_millis(200);

/// A server that sends back what it receives.
fn echo() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut copy = stream.try_clone().unwrap();
                let _ = std::io::copy(&mut copy, &mut stream);
                let _ = stream.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    address
}

fn client(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

fn exchange(stream: &mut TcpStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn is_silent(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(SHORT)).unwrap();
    let answer = stream.read(&mut [0]);
    stream.set_read_timeout(Some(LONG)).unwrap();
    answer.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn data_and_its_end_are_forwarded_in_both_directions() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut stream = client(&proxy);
    let sent: Vec<u8> = (0..1_000_000_u32).map(|number| (number % 251) as u8).collect();
    let mut writer = stream.try_clone().unwrap();
    let copy = sent.clone();
    let writing = std::thread::spawn(move || {
        writer.write_all(&copy).unwrap();
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    writing.join().unwrap();
    assert!(received == sent, "{} of {} bytes, or other ones", received.len(), sent.len());
    assert_eq!(proxy.accepted(), 1);
    let start = Instant::now();
    while proxy.open() > 0 {
        assert!(start.elapsed() < LONG, "the connection is still open");
        std::thread::yield_now();
    }
}

#[test]
fn a_cut_closes_connections_and_admits_new_ones() {
    let proxy = Proxy::start(echo()).unwrap();
    let (mut first, mut second) = (client(&proxy), client(&proxy));
    exchange(&mut first, "a");
    exchange(&mut second, "b");
    assert_eq!(proxy.cut(), 2);
    assert!(is_closed(&mut first) && is_closed(&mut second));
    assert_eq!(exchange(&mut client(&proxy), "c"), "c");
}

#[test]
fn a_spread_changes_the_order_between_connections() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut clients: Vec<TcpStream> = (0..5).map(|_| client(&proxy)).collect();
    for client in &mut clients {
        exchange(client, "a");
    }
    proxy.spread(SHORT);
    let begun = Instant::now();
    clients.iter_mut().for_each(|client| client.write_all(b"b").unwrap());
    let arrivals: Vec<_> = clients
        .into_iter()
        .map(|mut client| {
            std::thread::spawn(move || {
                client.read_exact(&mut [0]).unwrap();
                begun.elapsed()
            })
        })
        .collect();
    let arrivals: Vec<Duration> = arrivals.into_iter().map(|arrival| arrival.join().unwrap()).collect();
    assert!(!arrivals.is_sorted(), "{arrivals:?}");
    assert!(arrivals.iter().any(|arrival| *arrival >= SHORT), "{arrivals:?}");
}

#[test]
fn a_pause_keeps_connections_open_and_silent() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut before = client(&proxy);
    exchange(&mut before, "a");
    proxy.pause();
    let mut during = client(&proxy);
    before.write_all(b"b").unwrap();
    during.write_all(b"c").unwrap();
    assert!(is_silent(&mut before) && is_silent(&mut during));
    proxy.resume();
    for (stream, expected) in [(&mut before, b"b"), (&mut during, b"c")] {
        let mut answer = [0];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, expected);
    }
}

#[test]
fn a_paused_connection_can_be_cut() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut stream = client(&proxy);
    exchange(&mut stream, "a");
    proxy.pause();
    stream.write_all(b"b").unwrap();
    assert!(is_silent(&mut stream));
    proxy.cut();
    assert!(is_closed(&mut stream));
}

#[test]
fn refused_connections_are_closed_and_existing_ones_stay() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut before = client(&proxy);
    exchange(&mut before, "a");
    proxy.refuse(true);
    assert!(is_closed(&mut client(&proxy)));
    assert_eq!(exchange(&mut before, "b"), "b");
    proxy.refuse(false);
    assert_eq!(exchange(&mut client(&proxy), "c"), "c");
}

#[test]
fn an_answer_is_late_by_the_delay_of_both_directions() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut stream = client(&proxy);
    proxy.delay(SHORT);
    let start = Instant::now();
    // Several chunks that are under way together are late once.
    for text in ["a", "b", "c"] {
        stream.write_all(text.as_bytes()).unwrap();
    }
    let mut answer = [0; 3];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"abc");
    assert!(start.elapsed() >= 2 * SHORT, "after {:?}", start.elapsed());
}

#[test]
fn a_client_of_an_absent_server_sees_a_closed_connection() {
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, tortie_servers::free_port().unwrap()));
    let proxy = Proxy::start(nobody).unwrap();
    assert!(is_closed(&mut client(&proxy)));
}

#[test]
fn a_dropped_proxy_closes_its_connections_and_its_port() {
    let proxy = Proxy::start(echo()).unwrap();
    let mut stream = client(&proxy);
    exchange(&mut stream, "a");
    let address = proxy.address();
    drop(proxy);
    assert!(is_closed(&mut stream));
    let start = Instant::now();
    while TcpStream::connect(address).is_ok() {
        assert!(start.elapsed() < LONG, "the port is still open");
        std::thread::yield_now();
    }
}

//! Packets between network namespaces: ping, TCP, UDP, and datagrams that nobody may fragment.

use std::io::{Error, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, Timeout, set_ip_mtu_discover, set_ipv6_mtu_discover,
    set_socket_timeout,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, recv, sendto, socket_with,
};
use tortie_kernel::namespace::NetNs;

const TCP_PORT: u16 = 80;
/// How long to wait for an answer, and how often to ask.
const ANSWER: Duration = Duration::from_millis(700);
const TRIES: u16 = 3;
/// How often to send a large datagram: each router on the way teaches only the one before it, and what taught it is lost.
const LARGE_TRIES: u16 = 8;

/// A pod as the tests see it.
pub(crate) struct Pod {
    pub(crate) netns: NetNs,
    /// Its addresses: IPv4, and IPv6 if it has one.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) mtu: usize,
}

impl Pod {
    pub(crate) fn address(&self, is_ipv6: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv6() == is_ipv6)
    }
}

/// What became of a datagram that nobody may fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It arrived whole.
    Arrived,
    /// The sender learned that it is too large, and for what.
    TooLarge,
    /// Neither.
    Lost,
}

/// A ping, a request by TCP and a datagram there and back; the error says what did not work.
pub(crate) fn reaches(from: &Pod, to: &Pod, address: IpAddr) -> Result<(), String> {
    let failed = [
        ("ping", from.netns.run(|| ping(address)).unwrap()),
        ("TCP", from.netns.run(|| fetch(address)).unwrap()),
        ("UDP", small_datagram(from, to, address)),
    ];
    let failed = failed.into_iter().filter_map(|(what, result)| Some(format!("{what}: {}", result.err()?)));
    let failed: Vec<String> = failed.collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join(", ")) }
}

/// Asks by an echo request and waits for the reply to it.
pub(crate) fn ping(to: IpAddr) -> Result<(), Error> {
    let (family, protocol, request, reply) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, 8, 0),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, 128, 129),
    };
    let socket = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER))?;
    let identifier = rustix::thread::gettid().as_raw_nonzero().get() as u16;
    for sequence in 0..TRIES {
        let [a, b] = identifier.to_be_bytes();
        // The kernel computes the checksum of ICMPv6 only.
        let mut message = vec![request, 0, 0, 0, a, b, 0, sequence as u8];
        if to.is_ipv4() {
            let sum = checksum(&message).to_be_bytes();
            message[2..4].copy_from_slice(&sum);
        }
        sendto(&socket, &message, SendFlags::empty(), &SocketAddr::new(to, 0))?;
        let mut buffer = [0; 256];
        while let Ok((length, _)) = recv(&socket, &mut buffer[..], RecvFlags::empty()) {
            // A raw socket of IPv4 gets the header, too.
            let answer = if to.is_ipv4() { &buffer[20..length] } else { &buffer[..length] };
            if answer.len() >= 8 && answer[0] == reply && answer[4..8] == message[4..8] {
                return Ok(());
            }
        }
    }
    Err(ErrorKind::TimedOut.into())
}

/// The checksum of the Internet (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Gets the page of the pod's server.
fn fetch(to: IpAddr) -> Result<(), Error> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::new(to, TCP_PORT), ANSWER * u32::from(TRIES))?;
    stream.set_read_timeout(Some(ANSWER * u32::from(TRIES)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    if page.contains("<h1>") { Ok(()) } else { Err(Error::other("another page")) }
}

fn small_datagram(from: &Pod, to: &Pod, address: IpAddr) -> Result<(), Error> {
    match fate_after(TRIES, from, to, address, 100) {
        Fate::Arrived => Ok(()),
        Fate::TooLarge => Err(Error::other("too large")),
        Fate::Lost => Err(ErrorKind::TimedOut.into()),
    }
}

/// Sends IP packets of this size, with DF, until one arrives, or the sender knows that it cannot.
pub(crate) fn fate(from: &Pod, to: &Pod, address: IpAddr, size: usize) -> Fate {
    fate_after(LARGE_TRIES, from, to, address, size)
}

fn fate_after(tries: u16, from: &Pod, to: &Pod, address: IpAddr, size: usize) -> Fate {
    let any = |is_ipv6| if is_ipv6 { IpAddr::from([0_u16; 8]) } else { IpAddr::from([0_u8; 4]) };
    let bind = |port| UdpSocket::bind((any(address.is_ipv6()), port)).unwrap();
    // Any free port, so that several senders may send to one pod at the same time.
    let receiver = to.netns.run(|| bind(0)).unwrap();
    let port = receiver.local_addr().unwrap().port();
    receiver.set_read_timeout(Some(ANSWER)).unwrap();
    let sender = from.netns.run(|| bind(0)).unwrap();
    never_fragment(&sender, address.is_ipv6());
    let headers = if address.is_ipv6() { 48 } else { 28 };
    let datagram = vec![7; size - headers];
    for _ in 0..tries {
        match sender.send_to(&datagram, (address, port)) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) => {
                return Fate::TooLarge;
            }
            // An answer of ICMP to an earlier one, or no route.
            Err(_) => std::thread::sleep(ANSWER),
            Ok(_) => {
                let mut buffer = vec![0; 1 << 16];
                if receiver.recv(&mut buffer).is_ok_and(|length| length == datagram.len()) {
                    return Fate::Arrived;
                }
            }
        }
    }
    Fate::Lost
}

/// Makes the kernel send each datagram whole and with DF, or refuse it.
fn never_fragment(socket: &UdpSocket, is_ipv6: bool) {
    match is_ipv6 {
        false => set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::DO).unwrap(),
        true => set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::DO).unwrap(),
    }
}

/// Packets that a namespace has fragmented or put together.
pub(crate) fn fragments(netns: &NetNs) -> u64 {
    let read =
        |file: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
    let (snmp, snmp6) = netns.run(|| (read("snmp"), read("snmp6"))).unwrap();
    let mut lines = snmp.lines().filter(|line| line.starts_with("Ip:")).map(str::split_whitespace);
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let counted = |name: &str| name.ends_with("FragCreates") || name.ends_with("ReasmReqds");
    let of_ipv4 = names.zip(values).filter(|(name, _)| counted(name)).map(|(_, value)| value);
    let of_ipv6 = snmp6.lines().filter_map(|line| line.split_once(char::is_whitespace));
    let of_ipv6 = of_ipv6.filter(|(name, _)| counted(name)).map(|(_, value)| value.trim());
    of_ipv4.chain(of_ipv6).map(|value| value.parse::<u64>().unwrap()).sum()
}

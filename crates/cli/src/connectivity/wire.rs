//! What the pods of the test do: servers greet and echo, clients probe. Both run on Linux and on Windows.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::{Instant, sleep, timeout_at};

/// The port that everybody may reach, by TCP and UDP.
pub(super) const OPEN: u16 = 8080;
/// The port that only the test's clients may reach.
pub(super) const SELECTED: u16 = 8081;
/// The port that only pods may reach that do not exist.
pub(super) const CLOSED: u16 = 8082;
/// How many bytes go in each direction of a connection.
const BULK: usize = 64 * 1024;
/// How long an attempt may take: a lost first packet is sent again after one second.
const ATTEMPT: Duration = Duration::from_millis(2_500);
/// How long a client tries what must succeed. Servers start at different moments.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// How long an attempt to meet all backends of a Service may take, and how many connections.
const BACKENDS: Duration = Duration::from_secs(5);
const MOST_CONNECTIONS: usize = 400;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// The pause before a datagram is sent again.
const RESEND: Duration = Duration::from_millis(600);
/// The headers of IPv4 and UDP.
const HEADERS: usize = 28;
/// The MTU of pods on Windows nodes, which this program cannot ask for.
#[cfg(not(target_os = "linux"))]
const WINDOWS_MTU: usize = 1450;
/// An address for documentation (RFC 5737). Nothing is sent to it.
#[cfg(target_os = "linux")]
const NOBODY: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// The MTU that counts where there is no default route.
#[cfg(target_os = "linux")]
const WITHOUT_ROUTE_MTU: usize = 1500;
/// The largest datagram of IPv4.
const MAX_DATAGRAM: usize = 65_507;

/// Why silence is no success.
pub(super) const NOT_PROVEN: &str =
    "no answer, which proves nothing: the port that policy allows does not answer either";

/// What a client does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Probe {
    /// Connects, and expects the greeting of a server whose name begins so.
    Greet { to: SocketAddr, name: String },
    /// Connects until each of these servers has answered at an address that they share.
    Backends { to: SocketAddr, names: Vec<String> },
    /// Sends and receives full segments.
    Segments { to: SocketAddr },
    /// Sends and receives a datagram of the path's MTU that may not be fragmented.
    Datagram { to: SocketAddr },
    /// Connects, and expects no answer.
    Closed { to: SocketAddr },
    /// Looks a name up, and expects this address.
    Name { name: String, address: IpAddr },
}

impl Probe {
    /// The address to which packets go, if it is no name's.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Greet { to, .. }
            | Self::Backends { to, .. }
            | Self::Segments { to }
            | Self::Datagram { to }
            | Self::Closed { to } => Some(to.ip()),
            Self::Name { .. } => None,
        }
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Greet { to, name } => write!(f, "greet,{to},{name}"),
            Self::Backends { to, names } => write!(f, "backends,{to},{}", names.join("+")),
            Self::Segments { to } => write!(f, "segments,{to}"),
            Self::Datagram { to } => write!(f, "datagram,{to}"),
            Self::Closed { to } => write!(f, "closed,{to}"),
            Self::Name { name, address } => write!(f, "name,{name},{address}"),
        }
    }
}

impl FromStr for Probe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |part: &str| format!("{part:?} in {text:?} is no address");
        let address = |part: &str| part.parse::<SocketAddr>().map_err(|_| bad(part));
        match text.split(',').collect::<Vec<_>>().as_slice() {
            ["greet", to, name] => Ok(Self::Greet { to: address(to)?, name: (*name).to_owned() }),
            ["backends", to, names] => {
                let names = names.split('+').map(str::to_owned).collect();
                Ok(Self::Backends { to: address(to)?, names })
            }
            ["segments", to] => Ok(Self::Segments { to: address(to)? }),
            ["datagram", to] => Ok(Self::Datagram { to: address(to)? }),
            ["closed", to] => Ok(Self::Closed { to: address(to)? }),
            ["name", name, to] => {
                Ok(Self::Name { name: (*name).to_owned(), address: to.parse().map_err(|_| bad(to))? })
            }
            _ => Err(format!("{text:?} is no probe")),
        }
    }
}

/// Serves until the process is ended: greets with the server's name and the MTU towards the client, then echoes.
pub(super) async fn serve(name: &str) -> std::io::Result<()> {
    // A server has all ports or none: a closed port that nobody serves would prove nothing.
    let mut listeners = Vec::new();
    for port in [OPEN, SELECTED, CLOSED] {
        listeners.push(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await?);
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, OPEN)).await?;
    never_fragment(&socket)?;
    for listener in listeners {
        let name = name.to_owned();
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    sleep(PAUSE).await;
                    continue;
                };
                tokio::spawn(greet(stream, name.clone()));
            }
        });
    }
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        // An error is about an earlier datagram to a client that is gone.
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else { continue };
        let _ = socket.send_to(&buffer[..length], client).await;
    }
}

async fn greet(mut stream: TcpStream, name: String) -> std::io::Result<()> {
    stream.write_all(format!("{name} {}\n", mtu()?).as_bytes()).await?;
    let (mut reader, mut writer) = stream.split();
    tokio::io::copy(&mut reader, &mut writer).await.map(drop)
}

/// Runs the probes at once, except for closed ports: those come last, when everything else works. Returns why those that
/// failed did, by their position.
pub(super) async fn run(probes: &[Probe]) -> Vec<(usize, String)> {
    let is_closed = |probe: &Probe| matches!(probe, Probe::Closed { .. });
    let mut failed = Vec::new();
    for phase in [false, true] {
        let probes = probes.iter().enumerate().filter(|(_, probe)| is_closed(probe) == phase);
        let all = probes.map(|(number, probe)| async move { (number, patiently(probe).await.err()) });
        let results = futures::future::join_all(all).await.into_iter();
        failed.extend(results.filter_map(|(number, why)| Some((number, why?))));
    }
    failed.sort();
    failed
}

async fn patiently(probe: &Probe) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let result = attempt(probe, Instant::now() + ATTEMPT).await;
        // A second attempt at a closed port could only hide that the first one got through.
        if result.is_ok() || matches!(probe, Probe::Closed { .. }) || Instant::now() > deadline {
            return result;
        }
        sleep(PAUSE).await;
    }
}

async fn attempt(probe: &Probe, deadline: Instant) -> Result<(), String> {
    let late = |what: &'static str| move |_| format!("no {what}");
    match probe {
        Probe::Greet { to, name } => {
            let (greeting, ..) = timeout_at(deadline, connect(*to)).await.map_err(late("answer"))??;
            match greeting.starts_with(name.as_str()) {
                true => Ok(()),
                false => Err(format!("{greeting:.30} answered")),
            }
        }
        Probe::Backends { to, names } => backends(*to, names).await,
        Probe::Segments { to } => {
            timeout_at(deadline, segments(*to)).await.map_err(late("echo of full segments"))?
        }
        Probe::Datagram { to } => timeout_at(deadline, datagram(*to)).await.map_err(late("answer"))?,
        Probe::Closed { to } => {
            closed(*to, deadline).await?;
            // Silence proves something only if the server still answers at the port that policy allows.
            let selected = SocketAddr::new(to.ip(), SELECTED);
            let answer = timeout_at(Instant::now() + ATTEMPT, connect(selected)).await;
            match answer {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(_)) | Err(_) => Err(NOT_PROVEN.to_owned()),
            }
        }
        Probe::Name { name, address } => {
            let looked_up = timeout_at(deadline, tokio::net::lookup_host((name.as_str(), OPEN))).await;
            let found = looked_up.map_err(late("answer of the DNS"))?.map_err(|error| short(&error))?;
            let found: Vec<IpAddr> = found.map(|found| found.ip()).collect();
            match found.contains(address) {
                true => Ok(()),
                false => Err(format!("the DNS says {found:.1?}")),
            }
        }
    }
}

/// Connects until each server has answered: every connection may go to any of them, so one that works proves little.
async fn backends(to: SocketAddr, names: &[String]) -> Result<(), String> {
    let deadline = Instant::now() + BACKENDS;
    let mut missing: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let mut failed = None;
    for _ in 0..MOST_CONNECTIONS {
        match timeout_at(deadline, connect(to)).await {
            Ok(Ok((name, ..))) if names.contains(&name) => drop(missing.remove(name.as_str())),
            Ok(Ok((name, ..))) => return Err(format!("{name:.30} answered")),
            Ok(Err(why)) => failed = Some(why),
            // A connection to one backend hangs.
            Err(_) => break,
        }
        if missing.is_empty() {
            return Ok(());
        }
    }
    match missing.len() == names.len() {
        true => Err(failed.unwrap_or_else(|| "no answer".to_owned())),
        false => Err(format!("no answer of {}", missing.into_iter().collect::<Vec<_>>().join(", "))),
    }
}

/// Whether policy denies a port at which a server listens: it drops the packets, or rejects them.
async fn closed(to: SocketAddr, deadline: Instant) -> Result<(), String> {
    use std::io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, PermissionDenied};
    match timeout_at(deadline, TcpStream::connect(to)).await {
        Err(_) => Ok(()),
        Ok(Ok(_)) => Err("the port accepts connections".to_owned()),
        Ok(Err(error)) => match error.kind() {
            ConnectionRefused | HostUnreachable | NetworkUnreachable | PermissionDenied => Ok(()),
            _ => Err(format!("{}, which proves nothing", short(&error))),
        },
    }
}

/// Connects; returns the server's name, its MTU and the connection.
async fn connect(to: SocketAddr) -> Result<(String, usize, BufReader<TcpStream>), String> {
    let stream = TcpStream::connect(to).await.map_err(|error| short(&error))?;
    let mut stream = BufReader::new(stream);
    let mut greeting = String::new();
    stream.read_line(&mut greeting).await.map_err(|error| short(&error))?;
    let (name, mtu) = greeting.trim().rsplit_once(' ').unwrap_or((greeting.trim(), "0"));
    Ok((name.to_owned(), mtu.parse().unwrap_or(0), stream))
}

async fn segments(to: SocketAddr) -> Result<(), String> {
    let (_, _, mut stream) = connect(to).await?;
    let sent: Vec<u8> = (0..BULK).map(|byte| byte as u8).collect();
    let mut received = vec![0; BULK];
    let (mut reader, mut writer) = tokio::io::split(&mut stream);
    let (wrote, read) = tokio::join!(writer.write_all(&sent), reader.read_exact(&mut received));
    wrote.and(read.map(drop)).map_err(|error| short(&error))?;
    if sent == received { Ok(()) } else { Err("the echo differs".to_owned()) }
}

/// Sends a datagram that fills a packet of both sides, and waits for its echo.
async fn datagram(to: SocketAddr) -> Result<(), String> {
    let (_, theirs, _) = connect(to).await?;
    let ours = mtu().map_err(|error| short(&error))?;
    let size = ours.min(theirs).saturating_sub(HEADERS).min(MAX_DATAGRAM);
    let of_size = |why: &dyn fmt::Display| format!("{size} bytes of UDP: {why}");
    let socket = async {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
        never_fragment(&socket)?;
        socket.connect(to).await?;
        Ok(socket)
    };
    let socket: UdpSocket = socket.await.map_err(|error: std::io::Error| short(&error))?;
    let (sent, mut received) = (vec![0x5a; size], vec![0; MAX_DATAGRAM]);
    for _ in 0..2 {
        socket.send(&sent).await.map_err(|error| of_size(&short(&error)))?;
        match tokio::time::timeout(RESEND, socket.recv(&mut received)).await {
            Ok(Ok(length)) if received[..length] == sent[..] => return Ok(()),
            Ok(Ok(_)) => return Err(of_size(&"the echo differs")),
            Ok(Err(error)) => return Err(of_size(&short(&error))),
            Err(_) => {}
        }
    }
    Err(of_size(&"no echo"))
}

/// The MTU of this side's interface. The kernel may believe that the path to the other side is narrower, because an earlier
/// packet was too large; the check must find that, so it asks for the path to an address that nobody has.
#[cfg(target_os = "linux")]
fn mtu() -> std::io::Result<usize> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    match socket.connect((NOBODY, OPEN)) {
        // Without a default route, nobody outside is reached.
        Err(_) => Ok(WITHOUT_ROUTE_MTU),
        Ok(()) => Ok(rustix::net::sockopt::ip_mtu(&socket)? as usize),
    }
}

#[cfg(not(target_os = "linux"))]
fn mtu() -> std::io::Result<usize> {
    Ok(WINDOWS_MTU)
}

/// Makes the kernel send each datagram whole and with DF, also if it believes that the path is narrower.
#[cfg(target_os = "linux")]
fn never_fragment(socket: &UdpSocket) -> std::io::Result<()> {
    use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};
    Ok(set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::PROBE)?)
}

#[cfg(not(target_os = "linux"))]
fn never_fragment(_: &UdpSocket) -> std::io::Result<()> {
    Ok(())
}

/// An error in few words: a client has 2 KiB for all of its results.
fn short(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::ConnectionRefused => "refused".to_owned(),
        ErrorKind::TimedOut => "no answer".to_owned(),
        _ => format!("{:.50}", error.to_string()),
    }
}

/// What a client prints: a line for each probe that failed, and their number.
pub(super) fn printed(failed: &[(usize, String)]) -> String {
    let mut text: String = failed.iter().map(|(number, why)| format!("{number} {why}\n")).collect();
    text.push_str(&format!("failed {}\n", failed.len()));
    text
}

/// Reads what a client printed, of which only the end may be there: why each of `count` probes failed. `None` if that
/// cannot be known of some probes.
pub(super) fn read_printed(text: &str, count: usize) -> Option<Vec<Option<String>>> {
    let mut results = vec![None; count];
    let mut lines = text.lines().rev();
    let failed: usize = lines.next()?.strip_prefix("failed ")?.parse().ok()?;
    for _ in 0..failed {
        let (number, why) = lines.next()?.split_once(' ')?;
        *results.get_mut(number.parse::<usize>().ok()?)? = Some(why.to_owned());
    }
    (results.iter().flatten().count() == failed).then_some(results)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn probes_survive_the_arguments_of_a_pod() {
        let to: SocketAddr = "10.0.0.1:8080".parse().unwrap();
        for probe in [
            Probe::Greet { to, name: "server-1".to_owned() },
            Probe::Backends { to, names: vec!["server-1".to_owned(), "server-2".to_owned()] },
            Probe::Segments { to },
            Probe::Datagram { to },
            Probe::Closed { to },
            Probe::Name { name: "servers-linux".to_owned(), address: to.ip() },
        ] {
            assert_eq!(probe.to_string().parse(), Ok(probe));
        }
        for bad in ["greet,10.0.0.1:8080", "closed,there", "look", ""] {
            bad.parse::<Probe>().unwrap_err();
        }
    }

    /// What is cut off or damaged never counts as a success.
    #[test]
    fn results_that_are_not_complete_are_none() {
        let failed = [(0, "refused".to_owned()), (2, "no answer".to_owned())];
        let text = printed(&failed);
        let expected = vec![Some("refused".to_owned()), None, Some("no answer".to_owned())];
        assert_eq!(read_printed(&text, 3), Some(expected));
        assert_eq!(read_printed(&format!("log\n{text}"), 3).map(|results| results.len()), Some(3));
        assert_eq!(read_printed("failed 0\n", 2), Some(vec![None, None]));
        for cut in 1..text.len() {
            let found = read_printed(&text[cut..], 3);
            assert!(found.is_none_or(|found| found[0].is_some()), "{:?}", &text[cut..]);
        }
        for bad in ["", "panicked", "failed x", "1 a\nfailed 2", "9 a\nfailed 1", "1 a\n1 b\nfailed 2"] {
            assert_eq!(read_printed(bad, 3), None, "{bad:?}");
        }
    }

    /// A server greets, echoes, and is found out if it serves what is closed.
    #[cfg(target_os = "linux")]
    #[test]
    fn probes_tell_the_truth_about_a_server() {
        let netns = tortie_kernel::namespace::NetNs::create().unwrap();
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        netns.run(|| runtime().block_on(probe_a_server())).unwrap();
    }

    #[cfg(target_os = "linux")]
    async fn probe_a_server() {
        let server = tokio::spawn(async { serve("server-1").await });
        let at = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let greet = |name: &str| Probe::Greet { to: at(OPEN), name: name.to_owned() };
        let deadline = Instant::now() + Duration::from_secs(30);
        while attempt(&greet("server-1"), Instant::now() + ATTEMPT).await.is_err() {
            assert!(Instant::now() < deadline && !server.is_finished());
            sleep(Duration::from_millis(5)).await;
        }
        let now = || Instant::now() + Duration::from_secs(30);
        for good in [Probe::Segments { to: at(OPEN) }, Probe::Datagram { to: at(OPEN) }, greet("server-")] {
            assert_eq!(attempt(&good, now()).await, Ok(()), "{good}");
        }
        let backends = |names: &[&str]| Probe::Backends {
            to: at(OPEN),
            names: names.iter().map(|&name| name.to_owned()).collect(),
        };
        assert_eq!(attempt(&backends(&["server-1"]), now()).await, Ok(()));
        let one_of_two = attempt(&backends(&["server-1", "server-2"]), now()).await;
        assert_eq!(one_of_two, Err("no answer of server-2".to_owned()));
        let other = attempt(&backends(&["server-2"]), now()).await;
        assert_eq!(other, Err("server-1 answered".to_owned()));
        let other = attempt(&greet("server-2"), now()).await;
        assert_eq!(other, Err("server-1 answered".to_owned()));
        let closed = attempt(&Probe::Closed { to: at(CLOSED) }, now()).await;
        assert_eq!(closed, Err("the port accepts connections".to_owned()));
        server.abort();
        let _ = server.await;
        let refused = attempt(&Probe::Segments { to: at(1) }, now()).await;
        assert_eq!(refused, Err("refused".to_owned()));
        assert_eq!(attempt(&Probe::Closed { to: at(1) }, now()).await, Ok(()));
    }
}

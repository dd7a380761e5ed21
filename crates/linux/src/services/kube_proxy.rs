//! Whether kube-proxy serves Services on this node. Two programs that translate the same connections would use backends of each other's past.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tortie_kernel::interface_index;
use tortie_kernel::nftables::leftovers::Marks;

use crate::Result;
use crate::foreign_chains::ForeignChains;

/// The port at which it answers, on a loopback address (`--metrics-bind-address`), unless it is configured otherwise.
const PORT: u16 = 10_249;
/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// The most bytes of an answer that are read.
const MOST: usize = 4_096;
/// The link of its IPVS mode.
const IPVS_LINK: &str = "kube-ipvs0";
/// Its table in nftables mode, and the first of its chains in the other modes. No rule of others has a comment of that kind.
const MARKS: Marks<'static> =
    Marks { tables: &["kube-proxy"], chains: "KUBE-SERVICES", comments: "tortie:no comment" };

/// A sign of kube-proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeProxy {
    /// It runs, in this mode.
    Runs(String),
    /// It does not answer, but it has left this.
    HasLeft(String),
}

impl KubeProxy {
    /// Looks whether it answers in the calling thread's network namespace.
    #[must_use]
    pub fn running() -> Option<Self> {
        mode().map(Self::Runs)
    }

    /// Looks whether it answers, or has left rules in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel does not list its rules.
    pub fn find() -> Result<Option<Self>> {
        if let Some(running) = Self::running() {
            return Ok(Some(running));
        }
        if interface_index(IPVS_LINK).is_ok() {
            return Ok(Some(Self::HasLeft(format!("the link {IPVS_LINK}"))));
        }
        let found = ForeignChains::find(MARKS)?;
        let first = found.to_string().lines().next().map(str::to_owned);
        Ok(first.map(Self::HasLeft))
    }
}

/// The mode that it answers.
fn mode() -> Option<String> {
    let addresses: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    addresses.into_iter().find_map(|address| of_answer(&answer(SocketAddr::new(address, PORT))?))
}

/// What a program answers in time. It may be any program.
fn answer(address: SocketAddr) -> Option<String> {
    let deadline = Instant::now() + PATIENCE;
    let left = || Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_write_timeout(left()).ok()?;
    stream.write_all(b"GET /proxyMode HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 512]);
    // What came until then is enough.
    while let Some(left) = left().filter(|_| answer.len() < MOST) {
        stream.set_read_timeout(Some(left)).ok()?;
        match stream.read(&mut buffer) {
            Ok(length @ 1..) => answer.extend_from_slice(&buffer[..length]),
            _ => break,
        }
    }
    Some(String::from_utf8_lossy(&answer).into_owned())
}

/// The mode in an answer. Other programs may have the port.
fn of_answer(answer: &str) -> Option<String> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let is_found = head.split_whitespace().nth(1) == Some("200");
    let mode = body.trim();
    let is_mode = ["iptables", "ipvs", "nftables", "kernelspace"].contains(&mode);
    (is_found && is_mode).then(|| mode.to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::nftables::{Nft, Op, Transaction};
    use tortie_kernel::route::{Change, LinkSetting, RouteSocket};

    use super::*;

    fn in_namespace<R: Send>(test: impl FnOnce() -> R + Send) -> R {
        let with_loopback = || {
            let up = Change::SetLink(interface_index("lo").unwrap(), vec![LinkSetting::Up(true)]);
            RouteSocket::open().unwrap().change(&up).unwrap();
            test()
        };
        NetNs::create().unwrap().run(with_loopback).unwrap()
    }

    /// Answers one request.
    fn answer_one(listener: &TcpListener, text: &str) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 64];
        let _ = stream.read(&mut request).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn it_runs_if_it_answers_its_mode() {
        in_namespace(|| {
            assert_eq!(KubeProxy::find().unwrap(), None);
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).unwrap();
            for (text, found) in [
                ("HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\nnftables", Some("nftables")),
                ("HTTP/1.0 404 Not Found\r\n\r\nnftables", None),
                ("HTTP/1.0 200 OK\r\n\r\nhello", None),
                ("", None),
            ] {
                std::thread::scope(|scope| {
                    scope.spawn(|| answer_one(&listener, text));
                    let running = found.map(|mode| KubeProxy::Runs(mode.to_owned()));
                    assert_eq!(KubeProxy::running(), running, "{text}");
                });
            }
        });
    }

    /// A program that sends a byte from time to time does not hold the thread up.
    #[test]
    fn a_slow_answer_takes_no_longer_than_the_patience() {
        in_namespace(|| {
            let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, PORT)).unwrap();
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                while stream.write_all(b"x").is_ok() {
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
            let begun = Instant::now();
            assert_eq!(KubeProxy::running(), None);
            assert!(begun.elapsed() >= PATIENCE && begun.elapsed() < 20 * PATIENCE, "{:?}", begun.elapsed());
        });
    }

    #[test]
    fn its_rules_are_found_after_its_end() {
        let find = |table: &str, chain: Option<&str>| {
            // `iptables` uses tables of the family `ip`, which Tortie does not write.
            let program = std::process::Command::new("nft");
            let text = match chain {
                Some(chain) => format!("add table ip {table}; add chain ip {table} {chain}"),
                None => format!("add table ip {table}"),
            };
            in_namespace(move || {
                let mut program = program;
                assert!(program.arg(text).status().unwrap().success());
                KubeProxy::find().unwrap()
            })
        };
        let left = |what: &str| Some(KubeProxy::HasLeft(what.to_owned()));
        assert_eq!(find("kube-proxy", None), left("nftables table ip kube-proxy"));
        assert_eq!(find("nat", Some("KUBE-SERVICES")), left("chain KUBE-SERVICES in nftables table ip nat"));
        assert_eq!(find("nat", Some("KUBE-KUBELET-CANARY")), None);
        let own = in_namespace(|| {
            let ops = vec![Op::AddTable(0)];
            Nft::open().unwrap().commit(&Transaction { table: super::super::TABLE.to_owned(), ops }).unwrap();
            KubeProxy::find().unwrap()
        });
        assert_eq!(own, None);
    }
}

//! Whether Calico's agent runs on this node.

use std::fs;
use std::path::{Path, PathBuf};

/// The port on which Felix reports its health (`FelixConfiguration.healthPort`), on the node's loopback address.
const HEALTH_PORT: u16 = 9099;
/// The names of its processes. A container sees only its own.
const PROCESSES: [&str; 3] = ["calico-node", "calico-felix", "felix"];
/// The control sockets of its BGP daemon.
const BIRD: &str = "/calico/bird";
/// `TCP_LISTEN` of the kernel, as `/proc/net/tcp` has it.
const LISTENS: &str = "0A";

/// The sign that Calico's agent runs in the calling thread's network namespace; `None` if there is none. Each container
/// on the host network sees the sockets of the node.
#[must_use]
pub fn running() -> Option<String> {
    let read = |file: &str| fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
    if ["tcp", "tcp6"].into_iter().any(|file| listens(&read(file), HEALTH_PORT)) {
        return Some(format!("a program listens on port {HEALTH_PORT}, where Felix reports its health"));
    }
    if let Some(path) = read("unix")
        .lines()
        .filter_map(|line| line.split_whitespace().nth(7))
        .find(|path| path.contains(BIRD))
    {
        return Some(format!("the socket {path} of Calico's BGP daemon is open"));
    }
    let own = fs::read_link("/proc/thread-self/ns/net").ok();
    // It is on the host network. A process whose namespace cannot be read may be there.
    let is_here = |process: &Path| {
        let its = fs::read_link(process.join("ns/net")).ok();
        own.as_ref().zip(its).is_none_or(|(own, its)| *own == its)
    };
    let sign = |process: PathBuf| {
        let name = fs::read_to_string(process.join("comm")).ok()?;
        let is_calicos = PROCESSES.contains(&name.trim()) && is_here(&process);
        is_calicos.then(|| format!("the process {} runs", name.trim()))
    };
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| sign(process.path()))
}

/// Whether a line of `/proc/net/tcp` is about a socket that listens on this port.
fn listens(lines: &str, port: u16) -> bool {
    let address = format!(":{port:04X}");
    lines.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, _remote, state) = (words.next(), words.next(), words.next());
        local.is_some_and(|local| local.ends_with(&address)) && state == Some(LISTENS)
    })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use tortie_kernel::namespace::NetNs;
    use tortie_kernel::route::{Change, LinkSetting, RouteSocket};

    use super::*;

    fn in_namespace(test: impl FnOnce() + Send) {
        let with_loopback = || {
            let index = tortie_kernel::interface_index("lo").unwrap();
            let up = Change::SetLink(index, vec![LinkSetting::Up(true)]);
            RouteSocket::open().unwrap().change(&up).unwrap();
            test();
        };
        NetNs::create().unwrap().run(with_loopback).unwrap();
    }

    #[test]
    fn felix_is_found_by_its_port() {
        in_namespace(|| {
            assert_eq!(running(), None);
            let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 9098)).unwrap();
            let felix = TcpListener::bind((Ipv4Addr::LOCALHOST, HEALTH_PORT)).unwrap();
            assert!(running().unwrap().contains("9099"));
            // A connection that remains is no sign.
            let _probe = TcpStream::connect(felix.local_addr().unwrap()).unwrap();
            drop((felix, other));
            assert_eq!(running(), None);
        });
    }

    /// Other nodes may run on the same machine, for instance in tests.
    #[test]
    fn its_process_is_found_in_the_network_namespace_of_the_node() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("calico-felix");
        std::fs::copy("/bin/sleep", &program).unwrap();
        in_namespace(|| {
            let mut felix = std::process::Command::new(&program).arg("60").spawn().unwrap();
            let here = running();
            let elsewhere = std::thread::scope(|scope| {
                let look = || NetNs::create().unwrap().run(running).unwrap();
                scope.spawn(look).join().unwrap()
            });
            felix.kill().unwrap();
            felix.wait().unwrap();
            assert!(here.unwrap().contains("calico-felix"));
            assert_eq!(elsewhere, None);
            assert_eq!(running(), None);
        });
    }

    #[test]
    fn the_bgp_daemon_is_found_by_its_socket() {
        in_namespace(|| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::create_dir(folder.path().join("calico")).unwrap();
            let _other = std::os::unix::net::UnixListener::bind(folder.path().join("bird.ctl")).unwrap();
            assert_eq!(running(), None);
            let socket = folder.path().join("calico/bird.ctl");
            let bird = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            assert!(running().unwrap().contains("bird.ctl"));
            drop(bird);
            assert_eq!(running(), None, "a file that an ended daemon has left is no sign");
        });
    }
}

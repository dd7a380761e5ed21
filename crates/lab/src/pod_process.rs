//! The process in a pod, because the lab has no images: a small HTTP server on each of the pod's ports, with a page
//! that names the pod.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

/// How long to wait for a client's request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves the pod `name` on these ports, prints `ready` on standard output, and runs until it is killed.
///
/// # Errors
/// A port cannot be listened on.
pub fn serve(name: &str, ports: &[u16]) -> io::Result<()> {
    for port in ports {
        let mut listeners = vec![TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port))?];
        if Path::new(IPV6).exists() {
            listeners.push(listen_v6(*port)?);
        }
        for listener in listeners {
            let page = page(name, *port);
            thread::Builder::new().name(format!("port-{port}")).spawn(move || accept(&listener, &page))?;
        }
    }
    writeln!(io::stdout(), "ready")?;
    loop {
        thread::park();
    }
}

/// The kernel has this file if it has IPv6.
const IPV6: &str = "/proc/net/if_inet6";

/// Listens for IPv6 only, because another socket listens for IPv4.
fn listen_v6(port: u16) -> io::Result<TcpListener> {
    let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_ipv6_v6only(&socket, true)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0))?;
    listen(&socket, 128)?;
    Ok(TcpListener::from(socket))
}

fn page(name: &str, port: u16) -> String {
    let body = format!("<html><body><h1>{name}</h1><p>pod {name}, port {port}</p></body></html>\n");
    let length = body.len();
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

fn accept(listener: &TcpListener, page: &str) {
    for stream in listener.incoming().flatten() {
        let page = page.to_owned();
        // A thread for each client, so that a slow client does not delay others.
        let _ = thread::Builder::new().spawn(move || answer(stream, &page));
    }
}

fn answer(stream: TcpStream, page: &str) -> io::Result<()> {
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    let mut request = BufReader::new(&stream);
    let mut line = String::new();
    while request.read_line(&mut line)? > 2 {
        line.clear();
    }
    (&stream).write_all(page.as_bytes())
}

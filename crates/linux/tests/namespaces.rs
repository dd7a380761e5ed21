//! Namespaces, packet sockets, offloads and kernel parameters, on the real kernel.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;

use tortie_linux::namespace::{NetNs, die_with_parent};
use tortie_linux::packet::PacketSocket;
use tortie_linux::{ethtool, sysctl};

#[test]
fn a_created_namespace_is_apart_and_has_a_loopback() {
    let (here, there) = (NetNs::current().unwrap(), NetNs::create().unwrap());
    assert_ne!(here.id().unwrap(), there.id().unwrap());
    let inside = there.run(|| NetNs::current().unwrap().id().unwrap()).unwrap();
    assert_eq!(inside, there.id().unwrap());
    assert_eq!(NetNs::current().unwrap().id().unwrap(), here.id().unwrap(), "the caller has not moved");

    let listener = there.run(|| TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    there.run(move || TcpStream::connect(address).unwrap()).unwrap();
    assert!(TcpStream::connect(address).is_err(), "the listener must be reachable only inside");
}

#[test]
fn a_bound_namespace_outlives_its_value() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("node");
    let id = {
        let namespace = NetNs::create().unwrap();
        namespace.bind_to(&path).unwrap();
        namespace.id().unwrap()
    };
    let again = NetNs::open(&path).unwrap();
    assert_eq!(again.id().unwrap(), id);
    assert!(again.bind_to(&path).is_err(), "a path in use is refused");
    NetNs::unbind(&path).unwrap();
    assert!(!path.exists());
}

#[test]
fn errors_name_the_object() {
    let error = NetNs::open(Path::new("/nowhere/netns")).unwrap_err().to_string();
    assert!(error.contains("/nowhere/netns"), "{error}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = NetNs::open(file.path()).unwrap().run(|| ()).unwrap_err().to_string();
    assert!(error.contains(file.path().to_str().unwrap()), "{error}");
    let error = sysctl::ensure("net/ipv4/no_such_parameter", "1").unwrap_err().to_string();
    assert!(error.contains("/proc/sys/net/ipv4/no_such_parameter"), "{error}");
    let error = ethtool::disable_offloads("no-such-link").unwrap_err().to_string();
    assert!(error.contains("no-such-link"), "{error}");
    let error = ethtool::disable_offloads("a-name-that-is-too-long").unwrap_err().to_string();
    assert!(error.contains("a-name-that-is-too-long"), "{error}");
}

#[test]
fn a_command_runs_inside_and_dies_with_the_thread_that_spawned_it() {
    let namespace = NetNs::create().unwrap();
    let mut command = Command::new("readlink");
    command.arg("/proc/self/ns/net");
    let output = namespace.enter_on_spawn(&mut command).unwrap().output().unwrap();
    let inside = String::from_utf8(output.stdout).unwrap();
    let outside = std::fs::read_link("/proc/self/ns/net").unwrap();
    assert!(inside.starts_with("net:["), "{inside}");
    assert_ne!(inside.trim(), outside.to_str().unwrap());

    let spawn = || die_with_parent(Command::new("sleep").arg("1000")).spawn().unwrap();
    let mut child = std::thread::spawn(spawn).join().unwrap();
    assert!(!child.wait().unwrap().success(), "it was killed when its thread ended");
}

#[test]
fn kernel_parameters_belong_to_the_namespace_of_the_thread() {
    let namespace = NetNs::create().unwrap();
    let name = "net/ipv4/conf/lo/rp_filter";
    let before = sysctl::read(name).unwrap();
    let other = if before == "2" { "1" } else { "2" };
    let changed =
        namespace.run(|| (sysctl::ensure(name, other).unwrap(), sysctl::ensure(name, other).unwrap()));
    assert_eq!(changed.unwrap(), (true, false), "only the first call changes something");
    assert_eq!(sysctl::read(name).unwrap(), before);
}

#[test]
fn a_packet_socket_gives_whole_frames_and_not_its_own() {
    let namespace = NetNs::create().unwrap();
    let (socket, sender) = namespace
        .run(|| {
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            (PacketSocket::open(1).unwrap(), sender)
        })
        .unwrap();
    let mut buffer = [0; 2048];
    assert_eq!(socket.receive(&mut buffer).unwrap(), None, "nothing waits");
    sender.send_to(b"meow", "127.0.0.1:9").unwrap();
    let length = socket.receive(&mut buffer).unwrap().expect("loopback delivers before send returns");
    assert_eq!(buffer[length - 4..length], *b"meow");

    sender.send_to(b"meow", "127.0.0.1:9").unwrap();
    while let Ok(Some(_)) = socket.receive(&mut buffer[..0]) {}
    let mut errors = 0;
    sender.send_to(b"meow", "127.0.0.1:9").unwrap();
    while let Some(result) = socket.receive(&mut buffer[..8]).transpose() {
        errors += usize::from(result.is_err_and(|error| error.raw_os_error() == Some(90)));
    }
    assert!(errors > 0, "a frame that does not fit is an error, not a short frame");
}

//! Namespaces, packet sockets, offloads and kernel parameters, on the real kernel.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tortie_api::net::MacAddress;
use tortie_kernel::namespace::{NetNs, die_with_parent};
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::*;
use tortie_kernel::{ethtool, interface_index, sysctl};

#[test]
fn a_created_namespace_is_separate_and_has_a_loopback() {
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
fn a_packet_socket_receives_whole_frames_except_its_own() {
    let namespace = NetNs::create().unwrap();
    let (socket, sender) = namespace
        .run(|| {
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            (PacketSocket::open(1).unwrap(), sender)
        })
        .unwrap();
    let mut buffer = [0; 2048];
    assert_eq!(socket.receive(&mut buffer).unwrap(), None, "nothing waits");
    // Each datagram is seen on its way out and on its way in, the latter possibly a moment later.
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut next = |room: usize| loop {
        match socket.receive(&mut buffer[..room]).transpose() {
            Some(received) => return received.map(|length| buffer[..length].to_vec()),
            None => assert!(Instant::now() < deadline, "no frame"),
        }
        std::thread::yield_now();
    };
    sender.send_to(b"meow", "127.0.0.1:9").unwrap();
    let frame = next(2048).unwrap();
    assert!(frame.ends_with(b"meow"), "{frame:?}");

    sender.send_to(b"meow", "127.0.0.1:9").unwrap();
    let error = next(8).expect_err("a frame that does not fit is no short frame");
    assert_eq!(error.raw_os_error(), Some(90));
}

/// Sends 200 kB of TCP from one namespace to the other, and returns whether a frame at a packet socket was longer
/// than the MTU, and whether one had a wrong checksum.
fn send_and_look(from: &NetNs, to: &NetNs, to_index: u32) -> (bool, bool) {
    let (socket, listener) = to
        .run(|| {
            let socket = PacketSocket::open(to_index).unwrap();
            socket.set_receive_buffer(8 << 20).unwrap();
            (socket, TcpListener::bind("10.0.0.2:0").unwrap())
        })
        .unwrap();
    let address = listener.local_addr().unwrap();
    let receiver = std::thread::spawn(move || {
        let mut received = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
        received.len()
    });
    let send = move || TcpStream::connect(address).unwrap().write_all(&[7; 200_000]).unwrap();
    from.run(send).unwrap();
    assert_eq!(receiver.join().unwrap(), 200_000);

    let (mut long, mut wrong, mut seen) = (false, false, 0);
    let mut buffer = vec![0; 70_000];
    while let Some(length) = socket.receive(&mut buffer).unwrap() {
        let frame = &buffer[..length];
        if length < 54 || frame[12..14] != [8, 0] || frame[23] != 6 {
            continue;
        }
        let segment = &frame[34..14 + usize::from(u16::from_be_bytes([frame[16], frame[17]]))];
        let pseudo = [&frame[26..34], &[0, 6], &(segment.len() as u16).to_be_bytes()[..], segment].concat();
        long |= length > 1514;
        wrong |= testkit::frames::checksum(&pseudo) != 0;
        seen += 1;
    }
    assert!(seen > 4, "{seen} frames");
    (long, wrong)
}

#[test]
fn without_offloads_frames_have_wire_size_and_checksums() {
    let namespaces = [NetNs::create().unwrap(), NetNs::create().unwrap()];
    let end = |last| ("eth0", MacAddress([2, 0, 0, 0, 0, last]));
    testkit::links::cable(&namespaces[0], end(1), &namespaces[1], end(2)).unwrap();
    let [near, far] =
        [0, 1].map(|end: usize| namespaces[end].run(|| interface_index("eth0").unwrap()).unwrap());
    for (namespace, link, last) in [(&namespaces[0], near, 1), (&namespaces[1], far, 2)] {
        let address = Address { link, address: Ipv4Addr::new(10, 0, 0, last).into(), prefix_length: 24 };
        namespace.run(|| RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap()).unwrap();
    }
    let [from, to] = &namespaces;
    assert_eq!(
        send_and_look(from, to, far),
        (true, true),
        "with offloads there are long and unfinished frames"
    );
    for namespace in [from, to] {
        namespace.run(|| ethtool::disable_offloads("eth0").unwrap()).unwrap();
        namespace.run(|| ethtool::disable_offloads("eth0").expect("doing it again changes nothing")).unwrap();
    }
    assert_eq!(send_and_look(from, to, far), (false, false));

    let vxlan = Vxlan { vni: 4096, port: 4789, local: None, learning: false };
    let create = || {
        RouteSocket::open().unwrap().create(&NewLink::new("vx", NewLinkKind::Vxlan(vxlan))).unwrap();
        ethtool::disable_offloads("vx").unwrap();
    };
    from.run(create).unwrap();
}

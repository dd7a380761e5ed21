//! Limits of pods' bandwidth, with real connections.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tortie_dataplane::*;

use crate::common::cluster::*;

#[test]
fn bandwidth_is_limited_in_each_direction() {
    /// The bytes of each connection.
    const SENT: usize = 1_500_000;
    // A bucket smaller than a packet would lose every packet; the wiring makes it larger.
    const LIMIT: BandwidthLimit = BandwidthLimit { bytes_per_second: 1_000_000, burst: Some(1_000) };
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    node.change(open_profile);
    let pod = Pod::new("pod", 1, 2);
    let limited =
        |ingress, egress| PodAttachment { limits: BandwidthLimits { ingress, egress }, ..pod.attachment() };
    node.add(&pod, open());
    for (ingress, egress) in
        [(None, None), (Some(LIMIT), None), (None, Some(LIMIT)), (Some(LIMIT), Some(LIMIT))]
    {
        let wanted = limited(ingress, egress);
        let connect = || {
            node.wiring.connect(&wanted).map(|interface| {
                node.wiring.wait_until_live(&interface, TIMEOUT);
                node.wiring.check(&wanted).unwrap();
            })
        };
        node.namespace.run(connect).unwrap().unwrap();
        // The link is another one, if the limits differ.
        assert_eq!(node.resync(), Report::default());
        for (limit, to_pod) in [(ingress, true), (egress, false)] {
            let server =
                pod.namespace.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap()).unwrap();
            let to = SocketAddr::from((pod.address, server.local_addr().unwrap().port()));
            let outside = node.namespace.run(|| TcpStream::connect_timeout(&to, TIMEOUT).unwrap()).unwrap();
            let (inside, _) = server.accept().unwrap();
            let (mut sender, mut receiver) = if to_pod { (outside, inside) } else { (inside, outside) };
            receiver.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let started = Instant::now();
            let sending = std::thread::spawn(move || sender.write_all(&[7; SENT]).unwrap());
            receiver.read_exact(&mut vec![0; SENT]).unwrap();
            sending.join().unwrap();
            let least = limit.map_or(Duration::ZERO, |_| Duration::from_millis(1_400));
            let (direction, took) = (if to_pod { "to the pod" } else { "from the pod" }, started.elapsed());
            assert!(took >= least, "{direction}: {SENT} bytes took {took:?}, with the limit {limit:?}");
        }
    }
    // What somebody else removed is reported.
    let wanted = limited(Some(LIMIT), Some(LIMIT));
    let other = limited(Some(BandwidthLimit { bytes_per_second: 2_000_000, ..LIMIT }), Some(LIMIT));
    node.namespace
        .run(|| {
            node.wiring.check(&wanted).unwrap();
            let problem = node.wiring.check(&other).unwrap_err().to_string();
            assert!(problem.contains("does not limit what the pod receives"), "{problem}");
        })
        .unwrap();
}

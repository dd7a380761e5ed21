//! The sockets at which a speaker listens.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use super::{Config, Speaker};

fn config(listen: &[SocketAddr]) -> Config {
    Config { identifier: Ipv4Addr::new(192, 0, 2, 1), listen: listen.to_vec(), peers: BTreeMap::new() }
}

/// An address at which nobody listens.
fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The task that accepts connections has the socket open, too.
#[tokio::test]
async fn another_speaker_can_listen_when_the_first_has_shut_down() {
    let address = free();
    for _ in 0..50 {
        let (speaker, _events, _) = Speaker::start(config(&[address]), None).await.unwrap();
        speaker.shut_down("bye").await.unwrap();
    }
}

#[tokio::test]
async fn a_speaker_can_listen_at_one_address_after_it_has_listened_at_all() {
    let one = free();
    let all = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), one.port());
    let (speaker, _events, _) = Speaker::start(config(&[all]), None).await.unwrap();
    for _ in 0..20 {
        for address in [one, all] {
            speaker.apply(config(&[address])).await.unwrap();
        }
    }
}

#[tokio::test]
async fn an_address_of_another_program_does_not_keep_the_speaker_from_the_others() {
    let others = TcpListener::bind("127.0.0.1:0").unwrap();
    let used = others.local_addr().unwrap();
    let [first, second] = [free(), free()];
    let (speaker, _events, _) = Speaker::start(config(&[first]), None).await.unwrap();
    let error = speaker.apply(config(&[first, used, second])).await.unwrap_err();
    assert!(error.to_string().contains(&used.to_string()), "{error}");
    for address in [first, second] {
        TcpStream::connect(address).unwrap();
    }
    // A speaker that cannot start leaves no address occupied.
    speaker.shut_down("").await.unwrap();
    for _ in 0..20 {
        assert!(Speaker::start(config(&[first, used]), None).await.is_err());
        TcpListener::bind(first).unwrap();
    }
}

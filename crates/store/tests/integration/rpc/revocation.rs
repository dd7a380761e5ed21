//! Certificates that the authority has revoked.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tortie_api::Kind;
use tortie_store::rpc::{Limits, Remote, ServerIdentity, TlsIdentity, node_subject, serve_tls};
use tortie_store::{Embedded, Interest, Source, Store, StoreError};

use crate::common::{Authority, answering, free_address, revocation_list};

/// A service that follows a list.
async fn serve(authority: &Authority, list: PathBuf) -> SocketAddr {
    let (address, store) = (free_address(), Arc::new(Embedded::in_memory().unwrap()));
    let identity = ServerIdentity::from(authority.server()).with_revoked(Some(list));
    tokio::spawn(serve_tls(store, address, identity, Limits::default()));
    answering(connect(address, authority.operator())).await;
    address
}

fn connect(address: SocketAddr, identity: TlsIdentity) -> Remote {
    Remote::tls(&address.to_string(), identity).unwrap()
}

async fn is_refused(address: SocketAddr, identity: &TlsIdentity) -> bool {
    let listed = connect(address, identity.clone()).list(Kind::Pod).await;
    assert!(matches!(listed, Ok(_) | Err(StoreError::Unavailable(_))), "{listed:?}");
    listed.is_err()
}

async fn until_refused(address: SocketAddr, identity: &TlsIdentity) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_refused(address, identity).await {
        assert!(Instant::now() < deadline, "the certificate is not refused");
    }
}

fn write(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_certificate_ends_its_connections_and_gets_no_new_ones() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let list = dir.path().join("authority.crl");
    let [lost, kept] = ["lost", "kept"].map(|node| authority.issue(node_subject(node)));
    write(&list, &revocation_list(&authority, &[]));
    let address = serve(&authority, list.clone()).await;
    let (of_lost, of_kept) = (connect(address, lost.clone()), connect(address, kept.clone()));
    let position = of_lost.list(Kind::Pod).await.unwrap().position;
    let mut open = of_lost.watch(&[Interest::all(Kind::Pod)], position).await.unwrap();
    of_kept.list(Kind::Pod).await.unwrap();

    write(&list, &revocation_list(&authority, &[&lost]));
    // Nobody connects, and nothing is sent: the service looks at its list by itself.
    let ended = async { while let Some(Ok(_)) = open.next().await {} };
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("the watch ends");
    until_refused(address, &lost).await;
    of_kept.list(Kind::Pod).await.unwrap();
    assert!(!is_refused(address, &kept).await && !is_refused(address, &authority.operator()).await);

    // What cannot be read, or what a stranger has signed, takes nothing back.
    for text in ["", "garbage", &revocation_list(&Authority::new(), &[])] {
        write(&list, text);
        assert!(is_refused(address, &lost).await, "{text}");
        assert!(!is_refused(address, &kept).await, "{text}");
    }
    std::fs::remove_file(&list).unwrap();
    assert!(is_refused(address, &lost).await);
    // A renewed certificate is another one.
    assert!(!is_refused(address, &authority.issue(node_subject("lost"))).await);
    write(&list, &revocation_list(&authority, &[]));
    answering(connect(address, lost)).await;
}

/// Whoever has the key of an authority in between makes any number of certificates.
#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_authority_in_between_revokes_all_that_it_has_issued() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let list = dir.path().join("authority.crl");
    let (intermediate, of_intermediate) = authority.intermediate();
    let node = intermediate.issue(node_subject("one"));
    let node = TlsIdentity {
        authority: of_intermediate.authority.clone(),
        certificate: node.certificate + &of_intermediate.certificate,
        ..node
    };
    write(&list, &revocation_list(&authority, &[]));
    let address = serve(&authority, list.clone()).await;
    answering(connect(address, node.clone())).await;
    write(&list, &revocation_list(&authority, &[&of_intermediate]));
    until_refused(address, &node).await;
    assert!(!is_refused(address, &authority.issue(node_subject("two"))).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_does_not_start_without_its_list() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let list = dir.path().join("authority.crl");
    let of_another = revocation_list(&Authority::new(), &[]);
    for (text, expected) in [
        (None, "No such file"),
        (Some("garbage"), "no list of revoked"),
        (Some(&*of_another), "has not signed"),
    ] {
        text.into_iter().for_each(|text| write(&list, text));
        let store: Arc<dyn Source> = Arc::new(Embedded::in_memory().unwrap());
        let identity = ServerIdentity::from(authority.server()).with_revoked(Some(list.clone()));
        let error = serve_tls(store, free_address(), identity, Limits::default()).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{text:?}: {error}");
        assert!(error.to_string().contains("authority.crl"), "{error}");
    }
}

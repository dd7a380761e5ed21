//! Strangers and clients that do not read cannot take the service away from others.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::Endpoint;
use tortie_api::{Key, Kind, Position};
use tortie_store::rpc::{Limits, Remote, TlsFiles, TlsIdentity, node_subject, serve_unix};
use tortie_store::{Event, Interest, Source, Store, StoreError, Write};

use crate::common::{Served, answering};

const FOR_EVER: Duration = Duration::from_secs(600);

fn limits() -> Limits {
    Limits { handshake_timeout: FOR_EVER, write_timeout: FOR_EVER, ..Limits::default() }
}

/// Whether the service ends the connection, which has not sent anything.
async fn is_closed(stream: &mut TcpStream) -> bool {
    stream.read_u8().await.is_err()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_say_who_it_is_is_disconnected() {
    let handshake_timeout = Duration::from_millis(100);
    let served = Served::new(Limits { handshake_timeout, ..limits() }).await;
    let mut silent = TcpStream::connect(served.address).await.unwrap();
    assert!(is_closed(&mut silent).await);
}

/// The newest strangers replace the oldest, so a client that proves who it is gets through.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_replace_only_strangers() {
    let served = Served::new(Limits { handshakes: 4, ..limits() }).await;
    let before = served.client(served.authority.operator());
    before.list(Kind::Pod).await.unwrap();
    let mut strangers = Vec::new();
    for _ in 0..100 {
        strangers.push(TcpStream::connect(served.address).await.unwrap());
    }
    let newest = strangers.split_off(96);
    for mut stranger in strangers {
        assert!(is_closed(&mut stranger).await);
    }
    served.client(served.authority.operator()).list(Kind::Pod).await.unwrap();
    before.list(Kind::Pod).await.unwrap();
    drop(newest);
}

/// When TCP is exhausted, operators still have the Unix socket.
#[tokio::test(flavor = "multi_thread")]
async fn connections_are_limited_on_tcp_only() {
    let served = Served::new(Limits { connections: 4, ..limits() }).await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    tokio::spawn({
        let (store, socket) = (served.store.clone(), socket.clone());
        async move { serve_unix(store, &socket).await }
    });
    answering(Remote::unix(&socket)).await;
    let node = served.authority.issue(node_subject("a"));
    let mut clients = Vec::new();
    let refused = loop {
        let client = served.client(node.clone());
        match client.list(Kind::Pod).await {
            Ok(_) => clients.push(client),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    assert_eq!(clients.len(), 4);
    Remote::unix(&socket).list(Kind::Pod).await.unwrap();
    for client in &clients {
        client.list(Kind::Pod).await.unwrap();
    }
    drop(clients);
    answering(served.client(node)).await;
}

/// One client cannot take all connections from others.
#[tokio::test(flavor = "multi_thread")]
async fn connections_of_one_client_are_limited() {
    let served = Served::new(Limits { connections_of_client: 3, ..limits() }).await;
    let greedy = served.authority.issue(node_subject("greedy"));
    let mut clients = Vec::new();
    let refused = loop {
        let client = served.client(greedy.clone());
        match client.list(Kind::Pod).await {
            Ok(_) => clients.push(client),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    assert_eq!(clients.len(), 3);
    served.client(served.authority.issue(node_subject("other"))).list(Kind::Pod).await.unwrap();
    drop(clients);
    answering(served.client(greedy)).await;
}

fn write(files: &TlsFiles, identity: &TlsIdentity) {
    std::fs::write(&files.authority, &identity.authority).unwrap();
    std::fs::write(&files.certificate, &identity.certificate).unwrap();
    std::fs::write(&files.key, &identity.key).unwrap();
}

/// Both sides use renewed certificates for new connections, and keep the old ones while the files do not fit together.
#[tokio::test(flavor = "multi_thread")]
async fn renewed_certificates_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let files = |name: &str| {
        let file = |what: &str| dir.path().join(format!("{name}-{what}.pem"));
        TlsFiles { authority: file("authority"), certificate: file("certificate"), key: file("key") }
    };
    let (of_server, of_client) = (files("server"), files("client"));
    let (first, second) = (crate::common::Authority::new(), crate::common::Authority::new());
    write(&of_server, &first.server());
    write(&of_client, &first.operator());
    let store = Arc::new(tortie_store::Embedded::in_memory().unwrap());
    let address = crate::common::free_address();
    let certificates = of_server.clone().into();
    tokio::spawn(tortie_store::rpc::serve_tls(store, address, certificates, limits()));
    let connect = || Remote::tls(&address.to_string(), of_client.clone()).unwrap();
    answering(connect()).await;
    let connected = connect();
    connected.list(Kind::Pod).await.unwrap();

    // Half of the new files.
    let renewed = second.server();
    std::fs::write(&of_server.certificate, &renewed.certificate).unwrap();
    connect().list(Kind::Pod).await.unwrap();
    std::fs::remove_file(&of_server.key).unwrap();
    connect().list(Kind::Pod).await.unwrap();

    write(&of_server, &renewed);
    let old = connect();
    let refused = old.list(Kind::Pod).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    connected.list(Kind::Pod).await.unwrap();
    write(&of_client, &second.operator());
    // The same client, at its next attempt to connect.
    answering(old).await;
}

#[derive(Clone, PartialEq, prost::Message)]
struct GetRequest {
    #[prost(message, optional, tag = "1")]
    key: Option<ObjectKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ObjectKey {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "3")]
    name: String,
}

/// A client that allows the service to send as much as it likes, and then takes nothing. Its connection is the only one
/// that the service allows, so another client gets through when it has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_takes_nothing_ends() {
    /// More than the kernel keeps for a client that takes nothing: up to 4 MiB at the service, and little at the client.
    const OBJECT_BYTES: usize = 12 << 20;
    let write_timeout = Duration::from_millis(200);
    let served = Served::new(Limits { write_timeout, connections: 1, ..limits() }).await;
    let key = Key::global(Kind::Namespace, "n");
    served.store.create(&key, json!("x".repeat(OBJECT_BYTES))).await.unwrap();

    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = relay.local_addr().unwrap();
    let tls = TlsConnector::from(Arc::new(crate::common::tls_client(&served.authority.operator())));
    let endpoint = Endpoint::from_static("http://store").initial_stream_window_size(1 << 30);
    let connector = tower::service_fn(move |_| {
        let tls = tls.clone();
        async move {
            let stream = TcpStream::connect(address).await?;
            let name = ServerName::try_from("tortie-store").unwrap();
            Ok::<_, std::io::Error>(TokioIo::new(tls.connect(name, stream).await?))
        }
    });
    let endpoint = endpoint.initial_connection_window_size(1 << 30);
    let mut client = tonic::client::Grpc::new(endpoint.connect_with_connector_lazy(connector))
        .max_decoding_message_size(usize::MAX);
    let asking = tokio::spawn(async move {
        client.ready().await.unwrap();
        let key = ObjectKey { kind: Kind::Namespace.plural().to_owned(), name: "n".to_owned() };
        let path = http::uri::PathAndQuery::from_static("/tortie.store.v1.Store/Get");
        let codec = tonic_prost::ProstCodec::<GetRequest, ()>::default();
        client.unary(tonic::Request::new(GetRequest { key: Some(key) }), path, codec).await
    });

    let (near, _) = relay.accept().await.unwrap();
    let far = TcpSocket::new_v4().unwrap();
    far.set_recv_buffer_size(1 << 16).unwrap();
    let far = far.connect(served.address).await.unwrap();
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = far.into_split();
    tokio::spawn(async move { tokio::io::copy(&mut near_read, &mut far_write).await });
    let (mut buffer, mut taken) = (vec![0; 1 << 16], 0);
    while taken < 1 << 20 {
        let count = far_read.read(&mut buffer).await.unwrap();
        assert!(count > 0, "the service sends the object");
        near_write.write_all(&buffer[..count]).await.unwrap();
        taken += count;
    }
    answering(served.client(served.authority.operator())).await;
    asking.abort();
}

/// The writes before an object that is too large are executed, and the answer names it. The limits of messages hold before they are decoded,
/// so a client without rights gets its answer without a look at what it sends.
#[tokio::test(flavor = "multi_thread")]
async fn objects_and_messages_have_limits() {
    const LIMIT: usize = 3 << 19;
    let served = Served::new(limits()).await;
    let operator = served.client(served.authority.operator());
    let node = served.client(served.authority.issue(node_subject("a")));
    let stranger = served.client(served.authority.issue(("", "nobody".to_owned())));
    let handle = |name: &str| Key::global(Kind::IpamHandle, name);
    let text = |bytes: usize| json!("x".repeat(bytes - 2));
    let create = |name: &str, bytes: usize| Write::Create(handle(name), text(bytes));

    for (client, name) in [(&operator, "o"), (&node, "n")] {
        let [first, second, third] = ["1", "2", "3"].map(|number| format!("{name}{number}"));
        let writes = vec![create(&first, LIMIT), create(&second, LIMIT + 1), create(&third, 10)];
        let stopped = client.write_all(writes).await.unwrap_err();
        assert_eq!(stopped.done.len(), 1);
        let StoreError::Invalid { key, problem } = stopped.error else { panic!("{:?}", stopped.error) };
        assert_eq!(key, handle(&second));
        assert!(problem.contains("1572865 bytes") && problem.contains("may have 1572864"), "{problem}");
        assert!(client.get(&handle(&third)).await.unwrap().is_none(), "what follows is not executed");
    }
    let many = |name: &str| (0..20).map(|number| create(&format!("{name}{number}"), LIMIT)).collect();
    assert_eq!(operator.write_all(many("many-o")).await.unwrap().len(), 20);
    let stopped = node.write_all(many("many-n")).await.unwrap_err();
    assert!(stopped.error.to_string().contains("too large"), "{}", stopped.error);
    assert!(node.get(&handle("many-n0")).await.unwrap().is_none());
    let stopped = stranger.write_all(many("many-s")).await.unwrap_err();
    assert!(matches!(stopped.error, StoreError::Forbidden(_)), "{}", stopped.error);
}

/// Watchers that are behind by a burst get all of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_ends_no_watch() {
    const WRITES: usize = 20_000;
    let served = Served::new(limits()).await;
    let node = served.authority.issue(node_subject("a"));
    let mut watches = Vec::new();
    for _ in 0..5 {
        let client = served.client(node.clone());
        watches.push(client.watch(&[Interest::all(Kind::Namespace)], Position(0)).await.unwrap());
    }
    let name = |number| Key::global(Kind::Namespace, format!("n{number}"));
    let writes = (0..WRITES).map(|number| Write::Create(name(number), json!(number)));
    served.store.write_all(writes.collect()).await.unwrap();
    for mut watch in watches {
        let mut seen = 0;
        while seen < WRITES {
            if let Event::Put(stored) = watch.next().await.unwrap().unwrap() {
                assert_eq!(stored.value, json!(seen));
                seen += 1;
            }
        }
    }
}

/// Nodes leave room for the controllers, and these for operators, who mend a full store.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_fill_a_store_less_than_controllers_and_operators() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), crate::common::Authority::new());
    let path = dir.path().join("store");
    tortie_store::Embedded::init(&path, None).unwrap();
    let store = Arc::new(tortie_store::Embedded::open_with_quota(&path, 10_000).unwrap());
    let address = crate::common::free_address();
    tokio::spawn(tortie_store::rpc::serve_tls(store, address, authority.server().into(), limits()));
    let client = |subject| Remote::tls(&address.to_string(), authority.issue(subject)).unwrap();
    let (controllers, operator) = (
        client(tortie_store::rpc::controllers_subject()),
        client(tortie_store::rpc::operator_subject("ann")),
    );
    let operator = answering(operator).await;
    let of_size = |name: &str, bytes: usize| json!({"metadata": {"name": name, "note": "x".repeat(bytes)}});
    let create = async |store: &dyn Store, name: &str, bytes| {
        store.create(&Key::global(Kind::IpamHandle, name), of_size(name, bytes)).await
    };
    create(&*operator, "first", 7_000).await.unwrap();
    let refused = create(&client(node_subject("one")), "one", 1_500).await;
    let is_full = |refused: &Result<_, StoreError>| matches!(refused, Err(StoreError::Full { problem, .. }) if problem.contains("the store is full"));
    assert!(is_full(&refused), "{refused:?}");
    create(&client(node_subject("one")), "one", 100).await.unwrap();
    create(&controllers, "two", 1_200).await.unwrap();
    let refused = create(&controllers, "three", 1_000).await;
    assert!(is_full(&refused), "{refused:?}");
    create(&*operator, "three", 1_000).await.unwrap();
    operator.delete(&Key::global(Kind::IpamHandle, "first"), None).await.unwrap();
    create(&client(node_subject("four")), "four", 1_500).await.unwrap();
}

//! Every cell of the table of roles, kinds and verbs, through real connections with mutual TLS.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Position};
use tortie_store::rpc::{Limits, Remote, TlsIdentity, controllers_subject, node_subject};
use tortie_store::{Interest, Source, Stopped, Store, StoreError, Version, Write};

use crate::common::{Authority, Served, tls_client_without_certificate};

/// What is allowed: g(et), l(ist), w(atch), b(arrier), c(reate), u(pdate), d(elete). Columns: node `one` on objects of
/// its own, on objects of others, the controllers. An operator may do everything. Written by hand, not derived from the
/// program.
const EXPECTED: &str = include_str!("roles.txt");
const VERBS: &str = "glwbcud";

/// An object of the node, where objects of the kind belong to nodes.
fn object(kind: Kind, node: &str) -> (Key, Value) {
    let name = match kind {
        Kind::Node | Kind::NodeReport => node.to_owned(),
        Kind::WorkloadEndpoint => WorkloadEndpoint::name_for(node, "p", "eth0"),
        Kind::BlockAffinity => format!("{node}/10.0.0.0/26"),
        Kind::IpamBlock if node == "one" => "10.0.0.0/26".to_owned(),
        Kind::IpamBlock => "10.0.1.0/26".to_owned(),
        _ => format!("some-{node}"),
    };
    let key = match kind.namespaced() {
        true => Key::namespaced(kind, "default", name),
        false => Key::global(kind, name),
    };
    (key, json!({"metadata": {"name": "n"}, "spec": {"node": node}, "affinity": format!("host:{node}")}))
}

fn is_forbidden<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Forbidden(_)))
}

/// Tries a verb; returns whether it was allowed. Everything is undone.
async fn is_allowed(served: &Served, client: &Remote, kind: Kind, node: &str, verb: char) -> bool {
    let (key, value) = object(kind, node);
    let interest = if node == "one" { Interest::of_node(kind, node) } else { Interest::all(kind) };
    let stored = match verb {
        'c' => None,
        _ => Some(served.store.create(&key, value.clone()).await.unwrap()),
    };
    let version = stored.as_ref().map_or(Version::new("0"), |stored| stored.version.clone());
    let changed = json!({"changed": true, "spec": value["spec"], "affinity": value["affinity"]});
    let result = match verb {
        'g' => client.get(&key).await.map(|stored| assert!(stored.is_some())),
        'l' => client
            .list_page(&interest, None)
            .await
            .map(|page| assert!(node == "one" || !page.items.is_empty())),
        'w' => client.watch(&[interest], Position(0)).await.map(drop),
        'b' => client.barrier(&[kind]).await.map(|positions| assert!(positions.of(kind).is_some())),
        'c' => client.create(&key, value.clone()).await.map(drop),
        'u' => client.update(&key, changed.clone(), &version).await.map(drop),
        'd' => client.delete(&key, Some(&version)).await.map(drop),
        _ => unreachable!(),
    };
    assert!(result.is_ok() || is_forbidden(&result), "{verb} {key}: {result:?}");
    let after = served.store.get(&key).await.unwrap().map(|stored| stored.value);
    let expected = match (verb, result.is_ok()) {
        ('c', false) | ('d', true) => None,
        ('u', true) => Some(changed),
        _ => Some(value),
    };
    assert_eq!(after, expected, "{verb} {key}: {result:?}");
    let _ = served.store.delete(&key, None).await;
    if let Err(StoreError::Forbidden(text)) = &result {
        let verb = ["get", "list", "watch", "create", "update", "delete"]
            .into_iter()
            .find(|name| text.contains(name));
        // What a client without a role asks for is not even decoded.
        let has_no_role = text.contains("may do nothing: it names no role");
        assert!(
            has_no_role
                || verb.is_some()
                    && text.contains("may not")
                    && (text.contains(kind.plural()) || text.contains(&kind.to_string())),
            "{text}"
        );
    }
    result.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_role_may_do_what_the_table_says() {
    let served = Served::new(Limits::default()).await;
    let node = served.client(served.authority.issue(node_subject("one")));
    let controllers = served.client(served.authority.issue(controllers_subject()));
    let operator = served.client(served.authority.operator());
    let no_role = served.client(served.authority.issue(("", "one".to_owned())));
    let mut kinds = BTreeSet::new();
    let mut wrong = Vec::new();
    for line in EXPECTED.lines().filter(|line| !line.trim().is_empty()) {
        let cells: Vec<&str> = line.split_whitespace().collect();
        let [plural, own, other, of_controllers] = cells[..] else { panic!("{line}") };
        let kind = Kind::all().find(|kind| kind.plural().split('.').next() == Some(plural));
        let kind = kind.unwrap_or_else(|| panic!("{plural}"));
        kinds.insert(kind);
        for (who, client, node, expected) in [
            ("node, own", &node, "one", own),
            ("node, other", &node, "one-more", other),
            ("controllers", &controllers, "one-more", of_controllers),
            ("operator", &operator, "one-more", VERBS),
            ("no role", &no_role, "one-more", "-------"),
        ] {
            for verb in VERBS.chars() {
                let allowed = is_allowed(&served, client, kind, node, verb).await;
                if allowed != expected.contains(verb) {
                    wrong.push(format!("{who}: {verb} {plural}: {allowed}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(kinds, Kind::all().collect(), "every kind is in the table");
}

/// A node's objects are told apart by exact names, and their values must name the same node.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_writes_only_what_names_it_as_its_own() {
    let served = Served::new(Limits::default()).await;
    let client = |name: &str| served.client(served.authority.issue(node_subject(name)));
    let endpoint =
        |node| Key::namespaced(Kind::WorkloadEndpoint, "n", WorkloadEndpoint::name_for(node, "p", "eth0"));
    let (affinity, block) = ("n/10.0.0.0/26", "10.0.0.0/26");
    let table = [
        ("a", endpoint("a"), json!({"spec": {"node": "a"}}), true),
        ("a", endpoint("a"), json!({"spec": {"node": "b"}}), false),
        ("a", endpoint("a"), json!({}), false),
        ("a", endpoint("a-b"), json!({"spec": {"node": "a"}}), false),
        ("a-b", endpoint("a-b"), json!({"spec": {"node": "a-b"}}), true),
        ("a", endpoint("ab"), json!({"spec": {"node": "a"}}), false),
        ("a", Key::namespaced(Kind::WorkloadEndpoint, "n", "a"), json!({"spec": {"node": "a"}}), false),
        ("n", Key::global(Kind::BlockAffinity, affinity), json!({}), true),
        ("n/10.0.0.0", Key::global(Kind::BlockAffinity, affinity), json!({}), false),
        ("n", Key::global(Kind::BlockAffinity, "n-2/10.0.0.0/26"), json!({}), false),
        ("n", Key::global(Kind::BlockAffinity, "n"), json!({}), false),
        ("a", Key::global(Kind::IpamBlock, block), json!({"affinity": "host:a"}), true),
        ("a", Key::global(Kind::IpamBlock, block), json!({"affinity": "host:b"}), false),
        ("a", Key::global(Kind::IpamBlock, block), json!({"affinity": "a"}), false),
        ("a", Key::global(Kind::IpamBlock, block), json!({}), false),
        ("a", Key::global(Kind::NodeReport, "A"), json!({}), false),
    ];
    for (node, key, value, expected) in table {
        let result = client(node).create(&key, value.clone()).await;
        assert_eq!(result.is_ok(), expected, "{node} {key} {value}: {result:?}");
        assert!(expected || is_forbidden(&result), "{result:?}");
        let _ = served.store.delete(&key, None).await;
    }
    let text = client("a").delete(&Key::global(Kind::GlobalNetworkPolicy, "g"), None).await.unwrap_err();
    assert_eq!(
        text.to_string(),
        "no permission: node a may not delete GlobalNetworkPolicy g: this role has no such right on \
         globalnetworkpolicies.crd.projectcalico.org; use the certificate of an operator"
            .replace("globalnetworkpolicies.crd.projectcalico.org", Kind::GlobalNetworkPolicy.plural())
    );
}

/// As the first rejected write of a sequence: those before it are done, those after it are not tried.
#[tokio::test(flavor = "multi_thread")]
async fn a_forbidden_write_ends_a_sequence() {
    let served = Served::new(Limits::default()).await;
    let node = served.client(served.authority.issue(node_subject("a")));
    let handle = |name: &str| Write::Create(Key::global(Kind::IpamHandle, name), json!({}));
    let forbidden = || Write::Delete(Key::global(Kind::Node, "b"), None);
    served.store.create(&Key::global(Kind::Node, "b"), json!({})).await.unwrap();
    served.store.create(&Key::global(Kind::IpamHandle, "there"), json!({})).await.unwrap();
    for (writes, expected) in [
        (vec![handle("1"), handle("2"), forbidden(), handle("3")], 2),
        (vec![forbidden(), handle("4")], 0),
        (vec![forbidden(), forbidden()], 0),
    ] {
        let Err(Stopped { done, error }) = node.write_all(writes).await else { panic!("it is forbidden") };
        assert!(matches!(error, StoreError::Forbidden(_)), "{error}");
        assert_eq!(done.len(), expected);
    }
    let Err(stopped) = node.write_all(vec![handle("there"), forbidden()]).await else { panic!("it exists") };
    assert!(matches!(stopped.error, StoreError::AlreadyExists(_)), "{stopped}");
    let names: Vec<_> =
        served.store.list(Kind::IpamHandle).await.unwrap().items.into_iter().map(|it| it.key.name).collect();
    assert_eq!(names, ["1", "2", "there"]);
    assert!(served.store.get(&Key::global(Kind::Node, "b")).await.unwrap().is_some());
}

/// One watch for several kinds, one of which is forbidden, gives nothing; a barrier leaves it out.
#[tokio::test(flavor = "multi_thread")]
async fn a_forbidden_kind_among_others() {
    let served = Served::new(Limits::default()).await;
    let node = served.client(served.authority.issue(node_subject("a")));
    let kinds = [Kind::Namespace, Kind::StagedNetworkPolicy];
    let watched = node.watch(&kinds.map(Interest::all), Position(0)).await.map(drop);
    assert!(is_forbidden(&watched), "{watched:?}");
    let positions = node.barrier(&kinds).await.unwrap();
    assert!(positions.of(kinds[0]).is_some() && positions.of(kinds[1]).is_none(), "{positions}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_valid_certificates_of_the_authority_are_accepted() {
    let served = Served::new(Limits::default()).await;
    let operator = tortie_store::rpc::operator_subject("ann");
    let year = |year| rcgen::date_time_ymd(year, 1, 1);
    let trusting =
        |identity: TlsIdentity| TlsIdentity { authority: served.authority.operator().authority, ..identity };
    let valid = served.authority.issue_with(operator.clone(), |params| {
        (params.not_before, params.not_after) = (year(2000), year(2100));
    });
    let expired = served.authority.issue_with(operator.clone(), |params| {
        (params.not_before, params.not_after) = (year(2000), year(2001));
    });
    let future = served.authority.issue_with(operator.clone(), |params| {
        (params.not_before, params.not_after) = (year(2099), year(2100));
    });
    let for_servers = served.authority.issue_with(operator.clone(), |params| {
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    });
    let of_another_authority = trusting(Authority::new().operator());
    for (what, identity, expected) in [
        ("valid", valid, true),
        ("expired", expired, false),
        ("not valid yet", future, false),
        ("of another authority", of_another_authority, false),
        ("only for servers", for_servers, false),
    ] {
        let result = served.client(identity).list(Kind::Pod).await;
        assert_eq!(result.is_ok(), expected, "{what}: {result:?}");
        assert!(expected || matches!(result, Err(StoreError::Unavailable(_))), "{what}: {result:?}");
    }
}

/// Bytes without TLS, and TLS without a client's certificate: both connections end without an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_certificate_is_disconnected() {
    /// The beginning of a connection with HTTP/2.
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

    let served = Served::new(Limits::default()).await;
    let mut plain = tokio::net::TcpStream::connect(served.address).await.unwrap();
    plain.write_all(PREFACE).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.windows(3).any(|bytes| bytes == [0, 0, 4]), "no settings of HTTP/2: {answer:?}");

    let config = tls_client_without_certificate(&served.authority.operator());
    let stream = tokio::net::TcpStream::connect(served.address).await.unwrap();
    let name = ServerName::try_from("tortie-store").unwrap();
    let read = async {
        let mut tls = TlsConnector::from(std::sync::Arc::new(config)).connect(name, stream).await?;
        tls.write_all(PREFACE).await?;
        tls.read_u8().await
    };
    let error = read.await.expect_err("the service sends nothing to a client without a certificate");
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
}

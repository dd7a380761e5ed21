//! What etcd, the embedded store's file and service, and their clients send.

use tortie_store::rpc::{CertificateId, RevocationList};
use tortie_store::{Event, Interest, StorageForm, parsers};

use crate::input::{Input, same};

/// A key of etcd: a byte for the kind, and the key. An object has one key.
pub fn etcd_key(bytes: &[u8]) {
    let mut input = Input(bytes);
    let kind = input.kind();
    if let Some((key, written)) = parsers::etcd_key(kind, input.0) {
        assert_eq!(written.as_bytes(), input.0, "{key:?}");
    }
}

/// A value of etcd: a byte for the kind, and the text. What is read can be written, and is then read as before, except that objects of Calico
/// get Calico's form. What has that form keeps it.
pub fn etcd_value(bytes: &[u8]) {
    let mut input = Input(bytes);
    let key = input.key(&serde_json::Value::Null);
    let rewritten =
        |value: &serde_json::Value| parsers::etcd_value(&key, &parsers::etcd_text(&key, value.clone()));
    let mut expected = parsers::etcd_value(&key, input.0);
    if StorageForm::Calico.has_identities(key.kind) {
        expected = rewritten(&expected);
    }
    let again = rewritten(&expected);
    assert!(same(&again, &expected), "{key}: {again} {expected}");
}

/// An answer of etcd: a byte for the kind, and the message.
pub fn etcd_answer(bytes: &[u8]) {
    let mut input = Input(bytes);
    let kind = input.kind();
    for event in parsers::etcd_answer(&Interest::all(kind), input.0).into_iter().flatten() {
        if let Event::Put(stored) = event {
            assert_eq!(stored.key.kind, kind);
        }
    }
}

/// A record of the embedded store's file: a byte for the kind, and the record. Because of its checksum, the bytes are also taken as the JSON of an
/// intact one.
pub fn embedded_record(bytes: &[u8]) {
    let mut input = Input(bytes);
    let key = input.key(&serde_json::Value::Null);
    let _ = parsers::embedded_record(key.clone(), input.0);
    let Some(value) = input.json() else { return };
    let mut stored = parsers::embedded_record(key.clone(), &[]);
    stored.value = value;
    let record = parsers::embedded_text(&stored);
    let again = parsers::embedded_record(key, &record).value;
    assert!(same(&again, &stored.value), "{again} {}", stored.value);
}

/// An event of the embedded store's service. What is read can be written, and is then read as before.
pub fn service_event(bytes: &[u8]) {
    let Ok(event) = parsers::service_event(bytes) else { return };
    let written = parsers::service_bytes(event.clone());
    let again = parsers::service_event(&written).unwrap_or_else(|error| panic!("{error}: {written:?}"));
    match (again, event) {
        (Event::Put(again), Event::Put(stored)) => {
            assert!(same(&again.value, &stored.value), "{again:?} {stored:?}");
            assert_eq!(
                (again.key, again.version, again.position),
                (stored.key, stored.version, stored.position)
            );
        }
        (again, event) => assert_eq!(again, event),
    }
}

/// A request or an answer of the embedded store's service.
pub fn service_message(bytes: &[u8]) {
    let _ = parsers::service_message(bytes);
}

/// The certificate of a client.
pub fn certificate(bytes: &[u8]) {
    let _ = parsers::certificate(bytes);
}

/// A list of revoked certificates, or a certificate, and the certificates of authorities, all in PEM. The first ends with NUL.
pub fn revocation_list(bytes: &[u8]) {
    let mut input = Input(bytes);
    let (text, authorities) = (input.text(), input.text());
    let _ = (RevocationList::parse(text, authorities), CertificateId::of_pem(text, authorities));
}

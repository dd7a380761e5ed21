//! The parsers of what runtimes, users of the cluster, operators and earlier agents send, for `judges/fuzz`: in the product, they are behind
//! sockets, files and the datastore.

use std::collections::BTreeMap;

use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind};
use tortie_cni::{Failure, Invocation};

use crate::control::Ask;
use crate::pods::Pods;
use crate::{addresses, control_server, dns, runtime_config, saved_state};

/// Reads a call with each reader of the agent. Its pod has these annotations. Returns how many of the readers accept it.
///
/// # Panics
/// What a reader accepts is nothing that a pod can have.
#[must_use]
pub fn call(call: &Invocation, pod: &Pod, annotations: &BTreeMap<String, String>) -> usize {
    let mac = runtime_config::mac(call);
    if let Ok(Some(mac)) = &mac {
        assert!(mac.0[0] & 1 == 0 && mac.0 != [0; 6], "{mac} is of no pod");
    }
    let mtu = runtime_config::mtu(&call.config);
    assert!(!mtu.as_ref().is_ok_and(|mtu| mtu.is_some_and(|mtu| !(68..=65_535).contains(&mtu))), "{mtu:?}");
    let dns = dns::of_pod(&call.config);
    if let Ok(dns) = &dns {
        let words = dns.search.iter().chain(&dns.options);
        words.for_each(|word| assert!(!word.contains(char::is_whitespace), "{word:?}"));
    }
    let (pod_key, namespace) = (Key::namespaced(Kind::Pod, "n", "p"), Key::global(Kind::Namespace, "n"));
    let wanted: Result<_, Failure> = call.config.address_source().and_then(|source| {
        addresses::wanted(call, source, (&pod_key, annotations), (&namespace, &BTreeMap::new()))
    });
    let accepted = [
        mac.is_ok(),
        mtu.is_ok(),
        dns.is_ok(),
        wanted.is_ok(),
        runtime_config::check(call, pod, true).is_ok(),
        Pods::passed_limits(&call.config).is_ok(),
    ];
    accepted.into_iter().filter(|is_accepted| *is_accepted).count()
}

/// Reads a question of an operator.
///
/// # Errors
/// What the operator gets instead.
pub fn question(request: &[u8]) -> Result<Ask, String> {
    control_server::read(request)
}

/// Reads the state that an earlier agent of node `n` has saved since the start `b` of the machine, and returns what would be saved of it.
///
/// # Errors
/// It is damaged, or of another node or start.
pub fn saved_state(bytes: &[u8]) -> Result<Vec<u8>, String> {
    saved_state::decode(bytes, "n", "b").and_then(|saved| saved_state::encode(&saved.state, "n", "b"))
}

/// The bytes of a saved state whose first line fits this content.
///
/// # Errors
/// The first line cannot be written.
pub fn with_first_line(content: &[u8]) -> Result<Vec<u8>, String> {
    saved_state::with_header(content.to_vec(), "n", "b")
}

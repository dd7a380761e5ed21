//! What container runtimes, other plugins and the two ends of the agent's socket send. On Windows, that is a named pipe with the same messages.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use serde_json::json;
use tortie_cni::results::KeptResult;
use tortie_cni::transport::{encode, encode_answer};
use tortie_cni::{
    Address, Dns, Interface, Invocation, PrevResult, Route, SUPPORTED_VERSIONS, Success, parsers,
};

use crate::input::Input;

/// A call: the five variables, each of which ends with NUL, and the configuration on standard input.
pub fn cni_call(bytes: &[u8]) {
    let mut input = Input(bytes);
    let names = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];
    let values: Vec<(&str, OsString)> =
        names.iter().map(|name| (*name, OsStr::from_bytes(input.until_nul()).to_owned())).collect();
    let environment =
        |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    let call = match parsers::invocation(&environment, input.0) {
        Ok(call) => call,
        Err(failure) => {
            assert!(failure.document(SUPPORTED_VERSIONS[0])["code"].as_u64().is_some_and(|code| code > 0));
            return;
        }
    };
    if let Ok(Some(before)) = PrevResult::read(&call.config.extra) {
        let _ = (before.has_interface(&call.interface), before.has_address("10.0.0.1"));
        for version in SUPPORTED_VERSIONS {
            assert!(before.followed_by(&success(), version)["ips"].is_array());
        }
        let _ = parsers::ipam_result(&call.config.extra["prevResult"], &mut json!({}));
    }
    let _ = (call.config.address_source(), parsers::candidates(&call));
    let Ok(message) = encode(&call) else { return };
    let again = serde_json::from_slice::<Invocation>(&message[4..]);
    // The last digit of a number with many may differ.
    let again = again.map(|again| (again.command, again.args, again.config.cni_version, again.delegated));
    assert_eq!(again.ok(), Some((call.command, call.args, call.config.cni_version, call.delegated)));
}

fn success() -> Success {
    Success {
        interfaces: vec![Interface { name: "eth0".to_owned(), mac: String::new(), sandbox: "/n".to_owned() }],
        ips: vec![Address { address: "10.0.0.1/32".to_owned(), interface: 0 }],
        routes: vec![Route { dst: "0.0.0.0/0".to_owned(), gw: None }],
        dns: Dns { nameservers: vec![[10, 96, 0, 10].into()], ..Dns::default() },
    }
}

/// A message on the agent's socket or pipe. What is read can be written, and is then read as before.
pub fn cni_message(bytes: &[u8]) {
    let is_complete = parsers::is_complete(bytes);
    if let Ok(answer) = parsers::answer(bytes) {
        assert!(is_complete);
        let Ok(written) = encode_answer(answer.clone()) else { return };
        assert_eq!(parsers::answer(&written).ok(), Some(answer));
    }
    if let Some(body) = bytes.get(4..)
        && let Ok(call) = serde_json::from_slice::<Invocation>(body)
    {
        let _ = encode(&call);
    }
}

/// The result of another plugin: one that a runtime keeps, or the one that an IPAM plugin prints.
pub fn cni_result(bytes: &[u8]) {
    if let Some(kept) = KeptResult::parse(bytes) {
        assert!(kept.is_of(&kept.namespace, &kept.pod, &kept.interface));
    }
    let Some(printed) = Input(bytes).json() else { return };
    let mut document = json!({"dns": {}});
    if parsers::ipam_result(&printed, &mut document).is_ok() {
        assert!(document["dns"].is_object());
    }
}

//! Calls and messages with damage: nothing that a runtime, another plugin or the other side of the socket sends causes a panic, and
//! each call gets the error code that the specification has for it.

mod corpus;
mod expected;
mod mutations;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::ffi::OsStringExt as _;
use std::process::ExitCode;

use serde::de::IgnoredAny;
use serde_json::Value;

use self::corpus::{ARGS, COMMANDS, CONTAINERS, INTERFACES, NETNS, NOWHERE};
use self::expected::VERSIONS;
use self::mutations::{Numbers, damage_args, damage_bytes, damage_document, damage_text};
use super::{read_invocation, run};
use crate::ipam::{AddressSource, IpamResult, host_local_candidates};
use crate::transport::{body_length, encode, encode_answer, is_complete, read_answer};
use crate::{Address, Code, Failure, Interface, Invocation, PrevResult, Route, SUPPORTED_VERSIONS, Success};

const VARIABLES: [&str; 5] = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];
/// The codes that the random calls must have got, and how often at least.
const CODES: [u32; 11] = [VERSIONS, 1, 4, 5, 6, 7, 11, 50, 102, 103, UNTRIED];
const AT_LEAST: u64 = 20;
/// The count of calls that are understood and not carried out, because they name other files.
const UNTRIED: u32 = u32::MAX;

/// A call as a runtime makes it.
struct Call {
    variables: [OsString; 5],
    config: Vec<u8>,
    /// Whether the text of the configuration was damaged, so that members may exist twice.
    is_textual: bool,
}

#[test]
fn no_damage_of_calls_causes_a_panic_or_another_code() {
    let (configurations, results) = (corpus::configurations(), corpus::results());
    let mut numbers = Numbers(first_number());
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    for _ in 0..cases() {
        let call = random_call(&configurations, &results, &mut numbers);
        *counts.entry(take_call(&call)).or_default() += 1;
    }
    let rare = CODES.iter().find(|code| counts.get(code).is_none_or(|count| *count < AT_LEAST));
    assert_eq!(rare, None, "{counts:?}");
    assert!(counts.keys().all(|code| CODES.contains(code)), "{counts:?}");
}

#[test]
fn undamaged_configurations_are_understood() {
    for config in corpus::configurations() {
        for command in COMMANDS {
            let environment = |name: &str| {
                let values = [command, CONTAINERS[0], NETNS[0], INTERFACES[0], ARGS[0]];
                Some(OsString::from(values[VARIABLES.iter().position(|other| *other == name)?]))
            };
            let read = read_invocation(&environment, config.to_string().as_bytes());
            assert!(read.is_ok(), "{command}: {config}: {read:?}");
        }
    }
}

#[test]
fn no_damage_of_messages_causes_a_panic() {
    let (configurations, results) = (corpus::configurations(), corpus::results());
    let mut numbers = Numbers(first_number());
    let answers = [
        encode_answer(Ok(Some(success()))),
        encode_answer(Ok(None)),
        encode_answer(Err(Failure::new(Code::WIRING, "it failed", "why"))),
    ];
    let mut messages: Vec<Vec<u8>> = answers.into_iter().map(Result::unwrap).collect();
    while messages.len() < 200 {
        let call = random_call(&configurations, &results, &mut numbers);
        messages.extend(read(&call).ok().and_then(|call| encode(&call).ok()));
    }
    // Rejected and understood.
    let mut counts = [0_u64; 2];
    for _ in 0..cases() {
        let mut message = numbers.one(&messages).clone();
        assert!(take_message(&message), "{}", String::from_utf8_lossy(&message));
        if numbers.below(3) == 0 {
            damage_bytes(&mut message, &mut numbers);
        } else {
            let (header, body) = message.split_at(4);
            let mut body: Value = serde_json::from_slice(body).unwrap();
            damage_document(&mut body, &configurations, &mut numbers);
            let body = body.to_string().into_bytes();
            let length = if numbers.below(4) == 0 {
                header.to_vec()
            } else {
                (body.len() as u32).to_be_bytes().to_vec()
            };
            message = [length, body].concat();
        }
        message.truncate(if numbers.below(4) == 0 { numbers.below(message.len()) } else { message.len() });
        counts[usize::from(take_message(&message))] += 1;
    }
    assert!(counts.iter().all(|count| *count > 50), "{counts:?}");
}

#[test]
fn depth_is_limited() {
    let deep = "[".repeat(100_000);
    let variables = ["ADD", CONTAINERS[0], NETNS[0], INTERFACES[0], ARGS[0]].map(OsString::from);
    let config = format!("{{\"cniVersion\": \"1.1.0\", \"name\": \"n\", \"x\": {deep}").into_bytes();
    assert_eq!(take_call(&Call { variables, config, is_textual: true }), Code::DECODING.0);
}

/// The first state of the generator: that of `PROPTEST_RNG_SEED`, otherwise a random one.
fn first_number() -> u64 {
    let chosen = std::env::var("PROPTEST_RNG_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let seed = chosen.unwrap_or_else(|| RandomState::new().hash_one("seed"));
    println!("PROPTEST_RNG_SEED={seed} repeats this test");
    // Neighbouring seeds give numbers that have little in common.
    seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

fn cases() -> u64 {
    let configured = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    configured.unwrap_or(10_000)
}

fn random_call(configurations: &[Value], results: &[Value], numbers: &mut Numbers) -> Call {
    let mut document = numbers.one(configurations).clone();
    if numbers.below(2) == 0 {
        document["prevResult"] = numbers.one(results).clone();
    }
    if numbers.below(2) == 0 {
        let others = if numbers.below(2) == 0 { configurations } else { results };
        damage_document(&mut document, others, numbers);
    }
    let mut text = document.to_string();
    let is_textual = numbers.below(4) == 0;
    if is_textual {
        damage_text(&mut text, numbers);
    }
    let mut config = text.into_bytes();
    let has_bytes = numbers.below(16) == 0;
    if has_bytes {
        damage_bytes(&mut config, numbers);
    }
    Call { variables: random_variables(numbers), config, is_textual: is_textual || has_bytes }
}

fn random_variables(numbers: &mut Numbers) -> [OsString; 5] {
    let mut variables = [
        numbers.text(&COMMANDS),
        numbers.text(&CONTAINERS),
        numbers.text(&NETNS),
        numbers.text(&INTERFACES),
        numbers.text(&ARGS),
    ]
    .map(str::to_owned);
    if numbers.below(4) == 0 {
        damage_args(&mut variables[4], numbers);
    }
    if numbers.below(4) == 0 {
        damage_text(&mut variables[numbers.below(5)], numbers);
    }
    let mut variables = variables.map(String::into_bytes);
    if numbers.below(16) == 0 {
        damage_bytes(&mut variables[numbers.below(5)], numbers);
    }
    variables.map(OsString::from_vec)
}

fn environment(call: &Call) -> impl Fn(&str) -> Option<OsString> + '_ {
    |name| match VARIABLES.iter().position(|other| *other == name) {
        Some(index) => Some(call.variables[index].clone()),
        None => (name == "CNI_PATH").then(|| NOWHERE.into()),
    }
}

fn read(call: &Call) -> Result<Invocation, Failure> {
    read_invocation(&environment(call), &call.config)
}

/// Carries a call out, compares its code with the expected ones, and returns it.
fn take_call(call: &Call) -> u32 {
    let shown = || format!("{:?} {}", call.variables, String::from_utf8_lossy(&call.config));
    let read = read(call);
    if let Ok(call) = &read {
        take_parts(call);
        if !is_harmless(call) {
            return UNTRIED;
        }
    }
    let (document, code) = run(&environment(call), &call.config);
    let document = document.unwrap_or_default();
    let version = document["cniVersion"].as_str().unwrap_or_default();
    let got = match document["code"].as_u64() {
        None => {
            let versions: Vec<&str> = document["supportedVersions"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            assert_eq!(
                (versions.as_slice(), code),
                (SUPPORTED_VERSIONS.as_slice(), ExitCode::SUCCESS),
                "{}",
                shown()
            );
            VERSIONS
        }
        Some(number) => {
            let says_why = document["msg"].as_str().is_some_and(|msg| !msg.is_empty());
            assert!(says_why && document["details"].is_string() && code != ExitCode::SUCCESS, "{}", shown());
            assert!(SUPPORTED_VERSIONS.contains(&version), "{version}: {}", shown());
            u32::try_from(number).unwrap()
        }
    };
    let expected = expected::codes(call);
    assert!(expected.contains(&got), "{got}, not {expected:?}: {}: {document}", shown());
    got
}

/// A damaged path is not tried out.
fn is_harmless(call: &Invocation) -> bool {
    let is_nowhere = call.config.agent_socket == *NOWHERE && call.config.deletion_queue == *NOWHERE;
    let of_files = call.config.address_source() == Ok(AddressSource::HostLocal);
    is_nowhere && (!of_files || call.config.extra["ipam"]["dataDir"] == NOWHERE)
}

/// Reads all parts of a call.
fn take_parts(call: &Invocation) {
    if let Ok(Some(before)) = PrevResult::read(&call.config.extra) {
        let _ = (before.has_interface(&call.interface), before.has_address("10.0.0.1"));
        for version in SUPPORTED_VERSIONS {
            assert!(
                before.followed_by(&success(), version)["ips"].as_array().is_some_and(|ips| !ips.is_empty())
            );
        }
        let _ = IpamResult::read(&call.config.extra["prevResult"], "other");
    }
    let _ = host_local_candidates(call);
    let message = encode(call).expect("it is small");
    let mut read: Invocation = serde_json::from_slice(&message[4..]).expect("what was written");
    // The last digit of a number with many may differ.
    read.config.extra = call.config.extra.clone();
    assert_eq!(read, *call);
}

fn success() -> Success {
    Success {
        interfaces: vec![Interface { name: "eth0".to_owned(), mac: String::new(), sandbox: "/n".to_owned() }],
        ips: vec![Address { address: "10.0.0.1/32".to_owned(), interface: 0 }],
        routes: vec![Route { dst: "0.0.0.0/0".to_owned(), gw: None }],
        dns: crate::Dns { nameservers: vec![[10, 96, 0, 10].into()], ..crate::Dns::default() },
    }
}

/// Reads a message as both sides of the socket do. Returns whether it is understood.
fn take_message(bytes: &[u8]) -> bool {
    let answer = read_answer(bytes).is_ok();
    let body = bytes.split_first_chunk().and_then(|(header, body)| body.get(..body_length(*header).ok()?));
    let is_understood = answer || body.is_some_and(|body| serde_json::from_slice::<Invocation>(body).is_ok());
    // What is understood is whole, and is JSON.
    let is_document = body.is_some_and(|body| serde_json::from_slice::<IgnoredAny>(body).is_ok());
    assert!(!is_understood || (is_complete(bytes) && is_document), "{}", String::from_utf8_lossy(bytes));
    is_understood
}

//! Calls, results and messages with damage: nothing that a runtime, another plugin or the other side of the socket sends
//! causes a panic, and what is not understood is an error.

use std::ops::Range;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::{read_invocation, run};
use crate::ipam::{IpamResult, host_local_candidates};
use crate::transport::{body_length, encode, encode_answer, is_complete, read_answer};
use crate::{Address, Code, Failure, Interface, Invocation, PrevResult, Route, Success};

/// A source of numbers that is fast enough for ten million calls (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

/// Where no file and no socket can be.
const NOWHERE: &str = "/dev/null/tortie";

/// Valid configurations to start from: damage close to validity reaches deeper than noise.
fn configurations() -> Vec<String> {
    let result = json!({
        "cniVersion": "1.0.0", "interfaces": [{"name": "cali1", "mac": "ee:ee:ee:ee:ee:ee"}, {"name": "eth0", "sandbox": "/n"}],
        "ips": [{"address": "10.0.0.1/32", "interface": 1, "version": "4"}], "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}],
        "dns": {"nameservers": ["192.0.2.53"]},
    });
    let parts = [
        json!({}),
        json!({"prevResult": result}),
        json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]}),
        json!({"runtimeConfig": {"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}], "ips": ["10.0.0.7/24"],
            "bandwidth": {"ingressRate": 1, "ingressBurst": 1}, "mac": "0a:00:00:00:00:01", "dns": {"searches": ["a"]}}, "mtu": 1400}),
        json!({"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.0.0.0/8", "rangeStart": "10.0.0.9", "rangeEnd": "10.1.0.0"},
            {"subnet": "192.0.2.0/24", "gateway": "192.0.2.7"}]], "routes": [{"dst": "0.0.0.0/0"}]}, "args": {"cni": {"ips": ["10.0.0.9"]}}}),
        json!({"ipam": {"type": "host-local", "subnet": "0.0.0.0/0"}}),
        json!({"ipam": {"type": "calico-ipam", "ipv4_pools": ["a"], "assign_ipv4": "true"}, "feature_control": {"ip_addrs_no_ipam": true}}),
    ];
    let configurations = parts.into_iter().map(|part| {
        let mut config = json!({"cniVersion": "1.1.0", "name": "net", "type": "tortie-cni", "agentSocket": NOWHERE, "deletionQueue": NOWHERE});
        for (name, value) in part.as_object().into_iter().flatten() {
            config[name] = value.clone();
        }
        config.to_string()
    });
    configurations.collect()
}

const COMMANDS: [&str; 6] = ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"];
const ARGS: &str = "IgnoreUnknown=1;K8S_POD_NAMESPACE=n;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u;IP=10.0.0.7";
/// Texts that damage puts in.
const TOKENS: [&str; 24] = [
    "",
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "null",
    "true",
    "-1",
    "1e999",
    "18446744073709551616",
    "\u{0}",
    "é",
    "\\ud800",
    "/",
    "255.255.255.255",
    "/32",
    "/0",
    "::1/128",
    ";",
    "=",
    "{\"a\":[[[[[[[[",
];

/// Texts that damage puts in place of a whole one.
const WHOLE: [&str; 14] = [
    "",
    "/",
    "0.0.0.0",
    "255.255.255.255",
    "0.0.0.0/0",
    "0.0.0.0/32",
    "255.255.255.255/32",
    "10.0.0.0/33",
    "::1/128",
    "usePodCidr",
    "host-local",
    "1.1.0",
    "eth0",
    "\\u0000",
];

/// Where the first quoted text after a place is.
fn quoted(text: &str, at: usize) -> Option<Range<usize>> {
    let start = at + text[at..].find('"')? + 1;
    Some(start..start + text[start..].find('"')?)
}

/// The text with some damage.
fn damaged(text: &str, numbers: &mut Numbers) -> String {
    let mut text = text.to_owned();
    for _ in 0..=numbers.below(3) {
        let at = text.floor_char_boundary(numbers.below(text.len() + 1));
        let end = text.floor_char_boundary((at + numbers.below(12)).min(text.len())).max(at);
        match numbers.below(5) {
            0 => text.replace_range(at..end, TOKENS[numbers.below(TOKENS.len())]),
            1 => text.replace_range(at..end, &numbers.below(300).to_string()),
            2 => text.insert_str(at, &text.clone()[at..end]),
            3 => {
                if let Some(place) = quoted(&text, at) {
                    text.replace_range(place, WHOLE[numbers.below(WHOLE.len())]);
                }
            }
            _ if numbers.below(8) == 0 => text.truncate(at),
            _ => text.replace_range(at..end, ""),
        }
    }
    text
}

/// Reads what the plugin reads of a call. Returns whether it is understood.
fn take_call(config: &str, variables: &[(&str, String)]) -> bool {
    let environment =
        |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone());
    let call = read_invocation(&environment, config);
    if let Ok(call) = &call {
        if let Ok(Some(before)) = PrevResult::read(&call.config.extra) {
            let _ = (before.has_interface(&call.interface), before.has_address("10.0.0.1"));
            let _ = before.followed_by(&success(), &call.config.cni_version);
            let _ = IpamResult::read(&call.config.extra["prevResult"], "other");
        }
        let _ = host_local_candidates(call);
        let message = encode(call).expect("it is small");
        assert_eq!(
            serde_json::from_slice::<Invocation>(&message[4..]).expect("what was written").command,
            call.command
        );
    }
    // A damaged path is not tried out, and no other plugin is executed.
    let is_harmless = |call: &Invocation| {
        let source = call.config.address_source();
        call.config.agent_socket == *NOWHERE
            && call.config.deletion_queue == *NOWHERE
            && !source.is_ok_and(|source| source.is_delegated())
    };
    if call.as_ref().map_or(true, is_harmless) {
        let (document, code) = run(&environment, config);
        let says_why =
            document.is_some_and(|document| document["code"].is_u64() && document["msg"].is_string());
        assert!(code == ExitCode::SUCCESS || says_why, "{config}");
    }
    call.is_ok()
}

fn success() -> Success {
    Success {
        interfaces: vec![Interface { name: "eth0".to_owned(), mac: String::new(), sandbox: "/n".to_owned() }],
        ips: vec![Address { address: "10.0.0.1/32".to_owned(), interface: 0 }],
        routes: vec![Route { dst: "0.0.0.0/0".to_owned(), gw: None }],
    }
}

/// Reads a message as both sides of the socket do. Returns whether it is understood.
fn take_message(bytes: &[u8]) -> bool {
    let _ = is_complete(bytes);
    let answer = read_answer(bytes).is_ok();
    let Some((header, body)) = bytes.split_first_chunk() else { return answer };
    let body = body_length(*header).ok().and_then(|length| body.get(..length));
    answer | body.is_some_and(|body| serde_json::from_slice::<Invocation>(body).is_ok())
}

#[test]
fn no_damage_of_calls_and_messages_causes_a_panic() {
    let configured = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let (configurations, mut numbers) = (configurations(), Numbers(0x9e37_79b9_7f4a_7c15));
    let answers = [
        encode_answer(Ok(Some(success()))),
        encode_answer(Ok(None)),
        encode_answer(Err(Failure::new(Code::WIRING, "it failed", "why"))),
    ];
    let mut messages: Vec<Vec<u8>> = answers.into_iter().map(Result::unwrap).collect();
    // Understood and rejected, of calls and of messages.
    let (mut calls, mut read) = ([0_u64; 2], [0_u64; 2]);
    for _ in 0..configured.unwrap_or(200_000) {
        let config = &configurations[numbers.below(configurations.len())];
        let config = if numbers.below(5) == 0 { config.clone() } else { damaged(config, &mut numbers) };
        let mut variables = vec![
            ("CNI_COMMAND", COMMANDS[numbers.below(COMMANDS.len())].to_owned()),
            ("CNI_CONTAINERID", "c1".to_owned()),
            ("CNI_NETNS", "/run/netns/x".to_owned()),
            ("CNI_IFNAME", "eth0".to_owned()),
            ("CNI_ARGS", ARGS.to_owned()),
        ];
        if numbers.below(3) == 0 {
            let variable = &mut variables[numbers.below(5)];
            variable.1 = damaged(&variable.1, &mut numbers);
        }
        calls[usize::from(take_call(&config, &variables))] += 1;
        if messages.len() < 50 {
            let environment = |name: &str| {
                variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone())
            };
            messages.extend(read_invocation(&environment, &config).ok().and_then(|call| encode(&call).ok()));
        }
        let mut message = messages[numbers.below(messages.len())].clone();
        for _ in 0..numbers.below(3) {
            let at = numbers.below(message.len());
            message[at] = [0, 1, 255, b'"', b'{', b'}', numbers.below(256) as u8][numbers.below(7)];
        }
        message.truncate(if numbers.below(4) == 0 { numbers.below(message.len()) } else { message.len() });
        read[usize::from(take_message(&message))] += 1;
    }
    assert!(calls.iter().chain(&read).all(|count| *count > 50), "calls {calls:?}, messages {read:?}");
    let deep = "[".repeat(100_000);
    assert!(!take_call(&format!("{{\"cniVersion\": \"1.1.0\", \"name\": \"n\", \"x\": {deep}"), &[]));
    assert!(serde_json::from_str::<Value>(&deep).is_err(), "depth is limited");
}

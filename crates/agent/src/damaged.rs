//! Network configurations and arguments with damage, as the agent reads them: nothing that a runtime or another plugin sends causes
//! a panic, and what is accepted can be used.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde_json::{Value, json};
use testkit::random::first_number;
use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind, Resource};
use tortie_cni::{Command, Failure, Invocation, PrevResult};

use crate::pods::Pods;
use crate::{addresses, dns, runtime_config};

/// Members that the agent reads, each with all that it can have.
fn whole_configuration() -> Value {
    json!({
        "cniVersion": "1.1.0", "name": "k8s-pod-network", "mtu": 1400,
        "ipam": {"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": "false", "ipv4_pools": ["10.0.0.0/16", "pool"],
            "ipv6_pools": ["fd00::/64"]},
        "feature_control": {"ip_addrs_no_ipam": true}, "args": {"cni": {"ips": ["10.0.0.7"], "mac": "0a:00:00:00:00:07"}},
        "dns": {"nameservers": ["10.96.0.10"], "domain": "a", "search": ["b"], "options": ["ndots:5"]},
        "runtimeConfig": {
            "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}],
            "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 1_000_000, "egressRate": 2_000_000, "egressBurst": 2_000_000},
            "dns": {"servers": ["10.96.0.11"], "searches": ["c"], "options": ["timeout:1"]},
            "ips": ["10.0.0.8/32", "fd00::8"], "mac": "0a:00:00:00:00:08",
        },
        "prevResult": {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "sandbox": "/n", "mac": "0a:00:00:00:00:08"}],
            "ips": [{"address": "10.0.0.8/32", "interface": 0}], "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}],
            "dns": {"nameservers": ["10.96.0.10"]}},
    })
}

const ARGS: [(&str, &str); 6] = [
    ("IgnoreUnknown", "1"),
    ("K8S_POD_NAMESPACE", "n"),
    ("K8S_POD_NAME", "p"),
    ("K8S_POD_UID", "u"),
    ("IP", "10.0.0.9"),
    ("MAC", "0a:00:00:00:00:09"),
];

/// Values that readers may not expect.
fn surprises() -> Vec<Value> {
    let texts = [
        "",
        " ",
        "0",
        "-1",
        "a",
        "none",
        "true",
        "10.0.0.1",
        "10.0.0.1/33",
        "10.0.0.1/32",
        "::",
        "fd00::1/64",
        "0.0.0.0",
        "255.255.255.255",
        "01:00:00:00:00:00",
        "00:00:00:00:00:00",
        "ee:ee:ee:ee:ee:ee",
        "0A-58-0A-00-00-01",
        "\u{0}",
        "ä\u{301}",
        "a b\nc",
        "[\"10.0.0.1\"]",
        "[\"0.0.0.0\"]",
        "[\"224.0.0.1\"]",
        "[\"169.254.1.1\"]",
        "{}",
        "ndots:",
        "../..",
    ];
    let mut all: Vec<Value> = texts.into_iter().map(Value::from).collect();
    all.push(json!("x".repeat(300)));
    let numbers = [
        json!(0),
        json!(-1),
        json!(67),
        json!(65_536),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1e300),
        json!(0.5),
    ];
    all.extend(numbers);
    all.extend([
        json!(null),
        json!(true),
        json!([]),
        json!({}),
        json!([null]),
        json!([[]]),
        json!({"": {}}),
        json!([{}, 1, "a"]),
    ]);
    all
}

/// Numbers from a seed (xorshift64*).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap() % limit.max(1)
    }
}

/// Replaces, removes, repeats or renames one value anywhere in the document.
fn damage(value: &mut Value, surprises: &[Value], numbers: &mut Numbers) {
    let goes_deeper = numbers.below(4) > 0;
    match value {
        Value::Object(members) if goes_deeper && !members.is_empty() => {
            let name = members.keys().nth(numbers.below(members.len())).unwrap().clone();
            match numbers.below(8) {
                0 => drop(members.remove(&name)),
                1 => {
                    let moved = members.remove(&name).unwrap();
                    members.insert(name.to_uppercase(), moved);
                }
                2 => {
                    let copy = members[&name].clone();
                    members.insert(format!("{name}s"), copy);
                }
                _ => damage(members.get_mut(&name).unwrap(), surprises, numbers),
            }
        }
        Value::Array(items) if goes_deeper && !items.is_empty() => {
            let index = numbers.below(items.len());
            match numbers.below(4) {
                0 => drop(items.remove(index)),
                1 => items.push(items[index].clone()),
                _ => damage(&mut items[index], surprises, numbers),
            }
        }
        Value::String(text) if numbers.below(2) == 0 && !text.is_empty() => {
            let at = text.floor_char_boundary(numbers.below(text.len()));
            text.truncate(at);
        }
        _ => *value = surprises[numbers.below(surprises.len())].clone(),
    }
}

fn cases() -> u64 {
    let configured = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    configured.unwrap_or(20_000)
}

/// A Pod with port 8080 of the node, and annotations.
fn pod(annotations: &Value) -> Pod {
    let value = json!({"metadata": {"name": "p", "namespace": "n", "annotations": annotations},
        "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 8080}]}]}});
    match Resource::read(&Key::namespaced(Kind::Pod, "n", "p"), &value) {
        Ok(Resource::Pod(pod)) => pod,
        other => panic!("{other:?}"),
    }
}

#[test]
fn no_damage_of_configurations_causes_a_panic_or_is_accepted() {
    let (whole, surprises) = (whole_configuration(), surprises());
    let mut numbers = Numbers(first_number());
    let mut counts: BTreeMap<(&str, bool), u64> = BTreeMap::new();
    for _ in 0..cases() {
        let mut config = whole.clone();
        for _ in 0..numbers.below(4) {
            damage(&mut config, &surprises, &mut numbers);
        }
        // What a runtime passes has been read by the plugin.
        let Ok(config) = serde_json::from_value(config) else { continue };
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut args: BTreeMap<String, String> =
            ARGS.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        if numbers.below(4) == 0 {
            let name = ARGS[numbers.below(ARGS.len())].0.to_owned();
            args.insert(name, text(&surprises[numbers.below(surprises.len())]));
        }
        let call = Invocation {
            command: Command::Add,
            container_id: "c".to_owned(),
            netns: "/n".to_owned(),
            interface: "eth0".to_owned(),
            args,
            config,
            delegated: Vec::new(),
        };
        for (reader, is_accepted) in read(&call, &surprises, &mut numbers) {
            *counts.entry((reader, is_accepted)).or_default() += 1;
        }
    }
    for reader in READERS {
        for is_accepted in [true, false] {
            let count = counts.get(&(reader, is_accepted)).copied().unwrap_or_default();
            assert!(count > 20, "{reader}, accepted: {is_accepted}: {count}: {counts:?}");
        }
    }
}

const READERS: [&str; 6] = ["runtimeConfig", "mac", "mtu", "bandwidth", "dns", "addresses"];

/// Reads a call with every reader of the agent. Returns which have accepted it.
fn read(call: &Invocation, surprises: &[Value], numbers: &mut Numbers) -> [(&'static str, bool); 6] {
    let shown = || format!("{call:?}");
    let annotation = |numbers: &mut Numbers| match &surprises[numbers.below(surprises.len())] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let names = ["ipAddrs", "ipAddrsNoIpam", "ipv4pools", "ipv6pools", "hwAddr"];
    let annotations: BTreeMap<String, String> = match numbers.below(4) {
        0 => {
            let name = names[numbers.below(names.len())];
            [(format!("cni.projectcalico.org/{name}"), annotation(numbers))].into()
        }
        _ => BTreeMap::new(),
    };
    let pod = pod(&json!(annotations));
    let checked = runtime_config::check(call, &pod, true);
    if let (Ok(()), Some(mappings)) =
        (&checked, call.config.extra.get("runtimeConfig").and_then(|it| it.get("portMappings")))
    {
        let foreign = mappings.as_array().into_iter().flatten().any(|mapping| {
            mapping.get("hostPort").is_some_and(|port| *port != json!(0) && *port != json!(8080))
                && mapping.get("HOSTPORT").is_none()
        });
        assert!(!foreign, "a port that the Pod does not have: {}", shown());
    }
    let mac = runtime_config::mac(call);
    if let Ok(Some(mac)) = &mac {
        assert!(mac.0[0] & 1 == 0 && mac.0 != [0; 6], "{mac}: {}", shown());
    }
    let mtu = runtime_config::mtu(&call.config);
    assert!(mtu.as_ref().is_ok_and(|mtu| mtu.is_none_or(|mtu| (68..=65_535).contains(&mtu))) || mtu.is_err());
    let limits = Pods::passed_limits(&call.config);
    if let Ok(limits) = &limits {
        let both = limits.ingress.iter().chain(&limits.egress);
        both.for_each(|limit| assert!(limit.bytes_per_second >= 125, "{limit:?}: {}", shown()));
    }
    let dns = dns::of_pod(&call.config);
    if let Ok(dns) = &dns {
        let words =
            dns.search.iter().chain(&dns.options).chain((!dns.domain.is_empty()).then_some(&dns.domain));
        words.for_each(|word| assert!(!word.contains(char::is_whitespace), "{word:?}: {}", shown()));
    }
    let key = Key::namespaced(Kind::Pod, "n", "p");
    let namespace = (Key::global(Kind::Namespace, "n"), BTreeMap::new());
    let wanted: Result<_, Failure> = call.config.address_source().and_then(|source| {
        addresses::wanted(call, source, (&key, &annotations), (&namespace.0, &namespace.1))
    });
    if let Ok(wanted) = &wanted {
        // Addresses of IPAM are in a pool.
        let is_unusable = |address: &Ipv4Addr| {
            address.is_unspecified() || address.is_multicast() || address.is_link_local()
        };
        assert!(!wanted.outside.as_ref().is_some_and(is_unusable), "{wanted:?}: {annotations:?}");
    }
    if let Ok(Some(before)) = PrevResult::read(&call.config.extra) {
        let _ = (before.has_interface("eth0"), before.has_address("10.0.0.8"));
    }
    [
        ("runtimeConfig", checked.is_ok()),
        ("mac", mac.is_ok()),
        ("mtu", mtu.is_ok()),
        ("bandwidth", limits.is_ok()),
        ("dns", dns.is_ok()),
        ("addresses", wanted.is_ok()),
    ]
}

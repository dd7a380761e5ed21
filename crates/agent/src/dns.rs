//! How pods resolve names: the key `dns` of a network configuration, and what the runtime asks for (`runtimeConfig.dns`).
//!
//! On Windows, it becomes part of the pod's endpoint. On Linux, kubelets write `resolv.conf` themselves. In both cases the
//! result of ADD repeats it.

use std::net::IpAddr;

use serde_json::{Map, Value};
use tortie_cni::{Code, Dns, Failure, NetworkConfig};
use tortie_dataplane::PodDns;

/// The members of a configuration (CNI specification, section 1).
const OF_NETWORK: Names = Names { at: "dns", servers: "nameservers", search: "search" };
/// The members of a runtime's request (CNI conventions, capability `dns`).
const OF_RUNTIME: Names = Names { at: "runtimeConfig.dns", servers: "servers", search: "searches" };

/// The names of members. Calico's configurations write them with capital letters, and Go reads any case.
struct Names {
    at: &'static str,
    servers: &'static str,
    search: &'static str,
}

/// The settings of a call's pod: each member is the runtime's, or else the network's.
pub(crate) fn of(config: &NetworkConfig) -> Result<Dns, Failure> {
    let mut network = read(config.extra.get("dns"), &OF_NETWORK, config)?;
    let runtime = config.extra.get("runtimeConfig").and_then(|asked| asked.get("dns"));
    let Dns { nameservers, domain, search, options } = read(runtime, &OF_RUNTIME, config)?;
    replace(&mut network.nameservers, nameservers);
    replace(&mut network.search, search);
    replace(&mut network.options, options);
    if !domain.is_empty() {
        network.domain = domain;
    }
    Ok(network)
}

/// The same for the pod's interface.
pub(crate) fn of_pod(config: &NetworkConfig) -> Result<PodDns, Failure> {
    let Dns { nameservers: servers, domain, search, options } = of(config)?;
    Ok(PodDns { servers, domain, search, options })
}

fn replace<T>(list: &mut Vec<T>, by: Vec<T>) {
    if !by.is_empty() {
        *list = by;
    }
}

fn read(value: Option<&Value>, names: &Names, config: &NetworkConfig) -> Result<Dns, Failure> {
    let wrong = |what: String| {
        let msg = format!("{}{what} of network {} cannot be used", names.at, config.name);
        Failure::new(
            Code::INVALID_CONFIG,
            msg,
            "servers are addresses, the domain is a word, and the others are lists of words",
        )
    };
    let members = match value {
        None | Some(Value::Null) => &Map::new(),
        Some(Value::Object(members)) => members,
        Some(_) => return Err(wrong(String::new())),
    };
    let mut dns = Dns::default();
    for (name, value) in members {
        let invalid = || wrong(format!(".{name}"));
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if is(names.servers) {
            let addresses = words(value).ok_or_else(invalid)?.into_iter();
            let addresses: Result<Vec<IpAddr>, _> = addresses.map(|text| text.parse()).collect();
            dns.nameservers = addresses.map_err(|_| invalid())?;
        } else if is(names.search) {
            dns.search = words(value).ok_or_else(invalid)?;
        } else if is("options") {
            dns.options = words(value).ok_or_else(invalid)?;
        } else if is("domain") {
            let domain = value.as_str().or(value.is_null().then_some("")).filter(|text| !has_spaces(text));
            dns.domain = domain.ok_or_else(invalid)?.to_owned();
        } else {
            return Err(invalid());
        }
    }
    Ok(dns)
}

/// A list of words. Runtimes in Go write an empty one as null.
fn words(value: &Value) -> Option<Vec<String>> {
    let list = match value {
        Value::Null => return Some(Vec::new()),
        Value::Array(list) => list,
        _ => return None,
    };
    let is_word = |text: &&str| !text.is_empty() && !has_spaces(text);
    list.iter().map(|each| each.as_str().filter(is_word).map(str::to_owned)).collect()
}

/// A space or a line's end would make further words or lines of the file that containers read.
fn has_spaces(text: &str) -> bool {
    text.contains(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(network: Value, runtime: Value) -> Result<Value, String> {
        let config = json!({"name": "n", "dns": network, "runtimeConfig": {"dns": runtime}});
        let dns = of(&serde_json::from_value(config).unwrap()).map_err(|failure| failure.msg)?;
        Ok(serde_json::to_value(dns).unwrap())
    }

    #[test]
    fn the_runtime_precedes_the_network_member_by_member() {
        let network =
            json!({"nameservers": ["10.0.0.1"], "domain": "d", "search": ["a", "b"], "options": ["ndots:5"]});
        let runtime =
            json!({"servers": ["10.96.0.10", "fd00::a"], "searches": ["c"], "options": ["ndots:2"]});
        let both = json!({"nameservers": ["10.96.0.10", "fd00::a"], "domain": "d", "search": ["c"], "options": ["ndots:2"]});
        for (network, runtime, expected) in [
            (json!(null), json!(null), json!({})),
            (network.clone(), json!(null), network.clone()),
            (network.clone(), json!({"servers": null, "searches": [], "options": null}), network.clone()),
            (network.clone(), runtime.clone(), both),
            (
                json!({}),
                runtime,
                json!({"nameservers": ["10.96.0.10", "fd00::a"], "search": ["c"], "options": ["ndots:2"]}),
            ),
            // As Calico writes it.
            (
                json!({"Nameservers": ["10.0.0.1"], "Search": ["s"]}),
                json!({}),
                json!({"nameservers": ["10.0.0.1"], "search": ["s"]}),
            ),
        ] {
            assert_eq!(read(network.clone(), runtime.clone()), Ok(expected), "{network} {runtime}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_rejected_by_name() {
        for (network, runtime, name) in [
            (json!([]), json!(null), "dns of network n"),
            (json!(null), json!("x"), "runtimeConfig.dns of network n"),
            (json!({"nameservers": ["dns.example"]}), json!(null), "dns.nameservers of"),
            (json!({"nameservers": "10.0.0.1"}), json!(null), "dns.nameservers of"),
            (json!({"search": [""]}), json!(null), "dns.search of"),
            (json!({"search": ["a b"]}), json!(null), "dns.search of"),
            (json!({"domain": 1}), json!(null), "dns.domain of"),
            (json!({"servers": ["10.0.0.1"]}), json!(null), "dns.servers of"),
            (json!(null), json!({"nameservers": ["10.0.0.1"]}), "runtimeConfig.dns.nameservers of"),
            (json!(null), json!({"options": [1]}), "runtimeConfig.dns.options of"),
        ] {
            let problem = read(network.clone(), runtime.clone()).unwrap_err();
            assert!(problem.starts_with(name), "{network} {runtime}: {problem}");
        }
    }
}

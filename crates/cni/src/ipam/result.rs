//! The result of an IPAM plugin, as far as Tortie uses it.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};

use super::Family;
use crate::{Code, Failure};

/// The addresses of a pod from an IPAM plugin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IpamResult {
    /// The pod's addresses, with the prefix lengths of their networks: at least one, at most one of each family, IPv4 first.
    pub(crate) addresses: Vec<IpNet>,
    /// The settings of DNS for the runtime; null or an object.
    pub(crate) dns: Value,
}

impl IpamResult {
    /// Reads the result of this plugin.
    ///
    /// # Errors
    /// The result is invalid, or a pod cannot have what it says.
    pub(crate) fn read(document: &Value, plugin: &str) -> Result<Self, Failure> {
        let refuse = |what: String, why: &str| {
            Err(Failure::new(Code::NOT_SUPPORTED, format!("the IPAM plugin {plugin} {what}"), why))
        };
        let mut addresses: Vec<IpNet> = Vec::new();
        for ip in list(document, "ips", plugin)? {
            let net = ip["address"].as_str().and_then(|text| text.parse::<IpNet>().ok());
            addresses.push(net.ok_or_else(|| invalid(plugin, &format!("the address {}", ip["address"])))?);
        }
        let of = |family: Family| addresses.iter().filter(move |net| family_of(net) == family).count();
        if addresses.is_empty() || Family::ALL.into_iter().any(|family| of(family) > 1) {
            let what = format!("gives {} IPv4 and {} IPv6 addresses", of(Family::V4), of(Family::V6));
            return refuse(what, "a pod has one address, or one of each family");
        }
        addresses.sort_by_key(family_of);
        let routes = list(document, "routes", plugin)?;
        let mut lacking: Vec<Family> = Vec::new();
        if !routes.is_empty() {
            lacking.extend(addresses.iter().map(family_of));
        }
        for route in routes {
            let Some(Ok(destination)) = route["dst"].as_str().map(str::parse::<IpNet>) else {
                return Err(invalid(plugin, &format!("the route {route}")));
            };
            lacking.retain(|family| destination.prefix_len() > 0 || family_of(&destination) != *family);
            let gateway = route["gw"].as_str().filter(|gateway| !gateway.is_empty());
            let is_none =
                |gateway: &str| gateway.parse().is_ok_and(|gateway: IpAddr| gateway.is_unspecified());
            if let Some(gateway) = gateway.filter(|gateway| !is_none(gateway)) {
                let why = "all packets of a pod go to its node; take the gateway out of ipam.routes";
                return refuse(format!("gives a route to {destination} by {gateway}"), why);
            }
        }
        if let Some(family) = lacking.first() {
            let why = "pods always have a default route of each family; add 0.0.0.0/0 and, for IPv6, ::/0 to ipam.routes, or take the \
                       others out";
            return refuse(format!("gives routes and no default route of {family}"), why);
        }
        match &document["dns"] {
            dns @ (Value::Null | Value::Object(_)) => Ok(Self { addresses, dns: dns.clone() }),
            other => Err(invalid(plugin, &format!("dns: {other}"))),
        }
    }

    /// Adds the settings of DNS to the result of Tortie's plugin, unless an earlier plugin has set them.
    pub(crate) fn add_dns(&self, document: &mut Value) {
        let is_set = document["dns"].as_object().is_some_and(|dns| !dns.is_empty());
        if !is_set && self.dns.is_object() {
            document["dns"] = self.dns.clone();
        }
    }
}

fn family_of(net: &IpNet) -> Family {
    Family::of(&net.addr())
}

fn list<'a>(document: &'a Value, name: &str, plugin: &str) -> Result<&'a [Value], Failure> {
    match document.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(list)) => Ok(list),
        Some(other) => Err(invalid(plugin, &format!("{name}: {other}"))),
    }
}

fn invalid(plugin: &str, what: &str) -> Failure {
    Failure::new(Code::DECODING, format!("the result of the IPAM plugin {plugin} cannot be read"), what)
}

/// The settings of DNS in a file in the form of `/etc/resolv.conf`.
pub(crate) fn dns_of(text: &str) -> Value {
    let (mut nameservers, mut search, mut options, mut domain) = (vec![], vec![], vec![], "");
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => nameservers.extend(words.next()),
            Some("domain") => domain = words.next().unwrap_or_default(),
            Some("search") => search.extend(words),
            Some("options") => options.extend(words),
            _ => {}
        }
    }
    json!({"nameservers": nameservers, "domain": domain, "search": search, "options": options})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_cannot_have_is_refused_by_name() {
        let ip = |address: &str| json!({"address": address, "gateway": "10.1.0.1"});
        let routes = |routes: Value| json!({"ips": [ip("10.1.0.2/16")], "routes": routes});
        let both = || [ip("fd00::2/64"), ip("10.1.0.2/16")];
        let both_with = |routes: Value| json!({"ips": both(), "routes": routes});
        for (good, expected) in [
            (json!({"ips": [ip("10.1.0.2/16")]}), &["10.1.0.2/16"][..]),
            (routes(json!(null)), &["10.1.0.2/16"]),
            (routes(json!([{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "0.0.0.0"}])), &["10.1.0.2/16"]),
            (json!({"ips": [ip("fd00::2/64")]}), &["fd00::2/64"]),
            (json!({"ips": [ip("fd00::2/64")], "routes": [{"dst": "::/0", "gw": "::"}]}), &["fd00::2/64"]),
            (json!({"ips": both()}), &["10.1.0.2/16", "fd00::2/64"]),
            (both_with(json!([{"dst": "::/0"}, {"dst": "0.0.0.0/0"}])), &["10.1.0.2/16", "fd00::2/64"]),
        ] {
            let result = IpamResult::read(&good, "x").unwrap();
            let addresses: Vec<String> = result.addresses.iter().map(ToString::to_string).collect();
            assert_eq!(addresses, expected, "{good}");
        }
        for (bad, expected) in [
            (json!({}), "0 IPv4 and 0 IPv6 addresses"),
            (json!({"ips": {}}), "cannot be read"),
            (json!({"ips": [ip("10.1.0.2")]}), "cannot be read"),
            (json!({"ips": [ip("10.1.0.2/16"), ip("10.1.0.3/16")]}), "2 IPv4 and 0 IPv6 addresses"),
            (json!({"ips": [ip("fd00::2/64"), ip("fd00::3/64")]}), "0 IPv4 and 2 IPv6 addresses"),
            (routes(json!([{"dst": "10.0.0.0/8"}])), "no default route of IPv4"),
            (both_with(json!([{"dst": "0.0.0.0/0"}])), "no default route of IPv6"),
            (both_with(json!([{"dst": "::/0"}])), "no default route of IPv4"),
            (both_with(json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00::1"}])), "by fd00::1"),
            (routes(json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}])), "by 10.1.0.1"),
            (routes(json!([{"dst": "x"}])), "cannot be read"),
            (json!({"ips": [ip("10.1.0.2/16")], "dns": 1}), "cannot be read"),
        ] {
            let problem = IpamResult::read(&bad, "x").unwrap_err().to_string();
            assert!(problem.contains(expected) && problem.contains("IPAM plugin x"), "{bad}: {problem}");
        }
    }

    #[test]
    fn settings_of_dns_are_read_and_do_not_replace_others() {
        let text = "# c\nnameserver 10.96.0.10\nsearch a.b c.d\noptions ndots:5\ndomain a\n";
        let dns = dns_of(text);
        let expected = json!({"nameservers": ["10.96.0.10"], "domain": "a", "search": ["a.b", "c.d"], "options": ["ndots:5"]});
        assert_eq!(dns, expected);
        let result = IpamResult { addresses: vec!["10.0.0.1/8".parse().unwrap()], dns };
        for (before, after) in [
            (json!({"dns": {}}), expected.clone()),
            (json!({"dns": {"domain": "x"}}), json!({"domain": "x"})),
        ] {
            let mut document = before;
            result.add_dns(&mut document);
            assert_eq!(document["dns"], after);
        }
    }
}

//! The result of an IPAM plugin, as far as Tortie uses it.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};
use serde_json::{Value, json};

use crate::{Code, Failure};

/// The address of a pod from an IPAM plugin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IpamResult {
    /// The pod's address, with the prefix length of its network.
    pub(crate) address: Ipv4Net,
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
        let mut nets = Vec::new();
        for ip in list(document, "ips", plugin)? {
            let net = ip["address"].as_str().and_then(|text| text.parse::<IpNet>().ok());
            nets.push(net.ok_or_else(|| invalid(plugin, &format!("the address {}", ip["address"])))?);
        }
        let address = match nets[..] {
            [IpNet::V4(address)] => address,
            [IpNet::V6(address)] => {
                return refuse(
                    format!("gives the IPv6 address {address}"),
                    "pods have no IPv6 addresses yet",
                );
            }
            _ => {
                return refuse(format!("gives {} addresses", nets.len()), "a pod has one IPv4 address");
            }
        };
        let routes = list(document, "routes", plugin)?;
        let mut has_default = routes.is_empty();
        for route in routes {
            let Some(Ok(destination)) = route["dst"].as_str().map(str::parse::<IpNet>) else {
                return Err(invalid(plugin, &format!("the route {route}")));
            };
            has_default |= destination == IpNet::V4(Ipv4Net::default());
            let gateway = route["gw"].as_str().filter(|gateway| !gateway.is_empty());
            if let Some(gateway) = gateway.filter(|gateway| gateway.parse() != Ok(Ipv4Addr::UNSPECIFIED)) {
                let why = "all packets of a pod go to its node; take the gateway out of ipam.routes";
                return refuse(format!("gives a route to {destination} by {gateway}"), why);
            }
        }
        if !has_default {
            let why =
                "pods always have a default route; add 0.0.0.0/0 to ipam.routes, or take the others out";
            return refuse("gives routes and no default route".to_owned(), why);
        }
        match &document["dns"] {
            dns @ (Value::Null | Value::Object(_)) => Ok(Self { address, dns: dns.clone() }),
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
        for good in [
            json!({"ips": [ip("10.1.0.2/16")]}),
            routes(json!(null)),
            routes(json!([{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "0.0.0.0"}])),
        ] {
            let result = IpamResult::read(&good, "x").unwrap();
            assert_eq!(result.address.to_string(), "10.1.0.2/16", "{good}");
        }
        for (bad, expected) in [
            (json!({}), "0 addresses"),
            (json!({"ips": {}}), "cannot be read"),
            (json!({"ips": [ip("10.1.0.2")]}), "cannot be read"),
            (json!({"ips": [ip("fd00::2/64")]}), "IPv6 address fd00::2/64"),
            (json!({"ips": [ip("10.1.0.2/16"), ip("fd00::2/64")]}), "2 addresses"),
            (routes(json!([{"dst": "10.0.0.0/8"}])), "no default route"),
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
        let result = IpamResult { address: "10.0.0.1/8".parse().unwrap(), dns };
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

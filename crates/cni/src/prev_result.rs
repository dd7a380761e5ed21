//! The result of the plugins that the runtime called before this one (`prevResult`), in the form of the protocol version of
//! the call. Fields that this plugin does not know are passed on.

use std::net::IpAddr;

use serde_json::{Map, Value, json};

use crate::{Code, Failure, Success};

/// The parts of a result that are lists.
const LISTS: [&str; 3] = ["interfaces", "ips", "routes"];

/// A result of earlier plugins.
#[derive(Debug, Clone, PartialEq)]
pub struct PrevResult(Map<String, Value>);

impl PrevResult {
    /// Reads `prevResult` of a network configuration; `None` if there is none.
    ///
    /// # Errors
    /// It is not a result.
    pub fn read(config: &Map<String, Value>) -> Result<Option<Self>, Failure> {
        let wrong = |what: &str| Failure::new(Code::DECODING, format!("prevResult{what}"), "");
        let result = match config.get("prevResult") {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Object(result)) => result.clone(),
            Some(_) => return Err(wrong(" is no object")),
        };
        for name in LISTS {
            match result.get(name) {
                None | Some(Value::Null) => {}
                Some(Value::Array(list)) if list.iter().all(Value::is_object) => {}
                Some(_) => return Err(wrong(&format!(".{name} is no list of objects"))),
            }
        }
        Ok(Some(Self(result)))
    }

    fn list(&self, name: &str) -> &[Value] {
        self.0.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// Whether an interface of that name is in a sandbox.
    #[must_use]
    pub fn has_interface(&self, name: &str) -> bool {
        let in_sandbox =
            |interface: &Value| interface["sandbox"].as_str().is_some_and(|path| !path.is_empty());
        self.list("interfaces").iter().any(|interface| interface["name"] == name && in_sandbox(interface))
    }

    /// Whether the result has this address, with any prefix length.
    #[must_use]
    pub fn has_address(&self, address: &str) -> bool {
        let host = |text: &str| text.split('/').next().map(str::to_owned);
        self.list("ips").iter().any(|ip| ip["address"].as_str().and_then(host) == host(address))
    }

    /// The addresses of the interface of that name in a sandbox, without the lengths of their prefixes.
    pub(crate) fn addresses_of(&self, name: &str) -> impl Iterator<Item = IpAddr> {
        let of_interface = move |ip: &&Value| {
            let interface = ip["interface"].as_u64().and_then(|index| usize::try_from(index).ok());
            let interface = interface.and_then(|index| self.list("interfaces").get(index));
            interface.is_some_and(|interface| interface["name"] == name)
        };
        let ips = self.list("ips").iter().filter(of_interface);
        ips.filter_map(|ip| ip["address"].as_str()?.split('/').next()?.parse().ok())
    }

    /// This result followed by the plugin's own.
    #[must_use]
    pub fn followed_by(&self, own: &Success, version: &str) -> Value {
        let mut document = self.0.clone();
        document.insert("cniVersion".to_owned(), json!(version));
        let before = self.list("interfaces").len();
        let mut added = own.document(version);
        for ip in added["ips"].as_array_mut().into_iter().flatten() {
            if let Some(index) = ip["interface"].as_u64() {
                ip["interface"] = json!(index + before as u64);
            }
        }
        for name in LISTS {
            let all: Vec<&Value> =
                self.list(name).iter().chain(added[name].as_array().into_iter().flatten()).collect();
            let all = json!(all);
            document.insert(name.to_owned(), all);
        }
        // As with IPAM plugins, whoever comes first decides.
        if document.get("dns").and_then(Value::as_object).is_none_or(Map::is_empty) {
            document.insert("dns".to_owned(), added["dns"].take());
        }
        Value::Object(document)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, Interface, Route};

    fn read(prev_result: Value) -> Result<Option<PrevResult>, Failure> {
        PrevResult::read(json!({"prevResult": prev_result}).as_object().unwrap())
    }

    #[test]
    fn own_parts_follow_those_of_earlier_plugins() {
        let before = read(json!({
            "cniVersion": "1.0.0", "interfaces": [{"name": "dummy0", "socketPath": "/s"}],
            "ips": [{"address": "192.0.2.1/24", "interface": 0}], "dns": {"nameservers": ["192.0.2.53"]}, "extra": 1,
        }));
        let interface = |name: &str, sandbox: &str| Interface {
            name: name.to_owned(),
            mac: String::new(),
            sandbox: sandbox.to_owned(),
        };
        let own = Success {
            interfaces: vec![interface("cali1", ""), interface("eth0", "/n")],
            ips: vec![Address { address: "10.0.0.1/32".to_owned(), interface: 1 }],
            routes: vec![Route { dst: "0.0.0.0/0".to_owned(), gw: None }],
            ..Success::default()
        };
        let all = before.unwrap().unwrap().followed_by(&own, "1.0.0");
        let names: Vec<_> = all["interfaces"].as_array().unwrap().iter().map(|each| &each["name"]).collect();
        assert_eq!(names, ["dummy0", "cali1", "eth0"]);
        assert_eq!(all["interfaces"][0]["socketPath"], "/s");
        assert_eq!(all["ips"][1], json!({"address": "10.0.0.1/32", "interface": 2}));
        assert_eq!(all["ips"][0]["interface"], 0);
        assert_eq!((&all["dns"]["nameservers"][0], &all["extra"]), (&json!("192.0.2.53"), &json!(1)));
        assert_eq!(all["routes"], json!([{"dst": "0.0.0.0/0"}]));
    }

    #[test]
    fn the_first_plugin_with_settings_of_dns_decides() {
        let dns = crate::Dns { domain: "own".to_owned(), ..crate::Dns::default() };
        let own = Success { dns, ..Success::default() };
        let after = |before: Value| read(before).unwrap().unwrap().followed_by(&own, "1.0.0")["dns"].take();
        for none in [json!({"ips": []}), json!({"ips": [], "dns": {}}), json!({"ips": [], "dns": null})] {
            assert_eq!(after(none.clone()), json!({"domain": "own"}), "{none}");
        }
        assert_eq!(after(json!({"ips": [], "dns": {"search": ["a"]}})), json!({"search": ["a"]}));
    }

    #[test]
    fn what_is_no_result_is_rejected() {
        for absent in [json!(null), json!({}), json!({"ips": null})] {
            assert!(read(absent).is_ok());
        }
        for wrong in
            [json!([]), json!("x"), json!({"ips": {}}), json!({"interfaces": ["eth0"]}), json!({"routes": 1})]
        {
            assert_eq!(read(wrong.clone()).unwrap_err().code, Code::DECODING, "{wrong}");
        }
    }
}

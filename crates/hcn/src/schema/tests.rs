//! The documents in their written form: what is read back and what is rejected.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::Guid;

/// Documents as clients send them and HNS answers.
fn documents() -> Vec<(&'static str, Value)> {
    vec![
        (
            "network",
            json!({"Name":"cbr0","Type":"L2Bridge","Flags":8,
                "Policies":[{"Type":"NetAdapterName","Settings":{"NetworkAdapterName":"Ethernet"}}],
                "Ipams":[{"Type":"Static","Subnets":[{"IpAddressPrefix":"10.244.3.0/24",
                    "Routes":[{"NextHop":"10.244.3.1","DestinationPrefix":"0.0.0.0/0"}]}]}],
                "Dns":{"ServerList":["10.96.0.10"]},"SchemaVersion":{"Major":2,"Minor":0}}),
        ),
        (
            "network",
            json!({"Name":"flannel.4096","Type":"Overlay","Flags":8,
                "Policies":[{"Type":"HostRoute","Settings":{}},
                    {"Type":"RemoteSubnetRoute","Settings":{"DestinationPrefix":"10.244.1.0/24",
                        "IsolationId":4096,"ProviderAddress":"10.0.0.5",
                        "DistributedRouterMacAddress":"00-15-5D-00-00-01"}},
                    {"Type":"SetPolicy","Settings":{"Id":"azure-npm-777","Name":"nestedlabel-x",
                        "PolicyType":"NESTEDIPSET","Values":"azure-npm-3216600258,azure-npm-12"}}],
                "MacPool":{"Ranges":[{"StartMacAddress":"00-15-5D-52-C0-00","EndMacAddress":"00-15-5D-52-CF-FF"}]},
                "Ipams":[{"Type":"Static","Subnets":[{"IpAddressPrefix":"10.244.3.0/24",
                    "Policies":[{"Type":"VSID","Settings":{"IsolationId":4096}}],
                    "Routes":[{"NextHop":"10.244.3.1","DestinationPrefix":"0.0.0.0/0"}]}]}],
                "SchemaVersion":{"Major":2,"Minor":0}}),
        ),
        (
            "endpoint",
            json!({"Name":"abc_cbr0","HostComputeNetwork":"6ba7b810-9dad-11d1-80b4-00c04fd430c8",
                "IpConfigurations":[{"IpAddress":"10.244.3.7","PrefixLength":24}],
                "Routes":[{"NextHop":"10.244.3.2","DestinationPrefix":"0.0.0.0/0"}],
                "Dns":{"Search":["svc.cluster.local"],"ServerList":["10.96.0.10"]},
                "MacAddress":"0E-2A-0a-f4-03-07",
                "Policies":[
                    {"Type":"OutBoundNAT","Settings":{"Exceptions":["10.244.0.0/16","10.96.0.0/12"]}},
                    {"Type":"SDNRoute","Settings":{"DestinationPrefix":"10.96.0.0/12","NeedEncap":true}},
                    {"Type":"ProviderAddress","Settings":{"ProviderAddress":"10.0.0.3"}},
                    {"Type":"ACL","Settings":{"Id":"azure-acl-x-y","Protocols":"6","Action":"Allow",
                        "Direction":"In","LocalAddresses":"192.168.100.0/24,10.0.0.21",
                        "RemoteAddresses":"10.0.0.0/8","LocalPorts":"80,8080-8090","RuleType":"Switch",
                        "Priority":200}},
                    {"Type":"PortMapping","Settings":{"Protocol":6,"InternalPort":80,"ExternalPort":8080,
                        "Flags":1}},
                    {"Type":"InterfaceParameters","Settings":{"Mtu":1450}},
                    {"Type":"EncapOverhead","Settings":{"Overhead":50}},
                    {"Type":"QOS","Settings":{"MaximumOutgoingBandwidthInBytes":1000000}}],
                "SchemaVersion":{"Major":2,"Minor":0}}),
        ),
        (
            "namespace",
            json!({"ID":"6ba7b810-9dad-11d1-80b4-00c04fd430c8","NamespaceId":5,"Type":"HostDefault",
                "Resources":[{"Type":"Endpoint","Data":{"Id":"6ba7b811-9dad-11d1-80b4-00c04fd430c8"}}]}),
        ),
        (
            "load balancer",
            json!({"HostComputeEndpoints":["6ba7b811-9dad-11d1-80b4-00c04fd430c8"],"SourceVIP":"10.244.3.2",
                "FrontendVIPs":["10.96.0.1"],
                "PortMappings":[{"Protocol":6,"InternalPort":8080,"ExternalPort":80,"DistributionType":2}],
                "Flags":1,"SchemaVersion":{"Major":2,"Minor":0}}),
        ),
        (
            "modify",
            json!({"ResourceType":"Endpoint","RequestType":"Add",
                "Settings":{"EndpointId":"6ba7b810-9dad-11d1-80b4-00c04fd430c8"}}),
        ),
        ("query", json!({"SchemaVersion":{"Major":2,"Minor":0},"Flags":1,"Filter":"{\"Name\":\"Calico\"}"})),
    ]
}

fn strictly(kind: &str, text: &str) -> Result<Value, DocumentError> {
    fn value<T: Serialize>(document: Result<T, DocumentError>) -> Result<Value, DocumentError> {
        document.map(|document| serde_json::to_value(document).unwrap())
    }
    match kind {
        "network" => value(strict::<Network>(text)),
        "endpoint" => value(strict::<Endpoint>(text)),
        "namespace" => value(strict::<Namespace>(text)),
        "load balancer" => value(strict::<LoadBalancer>(text)),
        "modify" => value(strict::<Modify>(text)),
        _ => value(strict::<Query>(text)),
    }
}

/// The document with an unknown member in each of its objects in turn.
fn with_strangers(document: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    match document {
        Value::Object(members) => {
            let mut strange = members.clone();
            strange.insert("Stranger".into(), json!(1));
            all.push(Value::Object(strange));
            for (key, member) in members {
                for changed in with_strangers(member) {
                    let mut copy = members.clone();
                    copy.insert(key.clone(), changed);
                    all.push(Value::Object(copy));
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                for changed in with_strangers(item) {
                    let mut copy = items.clone();
                    copy[index] = changed;
                    all.push(Value::Array(copy));
                }
            }
        }
        _ => {}
    }
    all
}

#[test]
fn documents_round_trip() {
    for (kind, document) in documents() {
        assert_eq!(strictly(kind, &document.to_string()), Ok(document));
    }
}

#[test]
fn strict_reading_rejects_unknown_members_at_every_depth() {
    let mut found = 0;
    for (kind, document) in documents() {
        for strange in with_strangers(&document) {
            // These parts are opaque.
            let text = strange.to_string();
            let opaque = text.contains(r#""Minor":0,"Stranger""#)
                || kind == "namespace"
                    && text.contains(r#""Data":{"Id":"6ba7b811-9dad-11d1-80b4-00c04fd430c8","S"#)
                || kind == "modify" && text.contains(r#"c8","Stranger"#);
            assert_eq!(strictly(kind, &text).is_err(), !opaque, "{text}");
            found += usize::from(!opaque);
        }
    }
    assert!(found > 30, "only {found} places were tried");
}

#[test]
fn lenient_reading_keeps_unknown_members() {
    for (kind, document) in documents().into_iter().filter(|(kind, _)| *kind == "endpoint") {
        for strange in with_strangers(&document) {
            let read: Endpoint = lenient(&strange.to_string()).unwrap();
            let mut back = serde_json::to_value(&read).unwrap();
            // The schema version is the only part that does not keep unknown members.
            if strange["SchemaVersion"].get("Stranger").is_some() {
                back["SchemaVersion"] = strange["SchemaVersion"].clone();
            }
            assert_eq!(back, strange, "{kind}");
        }
    }
}

#[test]
fn enumerations_are_read_as_words_in_any_case_and_as_numbers() {
    let mode = |value: Value| serde_json::from_value::<NetworkMode>(value);
    assert_eq!(mode(json!("overlay")).unwrap(), NetworkMode::Overlay);
    assert_eq!(mode(json!(5)).unwrap(), NetworkMode::Overlay);
    assert_eq!(mode(json!("Flat")).unwrap(), NetworkMode::Unknown("Flat".into()));
    assert!(mode(json!({})).is_err());
    assert_eq!(lenient::<Network>("{}").unwrap().r#type, NetworkMode::Nat, "HNS leaves the zero value out");
    let error = strict::<Network>(r#"{"Type":"Flat"}"#).unwrap_err();
    assert_eq!(error.at, "Type");
}

#[test]
fn errors_name_the_member() {
    let cases = [
        (r#"{"Ipams":[{"Subnets":[{"Flags":"x"}]}]}"#, "Ipams[0].Subnets[0].Flags"),
        (r#"{"ID":"{6ba7b810-9dad-11d1-80b4-00c04fd430c8}"}"#, "ID"),
        (
            r#"{"Policies":[{"Type":"VSID","Settings":{"IsolationId":-1}}]}"#,
            "Policies[0].Settings.IsolationId",
        ),
        (r#"{"Policies":[{"Type":"vsid","Settings":{"VSID":1}}]}"#, "Policies[0].Settings.VSID"),
        (r#"{"Policies":[{"Type":"PA","Settings":{}}]}"#, "Policies[0].Type"),
        (r#"{} x"#, "end of the document"),
    ];
    for (text, at) in cases {
        let error = strict::<Network>(text).unwrap_err();
        assert_eq!(error.at, at, "{text}: {error}");
    }
}

#[test]
fn query_has_json_inside_json() {
    let query = serde_json::to_value(Query::filter("Name", "a\"b")).unwrap();
    assert_eq!(query, json!({"SchemaVersion":{"Major":2,"Minor":0},"Filter":"{\"Name\":\"a\\\"b\"}"}));
}

#[test]
fn namespace_endpoints_in_both_spellings() {
    let (a, b) = (Guid::random(), Guid::random());
    let namespace: Namespace = lenient(
        &json!({"Resources":[{"Type":"Endpoint","Data":{"Id":a}}, {"Type":"Endpoint","Data":{"ID":b}},
            {"Type":"Container","Data":{"Id":"c"}}]})
        .to_string(),
    )
    .unwrap();
    assert_eq!(namespace.endpoints().collect::<Vec<_>>(), [a, b]);
}

proptest! {
    /// No input makes the parser panic.
    #[test]
    fn any_text_is_read_or_rejected(text in "\\PC{0,80}") {
        let _ = strict::<Network>(&text);
        let _ = strict::<Endpoint>(&text);
        let _ = lenient::<Modify>(&text);
    }
}

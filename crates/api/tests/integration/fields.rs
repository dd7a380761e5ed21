//! Compares the table of fields with the types that read them, and docs/fields.md with both.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use crate::probe::{Read, read_by};
use serde_json::{Value, json};
use tortie_api::calico::{
    BgpConfiguration, BgpFilter, BgpPeer, CalicoNodeStatus, ClusterInformation, FelixConfiguration,
    HostEndpoint, IpPool, KubeControllersConfiguration, NetworkSet, Profile, Tier,
};
use tortie_api::calico::{GlobalNetworkPolicy, NetworkPolicy};
use tortie_api::kubernetes::{EndpointSlice, Namespace, Node, Pod, Service, ServiceAccount};
use tortie_api::support::{self, State, Takes};
use tortie_api::{Key, Kind, manifest};

/// The kinds that users write, each with the type that reads it.
fn types() -> Vec<(&'static str, Vec<Read>)> {
    vec![
        ("NetworkPolicy (projectcalico.org/v3)", read_by::<NetworkPolicy>()),
        ("GlobalNetworkPolicy", read_by::<GlobalNetworkPolicy>()),
        (
            "NetworkPolicy (networking.k8s.io/v1)",
            read_by::<tortie_api::kubernetes::KubernetesNetworkPolicy>(),
        ),
        ("Tier", read_by::<Tier>()),
        ("Profile", read_by::<Profile>()),
        ("NetworkSet, GlobalNetworkSet", read_by::<NetworkSet>()),
        ("HostEndpoint", read_by::<HostEndpoint>()),
        ("IPPool", read_by::<IpPool>()),
        ("FelixConfiguration", read_by::<FelixConfiguration>()),
        ("KubeControllersConfiguration", read_by::<KubeControllersConfiguration>()),
        ("Namespace", read_by::<Namespace>()),
        ("ServiceAccount", read_by::<ServiceAccount>()),
        ("Pod", read_by::<Pod>()),
        ("Node", read_by::<Node>()),
        ("Service", read_by::<Service>()),
        ("EndpointSlice", read_by::<EndpointSlice>()),
    ]
}

/// The fields of `spec` that a type reads.
fn of_spec(read: &[Read]) -> BTreeSet<&str> {
    let names = read.iter().filter_map(|field| field.path.strip_prefix("spec.")?.split(['.', '[']).next());
    names.collect()
}

#[test]
fn the_table_marks_exactly_the_fields_that_types_read_as_implemented() {
    for (kind, read) in
        [(Kind::FelixConfiguration, read_by::<FelixConfiguration>()), (Kind::IpPool, read_by::<IpPool>())]
    {
        let read = of_spec(&read);
        for field in support::fields(kind).unwrap() {
            let is_read = read.contains(field.name);
            match field.state {
                State::Implemented => assert!(is_read, "{kind}: no type reads {}", field.name),
                // awsSubnetID is read only to be rejected.
                _ if kind == Kind::IpPool => {}
                _ => {
                    assert!(!is_read, "{kind}: {} is read; the table says it is not implemented", field.name)
                }
            }
        }
        let table: BTreeSet<&str> = support::fields(kind).unwrap().iter().map(|field| field.name).collect();
        let unknown: Vec<_> = read.difference(&table).collect();
        assert!(unknown.is_empty(), "{kind}: the table lacks {unknown:?}");
        assert_eq!(table.len(), support::fields(kind).unwrap().len(), "{kind}: a field stands twice");
    }
}

#[test]
fn features_that_tortie_does_not_look_for_are_reported() {
    for (text, expected) in [
        ("", None),
        ("ChecksumOffloadBroken=true", None),
        ("checksumoffloadbroken=False,", None),
        ("SNATFullyRandom=true,ChecksumOffloadBroken=true", Some("SNATFullyRandom=true has no effect")),
        ("ChecksumOffloadBroken=", Some("ChecksumOffloadBroken= has no effect")),
    ] {
        let value = json!({"spec": {"featureDetectOverride": text}});
        let found = support::reported(Kind::FelixConfiguration, &value);
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), usize::from(expected.is_some()), "{text}: {found:?}");
        assert!(expected.is_none_or(|expected| found[0].contains(expected)), "{text}: {found:?}");
    }
}

/// What Tortie stores for Calico's nodes, with the types that validate it.
#[test]
fn the_tables_of_kinds_for_calico_have_the_fields_of_their_types() {
    for (kind, read) in [
        (Kind::BgpPeer, read_by::<BgpPeer>()),
        (Kind::BgpConfiguration, read_by::<BgpConfiguration>()),
        (Kind::BgpFilter, read_by::<BgpFilter>()),
        (Kind::ClusterInformation, read_by::<ClusterInformation>()),
        (Kind::CalicoNodeStatus, read_by::<CalicoNodeStatus>()),
    ] {
        let table: BTreeSet<&str> = support::fields(kind).unwrap().iter().map(|field| field.name).collect();
        assert_eq!(of_spec(&read), table, "{kind}");
    }
}

#[test]
fn bgp_kinds_are_validated_and_reported() {
    let document = |kind: &str, name: &str, spec: &Value| {
        json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": {"name": name}, "spec": spec})
            .to_string()
    };
    let rule = |rule: Value| json!({"importV4": [rule]});
    let refused = [
        ("BGPPeer", "x", json!({"peerIP": "10.0.0.1:0"}), "spec.peerIP"),
        (
            "BGPPeer",
            "x",
            json!({"node": "a", "nodeSelector": "all()"}),
            "spec.nodeSelector: may not stand beside node",
        ),
        (
            "BGPPeer",
            "x",
            json!({"peerSelector": "all()", "asNumber": 1}),
            "spec.asNumber: may not stand beside",
        ),
        ("BGPPeer", "x", json!({"localWorkloadSelector": "all()"}), "spec.asNumber: is required"),
        ("BGPPeer", "x", json!({"reachableBy": "10.0.0.1", "peerIP": "fd00::1"}), "spec.reachableBy"),
        ("BGPPeer", "x", json!({"asNumber": "1.65536"}), "spec.asNumber: is no AS number"),
        ("BGPPeer", "x", json!({"ttlSecurity": 256}), "spec.ttlSecurity"),
        ("BGPPeer", "x", json!({"peerIp": "10.0.0.1"}), "unknown field"),
        (
            "BGPConfiguration",
            "node.a",
            json!({"nodeToNodeMeshEnabled": true}),
            "is for the object default only",
        ),
        (
            "BGPConfiguration",
            "default",
            json!({"serviceClusterIPs": [{"cidr": "10.0.0.1/8"}]}),
            "spec.serviceClusterIPs[0].cidr",
        ),
        (
            "BGPConfiguration",
            "default",
            json!({"communities": [{"name": "a", "value": "1:2"}]}),
            "are used by no",
        ),
        (
            "BGPConfiguration",
            "default",
            json!({"ipv4NormalRoutePriority": 0}),
            "spec.ipv4NormalRoutePriority",
        ),
        (
            "BGPConfiguration",
            "default",
            json!({"prefixAdvertisements": [{"cidr": "10.0.0.0/8", "communities": ["b"]}]}),
            "neither a community",
        ),
        ("BGPFilter", "x", rule(json!({})), "action"),
        ("BGPFilter", "x", rule(json!({"action": "Accept", "cidr": "10.0.0.0/8"})), "go together"),
        (
            "BGPFilter",
            "x",
            rule(json!({"action": "Accept", "cidr": "fd00::/8", "matchOperator": "In"})),
            "no IPv4 network",
        ),
        (
            "BGPFilter",
            "x",
            rule(json!({"action": "Reject", "operations": [{"setPriority": {"value": 1}}]})),
            "need action: Accept",
        ),
        ("BGPFilter", "x", rule(json!({"action": "Accept", "operations": [{}]})), "exactly one of"),
        ("ClusterInformation", "x", json!({}), "name it default"),
        ("ClusterInformation", "default", json!({"ready": true}), "unknown field"),
        ("CalicoNodeStatus", "x", json!({"classes": ["Bgp"]}), "spec.classes"),
    ];
    for (kind, name, spec, expected) in refused {
        let problems = manifest::read("f.yml", &document(kind, name, &spec)).unwrap_err();
        let messages: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(messages.iter().any(|line| line.contains(expected)), "{kind} {name} {spec}: {messages:?}");
    }
    let community = json!([{"name": "a", "value": "65001:100"}]);
    let taken = [
        (
            "BGPPeer",
            "x",
            json!({"peerIP": "[fd00::1]:179", "asNumber": "64512", "filters": ["f"], "keepaliveTime": "10s"}),
        ),
        (
            "BGPConfiguration",
            "default",
            json!({"asNumber": 64512, "communities": community,
            "prefixAdvertisements": [{"cidr": "10.0.0.0/8", "communities": ["a", "1:2:3"]}]}),
        ),
        (
            "BGPFilter",
            "x",
            rule(json!({"action": "Accept", "cidr": "10.0.0.0/8", "matchOperator": "In",
            "prefixLength": {"min": 8, "max": 32}, "operations": [{"prependASPath": {"prefix": [1]}}]})),
        ),
        ("ClusterInformation", "default", json!({"clusterGUID": "x", "datastoreReady": true})),
        (
            "CalicoNodeStatus",
            "x",
            json!({"node": "a", "classes": ["Agent", "BGP", "Routes"], "updatePeriodSeconds": 10}),
        ),
    ];
    for (kind, name, spec) in taken {
        manifest::read("f.yml", &document(kind, name, &spec))
            .unwrap_or_else(|problems| panic!("{kind}: {problems:?}"));
    }
    let reported = |kind, spec: Value| support::reported(kind, &json!({"spec": spec})).len();
    assert_eq!(reported(Kind::BgpPeer, json!({"peerIP": "10.0.0.1", "asNumber": 1})), 0);
    assert_eq!(reported(Kind::BgpPeer, json!({"peerIP": "10.0.0.1", "reachableBy": "10.0.0.2"})), 1);
    assert_eq!(reported(Kind::BgpConfiguration, json!({"nodeToNodeMeshEnabled": false})), 0);
    assert_eq!(reported(Kind::ClusterInformation, json!({"clusterGUID": "x", "datastoreReady": false})), 0);
}

/// The type has every field of the table and no other.
#[test]
fn the_table_of_the_controllers_has_the_fields_of_its_type() {
    let read = read_by::<KubeControllersConfiguration>();
    let read: BTreeSet<&str> = read.iter().filter_map(|field| field.path.strip_prefix("spec.")).collect();
    let read: BTreeSet<&str> = read.into_iter().map(|path| path.trim_end_matches("[]")).collect();
    let table = support::fields(Kind::KubeControllersConfiguration).unwrap();
    assert_eq!(read, table.iter().map(|field| field.name).collect());
}

/// Every state and every type of value, in manifests as a user would write them.
#[test]
fn felix_configuration_fields_are_validated() {
    let document = |name: &str, spec: &Value| json!({"apiVersion": "projectcalico.org/v3", "kind": "FelixConfiguration", "metadata": {"name": name}, "spec": spec});
    let refused = [
        ("default", json!({"vxlanVNI": "abc"}), "spec.vxlanVNI: \"abc\" is not a whole number"),
        ("default", json!({"vxlanVNI": 16_777_216}), "spec.vxlanVNI"),
        (
            "default",
            json!({"vxlanMTU": 70_000}),
            "spec.vxlanMTU: 70000 is not 0 or a whole number from 68 to 65535",
        ),
        ("default", json!({"vxlanMTUV6": 65_536}), "spec.vxlanMTUV6"),
        ("default", json!({"vxlanMTUV6": 1_279}), "0 or a whole number from 1280 to 65535"),
        ("default", json!({"ipipMTU": 67}), "spec.ipipMTU"),
        ("default", json!({"nosuchField": 1}), "spec.nosuchField: unknown field"),
        ("default", json!({"bpfEnabled": "yes"}), "spec.bpfEnabled: \"yes\" is not true or false"),
        ("default", json!({"netlinkTimeout": "soon"}), "spec.netlinkTimeout: \"soon\" is not a time"),
        ("default", json!({"netlinkTimeout": ""}), "spec.netlinkTimeout: \"\" is not a time"),
        ("default", json!({"floatingIPs": "Pass"}), "is not Enabled or Disabled"),
        ("default", json!({"logActionRateLimitBurst": 10_000}), "is not a whole number from 0 to 9999"),
        ("default", json!({"natOutgoingAddress": "::"}), "is not an IPv4 address"),
        ("default", json!({"externalNodesList": [1]}), "is not a list of networks and addresses"),
        ("default", json!({"nodeSelector": "all()"}), "is not allowed: name the object node.NAME"),
        ("default", json!({"wireguardListeningPort": 0}), "is not a whole number from 1 to 65535"),
        ("default", json!({"kubeNodePortRanges": ["http"]}), "is not a list of ports and ranges"),
        ("default", json!({"natPortRange": 0}), "is not a port"),
        ("default", json!({"wireguardInterfaceName": "::/0"}), "is not the name of an interface"),
        ("default", json!({"logActionRateLimit": "Pass"}), "is not a rate"),
        ("default", json!({"routeTableRange": {"min": 9}}), "is not a mapping of min and max"),
        (
            "default",
            json!({"healthTimeoutOverrides": [{"name": "*", "timeout": "1s"}]}),
            "is not a list of mappings",
        ),
        (
            "default",
            json!({"mtuIfacePattern": "/re(/"}),
            "spec.mtuIfacePattern: \"/re(/\" is not a regular expression",
        ),
        ("default", json!({"bpfDataIfacePattern": "*"}), "is not a regular expression"),
        ("default", json!({"bpfL3IfacePattern": "["}), "is not a regular expression"),
        ("default", json!({"logDebugFilenameRegex": "(?P<>x)"}), "is not a regular expression"),
        ("primary", json!({}), "metadata.name: no node reads \"primary\""),
        ("node.", json!({}), "metadata.name"),
    ];
    for (name, spec, expected) in refused {
        let problems = manifest::read("f.yml", &document(name, &spec).to_string()).unwrap_err();
        let messages: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(messages.iter().any(|line| line.contains(expected)), "{name} {spec}: {messages:?}");
    }
    let taken = [
        ("default", json!({"mtuIfacePattern": "^(en|eth)[0-9]+$", "logDebugFilenameRegex": ""})),
        ("default", json!({"vxlanMTU": 0, "vxlanMTUV6": 1280, "ipipMTU": 65_535})),
        ("default", json!({"vxlanVNI": 4096, "netlinkTimeout": "1m30s", "logSeverityScreen": "info"})),
        ("node.primary", json!({"bpfEnabled": true, "bpfLogFilters": {"all": "tcp"}, "natPortRange": "1:2"})),
    ];
    for (name, spec) in taken {
        manifest::read("f.yml", &document(name, &spec).to_string()).expect(name);
    }
}

#[test]
fn fields_without_effect_are_reported_unless_they_request_the_fixed_value() {
    let paths =
        |errors: Vec<tortie_api::FieldError>| errors.into_iter().map(|it| it.path).collect::<Vec<_>>();
    let felix = Kind::FelixConfiguration;
    let value = json!({"spec": {
        "wireguardEnabled": true, "wireguardEnabledV6": false, "vxlanVNI": 5000, "vxlanPort": 4790, "bpfEnabled": true,
        "serviceLoopPrevention": "disabled", "defaultEndpointToHostAction": "Drop", "bpfLogLevel": null,
    }});
    assert_eq!(paths(support::rejected(felix, &value)), ["spec.wireguardEnabled"]);
    assert_eq!(paths(support::reported(felix, &value)), ["spec.bpfEnabled"]);
    let stored = json!({"spec": {"vxlanVNI": "abc", "vxlanMTU": 20, "wireguardEnabled": true, "usageReportingEnabled": true}});
    let all = support::not_in_force(&Key::global(felix, "other"), &stored);
    let expected = [
        "metadata.name",
        "spec.vxlanMTU",
        "spec.vxlanVNI",
        "spec.wireguardEnabled",
        "spec.usageReportingEnabled",
    ];
    assert_eq!(paths(all), expected);
}

#[test]
fn settings_of_the_controllers_are_validated_and_reported() {
    let document = |name: &str, spec: &Value| json!({"apiVersion": "projectcalico.org/v3", "kind": "KubeControllersConfiguration", "metadata": {"name": name}, "spec": spec});
    let node = |node: Value| json!({"controllers": {"node": node}});
    let refused = [
        ("other", json!({}), "metadata.name: \"other\" is not read; name it default"),
        ("default", json!({"controllers": {"nodes": {}}}), "spec.controllers.nodes: unknown field"),
        ("default", node(json!({"syncLabels": "yes"})), "spec.controllers.node.syncLabels"),
        (
            "default",
            node(json!({"leakGracePeriod": "soon"})),
            "spec.controllers.node.leakGracePeriod: \"soon\" is not a time",
        ),
        ("default", json!({"prometheusMetricsPort": 70000}), "spec.prometheusMetricsPort"),
        ("default", json!({"logSeverityScreen": "Loud"}), "spec.logSeverityScreen"),
    ];
    for (name, spec, expected) in refused {
        let problems = manifest::read("f.yml", &document(name, &spec).to_string()).unwrap_err();
        let messages: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert!(messages.iter().any(|line| line.contains(expected)), "{name} {spec}: {messages:?}");
    }
    let paths =
        |errors: Vec<tortie_api::FieldError>| errors.into_iter().map(|it| it.path).collect::<Vec<_>>();
    let spec = json!({
        "logSeverityScreen": "Info", "healthChecks": "Enabled", "prometheusMetricsPort": 0,
        "controllers": {"node": {"hostEndpoint": {"autoCreate": "Enabled", "templates": [{"generateName": "x"}]}},
            "policy": {"reconcilerPeriod": "5m"}},
    });
    let value = document("default", &spec);
    manifest::read("f.yml", &value.to_string()).unwrap();
    let kind = Kind::KubeControllersConfiguration;
    assert_eq!(paths(support::rejected(kind, &value)), ["spec.controllers.node.hostEndpoint.templates"]);
    assert_eq!(
        paths(support::reported(kind, &value)),
        ["spec.controllers.policy.reconcilerPeriod"],
        "what Calico's client writes into each object is not reported"
    );
}

/// Without an overlay, nodes do not carry each other's packets, and Never is the default.
#[test]
fn a_pool_without_encapsulation_is_reported() {
    for (spec, named) in [
        (json!({"cidr": "10.0.0.0/16"}), true),
        (json!({"cidr": "10.0.0.0/16", "vxlanMode": "Never"}), true),
        (json!({"cidr": "10.0.0.0/16", "vxlanMode": "Never", "disabled": true}), false),
        (json!({"cidr": "10.0.0.0/16", "vxlanMode": "Always"}), false),
    ] {
        let reported = support::reported(Kind::IpPool, &json!({"spec": spec}));
        assert_eq!(reported.iter().any(|it| it.path == "spec.vxlanMode"), named, "{spec}");
    }
}

#[test]
fn unsupported_annotations_are_rejected() {
    let refused = |name: &str| {
        let annotations = [(name.to_owned(), "x".to_owned())].into();
        support::refused_annotation(Kind::Pod, &annotations).map(|(name, _)| name.to_owned())
    };
    for (name, ..) in support::ANNOTATIONS {
        assert_eq!(refused(name).as_deref(), Some(*name));
    }
    assert!(refused("cni.projectcalico.org/somethingNew").is_some());
    for name in ["cni.projectcalico.org/podIP", "example.com/ipAddrs", "projectcalico.org/labels"] {
        assert_eq!(refused(name), None, "{name}");
    }
}

#[test]
fn annotations_about_addresses_are_checked() {
    let (pod, namespace) = (Kind::Pod, Kind::Namespace);
    for (kind, name, text, problem) in [
        (pod, "ipAddrs", r#"["10.0.0.5"]"#, None),
        (pod, "ipAddrs", "", None),
        (pod, "ipAddrs", "10.0.0.5", Some("is no list of texts")),
        (pod, "ipAddrs", "[]", Some("it has no address")),
        (pod, "ipAddrs", r#"["10.0.0.5", "10.0.0.6"]"#, Some("2 IPv4 addresses")),
        (pod, "ipAddrs", r#"["10.0.0.5/32"]"#, Some("is no address")),
        (pod, "ipAddrs", r#"["10.0.0.5", "fd00::5"]"#, None),
        (pod, "ipAddrs", r#"["fd00::5"]"#, None),
        (pod, "ipAddrs", r#"["fd00::5", "10.0.0.5", "fd00::6"]"#, Some("2 IPv6 addresses")),
        (namespace, "ipAddrs", r#"["10.0.0.5"]"#, Some("move it to a Pod")),
        (pod, "ipAddrsNoIpam", r#"["10.0.0.5"]"#, None),
        (pod, "ipAddrsNoIpam", r#"["10.0.0.5", "10.0.0.6"]"#, Some("exactly one IPv4 address")),
        (pod, "ipAddrsNoIpam", r#"["fd00::5"]"#, Some("exactly one IPv4 address")),
        (namespace, "ipAddrsNoIpam", r#"["10.0.0.5"]"#, Some("move it to a Pod")),
        (pod, "ipv4pools", r#"["one", "10.0.0.0/16"]"#, None),
        (namespace, "ipv4pools", "[]", None),
        (namespace, "ipv4pools", "one", Some("is no list of texts")),
        (pod, "ipv4pools", r#"["fd00::/64"]"#, Some("is no IPv4 pool")),
        (pod, "ipv6pools", r#"["six", "fd00::/64"]"#, None),
        (namespace, "ipv6pools", r#"["10.0.0.0/16"]"#, Some("is no IPv6 pool")),
        (pod, "hwAddr", "0a:00:00:00:00:01", None),
        (pod, "hwAddr", "", None),
        (pod, "hwAddr", "0a:00:00:00:00", Some("is no MAC address")),
        (pod, "hwAddr", "01:00:5e:00:00:01", Some("of a group")),
        (pod, "hwAddr", "00:00:00:00:00:00", Some("of no interface")),
        (pod, "hwAddr", "ee:ee:ee:ee:ee:ee", Some("the other end of the pod's link")),
        (namespace, "hwAddr", "0a:00:00:00:00:01", Some("move it to a Pod")),
        (pod, "floatingIPs", r#"["10.0.0.5"]"#, Some("off, as they are in Calico")),
        (pod, "floatingIPs", r#"["x"]"#, Some("is no address")),
    ] {
        let name = format!("cni.projectcalico.org/{name}");
        let found =
            support::unsupported_annotation(kind, &json!({"metadata": {"annotations": {(&name): text}}}));
        let map = [(name.clone(), text.to_owned())].into();
        let of_map = support::refused_annotation(kind, &map).map(|(_, why)| why);
        match problem {
            None => assert_eq!((found, of_map), (None, None), "{kind} {name} {text}"),
            Some(problem) => {
                let found = found.unwrap_or_else(|| panic!("{kind} {name} {text} is accepted"));
                assert!(found.problem.contains(problem), "{found}");
                assert!(of_map.unwrap().contains(problem));
            }
        }
    }
}

#[test]
fn annotations_of_pods_win_over_those_of_namespaces() {
    let of = |pools: Option<&str>| {
        let pools = pools.map(|text| ("cni.projectcalico.org/ipv4pools".to_owned(), text.to_owned()));
        pools.into_iter().collect()
    };
    for (pod, namespace, expected) in [
        (None, None, None),
        (None, Some(r#"["a"]"#), Some(vec!["a"])),
        (Some(r#"["b"]"#), Some(r#"["a"]"#), Some(vec!["b"])),
        (Some("[]"), Some(r#"["a"]"#), Some(vec![])),
        (Some(""), Some(r#"["a"]"#), Some(vec!["a"])),
    ] {
        let requested = support::requested(&of(pod), &of(namespace));
        let expected = expected.map(|pools: Vec<&str>| pools.into_iter().map(str::to_owned).collect());
        assert_eq!(requested, support::Requested { pools: expected, ..Default::default() });
    }
    let address = |text: &str| [("cni.projectcalico.org/ipAddrs".to_owned(), text.to_owned())].into();
    let requested = support::requested(&address(r#"["10.0.0.5"]"#), &address(r#"["10.0.0.6"]"#));
    assert_eq!(requested.addresses, ["10.0.0.5".parse::<std::net::IpAddr>().unwrap()]);
}

/// `UPDATE_DOCS=1 cargo test -p tortie-api --test integration fields::` rewrites the page.
#[test]
fn the_page_matches_types_and_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/fields.md");
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == page,
        "docs/fields.md is not up to date: UPDATE_DOCS=1 cargo test -p tortie-api --test integration fields::"
    );
}

fn page() -> String {
    let mut page = String::from(INTRODUCTION);
    for (kind, table) in [
        ("FelixConfiguration", support::fields(Kind::FelixConfiguration)),
        ("IPPool", support::fields(Kind::IpPool)),
        ("KubeControllersConfiguration", support::fields(Kind::KubeControllersConfiguration)),
        ("BGPPeer", support::fields(Kind::BgpPeer)),
        ("BGPConfiguration", support::fields(Kind::BgpConfiguration)),
        ("BGPFilter", support::fields(Kind::BgpFilter)),
        ("ClusterInformation", support::fields(Kind::ClusterInformation)),
        ("CalicoNodeStatus", support::fields(Kind::CalicoNodeStatus)),
    ] {
        let _ = write!(page, "\n## {kind}\n\n| field of `spec` | takes | state |\n|---|---|---|\n");
        for field in table.unwrap() {
            let state = state_text(field.state);
            let usual: Vec<String> = field.usual.iter().map(|value| format!("`{value}`")).collect();
            let usual = match usual.len() {
                0 => String::new(),
                _ => format!(" (no report for {})", usual.join(", ").replace("``", "`\"\"`")),
            };
            let state = match field.name {
                "vxlanMode" => {
                    "implemented: `Always`, `CrossSubnet`, `Never` (reported by agents without a BGP speaker)"
                        .to_owned()
                }
                _ => state,
            };
            let _ = writeln!(page, "| `{}` | {} | {state}{usual} |", field.name, shown(field.takes));
        }
    }
    let _ = write!(
        page,
        "\n## Annotations of Pods and Namespaces\n\n| annotation | takes | state |\n|---|---|---|\n"
    );
    for (name, takes, state) in support::ANNOTATIONS {
        let _ = writeln!(page, "| `{name}` | {takes} | {} |", state_text(*state));
    }
    let _ = write!(page, "\n## The other kinds\n\n{OTHERS}");
    for (kind, read) in types()
        .into_iter()
        .filter(|(kind, _)| !["FelixConfiguration", "IPPool", "KubeControllersConfiguration"].contains(kind))
    {
        let _ = write!(page, "\n### {kind}\n\n");
        let fields: Vec<String> = read.iter().map(|field| format!("`{}`", field.path)).collect();
        let fields = if fields.is_empty() { vec!["its name and labels".to_owned()] } else { fields };
        let _ = writeln!(page, "{}", fields.join(", "));
    }
    page
}

fn state_text(state: State) -> String {
    match state {
        State::Implemented => "implemented".to_owned(),
        State::Rejected(why) => format!("rejected: {why}"),
        State::Reported(why) => format!("reported: {why}"),
    }
}

fn shown(takes: Takes) -> String {
    takes.to_string()
}

const INTRODUCTION: &str = "\
# Fields

What Tortie does with each field of each kind. A test generates this page from the types and from the program's tables
(`crates/api/src/support`).

- **implemented**: the field has the documented effect.
- **rejected**: `tortie apply` rejects the field with the reason. If another client has stored it, every node reports it.
- **reported**: the field has no effect, and ignoring it is safe. `tortie apply` warns, every affected node reports the
  field, and `tortie apply --wait` does not report it as in force. Values that request what Tortie does anyway are not
  reported.

Fields that are not listed, and values of another type, are rejected with file, line and field.
";

const OTHERS: &str = "\
Tortie reads all of the fields below. A policy with any other field is rejected. If another client has stored it, it
denies everything and is reported. Other Kubernetes fields of Pods, Nodes and Services are accepted, because they concern
the scheduler, the kubelet and the Service proxy.
";

//! The edges of validation, where Calico's validators decide: what they accept is accepted, what they reject is rejected,
//! and the message names the field.

use serde_json::{Value, json};
use tortie_api::calico::{EndpointToHostAction, PolicyCounters};
use tortie_api::{Key, Kind, Resource, manifest};

/// The problems with a manifest; none where it is accepted.
fn problems(kind: &str, name: &str, spec: &str) -> String {
    let namespace =
        if kind.starts_with("Global") || kind.starts_with("StagedGlobal") { "" } else { ", namespace: 'n'" };
    let namespace = if ["Tier", "HostEndpoint", "Profile"].contains(&kind) { "" } else { namespace };
    let text = format!(
        "{{apiVersion: projectcalico.org/v3, kind: {kind}, metadata: {{name: {name}{namespace}}}, spec: {spec}}}\n"
    );
    let found = manifest::read("m.yml", &text).err().unwrap_or_default();
    found.iter().map(|problem| format!("{problem}\n")).collect()
}

#[test]
fn what_calico_accepts_is_accepted() {
    let nested = format!("{}a == 'b'{}", "(".repeat(2_000), ")".repeat(2_000));
    for (kind, spec) in [
        (
            "NetworkPolicy",
            "{ingress: [{action: Allow, protocol: TCP, source: {services: {name: s}, ports: [53]}}]}",
        ),
        (
            "NetworkPolicy",
            "{ingress: [{action: Allow, protocol: TCP, source: {services: {name: s}, notPorts: [53]}}]}",
        ),
        ("NetworkPolicy", "{ingress: [{action: Allow, notICMP: {type: 8}}]}"),
        ("NetworkPolicy", "{ingress: [{action: Allow, protocol: TCP, notICMP: {type: 8}}]}"),
        ("NetworkPolicy", "{ingress: [{action: Allow, source: {notSelector: global()}}]}"),
        ("NetworkPolicy", "{ingress: [{action: Allow, source: {namespaceSelector: global()}}]}"),
        ("NetworkPolicy", &format!("{{selector: \"{nested}\"}}")),
        ("NetworkPolicy", "{selector: ' ', ingress: [{action: Allow, source: {selector: \"\\t \"}}]}"),
        ("NetworkPolicy", "{ingress: [{action: Allow, metadata: {annotations: {a: b}}}]}"),
        (
            "NetworkPolicy",
            "{ingress: [{action: Allow, protocol: 6}, {action: Allow, protocol: '6'}, {action: Allow, protocol: TCP}]}",
        ),
        (
            "NetworkPolicy",
            "{ingress: [{action: Allow, protocol: TCP, destination: {ports: [1, 65535, '1:2', a-1]}}]}",
        ),
        ("NetworkPolicy", "{ingress: [{action: Allow, notProtocol: ICMP, ipVersion: 4}]}"),
        ("NetworkPolicy", "{types: [Ingress, Egress], performanceHints: [AssumeNeededOnEveryNode]}"),
        ("StagedNetworkPolicy", "{stagedAction: Delete}"),
        ("HostEndpoint", "{node: 'n', interfaceName: eth0, ports: [{name: web, protocol: TCP, port: 80}]}"),
        ("Profile", "{labelsToApply: {a: b}}"),
    ] {
        let found = problems(kind, "x", spec);
        assert!(found.is_empty(), "{kind} {spec}: {found}");
    }
}

#[test]
fn what_calico_rejects_is_rejected() {
    let rule = |rule: &str| format!("{{ingress: [{{action: Allow, {rule}}}]}}");
    let ports = |ports: &str| rule(&format!("protocol: TCP, destination: {{ports: [{ports}]}}"));
    let table: Vec<(&str, &str, String, &str)> = vec![
        ("NetworkPolicy", "x", "{selector: global()}".into(), "spec.selector: global()"),
        ("NetworkPolicy", "x", "{selector: \"a == 'b' || global()\"}".into(), "spec.selector: global()"),
        (
            "NetworkPolicy",
            "x",
            "{serviceAccountSelector: global()}".into(),
            "spec.serviceAccountSelector: global()",
        ),
        (
            "GlobalNetworkPolicy",
            "x",
            "{namespaceSelector: global()}".into(),
            "spec.namespaceSelector: global()",
        ),
        ("NetworkPolicy", "x", "{selector: \"\\n\"}".into(), "spec.selector: "),
        ("NetworkPolicy", "x", "{selector: \"\\u00a0\"}".into(), "spec.selector: "),
        ("NetworkPolicy", "x", "{selector: \"a == 'b'\\n\"}".into(), "spec.selector: "),
        ("GlobalNetworkPolicy", "x", "{namespaceSelector: \"\\n\"}".into(), "spec.namespaceSelector: "),
        ("NetworkPolicy", "x", rule("source: {selector: \"\\n\"}"), "source.selector: "),
        ("NetworkPolicy", "x", rule("source: {notSelector: \"\\u00a0\"}"), "source.notSelector: "),
        ("NetworkPolicy", "x", rule("source: {namespaceSelector: \"\\r\\n\"}"), "source.namespaceSelector: "),
        ("NetworkPolicy", "x", ports("0"), "destination.ports[0]: "),
        ("NetworkPolicy", "x", ports("'0:100'"), "destination.ports[0]: "),
        ("NetworkPolicy", "x", ports("'+80'"), "destination.ports[0]: "),
        ("NetworkPolicy", "x", ports("'+1:80'"), "destination.ports[0]: "),
        ("NetworkPolicy", "x", ports("a-name-of-16-char"), "destination.ports[0]: "),
        ("NetworkPolicy", "x", ports("Web"), "destination.ports[0]: "),
        ("NetworkPolicy", "x", rule("protocol: '+6'"), "protocol: "),
        ("NetworkPolicy", "x", rule("protocol: tcp"), "protocol: "),
        ("NetworkPolicy", "x", rule("protocol: ICMP, destination: {ports: [web]}"), "destination.ports: "),
        ("NetworkPolicy", "x", rule("source: {nets: [10.0.0.1/8]}"), "source.nets"),
        ("NetworkPolicy", "x", rule("source: {notNets: ['fd00::1/8']}"), "source.notNets"),
        ("NetworkPolicy", "x", rule("metadata: text"), "metadata: "),
        ("NetworkPolicy", "x", rule("metadata: {labels: {a: b}}"), "metadata"),
        ("NetworkPolicy", "x", rule("metadata: {annotations: [a]}"), "metadata.annotations"),
        ("NetworkPolicy", "x", rule("metadata: {annotations: {a: 1}}"), "metadata.annotations"),
        ("NetworkPolicy", "x", rule("notProtocol: ICMP, ipVersion: 6"), "ipVersion: "),
        ("NetworkPolicy", "x", rule("notProtocol: ICMPv6, ipVersion: 4"), "ipVersion: "),
        ("NetworkPolicy", "x", "{types: [Ingress, Ingress]}".into(), "spec.types[1]: "),
        (
            "NetworkPolicy",
            "x",
            "{performanceHints: [AssumeNeededOnEveryNode, AssumeNeededOnEveryNode]}".into(),
            "spec.performanceHints[1]: ",
        ),
        ("StagedNetworkPolicy", "x", "{stagedAction: Delete, selector: all()}".into(), "spec.selector: "),
        ("StagedGlobalNetworkPolicy", "x", "{stagedAction: Delete, order: 1}".into(), "spec.order: "),
        (
            "StagedKubernetesNetworkPolicy",
            "x",
            "{stagedAction: Delete, ingress: [{}]}".into(),
            "spec.ingress: ",
        ),
        ("Tier", "Deny", "{order: 1}".into(), "metadata.name: "),
        ("Tier", "\"\\0\"", "{order: 1}".into(), "metadata.name: "),
        ("Tier", "a.b", "{order: 1}".into(), "metadata.name: "),
        ("Tier", "x", "{defaultAction: deny}".into(), "spec.defaultAction: "),
        ("NetworkPolicy", "x", "{tier: Deny}".into(), "spec.tier: "),
        ("NetworkPolicy", "x", "{tier: a.b}".into(), "spec.tier: "),
        ("NetworkPolicy", "Deny", "{}".into(), "metadata.name: "),
        ("GlobalNetworkPolicy", "a..b", "{}".into(), "metadata.name: "),
        ("Profile", "x", "{labelsToApply: {'-a': b}}".into(), "spec.labelsToApply"),
        ("Profile", "x", "{labelsToApply: {a: '-b-'}}".into(), "spec.labelsToApply"),
        (
            "HostEndpoint",
            "x",
            "{node: 'n', interfaceName: eth0, ports: [{protocol: TCP, port: 80}]}".into(),
            "spec.ports[0]",
        ),
        (
            "HostEndpoint",
            "x",
            "{node: 'n', interfaceName: eth0, ports: [{name: '', protocol: TCP, port: 80}]}".into(),
            "spec.ports[0]",
        ),
    ];
    for (kind, name, spec, expected) in table {
        let found = problems(kind, name, &spec);
        assert!(found.contains(expected), "{kind} {name} {spec}: {expected:?} is not in {found:?}");
    }
}

/// The port of VXLAN must not change because of a typing error in another setting.
#[test]
fn a_setting_that_cannot_be_read_leaves_the_others_in_force() {
    let key = Key::global(Kind::FelixConfiguration, "default");
    let read = |annotations: Value, spec: Value| {
        let value = json!({"metadata": {"name": "default", "annotations": annotations}, "spec": spec});
        match Resource::read_what_can_be(&key, &value) {
            (Some(Resource::FelixConfiguration(felix)), problems) => (felix.spec, problems.len()),
            (other, problems) => panic!("{other:?}: {problems:?}"),
        }
    };
    for (annotations, spec) in [
        (json!({"tortie.io/establishedFlows": "cut", "tortie.io/policyCounters": "Enabled"}), json!({})),
        (json!({"tortie.io/provenPolicySets": "x", "tortie.io/policyCounters": "Enabled"}), json!({})),
        (json!({"tortie.io/policyCounters": "Enabled"}), json!({"vxlanMTU": -1})),
        (
            json!({"tortie.io/policyCounters": "Enabled"}),
            json!({"failsafeInboundHostPorts": [{"protocol": "TCP", "port": 84_720}]}),
        ),
        (
            json!({"tortie.io/policyCounters": "Enabled"}),
            json!({"failsafeInboundHostPorts": [{"protocol": "TCP", "port": 9100, "net": "10.0.0.0/33"}]}),
        ),
    ] {
        let mut spec = spec;
        spec["vxlanVNI"] = json!(5000);
        spec["vxlanPort"] = json!(8472);
        let (found, problems) = read(annotations, spec.clone());
        assert_eq!((found.vxlan_vni, found.vxlan_port), (Some(5000), Some(8472)), "{spec}");
        assert_eq!(found.policy_counters, Some(PolicyCounters::Enabled), "{spec}");
        assert_eq!((found.established_flows, found.vxlan_mtu), (None, None), "{spec}");
        assert_eq!(found.default_endpoint_to_host_action, None, "{spec}");
        assert_eq!(found.failsafe_inbound_host_ports, None, "the usual ports: {spec}");
        assert!(problems > 0, "{spec}");
    }
    // This one closes.
    let (found, _) = read(json!({}), json!({"defaultEndpointToHostAction": "Acept", "vxlanPort": 8472}));
    assert_eq!(found.default_endpoint_to_host_action, Some(EndpointToHostAction::Drop));
    assert_eq!(found.vxlan_port, Some(8472));
    let (found, _) = read(json!({}), json!("text"));
    assert_eq!(found.default_endpoint_to_host_action, Some(EndpointToHostAction::Drop));
}

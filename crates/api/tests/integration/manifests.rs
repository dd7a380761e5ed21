//! Manifests: those of the seed are read unchanged; every problem is reported with file, line, object and field.

use proptest::prelude::*;
use serde_json::json;
use tortie_api::manifest::{Object, read};
use tortie_api::{Kind, Resource};

fn seed(name: &str) -> Vec<Object> {
    let path = format!("{}/../../examples/seed-002/{name}", env!("CARGO_MANIFEST_DIR"));
    read(name, &std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_seed_manifests_are_read_unchanged() {
    let objects = seed("policy-demo-pods.yml");
    let keys: Vec<_> = objects.iter().map(|object| (object.key.to_string(), object.origin.line)).collect();
    let expected = [
        ("Namespace calico-demo", 3),
        ("Pod calico-demo/linux-client", 11),
        ("Pod calico-demo/linux-server", 33),
        ("Pod calico-demo/windows-client", 52),
        ("Pod calico-demo/windows-server", 74),
    ];
    assert_eq!(keys.iter().map(|(key, line)| (key.as_str(), *line)).collect::<Vec<_>>(), expected);
    let Resource::Pod(pod) = &objects[4].resource else { panic!("a pod") };
    assert_eq!(pod.spec.containers[0].ports[0].container_port, 80);
    assert_eq!(pod.spec.node_selector["kubernetes.io/os"], "windows");

    let policy = seed("policy-demo-policy.yml").remove(0);
    assert_eq!(policy.key.kind, Kind::NetworkPolicy);
    let Resource::NetworkPolicy(policy) = policy.resource else { panic!("a policy") };
    assert_eq!(policy.spec.selector.unwrap().to_string(), "app == \"windows-server\"");
}

/// A policy with `rule` as its only ingress rule, on line 6.
fn with_rule(rule: &str) -> String {
    format!(
        "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: p, namespace: 'n'}}\nspec:\n  ingress:\n  - {rule}\n"
    )
}

fn problems(text: &str) -> Vec<String> {
    match read("m.yml", text) {
        Ok(objects) => panic!("read {} objects from\n{text}", objects.len()),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn ipam_settings() {
    let manifest = |kind: &str, name: &str, spec: &str| {
        format!("apiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
    };
    for (kind, name, spec, expected) in [
        ("IPAMConfig", "other", "{}", "metadata.name: nobody reads it"),
        (
            "IPAMConfig",
            "default",
            "{strictAffinity: false, autoAllocateBlocks: false}",
            "spec.autoAllocateBlocks: false needs",
        ),
        ("IPAMConfig", "default", "{maxBlocksPerHost: 3}", "spec.maxBlocksPerHost: needs strictAffinity"),
        (
            "IPAMConfig",
            "default",
            "{kubeVirtVMAddressPersistence: Enabled}",
            "spec.kubeVirtVMAddressPersistence: virtual",
        ),
        ("IPAMConfig", "default", "{strict: true}", "spec.strict: unknown field"),
        ("IPReservation", "r", "{reservedCIDRs: [10.0.0.0/33]}", "spec.reservedCIDRs[0]: "),
        ("IPReservation", "r", "{reserved: []}", "spec.reserved: unknown field"),
    ] {
        let found = problems(&manifest(kind, name, spec));
        assert!(found.iter().any(|found| found.contains(expected)), "{kind} {spec}: {found:?}");
    }
    // Both of Calico's names, in the form that is stored.
    for kind in ["IPAMConfig", "IPAMConfiguration"] {
        let spec = "{strictAffinity: true, maxBlocksPerHost: 3, kubeVirtVMAddressPersistence: Disabled}";
        let read = read("m.yml", &manifest(kind, "default", spec)).unwrap();
        let expected = serde_json::json!({
            "strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 3, "ipCooldownSeconds": 0,
            "kubeVirtVMAddressPersistence": "Disabled",
        });
        assert_eq!(read[0].value, expected);
    }
    read("m.yml", &manifest("IPReservation", "r", "{reservedCIDRs: [10.0.0.0/8, 10.0.0.1, 'fd00::/64']}"))
        .unwrap();
}

/// Calico's agents read these words in any case (`updateprocessors`), and kubectl stores them in the group of the definitions.
#[test]
fn words_count_in_any_case_in_the_group_of_calicos_definitions() {
    let policy = |group: &str, words: [&str; 4]| {
        let [types, action, protocol, not_protocol] = words;
        format!(
            "apiVersion: {group}\nkind: GlobalNetworkPolicy\nmetadata: {{name: p}}\nspec: {{types: [{types}], ingress: [\
             {{action: {action}, protocol: {protocol}}}, {{action: {action}, notProtocol: {not_protocol}}}]}}\n"
        )
    };
    let right = read("m.yml", &policy("projectcalico.org/v3", ["Ingress", "Deny", "UDP", "ICMPv6"])).unwrap();
    for words in [["ingress", "deny", "udp", "icmpv6"], ["INGRESS", "dEnY", "Udp", "ICMPV6"]] {
        let read = read("m.yml", &policy("crd.projectcalico.org/v1", words)).unwrap();
        let resources = [&right, &read].map(|all| format!("{:?}", all[0].resource));
        assert_eq!(resources[0], resources[1]);
        assert_eq!(tortie_api::spelling::check(read[0].key.kind, &read[0].value).len(), 5, "{words:?}");
        let mut corrected = read[0].value.clone();
        tortie_api::spelling::correct(read[0].key.kind, &mut corrected);
        assert_eq!(corrected["spec"], right[0].value["spec"]);
        let found = problems(&policy("projectcalico.org/v3", words));
        assert!(found[0].contains("spec.types[0]: ") && found.len() == 5, "{found:?}");
    }
    let wrong = problems(&policy("crd.projectcalico.org/v1", ["ingres", "deny", "udp", "tcp"]));
    assert!(wrong[0].contains("spec.types[0]: unknown variant `ingres`"), "{wrong:?}");
}

#[test]
fn bad_input() {
    let policy = "m.yml:6: NetworkPolicy n/p: spec.ingress[0].";
    let rules = [
        ("{action: Allow, source: {selectr: a == 'b'}}", "source.selectr: unknown field `selectr`"),
        ("{action: Allow, notSelector: a == 'b'}", "notSelector: unknown field `notSelector`"),
        ("{action: Permit}", "action: unknown variant `Permit`"),
        ("{action: allow}", "action: \"allow\" must be written Allow"),
        ("{action: Allow, protocol: tcp}", "protocol: \"tcp\" must be written TCP"),
        ("{action: Allow, notProtocol: icmpv6}", "notProtocol: \"icmpv6\" must be written ICMPv6"),
        ("{}", "missing field `action`"),
        (
            "{action: Allow, source: {selector: a = 'b'}}",
            "source.selector: selector \"a = 'b'\", at character 3: expected ==",
        ),
        ("{action: Allow, source: {nets: [10.0.0.0/33]}}", "source.nets[0]: \"10.0.0.0/33\" is no network"),
        ("{action: Allow, source: {nets: [10.0.0.1]}}", "source.nets[0]: \"10.0.0.1\" is no network"),
        ("{action: Allow, source: {nets: [10.0.0.0/8, fd00::/8]}}", "source.nets: one rule cannot mix"),
        (
            "{action: Allow, source: {notNets: [0.0.0.0/0]}}",
            "source.notNets: a network that holds every address",
        ),
        ("{action: Allow, protocol: TPC}", "protocol: invalid value: string \"TPC\", expected TCP, UDP"),
        ("{action: Allow, protocol: 0}", "protocol: invalid value: integer `0`"),
        (
            "{action: Allow, protocol: TCP, destination: {ports: [65536]}}",
            "destination.ports[0]: invalid value",
        ),
        (
            "{action: Allow, protocol: TCP, destination: {ports: ['9:8']}}",
            "destination.ports[0]: the range \"9:8\" ends",
        ),
        (
            "{action: Allow, destination: {ports: [80]}}",
            "destination.ports: needs protocol: TCP, UDP or SCTP",
        ),
        ("{action: Allow, icmp: {type: 8}}", "icmp: needs protocol: ICMP"),
        ("{action: Allow, protocol: ICMP, icmp: {code: 0}}", "icmp: a code needs a type"),
        ("{action: Allow, ipVersion: 5}", "ipVersion: must be 4 or 6"),
        ("{action: Allow, protocol: ICMPv6, ipVersion: 4}", "ipVersion: ICMP is IPv4's"),
        ("{action: Deny, http: {methods: [GET]}}", "http: is for Allow rules only"),
        ("{action: Allow, protocol: UDP, http: {}}", "http: needs protocol TCP"),
        ("{action: Allow, http: {methods: [GET, GET]}}", "http.methods[1]: the method was given before"),
        (
            "{action: Allow, http: {paths: [{exact: /a}, {prefix: b}]}}",
            "http.paths[1]: \"b\" must begin with /",
        ),
        ("{action: Allow, http: {verbs: [GET]}}", "http.verbs: unknown field"),
        ("{action: Allow, source: {services: {}}}", "source.services: missing field `name`"),
        (
            "{action: Allow, source: {services: {name: s}, nets: [10.0.0.0/8]}}",
            "source.services: may not stand beside nets",
        ),
        (
            "{action: Allow, destination: {services: {name: s}}}",
            "destination.services: a Service may be an egress rule's destination",
        ),
        ("{action: Allow, source: {selector: global()}}", "source.selector: global() may stand only"),
    ];
    for (rule, expected) in rules {
        let found = problems(&with_rule(rule));
        let expected =
            format!("{policy}{expected}").replace("spec.ingress[0].missing", "spec.ingress[0]: missing");
        assert!(
            found.len() == 1 && found[0].starts_with(&expected),
            "{rule}\n found    {found:#?}\n expected {expected}"
        );
    }

    let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n";
    for (text, expected) in [
        ("a: 1\na: 2\n".to_owned(), "m.yml:2: a: the field is given twice"),
        ("apiVersion: v1\nkind: [\n".to_owned(), "m.yml:3: kind: this is not YAML"),
        ("- 1\n".to_owned(), "m.yml:1: a manifest must be a mapping"),
        ("apiVersion: v1\nkind: Teapot\nmetadata: {name: t}\n".to_owned(), "m.yml:2: Teapot t: kind: v1 Teapot is not known"),
        (
            "apiVersion: projectcalico.org/v1\nkind: NetworkPolicy\nmetadata: {name: t}\n".to_owned(),
            "m.yml:1: NetworkPolicy t: apiVersion: projectcalico.org/v1 NetworkPolicy is not known; write projectcalico.org/v3 NetworkPolicy",
        ),
        ("kind: Pod\nmetadata: {name: t}\n".to_owned(), "m.yml:1: Pod t: apiVersion: is missing"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {}\n".to_owned(), "m.yml:3: Pod: metadata.name: is missing"),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec:\n  ports:\n  - port: 80\n    targetPort: [80]\n".to_owned(),
            "m.yml:7: Service default/s: spec.ports[0].targetPort: [80] is no port",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec:\n  selector: app\n".to_owned(),
            "m.yml:5: Service default/s: spec.selector: invalid type",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec:\n  ports:\n  - port: 80\n    targetPrt: 80\n".to_owned(),
            "m.yml:7: Service default/s: spec.ports[0].targetPrt: unknown field; did you mean \"targetPort\"?",
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: Big}\n".to_owned(),
            "m.yml:3: Namespace Big: metadata.name: \"Big\" must be lower-case",
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: 'n', namespace: m}\n".to_owned(),
            "m.yml:3: Namespace n: metadata.namespace: a Namespace belongs to no namespace",
        ),
        (format!("{pod}spec:\n  contaners: []\n"), "m.yml:6: Pod default/p: spec.contaners: unknown field; did you mean \"containers\"?"),
        (format!("{pod}  labels: {{a: 1}}\nspec: {{containers: [{{name: c}}]}}\n"), "m.yml:5: Pod default/p: metadata.labels.a: must be text"),
        (
            format!("{pod}spec:\n  containers:\n  - name: c\n    ports:\n    - containerPort: 70000\n"),
            "m.yml:9: Pod default/p: spec.containers[0].ports[0].containerPort: invalid value",
        ),
        (
            "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: p}\nspec:\n  cidr: 10.0.0.1/16\n".to_owned(),
            "m.yml:5: IPPool p: spec.cidr: \"10.0.0.1/16\" has bits set after its prefix; write 10.0.0.0/16",
        ),
        (
            "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: p}\nspec:\n  cidr: 10.0.0.0/16\n  ipipMode: Always\n  vxlanMode: CrossSubnet\n".to_owned(),
            "m.yml:6: IPPool p: spec.ipipMode: a pool has IPIP or VXLAN",
        ),
        (
            "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: p}\nspec:\n  cidr: fd00::/64\n  ipipMode: Always\n".to_owned(),
            "m.yml:6: IPPool p: spec.ipipMode: IPIP carries IPv4 only",
        ),
        (
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  podSelector: {}\n  ingress:\n  - to: []\n".to_owned(),
            "m.yml:7: KubernetesNetworkPolicy default/p: spec.ingress[0].to: unknown field `to`",
        ),
        (
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  ingress:\n  - from:\n    - ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/8]}\n".to_owned(),
            "m.yml:7: KubernetesNetworkPolicy default/p: spec.ingress[0].from[0].ipBlock.except[0]: 11.0.0.0/8 does not lie inside 10.0.0.0/8",
        ),
    ] {
        let found = problems(&text);
        assert!(found.iter().any(|found| found.starts_with(expected)), "{text}\n found    {found:#?}\n expected {expected}");
    }
}

#[test]
fn bad_policies() {
    let calico = "apiVersion: projectcalico.org/v3\n";
    for (text, expected) in [
        (
            "kind: NetworkPolicy\nspec: {namespaceSelector: a == 'b'}",
            "spec.namespaceSelector: is for policies of the whole",
        ),
        ("kind: NetworkPolicy\nspec: {stagedAction: Set}", "spec.stagedAction: is for staged policies only"),
        ("kind: NetworkPolicy\nspec: {performanceHints: [Fast]}", "spec.performanceHints: \"Fast\" is not"),
        (
            "kind: StagedNetworkPolicy\nspec: {stagedAction: Delete, egress: [{action: Deny}]}",
            "spec.egress: may not stand beside stagedAction: Delete",
        ),
        (
            "kind: GlobalNetworkPolicy\nspec: {egress: [{action: Deny, destination: {services: {name: s}}}]}",
            "spec: services.namespace is missing",
        ),
        (
            "kind: NetworkSet\nspec: {nets: [10.0.0.1, 10.0.0.0/33]}",
            "spec.nets[1]: \"10.0.0.0/33\" is no network",
        ),
        (
            "kind: Profile\nspec: {labelsToApply: {pcns.team: a}}",
            "spec.labelsToApply.pcns.team: is set by the cluster",
        ),
    ] {
        let found = problems(&format!("{calico}{}", text.replace("\nspec", "\nmetadata: {name: p}\nspec")));
        assert!(
            found.len() == 1 && found[0].contains(expected),
            "{text}\n found    {found:#?}\n expected {expected}"
        );
    }
}

#[test]
fn bad_cluster_policies() {
    let with = |spec: &str| {
        problems(&format!(
            "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: p}}\nspec: {{{spec}}}\n"
        ))
    };
    let rule = |rule: &str| {
        format!("tier: Admin, priority: 1, subject: {{namespaces: {{}}}}, ingress: [{{{rule}}}]")
    };
    for (spec, expected) in [
        ("priority: 1, subject: {namespaces: {}}".to_owned(), "spec.tier: is missing"),
        ("tier: Admin, subject: {namespaces: {}}".to_owned(), "spec.priority: is missing"),
        (
            "tier: Admin, priority: 1001, subject: {namespaces: {}}".to_owned(),
            "spec.priority: is at most 1000",
        ),
        ("tier: Admin, priority: 1".to_owned(), "missing field `subject`"),
        ("tier: Admin, priority: 1, subject: {nodes: {}}".to_owned(), "unknown variant `nodes`"),
        (rule("action: Allow, from: [{namespaces: {}}]"), "\"Allow\" is no action of a ClusterNetworkPolicy"),
        (
            rule("action: Accept, to: [{namespaces: {}}], from: [{namespaces: {}}]"),
            "spec.ingress[0].to: unknown field",
        ),
        (
            rule("action: Accept, to: [{networks: [10.0.0.0/8]}], protocols: [{destinationNamedPort: a}]")
                .replace("ingress", "egress"),
            "spec.egress[0].to: networks and nodes declare no ports by name",
        ),
        (
            rule("action: Accept, to: [{nodes: {}}], protocols: [{destinationNamedPort: a}]")
                .replace("ingress", "egress"),
            "spec.egress[0].to: networks and nodes declare no ports by name",
        ),
        (
            rule("action: Deny, to: [{nodes: {matchLabels: {-a: x}}}]").replace("ingress", "egress"),
            "spec.egress[0].to[0].nodes.matchLabels.-a",
        ),
        (rule("action: Accept, from: []"), "spec.ingress[0]: it has no peers"),
        (rule("action: Accept, from: [{nodes: {}}]"), "spec.ingress[0]: a peer by \"nodes\" is not known"),
        (
            rule("action: Accept, from: [{namespaces: {}}], protocols: [{icmp: {}}]"),
            "protocol \"icmp\" is not known",
        ),
        (
            rule("action: Accept, from: [{namespaces: {}}], ports: [{namedPort: a}]"),
            "spec.ingress[0].ports: unknown field",
        ),
    ] {
        let found = with(&spec);
        assert!(
            found.len() == 1 && found[0].contains(expected),
            "{spec}\n found    {found:#?}\n expected {expected}"
        );
    }
}

#[test]
fn all_problems_of_a_file_are_reported_together() {
    let text =
        format!("{}---\n{}", with_rule("{action: Permit}"), with_rule("{action: Allow, ipVersion: 5}"));
    let found = problems(&text);
    assert_eq!(found.len(), 2, "{found:#?}");
    assert!(found[1].starts_with("m.yml:13: "), "{found:#?}");
}

#[test]
fn defaults_are_stored() {
    let calico = |kind: &str, name: &str, spec: &str| {
        format!("apiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
    };
    let kubernetes = |spec: &str| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: p}}\nspec: {spec}\n"
        )
    };
    for (text, field, expected) in [
        (calico("Tier", "t", "{}"), "/spec/order", json!(1_000_000.0)),
        (calico("Tier", "t", "{order: 5}"), "/spec/order", json!(5)),
        (calico("Tier", "t", "null"), "/spec/defaultAction", json!("Deny")),
        (calico("Tier", "kube-baseline", "{defaultAction: Pass}"), "/spec/order", json!(10_000_000.0)),
        (calico("NetworkPolicy", "p", "{}"), "/spec/types", json!(["Ingress"])),
        (calico("NetworkPolicy", "p", "{egress: [{action: Deny}]}"), "/spec/types", json!(["Egress"])),
        (calico("GlobalNetworkPolicy", "p", "{types: [Egress]}"), "/spec/types", json!(["Egress"])),
        (kubernetes("{podSelector: null, ingress: null}"), "/spec/policyTypes", json!(["Ingress"])),
        (kubernetes("{podSelector: {}}"), "/spec/policyTypes", json!(["Ingress"])),
        (
            kubernetes("{podSelector: {}, policyTypes: [], egress: [{}]}"),
            "/spec/policyTypes",
            json!(["Ingress", "Egress"]),
        ),
    ] {
        let objects = read("m.yml", &text).unwrap();
        assert_eq!(objects[0].value.pointer(field), Some(&expected), "{text}");
    }
}

#[test]
fn objects_in_lists_keep_their_line_numbers() {
    let list = |items: &str| format!("apiVersion: v1\nkind: List\nitems:\n{items}");
    let namespace = "- apiVersion: v1\n  kind: Namespace\n  metadata: {name: a}\n";
    let objects = read("m.yml", &list(namespace)).unwrap();
    assert_eq!((objects[0].key.to_string().as_str(), objects[0].origin.line), ("Namespace a", 4));
    let text = list(&format!(
        "{namespace}- apiVersion: v1\n  kind: Namespace\n  metadata:\n    name: b\n    colour: red\n"
    ));
    assert_eq!(problems(&text), ["m.yml:11: Namespace b: metadata.colour: unknown field"]);
    assert!(read("m.yml", &list("  []")).unwrap().is_empty());
}

#[test]
fn duplicate_objects_in_a_file_are_rejected() {
    let text = format!("{}---\n{}", with_rule("{action: Allow}"), with_rule("{action: Deny}"));
    assert_eq!(problems(&text), ["m.yml:8: NetworkPolicy n/p: the object was given before, at m.yml:1"]);
}

#[test]
fn a_document_that_would_exhaust_memory_is_rejected() {
    let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for level in 1..12 {
        let before = level - 1;
        bomb += &format!("a{level}: &a{level} [{}]\n", [format!("*a{before}").as_str(); 10].join(","));
    }
    assert!(problems(&bomb)[0].contains("there are more than"));
    assert!(
        problems(&"[".repeat(100_000))[0].contains("nested more than")
            || !problems(&"[".repeat(100_000)).is_empty()
    );
}

proptest! {
    #[test]
    fn no_text_panics(text in "[a-c:\\-\\[\\]{}&*!|>'\"#%@,.\n ]{0,80}|.{0,60}") {
        let _ = read("m.yml", &text);
    }

    /// JSON manifests are YAML, so YAML parses what JSON writes.
    #[test]
    fn json_is_read_as_yaml(text in ".{0,20}", number in any::<u64>(), float in -1e6..1e6f64) {
        let labels = serde_json::json!({"text": text, "number": number, "float": float, "deep": [[null, true, {"a": -1}]]});
        let value = serde_json::json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {"extra": labels},
        });
        let objects = read("m.json", &value.to_string()).unwrap();
        prop_assert_eq!(&objects[0].value, &value);
    }
}

/// Plain text means what it means to kubectl (`kubectl annotate --local -o json` of 1.36 gave the values; it rounds the largest one).
#[test]
fn plain_text_is_read_as_kubectl_reads_it() {
    for (text, expected) in [
        ("[y, Y, yes, Yes, YES, on, On, ON]", json!([true, true, true, true, true, true, true, true])),
        (
            "[n, N, no, No, NO, off, Off, OFF]",
            json!([false, false, false, false, false, false, false, false]),
        ),
        ("[yEs, oN, 'yes', \"no\", !!str on, yes sir]", json!(["yEs", "oN", "yes", "no", "on", "yes sir"])),
        ("[017620, 0443, 0100, 00, -010, +7]", json!([8080, 291, 64, 0, -8, 7])),
        ("[0x50, 0X1f, -0x10, 0b101, 0B1, 0o17, 0O7]", json!([80, 31, -16, 5, 1, 15, 7])),
        ("[08, 09, 0899, 1_000, 0_17, 0x_5]", json!([8, 9, 899, 1000, 15, 5])),
        ("[1e3, 1.50, .5, 5., 1_0.5, -.5e1]", json!([1000, 1.5, 0.5, 5, 10.5, -5])),
        ("[18446744073709551615, -9223372036854775808]", json!([u64::MAX, i64::MIN])),
        ("[0x, 0b2, 0xg, 1.2.3, 1e, e5, ._5, '0x50', 10.0.0.1, 2026-01-01, 1-2, +, '-']", {
            let text = [
                "0x",
                "0b2",
                "0xg",
                "1.2.3",
                "1e",
                "e5",
                "._5",
                "0x50",
                "10.0.0.1",
                "2026-01-01",
                "1-2",
                "+",
                "-",
            ];
            json!(text)
        }),
        ("{y: 1, 0x10: 2, 010: 3, 1.5: 4}", json!({"true": 1, "16": 2, "8": 3, "1.5": 4})),
        ("{a: &key web, *key : 1}", json!({"a": "web", "web": 1})),
    ] {
        let node = format!("apiVersion: v1\nkind: Node\nmetadata: {{name: 'n'}}\nstatus:\n  extra: {text}\n");
        let read = read("m.yml", &node).unwrap_or_else(|problems| panic!("{text}: {problems:?}"));
        assert_eq!(read[0].value["status"]["extra"], expected, "{text}");
    }
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, labels: {public: yes}}\nspec: {containers: [{name: c}]}\n";
    assert_eq!(
        problems(pod),
        ["m.yml:3: Pod default/a: metadata.labels.public: must be text; put the value in quotes"]
    );
    assert!(problems("{y: 1, true: 2}")[0].contains("the field is given twice"));
    assert!(problems("{~: 1}")[0].contains("a field's name must be text"));
}

/// Objects exported by kubectl and calicoctl are recognised, without what only their cluster can use.
#[test]
fn exported_objects() {
    let exported = r#"
apiVersion: v1
kind: List
metadata: {resourceVersion: ""}
items:
- apiVersion: crd.projectcalico.org/v1
  kind: NetworkPolicy
  metadata:
    annotations:
      projectcalico.org/metadata: '{"labels":{"team":"a"},"annotations":{"why":"audit"},"creationTimestamp":"2026-01-01T00:00:00Z"}'
      kubectl.kubernetes.io/last-applied-configuration: '{}'
    creationTimestamp: "2026-01-01T00:00:00Z"
    generation: 3
    managedFields: [{manager: kubectl, operation: Update}]
    name: default.back
    namespace: shop
    ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: c, uid: u}]
    resourceVersion: "7"
    selfLink: /apis
    uid: 8a2f6a5e-0000-4000-8000-000000000001
  spec: {tier: default, selector: app == 'back', types: [Ingress]}
- apiVersion: projectcalico.org/v3
  kind: GlobalNetworkPolicyList
  items:
  - metadata: {name: deny}
    spec: {selector: all(), types: [Egress]}
---
apiVersion: extensions/v1beta1
kind: NetworkPolicy
metadata: {name: old, namespace: shop}
spec: {podSelector: {}}
---
apiVersion: projectcalico.org/v3
kind: Node
metadata: {name: n1}
spec: {bgp: {ipv4Address: 192.0.2.1/24}, ipv4VXLANTunnelAddr: 10.0.0.1}
"#;
    let objects = read("m.yml", exported).unwrap();
    let found: Vec<_> =
        objects.iter().map(|object| format!("{} {}", object.origin.line, object.key)).collect();
    assert_eq!(
        found,
        [
            "6 NetworkPolicy shop/default.back",
            "25 GlobalNetworkPolicy deny",
            "28 KubernetesNetworkPolicy shop/old",
            "33 Node n1"
        ]
    );
    assert_eq!(
        objects[0].value["metadata"],
        json!({"annotations": {"why": "audit"}, "labels": {"team": "a"}, "name": "default.back", "namespace": "shop"})
    );
    let Resource::Node(node) = &objects[3].resource else { panic!("a node") };
    assert_eq!(
        (
            node.address().unwrap().to_string(),
            node.vxlan_address(tortie_api::net::IpVersion::V4).unwrap().to_string()
        ),
        ("192.0.2.1".into(), "10.0.0.1".into())
    );

    let list = |items: &str| format!("apiVersion: v1\nkind: List\nitems:\n{items}");
    for (text, expected) in [
        (list("- apiVersion: v1\n  kind: Pod\n  metadata: {name: p}\n  spec:\n    contaners: []\n"), "m.yml:8: Pod default/p: spec.contaners: unknown field"),
        ("apiVersion: v2\nkind: List\nitems: []\n".to_owned(), "m.yml:1: List: apiVersion: \"v2\" is not the version of a List; write v1"),
        ("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicyList\n".to_owned(), "m.yml:1: NetworkPolicyList: items: is missing"),
        ("apiVersion: v1\nkind: PodList\nitems: {}\n".to_owned(), "m.yml:3: PodList: items: must be a list of objects"),
        ("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicyLst\nitems: []\n".to_owned(), "m.yml:2: NetworkPolicyLst: kind: networking.k8s.io/v1 NetworkPolicyLst"),
        (
            "apiVersion: crd.projectcalico.org/v1\nkind: Tier\nmetadata:\n  name: t\n  annotations:\n    projectcalico.org/metadata: x\n".to_owned(),
            "m.yml:6: Tier t: metadata.annotations.projectcalico.org/metadata: must be the metadata",
        ),
    ] {
        let found = problems(&text);
        assert!(found[0].starts_with(expected), "{text}{found:#?}");
    }
}

/// YAML's merge key as in kubectl: the mapping's own fields take precedence, then the mappings in their order.
#[test]
fn merge_keys() {
    let policy = |merge: &str| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: p}}\nspec:\n  podSelector:\n    matchLabels: &base {{app: a, tier: x}}\n  ingress:\n  - from:\n    - podSelector:\n        matchLabels:\n          {merge}\n          tier: 'y'\n"
        )
    };
    let labels = |merge: &str| {
        let objects = read("m.yml", &policy(merge)).unwrap();
        objects[0].value["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].clone()
    };
    assert_eq!(labels("<<: *base"), json!({"app": "a", "tier": "y"}));
    assert_eq!(labels("<<: [{app: first}, *base]"), json!({"app": "first", "tier": "y"}));
    assert!(problems(&policy("<<: 3"))[0].contains("<< needs a mapping"));
    assert!(problems(&policy("'<<': {a: b}"))[0].contains("<<"), "a quoted << is a label");
}

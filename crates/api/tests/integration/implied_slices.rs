//! The EndpointSlices that are implied by Services and pods.

use serde_json::{Value, json};
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_api::manifest::read;

const PODS: &str = "
{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: 'n', labels: {app: w}}, spec: {nodeName: n1, containers: [{name: c, ports: [{containerPort: 8080, name: web}, {containerPort: 53, name: dns, protocol: UDP}]}]}, status: {podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: b, namespace: 'n', labels: {app: w}}, spec: {containers: [{name: c, ports: [{containerPort: 9090, name: web}]}]}, status: {podIP: 10.0.0.2, conditions: [{type: Ready, status: 'False'}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: ended, namespace: 'n', labels: {app: w}}, spec: {containers: [{name: c}]}, status: {phase: Succeeded, podIP: 10.0.0.3}}
---
{apiVersion: v1, kind: Pod, metadata: {name: young, namespace: 'n', labels: {app: w}}, spec: {containers: [{name: c}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: other, namespace: 'n', labels: {app: x}}, spec: {containers: [{name: c}]}, status: {podIP: 10.0.0.4}}
---
{apiVersion: v1, kind: Pod, metadata: {name: elsewhere, namespace: m, labels: {app: w}}, spec: {containers: [{name: c}]}, status: {podIP: 10.0.0.5}}
";

/// The slices of a Service with this spec, given other documents, each as one line.
fn slices(spec: &str, others: &str) -> Vec<String> {
    let service = format!(
        "---\n{{apiVersion: v1, kind: Service, metadata: {{name: s, namespace: 'n'}}, spec: {spec}}}\n"
    );
    let objects = read("m.yml", &[PODS, &service, others].concat()).unwrap();
    let slices = implied_slices(objects.iter().map(|object| (&object.key, &object.value)));
    assert!(slices.values().all(is_implied));
    let shown = slices.iter().map(|(key, slice)| {
        assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "s");
        assert!(read("m.yml", &slice.to_string()).is_ok(), "{slice}");
        let ports = slice["ports"].as_array().unwrap().iter().map(|port| {
            format!(
                "{}:{}/{}",
                port["name"].as_str().unwrap(),
                port["protocol"].as_str().unwrap(),
                port["port"]
            )
        });
        let ready = |endpoint: &Value| if endpoint["conditions"]["ready"] == json!(true) { "" } else { "!" };
        let ends = slice["endpoints"].as_array().unwrap().iter();
        let ends = ends.map(|end| format!("{}{}", end["addresses"][0].as_str().unwrap(), ready(end)));
        let (ports, ends) = (ports.collect::<Vec<_>>().join(","), ends.collect::<Vec<_>>().join(","));
        format!("{} {ports} {ends}", key.name)
    });
    shown.collect()
}

#[test]
fn slices_equal_those_of_the_kubernetes_controller() {
    for (spec, expected) in [
        ("{selector: {app: w}, ports: [{port: 80}]}", &["s-ipv4 :TCP/80 10.0.0.1,10.0.0.2!"][..]),
        (
            "{selector: {app: w}, ports: [{port: 80, targetPort: 8080}]}",
            &["s-ipv4 :TCP/8080 10.0.0.1,10.0.0.2!"],
        ),
        (
            "{selector: {app: w}, ports: [{port: 80, targetPort: web}]}",
            &["s-ipv4 :TCP/8080 10.0.0.1", "s-ipv4-2 :TCP/9090 10.0.0.2!"],
        ),
        (
            "{selector: {app: w}, ports: [{port: 80, name: w, targetPort: web}, {port: 53, name: d, protocol: UDP, targetPort: dns}]}",
            &["s-ipv4 w:TCP/8080,d:UDP/53 10.0.0.1", "s-ipv4-2 w:TCP/9090 10.0.0.2!"],
        ),
        (
            "{selector: {app: w}, publishNotReadyAddresses: true, ports: [{port: 80}]}",
            &["s-ipv4 :TCP/80 10.0.0.1,10.0.0.2"],
        ),
        ("{selector: {app: w}, clusterIP: None, ports: []}", &["s-ipv4  10.0.0.1,10.0.0.2!"]),
        (
            "{selector: {app: w}, ipFamilyPolicy: PreferDualStack, ports: [{port: 80}]}",
            &["s-ipv4 :TCP/80 10.0.0.1,10.0.0.2!", "s-ipv6 :TCP/80 fd00::1"],
        ),
        ("{selector: {app: w}, ipFamilies: [IPv6], ports: [{port: 80}]}", &["s-ipv6 :TCP/80 fd00::1"]),
        (
            "{selector: {app: w}, clusterIPs: ['fd00:96::1'], ports: [{port: 80}]}",
            &["s-ipv6 :TCP/80 fd00::1"],
        ),
        ("{selector: {app: nobody}, ports: [{port: 80}]}", &[]),
        ("{selector: {}, ports: [{port: 80}]}", &[]),
        ("{ports: [{port: 80}]}", &[]),
        ("{type: ExternalName, externalName: x.example, selector: {app: w}}", &[]),
    ] {
        assert_eq!(slices(spec, ""), expected, "{spec}");
    }
}

#[test]
fn existing_slices_take_precedence() {
    let spec = "{selector: {app: w}, ports: [{port: 80}]}";
    let slice = |name: &str, service: &str| {
        format!(
            "---\n{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {{name: {name}, namespace: 'n', labels: {{kubernetes.io/service-name: {service}}}}}, addressType: IPv4, endpoints: []}}\n"
        )
    };
    assert!(slices(spec, &slice("s-1", "s")).is_empty());
    let others = [slice("s-ipv4", "t"), slice("s-ipv4-2", "t")].concat();
    assert_eq!(slices(spec, &others), ["s-ipv4-3 :TCP/80 10.0.0.1,10.0.0.2!"]);
}

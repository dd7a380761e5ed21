//! Folders as people keep them: an answer for each, and no more certainty than there is.

use std::process::Command;

use crate::offline::support::tortie;
use serde_json::Value;

const PODS: &str = "\
{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: shop, labels: {app: a}}, spec: {containers: [{name: c, image: x}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: b, namespace: shop, labels: {app: b}}, spec: {containers: [{name: c, image: x}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: c, namespace: ops, labels: {app: c}}, spec: {containers: [{name: c, image: x}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: d, namespace: ops, labels: {app: d}}, spec: {containers: [{name: c, image: x}]}}
";
const CLOSED: &str = "---\n{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: d, namespace: ops}, spec: {podSelector: {matchLabels: {app: d}}, policyTypes: [Ingress]}}\n";

/// Exit codes of questions about shop/a → shop/b and ops/c → ops/d, and what is printed of the first.
fn asked(more: &str) -> ((i32, i32), String, String) {
    let cluster = [PODS, CLOSED, more].concat();
    let ask = |from, to| tortie(&[("c.yml", &cluster)], &["explain", "-f", "c.yml", from, to]);
    let (code, out, err) = ask("shop/a", "shop/b");
    ((code, ask("ops/c", "ops/d").0), out, err)
}

/// Each with the exit codes inside the document's namespace and elsewhere. 0 and 1 are certain.
#[test]
fn what_is_not_read_makes_uncertain_what_it_could_change() {
    for (document, expected, printed) in [
        // Others' policy.
        (
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: shop}",
            (3, 1),
            "verdicts at pods of namespace shop: c.yml:12: CiliumNetworkPolicy p",
        ),
        (
            "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: p}",
            (3, 3),
            "every verdict: c.yml:12",
        ),
        (
            "apiVersion: k8s.ovn.org/v1\nkind: EgressFirewall\nmetadata: {name: default, namespace: shop}\nspec: {egress: [{type: Deny, to: {cidrSelector: 0.0.0.0/0}}]}",
            (3, 1),
            "k8s.ovn.org/v1 EgressFirewall is not evaluated",
        ),
        // They bring objects.
        (
            "apiVersion: template.openshift.io/v1\nkind: Template\nmetadata: {name: t}\nobjects:\n- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny, namespace: shop}, spec: {podSelector: {}}}",
            (3, 3),
            "Template is not evaluated",
        ),
        (
            "apiVersion: fluxcd.controlplane.io/v1\nkind: ResourceSet\nmetadata: {name: r, namespace: shop}",
            (3, 3),
            "ResourceSet",
        ),
        (
            "apiVersion: kyverno.io/v1\nkind: ClusterPolicy\nmetadata: {name: k}\nspec: {rules: [{name: deny, generate: {kind: NetworkPolicy}}]}",
            (3, 3),
            "ClusterPolicy",
        ),
        (
            "apiVersion: helm.toolkit.fluxcd.io/v2\nkind: HelmRelease\nmetadata: {name: h, namespace: shop}",
            (3, 3),
            "HelmRelease",
        ),
        // They bring pods.
        (
            "apiVersion: monitoring.coreos.com/v1\nkind: Prometheus\nmetadata: {name: p, namespace: shop}",
            (3, 1),
            "verdicts with pods or addresses of namespace shop",
        ),
        (
            "apiVersion: argoproj.io/v1alpha1\nkind: Rollout\nmetadata: {name: r, namespace: shop}\nspec: {template: {spec: {containers: [{name: c, image: x}]}}}",
            (0, 1),
            "",
        ),
        // Neither, although they sound like policy.
        (
            "apiVersion: gateway.envoyproxy.io/v1alpha1\nkind: ClientTrafficPolicy\nmetadata: {name: a, namespace: shop}",
            (0, 1),
            "no verdict depends on it: 1 ClientTrafficPolicy",
        ),
        (
            "apiVersion: image.toolkit.fluxcd.io/v1beta2\nkind: ImagePolicy\nmetadata: {name: a, namespace: shop}",
            (0, 1),
            "1 ImagePolicy",
        ),
        (
            "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: gpu}\nspec: {}",
            (0, 1),
            "1 ClusterPolicy",
        ),
        (
            "apiVersion: projectcalico.org/v3\nkind: GlobalAlert\nmetadata: {name: a}\nspec: {severity: 10}",
            (0, 1),
            "1 GlobalAlert",
        ),
        // Calico Enterprise: closed (policy decision 18), and not certain.
        (
            "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec:\n  selector: app == 'a'\n  types: [Egress]\n  egress:\n  - action: Allow\n    destination: {domains: ['*.example.com']}",
            (3, 1),
            "spec.egress[0].destination.domains",
        ),
        // A tier of another folder.
        (
            "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: guard.b, namespace: shop}\nspec: {tier: guard, selector: app == 'b', types: [Ingress], ingress: [{action: Pass}]}",
            (3, 1),
            "tier guard is not in the files",
        ),
        // Mistakes.
        (
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: shop}\nspec: {podSelektor: {}}",
            (3, 1),
            "spec.podSelektor: unknown field",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: w, namespace: shop}\nspec: {template: {spec: {contaners: [], containers: [{name: c}]}}}",
            (3, 1),
            "contaners",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: s, namespace: shop, x: 1}\nspec: {ports: [{port: 80}]}",
            (0, 1),
            "packets to Service shop/s",
        ),
        (
            "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: p}\nspec: {peerIp: x}",
            (0, 1),
            "could change no verdict",
        ),
        // Placeholders.
        (
            "{{- if .Values.policy }}\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: {{ .Release.Namespace }}}\n{{- end }}",
            (3, 3),
            "template of Helm or Go",
        ),
        (
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: '{{ .Release.Namespace }}'}\nspec: {podSelector: {}}",
            (3, 3),
            "helm template CHART |",
        ),
        (
            "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: p, namespace: shop}\nspec: {selector: \"app == '${APP}'\"}",
            (3, 1),
            "envsubst < FILE |",
        ),
        // A kustomization that makes other objects, and one that does not.
        (
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: shop\nresources: [web.yaml]",
            (3, 3),
            "tortie … -k .",
        ),
        (
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [web.yaml]",
            (0, 1),
            "",
        ),
        ("resources: [web.yaml]", (0, 1), "is no manifest"),
    ] {
        let (codes, out, err) = asked(&format!("---\n{document}\n"));
        assert_eq!(codes, expected, "{document}\n{out}{err}");
        assert!(err.contains(printed), "{document}\n{out}{err}");
        assert_eq!(out.contains("not certain"), codes.0 == 3, "{document}\n{out}{err}");
    }
}

/// A document that is no YAML leaves the others of its file.
#[test]
fn a_template_among_manifests_leaves_the_others() {
    let policy = "---\n{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: a, namespace: shop}, spec: {podSelector: {}}}\n";
    let (codes, out, err) =
        asked(&format!("---\n{{{{- if .Values.x }}}}\nkind: x\n{{{{- end }}}}\n{policy}"));
    assert_eq!(codes, (3, 3), "{out}{err}");
    assert!(out.contains("KubernetesNetworkPolicy shop/a (c.yml:15)"), "{out}{err}");
    assert!(
        err.contains("c.yml:11: this is not YAML") || err.contains("c.yml:10: this is not YAML"),
        "{err}"
    );
}

/// One folder with every kind of trouble has answers from all questions, and programs see what is certain.
#[test]
fn programs_see_what_is_certain() {
    let cilium =
        "---\napiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: shop}\n";
    let cluster = [PODS, CLOSED, cilium].concat();
    let files = [("c.yml", cluster.as_str())];
    let (code, out, err) = tortie(&files, &["explain", "-f", "c.yml", "ops/c", "ops/d", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    assert_eq!((code, &document["certain"]), (1, &Value::Bool(true)), "{out}");
    let (code, out, err) = tortie(&files, &["explain", "-f", "c.yml", "ops/c", "shop/a", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    assert_eq!((code, &document["certain"]), (3, &Value::Bool(false)), "{out}");
    assert_eq!(document["notCertainBecause"], serde_json::json!(["c.yml:12"]), "{out}");
    assert_eq!(document["doubts"][0]["couldChange"], "podsOfNamespace", "{out}");
    let (code, out, _) = tortie(&files, &["matrix", "-n", "ops", "-f", "c.yml", "-o", "json"]);
    let document: Value = serde_json::from_str(&out).unwrap();
    let table = &document["tables"][1];
    let group = |of: &Value, class: &str| {
        let all = of.as_array().unwrap();
        all.iter().position(|group| group["name"].as_str().unwrap().contains(class)).expect(class)
    };
    let cell =
        |from: &str, to: &str| &table["cells"][group(&table["rows"], from)][group(&table["columns"], to)];
    assert_eq!(
        (code, &cell("outside", "ops/d")["certain"], &cell("all pods", "ops/d")["certain"]),
        (3, &Value::Bool(true), &Value::Bool(false)),
        "{out}"
    );
    let (_, out, err) = tortie(&files, &["matrix", "-f", "c.yml"]);
    assert!(out.contains("none?") && out.contains("?: not certain"), "{out}{err}");
    let (code, out, _) = tortie(&files, &["matrix", "-f", "c.yml", "--skip-kind", "CiliumNetworkPolicy"]);
    assert!(code == 0 && !out.contains('?'), "{out}");
    let (code, ..) =
        tortie(&files, &["matrix", "-f", "c.yml", "--skip-kind", "ciliumnetworkpolicy.cilium.io"]);
    assert_eq!(code, 0);
    // A change that is certain, and one that is not.
    let open = CLOSED.replace("policyTypes: [Ingress]", "ingress: [{}]");
    let other = CLOSED.replace("namespace: ops", "namespace: shop").replace("app: d", "app: b");
    let files =
        [("c.yml", cluster.as_str()), ("open.yml", &open), ("other.yml", &other), ("same.yml", CLOSED)];
    for (change, code, printed) in [
        ("open.yml", 1, "denied → allowed"),
        ("other.yml", 3, "not certain"),
        ("same.yml", 3, "nothing changes in what was read"),
    ] {
        let (got, out, err) = tortie(&files, &["preview", "--in", "c.yml", "-f", change]);
        assert!(got == code && out.contains(printed), "{change}: {got}\n{out}{err}");
    }
}

/// A folder that the command is pointed to, with files of every encoding and a chart beside them.
#[test]
fn a_root_of_a_repository_has_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    write("pods.yaml", format!("\u{feff}{PODS}").as_bytes());
    let utf_16: Vec<u8> =
        std::iter::once(0xfeff).chain(CLOSED.encode_utf16()).flat_map(u16::to_le_bytes).collect();
    write("policy.yml", &utf_16);
    write("values.yaml", b"replicas: 1\n");
    write("chart/Chart.yaml", b"apiVersion: v2\nname: web\nversion: 1.0.0\n");
    write("chart/templates/web.yaml", b"{{- if x }}\nkind: y\n{{- end }}\n");
    write("bytes.yaml", &[b'a', 0xff]);
    let explain = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        command.current_dir(folder.path()).args(["explain", "ops/c", "ops/d", "-R", "-f", "."]).args(more);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    };
    let (code, out, err) = explain(&[]);
    assert!(code == 3 && out.contains("denied, not certain"), "{out}{err}");
    for printed in [
        "bytes.yaml:1: it is not valid UTF-8",
        "helm template ./chart | tortie … -f -",
        "chart/templates/web.yaml:1: ",
    ] {
        assert!(err.contains(printed), "{printed}: {err}");
    }
    let (code, out, err) = explain(&["--ignore", "chart", "--ignore", "bytes.yaml"]);
    assert!(code == 1 && err.contains("left out by --ignore or .tortieignore: 3 files"), "{out}{err}");
    write(".tortieignore", b"# Helm\nchart/\nbytes.*\n");
    let (code, out, err) = explain(&[]);
    assert!(code == 1 && !out.contains("not certain"), "{out}{err}");
}

/// Only one of two forms can be in the cluster, so what the object could change is not certain.
#[test]
fn an_object_in_two_forms_makes_its_namespace_uncertain() {
    let policy = |ingress: &str| {
        format!(
            "---\n{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: p, namespace: shop}}, spec: {{podSelector: {{}}, ingress: {ingress}}}}}\n"
        )
    };
    let (closed, open) = (policy("[]"), policy("[{}]"));
    let (codes, out, err) = asked(&format!("{closed}{open}"));
    assert_eq!(codes, (3, 1), "{out}{err}");
    assert!(err.contains("is given twice, and differently, at c.yml:11 and c.yml:13"), "{err}");
    // Two equal forms are one.
    let (codes, out, err) = asked(&format!("{open}{open}"));
    assert_eq!((codes, err.contains("given twice")), ((0, 1), false), "{out}{err}");
    let cluster = [PODS, CLOSED, &closed, &open].concat();
    let strict = ["explain", "--strict", "-f", "c.yml", "ops/c", "ops/d"];
    let (code, out, err) = tortie(&[("c.yml", &cluster)], &strict);
    assert!(code == 2 && err.contains("1 document could change verdicts"), "{code} {out}{err}");
}

/// A list without a kind may hold policies, and a pod in its node's network has the node's ports.
#[test]
fn lists_without_a_kind_and_ports_of_nodes_are_uncertain() {
    let list = "---\nitems: [{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p, namespace: shop}, spec: {podSelector: {}}}]\n";
    let (codes, out, err) = asked(list);
    assert_eq!(codes, (3, 3), "{out}{err}");
    let node = "---\n{apiVersion: v1, kind: Node, metadata: {name: n1, annotations: {projectcalico.org/IPv4Address: 192.0.2.1/24}}}\n";
    let on_node = "---\n{apiVersion: v1, kind: Pod, metadata: {name: h, namespace: ops}, spec: {nodeName: n1, hostNetwork: true, containers: [{name: c}]}, status: {podIP: 192.0.2.1}}\n";
    let service = "---\n{apiVersion: v1, kind: Service, metadata: {name: s, namespace: shop}, spec: {type: NodePort, ports: [{port: 80, nodePort: '${X}'}]}}\n";
    let cluster = [PODS, node, on_node, service].concat();
    for to in ["192.0.2.1", "ops/h", "node/n1"] {
        let arguments = ["explain", "-f", "c.yml", "203.0.113.9", to, "--port", "30080"];
        let (code, out, err) = tortie(&[("c.yml", &cluster)], &arguments);
        assert_eq!(code, 3, "{to}: {out}{err}");
    }
}

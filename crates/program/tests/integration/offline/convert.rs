//! `tortie convert`: policies in another form, or an error that names the field.

use serde_json::Value;

use crate::offline::support::tortie;

const KUBERNETES: &str = "apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop, labels: {team: a}}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress: [{from: [{podSelector: {matchLabels: {app: front}}}], ports: [{port: 8080}]}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: c, namespace: shop}
";
const V1: &str = "apiVersion: v1
kind: policy
metadata: {name: deny}
spec: {selector: all(), ingress: [{action: deny, source: {tag: web}}]}
";
const LOSSY: &str = "apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: a, namespace: shop}
spec:
  tier: security
  selector: app == 'web' || has(x)
  ingress:
  - action: Deny
  - action: Allow
    protocol: ICMP
    source: {notSelector: has(y)}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: g}
spec: {selector: all()}
";

fn convert(text: &str, more: &[&str]) -> (i32, String, String) {
    tortie(&[("c.yml", text)], &[&["convert", "-f", "c.yml"], more].concat())
}

#[test]
fn policies_go_to_calicos_form_and_back() {
    let (code, calico, errors) = convert(KUBERNETES, &[]);
    assert_eq!((code, &*errors), (0, ""), "{calico}");
    for part in [
        "kind: NetworkPolicy\n",
        "apiVersion: projectcalico.org/v3",
        "team: a",
        "app == 'front'",
        "kind: ConfigMap",
    ] {
        assert!(calico.contains(part), "{part}: {calico}");
    }
    let (code, back, errors) =
        tortie(&[("c.yml", &calico)], &["convert", "-f", "c.yml", "--to", "kubernetes", "-o", "json"]);
    assert_eq!((code, &*errors), (0, ""), "{back}");
    let back: Value = serde_json::from_str(&back).unwrap();
    let policy = &back["items"][0];
    assert_eq!(policy["apiVersion"], "networking.k8s.io/v1");
    assert_eq!(policy["metadata"]["name"], "web");
    assert_eq!(policy["spec"]["podSelector"]["matchLabels"]["app"], "web");
    assert_eq!(policy["spec"]["ingress"][0]["ports"][0]["port"], 8080);
}

#[test]
fn the_api_of_v1_is_refused() {
    let (code, out, errors) = convert(V1, &["-o", "json"]);
    assert_eq!((code, &*out), (2, ""));
    assert!(errors.contains("c.yml:1: policy deny: apiVersion: is of Calico's API v1"), "{errors}");
}

#[test]
fn what_would_be_lost_is_named() {
    let (code, out, errors) = convert(LOSSY, &["--to", "kubernetes"]);
    assert_eq!((code, &*out), (2, ""));
    for part in [
        "c.yml:5: NetworkPolicy shop/a: spec.tier: ",
        "c.yml:6: NetworkPolicy shop/a: spec.selector: ",
        "c.yml:8: NetworkPolicy shop/a: spec.ingress[0].action: Deny",
        "c.yml:10: NetworkPolicy shop/a: spec.ingress[1].protocol: ",
        "c.yml:11: NetworkPolicy shop/a: spec.ingress[1].source.notSelector: ",
        "GlobalNetworkPolicy g: kind: no Kubernetes NetworkPolicy says",
        "6 problems; nothing was converted",
    ] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    let ordered = "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {name: a, namespace: 'n'}\nspec:\n  order: 5\n  selector: all()\n  ingress: [{action: Allow, source: {selector: has(x)}}]\n";
    let (code, out, errors) = convert(ordered, &["--to", "kubernetes"]);
    assert_eq!((code, &*out), (2, ""));
    assert!(errors.contains("c.yml:5: NetworkPolicy n/a: spec.order: is lost"), "{errors}");
    let without = ordered.replace("  order: 5\n", "");
    let (code, _, errors) = convert(&without, &["--to", "kubernetes"]);
    assert!(
        code == 2 && errors.contains("NetworkPolicy n/a: spec.order: is lost"),
        "it comes last: {errors}"
    );
    let (code, _, errors) = convert(ordered, &["--to", "kubernetes", "--allow-loss"]);
    assert_eq!(code, 0);
    assert!(errors.contains("note: c.yml:5: NetworkPolicy n/a: spec.order: is lost"), "{errors}");
    assert!(errors.contains("spec.ingress[0].source.selector: also selects network sets"), "{errors}");
}

//! Manifests on the real API server.

use serde_json::json;
use tortie_api::manifest;
use tortie_servers::KubeOptions;
use tortie_servers::programs::can_run;
use tortie_store::{Applied, Store, StoreError};

use crate::kubernetes::{NEEDED, client, pod, start};

const MANIFEST: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: 'n', labels: {a: b}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: default, namespace: 'n'}
---
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: 'n', labels: {app: one, kept: x}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: k, namespace: 'n'}
spec: {podSelector: {}, ingress: [{}]}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: c, namespace: 'n'}
spec: {selector: all(), ingress: [{action: Allow}]}
";

/// The API server and others add to objects, for instance volumes to pods. Applying a manifest again keeps that.
#[tokio::test(flavor = "multi_thread")]
async fn manifests_are_applied_again() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions { controllers: true, definitions: true, ..KubeOptions::default() });
    let store = client(&servers).await;
    let apply = async |text: &str| {
        let mut results = Vec::new();
        for object in manifest::read("m.yml", text).unwrap() {
            results.push(store.apply(&object).await);
        }
        results
    };
    let count = |results: &[Result<Applied, StoreError>], is: fn(&Applied) -> bool| {
        results.iter().filter(|result| result.as_ref().is_ok_and(is)).count()
    };
    let first = apply(MANIFEST).await;
    assert!(count(&first, |it| matches!(it, Applied::Created(_))) >= 4, "{first:?}");
    servers.kubectl(&["annotate", "pod", "p", "-n", "n", "by=another"]).unwrap();
    let stored = store.get(&pod("n", "p")).await.unwrap().unwrap().value;
    assert_ne!(stored["spec"]["volumes"], json!(null), "the API server adds the token");
    let again = apply(MANIFEST).await;
    assert_eq!(count(&again, |it| matches!(it, Applied::Unchanged(_))), 5, "{again:?}");

    let changed = MANIFEST.replace("app: one, kept: x", "app: two");
    let third = apply(&changed).await;
    assert_eq!(count(&third, |it| matches!(it, Applied::Configured(_))), 1, "{third:?}");
    let after = store.get(&pod("n", "p")).await.unwrap().unwrap().value;
    assert_eq!(after["metadata"]["labels"], json!({"app": "two"}));
    assert_eq!(after["metadata"]["annotations"], json!({"by": "another"}));
    assert_eq!(after["spec"], stored["spec"]);

    let fixed =
        apply(&changed.replace("image: i", "image: other").replace("name: c, image", "name: d, image")).await;
    let invalid = fixed.iter().filter_map(|result| result.as_ref().err()).collect::<Vec<_>>();
    let [StoreError::Invalid { key, problem }] = invalid.as_slice() else { panic!("{fixed:?}") };
    assert!(*key == pod("n", "p") && problem.contains("may not"), "{problem}");
}

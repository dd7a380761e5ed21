//! Kinds that the API server does not have, or does not show.

use tortie_api::Kind;
use tortie_servers::KubeOptions;
use tortie_servers::programs::can_run;
use tortie_store::conformance::{Mirror, number_of, sample};
use tortie_store::{Interest, Store, StoreError};

use crate::kubernetes::{NEEDED, at, client, client_of, eventually, pod, put, start, tier};

/// A CustomResourceDefinition that is missing, and a permission that is missing, disable nothing else, and may come
/// later.
#[tokio::test(flavor = "multi_thread")]
async fn kinds_may_be_absent_or_forbidden() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers =
        start(KubeOptions { users: vec![("reader".to_owned(), Vec::new())], ..KubeOptions::default() });
    let admin = client(&servers).await;
    let reader = client_of(&servers, "reader").await;
    let refused = [
        reader.get(&pod("default", "p")).await.map(drop),
        reader.list(Kind::Pod).await.map(drop),
        reader.create(&pod("default", "p"), sample(&pod("default", "p"), 1)).await.map(drop),
    ];
    for (result, verb) in refused.into_iter().zip(["get", "list", "create"]) {
        let Err(StoreError::Forbidden(text)) = &result else { panic!("{verb}: {result:?}") };
        for part in [verb, "pods", "reader", &servers.url()] {
            assert!(text.contains(part), "{text}");
        }
    }
    assert_eq!(
        admin.create(&tier("t"), sample(&tier("t"), 1)).await,
        Err(StoreError::KindAbsent(Kind::Tier))
    );
    assert_eq!(admin.get(&tier("t")).await, Err(StoreError::KindAbsent(Kind::Tier)));

    let role = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules: [{apiGroups: ['*'], resources: [namespaces, tiers], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}]
";
    servers.apply(role).unwrap();
    let kinds = [Kind::Namespace, Kind::Tier, Kind::Pod];
    let mut mirror = Mirror::new(&reader, kinds.map(Interest::all).to_vec());
    mirror
        .until(|mirror| {
            mirror.in_sync.contains(&Kind::Namespace)
                && mirror.unavailable.get(&Kind::Tier) == Some(&StoreError::KindAbsent(Kind::Tier))
                && matches!(mirror.unavailable.get(&Kind::Pod), Some(StoreError::Forbidden(_)))
        })
        .await;
    let barrier = reader.barrier(&kinds).await.unwrap();
    mirror.reach(&barrier).await;

    servers.create_definitions().unwrap();
    eventually("create", async || admin.create(&tier("t"), sample(&tier("t"), 1)).await).await;
    mirror.until(|mirror| mirror.objects.contains_key(&tier("t"))).await;
    assert!(!mirror.in_sync.contains(&Kind::Pod));

    servers.apply(&role.replace("[namespaces, tiers]", "[namespaces, tiers, pods]")).unwrap();
    let created = put(&admin, &pod("default", "p"), 1).await;
    mirror.until(|mirror| mirror.in_sync.contains(&Kind::Pod)).await;
    mirror.reach(&at(&created)).await;
    assert_eq!(number_of(&mirror.objects[&pod("default", "p")]), Some(1));
}

/// Who may list a kind and not watch it would learn of changes late, without knowing.
#[tokio::test(flavor = "multi_thread")]
async fn a_kind_that_cannot_be_watched_is_unavailable() {
    if !can_run(&NEEDED) {
        return;
    }
    let users = vec![("reader".to_owned(), Vec::new())];
    let servers = start(KubeOptions { users, ..KubeOptions::default() });
    let (admin, reader) = (client(&servers).await, client_of(&servers, "reader").await);
    let role = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules: [{apiGroups: [''], resources: [pods], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}]
";
    servers.apply(role).unwrap();
    let forbidden = |mirror: &Mirror| match mirror.unavailable.get(&Kind::Pod) {
        Some(StoreError::Forbidden(text)) => text.contains("cannot watch"),
        _ => false,
    };
    eventually("the role", async || reader.list(Kind::Pod).await).await;
    let mut mirror = Mirror::new(&reader, vec![Interest::all(Kind::Pod)]);
    mirror.until(forbidden).await;
    // It is still listed from time to time, and unavailable again.
    put(&admin, &pod("default", "p"), 1).await;
    mirror.until(|mirror| !mirror.objects.is_empty() && mirror.unavailable.is_empty()).await;
    mirror.until(forbidden).await;
    servers.apply(&role.replace("[get, list]", "[get, list, watch]")).unwrap();
    let last = put(&admin, &pod("default", "q"), 1).await;
    mirror.reach(&at(&last)).await;
    admin.delete(&pod("default", "q"), None).await.unwrap();
    mirror.until(|mirror| mirror.unavailable.is_empty() && mirror.objects.len() == 1).await;
}

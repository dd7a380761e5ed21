//! Secrets on the real API server, with the Role that `tortie install --bgp-secret` creates.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use tortie_servers::programs::can_run;
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::{SecretData, SecretState, Secrets};

use crate::kubernetes::{NEEDED, client_of, start};

const ROLE: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: secrets, namespace: default}
rules: [{apiGroups: [''], resources: [secrets], resourceNames: [bgp], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: secrets, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: secrets}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: agent}]
";

/// The next state that differs from the last one.
async fn next(states: &mut BoxStream<'static, SecretState>, last: &SecretState) -> SecretState {
    let different = async {
        loop {
            match states.next().await.unwrap() {
                state if state == *last => {}
                SecretState::Unavailable(_) => {}
                state => return state,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), different).await.unwrap()
}

fn write(servers: &KubeApi, value: &str) {
    servers
        .apply(&format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: bgp, namespace: default}}\nstringData: {{password: {value}}}\n"
        ))
        .unwrap();
}

fn present(value: &str) -> SecretState {
    SecretState::Present(SecretData([("password".to_owned(), value.as_bytes().to_vec())].into()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_for_one_name_is_enough_to_follow_a_secret() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions { users: vec![("agent".to_owned(), vec![])], ..KubeOptions::default() });
    let agent = client_of(&servers, "agent").await;
    assert_eq!(agent.namespace(), "default");
    let mut states = agent.follow_secret("bgp");
    let refused = states.next().await.unwrap();
    let SecretState::Forbidden(problem) = &refused else { panic!("{refused:?}") };
    assert!(problem.contains("--bgp-secret bgp") && problem.contains("list"), "{problem}");

    servers.apply(ROLE).unwrap();
    let mut last = next(&mut states, &refused).await;
    assert_eq!(last, SecretState::Absent);
    for value in ["one", "two"] {
        write(&servers, value);
        last = next(&mut states, &last).await;
        assert_eq!(last, present(value));
    }
    // Another name in the same namespace stays forbidden.
    let other = agent.follow_secret("other").next().await.unwrap();
    assert!(matches!(other, SecretState::Forbidden(_)), "{other:?}");

    // Changes during an outage of the API server, and after it.
    servers.api().kill().unwrap();
    servers.api().restart().unwrap();
    servers.api().wait_until_ready().unwrap();
    write(&servers, "three");
    last = next(&mut states, &last).await;
    assert_eq!(last, present("three"));
    servers.kubectl(&["delete", "secret", "bgp", "-n", "default"]).unwrap();
    assert_eq!(next(&mut states, &last).await, SecretState::Absent);
}

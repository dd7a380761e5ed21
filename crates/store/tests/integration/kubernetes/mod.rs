//! The Kubernetes backend on the real API server: compare-and-swap, pages, watches, faults, and Calico's format.

mod apply;
mod endpoints;
mod groups;
mod ipam;
mod kinds;
mod secrets;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tortie_api::{Key, Kind, Positions};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Authority, KubeApi, KubeOptions};
use tortie_store::conformance::{self, Mirror, Values, number_of, sample};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Event, Interest, Source, Store, StoreError, Stored};

const NEEDED: [Program; 1] = [Program::Kube];

fn start(options: KubeOptions) -> KubeApi {
    KubeApi::start(&options).unwrap()
}

async fn client(servers: &KubeApi) -> Kubernetes {
    Kubernetes::new(&KubernetesConfig::Kubeconfig(servers.kubeconfig())).await.unwrap()
}

async fn client_of(servers: &KubeApi, user: &str) -> Kubernetes {
    Kubernetes::new(&KubernetesConfig::Kubeconfig(servers.kubeconfig_of(user))).await.unwrap()
}

fn pod(namespace: &str, name: &str) -> Key {
    Key::namespaced(Kind::Pod, namespace, name)
}

fn tier(name: &str) -> Key {
    Key::global(Kind::Tier, name)
}

fn at(stored: &Stored) -> Positions {
    [(stored.key.kind, stored.position)].into_iter().collect()
}

async fn put(store: &Kubernetes, key: &Key, number: u64) -> Stored {
    store.create(key, sample(key, number)).await.unwrap()
}

/// Creates a namespace.
async fn namespace(store: &Kubernetes, name: &str) {
    put(store, &Key::global(Kind::Namespace, name), 0).await;
}

/// Waits as long as the API server may need to start.
async fn eventually<T>(what: &str, mut attempt: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(100);
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{what}: {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubernetes_api_conforms() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions { definitions: true, ..KubeOptions::default() });
    conforms(&servers).await;
}

/// Runs the conformance suite, and what only a Kubernetes API does, in whichever group Calico's kinds are.
async fn conforms(servers: &KubeApi) {
    conformance::run(Values::Valid, || async {
        let store = Arc::new(client(servers).await);
        empty(&store).await;
        store as Arc<dyn Store>
    })
    .await;
    let store = client(servers).await;
    invalid_writes(&store).await;
    an_absent_kind_is_reported(&store).await;
}

/// Deletes all samples. Namespaces stay, because no controller would complete their deletion.
async fn empty(store: &Arc<Kubernetes>) {
    for kind in [
        Kind::Pod,
        Kind::Tier,
        Kind::NetworkSet,
        Kind::HostEndpoint,
        Kind::KubernetesNetworkPolicy,
        Kind::IpamBlock,
        Kind::BlockAffinity,
    ] {
        let keys = store.list(kind).await.unwrap().items.into_iter().map(|stored| stored.key);
        let deletions = futures::stream::iter(keys.map(async |key| store.delete(&key, None).await.map(drop)));
        deletions.buffer_unordered(16).for_each(async |deleted| deleted.unwrap()).await;
    }
}

async fn invalid_writes(store: &Kubernetes) {
    let in_nowhere = Key::namespaced(Kind::NetworkSet, "nowhere", "s");
    let table = [
        (tier("t"), json!(1), "must be an object"),
        (tier("t"), json!({"spec": {"order": "x"}}), "spec.order"),
        (tier("T"), json!({}), "lowercase"),
        (pod("n", "p"), json!({}), "spec.containers"),
        (in_nowhere.clone(), sample(&in_nowhere, 0), "namespaces \"nowhere\" not found"),
    ];
    for (key, value, expected) in table {
        let result = store.create(&key, value).await;
        let Err(StoreError::Invalid { key: named, problem }) = &result else { panic!("{key}: {result:?}") };
        assert_eq!(*named, key);
        assert!(problem.contains(expected), "{problem}");
    }
    let absent = Kind::AdminNetworkPolicy;
    assert_eq!(store.list(absent).await, Err(StoreError::KindAbsent(absent)));
}

async fn an_absent_kind_is_reported(store: &Kubernetes) {
    let kinds = [Kind::Node, Kind::AdminNetworkPolicy];
    let mut mirror = Mirror::new(store, kinds.map(Interest::all).to_vec());
    mirror.until(|mirror| mirror.in_sync.contains(&Kind::Node)).await;
    mirror.until(|mirror| mirror.unavailable.contains_key(&Kind::AdminNetworkPolicy)).await;
    let barrier = store.barrier(&kinds).await.unwrap();
    mirror.reach(&barrier).await;
}

/// The API server is killed under load. Nothing that was acknowledged is lost, and the follower ends with the stored
/// state. Then its history is compacted: the follower lists again and receives only differences.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_may_be_killed_and_its_history_lost() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await;
    let kinds = [Kind::Namespace, Kind::ServiceAccount];
    let mut mirror = Mirror::in_sync(&store, &kinds).await;
    let account = |number: u64| Key::namespaced(Kind::ServiceAccount, "default", format!("a{number}"));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let writer = tokio::spawn({
        let store = store.clone();
        async move {
            let mut acknowledged = Vec::new();
            for number in 0.. {
                let key = account(number);
                match store.create(&key, sample(&key, number)).await {
                    Ok(_) => acknowledged.push(key),
                    // Between attempts, so that the loop does not take the processor from the server.
                    Err(_) => tokio::task::yield_now().await,
                }
                if *stopped.borrow() {
                    break;
                }
            }
            acknowledged
        }
    });
    mirror.until(|mirror| mirror.objects.keys().any(|key| *key == account(20))).await;
    servers.api().kill().unwrap();
    let unavailable = store.get(&account(0)).await;
    let Err(StoreError::Unavailable(text)) = &unavailable else { panic!("{unavailable:?}") };
    assert!(text.contains(&servers.url()) && text.contains("refused"), "{text}");
    servers.api().restart().unwrap();
    servers.api().wait_until_ready().unwrap();
    let key = Key::global(Kind::Namespace, "after");
    let created = eventually("create", async || put_again(&store, &key).await).await;
    mirror.reach(&at(&created)).await;
    stop.send_replace(true);
    let acknowledged = writer.await.unwrap();
    let last = put(&store, &Key::namespaced(Kind::ServiceAccount, "default", "last"), 1).await;
    mirror.reach(&at(&last)).await;
    let stored: Vec<Key> =
        store.list(Kind::ServiceAccount).await.unwrap().items.into_iter().map(|stored| stored.key).collect();
    assert!(acknowledged.len() > 20 && acknowledged.iter().all(|key| stored.contains(key)));
    assert!(mirror.objects.keys().filter(|key| key.kind == Kind::ServiceAccount).eq(&stored));

    let (puts, before) = (mirror.puts, last.position);
    let old = Key::namespaced(Kind::KubernetesNetworkPolicy, "default", "old");
    let policy = store.create(&old, json!({"spec": {"podSelector": {}}})).await.unwrap();
    store.delete(&account(3), None).await.unwrap();
    let new = put(&store, &account(1_000_000), 1).await;
    servers.api().kill().unwrap();
    servers.etcd().compact().unwrap();
    servers.api().restart().unwrap();
    servers.api().wait_until_ready().unwrap();
    let later = eventually("create", async || put_again(&store, &account(1_000_001)).await).await;
    mirror.reach(&at(&later)).await;
    assert!(!mirror.objects.contains_key(&account(3)));
    assert!(mirror.objects.contains_key(&new.key));
    // The API server does not return the position of this deletion, and has no history since the object's version.
    assert!(store.delete(&old, Some(&policy.version)).await.unwrap() > policy.position);
    assert!(mirror.puts <= puts + 3, "only differences are delivered: {} after {puts}", mirror.puts);
    let mut late = Source::watch(&store, &[Interest::all(Kind::ServiceAccount)], before).await.unwrap();
    let event = late.next().await;
    assert_eq!(event, Some(Err(StoreError::Compacted(before))));
}

/// The API server ends watches. They are opened again without an error, and nothing is lost or repeated.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_ends_is_opened_again() {
    const COUNT: u64 = 30;
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let store = client(&servers).await.with_watch_seconds(1);
    let account = |number: u64| Key::namespaced(Kind::ServiceAccount, "default", format!("a{number}"));
    let listing = store.list(Kind::ServiceAccount).await.unwrap();
    let interests = [Interest::all(Kind::ServiceAccount)];
    let mut watch = Source::watch(&store, &interests, listing.position).await.unwrap();
    let write = async {
        // The load takes as long as three watches.
        let mut interval = tokio::time::interval(Duration::from_millis(100));
        for number in 0..COUNT {
            interval.tick().await;
            put(&store, &account(number), number).await;
        }
    };
    let read = async {
        let mut found = Vec::new();
        while found.len() < usize::try_from(COUNT).unwrap() {
            match watch.next().await.unwrap().unwrap() {
                Event::Put(stored) => found.push(number_of(&stored.value).unwrap()),
                Event::Progress(_) => {}
                event @ Event::Deleted { .. } => panic!("{event:?}"),
            }
        }
        found
    };
    let ((), found) = futures::join!(write, read);
    assert_eq!(found, (0..COUNT).collect::<Vec<_>>());
}

/// Creates an object, or finds the one that an earlier attempt created.
async fn put_again(store: &Kubernetes, key: &Key) -> Result<Stored, StoreError> {
    match store.create(key, sample(key, 1)).await {
        Err(StoreError::AlreadyExists(_)) => Ok(store.get(key).await?.expect("it exists")),
        other => other,
    }
}

/// Objects as Calico writes them: Tortie reads them in the form of Calico's API, or of etcd for IPAM's records, and
/// writes them as they were.
#[tokio::test(flavor = "multi_thread")]
async fn objects_of_calico_are_written_as_they_were() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions { definitions: true, ..KubeOptions::default() });
    let store = client(&servers).await;
    let created = "2024-05-06T07:08:09Z";
    let kept = |name: &str| {
        let rest = r#""labels":{"a":"b"},"annotations":{"note":"x","projectcalico.org/own":"y"},"finalizers":["example.com/f"]"#;
        format!(r#"{{{name}"generation":3,"creationTimestamp":"{created}",{rest}}}"#)
    };
    let calico = |kind: &str, metadata: Value, spec: &Value| json!({"apiVersion": "crd.projectcalico.org/v1", "kind": kind, "metadata": metadata, "spec": spec});
    let annotated = |name: &str, text: &str| json!({"name": name, "annotations": {"projectcalico.org/metadata": text, "projectcalico.org/own": "y"}});
    let metadata = |name: &str| {
        json!({"name": name, "generation": 3, "creationTimestamp": created, "labels": {"a": "b"},
            "annotations": {"note": "x", "projectcalico.org/own": "y"}, "finalizers": ["example.com/f"]})
    };
    let value = |kind: &str, metadata: Value, spec: &Value| json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": metadata, "spec": spec});
    let big = 1_800_000_000_000_000_123_u64;
    let tier = json!({"order": 1.5, "defaultAction": "Pass", "new": {"number": big}});
    let policy = json!({"tier": "default", "order": 7, "selector": "all()", "types": ["Ingress"]});
    let block = json!({"cidr": "10.0.0.0/30", "affinity": "host:node-a", "affinityClaimTime": created,
        "allocations": [null, 0, null, null], "unallocated": [0, 2, 3], "strictAffinity": false, "deleted": false,
        "attributes": [{"handle_id": "Calico.ABC", "secondary": {"node": "node-a"}, "releasedAt": created}],
        "sequenceNumber": big, "sequenceNumberForAllocation": {"1": big - 1}});
    let mut block_in_etcd = block.clone();
    block_in_etcd["affinity_claim_time"] = block_in_etcd["affinityClaimTime"].take();
    block_in_etcd.as_object_mut().unwrap().remove("affinityClaimTime");
    let hash = "PY3TQE2E3XMTETLM2MJO3UITKPFB27YUJ4T4E5XGPEJON3SM4QAA";
    let labels = json!({"projectcalico.org/affinity-type": "host", "projectcalico.org/hostname-hash": hash,
        "projectcalico.org/ip-version": "4"});
    let affinity = json!({"state": "confirmed", "node": "node-a", "cidr": "10.0.0.0/30", "deleted": "false", "type": "host"});
    let handle = json!({"handleID": "Calico.ABC", "block": {"10.0.0.0/30": 1}, "deleted": false});
    let config = json!({"strictAffinity": true, "autoAllocateBlocks": true, "maxBlocksPerHost": 3});
    let named = |name: &str| json!({"name": name});
    let table = [
        (
            Key::global(Kind::Tier, "t"),
            calico("Tier", annotated("t", &kept("")), &tier),
            value("Tier", metadata("t"), &tier),
        ),
        (
            Key::global(Kind::GlobalNetworkPolicy, "default.p"),
            calico("GlobalNetworkPolicy", annotated("default.p", &kept(r#""name":"p","#)), &policy),
            value("GlobalNetworkPolicy", metadata("p"), &policy),
        ),
        (
            Key::global(Kind::IpamBlock, "10.0.0.0/30"),
            calico("IPAMBlock", named("10-0-0-0-30"), &block),
            block_in_etcd,
        ),
        (
            Key::global(Kind::BlockAffinity, "node-a/10.0.0.0/30"),
            calico("BlockAffinity", json!({"name": "node-a-10-0-0-0-30", "labels": labels}), &affinity),
            json!({"state": "confirmed", "deleted": false, "type": "host"}),
        ),
        (
            Key::global(Kind::IpamHandle, "Calico.ABC"),
            calico("IPAMHandle", named("calico.abc"), &handle),
            json!({"block": {"10.0.0.0/30": 1}, "deleted": false}),
        ),
        (
            Key::global(Kind::IpamConfig, "default"),
            calico("IPAMConfig", named("default"), &config),
            json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 3}),
        ),
    ];
    let stored = |object: &Value| {
        let kind = object["kind"].as_str().unwrap().to_lowercase();
        let target =
            format!("{kind}.v1.crd.projectcalico.org/{}", object["metadata"]["name"].as_str().unwrap());
        serde_json::from_str::<Value>(&servers.kubectl(&["get", &target, "-o", "json"]).unwrap()).unwrap()
    };
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    for (key, object, expected) in table {
        std::fs::write(file.path(), object.to_string()).unwrap();
        servers.kubectl(&["create", "-f", &file.path().display().to_string()]).unwrap();
        let before = stored(&object);
        let read = store.get(&key).await.unwrap().unwrap();
        let mut value = read.value.clone();
        let uid = value.get_mut("metadata").and_then(|metadata| metadata.as_object_mut()?.remove("uid"));
        assert_ne!(uid.as_ref(), Some(&before["metadata"]["uid"]), "the uid is transformed");
        assert_eq!(value, expected, "{key}");
        let written = store.update(&key, read.value.clone(), &read.version).await.unwrap();
        assert_eq!(written.value, read.value, "{key}");
        // Writing the same object is no change for the API server.
        assert_eq!(stored(&object), before, "{key}");
        assert_eq!(store.list(key.kind).await.unwrap().items, [written]);

        store.delete(&key, None).await.unwrap();
        let again = store.create(&key, read.value.clone()).await.unwrap();
        assert_eq!(store.get(&key).await, Ok(Some(again)));
        let after = stored(&object);
        for field in ["/spec", "/metadata/annotations", "/metadata/labels", "/metadata/name"] {
            assert_eq!(after.pointer(field), before.pointer(field), "{key}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_server_and_the_cause() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let folder = tempfile::tempdir().unwrap();
    let foreign = Authority::new(folder.path()).unwrap().certificate().display().to_string();
    let good = std::fs::read_to_string(servers.kubeconfig()).unwrap();
    let authority = servers.authority().certificate().display().to_string();
    let table = [
        (
            "nobody listens",
            good.replace(&servers.url(), "https://127.0.0.1:1"),
            "https://127.0.0.1:1",
            "refused",
        ),
        ("an unknown authority", good.replace(&authority, &foreign), &servers.url(), "certificate"),
        ("a wrong token", good.replace(&servers.token("admin"), "wrong"), &servers.url(), "Unauthorized"),
    ];
    for (name, kubeconfig, server, cause) in table {
        let path = folder.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig).unwrap();
        let store = Kubernetes::new(&KubernetesConfig::Kubeconfig(path)).await.unwrap();
        let result = store.get(&pod("default", "p")).await;
        let Err(StoreError::Unavailable(text) | StoreError::Forbidden(text)) = &result else {
            panic!("{name}: {result:?}")
        };
        assert!(text.contains(server) && text.contains(cause), "{name}: {text}");
    }
    for (content, cause) in
        [(None, "No such file"), (Some("clusters: 1"), "clusters"), (Some("{}"), "context")]
    {
        let path = folder.path().join("other");
        if let Some(content) = content {
            std::fs::write(&path, content).unwrap();
        }
        let result = Kubernetes::new(&KubernetesConfig::Kubeconfig(path.clone())).await.map(drop);
        let Err(StoreError::Unavailable(text)) = &result else { panic!("{content:?}: {result:?}") };
        let expected = [path.display().to_string(), cause.to_owned()];
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
}

//! A network between followers and their datastore that delays, reorders, cuts and loses: the Kubernetes API and etcd.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::task::block_in_place;
use tortie_api::{Key, Kind};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd as EtcdServers, Fault, KubeApi, KubeOptions, Proxy};
use tortie_store::conformance::{Mirror, sample};
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Interest, Source, Store, StoreError, Stored};

const KUBERNETES: [Program; 1] = [Program::Kube];
const ETCD: [Program; 2] = [Program::Etcd, Program::Etcdctl];

fn proxy_before(port: u16) -> Proxy {
    Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap()
}

async fn client(servers: &KubeApi) -> Kubernetes {
    Kubernetes::new(&KubernetesConfig::Kubeconfig(servers.kubeconfig())).await.unwrap()
}

async fn client_through(servers: &KubeApi, proxy: &Proxy) -> Kubernetes {
    let kubeconfig = servers.kubeconfig_at("admin", proxy.address().port()).unwrap();
    Kubernetes::new(&KubernetesConfig::Kubeconfig(kubeconfig)).await.unwrap()
}

fn port_of(endpoint: &str) -> u16 {
    endpoint.rsplit(':').next().unwrap().parse().unwrap()
}

fn etcd_at(endpoint: String) -> Etcd {
    Etcd::new(EtcdConfig { endpoints: vec![endpoint], ..EtcdConfig::default() }).unwrap()
}

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_of_the_kubernetes_api_has_the_stored_state_after_each_fault() {
    if !can_run(&KUBERNETES) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
    let proxy = proxy_before(servers.port());
    let follower = client_through(&servers, &proxy).await.with_silence(Duration::from_secs(3));
    let kinds = [Kind::Tier, Kind::ServiceAccount, Kind::KubernetesNetworkPolicy];
    let restart = || {
        servers.api().kill().unwrap();
        servers.api().restart().unwrap();
        servers.api().wait_until_ready().unwrap();
    };
    survive(Arc::new(client(&servers).await), &follower, &proxy, kinds, restart).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_of_etcd_has_the_stored_state_after_each_fault() {
    if !can_run(&ETCD) {
        return;
    }
    let servers = EtcdServers::start().unwrap();
    let endpoint = servers.endpoints()[0].clone();
    let proxy = proxy_before(port_of(&endpoint));
    let follower = etcd_at(format!("http://{}", proxy.address()));
    let restart = || {
        let [member] = servers.members() else { panic!("one member is expected") };
        member.kill().unwrap();
        member.restart().unwrap();
        member.wait_until_ready().unwrap();
    };
    let kinds = [Kind::Tier, Kind::NetworkSet, Kind::NetworkPolicy];
    survive(Arc::new(etcd_at(endpoint)), &follower, &proxy, kinds, restart).await;
}

/// One fault after another between the follower and the server, and at last a restart of the server, under load. After
/// each, the follower has what was written meanwhile, and in the end exactly what is stored.
async fn survive(
    store: Arc<dyn Store>,
    follower: &dyn Store,
    proxy: &Proxy,
    kinds: [Kind; 3],
    restart: impl Fn(),
) {
    let mut mirror = Mirror::in_sync(follower, &kinds).await;
    let churning = tokio::spawn(churn(store.clone(), kinds));
    for (number, fault) in Fault::ALL.map(Some).into_iter().chain([None]).enumerate() {
        block_in_place(|| match fault {
            Some(fault) => proxy.disturb(fault),
            None => restart(),
        });
        let marker = Key::global(Kind::Tier, format!("after-{number}"));
        let marker = put(&*store, &marker).await;
        mirror.reach(&[(marker.key.kind, marker.position)].into_iter().collect()).await;
        proxy.calm();
    }
    churning.abort();
    assert!(churning.await.is_err_and(|error| error.is_cancelled()));
    let mut stored = BTreeMap::new();
    for kind in kinds {
        let items = store.list(kind).await.unwrap().items;
        stored.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    assert!(stored.len() > Fault::ALL.len());
    mirror.until(|mirror| mirror.objects == stored).await;
}

/// Creates, updates and deletes objects of all kinds until it is aborted. Failures do not matter.
async fn churn(store: Arc<dyn Store>, kinds: [Kind; 3]) {
    for (number, kind) in (0_u64..).zip(kinds.into_iter().cycle()) {
        let name = format!("o{}", number % 20);
        let key = match kind.namespaced() {
            true => Key::namespaced(kind, "default", name),
            false => Key::global(kind, name),
        };
        let result = match store.get(&key).await {
            Ok(Some(_)) if number.is_multiple_of(5) => store.delete(&key, None).await.map(drop),
            Ok(Some(found)) => store.update(&key, sample(&key, number), &found.version).await.map(drop),
            Ok(None) => store.create(&key, sample(&key, number)).await.map(drop),
            Err(error) => Err(error),
        };
        if result.is_err() {
            tokio::task::yield_now().await;
        }
    }
}

/// Creates the object, or finds what an earlier attempt created, as soon as the store answers.
async fn put(store: &dyn Store, key: &Key) -> Stored {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(100);
    loop {
        let result = match store.create(key, sample(key, 1)).await {
            Err(StoreError::AlreadyExists(_)) => {
                store.get(key).await.map(|stored| stored.expect("it exists"))
            }
            created => created,
        };
        match result {
            Ok(stored) => return stored,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{key}: {error}"),
        }
    }
}

/// The other side accepts what is sent and never answers, as a load balancer that has forgotten the connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_watch_of_the_kubernetes_api_ends() {
    if !can_run(&KUBERNETES) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions::default()).unwrap();
    let proxy = proxy_before(servers.port());
    let store = client_through(&servers, &proxy).await.with_silence(Duration::from_secs(1));
    let error = end_of_silent_watch(&store, &proxy, Kind::Namespace).await;
    assert!(matches!(&error, StoreError::Unavailable(text) if text.contains("no answer in 15 s")), "{error}");
}

/// Of a kind that nobody has changed since its start, the API server sends no bookmarks, unless etcd reports its progress. That is no
/// failure.
#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_watch_of_the_kubernetes_api_goes_on() {
    if !can_run(&KUBERNETES) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions::default()).unwrap();
    let proxy = proxy_before(servers.port());
    let store = client_through(&servers, &proxy).await.with_silence(Duration::from_millis(300));
    let position = store.list(Kind::ServiceAccount).await.unwrap().position;
    let mut watch = Source::watch(&store, &[Interest::all(Kind::ServiceAccount)], position).await.unwrap();
    let quiet = tokio::time::timeout(Duration::from_secs(2), watch.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    let account = serde_json::json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a", "namespace": "default"}});
    servers.apply(&account.to_string()).unwrap();
    let event = tokio::time::timeout(Duration::from_secs(10), watch.next()).await.expect("an event");
    assert!(event.unwrap().is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_watch_of_etcd_ends() {
    if !can_run(&ETCD) {
        return;
    }
    let servers = EtcdServers::start().unwrap();
    let proxy = proxy_before(port_of(&servers.endpoints()[0]));
    let store = etcd_at(format!("http://{}", proxy.address()));
    let error = end_of_silent_watch(&store, &proxy, Kind::Tier).await;
    assert!(matches!(&error, StoreError::Unavailable(_)), "{error}");
}

async fn end_of_silent_watch(store: &impl Source, proxy: &Proxy, kind: Kind) -> StoreError {
    let interests = [Interest::all(kind)];
    let position = store.list(kind).await.unwrap().position;
    let mut watch = Source::watch(store, &interests, position).await.unwrap();
    proxy.pause();
    let end = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            if let Some(Err(error)) = watch.next().await {
                return error;
            }
        }
    });
    end.await.expect("an end")
}

/// The kernel asks the other side of a quiet connection whether it is still there.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_watches_over_connections() {
    if !can_run(&KUBERNETES) {
        return;
    }
    let servers = KubeApi::start(&KubeOptions::default()).unwrap();
    let store = client(&servers).await;
    let position = store.list(Kind::Namespace).await.unwrap().position;
    let _watch = Source::watch(&store, &[Interest::all(Kind::Namespace)], position).await.unwrap();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let timers = timers_towards(servers.port());
        // 2 is the timer of keepalive messages; the time is in hundredths of a second.
        if !timers.is_empty() && timers.iter().all(|(timer, time)| *timer == 2 && *time <= 1_000) {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{timers:?}");
        pause(50).await;
    }
}

/// The active timer, and its time, of each connection of this process to a port of loopback.
#[cfg(target_os = "linux")]
fn timers_towards(port: u16) -> Vec<(u32, u64)> {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let inodes: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    let timers = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_own = inodes.contains(&format!("socket:[{}]", fields.get(9)?));
        let remote = fields.get(2)?.split_once(':')?.1;
        // 01 is an established connection.
        (is_own && remote == format!("{port:04X}") && *fields.get(3)? == "01").then_some(())?;
        let (timer, time) = fields.get(5)?.split_once(':')?;
        Some((u32::from_str_radix(timer, 16).ok()?, u64::from_str_radix(time, 16).ok()?))
    });
    timers.collect()
}

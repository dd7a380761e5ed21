//! A network between the follower and the API server that delays, reorders, cuts and loses.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use futures::StreamExt;
use tortie_api::{Key, Kind};
use tortie_servers::programs::can_run;
use tortie_servers::{KubeApi, KubeOptions, Proxy};
use tortie_store::conformance::{Mirror, sample};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Interest, Source, Store, StoreError};

use crate::{NEEDED, at, client, eventually, put_again, start, tier};

const KINDS: [Kind; 3] = [Kind::Tier, Kind::ServiceAccount, Kind::KubernetesNetworkPolicy];

fn proxy_before(servers: &KubeApi) -> Proxy {
    Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, servers.port()))).unwrap()
}

async fn client_through(servers: &KubeApi, proxy: &Proxy) -> Kubernetes {
    let kubeconfig = servers.kubeconfig_at("admin", proxy.address().port()).unwrap();
    Kubernetes::new(&KubernetesConfig::Kubeconfig(kubeconfig)).await.unwrap()
}

/// Creates, updates and deletes objects of all kinds until it is aborted. Failures do not matter.
async fn churn(store: Kubernetes) {
    for number in 0_u64.. {
        let key = match number % 3 {
            0 => tier(&format!("t{}", number % 20)),
            1 => Key::namespaced(Kind::ServiceAccount, "default", format!("a{}", number % 20)),
            _ => Key::namespaced(Kind::KubernetesNetworkPolicy, "default", format!("p{}", number % 20)),
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

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// One fault after another, under load. After each, the follower has what was written meanwhile, and in the end exactly
/// what is stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_has_the_stored_state_after_each_fault() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    servers.create_definitions().unwrap();
    let (admin, proxy) = (client(&servers).await, proxy_before(&servers));
    let follower = client_through(&servers, &proxy).await.with_silence(Duration::from_secs(3));
    let mut mirror = Mirror::in_sync(&follower, &KINDS).await;
    let churning = tokio::spawn(churn(admin.clone()));
    let faults = [
        "delay",
        "order",
        "cut",
        "many cuts",
        "refusal",
        "pause",
        "pause and cut",
        "lost connection",
        "killed server",
    ];
    for fault in faults {
        let disturb = async {
            match fault {
                "delay" => proxy.delay(Duration::from_millis(300)),
                "order" => proxy.spread(Duration::from_millis(500)),
                "cut" => assert!(proxy.cut() > 0),
                "many cuts" => {
                    for _ in 0..10 {
                        pause(70).await;
                        proxy.cut();
                    }
                }
                "refusal" => {
                    proxy.refuse(true);
                    proxy.cut();
                    pause(1_000).await;
                    proxy.refuse(false);
                }
                "pause" => {
                    proxy.pause();
                    pause(1_000).await;
                    proxy.resume();
                }
                "pause and cut" => {
                    proxy.pause();
                    pause(500).await;
                    proxy.cut();
                    proxy.resume();
                }
                // Nobody ends these connections: their silence does.
                "lost connection" => {
                    proxy.pause();
                    pause(5_000).await;
                    proxy.cut();
                    proxy.resume();
                }
                _ => {
                    servers.api().kill().unwrap();
                    servers.api().restart().unwrap();
                    servers.api().wait_until_ready().unwrap();
                }
            }
            let marker = tier(&format!("after-{}", fault.replace(' ', "-")));
            eventually("a marker", async || put_again(&admin, &marker).await).await
        };
        let marker = disturb.await;
        mirror.reach(&at(&marker)).await;
        proxy.delay(Duration::ZERO);
        proxy.spread(Duration::ZERO);
    }
    churning.abort();
    assert!(churning.await.is_err_and(|error| error.is_cancelled()));
    let mut stored = std::collections::BTreeMap::new();
    for kind in KINDS {
        let items = admin.list(kind).await.unwrap().items;
        stored.extend(items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    assert!(stored.len() > faults.len());
    mirror.until(|mirror| mirror.objects == stored).await;
}

/// The other side accepts what is sent and never answers, as a load balancer that has forgotten the connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_watch_ends() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
    let proxy = proxy_before(&servers);
    let store = client_through(&servers, &proxy).await.with_silence(Duration::from_secs(1));
    let interests = [Interest::all(Kind::Namespace)];
    let position = store.list(Kind::Namespace).await.unwrap().position;
    let mut watch = Source::watch(&store, &interests, position).await.unwrap();
    proxy.pause();
    let end = tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            if let Some(Err(error)) = watch.next().await {
                return error;
            }
        }
    });
    let error = end.await.expect("an end");
    assert!(matches!(&error, StoreError::Unavailable(text) if text.contains("silent for 1 s")), "{error}");
}

/// The kernel asks the other side of a quiet connection whether it is still there.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_watches_over_connections() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = start(KubeOptions::default());
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

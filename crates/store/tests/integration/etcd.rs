//! The etcd backend on real etcd: the conformance suite, Calico's data, others who write to it, and faults.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tortie_api::{Key, Kind, Positions};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Authority, Etcd as Servers, Identity};
use tortie_store::conformance::{self, Mirror, Values};
use tortie_store::etcd::{Etcd, EtcdConfig, Login};
use tortie_store::rpc::{Certificates, TlsFiles, TlsIdentity};
use tortie_store::{Interest, Store, StoreError, Stored, Write};

const NEEDED: [Program; 2] = [Program::Etcd, Program::Etcdctl];

fn identity(authority: &Authority, of: &Identity) -> TlsIdentity {
    let read = |path| fs::read_to_string(path).unwrap();
    TlsIdentity {
        authority: read(authority.certificate()),
        certificate: read(of.certificate.clone()),
        key: read(of.key.clone()),
    }
}

fn client(servers: &Servers) -> Etcd {
    let tls =
        servers.authority().map(|authority| identity(authority, &authority.client("root", &[]).unwrap()));
    let tls = tls.map(Certificates::from);
    Etcd::new(EtcdConfig { endpoints: servers.endpoints(), tls, login: None }).unwrap()
}

fn pod(name: &str) -> Key {
    Key::namespaced(Kind::Pod, "n", name)
}

fn tier(name: &str) -> Key {
    Key::global(Kind::Tier, name)
}

fn at(stored: &Stored) -> Positions {
    [(stored.key.kind, stored.position)].into_iter().collect()
}

/// Waits as long as three members may need to elect a leader.
async fn eventually<T>(what: &str, mut attempt: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{what}: {error}"),
        }
    }
}

/// More keys than fit into a page.
#[tokio::test(flavor = "multi_thread")]
async fn keys_come_in_pages() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    let store = client(&servers);
    let names: Vec<Key> = (0..2_101).map(|number| tier(&format!("t{number:04}"))).collect();
    let writes = names.iter().map(|key| Write::Create(key.clone(), conformance::sample(key, 1))).collect();
    store.write_all(writes).await.unwrap();
    assert_eq!(store.keys(Kind::Tier).await.unwrap(), names);
}

#[tokio::test(flavor = "multi_thread")]
async fn three_members_with_tls_conform() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start_three_with_tls().unwrap();
    conformance::run(Values::Any, || async {
        servers.etcdctl(&["del", "--prefix", "/"]).unwrap();
        Arc::new(client(&servers)) as Arc<dyn Store>
    })
    .await;
}

/// Who updates an object and names no identity keeps the one that it has, as Calico's client requires, and each object has one afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn each_object_has_an_identity_that_updates_keep() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    let store = client(&servers);
    let pool = |name: &str| Key::global(Kind::IpPool, name);
    let bare = |name: &str, cidr: &str| json!({"apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name}, "spec": {"cidr": cidr}});
    let identity = |stored: &Stored| {
        let metadata = &stored.value["metadata"];
        (metadata["uid"].clone(), metadata["creationTimestamp"].clone())
    };
    let first = store.create(&pool("a"), bare("a", "10.0.0.0/16")).await.unwrap();
    assert_eq!(store.get(&pool("a")).await.unwrap(), Some(first.clone()), "the answer is what is stored");
    let second = store.update(&pool("a"), bare("a", "10.1.0.0/16"), &first.version).await.unwrap();
    assert_eq!(identity(&second), identity(&first));
    let writes = vec![
        Write::Update(pool("a"), bare("a", "10.2.0.0/16"), second.version.clone()),
        Write::Create(pool("b"), bare("b", "10.3.0.0/16")),
    ];
    store.write_all(writes).await.unwrap();
    let third = store.get(&pool("a")).await.unwrap().unwrap();
    assert_eq!((identity(&third), &third.value["spec"]["cidr"]), (identity(&first), &json!("10.2.0.0/16")));
    let other = store.get(&pool("b")).await.unwrap().unwrap();
    assert_ne!(identity(&other).0, identity(&first).0);
    assert_eq!(
        store.update(&pool("a"), bare("a", "10.4.0.0/16"), &first.version).await,
        Err(StoreError::Conflict(pool("a")))
    );

    // Objects of earlier versions: without any identity, and with a part.
    let key = |name: &str| format!("/calico/resources/v3/projectcalico.org/ippools/{name}");
    let uid = "9d6ba87f-0000-4000-8000-000000000000";
    for (name, part) in [("c", None), ("d", Some(uid))] {
        let mut value = bare(name, "10.5.0.0/16");
        if let Some(uid) = part {
            value["metadata"]["uid"] = json!(uid);
        }
        servers.etcdctl(&["put", &key(name), &value.to_string()]).unwrap();
        let old = store.get(&pool(name)).await.unwrap().unwrap();
        let new = store.update(&pool(name), old.value, &old.version).await.unwrap();
        assert!(part.is_none_or(|uid| identity(&new).0 == uid), "{:?}", new.value);
        let text = servers.etcdctl(&["get", "--print-value-only", &key(name)]).unwrap();
        let raw: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(testkit::calico_client::problems(&key(name), &raw), [""; 0]);
    }
}

/// One transaction gives several keys one revision, and others write in between: to kinds that nobody follows, to keys
/// that are no objects, and to keys of other programs.
#[tokio::test(flavor = "multi_thread")]
async fn others_write_to_the_same_etcd() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    let put = |key: &str, value: &str| servers.etcdctl(&["put", key, value]).unwrap();
    put("/registry/leases/kube-node-lease/a", "binary");
    put("/calico/ipam/v2/host/node-1", "");
    put("/calico/resources/v3/projectcalico.org/tiers/damaged", "{\"metadata\":");
    let store = client(&servers);
    let writes = (0..5).map(|number| Write::Create(tier(&format!("t{number}")), json!({"n": number})));
    let written = store.write_all(writes.collect()).await.unwrap();
    assert!(written.iter().all(|each| each == &written[0]), "one transaction, one revision: {written:?}");

    let kinds = [Kind::Tier, Kind::BlockAffinity, Kind::IpamConfig];
    let mut mirror = Mirror::in_sync(&store, &kinds).await;
    let expected = |more: &[(Key, Value)]| {
        let tiers = (0..5).map(|number| (tier(&format!("t{number}")), json!({"n": number})));
        let damaged = (tier("damaged"), json!("{\"metadata\":"));
        tiers.chain([damaged]).chain(more.iter().cloned()).collect()
    };
    assert_eq!(mirror.objects, expected(&[]));
    for number in 0..200 {
        put("/registry/leases/kube-node-lease/a", &number.to_string());
        if number == 100 {
            put("/calico/ipam/v2/host/node-1/ipv4/block/10.0.0.0-26", "{\"state\":\"confirmed\"}");
            put("/calico/ipam/v2/config", "{\"strict_affinity\":true}");
        }
    }
    mirror.reach(&store.barrier(&kinds).await.unwrap()).await;
    let affinity = (Key::global(Kind::BlockAffinity, "node-1/10.0.0.0/26"), json!({"state": "confirmed"}));
    let config = (Key::global(Kind::IpamConfig, "default"), json!({"strict_affinity": true}));
    assert_eq!(mirror.objects, expected(&[affinity, config]));

    // The damaged object does not stay damaged.
    let damaged = store.get(&tier("damaged")).await.unwrap().unwrap();
    let repaired = store.update(&tier("damaged"), json!({"n": 5}), &damaged.version).await.unwrap();
    mirror.reach(&at(&repaired)).await;
    assert_eq!(mirror.objects[&tier("damaged")], json!({"n": 5}));
}

/// After a compaction, a follower that has lost its connection lists again, and receives only differences.
#[tokio::test(flavor = "multi_thread")]
async fn a_compacted_history_is_listed_again() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    let store = client(&servers);
    for number in 0..10 {
        store.create(&tier(&format!("t{number}")), json!(0)).await.unwrap();
    }
    let mut mirror = Mirror::in_sync(&store, &[Kind::Tier]).await;
    // Nothing proves that the history is the former one.
    mirror.may_repeat = true;
    let [member] = servers.members() else { panic!("one member is expected") };
    member.pause().unwrap();
    member.resume().unwrap();
    member.kill().unwrap();
    member.restart().unwrap();
    store.delete(&tier("t3"), None).await.ok();
    let gone = eventually("delete", async || match store.delete(&tier("t3"), None).await {
        Err(StoreError::NotFound(_)) => Ok(()),
        other => other.map(drop),
    });
    gone.await;
    let last = eventually("create", async || store.create(&tier("new"), json!(1)).await).await;
    servers.etcdctl(&["compact", &last.position.to_string()]).unwrap();
    member.kill().unwrap();
    member.restart().unwrap();
    let later = eventually("create", async || store.create(&tier("later"), json!(1)).await).await;
    mirror.reach(&at(&later)).await;
    assert!(!mirror.objects.contains_key(&tier("t3")));
    assert_eq!(mirror.objects.len(), 11);

    let page =
        store.list_page(&Interest::all(Kind::Tier), Some(tortie_store::PageToken("1 /a".to_owned()))).await;
    assert!(matches!(page, Err(StoreError::Compacted(_))), "{page:?}");
}

/// Each member is killed and paused once, under load. Nothing that was acknowledged is lost, and the follower ends with
/// the stored state.
#[tokio::test(flavor = "multi_thread")]
async fn members_may_be_killed_and_paused() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start_three_with_tls().unwrap();
    let store = client(&servers);
    let mut mirror = Mirror::in_sync(&store, &[Kind::Tier, Kind::Pod]).await;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let writer = tokio::spawn({
        let store = store.clone();
        async move {
            let mut acknowledged = Vec::new();
            for number in 0.. {
                let key = pod(&format!("p{number}"));
                if store.create(&key, json!(number)).await.is_ok() {
                    acknowledged.push(key);
                }
                if *stopped.borrow() {
                    break;
                }
            }
            acknowledged
        }
    });
    for (number, member) in servers.members().iter().enumerate() {
        let name = |what: &str| tier(&format!("{what}-{number}"));
        member.kill().unwrap();
        let created = eventually("a member is down", async || put(&store, &name("killed")).await).await;
        mirror.reach(&at(&created)).await;
        member.restart().unwrap();
        member.pause().unwrap();
        let created = eventually("a member is paused", async || put(&store, &name("paused")).await).await;
        mirror.reach(&at(&created)).await;
        member.resume().unwrap();
        member.wait_until_ready().unwrap();
    }
    stop.send_replace(true);
    let acknowledged = writer.await.unwrap();
    assert!(acknowledged.len() > 10, "{}", acknowledged.len());
    let last = eventually("put", async || put(&store, &pod("last")).await).await;
    mirror.reach(&at(&last)).await;
    let stored = eventually("list", async || store.list(Kind::Pod).await).await.items;
    let stored: Vec<Key> = stored.into_iter().map(|stored| stored.key).collect();
    assert!(acknowledged.iter().all(|key| stored.contains(key)));
    assert!(mirror.objects.keys().filter(|key| key.kind == Kind::Pod).eq(&stored));
}

/// Creates an object, or finds the one that an earlier attempt created.
async fn put(store: &Etcd, key: &Key) -> Result<Stored, StoreError> {
    match store.create(key, json!(1)).await {
        Err(StoreError::AlreadyExists(_)) => Ok(store.get(key).await?.expect("it exists")),
        other => other,
    }
}

/// etcd is restored from an older backup: its history ends before the position of the watches, or has grown past it when they go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_backup_is_listed_again() {
    if !can_run(&NEEDED) {
        return;
    }
    for writes_before_the_watch in [1, 120] {
        let servers = Servers::start().unwrap();
        let [member] = servers.members() else { panic!("one member is expected") };
        let store = client(&servers);
        store.create(&tier("old"), json!(1)).await.unwrap();
        store.create(&tier("kept"), json!(1)).await.unwrap();
        let (data, folder) = (servers.data_folder(0), tempfile::tempdir().unwrap());
        let backup = folder.path().join("backup");
        let copy = |from: &Path, to: &Path| {
            let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
            assert!(copied.success(), "{} to {}", from.display(), to.display());
        };
        member.kill().unwrap();
        copy(&data, &backup);
        member.restart().unwrap();

        let mut mirror = Mirror::new(&store, vec![Interest::all(Kind::Tier)]);
        for number in 0..50 {
            eventually("create", async || put(&store, &tier(&format!("n-{number}"))).await).await;
        }
        mirror.until(|mirror| mirror.objects.len() == 52).await;
        mirror.may_repeat = true;
        member.kill().unwrap();
        fs::remove_dir_all(&data).unwrap();
        copy(&backup, &data);
        member.restart().unwrap();
        // The follower does nothing meanwhile. The first write has the key and the revision of one that was lost, and another value.
        let first = async || store.create(&tier("n-0"), json!("other")).await;
        eventually("create", first).await;
        for _ in 1..writes_before_the_watch {
            let kept = store.get(&tier("kept")).await.unwrap().unwrap();
            store.update(&kept.key, json!(2), &kept.version).await.unwrap();
        }
        mirror.until(|mirror| mirror.objects.len() == 3).await;
        assert_eq!(mirror.objects[&tier("n-0")], json!("other"));
        eventually("create", async || put(&store, &tier("after")).await).await;
        mirror.until(|mirror| mirror.objects.len() == 4).await;
    }
}

/// A connection that breaks is no reason to list anything again, whatever happened before and meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_after_a_broken_connection() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    let [member] = servers.members() else { panic!("one member is expected") };
    let store = client(&servers);
    let names = |range: std::ops::Range<u32>| range.map(|number| tier(&format!("t{number}")));
    let create = |range| names(range).map(|key| Write::Create(key, json!(0))).collect();
    // More keys than a page has, of few revisions, and some that are written and deleted later.
    store.write_all(create(0..600)).await.unwrap();
    let kinds = [Kind::Tier, Kind::IpPool];
    let mut mirror = Mirror::in_sync(&store, &kinds).await;
    for number in 0..5u32 {
        let keys: Vec<Key> = names(600 + 10 * number..610 + 10 * number).collect();
        let writes = keys.iter().map(|key| Write::Create(key.clone(), json!(0))).collect();
        let last = eventually("create", async || store.get(&tier("t0")).await).await.unwrap();
        let last = store.update(&last.key, json!(number + 1), &last.version).await.unwrap();
        store.write_all(writes).await.unwrap();
        store.delete(&keys[3], None).await.unwrap();
        if number % 2 == 0 {
            mirror.reach(&at(&last)).await;
        }
        if number == 3 {
            store.delete(&keys[9], None).await.unwrap();
            mirror.reach(&store.barrier(&kinds).await.unwrap()).await;
        }
        let before = mirror.restarts;
        member.kill().unwrap();
        member.restart().unwrap();
        // Each time, no position counts until etcd has confirmed its history. What was under way may have reached the last one before.
        mirror.until(|mirror| mirror.restarts > before).await;
        let again = async || store.barrier(&kinds).await;
        let there = eventually("read", again).await;
        mirror.reach(&there).await;
    }
    assert_eq!(mirror.objects.len(), 600 + 50 - 6);
    assert_eq!(mirror.puts, 600 + 50 + 5, "nothing is listed again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_needs_a_password_and_permission() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    for command in [
        "user add root:secret",
        "user grant-role root root",
        "role add reader",
        "role grant-permission --prefix=true reader read /calico/",
        "user add reader:secret",
        "user grant-role reader reader",
        "auth enable",
    ] {
        servers.etcdctl(&command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let user = |name: &str, password: &str| {
        let login = Login { user: name.to_owned(), password: password.to_owned() };
        Etcd::new(EtcdConfig { endpoints: servers.endpoints(), tls: None, login: Some(login) }).unwrap()
    };
    let root = user("root", "secret");
    root.create(&tier("t"), json!(1)).await.unwrap();
    root.create(&pod("p"), json!(1)).await.unwrap();
    let reader = user("reader", "secret");
    assert_eq!(reader.get(&tier("t")).await.unwrap().unwrap().value, json!(1));
    let refused = [
        reader.create(&tier("u"), json!(1)).await.map(drop),
        reader.list(Kind::Pod).await.map(drop),
        user("root", "wrong").get(&tier("t")).await.map(drop),
        client(&servers).get(&tier("t")).await.map(drop),
    ];
    for result in refused {
        assert!(matches!(result, Err(StoreError::Forbidden(_))), "{result:?}");
    }

    // The first member that a client tries may be down before it has a token.
    let endpoints = [vec!["http://127.0.0.1:1".to_owned()], servers.endpoints()].concat();
    let login = Some(Login { user: "reader".to_owned(), password: "secret".to_owned() });
    let beside_a_dead_one = Etcd::new(EtcdConfig { endpoints, tls: None, login }).unwrap();
    assert_eq!(beside_a_dead_one.get(&tier("t")).await.unwrap().unwrap().value, json!(1));

    // A kind without permission disables nothing else.
    let mut mirror = Mirror::new(&reader, [Kind::Tier, Kind::Pod].map(Interest::all).to_vec());
    mirror
        .until(|mirror| mirror.in_sync.contains(&Kind::Tier) && mirror.unavailable.contains_key(&Kind::Pod))
        .await;
    let created = root.create(&tier("u"), json!(1)).await.unwrap();
    mirror.reach(&at(&created)).await;
    let grant =
        ["--user=root:secret", "role", "grant-permission", "--prefix=true", "reader", "read", "/tortie/"];
    servers.etcdctl(&grant).unwrap();
    mirror.until(|mirror| mirror.in_sync.contains(&Kind::Pod)).await;
    assert_eq!(mirror.objects[&pod("p")], json!(1));

    // A token that etcd has forgotten is replaced.
    let [member] = servers.members() else { panic!("one member is expected") };
    member.kill().unwrap();
    member.restart().unwrap();
    eventually("get", async || reader.get(&tier("t")).await).await;
}

/// A machine that is off does not answer. Nothing was sent to it, so a write goes to the next member at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_goes_on_from_a_member_that_does_not_answer() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start_three_with_tls().unwrap();
    let silent = TcpSocket::new_v4().unwrap();
    silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let silent = silent.listen(1).unwrap();
    let address = silent.local_addr().unwrap();
    // The kernel drops further attempts.
    let mut waiting = Vec::new();
    while let Ok(connected) = timeout(Duration::from_secs(1), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
    }
    let authority = servers.authority().unwrap();
    let tls = Some(identity(authority, &authority.client("root", &[]).unwrap()).into());
    let endpoints = [vec![format!("https://{address}")], servers.endpoints()].concat();
    let store = Etcd::new(EtcdConfig { endpoints, tls, login: None }).unwrap();
    store.create(&tier("t"), json!({"metadata": {"name": "t"}})).await.unwrap();
}

/// Certificates are renewed while a client runs.
#[tokio::test(flavor = "multi_thread")]
async fn renewed_certificates_are_used() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start_three_with_tls().unwrap();
    let authority = servers.authority().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let files = TlsFiles { authority: file("authority"), certificate: file("certificate"), key: file("key") };
    let write = |of: &Identity| {
        let TlsIdentity { authority, certificate, key } = identity(authority, of);
        for (path, text) in
            [(&files.authority, authority), (&files.certificate, certificate), (&files.key, key)]
        {
            fs::write(path, text).unwrap();
        }
    };
    write(&authority.expired_client("root", &[]).unwrap());
    let tls = Some(files.clone().into());
    let store = Etcd::new(EtcdConfig { endpoints: servers.endpoints(), tls, login: None }).unwrap();
    let refused = store.get(&tier("t")).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    write(&authority.client("root", &[]).unwrap());
    eventually("the next connection", async || store.get(&tier("t")).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_member_and_the_cause() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start_three_with_tls().unwrap();
    let authority = servers.authority().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let foreign = Authority::new(folder.path()).unwrap();
    let good = identity(authority, &authority.client("root", &[]).unwrap());
    let table = [
        (
            "an unknown authority",
            TlsIdentity {
                authority: identity(&foreign, &foreign.client("root", &[]).unwrap()).authority,
                ..good.clone()
            },
            "certificate",
        ),
        (
            "a certificate of another authority",
            {
                let TlsIdentity { certificate, key, .. } =
                    identity(&foreign, &foreign.client("root", &[]).unwrap());
                TlsIdentity { certificate, key, ..good.clone() }
            },
            "certificate",
        ),
        (
            "an expired certificate",
            identity(authority, &authority.expired_client("root", &[]).unwrap()),
            "certificate",
        ),
    ];
    for (name, tls, expected) in table {
        let tls = Some(tls.into());
        let store = Etcd::new(EtcdConfig { endpoints: servers.endpoints(), tls, login: None }).unwrap();
        let Err(StoreError::Unavailable(error)) = store.get(&tier("t")).await else { panic!("{name}") };
        assert!(error.contains("https://127.0.0.1:"), "{name}: {error}");
        assert!(error.to_lowercase().contains(expected), "{name}: {error}");
    }
    let nobody = EtcdConfig { endpoints: vec!["http://127.0.0.1:1".to_owned()], ..EtcdConfig::default() };
    let Err(StoreError::Unavailable(error)) = Etcd::new(nobody).unwrap().get(&tier("t")).await else {
        panic!()
    };
    assert!(error.contains("http://127.0.0.1:1") && error.contains("refused"), "{error}");
    let plain = EtcdConfig { endpoints: servers.endpoints(), ..EtcdConfig::default() };
    let error = Etcd::new(plain).err().unwrap().to_string();
    assert!(error.contains("https needs the authority"), "{error}");
    assert!(Etcd::new(EtcdConfig::default()).is_err());
}

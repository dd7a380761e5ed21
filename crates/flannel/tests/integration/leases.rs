//! Leases in a real etcd: agents that want subnets at once, others who write there, and failures.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tortie_api::net::MacAddress;
use tortie_flannel::{
    Attributes, FlannelError, FlannelEtcd, LeaseSnapshot, Previous, Ranges, SubnetManager, Subnets, Tunnel,
};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{Etcd as Servers, Proxy};
use tortie_store::etcd::{Condition, EntryChange, Etcd, EtcdConfig, Login};

const NEEDED: [Program; 2] = [Program::Etcd, Program::Etcdctl];
const PREFIX: &str = "/coreos.com/network";

fn client(endpoint: String) -> Etcd {
    Etcd::new(EtcdConfig { endpoints: vec![endpoint], tls: None, login: None }).unwrap()
}

fn flannel(servers: &Servers) -> FlannelEtcd {
    FlannelEtcd::new(client(servers.endpoints().remove(0)), "coreos.com/network/")
}

fn put(servers: &Servers, key: &str, value: &str) {
    servers.etcdctl(&["put", &format!("{PREFIX}/{key}"), value]).unwrap();
}

fn delete(servers: &Servers, key: &str) {
    servers.etcdctl(&["del", &format!("{PREFIX}/{key}")]).unwrap();
}

/// A configuration with three subnets, 10.5.1.0/24 to 10.5.3.0/24, unless fields differ.
fn configure(servers: &Servers, fields: Value) {
    let mut conf = json!({"Network": "10.5.0.0/16", "SubnetMax": "10.5.3.0", "Backend": {"Type": "host-gw"}});
    conf.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    put(servers, "config", &conf.to_string());
}

fn host_gw(number: u8) -> Attributes {
    Attributes { public_ip: Ipv4Addr::new(192, 0, 2, number), public_ipv6: None, tunnel: Tunnel::HostGw }
}

/// What etcd has of a subnet: the address of its node, and whether it ends.
async fn stored(flannel: &Etcd, name: &str) -> Option<(String, bool)> {
    let entry = flannel.entry(&format!("{PREFIX}/subnets/{name}")).await.unwrap()?;
    let value: Value = serde_json::from_str(&entry.value).unwrap_or_default();
    Some((value["PublicIP"].as_str().unwrap_or_default().to_owned(), entry.has_lease))
}

/// A manager that keeps its subnets.
struct Kept {
    subnets: Subnets,
    attributes: watch::Sender<Attributes>,
    snapshot: watch::Receiver<Arc<LeaseSnapshot>>,
    running: JoinHandle<()>,
}

impl Kept {
    fn new(manager: SubnetManager, attributes: Attributes) -> Self {
        let subnets = manager.subnets();
        let (attributes, wanted) = watch::channel(attributes);
        let (publish, snapshot) = watch::channel(Arc::new(manager.snapshot()));
        Self { subnets, attributes, snapshot, running: tokio::spawn(manager.run(wanted, publish)) }
    }

    fn name(&self) -> String {
        self.subnets.key_name()
    }

    fn key(&self) -> String {
        format!("subnets/{}", self.name())
    }

    async fn until(
        &mut self,
        what: &str,
        is_so: impl FnMut(&Arc<LeaseSnapshot>) -> bool,
    ) -> Arc<LeaseSnapshot> {
        let waiting = self.snapshot.wait_for(is_so);
        let found = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        found.unwrap_or_else(|_| panic!("{what}")).unwrap().clone()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.running.abort();
    }
}

async fn keep(flannel: &FlannelEtcd, attributes: Attributes, previous: Option<&str>) -> Kept {
    let (_, ranges) = flannel.config().await.unwrap();
    let previous = previous.map(|name| Previous {
        subnets: Subnets::of_key_name(name).unwrap(),
        has_pods: true,
        address: None,
    });
    Kept::new(flannel.acquire(&ranges, attributes, previous).await.unwrap(), attributes)
}

/// With a user of etcd that may read and write.
fn with_user(servers: &Servers) -> FlannelEtcd {
    let run = |command: &str| servers.etcdctl(&command.split(' ').collect::<Vec<_>>()).unwrap();
    let grant = format!("role grant-permission --prefix=true agent readwrite {PREFIX}/");
    for command in
        ["user add root:secret", "user grant-role root root", "role add agent", "user add agent:secret"]
    {
        run(command);
    }
    for command in ["user grant-role agent agent", &grant, "auth enable"] {
        run(command);
    }
    let login = Some(Login { user: "agent".to_owned(), password: "secret".to_owned() });
    let etcd = Etcd::new(EtcdConfig { endpoints: servers.endpoints(), tls: None, login }).unwrap();
    FlannelEtcd::new(etcd, PREFIX)
}

/// Lets the user only read, or write, too.
fn permit(servers: &Servers, permission: &str) {
    let command =
        format!("--user=root:secret role grant-permission --prefix=true agent {permission} {PREFIX}/");
    servers.etcdctl(&command.split(' ').collect::<Vec<_>>()).unwrap();
}

/// Polls until it is so.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while !is_so().await {
        assert!(tokio::time::Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_is_missing_or_does_not_fit_is_named() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    let flannel = flannel(&servers);
    let missing = flannel.config().await.unwrap_err().to_string();
    assert!(missing.contains("no key /coreos.com/network/config"), "{missing}");
    configure(&servers, json!({"Backend": {"Type": "udp"}}));
    let unfit = flannel.config().await.unwrap_err().to_string();
    assert!(unfit.contains("key /coreos.com/network/config") && unfit.contains("backend is udp"), "{unfit}");
    configure(&servers, json!({}));
    assert!(flannel.config().await.is_ok());
}

/// More nodes than subnets, of one and of both families. Some are as flanneld: it asks only whether its key exists.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_start_at_once_share_no_subnet() {
    if !can_run(&NEEDED) {
        return;
    }
    for is_dual in [false, true] {
        let servers = Servers::start().unwrap();
        let fields = json!({"SubnetMax": "10.5.8.0", "EnableIPv6": is_dual, "IPv6Network": "fd00::/48"});
        configure(&servers, fields);
        let flannel = flannel(&servers);
        let (_, ranges) = flannel.config().await.unwrap();
        let tenants = (1..=12).map(|number| {
            let (flannel, ranges) = (flannel.clone(), ranges);
            let public_ipv6 = is_dual.then(|| format!("2001:db8::{number}").parse().unwrap());
            let attributes = Attributes { public_ipv6, ..host_gw(number) };
            tokio::spawn(async move { acquired(&flannel, &ranges, attributes).await })
        });
        let etcd = client(servers.endpoints().remove(0));
        let flanneld = (if is_dual { 0..0 } else { 100..104 }).map(|number: u8| {
            let (etcd, name) = (etcd.clone(), format!("10.5.{}.0-24", number - 98));
            tokio::spawn(async move {
                let key = format!("{PREFIX}/subnets/{name}");
                let only_key = Condition::Absent { prefix: "/none/", since: 0 };
                let written = etcd.put_if(&key, &host_gw(number).value(), None, only_key).await.unwrap();
                written.map(|_| Subnets::of_key_name(&name).unwrap())
            })
        });
        let all: Vec<JoinHandle<Option<Subnets>>> = tenants.chain(flanneld).collect();
        let mut found = Vec::new();
        for one in all {
            found.extend(one.await.unwrap());
        }
        assert_eq!(found.len(), 8, "every subnet has a node: {found:?}");
        for (index, one) in found.iter().enumerate() {
            assert!(found[index + 1..].iter().all(|other| !one.overlap(other)), "{found:?}");
        }
        let listed = etcd.entries(&format!("{PREFIX}/subnets/")).await.unwrap().entries;
        let nodes: BTreeSet<String> = listed.iter().map(|entry| entry.value.clone()).collect();
        assert_eq!((listed.len(), nodes.len()), (8, 8), "every subnet has another node");
    }
}

/// `None`: no subnet is free.
async fn acquired(flannel: &FlannelEtcd, ranges: &Ranges, attributes: Attributes) -> Option<Subnets> {
    match flannel.acquire(ranges, attributes, None).await {
        Ok(manager) => Some(manager.subnets()),
        Err(FlannelError::Full { problem, .. }) => {
            assert!(problem.contains("is free; remove the keys"), "{problem}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_the_same_subnet_again() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let (flannel, etcd) = (flannel(&servers), client(servers.endpoints().remove(0)));
    let first = keep(&flannel, host_gw(1), Some("10.5.1.0-24")).await;
    let name = first.name();
    drop(first);
    assert_eq!(keep(&flannel, host_gw(1), None).await.name(), name, "by its address");
    delete(&servers, &format!("subnets/{name}"));
    assert_eq!(keep(&flannel, host_gw(7), Some(&name)).await.name(), name, "by what it remembers");
    // An administrator has reserved a subnet, for ever.
    put(&servers, "subnets/10.5.3.0-24", r#"{"PublicIP": "192.0.2.9"}"#);
    let mut reserved = keep(&flannel, host_gw(9), None).await;
    assert_eq!(reserved.name(), "10.5.3.0-24");
    assert_eq!(stored(&etcd, "10.5.3.0-24").await, Some(("192.0.2.9".to_owned(), false)), "it does not end");
    assert_eq!(stored(&etcd, &name).await, Some(("192.0.2.7".to_owned(), true)));
    let snapshot = reserved.until("the other node", |now| now.others.len() == 1).await;
    assert_eq!(snapshot.own, host_gw(9).leases(&reserved.subnets));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subnet_is_written_again_unless_somebody_else_has_it() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let (flannel, etcd) = (flannel(&servers), client(servers.endpoints().remove(0)));
    let mut kept = keep(&flannel, host_gw(1), Some("10.5.2.0-24")).await;
    let own = async || stored(&etcd, "10.5.2.0-24").await.map(|(address, _)| address);
    // Somebody deletes it, or damages it with the address of the node.
    delete(&servers, &kept.key());
    until("the key is there again", async || own().await.as_deref() == Some("192.0.2.1")).await;
    put(&servers, &kept.key(), r#"{"PublicIP": "192.0.2.1", "BackendType": "udp"}"#);
    let is_host_gw = async || {
        let entry = etcd.entry(&format!("{PREFIX}/{}", kept.key())).await.unwrap();
        entry.is_some_and(|entry| entry.value == host_gw(1).value())
    };
    until("the key is as the node writes it", is_host_gw).await;
    // Somebody else takes it.
    for (key, value, expected) in [
        (kept.key(), host_gw(8).value(), "192.0.2.8 has it"),
        (kept.key(), "{".to_owned(), "its value cannot be read"),
    ] {
        put(&servers, &key, &value);
        let snapshot = kept.until(expected, |now| now.lost.is_some()).await;
        let lost = snapshot.lost.clone().unwrap();
        assert!(
            lost.contains(expected) && lost.contains("/coreos.com/network/subnets/10.5.2.0-24"),
            "{lost}"
        );
        assert_eq!(snapshot.own, host_gw(1).leases(&kept.subnets), "its pods are still there");
        let stored = etcd.entry(&format!("{PREFIX}/{key}")).await.unwrap().unwrap();
        assert_eq!(stored.value, value, "it is not taken away");
        // When the other one has gone, the node has it again.
        delete(&servers, &key);
        kept.until("the subnet is the node's again", |now| now.lost.is_none()).await;
        until("the key is there again", async || own().await.as_deref() == Some("192.0.2.1")).await;
    }
    // A node that starts while somebody else has the subnet of its pods gets no other one.
    put(&servers, &kept.key(), &host_gw(8).value());
    kept.until("the other one", |now| now.lost.is_some()).await;
    drop(kept);
    let mut kept = keep(&flannel, host_gw(1), Some("10.5.2.0-24")).await;
    assert!(kept.snapshot.borrow().lost.as_ref().is_some_and(|lost| lost.contains("192.0.2.8 has it")));
    delete(&servers, &kept.key());
    kept.until("the subnet is the node's again", |now| now.lost.is_none()).await;
    // The node has another address.
    kept.attributes.send(host_gw(5)).unwrap();
    until("the new address", async || own().await.as_deref() == Some("192.0.2.5")).await;
    let own = host_gw(5).leases(&kept.subnets);
    kept.until("its own lease", |now| now.own == own && now.lost.is_none()).await;
}

/// A key that overlaps takes nothing from the pods that are there: the node goes on with its own key.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_renewed_while_another_one_overlaps_it() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({"EnableIPv6": true, "IPv6Network": "fd00::/48"}));
    let (own, other) = ("10.5.2.0-24&fd00:0:0:1::-64", "10.5.2.0-24&fd00:0:0:2::-64");
    let of = |number| Attributes { public_ipv6: Some("2001:db8::1".parse().unwrap()), ..host_gw(number) };
    let lasts = Duration::from_secs(3);
    let mut kept = keep(&flannel(&servers).with_leases_of(lasts), of(1), Some(own)).await;
    put(&servers, &format!("subnets/{other}"), &of(8).value());
    let overlaps = format!("{other} (192.0.2.8) overlaps it");
    kept.until("the other one", |now| now.lost.as_ref().is_some_and(|lost| lost.contains(&overlaps))).await;
    let etcd = client(servers.endpoints().remove(0));
    let key = format!("{PREFIX}/subnets/{own}");
    let revision = async || etcd.entry(&key).await.unwrap().map_or(0, |entry| entry.revision);
    for _ in 0..3 {
        let before = revision().await;
        assert_ne!(before, 0, "the key is there");
        until("the key is renewed", async || revision().await > before).await;
    }
    delete(&servers, &format!("subnets/{other}"));
    kept.until("the subnet is the node's alone", |now| now.lost.is_none()).await;
    put(&servers, "subnets/10.5.0.0-16", "{");
    let unfit = kept.until("a key that does not fit", |now| !now.problems.is_empty()).await;
    assert!(unfit.lost.is_none(), "{unfit:?}");
}

/// Two machines with one address: one of them has the subnet, and neither writes for ever.
#[tokio::test(flavor = "multi_thread")]
async fn machines_with_one_address_do_not_share_a_subnet() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({"Backend": {"Type": "vxlan"}}));
    let vxlan = |mac| Attributes {
        tunnel: Tunnel::Vxlan { vni: 1, macs: [MacAddress([0x66, 0, 0, 0, 0, mac]); 2] },
        ..host_gw(1)
    };
    let mut one = keep(&flannel(&servers), vxlan(1), None).await;
    let mut other = keep(&flannel(&servers), vxlan(2), None).await;
    assert_eq!(one.subnets, other.subnets);
    let writes = "somebody else writes it, too, with the node's address 192.0.2.1";
    one.until("the other one", |now| now.lost.as_ref().is_some_and(|lost| lost.contains(writes))).await;
    let etcd = client(servers.endpoints().remove(0));
    let revision = async || etcd.entries("/").await.unwrap().revision;
    let before = revision().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(revision().await, before, "nobody writes any more");
    assert!(other.snapshot.borrow_and_update().lost.is_none(), "the other one has it");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_subnets_of_others_come_and_go() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let etcd = client(servers.endpoints().remove(0));
    let proxy = Proxy::start(servers.addresses()[0]).unwrap();
    let cut_off = FlannelEtcd::new(client(format!("http://{}", proxy.address())), PREFIX);
    let mut kept = keep(&cut_off, host_gw(1), Some("10.5.1.0-24")).await;
    let short = flannel(&servers).with_leases_of(Duration::from_secs(2));
    let mut other = keep(&short, host_gw(2), Some("10.5.2.0-24")).await;
    let key = |name: &str| format!("{PREFIX}/subnets/{name}");
    let keys = |names: &[&str]| names.iter().map(|name| key(name)).collect::<BTreeSet<_>>();
    let has = |now: &Arc<LeaseSnapshot>, names: &[&str]| {
        now.others.keys().cloned().collect::<BTreeSet<_>>() == keys(names)
    };
    let found = kept.until("the other", |now| has(now, &["10.5.2.0-24"])).await;
    assert_eq!(found.others[&key("10.5.2.0-24")], host_gw(2).leases(&other.subnets));
    // A value that cannot be read leaves the former one in force; so does an etcd out of reach, which then has forgotten its history.
    put(&servers, "subnets/10.5.3.0-24", &host_gw(3).value());
    put(&servers, "subnets/nothing", "{}");
    kept.until("one more", |now| has(now, &["10.5.2.0-24", "10.5.3.0-24"]) && now.problems.len() == 1).await;
    put(&servers, "subnets/10.5.3.0-24", r#"{"PublicIP": "x"}"#);
    let damaged = kept.until("a problem", |now| now.problems.len() == 2).await;
    let problem = &damaged.problems[&key("10.5.3.0-24")];
    assert!(has(&damaged, &["10.5.2.0-24", "10.5.3.0-24"]) && problem.contains("PublicIP is x"), "{problem}");
    proxy.refuse(true);
    proxy.cut();
    let unreachable = kept.until("etcd is out of reach", |now| now.unreachable.is_some()).await;
    assert!(has(&unreachable, &["10.5.2.0-24", "10.5.3.0-24"]) && unreachable.lost.is_none());
    for key in ["subnets/10.5.3.0-24", "subnets/nothing"] {
        delete(&servers, key);
    }
    put(&servers, "subnets/10.5.7.0-24", &host_gw(7).value());
    let revision = etcd.entries("/").await.unwrap().revision;
    servers.etcdctl(&["compact", &revision.to_string()]).unwrap();
    proxy.refuse(false);
    let after = kept.until("etcd is there again", |now| now.unreachable.is_none()).await;
    assert!(has(&after, &["10.5.2.0-24", "10.5.7.0-24"]) && after.problems.is_empty(), "{after:?}");
    // The other one has renewed its lease all the time. When it no longer does, the lease ends.
    assert!(other.snapshot.borrow_and_update().lost.is_none());
    drop(other);
    kept.until("the end of the lease", |now| has(now, &["10.5.7.0-24"])).await;
}

/// flanneld does not follow changes of its configuration either, so networks and backends of nodes would differ.
#[tokio::test(flavor = "multi_thread")]
async fn a_changed_configuration_is_reported_until_it_is_back() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let flannel = flannel(&servers).with_config_interval(Duration::from_millis(100));
    let (conf, ranges) = flannel.config().await.unwrap();
    let manager = flannel.acquire(&ranges, host_gw(1), None).await.unwrap();
    let mut kept = Kept::new(manager.with_config(conf), host_gw(1));
    kept.until("the lease", |now| now.config.is_none()).await;
    for (changed, says) in [
        (
            json!({"SubnetLen": 25, "Backend": {"Type": "vxlan"}}),
            "(key /coreos.com/network/config) has changed; the node follows",
        ),
        (json!({"Backend": {"Type": "udp"}}), "the backend is udp"),
    ] {
        configure(&servers, changed);
        kept.until(says, |now| now.config.as_ref().is_some_and(|config| config.contains(says))).await;
    }
    delete(&servers, "config");
    kept.until("no configuration", |now| now.config.as_ref().is_some_and(|it| it.contains("has no key")))
        .await;
    configure(&servers, json!({}));
    kept.until("the former configuration", |now| now.config.is_none()).await;
}

/// A node that cannot renew its lease cannot know whether it still has the subnet.
#[tokio::test(flavor = "multi_thread")]
async fn a_subnet_is_lost_when_its_lease_may_have_ended() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let proxy = Proxy::start(servers.addresses()[0]).unwrap();
    let flannel = FlannelEtcd::new(client(format!("http://{}", proxy.address())), PREFIX);
    let mut kept =
        keep(&flannel.with_leases_of(Duration::from_secs(3)), host_gw(1), Some("10.5.1.0-24")).await;
    proxy.refuse(true);
    proxy.cut();
    let lost = kept.until("the lease may have ended", |now| now.lost.is_some()).await;
    assert!(lost.lost.as_ref().unwrap().contains("could not be renewed"), "{lost:?}");
    let etcd = client(servers.endpoints().remove(0));
    until("the lease has ended", async || stored(&etcd, "10.5.1.0-24").await.is_none()).await;
    proxy.refuse(false);
    kept.until("the node has it again", |now| now.lost.is_none() && now.unreachable.is_none()).await;
    assert_eq!(stored(&etcd, "10.5.1.0-24").await, Some(("192.0.2.1".to_owned(), true)));
}

/// It would be written again when it has ended, but other nodes would have lost their routes by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_renewed_before_it_ends() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let etcd = client(servers.endpoints().remove(0));
    let mut changes = etcd.entry_changes(&format!("{PREFIX}/subnets/"), 0).await.unwrap();
    let kept = keep(&flannel(&servers).with_leases_of(Duration::from_secs(3)), host_gw(1), None).await;
    let mut writes = 0;
    while writes < 6 {
        let next = tokio::time::timeout(Duration::from_secs(60), changes.next()).await;
        for change in next.expect("the lease is renewed").unwrap().unwrap() {
            let EntryChange::Put(entry) = change else { panic!("{change:?}") };
            assert!(entry.has_lease && entry.key.ends_with(&kept.name()), "{entry:?}");
            writes += 1;
        }
    }
}

/// Whoever can read may not be able to write: the condition stays until a write succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_cannot_be_renewed_is_a_condition_that_stays() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let flannel = with_user(&servers).with_leases_of(Duration::from_secs(6));
    let mut kept = keep(&flannel, host_gw(1), Some("10.5.1.0-24")).await;
    permit(&servers, "read");
    let refused = kept.until("a renewal is refused", |now| now.unreachable.is_some()).await;
    let flips = kept.until("more renewals", |now| now.unreachable != refused.unreachable);
    assert!(tokio::time::timeout(Duration::from_secs(5), flips).await.is_err(), "the condition stays");
    permit(&servers, "readwrite");
    kept.until("the lease is renewed", |now| now.unreachable.is_none() && now.lost.is_none()).await;
}

/// Each attempt would leave one for a day, and agents try again every few seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_is_refused_leaves_no_lease() {
    if !can_run(&NEEDED) {
        return;
    }
    let servers = Servers::start().unwrap();
    configure(&servers, json!({}));
    let mut kept = keep(&with_user(&servers), host_gw(1), Some("10.5.1.0-24")).await;
    permit(&servers, "read");
    kept.attributes.send(host_gw(5)).unwrap();
    kept.until("a write is refused", |now| now.unreachable.is_some()).await;
    // Some more attempts.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let leases = || servers.etcdctl(&["--user=root:secret", "lease", "list"]).unwrap();
    until("only the key has a lease", async || leases().contains("found 1 leases")).await;
    assert_eq!(kept.snapshot.borrow().address, Some(host_gw(1).public_ip), "the key has the former address");
    permit(&servers, "readwrite");
    kept.until("the new address", |now| now.address == Some(host_gw(5).public_ip)).await;
}

//! What an agent logs, and how often. The global logger belongs to the whole process, so these tests have one of their own.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use common::{Bed, NODE, cluster, condition, endpoint_key, put, until};
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Reason, Report};
use tortie_kernel::namespace::NetNs;
use tortie_store::{Store, Write};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

/// The debug log of all tests.
fn log() -> &'static Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    LOG.get_or_init(|| {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
        subscriber.with_writer(move || writer.clone()).init();
        log
    })
}

/// A condition that lasts for weeks must not hide new ones in the log.
#[tokio::test(flavor = "multi_thread")]
async fn a_lasting_condition_is_logged_once() {
    let log = log();
    let bed = Bed::new().await;
    bed.os.lock().report = Report { node: vec![condition(Reason::RouteTaken)], ..Report::default() };
    let count = |what: &str| log.text().matches(what).count();
    for number in 0..10 {
        let given = bed.os.lock().batches.len();
        let name = format!("ns{number}");
        let key = Key::global(Kind::Namespace, &name);
        bed.store.create(&key, json!({"metadata": {"name": name}})).await.unwrap();
        until("it is made true", || async { bed.os.lock().batches.len() > given }).await;
    }
    until("it is logged", || async { count("the test says RouteTaken") > 0 }).await;
    assert_eq!(count("the test says RouteTaken"), 1);

    bed.os.lock().report = Report::default();
    let key = Key::global(Kind::Namespace, "last");
    bed.store.create(&key, json!({"metadata": {"name": "last"}})).await.unwrap();
    until("the end is logged", || async { count("resolved: the test says RouteTaken") == 1 }).await;
}

/// The change of a policy, from the store's event to the kernel's transaction: each line has the position.
#[test]
fn a_change_can_be_followed_to_the_kernel() {
    let log = log();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    NetNs::create().unwrap().run(|| runtime().block_on(follow_a_change(log))).unwrap();
}

async fn follow_a_change(log: &Log) {
    let store = cluster().await;
    // The stores of the other tests do not get this far, so that a position is in this test's lines only.
    let names = (0..1_000).map(|number| format!("ns{number}"));
    let namespaces = names
        .map(|name| Write::Create(Key::global(Kind::Namespace, &name), json!({"metadata": {"name": name}})));
    store.write_all(namespaces.collect()).await.unwrap();
    let endpoint = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": endpoint_key("p", "eth0").name, "namespace": "n", "labels": {"app": "a"}},
        "spec": {
            "orchestrator": "k8s", "node": NODE, "containerID": "c", "pod": "p", "endpoint": "eth0",
            "ipNetworks": ["10.0.0.9/32"], "profiles": ["kns.n"], "interfaceName": "cali1",
        },
    });
    store.create(&endpoint_key("p", "eth0"), endpoint).await.unwrap();
    let key = Key::global(Kind::GlobalNetworkPolicy, "deny");
    let policy = |action: &str| {
        let spec = json!({"selector": "app == 'a'", "types": ["Ingress"], "ingress": [{"action": action}]});
        json!({"metadata": {"name": "deny"}, "spec": spec})
    };
    let first = put(&*store, &key, policy("Allow")).await.position;
    let bed = Bed::on_linux(store);
    until("the first state is given", || async { bed.reported(key.kind, first).await >= Some(first) }).await;

    let position = put(&*bed.store, &key, policy("Deny")).await.position;
    let markers = [format!(" position={position} "), format!("positions=globalnetworkpolicies={position}}}")];
    let has_marker = |line: &&str| markers.iter().any(|marker| line.contains(marker));
    let lines = || log.text().lines().filter(has_marker).map(str::to_owned).collect::<Vec<_>>();
    let steps: [&[&str]; 4] = [
        &["an object has changed in the store", "object=GlobalNetworkPolicy deny"],
        &["change{objects=1", "the dataplane applies", "deltas=1"],
        &["change{objects=1", "an nftables transaction is in force", "table=\"tortie\"", "messages="],
        &["change{objects=1", "the dataplane has finished", "in_force=true", "failures="],
    ];
    until("the change is in force", || async { lines().iter().any(|line| line.contains(steps[3][1])) }).await;
    let lines = lines();
    let mut rest = lines.iter();
    for step in steps {
        let found = rest.any(|line| step.iter().all(|part| line.contains(part)));
        assert!(found, "{step:?} in this order in {lines:#?}");
    }
}

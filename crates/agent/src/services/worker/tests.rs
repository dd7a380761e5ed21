//! The thread of Services with a dataplane in memory.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tortie_dataplane::ServiceDataplaneError;
use tortie_services::{KINDS, NodePortAddresses, NodeServices, ServicesDelta};
use tortie_store::Embedded;

use super::*;
use crate::queue::{Batches, queue};

/// What a dataplane has got, and what it answers.
#[derive(Default)]
struct Made {
    services: NodeServices,
    pods: BTreeSet<IpNet>,
    calls: Vec<&'static str>,
    refusal: Option<&'static str>,
    /// The calls of `clean_up`, and their refusal.
    cleaned: usize,
    untidy: Option<&'static str>,
    on_change: Option<Box<dyn Fn() + Send>>,
}

struct Recorded(Arc<Mutex<Made>>);

impl Recorded {
    fn called(&self, call: &'static str) -> Result<(), ServiceDataplaneError> {
        let mut made = self.0.lock().unwrap();
        made.calls.push(call);
        made.refusal.map_or(Ok(()), |refusal| Err(ServiceDataplaneError::new(refusal)))
    }
}

impl ServiceDataplane for Recorded {
    fn apply(
        &mut self,
        deltas: &[ServicesDelta],
        pods: &BTreeSet<IpNet>,
    ) -> Result<(), ServiceDataplaneError> {
        let mut made = self.0.lock().unwrap();
        deltas.iter().for_each(|delta| made.services.apply(delta));
        made.pods.clone_from(pods);
        drop(made);
        self.called("apply")
    }

    fn resync(&mut self) -> Result<(), ServiceDataplaneError> {
        self.called("resync")
    }

    fn clean_up(&mut self) -> Result<(), ServiceDataplaneError> {
        let mut made = self.0.lock().unwrap();
        made.cleaned += 1;
        made.untidy.map_or(Ok(()), |refusal| Err(ServiceDataplaneError::new(refusal)))
    }

    fn watch(&mut self, on_change: Box<dyn Fn() + Send>) -> Result<(), ServiceDataplaneError> {
        self.0.lock().unwrap().on_change = Some(on_change);
        Ok(())
    }
}

/// A worker without its thread. The test calls it.
struct Setting {
    worker: Worker,
    made: Arc<Mutex<Made>>,
    other: Arc<Mutex<Result<Option<OtherProxy>, String>>>,
    conditions: watch::Receiver<Vec<Condition>>,
}

impl Setting {
    fn new(api_server: Option<&str>) -> Self {
        let made: Arc<Mutex<Made>> = Arc::default();
        let other = Arc::new(Mutex::new(Ok(None)));
        let found = other.clone();
        let system = ServiceSystem {
            dataplane: Box::new(Recorded(made.clone())),
            find_other: Box::new(move |_| found.lock().unwrap().clone()),
            was_serving: false,
        };
        let proxy = ServiceProxy {
            store: Arc::new(Embedded::in_memory().unwrap()),
            node_ports: NodePortAddresses::Primary,
            api_server: api_server.map(|address| address.parse().unwrap()),
        };
        let (sender, conditions) = watch::channel(Vec::new());
        let worker = Worker::new(
            "n",
            &proxy,
            system,
            PodNetworks::default(),
            sender,
            watch::channel(ServiceHealth::default()).0,
        );
        Self { worker, made, other, conditions }
    }

    fn calls(&mut self) -> Vec<&'static str> {
        self.worker.work();
        std::mem::take(&mut self.made.lock().unwrap().calls)
    }

    /// The same after the next look at other programs, and the next comparison.
    fn later_calls(&mut self) -> Vec<&'static str> {
        self.worker.look_at = Instant::now();
        if self.worker.given.is_some() {
            self.worker.resync_at = Instant::now();
        }
        self.calls()
    }

    fn messages(&self) -> String {
        self.conditions.borrow().iter().map(|it| format!("{}: {it}\n", it.reason)).collect()
    }

    /// The cluster and the pods are known.
    fn know_all(&mut self) {
        self.worker.ingest(listed(&KINDS));
        self.worker.pods.set(&networks());
    }
}

fn networks() -> BTreeSet<IpNet> {
    ["10.244.0.0/26".parse().unwrap()].into()
}

fn listed(kinds: &[Kind]) -> Batch {
    Batch { unavailable: kinds.iter().map(|kind| (*kind, None)).collect(), ..Batch::default() }
}

fn service(address: &str) -> (Key, Option<Value>) {
    let value = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "ns"},
        "spec": {"clusterIP": address, "clusterIPs": [address], "ports": [{"port": 443}]},
    });
    (Key::namespaced(Kind::Service, "ns", "s"), Some(value))
}

#[test]
fn nothing_is_served_before_the_cluster_and_the_pods_are_known() {
    let mut setting = Setting::new(None);
    setting.worker.ingest(Batch { changes: [service("10.96.0.1")].into(), ..Batch::default() });
    for kind in KINDS {
        assert!(setting.calls().is_empty(), "{kind:?}");
        setting.worker.ingest(listed(&[kind]));
    }
    assert!(setting.calls().is_empty(), "the pods are not known");
    setting.worker.pods.set(&networks());
    assert_eq!(setting.calls(), ["apply"]);
    assert!(setting.calls().is_empty(), "nothing has changed");
    let made = setting.made.lock().unwrap();
    assert_eq!((made.services.frontends.len(), &made.pods), (1, &networks()));
    drop(made);
    setting.worker.pods.set(&BTreeSet::new());
    assert_eq!(setting.calls(), ["apply"], "pods have changed");
}

/// An API server may lack ServiceCIDRs. A kind that is forbidden stops everything, because half of the objects would mean something else.
#[test]
fn a_kind_that_cannot_be_read_is_reported() {
    for (kind, error, serves) in [
        (Kind::ServiceCidr, StoreError::KindAbsent(Kind::ServiceCidr), true),
        (Kind::ServiceCidr, StoreError::Forbidden("cidrs".to_owned()), false),
        (Kind::EndpointSlice, StoreError::Forbidden("slices".to_owned()), false),
    ] {
        let mut setting = Setting::new(None);
        let others: Vec<Kind> = KINDS.into_iter().filter(|other| *other != kind).collect();
        setting.worker.ingest(listed(&others));
        setting.worker.pods.set(&networks());
        setting.worker.ingest(Batch { unavailable: [(kind, Some(error))].into(), ..Batch::default() });
        assert_eq!(setting.calls() == ["apply"], serves, "{kind:?}");
        assert_eq!(setting.messages().contains("KindForbidden: "), !serves, "{}", setting.messages());
        setting.worker.ingest(listed(&[kind]));
        assert_eq!(setting.calls() == ["apply"], !serves, "{kind:?}");
        assert_eq!(setting.messages(), "");
    }
}

#[test]
fn services_are_left_to_kube_proxy_until_it_has_gone() {
    let mut setting = Setting::new(None);
    setting.know_all();
    for (found, message) in [
        (
            Ok(Some(OtherProxy::Runs("kube-proxy in mode iptables".to_owned()))),
            "kube-proxy in mode iptables serves",
        ),
        (Ok(Some(OtherProxy::HasLeft("table t".to_owned()))), "kube-proxy has left table t on this node"),
        (Err("EPERM".to_owned()), "cannot see whether kube-proxy has left rules on this node: EPERM"),
    ] {
        *setting.other.lock().unwrap() = found;
        assert!(setting.later_calls().is_empty());
        let messages = setting.messages();
        assert!(messages.starts_with("ServicesNotServed: ") && messages.contains(message), "{messages}");
    }
    *setting.other.lock().unwrap() = Ok(None);
    assert!(setting.calls().is_empty(), "nobody has looked again");
    assert_eq!(setting.later_calls(), ["apply"]);
    assert_eq!(setting.messages(), "");

    // One that comes back changes nothing of what Tortie serves, and is reported.
    *setting.other.lock().unwrap() = Ok(Some(OtherProxy::Runs("kube-proxy in mode iptables".to_owned())));
    assert_eq!(setting.later_calls(), ["resync"]);
    assert!(setting.messages().contains("runs beside Tortie"), "{}", setting.messages());
    setting.worker.ingest(Batch { changes: [service("10.96.0.1")].into(), ..Batch::default() });
    assert_eq!(setting.calls(), ["apply"]);
}

/// An agent that starts again beside kube-proxy goes on: its table would stay as it was.
#[test]
fn an_agent_that_served_before_goes_on() {
    let mut setting = Setting::new(Some("10.96.0.1"));
    setting.worker.was_serving = true;
    setting.worker.ingest(Batch { changes: [service("10.96.0.1")].into(), ..Batch::default() });
    *setting.other.lock().unwrap() = Ok(Some(OtherProxy::Runs("kube-proxy in mode iptables".to_owned())));
    setting.know_all();
    assert_eq!(setting.calls(), ["apply"]);
    assert!(setting.messages().contains("runs beside Tortie"), "{}", setting.messages());
}

/// After a restart of the node, nobody would serve that Service before the agent has read it.
#[test]
fn the_api_server_must_not_be_reached_by_a_service() {
    for (address, serves) in [("10.96.0.1", false), ("192.0.2.1", true)] {
        let mut setting = Setting::new(Some(address));
        setting.worker.ingest(Batch { changes: [service("10.96.0.1")].into(), ..Batch::default() });
        assert!(setting.later_calls().is_empty());
        setting.know_all();
        assert_eq!(setting.calls() == ["apply"], serves);
        assert_eq!(setting.messages().contains("--api-server"), !serves, "{}", setting.messages());
        assert_eq!(setting.later_calls() == ["resync"], serves);
    }
}

#[test]
fn what_the_system_refuses_is_reported_and_tried_again() {
    let mut setting = Setting::new(None);
    setting.know_all();
    setting.made.lock().unwrap().refusal = Some("no memory");
    assert_eq!(setting.calls(), ["apply"]);
    assert_eq!(setting.messages(), "ServicesNotServed: no memory\n");
    assert!(setting.worker.resync_at < Instant::now() + MAX_RETRY);
    setting.made.lock().unwrap().refusal = None;
    setting.worker.look_at = Instant::now() + LOOK_INTERVAL;
    setting.worker.resync_at = Instant::now();
    assert_eq!(setting.calls(), ["resync"]);
    assert_eq!(setting.messages(), "");
    assert!(setting.worker.resync_at > Instant::now() + MAX_RETRY);
}

/// A change neither delays a repair nor the next comparison, and nothing is due while nothing is served.
#[test]
fn changes_delay_no_comparison() {
    let mut setting = Setting::new(None);
    setting.worker.resync_at = Instant::now();
    setting.calls();
    assert!(setting.worker.next() > Instant::now(), "nothing is served yet");
    setting.know_all();
    setting.worker.resync_at = Instant::now() + MEND_INTERVAL;
    assert_eq!(setting.calls(), ["apply"]);
    assert!(setting.worker.next() <= Instant::now() + MEND_INTERVAL);
}

/// What a former state has left is no reason for balancers to leave the node.
#[test]
fn a_failed_cleaning_is_reported_and_tried_again() {
    let mut setting = Setting::new(None);
    setting.know_all();
    setting.made.lock().unwrap().untidy = Some("busy");
    assert_eq!(setting.calls(), ["apply"]);
    assert!(setting.messages().contains("may still be led to backends that have gone: busy"));
    assert_eq!(setting.worker.waits_since, None);
    assert!(setting.worker.next() <= Instant::now() + CLEAN_UP_RETRY);
    setting.made.lock().unwrap().untidy = None;
    setting.worker.clean_up_at = Some(Instant::now());
    assert!(setting.calls().is_empty());
    assert_eq!((setting.messages().as_str(), setting.made.lock().unwrap().cleaned), ("", 2));
    assert_eq!(setting.worker.clean_up_at, None);
}

/// Many changes in a row are cleaned up after together.
#[test]
fn a_long_cleaning_delays_the_next_one() {
    let mut setting = Setting::new(None);
    setting.know_all();
    assert_eq!(setting.calls(), ["apply"]);
    setting.worker.rests_until = Instant::now() + Duration::from_secs(60);
    for address in ["10.96.0.1", "10.96.0.2"] {
        setting.worker.ingest(Batch { changes: [service(address)].into(), ..Batch::default() });
        assert_eq!(setting.calls(), ["apply"]);
    }
    assert_eq!(setting.made.lock().unwrap().cleaned, 1);
    assert_eq!(setting.worker.clean_up_at, Some(setting.worker.rests_until));
    let now = Instant::now();
    (setting.worker.rests_until, setting.worker.clean_up_at) = (now, Some(now));
    assert!(setting.calls().is_empty());
    assert_eq!((setting.made.lock().unwrap().cleaned, setting.worker.clean_up_at), (2, None));
}

#[test]
fn very_many_problems_are_counted() {
    let problem = |number: usize| Problem::Field {
        object: Key::namespaced(Kind::Service, "ns", format!("s{number}")),
        field: "spec".to_owned(),
        problem: "is wrong".to_owned(),
    };
    let conditions = reported((0..MAX_PROBLEMS + 5).map(problem).collect());
    assert_eq!(conditions.len(), MAX_PROBLEMS + 1);
    assert!(conditions.last().unwrap().message.starts_with("5 more"));
}

/// The thread itself: changes by others are repaired soon, and it ends with its queue.
#[test]
fn changes_by_others_are_repaired() {
    let setting = Setting::new(None);
    let Setting { worker, made, .. } = setting;
    let (batches, inbox): (Batches, _) = queue();
    worker.pods.set(&networks());
    let thread = std::thread::spawn(move || worker.run(&inbox));
    assert!(batches.send(listed(&KINDS)));
    let wait_for = |call: &str| {
        let deadline = Instant::now() + Duration::from_secs(30);
        while made.lock().unwrap().calls.last().is_none_or(|last| *last != call) {
            assert!(Instant::now() < deadline, "no {call}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait_for("apply");
    made.lock().unwrap().on_change.as_ref().unwrap()();
    wait_for("resync");
    drop(batches);
    thread.join().unwrap();
}

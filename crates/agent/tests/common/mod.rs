//! An agent on an embedded store, with a fake operating system made of a few maps.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tortie_agent::{AgentError, Config, Extras, Platform};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position};
use tortie_cni::transport::{Answer, ask};
use tortie_cni::{Command, Invocation};
use tortie_dataplane::{
    Condition, Dataplane, Delta, EndpointId, InterfaceAddress, MacAddress, NodeState, PodAttachment,
    PodInterface, PodLink, PodWiring, PreparedLink, Reason, Report, ShowError, Shown, WiringError,
};
use tortie_store::{Embedded, Endpoints, Store, Stored};

pub(crate) const NODE: &str = "node-1";
/// How long a test waits for something that must happen.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// The state of the fake operating system, and its answers.
#[derive(Default)]
pub(crate) struct Os {
    /// The prepared links by number; none where it was deleted.
    links: Vec<Option<EndpointId>>,
    /// Those that have an address.
    finished: BTreeSet<u32>,
    /// How many of them were abandoned.
    pub(crate) abandoned: usize,
    /// The addresses that interfaces got last.
    pub(crate) addresses: BTreeMap<EndpointId, Vec<IpAddr>>,
    pub state: NodeState,
    pub batches: Vec<Vec<Delta>>,
    pub resyncs: usize,
    /// The callback for changes by somebody else.
    pub disturbed: Option<Box<dyn Fn() + Send>>,
    /// The report that it returns from now on.
    pub report: Report,
    /// Whether it needs Services.
    pub asks_for_services: bool,
    /// Whether it panics on the next call.
    pub dies: bool,
    /// Whether pods may have IPv6 addresses.
    pub has_ipv6: bool,
    /// The prefix length and the gateway of pods.
    pub pod_network: Option<(u8, Ipv4Addr)>,
    /// The container of each endpoint's interface.
    pub connected: BTreeMap<EndpointId, String>,
    /// Containers whose connection is blocked.
    gates: BTreeMap<String, mpsc::Receiver<()>>,
    /// Containers whose link is made late.
    late: BTreeMap<String, mpsc::Receiver<()>>,
    /// Containers whose link cannot be made.
    pub without_link: BTreeSet<String>,
    /// Containers whose connection fails.
    pub without_connection: BTreeSet<String>,
}

#[derive(Clone, Default)]
pub(crate) struct FakeOs(Arc<Mutex<Os>>);

impl FakeOs {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Os> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Blocks the connection of this container until the sender is used or dropped.
    pub(crate) fn hold(&self, container: &str) -> mpsc::Sender<()> {
        let (open, gate) = mpsc::channel();
        self.lock().gates.insert(container.to_owned(), gate);
        open
    }

    /// Makes the link of this container late: when the sender is used or dropped.
    pub(crate) fn delay_link(&self, container: &str) -> mpsc::Sender<()> {
        let (open, gate) = mpsc::channel();
        self.lock().late.insert(container.to_owned(), gate);
        open
    }

    fn interface(&self, pod: &PodAttachment) -> PodInterface {
        let host_interface = self.host_interface(&pod.endpoint, &pod.container_id);
        let (prefix_len, gateway) = self.lock().pod_network.unwrap_or((32, Ipv4Addr::new(169, 254, 1, 1)));
        PodInterface {
            host_interface,
            host_mac: None,
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
            addresses: pod
                .addresses
                .iter()
                .map(|own| match own.address {
                    IpAddr::V4(_) => InterfaceAddress {
                        address: IpNet::new_assert(own.address, prefix_len),
                        gateway: gateway.into(),
                    },
                    IpAddr::V6(_) => {
                        InterfaceAddress { address: own.address.into(), gateway: Ipv6Addr::LOCALHOST.into() }
                    }
                })
                .collect(),
        }
    }

    pub(crate) fn is_held(&self, container: &str) -> bool {
        !self.lock().gates.contains_key(container)
    }
}

impl Dataplane for FakeOs {
    fn apply(&mut self, state: &NodeState, deltas: &[Delta]) -> Report {
        let mut os = self.lock();
        assert!(!os.dies, "the test wants the dataplane to die");
        deltas.iter().for_each(|delta| os.state.apply(delta));
        assert_eq!(os.state, *state, "the deltas lead to the state that comes with them");
        os.batches.push(deltas.to_vec());
        os.report.clone()
    }

    fn asks_for_services(&self) -> bool {
        self.lock().asks_for_services
    }

    fn watch(&mut self, notify: Box<dyn Fn() + Send>) {
        self.lock().disturbed = Some(notify);
    }

    fn show(&mut self, _: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError> {
        assert!(!self.lock().dies, "the test wants the dataplane to die");
        let unknown = || ShowError::NoEndpoint(endpoint.to_string());
        self.lock().state.endpoints.get(endpoint).map(|_| ()).ok_or_else(unknown)?;
        Ok(Shown { read_from: format!("the test's maps, {}", endpoint.pod), ..Shown::default() })
    }

    fn resync(&mut self, _: &NodeState) -> Report {
        let mut os = self.lock();
        os.resyncs += 1;
        os.report.clone()
    }
}

fn refusal(operation: &'static str, endpoint: &EndpointId) -> WiringError {
    let source = Box::new(std::io::Error::other("the test wants it to fail"));
    WiringError::System { operation, object: endpoint.to_string(), source }
}

impl PodWiring for FakeOs {
    fn prepare(&self, link: &PodLink) -> Result<Option<PreparedLink>, WiringError> {
        let gate = self.lock().late.remove(&link.container_id);
        if let Some(gate) = gate {
            let _ = gate.recv_timeout(TIMEOUT);
        }
        let mut os = self.lock();
        if os.without_link.contains(&link.container_id) {
            return Err(refusal("make the link", &link.endpoint));
        }
        if os.connected.contains_key(&link.endpoint) {
            return Ok(None);
        }
        os.connected.insert(link.endpoint.clone(), link.container_id.clone());
        os.links.push(Some(link.endpoint.clone()));
        Ok(Some(PreparedLink(os.links.len() as u32 - 1)))
    }

    fn abandon(&self, PreparedLink(number): PreparedLink) -> Result<(), WiringError> {
        let mut os = self.lock();
        if let Some(endpoint) = os.links[number as usize].take() {
            os.connected.remove(&endpoint);
            os.abandoned += 1;
        }
        Ok(())
    }

    fn finish(
        &self,
        PreparedLink(number): PreparedLink,
        pod: &PodAttachment,
    ) -> Result<PodInterface, WiringError> {
        let is_first = self.lock().finished.insert(number);
        if !is_first || self.lock().links[number as usize].is_none() {
            return Err(refusal("finish a link that has an address or is deleted", &pod.endpoint));
        }
        self.connect(pod).inspect_err(|_| self.lock().links[number as usize] = None)
    }

    fn connect(&self, pod: &PodAttachment) -> Result<PodInterface, WiringError> {
        let gate = self.lock().gates.remove(&pod.container_id);
        if let Some(gate) = gate {
            let _ = gate.recv_timeout(TIMEOUT);
        }
        let mut os = self.lock();
        if os.without_connection.contains(&pod.container_id) {
            // As the trait demands, a failed attempt leaves nothing.
            os.connected.remove(&pod.endpoint);
            return Err(refusal("connect the pod", &pod.endpoint));
        }
        os.connected.insert(pod.endpoint.clone(), pod.container_id.clone());
        os.addresses.insert(pod.endpoint.clone(), pod.addresses.iter().map(|own| own.address).collect());
        drop(os);
        Ok(self.interface(pod))
    }

    fn has_ipv6(&self) -> Result<bool, WiringError> {
        Ok(self.lock().has_ipv6)
    }

    fn planned(&self, pod: &PodAttachment) -> Option<PodInterface> {
        Some(self.interface(pod))
    }

    fn disconnect(&self, endpoint: &EndpointId, container_id: &str) -> Result<(), WiringError> {
        let connected = &mut self.lock().connected;
        if connected.get(endpoint).is_some_and(|container| container == container_id) {
            connected.remove(endpoint);
        }
        Ok(())
    }

    fn host_interface(&self, endpoint: &EndpointId, _container_id: &str) -> String {
        format!("cali-{}-{}", endpoint.pod, endpoint.interface)
    }

    fn wait_until_live(&self, _interface: &PodInterface, _timeout: Duration) -> bool {
        true
    }

    fn check(&self, pod: &PodAttachment) -> Result<(), WiringError> {
        match self.lock().connected.get(&pod.endpoint) {
            Some(container) if *container == pod.container_id => Ok(()),
            _ => Err(WiringError::Differs {
                object: pod.endpoint.to_string(),
                problem: "not there".to_owned(),
            }),
        }
    }
}

pub(crate) struct Bed {
    pub store: Arc<dyn Endpoints>,
    pub os: FakeOs,
    pub dir: TempDir,
    pub agent: JoinHandle<Result<(), AgentError>>,
}

/// A store with a node, a namespace and a pool.
pub(crate) async fn cluster() -> Arc<Embedded> {
    let store = Arc::new(Embedded::in_memory().unwrap());
    fill(&*store).await;
    store
}

/// Stores a node, a namespace and a pool.
pub(crate) async fn fill(store: &dyn Store) {
    let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/24", "blockSize": 26, "vxlanMode": "Always"}});
    let node = json!({
        "metadata": {"name": NODE, "annotations": {"projectcalico.org/IPv4Address": "192.0.2.1/24"}},
    });
    for (key, value) in [
        (Key::global(Kind::IpPool, "default"), pool),
        (
            Key::global(Kind::IpamConfig, "default"),
            json!({"strict_affinity": true, "auto_allocate_blocks": true}),
        ),
        (Key::global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}})),
        (Key::global(Kind::Node, NODE), node),
    ] {
        store.create(&key, value).await.unwrap();
    }
}

impl Bed {
    /// A serving agent.
    pub(crate) async fn new() -> Self {
        let bed = Self::starting(cluster().await);
        let socket = bed.dir.path().join("agent.sock");
        until("the agent serves", || async { UnixStream::connect(&socket).is_ok() }).await;
        bed
    }

    /// A newly started agent.
    pub(crate) fn starting(store: Arc<dyn Endpoints>) -> Self {
        Self::on(store, FakeOs::default())
    }

    pub(crate) fn on(store: Arc<dyn Endpoints>, os: FakeOs) -> Self {
        let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os.clone()) };
        Self::with_platform(store, platform, os)
    }

    /// An agent in the network namespace of this thread.
    pub(crate) fn on_linux(store: Arc<dyn Endpoints>) -> Self {
        Self::with_platform(store, Platform::Linux, FakeOs::default())
    }

    pub(crate) fn with_platform(store: Arc<dyn Endpoints>, platform: Platform, os: FakeOs) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), store.clone(), platform);
        let agent = tokio::spawn(tortie_agent::run_with(config, saving(dir.path())));
        Self { store, os, dir, agent }
    }

    /// Starts another agent of the same node.
    pub(crate) fn another(&self, os: &FakeOs) -> JoinHandle<Result<(), AgentError>> {
        let platform = Platform::Other { dataplane: Box::new(os.clone()), wiring: Arc::new(os.clone()) };
        tokio::spawn(tortie_agent::run(config(self.dir.path(), self.store.clone(), platform)))
    }

    pub(crate) async fn pod(&self, name: &str, uid: &str, labels: Value) -> Stored {
        let value = json!({
            "metadata": {"name": name, "namespace": "n", "uid": uid, "labels": labels},
            "spec": {"nodeName": NODE, "containers": [{"name": "c"}]},
        });
        put(&*self.store, &pod_key(name), value).await
    }

    pub(crate) async fn call(&self, call: Invocation) -> Answer {
        let socket = self.dir.path().join("agent.sock");
        tokio::task::spawn_blocking(move || send(&socket, &call)).await.unwrap()
    }

    pub(crate) fn invocation(&self, command: Command, container: &str, pod: &str) -> Invocation {
        let mut call = invocation(self.dir.path(), command, (container, pod, ""));
        call.args.remove("K8S_POD_UID");
        call
    }

    pub(crate) async fn endpoint(&self, pod: &str, interface: &str) -> Option<Value> {
        let key = endpoint_key(pod, interface);
        self.store.get(&key).await.unwrap().map(|stored| stored.value)
    }

    /// Every allocated address.
    pub(crate) async fn allocated(&self) -> Vec<String> {
        let blocks = self.store.list(Kind::IpamBlock).await.unwrap().items;
        let blocks = blocks.into_iter().map(|block| serde_json::from_value::<Block>(block.value).unwrap());
        blocks.flat_map(|block| block.allocated().map(|it| it.0.to_string()).collect::<Vec<_>>()).collect()
    }

    /// The node's report, once it exists.
    pub(crate) async fn report(&self) -> Value {
        let stored = self.store.get(&Key::global(Kind::NodeReport, NODE)).await.unwrap();
        stored.map(|stored| stored.value["status"].clone()).unwrap_or_default()
    }

    /// The status of the node's report after it was asked for its present state.
    pub(crate) async fn current_report(&self) -> Value {
        current_report(&*self.store, NODE).await
    }

    /// How far the node reports that a kind is in force, to somebody who waits for this position.
    pub(crate) async fn reported(&self, kind: Kind, position: Position) -> Option<Position> {
        let positions = [(kind, position)].into_iter().collect();
        let _ = tortie_store::wait_in_force(&*self.store, &positions, Duration::ZERO).await;
        self.report().await["positions"][kind.plural()].as_u64().map(Position)
    }
}

/// The call of a plugin for an agent in this folder: container, pod in `n`, and its uid.
pub(crate) fn invocation(
    dir: &Path,
    command: Command,
    (container, pod, uid): (&str, &str, &str),
) -> Invocation {
    let config = json!({
        "cniVersion": "1.1.0", "name": "net",
        "agentSocket": dir.join("agent.sock"), "deletionQueue": dir.join("queue"),
    });
    let args = [("K8S_POD_NAMESPACE", "n"), ("K8S_POD_NAME", pod), ("K8S_POD_UID", uid)];
    Invocation {
        command,
        container_id: container.to_owned(),
        netns: format!("/run/netns/{container}"),
        interface: "eth0".to_owned(),
        args: args.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        config: serde_json::from_value(config).unwrap(),
        delegated: Vec::new(),
    }
}

/// The status of a node's report after it was asked for its present state; without a report, null.
pub(crate) async fn current_report(store: &dyn Store, node: &str) -> Value {
    let positions = store.barrier(&[Kind::WorkloadEndpoint]).await.unwrap_or_default();
    let (nodes, soon) = ([node.to_owned()].into(), Duration::from_millis(200));
    let _ = tortie_store::wait_for_reports(store, Some(&nodes), &positions, soon, |_| true).await;
    let stored = store.get(&Key::global(Kind::NodeReport, node)).await.unwrap();
    stored.map(|stored| stored.value["status"].clone()).unwrap_or_default()
}

pub(crate) fn config(dir: &Path, store: Arc<dyn Endpoints>, platform: Platform) -> Config {
    Config {
        node: NODE.to_owned(),
        store,
        platform,
        cni_socket: dir.join("agent.sock"),
        control_socket: dir.join("control.sock"),
        deletion_queue: dir.join("queue"),
    }
}

/// The extras of an agent that saves the node's state.
pub(crate) fn saving(dir: &Path) -> Extras {
    Extras { saved_state: Some(dir.join("saved-state.json")), ..Extras::default() }
}

/// The agent's answer; the test fails without one.
pub(crate) fn send(socket: &Path, call: &Invocation) -> Answer {
    ask(socket, call, TIMEOUT).unwrap()
}

pub(crate) fn pod_key(name: &str) -> Key {
    Key::namespaced(Kind::Pod, "n", name)
}

pub(crate) fn endpoint_key(pod: &str, interface: &str) -> Key {
    Key::namespaced(Kind::WorkloadEndpoint, "n", WorkloadEndpoint::name_for(NODE, pod, interface))
}

pub(crate) fn endpoint_id(pod: &str) -> EndpointId {
    EndpointId { namespace: "n".into(), pod: pod.into(), interface: "eth0".into() }
}

pub(crate) fn condition(reason: Reason) -> Condition {
    Condition::new(reason, format!("the test says {reason}"))
}

/// Stores the object, whether or not it exists.
pub(crate) async fn put(store: &dyn Store, key: &Key, value: Value) -> Stored {
    match store.get(key).await.unwrap() {
        None => store.create(key, value).await.unwrap(),
        Some(there) => store.update(key, value, &there.version).await.unwrap(),
    }
}

/// Polls until the condition holds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "{what}: not in {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

//! A policy is applied on the API server; when do packets obey it? Two pods of one real node, in the kernel.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_agent::Platform;
use tortie_api::{Key, Kind};
use tortie_cni::transport::ask;
use tortie_cni::{Command, Invocation};
use tortie_kernel::namespace::NetNs;
use tortie_store::Store;

use crate::cluster::{Cluster, client, config, namespace};
use crate::percentile;

const CHANGES: usize = 100;
const PORT: u16 = 8_080;
/// The interval of packets, each of which begins a new flow.
const INTERVAL: Duration = Duration::from_millis(1);

pub(crate) fn run() {
    let cluster = Cluster::start(1);
    cluster.create(vec![namespace(0)]);
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(cluster.runtime.block_on(client(&cluster.servers.kubeconfig())));
    cluster.runtime.spawn(tortie_agent::run(config(0, store, folder.path(), Platform::Linux)));
    let server = Pod::add(&cluster, folder.path(), "server");
    let client = Pod::add(&cluster, folder.path(), "client");
    let key = Key::global(Kind::GlobalNetworkPolicy, "measured");
    cluster.create(vec![(key.clone(), policy(true))]);

    let probe = Probe::start(&client, &server);
    let mut times = [Vec::new(), Vec::new()];
    for change in 0..CHANGES {
        let allows = !change.is_multiple_of(2);
        let begun = Instant::now();
        cluster.runtime.block_on(async {
            let stored = cluster.store.get(&key).await.unwrap().unwrap();
            cluster.store.update(&key, policy(allows), &stored.version).await.unwrap();
        });
        times[usize::from(allows)].push(probe.obeys(allows).saturating_duration_since(begun));
        std::thread::sleep(Duration::from_millis(30));
    }
    println!(
        "a policy on the API server until packets obey it, {CHANGES} changes, a packet each {INTERVAL:?}"
    );
    for (what, mut times) in ["denies", "allows"].into_iter().zip(times) {
        times.sort();
        println!(
            "  {what}: p50 {:.1} ms, p90 {:.1} ms, max {:.1} ms",
            percentile(&times, 0.5),
            percentile(&times, 0.9),
            percentile(&times, 1.0)
        );
    }
    println!("  goal (F17): p50 10 ms, p99 50 ms, with the two requests of the change");
}

fn policy(allows: bool) -> Value {
    let action = if allows { "Allow" } else { "Deny" };
    let spec = json!({"selector": "app == 'server'", "types": ["Ingress"], "ingress": [{"action": action}]});
    json!({"metadata": {"name": "measured"}, "spec": spec})
}

struct Pod {
    netns: NetNs,
    path: PathBuf,
    address: Ipv4Addr,
}

impl Pod {
    /// Creates the pod and adds it by the agent's socket.
    fn add(cluster: &Cluster, folder: &Path, name: &str) -> Self {
        let key = Key::namespaced(Kind::Pod, "ns-0", name);
        let spec = json!({"nodeName": "node-0", "containers": [{"name": "c", "image": "i"}]});
        let metadata = json!({"name": name, "namespace": "ns-0", "labels": {"app": name}});
        let stored =
            cluster.runtime.block_on(cluster.store.create(&key, json!({"metadata": metadata, "spec": spec})));
        let uid = stored.unwrap().value["metadata"]["uid"].as_str().unwrap().to_owned();
        let (netns, path) = (NetNs::create().unwrap(), folder.join(name));
        netns.bind_to(&path).unwrap();
        let config = json!({
            "cniVersion": "1.1.0", "name": "net",
            "agentSocket": folder.join("agent.sock"), "deletionQueue": folder.join("queue"),
        });
        let args = [("K8S_POD_NAMESPACE", "ns-0"), ("K8S_POD_NAME", name), ("K8S_POD_UID", &uid)];
        let call = Invocation {
            command: Command::Add,
            container_id: format!("container-{name}"),
            netns: path.display().to_string(),
            interface: "eth0".to_owned(),
            args: args.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            config: serde_json::from_value(config).unwrap(),
            delegated: Vec::new(),
        };
        let socket = folder.join("agent.sock");
        while !socket.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let answer = ask(&socket, &call, Duration::from_secs(60)).unwrap().unwrap().unwrap();
        let address = answer.ips[0].address.split('/').next().unwrap().parse().unwrap();
        Self { netns, path, address }
    }
}

/// Packets from one pod to another. Each comes from a port of its own, and so begins a flow.
struct Probe {
    /// The times at which received packets were sent.
    received: Receiver<Instant>,
    stop: Arc<AtomicBool>,
}

impl Probe {
    fn start(client: &Pod, server: &Pod) -> Self {
        let to = SocketAddrV4::new(server.address, PORT);
        let socket = server.netns.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let (stop, begun) = (Arc::new(AtomicBool::new(false)), Instant::now());
        let (send, received) = channel();
        let stopped = stop.clone();
        std::thread::spawn(move || {
            let mut packet = [0; 8];
            while !stopped.load(Ordering::Relaxed) {
                match socket.recv(&mut packet) {
                    Ok(_) => drop(send.send(begun + Duration::from_nanos(u64::from_ne_bytes(packet)))),
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
                    }
                }
            }
        });
        let (stopped, from) = (stop.clone(), NetNs::open(&client.path).unwrap());
        std::thread::spawn(move || from.run(|| send_packets(to, begun, &stopped)).unwrap());
        received.recv_timeout(Duration::from_secs(10)).unwrap();
        Self { received, stop }
    }

    /// When the first packet passed that was sent after the change, or the last one before 30 ms without any.
    fn obeys(&self, allows: bool) -> Instant {
        let mut last = None;
        loop {
            match self.received.recv_timeout(Duration::from_millis(if allows { 5_000 } else { 60 })) {
                Ok(sent) if allows => return sent,
                Ok(sent) => last = Some(sent),
                Err(_) if allows => panic!("no packet passes"),
                Err(_) => return last.unwrap_or_else(Instant::now),
            }
        }
    }
}

/// Sends from each port in turn. A flow ends 30 s after its last packet, before its port is used again.
fn send_packets(to: SocketAddrV4, begun: Instant, stopped: &AtomicBool) {
    for port in (1_024..65_000).cycle() {
        if stopped.load(Ordering::Relaxed) {
            return;
        }
        let Ok(socket) = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)) else { continue };
        let sent = u64::try_from(begun.elapsed().as_nanos()).unwrap();
        let _ = socket.send_to(&sent.to_ne_bytes(), to);
        std::thread::sleep(INTERVAL);
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

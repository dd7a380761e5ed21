//! The BGP speaker of an emulated Windows node, and the firewall in its way. Each agent is in a network namespace without links, so that
//! it reaches no peer.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tortie_agent::{AgentError, Extras, Host, Platform, StaticRules, WindowsNetwork};
use tortie_api::{Key, Kind};
use tortie_hcn::{Firewall, FirewallRule};
use tortie_hns_emulator::{Config, EmulatedFirewall, Emulator};
use tortie_kernel::namespace::NetNs;
use tortie_store::{Embedded, Store};
use tortie_windows::FirewallOpenings;

use crate::common::{NODE, cluster, config, put, until};

/// A Windows node with a mesh and a peer outside.
struct Machine {
    store: Arc<Embedded>,
    hns: Arc<Emulator>,
    firewall: Arc<EmulatedFirewall>,
    dir: tempfile::TempDir,
    agent: JoinHandle<Result<(), AgentError>>,
}

impl Machine {
    async fn new() -> Self {
        let store = cluster().await;
        let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/24", "blockSize": 29, "vxlanMode": "Never"}});
        put(&*store, &Key::global(Kind::IpPool, "default"), pool).await;
        for (name, address) in [(NODE, 1), ("linux-2", 12), ("linux-3", 13)] {
            let annotations = json!({
                "projectcalico.org/IPv4Address": format!("192.0.2.{address}/24"),
                "projectcalico.org/IPv6Address": format!("fd00::{address}/64"),
            });
            let node = json!({"metadata": {"name": name, "annotations": annotations}});
            put(&*store, &Key::global(Kind::Node, name), node).await;
        }
        let hns = Arc::new(Emulator::new(Config::new(Config::SERVER_2022, Ipv4Addr::new(192, 0, 2, 1))));
        let dir = tempfile::tempdir().unwrap();
        let agent = tokio::spawn(async { Ok(()) });
        let mut machine = Self { store, hns, firewall: Arc::default(), dir, agent };
        machine.peer("router", "198.51.100.9").await;
        machine.start(true).await;
        machine
    }

    /// Starts the agent, instead of the one that runs, with or without a speaker.
    async fn start(&mut self, bgp: bool) {
        self.agent.abort();
        let _ = (&mut self.agent).await;
        let openings = FirewallOpenings::new(self.firewall.clone(), r"C:\tortie\tortie.exe");
        openings.watch().unwrap();
        let platform = Platform::Windows {
            hcn: self.hns.clone(),
            static_rules: StaticRules::default(),
            host: Host::unknown().with_firewall(openings),
            services: Vec::new(),
            network: WindowsNetwork::L2Bridge,
        };
        let config = config(self.dir.path(), self.store.clone(), platform);
        self.agent = tokio::spawn(tortie_agent::run_with(config, Extras { bgp, ..Extras::default() }));
    }

    async fn peer(&self, name: &str, address: &str) {
        let spec = json!({"peerIP": address, "asNumber": 64_513});
        let peer = json!({"metadata": {"name": name}, "spec": spec});
        put(&*self.store, &Key::global(Kind::BgpPeer, name), peer).await;
    }

    async fn settings(&self, spec: Value) {
        let settings = json!({"metadata": {"name": "default"}, "spec": spec});
        put(&*self.store, &Key::global(Kind::BgpConfiguration, "default"), settings).await;
    }

    async fn delete(&self, kind: Kind, name: &str) {
        self.store.delete(&Key::global(kind, name), None).await.unwrap();
    }

    /// Waits until the firewall has this rule: a port, and who may connect to it.
    async fn admits(&self, expected: Option<(&str, &str)>) {
        let expected = expected.map(|(port, peers)| (port.to_owned(), peers.to_owned()));
        let listed = || {
            let rules = self.firewall.rules().unwrap();
            let rule = rules.into_iter().find(|rule| rule.name == "Tortie BGP")?;
            Some((rule.local_ports, rule.remote_addresses.replace("/255.255.255.255", "")))
        };
        until(&format!("{expected:?}"), || async { listed() == expected }).await;
    }

    /// What the node reports about its firewall.
    async fn reported(&self) -> Option<String> {
        let report = self.store.get(&Key::global(Kind::NodeReport, NODE)).await.unwrap()?;
        let conditions = report.value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let mut messages = conditions.iter().filter(|condition| condition["reason"] == "FirewallNotOpen");
        Some(messages.next()?["message"].as_str().unwrap().to_owned())
    }
}

/// Runs a test in a network namespace of its own.
fn isolated(test: impl AsyncFnOnce() + Send) {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    NetNs::create().unwrap().run(|| runtime().block_on(test())).unwrap();
}

const MESH: &str = "192.0.2.12-192.0.2.13,198.51.100.9,fd00::12-fd00::13";

#[test]
fn the_firewall_admits_the_peers_that_the_speaker_has() {
    isolated(async || {
        let mut machine = Machine::new().await;
        machine.admits(Some(("179", MESH))).await;
        machine.delete(Kind::Node, "linux-3").await;
        machine.admits(Some(("179", "192.0.2.12,198.51.100.9,fd00::12"))).await;
        machine.peer("other", "fd01::9").await;
        machine.admits(Some(("179", "192.0.2.12,198.51.100.9,fd00::12,fd01::9"))).await;
        machine.settings(json!({"nodeToNodeMeshEnabled": false, "listenPort": 1790})).await;
        machine.admits(Some(("1790", "198.51.100.9,fd01::9"))).await;
        machine.delete(Kind::BgpPeer, "other").await;
        machine.delete(Kind::BgpPeer, "router").await;
        machine.admits(None).await;
        machine.settings(json!({})).await;
        machine.admits(Some(("179", "192.0.2.12,fd00::12"))).await;
        machine.start(false).await;
        machine.admits(None).await;
    });
}

#[test]
fn a_rule_of_others_that_blocks_the_agent_is_reported() {
    isolated(async || {
        let machine = Machine::new().await;
        machine.admits(Some(("179", MESH))).await;
        let blocks = FirewallRule {
            name: "no listeners".into(),
            is_enabled: true,
            is_inbound: true,
            protocol: 6,
            local_ports: "*".into(),
            remote_addresses: "*".into(),
            application: r"c:\tortie\tortie.exe".into(),
            profiles: 4,
            ..FirewallRule::default()
        };
        machine.firewall.change(|state| state.rules.push(blocks));
        // The comparison after a change of the peers finds it.
        machine.delete(Kind::Node, "linux-3").await;
        let expected = r#"the firewall's rule "no listeners" blocks TCP 179 before any rule allows it: disable it, or restrict it"#;
        until("the report", async || machine.reported().await.as_deref() == Some(expected)).await;
        machine.firewall.change(|state| state.rules.retain(|rule| rule.allows));
        machine.peer("other", "fd01::9").await;
        until("nothing is reported", async || machine.reported().await.is_none()).await;
    });
}

/// A port that another program has must not keep the speaker from its earlier one.
#[test]
fn a_speaker_listens_again_when_its_port_is_changed_back() {
    isolated(async || {
        let machine = Machine::new().await;
        let listens = || TcpStream::connect("127.0.0.1:179").is_ok();
        until("the speaker listens", async || listens()).await;
        let taken = TcpListener::bind("0.0.0.0:1790").unwrap();
        machine.settings(json!({"listenPort": 1790})).await;
        until("the speaker has left its port", async || !listens()).await;
        machine.settings(json!({})).await;
        until("the speaker listens again", async || listens()).await;
        machine.admits(Some(("179", MESH))).await;
        drop(taken);
    });
}

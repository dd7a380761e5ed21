//! The agent of an emulated Windows node whose subnet is a lease in flannel's etcd, which is real.

use std::net::Ipv4Addr;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tortie_agent::{AgentError, Extras, FlannelEtcd, Host, Platform, StaticRules, WindowsNetwork};
use tortie_api::{Key, Kind};
use tortie_hcn::HcnExt;
use tortie_hcn::schema::{Endpoint, Network, RemoteSubnetRoute};
use tortie_hns_emulator::{Config, Emulator};
use tortie_servers::Etcd as Servers;
use tortie_servers::programs::{Program, can_run};
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::{Embedded, Store};

use crate::common::{NODE, cluster, config, put, until};

const PREFIX: &str = "/coreos.com/network";

/// What the lease of a node of flannel has.
struct Machine {
    servers: Servers,
    store: Arc<Embedded>,
    hns: Arc<Emulator>,
    network: WindowsNetwork,
    dir: tempfile::TempDir,
    agent: JoinHandle<Result<(), AgentError>>,
}

impl Machine {
    /// A machine beside a Linux node of flannel. `None` without the programs.
    async fn start(network: WindowsNetwork, is_dual: bool) -> Option<Self> {
        if !can_run(&[Program::Etcd, Program::Etcdctl]) {
            return None;
        }
        let (mode, backend) = match network {
            WindowsNetwork::Overlay => ("Always", json!({"Type": "vxlan", "VNI": 4096, "Port": 4789})),
            WindowsNetwork::L2Bridge => ("Never", json!({"Type": "host-gw"})),
        };
        let store = cluster().await;
        let key = Key::global(Kind::Node, NODE);
        let mut node = store.get(&key).await.unwrap().unwrap().value;
        node["metadata"]["annotations"]["projectcalico.org/IPv6Address"] = json!("2001:db8::1/64");
        put(&*store, &key, node).await;
        store.delete(&Key::global(Kind::IpPool, "default"), None).await.unwrap();
        for (name, cidr) in [("flannel", "10.244.0.0/16"), ("flannel-v6", "fd00:244::/48")] {
            let spec =
                json!({"cidr": cidr, "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"});
            let pool = json!({"metadata": {"name": name}, "spec": spec});
            put(&*store, &Key::global(Kind::IpPool, name), pool).await;
        }
        let machine = Self {
            servers: Servers::start().unwrap(),
            store,
            hns: Arc::new(Emulator::new(Config::new(Config::SERVER_2022, Ipv4Addr::new(192, 0, 2, 1)))),
            network,
            dir: tempfile::tempdir().unwrap(),
            agent: tokio::spawn(async { Ok(()) }),
        };
        let conf = json!({
            "Network": "10.244.0.0/16", "EnableIPv6": is_dual, "IPv6Network": "fd00:244::/48", "Backend": backend,
        });
        machine.write("config", &conf);
        let data = json!({"VNI": 4096, "VtepMAC": "66:01:02:03:04:05"});
        let other = json!({
            "PublicIP": "192.0.2.99", "PublicIPv6": "2001:db8::99", "BackendType": backend["Type"],
            "BackendData": data, "BackendV6Data": data,
        });
        machine.write(
            if is_dual { "subnets/10.244.9.0-24&fd00:244:0:9::-64" } else { "subnets/10.244.9.0-24" },
            &other,
        );
        Some(machine.restart().await)
    }

    async fn restart(mut self) -> Self {
        if !self.agent.is_finished() {
            self.agent.abort();
            let _ = (&mut self.agent).await;
        }
        let platform = Platform::Windows {
            hcn: self.hns.clone(),
            static_rules: StaticRules::default(),
            host: Host::unknown(),
            services: Vec::new(),
            network: self.network,
        };
        let etcd = EtcdConfig { endpoints: self.servers.endpoints(), tls: None, login: None };
        let etcd = FlannelEtcd::new(Etcd::new(etcd).unwrap(), PREFIX);
        let extras = Extras { flannel: true, flannel_etcd: Some(etcd), ..Extras::default() };
        let config = config(self.dir.path(), self.store.clone(), platform);
        self.agent = tokio::spawn(tortie_agent::run_with(config, extras));
        self
    }

    fn write(&self, key: &str, value: &Value) {
        self.servers.etcdctl(&["put", &format!("{PREFIX}/{key}"), &value.to_string()]).unwrap();
    }

    async fn annotation(&self, name: &str) -> Option<String> {
        let node = self.store.get(&Key::global(Kind::Node, NODE)).await.unwrap().unwrap().value;
        node["metadata"]["annotations"][name].as_str().map(str::to_owned)
    }

    /// The node's subnet, once its Node remembers it.
    async fn subnet(&self) -> String {
        until("the subnet", || async { self.annotation("tortie.io/flannel-subnets").await.is_some() }).await;
        let remembered = self.annotation("tortie.io/flannel-subnets").await.unwrap();
        remembered.split(' ').next().unwrap().to_owned()
    }

    fn key(&self, subnet: &str) -> String {
        format!("{PREFIX}/subnets/{}", subnet.replace('/', "-").replace(',', "&"))
    }

    /// All values that a key has had, oldest first.
    fn history(&self, subnet: &str) -> Vec<Value> {
        let key = self.key(subnet);
        let shown = self.servers.etcdctl(&["get", &key, "-w", "json"]).unwrap();
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let number = |name: &str| shown["kvs"][0][name].as_u64().unwrap();
        let revisions = number("create_revision")..=number("mod_revision");
        let at = |revision: u64| {
            let revision = format!("--rev={revision}");
            let value = self.servers.etcdctl(&["get", &key, "--print-value-only", &revision]).unwrap();
            serde_json::from_str(&value).unwrap()
        };
        let mut values: Vec<Value> = revisions.map(at).collect();
        values.dedup();
        values
    }

    fn pod_network(&self) -> Option<Network> {
        self.hns.network_by_name(tortie_windows::NETWORK).unwrap()
    }

    /// Waits until the key has the MAC address that HNS has chosen.
    async fn announces_its_mac(&self, subnet: &str) -> String {
        until("the MAC address of the network", || async {
            let announced = self.annotation("projectcalico.org/VXLANTunnelMACAddr").await;
            let written = self.history(subnet).pop().unwrap();
            announced.is_some() && written["BackendData"]["VtepMAC"].as_str() == announced.as_deref()
        })
        .await;
        self.annotation("projectcalico.org/VXLANTunnelMACAddr").await.unwrap()
    }

    fn leads_to(&self, expected: &[&str]) -> bool {
        let Some(network) = self.pod_network() else { return false };
        let routes = network.policies.iter().filter_map(|one| one.settings::<RemoteSubnetRoute>().unwrap());
        routes.map(|route| route.destination_prefix).collect::<Vec<_>>() == expected
    }

    /// The same node after its cluster has moved from `host-gw` to `vxlan`.
    async fn switch_to_vxlan(mut self) -> Self {
        for name in ["flannel", "flannel-v6"] {
            let key = Key::global(Kind::IpPool, name);
            let mut pool = self.store.get(&key).await.unwrap().unwrap().value;
            pool["spec"]["vxlanMode"] = json!("Always");
            put(&*self.store, &key, pool).await;
        }
        let backend = json!({"Type": "vxlan", "VNI": 4096, "Port": 4789});
        self.write("config", &json!({"Network": "10.244.0.0/16", "Backend": backend}));
        self.network = WindowsNetwork::Overlay;
        self.restart().await
    }

    /// The conditions of the node, once it has reported.
    async fn report(&self) -> Option<String> {
        let report = self.store.get(&Key::global(Kind::NodeReport, NODE)).await.unwrap()?;
        Some(report.value["status"]["conditions"].to_string())
    }

    async fn reports(&self, reason: &str) -> bool {
        self.report().await.is_some_and(|report| report.contains(reason))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_windows_node_leases_a_subnet_and_announces_the_mac_address_of_its_network() {
    let Some(machine) = Machine::start(WindowsNetwork::Overlay, false).await else { return };
    let subnet = machine.subnet().await;
    let mac = machine.announces_its_mac(&subnet).await;
    assert!(mac.starts_with("00:15:5d:"), "HNS has chosen it: {mac}");
    let network = machine.pod_network().unwrap();
    assert_eq!(network.subnets().next().unwrap().ip_address_prefix, subnet);
    // Before it has a network, the key reserves the subnet.
    let complete = json!({
        "PublicIP": "192.0.2.1", "PublicIPv6": null, "BackendType": "vxlan",
        "BackendData": {"VNI": 4096, "VtepMAC": mac},
    });
    let reserved = json!({"PublicIP": "192.0.2.1", "PublicIPv6": null});
    assert_eq!(machine.history(&subnet), [reserved, complete.clone()]);
    until("the route to flannel's node", || async { machine.leads_to(&["10.244.9.0/24"]) }).await;
    // Others keep their routes while the agent starts again.
    let machine = machine.restart().await;
    until("the agent serves", || async {
        std::os::unix::net::UnixStream::connect(machine.dir.path().join("agent.sock")).is_ok()
    })
    .await;
    assert_eq!(machine.subnet().await, subnet);
    assert_eq!(machine.announces_its_mac(&subnet).await, mac);
    assert_eq!(machine.history(&subnet).pop(), Some(complete.clone()));
    assert_eq!(machine.history(&subnet).len(), 2);
    // HNS has lost the network, and chooses another address.
    machine.hns.delete_network(network.id).unwrap();
    until("the new network", || async {
        machine.annotation("projectcalico.org/VXLANTunnelMACAddr").await.is_some_and(|new| new != mac)
    })
    .await;
    assert_ne!(machine.announces_its_mac(&subnet).await, mac);
    // Another machine takes the subnet.
    machine.write(&format!("subnets/{}", subnet.replace('/', "-")), &json!({"PublicIP": "192.0.2.98"}));
    until("the condition", || async { machine.reports("SubnetLost").await }).await;
}

/// Pods of Windows nodes have IPv4 only in a cluster with flannel. A key without an IPv6 subnet lets flanneld panic elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_windows_node_takes_an_ipv6_subnet_that_no_pod_uses() {
    for network in [WindowsNetwork::Overlay, WindowsNetwork::L2Bridge] {
        let Some(machine) = Machine::start(network, true).await else { return };
        let subnets = machine.subnet().await;
        let (subnet, subnet_v6) = subnets.split_once(',').unwrap();
        assert!(subnet_v6.starts_with("fd00:244:"), "{subnets}");
        if network == WindowsNetwork::Overlay {
            machine.announces_its_mac(&subnets).await;
            let written = machine.history(&subnets).pop().unwrap();
            assert_eq!(written["PublicIPv6"], "2001:db8::1");
            assert!(written["BackendV6Data"]["VtepMAC"].is_string(), "{written}");
            until("the route to flannel's node", || async { machine.leads_to(&["10.244.9.0/24"]) }).await;
        }
        let found = machine.pod_network().unwrap();
        let of_pods: Vec<String> = found.subnets().map(|subnet| subnet.ip_address_prefix.clone()).collect();
        assert_eq!(of_pods, [subnet]);
        until("the report", || async { machine.report().await.is_some() }).await;
        let report = machine.report().await.unwrap();
        assert!(!report.contains("NetworkDiffers") && !report.contains("10.244.9.0-24"), "{report}");
    }
}

/// The network of an earlier mode is replaced when its last pod is gone. Until then, there is no tunnel.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_of_another_type_is_replaced_when_it_is_drained() {
    let Some(machine) = Machine::start(WindowsNetwork::L2Bridge, false).await else { return };
    let subnet = machine.subnet().await;
    let network = machine.pod_network().unwrap();
    let endpoint =
        Endpoint { name: "pod".to_owned(), host_compute_network: network.id, ..Endpoint::default() };
    let endpoint = machine.hns.create_endpoint(&endpoint).unwrap();
    let machine = machine.switch_to_vxlan().await;
    until("the condition", || async { machine.reports("NetworkDiffers").await }).await;
    assert_eq!(machine.subnet().await, subnet);
    machine.hns.delete_endpoint(endpoint).unwrap();
    machine.announces_its_mac(&subnet).await;
}

/// No other node may route a subnet to a node whose agent refuses to run.
#[tokio::test(flavor = "multi_thread")]
async fn a_windows_node_with_the_wrong_network_takes_no_subnet() {
    let Some(mut machine) = Machine::start(WindowsNetwork::L2Bridge, false).await else { return };
    let subnet = machine.subnet().await;
    // A running agent would write it again.
    machine.agent.abort();
    let _ = (&mut machine.agent).await;
    machine.servers.etcdctl(&["del", &machine.key(&subnet)]).unwrap();
    machine.network = WindowsNetwork::Overlay;
    let mut machine = machine.restart().await;
    let refused = (&mut machine.agent).await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("--windows-network l2bridge"), "{refused}");
    let keys = machine.servers.etcdctl(&["get", "--prefix", "--keys-only", PREFIX]).unwrap();
    assert_eq!(keys.split_whitespace().count(), 2, "the configuration and the other node: {keys}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_windows_node_leases_a_subnet_for_host_gw() {
    let Some(machine) = Machine::start(WindowsNetwork::L2Bridge, false).await else { return };
    let subnet = machine.subnet().await;
    let expected = json!({"PublicIP": "192.0.2.1", "PublicIPv6": null, "BackendType": "host-gw"});
    assert_eq!(machine.history(&subnet), [expected]);
    let network = machine.pod_network().unwrap();
    assert_eq!(network.r#type, tortie_hcn::schema::NetworkMode::L2Bridge);
    assert_eq!(network.subnets().next().unwrap().ip_address_prefix, subnet);
}

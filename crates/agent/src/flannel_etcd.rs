//! A node whose networks of pods are flannel's leases in etcd. The annotation [`SUBNETS`] remembers them.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use tokio::sync::watch;
use tortie_api::net::{IpVersion, MacAddress};
use tortie_api::{Key, Kind};
use tortie_dataplane::Reason;
use tortie_flannel::{
    Attributes, Backend, FlannelError, FlannelEtcd, LeaseSnapshot, NetConf, Previous, SubnetManager, Subnets,
    Tunnel,
};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Store, StoreError};

use crate::cluster_network::cluster_network;
use crate::flannel::{check_network, of_networks};
use crate::unsupported::Unsupported;
use crate::{AgentError, WindowsNetwork};

/// The annotation with the subnets that the node had last, and its address then: it takes them again if they are free or still its own.
pub(crate) const SUBNETS: &str = "tortie.io/flannel-subnets";

/// What flannel's configuration says, and what the node writes about itself.
pub(crate) struct EtcdLease {
    key: String,
    conf: NetConf,
    subnets: Subnets,
    attributes: watch::Sender<Attributes>,
    /// The node's address, as a key of these subnets had it before the agent started.
    former: Option<Ipv4Addr>,
    snapshot: watch::Receiver<Arc<LeaseSnapshot>>,
}

/// What others must know to reach the pods of a node.
#[derive(Debug, Clone)]
pub(crate) struct OwnEnd {
    /// The addresses of the node, IPv4 first.
    pub(crate) addresses: [Option<String>; 2],
    /// The MAC addresses of its tunnels, IPv4 first, once they are known.
    pub(crate) macs: Option<[MacAddress; 2]>,
}

/// The part of the agent that keeps the lease, and what it knows.
pub(crate) struct LeaseKeeper {
    manager: SubnetManager,
    attributes: watch::Receiver<Attributes>,
    publish: watch::Sender<Arc<LeaseSnapshot>>,
}

impl EtcdLease {
    /// Takes subnets for a node, on Windows for this type of network. Waits while etcd cannot be reached.
    pub(crate) async fn acquire(
        store: &dyn Store,
        node: &str,
        etcd: &FlannelEtcd,
        end: &OwnEnd,
        network: Option<WindowsNetwork>,
        previous: Option<&str>,
    ) -> Result<(Self, LeaseKeeper), AgentError> {
        let refuse = |problem: String| AgentError::Node { node: node.to_owned(), problem };
        let previous = previous.and_then(remembered);
        let mut backoff = Backoff::new(random_seed());
        loop {
            let taken = async {
                let (conf, ranges) = etcd.config().await.map_err(AcquireError::Flannel)?;
                let key = etcd.config_key();
                check_fit(store, node, &key, &conf).await.map_err(AcquireError::Unfit)?;
                if let Some(network) = network {
                    check_network(node, network, conf.backend != Backend::HostGw)
                        .map_err(AcquireError::Unfit)?;
                }
                let attributes = attributes(&conf, end).map_err(|text| AcquireError::Unfit(refuse(text)))?;
                let previous = match previous {
                    // Pods come and go while etcd does not answer.
                    Some((subnets, address)) => {
                        let has_pods = has_pods(store, node, &subnets).await;
                        let has_pods = has_pods.map_err(|error| AcquireError::Unfit(error.into()))?;
                        Some(Previous { subnets, has_pods, address })
                    }
                    None => None,
                };
                let manager = etcd.acquire(&ranges, attributes, previous).await;
                let manager = manager.map_err(AcquireError::Flannel)?.with_config(conf.clone());
                let manager = if network.is_some() { manager.with_ipv4_only() } else { manager };
                Ok((key, conf, attributes, manager))
            };
            match taken.await {
                Ok((key, conf, attributes, manager)) => {
                    let subnets = manager.subnets();
                    let (attributes, wanted) = watch::channel(attributes);
                    let (publish, snapshot) = watch::channel(Arc::new(manager.snapshot()));
                    let keeper = LeaseKeeper { manager, attributes: wanted, publish };
                    let former = previous.filter(|(former, _)| *former == subnets);
                    let former = former.and_then(|(_, address)| address);
                    return Ok((Self { key, conf, subnets, attributes, former, snapshot }, keeper));
                }
                Err(AcquireError::Flannel(FlannelError::Store(error))) if is_passing(&error) => {
                    tracing::warn!(%error, "flannel's etcd does not answer, so the node has no subnet yet; Tortie retries");
                }
                Err(AcquireError::Flannel(error)) => return Err(refuse(error.to_string())),
                Err(AcquireError::Unfit(error)) => return Err(error),
            }
            backoff.wait().await;
        }
    }

    /// The networks of the node's pods.
    pub(crate) fn subnets(&self) -> impl Iterator<Item = IpNet> {
        self.subnets.nets()
    }

    /// The VXLAN network identifier, if packets travel by VXLAN.
    pub(crate) fn vni(&self) -> Option<u32> {
        match self.conf.backend {
            Backend::Vxlan { vni, port: _ } => Some(vni),
            Backend::HostGw => None,
        }
    }

    /// The annotation that records the node's subnets, and the address in the node's key. That may be an earlier address of the node.
    /// An agent that starts recognises its key by it.
    pub(crate) fn annotation(&self) -> (&'static str, Option<String>) {
        let address = self.snapshot.borrow().address.or(self.former);
        (SUBNETS, Some(memory(&self.subnets, address)))
    }

    /// What is known of the leases.
    pub(crate) fn snapshot(&self) -> watch::Receiver<Arc<LeaseSnapshot>> {
        self.snapshot.clone()
    }

    /// Checks again whether the pools fit.
    pub(crate) async fn check(&self, store: &dyn Store, node: &str) -> Result<(), AgentError> {
        check_fit(store, node, &self.key, &self.conf).await
    }

    /// Writes what others must know now.
    pub(crate) fn tell(&self, node: &str, end: &OwnEnd) -> Result<(), AgentError> {
        let refuse = |problem: String| AgentError::Node { node: node.to_owned(), problem };
        let now = attributes(&self.conf, end).map_err(refuse)?;
        self.attributes.send_if_modified(|known| {
            let differs = *known != now;
            *known = now;
            differs
        });
        Ok(())
    }
}

impl LeaseKeeper {
    /// What is known of the leases.
    pub(crate) fn snapshot(&self) -> watch::Receiver<Arc<LeaseSnapshot>> {
        self.publish.subscribe()
    }

    /// Keeps the lease. Ends only when the future is dropped.
    pub(crate) async fn run(self) {
        self.manager.run(self.attributes, self.publish).await;
    }
}

fn memory(subnets: &Subnets, address: Option<Ipv4Addr>) -> String {
    let address = address.map(|address| format!(" {address}")).unwrap_or_default();
    format!("{subnets}{address}")
}

/// Waits until the key has another address.
pub(crate) async fn address_changed(
    leases: &mut Option<watch::Receiver<Arc<LeaseSnapshot>>>,
    known: Option<Ipv4Addr>,
) {
    let changed = match leases {
        Some(leases) => leases.wait_for(|now| now.address != known).await.is_ok(),
        None => false,
    };
    if !changed {
        std::future::pending().await
    }
}

/// What the annotation says: the subnets, and after a space the address of the node.
fn remembered(text: &str) -> Option<(Subnets, Option<Ipv4Addr>)> {
    let (subnets, address) = text.split_once(' ').unwrap_or((text, ""));
    Some((subnets.parse().ok()?, address.parse().ok()))
}

/// Whether pods of the node have addresses of these subnets.
async fn has_pods(store: &dyn Store, node: &str, subnets: &Subnets) -> Result<bool, StoreError> {
    let endpoints = store.list(Kind::WorkloadEndpoint).await?.items;
    Ok(endpoints.iter().any(|stored| {
        let spec = &stored.value["spec"];
        let nets = spec["ipNetworks"].as_array().into_iter().flatten();
        let mut nets = nets.filter_map(|net| net.as_str()?.parse::<IpNet>().ok());
        spec["node"] == node && nets.any(|net| subnets.nets().any(|subnet| subnet.contains(&net)))
    }))
}

/// Why a node has no subnets.
enum AcquireError {
    Flannel(FlannelError),
    Unfit(AgentError),
}

fn is_passing(error: &StoreError) -> bool {
    !matches!(error, StoreError::Forbidden(_) | StoreError::Damaged(_))
}

/// Whether pools and FelixConfiguration are as flannel's configuration has it.
async fn check_fit(store: &dyn Store, node: &str, key: &str, conf: &NetConf) -> Result<(), AgentError> {
    let refuse = |problem: String| {
        let problem = format!("flannel's configuration (key {key} in etcd): {problem}");
        Err(AgentError::Node { node: node.to_owned(), problem })
    };
    let nets: Vec<IpNet> = conf.networks.iter().map(|network| network.cidr).collect();
    let (found, is_vxlan) = match of_networks(store, nets.clone()).await? {
        Ok(found) => found,
        Err(problem) => return refuse(problem),
    };
    if let Some(missing) = nets.iter().find(|net| !found.contains(net)) {
        return refuse(format!(
            "no IPPool contains {missing}; create one with that network, and otherwise as that of {}",
            found.first().map(ToString::to_string).unwrap_or_default()
        ));
    }
    match conf.backend {
        Backend::Vxlan { .. } if !is_vxlan => refuse(
            "the backend is vxlan, and the IPPool of its network has no VXLAN; set vxlanMode Always there"
                .to_owned(),
        ),
        Backend::HostGw if is_vxlan => refuse(
            "the backend is host-gw, and the IPPool of its network has VXLAN; set vxlanMode Never there"
                .to_owned(),
        ),
        Backend::HostGw => Ok(()),
        Backend::Vxlan { vni, port } => {
            let own = cluster_network(store, node).await?;
            if (own.vni, own.port) == (vni, port) {
                return Ok(());
            }
            refuse(format!(
                "the VNI is {vni} and the port {port}, and FelixConfiguration has {} and {}; set vxlanVNI {vni} and vxlanPort {port} there",
                own.vni, own.port
            ))
        }
    }
}

/// What a node writes.
fn attributes(conf: &NetConf, end: &OwnEnd) -> Result<Attributes, String> {
    let [v4, v6] = IpVersion::ALL.map(|version| {
        let text = end.addresses[usize::from(version == IpVersion::V6)].as_deref()?;
        text.parse::<IpAddr>().ok().filter(|address| IpVersion::of(address) == version)
    });
    let lacks = |version: IpVersion, option: &str| {
        format!(
            "it has no {version} address in its status or in annotations, which flannel needs; use --{option}-autodetection-method"
        )
    };
    let Some(IpAddr::V4(public_ip)) = v4 else { return Err(lacks(IpVersion::V4, "ip")) };
    let is_dual = conf.networks.len() > 1;
    let public_ipv6 = match v6.filter(|_| is_dual) {
        Some(IpAddr::V6(address)) => Some(address),
        _ if is_dual => return Err(lacks(IpVersion::V6, "ip6")),
        _ => None,
    };
    let tunnel = match conf.backend {
        Backend::HostGw => Tunnel::HostGw,
        Backend::Vxlan { vni, port: _ } => {
            end.macs.map_or(Tunnel::Pending, |macs| Tunnel::Vxlan { vni, macs })
        }
    };
    Ok(Attributes { public_ip, public_ipv6, tunnel })
}

/// The conditions of a node.
pub(crate) fn conditions(node: &str, snapshot: &LeaseSnapshot) -> Vec<Unsupported> {
    let condition = |reason: Reason, message: String| Unsupported {
        object: Key::global(Kind::Node, node),
        reason,
        message,
    };
    let unreadable = snapshot.problems.iter().map(|(key, problem)| {
        condition(Reason::RouteRefused, format!("flannel's lease {key} in etcd cannot be used: {problem}"))
    });
    let unreachable = snapshot.unreachable.iter().map(|error| {
        let message =
            format!("flannel's leases cannot be read or renewed; routes to other nodes stay as they were last read: {error}");
        condition(Reason::NetworkPartNotInForce, message)
    });
    let lost = snapshot.lost.iter().map(|lost| condition(Reason::SubnetLost, lost.clone()));
    let changed = snapshot.config.iter().map(|changed| condition(Reason::FieldNotSupported, changed.clone()));
    lost.chain(changed).chain(unreachable).chain(unreadable).collect()
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use tortie_servers::programs::{Program, can_run};
    use tortie_servers::{Etcd as Servers, Proxy};
    use tortie_store::Embedded;
    use tortie_store::etcd::{Etcd, EtcdConfig};

    use super::*;
    use crate::flannel::check;
    use crate::{Extras, Platform};

    async fn store(objects: &[(Kind, &str, Value)]) -> Embedded {
        let store = Embedded::in_memory().unwrap();
        for (kind, name, spec) in objects {
            let value = json!({
                "apiVersion": "projectcalico.org/v3", "kind": kind.name(), "metadata": {"name": name}, "spec": spec,
            });
            store.create(&Key::global(*kind, *name), value).await.unwrap();
        }
        store
    }

    #[tokio::test]
    async fn pools_and_settings_are_those_of_the_configuration() {
        let pool = |cidr: &str, mode: &str| json!({"cidr": cidr, "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"});
        let v4 = |mode: &str| (Kind::IpPool, "flannel", pool("10.244.0.0/16", mode));
        let v6 = |mode: &str| (Kind::IpPool, "flannel-v6", pool("fd00:244::/48", mode));
        let felix = |vni: u32, port: u16| {
            (Kind::FelixConfiguration, "default", json!({"vxlanVNI": vni, "vxlanPort": port}))
        };
        let (vxlan, host_gw) = (json!({"Type": "vxlan"}), json!({"Type": "host-gw"}));
        for (is_dual, backend, objects, expected) in [
            (false, &vxlan, vec![v4("Always"), felix(1, 8472)], None),
            (false, &host_gw, vec![v4("Never")], None),
            (true, &host_gw, vec![v4("Never"), v6("Never")], None),
            (false, &vxlan, vec![], Some("no IPPool contains the network 10.244.0.0/16")),
            (true, &host_gw, vec![v4("Never")], Some("no IPPool contains fd00:244::/48")),
            (true, &host_gw, vec![v4("Never"), v6("Always")], Some("differ in vxlanMode")),
            (false, &vxlan, vec![v4("Never")], Some("set vxlanMode Always")),
            (false, &host_gw, vec![v4("Always")], Some("set vxlanMode Never")),
            (false, &vxlan, vec![v4("Always")], Some("set vxlanVNI 1 and vxlanPort 8472")),
            (
                false,
                &vxlan,
                vec![v4("Always"), felix(1, 4789)],
                Some("the port 8472, and FelixConfiguration has 1 and 4789"),
            ),
        ] {
            let conf = json!({
                "Network": "10.244.0.0/16", "EnableIPv6": is_dual, "IPv6Network": "fd00:244::/48", "Backend": backend,
            });
            let conf = NetConf::parse(&conf.to_string()).unwrap();
            let store = store(&objects).await;
            let refused =
                check_fit(&store, "n", "/n/config", &conf).await.err().map(|error| error.to_string());
            match expected {
                None => assert_eq!(refused, None),
                Some(expected) => {
                    let refused = refused.unwrap();
                    assert!(refused.contains(expected) && refused.contains("key /n/config"), "{refused}");
                }
            }
        }
    }

    #[test]
    fn a_node_writes_its_addresses_of_the_families_of_flannel() {
        let conf = |is_dual: bool| {
            let conf = json!({
                "Network": "10.244.0.0/16", "EnableIPv6": is_dual, "IPv6Network": "fd00:244::/48", "Backend": {"Type": "vxlan"},
            });
            NetConf::parse(&conf.to_string()).unwrap()
        };
        let (v4, v6) = (Some("192.0.2.7".to_owned()), Some("2001:db8::7".to_owned()));
        let macs = Some([MacAddress([2, 0, 0, 0, 0, 4]), MacAddress([2, 0, 0, 0, 0, 6])]);
        let both = Some("2001:db8::7".parse().unwrap());
        for (is_dual, addresses, macs, expected) in [
            (false, [v4.clone(), v6.clone()], macs, Ok(None)),
            (true, [v4.clone(), v6.clone()], macs, Ok(both)),
            (true, [v4.clone(), None], macs, Err("--ip6-autodetection-method")),
            (false, [None, v6.clone()], macs, Err("--ip-autodetection-method")),
            (false, [v6.clone(), None], macs, Err("--ip-autodetection-method")),
            // A Windows node, before it has a network.
            (true, [v4, v6], None, Ok(both)),
        ] {
            let end = OwnEnd { addresses: addresses.clone(), macs };
            match (attributes(&conf(is_dual), &end), expected) {
                (Ok(written), Ok(public_ipv6)) => {
                    let tunnel = macs.map_or(Tunnel::Pending, |macs| Tunnel::Vxlan { vni: 1, macs });
                    let public_ip = "192.0.2.7".parse().unwrap();
                    assert_eq!(written, Attributes { public_ip, public_ipv6, tunnel });
                }
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{problem}"),
                (written, _) => panic!("{addresses:?}: {written:?}"),
            }
        }
    }

    #[test]
    fn the_annotation_remembers_subnets_and_address() {
        let subnets = "10.244.7.0/24,fd00:244:0:7::/64".parse().unwrap();
        let address = "192.0.2.7".parse().unwrap();
        for (text, expected) in [
            ("10.244.7.0/24,fd00:244:0:7::/64 192.0.2.7", Some((subnets, Some(address)))),
            ("10.244.7.0/24,fd00:244:0:7::/64", Some((subnets, None))),
            ("10.244.7.0/24,fd00:244:0:7::/64 x", Some((subnets, None))),
            ("x 192.0.2.7", None),
            ("", None),
        ] {
            assert_eq!(remembered(text), expected, "{text}");
            if let Some((subnets, address)) = expected {
                assert_eq!(remembered(&memory(&subnets, address)), expected, "{text}");
            }
        }
    }

    #[tokio::test]
    async fn pods_of_the_node_keep_it_from_another_subnet() {
        let endpoint = |node: &str, net: &str| json!({"node": node, "ipNetworks": [net]});
        for (node, net, expected) in [
            ("n", "10.244.7.5/32", true),
            ("n", "fd00:244:0:7::5/128", true),
            ("other", "10.244.7.5/32", false),
            ("n", "10.244.8.5/32", false),
        ] {
            let store = Embedded::in_memory().unwrap();
            let key = Key::namespaced(Kind::WorkloadEndpoint, "d", "n-k8s-p-eth0");
            store
                .create(&key, json!({"metadata": {"name": "p"}, "spec": endpoint(node, net)}))
                .await
                .unwrap();
            let subnets = "10.244.7.0/24,fd00:244:0:7::/64".parse().unwrap();
            assert_eq!(has_pods(&store, "n", &subnets).await.unwrap(), expected, "{node} {net}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn pods_that_go_while_etcd_does_not_answer_leave_the_node_free() {
        if !can_run(&[Program::Etcd, Program::Etcdctl]) {
            return;
        }
        let servers = Servers::start().unwrap();
        let conf = r#"{"Network": "10.244.0.0/16", "Backend": {"Type": "host-gw"}}"#;
        let put = |key: &str, value: &str| {
            servers.etcdctl(&["put", &format!("/coreos.com/network/{key}"), value]).unwrap();
        };
        put("config", conf);
        put("subnets/10.244.7.0-24", r#"{"PublicIP": "192.0.2.99", "BackendType": "host-gw"}"#);
        let pool = json!({"cidr": "10.244.0.0/16", "vxlanMode": "Never", "ipipMode": "Never", "assignmentMode": "Manual"});
        let store = store(&[(Kind::IpPool, "flannel", pool)]).await;
        let pod = Key::namespaced(Kind::WorkloadEndpoint, "d", "n-k8s-p-eth0");
        let endpoint =
            json!({"metadata": {"name": "p"}, "spec": {"node": "n", "ipNetworks": ["10.244.7.5/32"]}});
        store.create(&pod, endpoint).await.unwrap();
        let proxy = Proxy::start(servers.addresses()[0]).unwrap();
        proxy.refuse(true);
        let etcd =
            EtcdConfig { endpoints: vec![format!("http://{}", proxy.address())], tls: None, login: None };
        let etcd = FlannelEtcd::new(Etcd::new(etcd).unwrap(), "/coreos.com/network");
        let end = |address: &str| OwnEnd { addresses: [Some(address.to_owned()), None], macs: None };
        let had = Some("10.244.7.0/24 192.0.2.7");
        let first = end("192.0.2.7");
        let acquired = EtcdLease::acquire(&store, "n", &etcd, &first, None, had);
        let meanwhile = async {
            while proxy.accepted() == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            store.delete(&pod, None).await.unwrap();
            proxy.refuse(false);
            std::future::pending::<()>().await;
        };
        let (lease, _) = tokio::select! {
            acquired = acquired => acquired.map_err(|error| error.to_string()).unwrap(),
            () = meanwhile => unreachable!(),
            () = tokio::time::sleep(Duration::from_secs(60)) => panic!("no lease in time"),
        };
        assert_ne!(lease.subnets.to_string(), "10.244.7.0/24", "another node has it");
        // The node has another address, and nobody has written that to the key yet.
        lease.tell("n", &end("192.0.2.8")).unwrap();
        let remembered = Some(format!("{} 192.0.2.7", lease.subnets));
        assert_eq!(lease.annotation(), (SUBNETS, remembered), "an agent that starts knows its key by it");
    }

    #[tokio::test]
    async fn leases_in_etcd_need_flannel() {
        let etcd = EtcdConfig { endpoints: vec!["http://192.0.2.1:2379".to_owned()], tls: None, login: None };
        let etcd = Some(FlannelEtcd::new(Etcd::new(etcd).unwrap(), "/n"));
        for (flannel, is_refused) in [(false, true), (true, false)] {
            let extras = Extras { flannel, flannel_etcd: etcd.clone(), ..Extras::default() };
            let refused = check("n", &extras, &Platform::Linux).err().map(|error| error.to_string());
            assert_eq!(refused.is_some(), is_refused, "{refused:?}");
        }
    }

    #[test]
    fn conditions_name_key_and_remedy() {
        let snapshot = LeaseSnapshot {
            problems: [("/n/subnets/x".to_owned(), "it is damaged".to_owned())].into(),
            unreachable: Some("refused".to_owned()),
            lost: Some("lost".to_owned()),
            config: Some("changed".to_owned()),
            ..LeaseSnapshot::default()
        };
        let found = conditions("n", &snapshot);
        let found: Vec<(String, Reason, &str)> =
            found.iter().map(|one| (one.object.to_string(), one.reason, one.message.as_str())).collect();
        let node = Key::global(Kind::Node, "n").to_string();
        assert_eq!(found[0], (node.clone(), Reason::SubnetLost, "lost"));
        assert_eq!(found[1], (node.clone(), Reason::FieldNotSupported, "changed"));
        assert!(found[2].1 == Reason::NetworkPartNotInForce && found[2].2.contains("refused"), "{found:?}");
        assert!(
            found[3].0 == node && found[3].2.contains("/n/subnets/x in etcd cannot be used: it is damaged"),
            "{found:?}"
        );
        assert!(conditions("n", &LeaseSnapshot::default()).is_empty());
    }
}

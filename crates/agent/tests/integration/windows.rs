//! The agent of an emulated Windows node: several blocks, and addresses that HNS chooses.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use serde_json::json;
use tortie_agent::{Host, HostRoutes, Platform, SavedReport, StaticRules, WindowsNetwork};
use tortie_api::{Key, Kind};
use tortie_cni::transport::Answer;
use tortie_cni::{Code, Command, Invocation};
use tortie_hcn::schema::{Acl, Namespace, NetAdapterName, OutBoundNat, SdnRoute, SetPolicy};
use tortie_hcn::selftest::{HnsReport, NoTraffic, Traffic, run};
use tortie_hcn::{Adapter, HcnExt, IpHelper, NoIpHelper, Version};
use tortie_hns_emulator::{Config, EmulatedHost, Emulator, Survives};
use tortie_ipam::{Ipam, Records};
use tortie_store::{Embedded, Endpoints, Store};

use crate::common::{Bed, FakeOs, NODE, cluster, put, saving, until};

/// A node of this version of HNS whose blocks have four addresses for pods.
pub(crate) async fn node(version: Version) -> (Bed, Arc<Emulator>) {
    node_of(cluster().await, version).await
}

/// The same of a cluster that exists.
pub(crate) async fn node_of(store: Arc<Embedded>, version: Version) -> (Bed, Arc<Emulator>) {
    let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/24", "blockSize": 29, "vxlanMode": "Always"}});
    put(&*store, &Key::global(Kind::IpPool, "default"), pool).await;
    let hns = Arc::new(Emulator::new(Config::new(version, Ipv4Addr::new(192, 0, 2, 1))));
    (agent_on(store, &hns, "Ethernet 2").await, hns)
}

/// An agent that starts on an HNS that exists, with this adapter.
pub(crate) async fn agent_on(store: Arc<dyn Endpoints>, hns: &Arc<Emulator>, adapter: &str) -> Bed {
    let ip: Arc<dyn IpHelper> = Arc::new(NoIpHelper);
    let selector = Some(adapter.parse().unwrap());
    let host = Host::new(ip.clone(), selector, Arc::new(HostRoutes::new(ip, None)));
    agent_on_host(store, hns, host).await
}

async fn agent_on_host(store: Arc<dyn Endpoints>, hns: &Arc<Emulator>, host: Host) -> Bed {
    agent_with(store, hns, host, WindowsNetwork::Overlay).await
}

/// An agent with this type of network.
async fn agent_with(
    store: Arc<dyn Endpoints>,
    hns: &Arc<Emulator>,
    host: Host,
    network: WindowsNetwork,
) -> Bed {
    let services = vec!["10.96.0.0/12".parse().unwrap()];
    let platform =
        Platform::Windows { hcn: hns.clone(), static_rules: StaticRules::default(), host, services, network };
    let bed = Bed::with_platform(store, platform, FakeOs::default());
    let socket = bed.dir.path().join("agent.sock");
    until("the agent serves", || async { UnixStream::connect(&socket).is_ok() }).await;
    bed
}

/// A call for a pod with a namespace in HNS.
pub(crate) async fn call(bed: &Bed, hns: &Emulator, command: Command, pod: &str) -> Invocation {
    bed.pod(pod, pod, json!({})).await;
    let namespace = hns.create_namespace(&Namespace::default()).unwrap();
    Invocation { netns: namespace.to_string(), ..bed.invocation(command, pod, pod) }
}

pub(crate) async fn add(bed: &Bed, hns: &Emulator, pod: &str) -> Answer {
    let call = call(bed, hns, Command::Add, pod).await;
    bed.call(call).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_block_leads_to_a_second_one() {
    let (bed, hns) = node(Config::SERVER_2022).await;
    let mut gateways = Vec::new();
    for number in 0..6 {
        let success = add(&bed, &hns, &format!("p{number}")).await.unwrap().unwrap();
        let gateway = success.routes[0].gw.unwrap();
        let (address, length) = success.ips[0].address.split_once('/').unwrap();
        let net = ipnet::IpNet::new(address.parse().unwrap(), length.parse().unwrap()).unwrap();
        assert!(length == "29" && net.contains(&gateway), "{success:?}");
        gateways.push(gateway);
    }
    assert!(gateways[..4].iter().all(|gateway| *gateway == gateways[0]), "{gateways:?}");
    assert!(gateways[4] != gateways[0] && gateways[5] == gateways[4], "{gateways:?}");
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    assert_eq!(network.subnets().count(), 2);
    let mut adapters =
        network.policies.iter().filter_map(|policy| policy.settings::<NetAdapterName>().unwrap());
    assert_eq!(adapters.next().unwrap().network_adapter_name, "Ethernet 2", "the operator's choice");
    let report = bed.current_report().await;
    assert_eq!(report["conditions"].as_array().map_or(0, Vec::len), 0, "{report}");
}

/// Networks of old versions have one subnet, so IPAM gives the node one block.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_block_is_the_end_on_an_old_version() {
    let (bed, hns) = node(Config::SERVER_2019).await;
    for number in 0..4 {
        add(&bed, &hns, &format!("p{number}")).await.unwrap();
    }
    let failure = add(&bed, &hns, "p4").await.unwrap_err();
    assert!(failure.code == Code::IPAM && failure.details.contains("no room for more blocks"), "{failure:?}");
}

/// HNS and IPAM agree on who has which address, whoever chose it.
#[tokio::test(flavor = "multi_thread")]
async fn hns_chooses_addresses_that_ipam_records() {
    let (bed, hns) = node(Config::SERVER_2022).await;
    let by_hns = |mut call: Invocation| {
        call.config.extra.insert("ipam".to_owned(), json!({}));
        call
    };
    let mut all = Vec::new();
    for (pod, chooses) in [("a", true), ("b", false), ("c", true), ("d", false)] {
        let call = call(&bed, &hns, Command::Add, pod).await;
        let call = if chooses { by_hns(call) } else { call };
        let again = bed.call(call.clone()).await.unwrap().unwrap();
        let success = bed.call(call).await.unwrap().unwrap();
        assert_eq!(success.ips, again.ips, "a repeated call");
        all.push(success.ips[0].address.split('/').next().unwrap().to_owned());
    }
    let mut distinct = all.clone();
    distinct.sort();
    distinct.dedup();
    let mut allocated = bed.allocated().await;
    allocated.sort();
    assert_eq!((distinct.len(), &distinct), (4, &allocated));
    let mut del = call(&bed, &hns, Command::Del, "c").await;
    del = by_hns(del);
    bed.call(del).await.unwrap();
    assert!(!bed.allocated().await.contains(&all[2]));
    // The block is full, and HNS has no other subnet; nothing of the attempt remains.
    add(&bed, &hns, "e").await.unwrap();
    let call = by_hns(call(&bed, &hns, Command::Add, "f").await);
    let failure = bed.call(call).await.unwrap_err();
    assert_eq!(bed.allocated().await.len(), 4, "{failure}");
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    assert_eq!(hns.endpoints_of_network(network.id).unwrap().len(), 4, "{failure}");
}

/// The plugin has got it from host-local. Its network becomes a subnet.
#[tokio::test(flavor = "multi_thread")]
async fn an_address_of_another_ipam_plugin_gets_a_subnet() {
    let (bed, hns) = node(Config::SERVER_2022).await;
    let delegated = |mut call: Invocation, nets: &str| {
        call.config.extra.insert("ipam".to_owned(), json!({"type": "host-local"}));
        call.delegated = nets.split(' ').map(|net| net.parse().unwrap()).collect();
        call
    };
    let both = delegated(call(&bed, &hns, Command::Add, "c").await, "10.77.0.3/24 fd00::3/64");
    let failure = bed.call(both).await.unwrap_err();
    assert!(
        failure.msg.contains("fd00::3 of ipam.type host-local")
            && failure.msg.contains("IPv4 addresses only"),
        "{failure:?}"
    );
    let call_a = delegated(call(&bed, &hns, Command::Add, "a").await, "10.77.0.2/24");
    let success = bed.call(call_a).await.unwrap().unwrap();
    assert_eq!(success.ips[0].address, "10.77.0.2/24");
    assert_eq!(success.routes[0].gw, Some("10.77.0.1".parse().unwrap()));
    add(&bed, &hns, "b").await.unwrap();
    let alone = delegated(call(&bed, &hns, Command::Add, "c").await, "10.78.0.2/32");
    let failure = bed.call(alone).await.unwrap_err();
    assert!(failure.details.contains("no subnet of it has the address 10.78.0.2"), "{failure:?}");
    // A plugin of an older version passes no address.
    let mut older = call(&bed, &hns, Command::Add, "c").await;
    older.config.extra.insert("ipam".to_owned(), json!({"type": "host-local"}));
    let failure = bed.call(older).await.unwrap_err();
    assert!(failure.msg.contains("passed no address of ipam.type host-local"), "{failure:?}");
}

/// What the runtime asks for goes to HNS and into the result, and the pool's `natOutgoing` decides how packets leave.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_has_the_settings_of_dns_and_of_its_pool() {
    let (bed, hns) = node(Config::SERVER_2022).await;
    let pool = json!({"metadata": {"name": "nat"}, "spec": {"cidr": "10.55.0.0/24", "natOutgoing": true, "blockSize": 29,
        "vxlanMode": "Always"}});
    put(&*bed.store, &Key::global(Kind::IpPool, "nat"), pool).await;
    let mut call = call(&bed, &hns, Command::Add, "a").await;
    call.config.extra.insert("dns".to_owned(), json!({"nameservers": ["10.0.0.1"], "domain": "d"}));
    let asked = json!({"dns": {"servers": ["10.96.0.10"], "searches": ["n.svc.cluster.local"], "options": ["ndots:5"]}});
    call.config.extra.insert("runtimeConfig".to_owned(), asked);
    let success = bed.call(call.clone()).await.unwrap().unwrap();
    let expected = json!({"nameservers": ["10.96.0.10"], "domain": "d", "search": ["n.svc.cluster.local"],
        "options": ["ndots:5"]});
    assert_eq!(serde_json::to_value(&success.dns).unwrap(), expected);
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    let endpoint = hns.endpoints_of_network(network.id).unwrap().remove(0);
    let dns = json!({"Domain": "d", "Search": ["n.svc.cluster.local"], "ServerList": ["10.96.0.10"], "Options": ["ndots:5"]});
    assert_eq!(json!(endpoint.dns), dns);
    let routes: Vec<SdnRoute> = endpoint.policies.iter().filter_map(|it| it.settings().unwrap()).collect();
    assert_eq!(routes[0].destination_prefix, "10.96.0.0/12");
    let translated = || {
        let endpoint = hns.endpoint(endpoint.id).unwrap();
        endpoint.policies.iter().any(|policy| policy.is::<OutBoundNat>())
    };
    assert!(!translated(), "its pool does not ask for it");
    let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/24", "natOutgoing": true, "blockSize": 29,
        "vxlanMode": "Always"}});
    put(&*bed.store, &Key::global(Kind::IpPool, "default"), pool).await;
    until("the pool asks for it", || async { translated() }).await;

    call.config.extra.insert("dns".to_owned(), json!({"nameservers": ["dns.example"]}));
    let failure = bed.call(call).await.unwrap_err();
    assert!(failure.msg.contains("dns.nameservers of network"), "{failure:?}");
}

/// From the selftest's file to the ACLs and the node's report.
#[tokio::test(flavor = "multi_thread")]
async fn acls_name_sets_once_a_report_of_this_build_proves_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("selftest.json");
    let build = Some("20348.2762".to_owned());
    let store = cluster().await;
    let pool = json!({"metadata": {"name": "default"}, "spec": {"cidr": "10.0.0.0/24", "blockSize": 29, "vxlanMode": "Always"}});
    put(&*store, &Key::global(Kind::IpPool, "default"), pool).await;
    let policy = json!({"metadata": {"name": "web"}, "spec": {"selector": "app == 'web'", "types": ["Ingress"],
        "ingress": [{"action": "Allow", "source": {"selector": "app == 'client'"}}]}});
    put(&*store, &Key::global(Kind::GlobalNetworkPolicy, "web"), policy).await;
    let hns = Arc::new(Emulator::new(Config::new(Config::SERVER_2022, Ipv4Addr::new(192, 0, 2, 1))));
    let host = Host::unknown().with_selftest(SavedReport::new(file.clone(), build.clone()));
    let bed = agent_on_host(store, &hns, host).await;
    for (pod, app) in [("server", "web"), ("client", "client")] {
        let call = call(&bed, &hns, Command::Add, pod).await;
        bed.pod(pod, pod, json!({"app": app})).await;
        bed.call(call).await.unwrap();
    }
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap().id;
    let named = || {
        let endpoints = hns.endpoints_of_network(network).unwrap();
        let policies = endpoints.into_iter().flat_map(|endpoint| endpoint.policies);
        let acls: Vec<Acl> = policies.filter_map(|policy| policy.settings().unwrap()).collect();
        let by_name = acls.iter().any(|acl| acl.remote_addresses.starts_with("tortie-"));
        let policies = hns.network(network).unwrap().policies;
        (by_name, policies.iter().any(|policy| policy.is::<SetPolicy>()))
    };
    let reported = async || {
        let report = bed.current_report().await;
        let conditions = report["conditions"].as_array().cloned().unwrap_or_default();
        let messages = conditions.iter().filter(|condition| condition["reason"] == "PolicySetsNotProven");
        messages.map(|condition| condition["message"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((named(), reported().await), ((false, false), vec![]), "without a report");

    let found = |traffic: &dyn Traffic, build: Option<String>| HnsReport {
        build,
        ..run(&*hns, traffic, None).unwrap()
    };
    for (report, says) in [
        (found(&NoTraffic, build.clone()), "setReading"),
        (found(&*hns, Some("20348.1".to_owned())), "20348.1"),
    ] {
        SavedReport::save(&file, &report).unwrap();
        until(says, async || reported().await.iter().any(|message| message.contains(says))).await;
        assert_eq!(named(), (false, false), "{says}");
    }
    SavedReport::save(&file, &found(&*hns, build)).unwrap();
    until("ACLs name sets", async || named() == (true, true)).await;
    until("nothing is reported", async || reported().await.is_empty()).await;
    std::fs::remove_file(&file).unwrap();
    until("ACLs list addresses", async || named() == (false, false)).await;
}

/// A node gets another type of network. With pods on the old one, the agent serves, so that they can be drained, and other nodes keep
/// sending as they can arrive. Without, it makes the new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_of_another_type_is_used_until_it_is_drained() {
    let (bed, hns) = node(Config::SERVER_2022).await;
    let call = call(&bed, &hns, Command::Add, "p").await;
    bed.call(call.clone()).await.unwrap();
    let Bed { store, agent, .. } = bed;
    agent.abort();
    let _ = agent.await;
    let bed = agent_with(store, &hns, Host::unknown(), WindowsNetwork::L2Bridge).await;
    let reasons = async || {
        let conditions = bed.report().await["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().map(|one| one["reason"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    until("the report", || async { reasons().await.contains(&"NetworkDiffers".to_owned()) }).await;
    let annotation = async |name: &str| {
        let node = bed.store.get(&Key::global(Kind::Node, NODE)).await.unwrap().unwrap().value;
        node["metadata"]["annotations"][name].clone()
    };
    assert_eq!(annotation("tortie.io/hns-network").await, json!(null));
    assert!(annotation("projectcalico.org/VXLANTunnelMACAddr").await.is_string());
    bed.call(Invocation { command: Command::Del, ..call }).await.unwrap();
    until("the new network", || async { annotation("tortie.io/hns-network").await == "L2Bridge" }).await;
    assert_eq!(annotation("projectcalico.org/VXLANTunnelMACAddr").await, json!(null));
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    assert_eq!(network.r#type, tortie_hcn::schema::NetworkMode::L2Bridge);
    let success = add(&bed, &hns, "q").await.unwrap().unwrap();
    assert!(success.ips[0].address.starts_with("10.0.0."), "{success:?}");
}

/// The kubelet, or a cloud's controller after it, reports the address. Nobody has annotated the Node.
#[tokio::test(flavor = "multi_thread")]
async fn the_network_of_a_new_node_is_on_the_adapter_with_the_reported_address() {
    let store = cluster().await;
    let key = Key::global(Kind::Node, NODE);
    put(&*store, &key, json!({"metadata": {"name": NODE}})).await;
    let adapter = |index: u32, name: &str, address: &str| Adapter {
        index,
        name: name.to_owned(),
        mac: Some([0, 0x15, 0x5d, 0, 0, index as u8]),
        mtu: 1500,
        is_up: true,
        addresses: vec![address.parse().unwrap()],
    };
    let adapters = vec![adapter(4, "Ethernet", "198.51.100.3/24"), adapter(5, "Ethernet 2", "192.0.2.1/24")];
    let machine = Arc::new(EmulatedHost::new(adapters, Vec::new()));
    let hns = Emulator::new(Config::new(Config::SERVER_2022, Ipv4Addr::new(192, 0, 2, 1)));
    let hns = Arc::new(hns.on_host(machine.clone()));
    let ip: Arc<dyn IpHelper> = machine;
    let host = Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)));
    let reporting = async {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert!(hns.network_by_name(tortie_windows::NETWORK).unwrap().is_none(), "which adapter?");
        let addresses = json!([{"type": "InternalIP", "address": "192.0.2.1"}]);
        let node = json!({"metadata": {"name": NODE}, "status": {"addresses": addresses}});
        put(&*store, &key, node).await;
    };
    let (bed, ()) = tokio::join!(agent_on_host(store.clone(), &hns, host), reporting);
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    let mut names = network.policies.iter().filter_map(|policy| policy.settings::<NetAdapterName>().unwrap());
    assert_eq!(names.next().unwrap().network_adapter_name, "Ethernet 2");
    let report = bed.current_report().await;
    assert!(!report["conditions"].to_string().contains("AdapterDiffers"), "{report}");
}

/// A cluster with pools of both families, and a Windows node with a network of type L2Bridge.
async fn bridged(version: Version, ipv6: &str, address: Option<&str>) -> (Bed, Arc<Emulator>) {
    let store = cluster().await;
    let key = Key::global(Kind::Node, NODE);
    let mut node = store.get(&key).await.unwrap().unwrap().value;
    if let Some(address) = address {
        node["metadata"]["annotations"]["projectcalico.org/IPv6Address"] = json!(address);
    }
    put(&*store, &key, node).await;
    for (name, cidr, size) in [("default", "10.0.0.0/24", 29), ("six", ipv6, 125)] {
        let pool = json!({"metadata": {"name": name}, "spec": {"cidr": cidr, "blockSize": size, "vxlanMode": "Never"}});
        put(&*store, &Key::global(Kind::IpPool, name), pool).await;
    }
    let other = Ipam::new(store.clone(), "other", BTreeMap::from([(OS.to_owned(), "windows".to_owned())]));
    other.ensure_ipv6_block().await.unwrap();
    let hns = Arc::new(Emulator::new(Config::new(version, Ipv4Addr::new(192, 0, 2, 1))));
    (agent_with(store, &hns, Host::unknown(), WindowsNetwork::L2Bridge).await, hns)
}

const OS: &str = "kubernetes.io/os";

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_an_l2bridge_network_have_both_families() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/120", Some("2001:db8::1/64")).await;
    let call = call(&bed, &hns, Command::Add, "p").await;
    let success = bed.call(call.clone()).await.unwrap().unwrap();
    let addresses: Vec<&str> = success.ips.iter().map(|ip| ip.address.as_str()).collect();
    let [four, six] = addresses[..] else { panic!("{success:?}") };
    assert!(four.starts_with("10.0.0.") && six.starts_with("fd00::") && six.ends_with("/125"), "{success:?}");
    let network = hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    assert_eq!(network.subnets().count(), 2);
    let blocks = async || {
        let affinities = bed.store.list(Kind::BlockAffinity).await.unwrap().items;
        let own =
            affinities.into_iter().filter(|stored| stored.key.name.starts_with(&format!("{NODE}/fd00:")));
        own.count()
    };
    assert_eq!(blocks().await, 1);
    // The block has three more addresses, and the network no subnet for another one.
    for number in 0..3 {
        add(&bed, &hns, &format!("p{number}")).await.unwrap();
    }
    let failure = add(&bed, &hns, "q").await.unwrap_err();
    assert!(failure.code == Code::IPAM && failure.details.contains("no room for more blocks"), "{failure:?}");
    assert_eq!(blocks().await, 1);
    bed.call(Invocation { command: Command::Del, ..call }).await.unwrap();
    let success = add(&bed, &hns, "r").await.unwrap().unwrap();
    assert_eq!(success.ips.len(), 2, "{success:?}");
}

/// The node's only IPv6 block is of a pool that gives no addresses any more. IPv4 does not depend on it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_for_which_the_ipv6_block_has_no_room_gets_ipv4() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/120", Some("2001:db8::1/64")).await;
    assert_eq!(add(&bed, &hns, "p").await.unwrap().unwrap().ips.len(), 2);
    for (name, cidr, disabled) in [("six", "fd00::/120", true), ("seven", "fd07::/120", false)] {
        let spec = json!({"cidr": cidr, "blockSize": 125, "vxlanMode": "Never", "disabled": disabled});
        put(&*bed.store, &Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}))
            .await;
    }
    // What is known of pools may be old for a moment. Each attempt ends, so the IPv4 block does not fill.
    until("a pod with IPv4 only", async || {
        let added = add(&bed, &hns, "q").await.unwrap().unwrap();
        bed.call(bed.invocation(Command::Del, "q", "q")).await.unwrap();
        added.ips.len() == 1
    })
    .await;
}

/// Windows Server 2019 has no IPv6 beside IPv4.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_an_old_version_have_ipv4_only() {
    let (bed, hns) = bridged(Config::SERVER_2019, "fd00::/120", Some("2001:db8::1/64")).await;
    let success = add(&bed, &hns, "p").await.unwrap().unwrap();
    assert_eq!(success.ips.len(), 1, "{success:?}");
    assert_eq!(without_ipv6(&bed).await, [""; 0]);
}

/// The messages about a network without IPv6.
async fn without_ipv6(bed: &Bed) -> Vec<String> {
    let report = bed.current_report().await;
    let conditions = report["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().filter(|condition| condition["reason"] == "NetworkWithoutIpv6");
    found.map(|condition| condition["message"].as_str().unwrap().to_owned()).collect()
}

/// Another node has the only block. The pods' IPv4 does not depend on it.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_ipv6_block_reports_it() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/125", Some("2001:db8::1/64")).await;
    let message = ipv4_only(&bed, &hns).await;
    assert!(message.ends_with("enlarge the IPv6 pool"), "{message}");
}

/// Other nodes have no way to such a node over IPv6.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_ipv6_address_gives_pods_ipv4_only() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/120", None).await;
    let message = ipv4_only(&bed, &hns).await;
    assert!(message.contains("the Node has no IPv6 address"), "{message}");
    // It gets one. The network is made anew when the pod has ended.
    set_ipv6_address(&bed).await;
    let says = async |text: &str| without_ipv6(&bed).await.iter().any(|message| message.contains(text));
    until("the network is in use", async || says("was made without a subnet for fd00::").await).await;
    let call = Invocation { command: Command::Del, ..bed.invocation(Command::Del, "p", "p") };
    bed.call(call).await.unwrap();
    until("a network with IPv6", async || has_ipv6(&hns)).await;
    until("nothing is reported", async || without_ipv6(&bed).await.is_empty()).await;
    assert_eq!(add(&bed, &hns, "q").await.unwrap().unwrap().ips.len(), 2);
}

fn has_ipv6(hns: &Emulator) -> bool {
    hns.network_by_name(tortie_windows::NETWORK)
        .unwrap()
        .is_some_and(|network| network.subnets().count() == 2)
}

/// Nothing of the node has to be restarted.
#[tokio::test(flavor = "multi_thread")]
async fn an_ipv6_pool_may_come_later() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/120", Some("2001:db8::1/64")).await;
    bed.store.delete(&Key::global(Kind::IpPool, "six"), None).await.unwrap();
    let Bed { store, agent, .. } = bed;
    agent.abort();
    let _ = agent.await;
    let hns = Arc::new(Emulator::new(Config::new(hns.version().unwrap(), Ipv4Addr::new(192, 0, 2, 1))));
    let ipam = Ipam::new(store.clone(), NODE, BTreeMap::new());
    let own = ipam.ipv6_block().await.unwrap().unwrap();
    Records::new(store.clone()).give_up_block(NODE, own.into(), true, None).await.unwrap();
    let bed = agent_with(store, &hns, Host::unknown(), WindowsNetwork::L2Bridge).await;
    assert!(!has_ipv6(&hns));
    let pool = json!({"metadata": {"name": "six"}, "spec": {"cidr": "fd01::/120", "blockSize": 125, "vxlanMode": "Never"}});
    put(&*bed.store, &Key::global(Kind::IpPool, "six"), pool).await;
    until("a network with IPv6", async || has_ipv6(&hns)).await;
    let success = add(&bed, &hns, "p").await.unwrap().unwrap();
    assert!(success.ips.len() == 2 && success.ips[1].address.starts_with("fd01::"), "{success:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_loses_its_ipv6_address_gives_no_more_ipv6() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/120", Some("2001:db8::1/64")).await;
    assert_eq!(add(&bed, &hns, "p").await.unwrap().unwrap().ips.len(), 2);
    let key = Key::global(Kind::Node, NODE);
    let mut node = bed.store.get(&key).await.unwrap().unwrap().value;
    node["metadata"]["annotations"].as_object_mut().unwrap().remove("projectcalico.org/IPv6Address");
    put(&*bed.store, &key, node).await;
    let says = async |text: &str| without_ipv6(&bed).await.iter().any(|message| message.contains(text));
    until("it is reported", async || says("the Node has no IPv6 address").await).await;
    assert_eq!(add(&bed, &hns, "q").await.unwrap().unwrap().ips.len(), 1);
    assert!(has_ipv6(&hns), "pods that run keep theirs");
}

/// The node keeps its block, and its network is in use without a subnet for it. Nobody misses IPv6 without a pool.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_ipv6_pool_goes_misses_no_ipv6() {
    let (bed, hns) = bridged(Config::SERVER_2022, "fd00::/120", None).await;
    ipv4_only(&bed, &hns).await;
    set_ipv6_address(&bed).await;
    let says = async |text: &str| without_ipv6(&bed).await.iter().any(|message| message.contains(text));
    until("the network is in use", async || says("was made without a subnet for fd00::").await).await;
    bed.store.delete(&Key::global(Kind::IpPool, "six"), None).await.unwrap();
    until("nothing is reported", async || without_ipv6(&bed).await.is_empty()).await;
}

/// The Node gets an IPv6 address.
async fn set_ipv6_address(bed: &Bed) {
    let key = Key::global(Kind::Node, NODE);
    let mut node = bed.store.get(&key).await.unwrap().unwrap().value;
    node["metadata"]["annotations"]["projectcalico.org/IPv6Address"] = json!("2001:db8::1/64");
    put(&*bed.store, &key, node).await;
}

/// The condition of a node whose pod gets an IPv4 address only.
async fn ipv4_only(bed: &Bed, hns: &Emulator) -> String {
    let success = add(bed, hns, "p").await.unwrap().unwrap();
    assert_eq!(success.ips.len(), 1, "{success:?}");
    let messages = without_ipv6(bed).await;
    let [message] = &messages[..] else { panic!("{messages:?}") };
    assert!(message.starts_with("pods of this node have IPv4 addresses only: "), "{message}");
    message.clone()
}

/// HNS loses ACLs in a restart while no agent runs, and no datastore answers.
#[tokio::test(flavor = "multi_thread")]
async fn pods_with_policy_that_have_lost_their_acls_are_closed_without_the_datastore() {
    let (bed, hns) = node(Config::SERVER_2022).await;
    let policy = json!({"podSelector": {"matchLabels": {"app": "closed"}}, "policyTypes": ["Ingress"]});
    let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "closed");
    let policy = json!({"metadata": {"name": "closed", "namespace": "n"}, "spec": policy});
    put(&*bed.store, &key, policy).await;
    for pod in ["closed", "free"] {
        let call = call(&bed, &hns, Command::Add, pod).await;
        bed.pod(pod, pod, json!({"app": pod})).await;
        bed.call(call).await.unwrap();
    }
    let closing = |pod: &str| {
        let policies = hns.endpoint(tortie_windows::endpoint_id(pod)).unwrap().policies;
        let acls = policies.iter().filter_map(|policy| policy.settings::<Acl>().unwrap());
        acls.filter(|acl| acl.id.ends_with("/closed")).count()
    };
    assert_eq!((closing("closed"), closing("free")), (2, 2), "every endpoint has them");
    bed.agent.abort();
    hns.restart(Survives::AllButAcls).unwrap();
    assert_eq!((closing("closed"), closing("free")), (0, 0));
    let (host, services) = (Host::unknown(), Vec::new());
    let (static_rules, network) = (StaticRules::default(), WindowsNetwork::Overlay);
    let platform = Platform::Windows { hcn: hns.clone(), static_rules, host, services, network };
    let socket = bed.dir.path().join("agent.sock");
    drop(tortie_agent::begin(NODE, &socket, &platform, &saving(bed.dir.path())).await.unwrap());
    assert_eq!((closing("closed"), closing("free")), (2, 0));
}

//! The agent of an emulated Windows node whose pods another CNI plugin connects.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::Ipv4Net;
use serde_json::json;
use tortie_agent::{
    AdapterSelector, Extras, Host, HostRoutes, Platform, PolicyOnly, StaticRules, WindowsNetwork,
};
use tortie_api::{Key, Kind};
use tortie_hcn::schema::{Modify, Namespace, RequestType, lenient};
use tortie_hcn::{Guid, HcnExt, IpHelper, NoIpHelper};
use tortie_hns_emulator::{Config, Emulator, Packet, PacketDirection, Verdict};
use tortie_store::Store;

use crate::common::{Bed, FakeOs, cluster, config, until};
use crate::kubernetes::{api_server, create_pod};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 5);

fn platform(hns: &Arc<Emulator>, adapter: Option<AdapterSelector>, services: Vec<Ipv4Net>) -> Platform {
    let ip: Arc<dyn IpHelper> = Arc::new(NoIpHelper);
    let host = Host::new(ip.clone(), adapter, Arc::new(HostRoutes::new(ip, None)));
    Platform::Windows {
        hcn: hns.clone(),
        static_rules: StaticRules::default(),
        host,
        services,
        network: WindowsNetwork::Overlay,
    }
}

fn hns() -> Arc<Emulator> {
    Arc::new(Emulator::new(Config::new(Config::SERVER_2022, Ipv4Addr::new(192, 0, 2, 1))))
}

fn extras(prefixes: &[&str], results: PathBuf) -> Extras {
    let prefixes = prefixes.iter().map(|prefix| (*prefix).to_owned()).collect();
    Extras { policy_only: Some(PolicyOnly { prefixes, results }), ..Extras::default() }
}

/// The network of the node is another plugin's.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_meaning_is_refused() {
    let usual = PolicyOnly::PREFIXES.as_slice();
    for (adapter, services, prefixes, expected) in [
        (Some("Ethernet"), vec![], usual, "remove --adapter"),
        (None, vec!["10.96.0.0/12".parse().unwrap()], usual, "remove --service-cidr"),
        (None, vec![], &["eni"], "remove --pod-interface-prefix"),
        (None, vec![], usual, "use --store kubernetes:"),
    ] {
        let (store, dir) = (cluster().await, tempfile::tempdir().unwrap());
        let platform = platform(&hns(), adapter.map(|name| name.parse().unwrap()), services);
        let config = config(dir.path(), store, platform);
        let refused =
            tortie_agent::run_with(config, extras(prefixes, dir.path().to_owned())).await.unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
}

/// What a plugin makes for a sandbox.
fn attach(hns: &Emulator) -> Guid {
    let network = json!({"Name": "azure", "Type": "L2Bridge", "Ipams": [{"Subnets": [{"IpAddressPrefix": "10.9.0.0/16",
        "Routes": [{"NextHop": "10.9.0.1", "DestinationPrefix": "0.0.0.0/0"}]}]}]});
    let network = hns.create_network(&lenient(&network.to_string()).unwrap()).unwrap();
    let document = json!({"Name": "01234567-eth0", "HostComputeNetwork": network,
        "IpConfigurations": [{"IpAddress": ADDRESS}]});
    let endpoint = hns.create_endpoint(&lenient(&document.to_string()).unwrap()).unwrap();
    let namespace = hns.create_namespace(&Namespace::default()).unwrap();
    hns.modify_namespace(namespace, &Modify::namespace_endpoint(RequestType::Add, endpoint)).unwrap();
    endpoint
}

/// Policy of a Kubernetes API takes effect on an endpoint of another plugin, and the node gets nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_another_plugin_have_policy() {
    let Some((servers, store)) = api_server().await else { return };
    let (hns, dir) = (hns(), tempfile::tempdir().unwrap());
    let results = dir.path().join("results");
    let config = config(dir.path(), store.clone(), platform(&hns, None, vec![]));
    let agent = tokio::spawn(tortie_agent::run_with(config, extras(&PolicyOnly::PREFIXES, results.clone())));
    let bed = Bed { store: store.clone(), os: FakeOs::default(), dir, agent };
    create_pod(&store, "p", &json!({"app": "a"})).await;
    let endpoint = attach(&hns);
    std::fs::create_dir(&results).unwrap();
    let result = json!({
        "kind": "cniCacheV1", "containerId": "0123456789abcdef", "ifName": "eth0",
        "cniArgs": [["K8S_POD_NAMESPACE", "n"], ["K8S_POD_NAME", "p"]],
        "result": {"ips": [{"address": format!("{ADDRESS}/16")}]},
    });
    std::fs::write(results.join("azure-0123456789abcdef-eth0"), result.to_string()).unwrap();
    let passes = || async {
        let packet = Packet {
            direction: PacketDirection::In,
            protocol: 6,
            local: ADDRESS.into(),
            remote: Ipv4Addr::new(10, 9, 1, 7).into(),
            local_port: 80,
            remote_port: 40_000,
        };
        hns.judge(endpoint, &packet).unwrap() == Verdict::Allow
    };
    until("the endpoint is closed, because the API has no address yet", || async { !passes().await }).await;
    let status = json!({"status": {"phase": "Running", "podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}});
    servers
        .kubectl(&[
            "-n",
            "n",
            "patch",
            "pod",
            "p",
            "--subresource=status",
            "--type=merge",
            "-p",
            &status.to_string(),
        ])
        .unwrap();
    until("without policy, everything passes", passes).await;
    let deny = json!({"metadata": {"name": "deny", "namespace": "n"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
    let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "deny");
    store.create(&key, deny).await.unwrap();
    until("policy denies", || async { !passes().await }).await;
    store.delete(&key, None).await.unwrap();
    until("policy ends", passes).await;
    assert_eq!(hns.networks().unwrap().len(), 1, "no network of Tortie's");
    assert!(!bed.dir.path().join("agent.sock").exists(), "nobody calls Tortie's plugin");
    assert!(!bed.agent.is_finished());
    bed.agent.abort();
}

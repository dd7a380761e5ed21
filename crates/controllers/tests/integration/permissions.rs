//! The permissions of the controllers in `deploy/rbac.yaml`: those that they use, and no others. Each one that is missing is
//! named in the log.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_controllers::Config;
use tortie_ipam::{Ipam, Request, Use};
use tortie_servers::permissions::{AuditLog, Permission, cluster_policies, role};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::CalicoGroup;
use tortie_store::{Endpoints, Store};

use crate::common::{Running, global, memory, put, until, value};
use crate::servers::{CLUSTER, open};

/// What the controllers log, of all tests in this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn get() -> &'static Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Log::default();
            let made = log.clone();
            let format = tracing_subscriber::fmt().with_ansi(false).with_writer(move || made.clone());
            format.with_max_level(tracing_subscriber::filter::LevelFilter::WARN).init();
            log
        })
    }

    fn has(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.0.lock().unwrap()).replace("\\\"", "\"").contains(text)
    }
}

/// The permissions of a role in the file, with those for the Lease, without those for Calico's other group.
fn granted(servers: &KubeApi, role: &str) -> BTreeSet<Permission> {
    let mut granted = servers.granted(&["clusterrole", role]).unwrap();
    granted.extend(servers.granted(&["role", "tortie-controllers", "-n", "tortie-system"]).unwrap());
    granted.retain(|(group, ..)| group != CalicoGroup::Native.name());
    granted
}

/// Starts controllers whose Lease is in this namespace.
fn start(store: Arc<dyn Endpoints>, kubernetes: Option<Arc<dyn Endpoints>>, namespace: &str) -> Running {
    let config = Config {
        store,
        kubernetes,
        identity: namespace.to_owned(),
        namespace: namespace.to_owned(),
        node_grace: Duration::from_secs(1),
        heeds_calico: true,
    };
    Running::new(tokio::spawn(tortie_controllers::run(config)))
}

/// The servers, with the permissions of the file and users, whose names are a letter and a number.
fn servers(letter: char, users: usize, audit: Option<&AuditLog>) -> KubeApi {
    let users = (0..users).map(|number| (format!("{letter}{number}"), Vec::new())).collect();
    let flags = audit.map(AuditLog::flags).unwrap_or_default();
    let options = KubeOptions { users, api_flags: flags, definitions: true, ..KubeOptions::default() };
    let servers = KubeApi::start(&options).unwrap();
    let plurals = [
        ("adminnetworkpolicies", "v1alpha1"),
        ("baselineadminnetworkpolicies", "v1alpha1"),
        ("clusternetworkpolicies", "v1alpha2"),
    ];
    servers.apply(&plurals.map(|(plural, version)| cluster_policies(plural, &[version])).concat()).unwrap();
    servers.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"]).unwrap();
    servers.apply(CLUSTER).unwrap();
    for (plural, version) in plurals {
        let kind = plural.replace("policies", "policy");
        let policy = format!(
            "apiVersion: policy.networking.k8s.io/{version}\nkind: {kind}\nmetadata: {{name: x}}\nspec: {{}}\n"
        );
        servers.apply(&policy).unwrap();
    }
    servers.apply(include_str!("../../../../deploy/rbac.yaml")).unwrap();
    servers
}

/// What an agent of a node leaves behind: a tunnel address, the address of a pod, a report, a host endpoint.
async fn leave_behind(admin: &Arc<dyn Endpoints>, node: &str) {
    let store: Arc<dyn Store> = admin.clone();
    let ipam = Ipam::new(store, node, BTreeMap::new());
    let tunnel = [("type", "vxlanTunnelAddress"), ("node", node)];
    let pod = [("namespace", "n"), ("pod", "gone"), ("node", node)];
    let mut block = String::new();
    for (handle, owner, intended_use) in [
        (format!("vxlan-tunnel-addr-{node}"), tunnel.as_slice(), Use::Tunnel),
        (format!("net.{node}"), pod.as_slice(), Use::Workload),
    ] {
        let owner = owner.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let request = Request { handle, owner, intended_use, ..Request::default() };
        block = ipam.assign(&request).await.unwrap().block.to_string();
    }
    // A crash leaves records of handles without addresses.
    let handle = format!("net.crashed-{node}");
    let record = json!({"handleID": handle, "block": {(block): 1, "10.1.255.0/28": 1}, "deleted": false});
    put(&**admin, &global(Kind::IpamHandle, &handle), record).await;
    let report = json!({"metadata": {"name": node}, "status": {"os": "linux", "endpoints": 0}});
    put(&**admin, &global(Kind::NodeReport, node), report).await;
    let name = format!("{node}-auto-hep");
    let labels = json!({"projectcalico.org/created-by": "calico-kube-controllers"});
    let endpoint =
        json!({"metadata": {"name": name, "labels": labels}, "spec": {"node": node, "interfaceName": "*"}});
    put(&**admin, &global(Kind::HostEndpoint, &name), endpoint).await;
}

async fn prepare(admin: &Arc<dyn Endpoints>) {
    let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.1.0.0/16", "blockSize": 28, "vxlanMode": "Always"}});
    put(&**admin, &global(Kind::IpPool, "p"), pool).await;
    let settings = json!({"metadata": {"name": "default"}, "spec": {"controllers": {"node": {"hostEndpoint": {"autoCreate": "Enabled"}}}}});
    put(&**admin, &global(Kind::KubeControllersConfiguration, "default"), settings).await;
}

/// A Service of type LoadBalancer, which gets an address of a pool of its own.
async fn balance(kubernetes: &dyn Store, store: &dyn Store, user: &str, stopped: impl Fn() -> bool) -> Key {
    let name = format!("lb-{user}");
    let spec = json!({"cidr": format!("10.9.{}.0/28", &user[1..]), "blockSize": 28, "allowedUses": ["LoadBalancer"]});
    put(store, &global(Kind::IpPool, &name), json!({"metadata": {"name": name}, "spec": spec})).await;
    let service = Key::namespaced(Kind::Service, "n", &name);
    let annotations = json!({"projectcalico.org/ipv4pools": format!("[\"{name}\"]")});
    let metadata = json!({"name": name, "namespace": "n", "annotations": annotations});
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
    put(kubernetes, &service, json!({"metadata": metadata, "spec": spec})).await;
    let ingress =
        async || value(kubernetes, &service).await["status"]["loadBalancer"]["ingress"][0]["ip"].clone();
    until("the Service has an address", async || stopped() || ingress().await.is_string()).await;
    service
}

/// What the controllers do on a Kubernetes API, until it is done or `stopped` says that they cannot.
async fn life(admin: &Arc<dyn Endpoints>, store: Arc<dyn Endpoints>, user: &str, stopped: impl Fn() -> bool) {
    let (gone, new) = (format!("gone-{user}"), format!("new-{user}"));
    leave_behind(admin, &gone).await;
    let _running = start(store, None, user);
    let exists = async |kind, name: &str| admin.get(&global(kind, name)).await.unwrap().is_some();
    until("what is left over is removed", async || stopped() || !exists(Kind::NodeReport, &gone).await).await;
    let node = global(Kind::Node, &new);
    let created = put(&**admin, &node, json!({"metadata": {"name": new}})).await;
    let endpoint = format!("{new}-auto-hep");
    until("there is a host endpoint", async || stopped() || exists(Kind::HostEndpoint, &endpoint).await)
        .await;
    let mut changed = created.value.clone();
    changed["metadata"]["labels"] = json!({"a": "b"});
    admin.update(&node, changed, &created.version).await.unwrap();
    let service = balance(&**admin, &**admin, user, &stopped).await;
    let label = async || {
        value(&**admin, &global(Kind::HostEndpoint, &endpoint)).await["metadata"]["labels"]["a"].clone()
    };
    until("the host endpoint has the label", async || stopped() || label().await == "b").await;
    until("the lease is renewed", async || {
        let lease = Key::namespaced(Kind::Lease, user, tortie_controllers::LEASE_NAME);
        let spec = value(&**admin, &lease).await["spec"].clone();
        stopped() || spec["renewTime"] != spec["acquireTime"]
    })
    .await;
    admin.delete(&node, None).await.unwrap();
    admin.delete(&service, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn controllers_on_a_kubernetes_api_use_each_of_their_permissions_and_no_other() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let audit = AuditLog::new(folder.path()).unwrap();
    let servers = servers('u', 1, Some(&audit));
    let granted = granted(&servers, "tortie-controllers");
    servers.apply(&role("u0", granted.iter())).unwrap();
    servers.kubectl(&["create", "namespace", "u0"]).unwrap();
    let admin: Arc<dyn Endpoints> = Arc::new(open(servers.kubeconfig()).await);
    prepare(&admin).await;
    let store = Arc::new(open(servers.kubeconfig_of("u0")).await);
    life(&admin, store, "u0", || false).await;
    assert_eq!(audit.differences("u0", &granted).unwrap(), Vec::<String>::new());
}

/// Each user lacks one permission. The controllers' log names it.
#[tokio::test(flavor = "multi_thread")]
async fn controllers_on_a_kubernetes_api_name_each_missing_permission() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let output = Log::get();
    let servers = servers('u', 60, None);
    let admin: Arc<dyn Endpoints> = Arc::new(open(servers.kubeconfig()).await);
    prepare(&admin).await;
    let all: Vec<Permission> = granted(&servers, "tortie-controllers").into_iter().collect();
    assert!(all.len() < 60);
    for (number, missing) in all.iter().enumerate() {
        let user = format!("u{number}");
        servers.apply(&role(&user, all.iter().filter(|permission| *permission != missing))).unwrap();
        servers.kubectl(&["create", "namespace", &user]).unwrap();
        let store = Arc::new(open(servers.kubeconfig_of(&user)).await);
        let (_, resource, verb) = missing;
        let expected = format!("User \"{user}\" cannot {verb} resource \"{resource}\"");
        // Without the watch that tells the position of a deletion, it is read from a list instead.
        if (resource.as_str(), verb.as_str()) == ("nodereports", "watch") {
            life(&admin, store, &user, || false).await;
            continue;
        }
        life(&admin, store, &user, || output.has(&expected)).await;
        assert!(output.has(&expected), "{verb} {resource} is not missed");
    }
}

/// What the controllers do for etcd, until it is done or `stopped` says that they cannot.
async fn copy(servers: &KubeApi, kubernetes: Arc<dyn Endpoints>, user: &str, stopped: impl Fn() -> bool) {
    let store = memory();
    let running = start(store.clone(), Some(kubernetes.clone()), user);
    let exists = async |key: &Key| store.get(key).await.unwrap().is_some();
    let pod = Key::namespaced(Kind::Pod, "n", "w");
    until("the pod is copied", async || stopped() || exists(&pod).await).await;
    // Objects that are gone are looked up before their copies are deleted.
    let copies = [
        ("namespaces/x", global(Kind::Profile, "kns.x")),
        ("serviceaccounts/n/x", global(Kind::Profile, "ksa.n.x")),
        ("pods/n/x", Key::namespaced(Kind::Pod, "n", "x")),
        ("services/n/x", Key::namespaced(Kind::Service, "n", "x")),
        ("endpointslices/n/x", Key::namespaced(Kind::EndpointSlice, "n", "x")),
        ("kubernetesnetworkpolicies/n/x", Key::namespaced(Kind::NetworkPolicy, "n", "knp.default.x")),
        ("adminnetworkpolicies/y", global(Kind::AdminNetworkPolicy, "y")),
        ("baselineadminnetworkpolicies/y", global(Kind::BaselineAdminNetworkPolicy, "y")),
        ("clusternetworkpolicies/y", global(Kind::ClusterNetworkPolicy, "y")),
        ("nodes/x", global(Kind::Node, "x")),
    ];
    for (from, key) in &copies {
        let value = json!({"metadata": {"name": key.name, "annotations": {tortie_store::COPIED_FROM: from}}, "spec": {}});
        put(&*store, key, value).await;
    }
    for (_, key) in &copies {
        until("the copy is deleted", async || stopped() || !exists(key).await).await;
    }
    let lease = Key::namespaced(Kind::Lease, user, tortie_controllers::LEASE_NAME);
    let admin = open(servers.kubeconfig()).await;
    let service = balance(&admin, &*store, user, &stopped).await;
    until("the lease is renewed", async || {
        let spec = value(&admin, &lease).await["spec"].clone();
        stopped() || spec["renewTime"] != spec["acquireTime"]
    })
    .await;
    drop(running);
    admin.delete(&service, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn controllers_for_etcd_use_each_of_their_permissions_and_no_other() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let audit = AuditLog::new(folder.path()).unwrap();
    let servers = servers('u', 1, Some(&audit));
    let granted = granted(&servers, "tortie-controllers-etcd");
    servers.apply(&role("u0", granted.iter())).unwrap();
    servers.kubectl(&["create", "namespace", "u0"]).unwrap();
    copy(&servers, Arc::new(open(servers.kubeconfig_of("u0")).await), "u0", || false).await;
    assert_eq!(audit.differences("u0", &granted).unwrap(), Vec::<String>::new());
}

/// Each user lacks one permission. The controllers' log names it.
#[tokio::test(flavor = "multi_thread")]
async fn controllers_for_etcd_name_each_missing_permission() {
    if !can_run(&[Program::Kube]) {
        return;
    }
    let output = Log::get();
    let servers = servers('e', 40, None);
    let all: Vec<Permission> = granted(&servers, "tortie-controllers-etcd").into_iter().collect();
    assert!(all.len() < 40);
    for (number, missing) in all.iter().enumerate() {
        let user = format!("e{number}");
        servers.apply(&role(&user, all.iter().filter(|permission| *permission != missing))).unwrap();
        servers.kubectl(&["create", "namespace", &user]).unwrap();
        let kubernetes = Arc::new(open(servers.kubeconfig_of(&user)).await);
        let (_, resource, verb) = missing;
        let expected = format!("User \"{user}\" cannot {verb} resource \"{resource}\"");
        copy(&servers, kubernetes, &user, || output.has(&expected)).await;
        assert!(output.has(&expected), "{verb} {resource} is not missed");
    }
}

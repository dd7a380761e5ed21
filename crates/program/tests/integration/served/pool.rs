//! `tortie pool migrate` against a real API server, with the real controllers of Deployments, DaemonSets and budgets and the real
//! scheduler. The test is the kubelets and agents.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::task::JoinHandle;
use tortie_api::{Key, Kind};
use tortie_ipam::{Ipam, Request, Use};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};
use tortie_store::{Endpoints, Store, StoreError};

use crate::served::support::{Cluster, text_of};

const TIMEOUT: Duration = Duration::from_secs(150);
const TUNNEL: &str = "projectcalico.org/IPv4VXLANTunnelAddr";
const NODES: [&str; 3] = ["one", "three", "two"];

const BINDINGS: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: one-of-the-test}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tortie-operator}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: operator}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: other-of-the-test}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tortie-pool-migration}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: operator}]
";

const CLUSTER: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 5
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {terminationGracePeriodSeconds: 1, containers: [{name: c, image: i}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: log, namespace: default}
spec:
  selector: {matchLabels: {app: log}}
  template:
    metadata: {labels: {app: log}}
    spec: {terminationGracePeriodSeconds: 1, containers: [{name: c, image: i}]}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web, namespace: default}
spec: {minAvailable: 4, selector: {matchLabels: {app: web}}}
---
apiVersion: crd.projectcalico.org/v1
kind: IPPool
metadata: {name: old}
spec: {cidr: 10.1.0.0/24, blockSize: 28, vxlanMode: Always}
";

fn global(kind: Kind, name: &str) -> Key {
    Key::global(kind, name)
}

fn in_net(net: &str, address: &str) -> bool {
    net.parse::<ipnet::IpNet>()
        .unwrap()
        .contains(&address.split('/').next().unwrap().parse::<IpAddr>().unwrap())
}

/// IPAM as the agent of a node has it.
fn ipam(store: &Arc<Kubernetes>, node: &str) -> Ipam {
    Ipam::new(store.clone(), node, BTreeMap::new())
}

fn request(handle: String, owner: &[(&str, &str)], intended_use: Use) -> Request {
    let owner = owner.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Request { handle, owner, intended_use, ..Request::default() }
}

/// The kubelets and agents of all nodes.
struct Nodes {
    store: Arc<Kubernetes>,
    servers: Arc<KubeApi>,
    /// The Nodes as their agents have seen them last.
    seen: BTreeMap<String, String>,
    /// When the kubelets have renewed their Leases last.
    renewed: Option<Instant>,
}

impl Nodes {
    async fn play(&mut self) -> Result<(), StoreError> {
        self.renew_leases();
        for pod in self.store.list(Kind::Pod).await?.items {
            let Some(node) = pod.value["spec"]["nodeName"].as_str().map(str::to_owned) else { continue };
            let handle = format!("k8s-pod-network.{}", pod.value["metadata"]["uid"].as_str().unwrap());
            if !pod.value["metadata"]["deletionTimestamp"].is_null() {
                ipam(&self.store, &node).release(&handle).await.unwrap();
                let name = pod.key.name.as_str();
                let _ = self.servers.kubectl(&[
                    "delete",
                    "pod",
                    name,
                    "-n",
                    "default",
                    "--grace-period=0",
                    "--force",
                ]);
            } else if pod.value["status"]["podIP"].is_null() {
                let owner =
                    [("namespace", "default"), ("pod", pod.key.name.as_str()), ("node", node.as_str())];
                let address = ipam(&self.store, &node).assign(&request(handle, &owner, Use::Workload)).await;
                let address = address.unwrap().address.to_string();
                let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
                    "conditions": [{"type": "Ready", "status": "True"}]});
                let patch = json!({ "status": status }).to_string();
                let name = pod.key.name.as_str();
                let _ = self.servers.kubectl(&[
                    "patch",
                    "pod",
                    name,
                    "-n",
                    "default",
                    "--subresource=status",
                    "--type=merge",
                    "-p",
                    &patch,
                ]);
            }
        }
        for node in NODES {
            self.agent(node).await?;
        }
        Ok(())
    }

    /// Without Leases, the controllers take the nodes for lost after 50 s and their pods for not ready, so that the budget forbids
    /// each eviction.
    fn renew_leases(&mut self) {
        if self.renewed.is_some_and(|last| last.elapsed() < Duration::from_secs(10)) {
            return;
        }
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ");
        let leases = NODES.map(|node| {
            format!(
                "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {{name: {node}, namespace: kube-node-lease}}\n\
                 spec: {{holderIdentity: {node}, leaseDurationSeconds: 40, renewTime: \"{now}\"}}\n"
            )
        });
        // Their namespace may not exist yet.
        if self.servers.apply(&leases.join("---\n")).is_ok() {
            self.renewed = Some(Instant::now());
        }
    }

    /// An agent looks at its Node when that has changed.
    async fn agent(&mut self, node: &str) -> Result<(), StoreError> {
        let stored = self.store.get(&global(Kind::Node, node)).await?.unwrap();
        let version = stored.version.as_str().to_owned();
        if self.seen.get(node) == Some(&version) {
            return Ok(());
        }
        let tunnel = request(
            format!("vxlan-tunnel-addr-{node}"),
            &[("node", node), ("type", "vxlanTunnelAddress")],
            Use::Tunnel,
        );
        let address = ipam(&self.store, node).assign(&tunnel).await.unwrap().address.to_string();
        if stored.value["metadata"]["annotations"][TUNNEL] != address.as_str() {
            self.store.annotate_node(node, &BTreeMap::from([(TUNNEL, Some(address))])).await?;
        } else {
            self.seen.insert(node.to_owned(), version);
        }
        Ok(())
    }
}

struct Bed {
    servers: Arc<KubeApi>,
    store: Arc<Kubernetes>,
    playing: JoinHandle<()>,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.playing.abort();
    }
}

impl Bed {
    async fn start() -> Option<Self> {
        if !can_run(&[Program::Kube]) {
            return None;
        }
        let users = vec![("operator".to_owned(), Vec::new())];
        let options = KubeOptions {
            users,
            controllers: true,
            scheduler: true,
            definitions: true,
            ..KubeOptions::default()
        };
        let servers = Arc::new(KubeApi::start(&options).unwrap());
        servers.apply(include_str!("../../../../../deploy/rbac.yaml")).unwrap();
        servers.apply(&documented_role()).unwrap();
        servers.apply(BINDINGS).unwrap();
        for node in NODES {
            let labels = format!("{{kubernetes.io/os: linux, kubernetes.io/hostname: {node}}}");
            let spec = if node == "two" { "{unschedulable: true}" } else { "{}" };
            servers
                .apply(&format!(
                    "apiVersion: v1\nkind: Node\nmetadata: {{name: {node}, labels: {labels}}}\nspec: {spec}"
                ))
                .unwrap();
            let status = json!({"allocatable": {"pods": "50"}, "capacity": {"pods": "50"},
                "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": jiff::Timestamp::now().to_string()}]});
            let patch = json!({ "status": status }).to_string();
            servers
                .kubectl(&["patch", "node", node, "--subresource=status", "--type=merge", "-p", &patch])
                .unwrap();
            let _ = servers.kubectl(&["taint", "node", node, "node.kubernetes.io/not-ready-"]);
        }
        servers.apply(CLUSTER).unwrap();
        let config = KubernetesConfig::Kubeconfig(servers.kubeconfig());
        let store = Arc::new(Kubernetes::new(&config).await.unwrap());
        let mut nodes =
            Nodes { store: store.clone(), servers: servers.clone(), seen: BTreeMap::new(), renewed: None };
        let playing = tokio::spawn(async move {
            loop {
                // Pods come and go meanwhile.
                let _ = nodes.play().await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        Some(Self { servers, store, playing })
    }

    async fn until(&self, what: &str, mut condition: impl AsyncFnMut() -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !condition().await {
            assert!(Instant::now() < end, "{what}: {:#?}", self.pods().await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Name, node and address of each pod that is not ending.
    async fn pods(&self) -> Vec<(String, String, String)> {
        let pods = self.store.list(Kind::Pod).await.unwrap().items;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let pods = pods.iter().filter(|pod| pod.value["metadata"]["deletionTimestamp"].is_null());
        pods.map(|pod| {
            (pod.key.name.clone(), text(&pod.value["spec"]["nodeName"]), text(&pod.value["status"]["podIP"]))
        })
        .collect()
    }

    async fn has_all(&self, net: &str) -> bool {
        let pods = self.pods().await;
        pods.len() == 8 && pods.iter().all(|(_, _, address)| !address.is_empty() && in_net(net, address))
    }

    fn tortie(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tortie"));
        let store = format!("kubernetes:{}", self.servers.kubeconfig_of("operator").display());
        command
            .args(["pool", "migrate", "old", "new", "--cidr", "10.2.0.0/24", "--store", &store])
            .args(more);
        command
    }

    async fn run(&self, more: &[&str]) -> (i32, String) {
        let output: Output = self.tortie(more).output().await.unwrap();
        (output.status.code().unwrap(), text_of(&output))
    }

    /// Runs it until it has printed a line, and kills it then. `None` if it has ended itself, otherwise the line.
    async fn run_for_a_line(&self) -> Result<String, (Option<i32>, String)> {
        let mut child = self.tortie(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next_line().await.unwrap();
        // A step that follows at once is killed somewhere in it.
        tokio::time::sleep(Duration::from_millis(30)).await;
        match (first, child.try_wait().unwrap()) {
            (Some(line), None) => {
                child.kill().await.unwrap();
                Ok(line)
            }
            (line, _) => {
                let output = child.wait_with_output().await.unwrap();
                Err((output.status.code(), line.unwrap_or_default() + &text_of(&output)))
            }
        }
    }

    /// A run that is refused in the middle says what the runs before have closed and cordoned.
    async fn assert_says_what_is_left(&self) {
        let part = "apiVersion: crd.projectcalico.org/v1\nkind: IPPool\nmetadata: {name: part}\nspec: {cidr: 10.1.0.0/25, disabled: true}";
        self.servers.apply(part).unwrap();
        let (code, said) = self.run(&[]).await;
        self.servers.kubectl(&["delete", "ippools.crd.projectcalico.org", "part"]).unwrap();
        assert_eq!(code, 2, "{said}");
        for part in [
            "refused:",
            "10.1.0.0/25 of IPPool part overlap",
            "IPPool old stays closed; cordoned by the migration: one. Run the command again to continue",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    /// The role of an operator is not enough, and nothing has changed when the command says so.
    async fn assert_needs_the_documented_role(&self) {
        self.servers.kubectl(&["delete", "clusterrolebinding", "other-of-the-test"]).unwrap();
        let forbidden = "must not create pods/eviction; must not update nodes; bind the ClusterRoles";
        let mut said = String::new();
        // The authorizer of the API server learns of it a moment later. Otherwise the pool does not fit.
        self.until("the role is missed", async || {
            said = self.run(&["--block-size", "24"]).await.1;
            said.contains(forbidden)
        })
        .await;
        let old = self.store.get(&global(Kind::IpPool, "old")).await.unwrap().unwrap();
        assert!(old.value["spec"]["disabled"] != true, "{said}");
        assert!(self.store.get(&global(Kind::IpPool, "new")).await.unwrap().is_none(), "{said}");
        self.servers.apply(BINDINGS).unwrap();
        self.until("the role is there", async || {
            !self.run(&["--block-size", "24"]).await.1.contains("must not")
        })
        .await;
    }

    async fn node(&self, name: &str) -> Value {
        self.store.get(&global(Kind::Node, name)).await.unwrap().unwrap().value
    }

    async fn assert_moved(&self) {
        self.until("all pods run in the new pool", async || self.has_all("10.2.0.0/24").await).await;
        for node in NODES {
            let value = self.node(node).await;
            assert_eq!(value["spec"]["unschedulable"] == true, node == "two", "{value}");
            let annotations = &value["metadata"]["annotations"];
            assert!(annotations["tortie.io/pool-migration"].is_null(), "{annotations}");
            assert!(in_net("10.2.0.0/24", annotations[TUNNEL].as_str().unwrap()), "{annotations}");
        }
        let names = async |kind| -> Vec<String> {
            self.store.list(kind).await.unwrap().items.into_iter().map(|stored| stored.key.name).collect()
        };
        assert_eq!(names(Kind::IpPool).await, ["new"]);
        for kind in [Kind::IpamBlock, Kind::BlockAffinity] {
            let all = names(kind).await;
            assert!(!all.is_empty() && all.iter().all(|name| !name.contains("10.1.0.")), "{all:?}");
        }
    }
}

/// The role in docs/operate.md.
fn documented_role() -> String {
    let text = include_str!("../../../../../docs/operate.md");
    let role =
        text.split("\n\n").find(|part| part.contains("metadata: {name: tortie-pool-migration}")).unwrap();
    role.lines().map(|line| line.strip_prefix("    ").unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_a_kubernetes_api_is_replaced_while_budgets_hold() {
    let Some(bed) = Bed::start().await else { return };
    bed.until("all pods run", async || bed.has_all("10.1.0.0/24").await).await;
    bed.until("the agents announce", async || {
        let mut all = true;
        for node in NODES {
            all &= bed.node(node).await["metadata"]["annotations"][TUNNEL].is_string();
        }
        all
    })
    .await;
    bed.assert_needs_the_documented_role().await;
    let (code, refused) = bed.run(&["--block-size", "24"]).await;
    assert!(code == 2 && refused.contains("IPPool new: spec.blockSize: the nodes need"), "{code}: {refused}");
    let (code, planned) = bed.run(&["--dry-run"]).await;
    for part in [
        "create IPPool new",
        "cordon node one",
        "evict from node two: default/log-",
        "delete IPPool old",
        "nothing was changed",
    ] {
        assert!(code == 0 && planned.contains(part), "{part}: {planned}");
    }
    assert!(bed.has_all("10.1.0.0/24").await);

    // At least four of five are there at any time.
    let (store, servers) = (bed.store.clone(), bed.servers.clone());
    let fewest = tokio::spawn(async move {
        let _servers = servers;
        let mut fewest = usize::MAX;
        loop {
            if let Ok(pods) = store.list(Kind::Pod).await {
                let ready = pods.items.iter().filter(|pod| {
                    let is_web = pod.value["metadata"]["labels"]["app"] == "web";
                    is_web
                        && pod.value["metadata"]["deletionTimestamp"].is_null()
                        && !pod.value["status"]["podIP"].is_null()
                });
                fewest = fewest.min(ready.count());
            }
            if store.get(&global(Kind::IpPool, "old")).await.is_ok_and(|old| old.is_none()) {
                return fewest;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let (code, said) = bed.run(&["--timeout", "60"]).await;
    assert_eq!(code, 0, "{said}");
    for part in [
        "create IPPool new",
        "close IPPool old",
        "cordon node one",
        "stays for now: Cannot evict pod as it would violate the pod's disruption budget. The disruption budget web needs 4 healthy pods",
        "is cordoned by the migration; if new pods can run only there, uncordon it (`kubectl uncordon ",
        "uncordon node one: it is done",
        "node two is done",
        "delete IPPool old: the migration to new is done",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("cordon node two"), "{said}");
    assert!(fewest.await.unwrap() >= 4);
    bed.assert_moved().await;
    let (code, again) = bed.run(&[]).await;
    assert!(code == 2 && again.contains("IPPool old does not exist; if an earlier run has ended"), "{again}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_is_killed_after_each_line_goes_on() {
    let Some(bed) = Bed::start().await else { return };
    bed.until("all pods run", async || bed.has_all("10.1.0.0/24").await).await;
    // Each step is a process of its own, and beside other tests each takes seconds.
    let (end, mut kills, mut is_refused) = (Instant::now() + 4 * TIMEOUT, 0, false);
    let (code, last) = loop {
        assert!(Instant::now() < end, "{:?}", bed.pods().await);
        match bed.run_for_a_line().await {
            Ok(line) if line.starts_with("evict from node one") && !is_refused => {
                is_refused = true;
                bed.assert_says_what_is_left().await;
            }
            Ok(_) => kills += 1,
            Err(ended) => break ended,
        }
    };
    assert!(kills > 10 && is_refused, "{kills}");
    // A run may reach the end before the test kills it, whatever its first line says.
    assert!(code == Some(0) || last.contains("an earlier run has ended"), "{code:?} {last}");
    bed.assert_moved().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_kubernetes_api_it_prints_the_steps_only() {
    let cluster = Cluster::new().await;
    let spec = json!({"cidr": "10.1.0.0/24", "vxlanMode": "Always"});
    cluster.put(&global(Kind::IpPool, "old"), json!({"metadata": {"name": "old"}, "spec": spec})).await;
    let run = async |more: &[&str]| {
        let arguments = [&["pool", "migrate", "old", "new", "--cidr", "10.2.0.0/24"], more].concat();
        let output = cluster.tortie(&arguments).output().await.unwrap();
        (output.status.code().unwrap(), text_of(&output))
    };
    let (code, refused) = run(&[]).await;
    assert!(
        code == 2 && refused.contains("use --store kubernetes[:KUBECONFIG]. --dry-run prints the steps"),
        "{refused}"
    );
    let (code, planned) = run(&["--dry-run"]).await;
    assert!(
        code == 0 && planned.contains("delete IPPool old") && planned.contains("3 steps (dry run"),
        "{planned}"
    );
    let lock = json!({"metadata": {"name": "default"}, "spec": {"datastoreReady": false}});
    cluster.put(&global(Kind::ClusterInformation, "default"), lock).await;
    let (code, locked) = run(&["--dry-run"]).await;
    assert!(code == 2 && locked.contains("tortie datastore unlock"), "{locked}");
}

//! An emulated Windows node that joins a cluster whose other nodes are not of the lab.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tortie_hcn::schema::Query;
use tortie_hcn::{HcnExt, Kind, RemoteHcn};
use tortie_kernel::namespace::mount;
use tortie_store::Source;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

use crate::cluster::{NODE_TIMEOUT, wait_until_it_takes_pods};
use crate::dir::Lock;
use crate::kubelet::Kubelet;
use crate::node::{Node, Os, StoreAccess};
use crate::probe::{self, Probe};
use crate::sandbox::PodApi;
use crate::services;
use crate::supervise::link_binaries;
use crate::{LabDir, LabError, Progress, runtime};

/// The node that joins, and what it needs.
#[derive(Debug)]
pub struct Joining {
    /// Its name.
    pub name: String,
    /// Its number on the underlay, from 0: the address of number 2 is 192.0.2.13.
    pub number: usize,
    /// The program `tortie`.
    pub program: PathBuf,
    /// The user of its kubelet.
    pub kubelet: PathBuf,
    /// The user of its agent, which is also that of its runtime and proxy.
    pub agent: PathBuf,
}

/// A node that has joined.
pub struct JoinedNode {
    dir: LabDir,
    node: Node,
    hcn: Arc<RemoteHcn>,
    tasks: Vec<JoinHandle<()>>,
    _lock: Lock,
}

impl JoinedNode {
    /// Starts the node on the bridge `underlay` of the current network namespace, with its runtime and its proxy, and registers
    /// it. Its taint `os=windows` keeps pods away that do not tolerate it. Must be called in a mount namespace of its own
    /// ([`enter_inside`](crate::enter_inside)).
    ///
    /// # Errors
    /// Something did not start; the error contains the log of the process concerned.
    pub async fn start(dir: LabDir, joining: &Joining) -> Result<Self, LabError> {
        let lock = dir.take()?;
        link_binaries(&dir, &joining.program)?;
        mount::tmpfs(&dir.netns_folder())?;
        let mut node = Node::new(&dir, joining.name.clone(), Os::Windows, joining.number, &[])?;
        let kubelet = Kubelet::new(&joining.kubelet).await?;
        let mut object = node.object();
        object["spec"]["taints"] = json!([{"key": "os", "value": "windows", "effect": "NoSchedule"}]);
        kubelet.register(&object, node.os.name(), &node.address.to_string()).await?;
        node.start_hns(&dir)?;
        node.start_agent(&dir, &StoreAccess::Kubeconfig(joining.agent.clone()), &[])?;
        wait_until_it_takes_pods(&dir, &mut node, Instant::now() + NODE_TIMEOUT).await?;

        let store = Kubernetes::new(&KubernetesConfig::Kubeconfig(joining.agent.clone())).await?;
        let store: Arc<dyn Source> = Arc::new(store);
        let hcn = Arc::new(node.hcn(&dir));
        let mut tasks = node.watch();
        tasks.push(kubelet.keep_leases(vec![node.name.clone()]));
        let api = PodApi::Kubernetes(kubelet);
        tasks.push(runtime::start(dir.clone(), store.clone(), api, vec![node.for_runtime(&dir)]));
        tasks.push(services::start(store, vec![(node.name.clone(), hcn.clone())]).await?);
        Ok(Self { dir, node, hcn, tasks, _lock: lock })
    }

    /// Tries a connection from a pod of the node, and says in words what became of it. The page should contain the text.
    pub async fn probe(&self, namespace: &str, pod: &str, to: SocketAddr, expect: &str) -> String {
        let netns = self.dir.pod_netns(namespace, pod);
        let probe = Probe { netns, to, expect: expect.to_owned() };
        let results = probe::run_all(vec![probe], &Progress::new()).await;
        let words = results.into_iter().map(|result| match result.note {
            Some(note) => format!("{:?}: {}", result.verdict, note.replace('\n', " ")),
            None => format!("{:?}", result.verdict),
        });
        words.collect()
    }

    /// The number of endpoints of pods that the node's HNS has.
    ///
    /// # Errors
    /// HNS does not answer.
    pub async fn endpoints(&self) -> Result<usize, LabError> {
        let problem = |problem: String| LabError::Hns { node: self.node.name.clone(), problem };
        let hcn = self.hcn.clone();
        let listed = tokio::task::spawn_blocking(move || {
            let mut count = 0;
            for id in hcn.enumerate(Kind::Endpoint, &Query::default())? {
                count += usize::from(!hcn.endpoint(id)?.is_remote());
            }
            Ok::<_, tortie_hcn::Error>(count)
        });
        listed.await.map_err(|error| problem(error.to_string()))?.map_err(|error| problem(error.to_string()))
    }

    /// Stops the node's programs. Its object stays in the cluster, and its folder until another node uses it or somebody removes
    /// it.
    pub async fn stop(mut self) {
        for task in self.tasks.drain(..).rev() {
            task.abort();
            let _ = task.await; // only that it was aborted
        }
        self.node.stop().await;
    }
}

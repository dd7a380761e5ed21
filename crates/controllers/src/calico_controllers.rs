//! Calico's kube-controllers beside Tortie's. While they run, Tortie's controllers leave to them what both do: two programs that write the
//! same objects would undo each other's work wherever they disagree.

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::sleep;
use tortie_api::calico::KubeControllersConfiguration;
use tortie_api::{Key, Kind};
use tortie_store::{Endpoints, Interest, Store, StoreError};

/// The name of their Deployment.
pub const NAME: &str = "calico-kube-controllers";
/// The namespaces in which Calico's manifests and operator install it.
pub const NAMESPACES: [&str; 2] = ["calico-system", "kube-system"];
/// The time between two looks.
const PERIOD: Duration = Duration::from_secs(2);
/// How long they may be without a ready pod, as during an update, before Tortie's controllers do their work. Afterwards, they must be ready for as
/// long: one that crashes again and again does not do the work, and each change costs Tortie's controllers what they know.
const UNREADY_GRACE: Duration = Duration::from_secs(60);

/// A controller of Calico's kube-controllers (`kube-controllers/pkg/config/runconfig.go`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CalicoController {
    /// Gives addresses to Services.
    LoadBalancer,
    /// Copies namespaces to Profiles.
    Namespace,
    /// Cleans up after nodes, and creates host endpoints.
    Node,
    /// Copies policies.
    Policy,
    /// Copies service accounts to Profiles.
    ServiceAccount,
    /// Copies the labels of pods to their endpoints.
    WorkloadEndpoint,
}

impl CalicoController {
    const ALL: [Self; 6] = [
        Self::LoadBalancer,
        Self::Namespace,
        Self::Node,
        Self::Policy,
        Self::ServiceAccount,
        Self::WorkloadEndpoint,
    ];

    /// Its section in KubeControllersConfiguration.
    fn section(self) -> &'static str {
        match self {
            Self::LoadBalancer => "loadBalancer",
            Self::Namespace => "namespace",
            Self::Node => "node",
            Self::Policy => "policy",
            Self::ServiceAccount => "serviceAccount",
            Self::WorkloadEndpoint => "workloadEndpoint",
        }
    }

    /// Returns whether it works where the Kubernetes API is the datastore: nothing is copied there.
    fn works_on_kubernetes(self) -> bool {
        matches!(self, Self::LoadBalancer | Self::Node)
    }
}

/// Calico's kube-controllers that run on the datastore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CalicoControllers {
    /// The namespace of their Deployment.
    pub namespace: String,
    /// What they do.
    pub controllers: BTreeSet<CalicoController>,
}

impl CalicoControllers {
    /// Returns whether Tortie leaves this work to them.
    pub(crate) fn run(running: Option<&Self>, controller: CalicoController) -> bool {
        running.is_some_and(|running| running.controllers.contains(&controller))
    }
}

impl fmt::Display for CalicoControllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sections: Vec<&str> = self.controllers.iter().map(|controller| controller.section()).collect();
        let Self { namespace, .. } = self;
        write!(
            f,
            "Deployment {namespace}/{NAME} of Calico is ready and runs the controllers {}, so Tortie's controllers leave this work to it. To \
             change over, run tortie calico stop, or scale it to 0 if Calico's operator would not take that back; --ignore-calico-controllers ends \
             the waiting",
            sections.join(", ")
        )
    }
}

/// The state of a Deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readiness {
    /// It does not exist, or is scaled to zero.
    Stopped,
    /// It has no ready pod.
    Unready,
    Ready,
}

fn readiness(deployment: Option<&Value>) -> Readiness {
    let Some(deployment) = deployment else { return Readiness::Stopped };
    // A Deployment without this field has one replica.
    let wanted = deployment["spec"].get("replicas").and_then(Value::as_u64).unwrap_or(1);
    let ready = deployment["status"].get("readyReplicas").and_then(Value::as_u64).unwrap_or(0);
    match (wanted, ready) {
        (0, _) => Readiness::Stopped,
        (_, 0) => Readiness::Unready,
        _ => Readiness::Ready,
    }
}

/// Returns whether the Deployment's datastore can be this one, of which `on_kubernetes` says whether it is the Kubernetes API. Without the variable it
/// is etcd (`kube-controllers/pkg/config/config.go`).
fn may_use(deployment: &Value, on_kubernetes: bool) -> bool {
    let containers = deployment.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let containers: Vec<&Value> = containers.into_iter().flatten().collect();
    let all =
        |field| containers.iter().filter_map(move |container| container.get(field)?.as_array()).flatten();
    let is_hidden = all("envFrom").next().is_some();
    match all("env").find(|variable| variable["name"] == "DATASTORE_TYPE") {
        // The value may come from a ConfigMap.
        Some(variable) => match variable["value"].as_str() {
            Some(kind) => (kind == "kubernetes") == on_kubernetes,
            None => true,
        },
        None => is_hidden || !on_kubernetes,
    }
}

/// What Calico's kube-controllers run, by what they have written to the datastore before they began. In etcd, a missing status shows that
/// they use another one. `None` stands for a missing object.
fn controllers(configuration: Option<&Value>, on_kubernetes: bool) -> BTreeSet<CalicoController> {
    let running = configuration.and_then(|value| value.pointer("/status/runningConfig/controllers"));
    let runs = |controller: &CalicoController| match running {
        Some(running) => running.get(controller.section()).is_some_and(Value::is_object),
        None => on_kubernetes && *controller == CalicoController::Node,
    };
    let can_work = |controller: &CalicoController| !on_kubernetes || controller.works_on_kubernetes();
    CalicoController::ALL.into_iter().filter(can_work).filter(runs).collect()
}

/// What is known of the Deployments.
#[derive(Debug, Default)]
struct Observer {
    /// The last state that was seen.
    running: Option<CalicoControllers>,
    /// Since when they have no ready pod.
    unready_since: Option<Instant>,
    /// Since when they have one.
    ready_since: Option<Instant>,
    /// True if they were given up, because they had none for too long.
    given_up: bool,
}

impl Observer {
    /// Takes the Deployments, each with its namespace, and KubeControllersConfiguration into account.
    fn observe(
        &mut self,
        deployments: &[(&str, Option<Value>)],
        configuration: Option<&Value>,
        on_kubernetes: bool,
        now: Instant,
    ) -> Option<CalicoControllers> {
        let in_state = |wanted: Readiness| {
            let mut candidates =
                deployments.iter().filter_map(|(namespace, value)| Some((namespace, value.as_ref()?)));
            candidates.find(|(_, value)| may_use(value, on_kubernetes) && readiness(Some(value)) == wanted)
        };
        if let Some((namespace, _)) = in_state(Readiness::Ready) {
            self.unready_since = None;
            let since = *self.ready_since.get_or_insert(now);
            if self.given_up && now.saturating_duration_since(since) < UNREADY_GRACE {
                return None;
            }
            self.given_up = false;
            let controllers = controllers(configuration, on_kubernetes);
            self.running = (!controllers.is_empty())
                .then(|| CalicoControllers { namespace: (*namespace).to_owned(), controllers });
        } else if in_state(Readiness::Unready).is_some() {
            self.ready_since = None;
            let since = *self.unready_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= UNREADY_GRACE {
                self.given_up |= self.running.take().is_some();
            }
        } else {
            *self = Self::default();
        }
        self.running.clone()
    }
}

/// Calico's kube-controllers that are ready: of these Deployments, each with its namespace, and by KubeControllersConfiguration of the
/// datastore. `on_kubernetes` says whether that is the Kubernetes API.
#[must_use]
pub fn ready_controllers(
    deployments: &[(&str, Option<Value>)],
    configuration: Option<&Value>,
    on_kubernetes: bool,
) -> Option<CalicoControllers> {
    Observer::default().observe(deployments, configuration, on_kubernetes, Instant::now())
}

/// Does the work again whenever it changes what Calico's kube-controllers do. The work is dropped then, and begins anew.
pub(crate) async fn run<F: Future<Output = ()>>(
    store: &dyn Endpoints,
    truth: &dyn Store,
    work: impl Fn(Option<CalicoControllers>) -> F,
) {
    let mut watcher = Watcher { store, truth, observer: Observer::default(), failed: false };
    let mut running = watcher.first().await;
    report(running.as_ref(), None);
    loop {
        let next = tokio::select! {
            () = work(running.clone()) => return,
            next = watcher.next(running.as_ref()) => next,
        };
        report(next.as_ref(), running.as_ref());
        running = next;
    }
}

fn report(running: Option<&CalicoControllers>, before: Option<&CalicoControllers>) {
    match (running, before) {
        (Some(running), _) => tracing::warn!("{running}"),
        (None, Some(_)) => {
            tracing::info!("{NAME} of Calico do not run any more; Tortie's controllers do their work")
        }
        (None, None) => {}
    }
}

struct Watcher<'a> {
    store: &'a dyn Endpoints,
    /// Has the Deployments.
    truth: &'a dyn Store,
    observer: Observer,
    /// True if the last look failed.
    failed: bool,
}

impl Watcher<'_> {
    /// The state at the start. While nothing is known, nothing may be written, unless Tortie may not read Deployments at all.
    async fn first(&mut self) -> Option<CalicoControllers> {
        loop {
            match self.look().await {
                Ok(running) => return running,
                Err(StoreError::Forbidden(_)) => return None,
                Err(_) => sleep(PERIOD).await,
            }
        }
    }

    /// Waits until the state differs.
    async fn next(&mut self, before: Option<&CalicoControllers>) -> Option<CalicoControllers> {
        loop {
            sleep(PERIOD).await;
            let running = match self.look().await {
                Ok(running) => running,
                // Who may not see them any more cannot see their end either.
                Err(StoreError::Forbidden(_)) => None,
                Err(_) => continue,
            };
            if running.as_ref() != before {
                return running;
            }
        }
    }

    async fn look(&mut self) -> Result<Option<CalicoControllers>, StoreError> {
        let looked = self.read().await;
        match &looked {
            Ok(_) => self.failed = false,
            Err(error) if !self.failed => {
                self.failed = true;
                tracing::warn!(%error, "the controllers cannot see whether {NAME} of Calico run; they retry, and do all of their work if it is forbidden to see");
            }
            Err(_) => {}
        }
        looked
    }

    async fn read(&mut self) -> Result<Option<CalicoControllers>, StoreError> {
        let mut deployments = Vec::new();
        for namespace in NAMESPACES {
            let stored = self.truth.get(&Key::namespaced(Kind::Deployment, namespace, NAME)).await?;
            deployments.push((namespace, stored.map(|stored| stored.value)));
        }
        let key = Key::global(Kind::KubeControllersConfiguration, KubeControllersConfiguration::NAME);
        let is_ready = deployments.iter().any(|(_, value)| readiness(value.as_ref()) == Readiness::Ready);
        let configuration = match is_ready {
            true => match self.store.list_page(&Interest::in_object(&key), None).await {
                Err(StoreError::KindAbsent(_)) => None,
                page => page?.items.into_iter().next().map(|stored| stored.value),
            },
            false => None,
        };
        let on_kubernetes = self.store.derives_from_kubernetes();
        Ok(self.observer.observe(&deployments, configuration.as_ref(), on_kubernetes, Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn deployment(replicas: u64, ready: u64, datastore: &Value) -> Value {
        let env = json!([{"name": "X", "value": "etcdv3"}, datastore]);
        json!({
            "spec": {"replicas": replicas, "template": {"spec": {"containers": [{"name": "c", "env": env}]}}},
            "status": {"readyReplicas": ready},
        })
    }

    fn status(sections: &[&str]) -> Value {
        let sections = sections.iter().map(|section| ((*section).to_owned(), json!({})));
        json!({"status": {"runningConfig": {"controllers": Value::Object(sections.collect())}}})
    }

    #[test]
    fn a_deployment_counts_if_its_datastore_can_be_this_one() {
        let from = |datastore: Value| deployment(1, 1, &datastore);
        let mut hidden = from(json!({"name": "Y"}));
        hidden["spec"]["template"]["spec"]["containers"][0]["envFrom"] =
            json!([{"configMapRef": {"name": "x"}}]);
        for (value, on_etcd, on_kubernetes) in [
            (from(json!({"name": "DATASTORE_TYPE", "value": "kubernetes"})), false, true),
            (from(json!({"name": "DATASTORE_TYPE", "value": "etcdv3"})), true, false),
            (from(json!({"name": "DATASTORE_TYPE", "valueFrom": {}})), true, true),
            (from(json!({"name": "Y"})), true, false),
            (hidden, true, true),
            (json!({"spec": {}}), true, false),
        ] {
            assert_eq!((may_use(&value, false), may_use(&value, true)), (on_etcd, on_kubernetes), "{value}");
        }
    }

    #[test]
    fn a_deployment_is_ready_with_a_ready_pod() {
        for (value, expected) in [
            (None, Readiness::Stopped),
            (Some(deployment(0, 1, &json!({}))), Readiness::Stopped),
            (Some(deployment(1, 0, &json!({}))), Readiness::Unready),
            (Some(deployment(2, 1, &json!({}))), Readiness::Ready),
            (Some(json!({"status": {"readyReplicas": 1}})), Readiness::Ready),
            (Some(json!("damaged")), Readiness::Unready),
        ] {
            assert_eq!(readiness(value.as_ref()), expected, "{value:?}");
        }
    }

    #[test]
    fn the_status_in_the_datastore_says_what_runs() {
        use CalicoController::{LoadBalancer, Node, Policy};
        for (configuration, on_kubernetes, expected) in [
            (None, false, vec![]),
            (None, true, vec![Node]),
            (Some(json!({"spec": {"controllers": {"policy": {}}}})), false, vec![]),
            (Some(status(&["policy", "node"])), false, vec![Node, Policy]),
            (Some(status(&["policy", "node"])), true, vec![Node]),
            (Some(status(&["loadBalancer", "node"])), true, vec![LoadBalancer, Node]),
            (Some(status(&[])), true, vec![]),
        ] {
            let found = controllers(configuration.as_ref(), on_kubernetes);
            assert_eq!(found, expected.into_iter().collect(), "{configuration:?}");
        }
    }

    #[test]
    fn an_update_of_the_deployment_changes_nothing_and_its_end_does_at_once() {
        let start = Instant::now();
        let etcd = json!({"name": "DATASTORE_TYPE", "value": "etcdv3"});
        let with = |replicas, ready| Some(deployment(replicas, ready, &etcd));
        let configuration = status(&["policy"]);
        let mut observer = Observer::default();
        for (second, found, runs) in [
            (0, with(1, 0), false),
            (1, with(1, 1), true),
            (2, with(1, 0), true),
            (61, with(1, 0), true),
            (62, with(1, 0), false),
            // They must be ready for as long now.
            (63, with(1, 1), false),
            (70, with(1, 0), false),
            (80, with(1, 1), false),
            (139, with(1, 1), false),
            (140, with(1, 1), true),
            (141, with(1, 0), true),
            (142, with(0, 0), false),
            (143, with(1, 1), true),
            (144, None, false),
        ] {
            let now = start + Duration::from_secs(second);
            let deployments = [("calico-system", None), ("kube-system", found)];
            let running = observer.observe(&deployments, Some(&configuration), false, now);
            assert_eq!(running.is_some(), runs, "second {second}: {running:?}");
            assert!(running.is_none_or(|running| running.namespace == "kube-system"));
        }
    }
}

//! What happens to pods and their connections while parts of the cluster end and return.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use serde_json::Value;

use super::judge::{self, Counts, Phase, Pod, Pods, Role, Strangers};
use super::{NODES, connections, kubectl_command, restart, wait_until};

const SERVERS: &str = include_str!("traffic.yaml");
const VISITORS: &str = include_str!("visitors.yaml");
const POLICY: &str = include_str!("clients-only.yaml");
const NAMESPACE: &str = "--namespace=disrupted";
const DEPLOYMENTS: [&str; 5] = ["server", "client", "stranger", "friend", "rest"];
/// How long connections run after each disruption before they are judged: longer than a client takes to call one lost.
const AFTERMATH: Duration = Duration::from_secs(15);

/// A disruption, with its name.
type Disruption = (&'static str, fn() -> Result<()>);

const DISRUPTIONS: [Disruption; 5] = [
    ("containerd is killed on each node", || on_each_node("containerd")),
    ("the kubelet is killed on each node", || on_each_node("kubelet")),
    ("kube-proxy is killed on each node", || on_each_node("kube-proxy")),
    ("the agents are killed", kill_agents),
    ("the agents are replaced, node by node", replace_agents),
];

/// Runs 50 pods with connections through all disruptions. An error names the first one that cost a connection, let a
/// stranger in, restarted a pod, or left a pod that is not ready.
pub(super) fn run() -> Result<()> {
    let traffic = Traffic::start()?;
    DISRUPTIONS.into_iter().try_for_each(|(name, disrupt)| traffic.during(name, disrupt))?;
    many_pods(&traffic)?;
    remove()
}

/// The pods with connections, which run, and the policy, which is in force.
pub(super) struct Traffic {
    /// The addresses that strangers and friends connect to.
    targets: Vec<String>,
}

impl Traffic {
    /// Starts the pods, shows that each stranger gets in without policy, and puts the policy into force.
    pub(super) fn start() -> Result<Self> {
        // A run that failed has left its pods and its policy.
        remove()?;
        connections::apply(SERVERS)?;
        ["server", "rest"].into_iter().try_for_each(wait_for)?;
        let traffic = Self { targets: targets()? };
        connections::apply(&VISITORS.replace("TARGETS", &traffic.targets.join(" ")))?;
        DEPLOYMENTS.into_iter().try_for_each(wait_for)?;
        traffic.phase("without policy", Strangers::GetIn, || Ok(()))?;
        let before = pods()?;
        connections::apply(POLICY)?;
        wait_until("policy keeps each stranger out", || {
            Ok(judge::strangers_are_out(&before, &pods()?, &traffic.targets))
        })?;
        Ok(traffic)
    }

    /// Disrupts the cluster, lets pods come and go, and demands that nothing was lost and nobody let in.
    pub(super) fn during(&self, name: &str, disrupt: impl FnOnce() -> Result<()>) -> Result<()> {
        self.phase(name, Strangers::StayOut, || {
            disrupt()?;
            renew_the_rest()
        })
    }

    /// Judges the connections while something happens and for some time after it.
    fn phase(&self, name: &str, strangers: Strangers, work: impl FnOnce() -> Result<()>) -> Result<()> {
        println!("==> {name}");
        let before = pods()?;
        let started = Instant::now();
        work().with_context(|| name.to_owned())?;
        let worked = started.elapsed();
        std::thread::sleep(AFTERMATH);
        let lasted = started.elapsed();
        let phase = Phase { before: &before, after: &pods()?, lasted, targets: &self.targets, strangers };
        let counts = judge::judge(&phase).map_err(|problems| anyhow!("{name}: {}", problems.join("\n")))?;
        let Counts { received, admitted, refused, friends } = counts;
        println!(
            "    every pod ready after {:.0} s; in {:.0} s, clients received {received} lines and lost no connection; strangers got in \
             {admitted} times and were kept out {refused} times; friends got in {friends} times",
            worked.as_secs_f64(),
            lasted.as_secs_f64()
        );
        Ok(())
    }
}

/// Removes the pods and the policy, if they are there.
fn remove() -> Result<()> {
    kubectl(&["delete", "namespace", "disrupted", "--ignore-not-found", "--timeout=300s"])
}

/// The addresses of the Service and of each server.
fn targets() -> Result<Vec<String>> {
    let service = connections::table("disrupted", "services", "{.metadata.name} {.spec.clusterIP}")?;
    let pods = connections::table("disrupted", "pods", "{.metadata.labels.app} {.status.podIP}")?;
    let servers: Vec<String> =
        service.into_iter().chain(pods).filter(|row| row[0] == "server").map(|row| row[1].clone()).collect();
    match servers.len() == 1 + Role::Server.pods() {
        true => Ok(servers),
        false => bail!("the Service and its pods have the addresses {servers:?}"),
    }
}

/// The pods with connections, and what they have printed.
fn pods() -> Result<Pods> {
    let document: Value = serde_json::from_str(&printed(&["get", "pods", NAMESPACE, "-o", "json"])?)?;
    let mut pods = Pods::new();
    for object in document["items"].as_array().into_iter().flatten() {
        let app = &object["metadata"]["labels"]["app"];
        let Some(role) = Role::ALL.into_iter().find(|role| app == role.label()) else { continue };
        let name = object["metadata"]["name"].as_str().context("a pod has no name")?;
        let container = &object["status"]["containerStatuses"][0];
        let pod = Pod {
            role,
            uid: object["metadata"]["uid"].as_str().unwrap_or_default().to_owned(),
            restarts: container["restartCount"]
                .as_u64()
                .with_context(|| format!("{name} has no container"))?,
            is_ready: container["ready"] == true && object["metadata"]["deletionTimestamp"].is_null(),
            lines: printed(&["logs", NAMESPACE, name, "--tail=-1"])?.lines().map(str::to_owned).collect(),
        };
        pods.insert(name.to_owned(), pod);
    }
    Ok(pods)
}

/// Runs kubectl, and shows what it prints only if it fails.
fn kubectl(arguments: &[&str]) -> Result<()> {
    printed(arguments).map(|_| ())
}

/// What kubectl prints.
fn printed(arguments: &[&str]) -> Result<String> {
    let output = kubectl_command(arguments)?.output()?;
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&printed).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn wait_for(deployment: &str) -> Result<()> {
    kubectl(&["rollout", "status", NAMESPACE, &format!("deployment/{deployment}"), "--timeout=600s"])
}

fn on_each_node(program: &str) -> Result<()> {
    NODES.into_iter().try_for_each(|node| restart(node, program))
}

/// Agents end without a chance to clean up; kubelets start their containers again.
fn kill_agents() -> Result<()> {
    // The nodes have one PID namespace.
    super::finish(&mut super::node_command(NODES[0], &["pkill", "-KILL", "-f", "^/?tortie agent"])?)?;
    std::thread::sleep(Duration::from_secs(1));
    agents_are_ready()
}

fn replace_agents() -> Result<()> {
    kubectl(&["rollout", "restart", "--namespace=tortie-system", "daemonset/tortie-node"])?;
    agents_are_ready()
}

pub(super) fn agents_are_ready() -> Result<()> {
    kubectl(&["rollout", "status", "--namespace=tortie-system", "daemonset/tortie-node", "--timeout=120s"])?;
    kubectl(&["wait", "node", "--all", "--for=condition=Ready", "--timeout=120s"])
}

/// Pods come and go after each disruption.
fn renew_the_rest() -> Result<()> {
    kubectl(&["delete", "pods", NAMESPACE, "--selector=app=rest"])?;
    DEPLOYMENTS.into_iter().try_for_each(wait_for)
}

/// How long many pods take until all of them are ready, and until they are gone: on both nodes, and on one.
fn many_pods(traffic: &Traffic) -> Result<()> {
    let on_one_node = format!(
        r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"kubernetes.io/hostname":"{}"}}}}}}}}}}"#,
        NODES[0]
    );
    traffic.phase("200 pods of one Deployment come and go, on two nodes", Strangers::StayOut, || {
        scale("no pods of the Deployment", "0")?;
        scale("200 pods of one Deployment, on two nodes", "200")?;
        scale("200 pods removed", "0")
    })?;
    traffic.phase("250 pods of one Deployment come and go, on one node", Strangers::StayOut, || {
        kubectl(&["patch", NAMESPACE, "deployment/rest", "--patch", &on_one_node])?;
        scale("250 pods of one Deployment, on one node", "250")?;
        scale("250 pods removed", "0")
    })
}

/// Sets the number of pods that come and go, and waits until they are ready, or have gone.
fn scale(what: &str, pods: &str) -> Result<()> {
    let started = Instant::now();
    kubectl(&["scale", NAMESPACE, "deployment/rest", &format!("--replicas={pods}")])?;
    wait_for("rest")?;
    if pods == "0" {
        kubectl(&["wait", "pods", NAMESPACE, "--selector=app=rest", "--for=delete", "--timeout=300s"])?;
    }
    println!("    {what}: {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

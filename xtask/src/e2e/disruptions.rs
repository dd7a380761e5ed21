//! What happens to pods and their connections while parts of the cluster end and return.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::{NODES, connections, kubectl_command, restart};

const TRAFFIC: &str = include_str!("traffic.yaml");
const POLICY: &str = include_str!("clients-only.yaml");
const NAMESPACE: &str = "--namespace=disrupted";
const DEPLOYMENTS: [&str; 4] = ["server", "client", "stranger", "rest"];
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
/// stranger in, or left a pod that is not ready.
pub(super) fn run() -> Result<()> {
    apply()?;
    let outcome = DISRUPTIONS.into_iter().try_for_each(|(name, disrupt)| under_traffic(name, disrupt));
    outcome.and_then(|()| many_pods()).and_then(|()| kubectl(&["delete", "namespace", "disrupted"]))
}

pub(super) fn apply() -> Result<()> {
    connections::apply(TRAFFIC)?;
    DEPLOYMENTS.into_iter().try_for_each(wait_for)?;
    // Without the policy, the test of strangers must see that they get in.
    std::thread::sleep(Duration::from_secs(5));
    if check("without policy").is_ok() {
        bail!("strangers do not get in although nothing keeps them out: the test would see nothing");
    }
    connections::apply(POLICY)?;
    kubectl(&["rollout", "restart", NAMESPACE, "deployment/client", "deployment/stranger"])?;
    ["client", "stranger"].into_iter().try_for_each(wait_for)
}

/// Disrupts the cluster, lets pods come and go, and demands that nothing was lost and nobody let in.
pub(super) fn under_traffic(name: &str, disrupt: impl FnOnce() -> Result<()>) -> Result<()> {
    let started = Instant::now();
    println!("==> {name}");
    disrupt().with_context(|| name.to_owned())?;
    renew_the_rest()?;
    std::thread::sleep(AFTERMATH);
    check(name)?;
    println!(
        "    no connection lost, nobody let in, every pod ready after {:.0} s",
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Runs kubectl, and shows what it prints only if it fails.
fn kubectl(arguments: &[&str]) -> Result<()> {
    let output = kubectl_command(arguments)?.output()?;
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&printed).trim());
    }
    Ok(())
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

fn check(disruption: &str) -> Result<()> {
    for (app, word, meaning) in
        [("client", "lost", "connections were lost"), ("stranger", "in", "strangers were let in")]
    {
        let selector = format!("--selector=app={app}");
        let output = kubectl_command(&["logs", NAMESPACE, &selector, "--prefix", "--tail=-1"])?.output()?;
        if !output.status.success() {
            bail!(
                "{disruption}: the logs of {app} cannot be read: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let log = String::from_utf8_lossy(&output.stdout);
        let bad: Vec<&str> = log.lines().filter(|line| line.ends_with(word)).collect();
        if !bad.is_empty() {
            bail!("{disruption}: {} {meaning}:\n{}", bad.len(), bad.join("\n"));
        }
    }
    Ok(())
}

/// How long many pods take until all of them are ready, and until they are gone: on both nodes, and on one.
fn many_pods() -> Result<()> {
    scale("no pods of the Deployment", "0")?;
    scale("200 pods of one Deployment, on two nodes", "200")?;
    scale("200 pods removed", "0")?;
    let on_one_node = format!(
        r#"{{"spec":{{"template":{{"spec":{{"nodeSelector":{{"kubernetes.io/hostname":"{}"}}}}}}}}}}"#,
        NODES[0]
    );
    kubectl(&["patch", NAMESPACE, "deployment/rest", "--patch", &on_one_node])?;
    scale("250 pods of one Deployment, on one node", "250")?;
    check("many pods")?;
    scale("250 pods removed", "0")?;
    check("many pods removed")
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

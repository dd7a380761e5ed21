//! Tortie comes, is used, is replaced by another build, and goes without a trace.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use tortie_servers::programs::{COREDNS, E2E};

use super::survey::Survey;
use super::{
    ClusterKind, Folder, NODES, PODS, connections, disruptions, down, finish, in_cluster, kubectl,
    kubectl_command, start, suites, survey, tortie_command, wait_until,
};
use setup::image;

/// The name of the image to which the cluster is upgraded.
const NEXT: &str = "tortie.io/tortie:next";

/// The name of the image of an earlier commit.
const EARLIER: &str = "tortie.io/tortie:earlier";

/// Five specs of Kubernetes' suite: policy, pods on one node, Services, and ports of nodes.
const SPECS: [&str; 5] = [
    "Netpol NetworkPolicy between server and client should support a 'default-deny-ingress' policy",
    "Netpol NetworkPolicy .* should enforce policy to allow traffic only from a different namespace, based on NamespaceSelector",
    "Networking Granular Checks: Pods should function for intra-pod communication: http ",
    "Services should serve a basic endpoint from pods",
    "HostPort validates that there is no conflict between pods with same hostPort",
];

/// Pods that run when Tortie is removed.
const LEFT: &str = include_str!("left.yaml");

/// Runs all of it on a cluster of its own.
pub(super) fn run() -> Result<()> {
    refuse_a_second_cluster()?;
    let archives = ["tortie.tar", "tortie-next.tar"].map(|name| E2E.target().join(name));
    image::build_for_this_machine(&archives[0], image::NAME)?;
    image::build_for_this_machine(&archives[1], NEXT)?;
    on_own_cluster(&archives, whole_life)
}

/// Installs Tortie of an earlier commit with its own manifests, and upgrades it to this workspace's while pods have connections.
pub(super) fn upgrade(commit: &str) -> Result<()> {
    refuse_a_second_cluster()?;
    let archives = ["tortie-earlier.tar", "tortie-next.tar"].map(|name| E2E.target().join(name));
    let programs = image::build_earlier(commit, &E2E.target().join("previous"), &archives[0], EARLIER)?;
    image::build_for_this_machine(&archives[1], NEXT)?;
    on_own_cluster(&archives, |folder| {
        step(&format!("install as of {commit}"), || {
            let mut command = in_cluster(folder, &programs.join("tortie"))?;
            finish(command.args(["install", "--pool", PODS, "--image", EARLIER]))
        })?;
        step("DNS", install_dns)?;
        let traffic = step("traffic", disruptions::Traffic::start)?;
        traffic.during("upgrade", || {
            tortie(&["install", "--pool", PODS, "--image", NEXT])?;
            disruptions::agents_are_ready()
        })?;
        step("each agent is of the new image", agents_are_new)?;
        step("the cluster is healthy", is_healthy)
    })
}

fn refuse_a_second_cluster() -> Result<()> {
    match Folder::new().process() {
        Some(_) => bail!("a cluster is running; remove it first: cargo xtask e2e down"),
        None => Ok(()),
    }
}

fn on_own_cluster(archives: &[PathBuf], work: impl FnOnce(&Folder) -> Result<()>) -> Result<()> {
    let started = Instant::now();
    let folder = start(archives, ClusterKind::Usual)?;
    let outcome = work(&folder);
    down()?;
    outcome?;
    println!("==> all of it took {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn whole_life(folder: &Folder) -> Result<()> {
    let before = surveys()?;
    step("install", || tortie(&["install", "--pool", PODS]))?;
    step("the cluster is healthy", is_healthy)?;
    step("DNS", install_dns)?;
    step("five specs of Kubernetes' suite", || {
        suites::network(folder, &[&format!("-ginkgo.focus={}", SPECS.join("|"))])
    })?;
    step("upgrade", || tortie(&["install", "--pool", PODS, "--image", NEXT]))?;
    step("each agent is of the new image", agents_are_new)?;
    step("the cluster is healthy", is_healthy)?;
    step("pods that stay", || start_pods(&before))?;
    step("uninstall", || {
        kubectl(&["delete", "--filename", &dns_manifest()])?;
        kubectl(&["wait", "pod", "--all", "--namespace=kube-system", "--for=delete", "--timeout=120s"])?;
        tortie(&["uninstall", "--data"])
    })?;
    step("nothing is left", || nothing_is_left(&before))
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    println!("==> {name}");
    let result = work().with_context(|| name.to_owned())?;
    println!("    after {:.0} s", started.elapsed().as_secs_f64());
    Ok(result)
}

fn tortie(arguments: &[&str]) -> Result<()> {
    finish(&mut tortie_command(arguments)?)
}

fn dns_manifest() -> String {
    COREDNS.folder().join("cluster.yaml").display().to_string()
}

/// Installs the DNS, whose pods need Tortie.
pub(super) fn install_dns() -> Result<()> {
    kubectl(&["apply", "--filename", &dns_manifest()])?;
    kubectl(&["rollout", "status", "--namespace=kube-system", "deployment/coredns", "--timeout=120s"])
}

/// `tortie status` has no complaint, and no node has a condition.
fn is_healthy() -> Result<()> {
    kubectl(&["wait", "node", "--all", "--for=condition=Ready", "--timeout=120s"])?;
    let mut screen = String::new();
    let healthy = wait_until("tortie status has no complaint, and no node has a condition", || {
        let output = tortie_command(&["status"])?.output()?;
        screen = String::from_utf8_lossy(&output.stdout).into_owned();
        // The last column is the number of conditions.
        let row = |node: &str| screen.lines().find(|line| line.split_whitespace().next() == Some(node));
        let is_calm = |node: &str| row(node).is_some_and(|row| row.split_whitespace().last() == Some("0"));
        Ok(output.status.success() && NODES.into_iter().all(is_calm))
    });
    let reports =
        || tortie_command(&["get", "nodereports", "-o", "json"])?.output().map_err(anyhow::Error::from);
    if let Err(error) = healthy {
        bail!("{error}:\n{screen}\n{}", String::from_utf8_lossy(&reports()?.stdout));
    }
    println!("{screen}");
    Ok(())
}

fn agents_are_new() -> Result<()> {
    let images = "jsonpath={range .items[*]}{.spec.containers[0].image} {end}";
    let output = kubectl_command(&["get", "pods", "--namespace=tortie-system", "-o", images])?.output()?;
    let images = String::from_utf8_lossy(&output.stdout).into_owned();
    // The agents, and the controllers.
    if images.split_whitespace().count() <= NODES.len()
        || images.split_whitespace().any(|image| image != NEXT)
    {
        bail!("the pods of Tortie have the images {images}");
    }
    Ok(())
}

/// Starts a pod on each node. The surveys then see what Tortie adds to a node.
fn start_pods(before: &[Survey]) -> Result<()> {
    connections::apply(LEFT)?;
    kubectl(&["rollout", "status", "--namespace=left", "daemonset/pod", "--timeout=120s"])?;
    for ((node, before), after) in NODES.into_iter().zip(before).zip(surveys()?) {
        let unseen = survey::unseen(before, &after);
        if !unseen.is_empty() {
            bail!("Tortie runs on {node}, and the survey sees nothing new of these parts: {unseen:?}");
        }
    }
    Ok(())
}

/// The state of each node.
fn surveys() -> Result<Vec<Survey>> {
    NODES.into_iter().map(survey::survey).collect()
}

fn nothing_is_left(before: &[Survey]) -> Result<()> {
    let mut left = Vec::new();
    for ((node, before), after) in NODES.into_iter().zip(before).zip(surveys()?) {
        left.extend(survey::difference(before, &after).into_iter().map(|line| format!("{node}: {line}")));
    }
    let objects = ["get", "clusterroles,clusterrolebindings,namespaces,crds", "-o", "name"];
    let output = kubectl_command(&objects)?.output()?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() || names.is_empty() {
        bail!("kubectl {}: {}", objects.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    left.extend(
        names.lines().filter(|name| name.contains("tortie") || name.contains("calico")).map(str::to_owned),
    );
    if !left.is_empty() {
        bail!("uninstall leaves something, or removes something else:\n{}", left.join("\n"));
    }
    Ok(())
}

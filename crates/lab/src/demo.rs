//! The demo: four pods on two nodes, and which of them reach each other before and after a policy.

use serde::Serialize;
use tortie_api::manifest::{self, Object};
use tortie_api::{Key, Kind};

use crate::matrix::{self, Step};
use crate::probe::Verdict;
use crate::{Cluster, LabError, Progress};

/// The port of the demo's servers.
const PORT: u16 = 80;

/// The demo's manifests, as text with file names.
pub struct Manifests<'a> {
    /// The namespace and the pods.
    pub pods: (&'a str, &'a str),
    /// The policy.
    pub policy: (&'a str, &'a str),
}

/// The result of the demo.
#[derive(Debug, Serialize)]
pub struct Demo {
    /// One step before the policy, one after it.
    pub steps: Vec<Step>,
}

/// Runs the demo on a running cluster. Calls `show` with each table as soon as it is complete.
///
/// # Errors
/// A manifest is invalid, a pod does not run, or the policy does not come into force.
pub async fn run(
    cluster: &Cluster,
    manifests: &Manifests<'_>,
    progress: &Progress,
    mut show: impl FnMut(&Step, Option<&Step>),
) -> Result<Demo, LabError> {
    let store = cluster.store();
    let objects = read(manifests.pods)?;
    cluster.apply(manifests.pods.1, &objects).await?;
    let pods: Vec<Key> =
        objects.into_iter().map(|object| object.key).filter(|key| key.kind == Kind::Pod).collect();
    let running = cluster.wait_for_pods(&pods).await?;
    for (key, (address, node)) in &running {
        progress.done(&format!("pod {}/{} runs on {node} with {address}", key.namespace, key.name));
    }
    // A pod is known everywhere once every node has processed the last of them.
    let endpoints = store.list(Kind::WorkloadEndpoint).await?.items;
    let positions = endpoints.into_iter().map(|endpoint| (endpoint.key.kind, endpoint.position)).collect();
    cluster.wait_in_force(&positions).await?;
    let before = matrix::probe_all(cluster.dir(), &*store, "before policy", Some(PORT), progress).await?;
    progress.done(&format!("{} connections were tried", before.connections.len()));
    show(&before, None);

    let policies = read(manifests.policy)?;
    let positions = cluster.apply(manifests.policy.1, &policies).await?;
    policies.iter().for_each(|object| progress.done(&format!("{} is applied", object.key)));
    cluster.wait_in_force(&positions).await?;
    progress.done("it is in force on all nodes");
    let after = matrix::probe_all(cluster.dir(), &*store, "after policy", Some(PORT), progress).await?;
    let cut = after.connections.iter().filter(|connection| connection.verdict == Verdict::Cut).count();
    progress.done(&format!("{} connections were tried, {cut} of them cut", after.connections.len()));
    show(&after, Some(&before));
    Ok(Demo { steps: vec![before, after] })
}

fn read((name, text): (&str, &str)) -> Result<Vec<Object>, LabError> {
    manifest::read(name, text).map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        LabError::problem("the manifests", problems.join("\n"))
    })
}

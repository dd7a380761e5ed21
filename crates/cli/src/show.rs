//! `tortie policy show`: what is in force for a pod on its node.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use tortie_agent::control::{Ask, Outcome, ShownEndpoint, ask};
use tortie_api::{Key, Kind, Resource};
use tortie_policy::program::{PolicyId, PolicyKind, SetId};
use tortie_policy::{SetSource, compile, compile_profile};
use tortie_store::Store;

mod document;
mod page;

use crate::output::{self, Format};
use crate::store::StoreArguments;
use crate::words::{Meaning, Meanings};

#[derive(clap::Args)]
pub(crate) struct Show {
    /// The pod: NAME, or NAMESPACE/NAME
    pod: String,
    /// The pod's namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Show the counts of each rule
    #[arg(long)]
    counters: bool,
    /// The socket of the agent on the pod's node. By default: in a lab, that of the right node; otherwise that of
    /// this node
    #[arg(long, value_name = "PATH")]
    agent_socket: Option<PathBuf>,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    store: StoreArguments,
}

/// What is in force for a pod.
struct ShownPod {
    namespace: String,
    pod: String,
    node: String,
    endpoints: Vec<ShownEndpoint>,
}

impl Show {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let (namespace, pod) = self.name()?;
        let runtime = crate::runtime()?;
        let store = runtime.block_on(self.store.open())?;
        let node = runtime.block_on(node_of(&*store, &namespace, &pod))?;
        let found = self.ask(namespace, pod, node)?;
        let meanings = runtime.block_on(meanings(&*store, &found.endpoints))?;
        match self.output {
            Format::Text => page::print(&found, &meanings, self.counters),
            Format::Json => {
                let document = document::of(&found, &meanings);
                output::line(&serde_json::to_string_pretty(&document)?);
            }
        }
        // If the system could not be read, only half of the answer exists.
        let all = found.endpoints.iter().all(|endpoint| endpoint.system.is_ok());
        Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(2) })
    }

    /// The pod's namespace and name.
    fn name(&self) -> anyhow::Result<(String, String)> {
        match (self.pod.split_once('/'), &self.namespace) {
            (Some((one, _)), Some(other)) if one != other => {
                bail!("pod {} is of namespace {one}, but -n says {other}", self.pod)
            }
            (Some((namespace, name)), _) => Ok((namespace.to_owned(), name.to_owned())),
            (None, namespace) => {
                Ok((namespace.clone().unwrap_or_else(|| "default".to_owned()), self.pod.clone()))
            }
        }
    }

    /// Sends the request to the agent of the pod's node.
    fn ask(&self, namespace: String, pod: String, node: String) -> anyhow::Result<ShownPod> {
        let socket = self.socket(&node)?;
        let question = Ask::Show { namespace: namespace.clone(), pod: pod.clone() };
        let elsewhere = || {
            format!(
                "Pod {namespace}/{pod} is on node {node}; run there, as root: tortie policy show {pod} -n {namespace}"
            )
        };
        let answer = ask(&socket, question).with_context(elsewhere)?;
        if answer.node != node {
            bail!("this is node {}. {}", answer.node, elsewhere());
        }
        let endpoints = match answer.outcome {
            Outcome::Shown(endpoints) => endpoints,
            Outcome::Failed(problem) => bail!("node {node}: {problem}"),
            Outcome::LogLevel(_) | Outcome::BgpPeers(_) | Outcome::BgpRoutes(_) | Outcome::BgpWhy(_) => {
                bail!("node {node}: the agent answers another question")
            }
        };
        if endpoints.is_empty() {
            bail!(
                "Pod {namespace}/{pod} has no network on node {node} yet, or not any more: the node's agent knows no \
                 endpoint of it; `tortie get nodereports {node}` says what else is wrong there"
            );
        }
        Ok(ShownPod { namespace, pod, node, endpoints })
    }

    fn socket(&self, node: &str) -> anyhow::Result<PathBuf> {
        match (&self.agent_socket, self.store.lab()) {
            (Some(socket), _) => Ok(socket.clone()),
            (None, Some(lab)) => lab.agent_socket(node),
            (None, None) => Ok(tortie_cni::local::control_address()),
        }
    }
}

/// The node of a pod, if the pod has policy there.
async fn node_of(store: &dyn Store, namespace: &str, name: &str) -> anyhow::Result<String> {
    let key = Key::namespaced(Kind::Pod, namespace, name);
    let stored = store.get(&key).await?.with_context(|| format!("{key} does not exist"))?;
    let Ok(Resource::Pod(pod)) = Resource::read(&key, &stored.value) else {
        bail!("{key} cannot be read: `tortie get pods {name} -n {namespace} -o json` shows it");
    };
    let node = pod.spec.node_name.filter(|node| !node.is_empty());
    let node = node.with_context(|| format!("{key} is on no node yet"))?;
    if pod.spec.host_network {
        bail!("{key} is a hostNetwork pod: it is its node ({node}), and under no policy of pods");
    }
    Ok(node)
}

/// The meaning of the sets that the endpoints' policies name.
async fn meanings(store: &dyn Store, endpoints: &[ShownEndpoint]) -> anyhow::Result<Meanings> {
    let mut meanings = Meanings::new();
    for desired in endpoints.iter().map(|endpoint| &endpoint.asked) {
        for (id, members) in &desired.sets {
            meanings.insert(id.clone(), Meaning { members: *members, source: None });
        }
        for (id, _) in &desired.policies {
            for (set, source) in sources(store, id).await? {
                if let Some(meaning) = meanings.get_mut(&set) {
                    meaning.source = Some(source);
                }
            }
        }
    }
    Ok(meanings)
}

/// The sources of the sets that a policy names, by its stored form. Profiles of namespaces are not stored, and name
/// none.
async fn sources(
    store: &dyn Store,
    id: &PolicyId,
) -> anyhow::Result<impl IntoIterator<Item = (SetId, SetSource)> + use<>> {
    let (namespace, name) = (id.namespace.to_string(), id.name.to_string());
    let key = Key { kind: id.kind.kind(), namespace, name };
    let Some(stored) = store.get(&key).await? else { return Ok(Default::default()) };
    if id.kind == PolicyKind::Profile {
        return Ok(match Resource::read(&key, &stored.value) {
            Ok(Resource::Profile(profile)) => compile_profile(&profile).1,
            _ => Default::default(),
        });
    }
    Ok(compile(&key, &stored.value).map(|compiled| compiled.sets).unwrap_or_default())
}

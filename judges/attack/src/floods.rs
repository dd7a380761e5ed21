//! Floods of labels, objects and policies by a user of one namespace.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::Rng as _;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_kernel::namespace::NetNs;
use tortie_store::{Store as _, Write};

use crate::attack::{Attack, Bounds, Outcome};
use crate::lab::{Lab, NAMESPACE, NODES, pod};
use crate::process::{self, wait_until};

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "floods",
    attacker: "a user of one namespace gives a pod 20,000 labels, stores 3,000 policies that select his pods, 3,000 network sets, and \
               objects near the limit of size, and changes them",
    holds: "a policy of another namespace is in force within a minute each time, with the right verdict; agents keep running within a bound \
            of memory; the datastore answers",
    run,
};

/// The namespace of somebody else.
const OTHER: &str = "bystander";
const POLICIES: usize = 3_000;
const SETS: usize = 3_000;
const LABELS: usize = 20_000;
/// Networks of a set near the limit of 1.5 MiB.
const NETWORKS: usize = 60_000;
/// How long a policy of somebody else may take to be in force.
const BOUND: Duration = Duration::from_secs(60);
/// What an agent may need, in MiB.
const MEMORY: u64 = 768;
const CONNECT: Duration = Duration::from_millis(1500);
const WRITES: usize = 500;

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let lab = Lab::with_pods(&bounds.program, &[])?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let namespace = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {OTHER}}}\n");
    lab.apply(&[namespace, pod(OTHER, "client", NODES[0]), pod(OTHER, "server", NODES[0])].join("---\n"))?;
    lab.wait_for_pods()?;
    let bystander = Bystander::new(&lab)?;
    let mut outcome = Outcome::default();
    bystander.judge(&lab, "nothing", &mut outcome)?;
    outcome.control(outcome.through.is_empty(), "the policy of somebody else is late without an attack")?;
    let agents = [lab.agent(NODES[0])?, lab.agent(NODES[1])?];
    while bounds.another_round() {
        for (name, steps) in floods(&mut bounds.random) {
            let begun = Instant::now();
            outcome.attempts += steps.len() as u64;
            runtime.block_on(store(&lab, steps))?;
            outcome.notes.push(format!("{name}: stored in {:.1} s", begun.elapsed().as_secs_f64()));
            bystander.judge(&lab, name, &mut outcome)?;
        }
        after(&lab, agents, &mut outcome)?;
    }
    reaches(&lab, &runtime, &mut outcome)?;
    lab.down()?;
    Ok(outcome)
}

/// A step of a flood.
#[derive(Debug)]
enum Step {
    Object(Key, Value),
    /// The attacker's pod gets that many labels.
    Labels(usize),
}

impl Step {
    fn object(kind: Kind, name: String, spec: Value, labels: Value) -> Self {
        let metadata = json!({"name": name, "namespace": NAMESPACE, "labels": labels});
        let value = json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": metadata, "spec": spec});
        Self::Object(Key::namespaced(kind, NAMESPACE, name), value)
    }
}

/// The floods with what they write.
fn floods(random: &mut StdRng) -> Vec<(&'static str, Vec<Step>)> {
    let policies = (0..POLICIES).map(|number| policy(number, random)).collect();
    let sets = (0..SETS).map(|number| set("flood", number, 10, random)).collect();
    let large = (0..2).map(|number| set("large", number, NETWORKS, random)).collect();
    let labels = (1..=5).map(|part| Step::Labels(LABELS * part / 5)).collect();
    vec![
        ("policies", policies),
        ("network sets", sets),
        ("objects near the limit", large),
        ("labels of a pod", labels),
    ]
}

/// A policy that closes all pods of the namespace but for one source.
fn policy(number: usize, random: &mut StdRng) -> Step {
    let selector = format!("label-{} == 'x'", random.random_range(0..500));
    let rule = json!({
        "action": "Allow", "protocol": "TCP", "source": {"selector": selector},
        "destination": {"ports": [random.random_range(1000..65_535)]},
    });
    let spec = json!({"order": number, "selector": "all()", "types": ["Ingress"], "ingress": [rule]});
    Step::object(Kind::NetworkPolicy, format!("flood-{number}"), spec, json!({}))
}

/// A set of that many networks with a label that policies select.
fn set(name: &str, number: usize, networks: usize, random: &mut StdRng) -> Step {
    let network = |_| {
        format!("198.{}.{}.{}/32", random.random_range(18..20), random.random::<u8>(), random.random::<u8>())
    };
    let nets: Vec<String> = (0..networks).map(network).collect();
    let labels = json!({(format!("label-{}", number % 500)): "x"});
    Step::object(Kind::NetworkSet, format!("{name}-{number}"), json!({"nets": nets}), labels)
}

async fn store(lab: &Lab, steps: Vec<Step>) -> Result<()> {
    let store = lab.store();
    let mut writes = Vec::new();
    for step in steps {
        match step {
            Step::Labels(count) => label(&store, count).await?,
            Step::Object(key, value) => writes.push(match store.get(&key).await? {
                None => Write::Create(key, value),
                Some(stored) => Write::Update(key, value, stored.version),
            }),
        }
        if writes.len() == WRITES {
            send(&store, std::mem::take(&mut writes)).await?;
        }
    }
    send(&store, writes).await
}

async fn send(store: &tortie_store::rpc::Remote, writes: Vec<Write>) -> Result<()> {
    store.write_all(writes).await.map(drop).map_err(|stopped| anyhow::anyhow!("{}", stopped.error))
}

async fn label(store: &tortie_store::rpc::Remote, count: usize) -> Result<()> {
    let key = Key::namespaced(Kind::Pod, NAMESPACE, "attacker");
    // The pod's node writes it, too.
    for _ in 0..20 {
        let stored = store.get(&key).await?.context("no pod")?;
        let mut value = stored.value;
        let mut labels = json!({"app": "attacker"});
        for number in 0..count {
            labels[format!("flood-{number}")] = json!("x");
        }
        value["metadata"]["labels"] = labels;
        if store.update(&key, value, &stored.version).await.is_ok() {
            return Ok(());
        }
    }
    anyhow::bail!("the pod gets no labels")
}

/// Agents still run, within their memory.
fn after(lab: &Lab, agents: [u32; 2], outcome: &mut Outcome) -> Result<()> {
    for (node, before) in NODES.into_iter().zip(agents) {
        let now = lab.agent(node)?;
        if now != before {
            outcome.blame(format!("the agent of {node} has ended"));
            continue;
        }
        let memory = process::peak_of_memory(now)?;
        outcome.notes.push(format!("the agent of {node} has needed {memory} MiB"));
        if memory > MEMORY {
            outcome.blame(format!("the agent of {node} has needed {memory} MiB"));
        }
    }
    Ok(())
}

/// The flood has arrived at the nodes: its policies close the attacker's pods, and his last one opens them.
fn reaches(lab: &Lab, runtime: &tokio::runtime::Runtime, outcome: &mut Outcome) -> Result<()> {
    let (netns, to) = (lab.netns_of_pod("attacker")?, lab.addresses("neighbour")?[0]);
    let closed = wait_until(BOUND, || Ok(!connects(&netns, to)?))?;
    outcome.control(closed, "the policies of the flood close no pod")?;
    let count =
        runtime.block_on(async { anyhow::Ok(lab.store().list(Kind::NetworkPolicy).await?.items.len()) })?;
    outcome.control(count > POLICIES, &format!("there are {count} policies"))?;
    let last = format!(
        "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: last, namespace: {NAMESPACE}}}\n\
         spec: {{order: -1, selector: all(), types: [Ingress], ingress: [{{action: Allow}}]}}\n"
    );
    lab.apply(&last)?;
    outcome.control(connects(&netns, to)?, "the last policy of the flood opens no pod")
}

fn connects(from: &NetNs, to: IpAddr) -> Result<bool> {
    Ok(from.run(|| TcpStream::connect_timeout(&SocketAddr::new(to, 80), CONNECT).is_ok())?)
}

/// Two pods of another namespace, and the policy of their user.
struct Bystander {
    client: NetNs,
    server: IpAddr,
}

impl Bystander {
    fn new(lab: &Lab) -> Result<Self> {
        let server = lab.addresses_in(OTHER, "server")?;
        let server = *server.first().context("no address")?;
        Ok(Self { client: lab.netns_of_pod_in(OTHER, "client")?, server })
    }

    /// Closes and opens the server by a policy, which must be in force in time.
    fn judge(&self, lab: &Lab, flood: &str, outcome: &mut Outcome) -> Result<()> {
        let mut slowest = Duration::ZERO;
        for (action, expected) in [("Deny", false), ("Allow", true), ("Deny", false)] {
            let policy = format!(
                "apiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: own, namespace: {OTHER}}}\n\
                 spec: {{selector: app == 'server', types: [Ingress], ingress: [{{action: {action}}}]}}\n"
            );
            let begun = Instant::now();
            let applied = lab.apply_within(&policy, BOUND);
            slowest = slowest.max(begun.elapsed());
            match applied {
                Err(error) => {
                    outcome.blame(format!("{flood}: the policy of somebody else is late: {error:#}"))
                }
                Ok(()) if connects(&self.client, self.server)? != expected => {
                    outcome.blame(format!("{flood}: the policy {action} of somebody else has no effect"));
                }
                Ok(()) => outcome.controls += 1,
            }
        }
        ensure!(
            !lab.json(&["get", "namespaces", "-o", "json"])?["items"].is_null(),
            "the datastore does not answer"
        );
        outcome.notes.push(format!(
            "{flood}: somebody else's policy is in force after {:.1} s at most",
            slowest.as_secs_f64()
        ));
        Ok(())
    }
}

//! `tortie policy cost`: what policies cost on Windows nodes, and which rule to change to save most.

mod cluster;
mod document;
mod page;

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, bail};
use tortie_api::manifest::first_pod;
use tortie_api::net::Direction;
use tortie_api::{Key, Kind};
use tortie_dataplane::{EndpointId, NodeState};
use tortie_oracle::{PolicyName, Snapshot};
use tortie_policy::policy_id;
use tortie_policy::program::{PolicyId, PolicyKind};
use tortie_windows::{Because, Cost, Costing, Saving, Tally};

use crate::decided::rule_location;
use crate::doubts::{Doubts, NOT_CERTAIN};
use crate::output::{self, Format};
use crate::snapshot::Source;
use cluster::Cluster;

/// The maximum number of listed pods and policies.
const DEAREST: usize = 10;

#[derive(clap::Args)]
pub(crate) struct CostOf {
    /// The subject: a policy (KIND/NAMESPACE/NAME, KIND/NAME), or a pod (NAMESPACE/POD); everything if omitted
    #[arg(value_name = "POLICY | POD")]
    of: Option<String>,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    source: Source,
}

/// The subject of the command.
enum Subject {
    Everything,
    Policy(PolicyId),
    Pod { namespace: String, name: String },
}

/// The result.
struct CostReport {
    subject: Subject,
    /// The number of Windows nodes; if it is 0, all pods are treated as if they ran on Windows nodes.
    windows: usize,
    pods: Vec<PodCost>,
    policies: Vec<PolicyTotal>,
    total: Total,
    /// The number of pods whose rules were computed, and the cost of these pods without sets.
    looked_at: (usize, Tally),
    /// Those that save most first.
    rules: Vec<RuleTotal>,
}

/// A pod's interface.
struct PodCost {
    id: EndpointId,
    node: String,
    cost: Cost,
}

/// A policy, with all pods that it selects.
struct PolicyTotal {
    policy: PolicyId,
    pods: usize,
    lists: Tally,
    sets: Tally,
    naive: Tally,
}

/// The total of all pods.
#[derive(Default)]
struct Total {
    lists: Tally,
    sets: Tally,
    naive: Tally,
    /// Sets on all nodes, counted on each node that has them, and the addresses and networks in them.
    set_count: usize,
    members: usize,
    left_out: usize,
    cut: bool,
}

/// A rule, with all pods for which it was computed.
struct RuleTotal {
    policy: PolicyId,
    direction: Direction,
    /// The number as written, counted from one.
    number: usize,
    /// ` (file:line)`, if known.
    location: String,
    lists: Saving,
    sets: Saving,
    because: Because,
}

impl CostOf {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let Some(mut read) = self.source.read()? else { return Ok(ExitCode::from(2)) };
        // Manifests do not say which node has how many pods of a workload: each counts once.
        read.snapshot = read.snapshot.only(|key, _| key.kind != Kind::Pod || first_pod(&key.name).is_none());
        let snapshot = &read.snapshot;
        let subject = subject(snapshot, self.of.as_deref())?;
        let found = found(snapshot, &Cluster::of(snapshot), subject)?;
        let is_certain = Doubts::new(&read.doubts, &[snapshot]).all().is_empty();
        match self.output {
            Format::Text => {
                page::print(&found);
                if !is_certain {
                    output::line("Not certain, as what was not read could change these numbers (see above).");
                }
            }
            Format::Json => {
                let mut document = document::of(&found);
                document["certain"] = serde_json::json!(is_certain);
                read.add_to(&mut document);
                output::line(&serde_json::to_string_pretty(&document)?);
            }
        }
        Ok(if is_certain { ExitCode::SUCCESS } else { ExitCode::from(NOT_CERTAIN) })
    }
}

/// Parses the subject, which must exist.
fn subject(snapshot: &Snapshot, text: Option<&str>) -> anyhow::Result<Subject> {
    let Some(text) = text else { return Ok(Subject::Everything) };
    let parts: Vec<&str> = text.split('/').collect();
    let kind = parts.first().filter(|_| parts.len() > 1).and_then(|word| Kind::from_word(word));
    let key = match (kind, parts.as_slice()) {
        (Some(kind), [_, namespace, name]) if kind.namespaced() => Key::namespaced(kind, *namespace, *name),
        (Some(kind), [_, name]) if !kind.namespaced() => Key::global(kind, *name),
        (_, [name]) => Key::namespaced(Kind::Pod, "default", *name),
        (_, [namespace, name]) => Key::namespaced(Kind::Pod, *namespace, *name),
        _ => bail!("{text:?} is none of KIND/NAMESPACE/NAME, KIND/NAME, NAMESPACE/POD"),
    };
    if snapshot.get(&key).is_none() {
        let hint = match key.kind {
            Kind::NetworkPolicy => " (a Kubernetes policy is a knp)",
            Kind::Pod if kind.is_some() => " (a policy is named as KIND/NAMESPACE/NAME)",
            _ => "",
        };
        bail!("{key} does not exist{hint}");
    }
    if key.kind == Kind::Pod {
        return Ok(Subject::Pod { namespace: key.namespace, name: key.name });
    }
    let profile = || (key.kind == Kind::Profile).then(|| PolicyId::profile(key.name.as_str()));
    let id = policy_id(&key).or_else(profile);
    Ok(Subject::Policy(id.with_context(|| format!("{key} is no policy that is in force, and no pod"))?))
}

fn found(snapshot: &Snapshot, cluster: &Cluster, subject: Subject) -> anyhow::Result<CostReport> {
    let is_included = |id: &EndpointId| match &subject {
        Subject::Pod { namespace, name } => *id.namespace == **namespace && *id.pod == **name,
        _ => cluster.counts(id),
    };
    let is_under = |policy: &PolicyId, id: &EndpointId| {
        cluster
            .state
            .endpoints
            .get(id)
            .is_some_and(|endpoint| endpoint.program.policy_ids().any(|of| of == policy))
    };
    let mut by_node: BTreeMap<&str, Vec<&EndpointId>> = BTreeMap::new();
    for id in cluster.state.endpoints.keys().filter(|id| is_included(id)) {
        let concerned = match &subject {
            Subject::Policy(policy) => is_under(policy, id),
            _ => true,
        };
        if concerned {
            by_node.entry(cluster.node_of(id)).or_default().push(id);
        }
    }
    let costings: BTreeMap<&str, Costing<'_, NodeState>> =
        by_node.keys().map(|node| (*node, costing(cluster, node))).collect();
    let mut pods = Vec::new();
    for (node, ids) in by_node {
        let Some(costing) = costings.get(node) else { continue };
        for id in ids {
            let Some(endpoint) = cluster.state.endpoints.get(id) else { continue };
            pods.push(PodCost { id: id.clone(), node: node.to_owned(), cost: costing.cost(endpoint) });
        }
    }
    refuse_nothing(&subject, cluster, &pods)?;
    pods.sort_by_key(|pod| (std::cmp::Reverse(weight(&pod.cost.lists)), pod.id.clone()));
    let wanted = |id: &PolicyId| match &subject {
        Subject::Policy(policy) => id == policy,
        _ => id.kind != PolicyKind::Profile,
    };
    let most = if matches!(subject, Subject::Everything) { DEAREST } else { pods.len() };
    let looked_at = pods.iter().take(most);
    let looked_at_cost = looked_at.clone().map(|pod| pod.cost.lists).sum();
    let mut rules = Rules { snapshot, all: BTreeMap::new() };
    for pod in looked_at {
        let costing = costings.get(pod.node.as_str());
        if let Some((costing, endpoint)) = costing.zip(cluster.state.endpoints.get(&pod.id)) {
            rules.add(
                costing.rules(endpoint, wanted, &|id, direction| cluster::written(snapshot, id, direction)),
            );
        }
    }
    Ok(CostReport {
        windows: cluster.windows(),
        policies: policies(&pods, &subject),
        total: total(&pods),
        looked_at: (pods.len().min(most), looked_at_cost),
        rules: rules.sorted(),
        pods,
        subject,
    })
}

fn costing<'a>(cluster: &'a Cluster, node: &str) -> Costing<'a, NodeState> {
    Costing::new(&cluster.state, cluster.nodes.get(node).cloned().unwrap_or_default())
}

/// Fails with the reason if there is nothing to report.
fn refuse_nothing(subject: &Subject, cluster: &Cluster, pods: &[PodCost]) -> anyhow::Result<()> {
    if !pods.is_empty() {
        return Ok(());
    }
    match subject {
        Subject::Pod { namespace, name } => bail!(
            "Pod {namespace}/{name} is under no policy of pods: it has ended, or has the network of its node"
        ),
        Subject::Policy(policy) if cluster.windows() > 0 => {
            bail!("{policy} selects no pod on a Windows node")
        }
        Subject::Policy(policy) => bail!("{policy} selects no pod"),
        Subject::Everything if cluster.windows() > 0 => bail!("there is no pod on a Windows node"),
        Subject::Everything => bail!("there are no pods"),
    }
}

/// The measure for sorting: everything in ACLs, and the ACLs themselves.
fn weight(tally: &Tally) -> usize {
    tally.acls + tally.addresses + tally.ports + tally.names
}

fn policies(pods: &[PodCost], subject: &Subject) -> Vec<PolicyTotal> {
    let mut totals: BTreeMap<&PolicyId, PolicyTotal> = BTreeMap::new();
    for cost in pods.iter().flat_map(|pod| &pod.cost.policies) {
        let new = || PolicyTotal {
            policy: cost.policy.clone(),
            pods: 0,
            lists: Tally::default(),
            sets: Tally::default(),
            naive: Tally::default(),
        };
        let total = totals.entry(&cost.policy).or_insert_with(new);
        total.pods += 1;
        total.lists += cost.lists;
        total.sets += cost.sets;
        total.naive += cost.naive;
    }
    let mut all: Vec<PolicyTotal> = totals.into_values().collect();
    match subject {
        // In order of evaluation.
        Subject::Pod { .. } => {
            let order: Vec<&PolicyId> =
                pods.iter().flat_map(|pod| &pod.cost.policies).map(|cost| &cost.policy).collect();
            all.sort_by_key(|total| order.iter().position(|id| **id == total.policy));
        }
        Subject::Policy(policy) => all.retain(|total| total.policy == *policy),
        Subject::Everything => all.sort_by_key(|total| std::cmp::Reverse(weight(&total.lists))),
    }
    all
}

fn total(pods: &[PodCost]) -> Total {
    let mut total = Total::default();
    let mut sets = BTreeMap::new();
    for PodCost { node, cost, .. } in pods {
        total.lists += cost.lists;
        total.sets += cost.sets;
        total.naive += cost.naive;
        total.left_out += cost.left_out;
        total.cut |= cost.cut;
        sets.extend(cost.members.iter().map(|(id, members)| ((node, id), *members)));
    }
    (total.set_count, total.members) = (sets.len(), sets.values().sum());
    total
}

/// Rules by policy, direction and number.
struct Rules<'a> {
    snapshot: &'a Snapshot,
    all: BTreeMap<(PolicyId, bool, usize), RuleTotal>,
}

impl Rules<'_> {
    fn add(&mut self, costs: Vec<tortie_windows::RuleCost>) {
        for cost in costs {
            let key = (cost.policy.clone(), cost.direction == Direction::Egress, cost.number);
            match self.all.get_mut(&key) {
                None => drop(self.all.insert(key, self.first(cost))),
                Some(total) => {
                    // The reason is that of the pod where the rule is most expensive.
                    if entries(cost.lists) > entries(total.lists) || total.because == Because::Nothing {
                        total.because = cost.because;
                    }
                    for (sum, one) in [(&mut total.lists, cost.lists), (&mut total.sets, cost.sets)] {
                        sum.acls += one.acls;
                        sum.addresses += one.addresses;
                    }
                }
            }
        }
    }

    fn first(&self, cost: tortie_windows::RuleCost) -> RuleTotal {
        let id = &cost.policy;
        let (namespace, name) = (id.namespace.to_string(), id.name.to_string());
        let named = PolicyName { kind: id.kind.kind().to_string(), namespace, name };
        RuleTotal {
            location: rule_location(self.snapshot, &named, cost.direction, cost.number),
            policy: cost.policy,
            direction: cost.direction,
            number: cost.number,
            lists: cost.lists,
            sets: cost.sets,
            because: cost.because,
        }
    }

    fn sorted(self) -> Vec<RuleTotal> {
        let mut rules: Vec<RuleTotal> = self.all.into_values().collect();
        rules.sort_by_key(|rule| std::cmp::Reverse((entries(rule.lists), entries(rule.sets))));
        rules
    }
}

fn entries(saving: Saving) -> i64 {
    saving.acls + saving.addresses
}

/// `ingress`, `egress`.
fn direction_name(direction: Direction) -> &'static str {
    if direction == Direction::Ingress { "ingress" } else { "egress" }
}

//! `tortie describe`: an object, what applies to it or what it applies to, and what nodes report about it.

use std::process::ExitCode;

use anyhow::bail;
use serde_json::Value;
use tortie_api::manifest::first_pod;
use tortie_api::net::Direction;
use tortie_api::{Key, Kind, to_yaml};
use tortie_oracle::{Oracle, SeenHost, SeenPod, Snapshot, Stored, Table};

use crate::get::age;
use crate::output;
use crate::snapshot::{self, Source};
use crate::targets;

/// The maximum number of pods that are listed for a policy.
const MAX_PODS: usize = 20;
const DIRECTIONS: [(Direction, &str); 2] = [(Direction::Ingress, "ingress"), (Direction::Egress, "egress")];
const TABLES: [Table; 4] = [Table::Untracked, Table::PreDnat, Table::Normal, Table::Forward];

#[derive(clap::Args)]
pub(crate) struct Describe {
    /// Kinds and names: pod NAME; pod/NAME networkpolicy/NAME; all objects of a kind without names, all objects of -f without kinds
    #[arg(required_unless_present_any = ["files", "kustomize"], value_name = "KIND | KIND/NAME")]
    objects: Vec<String>,
    /// Only this namespace; all namespaces if none is given
    #[arg(short, long)]
    namespace: Option<String>,
    #[command(flatten)]
    source: Source,
}

impl Describe {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let targets = match self.objects.is_empty() {
            true => Vec::new(),
            false => targets::parse(&self.objects)?,
        };
        if let Some(target) = targets.iter().find(|target| !snapshot::matters(target.kind)) {
            let plural = target.kind.plural();
            bail!(
                "{plural} are records of IPAM: tortie ipam show explains them, and tortie get {plural} -o yaml shows one"
            );
        }
        let Some(read) = self.source.read()? else { return Ok(ExitCode::from(2)) };
        let page = Scene::new(&read.snapshot);
        let (mut found, mut missing) = (0, Vec::new());
        // Without kinds, those that the files give: not what they imply.
        if targets.is_empty() {
            let is_given = |key: &Key, stored: &Stored| {
                let elsewhere = self.namespace.as_ref().filter(|_| key.kind.namespaced());
                stored.written.is_some()
                    && first_pod(&key.name).is_none()
                    && elsewhere.is_none_or(|namespace| *namespace == key.namespace)
            };
            for (key, _) in read.snapshot.iter().filter(|(key, stored)| is_given(key, stored)) {
                if found > 0 {
                    output::line("");
                }
                page.print(key);
                found += 1;
            }
        }
        for target in &targets {
            let is_wanted = |key: &Key| {
                let elsewhere = self.namespace.as_ref().filter(|_| target.kind.namespaced());
                target.includes(key) && elsewhere.is_none_or(|namespace| *namespace == key.namespace)
            };
            let keys: Vec<&Key> =
                read.snapshot.iter().map(|(key, _)| key).filter(|key| is_wanted(key)).collect();
            for key in &keys {
                if found > 0 {
                    output::line("");
                }
                page.print(key);
                found += 1;
            }
            let is_missing = |name: &&String| !keys.iter().any(|key| targets::is_named(key, name));
            missing.extend(target.names.iter().filter(is_missing).map(|name| (target.kind, name.clone())));
        }
        for (kind, name) in &missing {
            targets::report_missing(*kind, &format!("{kind} {name}"));
        }
        Ok(if missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The cluster that the objects are described in.
struct Scene<'a> {
    snapshot: &'a Snapshot,
    oracle: Oracle<'a>,
}

impl<'a> Scene<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        Self { snapshot, oracle: Oracle::new(snapshot) }
    }

    fn print(&self, key: &Key) {
        let Some(stored) = self.snapshot.get(key) else { return };
        let value = &stored.value;
        field("Name", &key.name);
        field("Kind", key.kind.name());
        if key.kind.namespaced() {
            field("Namespace", &key.namespace);
        }
        let age = age(value, jiff::Timestamp::now().as_second());
        if !age.is_empty() {
            field("Age", &age);
        }
        for (name, pointer) in [("Labels", "/metadata/labels"), ("Annotations", "/metadata/annotations")] {
            let pairs = value.pointer(pointer).and_then(Value::as_object).into_iter().flatten();
            let lines = pairs.map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default()));
            list(name, lines);
        }
        if let Err(problem) = &stored.resource {
            list("Problem", [problem.to_string()]);
        }
        for part in ["spec", "status"] {
            if let Some(part_of) = value.get(part).filter(|part| !part.is_null()) {
                let text = to_yaml(part_of);
                list(&capital(part), text.lines().map(str::to_owned));
            }
        }
        match key.kind {
            Kind::Pod => self.print_pod(key),
            Kind::HostEndpoint => self.print_host(key),
            Kind::Node => self.print_node(key),
            Kind::Service => self.print_service(key),
            kind if kind.is_policy() => self.print_policy(key),
            _ => {}
        }
        self.print_conditions(key);
    }

    fn print_pod(&self, key: &Key) {
        let is_it = |pod: &SeenPod<'_>| {
            pod.subject().namespace() == key.namespace && pod.subject().name() == key.name
        };
        let Some(pod) = self.oracle.pods().find(is_it) else {
            list("Policies", ["none: the pod has no network of its own, or none yet".to_owned()]);
            return;
        };
        list("Addresses", pod.addresses().iter().map(ToString::to_string));
        for (direction, name) in DIRECTIONS {
            list(&format!("Policies for {name}"), self.policies(&self.oracle.applying(&pod, direction)));
        }
        list("Profiles", pod.profiles().iter().cloned());
    }

    fn print_host(&self, key: &Key) {
        let Some(host) = self.oracle.hosts().find(|host| host.subject().name() == key.name) else { return };
        list("Addresses", host.addresses().iter().map(ToString::to_string));
        for (direction, name) in DIRECTIONS {
            list(&format!("Policies for {name}"), self.policies(&self.at_host(&host, direction)));
        }
    }

    fn at_host(&self, host: &SeenHost<'_>, direction: Direction) -> Vec<usize> {
        let mut all: Vec<usize> =
            TABLES.into_iter().flat_map(|table| self.oracle.applying_at(host, table, direction)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Policies by their numbers, with their tiers, in the order of evaluation.
    fn policies(&self, numbers: &[usize]) -> Vec<String> {
        let policies = self.oracle.policies().enumerate().filter(|(number, _)| numbers.contains(number));
        let lines = policies.map(|(_, policy)| {
            let staged = if policy.staged { ", staged: without effect" } else { "" };
            format!("{} (tier {}{staged})", policy.name, policy.tier)
        });
        let lines: Vec<String> = lines.collect();
        if lines.is_empty() { vec!["none".to_owned()] } else { lines }
    }

    fn print_policy(&self, key: &Key) {
        let found = self.oracle.policies().enumerate().find(|(_, policy)| {
            self.snapshot.get(key).is_some_and(|stored| std::ptr::eq(policy.stored, stored))
        });
        let Some((number, policy)) = found else { return };
        field("Tier", policy.tier);
        if policy.staged {
            field("Staged", "it has no effect; tortie preview --staged shows which one it would have");
        }
        for (direction, name) in DIRECTIONS {
            let pods =
                self.oracle.pods().filter(|pod| self.oracle.applying(pod, direction).contains(&number));
            let pods = pods.map(|pod| format!("{}/{}", pod.subject().namespace(), pod.subject().name()));
            let hosts = self.oracle.hosts().filter(|host| self.at_host(host, direction).contains(&number));
            let hosts =
                hosts.map(|host| format!("host endpoint {} of node {}", host.subject().name(), host.node()));
            list(&format!("Applies to {name} of"), shortened(pods.chain(hosts).collect()));
        }
    }

    fn print_node(&self, key: &Key) {
        let pods = self.oracle.pods().filter(|pod| pod.node() == key.name);
        let pods = pods.map(|pod| format!("{}/{}", pod.subject().namespace(), pod.subject().name()));
        list("Pods with a network", shortened(pods.collect()));
        let hosts = self.oracle.hosts().filter(|host| host.node() == key.name);
        list("Host endpoints", hosts.map(|host| host.subject().name().to_owned()));
        let report = self.snapshot.get(&Key::global(Kind::NodeReport, &key.name));
        match report.map(|report| &report.value["status"]) {
            None => field("Report", "none: no agent of Tortie has reported"),
            Some(status) => {
                let text = |name: &str| status[name].as_str().unwrap_or_default().to_owned();
                field("Report", &format!("{} by version {}", text("time"), text("version")));
            }
        }
    }

    fn print_service(&self, key: &Key) {
        let (_, backends) = self.oracle.backends(&key.namespace, &key.name);
        let backends = backends.iter().map(|(address, protocol, port)| match address.is_ipv6() {
            true => format!("[{address}]:{port} {protocol}"),
            false => format!("{address}:{port} {protocol}"),
        });
        list("Backends", shortened(backends.collect()));
    }

    /// What nodes report about the object. The conditions of a node are all that it reports.
    fn print_conditions(&self, key: &Key) {
        let concerns = |node: &str, condition: &tortie_api::report::ReportedCondition| {
            condition.concerns(key) || matches!(key.kind, Kind::Node | Kind::NodeReport) && node == key.name
        };
        let conditions = snapshot::reports(self.snapshot).into_iter();
        let conditions = conditions.filter(|(node, condition)| concerns(node, condition));
        let lines =
            conditions.map(|(node, condition)| format!("node {node}: {}", output::condition(&condition)));
        list("Conditions", lines);
    }
}

/// Only some of many.
fn shortened(mut all: Vec<String>) -> Vec<String> {
    if all.is_empty() {
        return vec!["none".to_owned()];
    }
    let more = all.len().saturating_sub(MAX_PODS);
    if more > 0 {
        all.truncate(MAX_PODS);
        all.push(format!("and {more} more"));
    }
    all
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn field(name: &str, value: &str) {
    output::line(&format!("{:12} {value}", format!("{name}:")));
}

/// A title with a line for each element; nothing without elements.
fn list(name: &str, lines: impl IntoIterator<Item = String>) {
    let mut lines = lines.into_iter().peekable();
    if lines.peek().is_some() {
        output::line(&format!("{name}:"));
        lines.for_each(|line| output::line(&format!("  {}", output::shown(&line))));
    }
}

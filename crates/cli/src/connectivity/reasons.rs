//! Why a check failed: what policy says, what nodes report, and what the other checks show.

use jiff::Timestamp;
use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::Severity;
use tortie_oracle::{Oracle, Peer, Question, Snapshot, Verdict};

use super::plan::{About, From, NAMESPACE, Node, Os, PlannedCheck, SERVICE_PORT, To, server, service};
use super::report::CheckOutcome;
use crate::port::PortSpec;
use crate::service::Services;
use crate::{explain, output, vxlan_ports};

/// The source port of the questions; rules that depend on it are rare.
const SOURCE_PORT: u16 = 40_000;

/// The words for a verdict that the oracle cannot give.
const UNKNOWN: &str = "it is not known what policy says";

/// What policy says about a check.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PolicyVerdict {
    /// By this rule.
    Denied(String),
    Allowed,
    /// For this reason, for instance because the datastore does not have the pods.
    Unknown(String),
}

/// What is known when the checks are done.
pub(super) struct Known<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) nodes: &'a [Node],
    pub(super) now: Timestamp,
}

impl Known<'_> {
    /// The reason for a failure, of which the client knows only the symptom.
    pub(super) fn reason(&self, outcome: &CheckOutcome, all: &[CheckOutcome]) -> String {
        let CheckOutcome { check, failed } = outcome;
        let symptom = failed.as_deref().unwrap_or_default();
        if check.about == About::Denied {
            let node = self.nodes_of(check).into_iter().find_map(|node| self.trouble(node));
            let policy = match self.policy(check) {
                _ if symptom.contains("proves nothing") => symptom.to_owned(),
                PolicyVerdict::Denied(by) => format!("{symptom}, although it is {by}"),
                PolicyVerdict::Allowed => format!("{symptom}, because another policy allows it"),
                PolicyVerdict::Unknown(why) => format!("{symptom}; {UNKNOWN}: {why}"),
            };
            return join(policy, node);
        }
        if let Some(problem) = self.no_backend(check) {
            return problem;
        }
        let policy = match self.policy(check) {
            PolicyVerdict::Denied(by) => return format!("policy: {by}"),
            PolicyVerdict::Allowed => "policy allows it".to_owned(),
            PolicyVerdict::Unknown(why) => format!("{UNKNOWN}: {why}"),
        };
        let node = self.nodes_of(check).into_iter().find_map(|node| self.trouble(node));
        join(format!("{symptom}; {policy}"), node.or_else(|| self.path(check, all)))
    }

    /// The nodes whose agents a check depends on.
    fn nodes_of(&self, check: &PlannedCheck) -> Vec<&Node> {
        let to = match check.to {
            To::Server(node) => Some(node),
            To::Service(_) => None,
        };
        [Some(check.from.node()), to].into_iter().flatten().filter_map(|node| self.nodes.get(node)).collect()
    }

    /// What policy says about the packets of a check, according to the oracle.
    fn policy(&self, check: &PlannedCheck) -> PolicyVerdict {
        let oracle = Oracle::new(self.snapshot);
        let questions = match self.questions(check) {
            Ok(questions) => questions,
            Err(why) => return PolicyVerdict::Unknown(why),
        };
        let mut unknown = None;
        for question in questions {
            let answer = match oracle.evaluate(&question) {
                Ok(answer) if answer.verdict == Verdict::Deny => answer,
                Ok(_) => continue,
                Err(error) => {
                    unknown = Some(error.to_string());
                    continue;
                }
            };
            let mut traces = answer.egress.iter().chain(&answer.hosts).chain(&answer.ingress);
            if let Some(denied) = traces.find(|trace| trace.verdict == Verdict::Deny) {
                let (place, by) = explain::decision(denied);
                return PolicyVerdict::Denied(format!("denied {by} ({place})"));
            }
        }
        unknown.map_or(PolicyVerdict::Allowed, PolicyVerdict::Unknown)
    }

    /// The packets of a check, as `tortie explain` asks about them.
    fn questions(&self, check: &PlannedCheck) -> Result<Vec<Question>, String> {
        let from = match check.from {
            From::Pod(_) => Peer::Pod { namespace: NAMESPACE.to_owned(), name: check.from.pod() },
            From::Node(node) => {
                Peer::Node(self.nodes.get(node).map(|node| node.name.clone()).unwrap_or_default())
            }
        };
        let port = PortSpec::read(check.about.port()).map_err(|error| error.to_string())?;
        let to_service = |name: &str| {
            let translated =
                Services::of(self.snapshot).named(name, "default", port).map_err(|error| error.to_string());
            translated.map(|to| explain::questions(&from, &to, port, SOURCE_PORT))
        };
        match (check.about, check.to) {
            (About::Dns, _) => to_service(DNS),
            (_, To::Service(os)) => to_service(&format!("{NAMESPACE}/{}", service(os))),
            (_, To::Server(node)) => {
                let to = Peer::Pod { namespace: NAMESPACE.to_owned(), name: server(node) };
                Ok(vec![explain::question(from, to, port, SOURCE_PORT)])
            }
        }
    }

    /// What is wrong with the Service that a check needs.
    fn no_backend(&self, check: &PlannedCheck) -> Option<String> {
        let (name, port) = match (check.about, check.to) {
            (About::Dns, _) => (DNS.to_owned(), check.about.port()),
            (_, To::Service(os)) => (format!("{NAMESPACE}/{}", service(os)), check.about.port()),
            (_, To::Server(_)) => return None,
        };
        let port = PortSpec::read(port).ok()?;
        Services::of(self.snapshot).named(&name, "default", port).err().map(|error| error.to_string())
    }

    /// What a node's agent reports that can be the reason, or that it does not report.
    fn trouble(&self, node: &Node) -> Option<String> {
        let name = &node.name;
        let boot_id = self.snapshot.get(&Key::global(Kind::Node, name));
        let boot_id = boot_id.and_then(|node| node.value["status"]["nodeInfo"]["bootID"].as_str());
        let stored = self.snapshot.get(&Key::global(Kind::NodeReport, name));
        let Some(Ok(Resource::NodeReport(report))) = stored.map(|stored| &stored.resource) else {
            return Some(format!("node {name} has no report: does its agent run?"));
        };
        trouble_in(name, &report.status, boot_id, self.now)
    }

    /// What the other checks show about the path: between nodes nothing passes, though on each node it does.
    fn path(&self, check: &PlannedCheck, all: &[CheckOutcome]) -> Option<String> {
        let To::Server(to) = check.to else { return None };
        let from = check.from.node();
        let between = |one: usize, other: usize| {
            all.iter().filter(move |outcome| {
                let PlannedCheck { from, about, to, .. } = &outcome.check;
                *about == About::Pod && from.node() == one && *to == To::Server(other)
            })
        };
        let works = |one: usize, other: usize| between(one, other).all(|outcome| outcome.failed.is_none());
        if from == to {
            return None;
        }
        if !works(from, to) && works(from, from) && works(to, to) {
            let address = |node: usize| self.address(node);
            return Some(format!(
                "nothing passes between the nodes, though it does on each of them: check that UDP {} (VXLAN) passes between {} and {}",
                self.nodes.get(to).map_or_else(String::new, |node| {
                    vxlan_ports::of_node(self.snapshot, &node.name).to_string()
                }),
                address(from),
                address(to)
            ));
        }
        let is_large = matches!(check.about, About::LargeTcp | About::LargeUdp);
        (is_large && works(from, to)).then(|| {
            format!(
                "small packets pass: check the MTU between {} and {}; encapsulation takes 50 bytes",
                self.address(from),
                self.address(to)
            )
        })
    }

    /// The address of a node, or its name.
    fn address(&self, node: usize) -> String {
        let Some(node) = self.nodes.get(node) else { return String::new() };
        match self.snapshot.get(&Key::global(Kind::Node, &node.name)).map(|stored| &stored.resource) {
            Some(Ok(Resource::Node(found))) => {
                found.address().map_or_else(|| node.name.clone(), |address| address.to_string())
            }
            _ => node.name.clone(),
        }
    }
}

/// The Service of the cluster's DNS.
pub(super) const DNS: &str = "kube-system/kube-dns";

fn join(first: String, more: Option<String>) -> String {
    match more {
        Some(more) => format!("{first}; {more}"),
        None => first,
    }
}

fn trouble_in(name: &str, status: &NodeStatus, boot_id: Option<&str>, now: Timestamp) -> Option<String> {
    if let Some(why) = tortie_store::stale(status, boot_id, now) {
        return Some(format!("node {name}: {why}"));
    }
    let failure = |reason: &str| Severity::of(reason) == Severity::Failure;
    let condition = status.conditions.iter().find(|condition| failure(&condition.reason))?;
    Some(format!("node {name} reports: {}", output::condition(condition)))
}

/// Why an address of a Service is missing.
pub(super) fn no_address(os: Os) -> String {
    format!("Service {} has no cluster IP (its port would be {SERVICE_PORT})", service(os))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::plan;
    use super::*;

    /// Where the pods of the test are not in the datastore, policy is not said to allow anything.
    #[test]
    fn what_the_oracle_does_not_know_is_not_allowed() {
        let nodes = vec![Node { name: "one".to_owned(), os: Os::Linux }];
        let snapshot = Snapshot::new();
        let known = Known { snapshot: &snapshot, nodes: &nodes, now: Timestamp::UNIX_EPOCH };
        let addresses = plan::Addresses {
            servers: [(0, "10.0.0.1".parse().unwrap())].into(),
            services: [(Os::Linux, "10.96.0.1".parse().unwrap())].into(),
            has_dns: true,
        };
        for check in plan::checks(&nodes, &addresses) {
            assert!(matches!(known.policy(&check), PolicyVerdict::Unknown(_)), "{check:?}");
            let outcome = CheckOutcome { check, failed: Some("no answer".to_owned()) };
            let reason = known.reason(&outcome, &[]);
            assert!(!reason.contains("policy allows") && !reason.contains("policy: "), "{reason}");
        }
    }
}

//! Why a check failed: what policy says, what nodes report, and what the other checks show.

use std::collections::BTreeSet;

use jiff::Timestamp;
use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::Severity;
use tortie_oracle::{Oracle, Peer, Question, Snapshot, Verdict};

use super::path::NodePath;
use super::plan::{About, From, NAMESPACE, Node, Os, PlannedCheck, SERVICE_PORT, To, server, service};
use super::report::CheckOutcome;
use super::wire::Probe;
use crate::port::PortSpec;
use crate::service::Services;
use crate::{explain, output};

/// The source port of the questions; rules that depend on it are rare.
const SOURCE_PORT: u16 = 40_000;

/// The maximum number of conditions of a node that a reason has word by word.
const MOST_NAMED: usize = 3;

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
        let trouble = self.trouble_of(check);
        if check.about == About::Denied {
            let policy = match self.policy(check) {
                _ if symptom.contains("proves nothing") => symptom.to_owned(),
                PolicyVerdict::Denied(by) => format!("{symptom}, although it is {by}"),
                PolicyVerdict::Allowed => format!("{symptom}, because another policy allows it"),
                PolicyVerdict::Unknown(why) => format!("{symptom}; {UNKNOWN}: {why}"),
            };
            return join(policy, trouble.told);
        }
        if let Some(problem) = self.no_backend(check) {
            return problem;
        }
        let policy = match self.policy(check) {
            PolicyVerdict::Denied(by) => return format!("policy: {by}"),
            PolicyVerdict::Allowed => "policy allows it".to_owned(),
            PolicyVerdict::Unknown(why) => format!("{UNKNOWN}: {why}"),
        };
        let Trouble { told, is_cause } = trouble;
        // What fails on a node says enough. Nodes that are out of reach may be others than these.
        let path = self.path(check, all).filter(|_| !is_cause);
        join(join(format!("{symptom}; {policy}"), told), path)
    }

    /// The nodes whose agents a check depends on: those of both ends. A Service may lead to each node with servers.
    fn nodes_of(&self, check: &PlannedCheck) -> Vec<&Node> {
        let from = check.from.node();
        let is_end = |(index, node): &(usize, &Node)| match check.to {
            To::Server(to) => *index == to,
            To::Service(os) => node.os == os,
        };
        let others = self.nodes.iter().enumerate().filter(|(index, _)| *index != from).filter(is_end);
        self.nodes.get(from).into_iter().chain(others.map(|(_, node)| node)).collect()
    }

    /// The reports of the agents of a check's nodes that can be the reason.
    fn trouble_of(&self, check: &PlannedCheck) -> Trouble {
        let troubles = self.nodes_of(check).into_iter().map(|node| self.trouble(node));
        troubles.fold(Trouble::default(), |all, one| Trouble {
            told: match all.told {
                Some(told) => Some(join(told, one.told)),
                None => one.told,
            },
            is_cause: all.is_cause || one.is_cause,
        })
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
    fn trouble(&self, node: &Node) -> Trouble {
        let name = &node.name;
        let boot_id = self.snapshot.get(&Key::global(Kind::Node, name));
        let boot_id = boot_id.and_then(|node| node.value["status"]["nodeInfo"]["bootID"].as_str());
        let stored = self.snapshot.get(&Key::global(Kind::NodeReport, name));
        let Some(Ok(Resource::NodeReport(report))) = stored.map(|stored| &stored.resource) else {
            return Trouble::cause(format!("node {name} has no report: does its agent run?"));
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
        let (sender, receiver) = self.nodes.get(from).zip(self.nodes.get(to)).filter(|_| from != to)?;
        let path = NodePath {
            snapshot: self.snapshot,
            from: &sender.name,
            to: &receiver.name,
            address: check.probe.as_ref().and_then(Probe::address),
        };
        if !works(from, to) && works(from, from) && works(to, to) {
            return Some(path.hint());
        }
        let is_large = matches!(check.about, About::LargeTcp | About::LargeUdp);
        (is_large && works(from, to)).then(|| path.hint_about_size())
    }
}

/// The reports of nodes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Trouble {
    told: Option<String>,
    /// True if something fails on a node, or nothing is known of it.
    is_cause: bool,
}

impl Trouble {
    fn cause(told: String) -> Self {
        Self { told: Some(told), is_cause: true }
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

/// The report of a node: failures and what is out of reach word by word, and everything else of the node by its reason.
fn trouble_in(name: &str, status: &NodeStatus, boot_id: Option<&str>, now: Timestamp) -> Trouble {
    if let Some(why) = tortie_store::stale(status, boot_id, now) {
        return Trouble::cause(format!("node {name}: {why}"));
    }
    let of = |severity: Severity| {
        status.conditions.iter().filter(move |condition| Severity::of(&condition.reason) == severity)
    };
    let urgent: Vec<String> =
        of(Severity::Failure).chain(of(Severity::Unreachable)).map(output::condition).collect();
    let mut told: Vec<String> = urgent.iter().take(MOST_NAMED).cloned().collect();
    told.extend((urgent.len() > MOST_NAMED).then(|| format!("{} more", urgent.len() - MOST_NAMED)));
    // Those of single pods are not about this check.
    let others = of(Severity::WithoutEffect).chain(of(Severity::Information));
    let others =
        others.filter(|condition| condition.object.as_ref().is_none_or(|object| object.namespace.is_empty()));
    let others: BTreeSet<&str> = others.map(|condition| condition.reason.as_str()).collect();
    if !others.is_empty() {
        let named: Vec<&str> = others.into_iter().collect();
        told.push(format!("besides {} (tortie get nodereports -o json)", named.join(", ")));
    }
    let is_cause = of(Severity::Failure).next().is_some();
    Trouble {
        told: (!told.is_empty()).then(|| format!("node {name} reports: {}", told.join("; "))),
        is_cause,
    }
}

/// Why an address of a Service is missing.
pub(super) fn no_address(os: Os) -> String {
    format!("Service {} has no cluster IP (its port would be {SERVICE_PORT})", service(os))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

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

    /// Conditions of a node, by reason; a reason with a slash is one of a pod.
    fn status(reasons: &[&str]) -> NodeStatus {
        let conditions = reasons.iter().map(|reason| match reason.strip_prefix("pod/") {
            Some(reason) => {
                json!({"object": {"kind": "Pod", "namespace": "n", "name": "p"}, "reason": reason, "message": "m"})
            }
            None => json!({"reason": reason, "message": "m"}),
        });
        let conditions: Vec<Value> = conditions.collect();
        let status = json!({"os": "linux", "endpoints": 0, "positions": {}, "heartbeatSeconds": 60,
            "time": Timestamp::UNIX_EPOCH.to_string(), "conditions": conditions});
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn conditions_of_all_severities_are_named() {
        for (reasons, expected, is_cause) in [
            (&[][..], "", false),
            (&["pod/NotUnderstood"], "", false),
            (
                &["CalicoLeftover"],
                "node one reports: besides CalicoLeftover (tortie get nodereports -o json)",
                false,
            ),
            (
                &["CalicoLeftover", "ForeignVxlanLink"],
                "node one reports: ForeignVxlanLink: m; besides CalicoLeftover (",
                false,
            ),
            (&["BgpSettingNotInForce"], "node one reports: besides BgpSettingNotInForce (", false),
            (
                &["RouteTaken", "PolicyNotInForce"],
                "node one reports: PolicyNotInForce: m; RouteTaken: m",
                true,
            ),
            (
                &["RouteTaken"; 5],
                "node one reports: RouteTaken: m; RouteTaken: m; RouteTaken: m; 2 more",
                false,
            ),
        ] {
            let found = trouble_in("one", &status(reasons), None, Timestamp::UNIX_EPOCH);
            let told = found.told.unwrap_or_default();
            assert!(
                told.starts_with(expected) && told.is_empty() == expected.is_empty(),
                "{reasons:?}: {told}"
            );
            assert_eq!(found.is_cause, is_cause, "{reasons:?}");
        }
        let later = Timestamp::UNIX_EPOCH + std::time::Duration::from_secs(3_600);
        assert!(trouble_in("one", &status(&[]), None, later).is_cause, "nothing is known of it");
    }

    /// Two nodes with an agent each, and a pool. All checks between the nodes fail.
    fn reason_between(pool: Value, first: &[&str], second: &[&str]) -> String {
        let nodes = ["one", "two"].map(|name| Node { name: name.to_owned(), os: Os::Linux });
        let mut snapshot = Snapshot::new();
        for (node, address, reasons) in [("one", "192.0.2.11/24", first), ("two", "192.0.2.12/24", second)] {
            let annotations = json!({"projectcalico.org/IPv4Address": address});
            let value = json!({"metadata": {"name": node, "annotations": annotations}});
            snapshot.insert(Key::global(Kind::Node, node), value, None);
            let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": node}, "status": status(reasons)});
            snapshot.insert(Key::global(Kind::NodeReport, node), report, None);
        }
        let mut spec = json!({"cidr": "10.1.0.0/16"});
        spec.as_object_mut().unwrap().extend(pool.as_object().unwrap().clone());
        snapshot.insert(
            Key::global(Kind::IpPool, "p"),
            json!({"metadata": {"name": "p"}, "spec": spec}),
            None,
        );
        let known = Known { snapshot: &snapshot, nodes: &nodes, now: Timestamp::UNIX_EPOCH };
        let servers = [(0, "10.1.0.1".parse().unwrap()), (1, "10.1.0.65".parse().unwrap())].into();
        let addresses = plan::Addresses { servers, ..plan::Addresses::default() };
        let outcome = |check: PlannedCheck| {
            let is_between = check.to != To::Server(check.from.node());
            let failed = is_between.then(|| "no answer".to_owned());
            CheckOutcome { check, failed }
        };
        let all: Vec<CheckOutcome> = plan::checks(&nodes, &addresses).into_iter().map(outcome).collect();
        let is_asked =
            |outcome: &&CheckOutcome| outcome.check.about == About::Pod && outcome.failed.is_some();
        known.reason(all.iter().find(is_asked).unwrap(), &all)
    }

    /// The cases of reports: a foreign VXLAN link on one node, a mesh without peers, and nothing known at all.
    #[test]
    fn a_failure_between_nodes_is_explained_by_both_nodes_and_the_mode_of_the_path() {
        let (vxlan, plain, ipip) = (json!({"vxlanMode": "Always"}), json!({}), json!({"ipipMode": "Always"}));
        let (udp, as_they_are) = ("UDP 4789 (VXLAN)", "packets travel as they are (IPPool p)");
        for (pool, first, second, expected, absent) in [
            (&vxlan, &[][..], &[][..], &[udp][..], &["reports"][..]),
            (
                &vxlan,
                &[],
                &["ForeignVxlanLink"],
                &["node two reports: ForeignVxlanLink: m", udp],
                &["node one"],
            ),
            (
                &vxlan,
                &["RouteTaken"],
                &["ForeignVxlanLink"],
                &["node one reports: RouteTaken", "node two reports: ForeignVxlanLink"],
                &[],
            ),
            (&vxlan, &["PolicyNotInForce"], &[], &["node one reports: PolicyNotInForce: m"], &["VXLAN"]),
            (&plain, &[], &[], &[as_they_are, "10.1.0.65"], &["VXLAN", "UDP"]),
            (
                &plain,
                &["BlockUnreachable"],
                &["BgpSettingNotInForce"],
                &["node one reports: BlockUnreachable: m", "BgpSettingNotInForce", as_they_are],
                &["VXLAN"],
            ),
            (&ipip, &[], &[], &["IPIP (protocol 4"], &["VXLAN"]),
        ] {
            let reason = reason_between(pool.clone(), first, second);
            assert!(expected.iter().all(|part| reason.contains(part)), "{expected:?}: {reason}");
            assert!(!absent.iter().any(|part| reason.contains(part)), "{absent:?}: {reason}");
        }
    }

    /// A Service may lead to each node with servers.
    #[test]
    fn the_nodes_of_a_service_are_those_of_its_servers() {
        let node = |name: &str, os| Node { name: name.to_owned(), os };
        let nodes =
            [node("a", Os::Linux), node("b", Os::Windows), node("c", Os::Linux), node("d", Os::Windows)];
        let snapshot = Snapshot::new();
        let known = Known { snapshot: &snapshot, nodes: &nodes, now: Timestamp::UNIX_EPOCH };
        for (from, to, expected) in [
            (0, To::Server(3), &["a", "d"][..]),
            (0, To::Server(0), &["a"]),
            (1, To::Service(Os::Linux), &["b", "a", "c"]),
            (1, To::Service(Os::Windows), &["b", "d"]),
        ] {
            let check = PlannedCheck { from: From::Pod(from), about: About::Service, to, probe: None };
            let names: Vec<&str> = known.nodes_of(&check).iter().map(|node| node.name.as_str()).collect();
            assert_eq!(names, expected);
        }
    }
}

//! The problems of endpoints that differ from what was requested.

use std::collections::{BTreeMap, BTreeSet};

use tortie_dataplane::EndpointId;

use crate::dataplane::policies::Problem;

use super::{DesiredTable, Pod, Policy, Programs};

/// The problems of an endpoint.
pub(crate) struct EndpointProblems<'a> {
    pub interface: &'a str,
    /// Whether another endpoint claims the same interface.
    pub contested: bool,
    /// Another endpoint that has a port of the node that it wants.
    pub host_port_taken_by: Option<&'a EndpointId>,
    /// The parts of its policy that cannot be rendered.
    pub problems: BTreeSet<&'a Problem>,
}

impl DesiredTable {
    /// The pods with problems.
    pub(crate) fn problems_of_pods(&self) -> Vec<(&EndpointId, EndpointProblems<'_>)> {
        // Usually there is nothing, and this runs after every change.
        let is_alone = |wanted: &BTreeMap<_, _>| wanted.len() == 1;
        if self.problems == 0
            && self.interfaces.len() == self.pods.len()
            && self.host_ports.values().all(is_alone)
        {
            return Vec::new();
        }
        let bad = self.bad_programs();
        let of_pod = |(id, pod): (_, _)| {
            let pod: &Pod = pod;
            let interface = pod.interface.as_deref().unwrap_or_default();
            let contested = self.interfaces.get(interface).is_some_and(|ids| ids.len() > 1);
            let problems = self.problems(&pod.programs, &bad);
            let owners = pod.host_ports.iter().filter_map(|key| self.host_ports.get(key)?.keys().next());
            let host_port_taken_by = owners.into_iter().find(|owner| *owner != id);
            let has_any = contested || host_port_taken_by.is_some() || !problems.is_empty();
            has_any.then_some((id, EndpointProblems { interface, contested, host_port_taken_by, problems }))
        };
        self.pods.iter().filter_map(of_pod).collect()
    }

    /// The host endpoints whose policy cannot be rendered, with the problems.
    pub(crate) fn host_problems(&self) -> Vec<(&str, BTreeSet<&Problem>)> {
        if self.problems == 0 {
            return Vec::new();
        }
        let bad = self.bad_programs();
        let hosts =
            self.hosts.iter().map(|(name, host)| (name.as_str(), self.problems(&host.programs, &bad)));
        hosts.filter(|(_, problems)| !problems.is_empty()).collect()
    }

    /// The host endpoints without an interface, or only with interfaces on which another host endpoint takes
    /// precedence.
    pub(crate) fn hosts_without_interface(&self) -> impl Iterator<Item = &str> {
        let counts = |name: &String, interface: &String| {
            self.host_interfaces.get(interface).and_then(BTreeSet::first) == Some(name)
        };
        let idle = self
            .hosts
            .iter()
            .filter(move |(name, host)| !host.interfaces.iter().any(|interface| counts(name, interface)));
        idle.map(|(name, _)| name.as_str())
    }

    /// The programs that cannot be rendered, or that name a policy that cannot be rendered.
    fn bad_programs(&self) -> BTreeSet<&str> {
        let is_bad = |policy: &Policy| policy.lines.iter().any(|lines| lines.problem.is_some());
        let by_policy = self.policies.values().filter(|policy| is_bad(policy));
        let by_policy = by_policy.flat_map(|policy| &policy.programs);
        let by_itself = self.programs.iter().filter(|(_, program)| program.written.problem.is_some());
        by_policy.chain(by_itself.map(|(name, _)| name)).map(String::as_str).collect()
    }

    fn problems(&self, programs: &Programs, bad: &BTreeSet<&str>) -> BTreeSet<&Problem> {
        let mut problems = BTreeSet::new();
        for name in programs.values().filter(|name| bad.contains(name.as_str())) {
            let Some(program) = self.programs.get(name) else { continue };
            problems.extend(&program.written.problem);
            let policies = program.spec.policies().filter_map(|id| self.policies.get(id));
            let lines = policies.map(|policy| policy.lines(program.spec.direction));
            problems.extend(lines.filter_map(|lines| lines.problem.as_ref()));
        }
        problems
    }
}

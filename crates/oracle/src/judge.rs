//! Evaluates the policies of one endpoint for a packet.

use tortie_api::calico::{BgpFromPods, Rule, TierDefault};
use tortie_api::net::{Action, Direction, Protocol};
use tortie_api::report::StaticRule;
use tortie_api::{Key, Kind, Resource};

use super::endpoint::JudgedEndpoint;
use super::order::{Policy, Rules};
use super::packet::Packet;
use super::profiles::SeenProfile;
use super::trace::{DecidedBy, PolicyName, PolicyTrace, Table, TierTrace, Trace, Verdict};
use super::world::Workload;
use super::{Oracle, Stored, calico, cluster, kubernetes};

impl Table {
    /// The default at the end of a tier. Before connection tracking and before address translation, a packet is not
    /// denied because no rule matched (policy decision 16).
    fn end_of(self, end: TierDefault) -> TierDefault {
        match self {
            Table::Untracked | Table::PreDnat => TierDefault::Pass,
            Table::Normal | Table::Forward => end,
        }
    }
}

impl Oracle<'_> {
    /// Evaluates the policies of one endpoint: tiers, then profiles, then deny (policy decisions 7, 8). The other
    /// tables of a host endpoint consist of tiers only (policy decision 16).
    pub(super) fn judge(
        &self,
        endpoint: &JudgedEndpoint<'_>,
        direction: Direction,
        packet: &Packet<'_>,
    ) -> Trace {
        let mut trace = Trace::begin(endpoint.identity.to_string(), direction, endpoint.table);
        for tier in &self.tiers {
            let mut tier_trace = TierTrace::begin(&tier.name);
            for policy in tier.policies.iter().filter(|policy| policy.applies(endpoint, direction)) {
                let policy = visit(policy, direction, packet);
                let decided = policy.decision.is_some() && !policy.staged;
                tier_trace.policies.push(policy);
                if decided {
                    break;
                }
            }
            // A tier counts only if one of its policies applies.
            if tier_trace.policies.is_empty() {
                continue;
            }
            if let Some(decided) = trace.close_tier(tier_trace, endpoint.table.end_of(tier.end)) {
                return decided;
            }
        }
        if endpoint.table != Table::Normal {
            return trace.decided(Verdict::Allow, DecidedBy::Nobody);
        }
        for profile in endpoint.profiles {
            trace.profiles.push(self.profile(profile, direction, packet));
            if let Some(decided) = trace.decided_by_profile() {
                return decided;
            }
        }
        trace.decided(Verdict::Deny, DecidedBy::NoProfile)
    }

    /// The trace of the static rules of the pod's node, if one decides (policy decision 26). Some of them do not
    /// apply to packets that the node itself sends. If a report is unreadable, `notes` says so.
    pub(super) fn before_policy(
        &self,
        pod: &Workload,
        direction: Direction,
        packet: &Packet<'_>,
        from_own_node: bool,
        notes: &mut Vec<String>,
    ) -> Option<Trace> {
        let stored = self.snapshot.get(&Key::global(Kind::NodeReport, &pod.node))?;
        let report = match &stored.resource {
            Ok(Resource::NodeReport(report)) => report,
            Ok(_) => return None,
            Err(problem) => {
                notes.push(format!(
                    "the report of node {} cannot be read ({problem}): if the node has static rules, they are not in this \
                     answer",
                    pod.node
                ));
                return None;
            }
        };
        let [source, destination] =
            [&packet.source, &packet.destination].map(|side| (side.address, side.port));
        let rule = StaticRule::decisive(&report.status.static_rules, |rule| {
            let applies = !(from_own_node && rule.after_own_node);
            applies && rule.matches(direction, packet.protocol, source, destination)
        })?;
        let mut trace = Trace::begin(pod.identity.to_string(), direction, Table::Normal);
        let by = DecidedBy::StaticRule { node: pod.node.clone(), name: rule.name.clone() };
        Some(trace.decided(Verdict::from(rule.allow), by))
    }

    /// The fixed rules for every packet that a pod sends, before its policy. A pod may not send tunnel packets,
    /// because another node would accept their contents as packets of its own (unless FelixConfiguration allows
    /// them); each node listens on the port that is configured for it, and Windows nodes on their own. A pod may not advertise itself as a router, and
    /// not connect to the BGP speaker of a node. Neighbour discovery between a pod and its node always works
    /// (policy decisions 22, 38, 48).
    pub(super) fn built_in(&self, pod: &Workload, to_own_node: bool, packet: &Packet<'_>) -> Option<Trace> {
        let felix = self.world.felix(&pod.node);
        let icmp_type =
            packet.icmp.filter(|_| packet.protocol == Protocol::ICMPV6).map(|(icmp_type, _)| icmp_type);
        let ports = self.world.vxlan_ports();
        let is_vxlan = packet.protocol == Protocol::UDP && ports.contains(&packet.destination.port);
        let to_bgp = packet.protocol == Protocol::TCP
            && self.world.is_bgp_of_a_node(packet.destination.address, packet.destination.port);
        let (verdict, rule) = match icmp_type {
            Some(133 | 135 | 136) if to_own_node => (Verdict::Allow, "a pod and its gateway find each other"),
            Some(134) => (Verdict::Deny, "pods do not advertise routers"),
            _ if is_vxlan && felix.allow_vxlan_packets_from_workloads != Some(true) => {
                (Verdict::Deny, "pods do not send VXLAN packets")
            }
            _ if packet.protocol == Protocol::IPIP
                && felix.allow_ipip_packets_from_workloads != Some(true) =>
            {
                (Verdict::Deny, "pods do not send IPIP packets")
            }
            _ if to_bgp && felix.bgp_from_pods.unwrap_or_default() == BgpFromPods::Drop => {
                (Verdict::Deny, "pods do not connect to the BGP speakers of nodes")
            }
            _ => return None,
        };
        let mut trace = Trace::begin(pod.identity.to_string(), Direction::Egress, Table::Normal);
        Some(trace.decided(verdict, DecidedBy::BuiltIn { rule: rule.to_owned() }))
    }

    /// Evaluates a profile: its stored rules, or deny if it was not understood. The profile of an existing namespace
    /// allows everything; that of a service account has no rules. A profile that does not exist denies, as in Calico
    /// (`felix/calc/active_rules_calculator.go`, `DummyDropRules`).
    pub(super) fn profile(&self, name: &str, direction: Direction, packet: &Packet<'_>) -> PolicyTrace {
        let stored = self.snapshot.get(&Key::global(Kind::Profile, name));
        let origin = stored.and_then(|stored| stored.location(""));
        let mut trace = PolicyTrace::begin(PolicyName::profile(name), origin);
        match stored.map(|stored| (&stored.resource, stored)) {
            Some((Ok(Resource::Profile(profile)), stored)) => {
                let rules = match direction {
                    Direction::Ingress => &profile.spec.ingress,
                    Direction::Egress => &profile.spec.egress,
                };
                visit_rules("", rules, direction, packet, stored, &mut trace);
            }
            Some((Ok(_), _)) => trace.not_understood("it is no profile".to_owned()),
            Some((Err(problem), _)) => trace.not_understood(problem.clone()),
            None => match self.profile_of(name) {
                SeenProfile::AllowsAll => drop(trace.visit(Action::Allow, Ok(()), None)),
                SeenProfile::Missing => trace.not_understood("the profile does not exist".to_owned()),
                SeenProfile::Stored(_) | SeenProfile::WithoutRules => {}
            },
        }
        trace
    }
}

/// Evaluates one policy: its rules in order, until one decides.
fn visit(policy: &Policy<'_>, direction: Direction, packet: &Packet<'_>) -> PolicyTrace {
    let mut trace = PolicyTrace::begin(policy.name.clone(), policy.stored.location(""));
    trace.staged = policy.staged;
    match &policy.rules {
        // It denies at its position, for the endpoints that it selects (policy decision 18).
        Rules::NotUnderstood(problem) => trace.not_understood(problem.clone()),
        Rules::Calico(spec) => {
            let rules = calico::rules(spec, direction);
            visit_rules(&policy.name.namespace, rules, direction, packet, policy.stored, &mut trace);
        }
        Rules::Cluster(spec) => {
            for (index, rule) in cluster::rules(spec, direction).iter().enumerate() {
                let outcome = cluster::matches(spec, rule, direction, packet);
                if trace.visit(cluster::action(rule), outcome, location(policy.stored, direction, index)) {
                    break;
                }
            }
        }
        Rules::Kubernetes(spec) => {
            for (index, rule) in kubernetes::rules(spec, direction).iter().enumerate() {
                let outcome = kubernetes::matches(&policy.name.namespace, spec, rule, direction, packet);
                if trace.visit(Action::Allow, outcome, location(policy.stored, direction, index)) {
                    break;
                }
            }
        }
    }
    trace
}

/// Evaluates Calico's rules in order, until one decides.
fn visit_rules(
    namespace: &str,
    rules: &[Rule],
    direction: Direction,
    packet: &Packet<'_>,
    stored: &Stored,
    trace: &mut PolicyTrace,
) {
    for (index, rule) in rules.iter().enumerate() {
        let outcome = calico::matches(namespace, rule, packet);
        if trace.visit(rule.action, outcome, location(stored, direction, index)) {
            break;
        }
    }
}

/// The source location of a rule.
fn location(stored: &Stored, direction: Direction, index: usize) -> Option<String> {
    let direction = match direction {
        Direction::Ingress => "ingress",
        Direction::Egress => "egress",
    };
    stored.location(&format!("spec.{direction}[{index}]"))
}

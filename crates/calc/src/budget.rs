//! The size of what the policies of a namespace ask for at one of its pods. Whoever writes policies must not make each change on a node
//! take as long as a node needs for any number of rules.

use tortie_policy::program::{EntityMatch, PolicyRules, Rule};

/// The maximum number of rules of the namespaced policies that select one pod.
const MOST_RULES: usize = 10_000;
/// The maximum number of networks and ports that these rules list.
const MOST_VALUES: usize = 200_000;

/// What policies ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    rules: usize,
    values: usize,
}

impl Load {
    pub(crate) fn of(rules: &PolicyRules) -> Self {
        let all = || rules.ingress.iter().chain(&rules.egress);
        let listed =
            |one: &EntityMatch| one.nets.len() + one.not_nets.len() + one.ports.len() + one.not_ports.len();
        let values = |rule: &Rule| listed(&rule.source) + listed(&rule.destination);
        Self { rules: all().count(), values: all().map(values).sum() }
    }

    /// The sum.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { rules: self.rules + other.rules, values: self.values + other.values }
    }

    /// Why the pod is closed, if it is.
    pub(crate) fn problem(self) -> Option<String> {
        let Self { rules, values } = self;
        (rules > MOST_RULES || values > MOST_VALUES).then(|| {
            format!(
                "the policies of its namespace that select it have {rules} rules, which list {values} networks and ports; a pod may \
                 have {MOST_RULES} and {MOST_VALUES}. They deny everything in their place: join rules, put networks into network \
                 sets, or let policies select fewer pods"
            )
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};
    use tortie_api::calico::WorkloadEndpoint;
    use tortie_api::{Key, Kind};
    use tortie_dataplane::{EndpointId, NodeState, Reason};
    use tortie_policy::program::{EndOfTier, EndpointProgram, TierProgram};

    use super::*;
    use crate::{Calc, Finding};

    fn pod(namespace: &str, number: u8) -> (Key, Value) {
        let name = WorkloadEndpoint::name_for("n0", "pod", "eth0");
        let spec = json!({
            "orchestrator": "k8s", "node": "n0", "containerID": "c", "pod": "pod", "endpoint": "eth0",
            "ipNetworks": [format!("10.0.0.{number}/32")], "interfaceName": format!("cali{number}"),
        });
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
            "metadata": {"name": name, "namespace": namespace, "labels": {}}, "spec": spec
        });
        (Key::namespaced(Kind::WorkloadEndpoint, namespace, name), value)
    }

    /// A policy of the namespace with as many rules, of as many networks in total.
    fn policy(name: &str, rules: usize, networks: usize) -> (Key, Value) {
        let network = |number: usize| json!(format!("11.{}.{}.0/24", number / 256 % 256, number % 256));
        let rule = |number: usize| {
            let nets: Vec<_> = (number..networks).step_by(rules).map(network).collect();
            json!({"action": "Allow", "source": {"nets": nets}})
        };
        let ingress: Vec<_> = (0..rules).map(rule).collect();
        let spec = json!({"selector": "all()", "types": ["Ingress"], "order": 10, "ingress": ingress});
        (Key::namespaced(Kind::NetworkPolicy, "large", name), object("NetworkPolicy", name, spec))
    }

    /// A policy of the cluster: it comes before the namespace's, or after them.
    fn global(name: &str, order: u32, rules: usize) -> (Key, Value) {
        let rules = vec![json!({"action": "Allow"}); rules];
        let spec = json!({
            "selector": "all()", "types": ["Ingress", "Egress"], "order": order, "ingress": rules, "egress": rules
        });
        (Key::global(Kind::GlobalNetworkPolicy, name), object("GlobalNetworkPolicy", name, spec))
    }

    fn object(kind: &str, name: &str, spec: Value) -> Value {
        json!({"apiVersion": "projectcalico.org/v3", "kind": kind, "metadata": {"name": name}, "spec": spec})
    }

    fn program<'a>(state: &'a NodeState, namespace: &str) -> &'a EndpointProgram {
        let id = EndpointId { namespace: namespace.into(), pod: "pod".into(), interface: "eth0".into() };
        &state.endpoints[&id].program
    }

    fn names(tiers: &[TierProgram]) -> (Vec<&str>, EndOfTier) {
        let [tier] = tiers else { panic!("{tiers:?}") };
        (tier.policies.iter().map(|id| &*id.name).collect(), tier.end)
    }

    fn is_about_the_pod(findings: &[Finding]) -> bool {
        let key = Key::namespaced(Kind::Pod, "large", "pod");
        matches!(findings, [finding] if finding.key == key && finding.reason == Reason::TooManyRules)
    }

    /// Each step is a change of policies, with whether the pod of the namespace is closed then.
    #[test]
    fn policies_that_ask_for_too_much_deny_in_their_place_and_nowhere_else() {
        let (rules, values) = (MOST_RULES, MOST_VALUES);
        let steps: [(&str, (Key, Value), bool); 8] = [
            ("few rules", policy("a", 1, 0), false),
            ("as many rules as a pod may have", policy("b", rules - 1, 0), false),
            ("one more, by a policy", policy("c", 1, 0), true),
            ("one less, by the rules of a policy", policy("b", rules - 2, 0), false),
            ("as many networks as a pod may have", policy("c", 1, values), false),
            ("one more", policy("a", 1, 1), true),
            ("one less", policy("a", 1, 0), false),
            ("rules of the cluster do not count", global("before", 1, rules), false),
        ];
        let mut calc = Calc::new("n0");
        let mut given: Vec<(Key, Value)> = vec![pod("large", 1), pod("other", 2), global("before", 1, 1)];
        given.push(global("behind", 20, 1));
        given.iter().for_each(|(key, value)| calc.update(key, Some(value)));
        for (name, step, is_closed) in steps {
            calc.update(&step.0, Some(&step.1));
            calc.flush();
            given.push(step);
            let state = calc.state();
            let own = program(state, "large");
            let (policies, end) = names(&own.ingress);
            if is_closed {
                assert_eq!((policies, end), (vec!["before"], EndOfTier::Deny), "{name}");
            } else {
                assert_eq!(
                    (policies.len() > 2, policies.last(), end),
                    (true, Some(&"behind"), EndOfTier::Deny),
                    "{name}"
                );
            }
            let all = (vec!["before", "behind"], EndOfTier::Deny);
            assert_eq!(names(&own.egress), all, "{name}: the policies say nothing about this direction");
            assert_eq!(names(&program(state, "other").ingress), all, "{name}");
            assert_eq!(is_about_the_pod(&calc.findings()), is_closed, "{name}: {:?}", calc.findings());
            let mut at_once = Calc::new("n0");
            given.iter().for_each(|(key, value)| at_once.update(key, Some(value)));
            at_once.flush();
            assert!(at_once.state() == state, "{name}: the result depends on the objects only");
        }
        calc.update(&policy("b", 1, 0).0, Some(&policy("b", rules, 0).1));
        calc.flush();
        assert!(is_about_the_pod(&calc.findings()));
        calc.update(&pod("large", 1).0, None);
        calc.flush();
        assert_eq!(calc.findings(), [], "the pod is gone");
    }
}

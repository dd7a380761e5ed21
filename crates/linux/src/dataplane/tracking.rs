//! Reports that the node's connection tracking is nearly full, and whose connections fill it. New connections of all pods fail
//! when it is full, and one pod can fill it, for instance with UDP packets from many ports.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tortie_api::report::ObjectRef;
use tortie_dataplane::{Condition, NodeState, Reason};
use tortie_kernel::{Result, sysctl};

use super::forget::Forgetter;

/// The interval of readings of all connections, which take longer the more there are.
const READ_INTERVAL: Duration = Duration::from_secs(60);
/// The maximum number of pods in the condition.
const MAX_PODS: usize = 5;

/// What is known of the node's connections.
#[derive(Debug, Default)]
pub(super) struct Tracking {
    /// The limit, if it is not that of the kernel.
    limit: Option<usize>,
    read: Option<Instant>,
    condition: Option<Condition>,
}

impl Tracking {
    pub(super) fn new(limit: Option<usize>) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Compares the number of connections with the limit. A number that cannot be read changes nothing, since it is not policy.
    pub(super) fn look(&mut self, state: &NodeState, forgetter: &Forgetter, now: Instant) {
        if let Err(error) = self.try_look(state, forgetter, now) {
            tracing::debug!(%error, "cannot read how many connections the node has; Tortie retries");
        }
    }

    fn try_look(&mut self, state: &NodeState, forgetter: &Forgetter, now: Instant) -> Result<()> {
        // Without connection tracking, neither exists.
        let number = |name: &str| sysctl::read(name).map(|text| text.trim().parse().unwrap_or(usize::MAX));
        let count = number("net/netfilter/nf_conntrack_count")?;
        let limit = self.limit.map_or_else(|| number("net/netfilter/nf_conntrack_max"), Ok)?;
        // The kernel takes a limit of zero for none.
        if limit == 0 || count < limit - limit / 5 {
            (self.condition, self.read) = (None, None);
        } else if self.read.is_none_or(|at| now >= at + READ_INTERVAL) {
            self.read = Some(now);
            self.condition = Some(condition(count, limit, &forgetter.connections()?, state));
        }
        Ok(())
    }

    /// The condition, while connection tracking is nearly full.
    pub(super) fn condition(&self) -> Option<Condition> {
        self.condition.clone()
    }
}

/// The condition about so many connections, of which each address has begun some.
fn condition(
    count: usize,
    limit: usize,
    by_source: &BTreeMap<IpAddr, usize>,
    state: &NodeState,
) -> Condition {
    let begun = |addresses: &[IpAddr]| -> usize {
        addresses.iter().filter_map(|address| by_source.get(address)).sum()
    };
    let pods = state.endpoints.iter().map(|(id, pod)| (begun(&pod.addresses), id));
    let mut pods: Vec<_> = pods.filter(|(begun, _)| begun * 10 >= count).collect();
    pods.sort_unstable_by(|one, other| other.cmp(one));
    pods.truncate(MAX_PODS);
    let shares: Vec<String> =
        pods.iter().map(|(begun, id)| format!("{}/{} has begun {begun}", id.namespace, id.pod)).collect();
    let whose = match shares.as_slice() {
        [] => "no pod of this node has begun a tenth of them".to_owned(),
        shares => shares.join(", "),
    };
    let message = format!(
        "connection tracking has {count} of {limit} connections: {whose}. When it is full, new connections of all pods fail; end what makes \
         so many, or raise net.netfilter.nf_conntrack_max"
    );
    let condition = Condition::new(Reason::ConnectionsNearLimit, message);
    pods.into_iter().fold(condition, |condition, (_, id)| condition.about(ObjectRef::from(id)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tortie_dataplane::{Endpoint, EndpointId};

    use super::*;

    #[test]
    fn the_condition_names_pods_with_a_tenth_of_the_connections() {
        let pod = |number: u8| {
            let id = EndpointId {
                namespace: "n".into(),
                pod: format!("p{number}").into(),
                interface: "eth0".into(),
            };
            let endpoint = Endpoint {
                container_id: "c".into(),
                host_interface: format!("cali{number}").into(),
                addresses: vec![[10, 65, 0, number].into(), [0xfd00, 0, 0, 0, 0, 0, 0, number.into()].into()],
                mac: None,
                host_ports: [].into(),
                program: Arc::default(),
            };
            (id, Arc::new(endpoint))
        };
        let state = NodeState { endpoints: (0..9).map(pod).collect(), ..NodeState::default() };
        let v4 = |number: u8, count: usize| (IpAddr::from([10, 65, 0, number]), count);
        let v6 = (IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]), 30);
        for (by_source, expected) in [
            (vec![], "no pod of this node"),
            (vec![v4(1, 9)], "no pod of this node"),
            (vec![v4(1, 10), v4(3, 40)], "n/p3 has begun 40, n/p1 has begun 10."),
            (vec![v4(2, 15), v6], "n/p2 has begun 45."),
        ] {
            let condition = condition(100, 120, &by_source.into_iter().collect(), &state);
            assert!(condition.message.contains(expected), "{expected}: {condition}");
        }
        let all = (0..9).map(|number| v4(number, 11)).collect();
        assert_eq!(condition(100, 120, &all, &state).about.len(), MAX_PODS);
    }
}

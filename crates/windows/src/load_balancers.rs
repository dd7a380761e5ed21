//! The load balancers of kube-proxy, as far as they affect policy: without direct server return (DSR), a server sees
//! another address than its client's (docs/hns.md, Load balancers).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use tortie_dataplane::{Condition, NodeState, Reason};
use tortie_hcn::schema::{LoadBalancer, Query};
use tortie_hcn::{Class, Error, Feature, Guid, Hcn, HcnExt, Kind, Version};
use tortie_policy::program::{EntityMatch, PolicyId, PolicyRules};
use tracing::debug;

/// The maximum number of new ones to read at once: otherwise the first check of a node with thousands would take
/// long.
const READ_AT_ONCE: usize = 256;
/// The maximum number of named policies.
const NAMED: usize = 10;

/// The load balancers of the node when last read.
#[derive(Debug, Default)]
pub(crate) struct LoadBalancers {
    due: bool,
    known: BTreeMap<Guid, LoadBalancer>,
}

impl LoadBalancers {
    /// Schedules a re-read.
    pub(crate) fn look_at(&mut self) {
        self.due = true;
    }

    /// Reads them if that is due. kube-proxy recreates them to change their flags, so each is read once. If they
    /// cannot be read, nothing is known about them, and nothing else depends on it.
    pub(crate) fn look(&mut self, hcn: &(impl Hcn + ?Sized)) {
        if !std::mem::take(&mut self.due) {
            return;
        }
        if let Err(error) = self.read(hcn) {
            debug!(%error, "load balancers cannot be read; whether they hide clients' addresses is not known");
            self.known.clear();
        }
    }

    fn read(&mut self, hcn: &(impl Hcn + ?Sized)) -> Result<(), Error> {
        let ids: HashSet<Guid> = hcn.enumerate(Kind::LoadBalancer, &Query::all())?.into_iter().collect();
        self.known.retain(|id, _| ids.contains(id));
        let new: Vec<Guid> = ids.into_iter().filter(|id| !self.known.contains_key(id)).collect();
        for id in new.into_iter().take(READ_AT_ONCE) {
            match hcn.load_balancer(id) {
                Ok(balancer) => drop(self.known.insert(id, balancer)),
                Err(error) if error.class() == Class::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The condition if they hide clients' addresses. `node` are the node's own addresses.
    ///
    /// Only those of ClusterIPs count: others never have DSR, by kube-proxy's design.
    pub(crate) fn condition(
        &self,
        state: &NodeState,
        node: &BTreeSet<IpAddr>,
        version: Option<Version>,
    ) -> Option<Condition> {
        let hiding: Vec<&LoadBalancer> =
            self.known.values().filter(|balancer| !balancer.is_direct()).collect();
        if hiding.is_empty() {
            return None;
        }
        let cluster_ips: HashSet<Ipv4Addr> =
            state.services.values().flat_map(|service| service.cluster_ips.iter().copied()).collect();
        let is_cluster_ip = |vip: &String| vip.parse().is_ok_and(|vip: Ipv4Addr| cluster_ips.contains(&vip));
        let hiding = hiding.into_iter().filter(|balancer| balancer.frontend_vips.iter().any(is_cluster_ip));
        let sources: Vec<&str> = hiding.map(|balancer| balancer.source_vip.as_str()).collect();
        if sources.is_empty() {
            return None;
        }
        let seen: BTreeSet<&str> = sources.iter().copied().collect();
        let as_node =
            seen.iter().any(|text| text.is_empty() || text.parse().is_ok_and(|it| node.contains(&it)));
        let seen: Vec<&str> =
            seen.into_iter().map(|text| if text.is_empty() { "the node's address" } else { text }).collect();
        Some(Condition::new(
            Reason::ClientAddressHidden,
            format!(
                "{} load balancers for ClusterIPs have no direct server return (DSR): whoever a pod of this node reaches \
                 by a Service sees {} instead of the pod{}. {}. {}",
                sources.len(),
                seen.join(", "),
                if as_node { ", and pods of this node let that in whatever their policy" } else { "" },
                concerned(state),
                fix(version)
            ),
        ))
    }
}

/// The enforced policies for which the pods' addresses matter.
fn concerned(state: &NodeState) -> String {
    let enforced = state.endpoints.values().flat_map(|endpoint| {
        let tiers = endpoint.program.ingress.iter().flat_map(|tier| &tier.policies);
        tiers.chain(&endpoint.program.profiles)
    });
    let enforced: BTreeSet<&PolicyId> = enforced.collect();
    let tells = |id: &PolicyId| state.policies.get(id).is_some_and(|rules| tells_clients_apart(rules));
    let policies: Vec<String> =
        enforced.into_iter().filter(|id| tells(id)).map(PolicyId::to_string).collect();
    let more = match policies.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    match policies.len() {
        0 => "No policy of pods here tells clients apart by their addresses; those of servers on other nodes may"
            .to_owned(),
        _ => format!(
            "Policies that tell clients apart by their addresses misjudge such connections; here: {}{more}",
            policies[..policies.len().min(NAMED)].join(", ")
        ),
    }
}

fn tells_clients_apart(rules: &PolicyRules) -> bool {
    let by_address = |client: &EntityMatch| {
        let EntityMatch { nets, not_nets, sets, not_sets, ports: _, port_sets, not_ports: _, not_port_sets } =
            client;
        let no_nets = nets.is_empty() && not_nets.is_empty();
        let no_sets = [sets, not_sets, port_sets, not_port_sets].iter().all(|sets| sets.is_empty());
        !(no_nets && no_sets)
    };
    rules.ingress.iter().any(|rule| by_address(&rule.source))
}

/// The remedy (hcsshim `hcn/hcnglobals.go`; docs/windows-policy.md, Services).
fn fix(version: Option<Version>) -> String {
    let fix = "run kube-proxy with the feature gate WinDSR=true (the default from Kubernetes 1.33) and --enable-dsr=true";
    match version {
        Some(version) if !version.supports(Feature::Dsr) => format!(
            "Its HNS {version} has no DSR: update Windows (Server 2019 from build 17763.1432, HNS 9.3, has it), then {fix}"
        ),
        _ => format!("To end that, {fix}"),
    }
}

//! How packets of pods leave the node: OutBoundNAT, SDNRoute and ProviderAddress policies on their endpoints (docs/hns.md,
//! Packets that leave the overlay).
//!
//! A new endpoint has them from its creation, as those of win-overlay and Calico's plugin. If the cluster's pools change, or a
//! policy is lost, they are repaired. What an endpoint has is read before anything is sent.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tortie_dataplane::{Condition, Reason, Settings};
use tortie_hcn::schema::{Endpoint, Modify, OutBoundNat, Policy, ProviderAddress, RequestType, SdnRoute};
use tortie_hcn::{Class, Hcn, HcnExt};
use tracing::info;

use crate::Error;
use crate::endpoint::SEND_AGAIN_AFTER;

/// The networks of the cluster, as far as they decide how packets of pods leave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Networks {
    /// The addresses of Services. The operator names them.
    pub(crate) services: Vec<Ipv4Net>,
    /// The pools, and whether packets from each to the outside get the node's address (`natOutgoing`).
    pub(crate) pools: Vec<(Ipv4Net, bool)>,
    /// Addresses of nodes to which packets keep the pod's address, if an operator says so.
    pub(crate) nodes: Vec<Ipv4Net>,
    /// The node's address on the underlay, if the network is known.
    pub(crate) provider: Option<Ipv4Addr>,
    /// Whether the network is of type L2Bridge.
    pub(crate) is_bridge: bool,
}

impl Networks {
    /// The IPv4 pools of the settings, and the rest.
    pub(crate) fn new(settings: &Settings, services: Vec<Ipv4Net>) -> Networks {
        let ipv4 = |(net, nat): (&IpNet, &bool)| match net {
            IpNet::V4(net) => Some((*net, *nat)),
            IpNet::V6(_) => None,
        };
        let of_ipv4 = |address: &IpAddr| match address {
            IpAddr::V4(address) => Some(Ipv4Net::from(*address)),
            IpAddr::V6(_) => None,
        };
        Networks {
            services,
            pools: settings.pools.iter().filter_map(ipv4).collect(),
            nodes: settings.nat_exceptions.iter().filter_map(of_ipv4).collect(),
            provider: None,
            is_bridge: false,
        }
    }

    /// The policies of the endpoint with this address.
    pub(crate) fn policies(&self, address: Ipv4Addr) -> Vec<Policy> {
        let mut policies = Vec::new();
        // Without the networks of Services, packets to Services would get the node's address, too.
        let is_translated = self.pools.iter().any(|(pool, nat)| *nat && pool.contains(&address));
        if is_translated && !self.services.is_empty() {
            let pools = self.pools.iter().map(|(pool, _)| pool);
            let nets = self.services.iter().chain(pools).chain(&self.nodes);
            let exceptions = nets.map(|net| net.trunc().to_string()).collect();
            policies.push(Policy::of(&OutBoundNat { exceptions, ..Default::default() }));
        }
        // As in Calico, the node itself is reached in the switch of an L2Bridge network, too.
        let node = self.provider.filter(|_| self.is_bridge).map(Ipv4Net::from);
        policies.extend(self.services.iter().copied().chain(node).map(|net| {
            let destination_prefix = net.trunc().to_string();
            Policy::of(&SdnRoute { destination_prefix, need_encap: true, ..Default::default() })
        }));
        policies
    }

    /// The pools whose `natOutgoing` has no effect, because the networks of Services are not known.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let translated = self.pools.iter().filter(|(_, nat)| *nat);
        let pools: Vec<String> = translated.map(|(pool, _)| pool.to_string()).collect();
        let message = || {
            format!(
                "natOutgoing of {} has no effect on this node: packets to Services must keep the pod's address, and the agent does not know \
                 the Services' networks; name them with --service-cidr",
                pools.join(", ")
            )
        };
        let is_without = self.services.is_empty() && !pools.is_empty();
        is_without.then(|| Condition::new(Reason::OutboundNatDiffers, message()))
    }
}

/// The IPv6 pool of the node's block, if its `natOutgoing` has no effect.
pub(crate) fn untranslated(settings: &Settings, block: Ipv6Net) -> Option<Condition> {
    let own = settings.pools.iter().find(|(pool, nat)| **nat && pool.contains(&IpNet::V6(block)));
    own.map(|(pool, _)| {
        let message = format!(
            "natOutgoing of {pool} has no effect on this node: IPv6 packets of its pods to the outside keep the pods' addresses; set \
             natOutgoing to false, and give the network outside a route to the pods"
        );
        Condition::new(Reason::OutboundNatDiffers, message)
    })
}

/// The networks as the dataplane last knew them, for new endpoints. All clones share them.
#[derive(Debug, Clone, Default)]
pub struct CurrentNetworks(Arc<Mutex<Networks>>);

impl CurrentNetworks {
    pub(crate) fn set(&self, networks: Networks) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = networks;
    }

    /// The policies of a new endpoint with this address.
    pub(crate) fn policies(&self, address: Ipv4Addr) -> Vec<Policy> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).policies(address)
    }
}

/// A policy of this kind, as it is compared: the order of exceptions means nothing, and HNS may leave out zero values.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum ForwardingPolicy {
    Translated(BTreeSet<String>),
    Routed(String),
    Provided(String),
}

impl ForwardingPolicy {
    /// `None`: a policy of another kind, or one that other programs write for other purposes.
    fn of(policy: &Policy) -> Option<ForwardingPolicy> {
        if let Ok(Some(nat)) = policy.settings::<OutBoundNat>() {
            let OutBoundNat { exceptions, destinations, virtual_ip, flags, max_port_pool_usage: _, extra: _ } =
                nat;
            let plain = destinations.is_empty() && virtual_ip.is_empty() && flags == 0;
            return plain.then(|| ForwardingPolicy::Translated(exceptions.into_iter().collect()));
        }
        if let Ok(Some(provider)) = policy.settings::<ProviderAddress>() {
            return Some(ForwardingPolicy::Provided(provider.provider_address));
        }
        let route = policy.settings::<SdnRoute>().ok().flatten()?;
        (route.need_encap && route.next_hop.is_empty())
            .then_some(ForwardingPolicy::Routed(route.destination_prefix))
    }
}

/// The last change of an endpoint that did not have its full effect. The same one would not have it either, and a build that
/// does not list a policy might get it again at each look.
#[derive(Debug, Clone)]
pub(crate) struct RejectedForwarding {
    desired: BTreeSet<ForwardingPolicy>,
    /// What the endpoint had afterwards.
    left: BTreeSet<ForwardingPolicy>,
    conditions: Vec<Condition>,
    /// When it may be sent again; `None`: HNS took it, and does not list it.
    until: Option<Instant>,
}

/// Makes the endpoint have the policies that belong to its addresses. `found` is what HNS has. `lists_provider` says whether HNS lists
/// ProviderAddress policies of endpoints: not every build does.
///
/// # Errors
/// HNS does not answer. What it refuses becomes a condition.
pub(crate) fn sync(
    hcn: &(impl Hcn + ?Sized),
    found: &Endpoint,
    (networks, lists_provider): (&Networks, bool),
    addresses: &[IpAddr],
    last_rejected: &mut Option<RejectedForwarding>,
    now: Instant,
) -> Result<Vec<Condition>, Error> {
    let Some(IpAddr::V4(address)) = addresses.first() else { return Ok(Vec::new()) };
    let mut wanted: Vec<Policy> = networks.policies(*address);
    let mut desired = forwarding_policies(&wanted);
    let tunnel = networks.provider.filter(|_| !networks.is_bridge);
    desired.extend(tunnel.map(|address| ForwardingPolicy::Provided(address.to_string())));
    if let Some(last) = last_rejected
        && last.desired == desired
        && last.left == forwarding_policies(&found.policies)
        && last.until.is_none_or(|until| now < until)
    {
        return Ok(last.conditions.clone());
    }
    *last_rejected = None;
    wanted.extend(provider(found, networks, lists_provider));
    let mut surplus = without(&found.policies, &forwarding_policies(&wanted));
    if networks.is_bridge && networks.provider.is_none() {
        // One of them leads to the node, whose address is not known yet.
        surplus.retain(|policy| !policy.is::<SdnRoute>());
    }
    let missing = without(&wanted, &forwarding_policies(&found.policies));
    if surplus.is_empty() && missing.is_empty() {
        return Ok(Vec::new());
    }
    let Change { left, problems, is_complete, is_refused } = change(hcn, found, surplus, missing)?;
    let conditions: Vec<_> = (!problems.is_empty()).then(|| differs(found, &problems)).into_iter().collect();
    if !is_complete {
        let until = is_refused.then(|| now + SEND_AGAIN_AFTER);
        *last_rejected = Some(RejectedForwarding { desired, left, conditions: conditions.clone(), until });
    }
    Ok(conditions)
}

/// The result of a change.
struct Change {
    /// What the endpoint has now.
    left: BTreeSet<ForwardingPolicy>,
    problems: Vec<String>,
    /// Whether the endpoint has everything when read back.
    is_complete: bool,
    /// Whether HNS refused or ignored something.
    is_refused: bool,
}

/// Removes, and then adds. Nobody knows what two translations of one endpoint mean, so the old one goes first, and nothing is
/// added while it is there. If the new one is refused, the old one comes back: a pod without any reaches nothing outside.
fn change(
    hcn: &(impl Hcn + ?Sized),
    endpoint: &Endpoint,
    surplus: Vec<Policy>,
    missing: Vec<Policy>,
) -> Result<Change, Error> {
    let read = || Ok::<_, Error>(forwarding_policies(&hcn.endpoint(endpoint.id)?.policies));
    if !surplus.is_empty() {
        let failed = send(hcn, endpoint, RequestType::Remove, surplus.clone())?;
        let left = read()?;
        let stays: BTreeSet<ForwardingPolicy> =
            forwarding_policies(&surplus).intersection(&left).cloned().collect();
        if !stays.is_empty() {
            let why = failed.map_or_else(|| "HNS ignored that".to_owned(), |error| error.to_string());
            let problems = vec![format!("{} cannot be removed, and nothing was added: {why}", names(&stays))];
            return Ok(Change { left, problems, is_complete: false, is_refused: true });
        }
    }
    let (mut refused, mut accepted) = (Vec::new(), Vec::new());
    // One by one: the build may have one of them, and not list it.
    for policy in &missing {
        match send(hcn, endpoint, RequestType::Add, vec![policy.clone()])? {
            Some(error) if error.class() == Class::AlreadyExists => {}
            Some(error) => refused.push((policy.clone(), error)),
            None => accepted.push(policy.clone()),
        }
    }
    let mut left = read()?;
    let is_complete = forwarding_policies(&missing).is_subset(&left);
    refused.retain(|(policy, _)| ForwardingPolicy::of(policy).is_some_and(|policy| !left.contains(&policy)));
    let mut problems: Vec<String> = refused.iter().map(|(_, error)| error.to_string()).collect();
    let unlisted = without(&accepted, &left);
    if !unlisted.is_empty() {
        problems
            .push(format!("HNS accepted {} and does not show it", names(&forwarding_policies(&unlisted))));
    }
    let is_replaced = |old: &&Policy| refused.iter().any(|(new, _)| new.r#type == old.r#type);
    let back: Vec<Policy> = surplus.iter().filter(is_replaced).cloned().collect();
    if !back.is_empty() {
        let failed = send(hcn, endpoint, RequestType::Add, back)?;
        problems.extend(failed.map(|error| format!("the old one is lost: {error}")));
        left = read()?;
    }
    Ok(Change { left, problems, is_complete, is_refused: !refused.is_empty() })
}

/// Sends a part of a change. Returns why HNS refuses it.
fn send(
    hcn: &(impl Hcn + ?Sized),
    endpoint: &Endpoint,
    request: RequestType,
    policies: Vec<Policy>,
) -> Result<Option<tortie_hcn::Error>, Error> {
    info!(endpoint = endpoint.name, ?request, ?policies, "changing how packets leave the overlay");
    match hcn.modify_endpoint(endpoint.id, &Modify::policies(request, policies)) {
        Err(error) if error.class() == Class::Unavailable => Err(error.into()),
        result => Ok(result.err()),
    }
}

/// The policies for people.
fn names(policies: &BTreeSet<ForwardingPolicy>) -> String {
    let name = |policy: &ForwardingPolicy| match policy {
        ForwardingPolicy::Translated(exceptions) => {
            let exceptions: Vec<&str> = exceptions.iter().map(String::as_str).collect();
            format!("OutBoundNAT with the exceptions {}", exceptions.join(", "))
        }
        ForwardingPolicy::Routed(prefix) => format!("SDNRoute {prefix}"),
        ForwardingPolicy::Provided(address) => format!("ProviderAddress {address}"),
    };
    policies.iter().map(name).collect::<Vec<_>>().join("; ")
}

fn forwarding_policies(policies: &[Policy]) -> BTreeSet<ForwardingPolicy> {
    policies.iter().filter_map(ForwardingPolicy::of).collect()
}

/// The policies that say how packets leave, except for these.
fn without(policies: &[Policy], others: &BTreeSet<ForwardingPolicy>) -> Vec<Policy> {
    let differs =
        |policy: &&Policy| ForwardingPolicy::of(policy).is_some_and(|policy| !others.contains(&policy));
    policies.iter().filter(differs).cloned().collect()
}

/// Whether HNS lists the ProviderAddress policy of this endpoint.
pub(crate) fn has_provider(endpoint: &Endpoint) -> bool {
    endpoint.policies.iter().any(Policy::is::<ProviderAddress>)
}

/// The policy with the node's address. The node may have got another address since, and a change of the policy may have been
/// interrupted when the old one was removed.
fn provider(found: &Endpoint, networks: &Networks, lists_provider: bool) -> Option<Policy> {
    let listed = found.policies.iter().find(|policy| policy.is::<ProviderAddress>());
    if listed.is_none() && (networks.is_bridge || !lists_provider) {
        return None;
    }
    match networks.provider {
        Some(address) => {
            Some(Policy::of(&ProviderAddress { provider_address: address.to_string(), ..Default::default() }))
        }
        None => listed.cloned(),
    }
}

fn differs(endpoint: &Endpoint, problems: &[String]) -> Condition {
    let message = format!(
        "HNS endpoint {} may have other OutBoundNAT, SDNRoute or ProviderAddress policies than the IPPools and the node's address \
         demand: {}; recreate the pod, unless HNS does not show such policies at all",
        endpoint.name,
        problems.join("; ")
    );
    Condition::new(Reason::OutboundNatDiffers, message)
}

//! How packets of pods leave the node: OutBoundNAT, SDNRoute and ProviderAddress policies on their endpoints (docs/hns.md, Ways
//! out).
//!
//! A new endpoint has them from its creation, as those of win-overlay and Calico's plugin. If the cluster's pools change, or a
//! policy is lost, they are repaired. What an endpoint has is read before anything is sent.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::{IpNet, Ipv4Net};
use tortie_dataplane::{Condition, Reason, Settings};
use tortie_hcn::schema::{Endpoint, Modify, OutBoundNat, Policy, ProviderAddress, RequestType, SdnRoute};
use tortie_hcn::{Class, Hcn, HcnExt};
use tracing::info;

use crate::Error;

/// The networks of the cluster, as far as they decide how packets of pods leave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Networks {
    /// The addresses of Services. The operator names them.
    pub(crate) services: Vec<Ipv4Net>,
    /// The pools, and whether packets from each to the outside get the node's address (`natOutgoing`).
    pub(crate) pools: Vec<(Ipv4Net, bool)>,
    /// The networks of the node itself.
    pub(crate) of_node: Vec<Ipv4Net>,
    /// The node's address on the underlay, if the overlay network is known.
    pub(crate) provider: Option<Ipv4Addr>,
}

impl Networks {
    /// The IPv4 pools of the settings, and the rest.
    pub(crate) fn new(settings: &Settings, services: Vec<Ipv4Net>, of_node: Vec<Ipv4Net>) -> Networks {
        let ipv4 = |(net, nat): (&IpNet, &bool)| match net {
            IpNet::V4(net) => Some((*net, *nat)),
            IpNet::V6(_) => None,
        };
        Networks {
            services,
            pools: settings.pools.iter().filter_map(ipv4).collect(),
            of_node,
            provider: None,
        }
    }

    /// The policies of the endpoint with this address.
    pub(crate) fn policies(&self, address: Ipv4Addr) -> Vec<Policy> {
        let mut policies = Vec::new();
        // Without the networks of Services, packets to Services would get the node's address, too.
        let is_translated = self.pools.iter().any(|(pool, nat)| *nat && pool.contains(&address));
        if is_translated && !self.services.is_empty() {
            let pools = self.pools.iter().map(|(pool, _)| pool);
            let nets = self.services.iter().chain(pools).chain(&self.of_node);
            let exceptions = nets.map(|net| net.trunc().to_string()).collect();
            policies.push(Policy::of(&OutBoundNat { exceptions, ..Default::default() }));
        }
        policies.extend(self.services.iter().map(|net| {
            let destination_prefix = net.trunc().to_string();
            Policy::of(&SdnRoute { destination_prefix, need_encap: true, ..Default::default() })
        }));
        policies
    }

    /// The pools whose `natOutgoing` has no effect, because the networks of Services are not known.
    pub(crate) fn condition(&self) -> Option<Condition> {
        let translated = self.pools.iter().filter(|(_, nat)| *nat);
        let pools: Vec<String> = translated.map(|(pool, _)| pool.to_string()).collect();
        (self.services.is_empty() && !pools.is_empty()).then(|| {
            let message = format!(
                "natOutgoing of {} has no effect on this node: packets to Services must keep the pod's address, and the agent does \
                 not know the Services' networks; name them with --service-cidr",
                pools.join(", ")
            );
            Condition::new(Reason::OutboundNatDiffers, message)
        })
    }
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
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Translated(BTreeSet<String>),
    Routed(String),
    Provided(String),
}

impl Way {
    /// `None`: a policy of another kind, or one that other programs write for other purposes.
    fn of(policy: &Policy) -> Option<Way> {
        if let Ok(Some(nat)) = policy.settings::<OutBoundNat>() {
            let OutBoundNat { exceptions, destinations, virtual_ip, flags, max_port_pool_usage: _, extra: _ } =
                nat;
            let plain = destinations.is_empty() && virtual_ip.is_empty() && flags == 0;
            return plain.then(|| Way::Translated(exceptions.into_iter().collect()));
        }
        if let Ok(Some(provider)) = policy.settings::<ProviderAddress>() {
            return Some(Way::Provided(provider.provider_address));
        }
        let route = policy.settings::<SdnRoute>().ok().flatten()?;
        (route.need_encap && route.next_hop.is_empty()).then_some(Way::Routed(route.destination_prefix))
    }
}

/// Makes the endpoint have the policies that belong to its addresses. `found` is what HNS has.
///
/// # Errors
/// HNS does not answer. What it refuses becomes a condition.
pub(crate) fn sync(
    hcn: &(impl Hcn + ?Sized),
    found: &Endpoint,
    networks: &Networks,
    addresses: &[IpAddr],
) -> Result<Vec<Condition>, Error> {
    let Some(IpAddr::V4(address)) = addresses.first() else { return Ok(Vec::new()) };
    let mut wanted: Vec<Policy> = networks.policies(*address);
    wanted.extend(provider(found, networks));
    let has =
        |policies: &[Policy], way: &Way| policies.iter().any(|policy| Way::of(policy).as_ref() == Some(way));
    let known = found.policies.iter().filter_map(|policy| Some((policy, Way::of(policy)?)));
    let surplus: Vec<_> =
        known.filter(|(_, way)| !has(&wanted, way)).map(|(policy, _)| policy.clone()).collect();
    let missing: Vec<_> = wanted
        .into_iter()
        .filter(|policy| Way::of(policy).is_some_and(|way| !has(&found.policies, &way)))
        .collect();
    let mut conditions = Vec::new();
    // Nobody knows what two translations of one endpoint mean, so the old one goes first.
    for (request, policies) in [(RequestType::Remove, surplus), (RequestType::Add, missing)] {
        if policies.is_empty() {
            continue;
        }
        info!(endpoint = found.name, ?request, ?policies, "changing how packets leave the overlay");
        match hcn.modify_endpoint(found.id, &Modify::policies(request, policies)) {
            Err(error) if error.class() == Class::Unavailable => return Err(error.into()),
            Err(error) => conditions.push(not_taken(found, &error)),
            Ok(()) => {}
        }
    }
    Ok(conditions)
}

/// The policy with the node's address, if the endpoint lists one, which not every build does. The node may have got another
/// address since.
fn provider(found: &Endpoint, networks: &Networks) -> Option<Policy> {
    let listed = found.policies.iter().find(|policy| policy.is::<ProviderAddress>())?;
    Some(match networks.provider {
        Some(address) => {
            Policy::of(&ProviderAddress { provider_address: address.to_string(), ..Default::default() })
        }
        None => listed.clone(),
    })
}

fn not_taken(endpoint: &Endpoint, error: &tortie_hcn::Error) -> Condition {
    let message = format!(
        "HNS endpoint {} has other OutBoundNAT, SDNRoute or ProviderAddress policies than the IPPools and the node's address demand, and HNS refuses the change: {error};          recreate the pod",
        endpoint.name
    );
    Condition::new(Reason::OutboundNatDiffers, message)
}

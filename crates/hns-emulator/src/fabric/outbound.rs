//! Packets of pods to destinations outside of the network (OutBoundNAT policies of endpoints).
//!
//! They leave by the node's own stack. It replaces the pod's address by the node's, except towards the exceptions (the switch
//! tells it which), and sends answers back. No source says what HNS does with such packets of an endpoint without this policy;
//! here, they leave as they are.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use tortie_hcn::schema::{Endpoint, OutBoundNat, SdnRoute};

use crate::addresses::cidr;

/// The pods whose packets the node translates.
pub(crate) type OutboundNats = BTreeMap<Ipv4Addr, OutboundNat>;

/// Which packets of a pod get the node's address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OutboundNat {
    /// Packets to these are translated in any case.
    pub(crate) always: Vec<Ipv4Addr>,
    /// If there are any, packets to other networks than these are translated, too.
    pub(crate) all_but: Option<Vec<Ipv4Net>>,
}

impl OutboundNat {
    /// The policies of an endpoint. Those without destinations add their exceptions to one list, because win-overlay writes
    /// several.
    pub(super) fn of(endpoint: &Endpoint) -> OutboundNat {
        let mut nat = OutboundNat::default();
        let policies = endpoint.policies.iter().filter_map(|it| it.settings::<OutBoundNat>().ok().flatten());
        // The second flag is for IPv6.
        for policy in policies.filter(|policy| policy.flags & 2 == 0) {
            if policy.destinations.is_empty() {
                let exceptions = policy.exceptions.iter().filter_map(|text| cidr(text));
                nat.all_but.get_or_insert_default().extend(exceptions);
            } else {
                nat.always
                    .extend(policy.destinations.iter().filter_map(|text| text.parse::<Ipv4Addr>().ok()));
            }
        }
        nat
    }

    /// Every packet gets the node's address.
    pub(super) fn of_everything() -> OutboundNat {
        OutboundNat { always: vec![], all_but: Some(vec![]) }
    }

    /// Whether a packet to this address gets the node's address.
    pub(super) fn translates(&self, to: Ipv4Addr) -> bool {
        let excepted = |all_but: &Vec<Ipv4Net>| all_but.iter().any(|net| net.contains(&to));
        self.always.contains(&to) || self.all_but.as_ref().is_some_and(|all_but| !excepted(all_but))
    }
}

/// The networks whose packets never leave without encapsulation (SDNRoute policies with NeedEncap): the switch delivers them,
/// or nobody does.
pub(super) fn encapsulated(endpoint: &Endpoint) -> Vec<Ipv4Net> {
    let routes = endpoint.policies.iter().filter_map(|it| it.settings::<SdnRoute>().ok().flatten());
    routes.filter(|route| route.need_encap).filter_map(|route| cidr(&route.destination_prefix)).collect()
}

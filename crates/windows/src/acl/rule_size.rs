//! Explains the number of ACLs of a rule.

use tortie_api::net::{Direction, IpVersion};
use tortie_dataplane::Endpoint;
use tortie_policy::program::{Lookup, Rule};

use super::ranges::Addresses;
use super::region::{View, matched};
use super::render::CHUNK;

/// A single rule at one endpoint, without sets: the products of addresses, ports and protocols whose union it
/// matches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RuleSize {
    /// The number of products: one, or one for each port with separate addresses, and those for the rest around
    /// exclusions.
    pub products: usize,
    /// The maximum number of protocols in one of them; 1 if it concerns all.
    pub protocols: usize,
    /// The maximum number of address lists for one of them.
    pub lists: usize,
    /// The number of addresses and networks in all of them.
    pub addresses: usize,
}

/// The shape of the rule.
pub(crate) fn shape(
    rule: &Rule,
    direction: Direction,
    endpoint: &Endpoint,
    lookup: &impl Lookup,
) -> RuleSize {
    let mut shape = RuleSize::default();
    for family in IpVersion::ALL {
        let own = Addresses::of(family, endpoint.addresses.iter().copied());
        let matched = matched(rule, direction, &View { family, own: &own, by_name: false, lookup });
        for region in matched.exact.iter().chain(&matched.vague) {
            let protocols = region.protocols.iter().count();
            let peers = region.remote.addresses.literal();
            let addresses = if peers.is_all() { 0 } else { peers.to_nets(family).len() };
            shape.products += 1;
            shape.protocols = shape.protocols.max(if protocols > 128 { 1 } else { protocols });
            shape.lists = shape.lists.max(addresses.div_ceil(CHUNK).max(1));
            shape.addresses += addresses;
        }
    }
    shape
}

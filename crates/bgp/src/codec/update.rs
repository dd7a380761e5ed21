//! UPDATE: routes that come and go (RFC 4271 4.3, RFC 4760).

use std::net::IpAddr;

use ipnet::IpNet;

use super::Context;
use super::attribute_decode::ReceivedAttributes;
use super::attributes::{self, Attributes, NextHop, attribute, flag, kind};
use super::family::Family;
use super::malformed::{Malformed, Treatment};
use super::message::{HEADER_LENGTH, MAX_LENGTH, Type, with_header};
use super::notification::{Notification, code, update};
use super::prefix;
use super::wire::{Reader, with_u16_length};

/// Routes with the same attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// The attributes.
    pub attributes: Attributes,
    /// The prefixes, all of one family.
    pub prefixes: Vec<IpNet>,
}

/// A received UPDATE.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Update {
    /// The routes that go, also those that RFC 7606 treats so. They go before others come.
    pub withdrawn: Vec<IpNet>,
    /// The routes that come.
    pub announced: Vec<Announcement>,
    /// The family whose routes are now complete (RFC 4724 2).
    pub end_of_rib: Option<Family>,
    /// Errors that did not end the session.
    pub problems: Vec<Malformed>,
}

impl Update {
    /// Reads what follows the header.
    pub(super) fn decode(bytes: &[u8], context: &Context) -> Result<Self, Notification> {
        let malformed = || Notification::new(code::UPDATE, update::MALFORMED_ATTRIBUTES);
        let mut reader = Reader::new(bytes);
        let mut part = || {
            let length = reader.u16()?;
            reader.take(usize::from(length))
        };
        let withdrawn = part().ok_or_else(malformed)?;
        let list = part().ok_or_else(malformed)?;
        let invalid = || Notification::new(code::UPDATE, update::INVALID_NETWORK);
        let withdrawn = prefix::decode(Family::Ipv4, Reader::new(withdrawn)).ok_or_else(invalid)?;
        let prefixes = prefix::decode(Family::Ipv4, reader).ok_or_else(invalid)?;
        let received = ReceivedAttributes::decode(list, context)?;
        if bytes.len() == 4 {
            return Ok(Self { end_of_rib: Some(Family::Ipv4), ..Self::default() });
        }
        Self::assembled(withdrawn, prefixes, received, context)
    }

    fn assembled(
        withdrawn: Vec<IpNet>,
        prefixes: Vec<IpNet>,
        mut received: ReceivedAttributes,
        context: &Context,
    ) -> Result<Self, Notification> {
        let mut update = Self { withdrawn, ..Self::default() };
        let is_only_unreach =
            update.withdrawn.is_empty() && prefixes.is_empty() && received.kinds == [kind::MP_UNREACH];
        if let Some((family, prefixes)) = received.unreach.take() {
            update.end_of_rib = (is_only_unreach && prefixes.is_empty()).then_some(family);
            update.withdrawn.extend(prefixes);
        }
        let classic = received.next_hop.map(|address| NextHop::from(IpAddr::V4(address)));
        let multiprotocol = received.reach.take();
        let announces = !prefixes.is_empty()
            || match &multiprotocol {
                Some((_, prefixes)) => !prefixes.is_empty(),
                // Routes of another family than those of the session are known, too.
                None => received.kinds.contains(&kind::MP_REACH),
            };
        let hides_nothing = announces || received.kinds == [kind::MP_UNREACH] && !received.is_cut;
        let routes = [
            (!prefixes.is_empty()).then_some((classic, prefixes)),
            multiprotocol.map(|(hop, prefixes)| (Some(hop), prefixes)),
        ];
        for (next_hop, prefixes) in routes.into_iter().flatten().filter(|(_, prefixes)| !prefixes.is_empty())
        {
            let family = prefixes.first().map_or(Family::Ipv4, Family::of);
            if !context.families.contains(family) {
                continue;
            }
            match next_hop.and_then(|next_hop| received.attributes(next_hop)) {
                Some(attributes) => update.announced.push(Announcement { attributes, prefixes }),
                None => {
                    let missing = received.missing(next_hop.is_some());
                    if !received.problems.iter().any(|problem| problem.kind == missing) {
                        let problem = "it is mandatory, and missing";
                        received.problems.push(Malformed {
                            kind: missing,
                            treatment: Treatment::TreatAsWithdraw,
                            problem,
                        });
                    }
                    update.withdrawn.extend(prefixes);
                }
            }
        }
        update.problems = received.problems;
        update.apply_problems(hides_nothing)
    }

    /// Treats the routes as withdrawn if an attribute demands it. Without routes that are announced, nothing says which ones it was about,
    /// and some of them could stay though they are gone: then the session ends (RFC 7606 5.2).
    fn apply_problems(mut self, hides_nothing: bool) -> Result<Self, Notification> {
        if !self.problems.iter().any(|problem| problem.treatment == Treatment::TreatAsWithdraw) {
            return Ok(self);
        }
        if !hides_nothing {
            return Err(Notification::new(code::UPDATE, update::MALFORMED_ATTRIBUTES));
        }
        let routes = std::mem::take(&mut self.announced);
        self.withdrawn.extend(routes.into_iter().flat_map(|announcement| announcement.prefixes));
        self.end_of_rib = None;
        Ok(self)
    }
}

impl ReceivedAttributes {
    /// The type of the mandatory attribute that is missing.
    fn missing(&self, has_next_hop: bool) -> u8 {
        let is_there = |kind: u8| self.kinds.contains(&kind);
        match () {
            () if !is_there(kind::ORIGIN) => kind::ORIGIN,
            () if !is_there(kind::AS_PATH) => kind::AS_PATH,
            () if !has_next_hop => kind::NEXT_HOP,
            () => 0,
        }
    }
}

/// The bytes of two lengths: of the withdrawn routes, and of the attributes.
const LENGTHS: usize = 4;

/// Whether prefixes of the family with this next hop go into MP_REACH_NLRI.
fn is_multiprotocol(family: Family, next_hop: &NextHop) -> bool {
    family == Family::Ipv6 || next_hop.address.is_ipv6()
}

/// Writes prefixes of one family with the same attributes as messages of at most 4096 bytes. `None` if the attributes
/// alone are too long for a message.
#[must_use]
pub fn encode_announcement(
    attributes: &Attributes,
    family: Family,
    prefixes: &[IpNet],
    context: &Context,
) -> Option<Vec<Vec<u8>>> {
    let is_multiprotocol = is_multiprotocol(family, &attributes.next_hop);
    let mut common = Vec::new();
    attributes::encode(attributes, !is_multiprotocol, context.four_octet, &mut common);
    // Header and content of MP_REACH_NLRI before its prefixes.
    let reach = if is_multiprotocol { 4 + 5 + 32 } else { 0 };
    let room = MAX_LENGTH.checked_sub(HEADER_LENGTH + LENGTHS + common.len() + reach)?;
    let chunks = chunks(prefixes, room)?;
    Some(
        chunks
            .into_iter()
            .map(|prefixes| {
                with_header(Type::Update, |out| {
                    out.extend([0, 0]);
                    with_u16_length(out, |out| {
                        // First, so that a reader knows the prefixes whatever follows (RFC 7606 5.1).
                        if is_multiprotocol {
                            attribute(out, flag::OPTIONAL, kind::MP_REACH, |out| {
                                encode_reach(family, &attributes.next_hop, prefixes, out);
                            });
                        }
                        out.extend(&common);
                    });
                    if !is_multiprotocol {
                        prefixes.iter().for_each(|prefix| prefix::encode(prefix, out));
                    }
                })
            })
            .collect(),
    )
}

fn encode_reach(family: Family, next_hop: &NextHop, prefixes: &[IpNet], out: &mut Vec<u8>) {
    out.extend(family.afi().to_be_bytes());
    out.push(family.safi());
    let address = match next_hop.address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    out.push(if next_hop.link_local.is_some() { 32 } else { 16 });
    out.extend(address.octets());
    next_hop.link_local.iter().for_each(|address| out.extend(address.octets()));
    out.push(0);
    prefixes.iter().for_each(|prefix| prefix::encode(prefix, out));
}

/// Writes the end of prefixes of one family as messages.
#[must_use]
pub fn encode_withdrawal(family: Family, prefixes: &[IpNet]) -> Vec<Vec<u8>> {
    let room = MAX_LENGTH - HEADER_LENGTH - LENGTHS - 7;
    let chunks = chunks(prefixes, room).unwrap_or_default();
    chunks.into_iter().map(|prefixes| withdrawal(family, prefixes)).collect()
}

fn withdrawal(family: Family, prefixes: &[IpNet]) -> Vec<u8> {
    with_header(Type::Update, |out| match family {
        Family::Ipv4 => {
            with_u16_length(out, |out| prefixes.iter().for_each(|prefix| prefix::encode(prefix, out)));
            out.extend([0, 0]);
        }
        Family::Ipv6 => {
            out.extend([0, 0]);
            with_u16_length(out, |out| {
                attribute(out, flag::OPTIONAL, kind::MP_UNREACH, |out| {
                    out.extend(family.afi().to_be_bytes());
                    out.push(family.safi());
                    prefixes.iter().for_each(|prefix| prefix::encode(prefix, out));
                });
            });
        }
    })
}

/// The message that ends the first routes of a family (RFC 4724 2).
#[must_use]
pub fn encode_end_of_rib(family: Family) -> Vec<u8> {
    withdrawal(family, &[])
}

/// Runs of prefixes that need at most `room` bytes; `None` if not even one fits.
fn chunks(prefixes: &[IpNet], room: usize) -> Option<Vec<&[IpNet]>> {
    let mut chunks = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (index, prefix) in prefixes.iter().enumerate() {
        let length = prefix::encoded_length(prefix);
        if length > room {
            return None;
        }
        if used + length > room {
            chunks.push(&prefixes[start..index]);
            (start, used) = (index, 0);
        }
        used += length;
    }
    if start < prefixes.len() {
        chunks.push(&prefixes[start..]);
    }
    Some(chunks)
}

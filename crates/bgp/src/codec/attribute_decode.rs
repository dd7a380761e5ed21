//! Reading of attributes, with the treatment of errors by RFC 7606.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

use super::Context;
use super::as_path::{AS_TRANS, AsPath};
use super::attributes::{Aggregator, Attributes, NextHop, Origin, UnknownAttribute, flag, kind};
use super::community::{Community, LargeCommunity};
use super::family::Family;
use super::malformed::{Definition, Malformed, Treatment, definition};
use super::notification::{Notification, code, update};
use super::prefix;
use super::wire::Reader;

/// What the attributes of a message say.
#[derive(Debug, Default)]
pub(super) struct ReceivedAttributes {
    /// The attributes without a next hop, those that are missing as `None`.
    origin: Option<Origin>,
    as_path: Option<AsPath>,
    as4_path: Option<AsPath>,
    /// NEXT_HOP, which is for the prefixes at the end of the message.
    pub(super) next_hop: Option<Ipv4Addr>,
    med: Option<u32>,
    local_pref: Option<u32>,
    atomic_aggregate: bool,
    aggregator: Option<Aggregator>,
    as4_aggregator: Option<Aggregator>,
    communities: Vec<Community>,
    extended_communities: Vec<[u8; 8]>,
    large_communities: Vec<LargeCommunity>,
    originator_id: Option<Ipv4Addr>,
    cluster_list: Vec<Ipv4Addr>,
    unknown: Vec<UnknownAttribute>,
    partial: BTreeSet<u8>,
    /// MP_REACH_NLRI.
    pub(super) reach: Option<(NextHop, Vec<IpNet>)>,
    /// MP_UNREACH_NLRI.
    pub(super) unreach: Option<(Family, Vec<IpNet>)>,
    /// The types that were there.
    pub(super) kinds: Vec<u8>,
    /// Whether the list ends within an attribute.
    pub(super) is_cut: bool,
    /// The errors.
    pub(super) problems: Vec<Malformed>,
}

/// The attributes for peers that know numbers of two bytes only.
const FOR_OLD_PEERS: [u8; 2] = [kind::AS4_PATH, kind::AS4_AGGREGATOR];

/// An error that ends the session.
fn reset(subcode: u8, attribute: &[u8]) -> Notification {
    Notification::with(code::UPDATE, subcode, attribute)
}

impl ReceivedAttributes {
    /// Reads all attributes.
    pub(super) fn decode(bytes: &[u8], context: &Context) -> Result<Self, Notification> {
        let mut received = Self::default();
        let mut reader = Reader::new(bytes);
        while !reader.is_empty() {
            let before = reader;
            let Some((flags, kind, value)) = header(&mut reader) else {
                // The prefixes at the end of the message are still known, those of MP_REACH_NLRI are not
                // (RFC 7606 sections 3 (j) and 4).
                received.is_cut = true;
                let problem = "the attribute is longer than the list";
                received.problem(
                    before.clone().rest().get(1).copied().unwrap_or(0),
                    Treatment::TreatAsWithdraw,
                    problem,
                );
                return Ok(received);
            };
            let whole = &bytes[bytes.len() - before.len()..bytes.len() - reader.len()];
            received.attribute(flags, kind, value, whole, context)?;
        }
        received.merge_four_octets(context);
        Ok(received)
    }

    fn problem(&mut self, kind: u8, treatment: Treatment, problem: &'static str) {
        self.problems.push(Malformed { kind, treatment, problem });
    }

    fn attribute(
        &mut self,
        flags: u8,
        kind: u8,
        value: &[u8],
        whole: &[u8],
        context: &Context,
    ) -> Result<(), Notification> {
        let is_repeated = self.kinds.contains(&kind);
        self.kinds.push(kind);
        if is_repeated {
            if [kind::MP_REACH, kind::MP_UNREACH].contains(&kind) {
                return Err(reset(update::MALFORMED_ATTRIBUTES, &[]));
            }
            self.problem(kind, Treatment::AttributeDiscard, "it is there more than once; the first counts");
            return Ok(());
        }
        let Some(definition) = definition(kind) else { return self.unknown(flags, kind, value, whole) };
        if definition.internal_only && !context.internal {
            return Ok(());
        }
        if FOR_OLD_PEERS.contains(&kind) && context.four_octet {
            return Ok(());
        }
        if flags & (flag::OPTIONAL | flag::TRANSITIVE) != definition.flags {
            // The value may still tell which routes to withdraw.
            self.value(definition, flags, value, whole, context)?;
            self.problem(kind, Treatment::TreatAsWithdraw, "its flags are not those of the standard");
            return Ok(());
        }
        self.value(definition, flags, value, whole, context)
    }

    fn unknown(&mut self, flags: u8, kind: u8, value: &[u8], whole: &[u8]) -> Result<(), Notification> {
        if flags & flag::OPTIONAL == 0 {
            return Err(reset(update::UNRECOGNIZED_WELL_KNOWN, whole));
        }
        if flags & flag::TRANSITIVE != 0 {
            self.unknown.push(UnknownAttribute { kind, value: value.to_vec() });
        }
        Ok(())
    }

    fn value(
        &mut self,
        definition: &Definition,
        flags: u8,
        value: &[u8],
        whole: &[u8],
        context: &Context,
    ) -> Result<(), Notification> {
        if self.read(definition.kind, value, context).is_some() {
            let is_passed_on = definition.flags == flag::OPTIONAL | flag::TRANSITIVE;
            if is_passed_on && flags & flag::PARTIAL != 0 {
                self.partial.insert(definition.kind);
            }
            return Ok(());
        }
        if definition.malformed == Treatment::SessionReset {
            return Err(reset(update::OPTIONAL_ATTRIBUTE, whole));
        }
        self.problem(definition.kind, definition.malformed, "its value is malformed");
        Ok(())
    }

    /// Reads a value; `None` if it is malformed.
    fn read(&mut self, kind: u8, value: &[u8], context: &Context) -> Option<()> {
        let mut reader = Reader::new(value);
        let reader = &mut reader;
        match kind {
            kind::ORIGIN => self.origin = Some(whole(reader, |reader| Origin::from_number(reader.u8()?))?),
            kind::AS_PATH => {
                let path = AsPath::decode(*reader, context.four_octet)?;
                // An external peer is in no confederation of this end (RFC 5065 5).
                let may_be = context.internal || !path.has_confederations();
                self.as_path = Some(may_be.then_some(path)?);
            }
            kind::AS4_PATH => {
                self.as4_path = Some(AsPath::decode(*reader, true)?.without_confederations());
            }
            kind::NEXT_HOP => self.next_hop = Some(whole(reader, Reader::ipv4)?),
            kind::MED => self.med = Some(whole(reader, Reader::u32)?),
            kind::LOCAL_PREF => self.local_pref = Some(whole(reader, Reader::u32)?),
            kind::ATOMIC_AGGREGATE => {
                reader.is_empty().then_some(())?;
                self.atomic_aggregate = true;
            }
            kind::AGGREGATOR => self.aggregator = Some(aggregator(reader, context.four_octet)?),
            kind::AS4_AGGREGATOR => self.as4_aggregator = Some(aggregator(reader, true)?),
            kind::COMMUNITIES => self.communities = list(reader, |reader| reader.u32().map(Community))?,
            kind::ORIGINATOR_ID => self.originator_id = Some(whole(reader, Reader::ipv4)?),
            kind::CLUSTER_LIST => self.cluster_list = list(reader, Reader::ipv4)?,
            kind::MP_REACH => self.reach = reach(*reader, context)?,
            kind::MP_UNREACH => self.unreach = unreach(*reader, context)?,
            kind::EXTENDED_COMMUNITIES => {
                self.extended_communities = list(reader, |reader| reader.take(8)?.try_into().ok())?;
            }
            kind::LARGE_COMMUNITIES => {
                let read = |reader: &mut Reader<'_>| {
                    Some(LargeCommunity(reader.u32()?, reader.u32()?, reader.u32()?))
                };
                // RFC 8092 section 3: the same community twice counts once.
                let mut communities = list(reader, read)?;
                let mut seen = BTreeSet::new();
                communities.retain(|community| seen.insert(*community));
                self.large_communities = communities;
            }
            _ => return None,
        }
        Some(())
    }

    /// Restores what a peer with two-byte numbers could not say (RFC 6793 4.2.3).
    fn merge_four_octets(&mut self, context: &Context) {
        if context.four_octet {
            return;
        }
        let (path, aggregator) = (self.as4_path.take(), self.as4_aggregator.take());
        if let (Some(old), Some(new)) = (self.aggregator, aggregator) {
            // Somebody who does not know the new attributes aggregated.
            if old.as_number != u32::from(AS_TRANS) {
                return;
            }
            self.aggregator = Some(new);
        }
        if let (Some(old), Some(path)) = (self.as_path.take_if(|_| path.is_some()), path) {
            self.as_path = Some(old.merged(&path));
        }
    }

    /// The attributes of routes with this next hop; `None` if a mandatory one is missing.
    pub(super) fn attributes(&self, next_hop: NextHop) -> Option<Attributes> {
        Some(Attributes {
            next_hop,
            origin: self.origin?,
            as_path: self.as_path.clone()?,
            med: self.med,
            local_pref: self.local_pref,
            atomic_aggregate: self.atomic_aggregate,
            aggregator: self.aggregator,
            communities: self.communities.clone(),
            extended_communities: self.extended_communities.clone(),
            large_communities: self.large_communities.clone(),
            originator_id: self.originator_id,
            cluster_list: self.cluster_list.clone(),
            unknown: self.unknown.clone(),
            // What AS4_PATH and AS4_AGGREGATOR say is part of others.
            partial: self.partial.iter().filter(|kind| !FOR_OLD_PEERS.contains(kind)).copied().collect(),
        })
    }
}

/// Flags, type and value of the next attribute.
fn header<'a>(reader: &mut Reader<'a>) -> Option<(u8, u8, &'a [u8])> {
    let (flags, kind) = (reader.u8()?, reader.u8()?);
    let is_long = flags & flag::EXTENDED_LENGTH != 0;
    let length = if is_long { usize::from(reader.u16()?) } else { usize::from(reader.u8()?) };
    Some((flags, kind, reader.take(length)?))
}

/// A value that fills the attribute.
fn whole<'a, T>(reader: &mut Reader<'a>, read: impl FnOnce(&mut Reader<'a>) -> Option<T>) -> Option<T> {
    read(reader).filter(|_| reader.is_empty())
}

/// One value or more.
fn list<'a, T>(reader: &mut Reader<'a>, read: impl Fn(&mut Reader<'a>) -> Option<T>) -> Option<Vec<T>> {
    let mut values = vec![read(reader)?];
    while !reader.is_empty() {
        values.push(read(reader)?);
    }
    Some(values)
}

fn aggregator(reader: &mut Reader<'_>, four_octet: bool) -> Option<Aggregator> {
    whole(reader, |reader| {
        let as_number = if four_octet { reader.u32()? } else { u32::from(reader.u16()?) };
        Some(Aggregator { as_number, identifier: reader.ipv4()? })
    })
}

/// MP_REACH_NLRI (RFC 4760 3). The outer `None` is an error, the inner one a family that was not agreed on.
#[expect(clippy::option_option, reason = "the two say different things")]
fn reach(mut reader: Reader<'_>, context: &Context) -> Option<Option<(NextHop, Vec<IpNet>)>> {
    let family = Family::from_numbers(reader.u16()?, reader.u8()?);
    let length = usize::from(reader.u8()?);
    let mut next_hop = Reader::new(reader.take(length)?);
    let _reserved = reader.u8()?;
    let Some(family) = family.filter(|family| context.families.contains(*family)) else { return Some(None) };
    let is_for_ipv6 = family == Family::Ipv6 || context.extended_next_hop;
    let next_hop = match length {
        4 if family == Family::Ipv4 => IpAddr::V4(next_hop.ipv4()?).into(),
        16 if is_for_ipv6 => IpAddr::V6(next_hop.ipv6()?).into(),
        32 if is_for_ipv6 => {
            NextHop { address: IpAddr::V6(next_hop.ipv6()?), link_local: Some(next_hop.ipv6()?) }
        }
        _ => return None,
    };
    Some(Some((next_hop, prefix::decode(family, reader)?)))
}

/// MP_UNREACH_NLRI (RFC 4760 4).
#[expect(clippy::option_option, reason = "the two say different things")]
fn unreach(mut reader: Reader<'_>, context: &Context) -> Option<Option<(Family, Vec<IpNet>)>> {
    let family = Family::from_numbers(reader.u16()?, reader.u8()?);
    let Some(family) = family.filter(|family| context.families.contains(*family)) else { return Some(None) };
    Some(Some((family, prefix::decode(family, reader)?)))
}

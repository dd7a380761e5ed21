//! The codec of NetGauze reads Tortie's messages as Tortie means them.

use std::net::IpAddr;

use ipnet::IpNet;
use netgauze_bgp_pkt::BgpMessage;
use netgauze_bgp_pkt::path_attribute::{self as peer, MpReach, MpUnreach, PathAttributeValue};
use netgauze_bgp_pkt::update::BgpUpdateMessage;
use netgauze_bgp_pkt::wire::deserializer::BgpParsingContext;
use netgauze_parse_utils::reader::SliceReader;
use netgauze_parse_utils::traits::ParseFromWithOneInput as _;
use proptest::collection::vec;
use proptest::prelude::*;
use testkit::random::{Random, first_number};
use tortie_bgp::codec::{self, Attributes, Family, Message, Origin, SegmentKind};

use crate::codec::random_bytes;
use crate::codec::strategies::{attributes, context, family, open};

/// A prefix that the other decoder takes: it rejects multicast as part of a message.
fn prefix(family: Family) -> impl Strategy<Value = IpNet> {
    crate::codec::strategies::prefix(family).prop_map(|prefix| match prefix {
        IpNet::V4(net) if net.broadcast().octets()[0] >= 224 => "10.0.0.0/8".parse().unwrap(),
        IpNet::V6(net) if net.broadcast().octets()[0] == 255 => "2000::/3".parse().unwrap(),
        other => other,
    })
}

fn read(message: &[u8], four_octet: bool) -> BgpMessage {
    let mut context = BgpParsingContext::asn2_default();
    context.set_asn4(four_octet);
    let mut reader = SliceReader::new(message);
    BgpMessage::parse(&mut reader, &mut context).unwrap_or_else(|error| panic!("{error:?}: {message:02x?}"))
}

/// The parts of a message by which the two are compared.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    withdrawn: Vec<IpNet>,
    announced: Vec<IpNet>,
    next_hop: Option<IpAddr>,
    origin: Option<u8>,
    path: Vec<(bool, Vec<u32>)>,
    med: Option<u32>,
    local_pref: Option<u32>,
    atomic_aggregate: bool,
    aggregator: Option<(u32, u32)>,
    communities: Vec<u32>,
    extended_communities: usize,
    large_communities: Vec<(u32, u32, u32)>,
    originator: Option<u32>,
    clusters: usize,
}

fn by_peer(message: &[u8], four_octet: bool) -> Seen {
    let BgpMessage::Update(update) = read(message, four_octet) else { panic!("no UPDATE") };
    seen(&update).unwrap_or_else(|| panic!("{update:?}"))
}

/// What the other decoder saw; `None` if there are attributes that Tortie does not know.
fn seen(update: &BgpUpdateMessage) -> Option<Seen> {
    let mut seen = Seen::default();
    seen.withdrawn.extend(update.withdraw_routes().iter().map(|route| IpNet::V4(route.network().address())));
    seen.announced.extend(update.nlri().iter().map(|route| IpNet::V4(route.network().address())));
    for attribute in update.path_attributes() {
        match attribute.value() {
            PathAttributeValue::Origin(origin) => seen.origin = Some(*origin as u8),
            PathAttributeValue::AsPath(peer::AsPath::As4PathSegments(segments)) => {
                let segment = |segment: &peer::As4PathSegment| {
                    (
                        segment.segment_type() == peer::AsPathSegmentType::AsSequence,
                        segment.as_numbers().to_vec(),
                    )
                };
                seen.path = segments.iter().map(segment).collect();
            }
            PathAttributeValue::NextHop(next_hop) => seen.next_hop = Some(next_hop.next_hop().into()),
            PathAttributeValue::MultiExitDiscriminator(med) => seen.med = Some(med.metric()),
            PathAttributeValue::LocalPreference(preference) => seen.local_pref = Some(preference.metric()),
            PathAttributeValue::AtomicAggregate(_) => seen.atomic_aggregate = true,
            PathAttributeValue::Aggregator(peer::Aggregator::As4Aggregator(aggregator)) => {
                seen.aggregator = Some((*aggregator.asn(), aggregator.origin().into()));
            }
            PathAttributeValue::Communities(communities) => {
                seen.communities = communities.communities().iter().map(|c| c.value()).collect();
            }
            PathAttributeValue::ExtendedCommunities(communities) => {
                seen.extended_communities = communities.communities().len();
            }
            PathAttributeValue::LargeCommunities(communities) => {
                let triple = |c: &netgauze_bgp_pkt::community::LargeCommunity| {
                    (c.global_admin(), c.local_data1(), c.local_data2())
                };
                seen.large_communities = communities.communities().iter().map(triple).collect();
            }
            PathAttributeValue::Originator(originator) => seen.originator = Some(originator.id().into()),
            PathAttributeValue::ClusterList(clusters) => seen.clusters = clusters.cluster_list().len(),
            PathAttributeValue::MpReach(MpReach::Ipv6Unicast { next_hop_global, nlri, .. }) => {
                seen.next_hop = Some((*next_hop_global).into());
                seen.announced.extend(nlri.iter().map(|route| IpNet::V6(route.network().address())));
            }
            PathAttributeValue::MpReach(MpReach::Ipv4Unicast { next_hop, nlri, .. }) => {
                seen.next_hop = Some(*next_hop);
                seen.announced.extend(nlri.iter().map(|route| IpNet::V4(route.network().address())));
            }
            PathAttributeValue::MpUnreach(MpUnreach::Ipv6Unicast { nlri }) => {
                seen.withdrawn.extend(nlri.iter().map(|route| IpNet::V6(route.network().address())));
            }
            PathAttributeValue::UnknownAttribute(_) => {}
            _ => return None,
        }
    }
    // It keeps the bits after the length, which have no meaning.
    for prefix in seen.withdrawn.iter_mut().chain(&mut seen.announced) {
        *prefix = prefix.trunc();
    }
    Some(seen)
}

fn as_meant(attributes: &Attributes, prefixes: &[IpNet]) -> Seen {
    Seen {
        withdrawn: Vec::new(),
        announced: prefixes.to_vec(),
        next_hop: Some(attributes.next_hop.address),
        origin: Some(match attributes.origin {
            Origin::Igp => 0,
            Origin::Egp => 1,
            Origin::Incomplete => 2,
        }),
        path: attributes
            .as_path
            .0
            .iter()
            .map(|segment| (segment.kind == SegmentKind::Sequence, segment.numbers.clone()))
            .collect(),
        med: attributes.med,
        local_pref: attributes.local_pref,
        atomic_aggregate: attributes.atomic_aggregate,
        aggregator: attributes
            .aggregator
            .map(|aggregator| (aggregator.as_number, aggregator.identifier.into())),
        communities: attributes.communities.iter().map(|community| community.0).collect(),
        extended_communities: attributes.extended_communities.len(),
        large_communities: attributes.large_communities.iter().map(|c| (c.0, c.1, c.2)).collect(),
        originator: attributes.originator_id.map(u32::from),
        clusters: attributes.cluster_list.len(),
    }
}

#[test]
fn another_decoder_reads_announcements_as_they_are_meant() {
    let case = family().prop_flat_map(|family| {
        let simple = attributes(family).prop_map(|attributes| Attributes {
            // It knows neither confederations nor the types that random attributes of unknown types may have.
            as_path: codec::AsPath(
                attributes
                    .as_path
                    .0
                    .into_iter()
                    .filter(|segment| [SegmentKind::Sequence, SegmentKind::Set].contains(&segment.kind))
                    .collect(),
            ),
            unknown: Vec::new(),
            extended_communities: Vec::new(),
            ..attributes
        });
        (Just(family), simple, vec(prefix(family), 1..20))
    });
    let test = |(family, attributes, prefixes): (Family, Attributes, Vec<IpNet>)| {
        let messages = codec::encode_announcement(&attributes, family, &prefixes, &context(true));
        let messages = messages.unwrap_or_default();
        if let [message] = messages.as_slice() {
            prop_assert_eq!(by_peer(message, true), as_meant(&attributes, &prefixes));
        }
        Ok(())
    };
    Random::cases(500).shrinking(500).run(&case, test).unwrap();
}

#[test]
fn another_decoder_reads_withdrawals_as_they_are_meant() {
    let case = family().prop_flat_map(|family| (Just(family), vec(prefix(family), 1..50)));
    let test = |(family, prefixes): (Family, Vec<IpNet>)| {
        for message in codec::encode_withdrawal(family, &prefixes) {
            let expected = Seen { withdrawn: prefixes.clone(), ..Seen::default() };
            prop_assert_eq!(by_peer(&message, true), expected);
        }
        Ok(())
    };
    Random::cases(100).shrinking(500).run(&case, test).unwrap();
    for family in Family::ALL {
        let BgpMessage::Update(update) = read(&codec::encode_end_of_rib(family), true) else { panic!() };
        assert!(update.end_of_rib().is_some());
    }
}

#[test]
fn another_decoder_reads_opens_as_they_are_meant() {
    let test = |open: codec::Open| {
        // It takes no identifier that would be a multicast address.
        let identifier = (u32::from(open.identifier) & 0x7fff_ffff).into();
        let open = codec::Open::new(
            open.as_number(),
            open.hold_time,
            identifier,
            vec![
                codec::Capability::family(Family::Ipv4),
                codec::Capability::family(Family::Ipv6),
                codec::Capability::RouteRefresh,
                codec::Capability::EnhancedRouteRefresh,
                codec::Capability::ExtendedNextHop(vec![(1, 1, 2)]),
                codec::Capability::GracefulRestart(codec::GracefulRestart {
                    restarted: true,
                    notification: true,
                    restart_time: 120,
                    families: vec![(1, 1, true), (2, 1, false)],
                }),
            ],
        );
        let BgpMessage::Open(read) = read(&codec::encode_open(&open), true) else { panic!("no OPEN") };
        prop_assert_eq!(read.my_asn4(), open.as_number());
        prop_assert_eq!((read.hold_time(), read.bgp_id()), (open.hold_time, open.identifier));
        prop_assert_eq!(read.capabilities().len(), 7);
        for capability in read.capabilities() {
            let known = !format!("{capability:?}").contains("Unrecognized");
            prop_assert!(known, "{:?}", capability);
        }
        Ok(())
    };
    Random::cases(50).shrinking(500).run(&open(), test).unwrap();
}

/// What both decoders accept without complaint, both understand in the same way.
#[test]
fn another_decoder_understands_damaged_messages_in_the_same_way() {
    let seeds = random_bytes::seeds();
    let mut numbers = random_bytes::Numbers(first_number());
    let (mut runs, mut compared) = (0, 0);
    let count = Random::cases(100_000).count();
    while runs < count || compared < 2000 {
        runs += 1;
        assert!(runs < count + 10_000_000, "only {compared} were compared");
        let bytes = random_bytes::damaged(&seeds[numbers.below(seeds.len())], &mut numbers);
        let Ok(Message::Update(ours)) = Message::decode(&bytes, &context(true)) else { continue };
        let mut other = BgpParsingContext::asn2_default();
        other.set_asn4(true);
        let theirs = BgpMessage::parse(&mut SliceReader::new(&bytes), &mut other);
        let Ok(BgpMessage::Update(theirs)) = theirs else { continue };
        // Where Tortie finds errors, the other decoder is not asked.
        let Some(theirs) = seen(&theirs).filter(|_| ours.problems.is_empty()) else { continue };
        // Without routes, Tortie has no use for attributes, and with two next hops there is none to compare.
        let mut wanted = Seen { withdrawn: ours.withdrawn.clone(), ..Seen::default() };
        if let [announcement] = ours.announced.as_slice() {
            wanted = Seen {
                withdrawn: ours.withdrawn,
                ..as_meant(&announcement.attributes, &announcement.prefixes)
            };
            // NEXT_HOP may stand beside MP_REACH_NLRI, where it means nothing.
            let has_both = |kind: u8| bytes.windows(3).any(|window| window == [0x40, kind, 4]);
            if wanted.next_hop.is_some_and(|next_hop| next_hop.is_ipv6()) && has_both(3) {
                wanted.next_hop = theirs.next_hop;
            }
            // Twice the same community counts once.
            let once = theirs.large_communities.iter().collect::<std::collections::BTreeSet<_>>().len();
            if once < theirs.large_communities.len() {
                continue;
            }
            assert_eq!(theirs, wanted, "{bytes:02x?}");
            compared += 1;
        } else if ours.announced.is_empty() {
            assert_eq!((theirs.withdrawn, theirs.announced), (wanted.withdrawn, vec![]), "{bytes:02x?}");
            compared += 1;
        }
    }
}

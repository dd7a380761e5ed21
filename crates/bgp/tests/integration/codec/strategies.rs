//! Random messages.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use tortie_bgp::codec::{
    Aggregator, AsPath, Attributes, Capability, Community, Context, Families, Family, GracefulRestart,
    LargeCommunity, NextHop, Open, Origin, Segment, SegmentKind, UnknownAttribute,
};

pub(crate) fn context(four_octet: bool) -> Context {
    Context { four_octet, internal: true, extended_next_hop: true, families: Families::BOTH }
}

pub(crate) fn prefix(family: Family) -> BoxedStrategy<IpNet> {
    match family {
        Family::Ipv4 => (any::<u32>(), 0..=32u8)
            .prop_map(|(bits, length)| IpNet::new(IpAddr::V4(Ipv4Addr::from(bits)), length).unwrap().trunc())
            .boxed(),
        Family::Ipv6 => (any::<u128>(), 0..=128u8)
            .prop_map(|(bits, length)| IpNet::new(IpAddr::V6(Ipv6Addr::from(bits)), length).unwrap().trunc())
            .boxed(),
    }
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![1..=65535u32, any::<u32>()]
}

fn segment(longest: usize) -> impl Strategy<Value = Segment> {
    let kind = prop_oneof![
        4 => Just(SegmentKind::Sequence),
        1 => Just(SegmentKind::Set),
        1 => Just(SegmentKind::ConfederationSequence),
        1 => Just(SegmentKind::ConfederationSet),
    ];
    (kind, vec(number(), 1..longest)).prop_map(|(kind, numbers)| Segment { kind, numbers })
}

pub(crate) fn as_path() -> impl Strategy<Value = AsPath> {
    prop_oneof![8 => vec(segment(6), 0..4), 1 => vec(segment(256), 1..2)].prop_map(AsPath)
}

pub(crate) fn next_hop(family: Family) -> BoxedStrategy<NextHop> {
    let ipv6 = (any::<u128>(), option::of(any::<u128>())).prop_map(|(address, link_local)| NextHop {
        address: IpAddr::V6(address.into()),
        link_local: link_local.map(Ipv6Addr::from),
    });
    let ipv4 = any::<u32>().prop_map(|address| IpAddr::V4(address.into()).into());
    match family {
        Family::Ipv4 => prop_oneof![3 => ipv4, 1 => ipv6].boxed(),
        Family::Ipv6 => ipv6.boxed(),
    }
}

pub(crate) fn attributes(family: Family) -> impl Strategy<Value = Attributes> {
    let first = (
        next_hop(family),
        prop_oneof![Just(Origin::Igp), Just(Origin::Egp), Just(Origin::Incomplete)],
        as_path(),
        option::of(any::<u32>()),
        option::of(any::<u32>()),
        any::<bool>(),
        option::of((number(), any::<u32>())),
        vec(any::<u32>().prop_map(Community), 0..80),
    );
    let second = (
        vec(any::<[u8; 8]>(), 0..3),
        proptest::collection::btree_set((number(), any::<u32>(), any::<u32>()), 0..30),
        option::of(any::<u32>()),
        vec(any::<u32>().prop_map(Ipv4Addr::from), 0..4),
        proptest::collection::btree_map(40..=255u8, vec(any::<u8>(), 0..300), 0..2),
        any::<bool>(),
    );
    (first, second).prop_map(|(first, second)| {
        let (next_hop, origin, as_path, med, local_pref, atomic_aggregate, aggregator, communities) = first;
        let (extended_communities, large, originator, cluster_list, unknown, is_partial) = second;
        let present = [
            (7, aggregator.is_some()),
            (8, !communities.is_empty()),
            (16, !extended_communities.is_empty()),
            (32, !large.is_empty()),
        ];
        let partial = present.into_iter().filter(|(_, is_there)| is_partial && *is_there);
        Attributes {
            next_hop,
            origin,
            as_path,
            med,
            local_pref,
            atomic_aggregate,
            aggregator: aggregator
                .map(|(as_number, identifier)| Aggregator { as_number, identifier: identifier.into() }),
            communities,
            extended_communities,
            large_communities: large.into_iter().map(|(a, b, c)| LargeCommunity(a, b, c)).collect(),
            originator_id: originator.map(Ipv4Addr::from),
            cluster_list,
            unknown: unknown.into_iter().map(|(kind, value)| UnknownAttribute { kind, value }).collect(),
            partial: partial.map(|(kind, _)| kind).collect(),
        }
    })
}

pub(crate) fn family() -> impl Strategy<Value = Family> {
    prop_oneof![Just(Family::Ipv4), Just(Family::Ipv6)]
}

fn capability() -> impl Strategy<Value = Capability> {
    let restart =
        (any::<bool>(), any::<bool>(), 0..4096u16, vec((any::<u16>(), any::<u8>(), any::<bool>()), 0..4));
    prop_oneof![
        (any::<u16>(), any::<u8>()).prop_map(|(afi, safi)| Capability::Multiprotocol { afi, safi }),
        Just(Capability::RouteRefresh),
        Just(Capability::EnhancedRouteRefresh),
        vec(any::<(u16, u16, u16)>(), 0..4).prop_map(Capability::ExtendedNextHop),
        restart.prop_map(|(restarted, notification, restart_time, families)| {
            Capability::GracefulRestart(GracefulRestart { restarted, notification, restart_time, families })
        }),
        any::<u32>().prop_map(Capability::FourOctetAs),
        (71..=255u8, vec(any::<u8>(), 0..255)).prop_map(|(code, data)| Capability::Unknown { code, data }),
    ]
}

/// Some of them with so many capabilities that they need the extended form.
pub(crate) fn open() -> impl Strategy<Value = Open> {
    (any::<u16>(), any::<u16>(), any::<u32>(), vec(capability(), 0..12)).prop_map(
        |(two_octet_as, hold_time, identifier, capabilities)| Open {
            two_octet_as,
            hold_time,
            identifier: identifier.into(),
            capabilities,
        },
    )
}

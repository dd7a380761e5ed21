//! Random tables that the kernel accepts.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use tortie_kernel::nftables::expr::state;
use tortie_kernel::nftables::*;

/// A name of the maximum length (`NFT_NAME_MAXLEN` in `linux/netfilter/nf_tables.h`, without its NUL).
pub(crate) fn longest(name: &str) -> String {
    format!("{name:-<255}")
}

/// An interface with a name of the maximum length (`IFNAMSIZ`, without its NUL).
fn interface(link: u8) -> Key {
    Key::interface(&format!("cali{link:0>11}"))
}

/// `NF_LOG_PREFIXLEN` (`linux/netfilter/nf_log.h`), without its NUL.
pub(crate) const MAX_LOG_PREFIX_LENGTH: usize = 127;

/// Text of some length, often the maximum.
fn text(most: usize) -> impl Strategy<Value = String> {
    let length = prop_oneof![3 => 1..=most, 1 => Just(most)];
    length
        .prop_flat_map(|length| prop::collection::vec(prop::char::range(' ', '~'), length))
        .prop_map(String::from_iter)
}

/// A table with some of the sets and chains from a small stock of names, so that two random tables share some.
pub(crate) fn table() -> impl Strategy<Value = Table> {
    let sets = subsequence(specs(), 0..=specs().len()).prop_flat_map(|specs| {
        specs
            .into_iter()
            .map(|(name, spec)| set(spec).prop_map(move |set| (name.clone(), set)))
            .collect::<Vec<_>>()
    });
    sets.prop_flat_map(|sets| {
        let sets: BTreeMap<_, _> = sets.into_iter().collect();
        let names: Vec<_> = sets.iter().map(|(name, set)| (name.clone(), set.spec.clone())).collect();
        let loaded =
            (prop::option::of(numbers()), prop::option::of(link_addresses()), prop::option::of(services()));
        (Just(sets), chains(names), special_chains(), maps(), loaded)
    })
    .prop_map(|(sets, regular, special, map, (numbers, addresses, services))| {
        let mut table = Table { flags: 0, chains: regular, sets };
        if let Some(numbers) = numbers {
            table.sets.insert("numbers".to_owned(), numbers);
            table.chains.insert("by-number".to_owned(), by_number());
        }
        if let Some(addresses) = addresses {
            table.sets.insert("addresses".to_owned(), addresses);
            table.chains.insert("by-address".to_owned(), by_address());
        }
        if let Some(services) = services {
            table.sets.extend(services);
            table.chains.extend(by_service());
        }
        table.chains.extend(special);
        let targets: Vec<_> = table
            .chains
            .iter()
            .filter(|(_, chain)| chain.base.is_none())
            .map(|(name, _)| name.clone())
            .collect();
        if !targets.is_empty() && !map.is_empty() {
            let element = |(n, (link, goto)): (usize, (u8, bool))| {
                let target = targets[n % targets.len()].clone();
                let verdict = if goto { Verdict::Goto(target) } else { Verdict::Jump(target) };
                let element = Element::verdict(interface(link), verdict);
                (element.key, element.value)
            };
            let elements = map.into_iter().enumerate().map(element).collect();
            table.sets.insert(
                "links".to_owned(),
                Set { spec: SetSpec::verdict_map(&[Field::Interface]), elements },
            );
        }
        table
    })
}

/// Numbers of links.
fn numbers() -> impl Strategy<Value = Set> {
    let elements = prop::collection::btree_map(0u8..6, any::<u32>(), 0..5).prop_map(|numbers| {
        let element = |(link, number)| Element::number(interface(link), number);
        numbers.into_iter().map(element).map(|element| (element.key, element.value)).collect()
    });
    elements.prop_map(|elements| Set { spec: SetSpec::number_map(&[Field::Interface]), elements })
}

/// IPv6 addresses of links.
fn link_addresses() -> impl Strategy<Value = Set> {
    let elements = prop::collection::btree_map(0u8..6, any::<u128>(), 0..5).prop_map(|addresses| {
        let value = |address: u128| Value::new(None, Some(Data::Ipv6(address.into())));
        addresses.into_iter().map(|(link, address)| (interface(link), value(address))).collect()
    });
    let spec = SetSpec { data: Some(DataKind::Ipv6), ..SetSpec::hash(&[Field::Interface]) };
    elements.prop_map(move |elements| Set { spec: spec.clone(), elements })
}

/// A rule that leads a link's number to its chain.
fn by_number() -> Chain {
    let exprs = vec![
        Expr::Meta { register: 0, key: MetaKey::InputInterface },
        Expr::Immediate { register: 4, value: vec![1, 2, 3, 4, 5] },
        Expr::Map { register: 0, set: SetRef::named("numbers"), destination: 4 },
        Expr::Cmp { register: 4, op: CmpOp::NotEqual, value: vec![0; 4] },
        Expr::Verdict(Verdict::Drop),
    ];
    Chain { base: None, rules: vec![Rule::new(exprs, "by number")] }
}

/// A rule that loads a link's address.
fn by_address() -> Chain {
    let exprs = vec![
        Expr::Meta { register: 0, key: MetaKey::InputInterface },
        Expr::Map { register: 0, set: SetRef::named("addresses"), destination: 4 },
        Expr::Cmp { register: 4, op: CmpOp::NotEqual, value: vec![0; 16] },
        Expr::Verdict(Verdict::Drop),
    ];
    Chain { base: None, rules: vec![Rule::new(exprs, "by address")] }
}

/// Maps of addresses and ports to backends and to priorities.
fn services() -> impl Strategy<Value = BTreeMap<String, Set>> {
    use Field::*;
    let backend = (any::<bool>(), any::<u128>(), any::<u16>(), any::<u32>());
    prop::collection::btree_map((any::<u16>(), 0u32..4), backend, 0..9).prop_map(|backends| {
        let specs = [
            ("slots4", SetSpec::map(&[Ipv4, Protocol, Port, Random], DataKind::Ipv4Port)),
            ("slots6", SetSpec::map(&[Ipv6, Protocol, Port, Random], DataKind::Ipv6Port)),
            ("classes", SetSpec::map(&[Protocol, Port], DataKind::Priority)),
            ("learned4", SetSpec::learned(&[Ipv4], DataKind::Priority, 1_000)),
            ("learned6", SetSpec::learned(&[Ipv6], DataKind::Priority, 65_536)),
        ];
        let mut sets = specs.map(|(name, spec)| (name.to_owned(), Set { spec, elements: BTreeMap::new() }));
        for ((port, slot), (is_v6, address, to, class)) in backends {
            let address: std::net::IpAddr = match is_v6 {
                true => std::net::Ipv6Addr::from(address).into(),
                false => std::net::Ipv4Addr::from(address as u32).into(),
            };
            let key = Key::address_port(address, 6, port).and(&slot.to_ne_bytes()).unwrap();
            let element = Element::socket(key, (address, to).into());
            sets[usize::from(is_v6)].1.elements.insert(element.key, element.value);
            let key = Key::protocol_port(6, port);
            let element = Element::number(key, class);
            sets[2].1.elements.insert(element.key, element.value);
        }
        sets.into()
    })
}

/// Rules that translate to backends.
fn by_service() -> [(String, Chain); 4] {
    let base = |hook, priority| Some(BaseChain { kind: ChainKind::Nat, hook, priority, drop: false });
    let l4 = |register| Expr::Meta { register, key: MetaKey::L4Proto };
    let port = |register| Expr::Payload { register, header: Header::Transport, offset: 2, length: 2 };
    let map = |name: &str| Expr::Map { register: 0, set: SetRef::named(name), destination: 0 };
    let to_backend = |family| {
        let (offset, length, after, map) = match family {
            NatFamily::Ipv4 => (16, 4, 1, map("slots4")),
            NatFamily::Ipv6 => (24, 16, 4, map("slots6")),
        };
        Rule::new(
            vec![
                Expr::Payload { register: 0, header: Header::Network, offset, length },
                l4(after),
                port(after + 1),
                Expr::Random { register: after + 2, modulus: 7 },
                map,
                Expr::DestinationNat { family, address: 0, port: after },
            ],
            "",
        )
    };
    let set_class =
        vec![l4(0), port(1), map("classes"), Expr::SetMeta { register: 0, key: MetaKey::Priority }];
    let ordered = vec![
        Expr::Meta { register: 0, key: MetaKey::Priority },
        Expr::NetworkOrder { register: 0 },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![0, 1, 0, 2] },
    ];
    let connection = [
        (0, CtKey::Status),
        (4, CtKey::OriginalIpv4Destination),
        (8, CtKey::OriginalIpv6Destination),
        (12, CtKey::OriginalDestinationPort),
    ]
    .map(|(register, key)| Expr::Ct { register, key });
    let learn = |(map, offset, length, value, seconds): (&str, u32, u32, u8, u32)| {
        let exprs = vec![
            Expr::Payload { register: 0, header: Header::Network, offset, length },
            Expr::Meta { register: value, key: MetaKey::Priority },
            Expr::Learn { register: 0, value, map: map.to_owned(), seconds },
        ];
        Rule::new(exprs, "")
    };
    let learn = [("learned4", 12, 4, 1, 10_800), ("learned6", 8, 16, 4, 1)].map(learn).to_vec();
    let source = [connection.to_vec(), vec![Expr::MasqueradeToRandomPort]].concat();
    let chain = |base, rules| Chain { base, rules };
    let backends = [NatFamily::Ipv4, NatFamily::Ipv6].map(to_backend).to_vec();
    let classes = vec![Rule::new(set_class, ""), Rule::new(ordered, "")];
    [
        ("to-backends".to_owned(), chain(base(Hook::Prerouting, -90), backends)),
        ("learn".to_owned(), chain(None, learn)),
        ("by-class".to_owned(), chain(base(Hook::Output, -90), classes)),
        ("from-node".to_owned(), chain(base(Hook::Postrouting, 90), vec![Rule::new(source, "")])),
    ]
}

fn specs() -> Vec<(String, SetSpec)> {
    use Field::*;
    [
        ("addresses4", SetSpec::hash(&[Ipv4])),
        ("addresses6", SetSpec::hash(&[Ipv6])),
        ("nets4", SetSpec::interval(&[Ipv4])),
        ("nets6", SetSpec::interval(&[Ipv6])),
        ("ports", SetSpec::interval(&[Port])),
        ("protocols", SetSpec::hash(&[Protocol])),
        ("address_ports4", SetSpec::hash(&[Ipv4, Protocol, Port])),
        ("address_ports6", SetSpec::hash(&[Ipv6, Protocol, Port])),
        ("net_ports4", SetSpec::interval(&[Ipv4, Port])),
        ("link_addresses4", SetSpec::hash(&[Interface, Ipv4])),
        ("link_addresses6", SetSpec::hash(&[Interface, Ipv6])),
    ]
    .map(|(name, spec)| (longest(name), spec))
    .into()
}

/// A set of this type with some elements; bytes are often at the ends of their range.
fn set(spec: SetSpec) -> impl Strategy<Value = Set> {
    let byte = prop_oneof![Just(0u8), Just(0xff), any::<u8>()];
    let length: usize = spec.key.iter().map(|field| field.length()).sum();
    let keys = prop::collection::btree_set(prop::collection::vec(byte, length), 0..9);
    keys.prop_map(move |keys| {
        let keys: Vec<_> = keys.into_iter().map(|bytes| key(&spec, &bytes)).collect();
        let elements: Vec<_> = match (spec.interval, spec.key.len()) {
            (false, _) => keys.into_iter().map(Element::key).collect(),
            (true, 1) => ranges(&keys),
            // Ranges of concatenations may not overlap in any field, so single keys are sufficient here.
            (true, _) => keys.into_iter().map(|key| Element::range(key, key)).collect(),
        };
        let elements = elements.into_iter().map(|element| (element.key, element.value)).collect();
        Set { spec: spec.clone(), elements }
    })
}

/// Pads each field of a concatenation.
fn key(spec: &SetSpec, mut bytes: &[u8]) -> Key {
    let mut padded = Vec::new();
    for field in &spec.key {
        let (field, rest) = bytes.split_at(field.length());
        padded.extend(field);
        bytes = rest;
        if spec.key.len() > 1 {
            padded.resize(padded.len().next_multiple_of(4), 0);
        }
    }
    Key::new(&padded).unwrap()
}

/// Ranges between every second pair of keys, so that they do not touch.
fn ranges(keys: &[Key]) -> Vec<Element> {
    let mut ranges: Vec<Element> = Vec::new();
    for pair in keys.chunks(2) {
        let (first, last) = (pair[0], pair[pair.len() - 1]);
        let before = ranges.last().and_then(|range| range.value.end().copied());
        if before.is_none_or(|before| before.next() != Some(first)) {
            ranges.push(Element::range(first, last));
        }
    }
    ranges
}

fn maps() -> impl Strategy<Value = BTreeMap<u8, bool>> {
    prop::collection::btree_map(0u8..6, any::<bool>(), 0..5)
}

/// Chains c0 … c4 (some of them); they jump and go only to later ones.
fn chains(sets: Vec<(String, SetSpec)>) -> impl Strategy<Value = BTreeMap<String, Chain>> {
    subsequence((0..5).collect::<Vec<u8>>(), 0..=5).prop_flat_map(move |present| {
        let name = |n: u8| longest(&format!("c{n}"));
        let chain = |n: u8| {
            let targets: Vec<_> = present.iter().filter(|m| **m > n).map(|m| name(*m)).collect();
            let rules = prop::collection::vec(rule(sets.clone(), targets), 0..5);
            rules.prop_map(move |rules| (name(n), Chain { base: None, rules }))
        };
        present.iter().map(|n| chain(*n)).collect::<Vec<_>>().prop_map(|chains| chains.into_iter().collect())
    })
}

fn rule(sets: Vec<(String, SetSpec)>, targets: Vec<String>) -> impl Strategy<Value = Rule> {
    let conditions = prop::collection::vec(condition(sets), 0..4);
    (conditions, verdict(targets), prop_oneof![Just(String::new()), text(Rule::MAX_COMMENT_LENGTH)]).prop_map(
        |(conditions, verdict, comment)| {
            let mut exprs: Vec<_> = conditions.into_iter().flatten().collect();
            exprs.extend(verdict.map(Expr::Verdict));
            Rule { exprs, comment }
        },
    )
}

fn verdict(targets: Vec<String>) -> impl Strategy<Value = Option<Verdict>> {
    let mut verdicts = vec![Verdict::Accept, Verdict::Drop, Verdict::Continue, Verdict::Return];
    verdicts.extend(targets.iter().cloned().map(Verdict::Jump));
    verdicts.extend(targets.into_iter().map(Verdict::Goto));
    prop::option::of(select(verdicts))
}

/// A load and a test of it.
fn condition(sets: Vec<(String, SetSpec)>) -> BoxedStrategy<Vec<Expr>> {
    let load = |offset, length| Expr::Payload { register: 0, header: Header::Network, offset, length };
    let ops = [
        CmpOp::Equal,
        CmpOp::NotEqual,
        CmpOp::Less,
        CmpOp::LessOrEqual,
        CmpOp::Greater,
        CmpOp::GreaterOrEqual,
    ];
    let meta = [
        (MetaKey::Mark, 4),
        (MetaKey::Priority, 4),
        (MetaKey::InputInterface, 16),
        (MetaKey::OutputInterface, 16),
        (MetaKey::NfProto, 1),
        (MetaKey::L4Proto, 1),
    ];
    let compared = (select(meta.to_vec()), select(ops.to_vec()), any::<[u8; 16]>()).prop_map(
        |((key, length), op, bytes)| {
            vec![
                Expr::Meta { register: 0, key },
                Expr::Cmp { register: 0, op, value: bytes[..length].to_vec() },
            ]
        },
    );
    let masked = (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<[u8; 4]>(), 0u8..3).prop_map(
        move |(mask, xor, value, n)| {
            let (source, destination) = (0, n * 4);
            vec![
                load(12, 4),
                Expr::Bitwise { source, destination, mask: mask.to_vec(), xor: xor.to_vec() },
                Expr::Cmp { register: destination, op: CmpOp::Equal, value: value.to_vec() },
            ]
        },
    );
    let state =
        select(vec![state::INVALID, state::ESTABLISHED | state::RELATED, state::NEW | state::UNTRACKED]);
    let connection = state.prop_map(|bits| {
        let mask = bits.to_ne_bytes().to_vec();
        vec![
            Expr::CtState { register: 1 },
            Expr::Bitwise { source: 1, destination: 1, mask, xor: vec![0; 4] },
            Expr::Cmp { register: 1, op: CmpOp::NotEqual, value: vec![0; 4] },
        ]
    });
    let ranged = (any::<u16>(), any::<u16>(), any::<bool>()).prop_map(|(a, b, invert)| {
        let (first, last) = (a.min(b).to_be_bytes().to_vec(), a.max(b).to_be_bytes().to_vec());
        vec![
            Expr::Payload { register: 2, header: Header::Transport, offset: 2, length: 2 },
            Expr::Range { register: 2, invert, first, last },
        ]
    });
    let logged = (any::<u16>(), text(MAX_LOG_PREFIX_LENGTH))
        .prop_map(|(group, prefix)| vec![Expr::Log { group, prefix }]);
    let inline =
        (prop::collection::btree_set(any::<u16>(), 1..5), any::<bool>()).prop_map(|(ports, invert)| {
            let elements = ports.into_iter().map(|port| (Key::port(port), Value::default())).collect();
            let set = SetRef::Inline(Box::new(Set { spec: SetSpec::hash(&[Field::Port]), elements }));
            vec![
                Expr::Payload { register: 0, header: Header::Transport, offset: 0, length: 2 },
                Expr::Lookup { register: 0, set, invert },
            ]
        });
    let inline_nets = (prop::collection::btree_set(any::<[u8; 4]>(), 1..7), any::<bool>()).prop_map(
        move |(keys, invert)| {
            let keys: Vec<_> = keys.iter().map(|bytes| Key::new(bytes).unwrap()).collect();
            let elements = ranges(&keys).into_iter().map(|element| (element.key, element.value)).collect();
            let set = SetRef::Inline(Box::new(Set { spec: SetSpec::interval(&[Field::Ipv4]), elements }));
            vec![load(16, 4), Expr::Lookup { register: 0, set, invert }]
        },
    );
    let mut choices = vec![
        Just(vec![Expr::Counter]).boxed(),
        compared.boxed(),
        masked.boxed(),
        connection.boxed(),
        ranged.boxed(),
        logged.boxed(),
        inline.boxed(),
        inline_nets.boxed(),
    ];
    if !sets.is_empty() {
        choices.push(
            (select(sets), any::<bool>())
                .prop_map(|((name, spec), invert)| looked_up(name, &spec, invert))
                .boxed(),
        );
    }
    prop::strategy::Union::new(choices).boxed()
}

/// Loads every field of the set's key, and looks it up.
fn looked_up(name: String, spec: &SetSpec, invert: bool) -> Vec<Expr> {
    let mut exprs = Vec::new();
    let mut register = 0;
    for field in &spec.key {
        let (header, offset) = match field {
            Field::Ipv4 => (Header::Network, 12),
            Field::Ipv6 => (Header::Network, 8),
            Field::Protocol => (Header::Network, 9),
            _ => (Header::Transport, 2),
        };
        exprs.push(Expr::Payload { register, header, offset, length: field.length() as u32 });
        register += field.length().div_ceil(4) as Register;
    }
    exprs.push(Expr::Lookup { register: 0, set: SetRef::Named(name), invert });
    exprs
}

/// Base chains, with expressions that the kernel accepts only in some of them.
fn special_chains() -> impl Strategy<Value = BTreeMap<String, Chain>> {
    let base = |kind, hook, priority| BaseChain { kind, hook, priority, drop: false };
    let rule = |exprs: Vec<Expr>| Rule { exprs, comment: String::new() };
    let tcp = [
        Expr::Meta { register: 0, key: MetaKey::L4Proto },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![6] },
    ];
    let translation = |family, address: &[u8]| {
        vec![
            Expr::Immediate { register: 0, value: address.to_vec() },
            Expr::Immediate { register: 4, value: vec![0, 80] },
            Expr::DestinationNat { family, address: 0, port: 4 },
        ]
    };
    let to_address = |family, address: &[u8]| {
        let address = Expr::Immediate { register: 0, value: address.to_vec() };
        vec![address, Expr::DestinationNatToAddress { family, address: 0 }]
    };
    let translations = [(NatFamily::Ipv4, &[10, 0, 0, 1][..]), (NatFamily::Ipv6, &[0xfd; 16][..])];
    let fib = Expr::Fib { register: 0, result: 1, flags: 1 | 8 };
    let no_route = Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![0; 4] };
    let stock = [
        ("raw", base(ChainKind::Filter, Hook::Prerouting, -300), vec![rule(vec![Expr::Notrack])]),
        ("masquerade", base(ChainKind::Nat, Hook::Postrouting, 100), vec![rule(vec![Expr::Masquerade])]),
        (
            "translate",
            base(ChainKind::Nat, Hook::Prerouting, -100),
            [
                translations.map(|(family, address)| rule(translation(family, address))),
                translations.map(|(family, address)| rule(to_address(family, address))),
            ]
            .concat(),
        ),
        (
            "forward",
            base(ChainKind::Filter, Hook::Forward, 0),
            vec![
                rule(vec![Expr::Reject(Reject::Prohibited)]),
                rule(vec![Expr::Reject(Reject::PortUnreachable)]),
                rule([&tcp[..], &[Expr::Reject(Reject::TcpReset)]].concat()),
            ],
        ),
        (
            "reverse-path",
            base(ChainKind::Filter, Hook::Prerouting, 10),
            vec![rule(vec![fib, no_route, Expr::Verdict(Verdict::Drop)])],
        ),
        ("input", base(ChainKind::Filter, Hook::Input, -5), vec![]),
        (
            "output",
            BaseChain { drop: true, ..base(ChainKind::Filter, Hook::Output, i32::MAX) },
            vec![rule(vec![])],
        ),
    ];
    let names: BTreeSet<_> = stock.iter().map(|(name, ..)| *name).collect();
    assert_eq!(names.len(), stock.len());
    let count = stock.len();
    subsequence(stock.to_vec(), 0..=count).prop_map(|chosen| {
        chosen
            .into_iter()
            .map(|(name, base, rules)| (name.to_owned(), Chain { base: Some(base), rules }))
            .collect()
    })
}

//! nftables: what is written to the real kernel is what is listed, and what `nft` shows.

use std::collections::BTreeMap;
use std::process::Command;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::*;

const NAME: &str = "tortie";

/// Runs a test in its own namespace.
fn in_namespace<R: Send>(test: impl FnOnce(&mut Nft) -> R + Send) -> R {
    NetNs::create().unwrap().run(|| test(&mut Nft::open().unwrap())).unwrap()
}

fn put(nft: &mut Nft, desired: &Table, actual: Option<&Table>) {
    let transaction = diff(NAME, desired, actual);
    if let Err(error) = nft.commit(&transaction) {
        panic!("{error}\n{transaction:#?}");
    }
}

fn set_of(spec: SetSpec, elements: impl IntoIterator<Item = Element>) -> Set {
    Set { spec, elements: elements.into_iter().map(|element| (element.key, element.value)).collect() }
}

fn address(text: &str) -> Key {
    Key::address(text.parse().unwrap())
}

#[test]
fn random_tables_are_listed_as_created_and_changed() {
    in_namespace(|nft| {
        let mut runner =
            TestRunner::new(Config { cases: 150, failure_persistence: None, ..Config::default() });
        let nft = std::cell::RefCell::new(nft);
        let tables = prop::collection::vec(crate::random_tables::table(), 1..4);
        let result = runner.run(&tables, |tables| {
            let mut nft = nft.borrow_mut();
            let mut actual = None;
            for desired in tables {
                change_and_list(&mut nft, &desired, actual.as_ref())?;
                actual = Some(desired);
            }
            nft.commit(&Transaction { table: NAME.to_owned(), ops: vec![Op::DeleteTable] }).unwrap();
            prop_assert_eq!(nft.list(NAME).unwrap(), None);
            Ok(())
        });
        if let Err(error) = result {
            panic!("{error}");
        }
    });
}

/// Changes the table. Both the model of a transaction and the kernel must reach the desired table.
fn change_and_list(nft: &mut Nft, desired: &Table, actual: Option<&Table>) -> Result<(), TestCaseError> {
    let transaction = diff(NAME, desired, actual);
    if let Err(error) = nft.commit(&transaction) {
        let _ = nft.commit(&Transaction { table: NAME.to_owned(), ops: vec![Op::DeleteTable] });
        return Err(TestCaseError::fail(format!("{error}\n{transaction:#?}")));
    }
    let mut model = actual.cloned().unwrap_or_default();
    transaction.ops.iter().for_each(|op| model.apply(op));
    let listed = nft.list(NAME).unwrap();
    prop_assert_eq!(listed.as_ref(), Some(desired), "the kernel has something else");
    prop_assert_eq!(&model, desired, "the model of a transaction comes to something else");
    prop_assert_eq!(diff(NAME, desired, listed.as_ref()).ops, vec![]);
    Ok(())
}

/// Names and prefixes are listed unchanged up to the kernel's limits, and refused beyond them.
#[test]
fn texts_may_have_the_kernels_maximum_length() {
    let listed = |nft: &mut Nft, beyond: Option<usize>| {
        let longest = ["table", "chain", "set"].map(crate::random_tables::longest);
        let mut texts =
            [longest.to_vec(), vec!["p".repeat(crate::random_tables::MAX_LOG_PREFIX_LENGTH)]].concat();
        beyond.into_iter().for_each(|text| texts[text].push('+'));
        let [name, chain, set, prefix] = texts.try_into().unwrap();
        let exprs = vec![Expr::Log { group: 1, prefix }, Expr::Verdict(Verdict::Goto(chain.clone()))];
        let rule = Rule { exprs, comment: "c".repeat(Rule::MAX_COMMENT_LENGTH) };
        let interface = Element::key(Key::interface("fifteen-letters"));
        let desired = Table {
            chains: [
                ("first".to_owned(), Chain { base: None, rules: vec![rule] }),
                (chain, Chain::default()),
            ]
            .into(),
            sets: [(set, set_of(SetSpec::hash(&[Field::Interface]), [interface]))].into(),
            ..Table::default()
        };
        nft.commit(&diff(&name, &desired, None))?;
        Ok::<_, tortie_kernel::Error>(nft.list(&name)? == Some(desired))
    };
    in_namespace(|nft| {
        for beyond in 0..4 {
            let error = listed(nft, Some(beyond)).unwrap_err();
            assert_eq!(error.errno(), Some(34), "ERANGE: {error}");
        }
        assert!(listed(nft, None).unwrap());
    });
}

#[test]
fn interval_sets_are_right_at_both_ends() {
    const V4: [&[(&str, &str)]; 8] = [
        &[("0.0.0.0", "255.255.255.255")],
        &[("0.0.0.0", "0.0.0.0")],
        &[("255.255.255.255", "255.255.255.255")],
        &[("0.0.0.0", "127.255.255.255"), ("224.0.0.0", "255.255.255.255")],
        &[("10.0.0.0", "10.0.0.127"), ("10.0.0.129", "10.0.0.255")],
        &[("10.0.0.1", "10.0.0.1"), ("10.0.0.3", "10.0.0.3")],
        &[("10.0.0.0", "10.0.0.127"), ("10.0.0.128", "10.0.0.255")],
        &[],
    ];
    const LAST: &str = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    const V6: [&[(&str, &str)]; 8] = [
        &[("::", LAST)],
        &[("::", "::")],
        &[(LAST, LAST)],
        &[("::", "7fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), ("e000::", LAST)],
        &[("fd00::", "fd00::7f"), ("fd00::81", "fd00::ff")],
        &[("fd00::1", "fd00::1"), ("fd00::3", "fd00::3")],
        &[("fd00::", "fd00::ffff:ffff"), ("fd00::1:0:0", "fd00::1:ffff:ffff")],
        &[],
    ];
    for (field, cases) in [(Field::Ipv4, V4), (Field::Ipv6, V6)] {
        let table = |case: &[(&str, &str)]| {
            let ranges = case.iter().map(|(first, last)| Element::range(address(first), address(last)));
            let set = set_of(SetSpec::interval(&[field]), ranges);
            Table { sets: [("nets".to_owned(), set)].into(), ..Table::default() }
        };
        in_namespace(|nft| {
            let mut actual = None;
            // Each case after each other one.
            for case in cases.iter().flat_map(|first| cases.iter().flat_map(move |second| [first, second])) {
                let desired = table(case);
                put(nft, &desired, actual.as_ref());
                assert_eq!(nft.list(NAME).unwrap().as_ref(), Some(&desired));
                actual = Some(desired);
            }
            // Overlapping ranges must be merged before: the kernel refuses them, and keeps its state.
            put(nft, &table(&[cases[4][0]]), actual.as_ref());
            let [(first, _), (_, last)] = cases[4] else { panic!("{:?}", cases[4]) };
            let across = Element::range(address(first).next().unwrap(), address(last));
            let ops = vec![Op::AddElements("nets".to_owned(), SetSpec::interval(&[field]), vec![across])];
            let error = nft.commit(&Transaction { table: NAME.to_owned(), ops }).unwrap_err();
            assert!(error.to_string().contains("set nets"), "{error}");
            assert_eq!(nft.list(NAME).unwrap(), Some(table(&[cases[4][0]])));
        });
    }
}

#[test]
fn a_hundred_thousand_elements_fit_in_one_transaction() {
    let key = |n: u32| Key::new(&n.to_be_bytes()).unwrap();
    let set = set_of(SetSpec::hash(&[Field::Ipv4]), (0..100_000).map(|n| Element::key(key(n))));
    let desired = Table { sets: [("many".to_owned(), set)].into(), ..Table::default() };
    in_namespace(|nft| {
        put(nft, &desired, None);
        assert_eq!(nft.list(NAME).unwrap().as_ref(), Some(&desired));
        let less = Table {
            sets: [("many".to_owned(), set_of(SetSpec::hash(&[Field::Ipv4]), []))].into(),
            ..desired.clone()
        };
        put(nft, &less, Some(&desired));
        assert_eq!(nft.list(NAME).unwrap(), Some(less));
    });
}

#[test]
fn a_rejected_transaction_names_the_object_and_changes_nothing() {
    in_namespace(|nft| {
        let desired = Table::default();
        put(nft, &desired, None);
        let jump =
            Rule { exprs: vec![Expr::Verdict(Verdict::Jump("nowhere".to_owned()))], ..Rule::default() };
        let ops = vec![
            Op::AddChain("first".to_owned(), None),
            Op::AddChain("second".to_owned(), None),
            Op::SetRules("second".to_owned(), vec![jump]),
        ];
        let error = nft.commit(&Transaction { table: NAME.to_owned(), ops }).unwrap_err();
        assert_eq!(error.errno(), Some(2));
        assert!(error.to_string().contains("table tortie, chain second"), "{error}");
        assert_eq!(nft.list(NAME).unwrap(), Some(desired), "all or nothing");

        let ops = vec![Op::DeleteElements(
            "gone".to_owned(),
            SetSpec::hash(&[Field::Ipv4]),
            vec![Element::key(address("10.0.0.1"))],
        )];
        let error = nft.commit(&Transaction { table: NAME.to_owned(), ops }).unwrap_err().to_string();
        assert!(error.contains("set gone") && error.contains("10.0.0.1"), "{error}");
        assert_eq!(nft.list("other").unwrap(), None);
    });
}

#[test]
fn operations_too_large_for_a_transaction_are_rejected_by_name() {
    in_namespace(|nft| {
        nft.limit_transactions(10_000);
        let rule = |_| Rule { exprs: vec![Expr::Counter], ..Rule::default() };
        let chain = Chain { base: None, rules: (0..200).map(rule).collect() };
        let small = Chain { base: None, rules: (0..2).map(rule).collect() };
        let desired = Table {
            chains: [("large".to_owned(), chain), ("small".to_owned(), small)].into(),
            ..Table::default()
        };
        let error = nft.commit(&diff(NAME, &desired, None)).unwrap_err();
        assert_eq!(error.errno(), Some(90), "EMSGSIZE");
        assert!(error.to_string().contains("chain large (200 rules)"), "{error}");
        let error = nft.commit_in_order(&diff(NAME, &desired, None)).unwrap_err();
        assert!(error.to_string().contains("chain large (200 rules)"), "{error}");
        assert_eq!(nft.list(NAME).unwrap(), None, "nothing was sent");
    });
}

#[test]
fn a_change_of_one_element_is_one_operation() {
    let table = |last: &str| {
        let elements = ["10.0.0.1", "10.0.0.2", last].map(|text| Element::key(address(text)));
        let set = set_of(SetSpec::hash(&[Field::Ipv4]), elements);
        Table { sets: [("pods".to_owned(), set)].into(), ..Table::default() }
    };
    let ops = diff(NAME, &table("10.0.0.4"), Some(&table("10.0.0.3"))).ops;
    let spec = SetSpec::hash(&[Field::Ipv4]);
    let removed =
        Op::DeleteElements("pods".to_owned(), spec.clone(), vec![Element::key(address("10.0.0.3"))]);
    let added = Op::AddElements("pods".to_owned(), spec, vec![Element::key(address("10.0.0.4"))]);
    assert_eq!(ops, [removed, added]);
}

#[test]
fn objects_that_cannot_be_changed_in_place_are_recreated() {
    let base = |priority| BaseChain { kind: ChainKind::Filter, hook: Hook::Forward, priority, drop: false };
    let table = |spec, priority| Table {
        sets: [("a".to_owned(), set_of(spec, []))].into(),
        chains: [("forward".to_owned(), Chain { base: Some(base(priority)), rules: vec![] })].into(),
        ..Table::default()
    };
    let first = table(SetSpec::hash(&[Field::Ipv4]), 0);
    in_namespace(|nft| {
        put(nft, &first, None);
        let others = [table(SetSpec::interval(&[Field::Ipv4]), 0), table(SetSpec::hash(&[Field::Ipv4]), 5)];
        for other in others {
            put(nft, &other, Some(&first));
            assert_eq!(nft.list(NAME).unwrap().as_ref(), Some(&other));
            put(nft, &first, Some(&other));
        }
    });
}

#[test]
fn nft_sees_the_same_names_and_counts() {
    let namespace = NetNs::create().unwrap();
    let base = BaseChain { kind: ChainKind::Filter, hook: Hook::Forward, priority: 0, drop: true };
    let fields = [Field::Ipv4, Field::Protocol, Field::Port];
    let port = |n: u16| Key::address_port("10.0.0.1".parse().unwrap(), 6, n);
    let rule = Rule {
        exprs: vec![
            Expr::Meta { register: 0, key: MetaKey::NfProto },
            Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![2] },
            Expr::Payload { register: 0, header: Header::Network, offset: 12, length: 4 },
            Expr::Lookup { register: 0, set: SetRef::named("pods"), invert: true },
            Expr::Counter,
            Expr::Verdict(Verdict::Jump("later".to_owned())),
        ],
        comment: "from others".to_owned(),
    };
    let to_map = Rule {
        exprs: vec![
            Expr::Meta { register: 0, key: MetaKey::InputInterface },
            Expr::VerdictMap { register: 0, set: SetRef::named("links") },
        ],
        comment: String::new(),
    };
    let later = Element::verdict(Key::interface("fifteen-letters"), Verdict::Goto("later".to_owned()));
    let desired = Table {
        flags: 0,
        chains: BTreeMap::from([
            ("forward".to_owned(), Chain { base: Some(base), rules: vec![rule, to_map] }),
            ("later".to_owned(), Chain::default()),
        ]),
        sets: BTreeMap::from([
            (
                "pods".to_owned(),
                set_of(
                    SetSpec::hash(&[Field::Ipv4]),
                    (1..=9).map(|n| Element::key(address(&format!("10.0.0.{n}")))),
                ),
            ),
            (
                "nets".to_owned(),
                set_of(
                    SetSpec::interval(&[Field::Ipv4]),
                    [
                        Element::range(address("10.0.0.0"), address("10.255.255.255")),
                        Element::range(address("192.168.0.1"), address("192.168.0.1")),
                        Element::range(address("224.0.0.0"), address("255.255.255.255")),
                    ],
                ),
            ),
            ("ports".to_owned(), set_of(SetSpec::hash(&fields), (80..85).map(|n| Element::key(port(n))))),
            ("links".to_owned(), set_of(SetSpec::verdict_map(&[Field::Interface]), [later])),
        ]),
    };
    namespace.run(|| put(&mut Nft::open().unwrap(), &desired, None)).unwrap();

    let mut command = Command::new("nft");
    command.args(["-j", "list", "ruleset"]);
    let output = namespace.enter_on_spawn(&mut command).unwrap().output();
    let output = output.expect("this test needs the program nft: apt-get install nftables");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let objects = json["nftables"].as_array().unwrap();
    let named = |kind: &str, name: &str| {
        objects.iter().find(|object| object[kind]["name"] == name).map(|object| &object[kind])
    };
    let count = |kind: &str| objects.iter().filter(|object| object[kind].is_object()).count();

    assert_eq!((count("table"), count("chain"), count("rule"), count("set"), count("map")), (1, 2, 2, 3, 1));
    assert_eq!(named("chain", "forward").unwrap()["policy"], "drop");
    assert_eq!(named("chain", "forward").unwrap()["hook"], "forward");
    assert_eq!(named("set", "pods").unwrap()["elem"].as_array().unwrap().len(), 9);
    assert_eq!(named("set", "ports").unwrap()["elem"].as_array().unwrap().len(), 5);
    assert_eq!(
        named("set", "ports").unwrap()["type"],
        serde_json::json!(["ipv4_addr", "inet_proto", "inet_service"])
    );
    let concat = &named("set", "ports").unwrap()["elem"][0]["concat"];
    assert!(concat[0] == "10.0.0.1" && concat[1] == "tcp", "{concat}");
    let nets = serde_json::to_string(&named("set", "nets").unwrap()["elem"]).unwrap();
    assert!(nets.contains(r#"{"addr":"10.0.0.0","len":8}"#) && nets.contains("192.168.0.1"), "{nets}");
    assert!(nets.contains(r#"{"addr":"224.0.0.0","len":3}"#), "{nets}");
    assert_eq!(
        named("map", "links").unwrap()["elem"],
        serde_json::json!([["fifteen-letters", {"goto": {"target": "later"}}]])
    );
    let rule = objects.iter().find(|object| object["rule"]["comment"] == "from others").unwrap();
    let text = rule.to_string();
    assert!(text.contains("saddr") && text.contains("@pods") && text.contains("!="), "{text}");
}

/// Sets and maps for Services.
fn sets_of_services() -> BTreeMap<String, Set> {
    use Field::*;
    let slot = |text: &str, slot: u32| {
        Key::address_port(text.parse().unwrap(), 6, 80).and(&slot.to_ne_bytes()).unwrap()
    };
    let to = |key, text: &str| Element::socket(key, text.parse().unwrap());
    let key4 = [Ipv4, Protocol, Port];
    let allowed = |last: u8| {
        let key = Key::new(&1u32.to_be_bytes()).unwrap();
        let at = |number: u8| key.and(&[10, 0, 0, number]).unwrap();
        Element::range(at(last & 0xf0), at(last))
    };
    let goto = Element::verdict(Key::number(0x1_0002), Verdict::Goto("two".to_owned()));
    let node_key = Key::protocol_port(17, 30_053);
    let sets = [
        (
            "slots4",
            set_of(
                SetSpec::map(&[Ipv4, Protocol, Port, Random], DataKind::Ipv4Port),
                [to(slot("10.96.0.1", 0), "10.0.0.1:8080"), to(slot("10.96.0.1", 1), "10.0.0.2:81")],
            ),
        ),
        (
            "slots6",
            set_of(
                SetSpec::map(&[Ipv6, Protocol, Port, Random], DataKind::Ipv6Port),
                [to(slot("fd96::1", 0), "[fd00::1]:8080")],
            ),
        ),
        (
            "node-slots4",
            set_of(
                SetSpec::map(&[Protocol, Port, Random], DataKind::Ipv4Port),
                [to(node_key.and(&0u32.to_ne_bytes()).unwrap(), "10.0.0.1:53")],
            ),
        ),
        (
            "class4",
            set_of(
                SetSpec::map(&key4, DataKind::Priority),
                [Element::number(Key::address_port([10, 96, 0, 1].into(), 6, 80), 0x1_0002)],
            ),
        ),
        ("classes", set_of(SetSpec::verdict_map(&[Priority]), [goto])),
        ("allowed4", set_of(SetSpec::interval(&[Priority, Ipv4]), [allowed(0x1f), allowed(0x2f)])),
    ];
    sets.map(|(name, set)| (name.to_owned(), set)).into()
}

/// Rules for Services that use those sets.
fn chains_of_services() -> BTreeMap<String, Chain> {
    let rule = |exprs: Vec<Expr>| Rule::new(exprs, "");
    let payload = |register, header, offset, length| Expr::Payload { register, header, offset, length };
    let family = [
        Expr::Meta { register: 0, key: MetaKey::NfProto },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![2] },
    ];
    let tcp = [
        Expr::Meta { register: 0, key: MetaKey::L4Proto },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![6] },
    ];
    let key = [
        payload(0, Header::Network, 16, 4),
        Expr::Meta { register: 1, key: MetaKey::L4Proto },
        payload(2, Header::Transport, 2, 2),
    ];
    let map = |name: &str| Expr::Map { register: 0, set: SetRef::named(name), destination: 0 };
    let translation = [
        Expr::Random { register: 3, modulus: 2 },
        map("slots4"),
        Expr::DestinationNat { family: NatFamily::Ipv4, address: 0, port: 1 },
    ];
    let set_priority = Expr::SetMeta { register: 0, key: MetaKey::Priority };
    let priority = Expr::Meta { register: 0, key: MetaKey::Priority };
    let base = BaseChain { kind: ChainKind::Nat, hook: Hook::Prerouting, priority: -100, drop: false };
    let first = vec![
        rule(vec![Expr::Immediate { register: 0, value: vec![0; 4] }, set_priority.clone()]),
        rule([&family[..], &key, &[map("class4"), set_priority]].concat()),
        rule(vec![priority.clone(), Expr::VerdictMap { register: 0, set: SetRef::named("classes") }]),
        rule(
            [
                &family[..],
                &[
                    priority,
                    Expr::NetworkOrder { register: 0 },
                    payload(1, Header::Network, 12, 4),
                    Expr::Lookup { register: 0, set: SetRef::named("allowed4"), invert: false },
                    Expr::Verdict(Verdict::Accept),
                ],
            ]
            .concat(),
        ),
    ];
    let two = vec![rule([&tcp[..], &family, &key, &translation].concat())];
    [
        ("first".to_owned(), Chain { base: Some(base), rules: first }),
        ("two".to_owned(), Chain { base: None, rules: two }),
    ]
    .into()
}

/// `nft` knows the expressions that random numbers in keys come from.
#[test]
fn nft_loads_its_own_listing_of_a_map_whose_keys_are_random() {
    let (sets, chains) = (sets_of_services(), chains_of_services());
    let desired = Table { sets, chains, ..Table::default() };
    let (written, read) = (NetNs::create().unwrap(), NetNs::create().unwrap());
    written.run(|| put(&mut Nft::open().unwrap(), &desired, None)).unwrap();
    let listing = |namespace: &NetNs| {
        let output =
            namespace.enter_on_spawn(Command::new("nft").args(["list", "ruleset"])).unwrap().output();
        let output = output.expect("this test needs the program nft: apt-get install nftables");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = listing(&written);
    for part in [
        "typeof ip daddr . meta l4proto . th dport . numgen random mod 2 : ip daddr . th dport",
        "10.96.0.1 . tcp . 80 . 1 : 10.0.0.2 . 81",
        "fd96::1 . tcp . 80 . 0 : fd00::1 . 8080",
        "0:1 . 10.0.0.16/28",
        "1:2 : goto two",
        "map @slots4",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ruleset");
    std::fs::write(&file, &text).unwrap();
    let output = read.enter_on_spawn(Command::new("nft").arg("-f").arg(&file)).unwrap().output().unwrap();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(listing(&read), text);
    let sets = |namespace: &NetNs| {
        let table = namespace.run(|| Nft::open().unwrap().list(NAME).unwrap().unwrap()).unwrap();
        table.sets.into_iter().map(|(name, set)| (name, set.elements)).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(sets(&read), sets(&written), "its elements have the bytes that Tortie writes");
}

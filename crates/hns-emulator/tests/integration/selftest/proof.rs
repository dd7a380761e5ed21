//! Only a complete, consistent report of this very HNS proves that ACLs may name sets.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tortie_hcn::schema::Acl;
use tortie_hcn::selftest::{HnsReport, NoTraffic, NotProven, ProbePacket, Traffic, run};
use tortie_hcn::{Call, Guid, HcnExt, Kind, Version};
use tortie_hns_emulator::{Config, Emulator, Limits, Recorder};

use super::NODE;

const BUILD: &str = "20348.2762";

/// An HNS that is asked quickly.
fn quick(version: Version) -> Emulator {
    let few = Limits {
        set_members: Some(4),
        endpoint_acls: Some(8),
        modify_policies: Some(8),
        field_entries: Some(8),
        ..Limits::default()
    };
    Emulator::new(Config { limits: few, ..Config::new(version, NODE) })
}

fn report(hns: &Emulator, traffic: &dyn Traffic) -> HnsReport {
    HnsReport { build: Some(BUILD.to_owned()), ..run(hns, traffic, None).unwrap() }
}

fn proof(report: &HnsReport, version: Version) -> Result<(), NotProven> {
    report.proves_sets(version, Some(BUILD))
}

/// Changes one answer about a packet.
struct Lying<'a> {
    hns: &'a Emulator,
    /// Which packet, of those whose endpoint has ACLs with one set on a side.
    which: usize,
    asked: AtomicUsize,
    lie: fn(bool) -> Option<bool>,
}

impl Traffic for Lying<'_> {
    fn open(&self, endpoint: Guid, local: Ipv4Addr, packet: &ProbePacket) -> Option<bool> {
        let truth = Traffic::open(self.hns, endpoint, local, packet);
        let acls = self.hns.endpoint(endpoint).unwrap().policies;
        let acls: Vec<Acl> = acls.iter().filter_map(|policy| policy.settings().unwrap()).collect();
        let sides = acls.iter().flat_map(|acl| [&acl.local_addresses, &acl.remote_addresses]);
        let named: Vec<&String> = sides.filter(|side| side.contains("tortie-")).collect();
        // How several sets in one field combine is not needed.
        if named.is_empty() || named.iter().any(|side| side.contains(',')) {
            return truth;
        }
        match self.asked.fetch_add(1, Ordering::Relaxed) == self.which {
            true => (self.lie)(truth.unwrap()),
            false => truth,
        }
    }

    fn is_open(&self, endpoint: Guid, local: Ipv4Addr, packet: &ProbePacket) -> Option<bool> {
        Traffic::is_open(self.hns, endpoint, local, packet)
    }

    fn sender(&self) -> Option<String> {
        Traffic::sender(self.hns)
    }
}

#[test]
fn every_packet_about_sets_counts() {
    for version in [Config::SERVER_2022, Config::NEWEST] {
        let hns = quick(version);
        for lie in [|truth: bool| Some(!truth), |_| None] as [fn(bool) -> Option<bool>; 2] {
            let asked = |which| {
                let lying = Lying { hns: &hns, which, asked: AtomicUsize::new(0), lie };
                let proof = proof(&report(&hns, &lying), version);
                (proof, lying.asked.into_inner())
            };
            let (truth, count) = asked(usize::MAX);
            assert_eq!(truth, Ok(()));
            assert!(count > 20, "{count}");
            for which in 0..count {
                let (proof, _) = asked(which);
                let proof = proof.expect_err(&format!("packet {which} of HNS {version}"));
                // The first two tell what a set means.
                match (which, lie(true)) {
                    (0 | 1, _) => assert!(matches!(proof, NotProven::Contradiction(_)), "{which}: {proof}"),
                    (_, Some(_)) => assert!(matches!(proof, NotProven::Wrong(_)), "{which}: {proof}"),
                    (_, None) => assert!(matches!(proof, NotProven::Open(_)), "{which}: {proof}"),
                }
            }
        }
    }
}

#[test]
fn an_hns_whose_sets_never_change_is_found() {
    let hns = Recorder::new(quick(Config::SERVER_2022));
    hns.set_fault(|call| {
        let Call::Modify { kind: Kind::Network, settings, .. } = call else { return None };
        let request: Value = serde_json::from_str(settings).unwrap();
        (request["RequestType"] == "Update").then(|| Ok(String::new()))
    });
    let report = HnsReport { build: Some(BUILD.to_owned()), ..run(&hns, hns.inner(), None).unwrap() };
    let found = proof(&report, Config::SERVER_2022).unwrap_err();
    assert_eq!(found, NotProven::Wrong("sets.getsMembers"));
    assert!(found.speaks_against());
}

#[test]
fn a_report_of_another_hns_or_without_packets_proves_nothing() {
    let hns = quick(Config::SERVER_2022);
    let whole = report(&hns, &hns);
    let version = Config::SERVER_2022;
    assert_eq!(whole.proves_sets(version, Some(BUILD)), Ok(()));
    for (version, build) in [
        (Version::new(13, 3), Some(BUILD)),
        (Version::new(14, 2), Some(BUILD)),
        (version, Some("20348.2763")),
    ] {
        let found = whole.proves_sets(version, build).unwrap_err();
        assert!(matches!(found, NotProven::OtherHns { .. }) && !found.speaks_against(), "{found}");
    }
    for build in [Some(BUILD.to_owned()), None] {
        let found = HnsReport { build, ..whole.clone() }.proves_sets(version, None);
        assert_eq!(found, Err(NotProven::UnknownBuild));
    }
    let silent = proof(&report(&hns, &NoTraffic), version).unwrap_err();
    assert!(matches!(silent, NotProven::Open(_)), "{silent}");
    let old = quick(Config::SERVER_2019);
    assert!(matches!(proof(&report(&old, &old), Config::SERVER_2019), Err(NotProven::Open(_))));
}

/// The members that the decision needs, and values that each of them must not have.
fn needed() -> Vec<(String, Vec<Value>)> {
    let answers = [
        "allowsInbound",
        "allowsOutbound",
        "blocksInbound",
        "blocksOutbound",
        "hasNetworks",
        "matchesBothSides",
        "hasPorts",
        "nobodyMatchesNothing",
        "getsMembers",
        "losesMembers",
    ];
    let mut needed: Vec<(String, Vec<Value>)> = answers
        .iter()
        .map(|name| (format!("/sets/{name}"), vec![json!(false), json!("true"), json!(1), json!([true])]))
        .collect();
    let other = |path: &str, values: &[Value]| (path.to_owned(), values.to_vec());
    needed.extend([
        other("/format", &[json!(0), json!(2), json!("1"), json!(1.5)]),
        other("/version", &[json!({"Major": 13, "Minor": 1}), json!("13.2"), json!(13)]),
        other("/build", &[json!("20348"), json!(""), json!(20348)]),
        other("/packetsBy", &[json!(""), json!(" "), json!(true)]),
        other("/setReading", &[json!("Both"), json!(""), json!(true)]),
        other("/limits/setMembers", &[json!(4), json!("many")]),
        other("/sets", &[json!({}), json!([]), json!(true)]),
        other("/limits", &[json!({}), json!([])]),
    ]);
    needed
}

fn decide(text: &str) -> Result<(), String> {
    let report = HnsReport::parse(text).map_err(|error| error.to_string())?;
    proof(&report, Config::SERVER_2022).map_err(|error| error.to_string())
}

#[test]
fn every_corrupted_report_proves_nothing() {
    let hns = quick(Config::SERVER_2022);
    let whole = json!(report(&hns, &hns));
    let text = serde_json::to_string_pretty(&whole).unwrap();
    assert_eq!(decide(&text), Ok(()));
    for (path, bad) in needed() {
        let (parent, name) = path.rsplit_once('/').unwrap();
        let mut without = whole.clone();
        without.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(name).unwrap();
        assert!(decide(&without.to_string()).is_err(), "without {path}");
        for value in bad.into_iter().chain([Value::Null]) {
            let mut other = whole.clone();
            *other.pointer_mut(&path).unwrap() = value.clone();
            assert!(decide(&other.to_string()).is_err(), "{path} = {value}");
        }
    }
    for unknown in ["", "/sets", "/limits"] {
        let mut other = whole.clone();
        other.pointer_mut(unknown).unwrap()["another"] = json!(1);
        assert!(decide(&other.to_string()).unwrap_err().contains("another"), "{unknown}");
    }
    for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
        assert!(decide(&text[..end]).is_err(), "{}", &text[..end]);
    }
    let twice = text.replacen("\"setReading\"", "\"setReading\": \"Endpoint\", \"setReading\"", 1);
    assert!(decide(&twice).unwrap_err().contains("duplicate"), "{twice}");
    for nonsense in ["null", "[]", "1", "{} {}", "\u{0}"] {
        assert!(decide(nonsense).is_err(), "{nonsense}");
    }
}

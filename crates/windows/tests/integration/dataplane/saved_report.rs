//! `Auto` names sets in ACLs only where a saved report of a selftest proves them, or an annotation.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::Action;
use tortie_dataplane::{Delta, Reason, Settings};
use tortie_hcn::Version;
use tortie_hcn::selftest::{HnsReport, NoTraffic, run};
use tortie_hns_emulator::{Config, Emulator};
use tortie_policy::program::{EndOfTier, EndpointProgram, Member, Rule, SetId, SetKind};
use tortie_windows::{Host, SavedReport};

use crate::dataplane::node::*;

const BUILD: &str = "20348.2762";
const SETS: [Version; 2] = [Config::SERVER_2022, Config::NEWEST];

/// What the selftest of such an HNS finds.
fn selftest(config: &Config) -> HnsReport {
    let hns = Emulator::new(config.clone());
    HnsReport { build: Some(BUILD.to_owned()), ..run(&hns, &hns, None).unwrap() }
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("selftest.json");
    (folder, file)
}

/// A node of this version whose agent looks for a report there, with a pod that admits the members of a set.
fn node(version: Version, file: &Path) -> Node {
    node_of_build(version, file, Some(BUILD))
}

fn node_of_build(version: Version, file: &Path, build: Option<&str>) -> Node {
    let mut node = Node::new(Config::new(version, NODE));
    let report = SavedReport::new(file.to_owned(), build.map(str::to_owned));
    node.dataplane =
        node.dataplane.map(|dataplane| dataplane.with_host(Host::unknown().with_selftest(report)));
    node.connect();
    let mut rule = Rule::all(Action::Allow);
    rule.source.sets = vec![SetId::new("s:allowed")];
    let member = Member::Net(ipnet::Ipv4Net::from(std::net::Ipv4Addr::new(10, 0, 0, 1)).into());
    let ingress = vec![tier("default", &["web"], EndOfTier::Deny)];
    node.apply(&[
        local_node(),
        own_block(),
        allow_all(),
        policy("web", vec![rule], vec![]),
        Delta::SetCreated(SetId::new("s:allowed"), SetKind::Nets, [member].into()),
        endpoint(EndpointProgram { ingress, ..open_program() }),
    ]);
    node
}

/// Whether ACLs name sets, and what the node reports about that.
fn decision(node: &mut Node) -> (bool, Option<String>) {
    let report = node.dataplane.resync();
    assert!(report.endpoints.is_empty() && !report.retry, "{report:?}");
    let mut conditions = report.node.into_iter();
    let condition = conditions.next();
    assert!(conditions.next().is_none());
    let condition = condition.inspect(|condition| assert_eq!(condition.reason, Reason::PolicySetsNotProven));
    let acls = node.acls();
    let by_name = acls.iter().any(|acl| acl.remote_addresses.contains("tortie-"));
    let by_address = acls.iter().any(|acl| acl.remote_addresses.contains("10.0.0.1"));
    assert!(by_name != by_address, "{acls:?}");
    (by_name, condition.map(|condition| condition.message))
}

fn settings(sets: WindowsPolicySets, proven: &[Version]) -> Delta {
    let proven_policy_sets: BTreeSet<_> = proven.iter().map(|it| (it.major, it.minor)).collect();
    Delta::Settings(Arc::new(Settings {
        windows_policy_sets: sets,
        proven_policy_sets,
        ..Settings::default()
    }))
}

#[test]
fn a_report_of_this_hns_decides_for_every_preset() {
    for version in [Config::SERVER_2019, Config::SERVER_2022, Config::NEWEST] {
        for config in [Config::new(version, NODE), Config::as_hns(version, NODE)] {
            let (_folder, file) = file();
            SavedReport::save(&file, &selftest(&config)).unwrap();
            let mut node = node(version, &file);
            assert_eq!(decision(&mut node), (SETS.contains(&version), None), "{version}");
        }
    }
}

#[test]
fn a_report_of_another_hns_is_named_and_counts_for_nothing() {
    let (_folder, file) = file();
    SavedReport::save(&file, &selftest(&Config::new(Config::SERVER_2022, NODE))).unwrap();
    for (version, build) in [(Config::NEWEST, Some(BUILD)), (Config::SERVER_2022, Some("20348.2763"))] {
        let (sets, condition) = decision(&mut node_of_build(version, &file, build));
        let condition = condition.unwrap();
        assert!(!sets && condition.contains("selftest --save") && condition.contains(BUILD), "{condition}");
    }
}

#[test]
fn without_the_build_of_this_windows_no_report_counts() {
    let (_folder, file) = file();
    SavedReport::save(&file, &selftest(&Config::new(Config::SERVER_2022, NODE))).unwrap();
    let (sets, condition) = decision(&mut node_of_build(Config::SERVER_2022, &file, None));
    assert!(!sets && condition.unwrap().contains("does not tell the build"));
}

/// What is in the file, and what the condition says. The annotation names this version: it counts only if the report says nothing.
#[test]
fn a_report_that_proves_nothing_is_reported_with_its_remedy() {
    let version = Config::SERVER_2022;
    let whole = json!(selftest(&Config::new(version, NODE)));
    let changed = |path: &str, value: Value| {
        let mut changed = whole.clone();
        *changed.pointer_mut(path).unwrap() = value;
        changed.to_string().into_bytes()
    };
    let without_packets = run(&Emulator::new(Config::new(version, NODE)), &NoTraffic, None).unwrap();
    let without_packets = HnsReport { build: Some(BUILD.to_owned()), ..without_packets };
    let text = whole.to_string();
    for (bytes, says, annotation_counts) in [
        (serde_json::to_vec(&without_packets).unwrap(), "provenPolicySets", true),
        (changed("/sets/losesMembers", Value::Null), "sets.losesMembers", true),
        (changed("/build", json!("1.1")), "1.1", true),
        (changed("/sets/losesMembers", json!(false)), "sets.losesMembers", false),
        (changed("/sets/nobodyMatchesNothing", json!(false)), "sets.nobodyMatchesNothing", false),
        (changed("/setReading", Value::Null), "contradicts itself", false),
        (changed("/packetsBy", Value::Null), "packetsBy", false),
        (changed("/format", json!(2)), "format is 2", false),
        (text.as_bytes()[..text.len() / 2].to_vec(), "cannot be read", false),
        (Vec::new(), "cannot be read", false),
        (vec![0xff, 0xfe], "cannot be read", false),
        (vec![b' '; (1 << 20) + 1], "bytes", false),
    ] {
        let (_folder, file) = file();
        fs::write(&file, &bytes).unwrap();
        let mut node = node(version, &file);
        let (sets, condition) = decision(&mut node);
        let condition = condition.unwrap();
        assert!(!sets && condition.contains(says), "{says}: {condition}");
        assert!(
            condition.contains("delete it") || condition.contains("selftest --save") || annotation_counts,
            "{condition}"
        );

        node.apply(&[settings(WindowsPolicySets::Auto, &[version])]);
        let (sets, condition) = decision(&mut node);
        assert_eq!((sets, condition.is_none()), (annotation_counts, annotation_counts), "{says}");
        // Whoever demands sets has them, and learns what speaks against it.
        node.apply(&[settings(WindowsPolicySets::Enabled, &[])]);
        let (sets, condition) = decision(&mut node);
        assert_eq!((sets, condition.is_some()), (true, !annotation_counts), "{says}");
        node.apply(&[settings(WindowsPolicySets::Disabled, &[version])]);
        assert_eq!(decision(&mut node), (false, None), "{says}");
    }
}

#[test]
fn a_folder_in_its_place_is_no_report() {
    let (_folder, file) = file();
    fs::create_dir(&file).unwrap();
    let (sets, condition) = decision(&mut node(Config::SERVER_2022, &file));
    assert!(!sets && condition.unwrap().contains("no file"));
}

/// Without a report nothing is reported. Reports that come, change and go take effect at the next check.
#[test]
fn the_file_is_read_at_each_check() {
    let (_folder, file) = file();
    let whole = selftest(&Config::new(Config::SERVER_2022, NODE));
    let mut node = node(Config::SERVER_2022, &file);
    assert_eq!(decision(&mut node), (false, None));
    SavedReport::save(&file, &whole).unwrap();
    assert_eq!(decision(&mut node), (true, None));
    let mut bad = whole.clone();
    bad.sets.gets_members = Some(false);
    SavedReport::save(&file, &bad).unwrap();
    let (sets, condition) = decision(&mut node);
    assert!(!sets && condition.is_some());
    SavedReport::save(&file, &whole).unwrap();
    assert_eq!(decision(&mut node), (true, None));
    fs::remove_file(&file).unwrap();
    assert_eq!(decision(&mut node), (false, None));
    let left = fs::read_dir(file.parent().unwrap()).unwrap().count();
    assert_eq!(left, 0, "nothing unfinished stays");
}

/// A report that cannot be written leaves the earlier one.
#[test]
fn a_failed_save_keeps_the_earlier_report() {
    let (_folder, file) = file();
    let whole = selftest(&Config::new(Config::SERVER_2022, NODE));
    SavedReport::save(&file, &whole).unwrap();
    fs::create_dir(file.with_extension("unfinished")).unwrap();
    SavedReport::save(&file, &HnsReport::default()).unwrap_err();
    assert_eq!(HnsReport::parse(&fs::read_to_string(&file).unwrap()), Ok(whole));
}

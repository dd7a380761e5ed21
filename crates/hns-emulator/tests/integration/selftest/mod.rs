//! The selftest of an emulated HNS finds how that HNS was started, for every preset and every option.

mod proof;

use std::net::Ipv4Addr;

use tortie_hcn::selftest::{CANARY, HnsReport, NoTraffic, run};
use tortie_hcn::{Call, Failure, Feature, HResult, HcnExt, Kind, Version};
use tortie_hns_emulator::{
    AclRemoval, Config, DefaultAction, EgressSees, Emulator, EqualPriority, Limits, OnRewrite, Recorder,
    SetReading, SeveralSets, UpdateReplaces,
};

const NODE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
const PRESETS: [Version; 3] = [Config::SERVER_2019, Config::SERVER_2022, Config::NEWEST];

/// The options that documents and first packets tell. The last two need frames, which the emulator of this test does not have.
fn comparable(config: Config) -> String {
    let mut config = config;
    if !config.strict {
        // Only a strict HNS has this limit.
        config.limits.field_entries = None;
    }
    if config.version == Config::SERVER_2019 {
        // It has no sets.
        let usual = Config::as_hns(config.version, NODE);
        (config.set_reading, config.several_sets) = (usual.set_reading, usual.several_sets);
        config.limits.set_members = None;
    }
    (config.related_icmp_passes, config.check_tunnel_sources) = (true, true);
    format!("{config:#?}")
}

fn reproduces(config: &Config) -> HnsReport {
    let hns = Emulator::new(config.clone());
    let report = run(&hns, &hns, None).unwrap();
    // The file is what operators have.
    let stored = serde_json::to_string_pretty(&report).unwrap();
    let loaded: HnsReport = serde_json::from_str(&stored).unwrap();
    assert_eq!(loaded, report);
    let again = Config::of_report(&loaded, NODE);
    assert_eq!(comparable(again), comparable(config.clone()), "{stored}");
    assert!(hns.network_by_name(CANARY).unwrap().is_none(), "nothing stays");
    // Whatever sets mean, the agent's ACLs are right.
    let of_build = HnsReport { build: Some("1.2".to_owned()), ..report.clone() };
    let proof = of_build.proves_sets(config.version, Some("1.2"));
    assert_eq!(proof.is_ok(), config.version.supports(Feature::SetPolicy), "{proof:?} {stored}");
    report
}

#[test]
fn every_preset_is_reproduced() {
    for version in PRESETS {
        for config in [Config::new(version, NODE), Config::as_hns(version, NODE)] {
            let report = reproduces(&config);
            assert!(!report.accepts["priority of a Host rule"]);
            assert_eq!(report.keeps_ids, Some(true));
        }
    }
}

/// Each value of each option, one at a time.
fn variants(usual: &Config) -> Vec<Config> {
    let with = |change: &dyn Fn(&mut Config)| {
        let mut config = usual.clone();
        change(&mut config);
        config
    };
    let mut all = Vec::new();
    for action in [DefaultAction::DenyBoth, DefaultAction::DenySameDirection, DefaultAction::Allow] {
        all.push(with(&|config| config.switch_default = action));
        all.push(with(&|config| config.host_default = Some(action)));
    }
    all.push(with(&|config| config.host_default = None));
    for wins in [EqualPriority::BlockWins, EqualPriority::AllowWins] {
        all.push(with(&|config| config.equal_priority = wins));
    }
    for reading in [SetReading::Endpoint, SetReading::Flow] {
        for several in [SeveralSets::Union, SeveralSets::Intersection] {
            all.push(with(&|config| (config.set_reading, config.several_sets) = (reading, several)));
        }
    }
    for sees in [EgressSees::Vip, EgressSees::Backend] {
        all.push(with(&|config| config.egress_sees = sees));
    }
    for rewrite in [OnRewrite::Keep, OnRewrite::ResetOnAnyChange, OnRewrite::ResetOnRemoveOrUpdate] {
        all.push(with(&|config| config.on_rewrite = rewrite));
    }
    for removal in [AclRemoval::Works, AclRemoval::RefusedAlways, AclRemoval::IgnoredSilently] {
        all.push(with(&|config| config.acl_removal = removal));
    }
    for replaces in [UpdateReplaces::All, UpdateReplaces::SameType, UpdateReplaces::AclsAndSameType] {
        all.push(with(&|config| config.update_replaces = replaces));
    }
    for yes in [true, false] {
        all.push(with(&|config| config.strict = yes));
        all.push(with(&|config| config.early_nested_sets = yes && config.version != Config::NEWEST));
        all.push(with(&|config| config.deletes_used_networks = yes));
        all.push(with(&|config| config.returns_zeroes = yes));
        all.push(with(&|config| config.accepts_taken_addresses = yes));
    }
    let limits = Limits::default();
    for limits in [
        Limits { field_entries: Some(7), ..limits.clone() },
        Limits { field_entries: None, ..limits.clone() },
        Limits { set_members: Some(5), ..limits.clone() },
        Limits { endpoint_acls: Some(9), ..limits.clone() },
        Limits { modify_policies: Some(30), ..limits.clone() },
        Limits { priorities: 100..=65_000, ..limits.clone() },
        Limits { priorities: 5..=50, ..limits },
    ] {
        all.push(with(&|config| config.limits = limits.clone()));
    }
    all
}

#[test]
fn every_option_is_reproduced() {
    for usual in [Config::new(Config::NEWEST, NODE), Config::as_hns(Config::SERVER_2022, NODE)] {
        for config in variants(&usual) {
            reproduces(&config);
        }
    }
}

/// Without packets, the report says less, and the rest is as usual.
#[test]
fn without_packets_their_questions_have_no_answer() {
    let hns = Emulator::new(Config::new(Config::NEWEST, NODE));
    let report = run(&hns, &NoTraffic, Some("Ethernet")).unwrap();
    let HnsReport { switch_default, host_default, set_reading, egress_sees, on_rewrite, .. } = &report;
    assert!(switch_default.is_none() && host_default.is_none() && set_reading.is_none());
    assert!(egress_sees.is_none() && on_rewrite.is_none());
    assert_eq!(report.acl_removal, Some(AclRemoval::Works));
    let copy = Config::of_report(&report, NODE);
    assert_eq!(copy.switch_default, Config::as_hns(Config::NEWEST, NODE).switch_default);
}

#[test]
fn an_hns_that_ends_meanwhile_is_an_error_and_the_next_run_removes_what_is_left() {
    let hns = Recorder::new(Emulator::new(Config::new(Config::NEWEST, NODE)));
    let mut calls = 0;
    hns.set_fault(move |call| {
        calls += usize::from(matches!(call, Call::Create { kind: Kind::Endpoint, .. }));
        (calls > 3).then(|| Err(Failure::new(HResult::ERROR_TIMEOUT, "away")))
    });
    assert!(run(&hns, &NoTraffic, None).is_err());
    hns.clear_fault();
    assert!(hns.network_by_name(CANARY).unwrap().is_some());
    run(&hns, &NoTraffic, None).unwrap();
    assert!(hns.network_by_name(CANARY).unwrap().is_none());
}

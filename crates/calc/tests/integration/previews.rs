//! Checks results that are based on classes: exactly what a preview reports changes, and rules that lint calls never
//! deciding can be removed without any effect. With both families, with and without host endpoints, and with staged
//! policies as if they were enforced.
#![allow(clippy::print_stdout)]

use proptest::prelude::*;
use serde_json::json;
use tortie_api::net::IpVersion;
use tortie_api::staged::{Staged, enforced, staged};
use tortie_api::{Key, Kind};
use tortie_oracle::{Oracle, Question, Snapshot, Verdict};
use tortie_reach::lint::{Code, lint};
use tortie_reach::{Change, Classes, Difference, Path};

use crate::questions::{End, ends, ends_of, path, question, sample, whole_clusters};
use testkit::clusters::{Objects, Sent, manifest, snapshot};
use testkit::random::Random;

const FAMILIES: [IpVersion; 2] = [IpVersion::V4, IpVersion::V6];

#[derive(Default, Debug)]
struct Changed {
    packets: usize,
    changed: usize,
    /// By the removed object.
    by_host_endpoints: usize,
    by_settings: usize,
}

#[test]
fn a_preview_reports_exactly_the_changes() {
    let seen = std::cell::RefCell::new(Changed::default());
    let strategy = (whole_clusters(4), any::<prop::sample::Index>(), any::<bool>());
    let test = |((objects, packets), which, of_hosts): ((Objects, Vec<Sent>), _, _)| {
        previewed(&objects, chosen(&objects, which, of_hosts), &packets, &mut seen.borrow_mut())
            .map_err(TestCaseError::fail)
    };
    let lacking = || {
        let seen = seen.borrow();
        let of_any = seen.packets > 10_000 && seen.changed > 500;
        let enough = of_any && seen.by_host_endpoints > 50 && seen.by_settings > 0;
        (!enough).then(|| format!("{seen:?}"))
    };
    let result = Random::cases(40).shrinking(60).prove(&strategy, test, lacking);
    println!("{:?}", seen.borrow());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Any object, or one of those that concern host endpoints, if there are any.
fn chosen(objects: &Objects, which: prop::sample::Index, of_hosts: bool) -> usize {
    let about_hosts = |(_, (key, value)): &(usize, &(Key, serde_json::Value))| {
        matches!(key.kind, Kind::HostEndpoint | Kind::FelixConfiguration | Kind::IpPool | Kind::Node)
            || value["spec"]["applyOnForward"] == true
    };
    let about_hosts: Vec<usize> =
        objects.iter().enumerate().filter(about_hosts).map(|(index, _)| index).collect();
    match about_hosts.is_empty() || !of_hosts {
        true => which.index(objects.len()),
        false => *which.get(&about_hosts),
    }
}

/// Removes one object, and compares the preview for every packet with the oracle's verdicts before and after.
fn previewed(objects: &Objects, which: usize, packets: &[Sent], seen: &mut Changed) -> Result<(), String> {
    let before = snapshot(objects);
    let removed = &objects[which].0;
    let mut after = before.clone();
    after.remove(removed);
    let change = Change::new(&before, &after);
    let differences = change.differences();
    let (was, is) = (Oracle::new(&before), Oracle::new(&after));
    let ends = ends_of(&[&before, &after], &change.classes);
    for (from, to, path) in paths(&ends) {
        for packet in packets {
            let question = question(from.peer.clone(), to.peer.clone(), packet);
            let verdict =
                |oracle: &Oracle<'_>| Some(oracle.evaluate_by(&question, path.family).ok()?.verdict);
            let (Some(one), Some(other)) = (verdict(&was), verdict(&is)) else { continue };
            let port = change.classes.ports().class_of(&sample(packet));
            let concerns = |difference: &&Difference| {
                difference.from.contains(&from.class)
                    && difference.to.contains(&to.class)
                    && difference.ports.contains(&port)
                    && difference.scope.holds(path)
            };
            let reported: Vec<&Difference> = differences.iter().filter(concerns).collect();
            if !agrees(&reported, one, other) {
                return Err(format!(
                    "without {removed} {question:?} {path:?}: {one:?} → {other:?}, but told {reported:#?}\n{}",
                    manifest(objects)
                ));
            }
            let changed = usize::from(one != other);
            seen.packets += 1;
            seen.changed += changed;
            match removed.kind {
                Kind::HostEndpoint => seen.by_host_endpoints += changed,
                Kind::FelixConfiguration => seen.by_settings += changed,
                _ => {}
            }
        }
    }
    Ok(())
}

fn agrees(reported: &[&Difference], one: Verdict, other: Verdict) -> bool {
    match reported {
        [] => one == other,
        [reported] => {
            one != other
                && reported.after.verdict == other
                && reported.before.iter().all(|why| why.verdict == one)
        }
        _ => false,
    }
}

/// Every pair of ends, and the paths of packets between them.
fn paths(ends: &[End]) -> impl Iterator<Item = (&End, &End, Path)> {
    let pairs = ends.iter().flat_map(move |from| ends.iter().map(move |to| (from, to)));
    let of =
        |(from, to)| FAMILIES.into_iter().filter_map(move |family| Some((from, to, path(from, to, family)?)));
    pairs.flat_map(of)
}

#[derive(Default, Debug)]
struct Linted {
    shadowed: usize,
    matches_nothing: usize,
    never_matches: usize,
    selects_nothing: usize,
    of_staged: usize,
    of_profiles: usize,
    of_host_endpoints: usize,
}

#[test]
fn idle_rules_can_be_removed_without_effect() {
    let seen = std::cell::RefCell::new(Linted::default());
    let strategy = (whole_clusters(3), 0..6usize);
    let test = |((objects, packets), which): ((Objects, Vec<Sent>), _)| {
        let objects = with_staged(objects, which);
        linted(&objects, &packets[..12], &mut seen.borrow_mut()).map_err(TestCaseError::fail)
    };
    let lacking = || {
        let seen = seen.borrow();
        let often = [seen.matches_nothing, seen.never_matches, seen.selects_nothing];
        let rare = [seen.shadowed, seen.of_staged, seen.of_profiles, seen.of_host_endpoints];
        let enough = often.iter().all(|count| *count >= 15) && rare.iter().all(|count| *count >= 5);
        (!enough).then(|| format!("{seen:?}"))
    };
    let result = Random::cases(40).shrinking(60).prove(&strategy, test, lacking);
    println!("{:?}", seen.borrow());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Stages every sixth object, if it is a policy that can be staged.
fn with_staged(mut objects: Objects, which: usize) -> Objects {
    for (key, _) in objects.iter_mut().skip(which).step_by(6) {
        key.kind = match key.kind {
            Kind::NetworkPolicy => Kind::StagedNetworkPolicy,
            Kind::GlobalNetworkPolicy => Kind::StagedGlobalNetworkPolicy,
            Kind::KubernetesNetworkPolicy => Kind::StagedKubernetesNetworkPolicy,
            kind => kind,
        };
    }
    objects
}

fn linted(objects: &Objects, packets: &[Sent], seen: &mut Linted) -> Result<(), String> {
    let written = snapshot(objects);
    let classes = Classes::of(&[&written]);
    let ends = ends(&written, &classes);
    for finding in lint(&written) {
        let kind = finding.object.kind;
        let (object, snapshot) = in_force(&finding.object, &written);
        let calico = matches!(object.kind, Kind::NetworkPolicy | Kind::GlobalNetworkPolicy);
        let idle = match finding.code {
            Code::Shadowed => &mut seen.shadowed,
            Code::MatchesNothing if finding.field.ends_with(']') => &mut seen.matches_nothing,
            // In the other kinds, the finding may concern one peer of several.
            Code::NeverMatches if calico => &mut seen.never_matches,
            Code::SelectsNothing => &mut seen.selects_nothing,
            _ => continue,
        };
        let mut without = snapshot.clone();
        let mut value = snapshot.get(&object).unwrap().value.clone();
        match rule_of(&finding.field) {
            None => drop(without.remove(&object)),
            Some((direction, index)) => {
                keep_types(object.kind, &mut value);
                value["spec"][direction].as_array_mut().unwrap().remove(index);
                without.insert(object.clone(), value.clone(), None);
            }
        }
        if finding.code == Code::NeverMatches
            && rule_of(&finding.field).is_none()
            && finding.field != "spec.selector"
        {
            continue;
        }
        *idle += 1;
        seen.of_staged += usize::from(kind != object.kind);
        seen.of_profiles += usize::from(kind == Kind::Profile);
        seen.of_host_endpoints += usize::from(value["spec"]["applyOnForward"] == true);
        same(&snapshot, &without, &ends, packets).map_err(|question| {
            format!("{finding:#?}\nbut without it changes {question}\n{}", manifest(objects))
        })?;
    }
    Ok(())
}

/// The cluster with a staged policy in force, and its name there.
fn in_force(object: &Key, written: &Snapshot) -> (Key, Snapshot) {
    let mut snapshot = written.clone();
    let Some(enforced) = enforced(object) else { return (object.clone(), snapshot) };
    if let Staged::Set(value) = staged(&written.get(object).unwrap().value, enforced.kind) {
        snapshot.remove(object);
        snapshot.insert(enforced.clone(), value, None);
    }
    (enforced, snapshot)
}

/// `spec.ingress[2].source.nets` concerns the rule of index 2.
fn rule_of(field: &str) -> Option<(&str, usize)> {
    let (direction, rest) = field.strip_prefix("spec.")?.split_once('[')?;
    let direction = Some(direction).filter(|direction| ["ingress", "egress"].contains(direction))?;
    Some((direction, rest.split_once(']')?.0.parse().ok()?))
}

/// A policy that loses its last rule must still apply to that direction, as by its kind's defaults before.
fn keep_types(kind: Kind, value: &mut serde_json::Value) {
    let has = |direction: &str| value["spec"][direction].as_array().is_some_and(|rules| !rules.is_empty());
    let (ingress, egress) = (has("ingress"), has("egress"));
    let (field, types) = match kind {
        Kind::KubernetesNetworkPolicy if !egress => ("policyTypes", vec!["Ingress"]),
        Kind::KubernetesNetworkPolicy => ("policyTypes", vec!["Ingress", "Egress"]),
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => match (ingress, egress) {
            (_, false) => ("types", vec!["Ingress"]),
            (false, true) => ("types", vec!["Egress"]),
            (true, true) => ("types", vec!["Ingress", "Egress"]),
        },
        // Policies of administrators have no end of tier.
        _ => return,
    };
    let given = value["spec"][field].as_array().is_some_and(|types| !types.is_empty());
    if !given {
        value["spec"][field] = json!(types);
    }
}

/// The first question with different answers.
fn same(one: &Snapshot, other: &Snapshot, ends: &[End], packets: &[Sent]) -> Result<(), String> {
    let (one, other) = (Oracle::new(one), Oracle::new(other));
    for (from, to, path) in paths(ends) {
        for packet in packets {
            let question: Question = question(from.peer.clone(), to.peer.clone(), packet);
            let verdict = |oracle: &Oracle<'_>| {
                oracle.evaluate_by(&question, path.family).map(|answer| answer.verdict).ok()
            };
            if verdict(&one) != verdict(&other) {
                return Err(format!("{question:?} {path:?}"));
            }
        }
    }
    Ok(())
}

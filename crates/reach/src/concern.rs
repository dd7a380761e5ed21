//! The stops that a change can concern; no other stop is evaluated.

use std::collections::BTreeSet;

use tortie_api::{Key, Kind};

use super::classes::Classes;
use super::path::{FAMILIES, Stop};
use super::signature::{AddressSignature, EndSignature, Overlaid};
use tortie_oracle::{Oracle, PolicyName, Snapshot, Subnet};

/// The possible effects of a change, by class.
pub(super) struct Concern {
    /// Stops at which different policies or changed policies may apply to it.
    policies: Vec<[bool; 4]>,
    /// Whether policies see it differently.
    visible_parts: Vec<bool>,
    /// Whether its packets take a different route, or look different on it.
    routes: Vec<bool>,
}

impl Concern {
    /// If only policies changed: the stops at which one of them applies, before or after. If no policy, tier or
    /// profile changed: the classes whose own or whose peers' signature changed, because signatures contain
    /// everything else that matters. Otherwise everything.
    pub(super) fn new(classes: &Classes, before: &Snapshot, after: &Snapshot) -> Self {
        let changed = changed(before, after);
        let count = classes.all().len();
        let is_text = |kind: Kind| kind.is_policy() || matches!(kind, Kind::Tier | Kind::Profile);
        let at_stops = |at: &dyn Fn(usize, Stop) -> bool| -> Vec<[bool; 4]> {
            (0..count).map(|class| Stop::ALL.map(|stop| at(class, stop))).collect()
        };
        if changed.iter().all(|key| key.kind.is_policy()) {
            let [was, is] = [before, after].map(|snapshot| numbers(snapshot, &changed));
            let has_say =
                |class, stop| classes.has_say(class, stop, 0, &was) || classes.has_say(class, stop, 1, &is);
            return Self {
                policies: at_stops(&has_say),
                visible_parts: vec![false; count],
                routes: vec![false; count],
            };
        }
        if changed.iter().any(|key| is_text(key.kind)) {
            return Self {
                policies: vec![[true; 4]; count],
                visible_parts: vec![true; count],
                routes: vec![true; count],
            };
        }
        let differs = |of: &dyn Fn(&EndSignature, &EndSignature) -> bool| -> Vec<bool> {
            let class = |class: &super::Class| match class.signatures.as_slice() {
                [Some(was), Some(is)] => of(was, is),
                _ => false,
            };
            classes.all().iter().map(class).collect()
        };
        let asks_others = |class, stop: Stop| classes.asks_others(class, stop);
        Self {
            policies: at_stops(&asks_others),
            visible_parts: differs(&|was, is| visible_parts(was) != visible_parts(is)),
            routes: differs(&|was, is| routes(was) != routes(is)),
        }
    }

    /// Whether the results at the stop can have changed for packets from one class to another.
    pub(super) fn concerns(&self, from: usize, to: usize, stop: Stop) -> bool {
        let (subject, peer) = stop.subject_and_peer(from, to);
        let otherwise = if stop.is_host() { &self.routes } else { &self.visible_parts };
        let is = |class: usize| otherwise.get(class) == Some(&true);
        is(subject)
            || is(peer)
            || self.policies.get(subject).and_then(|stops| stops.get(stop.number())) == Some(&true)
    }
}

type VisibleParts<'a> = ([Option<(&'a AddressSignature, Overlaid)>; 2], Tunnels<'a>, &'a Subnet);
type Tunnels<'a> = (&'a [Option<AddressSignature>; 2], &'a Option<AddressSignature>);

/// The parts of the signature that policies see.
fn visible_parts(signature: &EndSignature) -> VisibleParts<'_> {
    let addresses =
        FAMILIES.map(|family| signature.by(family).map(|routed| (&routed.address, routed.overlaid)));
    (addresses, (&signature.tunnels, &signature.ipip), &signature.subnet)
}

/// The whole signature, except the policies that apply.
fn routes(signature: &EndSignature) -> EndSignature {
    EndSignature { pod_policies: None, interfaces: Default::default(), ..signature.clone() }
}

/// The indices of these policies in evaluation order.
pub(super) fn numbers(snapshot: &Snapshot, policies: &BTreeSet<Key>) -> BTreeSet<usize> {
    let oracle = Oracle::new(snapshot);
    let of = |name: &PolicyName| {
        let is = |key: &Key| {
            key.name == name.name && key.namespace == name.namespace && key.kind.to_string() == name.kind
        };
        policies.iter().any(is)
    };
    let numbered = oracle.policies().enumerate();
    numbered.filter(|(_, policy)| of(policy.name)).map(|(number, _)| number).collect()
}

/// The objects that differ.
#[must_use]
pub fn changed(before: &Snapshot, after: &Snapshot) -> BTreeSet<Key> {
    let differs = |one: &Snapshot, other: &Snapshot| -> Vec<Key> {
        let differs = one.iter().filter(|(key, stored)| match other.get(key) {
            Some(known) => !std::ptr::eq(*stored, known) && stored.value != known.value,
            None => true,
        });
        differs.map(|(key, _)| key.clone()).collect()
    };
    differs(before, after).into_iter().chain(differs(after, before)).collect()
}

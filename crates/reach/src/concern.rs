//! The stops that a change can concern; no other stop is evaluated.

use tortie_api::Kind;

use super::asked::is_policy;
use super::change::{changed, numbers};
use super::classes::Classes;
use super::sight::{AddressSight, EndSight};
use super::way::{FAMILIES, Stop};
use tortie_oracle::Snapshot;

/// The possible effects of a change, by class.
pub(super) struct Concern {
    /// Stops at which different policies or changed policies may apply to it.
    policies: Vec<[bool; 4]>,
    /// Whether policies see it differently.
    looks: Vec<bool>,
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
        let is_text = |kind| is_policy(kind) || matches!(kind, Kind::Tier | Kind::Profile);
        let at_stops = |at: &dyn Fn(usize, Stop) -> bool| -> Vec<[bool; 4]> {
            (0..count).map(|class| Stop::ALL.map(|stop| at(class, stop))).collect()
        };
        if changed.iter().all(|key| is_policy(key.kind)) {
            let [was, is] = [before, after].map(|snapshot| numbers(snapshot, &changed));
            let has_say =
                |class, stop| classes.has_say(class, stop, 0, &was) || classes.has_say(class, stop, 1, &is);
            return Self {
                policies: at_stops(&has_say),
                looks: vec![false; count],
                routes: vec![false; count],
            };
        }
        if changed.iter().any(|key| is_text(key.kind)) {
            return Self {
                policies: vec![[true; 4]; count],
                looks: vec![true; count],
                routes: vec![true; count],
            };
        }
        let differs = |of: &dyn Fn(&EndSight, &EndSight) -> bool| -> Vec<bool> {
            let class = |class: &super::Class| match class.sights.as_slice() {
                [Some(was), Some(is)] => of(was, is),
                _ => false,
            };
            classes.all().iter().map(class).collect()
        };
        let asks_others = |class, stop: Stop| classes.asks_others(class, stop);
        Self {
            policies: at_stops(&asks_others),
            looks: differs(&|was, is| looks(was) != looks(is)),
            routes: differs(&|was, is| routes(was) != routes(is)),
        }
    }

    /// Whether the results at the stop can have changed for packets from one class to another.
    pub(super) fn concerns(&self, from: usize, to: usize, stop: Stop) -> bool {
        let (subject, peer) = stop.subject_and_peer(from, to);
        let otherwise = if stop.is_host() { &self.routes } else { &self.looks };
        let is = |class: usize| otherwise.get(class) == Some(&true);
        is(subject)
            || is(peer)
            || self.policies.get(subject).and_then(|stops| stops.get(stop.number())) == Some(&true)
    }
}

type Looks<'a> = ([Option<&'a AddressSight>; 2], Option<&'a AddressSight>, bool);

/// The parts of the signature that policies see.
fn looks(sight: &EndSight) -> Looks<'_> {
    let addresses = FAMILIES.map(|family| sight.by(family).map(|routed| &routed.address));
    (addresses, sight.tunnel.as_ref(), sight.overlaid)
}

/// The whole signature, except the policies that apply.
fn routes(sight: &EndSight) -> EndSight {
    EndSight { judged: None, interfaces: Default::default(), ..sight.clone() }
}

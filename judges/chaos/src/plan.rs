//! The plan of a run: a pure function of its seed. Storms of faults and changes alternate with rests, in which everything heals.

use std::fmt::Write as _;
use std::time::Duration;

use crate::dice::Dice;
use crate::fault::{Change, Datastore, Event, Fault, Shape};
use crate::rules::{Color, Rule, subjects};

/// How long a storm lasts, with all of its faults.
pub(crate) const STORM: Duration = Duration::from_secs(60);
/// The time from one fault to the next one, in milliseconds.
const BETWEEN_FAULTS: (u64, u64) = (2_000, 7_000);
/// The time from one change to the next one, in milliseconds.
const BETWEEN_CHANGES: (u64, u64) = (1_000, 4_000);
/// How long a fault lasts, in milliseconds.
const FAULT: (u64, u64) = (1_000, 20_000);

/// Events with the time since the storm's start, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Storm(pub(crate) Vec<(Duration, Event)>);

/// The storm of a number.
pub(crate) fn storm(seed: u64, number: usize, shape: Shape) -> Storm {
    let mut dice = Dice::new(seed.wrapping_add((number as u64) << 32));
    let mut events = Vec::new();
    let mut now = Duration::from_millis(500);
    while now < STORM {
        let left = STORM - now;
        events.push((now, Event::Fault(fault(&mut dice, shape, left))));
        now += millis(&mut dice, BETWEEN_FAULTS);
    }
    let mut now = Duration::ZERO;
    while now < STORM {
        // Some come at once, so that nodes meet several of them together.
        let burst = if dice.percent(20) { dice.between(2, 6) } else { 1 };
        events.extend((0..burst).map(|_| (now, Event::Change(change(&mut dice, shape)))));
        now += millis(&mut dice, BETWEEN_CHANGES);
    }
    events.sort_by_key(|(at, _)| *at);
    Storm(events)
}

fn millis(dice: &mut Dice, (first, last): (u64, u64)) -> Duration {
    Duration::from_millis(dice.between(first, last))
}

/// A fault that ends before the storm does.
fn fault(dice: &mut Dice, shape: Shape, left: Duration) -> Fault {
    let node = usize::try_from(dice.below(shape.nodes() as u64)).unwrap_or_default();
    let duration = millis(dice, FAULT).min(left);
    let windows = shape.is_windows(node);
    match dice.below(100) {
        0..7 => Fault::KillAgent(node),
        7..12 => Fault::StopAgent(node),
        12..20 => Fault::CrashLoop(node, duration),
        20..30 => Fault::PauseAgent(node, duration),
        30..40 if windows => Fault::RestartHns(node),
        30..40 => Fault::FlushTable(node),
        40..50 => Fault::PartitionNode(node, duration),
        50..60 => Fault::CutFromDatastore(node, duration),
        60..70 => Fault::StartWithoutDatastore(node, duration),
        70..77 => Fault::SlowDatastore(duration),
        77..81 => Fault::PauseDatastore(duration),
        81..85 if !windows => Fault::RemoveRoutes(node),
        85..88 if shape.datastore == Datastore::Etcd => Fault::KillDatastore,
        81..88 => Fault::KillAgent(node),
        88..95 if windows => Fault::PauseHns(node, duration),
        _ => Fault::FullDisk(node, duration),
    }
}

fn change(dice: &mut Dice, shape: Shape) -> Change {
    let place = usize::try_from(dice.below(shape.places() as u64)).unwrap_or_default();
    let color = *dice.pick(&Color::ALL);
    match dice.below(100) {
        0..50 => {
            let all: Vec<_> = subjects().collect();
            let subject = *dice.pick(&all);
            Change::Policy(subject, policy(dice))
        }
        50..75 => Change::Label(place, color),
        _ => Change::Replace(place, color),
    }
}

/// A policy for a subject, or none.
pub(crate) fn policy(dice: &mut Dice) -> Option<Rule> {
    dice.percent(80).then(|| Rule::random(dice))
}

/// The storm as text.
pub(crate) fn shown(number: usize, storm: &Storm) -> String {
    let mut text = format!("storm {number}:");
    for (at, event) in &storm.0 {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n  {:5.1} s  {event}", at.as_secs_f64());
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_seed_repeats_its_storms_and_another_one_does_not() {
        let shape = Shape::new(4, Datastore::Embedded);
        assert_eq!(storm(1, 3, shape), storm(1, 3, shape));
        assert_ne!(storm(1, 3, shape), storm(2, 3, shape));
        assert_ne!(storm(1, 3, shape), storm(1, 4, shape));
        let text = shown(3, &storm(1, 3, shape));
        assert!(text.starts_with("storm 3:\n") && text.lines().count() > 20, "{text}");
    }

    #[test]
    fn faults_end_with_their_storm_and_all_of_them_occur() {
        let shape = Shape::new(10, Datastore::Etcd);
        let mut names = BTreeSet::new();
        for number in 0..50 {
            let Storm(events) = storm(5, number, shape);
            assert!(events.is_sorted_by_key(|(at, _)| *at));
            for (at, event) in events {
                let Event::Fault(fault) = event else { continue };
                assert!(at + fault.duration() <= STORM, "{fault}");
                names.insert(fault.name());
                let Some(node) = fault.node() else { continue };
                let of_windows = matches!(fault, Fault::RestartHns(_) | Fault::PauseHns(..));
                let of_linux = matches!(fault, Fault::FlushTable(_) | Fault::RemoveRoutes(_));
                assert!(!of_windows || shape.is_windows(node), "{fault}");
                assert!(!of_linux || !shape.is_windows(node), "{fault}");
            }
        }
        assert_eq!(names.len(), 15, "{names:?}");
    }

    #[test]
    fn an_embedded_datastore_is_not_killed() {
        let shape = Shape::new(4, Datastore::Embedded);
        let killed = (0..50).any(|number| {
            storm(5, number, shape).0.contains(&(Duration::ZERO, Event::Fault(Fault::KillDatastore)))
                || storm(5, number, shape)
                    .0
                    .iter()
                    .any(|(_, event)| *event == Event::Fault(Fault::KillDatastore))
        });
        assert!(!killed, "the lab itself serves it");
    }
}

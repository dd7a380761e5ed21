//! The saved state of a node against the state itself: it allows nothing that policy denies, and it denies only directions to which
//! policy applies, or whose profiles depend on other pods.

use std::cell::RefCell;

use proptest::prelude::*;
use tortie_api::net::Direction;
use tortie_calc::Calc;
use tortie_dataplane::{NodeState, SavedState};
use tortie_policy::program::{Flow, evaluate};

use testkit::clusters::pods::{as_pods, published};
use testkit::clusters::{NODES, Objects, Sent, clusters, packets};
use testkit::random::Random;

const CLUSTERS: u32 = 60;
const PACKETS: usize = 60;

/// The number of verdicts of each kind.
#[derive(Debug, Default)]
struct Verdicts {
    closed: usize,
    open: usize,
    denied_by_profiles: usize,
}

#[test]
fn a_saved_state_closes_what_has_policy_and_keeps_the_rest() {
    let seen = RefCell::new(Verdicts::default());
    let strategy = (clusters(), prop::collection::vec(packets(), PACKETS));
    let test = |(objects, packets): (Objects, Vec<Sent>)| {
        let objects = published(&as_pods(&objects));
        for node in NODES {
            let mut calc = Calc::new(node);
            objects.iter().for_each(|(key, value)| calc.update(key, Some(value)));
            calc.flush();
            compare(calc.state(), &packets, &mut seen.borrow_mut()).map_err(TestCaseError::fail)?;
        }
        Ok(())
    };
    let lacking = || {
        let Verdicts { closed, open, denied_by_profiles } = *seen.borrow();
        let counts = [("closed", closed), ("open", open), ("denied by profiles", denied_by_profiles)];
        counts.into_iter().find(|(_, count)| *count < 10).map(|(name, count)| format!("{name}: {count}"))
    };
    Random::cases(CLUSTERS).prove(&strategy, test, lacking).unwrap();
}

fn compare(state: &NodeState, packets: &[Sent], seen: &mut Verdicts) -> Result<(), String> {
    let saved = SavedState::of(state);
    let text = serde_json::to_string(&saved).map_err(|error| error.to_string())?;
    let read: SavedState = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
    if read != saved {
        return Err(format!("it reads as another one: {text}"));
    }
    let saved = read.into_state();
    if !saved.endpoints.keys().eq(state.endpoints.keys()) {
        return Err("it has other pods".to_owned());
    }
    for (id, endpoint) in &state.endpoints {
        let of_saved = &saved.endpoints[id];
        if (&of_saved.host_interface, &of_saved.addresses) != (&endpoint.host_interface, &endpoint.addresses)
        {
            return Err(format!("{id} has another interface or address"));
        }
        let profiles = endpoint.program.profiles.iter().filter_map(|id| state.policies.get(id));
        let depends = profiles.flat_map(|rules| rules.set_ids()).next().is_some();
        for packet in packets {
            let flow = flow(packet);
            for direction in [Direction::Ingress, Direction::Egress] {
                let allowed = evaluate(&endpoint.program, direction, &flow, state);
                let open = evaluate(&of_saved.program, direction, &flow, &saved);
                let has_policy = !endpoint.program.tiers(direction).is_empty();
                let expected = allowed && !has_policy && !depends;
                if open != expected {
                    return Err(format!("{id}, {direction:?}: {open}, {allowed} with policy: {endpoint:#?}"));
                }
                seen.closed += usize::from(has_policy && allowed);
                seen.open += usize::from(open);
                seen.denied_by_profiles += usize::from(!has_policy && !allowed);
            }
        }
    }
    Ok(())
}

fn flow(packet: &Sent) -> Flow {
    let Sent { source, destination, protocol, source_port, destination_port, icmp } = *packet;
    Flow { source, destination, protocol, source_port, destination_port, icmp }
}

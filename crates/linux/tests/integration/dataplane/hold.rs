//! Tables that close pods before the node's state is known.

use tortie_dataplane::{Dataplane as _, Hold, NodeState, SavedState};
use tortie_kernel::namespace::NetNs;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::{Config, HeldTable};

#[test]
fn a_held_table_counts_as_none_until_the_state_is_in_force() {
    let namespace = NetNs::create().unwrap();
    let saved = SavedState::default().into_state();
    let open = || namespace.run(|| HeldTable::open(Config::default()).unwrap()).unwrap();
    let hold = |held: &mut HeldTable| namespace.run(|| held.hold(&saved).unwrap()).unwrap();
    for of in ["the first process", "the process after a crash of the first one"] {
        let mut held = open();
        assert!(hold(&mut held), "{of}");
        assert!(!hold(&mut held), "{of} looks again");
    }
    let state = NodeState::default();
    let resync = || Dataplane::open(Config::default()).unwrap().resync(&state);
    let report = namespace.run(resync).unwrap();
    assert_eq!(
        report.conditions().filter(|condition| condition.reason.is_failure()).count(),
        0,
        "{report:?}"
    );
    assert!(!hold(&mut open()), "a process after the state was in force");
}

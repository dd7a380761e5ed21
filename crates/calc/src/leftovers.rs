//! What is gone leaves nothing behind: an index that forgets to forget gives right answers, and grows for ever.

use proptest::prelude::*;

use crate::Calc;

#[path = "../tests/random_objects/mod.rs"]
mod random_objects;

proptest! {
    #[test]
    fn what_is_gone_leaves_nothing_behind(
        objects in prop::collection::vec((random_objects::object(), any::<bool>(), any::<bool>()), 0..60),
    ) {
        let mut calc = Calc::new("n0");
        for ((key, value), stays, flush) in &objects {
            calc.update(key, Some(value));
            if !stays {
                calc.update(key, None);
            }
            if *flush {
                calc.flush();
                prop_assert!(calc.subjects.memberships().all(|set| calc.sets.knows(set)), "of a set that is gone");
            }
        }
        for ((key, _), ..) in &objects {
            calc.update(key, None);
        }
        calc.flush();
        prop_assert!(calc.subjects.is_empty() && calc.policies.is_empty() && calc.sets.is_empty());
        prop_assert!(calc.in_use.is_empty() && calc.problems.is_empty() && calc.findings().is_empty());
    }
}

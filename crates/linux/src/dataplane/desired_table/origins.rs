//! The origins of the table's content, for messages.

use tortie_api::net::Action;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::Key;

use super::DesiredTable;
use crate::dataplane::lookups::{address_sets, asking};

impl DesiredTable {
    /// Finds the rules with one of these actions that match a key of a program's own set, such as `NetworkPolicy
    /// demo/web Ingress rule 1`; `None` if the set does not belong to a program.
    pub(crate) fn origins<'a>(
        &'a self,
        set: &str,
        actions: &[Action],
        state: &'a NodeState,
    ) -> Option<impl Fn(&Key) -> Vec<String> + use<'a>> {
        let mut programs = self.programs.values();
        let (program, lookup) =
            programs.find_map(|program| Some((program, program.written.lookups.get(set)?)))?;
        let direction = program.spec.direction;
        let policies = program.spec.policies().filter_map(|id| self.policies.get(id));
        let all: Vec<_> = policies.map(|policy| policy.lines(direction)).collect();
        let sets = address_sets(all.iter().flat_map(|lines| &lines.sets));
        let lines = all.iter().copied().flat_map(|lines| &lines.lines);
        let lines = lines.filter(|line| actions.contains(&line.action)).collect();
        Some(asking(lines, &sets, lookup, state))
    }
}

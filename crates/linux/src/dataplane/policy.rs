//! The nftables table: what is in it, and which parts of it a change is about.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tortie_api::net::Direction;
use tortie_dataplane::{Condition, Delta, Endpoint, EndpointId, NodeState};
use tortie_policy::program::{Member, PolicyId, SetId};

use super::Config;
use super::chains::{self, FROM_MAP, Rendered, TO_MAP, VXLAN_PEERS};
use super::sets::{Part, kernel_sets, set, single};
use crate::nftables::{Element, Field, Key, Nft, Op, SetSpec, Table, Verdict};
use crate::{Error, Result};

/// The table of policy, and what it is known to hold.
#[derive(Debug)]
pub struct PolicyTable {
    pub(super) nft: Nft,
    pub(super) config: Config,
    /// The flags of the table, of which an old kernel knows none.
    flags: u32,
    /// What the kernel has, as far as we know; `None` if we do not, and then it is read before it is changed.
    kernel: Option<Table>,
    /// One direction of a program, by name.
    pub(super) programs: BTreeMap<String, Rendered>,
    /// The names of the programs of each endpoint, and its interface.
    pub(super) endpoints: BTreeMap<EndpointId, Placed>,
    /// Programs whose chains the kernel has refused, and what it said. They stay closed until a policy changes,
    /// or the next resync.
    refused: BTreeMap<String, String>,
}

/// Where an endpoint is in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) interface: String,
    pub(super) ingress: String,
    pub(super) egress: String,
}

/// What of the state has changed.
#[derive(Debug, Default)]
pub struct Dirty {
    pub(super) sets: BTreeMap<SetId, Touched>,
    policies: BTreeSet<PolicyId>,
    pub(super) endpoints: BTreeSet<EndpointId>,
    frame: bool,
}

/// What of a set has changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Touched {
    Members(BTreeSet<Member>),
    Whole,
}

impl Dirty {
    /// Notes what a delta is about.
    pub fn note(&mut self, delta: &Delta) {
        match delta {
            Delta::Node(_) | Delta::Vtep(_) | Delta::VtepRemoved(_) => self.frame = true,
            Delta::SetCreated(id, ..) | Delta::SetRemoved(id) => {
                drop(self.sets.insert(id.clone(), Touched::Whole))
            }
            Delta::SetChanged { id, added, removed } => {
                let touched =
                    self.sets.entry(id.clone()).or_insert_with(|| Touched::Members(BTreeSet::new()));
                if let Touched::Members(members) = touched {
                    members.extend(added.iter().chain(removed));
                }
            }
            Delta::Policy(id, _) | Delta::PolicyRemoved(id) => drop(self.policies.insert(id.clone())),
            Delta::Endpoint(id, _) | Delta::EndpointRemoved(id) => drop(self.endpoints.insert(id.clone())),
            Delta::HostEndpoint(..)
            | Delta::HostEndpointRemoved(_)
            | Delta::Route(_)
            | Delta::RouteRemoved(_) => {}
        }
    }

    fn everything(state: &NodeState) -> Self {
        Self {
            sets: state.sets.keys().map(|id| (id.clone(), Touched::Whole)).collect(),
            policies: BTreeSet::new(),
            endpoints: state.endpoints.keys().cloned().collect(),
            frame: true,
        }
    }

    fn is_empty(&self) -> bool {
        self.sets.is_empty() && self.policies.is_empty() && self.endpoints.is_empty() && !self.frame
    }
}

/// A part of the table: the objects that a change is about, as they are and as they should be.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) old: Table,
    pub(super) new: Table,
    pub(super) programs: BTreeMap<String, Option<Rendered>>,
    endpoints: BTreeMap<EndpointId, Option<Placed>>,
}

impl PolicyTable {
    /// Opens a connection to the nftables of the calling thread's network namespace. Nothing is changed yet.
    pub fn open(config: Config) -> Result<Self> {
        let (programs, endpoints, refused) = Default::default();
        let flags = if config.guard_table { Table::GUARDED } else { 0 };
        let mut nft = Nft::open()?;
        nft.limit_transactions(config.transaction_bytes);
        Ok(Self { nft, config, flags, kernel: None, programs, endpoints, refused })
    }

    /// Makes true what has changed. After a failure everything is looked at again.
    pub fn apply(&mut self, state: &NodeState, dirty: &Dirty) -> Result<()> {
        if self.kernel.is_none() {
            return self.adopt(state);
        }
        if dirty.is_empty() {
            return Ok(());
        }
        if !dirty.policies.is_empty() {
            self.refused.clear(); // what was refused may be another policy now
        }
        if let Err(error) = self.change(state, dirty) {
            // Something is not as we think: look, and try once more with all of it.
            tracing::warn!(%error, "the change was refused; the whole table is compared with the kernel's");
            return self.adopt(state);
        }
        Ok(())
    }

    /// Reads the kernel's table and makes it what it should be.
    pub fn resync(&mut self, state: &NodeState) -> Result<()> {
        self.refused.clear();
        self.adopt(state)
    }

    /// Whether the table is known to be in the kernel.
    pub fn is_in_kernel(&self) -> bool {
        self.kernel.is_some()
    }

    /// What is wrong with each endpoint's policy.
    pub fn conditions(&self) -> BTreeMap<EndpointId, Vec<Condition>> {
        let mut conditions = BTreeMap::new();
        let contested = contested(self.endpoints.values());
        for (id, placed) in &self.endpoints {
            let interface = &placed.interface;
            let taken = contested.contains(interface).then(|| Condition {
                reason: "InterfaceContested",
                message: format!("{id}: another pod has its interface {interface} too; both are closed"),
            });
            let mut problems: BTreeSet<_> = [&placed.ingress, &placed.egress]
                .into_iter()
                .filter_map(|name| self.programs.get(name)?.problem.clone())
                .map(|problem| Condition {
                    reason: "RuleNotExpressible",
                    message: format!("{id}: {problem}; nothing is let through in that direction"),
                })
                .collect();
            problems.extend(taken);
            if !problems.is_empty() {
                conditions.insert(id.clone(), problems.into_iter().collect());
            }
        }
        conditions
    }

    /// Compares the whole table with the kernel's. A program whose chains the kernel refuses is closed, so that one bad
    /// policy does not keep the others from being enforced.
    fn adopt(&mut self, state: &NodeState) -> Result<()> {
        self.kernel = None;
        loop {
            (self.programs, self.endpoints) = Default::default();
            let mut everything = self.part(state, &Dirty::everything(state), &Table::default());
            everything.new.flags = self.flags;
            self.nft.check_owner(&self.config.table)?;
            let actual = self.nft.list(&self.config.table)?;
            let committed = self.put_whole(&everything.new, actual);
            if self.flags != 0 && matches!(&committed, Err(error) if flags_unknown(error)) {
                tracing::warn!(
                    table = self.config.table,
                    "this kernel cannot guard the table (Linux 6.9 can): others may change it, for instance by \
                     `nft flush ruleset`, and it is mended at the next resync"
                );
                self.flags = 0;
                continue;
            }
            if let Err(Error::Transaction { op, refusal, .. }) = &committed
                && let Op::SetRules(chain, _) = op.as_ref()
                && let Some(program) =
                    everything.programs.keys().find(|name| chain.starts_with(name.as_str()))
                && !self.refused.contains_key(program)
            {
                tracing::error!(chain, %refusal, "the kernel refused a chain; its pods are closed");
                self.refused
                    .insert(program.clone(), format!("the kernel refused its chain {chain}: {refusal}"));
                continue;
            }
            committed?;
            self.take(everything.programs, everything.endpoints);
            self.kernel = Some(everything.new);
            return Ok(());
        }
    }

    /// Changes only what has changed.
    fn change(&mut self, state: &NodeState, dirty: &Dirty) -> Result<()> {
        let touched = &dirty.sets;
        let Some(mut kernel) = self.kernel.take() else { return self.adopt(state) };
        let (single_members, dirty_sets) = members(state, dirty, &kernel);
        let dirty = Dirty {
            sets: dirty_sets.into_iter().map(|id| (id, Touched::Whole)).collect(),
            policies: dirty.policies.clone(),
            endpoints: dirty.endpoints.clone(),
            frame: dirty.frame,
        };
        let change = if dirty.is_empty() { Change::default() } else { self.part(state, &dirty, &kernel) };
        let closing = self.concerned(touched, &dirty, &change);
        self.put_part(&mut kernel, &change, single_members, &closing)?;
        self.kernel = Some(kernel);
        self.take(change.programs, change.endpoints);
        Ok(())
    }

    fn take(
        &mut self,
        programs: BTreeMap<String, Option<Rendered>>,
        endpoints: BTreeMap<EndpointId, Option<Placed>>,
    ) {
        for (name, rendered) in programs {
            match rendered {
                Some(rendered) => drop(self.programs.insert(name, rendered)),
                None => drop(self.programs.remove(&name)),
            }
        }
        for (id, placed) in endpoints {
            match placed {
                Some(placed) => drop(self.endpoints.insert(id, placed)),
                None => drop(self.endpoints.remove(&id)),
            }
        }
    }

    /// The part of the table that a change is about, as it is in `kernel` and as it should be.
    fn part(&self, state: &NodeState, dirty: &Dirty, kernel: &Table) -> Change {
        let mut change = Change::default();
        let other_sets = self.sets(state, dirty, kernel, &mut change);
        self.endpoints(state, dirty, kernel, &mut change);
        self.programs(state, dirty, &other_sets, kernel, &mut change);
        if dirty.frame || self.odd_interface(dirty, &change) {
            let (chains, peers) = chains::frame(&self.config, state);
            for (name, chain) in chains {
                change.replace_chain(kernel, &name, Some(chain));
            }
            change.replace_set(kernel, VXLAN_PEERS, peers);
        }
        if !dirty.endpoints.is_empty() || kernel.sets.is_empty() {
            self.maps(kernel, &mut change);
        }
        change
    }

    /// Takes the dirty sets in, and gives those of which other nftables sets exist now than before.
    fn sets(&self, state: &NodeState, dirty: &Dirty, kernel: &Table, change: &mut Change) -> BTreeSet<SetId> {
        let mut other = BTreeSet::new();
        for id in dirty.sets.keys() {
            let mut wanted = kernel_sets(state, id);
            for name in Part::ALL.map(|part| part.name(id)) {
                let new = wanted.remove(&name);
                if new.is_some() != kernel.sets.contains_key(&name) {
                    other.insert(id.clone());
                }
                change.replace_set(kernel, &name, new);
            }
        }
        other
    }

    /// Takes the dirty endpoints in: their chains, and their places.
    fn endpoints(&self, state: &NodeState, dirty: &Dirty, kernel: &Table, change: &mut Change) {
        let mut chains: BTreeMap<String, Option<_>> = BTreeMap::new();
        for id in &dirty.endpoints {
            if let Some(placed) = self.endpoints.get(id) {
                chains.entry(chains::from_chain(&placed.interface)).or_insert(None);
            }
            let placed = state.endpoints.get(id).map(|endpoint| {
                let placed = place(endpoint);
                let chain = chains::from_endpoint(endpoint, &placed.egress);
                chains.insert(chains::from_chain(&placed.interface), Some(chain));
                placed
            });
            change.endpoints.insert(id.clone(), placed);
        }
        // A pod that had the same interface stays, and has it for itself now.
        for endpoint in state.endpoints.values() {
            if let Some(chain @ None) = chains.get_mut(&chains::from_chain(&endpoint.host_interface)) {
                *chain = Some(chains::from_endpoint(endpoint, &place(endpoint).egress));
            }
        }
        for (name, chain) in chains {
            change.replace_chain(kernel, &name, chain);
        }
    }

    /// Takes in the programs that are new, whose policies have changed, or whose sets have become others; and gives up
    /// those that no endpoint has any more.
    fn programs(
        &self,
        state: &NodeState,
        dirty: &Dirty,
        other_sets: &BTreeSet<SetId>,
        kernel: &Table,
        change: &mut Change,
    ) {
        let mut used: BTreeMap<String, (Arc<Endpoint>, Direction)> = BTreeMap::new();
        for (id, endpoint) in &state.endpoints {
            let placed = match change.endpoints.get(id).cloned().flatten() {
                Some(placed) => placed,
                None => self.endpoints.get(id).cloned().unwrap_or_else(|| place(endpoint)),
            };
            used.insert(placed.ingress, (endpoint.clone(), Direction::Ingress));
            used.insert(placed.egress, (endpoint.clone(), Direction::Egress));
        }
        for (name, (endpoint, direction)) in &used {
            let known = self.programs.get(name).is_some_and(|rendered| {
                rendered.policies.is_disjoint(&dirty.policies) && rendered.sets.is_disjoint(other_sets)
            });
            if !known {
                let rendered = self.render(name, endpoint, *direction, state, kernel, change);
                change.programs.insert(name.clone(), Some(rendered));
            }
        }
        for name in self.programs.keys().filter(|name| !used.contains_key(*name)) {
            change.programs.insert(name.clone(), None);
        }
        self.program_chains(kernel, change);
    }

    fn render(
        &self,
        name: &str,
        endpoint: &Endpoint,
        direction: Direction,
        state: &NodeState,
        kernel: &Table,
        change: &Change,
    ) -> Rendered {
        if let Some(problem) = self.refused.get(name) {
            return chains::closed(name, &endpoint.program, problem.clone());
        }
        let exists = |name: &str| {
            let untouched = kernel.sets.contains_key(name) && !change.old.sets.contains_key(name);
            untouched || change.new.sets.contains_key(name)
        };
        chains::render(name, &endpoint.program, direction, state, &exists, self.nft.room())
    }

    /// Puts the chains of the programs that change in the place of the old ones.
    fn program_chains(&self, kernel: &Table, change: &mut Change) {
        let mut chains: BTreeMap<String, Option<_>> = BTreeMap::new();
        for (name, rendered) in &change.programs {
            let old = self.programs.get(name).map(|old| &old.chains[..]).unwrap_or_default();
            old.iter().for_each(|(name, _)| drop(chains.insert(name.clone(), None)));
            let new = rendered.as_ref().map(|new| &new.chains[..]).unwrap_or_default();
            chains.extend(new.iter().map(|(name, chain)| (name.clone(), Some(chain.clone()))));
        }
        for (name, chain) in chains {
            change.replace_chain(kernel, &name, chain);
        }
    }

    /// The maps from interfaces to chains.
    fn maps(&self, kernel: &Table, change: &mut Change) {
        let mut placed: BTreeMap<_, _> =
            self.endpoints.iter().map(|(id, placed)| (id, Some(placed))).collect();
        placed.extend(change.endpoints.iter().map(|(id, placed)| (id, placed.as_ref())));
        let mut placed: Vec<_> = placed.into_values().flatten().collect();
        let contested = contested(placed.iter().copied());
        placed.retain(|placed| !contested.contains(&placed.interface));
        let map = |chain: &dyn Fn(&Placed) -> String| {
            let goto = |placed: &&Placed| {
                Element::verdict(Key::interface(&placed.interface), Verdict::Goto(chain(placed)))
            };
            set(SetSpec::verdict_map(&[Field::Interface]), placed.iter().map(goto).collect::<Vec<_>>())
        };
        let from = map(&|placed| chains::from_chain(&placed.interface));
        let to = map(&|placed| chains::first_chain(&placed.ingress));
        change.replace_set(kernel, FROM_MAP, Some(from));
        change.replace_set(kernel, TO_MAP, Some(to));
    }

    /// Whether an interface without the prefix comes or goes, which the base chains must name.
    fn odd_interface(&self, dirty: &Dirty, change: &Change) -> bool {
        let before = dirty.endpoints.iter().filter_map(|id| self.endpoints.get(id));
        let after = change.endpoints.values().flatten();
        before.chain(after).any(|placed| !placed.interface.starts_with(&self.config.workload_prefix))
    }
}

impl Change {
    fn replace_set(&mut self, kernel: &Table, name: &str, new: Option<crate::nftables::Set>) {
        if let Some(old) = kernel.sets.get(name) {
            self.old.sets.insert(name.to_owned(), old.clone());
        }
        if let Some(new) = new {
            self.new.sets.insert(name.to_owned(), new);
        }
    }

    fn replace_chain(&mut self, kernel: &Table, name: &str, new: Option<crate::nftables::Chain>) {
        if let Some(old) = kernel.chains.get(name) {
            self.old.chains.insert(name.to_owned(), old.clone());
        }
        if let Some(new) = new {
            self.new.chains.insert(name.to_owned(), new);
        }
    }
}

/// The interfaces that more than one endpoint claims.
fn contested<'a>(placed: impl Iterator<Item = &'a Placed>) -> BTreeSet<String> {
    let (mut seen, mut contested) = (BTreeSet::new(), BTreeSet::new());
    for placed in placed {
        if !seen.insert(&placed.interface) {
            contested.insert(placed.interface.clone());
        }
    }
    contested
}

/// Whether the kernel does not know the table's flags. Linux says EINVAL or EOPNOTSUPP, by version.
fn flags_unknown(error: &Error) -> bool {
    let Error::Transaction { op, .. } = error else { return false };
    matches!(op.as_ref(), Op::AddTable(flags) if *flags != 0)
        && matches!(error.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

fn place(endpoint: &Endpoint) -> Placed {
    Placed {
        interface: endpoint.host_interface.to_string(),
        ingress: chains::program_name(&endpoint.program, Direction::Ingress),
        egress: chains::program_name(&endpoint.program, Direction::Egress),
    }
}

/// Members that come and go one by one, as changes of nftables sets that stay; and the sets that must be looked at as
/// a whole.
fn members(state: &NodeState, dirty: &Dirty, kernel: &Table) -> (Vec<Op>, Vec<SetId>) {
    let (mut ops, mut whole) = (Vec::new(), Vec::new());
    for (id, touched) in &dirty.sets {
        match touched {
            Touched::Members(members) => match member_ops(state, id, members, kernel) {
                Some(some) => ops.extend(some),
                None => whole.push(id.clone()),
            },
            Touched::Whole => whole.push(id.clone()),
        }
    }
    (ops, whole)
}

/// The changes for single members, if that is all there is to do: no networks, and no nftables set that comes or goes.
fn member_ops(state: &NodeState, id: &SetId, touched: &BTreeSet<Member>, kernel: &Table) -> Option<Vec<Op>> {
    let (kind, desired) = state.sets.get(id)?;
    let mut changes: BTreeMap<Part, (Vec<Element>, Vec<Element>)> = BTreeMap::new();
    for member in touched {
        let (part, key) = single(member)?;
        let there = kernel.sets.get(&part.name(id))?.elements.contains_key(&key);
        let (added, removed) = changes.entry(part).or_default();
        match (desired.contains(member), there) {
            (true, false) => added.push(Element::key(key)),
            (false, true) => removed.push(Element::key(key)),
            _ => {}
        }
    }
    let mut ops = Vec::new();
    for (part, (added, removed)) in changes {
        let name = part.name(id);
        let left = kernel.sets.get(&name)?.elements.len() + added.len() - removed.len();
        if left == 0 && !part.always(*kind) {
            return None;
        }
        ops.extend((!removed.is_empty()).then(|| Op::DeleteElements(name.clone(), part.spec(), removed)));
        ops.extend((!added.is_empty()).then(|| Op::AddElements(name.clone(), part.spec(), added)));
    }
    Some(ops)
}

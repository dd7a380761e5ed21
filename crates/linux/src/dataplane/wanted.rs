//! What the table of policy must be, by the objects of the node state: which of its parts come, change and go with them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::net::Direction;
use tortie_dataplane::{Endpoint, EndpointId, NodeState};
use tortie_policy::program::{Member, PolicyId, SetId};

use super::Config;
use super::change::Change;
use super::dirty::{Dirty, Touched};
use super::frame::{self, FROM_CHAIN, FROM_PROGRAM, ODD_INTERFACES, TO_CHAIN, TO_PROGRAM};
use super::literals::Literals;
use super::policies::{Lines, chain_name};
use super::programs::{Asked, Sources, Written, closed, first_chain, program_name, write};
use super::sets::{Family, Part, digest_number, kernel_sets, single};
use crate::nftables::{Chain, Data, Field, Key, SetSpec, Table, Value, Verdict};

/// What is in the table.
#[derive(Debug, Default)]
pub struct Wanted {
    endpoints: BTreeMap<EndpointId, Placed>,
    /// Who has an interface. Where it is more than one, they are closed.
    interfaces: BTreeMap<String, BTreeSet<EndpointId>>,
    programs: BTreeMap<String, Program>,
    /// The numbers of the programs.
    numbers: BTreeSet<u32>,
    policies: BTreeMap<PolicyId, Policy>,
    literals: Literals,
    /// How many keys the sets of all programs were made for.
    keys: usize,
}

/// Where an endpoint is in the table.
#[derive(Debug)]
struct Placed {
    interface: String,
    addresses: Vec<IpAddr>,
    /// The names of its programs, by direction.
    programs: [String; 2],
}

/// What is asked about packets of one direction of some endpoints.
#[derive(Debug)]
struct Program {
    asked: Asked,
    number: u32,
    /// How many endpoints have it.
    users: usize,
    written: Written,
}

/// A policy that programs name.
#[derive(Debug, Default)]
struct Policy {
    /// The programs that name it.
    programs: BTreeSet<String>,
    /// Its lines, and how many programs jump to them, by direction.
    lines: [(Lines, usize); 2],
}

/// The objects that a change is about.
#[derive(Debug, Default)]
struct Objects {
    interfaces: BTreeSet<String>,
    programs: BTreeSet<String>,
    policies: BTreeSet<PolicyId>,
}

/// What is to be known beside the node state.
pub struct Around<'a> {
    pub config: &'a Config,
    /// How many bytes fit in one transaction.
    pub room: usize,
    /// Chains that the kernel has refused, and what it said.
    pub refused: &'a BTreeMap<String, String>,
}

/// What is to be said of an endpoint's place in the table.
pub struct Said<'a> {
    pub interface: &'a str,
    /// Whether another endpoint has the interface, too.
    pub contested: bool,
    /// What of its policy cannot be written down.
    pub problems: BTreeSet<&'a str>,
}

/// The most keys of the sets that all programs look their rules up in: some 50 MB in the kernel.
const MOST_KEYS: usize = 1 << 19;

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

impl Wanted {
    /// Takes in what is dirty. Gives what must change in the table, of which `kernel` is what there is.
    pub fn update(
        &mut self,
        state: &NodeState,
        dirty: &Dirty,
        kernel: &Table,
        around: &Around<'_>,
    ) -> Change {
        let mut change = Change::default();
        if dirty.frame {
            take_frame(around.config, state, kernel, &mut change);
        }
        let reshaped = take_sets(state, dirty, kernel, &mut change);
        let mut touched = self.take_endpoints(state, dirty, &mut change);
        self.touch_policies(dirty, &reshaped, &mut touched);
        self.write_policies(state, &touched, around, &|name| change.has_set(kernel, name));
        self.touch_programs(dirty, &mut touched);
        self.write_programs(state, kernel, &mut touched, &mut change, around);
        self.put_policies(state, kernel, &touched, &mut change);
        self.touch_lookups(state, dirty, &touched, &mut change);
        self.open(&touched.interfaces, around.config, &mut change);
        self.literals.take(kernel, &mut change);
        change.programs = touched.programs;
        change.policies = touched.policies;
        change
    }

    /// What is to be said of the endpoints that are not as they were asked for.
    pub fn said(&self) -> Vec<(&EndpointId, Said<'_>)> {
        let is_contested =
            |placed: &Placed| self.interfaces.get(&placed.interface).is_some_and(|ids| ids.len() > 1);
        let is_bad = |policy: &Policy| policy.lines.iter().any(|(lines, _)| lines.problem.is_some());
        let bad: BTreeSet<_> =
            self.policies.iter().filter(|(_, policy)| is_bad(policy)).map(|(id, _)| id).collect();
        let asks_bad =
            |program: &Program| !bad.is_empty() && program.asked.policies().any(|id| bad.contains(id));
        let bad_program = |program: &Program| program.written.problem.is_some() || asks_bad(program);
        let bad_programs = self.programs.iter().filter(|(_, program)| bad_program(program));
        let bad_programs: BTreeSet<_> = bad_programs.map(|(name, _)| name).collect();
        let said = |(id, placed): (_, _)| {
            let placed: &Placed = placed;
            let contested = is_contested(placed);
            let has_problems = placed.programs.iter().any(|name| bad_programs.contains(name));
            let problems = if has_problems { self.problems(placed) } else { BTreeSet::new() };
            let is_said = contested || !problems.is_empty();
            is_said.then_some((id, Said { interface: &placed.interface, contested, problems }))
        };
        self.endpoints.iter().filter_map(said).collect()
    }

    fn problems(&self, placed: &Placed) -> BTreeSet<&str> {
        let mut problems = BTreeSet::new();
        for (program, direction) in placed.programs.iter().zip(DIRECTIONS) {
            let Some(program) = self.programs.get(program) else { continue };
            problems.extend(program.written.problem.as_deref());
            let policies = program.asked.policies().filter_map(|id| self.policies.get(id));
            problems.extend(policies.filter_map(|policy| policy.lines(direction).problem.as_deref()));
        }
        problems
    }

    /// The interfaces of the endpoints that a change is about: their place, their programs, or sets of these change.
    pub fn concerned(&self, dirty: &Dirty, change: &Change) -> BTreeSet<String> {
        let policy_changes = |id: &PolicyId| {
            let names = |policy: &Policy| dirty.sets.keys().any(|set| policy.names(set));
            change.policies.contains(id) || self.policies.get(id).is_none_or(names)
        };
        let changes = |(name, program): (&String, &Program)| {
            change.programs.contains(name) || program.asked.policies().any(policy_changes)
        };
        let programs = self.programs.iter().filter(|entry| changes(*entry));
        let programs: BTreeSet<_> = programs.map(|(name, _)| name).collect();
        let concerned = self.endpoints.iter().filter(|(id, placed)| {
            dirty.endpoints.contains(*id) || placed.programs.iter().any(|name| programs.contains(name))
        });
        concerned.map(|(_, placed)| placed.interface.clone()).collect()
    }

    /// What a chain stands for: a program, or one direction of a policy, by the name of its chain.
    pub fn owner(&self, chain: &str) -> Option<String> {
        let program = self.programs.keys().find(|name| chain.starts_with(name.as_str())).cloned();
        let mut policies =
            self.policies.keys().flat_map(|id| DIRECTIONS.map(|direction| chain_name(id, direction)));
        program.or_else(|| policies.find(|name| name == chain))
    }

    /// Has interfaces lead to the programs of the endpoints that have them.
    pub fn open(&self, interfaces: &BTreeSet<String>, config: &Config, change: &mut Change) {
        for interface in interfaces {
            let mut owners = self.interfaces.get(interface).into_iter().flatten();
            let owner = match (owners.next(), owners.next()) {
                (Some(only), None) => self.endpoints.get(only),
                _ => None,
            };
            let number = |direction: Direction| {
                let program = self.programs.get(&owner?.programs[index(direction)])?;
                Some(Value { end: None, data: Some(Data::Number(program.number)) })
            };
            let (key, spec) = (Key::interface(interface), || SetSpec::number_map(&[Field::Interface]));
            change.element(TO_PROGRAM, spec, key, number(Direction::Ingress));
            change.element(FROM_PROGRAM, spec, key, number(Direction::Egress));
            if !interface.starts_with(&config.workload_prefix) {
                let there = self.interfaces.contains_key(interface).then(Value::default);
                change.element(ODD_INTERFACES, || SetSpec::hash(&[Field::Interface]), key, there);
            }
            if let Some(owner) = owner {
                owner.put_addresses(true, change);
            }
        }
    }

    /// Takes the dirty endpoints in: their places, and programs and policies that come and go with them.
    fn take_endpoints(&mut self, state: &NodeState, dirty: &Dirty, change: &mut Change) -> Objects {
        let mut touched = Objects::default();
        for id in &dirty.endpoints {
            let old = self.endpoints.remove(id);
            if let Some(old) = &old {
                self.leave(id, old, change);
                touched.interfaces.insert(old.interface.clone());
            }
            // A program that stays is not given up in between.
            if let Some(endpoint) = state.endpoints.get(id) {
                let placed = Placed::new(endpoint);
                for (name, direction) in placed.programs.iter().zip(DIRECTIONS) {
                    self.enlist(name, endpoint, direction, &mut touched);
                }
                touched.interfaces.insert(placed.interface.clone());
                self.interfaces.entry(placed.interface.clone()).or_default().insert(id.clone());
                self.endpoints.insert(id.clone(), placed);
            }
            for name in old.iter().flat_map(|old| &old.programs) {
                if let Some(program) = self.programs.get_mut(name) {
                    program.users -= 1;
                    if program.users == 0 {
                        touched.programs.insert(name.clone());
                    }
                }
            }
        }
        touched
    }

    /// Gives up an endpoint's interface and addresses.
    fn leave(&mut self, id: &EndpointId, old: &Placed, change: &mut Change) {
        if let Some(ids) = self.interfaces.get_mut(&old.interface) {
            ids.remove(id);
            if ids.is_empty() {
                self.interfaces.remove(&old.interface);
            }
        }
        old.put_addresses(false, change);
    }

    /// Counts an endpoint in.
    fn enlist(&mut self, name: &str, endpoint: &Endpoint, direction: Direction, touched: &mut Objects) {
        if let Some(program) = self.programs.get_mut(name) {
            program.users += 1;
            return;
        }
        let asked = Asked::new(&endpoint.program, direction);
        for id in asked.policies() {
            let policy = self.policies.entry(id.clone()).or_default();
            if policy.programs.is_empty() {
                touched.policies.insert(id.clone());
            }
            policy.programs.insert(name.to_owned());
        }
        let mut number = digest_number(name);
        while !self.numbers.insert(number) {
            number = number.wrapping_add(1);
        }
        let program = Program { asked, number, users: 1, written: Written::default() };
        self.programs.insert(name.to_owned(), program);
        touched.programs.insert(name.to_owned());
    }

    /// Adds the policies that have changed, and those whose sets have become others.
    fn touch_policies(&self, dirty: &Dirty, reshaped: &BTreeSet<SetId>, touched: &mut Objects) {
        let known = dirty.policies.iter().filter(|id| self.policies.contains_key(*id));
        touched.policies.extend(known.cloned());
        if !reshaped.is_empty() {
            let about =
                self.policies.iter().filter(|(_, policy)| reshaped.iter().any(|set| policy.names(set)));
            touched.policies.extend(about.map(|(id, _)| id.clone()));
        }
    }

    fn write_policies(
        &mut self,
        state: &NodeState,
        touched: &Objects,
        around: &Around<'_>,
        exists: &dyn Fn(&str) -> bool,
    ) {
        for id in &touched.policies {
            let Some(policy) = self.policies.get_mut(id) else { continue };
            let rules = state.policies.get(id).map(AsRef::as_ref);
            for direction in DIRECTIONS {
                policy.lines[index(direction)].0 = match around.refused.get(&chain_name(id, direction)) {
                    Some(problem) => Lines::deny(format!("{id}: {problem}")),
                    None => Lines::new(id, rules, direction, exists, around.room),
                };
            }
        }
    }

    /// Adds the programs that name a policy that has changed, or that look up members of a set that is another now.
    fn touch_programs(&self, dirty: &Dirty, touched: &mut Objects) {
        for policy in touched.policies.iter().filter_map(|id| self.policies.get(id)) {
            touched.programs.extend(policy.programs.iter().cloned());
        }
        let replaced = dirty.sets.iter().filter(|(_, what)| **what == Touched::Whole);
        let replaced: Vec<_> = replaced.map(|(id, _)| id).collect();
        if !replaced.is_empty() {
            let names_replaced = |policy: &Policy| replaced.iter().any(|set| policy.names(set));
            let policies = self.policies.values().filter(|policy| names_replaced(policy));
            let looks_up = |name: &&String| {
                self.programs.get(*name).is_some_and(|program| !program.written.lookups.is_empty())
            };
            touched.programs.extend(policies.flat_map(|policy| &policy.programs).filter(looks_up).cloned());
        }
    }

    /// Writes programs, and gives up those that no endpoint has any more.
    fn write_programs(
        &mut self,
        state: &NodeState,
        kernel: &Table,
        touched: &mut Objects,
        change: &mut Change,
        around: &Around<'_>,
    ) {
        for name in &touched.programs {
            let Some(program) = self.programs.get(name) else { continue };
            let is_used = program.users > 0;
            let new = if is_used { self.written(name, program, state, around) } else { Written::default() };
            let Some(program) = self.programs.get_mut(name) else { continue };
            let old = std::mem::replace(&mut program.written, new);
            self.keys = self.keys - old.keys() + program.written.keys();
            let first = Value { end: None, data: Some(Data::Verdict(Verdict::Goto(first_chain(name)))) };
            let map = if program.asked.direction == Direction::Ingress { TO_CHAIN } else { FROM_CHAIN };
            let key = frame::program_key(program.number);
            change.element(map, frame::program_chains, key, is_used.then_some(first));
            program.written.put(Some(&old), state, kernel, change);
            let direction = index(program.asked.direction);
            for (jumps, by) in [(&program.written.jumps, 1), (&old.jumps, -1)] {
                for id in jumps {
                    if let Some(policy) = self.policies.get_mut(id) {
                        let count = &mut policy.lines[direction].1;
                        *count = count.saturating_add_signed(by);
                        touched.policies.insert(id.clone());
                    }
                }
            }
            if !is_used {
                self.numbers.remove(&program.number);
                for id in program.asked.policies() {
                    if let Some(policy) = self.policies.get_mut(id) {
                        policy.programs.remove(name);
                        touched.policies.insert(id.clone());
                    }
                }
                self.programs.remove(name);
            }
        }
    }

    /// A program as it must be.
    fn written(&self, name: &str, program: &Program, state: &NodeState, around: &Around<'_>) -> Written {
        if let Some(problem) = around.refused.get(name) {
            return closed(name, problem.clone());
        }
        let unknown = Lines::default();
        let sources = Sources {
            lines: &|id| match self.policies.get(id) {
                Some(policy) => policy.lines(program.asked.direction),
                None => &unknown,
            },
            members: &|id| state.sets.get(id).map_or(0, |(_, members)| members.len()),
            deny: state.settings.deny,
            in_a_row: around.config.rules_in_a_row,
            most_keys: MOST_KEYS.saturating_sub(self.keys - program.written.keys()),
        };
        write(name, &program.asked, &sources)
    }

    /// Has the chains of policies be there where programs jump to them, and gives up policies that no program names.
    fn put_policies(&mut self, state: &NodeState, kernel: &Table, touched: &Objects, change: &mut Change) {
        for id in &touched.policies {
            let Some(policy) = self.policies.get(id) else { continue };
            for (direction, (lines, jumps)) in DIRECTIONS.into_iter().zip(&policy.lines) {
                let rules =
                    || lines.lines.iter().flat_map(|line| line.rules(state.settings.deny, None)).collect();
                let chain = (*jumps > 0).then(|| Chain { base: None, rules: rules() });
                change.chain(kernel, &chain_name(id, direction), chain);
            }
            if policy.programs.is_empty() {
                self.policies.remove(id);
            }
        }
    }

    /// Has the keys come and go that follow from members of sets.
    fn touch_lookups(&self, state: &NodeState, dirty: &Dirty, touched: &Objects, change: &mut Change) {
        let untouched = self.programs.iter().filter(|(name, _)| !touched.programs.contains(*name));
        for (name, lookup) in untouched.flat_map(|(_, program)| &program.written.lookups) {
            for (id, what) in &dirty.sets {
                let Touched::Members(members) = what else { continue };
                for (key, wanted) in members.iter().flat_map(|member| lookup.touched(state, id, member)) {
                    change.element(name, || lookup.spec(), key, wanted.then(Value::default));
                }
            }
        }
    }
}

impl Placed {
    fn new(endpoint: &Endpoint) -> Self {
        Self {
            interface: endpoint.host_interface.to_string(),
            addresses: endpoint.addresses.clone(),
            programs: DIRECTIONS.map(|direction| program_name(&endpoint.program, direction)),
        }
    }

    /// Has packets from its addresses be taken from its interface, or not.
    fn put_addresses(&self, there: bool, change: &mut Change) {
        for address in &self.addresses {
            let (name, spec) = frame::own_addresses(Family::of(*address));
            let key = Key::interface_address(&self.interface, *address);
            change.element(name, || spec, key, there.then(Value::default));
        }
    }
}

impl Policy {
    fn lines(&self, direction: Direction) -> &Lines {
        &self.lines[index(direction)].0
    }

    fn names(&self, set: &SetId) -> bool {
        self.lines.iter().any(|(lines, _)| lines.sets.contains(set))
    }
}

/// The place of a direction in [`DIRECTIONS`].
fn index(direction: Direction) -> usize {
    match direction {
        Direction::Ingress => 0,
        Direction::Egress => 1,
    }
}

/// Takes the frame in; what is in its sets because of pods stays.
fn take_frame(config: &Config, state: &NodeState, kernel: &Table, change: &mut Change) {
    let frame = frame::frame(config, state);
    for (name, chain) in frame.chains {
        change.chain(kernel, &name, Some(chain));
    }
    for (name, set) in frame.sets {
        if name == frame::VXLAN_PEERS || !kernel.sets.contains_key(&name) {
            change.set(kernel, &name, Some(set));
        }
    }
}

/// Takes the dirty sets in, and gives those of which other nftables sets exist now than before.
fn take_sets(state: &NodeState, dirty: &Dirty, kernel: &Table, change: &mut Change) -> BTreeSet<SetId> {
    let mut reshaped = BTreeSet::new();
    for (id, touched) in &dirty.sets {
        if let Touched::Members(members) = touched
            && let Some(members) = single_members(state, id, members, kernel)
        {
            for (part, key, wanted) in members {
                change.element(&part.name(id), || part.spec(), key, wanted.then(Value::default));
            }
            continue;
        }
        let mut wanted = kernel_sets(state, id);
        for name in Part::ALL.map(|part| part.name(id)) {
            let new = wanted.remove(&name);
            if new.is_some() != kernel.sets.contains_key(&name) {
                reshaped.insert(id.clone());
            }
            change.set(kernel, &name, new);
        }
    }
    reshaped
}

/// Members that come and go one by one, if that is all there is to do: no networks, and no nftables set that comes or
/// goes.
fn single_members(
    state: &NodeState,
    id: &SetId,
    touched: &BTreeSet<Member>,
    kernel: &Table,
) -> Option<Vec<(Part, Key, bool)>> {
    let (kind, desired) = state.sets.get(id)?;
    let mut members = Vec::new();
    let mut left: BTreeMap<Part, usize> = BTreeMap::new();
    for member in touched {
        let (part, key) = single(member)?;
        let there = &kernel.sets.get(&part.name(id))?.elements;
        let (is_there, wanted) = (there.contains_key(&key), desired.contains(member));
        let left = left.entry(part).or_insert(there.len());
        *left = *left + usize::from(wanted && !is_there) - usize::from(is_there && !wanted);
        members.push((part, key, wanted));
    }
    let stays = |(part, left): (&Part, &usize)| *left > 0 || part.always(*kind);
    left.iter().all(stays).then_some(members)
}

//! What the table of policy must be, by the objects of the node state: which of its parts come, change and go with them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::net::Direction;
use tortie_dataplane::{EndpointId, HostEndpoint, NodeState};
use tortie_policy::program::{EndpointProgram, PolicyId, SetId};

mod origins;
mod parts;
mod said;

use tortie_kernel::nftables::{Chain, Data, Field, Key, SetSpec, Table, Value, Verdict};

use self::parts::{take_frame, take_sets};
use crate::dataplane::Config;
use crate::dataplane::change::Change;
use crate::dataplane::counting;
use crate::dataplane::dirty::{Dirty, Touched};
use crate::dataplane::frame::{self, ODD_INTERFACES};
use crate::dataplane::host_frame::EVERY_INTERFACE;
use crate::dataplane::literals::Literals;
use crate::dataplane::policies::{Lines, chain_name, problem};
use crate::dataplane::programs::{Asked, Sources, Written, closed, first_chain, program_name, write};
use crate::dataplane::sets::{Family, digest_number};
use crate::dataplane::slots::{Slot, Stage};

/// What is in the table.
#[derive(Debug, Default)]
pub struct Wanted {
    pods: BTreeMap<EndpointId, Pod>,
    /// Who has an interface. Where it is more than one, they are closed.
    interfaces: BTreeMap<String, BTreeSet<EndpointId>>,
    hosts: BTreeMap<String, Host>,
    /// Which host endpoints mean an interface. The first of them counts.
    host_interfaces: BTreeMap<String, BTreeSet<String>>,
    programs: BTreeMap<String, Program>,
    /// The numbers of the programs.
    numbers: BTreeSet<u32>,
    policies: BTreeMap<PolicyId, Policy>,
    literals: Literals,
    /// How many keys the sets of all programs were made for.
    keys: usize,
    /// How many programs, and directions of policies, cannot be written down.
    problems: usize,
}

/// The names of the programs of an endpoint, by where they are asked.
type Programs = BTreeMap<Slot, String>;

/// Where a pod is in the table.
#[derive(Debug)]
struct Pod {
    interface: String,
    addresses: Vec<IpAddr>,
    programs: Programs,
}

/// Where a host endpoint is in the table.
#[derive(Debug)]
struct Host {
    interfaces: BTreeSet<String>,
    programs: Programs,
}

/// What is asked about packets of one direction of some endpoints.
#[derive(Debug)]
struct Program {
    asked: Asked,
    number: u32,
    /// How many endpoints have it, by where it is asked.
    users: BTreeMap<Slot, usize>,
    written: Written,
}

/// A policy that programs name.
#[derive(Debug, Default)]
struct Policy {
    /// The programs that name it.
    programs: BTreeSet<String>,
    /// Its lines, by direction.
    lines: [Lines; 2],
    /// How many programs jump to a chain of it.
    jumps: BTreeMap<(Direction, Stage), usize>,
}

/// The objects that a change is about.
#[derive(Debug, Default)]
struct Objects {
    interfaces: BTreeSet<String>,
    host_interfaces: BTreeSet<String>,
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
    /// The interfaces that have the node's own addresses.
    pub own_addresses: &'a BTreeMap<IpAddr, String>,
}

/// The interfaces that lead to programs, of pods and of host endpoints.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Interfaces {
    pub of_pods: BTreeSet<String>,
    pub of_hosts: BTreeSet<String>,
}

/// The most keys of the sets that all programs look their rules up in: some 50 MB in the kernel.
const MOST_KEYS: usize = 1 << 19;

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];
const STAGES_OF_POLICIES: [Stage; 3] = [Stage::Normal, Stage::PreDnat, Stage::Untracked];

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
        let mut touched = self.take_pods(state, dirty, &mut change);
        self.take_hosts(state, dirty, around.own_addresses, &mut touched);
        self.touch_policies(dirty, &reshaped, &mut touched);
        self.write_policies(state, &touched, around, &|name| change.has_set(kernel, name));
        self.touch_programs(dirty, &mut touched);
        self.write_programs(state, kernel, &mut touched, &mut change, around);
        self.put_policies(state, kernel, &touched, &mut change);
        self.touch_lookups(state, dirty, &touched, &mut change);
        let interfaces = Interfaces { of_pods: touched.interfaces, of_hosts: touched.host_interfaces };
        self.open(&interfaces, around.config, &mut change);
        counting::take(state, &mut change);
        self.literals.take(kernel, &mut change);
        change.host_interfaces = interfaces.of_hosts;
        change.programs = touched.programs;
        change.policies = touched.policies;
        change
    }

    /// The interfaces of the endpoints that a change is about: their place, their programs, or sets of these change.
    pub fn concerned(&self, dirty: &Dirty, change: &Change) -> Interfaces {
        let policy_changes = |id: &PolicyId| {
            let names = |policy: &Policy| dirty.sets.keys().any(|set| policy.names(set));
            change.policies.contains(id) || self.policies.get(id).is_none_or(names)
        };
        let changes = |(name, program): (&String, &Program)| {
            change.programs.contains(name) || program.asked.policies().any(policy_changes)
        };
        let programs = self.programs.iter().filter(|entry| changes(*entry));
        let programs: BTreeSet<_> = programs.map(|(name, _)| name).collect();
        let has_one = |of_endpoint: &Programs| of_endpoint.values().any(|name| programs.contains(name));
        let pods = self.pods.iter();
        let pods = pods.filter(|(id, pod)| dirty.endpoints.contains(*id) || has_one(&pod.programs));
        let hosts = self.hosts.iter();
        let hosts = hosts.filter(|(name, host)| dirty.hosts.contains(*name) || has_one(&host.programs));
        Interfaces {
            of_pods: pods.map(|(_, pod)| pod.interface.clone()).collect(),
            of_hosts: hosts
                .flat_map(|(_, host)| &host.interfaces)
                .chain(&change.host_interfaces)
                .cloned()
                .collect(),
        }
    }

    /// What a chain stands for: a program, or one direction of a policy, by the name of its chain.
    pub fn owner(&self, chain: &str) -> Option<String> {
        let program = self.programs.keys().find(|name| chain.starts_with(name.as_str())).cloned();
        let chains = |(id, policy): (&PolicyId, &Policy)| {
            let names = policy.jumps.keys().map(|(direction, stage)| chain_name(id, *direction, *stage));
            names.collect::<Vec<_>>()
        };
        program.or_else(|| self.policies.iter().flat_map(chains).find(|name| name == chain))
    }

    /// Has interfaces lead to the programs of the endpoints that have them.
    pub fn open(&self, interfaces: &Interfaces, config: &Config, change: &mut Change) {
        for interface in &interfaces.of_pods {
            let mut owners = self.interfaces.get(interface).into_iter().flatten();
            let owner = match (owners.next(), owners.next()) {
                (Some(only), None) => self.pods.get(only),
                _ => None,
            };
            self.lead(interface, &Slot::OF_PODS, owner.map(|pod| &pod.programs), change);
            if !interface.starts_with(&config.workload_prefix) {
                let there = self.interfaces.contains_key(interface).then(Value::default);
                let spec = || SetSpec::hash(&[Field::Interface]);
                change.element(ODD_INTERFACES, spec, Key::interface(interface), there);
            }
            if let Some(owner) = owner {
                owner.put_addresses(true, change);
            }
        }
        for interface in &interfaces.of_hosts {
            let first = self.host_interfaces.get(interface).and_then(BTreeSet::first);
            let owner = first.and_then(|name| self.hosts.get(name));
            self.lead(interface, &Slot::OF_HOSTS, owner.map(|host| &host.programs), change);
        }
    }

    /// Has an interface lead to programs, or to none.
    fn lead(&self, interface: &str, slots: &[Slot], programs: Option<&Programs>, change: &mut Change) {
        for slot in slots {
            let program = programs.and_then(|programs| self.programs.get(programs.get(slot)?));
            // Where a host endpoint has no policy before DNAT, that of all interfaces is asked, as in Calico.
            let program = program.filter(|program| {
                *slot != Slot::HostPreDnat || interface == EVERY_INTERFACE || !program.asked.tiers.is_empty()
            });
            let number = program.map(|program| Value { end: None, data: Some(Data::Number(program.number)) });
            let spec = || SetSpec::number_map(&[Field::Interface]);
            change.element(slot.maps().0, spec, Key::interface(interface), number);
        }
    }

    /// Takes the dirty pods in: their places, and programs and policies that come and go with them.
    fn take_pods(&mut self, state: &NodeState, dirty: &Dirty, change: &mut Change) -> Objects {
        let mut touched = Objects::default();
        for id in &dirty.endpoints {
            let old = self.pods.remove(id);
            if let Some(old) = &old {
                remove(&mut self.interfaces, &old.interface, id);
                old.put_addresses(false, change);
                touched.interfaces.insert(old.interface.clone());
            }
            if let Some(endpoint) = state.endpoints.get(id) {
                let programs = Slot::OF_PODS.map(|slot| (slot, &*endpoint.program));
                let (interface, addresses) =
                    (endpoint.host_interface.to_string(), endpoint.addresses.clone());
                let pod = Pod { interface, addresses, programs: self.enlist(&programs, &mut touched) };
                touched.interfaces.insert(pod.interface.clone());
                self.interfaces.entry(pod.interface.clone()).or_default().insert(id.clone());
                self.pods.insert(id.clone(), pod);
            }
            self.discharge(old.map(|old| old.programs), &mut touched);
        }
        touched
    }

    /// Takes the dirty host endpoints in, in the same way.
    fn take_hosts(
        &mut self,
        state: &NodeState,
        dirty: &Dirty,
        own_addresses: &BTreeMap<IpAddr, String>,
        touched: &mut Objects,
    ) {
        for name in &dirty.hosts {
            let old = self.hosts.remove(name);
            for interface in old.iter().flat_map(|old| &old.interfaces) {
                remove(&mut self.host_interfaces, interface, name);
                touched.host_interfaces.insert(interface.clone());
            }
            if let Some(endpoint) = state.host_endpoints.get(name) {
                let programs = Slot::OF_HOSTS.map(|slot| (slot, program_of(endpoint, slot)));
                let interfaces = interfaces_of(endpoint, own_addresses);
                for interface in &interfaces {
                    self.host_interfaces.entry(interface.clone()).or_default().insert(name.clone());
                    touched.host_interfaces.insert(interface.clone());
                }
                let host = Host { interfaces, programs: self.enlist(&programs, touched) };
                self.hosts.insert(name.clone(), host);
            }
            self.discharge(old.map(|old| old.programs), touched);
        }
    }

    /// Counts an endpoint's programs in, and gives their names. Those of its older form are discharged after that: a
    /// program that stays is not given up in between.
    fn enlist(&mut self, programs: &[(Slot, &EndpointProgram)], touched: &mut Objects) -> Programs {
        let mut names = Programs::new();
        for (slot, program) in programs {
            let name = program_name(program, *slot);
            if !self.programs.contains_key(&name) {
                self.begin(&name, Asked::new(program, *slot), touched);
            }
            if let Some(program) = self.programs.get_mut(&name) {
                let users = program.users.entry(*slot).or_default();
                *users += 1;
                if *users == 1 {
                    touched.programs.insert(name.clone());
                }
            }
            names.insert(*slot, name);
        }
        names
    }

    /// Counts an endpoint's programs out.
    fn discharge(&mut self, programs: Option<Programs>, touched: &mut Objects) {
        for (slot, name) in programs.into_iter().flatten() {
            if let Some(users) = self.programs.get_mut(&name).and_then(|program| program.users.get_mut(&slot))
            {
                *users -= 1;
                if *users == 0 {
                    touched.programs.insert(name);
                }
            }
        }
    }

    /// A program that is not there yet.
    fn begin(&mut self, name: &str, asked: Asked, touched: &mut Objects) {
        for id in asked.policies() {
            let policy = self.policies.entry(id.clone()).or_default();
            if policy.programs.is_empty() {
                touched.policies.insert(id.clone());
            }
            policy.programs.insert(name.to_owned());
        }
        let mut number = digest_number(name);
        while number == frame::CLOSED || !self.numbers.insert(number) {
            number = number.wrapping_add(1);
        }
        let program = Program { asked, number, users: BTreeMap::new(), written: Written::default() };
        self.programs.insert(name.to_owned(), program);
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
                let name = |stage| chain_name(id, direction, stage);
                let mut refused =
                    STAGES_OF_POLICIES.iter().filter_map(|stage| around.refused.get(&name(*stage)));
                let new = match refused.next() {
                    Some(refusal) => Lines::deny(problem(id, refusal)),
                    None => Lines::new(id, rules, direction, exists, counting::room(state, around.room)),
                };
                self.problems += usize::from(new.problem.is_some());
                let old = std::mem::replace(&mut policy.lines[index(direction)], new);
                self.problems -= usize::from(old.problem.is_some());
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
            let is_used = program.users.values().any(|users| *users > 0);
            let new = if is_used { self.written(name, program, state, around) } else { Written::default() };
            let Some(program) = self.programs.get_mut(name) else { continue };
            let old = std::mem::replace(&mut program.written, new);
            self.keys = self.keys - old.keys() + program.written.keys();
            self.problems += usize::from(program.written.problem.is_some());
            self.problems -= usize::from(old.problem.is_some());
            for (slot, users) in &program.users {
                // Back from a program, which happens to a packet only while the program is being replaced, comes the rule
                // that closes pods. Behind a host's is `*`, which is not asked then.
                let lead = if Slot::OF_PODS.contains(slot) { Verdict::Jump } else { Verdict::Goto };
                let first = Value { end: None, data: Some(Data::Verdict(lead(first_chain(name)))) };
                let (map, key) = (slot.maps().1, frame::program_key(program.number));
                change.element(map, frame::program_chains, key, (*users > 0).then_some(first));
            }
            program.users.retain(|_, users| *users > 0);
            program.written.put(&old, state, kernel, change);
            let place = (program.asked.direction, program.asked.stage.of_policies());
            for (jumps, by) in [(&program.written.jumps, 1), (&old.jumps, -1)] {
                for id in jumps {
                    if let Some(policy) = self.policies.get_mut(id) {
                        let count = policy.jumps.entry(place).or_default();
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
            counts: counting::is_asked_for(state),
            in_a_row: around.config.rules_in_a_row,
            most_keys: counting::most_keys(state, MOST_KEYS)
                .saturating_sub(self.keys - program.written.keys()),
        };
        write(name, &program.asked, &sources)
    }

    /// Has the chains of policies be there where programs jump to them, and gives up policies that no program names.
    fn put_policies(&mut self, state: &NodeState, kernel: &Table, touched: &Objects, change: &mut Change) {
        for id in &touched.policies {
            let Some(policy) = self.policies.get_mut(id) else { continue };
            for ((direction, stage), jumps) in &policy.jumps {
                let lines = &policy.lines[index(*direction)].lines;
                let deny = state.settings.deny;
                let rules = || lines.iter().flat_map(|line| line.rules(*stage, deny, None)).collect();
                let chain = (*jumps > 0).then(|| Chain { base: None, rules: rules() });
                change.chain(kernel, &chain_name(id, *direction, *stage), chain);
            }
            policy.jumps.retain(|_, jumps| *jumps > 0);
            if policy.programs.is_empty() {
                self.problems -= policy.lines.iter().filter(|lines| lines.problem.is_some()).count();
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

impl Pod {
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
        &self.lines[index(direction)]
    }

    fn names(&self, set: &SetId) -> bool {
        self.lines.iter().any(|lines| lines.sets.contains(set))
    }
}

/// Takes a value out of a set of values; a set without values goes.
fn remove<T: Ord>(sets: &mut BTreeMap<String, BTreeSet<T>>, key: &str, value: &T) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}

/// What is asked at a place on the way of a host's packets.
fn program_of(endpoint: &HostEndpoint, slot: Slot) -> &EndpointProgram {
    match slot.stage() {
        Stage::Untracked => &endpoint.program.untracked,
        Stage::PreDnat => &endpoint.program.pre_dnat,
        Stage::Forward => &endpoint.program.forward,
        Stage::Normal => &endpoint.program.normal,
    }
}

/// The interface of the name; without one those that have one of the addresses.
fn interfaces_of(endpoint: &HostEndpoint, own_addresses: &BTreeMap<IpAddr, String>) -> BTreeSet<String> {
    match &endpoint.interface {
        Some(name) => [name.clone()].into(),
        None => endpoint.addresses.iter().filter_map(|address| own_addresses.get(address)).cloned().collect(),
    }
}

/// The place of a direction in [`DIRECTIONS`].
fn index(direction: Direction) -> usize {
    match direction {
        Direction::Ingress => 0,
        Direction::Egress => 1,
    }
}

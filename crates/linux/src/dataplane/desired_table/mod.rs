//! Derives the desired table of policy from the objects of the node state: which parts are added, changed and removed
//! with them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use tortie_api::net::Direction;
use tortie_dataplane::{EndpointId, HostEndpoint, NodeState};
use tortie_policy::program::{EndpointProgram, PolicyId, SetId};

mod host_ports;
mod interfaces;
mod origins;
mod parts;
mod problems;

use tortie_kernel::nftables::{Chain, Data, Field, Key, SetSpec, Table, Value, Verdict};

use self::parts::{update_nodes, update_peers, update_sets, update_skeleton};
use crate::dataplane::Config;
use crate::dataplane::change::Change;
use crate::dataplane::counting;
use crate::dataplane::dirty::{ChangedSet, Dirty};
use crate::dataplane::host_skeleton::EVERY_INTERFACE;
use crate::dataplane::literals::Literals;
use crate::dataplane::lookups::Sources;
use crate::dataplane::packet_kinds::ODD_INTERFACES;
use crate::dataplane::policies::{Limits, Lines, chain_name, problem};
use crate::dataplane::programs::{ProgramSpec, RenderedProgram, closed, first_chain, program_name, write};
use crate::dataplane::recognition::Recognised;
use crate::dataplane::sets::{Family, digest_number};
use crate::dataplane::skeleton;
use crate::dataplane::slots::{Slot, Stage};

/// The desired table.
#[derive(Debug, Default)]
pub(super) struct DesiredTable {
    pods: BTreeMap<EndpointId, Pod>,
    /// The owners of each interface. If there is more than one, they are closed.
    interfaces: BTreeMap<String, BTreeSet<EndpointId>>,
    /// The number of pods that have each address.
    addresses: BTreeMap<IpAddr, usize>,
    /// The interfaces of pods that are not recognised. They are closed.
    unclaimed: BTreeSet<String>,
    /// The pods that want each port of the node, with their address and port. The first one gets it.
    host_ports: BTreeMap<HostPortKey, BTreeMap<EndpointId, (IpAddr, u16)>>,
    hosts: BTreeMap<String, Host>,
    /// The host endpoints of each interface. The first one counts.
    host_interfaces: BTreeMap<String, BTreeSet<String>>,
    programs: BTreeMap<String, Program>,
    /// The numbers of the programs.
    numbers: BTreeSet<u32>,
    policies: BTreeMap<PolicyId, Policy>,
    literals: Literals,
    /// The number of keys when the sets of all programs were created.
    keys: usize,
    /// The number of programs, and of directions of policies, that cannot be rendered.
    problems: usize,
}

/// An entry of the maps of pods' ports of the node.
type HostPortKey = (Family, Key);

/// The names of the programs of an endpoint, by slot.
type Programs = BTreeMap<Slot, String>;

/// A chain of a policy.
type JumpTarget = (PolicyId, (Direction, Stage));

/// The parts of the table that belong to a pod.
#[derive(Debug)]
struct Pod {
    /// `None` if it is not known.
    interface: Option<String>,
    addresses: Vec<IpAddr>,
    /// The keys of its ports of the node.
    host_ports: Vec<HostPortKey>,
    programs: Programs,
}

/// The parts of the table that belong to a host endpoint.
#[derive(Debug)]
struct Host {
    interfaces: BTreeSet<String>,
    programs: Programs,
}

/// The program for packets of one direction of some endpoints.
#[derive(Debug)]
struct Program {
    spec: ProgramSpec,
    number: u32,
    /// The number of endpoints that use it, by slot.
    users: BTreeMap<Slot, usize>,
    written: RenderedProgram,
}

/// A policy that programs name.
#[derive(Debug, Default)]
struct Policy {
    /// The programs that name it.
    programs: BTreeSet<String>,
    /// Its lines, by direction.
    lines: [Lines; 2],
    /// The number of programs that jump to each of its chains.
    jumps: BTreeMap<(Direction, Stage), usize>,
}

/// The objects that a change concerns.
#[derive(Debug, Default)]
struct Objects {
    interfaces: BTreeSet<String>,
    host_interfaces: BTreeSet<String>,
    programs: BTreeSet<String>,
    policies: BTreeSet<PolicyId>,
    /// The names of programs by their places in memory, which the node state keeps during an update.
    names: HashMap<(usize, Slot), String>,
}

/// The data needed in addition to the node state.
pub(super) struct RenderContext<'a> {
    pub config: &'a Config,
    /// The number of bytes that fit in one transaction.
    pub room: usize,
    /// Chains that the kernel has refused, with its error.
    pub refused: &'a BTreeMap<String, String>,
    /// The node's own addresses with their interfaces.
    pub own_addresses: &'a BTreeMap<IpAddr, String>,
    /// The pods' interfaces, if another plugin has connected them; otherwise they have Tortie's names.
    pub recognised: Option<&'a Recognised>,
}

/// The interfaces that lead to programs, of pods and of host endpoints.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Interfaces {
    pub of_pods: BTreeSet<String>,
    pub of_hosts: BTreeSet<String>,
}

/// The maximum number of keys in the lookup sets of all programs: about 50 MB in the kernel.
const MAX_KEYS: usize = 1 << 19;

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];
const STAGES_OF_POLICIES: [Stage; 3] = [Stage::Normal, Stage::PreDnat, Stage::Untracked];

impl DesiredTable {
    /// Applies the dirty objects, and returns the necessary changes of the table. `kernel` is the current table.
    pub(super) fn update(
        &mut self,
        state: &NodeState,
        dirty: &Dirty,
        kernel: &Table,
        around: &RenderContext<'_>,
    ) -> Change {
        let mut change = Change::default();
        if dirty.skeleton {
            update_skeleton(around.config, state, kernel, &mut change);
        } else {
            update_peers(state, &dirty.peers, &mut change);
            update_nodes(state, dirty, &mut change);
        }
        let reshaped = update_sets(state, dirty, around.config.most_members, kernel, &mut change);
        let mut affected = self.update_pods(state, dirty, around, &mut change);
        self.update_unclaimed(around, &mut affected);
        self.update_hosts(state, dirty, around.own_addresses, &mut affected);
        self.add_affected_policies(dirty, &reshaped, &mut affected);
        self.write_policies(state, &affected, around, &|name| change.has_set(kernel, name));
        self.add_affected_programs(dirty, &mut affected);
        self.write_programs(state, kernel, &mut affected, &mut change, around);
        self.put_policies(state, kernel, &affected, &mut change);
        self.update_lookups(state, dirty, &affected, &mut change);
        let interfaces = Interfaces { of_pods: affected.interfaces, of_hosts: affected.host_interfaces };
        self.open(&interfaces, around.config, &mut change);
        counting::add_counters(state, &mut change);
        self.literals.update(kernel, &mut change);
        change.host_interfaces = interfaces.of_hosts;
        change.programs = affected.programs;
        change.policies = affected.policies;
        change
    }

    /// The interfaces of the endpoints that a change concerns: their entries, their programs, or sets of these
    /// change.
    pub(super) fn concerned(&self, dirty: &Dirty, change: &Change) -> Interfaces {
        let policy_changes = |id: &PolicyId| {
            let names = |policy: &Policy| policy.names_one(|set| dirty.sets.contains_key(set));
            change.policies.contains(id) || self.policies.get(id).is_none_or(names)
        };
        let changes = |(name, program): (&String, &Program)| {
            change.programs.contains(name) || program.spec.policies().any(policy_changes)
        };
        let programs = self.programs.iter().filter(|entry| changes(*entry));
        let programs: BTreeSet<_> = programs.map(|(name, _)| name).collect();
        let has_one = |of_endpoint: &Programs| of_endpoint.values().any(|name| programs.contains(name));
        let pods = self.pods.iter();
        let pods = pods.filter(|(id, pod)| dirty.endpoints.contains(*id) || has_one(&pod.programs));
        let hosts = self.hosts.iter();
        let hosts = hosts.filter(|(name, host)| dirty.hosts.contains(*name) || has_one(&host.programs));
        Interfaces {
            of_pods: pods.filter_map(|(_, pod)| pod.interface.clone()).collect(),
            of_hosts: hosts
                .flat_map(|(_, host)| &host.interfaces)
                .chain(&change.host_interfaces)
                .cloned()
                .collect(),
        }
    }

    /// The owner of a chain: a program, or one direction of a policy, by the name of its chain.
    pub(super) fn owner(&self, chain: &str) -> Option<String> {
        let program = self.programs.keys().find(|name| chain.starts_with(name.as_str())).cloned();
        let chains = |(id, policy): (&PolicyId, &Policy)| {
            let names = policy.jumps.keys().map(|(direction, stage)| chain_name(id, *direction, *stage));
            names.collect::<Vec<_>>()
        };
        program.or_else(|| self.policies.iter().flat_map(chains).find(|name| name == chain))
    }

    /// Leads interfaces to the programs of their endpoints.
    pub(super) fn open(&self, interfaces: &Interfaces, config: &Config, change: &mut Change) {
        for interface in &interfaces.of_pods {
            let mut owners = self.interfaces.get(interface).into_iter().flatten();
            let owner = match (owners.next(), owners.next()) {
                (Some(only), None) => self.pods.get(only),
                _ => None,
            };
            self.lead(interface, &Slot::OF_PODS, owner.map(|pod| &pod.programs), change);
            if !config.has_pod_prefix(interface) {
                let is_pods = self.interfaces.contains_key(interface) || self.unclaimed.contains(interface);
                let there = is_pods.then(Value::default);
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

    /// Leads an interface to programs, or to none.
    fn lead(&self, interface: &str, slots: &[Slot], programs: Option<&Programs>, change: &mut Change) {
        for slot in slots {
            let program = programs.and_then(|programs| self.programs.get(programs.get(slot)?));
            // If a host endpoint has no preDNAT policy, that of all interfaces applies, as in Calico.
            let program = program.filter(|program| {
                *slot != Slot::HostPreDnat || interface == EVERY_INTERFACE || !program.spec.tiers.is_empty()
            });
            let number = program.map(|program| Value::new(None, Some(Data::Number(program.number))));
            let spec = || SetSpec::number_map(&[Field::Interface]);
            change.element(slot.maps().0, spec, Key::interface(interface), number);
        }
    }

    /// Applies the dirty pods: their entries, and the programs and policies that are added and removed with them.
    fn update_pods(
        &mut self,
        state: &NodeState,
        dirty: &Dirty,
        around: &RenderContext<'_>,
        change: &mut Change,
    ) -> Objects {
        let mut affected = Objects::default();
        for id in &dirty.endpoints {
            let old = self.pods.remove(id);
            if let Some(old) = &old {
                self.give_host_ports_up(id, old, change);
                old.put_addresses(false, change);
                if around.recognised.is_none() {
                    self.count_addresses(old, false, change);
                }
                if let Some(interface) = &old.interface {
                    remove(&mut self.interfaces, interface, id);
                    affected.interfaces.insert(interface.clone());
                }
            }
            if let Some(endpoint) = state.endpoints.get(id) {
                let programs = Slot::OF_PODS.map(|slot| (slot, &*endpoint.program));
                let (interface, addresses) =
                    (around.interface_of(id, endpoint).map(str::to_owned), endpoint.addresses.clone());
                let host_ports = self.take_host_ports(id, endpoint, change);
                let programs = self.acquire_programs(&programs, &mut affected);
                let pod = Pod { interface, addresses, host_ports, programs };
                if around.recognised.is_none() {
                    self.count_addresses(&pod, true, change);
                }
                if let Some(interface) = &pod.interface {
                    affected.interfaces.insert(interface.clone());
                    self.interfaces.entry(interface.clone()).or_default().insert(id.clone());
                }
                self.pods.insert(id.clone(), pod);
            }
            self.release_programs(old.map(|old| old.programs), &mut affected);
        }
        affected
    }

    /// Counts a pod at its addresses, or no longer, and keeps the set of the addresses that pods have.
    fn count_addresses(&mut self, pod: &Pod, there: bool, change: &mut Change) {
        for address in &pod.addresses {
            let pods = self.addresses.entry(*address).or_default();
            *pods = if there { *pods + 1 } else { pods.saturating_sub(1) };
            let is_used = *pods > 0;
            if !is_used {
                self.addresses.remove(address);
            }
            let (name, spec) = skeleton::local_pods(Family::of(*address));
            change.element(name, || spec, Key::address(*address), is_used.then(Value::default));
        }
    }

    /// Applies the dirty host endpoints in the same way.
    fn update_hosts(
        &mut self,
        state: &NodeState,
        dirty: &Dirty,
        own_addresses: &BTreeMap<IpAddr, String>,
        affected: &mut Objects,
    ) {
        for name in &dirty.hosts {
            let old = self.hosts.remove(name);
            for interface in old.iter().flat_map(|old| &old.interfaces) {
                remove(&mut self.host_interfaces, interface, name);
                affected.host_interfaces.insert(interface.clone());
            }
            if let Some(endpoint) = state.host_endpoints.get(name) {
                let programs = Slot::OF_HOSTS.map(|slot| (slot, program_of(endpoint, slot)));
                let interfaces = interfaces_of(endpoint, own_addresses);
                for interface in &interfaces {
                    self.host_interfaces.entry(interface.clone()).or_default().insert(name.clone());
                    affected.host_interfaces.insert(interface.clone());
                }
                let host = Host { interfaces, programs: self.acquire_programs(&programs, affected) };
                self.hosts.insert(name.clone(), host);
            }
            self.release_programs(old.map(|old| old.programs), affected);
        }
    }

    /// Registers an endpoint's programs, and returns their names. The endpoint's older programs are released
    /// afterwards, so that a program that stays is not removed in between.
    fn acquire_programs(
        &mut self,
        programs: &[(Slot, &EndpointProgram)],
        affected: &mut Objects,
    ) -> Programs {
        let mut names = Programs::new();
        for (slot, program) in programs {
            // Pods share programs, whose names are long to compute.
            let shared = (std::ptr::from_ref(*program).addr(), *slot);
            let name = affected.names.entry(shared).or_insert_with(|| program_name(program, *slot)).clone();
            if !self.programs.contains_key(&name) {
                self.begin(&name, ProgramSpec::new(program, *slot), affected);
            }
            if let Some(program) = self.programs.get_mut(&name) {
                let users = program.users.entry(*slot).or_default();
                *users += 1;
                if *users == 1 {
                    affected.programs.insert(name.clone());
                }
            }
            names.insert(*slot, name);
        }
        names
    }

    /// Releases an endpoint's programs.
    fn release_programs(&mut self, programs: Option<Programs>, affected: &mut Objects) {
        for (slot, name) in programs.into_iter().flatten() {
            if let Some(users) = self.programs.get_mut(&name).and_then(|program| program.users.get_mut(&slot))
            {
                *users -= 1;
                if *users == 0 {
                    affected.programs.insert(name);
                }
            }
        }
    }

    /// Adds a new program.
    fn begin(&mut self, name: &str, spec: ProgramSpec, affected: &mut Objects) {
        for id in spec.policies() {
            let policy = self.policies.entry(id.clone()).or_default();
            if policy.programs.is_empty() {
                affected.policies.insert(id.clone());
            }
            policy.programs.insert(name.to_owned());
        }
        let mut number = digest_number(name);
        while number == skeleton::CLOSED || !self.numbers.insert(number) {
            number = number.wrapping_add(1);
        }
        let program = Program { spec, number, users: BTreeMap::new(), written: RenderedProgram::default() };
        self.programs.insert(name.to_owned(), program);
    }

    /// Adds the policies that have changed, and those with sets whose parts have changed.
    fn add_affected_policies(&self, dirty: &Dirty, reshaped: &BTreeSet<SetId>, affected: &mut Objects) {
        let known = dirty.policies.iter().filter(|id| self.policies.contains_key(*id));
        affected.policies.extend(known.cloned());
        if !reshaped.is_empty() {
            let about =
                self.policies.iter().filter(|(_, policy)| policy.names_one(|set| reshaped.contains(set)));
            affected.policies.extend(about.map(|(id, _)| id.clone()));
        }
    }

    fn write_policies(
        &mut self,
        state: &NodeState,
        affected: &Objects,
        around: &RenderContext<'_>,
        exists: &dyn Fn(&str) -> bool,
    ) {
        for id in &affected.policies {
            let Some(policy) = self.policies.get_mut(id) else { continue };
            let rules = state.policies.get(id).map(AsRef::as_ref);
            for direction in DIRECTIONS {
                let name = |stage| chain_name(id, direction, stage);
                let mut refused =
                    STAGES_OF_POLICIES.iter().filter_map(|stage| around.refused.get(&name(*stage)));
                let new = match refused.next() {
                    Some(refusal) => Lines::deny(problem(id, refusal)),
                    None => {
                        let room = counting::room(state, around.room);
                        let of_set = |id: &SetId| state.sets.get(id).map_or(0, |(_, members)| members.len());
                        let limits =
                            Limits { room, is_too_large: &|id| of_set(id) > around.config.most_members };
                        Lines::new(id, rules, direction, exists, &limits)
                    }
                };
                self.problems += usize::from(new.problem.is_some());
                let old = std::mem::replace(&mut policy.lines[index(direction)], new);
                self.problems -= usize::from(old.problem.is_some());
            }
        }
    }

    /// Adds the programs that name a changed policy, or that look up members of a changed set.
    fn add_affected_programs(&self, dirty: &Dirty, affected: &mut Objects) {
        for policy in affected.policies.iter().filter_map(|id| self.policies.get(id)) {
            affected.programs.extend(policy.programs.iter().cloned());
        }
        let is_replaced = |what: &ChangedSet| *what == ChangedSet::Whole;
        if dirty.sets.values().any(is_replaced) {
            let names_replaced =
                |policy: &Policy| policy.names_one(|set| dirty.sets.get(set).is_some_and(is_replaced));
            let policies = self.policies.values().filter(|policy| names_replaced(policy));
            let looks_up = |name: &&String| {
                self.programs.get(*name).is_some_and(|program| !program.written.lookups.is_empty())
            };
            affected.programs.extend(policies.flat_map(|policy| &policy.programs).filter(looks_up).cloned());
        }
    }

    /// Renders programs, and removes those without endpoints.
    fn write_programs(
        &mut self,
        state: &NodeState,
        kernel: &Table,
        affected: &mut Objects,
        change: &mut Change,
        around: &RenderContext<'_>,
    ) {
        // The number of jumps to each chain of a policy before the change. Programs that replace each other jump to the
        // same chains, which are not written again.
        let mut jumps_before: BTreeMap<JumpTarget, usize> = BTreeMap::new();
        for name in &affected.programs {
            let Some(program) = self.programs.get(name) else { continue };
            let is_used = program.users.values().any(|users| *users > 0);
            let new =
                if is_used { self.written(name, program, state, around) } else { RenderedProgram::default() };
            let Some(program) = self.programs.get_mut(name) else { continue };
            let old = std::mem::replace(&mut program.written, new);
            self.keys = self.keys - old.keys() + program.written.keys();
            self.problems += usize::from(program.written.problem.is_some());
            self.problems -= usize::from(old.problem.is_some());
            for (slot, users) in &program.users {
                // A packet returns from a program only while the program is being replaced. Then the next rule closes
                // pods. For a host, the next rule would be `*`, which must not be evaluated then.
                let lead = if Slot::OF_PODS.contains(slot) { Verdict::Jump } else { Verdict::Goto };
                let first = Value::new(None, Some(Data::Verdict(lead(first_chain(name)))));
                let (map, key) = (slot.maps().1, skeleton::program_key(program.number));
                change.element(map, skeleton::program_chains, key, (*users > 0).then_some(first));
            }
            program.users.retain(|_, users| *users > 0);
            program.written.put(&old, state, kernel, change);
            let chain = (program.spec.direction, program.spec.stage.of_policies());
            for (jumps, by) in [(&program.written.jumps, 1), (&old.jumps, -1)] {
                for id in jumps {
                    if let Some(policy) = self.policies.get_mut(id) {
                        let count = policy.jumps.entry(chain).or_default();
                        jumps_before.entry((id.clone(), chain)).or_insert(*count);
                        *count = count.saturating_add_signed(by);
                    }
                }
            }
            if !is_used {
                self.numbers.remove(&program.number);
                for id in program.spec.policies() {
                    if let Some(policy) = self.policies.get_mut(id) {
                        policy.programs.remove(name);
                        if policy.programs.is_empty() {
                            affected.policies.insert(id.clone());
                        }
                    }
                }
                self.programs.remove(name);
            }
        }
        self.add_policies_with_other_jumps(jumps_before, affected);
    }

    /// Adds the policies whose chains are needed now and were not before, or the opposite.
    fn add_policies_with_other_jumps(&self, before: BTreeMap<JumpTarget, usize>, affected: &mut Objects) {
        for ((id, chain), before) in before {
            let now = self.policies.get(&id).and_then(|policy| policy.jumps.get(&chain)).copied();
            if (before > 0) != (now.unwrap_or_default() > 0) {
                affected.policies.insert(id);
            }
        }
    }

    /// The rendered form of a program.
    fn written(
        &self,
        name: &str,
        program: &Program,
        state: &NodeState,
        around: &RenderContext<'_>,
    ) -> RenderedProgram {
        if let Some(problem) = around.refused.get(name) {
            return closed(name, problem.clone());
        }
        let unknown = Lines::default();
        let sources = Sources {
            lines: &|id| match self.policies.get(id) {
                Some(policy) => policy.lines(program.spec.direction),
                None => &unknown,
            },
            members: &|id| state.sets.get(id).map_or(0, |(_, members)| members.len()),
            deny: state.settings.deny,
            counts: counting::is_enabled(state),
            in_a_row: around.config.rules_in_a_row,
            most_keys: counting::most_keys(state, MAX_KEYS)
                .saturating_sub(self.keys - program.written.keys()),
        };
        write(name, &program.spec, &sources)
    }

    /// Adds the chains of policies to which programs jump, and removes policies that no program names.
    fn put_policies(&mut self, state: &NodeState, kernel: &Table, affected: &Objects, change: &mut Change) {
        for id in &affected.policies {
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

    /// Updates lookup keys when set members change.
    fn update_lookups(&self, state: &NodeState, dirty: &Dirty, affected: &Objects, change: &mut Change) {
        let unaffected = self.programs.iter().filter(|(name, _)| !affected.programs.contains(*name));
        for (name, lookup) in unaffected.flat_map(|(_, program)| &program.written.lookups) {
            for (key, wanted) in lookup.affected(state, &dirty.sets) {
                change.element(name, || lookup.spec(), key, wanted.then(Value::default));
            }
        }
    }
}

impl Pod {
    /// Allows packets from the pod's addresses on its interface, or removes the permission.
    fn put_addresses(&self, there: bool, change: &mut Change) {
        let Some(interface) = &self.interface else { return };
        for address in &self.addresses {
            let (name, spec) = skeleton::own_addresses(Family::of(*address));
            let key = Key::interface_address(interface, *address);
            change.element(name, || spec, key, there.then(Value::default));
        }
    }
}

impl Policy {
    fn lines(&self, direction: Direction) -> &Lines {
        &self.lines[index(direction)]
    }

    /// Whether it names a set for which this holds.
    fn names_one(&self, is_meant: impl Fn(&SetId) -> bool) -> bool {
        self.lines.iter().flat_map(|lines| &lines.sets).any(is_meant)
    }
}

/// Removes a value from a set of values, and the set if it is empty.
fn remove<T: Ord>(sets: &mut BTreeMap<String, BTreeSet<T>>, key: &str, value: &T) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}

/// The program of a host endpoint for a slot.
fn program_of(endpoint: &HostEndpoint, slot: Slot) -> &EndpointProgram {
    match slot.stage() {
        Stage::Untracked => &endpoint.program.untracked,
        Stage::PreDnat => &endpoint.program.pre_dnat,
        Stage::Forward => &endpoint.program.forward,
        Stage::Normal => &endpoint.program.normal,
    }
}

/// The interface of that name; without a name, those that have one of the addresses.
fn interfaces_of(endpoint: &HostEndpoint, own_addresses: &BTreeMap<IpAddr, String>) -> BTreeSet<String> {
    match &endpoint.interface {
        Some(name) => [name.clone()].into(),
        None => endpoint.addresses.iter().filter_map(|address| own_addresses.get(address)).cloned().collect(),
    }
}

/// The index of a direction in [`DIRECTIONS`].
fn index(direction: Direction) -> usize {
    match direction {
        Direction::Ingress => 0,
        Direction::Egress => 1,
    }
}

//! Programs and endpoints as chains.
//!
//! ```text
//! forward ─ from a pod ─▶ from-workload ─ map ─▶ from-cali… (own address? established?) ─ goto ─▶ e-…-0 ─ Pass ─▶ …
//!         └ to a pod ───▶ to-workload ─── map ─────────────────────────────── goto ─▶ i-…-0
//! input ─── from a pod ─▶ from-workload …
//! ```
//! The base chain jumps, everything behind only goes: so `return`, wherever it stands, is back in the base chain, and
//! means that this side allows the packet. A chain that ends falls back there too, so each ends in a verdict. Pods with
//! the same policies share their chains.

use std::collections::BTreeSet;

use tortie_api::net::{Action, Direction};
use tortie_dataplane::{Endpoint, NodeState};
use tortie_policy::program::{EndOfTier, EndpointProgram, PolicyId, SetId};

use super::matches::{Side, conjunctions, family_is, in_ranges, load_address};
use super::sets::{Family, digest, merge, set};
use super::{Config, EndpointToHost};
use crate::nftables::expr::state;
use crate::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Element, Expr, Field, Header, Hook, Key, MetaKey, Rule, Set, SetRef,
    SetSpec, Verdict, rule_length,
};

/// The names of what is always there.
pub const FORWARD: &str = "forward";
pub const INPUT: &str = "input";
pub const FROM_WORKLOAD: &str = "from-workload";
pub const TO_WORKLOAD: &str = "to-workload";
/// The maps from a pod's interface to its chains.
pub const FROM_MAP: &str = "from-workload-map";
pub const TO_MAP: &str = "to-workload-map";
/// The nodes that VXLAN packets are taken from.
pub const VXLAN_PEERS: &str = "vxlan-peers";

/// The nflog groups that Log rules send to, as Calico's (`calico.md` 6.5).
const LOG_GROUP_INGRESS: u16 = 1;
const LOG_GROUP_EGRESS: u16 = 2;

/// How deep chains may lead to one another, from the base chain (`NFT_JUMP_STACK_SIZE`). Three lie before a program.
const MOST_CHAINS: usize = 12;

/// The most rules of one direction of a program. So many, one after another, are milliseconds for each new flow.
const MOST_RULES: usize = 20_000;
/// The most bytes of messages of one direction of a program.
const MOST_BYTES: usize = 8 << 20;

/// One direction of a program, as chains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The chains, by name, the first one first.
    pub chains: Vec<(String, Chain)>,
    /// The policies that are in it.
    pub policies: BTreeSet<PolicyId>,
    /// The sets that its rules name.
    pub sets: BTreeSet<SetId>,
    /// Why it cannot be written down; it then drops everything.
    pub problem: Option<String>,
}

/// The name that the chains of one direction of a program begin with: the same for all pods with the same policies.
pub fn program_name(program: &EndpointProgram, direction: Direction) -> String {
    let prefix = match direction {
        Direction::Ingress => "i",
        Direction::Egress => "e",
    };
    let content = format!("{:?} {:?}", program.tiers(direction), program.profiles);
    format!("{prefix}-{}", digest(content.as_bytes()))
}

/// The name of the first chain of a program.
pub fn first_chain(program: &str) -> String {
    format!("{program}-0")
}

/// A program that drops everything, because of a problem.
pub fn closed(name: &str, program: &EndpointProgram, problem: String) -> Rendered {
    let chain =
        Chain { base: None, rules: vec![verdict(Verdict::Drop, "closed: the policy cannot be enforced")] };
    Rendered {
        chains: vec![(first_chain(name), chain)],
        policies: program.policy_ids().cloned().collect(),
        sets: BTreeSet::new(),
        problem: Some(problem),
    }
}

/// One direction of a program. `exists` says which nftables sets there are, and `room` how many bytes fit in one
/// transaction.
pub fn render(
    name: &str,
    program: &EndpointProgram,
    direction: Direction,
    state: &NodeState,
    exists: &dyn Fn(&str) -> bool,
    room: usize,
) -> Rendered {
    let size = Size { most_bytes: MOST_BYTES.min(room), ..Size::default() };
    let (chains, rendered) = (vec![Vec::new()], Rendered::default());
    let mut writer = Writer { name, direction, state, exists, chains, rendered, size };
    if let Err(problem) = writer.program(program) {
        let mut closed = closed(name, program, problem);
        closed.sets = writer.rendered.sets;
        return closed;
    }
    if writer.chains.len() > MOST_CHAINS {
        let problem =
            format!("{} tiers with Pass rules are more than the kernel's limit", writer.chains.len());
        return closed(name, program, problem);
    }
    let named = |(index, rules)| (format!("{name}-{index}"), Chain { base: None, rules });
    let chains = writer.chains.into_iter().enumerate().map(named).collect();
    Rendered { chains, ..writer.rendered }
}

struct Writer<'a> {
    name: &'a str,
    direction: Direction,
    state: &'a NodeState,
    exists: &'a dyn Fn(&str) -> bool,
    chains: Vec<Vec<Rule>>,
    rendered: Rendered,
    size: Size,
}

/// How large a program has become.
#[derive(Default)]
struct Size {
    most_bytes: usize,
    rules: usize,
    bytes: usize,
    /// The policy with the most bytes, with its rules and bytes.
    largest: Option<(PolicyId, usize, usize)>,
}

impl Size {
    /// Counts a policy's rules; what to do if it is too much.
    fn add(&mut self, policy: &PolicyId, rules: usize, bytes: usize) -> Result<(), String> {
        (self.rules, self.bytes) = (self.rules + rules, self.bytes + bytes);
        match &mut self.largest {
            Some((largest, its_rules, its_bytes)) if largest == policy => {
                (*its_rules, *its_bytes) = (*its_rules + rules, *its_bytes + bytes);
            }
            Some((_, _, most)) if *most >= bytes => {}
            largest => *largest = Some((policy.clone(), rules, bytes)),
        }
        if self.rules <= MOST_RULES && self.bytes <= self.most_bytes {
            return Ok(());
        }
        let largest = self.largest.as_ref().map(|(id, rules, bytes)| {
            format!("; most of it is {id}, with {rules} rules and {} kB so far", bytes / 1000)
        });
        Err(format!(
            "its policies are more than {MOST_RULES} nftables rules or {} kB{}: put their addresses into a network \
             set, or join rules",
            self.most_bytes / 1000,
            largest.unwrap_or_default(),
        ))
    }
}

impl Writer<'_> {
    /// A tier begins a chain of its own only if a Pass rule must get there.
    fn program(&mut self, program: &EndpointProgram) -> Result<(), String> {
        for tier in program.tiers(self.direction) {
            let next = Verdict::Goto(format!("{}-{}", self.name, self.chains.len()));
            let passes = self.policies(&tier.policies, &next)?;
            let end = format!("end of tier {}", tier.name);
            match tier.end {
                EndOfTier::Deny => self.rule(verdict(Verdict::Drop, &end)),
                EndOfTier::Pass if passes => self.rule(verdict(next, &end)),
                EndOfTier::Pass => {}
            }
            if passes {
                self.chains.push(Vec::new());
            } else if tier.end == EndOfTier::Deny {
                return Ok(()); // nothing comes further
            }
        }
        // A profile has nowhere to pass to.
        self.policies(&program.profiles, &Verdict::Drop)?;
        self.rule(verdict(Verdict::Drop, "no profile allows it"));
        Ok(())
    }

    /// Writes policies one after another, and says whether one of their rules passes.
    fn policies(&mut self, ids: &[PolicyId], pass: &Verdict) -> Result<bool, String> {
        let mut passes = false;
        for id in ids {
            self.rendered.policies.insert(id.clone());
            let Some(policy) = self.state.policies.get(id) else {
                self.rule(verdict(Verdict::Drop, &format!("{id} is not known")));
                continue;
            };
            for (index, rule) in policy.direction(self.direction).iter().enumerate() {
                self.rendered.sets.extend(rule.set_ids().cloned());
                let comment = format!("{id} {:?} rule {}", self.direction, index + 1);
                let tests = conjunctions(rule, self.exists).map_err(|_| {
                    format!("{comment} has more alternatives than can be written as nftables rules")
                })?;
                let action = self.action(rule.action, id, pass);
                passes |= rule.action == Action::Pass;
                for mut exprs in tests {
                    exprs.push(action.clone());
                    let rule = Rule::new(exprs, &comment);
                    // Near enough: a chain that is a little too large after all is refused by the transaction.
                    self.size.add(id, 1, rule_length(self.name, self.name, &rule))?;
                    self.rule(rule);
                }
            }
        }
        Ok(passes)
    }

    fn action(&self, action: Action, policy: &PolicyId, pass: &Verdict) -> Expr {
        match action {
            Action::Allow => Expr::Verdict(Verdict::Return),
            Action::Deny => Expr::Verdict(Verdict::Drop),
            Action::Pass => Expr::Verdict(pass.clone()),
            Action::Log => Expr::Log {
                group: match self.direction {
                    Direction::Ingress => LOG_GROUP_INGRESS,
                    Direction::Egress => LOG_GROUP_EGRESS,
                },
                prefix: short(&policy.to_string(), LONGEST_PREFIX).to_owned(),
            },
        }
    }

    fn rule(&mut self, rule: Rule) {
        if let Some(chain) = self.chains.last_mut() {
            chain.push(rule);
        }
    }
}

/// `NF_LOG_PREFIXLEN` without its NUL.
const LONGEST_PREFIX: usize = 127;

/// The beginning of a text, in at most so many bytes.
pub fn short(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// The chain for packets from a pod: only those from its own addresses go on, be it in an established flow, which is not
/// the pod's own if its packets carry another pod's address; and only those that begin a flow to its program.
pub fn from_endpoint(endpoint: &Endpoint, program: &str) -> Chain {
    let foreign = [Family::V4, Family::V6].map(|family| {
        let own = endpoint.addresses.iter().filter(|address| Family::of(**address) == family);
        let own = merge(own.map(|address| (Key::address(*address), Key::address(*address))).collect());
        let test = in_ranges(load_address(Side::Source, family), family.field(), &own, true);
        let mut exprs = family_is(family);
        exprs.extend(test.unwrap_or_default());
        exprs.push(Expr::Verdict(Verdict::Drop));
        Rule::new(exprs, "not from an address of its own")
    });
    let mut rules = foreign.to_vec();
    rules.extend(by_flow());
    rules.push(verdict(Verdict::Goto(first_chain(program)), ""));
    Chain { base: None, rules }
}

/// The name of [`from_endpoint`]'s chain.
pub fn from_chain(interface: &str) -> String {
    format!("from-{interface}")
}

/// The chains through which all packets come, and the set of the nodes that VXLAN packets are taken from.
pub fn frame(config: &Config, state: &NodeState) -> (Vec<(String, Chain)>, Option<Set>) {
    let peers = vxlan_peers(state);
    let base = |hook| Some(BaseChain { kind: ChainKind::Filter, hook, priority: 0, drop: false });
    let mut input = Vec::new();
    if let Some((port, _)) = &peers {
        input.push(vxlan_guard(*port));
    }
    for from in interfaces(config, state) {
        let from_pod = |exprs: Vec<Expr>, comment| Rule::new([from.input(), exprs].concat(), comment);
        input.push(from_pod(neighbour_discovery(), "a pod and its gateway find each other"));
        input.push(from_pod(vec![jump(FROM_WORKLOAD)], ""));
        if config.endpoint_to_host == EndpointToHost::Drop {
            input.push(from_pod(vec![Expr::Verdict(Verdict::Drop)], "DefaultEndpointToHostAction"));
        }
    }
    let interfaces = interfaces(config, state);
    let from =
        interfaces.iter().map(|name| Rule::new([name.input(), vec![jump(FROM_WORKLOAD)]].concat(), ""));
    let to = interfaces.iter().map(|name| Rule::new([name.output(), vec![jump(TO_WORKLOAD)]].concat(), ""));
    let chains = vec![
        (FORWARD.to_owned(), Chain { base: base(Hook::Forward), rules: from.chain(to).collect() }),
        (INPUT.to_owned(), Chain { base: base(Hook::Input), rules: input }),
        (FROM_WORKLOAD.to_owned(), from_workload(state)),
        (TO_WORKLOAD.to_owned(), to_workload()),
    ];
    (chains, peers.map(|(_, set)| set))
}

/// Packets from pods go to the chain of their interface, whatever flow they belong to; but no tunnels of their own, as
/// another node would take what is in them for packets of ours (`calico.md` 6.3).
fn from_workload(state: &NodeState) -> Chain {
    let network = state.node.as_ref().map(|node| node.network.clone()).unwrap_or_default();
    let drop = || Expr::Verdict(Verdict::Drop);
    let ipip = [super::matches::protocol_in(&[4], false), vec![drop()]].concat();
    let vxlan = [udp_to(network.port), vec![drop()]].concat();
    let tunnels = [Rule::new(vxlan, "no VXLAN from pods"), Rule::new(ipip, "no IPIP from pods")];
    let rules = tunnels.into_iter().chain(by_interface(MetaKey::InputInterface, FROM_MAP)).collect();
    Chain { base: None, rules }
}

/// Packets to pods of established flows pass, those of none do not, and the rest is asked of the pod.
fn to_workload() -> Chain {
    let rules = by_flow().into_iter().chain(by_interface(MetaKey::OutputInterface, TO_MAP)).collect();
    Chain { base: None, rules }
}

/// Packets of established flows pass, and those of none do not.
fn by_flow() -> [Rule; 2] {
    let in_state = |bits: u32, verdict| {
        let exprs = vec![
            Expr::CtState { register: 0 },
            Expr::Bitwise { source: 0, destination: 0, mask: bits.to_ne_bytes().to_vec(), xor: vec![0; 4] },
            Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
            Expr::Verdict(verdict),
        ];
        Rule::new(exprs, "")
    };
    [in_state(state::ESTABLISHED | state::RELATED, Verdict::Accept), in_state(state::INVALID, Verdict::Drop)]
}

/// The chain of the pod; an interface that is no pod's (yet, or any more) is closed.
fn by_interface(interface: MetaKey, map: &str) -> [Rule; 2] {
    let to_pod = vec![
        Expr::Meta { register: 0, key: interface },
        Expr::VerdictMap { register: 0, set: SetRef::named(map) },
    ];
    [Rule::new(to_pod, ""), verdict(Verdict::Drop, "no pod's interface")]
}

/// Interfaces of pods: by the beginning of their name, or by the whole of it.
struct Interface<'a>(&'a str, bool);

impl Interface<'_> {
    fn input(&self) -> Vec<Expr> {
        self.is(MetaKey::InputInterface)
    }

    fn output(&self) -> Vec<Expr> {
        self.is(MetaKey::OutputInterface)
    }

    fn is(&self, key: MetaKey) -> Vec<Expr> {
        let Self(name, whole) = self;
        let value = if *whole { Key::interface(name).bytes().to_vec() } else { name.as_bytes().to_vec() };
        vec![Expr::Meta { register: 0, key }, Expr::Cmp { register: 0, op: CmpOp::Equal, value }]
    }
}

/// All with the prefix, and pods' interfaces without it.
fn interfaces<'a>(config: &'a Config, state: &'a NodeState) -> Vec<Interface<'a>> {
    let others: BTreeSet<_> = state
        .endpoints
        .values()
        .map(|endpoint| &*endpoint.host_interface)
        .filter(|name| !name.starts_with(&config.workload_prefix))
        .collect();
    let prefix = std::iter::once(Interface(&config.workload_prefix, false));
    prefix.chain(others.into_iter().map(|name| Interface(name, true))).collect()
}

/// Neighbour solicitations and advertisements, and router solicitations (semantics 22).
fn neighbour_discovery() -> Vec<Expr> {
    let types = [133, 135, 136].map(|icmp_type| Element::key(Key::byte(icmp_type)));
    let types = SetRef::Inline(Box::new(set(SetSpec::hash(&[Field::Icmpv6Type]), types)));
    let mut exprs = family_is(Family::V6);
    exprs.extend(super::matches::protocol_in(&[58], false));
    exprs.extend([
        Expr::Payload { register: 0, header: Header::Transport, offset: 0, length: 1 },
        Expr::Lookup { register: 0, set: types, invert: false },
        Expr::Verdict(Verdict::Accept),
    ]);
    exprs
}

/// The VXLAN port, and the addresses of the nodes that packets to it may come from; only where there is an overlay.
fn vxlan_peers(state: &NodeState) -> Option<(u16, Set)> {
    let node = state.node.as_ref().filter(|node| node.vtep.is_some())?;
    let peers = state.vteps.values().map(|vtep| Element::key(Key::address(vtep.parent.into())));
    Some((node.network.port, set(SetSpec::hash(&[Field::Ipv4]), peers)))
}

/// VXLAN packets from elsewhere would put packets with any source behind the pods' policy.
fn vxlan_guard(port: u16) -> Rule {
    let mut exprs = udp_to(port);
    exprs.extend(family_is(Family::V4));
    exprs.extend([
        load_address(Side::Source, Family::V4),
        Expr::Lookup { register: 0, set: SetRef::named(VXLAN_PEERS), invert: true },
        Expr::Verdict(Verdict::Drop),
    ]);
    Rule::new(exprs, "VXLAN only from nodes")
}

fn udp_to(port: u16) -> Vec<Expr> {
    let mut exprs = super::matches::protocol_in(&[17], false);
    exprs.extend([
        Expr::Payload { register: 0, header: Header::Transport, offset: 2, length: 2 },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: port.to_be_bytes().to_vec() },
    ]);
    exprs
}

fn jump(chain: &str) -> Expr {
    Expr::Verdict(Verdict::Jump(chain.to_owned()))
}

fn verdict(verdict: Verdict, comment: &str) -> Rule {
    Rule::new(vec![Expr::Verdict(verdict)], comment)
}

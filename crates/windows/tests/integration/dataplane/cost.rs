//! The cost of policy: never more than the naive expansion, independent of history, and small for small changes. All
//! figures are read from what HNS has and from what is sent.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::dataplane::node::*;
use crate::dataplane::programs::*;
use ipnet::IpNet;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_dataplane::{Delta, NodeState};
use tortie_hcn::schema::{Acl, AclAction, AclDirection, Modify, RequestType, lenient};
use tortie_hcn::{Call, Kind};
use tortie_hns_emulator::Config;
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Member, Rule, SetId, SetKind};
use tortie_windows::{Because, Cost, CostModel, Costing};

fn with_sets() -> impl Strategy<Value = WindowsPolicySets> {
    select(vec![WindowsPolicySets::Disabled, WindowsPolicySets::Enabled])
}

fn ready(sets: WindowsPolicySets) -> Node {
    let node = Node::with(Config::new(Config::SERVER_2022, NODE), sets);
    node.connect();
    node
}

fn cost_of(state: &NodeState) -> Cost {
    costing(state).cost(&state.endpoints[&pod_id()])
}

fn costing(state: &NodeState) -> Costing<'_, NodeState> {
    Costing::new(state, node_addresses())
}

/// The part that Calico for Windows can express and its API allows; without SCTP ports, which it writes as if HNS
/// supported them, and without Pass in profiles, which it renders as Deny.
fn expressible(mut scenario: Scenario) -> Scenario {
    for (name, rules) in POLICIES.iter().zip(&mut scenario.policies) {
        if scenario.program.profiles.contains(&policy_id(name)) {
            let passes = rules.ingress.iter_mut().chain(&mut rules.egress);
            passes.filter(|rule| rule.action == Action::Pass).for_each(|rule| rule.action = Action::Deny);
        }
    }
    scenario.address_ports.retain(|(_, protocol, _)| *protocol != Protocol::SCTP);
    for rule in
        scenario.policies.iter_mut().flat_map(|rules| rules.ingress.iter_mut().chain(&mut rules.egress))
    {
        (rule.not_protocol, rule.icmp, rule.not_icmp) = (None, None, None);
        for side in [&mut rule.source, &mut rule.destination] {
            side.not_nets.clear();
            side.not_sets.clear();
            side.not_ports.clear();
            side.not_port_sets.clear();
            let has_ports = rule.protocol.is_some_and(Protocol::has_ports);
            if !side.ports.is_empty() && (!has_ports || rule.protocol == Some(Protocol::SCTP)) {
                rule.protocol = Some(Protocol::TCP);
            }
        }
    }
    scenario
}

/// The same with selectors that select pods, and named ports that exist.
fn where_rules_find_somebody(scenario: &Scenario) -> Vec<Delta> {
    const ALL: &str = "0.0.0.0/0";
    let everybody: BTreeSet<IpNet> = [ALL.parse().unwrap()].into();
    // A pod in each network that rules name, and in the intersection of each two that overlap.
    let some = (0..8).map(|last| [10, 0, 0, last]);
    let others = [[10, 244, 3, 5], [10, 244, 3, 6], [192, 168, 0, 1], [0; 4], [255; 4]];
    let some: Vec<IpAddr> = some.chain(others).map(IpAddr::from).collect();
    let ports = scenario
        .address_ports
        .iter()
        .flat_map(|(_, protocol, port)| some.iter().map(move |address| (*address, *protocol, *port)));
    let (nets, others) = (everybody.clone(), everybody);
    let scenario = Scenario { nets, others, address_ports: ports.collect(), ..scenario.clone() };
    let mut deltas = scenario.deltas();
    let everybody = vec![Member::Net(ALL.parse().unwrap())].into_iter().collect();
    deltas.push(Delta::SetCreated(SetId::new("s:unknown"), SetKind::Nets, everybody));
    deltas
}

fn state(deltas: &[Delta]) -> NodeState {
    let mut state = NodeState::default();
    deltas.iter().for_each(|delta| state.apply(delta));
    state
}

/// The ACLs of a direction in the order of evaluation, without priorities. Consecutive ACLs with the same action form
/// a group, because their order does not matter.
fn in_order(node: &Node, direction: &AclDirection) -> Vec<(AclAction, BTreeSet<String>)> {
    let mut acls: Vec<Acl> = node.acls().into_iter().filter(|acl| acl.direction == *direction).collect();
    acls.sort_by_key(|acl| acl.priority);
    let text = |acl: &Acl| serde_json::to_string(&Acl { priority: 0, ..acl.clone() }).unwrap();
    let groups = acls.chunk_by(|one, next| one.action == next.action);
    groups.map(|group| (group[0].action.clone(), group.iter().map(text).collect())).collect()
}

/// The number of ACLs before policy that drop tunnels from pods. Calico for Windows has none, so neither has the
/// naive expansion.
const TUNNELS: usize = 2;

/// The number of ACLs that the calls add to endpoints and remove from them.
fn written(calls: &[Call]) -> usize {
    let mut written = 0;
    for call in calls {
        if let Call::Modify { kind: Kind::Endpoint, settings, .. } = call {
            let modify: Modify = lenient(settings).unwrap();
            assert_ne!(modify.request_type, RequestType::Update, "what stays is not sent again");
            written += modify.settings["Policies"].as_array().unwrap().len();
        }
    }
    written
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn there_are_never_more_acls_than_in_the_naive_expansion(scenario in scenarios(false)) {
        let state = state(&expressible(scenario).deltas());
        let cost = cost_of(&state);
        prop_assert_eq!(cost.left_out, 0);
        prop_assert!(!cost.cut);
        prop_assert!(
            cost.lists.acls <= cost.naive.acls + TUNNELS, "{} > {}\n{:#?}", cost.lists.acls, cost.naive.acls,
            [CostModel::Lists, CostModel::Naive].map(|model| costing(&state).acls(&state.endpoints[&pod_id()], model))
        );
        prop_assert!(cost.lists.pairs <= cost.naive.pairs + TUNNELS as u64);
    }

    /// With sets, the cost of a rule does not depend on their members: it has its ACLs even without members. So the
    /// naive expansion is that of a cluster where every rule finds somebody. Packets from an endpoint need no more
    /// ACLs than there, packets to it at most twice as many: it is not known what a set means in these ACLs (policy
    /// decision 25), so there is one ACL for each of the two interpretations.
    #[test]
    fn with_sets_there_are_at_most_twice_as_many_acls(scenario in scenarios(false)) {
        let scenario = expressible(scenario);
        let everybody = state(&where_rules_find_somebody(&scenario));
        let state = state(&scenario.deltas());
        let acls = |state, model, direction| -> Vec<Acl> {
            let acls = costing(state).acls(&state.endpoints[&pod_id()], model);
            acls.into_iter().filter(|acl| acl.direction == direction).collect()
        };
        for (direction, times, more) in [(AclDirection::In, 2, 0), (AclDirection::Out, 1, TUNNELS)] {
            let sets = acls(&state, CostModel::Sets, direction.clone());
            let naive = acls(&everybody, CostModel::Naive, direction);
            let (most, count) = (times * naive.len() + more, sets.len());
            prop_assert!(count <= most, "{count} > {most}\n{sets:#?}\n{naive:#?}");
        }
    }

    /// The computed cost is what HNS has.
    #[test]
    fn the_cost_equals_the_number_of_acls_in_hns(sets in with_sets(), scenario in scenarios(true)) {
        let mut node = ready(sets);
        node.apply(&scenario.deltas());
        let cost = cost_of(&node.state);
        let acls = node.acls();
        let tally = if sets == WindowsPolicySets::Enabled { cost.sets } else { cost.lists };
        prop_assert_eq!(tally, acls.iter().collect());
    }

    /// The same state gives the same list, whatever came before, and in whatever order and batches it arrived.
    #[test]
    fn the_list_depends_only_on_the_state(
        sets in with_sets(), before in scenarios(false), (after, portions) in scenarios(false).prop_flat_map(|scenario| {
            let deltas = scenario.deltas();
            let portions = vec(1_usize..4, deltas.len());
            (Just(deltas).prop_shuffle(), portions)
        }),
    ) {
        let mut straight = ready(sets);
        straight.apply(&after);
        let mut round_about = ready(sets);
        round_about.apply(&before.deltas());
        let mut rest = after.as_slice();
        for portion in portions {
            let (now, later) = rest.split_at(portion.min(rest.len()));
            round_about.apply(now);
            rest = later;
        }
        for direction in [AclDirection::In, AclDirection::Out] {
            prop_assert_eq!(in_order(&straight, &direction), in_order(&round_about, &direction));
        }
    }
}

/// A typical rule: some peers, TCP or UDP, some ports.
fn usual_rule() -> impl Strategy<Value = Rule> {
    let action = select(vec![Action::Allow, Action::Allow, Action::Deny]);
    let port = (1_u16..6).prop_map(|port| PortRange { first: port, last: port });
    (action, any::<bool>(), select(vec!["s:a", "s:b", "s:c"]), any::<bool>(), vec(port, 0..3)).prop_map(
        |(action, tcp, set, by_net, ports)| {
            let peer = match by_net {
                true => EntityMatch { nets: vec!["10.0.0.64/26".parse().unwrap()], ..EntityMatch::default() },
                false => EntityMatch { sets: vec![SetId::new(set)], ..EntityMatch::default() },
            };
            Rule {
                protocol: Some(if tcp { Protocol::TCP } else { Protocol::UDP }),
                source: peer,
                destination: EntityMatch { ports, ..EntityMatch::default() },
                ..Rule::all(action)
            }
        },
    )
}

fn with_rules(rules: &[Rule]) -> Vec<Delta> {
    let nets = |nets: &[&str]| nets.iter().map(|net| Member::Net(net.parse().unwrap())).collect();
    let set = |id: &str, members: &[&str]| Delta::SetCreated(SetId::new(id), SetKind::Nets, nets(members));
    let program =
        EndpointProgram { ingress: vec![tier("default", &["long"], EndOfTier::Deny)], ..open_program() };
    vec![
        local_node(),
        own_block(),
        set("s:a", &["10.0.0.1/32", "10.0.0.7/32"]),
        set("s:b", &["10.0.0.2/32"]),
        set("s:c", &["10.0.0.3/32", "10.0.0.4/31"]),
        allow_all(),
        policy("long", rules.to_vec(), vec![]),
        endpoint(program),
    ]
}

/// A rule of one protocol about some peers is one ACL, or with sets two, one for each interpretation. When it is
/// added, neighbours that were merged become two, with as many ACLs; when it is removed, one; and ACLs for equal
/// packets are added or removed.
const MAX_WRITTEN: usize = 16;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// However long the policy is.
    #[test]
    fn one_rule_changes_few_acls(
        sets in with_sets(), rules in vec(usual_rule(), 1..60), at in any::<prop::sample::Index>(), other in usual_rule(), change in 0..3,
    ) {
        let mut node = ready(sets);
        node.apply(&with_rules(&rules));
        node.hns.take();
        let mut changed = rules.clone();
        let at = at.index(rules.len());
        match change {
            0 => changed[at] = other,
            1 => changed.insert(at, other),
            _ => drop(changed.remove(at)),
        }
        node.apply(&[policy("long", changed, vec![])]);
        let written = written(&node.hns.take_changes());
        prop_assert!(written <= MAX_WRITTEN, "{} ACLs written", written);
    }
}

#[test]
fn a_rule_names_the_cause_of_its_cost() {
    let nets = |first: u32, count: u32| -> std::collections::BTreeSet<_> {
        let address = |number| IpAddr::V4(std::net::Ipv4Addr::from(first + 2 * number));
        (0..count).map(|number| Member::Net(address(number).into())).collect()
    };
    let from = |peer: EntityMatch| Rule { source: peer, ..Rule::all(Action::Allow) };
    let set = |id: &str| EntityMatch { sets: vec![SetId::new(id)], ..EntityMatch::default() };
    let rules = vec![
        from(set("many")),
        from(EntityMatch {
            not_sets: vec![SetId::new("few")],
            nets: vec!["10.0.0.0/24".parse().unwrap()],
            ..EntityMatch::default()
        }),
        Rule { not_protocol: Some(Protocol::UDP), ..Rule::all(Action::Deny) },
        from(set("nobody")),
    ];
    let mut deltas = with_rules(&rules);
    deltas.insert(2, Delta::SetCreated(SetId::new("many"), SetKind::Nets, nets(0x0b00_0000, 9000).into()));
    deltas.insert(2, Delta::SetCreated(SetId::new("few"), SetKind::Nets, nets(0x0a00_0001, 3).into()));
    let state = state(&deltas);
    let costing = costing(&state);
    let costs = costing.rules(&state.endpoints[&pod_id()], |id| &*id.name == "long", &|_, _| None);
    let because: Vec<Because> = costs.iter().map(|cost| cost.because).collect();
    assert!(
        matches!(
            because[..],
            [
                Because::Products { lists: 3, addresses: 9000, .. },
                Because::Products { lists: 1, excludes: true, .. },
                Because::ButOneProtocol,
                Because::Nothing
            ]
        ),
        "{because:?}"
    );
    assert!(costs.iter().all(|cost| cost.direction == Direction::Ingress));
    assert_eq!(costs.iter().map(|cost| cost.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
    // The lists of two protocols contain them: that of UDP, and that of all others.
    assert!(costs[0].lists.acls >= 3 && costs[0].lists.addresses >= 9000, "{costs:?}");
    assert!(costs[2].lists.acls > 0 && costs[3].lists.acls == 0, "{costs:?}");
    let cost = costing.cost(&state.endpoints[&pod_id()]);
    assert_eq!(cost.left_out, 2, "Calico cannot say negations");
}

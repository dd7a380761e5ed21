//! What a change of the node's state touches in the kernel, and nothing else: each case names every set, chain, rule
//! and element that is added or removed. A rewritten rule has another handle, and counts.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;

use crate::common::cluster::*;
use serde_json::Value;
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::{Endpoint, EndpointId, HostEndpoint, NodeState, Reason};
use tortie_policy::program::*;

/// The name of a change, the change, and what it touches in the table. A trailing `…` stands for every name with that
/// prefix.
type Case = (&'static str, fn(&mut NodeState), &'static [&'static str]);

/// The rules of the policy "web" are rewritten: they are committed together, whichever of them has changed.
const WEB_AGAIN: [&str; 2] =
    ["- rule policy NetworkPolicy demo/web Ingress…", "+ rule policy NetworkPolicy demo/web Ingress…"];

/// They run one after another.
const CASES: &[Case] = &[
    ("nothing", |_| {}, &[]),
    (
        "a member comes",
        |state| members(state, "clients").extend([net("10.9.0.9/32")]),
        &[r#"+ element addresses "10.9.0.9""#],
    ),
    (
        "a member goes",
        |state| members(state, "clients").retain(|member| *member != net("10.9.0.9/32")),
        &[r#"- element addresses "10.9.0.9""#],
    ),
    (
        "the first network comes",
        |state| members(state, "clients").extend([net("10.8.0.0/16")]),
        &[
            WEB_AGAIN[0],
            WEB_AGAIN[1],
            "+ set networks",
            r#"+ element networks {"prefix":{"addr":"10.8.0.0","len":16}}"#,
        ],
    ),
    (
        "another network comes",
        |state| members(state, "clients").extend([net("10.2.0.0/16")]),
        &[r#"+ element networks {"prefix":{"addr":"10.2.0.0","len":16}}"#],
    ),
    (
        "one comes next to it, and they are one range",
        |state| members(state, "clients").extend([net("10.3.0.0/17")]),
        &[
            r#"- element networks {"prefix":{"addr":"10.2.0.0","len":16}}"#,
            r#"+ element networks {"range":["10.2.0.0","10.3.127.255"]}"#,
        ],
    ),
    ("one comes inside another", |state| members(state, "clients").extend([net("10.8.128.0/20")]), &[]),
    (
        "the one around it goes, and the first of two side by side",
        |state| {
            let gone = [net("10.8.0.0/16"), net("10.2.0.0/16")];
            members(state, "clients").retain(|member| !gone.contains(member));
        },
        &[
            r#"- element networks {"prefix":{"addr":"10.8.0.0","len":16}}"#,
            r#"+ element networks {"prefix":{"addr":"10.8.128.0","len":20}}"#,
            r#"- element networks {"range":["10.2.0.0","10.3.127.255"]}"#,
            r#"+ element networks {"prefix":{"addr":"10.3.0.0","len":17}}"#,
        ],
    ),
    (
        "they come again",
        |state| members(state, "clients").extend([net("10.8.0.0/16"), net("10.2.0.0/16")]),
        &[
            r#"- element networks {"prefix":{"addr":"10.8.128.0","len":20}}"#,
            r#"+ element networks {"prefix":{"addr":"10.8.0.0","len":16}}"#,
            r#"- element networks {"prefix":{"addr":"10.3.0.0","len":17}}"#,
            r#"+ element networks {"range":["10.2.0.0","10.3.127.255"]}"#,
        ],
    ),
    (
        "what is inside goes, and one of two side by side",
        |state| {
            let gone = [net("10.8.128.0/20"), net("10.3.0.0/17")];
            members(state, "clients").retain(|member| !gone.contains(member));
        },
        &[
            r#"- element networks {"range":["10.2.0.0","10.3.127.255"]}"#,
            r#"+ element networks {"prefix":{"addr":"10.2.0.0","len":16}}"#,
        ],
    ),
    (
        "the networks go",
        |state| members(state, "clients").retain(|member| *member == net("10.9.0.1/32")),
        &[
            WEB_AGAIN[0],
            WEB_AGAIN[1],
            "- set networks",
            r#"- element networks {"prefix":{"addr":"10.2.0.0","len":16}}"#,
            r#"- element networks {"prefix":{"addr":"10.8.0.0","len":16}}"#,
        ],
    ),
    (
        "a named port comes",
        |state| members(state, "ports").extend([port("10.9.0.2", 81)]),
        &[r#"+ element ports {"concat":["10.9.0.2","tcp",81]}"#],
    ),
    (
        "a rule gets another protocol",
        |state| policy(state, "web").ingress[1].protocol = Some(Protocol::UDP),
        &WEB_AGAIN,
    ),
    (
        "a rule gets two ports",
        |state| policy(state, "web").ingress[0].destination.ports.push(range(8080)),
        &[WEB_AGAIN[0], WEB_AGAIN[1], "+ set literal", "+ element literal 80", "+ element literal 8080"],
    ),
    (
        "and one again",
        |state| policy(state, "web").ingress[0].destination.ports.truncate(1),
        &[WEB_AGAIN[0], WEB_AGAIN[1], "- set literal", "- element literal 80", "- element literal 8080"],
    ),
    (
        "a policy that is asked about packets in gets rules for packets out",
        |state| policy(state, "web").egress.push(Rule::all(Action::Allow)),
        &[],
    ),
    (
        "a pod like another comes",
        |state| pod(state, "web-2", 4, ingress(&["web"], EndOfTier::Deny)),
        &[
            r#"+ element from-workload-program ["caliweb-2",…"#,
            r#"+ element to-workload-program ["caliweb-2",…"#,
            r#"+ element own-addresses4 {"concat":["caliweb-2","10.65.1.4"]}"#,
            r#"+ element local-pods4 "10.65.1.4""#,
        ],
    ),
    (
        "it goes",
        |state| drop(state.endpoints.remove(&id("web-2"))),
        &[
            r#"- element from-workload-program ["caliweb-2",…"#,
            r#"- element to-workload-program ["caliweb-2",…"#,
            r#"- element own-addresses4 {"concat":["caliweb-2","10.65.1.4"]}"#,
            r#"- element local-pods4 "10.65.1.4""#,
        ],
    ),
    (
        "a pod with a program of its own comes",
        |state| pod(state, "odd", 5, ingress(&["web", "other"], EndOfTier::Deny)),
        &[
            "+ chain program",
            "+ rule program NetworkPolicy demo/web",
            "+ rule program NetworkPolicy demo/other",
            "+ rule program end of tier default",
            "+ chain policy",
            "+ rule policy NetworkPolicy demo/other Ingress rule 1",
            r#"+ element from-workload-program ["caliodd",…"#,
            r#"+ element to-workload-program ["caliodd",…"#,
            "+ element to-workload-chain …",
            r#"+ element own-addresses4 {"concat":["caliodd","10.65.1.5"]}"#,
            r#"+ element local-pods4 "10.65.1.5""#,
        ],
    ),
    (
        "it gets the others' program",
        |state| pod(state, "odd", 5, ingress(&["web"], EndOfTier::Deny)),
        &[
            "- chain program",
            "- rule program NetworkPolicy demo/web",
            "- rule program NetworkPolicy demo/other",
            "- rule program end of tier default",
            "- chain policy",
            "- rule policy NetworkPolicy demo/other Ingress rule 1",
            r#"- element to-workload-program ["caliodd",…"#,
            r#"+ element to-workload-program ["caliodd",…"#,
            "- element to-workload-chain …",
        ],
    ),
    (
        "a pod gets another address",
        |state| pod(state, "odd", 6, ingress(&["web"], EndOfTier::Deny)),
        &[
            r#"- element own-addresses4 {"concat":["caliodd","10.65.1.5"]}"#,
            r#"- element local-pods4 "10.65.1.5""#,
            r#"+ element own-addresses4 {"concat":["caliodd","10.65.1.6"]}"#,
            r#"+ element local-pods4 "10.65.1.6""#,
        ],
    ),
    (
        "a policy that nobody names comes",
        |state| drop(state.policies.insert(policy_id("idle"), Arc::default())),
        &[],
    ),
    (
        "a node comes",
        |state| drop(state.vteps.insert(vtep(2).key(), vtep(2))),
        &[r#"+ element vxlan-peers "172.31.0.2""#],
    ),
    (
        "the first host endpoint comes",
        |state| host(state, "eth0", ingress(&["web"], EndOfTier::Deny)),
        &[
            "+ chain …",
            "+ map host-…",
            "+ set literal",
            "+ element host-…",
            "+ element literal …",
            "+ rule program no tier decides",
            "+ rule host-…",
            "+ rule output …",
            "+ rule prednat …",
            "+ rule raw-in …",
            "+ rule raw-out …",
            "- rule forward-from …",
            "+ rule forward-from …",
            "- rule forward-to …",
            "+ rule forward-to …",
            "+ rule input …",
        ],
    ),
    ("its policy changes", |state| policy(state, "web").ingress[1].protocol = None, &WEB_AGAIN),
    (
        "it gets another interface",
        |state| host(state, "eth1", ingress(&["web"], EndOfTier::Deny)),
        &[
            r#"- element host-forward-in-program ["eth0",…"#,
            r#"- element host-forward-out-program ["eth0",…"#,
            r#"- element host-in-program ["eth0",…"#,
            r#"- element host-out-program ["eth0",…"#,
            r#"- element host-untracked-in-program ["eth0",…"#,
            r#"- element host-untracked-out-program ["eth0",…"#,
            r#"+ element host-forward-in-program ["eth1",…"#,
            r#"+ element host-forward-out-program ["eth1",…"#,
            r#"+ element host-in-program ["eth1",…"#,
            r#"+ element host-out-program ["eth1",…"#,
            r#"+ element host-untracked-in-program ["eth1",…"#,
            r#"+ element host-untracked-out-program ["eth1",…"#,
        ],
    ),
];

#[test]
fn a_change_modifies_only_affected_objects() {
    let mut node = Node::new(&Underlay::new(), 1);
    change(&mut node, begin);
    let mut before = objects(&node);
    for (what, to_change, expected) in CASES {
        change(&mut node, to_change);
        let after = objects(&node);
        let gone = before.difference(&after).map(|object| format!("- {}", without_digests(object)));
        let come = after.difference(&before).map(|object| format!("+ {}", without_digests(object)));
        let touched: Vec<String> = gone.chain(come).collect();
        let is = |pattern: &str, object: &String| match pattern.strip_suffix('…') {
            Some(beginning) => object.starts_with(beginning),
            None => object == pattern,
        };
        let more: Vec<_> =
            touched.iter().filter(|object| !expected.iter().any(|name| is(name, object))).collect();
        let less: Vec<_> =
            expected.iter().filter(|name| !touched.iter().any(|object| is(name, object))).collect();
        assert!(
            more.is_empty() && less.is_empty(),
            "{what}: touched beside: {more:#?}, not touched: {less:#?}"
        );
        before = after;
    }
}

/// Changes the node's state. Its pods have no interfaces, which is the only condition.
fn change(node: &mut Node, change: impl FnOnce(&mut NodeState)) {
    let report = node.change(change);
    assert!(report.conditions().all(|condition| condition.reason == Reason::InterfaceMissing), "{report:?}");
}

/// Two pods with one program and one open pod; a policy of three rules, and one of one rule.
fn begin(state: &mut NodeState) {
    open_profile(state);
    let sets = |name: &str| EntityMatch { sets: vec![SetId::new(name)], ..EntityMatch::default() };
    let clients = Rule {
        protocol: Some(Protocol::TCP),
        source: sets("s:clients"),
        destination: EntityMatch { ports: vec![range(80)], ..EntityMatch::default() },
        ..Rule::all(Action::Allow)
    };
    let denied = Rule { protocol: Some(Protocol::SCTP), ..Rule::all(Action::Deny) };
    let named = Rule {
        destination: EntityMatch { port_sets: vec![SetId::new("s:ports")], ..EntityMatch::default() },
        ..Rule::all(Action::Allow)
    };
    let rules = |ingress| Arc::new(PolicyRules { ingress, egress: Vec::new() });
    state.policies.insert(policy_id("web"), rules(vec![clients, denied, named]));
    state.policies.insert(policy_id("other"), rules(vec![Rule::all(Action::Allow)]));
    state.sets.insert(SetId::new("s:clients"), (SetKind::Nets, [net("10.9.0.1/32")].into()));
    state.sets.insert(SetId::new("s:ports"), (SetKind::AddressPorts, [port("10.9.0.2", 80)].into()));
    pod(state, "open", 2, open());
    pod(state, "web-0", 3, ingress(&["web"], EndOfTier::Deny));
    pod(state, "web-1", 7, ingress(&["web"], EndOfTier::Deny));
}

fn net(text: &str) -> Member {
    Member::Net(text.parse().unwrap())
}

fn port(address: &str, port: u16) -> Member {
    Member::AddressPort { address: address.parse().unwrap(), protocol: Protocol::TCP, port }
}

fn range(port: u16) -> PortRange {
    PortRange { first: port, last: port }
}

fn members<'a>(state: &'a mut NodeState, set: &str) -> &'a mut BTreeSet<Member> {
    state.sets.get_mut(&SetId::new(format!("s:{set}"))).unwrap().1.make_mut()
}

fn policy<'a>(state: &'a mut NodeState, name: &str) -> &'a mut PolicyRules {
    Arc::make_mut(state.policies.get_mut(&policy_id(name)).unwrap())
}

fn id(name: &str) -> EndpointId {
    EndpointId { namespace: "demo".into(), pod: name.into(), interface: "eth0".into() }
}

/// Adds a pod with this name and number.
fn pod(state: &mut NodeState, name: &str, number: u8, program: EndpointProgram) {
    let endpoint = Endpoint {
        container_id: name.into(),
        host_interface: format!("cali{name}").into(),
        addresses: vec![Ipv4Addr::new(10, 65, 1, number).into()],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(program),
    };
    state.endpoints.insert(id(name), Arc::new(endpoint));
}

fn host(state: &mut NodeState, interface: &str, normal: EndpointProgram) {
    let program = HostEndpointProgram { normal, ..HostEndpointProgram::default() };
    let endpoint = HostEndpoint { interface: Some(interface.to_owned()), addresses: Vec::new(), program };
    state.host_endpoints.insert("uplink".to_owned(), Arc::new(endpoint));
}

/// The content of the table: rules with their handles, and elements of sets.
fn objects(node: &Node) -> BTreeSet<String> {
    let mut nft = Command::new("nft");
    nft.args(["-j", "-a", "list", "table", "inet", "tortie"]);
    let output = node.namespace.enter_on_spawn(&mut nft).unwrap().output();
    let output = output.expect("this test needs the program nft: apt-get install nftables");
    let listed: Value = serde_json::from_slice(&output.stdout).unwrap();
    listed["nftables"].as_array().unwrap().iter().flat_map(named).collect()
}

/// An object with its origin in place of a name that is a digest, and without a rule's handle.
fn without_digests(object: &str) -> String {
    let words = object.split(' ').filter(|word| !word.starts_with('#'));
    let mut words: Vec<_> = words.collect();
    words[1] = match words[1] {
        chain if chain.starts_with("pi-") || chain.starts_with("pe-") => "policy",
        chain if chain.ends_with("-0") => "program",
        set if set.starts_with("l-") => "literal",
        set if set.len() == 15 && set.starts_with('a') => "addresses",
        set if set.len() == 15 && set.starts_with('n') => "networks",
        set if set.len() == 15 && set.starts_with('p') => "ports",
        name => name,
    };
    words.join(" ")
}

/// The names of an object and its content.
fn named(object: &Value) -> Vec<String> {
    let (kind, object) = object.as_object().unwrap().iter().next().unwrap();
    let text = |field: &str| object[field].as_str().unwrap_or_default();
    match kind.as_str() {
        "rule" => vec![format!("#{} rule {} {}", object["handle"], text("chain"), text("comment"))],
        "set" | "map" => {
            let elements = object["elem"].as_array().into_iter().flatten();
            let element = |element: &Value| format!("element {} {element}", text("name"));
            std::iter::once(format!("{kind} {}", text("name"))).chain(elements.map(element)).collect()
        }
        "chain" => vec![format!("chain {}", text("name"))],
        _ => Vec::new(),
    }
}

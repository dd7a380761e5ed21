//! `show` reports what HNS has for a pod: the origin of each ACL, and changes by others.

use crate::dataplane::node::*;
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_dataplane::{Report, ShowError, Shown, ShownPart, ShownRule};
use tortie_hcn::HcnExt;
use tortie_hcn::schema::{Acl, AclAction, AclDirection, AclRuleType, Modify, Policy, RequestType};
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Rule};
use tortie_windows::endpoint_id;

fn tcp_to(action: Action, port: u16) -> Rule {
    Rule {
        protocol: Some(Protocol::TCP),
        destination: EntityMatch { ports: vec![PortRange::single(port)], ..EntityMatch::default() },
        ..Rule::all(action)
    }
}

fn rules(shown: &Shown, direction: Direction, before: bool) -> Vec<&ShownRule> {
    let wanted = |part: &ShownPart| (*part == ShownPart::BeforePolicy) == before;
    let lists = shown.lists.iter().filter(|list| list.direction == direction && wanted(&list.part));
    lists.flat_map(|list| &list.rules).collect()
}

fn node_with_policy() -> Node {
    let mut node = Node::usual();
    node.connect();
    let ingress = vec![tcp_to(Action::Deny, 22), tcp_to(Action::Allow, 80)];
    let program =
        EndpointProgram { ingress: vec![tier("default", &["web"], EndOfTier::Deny)], ..open_program() };
    let report = node.apply(&[
        local_node(),
        own_block(),
        allow_all(),
        policy("web", ingress, vec![]),
        endpoint(program),
    ]);
    assert_eq!(report, Report::default());
    node
}

#[test]
fn each_acl_is_shown_with_its_source() {
    let mut node = node_with_policy();
    let shown = node.dataplane.show(&pod_id()).unwrap();
    assert_eq!((shown.counting, shown.remarks.as_slice()), (None, &[][..]));
    let texts = |rules: Vec<&ShownRule>| rules.iter().map(|rule| rule.text.clone()).collect::<Vec<_>>();
    assert_eq!(
        texts(rules(&shown, Direction::Ingress, true)),
        ["Host Allow In", "900 Allow In, remote 10.244.3.1,172.16.0.3"]
    );
    let policy = rules(&shown, Direction::Ingress, false);
    let numbered = texts(policy.clone());
    let (priorities, rest): (Vec<u16>, Vec<&str>) = numbered
        .iter()
        .filter_map(|text| text.split_once(' '))
        .map(|(priority, rest)| (priority.parse::<u16>().unwrap(), rest))
        .unzip();
    assert_eq!(
        rest,
        ["Block In, protocol 6, local ports 22", "Allow In, protocol 6, local ports 80", "Block In"]
    );
    assert!(priorities.is_sorted(), "in the order in which HNS asks them: {numbered:?}");
    let from: Vec<_> = policy.iter().map(|rule| rule.policy.as_ref().map(ToString::to_string)).collect();
    let id = policy_id("web").to_string();
    assert_eq!(from, [Some(id.clone()), Some(id), None]);
    assert_eq!(policy[2].comment, "closed");
    assert!(shown.lists.iter().flat_map(|list| &list.rules).all(|rule| !rule.differs));
}

/// HNS is read, not the known state.
#[test]
fn foreign_changes_are_shown() {
    let mut node = node_with_policy();
    let endpoint = endpoint_id(CONTAINER);
    let ours = node.acls().into_iter().find(|acl| acl.local_ports == "22").unwrap();
    let theirs = Acl {
        id: "theirs".into(),
        action: AclAction::Allow,
        direction: AclDirection::In,
        rule_type: AclRuleType::Switch,
        priority: 500,
        local_ports: "22".into(),
        protocols: "6".into(),
        ..ours.clone()
    };
    let change = |request, acl: &Acl| {
        node.hns
            .inner()
            .modify_endpoint(endpoint, &Modify::policies(request, vec![Policy::of(acl)]))
            .unwrap();
    };
    change(RequestType::Remove, &ours);
    change(RequestType::Add, &theirs);
    let shown = node.dataplane.show(&pod_id()).unwrap();
    assert_eq!(shown.remarks.len(), 1, "{:?}", shown.remarks);
    assert!(shown.remarks[0].starts_with("HNS lacks 1 of the "), "{:?}", shown.remarks);
    let policy = rules(&shown, Direction::Ingress, false);
    let differing: Vec<_> =
        policy.iter().filter(|rule| rule.differs).map(|rule| rule.text.as_str()).collect();
    assert_eq!(differing, ["500 Allow In, protocol 6, local ports 22"]);
    node.dataplane.resync();
    let shown = node.dataplane.show(&pod_id()).unwrap();
    assert_eq!(shown.remarks, Vec::<String>::new());
}

#[test]
fn unreadable_acls_are_reported() {
    let mut node = node_with_policy();
    let stranger = tortie_dataplane::EndpointId { pod: "stranger".into(), ..pod_id() };
    assert_eq!(
        node.dataplane.show(&stranger),
        Err(ShowError::NoEndpoint("calico-demo/stranger (eth0)".into()))
    );
    node.hns.inner().delete_endpoint(endpoint_id(CONTAINER)).unwrap();
    let Err(ShowError::System { object, problem }) = node.dataplane.show(&pod_id()) else {
        panic!("it is gone")
    };
    assert_eq!(object, "calico-demo/windows-server (eth0)");
    assert!(problem.contains(CONTAINER), "{problem}");
}

//! Two emulated Windows nodes with real interfaces: pods talk across VXLAN until policy says otherwise.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test says what it expects by unwrap")]

mod switched;

use std::net::Ipv4Addr;
use std::sync::Arc;

use ipnet::Ipv4Net;
use switched::*;
use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::Delta;
use tortie_policy::program::{
    EndOfTier, EndpointProgram, Member, PolicyRules, Rule, SetId, SetKind, TierProgram,
};

#[test]
fn pods_talk_until_policy_cuts_all_but_one() {
    let [first, second] = underlay();
    let (mut client, mut server) = (Node::new(1, first), Node::new(2, second));
    client.start(&server.vtep, 2);
    server.start(&client.vtep, 1);
    client.add_pod(4);
    client.add_pod(5);
    server.add_pod(4);
    server.add_pod(5);
    let who = |client: &Node, server: &Node| {
        let web = &server.pods[0];
        let from =
            [&client.pods[0].0, &client.pods[1].0, &server.pods[1].0, &client.namespace, &server.namespace];
        from.map(|from| talk(from, web).is_some())
    };
    assert_eq!(who(&client, &server), [true; 5]);
    assert!(talk(&server.pods[0].0, &client.pods[0]).is_some(), "the other way");

    let mut rule = Rule { protocol: Some(Protocol::TCP), ..Rule::all(Action::Allow) };
    rule.source.sets = vec![SetId::new("s:linux-client")];
    rule.destination.ports = vec![PortRange::single(80)];
    let member = |node: u8, last: u8| Member::Net(Ipv4Net::from(Ipv4Addr::new(10, 244, node, last)).into());
    let rules = Arc::new(PolicyRules { ingress: vec![rule], egress: vec![] });
    server.apply(&[
        Delta::SetCreated(SetId::new("s:linux-client"), SetKind::Nets, [member(1, 4)].into()),
        Delta::Policy(policy_id("web"), rules),
    ]);
    let tier = TierProgram { name: "default".into(), policies: vec![policy_id("web")], end: EndOfTier::Deny };
    let profiles = vec![policy_id("open")];
    server.set_program(4, EndpointProgram { ingress: vec![tier], egress: vec![], profiles });
    // The allowed client, and the node of the server itself; not the other pods, not the other node.
    assert_eq!(who(&client, &server), [true, false, false, false, true]);
    let (added, removed) = (vec![member(1, 5)], vec![member(1, 4)]);
    server.apply(&[Delta::SetChanged { id: SetId::new("s:linux-client"), added, removed }]);
    assert_eq!(who(&client, &server), [false, true, false, false, true]);
}

//! SCTP ports, which an ACL cannot match: rules and Services with such ports close where they cannot be expressed,
//! and this is reported.

use crate::dataplane::node::*;
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_dataplane::{Condition, Reason, Service, ServicePort};
use tortie_hcn::schema::AclAction;
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Flow, Rule};

/// A rule for port 80 of what the pod connects to.
fn to_port_80(action: Action, protocol: Protocol) -> Rule {
    let destination = EntityMatch { ports: vec![PortRange::single(80)], ..EntityMatch::default() };
    Rule { protocol: Some(protocol), destination, ..Rule::all(action) }
}

fn call(protocol: Protocol, destination_port: u16) -> Flow {
    let (source, destination) = (POD.into(), [10, 0, 0, 1].into());
    Flow { source, destination, protocol, source_port: 40_000, destination_port, icmp: None }
}

/// The rules of a first tier, those of the next tier, and which of ports 80 and 81 then pass.
#[test]
fn rules_are_narrowed_and_reported() {
    let (allow, all) = (Rule::all(Action::Allow), Rule::all);
    let sctp = |action| to_port_80(action, Protocol::SCTP);
    let any_port = |action| Rule { protocol: Some(Protocol::SCTP), ..all(action) };
    let cases = [
        (vec![sctp(Action::Allow)], vec![], [false, false], "it allows no SCTP here"),
        (vec![sctp(Action::Deny), allow.clone()], vec![], [false, false], "it denies all SCTP that"),
        (vec![sctp(Action::Pass), allow.clone()], vec![allow.clone()], [true, true], "both allow"),
        (vec![sctp(Action::Pass), allow.clone()], vec![all(Action::Deny)], [false, false], "both allow"),
        (vec![sctp(Action::Pass), all(Action::Deny)], vec![allow.clone()], [false, false], "both allow"),
        (vec![any_port(Action::Allow)], vec![], [true, true], ""),
        (vec![any_port(Action::Deny), allow.clone()], vec![], [false, false], ""),
    ];
    for (first, second, expected, consequence) in cases {
        let tiers = vec![tier("one", &["one"], EndOfTier::Deny), tier("two", &["two"], EndOfTier::Deny)];
        let program = EndpointProgram { egress: tiers, ..EndpointProgram::default() };
        let shown = format!("{first:?} {second:?}");
        let is_open = first.contains(&allow);
        let (node, report) =
            started([policy("one", vec![], first), policy("two", vec![], second), endpoint(program)]);
        let passes = |protocol, port| node.passes(Direction::Egress, &call(protocol, port));
        assert_eq!([80, 81].map(|port| passes(Protocol::SCTP, port)), expected, "{shown}");
        assert_eq!(passes(Protocol::TCP, 80), is_open, "{shown}");
        let reported: Vec<&Condition> = report.conditions().collect();
        assert_eq!(reported.is_empty(), consequence.is_empty(), "{reported:?} {shown}");
        for reported in reported {
            assert_eq!(reported.reason, Reason::SctpPortNotExpressible);
            let whole = ["calico-demo/one, Egress rule 1: ", "ports of SCTP, which HNS cannot", consequence];
            assert!(whole.iter().all(|part| reported.to_string().contains(part)), "{reported} {shown}");
        }
    }
}

/// A Service with these SCTP ports, and the backends of each.
fn of_sctp(ports: &[(u16, &[&str])]) -> Service {
    let port = |(port, backends): &(u16, &[&str])| ServicePort {
        protocol: Protocol::SCTP,
        ..service(&[], *port, backends).ports.remove(0)
    };
    Service { ports: ports.iter().map(port).collect(), ..service(&["10.96.0.1"], 80, &[]) }
}

/// No ACL of a VIP has an SCTP port: a denial of one denies all of them, and a permission is left out. Both are
/// reported.
#[test]
fn sctp_ports_are_closed_and_reported() {
    let (inside, outside) = (&["10.0.0.1"][..], &["10.0.9.9"][..]);
    let to = |nets: &[&str]| Rule { protocol: Some(Protocol::SCTP), ..to(nets) };
    let all_denied = [(AclAction::Block, "10.96.0.1".to_owned(), "132:".to_owned())];
    let (backends, both) = (to(&["10.0.0.0/24"]), to(&["10.96.0.0/16", "10.0.0.0/24"]));
    let cases = [
        (&backends, of_sctp(&[(80, inside)]), &[][..], &["10.96.0.1:80/SCTP"][..]),
        (&backends, of_sctp(&[(80, outside)]), &[], &[]),
        (&both, of_sctp(&[(80, inside), (81, inside)]), &[], &[]),
        (
            &both,
            of_sctp(&[(80, inside), (81, outside)]),
            &all_denied,
            &["10.96.0.1:80/SCTP", "10.96.0.1:81/SCTP"],
        ),
        (&both, of_sctp(&[(81, outside)]), &all_denied, &["10.96.0.1:81/SCTP"]),
    ];
    for (rule, service, expected, named) in cases {
        let shown = format!("{rule:?} {service:?}");
        let (node, report) = started(isolated(rule.clone()).into_iter().chain([is_now("web", service)]));
        assert_eq!(rows_of_services(&node), expected, "{shown}");
        let reported: Vec<&Condition> = report.conditions().collect();
        let is_reported = |name: &&str| reported.iter().any(|reported| reported.message.contains(*name));
        assert!(
            named.iter().all(is_reported) && reported.is_empty() == named.is_empty(),
            "{reported:?} {shown}"
        );
        let right = |reported: &&Condition| {
            reported.reason == Reason::ServicePartlyAllowed && reported.message.contains("SCTP ports")
        };
        assert!(reported.iter().all(right), "{reported:?} {shown}");
    }
}

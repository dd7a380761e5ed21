//! Connections of pods to Services: the verdict of HNS is the oracle's on the connection to the backend, whichever
//! address ACLs see.
//!
//! One exception is known (policy decision 24). If ACLs see the Service's address, and some of its backends are
//! denied, or this cannot be decided, the whole Service is closed; then the endpoint has a condition that names the
//! Service. Another exception is that of flows to pods, SCTP ports: rules and Services with such ports may be closed,
//! which is reported.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use serde_json::Value;
use testkit::clusters::Objects;
use testkit::clusters::services::{Call, Front};
use testkit::emulator::{EmulatedCluster, Rendering};
use testkit::exceptions::Exception;
use testkit::flows::{explain, judged};
use testkit::random::Tally;
use tortie_api::net::Protocol;
use tortie_dataplane::{Condition, Reason, Report};
use tortie_hns_emulator::EgressSees;
use tortie_oracle::Oracle;
use tortie_policy::program::Flow;

use super::{PODS, is_allowed};

/// The condition about Services whose addresses may be closed although a backend is allowed.
pub(crate) const PARTLY: Reason = Reason::ServicePartlyAllowed;
pub(crate) const TAKEN: Reason = Reason::ServiceAddressTaken;

pub(crate) const NARROWER: &str = "narrower: Services";
const NARROWER_SCTP: &str = "narrower: ports of SCTP, of Services";
pub(crate) const SEES: [EgressSees; 2] = [EgressSees::Backend, EgressSees::Vip];
/// The clients' source ports, which rules distinguish.
const OWN_PORTS: [u16; 7] = [0, 53, 80, 81, 443, 40_000, 65_535];

/// The kind under which connections to Services are counted.
pub(crate) fn kind(sees: EgressSees, rendering: &str) -> String {
    format!("{sees:?} seen, {rendering}")
}

/// All of these kinds for the given renderings.
pub(crate) fn kinds<'a>(renderings: impl Iterator<Item = &'a Rendering>) -> Vec<String> {
    renderings.flat_map(|rendering| SEES.map(|sees| kind(sees, rendering.name))).collect()
}

/// Whichever address is seen, and by every rendering, some connections must have succeeded and some not; and the
/// exceptions must have occurred, and be rare.
pub(crate) fn lacking(tally: &Tally, kinds: &[String], fewest: usize) -> Option<String> {
    let all: usize = kinds.iter().map(|kind| tally.of(kind).0).sum();
    let is_exception = |name: &&str| {
        let (narrower, _) = tally.of(name);
        narrower > 0 && narrower * 30 < all
    };
    tally.lacking(kinds.iter().cloned(), fewest).or_else(|| {
        let other = [NARROWER, NARROWER_SCTP].into_iter().find(|name| !is_exception(name))?;
        Some(format!("{all} connections to Services, {} of them {other}", tally.of(other).0))
    })
}

/// A cluster in which pods connect to Services.
pub(crate) struct Callers<'a> {
    pub cluster: &'a EmulatedCluster,
    pub reports: &'a [Report],
    pub oracle: &'a Oracle<'a>,
    pub objects: &'a Objects,
    pub fronts: &'a [Front],
    pub sees: EgressSees,
    pub kind: &'a str,
}

impl Callers<'_> {
    /// Connects pods to Services.
    ///
    /// # Errors
    /// A difference between HNS and the oracle, or a condition without a reason.
    pub(crate) fn compare(&self, calls: &[Call], tally: &mut Tally) -> Result<(), String> {
        let clients: Vec<_> = self.cluster.addresses().filter_map(v4).collect();
        let placed = calls.iter().filter_map(|call| call.resolve(&clients, self.fronts));
        // No policy applies to connections of a pod to itself.
        for (front, flow) in placed.filter(|(_, flow)| flow.source != flow.destination) {
            self.call(front, &flow, tally)?;
        }
        self.reported_for_a_reason()
    }

    fn call(&self, front: &Front, flow: &Flow, tally: &mut Tally) -> Result<(), String> {
        let ours = match front.backends.is_empty() {
            true => self.cluster.judge(flow),
            false => self.cluster.judge_to_service(flow, (front.address, front.port)),
        };
        let ours = ours.map_err(|error| format!("{error:#}"))?;
        let (answer, front_seen) = (judged(self.oracle, flow), self.sees == EgressSees::Vip);
        let (egress, ingress) = (is_allowed(&answer.egress), is_allowed(&answer.ingress));
        let wrong = |what: &dyn fmt::Display| {
            let explained = explain(flow);
            let acls = self.cluster.endpoints(flow);
            format!(
                "{what}: {flow:?} to {front:?}\n{ours:?}; the oracle: {egress}, {ingress}\n{acls:#?}\n{explained}"
            )
        };
        let passes = ours.ingress.unwrap_or(ingress);
        let mut of_sctp = false;
        if passes != ingress {
            of_sctp = true;
            if passes || !self.is_told_of_sctp(flow.destination, front) {
                return Err(wrong(&"the backend's ingress"));
            }
        }
        let passes = ours.egress.unwrap_or(true);
        let mut narrower = false;
        if front.backends.is_empty() || !front_seen {
            if passes != egress && !self.is_taken_by_a_service(flow) {
                of_sctp = true;
                if !self.is_told_of_sctp(flow.source, front) {
                    return Err(wrong(&"the client's egress"));
                }
            }
            if passes && !egress {
                return Err(wrong(&"the client's egress is open"));
            }
        } else if passes {
            if !egress || front.services.len() > 1 || !self.all_allowed(front, flow) {
                return Err(wrong(&"wider than the backends"));
            }
        } else if egress && front.protocol == Protocol::SCTP {
            of_sctp = true;
            if !self.is_reported(flow.source, front) && !self.is_told_of_sctp(flow.source, front) {
                return Err(wrong(&"closed without telling of SCTP"));
            }
        } else if egress {
            narrower = true;
            if !self.is_reported(flow.source, front) || !self.may_be_closed(front, flow) {
                return Err(wrong(&"closed without a reason, or without telling"));
            }
        }
        let is_of_pods = self.cluster.knows_pod_networks() && PODS.contains(&front.address);
        if is_of_pods && self.opens_the_way_to_a_pod(front, flow)? {
            return Err(wrong(&"the way to the pod whose address the Service has taken"));
        }
        if !front.backends.is_empty() {
            tally.count(self.kind, ours.all());
            narrower.then(|| tally.count(NARROWER, false));
            of_sctp.then(|| tally.count(NARROWER_SCTP, false));
        }
        Ok(())
    }

    /// Whether a client reaches a pod against policy, because a Service has taken the pod's address and nobody
    /// translates it.
    fn opens_the_way_to_a_pod(&self, front: &Front, flow: &Flow) -> Result<bool, String> {
        let IpAddr::V4(client) = flow.source else { return Ok(false) };
        let direct = front.flow(client, flow.source_port, (front.address, front.port));
        let ours = self.cluster.judge(&direct).map_err(|error| format!("{error:#}"))?;
        Ok(ours.egress == Some(true) && !is_allowed(&judged(self.oracle, &direct).egress))
    }

    /// Whether a Service has taken the address and port of a flow although it is a pod's, or the address if both are
    /// SCTP. What ACLs see there may belong to the Service: this may close it, and never opens it. The client's
    /// endpoint has a condition.
    pub(crate) fn is_taken_by_a_service(&self, flow: &Flow) -> bool {
        // A denial of one SCTP port denies all of them.
        let of_sctp = |front: &&Front| {
            flow.destination == front.address && [flow.protocol, front.protocol] == [Protocol::SCTP; 2]
        };
        let takes = |front: &&Front| (front.takes(flow) || of_sctp(front)) && !front.backends.is_empty();
        self.fronts.iter().filter(takes).any(|front| {
            (PODS.contains(&front.address) || of_sctp(&front)) && self.is_reported(flow.source, front)
        })
    }

    /// Whether the client may reach each backend. It always reaches itself.
    fn all_allowed(&self, front: &Front, flow: &Flow) -> bool {
        let IpAddr::V4(client) = flow.source else { return false };
        front.backends.iter().all(|to| {
            let flow = front.flow(client, flow.source_port, *to);
            is_allowed(&judged(self.oracle, &flow).egress)
        })
    }

    /// Whether a Service is closed for a client who may reach a backend.
    fn may_be_closed(&self, front: &Front, flow: &Flow) -> bool {
        let is_own = |(address, _): &(Ipv4Addr, u16)| IpAddr::from(*address) == flow.source;
        front.services.len() > 1
            || PODS.contains(&front.address)
            // The list treats the client's own address like other addresses.
            || front.backends.iter().any(is_own)
            || self.tells_own_ports_apart()
            || !self.all_allowed(front, flow)
    }

    /// If rules distinguish source ports, a list that allows everything only by several rows together counts as one
    /// that does not.
    fn tells_own_ports_apart(&self) -> bool {
        let some = |value: &Value| value.as_array().is_some_and(|ports| !ports.is_empty());
        let rules = self.objects.iter().filter_map(|(_, value)| value["spec"]["egress"].as_array()).flatten();
        rules.into_iter().any(|rule| some(&rule["source"]["ports"]) || some(&rule["source"]["notPorts"]))
    }

    fn is_reported(&self, client: IpAddr, front: &Front) -> bool {
        let address = format!("{}:{}/{}", front.address, front.port, front.protocol);
        self.reported(client).any(|reported| {
            let named = front.services.iter().any(|service| {
                let name = format!("Service {service}");
                reported.about.iter().any(|object| object.to_string() == name)
            });
            named && (reported.message.contains(&address) || reported.message.contains(" more: "))
        })
    }

    /// Whether the front is SCTP, and the pod reports that a rule with SCTP ports is narrower.
    fn is_told_of_sctp(&self, pod: IpAddr, front: &Front) -> bool {
        let is_reported = |reported: &Condition| Exception::SctpPorts.is_reported_by(reported);
        front.protocol == Protocol::SCTP && self.conditions(pod).any(is_reported)
    }

    fn conditions(&self, pod: IpAddr) -> impl Iterator<Item = &Condition> {
        let reported = self
            .cluster
            .location(pod)
            .and_then(|location| self.reports[location.node].endpoints.get(&location.endpoint));
        reported.into_iter().flatten()
    }

    fn reported(&self, client: IpAddr) -> impl Iterator<Item = &Condition> {
        self.conditions(client).filter(|reported| [PARTLY, TAKEN].contains(&reported.reason))
    }

    /// No condition names a Service whose verdict equals that of all its backends.
    fn reported_for_a_reason(&self) -> Result<(), String> {
        for address in self.cluster.addresses().filter_map(v4) {
            let client = address.into();
            if self.reported(client).next().is_none() {
                continue;
            }
            let has_one = |front: &Front| {
                let nobody = (front.address, front.port);
                let flows = OWN_PORTS.map(|own| front.flow(address, own, nobody));
                let may_be_closed =
                    |flow| front.protocol == Protocol::SCTP || self.may_be_closed(front, flow);
                self.is_reported(client, front) && flows.iter().any(may_be_closed)
            };
            if !self.fronts.iter().any(has_one) {
                let reported: Vec<_> = self.reported(client).collect();
                return Err(format!("{client} is told without a reason: {reported:?}\n{:#?}", self.fronts));
            }
        }
        Ok(())
    }
}

fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

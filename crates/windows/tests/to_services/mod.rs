//! Connections of pods to Services: what HNS does with them is what the oracle says of the way to the backend, whichever
//! address ACLs see.
//!
//! One exception is known (semantics 24). Where the address seen is the Service's, and some of its backends are denied, or
//! that cannot be told, all of it is closed: then the endpoint bears a condition that names the Service.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use serde_json::Value;
use testkit::clusters::Objects;
use testkit::clusters::services::{Call, Front};
use testkit::emulator::{Cluster, Rendering};
use testkit::flows::{explain, judged};
use testkit::random::Tally;
use tortie_dataplane::{Condition, Report};
use tortie_hns_emulator::EgressSees;
use tortie_policy::oracle::Oracle;
use tortie_policy::program::Flow;

use crate::{PODS, is_allowed};

/// What an endpoint is told of Services whose addresses may be closed though the way to a backend is open.
pub const PARTLY: &str = "ServicePartlyAllowed";
pub const TAKEN: &str = "ServiceAddressTaken";

pub const NARROWER: &str = "narrower: Services";
pub const SEES: [EgressSees; 2] = [EgressSees::Backend, EgressSees::Vip];
/// Own ports of clients between which rules tell apart.
const OWN_PORTS: [u16; 7] = [0, 53, 80, 81, 443, 40_000, 65_535];

/// What connections to Services count as.
pub fn kind(sees: EgressSees, rendering: &str) -> String {
    format!("{sees:?} seen, {rendering}")
}

/// All of that, where policy may be rendered in these ways.
pub fn kinds<'a>(renderings: impl Iterator<Item = &'a Rendering>) -> Vec<String> {
    renderings.flat_map(|rendering| SEES.map(|sees| kind(sees, rendering.name))).collect()
}

/// Whichever address is seen, and by every way to render policy, some must have come through and some not; and the
/// exception must have come up, and be one.
pub fn lacking(asked: &Tally, kinds: &[String], fewest: usize) -> Option<String> {
    let all: usize = kinds.iter().map(|kind| asked.of(kind).0).sum();
    let (narrower, _) = asked.of(NARROWER);
    asked.lacking(kinds.iter().cloned(), fewest).or_else(|| {
        let is_exception = narrower > 0 && narrower * 30 < all;
        (!is_exception).then(|| format!("{all} connections to Services, {narrower} narrower"))
    })
}

/// A cluster in which pods connect to Services.
pub struct Callers<'a> {
    pub cluster: &'a Cluster,
    pub reports: &'a [Report],
    pub oracle: &'a Oracle<'a>,
    pub objects: &'a Objects,
    pub fronts: &'a [Front],
    pub sees: EgressSees,
    pub kind: &'a str,
}

impl Callers<'_> {
    /// Has pods connect.
    ///
    /// # Errors
    /// What HNS does otherwise than the oracle says, or what it tells without a reason.
    pub fn compare(&self, calls: &[Call], asked: &mut Tally) -> Result<(), String> {
        let clients: Vec<_> = self.cluster.addresses().filter_map(v4).collect();
        let placed = calls.iter().filter_map(|call| call.place(&clients, self.fronts));
        // Of whoever comes to itself no policy is asked.
        for (front, flow) in placed.filter(|(_, flow)| flow.source != flow.destination) {
            self.call(front, &flow, asked)?;
        }
        self.told_for_a_reason()
    }

    fn call(&self, front: &Front, flow: &Flow, asked: &mut Tally) -> Result<(), String> {
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
        if ours.ingress.is_some_and(|passes| passes != ingress) {
            return Err(wrong(&"the backend's ingress"));
        }
        let passes = ours.egress.unwrap_or(true);
        let mut narrower = false;
        if front.backends.is_empty() || !front_seen {
            if passes != egress {
                return Err(wrong(&"the client's egress"));
            }
        } else if passes {
            if !egress || front.services.len() > 1 || !self.all_allowed(front, flow) {
                return Err(wrong(&"wider than the backends"));
            }
        } else if egress {
            narrower = true;
            if !self.is_told(flow.source, front) || !self.may_be_closed(front, flow) {
                return Err(wrong(&"closed without a reason, or without telling"));
            }
        }
        if PODS.contains(&front.address) && self.opens_the_way_to_a_pod(front, flow)? {
            return Err(wrong(&"the way to the pod whose address the Service has taken"));
        }
        if !front.backends.is_empty() {
            asked.count(self.kind, ours.all());
            narrower.then(|| asked.count(NARROWER, false));
        }
        Ok(())
    }

    /// Whether a client gets to a pod, though policy does not let it, where a Service has taken the pod's address and nobody
    /// translates it.
    fn opens_the_way_to_a_pod(&self, front: &Front, flow: &Flow) -> Result<bool, String> {
        let IpAddr::V4(client) = flow.source else { return Ok(false) };
        let direct = front.flow(client, flow.source_port, (front.address, front.port));
        let ours = self.cluster.judge(&direct).map_err(|error| format!("{error:#}"))?;
        Ok(ours.egress == Some(true) && !is_allowed(&judged(self.oracle, &direct).egress))
    }

    /// Whether the client may reach each backend. Itself it does.
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
            // What a list says of the client's own address is what it says of others like it.
            || front.backends.iter().any(is_own)
            || self.tells_own_ports_apart()
            || !self.all_allowed(front, flow)
    }

    /// Where rules do, a list that allows only by several rows is taken for one that does not.
    fn tells_own_ports_apart(&self) -> bool {
        let some = |value: &Value| value.as_array().is_some_and(|ports| !ports.is_empty());
        let rules = self.objects.iter().filter_map(|(_, value)| value["spec"]["egress"].as_array()).flatten();
        rules.into_iter().any(|rule| some(&rule["source"]["ports"]) || some(&rule["source"]["notPorts"]))
    }

    fn is_told(&self, client: IpAddr, front: &Front) -> bool {
        let address = format!("{}:{}/{}", front.address, front.port, front.protocol);
        self.told(client).any(|told| {
            let named = front.services.iter().any(|service| told.message.contains(&format!("{service} (")));
            named && (told.message.contains(&address) || told.message.contains(" more)"))
        })
    }

    fn told(&self, client: IpAddr) -> impl Iterator<Item = &Condition> {
        let told = self
            .cluster
            .place(client)
            .and_then(|place| self.reports[place.node].endpoints.get(&place.endpoint));
        told.into_iter().flatten().filter(|told| [PARTLY, TAKEN].contains(&told.reason))
    }

    /// Nobody is told of a Service where all of it is as the backends are.
    fn told_for_a_reason(&self) -> Result<(), String> {
        for address in self.cluster.addresses().filter_map(v4) {
            let client = address.into();
            if self.told(client).next().is_none() {
                continue;
            }
            let has_one = |front: &Front| {
                let nobody = (front.address, front.port);
                let flows = OWN_PORTS.map(|own| front.flow(address, own, nobody));
                self.is_told(client, front) && flows.iter().any(|flow| self.may_be_closed(front, flow))
            };
            if !self.fronts.iter().any(has_one) {
                let told: Vec<_> = self.told(client).collect();
                return Err(format!("{client} is told without a reason: {told:?}\n{:#?}", self.fronts));
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

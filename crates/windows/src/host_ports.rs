//! Ports of the node that lead to pods (`hostPort`): PortMapping policies on the pods' endpoints (docs/hns.md, Host ports).
//!
//! HNS maps a port of the node once for each protocol, whatever the address. The endpoint that has it keeps it. Deleting an
//! endpoint removes its mappings. What is on an endpoint is read before anything is sent, so an agent that ended between two
//! writes continues where it was.

use std::net::{IpAddr, Ipv4Addr};

use tortie_api::net::Protocol;
use tortie_dataplane::{Condition, Endpoint, EndpointId, HostPort, NodeState, Reason, Settings};
use tortie_hcn::schema::{self, Modify, Policy, PortMapping, RequestType};
use tortie_hcn::{Class, Hcn, HcnExt};
use tracing::info;

use crate::Error;
use crate::endpoint::endpoint_id;

/// Also connections of the node itself use the mapping (`LocalRoutedVip`).
const FROM_NODE: u32 = 1;

/// The desired mappings of an endpoint.
#[derive(Default)]
pub(crate) struct Mappings {
    wanted: Vec<PortMapping>,
    /// The ports that HNS cannot map.
    refused: Vec<Condition>,
}

impl Mappings {
    /// The mappings of an endpoint of the node with this address.
    pub(crate) fn of(endpoint: &Endpoint, node: Option<Ipv4Addr>, settings: &Settings) -> Self {
        let mut mappings = Mappings::default();
        for port in endpoint.host_ports.iter() {
            let is_known = |new: &PortMapping| mappings.wanted.iter().any(|other| is_same_port(other, new));
            let reserved = settings.why_reserved(port);
            let mapped = match reserved.map_or_else(|| mapping(port, node), Err) {
                Ok(new) if is_known(&new) => {
                    Err("HNS maps a port of the node once, whatever the address".to_owned())
                }
                mapped => mapped,
            };
            match mapped {
                Ok(mapping) => mappings.wanted.push(mapping),
                Err(problem) => {
                    let message = format!("hostPort {port}: {problem}");
                    mappings.refused.push(Condition::new(Reason::HostPortNotServed, message));
                }
            }
        }
        mappings
    }

    /// Makes the endpoint have these mappings. `found` is what HNS has. Sends nothing if they are there.
    ///
    /// An endpoint of another CNI plugin keeps mappings that nobody wants here.
    pub(crate) fn sync(
        &self,
        hcn: &(impl Hcn + ?Sized),
        found: &schema::Endpoint,
        id: &EndpointId,
        state: &NodeState,
    ) -> Result<Vec<Condition>, Error> {
        let is_ours =
            state.endpoints.get(id).is_some_and(|endpoint| found.id == endpoint_id(&endpoint.container_id));
        let there = found.policies.iter().filter_map(|policy| {
            let mapping = policy.settings::<PortMapping>().ok().flatten()?;
            Some((policy, mapping))
        });
        let (kept, surplus): (Vec<_>, Vec<_>) =
            there.partition(|(_, there)| self.wanted.iter().any(|wanted| is_in_force(wanted, there)));
        for (policy, mapping) in surplus.iter().filter(|_| is_ours) {
            info!(endpoint = found.name, port = mapping.external_port, "removing a port of the node");
            let request = Modify::policies(RequestType::Remove, vec![(*policy).clone()]);
            hcn.modify_endpoint(found.id, &request)?;
        }
        let mut conditions = self.refused.clone();
        for wanted in &self.wanted {
            if kept.iter().any(|(_, there)| is_in_force(wanted, there)) {
                continue;
            }
            info!(endpoint = found.name, port = wanted.external_port, "mapping a port of the node");
            match hcn.modify_endpoint(found.id, &Modify::policies(RequestType::Add, vec![Policy::of(wanted)]))
            {
                Ok(()) => {}
                Err(error) if error.class() == Class::Unavailable => return Err(error.into()),
                Err(error) if error.class() == Class::AlreadyExists => {
                    conditions.push(taken(wanted, holder(wanted, id, state)));
                }
                Err(error) => {
                    let message = format!("hostPort {}: {error}", shown(wanted));
                    conditions.push(Condition::new(Reason::HostPortNotServed, message));
                }
            }
        }
        Ok(conditions)
    }
}

/// The mapping of a port, or why there is none.
fn mapping(port: &HostPort, node: Option<Ipv4Addr>) -> Result<PortMapping, String> {
    let HostPort { protocol, address, port, pod_port } = port;
    if ![Protocol::TCP, Protocol::UDP].contains(protocol) {
        return Err("HNS maps ports of TCP and UDP only".to_owned());
    }
    let vip = match address {
        None => String::new(),
        Some(IpAddr::V4(address)) if Some(*address) == node => address.to_string(),
        Some(address) => {
            let own = node.map_or("unknown".to_owned(), |node| node.to_string());
            return Err(format!(
                "hostIP {address}: HNS maps ports of the node's own address only, which is {own}; take hostIP out"
            ));
        }
    };
    Ok(PortMapping {
        protocol: protocol.0.into(),
        internal_port: *pod_port,
        external_port: *port,
        vip,
        flags: FROM_NODE,
        ..Default::default()
    })
}

/// Whether HNS would refuse the second one of these.
fn is_same_port(one: &PortMapping, other: &PortMapping) -> bool {
    (one.protocol, one.external_port) == (other.protocol, other.external_port)
}

/// Whether a mapping that HNS shows is the wanted one. HNS may fill in an address, and leave flags out.
fn is_in_force(wanted: &PortMapping, there: &PortMapping) -> bool {
    is_same_port(wanted, there)
        && wanted.internal_port == there.internal_port
        && (wanted.vip.is_empty() || there.vip.is_empty() || wanted.vip == there.vip)
}

/// The pod that wants the port, too.
fn holder<'a>(wanted: &PortMapping, than: &EndpointId, state: &'a NodeState) -> Option<&'a EndpointId> {
    let wants = |endpoint: &Endpoint| {
        endpoint
            .host_ports
            .iter()
            .any(|port| (u32::from(port.protocol.0), port.port) == (wanted.protocol, wanted.external_port))
    };
    let mut others = state.endpoints.iter().filter(|(id, endpoint)| *id != than && wants(endpoint));
    others.next().map(|(id, _)| id)
}

fn taken(wanted: &PortMapping, holder: Option<&EndpointId>) -> Condition {
    let owner = match holder {
        Some(EndpointId { namespace, pod, .. }) => format!("pod {namespace}/{pod}"),
        None => "an HNS endpoint or load balancer that Tortie does not know".to_owned(),
    };
    let message = format!(
        "hostPort {}: {owner} has this port of the node, too, and gets the connections; choose another one",
        shown(wanted)
    );
    Condition::new(Reason::HostPortTaken, message)
}

fn shown(mapping: &PortMapping) -> String {
    let number = u8::try_from(mapping.protocol).unwrap_or(u8::MAX);
    format!("{}/{}", mapping.external_port, Protocol(number))
}

//! Flows of UDP that lead to former backends. The kernel keeps a flow where it is for as long as packets come, so a client that keeps its
//! port would never reach another backend (`pkg/proxy/conntrack` of Kubernetes). Connections of TCP and SCTP end by themselves.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use tortie_api::net::{IpVersion, Protocol};
use tortie_kernel::conntrack::{Connection, Conntrack};
use tortie_kernel::route::RouteSocket;
use tortie_services::{FrontendAddress, FrontendKey, NodePortPlace, ServicesDelta};

use super::desired::Desired;
use super::layout::family;

/// The frontends of UDP whose flows may lead to former backends.
#[derive(Debug, Default)]
pub(super) struct StaleFlows(BTreeSet<FrontendKey>);

impl StaleFlows {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes the frontends that a change concerns, before it is ingested.
    pub(super) fn note(&mut self, desired: &Desired, deltas: &[ServicesDelta]) {
        let is_of_flows = |delta: &&ServicesDelta| match delta {
            ServicesDelta::Port { id, serving, .. } => {
                desired.ports.get(id).is_some_and(|port| port.serving != *serving)
            }
            ServicesDelta::Frontend(..) | ServicesDelta::FrontendRemoved(_) => true,
            _ => false,
        };
        for delta in deltas {
            if let ServicesDelta::NodePorts(version, _) = delta {
                let of_node = FrontendAddress::NodePort(*version);
                let keys = desired.frontends.keys().filter(|key| key.address == of_node);
                self.0.extend(keys.filter(|key| key.protocol == Protocol::UDP));
            }
        }
        let concerned = deltas.iter().filter(is_of_flows).flat_map(|delta| desired.concerned(delta));
        self.0.extend(concerned.filter(|key| key.protocol == Protocol::UDP));
    }

    /// Notes all frontends: while the table was another one, flows may have begun that it would not have.
    pub(super) fn note_all(&mut self, desired: &Desired) {
        self.0.extend(desired.frontends.keys().filter(|key| key.protocol == Protocol::UDP));
    }

    /// Forgets the flows whose backend does not serve, and those that were not translated. Returns their number. After an error, the frontends
    /// are still noted.
    pub(super) fn forget(
        &mut self,
        desired: &Desired,
        conntrack: &mut Conntrack,
    ) -> tortie_kernel::Result<usize> {
        let own = if self.needs_own_addresses(desired) { own_addresses()? } else { BTreeSet::new() };
        let is_stale = |connection: &Connection| self.is_stale(desired, &own, connection);
        let forgotten = conntrack.forget_connections(is_stale)?;
        self.0.clear();
        Ok(forgotten)
    }

    fn needs_own_addresses(&self, desired: &Desired) -> bool {
        let is_at_several = |key: &FrontendKey| match key.address {
            FrontendAddress::Address(_) => false,
            FrontendAddress::NodePort(version) => {
                !matches!(desired.node_ports.get(&family(version)), Some(NodePortPlace::Primary(_)) | None)
            }
        };
        self.0.iter().any(is_at_several)
    }

    fn is_stale(&self, desired: &Desired, own: &BTreeSet<IpAddr>, connection: &Connection) -> bool {
        let Connection { protocol, requested, replier } = *connection;
        let version = IpVersion::of(&requested.ip());
        let at = |address| FrontendKey { address, protocol, port: requested.port() };
        let by_address = at(FrontendAddress::Address(requested.ip()));
        let by_node = at(FrontendAddress::NodePort(version));
        // An address of a Service takes precedence over node ports, also where it has no frontend any more.
        let key = match (self.0.contains(&by_address), self.0.contains(&by_node)) {
            (true, _) => by_address,
            (false, true)
                if !desired.frontends.contains_key(&by_address)
                    && accepts_node_ports(desired, own, requested.ip()) =>
            {
                by_node
            }
            _ => return false,
        };
        match desired.frontends.get(&key) {
            Some(frontend) => {
                let port = desired.ports.get(&frontend.service_port);
                port.is_none_or(|port| !port.serving.contains(&replier))
            }
            None => is_translated(requested, replier),
        }
    }
}

/// True if somebody else answers than the client asked.
fn is_translated(requested: SocketAddr, replier: SocketAddr) -> bool {
    requested != replier
}

fn accepts_node_ports(desired: &Desired, own: &BTreeSet<IpAddr>, address: IpAddr) -> bool {
    match desired.node_ports.get(&family(IpVersion::of(&address))) {
        Some(NodePortPlace::Primary(primary)) => *primary == Some(address),
        Some(NodePortPlace::AllLocal) => own.contains(&address),
        Some(NodePortPlace::LocalIn(networks)) => {
            own.contains(&address) && networks.iter().any(|network| network.contains(&address))
        }
        None => false,
    }
}

/// The addresses of the node, without those of the loopback network.
fn own_addresses() -> tortie_kernel::Result<BTreeSet<IpAddr>> {
    let addresses = RouteSocket::open()?.addresses()?;
    let own = addresses.iter().map(|address| address.address);
    Ok(own.filter(|address| !address.is_loopback()).collect())
}

//! One parsed ACL.

use std::net::IpAddr;

use ipnet::IpNet;
use tortie_hcn::schema::{Acl, AclAction, AclDirection};

use super::{Packet, PacketDirection, Verdict};
use crate::addresses::{Addresses, PortRanges, Ranges, any_cidr, ports};
use crate::config::{Config, SetReading, SeveralSets};
use crate::sets::Sets;

/// Why an ACL cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotUnderstood(pub String);

/// "Any protocol", as HNS writes it.
const ANY_PROTOCOL: u16 = 256;

#[derive(Debug, Clone)]
pub(super) struct Rule {
    pub(super) id: String,
    pub(super) direction: PacketDirection,
    pub(super) verdict: Verdict,
    pub(super) priority: u16,
    protocols: Vec<u16>,
    local: AddressField,
    remote: AddressField,
    local_ports: PortRanges,
    remote_ports: PortRanges,
    reading: SetReading,
}

/// An address field of an ACL.
#[derive(Debug, Clone)]
enum AddressField {
    /// The field is empty.
    Any,
    /// Members by address and members by set, separately, because the two may refer to different ends of a packet.
    Of { addresses: Addresses, sets: Addresses },
}

impl Rule {
    pub(super) fn new(acl: &Acl, sets: &Sets, config: &Config) -> Result<Rule, NotUnderstood> {
        let protocols = acl.protocols.split(',').filter(|part| !part.is_empty());
        let protocols = protocols.map(|part| {
            let number = part.parse().ok().filter(|number| *number <= ANY_PROTOCOL);
            number.ok_or_else(|| NotUnderstood(format!("{part:?} is not a protocol number")))
        });
        let list = |text| {
            ports(text).map_err(|part| NotUnderstood(format!("{part:?} is no port or range of ports")))
        };
        Ok(Rule {
            id: acl.id.clone(),
            direction: match acl.direction {
                AclDirection::In => PacketDirection::In,
                AclDirection::Out => PacketDirection::Out,
                AclDirection::Unknown(ref text) => return Err(NotUnderstood(format!("Direction {text:?}"))),
            },
            verdict: match acl.action {
                AclAction::Allow => Verdict::Allow,
                AclAction::Block => Verdict::Block,
                // Pass is valid only in a TierAcl.
                ref other => return Err(NotUnderstood(format!("Action {other}"))),
            },
            priority: acl.priority,
            protocols: protocols.collect::<Result<_, _>>()?,
            local: AddressField::new(&acl.local_addresses, sets, config)?,
            remote: AddressField::new(&acl.remote_addresses, sets, config)?,
            local_ports: list(&acl.local_ports)?,
            remote_ports: list(&acl.remote_ports)?,
            reading: config.set_reading,
        })
    }

    pub(super) fn matches(&self, packet: &Packet) -> bool {
        let protocol = u16::from(packet.protocol);
        // Sources disagree on whether HNS matches SCTP ports. Tests make sure that nothing depends on it.
        let has_ports = matches!(packet.protocol, 6 | 17 | 132);
        let port = |list: &PortRanges, port: u16| match list {
            Ranges::Any => true,
            some => has_ports && some.contains(port),
        };
        let (local, remote) = (packet.local, packet.remote);
        let (set_local, set_remote) = match (self.reading, packet.direction) {
            // The source of an incoming packet is the peer.
            (SetReading::Flow, PacketDirection::In) => (remote, local),
            _ => (local, remote),
        };
        self.direction == packet.direction
            && (self.protocols.is_empty()
                || self.protocols.iter().any(|p| *p == protocol || *p == ANY_PROTOCOL))
            && self.local.holds(local, set_local)
            && self.remote.holds(remote, set_remote)
            && port(&self.local_ports, packet.local_port)
            && port(&self.remote_ports, packet.remote_port)
    }
}

impl AddressField {
    /// Parses a comma-separated list of addresses and CIDRs, or of set identifiers. Strict mode rejects a mixture,
    /// because no source describes it. Otherwise the field matches members of any of the addresses or of the sets.
    fn new(list: &str, sets: &Sets, config: &Config) -> Result<AddressField, NotUnderstood> {
        if list.is_empty() {
            return Ok(AddressField::Any);
        }
        let (mut nets, mut named): (Vec<IpNet>, Vec<&Addresses>) = (vec![], vec![]);
        for part in list.split(',') {
            match (any_cidr(part, config), sets.members(part)) {
                (Some(net), _) => nets.push(net),
                (None, Some(members)) => named.push(members),
                (None, None) => {
                    return Err(NotUnderstood(format!("{part:?} is no address, and no set has that Id")));
                }
            }
        }
        if config.strict && !nets.is_empty() && !named.is_empty() {
            return Err(NotUnderstood(format!("{list:?} has addresses and sets in one field")));
        }
        let is_ipv6 = |net: &IpNet| matches!(net, IpNet::V6(_));
        if config.strict && nets.iter().any(is_ipv6) && !nets.iter().all(is_ipv6) {
            return Err(NotUnderstood(format!("{list:?} has addresses of both families in one field")));
        }
        let join = match config.several_sets {
            SeveralSets::Union => Ranges::or,
            SeveralSets::Intersection => Ranges::and,
        };
        let sets = named.into_iter().cloned().reduce(|all, one| join(&all, &one));
        Ok(AddressField::Of {
            addresses: Addresses::of_nets(nets),
            sets: sets.unwrap_or_else(Addresses::none),
        })
    }

    fn holds(&self, as_address: IpAddr, as_set: IpAddr) -> bool {
        match self {
            AddressField::Any => true,
            AddressField::Of { addresses, sets } => addresses.contains(as_address) || sets.contains(as_set),
        }
    }
}

//! What ACLs of HNS cannot express, so that Windows allows less than the policy: each exception with its name, and
//! with the condition of an endpoint that is narrower because of it.

use anyhow::{Result, ensure};
use tortie_api::net::Protocol;
use tortie_dataplane::{Condition, Reason};
use tortie_hcn::schema::{Acl, Endpoint};

use crate::random::Tally;

/// What an ACL cannot be about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exception {
    /// Types and codes of ICMP: an ACL has no field for them.
    IcmpTypes,
    /// SCTP ports: it is unknown whether HNS matches them.
    SctpPorts,
}

impl Exception {
    /// All of them.
    pub const ALL: [Exception; 2] = [Exception::IcmpTypes, Exception::SctpPorts];

    /// The exception for flows of this protocol.
    #[must_use]
    pub fn of(protocol: Protocol) -> Option<Self> {
        match protocol {
            Protocol::ICMP | Protocol::ICMPV6 => Some(Self::IcmpTypes),
            Protocol::SCTP => Some(Self::SctpPorts),
            _ => None,
        }
    }

    /// The reason of its conditions.
    #[must_use]
    pub fn reason(self) -> Reason {
        match self {
            Self::IcmpTypes => Reason::IcmpTypeNotExpressible,
            Self::SctpPorts => Reason::SctpPortNotExpressible,
        }
    }

    /// What such flows count as.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IcmpTypes => "narrower: ICMP types",
            Self::SctpPorts => "narrower: ports of SCTP",
        }
    }

    /// Whether the condition reports it.
    #[must_use]
    pub fn is_reported_by(self, condition: &Condition) -> bool {
        condition.reason == self.reason()
    }

    /// The limit above which it is no exception any more: a fiftieth of all flows.
    #[must_use]
    pub fn too_many(tally: &Tally) -> Option<String> {
        let (all, _) = tally.of("all");
        Self::ALL.into_iter().find_map(|exception| {
            let (narrower, _) = tally.of(exception.name());
            (narrower * 50 >= all).then(|| format!("{narrower} of {all} flows are {}", exception.name()))
        })
    }
}

/// Checks that no ACL of these endpoints concerns SCTP ports, by the number of SCTP or for all protocols.
///
/// # Errors
/// One does, or cannot be parsed.
pub fn no_acl_is_about_ports_of_sctp(endpoints: &[Endpoint]) -> Result<()> {
    const SCTP_OR_ANY: [&str; 3] = ["132", "256", ""];
    for policy in endpoints.iter().flat_map(|endpoint| &endpoint.policies) {
        let Some(acl) = policy.settings::<Acl>()? else { continue };
        let has_ports = !(acl.local_ports.is_empty() && acl.remote_ports.is_empty());
        let of_sctp = acl.protocols.split(',').any(|protocol| SCTP_OR_ANY.contains(&protocol));
        ensure!(!(has_ports && of_sctp), "ports of SCTP: {acl:?}");
    }
    Ok(())
}

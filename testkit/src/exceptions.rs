//! What ACLs of HNS cannot say, so that Windows allows less than the policy: each exception by its name, with the condition
//! that an endpoint bears where it is narrower for that.

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
    /// Ports of SCTP: whether HNS matches them is not known.
    SctpPorts,
}

impl Exception {
    /// All of them.
    pub const ALL: [Exception; 2] = [Exception::IcmpTypes, Exception::SctpPorts];

    /// The one that flows of this protocol may fall under.
    #[must_use]
    pub fn of(protocol: Protocol) -> Option<Self> {
        match protocol {
            Protocol::ICMP => Some(Self::IcmpTypes),
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

    /// Whether the condition tells of it.
    #[must_use]
    pub fn is_told_by(self, condition: &Condition) -> bool {
        condition.reason == self.reason()
    }

    /// What there is too much of to be called an exception: of all flows a fiftieth is.
    #[must_use]
    pub fn too_many(asked: &Tally) -> Option<String> {
        let (all, _) = asked.of("all");
        Self::ALL.into_iter().find_map(|exception| {
            let (narrower, _) = asked.of(exception.name());
            (narrower * 50 >= all).then(|| format!("{narrower} of {all} flows are {}", exception.name()))
        })
    }
}

/// No ACL of these endpoints is about ports of SCTP, by its own number or as one of any protocol.
///
/// # Errors
/// One is, or cannot be read.
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

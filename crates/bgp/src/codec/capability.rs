//! Capabilities, which the two ends announce in OPEN (RFC 5492).

use super::family::Family;
use super::wire::{Reader, with_u8_length};

/// A capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capability {
    /// Routes of a family, by its numbers (RFC 4760).
    Multiprotocol {
        /// The address family.
        afi: u16,
        /// The subsequent address family.
        safi: u8,
    },
    /// The end sends its routes again on request (RFC 2918).
    RouteRefresh,
    /// Next hops of another family: (AFI, SAFI, AFI of the next hop) (RFC 8950).
    ExtendedNextHop(Vec<(u16, u16, u16)>),
    /// Routes survive a restart of the end (RFC 4724).
    GracefulRestart(GracefulRestart),
    /// The end's number, and that it understands numbers of four bytes (RFC 6793).
    FourOctetAs(u32),
    /// The end marks beginning and end of what it sends again (RFC 7313).
    EnhancedRouteRefresh,
    /// One that Tortie does not know.
    Unknown {
        /// Its code.
        code: u8,
        /// Its content.
        data: Vec<u8>,
    },
}

/// What an end promises for the time of its restart (RFC 4724 3, RFC 8538 2).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GracefulRestart {
    /// Whether it has just restarted.
    pub restarted: bool,
    /// Whether routes also survive a NOTIFICATION that is no hard reset.
    pub notification: bool,
    /// How many seconds until it is back, at most 4095.
    pub restart_time: u16,
    /// The families, by their numbers, and whether it has forwarded packets all the time.
    pub families: Vec<(u16, u8, bool)>,
}

impl GracefulRestart {
    /// Whether the family is among those that survive, and if so, whether packets were forwarded all the time.
    #[must_use]
    pub fn forwarding(&self, family: Family) -> Option<bool> {
        let found =
            self.families.iter().find(|(afi, safi, _)| (*afi, *safi) == (family.afi(), family.safi()))?;
        Some(found.2)
    }
}

/// The most seconds that fit into the capability.
const LONGEST_RESTART: u16 = 0xfff;
const RESTARTED: u16 = 0x8000;
const NOTIFICATION: u16 = 0x4000;
const FORWARDING: u8 = 0x80;

impl Capability {
    /// The capability of a family.
    #[must_use]
    pub fn family(family: Family) -> Self {
        Self::Multiprotocol { afi: family.afi(), safi: family.safi() }
    }

    /// Reads the capabilities of one optional parameter; `None` if a length does not fit.
    pub(super) fn decode_all(mut bytes: Reader<'_>) -> Option<Vec<Self>> {
        let mut capabilities = Vec::new();
        while !bytes.is_empty() {
            let code = bytes.u8()?;
            let length = bytes.u8()?;
            capabilities.push(Self::decode(code, Reader::new(bytes.take(usize::from(length))?))?);
        }
        Some(capabilities)
    }

    fn decode(code: u8, mut data: Reader<'_>) -> Option<Self> {
        let capability = match code {
            1 => {
                let (afi, _reserved, safi) = (data.u16()?, data.u8()?, data.u8()?);
                Self::Multiprotocol { afi, safi }
            }
            2 => Self::RouteRefresh,
            5 => {
                let mut triples = Vec::new();
                while !data.is_empty() {
                    triples.push((data.u16()?, data.u16()?, data.u16()?));
                }
                Self::ExtendedNextHop(triples)
            }
            64 => {
                let flags = data.u16()?;
                let mut families = Vec::new();
                while !data.is_empty() {
                    families.push((data.u16()?, data.u8()?, data.u8()? & FORWARDING != 0));
                }
                Self::GracefulRestart(GracefulRestart {
                    restarted: flags & RESTARTED != 0,
                    notification: flags & NOTIFICATION != 0,
                    restart_time: flags & LONGEST_RESTART,
                    families,
                })
            }
            65 => Self::FourOctetAs(data.u32()?),
            70 => Self::EnhancedRouteRefresh,
            _ => Self::Unknown { code, data: data.rest().to_vec() },
        };
        data.is_empty().then_some(capability)
    }

    fn code(&self) -> u8 {
        match self {
            Self::Multiprotocol { .. } => 1,
            Self::RouteRefresh => 2,
            Self::ExtendedNextHop(_) => 5,
            Self::GracefulRestart(_) => 64,
            Self::FourOctetAs(_) => 65,
            Self::EnhancedRouteRefresh => 70,
            Self::Unknown { code, .. } => *code,
        }
    }

    /// Writes code, length and content.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.code());
        with_u8_length(out, |out| match self {
            Self::Multiprotocol { afi, safi } => {
                out.extend(afi.to_be_bytes());
                out.extend([0, *safi]);
            }
            Self::RouteRefresh | Self::EnhancedRouteRefresh => {}
            Self::ExtendedNextHop(triples) => {
                for number in triples.iter().flat_map(|(afi, safi, next_hop)| [afi, safi, next_hop]) {
                    out.extend(number.to_be_bytes());
                }
            }
            Self::GracefulRestart(restart) => {
                let mut flags = restart.restart_time.min(LONGEST_RESTART);
                flags |= if restart.restarted { RESTARTED } else { 0 };
                flags |= if restart.notification { NOTIFICATION } else { 0 };
                out.extend(flags.to_be_bytes());
                for (afi, safi, forwarding) in &restart.families {
                    out.extend(afi.to_be_bytes());
                    out.extend([*safi, if *forwarding { FORWARDING } else { 0 }]);
                }
            }
            Self::FourOctetAs(number) => out.extend(number.to_be_bytes()),
            Self::Unknown { data, .. } => out.extend(data),
        });
    }
}

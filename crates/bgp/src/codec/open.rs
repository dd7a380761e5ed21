//! OPEN (RFC 4271 4.2, with extended optional parameters of RFC 9072).

use std::net::Ipv4Addr;

use super::as_path::AS_TRANS;
use super::capability::{Capability, GracefulRestart};
use super::family::{Families, Family};
use super::notification::{Notification, code, open};
use super::wire::{Reader, with_u8_length, with_u16_length};

/// The first message of an end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// The number of the autonomous system in two bytes; see [`as_number`](Self::as_number).
    pub two_octet_as: u16,
    /// The proposed hold time, in seconds; 0 for none.
    pub hold_time: u16,
    /// The BGP identifier.
    pub identifier: Ipv4Addr,
    /// The capabilities.
    pub capabilities: Vec<Capability>,
}

/// The only version.
const VERSION: u8 = 4;
/// The type of the optional parameter with capabilities.
const CAPABILITIES: u8 = 2;
/// The type that announces extended parameters (RFC 9072), and the length that is written with it.
const EXTENDED: u8 = 255;

impl Open {
    /// An OPEN with the number in both forms.
    #[must_use]
    pub fn new(as_number: u32, hold_time: u16, identifier: Ipv4Addr, others: Vec<Capability>) -> Self {
        let mut capabilities = vec![Capability::FourOctetAs(as_number)];
        capabilities.extend(others);
        let two_octet_as = u16::try_from(as_number).unwrap_or(AS_TRANS);
        Self { two_octet_as, hold_time, identifier, capabilities }
    }

    /// The number of the autonomous system.
    #[must_use]
    pub fn as_number(&self) -> u32 {
        self.four_octet_as().unwrap_or_else(|| u32::from(self.two_octet_as))
    }

    /// The number of the capability, which also says that this end understands numbers of four bytes.
    #[must_use]
    pub fn four_octet_as(&self) -> Option<u32> {
        self.capabilities.iter().find_map(|capability| match capability {
            Capability::FourOctetAs(number) => Some(*number),
            _ => None,
        })
    }

    /// The families; without any capability it is IPv4 alone (RFC 4760 8).
    #[must_use]
    pub fn families(&self) -> Families {
        let mut any = false;
        let mut families = Families::default();
        for capability in &self.capabilities {
            if let Capability::Multiprotocol { afi, safi } = capability {
                any = true;
                Family::from_numbers(*afi, *safi).into_iter().for_each(|family| families.insert(family));
            }
        }
        if !any {
            families.insert(Family::Ipv4);
        }
        families
    }

    /// The promise for a restart: the last one counts (RFC 4724 3).
    #[must_use]
    pub fn graceful_restart(&self) -> Option<&GracefulRestart> {
        self.capabilities.iter().rev().find_map(|capability| match capability {
            Capability::GracefulRestart(restart) => Some(restart),
            _ => None,
        })
    }

    /// Whether the end has the capability.
    #[must_use]
    pub fn has(&self, wanted: &Capability) -> bool {
        self.capabilities.contains(wanted)
    }

    /// Whether the end takes IPv6 next hops for IPv4 (RFC 8950).
    #[must_use]
    pub fn has_extended_next_hop(&self) -> bool {
        self.capabilities.iter().any(|capability| match capability {
            Capability::ExtendedNextHop(triples) => triples.contains(&(1, 1, 2)),
            _ => false,
        })
    }

    /// Reads what follows the header. Whether number, hold time and identifier are acceptable is decided by the
    /// session.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Notification> {
        let unspecific = || Notification::new(code::OPEN, 0);
        let mut reader = Reader::new(bytes);
        let version = reader.u8().ok_or_else(unspecific)?;
        if version != VERSION {
            let supported = u16::from(VERSION).to_be_bytes();
            return Err(Notification::with(code::OPEN, open::UNSUPPORTED_VERSION, supported));
        }
        let fixed = |reader: &mut Reader<'_>| Some((reader.u16()?, reader.u16()?, reader.ipv4()?));
        let (two_octet_as, hold_time, identifier) = fixed(&mut reader).ok_or_else(unspecific)?;
        let parameters = parameters(reader).ok_or_else(unspecific)?;
        let mut capabilities = Vec::new();
        for (kind, value) in parameters {
            if kind != CAPABILITIES {
                return Err(Notification::new(code::OPEN, open::UNSUPPORTED_PARAMETER));
            }
            capabilities.extend(Capability::decode_all(Reader::new(value)).ok_or_else(unspecific)?);
        }
        Ok(Self { two_octet_as, hold_time, identifier, capabilities })
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.push(VERSION);
        out.extend(self.two_octet_as.to_be_bytes());
        out.extend(self.hold_time.to_be_bytes());
        out.extend(self.identifier.octets());
        let mut capabilities = Vec::new();
        self.capabilities.iter().for_each(|capability| capability.encode(&mut capabilities));
        if capabilities.is_empty() {
            out.push(0);
        } else if capabilities.len() + 2 < usize::from(EXTENDED) {
            with_u8_length(out, |out| {
                out.push(CAPABILITIES);
                with_u8_length(out, |out| out.extend(&capabilities));
            });
        } else {
            out.extend([EXTENDED, EXTENDED]);
            with_u16_length(out, |out| {
                out.push(CAPABILITIES);
                with_u16_length(out, |out| out.extend(&capabilities));
            });
        }
    }
}

/// The optional parameters, as type and value. `None` if a length does not fit.
fn parameters(mut reader: Reader<'_>) -> Option<Vec<(u8, &[u8])>> {
    let mut length = usize::from(reader.u8()?);
    let mut ahead = reader;
    // The length before the type has no meaning then, except for 0, which says that nothing follows.
    let is_extended = length > 0 && ahead.u8() == Some(EXTENDED);
    if is_extended {
        length = usize::from(ahead.u16()?);
        reader = ahead;
    }
    if reader.len() != length {
        return None;
    }
    let mut parameters = Vec::new();
    while !reader.is_empty() {
        let kind = reader.u8()?;
        let length = if is_extended { usize::from(reader.u16()?) } else { usize::from(reader.u8()?) };
        parameters.push((kind, reader.take(length)?));
    }
    Some(parameters)
}

//! Messages as bytes and as values. Nothing here panics, whatever a peer sends.

mod as_path;
mod attribute_decode;
mod attributes;
mod capability;
mod community;
mod family;
mod malformed;
mod message;
pub mod notification;
mod open;
mod prefix;
mod update;
mod wire;

pub use as_path::{AsPath, Segment, SegmentKind};
pub use attributes::{Aggregator, Attributes, NextHop, Origin, UnknownAttribute};
pub use capability::{Capability, GracefulRestart};
pub use community::{AnyCommunity, Community, LargeCommunity, NotACommunity};
pub use family::{Families, Family};
pub use malformed::{Malformed, Treatment};
pub use message::length;
pub use notification::Notification;
pub use open::Open;
pub use update::{Announcement, Update, encode_announcement, encode_end_of_rib, encode_withdrawal};

use message::{Type, split, with_header};
use notification::code;

/// What the two ends have agreed on, as far as the meaning of bytes depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// Whether numbers of autonomous systems have four bytes (RFC 6793).
    pub four_octet: bool,
    /// Whether both ends are in one autonomous system.
    pub internal: bool,
    /// Whether IPv4 routes may have IPv6 next hops (RFC 8950).
    pub extended_next_hop: bool,
    /// The families of routes.
    pub families: Families,
}

/// What a ROUTE-REFRESH says (RFC 7313).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefreshKind {
    /// Send your routes again.
    Request,
    /// Here they begin.
    Begin,
    /// Here they end.
    End,
    /// Unknown; it must be ignored.
    Other(u8),
}

impl RefreshKind {
    fn number(self) -> u8 {
        match self {
            Self::Request => 0,
            Self::Begin => 1,
            Self::End => 2,
            Self::Other(number) => number,
        }
    }

    fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Request,
            1 => Self::Begin,
            2 => Self::End,
            other => Self::Other(other),
        }
    }
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The first message of an end.
    Open(Open),
    /// Routes that come and go.
    Update(Update),
    /// Why the session ends.
    Notification(Notification),
    /// The end is there.
    Keepalive,
    /// About routes that are sent again (RFC 2918, RFC 7313).
    RouteRefresh {
        /// The address family.
        afi: u16,
        /// The subsequent address family.
        safi: u8,
        /// What it says.
        kind: RefreshKind,
    },
}

impl Message {
    /// Reads a whole message, as long as [`length`] says.
    ///
    /// # Errors
    /// The message is wrong; the session must end with this notification.
    pub fn decode(message: &[u8], context: &Context) -> Result<Self, Notification> {
        let (kind, content) = split(message)?;
        Ok(match kind {
            Type::Open => Self::Open(Open::decode(content)?),
            Type::Update => Self::Update(Update::decode(content, context)?),
            Type::Notification => match content {
                [code, subcode, data @ ..] => {
                    Self::Notification(Notification { code: *code, subcode: *subcode, data: data.to_vec() })
                }
                _ => return Err(Notification::new(code::HEADER, notification::header::BAD_LENGTH)),
            },
            Type::Keepalive => Self::Keepalive,
            Type::RouteRefresh => match content {
                [high, low, kind, safi] => Self::RouteRefresh {
                    afi: u16::from_be_bytes([*high, *low]),
                    safi: *safi,
                    kind: RefreshKind::from_number(*kind),
                },
                // RFC 7313 section 5: "Invalid Message Length", with the message.
                _ => return Err(Notification::with(code::ROUTE_REFRESH, 1, message)),
            },
        })
    }
}

/// Writes an OPEN.
#[must_use]
pub fn encode_open(open: &Open) -> Vec<u8> {
    with_header(Type::Open, |out| open.encode(out))
}

/// Writes a NOTIFICATION. Data that do not fit are cut.
#[must_use]
pub fn encode_notification(notification: &Notification) -> Vec<u8> {
    let mut notification = notification.clone();
    notification.data.truncate(message::MAX_LENGTH - message::HEADER_LENGTH - 2);
    with_header(Type::Notification, |out| notification.encode(out))
}

/// Writes a KEEPALIVE.
#[must_use]
pub fn encode_keepalive() -> Vec<u8> {
    with_header(Type::Keepalive, |_| {})
}

/// Writes a ROUTE-REFRESH.
#[must_use]
pub fn encode_refresh(family: Family, kind: RefreshKind) -> Vec<u8> {
    with_header(Type::RouteRefresh, |out| {
        out.extend(family.afi().to_be_bytes());
        out.extend([kind.number(), family.safi()]);
    })
}

//! The frame of messages (RFC 4271 4.1).

use super::notification::{Notification, code, header};

/// The bytes of a header: marker, length and type.
pub(super) const HEADER_LENGTH: usize = 19;
/// The longest message.
pub(super) const MAX_LENGTH: usize = 4096;
const MARKER: [u8; 16] = [0xff; 16];

/// The type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Type {
    Open,
    Update,
    Notification,
    Keepalive,
    RouteRefresh,
}

impl Type {
    pub(super) const ALL: [Self; 5] =
        [Self::Open, Self::Update, Self::Notification, Self::Keepalive, Self::RouteRefresh];

    fn number(self) -> u8 {
        match self {
            Self::Open => 1,
            Self::Update => 2,
            Self::Notification => 3,
            Self::Keepalive => 4,
            Self::RouteRefresh => 5,
        }
    }

    /// Whether a message of this type may have that many bytes.
    fn allows(self, length: usize) -> bool {
        let shortest = match self {
            Self::Open => 29,
            Self::Update | Self::RouteRefresh => 23,
            Self::Notification => 21,
            Self::Keepalive => return length == HEADER_LENGTH,
        };
        (shortest..=MAX_LENGTH).contains(&length)
    }
}

/// The length of the first message of received bytes; `None` if the header is not complete. The message itself may be
/// incomplete.
///
/// # Errors
/// The header is wrong; the session must end with this notification.
pub fn length(bytes: &[u8]) -> Result<Option<usize>, Notification> {
    let Some((header, _)) = bytes.split_first_chunk::<HEADER_LENGTH>() else { return Ok(None) };
    if header[..16] != MARKER {
        return Err(Notification::new(code::HEADER, header::NOT_SYNCHRONIZED));
    }
    let (length, number) = (u16::from_be_bytes([header[16], header[17]]), header[18]);
    let bad_length = || Notification::with(code::HEADER, header::BAD_LENGTH, length.to_be_bytes());
    if !(HEADER_LENGTH..=MAX_LENGTH).contains(&usize::from(length)) {
        return Err(bad_length());
    }
    let known = Type::ALL.into_iter().find(|kind| kind.number() == number);
    let Some(kind) = known else { return Err(Notification::with(code::HEADER, header::BAD_TYPE, [number])) };
    if kind.allows(usize::from(length)) { Ok(Some(usize::from(length))) } else { Err(bad_length()) }
}

/// Splits a whole message into its type and its content.
pub(super) fn split(message: &[u8]) -> Result<(Type, &[u8]), Notification> {
    let number = message.get(HEADER_LENGTH - 1).copied().unwrap_or_default();
    match (length(message)?, Type::ALL.into_iter().find(|kind| kind.number() == number)) {
        (Some(length), Some(kind)) if length == message.len() => Ok((kind, &message[HEADER_LENGTH..])),
        _ => Err(Notification::new(code::HEADER, header::BAD_LENGTH)),
    }
}

/// A message of this type and content.
pub(super) fn with_header(kind: Type, write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = MARKER.to_vec();
    // The length counts the whole message: it is set when the content is known.
    out.extend([0, 0, kind.number()]);
    write(&mut out);
    debug_assert!(out.len() <= MAX_LENGTH, "a message of {} bytes", out.len());
    let length = (out.len() as u16).to_be_bytes();
    out[16..18].copy_from_slice(&length);
    out
}

//! Messages to the kernel and from the kernel.

use std::fmt;
use std::io;

use super::attribute::{Attributes, pad};

pub(super) const NLM_F_REQUEST: u16 = libc::NLM_F_REQUEST as u16;
pub(super) const NLM_F_ACK: u16 = libc::NLM_F_ACK as u16;
pub(super) const NLM_F_DUMP: u16 = libc::NLM_F_DUMP as u16;
pub(super) const NLM_F_DUMP_INTR: u16 = libc::NLM_F_DUMP_INTR as u16;

const HEADER: usize = 16;
const DONE: u16 = libc::NLMSG_DONE as u16;
const ERROR: u16 = libc::NLMSG_ERROR as u16;

/// A message to the kernel, without its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The message type (`RTM_…`, or nfnetlink's subsystem and message).
    pub kind: u16,
    /// `NLM_F_CREATE` and similar flags; REQUEST, ACK and DUMP are added as needed.
    pub flags: u16,
    /// The family's own header, and the attributes.
    pub payload: Vec<u8>,
}

impl Request {
    /// Appends the message to a buffer.
    pub(super) fn write(&self, buffer: &mut Vec<u8>, extra_flags: u16, sequence: u32) {
        let length = (HEADER + self.payload.len()) as u32;
        buffer.extend(length.to_ne_bytes());
        buffer.extend(self.kind.to_ne_bytes());
        buffer.extend((self.flags | NLM_F_REQUEST | extra_flags).to_ne_bytes());
        buffer.extend(sequence.to_ne_bytes());
        buffer.extend(0u32.to_ne_bytes());
        buffer.extend(&self.payload);
        pad(buffer);
    }

    /// The size of the message in bytes, with its header and padding.
    #[must_use]
    pub fn length(&self) -> usize {
        (HEADER + self.payload.len()).next_multiple_of(4)
    }
}

/// A message from the kernel about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The message type.
    pub kind: u16,
    /// The port id of the socket whose request it answers, or whose change it reports.
    pub port: u32,
    /// The family's own header, and the attributes.
    pub payload: Vec<u8>,
}

/// Why the kernel refused a message.
#[derive(Debug)]
pub struct Refusal {
    /// The error number.
    pub source: io::Error,
    /// The kernel's message (extended acknowledgement); often empty.
    pub text: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text.as_str() {
            "" => self.source.fmt(f),
            text => write!(f, "{}: {text}", self.source),
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(source: io::Error) -> Self {
        Self { source, text: String::new() }
    }
}

/// A received message.
#[derive(Debug)]
pub(super) struct Incoming<'a> {
    pub sequence: u32,
    pub flags: u16,
    pub kind: u16,
    pub port: u32,
    pub payload: &'a [u8],
}

/// The meaning of a received message.
#[derive(Debug)]
pub(super) enum Meaning {
    /// A request was accepted, or a dump has ended successfully.
    Done,
    /// A request was refused, or a dump has failed.
    Refused(Refusal),
    /// An object.
    Object,
}

impl Incoming<'_> {
    pub(super) fn meaning(&self) -> Meaning {
        match self.kind {
            DONE | ERROR => match refusal(self) {
                Some(refusal) => Meaning::Refused(refusal),
                None => Meaning::Done,
            },
            _ => Meaning::Object,
        }
    }
}

/// The messages of one datagram.
pub(super) fn split(mut datagram: &[u8]) -> impl Iterator<Item = Incoming<'_>> {
    std::iter::from_fn(move || {
        let header = datagram.first_chunk::<HEADER>()?;
        let u16_at = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let u32_at =
            |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let length = u32_at(0) as usize;
        let payload = datagram.get(HEADER..length)?;
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Incoming { sequence: u32_at(8), flags: u16_at(6), kind: u16_at(4), port: u32_at(12), payload })
    })
}

/// The objects of one datagram, as a dump gives them.
pub(crate) fn objects(datagram: &[u8]) -> Vec<Reply> {
    let objects = split(datagram).filter(|message| matches!(message.meaning(), Meaning::Object));
    objects.map(|it| Reply { kind: it.kind, port: it.port, payload: it.payload.to_vec() }).collect()
}

/// The refusal in an ERROR or DONE message; `None` if it reports success.
fn refusal(message: &Incoming<'_>) -> Option<Refusal> {
    /// `NLMSGERR_ATTR_MSG`, and the flags that say what precedes it (`linux/netlink.h`).
    const TEXT: u16 = 1;
    const CAPPED: u16 = 0x100;
    const ACK_TLVS: u16 = 0x200;

    let code = message.payload.first_chunk().map_or(-libc::EBADMSG, |code| i32::from_ne_bytes(*code));
    if code >= 0 {
        return None;
    }
    let rest = message.payload.get(4..).unwrap_or_default();
    let attributes = if message.kind == DONE {
        rest
    } else {
        let repeated = rest.first_chunk().map_or(0, |length| u32::from_ne_bytes(*length) as usize);
        let skipped = if message.flags & CAPPED != 0 { HEADER } else { repeated.next_multiple_of(4) };
        rest.get(skipped..).unwrap_or_default()
    };
    let has_text = message.flags & ACK_TLVS != 0;
    let text = if has_text { Attributes(attributes).text(TEXT).unwrap_or_default() } else { String::new() };
    Some(Refusal { source: io::Error::from_raw_os_error(code.saturating_neg()), text })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_datagram_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for message in split(&bytes) {
                let _ = message.meaning();
            }
        }

        #[test]
        fn encoded_messages_are_split_again(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5)
        ) {
            let mut buffer = Vec::new();
            for (index, payload) in payloads.iter().enumerate() {
                let request = Request { kind: 20, flags: 0, payload: payload.clone() };
                let before = buffer.len();
                request.write(&mut buffer, NLM_F_ACK, index as u32);
                prop_assert_eq!(buffer.len() - before, request.length());
            }
            let read: Vec<_> = split(&buffer).map(|m| (m.sequence, m.flags, m.payload.to_vec())).collect();
            let put: Vec<_> = payloads.into_iter().enumerate()
                .map(|(index, payload)| (index as u32, NLM_F_ACK | NLM_F_REQUEST, payload)).collect();
            prop_assert_eq!(read, put);
        }
    }
}

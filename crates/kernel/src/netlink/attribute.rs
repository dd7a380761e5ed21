//! Attributes: length, type and value, padded to four bytes, possibly nested.

/// The kernel's limit of an attribute's length, header included (`nla_len` has 16 bits).
pub const MAX_LENGTH: usize = u16::MAX as usize;

const HEADER: usize = 4;
const NESTED: u16 = 1 << 15;
const TYPE_MASK: u16 = 0x3fff;

/// Appends an attribute to a message.
///
/// The value must be shorter than 64 KiB. What this crate encodes is limited by names, addresses, and nests that
/// [`put_nest`] checks.
pub fn put(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    debug_assert!(value.len() + HEADER <= MAX_LENGTH);
    message.extend(((value.len() + HEADER) as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
    pad(message);
}

/// Appends a number in network byte order, as nfnetlink expects it.
pub fn put_u32_be(message: &mut Vec<u8>, kind: u16, value: u32) {
    put(message, kind, &value.to_be_bytes());
}

/// Appends text with its final NUL.
pub fn put_text(message: &mut Vec<u8>, kind: u16, text: &str) {
    put(message, kind, &[text.as_bytes(), &[0]].concat());
}

/// Appends an attribute whose value consists of the attributes that `fill` appends.
///
/// A nest over [`MAX_LENGTH`] cannot be represented: its length becomes 0, which the kernel rejects.
pub fn put_nest(message: &mut Vec<u8>, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
    let start = message.len();
    message.extend([0; HEADER]);
    fill(message);
    let length = message.len() - start;
    let written = u16::try_from(length).unwrap_or(0);
    message[start..start + 2].copy_from_slice(&written.to_ne_bytes());
    message[start + 2..start + 4].copy_from_slice(&(kind | NESTED).to_ne_bytes());
}

/// Pads to the next multiple of four bytes.
pub fn pad(message: &mut Vec<u8>) {
    message.resize(message.len().next_multiple_of(4), 0);
}

/// The attributes in a part of a message. Iteration ends at the first truncated one.
#[derive(Debug, Clone, Copy)]
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (length, rest) = self.0.split_first_chunk::<2>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let value = self.0.get(HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(*kind) & TYPE_MASK, value))
    }
}

impl<'a> Attributes<'a> {
    /// The value of the first attribute of a type.
    #[must_use]
    pub fn get(mut self, kind: u16) -> Option<&'a [u8]> {
        self.find(|(found, _)| *found == kind).map(|(_, value)| value)
    }

    /// The attributes inside the first attribute of a type; none if it is missing.
    #[must_use]
    pub fn nest(self, kind: u16) -> Attributes<'a> {
        Attributes(self.get(kind).unwrap_or_default())
    }

    /// A number in network byte order.
    #[must_use]
    pub fn u32_be(self, kind: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.get(kind)?.try_into().ok()?))
    }

    /// A number in network byte order.
    #[must_use]
    pub fn u64_be(self, kind: u16) -> Option<u64> {
        Some(u64::from_be_bytes(self.get(kind)?.try_into().ok()?))
    }

    /// Text up to the first NUL.
    #[must_use]
    pub fn text(self, kind: u16) -> Option<String> {
        let value = self.get(kind)?;
        let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn attributes_round_trip(values in prop::collection::vec((1u16..100, prop::collection::vec(any::<u8>(), 0..30)), 0..10)) {
            let mut message = Vec::new();
            put_nest(&mut message, 7, |message| {
                for (kind, value) in &values {
                    put(message, *kind, value);
                }
            });
            prop_assert_eq!(message.len() % 4, 0);
            let read: Vec<_> =
                Attributes(&message).nest(7).map(|(kind, value)| (kind, value.to_vec())).collect();
            prop_assert_eq!(read, values);
        }

        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (kind, _) in Attributes(&bytes) {
                let _ = (Attributes(&bytes).text(kind), Attributes(&bytes).u32_be(kind));
            }
        }
    }

    #[test]
    fn a_nest_that_is_too_long_is_not_truncated() {
        let mut message = Vec::new();
        put_nest(&mut message, 1, |message| message.resize(message.len() + 70_000, 0));
        assert_eq!(message[..2], [0, 0]);
    }
}

//! Identifiers as C has them.

use tortie_hcn::Guid;

/// A GUID as C has it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawGuid(u32, u16, u16, [u8; 8]);

impl From<RawGuid> for Guid {
    fn from(RawGuid(a, b, c, rest): RawGuid) -> Guid {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&a.to_be_bytes());
        bytes[4..6].copy_from_slice(&b.to_be_bytes());
        bytes[6..8].copy_from_slice(&c.to_be_bytes());
        bytes[8..].copy_from_slice(&rest);
        Guid::from_bytes(bytes)
    }
}

impl From<Guid> for RawGuid {
    fn from(guid: Guid) -> RawGuid {
        let [a0, a1, a2, a3, b0, b1, c0, c1, rest @ ..] = *guid.as_bytes();
        RawGuid(
            u32::from_be_bytes([a0, a1, a2, a3]),
            u16::from_be_bytes([b0, b1]),
            u16::from_be_bytes([c0, c1]),
            rest,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_the_same_identifier() {
        let guid: Guid = "6b4d1f1c-6f0a-4c52-9d0e-3f2c8f3f9a01".parse().unwrap();
        let raw = RawGuid::from(guid);
        assert_eq!((raw.0, raw.1, raw.2, raw.3[7]), (0x6b4d_1f1c, 0x6f0a, 0x4c52, 1));
        assert_eq!(Guid::from(raw), guid);
    }
}

//! The keys of sets.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The type of a key or of a part of it, with `nft`'s number for it (`datatype.h` of nftables).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Field {
    /// An IPv4 address.
    Ipv4 = 7,
    /// An IPv6 address.
    Ipv6 = 8,
    /// A protocol number.
    Protocol = 12,
    /// A number of 32 bits, in host byte order, that an [`Expr::Random`](super::Expr::Random) loads.
    Random = 4,
    /// A port.
    Port = 13,
    /// A packet mark, in host byte order.
    Mark = 19,
    /// A packet's priority, in host byte order; in a set of ranges with other fields, in network byte order.
    Priority = 23,
    /// The type of an ICMPv6 message.
    Icmpv6Type = 29,
    /// An interface's name.
    Interface = 41,
}

impl Field {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Ipv4,
        Self::Ipv6,
        Self::Protocol,
        Self::Random,
        Self::Port,
        Self::Mark,
        Self::Priority,
        Self::Icmpv6Type,
        Self::Interface,
    ];

    /// Its length in bytes.
    #[must_use]
    pub fn length(self) -> usize {
        match self {
            Self::Protocol | Self::Icmpv6Type => 1,
            Self::Port => 2,
            Self::Ipv4 | Self::Random | Self::Mark | Self::Priority => 4,
            Self::Ipv6 | Self::Interface => 16,
        }
    }
}

/// The key of an element: its bytes as the kernel compares them, each field of a concatenation padded to four bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    bytes: [u8; Self::MAX],
    length: u8,
}

impl Key {
    /// The maximum length of a key in this crate: IPv6 address, protocol and port take 24 bytes.
    pub const MAX: usize = 32;

    /// A key of these bytes; `None` if there are more than [`Key::MAX`].
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut key = Self { bytes: [0; Self::MAX], length: bytes.len() as u8 };
        key.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(key)
    }

    /// A port, or another number of 16 bits.
    #[must_use]
    pub fn port(port: u16) -> Self {
        Self::short(&port.to_be_bytes())
    }

    /// A protocol number, or another byte.
    #[must_use]
    pub fn byte(byte: u8) -> Self {
        Self::short(&[byte])
    }

    /// An address.
    #[must_use]
    pub fn address(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::short(&address.octets()),
            IpAddr::V6(address) => Self::short(&address.octets()),
        }
    }

    /// An interface's name, truncated to 16 bytes; no interface has a longer name.
    #[must_use]
    pub fn interface(name: &str) -> Self {
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(name.bytes()) {
            *to = from;
        }
        Self::short(&bytes)
    }

    /// Two packet marks, or other numbers that the kernel keeps in host byte order.
    #[must_use]
    pub fn numbers(first: u32, second: u32) -> Self {
        Self::short(&[first.to_ne_bytes(), second.to_ne_bytes()].concat())
    }

    /// Two addresses.
    #[must_use]
    pub fn addresses(first: IpAddr, second: IpAddr) -> Self {
        let (first, second) = (Self::address(first), Self::address(second));
        Self::short(&[first.bytes(), second.bytes()].concat())
    }

    /// An interface's name with an address.
    #[must_use]
    pub fn interface_address(name: &str, address: IpAddr) -> Self {
        let name = Self::interface(name);
        match address {
            IpAddr::V4(address) => Self::short(&[name.bytes(), &address.octets()].concat()),
            IpAddr::V6(address) => Self::short(&[name.bytes(), &address.octets()].concat()),
        }
    }

    /// An address with a protocol and a port.
    #[must_use]
    pub fn address_port(address: IpAddr, protocol: u8, port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        let tail = [protocol, 0, 0, 0, high, low, 0, 0];
        match address {
            IpAddr::V4(address) => Self::short(&[&address.octets()[..], &tail].concat()),
            IpAddr::V6(address) => Self::short(&[&address.octets()[..], &tail].concat()),
        }
    }

    /// A protocol with a port.
    #[must_use]
    pub fn protocol_port(protocol: u8, port: u16) -> Self {
        let [high, low] = port.to_be_bytes();
        Self::short(&[protocol, 0, 0, 0, high, low, 0, 0])
    }

    /// A number of 32 bits in host byte order.
    #[must_use]
    pub fn number(number: u32) -> Self {
        Self::short(&number.to_ne_bytes())
    }

    /// This key with another field behind it, padded to four bytes; `None` if that is too long.
    #[must_use]
    pub fn and(&self, field: &[u8]) -> Option<Self> {
        let padding = [0; 3];
        let padding = &padding[..field.len().next_multiple_of(4) - field.len()];
        Self::new(&[self.bytes(), field, padding].concat())
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The next key, as a number in network byte order; `None` after the last.
    #[must_use]
    pub fn next(&self) -> Option<Self> {
        self.step(0xff, 0, u8::wrapping_add)
    }

    /// The key before; `None` before the first.
    #[must_use]
    pub fn previous(&self) -> Option<Self> {
        self.step(0, 0xff, u8::wrapping_sub)
    }

    /// The last key of the same length.
    #[must_use]
    pub fn last(&self) -> Self {
        let mut key = *self;
        key.bytes[..usize::from(self.length)].fill(0xff);
        key
    }

    fn step(&self, turning: u8, turned: u8, step: impl Fn(u8, u8) -> u8) -> Option<Self> {
        let mut key = *self;
        for byte in key.bytes[..usize::from(self.length)].iter_mut().rev() {
            if *byte != turning {
                *byte = step(*byte, 1);
                return Some(key);
            }
            *byte = turned;
        }
        None
    }

    /// A key that is certainly short enough.
    fn short(bytes: &[u8]) -> Self {
        let mut key = Self { bytes: [0; Self::MAX], length: bytes.len() as u8 };
        key.bytes[..bytes.len()].copy_from_slice(bytes);
        key
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes() {
            [a, b, c, d] => Ipv4Addr::new(*a, *b, *c, *d).fmt(f),
            bytes if bytes.len() == 16 && bytes[0].is_ascii_lowercase() => {
                write!(f, "{}", String::from_utf8_lossy(bytes).trim_end_matches('\0'))
            }
            bytes => match <[u8; 16]>::try_from(bytes) {
                Ok(address) => Ipv6Addr::from(address).fmt(f),
                Err(_) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_increment_like_numbers() {
        let key = |text: &str| Key::address(text.parse().unwrap());
        for (one, next) in [("10.0.0.255", "10.0.1.0"), ("0.0.0.0", "0.0.0.1"), ("fd00::ffff", "fd00::1:0")] {
            assert_eq!(key(one).next(), Some(key(next)));
            assert_eq!(key(next).previous(), Some(key(one)));
        }
        assert_eq!(key("255.255.255.255").next(), None);
        assert_eq!(key("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff").next(), None);
        assert_eq!(key("::").previous(), None);
        assert_eq!(Key::port(80).last(), Key::port(65535));
        assert_eq!(Key::new(&[0; 33]), None);
    }
}

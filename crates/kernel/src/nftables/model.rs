//! An nftables table as plain data. The same values are written to the kernel and read back.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::expr::{Expr, Verdict};

/// A table of the family `inet`, which handles IPv4 and IPv6.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// `NFT_TABLE_F_…` flags: see [`Table::OWNER`] and [`Table::PERSIST`].
    pub flags: u32,
    /// The chains, by name.
    pub chains: BTreeMap<String, Chain>,
    /// The named sets and maps, by name.
    pub sets: BTreeMap<String, Set>,
}

impl Table {
    /// `NFT_TABLE_F_OWNER` (Linux 5.12): only the socket that created the table may change it; it disappears with the
    /// socket.
    pub const OWNER: u32 = 2;
    /// `NFT_TABLE_F_PERSIST` (Linux 6.9): with [`OWNER`](Self::OWNER), the table stays and waits for a new owner.
    pub const PERSIST: u32 = 4;

    /// Nobody else can delete or change the table, not even by `nft flush ruleset`, and it stays for the next
    /// process.
    pub const GUARDED: u32 = Self::OWNER | Self::PERSIST;
}

/// A chain of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// Its hook, if it is a base chain; otherwise packets enter it by jump and goto only.
    pub base: Option<BaseChain>,
    /// The rules, in order.
    pub rules: Vec<Rule>,
}

/// The hook of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BaseChain {
    /// The type of the chain.
    pub kind: ChainKind,
    /// The hook.
    pub hook: Hook,
    /// A lower number comes first; 0 is filter, -200 conntrack, -300 raw, 100 source NAT.
    pub priority: i32,
    /// Whether packets that reach the end are dropped; otherwise they are accepted.
    pub drop: bool,
}

/// The type of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainKind {
    /// Verdicts about every packet.
    Filter,
    /// Address translation, only for the first packet of a flow.
    Nat,
}

/// `NF_INET_…` (`linux/netfilter.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Hook {
    /// All arriving packets, before routing.
    Prerouting = 0,
    /// Packets to the host itself.
    Input = 1,
    /// Forwarded packets.
    Forward = 2,
    /// Packets from the host itself.
    Output = 3,
    /// All leaving packets, after routing.
    Postrouting = 4,
}

/// One rule: its expressions are evaluated in order until one does not hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The expressions.
    pub exprs: Vec<Expr>,
    /// The comment in `nft list`: at most [`Rule::MAX_COMMENT_LENGTH`] bytes, empty for none.
    pub comment: String,
}

impl Rule {
    /// The maximum length of a comment in `nft`, in bytes.
    pub const MAX_COMMENT_LENGTH: usize = 128;

    /// A rule with a comment, which is truncated if it is too long.
    #[must_use]
    pub fn new(exprs: Vec<Expr>, comment: &str) -> Self {
        Self { exprs, comment: comment[..comment.floor_char_boundary(Self::MAX_COMMENT_LENGTH)].to_owned() }
    }
}

/// A set, or a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Set {
    /// The type of its elements.
    pub spec: SetSpec,
    /// The elements by key; intervals by their first key.
    pub elements: BTreeMap<Key, Value>,
}

/// The type of the elements of a set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SetSpec {
    /// The fields of a key; more than one is a concatenation.
    pub key: Vec<Field>,
    /// Whether the elements are ranges of keys. Ranges of one set must neither overlap nor touch (of a concatenation:
    /// not overlap).
    pub interval: bool,
    /// The type of the values, in a map.
    pub data: Option<DataKind>,
    /// Whether each element counts the packets that match it. The counts are not part of the value.
    pub counts: bool,
}

impl SetSpec {
    /// A set of single keys.
    #[must_use]
    pub fn hash(key: &[Field]) -> Self {
        Self { key: key.to_vec(), interval: false, data: None, counts: false }
    }

    /// A set of ranges of keys.
    #[must_use]
    pub fn interval(key: &[Field]) -> Self {
        Self { interval: true, ..Self::hash(key) }
    }

    /// A map of single keys to verdicts.
    #[must_use]
    pub fn verdict_map(key: &[Field]) -> Self {
        Self { data: Some(DataKind::Verdict), ..Self::hash(key) }
    }

    /// A map of single keys to numbers.
    #[must_use]
    pub fn number_map(key: &[Field]) -> Self {
        Self { data: Some(DataKind::Number), ..Self::hash(key) }
    }
}

/// The content of an element besides its (first) key. It has the size of a pointer, because a table has hundreds of
/// thousands of elements, most of which have no content.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Value(Option<Box<Content>>);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Content {
    end: Option<Key>,
    data: Option<Data>,
}

impl Value {
    /// The last key of a range, and the value of a key in a map.
    #[must_use]
    pub fn new(end: Option<Key>, data: Option<Data>) -> Self {
        let is_empty = end.is_none() && data.is_none();
        Self((!is_empty).then(|| Box::new(Content { end, data })))
    }

    /// The last key of the range, in an interval set.
    #[must_use]
    pub fn end(&self) -> Option<&Key> {
        self.0.as_ref()?.end.as_ref()
    }

    /// The value of the key, in a map.
    #[must_use]
    pub fn data(&self) -> Option<&Data> {
        self.0.as_ref()?.data.as_ref()
    }
}

/// The type of the values of a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataKind {
    /// Verdicts.
    Verdict,
    /// Numbers of 32 bits, in host byte order.
    Number,
}

/// The value of an element of a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Data {
    /// A verdict.
    Verdict(Verdict),
    /// A number.
    Number(u32),
}

/// One element of a set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Element {
    /// Its key, or the first key of its range.
    pub key: Key,
    /// The rest.
    pub value: Value,
}

impl Element {
    /// A single key.
    #[must_use]
    pub fn key(key: Key) -> Self {
        Self { key, value: Value::default() }
    }

    /// A range of keys, both ends included.
    #[must_use]
    pub fn range(first: Key, last: Key) -> Self {
        Self { key: first, value: Value::new(Some(last), None) }
    }

    /// A key that leads to a verdict.
    #[must_use]
    pub fn verdict(key: Key, verdict: Verdict) -> Self {
        Self { key, value: Value::new(None, Some(Data::Verdict(verdict))) }
    }

    /// A key that leads to a number.
    #[must_use]
    pub fn number(key: Key, number: u32) -> Self {
        Self { key, value: Value::new(None, Some(Data::Number(number))) }
    }
}

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
    /// A port.
    Port = 13,
    /// A packet mark, in host byte order.
    Mark = 19,
    /// The type of an ICMPv6 message.
    Icmpv6Type = 29,
    /// An interface's name.
    Interface = 41,
}

impl Field {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Ipv4, Self::Ipv6, Self::Protocol, Self::Port, Self::Mark, Self::Icmpv6Type, Self::Interface];

    /// Its length in bytes.
    #[must_use]
    pub fn length(self) -> usize {
        match self {
            Self::Protocol | Self::Icmpv6Type => 1,
            Self::Port => 2,
            Self::Ipv4 | Self::Mark => 4,
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

/// A count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets.
    pub packets: u64,
    /// Their bytes, from the IP header on.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of an agent depends on it.
    #[test]
    fn an_element_without_content_takes_a_pointer_beside_its_key() {
        assert_eq!(size_of::<Value>(), size_of::<usize>());
        assert_eq!(Value::new(None, None), Value::default());
        let range = Value::new(Some(Key::port(9)), None);
        assert_eq!((range.end(), range.data()), (Some(&Key::port(9)), None));
    }

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

//! Sets and maps, and their elements.

use std::collections::BTreeMap;
use std::net::{Ipv6Addr, SocketAddr};

use super::key::{Field, Key};
use super::verdict::Verdict;

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
    /// The most elements that rules may put in ([`Expr::Learn`](super::Expr::Learn)), if they do. Such elements are not part of the table.
    pub learned: Option<u32>,
}

impl DataKind {
    /// The kinds of values that a map loads into registers.
    ///
    /// Those to which numbers of others lead come first.
    pub const LOADED: [Self; 5] = [Self::Ipv4Port, Self::Ipv6Port, Self::Number, Self::Ipv6, Self::Priority];
}

impl SetSpec {
    /// A set of single keys.
    #[must_use]
    pub fn hash(key: &[Field]) -> Self {
        Self { key: key.to_vec(), interval: false, data: None, counts: false, learned: None }
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

    /// A map of single keys to values of a kind.
    #[must_use]
    pub fn map(key: &[Field], kind: DataKind) -> Self {
        Self { data: Some(kind), ..Self::hash(key) }
    }

    /// A map to which rules add at most so many elements.
    #[must_use]
    pub fn learned(key: &[Field], kind: DataKind, most: u32) -> Self {
        Self { learned: Some(most), ..Self::map(key, kind) }
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
    /// IPv6 addresses.
    Ipv6,
    /// Numbers of 32 bits that become the priority of a packet, in host byte order.
    Priority,
    /// IPv4 addresses, each with a port, in two registers.
    Ipv4Port,
    /// IPv6 addresses, each with a port, in five registers.
    Ipv6Port,
}

/// The value of an element of a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Data {
    /// A verdict.
    Verdict(Verdict),
    /// A number.
    Number(u32),
    /// An IPv6 address.
    Ipv6(Ipv6Addr),
    /// An address and a port.
    Socket(SocketAddr),
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

    /// A key that leads to an address and a port.
    #[must_use]
    pub fn socket(key: Key, socket: SocketAddr) -> Self {
        Self { key, value: Value::new(None, Some(Data::Socket(socket))) }
    }

    /// A key that leads to a number.
    #[must_use]
    pub fn number(key: Key, number: u32) -> Self {
        Self { key, value: Value::new(None, Some(Data::Number(number))) }
    }
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
}

//! Values of single fields, parsed from text and validated.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use tortie_selector::Selector;

use crate::net::{PortRange, Protocol};

/// A network such as `10.0.0.0/8`. Host bits are accepted and masked, as in Calico.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Cidr(pub IpNet);

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong =
            || D::Error::custom(format!("{text:?} is no network; write it as 10.0.0.0/8 or fd00::/8"));
        let net: IpNet = text.parse().map_err(|_| wrong())?;
        Ok(Self(net.trunc()))
    }
}

/// The networks of a rule: as in Calico, none has host bits.
pub(crate) fn masked<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Cidr>, D::Error> {
    Ok(list::<D, Masked>(deserializer)?.into_iter().map(|Masked(cidr)| cidr).collect())
}

struct Masked(Cidr);

impl<'de> Deserialize<'de> for Masked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let cidr = Cidr::deserialize(serde::de::value::StrDeserializer::<D::Error>::new(&text))?;
        match text.parse::<IpNet>() {
            Ok(net) if net == cidr.0 => Ok(Self(cidr)),
            _ => {
                Err(D::Error::custom(format!("{text:?} has bits behind its prefix; write it as {}", cidr.0)))
            }
        }
    }
}

/// A network in a network set: a bare address is a network of full length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Network(pub IpNet);

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self(address.into()));
        }
        let Cidr(net) = Cidr::deserialize(serde::de::value::StrDeserializer::<D::Error>::new(&text))?;
        Ok(Self(net))
    }
}

/// A port of a Calico rule: a number, a range such as `"8000:9000"`, or a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Port {
    /// A number or a range.
    Range(PortRange),
    /// The name of a container's port.
    Named(String),
}

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortVisitor)
    }
}

struct PortVisitor;

impl Visitor<'_> for PortVisitor {
    type Value = Port;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a port from 1 to 65535, a range such as \"8000:9000\", or a port's name (at most 15 lower-case letters, \
             digits and single dashes)",
        )
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Port, E> {
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| E::invalid_value(Unexpected::Unsigned(number), &self))?;
        Ok(Port::Range(PortRange::single(port)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Port, E> {
        let wrong = || E::invalid_value(Unexpected::Str(text), &PortVisitor);
        // `parse` would accept a sign.
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse::<u16>().ok().filter(|port| *port > 0),
            false => None,
        };
        if let Some(port) = number(text) {
            return Ok(Port::Range(PortRange::single(port)));
        }
        if let Some((first, last)) = text.split_once(':') {
            let range =
                PortRange { first: number(first).ok_or_else(wrong)?, last: number(last).ok_or_else(wrong)? };
            if range.first > range.last {
                return Err(E::custom(format!("the range {text:?} ends before it begins")));
            }
            return Ok(Port::Range(range));
        }
        if is_port_name(text) { Ok(Port::Named(text.to_owned())) } else { Err(wrong()) }
    }
}

/// A protocol of a rule, by name or number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ProtocolName(pub Protocol);

impl<'de> Deserialize<'de> for ProtocolName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ProtocolVisitor { any_case: false })
    }
}

/// Parses a protocol whose name may be in any case.
pub(crate) fn protocol_in_any_case<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ProtocolName, D::Error> {
    deserializer.deserialize_any(ProtocolVisitor { any_case: true })
}

/// Parses a protocol as [`protocol_in_any_case`] does, if there is one.
pub(crate) fn optional_protocol_in_any_case<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<ProtocolName>, D::Error> {
    #[derive(Deserialize)]
    #[serde(transparent)]
    struct AnyCase(#[serde(deserialize_with = "protocol_in_any_case")] ProtocolName);
    Ok(Option::<AnyCase>::deserialize(deserializer)?.map(|AnyCase(protocol)| protocol))
}

struct ProtocolVisitor {
    any_case: bool,
}

impl Visitor<'_> for ProtocolVisitor {
    type Value = ProtocolName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TCP, UDP, ICMP, ICMPv6, SCTP, UDPLite or a number from 1 to 255")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<ProtocolName, E> {
        match u8::try_from(number) {
            Ok(number @ 1..) => Ok(ProtocolName(Protocol(number))),
            _ => Err(E::invalid_value(Unexpected::Unsigned(number), &self)),
        }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ProtocolName, E> {
        if text.bytes().all(|byte| byte.is_ascii_digit())
            && let Ok(number) = text.parse::<u64>()
        {
            return self.visit_u64(number);
        }
        // Calico compares names exactly.
        let exact = |protocol: &Protocol| self.any_case || protocol.to_string() == text;
        let known = Protocol::from_name(text).filter(exact).map(ProtocolName);
        known.ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

/// Whether Kubernetes accepts this as the name of a port (IANA_SVC_NAME): at most 15 lower-case letters, digits and single
/// dashes, with a letter among them, and no dash at either end.
pub(crate) fn is_port_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= 15
        && name.bytes().all(allowed)
        && name.bytes().any(|byte| byte.is_ascii_lowercase())
        && !name.contains("--")
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Whether Calico accepts this as a name: at most 253 lower-case letters, digits, `-` and `.`, with a letter or digit
/// at both ends.
pub(crate) fn is_object_name(name: &str) -> bool {
    let outer =
        |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    name.len() <= 253 && name.bytes().all(allowed) && outer(name.bytes().next()) && outer(name.bytes().last())
}

/// Whether Kubernetes accepts this as the name of a label: `[prefix/]name`.
pub(crate) fn is_label_name(name: &str) -> bool {
    let local = name.rsplit('/').next().unwrap_or(name);
    let prefix = name.strip_suffix(local).unwrap_or_default().trim_end_matches('/');
    let of_prefix = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    !local.is_empty()
        && is_label_value(local)
        && name.split('/').count() <= 2
        && prefix.len() <= 253
        && prefix.bytes().all(of_prefix)
        && !name.starts_with('/')
}

/// Whether Kubernetes accepts this as the value of a label: empty, or at most 63 letters, digits, `-`, `_` and `.`,
/// with a letter or digit at both ends.
pub(crate) fn is_label_value(value: &str) -> bool {
    let outer = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
    value.len() <= 63
        && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && outer(value.bytes().next())
        && outer(value.bytes().last())
}

/// Whether only the cluster may set this label: the namespace, service account or orchestrator of an endpoint, and
/// their labels (`libcalico-go/lib/backend/syncersv1/updateprocessors`).
#[must_use]
pub fn is_reserved_label(name: &str) -> bool {
    name.starts_with("pcns.")
        || name.starts_with("pcsa.")
        || [
            "projectcalico.org/namespace",
            "projectcalico.org/serviceaccount",
            "projectcalico.org/orchestrator",
        ]
        .contains(&name)
}

/// Parses a selector. An empty one is absent; spaces and tabs alone are `all()`, as in Calico's parser.
pub(crate) fn selector<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Selector>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    if text.is_empty() {
        return Ok(None);
    }
    Selector::parse(&text).map(Some).map_err(D::Error::custom)
}

/// Parses a list that may be absent or null.
pub(crate) fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}

/// Parses an address with or without a prefix length, as in node annotations (`10.0.0.1/24`).
#[must_use]
pub(crate) fn address_of(text: &str) -> Option<IpAddr> {
    text.split('/').next().and_then(|address| address.parse().ok())
}

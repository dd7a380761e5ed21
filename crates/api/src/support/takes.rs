//! The types of field values.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use serde_json::Value;

/// The type of a field's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// `true` or `false`.
    Bool,
    /// An integer in a range.
    Integer(i64, i64),
    /// Zero, which means that Tortie chooses, or an integer in a range.
    ZeroOr(i64, i64),
    /// One of these words.
    Word(&'static [&'static str]),
    /// One of these words in any case, or nothing.
    AnyCase(&'static [&'static str]),
    /// A time such as `90s` or `1m30s`.
    Duration,
    /// Any text.
    Text,
    /// A regular expression, or nothing.
    Pattern,
    /// A list of texts.
    Texts,
    /// A number or text.
    NumberOrText,
    /// A port, or text such as a range of ports.
    Port,
    /// A list of ports and ranges of ports.
    Ports,
    /// A list of networks and addresses.
    Nets,
    /// The name of an interface.
    Interface,
    /// A number per second, minute, hour or day.
    Rate,
    /// The first and the last route table of a range.
    RouteTables,
    /// A list of those.
    ListsOfRouteTables,
    /// Names, each with a time.
    Timeouts,
    /// No value is valid.
    Nothing,
    /// An IPv4 address, or nothing.
    Ipv4,
    /// An IPv6 address, or nothing.
    Ipv6,
    /// A mapping.
    Object,
    /// A list of mappings.
    Objects,
}

impl Takes {
    /// Any integer.
    pub const INTEGER: Self = Self::Integer(i64::MIN, i64::MAX);

    /// The problem with a value.
    pub(super) fn problem(self, value: &Value) -> Option<String> {
        let text = value.as_str();
        let list =
            |is_good: fn(&Value) -> bool| value.as_array().is_some_and(|items| items.iter().all(is_good));
        let good = match self {
            Self::Bool => value.is_boolean(),
            Self::Integer(least, most) => {
                value.as_i64().is_some_and(|number| (least..=most).contains(&number))
            }
            Self::ZeroOr(least, most) => {
                value.as_i64().is_some_and(|number| number == 0 || (least..=most).contains(&number))
            }
            Self::Word(words) => text.is_some_and(|text| words.contains(&text)),
            Self::AnyCase(words) => text.is_some_and(|text| {
                text.is_empty() || words.iter().any(|word| word.eq_ignore_ascii_case(text))
            }),
            Self::Duration => text.is_some_and(is_duration),
            Self::Text => text.is_some(),
            // Calico's are Go's, whose syntax is all but the same.
            Self::Pattern => text.is_some_and(|text| regex_syntax::parse(text).is_ok()),
            Self::Texts => list(Value::is_string),
            Self::NumberOrText => value.is_string() || value.is_i64() || value.is_u64(),
            Self::Port => value.is_string() || is_port(value),
            Self::Ports => list(|item| is_port(item) || item.as_str().is_some_and(is_range_of_ports)),
            Self::Nets => list(|item| item.as_str().is_some_and(is_net)),
            Self::Interface => text.is_some_and(is_interface),
            Self::Rate => text.is_some_and(is_rate),
            Self::RouteTables => is_route_tables(value),
            Self::ListsOfRouteTables => list(is_route_tables),
            Self::Timeouts => list(|item| {
                let text = |name: &str| item[name].as_str();
                text("name").is_some_and(is_subsystem) && text("timeout").is_some_and(is_duration)
            }),
            Self::Nothing => false,
            Self::Ipv4 => text.is_some_and(|text| text.is_empty() || text.parse::<Ipv4Addr>().is_ok()),
            Self::Ipv6 => text.is_some_and(|text| text.is_empty() || text.parse::<Ipv6Addr>().is_ok()),
            Self::Object => value.is_object(),
            Self::Objects => list(Value::is_object),
        };
        (!good).then(|| format!("{value} is not {self}"))
    }
}

impl fmt::Display for Takes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("true or false"),
            Self::Integer(i64::MIN, i64::MAX) => f.write_str("a whole number"),
            Self::Integer(least, i64::MAX) => write!(f, "a whole number from {least}"),
            Self::Integer(least, most) => write!(f, "a whole number from {least} to {most}"),
            Self::ZeroOr(least, most) => write!(f, "0 or a whole number from {least} to {most}"),
            Self::Word(words) | Self::AnyCase(words) => {
                f.write_str(&words.join(", ").replacen(", ", " or ", usize::from(words.len() == 2)))
            }
            Self::Duration => f.write_str("a time such as 90s or 1m30s"),
            Self::Text => f.write_str("a text"),
            Self::Pattern => f.write_str("a regular expression"),
            Self::Texts => f.write_str("a list of texts"),
            Self::NumberOrText => f.write_str("a number or text"),
            Self::Port => f.write_str("a port, or a range such as 1024:2048"),
            Self::Ports => f.write_str("a list of ports and ranges such as 30000:32767"),
            Self::Nets => f.write_str("a list of networks and addresses"),
            Self::Interface => f.write_str("the name of an interface"),
            Self::Rate => f.write_str("a rate such as 10/minute"),
            Self::RouteTables => f.write_str("a mapping of min and max"),
            Self::ListsOfRouteTables => f.write_str("a list of mappings of min and max"),
            Self::Timeouts => f.write_str("a list of mappings of name and timeout"),
            Self::Nothing => f.write_str("allowed: name the object node.NAME for settings of one node"),
            Self::Ipv4 => f.write_str("an IPv4 address"),
            Self::Ipv6 => f.write_str("an IPv6 address"),
            Self::Object => f.write_str("a mapping"),
            Self::Objects => f.write_str("a list of mappings"),
        }
    }
}

fn is_port(value: &Value) -> bool {
    value.as_i64().is_some_and(|port| (1..=65_535).contains(&port))
}

/// Whether the text is a port, or two ports with a colon between them.
fn is_range_of_ports(text: &str) -> bool {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    match (first.parse::<u16>(), last.parse::<u16>()) {
        (Ok(first), Ok(last)) => first > 0 && first <= last,
        _ => false,
    }
}

fn is_net(text: &str) -> bool {
    text.parse::<IpNet>().is_ok() || text.parse::<IpAddr>().is_ok()
}

/// Whether the kernel accepts this as the name of an interface.
fn is_interface(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=15).contains(&text.len()) && text.bytes().all(is_good)
}

/// Whether the text is the name of a subsystem of Felix.
fn is_subsystem(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"_ -".contains(&byte);
    !text.is_empty() && text.bytes().all(is_good)
}

/// Whether the text is a rate, as `10/minute`.
fn is_rate(text: &str) -> bool {
    let Some((count, time)) = text.split_once('/') else { return false };
    let few = count.len() <= 4 && !count.starts_with('0') && count.bytes().all(|byte| byte.is_ascii_digit());
    !count.is_empty() && few && ["second", "minute", "hour", "day"].contains(&time)
}

fn is_route_tables(value: &Value) -> bool {
    match (value["min"].as_i64(), value["max"].as_i64()) {
        (Some(min), Some(max)) => 1 <= min && min <= max && max <= i64::from(u32::MAX),
        _ => false,
    }
}

/// Whether the text is a duration in Go's form, in hours, minutes, seconds and milliseconds.
fn is_duration(text: &str) -> bool {
    let mut rest = text;
    while !rest.is_empty() {
        let number = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
        let (number, behind) = rest.split_at(number);
        let unit = ["ms", "s", "m", "h"].into_iter().find_map(|unit| behind.strip_prefix(unit));
        match unit.filter(|_| number.parse::<f64>().is_ok()) {
            Some(behind) => rest = behind,
            None => return false,
        }
    }
    !text.is_empty()
}

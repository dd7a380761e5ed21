//! Values as Go's encoder writes them: without what is empty, with durations, ports and numbers in one form.

use serde_json::{Map, Value, json};

/// Objects that stay although they are empty: Calico's types have them by value, or by a pointer.
const OBJECTS_THAT_STAY: [&str; 19] = [
    "source",
    "destination",
    "controllers",
    "podSelector",
    "namespaceSelector",
    "policy",
    "node",
    "serviceAccount",
    "workloadEndpoint",
    "namespace",
    "loadBalancer",
    "icmp",
    "notICMP",
    "http",
    "nodeMeshPassword",
    "password",
    "serviceAccounts",
    "services",
    "secretKeyRef",
];
/// Mappings whose keys a user chooses. Their values stay as they are, also empty ones.
const FREE: [&str; 5] = ["labelsToApply", "matchLabels", "labels", "annotations", "bpfLogFilters"];
/// Texts that stay although they are empty.
const TEXTS_THAT_STAY: [&str; 2] = ["key", "bpfLogLevel"];
/// Lists that stay although they are empty: there they mean something else than absent ones.
const LISTS_THAT_STAY: [&str; 4] = [
    "failsafeInboundHostPorts",
    "failsafeOutboundHostPorts",
    "externalNodesList",
    "bpfForceTrackPacketsFromIfaces",
];
/// Switches and numbers that go if they are off or zero. Calico has all others by a pointer.
const PLAIN: [&str; 9] = [
    "disabled",
    "natOutgoing",
    "disableBGPExport",
    "doNotTrack",
    "preDNAT",
    "applyOnForward",
    "keepOriginalNextHop",
    "listenPort",
    "blockSize",
];
/// Fields with ports or ranges of ports.
const PORTS: [&str; 4] = ["ports", "notPorts", "natPortRange", "kubeNodePortRanges"];
/// The ends of the names of durations.
const DURATIONS: [&str; 7] = ["Interval", "Period", "Timeout", "TTL", "Time", "Delay", "KeepAlive"];
/// Its fields look like durations and are texts, which may also be `Auto`.
const TEXTS_OF_TIME: &str = "bpfConntrackTimeouts";

/// Brings the fields into the form in which Go writes them.
pub(super) fn canonical(fields: &mut Map<String, Value>) {
    for (name, value) in fields.iter_mut() {
        if name == TEXTS_OF_TIME {
            continue;
        }
        one(name, value);
    }
    fields.retain(|name, value| !is_left_out(name, value));
}

fn one(name: &str, value: &mut Value) {
    if FREE.contains(&name) {
        return;
    }
    match value {
        Value::Object(fields) => {
            if name == "secretKeyRef" {
                fields.entry("key").or_insert_with(|| json!(""));
            }
            canonical(fields);
        }
        Value::Array(items) => items.iter_mut().for_each(|item| one(name, item)),
        Value::String(text) => {
            let is_time = DURATIONS.iter().any(|end| name.ends_with(end));
            if let Some(duration) = duration(text).filter(|_| is_time) {
                *value = json!(duration);
            } else if let Some(port) = port(text).filter(|_| PORTS.contains(&name)) {
                *value = json!(port);
            }
        }
        Value::Number(number) => {
            let whole = number.as_f64().filter(|it| number.is_f64() && it.fract() == 0.0 && it.abs() < 1e15);
            if let Some(whole) = whole {
                *value = json!(whole as i64);
            }
        }
        Value::Null | Value::Bool(_) => {}
    }
}

fn is_left_out(name: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty() && !TEXTS_THAT_STAY.contains(&name),
        Value::Array(items) => items.is_empty() && !LISTS_THAT_STAY.contains(&name),
        Value::Object(fields) => fields.is_empty() && !OBJECTS_THAT_STAY.contains(&name),
        Value::Bool(false) => PLAIN.contains(&name),
        Value::Number(number) => number.as_i64() == Some(0) && PLAIN.contains(&name),
        Value::Bool(true) => false,
    }
}

/// A port, or a range of one port.
fn port(text: &str) -> Option<u16> {
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (first == last && is_number(first)).then(|| first.parse().ok()).flatten()
}

const SECOND: i64 = 1_000_000_000;
const UNITS: [(&str, i64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", SECOND),
    ("m", 60 * SECOND),
    ("h", 3_600 * SECOND),
];

/// A duration as Go writes it (`time.Duration`): `1h` becomes `1h0m0s`.
fn duration(text: &str) -> Option<String> {
    let (sign, unsigned) = match text.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let nanoseconds = nanoseconds(unsigned)?;
    let sign = if nanoseconds == 0 { "" } else { sign };
    Some(format!("{sign}{}", shown(nanoseconds)))
}

fn nanoseconds(text: &str) -> Option<i64> {
    if text == "0" {
        return Some(0);
    }
    let (mut rest, mut sum) = (text, 0_i64);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, behind) = rest.split_at(end);
        let unit_end = behind.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(behind.len());
        let (unit, next) = behind.split_at(unit_end);
        let (_, unit) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let whole: i64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        let digits = fraction.get(..fraction.len().min(9))?;
        let parts: i64 = if digits.is_empty() { 0 } else { digits.parse().ok()? };
        let part = i128::from(parts) * i128::from(unit) / 10_i128.pow(u32::try_from(digits.len()).ok()?);
        sum = sum.checked_add(whole.checked_mul(unit)?)?.checked_add(i64::try_from(part).ok()?)?;
        rest = next;
    }
    (!text.is_empty()).then_some(sum)
}

fn shown(nanoseconds: i64) -> String {
    if nanoseconds == 0 {
        return "0s".to_owned();
    }
    if nanoseconds < SECOND {
        let (unit, name) = match nanoseconds {
            ..1_000 => (1, "ns"),
            1_000..1_000_000 => (1_000, "µs"),
            _ => (1_000_000, "ms"),
        };
        return format!("{}{name}", decimal(nanoseconds, unit));
    }
    let (minutes, seconds) = (nanoseconds / (60 * SECOND), nanoseconds % (60 * SECOND));
    let seconds = format!("{}s", decimal(seconds, SECOND));
    match (minutes / 60, minutes % 60) {
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

/// A number of units, without zeros at its end.
fn decimal(value: i64, unit: i64) -> String {
    let (whole, rest) = (value / unit, value % unit);
    if rest == 0 {
        return whole.to_string();
    }
    let width = unit.ilog10() as usize;
    let digits = format!("{rest:0width$}");
    format!("{whole}.{}", digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By Go's `time.ParseDuration` and `String`.
    #[test]
    fn durations_are_written_as_go_writes_them() {
        let table = [
            ("1h", Some("1h0m0s")),
            ("90m", Some("1h30m0s")),
            ("10s10s", Some("20s")),
            ("1.5s", Some("1.5s")),
            ("500ms", Some("500ms")),
            ("0.0005s", Some("500µs")),
            ("1h1ms", Some("1h0m0.001s")),
            ("-5s", Some("-5s")),
            ("-0s", Some("0s")),
            ("+1m", Some("1m0s")),
            ("0", Some("0s")),
            (".5s", Some("500ms")),
            ("7ns", Some("7ns")),
            ("", None),
            ("5", None),
            ("s", None),
            (".s", None),
            ("1d", None),
            ("9999999999h", None),
        ];
        for (text, expected) in table {
            assert_eq!(duration(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn only_single_ports_become_numbers() {
        for (text, expected) in
            [("80", Some(80)), ("80:80", Some(80)), ("80:81", None), ("http", None), (":", None)]
        {
            assert_eq!(port(text), expected, "{text}");
        }
    }
}

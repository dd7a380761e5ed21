//! Damage to documents, texts and bytes.

use std::ops::Range;

use serde_json::{Map, Value, json};

/// A source of numbers that is fast enough for ten million calls (xorshift).
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }

    pub(super) fn one<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    pub(super) fn text(&mut self, all: &[&'static str]) -> &'static str {
        all[self.below(all.len())]
    }
}

/// Names that the plugin reads, for members that are renamed or added.
const NAMES: [&str; 16] = [
    "cniVersion",
    "name",
    "agentSocket",
    "cni.dev/valid-attachments",
    "prevResult",
    "ipam",
    "type",
    "ips",
    "interfaces",
    "routes",
    "address",
    "sandbox",
    "subnet",
    "containerID",
    "runtimeConfig",
    "NAME",
];

/// Texts that damage puts in place of a whole one.
const WHOLE: [&str; 20] = [
    "",
    "/",
    "..",
    "0.0.0.0",
    "255.255.255.255",
    "0.0.0.0/0",
    "0.0.0.0/32",
    "255.255.255.255/32",
    "10.0.0.0/33",
    "::1/128",
    "usePodCidr",
    "host-local",
    "static",
    "1.1.0",
    "2.0.0",
    "0.2.0",
    "eth0",
    "net1",
    "\u{0}",
    "é",
];

/// Texts that damage puts anywhere.
const TOKENS: [&str; 26] = [
    "",
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "null",
    "true",
    "-1",
    "1e999",
    "18446744073709551616",
    "\u{0}",
    "é",
    "\\ud800",
    "/",
    "255.255.255.255",
    "/32",
    "/0",
    "::1/128",
    ";",
    "=",
    "{\"a\":[[[[[[[[",
    "\"name\":\"x\",",
    "\"cniVersion\":\"1.0.0\",",
];

/// Changes the structure of a document at one to three places.
pub(super) fn damage_document(document: &mut Value, others: &[Value], numbers: &mut Numbers) {
    for _ in 0..=numbers.below(3) {
        let other = place(&mut numbers.one(others).clone(), numbers).take();
        let at = place(document, numbers);
        match numbers.below(8) {
            0 => drop_member(at, numbers),
            1 => duplicate_member(at, numbers),
            2 => *at = of_another_type(numbers),
            3 => *at = nested(at.take(), numbers),
            4 => *at = huge_number(numbers),
            5 => *at = json!(numbers.text(&WHOLE)),
            6 => rename_member(at, numbers),
            _ => *at = other,
        }
    }
}

/// A random part of a document.
fn place<'a>(document: &'a mut Value, numbers: &mut Numbers) -> &'a mut Value {
    let members = members(document);
    if members == 0 || numbers.below(4) == 0 {
        return document;
    }
    let index = numbers.below(members);
    let member = match document {
        Value::Object(object) => object.values_mut().nth(index),
        Value::Array(list) => list.get_mut(index),
        _ => None,
    };
    place(member.expect("it has that many members"), numbers)
}

fn members(document: &Value) -> usize {
    match document {
        Value::Object(object) => object.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    }
}

fn a_name(object: &Map<String, Value>, numbers: &mut Numbers) -> String {
    object.keys().nth(numbers.below(object.len())).cloned().unwrap_or_default()
}

fn drop_member(at: &mut Value, numbers: &mut Numbers) {
    match at {
        Value::Object(object) => drop(object.remove(&a_name(object, numbers))),
        Value::Array(list) if !list.is_empty() => drop(list.remove(numbers.below(list.len()))),
        other => *other = Value::Null,
    }
}

/// A member exists twice: in a list, or under two names.
fn duplicate_member(at: &mut Value, numbers: &mut Numbers) {
    match at {
        Value::Object(object) if !object.is_empty() => {
            let value = object[&a_name(object, numbers)].clone();
            object.insert(numbers.text(&NAMES).to_owned(), value);
        }
        Value::Array(list) if !list.is_empty() => list.push(list[numbers.below(list.len())].clone()),
        other => *other = json!([other, other]),
    }
}

fn rename_member(at: &mut Value, numbers: &mut Numbers) {
    if let Value::Object(object) = at {
        let name = a_name(object, numbers);
        let value = object.remove(&name).unwrap_or_default();
        let renamed = match numbers.below(3) {
            0 => name.to_uppercase(),
            1 => format!("{name} "),
            _ => numbers.text(&NAMES).to_owned(),
        };
        object.insert(renamed, value);
    }
}

fn of_another_type(numbers: &mut Numbers) -> Value {
    match numbers.below(7) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(numbers.below(70_000)),
        3 => json!(-1.5),
        4 => json!([]),
        5 => json!({}),
        _ => json!(""),
    }
}

/// Deeper than the parser follows, sometimes.
fn nested(mut value: Value, numbers: &mut Numbers) -> Value {
    let depth = *numbers.one(&[1, 1, 2, 5, 200]);
    for _ in 0..depth {
        value = if numbers.below(2) == 0 { json!([value]) } else { json!({"x": value}) };
    }
    value
}

fn huge_number(numbers: &mut Numbers) -> Value {
    numbers
        .one(&[
            json!(u64::MAX),
            json!(i64::MIN),
            json!(f64::MAX),
            json!(u32::MAX),
            json!(1_u64 << 53),
            json!(-0.0),
        ])
        .clone()
}

/// The text with some damage.
pub(super) fn damage_text(text: &mut String, numbers: &mut Numbers) {
    for _ in 0..=numbers.below(3) {
        let at = text.floor_char_boundary(numbers.below(text.len() + 1));
        let end = text.floor_char_boundary((at + numbers.below(12)).min(text.len())).max(at);
        match numbers.below(6) {
            0 => text.replace_range(at..end, numbers.text(&TOKENS)),
            1 => text.replace_range(at..end, &numbers.below(300).to_string()),
            2 => text.insert_str(at, &text.clone()[at..end]),
            // A member of the whole document exists twice.
            3 if text.starts_with('{') => text.insert_str(1, numbers.text(&TOKENS)),
            4 => {
                if let Some(place) = quoted(text, at) {
                    text.replace_range(place, numbers.text(&WHOLE));
                }
            }
            _ if numbers.below(8) == 0 => text.truncate(at),
            _ => text.replace_range(at..end, ""),
        }
    }
}

/// Where the first quoted text after a place is.
fn quoted(text: &str, at: usize) -> Option<Range<usize>> {
    let start = at + text[at..].find('"')? + 1;
    Some(start..start + text[start..].find('"')?)
}

/// Replaces some bytes, mostly by such as no UTF-8 has there.
pub(super) fn damage_bytes(bytes: &mut [u8], numbers: &mut Numbers) {
    for _ in 0..=numbers.below(2) {
        let (at, other) = (numbers.below(bytes.len()), numbers.below(256) as u8);
        if let Some(byte) = bytes.get_mut(at) {
            *byte = *numbers.one(&[0xff, 0xc3, 0x80, 0xed, 0, 1, b'"', b'{', b'}', other]);
        }
    }
}

/// Drops, repeats or lengthens a part of `CNI_ARGS`.
pub(super) fn damage_args(text: &mut String, numbers: &mut Numbers) {
    let mut parts: Vec<String> = text.split(';').map(str::to_owned).collect();
    let at = numbers.below(parts.len());
    match numbers.below(5) {
        0 => drop(parts.remove(at)),
        1 => parts.push(parts[at].clone()),
        2 => parts[at] = parts[at].replace('=', ""),
        3 => parts[at].push_str(&"x".repeat(numbers.below(5_000))),
        _ => parts[at].insert(0, ';'),
    }
    *text = parts.join(";");
}
